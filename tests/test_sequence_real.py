"""Ring attention on two real gloo ranks: the numbers of one device, with permutes in flight while blocks are worked on."""

import pytest
import torch
from colofunc_plugins import ring, ulysses
from transformers import LlamaConfig, LlamaForCausalLM

import colofunc as cf
from colofunc.executors.launch import launch
from colofunc.testing.numerics import float64

pytestmark = pytest.mark.dist
SIZE = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)


def train(plan, steps=2):
    """Losses and parameters after a few steps, under `plan` on all ranks, or of the function itself for None."""
    with float64():
        torch.manual_seed(0)
        net = cf.functional(LlamaForCausalLM(LlamaConfig(max_position_embeddings=16, **SIZE)).double())
        step, state = cf.train_step(net, cf.adapt(torch.optim.AdamW, lr=1e-2))
        ids = torch.randint(1, 32, (2, 16), generator=torch.Generator().manual_seed(1))
        batch = {"input_ids": ids, "labels": ids}
        if plan is not None:
            step = cf.shard(step, cf.Mesh(cp=2), plan)
            state = step.init(state, batch)
        losses = []
        for _ in range(steps):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
        return losses, {k: v if plan is None else v.full() for k, v in state["params"].items()}


def both():
    return train(ring("cp")), train(ulysses("cp"))


def test_training_equals_one_device():
    losses, params = train(None)
    for found in launch(both, 2):
        for got, mine in found:
            assert got == pytest.approx(losses, abs=1e-10)
            assert max(float((mine[k] - p).abs().max()) for k, p in params.items()) < 1e-10
