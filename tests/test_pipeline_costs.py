"""What a pipeline knows of its stages: costs by the clock, `auto` by these costs and a budget, what the plan says, pictures."""

import re
from functools import partial
from typing import Any
from xml.etree import ElementTree

import attrs
import pytest
import torch
from colofunc_plugins import zero
from pipelined import cut_as, gpt2, loop_of, mlp

import colofunc as cf
from colofunc.ext import StageCosts, simulate
from colofunc.pictures import ACTIONS, pipeline_picture
from colofunc.planner.plan import Plan
from colofunc.program.cost import node_s
from colofunc.program.lanes import PartTime, rows_by_timetable
from colofunc.program.places import SEND
from colofunc.program.stage_costs import stage_costs
from colofunc.testing import check

SVG = "{http://www.w3.org/2000/svg}"
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


@pytest.mark.parametrize("schedule", ["zb-v", "interleaved-1f1b"])
def test_the_simulator_is_the_clock_where_a_rank_has_several_stages(schedule: str) -> None:
    step, state, _ = mlp(8)
    low = cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=MICROBATCHES, schedule=schedule).lower(state, MANY_ROWS)
    played = simulate(loop_of(low.program).timetable.table, costs_of(low))
    assert low.pipeline().makespan_s == pytest.approx(played.makespan_s, rel=1e-12)
    assert low.plan.cost_s > played.makespan_s, "the update is behind the loop"


# ---- collectives beside a part ----


@pytest.mark.parametrize(
    ("wired_s", "taken_s"),
    [(0.0, 10.0), (-1.0, 10.0), (2.2, 10.2), (11.0, 11.0), (50.0, 11.0)],
)
def test_a_part_takes_longer_while_something_is_sent(wired_s: float, taken_s: float) -> None:
    """Half of it is work, which takes a fifth longer: while the links work, all takes a tenth longer."""
    part = PartTime(10.0, (), (), work_s=5.0)
    assert part.beside_s(wired_s, 0.2) == pytest.approx(taken_s)
    assert part.beside_s(wired_s, 0.0) == 10.0


def test_a_part_of_work_alone_counts_as_an_operator_does() -> None:
    """The clock of what is no pipeline, for the same seconds of links."""
    part = PartTime(10.0, (), (), work_s=10.0)
    for wired_s in (0.5, 3.0, 11.9, 12.1, 40.0):
        alone = wired_s * 0.2 / 1.2 + 10.0 if wired_s < 12.0 else 12.0
        assert part.beside_s(wired_s, 0.2) == pytest.approx(alone)


def contended(contention: float, schedule: str = "1f1b") -> Any:
    base = cf.Mesh(topology="8xh100").topology
    topology = attrs.evolve(base, device=attrs.evolve(base.device, contention=contention))
    step, state, _ = mlp(6)
    chain = cf.pipeline(cf.shard(step, cf.Mesh(pp=RANKS, topology=topology)), microbatches=MICROBATCHES, schedule=schedule, stages=STAGES)
    return chain.lower(state, MANY_ROWS)


def test_sends_slow_down_the_parts_of_a_pipeline_where_the_device_says_so() -> None:
    """By no more than all of its work could be, and nobody works less."""
    free, slowed = contended(0.0), contended(0.2)
    assert free.pipeline().makespan_s < slowed.pipeline().makespan_s <= 1.2 * free.pipeline().makespan_s
    assert free.plan.cost_s < slowed.plan.cost_s
    for before, after in zip(free.pipeline().work_s, slowed.pipeline().work_s, strict=True):
        assert before <= after <= 1.2 * before
    # The rank of the last stage sends gradients only, and all ranks send something.
    assert all(after > before for before, after in zip(free.pipeline().work_s, slowed.pipeline().work_s, strict=True))


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


@pytest.mark.parametrize("named", ["zb-h1", "zb-h2"])
def test_auto_is_behind_no_named_schedule_of_its_stages_within_what_that_one_holds(named: str) -> None:
    """By the finished plans: an attention's stages send more and wait longer than their costs alone say."""
    step, state, batch = gpt2(4)

    def scheduled(schedule: str, stages: dict[str, int] | None = None) -> Any:
        return cf.pipeline(cf.shard(step, cf.Mesh(pp=RANKS)), microbatches=MICROBATCHES, schedule=schedule, stages=stages)

    stages = cut_as(scheduled(named).lower(state, batch))
    theirs = scheduled(named, stages).lower(state, batch)
    auto = scheduled("auto", stages)
    for chain in (auto, cf.checkpoint(auto, budget=theirs.plan.peak_bytes)):
        ours = chain.lower(state, batch)
        assert ours.plan.cost_s <= theirs.plan.cost_s * (1 + 1e-9)
    assert ours.memory().peak_bytes["device"] <= theirs.plan.peak_bytes


def test_a_budget_is_kept_by_the_stage_that_is_over_it() -> None:
    """The first stages keep more microbatches. Nothing is made again elsewhere, and nothing that another stage has sent."""
    free, tight = lowered("1f1b"), lowered("1f1b", 400_000)
    before, after = free.plan.pipeline, tight.plan.pipeline
    assert before.ranks[0].peak_bytes > 400_000 >= max(use.peak_bytes for use in after.ranks)
    assert after.ranks[0].compute_s > before.ranks[0].compute_s
    assert [use.compute_s for use in after.ranks[1:]] == [use.compute_s for use in before.ranks[1:]]
    sends = [[node.target for node in loop_of(low.program).body.nodes].count(SEND) for low in (free, tight)]
    assert sends[0] == sends[1] == 6


@pytest.mark.parametrize(("schedule", "share"), [("1f1b", 0.9), pytest.param("auto-one", 0.6, marks=pytest.mark.sweep)])
def test_a_pipeline_within_a_budget_trains_as_one_device_does(schedule: str, share: float) -> None:
    """By values that are made again; `auto-one` has less in flight first, which is enough here."""
    step, state, _ = mlp(4)
    batch = (torch.randn(256, 8, dtype=torch.float64), torch.randn(256, 4, dtype=torch.float64))
    free = cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=4, schedule=schedule)
    alone = free.lower(state, batch)
    budget = int(share * alone.plan.peak_bytes)
    there = cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=4, schedule=schedule, stages=cut_as(alone))
    chain = cf.checkpoint(there, budget=budget)
    low = chain.lower(state, batch)
    assert bool(low.plan.memory) == (schedule == "1f1b") and low.memory().peak_bytes["device"] <= budget
    with cf.testing.float64():
        check(chain, state, batch, steps=2)


def test_auto_within_a_budget_that_no_order_keeps_to_makes_values_again() -> None:
    step, state, _ = mlp(4)
    batch = (torch.randn(256, 8, dtype=torch.float64), torch.randn(256, 4, dtype=torch.float64))
    alone = cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=4, schedule="auto").lower(state, batch)
    budget = alone.plan.peak_bytes // 2
    there = cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=4, schedule="auto", stages=cut_as(alone))
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


def cells(path: Any) -> dict[str, tuple[str, float, float]]:
    """Of a picture: id -> (colour, left, right)."""
    found = {}
    for group in ElementTree.parse(path).iter(f"{SVG}g"):
        if group.get("id", "").startswith("rank"):
            (cell,) = group.iter(f"{SVG}path")
            edges = [float(x) for x, _ in re.findall(r"([\d.]+) ([\d.]+)", cell.get("d"))]
            colour = re.search(r"fill: (#\w+)", cell.get("style")).group(1)
            found[group.get("id")] = colour, min(edges), max(edges)
    return found


def test_the_picture_of_the_papers(tmp_path: Any) -> None:
    """A cell per action, in the colour of its kind, as long as it takes and where it stands; later stages of a rank are lighter."""
    for name in ("zb-h1", "1f1b", "interleaved-1f1b"):
        schedule = cf.ext.schedule_named(name)
        simulated = simulate(schedule.table(2, 4), StageCosts.uniform(schedule.stages(2), f=1, i=2, w=1))
        pipeline_picture(simulated, tmp_path / "pipeline.svg")
        drawn = cells(tmp_path / "pipeline.svg")
        spans = {f"rank{span.rank}-{span.action}": span for row in simulated.rows for span in row}
        assert drawn.keys() == spans.keys()
        scale = (drawn["rank0-0F1"][1] - drawn["rank0-0F0"][1]) / spans["rank0-0F1"].start_s
        for id, (colour, left, right) in drawn.items():
            span = spans[id]
            begin = drawn["rank0-0F0"][1] + span.start_s * scale
            assert (left, right) == pytest.approx((begin, begin + (span.end_s - span.start_s) * scale), abs=0.01)
            assert (colour == ACTIONS[span.action.kind]) == (span.action.stage == span.rank)
    text = (tmp_path / "pipeline.svg").read_text()
    assert "<!-- rank 0 -->" in text and "<!-- F: forward -->" in text and "<!-- 3 -->" in text
    assert "<!-- W: weight gradients -->" not in text


def test_a_planned_pipeline_is_drawn(tmp_path: Any) -> None:
    low = lowered("1f1b")
    pipeline_picture(low.pipeline(), tmp_path / "pipeline.svg", title="my schedule")
    assert len(cells(tmp_path / "pipeline.svg")) == 2 * RANKS * MICROBATCHES
    assert "<!-- my schedule -->" in (tmp_path / "pipeline.svg").read_text()
    pipeline_picture(low.pipeline(), tmp_path / "pipeline.png")
    with pytest.raises(cf.InputError, match=r"the picture cannot be written to .*: .*; name a file such as pipeline\.svg"):
        pipeline_picture(low.pipeline(), tmp_path / "pipeline.nothing")


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
