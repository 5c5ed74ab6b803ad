"""Layers of experts in float8: against products written out number by number, kernels of a card, and which layers are meant."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from colofunc_plugins import experts as over_experts
from colofunc_plugins import tensor
from quantize_matrix import Mixture, tokens
from torch import Tensor, nn

import colofunc as cf
from colofunc import compat
from colofunc.ops.experts import experts, experts_backward
from colofunc.ops.experts_device import (
    emulated_experts,
    emulated_experts_backward,
    scaled_experts,
    scaled_experts_backward,
)
from colofunc.ops.experts_guards import EXPERTS_KERNELS
from colofunc.ops.grouped_device import emulated, scaled
from colofunc.ops.kernels import A_DEVICE, KernelCall, Like, choose

E4M3 = torch.float8_e4m3fn


def layer(dtype: torch.dtype = torch.float64, transposed: bool = False) -> tuple[Any, ...]:
    """(x, index, weight, gate_up, down, no biases, act, gated, transposed, share, float8); a choice of nobody, an expert without tokens."""
    draw = torch.Generator().manual_seed(0)
    x, gate_up, down = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in ((6, 32), (4, 64, 32), (4, 32, 32)))
    weight = torch.rand(6, 2, generator=draw, dtype=torch.float64)
    index = torch.tensor([[0, 1], [1, 3], [3, 0], [0, -1], [1, 0], [3, 1]])
    x[2] = 0.0  # of whose numbers no scale can be made
    if transposed:
        gate_up, down = (w.transpose(1, 2).contiguous() for w in (gate_up, down))
    x, weight, gate_up, down = (t.to(dtype) for t in (x, weight, gate_up, down))
    return x, index, weight, gate_up, down, None, None, "silu", True, transposed, 1.0, True


def rounded(x: Tensor) -> Tensor:
    """Rows of x as float8 says them: by torch's own cast, with a power of 2 as scale that takes the largest to at most 448."""
    out = x.clone()
    for row in out.reshape(-1, x.shape[-1]):
        largest = float(row.abs().max())
        exponent = 0
        while largest and largest / 2.0**exponent > 448:
            exponent += 1
        while largest and largest / 2.0 ** (exponent - 1) <= 448:
            exponent -= 1
        row.copy_((row / 2.0**exponent).to(torch.float32).to(E4M3).to(row.dtype) * 2.0**exponent)
    return out


def by_hand(x: Tensor, index: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for n in range(x.shape[0]):
        for k in range(index.shape[1]):
            e = int(index[n, k])
            if e < 0:
                continue
            gate, up = (rounded(gate_up[e]) @ rounded(x[n : n + 1])[0]).chunk(2)
            units = F.silu(gate) * up
            out[n] += weight[n, k] * (rounded(down[e]) @ rounded(units[None])[0])
    return out


@pytest.mark.parametrize("transposed", [False, True])
def test_a_layer_is_the_products_of_rounded_rows(transposed: bool) -> None:
    args = layer(transposed=transposed)
    want = by_hand(*layer()[:5])
    torch.testing.assert_close(experts(*args), want, rtol=1e-12, atol=1e-12)
    exact = experts(*args[:-1], False)
    assert 1e-4 < float((want - exact).norm() / exact.norm()) < 0.1


def test_gradients_are_products_of_rounded_rows_and_those_of_weights_are_exact() -> None:
    x, index, weight, gate_up, down, *_ = args = layer()
    g = torch.randn(6, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    dx, dgate_up, ddown, dweight = torch.zeros_like(x), torch.zeros_like(gate_up), torch.zeros_like(down), torch.zeros_like(weight)
    for n in range(6):
        for k in range(2):
            e = int(index[n, k])
            if e < 0:
                continue
            h = (rounded(gate_up[e]) @ rounded(x[n : n + 1])[0]).requires_grad_()
            gate, up = h.chunk(2)
            units = F.silu(gate) * up
            da = rounded(down[e].t()) @ rounded(g[n : n + 1])[0]
            dweight[n, k] = da @ units.detach()
            (dh,) = torch.autograd.grad(units, h, da * weight[n, k])
            dx[n] += rounded(gate_up[e].t()) @ rounded(dh[None])[0]
            dgate_up[e] += torch.outer(dh, x[n])
            ddown[e] += torch.outer(g[n] * weight[n, k], units.detach())
    found = experts_backward(g, *args[:10], True, *args[10:])
    for got, want in zip(found, (dx, dweight, dgate_up, ddown), strict=False):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_kernels_by_tiles_give_the_same_numbers(dtype: torch.dtype, transposed: bool) -> None:
    args = layer(dtype, transposed)
    g = torch.randn(6, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    near = {"rtol": 1e-12, "atol": 1e-12} if dtype is torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    if dtype is torch.float64:
        torch.testing.assert_close(emulated_experts(*args), experts(*args), **near)
        backward = (g, *args[:10], True, *args[10:])
        for got, want in zip(emulated_experts_backward(*backward), experts_backward(*backward), strict=True):
            torch.testing.assert_close(got, want, **near)
    ends = torch.tensor([2, 2, 5, 6], dtype=torch.int32)
    w = args[3] if transposed else args[3].transpose(1, 2)
    want = torch.stack([rounded(args[0][n : n + 1])[0] @ rounded(w[e].t().contiguous()).t() for n, e in enumerate((0, 0, 2, 2, 2, 3))])
    torch.testing.assert_close(emulated(args[0], w, ends), want, **near)


def test_what_is_nobodys_is_zero_though_it_is_not_finite() -> None:
    x, index, weight, *rest = layer()
    x[5], index[5] = torch.inf, -1
    w, ends = rest[0].transpose(1, 2), torch.tensor([2, 2, 4, 5], dtype=torch.int32)
    assert not emulated(x, w, ends)[5].any()
    g = torch.full_like(x, torch.inf)
    g[:5] = x[:5]
    backward = g, x, index, weight, *rest[:7], True, *rest[7:]
    pairs = [(emulated_experts(x, index, weight, *rest), experts(x, index, weight, *rest))]
    pairs += zip(emulated_experts_backward(*backward), experts_backward(*backward), strict=True)
    for got, want in pairs:
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        assert got.isfinite().all()


@pytest.fixture
def torchs_kernel(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Torch's kernel as its own shape function lets it be called, computed in float32. The sizes of its calls."""
    calls: list[tuple[int, ...]] = []

    def kernel(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
        there = [t.to("meta") if t.is_contiguous() else t.transpose(1, 2).to("meta").transpose(1, 2) for t in (a, b, a_scale, b_scale)]
        made = torch._scaled_grouped_mm(*there, offs=ends.to("meta"), out_dtype=dtype)
        out = torch.full((a.shape[0], b.shape[2]), torch.nan, dtype=dtype)  # rows of nobody are not written
        assert made.shape == out.shape and made.dtype == dtype
        first = 0
        for e, end in enumerate(ends.tolist()):
            product = a[first:end].float() @ b[e].float() * a_scale[first:end, None] * b_scale[e]
            out[first:end], first = product.to(dtype), end
        calls.append((*a.shape, b.shape[2]))
        return out

    monkeypatch.setattr(compat, "scaled_grouped_mm", kernel)
    return calls


def test_torchs_kernel_is_given_what_it_takes(torchs_kernel: list[tuple[int, ...]]) -> None:
    args = layer(torch.bfloat16)
    ends = torch.tensor([2, 2, 4, 5], dtype=torch.int32)
    for w in (args[3].transpose(1, 2), args[3].transpose(1, 2).contiguous()):
        got, want = scaled(args[0], w, ends), emulated(args[0], w, ends)
        torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-3)
        assert not got[5].any() and got.isfinite().all()
    g = args[0].flip(0)
    torch.testing.assert_close(scaled_experts(*args), emulated_experts(*args), rtol=2**-6, atol=0.05)
    for got, want in zip(
        scaled_experts_backward(g, *args[:10], True, *args[10:]), emulated_experts_backward(g, *args[:10], True, *args[10:]), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=2**-6, atol=0.05)
    assert torchs_kernel[-3:] == [(12, 32, 64), (12, 32, 32), (12, 64, 32)]  # hidden units, and both gradients of rows


def call(float8: bool, dtype: torch.dtype = torch.bfloat16, d: int = 4096, capability: tuple[int, int] = (9, 0)) -> KernelCall:
    arguments = (
        ("x", Like((8192, d), dtype)), ("index", Like((8192, 2), torch.int64)), ("weight", Like((8192, 2), dtype)),
        ("gate_up", Like((8, 2 * 14336, d), dtype)), ("down", Like((8, d, 14336), dtype)), ("gate_up_bias", None), ("down_bias", None),
        ("act", "silu"), ("gated", True), ("transposed", False), ("share", 1.0), ("float8", float8),
    )  # fmt: skip
    return KernelCall("colofunc.experts", arguments, capability)


def test_the_guards_say_which_kernel_a_layer_gets() -> None:
    table = [kernel for kernel in EXPERTS_KERNELS if kernel.target == "colofunc.experts"]

    def chosen(call: KernelCall) -> str:
        kernel = choose(table, call)
        assert kernel is not None and kernel.workspace_bytes(call) > 0 and kernel.cost_s(call, A_DEVICE) > 0
        return str(kernel.fn.__name__)

    assert chosen(call(True)) == "scaled_experts"
    for other in (call(True, torch.float32), call(True, d=4104), call(True, capability=(8, 9))):
        assert chosen(other) == "emulated_experts"
    assert chosen(call(False)) == "grouped_experts" and chosen(call(False, capability=(8, 0))) == "tiled_experts"


# ---- which layers ----


def training() -> tuple[Any, Any]:
    torch.manual_seed(0)
    return cf.train_step(cf.functional(Mixture()), cf.adapt(torch.optim.SGD, lr=0.1), loss=lambda out: out.square().mean())


def in_float8(step: Any, state: Any) -> list[bool]:
    return [node.args[-1] is True for node in step.lower(state, tokens()).program.nodes if node.target.startswith("colofunc.experts")]


def test_a_layer_is_meant_by_its_weights() -> None:
    step_fn, state = training()
    assert in_float8(cf.fp8(step_fn, where="up.weight"), state) == [False, False]
    assert in_float8(cf.fp8(step_fn, where="experts_*"), state) == [True, True]
    assert in_float8(cf.precision(cf.fp8(step_fn, where="experts_*"), "bf16"), state) == [True, True]
    said = r"cf\.fp8: where= matches 'params\.experts_in', and not the other weight of its layer of experts, .* Try: globs for both"
    with pytest.raises(cf.InputError, match=said):
        cf.fp8(step_fn, where="experts_in").lower(state, tokens())


def test_dispatch_takes_no_pending_sum_either() -> None:
    """Its ways to place the other axes are those of the rule."""
    args = layer()
    samples = {
        "colofunc.experts": cf.testing.sample(*args),
        "colofunc.experts_backward": cf.testing.sample(args[0], *args[:10], True, *args[10:]),
    }
    for target, sample in samples.items():
        done = cf.testing.check_strategies(over_experts("a"), target, sample, meshes=[cf.Mesh(a=2, b=2)])
        assert "{a: dispatch}" in {one.strategy for one in done}


def test_hidden_units_stay_whole_and_no_scale_travels() -> None:
    """Rows have scales of their own: of what experts on ranks tell one another only the lengths of queues are maxima."""
    step_fn, state = training()
    step = cf.fp8(cf.shard(step_fn, cf.Mesh(ep=2, tp=2), over_experts("ep")), where="experts_*")
    program = step.lower(state, tokens()).program
    maxima = [node for node in program.nodes if "reduce" in node.target and "max" in node.args]
    assert not any(program.values[node.refs[0]].dtype.is_floating_point for node in maxima)
    layers = [node for node in program.nodes if node.target == "colofunc.experts"]
    assert layers and all(program.values[node.refs[4]].shape == (2, 128, 32) for node in layers)


@pytest.mark.parametrize(("operand", "shape"), [("g", (5, 32)), ("down", (128, 32))])
def test_a_pending_sum_is_whole_before_it_is_rounded(operand: str, shape: tuple[int, int]) -> None:
    """Rows of the sum of two parts have other scales than the parts have."""
    x, index, weight, gate_up, down, *rest = layer()
    x, index, weight = x[:5], index[:5], weight[:5]  # of tokens that do not divide over the ranks
    draw = torch.Generator().manual_seed(1)
    left, right = (torch.randn(n, 64, generator=draw, dtype=torch.float64) for n in shape)

    def fn(left: Tensor, right: Tensor) -> Tensor:
        product = F.linear(left, right)  # whose summed dim is split: a sum of two parts
        if operand == "g":
            return experts_backward(product, x, index, weight, gate_up, down, *rest[:5], True, *rest[5:])[1]
        return experts(x, index, weight, gate_up, product.reshape(4, 32, 32), *rest)

    step = cf.shard(fn, cf.Mesh(a=2), in_specs=("b (a i)", "o (a i)"))
    torch.testing.assert_close(step(left, right).full(), fn(left, right), rtol=1e-12, atol=1e-12)


class Routed(nn.Module):
    """Experts that are nearly all of the work. `pairs`: whether there are products, too, that tensor parallelism pairs."""

    def __init__(self, pairs: bool) -> None:
        super().__init__()
        self.pair = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)) if pairs else nn.Identity()
        self.router, self.up, self.down = nn.Linear(32, 4), nn.Parameter(torch.randn(4, 512, 32)), nn.Parameter(torch.randn(4, 32, 256))

    def forward(self, x: Tensor) -> Tensor:
        index, weight, _ = cf.moe.route(self.router(x), 2)
        return self.pair(cf.moe.experts(x, index, weight, self.up, self.down))


@pytest.mark.parametrize("pairs", [True, False])
def test_a_plan_that_cannot_split_hidden_units_says_why(pairs: bool) -> None:
    model = cf.functional(Routed(pairs))
    step_fn, state = cf.train_step(model, cf.adapt(torch.optim.SGD, lr=0.1), loss=lambda out: out.square().mean())
    mesh, plan, x = cf.Mesh(tp=2), tensor("1d", "tp"), torch.randn(8, 32)
    cf.shard(step_fn, mesh, plan).lower(state, x)
    said = "; experts in float8 keep their hidden units whole, because a row of them has one scale; try experts('ep') instead, or leave"
    with pytest.raises(cf.PlanError, match=re.escape(said)):
        cf.shard(cf.fp8(step_fn, where=("up", "down")), mesh, plan).lower(state, x)


def test_experts_as_transformers_writes_them() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, vocab_size=64,
        num_local_experts=4, experts_implementation="grouped_mm",
    )  # fmt: skip
    model = cf.functional(transformers.MixtralForCausalLM(config))
    step_fn, state = cf.train_step(model, cf.adapt(torch.optim.SGD, lr=0.1), loss=lambda out: out.loss)
    ids = torch.randint(0, 64, (2, 16))
    batch = {"input_ids": ids, "labels": ids}
    step = cf.fp8(step_fn, where=("*_proj.weight", "*.experts.*_proj"))
    layers = [node for node in step.lower(state, batch).program.nodes if node.target.startswith("colofunc.experts")]
    assert layers and all(node.args[-1] is True for node in layers)
    before = step_fn(state, batch)[1]["loss"]
    assert abs(float(step(state, batch)[1]["loss"]) - float(before)) < 0.02 * float(before)


@pytest.mark.gpu
def test_torchs_kernel_on_a_card_gives_the_emulated_numbers() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a card of the Hopper generation")
    args = layer(torch.bfloat16)
    ends = torch.tensor([2, 2, 4, 5], dtype=torch.int32)
    w = args[3].transpose(1, 2)
    got = scaled(args[0].cuda(), w.cuda(), ends.cuda()).cpu()
    torch.testing.assert_close(got, emulated(args[0], w, ends), rtol=2**-7, atol=1e-3)
