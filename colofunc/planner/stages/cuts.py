"""Where a model is cut in stages: layers that stand next to each other to devices, so that the slowest is as quick as
can be.

Problem: a pipeline is as fast as its slowest stage, layers differ, devices may differ in speed and memory, and a stage
has to fit. Idea: dynamic programming over (devices used, layers done) gives the exact optimum: a stage of layers i..j
on a device takes the sum of their seconds divided by the device's speed, and a prefix is as slow as its slowest stage.

    best(d, j) = min over i of max(best(d-1, i), received(i) + seconds(i, j) / speed(d))       where the bytes of i..j fit on d

Of cuts that are as fast the one that sends least is taken; the layers of `cut` send nothing that counts. In free order
the devices used are a multiset: as many states as there are ways to take some of each kind of device.

>>> cut([1, 1, 1, 1, 1, 1], [10] * 6, [StageDevice(1, 100), StageDevice(2, 100)])
Cut(ends=(2, 6), devices=(0, 1), slowest_s=2.0)

Source: the problem is that of pipeline stages on heterogeneous devices (PipeDream, 1806.03377, section 3.1, for equal
devices).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import attrs
import numpy as np

from colofunc.errors import PlanError

__all__ = ["Cut", "StageDevice", "balanced_cut", "cut", "cut_in_any_order"]

INF = float("inf")
MOST_STATES = 200_000
"""In free order, at most so many (devices used, layers) are looked at."""
MOST_LAYERS = 8192
"""Tables have a number for each two of them."""


@attrs.frozen
class StageDevice:
    """What runs a stage. speed: layers' seconds are divided by it."""

    speed: float
    capacity_bytes: float

    def __attrs_post_init__(self) -> None:
        if self.speed <= 0:
            raise PlanError(f"a device has the speed {self.speed}; give a figure above 0")


@attrs.frozen
class Cut:
    """Stage k has the layers from ends[k-1] (or 0) up to ends[k], and runs on devices[k]. slowest_s: seconds of the
    slowest stage.
    """

    ends: tuple[int, ...]
    devices: tuple[int, ...]
    slowest_s: float


@attrs.frozen(eq=False)
class BestCuts:
    """Of the best way to cut the pieces 0..j-1 in the stages so far, each (pieces + 1,): the slowest stage, the seconds
    of all sends, and the piece that begins the last stage."""

    slowest_s: np.ndarray
    sends_s: np.ndarray
    begins: np.ndarray

    @staticmethod
    def begin(pieces: int) -> BestCuts:
        """No stage yet."""
        slowest = np.full(pieces + 1, np.inf)
        sends = np.full(pieces + 1, np.inf)
        slowest[0] = sends[0] = 0.0
        return BestCuts(slowest, sends, np.full(pieces + 1, -1))

    def where(self, better: np.ndarray, other: BestCuts) -> BestCuts:
        """With another way for some prefixes."""
        return BestCuts(
            np.where(better, other.slowest_s, self.slowest_s),
            np.where(better, other.sends_s, self.sends_s),
            np.where(better, other.begins, self.begins),
        )


@attrs.frozen(eq=False)
class Line:
    """Pieces that stand next to each other, to be dealt out in stages.

    until: (pieces + 1,) seconds in front of each piece, and of all. received_s: (pieces,) seconds to receive what a
    piece reads. kept: (pieces + 1,) bytes that pieces in front of each keep.
    """

    until: np.ndarray
    received_s: np.ndarray
    kept: np.ndarray

    @property
    def pieces(self) -> int:
        """How many there are."""
        return len(self.received_s)

    def over(self, capacity_bytes: float) -> np.ndarray:
        """[i, j]: whether the pieces i..j-1 keep too much for a device."""
        return np.asarray(self.kept[None, :] - self.kept[:-1, None] > capacity_bytes)

    def in_order(self, over: Sequence[np.ndarray | None], speeds: Sequence[float]) -> tuple[list[int], float]:
        """(the pieces that begin a stage, the first being 0; seconds of the slowest stage, which is as fast as can be).

        over: of each stage (pieces, pieces + 1), whether the pieces i..j-1 are too much for it; None: whatever fits.
        speeds: of each stage. ([], inf) where none fits.
        """
        step = BestCuts.begin(self.pieces)
        begins: list[np.ndarray] = []
        for too_much, speed in zip(over, speeds, strict=True):
            step = self._next(step, too_much, speed)
            begins.append(step.begins)
        slowest_s = float(step.slowest_s[self.pieces])
        if slowest_s == INF:
            return [], INF
        found, end = list[int](), self.pieces
        for first in reversed(begins):
            end = int(first[end])
            found.append(end)
        return found[::-1], slowest_s

    def in_any_order(
        self, counts: Sequence[int], over: Sequence[np.ndarray | None], speeds: Sequence[float]
    ) -> tuple[list[int], list[int], float]:
        """(the pieces that begin a stage, the kind of its device, seconds of the slowest) in the best order of so many
        of each kind.

        over, speeds: of each kind. ([], [], inf) where none fits. steps[used]: the best with so many of each kind, and
        per prefix the kind of its last stage.
        """
        steps: dict[tuple[int, ...], tuple[BestCuts, np.ndarray]] = {}
        for used in np.ndindex(*(count + 1 for count in counts)):
            best = BestCuts.begin(self.pieces) if not any(used) else None
            last = np.full(self.pieces + 1, -1)
            for number, count in enumerate(used):
                if not count:
                    continue
                before, _ = steps[(*used[:number], count - 1, *used[number + 1 :])]
                step = self._next(before, over[number], speeds[number])
                if best is None:
                    best = step
                    last[:] = number
                    continue
                better = (step.slowest_s < best.slowest_s) | (
                    (step.slowest_s == best.slowest_s) & (step.sends_s < best.sends_s)
                )
                best = best.where(better, step)
                last[better] = number
            assert best is not None, "some kind is used"
            steps[used] = best, last
        used = tuple(counts)
        slowest_s = float(steps[used][0].slowest_s[self.pieces])
        if slowest_s == INF:
            return [], [], INF
        begins: list[int] = []
        kinds: list[int] = []
        end = self.pieces
        while any(used):
            step, last = steps[used]
            number = int(last[end])
            end = int(step.begins[end])
            begins.append(end)
            kinds.append(number)
            used = (*used[:number], used[number] - 1, *used[number + 1 :])
        return begins[::-1], kinds[::-1], slowest_s

    def _next(self, before: BestCuts, too_much: np.ndarray | None, speed: float) -> BestCuts:
        """One more stage."""
        # last[i, j]: seconds of a stage of the pieces i..j-1
        last = (self.until[None, :] - self.until[:-1, None]) / speed + self.received_s[:, None]
        slowest = np.maximum(before.slowest_s[:-1, None], last)
        if too_much is not None:
            slowest[too_much] = np.inf
        slowest[np.tril_indices(self.pieces, 0, self.pieces + 1)] = np.inf  # a stage has a piece at least
        total = before.sends_s[:-1, None] + self.received_s[:, None]
        best = slowest.min(axis=0)
        ties = np.where(slowest <= best[None, :] * (1 + 1e-9), total, np.inf)
        return BestCuts(best, ties.min(axis=0), ties.argmin(axis=0))


def standing(arrangement: Sequence[int], devices: Sequence[StageDevice], kinds: Sequence[StageDevice]) -> tuple[int, ...]:
    """The devices of an arrangement of kinds; of those that are alike the first comes first."""
    left: list[list[int]] = [[] for _ in kinds]  # by kind
    for position, device in enumerate(devices):
        left[kinds.index(device)].append(position)
    return tuple(left[number].pop(0) for number in arrangement)


def balanced_cut(seconds: Sequence[float], nbytes: Sequence[float], stages: int, capacity_bytes: float = INF) -> Cut:
    """Layers to equal devices. Raises PlanError as `cut` does."""
    return cut(seconds, nbytes, [StageDevice(1.0, capacity_bytes)] * stages)


def cut(seconds: Sequence[float], nbytes: Sequence[float], devices: Sequence[StageDevice]) -> Cut:
    """The optimum with devices in this order, a stage of at least one layer on each.

    seconds, nbytes: per layer. Raises PlanError where there are more devices than layers, or where no cut fits.
    """
    line = _line_of(seconds, nbytes, devices)
    capacities = {device.capacity_bytes for device in devices}
    over = {capacity: line.over(capacity) for capacity in capacities}
    begins, slowest_s = line.in_order(
        [over[device.capacity_bytes] for device in devices], [device.speed for device in devices]
    )
    if not begins:
        raise PlanError(_does_not_fit(line, devices))
    return Cut((*begins[1:], line.pieces), tuple(range(len(devices))), slowest_s)


def cut_in_any_order(seconds: Sequence[float], nbytes: Sequence[float], devices: Sequence[StageDevice]) -> Cut:
    """The optimum over all orders of the devices, every one used.

    Exact: devices that are alike are one kind, and states are (how many of each kind are used, layers). Raises
    PlanError as `cut` does, and where there are more than `MOST_STATES` states: then give an order.
    """
    line = _line_of(seconds, nbytes, devices)
    kinds = list(dict.fromkeys(devices))
    counts = [devices.count(kind) for kind in kinds]
    states = prod(count + 1 for count in counts) * (line.pieces + 1)
    if states > MOST_STATES:
        raise PlanError(
            f"{len(devices)} devices of {len(kinds)} kinds for {line.pieces} layers are {states:,} states, more than "
            f"{MOST_STATES:,}; "
            "use `cut` with the devices in an order"
        )
    over = [line.over(kind.capacity_bytes) for kind in kinds]
    begins, arrangement, slowest_s = line.in_any_order(counts, over, [kind.speed for kind in kinds])
    if not begins:
        raise PlanError(_does_not_fit(line, devices))
    return Cut((*begins[1:], line.pieces), standing(arrangement, devices, kinds), slowest_s)


def _line_of(seconds: Sequence[float], nbytes: Sequence[float], devices: Sequence[StageDevice]) -> Line:
    """Layers, which hand nothing on that counts. Raises PlanError where they are no layers, or fewer than devices."""
    if len(seconds) != len(nbytes):
        raise PlanError(f"{len(seconds)} layers have seconds and {len(nbytes)} have bytes; give both for each layer")
    if len(seconds) > MOST_LAYERS:
        raise PlanError(
            f"{len(seconds)} layers to cut, and at most {MOST_LAYERS} are; add the figures of neighbours up"
        )
    if any(value < 0 for value in (*seconds, *nbytes)):
        raise PlanError(f"a layer has {min(*seconds, *nbytes)} seconds or bytes; give figures of at least 0")
    if not devices:
        raise PlanError("layers are to be cut for no device; give at least one")
    if len(devices) > len(seconds):
        raise PlanError(
            f"{len(devices)} stages for {len(seconds)} layers: a stage has at least one layer; give fewer stages"
        )
    until, kept = (np.concatenate([[0.0], np.cumsum(figures)]) for figures in (seconds, nbytes))
    return Line(until, np.zeros(len(seconds)), kept)


def _does_not_fit(line: Line, devices: Sequence[StageDevice]) -> str:
    largest = np.diff(line.kept).max()
    room = sum(device.capacity_bytes for device in devices)
    smallest = min(device.capacity_bytes for device in devices)
    return (
        f"no cut of {line.pieces} layers fits: they keep {line.kept[-1]:g} bytes, the largest {largest:g}, and "
        f"{len(devices)} devices have {room:g}, the smallest {smallest:g}; give more devices, or recompute or offload"
    )
