"""Meshes, programs and their loops that tests of accumulation share."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import colofunc as cf
from colofunc.program.ir import Loop, Program

MESHES = {
    "one": cf.Mesh(),
    "dp": cf.Mesh(dp=2, topology="ideal"),
    "tp": cf.Mesh(tp=2, topology="ideal"),
    "dp tp": cf.Mesh(dp=2, tp=2, topology="ideal"),
}


def loops(program: Program) -> list[Loop]:
    return [node.loop for node in program.nodes if node.loop is not None]


def regression(reduction="mean"):
    """A step on plain tensors: two inputs, a squared loss, gradient descent."""
    torch.manual_seed(0)
    state = {"w": torch.randn(6, 4, dtype=torch.float64), "b": torch.zeros(4, dtype=torch.float64)}
    x, y = torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)

    def step(state, x, y):
        def loss_of(params):
            return F.mse_loss(torch.tanh(x @ params["w"] + params["b"]), y, reduction=reduction)

        loss, grads = cf.value_and_grad(loss_of)(state)
        return {k: v - 0.1 * grads[k] for k, v in state.items()}, loss

    return step, state, (x, y)
