"""Asking the planner for shardings of one step, as decisions or as proposals that are written when somebody takes them.

Problem: a search within a budget asks for hundreds of shardings, each time with the same program, candidates,
constraints and axes. Idea: one record has those; what differs is the budget, the price of a byte, or an assignment that
stands.

    sharder = Sharder(completion, candidates, constraints, named, axes)
    sharder.decide(budget_bytes)                 # the decisions of the cheapest assignment that is estimated to fit
    sharder.propose(None, 1e-12)                 # cheapest where a byte at the peak costs 1e-12 s; its plan is not written yet
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial

import attrs

from colofunc.compiler.completion import Completion
from colofunc.compiler.decisions import Candidates, Decisions, among_options, assigned, decide
from colofunc.planner.joint import Proposal
from colofunc.planner.plan import PlanOfAxis
from colofunc.planner.sharding.assign import Assignment
from colofunc.planner.sharding.constraints import Constraints
from colofunc.program.ir import Program

LazySharding = Callable[[], Decisions]
"""A sharding whose plan is written at the first call: of hundreds that are proposed few are finished."""


@attrs.frozen(eq=False)
class Sharder:
    """Asks the planner for shardings of one step.

    `named`: axis -> the plan that speaks for it. `axes`: those that are searched.
    """

    completion: Completion
    candidates: Candidates
    constraints: Constraints
    named: Mapping[str, PlanOfAxis]
    axes: tuple[str, ...]

    def assign(self, budget_bytes: int | None, price_s: float = 0.0) -> Assignment:
        """The cheapest found that is estimated to fit, where a byte at the peak costs `price_s`."""
        completion = self.completion
        return assigned(
            completion.program, completion.mesh, self.candidates, self.constraints, self.axes, budget_bytes, price_s
        )

    def among(self, found: Assignment, known: Assignment) -> Assignment:
        """`known` as a choice among the options of `found`, and those that it lacks."""
        completion = self.completion
        return among_options(completion.program, completion.mesh, self.candidates, self.constraints, found, known)

    def decide(self, budget_bytes: int | None, assignment: Assignment | None = None) -> Decisions:
        """The decisions of an assignment, or of the one that is found for the budget."""
        completion = self.completion
        return decide(
            completion.program,
            completion.mesh,
            self.candidates,
            self.constraints,
            self.named,
            self.axes,
            budget_bytes,
            assignment,
        )

    def propose(self, aim_bytes: int | None, price_s: float) -> Proposal[LazySharding]:
        return self.proposal(self.assign(aim_bytes, price_s), aim_bytes)

    def proposal(self, assignment: Assignment, aim_bytes: int | None) -> Proposal[LazySharding]:
        sharding = cache(partial(self.decide, aim_bytes, assignment))
        return Proposal(sharding, assignment.cost_s, assignment.peak_bytes, _key(assignment))

    @property
    def program(self) -> Program:
        return self.completion.program


def _key(assignment: Assignment) -> object:
    """Equal for assignments that decide alike."""
    strategies = [(strategy.name, strategy.ins, strategy.outs) for strategy in assignment.strategies]
    return strategies, assignment.inputs, assignment.regather
