"""What a pipeline knows of its stages: costs by the clock, `auto` by these costs and a budget, what the plan says, pictures."""

from functools import partial
from typing import Any

import attrs
import pytest
import torch
from colofunc_plugins import zero
from pipelined import cut_as, gpt2, loop_of, mlp

import colofunc as cf
from colofunc.ext import StageCosts, simulate
from colofunc.planner.plan import Plan
from colofunc.program.cost import node_s
from colofunc.program.lanes import rows_by_timetable
from colofunc.program.places import SEND
from colofunc.program.stage_costs import stage_costs
from colofunc.testing import check

RANKS, MICROBATCHES = 4, 8
NAMED = ("gpipe", "1f1b", "zb-h1", "zb-h2")
MANY_ROWS = (torch.zeros(2048, 8, dtype=torch.float64), torch.zeros(2048, 4, dtype=torch.float64))


STAGES = {"0.*": 0, "2.*": 0, "4.*": 0, "6.*": 1, "8.*": 2, "10.*": 3}
"""Where the six layers are cut by time: a budget may lead to other cuts, which are not what these tests are about."""


def lowered(schedule: str, budget: int | None = None, batch: Any = MANY_ROWS) -> Any:
    step, state, _ = mlp(6)
    chain = cf.pipeline(cf.shard(step, cf.Mesh(pp=RANKS)), microbatches=MICROBATCHES, schedule=schedule, stages=STAGES)
    chain = chain if budget is None else cf.checkpoint(chain, budget=budget)
    return chain.lower(state, batch)


def costs_of(low: Any) -> StageCosts:
    return stage_costs(loop_of(low.program), low.priced, partial(node_s, mesh=low.priced, rule_of=low.registry.rule))


def test_the_simulator_is_the_clock() -> None:
    low = lowered("zb-h1")
    loop, costs = loop_of(low.program), costs_of(low)
    assert min(costs.forward_s + costs.input_s + costs.weight_s + costs.send_s + costs.send_back_s) > 0
    for schedule in ("zb-h1", "zb-h2", "auto"):
        table = low.registry.schedules[schedule].table(RANKS, MICROBATCHES, costs, None)
        if schedule == "auto" and not any(action.kind == "W" for action in table.actions):
            continue  # of a body that was cut in I and W nothing is played in B
        timetable = attrs.evolve(loop.timetable, table=table)
        rows = rows_by_timetable(loop, timetable, low.priced, partial(node_s, mesh=low.priced, rule_of=low.registry.rule))
        expected = simulate(table, costs)
        for row, simulated in zip(rows, expected.rows, strict=True):
            assert [did.end_s for did in row] == pytest.approx([span.end_s for span in simulated], rel=1e-12)
    assert low.pipeline().makespan_s == pytest.approx(simulate(loop.timetable.table, costs).makespan_s, rel=1e-12)


def test_auto_has_the_costs_of_the_stages() -> None:
    low = lowered("auto")
    costs = costs_of(lowered("zb-h1"))
    ours = simulate(loop_of(low.program).timetable.table, costs).makespan_s
    for name in NAMED:
        assert ours <= simulate(low.registry.schedules[name].table(RANKS, MICROBATCHES), costs).makespan_s * (1 + 1e-9)
    # Stages of this step are not alike, and what is best for stages that are is not best for them.
    alike = low.registry.schedules["auto"].table(RANKS, MICROBATCHES, StageCosts.uniform(RANKS))
    assert ours < simulate(alike, costs).makespan_s


def test_auto_keeps_to_a_budget_and_is_not_behind_1f1b() -> None:
    """By less in flight, by making values again, or both."""
    free, tight, other = lowered("auto"), lowered("auto", 700_000), lowered("1f1b", 700_000)
    assert tight.memory().peak_bytes["device"] <= 700_000 < free.memory().peak_bytes["device"]
    assert free.plan.cost_s <= tight.plan.cost_s <= other.plan.cost_s * (1 + 1e-9)


def test_a_budget_is_kept_by_the_stage_that_is_over_it() -> None:
    """The first stages keep more microbatches. Nothing is made again elsewhere, and nothing that another stage has sent."""
    free, tight = lowered("1f1b"), lowered("1f1b", 400_000)
    before, after = free.plan.pipeline, tight.plan.pipeline
    assert before.ranks[0].peak_bytes > 400_000 >= max(use.peak_bytes for use in after.ranks)
    assert after.ranks[0].compute_s > before.ranks[0].compute_s
    assert [use.compute_s for use in after.ranks[1:]] == [use.compute_s for use in before.ranks[1:]]
    sends = [[node.target for node in loop_of(low.program).body.nodes].count(SEND) for low in (free, tight)]
    assert sends[0] == sends[1] == 6


@pytest.mark.parametrize("schedule", ["1f1b", "auto"])
def test_a_pipeline_within_a_budget_trains_as_one_device_does(schedule: str) -> None:
    step, state, _ = mlp(4)
    batch = (torch.randn(256, 8, dtype=torch.float64), torch.randn(256, 4, dtype=torch.float64))
    free = cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=4, schedule=schedule)
    alone = free.lower(state, batch)
    budget = int(0.9 * alone.plan.peak_bytes)
    there = cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=4, schedule=schedule, stages=cut_as(alone))
    chain = cf.checkpoint(there, budget=budget)
    low = chain.lower(state, batch)
    assert low.plan.memory and low.memory().peak_bytes["device"] <= budget
    with cf.testing.float64():
        check(chain, state, batch, steps=2)


def test_the_plan_says_what_a_pipeline_does() -> None:
    low = lowered("1f1b")
    pipeline = low.plan.pipeline
    assert pipeline is not None and (pipeline.axis, pipeline.schedule, pipeline.microbatches) == ("pp", "1f1b", MICROBATCHES)
    assert pipeline.bubble == low.pipeline().bubble
    assert f"pp: pipeline of 4 stages, 1f1b, 8 microbatches, bubble {pipeline.bubble:.1%} (cf.pipeline)" in str(low.plan)
    assert [use.stages for use in pipeline.ranks] == [(0,), (1,), (2,), (3,)]
    assert [use.peak_bytes for use in pipeline.ranks] == [low.memory(rank).peak_bytes["device"] for rank in range(RANKS)]
    for rank, use in enumerate(pipeline.ranks):
        row = [busy for busy in low.lanes(rank).busy if busy.label[0].isdigit()]
        assert use.compute_s == pytest.approx(sum(busy.end_s - busy.start_s for busy in row))
    table = low.plan.table()
    assert "pp  stages  weights and states  peak" in table
    assert Plan.from_dict(low.plan.to_dict()) == low.plan


def test_a_pipeline_beside_another_axis_is_said_by_rank_of_its_own_axis() -> None:
    step, state, batch = mlp(4)
    chain = cf.pipeline(cf.shard(step, cf.Mesh(dp=2, pp=2), zero(1, "dp")), microbatches=4, schedule="zb-v")
    low = chain.lower(state, batch)
    assert [use.stages for use in low.plan.pipeline.ranks] == [(0, 3), (1, 2)]
    assert str(low.plan).startswith("pp: pipeline of 4 stages, zb-v, 4 microbatches, bubble ") and "dp: ZeRO-1" in str(low.plan)


def test_a_picture_has_a_lane_per_rank() -> None:
    low = lowered("1f1b")
    lanes = low.pipeline().text(100).splitlines()
    assert [lane[:8] for lane in lanes] == ["rank 0  ", "rank 1  ", "rank 2  ", "rank 3  "]
    assert all(str(m) in lanes[0] for m in range(MICROBATCHES)) and "B" in lanes[0] and "F" in lanes[0]
    named = {event["args"]["name"] for event in cf.ext.chrome_events(low.pipeline())["traceEvents"] if event["ph"] == "M"}
    assert named == {"rank 0", "rank 1", "rank 2", "rank 3"}


def test_a_step_without_a_pipeline_has_no_picture_of_one() -> None:
    step, state, batch = mlp(2)
    low = cf.shard(step, cf.Mesh(dp=2)).lower(state, batch)
    assert low.plan.pipeline is None
    with pytest.raises(cf.PlanError, match=r"this step has no pipeline; write cf\.pipeline"):
        low.pipeline()


def test_each_rank_makes_again_what_it_must() -> None:
    """A transformer whose stages are alike: one order for all of them would make values again on ranks that have room."""
    step, state, _ = gpt2(layers=4, width=16)
    ids = torch.randint(32, (32, 16))
    batch = {"input_ids": ids, "labels": ids}
    free = cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=4)
    alone = free.lower(state, batch)
    before = alone.plan.pipeline.ranks
    budget = int(0.7 * before[0].peak_bytes)
    there = cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=4, stages=cut_as(alone))
    chain = cf.checkpoint(there, budget=budget)
    after = chain.lower(state, batch).plan.pipeline.ranks
    assert max(use.peak_bytes for use in after) <= budget
    again = [has.compute_s > had.compute_s for had, has in zip(before, after, strict=True)]
    assert again == [had.peak_bytes > budget for had in before] and not all(again)
    with cf.testing.float64():
        check(chain, state, batch, steps=1)
