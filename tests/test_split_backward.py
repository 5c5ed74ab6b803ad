"""Weight gradients apart from input gradients: what one operator computes becomes two where a schedule has I and W."""

from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from colofunc_plugins import experts
from pipelined import loop_of
from test_pipeline import agrees_with_one_device
from test_pipeline_models import mixtral, nodes_of
from torch import nn

import colofunc as cf
from colofunc.compiler.pipeline_stages import StagesOn
from colofunc.compiler.transform import Build
from colofunc.ops.experts import experts as routed
from colofunc.program.passes.split_backward import split_backward
from colofunc.program.tracing.trace import trace

CONVOLUTION, BACKWARD = "aten.convolution_backward.default", "colofunc.experts_backward"
INPUTS, WEIGHTS = "colofunc.experts_input_gradients", "colofunc.experts_weight_gradients"


def convolutions(layers: int = 8, width: int = 4) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    blocks: list[nn.Module] = []
    for index in range(layers):
        blocks += [nn.Conv2d(3 if index == 0 else width, width, 3, padding=1, bias=index % 2 == 0), nn.Tanh()]
    model = cf.functional(nn.Sequential(*blocks).double())
    loss = lambda out, images: out.square().mean()  # noqa: E731
    step, state = cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=1e-3), loss, clip=0.3, inputs=lambda images: ((images,), {}))
    return step, state, torch.randn(8, 3, 6, 6, dtype=torch.float64)


def in_parts(low: Any, target: str) -> set[str]:
    """The kinds of parts that have such nodes."""
    loop = loop_of(low.program)
    kinds = set()
    for index, node in enumerate(loop.body.nodes):
        if node.target == target:
            part = bisect_right(loop.timetable.ends, index)
            kinds.add(loop.timetable.parts[part][1])
    return kinds


def masks(low: Any) -> list[tuple[bool, ...]]:
    """Which gradients each backward of a convolution makes."""
    return [tuple(node.args[-1]) for _, node in nodes_of(low.program) if node.target == CONVOLUTION]


@pytest.mark.parametrize("reads_input", [True, False])
def test_a_gradient_of_inputs_that_nobody_reads_is_not_made_twice(reads_input: bool) -> None:
    def gradients(g: Any, x: Any, w: Any) -> tuple[Any, ...]:
        sizes = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
        dx, dw, _ = torch.ops.aten.convolution_backward(g, x, w, None, *sizes, [True, True, False])
        return (dx, dw) if reads_input else (dw,)

    program = trace(gradients, (torch.randn(2, 4, 3, 3), torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3))).program
    program = attrs.evolve(program, nodes=tuple(attrs.evolve(node, phase="backward") for node in program.nodes))
    made = [node.target for node in split_backward(program).nodes].count(CONVOLUTION)
    assert made == (2 if reads_input else 1)


@pytest.mark.parametrize(("ranks", "schedule"), [(2, "zb-h1"), (2, "zb-v"), (4, "zb-h1"), (4, "zb-v")])
def test_convolutions_with_weight_gradients_apart_train_as_one_device_does(ranks: int, schedule: str) -> None:
    step, state, batch = convolutions()
    low = agrees_with_one_device(cf.pipeline(cf.shard(step, cf.Mesh(pp=ranks)), microbatches=4, schedule=schedule), state, batch)
    assert all(made[0] != any(made[1:]) for made in masks(low)), "one node makes the one or the other"


@pytest.mark.parametrize(
    ("ranks", "axes", "schedule"),
    [pytest.param(2, {}, "zb-v", marks=pytest.mark.sweep), (4, {}, "zb-h1"), (2, {"ep": 2}, "zb-h1")],
)
def test_experts_with_weight_gradients_apart_train_as_one_device_does(ranks: int, axes: dict[str, int], schedule: str) -> None:
    """Where tokens are sent to their experts, gradients of hidden units stay with these until W."""
    step, state, batch = mixtral()
    plans = [experts("ep")] if axes else []
    low = agrees_with_one_device(
        cf.pipeline(cf.shard(step, cf.Mesh(pp=ranks, **axes), *plans), microbatches=4, schedule=schedule), state, batch
    )
    assert in_parts(low, INPUTS) == {"I"} and in_parts(low, WEIGHTS) == {"W"} and not in_parts(low, BACKWARD)


def test_a_schedule_without_weight_parts_leaves_the_backward_whole() -> None:
    step, state, batch = convolutions()
    low = cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=4, schedule="1f1b").lower(state, batch)
    assert sum(made[0] and made[1] for made in masks(low)) == 7, "all but the first, whose input has no gradient"
    step, state, batch = mixtral()
    low = cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=4, schedule="1f1b").lower(state, batch)
    assert in_parts(low, BACKWARD) == {"B"} and not in_parts(low, INPUTS)


def wide_convolutions(schedule: str) -> tuple[Any, Any]:
    """A chain and its step, lowered for four cards that are not here, two layers on each."""
    step, state, _ = convolutions(width=64)
    at = {f"{2 * layer}.*": layer // 2 for layer in range(8)}
    mesh = cf.Mesh(pp=4, topology="4xa100-80g")
    chain = cf.pipeline(cf.shard(step, mesh), microbatches=8, schedule=schedule, stages=at)
    return chain, chain.lower(state, cf.abstract((64, 3, 32, 32), torch.float64))


def costs_of_pieces(chain: Any, low: Any, schedule: str) -> Mapping[str, np.ndarray]:
    """Per kind of part, what the pieces in front of each take, as cuts go by it."""
    known = {"program": low.global_program, "traced": low.traced, "registry": low.registry}
    there = StagesOn(Build(chain.build.transforms, low.priced, **known), "pp", low.registry.schedules[schedule])
    return there.pieces(there.problem()).until


def test_zero_bubble_has_less_of_a_bubble_with_convolutions() -> None:
    """And the costs that cuts go by have the weights' seconds in W: as many as those of inputs, but for what lies
    between the convolutions, and for the first one, whose input has no gradient."""
    bubbles, of_weights, cuts = {}, {}, {}
    for name in ("1f1b", "zb-h1"):
        chain, low = wide_convolutions(name)
        bubbles[name] = low.pipeline().bubble
        until = costs_of_pieces(chain, low, name)
        of_weights[name] = until["W"][-1, 0] / until["I"][-1, 0]
        cuts[name] = low.plan.pipeline.cuts
    assert bubbles["zb-h1"] < 0.7 * bubbles["1f1b"]
    assert of_weights["1f1b"] < 0.2 < 0.5 < of_weights["zb-h1"] < 1.5
    # What one plan says of the other's schedule is what that says of itself.
    for name, other in (("1f1b", "zb-h1"), ("zb-h1", "1f1b")):
        (found,) = (each.count.step_s for each in cuts[name].others if each.name == other)
        assert found == pytest.approx(cuts[other].counted(cuts[other].begins).step_s, rel=1e-12)


def test_pieces_behind_a_backward_pass_cost_the_same_in_the_forward_pass_of_each_schedule() -> None:
    """Two nets, the second on what the first gave, and the first one's gradients in front of it: with these in two
    nodes each, the second net's operators stand further back."""
    torch.manual_seed(0)
    params = {f"{net}{layer}": torch.randn(64, 64 if net == "b" or layer else 3, 3, 3) for net in "ab" for layer in range(4)}

    def step(params: dict[str, torch.Tensor], images: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        total, there, made = torch.zeros(()), images, {}
        for net in "ab":
            weights = {name: each.detach().requires_grad_() for name, each in params.items() if name.startswith(net)}
            for weight in weights.values():
                there = torch.tanh(nn.functional.conv2d(there, weight, padding=1))
            loss = there.square().mean()
            made.update(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
            total, there = total + loss.detach(), there.detach()
        return {name: params[name] - 0.1 * made[name] for name in params}, total

    each = {}
    for name in ("1f1b", "zb-h1"):
        chain = cf.pipeline(cf.shard(step, cf.Mesh(pp=2, topology="4xa100-80g")), microbatches=4, schedule=name)
        until = costs_of_pieces(chain, chain.lower(params, cf.abstract((32, 3, 32, 32), torch.float32)), name)
        each[name] = {kind: np.diff(until[kind], axis=0) for kind in until}
    whole, apart = each["1f1b"], each["zb-h1"]
    assert len(whole["F"]) == 8 and (whole["F"][:, 0] > 0).all()
    np.testing.assert_allclose(apart["F"], whole["F"], rtol=1e-12)
    for net in (0, 4):  # all but the first layer of each, whose input has no gradient
        layers = slice(net + 1, net + 4)
        assert (apart["W"][layers, 0] > 0.5 * apart["I"][layers, 0]).all() and (apart["I"][layers, 0] > 0).all()
        assert not whole["W"][layers].any()


def test_experts_on_the_batch_itself_stay_whole() -> None:
    """Nobody reads the gradients of their inputs: all that they do is for the weights."""
    torch.manual_seed(0)
    shapes = {"up": (4, 16, 8), "down": (4, 8, 8), "out": (8, 8)}
    params = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}

    def step(params: dict[str, torch.Tensor], batch: tuple[torch.Tensor, ...]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        tokens, index, weight = batch
        own = {name: each.detach().requires_grad_() for name, each in params.items()}
        hidden = routed(tokens, index, weight, own["up"], own["down"], None, None, "silu")
        loss = (torch.tanh(hidden) @ own["out"]).square().mean()
        made = torch.autograd.grad(loss, list(own.values()))
        return {name: params[name] - 0.1 * grad for name, grad in zip(own, made, strict=True)}, loss.detach()

    batch = (torch.randn(8, 8, dtype=torch.float64), torch.randint(4, (8, 2)), torch.rand(8, 2, dtype=torch.float64))
    at = {"*up": 0, "*down": 0, "*out": 1}
    low = cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=4, schedule="zb-h1", stages=at).lower(params, batch)
    assert in_parts(low, BACKWARD) == {"W"} and not in_parts(low, INPUTS) and not in_parts(low, WEIGHTS)
