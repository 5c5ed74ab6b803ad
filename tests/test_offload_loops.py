"""Loops under a budget: what their bodies copy, gather anew and sum on the host, and the numbers."""

from typing import Any

import pytest
import torch
from colofunc_plugins import zero
from live_bytes import measure
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import colofunc as cf
from colofunc.compiler.observation import arguments_of
from colofunc.program.memory import lies
from colofunc.program.passes.tiered import Tiered
from colofunc.program.tracing.trace import trace
from colofunc.testing import check


def training(layers: int = 4, d: int = 64, rows: int = 64) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d)) for _ in range(layers))).double()
    loss = lambda out, b: (out**2).mean()  # noqa: E731
    step, state = cf.train_step(cf.functional(net), cf.adapt(torch.optim.AdamW, lr=1e-2), loss=loss, inputs=lambda b: ((b,), {}))
    return step, state, torch.randn(rows, d, dtype=torch.float64)


def body(low: Any) -> Any:
    *_, loop = (node.loop for node in low.program.nodes if node.loop is not None)
    return loop.body


def summed_on_the_host(low: Any) -> int:
    return sum(body(low).values[o].tier == "host" for o in body(low).outputs)


@pytest.mark.parametrize("share, away", [(0.5, False), (0.15, True)])
def test_gradients_are_summed_on_the_host_where_the_device_has_no_room_for_them(share: float, away: bool) -> None:
    step, *args = training()
    base = cf.accumulate(cf.shard(step, cf.Mesh(topology="a100-40g")), microbatches=4)
    memory = base.lower(*args).memory()
    budget = int(memory.peak_bytes["device"] * share)
    staged = cf.offload(base, budget=budget)
    low = staged.lower(*args)
    assert (summed_on_the_host(low) > 0) == away and low.memory().peak_bytes["device"] <= budget
    assert away == (budget < max(memory.by_kind["device"]["gradients"]))
    given = arguments_of(low, staged.arguments(tuple(args)))
    assert measure(low.program, low.mesh, given.copies(range(len(given.shards)))).timeline == low.memory().timeline
    check(staged, *args)


def test_a_budget_of_any_transform_has_parameters_gathered_in_every_trip() -> None:
    step, *args = training()
    base = cf.accumulate(cf.shard(step, cf.Mesh(dp=4, topology="4xa100-80g"), zero(3, "dp")), microbatches=4).on("simulated")
    low = base.lower(*args)
    # Within a half copies of activations are faster than gathering in every trip.
    for within, part in ((cf.offload, 0.4), (cf.checkpoint, 0.5)):
        staged = within(base, budget=int(low.memory().peak_bytes["device"] * part))
        lean = staged.lower(*args)
        assert lean.memory().peak_bytes["device"] <= low.memory().peak_bytes["device"] * part
        assert lean.cost().wire_bytes > low.cost().wire_bytes and any(n.target.startswith("colofunc.all_gather") for n in body(lean).nodes)
        check(staged, *args)


def test_a_result_that_is_a_view_is_handed_over_where_it_is_made() -> None:
    """Where it waited for the end of the body, its memory would be held until then."""
    program = trace(lambda x: ((x * x).view(-1), x.exp().sin()), (torch.ones(2, 3),)).program

    def order(gathered: bool) -> list[str]:
        tiered = Tiered(program, lies(program), (), gathered=gathered)
        for k in range(len(program.nodes)):
            tiered.run(k)
        return [node.target.split(".")[1] for node in tiered.finish(stay=gathered).nodes]

    assert order(gathered=True) == ["mul", "view", "exp", "sin"]
    assert order(gathered=False) == ["mul", "exp", "sin", "view"]


def test_what_a_loop_has_gathered_at_one_stage_is_copied_there_alone() -> None:
    """Tensor-parallel inference in a pipeline ends loops where activations are gathered, and keeps those of a stage on the host."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, vocab_size=32)
    model = cf.functional(LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes)).double().eval())

    def logits(params: Any, ids: torch.Tensor) -> torch.Tensor:
        return model.apply(params, model.buffers, input_ids=ids)[0].logits

    ids = torch.arange(32).view(4, 8)
    step = cf.pipeline(cf.shard(logits, cf.Mesh(pp=2, tp=2)), microbatches=2, schedule="gpipe")
    peak_bytes = step.lower(model.params, ids).memory().peak_bytes["device"]
    with cf.testing.float64():
        check(cf.offload(step, budget=int(0.7 * peak_bytes)), model.params, ids)
