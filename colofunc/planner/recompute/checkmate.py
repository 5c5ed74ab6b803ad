"""Keep or recompute on any graph: exact for a small one, a relaxation with rounding for a larger one.

Problem: a chain is not every graph, and a value may be worth making three times. Idea: the work is cut into one round per
node. In round t some nodes run (R), and round t ends with node t; some values are held from one round to the next (S).
What is alive within a round follows from both, and is linear: a value is freed behind its last reader of the round.

    least sum of cost R,   S[t, i] <= S[t-1, i] + R[t-1, i],   R[t, j] <= R[t, i] + S[t, i] for what j reads,   U[t, k] <= budget

Source: Jain et al., Checkmate (1910.02653), sections 4 and 5: the integer program, and the rounding in two phases (round S,
then run what has to run).

>>> graph = Graph((1, 1, 1), (1, 1, 1), ((), (0,), (0, 1)))       # a, b(a), c(a, b)
>>> solve(graph, budget=3).cost
3.0
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

EXACT = 11
"""Graphs of at most this many nodes are solved exactly."""


@attrs.frozen
class Graph:
    """Nodes in an order that can be run: cost and bytes of each, and whose results it reads."""

    cost: tuple[float, ...]
    nbytes: tuple[float, ...]
    reads: tuple[tuple[int, ...], ...]

    def readers(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self.cost]
        for j, mine in enumerate(self.reads):
            for i in mine:
                found[i].append(j)
        return found


@attrs.frozen
class Order:
    """Nodes in the order in which they run, some of them again. `peak`: bytes, where values are freed behind their last reader."""

    cost: float
    peak: float
    nodes: tuple[int, ...]


def solve(graph: Graph, budget: float, exact: bool | None = None) -> Order | None:
    """The order of least cost within `budget` bytes; None where there is none (exact), or none was found (rounded)."""
    exact = len(graph.cost) <= EXACT if exact is None else exact
    held = _program(graph, budget, exact)
    if held is None:
        return None
    thresholds = (0.5,) if exact else (0.5, 0.25, 0.75, 0.1, 0.9)
    found = [order_of(graph, held > level) for level in thresholds]
    fits = [order for order in found if order.peak <= budget * (1 + 1e-9)]
    return min(fits, key=lambda order: order.cost, default=None)


def order_of(graph: Graph, held: np.ndarray) -> Order:
    """What has to run, and when, where `held[t, i]` says what is wanted at the beginning of round t."""
    n = len(graph.cost)
    runs = np.zeros((n, n), dtype=bool)
    there = np.zeros((n + 1, n), dtype=bool)
    for t in reversed(range(n)):  # what a round needs and does not have, the round before has to leave
        runs[t, t] = True
        for j in reversed(range(t + 1)):
            runs[t, j] |= bool(t + 1 < n and there[t + 1, j] and not held[t, j])
            if runs[t, j]:
                for i in graph.reads[j]:
                    if not held[t, i]:
                        runs[t, i] = True
        there[t] = held[t]
    nodes = [int(k) for t in range(n) for k in np.flatnonzero(runs[t])]
    return Order(float(sum(graph.cost[k] for k in nodes)), peak_of(graph, nodes), tuple(nodes))


def peak_of(graph: Graph, nodes: Sequence[int]) -> float:
    """Bytes at the worst moment: each making of a value lives until its last reader before it is made again."""
    last: dict[int, int] = {}
    made: dict[int, int] = {}
    for k, node in enumerate(nodes):
        for i in graph.reads[node]:
            last[made[i]] = k
        made[node] = last[k] = k
    ends: dict[int, list[int]] = {}
    for k, end in last.items():
        ends.setdefault(end, []).append(nodes[k])
    alive = peak = 0.0
    for k, node in enumerate(nodes):
        alive += graph.nbytes[node]
        peak = max(peak, alive)
        alive -= sum(graph.nbytes[i] for i in ends.get(k, ()))
    return peak


class _Rows:
    """Constraints being collected: low <= sum coefficient * variable <= high."""

    def __init__(self) -> None:
        self.at: list[tuple[int, int, float]] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def add(self, terms: Sequence[tuple[int, float]], low: float, high: float) -> None:
        self.at += [(len(self.low), column, value) for column, value in terms]
        self.low.append(low)
        self.high.append(high)

    def matrix(self, columns: int) -> LinearConstraint:
        rows, cols, values = zip(*self.at, strict=True)
        return LinearConstraint(csr_array((values, (rows, cols)), shape=(len(self.low), columns)), self.low, self.high)


def _program(graph: Graph, budget: float, exact: bool) -> np.ndarray | None:
    """S of the integer program, or of its relaxation; None where the solver says that there is no solution."""
    n, readers = len(graph.cost), graph.readers()
    frees = [(t, i, k) for t in range(n) for k in range(t + 1) for i in (*dict.fromkeys(graph.reads[k]), k)]
    run, hold, use = (np.arange(n * n).reshape(n, n) + offset for offset in (0, n * n, 2 * n * n + len(frees)))
    free = {key: 2 * n * n + k for k, key in enumerate(frees)}
    columns = 3 * n * n + len(frees)
    rows = _Rows()
    for t in range(n):
        for j in range(t + 1):
            for i in dict.fromkeys(graph.reads[j]):
                rows.add([(run[t, j], 1), (run[t, i], -1), (hold[t, i], -1)], -np.inf, 0)
        for i in range(n if t else 0):
            rows.add([(hold[t, i], 1), (hold[t - 1, i], -1), (run[t - 1, i], -1)], -np.inf, 0)
        for k in range(t + 1):
            terms = [(use[t, k], 1), (run[t, k], -graph.nbytes[k])]
            if k == 0:
                terms += [(hold[t, i], -graph.nbytes[i]) for i in range(n)]
            else:
                gone = (*dict.fromkeys(graph.reads[k - 1]), k - 1)
                terms += [(use[t, k - 1], -1), *((free[t, i, k - 1], graph.nbytes[i]) for i in gone)]
            rows.add(terms, 0, 0)
    for t, i, k in frees:
        later = [j for j in readers[i] if k < j <= t]
        hazards = [(run[t, k], -1.0), *((run[t, j], 1.0) for j in later), *([(hold[t + 1, i], 1.0)] if t + 1 < n else [])]
        most = len(later) + 2
        rows.add([*hazards, (free[t, i, k], 1.0)], 0, np.inf)
        rows.add([*hazards, (free[t, i, k], float(most))], -np.inf, most - 1)
    low, high = np.zeros(columns), np.ones(columns)
    high[use[0, 0] :] = budget
    for t in range(n):
        low[run[t, t]] = 1
        for i in range(n):
            if i > t:
                high[run[t, i]] = 0
            if i >= t:
                high[hold[t, i]] = 0
    cost = np.zeros(columns)
    cost[: n * n] = np.tile(graph.cost, n)
    whole = np.concatenate([np.ones(2 * n * n + len(frees)), np.zeros(n * n)]) if exact else None
    result = milp(cost, constraints=rows.matrix(columns), bounds=Bounds(low, high), integrality=whole)
    return None if result.x is None else np.asarray(result.x[n * n : 2 * n * n]).reshape(n, n)
