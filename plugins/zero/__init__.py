"""ZeRO: the state of data-parallel training, split instead of copied.

    step = cf.shard(step_fn, mesh, zero(3, "dp"))

    stage 1   batch on dp   parameters whole      gradients reduced to    moments on dp
    stage 2                                       a rank's own part       (accumulated so as well)
    stage 3                 parameters on dp, gathered for use

Problem: data parallelism keeps the same 16 bytes per parameter on every rank. Idea: where a tensor is *stored* and
where work on it is *done* are two things. The plan says that the batch lies on `dp`, and follows it, so that all work
is data parallel; and it says where parameters and moments are stored. Gathers and reduce-scatters are then conversions
like any other. A tensor goes on the first of its dims that the ranks divide; another plan may have that dim, then on
another.

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
"""A tensor of at most so many elements, none of whose dims is divided by the ranks, is copied; a larger one is
padded."""


def zero(
    stage: int = 3,
    axes: str | Sequence[str] = "dp",
    *,
    replicate: str | Sequence[str] = (),
    optimizer: str | Sequence[str] | None = None,
    regather: bool | None = None,
    chunk: int | str | None = None,
    reduce: str | None = None,
) -> Zero:
    """ZeRO over `axes`: stage 1 splits moments, 2 gradients too, 3 parameters too.

    replicate: further data-parallel axes, over which what is stored on `axes` is copied (hybrid sharding). optimizer:
    the axes that split moments, if they are more than `axes`:
    `zero(3, "dpi", replicate="dpo", optimizer=("dpi", "dpo"))`. regather: whether stage 3 gathers again for backward
    (True: least memory, 3 instead of 2 times the parameters on the wire); None: only where memory asks for it. chunk:
    parameters in the order of their use in flat buffers of so many elements, each gathered and reduced as one; "auto":
    the size that wastes least; None: small ones go together where that saves time. reduce: under `cf.accumulate`,
    "each": gradients are reduced in each microbatch, a rank adds up its own parts; "last": a rank adds up whole ones
    and reduces them behind the last microbatch, which sends less and holds all gradients (FSDP's `no_sync`, FSDP2's
    `set_requires_gradient_sync(False)`); None: "each" in stage 2 and where stage 3 gathers again, else as memory asks.

    Raises PlanError for what is no stage, axis, size or word of these, and where two of them say different things.
    """
    if isinstance(stage, bool) or stage not in (1, 2, 3):
        raise cf.PlanError(f"zero has stages 1, 2 and 3, not {stage!r}; write zero(3, 'dp')")

    split, copied = _names(axes), _names(replicate)
    moments = split if optimizer is None else _names(optimizer)
    if not split:
        raise cf.PlanError("zero needs an axis to split over; write zero(3, 'dp')")
    if set(split) & set(copied):
        raise cf.PlanError(
            f"zero: {sorted(set(split) & set(copied))} cannot both split and copy; name other axes in replicate="
        )
    unknown = [axis for axis in moments if axis not in (*split, *copied)]
    if unknown:
        raise cf.PlanError(
            f"zero: optimizer={unknown} must be among axes {split} and replicate {copied}, which the batch lies on"
        )

    if regather is not None and stage != 3:
        raise cf.PlanError(
            f"zero({stage}) gathers no parameters, so regather={regather} says nothing; drop it or use stage 3"
        )
    if not _is_chunk_size(chunk):
        raise cf.PlanError(f'zero: chunk={chunk!r} is no number of elements; write chunk="auto" or chunk=1 << 20')
    if reduce not in (None, "each", "last"):
        raise cf.PlanError(
            f'zero: reduce={reduce!r} is no way to reduce gradients; write reduce="each" or reduce="last"'
        )
    if stage == 2 and reduce == "last":
        raise cf.PlanError('zero(2) keeps no whole gradient, so reduce="last" cannot be; use stage 1, or drop it')
    return Zero(stage, (*split, *copied), split, moments, regather, chunk, reduce)


def _names(axes: str | Sequence[str]) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes)


def _is_chunk_size(chunk: object) -> bool:
    if chunk is None or chunk == "auto":
        return True
    return isinstance(chunk, int) and not isinstance(chunk, bool) and chunk > 0


@attrs.frozen
class Zero:
    """What `zero` returns: a named plan. `axes`: all that it speaks for, `stored`: those that split parameters."""

    stage: int
    axes: tuple[str, ...]
    stored: tuple[str, ...]
    moments: tuple[str, ...]
    regather: bool | None = None
    chunk: int | str | None = None
    reduce: str | None = None

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
        if not all(axis in mesh for axis in self.axes):
            return  # a mesh of microbatches has none of them
        if not call.ins or not call.ins[0].shape:
            return
        stored = mesh.atoms(self.stored)
        if _ranks(mesh, stored) == 1:
            return
        spec = places(call.ins[0].shape, (mesh.atoms(self.moments), stored), mesh, True)
        if _is_padded(spec):
            yield from strategies(call, mesh, spec, stored)

    def wishes(self, program: Any, mesh: cf.Mesh) -> list[cf.ext.Wish]:
        """The batch on all axes; parameters, gradients and moments stored as the stage says."""
        axes = tuple(sorted(mesh.atoms(self.axes), key=mesh.axis_names.index))
        alone = all(axis in axes or mesh.axis_size(axis) == 1 for axis in mesh.axis_names)
        masters = _masters(program)
        wishes = self._batch(program, mesh, axes)
        for id in program.inputs:
            value = program.values[id]
            if value.role == "state":
                spec = places(value.shape, self._split_moments(mesh), mesh, alone)
                wishes.append(cf.ext.Wish(value.name, spec, axes, ("state",), self.name))
            elif value.role in ("param", "frozen"):
                if value.role == "param":
                    wishes += self._gradient(value, mesh, axes, alone)
                wishes.append(self._parameter(value, mesh, axes, alone, id in masters))
        return wishes

    def _split_moments(self, mesh: cf.Mesh) -> tuple[tuple[str, ...], ...]:
        """The axes that split optimizer state; those of parameters where a tensor has no dim for so many ranks."""
        return mesh.atoms(self.moments), mesh.atoms(self.stored)

    def _parameter(self, value: Any, mesh: cf.Mesh, axes: tuple[str, ...], alone: bool, is_master: bool) -> cf.ext.Wish:
        """Where a parameter is stored, and how it is gathered."""
        if self.stage == 3:
            ways: tuple[tuple[str, ...], ...] = (mesh.atoms(self.stored),)
        elif is_master:
            ways = self._split_moments(mesh)
        else:
            ways = ()
        spec = places(value.shape, ways, mesh, alone)
        regather = self.regather if self.stage == 3 else False
        scatter = self._reduces_in_each()
        return cf.ext.Wish(
            value.name, spec, axes, (value.role,), self.name, regather=regather, chunk=self.chunk, scatter=scatter
        )

    def _reduces_in_each(self) -> bool | None:
        """Whether gradients are reduced in each microbatch; None: as memory asks."""
        if self.reduce is not None:
            return self.reduce == "each"
        # Stage 2 keeps no whole gradient, and neither does stage 3 where memory is what counts.
        return True if self.stage == 2 or self.regather else None

    def _gradient(self, value: Any, mesh: cf.Mesh, axes: tuple[str, ...], alone: bool) -> Iterator[cf.ext.Wish]:
        """A gradient that the step keeps lies as the moments do; padding is for updates alone."""
        spec = places(value.shape, self._split_moments(mesh), mesh, alone)
        if not _is_padded(spec):
            yield cf.ext.Wish(f"grad.{value.name}", spec, axes, ("grad",), self.name, optional=True)

    def _batch(self, program: Any, mesh: cf.Mesh, axes: tuple[str, ...]) -> list[cf.ext.Wish]:
        """The rows of the batch on all axes, and whatever works on them."""
        values = [program.values[id] for id in program.inputs]
        leaves = [value for value in values if value.role == "batch" and value.shape]
        if not leaves:
            raise cf.PlanError(
                f"{self.name} splits the batch, and this step has no batch: no argument behind the state has a tensor"
            )
        rows = Counter(leaf.shape[0] for leaf in leaves).most_common(1)[0][0]
        ranks = _ranks(mesh, axes)
        if rows % ranks:
            raise cf.PlanError(
                f"{self.name}: the {rows} rows of the batch ({leaves[0].name!r}) do not divide over {ranks} ranks; "
                f"take a multiple of these (cf.pad(batch, multiple=1, rows={ranks}) adds rows that labels or a mask "
                "leave out)"
            )
        spec = f"({' '.join(axes)} _) ..."
        return [
            cf.ext.Wish(leaf.name, spec, axes, ("batch",), self.name, along=True)
            for leaf in leaves
            if leaf.shape[0] == rows
        ]  # fmt: skip


def _ranks(mesh: cf.Mesh, axes: Sequence[str]) -> int:
    return prod(mesh.axis_size(axis) for axis in axes)


def _is_padded(want: Any) -> bool:
    return isinstance(want, str) and "~" in want


def _masters(program: Any) -> set[int]:
    """Parameters that forward reads in a narrower dtype only: what it reads is gathered, they themselves are optimizer
    state.
    """
    readers: dict[int, list[Any]] = {}
    for node in program.nodes:
        if node.phase == "forward":
            for id in node.refs:
                readers.setdefault(id, []).append(node)
    masters = set[int]()
    for id, nodes in readers.items():
        if program.values[id].role == "param" and all(_narrows(node, program.values) for node in nodes):
            masters.add(id)
    return masters


def _narrows(node: Any, values: Any) -> bool:
    if node.target != "aten._to_copy.default":
        return False
    return bool(values[node.outs[0]].dtype.itemsize < values[node.refs[0]].dtype.itemsize)


def places(shape: tuple[int, ...], ways: Sequence[tuple[str, ...]], mesh: cf.Mesh, alone: bool) -> Any:
    """Where a tensor may be stored: on a dim that the ranks divide, for the first of `ways` for which there is one.

    `alone`: no other axis is in play, so the first such dim will do; else any of them, and what else lies there
    decides.
    """
    for axes in ways:
        ranks = _ranks(mesh, axes)
        dims = [dim for dim, size in enumerate(shape) if size and size % ranks == 0]
        specs = tuple(_spec(shape, dim, axes) for dim in dims)
        if alone and specs:
            return specs[0]
        if len(dims) == 1 and shape[dims[0]] % mesh.size and prod(shape) <= SMALL:
            # What another plan cuts along the only dim may leave parts that the ranks do not divide.
            return (*specs, _whole(shape))
        if specs:
            return specs[0] if len(specs) == 1 else specs
    if ways and prod(shape) > SMALL:
        longest = shape.index(max(shape))
        return _spec(shape, longest, ways[-1], "~")
    return _whole(shape)


def _whole(shape: tuple[int, ...]) -> str:
    return " ".join(["_"] * len(shape))


def _spec(shape: tuple[int, ...], dim: int, axes: tuple[str, ...], pad: str = "") -> str:
    """`dim` on `axes`, the others whole: `_ (dp _) _`; with `pad` "~" padded to a multiple."""
    words = ["_"] * len(shape)
    words[dim] = f"({' '.join(axes)} _{pad})"
    return " ".join(words)
