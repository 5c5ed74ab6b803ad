"""Keep or recompute on a chain of stages: least time under a budget of memory, by dynamic programming.

Problem: backward reads what forward made, in reverse order, so a deep network holds all of it. Idea: a chain of stages
is split at one stage: run up to there keeping nothing but the input of that stage, do the rest with what memory is
left, then come back. Or the first stage keeps what its backward reads (all of it, or part, making the rest again).

    C(i, j, m)   least seconds for stages i..j, forward and backward, with the input of i held by the caller
    C(i, i, m) = f_i + b_i                                          if m holds the gradient and all that stage i keeps
    C(i, j, m) = min( min_k  f_i + .. + f_(k-1) + C(k, j, m - x_k) + C(i, k-1, m - left_k - .. - left_j),
                      min_v  f_i + b_i + again_v + C(i+1, j, m - kept_v) )

Each backward leaves something behind, gradients of parameters first of all, which the backward of earlier stages has to
leave room for. `m` is what is left for stages i..j when later ones are done, so that equal pieces of a chain are one
problem.

Note [Splits that cannot pay]. A split runs the stages in front of it twice and all others at least once, whatever
memory there is. Where a way to keep the first stage takes no longer than that, the split need not be looked at; nor
where either piece has too little memory to be done at all. Seconds fall as memory grows, so what is left of a split is
one range of slots, and of most splits none.

Source: Beaumont et al., Optimal checkpointing for heterogeneous chains (1911.13214), there with one way v to keep.

>>> unit, loss = ChainStage(1, 1, 1, (KeepOption(1, 0),)), ChainStage(0, 0, 0, (KeepOption(0, 0),))
>>> ChainTable([unit] * 4 + [loss], memory=4 - 1, slots=3).at(3).seconds
13.0
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from math import inf, nextafter

import attrs
import numpy as np
from numpy.lib.stride_tricks import as_strided

from colofunc import progress

INF = float("inf")
LEAST_SLOTS = 250
"""Memory is divided into at least this many units, however large that makes the table."""
BOUNDS = 2
"""Rounds of a closer and closer bound on which splits can pay."""
ROUNDED = 1e-9
"""More than the relative rounding error of a sum of seconds."""


@attrs.frozen
class KeepOption:
    """One way to keep a stage for its backward: bytes held in between, seconds of work that backward does again.

    needs_bytes: while that backward runs, these included, beside what later stages left; None: the gradient of the
    output, and all that the stage made.
    """

    nbytes: int
    again_s: float
    needs_bytes: int | None = None


@attrs.frozen
class ChainStage:
    """`out_bytes`: of what the next stage reads. `ways`: how it may be kept, everything first (and nothing made again).

    `left_bytes`: more of them are held once its backward has run (gradients of its parameters).
    """

    forward_s: float
    backward_s: float
    out_bytes: int
    ways: tuple[KeepOption, ...]
    left_bytes: int = 0

    def needs(self, way: KeepOption) -> int:
        """Bytes while its backward runs."""
        return self.out_bytes + self.ways[0].nbytes if way.needs_bytes is None else way.needs_bytes


@attrs.frozen
class Run:
    """Run a stage forward.

    `way`: how it is kept; None: only its output. `first`: its input is still needed afterwards.
    """

    stage: int
    way: int | None
    first: bool = True


@attrs.frozen
class Back:
    """Run the backward of a stage."""

    stage: int


@attrs.frozen(eq=False)
class Sweep:
    """What was found: seconds of all (forward, backward, again), the memory that it was found for, and how to find the
    order of work.
    """

    seconds: float
    given_bytes: int
    trace: Callable[[], Sequence[Run | Back]]

    @cached_property
    def order(self) -> tuple[Run | Back, ...]:
        return tuple(self.trace())


class ChainTable:
    """C(i, j, m) of a chain for every m in 0..slots, so that many budgets cost one solve. Sizes are rounded up to
    slots.

    Equal pieces of the chain share a row, wherever they begin: 80 equal layers cost little more than the first of them.
    A row has as many slots that hold nothing in front of its own, so a row shifted by x slots begins x to the left.
    What was chosen is not kept, but found again for the few (i, j, m) that an order goes through.
    """

    def __init__(self, stages: Sequence[ChainStage], memory: int, slots: int, most_entries: int | None = None) -> None:
        """most_entries: of the whole table; fewer slots where there would be more (but at least LEAST_SLOTS)."""
        self.rows, pieces = _pieces(stages)  # [i, j] -> the row of `cost` for stages i..j
        if most_entries is not None:
            slots = min(slots, max(LEAST_SLOTS, most_entries // len(pieces)))
        self.stages, self.size = tuple(stages), slots + 1
        # The next larger float: where the quotient is rounded down, all of the memory would be one slot more than there
        # are.
        self.unit = nextafter(max(memory / slots, 1e-9), inf)
        self.forward_s = np.array([stage.forward_s for stage in stages])
        self.plain_s = self.forward_s + np.array([stage.backward_s for stage in stages])
        self.left = np.array([stage.left_bytes for stage in stages], dtype=np.int64)
        self.outs = np.array([self._slots(stage.out_bytes) for stage in stages]).clip(max=self.size)
        self.kept: list[list[int]] = []  # by stage and way, in slots
        for stage in stages:
            self.kept.append([self._slots(way.nbytes) for way in stage.ways])
        self.cost = np.full((len(pieces), 2 * self.size), INF)  # seconds
        self.picked: dict[tuple[int, int], int] = {}
        # the first slot with which a piece can be done; `size`: none
        self.least = np.empty(len(pieces), dtype=np.int64)
        for row, (i, j) in enumerate(progress.over("checkpoint pieces", pieces)):
            self._solve(row, i, j)
            self.least[row] = self.size - np.count_nonzero(self.cost[row, self.size :] < INF)

    def distinct(self) -> Iterator[Sweep]:
        """From fast to lean, the least for every number of slots with which less is possible than with fewer."""
        seconds = self.cost[self.rows[0, -1], self.size :]
        before = np.append(INF, seconds[:-1])
        for slots in np.flatnonzero(seconds < before)[::-1].tolist():
            yield self._sweep(slots)

    def at(self, slots: int) -> Sweep | None:
        """The least for so many slots; None where nothing fits."""
        return None if self.cost[self.rows[0, -1], self.size + slots] == INF else self._sweep(slots)

    def _sweep(self, slots: int) -> Sweep:
        last = len(self.stages) - 1
        seconds = float(self.cost[self.rows[0, last], self.size + slots])
        return Sweep(seconds, int(slots * self.unit), partial(self._order, 0, last, slots))

    def _order(self, i: int, j: int, m: int) -> list[Run | Back]:
        """Iterative, because chains are longer than Python's stack is deep."""
        order: list[Run | Back] = []
        # A stack: what is to be done last stands first.
        todo: list[tuple[int, int, int] | Run | Back] = [(i, j, m)]
        while todo:
            item = todo.pop()
            if not isinstance(item, tuple):
                order.append(item)
                continue
            i, j, m = item
            pick, ways = self._pick(i, j, m), len(self.stages[i].ways)
            if pick >= ways:
                k = i + 1 + pick - ways
                left = int(self._left(k, j)[0])
                todo += [(i, k - 1, m - left), (k, j, m - int(self.outs[k - 1]))]
                todo += [Run(stage, None, stage == i) for stage in range(k - 1, i - 1, -1)]
                continue
            todo.append(Back(i))
            if i < j:
                todo.append((i + 1, j, m - self.kept[i][pick]))
            todo.append(Run(i, pick))
        return order

    def _pick(self, i: int, j: int, m: int) -> int:
        """What comes first of stages i..j: the number of a way to keep the first, or behind these, behind how many
        there is a split.
        """
        key = int(self.rows[i, j]), m
        if key not in self.picked:
            keeping = np.concatenate(list(self._keeping(i, j, m, m + 1)))
            splitting = self._splitting(i, j, m) if i < j else np.empty(0)
            self.picked[key] = int(np.concatenate([keeping, splitting]).argmin())
        return self.picked[key]

    def _slots(self, nbytes: int) -> int:
        return int(-(-nbytes // self.unit))

    def _solve(self, row: int, i: int, j: int) -> None:
        """The row of stages i..j; those of all shorter pieces are there."""
        best = self.cost[row, self.size :]
        for seconds in self._keeping(i, j, 0, self.size):
            np.minimum(best, seconds, out=best)
        if i == j:
            return
        again_s, later, earlier, first, stop = self._splits(i, j, best)
        if not len(again_s):
            return
        # Each row of `cost` from each of its slots on: the seconds of a piece for all numbers of slots, shifted by what
        # else needs some.
        windows = as_strided(
            self.cost.reshape(-1)[first:], (self.cost.size - stop + 1, stop - first), 2 * self.cost.strides[1:]
        )
        seconds = windows[later]
        seconds += windows[earlier]
        seconds += again_s[:, None]
        np.minimum(best[first:stop], seconds.min(axis=0), out=best[first:stop])

    def _splits(self, i: int, j: int, best: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, int, int]:
        """Of the splits of stages i..j those that may be faster than `best`: Note [Splits that cannot pay].

        (seconds to get to each, where in `cost` what is behind it has no slot and where what is ahead of it, the first
        slot with which one may pay and that behind the last)
        """
        again_s = np.cumsum(self.forward_s[i:j])
        behind, ahead = self.rows[i + 1 : j + 1, j], self.rows[i, i:j]
        outs, left = self.outs[i:j], self._left(i + 1, j)
        starts = np.maximum(outs + self.least[behind], left + self.least[ahead])
        width = self.cost.shape[1]
        splits = np.stack([starts, width * behind + self.size - outs, width * ahead + self.size - left])
        bound_s = self.plain_s[i : j + 1].sum() * (1 - ROUNDED) + again_s
        for round_number in range(BOUNDS):
            stops = self.size - np.searchsorted(best[::-1], bound_s, side="right")
            pays = splits[0] < stops
            splits, again_s, stops = splits[:, pays], again_s[pays], stops[pays]
            if round_number < BOUNDS - 1:  # as fast as both pieces are with the most slots that may pay
                bound_s = self.cost.take(splits[1] + stops - 1) + self.cost.take(splits[2] + stops - 1) + again_s
        starts, later, earlier = splits
        return again_s, later, earlier, int(starts.min(initial=self.size)), int(stops.max(initial=0))

    def _left(self, first: int, last: int) -> np.ndarray:
        """Slots of what stages k..last leave, for k from `first` to `last`."""
        nbytes = np.cumsum(self.left[first : last + 1][::-1])[::-1]
        return (-(-nbytes // self.unit)).clip(0, self.size).astype(np.int64)  # as `_slots` rounds

    def _keeping(self, i: int, j: int, first: int, stop: int) -> Iterator[np.ndarray]:
        """Seconds with first..stop-1 slots where stage i is kept, for every way."""
        stage, left_bytes = self.stages[i], max(int(self.left[i + 1 : j + 1].sum()), 0)
        for way, kept in zip(stage.ways, self.kept[i], strict=True):
            seconds = np.full(stop - first, INF)
            enough = max(first, self._slots(stage.needs(way) + left_bytes), kept)
            if enough < stop:
                seconds[enough - first :] = 0.0
                if i < j:
                    shift = self.size - kept
                    seconds[enough - first :] = self.cost[self.rows[i + 1, j], shift + enough : shift + stop]
            yield seconds + (stage.forward_s + stage.backward_s + way.again_s)

    def _splitting(self, i: int, j: int, m: int) -> np.ndarray:
        """Seconds with m slots by number of stages in front of the split, from one on."""
        behind = self.cost[self.rows[i + 1 : j + 1, j], self.size + m - self.outs[i:j]]
        ahead = self.cost[self.rows[i, i:j], self.size + m - self._left(i + 1, j)]
        return behind + ahead + np.cumsum(self.forward_s[i:j])


def _pieces(stages: Sequence[ChainStage]) -> tuple[np.ndarray, Sequence[tuple[int, int]]]:
    """([i, j] -> the number of the piece i..j, which equal pieces share; where each is found first).

    Short ones come first.
    """
    numbers: dict[ChainStage, int] = {}
    kinds = [numbers.setdefault(stage, len(numbers)) for stage in stages]
    count = len(stages)
    rows = np.zeros((count, count), dtype=np.int64)
    pieces: list[tuple[int, int]] = []
    for width in range(count):
        known: dict[tuple[int, int], int] = {}  # (the piece without its last stage, that stage's kind) -> piece
        for i in range(count - width):
            j = i + width
            looks = (int(rows[i, j - 1]) if width else 0, kinds[j])
            if looks not in known:
                known[looks] = len(pieces)
                pieces.append((i, j))
            rows[i, j] = known[looks]
    return rows, pieces
