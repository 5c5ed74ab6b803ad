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

from colofunc import progress
from colofunc.planner.sharding.eliminate import BIG, Array, Graph, eliminate_all, exact_order, partial_order
from colofunc.planner.sharding.flows import Coded
from colofunc.planner.sharding.model import PairwiseModel

EXACT = 63
"""Models with at most this many classes may be solved exactly: a table has an axis for each of them, and numpy indexes
63 at once."""
STARTS = 3
"""At most this many of the assignments to begin from are improved, the cheapest."""
EVEN = 0.5
"""What each use pays of a conversion that may be shared, in the model by which a search leaves a local optimum."""
SEED = 0
"""Of the random cuts of every search: all ranks find the same."""
TRIES = 3
"""The best of them is polished this many times, each time around other cuts: where that ends depends on them. Once less
beside each start that is polished by itself."""


ROUNDING = 1e-12
"""Of the cost of a choice: one that is closer costs the same."""


@attrs.frozen
class Effort:
    """How far a search goes, in units of work (never in time, so that all ranks find the same)."""

    exact_elements: int = 1 << 22  # largest table of an exact solution
    pass_elements: int = 1 << 15  # largest table of one step of the neighbourhood search
    passes: int = 64
    sweeps: bool = True  # also try moves of single variables and whole flows under the true cost
    patience: int = 8  # passes without gain before a search ends
    tries: int = TRIES  # how often the best of a search from nothing is polished


NORMAL = Effort()


def search_neighbours(
    model: PairwiseModel,
    starts: Sequence[Sequence[int]] = (),
    effort: Effort = NORMAL,
    fresh: bool = True,
    restarts: int = 0,
) -> list[int]:
    """The choice with the least true cost found. `fresh`: also search from nothing; without it only from `starts`.

    `restarts`: how often a search that is not fresh leaves the best of `starts` by another model and descends anew.
    """
    return search_ends(model, starts, effort, fresh, restarts)[0]


def search_ends(
    model: PairwiseModel,
    starts: Sequence[Sequence[int]] = (),
    effort: Effort = NORMAL,
    fresh: bool = True,
    restarts: int = 0,
    apart: Sequence[Sequence[int]] = (),
) -> list[list[int]]:
    """What `search_neighbours` finds, and behind it the best that was found from other starts, cheapest first.

    `apart`: choices that are polished each by itself, beside the best of all others.
    """
    exact = _exact(model, effort)
    if exact is not None:
        return [exact]
    rng = np.random.default_rng(SEED)
    quick = _quick(effort)
    pool = [list(start) for start in starts]
    if fresh or not pool:
        # Each use pays the whole of a conversion, or none of it: the true split lies between.
        for share in (1.0, 0.0):
            core, recover = model.pair_graph(share).reduce()
            pool.append(recover(improve(core, core.greedy(core.alive), rng, quick)))
    for start in sorted(starts, key=model.true_cost)[:STARTS]:
        core, recover = model.pair_graph(start).reduce()
        pool.append(recover(improve(core, list(start), rng, quick)))
    best = min(pool, key=model.true_cost)
    if restarts:
        return [_restarted(model, best, effort, restarts)]
    position = Position(model, best)  # where one try has been, another one knows its way
    tries = max(1, effort.tries - len(apart)) if fresh else 1
    begins = [best] * tries + [list(start) for start in apart]
    ends = []
    for number, begin in enumerate(progress.over("sharding searches", begins)):
        ends.append(polish(position, begin, np.random.default_rng((SEED, number)), effort))
    of_each_start = [min(ends[:tries], key=model.true_cost), *ends[tries:]]
    return sorted(of_each_start, key=model.true_cost)


def _quick(effort: Effort) -> Effort:
    """For a search whose result is only a place to begin from."""
    return attrs.evolve(effort, passes=max(3, effort.passes // 6), patience=2)


def _restarted(model: PairwiseModel, start: list[int], effort: Effort, restarts: int) -> list[int]:
    """The best of descents that begin at `start` and where the pairwise model with even splits leads from there.

    A choice that was good for other sizes is often a local optimum of these. A model that splits conversions in another
    way than the choice does has its optima elsewhere, and the descent from there under the true cost ends lower or not.
    """
    light, quick = lighter(effort), _quick(effort)
    core, recover = model.pair_graph(EVEN).reduce()
    position = Position(model, start)
    ends = [polish(position, start, np.random.default_rng(SEED), light)]
    for number in progress.over("sharding searches", range(restarts)):
        rng = np.random.default_rng((SEED, number))
        elsewhere = recover(improve(core, list(start), rng, quick))
        ends.append(polish(position, elsewhere, rng, light))
    return min(ends, key=model.true_cost)


def lighter(effort: Effort) -> Effort:
    """For a search that begins near its end."""
    return attrs.evolve(effort, passes=max(6, effort.passes // 4), patience=max(4, effort.patience // 2))


def _exact(model: PairwiseModel, effort: Effort) -> list[int] | None:
    if len(model.options) > EXACT or model.copy_price:
        return None
    graph = exact_graph(model, effort.exact_elements >> 6)
    order = None if graph is None else exact_order(graph, effort.exact_elements)
    if graph is None or order is None:
        return None
    return eliminate_all(graph, order, (), [0] * graph.size)


def improve(graph: Graph, choice: list[int], rng: np.random.Generator, effort: Effort) -> list[int]:
    """Large neighbourhood search: fix a random cut at its present options, solve all the rest exactly, repeat."""
    best = graph.cost(choice)
    stale = 0
    for _ in range(effort.passes):
        order, fixed = partial_order(graph, effort.pass_elements, rng)
        solved = eliminate_all(graph, order, fixed, choice)
        cost_s = graph.cost(solved)
        gain_s = best - cost_s
        if gain_s > ROUNDING * abs(best):
            choice, best, stale = solved, cost_s, 0
        else:
            stale += 1
            # One that costs the same moves along the plateau.
            if gain_s >= 0:
                choice = solved
        if not fixed or stale >= effort.patience:
            break
    return choice


def polish(position: Position, choice: list[int], rng: np.random.Generator, effort: Effort) -> list[int]:
    """Descend from `choice` until neither re-split exact steps nor moves of single classes or whole flows help.

    `position` is moved along.
    """
    model = position.model
    best = model.true_cost(choice)
    stale = 0
    moved = True
    graph = model.pair_graph(choice)
    for _ in range(effort.passes):
        order, fixed = partial_order(graph, effort.pass_elements, rng)
        solved = eliminate_all(graph, order, fixed, choice)
        cost_s = best if solved == choice else model.true_cost(solved)
        if cost_s < best - ROUNDING * abs(best):
            choice, best, stale, moved = solved, cost_s, 0, True
            graph = model.pair_graph(choice)
            continue
        stale += 1
        # Moves of single classes are tried where exact steps have got stuck, until none of them helps.
        if effort.sweeps and moved and stale >= effort.patience // 2:
            position.go_to(choice)
            choice, best, moved = _sweep(position, best)
            if moved:
                graph, stale = model.pair_graph(choice), 0
        if stale >= effort.patience or (not fixed and not (effort.sweeps and moved)):
            break
    return choice


def _sweep(position: Position, best: float) -> tuple[list[int], float, bool]:
    """One round of true-cost moves: every class to every option, every flow to every common layout."""
    moved = False
    for flow in range(len(position.model.flows)):
        if flow in position.settled:
            continue
        position.settled.add(flow)  # a move takes it out again
        for proposal in _flow_moves(position, flow):
            change_s = position.change_s(proposal)
            if change_s < -ROUNDING * abs(best):
                position.move(proposal)
                best, moved = best + change_s, True
    for number, options in enumerate(position.model.options):
        if len(options) == 1:
            continue
        row = position.row(number)
        cheapest = int(row.argmin())
        change_s = float(row[cheapest] - row[position.choice[number]])
        if change_s < -ROUNDING * abs(best):
            position.move({number: cheapest})
            best, moved = best + change_s, True
    return position.choice, best, moved


def _flow_moves(position: Position, flow: int) -> list[dict[int, int]]:
    """Moves of all consumers of a flow to one layout, with the producer as it is or giving that layout itself."""
    coded = position.model.coded[flow]
    producer = coded.flow.producer
    if len(set(coded.classes)) < 2:
        return []
    # layout -> class -> the cheapest option of the class that asks for it
    wanted: dict[int, dict[int, int]] = {}
    for consumer, column in zip(coded.classes, coded.targets, strict=True):
        for layout, option in _cheapest(column, position.row(consumer)).items():
            wanted.setdefault(layout, {})[consumer] = option
    sources = _cheapest(coded.source, position.row(producer))
    proposals = []
    for layout, options in wanted.items():
        moves = {consumer: option for consumer, option in options.items() if position.choice[consumer] != option}
        if not moves:
            continue
        proposals.append(moves)
        if layout in sources and producer not in moves:
            proposals.append({**moves, producer: sources[layout]})
    return proposals


def _cheapest(column: Sequence[int], row: Array) -> dict[int, int]:
    """Layout -> the cheapest option that has it."""
    best: dict[int, int] = {}
    costs = row.tolist()
    for option, layout in enumerate(column):
        if layout not in best or costs[option] < costs[best[layout]]:
            best[layout] = option
    return best


# ---- a choice from which moves are tried ----
#
# Problem: of thousands of moves that are tried under the true cost few are made, and each asks again what the flows
# cost that it would change, and what every option of their consumers would. Idea: keep both by flow and by class, and
# forget after a move what it touched. A move that costs more by itself than it could save in conversions is not looked
# at further, and a flow of which no move was a gain is settled until a move touches what its moves were judged by.
#
#     position = Position(model, choice)
#     if position.change_s({3: 1, 5: 2}) < 0:
#         position.move({3: 1, 5: 2})
#     position.go_to(another_choice)          # what both have in common is still known


class Position:
    """`choice`: the option of each class; a new list after each move. `settled`: flows of which no move is a gain."""

    def __init__(self, model: PairwiseModel, choice: Sequence[int]) -> None:
        self.model, self.choice = model, list(choice)
        self.settled: set[int] = set()
        self._flows: dict[int, float] = {}
        self._rows: dict[int, Array] = {}

    def row(self, number: int) -> Array:
        """`PairwiseModel.row` of this choice."""
        if number not in self._rows:
            self._rows[number] = self.model.row(number, self.choice)
        return self._rows[number]

    def change_s(self, moves: Mapping[int, int]) -> float:
        """Change of the true cost when the classes of `moves` change option; where that is no gain, a lower bound that
        is none.
        """
        model, after = self.model, list(self.choice)
        change_s = 0.0
        for number, option in moves.items():
            now = self.choice[number]
            after[number] = option
            seconds = model.seconds[number]
            change_s += model.weight[number] * (seconds.item(option) - seconds.item(now))
            if model.extra:
                change_s += model.extra[number].item(option) - model.extra[number].item(now)
        # At best the flows that the moves touch cost nothing any more.
        flow_s: dict[int, float] = {}
        for number in moves:
            for flow in model.flows_of[number]:
                flow_s[flow] = self._flow_s(flow)
        can_save_s = sum(flow_s.values())
        for flow, before_s in flow_s.items():
            if change_s > can_save_s:
                return change_s - can_save_s
            change_s += model.flow_s(flow, after) - before_s
            can_save_s -= before_s
        return change_s

    def move(self, moves: Mapping[int, int]) -> None:
        """Change the option of some classes."""
        self.choice = list(self.choice)
        for number, option in moves.items():
            self.choice[number] = option
        flows: set[int] = set()
        for number in moves:
            flows.update(self.model.flows_of[number])
        touched: set[int] = set()
        for flow in flows:
            coded = self.model.coded[flow]
            self._flows.pop(flow, None)
            touched.update((coded.flow.producer, *coded.classes))
        for number in touched:
            self._rows.pop(number, None)
            self.settled.difference_update(self.model.flows_of[number])

    def go_to(self, choice: Sequence[int]) -> None:
        """Move to another choice."""
        moves = {}
        for number, (option, now) in enumerate(zip(choice, self.choice, strict=True)):
            if option != now:
                moves[number] = option
        if moves:
            self.move(moves)

    def _flow_s(self, flow: int) -> float:
        if flow not in self._flows:
            self._flows[flow] = self.model.flow_s(flow, self.choice)
        return self._flows[flow]


# ---- the true cost as factors ----


def exact_graph(model: PairwiseModel, most: int) -> Graph | None:
    """None where a factor would exceed `most` entries."""
    graph = Graph([model.own(number) for number in range(len(model.options))])
    for coded in model.coded:
        columns = [coded.source, *coded.targets]
        if prod(map(len, columns)) > most:
            return None
        # Options with equal layouts cost the same: the seconds are worked out once per layout and spread to options.
        layouts: list[NDArray[np.int_]] = []
        layout_of_option: list[NDArray[np.intp]] = []
        for column in columns:
            distinct, inverse = np.unique(np.array(column), return_inverse=True)
            layouts.append(distinct)
            layout_of_option.append(inverse)
        seconds = _joint(coded, layouts)[np.ix_(*layout_of_option)]
        graph.add((coded.flow.producer, *coded.classes), coded.flow.count * seconds)
    return graph


def _joint(coded: Coded, lists: Sequence[NDArray[np.int_]]) -> Array:
    """Seconds over (source, target 1, target 2, ...): each target from the cheapest of what came before it."""
    total = np.zeros(tuple(map(len, lists)))
    groups = [0, *coded.groups]

    def spread(table: Array, *axes: int) -> Array:
        shape = [1] * len(lists)
        for axis, size in zip(axes, table.shape, strict=True):
            shape[axis] = size
        return table.reshape(shape)

    def table(sources: NDArray[np.int_], targets: NDArray[np.int_]) -> Array:
        rows = []
        for source in sources.tolist():
            rows.append([coded.second(source, target) for target in targets.tolist()])
        return np.array(rows, dtype=float)

    for axis in range(1, len(lists)):
        # Axis 0 is the source; a target may also start from an earlier target of its group.
        starts = [start for start in range(axis) if start == 0 or groups[start] == groups[axis]]
        ways = [spread(table(lists[start], lists[axis]), start, axis) for start in starts]
        total = total + reduce(np.minimum, ways)
    if coded.rest:
        rest = np.array([coded.rest[source] for source in lists[0].tolist()])
        straight = [coded.second(source, end) for source, end in zip(lists[0].tolist(), rest.tolist(), strict=True)]
        cheapest = spread(np.array(straight), 0)
        for axis in range(1, len(lists)):
            if groups[axis] == 0:
                cheapest = np.minimum(cheapest, spread(table(lists[axis], rest).T, 0, axis))
        total = total + np.minimum(cheapest, BIG)
    return total
