"""Steps whose update is written by hand: it is computed outside of any gradient, as the forward pass is, and is no stage of it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import colofunc as cf
from colofunc.errors import PlanError
from colofunc.testing import check

ROWS, D = 8, torch.float64


def net(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 16), nn.GELU(), nn.Linear(16, outputs)).to(D)


def momentum_contrast() -> tuple[Callable[..., Any], Any, Any]:
    """A queue of earlier keys, a pointer into it, and an encoder that follows another one slowly."""
    model, size = cf.functional(net(8, 4)), 16

    def step(state, batch):
        def loss_fn(params):
            queries = F.normalize(model.apply(params, model.buffers, batch["x"])[0], dim=1)
            keys = F.normalize(model.apply(state["slow"], model.buffers, batch["z"])[0], dim=1).detach()
            logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ state["queue"].mT], 1)
            return F.cross_entropy(logits, torch.zeros(ROWS, dtype=torch.int64)), keys

        (loss, keys), grads = cf.value_and_grad(loss_fn, has_aux=True)(state["params"])
        params = {name: value - 0.1 * grads[name] for name, value in state["params"].items()}
        slow = {name: 0.9 * value + 0.1 * params[name] for name, value in state["slow"].items()}
        where = (state["next"] + torch.arange(ROWS)) % size
        queue = state["queue"].index_copy(0, where, keys)
        return {"params": params, "slow": slow, "queue": queue, "next": (state["next"] + ROWS) % size}, loss

    slow = {name: value.clone() for name, value in model.params.items()}
    state = {"params": model.params, "slow": slow, "queue": torch.randn(size, 4, dtype=D), "next": torch.tensor(0)}
    return step, state, {"x": torch.randn(ROWS, 8, dtype=D), "z": torch.randn(ROWS, 8, dtype=D)}


def two_models() -> tuple[Callable[..., Any], Any, Any]:
    """An encoder and a decoder whose modules have the same names."""
    encoder, decoder = cf.functional(net(8, 4)), cf.functional(net(4, 8))

    def step(state, batch):
        def loss_fn(params):
            codes = encoder.apply(params["encoder"], encoder.buffers, batch)[0]
            return (decoder.apply(params["decoder"], decoder.buffers, codes)[0] - batch).square().mean()

        loss, grads = cf.value_and_grad(loss_fn)(state)
        return {part: {name: value - 0.1 * grads[part][name] for name, value in state[part].items()} for part in state}, loss

    return step, {"encoder": encoder.params, "decoder": decoder.params}, torch.randn(ROWS, 8, dtype=D)


@pytest.mark.parametrize("make", [momentum_contrast, two_models])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_updates_by_hand_are_no_stage(make: Callable[[], Any], schedule: str) -> None:
    torch.manual_seed(0)
    step, state, batch = make()
    staged = cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=2, schedule=schedule)
    check(staged, state, batch, steps=2)
    low = staged.lower(state, batch)
    loop = max((node.loop for node in low.program.nodes if node.loop is not None), key=lambda loop: len(loop.body.nodes))
    products = [node.on for node in loop.body.nodes if node.target in ("colofunc.linear", "aten.mm.default")]
    assert {("pp", (0,)), ("pp", (1,))} <= set(products)  # each stage multiplies


def test_a_second_forward_pass_with_other_weights_is_refused_in_words() -> None:
    """Sharpness-aware minimisation: weights of the second pass are made of gradients of all stages."""
    torch.manual_seed(0)
    model = cf.functional(net(8, 8))

    def step(state, batch):
        def loss_fn(params):
            return model.apply(params, model.buffers, batch)[0].square().mean()

        _, grads = cf.value_and_grad(loss_fn)(state)
        norm = torch.sqrt(sum(value.square().sum() for value in grads.values()))
        sharp = {name: value + 0.05 * grads[name] / norm for name, value in state.items()}
        loss, grads = cf.value_and_grad(loss_fn)(sharp)
        return {name: value - 0.1 * grads[name] for name, value in state.items()}, loss

    batch = torch.randn(ROWS, 8, dtype=D)
    with pytest.raises(PlanError, match=r"weights that a step makes of gradients, for a second forward pass, are on none\. Try: cf.acc"):
        cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=2).lower(model.params, batch)
    check(cf.accumulate(step, microbatches=2), model.params, batch, steps=2)


def test_what_backward_does_not_read_has_its_stage_too() -> None:
    """The last product where the loss is a mean of scores, as a critic's, and a head of which only a figure is shown."""
    torch.manual_seed(0)
    critic, head = cf.functional(net(8, 1)), cf.functional(nn.Linear(1, 2).to(D))

    def step(state, batch):
        def loss_fn(params):
            scores = critic.apply(params, critic.buffers, batch)[0]
            shown = head.apply(state["head"], head.buffers, scores.detach())[0].abs().mean()
            return scores.mean(), shown

        (loss, shown), grads = cf.value_and_grad(loss_fn, has_aux=True)(state["critic"])
        updated = {name: value - 0.1 * grads[name] for name, value in state["critic"].items()}
        return {"critic": updated, "head": state["head"]}, (loss, shown)

    state, batch = {"critic": critic.params, "head": head.params}, torch.randn(ROWS, 8, dtype=D)
    staged = cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=2)
    check(staged, state, batch, steps=2)
    at = {leaf.name: leaf.at for leaf in staged.lower(state, batch).plan.inputs if leaf.role in ("param", "frozen")}
    assert len(at) == 6 and set(at.values()) == {("pp", (0,)), ("pp", (1,))}, at
