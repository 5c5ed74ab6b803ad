"""Keep or recompute on a chain of stages: least time under a budget of memory, by dynamic programming.

Problem: backward reads what forward made, in reverse order, so a deep network holds all of it. Idea: a chain of stages is
split at one stage: run up to there keeping nothing but the input of that stage, do the rest with what memory is left, then
come back. Or the first stage keeps what its backward reads (all of it, or part, making the rest again).

    C(i, j, m)   least seconds for stages i..j, forward and backward, with the input of i held by the caller
    C(i, i, m) = f_i + b_i                                          if m holds the gradient and all that stage i keeps
    C(i, j, m) = min( min_k  f_i + .. + f_(k-1) + C(k, j, m - x_k) + C(i, k-1, m),
                      min_v  f_i + b_i + again_v + C(i+1, j, m - kept_v) )

Source: Beaumont et al., Optimal checkpointing for heterogeneous chains (1911.13214), there with one way v to keep.

>>> unit, loss = Stage(1, 1, 1, (Kept(1, 0),)), Stage(0, 0, 0, (Kept(0, 0),))
>>> solve([unit] * 4 + [loss], memory=4 - 1, slots=3).seconds
13.0
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

INF = float("inf")


@attrs.frozen
class Kept:
    """One way to keep a stage for its backward: bytes held in between, seconds of work that backward does again.

    needs_bytes: while that backward runs, these included; None: the gradient of the output, and all that the stage made.
    """

    nbytes: int
    again_s: float
    needs_bytes: int | None = None


@attrs.frozen
class Stage:
    """`out_bytes`: of what the next stage reads. `ways`: how it may be kept, everything first (and nothing made again)."""

    forward_s: float
    backward_s: float
    out_bytes: int
    ways: tuple[Kept, ...]

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
    """What was found: seconds of all (forward, backward, again), and the order of work."""

    seconds: float
    order: tuple[Run | Back, ...]


@attrs.frozen(eq=False)
class Table:
    """C(i, j, m) of a chain for every m in 0..slots, so that many budgets cost one solve."""

    stages: tuple[Stage, ...]
    unit: float  # bytes of one slot
    cost: dict[tuple[int, int], np.ndarray]
    choice: dict[tuple[int, int], np.ndarray]  # k > i: split there; -1-v: keep stage i in way v

    def at(self, slots: int) -> Sweep | None:
        """The least for so many slots; None where nothing fits."""
        last = len(self.stages) - 1
        seconds = float(self.cost[0, last][slots])
        return None if seconds == INF else Sweep(seconds, tuple(self._order(0, last, slots)))

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
            pick = int(self.choice[i, j][m])
            if pick > i:
                todo += [(i, pick - 1, m), (pick, j, m - self._slots(self.stages[pick - 1].out_bytes))]
                todo += [Run(t, None, t == i) for t in range(pick - 1, i - 1, -1)]
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
    """All least times for 0..memory bytes in so many slots. Sizes are rounded up to slots."""
    unit = max(memory / slots, 1e-9)
    size = slots + 1
    n = len(stages)
    outs = [slots_of(s.out_bytes, unit) for s in stages]
    needs = [[slots_of(s.needs(way), unit) for way in s.ways] for s in stages]
    before = np.concatenate([[0.0], np.cumsum([s.forward_s for s in stages])])
    cost: dict[tuple[int, int], np.ndarray] = {}
    choice: dict[tuple[int, int], np.ndarray] = {}
    for width in range(n):
        for i in range(n - width):
            j = i + width
            best, pick = np.full(size, INF), np.full(size, -1, dtype=np.int64)
            for v, way in enumerate(stages[i].ways):
                here = stages[i].forward_s + stages[i].backward_s + way.again_s
                kept = slots_of(way.nbytes, unit)
                if kept >= size:
                    continue
                rest = np.full(size, 0.0 if i == j else INF)
                if i < j:
                    rest[kept:] = cost[i + 1, j][: size - kept]
                rest[: min(needs[i][v], size)] = INF
                _better(best, pick, rest + here, -1 - v)
            for k in range(i + 1, j + 1):
                x = outs[k - 1]
                if x >= size:
                    continue
                split = np.full(size, INF)
                split[x:] = cost[k, j][: size - x]
                _better(best, pick, split + cost[i, k - 1] + (before[k] - before[i]), k)
            cost[i, j], choice[i, j] = best, pick
    return Table(tuple(stages), unit, cost, choice)


def _better(best: np.ndarray, pick: np.ndarray, new: np.ndarray, what: int) -> None:
    wins = new < best
    best[wins] = new[wins]
    pick[wins] = what
