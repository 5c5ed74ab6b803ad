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
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from math import isfinite
from typing import Any, Protocol

import torch

from colofunc.executors.choices import Choices, ChosenKernel
from colofunc.executors.copies import COPIER
from colofunc.executors.kernels import callable_of, check_words, rearrange_text, result_kind
from colofunc.executors.loops import ABSENT as ABSENT
from colofunc.executors.loops import only as only
from colofunc.executors.loops import write_in_loop, write_loop
from colofunc.executors.pools import Pool, copies_between_tiers, in_tier
from colofunc.executors.sharing import Sharing
from colofunc.executors.step_function import StepFunction, flat_results
from colofunc.ops.debug import show
from colofunc.ops.fused import ADDERS
from colofunc.ops.update_lists import MANY
from colofunc.program.facts import is_cast, is_effect, kind_of, lifetimes, rearrange_steps, takes_device, written
from colofunc.program.ir import Loop, Node, Program, Ref
from colofunc.program.passes.one_call import runs_of_updates
from colofunc.spec.layout import At

Partition = tuple[tuple[int, ...], ...]  # per input, per lane: which distinct tensor the lane holds

_PLAIN = (int, bool, str, type(None))
"""Types of arguments whose `repr` is their source."""
_NOT_RUN = (ABSENT,)
"""In place of the variables of a node's operands, on a lane that does not run the node."""


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
LoopLine = Callable[["Writer"], str]
"""Says a line to write behind each node of a loop's body, before what died there is freed."""


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
        look: LoopLine | None = None,
        pool: Pool | None = None,
        whole: Program | None = None,
    ) -> None:
        """`whole`: the program before it was compiled, where it was.

        `sparing`: lanes that share a tensor may compute where a rank of its own would write in place. `pool`: where
        what passes through the host lies; None: each copy allocates. `tap` and `look`: see `Tap` and `LoopLine`.
        """
        self.tap = tap
        self.look = look
        self.pool = pool
        # One object each, so that the source has one name for it: a bound method is another object each time.
        self.start, self._settle = COPIER.start, COPIER.settle
        # Of the program that is written: the step's, or of a loop in it.
        self.passing = pool.plan if pool is not None else None
        self.program = program
        self.lanes = lanes
        self.device = device
        self.wires = wires
        # Value id -> variable per lane, ABSENT on those where it does not exist.
        self.where: dict[int, tuple[str, ...]] = {}
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
        # What was sent, in the parts of a loop that are written, and nobody has read yet.
        self.on_the_way: set[int] = set()
        # (A sum over trips that the next node adds to, the condition that there is none yet).
        self.adds_to: tuple[str, str] | None = None
        # Values of the body that is written which were added to a sum as they were made.
        self.added: set[int] = set()
        self.serial = 0
        self.disk = 0  # copies from and to the disk so far
        self.input_names = self._name_inputs(partition)

    # ---- pieces ----

    def _name_inputs(self, partition: Partition) -> list[str]:
        """Variables of the inputs, one per distinct tensor; constants are bound by name."""
        names: list[str] = []
        tensors_of_inputs = iter(partition)
        for id in self.program.inputs:
            if id in self.program.constants:
                constant = in_tier(self.program.constants[id], "device", self.device)
                self.where[id] = (self.bind(constant, f"k{id}"),) * self.lanes
                continue
            tensor_of_lane = next(tensors_of_inputs)
            variables = _numbered(f"v{id}", max(tensor_of_lane) + 1)
            names += variables
            layout = self.program.values[id].layout
            exists = self.wires.here(None if layout is None else layout.at)
            of_lanes: list[str] = []
            for number, there in zip(tensor_of_lane, exists, strict=True):
                of_lanes.append(variables[number] if there else ABSENT)
            self.where[id] = tuple(of_lanes)
        return names

    def bind(self, thing: Any, hint: str) -> str:
        """A name for an object that the source refers to."""
        name = self._bound_names.get(id(thing))
        if name is None:
            name = f"{hint}_{len(self.names)}" if hint in self.names else hint
            self.names[name] = thing
            self._bound_names[id(thing)] = name
            self._keep.append(thing)
        return name

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
            items = [self.literal(item, lane) for item in arg]
            return f"({listed(items)})"
        if kind is float and isfinite(arg):
            return repr(arg)
        if kind is torch.device:
            return self.bind(self.device, "device")
        return self.bind(arg, "c" + "".join(letter for letter in str(arg) if letter.isalnum()))

    def assign(self, id: int, keys: Sequence[Hashable]) -> list[tuple[str, int]]:
        """Name the variables of value `id`, one per distinct key; returns (variable, first lane that has it)."""
        first_lanes: dict[Hashable, int] = {}
        for lane, key in enumerate(keys):
            if self.runs[lane]:
                first_lanes.setdefault(key, lane)
        names = _numbered(self.stem(id), len(first_lanes))
        name_of = dict(zip(first_lanes, names, strict=True))
        self.where[id] = tuple(name_of[key] if runs else ABSENT for key, runs in zip(keys, self.runs, strict=True))
        return list(zip(names, first_lanes.values(), strict=True))

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
            dead = [out for out in node.results if out not in last]
            for place in range(index, written_to + 1):
                dead += dying.get(place, [])
            self.free(dead)

    def node(self, node: Node) -> None:
        if node.target not in self._bound:
            check_words(node)
        self.runs = self.wires.here(node.on)
        self._operation(node)
        self.wires.behind(self, node)

    def _operation(self, node: Node) -> None:
        """Lines of one node, by what kind of node it is."""
        kind = kind_of(node)
        if kind is None:
            self.compute(node)
        elif kind[0] == "rearrange":
            self.rearrange(node)
        elif is_effect(node.target):
            self.debug(node)
        elif node.loop is not None:
            write_loop(self, node, node.loop)
        elif not self.loops or not write_in_loop(self, node, kind[0]):
            name, asynchronous = kind
            self.wires.emit(self, node, name, asynchronous)

    def compute(self, node: Node) -> None:
        """An ordinary operator: one line per distinct set of operands."""
        if self.pooled(node.outs[0] if node.outs else None) and is_cast(node):
            self.cast(node)
            return
        changed = written(node)
        operands = self._operands(node)
        if changed and len(set(operands)) > 1:
            node = self.sharing.before(node, changed, operands)
            operands = self._operands(node)
        bound = self._bound.get(node.target)
        function = self._function_name(node, bound)
        result = "flat" if bound is not None else result_kind(node.target)
        kwargs = self._kwargs(node, bound is not None)
        first_lanes: dict[tuple[str, ...], int] = {}  # operands -> the first lane that has them
        for lane, variables in enumerate(operands):
            if variables != _NOT_RUN:
                first_lanes.setdefault(variables, lane)
        kernels: list[ChosenKernel | None] = [None] * len(first_lanes)
        if bound is None:
            kernels = [self.choices.of(node, self.program.values, lane) for lane in first_lanes.values()]
        # A kernel makes a result, which is added to the sum behind the node; what is gathered is written in one way for
        # all lanes.
        in_place = self._may_add(node, len(first_lanes)) and all(kernel is None for kernel in kernels)
        adds_to = self.adds_to if in_place else None
        suffixes = _numbered("", len(first_lanes))
        for number, (lane, kernel) in enumerate(zip(first_lanes.values(), kernels, strict=True)):
            targets = ["_" if out is None else self.stem(out) + suffixes[number] for out in node.outs]
            if kernel is not None:
                self.line(self._assignment(targets, self._kernel_call(kernel, lane), result))
                continue
            words = self._words(node, kwargs, lane)
            call = f"{function}({', '.join(words)})"
            if adds_to is not None:
                call = self._added_to(adds_to, node, f"_{number}", words, call)
            self.settle(self.on_host(node.refs, lane), self.on_host(changed, lane))
            self.line(self._assignment(targets, call, result))
        suffix_of = dict(zip(first_lanes, suffixes, strict=True))
        for out in node.results:
            stem = self.stem(out)
            self.where[out] = tuple(stem + suffix_of[names] if names in suffix_of else ABSENT for names in operands)
        if None in node.outs and result != "none":
            self.line("_ = None")

    def _function_name(self, node: Node, bound: Callable[..., Any] | None) -> str:
        """The name of what computes an ordinary operator. bound: the callable that the program was given for it."""
        dims = len(self.program.values[node.refs[0]].shape) if node.refs else None
        if bound:
            return self.bind(bound, node.target.replace(".", "_"))
        return self.bind(callable_of(node.target, dims), node.target.split(".")[1])

    def _words(self, node: Node, kwargs: Sequence[tuple[str, Any]], lane: int) -> list[str]:
        """The arguments of a call on one lane."""
        words = [self.literal(arg, lane) for arg in node.args]
        for name, arg in kwargs:
            text = self.literal(arg, lane)
            # `from` is an argument of `random_`, and no keyword argument can be written with it.
            words.append(f"**{{{name!r}: {text}}}" if keyword.iskeyword(name) else f"{name}={text}")
        return words

    def _may_add(self, node: Node, results: int) -> bool:
        """Whether a result may be added to a sum over trips as it is made.

        Later writes to the sum must not part lanes that share it. results: how many different ones all lanes have.
        """
        read = any(out in self.program.readers for out in node.results)
        return not read or results == sum(self.runs)

    def _added_to(self, adds_to: tuple[str, str], node: Node, suffix: str, words: Sequence[str], call: str) -> str:
        """A call whose result is added to a sum over trips, but for the first one.

        suffix: the sums of lanes are numbered as their results are.
        """
        total, first = adds_to
        self.added.update(node.results)
        adder = self.bind(ADDERS[node.target], f"{node.target.split('.')[1]}_added")
        return f"{call} if {first} else {adder}({total}{suffix}, {', '.join(words)})"

    def _kernel_call(self, chosen: ChosenKernel, lane: int) -> str:
        """A call of a kernel for this device; positions that the host knows are tensors of the host."""
        words = []
        for arg in chosen.arguments:
            words.append(self.bind(arg, "known") if isinstance(arg, torch.Tensor) else self.literal(arg, lane))
        return f"{self.bind(chosen.kernel.fn, chosen.kernel.fn.__name__)}({', '.join(words)})"

    def updates(self, run: Sequence[int]) -> bool:
        """One line for a run of updates.

        False where lanes update different tensors, each of which has a line of its own.
        """
        nodes = [self.program.nodes[place] for place in run]
        first = nodes[0]
        self.runs = self.wires.here(first.on)
        if any(node.on != first.on or len(set(self._operands(node))) > 1 for node in nodes):
            return False
        many, lane = MANY[first.target], self.runs.index(True)
        words = []
        for place, arg in enumerate(first.args):
            if place in many.own and arg is not None:
                arg = tuple(node.args[place] for node in nodes)
            words.append(self.literal(arg, lane))
        self.line(f"{self.bind(many.call, many.call.__name__)}({', '.join(words)})")
        return True

    # ---- host memory ----

    @property
    def calls_segments(self) -> bool:
        """Whether parts of the program are compiled: which results of those share memory is not known here."""
        return bool(self._bound)

    def pooled(self, id: int | None) -> str:
        """The pool that value `id` lies in, by name; "" where it has memory of its own."""
        if self.passing is None or id not in self.passing.values:
            return ""
        return self.bind(self.pool, "pool")

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
        """A line by which the host waits for copies of what it is to read and write.

        None on a CPU, where they are done.
        """
        if self.device.type != "cpu" and (reads or writes):
            self.line(f"{self.bind(self._settle, 'settle')}({_tuple_text(reads)}, {_tuple_text(writes)})")

    def on_host(self, ids: Sequence[int], lane: int) -> list[str]:
        """Those of some values that lie outside of a GPU, by their variables.

        None on a CPU, where nobody waits for copies.
        """
        if self.device.type == "cpu":
            return []
        values = self.program.values
        return [self.where[id][lane] for id in dict.fromkeys(ids) if values[id].tier != "device"]

    def _operands(self, node: Node) -> list[tuple[str, ...]]:
        """Per lane, the variables of the operands; `_NOT_RUN` where it does not run the node."""
        operands: list[tuple[str, ...]] = [()] * self.lanes
        if node.refs:
            operands = list(zip(*(self.where[id] for id in node.refs), strict=True))
        return [variables if runs else _NOT_RUN for variables, runs in zip(operands, self.runs, strict=True)]

    def _assignment(self, targets: list[str], call: str, result: str) -> str:
        """The line that defines the variables of a node's results. result: see `result_kind`."""
        if all(target == "_" for target in targets):
            return call
        if result == "one":
            return f"{targets[0]} = {call}"
        if result == "nested":
            call = f"{self.bind(flat_results, 'flat_results')}({call})"
        return f"{listed(targets)} = {call}"

    def _kwargs(self, node: Node, bound: bool) -> tuple[tuple[str, Any], ...]:
        """Keyword arguments; factories are told the device where it is not the default one."""
        if self.device.type == "cpu" or bound or not node.target.startswith("aten.") or not takes_device(node.target):
            return node.kwargs
        kwargs = dict(node.kwargs)
        if node.refs and kwargs.get("device") is None:
            return node.kwargs
        on_host = any(self.program.values[out].tier == "host" for out in node.results)
        kwargs["device"] = torch.device("cpu") if on_host else self.device
        return tuple(kwargs.items())

    def rearrange(self, node: Node) -> None:
        ref, pattern, names, sizes = node.args
        steps = rearrange_steps(pattern, tuple(names), tuple(sizes), self.program.values[ref.id].shape)
        source = self.where[ref.id]
        for name, lane in self.assign(only(node), source):
            self.settle(self.on_host([ref.id], lane), [])  # it may copy
            self.line(f"{name} = {rearrange_text(source[lane], steps)}")

    def debug(self, node: Node) -> None:
        """What `cf.debug` shows: one line for the main rank, or one per rank."""
        _, _, _, of_each_rank = node.args
        running = [(lane, rank) for lane, rank in enumerate(self.wires.ranks) if self.runs[lane]]
        # A process that is another rank shows nothing of what all ranks run.
        main = 0 if node.on is None else min(rank for _, rank in running)
        for lane, rank in running:
            if of_each_rank or rank == main:
                self.settle(self.on_host(node.refs, lane), [])
                words = [self.literal(arg, lane) for arg in node.args]
                self.line(f"{self.bind(show, 'show')}({', '.join(words)}, {rank})")

    def free(self, ids: Sequence[int]) -> None:
        """A line that deletes the variables of some values, and what is hidden behind them."""
        names: list[str] = []
        for id in ids:
            hidden = self.extra.pop(self.stem(id), ())
            names += [name for name in dict.fromkeys((*self.where[id], *hidden)) if name != ABSENT]
        if names:
            self.line("del " + ", ".join(names))

    # ---- the function ----

    def function(self) -> StepFunction:
        """The lines, compiled."""
        outputs = [self.everywhere(out) for out in self.program.outputs]
        waits = self.device.type != "cpu" and copies_between_tiers(self.program)
        return StepFunction(self.program, self.input_names, self.lines, self.origin, outputs, self.names, waits)


def _numbered(stem: str, count: int) -> list[str]:
    """Names of so many variables of one value; a single one has no number."""
    return [stem] if count == 1 else [f"{stem}_{number}" for number in range(count)]


def _tuple_text(names: Sequence[str]) -> str:
    """The source of a tuple of variables, which may be empty."""
    return f"({listed(names)})" if names else "()"


def listed(words: Sequence[str]) -> str:
    """Words as the source of a tuple without its brackets."""
    return f"{words[0]}," if len(words) == 1 else ", ".join(words)
