"""Puzzles under standard names: what is alike is solved once.

Problem: a planner prices a hundred thousand conversions, and most are one another's renaming: `(dp b) s -> b (dp s)` is
`(tp b) s -> b (tp s)` where both axes have two ranks and cost alike. Idea: number slots by first use, forget names of
axes and keep what collectives over them cost, and put parts in an order that does not depend on where they stand in the
mesh.

Sizes are forgotten too. Each way to convert costs alpha + beta bytes, so the cheapest costs a minimum of lines, which
is concave: where one line is the cheapest at two sizes, it is the cheapest at every size between.

    bytes      64 B ----------------- 1 MiB ------------------------- 64 GiB
    cheapest   all_reduce             reduce_scatter + all_gather     the same: nothing to ask in between
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby, islice, permutations, product
from math import prod

import attrs

from colofunc.mesh import KINDS, Mesh
from colofunc.spec.conversions.moves import FREE, Piece, Step
from colofunc.spec.conversions.refine import COPY, Puzzle
from colofunc.spec.conversions.search import Prices, Question, answer, prices

MOST_BY_WAY = 3
"""Parts of a puzzle in which axes that hold copies before and behind are tried as detours."""

ORDERS = 24
"""Orders of parts that are alike at first sight, of which the least is the standard one."""

APART = 64
"""Beyond the sizes that were solved, the next is so many times as large (or small): one line may then do for all
between."""


@attrs.frozen
class Normal:
    """A puzzle under standard names, and the way back: part of each piece, slot of each numbered slot."""

    pieces: tuple[Piece, ...]
    prices: Prices
    back: tuple[int, ...]
    slots: tuple[int, ...]


@lru_cache(maxsize=256)
def is_free(mesh: Mesh) -> bool:
    """Whether no collective costs time on this mesh."""
    return all(mesh.alpha_beta(kind, (axis,)) == (0.0, 0.0) for kind in KINDS for axis in mesh.axis_names)


def normal(puzzle: Puzzle, mesh: Mesh) -> Normal:
    """The puzzle under standard names."""
    mixed = len({loc for loc in (*puzzle.start, *puzzle.goal) if loc < COPY}) > 1
    reduces = any(a < COPY and a != b for a, b in zip(puzzle.start, puzzle.goal))
    ends = list(enumerate(zip(puzzle.start, puzzle.goal)))
    active = [k for k, (a, b) in ends if a != b or (a < COPY and mixed)]
    # A sum may go by way of an axis that holds copies, on less data. With many axes the search takes seconds and finds
    # nothing.
    idle = [k for k, (a, b) in ends if a == b == COPY and reduces]
    if len(active) + len(idle) <= MOST_BY_WAY:
        active = sorted({*active, *idle})
    free = is_free(mesh)
    best: Normal | None = None
    least: tuple[object, ...] = ()
    for order in _orders(puzzle, active):
        pieces, slots = _label(puzzle, order)
        found = prices(None if free else mesh, tuple(puzzle.parts[k].name for k in order))
        key = (pieces, found.table)
        if best is None or key < least:
            best, least = Normal(tuple(Piece(*p) for p in pieces), found, order, slots), key
    assert best is not None, "no parts are one order, too"
    return best


def _orders(puzzle: Puzzle, active: list[int]) -> Iterator[tuple[int, ...]]:
    """The parts by what they are, those alike in every order (at most `ORDERS`)."""
    held, wanted = set(puzzle.start), set(puzzle.goal)

    def looks(k: int) -> tuple[int, ...]:
        start, goal = puzzle.start[k], puzzle.goal[k]
        return puzzle.parts[k].size, min(start, 0), min(goal, 0), start in wanted, goal in held, puzzle.scratch[k] >= 0

    alike = [tuple(group) for _, group in groupby(sorted(active, key=lambda k: (looks(k), k)), key=looks)]
    # a product makes all of them before it gives the first
    some = [islice(permutations(group), ORDERS) for group in alike]
    for found in islice(product(*some), ORDERS):
        yield tuple(k for group in found for k in group)


def _label(puzzle: Puzzle, order: tuple[int, ...]) -> tuple[tuple[tuple[int, int, int, int], ...], tuple[int, ...]]:
    numbers: dict[int, int] = {}

    def number(loc: int) -> int:
        return loc if loc < 0 else numbers.setdefault(loc, len(numbers))

    pieces = tuple(
        (puzzle.parts[k].size, number(puzzle.start[k]), number(puzzle.goal[k]), number(puzzle.scratch[k]))
        for k in order
    )
    return pieces, tuple(numbers)


class Curve:
    """Seconds over bytes of a rank's part at the start: sizes that were solved, in order, with the line that is
    cheapest there.
    """

    __slots__ = ("_known", "_lines", "_sizes", "pieces", "prices")

    def __init__(self, pieces: tuple[Piece, ...], found: Prices) -> None:
        self.pieces, self.prices = pieces, found
        self._sizes: list[float] = []
        self._lines: list[tuple[float, float]] = []
        self._known: dict[int, float] = {}

    def seconds(self, nbytes: int) -> float:
        found = self._known.get(nbytes)
        if found is None:
            alpha_s, beta_s = self._line(nbytes)
            found = self._known[nbytes] = alpha_s + beta_s * nbytes
        return found

    def _line(self, nbytes: int) -> tuple[float, float]:
        sizes, lines = self._sizes, self._lines
        if not sizes:
            return self._solve(nbytes)
        if nbytes > sizes[-1]:
            self._solve(max(nbytes, sizes[-1] * APART))
        elif nbytes < sizes[0]:
            self._solve(min(nbytes, sizes[0] / APART))
        k = bisect_left(sizes, nbytes)
        if sizes[k] == nbytes or _same(lines[k - 1], lines[k]):
            return lines[k]
        return self._solve(nbytes)

    def _solve(self, nbytes: float) -> tuple[float, float]:
        line = _line_of(self.pieces, self.prices, answer(Question(self.pieces, nbytes, self.prices)))
        k = bisect_left(self._sizes, nbytes)
        self._sizes.insert(k, nbytes)
        self._lines.insert(k, line)
        return line


def _line_of(pieces: tuple[Piece, ...], found: Prices, steps: tuple[Step, ...]) -> tuple[float, float]:
    """(seconds, seconds per byte of a rank's part at the start) of these steps."""
    sizes = [p.size for p in pieces]
    alpha_s = beta_s = 0.0
    ways = []
    for where in (tuple(piece.start for piece in pieces), *(step[2] for step in steps)):
        ways.append(prod(size for size, place in zip(sizes, where) if place >= 0))
    for (kind, who, _), before, after in zip(steps, ways, ways[1:]):
        if kind not in FREE:
            a, b = found.at(kind, who)
            alpha_s, beta_s = alpha_s + a, beta_s + b * (ways[0] / min(before, after))
    return alpha_s, beta_s


def _same(a: tuple[float, float], b: tuple[float, float]) -> bool:
    return all(abs(x - y) <= 1e-9 * abs(x) for x, y in zip(a, b, strict=True))


_CURVES: dict[tuple[tuple[Piece, ...], Prices], Curve] = {}
_PUZZLES: dict[tuple[object, ...], Curve] = {}


def curve_of(puzzle: Puzzle, mesh: Mesh) -> Curve:
    """The curve that all puzzles share which are alike."""
    known = (mesh, tuple(p.name for p in puzzle.parts), puzzle.start, puzzle.goal, puzzle.scratch)
    found = _PUZZLES.get(known)
    if found is None:
        alike = normal(puzzle, mesh)
        key = (alike.pieces, alike.prices)
        if key not in _CURVES:
            _CURVES[key] = Curve(*key)
        found = _PUZZLES[known] = _CURVES[key]
    return found
