"""Orders: which device takes which stage, where devices differ.

Problem: devices of two generations stand on one axis in some order, and the order decides how well layers can be dealt out. Idea: devices
that are alike are one kind, and only kinds are told apart.

- One stage a device: dynamic programming over (how many of each kind are used, pieces), exact, as in `cuts.cut_in_any_order`, with what a
  stage receives.
- Several stages a device: every arrangement of kinds is cut, exact too, where they are few.

In both the slowest stage is as fast as can be. What else an order decides, how long ranks wait for one another, is in a bound on the step's
time, by which arrangements are compared too (`least_order`). An order that is no better than the one that devices stand in is not taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import factorial, inf, prod

import numpy as np

from colofunc.planner.stages.assignment import CutProblem, Step
from colofunc.planner.stages.cuts import MOST_STATES, Device

MOST_ARRANGEMENTS = 256
"""At most so many arrangements are compared one by one; where there are more, only dynamic programming looks for an order."""
GAIN = 1e-6
"""An order has to be better by this part."""

Order = tuple[int, ...]
"""Of each place of the schedule, the device that stands there."""


def best_order(devices: Sequence[Device], stages_per_device: int, problem_of: Callable[[Order], CutProblem]) -> Order | None:
    """The order in which the slowest stage is fastest; None where the given one is as good.

    devices: in the order in which they stand, with what a stage has of each. problem_of: the cuts to be made in an order.
    """
    kinds = list(dict.fromkeys(devices))
    if len(kinds) < 2:
        return None

    def slowest_s(order: Order) -> float:
        return max(problem_of(order).balanced().seconds)

    if stages_per_device > 1:
        return least_order(devices, slowest_s)
    given = tuple(range(len(devices)))
    found = _by_counts(problem_of(given), devices, kinds)
    return found if found is not None and slowest_s(found) < slowest_s(given) * (1 - GAIN) else None


def least_order(devices: Sequence[Device], cost_s: Callable[[Order], float]) -> Order | None:
    """The order of least cost; None where the given one is as good, or where there are more than `MOST_ARRANGEMENTS`."""
    kinds = list(dict.fromkeys(devices))
    counts = [sum(device == kind for device in devices) for kind in kinds]
    if factorial(len(devices)) // prod(map(factorial, counts)) > MOST_ARRANGEMENTS:
        return None
    given = tuple(range(len(devices)))
    best, best_s = given, cost_s(given)
    for arrangement in arrangements(counts):
        order = _standing(arrangement, devices, kinds)
        this_s = cost_s(order)
        if this_s < best_s * (1 - GAIN):
            best, best_s = order, this_s
    return None if best == given else best


def roomiest_first(devices: Sequence[Device]) -> Order | None:
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


def _standing(arrangement: Sequence[int], devices: Sequence[Device], kinds: Sequence[Device]) -> Order:
    """The devices of an arrangement; of those that are alike the first comes first."""
    left = {number: [k for k, device in enumerate(devices) if device == kind] for number, kind in enumerate(kinds)}
    return tuple(left[number].pop(0) for number in arrangement)


def _by_counts(problem: CutProblem, devices: Sequence[Device], kinds: Sequence[Device]) -> Order | None:
    counts = [sum(device == kind for device in devices) for kind in kinds]
    if prod(count + 1 for count in counts) * len(problem.begins) > MOST_STATES:
        return None
    rooms = [kind.capacity_bytes for kind in kinds]
    found = _arranged(problem, counts, [kind.speed for kind in kinds], rooms)
    if found is None:  # no cut fits, as in `CutProblem.balanced`
        found = _arranged(problem, counts, [kind.speed for kind in kinds], [inf] * len(kinds))
    return None if found is None else _standing(found, devices, kinds)


def _arranged(problem: CutProblem, counts: Sequence[int], speeds: Sequence[float], rooms: Sequence[float]) -> tuple[int, ...] | None:
    """The kinds in the best order, None where none fits.

    steps[used]: per prefix of pieces the best with so many of each kind, and for each the begin of its last stage and the kind of that.
    """
    over = [problem.over(room) for room in rooms]
    steps: dict[tuple[int, ...], tuple[Step, np.ndarray]] = {}
    for used in np.ndindex(*(count + 1 for count in counts)):
        if not any(used):
            steps[used] = Step.begin(problem.pieces), np.full(problem.pieces + 1, -1)
            continue
        best: Step | None = None
        last = np.full(problem.pieces + 1, -1)
        for number, count in enumerate(used):
            if not count:
                continue
            before, _ = steps[(*used[:number], count - 1, *used[number + 1 :])]
            step = problem.step(before, over[number], speeds[number])
            if best is None:
                best = step
                last[:] = number
                continue
            better = (step.slowest_s < best.slowest_s) | ((step.slowest_s == best.slowest_s) & (step.sends_s < best.sends_s))
            best = best.where(better, step)
            last[better] = number
        assert best is not None, "some kind is used"
        steps[used] = best, last
    used = tuple(counts)
    if np.isinf(steps[used][0].slowest_s[problem.pieces]):
        return None
    found: list[int] = []
    end = problem.pieces
    while any(used):
        step, last = steps[used]
        number = int(last[end])
        found.append(number)
        end = int(step.begins[end])
        used = (*used[:number], used[number] - 1, *used[number + 1 :])
    return tuple(reversed(found))
