"""Calling a staged step: find or prepare what fits the arguments, place them, run, wrap what comes out.

    arguments -> signature -> [prepare] -> run

The bracket happens once per signature (tree, shapes, dtypes, static leaves, train or eval mode, and the layouts that
DTensor arguments already have, which the plan takes as given). `StepCompiler` is the only place that keeps state
between calls.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cached_property, lru_cache
from types import CodeType, FunctionType
from typing import Any

import attrs
import torch

from colofunc import compat
from colofunc.dtensor.layout import Layout
from colofunc.dtensor.placed import SHELF, place, side_by_side
from colofunc.dtensor.tensor import DTensor
from colofunc.errors import ColofuncError, ConsumedError
from colofunc.executors.backend import Backend, backend_for
from colofunc.executors.disk.tensors import Scratch, Together
from colofunc.executors.distributed import main_seed
from colofunc.executors.profile import Profile
from colofunc.executors.watch import Watch
from colofunc.ops.seeds import draw_seed
from colofunc.planner.plan_table import time_text
from colofunc.plugins.operators import OPERATORS
from colofunc.program.passes.chunks import buffers_of
from colofunc.program.tracing.meta import user_line
from colofunc.program.tracing.tree import Tree, flatten, unflatten
from colofunc.transforms.agree import equal_leaves, watch_of
from colofunc.transforms.compare import Compared, compare
from colofunc.transforms.disk_state import Shelves, named, scratch_sizes, shelves_of_hidden
from colofunc.transforms.lowered import Lowered
from colofunc.transforms.measured import Warmup, everywhere, moved, step_s, warmup
from colofunc.transforms.prepare import mesh_of, prepare, say
from colofunc.transforms.profile import profile
from colofunc.transforms.reads import reads_of
from colofunc.transforms.staged import Staged

Leaf = torch.Tensor
LEAST = 0.01
"""A plan from measurements that is faster by a smaller part is not worth moving state."""


class Ready:
    """A lowered step and, from the first call on, the backend that runs it."""

    def __init__(self, low: Lowered, executor: str | None, watch: Watch | None, fn: Callable[..., Any], disk: str | bool | None) -> None:
        self.low = low
        self.watch = watch
        self.disk = disk  # the directory of what lies on disk; True: none is named yet
        self._executor = executor
        self.measure = 0  # of the steps to come so many are to be measured
        self.warmup: Warmup | None = None  # what measures them
        self.after: Ready | None = None  # planned by what was measured; state of this one moves there
        self._compared: set[str] = set()
        self._hidden: tuple[list[int], list[list[torch.Tensor]]] | None = None
        values, captured = low.traced.program.values, low.traced.captured
        named = {vid for vid in captured if vid in values and values[vid].role == "frozen"}
        self._baked = [(t, compat.version(t)) for vid, t in captured.items() if vid not in named]
        self._reads = reads_of(fn, captured.values())
        targets = {node.target for node in low.traced.program.nodes}
        self._operators = {name: OPERATORS[name] for name in targets if name in OPERATORS}

    def compare(self, what: str, leaves: Sequence[Leaf]) -> None:
        """On real ranks, once: plain tensors must be equal on all of them."""
        if self.watch is not None and what not in self._compared:
            self._compared.add(what)
            names = [leaf.name for leaf in self.low.traced.in_tree.leaves()]
            equal_leaves(self.watch, names[: len(leaves)], leaves)

    def stale(self) -> str:
        """What has changed since that is part of the program, in words; empty where nothing has."""
        if any(compat.version(t) != v for t, v in self._baked):
            return "a tensor that it captured was written to"
        other = next((name for name, before in self._operators.items() if OPERATORS.get(name) is not before), None)
        if other is not None:
            return f"operator {other!r} was defined again"
        return next((change for read in self._reads if (change := read.change())), "")

    def hidden(self) -> list[list[torch.Tensor]]:
        """Parts of the captured tensors that are inputs, placed at the first call and again if they were written to."""
        versions = [compat.version(t) for t in self.low.hidden]
        if self._hidden is None or self._hidden[0] != versions:
            if self.watch is not None:
                names = (self.low.program.values[i].name for i in self.low.hidden_ids)
                new = {n: t for n, t in zip(names, self.low.hidden, strict=True) if SHELF.layout(t, self.low.mesh) is None}
                equal_leaves(self.watch, tuple(new), tuple(new.values()))
            self._hidden = versions, self.low.hidden_parts(self.backend, shelves_of_hidden(self.low, self.disk, self.backend).keep)
        return self._hidden[1]

    @cached_property
    def buffers(self) -> tuple[tuple[int, ...], ...]:
        """Positions of inputs whose parts lie one behind the other in one buffer per rank."""
        return buffers_of(self.low.program)

    @cached_property
    def scratch(self) -> Scratch | None:
        """Room on disk for values of the step itself; None where none goes there."""
        sizes = scratch_sizes(self.low.program, len(self.backend.ranks(self.low.mesh)))
        return Scratch(named(self.disk), sizes, self.backend.ranks(self.low.mesh)[0]) if sizes else None

    @cached_property
    def backend(self) -> Backend:
        return backend_for(self.low.mesh, self._executor)

    @cached_property
    def run(self) -> Callable[[Sequence[list[torch.Tensor]]], list[list[torch.Tensor]]]:
        return self.backend.compile(self.low.program, self.low.mesh)

    def step(self, inputs: Sequence[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        return self.run(inputs) if self.warmup is None else self.warmup.run(inputs)


class StepCompiler:
    """Compiles a staged function once per signature and runs it."""

    def __init__(self) -> None:
        self._ready: dict[Any, list[Ready]] = {}
        self._last: tuple[Sequence[Leaf], Tree, tuple[Any, ...]] = (), Tree("sequence"), ()
        self._static_retraces = 0

    def call(self, staged: Staged, args: tuple[Any, ...]) -> Any:
        leaves, tree = flatten(args)
        ready = self._get(staged, args, leaves, tree, runs=True)
        ready.compare("call", leaves)
        name = getattr(staged.fn, "__name__", "step")
        if ready.measure:
            ready.measure, ready.warmup = 0, warmup(ready.low, ready.backend, ready.measure, name, say)
        elif ready.warmup is not None and not ready.warmup.left:
            self._plan_again(staged, args, leaves, ready, name)
        with nullcontext() if ready.watch is None else ready.watch.step(name):
            while ready.after is not None:
                ready = ready.after
                leaves = moved(leaves, ready.low.input_layouts, ready.low, ready.backend, ready.disk, _called(name))
            return run(ready, leaves, _called(name))

    def _plan_again(self, staged: Staged, args: tuple[Any, ...], leaves: Sequence[Leaf], old: Ready, name: str) -> None:
        """By what the first steps have measured; a plan that cannot be made, or is no faster, leaves the old one standing."""
        assert old.warmup is not None, "whoever calls has looked"
        timed, old.warmup = old.warmup.timed(), None
        donated = set(old.low.donated)
        staying = [None if i in donated else leaf for i, leaf in enumerate(leaves)]
        low, why = None, "another rank says why"
        try:
            low = prepare(staged, args, staying, old.watch, (old.low.plan, timed))
        except ColofuncError as error:
            why = str(error)
        if not everywhere(low is not None, old.watch) or low is None:
            warnings.warn(f"{name} keeps its plan: none could be made from what its first steps measured ({why})", stacklevel=4)
            return
        before_s, after_s = step_s(old.low, timed), step_s(low, timed)
        faster = after_s < before_s * (1 - LEAST)
        if low.mesh.is_main:
            what = "is planned again" if faster else "keeps its plan, the best that is known by that"
            say(f"{name} {what}: measured, a step takes {time_text(before_s)}, planned anew {time_text(after_s)}")
        if faster:
            low = attrs.evolve(low, plan=attrs.evolve(low.plan, cost_s=after_s))
            old.after = Ready(low, staged.executor, old.watch, staged.fn, old.disk)
            known = next(some for some in self._ready.values() if old in some)
            known.insert(0, old.after)

    def init(self, staged: Staged, args: tuple[Any, ...]) -> Any:
        """Argument 0 placed in the layouts of the plan; its tensors are copied, so the originals stay the caller's."""
        leaves, tree = flatten(args)
        ready = self._get(staged, args, leaves, tree, runs=True)
        first, first_tree = flatten(args[0])
        ready.compare("init", first)
        names, layouts = ready.low.traced.names, ready.low.input_layouts
        ready.hidden()
        _ = ready.scratch  # its room is taken now, or not at all
        placed = []
        shelves = Shelves(ready.disk, first, layouts, [True] * len(first), ready.low.mesh, ready.backend)
        for leaf, layout, name in zip(first, layouts, names, strict=False):  # one by one: lazy leaves are made here
            placed.append(shelves.keep(place(leaf, layout, ready.low.mesh, ready.backend, True, name), layout))
        shelves.commit()
        placed = side_by_side(placed, ready.buffers)
        return unflatten(first_tree, [_owned(parts, layout, ready) for parts, layout in zip(placed, layouts, strict=False)])

    def lower(self, staged: Staged, args: tuple[Any, ...]) -> Lowered:
        leaves, tree = flatten(args)
        return self._get(staged, args, leaves, tree).low

    def compare(self, staged: Staged, args: tuple[Any, ...], tolerance: float | None) -> Compared:
        return compare(self._get(staged, args, *flatten(args), runs=True).low, args, staged.reference, tolerance)

    def profile(self, staged: Staged, args: tuple[Any, ...], path: Any, steps: int) -> Profile:
        return profile(self._get(staged, args, *flatten(args), runs=True).low, args, path, steps)

    def _get(self, staged: Staged, args: tuple[Any, ...], leaves: Sequence[Leaf], tree: Tree, runs: bool = False) -> Ready:
        """The step for these arguments, prepared now if it was not. `runs`: not only to look at, so the mesh has to be there."""
        types = tuple((tuple(x.shape), x.dtype, x.requires_grad) for x in leaves)
        around = torch.get_default_dtype(), training_flags(staged.fn)
        key = (tree.key(), types, *around)
        known = self._ready.setdefault(key, [])
        stale = [r for r in known if r.stale()]
        for old in stale:
            say(f"{getattr(staged.fn, '__name__', 'step')} is traced again: {old.stale()}")
            self._count_retrace(staged, old.stale())
            known.remove(old)
        ready = next((r for r in known if _lies_as_planned(leaves, r.low.input_layouts)), None)
        if ready is None:
            if len(self._ready) > 1 and not known and not stale:
                self._tell_retrace(staged, leaves, tree, around)
            if runs:
                backend_for(mesh_of(staged), staged.executor)  # a mesh that does not fit the processes: before planning
            watch = watch_of(mesh_of(staged), staged.executor)
            intent = staged.intent("offload")
            disk = None if intent is None else intent.options["disk"]
            ready = Ready(prepare(staged, args, leaves, watch), staged.executor, watch, staged.fn, disk)
            ready.measure = 0 if intent is None else intent.options["measure"]
            known.append(ready)
        self._last = leaves, tree, around
        return ready

    def _count_retrace(self, staged: Staged, why: str) -> None:
        """A third time for a value that is part of the program is a warning."""
        self._static_retraces += 1
        if self._static_retraces == 3:
            warnings.warn(
                f"{getattr(staged.fn, '__name__', 'step')} has been traced 4 times because static values change ({why}); "
                "pass numbers that vary as arguments: tensors or floats",
                stacklevel=5,
            )

    def _tell_retrace(self, staged: Staged, leaves: Sequence[Leaf], tree: Tree, around: tuple[Any, ...]) -> None:
        """One line that says why a step is traced again; a third time for a static value is a warning."""
        before, old, old_around = self._last
        name = getattr(staged.fn, "__name__", "step")
        pairs = zip(tree.statics(), old.statics(), strict=False)
        static = next((f"argument {a.name}: {b.value!r} -> {a.value!r}" for a, b in pairs if a.value != b.value), None)
        if static is not None:
            say(f"{name} is traced again, a static value changed: {static}")
            self._count_retrace(staged, static)
            return
        say(f"{name} is traced again for {_new_signature(tree, leaves, around, old, before, old_around)}")


def _new_signature(tree: Tree, leaves: Sequence[Leaf], around: Any, old: Tree, before: Sequence[Leaf], old_around: Any) -> str:
    """In words, what the arguments of this call have that those of the last one had not."""
    names, old_names = tree.names(), old.names()
    if names != old_names:
        new, gone = (next((n for n in some if n not in set(others)), "") for some, others in ((names, old_names), (old_names, names)))
        said = [f"{n!r} is {word}" for n, word in ((new, "new"), (gone, "gone")) if n]
        return f"its arguments' structure{': ' if said else ''}{', '.join(said)}"
    both = list(zip(names, leaves, before, strict=True))
    for shown in (lambda x: tuple(x.shape), lambda x: str(x.dtype).removeprefix("torch."), lambda x: f"requires_grad={x.requires_grad}"):
        other = [(n, shown(b), shown(a)) for n, a, b in both if shown(a) != shown(b)]
        if other:
            more = f" (and {len(other) - 1} more)" if len(other) > 1 else ""
            return f"argument {other[0][0]}: {other[0][1]} -> {other[0][2]}{more}"
    if around[0] != old_around[0]:
        return f"the default dtype: {old_around[0]} -> {around[0]}".replace("torch.", "")
    return "the train or eval mode, or the frozen weights, of a module" if around != old_around else "its arguments' structure"


def training_flags(fn: Callable[..., Any], depth: int = 3, seen: set[int] | None = None) -> tuple[int, ...]:
    """Train or eval mode of every module that a step function uses from outside, and which frozen weights a model has.

    Looked for in its closure, defaults and the globals that it names, and in functions found there: a switch of the mode,
    or another tensor as a frozen weight, means another trace.
    """
    flags: list[int] = []
    seen = seen if seen is not None else {id(fn)}
    held = [cell.cell_contents for cell in getattr(fn, "__closure__", None) or () if _is_set(cell)]
    held += [getattr(fn, "__self__", None), *(getattr(fn, "__defaults__", None) or ())]
    around = getattr(fn, "__globals__", {})
    for name in _names_of(fn.__code__) if isinstance(fn, FunctionType) else ():
        thing = around.get(name)
        if not isinstance(thing, FunctionType) or thing.__globals__ is around:  # functions of other files are not the user's step
            held.append(thing)
    for thing in held:
        record = attrs.has(type(thing))
        parts = {f.name: getattr(thing, f.name) for f in attrs.fields(type(thing))} if record else {"": thing}
        for name, piece in parts.items():
            if isinstance(piece, torch.nn.Module):
                flags += [m.training for m in piece.modules()]
            elif name == "frozen" and isinstance(piece, dict):
                flags += [id(t) for t in piece.values()]  # those of a trace are kept alive by it
            elif depth and callable(piece) and hasattr(piece, "__closure__") and id(piece) not in seen:
                seen.add(id(piece))
                flags += training_flags(piece, depth - 1, seen)
    return tuple(flags)


@lru_cache(maxsize=1 << 12)
def _names_of(code: CodeType) -> tuple[str, ...]:
    """Global names in a function's code and in that of functions defined inside."""
    names = set(code.co_names)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            names.update(_names_of(inner))
    return tuple(sorted(names))


def _is_set(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a name that is assigned later
        return False


def _lies_as_planned(leaves: Sequence[Leaf], layouts: Sequence[Layout]) -> bool:
    """Plain tensors can be placed anywhere; a DTensor stays where it is, so the plan must want it there."""
    pairs = zip(leaves, layouts, strict=False)
    return all(not isinstance(leaf, DTensor) or leaf.sharding is layout for leaf, layout in pairs)


def _called(name: str) -> str:
    """The step and the user's line of this call, for the error on what it consumes."""
    line = user_line()
    return f"{name} at {line}" if line else name


def run(ready: Ready, leaves: Sequence[Leaf], name: str) -> Any:
    """Run one call: place what is not placed, run, wrap what comes out, consume what was donated."""
    low = ready.low
    donated = set(low.donated)
    inputs = []
    copied = [i in donated and not _is_owned(leaf) for i, leaf in enumerate(leaves)]
    shelves = Shelves(ready.disk, leaves, low.input_layouts, copied, low.mesh, ready.backend)
    for i, leaf in enumerate(leaves):
        try:
            parts = place(leaf, low.input_layouts[i], low.mesh, ready.backend, copied[i], low.traced.names[i])
        except ConsumedError as error:
            error.add_note(f"as argument {low.traced.names[i]!r} of {name}")
            raise
        inputs.append(shelves.keep(parts, low.input_layouts[i]))
    shelves.commit()
    if low.traced.uses_seed:
        seed = main_seed(ready.watch, draw_seed())
        inputs.append([seed] * len(ready.backend.ranks(low.mesh)))
    inputs += ready.hidden()
    inputs = side_by_side(inputs, ready.buffers)
    mine = [leaf for i in low.donated if isinstance(leaf := leaves[i], DTensor) and leaf.owned]
    before = [compat.version(part) for leaf in mine for part in leaf.parts]
    disk, scratch = Together(part for parts in inputs for part in parts), ready.scratch
    try:
        with nullcontext() if scratch is None else scratch.used():
            outs = ready.step(inputs)
        disk.commit()
    except BaseException as error:  # an interrupt too: what it left on disk must not be taken for the state
        disk.rollback()
        ready.__dict__.pop("scratch", None)  # the error's traceback may hold what lies there: the next call has room of its own
        if disk.committed or before != [compat.version(part) for leaf in mine for part in leaf.parts]:
            for leaf in mine:
                leaf.consume(f"{name}, which failed in the middle of its update, so this state is lost (load the last checkpoint)")
            error.add_note(f"{name} had begun to update its state in place: that state is lost; load the last checkpoint")
        raise
    for leaf in mine:
        leaf.consume(name)
    return low.traced.unpack([_owned(shards, lay, ready) for shards, lay in zip(outs, low.output_layouts, strict=True)])


def _is_owned(leaf: Leaf) -> bool:
    return isinstance(leaf, DTensor) and leaf.owned


def _owned(shards: list[torch.Tensor], layout: Layout, ready: Ready) -> DTensor:
    return DTensor(shards, layout, ready.low.mesh, ready.backend, owned=True)
