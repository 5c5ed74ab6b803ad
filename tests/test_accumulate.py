"""Accumulation over microbatches: the numbers of the whole batch, in a loop, on every mesh."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from microbatches import MESHES, loops, regression

import colofunc as cf
from colofunc.errors import InputError, PlanError
from colofunc.testing import models, programs

# ---- the numbers of the whole batch ----


# 2 and 4 microbatches in turn, so that each model and each mesh has both; the other number in the sweep.
WHOLE = [
    pytest.param(name, mesh, microbatches, marks=() if (k + n) % 2 == (microbatches == 4) else pytest.mark.sweep)
    for n, name in enumerate(("mlp", "attention_block", "embedding_loss"))
    for k, mesh in enumerate(MESHES)
    for microbatches in (2, 4)
]


@pytest.mark.parametrize(("name", "mesh", "microbatches"), WHOLE)
def test_equals_the_whole_batch(name, mesh, microbatches):
    step, state, batch = programs.NAMED[name](8)
    cf.testing.check(cf.accumulate(cf.shard(step, MESHES[mesh]), microbatches), state, batch)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_two_arguments_are_named_by_a_tuple_or_one_follows(reduction):
    step, state, (x, y) = regression(reduction)
    # y is read with x, so it is sliced where x is split
    accumulated = cf.accumulate(step, microbatches=4, batch="x")
    cf.testing.check(accumulated, state, x, y)
    assert len(loops(accumulated.lower(state, x, y).program)) == 1


def test_mean_of_means_would_be_wrong():
    """The labels of `embedding_loss` are spread unevenly; what a loop by hand gives differs by more than any tolerance."""
    step, state, batch = programs.embedding_loss(8)
    _, loss = cf.accumulate(step, microbatches=4)(state, batch)
    by_hand = sum(float(step(state, {k: v[i : i + 2] for k, v in batch.items()})[1]) for i in range(0, 8, 2)) / 4
    whole = float(step(state, batch)[1])
    assert abs(float(loss) - whole) < 1e-12 < 1e-4 < abs(by_hand - whole)


def test_dropout_draws_the_same_numbers_bit_for_bit():
    torch.manual_seed(0)
    x = torch.randn(8, 6, dtype=torch.float64)

    def step(w, x):
        return w, F.dropout(x, 0.5, True)

    with cf.random(7):
        whole = cf.shard(step, cf.Mesh())(torch.zeros(1), x)[1].full()
    for mesh in MESHES.values():
        with cf.random(7):
            assert torch.equal(cf.accumulate(cf.shard(step, mesh), 2)(torch.zeros(1), x)[1].full(), whole)


@pytest.mark.parametrize(
    ("mesh", "family"),
    [
        ("dp tp", "gpt2"),
        ("one", "llama"),
        pytest.param("one", "gpt2", marks=pytest.mark.sweep),
        pytest.param("dp tp", "llama", marks=pytest.mark.sweep),
    ],
)
def test_language_models_with_uneven_labels(mesh, family):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = dict(vocab_size=32, bos_token_id=0, eos_token_id=0)
    if family == "gpt2":
        config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, n_positions=16, **small)  # with dropout
        make = transformers.GPT2LMHeadModel
    else:
        sizes = dict(num_hidden_layers=1, hidden_size=16, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1)
        config = transformers.LlamaConfig(**sizes, max_position_embeddings=16, **small)
        make = transformers.LlamaForCausalLM
    labels = (ids := torch.randint(0, 32, (8, 8))).clone()
    labels[0, 2:], labels[5, 1:] = -100, -100
    with cf.testing.float64():
        model = cf.functional(make(config).double().train())
        step, state = cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=1e-2), clip=0.5)
        batch = {"input_ids": ids, "labels": labels}
        cf.testing.check(cf.accumulate(cf.shard(step, MESHES[mesh]), 4), state, batch)


def test_sharded_state_is_gathered_and_reduced_once():
    """ZeRO's layouts: no gather of a parameter and no reduction of a gradient is repeated by the loop."""
    step, state, batch = programs.mlp(1024)  # rows enough to pay for reducing gradients
    sharded = cf.shard(step, MESHES["dp"], lambda name, shape: "(dp a) ..." if shape else None, in_specs=(None, "(dp b) ..."))
    cf.testing.check(cf.accumulate(sharded, 4), state, batch)
    program = cf.accumulate(sharded, 4).lower(state, batch).program
    body = [node.target for loop in loops(program) for node in loop.body.nodes]
    assert "colofunc.reduce_scatter" in [n.target for n in program.nodes]
    assert not {"colofunc.reduce_scatter", "colofunc.all_gather"} & set(body)


def test_outputs_of_each_sample_are_put_together():
    _, state, (x, y) = regression()

    def evaluate(state, batch):
        out = torch.tanh(batch["x"] @ state["w"] + state["b"])
        return out, (out - batch["y"]).abs().amax(), ((out - batch["y"]) ** 2).sum(1)

    for mesh in MESHES.values():
        cf.testing.check(cf.accumulate(cf.shard(evaluate, mesh), 2), state, {"x": x, "y": y})
    (loop,) = loops(cf.accumulate(evaluate, 2).lower(state, {"x": x, "y": y}).program)
    assert sorted(loop.gathers) == ["max", "stack", "stack"]


def test_statistics_of_the_inputs_are_exact():
    """What only the batch's own rows are needed for runs in a loop before; it costs no second forward."""
    torch.manual_seed(0)

    def step(w, x):
        normal = (x - x.mean(0)) / x.std(0)
        return w - 0.1 * cf.value_and_grad(lambda w: (normal @ w).square().mean())(w)[1]

    w, x = torch.randn(4, 3, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    accumulated = cf.accumulate(step, 4)
    cf.testing.check(accumulated, w, x)
    assert len(loops(accumulated.lower(w, x).program)) > 1


def test_one_element_of_each_row():
    """`h[arange(b), last]`, as sequence classifiers pick their last token."""
    torch.manual_seed(0)

    def step(w, batch):
        def loss_of(w):
            h = torch.tanh(batch["x"] @ w)
            return F.cross_entropy(h[torch.arange(len(h)), batch["length"] - 1], batch["y"])

        loss, grad = cf.value_and_grad(loss_of)(w)
        return w - grad, loss

    batch = {"x": torch.randn(8, 4, 6).double(), "length": torch.randint(1, 5, (8,)), "y": torch.randint(0, 5, (8,))}
    cf.testing.check(cf.accumulate(step, 4), torch.randn(6, 5, dtype=torch.float64), batch)


# ---- bad input ----


def test_microbatches_have_to_divide_the_rows():
    step, state, batch = programs.mlp(12)
    with pytest.raises(PlanError, match=r"5 microbatches do not divide the 12 rows of 'batch.x'; use one of 1, 2, 3, 4, 6, 12"):
        cf.accumulate(step, 5).lower(state, batch)
    with pytest.raises(PlanError, match=r"4 microbatches that divide the rows of a rank \(cf.pad\(batch, multiple=1, rows=4 \* ranks"):
        cf.accumulate(cf.shard(step, MESHES["dp"], in_specs=(None, "(dp b) ...")), 4).lower(state, batch)


def test_arguments_are_checked():
    step, state, batch = programs.mlp()
    with pytest.raises(PlanError, match="microbatches=0 is no whole number above 0"):
        cf.accumulate(step, 0)
    with pytest.raises(PlanError, match="unknown mixing 'per-batch'; did you mean 'per-microbatch'"):
        cf.accumulate(step, 2, mixing="per-batch")
    with pytest.raises(InputError, match="batch='bach' names no argument; did you mean 'batch'"):
        cf.accumulate(step, 2, batch="bach").lower(state, batch)
    with pytest.raises(InputError, match="has no tensor with a dim 0 to split"):
        cf.accumulate(lambda w, s: w * s, 2).lower(torch.ones(3), torch.tensor(2.0))


def test_leaves_of_another_leading_size_stay_whole():
    """A table, a scale: whatever has not as many rows as most leaves is the same for all microbatches."""
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 4), "y": torch.randn(8, 4), "scale": torch.tensor(2.0), "table": torch.randn(1, 4)}

    def step(w, batch):
        return w - ((batch["x"] * batch["scale"] + batch["table"] - batch["y"]) @ w).mean(0)

    doubles = {k: v.double() for k, v in batch.items()}
    cf.testing.check(cf.accumulate(step, 4), torch.randn(4, 4, dtype=torch.float64), doubles)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_every_reduction_of_a_loss_with_ignored_labels_runs_in_one_loop(reduction):
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 4, dtype=torch.float64), "y": torch.tensor([0, -100, 2, -100, -100, 3, 1, 0])}

    def step(w, batch):
        def loss_of(w):
            return F.cross_entropy(batch["x"] @ w, batch["y"], reduction=reduction).sum() / 7

        return w - cf.value_and_grad(loss_of)(w)[1]

    staged = cf.accumulate(cf.shard(step, MESHES["dp"]), 2)
    cf.testing.check(staged, torch.randn(4, 5, dtype=torch.float64), batch)


# ---- any program ----


def test_few_rows_stay_where_they_are():
    """Six microbatches of one row a rank: a plan that moves rows between dp and tp is made again with rows on one of them."""
    torch.manual_seed(0)

    def step(w, batch):
        def loss_of(w):
            h = torch.tanh(batch["x"] @ w).cumsum(1)
            return (h.sum(1) * batch["i"]).sum() / batch["i"].sum()

        loss, grad = cf.value_and_grad(loss_of)(w)
        return w - grad, loss

    batch = {"x": torch.randn(12, 6, dtype=torch.float64), "i": torch.randint(1, 6, (12,))}
    cf.testing.check(cf.accumulate(cf.shard(step, MESHES["dp tp"]), 6), torch.randn(6, 6, dtype=torch.float64), batch)


# Layers of (b, 6) -> (b, 6) that do not mix rows; `t` is a table of the state, `i` the batch's own integers.
LAYERS = {
    "linear": lambda h, w, t, i: torch.tanh(h @ w),
    "softmax": lambda h, w, t, i: torch.softmax(h, 1) * w.sum(0),
    "embedding": lambda h, w, t, i: h + F.embedding(i, t),
    "norm": lambda h, w, t, i: F.layer_norm(h, (6,), w[0], w[1]),
    "heads": lambda h, w, t, i: torch.einsum("bhd,hde->bhe", h.view(-1, 2, 3), w.view(4, 3, 3)[:2]).reshape(-1, 6),
    "rows of rows": lambda h, w, t, i: (h.unsqueeze(1) + t[:2]).flatten(0, 1).sin().unflatten(0, (-1, 2)).prod(1),
    "cumsum": lambda h, w, t, i: h.cumsum(1) / 6,
    "mask": lambda h, w, t, i: torch.where((i > 1).unsqueeze(1), h, w.mean()),
    "dropout": lambda h, w, t, i: F.dropout(h, 0.3, True),
    "inputs' mean": lambda h, w, t, i: h - i.double().mean() * w.diagonal(),
    "sorted": lambda h, w, t, i: h.sort(1).values.flip(1),
    "convolution": lambda h, w, t, i: F.conv1d(h.unsqueeze(1), w[:1, :3].unsqueeze(1), padding=1).squeeze(1),
}
LOSSES = {
    "mean": lambda h, i: h.square().mean(),
    "sum": lambda h, i: h.square().sum(),
    "labels": lambda h, i: F.cross_entropy(h, torch.where(i > 3, -100, i)),
    "weighted": lambda h, i: (h.sum(1) * i).sum() / i.sum(),
    "two": lambda h, i: h.mean() + (h[:, 0] * (i == 2)).sum() / (i == 2).sum(),
}


@settings(max_examples=18)
@given(
    st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=4),
    st.sampled_from(sorted(LOSSES)),
    st.sampled_from([2, 3, 4, 6]),
    st.sampled_from(["one", "dp", "dp tp"]),
)
def test_any_program_gives_the_numbers_of_the_whole_batch(layers, loss, microbatches, mesh):
    torch.manual_seed(0)
    state = {"t": torch.randn(6, 6, dtype=torch.float64)}
    state |= {f"w{k}": torch.randn(6, 6, dtype=torch.float64) for k in range(len(layers))}
    batch = {"x": torch.randn(12, 6, dtype=torch.float64), "i": torch.randint(0, 6, (12,))}

    def step(state, batch):
        def loss_of(params):
            h = batch["x"]
            for k, layer in enumerate(layers):
                h = LAYERS[layer](h, params[f"w{k}"], params["t"], batch["i"])
            return LOSSES[loss](h, batch["i"]), h

        (value, h), grads = cf.value_and_grad(loss_of, has_aux=True)(state)
        return {k: v - 0.01 * grads[k] for k, v in state.items()}, value, h

    if mesh != "one" and microbatches == 4:
        microbatches = 3  # of the six rows that a rank has
    cf.testing.check(cf.accumulate(cf.shard(step, MESHES[mesh]), microbatches), state, batch)


def test_a_batch_without_rows() -> None:
    """It comes in as many microbatches as are asked for, each of them empty."""

    def step(state, batch):
        loss = (batch * state).sum() + state
        return state - 0.1 * loss, loss

    given = torch.ones((), dtype=torch.float64), torch.ones(0, dtype=torch.float64)
    for mesh in (cf.Mesh(dp=2), cf.Mesh(cp=3, tp=2)):
        out = cf.accumulate(cf.shard(step, mesh), microbatches=2)(*given)
        cf.testing.compare(out, step(*given))


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_the_batch_is_known_by_its_role_wherever_it_stands(order: tuple[int, ...]) -> None:
    """Targets behind rows stay whole unless batch= names them, so that here one argument has both."""
    model, opt = cf.functional(models.Mlp(8, 16).double()), cf.adapt(torch.optim.SGD, lr=0.1, momentum=0.9)

    def step(*given):
        params, moments, rows = (given[order.index(k)] for k in range(3))
        loss, grads = cf.value_and_grad(lambda p: (model.apply(p, {}, rows["x"])[0] - rows["y"]).square().mean())(params)
        return loss, *opt.update(grads, moments, params)

    x, y = torch.randn(2, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    parts = [model.params, opt.init(model.params), {"x": x, "y": y}]
    args = [parts[k] for k in order]
    want, _, _ = step(*args)
    accumulated = cf.accumulate(cf.shard(step, cf.Mesh(dp=2)), microbatches=2)
    torch.testing.assert_close(accumulated(*args)[0].full(), want)
    assert any("loop" in node.target for node in accumulated.lower(*args).program.nodes)


def test_a_step_without_rows_of_a_batch_is_asked_to_name_it() -> None:
    model = cf.functional(models.Mlp(8, 16).double())

    def step(params, scale):
        return cf.value_and_grad(lambda p: sum(value.square().sum() for value in p.values()) * scale)(params)

    said = "no argument of the step has rows of the batch, by the roles of its leaves. Try: batch= one of 'params', 'scale'"
    with pytest.raises(InputError, match=said):
        cf.accumulate(step, 2).lower(model.params, torch.tensor(2.0, dtype=torch.float64))
