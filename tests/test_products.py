"""cf.ext.products and cf.ext.reading: what a plan reads from a program, and one pattern of all three products of a linear layer."""

from math import prod
from types import ModuleType
from typing import Any

import pytest
import torch

import colofunc as cf
from colofunc.testing import check_strategies, sample

LIES = {"x": {"b": "a"}, "w": {"o": "a"}, "y": {"b": "a"}, "bias": {}}  # weights are stored by outputs, work is on rows


def blocks(form: cf.ext.products.Form, way: cf.Strategy) -> Any:
    shape = way.outs[0].local_shape  # type: ignore[union-attr]

    def local(*shards: torch.Tensor, mesh: cf.Mesh) -> torch.Tensor:
        m = form.matrices(shards)
        whole = cf.ext.local.gathered(m["w"], 1, "a", mesh) if "w" in m else None
        if form.wanted == "w":
            return form.given(cf.ext.local.scattered(m["x"].t() @ m["y"], 1, "a", mesh), shape)
        found = m["x"] @ whole if form.wanted == "y" else m["y"] @ whole.t()
        return form.given(found + m["bias"] if "bias" in m else found, shape)

    return local


def strategies(call: Any, mesh: cf.Mesh) -> Any:
    def cost(form: cf.ext.products.Form, way: cf.Strategy) -> tuple[float, int]:
        whole = form.part_bytes(call, way)["w"] * 2
        return mesh.collective_s("reduce_scatter" if form.wanted == "w" else "all_gather", whole, ("a",)), whole

    yield from cf.ext.products.strategies(call, mesh, LIES, (("a", "blocks"),), cost, blocks)


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
    plugin.colofunc_strategies = cf.hookimpl(lambda: dict.fromkeys(cf.ext.products.matrix_products(), strategies))  # type: ignore[attr-defined]
    proved = check_strategies(plugin, op, CALLS[op], meshes=[cf.Mesh(a=2), cf.Mesh(dp=2, a=2)])
    assert {"{a: blocks}"} < {p.strategy for p in proved} and max(p.worst for p in proved) < 1e-10


# ---- a program ----


STEP = cf.testing.programs.mlp(batch=8)
MESH = cf.Mesh(tp=2)
PROGRAM = cf.shard(STEP.fn, MESH, auto=False).lower(STEP.state, STEP.batch).global_program


def test_products_with_weights_and_what_they_weigh() -> None:
    found = list(cf.ext.products.weighted(PROGRAM, cf.ext.Rules(PROGRAM, MESH)))
    shapes = [PROGRAM.values[p.leaf].shape for p in found]
    flops = cf.ext.products.work(PROGRAM, cf.ext.Rules(PROGRAM, MESH))
    assert [PROGRAM.nodes[p.index].target for p in found] == ["colofunc.linear"] * 2
    assert [flops[p.index] for p in found] == [2 * 8 * o * i for o, i in shapes] and len(flops) == 2
    for product, (rows, _) in zip(found, shapes, strict=True):
        assert product.spec(summed="i", kept="(tp o)") == "(tp o) i"
        assert [PROGRAM.values[id].shape for id in product.vectors] == [(rows,)]


def test_a_table_that_is_multiplied_with_a_weight_is_not_taken_for_it() -> None:
    w = {"table": r(8, 16), "weight": r(4, 16), "experts": r(4, 16, 6)}

    def loss(w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        chosen = w["experts"][x.argmax(-1)]
        return (torch.nn.functional.linear(w["table"], w["weight"]) @ x.t()).sum() + torch.bmm(r(8, 1, 16), chosen).sum()

    program = cf.shard(lambda w, x: cf.value_and_grad(loss)(w, x), MESH, auto=False).lower(w, r(8, 4)).global_program
    products = cf.ext.products.weighted(program, cf.ext.Rules(program, MESH))
    found = {program.values[p.leaf].name: (p.summed, p.kept, p.spec("i", "o")) for p in products}
    assert found == {"w.weight": (1, 0, "o i"), "w.experts": (1, 2, "_ i o")}


def test_how_a_dim_of_a_weight_is_written() -> None:
    assert [cf.ext.products.dim("x z", "i"), cf.ext.products.dim("tp", "o", stripes=3)] == ["(x z i)", "(3 tp o)"]


def test_what_a_factor_must_divide_into() -> None:
    """b lies on z and y in X, on z and x in Y."""
    mesh = cf.Mesh(x=2, y=3, z=2)
    lies = {"x": {"b": "z y", "i": "x"}, "w": {"i": "x z", "o": "y"}, "y": {"b": "z x", "o": "y"}}
    assert [cf.ext.products.parts(mesh, lies, f) for f in "bio"] == [12, 4, 3]


def test_the_share_of_the_work_that_some_products_do() -> None:
    rules = cf.ext.Rules(PROGRAM, MESH)
    first, second = cf.ext.products.weighted(PROGRAM, rules)
    assert cf.ext.products.share(PROGRAM, rules, {first.index, second.index})[0] == 1
    share, rest = cf.ext.products.share(PROGRAM, rules, {first.index})
    sizes = [PROGRAM.values[p.leaf].shape for p in (first, second)]
    assert share == pytest.approx(prod(sizes[0]) / sum(map(prod, sizes)))
    assert rest == f"colofunc.linear in {second.path!r} on {(8, sizes[1][1])} and {sizes[1]}"


def test_a_pattern_is_wished_for_forward_and_for_gradients() -> None:
    mesh = cf.Mesh(a=2, b=2, c=2, d=1)
    product = next(cf.ext.products.weighted(PROGRAM, cf.ext.Rules(PROGRAM, mesh)))
    words = tuple((axis, f"mine {axis}") for axis in "abcd")
    wishes = list(cf.ext.products.wishes(PROGRAM, mesh, {product: words}, "me"))
    both, third = "{a: mine a, b: mine b}", "{c: mine c}"  # the planner takes two axes together; one of size 1 says nothing
    phases = [(w.want, *w.phases) for w in wishes]
    assert phases == [(both, "forward"), (both, "backward"), (third, "forward"), (third, "backward")]
    assert {w.targets for w in wishes} == {("colofunc.linear",), ("colofunc.linear_dx", "colofunc.linear_dw")}
    assert all(w.along and w.match == product.path and not w.values for w in wishes)


def test_pairs() -> None:
    pairs = cf.ext.product_pairs(PROGRAM, MESH, "tp")
    first, second = cf.ext.products.weighted(PROGRAM, cf.ext.Rules(PROGRAM, MESH))
    assert list(pairs.columns.items())[:1] == [(first, 1)] and list(pairs.rows.items()) == [(second, 1)]


def test_moments_belong_to_the_parameter_of_their_name() -> None:
    of = cf.ext.reading.moments(PROGRAM)
    names = {PROGRAM.values[state].name: PROGRAM.values[param].name for state, param in of.items()}
    assert names and all(state.split(".")[-2:] == param.split(".")[-2:] for state, param in names.items())


def test_moments_lie_as_their_parameters() -> None:
    of = cf.ext.reading.moments(PROGRAM)
    one = next(iter(of.values()))
    mine = [state for state, param in of.items() if param == one]
    assert cf.ext.reading.with_moments(PROGRAM, {one: "(tp o) i"}) == dict.fromkeys((one, *mine), "(tp o) i") and mine


def test_layers_of_experts_and_their_router() -> None:
    w = {"dense": r(16, 16), "router": r(4, 16), "up": r(4, 32, 16), "down": r(4, 16, 16)}

    def loss(w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        h = torch.nn.functional.linear(x, w["dense"])
        index, weight, _ = cf.moe.route(torch.nn.functional.linear(h, w["router"]), k=2)
        return cf.moe.experts(h, index, weight, w["up"], w["down"]).sum()

    mesh = cf.Mesh(tp=2, dp=2, pp=1)
    program = cf.shard(lambda w, x: cf.value_and_grad(loss)(w, x), mesh, auto=False).lower(w, r(8, 16)).global_program
    ((index, wishes, leaves),) = cf.ext.reading.experts(program, mesh, "tp", "me", rows=("dp", "pp"))
    assert program.nodes[index].target == "colofunc.experts" and [wish.want for wish in wishes] == ["{tp: f}", "{dp: b0}"]
    assert {program.values[id].shape: lies.axes for id, lies in leaves.items()} == {(4, 32, 16): ("tp",), (4, 16, 16): ("tp",)}
    every = {program.values[p.leaf].shape: p.index for p in cf.ext.products.weighted(program, cf.ext.Rules(program, mesh))}
    assert cf.ext.reading.routers(program, every.values()) == {every[4, 16]} and len(every) == 2
    assert not list(cf.ext.reading.experts(program, cf.Mesh(tp=3), "tp", "me"))


def test_rows_of_the_batch() -> None:
    assert {v.shape[0] for v in cf.ext.reading.rows(PROGRAM, 4, "mine")} == {8}
    with pytest.raises(cf.PlanError, match=r"mine: the 8 rows of the batch .* do not divide over 3 ranks; take a multiple"):
        cf.ext.reading.rows(PROGRAM, 3, "mine")


def test_where_a_factor_arises() -> None:
    """Tokens come out of a view that folds the patches' two dims."""

    def step(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (x * w).flatten(1, 2).relu().sin()

    mesh = cf.Mesh(cp=2)
    program = cf.shard(step, mesh, auto=False).lower(torch.ones(()), torch.randn(2, 3, 4, 8)).global_program
    last = next(id for node in program.nodes if node.target == "aten.sin.default" for id in node.outs)
    wanted = cf.Spec("b (cp s) d").bind(mesh, (2, 12, 8))
    (found,) = cf.ext.reading.origins(program, cf.ext.Rules(program, mesh), {last: wanted}).values()
    assert found.shape == (2, 12, 8) and found is wanted
