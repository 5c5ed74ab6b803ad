"""Constraints: what a search may not decide otherwise.

Wishes of the user, named plans and an earlier plan all become the same records: per item (input leaf or node) tests
that a strategy has to pass, and strategies that are offered beside the enumerated ones. An input leaf's strategies have
no operands and one result, so one kind of test serves both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
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
    something of these only. Where axes are decided one after another, `partly(some of them)` is the test of those that have
    been decided; without it the constraint waits for all. `room(some of them)` tests that the others will find
    room when their turn comes. `pattern`: they are one pattern of one operator, and decided together.
    """

    key: Hashable
    accepts: Callable[[Strategy], bool] = attrs.field(eq=False)
    says: str = ""
    offers: tuple[Strategy, ...] = attrs.field(default=(), eq=False)
    axes: tuple[str, ...] = ()
    pattern: bool = attrs.field(default=False, eq=False)
    partly: Callable[[tuple[str, ...]], Callable[[Strategy], bool]] | None = attrs.field(default=None, eq=False)
    room: Callable[[tuple[str, ...]], Callable[[Strategy], bool]] | None = attrs.field(default=None, eq=False)

    def on(self, axes: Collection[str]) -> Constraint | None:
        """What it says of `axes` alone; None: nothing yet."""
        mine = tuple(a for a in self.axes if a in axes)
        if len(mine) == len(self.axes):
            return self
        tests = [test(mine) for test in (self.partly if mine else None, self.room) if test is not None]
        if not tests or (mine and self.partly is None):
            return None
        return Constraint((self.key, "on", mine), lambda s: all(test(s) for test in tests), self.says, (), mine)


class NotSo(PlanError):
    """A pass cannot carry out what was decided, but may what is decided under `more`, constraints of the global program."""

    def __init__(self, text: str, more: Callable[[Program], Constraints]) -> None:
        super().__init__(text)
        self.more = more


@attrs.frozen
class Constraints:
    """`items`: item number (see `Ties`) -> constraints. `outputs`: output position -> fixed layout.

    `regather`: input position -> whether it is gathered anew in every phase, where somebody said so.
    `sums`: value id -> bytes of an element while it is summed over the mesh, where that is more than the value's own.
    `chunks`: input position -> elements of the chunks that it lies in, or "auto". `scatter`: input position -> whether its
    gradient is reduced in each microbatch, where somebody said so. `at`: input position -> where it exists, if not everywhere: the search
    knows nothing of it (`program.placing`). `stages`: which stages of a pipeline that means, where there is one.
    """

    items: Mapping[int, tuple[Constraint, ...]] = attrs.field(factory=dict)
    outputs: Mapping[int, Layout] = attrs.field(factory=dict)
    regather: Mapping[int, bool] = attrs.field(factory=dict)
    sums: Mapping[int, int] = attrs.field(factory=dict)
    chunks: Mapping[int, int | str] = attrs.field(factory=dict)
    scatter: Mapping[int, bool] = attrs.field(factory=dict)
    at: Mapping[int, At] = attrs.field(factory=dict)
    stages: StagesOf | None = None

    def key(self, item: int) -> Hashable:
        """Items with different keys are never tied."""
        return (*(c.key for c in self.items.get(item, ())), self.regather.get(item), self.at.get(item))

    def on(self, axes: Collection[str]) -> Constraints:
        """What they say of these axes."""
        items = {item: tuple(c for each in some if (c := each.on(axes)) is not None) for item, some in self.items.items()}
        return attrs.evolve(self, items=items)

    def offering_nothing_on(self, axes: Collection[str]) -> Constraints:
        """The same, but for offers that split something over one of these axes: values are placed at indices of them."""
        items = {}
        for item, some in self.items.items():
            kept = []
            for each in some:
                offers = tuple(offer for offer in each.offers if not any(axis in axes for axis in _axes_of(offer)))
                kept.append(each if len(offers) == len(each.offers) else attrs.evolve(each, offers=offers))
            items[item] = tuple(kept)
        return attrs.evolve(self, items=items)

    def __or__(self, other: Constraints) -> Constraints:
        """Both: every test of either."""
        items = dict(self.items)
        for item, more in other.items.items():
            items[item] = (*items.get(item, ()), *more)
        said = ("outputs", "regather", "sums", "chunks", "scatter", "at")
        both = {name: {**getattr(self, name), **getattr(other, name)} for name in said}
        return Constraints(items, **both, stages=self.stages or other.stages)


NONE = Constraints()


def leaf_strategy(layout: Layout) -> Strategy:
    """An input leaf in a layout, in the form that nodes' strategies have."""
    return Strategy(layout.text(), (), (layout,))


def _axes_of(strategy: Strategy) -> set[str]:
    """Mesh axes that a strategy's operands and results lie on."""
    found: set[str] = set()
    for layout in (*strategy.ins, *strategy.outs):
        if layout is not None:
            found.update(layout.axes)
            found.update(axis for axis, _ in layout.pending)
    return found


def agrees(strategy: Strategy, fixed: Strategy | None, free: Collection[str]) -> bool:
    """Whether a strategy places every axis outside `free` as `fixed` does; None: nowhere."""
    every = (*strategy.ins, *strategy.outs)
    if fixed is None:
        return all(a in free for layout in every if layout is not None for a in layout.axes)
    both = zip(every, (*fixed.ins, *fixed.outs), strict=True)
    return all(a is b or (a is not None and b is not None and _without(a, free) == _without(b, free)) for a, b in both)


def _without(layout: Layout, free: Collection[str]) -> Hashable:
    dims = tuple(tuple(a for _, a in dim if a is not None and a not in free) for dim in layout.dims)
    return dims, tuple(p for p in layout.pending if p[0] not in free)


def allowed(
    program: Program, item: int, options: Iterable[Strategy], constraints: Constraints, near: Callable[[Strategy], bool] | None = None
) -> tuple[Strategy, ...]:
    """The options that pass all constraints on the item; raises PlanError naming the one that leaves none.

    `near`: of what constraints offer, what to look at first; the rest counts only where nothing else passes.
    """
    mine, some = constraints.items.get(item, ()), list(options)
    if near is not None and any(constraint.offers for constraint in mine):
        left = [s for s in _offered(some, mine, near) if all(constraint.accepts(s) for constraint in mine)]
        if left:
            return tuple(left)
    left = _offered(some, mine)
    for k, constraint in enumerate(mine):
        kept = [s for s in left if constraint.accepts(s)]
        if not kept and k:
            others = "; ".join(c.says for c in mine[:k])
            raise PlanError(f"{constraint.says} clashes with {others}, on {_describe(program, item)}; drop one of them")
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


def _offered(options: Iterable[Strategy], some: Iterable[Constraint], near: Callable[[Strategy], bool] = lambda s: True) -> list[Strategy]:
    """The options, and what constraints offer beside them: that has to pass all the others as well."""
    found = list(options)
    seen = {(s.ins, s.outs) for s in found}
    for constraint in some:
        found += [s for s in constraint.offers if (s.ins, s.outs) not in seen and near(s)]
        seen |= {(s.ins, s.outs) for s in constraint.offers}
    return found


def _names(options: Iterable[Strategy], most: int = 8) -> str:
    names = [s.name for s in options]
    return ", ".join(names[:most]) + (f", ... {len(names) - most} more" if len(names) > most else "")


def _describe(program: Program, item: int) -> str:
    thing = item_of(program, item)
    if isinstance(thing, Value):
        return f"input {thing.name!r} of shape {thing.shape}"
    where = f" in {thing.path!r}" if thing.path else ""
    shapes = ", ".join(str(program.values[r].shape) for r in thing.refs)
    return f"{thing.target}{where} on {shapes}" + (f" ({thing.line})" if thing.line else "")


def retried(plan: Callable[[Constraints], T], constraints: Constraints, program: Program) -> T:
    """`plan(constraints)`, once more under further constraints where a pass asks for them."""
    try:
        return plan(constraints)
    except NotSo as refused:
        try:
            return plan(constraints | refused.more(program))
        except PlanError:
            raise PlanError(str(refused)) from None
