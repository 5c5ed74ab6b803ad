"""All shardings of a small step, cheapest first, without those that differ from a cheaper one in nothing that weighs.

Problem: a search at a price of memory finds shardings on the convex line between seconds and bytes at one moment; what
is best once values are copied or made again may lie off it. Idea: a small step has few shardings, and bucket
elimination says of each choice that is made in part what the rest costs at least: what an option costs beyond the best
one, its *regret*, given what was decided before, adds up to exactly what a choice costs beyond the optimum. A heap then
yields the choices in order.

    optimum 7 s      regrets  a: 0 or 2     b, if a is 0: 0 or 1     b, if a is 1: 3 or 0
    7: (0, 0)   8: (0, 1)   9: (1, 1)   12: (1, 0)

Classes whose options all hold about the same bytes are not told apart: they take what is cheapest. Of two shardings the
dearer is left out where it holds nowhere less.

Source: Dechter, Bucket elimination; Lawler, Management Science 18 (1972), for the k best.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from heapq import heappop, heappush

import attrs
import numpy as np

from colofunc.planner.sharding.classes import Ties
from colofunc.planner.sharding.eliminate import BIG, Array, Graph, TableScope, eliminate_all, exact_order
from colofunc.planner.sharding.model import PairwiseModel
from colofunc.planner.sharding.search import NORMAL, exact_graph, search_neighbours
from colofunc.program.ir import Program
from colofunc.spec.layout import Layout

FACTOR = 1 << 16
"""Elements of the largest factor of a step for which all shardings are looked at."""

ELEMENTS = 1 << 20
"""Elements of the largest table that may come of eliminating a variable of such a step."""

MOST_CLASSES = 64
"""Classes of the largest step for which all shardings are looked at."""

STEPS = 4000
"""At most this many choices are opened."""

FINE = 100
"""Memory that differs by less than 1/FINE of the budget is not told apart."""

ROOMS = (0.9, 0.8, 0.7, 0.6)
"""Parts of the budget to which an operator alone is held, one after another."""

PARTS_OF_PRICE = (1.0, 0.25)
"""Parts of the price of memory that one kind of it is charged alone."""

MOVABLE = ("frozen", "param", "state", "buffer")
"""Roles of inputs that may leave the device."""

LIGHT = attrs.evolve(NORMAL, passes=16, patience=4)
"""The effort of a search for one choice that is roomier."""


@attrs.frozen(eq=False)
class Bucket:
    """A variable, those that are decided before it, and what each of its options costs beyond the best one: (options,
    others...).
    """

    variable: int
    scope: TableScope
    regret: Array
    rows: dict[tuple[int, ...], tuple[list[float], int]] = attrs.field(factory=dict, init=False, repr=False)

    def row(self, others: tuple[int, ...]) -> tuple[list[float], int]:
        """(what each option costs beyond the best one where `others` are the options in its scope, the best one).

        Choices are opened in thousands and have most of their variables in common, so rows that were read are kept.
        """
        row = self.rows.get(others)
        if row is None:
            regrets: list[float] = np.moveaxis(self.regret, 0, -1)[others].tolist()
            best = min(range(len(regrets)), key=regrets.__getitem__)
            row = self.rows[others] = regrets, best
        return row


def cheapest(model: PairwiseModel, budget_bytes: int) -> Iterator[list[int]]:
    """Choices, cheapest first; nothing where the step is too large for it."""
    if model.copy_price or len(model.options) > MOST_CLASSES:
        return
    graph = exact_graph(model, FACTOR)
    order = None if graph is None else exact_order(graph, ELEMENTS)
    if graph is None or order is None:
        return
    result_bytes = [_bytes(model, variable) for variable in range(len(model.options))]
    heavy = [
        variable for variable, sizes in enumerate(result_bytes) if (sizes.max() - sizes.min()) * FINE > budget_bytes
    ]
    branch = set(heavy)
    light = [variable for variable in order if variable not in branch]
    seen = _BytesOfChoices(len(heavy), budget_bytes / FINE)
    for choice in _in_order(graph, order, branch, STEPS):
        nbytes = np.array([result_bytes[variable][choice[variable]] for variable in heavy])
        if not seen.holds_no_more(nbytes):
            seen.add(nbytes)
            yield eliminate_all(graph, light, heavy, choice)


class _BytesOfChoices:
    """Bytes of what weighs under choices that came by: a row for each, a column for each variable."""

    def __init__(self, columns: int, tolerance_bytes: float) -> None:
        self.tolerance_bytes = tolerance_bytes
        self.count = 0
        self.rows: Array = np.zeros((64, columns))

    def holds_no_more(self, nbytes: Array) -> bool:
        """Whether a choice that came by, and is cheaper, holds nowhere more."""
        return bool((self.rows[: self.count] <= nbytes + self.tolerance_bytes).all(axis=1).any())

    def add(self, nbytes: Array) -> None:
        if self.count == len(self.rows):
            self.rows = np.concatenate([self.rows, np.zeros_like(self.rows)])
        self.rows[self.count] = nbytes
        self.count += 1


def more_choices(
    program: Program,
    model: PairwiseModel,
    ties: Ties,
    start: Sequence[int],
    budget_bytes: int,
    small: bool,
    price_s: float | None,
) -> Iterator[list[int]]:
    """Choices beside those to which prices of memory lead, cheapest first.

    Of a `small` step all that may fit, of others those that lean to one kind of memory. Where nothing fits so far
    (`price_s`, of a byte, is None): some that may, in any order.
    """
    if price_s is None:
        return roomy(program, model, ties, start, budget_bytes)
    if small:
        return fitting(program, model, ties, budget_bytes)
    return iter(sorted(leaning(program, model, ties, start, price_s), key=model.true_cost))


def leaning(
    program: Program, model: PairwiseModel, ties: Ties, start: Sequence[int], price_s: float
) -> Iterator[list[int]]:
    """Choices that are best where only bytes of state have a price, and where only bytes that are made have one.

    State can be copied and updated elsewhere, what is made can be made again: a byte of one may cost a plan much and
    one of the other nothing, which no price of both tells. Without them 3 of 140 small steps (`bench jointly`, as of a
    larger step) take 5 to 25 % longer.
    """
    held_bytes = [_bytes(model, variable) for variable in range(len(model.options))]
    kinds = [_kind(program, ties, variable) for variable in range(len(model.options))]
    for priced_kind in ("state", "made"):
        for part in PARTS_OF_PRICE:
            extra_s = []
            for nbytes, kind in zip(held_bytes, kinds, strict=True):
                extra_s.append(nbytes * (part * price_s if kind == priced_kind else 0.0))
            yield search_neighbours(model.priced([0.0] * len(model.flows), extra_s), [start], LIGHT, fresh=False)


def _kind(program: Program, ties: Ties, variable: int) -> str:
    """What the first member of a class is: state, what updates make, or what else is made."""
    item = ties.members[variable][0]
    if item < ties.n_inputs:
        return "state"
    return "updated" if program.nodes[item - ties.n_inputs].phase == "update" else "made"


def roomy(
    program: Program, model: PairwiseModel, ties: Ties, start: Sequence[int], budget_bytes: int
) -> Iterator[list[int]]:
    """Of any step the fastest choices found under which each operator alone keeps to the budget.

    First beside inputs that never leave the device, then without them to parts of the budget. Such a choice may be
    brought down to the budget, whatever it holds before anything is moved or made again.
    """
    alone = [np.array(sizes, dtype=float) for sizes in alone_each(program, model, ties, at_once=True)]
    beside = []
    for sizes, stays_bytes in zip(alone, _stays(program, model, ties, start), strict=True):
        beside.append(sizes + stays_bytes * (sizes > 0))
    for needed, rooms in ((beside, ()), (alone, ROOMS)):
        least = max((float(sizes.min()) for sizes in needed), default=0.0)
        limits = {float(budget_bytes), least, *(room * budget_bytes for room in rooms)}
        choice = list(start)
        for limit in sorted(limits, reverse=True):
            # What is the fastest with more room and needs less is the fastest here.
            if least <= limit <= budget_bytes and not _fits(needed, choice, limit):
                extra = [np.where(sizes > limit, BIG, 0.0) for sizes in needed]
                choice = search_neighbours(model.priced([0.0] * len(model.flows), extra), [start], LIGHT, fresh=False)
                if _fits(needed, choice, limit):
                    yield choice


def _fits(needed: Sequence[Array], choice: Sequence[int], limit: float) -> bool:
    """Whether no class needs more under a choice."""
    return all(sizes[option] <= limit for sizes, option in zip(needed, choice, strict=True))


def _stays(program: Program, model: PairwiseModel, ties: Ties, start: Sequence[int]) -> list[int]:
    """Per class the bytes of inputs that never leave the device, as they lie under `start`, but those that its operator
    reads.
    """
    updated = {leaf for _, leaf in program.aliases}
    nbytes: dict[int, int] = {}
    for position, id in enumerate(program.inputs):
        value = program.values[id]
        variable = ties.of_input(position)
        layout = model.options[variable][start[variable]].outs[0]
        if value.role not in MOVABLE and position not in updated and layout is not None:
            nbytes[id] = layout.local_numel * value.dtype.itemsize
    stays: list[int] = []
    for item, *_ in ties.members:
        if item < ties.n_inputs:
            stays.append(0)
            continue
        read = set(program.nodes[item - ties.n_inputs].refs)
        stays.append(sum(size for id, size in nbytes.items() if id not in read))
    return stays


def fitting(program: Program, model: PairwiseModel, ties: Ties, budget_bytes: int) -> Iterator[list[int]]:
    """`cheapest`, without what can never fit."""
    alone = alone_each(program, model, ties)
    if max(map(min, alone), default=0) > budget_bytes:  # then no choice does
        return iter(())
    return (choice for choice in cheapest(model, budget_bytes) if at_least(alone, choice) <= budget_bytes)


def alone_each(program: Program, model: PairwiseModel, ties: Ties, at_once: bool = False) -> list[list[int]]:
    """Per class and option the bytes that its operator alone needs.

    These are needed whatever is moved or made again: what it reads or what it makes, the larger, for it may write over
    what it reads; and what was given need not be there. `at_once`: all that it reads, beside what it makes.
    """
    not_counted = set[int]() if at_once else set(program.inputs)
    needed: list[list[int]] = []
    for (item, *_), options in zip(ties.members, model.options, strict=True):
        node = program.nodes[item - ties.n_inputs] if item >= ties.n_inputs else None
        if node is None or node.phase == "update":  # which may run on the host
            needed.append([0] * len(options))
            continue
        sizes = []
        for option in options:
            read = {id: layout for id, layout in zip(node.refs, option.ins, strict=False) if id not in not_counted}
            made = {id: layout for id, layout in zip(node.outs, option.outs, strict=True) if id is not None}
            read_bytes, made_bytes = _local_bytes(program, read), _local_bytes(program, made)
            sizes.append(read_bytes + made_bytes if at_once else max(read_bytes, made_bytes))
        needed.append(sizes)
    return needed


def _local_bytes(program: Program, layouts: Mapping[int, Layout | None]) -> int:
    """Bytes of one rank's parts of values in these layouts."""
    total = 0
    for id, layout in layouts.items():
        if layout is not None:
            total += layout.local_numel * program.values[id].dtype.itemsize
    return total


def at_least(alone: Sequence[Sequence[int]], choice: Sequence[int]) -> int:
    """Bytes that some operator of a choice needs, from `alone_each`."""
    return max((sizes[option] for sizes, option in zip(alone, choice, strict=True)), default=0)


def _bytes(model: PairwiseModel, variable: int) -> Array:
    """Bytes of all results of a class under each option."""
    itemsize = {flow.result: flow.itemsize for flow in model.flows if flow.producer == variable}
    sizes = []
    for option in model.options[variable]:
        nbytes = 0
        for result, layout in enumerate(option.outs):
            if layout is not None:
                nbytes += layout.local_numel * itemsize.get(result, 0)
        sizes.append(nbytes)
    return model.weight[variable] * np.array(sizes, dtype=float)


def buckets_of(graph: Graph, order: Sequence[int]) -> tuple[float, list[Bucket]]:
    """(the least cost, buckets in the order of elimination)."""
    tables: list[tuple[TableScope, Array]] = list(graph.tables.items())
    tables += [((variable,), graph.unary[variable]) for variable in order]
    least = graph.constant
    buckets: list[Bucket] = []
    for variable in order:
        joined = [(scope, table) for scope, table in tables if variable in scope]
        tables = [(scope, table) for scope, table in tables if variable not in scope]
        neighbours: set[int] = set()
        for scope, _ in joined:
            neighbours.update(scope)
        neighbours.discard(variable)
        rest = tuple(sorted(neighbours))
        total: Array = np.zeros([1] * (1 + len(rest)))
        for scope, table in joined:
            total = total + _spread(table, scope, (variable, *rest))
        low = total.min(axis=0)
        buckets.append(Bucket(variable, rest, total - low))
        if rest:
            tables.append((rest, low))
        else:
            least += float(low)
    return least, buckets


def _spread(table: Array, scope: TableScope, variables: TableScope) -> Array:
    """A table with an axis for each of `variables`, of size 1 for those that are not in its scope."""
    axes = [variables.index(variable) for variable in scope]
    absent = [axis for axis in range(len(variables)) if axis not in axes]
    return np.expand_dims(table.transpose(np.argsort(axes)), absent)


def _in_order(graph: Graph, order: Sequence[int], branch: set[int], steps: int) -> Iterator[list[int]]:
    """Choices, cheapest first; variables outside `branch` take what is cheapest given those before them."""
    least, buckets = buckets_of(graph, order)
    buckets.reverse()  # decided in this order
    place = {bucket.variable: position for position, bucket in enumerate(buckets)}
    scopes = []
    for bucket in buckets:
        scopes.append([place[variable] for variable in bucket.scope])
    branches = [bucket.variable in branch for bucket in buckets]
    places = [place[variable] for variable in range(graph.size)]
    # cost if all else is the best, when it was put there, options that are decided
    heap = [(least, 0, tuple[int, ...]())]
    for step in range(1, steps + 1):
        if not heap:
            return
        cost_s, _, begun = heappop(heap)
        decided = list(begun)
        for position in range(len(begun), len(buckets)):
            row, best = buckets[position].row(tuple([decided[at] for at in scopes[position]]))
            if branches[position]:
                for option, regret in enumerate(row):
                    if option != best and cost_s + regret < BIG:
                        heappush(heap, (cost_s + regret, step, (*decided, option)))
            decided.append(best)
            cost_s += row[best]
        yield [decided[at] for at in places]
