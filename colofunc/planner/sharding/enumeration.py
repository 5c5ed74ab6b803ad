"""All shardings of a small step, cheapest first, without those that differ from a cheaper one in nothing that weighs.

Problem: a search at a price of memory finds shardings on the convex line between seconds and bytes at one moment; what is
best once values are copied or made again may lie off it. Idea: a small step has few shardings, and bucket elimination says of
each choice that is made in part what the rest costs at least: what an option costs beyond the best one, its *regret*, given
what was decided before, adds up to exactly what a choice costs beyond the optimum. A heap then yields the choices in order.

    optimum 7 s      regrets  a: 0 or 2     b, if a is 0: 0 or 1     b, if a is 1: 3 or 0
    7: (0, 0)   8: (0, 1)   9: (1, 1)   12: (1, 0)

Classes whose options all hold about the same bytes are not told apart: they take what is cheapest. Of two shardings the
dearer is left out where it holds nowhere less.

Source: Dechter, Bucket elimination; Lawler, Management Science 18 (1972), for the k best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush

import attrs
import numpy as np

from colofunc.planner.sharding.classes import Ties
from colofunc.planner.sharding.eliminate import BIG, Array, Graph, Scope, eliminate_all, exact_order
from colofunc.planner.sharding.model import Model
from colofunc.planner.sharding.search import NORMAL, exact_graph, search
from colofunc.program.ir import Program
from colofunc.spec.rule import Strategy

FACTOR, ELEMENTS = 1 << 16, 1 << 20
"""Largest tables, in elements, for which all shardings are looked at: of a factor as it is given, and as variables are eliminated."""
STEPS = 4000
"""At most this many choices are opened."""
FINE = 100
"""Memory that differs by less than 1/FINE of the budget is not told apart."""
ROOMS = (0.9, 0.8, 0.7, 0.6)
MOVABLE = ("frozen", "param", "state", "buffer")
LIGHT = attrs.evolve(NORMAL, passes=16, patience=4)


@attrs.frozen(eq=False)
class Bucket:
    """A variable, those that are decided before it, and what each of its options costs beyond the best one: (options, others...)."""

    variable: int
    scope: Scope
    regret: Array
    rows: dict[tuple[int, ...], tuple[list[float], int]] = attrs.field(factory=dict, init=False, repr=False)

    def row(self, others: tuple[int, ...]) -> tuple[list[float], int]:
        """(what each option costs beyond the best one where `others` are the options in its scope, the best one).

        Choices are opened in thousands and have most of their variables in common, so rows that were read are kept.
        """
        kept = self.rows.get(others)
        if kept is None:
            regrets: list[float] = np.moveaxis(self.regret, 0, -1)[others].tolist()
            kept = self.rows[others] = regrets, min(range(len(regrets)), key=regrets.__getitem__)
        return kept


def cheapest(model: Model, budget_bytes: int, steps: int = STEPS) -> Iterator[list[int]]:
    """Choices, cheapest first; nothing where the step is too large for it."""
    graph = exact_graph(model, FACTOR) if not model.copy_price and len(model.options) <= 64 else None
    order = None if graph is None else exact_order(graph, ELEMENTS)
    if graph is None or order is None:
        return
    held = [_bytes(model, c) for c in range(len(model.options))]
    weighs = [v for v, sizes in enumerate(held) if (sizes.max() - sizes.min()) * FINE > budget_bytes]
    light = [v for v in order if v not in set(weighs)]
    n_seen, seen = 0, np.zeros((64, len(weighs)))  # rows: bytes of what weighs, of choices that came by
    for choice in _in_order(graph, order, set(weighs), steps):
        mine = np.array([held[v][choice[v]] for v in weighs])
        if (seen[:n_seen] <= mine + budget_bytes / FINE).all(axis=1).any():
            continue
        if n_seen == len(seen):
            seen = np.concatenate([seen, np.zeros_like(seen)])
        seen[n_seen] = mine
        n_seen += 1
        yield eliminate_all(graph, light, weighs, choice)


def others(
    program: Program, model: Model, ties: Ties, start: Sequence[int], budget_bytes: int, few: bool, price_s: float | None
) -> Iterator[list[int]]:
    """Choices beside those to which prices of memory lead: all that may fit, cheapest first, none where they are too many (`few`); where
    nothing fits so far (no `price_s` a byte) some that may, in any order."""
    if price_s is None:
        return roomy(program, model, ties, start, budget_bytes)
    return iter(()) if few else fitting(program, model, ties, budget_bytes)


def roomy(program: Program, model: Model, ties: Ties, start: Sequence[int], budget_bytes: int) -> Iterator[list[int]]:
    """Of any step the fastest choices found in which no operator alone holds more than parts of the budget, and none more than
    all of it beside inputs that never leave the device: these may be brought down to it, whatever they hold before anything is
    moved or made again."""
    alone = [np.array(sizes, dtype=float) for sizes in alone_each(program, model, ties, sum)]
    beside = [sizes + stays * (sizes > 0) for sizes, stays in zip(alone, _stays(program, model, ties, start), strict=True)]
    for held, rooms in ((beside, ()), (alone, ROOMS)):
        least = max((float(sizes.min()) for sizes in held), default=0.0)
        found = list(start)
        for most in sorted({float(budget_bytes), least, *(room * budget_bytes for room in rooms)}, reverse=True):
            # What is the fastest with more room and needs less is the fastest here.
            if least <= most <= budget_bytes and not _fits(held, found, most):
                extra = [np.where(sizes > most, BIG, 0.0) for sizes in held]
                found = search(model.priced([0.0] * len(model.flows), extra), [start], 0, LIGHT, fresh=False)
                if _fits(held, found, most):
                    yield found


def _fits(held: Sequence[Array], choice: Sequence[int], most: float) -> bool:
    """Whether no class holds more under a choice."""
    return all(sizes[o] <= most for sizes, o in zip(held, choice, strict=True))


def _stays(program: Program, model: Model, ties: Ties, start: Sequence[int]) -> list[int]:
    """Per class the bytes of inputs that never leave the device, as they lie under `start`, but those that its operator reads."""
    given = {leaf for _, leaf in program.aliases}
    size: dict[int, int] = {}
    for k, i in enumerate(program.inputs):
        layout = model.options[ties.of_input(k)][start[ties.of_input(k)]].outs[0]
        if program.values[i].role not in MOVABLE and k not in given and layout is not None:
            size[i] = layout.local_numel * program.values[i].dtype.itemsize
    stays: list[int] = []
    for item, *_ in ties.members:
        if item < ties.n_inputs:
            stays.append(0)
            continue
        read = set(program.nodes[item - ties.n_inputs].refs)
        stays.append(sum(nbytes for id, nbytes in size.items() if id not in read))
    return stays


def fitting(program: Program, model: Model, ties: Ties, budget_bytes: int) -> Iterator[list[int]]:
    """`cheapest`, without what can never fit."""
    alone = alone_each(program, model, ties)
    if max(map(min, alone), default=0) > budget_bytes:  # then no choice does
        return iter(())
    return (choice for choice in cheapest(model, budget_bytes) if at_least(alone, choice) <= budget_bytes)


def alone_each(program: Program, model: Model, ties: Ties, how: Callable[[tuple[int, int]], int] = max) -> list[list[int]]:
    """Per class and option the bytes that its operator alone needs: of what it reads and what it makes, taken together by `how`.

    By max, which is needed whatever is moved or made again: it may write over what it reads, and what was given need not be there.
    """
    found: list[list[int]] = []
    for c, options in enumerate(model.options):
        found.append([_alone(program, ties, c, option, how) for option in options])
    return found


def at_least(alone: Sequence[Sequence[int]], choice: Sequence[int]) -> int:
    """Bytes that some operator of a choice needs, from `alone_each`."""
    return max((sizes[o] for sizes, o in zip(alone, choice, strict=True)), default=0)


def _alone(program: Program, ties: Ties, c: int, strategy: Strategy, how: Callable[[tuple[int, int]], int]) -> int:
    """Bytes of what an operator reads, and of what it makes, taken together by `how` (sum; max: it may write over what it reads)."""
    item = ties.members[c][0]
    node = program.nodes[item - ties.n_inputs] if item >= ties.n_inputs else None
    if node is None or node.phase == "update":  # which may run on the host
        return 0
    inputs = set(program.inputs) if how is max else set[int]()
    reads = {r: lay for r, lay in zip(node.refs, strategy.ins, strict=False) if r not in inputs and lay is not None}
    made = {o: lay for o, lay in zip(node.outs, strategy.outs, strict=True) if o is not None and lay is not None}
    size = [sum(lay.local_numel * program.values[v].dtype.itemsize for v, lay in some.items()) for some in (reads, made)]
    return how((size[0], size[1]))


def _bytes(model: Model, c: int) -> Array:
    """Bytes of all results of a class under each option."""
    itemsize = {flow.result: flow.itemsize for flow in model.flows if flow.producer == c}
    sizes = []
    for option in model.options[c]:
        sizes.append(sum(lay.local_numel * itemsize.get(j, 0) for j, lay in enumerate(option.outs) if lay is not None))
    return model.weight[c] * np.array(sizes, dtype=float)


def buckets_of(graph: Graph, order: Sequence[int]) -> tuple[float, list[Bucket]]:
    """(the least cost, buckets in the order of elimination)."""
    tables: list[tuple[Scope, Array]] = [*graph.tables.items(), *(((v,), graph.unary[v]) for v in order)]
    least, found = graph.constant, list[Bucket]()
    for v in order:
        mine = [one for one in tables if v in one[0]]
        tables = [one for one in tables if v not in one[0]]
        scope = tuple(sorted({u for s, _ in mine for u in s} - {v}))
        total: Array = np.zeros([1] * (1 + len(scope)))
        for s, table in mine:
            axes = [0 if u == v else 1 + scope.index(u) for u in s]
            by = np.argsort(axes)
            total = total + np.expand_dims(table.transpose(by), [k for k in range(1 + len(scope)) if k not in axes])
        low = total.min(axis=0)
        found.append(Bucket(v, scope, total - low))
        if scope:
            tables.append((scope, low))
        else:
            least += float(low)
    return least, found


def _in_order(graph: Graph, order: Sequence[int], branch: set[int], steps: int) -> Iterator[list[int]]:
    """Choices, cheapest first; variables outside `branch` take what is cheapest given those before them."""
    least, found = buckets_of(graph, order)
    found.reverse()
    place = {bucket.variable: k for k, bucket in enumerate(found)}
    scopes = [tuple(place[u] for u in bucket.scope) for bucket in found]
    branches = [bucket.variable in branch for bucket in found]
    order_of = [place[v] for v in range(graph.size)]
    heap = [(least, 0, tuple[int, ...]())]
    for step in range(1, steps + 1):
        if not heap:
            return
        cost_s, _, x = heappop(heap)
        while len(x) < len(found):
            k = len(x)
            row, best = found[k].row(tuple([x[at] for at in scopes[k]]))
            if branches[k]:
                for o, regret in enumerate(row):
                    if o != best and cost_s + regret < BIG:
                        heappush(heap, (cost_s + regret, step, (*x, o)))
            x, cost_s = (*x, best), cost_s + row[best]
        yield [x[at] for at in order_of]
