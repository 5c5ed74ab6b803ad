"""Bucket elimination: the exact part of every planner search.

To eliminate a variable, add up all tables that mention it and take the minimum over it; what remains is one table over
its neighbours, and the argmin says later which option it takes. With no, one or two neighbours these are the classical
reductions R0, R1, R2. A table over k neighbours has size_1 x ... x size_k entries, so variables whose elimination would
be too large are *fixed* at a given option instead and the rest is solved exactly around them.

    a - b - c     eliminating b:  new[a, c] = min over b of  T1[a, b] + u[b] + T2[b, c]

Source: Dechter, Bucket elimination (Artificial Intelligence 113, 1999); greedy min-size orders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from math import log

import numpy as np
from numpy.typing import NDArray

BIG = 1e12
"""Seconds that mean forbidden: finite, so that differences stay numbers."""

Array = NDArray[np.float64]
Scope = tuple[int, ...]


class Graph:
    """Unary costs and tables by sorted scope. Built with `add`; the searches read it and never change it."""

    def __init__(self, unary: Iterable[Array]) -> None:
        self.unary = [np.minimum(np.asarray(u, dtype=float), BIG) for u in unary]
        self.tables: dict[Scope, Array] = {}
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
        if 1 in table.shape and len(scope) > 1:  # a variable with one option ties nobody to anybody
            scope, table = tuple(v for v, n in zip(scope, table.shape) if n > 1) or scope[:1], table.squeeze()
            table = table.reshape(1) if not table.ndim else table
        if len(scope) == 2 and scope[0] != scope[1]:
            if scope[0] > scope[1]:
                scope, table = (scope[1], scope[0]), table.T
            had = self.tables.get(scope)
            self.tables[scope] = np.minimum(table, BIG) if had is None else np.minimum(had + table, BIG)
            return
        table = np.minimum(table, BIG)
        while len(set(scope)) < len(scope):
            i = next(i for i, v in enumerate(scope) if v in scope[i + 1 :])
            j = scope.index(scope[i], i + 1)
            table = np.diagonal(table, axis1=i, axis2=j)  # the diagonal becomes the last axis
            scope = (*(v for k, v in enumerate(scope) if k not in (i, j)), scope[i])
        order = sorted(range(len(scope)), key=lambda k: scope[k])
        scope, table = tuple(scope[k] for k in order), table.transpose(order)
        if len(scope) == 1:
            self.unary[scope[0]] = np.minimum(self.unary[scope[0]] + table, BIG)
        elif scope in self.tables:
            self.tables[scope] = np.minimum(self.tables[scope] + table, BIG)
        else:
            self.tables[scope] = table

    def cost(self, x: Sequence[int]) -> float:
        total = self.constant + sum(float(self.unary[v][x[v]]) for v in self.alive)
        return total + sum(float(t[tuple(x[v] for v in scope)]) for scope, t in self.tables.items())

    def around(self) -> list[list[Scope]]:
        """Variable -> scopes of its tables."""
        out: list[list[Scope]] = [[] for _ in self.unary]
        for scope in self.tables:
            for v in scope:
                out[v].append(scope)
        return out

    def neighbours(self) -> list[set[int]]:
        out: list[set[int]] = [set() for _ in self.unary]
        for scope in self.tables:
            for v in scope:
                out[v].update(scope)
        for v, others in enumerate(out):
            others.discard(v)
        return out

    def greedy(self, order: Iterable[int], given: Mapping[int, int] | None = None) -> list[int]:
        """Each variable in turn takes what is cheapest with those decided, hoping for the best of the others."""
        given = given or {}
        x = [given.get(v, 0) for v in range(self.size)]
        done = set(given)
        around = self.around()
        for v in order:
            if v in done:
                continue
            score = self.unary[v].copy()
            for scope in around[v]:
                table = self.tables[scope]
                index: tuple[slice | int, ...] = tuple(x[u] if u in done else slice(None) for u in scope)
                rest = table[index]
                at = [u for u in scope if u not in done].index(v)
                score += rest.min(axis=tuple(k for k in range(rest.ndim) if k != at))
            x[v] = int(score.argmin())
            done.add(v)
        return x

    def reduce(self) -> tuple[Graph, Callable[[Sequence[int]], list[int]]]:
        """Apply R0, R1 and R2 until none applies: the irreducible core (same numbering) and the way back."""
        work = _Work(self, {}, [0] * self.size)
        neighbours = self.neighbours()
        todo = [v for v in self.alive if len(neighbours[v]) <= 2]
        gone: set[int] = set()
        while todo:
            v = todo.pop()
            if v in gone or len(neighbours[v]) > 2:
                continue
            gone.add(v)
            work.eliminate(v)
            _drop(neighbours, v)
            todo += [u for u in sorted(neighbours[v]) if len(neighbours[u]) <= 2]
        core = Graph(work.unary)
        core.alive = tuple(v for v in self.alive if v not in gone)
        core.constant = self.constant + work.constant
        for scope, table in work.all_tables():
            core.add(scope, table)
        return core, work.recover


def _drop(neighbours: list[set[int]], v: int) -> None:
    """Take v out of the structure and join its neighbours, as its elimination does."""
    for u in neighbours[v]:
        neighbours[u] |= neighbours[v]
        neighbours[u] -= {u, v}


class _Work:
    """The tables of one elimination run; `choices` is what recovers the eliminated variables."""

    def __init__(self, graph: Graph, fixed: dict[int, int], x: Sequence[int]) -> None:
        self.unary = list(graph.unary)
        self.x = list(x)
        self.constant = 0.0
        self.choices: list[tuple[int, Scope, NDArray[np.intp]]] = []
        self.buckets: list[dict[int, tuple[Scope, Array]]] = [{} for _ in graph.unary]
        self.next = 0
        for scope, table in graph.tables.items():
            if fixed and any(v in fixed for v in scope):
                table = table[tuple(fixed.get(v, slice(None)) for v in scope)]
                scope = tuple(v for v in scope if v not in fixed)
            self._put(scope, table)

    def _put(self, scope: Scope, table: Array) -> None:
        if not scope:
            return
        if len(scope) == 1:
            self.unary[scope[0]] = self.unary[scope[0]] + table
            return
        key, self.next = self.next, self.next + 1
        for v in scope:
            self.buckets[v][key] = (scope, table)

    def all_tables(self) -> list[tuple[Scope, Array]]:
        return list({key: item for bucket in self.buckets for key, item in bucket.items()}.values())

    def eliminate(self, v: int) -> None:
        items = self.buckets[v]
        if len(items) == 1 and len(first := next(iter(items.values()))[0]) == 2:
            self._fold(v, first[0] + first[1] - v)
            return
        scope = tuple(sorted({u for s, _ in items.values() for u in s} - {v}))
        place = {v: 0} | {u: k for k, u in enumerate(scope, 1)}
        total = self.unary[v].reshape(-1, *([1] * len(scope)))
        for key, (s, table) in items.items():
            total = total + _spread(table, [place[u] for u in s], len(scope) + 1)
            for u in s:
                if u != v:
                    del self.buckets[u][key]
        self.buckets[v] = {}
        best = total.argmin(axis=0)
        self.choices.append((v, scope, best))
        low = np.minimum(total.min(axis=0), BIG)
        if scope:
            self._put(scope, low)
        else:
            self.constant += float(low)

    def _fold(self, v: int, u: int) -> None:
        """Eliminate v, whose only table is with u: the most frequent case by far."""
        ((key, (scope, table)),) = self.buckets[v].items()
        total = self.unary[v][:, None] + (table if scope[0] == v else table.T)
        self.buckets[v] = {}
        del self.buckets[u][key]
        self.choices.append((v, (u,), total.argmin(axis=0)))
        self.unary[u] = self.unary[u] + np.minimum(total.min(axis=0), BIG)

    def recover(self, x: Sequence[int]) -> list[int]:
        """All options, from those of the variables that were not eliminated."""
        out = list(x)
        for v, scope, best in reversed(self.choices):
            out[v] = int(best[tuple(out[u] for u in scope)])
        return out


def _spread(table: Array, places: Sequence[int], ndim: int) -> Array:
    """`table` with its axes at `places` of an `ndim`-dimensional array, size 1 elsewhere."""
    order = sorted(range(len(places)), key=lambda k: places[k])
    shape = [1] * ndim
    for k in order:
        shape[places[k]] = table.shape[k]
    return table.transpose(order).reshape(shape)


def eliminate_all(graph: Graph, order: Sequence[int], fixed: Sequence[int], x: Sequence[int]) -> list[int]:
    """Solve exactly for the variables of `order`, the `fixed` ones staying as in `x`."""
    work = _Work(graph, {v: x[v] for v in fixed}, x)
    for v in order:
        work.eliminate(v)
    return work.recover(x)


def exact_order(graph: Graph, most: int) -> list[int] | None:
    """An elimination order whose largest sum has at most `most` elements, or None if the greedy order has none."""
    order, fixed = partial_order(graph, most, None)
    return None if fixed else order


def partial_order(graph: Graph, most: int, rng: np.random.Generator | None) -> tuple[list[int], list[int]]:
    """(order, fixed): which variables to fix, at random, so that the others are eliminated within `most` elements.

    Without `rng` nothing is fixed at random: where an order gets stuck, all that is left is `fixed`.
    """
    logs = [log(max(1, len(u))) for u in graph.unary]
    limit = log(most) + 1e-9
    neighbours = graph.neighbours()
    weight = [logs[v] + sum(logs[u] for u in neighbours[v]) for v in range(graph.size)]
    noise = None if rng is None else rng.random(graph.size)
    heap = [(weight[v], v) for v in graph.alive]
    heapify(heap)
    left = set(graph.alive)
    order: list[int] = []
    fixed: list[int] = []
    while left:
        w, v = heappop(heap)
        if v not in left or w != weight[v]:
            continue
        others = neighbours[v]
        if w <= limit:
            order.append(v)
            _drop(neighbours, v)
        else:
            if noise is None:
                return order, sorted(left)
            heappush(heap, (w, v))
            v = max(left, key=lambda u: (float(noise[u]) + 0.5) * weight[u])
            others = neighbours[v]
            fixed.append(v)
            for u in others:
                neighbours[u].discard(v)
        left.discard(v)
        for u in sorted(others):
            weight[u] = logs[u] + sum(logs[t] for t in neighbours[u])
            heappush(heap, (weight[u], u))
    return order, fixed
