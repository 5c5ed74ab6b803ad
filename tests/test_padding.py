"""cf.pad: few lengths, the losses of the batch as it was."""

import pytest
import torch
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


def test_lengths_that_change_are_traced_once_per_padded_length(capfd):
    step = cf.shard(lambda b: b["labels"].sum() + b["input_ids"].sum(), cf.Mesh(dp=2))
    for length in (5, 9, 16, 17, 30, 3):
        ids = torch.ones(2, length, dtype=torch.int64)
        step(cf.pad({"input_ids": ids, "labels": ids}, 16))
    said = [line for line in capfd.readouterr().err.splitlines() if "traced again" in line]
    assert len(said) == 1 and "argument 0.input_ids: (2, 16) -> (2, 32)" in said[0]


def test_a_retrace_says_what_differs(capfd):
    step = cf.shard(lambda b: {k: v * 2 for k, v in b.items()}, cf.Mesh())
    x, n = torch.ones(4), torch.ones(4, dtype=torch.int64)
    for batch in ({"x": x}, {"x": x.double()}, {"x": x.double(), "n": n}, {"n": n}):
        step(batch)
    with cf.testing.float64():
        step({"n": n})
    said = [line.partition("traced again for ")[2] for line in capfd.readouterr().err.splitlines() if "traced again" in line]
    assert said == [
        "argument 0.x: float32 -> float64",
        "its arguments' structure: '0.n' is new",
        "its arguments' structure: '0.x' is gone",
        "the default dtype: float32 -> float64",
    ]


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
