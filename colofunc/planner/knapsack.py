"""A multiple-choice knapsack: one option of each group, of the least cost together, within a limit of each of some resources.

    least_cost([[Item(0.0, (8,)), Item(0.3, (2,))], [Item(0.0, (8,)), Item(0.1, (2,))]], limits=(10,))      # picks (0, 1), cost 0.1

A program of whole numbers (0 or 1 for each option), which HiGHS solves. Groups share nothing but the limits, so the relaxation has few
fractions (at most one group for each limit) and its bound is near: 560 groups of 7 take a second or two. A solver of floating-point
numbers keeps to a limit within a tolerance, so what it gives is added up exactly, and where it is above a limit by that, the limit is
lowered by as much and asked again. `bound` says what any choice costs at least: the cost is the least one where they are equal.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

MOST_NODES = 20_000
"""Nodes of the search tree that are looked at, so that an answer does not depend on how fast a machine is."""
ROUNDS = 8
"""How often limits are lowered because an answer was above them by a tolerance."""
ROW = 1e6
"""What a limit becomes in the solver, whose tolerance is absolute."""


@attrs.frozen
class Item:
    """An option: its cost, 0 or more, and what it takes of each resource."""

    cost: float
    takes: tuple[float, ...]


@attrs.frozen
class Picked:
    """Which option of each group, what all of them cost, and what any choice costs at least."""

    picks: tuple[int, ...]
    cost: float
    bound: float


def least_cost(groups: Sequence[Sequence[Item]], limits: Sequence[float]) -> Picked | None:
    """The choice of the least cost within `limits`, one for each resource; None where there is none."""
    if not groups:
        return Picked((), 0.0, 0.0)
    first = _cheapest(groups)
    if _above(groups, first, limits) is None:  # no limit binds
        cost = _cost(groups, first)
        return Picked(first, cost, cost)
    asked = [float(limit) for limit in limits]
    bound: float | None = None
    for _ in range(ROUNDS):
        answer = _solved(groups, asked)
        if answer is None:
            return None
        if bound is None:
            bound = answer.bound  # of the limits as they are
        above = _above(groups, answer.picks, limits)
        if above is None:
            return attrs.evolve(answer, bound=min(bound, answer.cost))
        resource, by = above
        asked[resource] -= by
    return None


def _cheapest(groups: Sequence[Sequence[Item]]) -> tuple[int, ...]:
    """Of each group the option of the least cost, of several the one that takes least."""
    return tuple(min(range(len(group)), key=lambda k: (group[k].cost, group[k].takes)) for group in groups)


def _cost(groups: Sequence[Sequence[Item]], picks: Sequence[int]) -> float:
    return sum(group[pick].cost for group, pick in zip(groups, picks, strict=True))


def _above(groups: Sequence[Sequence[Item]], picks: Sequence[int], limits: Sequence[float]) -> tuple[int, float] | None:
    """The first resource of which picks take more than there is, and by how much."""
    for resource, limit in enumerate(limits):
        by = sum(group[pick].takes[resource] for group, pick in zip(groups, picks, strict=True)) - limit
        if by > 0:
            return resource, by
    return None


def _solved(groups: Sequence[Sequence[Item]], limits: Sequence[float]) -> Picked | None:
    sizes = [len(group) for group in groups]
    items = [item for group in groups for item in group]
    if any(limit < 0 for limit in limits):
        return None
    cost = np.array([item.cost for item in items])
    group_of = np.repeat(np.arange(len(groups)), sizes)
    one_each = csr_matrix((np.ones(len(items)), (group_of, np.arange(len(items)))))
    rows = [LinearConstraint(one_each, 1, 1)]
    for resource, limit in enumerate(limits):
        takes = np.array([item.takes[resource] for item in items], dtype=float)
        # In units in which the limit (or the largest that an option takes, where it is 0) is ROW.
        unit = max(limit, float(takes.max())) / ROW or 1.0
        rows.append(LinearConstraint(csr_matrix(takes / unit), -np.inf, limit / unit))
    # The solver stops within 1e-6 of the least cost: costs are scaled so that this is nothing.
    scale = 1e6 / (float(cost.max()) or 1.0)
    options = {"mip_rel_gap": 0.0, "node_limit": MOST_NODES}
    result = milp(cost * scale, constraints=rows, bounds=Bounds(0, 1), integrality=np.ones(len(items)), options=options)
    if result.x is None:
        return None
    picks, begin = [], 0
    for size in sizes:
        picks.append(int(np.argmax(result.x[begin : begin + size])))
        begin += size
    found = _cost(groups, picks)
    return Picked(tuple(picks), found, min(found, max(0.0, float(result.mip_dual_bound) / scale)))
