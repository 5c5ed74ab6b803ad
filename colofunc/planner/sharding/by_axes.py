"""Assignment axis by axis, where several axes are open.

Problem: with many axes the joint enumeration of what an operator could do explodes. Idea: decide two axes at a time,
what is not decided yet lying nowhere, then one axis at a time with all others fixed, until nothing changes. Axes of
which a constraint speaks leave little to decide and have their turns alone, unless one pattern names several: it is out
of reach for each of them alone.

    dp=16 cp=8 tp=8, tp pinned        (tp), (dp cp), then dp, cp, tp, dp, ... each alone
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs

from colofunc.mesh import Mesh
from colofunc.planner.sharding.assign import Assignment, Memo, assign, strategy_of
from colofunc.planner.sharding.classes import item_of
from colofunc.planner.sharding.constraints import NONE, Constraint, Constraints, agrees
from colofunc.planner.sharding.flows import ConvertS
from colofunc.planner.sharding.model import KernelS
from colofunc.program.ir import Node, Program, Value
from colofunc.spec.layout import Layout
from colofunc.spec.rule import Strategy

MOST_AXES = 2
"""At most this many axes are decided together; over more of them no model has all options."""
ROUNDS = 3
"""At most this many turns of each axis."""
ENOUGH = 1e-3
"""Relative gain below which the turn of one axis counts as no change."""


class AxisCandidates(Protocol):
    """Candidates that place only `axes`; every other axis lies as in `fixed` (None at first: nowhere)."""

    def __call__(
        self, item: Node | Value, axes: tuple[str, ...], fixed: Strategy | None, /
    ) -> Sequence[Strategy] | Sequence[Layout]: ...


def assign_by_axes(
    program: Program,
    mesh: Mesh,
    candidates: AxisCandidates,
    constraints: Constraints = NONE,
    convert_s: ConvertS | None = None,
    budget_bytes: int | None = None,
    axes: Sequence[str] | None = None,
    slack: float = 0.0,
    memo: Memo | None = None,
    price_s: float = 0.0,
    kernel_s: KernelS | None = None,
) -> Assignment:
    """Like `assign`, deciding two axes at a time and then one at a time, the others fixed, until nothing changes.

    For at most two open axes this is `assign`. Larger axes are decided first: they share out the most work. `axes`:
    those that are decided; None: all.
    """
    named = mesh.axis_names if axes is None else axes
    turns = _Turns(program, mesh, candidates, constraints, convert_s, slack, kernel_s, _largest_first(mesh, named))
    memo = memo or Memo()
    if len(turns.open_axes) <= MOST_AXES:
        fresh = memo.like is None
        return turns.solve(turns.open_axes, None, budget_bytes, memo, fresh=fresh, price_s=price_s, start=memo.like)
    if memo.fastest is None:  # nothing of it depends on a budget
        memo.fastest = turns.fastest(memo.like)
    current, largest = memo.fastest, turns.open_axes[:MOST_AXES]
    around = memo.around_fastest = memo.around_fastest or Memo()
    for known in (around.fits, around.misses):  # one budget does not lead to what another finds
        known.clear()
    if budget_bytes is not None and current.peak_bytes > budget_bytes:
        current, around = turns.solve(largest, current, budget_bytes, around), Memo()
    return turns.solve(largest, current, memo=around, price_s=price_s) if price_s else current


def _largest_first(mesh: Mesh, axes: Sequence[str]) -> tuple[str, ...]:
    open_axes = (axis for axis in axes if mesh.axis_size(axis) > 1)
    return tuple(sorted(open_axes, key=lambda axis: -mesh.axis_size(axis)))


@attrs.frozen(eq=False)
class _Turns:
    """One problem, of which some axes at a time are decided. `open_axes`: the largest first."""

    program: Program
    mesh: Mesh
    candidates: AxisCandidates
    constraints: Constraints
    convert_s: ConvertS | None
    slack: float
    kernel_s: KernelS | None
    open_axes: tuple[str, ...]

    def fastest(self, like: Assignment | None) -> Assignment:
        """The cheapest assignment found, whatever its peak. `like`: of a like step, where the turns begin."""
        blocks = self._blocks()
        current = like or self._block_by_block(blocks)
        turns, still = list(self.open_axes) * ROUNDS, 0  # still: turns in a row that changed nothing
        if len(blocks[-1]) == 1 and like is None:  # this axis has just had its turn
            still = 1
            turns = turns[self.open_axes.index(blocks[-1][0]) + 1 :]
        for axis in turns:
            before = current.cost_s
            current = self.solve((axis,), current, fresh=False)
            still = still + 1 if current.cost_s >= before * (1 - ENOUGH) else 1
            if still >= len(self.open_axes):
                break
        return current

    def _blocks(self) -> list[tuple[str, ...]]:
        """Which axes are decided together at first: those that a pattern names together, those that are pinned alone,
        the rest in twos.
        """
        together = self._named_together()
        named = set().union(*together)
        rest = [axis for axis in self.open_axes if axis not in named]
        constrained: set[str] = set()
        for of_item in self.constraints.items.values():
            for constraint in of_item:
                constrained.update(constraint.axes)
        alone = [(axis,) for axis in rest if axis in constrained]
        free = [axis for axis in rest if axis not in constrained]
        pairs = [tuple(free[begin : begin + MOST_AXES]) for begin in range(0, len(free), MOST_AXES)]
        return [*together, *alone, *pairs]

    def _named_together(self) -> list[tuple[str, ...]]:
        """Open axes that a wish for an operator names together: a pattern over all of them is out of reach for each
        alone.
        """
        blocks: list[set[str]] = []
        for of_item in self.constraints.items.values():
            for constraint in of_item:
                named = set(constraint.axes) & set(self.open_axes)
                if not constraint.pattern or len(named) < 2:
                    continue
                # Blocks that have an axis in common are one.
                apart = []
                for block in blocks:
                    if block & named:
                        named |= block
                    else:
                        apart.append(block)
                blocks = [*apart, named]
        ordered = []
        for block in blocks:
            ordered.append(tuple(axis for axis in self.open_axes if axis in block))
        return sorted(ordered, key=lambda block: self.open_axes.index(block[0]))

    def _block_by_block(self, blocks: Sequence[tuple[str, ...]]) -> Assignment:
        decided = tuple(axis for axis in self.mesh.axis_names if axis not in self.open_axes)
        current = None
        for block in blocks:
            decided += block
            current = self.solve(block, current, decided=decided)
        assert current is not None, "there are open axes"
        return current

    def solve(
        self,
        some: tuple[str, ...],
        current: Assignment | None,
        budget_bytes: int | None = None,
        memo: Memo | None = None,
        decided: Sequence[str] | None = None,
        fresh: bool = True,
        price_s: float = 0.0,
        start: Assignment | None = None,
    ) -> Assignment:
        """`some` axes decided, the others as in `current`.

        `decided`: the axes that constraints may speak of by now; None: all.
        """
        program, total = self.program, len(self.program.inputs) + len(self.program.nodes)
        place = {id(item_of(program, item)): item for item in range(total)}
        fixed = None if current is None else [strategy_of(current, item) for item in range(total)]
        loose = {*some, *(axis for axis in self.mesh.axis_names if axis not in self.open_axes)}

        def fixed_of(item: Node | Value) -> Strategy | None:
            return None if fixed is None else fixed[place[id(item)]]

        def here(item: Node | Value) -> Sequence[Strategy] | Sequence[Layout]:
            return self.candidates(item, some, fixed_of(item))

        def near(item: Node | Value, strategy: Strategy) -> bool:
            return agrees(strategy, fixed_of(item), loose)

        constraints = self.constraints if decided is None else self.constraints.on(decided)
        return assign(
            program,
            self.mesh,
            here,
            constraints if fixed is None else constraints | _apart(fixed),
            self.convert_s,
            budget_bytes,
            starts=tuple(one for one in (current, start) if one is not None),
            slack=self.slack,
            memo=memo,
            fresh=fresh,
            few=len(some) > MOST_AXES,
            near=near,
            price_s=price_s,
            kernel_s=self.kernel_s,
            axes=some,
        )


def _apart(fixed: Sequence[Strategy]) -> Constraints:
    """Keep items apart whose fixed axes differ."""

    def keep(strategy: Strategy) -> Constraint:
        return Constraint(
            ("fixed", strategy.name, strategy.ins, strategy.outs), lambda s: True, "the axes decided before"
        )

    return Constraints({item: (keep(strategy),) for item, strategy in enumerate(fixed)})
