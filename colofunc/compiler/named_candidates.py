"""Named plans for axes that nobody speaks for, as shardings to be counted beside what a search finds.

Problem: the search for a sharding works with an estimate. What a finished program hides behind other work, and which
messages go together, it knows roughly, and it offers no weights in stripes. Idea: plugins say which of their plans may
speak for an axis (`colofunc_candidate_plans`). Each is a constraint like the user's own; what is cheapest under it is
one more sharding, which `budget` finishes and counts as it does all others.

    for decided in named_shardings(sharder, registry): ...       # zero(3) on dp; zero(1); tensor 1d; ...
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import attrs

from colofunc.compiler.decisions import Decisions
from colofunc.compiler.plan_cache import decided_by
from colofunc.compiler.sharder import Sharder
from colofunc.errors import PlanError
from colofunc.planner.sharding.assign import Memo
from colofunc.planner.wishes.wish import wishes_of
from colofunc.planner.wishes.wish_constraints import constraints_of
from colofunc.plugins.registry import Registry

MOST_NODES = 1000
"""Of larger programs that have to be made to fit only what the search finds is finished: every other takes seconds. Where
nothing has to, of those more than twice as large (12 layers: named plans win up to 6 % on four A100s, nothing on gloo).
"""
ALIKE = 1e-6
"""Of programs above `MOST_NODES` one of two named plans is finished whose estimates differ by at most this share."""
WORTH_COUNTING = 1.35
"""A named plan is finished where the search's estimate of it is at most this many times that of what was found: the
count was nowhere below 0.75 of what both estimates say (ten models on dp=2, tp=2 and dp=4 of gloo-cpu and A100s)."""


def named_shardings(sharder: Sharder, registry: Registry) -> Iterator[Decisions]:
    """Of every set of named plans for the open axes the cheapest sharding; first the second that the search has found.

    Those are left out that contradict what the user says, and those of which the plan, as text, cannot be followed
    without them.
    """
    program, mesh = sharder.program, sharder.completion.mesh
    open_axes = tuple(axis for axis in sharder.axes if axis not in sharder.named and mesh.axis_size(axis) > 1)
    is_large = len(program.nodes) > MOST_NODES
    most_nodes = MOST_NODES if sharder.completion.gives_way else 2 * MOST_NODES
    if not open_axes or len(program.nodes) > most_nodes:
        return
    staged_axes = {axis for axis, _ in sharder.constraints.at.values()}
    found, without_wishes = sharder.assign(None), sharder.candidates.under_other_wishes(Memo())
    estimates_s: list[float] = []
    second = sharder.candidates.memo.second
    if second is not None and second.cost_s <= found.cost_s * WORTH_COUNTING:
        yield sharder.decide(None, second)
    for plans in _sets_of_plans(registry, open_axes):
        # A plan leaves little open: where what was found leads to under it, nothing is gained by leaving that again.
        candidates = sharder.candidates.under_other_wishes(Memo(like=found, restarts=0))
        try:
            wishes = [wish for plan in plans for wish in wishes_of(plan, program, plan.name, mesh, candidates.rules)]
            plans_say = constraints_of(wishes, program, mesh, candidates.rules)
            constraints = sharder.constraints | plans_say.offering_nothing_on(staged_axes)
            known = attrs.evolve(sharder, candidates=candidates, constraints=constraints).assign(None)
            if known.cost_s > found.cost_s * WORTH_COUNTING:
                continue
            if is_large and any(abs(known.cost_s - other_s) <= ALIKE * other_s for other_s in estimates_s):
                continue
            estimates_s.append(known.cost_s)
            # The plan has to say enough to be followed by itself, also where weights lie in stripes.
            plan = sharder.decide(None, sharder.among(found, known)).plan
            yield decided_by(plan, program, mesh, without_wishes, sharder.constraints)
        except PlanError:
            continue


def _sets_of_plans(registry: Registry, axes: tuple[str, ...]) -> Iterator[tuple[Any, ...]]:
    """One plan for all axes, on each axis by itself where it takes no more, or two of different kinds, in the order of
    the table: for the first few and the others.
    """
    for make in registry.candidate_plans.values():
        whole = make(axes)
        plans = (whole,) if whole is not None else tuple(make((axis,)) for axis in axes)
        if None not in plans:
            yield plans
    for first in range(1, len(axes)):
        for before, behind in product(_plans(registry, axes[:first]), _plans(registry, axes[first:])):
            if before[0] < behind[0] and type(before[1]) is not type(behind[1]):
                yield before[1], behind[1]


def _plans(registry: Registry, axes: tuple[str, ...]) -> list[tuple[int, Any]]:
    """(place in the table, plan) of the candidates that speak for just these axes."""
    plans = [(place, make(axes)) for place, make in enumerate(registry.candidate_plans.values())]
    return [(place, plan) for place, plan in plans if plan is not None]
