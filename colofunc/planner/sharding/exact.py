"""The true cost as factors: one table over all uses of a value, for programs small enough to solve exactly."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import prod

import numpy as np
from numpy.typing import NDArray

from colofunc.planner.sharding.eliminate import BIG, Array, Graph
from colofunc.planner.sharding.flows import Coded
from colofunc.planner.sharding.model import Model


def exact_graph(model: Model, most: int) -> Graph | None:
    """None where a factor would exceed `most` entries."""
    graph = Graph([model.own(c) for c in range(len(model.options))])
    for coded in model.coded:
        columns = [coded.source, *coded.targets]
        if prod(map(len, columns)) > most:
            return None
        sides = [np.unique(np.array(column), return_inverse=True) for column in columns]
        joint = _joint(coded, [layouts for layouts, _ in sides])
        graph.add((coded.flow.producer, *coded.classes), coded.flow.count * joint[np.ix_(*(at for _, at in sides))])
    return graph


def _joint(coded: Coded, lists: Sequence[NDArray[np.int_]]) -> Array:
    """Seconds over (source, target 1, target 2, ...): each target from the cheapest of what came before it."""
    total = np.zeros(tuple(map(len, lists)))
    groups = [0, *coded.groups]

    def spread(table: Array, *axes: int) -> Array:
        shape = [1] * len(lists)
        for axis, n in zip(axes, table.shape, strict=True):
            shape[axis] = n
        return table.reshape(shape)

    def table(a: NDArray[np.int_], b: NDArray[np.int_]) -> Array:
        return np.array([[coded.second(i, j) for j in b.tolist()] for i in a.tolist()], dtype=float)

    for k in range(1, len(lists)):
        before = [j for j in range(k) if j == 0 or groups[j] == groups[k]]
        total = total + reduce(np.minimum, (spread(table(lists[j], lists[k]), j, k) for j in before))
    if coded.rest:
        rest = np.array([coded.rest[i] for i in lists[0].tolist()])
        straight = [coded.second(i, j) for i, j in zip(lists[0].tolist(), rest.tolist(), strict=True)]
        cheapest = spread(np.array(straight), 0)
        for j in range(1, len(lists)):
            if groups[j] == 0:
                cheapest = np.minimum(cheapest, spread(table(lists[j], rest).T, 0, j))
        total = total + np.minimum(cheapest, BIG)
    return total
