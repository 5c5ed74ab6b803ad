"""Products of inputs and weights in float8: against loops over Python's numbers, on ranks, and what a card is asked."""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from colofunc_plugins import tensor
from pretended import Machine
from quantize_matrix import WHERE, step_of, tokens
from rule_oracle import check_op
from torch import Tensor, nn
from torch.torch_version import TorchVersion

import colofunc as cf
from colofunc import compat
from colofunc.ops.fp8 import linear_cuda, scaled_linear
from colofunc.ops.fp8_products import CUDA_KERNELS, FORMS, PRODUCT, rounded_linear, scaled_groups_linear
from colofunc.ops.kernels import A_DEVICE, KernelCall, Like, choose
from colofunc.ops.quantized import Quantized
from colofunc.ops.quantizers import BUILT_IN
from colofunc.ops.small_floats import E4M3
from colofunc.program.passes.kernels import rates_of

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SCHEMES = {"fp8": "fp8-dynamic", "fp8_g128": "fp8-g128-dynamic"}
COLUMNS = 384


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def layer(form: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Quantized, Tensor]:
    """(x, a weight, a bias); groups of x are of different sizes, one row is of zeros, and one group of another."""
    x = random(2, 3, COLUMNS)
    x[..., 128:256] *= 100
    x[..., 7] *= 40
    x[0, 1], x[1, 2, 256:] = 0.0, 0.0
    return x.to(dtype), BUILT_IN[SCHEMES[form]].pack(random(16, COLUMNS, seed=1)), random(16, seed=2).to(dtype)


# ---- numbers ----

LEVELS = torch.arange(127, dtype=torch.uint8).view(E4M3).tolist()  # in order of bits, and of size


def nearest(number: float) -> float:
    """Of the numbers of e4m3 the nearest; of two that are as near, the one whose last bit is even."""
    size = min(abs(number), LEVELS[-1])
    above = bisect_left(LEVELS, size)
    place = min((max(0, above - 1), above), key=lambda place: (abs(LEVELS[place] - size), place % 2))
    return math.copysign(LEVELS[place], number)


def by_hand(x: Tensor, weight: Quantized, bias: Tensor) -> Tensor:
    """A layer on one row x (i,), number by number, in Python's floats."""
    width = weight.format.group if weight.format.group > 1 else x.shape[0]
    numbers = weight.data.view(E4M3).tolist()
    scales = weight.scale.reshape(weight.shape[0], -1).tolist()
    out = [0.0] * weight.shape[0]
    for group in range(x.shape[0] // width):
        columns = slice(group * width, (group + 1) * width)
        some = x[columns].tolist()
        scale = max(abs(number) for number in some) / 448.0 or 1.0
        rounded = [nearest(number / scale) for number in some]
        for row in range(len(out)):
            total = sum(a * b for a, b in zip(rounded, numbers[row][columns], strict=True))
            out[row] += total * scale * scales[row][group]
    return torch.tensor(out, dtype=torch.float64) + bias.double()


@pytest.mark.parametrize("form", FORMS)
def test_a_layer_is_that_of_a_loop_over_numbers(form: str) -> None:
    x, weight, bias = layer(form)
    wanted = torch.stack([by_hand(row, weight, bias) for row in x.flatten(0, 1)]).view(2, 3, 16)
    torch.testing.assert_close(rounded_linear(x, bias, *weight.parts, form), wanted, rtol=1e-12, atol=1e-12)
    off = (wanted - F.linear(x, weight.dequantize(torch.float64), bias)).norm() / wanted.norm()
    assert 1e-3 < float(off) < 0.05, "inputs are rounded, and not by more than 3 bits do"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_in_narrow_dtypes_the_same_numbers_are_added(form: str, dtype: torch.dtype) -> None:
    """Bits and scales of rows are those of exact division but where a quotient is at the edge; sums are float32's."""
    x, weight, bias = layer(form, dtype)
    got = rounded_linear(x, bias, *weight.parts, form)
    wanted = rounded_linear(x.double(), bias.double(), *weight.parts, form)
    eps = torch.finfo(dtype).eps
    assert got.dtype is dtype
    # A number that is rounded to the other side is off by 2^-3 of itself, of 384 that are added.
    torch.testing.assert_close(got.double(), wanted, rtol=max(eps, 1e-6), atol=float(wanted.abs().max()) * max(2 * eps, 1e-6))


def test_a_group_has_a_scale_of_its_own() -> None:
    """Columns a hundred times as large as others take their digits under one scale, and none under scales of groups."""
    found = {}
    for form in FORMS:
        x, weight, _ = layer(form)
        x[..., :128] /= 1e4
        weight_of_small = weight.dequantize(torch.float64)
        weight_of_small[:, 128:] = 0.0
        packed = BUILT_IN[SCHEMES[form]].pack(weight_of_small)
        exact = F.linear(x, packed.dequantize(torch.float64))
        found[form] = float((rounded_linear(x, None, *packed.parts, form) - exact).norm() / exact.norm())
    assert found["fp8_g128"] < 0.05 < 0.3 < found["fp8"], found


@pytest.mark.parametrize("form", FORMS)
def test_a_rows_result_depends_on_this_row_only(form: str) -> None:
    x, weight, bias = layer(form)
    alone = torch.stack([torch.stack([rounded_linear(row, bias, *weight.parts, form) for row in rows]) for rows in x])
    torch.testing.assert_close(rounded_linear(x, bias, *weight.parts, form), alone, rtol=1e-13, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_seen_behind_the_product(form: str, wrong: float) -> None:
    x, weight, bias = layer(form)
    x[1, 2, 4] = wrong
    found = rounded_linear(x, bias, *weight.parts, form).isfinite()
    assert not found[1, 2].any() and found[0].all() and found[1, :2].all()


@pytest.mark.parametrize("form", FORMS)
def test_rows_and_weights_of_nothing(form: str) -> None:
    x, weight, bias = layer(form)
    assert rounded_linear(x[:0], bias, *weight.parts, form).shape == (0, 3, 16)
    assert rounded_linear(x, bias[:0], *(part[:0] for part in weight.parts), form).shape == (2, 3, 0)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_a_layer_that_does_not_round(form: str) -> None:
    x, weight, bias = layer(form)
    x, bias, g = x.requires_grad_(), bias.requires_grad_(), random(2, 3, 16, seed=3)
    wanted = torch.autograd.grad(F.linear(x, weight.dequantize(torch.float64), bias), (x, bias), g)
    found = torch.autograd.grad(rounded_linear(x, bias, *weight.parts, form), (x, bias), g)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)
    by_func = torch.func.grad(lambda x: (rounded_linear(x, None, *weight.parts, form) * g).sum())(x.detach())
    torch.testing.assert_close(by_func, wanted[0], rtol=1e-13, atol=1e-13)


def operands(rows: int = 6, groups: int = 3, columns: int = 16) -> tuple[Tensor, ...]:
    """(x, w, x_scale, w_scale) of a product by groups of 128."""
    bits = [random(count, groups * 128, seed=k).to(E4M3).view(torch.uint8) for k, count in enumerate((rows, columns))]
    scales = [(random(count, groups, seed=2 + k).abs() + 1).float() for k, count in enumerate((rows, columns))]
    return *bits, *scales


def test_the_operator_is_registered_right_and_names_what_does_not_fit() -> None:
    x, w, x_scale, w_scale = operands()
    for bias in (None, torch.ones(16)):
        args = (x.view(2, 3, -1), w, x_scale.view(2, 3, -1), w_scale, bias, torch.bfloat16)
        torch.library.opcheck(scaled_groups_linear.op, args, test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(scaled_linear.op, (x, w, x_scale[:, :1], w_scale[:, 0], None, torch.float32), test_utils=("test_faketensor",))
    said = r"x \(2, 3, 100\) ends in 100, and a weight with data \(16, 384\) has 384 columns\. Try: x of shape \(2, 3, 384\)"
    for form in FORMS:
        weight = layer(form)[1]
        with pytest.raises(cf.ColofuncError, match=said):
            rounded_linear(random(2, 3, 100), None, *weight.parts, form)


def test_rules_hold_by_brute_force() -> None:
    """However dims are cut, joined parts are the whole; a group is in one place."""
    x, w, x_scale, w_scale = operands(groups=6)
    scales = x_scale.view(2, 3, -1).double(), w_scale.double()
    args = (x.view(2, 3, -1), w, *scales, random(16), torch.float64)
    tried = {word for word in check_op("colofunc.scaled_groups_linear", *args) if " " not in word}
    assert tried == {"b0", "b1", "o", "g"}
    args = (x.view(2, 3, -1), w, scales[0][..., :1], scales[1][:, 0], random(16), torch.float64)
    tried = {word for word in check_op("colofunc.scaled_linear", *args) if " " not in word}
    assert tried == {"b0", "b1", "o", "i"}


# ---- in a step ----


@pytest.mark.parametrize(("form", "sent"), [("fp8", [((8, 4, 1), "max"), ((8, 4, 128), "sum")]), ("fp8_g128", [((8, 4, 128), "sum")])])
def test_ranks_of_split_columns_tell_one_another_a_maximum_only_where_a_scale_is_of_all(form: str, sent: list[Any]) -> None:
    step_fn, params, _ = step_of("arguments")
    step = cf.quantize(cf.shard(step_fn, cf.Mesh(tp=2), tensor("1d", "tp")), SCHEMES[form], where=WHERE)
    program = step.lower(params, tokens()).program
    found = [(program.values[node.outs[0]].shape, node.args[-1]) for node in program.nodes if "all_" in node.target]
    assert found == sent
    layouts = {program.values[id].name: program.values[id].layout.text() for id in program.inputs}
    split_scale = "a" if form == "fp8" else "a tp"
    assert layouts["params.down.weight.scale"] == split_scale and layouts["params.up.weight.scale"].startswith("(tp a)")


@pytest.mark.parametrize("form", FORMS)
def test_a_group_is_not_cut_where_ranks_are_more_than_groups(form: str) -> None:
    """Four ranks, and two groups of 128 columns."""
    step_fn, params, _ = step_of("arguments")
    step = cf.quantize(cf.shard(step_fn, cf.Mesh(tp=4)), SCHEMES[form], where=WHERE)
    with cf.testing.float64():
        assert cf.testing.check(step, params, tokens(), steps=1).worst <= 1e-10


@pytest.mark.parametrize("form", FORMS)
def test_casts_read_the_compute_dtype(form: str) -> None:
    step_fn, state, _ = step_of("adapters")
    step = cf.precision(cf.quantize(step_fn, SCHEMES[form], where=WHERE), "bf16")
    program = step.lower(state, tokens()).global_program
    ins = [program.values[node.refs[0]].dtype for node in program.nodes if node.target == "colofunc.fp8_cast"]
    assert ins == [torch.bfloat16] * 2
    targets = [node.target for node in program.nodes]
    assert f"colofunc.{form}_linear_dx" in targets, "the gradient is that of the widened weight"


@pytest.mark.parametrize("form", FORMS)
def test_what_is_no_linear_layer_computes_in_the_dtype_of_its_input(form: str) -> None:
    """A product that is written out reads the widened weight; a vector is a row; what stands behind may write in place."""
    torch.manual_seed(0)
    model = cf.functional(nn.Sequential(nn.Linear(128, 128), nn.ReLU(inplace=True), nn.Linear(128, 8)).double())

    def step_fn(params: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return model.apply(params, model.buffers, x)[0], x @ params["0.weight"].T

    x = random(128)
    step = cf.quantize(cf.shard(step_fn, cf.Mesh()), SCHEMES[form], where="*.weight")
    packed = {name: BUILT_IN[SCHEMES[form]].pack(model.params[f"{name}.weight"]) for name in "02"}
    bias = model.params
    hidden = rounded_linear(x, bias["0.bias"], *packed["0"].parts, form).relu()
    wanted = rounded_linear(hidden, bias["2.bias"], *packed["2"].parts, form), x @ packed["0"].dequantize().T
    for got, want in zip(step(model.params, x), wanted, strict=True):
        torch.testing.assert_close(got.full(), want, rtol=1e-12, atol=1e-12)
    eager = step.eager(step.init(model.params, x), x)
    torch.testing.assert_close(eager[0], wanted[0], rtol=1e-12, atol=1e-12)


def test_a_bias_of_another_dtype_is_refused_as_torch_refuses_it() -> None:
    params, bias, x = {"weight": random(4, 128)}, torch.zeros(4), random(2, 128)
    step = cf.quantize(cf.shard(lambda params, x: F.linear(x, params["weight"], bias), cf.Mesh()), "fp8-dynamic", where="weight")
    with pytest.raises(RuntimeError, match="dtype"):
        step.eager(step.init(params, x), x)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"form": "int8"}, r"float8_inputs=True multiplies in float8, and its weights are .* 'int8'\. Try: form= of fp8, fp8_g128"),
        ({"form": "fp8", "outliers": 6.0}, r"outliers=6\.0 rounds inputs to int8, and float8_inputs=True to float8\. Try: one of them"),
    ],
)
def test_a_scheme_that_cannot_be_multiplied_so_is_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(cf.InputError, match=rf"Quantizer 'mine': {said}"):
        cf.ext.Quantizer("mine", quantize=dict, float8_inputs=True, **options)


# ---- on a card that is not here ----


def call(
    rows: int = 512, groups: int = 32, columns: int = 4096, width: int = 128, dtype: torch.dtype = torch.bfloat16,
    bias: bool = False, capability: tuple[int, int] = (9, 0),
) -> KernelCall:  # fmt: skip
    bits = [Like((count, groups * width), torch.uint8) for count in (rows, columns)]
    scales = [Like((count, groups), torch.float32) for count in (rows, columns)]
    arguments = zip(("x", "w", "x_scale", "w_scale"), (*bits, *scales), strict=True)
    return KernelCall(PRODUCT, (*arguments, ("b", Like((columns,), dtype) if bias else None), ("dtype", dtype)), capability)


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ({}, True),
        ({"rows": 1}, True),
        ({"bias": True}, True),
        ({"dtype": torch.float32}, True),
        ({"groups": 1}, True),
        ({"groups": 1, "dtype": torch.float32}, False),
        ({"dtype": torch.float16}, False),
        ({"dtype": torch.float64}, False),
        ({"width": 64}, False),
        ({"columns": 24}, False),
        ({"rows": 0}, False),
        ({"capability": (8, 9)}, False),
        ({"capability": (10, 0)}, False),
    ],
)
def test_a_card_multiplies_what_its_product_takes(options: dict[str, Any], taken: bool) -> None:
    chosen = choose(CUDA_KERNELS, call(**options))
    assert chosen is not None and chosen.fn.__name__.endswith("_cuda") == taken


@pytest.mark.parametrize(("cuda", "has"), [(None, True), ("12.8", False), ("12.9", True), ("13.0", True)])
def test_products_by_groups_come_with_cuda_12_9(cuda: str | None, has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert compat.has_scaled_mm_by_groups() == has
    assert CUDA_KERNELS[0].guard(call()) == has


def test_the_clock_counts_what_a_product_takes() -> None:
    by_card, widened = (kernel.cost_s for kernel in CUDA_KERNELS)
    assert by_card(call(1), A_DEVICE) < by_card(call(512), A_DEVICE) < by_card(call(512, bias=True), A_DEVICE)
    assert by_card(call(), A_DEVICE) < widened(call(), A_DEVICE)


@pytest.mark.parametrize("form", FORMS)
def test_a_plan_for_a_card_counts_products_at_its_rate_of_float8(form: str) -> None:
    """Less than they take in bfloat16, and not less than float8 can."""
    params, x = {"w": random(2048, 2048).bfloat16()}, cf.abstract((16384, 2048), torch.bfloat16)
    mesh = cf.Mesh(topology="8xh100")
    step = cf.quantize(cf.shard(lambda params, x: F.linear(x, params["w"]), mesh), SCHEMES[form], where="w")
    (kernel,) = [node.kernel for node in step.lower(params, x).program.nodes if node.target in (PRODUCT, scaled_linear.name)]
    work, rate = 2 * 16384 * 2048 * 2048, rates_of(mesh.topology).flops_per_s
    assert kernel is not None and kernel.name.endswith("_cuda")
    assert work / rate(E4M3) < kernel.seconds < work / rate(torch.bfloat16)


def product_by_groups(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, bias: Tensor | None
) -> Tensor:  # fmt: skip
    """In place of torch's, which is on cards alone: it takes what that takes, by torch's own check of shapes."""
    assert bias is None and a.shape[0] % 16 == 0
    assert a_scale.stride() == (1, a.shape[0]) and b_scale.is_contiguous() and (a.stride(1), b.stride(0)) == (1, 1)
    meta = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in (a, b, a_scale, b_scale)]
    checked = torch._scaled_mm(*meta[:2], scale_a=meta[2], scale_b=meta[3], out_dtype=dtype)
    out: Tensor = scaled_groups_linear(a.view(torch.uint8), b.t().view(torch.uint8), a_scale, b_scale.t(), None, dtype)
    assert (out.shape, out.dtype) == (checked.shape, checked.dtype)
    return out


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 6, 32])
def test_what_a_card_is_asked_for_is_what_its_product_takes(rows: int, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code on the CPU, numbers by what was handed to the product."""
    x, w, x_scale, w_scale = operands(rows)
    monkeypatch.setattr(compat, "scaled_mm", product_by_groups)
    b = random(16).bfloat16() if bias else None
    args = (x.view(rows, 1, -1), w, x_scale.view(rows, 1, -1), w_scale, b, torch.bfloat16)
    got, wanted = CUDA_KERNELS[0].fn(*args), scaled_groups_linear(*args)
    assert got.shape == (rows, 1, 16)
    # Products of other numbers of rows may be summed in another order.
    torch.testing.assert_close(got, wanted, rtol=2**-7, atol=1e-3)


def test_a_card_multiplies_rows_with_the_scales_of_packed_weights() -> None:
    """Its code on the CPU, where torch has the product by rows."""
    if TorchVersion(torch.__version__) < "2.12":
        pytest.skip("torch 2.11 has no product on the CPU whose scales are of rows")
    x, w, x_scale, w_scale = operands()
    for scale in (w_scale[:, 0], w_scale[:, :1]):
        args = (x, w, x_scale[:, :1], scale, None, torch.bfloat16)
        torch.testing.assert_close(linear_cuda(*args), scaled_linear(*args), rtol=2**-7, atol=1e-3)
    one = (x[:, :128], w[:, :128], x_scale[:, :1], w_scale[:, :1], None, torch.bfloat16)
    torch.testing.assert_close(CUDA_KERNELS[0].fn(*one), scaled_groups_linear(*one), rtol=2**-7, atol=1e-3)


def check_on_a_card(form: str, bias: bool, rows: int) -> None:
    """A step on a card of the Hopper generation: the same bits and scales as emulated, and sums in another order, in bfloat16."""
    params = {"w": random(48, 512, seed=1).bfloat16()} | ({"b": random(48, seed=2).bfloat16()} if bias else {})
    x = random(rows, 512).bfloat16()

    def step_fn(params: Any, x: Tensor) -> Tensor:
        return F.linear(x, params["w"], params.get("b"))

    on_card = cf.quantize(cf.shard(step_fn, cf.Mesh(device="cuda")), SCHEMES[form], where="w")
    emulated = cf.quantize(cf.shard(step_fn, cf.Mesh(device="cpu")), SCHEMES[form], where="w")
    got, wanted = on_card(params, x).full().cpu(), emulated(params, x).full()
    torch.testing.assert_close(got, wanted, rtol=2**-7, atol=2**-7 * float(wanted.abs().max()))
    if torch.cuda.get_device_capability() == (9, 0) and (form == "fp8" or compat.has_scaled_mm_by_groups()):
        products = [node for node in on_card.lower(params, x).program.nodes if node.target in (PRODUCT, scaled_linear.name)]
        assert [node.kernel is not None and node.kernel.name.endswith("_cuda") for node in products] == [True]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_on_a_pretended_card_is_the_emulated_one(form: str, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if TorchVersion(torch.__version__) < "2.12":
        pytest.skip("torch 2.11 has no product on the CPU whose scales are of rows")
    if form == "fp8_g128":
        monkeypatch.setattr(compat, "scaled_mm", product_by_groups)
    with Machine(seed=0):
        check_on_a_card(form, bias, 17)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 17, 256])
def test_a_product_on_a_card_is_the_emulated_one(form: str, bias: bool, rows: int) -> None:
    check_on_a_card(form, bias, rows)
