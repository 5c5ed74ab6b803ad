"""The multiple-choice knapsack against all choices."""

import itertools
import math

import pytest
import torch

from colofunc.planner.schemes import Picked, SchemeOption, least_cost


def by_search(groups: list[list[SchemeOption]], limits: tuple[float, ...]) -> float:
    """The least cost of all choices that keep to the limits; infinite where none does."""
    best = math.inf
    for choice in itertools.product(*groups):
        taken = [sum(item.takes[k] for item in choice) for k in range(len(limits))]
        if all(amount <= limit for amount, limit in zip(taken, limits, strict=True)):
            best = min(best, sum(item.cost for item in choice))
    return best


@pytest.mark.parametrize("resources", [1, 2])
@pytest.mark.parametrize("seed", range(20))
def test_it_costs_what_a_search_finds(seed: int, resources: int) -> None:
    """Of 5 groups of up to 5: costs over seven orders of magnitude, with ties, and limits from too little to enough."""
    draw = torch.Generator().manual_seed(seed)

    def number(most: int) -> int:
        return int(torch.randint(1, most + 1, (), generator=draw))

    groups = []
    for _ in range(5):
        group = [SchemeOption(number(9) * 10.0 ** -number(7), tuple(number(50) * 1024 for _ in range(resources))) for _ in range(number(5))]
        groups.append([*group, SchemeOption(0.0, (60 * 1024,) * resources)])
    tried = 0
    for share in (0.02, 0.3, 0.5, 0.7, 0.9, 1.0):
        limits = tuple(int(share * 5 * 60 * 1024) for _ in range(resources))
        found, wanted = least_cost(groups, limits), by_search(groups, limits)
        assert (found is None) == math.isinf(wanted)
        if found is not None:
            assert found.cost == pytest.approx(wanted, rel=1e-12)
            assert found.bound == pytest.approx(wanted, rel=1e-6, abs=1e-12)
            tried += 1
    assert tried


def test_a_limit_is_kept_to_the_byte() -> None:
    """One byte less than what the better choice takes."""
    groups = [[SchemeOption(0.0, (10**12 + 1,)), SchemeOption(1.0, (1,))], [SchemeOption(0.0, (10**12,)), SchemeOption(1e-3, (1,))]]
    for limit, wanted in ((2 * 10**12 + 1, 0.0), (2 * 10**12, 1e-3), (10**12 + 1, 1.0), (2, 1.001)):
        found = least_cost(groups, (limit,))
        assert found is not None and found.cost <= wanted + 1e-12, limit
        picked = [group[pick] for group, pick in zip(groups, found.picks, strict=True)]
        assert sum(item.takes[0] for item in picked) <= limit
    assert least_cost(groups, (1,)) is None


def test_of_nothing_nothing_is_picked() -> None:
    assert least_cost([], (1,)) == Picked((), 0.0, 0.0)
