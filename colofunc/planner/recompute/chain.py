"""Keep or recompute on a chain of stages: least time under a budget of memory, by dynamic programming.

Problem: backward reads what forward made, in reverse order, so a deep network holds all of it. Idea: a chain of stages is
split at one stage: run up to there keeping nothing but the input of that stage, do the rest with what memory is left, then
come back. Or the first stage keeps what its backward reads (all of it, or part, making the rest again).

    C(i, j, m)   least seconds for stages i..j, forward and backward, with the input of i held by the caller
    C(i, i, m) = f_i + b_i                                          if m holds the gradient and all that stage i keeps
    C(i, j, m) = min( min_k  f_i + .. + f_(k-1) + C(k, j, m - x_k) + C(i, k-1, m - left_k - .. - left_j),
                      min_v  f_i + b_i + again_v + C(i+1, j, m - kept_v) )

Each backward leaves something behind, gradients of parameters first of all, which the backward of earlier stages has to leave
room for. `m` is what is left for stages i..j when later ones are done, so that equal pieces of a chain are one problem.

Source: Beaumont et al., Optimal checkpointing for heterogeneous chains (1911.13214), there with one way v to keep.

>>> unit, loss = Stage(1, 1, 1, (Kept(1, 0),)), Stage(0, 0, 0, (Kept(0, 0),))
>>> solve([unit] * 4 + [loss], memory=4 - 1, slots=3).seconds
13.0
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import numpy as np

INF = float("inf")


@attrs.frozen
class Kept:
    """One way to keep a stage for its backward: bytes held in between, seconds of work that backward does again.

    needs_bytes: while that backward runs, these included, beside what later stages left; None: the gradient of the output, and all
    that the stage made.
    """

    nbytes: int
    again_s: float
    needs_bytes: int | None = None


@attrs.frozen
class Stage:
    """`out_bytes`: of what the next stage reads. `ways`: how it may be kept, everything first (and nothing made again).

    `left_bytes`: more of them are held once its backward has run (gradients of its parameters).
    """

    forward_s: float
    backward_s: float
    out_bytes: int
    ways: tuple[Kept, ...]
    left_bytes: int = 0

    def needs(self, way: Kept) -> int:
        """Bytes while its backward runs."""
        return self.out_bytes + self.ways[0].nbytes if way.needs_bytes is None else way.needs_bytes


@attrs.frozen
class Run:
    """Run a stage forward. `way`: how it is kept; None: only its output. `first`: its input is still needed afterwards."""

    stage: int
    way: int | None
    first: bool = True


@attrs.frozen
class Back:
    """Run the backward of a stage."""

    stage: int


@attrs.frozen
class Sweep:
    """What was found: seconds of all (forward, backward, again), the order of work, and the memory that it was found for."""

    seconds: float
    order: tuple[Run | Back, ...]
    given_bytes: int


@attrs.frozen(eq=False)
class Table:
    """C(i, j, m) of a chain for every m in 0..slots, so that many budgets cost one solve. Equal pieces of it share a row."""

    stages: tuple[Stage, ...]
    unit: float  # bytes of one slot
    rows: np.ndarray  # [i, j] -> the row of `cost` and `choice` for stages i..j
    cost: np.ndarray  # seconds by row and slots
    choice: np.ndarray  # s > 0: split behind s stages; -1-v: keep the first stage in way v

    def at(self, slots: int) -> Sweep | None:
        """The least for so many slots; None where nothing fits."""
        last = len(self.stages) - 1
        seconds = float(self.cost[self.rows[0, last], slots])
        return None if seconds == INF else Sweep(seconds, tuple(self._order(0, last, slots)), int(slots * self.unit))

    def _order(self, i: int, j: int, m: int) -> list[Run | Back]:
        """Iterative, because chains are longer than Python's stack is deep."""
        out: list[Run | Back] = []
        todo: list[tuple[int, int, int] | Run | Back] = [(i, j, m)]
        while todo:
            item = todo.pop()
            if not isinstance(item, tuple):
                out.append(item)
                continue
            i, j, m = item
            pick = int(self.choice[self.rows[i, j], m])
            if pick > 0:
                k = i + pick
                left = sum(stage.left_bytes for stage in self.stages[k : j + 1])
                todo += [(i, k - 1, m - self._slots(max(left, 0))), (k, j, m - self._slots(self.stages[k - 1].out_bytes))]
                todo += [Run(t, None, t == i) for t in range(k - 1, i - 1, -1)]
                continue
            way = -1 - pick
            todo.append(Back(i))
            if i < j:
                todo.append((i + 1, j, m - self._slots(self.stages[i].ways[way].nbytes)))
            todo.append(Run(i, way))
        return out

    def _slots(self, nbytes: int) -> int:
        return slots_of(nbytes, self.unit)


def slots_of(nbytes: int, unit: float) -> int:
    return int(-(-nbytes // unit))


def solve(stages: Sequence[Stage], memory: int, slots: int = 200) -> Sweep:
    """The least time with `memory` bytes beside the chain's input. Raises ValueError where nothing fits."""
    found = table(stages, memory, slots).at(slots)
    if found is None:
        raise ValueError(f"{memory} bytes do not hold any stage with its gradient")
    return found


def table(stages: Sequence[Stage], memory: int, slots: int = 200) -> Table:
    """All least times for 0..memory bytes in so many slots. Sizes are rounded up to slots.

    Pieces of equal stages are solved once, wherever they begin: 80 equal layers cost little more than the first of them.
    """
    unit = max(memory / slots, 1e-9)
    rows, pieces = _pieces(stages)
    solver = _Solver(stages, unit, slots + 1, rows, len(pieces))
    for row, (i, j) in enumerate(pieces):
        solver.solve(row, i, j)
    return Table(tuple(stages), unit, rows, solver.cost[:, solver.size :], solver.choice)


def _pieces(stages: Sequence[Stage]) -> tuple[np.ndarray, Sequence[tuple[int, int]]]:
    """([i, j] -> the number of the piece i..j, which equal pieces share; where each is found first). Short ones come first."""
    n, numbers = len(stages), dict[Stage, int]()
    kinds = [numbers.setdefault(stage, len(numbers)) for stage in stages]
    rows, pieces = np.zeros((n, n), dtype=np.int64), list[tuple[int, int]]()
    for width in range(n):
        known = dict[tuple[int, int], int]()  # (the piece without its last stage, that stage's kind) -> piece
        for i in range(n - width):
            j = i + width
            looks = (int(rows[i, j - 1]) if width else 0, kinds[j])
            if looks not in known:
                known[looks] = len(pieces)
                pieces.append((i, j))
            rows[i, j] = known[looks]
    return rows, pieces


class _Solver:
    """C(i, j, .) of the pieces of a chain, a row for each."""

    def __init__(self, stages: Sequence[Stage], unit: float, size: int, rows: np.ndarray, count: int) -> None:
        self.stages, self.unit, self.size, self.rows = stages, unit, size, rows
        self.forward_s = np.array([s.forward_s for s in stages])
        self.left = np.array([s.left_bytes for s in stages], dtype=np.int64)
        self.outs = np.array([slots_of(s.out_bytes, unit) for s in stages]).clip(max=size)
        self.kept = [[slots_of(way.nbytes, unit) for way in s.ways] for s in stages]
        # In front of each row of `cost`, as many slots that hold nothing: a row shifted by x slots begins x to the left.
        self.cost = np.full((count, 2 * size), INF)
        self.choice = np.full((count, size), -1, dtype=np.int32)

    def solve(self, row: int, i: int, j: int) -> None:
        """The row of stages i..j; those of all shorter pieces are there."""
        best, pick = self.cost[row, self.size :], self.choice[row]
        for v, seconds in enumerate(self._keeping(i, j)):
            _better(best, pick, seconds, -1 - v)
        if i < j:
            splits = self._splitting(i, j)
            first = splits.argmin(axis=0)
            _better(best, pick, splits[first, np.arange(self.size)], first + 1)

    def _left(self, first: int, last: int) -> np.ndarray:
        """Slots of what stages k..last leave, for k from `first` to `last`."""
        nbytes = np.cumsum(self.left[first : last + 1][::-1])[::-1]
        return (-(-nbytes // self.unit)).clip(0, self.size).astype(np.int64)  # as `slots_of` rounds

    def _keeping(self, i: int, j: int) -> Iterator[np.ndarray]:
        """Seconds by slots where stage i is kept, for every way."""
        stage, left_bytes = self.stages[i], max(int(self.left[i + 1 : j + 1].sum()), 0)
        for way, kept in zip(stage.ways, self.kept[i], strict=True):
            seconds = np.full(self.size, INF)
            if kept < self.size:
                seconds[:] = self.cost[self.rows[i + 1, j], self.size - kept : 2 * self.size - kept] if i < j else 0.0
                seconds[: slots_of(stage.needs(way) + left_bytes, self.unit)] = INF
            yield seconds + (stage.forward_s + stage.backward_s + way.again_s)

    def _splitting(self, i: int, j: int) -> np.ndarray:
        """Seconds by number of stages in front of the split, from one on, and by slots."""
        forward_s = np.cumsum(self.forward_s[i:j])
        behind = self.rows[i + 1 : j + 1, j] * (2 * self.size) + self.size - self.outs[i:j]
        ahead = self.rows[i, i:j] * (2 * self.size) + self.size - self._left(i + 1, j)
        cost, slots = self.cost.reshape(-1), np.arange(self.size)
        return cost[behind[:, None] + slots] + cost[ahead[:, None] + slots] + forward_s[:, None]


def _better(best: np.ndarray, pick: np.ndarray, new: np.ndarray, what: int | np.ndarray) -> None:
    wins = new < best
    best[wins] = new[wins]
    pick[wins] = what if isinstance(what, int) else what[wins]
