"""Where a model is cut in stages: layers that stand next to each other to devices, so that the slowest is as quick as can be.

Problem: a pipeline is as fast as its slowest stage, layers differ, devices may differ in speed and memory, and a stage has to fit. Idea:
dynamic programming over (devices used, layers done) gives the exact optimum: a stage of layers i..j on a device takes the sum of their
seconds divided by the device's speed, and a prefix is as slow as its slowest stage.

    best(d, j) = min over i of max(best(d-1, i), seconds(i, j) / speed(d))       where the bytes of i..j fit on d

In free order the devices used are a multiset: as many states as there are ways to take some of each kind of device.

>>> cut([1, 1, 1, 1, 1, 1], [10] * 6, [Device(1, 100), Device(2, 100)])
Cut(ends=(2, 6), devices=(0, 1), slowest_s=2.0)

Source: the problem is that of pipeline stages on heterogeneous devices (PipeDream, 1806.03377, section 3.1, for equal devices).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, product
from math import prod

import attrs

from colofunc.errors import PlanError

INF = float("inf")
MOST_STATES = 200_000
"""In free order, at most so many (devices used, layers) are looked at."""


@attrs.frozen
class Device:
    """What runs a stage. speed: layers' seconds are divided by it."""

    speed: float
    capacity_bytes: float

    def __attrs_post_init__(self) -> None:
        if self.speed <= 0:
            raise PlanError(f"a device has the speed {self.speed}; give a figure above 0")


@attrs.frozen
class Cut:
    """Stage k has the layers from ends[k-1] (or 0) up to ends[k], and runs on devices[k]. slowest_s: seconds of the slowest stage."""

    ends: tuple[int, ...]
    devices: tuple[int, ...]
    slowest_s: float


class _Sums:
    """Seconds and bytes of layers i..j from sums over prefixes."""

    def __init__(self, seconds: Sequence[float], nbytes: Sequence[float]) -> None:
        if len(seconds) != len(nbytes):
            raise PlanError(f"{len(seconds)} layers have seconds and {len(nbytes)} have bytes; give both for each layer")
        if any(value < 0 for value in (*seconds, *nbytes)):
            raise PlanError(f"a layer has {min(*seconds, *nbytes)} seconds or bytes; give figures of at least 0")
        self.layers = len(seconds)
        self.seconds = list(accumulate(seconds, initial=0.0))
        self.nbytes = list(accumulate(nbytes, initial=0.0))

    def first(self, end: int, device: Device) -> int:
        """The first layer of the longest stage that ends at `end` and fits on a device."""
        low = 0
        high = end
        while low < high:
            middle = (low + high) // 2
            if self.nbytes[end] - self.nbytes[middle] <= device.capacity_bytes:
                high = middle
            else:
                low = middle + 1
        return low

    def step(self, before: Sequence[float], end: int, device: Device) -> tuple[float, int]:
        """(slowest stage, begin of the last stage) of the best way to end at `end` on a device, behind the prefixes `before`.

        The last stage gets quicker as it begins later. `before` need not get slower: a prefix of few layers has to give each of its
        devices one.
        """
        best = INF
        begin = -1
        for start in range(end - 1, self.first(end, device) - 1, -1):
            last_s = (self.seconds[end] - self.seconds[start]) / device.speed
            if last_s >= best:
                break  # an earlier begin is slower still
            slowest = max(before[start], last_s)
            if slowest < best:
                best, begin = slowest, start
        return best, begin


def balanced_cut(seconds: Sequence[float], nbytes: Sequence[float], stages: int, capacity_bytes: float = INF) -> Cut:
    """Layers to equal devices. Raises PlanError as `cut` does."""
    return cut(seconds, nbytes, [Device(1.0, capacity_bytes)] * stages)


def cut(seconds: Sequence[float], nbytes: Sequence[float], devices: Sequence[Device]) -> Cut:
    """The optimum with devices in this order, a stage of at least one layer on each.

    seconds, nbytes: per layer. Raises PlanError where there are more devices than layers, or where no cut fits.
    """
    sums = _Sums(seconds, nbytes)
    _check_counts(sums, devices)
    before = [0.0] + [INF] * sums.layers
    begins = []
    for device in devices:
        steps = [(INF, -1)] + [sums.step(before, end, device) for end in range(1, sums.layers + 1)]
        begins.append([begin for _, begin in steps])
        before = [slowest for slowest, _ in steps]
    if before[-1] == INF:
        raise PlanError(_does_not_fit(sums, devices))
    ends = []
    end = sums.layers
    for column in reversed(begins):
        ends.append(end)
        end = column[end]
    return Cut(tuple(reversed(ends)), tuple(range(len(devices))), before[-1])


def cut_in_any_order(seconds: Sequence[float], nbytes: Sequence[float], devices: Sequence[Device]) -> Cut:
    """The optimum over all orders of the devices, every one used.

    Exact: devices that are alike are one kind, and states are (how many of each kind are used, layers). Raises PlanError as `cut` does,
    and where there are more than `MOST_STATES` states: then give an order.
    """
    sums = _Sums(seconds, nbytes)
    _check_counts(sums, devices)
    kinds = list(dict.fromkeys(devices))
    counts = [sum(device == kind for device in devices) for kind in kinds]
    states = prod(count + 1 for count in counts) * (sums.layers + 1)
    if states > MOST_STATES:
        raise PlanError(
            f"{len(devices)} devices of {len(kinds)} kinds for {sums.layers} layers are {states:,} states, more than {MOST_STATES:,}; "
            "use `cut` with the devices in an order"
        )
    used = _all_counts(sums, kinds, counts)
    full = tuple(counts)
    if used[full][sums.layers][0] == INF:
        raise PlanError(_does_not_fit(sums, devices))
    return _read(sums, used, full, devices, kinds)


State = tuple[int, ...]
Best = tuple[float, int, int]
"""(slowest stage, begin of the last stage, kind of its device)"""


def _all_counts(sums: _Sums, kinds: Sequence[Device], counts: Sequence[int]) -> dict[State, list[Best]]:
    """For every number of devices of each kind, per prefix of layers, the best. In the order of `product` fewer devices come first."""
    nothing: Best = (INF, -1, -1)
    table: dict[State, list[Best]] = {}
    for used in product(*(range(count + 1) for count in counts)):
        best = [nothing] * (sums.layers + 1)
        if not any(used):
            best[0] = (0.0, 0, -1)
        for number, kind in enumerate(kinds):
            if not used[number]:
                continue
            fewer = (*used[:number], used[number] - 1, *used[number + 1 :])
            before = [slowest for slowest, _, _ in table[fewer]]
            for end in range(1, sums.layers + 1):
                slowest, begin = sums.step(before, end, kind)
                if slowest < best[end][0]:
                    best[end] = (slowest, begin, number)
        table[used] = best
    return table


def _read(
    sums: _Sums, table: dict[State, list[Best]], used: State, devices: Sequence[Device], kinds: Sequence[Device]
) -> Cut:
    """The cut from its end to its begin; of devices that are alike the last one comes last."""
    slowest_s = table[used][sums.layers][0]
    left = {number: [k for k, device in enumerate(devices) if device == kind] for number, kind in enumerate(kinds)}
    ends: list[int] = []
    order: list[int] = []
    end = sums.layers
    while end:
        _, begin, number = table[used][end]
        ends.append(end)
        order.append(left[number].pop())
        used = (*used[:number], used[number] - 1, *used[number + 1 :])
        end = begin
    return Cut(tuple(reversed(ends)), tuple(reversed(order)), slowest_s)


def _check_counts(sums: _Sums, devices: Sequence[Device]) -> None:
    if not devices:
        raise PlanError("layers are to be cut for no device; give at least one")
    if len(devices) > sums.layers:
        raise PlanError(f"{len(devices)} stages for {sums.layers} layers: a stage has at least one layer; give fewer stages")


def _does_not_fit(sums: _Sums, devices: Sequence[Device]) -> str:
    largest = max(after - before for before, after in zip(sums.nbytes, sums.nbytes[1:]))
    room = sum(device.capacity_bytes for device in devices)
    smallest = min(device.capacity_bytes for device in devices)
    return (
        f"no cut of {sums.layers} layers fits: they keep {sums.nbytes[-1]:g} bytes, the largest {largest:g}, and "
        f"{len(devices)} devices have {room:g}, the smallest {smallest:g}; give more devices, or recompute or offload"
    )
