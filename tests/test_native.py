"""Kernels in C++: the bits of the reference at every instruction set."""

import shutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from colofunc import env
from colofunc.ops import native
from colofunc.ops import random as R
from colofunc.ops.random_native import random_fill_

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, env.compilers())), reason="there is no C++ compiler")
SEED = torch.tensor(5)
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
PLACES = {
    "whole": ((3, 341), ()), "empty": ((0, 7), ()), "no dims": ((), ()), "several blocks": ((5, 2001), ()),
    "part": ((4, 13), ((4, 13), (26, 1), torch.tensor(13))), "striped": ((4, 12), ((4, 12), (24, 2), torch.tensor(1))),
    "far": ((2, 40), ((2, 40), (80, 1), torch.tensor(2**33 + 5))),
}  # fmt: skip
Draw = Callable[[], Tensor]


def both(draw: Draw, required: pytest.MonkeyPatch) -> tuple[Tensor, Tensor]:
    """What the kernel and what the reference gives."""
    made = draw()
    with required.context() as without:
        without.setenv("COLOFUNC_NATIVE", "off")
        return made, draw()


def assert_same_bits(draw: Draw, required: pytest.MonkeyPatch) -> None:
    made, want = both(draw, required)
    assert made.dtype == want.dtype and made.stride() == want.stride()
    if made.is_floating_point():  # which NaN it is says nothing
        made, want = made.nan_to_num(7.0), want.nan_to_num(7.0)
    assert torch.equal(made.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


@needs_compiler
@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("where", PLACES)
def test_draws_have_the_bits_of_the_reference(where: str, level: int, required: pytest.MonkeyPatch) -> None:
    native.limit_level(level)
    shape, place = PLACES[where]
    if shape == ():
        assert both(lambda: R.random_bits.kernel(SEED, 3, shape), required)[0] == R.random_bits.kernel(SEED, 3, shape)
        return
    assert_same_bits(lambda: R.random_bits.kernel(SEED, 3, shape, *place), required)
    for dtype in FLOATS:
        assert_same_bits(lambda dtype=dtype: R.random_uniform.kernel(SEED, 3, shape, dtype, *place), required)
    for q in (0.0, 0.004, 1 / 3, 0.5, 1.0 - 2.0**-41, 1.0):
        for dtype in (torch.bool, torch.float32, torch.int64, torch.bfloat16):
            assert_same_bits(lambda q=q, dtype=dtype: R.random_bernoulli.kernel(SEED, 3, shape, dtype, q, *place), required)


@needs_compiler
@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("dtype", FLOATS)
def test_normal_numbers_are_within_two_ulp(dtype: torch.dtype, level: int, required: pytest.MonkeyPatch) -> None:
    """In float64 between the two algorithms' own errors: the reference's `erfinv` has some 1e-15 in the tails."""
    native.limit_level(level)
    made, want = both(lambda: R.random_normal.kernel(SEED, 3, (7, 3001), dtype), required)
    if dtype == torch.float64:
        torch.testing.assert_close(made, want, rtol=1e-14, atol=0.0)
        return
    whole = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    assert int((made.view(whole).to(torch.int64) - want.view(whole).to(torch.int64)).abs().max()) <= 2


def index_of_word(word: int) -> int:
    """The index whose word this is, for seed 5 and site 3: SplitMix64 undone, step by step."""
    mask = (1 << 64) - 1
    z = word ^ (word >> 31) ^ (word >> 62)
    z = z * pow(0x94D049BB133111EB, -1, 1 << 64) & mask
    z = z ^ (z >> 27) ^ (z >> 54)
    z = z * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & mask
    z = z ^ (z >> 30) ^ (z >> 60)
    key = R._key(SEED, 3)
    assert isinstance(key, int)
    index = (z - key) * pow(0x9E3779B97F4A7C15, -1, 1 << 64) & mask
    return index - (1 << 64) if index >> 63 else index


@needs_compiler
@pytest.mark.parametrize("top", [0, 1, 1 << 10, 1 << 30, 3 << 48, 1 << 51, (1 << 52) - 1])
def test_the_farthest_normal_numbers(top: int, required: pytest.MonkeyPatch) -> None:
    """Words at the ends and in the middle, which nobody draws by chance, against the quantile of SciPy in float64."""
    special = pytest.importorskip("scipy.special")
    offset = torch.tensor(index_of_word(top << 12))
    made = R.random_normal.kernel(SEED, 3, (1,), torch.float64, (1,), (1,), offset)
    want = special.ndtri((2 * top + 1) / 2**53) if top < 1 << 51 else -special.ndtri((2**53 - 2 * top - 1) / 2**53)
    assert float(made) == pytest.approx(float(want), rel=1e-13, abs=1e-18)


@needs_compiler
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("order", ["contiguous", "transposed", "sliced", "expanded", "empty"])
def test_dropout_has_the_bits_of_the_reference(order: str, dtype: torch.dtype, required: pytest.MonkeyPatch) -> None:
    make = {
        "contiguous": lambda x: x, "transposed": lambda x: x.t(), "sliced": lambda x: x[1:, 2:], "expanded": lambda x: x[:1].expand(5, 257),
        "empty": lambda x: x[:0],
    }[order]  # fmt: skip
    x = torch.randn(5, 257).to(dtype)
    x[0, :4] = torch.tensor([float("inf"), -0.0, 0.0, 1e-7])
    for p in (0.0, 0.1, 0.5, 1.0):
        assert_same_bits(lambda p=p: R.dropout.kernel(make(x), SEED, 3, p), required)


@needs_compiler
def test_a_mask_of_a_block_and_threads_change_nothing(required: pytest.MonkeyPatch) -> None:
    dims = [torch.arange(3) * 1000 + 5, torch.tensor([0, 7, 2, 40])]
    assert_same_bits(lambda: R.keep_mask(SEED, 3, 0.3, dims), required)
    one = R.random_normal.kernel(SEED, 3, (200_000,), torch.float32)
    torch.set_num_threads(2)
    try:
        assert torch.equal(R.random_normal.kernel(SEED, 3, (200_000,), torch.float32), one)
    finally:
        torch.set_num_threads(1)


def arguments(kind: int) -> tuple[object, ...]:
    return torch.empty(40), None, None, None, kind, 12345, 3, [5, 8], [16, 1], [0, 0], 128, 77, True, 1.0


@needs_compiler
@pytest.mark.parametrize("kind", [1, 3])
def test_the_operator_and_its_reference_agree(kind: int, required: pytest.MonkeyPatch) -> None:
    given = arguments(kind)
    random_fill_(*given)
    want = torch.empty(40)
    random_fill_.kernel(want, *given[1:])
    assert torch.equal(given[0], want)
    torch.library.opcheck(random_fill_.op, arguments(kind))
