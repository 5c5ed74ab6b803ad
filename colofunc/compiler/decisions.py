"""From a global program and what is wished of it to decisions: candidates for the planner, and what came of them.

The planner knows neither rules nor plugins; here they meet. Candidates of an operator are the strategies of its rule
and those of plugins; of an input leaf, every major-only layout. DTensor arguments and user plans are constraints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from colofunc.mesh import Mesh
from colofunc.planner.plan import Plan
from colofunc.planner.sharding.assign import Assignment, Memo
from colofunc.planner.sharding.by_axes import assign_by_axes
from colofunc.planner.sharding.constraints import Constraints, agrees, leaf_strategy
from colofunc.planner.sharding.explain import make_plan
from colofunc.planner.sharding.kernel_seconds import KernelSeconds
from colofunc.plugins import Registry
from colofunc.program.ir import Node, Program, Value
from colofunc.program.lower import Choice, call_of
from colofunc.spec.conversions.pattern import pattern_s
from colofunc.spec.layout import Layout, is_major, make_layout, replicated
from colofunc.spec.rule import Call, Rule, Strategy
from colofunc.spec.strategies import Only, as_fixed, enumerate_layouts, enumerate_strategies, follow, replicated_strategy

SLACK = 0.1
"""By how much the planner's estimate of the peak may exceed the budget: the accountant counts anew, and may count less."""


@attrs.frozen(eq=False)
class Decided:
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
    followed: dict[int, tuple[Strategy, ...]] = attrs.field(factory=dict)  # id of a node -> strategies for its operands as they lie
    _with_rows: dict[int, tuple[tuple[str, Strategy], ...]] | None = None  # id of a node -> (axis, strategy), see `rows_along`
    _rules: dict[Call, Rule | None] = attrs.field(factory=dict)
    _extra: dict[Call, tuple[Strategy, ...]] = attrs.field(factory=dict)
    _seen: dict[Any, tuple[Strategy, ...]] = attrs.field(factory=dict)
    _following: dict[tuple[Call, int, Layout], Strategy | None] = attrs.field(factory=dict)
    _wishes: Constraints | None = None  # that were followed last
    _made: frozenset[str] | None = None
    memo: Memo = attrs.field(factory=Memo)  # of the planner, for a second try with another budget

    def rule(self, call: Call) -> Rule | None:
        if call not in self._rules:
            rule = self.registry.rule(call)
            if rule is not None:
                rule.check(call)
            self._rules[call] = rule
        return self._rules[call]

    def rule_of(self, node: Node) -> Rule | None:
        return self.rule(call_of(node, self.program.values)[0])

    def extra_of(self, node: Node) -> tuple[Strategy, ...]:
        """Strategies of a node with local code of their own, from the registry; memoised by call."""
        call = call_of(node, self.program.values)[0]
        if call not in self._extra:
            self._extra[call] = self.registry.extra_strategies(call, self.mesh)
        return self._extra[call]

    def along(self, item: Node | Value, axes: tuple[str, ...], fixed: Strategy | None) -> Sequence[Strategy]:
        """Candidates that place only `axes`, the others as in `fixed`."""
        axes = tuple(a for a in self.mesh.axis_names if a in axes)
        what: Any = (item.shape, item.id in self.program.constants) if isinstance(item, Value) else call_of(item, self.program.values)[0]
        key = (what, axes, None if fixed is None else (fixed.ins, fixed.outs))
        found = self._seen.get(key)
        if found is None:
            found = self._seen[key] = tuple(self._all(item, axes, fixed))
        return (*found, *self.followed.get(id(item), ()), *self._as_rows_lie(item, axes, fixed))

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
        layouts: dict[int, tuple[Layout, ...]] = {}
        for position, given in constraints.items.items():
            offers = [offer for constraint in given for offer in constraint.offers] if position < len(self.program.inputs) else []
            striped = dict.fromkeys(
                s.outs[0] for s in offers
                if s.outs[0] is not None and not is_major(s.outs[0]) and all(c.accepts(s) for c in given)
            )  # fmt: skip
            if striped:
                layouts[self.program.inputs[position]] = tuple(lay for lay in striped if lay is not None)
        if not layouts:
            return
        of_shape: dict[tuple[int, ...], tuple[Layout, ...]] = {}
        for id_, lies in layouts.items():  # gradients come to lie as their parameters do
            shape = self.program.values[id_].shape
            of_shape[shape] = tuple(dict.fromkeys((*of_shape.get(shape, ()), *lies)))
        for id_, value in self.program.values.items():
            if value.role == "grad" and value.shape in of_shape:
                layouts.setdefault(id_, of_shape[value.shape])
        for node in self.program.nodes:
            call, ids = call_of(node, self.program.values)
            rule = self.rule(call)
            odd = [k for k, i in enumerate(ids) if i in layouts]
            if rule is None or not odd:
                continue
            options: dict[Strategy, None] = {}
            for k in odd:
                for layout in layouts[ids[k]]:
                    strategy = self.following(call, k, layout)
                    if strategy is not None:
                        options[strategy] = None
            self.followed[id(node)] = tuple(options)
            for j, o in enumerate(node.outs):
                made = dict.fromkeys(lay for s in options if (lay := s.outs[j]) is not None and not is_major(lay))
                if o is not None and made:
                    layouts.setdefault(o, tuple(made))

    def following(self, call: Call, operand: int, layout: Layout) -> Strategy | None:
        """The strategy of a call's rule that takes an operand as it lies, or None; memoised, because identical layers ask the same."""
        key = call, operand, layout
        if key not in self._following:
            rule = self.rule(call)
            self._following[key] = None if rule is None else follow(call, rule, operand, layout)
        return self._following[key]

    def _all(self, item: Node | Value, axes: tuple[str, ...], fixed: Strategy | None) -> Sequence[Strategy]:
        mine = self._over(item, axes, fixed)
        if fixed is None:
            return mine
        found = [s for s in mine if agrees(s, fixed, set(axes))]
        there = any((s.ins, s.outs) == (fixed.ins, fixed.outs) for s in found)
        return found if there else [*found, fixed]  # what was offered by a wish is enumerated nowhere

    def _over(self, item: Node | Value, free: tuple[str, ...], fixed: Strategy | None) -> list[Strategy]:
        """Candidates over the axes that are free, and all that are not where something is fixed."""
        if isinstance(item, Value) and item.id in self.program.constants:
            return [leaf_strategy(replicated(item.shape))]  # every rank carries the program's own tensors whole
        if isinstance(item, Value):
            had = None if fixed is None else fixed.outs[0]
            return [leaf_strategy(lay) for lay in enumerate_layouts(item.shape, self.mesh, free, had)]
        call, _ = call_of(item, self.program.values)
        rule, axes = self.rule(call), free
        only: Only = ()
        if fixed is not None:
            axes = tuple(a for a in self.mesh.axis_names if self.mesh.axis_size(a) > 1)
            only = as_fixed(call, rule, self.mesh, (a for a in axes if a not in free), fixed) if rule is not None else ()
        found = list(enumerate_strategies(call, rule, self.mesh, axes, _orders_matter(item, call), only))
        extra = [s for s in self.extra_of(item) if _uses_only(s, axes)]
        made = self.reductions
        return [s for s in (*found, *extra) if _wanted(s) <= made] or [replicated_strategy(call)]

    @property
    def reductions(self) -> frozenset[str]:
        """Kinds of pending reductions that some operator makes; to pass on a kind that nobody makes is no use."""
        if self._made is None:
            rules = (self.rule_of(node) for node in self.program.nodes)
            made = {how for rule in rules if rule is not None for how in rule.reduce.values()}
            for node in self.program.nodes:
                made |= {how for s in self.extra_of(node) for lay in s.outs if lay for _, how in lay.pending}
            self._made = frozenset(made | {"sum"})
        return self._made


def rows_along(candidates: Candidates) -> dict[int, tuple[tuple[str, Strategy], ...]]:
    """Where a step's rows lie on one axis, the strategies that take them as they lie where that is in the middle of a dim.

    Problem: attention that has its tokens first makes one dim of tokens and rows, `s (dp b) -> (s dp b)`. Enumeration offers layouts
    in which axes are major, so that a split batch would be gathered there, and data parallelism seem dear. Idea: follow the
    rows from the batch through the whole step.
    """
    program, mesh, found = candidates.program, candidates.mesh, dict[int, tuple[tuple[str, Strategy], ...]]()
    batch = [i for i in program.inputs if program.values[i].role == "batch" and program.values[i].shape]
    for axis in mesh.axis_names:
        size = mesh.axis_size(axis)
        lies = {i: _rows_on(axis, size, shape) for i in batch if (shape := program.values[i].shape)[0] % size == 0 and size > 1}
        for node in program.nodes:
            if not any(i in lies for i in node.refs):
                continue
            call, ids = call_of(node, program.values)
            strategies = (candidates.following(call, k, lies[i]) for k, i in enumerate(ids) if i in lies)
            strategy = next((each for each in strategies if each is not None), None)
            if strategy is None:
                continue
            for o, layout in zip(node.outs, strategy.outs, strict=True):
                if o is not None and layout is not None and layout.axes and not layout.pending:
                    lies[o] = layout
            if any(layout is not None and not is_major(layout) for layout in (*strategy.ins, *strategy.outs)):
                found[id(node)] = (*found.get(id(node), ()), (axis, strategy))
    return found


def _rows_on(axis: str, size: int, shape: tuple[int, ...]) -> Layout:
    rows = ((size, axis), (shape[0] // size, None))
    return make_layout((rows, *(((n, None),) for n in shape[1:])), shape)


def _wanted(strategy: Strategy) -> set[str]:
    return {how for lay in strategy.ins for _, how in lay.pending}


def _orders_matter(node: Node, call: Call) -> bool:
    """Whether `(dp tp b)` and `(tp dp b)` are two choices: for what lies like the state, which is gathered over one of them.

    What flows through the layers (tensors of three and more dims) takes the mesh's order everywhere, so no choice is lost.
    """
    return node.phase == "update" or max((len(t.shape) for t in (*call.ins, *call.outs) if t is not None), default=0) < 3


def _uses_only(strategy: Strategy, axes: tuple[str, ...]) -> bool:
    return all(a in axes for lay in (*strategy.ins, *strategy.outs) if lay is not None for a in lay.axes)


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
    kernel_s = KernelSeconds(program, mesh, candidates.registry.kernels, candidates.rule_of)
    return assign_by_axes(
        program, mesh, candidates.along, constraints, pattern_s, budget_bytes, axes=axes, slack=SLACK, memo=candidates.memo,
        price_s=price_s, kernel_s=kernel_s,
    )  # fmt: skip


def decide(
    program: Program,
    mesh: Mesh,
    candidates: Candidates,
    constraints: Constraints,
    named: Mapping[str, str],
    axes: tuple[str, ...],
    budget_bytes: int | None,
    found: Assignment | None = None,
) -> Decided:
    """Plan the program. found: an assignment to take instead of looking for one."""
    if found is None:
        found = assigned(program, mesh, candidates, constraints, axes, budget_bytes)
    choices = []
    for node, strategy in zip(program.nodes, found.strategies, strict=True):
        call, _ = call_of(node, program.values)
        choices.append(Choice(strategy, candidates.rule(call)))
    plan = make_plan(program, mesh, found, candidates.rule_of, named, constraints, budget_bytes)
    return Decided(tuple(choices), found.inputs, found.outputs, plan, found.regather)
