"""Residency plans: budgets hold, every use finds its value, next uses decide; replayed by a checker of its own."""

import pytest

from colofunc.errors import PlanError
from colofunc.planner.residency import Item, Links, Trace, check, reside

LINKS = Links(4.0, 4.0, 0.0)


def test_everything_fits_without_moves() -> None:
    trace = Trace((1.0,) * 4, (), (0,) * 4, (Item(4, True, (0, 2), {2}), Item(4, True, (1, 3)), Item(2, False, (0, 3))))
    plan = reside(trace, 10, LINKS)
    assert (plan.moves, plan.residents, plan.peak_bytes, plan.exposed_s) == ((), {0, 1}, 10, 0.0)


def test_an_impossible_budget_names_the_least_and_its_position() -> None:
    trace = Trace((1.0,) * 3, (), (1, 2, 1), (Item(4, True, (0, 1)), Item(3, True, (1, 2))))
    with pytest.raises(PlanError, match="least possible, 9 bytes: position 1 holds 2 bytes that cannot move and needs 7"):
        reside(trace, 8, LINKS)
    check(trace, reside(trace, 9, LINKS), 9)
