"""tensor("2d") and ("2.5d"): SUMMA on single products and on unmodified models, its bytes and where things lie.

Closed form (SUMMA, van de Geijn and Watts 1997; Optimus, 2104.05343), elements that a rank receives per product of (b, i) and
(i, o) on x by y ranks, forward and in each of the two gradients: [b i (y-1) + i o (x-1)] / (x y).
"""

from typing import Any

import narrow
import pytest
import torch
from colofunc_plugins import tensor, tp2d_25d_3d, zero
from colofunc_plugins.tp2d_25d_3d.summa import panels
from torch import nn

import colofunc as cf
from colofunc.program.passes.schedule import overlap
from colofunc.testing import check, check_strategies, float64
from colofunc.testing.prove import sample

TOPOLOGY = "4xa100-80g"
GRID = cf.Mesh(x=2, y=2, topology=TOPOLOGY)
D = torch.float64


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=D)


def mlp(rows: int = 24, width: int = 24, hidden: int = 48, dtype: torch.dtype = torch.float64, eps: float = 1e-8) -> Any:
    """(step, state, batch): two products with biases."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)).to(dtype)
    fn = lambda out, b: (out**2).mean()  # noqa: E731
    step, state = cf.train_step(cf.functional(net), cf.adapt(torch.optim.AdamW, lr=1e-2, eps=eps), loss=fn, inputs=lambda b: ((b,), {}))
    return step, state, randn(rows, width).to(dtype)


def specs(low: Any) -> dict[str, str]:
    return {leaf.name: leaf.spec for leaf in low.plan.inputs}


def one(plan: Any, mesh: cf.Mesh, words: str, call: tuple[Any, ...], lies: tuple[str, ...], gives: str) -> Any:
    """One product as a step of its own, on operands that lie as the pattern wants them."""
    fn = lambda *args: call[0](*args)  # noqa: E731
    return cf.shard(fn, mesh, {"*": words}, plugins=[plan], in_specs=lies, out_specs=gives, donate=())


def received(low: Any) -> dict[str, int]:
    """Elements of 8 bytes that a rank receives, by axis."""
    found: dict[str, int] = {}
    for (_, axis), nbytes in low.cost().bytes.items():
        found[axis] = found.get(axis, 0) + nbytes // 8
    return found


# ---- single operators ----

CALLS = {
    "colofunc.linear": sample(randn(12, 2, 24), randn(12, 24), randn(12)),
    "colofunc.linear_dx": sample(randn(12, 2, 12), randn(12, 24)),
    "colofunc.linear_dw": sample(randn(12, 2, 12), randn(12, 2, 24)),
    "aten.addmm.default": sample(randn(12), randn(12, 24), randn(24, 12)),
    "aten.mm.default": sample(randn(12, 24), randn(24, 12)),
}
MESHES = [("2d", dict(x=2, y=2)), ("2d", dict(x=2, y=3)), ("2d", dict(dp=2, x=2, y=2)), ("2.5d", dict(x=2, y=2, z=2))]


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize(("mode", "axes"), MESHES)
def test_every_strategy_computes_what_the_operator_does(op: str, mode: str, axes: dict[str, int]) -> None:
    plan, mesh = tensor(mode), cf.Mesh(**axes)
    proved = check_strategies(plan, op, CALLS[op], meshes=[mesh])
    assert min(p.share for p in proved) == pytest.approx(1 / mesh.size)  # the work is shared by all ranks
    assert all("x: summa rows, y: summa columns" in p.strategy for p in proved)
    assert any("z: summa depth" in p.strategy for p in proved) == (mode == "2.5d")


def test_several_sizes_of_the_summed_dim() -> None:
    """12 and 20 in two panels, 2 in one."""
    calls = [sample(randn(4, i), randn(4, i)) for i in (2, 12, 20)]
    assert len(check_strategies(tensor("2d"), "colofunc.linear", *calls, meshes=[cf.Mesh(x=2, y=2)])) == 6
    assert [panels(i, 2, 2) for i in (2, 12, 20, 1024)] == [1, 2, 2, 2] and panels(1024, 2, 4) == 4


# ---- bytes and buffers ----


B, I, O = 4096, 1024, 4096 + 2048  # so large that nothing but bytes counts; nothing is run
X, W, Y = (B, I), (O, I), (B, O)
LIES = {X: "(x b) (y i)", W: "(y o) (x i)", Y: "(x b) (y o)", (I, O): "(x i) (y o)", (O,): "(y o)", (I, B): "(y i) (x b)"}
OPS = torch.ops.colofunc
PRODUCTS = {
    "linear": (OPS.linear, X, W, Y),
    "linear with bias": (OPS.linear, X, W, (O,), Y),
    "dx": (OPS.linear_dx, Y, W, X),
    "dw": (OPS.linear_dw, Y, X, W),
    "addmm": (torch.addmm, (O,), X, (I, O), Y),
    "mm": (torch.mm, X, (I, O), Y),
    "mm of a transposed operand": (torch.mm, (I, B), Y, (I, O)),
}


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize(("x", "y"), [(2, 2), (2, 4), (4, 1)])
def test_bytes_of_each_product_equal_the_closed_form(product: str, x: int, y: int) -> None:
    fn, *shapes, out = PRODUCTS[product]
    words = "{x: summa rows, y: summa columns}"
    step = one(tensor("2d"), cf.Mesh(x=x, y=y, topology=TOPOLOGY), words, (fn,), tuple(LIES[s] for s in shapes), LIES[out])
    closed = {"y": B * I * (y - 1) // (x * y), "x": I * O * (x - 1) // (x * y)}
    assert received(step.lower(*(cf.abstract(shape, D) for shape in shapes))) == {axis: n for axis, n in closed.items() if n}


def test_buffers_are_two_panels() -> None:
    """On 4 by 4 ranks: four panels of what a rank's row and column of blocks hold; two are there at once, and the slice that it sends."""
    b, i, o, q, count = 512, 1024, 256, 4, 4
    lies = ("(x b) (y i)", "(x i) (y o)")
    step = one(tensor("2d"), cf.Mesh(x=q, y=q, topology=TOPOLOGY), "{x: summa rows, y: summa columns}", (torch.mm,), lies, "(x b) (y o)")
    low = step.on("simulated").lower(cf.abstract((b, i), D), cf.abstract((i, o), D))  # on real ranks the next is on its way too
    assert panels(i, q, q) == count
    stored, result, whole = (b * i + i * o) // q**2 * 8, b * o // q**2 * 8, (b * i + i * o) // q * 8
    extra = low.memory().peak_bytes["device"] - stored - result
    assert whole // count < extra <= 2 * whole // count + whole // count // q
    assert sum(n.target == "aten.addmm_.default" for n in low.program.nodes) == count - 1  # panels are added in place


def test_the_next_panel_is_on_its_way_while_one_multiplies() -> None:
    """On real ranks: each product but the last stands between a start and its wait."""
    lies = ("(x b) (y i)", "(x i) (y o)")
    step = one(tensor("2d"), GRID, "{x: summa rows, y: summa columns}", (torch.mm,), lies, "(x b) (y o)")
    low = step.lower(cf.abstract((512, 12), D), cf.abstract((12, 256), D))
    flying, beside = set[int](), []
    for node in overlap(low.program).nodes:
        if node.target == "colofunc.all_gather_start":
            flying.add(node.outs[0])
        elif node.target == "colofunc.wait":
            flying -= set(node.refs)
        elif "mm" in node.target:
            beside.append(len(flying))
    assert len(beside) == panels(12, 2, 2) == 2 and beside == [2, 0]  # of X and of W


def steps_on_real_ranks() -> float:
    step, state, batch = mlp()
    staged = cf.shard(step, cf.Mesh(x=1, y=2), tensor("2d"))
    placed = staged.init(state, batch)
    for _ in range(2):
        placed, metrics = staged(placed, batch)
    return float(metrics["loss"])


@pytest.mark.dist
def test_real_ranks_equal_one_device() -> None:
    step, state, batch = mlp()
    for _ in range(2):
        state, metrics = step(state, batch)
    assert cf.launch(steps_on_real_ranks, 2) == pytest.approx([float(metrics["loss"])] * 2, abs=1e-12)


# ---- where things lie ----


def test_weights_moments_and_activations_are_split_over_both_axes() -> None:
    step, state, batch = mlp()
    low = cf.shard(step, GRID, tensor("2d")).lower(state, batch)
    lies = specs(low)
    for name in ("state.params.0.weight", "state.opt.exp_avg.2.weight"):
        assert lies[name] == "(y a) (x b)"
    assert lies["batch"].startswith("(x a)")
    gelu = low.plan.find("aten.gelu.default")[0]
    assert dict(gelu.axes) == {"x": "d0", "y": "d1"}
    assert all(set(dict(d.axes).values()) == {"summa rows", "summa columns"} for d in low.plan.find("colofunc.linear_dw"))


def test_depth_splits_rows_and_copies_weights() -> None:
    step, state, batch = mlp()
    low = cf.shard(step, cf.Mesh(x=2, y=2, z=2, topology=TOPOLOGY), tensor("2.5d", depth=2)).lower(state, batch)
    lies = specs(low)
    assert lies["state.params.0.weight"] == "(y a) (x b)" and lies["batch"].startswith("(x z a)")
    assert all(("z", "summa depth") in d.axes for d in low.plan.find("colofunc.linear"))


# ---- whole steps ----


@pytest.mark.parametrize(
    ("axes", "plans"),
    [
        (dict(x=2, y=2), [tensor("2d")]),
        (dict(x=2, y=3), [tensor("2d")]),
        (dict(x=2, y=2, z=2), [tensor("2.5d", ("x", "y", "z"), depth=2)]),
        (dict(x=2, y=2, z=1), [tensor("2.5d", size=4, depth=1)]),
        (dict(dp=2, x=2, y=2), [zero(1, "dp"), tensor("2d")]),
        (dict(dp=2, x=2, y=2), [zero(3, "dp"), tensor("2d")]),
        (dict(x=2, y=2, dp=2), [tensor("2d"), zero(2, "dp")]),
    ],
)
def test_steps_equal_the_single_device(axes: dict[str, int], plans: list[Any]) -> None:
    step, state, batch = mlp()
    staged = cf.shard(step, cf.Mesh(topology=TOPOLOGY, **axes), *plans)
    assert check(staged, state, batch).worst < 1e-10
    products = staged.lower(state, batch).plan.find("colofunc.linear*")
    assert len(products) == 5 and all("summa columns" in dict(d.axes).values() for d in products)


def test_accumulated_and_in_low_precision() -> None:
    step, state, batch = mlp()
    staged = cf.accumulate(cf.shard(step, GRID, tensor("2d")), microbatches=2)
    assert check(staged, state, batch).worst < 1e-10
    step, state, batch = mlp(dtype=torch.float32, eps=narrow.EPS)
    half = cf.precision(cf.shard(step, GRID, tensor("2d")), "bf16")
    assert any("summa columns" in dict(d.axes).values() for d in half.lower(state, batch).plan.find("colofunc.linear*"))
    assert 0 < narrow.check(half, state, batch).worst <= 1


def language_model(family: str) -> Any:
    transformers = pytest.importorskip("transformers")
    base = dict(vocab_size=64, bos_token_id=1, eos_token_id=1, pad_token_id=0)
    size = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=8)
    name, options = {
        "gpt2": ("GPT2LMHeadModel", dict(n_embd=16, n_layer=1, n_head=2, n_positions=8, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)),
        "llama": ("LlamaForCausalLM", dict(num_key_value_heads=2, intermediate_size=32, **size)),
        "opt": ("OPTForCausalLM", dict(ffn_dim=32, word_embed_proj_dim=16, dropout=0.0, attention_dropout=0.0, **size)),
    }[family]
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    net = cls(cls.config_class(**base, **options)).double()
    ids = torch.randint(2, 64, (4, 8))
    step, state = cf.train_step(cf.functional(net), cf.adapt(torch.optim.AdamW, lr=1e-3), clip=1.0)
    return step, state, {"input_ids": ids, "labels": ids.clone()}


@pytest.mark.parametrize("family", ["llama", *(pytest.param(family, marks=pytest.mark.sweep) for family in ("gpt2", "opt"))])
def test_unmodified_language_models(family: str) -> None:
    step, state, batch = language_model(family)
    staged = cf.shard(step, GRID, tensor("2d"))
    with float64():
        checked = check(staged, state, batch)
        assert checked.worst < 1e-10
    low = checked.low
    products = [d for d in low.plan.decisions if d.target.startswith(("colofunc.linear", "aten.addmm", "aten.mm"))]
    assert products and all(dict(d.axes)["x"] == "summa rows" for d in products)
    assert low.coverage().fallbacks == ()
    if family == "gpt2":  # query, key and value are cut from stripes of the fused weight: nothing is rearranged
        assert not {kind for kind, _ in low.cost().calls if kind == "all_to_all"}


def test_auto_over_two_axes_offers_the_grid_beside_the_rules_ways() -> None:
    step, state, batch = mlp()
    staged = cf.shard(step, GRID, tensor("auto", ("x", "y")))
    assert check(staged, state, batch).worst < 1e-10
    ways = {str(sorted(dict(d.axes).items())) for d in staged.lower(state, batch).plan.find("colofunc.linear")}
    assert all("x" in way and "y" in way for way in ways)  # whatever cost says, both axes share the work
    proved = check_strategies(tensor("auto", ("x", "y")), "colofunc.linear", CALLS["colofunc.linear"], meshes=[cf.Mesh(x=2, y=2)])
    assert {p.strategy.split(",")[0] for p in proved} == {"{x: summa rows", "{y: summa rows"}


# ---- bad input ----


def test_bad_arguments() -> None:
    wrong: Any = {("2d", "x"): "2 axes", ("2d", ("x", "y", "z")): "2 axes", ("2.5d", ("x",)): "2 or 3 axes", ("2d", ("x", "x")): "twice"}
    for (mode, axes), words in wrong.items():
        with pytest.raises(cf.PlanError, match=words):
            tensor(mode, axes)
    with pytest.raises(cf.PlanError, match=r"tensor\('2d'\) has no depth"):
        tensor("2d", depth=2)
    with pytest.raises(cf.PlanError, match="at least one deep"):
        tensor("2.5d", depth=0)
    with pytest.raises(cf.PlanError, match="8 ranks are no square; leave out size="):
        tensor("2d", size=8)
    with pytest.raises(cf.PlanError, match="leaves open how deep"):
        tensor("2.5d", size=8)
    with pytest.raises(cf.PlanError, match=r"modes 'auto', '2d', '2.5d', '3d', not '1d'; colofunc_plugins.tensor has every mode"):
        tp2d_25d_3d.tensor("1d", "tp")
    assert tensor("2.5d", depth=2, size=8).sizes == (2, 2, 2) and tensor("2.5d", ("r", "c"), depth=2).axes == ("r", "c", "depth")


def test_bad_meshes_and_sizes() -> None:
    step, state, batch = mlp()
    with pytest.raises(cf.MeshError, match="y"):
        cf.shard(step, cf.Mesh(x=4), tensor("2d")).lower(state, batch)
    with pytest.raises(cf.PlanError, match=r"axis 'x' of .* has 4 ranks, where the plan says 2"):
        cf.shard(step, cf.Mesh(x=4, y=2), tensor("2d", size=4)).lower(state, batch)
    with pytest.raises(cf.PlanError, match=r"the 24 rows of the batch .* do not divide over 5 ranks"):
        cf.shard(step, cf.Mesh(x=5, y=2), tensor("2d")).lower(state, batch)
    with pytest.raises(cf.PlanError, match="no product with a weight whose inputs and outputs both divide over 2 by 5 ranks"):
        cf.shard(step, cf.Mesh(x=2, y=5), tensor("2d")).lower(state, batch)
    with pytest.raises(cf.PlanError, match="two wishes clash on axis 'x'"):
        cf.shard(step, GRID, zero(3, "x"), tensor("2d")).lower(state, batch)


def test_a_model_of_convolutions_is_refused() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 4)).double()
    loss = lambda out, b: out.square().mean()  # noqa: E731
    step, state = cf.train_step(cf.functional(net), cf.adapt(torch.optim.SGD, lr=1e-2), loss=loss, inputs=lambda b: ((b,), {}))
    with pytest.raises(cf.PlanError, match=r"splits 13 % of the work with weights; these stay whole: aten.convolution.default in '\*'"):
        cf.shard(step, GRID, tensor("2d")).lower(state, randn(4, 3, 8, 8))


def test_a_size_that_does_not_divide_keeps_its_product_out() -> None:
    """A classifier of 10 classes on 2 by 4 ranks: the rest is on the grid, and the numbers hold."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 10)).double()
    fn = lambda out, b: (out**2).mean()  # noqa: E731
    step, state = cf.train_step(cf.functional(net), cf.adapt(torch.optim.SGD, lr=1e-2), loss=fn, inputs=lambda b: ((b,), {}))
    staged = cf.shard(step, cf.Mesh(x=2, y=4, topology=TOPOLOGY), tensor("2d"))
    assert check(staged, state, randn(8, 16)).worst < 1e-10
    words = {d.path: dict(d.axes).get("y") for d in staged.lower(state, randn(8, 16)).plan.find("colofunc.linear")}
    assert words["0"] == "summa columns" and words["2"] != "summa columns"


@pytest.mark.parametrize("mode, sizes", [("2d", dict(x=2, y=2)), ("3d", dict(x=2, y=2, z=2))])
def test_experts_on_a_grid_have_hidden_units_where_others_have_columns(mode: str, sizes: dict[str, int]) -> None:
    """The product before them is the grid's; their router, as narrow as there are experts, is by cost."""
    torch.manual_seed(0)
    shapes = {"dense": (16, 16), "router": (4, 16), "up": (4, 32, 16), "down": (4, 16, 16)}
    w = {name: randn(*shape) / 4 for name, shape in shapes.items()}

    def loss(w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.linear(x, w["dense"])
        index, weight, _ = cf.moe.route(nn.functional.linear(h, w["router"]), k=2)
        return ((h + cf.moe.experts(h, index, weight, w["up"], w["down"])) ** 2).mean()

    def step(w: dict[str, torch.Tensor], x: torch.Tensor) -> Any:
        value, grads = cf.value_and_grad(loss)(w, x)
        return {name: p - 0.1 * grads[name] for name, p in w.items()}, value

    sharded = cf.shard(step, cf.Mesh(**sizes, topology="8xa100-80g"), tensor(mode, tuple(sizes)))
    low = sharded.lower(w, randn(16, 16))
    for target in ("colofunc.experts", "colofunc.experts_backward"):
        (layer,) = (d for d in low.plan.decisions if d.target == target)
        assert dict(layer.axes) == {**dict.fromkeys(sizes, "b0"), "y": "f"}
    assert check(sharded, w, randn(16, 16), steps=2).worst < 1e-10
