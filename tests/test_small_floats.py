"""mxfp8 and nvfp4 against a search over every number that their formats have, in exact arithmetic."""

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch

import colofunc as cf
from colofunc.compiler.quantized_weights import packed
from colofunc.ops.quantized import fp8_bits, unpacked
from colofunc.ops.quantizers import BUILT_IN
from colofunc.ops.small_floats import E2M1_LEVELS, E4M3_LEVELS, E5M2_INFINITY, FLOAT8_LEVELS, e2m1_values, e4m3_bits

POWERS = [Fraction(2) ** k for k in range(-127, 128)]


def weight(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """(6, 64): rows of ordinary size, with numbers half-way between neighbours, of zeros, and tiny, small and large ones."""
    w = torch.randn(6, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    halves = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(E4M3_LEVELS)], dtype=torch.float64)
    w[1, :32] = halves[::4]  # of which the largest is 432
    w[2, :16] = torch.tensor([0.25, -0.25, 0.75, 1.25, -1.75, 2.5, 3.5, 5, -5, 6, 0, 0.5, 3, -0.0, 1, 4], dtype=torch.float64) * 64
    w[3] = 0
    w[4, :32], w[4, 32:] = 1e-40, 1e-5
    w[5] *= 1e4
    return w.to(dtype)


def fractions(x: torch.Tensor) -> list[Fraction]:
    return [Fraction(value) for value in x.to(torch.float64).flatten().tolist()]


def nearest(size: Fraction, levels: Sequence[Fraction]) -> int:
    """The code of the level that is nearest; of two the even one."""
    return min(range(len(levels)), key=lambda code: (abs(levels[code] - size), code % 2))


LEVELS = {name: [Fraction(level) for level in levels] for name, levels in (("e4m3", E4M3_LEVELS), ("e2m1", E2M1_LEVELS))}


def test_levels_are_those_of_torch_and_of_the_table() -> None:
    assert torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).tolist() == list(E4M3_LEVELS)
    finite = torch.arange(E5M2_INFINITY + 1, dtype=torch.uint8).view(torch.float8_e5m2).to(torch.float64).tolist()
    assert finite == [*FLOAT8_LEVELS[torch.float8_e5m2], math.inf]
    assert E2M1_LEVELS == (0, 0.5, 1, 1.5, 2, 3, 4, 6)
    assert e2m1_values(torch.arange(16), torch.float32).tolist() == [*E2M1_LEVELS, *(-level for level in E2M1_LEVELS)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_mxfp8_takes_the_nearest_of_all_numbers(dtype: torch.dtype) -> None:
    w = weight(dtype)
    found = BUILT_IN["mxfp8"].pack(w)
    assert found.nbytes == 6 * (64 + 2)
    numbers, scales = found.data.unflatten(1, (2, 32)), found.scale
    for row in range(6):
        for block in range(2):
            values = fractions(w.unflatten(1, (2, 32))[row, block])
            largest = max(map(abs, values))
            # The largest power of two up to the largest number, over 2^8, the largest one in e4m3.
            fitting = [k for k, power in enumerate(POWERS) if power * 256 <= largest]
            scale = max(fitting, default=0)
            assert int(scales[row, block]) == scale
            for value, code in zip(values, numbers[row, block].tolist(), strict=True):
                assert code & 127 == nearest(abs(value) / POWERS[scale], LEVELS["e4m3"])
                assert value == 0 or code >> 7 == (value < 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nvfp4_takes_the_nearest_of_all_numbers(dtype: torch.dtype) -> None:
    w = weight(dtype)
    found = BUILT_IN["nvfp4"].pack(w)
    assert found.nbytes == 6 * (32 + 4 + 4) and found.outer is not None
    outer = fractions(found.outer)[0]
    exact = max(map(abs, fractions(w))) / (6 * 448)
    assert set(fractions(found.outer)) == {outer}
    step = Fraction(math.ulp(1.0)) * 2**29  # of float32 at 1
    assert abs(outer - exact) <= exact * step / 2
    numbers = unpacked(found.data).unflatten(1, (4, 16))
    for row in range(6):
        for block in range(4):
            values = fractions(w.unflatten(1, (4, 16))[row, block])
            scale = nearest(max(map(abs, values)) / (6 * outer), LEVELS["e4m3"])
            assert int(found.scale[row, block]) == scale
            unit = LEVELS["e4m3"][scale] * outer
            for value, code in zip(values, numbers[row, block].tolist(), strict=True):
                size = abs(value) / unit if unit else Fraction(0)
                assert code & 7 == nearest(size, LEVELS["e2m1"])
                assert value == 0 or code >> 3 == (value < 0)


def test_halves_between_numbers_of_nvfp4_go_to_the_even_one() -> None:
    """With scales that are powers of two, so that halves are there."""
    w = torch.zeros(1, 32)
    w[0, :8] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    w[0, 16] = 6 * 448  # the tensor's scale is 1, and the first block's scale 1
    found = BUILT_IN["nvfp4"].pack(w)
    assert found.outer is not None and float(found.outer) == 1
    assert found.dequantize()[0, :8].tolist() == [0, 1, 1, 2, 2, 4, 4, 6]


def test_bits_of_float64_are_rounded_once() -> None:
    """A number a little above a half is above it in float32 no more."""
    x = torch.tensor([1.0625, 1.0625 + 2**-40, 1.0625 - 2**-40, -1.0625 - 2**-40, 500.0, torch.nan, -0.0], dtype=torch.float64)
    assert e4m3_bits(x).view(torch.float8_e4m3fn).to(torch.float64)[:5].tolist() == [1, 1.125, 1, -1.125, 448]
    assert e4m3_bits(x)[5:].tolist() == [0x7F, 0x80] and torch.equal(fp8_bits(x), e4m3_bits(x))
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    between = torch.cat([every, every * 1.03125, every * 0.96875])
    assert torch.equal(e4m3_bits(between)[~between.isnan()], e4m3_bits(between.double())[~between.isnan()])


@pytest.mark.parametrize("scheme", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("spec", ["(a o) i", "o (a i)", "(b o) (a i)"])
def test_blocks_that_ranks_would_cut_are_packed_whole(scheme: str, spec: str) -> None:
    """Of 64 columns a rank has 8, half a block of nvfp4; the largest number of all is on one of them."""
    w = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    w[5, 3] = 100.0
    whole = BUILT_IN[scheme].pack(w)
    found = packed(BUILT_IN[scheme], cf.distribute(w, spec, cf.Mesh(a=8, b=2)))
    for mine, wanted in zip(found.parts, whole.parts, strict=True):
        assert isinstance(mine, cf.DTensor) and torch.equal(mine.full(), wanted)


def test_a_widened_number_is_its_parts_multiplied_and_rounded_once() -> None:
    for scheme in ("mxfp8", "nvfp4"):
        found = BUILT_IN[scheme].pack(weight())
        exact = found.dequantize(torch.float64)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert torch.equal(found.dequantize(dtype), exact.to(torch.float32).to(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["fp8", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_card_packs_and_widens_the_same_bits(scheme: str, dtype: torch.dtype) -> None:
    w = weight(dtype)
    host, card = BUILT_IN[scheme].pack(w), BUILT_IN[scheme].pack(w.cuda())
    for mine, wanted in zip(card.parts, host.parts, strict=True):
        assert torch.equal(mine.cpu(), wanted)
    for wide in (torch.float32, torch.float64, torch.bfloat16):
        assert torch.equal(card.dequantize(wide).cpu(), host.dequantize(wide))
