"""Products with weights in 8 and 4 bits in C++: their stated bound against float64 at every instruction set, odd operands, mistakes."""

import math
from typing import Any

import pytest
import test_native
import torch
from test_native import needs_compiler
from torch import Tensor, nn

import colofunc as cf
from colofunc.ops import native, quantized
from colofunc.ops.quantized import OPERATORS, Quantized, packed_linear_
from colofunc.ops.quantizers import BUILT_IN

SCHEMES = ["int8", "int4-g128"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
# (o, i): neither of them a multiple of a vector or a block, less than one, several runs of columns.
SHAPES = {"int8": [(13, 77), (1, 1), (8, 128), (37, 2100)], "int4-g128": [(13, 384), (1, 128), (37, 2176)]}


def weight(scheme: str, rows: int, columns: int) -> Quantized:
    generator = torch.Generator().manual_seed(rows)
    return BUILT_IN[scheme].pack(torch.randn(rows, columns, generator=generator))


def product(w: Quantized, x: Tensor, bias: Tensor | None = None) -> Tensor:
    found: Tensor = OPERATORS[w.form].linear.kernel(x, *w.parts, bias)
    return found


def bound(w: Quantized, x: Tensor, bias: Tensor, want: Tensor) -> Tensor:
    """What the docstring of `colofunc/ops/quantized.py` states: sums in float32 in any order, of numbers that an int4 weight rounds."""
    sizes = x.double().abs() @ w.dequantize(torch.float64).abs().T + bias.double().abs()
    rounding = UNIT[x.dtype] if w.form == "int4" else 0.0
    sums = ((x.shape[-1] + 4) * 2.0**-24 + rounding) * sizes
    return sums + UNIT[x.dtype] * (want.abs() + sums) + 2.0**-24 * (x.dtype == torch.float16)  # float16 has subnormal numbers


@needs_compiler
@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_product_keeps_the_stated_bound(scheme: str, level: int, required: pytest.MonkeyPatch) -> None:
    native.limit_level(level)
    torch.manual_seed(0)
    for rows, columns in SHAPES[scheme]:
        w = weight(scheme, rows, columns)
        for dtype in DTYPES:
            for count in (1, 2, 3, 8, 9, 20):
                x, bias = torch.randn(count, columns).to(dtype), torch.randn(rows).to(dtype)
                want = x.double() @ w.dequantize(torch.float64).T + bias.double()
                error = (product(w, x, bias).double() - want).abs()
                assert bool((error <= bound(w, x, bias, want)).all()), (rows, columns, dtype, count)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_product_is_as_exact_as_the_reference(scheme: str, dtype: torch.dtype, required: pytest.MonkeyPatch) -> None:
    w = weight(scheme, 64, 1024)
    torch.manual_seed(0)
    x = torch.randn(16, 1024).to(dtype)
    made, reference = test_native.both(lambda: product(w, x), required)
    want = x.double() @ w.dequantize(torch.float64).T
    assert float((made - want).square().sum()) <= 1.1 * float((reference - want).square().sum())


@needs_compiler
@pytest.mark.parametrize("scheme", SCHEMES)
def test_however_x_lies_the_product_is_the_same(scheme: str, required: pytest.MonkeyPatch) -> None:
    w = weight(scheme, 12, 256)
    x = torch.randn(2, 3, 256, dtype=torch.bfloat16)
    want = product(w, x.flatten(0, 1))
    assert torch.equal(product(w, x), want.unflatten(0, (2, 3)))
    assert torch.equal(product(w, x[1, 2]), product(w, x[1, 2:]).squeeze(0))
    columns_first = x.flatten(0, 1).t().contiguous().t()
    assert not columns_first.is_contiguous() and torch.equal(product(w, columns_first), want)
    wide = torch.randn(6, 300, dtype=torch.bfloat16)
    wide[:, 20:276] = x.flatten(0, 1)
    assert torch.equal(product(w, wide[:, 20:276]), want)
    assert product(w, x[:, :0]).shape == (2, 0, 12)
    if scheme == "int8":  # int4 has a group of columns at least
        bias = torch.randn(12, dtype=torch.bfloat16)
        assert torch.equal(OPERATORS["int8"].linear.kernel(x[..., :0], w.data[:, :0], w.scale, bias), bias.expand(2, 3, 12))
    assert OPERATORS[w.form].linear.kernel(x, *(part[:0] for part in w.parts), None).shape == (2, 3, 0)


@needs_compiler
def test_parts_of_a_weight_are_read_where_they_lie(required: pytest.MonkeyPatch) -> None:
    """Some rows, every second row, some columns: as a rank may have them."""
    int8, int4 = weight("int8", 24, 512), weight("int4-g128", 24, 512)
    x = torch.randn(3, 512)
    for w in (int8, int4):
        for rows in (slice(5, 17), slice(1, 24, 2)):
            some = [part[rows] for part in w.parts]
            assert torch.equal(OPERATORS[w.form].linear.kernel(x, *some, None), product(w, x)[:, rows])
    form = int4.format
    halves = [OPERATORS["int4"].linear.kernel(x[:, a:b], *form.columns_of(int4.parts, a, b), None) for a, b in ((0, 256), (256, 512))]
    torch.testing.assert_close(halves[0] + halves[1], product(int4, x))


@needs_compiler
def test_what_the_kernel_is_not_written_for_runs_as_before(required: pytest.MonkeyPatch) -> None:
    w = weight("int8", 12, 256)
    required.setattr(quantized, "_by_kernel", lambda *args: pytest.fail("the kernel was called"))
    many = torch.randn(quantized.KERNEL_ROWS["cpu"] + 1, 256, dtype=torch.bfloat16)
    for x in (torch.randn(2, 256, dtype=torch.float64), many):
        wide = w.dequantize(torch.promote_types(x.dtype, torch.float32)).to(x.dtype)
        torch.testing.assert_close(product(w, x), nn.functional.linear(x, wide))
    apart = [torch.stack((w.data, w.data), 2)[:, :, 0], w.scale]
    assert apart[0].stride(1) == 2
    x = torch.randn(2, 256)
    torch.testing.assert_close(OPERATORS["int8"].linear.kernel(x, *apart, None), nn.functional.linear(x, w.dequantize()))


@needs_compiler
@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradients_are_those_of_the_widened_weight(scheme: str, required: pytest.MonkeyPatch) -> None:
    w = weight(scheme, 12, 256)
    x, bias = torch.randn(2, 3, 256).requires_grad_(), torch.randn(12).requires_grad_()
    got = OPERATORS[w.form].linear(x, *w.parts, bias)
    want = nn.functional.linear(x, w.dequantize(), bias)
    g = torch.randn_like(want)
    for mine, one in zip(torch.autograd.grad(got, (x, bias), g), torch.autograd.grad(want, (x, bias), g), strict=True):
        torch.testing.assert_close(mine, one)


@needs_compiler
def test_threads_and_numbers_that_are_not_finite_change_only_their_own(required: pytest.MonkeyPatch) -> None:
    w = weight("int8", 4096, 640)
    x = torch.randn(9, 640, dtype=torch.bfloat16)
    one = product(w, x)
    torch.set_num_threads(2)
    try:
        assert torch.equal(product(w, x), one)
    finally:
        torch.set_num_threads(1)
    x[3, 5] = math.nan
    made = product(w, x)
    assert bool(made[3].isnan().all()) and torch.equal(made[4:], one[4:]) and torch.equal(made[:3], one[:3])


def operands(scheme: str = "int8") -> list[Tensor | None]:
    """out, x, data, scale, zero, bias."""
    w = weight(scheme, 12, 256)
    return [torch.empty(3, 12), torch.randn(3, 256), w.data, w.scale, w.zero, torch.randn(12)]


@needs_compiler
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_operator_and_its_reference_agree(scheme: str, required: pytest.MonkeyPatch) -> None:
    given = operands(scheme)
    packed_linear_(*given)
    want = torch.empty(3, 12)
    packed_linear_.kernel(want, *given[1:])
    torch.testing.assert_close(given[0], want)
    torch.library.opcheck(packed_linear_.op, tuple(operands(scheme)))


MISTAKES: list[tuple[str, int, Tensor, str]] = [
    ("int8", 0, torch.empty(3, 11), "out is (m, n)"),
    ("int8", 0, torch.empty(3, 12, dtype=torch.float16), "out has the dtype of x"),
    ("int8", 1, torch.empty(3, 256, dtype=torch.float64), "x is float32, float16 or bfloat16"),
    ("int8", 1, torch.empty(256, 3).t(), "x is a contiguous matrix"),
    ("int8", 1, torch.empty(3, 255), "an int8 weight has data (n, k) and scale (n)"),
    ("int8", 2, torch.zeros(12, 256, dtype=torch.uint8), "data is int8, or uint8 where there is a zero"),
    ("int8", 2, torch.zeros(256, 12, dtype=torch.int8).t(), "data is a matrix whose columns lie side by side"),
    ("int8", 3, torch.zeros(11), "scale has as many rows as data"),
    ("int8", 3, torch.zeros(12, dtype=torch.float64), "scale is float32"),
    ("int8", 5, torch.zeros(11), "bias is (n), contiguous"),
    ("int8", 5, torch.zeros(12, dtype=torch.bfloat16), "bias has the dtype of x"),
    ("int4-g128", 1, torch.empty(3, 192), "an int4 weight has data (n, k/2) and groups of 128 columns"),
    ("int4-g128", 3, torch.zeros(12, 3), "scale is (n, k/128), columns side by side"),
    ("int4-g128", 4, torch.zeros(12, 2), "zero is uint8, columns side by side"),
    ("int4-g128", 4, torch.zeros(12, 3, dtype=torch.uint8), "zero is (n, k/128)"),
]  # fmt: skip


@needs_compiler
@pytest.mark.parametrize(("scheme", "place", "wrong", "said"), MISTAKES)
def test_operands_that_do_not_fit_are_named(scheme: str, place: int, wrong: Tensor, said: str, required: pytest.MonkeyPatch) -> None:
    given = operands(scheme)
    given[place] = wrong
    with pytest.raises(RuntimeError) as caught:
        packed_linear_(*given)
    assert f"packed_linear_: {said}" in str(caught.value)


@needs_compiler
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("specs", "count"), [({}, 2), ({"up.weight": "(tp o) i"}, 4), ({"down.weight": "o (tp i)"}, 3)])
def test_a_step_of_one_token_runs_on_the_kernel(scheme: str, specs: dict[str, str], count: int, required: pytest.MonkeyPatch) -> None:
    """Weights as arguments, on one device and in shards: each rank's product is the kernel's; one that all ranks do alike is made once."""
    torch.manual_seed(0)
    up, down = torch.randn(256, 128) / 11, torch.randn(128, 256) / 16
    params, token = {"up.weight": up, "down.weight": down}, torch.randn(1, 128)

    def decode(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return nn.functional.linear(torch.tanh(nn.functional.linear(x, params["up.weight"])), params["down.weight"])

    calls: list[Any] = []
    by_kernel = quantized._by_kernel

    def counted(*args: Any) -> None:
        calls.append(args)
        by_kernel(*args)

    required.setattr(quantized, "_by_kernel", counted)
    step = cf.quantize(cf.shard(decode, cf.Mesh(tp=2), specs), scheme) if specs else cf.quantize(decode, scheme)
    placed = step.init(params, token)
    got = step(placed, token)
    assert len(calls) == count
    wide = {name: BUILT_IN[scheme].pack(w).dequantize() for name, w in params.items()}
    torch.testing.assert_close(got.full(), decode(wide, token))
