"""What a pipeline leaves open: how many microbatches, and where it is cut under a budget."""

from typing import Any

import pytest
import torch
from colofunc_plugins import zero
from pipelined import gpt2, mlp
from torch import nn

import colofunc as cf
from colofunc.compiler.staged import in_place_of
from colofunc.compiler.transform import Build, Transform, Variant
from colofunc.planner.plan import Plan
from colofunc.testing import check

ROWS = 12


def small(rows: int = ROWS) -> tuple[Any, Any, Any]:
    step, state, _ = mlp(4)
    return step, state, (torch.randn(rows, 8, dtype=torch.float64), torch.randn(rows, 4, dtype=torch.float64))


def every_way(chain: Any, low: Any, budget: int | None) -> dict[str, tuple[Variant, float]]:
    """Words -> the variant and its seconds, planned as if it had been written by hand; inf where it does not fit."""
    build = Build(
        chain.build.transforms, low.priced, program=low.global_program, traced=low.traced, registry=low.registry, budget_bytes=budget
    )
    asked = chain.transform("pipeline")
    found = {}
    for variant in asked.variants(build):
        try:
            seconds = in_place_of(chain, asked, variant.transform).lower(*ARGUMENTS[id(chain)]).plan.cost_s
        except cf.PlanError:
            seconds = float("inf")
        found[variant.words] = variant, seconds
    return found


ARGUMENTS: dict[int, Any] = {}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@pytest.mark.parametrize("share", [None, 0.85])
def test_no_way_that_is_written_by_hand_is_faster(schedule: str, share: float | None) -> None:
    step, state, batch = small()
    free = cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches="auto", schedule=schedule)
    budget = None if share is None else int(share * free.lower(state, batch).plan.peak_bytes)
    chain = free if budget is None else cf.checkpoint(free, budget=budget)
    low = chain.lower(state, batch)
    ARGUMENTS[id(chain)] = state, batch
    ways = every_way(chain, low, budget)
    assert low.plan.cost_s == min(seconds for _, seconds in ways.values()) == ways[low.plan.way][1]
    assert all(variant.at_least_s <= seconds for variant, seconds in ways.values())
    assert budget is None or low.memory().peak_bytes["device"] <= budget
    numbers = {words.split()[0] for words in ways}
    assert numbers == {str(number) for number in (1, 2, 3, 4, 6, 12)}
    assert (len(ways) == 6) == (budget is None)
    for other in low.plan.others:
        variant, seconds = ways[other.words]
        if other.cost_s is not None and other.peak_bytes:
            assert other.cost_s == seconds
        elif other.cost_s is not None:
            assert other.cost_s == variant.at_least_s >= low.plan.cost_s
