"""Steps whose update is written by hand: it is computed outside of any gradient, as the forward pass is, and is no stage of it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from colofunc_plugins import tensor, zero
from pipelined import loop_of
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


WAYS = {
    "whole": (cf.Mesh(pp=2), ()),
    "replicas": (cf.Mesh(pp=2, dp=2), ()),
    "zero1": (cf.Mesh(pp=2, dp=2), (zero(1, "dp"),)),
    "zero2": (cf.Mesh(pp=2, dp=2), (zero(2, "dp"),)),
    "zero3": (cf.Mesh(pp=2, dp=2), (zero(3, "dp"),)),
    "tensor": (cf.Mesh(pp=2, tp=2), (tensor("1d", "tp"),)),
    "zero3 and tensor": (cf.Mesh(pp=2, dp=2, tp=2), (zero(3, "dp"), tensor("1d", "tp"))),
}


def of_dictionary(params: Any, batch: torch.Tensor) -> torch.Tensor:
    hidden = torch.tanh(torch.tanh(batch @ params["up"]) @ params["across"])
    return (hidden @ params["down"]).square().mean()


def descent() -> tuple[Callable[..., Any], Any]:
    """Of a dictionary of weights."""

    def step(params, batch):
        loss, grads = cf.value_and_grad(of_dictionary)(params, batch)
        return {name: value - 0.1 * grads[name] for name, value in params.items()}, loss

    shapes = {"up": (8, 16), "across": (16, 16), "down": (16, 8)}
    return step, {name: 0.3 * torch.randn(shape, dtype=D) for name, shape in shapes.items()}


def clipped_momentum() -> tuple[Callable[..., Any], Any]:
    """Of a module, its gradients clipped by their joint norm."""
    model = cf.functional(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8)).to(D))

    def step(state, batch):
        def loss_fn(params):
            return model.apply(params, model.buffers, batch)[0].square().mean()

        loss, grads = cf.value_and_grad(loss_fn)(state["params"])
        norm = sum(value.square().sum() for value in grads.values()).sqrt()
        factor = torch.clamp(0.05 / (norm + 1e-6), max=1.0)
        speed = {name: 0.9 * value + factor * grads[name] for name, value in state["speed"].items()}
        params = {name: value - 0.1 * speed[name] for name, value in state["params"].items()}
        return {"params": params, "speed": speed}, (loss, norm)

    return step, {"params": model.params, "speed": {name: torch.zeros_like(value) for name, value in model.params.items()}}


def of_joined_gradients() -> tuple[Callable[..., Any], Any]:
    """Of signs of gradients, and what all of them are in one vector; views of them, turned and joined, are no part of the forward pass."""

    def step(params, batch):
        loss, grads = cf.value_and_grad(of_dictionary)(params, batch)
        joined = torch.cat([value.mT.flatten() for value in grads.values()])
        return {name: value - 0.01 * grads[name].sign() for name, value in params.items()}, (loss, joined.norm())

    return step, descent()[1]


@pytest.mark.parametrize("make", [descent, clipped_momentum, of_joined_gradients])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "gpipe"])
@pytest.mark.parametrize("way", WAYS)
def test_updates_by_hand_are_those_of_one_device(way: str, schedule: str, make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    step, state = make()
    mesh, plugins = WAYS[way]
    staged = cf.pipeline(cf.shard(step, mesh, *plugins), microbatches=4, schedule=schedule)
    check(staged, state, torch.randn(ROWS, 8, dtype=D), steps=2)


def test_what_brings_a_gradient_to_its_shards_is_of_the_weight_gradients() -> None:
    """It has the phase of its reader, an update by hand, and reads what backward makes."""
    torch.manual_seed(0)
    step, state = descent()
    staged = cf.pipeline(cf.shard(step, cf.Mesh(pp=2, dp=2, topology="ideal"), zero(1, "dp")), microbatches=4, schedule="zb-h1")
    loop = loop_of(staged.lower(state, torch.randn(ROWS, 8, dtype=D)).program)
    assert loop.timetable is not None
    kinds = dict[str, set[str]]()
    for (_, kind), (begin, end) in zip(loop.timetable.parts, loop.timetable.spans(), strict=True):
        for node in loop.body.nodes[begin:end]:
            kinds.setdefault(node.target, set()).add(kind)
    assert kinds["colofunc.rearrange"] == {"W"}


def test_a_loss_of_gradients_is_refused_in_words() -> None:
    """The hint says nothing of stages where none were given, and what it says to try works."""
    torch.manual_seed(0)
    model = cf.functional(nn.Sequential(net(8, 16), nn.Tanh(), net(16, 1)))

    def step(state, batch):
        def loss_fn(params):
            slopes = torch.func.grad(lambda rows: model.apply(params, model.buffers, rows)[0].sum())(batch)
            return (slopes.norm(dim=1) - 1).square().mean()

        loss, grads = cf.value_and_grad(loss_fn)(state)
        return {name: value - 0.1 * grads[name] for name, value in state.items()}, loss

    batch = torch.randn(ROWS, 8, dtype=D)
    says = r"needs what the backward pass of an earlier stage makes: .* a loss of gradients .* does not\. Try: cf\.accumulate and zero"
    with pytest.raises(PlanError, match=says):
        cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=2).lower(model.params, batch)
    check(cf.accumulate(cf.shard(step, cf.Mesh(dp=2), zero(1, "dp")), microbatches=2), model.params, batch, steps=2)


@pytest.mark.parametrize("asked", ["(pp b) o", "b (pp o)", "(b pp) o"])
@pytest.mark.parametrize("way", ["whole", "zero1"])
def test_results_of_microbatches_are_not_split_over_the_stages(way: str, asked: str) -> None:
    """A value is at one stage in the loop. At another stage, and in a step without a loop, results lie as they are asked to."""
    torch.manual_seed(0)
    mesh, plugins = WAYS[way]

    def step(params, batch):
        hidden = torch.tanh(torch.tanh(batch @ params["up"]) @ params["across"])
        return hidden, hidden @ params["down"]

    def piped(out_specs: Any, microbatches: int = 2) -> Any:
        return cf.pipeline(cf.shard(step, mesh, *plugins, out_specs=out_specs), microbatches=microbatches)

    params, batch = descent()[1], torch.randn(ROWS, 8, dtype=D)
    says = r"out_specs: a result \(test_pipeline_by_hand.* in step\) is to be split along axis 'pp' .*; use another axis"
    for specs in ((asked, None), (None, asked)):
        with pytest.raises(PlanError, match=says):
            piped(specs).lower(params, batch)
        check(piped(specs, microbatches=1), params, batch)
    elsewhere = piped((None, "b o @pp=0"))
    check(elsewhere, params, batch)
    assert elsewhere(params, batch)[1].sharding.at == ("pp", (0,))


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
