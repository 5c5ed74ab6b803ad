"""Steps on a pretended card: wherever state, model and batch lie, all comes to where the step runs, and the numbers are the host's."""

import contextlib
import copy
from typing import Any

import pytest
import torch
from pretended import Machine, on_card
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import colofunc as cf

LLAMA = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, vocab_size=20)
HOST = cf.Mesh(device="cpu")


def training(module: nn.Module, loss: Any, optimizer: Any = torch.optim.AdamW) -> Any:
    return cf.train_step(cf.functional(module), cf.adapt(optimizer, lr=1e-2), loss=loss, clip=1.0)


def small() -> Any:
    """A step with random numbers, a norm, a step count and a rate."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.GELU(), nn.Linear(16, 8)).double()
    return (*training(net, lambda out: out.square().mean()), torch.randn(4, 8, dtype=torch.float64))


def losses(step: Any, state: Any, batch: Any, steps: int = 2) -> list[float]:
    torch.manual_seed(3)
    placed, found = step.init(state, batch), []
    for _ in range(steps):
        placed, metrics = step(placed, batch)
        found.append(metrics["loss"])
    return [float(loss) for loss in found]


@pytest.mark.parametrize("state_there", [False, True])
@pytest.mark.parametrize("batch_there", [False, True])
@pytest.mark.parametrize("axes", [{}, {"dp": 2, "device": "cuda"}])
def test_the_step_runs_on_the_card_wherever_its_inputs_lie(state_there: bool, batch_there: bool, axes: dict[str, Any]) -> None:
    step_fn, state, x = small()
    want = losses(cf.shard(step_fn, HOST), state, x)
    with Machine(seed=1) as machine:
        there = on_card(machine, state) if state_there else state
        step, batch = cf.shard(step_fn, cf.Mesh(**axes)), on_card(machine, x) if batch_there else x
        assert losses(step, there, batch) == pytest.approx(want, rel=1e-12)
        placed = step.init(there, batch)
        assert {leaf.local.device.type for leaf in torch.utils._pytree.tree_leaves(placed)} == {"cuda"}


@pytest.mark.parametrize("axes", [{"dp": 2}, {"device": "cpu"}])
def test_what_lies_on_the_card_comes_to_the_host_where_the_step_runs_there(axes: dict[str, Any]) -> None:
    step_fn, state, x = small()
    want = losses(cf.shard(step_fn, HOST), state, x)
    with Machine(seed=1) as machine:
        step, launched = cf.shard(step_fn, cf.Mesh(**axes)), machine.launches
        args = on_card(machine, (state, x))
        machine.forget_counts()
        with pytest.warns(UserWarning, match="idle") if "dp" in axes else contextlib.nullcontext():
            assert losses(step, *args) == pytest.approx(want, rel=1e-12)
        assert not [name for name in launched if "mm" in name], launched


@pytest.mark.parametrize("batch_there", [False, True])
def test_the_host_does_not_wait_for_seeds_batches_and_counts(batch_there: bool) -> None:
    """Neither of the first step, which places tables, nor of later ones."""
    step_fn, state, x = small()
    with Machine(seed=2) as machine:
        step, batch = cf.shard(step_fn, cf.Mesh()), on_card(machine, x) if batch_there else x
        placed = step.init(state, batch)
        machine.forget_counts()
        for _ in range(3):
            placed, _metrics = step(placed, batch)
        assert not machine.waits, machine.places


def moved(module: nn.Module, machine: Machine) -> nn.Module:
    """`module.cuda()`."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = nn.Parameter(machine.to_card(parameter))
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = machine.to_card(buffer)
    return module


def test_a_llama_after_cuda_runs_as_in_the_readme() -> None:
    """Its rotary table lies on the card, positions are made by a factory, and what comes of both is a constant."""
    torch.manual_seed(0)
    net = LlamaForCausalLM(LLAMA)
    ids = torch.randint(0, 20, (2, 8))
    batch = {"input_ids": ids, "labels": ids}
    step_fn, state = training(copy.deepcopy(net), lambda out: out.loss)
    want = losses(cf.shard(step_fn, HOST), state, batch)
    with Machine(seed=1) as machine:
        step_fn, state = training(moved(net, machine), lambda out: out.loss)
        assert losses(cf.shard(step_fn, cf.Mesh()), state, batch) == pytest.approx(want, rel=1e-5)


def test_what_a_step_captures_may_lie_anywhere() -> None:
    """Small tables are constants, large ones inputs that nobody sees; both are read where the step runs."""
    small_table, large = torch.randn(8), torch.randn(200, 200)
    x = torch.randn(4, 200)

    def fn(x: torch.Tensor, table: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x @ weight)[:, :8] * table.cumsum(0) + torch.arange(8) * table

    want = fn(x, small_table, large)
    for mesh in (cf.Mesh(device="cuda"), HOST):
        for there in (False, True):
            with Machine(seed=1) as machine:
                table, weight = on_card(machine, (small_table, large)) if there else (small_table.clone(), large.clone())
                found = cf.shard(lambda x, t=table, w=weight: fn(x, t, w), mesh)(x)
                assert torch.allclose(found.full().cpu(), want, rtol=1e-5, atol=1e-5)


def test_the_function_itself_draws_beside_its_tensors() -> None:
    """`step.eager` is the user's function on his own device: its numbers are the staged step's."""
    x = torch.randn(4, 8, dtype=torch.float64)

    def noisy(x: torch.Tensor) -> torch.Tensor:
        drawn = torch.rand(8, dtype=x.dtype, device=x.device) + torch.randn_like(x) + torch.bernoulli(x.sigmoid())
        return nn.functional.dropout(x, 0.5) + drawn * torch.randperm(8, device=x.device)

    torch.manual_seed(0)
    want = cf.shard(noisy, HOST)(x).full()
    with Machine(seed=0) as machine:
        for there in (x, machine.to_card(x)):
            torch.manual_seed(0)
            found = cf.shard(noisy, cf.Mesh()).eager(there)
            assert found.device == there.device and torch.allclose(found.cpu(), want, rtol=1e-12)


@pytest.mark.parametrize(("s", "t"), [(4, 8), (8, 4), (2, 8)])
def test_causal_attention_counts_from_the_first_key_on_a_card_too(s: int, t: int) -> None:
    """Torch aligns the mask to the top left corner, flash-attention to the bottom right one: they differ where s is not t."""
    q, k, v = torch.randn(2, 4, s, 8), torch.randn(2, 4, t, 8), torch.randn(2, 4, t, 8)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    want = attend(q, k, v)
    with Machine(seed=0):
        for mesh, specs in ((cf.Mesh(), None), (cf.Mesh(sp=2, device="cuda"), ("b h (sp s) d", "b h t d", "b h t d"))):
            for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
                found = cf.shard(attend, mesh, in_specs=specs)(q.to(dtype), k.to(dtype), v.to(dtype)).full().cpu()
                assert torch.allclose(found.float(), want, atol=bound, rtol=bound)
