"""Operators on the host: a table stays there, rows travel; by cost and by wish, exact, and counted to the byte."""

from typing import Any

import pytest
import torch
from colofunc_plugins import tensor, zero
from test_memory_agrees import agree as agrees
from test_offload import one, peak
from torch import nn

import colofunc as cf
from colofunc.program.ir import Program
from colofunc.testing import check

ROWS, WIDTH = 1024, 16
TABLE = ROWS * WIDTH * 8  # bytes


def training(clip: float | None = None, optimizer: Any = torch.optim.AdamW, tied: bool = False, **options: Any) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, ROWS if tied else 4, bias=False))
    if tied:
        net[3].weight = net[0].weight
    net = net.double()
    batch = {"x": torch.randint(0, ROWS, (8, 4)), "y": torch.randn(8, 4, ROWS if tied else 4, dtype=torch.float64)}
    opt = cf.adapt(optimizer, lr=1e-2, **options)
    step, state = cf.train_step(
        cf.functional(net), opt, loss=lambda out, b: ((out - b["y"]) ** 2).mean(), inputs=lambda b: ((b["x"],), {}), clip=clip
    )
    return step, state, batch


def travels(program: Program) -> int:
    """The largest number of bytes that one copy brings to the device or to the host."""
    names = ("colofunc.to_device", "colofunc.to_host", "colofunc.put")
    return max((program.values[node.refs[-1]].nbytes for node in program.nodes if node.target.startswith(names)), default=0)


def placed(low: Any, target: str) -> list[str]:
    """The tiers in which results of an operator lie."""
    return [low.program.values[n.outs[0]].tier for n in low.program.nodes if n.target == f"aten.{target}.default"]


KINDS = {
    "adamw": {},
    "clipped": {"clip": 0.5},
    "momentum": {"optimizer": torch.optim.SGD, "momentum": 0.9},
    "small operators": {"optimizer": torch.optim.RMSprop},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_stays_on_the_host_and_rows_travel(kind: str) -> None:
    step, *args = training(**KINDS[kind])
    staged = cf.offload(cf.shard(step, one()), where={"0": "host"})
    low = staged.lower(*args)
    assert placed(low, "embedding") == placed(low, "embedding_dense_backward") == ["host"]
    if kind != "small operators":  # whose updates are the device's: its table goes there for them
        assert travels(low.program) < TABLE / 8 and low.memory().peak_bytes["device"] < TABLE
    assert any("operators on the host: 0 (forward, backward)" in line for line in low.plan.memory)
    agrees(staged, *args)
    check(staged, *args, steps=2)


def test_cost_chooses_the_host_where_the_device_has_no_room_and_a_wish_forbids_it() -> None:
    step, *args = training()
    base = cf.shard(step, one())
    budget = int(peak(base, *args) * 0.35)
    free, held = cf.offload(base, budget=budget), cf.offload(base, budget=budget, where={"0": "device"})
    chosen, kept = free.lower(*args), held.lower(*args)
    assert placed(chosen, "embedding") == ["host"] and placed(kept, "embedding") == ["device"]
    assert travels(chosen.program) < TABLE / 8 <= TABLE == travels(kept.program)
    assert max(chosen.memory().peak_bytes["device"], kept.memory().peak_bytes["device"]) <= budget
    assert chosen.plan.cost_s < kept.plan.cost_s
    check(free, *args, steps=2)


def test_with_room_on_the_device_nothing_runs_elsewhere() -> None:
    step, *args = training()
    assert placed(cf.offload(cf.shard(step, one())).lower(*args), "embedding") == ["device"]


def test_a_table_that_the_output_layer_reads_too_is_gathered_on_the_host_and_fetched_for_the_product() -> None:
    step, *args = training(tied=True)
    staged = cf.offload(cf.shard(step, one()), where={"0": "host"}, policy="host")
    assert placed(staged.lower(*args), "embedding") == ["host"]
    agrees(staged, *args)
    check(staged, *args, steps=2)


MODES = {
    "zero1": (cf.Mesh(dp=2, topology="8xa100-40g"), (zero(1, "dp"),)),
    "vocabulary": (cf.Mesh(tp=2, topology="8xa100-40g"), (tensor("1d", "tp"),)),
}


@pytest.mark.parametrize("mode", MODES)
def test_beside_other_modes(mode: str) -> None:
    step, *args = training()
    mesh, plans = MODES[mode]
    staged = cf.offload(cf.shard(step, mesh, *plans), where={"0": "host"})
    assert placed(staged.lower(*args), "embedding") == ["host"]
    agrees(staged, *args)
    check(staged, *args, steps=2)


def test_in_microbatches_rows_travel_in_every_trip_and_gradients_are_summed_on_the_host() -> None:
    step, *args = training()
    base = cf.accumulate(cf.shard(step, one()), microbatches=2)
    for staged in (cf.offload(base, where={"0": "host"}), cf.offload(base, budget=int(peak(base, *args) * 0.35))):
        low = staged.lower(*args)
        (body,) = (n.loop.body for n in low.program.nodes if n.loop is not None)
        assert {body.values[n.outs[0]].tier for n in body.nodes if "embedding" in n.target} == {"host"}
        assert max(travels(low.program), travels(body)) < TABLE / 8 and low.memory().peak_bytes["device"] < TABLE
        agrees(staged, *args)
        check(staged, *args, steps=2)


def test_rows_by_index_and_a_module_that_multiplies() -> None:
    """What a wish names runs on the host, whatever it is."""
    torch.manual_seed(0)
    w = torch.randn(64, 8, dtype=torch.float64)

    def step(state: torch.Tensor, ids: torch.Tensor) -> Any:
        loss, grad = cf.value_and_grad(lambda s: (s[ids] ** 2).sum())(state)
        return state - 0.1 * grad, loss

    check(cf.offload(cf.shard(step, one()), policy="host"), w, torch.randint(0, 64, (12,)), steps=2)
    train, *args = training()
    staged = cf.offload(cf.shard(train, one()), where={"1": "host"})
    program = staged.lower(*args).program
    ran = {n.target for n in program.nodes if n.outs and program.values[n.outs[0] or 0].tier == "host"}
    assert {"colofunc.linear", "colofunc.linear_dw"} <= ran
    check(staged, *args, steps=2)


def test_a_module_or_a_place_that_is_none_is_named() -> None:
    step, *args = training()
    with pytest.raises(cf.PlanError, match=r"no operator stands in a module '7'"):
        cf.offload(cf.shard(step, one()), where={"7": "host"}).lower(*args)
    with pytest.raises(cf.ColofuncError, match=r"where=.*'gpu'.*'device' or on the 'host'"):
        cf.offload(step, where={"0": "gpu"})
