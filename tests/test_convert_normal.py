"""Puzzles under standard names: what is alike is one, and prices are those of the search itself at every size."""

import random

import pytest
from test_convert import anywhere, major_only

from colofunc.mesh import Mesh
from colofunc.spec.conversions.conversion import conversion_curve, conversion_s
from colofunc.spec.conversions.pattern import pattern_s
from colofunc.spec.conversions.search import prices
from colofunc.spec.spec import Spec

NODE = Mesh(x=2, y=2, z=2, topology="8xa100-80g")  # all axes cost alike
NODES = Mesh(x=2, y=2, z=2, topology="4xa100-80g")  # x crosses nodes


def curve(mesh: Mesh, src: str, dst: str, shape: tuple[int, ...] = (64, 64)):
    return conversion_curve(Spec(src).bind(mesh, shape), Spec(dst).bind(mesh, shape), mesh)


def test_axes_that_cost_alike_share_a_curve() -> None:
    one = curve(NODE, "(x b) d", "b (x d)")
    assert one is curve(NODE, "(y b) d", "b (y d)") is curve(NODE, "b (z d)", "(z b) d", (16, 128))
    assert one is not curve(NODE, "(x b) d", "b d")


def test_axes_that_do_not_cost_alike_share_none() -> None:
    assert curve(NODES, "(x b) d", "b (x d)") is not curve(NODES, "(y b) d", "b (y d)")
    assert curve(NODES, "(z b) d", "b (z d)") is curve(NODES, "(y b) d", "b (y d)")


def test_equal_tables_of_prices_are_one_object() -> None:
    assert prices(NODE, ("x", "y")) is prices(NODE, ("z", "x"))
    assert prices(NODES, ("x", "y")) is not prices(NODES, ("y", "z"))


@pytest.mark.parametrize("mesh", [NODE, NODES], ids=["node", "nodes"])
def test_a_curve_is_the_search_at_every_size(mesh: Mesh) -> None:
    """From bytes that only latency prices to those that only bandwidth does, asked in no order."""
    rng = random.Random(0)
    pairs = [(anywhere(rng, mesh, (16, 8, 8)), anywhere(rng, mesh, (16, 8, 8))) for _ in range(15)]
    for src, dst in pairs:
        found = conversion_curve(src, dst, mesh)
        for itemsize in rng.sample([1, 64, 1 << 12, 1 << 18, 1 << 24], 5) if found is not None and src is not dst else ():
            want = conversion_s(src, dst, mesh, itemsize)
            assert found.seconds(src.local_numel * itemsize) == pytest.approx(want, rel=1e-9), (src, dst, itemsize)


def test_patterns_cost_what_the_conversion_does() -> None:
    """Major layouts and composite ones, with room for every axis."""
    rng, shape = random.Random(1), (64, 64, 64)
    major = major_only(NODES, shape)
    for _ in range(40):
        for src, dst in ((rng.choice(major), rng.choice(major)), (rng.choice(major), anywhere(rng, NODES, shape))):
            assert pattern_s(src, dst, NODES, 4) == pytest.approx(conversion_s(src, dst, NODES, 4), rel=1e-9), (src, dst)
