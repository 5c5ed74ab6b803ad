"""tensor("3d"): products over a cube of ranks, their bytes, where things lie, and unmodified models.

Closed form (Agarwal et al., IBM J. R&D 39, 1995), elements that a rank receives per product of (b, i) and (i, o), forward
and in each of the two gradients, with i on x, o on y and b on z: [b i (y-1) + b o (x-1) + i o (z-1)] / (x y z).
"""

from typing import Any

import pytest
import torch
from colofunc_plugins import tensor, zero
from test_tensor_2d import (
    CALLS,
    PRODUCTS,
    TOPOLOGY,
    B,
    D,
    I,
    O,
    W,
    X,
    Y,
    language_model,
    mlp,
    one,
    randn,
    received,
    specs,
)

import colofunc as cf
from colofunc.testing import check, check_strategies, float64

CUBE = cf.Mesh(z=2, x=2, y=2, topology=TOPOLOGY)
PLAN = tensor("3d", ("z", "x", "y"))
LIES = {X: "(z y b) (x i)", W: "(y o) (x z i)", Y: "(z x b) (y o)", (I, O): "(x z i) (y o)", (O,): "(y o)", (I, B): "(x i) (z y b)"}


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize("axes", [dict(z=2, x=2, y=2), dict(z=2, x=2, y=3), dict(z=1, x=2, y=2)])
def test_every_strategy_computes_what_the_operator_does(op: str, axes: dict[str, int]) -> None:
    mesh = cf.Mesh(**axes)
    proved = check_strategies(PLAN, op, CALLS[op], meshes=[mesh])
    assert min(p.share for p in proved) == pytest.approx(1 / mesh.size)
    assert {word for p in proved for word in ("3d inputs", "3d outputs", "3d rows") if word in p.strategy} >= {"3d inputs", "3d outputs"}


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize(("z", "x", "y"), [(2, 2, 2), (2, 4, 2)])
def test_bytes_of_each_product_equal_the_closed_form(product: str, z: int, x: int, y: int) -> None:
    fn, *shapes, out = PRODUCTS[product]
    words = "{x: 3d inputs, y: 3d outputs, z: 3d rows}"
    mesh = cf.Mesh(z=z, x=x, y=y, topology=f"{z * x * y}xa100-80g")  # between boxes other conversions may be faster
    step = one(PLAN, mesh, words, (fn,), tuple(LIES[s] for s in shapes), LIES[out])
    closed = {"y": B * I * (y - 1), "x": B * O * (x - 1), "z": I * O * (z - 1)}
    assert received(step.lower(*(cf.abstract(shape, D) for shape in shapes))) == {a: n // (x * y * z) for a, n in closed.items()}


def test_directions_alternate_and_nothing_is_converted_between_two_products() -> None:
    step, state, batch = mlp()
    low = cf.shard(step, CUBE, PLAN).lower(state, batch)
    first, second = (dict(d.axes) for d in low.plan.find("colofunc.linear"))
    assert first == {"x": "3d inputs", "y": "3d outputs", "z": "3d rows"}
    assert second == {"y": "3d inputs", "x": "3d outputs", "z": "3d rows"}
    assert not {kind for kind, _ in low.cost().calls} & {"all_to_all", "permute"}
    lies = specs(low)
    assert lies["state.params.0.weight"] == "(y a) (x z b)" and lies["state.opt.exp_avg.2.weight"] == "(x a) (y z b)"
    gelu = low.plan.find("aten.gelu.default")[0]
    assert dict(gelu.axes) == {"z": "d0", "x": "d0", "y": "d1"}  # no activation is copied by any axis


@pytest.mark.parametrize(
    ("axes", "plans"),
    [
        (dict(z=2, x=2, y=2), [PLAN]),
        (dict(z=1, x=2, y=3), [PLAN]),
        (dict(z=2, x=1, y=2), [PLAN]),
        (dict(dp=2, z=2, x=2, y=1), [zero(3, "dp"), PLAN]),
        (dict(x=2, y=2, z=2), [tensor("3d", size=8)]),
    ],
)
def test_steps_equal_the_single_device(axes: dict[str, int], plans: list[Any]) -> None:
    step, state, batch = mlp()
    staged = cf.shard(step, cf.Mesh(topology=TOPOLOGY, **axes), *plans)
    assert check(staged, state, batch).worst < 1e-10
    products = staged.lower(state, batch).plan.find("colofunc.linear*")
    assert len(products) == 5 and all({"3d inputs", "3d outputs"} & set(dict(d.axes).values()) for d in products)


def test_accumulated() -> None:
    step, state, batch = mlp()
    assert check(cf.accumulate(cf.shard(step, CUBE, PLAN), microbatches=3), state, batch).worst < 1e-10


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.sweep)])
def test_unmodified_language_models(family: str) -> None:
    step, state, batch = language_model(family)
    staged = cf.shard(step, CUBE, PLAN)
    with float64():
        checked = check(staged, state, batch)
        assert checked.worst < 1e-10
    low = checked.low
    products = [d for d in low.plan.decisions if d.target.startswith(("colofunc.linear", "aten.addmm", "aten.mm"))]
    assert products and all(dict(d.axes)["z"] == "3d rows" for d in products)


def test_bad_input() -> None:
    with pytest.raises(cf.PlanError, match="takes 3 axes, not"):
        tensor("3d", ("x", "y"))
    with pytest.raises(cf.PlanError, match="4 ranks are no cube"):
        tensor("3d", size=4)
    step, state, batch = mlp(rows=6)
    with pytest.raises(cf.PlanError, match=r"the 6 rows of the batch .* do not divide over 4 ranks"):
        cf.shard(step, CUBE, PLAN).lower(state, batch)
    with pytest.raises(cf.MeshError, match="z"):
        cf.shard(step, cf.Mesh(x=2, y=2), PLAN).lower(state, batch)
    with pytest.raises(cf.PlanError, match=r"clash on axis 'x'"):
        cf.shard(step, CUBE, PLAN, {"0.weight": "(x o) i"}).lower(state, randn(24, 24))


def test_an_adapters_products_are_a_pair_under_one_path() -> None:
    """The first of them has its outputs where the second has its inputs, and each its own gradients, whatever else stands there."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16)).double()
    model = cf.lora(cf.functional(net), where="0", rank=4)
    step, state = cf.train_step(
        model, cf.adapt(torch.optim.AdamW, lr=1e-2), loss=lambda out, batch: (out**2).mean(), inputs=lambda batch: ((batch,), {})
    )
    batch = torch.randn(8, 16, dtype=torch.float64)
    sharded = cf.shard(step, CUBE, PLAN)
    low = sharded.lower(state, batch)
    works = [(d.phase, dict(d.axes)["x"]) for d in low.plan.decisions if d.path == "0" and d.target.startswith("colofunc.linear")]
    assert [word for phase, word in works if phase == "forward"].count("3d outputs") == 1  # the adapter's second
    assert all(word.startswith("3d") for _, word in works) and len([1 for phase, _ in works if phase == "backward"]) == 3
    assert check(sharded, state, batch).worst < 1e-10
