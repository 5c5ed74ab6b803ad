"""What people have inside their steps: derivatives by the batch, calls that name a device, half precision, losses that look at values."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from colofunc_plugins import zero
from torch import nn

import colofunc as cf

GEN = torch.Generator().manual_seed(4)
X = torch.randn(4, 3, generator=GEN, dtype=torch.float64)
MASK = (torch.randn(4, 3, generator=GEN) > 0).double()
CLASSES = torch.tensor([0, 1, 2, 0])


def network() -> cf.Model:
    torch.manual_seed(0)
    return cf.functional(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double())


MODEL = network()


def energy(params: Any, x: torch.Tensor) -> torch.Tensor:
    return MODEL.apply(params, MODEL.buffers, x)[0]


def one(params: Any, x: torch.Tensor) -> torch.Tensor:
    return energy(params, x[None])[0, 0]


# Losses of derivatives by the batch: gradient penalties, forces, Hessians, tangents.
def penalty(params: Any, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(energy(params, x).sum(), x, create_graph=True)
    return ((gradient.norm(dim=-1) - 1) ** 2).mean()


def forces(params: Any, x: torch.Tensor) -> torch.Tensor:
    total, by_x = cf.value_and_grad(lambda x: energy(params, x).sum())(x)
    return (total - 1) ** 2 + (by_x - MASK).square().mean()


def of_samples(params: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(torch.func.grad(lambda x: one(params, x)))(x).square().mean()


def hessians(params: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(torch.func.hessian(lambda x: one(params, x)))(x).square().mean()


def tangents(params: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.func.jvp(lambda x: energy(params, x), (x,), (torch.ones_like(x),))[1].square().mean()


def adversarial(params: Any, x: torch.Tensor) -> torch.Tensor:
    by_x = cf.value_and_grad(lambda x: energy(params, x).square().mean())(x)[1]
    return energy(params, x + 0.1 * by_x.sign().detach()).square().mean()


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("loss", [penalty, forces, of_samples, hessians, tangents, adversarial])
def test_derivatives_by_the_batch_under_zero(loss, stage):
    def step(state, batch):
        value, grads = cf.value_and_grad(lambda params: loss(params, batch["x"]))(state["params"])
        momentum = {name: 0.9 * m + grads[name] for name, m in state["momentum"].items()}
        return {"params": {n: p - 0.1 * momentum[n] for n, p in state["params"].items()}, "momentum": momentum}, value

    state = {"params": MODEL.params, "momentum": {name: torch.zeros_like(p) for name, p in MODEL.params.items()}}
    sharded = cf.shard(step, cf.Mesh(dp=2), zero(stage, "dp"))
    cf.testing.compare(sharded(state, {"x": X}), step(state, {"x": X}))


def test_forward_mode_through_an_operator_without_it_is_refused():
    def attend(x):
        return F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None])

    with pytest.raises(cf.TraceError, match=r"forward-mode derivatives .* at test_trace_inside.py:\d+ in attend .*Try: torch.func.jacrev"):
        cf.shard(lambda x: torch.func.jvp(attend, (x,), (x,))[1], cf.Mesh(dp=1))(X)


def on_default_device(x: torch.Tensor) -> torch.Tensor:
    with torch.device("cuda"):
        return x * torch.ones(3, dtype=x.dtype)


DEVICES = {
    "cuda()": lambda x: x.cuda() * 2,
    "cuda(0)": lambda x: x.cuda(0, non_blocking=True) * 2,
    "to": lambda x: x.to("cuda:1") * 2,
    "to device and dtype": lambda x: x.to("cuda:0", torch.float64) * 2,
    "to(device=)": lambda x: x.to(device=torch.device("cuda", 0), dtype=torch.float64) * 2,
    "to other": lambda x: x.to(torch.zeros(1, device="cuda", dtype=x.dtype)) * 2,
    "cpu": lambda x: x.cpu() * 2,
    "pin_memory": lambda x: x.pin_memory() * 2,
    "factories": lambda x: x * torch.full((3,), 2.0, device="cuda", dtype=x.dtype) + torch.zeros_like(x, device="cuda"),
    "tensor": lambda x: x * torch.tensor([1.0, 2.0, 3.0], device="cuda", dtype=x.dtype),
    "default device": on_default_device,
    "a module without weights": lambda x: nn.ReLU().cuda()(x),
}


def without_device(name: str) -> torch.Tensor:
    by_name = {"tensor": X * torch.tensor([1.0, 2.0, 3.0], dtype=X.dtype), "default device": X, "a module without weights": X.relu()}
    return by_name.get(name, X * 2)


@pytest.mark.parametrize("name", DEVICES)
def test_a_device_that_a_step_names_is_the_one_of_the_mesh(name):
    cf.testing.compare(cf.shard(lambda x: DEVICES[name](x), cf.Mesh(dp=2))(X), without_device(name))


def test_a_module_that_the_step_makes_cannot_be_converted_there():
    with pytest.raises(cf.TraceError, match=r"is converted at test_trace_inside.py:\d+ in .*Try: nn.Linear\(3, 2, dtype="):
        cf.shard(lambda x: nn.Linear(3, 2).double()(x), cf.Mesh(dp=1))(X)


HALF = {
    "linear": lambda x: F.linear(x, torch.ones(2, 3, dtype=x.dtype)),
    "conv": lambda x: F.conv1d(x[None], torch.ones(2, 4, 1, dtype=x.dtype)),
    "layer norm": lambda x: F.layer_norm(x, (3,)),
    "softmax": lambda x: x.softmax(-1),
    "gelu": F.gelu,
    "attention": lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
    "cross entropy": lambda x: F.cross_entropy(x, CLASSES),
    "embedding": lambda x: F.embedding(torch.tensor([0, 1]), x),
    "cumsum": lambda x: x.cumsum(0),
    "mse": lambda x: F.mse_loss(x, x * 2),
    "pool": lambda x: F.max_pool1d(x[None], 2),
    "norm": lambda x: x.norm(),
    "interpolate": lambda x: F.interpolate(x[None, None], scale_factor=2, mode="bilinear"),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", HALF)
def test_half_precision_on_a_cpu(name, dtype):
    def step(x):
        return cf.value_and_grad(lambda x: HALF[name](x).float().square().sum())(x)

    x = X.to(dtype)
    got, want = cf.shard(step, cf.Mesh(dp=2))(x), step(x)
    for mine, reference in zip(got, want, strict=True):
        bound = 8 * torch.finfo(dtype).eps * max(1.0, float(reference.abs().max()))  # a few roundings of the largest value
        torch.testing.assert_close(mine.full(), reference, rtol=0, atol=bound)


LOSSES = {
    "gaussian nll": lambda x: F.gaussian_nll_loss(x, MASK, x.exp()),
    "gaussian nll of a number": lambda x: F.gaussian_nll_loss(x, MASK, 1.0),
    "poisson nll": lambda x: F.poisson_nll_loss(x, MASK, full=True),
    "multi margin": lambda x: F.multi_margin_loss(x, CLASSES),
    "multilabel margin": lambda x: F.multilabel_margin_loss(x, torch.tensor([[0, 2, -1], [1, -1, 0], [2, -1, -1], [0, 1, 2]])),
    "cosine": lambda x: F.cosine_embedding_loss(x, MASK, torch.tensor([1, -1, 1, -1])),
    "triplet": lambda x: F.triplet_margin_loss(x, MASK, x.detach().exp()),
    "hinge": lambda x: F.hinge_embedding_loss(x, MASK * 2 - 1),
    "kl": lambda x: F.kl_div(x.log_softmax(-1), MASK.softmax(-1), reduction="batchmean"),
    "ignored classes": lambda x: F.cross_entropy(x, torch.tensor([0, -100, 2, -100])),
    "lists of sizes": lambda x: torch.stack([part.square().mean() for part in x.split([1, 3])]).sum(),
    "padded": lambda x: nn.utils.rnn.pad_sequence([x[:2], x[1:], x]).square().mean(),
    "repeated": lambda x: x.repeat_interleave(torch.tensor([1, 2, 0, 3]), 0).square().mean(),
    "segments": lambda x: torch.segment_reduce(x, "mean", lengths=torch.tensor([1, 3])).sum(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_take_lists_or_look_at_values(name):
    def step(x):
        return cf.value_and_grad(LOSSES[name])(x)

    cf.testing.compare(cf.shard(step, cf.Mesh(dp=2), in_specs=("(dp a) b",))(X), step(X))


def test_repeats_that_are_inputs_need_the_size_of_the_result():
    def step(x, repeats):
        return cf.value_and_grad(lambda x: x.repeat_interleave(repeats, 0, output_size=6).square().mean())(x)

    repeats = torch.tensor([1, 2, 0, 3])
    sharded = cf.shard(step, cf.Mesh(dp=2))
    cf.testing.compare(sharded(X, repeats), step(X, repeats))
    for other in ([1, 2, 0, 2], [1, 2, 1, 3]):  # torch refuses them too
        with pytest.raises(IndexError):
            sharded(X, torch.tensor(other))
    with pytest.raises(cf.TraceError, match=r"as long as the sum of its repeats.*Try: output_size="):
        cf.shard(lambda x, n: x.repeat_interleave(n, 0), cf.Mesh(dp=2))(X, repeats)


def test_packed_sequences_are_refused_with_the_way_out():
    with pytest.raises(cf.TraceError, match="recurrent layers take padded sequences as they are"):
        cf.shard(lambda x: nn.utils.rnn.pack_padded_sequence(x[:, None], [4]).data, cf.Mesh(dp=1))(X)


def test_what_torch_compile_has_made_runs_as_the_python_that_it_is():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = torch.compile(nn.Linear(3, 8)), nn.Linear(8, 1)

        def forward(self, x):
            return self.last(self.first(x).tanh())

    torch.manual_seed(0)
    model = cf.functional(Net().double())
    tail = torch.compile(lambda x: (x * 2).square().mean())

    def step(params, x):
        return cf.value_and_grad(lambda p: tail(model.apply(p, {}, x)[0]))(params)

    cf.testing.check(cf.shard(step, cf.Mesh(dp=2)), dict(model.params), X)


def by_if(x):
    if not torch.isfinite(x).all():
        raise ValueError("not finite")
    if not (x.dim() > 1 and torch.isfinite(x).any()):
        raise ValueError("nothing finite")
    return x.square().mean()


def by_if_of_two(x):
    if x.dim() > 5 or (x.max() > 1e3 and x.dim() > 1):
        message = f"too large: {x.shape}"
        raise ValueError(message)
    return x.square().mean()


def by_assert(x):
    assert (x.abs() < 1e3).all().item() and not bool(torch.isnan(x).any()), "values"
    return x.square().mean()


@pytest.mark.parametrize("checked", [by_if, by_if_of_two, by_assert])
def test_a_check_that_only_raises_is_left_out_with_a_warning(checked):
    with pytest.warns(UserWarning, match=r"a check of values at test_trace_inside.py:\d+ in by_\w+ raises .*step is without it"):
        low = cf.shard(checked, cf.Mesh(dp=2)).lower(X)
    assert not any("isfinite" in node.target or "isnan" in node.target for node in low.program.nodes)
    cf.testing.compare(cf.shard(checked, cf.Mesh(dp=2))(X), checked(X))


def test_a_condition_that_does_more_than_to_raise_is_refused():
    def clamped(x):
        if not torch.isfinite(x).all():
            x = x.nan_to_num()
        return x.sum()

    with pytest.raises(cf.TraceError, match="data-dependent control flow"):
        cf.shard(clamped, cf.Mesh(dp=2)).lower(X)


def test_a_staged_step_inside_of_another_is_refused_with_the_way_out():
    inner = cf.shard(torch.tanh, cf.Mesh(dp=2))
    with pytest.raises(cf.TraceError, match=r"tanh, which is a staged step itself, is called .* at test_trace_inside.py:\d+ in .*its .fn"):
        cf.shard(lambda x: inner(x) + 1, cf.Mesh(dp=2)).lower(X)
    cf.testing.compare(cf.shard(lambda x: inner.fn(x) + 1, cf.Mesh(dp=2))(X), X.tanh() + 1)
