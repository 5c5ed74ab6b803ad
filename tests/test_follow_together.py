"""Flows of several plans through one operator: each cuts the same factor, rows of a batch flattened, in a place of its own."""

import itertools
from typing import Any

import attrs
import pytest
import torch
from colofunc_plugins import experts

import colofunc as cf
from colofunc.planner.wishes.flow_constraints import _refined
from colofunc.planner.wishes.layout_equality import lies_alike
from colofunc.testing import check

ROWS, TOKENS = 8, 16


@attrs.frozen
class Dealt:
    """A leaf of the batch lies so, and what works on it."""

    axis: str
    spec: str

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(self.axis.split())

    def wishes(self, program: Any, mesh: cf.Mesh) -> list[cf.ext.Wish]:
        return [cf.ext.Wish("batch*", self.spec, self.axes, ("batch",), f"dealt({self.axis})", along=True)]


def flat(state: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A router: tokens of all rows are one dim of its product."""
    y = torch.nn.functional.linear(batch.flatten(0, 1), state)
    return state, y.softmax(-1).square().mean()


PLANS = {
    "rows": Dealt("r", "(r b) ..."),
    "blocks": Dealt("s", "b (s t) ..."),
    "stripes": Dealt("c", "b (t c) ..."),
    "more": Dealt("u", "b (u t) ..."),
    "levels": Dealt("o i", "(o i b) ..."),  # hybrid: rows over two axes
}
THREE = [("rows", "blocks", "stripes"), ("rows", "stripes", "more"), ("rows", "blocks", "more"), ("levels", "blocks", "stripes")]


@pytest.mark.parametrize("names", [*itertools.combinations(PLANS, 2), *THREE], ids="-".join)
def test_plans_that_cut_one_flat_dim_in_different_places(names: tuple[str, ...]) -> None:
    """Two axes in blocks on the tokens themselves, too: the later one lies inside the earlier."""
    plans = [PLANS[name] for name in names]
    mesh = cf.Mesh(**{axis: 2 for plan in plans for axis in plan.axes}, topology="16xa100-80g")
    step = cf.shard(flat, mesh, *plans)
    args = torch.randn(4, 8, dtype=torch.float64), torch.randn(ROWS, TOKENS, 8, dtype=torch.float64)
    low = step.lower(*args)
    product = next(n for n in low.program.nodes if n.target == "colofunc.linear")
    assert low.program.values[product.refs[0]].shape == (ROWS * TOKENS // mesh.size, 8)
    assert not any(kind in ("all_gather", "all_to_all") for kind, _ in low.cost().calls)
    assert check(step, *args, steps=1).worst < 1e-10


def test_two_ways_of_one_factor_are_refined() -> None:
    assert _refined(((16, None), (2, "t"), (8, None)), ((128, None), (2, "c"))) == ((16, None), (2, "t"), (4, None), (2, "c"))
    assert _refined(((16, None), (2, "t"), (8, None)), ((2, "r"), (128, None))) == ((2, "r"), (8, None), (2, "t"), (8, None))
    assert _refined(((6, None), (2, "t")), ((4, None), (3, "c"))) is None


def test_axes_beside_are_no_part_of_what_stands_before() -> None:
    """`(16 t 8)`, rows by tokens, is met where others split the rows or the tokens, not where the axis cuts elsewhere."""
    mesh = cf.Mesh(r=2, s=2, t=2)
    want, met, other = (cf.Spec(text).bind(mesh, (256,)) for text in ("(16 t 8)", "(r 8 s t 4)", "(r 2 s t 16)"))
    assert lies_alike(want, met, ("t",)) and not lies_alike(want, other, ("t",))


def mixture(w: dict[str, torch.Tensor], batch: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A layer of experts on flattened tokens."""
    rows = batch.flatten(0, 1)
    index, weight, _ = cf.moe.route(rows @ w["router"].T, k=2)
    return w, (cf.moe.experts(rows, index, weight, w["up"], w["down"]) ** 2).mean()


def test_experts_beside_two_plans_that_deal_their_tokens() -> None:
    """A rank dispatches the tokens that it has, whoever dealt them: blocks of one plan, stripes of another."""
    torch.manual_seed(0)
    shapes = {"router": (4, 8), "up": (4, 16, 8), "down": (4, 8, 8)}
    w = {name: torch.randn(shape, dtype=torch.float64) / 4 for name, shape in shapes.items()}
    mesh = cf.Mesh(u=2, c=2, ep=2, topology="8xa100-80g")
    step = cf.shard(mixture, mesh, experts("ep"), PLANS["more"], PLANS["stripes"])
    x = torch.randn(ROWS, TOKENS, 8, dtype=torch.float64)
    low = step.lower(w, x)
    (layer,) = (d for d in low.plan.decisions if d.target == "colofunc.experts")
    assert dict(layer.axes) == {"ep": "dispatch", "c": "b0", "u": "b0"}
    assert check(step, w, x, steps=1).worst < 1e-10
