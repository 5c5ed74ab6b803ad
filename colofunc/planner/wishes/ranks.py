"""Ranks: where two wishes speak for one axis of one tensor or operator, the one of higher rank is heard.

    zero(3, ("dp", "ep"))    layers.0.experts.up  (dp ep d0) ...   rank 0      heard for dp
    experts("ep")            layers.0.experts.up  (ep e) ...       rank 1      heard for ep
    experts("ep")            layers.0.q_proj      whole            rank -1     not heard: zero speaks for ep here

Problem: "states over all ranks" and "experts over these" are both what the field says, of different tensors, and as
wishes they clash. Idea: who speaks of few tensors in particular outranks who speaks of all; what a plan says only so that
nothing is left open yields to everybody. Wishes of equal rank still clash.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from colofunc.planner.sharding.constraints import Constraint

Ranks = Mapping[int, Mapping[str, int]]  # item -> axis -> the highest rank that speaks for it


def highest(said: Iterable[tuple[int, int, Iterable[str]]]) -> Ranks:
    """From (item, rank of a wish, axes it speaks for)."""
    found: dict[int, dict[str, int]] = {}
    for item, rank, axes in said:
        mine = found.setdefault(item, {})
        mine.update({axis: max(rank, mine.get(axis, rank)) for axis in axes})
    return found


def heard(
    ranks: Ranks, item: int, rank: int, where: Mapping[str, object], constraint: Constraint
) -> tuple[dict[str, object], Constraint | None]:
    """What is left of a wish: the axes for which none outranks it, and its constraint on these; None: nothing."""
    mine = {axis: place for axis, place in where.items() if ranks.get(item, {}).get(axis, rank) <= rank}
    return mine, constraint if len(mine) == len(where) else attrs.evolve(constraint, room=None).on(tuple(mine))
