"""cf.precision: against mixed precision written by hand, over meshes, and what it says to mistakes."""

import warnings
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from narrow_steps import (
    BF16,
    F16,
    F32,
    F64,
    IDEAL,
    batch,
    by_autograd,
    by_backward,
    by_func,
    by_value_and_grad,
    loss_of,
    mse,
    net,
    scaled_step,
    training,
)
from torch import nn
from torch.func import functional_call

import colofunc as cf
from colofunc.compiler import named_candidates
from colofunc.ops import canonical


def targets(low) -> list[str]:
    return [node.target for node in low.traced.program.nodes]


def check_gradients(module: nn.Module, place: Callable[[Any], Any], data: Any, sums: int, **options: Any) -> None:
    """The gradients of a staged step against one device under the same precision, each to `sums` x 2^-8 of its largest element.

    A bf16 sum that is made of two partial sums differs from the one in one go by what rounding to eight bits takes from the
    parts and from the total: 2 x 2^-9 of the largest of them. `sums`: how many such sums lie between the loss and a gradient.
    Adam's weights would show nothing: where only noise is left of a gradient they move by lr all the same, one way or the other.
    """
    step_fn, state = cf.train_step(cf.functional(module), cf.adapt(torch.optim.SGD, lr=1.0), **options)
    step = place(step_fn)
    want, got = step.eager(state, data)[0]["params"], step(step.init(state, data), data)[0]["params"]
    for name, before in state["params"].items():
        gradient = before - want[name]
        assert float(gradient.abs().max()) > 0
        assert float((got[name].full() - want[name]).abs().max()) <= sums * 2**-8 * float(gradient.abs().max()), name


# ---- the same numbers as mixed precision by hand ----


def test_bf16_is_what_one_writes_by_hand() -> None:
    module, data = net(), batch()
    masters = {n: p.detach().clone().requires_grad_() for n, p in module.named_parameters()}
    by_hand = torch.optim.AdamW(masters.values(), lr=1e-2)
    step_fn, state = training(module)
    step = cf.precision(step_fn, "bf16")
    state = step.init(state, data)
    for _ in range(4):
        narrow = {n: p.to(BF16) for n, p in masters.items()}
        with canonical.single_device():
            loss = nn.functional.mse_loss(functional_call(module, narrow, data["x"].to(BF16)).float(), data["y"])
        by_hand.zero_grad()
        loss.backward()
        by_hand.step()
        state, metrics = step(state, data)
        assert metrics["loss"].dtype is F32
        torch.testing.assert_close(metrics["loss"].full(), loss.detach(), rtol=0, atol=0)
    for n, p in masters.items():
        assert state["params"][n].dtype is F32
        torch.testing.assert_close(state["params"][n].full(), p.detach(), rtol=1e-6, atol=1e-6)


def test_an_unmodified_gpt2_keeps_its_own_upcasts() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=11, n_positions=8, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    module = transformers.GPT2LMHeadModel(config).train()
    ids = torch.randint(0, 11, (4, 8))
    step_fn, state = cf.train_step(cf.functional(module), cf.adapt(torch.optim.AdamW, lr=1e-2), clip=1.0)
    data = {"input_ids": ids, "labels": ids}
    low = cf.precision(step_fn, "bf16").lower(state, data)
    dtypes = {n.target: low.traced.program.values[n.refs[0]].dtype for n in low.traced.program.nodes if n.phase == "forward" and n.refs}
    assert dtypes["colofunc.linear"] is dtypes["colofunc.attention"] is BF16
    loss = [n for n in low.traced.program.nodes if "log_softmax" in n.target or "cross_entropy" in n.target]
    assert loss and low.traced.program.values[loss[0].outs[0]].dtype is F32
    # Sums over tp: two a layer forwards and two backwards, and those of the embedding and the loss.
    for mesh in (cf.Mesh(dp=2, tp=2), IDEAL):
        check_gradients(module, lambda fn: cf.shard(cf.precision(fn, "bf16"), mesh), data, sums=4 * 2 + 2)  # noqa: B023
    # Two steps of Adam move a weight by 2 lr at most, this way or that where its gradient is noise.
    assert cf.testing.check(cf.shard(cf.precision(step_fn, "bf16"), IDEAL), state, data, tolerance=2 * 2 * 1.002e-2).steps == 2


def test_with_float64_as_compute_dtype_nothing_is_added_and_meshes_agree_to_the_last_digits() -> None:
    step_fn, state = training(net().double(), clip=1.0)
    data = {k: v.double() for k, v in batch().items()}
    policy = cf.Policy(params=F64, compute=F64, reduce=F64)
    low = cf.precision(step_fn, policy).lower(state, data)
    assert targets(low) == targets(cf.shard(step_fn, cf.Mesh()).lower(state, data))
    cf.testing.check(cf.shard(cf.precision(step_fn, policy), IDEAL), state, data)


def test_float32_computing_under_float64_masters_agrees_over_meshes() -> None:
    step_fn, state = training(net().double())
    data = {**batch(), "x": batch()["x"].double()}  # targets of float32: mse_loss of torch 2.11 has no backward for two dtypes
    step = cf.precision(cf.shard(step_fn, IDEAL), cf.Policy(params=F64, compute=F32))
    assert cf.testing.check(step, state, data, tolerance=1e-5).steps == 2


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_a_sharded_step_is_the_single_device_under_the_same_precision(policy) -> None:
    step_fn, state = training(net(), clip=1.0)
    place = lambda fn: cf.precision(cf.shard(fn, IDEAL, in_specs=(None, "(dp b) ...")), policy)  # noqa: E731
    check_gradients(net(), place, batch(), sums=4, loss=mse, inputs=lambda b: ((b["x"],), {}))
    assert cf.testing.check(place(step_fn), state, batch(), tolerance=2 * 2 * 1.002e-2).leaves > 12  # Adam's own: see check_gradients


def test_precision_and_shard_in_either_order_are_one_plan() -> None:
    step_fn, state = training(net())
    mesh = cf.Mesh(dp=2, tp=2)
    lows = [s.lower(state, batch()) for s in (cf.precision(cf.shard(step_fn, mesh), "bf16"), cf.shard(cf.precision(step_fn, "bf16"), mesh))]
    first, second = ([(n.target, n.args, n.outs) for n in low.program.nodes] for low in lows)
    assert first == second and lows[0].input_layouts == lows[1].input_layouts


# ---- state ----


def test_a_model_loaded_in_bf16_gets_masters_and_moments_in_float32() -> None:
    step_fn, state = training(net().to(BF16))
    assert state["params"]["0.weight"].dtype is BF16
    step = cf.precision(step_fn, "bf16")
    placed = step.init(state, batch())
    for _ in range(2):
        assert {t.dtype for part in ("exp_avg", "exp_avg_sq") for t in placed["opt"][part].values()} == {F32}
        assert {t.dtype for t in placed["params"].values()} == {F32}
        placed, _ = step(placed, batch())


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.bn = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 4)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x):
        for name, part in (("inner", self.inner), ("bn", self.bn), ("head", self.head)):
            x = part(x)
            self.seen[name] = x.dtype
        return x


def by_position(params_at: int) -> Callable[..., Any]:
    """A step by hand whose weights are argument 0 or 1; it returns them second."""
    module = net()

    def step(*args):
        params, x = args[params_at], args[1 - params_at]
        loss, grads = cf.value_and_grad(lambda p: functional_call(module, p, (x,)).square().mean())(params)
        return loss, {name: value - 0.1 * grads[name] for name, value in params.items()}

    return step


@pytest.mark.parametrize("params_at", [0, 1])
@pytest.mark.parametrize("rows", [F32, BF16])
def test_weights_are_widened_in_whichever_argument_they_stand_and_the_batch_is_not(params_at: int, rows: torch.dtype) -> None:
    """Weights of a user's own, which carry no role: what the step does with them says what they are."""
    params = {name: value.detach().to(BF16) for name, value in net().named_parameters()}
    x = torch.randn(8, 8).to(rows)
    step = cf.precision(cf.shard(by_position(params_at), cf.Mesh(dp=2)), "bf16")
    args = (params, x) if params_at == 0 else (x, params)
    for again in range(2):
        low = step.lower(*args)
        dtypes = {low.program.values[id].role: low.program.values[id].dtype for id in low.program.inputs}
        assert dtypes["param"] is F32 and dtypes["batch"] is rows
        new = step(*args)[1]
        assert {value.dtype for value in new.values()} == {F32}, again
        args = (new, x) if params_at == 0 else (x, new)  # DTensors, which carry their role


def test_weights_that_carry_their_role_keep_it_when_they_are_widened() -> None:
    model = cf.functional(net().to(BF16))
    low = cf.precision(lambda x, w: functional_call(model.module, w, (x,)), "bf16").lower(torch.randn(8, 8), model.params)
    assert {value.role for value in low.plan.inputs if value.name.startswith("w.")} == {"param"}
    assert {low.program.values[id].dtype for id in low.program.inputs} == {F32}


def test_rows_that_come_back_narrow_are_no_state() -> None:
    model = cf.functional(nn.Linear(16, 16))
    out = cf.precision(cf.shard(lambda x, w: model.apply(w, {}, x)[0], cf.Mesh(dp=2)), "bf16")(torch.ones(4, 16), model.params)
    assert out.dtype is BF16


def test_a_state_in_any_argument_that_would_lose_its_master_is_an_error() -> None:
    def step(x, params):
        loss, grads = cf.value_and_grad(lambda p: (x @ p["w"]).square().mean())(params)
        return loss, {"w": (params["w"] - grads["w"]).to(BF16)}

    with pytest.raises(cf.InputError, match=r"returns w as torch.bfloat16 and was given torch.float32"):
        cf.precision(step, "bf16").lower(torch.ones(2, 3), {"w": torch.ones(3, 3)})


def test_batch_norm_keeps_its_statistics_and_weights_in_float32() -> None:
    module = Normed()
    step_fn, state = training(module)
    step = cf.precision(cf.shard(step_fn, cf.Mesh(dp=2)), "bf16")
    new, _ = step(step.init(state, batch()), batch())
    assert module.seen == {"inner": BF16, "bn": BF16, "head": BF16}
    assert new["buffers"]["bn.running_mean"].dtype is F32
    want = torch.nn.functional.linear(batch()["x"], module.inner.weight, module.inner.bias).mean(0) * 0.1
    torch.testing.assert_close(new["buffers"]["bn.running_mean"].full(), want.detach(), rtol=2e-2, atol=2e-3)
    cf.testing.check(step, state, batch(), tolerance=2e-2)


@pytest.mark.parametrize("glob", ["head", "head.*", "he*"])
def test_an_override_keeps_a_module_in_its_dtype_and_casts_at_its_door(glob) -> None:
    class Watched(nn.Linear):
        def forward(self, x):
            seen.append((x.dtype, self.weight.dtype))
            return super().forward(x)

    seen: list = []
    module = Normed()
    module.head = Watched(8, 4)
    step_fn, state = training(module)
    cf.precision(step_fn, cf.Policy(overrides={glob: "fp32"})).lower(state, batch())
    if glob == "head.*":  # the parameters, not the module: what comes in follows them where torch needs one dtype
        assert seen == [(BF16, F32)]
    else:
        assert seen == [(F32, F32)] and module.seen["head"] is BF16


def test_frozen_weights_are_cast_and_tables_are_not() -> None:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)
            self.register_buffer("table", torch.linspace(0, 1, 8))

        def forward(self, x):
            seen.update(frozen=self.a.weight.dtype, table=self.table.dtype)
            return self.b(self.a(x) * self.table.to(x.dtype))

    seen: dict = {}
    opt = cf.adapt(torch.optim.SGD, lr=0.1)
    step_fn, state = cf.train_step(cf.functional(Rotary(), trainable="b.*"), opt, loss=mse, inputs=lambda b: ((b["x"],), {}))
    cf.testing.check(cf.precision(cf.shard(step_fn, IDEAL), "bf16"), state, batch(), tolerance=2e-2)
    assert seen == {"frozen": BF16, "table": F32}


class Mixing(nn.Module):
    """Inputs in float32 that meet narrow weights where torch wants one dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gate = nn.Conv1d(8, 4, 1), nn.Linear(8, 4)

    def forward(self, x):
        x = x[:, None]
        weight, chosen = self.gate(x).softmax(-1).topk(2, -1)
        share = torch.zeros(x.shape[0], 1, 4).scatter(-1, chosen, weight)
        return share[:, 0] + self.conv(x.mT)[..., 0]


def test_inputs_follow_the_weights_where_torch_wants_one_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_candidates, "MOST_NODES", 0)  # of which one rounds sums in another order
    step_fn, state = training(Mixing())
    cf.testing.check(cf.precision(cf.shard(step_fn, IDEAL), "bf16"), state, batch(), tolerance=2e-2)


def test_recurrent_modules_which_check_dtypes_themselves_get_narrow_inputs() -> None:
    model = cf.functional(nn.GRU(8, 4))
    loss = cf.precision(lambda p, x: cf.value_and_grad(lambda p: model.apply(p, {}, x)[0][0].square().mean())(p), "bf16")
    value, grads = loss.reference(model.params, torch.ones(3, 2, 8))
    want, _ = cf.value_and_grad(lambda p: model.apply(p, {}, torch.ones(3, 2, 8))[0][0].square().mean())(model.params)
    torch.testing.assert_close(value, want, rtol=2e-2, atol=1e-3)
    assert {g.dtype for g in grads.values()} == {F32}


# ---- every way to differentiate ----


@pytest.mark.parametrize("policy", [cf.Policy(compute=BF16), cf.Policy(compute=F16, loss_scale=64)], ids=["bf16", "fp16"])
@pytest.mark.parametrize("how", [by_value_and_grad, by_func, by_autograd, by_backward], ids=lambda f: f.__name__)
def test_every_way_to_differentiate_computes_narrow_and_returns_wide(how, policy) -> None:
    torch.manual_seed(0)
    p, b = {"w": torch.randn(8, 4), "b": torch.randn(4)}, batch()
    dtype = policy.compute
    narrow = {k: v.to(dtype).requires_grad_() for k, v in p.items()}
    loss_of(narrow, {"x": b["x"].to(dtype)}).backward()
    want = {k: v.grad.float() for k, v in narrow.items()}

    def step(state, b):
        return state, how(state["p"], b)

    staged = cf.precision(step, policy)
    program = staged.lower({"p": p}, b).traced.program
    assert {program.values[n.refs[0]].dtype for n in program.nodes if "mm" in n.target} == {dtype}
    _, grads = staged({"p": p}, b)
    for k, g in grads.items():
        assert g.dtype is F32
        # The loss scale is a power of two: dividing by it again changes nothing but what would have underflowed.
        underflow = 2.0**-20 if dtype is F16 else 0
        torch.testing.assert_close(g.full(), want[k], rtol=0, atol=underflow)


def test_an_update_by_hand_reads_the_master() -> None:
    def step(state, b):
        p = {k: v.detach().requires_grad_() for k, v in state.items()}
        loss_of(p, b).backward()
        return {k: v - 2.0**-20 * v.grad for k, v in p.items()}

    p = {"w": torch.full((8, 4), 1 + 2.0**-20), "b": torch.full((4,), 1 + 2.0**-20)}
    new = cf.precision(step, "bf16")(p, {"x": torch.zeros(2, 8)})
    torch.testing.assert_close(new["w"].full(), p["w"], rtol=0, atol=0)  # a cast to bf16 and back would make it 1


def test_a_state_that_would_lose_its_master_is_an_error() -> None:
    def step(state, x):
        return {"w": state["w"].to(BF16)}, x

    with pytest.raises(cf.InputError, match=r"returns w as torch.bfloat16 and was given torch.float32.*update parameters under"):
        cf.precision(step, "bf16").lower({"w": torch.ones(3)}, torch.ones(2))


def test_autocast_in_the_step_composes() -> None:
    module = net()

    def step(state, b):
        def loss(p):
            with torch.autocast("cuda", F16):
                return mse(functional_call(module, p, b["x"]), b)

        return state, cf.value_and_grad(loss)(state["p"])

    state = {"p": {n: p.detach() for n, p in module.named_parameters()}}
    program = cf.precision(step, "bf16").lower(state, batch()).traced.program
    assert {program.values[n.refs[0]].dtype for n in program.nodes if n.target == "colofunc.linear"} == {F16}
    _, (loss, grads) = cf.precision(step, "bf16")(state, batch())
    assert loss.dtype is F32 and {g.dtype for g in grads.values()} == {F32}


def test_evaluation_through_a_model_computes_narrow() -> None:
    model = cf.functional(net().eval())
    low = cf.precision(lambda p, x: model.apply(p, {}, x)[0], "bf16").lower(model.params, torch.ones(2, 8))
    program = low.traced.program
    assert {program.values[n.refs[0]].dtype for n in program.nodes if n.target == "colofunc.linear"} == {BF16}


# ---- mistakes ----


@attrs.frozen
class Bare:
    p: Any


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: cf.precision(scaled_step, "bf61"), r"'bf61' is no precision; did you mean 'bf16'"),
        (lambda: cf.precision(scaled_step, torch.int8), r"torch.int8: a step computes in a floating dtype"),
        (lambda: cf.Policy(compute=16), r"16 is no dtype; write a name such as 'bf16'"),
        (lambda: cf.Policy(overrides={"*.head": "int4"}), r"overrides\['\*.head'\]='int4' is no precision"),
        (lambda: cf.Policy(loss_scale=-1), r"loss_scale=-1; write 'dynamic'"),
        (lambda: cf.precision(lambda s, x: (s, x), "fp16").lower(Bare(torch.ones(1)), torch.ones(1)), r"type Bare here\. Try: .* a record"),
        (lambda: cf.precision(cf.precision(scaled_step, "bf16"), "fp16"), r"precision is applied twice"),
    ],
)  # fmt: skip
def test_refused(make, message) -> None:
    with pytest.raises((cf.InputError, cf.PlanError), match=message):
        make()


def test_adam_without_masters_warns_and_names_the_way_out() -> None:
    step_fn, state = training(net().to(BF16))
    data = {k: v.to(BF16) for k, v in batch().items()}
    with pytest.warns(UserWarning, match=r"AdamW updates parameters in torch.bfloat16 .*cf.precision\(step, \"bf16\"\)"):
        cf.shard(step_fn, cf.Mesh()).lower(state, data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cf.precision(step_fn, "bf16").lower(state, batch())


def test_a_training_step_in_eval_mode_warns_and_an_evaluation_does_not() -> None:
    module = net().eval()
    step_fn, state = training(module)
    with pytest.warns(UserWarning, match=r"runs Sequential in eval mode.*call model.train\(\)"):
        cf.shard(step_fn, cf.Mesh()).lower(state, batch())
    model = cf.functional(module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cf.shard(lambda p, x: model.apply(p, {}, x)[0], cf.Mesh()).lower(model.params, batch()["x"])
        module.train()
        cf.shard(step_fn, cf.Mesh()).lower(state, batch())


def test_it_is_a_decorator_too() -> None:
    @cf.precision("bf16")
    def step(state, b):
        return state, by_value_and_grad(state, b)

    assert step.transform("precision").options["policy"] == cf.Policy(compute="bf16")
    assert step({"w": torch.ones(8, 4), "b": torch.ones(4)}, batch())[1]["w"].dtype is F32


def test_an_override_that_speaks_of_nothing_is_an_error() -> None:
    step_fn, state = training(net())
    with pytest.raises(cf.InputError, match=r"overrides\['1\.weights'\] matches no module and no parameter.*did you mean"):
        cf.precision(step_fn, cf.Policy(overrides={"0": "fp32", "1.weights": "fp32"})).lower(state, batch())
