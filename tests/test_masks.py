"""Bernoulli draws from bytes: by definition, the same bits on every path, the right probabilities."""

import math

import pytest
import torch

from colofunc.ops import draws, indices, masks
from colofunc.ops import random as R
from tests.test_random import reference_bits

SEED = torch.tensor(5)
KEY = R._key(SEED, 3)
MASK64 = (1 << 64) - 1


def mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


def by_definition(q: float, index: int) -> bool:
    """Byte `index % 8` of word `index // 8`; where it is the threshold's own, 31 bits of the element decide."""
    byte = (reference_bits(5, 3, index // 8) & MASK64) >> 8 * (index % 8) & 255
    first = math.floor(q * 256)
    if byte != first:
        return byte < first
    further = mix(((KEY ^ draws.SECOND) + index * 0x9E3779B97F4A7C15) & MASK64) >> 33 ^ 1 << 30  # read as int64
    return further < round((q * 256 - first) * 2**31)


def whole(rows: torch.Tensor, columns: torch.Tensor | int, q: float, dtype: torch.dtype = torch.bool) -> torch.Tensor:
    width = columns if isinstance(columns, int) else columns.numel()
    out = torch.full((rows.numel(), width), 7, dtype=torch.float64)
    for r, c, keep in masks.keep_tiles(rows, columns, q, KEY, dtype):
        assert keep.dtype == dtype
        out[r, c] = keep.double()
    return out


@pytest.mark.parametrize("q", [0.9, 0.5, 0.0039, 0.37])
def test_draws_follow_their_definition(q: float) -> None:
    got = whole(torch.tensor([0]), 6000, q)[0]
    assert got.tolist() == [float(by_definition(q, i)) for i in range(6000)]


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64])
@pytest.mark.parametrize(
    "rows", [[0], [3], [0, 40, 80], [5, 45, 1005], [0, 197, 394, 591, 788, 985, 1182, 1379, 1576, 8000]], ids=str
)
def test_runs_and_single_elements_give_the_same_bits(monkeypatch, rows, dtype) -> None:
    monkeypatch.setitem(masks.TILE, "cpu", 256)  # several tiles each way
    starts = torch.tensor(rows)
    for width in (1, 7, 8, 190, 1001):
        a, b = whole(starts, width, 0.43, dtype), whole(starts, torch.arange(width), 0.43, dtype)
        assert torch.equal(a, b) and not (a == 7).any()


def test_probabilities_are_exact_far_below_a_byte() -> None:
    """Of 2^22 draws, the counts lie within five standard deviations also for a probability of 2^-12 or 1 - 2^-12."""
    n = 1 << 22
    for q in (2.0**-12, 0.1, 0.9, 1 - 2.0**-12, 1 / 3):
        got = float(whole(torch.tensor([0]), n, q).sum())
        assert abs(got - n * q) < 5 * math.sqrt(n * q * (1 - q)), q
    bound = masks.Threshold.of(1 / 3)
    assert (bound.byte + bound.rest / 2**31) / 256 == pytest.approx(1 / 3, abs=2**-39)
    for q in (0.0, 1.0, 1 - 2.0**-45):
        assert (whole(torch.tensor([0]), 4096, q) == round(q)).all()


def test_neighbours_in_a_word_are_independent() -> None:
    x = whole(torch.tensor([0]), 1 << 20, 0.25).view(-1, 8)
    correlation = torch.corrcoef(x.T).fill_diagonal_(0)
    assert correlation.abs().max() < 5 / x.shape[0] ** 0.5
    pattern = (x * 2.0 ** torch.arange(8)).sum(1).long()
    expected = torch.tensor([0.25 ** (n := bin(k).count("1")) * 0.75 ** (8 - n) for k in range(256)]) * x.shape[0]
    chi2 = ((torch.bincount(pattern, minlength=256) - expected) ** 2 / expected)[expected > 5]
    k = chi2.numel() - 1
    assert abs(chi2.sum() - k) < 5 * math.sqrt(2 * k)


def test_calls_steps_and_seeds_share_nothing() -> None:
    draws = [R.random_bernoulli(torch.tensor(s), site, (50_000,), torch.float64, 0.5) for s in (0, 1, 2) for site in (0, 1, 2)]
    assert torch.corrcoef(torch.stack(draws)).fill_diagonal_(0).abs().max() < 5 / 50_000**0.5


def test_dropout_keeps_memory_order_and_half_precision() -> None:
    x = torch.randn(6, 50).t()
    y = R.dropout(x, SEED, 3, 0.25)
    assert y.stride() == x.stride()
    keep = R.random_bernoulli(SEED, 3, (50, 6), torch.float32, 0.75)
    assert torch.equal(y, x * keep * (1 / 0.75))
    for dtype in (torch.bfloat16, torch.float16):
        h = x.contiguous().to(dtype)
        assert torch.equal(R.dropout(h, SEED, 3, 0.25), h * keep.to(dtype) * (1 / 0.75))


def test_attention_blocks_see_the_mask_of_the_whole() -> None:
    want = R.random_bernoulli(SEED, 2, (2, 3, 20, 13), torch.bool, 0.7)
    dims = indices.dim_indices((2, 3, 20, 13), (), (), torch.device("cpu"))
    block = (dims[0], dims[1][1:], dims[2][4:9], dims[3][5:])
    assert torch.equal(R.keep_mask(SEED, 2, 0.3, block), want[:, 1:, 4:9, 5:])
    striped = (dims[0], dims[1], dims[2], dims[3][1::3])
    assert torch.equal(R.keep_mask(SEED, 2, 0.3, striped), want[..., 1::3])
