"""Products of rows and weights in int8: against sums of Python's integers, bit by bit; on ranks; what the clock counts."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from colofunc_plugins import tensor
from quantize_matrix import WHERE, step_of, tokens
from torch import Tensor, nn

import colofunc as cf
from colofunc import compat
from colofunc.ops.int8_products import (
    CUDA_KERNELS,
    EXACT_COLUMNS,
    ROWS_AS_COLUMNS,
    best_sums,
    cpu_sums,
    cuda_sums,
    exact_sums,
    int8_rows,
    int8_rows_linear,
    rounded_linear,
    row_size,
)
from colofunc.ops.kernels import A_DEVICE, KernelCall, Like, choose
from colofunc.ops.quantizers import BUILT_IN

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(-127, 128, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(seed))


def layer(threshold: float, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Any, Tensor]:
    """(x, a weight, a bias); a column of x is large, one row is of zeros and one of outliers alone."""
    x = random(2, 5, 72)
    x[..., 7] *= 40
    x[0, 1], x[1, 2] = 0.0, 9.0
    return x.to(dtype), BUILT_IN["int8"].pack(random(24, 72, seed=1)), random(24, seed=2).to(dtype)


# ---- sums ----


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 33, ROWS_AS_COLUMNS + 1])
@pytest.mark.parametrize("columns", [1, 8, 100, EXACT_COLUMNS, EXACT_COLUMNS + 1])
def test_sums_are_whole_and_exact(rows: int, columns: int) -> None:
    a, w = numbers(rows, columns), numbers(12, columns, seed=1)
    a[0], w[0], w[1] = 127, 127, -127  # the largest sums that there are
    want = torch.matmul(a.to(torch.int64), w.to(torch.int64).t())
    # What runs on cards, with rows filled up, is the same call.
    for sums in (exact_sums, best_sums, *([cpu_sums, cuda_sums] if columns > 1 else [])):
        found = sums(a, w)
        assert found.dtype is torch.int32 and torch.equal(found.to(torch.int64), want), sums


def test_sums_of_parts_of_a_weight_that_are_views() -> None:
    a, w = numbers(4, 64), numbers(16, 128, seed=1)
    for part in (w[:, 32:96], w[:, ::2], w[::2, :64]):
        want = torch.matmul(a.to(torch.int64), part.to(torch.int64).t())
        assert torch.equal(exact_sums(a, part).to(torch.int64), want) and torch.equal(cpu_sums(a, part).to(torch.int64), want)


@pytest.mark.parametrize("count", [1, 3, ROWS_AS_COLUMNS + 1])
def test_sums_of_weights_whose_strides_are_unusual(count: int) -> None:
    a = numbers(count, 64)
    weights = [
        numbers(64, 1).t(),  # one row, whose strides are (1, 1)
        numbers(1, 64).expand(12, 64),
        numbers(12, 1).expand(12, 64),
        numbers(76).as_strided((12, 64), (1, 1)),
    ]
    pairs = [(a, weight) for weight in weights]
    pairs += [(numbers(1, 64).expand(count, 64), numbers(12, 64)), (numbers(count, 1).expand(count, 64), numbers(12, 64))]
    for rows, weight in pairs:
        want = torch.matmul(rows.to(torch.int64), weight.to(torch.int64).t())
        assert torch.equal(best_sums(rows, weight).to(torch.int64), want), (rows.stride(), weight.stride())


# ---- products ----


@pytest.mark.parametrize("threshold", [6.0, math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_is_that_of_python_integers(threshold: float, dtype: torch.dtype) -> None:
    """Bit by bit where there are no outliers: whole sums as Python has them, and each operation behind them rounded once."""
    x, weight, bias = layer(threshold, dtype)
    wide = torch.promote_types(dtype, torch.float32)
    size, bound = row_size(x, threshold), threshold
    rows = int8_rows(x, size, threshold)
    flat, sizes = x.flatten(0, 1), size.flatten()
    outlying = 0
    for m in range(flat.shape[0]):
        small = [abs(float(value)) for value in flat[m] if abs(float(value)) < bound]
        assert float(sizes[m]) == max(small, default=0.0)
        unit = sizes[m].to(wide) / 127
        want = [round(float(value.to(wide) / unit)) if float(unit) and abs(float(value)) < bound else 0 for value in flat[m]]
        assert rows.flatten(0, 1)[m].tolist() == want
        sums = torch.tensor([sum(a * b for a, b in zip(want, row, strict=True)) for row in weight.data.tolist()]).to(wide)
        exact = sums * unit * weight.scale.to(wide) + bias.to(wide)
        large = [k for k, value in enumerate(flat[m]) if not abs(float(value)) < bound]
        outlying += len(large)
        got = int8_rows_linear(rows, weight.data, weight.scale, size, x if large else None, threshold, bias, dtype).flatten(0, 1)[m]
        if not large:
            assert torch.equal(got, exact.to(dtype))
            continue
        for o in range(exact.shape[0]):
            scale = Fraction(float(weight.scale[o]))
            terms = [Fraction(float(flat[m, k])) * int(weight.data[o, k]) * scale for k in large]
            terms += [Fraction(float(sums[o])) * Fraction(float(unit)) * scale, Fraction(float(bias[o]))]
            # Each term and each of the sums is rounded, the last of them to the result's dtype.
            limit = sum(map(abs, terms)) * (len(terms) + 4) * Fraction(torch.finfo(wide).eps)
            limit += abs(sum(terms)) * Fraction(torch.finfo(dtype).eps)
            assert abs(Fraction(float(got[o])) - sum(terms)) <= limit, (m, o)
    assert (outlying > 0) == (threshold == 6.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_do_not_depend_on_how_sums_are_made(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = layer(math.inf, dtype)
    found = []
    for has in (False, True):
        monkeypatch.setattr(compat, "has_int_mm_on_cpu", lambda has=has: has)
        found.append([rounded_linear(x, bias, *weight.parts, threshold) for threshold in (6.0, math.inf)])
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


def test_a_rows_result_depends_on_this_row_only() -> None:
    x, weight, bias = layer(6.0, torch.float32)
    alone = torch.stack([torch.stack([rounded_linear(row, bias, *weight.parts, math.inf) for row in rows]) for rows in x])
    assert torch.equal(alone, rounded_linear(x, bias, *weight.parts, math.inf))


@pytest.mark.parametrize("threshold", [6.0, math.inf])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_seen_behind_the_product(threshold: float, wrong: float) -> None:
    x, weight, bias = layer(threshold)
    x[1, 3, 4] = wrong
    found = rounded_linear(x, bias, *weight.parts, threshold).isfinite()
    assert not found[1, 3].any() and found[0].all() and found[1, :3].all()


def test_rows_and_weights_of_nothing() -> None:
    x, weight, bias = layer(6.0)
    assert rounded_linear(x[:0], bias, *weight.parts, 6.0).shape == (0, 5, 24)
    assert rounded_linear(x, bias[:0], *(part[:0] for part in weight.parts), 6.0).shape == (2, 5, 0)
    assert rounded_linear(x[0, 0], bias, *weight.parts, 6.0).shape == (24,)
    scale = weight.parts[1]
    for threshold in (6.0, math.inf):
        without_columns = rounded_linear(x[..., :0], bias, weight.parts[0][:, :0], scale, threshold)
        assert torch.equal(without_columns, bias.expand(2, 5, 24)) and not row_size(x[..., :0], threshold).any()


def test_rows_of_subnormal_numbers_keep_their_sign() -> None:
    x = torch.tensor([[150.0, -150.0, 100.0]]) * 2.0**-149  # whose unit is 150 / 127 of the least number, rounded to 1 of it
    assert int8_rows(x, row_size(x, 6.0), 6.0).tolist() == [[127, -127, 100]]


@pytest.mark.parametrize("scheme", ["int8-dynamic", "int8"])
def test_what_stands_behind_a_layer_may_change_its_result_in_place(scheme: str) -> None:
    torch.manual_seed(0)
    model = cf.functional(nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 8)).double())

    def gradient(params: Any, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(model.apply(params, model.buffers, x)[0].square().mean(), x)[0]

    x = random(2, 3, 8)
    step = cf.quantize(cf.shard(gradient, cf.Mesh()), scheme, where="*.weight")
    found = step.eager(step.init(model.params, x), x)
    torch.testing.assert_close(found, step(model.params, x).full(), rtol=1e-12, atol=1e-12)


def test_what_operators_return_is_no_view() -> None:
    x, weight, bias = layer(6.0)
    size = row_size.op(x, 6.0)
    rows = int8_rows.op(x, size, 6.0)
    assert not any(out._is_view() for out in (size, rows, int8_rows_linear.op(rows, *weight.parts, size, x, 6.0, bias, x.dtype)))


def test_a_bias_of_another_dtype_is_refused_as_torch_refuses_it() -> None:
    x, w, params = random(2, 8), random(4, 8), {"weight": random(4, 8)}
    bias = torch.zeros(4)
    with pytest.raises(RuntimeError, match="dtype"):
        F.linear(x, w, bias)

    def fn(params: Any, x: Tensor) -> Tensor:
        return F.linear(x, params["weight"], bias)

    with pytest.raises(RuntimeError, match="dtype"):
        step = cf.quantize(cf.shard(fn, cf.Mesh()), "int8-dynamic", where="weight")
        step.eager(step.init(params, x), x)


def test_gradients_are_those_of_a_layer_that_does_not_round() -> None:
    x, weight, bias = layer(6.0)
    x, bias = x.requires_grad_(), bias.requires_grad_()
    g = random(2, 5, 24, seed=3)
    wanted = torch.autograd.grad(F.linear(x, weight.dequantize(torch.float64), bias), (x, bias), g)
    found = torch.autograd.grad(rounded_linear(x, bias, *weight.parts, 6.0), (x, bias), g)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)
    by_func = torch.func.grad(lambda x: (rounded_linear(x, None, *weight.parts, 6.0) * g).sum())(x.detach())
    torch.testing.assert_close(by_func, wanted[0], rtol=1e-13, atol=1e-13)


def test_the_operators_are_registered_right() -> None:
    x, weight, bias = layer(6.0, torch.float32)
    size = row_size(x, 6.0)
    rows = int8_rows(x, size, 6.0)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(row_size.op, (x, 6.0), test_utils=checks)
    torch.library.opcheck(int8_rows.op, (x, size, 6.0), test_utils=checks)
    torch.library.opcheck(int8_rows_linear.op, (rows, *weight.parts, size, x, 6.0, bias, torch.float32), test_utils=checks)
    said = r"int8_rows_linear: rows \(2, 5, 72\) end in 72, and a weight with data \(24, 70\) has 70 columns\. Try: rows of shape"
    with pytest.raises(cf.ColofuncError, match=said), compat.fake_mode():
        args = torch.empty(2, 5, 72, dtype=torch.int8), torch.empty(24, 70, dtype=torch.int8), torch.empty(24), torch.empty(2, 5)
        int8_rows_linear(*args, None, 6.0, None, torch.float32)


# ---- on ranks ----


@pytest.mark.parametrize("x_spec", ["(a r) s i", "r s (a i)", "r (a s) i"])
@pytest.mark.parametrize("threshold", [3.0, math.inf])
def test_numbers_of_rows_and_results_are_those_of_one_device(x_spec: str, threshold: float) -> None:
    """The int8 numbers and sizes bit by bit, wherever columns lie; results bit by bit where columns are whole."""
    weight = BUILT_IN["int8"].pack(random(24, 72, seed=1))
    x = random(4, 2, 72).to(torch.float32)

    def step_fn(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        size = row_size(x * 1.0, threshold)
        rows = int8_rows(x * 1.0, size, threshold)
        return size, rows, rounded_linear(x * 1.0, None, *weight.parts, threshold)

    got, want = cf.shard(step_fn, cf.Mesh(a=2), in_specs=(x_spec,))(x), step_fn(x)
    assert torch.equal(got[0].full(), want[0]) and torch.equal(got[1].full(), want[1])
    if x_spec == "r s (a i)" or threshold == 3.0:
        torch.testing.assert_close(got[2].full(), want[2], rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(got[2].full(), want[2])


@pytest.mark.parametrize("scheme", ["int8-dynamic", "smoothquant"])
def test_ranks_of_split_columns_agree_on_a_size_and_multiply_whole_numbers(scheme: str) -> None:
    step_fn, params, _ = step_of("arguments")
    chosen: Any = scheme
    if scheme == "smoothquant":
        chosen = cf.smoothquant(cf.input_maxima(step_fn, where=WHERE)(params, tokens()))
    step = cf.quantize(cf.shard(step_fn, cf.Mesh(tp=2), tensor("1d", "tp")), chosen, where=WHERE)
    with cf.testing.float64():
        assert cf.testing.check(step, params, tokens(), steps=1).worst <= 1e-10
    program = step.lower(params, tokens()).program
    products = [node for node in program.nodes if node.target == "colofunc.int8_rows_linear"]
    assert len(products) == 2 and not any(node.target == "colofunc.rounded_rows" for node in program.nodes)
    for node in products:
        assert [program.values[ref].dtype for ref in node.refs[:2]] == [torch.int8, torch.int8]
        assert (node.args[4] is not None) == (scheme == "int8-dynamic"), "x is read where outliers are kept"


# ---- on a card that is not here ----


def call(rows: int, summed: int, columns: int, x: bool = False, capability: tuple[int, int] = (9, 0)) -> KernelCall:
    def like(*shape: int, dtype: torch.dtype = torch.int8) -> Like:
        return Like(shape, dtype)

    arguments = (
        ("rows", like(rows, summed)), ("data", like(columns, summed)), ("scale", like(columns, dtype=torch.float32)),
        ("size", like(rows, dtype=torch.bfloat16)), ("x", like(rows, summed, dtype=torch.bfloat16) if x else None),
        ("threshold", 6.0), ("bias", None), ("dtype", torch.bfloat16),
    )  # fmt: skip
    return KernelCall("colofunc.int8_rows_linear", arguments, capability)


def test_the_guard_says_which_products_a_card_takes() -> None:
    def chosen(call: KernelCall) -> str:
        kernel = choose(CUDA_KERNELS, call)
        assert kernel is not None
        return str(kernel.fn.__name__)

    assert chosen(call(512, 4096, 4096)) == chosen(call(1, 4096, 4096)) == "_int8_rows_linear_cuda"
    for other in (call(512, 4100, 4096), call(512, 4096, 4100), call(512, 4096, 4096, capability=(7, 0)), call(0, 64, 64)):
        assert chosen(other) == "_int8_rows_linear"


@pytest.mark.parametrize("threshold", [6.0, math.inf])
def test_what_runs_on_a_card_gives_the_same_bits(threshold: float) -> None:
    x, weight, bias = layer(threshold, torch.bfloat16)
    size = row_size(x, threshold)
    args = (int8_rows(x, size, threshold), *weight.parts, size, x if threshold == 6.0 else None, threshold, bias, torch.bfloat16)
    assert torch.equal(CUDA_KERNELS[0].fn(*args), int8_rows_linear(*args))


def test_the_price_grows_with_rows_and_outliers_and_is_less_than_that_of_floats() -> None:
    whole, widened = (kernel.cost_s for kernel in CUDA_KERNELS)
    assert whole(call(1, 4096, 4096), A_DEVICE) < whole(call(512, 4096, 4096), A_DEVICE) < whole(call(512, 4096, 4096, x=True), A_DEVICE)
    assert whole(call(8192, 8192, 8192), A_DEVICE) < widened(call(8192, 8192, 8192), A_DEVICE)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 17, 64, 512])
def test_sums_on_a_card_are_the_same(rows: int) -> None:
    a, w = numbers(rows, 256), numbers(40, 256, seed=1)
    assert torch.equal(cuda_sums(a.cuda(), w.cuda()).cpu(), exact_sums(a, w))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_on_a_card_is_that_of_the_cpu(dtype: torch.dtype) -> None:
    x, weight, bias = layer(math.inf, dtype)
    parts = [part.cuda() for part in weight.parts]
    assert torch.equal(rounded_linear(x.cuda(), bias.cuda(), *parts, math.inf).cpu(), rounded_linear(x, bias, *weight.parts, math.inf))
    kernel = CUDA_KERNELS[0].fn
    size = row_size(x, math.inf)
    rows = int8_rows(x, size, math.inf)
    found = kernel(rows.cuda(), *parts, size.cuda(), None, math.inf, bias.cuda(), dtype).cpu()
    assert torch.equal(found, int8_rows_linear(rows, *weight.parts, size, None, math.inf, bias, dtype))
