"""Kinds of step functions: what people write beside models from libraries, each equal to one device on several meshes."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import colofunc as cf
from colofunc.testing import check, float64

D = torch.float64
MESHES = {
    "2x2": cf.Mesh(dp=2, tp=2, topology="ideal"),
    "2x2x2": cf.Mesh(a=2, b=2, c=2, topology="ideal"),
    "3": cf.Mesh(x=3, topology="ideal"),
}


def r(*shape):
    return torch.randn(*shape, dtype=D, generator=torch.Generator().manual_seed(sum(shape) + 7 * len(shape)))


def sgd(loss):
    """A training step: one step of gradient descent on `loss(params, *batch)`."""

    def step(state, *batch):
        value, grads = cf.value_and_grad(loss)(state, *batch)
        return {k: v - 0.1 * grads[k] for k, v in state.items()}, value

    return step


def module(net, out=lambda y: y):
    """(step, params) that trains a module on the mean square of its output."""
    torch.manual_seed(0)
    model = cf.functional(net.double())
    return sgd(lambda p, x: out(model.apply(p, {}, x)[0]).pow(2).mean()), dict(model.params)


def in_place(p, x):
    h = x @ p["w"]
    h[:, 1:] += 1
    h[0].mul_(2)
    m = h.clone()
    m.masked_fill_(m < 0, 0)
    return m.sum()


def experts(p, x):
    gate = (x @ p["r"]).softmax(-1)
    v, i = gate.topk(2, -1)
    v = v / v.sum(-1, keepdim=True)
    y = torch.einsum("td,edf->tef", x, p["w1"]).relu()
    y = torch.einsum("tef,efd->ted", y, p["w2"])
    return (torch.zeros_like(gate).scatter(1, i, v).unsqueeze(-1) * y).sum(1).pow(2).mean()


def unrolled(p, x):
    h = torch.zeros(4, 8, dtype=D)
    for t in range(5):
        h = torch.tanh(x[:, t] @ p["w"] + h @ p["u"])
    return h.pow(2).mean()


def second_order(p, x):
    (g,) = torch.autograd.grad((x @ p["w"]).tanh().sum(), p["w"], create_graph=True)
    return g.pow(2).sum()


def normed(p, x):
    return F.group_norm(F.conv2d(x, p["w"], padding=1), 2, p["g"]).relu().pow(2).mean()


def func_grad(state, x):
    return {"w": state["w"] - 0.1 * torch.func.grad(lambda w: (x @ w).tanh().sum())(state["w"])}, x.sum()


def statistics(state, x):
    return state, torch.isfinite(x).all(), x.argmax(), x.var(), x.std(0), x.median(), x.logsumexp(0)


def scatter_add(p, x, i):
    return torch.zeros(16, 8, dtype=D).index_add(0, i, x @ p["w"]).pow(2).sum()


def solve(p, x):
    return torch.linalg.solve(x @ x.mT + 5 * torch.eye(3, dtype=D), p["b"]).sum()


def odd(p, x):
    return F.cross_entropy((x @ p["a"]).relu() @ p["b"], torch.arange(7) % 5)


def windows(state, x):
    """What becomes of a state that nobody reads any more is written into its memory, also by operators that move and multiply."""
    before = state["rows"] * 1.0
    new = {"rows": torch.cat([before[:, 1:], x[:, :1]], 1), "pair": torch.stack([x, x.exp()], 2), "sums": x.cumsum(1)}
    return {**new, "product": x[:, None] * x[:, :, None] @ x[..., None]}, before.sum()


def windows_state():
    return {"rows": r(8, 6), "pair": r(8, 6, 2), "sums": r(8, 6), "product": r(8, 6, 1)}


def ids(high, *shape):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(1))


def bag(p, i):
    return F.embedding_bag(i, p["w"], mode="mean").pow(2).sum()


def kinds():
    """name -> (step, state, *batch)"""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.1), 2)
    return {
        "einsum": (sgd(lambda p, x: torch.einsum("bsd,hde->bhse", x, p["w"]).pow(2).mean()), {"w": r(4, 6, 2)}, r(4, 8, 6)),
        "torch.func.grad": (func_grad, {"w": r(6, 4)}, r(8, 6)),
        "lstm": (*module(nn.LSTM(6, 8, batch_first=True), lambda y: y[0]), r(4, 3, 6)),
        "bidirectional gru": (*module(nn.GRU(6, 8, batch_first=True, bidirectional=True), lambda y: y[0]), r(4, 3, 6)),
        "encoder with dropout": (*module(encoder), r(4, 6, 8)),
        "fft": (sgd(lambda p, x: torch.fft.rfft(x * p["w"], dim=-1).abs().mean()), {"w": r(8)}, r(4, 8)),
        "topk": (sgd(lambda p, x: (x @ p["w"]).topk(2, -1).values.sum()), {"w": r(6, 8)}, r(8, 6)),
        "sort": (sgd(lambda p, x: ((x @ p["w"]).sort(-1).values * torch.arange(8)).sum()), {"w": r(6, 8)}, r(8, 6)),
        "cumsum": (sgd(lambda p, x: (x @ p["w"]).cumsum(0).pow(2).mean()), {"w": r(6, 8)}, r(8, 6)),
        "embedding bag": (sgd(bag), {"w": r(16, 8)}, ids(16, 4, 6)),
        "sparse gradients": (sgd(lambda p, i: F.embedding(i, p["w"], sparse=True).pow(2).sum()), {"w": r(16, 8)}, ids(16, 4, 6)),
        "new values in old memory": (windows, windows_state(), r(8, 6)),
        "index_add": (sgd(scatter_add), {"w": r(6, 8)}, r(12, 6), ids(16, 12)),
        "transposed convolution": (
            sgd(lambda p, x: F.conv_transpose2d(x, p["w"], stride=2).pow(2).mean()), {"w": r(4, 8, 2, 2)}, r(4, 4, 5, 5),
        ),
        "group norm": (sgd(normed), {"w": r(8, 4, 3, 3), "g": r(8)}, r(4, 4, 6, 6)),
        "interpolate": (
            sgd(lambda p, x: F.interpolate(F.conv2d(x, p["w"]), scale_factor=2, mode="bilinear").pow(2).mean()),
            {"w": r(8, 4, 1, 1)}, r(4, 4, 6, 6),
        ),
        "in-place writes": (sgd(in_place), {"w": r(6, 8)}, r(8, 6)),
        "dims that do not divide": (sgd(odd), {"a": r(5, 9), "b": r(9, 5)}, r(7, 5)),
        "batched solve": (sgd(solve), {"b": r(3, 2)}, r(4, 3, 3)),
        "dense experts": (sgd(experts), {"r": r(6, 4), "w1": r(4, 6, 8), "w2": r(4, 8, 6)}, r(16, 6)),
        "unrolled recurrence": (sgd(unrolled), {"w": r(6, 8), "u": r(8, 8)}, r(4, 5, 6)),
        "second derivatives": (sgd(second_order), {"w": r(6, 4)}, r(8, 6)),
        "vmap": (sgd(lambda p, x: torch.vmap(lambda a: (a @ p["w"]).tanh().sum())(x).pow(2).sum()), {"w": r(6, 4)}, r(8, 6)),
        "statistics": (statistics, {"w": r(2)}, r(8, 6)),
    }  # fmt: skip


NAMES = tuple(kinds())


def equal_on(mesh, name):
    with float64():
        fn, state, *batch = kinds()[name]
        assert check(cf.shard(fn, mesh), state, *batch, steps=2).leaves >= 2


@pytest.mark.parametrize("name", NAMES)
def test_kind_equals_one_device(name):
    equal_on(MESHES["2x2"], name)


@pytest.mark.sweep
@pytest.mark.parametrize("mesh", ["2x2x2", "3"])
@pytest.mark.parametrize("name", NAMES)
def test_kind_equals_one_device_on_more_meshes(mesh, name):
    equal_on(MESHES[mesh], name)
