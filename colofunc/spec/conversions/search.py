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
from colofunc.spec.conversions.moves import FREE, MOST_SEARCHED_WHOLE, Piece, Step, moves_from
from colofunc.spec.conversions.refine import COPY, Locations

# Each time that so many moves were tried, what is left counts twice as much; three moving axes never need as many.
PATIENCE = 5_000

# The same where a way is known before. Then what is left counts twice: that leads to a cheaper one soon, where there is
# one.
PATIENCE_BESIDE_KNOWN = 15
HASTE_BESIDE_KNOWN = 2.0

# A way that is known is kept where there are more pieces: each state has thousands of moves then, and searches found
# none cheaper in the plans of LLaMA-3 70B on 1,024 ranks and of four layers of 8B on 512.
MOST_SEARCHED_BESIDE_KNOWN = 6

# Of sums of seconds: ways that are closer cost the same.
ROUNDING = 1e-9

Cost = tuple[float, float, int]


@attrs.frozen(eq=False)
class Prices:
    """Per kind of collective, what it costs over each set of pieces: a set is the sum of its pieces' bits.

    Names are gone: where two sets of axes cost the same, their puzzles are one. Equal tables are one object.
    """

    table: tuple[tuple[tuple[float, float], ...], ...]  # in the order of KINDS; (seconds, seconds per byte)

    def at(self, kind: str, who: tuple[int, ...]) -> tuple[float, float]:
        return self.table[_PLACE[kind]][sum(1 << k for k in who)]


_PLACE = {kind: k for k, kind in enumerate(KINDS)}
_PRICES: dict[tuple[object, ...], Prices] = {}


@lru_cache(maxsize=1 << 14)
def prices(mesh: Mesh | None, names: tuple[str, ...]) -> Prices:
    """Prices over parts of axes with these names; without a mesh communication is free and only bytes count."""
    # a mesh knows them so
    sets = [tuple(sorted(name for k, name in enumerate(names) if bits >> k & 1)) for bits in range(1 << len(names))]
    table = tuple(tuple(_price(mesh, kind, some) for some in sets) for kind in KINDS)
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
    n = prod(mesh.part_size(name) for name in names)
    return rotation(n, n // 2)


@attrs.frozen
class Question:
    """A normalised puzzle. nbytes: of one rank's part at the start."""

    pieces: tuple[Piece, ...]
    nbytes: float
    prices: Prices


@lru_cache(maxsize=1 << 16)
def answer(q: Question) -> tuple[Step, ...]:
    """The cheapest steps from start to goal that are found."""
    return _reducing(q, _found(q))


def _reducing(q: Question, steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The same with an all-reduce in place of a gather of what a reduce-scatter has just split, where that costs no
    more.

    Both ways receive the same bytes, so which of them the search finds is a matter of rounding. What only reduces runs
    where its operand was made (`passes.coalesce`), beside the rest of backward; a gather would be left for the reader,
    with nothing to hide behind.
    """
    done: list[Step] = []
    where = tuple(p.start for p in q.pieces)
    for kind, who, after in steps:
        last = done[-1] if done else None
        if kind == "all_gather" and last is not None and last[0] == "reduce_scatter" and set(who) <= set(last[1]):
            before = where if len(done) == 1 else done[-2][2]
            rest = tuple(k for k in last[1] if k not in who)
            between = tuple(before[k] if k in who else loc for k, loc in enumerate(after))
            whole: tuple[Step, ...] = (("all_reduce", who, after),)
            if rest:
                whole = (("reduce_scatter", rest, between), *whole)
            if _cost(q, before, whole)[0] <= _cost(q, before, (last, (kind, who, after)))[0] * (1 + ROUNDING):
                done[-1:] = whole
                continue
        done.append((kind, who, after))
    return tuple(done)


def _found(q: Question) -> tuple[Step, ...]:
    start = tuple(p.start for p in q.pieces)
    goal = tuple(p.goal for p in q.pieces)
    if len(q.pieces) <= MOST_SEARCHED_WHOLE:
        return _search(q, start, goal)
    known = [way for way in (_permuting_first(q, start, goal), _permuting_last(q, start, goal)) if way is not None]
    best = min(known, key=lambda way: _cost(q, start, way), default=None)
    if best is not None and len(q.pieces) > MOST_SEARCHED_BESIDE_KNOWN:
        return best
    return _search(q, start, goal, best)


def _permuting_first(q: Question, start: Locations, goal: Locations) -> tuple[Step, ...] | None:
    """One permutation, then what is left: Note [Trading places]."""
    met = _staying(tuple(p.size for p in q.pieces), goal, start)
    return None if met == start else (_permute(start, met), *_search(q, met, goal))


def _permuting_last(q: Question, start: Locations, goal: Locations) -> tuple[Step, ...] | None:
    """All that no permutation does, then one."""
    met = _staying(tuple(p.size for p in q.pieces), start, goal)
    return None if met == goal else (*_search(q, start, met), _permute(met, goal))


def _part_bytes(q: Question, where: Locations) -> float:
    """Bytes of one rank's part where the pieces are so; the question's own are those at the start."""

    def held(roles: Iterable[int]) -> int:
        return prod(p.size for p, loc in zip(q.pieces, roles) if loc >= 0)

    return q.nbytes * held(p.start for p in q.pieces) / held(where)


def _staying(sizes: tuple[int, ...], here: Locations, there: Locations) -> Locations:
    """Locations that hold the slots of `there`, in which pieces stay as they are `here` wherever such a slot is among
    them.

    Pieces of equal size take one another's slots; copies and pending sums are nobody else's.
    """
    met = list(there)
    for size in set(sizes):
        who = [k for k, n in enumerate(sizes) if n == size and here[k] >= 0 and there[k] >= 0]
        free = {there[k] for k in who}
        stay = [k for k in who if here[k] in free]
        for k in stay:
            met[k] = here[k]
        free -= {here[k] for k in stay}
        movers = [k for k in who if k not in stay]
        for k in movers:  # home at once, where nobody else stays
            met[k] = there[k] if there[k] in free else -1
            free.discard(there[k])
        for k in movers:
            if met[k] < 0:
                met[k] = min(free)
                free.discard(met[k])
    return tuple(met)


def _permute(here: Locations, there: Locations) -> Step:
    return "permute", tuple(k for k, loc in enumerate(here) if loc != there[k]), there


def _search(q: Question, start: Locations, goal: Locations, known: tuple[Step, ...] | None = None) -> tuple[Step, ...]:
    """A* from locations of a question's pieces to others. known: a way that is kept where no cheaper one is found soon.
    """
    most = None if known is None else _cost(q, start, known)
    pieces = tuple(attrs.evolve(p, start=a, goal=b) for p, a, b in zip(q.pieces, start, goal))
    sizes = tuple(p.size for p in pieces)
    whole = float(q.nbytes * prod(p.size for p in q.pieces if p.start >= 0))
    bound = _bound(q, sizes, goal, whole)
    terms = _terms(q)
    best: dict[Locations, Cost] = {start: (0.0, 0.0, 0)}
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
        seconds, wire, moves = best[state]
        held = prod(n for n, loc in zip(sizes, state) if loc >= 0)
        before = whole / held
        haste = _haste(tried, known is not None)
        for kind, who, after in moves_from(pieces, state):
            tried += 1
            more, share, alpha_s, beta_s = terms(kind, who)
            nbytes = max(before, whole / (held * more))
            cost = (seconds + (alpha_s + beta_s * nbytes), wire + share * nbytes, moves + 1)
            if most is not None and cost >= most:
                continue
            before_it = best.get(after)
            if before_it is None or cost < before_it:
                left_s, left_bytes, left = bound(after)
                if most is not None and (cost[0] + left_s, cost[1] + left_bytes, cost[2] + left) >= most:
                    continue
                best[after] = cost
                came[after] = (state, kind, who)
                count += 1
                done.discard(after)
                hope = (cost[0] + haste * left_s, cost[1] + haste * left_bytes, cost[2] + left)
                heapq.heappush(queue, (hope, count, after))
    assert known is not None, "there always is a way"
    return known


def _cost(q: Question, start: Locations, steps: tuple[Step, ...]) -> Cost:
    """What a way costs, in the units of the search."""
    terms, held = _terms(q), start
    seconds, wire = 0.0, 0.0
    for kind, who, after in steps:
        nbytes = max(_part_bytes(q, held), _part_bytes(q, after))
        _, share, alpha_s, beta_s = terms(kind, who)
        seconds, wire, held = seconds + (alpha_s + beta_s * nbytes), wire + share * nbytes, after
    return seconds, wire, len(steps)


def _haste(tried: int, way_known: bool) -> float:
    """How often the least that is left counts; more than once is quicker, and no longer sure to be the cheapest."""
    if way_known:
        return HASTE_BESIDE_KNOWN
    return 2.0 ** (tried // PATIENCE)


def _trace_back(
    start: Locations, goal: Locations, came: dict[Locations, tuple[Locations, str, tuple[int, ...]]]
) -> tuple[Step, ...]:
    steps: list[Step] = []
    state = goal
    while state != start:
        before, kind, who = came[state]
        steps.append((kind, who, state))
        state = before
    return tuple(reversed(steps))


def _terms(q: Question) -> Callable[[str, tuple[int, ...]], tuple[float, float, float, float]]:
    """What there is to know of a move over some pieces, whatever the size of the tensor.

    Into how many times as many parts it is split behind it; bytes received, seconds, and seconds per byte, of the
    larger of a rank's parts before and after.
    """
    sizes = [p.size for p in q.pieces]
    known: dict[tuple[str, tuple[int, ...]], tuple[float, float, float, float]] = {}

    def terms(kind: str, who: tuple[int, ...]) -> tuple[float, float, float, float]:
        found = known.get((kind, who))
        if found is None:
            n = prod(sizes[k] for k in who)
            priced = (0.0, 0.0, 0.0) if kind in FREE else (_share(kind, n), *q.prices.at(kind, who))
            found = known[kind, who] = (_more_held(kind, n), *priced)
        return found

    return terms


def _bound(
    q: Question, sizes: tuple[int, ...], goal: Locations, whole: float
) -> Callable[[Locations], tuple[float, float, int]]:
    """Lower bound of (seconds, bytes, moves) from a state to the goal: Note [Bounds]."""
    final = whole / prod(n for n, loc in zip(sizes, goal) if loc >= 0)
    wanted = {loc for loc in goal if loc >= 0}
    pending: dict[tuple[int, int], int] = {}
    for role in zip(goal, sizes):
        if role[0] < COPY:
            pending[role] = pending.get(role, 0) + 1
    leave_s, reduce_s, permute_s, beta_s = _least(q.prices, sizes)
    # `whole` is what the pieces spread: other axes of the mesh only make more ranks with the same problem.
    again, ranks = max(prod(n for n, loc in zip(sizes, goal) if loc == COPY), 1) - 1, prod(sizes)

    def bound(state: Locations) -> tuple[float, float, int]:
        foreign, terms, missing = False, 1, 1
        there_s = away_s = 0.0  # latencies that no permutation spares; of all parts out of place
        over: dict[tuple[int, int], int] = {}
        for k, loc in enumerate(state):
            if loc < COPY:
                role = (loc, sizes[k])
                over[role] = over.get(role, 0) + 1
                if over[role] > pending.get(role, 0):
                    there_s += reduce_s[k]
                if loc != goal[k]:
                    terms *= sizes[k]
                    away_s += reduce_s[k]
            elif loc >= 0 and loc != goal[k]:
                if loc in wanted:
                    foreign = True
                else:
                    there_s += leave_s[k]
                missing *= sizes[k]
                away_s += leave_s[k]
        if terms == missing == 1:
            return 0.0, 0.0, int(state != goal)
        nbytes = final if foreign else final * (1 - 1 / missing)
        if terms > 1:
            nbytes = max(nbytes, whole * (terms - 1 + again) / ranks)
        return min(away_s, there_s + permute_s) + beta_s * nbytes, nbytes, 1

    return bound


@lru_cache(maxsize=4096)
def _least(found: Prices, sizes: tuple[int, ...]) -> tuple[tuple[float, ...], tuple[float, ...], float, float]:
    """Least latency per part of a gather or all-to-all and of a reduction, by piece, of a permutation, and seconds per
    byte.

    Pieces of equal size exchange roles, so each has the least of all of its size.
    """
    least = {kind: dict.fromkeys(sizes, float("inf")) for kind in KINDS}
    rates = []
    for kind, over in zip(KINDS, found.table, strict=True):
        for bits, (alpha_s, beta_s) in enumerate(over[1:], 1):
            who = [k for k in range(len(sizes)) if bits >> k & 1]
            rates.append(beta_s / _share(kind, prod(sizes[k] for k in who)))
            for k in who:
                least[kind][sizes[k]] = min(least[kind][sizes[k]], alpha_s / (1 if kind == "permute" else len(who)))

    def either(*kinds: str) -> tuple[float, ...]:
        return tuple(min(least[kind][n] for kind in kinds) for n in sizes)

    permute_s = min(least["permute"].values(), default=0.0)
    return (
        either("all_gather", "all_to_all"),
        either("reduce_scatter", "all_reduce"),
        permute_s,
        min(rates, default=0.0),
    )


def _more_held(kind: str, n: int) -> float:
    """Into how many times as many parts a tensor is split behind a move over `n` ranks."""
    if kind == "all_gather":
        return 1 / n
    return n if kind in ("reduce_scatter", "take_shard") else 1.0


def _share(kind: str, n: int) -> float:
    """Bytes that a rank receives, of the larger of its parts before and after."""
    return {"permute": 1.0, "all_reduce": 2 * (n - 1) / n}.get(kind, (n - 1) / n)
