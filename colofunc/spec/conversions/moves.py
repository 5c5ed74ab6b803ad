"""The moves of a conversion puzzle: what one collective can do with where the parts of mesh axes are.

A state says where each part of a mesh axis is: in a slot, in copies, or in a pending reduction. A move takes a set of
parts at once:

    all_gather  slots -> copies        reduce_scatter  pending -> slots     take_shard  copies -> slots (free)
    all_to_all  slots -> free slots    all_reduce      pending -> copies    keep_first  copies -> pending (free)
    permute     parts of equal size exchange their roles

Large puzzles have fewer moves to try, see Note [Trading places] in `search`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import combinations, permutations, product, repeat

import attrs

from colofunc.spec.conversions.refine import COPY, Locations

# Pieces up to which a puzzle is searched as it is. (dp tp o) -> (tp dp o) of 16 and 8 ranks is one of seven, all of two ranks,
# and a search over their subsets takes seconds: Note [Trading places].
MOST_SEARCHED_WHOLE = 4

# Pieces that a single permutation of the search exchanges; more, where nothing else is to be done, are one permutation all the same.
MOST_EXCHANGED = 4

Step = tuple[str, tuple[int, ...], Locations]  # kind, parts that it acts on, locations after it
With = Callable[[tuple[int, ...], Iterable[int]], Locations]  # pieces and where they are now -> all locations

FREE = ("take_shard", "keep_first")  # moves that cost nothing


@attrs.frozen
class Piece:
    """One part in a normalised puzzle; slots are numbered by first use, so that equal problems are equal keys."""

    size: int
    start: int
    goal: int
    scratch: int  # a slot, or -1


def _subsets(items: list[int]) -> Iterator[tuple[int, ...]]:
    for r in range(1, len(items) + 1):
        yield from combinations(items, r)


def moves_from(pieces: tuple[Piece, ...], state: Locations) -> Iterator[Step]:
    """Moves worth trying from a state: towards goals, out of the way of others, and into scratch slots."""
    held = {loc for loc in state if loc >= 0}
    wanted = {p.goal for p in pieces if p.goal >= 0}
    roomy = all(p.scratch >= 0 for p in pieces)
    large = len(pieces) > MOST_SEARCHED_WHOLE  # Note [Trading places]

    def with_(who: tuple[int, ...], locations: Iterable[int]) -> Locations:
        after = list(state)
        for k, loc in zip(who, locations):
            after[k] = loc
        return tuple(after)

    known: dict[int, list[int]] = {}

    def targets(k: int) -> list[int]:
        """Free slots for piece k, which many subsets ask for."""
        if k not in known:
            known[k] = slots_for(k)
        return known[k]

    def slots_for(k: int) -> list[int]:
        """Its goal, else its scratch slot, or the goal of one to exchange roles with later."""
        p = pieces[k]
        if p.goal >= 0 and p.goal not in held:
            return [p.goal]
        if large and p.scratch >= 0:  # not one that another will have to leave: who trades places does so in one permutation
            return [p.scratch]
        goals = {o.goal for o in pieces if o.goal >= 0 and o.size == p.size}
        if roomy or len(pieces) > 3:
            return sorted({*goals, p.scratch} - held - {-1})
        # Scratch is scarce: any slot of this size will do.
        others = {loc for o in pieces if o.size == p.size for loc in (o.start, o.scratch)}
        return sorted({*goals, *others} - held - {*range(min(others), 0)})

    copies = [k for k, loc in enumerate(state) if loc == COPY]
    for k in copies:
        if pieces[k].goal >= 0 and pieces[k].goal not in held:
            yield "take_shard", (k,), with_((k,), (pieces[k].goal,))
            if roomy:  # free, and less data makes every later move cheaper
                return
    pending = [k for k, loc in enumerate(state) if loc < COPY and (loc != pieces[k].goal)]
    if not pending:
        pending = [k for k, loc in enumerate(state) if loc < COPY and any(o < loc for o in state)]
    for k in copies:
        if pieces[k].goal < COPY:
            yield "keep_first", (k,), with_((k,), (pieces[k].goal,))
        if pending or pieces[k].goal >= 0:
            for slot in targets(k):  # less data for what follows; and a role that another piece may take over
                yield "take_shard", (k,), with_((k,), (slot,))
    yield from _reductions(state, targets, with_)

    loose = [k for k, loc in enumerate(state) if loc >= 0 and loc != pieces[k].goal]
    for who in _subsets(loose):
        yield "all_gather", who, with_(who, repeat(COPY))
    movers = [
        k
        for k in loose
        if (pieces[k].goal >= 0 and (pieces[k].goal not in held or state[k] in wanted))
        or state[k] in wanted
        or not roomy
    ]
    for who in _subsets(movers):
        for slots in product(*[targets(k) for k in who]):
            if len(set(slots)) == len(slots):
                yield "all_to_all", who, with_(who, slots)
    yield from _exchanges(pieces, state, with_)


def _reductions(
    state: Locations, targets: Callable[[int], list[int]], with_: With
) -> Iterator[Step]:
    """All-reduces and reduce-scatters of the innermost kind of reduction that is pending."""
    code = max((loc for loc in state if loc < COPY), default=COPY)
    if code == COPY:
        return
    for who in _subsets([k for k, loc in enumerate(state) if loc == code]):
        yield "all_reduce", who, with_(who, repeat(COPY))
        for slots in product(*(targets(k) for k in who)):
            if len(set(slots)) == len(slots):
                yield "reduce_scatter", who, with_(who, slots)


def _exchanges(
    pieces: tuple[Piece, ...], state: Locations, with_: With
) -> Iterator[Step]:
    """Permutations of ranks: pieces of equal size that are not at home exchange roles, one of them gets home."""
    away = [k for k, loc in enumerate(state) if loc != pieces[k].goal]
    for r, orders in _DERANGED.items():
        if r > 2 and len(pieces) > MOST_SEARCHED_WHOLE:  # a known way has the permutation of more
            continue
        for who in combinations(away, r):
            roles = [state[k] for k in who]
            if max(roles) < 0 or roles.count(roles[0]) == r or any(pieces[k].size != pieces[who[0]].size for k in who):
                continue
            for order in orders:
                new = [roles[o] for o in order]
                if any(loc == pieces[k].goal for k, loc in zip(who, new)):
                    yield "permute", who, with_(who, new)


# Orders of 2, 3 and 4 things in which none stays where it is.
def _derangements(count: int) -> list[tuple[int, ...]]:
    """Permutations that leave nothing in its place."""
    return [order for order in permutations(range(count)) if all(k != place for k, place in enumerate(order))]


_DERANGED = {count: _derangements(count) for count in range(2, MOST_EXCHANGED + 1)}
