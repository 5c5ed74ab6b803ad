"""Operators that mix the samples of a batch under accumulation: refused by name, or asked for per microbatch."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from microbatches import MESHES

import colofunc as cf
from colofunc.errors import PlanError
from colofunc.testing import programs


def contrastive(w, x):
    def loss_of(w):
        h = F.normalize(x @ w, dim=1)
        return F.cross_entropy(h @ h.T, torch.arange(len(x)))

    loss, grad = cf.value_and_grad(loss_of)(w)
    return w - grad, loss


def test_batch_norm_is_refused_by_name():
    step, state, batch = programs.conv_net(8)
    with pytest.raises(PlanError, match=r"batch_norm.* in 'norm' .*mixes the samples of the batch.*mixing=\"per-microbatch\""):
        cf.accumulate(step, 2).lower(state, batch)


def test_batch_norm_over_sharded_rows_is_refused_by_its_own_name():
    """The first thing that microbatches cannot follow is a collective in its local code."""
    module = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)).double().train()
    opt = cf.adapt(torch.optim.AdamW, lr=0.1)
    step, state = cf.train_step(cf.functional(module), opt, loss=lambda out, batch: out.square().mean(), inputs=lambda x: ((x,), {}))
    zero = pytest.importorskip("colofunc_plugins").zero
    with pytest.raises(PlanError, match=r"batch_norm.* in '1' .*mixes the samples of the batch, so 2 microbatches"):
        cf.accumulate(cf.shard(step, MESHES["dp"], zero(3, "dp")), 2).lower(state, torch.randn(8, 6, dtype=torch.float64))


@pytest.mark.parametrize("rows", [8, 32])
@pytest.mark.parametrize(
    ("axes", "stage"),
    [({}, 0), ({"dp": 2}, 0), ({"tp": 2}, 0), ({"dp": 2, "tp": 2}, 0), ({"dp": 2}, 1), ({"dp": 2}, 3), ({"dp": 2, "tp": 2}, 3)],
)
def test_batch_norm_is_refused_whatever_the_plan(rows, axes, stage):
    """Where every rank has all rows it could be computed behind the loop, over the whole batch; then nothing is accumulated."""
    plans = [pytest.importorskip("colofunc_plugins").zero(stage, "dp")] if stage else []
    module = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)).double().train()
    opt = cf.adapt(torch.optim.AdamW, lr=0.1)
    step, state = cf.train_step(cf.functional(module), opt, loss=lambda out, batch: out.square().mean(), inputs=lambda x: ((x,), {}))
    staged = cf.shard(step, cf.Mesh(**axes, topology="ideal"), *plans)
    with pytest.raises(PlanError) as caught:
        cf.accumulate(staged, 4).lower(state, torch.randn(rows, 6, dtype=torch.float64))
    said = re.sub(r"\(test_accumulate_mixing.py:\d+ in \w+\)", "(line)", str(caught.value))
    assert said == (
        "_native_batch_norm_legit_functional.default in '1' (line) mixes the samples of the batch, so 4 microbatches cannot be computed "
        'one after another; write mixing="per-microbatch" to treat each microbatch by itself (the numbers change), or take one microbatch'
    )


def test_what_reads_the_batch_again_behind_an_update_is_refused_by_the_update():
    model = cf.functional(torch.nn.Linear(3, 2))
    opt = cf.adapt(torch.optim.SGD, lr=0.1)

    def loss_of(params, x):
        return model.apply(params, model.buffers, x)[0].square().mean()

    def step(state, x):
        _, grads = cf.value_and_grad(loss_of)(state["params"], x)
        params, held = opt.update(grads, state["opt"], state["params"])
        _, again = cf.value_and_grad(loss_of)(params, torch.relu(x @ state["frozen"]))
        params, held = opt.update(again, held, params)
        return {"params": params, "opt": held, "frozen": state["frozen"]}, loss_of(params, torch.relu(x @ state["frozen"]))

    state = {"params": model.params, "opt": opt.init(model.params), "frozen": torch.randn(3, 3)}
    with pytest.raises(PlanError, match=r"reads the batch again behind the update sgd \(.*in step\).*make a step of each update"):
        cf.accumulate(step, 2).lower(state, torch.randn(8, 3))


def test_contrastive_loss_is_refused_both_ways():
    w, x = torch.randn(4, 3), torch.randn(8, 4)
    with pytest.raises(PlanError, match=r"mixes the samples of the batch, so 2 microbatches"):
        cf.accumulate(contrastive, 2).lower(w, x)
    with pytest.raises(PlanError, match="needs all rows at once"):
        cf.accumulate(contrastive, 2, mixing="per-microbatch").lower(w, x)


@pytest.mark.parametrize("mesh", ["one", "dp", "zero1", "zero3"])
def test_per_microbatch_norm_is_a_loop_by_hand(mesh):
    torch.manual_seed(0)
    plans = [pytest.importorskip("colofunc_plugins").zero(int(mesh[4:]), "dp")] if "zero" in mesh else []
    module = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2)).double().train()
    x, y = torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)
    model = cf.functional(module)

    def step(params, batch):
        def loss_of(params):
            out, buffers = model.apply(params, model.buffers, batch["x"])
            return F.mse_loss(out, batch["y"]), buffers

        (loss, buffers), grads = cf.value_and_grad(loss_of, has_aux=True)(params)
        return {k: v - 0.1 * grads[k] for k, v in params.items()}, loss, buffers["1.running_mean"]

    specs = (None, "(dp b) ...") if mesh == "dp" else None
    axes = MESHES["one" if mesh == "one" else "dp"]
    accumulated = cf.accumulate(cf.shard(step, axes, *plans, in_specs=specs), 2, mixing="per-microbatch")
    got = accumulated(model.params, {"x": x, "y": y})
    # On two ranks, a microbatch is a part of what each rank has.
    rows = [[0, 1, 4, 5], [2, 3, 6, 7]] if mesh != "one" else [[0, 1, 2, 3], [4, 5, 6, 7]]
    hands = [step(model.params, {"x": x[r], "y": y[r]}) for r in rows]
    for name, value in got[0].items():
        torch.testing.assert_close(value.full(), (hands[0][0][name] + hands[1][0][name]) / 2, rtol=1e-10, atol=1e-10)
    for k in (1, 2):
        torch.testing.assert_close(got[k].full(), (hands[0][k] + hands[1][k]) / 2, rtol=1e-10, atol=1e-10)
