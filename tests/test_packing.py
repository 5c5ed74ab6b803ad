"""Chunks: parameters packed in order, and the size that wastes least, against published figures."""

import doctest
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import colofunc as cf
from colofunc.program.passes import packing
from colofunc.program.passes.packing import chunk_size, pack_chunks, usual_sizes, wasted

SIZES = st.lists(st.integers(0, 50), max_size=20)


def gpt2(layers: int, d: int, vocabulary: int, positions: int = 1024) -> list[int]:
    """Elements of GPT-2's parameters in the order of their use."""
    layer = [d, d, 3 * d * d, 3 * d, d * d, d, d, d, 4 * d * d, 4 * d, 4 * d * d, d]
    return [vocabulary * d, positions * d, *layer * layers, d, d]


def test_the_published_chunk_of_a_small_gpt2() -> None:
    """Everything but the embedding, which is an outlier, in one chunk."""
    sizes = gpt2(2, 128, 50258)
    assert chunk_size(sizes, reach=1 << 20, step=128) == 527_872 and wasted(usual_sizes(sizes), 527_872) == 0


def test_the_published_waste_of_gpt2() -> None:
    sizes = gpt2(12, 768, 50257)
    chunk = chunk_size(sizes, least=32 << 20, reach=32 << 20, step=1024)
    assert round(100 * wasted(usual_sizes(sizes), chunk) / sum(sizes), 2) == 0.63


@given(SIZES, st.integers(1, 60))
def test_every_tensor_is_packed_once_in_order_and_none_is_split(sizes: list[int], chunk: int) -> None:
    chunks = pack_chunks(sizes, chunk)
    assert [k for some in chunks for k in some] == list(range(len(sizes)))
    for some in chunks:
        assert sum(sizes[k] for k in some) <= chunk or [sizes[k] for k in some if sizes[k]] == [max(sizes[k] for k in some)]
    for a, b in pairwise(chunks):  # nothing was left behind that would have fitted
        assert sum(sizes[k] for k in a) + sizes[b[0]] > chunk


@given(SIZES, st.integers(50, 60))
def test_waste_is_what_the_chunks_leave_empty(sizes: list[int], chunk: int) -> None:
    assert wasted(sizes, chunk) == len(pack_chunks([s for s in sizes if s], chunk)) * chunk - sum(sizes)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(0, 60), st.integers(0, 80), st.integers(1, 7))
def test_no_size_in_reach_wastes_less(sizes: list[int], least: int, reach: int, step: int) -> None:
    found, kept = chunk_size(sizes, least=least, reach=reach, step=step), usual_sizes(sizes)
    start = -(-max(*kept, least) // step) * step
    by_hand = {size: wasted(kept, size) for size in range(start, start + reach + 1, step)}
    assert found == next(s for s, w in by_hand.items() if w == min(by_hand.values()))


def test_groups_share_a_size() -> None:
    assert chunk_size([4, 4], [6], reach=8, step=1) == 8
    assert chunk_size(least=7, step=4) == 7


def test_bad_input() -> None:
    with pytest.raises(cf.PlanError, match="a chunk of 0 elements holds nothing"):
        pack_chunks([1], 0)
    with pytest.raises(cf.PlanError, match="in steps of 0"):
        chunk_size([1], step=0)


def test_the_docstring() -> None:
    assert doctest.testmod(packing).failed == 0
