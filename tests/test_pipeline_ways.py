"""What a pipeline leaves open: how many microbatches, and where it is cut under a budget."""

import re
from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Any

import attrs
import pytest
import torch
from colofunc_plugins import zero
from pipelined import cut_as, gpt2, mlp
from torch import nn

import colofunc as cf
from colofunc.compiler.staged import in_place_of
from colofunc.compiler.transform import Build, Variant
from colofunc.planner.plan import ESTIMATE, OtherWay, Plan
from colofunc.planner.stages.assignment import CutProblem, Cuts, StageActivations
from colofunc.testing import check

Way = tuple[Variant, float]


def example(layers: int = 4, rows: int = 12) -> tuple[Any, Any, Any]:
    step, state, _ = mlp(layers)
    return step, state, (torch.randn(rows, 8, dtype=torch.float64), torch.randn(rows, 4, dtype=torch.float64))


def every_way(chain: Any, low: Any, budget: int | None, arguments: tuple[Any, ...]) -> dict[str, Way]:
    """Words -> the variant and its seconds, planned as if it had been written by hand; inf where it does not fit."""
    known = {"program": low.global_program, "traced": low.traced, "registry": low.registry}
    build = Build(chain.build.transforms, low.priced, budget_bytes=budget, **known)
    asked = chain.transform("pipeline")
    found = {}
    for each in asked.variants(build):
        for variant in (each, *each.leaner()):
            try:
                seconds = in_place_of(chain, asked, variant.transform).lower(*arguments).plan.cost_s
            except cf.PlanError:
                seconds = float("inf")
            found[variant.words] = variant, seconds
    return found


def compared(chain: Any, budget: int | None, arguments: tuple[Any, ...]) -> tuple[Any, dict[str, Way]]:
    """A lowered step and every way to write it: none is faster, and what the plan says of each is so."""
    low = chain.lower(*arguments)
    ways = every_way(chain, low, budget, arguments)
    assert low.plan.cost_s == min(seconds for _, seconds in ways.values()) == ways[low.plan.way][1]
    assert all(variant.at_least_s() <= seconds for variant, seconds in ways.values())
    assert budget is None or low.memory().peak_bytes["device"] <= budget
    for other in low.plan.others:
        variant, seconds = ways[other.words]
        if other.peak_bytes and other.cost_s is not None:
            assert other.cost_s == seconds
        elif other.why == ESTIMATE:
            assert variant.about is not None and other.cost_s == variant.about[1]
        elif other.cost_s is not None:
            assert other.cost_s == variant.at_least_s() >= low.plan.cost_s
    return low, ways


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_no_number_of_microbatches_is_faster(schedule: str) -> None:
    step, state, batch = example()
    chain = cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches="auto", schedule=schedule)
    low, ways = compared(chain, None, (state, batch))
    assert [words.split()[0] for words in ways] == ["1", "2", "3", "4", "6", "12"]
    assert len(low.plan.others) == 5


def test_no_way_is_faster_within_a_budget() -> None:
    step, state, batch = example(4, 4)
    free = cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches="auto")
    budget = int(0.95 * free.lower(state, batch).plan.peak_bytes)
    _, ways = compared(cf.checkpoint(free, budget=budget), budget, (state, batch))
    assert len(ways) > 3 and any("cut by memory" in words for words in ways)


@pytest.mark.sweep
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "auto"])
@pytest.mark.parametrize("share", [0.9, 0.75])
@pytest.mark.parametrize("model", ["mlp", "gpt2"])
def test_no_way_is_faster_in_many_settings(schedule: str, share: float, model: str) -> None:
    step, state, batch = example(6, 32) if model == "mlp" else gpt2(4)
    free = cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches="auto", schedule=schedule)
    low = free.lower(state, batch)
    budget = int(share * low.plan.peak_bytes)
    chain = cf.checkpoint(free, budget=budget)
    try:
        _, ways = compared(chain, budget, (state, batch))
    except cf.PlanError:
        ways = every_way(chain, low, budget, (state, batch))
        assert all(seconds == float("inf") for _, seconds in ways.values())
    fits = sum(seconds < float("inf") for _, seconds in ways.values())
    print(f"{model} {schedule} {share}: {len(ways)} ways, {fits} fit")


def test_cuts_are_chosen_with_the_budget() -> None:
    """Where the stage that is full is not the one that is slow: a cut that is not balanced needs nothing made again."""
    step, state, batch = example(5, 256)
    free = cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=4)
    alone = free.lower(state, batch).plan
    budget = int(0.9 * alone.peak_bytes)
    low = cf.checkpoint(free, budget=budget).lower(state, batch)
    assert alone.way == "" and low.plan.way.startswith("4 microbatches, cut b")
    assert low.plan.way != "4 microbatches, cut by time" and not low.plan.memory
    assert low.memory().peak_bytes["device"] <= budget
    (by_time,) = (other for other in low.plan.others if other.words == "4 microbatches, cut by time")
    assert by_time.cost_s is not None and by_time.cost_s > low.plan.cost_s and "made again" in by_time.why


def test_the_best_of_all_cuts_is_found() -> None:
    """Every cut of five layers in two stages, by hand; of some there is no plan within the budget."""
    step, state, batch = example(5, 256)
    mesh = cf.Mesh(pp=2)
    budget = int(0.9 * cf.pipeline(cf.shard(step, mesh), microbatches=4).lower(state, batch).plan.peak_bytes)
    seconds = []
    for first in (1, 2, 3, 4):
        stages = {f"{2 * layer}.*": int(layer >= first) for layer in range(5)}
        chain = cf.checkpoint(cf.pipeline(cf.shard(step, mesh), microbatches=4, stages=stages), budget=budget)
        try:
            seconds.append(chain.lower(state, batch).plan.cost_s)
        except cf.PlanError:
            seconds.append(float("inf"))
    assert float("inf") in seconds
    low = cf.checkpoint(cf.pipeline(cf.shard(step, mesh), microbatches=4), budget=budget).lower(state, batch)
    assert low.plan.cost_s == pytest.approx(min(seconds), rel=1e-12)


WIDTHS = [(512, 2048, 512, 512, 2048, 512, 512), (512, 512, 1024, 2048, 512, 1024, 512), (256, 2048, 256, 256, 256, 256, 256)]


@pytest.mark.parametrize("widths", [WIDTHS[0], *(pytest.param(widths, marks=pytest.mark.sweep) for widths in WIDTHS[1:])])
def test_no_cut_between_layers_is_faster_whatever_their_widths(widths: tuple[int, ...]) -> None:
    """Narrow layers beside wide ones: the fastest cut is not where least is sent. By 2 %, for cuts go by the seconds of forward."""
    net = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))
    opt = cf.adapt(torch.optim.SGD, lr=1e-3)
    step, state = cf.train_step(cf.functional(net), opt, loss=lambda out: out.square().mean(), inputs=lambda x: ((x,), {}))
    batch, mesh = cf.abstract((16384, widths[0])), cf.Mesh(pp=3, topology="4xa100-80g")

    def planned_s(stages: dict[str, int] | None) -> float:
        return cf.pipeline(cf.shard(step, mesh), microbatches=4, stages=stages).lower(state, batch).plan.cost_s

    ways = combinations(range(1, 6), 2)
    by_hand = min(planned_s({f"{k}.*": int(k >= first) + int(k >= second) for k in range(6)}) for first, second in ways)
    assert planned_s(None) <= by_hand * 1.02


@pytest.mark.parametrize("ranks", [(0, 1, 2), (0, 1, 1, 0), (0, 1, 0, 1)])
def test_the_leanest_cut_holds_least_of_all_cuts(ranks: tuple[int, ...]) -> None:
    step, state, batch = gpt2(6)
    program = cf.pipeline(cf.shard(step, cf.Mesh(pp=3)), microbatches=4).lower(state, batch).global_program
    stages = len(ranks)
    problem = CutProblem(program, stages, lambda node: float(len(node.outs)), lambda nbytes: 0.0, ranks=ranks)
    held = StageActivations(tuple(range(stages, 0, -1)), 0.25)
    found = [*problem.leaner(held, 3), problem.balanced()]
    needs, last = problem._needs(held), len(problem.begins)

    def peak(begins: Sequence[int]) -> float:
        """Bytes of the fullest rank."""
        nbytes = dict.fromkeys(ranks, 0.0)
        for stage, (first, end) in enumerate(pairwise((*begins, last))):
            nbytes[ranks[stage]] += float(needs[stage][first, end])
        return max(nbytes.values())

    def slowest(cuts: Cuts) -> float:
        """Seconds of the slowest rank."""
        seconds = dict.fromkeys(ranks, 0.0)
        for stage, rank in enumerate(ranks):
            seconds[rank] += cuts.seconds[stage]
        return max(seconds.values())

    peaks = [peak([0, *map(problem.begins.index, cuts.ends[:-1])]) for cuts in found]
    least = min(peak((0, *way)) for way in combinations(range(1, last), stages - 1))
    assert peaks[0] == pytest.approx(least) and peaks == sorted(peaks)
    assert [slowest(cuts) for cuts in found] == sorted(map(slowest, found), reverse=True)


def test_a_plan_says_which_way_it_goes_and_is_followed() -> None:
    step, state, batch = example()
    chain = cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches="auto")
    plan = chain.lower(state, batch).plan
    assert Plan.from_dict(plan.to_dict()) == plan
    assert plan.why_not(plan.way) == f"{plan.way} is what was chosen"
    assert plan.why_not("12 microbatches").startswith("12 microbatches, cut by time: at least ")
    assert "2 microbatches, cut by time" in plan.why_not("2 micro") and "12" not in plan.why_not("2 micro")
    assert f"chosen: {plan.way}\n  not " in plan.table()
    # A letter is a strategy, though words of the ways begin with it.
    for letter in "bcm":
        assert plan.why_not(letter) == attrs.evolve(plan, way="", others=()).why_not(letter)
    assert plan.why_not("") == attrs.evolve(plan, way="", others=()).why_not("")
    # Of two plans the other way is taken, and none is searched for.
    other = cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=4).lower(state, batch).plan
    asked = Plan.from_dict({**other.to_dict(), "way": "4 microbatches, cut by time"})
    followed = chain.with_plan(asked).lower(state, batch).plan
    assert (followed.way, followed.others) == ("4 microbatches, cut by time", ()) and followed.pipeline == other.pipeline


@pytest.mark.parametrize("microbatches", [4, "auto"])
def test_a_followed_plan_keeps_its_cut_without_its_budget(microbatches: int | str) -> None:
    step, state, batch = example(5, 256)
    fixed = cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=4)
    plan = cf.checkpoint(fixed, budget=int(0.9 * fixed.lower(state, batch).plan.peak_bytes)).lower(state, batch).plan
    assert plan.way not in ("", "4 microbatches, cut by time")
    chain = cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=microbatches)
    followed = chain.with_plan(plan).lower(state, batch).plan
    assert (followed.way, followed.others) == (plan.way, ())
    assert [leaf.at for leaf in followed.inputs] == [leaf.at for leaf in plan.inputs]


def test_a_way_that_a_step_does_not_have_cannot_be_followed() -> None:
    step, state, batch = example()
    plan = cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches="auto").lower(state, batch).plan
    asked = Plan.from_dict({**plan.to_dict(), "way": "5 microbatches, cut by time"})
    chain = cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=4)
    with pytest.raises(cf.PlanError, match="the plan to follow goes the way '5 microbatches, cut by time', which this step does not have"):
        chain.with_plan(asked).lower(state, batch)
    low = chain.lower(state, batch)
    given = cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=4, stages=cut_as(low))
    with pytest.raises(cf.PlanError, match=r"and this step leaves nothing open.*Try: stages=None"):
        given.with_plan(plan).lower(state, batch)


def test_a_step_with_what_was_chosen_trains_as_one_device_does() -> None:
    step, state, batch = example(4, 64)
    free = cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches="auto", schedule="zb-h1")
    chain = cf.checkpoint(free, budget=int(0.8 * free.lower(state, batch).plan.peak_bytes))
    with cf.testing.float64():
        check(chain, state, batch, steps=2)


@pytest.mark.parametrize(
    ("rows", "options", "says"),
    [
        (7, {"schedule": "interleaved-1f1b"}, "microbatches='auto': no divisor of the 7 rows of the batch is a number of microbatches"),
        (4, {"microbatches": "most"}, "microbatches='most' is no whole number above 0"),
    ],
)
def test_what_cannot_be_chosen_is_an_error(rows: int, options: dict[str, Any], says: str) -> None:
    step, state, batch = example(4, rows)
    with pytest.raises(cf.PlanError, match=says):
        cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), **{"microbatches": "auto", **options}).lower(state, batch)


@pytest.mark.parametrize(
    ("schedule", "microbatches", "says"),
    [
        ("interleaved-1f1b", 3, r"do not divide 3; give microbatches=2 or 4 or 6 or 12, which divide the 12 rows of the batch, or another"),
        ("1f1b", 4, r"4 microbatches that divide the rows of .* clashes with .*; give microbatches=2 or 3 or 6, or drop one of them"),
        ("interleaved-1f1b", 4, r"clashes with .*; give microbatches=2 or 6, or drop one of them"),
        ("dualpipev", 12, r"clashes with .*; give microbatches=6, or drop one of them"),
    ],
)
def test_numbers_that_an_error_names_have_a_plan(schedule: str, microbatches: int, says: str) -> None:
    """12 rows, of which zero gives each rank of `dp` the half."""
    step, state, batch = example(4, 12)

    def lowered(number: int) -> Any:
        return cf.pipeline(cf.shard(step, cf.Mesh(pp=2, dp=2), zero(1, "dp")), microbatches=number, schedule=schedule).lower(state, batch)

    with pytest.raises(cf.PlanError, match=says) as refused:
        lowered(microbatches)
    if "clashes" in says:
        (advised,) = re.findall(r"microbatches=([\d or]+),", str(refused.value))
        for number in advised.split(" or "):
            assert lowered(int(number)).plan.pipeline.microbatches == int(number)


def test_a_clash_that_no_number_of_microbatches_ends_names_none() -> None:
    step, state, batch = example(4, 6)
    chain = cf.pipeline(cf.shard(step, cf.Mesh(pp=2, dp=2), zero(1, "dp")), microbatches=6, schedule="interleaved-1f1b")
    with pytest.raises(cf.PlanError, match=r"6 microbatches that divide the rows of a rank .* clashes with [^;]*; drop one of them$"):
        chain.lower(state, batch)


def test_microbatches_that_mix_samples_are_an_error_and_not_one_microbatch() -> None:
    step, state, batch = example(4, 8)
    chain = cf.fp8(cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches="auto"), where="*.weight", scaling="rowwise")
    with pytest.raises(cf.PlanError, match=r"fp8_scale in .* mixes the samples of the batch") as refused:
        chain.lower(state, batch)
    assert 'give cf.fp8 scaling="delayed" or "rowwise_with_gw_hp" to keep the numbers of the whole batch' in str(refused.value)
    assert refused.value.__notes__ == ["1 microbatch, cut by time has a plan; write microbatches=1 where that will do"]
    with pytest.raises(cf.PlanError, match="mixes the samples of the batch") as refused:
        cf.checkpoint(chain, budget=1000).lower(state, batch)
    assert refused.value.__notes__[0].startswith(
        "no number of microbatches has a plan: above 1 that operator mixes them, and 1 microbatch, cut by time: the leanest plan that was"
    )


def test_where_no_way_fits_the_least_of_the_leanest_is_named() -> None:
    step, state, batch = example(4, 2)
    chain = cf.checkpoint(cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches="auto"), budget=1000)
    with pytest.raises(cf.PlanError, match=r"no plan found within 1,000 B a rank: the least found has a peak of") as refused:
        chain.lower(state, batch)
    assert "tried: 1 microbatch, cut by time" in refused.value.__notes__[0]


def test_numbers_that_depend_on_microbatches_are_not_left_open() -> None:
    step, _, _ = example()
    with pytest.raises(cf.PlanError, match="its numbers depend on how many microbatches there are"):
        cf.local_stats(cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches="auto"))


def test_auto_is_planned_by_the_placement_that_is_fastest() -> None:
    """Wide layers on two ranks: never slower than a named schedule, and the plan says what became of the other placements."""
    net = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
    opt = cf.adapt(torch.optim.SGD, lr=1e-3)
    step, state = cf.train_step(cf.functional(net), opt, loss=lambda out: out.square().mean(), inputs=lambda x: ((x,), {}))
    batch, mesh = cf.abstract((16384, 1024)), cf.Mesh(pp=2, topology="4xa100-80g")

    def planned(schedule: str, stages: dict[str, int] | None = None) -> Plan:
        return cf.pipeline(cf.shard(step, mesh), microbatches=4, schedule=schedule, stages=stages).lower(state, batch).plan

    chosen = planned("auto")
    assert chosen.way == f"4 microbatches, {chosen.pipeline.schedule}, cut by time"
    for name in ("1f1b", "zb-h1", "interleaved-1f1b", "zb-v", "auto-one", "auto-v", "auto-interleaved"):
        assert chosen.cost_s <= planned(name).cost_s * (1 + 1e-9), name
    assert "4 microbatches, auto-one, cut by time: its schedule takes about" in chosen.why_not("auto-one")
    far = OtherWay("4 microbatches, auto-v, cut by time", 0.5, 0, ESTIMATE)
    assert far.line(chosen) == "4 microbatches, auto-v, cut by time: its schedule takes about 500 ms by an estimate, so not planned"
    # Stages that were given leave the placements that have as many.
    assert planned("auto", {f"{layer}.*": layer // 4 for layer in range(8)}).pipeline.schedule == "auto-one"
    assert planned("auto", {f"{layer}.*": layer // 2 for layer in range(8)}).pipeline.schedule in ("auto-v", "auto-interleaved")
    again = cf.pipeline(cf.shard(step, mesh), microbatches=4, schedule="auto").with_plan(chosen).lower(state, batch).plan
    assert (again.way, again.pipeline) == (chosen.way, chosen.pipeline)


def test_a_model_with_few_layers_has_one_stage_a_rank() -> None:
    step, state, batch = example(3, 8)
    low = cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=4, schedule="auto").lower(state, batch)
    assert low.plan.pipeline.schedule == "auto-one" and low.plan.way == ""
    with pytest.raises(cf.PlanError, match="4 stages, and the forward pass has 3 operators with weights of their own to begin one at"):
        cf.pipeline(cf.shard(step, cf.Mesh(pp=4)), microbatches=4, schedule="auto").lower(state, batch)
