"""The kit tests itself: what it must accept and, more so, what it must refuse."""

# A fixture is taken by the name under which it is imported.
# ruff: noqa: F811

from __future__ import annotations

import copy
import random
import types
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import colofunc as cf
from colofunc import testing
from colofunc.program.closeness import scaled_difference
from colofunc.testing import models, programs
from colofunc.testing.pytest_plugin import float64, mesh  # noqa: F401

IDEAL = cf.Mesh(dp=2, tp=2, topology="ideal")


# ---- check ----


@pytest.mark.parametrize("name", programs.NAMED)
def test_named_programs_are_pure_and_equal_one_device(name, mesh) -> None:
    step, state, batch = programs.NAMED[name]()
    testing.check_pure(step, state, batch)
    checked = testing.check(cf.shard(step, mesh), state, batch)
    assert (checked.steps, checked.leaves) == (2, len(torch.utils._pytree.tree_leaves(state)) + 1)


@pytest.mark.parametrize("mesh", ["dp=3", "tp=4", "dp=2 sp=2 tp=2"], indirect=True)
def test_meshes_that_fit_badly_too(mesh) -> None:
    step, state, batch = programs.mlp()
    testing.check(cf.shard(step, mesh), state, batch, steps=1)


def test_dropout_draws_what_one_device_draws() -> None:
    step, state, batch = programs.attention_block(dropout=0.3)
    testing.check(cf.shard(step, IDEAL), state, batch)


def test_check_leaves_its_inputs_and_the_generator_alone() -> None:
    step, state, batch = programs.mlp()
    copy, drawn = testing.trees.plain_copy(state), torch.get_rng_state()
    testing.check(cf.shard(step, IDEAL), state, batch)
    assert testing.compare(state, copy, tolerance=0.0) == 0.0
    assert torch.equal(torch.get_rng_state(), drawn)


def test_check_accepts_placed_state() -> None:
    step, state, batch = programs.mlp()
    staged = cf.shard(step, IDEAL)
    placed = staged.init(state, batch)
    testing.check(staged, placed, batch)
    assert testing.compare(placed, state, tolerance=0.0) == 0.0


def test_check_names_the_leaf_that_differs() -> None:
    def step(x):
        return {"good": x + 1, "bad": x * scale[0]}

    scale = [2.0]
    staged = cf.shard(step, IDEAL)
    x = torch.ones(4, 4, dtype=torch.float64)
    staged.lower(x)
    scale[0] = 3.0  # the recorded program cannot know
    with pytest.raises(cf.CheckError, match=r"step 0: out\.bad .*differs by 0\.333") as caught:
        testing.check(staged, x)
    assert "out.good" not in str(caught.value)


def test_check_wants_a_staged_step() -> None:
    with pytest.raises(cf.InputError, match=r"not function\. Try: check\(cf\.shard"):
        testing.check(lambda x: x, torch.ones(1))


# ---- compare ----


def test_compare_lists_every_leaf_beyond_its_tolerance() -> None:
    a = {"x": torch.zeros(2), "y": [torch.zeros(2), torch.zeros(2, dtype=torch.int64)], "z": torch.zeros(3)}
    b = {"x": torch.zeros(2) + 1e-4, "y": [torch.zeros(2), torch.ones(2, dtype=torch.int64)], "z": torch.zeros(3)}
    with pytest.raises(cf.CheckError) as caught:
        testing.compare(a, b)
    message = str(caught.value)
    assert "x: differs by 0.0001" in message and "y.1: 2 of 2 values differ" in message and "'z'" not in message


@pytest.mark.parametrize(
    "a, b",
    [
        ({"x": torch.ones(2)}, {"y": torch.ones(2)}),
        ([torch.ones(2)], [torch.ones(2), torch.ones(2)]),
        (torch.ones(2), torch.ones(2, 1)),
        (torch.ones(2), torch.ones(2).double()),
        (1.0, torch.ones(())),
        ("a", "b"),
    ],
)
def test_compare_refuses_other_trees_shapes_and_dtypes(a, b) -> None:
    with pytest.raises(cf.CheckError):
        testing.compare(a, b)


def test_scaled_difference() -> None:
    inf, nan = float("inf"), float("nan")
    t = torch.tensor
    assert scaled_difference(t([1.0, inf, nan]), t([1.5, inf, nan])) == pytest.approx(0.5 / 1.5)
    assert scaled_difference(t([100.0]), t([101.0])) == pytest.approx(1 / 101)
    assert scaled_difference(t([1.0, -inf]), t([1.0, inf])) == inf
    assert scaled_difference(t([nan]), t([inf])) == inf
    assert scaled_difference(t([nan]), t([1.0])) == inf
    assert scaled_difference(torch.empty(0), torch.empty(0)) == 0.0


# ---- check_pure ----


def _grows(x, seen=[]):  # noqa: B006
    seen.append(1)
    return x * len(seen)


def _writes(x):
    x["a"].mul_(2)
    return x["a"].sum()


def _draws(x):
    return x["a"] * random.random()


def _replaces(x):
    x["a"] = x["a"] + 1
    return x["a"]


@pytest.mark.parametrize(
    "fn, words",
    [
        (_writes, r"input\.0\.a: differs"),
        (_draws, "Python's random generator"),
        (_replaces, r"input\.0\.a: differs"),
        (lambda x: _grows(x["a"]), "second call: out: differs"),
    ],
)
def test_impure_functions(fn, words) -> None:
    with pytest.raises(cf.CheckError, match=words):
        testing.check_pure(fn, {"a": torch.ones(2)})


def test_draws_from_torch_are_pure() -> None:
    testing.check_pure(lambda x: torch.nn.functional.dropout(x, 0.5), torch.ones(100))


# ---- last_bit ----


def test_last_bit_measures_conditioning() -> None:
    x = torch.linspace(1.0, 2.0, 50, dtype=torch.float64)
    assert testing.last_bit(lambda x: 3 * x, x) < 1e-15
    assert 1e-14 < testing.last_bit(lambda x: 1 / (x - 1 + 1e-4), x) < 1e-10  # 1 + 1e-16 against 1e-4
    assert testing.last_bit(lambda n: n + 1, torch.arange(3)) == 0.0
    assert testing.last_bit(torch.sqrt, torch.zeros(9)) == 0.0  # not below zero


# ---- check_strategies ----


def _plugin(name: str, strategies):
    class Plugin:
        @staticmethod
        @cf.hookimpl
        def colofunc_strategies():
            return {"aten.cumsum.default": strategies}

    Plugin.__name__ = name
    return Plugin


def _scan(local, extra_s: float = 1e-6):
    """Strategies of cumsum over rows that `local` does."""

    def strategies(call, mesh):
        shape = call.ins[0].shape
        for axis in mesh.axis_names if call.arg(1, "dim") == 0 else ():
            layout = cf.Spec(f"({axis} rows) s").bind(mesh, shape)
            code = lambda x, *, mesh, axis=axis: local(x, axis, mesh)  # noqa: E731
            yield cf.Strategy(f"{{{axis}: scan}}", (layout,), (layout,), cf.Cost(flops=144.0, extra_s=extra_s), code)

    return strategies


def _right(x, axis, mesh):
    scanned = x.cumsum(0)
    totals = cf.collectives.all_gather(scanned[-1], (axis,), mesh)
    return scanned + cf.collectives.take_shard(totals.cumsum(0) - totals, (axis,), mesh)


def test_a_right_strategy_is_proved_on_every_mesh() -> None:
    proved = testing.check_strategies(_plugin("right", _scan(_right)), "aten.cumsum.default")
    assert {p.mesh for p in proved} == {"a=2", "a=3", "a=2 b=2"} and len(proved) == 4
    assert max(p.worst for p in proved) < 1e-13


@pytest.mark.parametrize(
    "strategies, words",
    [
        (_scan(lambda x, axis, mesh: x.cumsum(0)), r"\{a: scan\} on a=2, result 0 .* differs from the operator"),
        (_scan(lambda x, axis, mesh: x.cumsum(0)[:1]), "has .1, 12., its part is|cannot be lowered"),
        (_scan(_right, extra_s=0.0), r"communicates \(all_gather over a\), its cost has extra_s=0"),
        (_scan(_right, extra_s=float("nan")), "cost has extra_s=nan"),
        (lambda call, mesh: (), "gives no strategy of aten.cumsum.default"),
    ],
)
def test_wrong_strategies(strategies, words) -> None:
    with pytest.raises(cf.CheckError, match=words):
        testing.check_strategies(_plugin("wrong", strategies), "aten.cumsum.default")


def test_copies_that_differ_are_refused() -> None:
    def strategies(call, mesh):
        whole = cf.Spec("rows s").bind(mesh, call.ins[0].shape)
        rank = lambda x, *, mesh: x.cumsum(call.arg(1, "dim")) + cf.collectives.axis_index(("a",), mesh)  # noqa: E731
        yield cf.Strategy("{}", (whole,), (whole,), cf.Cost(), rank)

    with pytest.raises(cf.CheckError, match="ranks 0 and 1 hold the same part with different values"):
        testing.check_strategies(_plugin("copies", strategies), "aten.cumsum.default")


@pytest.mark.parametrize("op", ["aten.mm.default", torch.ops.aten.add.Tensor, "colofunc.linear"])
def test_built_in_strategies(op) -> None:
    assert len(testing.check_strategies(None, op)) > 10


def test_samples_by_hand_and_operators_that_need_them() -> None:
    weight, ids = torch.randn(12, 6), torch.randint(0, 12, (6, 4))
    assert testing.check_strategies(None, "aten.embedding.default", testing.sample(weight, ids))
    with pytest.raises(cf.InputError, match="made-up arguments"):
        testing.check_strategies(None, torch.ops.aten.convolution.default)
    with pytest.raises(cf.InputError, match="something else each time"):
        testing.check_strategies(None, "aten.bernoulli.default", testing.sample(torch.full((100,), 0.5)))


# ---- float64, fail, fixtures, models ----


def test_float64_reaches_casts_factories_and_arrays() -> None:
    with testing.float64():
        made = [torch.ones(2), torch.ones(2).float(), torch.ones(2).to(torch.float32), torch.arange(2.0)]
        made += [torch.ones(2).softmax(0, dtype=torch.float32), torch.tensor(torch.ones(1).numpy().astype("float32"))]
        made += [torch.zeros(2, dtype=torch.float32), torch.ones(2).type(torch.float32)]
        assert {t.dtype for t in made} == {torch.float64}
        assert torch.ones(2).half().dtype is torch.float16
    assert torch.ones(2).dtype is torch.float32


class Scaled(torch.nn.Module):
    """A frozen layer, a buffer of float32 that is multiplied by, and a constant beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = models.Mlp(16, 32)
        self.register_buffer("mix", torch.randn(8, 8, generator=torch.Generator().manual_seed(1)))
        self.table, self.turn = torch.linspace(0, 1, 8), torch.linspace(-1, 1, 64).view(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.mlp(x) @ self.mix @ self.turn + self.table).softmax(-1, dtype=torch.float32)


def loss_and_gradients(model: cf.Model) -> Any:
    def step(params: Any, x: torch.Tensor) -> Any:
        return cf.value_and_grad(lambda p: model.apply(p, model.buffers, x)[0].square().sum())(params)

    return step


def test_float64_multiplies_groups_which_torch_does_in_narrower_dtypes_only() -> None:
    """As transformers' experts do, called as they are."""
    x, w, offs = torch.randn(6, 16), torch.randn(3, 16, 8), torch.tensor([2, 3, 6], dtype=torch.int32)
    with cf.testing.float64():
        found = torch.nn.functional.grouped_mm(x.double(), w.double(), offs=offs)
    rows = [x[start:end].double() @ w[group].double() for group, (start, end) in enumerate(((0, 2), (2, 3), (3, 6)))]
    torch.testing.assert_close(found, torch.cat(rows), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("axes", [{"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2}])
def test_float64_doubles_frozen_weights_and_buffers(axes) -> None:
    module = Scaled()
    x = torch.randn(4, 16, dtype=torch.float64)
    narrow = cf.lora(cf.functional(module), where="*fc1", rank=2)
    params = {name: torch.randn(p.shape, dtype=torch.float64) for name, p in narrow.params.items()}
    wide = copy.deepcopy(module).double()
    wide.table, wide.turn = wide.table.double(), wide.turn.double()
    double = cf.lora(cf.functional(wide), where="*fc1", rank=2)
    with testing.float64():
        want = loss_and_gradients(double)(params, x)
        step = cf.shard(loss_and_gradients(narrow), cf.Mesh(**axes))
        testing.compare(step(params, x), want, tolerance=1e-10)
        testing.compare(loss_and_gradients(narrow)(params, x), want, tolerance=1e-10)
        testing.check(step, narrow.params, x)
    assert narrow.frozen["mlp.fc1.weight"].dtype is torch.float32


def test_float64_gives_buffers_back_as_they_came() -> None:
    model = cf.functional(torch.nn.BatchNorm1d(3))
    with testing.float64():
        _, buffers = model.apply({n: p.double() for n, p in model.params.items()}, model.buffers, torch.randn(4, 3))
    assert buffers["running_mean"].dtype is torch.float32 and buffers["running_mean"].abs().sum() > 0


def test_the_float64_fixture(float64) -> None:
    assert torch.nn.Linear(2, 2)(torch.ones(2)).dtype is torch.float64


def test_fail_ends_a_run_on_the_simulated_mesh() -> None:
    x = cf.distribute(torch.ones(4), "(dp b)", IDEAL)
    with testing.fail(rank=1, at="all_gather"), pytest.raises(testing.FaultError, match="rank 1 fails at all_gather"):
        x.redistribute("b")
    assert x.redistribute("b").full().sum() == 4


@pytest.mark.parametrize(
    "module, x, shape",
    [
        (models.Mlp(), torch.ones(2, 16), (2, 8)),
        (models.Attention(), torch.ones(2, 4, 16), (2, 4, 16)),
        (models.ConvNet(), torch.ones(2, 4, 8, 8), (2, 8)),
        (models.Language(), torch.ones(2, 4, dtype=torch.int64), (2, 4, 32)),
    ],
)
def test_models(module, x, shape) -> None:
    assert module(x).shape == shape


# ---- Hypothesis strategies ----


def test_strategies_draw_what_they_say() -> None:
    pytest.importorskip("hypothesis")
    from hypothesis import given, settings

    from colofunc.testing.strategies import cases, layouts, meshes, shapes, specs

    @settings(max_examples=30, deadline=None)
    @given(cases(padded=False), meshes(max_axes=2), shapes())
    def holds(case, other, shape) -> None:
        grid, full, layout = case
        assert layout.shape == full and set(layout.axes) <= set(grid.axis_names)
        assert other.size <= 16 and len(other.axis_names) <= 2 and len(shape) <= 3

    @settings(max_examples=20, deadline=None)
    @given(specs(IDEAL, (4, 12)), layouts(IDEAL, (4, 12), pending=()))
    def fits(spec, layout) -> None:
        x = torch.arange(48).reshape(4, 12)
        assert torch.equal(cf.distribute(x, spec, IDEAL).full(), x)
        assert not layout.pending

    holds()
    fits()


# ---- check_pure: what the outputs do not show ----

SEEN: list = []


def leaves_behind(kind):
    """A function whose outputs are the same every time, and which leaves something behind."""
    seen, thing, module, w, bag = [], types.SimpleNamespace(n=0), torch.nn.Linear(2, 2), torch.ones(2), {"a": 1}
    w.requires_grad_()

    def grows(x):
        seen.append(1)
        return x * 2

    def sets(x):
        thing.n = thing.n + 1
        return x * 2

    def on_module(x):
        module.calls = 1
        return module(x).detach()

    def writes(x):
        w.data.add_(0)
        w.detach().mul_(1)
        return x * 2

    def gradient(x):
        (w * x).sum().backward()
        return x * 2

    def in_dict(x):
        bag["b"] = 2
        return x * 2

    def in_global(x):
        SEEN.append(2)
        return x * 2

    return {f.__name__: f for f in (grows, sets, on_module, writes, gradient, in_dict, in_global)}[kind]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("grows", "the list seen has 1 items, before 0"),
        ("sets", "the SimpleNamespace thing has another 'n'"),
        ("on_module", "the module module has got 'calls'"),
        ("writes", "the tensor w was written in place"),
        ("gradient", "the tensor w has another 'grad'"),
        ("in_dict", "the dict bag has got 'b'"),
        ("in_global", "the list SEEN has 1 items, before 0"),
    ],
)
def test_side_effects_that_change_no_output(kind, words) -> None:
    with pytest.raises(cf.CheckError, match=words):
        testing.check_pure(leaves_behind(kind), torch.ones(2))
    SEEN.clear()


def test_an_unmodified_model_is_pure() -> None:
    model = cf.functional(GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1)))
    step, state = cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=1e-3))
    ids = torch.zeros(2, 4, dtype=torch.int64)
    testing.check_pure(step, state, {"input_ids": ids, "labels": ids})


def test_float32_leaves_that_stay_float32_run_inside_float64() -> None:
    """`check` makes them float64; a step that is called by itself keeps what it is given, in local code as well."""
    step_fn, state, batch = cf.testing.programs.mlp()
    step = cf.shard(step_fn, cf.Mesh(dp=2, tp=2, topology="ideal"), in_specs=(None, "(dp b) ..."))
    with cf.testing.float64():
        after, _ = step(step.init(state, batch), batch)
    cf.testing.compare(after, step_fn(state, batch)[0], "state")
