"""The loss scale of fp16: part of the state, steps that overflow, how it grows, evaluation."""

from typing import Any, NamedTuple

import attrs
import pytest
import torch
from narrow_steps import batch, loss_of, net, scaled_step, training
from torch import nn

import colofunc as cf


def scaled_state() -> dict:
    return {"p": {"w": torch.ones(8, 4)}, "n": torch.zeros((), dtype=torch.int64)}


def test_a_step_that_overflows_changes_nothing_but_the_scale() -> None:
    step = cf.precision(cf.shard(scaled_step, cf.Mesh(dp=2, topology="ideal"), in_specs=(None, {"x": "(dp b) i", "gain": ""})), "fp16")
    x = torch.zeros(4, 8)
    x[3] = 1.0  # only the second rank's rows overflow
    data = {"x": x, "gain": torch.tensor(1.0)}
    state = step.init(scaled_state(), data)
    new, metrics = step(state, data)
    assert float(metrics["loss"]) == 256.0 and int(new["n"]) == 0
    assert torch.equal(new["p"]["w"].full(), torch.ones(8, 4))
    assert {k: float(v) for k, v in new["loss_scale"].items()} == {"scale": 16384.0, "good": 0.0, "skipped": 1.0}
    for _ in range(8):
        new, _ = step(new, data)
    assert int(new["n"]) > 0 and int(new["loss_scale"]["skipped"]) == 0
    assert int(new["n"]) == int(new["loss_scale"]["good"])


class Pair(NamedTuple):
    p: Any
    n: Any
    loss_scale: Any = None


@attrs.frozen
class Record:
    p: Any
    n: Any
    loss_scale: Any = None


@pytest.mark.parametrize("kind", [tuple, list, Pair, Record])
def test_states_of_other_kinds_have_a_place_for_the_scale(kind) -> None:
    """The steps of a dict, one of which is skipped; the function sees the state as it was made."""
    sequence = kind in (tuple, list)

    def step_fn(state, b):
        p, n = state if sequence else (state.p, state.n)
        assert sequence or state.loss_scale is None
        new, metrics = scaled_step({"p": p, "n": n}, b)
        return (kind(new.values()) if sequence else kind(new["p"], new["n"])), metrics

    data = {"x": torch.ones(4, 8), "gain": torch.tensor(1.0)}
    first = scaled_state()
    states = [first, kind(first.values()) if sequence else kind(first["p"], first["n"])]
    steps = [cf.precision(cf.shard(fn, cf.Mesh(dp=2)), "fp16") for fn in (scaled_step, step_fn)]
    placed = [step.init(state, data) for step, state in zip(steps, states, strict=True)]
    for _ in range(8):
        placed = [step(state, data)[0] for step, state in zip(steps, placed, strict=True)]
    want, got = placed
    assert type(got) is kind
    p, n, record = got if sequence else (got.p, got.n, got.loss_scale)
    assert torch.equal(p["w"].full(), want["p"]["w"].full()) and 0 < int(n) == int(want["n"]) < 8
    assert {k: float(v) for k, v in record.items()} == {k: float(v) for k, v in want["loss_scale"].items()}


def test_a_state_with_a_loss_scale_is_updated_in_place() -> None:
    step_fn, state = training(nn.Linear(512, 512), clip=1.0)
    data = {"x": torch.randn(4, 512), "y": torch.randn(4, 512)}
    lows = {p: cf.precision(step_fn, p).lower(state, data) for p in ("bf16", "fp16")}
    names = [n.target for n in lows["fp16"].program.nodes]
    assert names.count("colofunc.adamw_") == 2 and "colofunc.adamw" not in names
    peaks = {p: low.memory().peak_bytes["device"] for p, low in lows.items()}
    # Parameters and two moments of 1 MiB each; a choice between old and new state held all of them twice.
    assert peaks["fp16"] <= peaks["bf16"] + (1 << 20) // 4


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Muon])
def test_a_skipped_step_leaves_every_bit_of_every_optimizer(cls) -> None:
    options = dict(momentum=0.9) if cls is not torch.optim.AdamW else dict(amsgrad=True)
    opt = cf.adapt(cls, lr=1e-2, **options)
    step_fn, state = cf.train_step(cf.functional(nn.Linear(8, 4, bias=False)), opt, loss=lambda out: out.square().mean(), clip=1.0)
    step = cf.precision(cf.shard(step_fn, cf.Mesh(dp=2, topology="ideal"), in_specs=(None, "(dp b) i")), "fp16")
    data = [torch.randn(4, 8), torch.full((4, 8), 1e4)]
    state, _ = step(step.init(state, data[0]), data[0])
    before = [t.full().clone() for t in torch.utils._pytree.tree_leaves({k: v for k, v in state.items() if k != "loss_scale"})]
    state, _ = step(state, data[1])
    assert int(state["loss_scale"]["skipped"]) == 1
    after = [t.full() for t in torch.utils._pytree.tree_leaves({k: v for k, v in state.items() if k != "loss_scale"})]
    assert len(before) > 2 and all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_a_backward_pass_after_the_update_counts_as_well() -> None:
    opt = cf.adapt(torch.optim.SGD, lr=0.1)

    def step(state, x):
        _, grads = cf.value_and_grad(lambda p: (x[0] @ p["w"]).sum())(state["p"])
        p, o = opt.update(grads, state["o"], state["p"])
        late, _ = cf.value_and_grad(lambda p: (x[1] @ p["w"]).sum())(p)
        return {"p": p, "o": o}, late

    p = {"w": torch.ones(4, 4)}
    x = torch.stack([torch.ones(2, 4), torch.full((2, 4), float("inf"))])
    new, _ = cf.precision(step, "fp16")({"p": p, "o": opt.init(p)}, x)
    assert torch.equal(new["p"]["w"].full(), p["w"]) and int(new["loss_scale"]["skipped"]) == 1


def test_a_scaled_step_has_the_gradients_of_one_that_is_not() -> None:
    data = {"x": batch()["x"] / 16, "gain": torch.tensor(0.01)}
    outs = [
        cf.precision(scaled_step, cf.Policy(compute="fp16", loss_scale=scale))(
            {**scaled_state()}, data
        )[0]["p"]["w"].full()
        for scale in (1, 1024, None)
    ]  # fmt: skip
    torch.testing.assert_close(outs[0], outs[2], rtol=0, atol=0)
    torch.testing.assert_close(outs[1], outs[2], rtol=1e-6, atol=1e-6)
    assert not torch.equal(outs[1], torch.ones(8, 4))


def test_two_thousand_good_steps_double_the_scale() -> None:
    step = cf.precision(scaled_step, "fp16")
    data = {"x": torch.zeros(4, 8), "gain": torch.tensor(1.0)}
    record = {"scale": torch.tensor(8.0), "good": torch.tensor(1998), "skipped": torch.tensor(0)}
    state = {**scaled_state(), "loss_scale": record}
    seen = []
    for _ in range(3):
        state, _ = step(state, data)
        seen.append((float(state["loss_scale"]["scale"]), int(state["loss_scale"]["good"])))
    assert seen == [(8.0, 1999), (16.0, 0), (16.0, 1)]


def test_clipping_and_the_update_see_gradients_without_the_scale() -> None:
    step_fn, state = training(net(), clip=1.0)
    norms = [float(cf.precision(step_fn, p)(state, batch())[1]["grad_norm"]) for p in (cf.Policy(compute="fp32"), "fp16")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-2)


def test_an_overflow_for_ever_ends_in_an_error_that_leaves_the_state() -> None:
    step = cf.precision(scaled_step, "fp16")
    data = {"x": torch.full((4, 8), float("inf")), "gain": torch.tensor(1.0)}
    state = step.init(scaled_state(), data)
    with pytest.raises(cf.PrecisionError, match=r"steps in a row were skipped .* loss scale of 1;"):
        for _ in range(250):
            state, _ = step(state, data)
    assert torch.equal(state["p"]["w"].full(), torch.ones(8, 4))


def test_evaluation_under_fp16_needs_no_gradient_and_returns_no_state() -> None:
    out = cf.precision(lambda state, x: x @ state["p"]["w"], "fp16")(scaled_state(), torch.ones(2, 8))
    assert torch.equal(out.full(), torch.full((2, 4), 8.0))


def test_a_scaled_step_that_returns_no_state_is_an_error() -> None:
    with pytest.raises(cf.InputError, match="a step with a loss scale returns its new state first"):
        cf.precision(lambda s, b: cf.value_and_grad(loss_of)(s["p"], b)[0], "fp16").lower(
            {"p": {"w": torch.ones(8, 4), "b": torch.ones(4)}}, batch()
        )
