"""The choice problem: one option per variable, costs on variables and on small groups of variables.

Problem: which strategy each operator takes depends on what its neighbours take, because a layout that does not fit must
be converted. Idea: variables are operators and input leaves, options are strategies and layouts, an edge's table holds
the seconds of converting from option i of one end to option j of the other; find the cheapest choice. This is a
partitioned Boolean quadratic problem (PBQP). `Factor` is the same over three or more variables, for costs that several
consumers share.

>>> x = Variable("x", (Option(cost_s=0.0), Option(cost_s=1.0)))
>>> y = Variable("y", (Option(cost_s=5.0), Option(cost_s=0.0)))
>>> solve(Problem((x, y), (Edge(0, 1, np.array([[0.0, 9.0], [9.0, 0.0]])),)))
(1, 1)

Exact where elimination stays small, otherwise a large neighbourhood search whose every step is exact; nothing depends
on the clock. Source: PBQP reductions R0, R1, R2, RN of Scholz and Eckstein (LCTES 2002); bucket elimination, Dechter
(Artificial Intelligence 113, 1999).
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from colofunc.errors import PlanError
from colofunc.planner.sharding.eliminate import BIG, Graph, eliminate_all, exact_order, partial_order

Table = NDArray[np.float64]


@attrs.frozen
class Option:
    """One choice of a variable. `state_bytes` live for the whole step, `live_bytes` at the moment of the peak."""

    cost_s: float = 0.0
    state_bytes: int = 0
    live_bytes: int = 0


@attrs.frozen
class Variable:
    """Something to be decided; at least one option."""

    name: str
    options: tuple[Option, ...]


@attrs.frozen(eq=False)
class Edge:
    """`count` times the seconds `table[i, j]` when variable a takes option i and b takes option j; inf forbids."""

    a: int
    b: int
    table: Table
    count: float = 1.0


@attrs.frozen(eq=False)
class Factor:
    """Like Edge over any number of distinct variables; one axis of the table each."""

    scope: tuple[int, ...]
    table: Table


@attrs.frozen(eq=False)
class Problem:
    """Variables with their costs. `starts`: assignments to begin a search from, beside the greedy one."""

    variables: tuple[Variable, ...]
    edges: tuple[Edge, ...] = ()
    factors: tuple[Factor, ...] = ()
    starts: tuple[tuple[int, ...], ...] = ()


@attrs.frozen
class Effort:
    """How far a search goes, in units of work (never in time, so that all ranks find the same)."""

    exact_elements: int = 1 << 22  # largest table of an exact solution
    pass_elements: int = 1 << 15  # largest table of one step of the neighbourhood search
    passes: int = 64
    sweeps: bool = True  # also try moves of single variables and whole flows under the true cost
    patience: int = 8  # passes without gain before a search ends


NORMAL = Effort()


def solve(problem: Problem, memory_price: float = 0.0, seed: int = 0, effort: Effort = NORMAL) -> tuple[int, ...]:
    """The cheapest choice found: option index per variable. `memory_price`: seconds per byte of state and live bytes.

    Raises PlanError where a variable has no option or every choice is forbidden.
    """
    graph = to_graph(problem, memory_price)
    kept = graph.prune()
    x = _solve_graph(graph, [_project(s, kept) for s in problem.starts], seed, effort)
    choice = tuple(int(kept[v][i]) for v, i in enumerate(x))
    if cost(problem, choice, memory_price) >= BIG:
        raise PlanError("every choice is forbidden by some edge; remove a constraint")
    return choice


def cost(problem: Problem, choice: Sequence[int], memory_price: float = 0.0) -> float:
    """Seconds of a choice (with `memory_price` per byte); inf where it is forbidden."""
    total = 0.0
    for variable, i in zip(problem.variables, choice, strict=True):
        option = variable.options[i]
        total += option.cost_s + memory_price * (option.state_bytes + option.live_bytes)
    for edge in problem.edges:
        total += edge.count * float(edge.table[choice[edge.a], choice[edge.b]])
    for factor in problem.factors:
        total += float(factor.table[tuple(choice[v] for v in factor.scope)])
    return total


def to_graph(problem: Problem, memory_price: float) -> Graph:
    """Arrays for elimination: unary costs, and tables by scope, parallel edges summed and loops made unary."""
    unary = []
    for variable in problem.variables:
        if not variable.options:
            raise PlanError(f"{variable.name} has no option left; remove a constraint on it")
        unary.append(
            np.array([o.cost_s + memory_price * (o.state_bytes + o.live_bytes) for o in variable.options], dtype=float)
        )
    graph = Graph(unary)
    for edge in problem.edges:
        graph.add((edge.a, edge.b), edge.count * np.asarray(edge.table, dtype=float))
    for factor in problem.factors:
        graph.add(factor.scope, np.asarray(factor.table, dtype=float))
    return graph


def _project(start: Sequence[int], kept: Sequence[NDArray[np.intp]]) -> list[int]:
    """A start in terms of the options that pruning left (the first one where its option is gone)."""
    return [int(np.searchsorted(k, i)) if i in k else 0 for i, k in zip(start, kept, strict=True)]


def _solve_graph(graph: Graph, starts: Sequence[Sequence[int]], seed: int, effort: Effort) -> list[int]:
    rng = np.random.default_rng(seed)
    order = exact_order(graph, effort.exact_elements)
    if order is not None:
        return eliminate_all(graph, order, (), [0] * graph.size)
    core, recover = graph.reduce()
    best: list[int] = []
    best_cost = np.inf
    for begin in [*starts, core.greedy(graph.alive)]:
        x = improve(core, list(begin), rng, attrs.evolve(effort, passes=max(2, effort.passes // 8), patience=2))
        if core.cost(x) < best_cost:
            best, best_cost = x, core.cost(x)
    return recover(improve(core, best, rng, effort))


def improve(graph: Graph, x: list[int], rng: np.random.Generator, effort: Effort) -> list[int]:
    """Large neighbourhood search: fix a random cut at its present options, solve all the rest exactly, repeat."""
    best = graph.cost(x)
    stale = 0
    for _ in range(effort.passes):
        order, fixed = partial_order(graph, effort.pass_elements, rng)
        found = eliminate_all(graph, order, fixed, x)
        cost_s = graph.cost(found)
        gain = best - cost_s
        if gain > 1e-12 * abs(best):
            x, best, stale = found, cost_s, 0
        else:
            stale += 1
            x = found if gain >= 0 else x  # an equal one moves along the plateau
        if not fixed or stale >= effort.patience:
            break
    return x
