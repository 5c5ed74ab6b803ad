"""cf.pad: few lengths, the losses of the batch as it was."""

import pytest
import torch
from colofunc_plugins import zero
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    BatchEncoding,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    T5Config,
)

import colofunc as cf
from colofunc.errors import InputError

WIDTH = dict(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
OFF = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
CONFIGS = {
    "llama": (AutoModelForCausalLM, LlamaConfig(**WIDTH)),
    "gpt2": (AutoModelForCausalLM, GPT2Config(vocab_size=50, n_positions=64, n_embd=16, n_layer=2, n_head=2)),
    "bert": (AutoModelForMaskedLM, BertConfig(**WIDTH, **OFF, max_position_embeddings=64)),
    "t5": (
        AutoModelForSeq2SeqLM,
        T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0),
    ),
}


def make(name, attention="sdpa"):
    torch.manual_seed(0)
    cls, config = CONFIGS[name]
    return cls.from_config(config, attn_implementation=attention).double().eval()


def batch_of(name, rows=3, length=7):
    ids = torch.randint(1, 50, (rows, length), generator=torch.Generator().manual_seed(1))
    labels = ids[:, :5].clone() if name == "t5" else ids.clone()
    labels[0, :2] = -100
    return {"input_ids": ids, "labels": labels}


def losses(model, batch):
    with cf.testing.float64():
        loss = model(**batch).loss
    model.zero_grad()
    loss.backward()
    return [float(loss.detach()), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CONFIGS)
def test_losses_and_gradients_are_those_of_the_batch_as_it_was(name, attention):
    """Lengthened sequences, and rows without weight, in float64."""
    model, batch = make(name, attention), batch_of(name)
    want = losses(model, batch)
    padded = cf.pad(batch, 16)
    assert padded["input_ids"].shape == padded["labels"].shape == padded["attention_mask"].shape == (3, 16)
    torch.testing.assert_close(losses(model, padded), want, atol=1e-10, rtol=0)
    (filled,) = cf.batches([batch], cf.Mesh(dp=2), multiple=16)
    whole = {k: v.full() for k, v in filled.items()}
    assert whole["labels"].shape == (4, 16) and (whole["labels"][3] == -100).all() and (whole["attention_mask"][3] == 0).all()
    torch.testing.assert_close(losses(model, whole), want, atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_short_padded_batch_in_a_sharded_step(name):
    module, batch = make(name), batch_of(name)
    want = losses(module, batch)[0]
    model = cf.functional(module)
    step = cf.shard(lambda p, b: model.apply(p, model.buffers, **b)[0].loss, cf.Mesh(dp=2))
    (filled,) = cf.batches([batch], cf.Mesh(dp=2), multiple=8)
    with cf.testing.float64():
        got = float(step(model.params, filled))
    assert abs(got - want) <= 1e-10 * max(1.0, abs(want))



@pytest.mark.parametrize(("stage", "rows", "microbatches"), [(1, 3, 4), (3, 5, 2), (3, 7, 3)])
def test_padded_rows_divide_into_microbatches_and_change_no_mean(stage, rows, microbatches):
    mesh, module = cf.Mesh(dp=2), make("gpt2")
    step_fn, state = cf.train_step(cf.functional(module), cf.adapt(torch.optim.SGD, lr=0.1))
    ids = torch.randint(1, 50, (rows, 6), generator=torch.Generator().manual_seed(rows))
    batch = {"input_ids": ids, "labels": ids.masked_fill(ids % 5 == 0, -100)}
    with cf.testing.float64():
        (after, metrics), step = step_fn(state, batch), cf.accumulate(cf.shard(step_fn, mesh, zero(stage, "dp")), microbatches)
        with pytest.raises(cf.PlanError, match=r"cf.pad\(batch, multiple=1, rows="):
            step.lower(state, batch)
        padded = cf.pad(batch, 1, rows=2 * microbatches)
        placed, got = step(step.init(state, padded), padded)
    torch.testing.assert_close(float(got["loss"]), float(metrics["loss"]), atol=1e-10, rtol=0)
    torch.testing.assert_close({k: v.full() for k, v in placed["params"].items()}, after["params"], atol=1e-10, rtol=0)


def test_rows_that_nothing_switches_off_are_not_added():
    batch = {"x": torch.randn(6, 3), "y": torch.randn(6)}
    with pytest.raises(InputError, match=r"rows=4 adds 2 rows to the 6 of this batch, and none of x, y tells a loss to leave them out"):
        cf.pad(batch, 1, rows=4)
    padded = cf.pad(batch, 1, rows=4, fill={"y": -1})
    assert padded["x"].shape == (8, 3) and padded["y"][6:].tolist() == [-1, -1]
    assert cf.pad(batch, 1, rows=3)["x"].shape == (6, 3)
    with pytest.raises(InputError, match="multiple=1, rows=0; give 1 or more"):
        cf.pad(batch, 1, rows=0)


def test_lengths_that_change_are_traced_once_per_padded_length(capfd):
    step = cf.shard(lambda b: b["labels"].sum() + b["input_ids"].sum(), cf.Mesh(dp=2))
    for length in (5, 9, 16, 17, 30, 3):
        ids = torch.ones(2, length, dtype=torch.int64)
        step(cf.pad({"input_ids": ids, "labels": ids}, 16))
    said = [line for line in capfd.readouterr().err.splitlines() if "traced again" in line]
    assert len(said) == 1 and "traced again for b.input_ids: (2, 16) -> (2, 32) (and 2 more). Every new shape" in said[0]


def test_lengths_of_all_kinds_are_told_once_in_the_names_of_the_plan(capfd):
    step = cf.shard(lambda state, batch: (state, (batch["x"] * state["w"]).sum()), cf.Mesh(dp=2))
    for length in range(2, 8):
        step({"w": torch.ones(())}, {"x": torch.ones(2, length)})
    said = [line for line in capfd.readouterr().err.splitlines() if "traced again" in line]
    assert len(said) == 1 and "for batch.x: (2, 2) -> (2, 3)." in said[0] and "cf.batches(..., multiple=64)" in said[0]
    low = step.lower({"w": torch.ones(())}, {"x": torch.ones(2, 3)})
    assert "batch.x" in {leaf.name for leaf in low.plan.inputs}


def test_one_rank_tells_of_a_retrace(capfd, monkeypatch):
    step = cf.shard(lambda x: x * 2, cf.Mesh(dp=2))
    monkeypatch.setattr(cf.Mesh, "is_main", property(lambda mesh: False))
    for length in (2, 4):
        step(torch.ones(length))
    assert "traced again" not in capfd.readouterr().err


def test_a_retrace_says_what_differs(capfd):
    step = cf.shard(lambda b: {k: v * 2 for k, v in b.items()}, cf.Mesh())
    x, n = torch.ones(4), torch.ones(4, dtype=torch.int64)
    for batch in ({"x": x}, {"x": x.double()}, {"x": x.double(), "n": n}, {"n": n}):
        step(batch)
    with cf.testing.float64():
        step({"n": n})
    said = [line.partition("traced again for ")[2] for line in capfd.readouterr().err.splitlines() if "traced again" in line]
    assert said == [
        "b.x: float32 -> float64",
        "its arguments' structure: 'b.n' is new",
        "its arguments' structure: 'b.x' is gone",
        "the default dtype: float32 -> float64",
    ]


def test_a_retrace_with_fewer_arguments_says_which_are_gone(capfd):
    step = cf.shard(lambda x, *more: sum((m.sum() for m in more), x.sum()), cf.Mesh())
    for many in (1, 3, 2, 1):
        assert step(*[torch.ones(3)] * many).full() == 3 * many
    said = [line.partition("traced again for ")[2] for line in capfd.readouterr().err.splitlines() if "traced again" in line]
    assert said == [f"its arguments' structure: 'more.{k}' is {what}" for k, what in ((0, "new"), (1, "gone"))]


def test_values_by_key():
    ids = torch.ones(2, 3, dtype=torch.int64)
    batch = {
        "input_ids": ids, "token_type_ids": ids, "position_ids": ids, "special_tokens_mask": ids, "labels": ids, "score": ids.float(),
        "mine": ids, "kind": torch.ones(2), "name": "x",
    }  # fmt: skip
    got = cf.pad(batch, 4, pad_id=9, ignore_index=-1, fill={"mine": 7, "token_*": 3, "position_ids": None})
    ends = {k: got[k][0, 3:].tolist() for k in ("input_ids", "token_type_ids", "special_tokens_mask", "labels", "mine", "attention_mask")}
    assert ends == {
        "input_ids": [9], "token_type_ids": [3], "special_tokens_mask": [1], "labels": [-1], "mine": [7], "attention_mask": [0],
    }  # fmt: skip
    assert got["position_ids"].shape == got["score"].shape == (2, 3) and got["name"] == "x"
    encoding = cf.pad(BatchEncoding({"input_ids": ids.numpy()}), 4)
    assert isinstance(encoding, BatchEncoding) and encoding["input_ids"].shape == (2, 4)


def test_what_is_no_sequence_stays():
    targets = {"input_ids": torch.ones(2, 3, dtype=torch.int64), "labels": torch.rand(2, 5)}
    assert cf.pad(targets, 8)["labels"] is targets["labels"]
    assert cf.pad({"labels": torch.ones(4, dtype=torch.int64)}, 8)["labels"].shape == (4,)


def test_what_cannot_be_padded():
    ids = torch.ones(2, 3, dtype=torch.int64)
    with pytest.raises(InputError, match="multiple=0"):
        cf.pad({"input_ids": ids}, 0)
    with pytest.raises(InputError, match=r"is no \(rows, length\) mask"):
        cf.pad({"input_ids": ids, "attention_mask": torch.ones(2, 1, 3, 3)}, 4)
    with pytest.raises(InputError, match="is on a mesh already"):
        cf.pad({"input_ids": cf.distribute(ids, "(dp b) s", cf.Mesh(dp=2)), "attention_mask": ids}, 4)


BATCHES = {
    "tensor": (lambda x, y: x, lambda batch: (batch[0].sum(1), batch[-1])),
    "pair": (lambda x, y: (x, y), lambda batch: (batch[0].sum(1) - batch[1], batch[-1])),
    "dict": (lambda x, y: {"x": x, "y": y}, lambda batch: (batch["x"].sum(1) - batch["y"], batch["weight"])),
}


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("rows", [5, 8])
def test_a_mean_by_hand_over_rows_that_do_not_divide(kind, rows):
    """Two microbatches on two ranks under zero, what the refusal says, against the mean over the batch as it was."""
    make_batch, split = BATCHES[kind]
    batch = make_batch(torch.randn(rows, 3, dtype=torch.float64), torch.randn(rows, dtype=torch.float64))

    def step_fn(state, batch):
        w = state["w"].detach().requires_grad_()
        errors, weight = split(batch)
        loss = ((errors * w.sum()) ** 2 * weight).sum() / weight.sum()
        return {"w": state["w"] - 0.1 * torch.autograd.grad(loss, w)[0]}, loss.detach()

    state = {"w": torch.ones(4, dtype=torch.float64)}
    ones = torch.ones(rows, dtype=torch.float64)
    whole = (batch, ones) if kind == "tensor" else (*batch, ones) if kind == "pair" else {**batch, "weight": ones}
    want = step_fn(state, whole)
    step = cf.shard(cf.accumulate(step_fn, microbatches=2), cf.Mesh(dp=2), zero(1, "dp"))
    padded = cf.pad(batch, multiple=1, rows=4, weights="weight")
    new, loss = step(state, padded)
    torch.testing.assert_close(loss.full(), want[1], atol=1e-12, rtol=0)
    torch.testing.assert_close(new["w"].full(), want[0]["w"], atol=1e-12, rtol=0)


def test_weights_that_cannot_be_added():
    with pytest.raises(cf.InputError, match="weights='x': the batch has a leaf of that name"):
        cf.pad({"x": torch.ones(3, 2)}, rows=4, weights="x")
    with pytest.raises(cf.InputError, match=r"none of x tells a loss to leave them out. Try: fill=.*weights='weight' and a loss"):
        cf.pad({"x": torch.ones(3, 2)}, rows=4)
