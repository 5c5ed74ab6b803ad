"""cf.products and cf.reading: what a plan reads from a program, and one pattern of all three products of a linear layer."""

from types import ModuleType
from typing import Any

import pytest
import torch

import colofunc as cf
from colofunc.testing import check_strategies, sample

LIES = {"x": {"b": "a"}, "w": {"o": "a"}, "y": {"b": "a"}, "bias": {}}  # weights are stored by outputs, work is on rows


def blocks(form: cf.products.Form, way: cf.Strategy) -> Any:
    shape = way.outs[0].local_shape  # type: ignore[union-attr]

    def local(*shards: torch.Tensor, mesh: cf.Mesh) -> torch.Tensor:
        m = form.matrices(shards)
        whole = cf.local.gathered(m["w"], 1, "a", mesh) if "w" in m else None
        if form.wanted == "w":
            return form.given(cf.local.scattered(m["x"].t() @ m["y"], 1, "a", mesh), shape)
        found = m["x"] @ whole if form.wanted == "y" else m["y"] @ whole.t()
        return form.given(found + m["bias"] if "bias" in m else found, shape)

    return local


def strategies(call: Any, mesh: cf.Mesh) -> Any:
    def cost(form: cf.products.Form, way: cf.Strategy) -> tuple[float, int]:
        whole = form.part_bytes(call, way)["w"] * 2
        return mesh.collective_s("reduce_scatter" if form.wanted == "w" else "all_gather", whole, ("a",)), whole

    yield from cf.products.strategies(call, mesh, LIES, (("a", "blocks"),), cost, blocks)


def r(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


CALLS = {
    "colofunc.linear": sample(r(4, 3, 6), r(8, 6), r(8)),
    "colofunc.linear_dx": sample(r(4, 3, 8), r(8, 6)),
    "colofunc.linear_dw": sample(r(4, 3, 8), r(4, 3, 6)),
    "aten.addmm.default": sample(r(8), r(4, 6), r(6, 8)),
    "aten.mm.default": sample(r(4, 6), r(6, 8)),
}


@pytest.mark.parametrize("op", CALLS)
def test_one_pattern_is_a_strategy_of_every_product(op: str) -> None:
    plugin = ModuleType("blocks")
    plugin.colofunc_strategies = cf.hookimpl(lambda: dict.fromkeys(cf.products.FORMS, strategies))  # type: ignore[attr-defined]
    proved = check_strategies(plugin, op, CALLS[op], meshes=[cf.Mesh(a=2), cf.Mesh(dp=2, a=2)])
    assert {"{a: blocks}"} < {p.strategy for p in proved} and max(p.worst for p in proved) < 1e-10


# ---- a program ----


STEP = cf.testing.programs.mlp(batch=8)
MESH = cf.Mesh(tp=2)
PROGRAM = cf.shard(STEP.fn, MESH, auto=False).lower(STEP.state, STEP.batch).global_program


def test_products_with_weights_and_what_they_weigh() -> None:
    found = list(cf.products.weighted(PROGRAM, cf.Rules(PROGRAM, MESH)))
    shapes = [PROGRAM.values[p.leaf].shape for p in found]
    flops = cf.products.work(PROGRAM, cf.Rules(PROGRAM, MESH))
    assert [PROGRAM.nodes[p.index].target for p in found] == ["colofunc.linear"] * 2
    assert [flops[p.index] for p in found] == [2 * 8 * o * i for o, i in shapes] and len(flops) == 2
    assert all(p.spec(summed="i", kept="(tp o)") == "(tp o) i" and PROGRAM.values[p.bias].shape == (o,) for p, (o, _) in zip(found, shapes))


def test_pairs() -> None:
    pairs = cf.product_pairs(PROGRAM, MESH, "tp")
    first, second = cf.products.weighted(PROGRAM, cf.Rules(PROGRAM, MESH))
    assert list(pairs.columns.items())[:1] == [(first, 1)] and list(pairs.rows.items()) == [(second, 1)]


def test_moments_belong_to_the_parameter_of_their_name() -> None:
    of = cf.reading.moments(PROGRAM)
    names = {PROGRAM.values[state].name: PROGRAM.values[param].name for state, param in of.items()}
    assert names and all(state.split(".")[-2:] == param.split(".")[-2:] for state, param in names.items())


def test_rows_of_the_batch() -> None:
    assert {v.shape[0] for v in cf.reading.rows(PROGRAM, 4, "mine")} == {8}
    with pytest.raises(cf.PlanError, match=r"mine: the 8 rows of the batch .* do not divide over 3 ranks; take a multiple"):
        cf.reading.rows(PROGRAM, 3, "mine")


def test_where_a_factor_arises() -> None:
    """Tokens come out of a view that folds the patches' two dims."""

    def step(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (x * w).flatten(1, 2).relu().sin()

    mesh = cf.Mesh(cp=2)
    program = cf.shard(step, mesh, auto=False).lower(torch.ones(()), torch.randn(2, 3, 4, 8)).global_program
    last = next(id for node in program.nodes if node.target == "aten.sin.default" for id in node.outs)
    wanted = cf.Spec("b (cp s) d").bind(mesh, (2, 12, 8))
    (found,) = cf.reading.origins(program, cf.Rules(program, mesh), {last: wanted}).values()
    assert found.shape == (2, 12, 8) and found is wanted
