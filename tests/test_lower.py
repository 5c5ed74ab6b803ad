"""Any plan gives the same numbers: programs lowered under strategies drawn at random, against one device."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

import colofunc as cf
from colofunc.executors.simulated import SimulatedProgram
from colofunc.mesh import Mesh
from colofunc.program.lower import Choice, call_in, call_of, lower
from colofunc.program.tracing.trace import record_local, trace
from colofunc.spec.layout import replicated
from colofunc.spec.parts import join
from colofunc.spec.rules import rule_for, strategies_for
from colofunc.spec.strategies import enumerate_layouts, enumerate_strategies
from colofunc.testing.parts import parts


def lower_at_random(program, mesh, seed):
    """A local program whose strategies and input layouts are drawn at random."""
    draw = random.Random(seed)
    inputs = {i: draw.choice(enumerate_layouts(program.values[i].shape, mesh)) for i in program.inputs}
    choices = []
    for node in program.nodes:
        call, _ = call_of(node, program.values)
        rule = rule_for(call)
        options = enumerate_strategies(call, rule, mesh) + strategies_for(call, mesh)
        choices.append(Choice(draw.choice(options), rule))
    outputs = [replicated(program.values[o].shape) for o in program.outputs]
    return lower(program, choices, inputs, outputs, mesh, record_local)


def run(local, mesh, tensors):
    leaves = iter(tensors)
    shards = [parts(next(leaves), local.values[i].layout, mesh) for i in local.inputs if i not in local.constants]
    outs = SimulatedProgram(local, mesh)(shards)
    return [join(o, local.values[i].layout, mesh) for o, i in zip(outs, local.outputs, strict=True)]


def test_equal_calls_of_a_program_are_one_object():
    program = trace(lambda x, w: (x @ w) @ w, (torch.ones(4, 4), torch.ones(4, 4))).program
    one, two = program.nodes
    (call, ids), (same, other_ids) = call_in(program, one), call_in(program, two)
    assert same is call and call_in(program, one)[0] is call
    assert [(call, ids), (same, other_ids)] == [call_of(node, program.values) for node in program.nodes]


def mlp_step(state, x, y):
    state = {k: v.detach().requires_grad_() for k, v in state.items()}
    h = torch.relu(x @ state["w1"] + state["b1"])
    out = F.layer_norm(h @ state["w2"], (6,), state["g"])
    loss = F.cross_entropy(out, y) + (out * out).mean()
    grads = torch.autograd.grad(loss, list(state.values()))
    return {k: v - 0.1 * g for (k, v), g in zip(state.items(), grads, strict=True)}, loss


def mlp_inputs():
    torch.manual_seed(0)
    f = torch.float64
    shapes = {"w1": (4, 12), "b1": (12,), "w2": (12, 6), "g": (6,)}
    state = {name: torch.randn(shape, dtype=f) for name, shape in shapes.items()}
    return state, torch.randn(8, 4, dtype=f), torch.randint(0, 6, (8,))


@pytest.mark.parametrize("mesh", [Mesh(a=2), Mesh(a=3), Mesh(a=2, b=2)], ids=str)
@pytest.mark.parametrize("seed", range(8))
def test_random_strategies_equal_one_device(mesh, seed):
    args = mlp_inputs()
    traced = trace(mlp_step, args)
    local = lower_at_random(traced.program, mesh, seed)
    got = traced.unpack(run(local, mesh, traced.pack(args)))
    expected = mlp_step(*args)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def test_a_step_in_place_costs_what_was_planned() -> None:
    """An update in place writes what it reads, and an operator with `out=` does not read it."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    step, state = cf.train_step(
        cf.functional(net), cf.adapt(torch.optim.AdamW), loss=lambda out, batch: out.square().mean(), inputs=lambda batch: ((batch,), {})
    )
    low = cf.shard(step, cf.Mesh(topology="a100-40g")).lower(state, torch.randn(4096, 64))
    assert {"colofunc.adamw_", "aten.mul.out"} <= {node.target for node in low.program.nodes}
    assert low.cost().seconds == pytest.approx(low.plan.cost_s, rel=1e-6)
