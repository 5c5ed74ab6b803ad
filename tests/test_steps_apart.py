"""Steps of one model that share no state: what one decides of memory says nothing in another."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import colofunc as cf

D = torch.float64


def adapters() -> cf.Model:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    return cf.lora(cf.functional(module.double()), where="*", rank=2)


def training(model: cf.Model) -> tuple[Callable[..., Any], Any]:
    return cf.train_step(model, cf.adapt(torch.optim.Adam, lr=0.1), loss=lambda out: out.square().mean())


def rows() -> torch.Tensor:
    return torch.randn(8, 16, dtype=D, generator=torch.Generator().manual_seed(1))


def chains(folder: Any) -> dict[str, Callable[[Any], Any]]:
    return {
        "plain": lambda step: step,
        "host": lambda step: cf.offload(step, policy="host"),
        "disk": lambda step: cf.offload(step, policy="disk", disk=folder),
        "device": lambda step: cf.offload(step, policy="device"),
        "ample": lambda step: cf.offload(step, budget="1MiB"),
        "narrow": lambda step: cf.precision(cf.offload(step, policy="host"), "bf16"),
        "nothing kept": lambda step: cf.checkpoint(step, policy="nothing"),
        "microbatches": lambda step: cf.accumulate(step, microbatches=2),
    }


def tiers(staged: Any, *args: Any) -> dict[str, str]:
    low = staged.lower(*args)
    return {leaf.name: layout.tier for leaf, layout in zip(low.plan.inputs, low.input_layouts, strict=True)}


@pytest.mark.parametrize("first", ["plain", "host", "disk"])
def test_where_a_step_keeps_its_state_says_nothing_in_a_step_with_state_of_its_own(first: str, tmp_path: Any) -> None:
    mesh, model = cf.Mesh(), adapters()
    alone = {}
    for name, chain in chains(tmp_path).items():
        step, state = training(adapters())
        alone[name] = tiers(chain(cf.shard(step, mesh)), state, rows())
    step, state = training(model)
    staged = chains(tmp_path)[first](cf.shard(step, mesh))
    placed, _ = staged(staged.init(state, rows()), rows())
    for name, chain in chains(tmp_path).items():
        step, state = training(model)
        assert tiers(chain(cf.shard(step, mesh)), state, rows()) == alone[name], name
    # The step itself goes on where it was, also with a batch of another length.
    longer = torch.cat([rows(), rows()])
    assert tiers(staged, placed, longer) == tiers(staged, placed, rows()) == alone[first]


def test_a_step_on_the_same_state_leaves_frozen_weights_where_they_lie() -> None:
    mesh, model = cf.Mesh(), adapters()
    step, state = training(model)
    staged = cf.offload(cf.shard(step, mesh), policy="host")
    placed, _ = staged(staged.init(state, rows()), rows())
    evaluate = cf.offload(cf.shard(lambda state, x: model.apply(state["params"], {}, x)[0].mean(), mesh), budget="1MiB")
    assert {tier for name, tier in tiers(evaluate, placed, rows()).items() if "frozen" in name} == {"host"}


APART = ("plain", "microbatches")


def trained(model: cf.Model, name: str) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Where a chain keeps its state on two ranks, and its parameters after two steps."""
    step, state = training(model)
    staged = chains(None)[name](cf.shard(step, cf.Mesh(dp=2, topology="ideal"), {"*.weight": "(dp o) i"}))
    where = tiers(staged, state, rows())
    placed = staged.init(state, rows())
    for _ in range(2):
        placed, _ = staged(placed, rows())
    return where, {name: x.full() for name, x in placed["params"].items()}


def after_a_step_on_the_host(names: tuple[str, ...]) -> Any:
    model = adapters()
    return trained(model, "host"), [trained(model, name) for name in names]


@pytest.mark.dist
def test_the_same_holds_on_two_real_ranks() -> None:
    alone = {name: trained(adapters(), name) for name in ("host", *APART)}  # a model of its own for each
    assert "host" in alone["host"][0].values() and "host" not in alone["plain"][0].values()
    for first, others in cf.launch(after_a_step_on_the_host, 2, APART, timeout_s=120):
        for name, (where, params) in zip(("host", *APART), (first, *others), strict=True):
            assert where == alone[name][0], name
            torch.testing.assert_close(params, alone[name][1], rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")
