"""The cheapest sequence of collectives that solves a conversion puzzle, by A*.

States and moves are those of `moves`. Costs are compared as (seconds, bytes received per rank, moves). Sources: A*
(Hart, Nilsson, Raphael 1968); the moves are those of "Memory-efficient array redistribution through portable collective
communication" (2112.01075), with pending reductions and sets of axes added.

Note [Bounds]. Two lower bounds on the bytes that the busiest rank still receives. Information: the part of its final
data that it lacks; all of it if a slot that it holds belongs to another part in the end. Reduction: each of N elements
with n terms to reduce and c final copies takes n-1 receives to become final somewhere and one for every further copy,
(n-1 + c-1)·N over all ranks. And one on latencies: a slot that is held and wanted by nobody is left by a gather or an
all-to-all, a pending role that is too many by a reduction, and a move of m parts pays for at most m of either, so each
costs at least the least latency per part. Other parts out of place take such moves too, or one permutation, which
changes neither the slots that are held nor what is pending. All fall by at most what a move costs, so the first time a
state is reached is the best.

Note [Trading places]. One permutation of ranks brings pieces of equal size into each other's slots, however many they
are. So a large puzzle is two small questions: which slots are left and entered, whoever does it, and who is where.
Pieces stay in slots that are wanted, only the others are searched for, and one permutation puts all in order, first or
last. The cheaper of the two is a way to begin with: the search over all moves looks for a cheaper one among so many
states, and keeps to it otherwise. Of the largest puzzles it is the answer.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from functools import lru_cache
from math import prod

import attrs

from colofunc.mesh import KINDS, Mesh
from colofunc.mesh.cost import rotation
from colofunc.spec.conversions.moves import FREE, MOST_SEARCHED_WHOLE, PuzzleMove, PuzzlePiece, moves_from
from colofunc.spec.conversions.refine import COPY, Locations

# Each time that so many moves were tried, what is left counts twice as much; three moving axes never need as many.
PATIENCE = 5_000

# The same where a way is known before. Then what is left counts twice: that leads to a cheaper one soon, where there is
# one.
PATIENCE_BESIDE_KNOWN = 15
HASTE_BESIDE_KNOWN = 2.0  # what is left to do counts this many times where a way is known

# A way that is known is kept where there are more pieces: each state has thousands of moves then, and searches found
# none cheaper in the plans of LLaMA-3 70B on 1,024 ranks and of four layers of 8B on 512.
MOST_SEARCHED_BESIDE_KNOWN = 6

# Of sums of seconds: ways that are closer cost the same.
ROUNDING = 1e-9

RouteCost = tuple[float, float, int]


@attrs.frozen(eq=False)
class Prices:
    """Per kind of collective, what it costs over each set of pieces: a set is the sum of its pieces' bits.

    Names are gone: where two sets of axes cost the same, their puzzles are one. Equal tables are one object.
    """

    table: tuple[tuple[tuple[float, float], ...], ...]  # in the order of KINDS; (seconds, seconds per byte)

    def at(self, kind: str, who: tuple[int, ...]) -> tuple[float, float]:
        return self.table[_ROW[kind]][sum(1 << piece for piece in who)]


_ROW = {kind: row for row, kind in enumerate(KINDS)}
_PRICES: dict[tuple[object, ...], Prices] = {}


@lru_cache(maxsize=1 << 14)
def prices(mesh: Mesh | None, names: tuple[str, ...]) -> Prices:
    """Prices over parts of axes with these names; without a mesh communication is free and only bytes count."""
    rows = []
    for kind in KINDS:
        row = []
        for bits in range(1 << len(names)):
            # sorted, as the mesh has them in its own cache
            members = sorted(name for piece, name in enumerate(names) if bits >> piece & 1)
            row.append(_price(mesh, kind, tuple(members)))
        rows.append(tuple(row))
    table = tuple(rows)
    return _PRICES.setdefault(table, Prices(table))


def _price(mesh: Mesh | None, kind: str, names: tuple[str, ...]) -> tuple[float, float]:
    if mesh is None:
        return 0.0, 0.0
    if kind == "permute":
        names = mesh.ordered(names)
        return mesh.alpha_beta(kind, names, farthest(mesh, names))
    return mesh.alpha_beta(kind, names)


def farthest(mesh: Mesh, names: tuple[str, ...]) -> tuple[int, ...]:
    """The table of a permutation that costs most: half a turn takes everyone's data out of its box, where a group is in
    several.

    A search prices permutations by who takes part, before their tables are known. Pieces take one another's place in
    them, so few stay.
    """
    ranks = prod(mesh.part_size(name) for name in names)
    return rotation(ranks, ranks // 2)


@attrs.frozen
class Question:
    """A normalised puzzle. nbytes: of one rank's part at the start."""

    pieces: tuple[PuzzlePiece, ...]
    nbytes: float
    prices: Prices


@lru_cache(maxsize=1 << 16)
def answer(question: Question) -> tuple[PuzzleMove, ...]:
    """The cheapest steps from start to goal that are found."""
    return _all_reduced(question, _found(question))


def _all_reduced(question: Question, steps: tuple[PuzzleMove, ...]) -> tuple[PuzzleMove, ...]:
    """The same with an all-reduce in place of a gather of what a reduce-scatter has just split, where that costs no
    more.

    Both ways receive the same bytes, so which of them the search finds is a matter of rounding. What only reduces runs
    where its operand was made (`passes.coalesce`), beside the rest of backward; a gather would be left for the reader,
    with nothing to hide behind.
    """
    done: list[PuzzleMove] = []
    start = tuple(piece.start for piece in question.pieces)
    for step in steps:
        if done and _gathers_what_was_scattered(done[-1], step):
            before = start if len(done) == 1 else done[-2][2]
            replaced = _one_all_reduce(before, done[-1], step)
            cost_s, *_ = _cost(question, before, replaced)
            cost_before_s, *_ = _cost(question, before, (done[-1], step))
            if cost_s <= cost_before_s * (1 + ROUNDING):
                done[-1:] = replaced
                continue
        done.append(step)
    return tuple(done)


def _gathers_what_was_scattered(earlier: PuzzleMove, later: PuzzleMove) -> bool:
    """Whether a gather undoes some of the splitting that the reduce-scatter before it did."""
    return later[0] == "all_gather" and earlier[0] == "reduce_scatter" and set(later[1]) <= set(earlier[1])


def _one_all_reduce(before: Locations, scatter: PuzzleMove, gather: PuzzleMove) -> tuple[PuzzleMove, ...]:
    """Steps for the two: an all-reduce of what both move, after a reduce-scatter of the rest."""
    _, scattered, _ = scatter
    _, gathered, after = gather
    all_reduce: PuzzleMove = ("all_reduce", gathered, after)
    rest = tuple(piece for piece in scattered if piece not in gathered)
    if not rest:
        return (all_reduce,)
    between = list(after)
    for piece in gathered:
        between[piece] = before[piece]
    return ("reduce_scatter", rest, tuple(between)), all_reduce


def _found(question: Question) -> tuple[PuzzleMove, ...]:
    start = tuple(piece.start for piece in question.pieces)
    goal = tuple(piece.goal for piece in question.pieces)
    if len(question.pieces) <= MOST_SEARCHED_WHOLE:
        return _search(question, start, goal)
    ways = (_permuting_first(question, start, goal), _permuting_last(question, start, goal))
    known = [way for way in ways if way is not None]
    best = min(known, key=lambda way: _cost(question, start, way), default=None)
    if best is not None and len(question.pieces) > MOST_SEARCHED_BESIDE_KNOWN:
        return best
    return _search(question, start, goal, best)


def _permuting_first(question: Question, start: Locations, goal: Locations) -> tuple[PuzzleMove, ...] | None:
    """One permutation, then what is left: Note [Trading places]. None where nothing is to be permuted."""
    permuted = _staying(tuple(piece.size for piece in question.pieces), goal, start)
    if permuted == start:
        return None
    return _permute(start, permuted), *_search(question, permuted, goal)


def _permuting_last(question: Question, start: Locations, goal: Locations) -> tuple[PuzzleMove, ...] | None:
    """All that no permutation does, then one. None where nothing is to be permuted."""
    permuted = _staying(tuple(piece.size for piece in question.pieces), start, goal)
    if permuted == goal:
        return None
    return *_search(question, start, permuted), _permute(permuted, goal)


def _part_bytes(question: Question, where: Locations) -> float:
    """Bytes of one rank's part where the pieces are so; the question's own are those at the start."""

    def parts(locations: Iterable[int]) -> int:
        return prod(piece.size for piece, location in zip(question.pieces, locations) if location >= 0)

    return question.nbytes * parts(piece.start for piece in question.pieces) / parts(where)


def _staying(sizes: tuple[int, ...], here: Locations, there: Locations) -> Locations:
    """Locations that hold the slots of `there`, in which pieces stay as they are `here` wherever such a slot is among
    them.

    Pieces of equal size take one another's slots; copies and pending sums are nobody else's.
    """
    locations = list(there)
    for size in set(sizes):
        in_slots = [k for k, n in enumerate(sizes) if n == size and here[k] >= 0 and there[k] >= 0]
        free = {there[piece] for piece in in_slots}
        staying = [piece for piece in in_slots if here[piece] in free]
        for piece in staying:
            locations[piece] = here[piece]
        free -= {here[piece] for piece in staying}

        # The others go to their own slots where nobody stays there, then to the least slots that are left.
        homeless: list[int] = []
        for piece in in_slots:
            if piece in staying:
                continue
            if there[piece] in free:
                locations[piece] = there[piece]
                free.discard(there[piece])
            else:
                homeless.append(piece)
        for piece in homeless:
            locations[piece] = min(free)
            free.discard(locations[piece])
    return tuple(locations)


def _permute(here: Locations, there: Locations) -> PuzzleMove:
    movers = tuple(piece for piece, location in enumerate(here) if location != there[piece])
    return "permute", movers, there


def _search(
    question: Question, start: Locations, goal: Locations, known: tuple[PuzzleMove, ...] | None = None
) -> tuple[PuzzleMove, ...]:
    """A* from locations of a question's pieces to others. known: a way that is kept where no cheaper one is found soon.
    """
    limit = None if known is None else _cost(question, start, known)
    pieces = tuple(attrs.evolve(piece, start=a, goal=b) for piece, a, b in zip(question.pieces, start, goal))
    sizes = tuple(piece.size for piece in pieces)
    whole = float(question.nbytes * prod(piece.size for piece in question.pieces if piece.start >= 0))
    bound = _bound(question, sizes, goal, whole)
    terms = _terms(question)
    best: dict[Locations, RouteCost] = {start: (0.0, 0.0, 0)}
    came: dict[Locations, tuple[Locations, str, tuple[int, ...]]] = {}
    queue = [(bound(start), 0, start)]
    done: set[Locations] = set()
    count = tried = 0
    while queue:
        _, _, state = heapq.heappop(queue)
        if state == goal:
            return _trace_back(start, goal, came)
        if known is not None and len(done) >= PATIENCE_BESIDE_KNOWN:
            return known
        if state in done:
            continue
        done.add(state)
        seconds, received_bytes, moves = best[state]
        parts = prod(size for size, location in zip(sizes, state) if location >= 0)
        part_bytes = whole / parts
        haste = _haste(tried, known is not None)
        for kind, who, after in moves_from(pieces, state):
            tried += 1
            more_parts, share, alpha_s, beta_s = terms(kind, who)
            nbytes = max(part_bytes, whole / (parts * more_parts))
            cost = (seconds + (alpha_s + beta_s * nbytes), received_bytes + share * nbytes, moves + 1)
            # The bound is what takes long: ways that are dearer already are left before it.
            if limit is not None and cost >= limit:
                continue
            cost_before = best.get(after)
            if cost_before is not None and cost >= cost_before:
                continue
            left_s, left_bytes, left = bound(after)
            if limit is not None and (cost[0] + left_s, cost[1] + left_bytes, cost[2] + left) >= limit:
                continue
            best[after] = cost
            came[after] = (state, kind, who)
            count += 1
            done.discard(after)
            hope = (cost[0] + haste * left_s, cost[1] + haste * left_bytes, cost[2] + left)
            heapq.heappush(queue, (hope, count, after))
    assert known is not None, "there always is a way"
    return known


def _cost(question: Question, start: Locations, steps: tuple[PuzzleMove, ...]) -> RouteCost:
    """What a way costs, in the units of the search."""
    terms = _terms(question)
    before = start
    seconds = received_bytes = 0.0
    for kind, who, after in steps:
        nbytes = max(_part_bytes(question, before), _part_bytes(question, after))
        _, share, alpha_s, beta_s = terms(kind, who)
        seconds += alpha_s + beta_s * nbytes
        received_bytes += share * nbytes
        before = after
    return seconds, received_bytes, len(steps)


def _haste(tried: int, way_known: bool) -> float:
    """How often the least that is left counts; more than once is quicker, and no longer sure to be the cheapest."""
    if way_known:
        return HASTE_BESIDE_KNOWN
    return 2.0 ** (tried // PATIENCE)


def _trace_back(
    start: Locations, goal: Locations, came: dict[Locations, tuple[Locations, str, tuple[int, ...]]]
) -> tuple[PuzzleMove, ...]:
    steps: list[PuzzleMove] = []
    state = goal
    while state != start:
        before, kind, who = came[state]
        steps.append((kind, who, state))
        state = before
    return tuple(reversed(steps))


def _terms(question: Question) -> Callable[[str, tuple[int, ...]], tuple[float, float, float, float]]:
    """What there is to know of a move over some pieces, whatever the size of the tensor.

    Into how many times as many parts it is split behind it; bytes received, seconds, and seconds per byte, of the
    larger of a rank's parts before and after.
    """
    sizes = [piece.size for piece in question.pieces]
    known: dict[tuple[str, tuple[int, ...]], tuple[float, float, float, float]] = {}

    def terms(kind: str, who: tuple[int, ...]) -> tuple[float, float, float, float]:
        found = known.get((kind, who))
        if found is None:
            ranks = prod(sizes[piece] for piece in who)
            share = alpha_s = beta_s = 0.0
            if kind not in FREE:
                share = _share(kind, ranks)
                alpha_s, beta_s = question.prices.at(kind, who)
            found = known[kind, who] = (_more_parts(kind, ranks), share, alpha_s, beta_s)
        return found

    return terms


def _bound(
    question: Question, sizes: tuple[int, ...], goal: Locations, whole: float
) -> Callable[[Locations], tuple[float, float, int]]:
    """Lower bound of (seconds, bytes, moves) from a state to the goal: Note [Bounds]."""
    final = whole / prod(size for size, location in zip(sizes, goal) if location >= 0)
    wanted = {location for location in goal if location >= 0}
    pending: dict[tuple[int, int], int] = {}
    for role in zip(goal, sizes):
        if role[0] < COPY:
            pending[role] = pending.get(role, 0) + 1
    leave_s, reduce_s, permute_s, beta_s = _least(question.prices, sizes)
    # `whole` is what the pieces spread: other axes of the mesh only make more ranks with the same problem.
    ranks = prod(sizes)
    more_copies = prod(size for size, location in zip(sizes, goal) if location == COPY) - 1

    def bound(state: Locations) -> tuple[float, float, int]:
        foreign, terms, missing = False, 1, 1
        there_s = away_s = 0.0  # latencies that no permutation spares; of all parts out of place
        pending_here: dict[tuple[int, int], int] = {}
        for piece, location in enumerate(state):
            if location < COPY:
                role = (location, sizes[piece])
                pending_here[role] = pending_here.get(role, 0) + 1
                if pending_here[role] > pending.get(role, 0):
                    there_s += reduce_s[piece]
                if location != goal[piece]:
                    terms *= sizes[piece]
                    away_s += reduce_s[piece]
            elif location >= 0 and location != goal[piece]:
                if location in wanted:
                    foreign = True
                else:
                    there_s += leave_s[piece]
                missing *= sizes[piece]
                away_s += leave_s[piece]
        if terms == missing == 1:
            return 0.0, 0.0, int(state != goal)
        nbytes = final if foreign else final * (1 - 1 / missing)
        if terms > 1:
            nbytes = max(nbytes, whole * (terms - 1 + more_copies) / ranks)
        return min(away_s, there_s + permute_s) + beta_s * nbytes, nbytes, 1

    return bound


@lru_cache(maxsize=4096)
def _least(prices: Prices, sizes: tuple[int, ...]) -> tuple[tuple[float, ...], tuple[float, ...], float, float]:
    """Least latency per part of a gather or all-to-all and of a reduction, by piece, of a permutation, and seconds per
    byte.

    Pieces of equal size exchange roles, so each has the least of all of its size.
    """
    least = {kind: dict.fromkeys(sizes, float("inf")) for kind in KINDS}
    rates = []
    for kind, row in zip(KINDS, prices.table, strict=True):
        for bits, (alpha_s, beta_s) in enumerate(row[1:], 1):
            who = [piece for piece in range(len(sizes)) if bits >> piece & 1]
            rates.append(beta_s / _share(kind, prod(sizes[piece] for piece in who)))
            # One permutation moves any number of pieces; other moves pay for each.
            payers = 1 if kind == "permute" else len(who)
            for piece in who:
                size = sizes[piece]
                least[kind][size] = min(least[kind][size], alpha_s / payers)

    def either(one: str, other: str) -> tuple[float, ...]:
        return tuple(min(least[one][size], least[other][size]) for size in sizes)

    permute_s = min(least["permute"].values(), default=0.0)
    return (
        either("all_gather", "all_to_all"),
        either("reduce_scatter", "all_reduce"),
        permute_s,
        min(rates, default=0.0),
    )


def _more_parts(kind: str, ranks: int) -> float:
    """Into how many times as many parts a tensor is split behind a move over `ranks` ranks."""
    if kind == "all_gather":
        return 1 / ranks
    if kind in ("reduce_scatter", "take_shard"):
        return ranks
    return 1.0


def _share(kind: str, ranks: int) -> float:
    """Bytes that a rank receives, of the larger of its parts before and after."""
    if kind == "permute":
        return 1.0
    if kind == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks
