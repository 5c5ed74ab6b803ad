"""Constraints: what a search may not decide otherwise.

Wishes of the user, named plans and an earlier plan all become the same records: per item (input leaf or node) tests
that a strategy has to pass, and strategies that are offered beside the enumerated ones. An input leaf's strategies have
no operands and one result, so one kind of test serves both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TypeVar

import attrs

from colofunc.errors import PlanError
from colofunc.planner.sharding.classes import item_of
from colofunc.program.ir import Program, Value
from colofunc.program.placing import StagesOf
from colofunc.spec.layout import At, Layout
from colofunc.spec.rule import Strategy

T = TypeVar("T")


@attrs.frozen
class Constraint:
    """`accepts` must hold. `key` is equal for constraints that accept the same; `says` is for people.

    `offers`: strategies to consider beside the enumerated ones (a striped spec that a user gave, say). `axes`: it says
    something of these only. Where axes are decided one after another, `partly(some of them)` is the test of those that
    have been decided; without it the constraint waits for all. `room(some of them)` tests that the others will find
    room when their turn comes. `pattern`: they are one pattern of one operator, and decided together. `instead`: of
    strategies that all other constraints accept, what to write so that this one accepts some; "" where nothing helps.
    """

    key: Hashable
    accepts: Callable[[Strategy], bool] = attrs.field(eq=False)
    says: str = ""
    offers: tuple[Strategy, ...] = attrs.field(default=(), eq=False)
    axes: tuple[str, ...] = ()
    pattern: bool = attrs.field(default=False, eq=False)
    partly: Callable[[tuple[str, ...]], Callable[[Strategy], bool]] | None = attrs.field(default=None, eq=False)
    room: Callable[[tuple[str, ...]], Callable[[Strategy], bool]] | None = attrs.field(default=None, eq=False)
    instead: Callable[[Sequence[Strategy]], str] | None = attrs.field(default=None, eq=False)

    def on(self, axes: Collection[str]) -> Constraint | None:
        """What it says of `axes` alone; None: nothing yet."""
        decided = tuple(axis for axis in self.axes if axis in axes)
        if len(decided) == len(self.axes):
            return self
        tests: list[Callable[[Strategy], bool]] = []
        if decided:
            if self.partly is None:
                return None
            tests.append(self.partly(decided))
        if self.room is not None:
            tests.append(self.room(decided))
        if not tests:
            return None

        def accepts(strategy: Strategy) -> bool:
            return all(test(strategy) for test in tests)

        return Constraint((self.key, "on", decided), accepts, self.says, (), decided)


class NotSo(PlanError):
    """A pass cannot carry out what was decided, but may what is decided under `more`, constraints of the global
    program.
    """

    def __init__(self, text: str, more: Callable[[Program], Constraints]) -> None:
        super().__init__(text)
        self.more = more


@attrs.frozen
class Constraints:
    """`items`: item number (see `Ties`) -> constraints. `outputs`: output position -> fixed layout.

    `regather`: input position -> whether it is gathered anew in every phase, where somebody said so. `sums`: value id
    -> bytes of an element while it is summed over the mesh, where those are not the value's own. `terms`: input
    positions that are pending sums and are returned so. `chunks`: input position -> elements of the chunks that it lies
    in, or "auto". `scatter`: input position -> whether its gradient is reduced in each microbatch, where somebody said
    so. `at`: input position -> where it exists, if not everywhere: the search knows nothing of it (`program.placing`).
    `stages`: which stages of a pipeline that means, where there is one.
    """

    items: Mapping[int, tuple[Constraint, ...]] = attrs.field(factory=dict)
    outputs: Mapping[int, Layout] = attrs.field(factory=dict)
    regather: Mapping[int, bool] = attrs.field(factory=dict)
    sums: Mapping[int, int] = attrs.field(factory=dict)
    chunks: Mapping[int, int | str] = attrs.field(factory=dict)
    scatter: Mapping[int, bool] = attrs.field(factory=dict)
    at: Mapping[int, At] = attrs.field(factory=dict)
    terms: frozenset[int] = frozenset()
    stages: StagesOf | None = None

    def key(self, item: int) -> Hashable:
        """Items with different keys are never tied."""
        keys = [constraint.key for constraint in self.items.get(item, ())]
        return (*keys, self.regather.get(item), self.at.get(item))

    def on(self, axes: Collection[str]) -> Constraints:
        """What they say of these axes."""
        items = {}
        for item, constraints in self.items.items():
            on_axes = [constraint.on(axes) for constraint in constraints]
            items[item] = tuple(constraint for constraint in on_axes if constraint is not None)
        return attrs.evolve(self, items=items)

    def offering_nothing_on(self, axes: Collection[str]) -> Constraints:
        """The same, but for offers that split something over one of these axes: values are placed at indices of them.
        """
        items = {}
        for item, constraints in self.items.items():
            with_fewer_offers = []
            for constraint in constraints:
                offers = tuple(offer for offer in constraint.offers if _axes_of(offer).isdisjoint(axes))
                if len(offers) < len(constraint.offers):
                    constraint = attrs.evolve(constraint, offers=offers)
                with_fewer_offers.append(constraint)
            items[item] = tuple(with_fewer_offers)
        return attrs.evolve(self, items=items)

    def __or__(self, other: Constraints) -> Constraints:
        """Both: every test of either. Raises PlanError where they place an input, or cut the step in stages, otherwise."""
        if self.stages is not None and other.stages is not None and self.stages != other.stages:
            raise PlanError(
                f"a step has one pipeline, and two are asked for: over {self.stages.axis!r} and over "
                f"{other.stages.axis!r}. Try: one transform that says the stages"
            )
        for position in self.at.keys() & other.at.keys():
            if self.at[position] != other.at[position]:
                (axis, here), (other_axis, there) = self.at[position], other.at[position]
                raise PlanError(
                    f"input {position} of a step is to exist at {axis} = {here} and at {other_axis} = {there}. Try: one "
                    "transform that says where it is"
                )
        items = dict(self.items)
        for item, more in other.items.items():
            items[item] = (*items.get(item, ()), *more)
        return Constraints(
            items,
            outputs={**self.outputs, **other.outputs},
            regather={**self.regather, **other.regather},
            sums={**self.sums, **other.sums},
            chunks={**self.chunks, **other.chunks},
            scatter={**self.scatter, **other.scatter},
            at={**self.at, **other.at},
            terms=self.terms | other.terms,
            stages=other.stages if self.stages is None else self.stages,
        )


NONE = Constraints()
"""Nothing is said."""


def leaf_strategy(layout: Layout) -> Strategy:
    """An input leaf in a layout, in the form that nodes' strategies have."""
    return Strategy(layout.text(), (), (layout,))


def _axes_of(strategy: Strategy) -> set[str]:
    """Mesh axes that a strategy's operands and results lie on."""
    axes: set[str] = set()
    for layout in (*strategy.ins, *strategy.outs):
        if layout is not None:
            axes.update(layout.axes)
            axes.update(axis for axis, _ in layout.pending)
    return axes


def agrees(strategy: Strategy, fixed: Strategy | None, free: AbstractSet[str]) -> bool:
    """Whether a strategy places every axis outside `free` as `fixed` does; None: nowhere."""
    layouts = (*strategy.ins, *strategy.outs)
    if fixed is None:
        return all(layout is None or set(layout.axes) <= free for layout in layouts)
    for layout, fixed_layout in zip(layouts, (*fixed.ins, *fixed.outs), strict=True):
        if layout is fixed_layout:  # equal layouts are one object
            continue
        if layout is None or fixed_layout is None or _without(layout, free) != _without(fixed_layout, free):
            return False
    return True


def _without(layout: Layout, free: Collection[str]) -> Hashable:
    """Where a layout places the axes outside `free`: in each dim, and those that are pending."""
    dims = []
    for dim in layout.dims:
        dims.append(tuple(axis for _, axis in dim if axis is not None and axis not in free))
    pending = tuple((axis, how) for axis, how in layout.pending if axis not in free)
    return tuple(dims), pending


def allowed(
    program: Program,
    item: int,
    options: Iterable[Strategy],
    constraints: Constraints,
    near: Callable[[Strategy], bool] | None = None,
) -> tuple[Strategy, ...]:
    """The options that pass all constraints on the item; raises PlanError naming the one that leaves none.

    `near`: of what constraints offer, what to look at first; the rest counts only where nothing else passes.
    """
    on_item, enumerated = constraints.items.get(item, ()), list(options)
    if near is not None and any(constraint.offers for constraint in on_item):
        left = _offered(enumerated, on_item, near)
        for constraint in on_item:
            left = [strategy for strategy in left if constraint.accepts(strategy)]
        if left:
            return tuple(left)
    left = _offered(enumerated, on_item)
    for position, constraint in enumerate(on_item):
        kept = [strategy for strategy in left if constraint.accepts(strategy)]
        if not kept and position:
            others = "; ".join(other.says for other in on_item[:position])
            advice = _instead(_offered(enumerated, on_item), on_item[: position + 1])
            raise PlanError(
                f"{constraint.says} clashes with {others}, on {_describe(program, item)}; {advice}drop one of them"
            )
        if not kept:
            raise PlanError(
                f"{constraint.says} cannot be done: {_describe(program, item)} has "
                f"{len(left)} strategies ({_names(left)}) and none is of that kind; "
                "choose one of these, or place the axis on a factor that its size divides"
            )
        left = kept
    if not left:
        raise PlanError(f"{_describe(program, item)} has no strategy; give it a rule or a replicated strategy")
    return tuple(left)


def _instead(options: Sequence[Strategy], constraints: Sequence[Constraint]) -> str:
    """What else than dropping one of some constraints that clash would do; "" where nothing is known."""
    for constraint in constraints:
        if constraint.instead is None:
            continue
        left = list(options)
        for other in constraints:
            if other is not constraint:
                left = [strategy for strategy in left if other.accepts(strategy)]
        advice = constraint.instead(left)
        if advice:
            return f"{advice}, or "
    return ""


def _offered(
    options: Iterable[Strategy], constraints: Iterable[Constraint], near: Callable[[Strategy], bool] | None = None
) -> list[Strategy]:
    """The options, and what constraints offer beside them (with `near`, what passes that): it has to pass all the
    others as well.
    """
    strategies = list(options)
    seen = {(strategy.ins, strategy.outs) for strategy in strategies}
    for constraint in constraints:
        for offer in constraint.offers:
            if (offer.ins, offer.outs) not in seen and (near is None or near(offer)):
                strategies.append(offer)
        seen.update((offer.ins, offer.outs) for offer in constraint.offers)
    return strategies


def _names(options: Iterable[Strategy], most: int = 8) -> str:
    """The names of some strategies, for errors."""
    names = [strategy.name for strategy in options]
    more = f", ... {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _describe(program: Program, item: int) -> str:
    """An input or a node in words, for errors."""
    thing = item_of(program, item)
    if isinstance(thing, Value):
        return f"input {thing.name!r} of shape {thing.shape}"
    where = f" in {thing.path!r}" if thing.path else ""
    shapes = ", ".join(str(program.values[ref].shape) for ref in thing.refs)
    line = f" ({thing.line})" if thing.line else ""
    return f"{thing.target}{where} on {shapes}{line}"


def retried(plan: Callable[[Constraints], T], constraints: Constraints, program: Program) -> T:
    """`plan(constraints)`, once more under further constraints where a pass asks for them."""
    try:
        return plan(constraints)
    except NotSo as refused:
        try:
            return plan(constraints | refused.more(program))
        except PlanError:
            raise PlanError(str(refused)) from None
