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
from itertools import chain, groupby, islice, permutations, product
from math import prod

import attrs

from colofunc.mesh import KINDS, Mesh
from colofunc.spec.conversions.moves import FREE, PuzzleMove, PuzzlePiece
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

    pieces: tuple[PuzzlePiece, ...]
    prices: Prices
    back: tuple[int, ...]
    slots: tuple[int, ...]


@lru_cache(maxsize=256)
def is_free(mesh: Mesh) -> bool:
    """Whether no collective costs time on this mesh."""
    return all(mesh.alpha_beta(kind, (axis,)) == (0.0, 0.0) for kind, axis in product(KINDS, mesh.axis_names))


def normal(puzzle: Puzzle, mesh: Mesh) -> Normal:
    """The puzzle under standard names."""
    free = is_free(mesh)
    best: Normal | None = None
    least: tuple[object, ...] = ()
    for order in _orders(puzzle, _active(puzzle)):
        pieces, slots = _label(puzzle, order)
        found = prices(None if free else mesh, tuple(puzzle.parts[part].name for part in order))
        key = (pieces, found.table)
        if best is None or key < least:
            best, least = Normal(tuple(PuzzlePiece(*piece) for piece in pieces), found, order, slots), key
    assert best is not None, "no parts are one order, too"
    return best


def _active(puzzle: Puzzle) -> list[int]:
    """The parts that take part: those that change, and those that others may go by."""
    pending = {location for location in (*puzzle.start, *puzzle.goal) if location < COPY}
    active: list[int] = []
    copies: list[int] = []
    reduces = False
    for part, (start, goal) in enumerate(zip(puzzle.start, puzzle.goal)):
        if start != goal:
            active.append(part)
            reduces = reduces or start < COPY
        elif start < COPY and len(pending) > 1:  # reductions of two kinds are done one behind the other
            active.append(part)
        elif start == COPY:
            copies.append(part)
    # A sum may go by way of an axis that holds copies, on less data. With many axes the search takes seconds and finds
    # nothing.
    if reduces and len(active) + len(copies) <= MOST_BY_WAY:
        return sorted([*active, *copies])
    return active


def _orders(puzzle: Puzzle, active: list[int]) -> Iterator[tuple[int, ...]]:
    """The parts by what they are, those alike in every order (at most `ORDERS`)."""
    held, wanted = set(puzzle.start), set(puzzle.goal)

    def looks(part: int) -> tuple[int, ...]:
        start, goal = puzzle.start[part], puzzle.goal[part]
        size, has_scratch = puzzle.parts[part].size, puzzle.scratch[part] >= 0
        return size, min(start, 0), min(goal, 0), start in wanted, goal in held, has_scratch

    by_looks = sorted(active, key=lambda part: (looks(part), part))
    alike = [tuple(group) for _, group in groupby(by_looks, key=looks)]
    # a product makes all of them before it gives the first
    orders = [islice(permutations(group), ORDERS) for group in alike]
    for groups in islice(product(*orders), ORDERS):
        yield tuple(chain.from_iterable(groups))


def _label(puzzle: Puzzle, order: tuple[int, ...]) -> tuple[tuple[tuple[int, int, int, int], ...], tuple[int, ...]]:
    """(size, start, goal and scratch of each part in an order, slots numbered as they come; the slots)."""
    numbers: dict[int, int] = {}

    def number(location: int) -> int:
        return location if location < 0 else numbers.setdefault(location, len(numbers))

    pieces = []
    for part in order:
        size = puzzle.parts[part].size
        pieces.append((size, number(puzzle.start[part]), number(puzzle.goal[part]), number(puzzle.scratch[part])))
    return tuple(pieces), tuple(numbers)


class Curve:
    """Seconds over bytes of a rank's part at the start: sizes that were solved, in order, with the line that is
    cheapest there.
    """

    __slots__ = ("_known", "_lines", "_sizes", "pieces", "prices")

    def __init__(self, pieces: tuple[PuzzlePiece, ...], found: Prices) -> None:
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
        # Between two sizes with one line nothing else is cheapest.
        above = bisect_left(sizes, nbytes)
        if sizes[above] == nbytes or _same(lines[above - 1], lines[above]):
            return lines[above]
        return self._solve(nbytes)

    def _solve(self, nbytes: float) -> tuple[float, float]:
        line = _line_of(self.pieces, self.prices, answer(Question(self.pieces, nbytes, self.prices)))
        position = bisect_left(self._sizes, nbytes)
        self._sizes.insert(position, nbytes)
        self._lines.insert(position, line)
        return line


def _line_of(pieces: tuple[PuzzlePiece, ...], found: Prices, steps: tuple[PuzzleMove, ...]) -> tuple[float, float]:
    """(seconds, seconds per byte of a rank's part at the start) of these steps."""
    sizes = [piece.size for piece in pieces]
    ways = []  # at the start and behind each step, into how many parts the tensor is split
    for where in (tuple(piece.start for piece in pieces), *(step[2] for step in steps)):
        ways.append(prod(size for size, location in zip(sizes, where) if location >= 0))
    alpha_s = beta_s = 0.0
    for (kind, who, _), before, after in zip(steps, ways, ways[1:]):
        if kind not in FREE:
            step_s, step_s_per_byte = found.at(kind, who)
            alpha_s += step_s
            beta_s += step_s_per_byte * (ways[0] / min(before, after))
    return alpha_s, beta_s


def _same(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return all(abs(x - y) <= 1e-9 * abs(x) for x, y in zip(one, other, strict=True))


_CURVES: dict[tuple[tuple[PuzzlePiece, ...], Prices], Curve] = {}
_PUZZLES: dict[tuple[object, ...], Curve] = {}


def curve_of(puzzle: Puzzle, mesh: Mesh) -> Curve:
    """The curve that all puzzles share which are alike."""
    known = (mesh, tuple(part.name for part in puzzle.parts), puzzle.start, puzzle.goal, puzzle.scratch)
    found = _PUZZLES.get(known)
    if found is None:
        alike = normal(puzzle, mesh)
        key = (alike.pieces, alike.prices)
        if key not in _CURVES:
            _CURVES[key] = Curve(*key)
        found = _PUZZLES[known] = _CURVES[key]
    return found
