"""Source: a program as one straight-line Python function.

Problem: looking values up in dicts, building argument lists and deciding what to free costs more than many small
operators do. Idea: decide all of it once and write it down as Python, with operators bound by name and a `del` after
each last use:

    v4 = linear(v2, v0, v1)
    v5 = gelu(v4, approximate='tanh')
    del v4

The function runs one or several *lanes* at once. A lane is a rank; lanes whose operands are the same variables share
one line, so what is replicated is computed once. What lanes share follows from what their inputs share, hence it is
known when the source is written.
"""

from __future__ import annotations

import keyword
import linecache
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import count
from typing import Any, Protocol

import torch

from colofunc.executors.choices import Choices, Chosen
from colofunc.executors.copies import COPIER
from colofunc.executors.kernels import callable_of, check_words, rearrange_text, result_kind
from colofunc.executors.loops import ABSENT as ABSENT
from colofunc.executors.loops import only as only
from colofunc.executors.loops import write_in_loop, write_loop
from colofunc.executors.pools import Pool, in_tier, moves
from colofunc.executors.sharing import Sharing
from colofunc.ops.autocast import as_traced
from colofunc.ops.debug import DEBUG, show
from colofunc.ops.fused import ADDERS
from colofunc.ops.update_lists import MANY
from colofunc.program.facts import kind_of, lifetimes, rearrange_steps, takes_device, written
from colofunc.program.ir import Loop, Node, Program, Ref
from colofunc.program.passes.one_call import runs_of_updates
from colofunc.program.passing import CAST
from colofunc.spec.layout import At

Partition = tuple[tuple[int, ...], ...]  # per input, per lane: which distinct tensor the lane holds

_SERIAL = count()
_PLAIN = (int, bool, str, type(None))


class Wires(Protocol):
    """How collectives are written into the source. `ranks`: the rank of each lane."""

    ranks: Sequence[int]

    def emit(self, writer: Writer, node: Node, kind: str, asynchronous: bool) -> None:
        """Write the lines of one collective, `wait` or layout move and define its result."""

    def in_order(self, actions: Sequence[tuple[int, int]], device: torch.device) -> Iterable[tuple[int, int]]:
        """What a loop in parts goes through: (part, microbatch) one after another."""

    def place(self, axes: Sequence[str], lane: int) -> int:
        """The index of a lane's rank along axes."""

    def here(self, at: At | None) -> tuple[bool, ...]:
        """Whether each lane's rank is at some indices of an axis."""

    def behind(self, writer: Writer, node: Node) -> None:
        """Write lines behind those of any node, if its results need some."""


Tap = Callable[["Writer", int, Node], None]
"""Writes lines of its own behind those of node number `int`, before what died there is freed (see `tap`)."""
Look = Callable[["Writer"], str]


class Writer:
    """Collects the lines of one function."""

    def __init__(
        self,
        program: Program,
        lanes: int,
        device: torch.device,
        wires: Wires,
        partition: Partition,
        bound: Mapping[str, Callable[..., Any]] | None = None,
        sparing: bool = True,
        tap: Tap | None = None,
        look: Look | None = None,
        pool: Pool | None = None,
        whole: Program | None = None,
    ) -> None:
        """`whole`: the program before it was compiled, where it was.

        `sparing`: lanes that share a tensor may compute where a rank of its own would write in place.

        `pool`: where what passes through the host lies; None: each copy allocates.

        `look`: says a line to write behind each node of a loop's body, before what died there is freed.
        """
        self.tap = tap
        self.look = look
        self.pool = pool
        self.start, self._settle = COPIER.start, COPIER.settle  # one object each, so that the source has one name for it
        self.passing = pool.plan if pool is not None else None  # of the program that is written: the step's, or of a loop in it
        self.program = program
        self.lanes = lanes
        self.device = device
        self.wires = wires
        self.where: dict[int, tuple[str, ...]] = {}  # value id -> variable per lane, ABSENT on those where it does not exist
        self.runs = (True,) * lanes  # whether each lane runs the node that is written
        self.lines: list[str] = []
        self.origin: list[int] = []  # node index of each line
        self.names: dict[str, Any] = {}
        self.extra: dict[str, tuple[str, ...]] = {}  # what a value is called -> hidden variables that die with it
        self._bound_names: dict[int, str] = {}
        self._keep: list[Any] = []  # what `_bound_names` knows by id must stay alive
        self._bound = dict(bound or {})
        self._node = -1
        self.sharing = Sharing(self, sparing)
        self.loops: list[tuple[Loop, str]] = []  # loops around the line that is written, and their counters
        self.inset = 0  # conditions around it
        self.part = 0  # of the loop's body, where that is in parts
        self.choices = Choices(whole or program, device, wires.place)
        self.on_the_way: set[int] = set()  # what was sent, in the parts of a loop that are written, and nobody has read yet
        self.adds_to: tuple[str, str] | None = None  # (a sum over trips that the next node adds to, the condition that there is none yet)
        self.added: set[int] = set()  # values of the body that is written which were added to a sum as they were made
        self.serial = 0
        self.disk = 0  # copies from and to the disk so far
        self.input_names = self._name_inputs(partition)

    # ---- pieces ----

    def _name_inputs(self, partition: Partition) -> list[str]:
        """Variables of the inputs, one per distinct tensor; constants are bound by name."""
        names: list[str] = []
        classes = iter(partition)
        for id in self.program.inputs:
            if id in self.program.constants:
                self.where[id] = (self.bind(in_tier(self.program.constants[id], "device", self.device), f"k{id}"),) * self.lanes
                continue
            lanes = next(classes)
            several = max(lanes) > 0
            mine = [f"v{id}_{c}" if several else f"v{id}" for c in range(max(lanes) + 1)]
            names += mine
            layout = self.program.values[id].layout
            here = self.wires.here(None if layout is None else layout.at)
            self.where[id] = tuple(mine[c] if exists else ABSENT for c, exists in zip(lanes, here, strict=True))
        return names

    def bind(self, thing: Any, hint: str) -> str:
        """A name for an object that the source refers to."""
        found = self._bound_names.get(id(thing))
        if found is None:
            found = f"{hint}_{len(self.names)}" if hint in self.names else hint
            self.names[found] = thing
            self._bound_names[id(thing)] = found
            self._keep.append(thing)
        return found

    def stem(self, id: int) -> str:
        """What variables of value `id` are called; ids in the body of a loop are the body's own."""
        return f"v{id}_in{self.serial}" if self.loops else f"v{id}"

    def line(self, text: str) -> None:
        self.lines.append("    " * (len(self.loops) + self.inset) + text)
        self.origin.append(self._node)

    def literal(self, arg: Any, lane: int) -> str:
        """An argument as Python source."""
        kind = type(arg)
        if kind is Ref:
            return self.where[arg.id][lane]
        if kind in _PLAIN:
            return repr(arg)
        if kind is tuple:
            return "(" + ", ".join(self.literal(item, lane) for item in arg) + ("," if len(arg) == 1 else "") + ")"
        if kind is float and arg == arg and abs(arg) != float("inf"):
            return repr(arg)
        if kind is torch.device:
            return self.bind(self.device, "device")
        return self.bind(arg, "c" + "".join(ch for ch in str(arg) if ch.isalnum()))

    def assign(self, id: int, keys: Sequence[Hashable]) -> list[tuple[str, int]]:
        """Name the variables of value `id`, one per distinct key; returns (variable, first lane that has it)."""
        classes: dict[Hashable, int] = {}
        first: list[int] = []
        for lane, key in enumerate(keys):
            if self.runs[lane] and key not in classes:
                classes[key] = len(classes)
                first.append(lane)
        stem = self.stem(id)
        names = [f"{stem}_{c}" if len(classes) > 1 else stem for c in range(len(classes))]
        self.where[id] = tuple(names[classes[key]] if runs else ABSENT for key, runs in zip(keys, self.runs, strict=True))
        return list(zip(names, first, strict=True))

    # ---- nodes ----

    def write(self) -> None:
        """Write every node, with frees after last uses."""
        last = lifetimes(self.program)
        inputs = set(self.program.inputs)
        dying: dict[int, list[int]] = {}
        for id, at in last.items():
            if id not in inputs:
                dying.setdefault(at, []).append(id)
        runs = runs_of_updates(self.program) if self.tap is None else {}  # a tap looks behind each of them
        written_to = -1
        for index, node in enumerate(self.program.nodes):
            if index <= written_to:
                continue
            self._node = written_to = index
            if index in runs and self.updates(runs[index]):
                written_to = runs[index][-1]
            else:
                self.node(node)
            if self.tap is not None:
                self.tap(self, index, node)
            dead = [o for o in node.results if o not in last]
            self.free(dead + [id for k in range(index, written_to + 1) for id in dying.get(k, [])])

    def node(self, node: Node) -> None:
        if node.target not in self._bound:
            check_words(node)
        kind = kind_of(node)
        self.runs = self.wires.here(node.on)
        if kind is not None:
            if kind[0] == "rearrange":
                self.rearrange(node)
            elif node.target == DEBUG:
                self.debug(node)
            elif node.loop is not None:
                write_loop(self, node, node.loop)
            elif self.loops and write_in_loop(self, node, kind[0]):
                pass
            else:
                self.wires.emit(self, node, *kind)
        else:
            self.compute(node)
        self.wires.behind(self, node)

    def compute(self, node: Node) -> None:
        """An ordinary operator: one line per distinct set of operands."""
        if self.pooled(node.outs[0] if node.outs else None) and node.target == CAST:
            self.cast(node)
            return
        changed = written(node)
        keys = self._keys(node)
        if changed and len(set(keys)) > 1:
            node = self.sharing.before(node, changed, keys)
            keys = self._keys(node)
        bound = self._bound.get(node.target)
        dims = len(self.program.values[node.refs[0]].shape) if node.refs else None
        name = self.bind(bound or callable_of(node.target, dims), node.target.replace(".", "_") if bound else node.target.split(".")[1])
        result = "flat" if bound is not None else result_kind(node.target)
        kwargs = self._kwargs(node, bound is not None)
        classes = {key: c for c, key in enumerate(dict.fromkeys(key for key in keys if key != (ABSENT,)))}
        kernels = [self.choices.of(node, self.program.values, keys.index(key)) if bound is None else None for key in classes]
        # A kernel makes a result, which is added to the sum behind the node; what is gathered is written in one way for all lanes.
        in_place = self._may_add(node, len(classes)) and all(kernel is None for kernel in kernels)
        adds_to = self.adds_to if in_place else None
        many = len(classes) > 1
        for (key, c), chosen in zip(classes.items(), kernels, strict=True):
            lane = keys.index(key)
            if chosen is not None:
                self.line(self._assignment(self._targets(node, c, many), self._kernel_call(node, chosen, lane), result))
                continue
            words = [self.literal(a, lane) for a in node.args]
            words += [
                f"**{{{k!r}: {self.literal(v, lane)}}}" if keyword.iskeyword(k) else f"{k}={self.literal(v, lane)}" for k, v in kwargs
            ]
            call = f"{name}({', '.join(words)})"
            if adds_to is not None:
                call = self._added_to(adds_to, node, f"_{c}", words, call)
            self.settle(self.on_host(node.refs, lane), self.on_host(changed, lane))
            self.line(self._assignment(self._targets(node, c, many), call, result))
        for o in node.outs:
            if o is not None:
                names = {key: f"{self.stem(o)}_{c}" if many else self.stem(o) for key, c in classes.items()}
                self.where[o] = tuple(names.get(key, ABSENT) for key in keys)
        if any(o is None for o in node.outs) and result != "none":
            self.line("_ = None")

    def _may_add(self, node: Node, classes: int) -> bool:
        """Whether a result may be added to a sum over trips as it is made: later writes to it must not part lanes that share it."""
        read = any(out in self.program.readers for out in node.results)
        return not read or classes == sum(self.runs)

    def _added_to(self, adds_to: tuple[str, str], node: Node, suffix: str, words: Sequence[str], call: str) -> str:
        """A call whose result is added to a sum over trips, but for the first one. The sums of lanes are numbered as their results are."""
        total, first = adds_to
        self.added.update(node.results)
        adder = self.bind(ADDERS[node.target], f"{node.target.split('.')[1]}_added")
        return f"{call} if {first} else {adder}({total}{suffix}, {', '.join(words)})"

    def _targets(self, node: Node, which: int, many: bool) -> list[str]:
        """Variables of the results of one of several sets of operands."""
        suffix = f"_{which}" if many else ""
        return ["_" if o is None else self.stem(o) + suffix for o in node.outs]

    def _kernel_call(self, node: Node, chosen: Chosen, lane: int) -> str:
        """A call of a kernel for this device; positions that the host knows are tensors of the host."""
        words = [self.bind(arg, "known") if isinstance(arg, torch.Tensor) else self.literal(arg, lane) for arg in chosen.arguments]
        return f"{self.bind(chosen.kernel.fn, chosen.kernel.fn.__name__)}({', '.join(words)})"

    def updates(self, run: Sequence[int]) -> bool:
        """One line for a run of updates; False where lanes update different tensors, each of which has a line of its own."""
        nodes = [self.program.nodes[k] for k in run]
        self.runs = self.wires.here(nodes[0].on)
        if any(node.on != nodes[0].on for node in nodes) or any(len(set(self._keys(node))) > 1 for node in nodes):
            return False
        many, lane = MANY[nodes[0].target], self.runs.index(True)
        words = []
        for place, arg in enumerate(nodes[0].args):
            own = place in many.own and arg is not None
            words.append(self.literal(tuple(node.args[place] for node in nodes) if own else arg, lane))
        self.line(f"{self.bind(many.call, many.call.__name__)}({', '.join(words)})")
        return True

    # ---- host memory ----

    def pooled(self, id: int | None) -> str:
        """The pool that value `id` lies in, by name; "" where it has memory of its own."""
        return self.bind(self.pool, "pool") if self.passing is not None and id in self.passing.values else ""

    def cast(self, node: Node) -> None:
        """A cast on the host whose result lies in the pool."""
        out, source = only(node), self.where[node.refs[0]]
        dtype = self.literal(self.program.values[out].dtype, 0)
        for name, lane in self.assign(out, source):
            self.fill(name, source[lane], dtype, self.pooled(out))

    def fill(self, name: str, source: str, dtype: str, pool: str) -> None:
        """Lines by which the host copies a tensor of its own to a buffer."""
        self.line(f"{name} = {pool}.like({source}, {dtype})")
        self.settle([source], [name])
        self.line(f"{name}.copy_({source})")

    def everywhere(self, id: int) -> tuple[str, ...]:
        """A variable per lane of value `id`: an empty tensor where it does not exist."""
        if ABSENT not in self.where[id]:
            return self.where[id]
        dtype = self.program.values[id].dtype
        empty = self.bind(torch.empty(0, dtype=dtype, device=self.device), f"absent_{id}")
        return tuple(name or empty for name in self.where[id])

    def settle(self, reads: Sequence[str], writes: Sequence[str]) -> None:
        """A line by which the host waits for copies of what it is to read and write; none on a CPU, where they are done."""
        if self.device.type != "cpu" and (reads or writes):
            told = ", ".join(f"({', '.join(names)}{',' * bool(names)})" for names in (reads, writes))
            self.line(f"{self.bind(self._settle, 'settle')}({told})")

    def on_host(self, ids: Sequence[int], lane: int) -> list[str]:
        values = self.program.values
        return [] if self.device.type == "cpu" else [self.where[i][lane] for i in dict.fromkeys(ids) if values[i].tier != "device"]

    def _keys(self, node: Node) -> list[tuple[str, ...]]:
        """Per lane, the variables of the operands; (ABSENT,) where it does not run the node."""
        keys = list(zip(*(self.where[i] for i in node.refs), strict=True)) or [()] * self.lanes
        return [key if runs else (ABSENT,) for key, runs in zip(keys, self.runs, strict=True)]

    def _assignment(self, targets: list[str], call: str, result: str) -> str:
        if not targets or all(t == "_" for t in targets):
            return call
        if result == "one":
            return f"{targets[0]} = {call}"
        if result == "nested":
            call = f"{self.bind(flat_results, 'flat_results')}({call})"
        return f"{', '.join(targets)}{',' if len(targets) == 1 else ''} = {call}"

    def _kwargs(self, node: Node, bound: bool) -> tuple[tuple[str, Any], ...]:
        """Keyword arguments; factories are told the device where it is not the default one."""
        if self.device.type == "cpu" or bound or not node.target.startswith("aten.") or not takes_device(node.target):
            return node.kwargs
        given, host = dict(node.kwargs), any(o is not None and self.program.values[o].tier == "host" for o in node.outs)
        if node.refs and given.get("device") is None:
            return node.kwargs
        return tuple((given | {"device": torch.device("cpu") if host else self.device}).items())

    def rearrange(self, node: Node) -> None:
        ref, pattern, names, sizes = node.args
        steps = rearrange_steps(pattern, tuple(names), tuple(sizes), self.program.values[ref.id].shape)
        source = self.where[ref.id]
        for name, lane in self.assign(only(node), source):
            self.settle(self.on_host([ref.id], lane), [])  # it may copy
            self.line(f"{name} = {rearrange_text(source[lane], steps)}")

    def debug(self, node: Node) -> None:
        """What `cf.debug` shows: one line for the main rank, or one per rank."""
        values, text, key, ranks = node.args
        shown = 0 if node.on is None else min(rank for rank, runs in zip(self.wires.ranks, self.runs, strict=True) if runs)
        for lane, rank in enumerate(self.wires.ranks):
            if self.runs[lane] and (ranks or rank == shown):
                self.settle(self.on_host(node.refs, lane), [])
                words = [self.literal(arg, lane) for arg in (values, text, key, ranks)]
                self.line(f"{self.bind(show, 'show')}({', '.join(words)}, {rank})")

    def free(self, ids: Sequence[int]) -> None:
        held = ((*self.where[id], *self.extra.pop(self.stem(id), ())) for id in ids)
        gone = [name for names in held for name in dict.fromkeys(names) if name != ABSENT]
        if gone:
            self.line("del " + ", ".join(gone))

    # ---- the function ----

    def function(self) -> StepFunction:
        return StepFunction(self)


class StepFunction:
    """A compiled straight-line function; errors carry a note with the node that failed."""

    def __init__(self, writer: Writer) -> None:
        outs = [writer.everywhere(o) for o in writer.program.outputs]
        order = {name: k for k, name in enumerate(dict.fromkeys(n for names in outs for n in names))}
        # outputs -> per lane -> place in the returned tuple
        self.slots = tuple(tuple(order[n] for n in names) for names in outs)
        self._one_each = self.slots == tuple((k,) for k in range(len(order)))
        head = ["def step(inputs):"]
        if writer.input_names:
            head += [f"    {', '.join(writer.input_names)}, = inputs", "    inputs.clear()"]
        body = ["    " + text for text in writer.lines]
        tail = f"    return ({', '.join(order)}{',' if len(order) == 1 else ''})"
        self.source = "\n".join([*head, *body, tail, ""])
        self._first_line = len(head) + 1
        self._origin = writer.origin
        self._finish = COPIER.finish if writer.device.type != "cpu" and moves(writer.program) else None
        self._program = writer.program
        self._file = f"<colofunc program {next(_SERIAL)}>"
        namespace = dict(writer.names)
        exec(compile(self.source, self._file, "exec"), namespace)
        self._step: Callable[[list[torch.Tensor]], tuple[torch.Tensor, ...]] = namespace["step"]
        linecache.cache[self._file] = (len(self.source), None, self.source.splitlines(keepends=True), self._file)
        weakref.finalize(self, linecache.cache.pop, self._file, None)

    def __call__(self, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run on the distinct input tensors; the list is emptied."""
        try:
            with torch.no_grad(), as_traced():
                return self._step(inputs)
        except Exception as error:
            node = self._failed_node(error)
            if node is not None:
                note = f": {node.note}" if node.note else ""
                error.add_note(f"while running {node.target} of {node.path or 'the step'} ({node.line or 'no source line'}){note}")
            raise
        finally:
            if self._finish is not None:
                self._finish()

    def per_lane(self, outs: tuple[torch.Tensor, ...]) -> list[list[torch.Tensor]]:
        """What a call has returned as outputs, each with its tensor on every lane."""
        if self._one_each:
            return [[x] for x in outs]
        return [[outs[k] for k in slots] for slots in self.slots]

    def _failed_node(self, error: Exception) -> Node | None:
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == self._file:
                at = trace.tb_lineno - self._first_line
                return self._program.nodes[self._origin[at]] if 0 <= at < len(self._origin) else None
            trace = trace.tb_next
        return None


def flat_results(result: Any) -> tuple[Any, ...]:
    """The flat results of an operator: lists and tuples opened one level deep, as `Node.outs` numbers them."""
    if isinstance(result, (tuple, list)):
        flat: list[Any] = []
        for item in result:
            flat.extend(item) if isinstance(item, (tuple, list)) else flat.append(item)
        return tuple(flat)
    return (result,) if result is not None else ()
