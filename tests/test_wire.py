"""Gradients that are sent in 8 or 4 bits: the numbers of a message, sums that are made of them, residuals, and every other transform."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch
from colofunc_plugins import experts, tensor, zero
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import colofunc as cf
from colofunc.errors import InputError, PlanError
from colofunc.ops.wire import scheme_of, wire_open, wire_pack, wire_sum
from colofunc.program.passes.wire import LEAST

Chain = Callable[[Any], Any]
LR = 0.5
SCHEMES = ("int8", "int8-g128", "int4", "int4-g32", "fp8", "fp8-g64")
DP, DT, PP = (cf.Mesh(**axes, topology="8xa100-80g") for axes in ({"dp": 2}, {"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}))


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full() if isinstance(x, cf.DTensor) else x


def chained(step: Any, *transforms: Chain) -> Any:
    return reduce(lambda made, transform: transform(made), transforms, step)


def wired(scheme: str = "int8", feedback: bool = False) -> Chain:
    return lambda step: cf.quantize(step, wire=scheme, error_feedback=feedback)


# ---- the numbers of a message ----


@pytest.mark.parametrize("scheme", SCHEMES)
@given(
    data=st.lists(st.floats(-(2.0**100), 2.0**100, width=32) | st.floats(-(2.0**-10), 2.0**-10, width=32), min_size=1, max_size=700),
    n=st.integers(1, 5), dtype=st.sampled_from((torch.float32, torch.float64)),
)  # fmt: skip
def test_a_number_arrives_within_the_bound_of_its_group(scheme: str, data: list[float], n: int, dtype: torch.dtype) -> None:
    x = torch.tensor(data, dtype=dtype)
    message = wire_pack(x, scheme, n)
    how = scheme_of(scheme)
    row = -(-x.numel() // n)
    assert message.shape == (n, how.row_bytes(row))
    arrived = wire_open(message, x.shape, dtype, scheme)
    for piece, got in zip(x.split(row), arrived.split(row), strict=True):  # groups begin anew in each row
        assert ((got - piece).abs() <= how.bound(piece)).all()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_arrives_as_nan_and_spoils_its_group_alone(scheme: str, bad: float) -> None:
    group = scheme_of(scheme).group
    x = torch.ones(2, 2 * group)
    x[0, 3] = bad
    got = wire_open(wire_pack(x, scheme, 2), x.shape, x.dtype, scheme)
    assert got[0, :group].isnan().all()
    assert torch.equal(got[0, group:], torch.ones(group)) and torch.equal(got[1], torch.ones(2 * group))


@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8"])
def test_a_message_is_the_same_where_all_else_is_in_float64(scheme: str) -> None:
    """Scales are sent in 4 bytes, whatever the mode makes of float32."""
    x = torch.randn(1000, dtype=torch.float64)
    message = torch.ops.colofunc.wire_pack(x, scheme, 2)
    with cf.testing.float64():
        assert torch.equal(torch.ops.colofunc.wire_pack(x, scheme, 2), message)
        opened = torch.ops.colofunc.wire_open(message, [1000], torch.float64, scheme)
    assert torch.equal(opened, torch.ops.colofunc.wire_open(message, [1000], torch.float64, scheme))


def test_a_sum_of_many_terms_does_not_overflow() -> None:
    x = torch.full((300, 256), 127.0)
    message = torch.cat([wire_pack(row, "int8", 1) for row in x])
    assert torch.equal(wire_sum(message, (256,), torch.float32, "int8"), torch.full((256,), 127.0 * 300))
    assert torch.equal(wire_sum(message, (256,), torch.bfloat16, "int8"), torch.full((256,), 127.0 * 300, dtype=torch.bfloat16))


# ---- sums of gradients ----


def training(dtype: torch.dtype = torch.float32, rows: int = 16) -> tuple[Any, Any, Any]:
    """A step of SGD, so that what becomes of the parameters says what the gradients were."""
    torch.manual_seed(0)
    model = cf.functional(nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 48)).to(dtype))
    optimizer = cf.adapt(torch.optim.SGD, lr=LR)
    step, state = cf.train_step(model, optimizer, lambda out, b: (out - b[1]).pow(2).mean(), inputs=lambda b: ((b[0],), {}))
    return step, state, (torch.randn(rows, 64, dtype=dtype), torch.randn(rows, 48, dtype=dtype))


WEIGHTS = ("0.weight", "2.weight", "4.weight")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_gradient_is_off_by_at_most_the_bounds_of_its_terms(scheme: str) -> None:
    step, state, batch = training(torch.float64)
    sharded = cf.shard(step, DP, zero(1, "dp"))
    (new, _), (exact, _) = (made(state, batch) for made in (wired(scheme)(sharded), sharded))
    halves = [step(state, tuple(x[rows] for x in batch))[0]["params"] for rows in (slice(0, 8), slice(8, 16))]
    how = scheme_of(scheme)
    for name in WEIGHTS:
        before = state["params"][name]
        error = (whole(new["params"][name]) - whole(exact["params"][name])).abs() / LR
        bound = torch.zeros_like(before)
        for half in halves:
            term = (before - half[name]) / LR / 2  # each half's mean counts half
            # Pieces of rows (or of columns) begin groups of their own: the largest number of all bounds that of any group.
            off = how.bound(term.abs().max().expand(1))
            bound += torch.maximum(off.expand_as(term), term.abs() / 16 if how.form.name == "fp8" else off)
        assert error.max() > 0, "something was rounded"
        assert (error <= bound * (1 + 1e-9)).all()
    for name in ("0.bias", "2.bias", "4.bias"):
        torch.testing.assert_close(whole(new["params"][name]), whole(exact["params"][name]), rtol=1e-13, atol=1e-13)


def test_plans_and_costs_say_what_travels() -> None:
    step, state, batch = training()
    sharded = cf.shard(step, DP, zero(2, "dp"))
    plain, narrow = sharded.lower(state, batch), wired()(sharded).lower(state, batch)
    sent = sum(narrow.cost().bytes[kind, "dp"] for kind in ("reduce_scatter", "all_to_all"))
    numbers = sum(state["params"][name].numel() for name in WEIGHTS)
    assert narrow.cost().bytes["all_to_all", "dp"] == numbers // 2 * (256 + 4) // 256
    assert sent < 0.3 * plain.cost().bytes["reduce_scatter", "dp"]
    assert narrow.lanes().end_s > 0 and "int8-g256: 15.23 KiB a step of each rank, 60 KiB as they are summed" in str(narrow.plan.notes)
    assert "wire_pack" in narrow.passes.diff("quantize_wire.rewrite_local")


def test_all_ranks_have_the_same_sum() -> None:
    """Of an all-reduce each rank opens the message of the one that summed a piece."""
    torch.manual_seed(0)
    weights, x = {"up": torch.randn(64, 96), "down": torch.randn(96, 40)}, torch.randn(768, 64)

    def step(state: Any, x: torch.Tensor) -> Any:
        def loss(params: Any) -> torch.Tensor:
            return torch.tanh(x @ params["up"] / 8).matmul(params["down"]).square().mean()

        value, grads = cf.value_and_grad(loss)(state["params"])
        return {"params": {name: p - LR * grads[name] for name, p in state["params"].items()}}, (value, grads)

    # 64, 96 and 40 do not all divide by 3, so that not all sums are scattered.
    sharded = cf.shard(step, cf.Mesh(dp=3), zero(1, "dp"), in_specs=(None, "(dp b) ..."), agree_every=1)
    state = {"params": weights}
    for feedback in (False, True):
        made = wired("int8", feedback)(sharded)
        low = made.lower(state, x)
        assert {"colofunc.wire_open", "colofunc.wire_sum"} <= {node.target for node in low.program.nodes}
        new, _ = made(made.init(state, x), x)
        exact, _ = sharded(state, x)
        for name in weights:
            step_size = (whole(exact["params"][name]) - weights[name]).abs().max()
            error = (whole(new["params"][name]) - whole(exact["params"][name])).abs().max()
            assert 0 < error < 0.02 * step_size
        made(new, x)  # where ranks compare their copies


# ---- error feedback ----


def linear(dtype: torch.dtype = torch.float64) -> tuple[Any, Any, torch.Tensor]:
    """A step whose gradient does not depend on the weight, and is that of the batch alone."""
    torch.manual_seed(0)

    def step(state: Any, x: torch.Tensor) -> Any:
        value, grads = cf.value_and_grad(lambda params: (x @ params["w"]).mul(x[:, :48]).sum())(state)
        return {"w": state["w"] - grads["w"]}, value

    return step, {"w": torch.zeros(64, 48, dtype=dtype)}, torch.randn(32, 64, dtype=dtype)


@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("mesh", [cf.Mesh(dp=2), cf.Mesh(dp=3), cf.Mesh(dp=2, cp=2)], ids=str)
def test_what_was_sent_and_what_is_left_are_the_gradients(scheme: str, mesh: cf.Mesh) -> None:
    step, state, x = linear()
    x = x[: 32 // mesh.size * mesh.size]
    made = wired(scheme, True)(cf.shard(step, mesh, zero(1, mesh.axis_names)))
    exact = state["w"]
    kept = made.init(state, x)
    for scale in (1.0, -0.3, 2.0, 0.1):
        exact = step({"w": exact}, x * scale)[0]["w"]
        kept, _ = made(kept, x * scale)
        left = kept["error_feedback"]["residual"]["w.residual"]
        assert left.sharding.pending and left.full().abs().max() > 0
        torch.testing.assert_close(kept["w"].full() - left.full(), exact, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("scheme", ["int4", pytest.param("fp8", marks=pytest.mark.sweep)])
def test_sgd_with_feedback_is_nearer_to_the_exact_one(scheme: str) -> None:
    step, state, batch = training(rows=64)
    sharded = cf.shard(step, DP, zero(2, "dp"))
    ends = []
    for made in (sharded, wired(scheme)(sharded), wired(scheme, True)(sharded)):
        kept = made.init(state, batch)
        for _ in range(40):
            kept, _ = made(kept, batch)
        ends.append(torch.cat([whole(kept["params"][name]).flatten() for name in WEIGHTS]))
    exact, without, with_feedback = ends
    assert (with_feedback - exact).norm() < 0.7 * (without - exact).norm()


def test_residuals_are_saved_and_go_on_on_another_mesh(tmp_path: Any) -> None:
    step, state, x = linear()
    first = wired("int4", True)(cf.shard(step, DP, zero(1, "dp")))
    kept, _ = first(first.init(state, x), x)
    left = kept["error_feedback"]["residual"]["w.residual"].full()
    cf.save(tmp_path / "c", kept)
    for mesh in (cf.Mesh(dp=2, topology="8xa100-80g"), cf.Mesh(dp=4)):
        second = wired("int4", True)(cf.shard(step, mesh, zero(1, "dp")))
        again = second.init(cf.load(tmp_path / "c", mesh=mesh), x)
        assert torch.equal(again["error_feedback"]["residual"]["w.residual"].full(), left)
        exact = step(step(state, x)[0], x)[0]["w"]
        again, _ = second(again, x)
        rest = again["error_feedback"]["residual"]["w.residual"].full()
        torch.testing.assert_close(again["w"].full() - rest, exact, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("name", ["zero 1", "offload", "pipeline"])
def test_a_state_with_residuals_is_loaded_as_it_lay_and_goes_on(name: str, tmp_path: Any) -> None:
    step, state, batch = training()
    made = chained(step, *BESIDE[name], wired("int8", True))
    kept, _ = made(made.init(state, batch), batch)
    cf.save(tmp_path / "c", kept)
    again = cf.load(tmp_path / "c", like=kept)
    for key, left in kept["error_feedback"]["residual"].items():
        assert again["error_feedback"]["residual"][key].sharding is left.sharding
        torch.testing.assert_close(whole(again["error_feedback"]["residual"][key]), whole(left), rtol=0, atol=0)
    new, _ = made(again, batch)
    want, _ = made(kept, batch)
    for weight in WEIGHTS:  # ranks have other parts of what was not sent, which are rounded otherwise
        torch.testing.assert_close(whole(new["params"][weight]), whole(want["params"][weight]), rtol=1e-3, atol=1e-3)


def test_a_gradient_that_is_not_finite_is_seen_and_leaves_no_residual() -> None:
    step, state, x = linear()
    made = wired("int8", True)(cf.shard(step, DP, zero(1, "dp")))
    bad = x.clone()
    bad[0, 0] = float("inf")
    new, _ = made(made.init(state, x), bad)
    assert new["w"].full().isfinite().logical_not().any()
    assert new["error_feedback"]["residual"]["w.residual"].full().isfinite().all()


def test_a_step_that_a_loss_scale_skips_keeps_its_residuals() -> None:
    step, state, batch = training()
    made = chained(step, lambda s: cf.shard(s, DP, zero(1, "dp")), wired("int8", True), lambda s: cf.precision(s, "fp16"))
    kept, _ = made(made.init(state, batch), batch)
    before = {name: whole(r).clone() for name, r in kept["error_feedback"]["residual"].items()}
    scale = float(kept["loss_scale"]["scale"])
    kept, _ = made(kept, tuple(1e4 * x for x in batch))
    assert float(kept["loss_scale"]["scale"]) == scale / 2, "it was skipped"
    assert all(torch.equal(whole(r), before[name]) for name, r in kept["error_feedback"]["residual"].items())


def test_a_state_gets_residuals_wherever_it_lies_and_before_it_has_values() -> None:
    step, state, batch = training()
    sharded = cf.shard(step, DP, zero(3, "dp"))
    made = wired("int8", True)(sharded)
    running, _ = sharded(sharded.init(state, batch), batch)
    running, _ = made(running, batch)
    assert running["error_feedback"]["residual"]["params.0.weight.residual"].sharding.pending == (("dp", "sum"),)
    lazy = cf.functional(cf.lazy(lambda: nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 48))))
    step, state = cf.train_step(lazy, cf.adapt(torch.optim.SGD, lr=LR), lambda out: out.square().mean())
    made = wired("int8", True)(cf.shard(step, DP, zero(3, "dp")))
    assert "wire_left" in made.lower(state, cf.abstract((16, 64))).text()
    kept, _ = made(made.init(state, batch[0]), batch[0])
    assert whole(kept["error_feedback"]["residual"]["params.0.weight.residual"]).abs().max() > 0


def test_one_device_has_nothing_to_send() -> None:
    step, state, batch = training()
    made = wired("int4", True)(step)
    kept, _ = made(state, batch)
    for name, p in step(state, batch)[0]["params"].items():
        assert torch.equal(whole(kept["params"][name]), p)
    assert all(not whole(r).any() for r in kept["error_feedback"]["residual"].values())
    assert set(kept["error_feedback"]["residual"]) == {f"params.{name}.residual" for name in WEIGHTS}


# ---- beside every other transform ----


def on(mesh: cf.Mesh, *plans: Any) -> Chain:
    return lambda step: cf.shard(step, mesh, *plans)


ZERO3 = on(DP, zero(3, "dp"))
BESIDE: dict[str, tuple[Chain, ...]] = {
    "zero 1": (on(DP, zero(1, "dp")),),
    "zero 3": (ZERO3,),
    "tensor": (on(DT, zero(3, "dp"), tensor("1d", "tp")),),
    "checkpoint": (ZERO3, lambda step: cf.checkpoint(step, policy="nothing")),
    "offload": (ZERO3, lambda step: cf.offload(step, policy="host")),
    "accumulate": (on(DP, zero(2, "dp")), lambda step: cf.accumulate(step, microbatches=2)),
    "pipeline": (on(PP, zero(1, "dp")), lambda step: cf.pipeline(step, microbatches=2)),
    "bf16": (on(DP, zero(2, "dp")), lambda step: cf.precision(step, "bf16")),
}
WIDER: dict[str, tuple[Chain, ...]] = {
    "zero 2": (on(DP, zero(2, "dp")),),
    "accumulate, zero 3": (ZERO3, lambda step: cf.accumulate(step, microbatches=4)),
    "fp16": (ZERO3, lambda step: cf.precision(step, "fp16")),
    "fp8": (ZERO3, lambda step: cf.fp8(step)),
    "checkpoint and offload": (ZERO3, lambda step: cf.checkpoint(step, policy="nothing"), lambda step: cf.offload(step, policy="host")),
    "pipeline, bf16": (on(PP, zero(1, "dp")), lambda step: cf.pipeline(step, microbatches=4), lambda step: cf.precision(step, "bf16")),
    "tensor, bf16, accumulate, checkpoint": (
        on(DT, zero(3, "dp"), tensor("1d", "tp")), lambda step: cf.precision(step, "bf16"),
        lambda step: cf.accumulate(step, microbatches=2), lambda step: cf.checkpoint(step, policy="nothing"),
    ),
}  # fmt: skip


def composes(name: str, feedback: bool, scheme: str = "int8") -> None:
    """Both orders are one program; it packs gradients, and what comes of them is near to what the step gives without.

    With copies between tiers whole plans are counted side by side, and one that sums gradients in full before residuals are added may be
    the fastest of a step as small as this: then nothing is left.
    """
    transforms = (BESIDE | WIDER)[name]
    step, state, batch = training()
    one, other = chained(step, *transforms, wired(scheme, feedback)), chained(step, wired(scheme, feedback), *transforms)
    plain = chained(step, *transforms)
    lows = [made.lower(state, batch) for made in (one, other)]
    packs = "wire_pack" in lows[0].text()
    in_full = [note for note in lows[0].plan.notes if note.startswith("gradients are summed in full before residuals are added")]
    assert lows[0].text() == lows[1].text() and (packs or (feedback and "offload" in name)) and packs != bool(in_full)
    kept, metrics = one(one.init(state, batch), batch)
    exact, wanted = plain(plain.init(state, batch), batch)
    torch.testing.assert_close(whole(metrics["loss"]), whole(wanted["loss"]))
    most = {"int8": 0.02, "fp8": 0.1, "int4": 0.25}[scheme]
    for name, before in state["params"].items():
        after, reference = whole(kept["params"][name]), whole(exact["params"][name])
        assert (after - reference).abs().max() <= most * (reference - before).abs().max()
    assert packs != all(torch.equal(whole(kept["params"][name]), whole(exact["params"][name])) for name in WEIGHTS)
    assert packs or not any(whole(left).any() for left in kept["error_feedback"]["residual"].values())
    one(kept, batch)


# With feedback half of them; the sweep below has all.
ONCE = [*((name, False) for name in BESIDE), *((name, True) for name in ("zero 3", "tensor", "accumulate", "pipeline"))]


@pytest.mark.parametrize(("name", "feedback"), ONCE)
def test_it_stands_beside_every_other_transform_in_either_order(name: str, feedback: bool) -> None:
    composes(name, feedback)


@pytest.mark.sweep
@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("feedback", [False, True], ids=["", "feedback"])
@pytest.mark.parametrize("name", [*BESIDE, *WIDER])
def test_every_scheme_stands_beside_every_other_transform(name: str, feedback: bool, scheme: str) -> None:
    composes(name, feedback, scheme)


@pytest.mark.parametrize("feedback", [False, True], ids=["", "feedback"])
def test_experts_on_ranks_of_their_own_sum_over_the_others(feedback: bool) -> None:
    torch.manual_seed(0)
    weights = {"up": torch.randn(4, 64, 32) / 8, "down": torch.randn(4, 32, 32) / 8, "router": torch.randn(4, 32)}

    def step(state: Any, x: torch.Tensor) -> Any:
        def loss(params: Any) -> torch.Tensor:
            chosen, scale = (x @ params["router"].T).softmax(-1).max(-1)[::-1]
            return cf.moe.experts(x, chosen[:, None], scale[:, None], params["up"], params["down"]).pow(2).mean()

        value, grads = cf.value_and_grad(loss)(state["params"])
        return {"params": {name: p - LR * grads[name] for name, p in state["params"].items()}}, value

    x, state = torch.randn(64, 32), {"params": weights}
    mesh = cf.Mesh(dp=2, ep=2, topology="8xa100-80g")
    sharded = cf.shard(step, mesh, zero(1, "dp"), experts("ep"))
    made = wired("int8", feedback)(sharded)
    assert "wire_pack" in made.lower(state, x).text()
    (new, _), (exact, _) = made(made.init(state, x), x), sharded(state, x)
    for name, before in weights.items():
        error = (whole(new["params"][name]) - whole(exact["params"][name])).abs().max()
        assert error <= 0.02 * (whole(exact["params"][name]) - before).abs().max()
    made(new, x)


def test_weights_and_wire_are_knobs_of_their_own() -> None:
    """Adapters beside packed weights: what is frozen is packed, what is trained is sent narrow."""
    torch.manual_seed(0)
    model = cf.lora(cf.functional(nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 128))), "*", rank=32)
    step, state = cf.train_step(model, cf.adapt(torch.optim.SGD, lr=LR), lambda out: out.square().mean())
    x = torch.randn(16, 128)
    sharded = cf.shard(step, DP, zero(1, "dp"))
    both = [
        cf.quantize(sharded, "int8", where=("0.weight", "2.weight"), wire="int8", error_feedback=True),
        cf.quantize(cf.quantize(sharded, wire="int8", error_feedback=True), "int8", where=("0.weight", "2.weight")),
        cf.quantize("int8", where=("0.weight", "2.weight"), wire="int8", error_feedback=True)(sharded),
    ]
    texts = [made.lower(state, x).text() for made in both]
    assert texts[0] == texts[1] == texts[2] and "wire_pack" in texts[0] and "int8_linear" in texts[0]
    kept, _ = both[0](both[0].init(state, x), x)
    both[0](kept, x)


# ---- bad input ----


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (dict(wire="int9"), "there is no way to send gradients of that name; did you mean 'int8'"),
        (dict(wire="nf4"), "there is no way to send gradients of that name"),
        (dict(wire=8), "there is no way to send gradients of that name"),
        (dict(wire="int8-g100"), "100 numbers cannot share a scale. Try: a multiple of 8"),
        (dict(wire="int8-g0"), "0 numbers cannot share a scale"),
        (dict(error_feedback=True), "is about gradients that are sent narrow. Try: wire='int8'"),
        (dict(scheme="int9", wire="int8"), "there is no scheme 'int9'"),
    ],
)
def test_bad_input_is_said_at_once(given: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        cf.quantize(lambda state, x: state, **given)


def test_once_is_enough() -> None:
    step, _, _ = training()
    with pytest.raises(PlanError, match=r"quantize\(wire=...\) is applied twice"):
        cf.quantize(cf.quantize(step, wire="int8"), wire="int4")


def test_residuals_need_a_place_in_the_state() -> None:
    made = wired("int8", True)(lambda state, x: (state - x.sum(), x))
    with pytest.raises(InputError, match=r"error_feedback=True\) keeps what was not sent in the state, which is of type Tensor"):
        made(torch.ones(64, 64), torch.ones(4))


def test_a_step_that_sums_no_gradients_says_so_in_its_plan() -> None:
    low = wired()(cf.shard(lambda x, w: torch.relu(x @ w), DP, in_specs=("(dp b) i", None))).lower(torch.ones(64, 64), torch.ones(64, 64))
    assert "wire_pack" not in low.text()
    assert any("wire= changes nothing" in note for note in low.plan.notes)


def test_small_gradients_and_numbers_stay_as_they_are() -> None:
    step, state, batch = training()
    low = wired()(cf.shard(step, DP, zero(1, "dp"))).lower(state, batch)
    values = low.program.values
    sums = [node for node in low.program.nodes if node.target in ("colofunc.reduce_scatter_start", "colofunc.all_reduce_start")]
    assert sums and all(values[node.refs[0]].nbytes < 4 * LEAST for node in sums)


# ---- processes ----


def train_on_two_ranks() -> list[torch.Tensor]:
    torch.set_num_threads(1)
    step, state, batch = training()
    made = wired("int8", True)(cf.shard(step, cf.Mesh(dp=2), zero(2, "dp")))
    kept = made.init(state, batch)
    for _ in range(3):
        kept, _ = made(kept, batch)
    return [whole(kept["params"][name]) for name in WEIGHTS] + [whole(r) for r in kept["error_feedback"]["residual"].values()]


@pytest.mark.dist
def test_processes_have_the_numbers_of_simulated_ranks() -> None:
    want = train_on_two_ranks()
    for got in cf.launch(train_on_two_ranks, 2, timeout_s=200):
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)
