"""cf.shard from outside: plans, specs, donation, forms of use, plans given back, what a plan can be asked."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from least_named import limited
from torch import nn

import colofunc as cf
from colofunc.compiler.step_compiler import stage
from colofunc.compiler.transform import Transform
from colofunc.testing import check

MESH = cf.Mesh(dp=2, tp=2)
IDEAL = cf.Mesh(dp=2, tp=2, topology="ideal")


class Net(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.relu(self.fc1(x)))


def training(width: int = 16, rows: int = 8, **adam: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model, opt = cf.functional(Net(width).double()), cf.adapt(torch.optim.AdamW, lr=1e-2, **adam)
    batch = {"x": torch.randn(rows, width, dtype=torch.float64), "y": torch.randn(rows, width, dtype=torch.float64)}

    def loss(out: torch.Tensor, batch: Any) -> torch.Tensor:
        return ((out - batch["y"]) ** 2).mean()

    step, state = cf.train_step(model, opt, loss=loss, inputs=lambda batch: ((batch["x"],), {}))
    return step, state, batch


def program(low: Any) -> str:
    """The local program without the lines of this file, which are where `lower` was called."""
    return re.sub(r"\w+\.py:\d+ in \w+", "", low.text())


def specs(low: Any) -> dict[str, str]:
    return {leaf.name: leaf.spec for leaf in low.plan.inputs}


# ---- forms of use ----


def test_equal_to_one_device() -> None:
    step, state, batch = training()
    assert check(cf.shard(step, MESH), state, batch, steps=3).worst <= 1e-10


def test_as_a_decorator_and_on_a_mesh_of_one() -> None:
    @cf.shard(mesh=MESH, plugins=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    x = torch.randn(4, 4)
    assert torch.equal(double(x).full(), 2 * x)
    assert torch.equal(double.eager(x), 2 * x)
    assert torch.equal(cf.shard(double.fn, cf.Mesh())(x).full(), 2 * x)


def test_plain_values_are_global_and_left_alone() -> None:
    step, state, batch = training()
    before = {k: v.clone() for k, v in state["params"].items()}
    staged = cf.shard(step, MESH)
    first, _ = staged(state, batch)
    again, _ = staged(state, batch)
    for name, value in before.items():
        assert torch.equal(state["params"][name], value)
        assert torch.equal(first["params"][name].full(), again["params"][name].full())


def test_distributed_arguments_of_the_caller_are_left_alone() -> None:
    step, state, batch = training()
    mine = {k: cf.distribute(v, "...", MESH) for k, v in state["params"].items()}
    new, _ = cf.shard(step, MESH)({**state, "params": mine}, batch)
    for name, value in state["params"].items():
        assert torch.equal(mine[name].full(), value)
        assert not torch.equal(new["params"][name].full(), value)


def test_one_trace_per_signature() -> None:
    calls = []

    def step(x: torch.Tensor, scale: float, flag: int) -> torch.Tensor:
        calls.append(flag)
        return x * scale + flag

    staged = cf.shard(step, MESH)
    x = torch.randn(4, 4)
    for scale in (1.0, 2.0):
        assert torch.equal(staged(x, scale, 1).full(), x * scale + 1)
    assert calls == [1]  # a float is a tensor, an int is static
    staged(x, 1.0, 2)
    staged(torch.randn(8, 4), 1.0, 1)
    staged.lower(x, 3.0, 2)
    assert calls == [1, 2, 1]


def test_other_executors_and_eager() -> None:
    step, state, batch = training()
    staged = cf.shard(step, MESH).on("simulated")
    _, metrics = staged(state, batch)
    _, expected = staged.eager(state, batch)
    torch.testing.assert_close(metrics["loss"].full(), expected["loss"])


# ---- what is wished ----


def test_globs_and_functions_are_wishes() -> None:
    step, state, batch = training()
    for plan in (
        {"*.fc1.weight": "(tp o) i", "*.fc2.weight": "o (tp i)"},
        lambda name, shape: {"fc1.weight": "(tp o) i", "fc2.weight": "o (tp i)"}.get(".".join(name.split(".")[-2:])),
    ):
        staged = cf.shard(step, IDEAL, plan)
        found = specs(staged.lower(state, batch))
        assert found["state.params.fc1.weight"].startswith("(tp ") or found["state.params.fc1.weight"].startswith("(dp tp")
        assert "tp" in found["state.params.fc2.weight"].split("(")[-1]
        assert check(staged, state, batch).worst <= 1e-10


def test_a_strategy_of_an_operator_is_a_wish() -> None:
    step, state, batch = training()
    low = cf.shard(step, IDEAL, {"fc1": "{tp: o, dp: b0}"}).lower(state, batch)
    forward = next(d for d in low.plan.find("fc1") if d.phase == "forward" and "linear" in d.target)
    assert set(forward.axes) == {("tp", "o"), ("dp", "b0")}
    assert forward.why.startswith("wished: plan 1: 'fc1'")


def test_in_specs_and_out_specs() -> None:
    step, state, batch = training()
    staged = cf.shard(step, MESH, in_specs=(None, "(dp b) ..."), out_specs=({"params": "...", "buffers": None, "opt": None}, None))
    low = staged.lower(state, batch)
    assert specs(low)["batch.x"] == "(dp a) b"
    new, _ = staged(state, batch)
    assert all(str(v.spec) in ("a b", "a") for v in new["params"].values())
    assert check(staged, state, batch).worst <= 1e-10


def test_without_auto_what_nobody_names_is_replicated() -> None:
    step, state, batch = training()
    low = cf.shard(step, MESH, auto=False).lower(state, batch)
    assert not any(axis in spec for spec in specs(low).values() for axis in ("dp", "tp"))
    assert low.cost().calls == {}
    named = cf.shard(step, MESH, {"*.fc1.weight": "(tp o) i"}, auto=False)
    assert specs(named.lower(state, batch))["state.params.fc1.weight"] == "(tp a) b"
    assert not any("dp" in spec for spec in specs(named.lower(state, batch)).values())
    assert check(named, state, batch).worst <= 1e-10


# ---- donation ----


def test_the_state_is_consumed_where_it_returns() -> None:
    step, state, batch = training()
    staged = cf.shard(step, MESH)
    first = staged.init(state, batch)
    second, _ = staged(first, batch)
    assert first["params"]["fc1.weight"].is_consumed
    assert not second["params"]["fc1.weight"].is_consumed
    with pytest.raises(cf.ConsumedError, match="donated to step_fn"):
        staged(first, batch)


def test_nothing_is_consumed_without_donation() -> None:
    step, state, batch = training()
    for staged in (cf.shard(step, MESH, donate=()), cf.shard(lambda s, b: step(s, b)[1], MESH)):
        first = staged.init(state, batch)
        staged(first, batch)
        assert torch.equal(first["params"]["fc1.weight"].full(), state["params"]["fc1.weight"])


def test_donation_by_hand() -> None:
    step, state, batch = training()
    staged = cf.shard(step, MESH, donate=(0,))
    first = staged.init(state, batch)
    staged(first, batch)
    assert first["params"]["fc1.weight"].is_consumed


@pytest.mark.parametrize(("donate", "consumed"), [("auto", ()), ((1,), (1,)), ((1, 2), (1, 2)), ((2,), (2,))])
def test_any_argument_is_consumed_for_an_output_of_its_kind(donate: Any, consumed: tuple[int, ...]) -> None:
    """A decode step: weights stay the caller's, the cache and the length are written where they lie."""

    def decode(params: Any, cache: torch.Tensor, length: torch.Tensor, x: torch.Tensor) -> Any:
        keys = x @ params["k"]
        cache = cache.index_copy(1, length, keys[:, None])
        return (x[:, None] @ params["q"] @ cache.transpose(1, 2)).sum(), length + 1, cache

    params = {name: torch.randn(6, 6, dtype=torch.float64) for name in ("q", "k")}
    cache, length, x = torch.randn(4, 8, 6, dtype=torch.float64), torch.tensor([2]), torch.randn(4, 6, dtype=torch.float64)
    step = cf.shard(decode, cf.Mesh(dp=2), donate=donate)
    low = step.lower(params, cache, length, x)
    assert low.donated == tuple(k + 1 for k in consumed)  # two leaves of weights come before the cache and the length
    assert ("index_copy_(" in low.text()) == (1 in consumed)
    _, next_length, next_cache = step(params, cache, length, x)
    got = step(params, next_cache, next_length, x)
    want = decode(params, decode(params, cache, length, x)[2], length + 1, x)
    for mine, right in zip(got, want, strict=True):
        torch.testing.assert_close(mine.full(), right)
    assert (next_cache.is_consumed, next_length.is_consumed) == (1 in consumed, 2 in consumed)


# ---- plans ----


def test_a_plan_given_back_gives_the_same_program(tmp_path: Path) -> None:
    step, state, batch = training()
    staged = cf.shard(step, IDEAL)
    low = staged.lower(state, batch)
    low.plan.save(tmp_path / "plan.json")
    plan = cf.Plan.load(tmp_path / "plan.json")
    assert plan == low.plan
    again = staged.with_plan(plan).lower(state, batch)
    assert program(again) == program(low)
    assert low.plan.diff(again.plan) == ""


def test_a_plan_given_back_is_kept_where_another_would_be_chosen() -> None:
    step, state, batch = training()
    odd = cf.shard(step, MESH, {"*.weight": "(dp o) (tp i)"}).lower(state, batch)
    free = cf.shard(step, MESH)
    assert odd.plan.diff(free.lower(state, batch).plan)
    bound = free.with_plan(odd.plan)
    assert program(bound.lower(state, batch)) == program(odd)
    assert check(bound, state, batch).worst <= 1e-10


def test_a_plan_answers() -> None:
    step, state, batch = training()
    plan = cf.shard(step, IDEAL).lower(state, batch).plan
    assert str(plan).startswith("dp: ")
    assert "colofunc.linear" in plan.why("fc1") and "[forward]" in plan.why("fc1")
    assert "fc1 colofunc.linear" in plan.why_not("{}", "fc1")
    with pytest.raises(cf.PlanError, match=r"matches no operator, module, leaf or collective of the plan; did you mean 'fc1'"):
        plan.why("fc11")
    assert len(plan.table(costly=3).splitlines()) < len(plan.table(costly=None).splitlines())


def test_lower_needs_no_data() -> None:
    step, state, batch = training()
    staged = cf.shard(step, MESH)
    meta = {"params": {k: v.to("meta") for k, v in state["params"].items()}, "buffers": {}, "opt": state["opt"]}
    low = staged.lower(meta, {k: cf.abstract(v.shape, v.dtype) for k, v in batch.items()})
    assert program(low) == program(staged.lower(state, batch))
    assert low.memory().peak_bytes["device"] > 0
    assert low.cost().seconds > 0
    assert low.coverage().fallbacks == ()


# ---- two functions, one state ----


def test_evaluation_moves_no_parameter_of_the_trained_state() -> None:
    step, state, batch = training()
    mesh = cf.Mesh(dp=2, tp=2, topology="ideal")  # where messages cost nothing, so that weights are used as they lie
    train = cf.shard(step, mesh, {"*.fc1.weight": "(tp o) i", "*.fc2.weight": "o (tp i)", "batch.*": "(dp b) ..."})
    model = cf.functional(Net().double())

    def evaluate(params: Any, batch: Any) -> torch.Tensor:
        out, _ = model.apply(params, {}, batch["x"])
        return ((out - batch["y"]) ** 2).mean()

    state, _ = train(train.init(state, batch), batch)
    sharded = cf.shard(evaluate, mesh)
    low = sharded.lower(state["params"], batch)
    for name, value in state["params"].items():
        assert specs(low)[f"params.{name}"] == str(value.spec)
    before = [s.data_ptr() for v in state["params"].values() for s in v.shards]
    loss = sharded(state["params"], batch)
    plain = {k: v.full() for k, v in state["params"].items()}
    torch.testing.assert_close(loss.full(), evaluate(plain, batch), rtol=1e-12, atol=0)
    train_low = train.lower(state, batch)
    state, _ = train(state, batch)
    assert train.lower(state, batch) is train_low
    assert [s.data_ptr() for v in state["params"].values() for s in v.shards] == before  # in place, nothing moved


# ---- found by cost ----


WHOLE = {"params.*": "...", "opt.*": "..."}  # every rank keeps all of the state


def test_the_named_cases_are_found() -> None:
    dp, tp = (cf.Mesh(topology="4xa100-80g", **{axis: 4}) for axis in ("dp", "tp"))
    step, state, batch = training(width=512, rows=1 << 13)
    copies = cf.shard(step, dp, WHOLE).lower(state, batch)
    assert specs(copies)["batch.x"] == "(dp a) b"
    assert str(copies.plan).startswith("dp: data parallel (found)")
    limit = copies.memory().peak_bytes["device"] * 19 // 20
    tight = cf.shard(step, limited(dp, limit)).lower(state, batch)
    assert tight.memory().peak_bytes["device"] <= limit
    assert str(tight.plan).startswith("dp: ZeRO-3 (found)")
    assert specs(tight)["batch.x"] == "(dp a) b"
    step, state, batch = training(width=1024, rows=256)
    wide = cf.shard(step, tp).lower(state, batch)
    assert str(wide.plan).startswith("tp: Megatron column/row (found)")
    assert specs(wide)["state.params.fc1.weight"] == "(tp a) b"
    assert specs(wide)["state.params.fc2.weight"] == "a (tp b)"


# ---- what the user fixes is what comes out ----


IDEAL = cf.Mesh(dp=2, tp=2, topology="ideal")


@pytest.mark.parametrize(("spec", "size"), [("(tp dp a)", 8), ("(tp a~)", 5)])
def test_out_specs_hold_where_the_output_could_take_the_input_s_memory(spec, size) -> None:
    x = torch.arange(float(size))
    y = cf.shard(lambda x: x + 1, IDEAL, out_specs=spec)(x)
    assert y.sharding is cf.Spec(spec).bind(IDEAL, (size,))
    torch.testing.assert_close(y.full(), x + 1)


def test_outputs_are_never_pending() -> None:
    y = cf.shard(lambda x: x * 2, IDEAL, in_specs=("a b +tp",))(torch.ones(4, 4))
    assert not y.sharding.pending
    torch.testing.assert_close(y.full(), torch.full((4, 4), 2.0))


def test_in_specs_and_a_plan_that_differ_clash_naming_both() -> None:
    grads = cf.value_and_grad(lambda p, x: (x @ p["w"]).relu().sum())
    step = cf.shard(grads, IDEAL, {"w": "i (tp o)"}, in_specs=({"w": "(tp i) o"}, None))
    with pytest.raises(cf.PlanError, match=r"plan 1: 'w' -> 'i \(tp o\)' clashes with in_specs: p.w"):
        step.init({"w": torch.randn(4, 8)}, torch.randn(8, 4))


def test_without_auto_the_axes_that_plans_and_specs_name_are_used() -> None:
    grads = cf.value_and_grad(lambda p, x: (x @ p["w"]).relu().sum())
    step = cf.shard(grads, IDEAL, {"w": "i (tp o)"}, auto=False, in_specs=(None, "(dp b) i"))
    assert step.lower({"w": torch.randn(4, 8)}, torch.randn(8, 4)).coverage().efficiency > 0.9


def test_a_collective_that_is_not_used_counts_nothing_and_a_misspelt_one_is_named() -> None:
    cost = cf.shard(lambda x: x + 1, cf.Mesh(dp=2)).lower(torch.ones(4)).cost()
    assert cost.bytes["all_gather", "dp"] == 0
    with pytest.raises(cf.InputError, match="all_gather"):
        cost.bytes["all_gathr", "dp"]


def test_transforms_put_code_around_a_step_and_grow_its_state_in_any_order() -> None:
    def scaled(fn):
        def wrapped(state, x):
            inner, out = fn({"w": state["w"]}, x)
            return {**inner, "scale": state["scale"]}, out * state["scale"]

        return wrapped

    def fn(state, x):
        return {"w": state["w"] + 1}, (state["w"] * x).sum()

    grown = Transform(
        "scale",
        wrap=lambda build: build.evolve(fn=scaled(build.fn)),
        grow=lambda build: build.evolve(state={"scale": torch.tensor(2.0), **build.state}),
    )
    state, x = {"w": torch.arange(4.0)}, torch.ones(4)
    sharded = stage(cf.shard(fn, cf.Mesh(dp=2, topology="ideal")), grown)
    other = stage(fn, grown)
    for step in (sharded, cf.shard(other, cf.Mesh(dp=2, topology="ideal"))):
        new, out = step(state, x)
        assert float(out) == 12.0 and set(new) == {"w", "scale"}
        assert float(step(new, x)[1]) == 20.0
    with pytest.raises(cf.PlanError, match="scale and other cannot both be applied to one step: both scale"):
        stage(other, Transform("other", clashes={"scale": "both scale"}))
