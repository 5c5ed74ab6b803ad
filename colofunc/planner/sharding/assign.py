"""Assignment: one strategy per operator and one layout per input leaf, cheapest in seconds, within a budget of bytes.

    assign(program, mesh, candidates, NONE, conversion_s, budget_bytes=40 << 30).strategies[k]

Steps: tie what is alike (`classes`), ask for the candidates of each class, build the cost model (`model`), search
(`search`). A budget is met by a price per byte of what is alive at the peak (a Lagrangian, its multiplier found by
bisection); then price is taken back option by option as long as the budget holds. Where that is not enough, parameters
are gathered anew in every phase (`Assignment.regather`) instead of being kept gathered in between.

With many axes the joint enumeration explodes; `by_axes` decides a few at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from heapq import merge

import attrs

from colofunc.errors import PlanError
from colofunc.mesh import Mesh
from colofunc.planner.plan_table import size_text
from colofunc.planner.sharding.axis_starts import axis_by_axis
from colofunc.planner.sharding.budget import Fit, at_price, fit_within
from colofunc.planner.sharding.classes import Ties, item_of, tie
from colofunc.planner.sharding.constraints import NONE, Constraints, allowed, leaf_strategy
from colofunc.planner.sharding.eliminate import BIG
from colofunc.planner.sharding.enumeration import more_choices
from colofunc.planner.sharding.flows import Conversions, ConvertS, copies_of, settled_layout
from colofunc.planner.sharding.memory import Liveness, liveness
from colofunc.planner.sharding.model import KernelS, PairwiseModel, build_model
from colofunc.planner.sharding.option_filter import lean, reachable
from colofunc.planner.sharding.search import NORMAL, Effort, lighter, search_ends, search_neighbours
from colofunc.program.ir import Node, Program, Value
from colofunc.spec.layout import Layout, axes_of
from colofunc.spec.rule import Strategy

BATCHES = 5
"""At most this many ways to lay out the batch, the most split first, are begun from."""
RESTARTS = 2
"""How often a search from an assignment of a like program leaves it and descends anew."""

CandidatesOf = Callable[[Node | Value], Sequence[Strategy] | Sequence[Layout]]


@attrs.frozen(eq=False)
class Assignment:
    """What was decided. `strategies` is parallel to the program's nodes, `outputs` to its outputs.

    `regather`: parameters whose conversions may not be kept from one phase to the next.
    `model`, `ties`, `choice`: the problem and its solution, to ask why.
    """

    strategies: tuple[Strategy, ...]
    inputs: Mapping[int, Layout]
    outputs: tuple[Layout, ...]
    cost_s: float
    peak_bytes: int
    regather: frozenset[int]
    model: PairwiseModel
    ties: Ties
    choice: tuple[int, ...]


class OverBudget(PlanError):
    """No assignment found is estimated to fit.

    `leanest`: of those that were found, for someone to count who counts better.
    """

    def __init__(self, budget_bytes: int, least_bytes: int, roles: Mapping[str, int], leanest: Assignment) -> None:
        top = ", ".join(f"{role} {size_text(nbytes)}" for role, nbytes in list(roles.items())[:3])
        super().__init__(
            f"a budget of {size_text(budget_bytes)} per rank cannot be met by sharding: the least peak is estimated as "
            f"{size_text(least_bytes)} ({top} at that moment); raise the budget, use more ranks, or add checkpoint or "
            "offload"
        )
        self.leanest = leanest


@attrs.define(eq=False)
class Memo:
    """What does not depend on the budget: the fastest assignment, the `second` where axes decided one by one led to
    another one than all else, models with their liveness by what is regathered.

    `like`: an assignment of the same program, in which other constraints held, that all searches begin from and from
    nothing else; `restarts`: how often they leave it and descend anew. `around_fastest`: the same of the problem in
    which all but the largest axes lie as in `fastest`, where axes are decided by turns.
    """

    fastest: Assignment | None = None
    second: Assignment | None = None
    like: Assignment | None = None
    restarts: int = RESTARTS
    models: dict[frozenset[int], tuple[PairwiseModel, Liveness]] = attrs.field(factory=dict)
    fits: dict[frozenset[int], list[list[int]]] = attrs.field(
        factory=dict
    )  # `second`, and choices that met some budget
    # (`fits` before, a search that met none)
    misses: dict[frozenset[int], tuple[list[list[int]], Fit]] = attrs.field(factory=dict)
    around_fastest: Memo | None = None

    def missed(self, regather: frozenset[int], budget_bytes: int) -> Fit | None:
        """What a search for so many bytes ends with, where one like it met no budget: it goes the same way for every
        smaller one.
        """
        before, fit = self.misses.get(regather, ([], None))
        again = fit is not None and budget_bytes < fit.least_bytes and before == self.fits.get(regather, [])
        return fit if again else None


def assign(
    program: Program,
    mesh: Mesh,
    candidates: CandidatesOf,
    constraints: Constraints = NONE,
    convert_s: ConvertS | None = None,
    budget_bytes: int | None = None,
    tied: bool | None = None,
    starts: Sequence[Assignment] = (),
    effort: Effort = NORMAL,
    slack: float = 0.0,
    memo: Memo | None = None,
    fresh: bool = True,
    few: bool = False,
    near: Callable[[Node | Value, Strategy], bool] | None = None,
    price_s: float = 0.0,
    kernel_s: KernelS | None = None,
    axes: Sequence[str] = (),
) -> Assignment:
    """The cheapest assignment found whose peak is within `budget_bytes`; with `price_s`, the one that is cheapest where
    every byte at its peak costs so many seconds.

    `candidates(node or input value)` -> strategies (of an input: layouts), the replicated one first. It is asked once
    per class. `slack`: where nothing fits, the leanest found may exceed the budget by this share, for someone to count
    who counts better. `memo`: what earlier calls that differed in the budget only have found. Raises PlanError where a
    constraint leaves no strategy, OverBudget where the least peak found is above the budget. `fresh`: False searches
    from `starts` only. `few`: only among options that fit what is held, see `lean`. `near`: of what constraints offer,
    what is looked at first. `axes`: those that are open, in the order in which one start decides them one by one.
    """
    convert = convert_s or free
    memo = memo or Memo()
    restarts = 0 if memo.like is None else memo.restarts
    if memo.fastest is None:
        memo.fastest, memo.second = _fastest(
            program, mesh, candidates, constraints, convert, tied, starts, effort, fresh, few, near, kernel_s, restarts,
            None if memo.like is None else memo.like.model.conversions, axes,
        )  # fmt: skip
    found = memo.fastest
    if not price_s and (budget_bytes is None or found.peak_bytes <= budget_bytes):
        return found
    least: list[tuple[int, Mapping[str, int], Assignment]] = []
    dear: list[Assignment] = []
    always = frozenset(program.inputs[k] for k, said in constraints.regather.items() if said is True)
    never = frozenset(program.inputs[k] for k, said in constraints.regather.items() if said is False)
    second = [] if memo.second is None else [list(memo.second.choice)]
    for ids in dict.fromkeys((always, (_parameters(program) | always) - never)):
        regather = copies_of(program, ids)
        if regather not in memo.models:
            again = build_model(
                program, mesh, found.ties, found.model.options, convert, dict(constraints.outputs), regather, found.model.conversions,
                constraints.sums, kernel_s,
            )  # fmt: skip
            memo.models[regather] = again, liveness(program, again, found.ties)
        again, alive = memo.models[regather]
        make = partial(_assignment, program, again, found.ties, alive, regather)
        before = memo.fits.setdefault(regather, [*second])
        if price_s or budget_bytes is None:
            known = [*before, *(list(one.choice) for one in dear)]
            dear.append(make(at_price(again, alive, found.choice, price_s, effort, known, restarts)))
            continue
        result = memo.missed(regather, budget_bytes) or fit_within(
            again, alive, found.choice, budget_bytes, effort, before
        )
        if result.choice is not None:
            before.append(result.choice)
            return make(result.choice)
        memo.misses[regather] = [*before], result
        least.append((result.least_bytes, result.least_roles, make(result.least_choice)))
    if price_s or budget_bytes is None:
        return min(dear, key=lambda assignment: assignment.cost_s + price_s * assignment.peak_bytes)
    nbytes, roles, leanest = min(least, key=lambda item: item[0])
    if nbytes <= budget_bytes * (1 + slack):
        return leanest
    raise OverBudget(budget_bytes, nbytes, roles, leanest)


def _fastest(
    program: Program,
    mesh: Mesh,
    candidates: CandidatesOf,
    constraints: Constraints,
    convert: ConvertS,
    tied: bool | None,
    starts: Sequence[Assignment],
    effort: Effort,
    fresh: bool,
    few: bool,
    near: Callable[[Node | Value, Strategy], bool] | None,
    kernel_s: KernelS | None,
    restarts: int,
    conversions: Conversions | None,
    axes: Sequence[str],
) -> tuple[Assignment, Assignment | None]:
    """The cheapest assignment found, whatever its peak, and the second, as `Memo` has them. `conversions`: those that are
    known already.
    """
    ties = tie(program, constraints.key, enabled=tied)
    options = [_options(program, members[0], candidates, constraints, near) for members in ties.members]
    options = reachable(program, ties, options)
    if few:
        options = lean(program, ties, options)
    regathered = [program.inputs[position] for position, said in constraints.regather.items() if said]
    always = copies_of(program, regathered)
    model = build_model(
        program,
        mesh,
        ties,
        options,
        convert,
        dict(constraints.outputs),
        always,
        conversions,
        sums=constraints.sums,
        kernel_s=kernel_s,
    )
    ends, apart = [[0] * len(options)], list[list[int]]()
    # Where nothing is open there is nothing to search.
    if any(len(strategies) > 1 for strategies in options):
        begin = [_choice_of(start, ties, options) for start in starts]
        if fresh:
            begin += _starts(program, ties, model)
        if fresh and len(axes) > 1:
            light = attrs.evolve(lighter(effort), tries=1)
            apart.append(axis_by_axis(model, axes, partial(_from_whole, effort=light)))
        ends = search_ends(model, begin, effort, fresh, restarts, apart)
    if model.true_cost(ends[0]) >= BIG:
        raise PlanError(
            "no assignment connects all operators: some conversion that every choice needs does not exist; drop a wish"
        )
    assignment = partial(_assignment, program, model, ties, liveness(program, model, ties), always)
    has_second = bool(apart) and len(ends) > 1 and ends[1] != ends[0] and model.true_cost(ends[1]) < BIG
    return assignment(ends[0]), assignment(ends[1]) if has_second else None


def in_model_of(found: Assignment, known: Assignment, program: Program) -> Assignment | None:
    """`known` as a choice in the model of `found`, which has more options, so that a plan can say what else could have
    been.

    None: it is none of the choices there.
    """
    choice = _choice_of(known, found.ties, found.model.options)
    alive = liveness(program, found.model, found.ties)
    again = _assignment(program, found.model, found.ties, alive, found.regather, choice)
    if again.inputs != known.inputs:
        return None
    for strategy, wanted in zip(again.strategies, known.strategies, strict=True):
        if (strategy.ins, strategy.outs) != (wanted.ins, wanted.outs):
            return None
    return again


def offering(
    found: Assignment,
    known: Assignment,
    program: Program,
    mesh: Mesh,
    constraints: Constraints,
    kernel_s: KernelS | None,
) -> Assignment:
    """`found`, whose model has the strategies of `known` beside its own: such as weights in stripes."""
    options = []
    for members, strategies in zip(found.ties.members, found.model.options, strict=True):
        taken = strategy_of(known, members[0])
        lacks = all((strategy.ins, strategy.outs) != (taken.ins, taken.outs) for strategy in strategies)
        options.append((*strategies, taken) if lacks else strategies)
    model = build_model(
        program, mesh, found.ties, options, free, dict(constraints.outputs), found.regather, found.model.conversions,
        constraints.sums, kernel_s,
    )  # fmt: skip
    return attrs.evolve(found, model=model)


def others(program: Program, memo: Memo, budget_bytes: int, small: bool, price_s: float | None) -> Iterator[Assignment]:
    """Of a step that was assigned before all others that are worth a look (`enumeration.more_choices`), cheapest first."""
    known = memo.fastest
    if known is None:
        return iter(())
    ways: list[Iterator[Assignment]] = []
    for regather, (model, alive) in memo.models.items():
        found = more_choices(program, model, known.ties, known.choice, budget_bytes, small, price_s)
        ways.append(map(partial(_assignment, program, model, known.ties, alive, regather), found))
    return merge(*ways, key=lambda assignment: assignment.cost_s)


def free(src: Layout, dst: Layout, mesh: Mesh, itemsize: int) -> float:
    """Conversions that cost nothing, for programs on one rank."""
    return 0.0


def _options(
    program: Program,
    item: int,
    candidates: CandidatesOf,
    constraints: Constraints,
    near: Callable[[Node | Value, Strategy], bool] | None,
) -> tuple[Strategy, ...]:
    thing = item_of(program, item)
    offered: list[Strategy] = []
    for candidate in candidates(thing):
        offered.append(leaf_strategy(candidate) if isinstance(candidate, Layout) else candidate)
    return allowed(program, item, offered, constraints, None if near is None else partial(near, thing))


def strategy_of(assignment: Assignment, item: int) -> Strategy:
    """What was decided for an item."""
    number = assignment.ties.of_item[item]
    return assignment.model.options[number][assignment.choice[number]]


def _choice_of(assignment: Assignment, ties: Ties, options: Sequence[tuple[Strategy, ...]]) -> list[int]:
    """Another assignment of the same program as option indices here (the first option where it is not offered)."""
    choice = []
    for members, strategies in zip(ties.members, options, strict=True):
        taken = strategy_of(assignment, members[0])
        chosen = 0
        for option, strategy in enumerate(strategies):
            if (strategy.ins, strategy.outs) == (taken.ins, taken.outs):
                chosen = option
                break
        choice.append(chosen)
    return choice


def _from_whole(model: PairwiseModel, effort: Effort) -> list[int]:
    """Searched from nothing, and from where nothing is split."""
    return search_neighbours(model, [[0] * len(model.options)], effort)


def _starts(program: Program, ties: Ties, model: PairwiseModel) -> list[list[int]]:
    """Assignments to begin from: all replicated, and greedy ones for each way to lay out the batch."""
    replicated = [0] * len(model.options)
    batch: set[int] = set()
    for position, id in enumerate(program.inputs):
        if program.values[id].role == "batch":
            batch.add(ties.of_input(position))
    if not batch or len(model.options) <= 2:
        return [replicated]

    # The largest leaf of the batch says how all of it lies.
    largest = max(batch, key=lambda number: (max(map(_numel, model.options[number])), -number))
    options = model.options[largest]
    graph = model.pair_graph(1.0)
    order = range(len(model.options))
    smallest_first = sorted(range(len(options)), key=lambda option: _numel(options[option]))
    starts = [replicated]
    for option in smallest_first[:BATCHES]:
        layout = options[option].outs[0]
        given = {number: _first(model.options[number], layout) for number in sorted(batch)}
        given[largest] = option
        starts.append(graph.greedy(order, given))
    return starts


def _numel(strategy: Strategy) -> int:
    return sum(layout.local_numel for layout in strategy.outs if layout is not None)


def _first(options: Sequence[Strategy], like: Layout | None) -> int:
    """The option that spreads its dims over the same axes as `like` does, as far as it has those dims."""
    assert like is not None
    wanted = [axes_of(dim) for dim in like.dims]
    for position, strategy in enumerate(options):
        layout = strategy.outs[0]
        if layout is not None and [axes_of(dim) for dim in layout.dims] == wanted[: len(layout.dims)]:
            return position
    return 0


def _parameters(program: Program) -> frozenset[int]:
    return frozenset(id for id in program.inputs if program.values[id].role in ("param", "frozen"))


def _assignment(
    program: Program, model: PairwiseModel, ties: Ties, live: Liveness, regather: frozenset[int], choice: Sequence[int]
) -> Assignment:
    picked = [options[option] for options, option in zip(model.options, choice, strict=True)]
    inputs = {id: _whole(picked[ties.of_input(position)]) for position, id in enumerate(program.inputs)}
    strategies = tuple(picked[ties.of_node(position)] for position in range(len(program.nodes)))
    layouts = dict(inputs)
    for node, strategy in zip(program.nodes, strategies, strict=True):
        for out, layout in zip(node.outs, strategy.outs, strict=True):
            if out is not None and layout is not None:
                layouts[out] = layout
    settle: dict[int, Layout | str] = {}
    for flow in model.flows:
        if flow.settle is not None:
            settle.update(dict.fromkeys(flow.values, flow.settle))
    leaf_of = dict(program.aliases)
    outputs: list[Layout] = []
    for position, id in enumerate(program.outputs):
        if position in leaf_of:  # donated: it lies as its leaf does
            outputs.append(inputs[program.inputs[leaf_of[position]]])
        else:
            outputs.append(settled_layout(layouts[id], settle[id]))
    cost_s, peak = model.true_cost(choice), live.peak(choice).nbytes
    return Assignment(strategies, inputs, tuple(outputs), cost_s, peak, regather, model, ties, tuple(map(int, choice)))


def _whole(strategy: Strategy) -> Layout:
    layout = strategy.outs[0]
    assert layout is not None
    return layout
