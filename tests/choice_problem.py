"""Choice problems on their own, as the planner's searches see them: unary costs, and tables over a few variables."""

from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from colofunc.planner.sharding.eliminate import Graph, eliminate_all, exact_order
from colofunc.planner.sharding.search import NORMAL, Effort, improve

Table = NDArray[np.float64]


@attrs.frozen(eq=False)
class Problem:
    """costs: of each variable's options. tables: (variables, seconds by their options); inf forbids."""

    costs: tuple[Table, ...]
    tables: tuple[tuple[tuple[int, ...], Table], ...] = ()


def cost(problem: Problem, choice: Sequence[int]) -> float:
    """Seconds of a choice; inf where it is forbidden."""
    alone = sum(float(costs[i]) for costs, i in zip(problem.costs, choice, strict=True))
    return alone + sum(float(table[tuple(choice[v] for v in scope)]) for scope, table in problem.tables)


def solve(problem: Problem, seed: int = 0, effort: Effort = NORMAL) -> tuple[int, ...]:
    """The cheapest choice found: by elimination where that stays small, else reduced and improved."""
    graph = Graph(problem.costs)
    for scope, table in problem.tables:
        graph.add(scope, table)
    order = exact_order(graph, effort.exact_elements)
    if order is not None:
        return tuple(eliminate_all(graph, order, (), [0] * graph.size))
    core, recover = graph.reduce()
    found = improve(core, core.greedy(graph.alive), np.random.default_rng(seed), effort)
    return tuple(recover(found))
