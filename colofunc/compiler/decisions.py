"""From a global program and what is wished of it to decisions: candidates for the planner, and what came of them.

The planner knows neither rules nor plugins; here they meet. Candidates of an operator are the strategies of its rule
and those of plugins; of an input leaf, every major-only layout. DTensor arguments and user plans are constraints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any

import attrs

from colofunc.mesh import Mesh
from colofunc.planner.plan import Plan, PlanOfAxis
from colofunc.planner.sharding.assign import Assignment, Memo, in_model_of, offering
from colofunc.planner.sharding.by_axes import assign_by_axes
from colofunc.planner.sharding.constraints import Constraints, agrees, leaf_strategy
from colofunc.planner.sharding.explain import make_plan
from colofunc.planner.sharding.kernel_seconds import KernelSeconds
from colofunc.planner.wishes.propagation import Rules
from colofunc.plugins import Registry
from colofunc.program.ir import Node, Program, Value
from colofunc.program.lower import Choice, call_in
from colofunc.spec.conversions.pattern import pattern_s
from colofunc.spec.layout import Layout, is_major, make_layout, replicated
from colofunc.spec.rule import Call, Rule, Strategy
from colofunc.spec.strategies import (
    Only,
    as_fixed,
    enumerate_layouts,
    enumerate_strategies,
    follow,
    replicated_strategy,
)

SLACK = 0.1
"""The planner's estimate of the peak may exceed the budget by this share of it: the accountant counts anew, and may
count less."""


@attrs.frozen(eq=False)
class Decisions:
    """Parallel to the program: a choice per node, layouts of inputs (by id) and outputs (by position)."""

    choices: tuple[Choice, ...]
    input_layouts: Mapping[int, Layout]
    output_layouts: tuple[Layout, ...]
    plan: Plan
    regather: frozenset[int] = frozenset()  # parameters that are gathered anew in every phase


@attrs.define(eq=False)
class Candidates:
    """The strategies of each item; memoised by call, because identical layers ask the same."""

    program: Program
    mesh: Mesh
    registry: Registry
    # Id of a node -> strategies for its operands as they lie.
    followed: dict[int, tuple[Strategy, ...]] = attrs.field(factory=dict)
    # Id of a node -> (axis, strategy), see `rows_along`.
    _with_rows: dict[int, tuple[tuple[str, Strategy], ...]] | None = None
    _seen: dict[Any, tuple[Strategy, ...]] = attrs.field(factory=dict)
    _following: dict[tuple[Call, int, Layout], Strategy | None] = attrs.field(factory=dict)
    _wishes: Constraints | None = None  # that were followed last
    _reductions: frozenset[str] | None = None
    rules: Rules = attrs.field(init=False)
    memo: Memo = attrs.field(factory=Memo)  # of the planner, for a second try with another budget

    @rules.default
    def _rules_of_program(self) -> Rules:
        return Rules(self.program, self.mesh, self.registry)

    def under_other_wishes(self, memo: Memo) -> Candidates:
        """The same for searches under other constraints, which `memo` is of; what was enumerated is known to both."""
        again = copy(self)
        again.memo, again.followed, again._wishes = memo, {}, None
        return again

    def rule(self, call: Call) -> Rule | None:
        """The rule of a call, checked; memoised by call."""
        return self.rules.rule_of_call(call)

    def rule_of(self, node: Node) -> Rule | None:
        return self.rules.rule(node)

    def extra_of(self, node: Node) -> tuple[Strategy, ...]:
        """Strategies of a node with local code of their own, from the registry; memoised by call."""
        return self.rules.extra(node)

    def along(self, item: Node | Value, axes: tuple[str, ...], fixed: Strategy | None) -> Sequence[Strategy]:
        """Candidates that place only `axes`, the others as in `fixed`."""
        axes = tuple(axis for axis in self.mesh.axis_names if axis in axes)
        kind: Any
        if isinstance(item, Value):
            kind = item.shape, item.id in self.program.constants
        else:
            kind, _ = call_in(self.program, item)
        key = (kind, axes, None if fixed is None else (fixed.ins, fixed.outs))
        strategies = self._seen.get(key)
        if strategies is None:
            strategies = self._seen[key] = tuple(self._all(item, axes, fixed))
        return (*strategies, *self.followed.get(id(item), ()), *self._as_rows_lie(item, axes, fixed))

    def _as_rows_lie(self, item: Node | Value, axes: tuple[str, ...], fixed: Strategy | None) -> Iterator[Strategy]:
        if self._with_rows is None:
            self._with_rows = rows_along(self)
        for axis, strategy in self._with_rows.get(id(item), ()):
            if axis in axes and (fixed is None or agrees(strategy, fixed, set(axes))):
                yield strategy

    def follow_wishes(self, constraints: Constraints) -> None:
        """Offer operators downstream of a striped or composite input the strategies that take it as it lies.

        Enumeration offers only layouts in which axes are major; a wish may be for another one, and without this the
        first operator would convert it away.
        """
        if constraints is self._wishes:  # a search at each price of memory asks for the same
            return
        self._wishes = constraints
        layouts = self._wished_layouts(constraints)
        if layouts:
            self._as_parameters_lie(layouts)
            for node in self.program.nodes:
                self._follow(node, layouts)

    def _wished_layouts(self, constraints: Constraints) -> dict[int, tuple[Layout, ...]]:
        """Input -> the layouts that enumeration does not offer and that wishes for it do, and all of them accept."""
        layouts: dict[int, tuple[Layout, ...]] = {}
        for item, on_item in constraints.items.items():
            if item >= len(self.program.inputs):
                continue
            wished: dict[Layout, None] = {}
            for constraint in on_item:
                for offer in constraint.offers:
                    layout = offer.outs[0]
                    if layout is not None and not is_major(layout) and all(each.accepts(offer) for each in on_item):
                        wished[layout] = None
            if wished:
                layouts[self.program.inputs[item]] = tuple(wished)
        return layouts

    def _as_parameters_lie(self, layouts: dict[int, tuple[Layout, ...]]) -> None:
        """Adds to `layouts` those of gradients, which come to lie as parameters of their shape do."""
        of_shape: dict[tuple[int, ...], tuple[Layout, ...]] = {}
        for id_, of_value in layouts.items():
            shape = self.program.values[id_].shape
            of_shape[shape] = tuple(dict.fromkeys((*of_shape.get(shape, ()), *of_value)))
        for id_, value in self.program.values.items():
            if value.role == "grad" and value.shape in of_shape:
                layouts.setdefault(id_, of_shape[value.shape])

    def _follow(self, node: Node, layouts: dict[int, tuple[Layout, ...]]) -> None:
        """Offers a node the strategies that take its operands as they lie.

        The layouts of their results are added to `layouts`.
        """
        call, ids = call_in(self.program, node)
        if self.rule(call) is None or not any(id_ in layouts for id_ in ids):
            return
        strategies: dict[Strategy, None] = {}
        for operand, id_ in enumerate(ids):
            for layout in layouts.get(id_, ()):
                strategy = self.following(call, operand, layout)
                if strategy is not None:
                    strategies[strategy] = None
        self.followed[id(node)] = tuple(strategies)
        for position, out in enumerate(node.outs):
            results = dict.fromkeys(strategy.outs[position] for strategy in strategies)
            not_major = tuple(layout for layout in results if layout is not None and not is_major(layout))
            if out is not None and not_major:
                layouts.setdefault(out, not_major)

    def following(self, call: Call, operand: int, layout: Layout) -> Strategy | None:
        """The strategy of a call's rule that takes an operand as it lies, or None; memoised."""
        key = call, operand, layout
        if key not in self._following:
            rule = self.rule(call)
            self._following[key] = None if rule is None else follow(call, rule, operand, layout)
        return self._following[key]

    def _all(self, item: Node | Value, axes: tuple[str, ...], fixed: Strategy | None) -> Sequence[Strategy]:
        """Candidates that agree with what is fixed, and that itself.

        What was offered by a wish is enumerated nowhere.
        """
        strategies = self._over(item, axes, fixed)
        if fixed is None:
            return strategies
        agreeing = [strategy for strategy in strategies if agrees(strategy, fixed, set(axes))]
        if not any((strategy.ins, strategy.outs) == (fixed.ins, fixed.outs) for strategy in agreeing):
            agreeing.append(fixed)
        return agreeing

    def _over(self, item: Node | Value, free: tuple[str, ...], fixed: Strategy | None) -> list[Strategy]:
        """Candidates over the axes that are free, and all that are not where something is fixed."""
        if isinstance(item, Value) and item.id in self.program.constants:
            return [leaf_strategy(replicated(item.shape))]  # every rank carries the program's own tensors whole
        if isinstance(item, Value):
            fixed_layout = None if fixed is None else fixed.outs[0]
            return [leaf_strategy(layout) for layout in enumerate_layouts(item.shape, self.mesh, free, fixed_layout)]
        call, _ = call_in(self.program, item)
        rule, axes = self.rule(call), free
        only: Only = ()
        if fixed is not None:
            axes = tuple(axis for axis in self.mesh.axis_names if self.mesh.axis_size(axis) > 1)
            if rule is not None:
                only = as_fixed(call, rule, self.mesh, (axis for axis in axes if axis not in free), fixed)
        strategies = list(enumerate_strategies(call, rule, self.mesh, axes, _orders_matter(item, call), only))
        strategies += [strategy for strategy in self.extra_of(item) if _uses_only(strategy, axes)]
        useful = []
        for strategy in strategies:
            read = _reductions_read(strategy)
            if not read or read <= self.reductions:
                useful.append(strategy)
        return useful or [replicated_strategy(call)]

    @property
    def reductions(self) -> frozenset[str]:
        """Kinds of pending reductions that some operator makes; to pass on a kind that nobody makes is no use."""
        if self._reductions is None:
            kinds = {"sum"}
            for node in self.program.nodes:
                rule = self.rule_of(node)
                if rule is not None:
                    kinds.update(rule.reduce.values())
                for strategy in self.extra_of(node):
                    for layout in strategy.outs:
                        if layout is not None:
                            kinds.update(how for _, how in layout.pending)
            self._reductions = frozenset(kinds)
        return self._reductions


def rows_along(candidates: Candidates) -> dict[int, tuple[tuple[str, Strategy], ...]]:
    """Where a step's rows lie on one axis, the strategies that take them as they lie where that is in the middle of a
    dim.

    Problem: attention that has its tokens first makes one dim of tokens and rows, `s (dp b) -> (s dp b)`. Enumeration
    offers layouts in which axes are major, so that a split batch would be gathered there, and data parallelism seem
    dear. Idea: follow the rows from the batch through the whole step.
    """
    program, mesh = candidates.program, candidates.mesh
    strategies_of: dict[int, tuple[tuple[str, Strategy], ...]] = {}
    for axis in mesh.axis_names:
        lies = _batch_on(axis, program, mesh)
        for node in program.nodes:
            strategy = _as_operands_lie(candidates, node, lies)
            if strategy is None:
                continue
            for out, layout in zip(node.outs, strategy.outs, strict=True):
                if out is not None and layout is not None and layout.axes and not layout.pending:
                    lies[out] = layout
            if any(layout is not None and not is_major(layout) for layout in (*strategy.ins, *strategy.outs)):
                strategies_of[id(node)] = (*strategies_of.get(id(node), ()), (axis, strategy))
    return strategies_of


def _batch_on(axis: str, program: Program, mesh: Mesh) -> dict[int, Layout]:
    """Input -> its layout with rows on one axis, for those of the batch whose rows it divides."""
    size = mesh.axis_size(axis)
    layouts: dict[int, Layout] = {}
    if size == 1:
        return layouts
    for id_ in program.inputs:
        value = program.values[id_]
        if value.role == "batch" and value.shape and value.shape[0] % size == 0:
            rows = ((size, axis), (value.shape[0] // size, None))
            others = [((length, None),) for length in value.shape[1:]]
            layouts[id_] = make_layout((rows, *others), value.shape)
    return layouts


def _as_operands_lie(candidates: Candidates, node: Node, lies: Mapping[int, Layout]) -> Strategy | None:
    """The strategy that takes the first operand that it can as it lies; None where there is none."""
    if not any(ref in lies for ref in node.refs):
        return None
    call, ids = call_in(candidates.program, node)
    for operand, id_ in enumerate(ids):
        if id_ in lies:
            strategy = candidates.following(call, operand, lies[id_])
            if strategy is not None:
                return strategy
    return None


def _reductions_read(strategy: Strategy) -> set[str]:
    """Kinds of pending reductions that a strategy takes."""
    return {how for layout in strategy.ins for _, how in layout.pending}


def _orders_matter(node: Node, call: Call) -> bool:
    """Whether `(dp tp b)` and `(tp dp b)` are two choices: for what lies like the state, which is gathered over one of
    them.

    What flows through the layers (tensors of three and more dims) takes the mesh's order everywhere, so no choice is
    lost.
    """
    dims = [len(type_.shape) for type_ in (*call.ins, *call.outs) if type_ is not None]
    return node.phase == "update" or max(dims, default=0) < 3


def _uses_only(strategy: Strategy, axes: tuple[str, ...]) -> bool:
    """Whether a strategy splits over these axes only."""
    used: set[str] = set()
    for layout in (*strategy.ins, *strategy.outs):
        if layout is not None:
            used.update(layout.axes)
    return used <= set(axes)


def assigned(
    program: Program,
    mesh: Mesh,
    candidates: Candidates,
    constraints: Constraints,
    axes: tuple[str, ...],
    budget_bytes: int | None,
    price_s: float = 0.0,
) -> Assignment:
    """Who computes what: over all open axes at once where at most two are open, axis by axis beyond."""
    candidates.follow_wishes(constraints)
    kernel_s = _kernel_seconds(program, mesh, candidates)
    staged_axis = next((axis for axis, _ in constraints.at.values()), None)
    convert_s = pattern_s if staged_axis is None else partial(pattern_s, apart=staged_axis)
    return assign_by_axes(
        program, mesh, candidates.along, constraints, convert_s, budget_bytes, axes=axes, slack=SLACK, memo=candidates.memo,
        price_s=price_s, kernel_s=kernel_s,
    )  # fmt: skip


def among_options(
    program: Program,
    mesh: Mesh,
    candidates: Candidates,
    constraints: Constraints,
    found: Assignment,
    known: Assignment,
) -> Assignment:
    """`known` as a choice in the model of `found`, so that a plan can say what else could have been.

    Options that it lacks are added. As it is where it tells apart what is decided as one there.
    """
    among = in_model_of(found, known, program)
    if among is None:
        kernel_s = _kernel_seconds(program, mesh, candidates)
        among = in_model_of(offering(found, known, program, mesh, constraints, kernel_s), known, program)
    return among or known


def _kernel_seconds(program: Program, mesh: Mesh, candidates: Candidates) -> KernelSeconds:
    return KernelSeconds(program, mesh, candidates.registry.kernels, candidates.rule_of)


def decide(
    program: Program,
    mesh: Mesh,
    candidates: Candidates,
    constraints: Constraints,
    named: Mapping[str, PlanOfAxis],
    axes: tuple[str, ...],
    budget_bytes: int | None,
    found: Assignment | None = None,
) -> Decisions:
    """Plan the program. found: an assignment to take instead of looking for one."""
    assignment = found
    if assignment is None:
        assignment = assigned(program, mesh, candidates, constraints, axes, budget_bytes)
    choices = []
    for node, strategy in zip(program.nodes, assignment.strategies, strict=True):
        choices.append(Choice(strategy, candidates.rule_of(node)))
    plan = make_plan(program, mesh, assignment, candidates.rule_of, named, constraints, budget_bytes)
    return Decisions(tuple(choices), assignment.inputs, assignment.outputs, plan, assignment.regather)
