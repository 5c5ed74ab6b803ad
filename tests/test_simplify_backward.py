"""Backward of silu and mish: whole in the trace, with torch's own numbers, and nothing that only looks like it."""

import pytest
import torch
import torch.nn.functional as F

import colofunc as cf


def lowered(fn):
    step = lambda x: cf.value_and_grad(lambda x: fn(x).sum())(x)  # noqa: E731
    return cf.shard(step, cf.Mesh(dp=2), in_specs=("(dp a) b",)), torch.linspace(-4, 4, 24, dtype=torch.float64).reshape(4, 6)


@pytest.mark.parametrize("name", ["silu", "mish"])
def test_it_is_one_operator_with_torchs_numbers(name):
    fn = getattr(F, name)
    step, x = lowered(fn)
    targets = [node.target for node in step.lower(x).program.nodes if node.phase == "backward"]
    assert any(f"{name}_backward" in target for target in targets)
    assert not any(word in target for target in targets for word in ("sigmoid", "softplus", "sub", "tanh"))
    leaf = x.clone().requires_grad_()
    (want,) = torch.autograd.grad(fn(leaf).sum(), leaf)
    torch.testing.assert_close(step(x)[1].full(), want, atol=1e-15, rtol=0)  # ends of rows are not vectorised


@pytest.mark.parametrize(
    "factor",
    [
        lambda x, s: s * (2 + x * (1 - s)),
        lambda x, s: s * (1 + x * (1 - s * s)),
        lambda x, s: s * (1 + (x + 1) * (1 - s)),
        lambda x, s: torch.tanh(x) + x * s * (1 - torch.tanh(x) ** 2),
    ],
)
def test_what_only_looks_like_it_stays(factor):
    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * factor(x, x.sigmoid())

    step, x = lowered(Odd.apply)
    assert not any("_backward" in node.target for node in step.lower(x).program.nodes)
    torch.testing.assert_close(step(x)[1].full(), factor(x, x.sigmoid()))
