"""Random numbers as plain expressions of the index: the numbers of the operators, bit for bit."""

import pytest
import torch

from colofunc.ops import draws
from colofunc.ops import random as R
from colofunc.ops.indices import index_of
from tests.test_random import reference_bits

SEED = torch.tensor(-5)
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
# (shape, sizes, strides, offset) of parts: whole, blocks, stripes, runs that begin within a word.
PLACES = [
    ((3, 50), (), (), None),
    ((4, 24), (4, 24), (48, 1), 24),
    ((4, 21), (4, 21), (43, 1), 5),
    ((4, 12), (4, 12), (48, 4), 3),
    ((5, 6), (5, 3, 2), (12, 4, 1), 2),
    ((), (), (), 7),
    ((0, 3), (), (), None),
]


def whole_index(shape, sizes, strides, offset):
    index = index_of(shape, sizes, strides, offset, torch.device("cpu"))
    return (index.rows.unsqueeze(1) + index.listed()).view(shape)


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_the_expressions_are_the_operators(place) -> None:
    shape, sizes, strides, offset = place
    rest = (sizes, strides, None if offset is None else torch.tensor(offset))
    index, key = whole_index(*place), draws.key_of(SEED, 3)
    assert torch.equal(draws.bits(index, key), R.random_bits(SEED, 3, shape, *rest))
    for dtype in FLOATS:
        assert torch.equal(draws.uniform(index, key, dtype), R.random_uniform(SEED, 3, shape, dtype, *rest))
        assert torch.equal(draws.normal(index, key, dtype), R.random_normal(SEED, 3, shape, dtype, *rest))
    for q in (0.0, 0.9, 0.5, 1 / 3, 1.0 - 2.0**-41, 1.0):
        assert torch.equal(draws.keep(q, index, key), R.random_bernoulli(SEED, 3, shape, torch.bool, q, *rest))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_uniform_numbers_are_the_top_bits(dtype: torch.dtype) -> None:
    count = draws.UNIFORM_BITS[dtype]
    want = [(reference_bits(-5, 3, i) & (1 << 64) - 1) >> (64 - count) for i in range(100)]
    assert (R.random_uniform(SEED, 3, (100,), dtype).double() * 2.0**count).tolist() == want


def test_numbers_do_not_depend_on_the_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [((7, 100), (7, 100), (200, 2), torch.tensor(3)), ((7, 100), (), (), None)]
    before = [R.random_normal(SEED, 3, shape, dtype, *rest) for shape, *rest in places for dtype in FLOATS]
    monkeypatch.setattr(R, "TILE", 64)
    after = [R.random_normal(SEED, 3, shape, dtype, *rest) for shape, *rest in places for dtype in FLOATS]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
