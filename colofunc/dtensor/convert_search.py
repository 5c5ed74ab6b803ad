"""The cheapest sequence of collectives that solves a conversion puzzle, by A*.

A state says where each part of a mesh axis is: in a slot, in copies, or in a pending reduction. A move takes a set of
parts at once:

    all_gather  slots -> copies        reduce_scatter  pending -> slots     take_shard  copies -> slots (free)
    all_to_all  slots -> free slots    all_reduce      pending -> copies    keep_first  copies -> pending (free)
    permute     parts of equal size exchange their roles

Costs are compared as (seconds, bytes received per rank, moves). Sources: A* (Hart, Nilsson, Raphael 1968); the moves
are those of "Memory-efficient array redistribution through portable collective communication" (2112.01075), with
pending reductions and sets of axes added.

Note [Bounds]. Two lower bounds on the bytes that the busiest rank still receives. Information: the part of its final
data that it lacks; all of it if a slot that it holds belongs to another part in the end. Reduction: each of N elements
with n terms to reduce and c final copies takes n-1 receives to become final somewhere and one for every further copy,
(n-1 + c-1)·N over all ranks. Both fall by at most what a move costs, so the first time a state is reached is the best.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import combinations, permutations, product
from math import prod

import attrs

from colofunc.dtensor.convert_refine import COPY, Locations
from colofunc.mesh import Mesh

# States looked at before the search takes what looks nearest to the goal; three moving axes never need as many.
PATIENCE = 600

Step = tuple[str, tuple[int, ...], Locations]  # kind, parts that it acts on, locations after it
Cost = tuple[float, float, int]


@attrs.frozen
class Piece:
    """One part in a normalised puzzle; slots are numbered by first use, so that equal problems are equal keys."""

    names: str  # "" where the mesh prices all axes alike
    size: int
    start: int
    goal: int
    scratch: int  # a slot, or -1


@attrs.frozen
class Question:
    """A normalised puzzle. nbytes: of one rank's part at the start; ranks: of the mesh; limit: of peak bytes."""

    pieces: tuple[Piece, ...]
    nbytes: int
    ranks: int
    mesh: Mesh | None  # None: communication is free and only bytes count
    limit: int | None


@lru_cache(maxsize=1 << 16)
def answer(q: Question) -> tuple[Step, ...] | None:
    """The cheapest steps from start to goal; None where the peak limit leaves no way."""
    start = tuple(p.start for p in q.pieces)
    goal = tuple(p.goal for p in q.pieces)
    sizes = tuple(p.size for p in q.pieces)
    whole = q.nbytes * prod(n for n, loc in zip(sizes, start) if loc >= 0)
    bound = _bound(q, sizes, goal, whole)
    price = _pricer(q)
    best: dict[Locations, Cost] = {start: (0.0, 0.0, 0)}
    came: dict[Locations, tuple[Locations, str, tuple[int, ...]]] = {}
    first = bound(start)
    queue = [((first[0], first[1], 0), 0, start)]
    done: set[Locations] = set()
    count = 0
    while queue:
        _, _, state = heapq.heappop(queue)
        if state == goal:
            return _trace_back(start, goal, came)
        if state in done:
            continue
        done.add(state)
        seconds, wire, moves = best[state]
        held = prod(n for n, loc in zip(sizes, state) if loc >= 0)
        before = whole // held
        haste = 1.0 if len(done) < PATIENCE else 4.0
        for kind, who, after in _moves(q.pieces, state):
            nbytes = whole // prod(n for n, loc in zip(sizes, after) if loc >= 0)
            if q.limit is not None and 2 * max(before, nbytes) > q.limit:
                continue
            move_s, move_bytes = price(kind, who, max(before, nbytes))
            cost = (seconds + move_s, wire + move_bytes, moves + 1)
            known = best.get(after)
            if known is None or cost < known:
                best[after] = cost
                came[after] = (state, kind, who)
                left_s, left_bytes = bound(after)
                count += 1
                done.discard(after)
                heapq.heappush(queue, ((cost[0] + haste * left_s, cost[1] + haste * left_bytes, cost[2]), count, after))
    return None


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


def _pricer(q: Question) -> Callable[[str, tuple[int, ...], int], tuple[float, float]]:
    """(seconds, bytes received) of a move over some pieces; nbytes: the larger of a rank's parts before and after."""
    sizes, names = [p.size for p in q.pieces], [p.names for p in q.pieces]
    factors: dict[tuple[str, tuple[int, ...]], tuple[float, float, float]] = {}

    def price(kind: str, who: tuple[int, ...], nbytes: int) -> tuple[float, float]:
        if kind in ("take_shard", "keep_first"):
            return 0.0, 0.0
        found = factors.get((kind, who))
        if found is None:
            n = prod(sizes[k] for k in who)
            share = {"permute": 1.0, "all_reduce": 2 * (n - 1) / n}.get(kind, (n - 1) / n)
            alpha_beta = (0.0, 0.0) if q.mesh is None else q.mesh.alpha_beta(kind, tuple(names[k] for k in who))
            found = factors[kind, who] = (share, *alpha_beta)
        share, alpha_s, beta_s = found
        return alpha_s + beta_s * nbytes, share * nbytes

    return price


def _bound(
    q: Question, sizes: tuple[int, ...], goal: Locations, whole: int
) -> Callable[[Locations], tuple[float, float]]:
    """Lower bound of (seconds, bytes) from a state to the goal: Note [Bounds]."""
    pieces = range(len(sizes))
    final = whole // prod(n for n, loc in zip(sizes, goal) if loc >= 0)
    wanted = {loc: k for k, loc in enumerate(goal) if loc >= 0}
    alpha_s, beta_s = (0.0, 0.0) if q.mesh is None else _least(q.mesh, tuple(p.names for p in q.pieces))
    # `whole` is what the pieces spread: other axes of the mesh only make more ranks with the same problem.
    ranks = prod(sizes)
    copies = ranks * final // whole // prod(n for n, loc in zip(sizes, goal) if loc < COPY)

    def bound(state: Locations) -> tuple[float, float]:
        nbytes, terms, missing = 0.0, 1, 1
        for k in pieces:
            loc = state[k]
            if loc == goal[k]:
                continue
            if loc < COPY:
                terms *= sizes[k]
            elif loc >= 0:
                if loc in wanted:
                    nbytes = float(final)
                missing *= sizes[k]
        if not nbytes:
            nbytes = final * (1 - 1 / missing)
        if terms > 1:
            nbytes = max(nbytes, whole * (terms - 1 + max(copies, 1) - 1) / ranks)
        return (alpha_s + beta_s * nbytes, nbytes) if nbytes else (0.0, 0.0)

    return bound


@lru_cache(maxsize=4096)
def _least(mesh: Mesh, names: tuple[str, ...]) -> tuple[float, float]:
    """The least alpha and the least seconds per received byte of any collective over some of the axes."""
    alphas, betas = [], []
    for r in range(1, len(names) + 1):
        for chosen in combinations(names, r):
            for kind in ("all_gather", "reduce_scatter", "all_to_all", "permute", "all_reduce"):
                alpha_s, beta_s = mesh.alpha_beta(kind, chosen)
                alphas.append(alpha_s)
                betas.append(beta_s / 2 if kind == "all_reduce" else beta_s)
    return min(alphas, default=0.0), min(betas, default=0.0)


def _subsets(items: list[int]) -> Iterator[tuple[int, ...]]:
    for r in range(1, len(items) + 1):
        yield from combinations(items, r)


def _moves(pieces: tuple[Piece, ...], state: Locations) -> Iterator[Step]:
    """Moves worth trying from a state: towards goals, out of the way of others, and into scratch slots."""
    held = {loc for loc in state if loc >= 0}
    wanted = {p.goal for p in pieces if p.goal >= 0}
    roomy = all(p.scratch >= 0 for p in pieces)

    def with_(changes: dict[int, int]) -> Locations:
        return tuple(changes.get(k, loc) for k, loc in enumerate(state))

    def targets(k: int) -> list[int]:
        """Free slots for piece k: its goal, else its scratch slot, or the goal of one to exchange roles with later."""
        p = pieces[k]
        if p.goal >= 0 and p.goal not in held:
            return [p.goal]
        goals = {o.goal for o in pieces if o.goal >= 0 and o.size == p.size}
        if roomy or len(pieces) > 3:
            return sorted({*goals, p.scratch} - held - {-1})
        # Scratch is scarce: any slot of this size will do.
        others = {loc for o in pieces if o.size == p.size for loc in (o.start, o.scratch)}
        return sorted({*goals, *others} - held - {*range(min(others), 0)})

    copies = [k for k, loc in enumerate(state) if loc == COPY]
    for k in copies:
        if pieces[k].goal >= 0 and pieces[k].goal not in held:
            yield "take_shard", (k,), with_({k: pieces[k].goal})
            if roomy:  # free, and less data makes every later move cheaper
                return
    pending = [k for k, loc in enumerate(state) if loc < COPY and (loc != pieces[k].goal)]
    if not pending:
        pending = [k for k, loc in enumerate(state) if loc < COPY and any(o < loc for o in state)]
    for k in copies:
        if pieces[k].goal < COPY:
            yield "keep_first", (k,), with_({k: pieces[k].goal})
        if pending or pieces[k].goal >= 0:
            for slot in targets(k):  # less data for what follows; and a role that another piece may take over
                yield "take_shard", (k,), with_({k: slot})
    yield from _reductions(state, targets, with_)

    loose = [k for k, loc in enumerate(state) if loc >= 0 and loc != pieces[k].goal]
    for who in _subsets(loose):
        yield "all_gather", who, with_(dict.fromkeys(who, COPY))
    movers = [
        k
        for k in loose
        if (pieces[k].goal >= 0 and (pieces[k].goal not in held or state[k] in wanted))
        or state[k] in wanted
        or not roomy
    ]
    for who in _subsets(movers):
        for slots in product(*(targets(k) for k in who)):
            if len(set(slots)) == len(slots):
                yield "all_to_all", who, with_(dict(zip(who, slots)))
    yield from _exchanges(pieces, state, with_)


def _reductions(
    state: Locations, targets: Callable[[int], list[int]], with_: Callable[[dict[int, int]], Locations]
) -> Iterator[Step]:
    """All-reduces and reduce-scatters of the innermost kind of reduction that is pending."""
    code = max((loc for loc in state if loc < COPY), default=COPY)
    if code == COPY:
        return
    for who in _subsets([k for k, loc in enumerate(state) if loc == code]):
        yield "all_reduce", who, with_(dict.fromkeys(who, COPY))
        for slots in product(*(targets(k) for k in who)):
            if len(set(slots)) == len(slots):
                yield "reduce_scatter", who, with_(dict(zip(who, slots)))


def _exchanges(
    pieces: tuple[Piece, ...], state: Locations, with_: Callable[[dict[int, int]], Locations]
) -> Iterator[Step]:
    """Permutations of ranks: pieces of equal size that are not at home exchange roles, one of them gets home."""
    away = [k for k, loc in enumerate(state) if loc != pieces[k].goal]
    for r in (2, 3, 4):
        for who in combinations(away, r):
            if len({pieces[k].size for k in who}) > 1 or not any(state[k] >= 0 for k in who):
                continue
            for order in permutations(who):
                new = {k: state[o] for k, o in zip(who, order)}
                if all(k != o for k, o in zip(who, order)) and any(new[k] == pieces[k].goal for k in who):
                    if len({state[k] for k in who}) > 1:
                        yield "permute", who, with_(new)
