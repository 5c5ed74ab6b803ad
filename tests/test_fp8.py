"""Training in float8: rounding by brute force, products and gradients by hand, where scales come from, and what is refused."""

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import pytest
import torch
import torch.nn.functional as F
from colofunc_plugins import tensor, zero
from fp8_matrix import SCALINGS, step_of
from quantize_matrix import WHERE, Net, tokens
from rule_oracle import check_op
from torch import nn
from torch.torch_version import TorchVersion

import colofunc as cf
from colofunc.ops.fp8 import (
    CUDA_KERNELS,
    PRODUCTS,
    abs_max,
    fp8_cast,
    fp8_scale,
    scaled_linear,
    scaled_linear_dw,
    scaled_linear_dx,
)
from colofunc.ops.fp8_linear import RECIPES, fp8_linear
from colofunc.ops.kernels import KernelCall, Like, choose
from colofunc.ops.small_floats import E4M3, E5M2, LARGEST


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ---- numbers ----


def nearest(x: float, levels: list[float]) -> float:
    """Of the numbers of a format, in order of their bits, the nearest; of two that are as near, the one with an even last bit."""
    distance = [abs(level - abs(x)) for level in levels]
    least = min(distance)
    bits = [k for k, d in enumerate(distance) if d == least]
    return levels[next((k for k in bits if k % 2 == 0), bits[0])] * (-1 if x < 0 else 1)


@pytest.mark.parametrize("format", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_casts_round_to_the_nearest_and_do_not_overflow(format: torch.dtype, dtype: torch.dtype) -> None:
    every = torch.arange(128, dtype=torch.uint8).view(format).double()
    levels = [level for level in every.tolist() if level < float("inf")]  # in order of bits, and of size
    assert levels == sorted(levels) and levels[-1] == LARGEST[format]
    between = [(a + b) / 2 for a, b in pairwise(levels)]
    halves = torch.tensor(between, dtype=dtype)
    # What is next to a half is beside it in its own dtype, and need not be in a narrower one.
    above, below = (torch.nextafter(halves, torch.full_like(halves, end)).tolist() for end in (math.inf, 0.0))
    sizes = [*levels, *between, *above, *below, *(level * 1.01 for level in levels), LARGEST[format] * 3, 1e-9]
    x = torch.tensor([*sizes, *(-size for size in sizes)], dtype=dtype)
    scale = torch.tensor(0.25, dtype=torch.promote_types(dtype, torch.float32))
    got = fp8_cast(x * 0.25, scale, format).view(format).double()
    assert got.tolist() == [nearest(number, levels) for number in x.tolist()]


def test_what_is_not_finite_is_nan_behind_a_cast() -> None:
    x = torch.tensor([1.0, float("inf"), -float("inf"), float("nan")])
    for format in (E4M3, E5M2):
        assert fp8_cast(x, torch.tensor(1.0), format).view(format).float().isnan().tolist() == [False, True, True, True]
        # What is finite stays so, however small a scale of earlier steps was.
        assert fp8_cast(torch.tensor(1e30), torch.tensor(1e-30), format).view(format).float() == LARGEST[format]


def test_scales_map_the_largest_to_the_largest() -> None:
    amax = torch.tensor([448.0, 1.0, 3.0, 0.0, 1e-45, float("inf")])
    plain, powers = fp8_scale(amax, 448.0, False), fp8_scale(amax, 448.0, True)
    assert plain.tolist()[:2] == [1.0, float(torch.tensor(1.0) / 448)] and powers.tolist()[:3] == [1.0, 2.0**-8, 2.0**-7]
    assert plain.tolist()[3:] == powers.tolist()[3:] == [1.0, 1.0, float("inf")]
    assert fp8_scale(torch.tensor(float("nan")), 448.0, True).isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scales_are_rounded_up_to_powers_of_2(dtype: torch.dtype) -> None:
    powers = torch.tensor([math.ldexp(1.0, k) for k in range(-126, 127)], dtype=dtype)
    above, below = (torch.nextafter(powers, torch.full_like(powers, end)) for end in (math.inf, 0.0))
    assert torch.equal(fp8_scale(powers, 1.0, True), powers) and torch.equal(fp8_scale(powers[5], 1.0, True), powers[5])
    assert torch.equal(fp8_scale(above, 1.0, True), powers * 2) and torch.equal(fp8_scale(below, 1.0, True)[1:], powers[1:])


@pytest.mark.parametrize("dims", [None, (-1,), (0, 1), (0,)])
def test_maxima_are_of_all_dims_or_of_some_that_are_kept(dims: tuple[int, ...] | None) -> None:
    x = draw(3, 4, 5)
    wanted = x.abs().amax() if dims is None else x.abs().amax(dims, keepdim=True)
    assert torch.equal(abs_max(x, dims), wanted)
    assert abs_max(x[:0], dims).numel() == 0 or float(abs_max(x[:0], dims).max()) == 0.0


def test_over_no_dim_each_number_is_the_largest_of_its_own() -> None:
    assert torch.equal(abs_max(draw(5), ()), draw(5).abs())


def test_operators_are_registered_right() -> None:
    x, w, one = draw(2, 3, 16, dtype=torch.float32), draw(8, 16, seed=1, dtype=torch.float32), torch.tensor(1.0)
    bits, weight = fp8_cast(x, one, E4M3), fp8_cast(w, one, E4M3)
    g = fp8_cast(draw(2, 3, 8, seed=2, dtype=torch.float32), one, E5M2)
    rows, columns = torch.ones(2, 3, 1), torch.ones(1, 1, 16)
    for operator, args in (
        (abs_max, (x, None)), (abs_max, (x, (0, 1))), (fp8_scale, (rows, 448.0, True)), (fp8_cast, (x, rows, E4M3)),
        (scaled_linear, (bits, weight, rows, torch.ones(8, 1), torch.ones(8), torch.float32)),
        (scaled_linear, (bits, weight, one, one, None, torch.bfloat16)),
        (scaled_linear_dx, (g, weight, rows, one, E5M2, torch.float32)),
        (scaled_linear_dw, (g, bits, torch.ones(1, 1, 8), columns, E5M2, torch.float32)),
    ):  # fmt: skip
        torch.library.opcheck(operator.op, args, test_utils=("test_schema", "test_faketensor"))


B, I, O = 6, 30, 10


def calls() -> dict[str, tuple[Any, ...]]:
    """Calls of all operators, with scales of tensors, rows and columns."""
    x, w, g, b = draw(2, B, I), draw(O, I, seed=1), draw(2, B, O, seed=2), draw(O, seed=3)
    one = torch.tensor(0.5, dtype=torch.float64)
    xb, wb, gb = fp8_cast(x, one, E4M3), fp8_cast(w, one, E4M3), fp8_cast(g, one, E5M2)
    rows, of_o, of_i = draw(2, B, 1, seed=4).abs() + 1, draw(O, 1, seed=5).abs() + 1, draw(1, 1, I, seed=6).abs() + 1
    f64 = torch.float64
    return {
        "abs_max of all": ("abs_max", x, None),
        "abs_max of rows": ("abs_max", x, (-1,)),
        "abs_max of columns": ("abs_max", x, (0, 1)),
        "fp8_scale": ("fp8_scale", rows, 448.0, True),
        "fp8_cast": ("fp8_cast", x, one, E4M3),
        "fp8_cast by rows": ("fp8_cast", x, rows, E4M3),
        "fp8_cast by columns": ("fp8_cast", x, of_i, E5M2),
        "scaled_linear": ("scaled_linear", xb, wb, one, one, b, f64),
        "scaled_linear by rows": ("scaled_linear", xb, wb, rows, of_o, None, f64),
        "scaled_linear_dx": ("scaled_linear_dx", gb, wb, one, one, E5M2, f64),
        "scaled_linear_dx by rows": ("scaled_linear_dx", gb, wb, rows, of_i[0], E5M2, f64),
        "scaled_linear_dx by rows and one": ("scaled_linear_dx", gb, wb, rows, one, E5M2, f64),
        "scaled_linear_dw": ("scaled_linear_dw", gb, xb, one, one, E5M2, f64),
        "scaled_linear_dw by rows": ("scaled_linear_dw", gb, xb, of_o.view(1, 1, O), of_i, E5M2, f64),
    }


@pytest.mark.parametrize("name", calls())
def test_rules_hold_by_brute_force(name: str) -> None:
    """However dims are cut, joined parts are the whole; every dim can be cut."""
    operator, *args = calls()[name]
    tried = {word for word in check_op(f"colofunc.{operator}", *args) if " " not in word}
    every = {"fp8_scale": "b0 b1", "abs_max": "d0 d1 d2", "fp8_cast": "d0 d1 d2"}
    assert tried == set(every.get(operator, "b0 b1 i o").split())


# ---- products ----


def rounded(x: torch.Tensor, dims: tuple[int, ...] | None, format: torch.dtype, power_of_2: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(numbers in float8, widened; their scale), by hand."""
    amax = x.abs().amax() if dims is None else x.abs().amax(dims, keepdim=True)
    scale = amax / torch.finfo(format).max
    if power_of_2:
        scale = 2.0 ** torch.ceil(torch.log2(scale))
    return (x / scale).to(format).to(x.dtype), scale


def by_hand(scaling: str, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(y, dx, dw, db) of rows x (n, i), weight (o, i), and the gradient g (n, o) of y."""
    if scaling == "tensorwise":
        xq, xs = rounded(x, None, E4M3, False)
        wq, ws = rounded(w, None, E4M3, False)
        gq, gs = rounded(g, None, E5M2, False)
        return xq @ wq.T * xs * ws + b, gq @ wq * gs * ws, gq.T @ xq * gs * xs, g.sum(0)
    xq, xs = rounded(x, (1,), E4M3, True)
    wq, ws = rounded(w, (1,), E4M3, True)
    y = xq @ wq.T * xs * ws.T + b
    gq, gs = rounded(g, (1,), E4M3, True)
    wq, ws = rounded(w, None if scaling == "rowwise_with_gw_hp" else (0,), E4M3, True)
    dx = gq @ wq * gs * ws
    if scaling == "rowwise_with_gw_hp":
        return y, dx, g.T @ x, g.sum(0)
    gq, gs = rounded(g, (0,), E4M3, True)
    xq, xs = rounded(x, (0,), E4M3, True)
    return y, dx, gq.T @ xq * gs.T * xs, g.sum(0)


JUST_IN_TIME = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


@pytest.mark.parametrize("scaling", JUST_IN_TIME)
def test_a_layer_and_its_gradients_are_those_by_hand(scaling: str) -> None:
    x, w, b = (t.requires_grad_() for t in (draw(2, 6, 16), draw(8, 16, seed=1), draw(8, seed=2)))
    g = draw(2, 6, 8, seed=3)
    y = fp8_linear(x, w, b, RECIPES[scaling])
    got = (y, *torch.autograd.grad(y, (x, w, b), g))
    wanted = by_hand(scaling, x.detach().flatten(0, 1), w.detach(), b.detach(), g.flatten(0, 1))
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one.detach(), other.view(one.shape), rtol=1e-12, atol=1e-12)
    exact = F.linear(x, w, b).detach()
    assert 1e-3 < float((y.detach() - exact).norm() / exact.norm()) < 0.1


@pytest.mark.parametrize("scaling", JUST_IN_TIME)
def test_only_what_a_gradient_needs_is_kept(scaling: str) -> None:
    """A frozen weight keeps no activation, and a first layer no weight; of a tensor with one scale a byte for each number is."""
    for trained in ("x", "w"):
        x, w = (t.requires_grad_(name == trained) for name, t in (("x", draw(4, 32)), ("w", draw(16, 32, seed=1))))
        kept: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
            fp8_linear(x, w, None, RECIPES[scaling])
        shapes = {"x": (16, 32), "w": (4, 32)}
        dtype = torch.uint8 if scaling == "tensorwise" else torch.float64
        assert [(tuple(t.shape), t.dtype) for t in kept if t.dim()] == [(shapes[trained], dtype)]


def test_a_second_derivative_is_an_error() -> None:
    x, w = draw(4, 16).requires_grad_(), draw(8, 16, seed=1).requires_grad_()
    y = fp8_linear(x, w, None, RECIPES["tensorwise"])
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(cf.InputError, match=r"gradient of a gradient .* Try: globs in where= that leave out"):
        dx.sum().backward()


# ---- in a step ----


def losses(step_fn: Any, state: Any, count: int) -> list[float]:
    found = []
    for _ in range(count):
        state, metrics = step_fn(state, tokens())
        found.append(float(metrics["loss"]))
    return found


@pytest.mark.parametrize("scaling", SCALINGS)
def test_training_goes_as_it_does_in_float32(scaling: str) -> None:
    step_fn, state = step_of()
    plain = losses(cf.shard(step_fn, cf.Mesh(), donate=()), state, 10)
    narrow = losses(cf.fp8(cf.shard(step_fn, cf.Mesh(dp=2), zero(3, "dp"), donate=()), where=WHERE, scaling=scaling), state, 10)
    assert plain != narrow and plain[-1] < plain[0]
    assert max(abs(a - b) / b for a, b in zip(narrow, plain, strict=True)) < 0.02


def test_microbatches_may_have_scales_of_their_own() -> None:
    step_fn, state = step_of()
    whole = losses(cf.fp8(step_fn, where=WHERE), state, 3)
    step = cf.fp8(cf.accumulate(step_fn, microbatches=2, mixing="per-microbatch"), where=WHERE)
    parts = losses(step, step_of()[1], 3)
    assert parts != whole and max(abs(a - b) / b for a, b in zip(parts, whole, strict=True)) < 0.005


def ways() -> dict[str, Callable[[Any, Any], tuple[torch.Tensor, ...]]]:
    """How gradients of `loss(params, x)` are taken."""

    def backward(loss: Any, params: Any) -> tuple[torch.Tensor, ...]:
        leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
        loss(leaves).backward()
        return tuple(leaf.grad for leaf in leaves.values() if leaf.grad is not None)

    return {
        "value_and_grad": lambda loss, params: tuple(cf.value_and_grad(loss)(params)[1].values()),
        "torch.func": lambda loss, params: tuple(torch.func.grad(loss)(params).values()),
        "backward": backward,
    }


@pytest.mark.parametrize("way", ways())
def test_every_way_to_take_gradients(way: str) -> None:
    params = {"a.weight": draw(16, 32, dtype=torch.float32), "b.weight": draw(4, 16, seed=1, dtype=torch.float32)}
    x = draw(8, 32, seed=2, dtype=torch.float32)

    def step_fn(params: Any, x: torch.Tensor) -> Any:
        def loss(p: Any) -> torch.Tensor:
            return F.linear(torch.tanh(F.linear(x, p["a.weight"])), p["b.weight"]).square().sum()

        return ways()[way](loss, params)

    step = cf.fp8(cf.shard(step_fn, cf.Mesh(dp=2)))
    nodes = [node.target for node in step.lower(params, x).program.nodes]
    assert [nodes.count(name) for name in PRODUCTS] == [2, 1, 2], nodes
    with cf.testing.float64():
        assert cf.testing.check(step, params, x, steps=1).worst <= 1e-10


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("order", ["precision first", "precision last"])
def test_under_precision_casts_read_the_compute_dtype(precision: str, order: str) -> None:
    step_fn, state = step_of()
    if order == "precision first":
        step = cf.fp8(cf.precision(step_fn, precision), where=WHERE)
    else:
        step = cf.precision(cf.fp8(step_fn, where=WHERE), precision)
    program = step.lower(state, tokens()).global_program
    ins = {program.values[node.refs[0]].dtype for node in program.nodes if node.target == "colofunc.fp8_cast"}
    outs = {program.values[node.outs[0]].dtype for node in program.nodes if node.target in PRODUCTS}
    assert ins == outs == {torch.bfloat16 if precision == "bf16" else torch.float16}
    found = losses(step, state, 3)
    assert found[-1] < found[0]


def test_autocast_is_honoured() -> None:
    params, x = {"a.weight": draw(16, 32, dtype=torch.float32)}, draw(8, 32, seed=2, dtype=torch.float32)

    def step_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x, params["a.weight"])

    assert cf.fp8(step_fn)(params, x).dtype is torch.bfloat16


def test_layers_of_other_weights_stay_as_they_are_and_vectors_are_taken() -> None:
    params = {"a.weight": draw(16, 32), "kept": draw(8, 16, seed=1)}

    def step_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(x, params["a.weight"]), params["kept"])

    step = cf.fp8(step_fn)
    nodes = [node.target for node in step.lower(params, draw(32)).program.nodes]
    assert (nodes.count("colofunc.scaled_linear"), nodes.count("colofunc.linear")) == (1, 1)
    hidden = fp8_linear(draw(1, 32), params["a.weight"], None, RECIPES["tensorwise"])
    torch.testing.assert_close(step(params, draw(32)).full(), F.linear(hidden, params["kept"])[0], rtol=1e-12, atol=0)


@pytest.mark.parametrize("order", ["quantize first", "quantize last"])
def test_beside_quantized_weights_and_adapters(order: str) -> None:
    """Frozen weights are packed, or multiplied in float8 where `where=` means them; adapters are trained in float8."""
    torch.manual_seed(0)
    model = cf.lora(cf.functional(nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))), where=("0", "2"), rank=16)
    step_fn, state = cf.train_step(model, cf.adapt(torch.optim.SGD, lr=0.1), loss=lambda out: out.square().mean())
    quantize = {"where": "0.weight"}
    if order == "quantize first":
        step = cf.fp8(cf.quantize(step_fn, "nf4", **quantize), where=("*lora*", "2.weight"))
    else:
        step = cf.quantize(cf.fp8(step_fn, where=("*lora*", "2.weight")), "nf4", **quantize)
    x = draw(4, 128, dtype=torch.float32)
    nodes = [node.target for node in step.lower(state, x).program.nodes]
    assert (nodes.count("colofunc.nf4_linear"), nodes.count("colofunc.scaled_linear"), nodes.count("colofunc.linear")) == (1, 5, 0)
    with cf.testing.float64():
        assert cf.testing.check(step, state, x, steps=2).worst <= 1e-10


def llama() -> tuple[Any, Any, dict[str, torch.Tensor]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=16,
    )  # fmt: skip
    step_fn, state = cf.train_step(cf.functional(LlamaForCausalLM(config)), cf.adapt(torch.optim.SGD, lr=0.1), clip=1.0)
    ids = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(1))
    return step_fn, state, {"input_ids": ids, "labels": ids}


MODEL_SCALINGS = ["rowwise", *(pytest.param(scaling, marks=pytest.mark.sweep) for scaling in SCALINGS if scaling != "rowwise")]


@pytest.mark.parametrize("scaling", MODEL_SCALINGS)
def test_a_model_of_transformers_on_a_mesh(scaling: str) -> None:
    step_fn, state, batch = llama()
    mesh = cf.Mesh(dp=2, tp=2)
    step = cf.fp8(cf.shard(step_fn, mesh, zero(1, "dp"), tensor("1d", "tp")), where="*_proj.weight", scaling=scaling)
    with cf.testing.float64():
        assert cf.testing.check(step, state, batch, steps=2).worst <= 1e-10
    low = step.lower(state, batch)
    split = [node for node in low.program.nodes if node.target == "colofunc.scaled_linear"]
    assert len(split) == 7 and all("tp: " in node.note for node in split), [node.note for node in split]


def test_ranks_tell_one_another_their_largest_number() -> None:
    """Of a column product's rows one number is sent, for the row product's columns too."""
    step_fn, state = step_of()
    step = cf.fp8(cf.shard(step_fn, cf.Mesh(tp=2), tensor("1d", "tp")), where=WHERE)
    low = step.lower(state, tokens())
    sent = [low.program.values[node.outs[0]].shape for node in low.program.nodes if "all_reduce" in node.target and node.args[-1] == "max"]
    assert sent.count(()) == len(sent) >= 3, sent  # both weights, hidden units; the gradient of hidden units


# ---- delayed scaling ----


class Scaled:
    """A layer by hand under delayed scaling: the largest numbers of its operands in the last steps, and their scales."""

    def __init__(self, history: int) -> None:
        self.steps: list[tuple[float, ...]] = []
        self.history = history

    def cast(self, operand: int, x: torch.Tensor, format: torch.dtype) -> tuple[torch.Tensor, float]:
        """(numbers in float8, widened; their scale)."""
        largest = max((step[operand] for step in self.steps[-self.history :]), default=0.0)
        scale = largest / LARGEST[format] or 1.0
        return (x / scale).clamp(-LARGEST[format], LARGEST[format]).to(format).double(), scale

    def multiplied(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        (xq, xs), (wq, ws) = self.cast(0, x, E4M3), self.cast(1, w, E4M3)
        return xq @ wq.T * xs * ws

    def gradient(self, x: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        """Of w; the step ends."""
        (xq, xs), (gq, gs) = self.cast(0, x, E4M3), self.cast(2, g, E5M2)
        self.steps.append(tuple(float(t.abs().max()) for t in (x, w, g)))
        return gq.T @ xq * gs * xs


def one_layer(state: Any, x: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """A step of SGD on one layer, whose loss is half the sum of its squares."""
    loss, grads = cf.value_and_grad(lambda p: F.linear(x, p["w"]).square().sum() / 2)(state["params"])
    return {"params": {"w": state["params"]["w"] - 0.01 * grads["w"]}}, loss


def test_scales_are_those_of_the_steps_before() -> None:
    w, rows = draw(8, 16, seed=1), [draw(4, 16, seed=k) * size for k, size in enumerate((1.0, 0.1, 3.0, 0.2, 0.2))]
    step, state = cf.fp8(cf.shard(one_layer, cf.Mesh(dp=2)), where="w", scaling="delayed", history=2), {"params": {"w": w}}
    by_hand = Scaled(2)
    for x in rows:
        state, loss = step(state, x)
        y = by_hand.multiplied(x, w)
        assert float(loss) == pytest.approx(float(y.square().sum() / 2), rel=1e-6)  # scales are float32
        w = w - 0.01 * by_hand.gradient(x, w, y)
        torch.testing.assert_close(state["params"]["w"].full(), w, rtol=1e-5, atol=1e-5)
    kept = state["fp8"]["amax_history"]["params.w.amax"].full()
    wanted = torch.tensor(by_hand.steps[::-1][:2]).T
    torch.testing.assert_close(kept, wanted, rtol=1e-6, atol=0)


def test_nothing_waits_for_a_scale() -> None:
    """Of what ranks tell one another only the next step reads anything: one number for each operand, all of a layer at once."""
    step_fn, state = step_of()
    usual = cf.Mesh().topology  # where starts are dear, small weights go whole, in one message
    quick = attrs.evolve(usual, levels=tuple(attrs.evolve(level, latency_s=1e-7) for level in usual.levels))
    mesh = cf.Mesh(dp=4, topology=quick)
    low = cf.fp8(cf.shard(step_fn, mesh, zero(3, "dp")), where=WHERE, scaling="delayed").lower(state, tokens())
    sent = [node for node in low.program.nodes if "all_reduce" in node.target and node.args[-1] == "max"]
    assert [low.program.values[node.outs[0]].shape for node in sent] == [(3,), (3,)] and {node.phase for node in sent} == {"update"}
    gathered = [low.program.values[node.refs[0]].dtype for node in low.program.nodes if node.target == "colofunc.all_gather"]
    assert gathered.count(torch.uint8) == 2, gathered  # weights are sent in a byte for each number


def test_other_functions_read_the_scales_and_leave_them() -> None:
    step_fn, state = step_of()
    model = cf.functional(Net())
    train = cf.fp8(cf.shard(step_fn, cf.Mesh(dp=2)), where=WHERE, scaling="delayed")
    state, _ = train(state, tokens())
    before = {name: x.full() for name, x in state["fp8"]["amax_history"].items()}
    assert set(before) == {"params.up.weight.amax", "params.down.weight.amax"}

    def evaluate(state: Any, batch: torch.Tensor) -> torch.Tensor:
        return model.apply(state["params"], model.buffers, batch)[0]

    staged = cf.fp8(cf.shard(evaluate, cf.Mesh(dp=2)), where=WHERE, scaling="delayed")
    plain = cf.shard(evaluate, cf.Mesh(dp=2))({"params": state["params"]}, tokens()).full()
    off = (staged(state, tokens()).full() - plain).abs().max()
    assert 0 < float(off) < 0.1 * float(plain.abs().max())
    assert all(torch.equal(x.full(), before[name]) for name, x in state["fp8"]["amax_history"].items())


def test_the_history_is_saved_with_the_state(tmp_path: Path) -> None:
    step_fn, state = step_of()
    step = cf.fp8(cf.shard(step_fn, cf.Mesh(dp=2), zero(3, "dp"), donate=()), where=WHERE, scaling="delayed")
    state, _ = step(state, tokens())
    cf.save(tmp_path / "state", state)
    again = cf.load(tmp_path / "state", mesh=cf.Mesh(dp=4))
    other = cf.fp8(cf.shard(step_fn, cf.Mesh(dp=4), zero(3, "dp")), where=WHERE, scaling="delayed")
    (one, _), (two, _) = step(state, tokens()), other(again, tokens())
    for name, x in one["fp8"]["amax_history"].items():
        assert x.full()[:, :2].count_nonzero() == 6
        torch.testing.assert_close(two["fp8"]["amax_history"][name].full(), x.full(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["tuple", "record"])
@pytest.mark.parametrize("precision", [None, "fp16"])
def test_states_of_other_kinds(kind: str, precision: str | None) -> None:
    def inner(state: Any, x: torch.Tensor) -> Any:
        w = state[0] if kind == "tuple" else state.w
        loss, g = cf.value_and_grad(lambda w: F.linear(x, w).square().mean())(w)
        return ((w - 0.1 * g,) if kind == "tuple" else state._replace(w=w - 0.1 * g)), loss

    state: Any = (draw(16, 16, dtype=torch.float32),)
    if kind == "record":
        state = Kept(state[0])
    step = cf.fp8(inner, where="0" if kind == "tuple" else "w", scaling="delayed")
    step = step if precision is None else cf.precision(step, precision)
    found = []
    for _ in range(3):
        state, loss = step(state, draw(8, 16, dtype=torch.float32))
        found.append(float(loss))
    record = state[-1] if kind == "tuple" else state.fp8
    assert found[2] < found[1] and next(iter(record["amax_history"].values())).full()[:, :3].count_nonzero() == 9
    assert len(state) == {"tuple": 2, "record": 3}[kind] + (kind == "tuple" and precision is not None)


class Kept(NamedTuple):
    w: torch.Tensor
    loss_scale: Any = None
    fp8: Any = None


def test_a_step_that_overflows_teaches_nothing() -> None:
    """float16 with a loss scale that is far too large: the step is skipped, and the next one is not spoilt."""
    step_fn, state = step_of()
    step = cf.fp8(cf.precision(step_fn, "fp16"), where=WHERE, scaling="delayed")
    state, _ = step(state, tokens())
    huge = {**state, "loss_scale": {**state["loss_scale"], "scale": torch.tensor(2.0**40)}}
    state, _ = step(huge, tokens())
    assert float(state["loss_scale"]["scale"]) == 2.0**39 and int(state["loss_scale"]["skipped"]) == 1
    assert all(bool(x.full().isfinite().all()) for x in state["fp8"]["amax_history"].values())
    state, metrics = step({**state, "loss_scale": {**state["loss_scale"], "scale": torch.tensor(1.0)}}, tokens())
    assert int(state["loss_scale"]["skipped"]) == 0 and math.isfinite(float(metrics["loss"]))


def test_what_delayed_scaling_has_no_place_for_is_named() -> None:
    step_fn, state = step_of()
    state, _ = cf.fp8(step_fn, where=WHERE, scaling="delayed", history=4)(state, tokens())
    said = r"cf\.fp8\(history=8\): the state has largest numbers of 4 steps\. Try: history=4; a state without"
    with pytest.raises(cf.InputError, match=said):
        cf.fp8(step_fn, where=WHERE, scaling="delayed", history=8)(state, tokens())
    with pytest.raises(cf.InputError, match=r"keeps largest numbers in the state, which is of type Tensor here\. Try: a dict or tuple"):
        cf.fp8(lambda w, x: F.linear(x, w), where="w", scaling="delayed")(draw(4, 4), draw(4, 4))
    model = cf.lora(cf.functional(Net()), where=("up",), rank=4)
    adapters, lora_state = cf.train_step(model, cf.adapt(torch.optim.SGD, lr=0.1), loss=lambda out: out.square().mean())
    said = r"'up\.weight' is no weight of the state, which keeps .* Try: globs in where= that leave it out"
    with pytest.raises(cf.InputError, match=said):
        cf.fp8(adapters, where="up.weight", scaling="delayed")(lora_state, tokens())


OWN = {
    "dict": ({"w": torch.ones(2, 2)}, r"keys \['w'\]"),
    "empty": ({}, r"keys \[\]"),
    "tensor": (torch.ones(2, 2), "type Tensor"),
}


@pytest.mark.parametrize(("own", "has"), OWN.values(), ids=OWN)
def test_a_state_with_something_else_under_the_key_is_named(own: Any, has: str) -> None:
    def inner(state: Any, x: torch.Tensor) -> Any:
        return state, F.linear(x, state["w"]).sum()

    keys = r"where a transform keeps a record with the keys \['amax_history'\]\. Try: another key than 'fp8'"
    with pytest.raises(cf.InputError, match=rf"the state has a 'fp8' of its own, of {has}, {keys}"):
        cf.fp8(inner, where="w", scaling="delayed")({"w": draw(16, 16), "fp8": own}, draw(8, 16))
    keys = r"where a transform keeps a record with the keys \['scale', 'good', 'skipped'\]\. Try: another key than 'loss_scale'"
    with pytest.raises(cf.InputError, match=rf"the state has a 'loss_scale' of its own, of {has}, {keys}"):
        cf.precision(inner, "fp16")({"w": draw(16, 16, dtype=torch.float32), "loss_scale": own}, draw(8, 16, dtype=torch.float32))


# ---- on a card ----


def call_of(
    target: str, dtype: torch.dtype = torch.bfloat16, batch: tuple[int, ...] = (4, 16), i: int = 32, o: int = 48, rows: bool = False,
    capability: tuple[int, int] = (9, 0),
) -> KernelCall:  # fmt: skip
    """A call as guards see it. `rows`: scales are of rows and columns."""
    x, w, g = Like((*batch, i), torch.uint8), Like((o, i), torch.uint8), Like((*batch, o), torch.uint8)
    shapes = {"x_scale": (*batch, 1), "w_scale": (o, 1), "g_scale": (*batch, 1)}
    scales = {name: Like(shape if rows else (), torch.float32) for name, shape in shapes.items()}
    return KernelCall(target, tuple({"x": x, "w": w, "g": g, "dtype": dtype, **scales}.items()), capability)


@pytest.mark.parametrize("target", PRODUCTS)
@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ({}, True),
        ({"dtype": torch.float32}, True),
        ({"rows": True}, True),
        ({"capability": (8, 9)}, True),
        ({"capability": (8, 0)}, False),
        ({"rows": True, "capability": (8, 9)}, False),
        ({"rows": True, "dtype": torch.float32}, False),
        ({"dtype": torch.float64}, False),
        ({"i": 24, "o": 24}, False),
        ({"batch": (0,)}, False),
    ],
)
def test_a_card_multiplies_what_its_product_takes(target: str, options: dict[str, Any], taken: bool) -> None:
    """Other shapes, dtypes and cards have the product in a wider dtype. (Not run on a card: what is tried here is the choice.)"""
    call = call_of(target, **options)
    chosen = choose([kernel for kernel in CUDA_KERNELS if kernel.target == target], call)
    assert chosen is not None and chosen.fn.__name__.endswith("_cuda") == taken


@pytest.mark.parametrize("scaling", JUST_IN_TIME)
def test_what_a_card_runs_gives_the_same_numbers(scaling: str) -> None:
    """Its code on the CPU, where torch has the product as well, if with another order of sums."""
    recipe, rows = RECIPES[scaling], scaling != "tensorwise"
    if rows and TorchVersion(torch.__version__) < "2.12":
        pytest.skip("torch 2.11 has no product on the CPU whose scales are of rows")
    dtype = torch.bfloat16 if rows else torch.float32
    x, w, g, b = (draw(*shape, seed=k, dtype=torch.float32) for k, shape in enumerate(((4, 16, 32), (48, 32), (4, 16, 48), (48,))))
    along, across = (-1,) if rows else None, (0,) if scaling == "rowwise" else None
    over_batch = (0, 1) if rows else None
    (xb, xs), (wb, ws) = recipe.cast(x, along), recipe.cast(w, along)
    (gb, gs), (wc, wcs) = recipe.cast(g, along, recipe.g_dtype), recipe.cast(w, across)
    (gc, gcs), (xc, xcs) = recipe.cast(g, over_batch, recipe.g_dtype), recipe.cast(x, over_batch)
    calls = [(xb, wb, xs, ws, b.to(dtype), dtype), (gb, wc, gs, wcs, recipe.g_dtype, dtype), (gc, xc, gcs, xcs, recipe.g_dtype, dtype)]
    for target, args in zip(PRODUCTS, calls, strict=True):
        fast, slow = (kernel.fn for kernel in CUDA_KERNELS if kernel.target == target)
        # Sums in another order, each rounded to 24 bits; results in bfloat16 may then be rounded to either side.
        torch.testing.assert_close(fast(*args), slow(*args), rtol=0 if dtype is torch.float32 else 2**-7, atol=2e-5)


def test_a_batch_that_a_weights_gradient_sums_over_is_a_multiple_too() -> None:
    by_rows = {name: choose([k for k in CUDA_KERNELS if k.target == name], call_of(name, batch=(3, 5))) for name in PRODUCTS}
    assert [kernel is not None and kernel.fn.__name__.endswith("_cuda") for kernel in by_rows.values()] == [True, True, False]


# ---- what is refused ----


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"scaling": "row"}, r"there is no scaling 'row'.*(rowwise|tensorwise)"),
        ({"scaling": 3}, r"there is no scaling 3"),
        ({"scaling": ["rowwise"]}, r"there is no scaling \[.rowwise.\]"),
        ({"scaling": "delayed", "history": 0}, r"history=0\): the number of steps .* Try: history=16"),
        ({"where": ()}, r"where=\(\)\): give a glob over names of weights, or several\. Try: where='\*\.weight'"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(cf.InputError, match=said):
        cf.fp8(step_of()[0], **options)


@pytest.mark.parametrize("glob", ["upp.weight", "table.weight"])
def test_a_glob_that_no_linear_layer_reads_is_named(glob: str) -> None:
    step_fn, state = step_of()
    step = cf.fp8(cf.shard(step_fn, cf.Mesh(dp=2)), where=("up.weight", glob))
    with pytest.raises(cf.InputError, match=rf"where='{glob}' matches no weight that a linear layer or experts of the step read"):
        step.lower(state, tokens())


def test_it_is_a_decorator() -> None:
    step_fn, state = step_of()
    low = cf.fp8(where=WHERE, scaling="rowwise")(step_fn).lower(state, tokens())
    assert [node.target for node in low.program.nodes].count("colofunc.scaled_linear_dw") == 2


def test_weights_are_found_in_any_argument() -> None:
    torch.manual_seed(0)
    model = cf.functional(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)))
    moments, x = {name: torch.zeros_like(value) for name, value in model.params.items()}, torch.randn(16, 64)

    def step(params, x):
        return cf.value_and_grad(lambda p: model.apply(p, {}, x)[0].square().mean())(params)

    want = cf.fp8(step)(model.params, x)[0].full()
    assert torch.equal(cf.fp8(lambda x, moments, params: step(params, x))(x, moments, model.params)[0].full(), want)
    plain = {name: value.clone() for name, value in model.params.items()}
    assert torch.equal(cf.fp8(lambda x, params: step(params, x))(x, plain)[0].full(), want)
