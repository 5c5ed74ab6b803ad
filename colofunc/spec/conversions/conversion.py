"""Conversions: the cheapest collectives that take a tensor from one layout to another.

>>> mesh = Mesh(dp=2, tp=2)
>>> src, dst = Spec("(dp b) (tp d)").bind(mesh, (8, 8)), Spec("(tp b) (dp d)").bind(mesh, (8, 8))
>>> [move.target for move in conversion(src, dst, mesh, itemsize=4).moves]
['permute']

Idea: refine both layouts to common slots (`refine`), search over moves of parts of axes between slots
(`search`), write the result as operators on one local tensor (`lower`). Equal puzzles are solved once:
the 30,976 pairs of major-only layouts of three dims on 2x2x2 are a few hundred puzzles. Local slices and rearranges
are free. Where topology makes communication free, bytes decide, then the number of moves.

Dims that have no common refinement, or are padded to different sizes, are made whole on the way (`fit` pads or cuts).
Tier and quantisation scheme are not a conversion's business: a copy or a quantizer is another node.

A value that exists at some indices of an axis only (`Layout.at`) is converted where it is, and then sent to where it is
wanted: to one index a send and a receive, to all a broadcast. What is there already, as a copy on all ranks is, costs
nothing. Where one end is at an index of an axis and the other is split along it, the value exists on all ranks in
between (`_on_all_ranks`).
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

import attrs

from colofunc.errors import SpecError
from colofunc.mesh import Mesh, wire_bytes
from colofunc.spec.conversions.lower import ConversionCall, fuse_steps, lower
from colofunc.spec.conversions.moves import FREE, PuzzleMove
from colofunc.spec.conversions.normal import Curve, curve_of, is_free, normal
from colofunc.spec.conversions.refine import Puzzle, local_numel, refine
from colofunc.spec.conversions.search import Question, answer, farthest
from colofunc.spec.layout import At, Layout, covers, make_layout

__all__ = ["Conversion", "ConversionCall", "conversion", "conversion_bytes", "conversion_curve", "conversion_s"]


@attrs.frozen
class Conversion:
    """`moves` in sequence on one value. Per rank: seconds, bytes received."""

    moves: tuple[ConversionCall, ...]
    cost_s: float
    wire_bytes: int


@attrs.frozen
class _Leg:
    """One puzzle and its solution, or (puzzle None) a change of padding of dims that are whole."""

    src: Layout
    dst: Layout
    puzzle: Puzzle | None
    steps: tuple[PuzzleMove, ...]


@attrs.frozen
class _Route:
    legs: tuple[_Leg, ...]
    cost_s: float
    wire_bytes: int
    count: int

    @property
    def key(self) -> tuple[float, int, int]:
        return self.cost_s, self.wire_bytes, self.count

    def then(self, other: _Route) -> _Route:
        return _Route(
            self.legs + other.legs,
            self.cost_s + other.cost_s,
            self.wire_bytes + other.wire_bytes,
            self.count + other.count,
        )


_NOTHING = _Route((), 0.0, 0, 0)
_SECONDS: dict[tuple[Layout, Layout, Mesh, int, str | None], float] = {}


def conversion_s(src: Layout, dst: Layout, mesh: Mesh, itemsize: int, apart: str | None = None) -> float:
    """Seconds of `conversion`; one dict lookup when asked again.

    apart: an axis at whose indices values will be apart (stages), of layouts that do not say where they are yet.
    """
    found = _SECONDS.get((src, dst, mesh, itemsize, apart))
    if found is None:
        between = _on_all_ranks(src, dst)
        if between is not None:
            found = conversion_s(src, between, mesh, itemsize, apart) + conversion_s(
                between, dst, mesh, itemsize, apart
            )
        else:
            route = _route(src, dst, mesh, itemsize, _apart(src, dst) or apart)
            found = 0.0 if src is dst else route.cost_s + _sent_s(src, dst, mesh, itemsize)
        _SECONDS[src, dst, mesh, itemsize, apart] = found
    return found


def conversion_bytes(src: Layout, dst: Layout, mesh: Mesh, itemsize: int) -> int:
    """Bytes that a rank receives in `conversion`."""
    between = _on_all_ranks(src, dst)
    if between is not None:
        return conversion_bytes(src, between, mesh, itemsize) + conversion_bytes(between, dst, mesh, itemsize)
    sent_bytes = 0 if covers(src.at, dst.at) else prod(dst.local_shape) * itemsize
    return 0 if src is dst else _route(src, dst, mesh, itemsize, _apart(src, dst)).wire_bytes + sent_bytes


@lru_cache(maxsize=1 << 16)
def conversion(src: Layout, dst: Layout, mesh: Mesh, itemsize: int) -> Conversion:
    """The cheapest moves from `src` to `dst`; SpecError where shapes differ."""
    if src.shape != dst.shape:
        raise SpecError(f"no conversion from {src} to {dst}: the global shapes differ")
    if src is dst:
        return Conversion((), 0.0, 0)
    between = _on_all_ranks(src, dst)
    if between is not None:
        first, second = conversion(src, between, mesh, itemsize), conversion(between, dst, mesh, itemsize)
        return Conversion(
            first.moves + second.moves, first.cost_s + second.cost_s, first.wire_bytes + second.wire_bytes
        )
    route = _route(src, dst, mesh, itemsize, _apart(src, dst))
    axis_sizes = mesh.shape
    moves: list[ConversionCall] = []
    for leg in route.legs:
        if leg.puzzle is None:
            moves.append(ConversionCall("fit", (leg.dst.local_shape,), leg.dst.local_shape, leg.dst))
        else:
            moves += lower(leg.puzzle, leg.steps, leg.src, axis_sizes)
    there = covers(src.at, dst.at)
    moves = [_at(move, dst.at if there else src.at) for move in moves]
    if not there:
        moves.append(_send(src, dst, mesh))
    sent_bytes = 0 if there else prod(dst.local_shape) * itemsize
    return Conversion(tuple(moves), route.cost_s + _sent_s(src, dst, mesh, itemsize), route.wire_bytes + sent_bytes)


def _on_all_ranks(src: Layout, dst: Layout) -> Layout | None:
    """The layout on the way in which the value exists on all ranks, where neither end has room for the other's axis;
    else None.

    `(pp a) b -> a b @pp=1` is gathered on all ranks, of which only those at index 1 keep it; `a b @pp=1 -> (pp a) b` is
    sent to all, which then take their parts.
    """
    if src.at is not None:
        other = dst.at is not None and dst.at[0] != src.at[0]
        return src.with_at(None) if other or dst.lies_along(src.at[0]) else None
    if dst.at is not None and src.lies_along(dst.at[0]):
        return dst.with_at(None)
    return None


def _apart(src: Layout, dst: Layout) -> str | None:
    """The axis at some indices of which the value is: no copies lie along it that could help to convert."""
    at = src.at or dst.at
    return None if at is None else at[0]


def _at(move: ConversionCall, at: At | None) -> ConversionCall:
    """The move on some ranks only."""
    return attrs.evolve(move, layout=None if move.layout is None else move.layout.with_at(at), on=at)


def _send(src: Layout, dst: Layout, mesh: Mesh) -> ConversionCall:
    """From the first index at which the value is to all at which it is wanted."""
    assert src.at is not None, "what all ranks have is sent to nobody"
    axis, (source, *_) = src.at
    assert dst.at is None or dst.at[0] == axis, "see _on_all_ranks"
    targets = tuple(range(mesh.axis_size(axis))) if dst.at is None else dst.at[1]
    members = tuple(sorted({source, *targets}))
    on = None if len(members) == mesh.axis_size(axis) else (axis, members)
    return ConversionCall("send", ((axis,), mesh.axis_size(axis), source, targets), dst.local_shape, dst, on)


def _sent_s(src: Layout, dst: Layout, mesh: Mesh, itemsize: int) -> float:
    if covers(src.at, dst.at) or src.at is None:
        return 0.0
    return mesh.collective_s("permute", prod(dst.local_shape) * itemsize, (src.at[0],))


@lru_cache(maxsize=1 << 18)
def _route(src: Layout, dst: Layout, mesh: Mesh, itemsize: int, apart: str | None) -> _Route:
    """Legs of the cheapest way, none of them along the axis `apart`. Tiers, and where a value exists, are ignored."""
    src, dst = src.with_tier("device").with_at(None), dst.with_tier("device").with_at(None)
    if (src.dims, src.pending) == (dst.dims, dst.pending):
        return _NOTHING
    if 0 in src.shape:
        # Nothing moves. The copy in the other layout is a value of its own all the same: the one that was there keeps
        # its layout.
        return _Route((_Leg(src, dst, None, ()),), 0.0, 0, 1)
    found = refine(src, dst, mesh, apart)
    if isinstance(found, Puzzle):
        return _solve(found, src, dst, mesh, itemsize)
    routes = []
    for leave, enter in _between(src, dst, found):
        first = _route(src, leave, mesh, itemsize, apart)
        fit = _NOTHING if leave is enter else _Route((_Leg(leave, enter, None, ()),), 0.0, 0, 1)
        routes.append(first.then(fit).then(_route(enter, dst, mesh, itemsize, apart)))
    return min(routes, key=lambda route: route.key)


def _between(src: Layout, dst: Layout, whole: frozenset[int]) -> list[tuple[Layout, Layout]]:
    """Layouts on the way in which the dims `whole` are whole: with the source's padding, with the target's."""

    def pair(layout: Layout, pending: tuple[tuple[str, str], ...]) -> tuple[Layout, Layout]:
        ends = []
        for end in (src, dst):
            dims = tuple(((end.padded_shape[d], None),) if d in whole else layout.dims[d] for d in range(len(src.dims)))
            split = {axis for dim in dims for _, axis in dim}
            kept = tuple((axis, how) for axis, how in pending if axis not in split)
            ends.append(make_layout(dims, src.shape, kept))
        return ends[0], ends[1]

    options = [pair(src, src.pending), pair(dst, dst.pending), pair(dst, src.pending)]
    # A way that starts or ends where it came from would not end.
    lawful = [(a, b) for a, b in options if a is not dst and b is not src]
    return list(dict.fromkeys(lawful or options))


@lru_cache(maxsize=1 << 16)
def conversion_curve(src: Layout, dst: Layout, mesh: Mesh, apart: str | None = None) -> Curve | None:
    """Seconds over bytes of a rank's part of `src`; None where the way leads through whole dims, or there is nothing to
    do. apart: as of `conversion_s`."""
    if src.shape != dst.shape or 0 in src.shape:
        return None
    found = refine(src, dst, mesh, apart)
    return curve_of(found, mesh) if isinstance(found, Puzzle) else None


def _solve(puzzle: Puzzle, src: Layout, dst: Layout, mesh: Mesh, itemsize: int) -> _Route:
    alike = normal(puzzle, mesh)
    back, slots = alike.back, alike.slots
    nbytes = itemsize * local_numel(puzzle, puzzle.start)
    if is_free(mesh):
        nbytes = prod(p.size for p in alike.pieces) ** 2  # everything scales; a multiple of all that it is divided by
    steps: list[PuzzleMove] = []
    where = list(puzzle.start)
    for kind, who, after in answer(Question(alike.pieces, nbytes, alike.prices)):
        chosen = tuple(sorted(back[k] for k in who))
        for k in who:
            where[back[k]] = after[k] if after[k] < 0 else slots[after[k]]
        steps.append((kind, chosen, tuple(where)))
    cost_s, wire, held, count = 0.0, 0, puzzle.start, 0
    for kind, who, after in fuse_steps(tuple(steps)):
        nbytes = itemsize * max(local_numel(puzzle, held), local_numel(puzzle, after))
        held, count = after, count + 1
        if kind not in FREE:
            wire += wire_bytes(kind, nbytes, prod(puzzle.parts[k].size for k in who))
            names = mesh.ordered(puzzle.parts[k].name for k in who)
            cost_s += mesh.collective_s(kind, nbytes, names, farthest(mesh, names) if kind == "permute" else ())
    return _Route((_Leg(src, dst, puzzle, tuple(steps)),), cost_s, wire, count)
