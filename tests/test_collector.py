"""While a plan is made cycles are collected less often, and behind it as often as before."""

import gc

import pytest

from colofunc.planner.collector import THRESHOLD, fewer_collections


def test_the_collector_is_as_before_behind_a_plan_that_fails() -> None:
    before = gc.get_threshold()
    with pytest.raises(ZeroDivisionError), fewer_collections():
        assert gc.get_threshold() == (max(THRESHOLD, before[0]), *before[1:])
        raise ZeroDivisionError
    assert gc.get_threshold() == before


def test_who_switched_it_off_keeps_it_off() -> None:
    before = gc.get_threshold()
    gc.set_threshold(0, 5, 5)
    try:
        with fewer_collections():
            assert gc.get_threshold() == (0, 5, 5)
    finally:
        gc.set_threshold(*before)
