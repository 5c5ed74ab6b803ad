"""The rules of torch's caching allocator, as the bench of fragments plays them."""

import pytest
from test_executors import program

from bench._caching import MIB, Caching, OutOfMemory, needed_bytes, runs
from colofunc.program.ir import Ref
from colofunc.program.memory import memory


def taken(*sizes: int) -> int:
    caching = Caching(1 << 40)
    for size in sizes:
        caching.take(size)
    return caching.reserved_bytes


@pytest.mark.parametrize(("sizes", "reserved"), [
    ([1], 2 * MIB), ([512 * 1024] * 4, 2 * MIB), ([512 * 1024] * 5, 4 * MIB),  # small ones share segments of 2 MiB
    ([MIB + 1], 20 * MIB), ([5 * MIB] * 4, 20 * MIB), ([5 * MIB] * 5, 40 * MIB), ([10 * MIB], 10 * MIB), ([13 * MIB - 5], 14 * MIB),
])  # fmt: skip
def test_sizes_of_segments(sizes: list[int], reserved: int) -> None:
    assert taken(*sizes) == reserved


def test_what_is_given_back_is_split_and_becomes_one_again() -> None:
    caching = Caching(1 << 40)
    first = caching.take(60 * MIB)
    caching.give(first)
    parts = [caching.take(15 * MIB) for _ in range(4)]
    assert caching.reserved_bytes == 60 * MIB
    for k in (1, 3, 0, 2):
        caching.give(parts[k])
    assert caching.take(60 * MIB).whole and caching.reserved_bytes == 60 * MIB


def test_what_lies_between_blocks_in_use_is_lost_and_whole_segments_are_not() -> None:
    caching = Caching(100 * MIB)
    apart = [caching.take(20 * MIB) for _ in range(5)]
    caching.give(apart[0])
    caching.give(apart[1])
    caching.take(40 * MIB)  # two segments that are free go for one
    assert caching.reserved_bytes == 100 * MIB
    caching = Caching(100 * MIB)
    caching.give(caching.take(100 * MIB))
    parts = [caching.take(20 * MIB) for _ in range(5)]
    caching.give(parts[0])
    caching.give(parts[2])
    with pytest.raises(OutOfMemory):
        caching.take(40 * MIB)


def test_a_program_needs_what_is_alive_and_what_lies_between() -> None:
    """A result that lasts stands behind one that goes, which a larger one cannot take the place of."""
    R = Ref
    nodes = [
        ("aten.sin.default", (R(0),), (2,)), ("aten.cos.default", (R(0),), (3,)), ("aten.neg.default", (R(2),), (4,)),
        ("aten.cat.default", ((R(3), R(3), R(3)),), (5,)), ("aten.neg.default", (R(5),), (6,)),
    ]  # fmt: skip
    small, large = (2048, 1024), (3 * 2048, 1024)
    found = program([0, 1], nodes, [4, 6], [small, (1,), small, small, small, large, large])
    alive = memory(found).peak_bytes["device"]
    assert alive <= needed_bytes(found, alive) <= 1.3 * alive and not runs(found, alive - 1)
