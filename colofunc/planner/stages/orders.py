"""Orders: which device takes which stage, where devices differ.

Problem: devices of two generations stand on one axis in some order, and the order decides how well layers can be dealt
out. Idea: devices that are alike are one kind, and only kinds are told apart.

- One stage a device: dynamic programming over (how many of each kind are used, pieces), exact, as in
  `cuts.cut_in_any_order`, with what a stage receives.
- Several stages a device: every arrangement of kinds is cut, exact too, where they are few.

In both the slowest stage is as fast as can be. What else an order decides, how long ranks wait for one another, is in a
bound on the step's time, by which arrangements are compared too (`least_order`). An order that is no better than the
one that devices stand in is not taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import factorial, prod

from colofunc.planner.stages.assignment import CutProblem
from colofunc.planner.stages.cuts import MOST_STATES, StageDevice, standing

MOST_ARRANGEMENTS = 256
"""At most so many arrangements are compared one by one; where there are more, only dynamic programming looks for an
order."""
GAIN = 1e-6
"""An order has to be better by this part."""

DeviceOrder = tuple[int, ...]
"""Of each place of the schedule, the device that stands there."""


def best_order(
    devices: Sequence[StageDevice], stages_per_device: int, problem_of: Callable[[DeviceOrder], CutProblem]
) -> DeviceOrder | None:
    """The order in which the slowest rank is fastest; None where the given one is as good.

    devices: in the order in which they stand, with what a stage has of each. problem_of: the cuts to be made in an
    order.
    """
    kinds = list(dict.fromkeys(devices))
    if len(kinds) < 2:
        return None

    def slowest_s(order: DeviceOrder) -> float:
        return problem_of(order).slowest_rank_s()

    if stages_per_device > 1:
        return least_order(devices, slowest_s)
    given = tuple(range(len(devices)))
    found = _by_counts(problem_of(given), devices, kinds)
    return found if found is not None and slowest_s(found) < slowest_s(given) * (1 - GAIN) else None


def least_order(devices: Sequence[StageDevice], cost_s: Callable[[DeviceOrder], float]) -> DeviceOrder | None:
    """The order of least cost; None where the given one is as good, or where there are more than `MOST_ARRANGEMENTS`.
    """
    kinds = list(dict.fromkeys(devices))
    counts = [devices.count(kind) for kind in kinds]
    if factorial(len(devices)) // prod(map(factorial, counts)) > MOST_ARRANGEMENTS:
        return None
    given = tuple(range(len(devices)))
    best, best_s = given, cost_s(given)
    for arrangement in arrangements(counts):
        order = standing(arrangement, devices, kinds)
        this_s = cost_s(order)
        if this_s < best_s * (1 - GAIN):
            best, best_s = order, this_s
    return None if best == given else best


def roomiest_first(devices: Sequence[StageDevice]) -> DeviceOrder | None:
    """Devices by memory, since the first stages keep most; None where they stand so already."""
    order = tuple(sorted(range(len(devices)), key=lambda k: -devices[k].capacity_bytes))
    return None if order == tuple(range(len(devices))) else order


def arrangements(counts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All ways to stand in a row for so many of each kind, by the kinds' numbers."""
    if not any(counts):
        yield ()
        return
    for kind, count in enumerate(counts):
        if count:
            fewer = [*counts[:kind], count - 1, *counts[kind + 1 :]]
            for rest in arrangements(fewer):
                yield (kind, *rest)


def _by_counts(problem: CutProblem, devices: Sequence[StageDevice], kinds: Sequence[StageDevice]) -> DeviceOrder | None:
    counts = [devices.count(kind) for kind in kinds]
    line, speeds = problem.line, [kind.speed for kind in kinds]
    if prod(count + 1 for count in counts) * line.pieces > MOST_STATES:
        return None
    _, found, _ = line.in_any_order(counts, [line.over(kind.capacity_bytes) for kind in kinds], speeds)
    if not found:  # no cut fits, as in `CutProblem.balanced`
        _, found, _ = line.in_any_order(counts, [None] * len(kinds), speeds)
    return standing(found, devices, kinds) if found else None
