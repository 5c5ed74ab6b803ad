"""A start of the joint search: the axes of a mesh decided one after the other, in the model of all of them.

Problem: over two axes an operator has dozens of options, and the joint search ends where no few operators are better off
elsewhere. What is cheap along each axis by itself, such as data parallelism on one and tensor parallelism on the other,
may be out of its reach. Idea: of every operator's options look at those first that place the largest axis and no other,
then at those that place the next one and the first as it was decided. So few options are searched almost exactly, and
what they cost is known already: it is the same model.

    dp=4, tp=2        options of dp alone -> {dp: b}, then those with {dp: b} -> {dp: b, tp: o}
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from colofunc.planner.sharding.constraints import agrees
from colofunc.planner.sharding.flows import Coded
from colofunc.planner.sharding.model import PairwiseModel

SearchModel = Callable[[PairwiseModel], list[int]]


def axis_by_axis(model: PairwiseModel, axes: Sequence[str], search: SearchModel) -> list[int]:
    """A choice of which `axes` were decided in their order, each by `search`; before, every operator is as its first
    option has it, which is whole wherever it may be.
    """
    choice = [0] * len(model.options)
    for axis in axes:
        kept = []
        for options, chosen in zip(model.options, choice, strict=True):
            fixed = options[chosen]
            kept.append([option for option, strategy in enumerate(options) if agrees(strategy, fixed, {axis})])
        found = search(_restricted(model, kept))
        choice = [numbers[option] for numbers, option in zip(kept, found, strict=True)]
    return choice


def _restricted(model: PairwiseModel, kept: Sequence[Sequence[int]]) -> PairwiseModel:
    """The same model with some of the options."""
    options = tuple(
        tuple(strategies[option] for option in numbers) for strategies, numbers in zip(model.options, kept, strict=True)
    )
    seconds = tuple(costs[list(numbers)] for costs, numbers in zip(model.seconds, kept, strict=True))
    coded = tuple(Coded(flow, options, model.conversions) for flow in model.flows)
    return attrs.evolve(model, options=options, seconds=seconds, coded=coded, base=[])
