"""Calling a staged step: find or prepare what fits the arguments, place them, run, wrap what comes out.

    arguments -> signature -> [prepare] -> run

The bracket happens once per signature (tree, shapes, dtypes, static leaves, train or eval mode, and the layouts that
DTensor arguments already have, which the plan takes as given). `StepCompiler` is the only place that keeps state
between calls.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import attrs
import torch

from colofunc import compat
from colofunc.dtensor.eager import convert_shards
from colofunc.dtensor.layout import Layout
from colofunc.dtensor.parts import part
from colofunc.dtensor.tensor import DTensor
from colofunc.errors import InputError
from colofunc.executors.backend import Backend, backend_for
from colofunc.executors.watch import Watch
from colofunc.ops.seeds import draw_seed
from colofunc.program.trace_tree import Tree, flatten, unflatten
from colofunc.transforms.agree import equal_leaves, main_seed, watch_of
from colofunc.transforms.compare import Compared, compare
from colofunc.transforms.lowered import Lowered
from colofunc.transforms.prepare import mesh_of, prepare, say
from colofunc.transforms.staged import Staged

Leaf = torch.Tensor


class Ready:
    """A lowered step and, from the first call on, the backend that runs it."""

    def __init__(self, low: Lowered, executor: str | None, watch: Watch | None) -> None:
        self.low = low
        self.watch = watch
        self._executor = executor
        self._compared: set[str] = set()

    def compare(self, what: str, leaves: Sequence[Leaf]) -> None:
        """On real ranks, once: plain tensors must be equal on all of them."""
        if self.watch is not None and what not in self._compared:
            self._compared.add(what)
            names = [leaf.name for leaf in self.low.traced.in_tree.leaves()]
            equal_leaves(self.watch, names[: len(leaves)], leaves)

    @cached_property
    def backend(self) -> Backend:
        return backend_for(self.low.mesh, self._executor)

    @cached_property
    def run(self) -> Callable[[Sequence[list[torch.Tensor]]], list[list[torch.Tensor]]]:
        return self.backend.compile(self.low.program, self.low.mesh)


class StepCompiler:
    """Compiles a staged function once per signature and runs it."""

    def __init__(self) -> None:
        self._ready: dict[Any, list[Ready]] = {}
        self._last: tuple[Sequence[Leaf], Tree] = (), Tree("sequence")
        self._static_retraces = 0

    def call(self, staged: Staged, args: tuple[Any, ...]) -> Any:
        leaves, tree = flatten(args)
        ready = self._get(staged, args, leaves, tree)
        ready.compare("call", leaves)
        return run(ready, leaves, getattr(staged.fn, "__name__", "step"))

    def init(self, staged: Staged, args: tuple[Any, ...]) -> Any:
        """Argument 0 placed in the layouts of the plan; its tensors are copied, so the originals stay the caller's."""
        leaves, tree = flatten(args)
        ready = self._get(staged, args, leaves, tree)
        first, first_tree = flatten(args[0])
        ready.compare("init", first)
        placed = [_placed(leaf, layout, ready, copy=True) for leaf, layout in zip(first, ready.low.input_layouts, strict=False)]
        return unflatten(first_tree, [_owned(shards, lay, ready) for shards, lay in zip(placed, ready.low.input_layouts, strict=False)])

    def lower(self, staged: Staged, args: tuple[Any, ...]) -> Lowered:
        leaves, tree = flatten(args)
        return self._get(staged, args, leaves, tree).low

    def compare(self, staged: Staged, args: tuple[Any, ...], tolerance: float | None) -> Compared:
        return compare(self.lower(staged, args), args, staged.reference, tolerance)

    def _get(self, staged: Staged, args: tuple[Any, ...], leaves: Sequence[Leaf], tree: Tree) -> Ready:
        types = tuple((tuple(x.shape), x.dtype, x.requires_grad) for x in leaves)
        key = (tree.key(), types, torch.get_default_dtype(), training_flags(staged.fn))
        known = self._ready.setdefault(key, [])
        ready = next((r for r in known if _lies_as_planned(leaves, r.low.input_layouts)), None)
        if ready is None:
            if len(self._ready) > 1 and not known:
                self._tell_retrace(staged, leaves, tree)
            watch = watch_of(mesh_of(staged), staged.executor)
            ready = Ready(prepare(staged, args, leaves, watch), staged.executor, watch)
            known.append(ready)
        self._last = leaves, tree
        return ready

    def _tell_retrace(self, staged: Staged, leaves: Sequence[Leaf], tree: Tree) -> None:
        """One line that says why a step is traced again; a third time for a static value is a warning."""
        before, old = self._last
        name = getattr(staged.fn, "__name__", "step")
        pairs = zip(tree.statics(), old.statics(), strict=False)
        static = next((f"argument {a.name}: {b.value!r} -> {a.value!r}" for a, b in pairs if a.value != b.value), None)
        if static is not None:
            self._static_retraces += 1
            say(f"{name} is traced again, a static value changed: {static}")
            if self._static_retraces == 3:
                warnings.warn(
                    f"{name} has been traced {self._static_retraces + 1} times because static values change ({static}); "
                    "pass numbers that vary as tensors or floats",
                    stacklevel=4,
                )
            return
        shapes = zip(tree.names(), leaves, before, strict=False)
        changed = (f"argument {n}: {tuple(b.shape)} -> {tuple(a.shape)}" for n, a, b in shapes if a.shape != b.shape)
        what = next(changed, "its arguments' structure, dtypes or mode")
        say(f"{name} is traced again for {what}")


def training_flags(fn: Callable[..., Any], depth: int = 3) -> tuple[bool, ...]:
    """Train or eval mode of every module that a step function holds in its closure: a switch means another trace."""
    flags: list[bool] = []
    held = [cell.cell_contents for cell in getattr(fn, "__closure__", None) or () if _is_set(cell)]
    held += [getattr(fn, "__self__", None), *(getattr(fn, "__defaults__", None) or ())]
    for thing in held:
        parts = [getattr(thing, f.name) for f in attrs.fields(type(thing))] if attrs.has(type(thing)) else [thing]
        for piece in parts:
            if isinstance(piece, torch.nn.Module):
                flags += [m.training for m in piece.modules()]
            elif depth and callable(piece) and hasattr(piece, "__closure__"):
                flags += training_flags(piece, depth - 1)
    return tuple(flags)


def _is_set(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a name that is assigned later
        return False


def _lies_as_planned(leaves: Sequence[Leaf], layouts: Sequence[Layout]) -> bool:
    """Plain tensors can be placed anywhere; a DTensor stays where it is, so the plan must want it there."""
    pairs = zip(leaves, layouts, strict=False)
    return all(not isinstance(leaf, DTensor) or leaf.sharding is layout for leaf, layout in pairs)


def run(ready: Ready, leaves: Sequence[Leaf], name: str) -> Any:
    """Run one call: place what is not placed, run, wrap what comes out, consume what was donated."""
    low = ready.low
    donated = set(low.donated)
    inputs = []
    for i, leaf in enumerate(leaves):
        inputs.append(_placed(leaf, low.input_layouts[i], ready, copy=i in donated and not _is_owned(leaf)))
    if low.traced.uses_seed:
        seed = main_seed(ready.watch, draw_seed())
        inputs.append([seed] * len(ready.backend.ranks(low.mesh)))
    mine = [leaf for i in low.donated if isinstance(leaf := leaves[i], DTensor) and leaf.owned]
    before = [compat.version(part) for leaf in mine for part in leaf.parts]
    try:
        outs = ready.run(inputs)
    except Exception as error:
        if before != [compat.version(part) for leaf in mine for part in leaf.parts]:
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


def _placed(leaf: Leaf, layout: Layout, ready: Ready, copy: bool) -> list[torch.Tensor]:
    """The owned ranks' parts of an argument. `copy`: they may be written to, so they must not be the caller's memory."""
    mesh, backend = ready.low.mesh, ready.backend
    if isinstance(leaf, DTensor):
        if leaf.mesh != mesh:
            raise InputError(
                f"an argument lies on {leaf.mesh}, the step runs on {mesh}; bring it over with cf.distribute(x.full(), spec, mesh)"
            )
        shards = convert_shards(leaf.parts, leaf.sharding, layout, mesh, backend)
        return [s.clone() for s in shards] if copy and leaf.sharding is layout else shards
    if leaf.is_meta:
        raise InputError(f"an argument of shape {tuple(leaf.shape)} has no data (meta tensor); give real values to run, or use step.lower")
    plain = leaf.detach()
    done: dict[tuple[int, ...], torch.Tensor] = {}
    out = []
    for rank in backend.ranks(mesh):
        where = mesh.coordinates(rank)
        key = tuple(where[a] for a in layout.axes)
        if key not in done or layout.pending:
            piece = part(plain, layout, mesh, rank)
            done[key] = piece.clone() if copy or not piece.is_contiguous() else piece
        out.append(done[key])
    return out
