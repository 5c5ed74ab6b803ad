"""Tensors without elements: every operator takes them, and a copy of nothing in another layout leaves the first its own."""

import pytest
import torch
import torch.nn.functional as F

import colofunc as cf

MESH = cf.Mesh(dp=2, tp=3)
OPERATORS = {
    "slice by steps": lambda x: x[..., ::2],
    "slice": lambda x: x[..., 1:],
    "slice_scatter": lambda x: x.slice_scatter(x[..., ::2], -1, 0, None, 2),
    "cat": lambda x: torch.cat([x, x], -1),
    "pad": lambda x: F.pad(x, (1, 1)),
    "roll": lambda x: x.roll(1, -1),
    "flip": lambda x: x.flip(-1),
    "diagonal": lambda x: x.diagonal(),
    "view": lambda x: x.reshape(-1),
    "repeat": lambda x: x.repeat_interleave(2, -1),
    "pointwise": lambda x: F.gelu(x) * 2,
    "sum": lambda x: x.sum(-1),
    "mean": lambda x: x.mean(0),
    "softmax": lambda x: x.softmax(-1),
    "cumsum": lambda x: x.cumsum(-1),
    "sort": lambda x: x.sort(-1).values,
    "matmul": lambda x: x @ x.mT,
    "linear": lambda x: F.linear(x, torch.ones(3, x.shape[1], dtype=x.dtype)),
    "index": lambda x: x[:, torch.zeros(0, dtype=torch.int64)],
    "index_add": lambda x: x.index_add(0, torch.arange(x.shape[0]), x),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "attention": lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
    "loss": lambda x: F.mse_loss(x, x * 2, reduction="sum"),
}


def gradient(operator):
    return lambda x: cf.value_and_grad(lambda x: operator(x).sum())(x)


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_of_nothing(name):
    operator = OPERATORS[name]
    ran = 0
    for shape in ((4, 0), (0, 4)):
        x = torch.randn(shape, dtype=torch.float64)
        for fn in (operator, gradient(operator)):
            try:
                want = fn(x)
            except (RuntimeError, IndexError):  # torch's own word
                continue
            for spec in ("(dp a) (tp b~)", "a (dp b)"):
                cf.testing.compare(cf.shard(fn, MESH, in_specs=(spec,))(x), want)
                ran += 1
    assert ran >= 4


def test_a_slice_by_steps_of_nothing_that_is_sharded():
    x = torch.zeros(3, 6, 3, 0, dtype=torch.float64)
    step = cf.shard(lambda x: x.permute(3, 2, 1, 0).permute(3, 2, 1, 0)[..., ::2], cf.Mesh(tp=6), in_specs=("a (tp b) c e",))
    cf.testing.compare(step(x), x)
