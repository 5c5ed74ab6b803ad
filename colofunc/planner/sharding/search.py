"""Search under the true cost: exact for small programs, otherwise a pairwise model that is corrected as it goes.

The true cost counts a conversion once however many operators use it; the pairwise model must split it among them. So:
solve the pairwise model with every split that could be right, then re-split by what the best choice actually shares and
solve again (each step an exact solve around a random cut), and try moves of a whole flow at once: all consumers of a
value to one layout. Only steps that lower the true cost are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from math import prod

import attrs
import numpy as np
from numpy.typing import NDArray

from colofunc.planner.sharding.eliminate import BIG, Array, Graph, eliminate_all, exact_order, partial_order
from colofunc.planner.sharding.flows import Coded
from colofunc.planner.sharding.model import Model

EXACT = 63
"""Models with at most this many classes may be solved exactly: a table has an axis for each of them, and numpy indexes
63 at once."""
STARTS = 3
"""At most this many of the assignments to begin from are improved, the cheapest."""
EVEN = 0.5
"""What each use pays of a conversion that may be shared, in the model by which a search leaves a local optimum."""
TRIES = 3
"""The best of them is polished this many times, each time around other cuts: where that ends depends on them."""


@attrs.frozen
class Effort:
    """How far a search goes, in units of work (never in time, so that all ranks find the same)."""

    exact_elements: int = 1 << 22  # largest table of an exact solution
    pass_elements: int = 1 << 15  # largest table of one step of the neighbourhood search
    passes: int = 64
    sweeps: bool = True  # also try moves of single variables and whole flows under the true cost
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
    here = Position(model, best)  # where one try has been, another one knows its way
    ends = [polish(here, best, np.random.default_rng((seed, k)), effort) for k in range(TRIES if fresh else 1)]
    return min(ends, key=model.true_cost)


def _restarted(model: Model, start: list[int], seed: int, effort: Effort, restarts: int) -> list[int]:
    """The best of descents that begin at `start` and where the pairwise model with even splits leads from there.

    A choice that was good for other sizes is often a local optimum of these. A model that splits conversions in another
    way than the choice does has its optima elsewhere, and the descent from there under the true cost ends lower or not.
    """
    light, quick = lighter(effort), attrs.evolve(effort, passes=max(3, effort.passes // 6), patience=2)
    core, recover = model.pair_graph(EVEN).reduce()
    here = Position(model, start)
    ends = [polish(here, start, np.random.default_rng(seed), light)]
    for k in range(restarts):
        rng = np.random.default_rng((seed, k))
        elsewhere = recover(improve(core, list(start), rng, quick))
        ends.append(polish(here, elsewhere, rng, light))
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


def polish(here: Position, x: list[int], rng: np.random.Generator, effort: Effort) -> list[int]:
    """Descend from `x` until neither re-split exact steps nor moves of single classes or whole flows help.

    `here` is moved along.
    """
    model = here.model
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
        if effort.sweeps and moved and stale >= effort.patience // 2:
            here.go_to(x)
            x, best, moved = _sweep(here, best)
            if moved:
                graph, stale = model.pair_graph(x), 0
        if stale >= effort.patience or (not fixed and not (effort.sweeps and moved)):
            break
    return x


def _sweep(here: Position, best: float) -> tuple[list[int], float, bool]:
    """One round of true-cost moves: every class to every option, every flow to every common layout."""
    moved = False
    for f in range(len(here.model.flows)):
        if f in here.settled:
            continue
        here.settled.add(f)  # a move takes it out again
        for proposal in _together(here, f):
            gain = here.change_s(proposal)
            if gain < -1e-12 * abs(best):
                here.move(proposal)
                best, moved = best + gain, True
    for c, options in enumerate(here.model.options):
        if len(options) == 1:
            continue
        row = here.row(c)
        o = int(row.argmin())
        gain = float(row[o] - row[here.choice[c]])
        if gain < -1e-12 * abs(best):
            here.move({c: o})
            best, moved = best + gain, True
    return here.choice, best, moved


def _together(here: Position, f: int) -> list[dict[int, int]]:
    """Moves of all consumers of a flow to one layout, with the producer as it is or giving that layout itself."""
    coded = here.model.coded[f]
    producer = coded.flow.producer
    if len(set(coded.classes)) < 2:
        return []
    wanted: dict[int, dict[int, int]] = {}
    for c, column in zip(coded.classes, coded.targets, strict=True):
        for layout, option in _cheapest(column, here.row(c)).items():
            wanted.setdefault(layout, {})[c] = option
    sources = _cheapest(coded.source, here.row(producer))
    out = []
    for layout, moves in wanted.items():
        moves = {c: o for c, o in moves.items() if here.choice[c] != o}
        if not moves:
            continue
        out.append(moves)
        if layout in sources and producer not in moves:
            out.append({**moves, producer: sources[layout]})
    return out


def _cheapest(column: Sequence[int], row: Array) -> dict[int, int]:
    """Layout -> the cheapest option that has it."""
    best: dict[int, int] = {}
    costs = row.tolist()
    for o, layout in enumerate(column):
        if layout not in best or costs[o] < costs[best[layout]]:
            best[layout] = o
    return best


# ---- a choice from which moves are tried ---- Problem: of thousands of moves that are tried under the true cost few
# are made, and each asks again what the flows cost that it would change, and what every option of their consumers
# would. Idea: keep both by flow and by class, and forget after a move what it touched. A move that costs more by itself
# than it could save in conversions is not looked at further, and a flow of which no move was a gain is settled until a
# move touches what its moves were judged by.
#
#     here = Position(model, choice)
#     if here.change_s({3: 1, 5: 2}) < 0:
#         here.move({3: 1, 5: 2})
#     here.go_to(another_choice)          # what both have in common is still known


class Position:
    """`choice`: the option of each class; a new list after each move. `settled`: flows of which no move is a gain."""

    def __init__(self, model: Model, choice: Sequence[int]) -> None:
        self.model, self.choice = model, list(choice)
        self.settled: set[int] = set()
        self._flows: dict[int, float] = {}
        self._rows: dict[int, Array] = {}

    def row(self, c: int) -> Array:
        """`Model.row` of this choice."""
        if c not in self._rows:
            self._rows[c] = self.model.row(c, self.choice)
        return self._rows[c]

    def change_s(self, moves: Mapping[int, int]) -> float:
        """Change of the true cost when the classes of `moves` change option; where that is no gain, a lower bound that
        is none.
        """
        model, after = self.model, list(self.choice)
        delta = 0.0
        for c, o in moves.items():
            now = self.choice[c]
            after[c] = o
            delta += model.weight[c] * (model.seconds[c].item(o) - model.seconds[c].item(now))
            if model.extra:
                delta += model.extra[c].item(o) - model.extra[c].item(now)
        touched = {f: self._flow_s(f) for c in moves for f in model.flows_of[c]}
        can_save = sum(touched.values())
        for f, seconds in touched.items():
            if delta > can_save:
                break
            delta += model.flow_s(f, after) - seconds
            can_save -= seconds
        else:
            return delta
        return delta - can_save

    def move(self, moves: Mapping[int, int]) -> None:
        """Change the option of some classes."""
        self.choice = list(self.choice)
        for c, o in moves.items():
            self.choice[c] = o
        touched: set[int] = set()
        for f in {f for c in moves for f in self.model.flows_of[c]}:
            coded = self.model.coded[f]
            self._flows.pop(f, None)
            touched.update((coded.flow.producer, *coded.classes))
        for c in touched:
            self._rows.pop(c, None)
            self.settled.difference_update(self.model.flows_of[c])

    def go_to(self, choice: Sequence[int]) -> None:
        """Move to another choice."""
        moves = {c: o for c, (o, now) in enumerate(zip(choice, self.choice, strict=True)) if o != now}
        if moves:
            self.move(moves)

    def _flow_s(self, f: int) -> float:
        if f not in self._flows:
            self._flows[f] = self.model.flow_s(f, self.choice)
        return self._flows[f]


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
