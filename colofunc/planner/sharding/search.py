"""Search under the true cost: exact for small programs, otherwise a pairwise model that is corrected as it goes.

The true cost counts a conversion once however many operators use it; the pairwise model must split it among them. So:
solve the pairwise model with every split that could be right, then re-split by what the best choice actually shares and
solve again (each step an exact solve around a random cut), and try moves of single classes. Only steps that lower the true cost are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import prod

import attrs
import numpy as np
from numpy.typing import NDArray

from colofunc.planner.sharding.eliminate import BIG, Array, Graph, eliminate_all, exact_order, partial_order
from colofunc.planner.sharding.flows import Coded
from colofunc.planner.sharding.model import Model

EXACT = 63
"""Models with at most this many classes may be solved exactly: a table has an axis for each of them, and numpy indexes 63 at once."""
STARTS = 3
"""At most this many of the assignments to begin from are improved, the cheapest. From one alone, of a decoder in float64 on 16 ranks with
2.5D and Ulysses within a budget (`tests.golden`) the step is 3.9 % slower."""
EVEN = 0.5
"""What each use pays of a conversion that may be shared, in the model by which a search leaves a local optimum."""


@attrs.frozen
class Effort:
    """How far a search goes, in units of work (never in time, so that all ranks find the same)."""

    exact_elements: int = 1 << 22  # largest table of an exact solution
    pass_elements: int = 1 << 15  # largest table of one step of the neighbourhood search
    passes: int = 64
    patience: int = 8  # passes without gain before a search ends


NORMAL = Effort()


def search(
    model: Model,
    starts: Sequence[Sequence[int]] = (),
    seed: int = 0,
    effort: Effort = NORMAL,
    fresh: bool = True,
    restarts: int = 0,
) -> list[int]:
    """The choice with the least true cost found. `fresh`: also search from nothing; without it only from `starts`.

    `restarts`: how often a search that is not fresh leaves the best of `starts` by another model and descends anew.
    """
    exact = _exact(model, effort)
    if exact is not None:
        return exact
    rng = np.random.default_rng(seed)
    quick = attrs.evolve(effort, passes=max(3, effort.passes // 6), patience=2)
    pool = [list(s) for s in starts]
    for share in (1.0, 0.0) if fresh or not pool else ():
        core, recover = model.pair_graph(share).reduce()
        pool.append(recover(improve(core, core.greedy(core.alive), rng, quick)))
    for start in sorted(starts, key=model.true_cost)[:STARTS]:
        core, recover = model.pair_graph(start).reduce()
        pool.append(recover(improve(core, list(start), rng, quick)))
    best = min(pool, key=model.true_cost)
    if restarts:
        return _restarted(model, best, seed, effort, restarts)
    return polish(model, best, np.random.default_rng((seed, 0)), effort)


def _restarted(model: Model, start: list[int], seed: int, effort: Effort, restarts: int) -> list[int]:
    """The best of descents that begin at `start` and where the pairwise model with even splits leads from there.

    A choice that was good for other sizes is often a local optimum of these. A model that splits conversions in another way than the
    choice does has its optima elsewhere, and the descent from there under the true cost ends lower or not. Without it the second length
    of `bench second_length` takes 11 % longer than planned from nothing (shard and offload).
    """
    light, quick = lighter(effort), attrs.evolve(effort, passes=max(3, effort.passes // 6), patience=2)
    core, recover = model.pair_graph(EVEN).reduce()
    ends = [polish(model, start, np.random.default_rng(seed), light)]
    for k in range(restarts):
        rng = np.random.default_rng((seed, k))
        elsewhere = recover(improve(core, list(start), rng, quick))
        ends.append(polish(model, elsewhere, rng, light))
    return min(ends, key=model.true_cost)


def lighter(effort: Effort) -> Effort:
    """For a search that begins near its end."""
    return attrs.evolve(effort, passes=max(6, effort.passes // 4), patience=max(4, effort.patience // 2))


def _exact(model: Model, effort: Effort) -> list[int] | None:
    if len(model.options) > EXACT or model.copy_price:
        return None
    graph = exact_graph(model, effort.exact_elements >> 6)
    order = None if graph is None else exact_order(graph, effort.exact_elements)
    if graph is None or order is None:
        return None
    return eliminate_all(graph, order, (), [0] * graph.size)


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


def polish(model: Model, x: list[int], rng: np.random.Generator, effort: Effort) -> list[int]:
    """Descend from `x` until neither re-split exact steps nor moves of single classes help."""
    best = model.true_cost(x)
    stale = 0
    moved = True
    graph = model.pair_graph(x)
    for _ in range(effort.passes):
        order, fixed = partial_order(graph, effort.pass_elements, rng)
        found = eliminate_all(graph, order, fixed, x)
        cost_s = best if found == x else model.true_cost(found)
        if cost_s < best - 1e-12 * abs(best):
            x, best, stale, moved = found, cost_s, 0, True
            graph = model.pair_graph(x)
            continue
        stale += 1
        if moved and stale >= effort.patience // 2:
            x, best, moved = _single_moves(model, x, best)
            if moved:
                graph, stale = model.pair_graph(x), 0
        if stale >= effort.patience or (not fixed and not moved):
            break
    return x


def _single_moves(model: Model, x: Sequence[int], best: float) -> tuple[list[int], float, bool]:
    """One round of moves under the true cost: every class to its best option, and whether any moved.

    On no row of `bench` do they win 1 %, but on 3 of 60 random programs (`tests/test_planner.py`) up to 5 %. To move all who read a
    value to one layout at once won nothing beside them.
    """
    x, moved = list(x), False
    for c, options in enumerate(model.options):
        if len(options) == 1:
            continue
        row = model.row(c, x)
        o = int(row.argmin())
        gain = float(row[o] - row[x[c]])
        if gain < -1e-12 * abs(best):
            x[c] = o
            best, moved = best + gain, True
    return x, best, moved


# ---- the true cost as factors ----


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
