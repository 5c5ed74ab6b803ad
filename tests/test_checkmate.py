"""Keep or recompute on graphs: published figures, a search over all orders of small graphs, and rounding."""

import heapq
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colofunc.planner.recompute.checkmate import Graph, peak_of, solve

# FIGURES: n forward and n backward nodes and a loss; least compute by budget.
FIGURES = {3: {4: 8, 5: 7}, 4: {4: 12, 5: 10, 6: 9}, 5: {4: 17, 5: 13, 6: 12, 7: 11}}


def chain(n: int) -> Graph:
    """a_1 .. a_n, loss(a_n), b_n .. b_1; b_i reads the gradient that came in, a_i and a_(i-1)."""
    forward = [(i - 1,) if i else () for i in range(n)]
    backward = [(n + j, n - 1 - j, *((n - 2 - j,) if n - 2 - j >= 0 else ())) for j in range(n)]
    reads = (*forward, (n - 1,), *backward)
    return Graph((1.0,) * len(reads), (1.0,) * len(reads), tuple(reads))


@pytest.mark.parametrize(("n", "budget", "cost"), [(n, b, c) for n, row in FIGURES.items() for b, c in row.items()])
def test_the_published_figures(n: int, budget: int, cost: int) -> None:
    found = solve(chain(n), budget)
    assert found is not None and found.cost == cost and found.peak <= budget


def test_a_budget_that_nothing_meets() -> None:
    assert solve(chain(5), 3) is None


def exhaustive(graph: Graph, budget: float) -> float | None:
    """Dijkstra over (what is alive, how many nodes have run for the first time)."""
    n = len(graph.cost)
    best, heap = {(frozenset(), 0): 0.0}, [(0.0, 0, frozenset())]
    for count in itertools.count():
        if not heap or count > 200_000:
            return None
        cost, first, alive = heapq.heappop(heap)
        if cost > best[alive, first]:
            continue
        if first == n:
            return cost
        for k in range(first + 1):
            if k in alive or not set(graph.reads[k]) <= alive:
                continue
            now = alive | {k}
            if sum(graph.nbytes[i] for i in now) > budget:
                continue
            for keep in (now - frozenset(gone) for r in range(len(now) + 1) for gone in itertools.combinations(sorted(now), r)):
                key = (keep, max(first, k + 1))
                if cost + graph.cost[k] < best.get(key, float("inf")):
                    best[key] = cost + graph.cost[k]
                    heapq.heappush(heap, (best[key], key[1], keep))
    return None


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    n = draw(st.integers(2, 5))
    reads = tuple(tuple(sorted(draw(st.sets(st.integers(0, i - 1), min_size=1, max_size=2)))) if i else () for i in range(n))
    sizes = st.integers(1, 3)
    return Graph(tuple(float(draw(sizes)) for _ in range(n)), tuple(float(draw(sizes)) for _ in range(n)), reads)


@settings(max_examples=25, deadline=None)
@given(graphs(), st.integers(3, 10))
def test_exact_is_exact(graph: Graph, budget: int) -> None:
    found, want = solve(graph, budget), exhaustive(graph, budget)
    assert (None if found is None else found.cost) == want


@settings(max_examples=15, deadline=None)
@given(st.integers(4, 8), st.integers(5, 12))
def test_rounding_keeps_to_the_budget_and_runs_in_order(n: int, budget: int) -> None:
    graph = chain(n)
    found = solve(graph, budget, exact=False)
    if found is None:
        return
    there: set[int] = set()
    for node in found.nodes:
        assert set(graph.reads[node]) <= there
        there.add(node)
    assert there == set(range(2 * n + 1)) and found.peak == peak_of(graph, found.nodes) <= budget
    assert budget >= 2 * n + 1 or found.cost >= 2 * n + 1
