"""ZeRO: the state of data-parallel training, split instead of copied.

    step = cf.shard(step_fn, mesh, zero(3, "dp"))

    stage 1   batch on dp   parameters whole      gradients reduced to    moments on dp
    stage 2                                       a rank's own part       (accumulated so as well)
    stage 3                 parameters on dp, gathered for use

Problem: data parallelism keeps the same 16 bytes per parameter on every rank. Idea: where a tensor is *stored* and where
work on it is *done* are two things. The plan says that the batch lies on `dp`, and follows it, so that all work is data
parallel; and it says where parameters and moments are stored. Gathers and reduce-scatters are then conversions like any
other. A tensor goes on the first of its dims that the ranks divide; another plan may have that dim, then on another.

Source: ZeRO (1910.02054); hybrid sharding: PyTorch FSDP (2304.11277), MiCS (2205.00119).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import attrs
from colofunc_plugins.zero.padded import TARGETS, strategies

import colofunc as cf

__all__ = ["Zero", "zero"]

SMALL = 1 << 12
"""A tensor of at most so many elements, none of whose dims is divided by the ranks, is copied; a larger one is padded."""


def zero(
    stage: int = 3,
    axes: str | Sequence[str] = "dp",
    *,
    replicate: str | Sequence[str] = (),
    optimizer: str | Sequence[str] | None = None,
    regather: bool | None = None,
    chunk: int | str | None = None,
) -> Zero:
    """ZeRO over `axes`: stage 1 splits moments, 2 gradients too, 3 parameters too.

    replicate: further data-parallel axes, over which what is stored on `axes` is copied (hybrid sharding). optimizer:
    the axes that split moments, if they are more than `axes`: `zero(3, "dpi", replicate="dpo", optimizer=("dpi", "dpo"))`.
    regather: whether stage 3 gathers again for backward (True: least memory, 3 instead of 2 times the parameters on the
    wire); None: only where memory asks for it. chunk: parameters in the order of their use in flat buffers of so many
    elements, each gathered and reduced as one; "auto": the size that wastes least; None: small ones go together where that
    saves time.
    """
    if isinstance(stage, bool) or stage not in (1, 2, 3):
        raise cf.PlanError(f"zero has stages 1, 2 and 3, not {stage!r}; write zero(3, 'dp')")
    mine, copies = _names(axes), _names(replicate)
    moments = mine if optimizer is None else _names(optimizer)
    if not mine:
        raise cf.PlanError("zero needs an axis to split over; write zero(3, 'dp')")
    if set(mine) & set(copies):
        raise cf.PlanError(f"zero: {sorted(set(mine) & set(copies))} cannot both split and copy; name other axes in replicate=")
    if unknown := [a for a in moments if a not in (*mine, *copies)]:
        raise cf.PlanError(f"zero: optimizer={unknown} must be among axes {mine} and replicate {copies}, which the batch lies on")
    if regather is not None and stage != 3:
        raise cf.PlanError(f"zero({stage}) gathers no parameters, so regather={regather} says nothing; drop it or use stage 3")
    if not (chunk is None or chunk == "auto" or (isinstance(chunk, int) and not isinstance(chunk, bool) and chunk > 0)):
        raise cf.PlanError(f"zero: chunk={chunk!r} is no number of elements; write chunk=\"auto\" or chunk=1 << 20")
    return Zero(stage, (*mine, *copies), mine, moments, regather, chunk)


def _names(axes: str | Sequence[str]) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes)


@attrs.frozen
class Zero:
    """What `zero` returns: a named plan. `axes`: all that it speaks for, `stored`: those that split parameters."""

    stage: int
    axes: tuple[str, ...]
    stored: tuple[str, ...]
    moments: tuple[str, ...]
    regather: bool | None = None
    chunk: int | str | None = None

    @property
    def name(self) -> str:
        return f"zero({self.stage}, {', '.join(self.stored)})"

    @property
    def __name__(self) -> str:  # what it is called as a plugin
        return repr(self)

    @cf.hookimpl
    def colofunc_strategies(self) -> Mapping[str, Callable[..., Any]]:
        return dict.fromkeys(TARGETS, self.strategies)

    def strategies(self, call: Any, mesh: cf.Mesh) -> Iterator[cf.Strategy]:
        """What updates make of shards of tensors that the ranks do not divide."""
        if not (call.ins and call.ins[0].shape and all(a in mesh for a in self.axes)):
            return  # of microbatches, which are a mesh of their own
        stored = mesh.atoms(self.stored)
        if prod(mesh.axis_size(a) for a in stored) > 1:
            want = places(call.ins[0].shape, (mesh.atoms(self.moments), stored), mesh, True)
            if _is_padded(want):
                yield from strategies(call, mesh, want, stored)

    def wishes(self, program: Any, mesh: cf.Mesh) -> list[cf.ext.Wish]:
        axes = tuple(sorted(mesh.atoms(self.axes), key=mesh.axis_names.index))
        stored, moments = mesh.atoms(self.stored), mesh.atoms(self.moments)
        alone = all(a in axes or mesh.axis_size(a) == 1 for a in mesh.axis_names)
        found = self._batch(program, mesh, axes)
        masters = _masters(program)
        for id in program.inputs:
            value = program.values[id]
            if value.role == "state":
                ways = (moments, stored)
            elif value.role in ("param", "frozen"):
                ways = (stored,) if self.stage == 3 else (moments, stored) if id in masters else ()
            else:
                continue
            want = places(value.shape, ways, mesh, alone)
            mine = value.role in ("param", "frozen")
            again = False if mine and self.stage < 3 else self.regather if mine else None
            chunk = self.chunk if mine else None
            lies = places(value.shape, (moments, stored), mesh, alone)
            if value.role == "param" and not _is_padded(lies):
                found.append(cf.ext.Wish(f"grad.{value.name}", lies, axes, ("grad",), self.name, optional=True))
            # Stage 2 keeps no whole gradient, and neither does stage 3 where memory is what counts.
            each = True if mine and (self.stage == 2 or self.regather) else None
            found.append(cf.ext.Wish(value.name, want, axes, (value.role,), self.name, regather=again, chunk=chunk, scatter=each))
        return found

    def _batch(self, program: Any, mesh: cf.Mesh, axes: tuple[str, ...]) -> list[cf.ext.Wish]:
        """The rows of the batch on all axes, and whatever works on them."""
        leaves = [program.values[i] for i in program.inputs if program.values[i].role == "batch" and program.values[i].shape]
        if not leaves:
            raise cf.PlanError(f"{self.name} splits the batch, and this step has no batch: no argument behind the state has a tensor")
        rows = Counter(v.shape[0] for v in leaves).most_common(1)[0][0]
        ways = prod(mesh.axis_size(a) for a in axes)
        if rows % ways:
            raise cf.PlanError(
                f"{self.name}: the {rows} rows of the batch ({leaves[0].name!r}) do not divide over {ways} ranks; "
                f"take a multiple of these (cf.pad(batch, multiple=1, rows={ways}) adds rows that labels or a mask leave out)"
            )
        spec = f"({' '.join(axes)} _) ..."
        mine = [v for v in leaves if v.shape[0] == rows]
        return [cf.ext.Wish(v.name, spec, axes, ("batch",), self.name, along=True) for v in mine]


def _is_padded(want: Any) -> bool:
    return isinstance(want, str) and "~" in want


def _masters(program: Any) -> set[int]:
    """Parameters that forward reads in a narrower dtype only: what it reads is gathered, they themselves are optimizer state."""
    reads: dict[int, list[Any]] = {}
    for node in program.nodes:
        for id in node.refs if node.phase == "forward" else ():
            reads.setdefault(id, []).append(node)
    params = [id for id in program.inputs if program.values[id].role == "param"]
    return {id for id in params if reads.get(id) and all(_narrows(node, program.values) for node in reads[id])}


def _narrows(node: Any, values: Any) -> bool:
    return node.target == "aten._to_copy.default" and values[node.outs[0]].dtype.itemsize < values[node.refs[0]].dtype.itemsize


def places(shape: tuple[int, ...], ways: Sequence[tuple[str, ...]], mesh: cf.Mesh, alone: bool) -> Any:
    """Where a tensor may be stored: on a dim that the ranks divide, for the first of `ways` for which there is one.

    `alone`: no other axis is in play, so the first such dim will do; else any of them, and what else lies there decides.
    """
    for axes in ways:
        n = prod(mesh.axis_size(a) for a in axes)
        dims = [d for d, size in enumerate(shape) if size % n == 0 and size]
        specs = tuple(_spec(shape, d, axes) for d in dims)
        if alone and specs:
            return specs[0]
        if len(dims) == 1 and shape[dims[0]] % mesh.size and prod(shape) <= SMALL:
            # What another plan cuts along the only dim may leave parts that the ranks do not divide.
            return (*specs, _whole(shape))
        if specs:
            return specs[0] if len(specs) == 1 else specs
    if ways and prod(shape) > SMALL:
        longest = max(range(len(shape)), key=lambda d: shape[d])
        return _spec(shape, longest, ways[-1], "~")
    return _whole(shape)


def _whole(shape: tuple[int, ...]) -> str:
    return " ".join("_" for _ in shape)


def _spec(shape: tuple[int, ...], dim: int, axes: tuple[str, ...], pad: str = "") -> str:
    return " ".join(f"({' '.join(axes)} _{pad})" if d == dim else "_" for d in range(len(shape)))
