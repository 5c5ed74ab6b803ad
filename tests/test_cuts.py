"""Cuts of layers in stages: the optimum, beside every cut that there is."""

from itertools import combinations, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import colofunc as cf
from colofunc.planner.stages.cuts import Cut, StageDevice, balanced_cut, cut, cut_in_any_order

INF = float("inf")
# Whole numbers, so that sums are exact.
LAYERS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=7)
DEVICES = st.lists(st.builds(StageDevice, st.sampled_from([1, 2, 4]), st.sampled_from([6, 12, 24, INF])), min_size=1, max_size=4)


def slowest(layers: list[tuple[int, int]], devices: list[StageDevice], ends: tuple[int, ...]) -> float:
    """Seconds of the slowest stage of a cut; inf where a stage does not fit."""
    worst = 0.0
    for begin, end, device in zip((0, *ends), ends, devices):
        part = layers[begin:end]
        if sum(nbytes for _, nbytes in part) > device.capacity_bytes:
            return INF
        worst = max(worst, sum(seconds for seconds, _ in part) / device.speed)
    return worst


def least(layers: list[tuple[int, int]], devices: list[StageDevice]) -> float:
    """Over every cut with a layer on each device."""
    ways = combinations(range(1, len(layers)), len(devices) - 1)
    return min((slowest(layers, devices, (*way, len(layers))) for way in ways), default=INF)


def holds(found: Cut, layers: list[tuple[int, int]], devices: list[StageDevice]) -> None:
    """A cut is what it says that it is."""
    assert sorted(found.devices) == list(range(len(devices)))
    assert slowest(layers, [devices[k] for k in found.devices], found.ends) == found.slowest_s


@given(LAYERS, DEVICES)
@settings(max_examples=300, deadline=None)
def test_the_optimum_in_an_order(layers: list[tuple[int, int]], devices: list[StageDevice]) -> None:
    want = least(layers, devices)
    if want == INF:
        with pytest.raises(cf.PlanError, match=r"no cut of|a stage has at least one layer"):
            cut(*zip(*layers), devices)
        return
    found = cut(*zip(*layers), devices)
    assert found.slowest_s == want
    holds(found, layers, devices)


@given(LAYERS, DEVICES)
@settings(max_examples=200, deadline=None)
def test_the_optimum_in_any_order(layers: list[tuple[int, int]], devices: list[StageDevice]) -> None:
    want = min(least(layers, list(order)) for order in permutations(devices))
    if want == INF:
        with pytest.raises(cf.PlanError, match=r"no cut of|a stage has at least one layer"):
            cut_in_any_order(*zip(*layers), devices)
        return
    found = cut_in_any_order(*zip(*layers), devices)
    assert found.slowest_s == want
    holds(found, layers, devices)


def test_equal_devices_under_a_cap() -> None:
    assert balanced_cut([4, 1, 1, 1, 1], [1] * 5, 2) == Cut((1, 5), (0, 1), 4.0)
    assert balanced_cut([4, 1, 1, 1, 1], [1] * 5, 2, capacity_bytes=3) == Cut((2, 5), (0, 1), 5.0)


def test_large_cuts() -> None:
    """96 layers on 32 stages; and on 32 devices of 4 kinds in any order."""
    seconds = [1 + (7 * k) % 5 for k in range(96)]
    assert balanced_cut(seconds, [1] * 96, 32).slowest_s >= sum(seconds) / 32
    kinds = [StageDevice(speed, 12) for speed in (1, 1.5, 2, 3)]
    in_order = cut(seconds, [1] * 96, kinds * 2)
    free = cut_in_any_order(seconds, [1] * 96, kinds * 2)
    assert free.slowest_s <= in_order.slowest_s


def test_what_cannot_be_cut() -> None:
    with pytest.raises(cf.PlanError, match=r"^3 stages for 2 layers: a stage has at least one layer; give fewer stages$"):
        balanced_cut([1, 1], [1, 1], 3)
    message = r"^no cut of 3 layers fits: they keep 6 bytes, the largest 4, and 2 devices have 6, the smallest 3; give more devices, or"
    with pytest.raises(cf.PlanError, match=message):
        balanced_cut([1, 1, 1], [1, 4, 1], 2, capacity_bytes=3)
    with pytest.raises(cf.PlanError, match=r"^9000 layers to cut, and at most 8192 are; add the figures of neighbours up$"):
        cut([1] * 9000, [1] * 9000, [StageDevice(1, 100)])
    with pytest.raises(cf.PlanError, match=r"^2 layers have seconds and 1 have bytes; give both for each layer$"):
        balanced_cut([1, 1], [1], 2)
    with pytest.raises(cf.PlanError, match=r"^layers are to be cut for no device; give at least one$"):
        cut([1], [1], [])
    with pytest.raises(cf.PlanError, match=r"^a device has the speed 0; give a figure above 0$"):
        StageDevice(0, 1)
    many = [StageDevice(1 + k, 100) for k in range(16)]
    with pytest.raises(cf.PlanError, match=r"^16 devices of 16 kinds for 96 layers are 6,356,992 states, more than 200,000; use `cut`"):
        cut_in_any_order([1] * 96, [1] * 96, many)
