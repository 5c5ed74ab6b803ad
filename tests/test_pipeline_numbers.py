"""A pipeline where numbers end or are asked for in another way: overflow, NaN, statistics of a microbatch; and when ZeRO-3 gathers."""

from collections import Counter
from typing import Any

import pytest
import torch
from colofunc_plugins import zero
from pipelined import loop_of, mlp
from post_validated import flat
from torch import nn

import colofunc as cf
from colofunc.errors import PlanError
from colofunc.program.places import SEND
from colofunc.testing import check
from colofunc.testing.check import doubled_inside

MESH = cf.Mesh(pp=2, dp=2)
SCHEDULES = ("1f1b", "zb-h1", "zb-v")


def clipped() -> tuple[Any, Any, Any]:
    """Four layers in float64, whose gradients have a joint norm of more than 0.01."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))).double()
    step, state = cf.train_step(
        cf.functional(net), cf.adapt(torch.optim.AdamW, lr=1e-2), lambda out, b: (out - b[1]).pow(2).mean(),
        inputs=lambda b: ((b[0],), {}), clip=0.01,
    )  # fmt: skip
    return step, state, (torch.randn(16, 8, dtype=torch.float64), torch.randn(16, 8, dtype=torch.float64))


def narrow(schedule: str) -> tuple[Any, Any, Any]:
    """A pipeline in fp16 with a stage of ZeRO, clipping and momentum, in float32 outside."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    step, state = cf.train_step(
        cf.functional(net), cf.adapt(torch.optim.SGD, lr=1e-2, momentum=0.9), lambda out, b: (out.float() - b[1]).pow(2).mean(),
        inputs=lambda b: ((b[0],), {}), clip=0.5,
    )  # fmt: skip
    chain = cf.precision(cf.pipeline(cf.shard(step, MESH, zero(1, "dp")), microbatches=4, schedule=schedule), "fp16")
    return chain, state, (torch.randn(16, 8), torch.randn(16, 4))


def kept(state: Any) -> dict[str, torch.Tensor]:
    """Parameters and moments, whole."""
    return {f"{tree}.{name}": x.full().clone() for tree in ("params", "opt") for name, x in flat(state[tree]).items()}


@pytest.mark.parametrize("what", ["overflow", "nan"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_that_overflows_anywhere_changes_nothing_on_any_stage(schedule: str, what: str) -> None:
    """One row of the last microbatch is too large for fp16, or is no number: no stage updates before all of them have looked."""
    chain, state, batch = narrow(schedule)
    placed = chain.init(state, batch)
    placed, _ = chain(placed, batch)
    skipped = int(placed["loss_scale"]["skipped"])
    before, scale = kept(placed), float(placed["loss_scale"]["scale"])
    wrong = (batch[0], batch[1].clone())
    wrong[1][-1] = 1e6 if what == "overflow" else torch.nan
    placed, _ = chain(placed, wrong)
    assert int(placed["loss_scale"]["skipped"]) == skipped + 1 and float(placed["loss_scale"]["scale"]) == scale / 2
    for name, x in kept(placed).items():
        assert torch.equal(x, before[name]), name
    placed, _ = chain(placed, batch)  # and goes on where it was
    assert any(not torch.equal(x, before[name]) for name, x in kept(placed).items())
    assert check(chain, state, batch, steps=3).steps == 3


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_nan_is_where_one_device_has_it(schedule: str) -> None:
    step, state, batch = mlp()
    batch[1][-1] = torch.nan
    with cf.testing.float64():
        state, batch = doubled_inside((state, batch))
        chain = cf.pipeline(cf.shard(step, MESH, zero(1, "dp")), microbatches=4, schedule=schedule)
        got, metrics = chain(chain.init(state, batch), batch)
        want, _ = chain.reference(state, batch)
    assert torch.isnan(metrics["loss"].full())
    for name, x in flat(want).items():
        assert torch.equal(torch.isnan(flat(got)[name].full()), torch.isnan(x)), name


def test_a_joint_norm_takes_one_message_of_each_stage_and_no_answer() -> None:
    """The squares of a stage travel together, and all ranks add up all of them, in the order of one device."""
    step, state, batch = clipped()
    low = cf.pipeline(cf.shard(step, cf.Mesh(pp=4)), microbatches=4, schedule="zb-h1").lower(state, batch)
    sends = [node for node in low.program.nodes if node.target == SEND]
    assert [node.args[3] for node in sends] == [0, 1, 2, 3, 3]  # the last one sends the loss
    assert all(node.args[4] == (0, 1, 2, 3) for node in sends)
    many = low.after("pack").program
    assert sum(node.target == SEND for node in many.nodes) == 9  # a square per parameter, and the loss


# ---- ZeRO-3 ----


def gathers(program: Any) -> Counter[str]:
    """How often each collective over `dp` stands in a program, its loops left out."""
    return Counter(node.target.removesuffix("_start") for node in program.nodes if "gather" in node.target and "dp" in str(node.args))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_zero_3_gathers_a_stages_parameters_once_for_all_microbatches(schedule: str) -> None:
    step, state, batch = mlp(8)
    low = cf.pipeline(cf.shard(step, MESH, zero(3, "dp")), microbatches=4, schedule=schedule).lower(state, batch)
    assert not gathers(loop_of(low.program).body)
    assert 1 <= sum(gathers(low.program).values()) <= 8  # of 8 weights, small ones go together


# ---- operators that mix samples ----


def test_statistics_of_a_microbatch_are_those_that_accumulate_takes() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 4)).double()
    step, state = cf.train_step(
        cf.functional(net), cf.adapt(torch.optim.SGD, lr=1e-2), lambda out, b: out.pow(2).mean(), inputs=lambda b: ((b,), {})
    )
    batch = torch.randn(16, 8, dtype=torch.float64)
    piped = cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=4, mixing="per-microbatch")
    alone = cf.accumulate(step, microbatches=4, mixing="per-microbatch")
    got, want = piped(piped.init(state, batch), batch), alone(alone.init(state, batch), batch)
    for name, x in flat(want[0]).items():
        torch.testing.assert_close(flat(got[0])[name].full(), x.full(), rtol=1e-12, atol=1e-12)
    with pytest.raises(PlanError, match="unknown mixing 'sometimes'"):
        cf.pipeline(step, mixing="sometimes")
