"""nn.LSTM in a step: every form of it, on meshes, equal to torch on one device with its gradients, in operators that every device has."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from colofunc_plugins import zero
from torch import Tensor, nn

import colofunc as cf
from colofunc.ops.canonical import single_device

STEPS, SAMPLES, WIDTH, SIZE = 5, 4, 6, 3


def training(net: nn.LSTM, dtype: torch.dtype = torch.float64) -> tuple[Any, ...]:
    """(step, parameters, x, h, c): every output counts, gradients of everything."""
    layers = net.num_layers * (2 if net.bidirectional else 1)
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(*((SAMPLES, STEPS) if net.batch_first else (STEPS, SAMPLES)), WIDTH, generator=gen, dtype=dtype)
    states = [torch.randn(layers, SAMPLES, SIZE, generator=gen, dtype=dtype) for _ in range(2)]
    model = cf.functional(net.to(dtype))

    def step(params: Any, x: Tensor, h: Tensor, c: Tensor) -> Any:
        def loss(params: Any, x: Tensor, h: Tensor, c: Tensor) -> Tensor:
            (out, (h_n, c_n)), _ = model.apply(params, {}, x, (h, c))
            return out.square().sum() + (h_n * 2).sin().sum() + (c_n * 3).cos().sum()

        return cf.value_and_grad(loss, argnums=(0, 1, 2, 3))(params, x, h, c)

    return step, dict(model.params), x, *states


FORMS = [
    dict(bias=bias, bidirectional=both, batch_first=first, num_layers=2 if both == first else 1)
    for bias, both, first in itertools.product((True, False), repeat=3)
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(name for name, on in form.items() if on is True) or "plain")
def test_every_form_equals_torch(form: dict[str, Any]) -> None:
    step, *args = training(nn.LSTM(WIDTH, SIZE, **form))
    low = cf.shard(step, cf.Mesh()).lower(*args)
    assert {n.target for n in low.program.nodes} >= {"colofunc.lstm", "colofunc.lstm_backward"}
    torch.testing.assert_close(full(cf.shard(step, cf.Mesh())(*args)), step(*args), rtol=1e-12, atol=1e-12)


def full(tree: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda x: x.full(), tree)


def test_zero_splits_its_weights() -> None:
    model = cf.functional(nn.LSTM(WIDTH, 4, 2, batch_first=True).double())
    step_fn, state = cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=0.1), lambda y: y[0].sin().mean())
    batch = torch.randn(SAMPLES, STEPS, WIDTH, dtype=torch.float64)
    cf.testing.check(cf.shard(step_fn, cf.Mesh(dp=2), zero(3, "dp")), state, batch, steps=2)


def test_samples_split_and_nothing_changes() -> None:
    step, *args = training(nn.LSTM(WIDTH, SIZE, num_layers=2, bidirectional=True))
    sharded = cf.shard(step, cf.Mesh(dp=2, tp=2, topology="ideal"), in_specs=(None, "s (dp b) i", "l (dp b) h", "l (dp b) h"))
    torch.testing.assert_close(full(sharded(*args)), step(*args), rtol=1e-12, atol=1e-12)
    low = sharded.lower(*args)
    assert low.coverage().fallbacks == ()
    assert all(": b" in node.note for node in low.program.nodes if node.target.startswith("colofunc.lstm"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_dtype_has_operators_of_every_device(dtype: torch.dtype) -> None:
    step, *args = training(nn.LSTM(WIDTH, SIZE), dtype)
    program = cf.shard(step, cf.Mesh()).lower(*args).program
    assert not [node.target for node in program.nodes if "mkldnn" in node.target or "cudnn" in node.target]
    if dtype == torch.float32:
        torch.testing.assert_close(full(cf.shard(step, cf.Mesh())(*args)), step(*args), rtol=1e-5, atol=1e-5)


def test_a_long_sequence_is_few_operators() -> None:
    net = nn.LSTM(WIDTH, SIZE)
    step = cf.shard(lambda x: net(x)[0], cf.Mesh())
    nodes = [len(step.lower(torch.zeros(steps, 2, WIDTH)).program.nodes) for steps in (3, 300)]
    assert nodes[0] == nodes[1]


def test_dropout_between_layers_is_that_of_the_step() -> None:
    net = nn.LSTM(WIDTH, SIZE, 3, dropout=0.5)
    step, *args = training(net)
    sharded = cf.shard(step, cf.Mesh(dp=2), in_specs=(None, "s (dp b) i", None, None))
    with cf.random(7):
        got = full(sharded(*args))
    with cf.random(7):
        want = full(cf.shard(step, cf.Mesh())(*args))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert not torch.equal(got[0], step(*training(net.eval())[1:])[0])


def test_what_is_not_ours_stays_torch_s() -> None:
    """Projections, packed sequences, forward mode; an error of torch's is torch's."""
    net = nn.LSTM(WIDTH, SIZE, proj_size=2).double()
    x = torch.randn(STEPS, SAMPLES, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(cf.shard(lambda x: net(x)[0], cf.Mesh())(x).full(), net(x)[0])
    plain = nn.LSTM(WIDTH, SIZE).double()
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 4, 2, 1]))

    def tangent() -> Tensor:
        return torch.func.jvp(lambda x: plain(x)[0], (x,), (x,))[1]

    want = tangent(), plain(packed)[0].data
    with single_device():
        torch.testing.assert_close((tangent(), plain(packed)[0].data), want)
        with pytest.raises(RuntimeError, match="sequence length"):
            plain(x[:0])


def test_no_second_derivative() -> None:
    net = nn.LSTM(WIDTH, SIZE).double()

    def penalty(x: Tensor) -> Tensor:
        inner = cf.value_and_grad(lambda x: net(x)[0].sum())
        return cf.value_and_grad(lambda x: inner(x)[1].square().sum())(x)[1]

    with pytest.raises(cf.TraceError, match=r"nn\.LSTM has no second derivative"):
        cf.shard(penalty, cf.Mesh()).lower(torch.randn(STEPS, SAMPLES, WIDTH, dtype=torch.float64))
