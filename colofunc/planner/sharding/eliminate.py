"""Bucket elimination: the exact part of every planner search.

To eliminate a variable, add up all tables that mention it and take the minimum over it; what remains is one table over
its neighbours, and the argmin says later which option it takes. With no, one or two neighbours these are the classical
reductions R0, R1, R2. A table over k neighbours has size_1 x ... x size_k entries, so variables whose elimination would
be too large are *fixed* at a given option instead and the rest is solved exactly around them.

    a - b - c     eliminating b:  new[a, c] = min over b of  T1[a, b] + u[b] + T2[b, c]

Source: Dechter, Bucket elimination (Artificial Intelligence 113, 1999); greedy min-size orders.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from math import log

import numpy as np
from numpy.typing import NDArray

BIG = 1e12
"""Seconds that mean forbidden: finite, so that differences stay numbers."""

Array = NDArray[np.float64]
TableScope = tuple[int, ...]


class Graph:
    """Unary costs and tables by sorted scope. Built with `add`; the searches read it and never change it."""

    def __init__(self, unary: Iterable[Array]) -> None:
        self.unary = [np.minimum(np.asarray(costs, dtype=float), BIG) for costs in unary]
        self.tables: dict[TableScope, Array] = {}
        self.alive: tuple[int, ...] = tuple(range(len(self.unary)))
        self.constant = 0.0

    @property
    def size(self) -> int:
        return len(self.unary)

    def copy(self) -> Graph:
        """A graph to add to; tables are never changed, so they are shared."""
        other = Graph(())
        other.unary, other.tables = list(self.unary), dict(self.tables)
        other.alive, other.constant = self.alive, self.constant
        return other

    def add(self, scope: Sequence[int], table: Array) -> None:
        """Add a table; axes are sorted by variable, a variable that appears twice is taken on its diagonal."""
        scope = tuple(scope)
        if 1 in table.shape and len(scope) > 1:
            scope, table = _without_single_options(scope, table)
        # Nearly all tables join two variables; they take the short way.
        if len(scope) == 2 and scope[0] != scope[1]:
            if scope[0] > scope[1]:
                scope, table = (scope[1], scope[0]), table.T
            before = self.tables.get(scope)
            self.tables[scope] = np.minimum(table if before is None else before + table, BIG)
            return
        scope, table = _sorted_by_variable(*_on_diagonals(scope, np.minimum(table, BIG)))
        if len(scope) == 1:
            self.unary[scope[0]] = np.minimum(self.unary[scope[0]] + table, BIG)
        elif scope in self.tables:
            self.tables[scope] = np.minimum(self.tables[scope] + table, BIG)
        else:
            self.tables[scope] = table

    def cost(self, options: Sequence[int]) -> float:
        """Seconds of a choice: `options` has one of each variable."""
        total = self.constant + sum(float(self.unary[variable][options[variable]]) for variable in self.alive)
        entries = 0.0
        for scope, table in self.tables.items():
            entries += float(table[tuple(options[variable] for variable in scope)])
        return total + entries

    def around(self) -> list[list[TableScope]]:
        """Variable -> scopes of its tables."""
        scopes: list[list[TableScope]] = [[] for _ in self.unary]
        for scope in self.tables:
            for variable in scope:
                scopes[variable].append(scope)
        return scopes

    def neighbours(self) -> list[set[int]]:
        """Variable -> the variables that share a table with it."""
        neighbours: list[set[int]] = [set() for _ in self.unary]
        for scope in self.tables:
            for variable in scope:
                neighbours[variable].update(scope)
        for variable, others in enumerate(neighbours):
            others.discard(variable)
        return neighbours

    def greedy(self, order: Iterable[int], given: Mapping[int, int] | None = None) -> list[int]:
        """Each variable in turn takes what is cheapest with those decided, hoping for the best of the others."""
        given = given or {}
        options = [given.get(variable, 0) for variable in range(self.size)]
        decided = set(given)
        around = self.around()
        for variable in order:
            if variable in decided:
                continue
            score = self.unary[variable].copy()
            for scope in around[variable]:
                score += self._hoped(scope, variable, options, decided)
            options[variable] = int(score.argmin())
            decided.add(variable)
        return options

    def _hoped(self, scope: TableScope, variable: int, options: Sequence[int], decided: Collection[int]) -> Array:
        """One table by the options of `variable`: decided variables at theirs, the others at what is cheapest."""
        index: list[slice | int] = []
        open_variables: list[int] = []
        for other in scope:
            if other in decided:
                index.append(options[other])
            else:
                index.append(slice(None))
                open_variables.append(other)
        rest = self.tables[scope][tuple(index)]
        own_axis = open_variables.index(variable)
        return rest.min(axis=tuple(axis for axis in range(rest.ndim) if axis != own_axis))

    def reduce(self) -> tuple[Graph, Callable[[Sequence[int]], list[int]]]:
        """Apply R0, R1 and R2 until none applies: the irreducible core (same numbering) and the way back."""
        work = _Work(self, {})
        neighbours = self.neighbours()
        todo = [variable for variable in self.alive if len(neighbours[variable]) <= 2]
        gone: set[int] = set()
        while todo:
            variable = todo.pop()
            if variable in gone or len(neighbours[variable]) > 2:
                continue
            gone.add(variable)
            work.eliminate(variable)
            _drop(neighbours, variable)
            todo += [other for other in sorted(neighbours[variable]) if len(neighbours[other]) <= 2]
        core = Graph(work.unary)
        core.alive = tuple(variable for variable in self.alive if variable not in gone)
        core.constant = self.constant + work.constant
        for scope, table in work.all_tables():
            core.add(scope, table)
        return core, work.recover


def _without_single_options(scope: TableScope, table: Array) -> tuple[TableScope, Array]:
    """A table without the axes of variables that have one option: such a variable ties nobody to anybody.

    One axis stays where all have one option.
    """
    several = tuple(variable for variable, count in zip(scope, table.shape) if count > 1)
    if several:
        return several, table.squeeze()
    return scope[:1], table.reshape(1)


def _on_diagonals(scope: TableScope, table: Array) -> tuple[TableScope, Array]:
    """A table in which each variable has one axis."""
    while len(set(scope)) < len(scope):
        first = next(axis for axis, variable in enumerate(scope) if variable in scope[axis + 1 :])
        again = scope.index(scope[first], first + 1)
        # numpy appends the diagonal as the last axis
        table = np.diagonal(table, axis1=first, axis2=again)
        others = tuple(variable for axis, variable in enumerate(scope) if axis not in (first, again))
        scope = (*others, scope[first])
    return scope, table


def _sorted_by_variable(scope: TableScope, table: Array) -> tuple[TableScope, Array]:
    order = sorted(range(len(scope)), key=scope.__getitem__)
    return tuple(scope[axis] for axis in order), table.transpose(order)


def _drop(neighbours: list[set[int]], variable: int) -> None:
    """Take a variable out of the structure and join its neighbours, as its elimination does."""
    for other in neighbours[variable]:
        neighbours[other] |= neighbours[variable]
        neighbours[other] -= {other, variable}


class _Work:
    """The tables of one elimination run; `choices` is what recovers the eliminated variables."""

    def __init__(self, graph: Graph, fixed: dict[int, int]) -> None:
        self.unary = list(graph.unary)
        self.constant = 0.0
        # (variable, the variables its option depends on, its best option by theirs)
        self.choices: list[tuple[int, TableScope, NDArray[np.intp]]] = []
        # by variable: number of a table -> the table; a table lies in the bucket of each of its variables
        self.buckets: list[dict[int, tuple[TableScope, Array]]] = [{} for _ in graph.unary]
        self.next = 0
        for scope, table in graph.tables.items():
            if fixed and any(variable in fixed for variable in scope):
                table = table[tuple(fixed.get(variable, slice(None)) for variable in scope)]
                scope = tuple(variable for variable in scope if variable not in fixed)
            self._put(scope, table)

    def _put(self, scope: TableScope, table: Array) -> None:
        if not scope:
            return
        if len(scope) == 1:
            self.unary[scope[0]] = self.unary[scope[0]] + table
            return
        number, self.next = self.next, self.next + 1
        for variable in scope:
            self.buckets[variable][number] = (scope, table)

    def all_tables(self) -> list[tuple[TableScope, Array]]:
        """The tables that are left, each once."""
        tables: dict[int, tuple[TableScope, Array]] = {}
        for bucket in self.buckets:
            tables.update(bucket)
        return list(tables.values())

    def eliminate(self, variable: int) -> None:
        """Put one table over the neighbours of a variable in place of its own."""
        bucket = self.buckets[variable]
        if len(bucket) == 1:
            ((scope, _),) = bucket.values()
            if len(scope) == 2:
                self._fold(variable, scope[0] + scope[1] - variable)
                return
        neighbours: set[int] = set()
        for scope, _ in bucket.values():
            neighbours.update(scope)
        neighbours.discard(variable)

        # the sum of all tables: axis 0 is the variable's, the neighbours' follow
        scope = tuple(sorted(neighbours))
        axis_of = {variable: 0}
        for axis, other in enumerate(scope, 1):
            axis_of[other] = axis
        total = self.unary[variable].reshape(-1, *([1] * len(scope)))
        for number, (table_scope, table) in bucket.items():
            total = total + _spread(table, [axis_of[other] for other in table_scope], len(scope) + 1)
            for other in table_scope:
                if other != variable:
                    del self.buckets[other][number]

        self.buckets[variable] = {}
        self.choices.append((variable, scope, total.argmin(axis=0)))
        lowest = np.minimum(total.min(axis=0), BIG)
        if scope:
            self._put(scope, lowest)
        else:
            self.constant += float(lowest)

    def _fold(self, variable: int, other: int) -> None:
        """Eliminate a variable whose only table is with `other`: the most frequent case by far."""
        ((number, (scope, table)),) = self.buckets[variable].items()
        total = self.unary[variable][:, None] + (table if scope[0] == variable else table.T)
        self.buckets[variable] = {}
        del self.buckets[other][number]
        self.choices.append((variable, (other,), total.argmin(axis=0)))
        self.unary[other] = self.unary[other] + np.minimum(total.min(axis=0), BIG)

    def recover(self, options: Sequence[int]) -> list[int]:
        """All options, from those of the variables that were not eliminated."""
        recovered = list(options)
        # A variable's choice is by those that were eliminated later, or not at all.
        for variable, scope, best in reversed(self.choices):
            recovered[variable] = int(best[tuple(recovered[other] for other in scope)])
        return recovered


def _spread(table: Array, places: Sequence[int], ndim: int) -> Array:
    """`table` with its axes at `places` of an `ndim`-dimensional array, size 1 elsewhere."""
    order = sorted(range(len(places)), key=lambda axis: places[axis])
    shape = [1] * ndim
    for axis in order:
        shape[places[axis]] = table.shape[axis]
    return table.transpose(order).reshape(shape)


def eliminate_all(graph: Graph, order: Sequence[int], fixed: Sequence[int], options: Sequence[int]) -> list[int]:
    """Solve exactly for the variables of `order`, the `fixed` ones staying as in `options`."""
    work = _Work(graph, {variable: options[variable] for variable in fixed})
    for variable in order:
        work.eliminate(variable)
    return work.recover(options)


def exact_order(graph: Graph, most: int) -> list[int] | None:
    """An elimination order whose largest sum has at most `most` elements, or None if the greedy order has none."""
    order, fixed = partial_order(graph, most, None)
    return None if fixed else order


def partial_order(graph: Graph, most: int, rng: np.random.Generator | None) -> tuple[list[int], list[int]]:
    """(order, fixed): which variables to fix, at random, so that the others are eliminated within `most` elements.

    Without `rng` nothing is fixed at random: where an order gets stuck, all that is left is `fixed`.
    """
    # Sizes of tables are products, so their logarithms are added up.
    logs = [log(max(1, len(costs))) for costs in graph.unary]
    limit = log(most) + 1e-9
    neighbours = graph.neighbours()
    weight: list[float] = []
    for variable in range(graph.size):
        weight.append(logs[variable] + sum(logs[other] for other in neighbours[variable]))
    noise = None if rng is None else rng.random(graph.size)
    heap = [(weight[variable], variable) for variable in graph.alive]
    heapify(heap)
    left = set(graph.alive)
    order: list[int] = []
    fixed: list[int] = []
    while left:
        smallest, variable = heappop(heap)
        # An entry of the heap is out of date where the weight has changed since.
        if variable not in left or smallest != weight[variable]:
            continue
        others = neighbours[variable]
        if smallest <= limit:
            order.append(variable)
            _drop(neighbours, variable)
        elif noise is None:
            return order, sorted(left)
        else:
            # Nothing fits any more: a heavy variable is cut out of the graph, and the noise says which.
            heappush(heap, (smallest, variable))
            variable = max(left, key=lambda candidate: (float(noise[candidate]) + 0.5) * weight[candidate])
            others = neighbours[variable]
            fixed.append(variable)
            for other in others:
                neighbours[other].discard(variable)
        left.discard(variable)
        for other in sorted(others):
            weight[other] = logs[other] + sum(logs[around] for around in neighbours[other])
            heappush(heap, (weight[other], other))
    return order, fixed
