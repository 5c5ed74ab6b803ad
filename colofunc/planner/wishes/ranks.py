"""Wishes of different rank for one tensor: who is heard for which axis.

    zero(3, ("dp", "ep"))    layers.0.experts.up  (dp ep d0) ...   rank 0      heard for dp
    experts("ep")            layers.0.experts.up  (ep e) ...       rank 1      heard for ep
    experts("ep")            layers.0.q_proj      whole            rank -1     not heard: zero speaks for ep here

Problem: "states over all ranks" and "experts over these" are both what the field says, of different tensors, and as
wishes they clash. Idea: who speaks of few tensors in particular outranks who speaks of all; what a plan says only so
that nothing is left open yields to everybody. Wishes of equal rank still clash.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from colofunc.planner.sharding.constraints import Constraint

Places = dict[str, object]
"""Mesh axis -> where a wish puts it: a dim, a factor, "whole", what is pending, or a frozenset of several of these."""
HighestRanks = Mapping[int, Mapping[str, int]]
"""Item -> axis -> the highest rank that speaks for it."""


def highest_ranks(wished: Iterable[tuple[int, int, Iterable[str]]]) -> HighestRanks:
    """From (item, rank of a wish, axes it speaks for)."""
    ranks: dict[int, dict[str, int]] = {}
    for item, rank, axes in wished:
        of_item = ranks.setdefault(item, {})
        for axis in axes:
            of_item[axis] = max(rank, of_item.get(axis, rank))
    return ranks


def part_heard(
    ranks: HighestRanks, item: int, rank: int, places: Mapping[str, object], constraint: Constraint
) -> tuple[Places, Constraint | None]:
    """What is left of a wish: the axes for which none outranks it, and its constraint on these; None: nothing."""
    of_item = ranks.get(item, {})
    own = {axis: place for axis, place in places.items() if of_item.get(axis, rank) <= rank}
    if len(own) == len(places):
        return own, constraint
    return own, attrs.evolve(constraint, room=None).on(tuple(own))


def can_meet(one: object, other: object) -> bool:
    """Whether two wishes leave a place for an axis; one of several places is a frozenset."""
    return not _as_set(one).isdisjoint(_as_set(other))


def _as_set(place: object) -> frozenset[object]:
    return place if isinstance(place, frozenset) else frozenset([place])


def words_of_place(place: object) -> str:
    """A place in the words of an error."""
    if isinstance(place, frozenset):
        return " or ".join(sorted(map(words_of_place, place)))
    return f"dim {place}" if isinstance(place, int) else str(place)
