"""Where a pipeline is cut: beside every cut there is, by the schedule as it is simulated and by the clock of finished plans."""

import random
from functools import partial
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from pipelined import gpt2
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import colofunc as cf
from colofunc.ext import ActionTable, StageCosts, simulate
from colofunc.planner.stages.assignment import CutProblem
from colofunc.planner.stages.cut_search import CutSearch
from colofunc.planner.stages.piece_costs import PieceCosts
from colofunc.planner.stages.timetables import in_parts
from colofunc.program.cost import node_s

A100 = cf.topology("4xa100-80g")


def net(widths: tuple[int, ...]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))
    return cf.train_step(
        cf.functional(layers), cf.adapt(torch.optim.SGD, lr=1e-3), loss=lambda out: out.square().mean(), inputs=lambda x: ((x,), {})
    )


def search_of(low: Any, name: str, ranks: int, microbatches: int) -> CutSearch:
    """Of a lowered step with a pipeline."""
    schedule, mesh = low.registry.schedules[name], low.priced
    seconds = partial(node_s, values=low.global_program.values, mesh=mesh, rule_of=low.registry.rule)

    def send_s(nbytes: float) -> float:
        return float(mesh.collective_s("send", nbytes, ("pp",)))

    stages = schedule.stages(ranks)
    problem = CutProblem(low.global_program, stages, seconds, send_s, ranks=[schedule.rank_of(stage, ranks) for stage in range(stages)])
    pieces = PieceCosts.of(problem, low.global_program, seconds, mesh.topology.device.launch_s, 1)
    return CutSearch(problem, pieces, schedule, ranks, microbatches, send_s)


@pytest.mark.parametrize("seed", range(3))
def test_the_cut_is_the_best_of_all_by_the_simulated_schedule(seed: int) -> None:
    draw = random.Random(seed)
    widths = tuple(draw.choice((256, 512, 1024, 2048)) for _ in range(8))
    step, state = net(widths)
    low = cf.pipeline(cf.shard(step, cf.Mesh(pp=3, topology=A100)), microbatches=6).lower(state, cf.abstract((6144, widths[0])))
    for name, ranks in (("1f1b", 3), ("zb-h1", 3), ("interleaved-1f1b", 2), ("zb-v", 2), ("v-half", 2), ("dualpipev", 2)):
        search = search_of(low, name, ranks, 6)
        table = in_parts(search.schedule.table(ranks, 6))
        by_hand = {}
        for rest in combinations(range(1, search.pieces.pieces), len(search.problem.ranks) - 1):
            simulated = simulate(table, search._costs((0, *rest)))
            behind_s = search._behind_s((0, *rest))
            by_hand[rest] = max(row[-1].end_s + more_s for row, more_s in zip(simulated.rows, behind_s, strict=True))
        cuts, seconds = search.fastest()
        found = tuple(search.problem.begins.index(first) for first in cuts.ends[:-1])
        assert seconds == by_hand[found] == pytest.approx(min(by_hand.values()), rel=2e-6)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved-1f1b", "zb-v"])
def test_what_pieces_take_is_what_the_clock_says_of_the_stages(name: str) -> None:
    """Of a finished plan: seconds of each stage forward, of each rank backward, and of sends.

    Not exact: launches come and go (gradients are added up, a quotient of the loss is one operator), and at the turn of a V, where two
    neighbours are on one rank, a weight gradient that reads what the one has made may stand with either.
    """
    step, state = net((1024, 2048, 512, 2048, 1024, 512, 2048))
    mesh = cf.Mesh(pp=2, topology=A100)
    low = cf.pipeline(cf.shard(step, mesh), microbatches=4, schedule=name).lower(state, cf.abstract((8192, 1024)))
    search = search_of(low, name, 2, 4)
    cuts, seconds = search.fastest()
    ours = search._costs([search.problem.begins.index(first) for first in (0, *cuts.ends[:-1])])
    clocked = low.pipeline().costs
    assert ours.forward_s == pytest.approx(clocked.forward_s, rel=0.03)
    assert backward_s(ours, search) == pytest.approx(backward_s(clocked, search), rel=0.03)
    for pair, (rank, other) in enumerate(pairwise(search.problem.ranks)):
        if rank != other:
            assert ours.send_s[pair] == pytest.approx(clocked.send_s[pair], rel=0.03)
            assert ours.send_back_s[pair] == pytest.approx(clocked.send_back_s[pair], rel=0.03)
    assert seconds == pytest.approx(low.plan.cost_s, rel=0.03)


def test_what_all_layers_read_takes_no_backward_to_the_first() -> None:
    """Rotary tables and masks are made in front of the first layer, and read by the backward of each; casts of weights stand between."""
    sizes = dict(hidden_size=512, intermediate_size=1024, num_attention_heads=8, num_key_value_heads=4, vocab_size=1024)
    with torch.device("meta"):
        model = cf.functional(LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=4, use_cache=False)))
    opt = cf.adapt(torch.optim.AdamW, lr=1e-4)
    step_fn, _ = cf.train_step(model, opt)
    state = {"params": model.params, "buffers": model.buffers, "opt": opt.init(model.params)}
    ids = cf.abstract((32, 512), torch.int64)
    step = cf.precision(cf.shard(step_fn, cf.Mesh(pp=2, topology=A100)), "bf16")
    low = cf.pipeline(step, microbatches=8, schedule="1f1b").lower(state, {"input_ids": ids, "labels": ids})
    costs = low.pipeline().costs
    work_s = [f + i + w for f, i, w in zip(costs.forward_s, costs.input_s, costs.weight_s, strict=True)]
    assert max(work_s) < 1.25 * min(work_s)
    of_layers = [{leaf.at for leaf in low.plan.inputs if f"state.params.model.layers.{k}." in leaf.name} for k in range(4)]
    assert of_layers[0] == {("pp", (0,))} and of_layers[3] == {("pp", (1,))}


def backward_s(costs: StageCosts, search: CutSearch) -> list[float]:
    """Per rank."""
    seconds = [0.0] * search.ranks
    for stage, rank in enumerate(search.problem.ranks):
        seconds[rank] += costs.input_s[stage] + costs.weight_s[stage]
    return seconds


@pytest.mark.parametrize("name", ["interleaved-1f1b", "zb-v"])
@pytest.mark.parametrize("widths", [(1024,) * 7, (512, 2048, 512, 512, 2048, 512, 512)])
def test_no_cut_by_hand_is_faster_by_the_clock(name: str, widths: tuple[int, ...]) -> None:
    step, state = net(widths)
    batch, mesh = cf.abstract((16384, widths[0])), cf.Mesh(pp=2, topology=A100)
    stages = cf.ext.schedule_named(name).stages(2)

    def planned_s(stages: dict[str, int] | None) -> float:
        return float(cf.pipeline(cf.shard(step, mesh), microbatches=4, schedule=name, stages=stages).lower(state, batch).plan.cost_s)

    by_hand = []
    for way in combinations(range(1, 6), stages - 1):
        by_hand.append(planned_s({f"{layer}.*": sum(layer >= first for first in way) for layer in range(6)}))
    assert planned_s(None) <= min(by_hand) * 1.001


def test_twelve_equal_layers_in_a_v() -> None:
    """As fast as the cut that was found by hand, which gives each rank three layers, and the stages at the turn of the V one each."""
    step, state = net((2048,) * 13)
    batch, mesh = cf.abstract((16384, 2048)), cf.Mesh(pp=4, topology=A100)
    by_hand = {f"{layer}.*": stage for layer, stage in enumerate((0, 0, 1, 1, 2, 2, 3, 4, 4, 5, 6, 7))}

    def planned_s(stages: dict[str, int] | None) -> float:
        return float(cf.pipeline(cf.shard(step, mesh), microbatches=8, schedule="zb-v", stages=stages).lower(state, batch).plan.cost_s)

    assert planned_s(None) <= planned_s(by_hand) * (1 + 1e-9)


def test_a_tied_weight_and_inference_are_estimated_too() -> None:
    """A weight of two stages counts in both; where nothing is differentiated a step is its forwards."""
    step, state, batch = gpt2(4)
    low = cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=4, schedule="zb-v").lower(state, batch)
    _, seconds = search_of(low, "zb-v", 2, 4).fastest()
    assert seconds == pytest.approx(low.plan.cost_s, rel=0.25)  # clipping by the joint norm is no part of it
    layers = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(6)))
    model = cf.functional(layers)
    forward = cf.pipeline(cf.shard(lambda params, x: model.apply(params, {}, x)[0], cf.Mesh(pp=2, topology=A100)), microbatches=4)
    low = forward.lower(model.params, cf.abstract((8192, 1024)))
    search = search_of(low, "1f1b", 2, 4)
    assert not search.pieces.backward and search.fastest()[1] == pytest.approx(low.pipeline().makespan_s, rel=0.03)


def test_a_player_has_the_actions_of_the_table() -> None:
    table = ActionTable.parse(["0F0 0B0", "1F0 1B0"])
    assert [str(action) for action in in_parts(table).actions] == [str(action) for action in table.actions]
