"""Folders of Hugging Face models: loaded straight into shards, saved so that transformers loads them."""

import glob
import importlib
import json
import os

import pytest
import torch
import transformers as tr
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

import colofunc as cf
from colofunc.errors import CheckpointError, InputError
from colofunc.executors.launch import launch
from colofunc.functional.checkpoint import files
from colofunc.functional.checkpoint.disk import fetch
from colofunc.program.lazy import make, make_parts

SMALL = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=64, max_position_embeddings=32)
IMAGE = {k: SMALL[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
MODELS = {
    "gpt2": (
        tr.GPT2LMHeadModel,
        tr.GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0),
    ),
    "llama": (tr.LlamaForCausalLM, tr.LlamaConfig(**SMALL)),
    "bert": (tr.BertForMaskedLM, tr.BertConfig(**SMALL)),
    "t5": (
        tr.T5ForConditionalGeneration,
        tr.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0),
    ),
    "mixtral": (tr.MixtralForCausalLM, tr.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4)),
    "qwen3_moe": (
        tr.Qwen3MoeForCausalLM,
        tr.Qwen3MoeConfig(
            **SMALL, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
            bos_token_id=0, eos_token_id=1,
        ),
    ),
    "vit": (tr.ViTForImageClassification, tr.ViTConfig(**IMAGE, image_size=8, patch_size=4, num_labels=3)),
}  # fmt: skip
MESH = cf.Mesh(dp=2, tp=2)


def batch_for(name):
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 8, 8)}
    ids = torch.randint(2, 64, (2, 8))
    return {"input_ids": ids} | ({"decoder_input_ids": ids} if name == "t5" else {})


def saved(name, path):
    """A folder that transformers wrote; the class and configuration."""
    cls, config = MODELS[name]
    torch.manual_seed(3)
    cls(config).save_pretrained(path)
    return cls, config


def unbuilt(name):
    cls, config = MODELS[name]
    return cf.functional(cf.lazy(lambda: cls(config))).eval()


def values(group):
    return {name: x.full() if isinstance(x, cf.DTensor) else x + torch.zeros_like(x) for name, x in group.items()}


def stored_names(path):
    return {name for file in glob.glob(f"{path}/*.safetensors") for name in safe_open(file, "pt").keys()}  # noqa: SIM118


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_loaded_and_saved_it_computes_what_transformers_loads(tmp_path, name) -> None:
    cls, config = saved(name, tmp_path / "a")
    batch = batch_for(name)
    reference = cls.from_pretrained(tmp_path / "a").eval()
    want = reference(**batch).logits
    for mesh in (None, MESH):
        model = cf.load(tmp_path / "a", model=unbuilt(name), mesh=mesh)
        logits = cf.functional(cls(config).eval()).apply(values(model.params), values(model.buffers), **batch)[0].logits
        assert torch.equal(logits, want)
        held = dict(reference.named_parameters()) | dict(reference.named_buffers())
        assert all(torch.equal(x, held[n]) for n, x in (values(model.params) | values(model.buffers)).items())
    cf.save_pretrained(model, {"params": model.params, "buffers": model.buffers}, tmp_path / "b", shard_bytes=20_000)
    again = cls.from_pretrained(tmp_path / "b").eval()
    assert torch.equal(again(**batch).logits, want)
    assert stored_names(tmp_path / "b") == stored_names(tmp_path / "a")
    assert json.loads((tmp_path / "b" / "config.json").read_text())["architectures"] == [cls.__name__]


def test_experts_are_read_only_where_they_are_held(tmp_path, monkeypatch) -> None:
    saved("mixtral", tmp_path / "a")
    model = unbuilt("mixtral")
    read: list[int] = []
    monkeypatch.setattr(files, "fetch", lambda path, blocks, done: read.extend(len(to) for _, to in blocks) or fetch(path, blocks, done))
    got = cf.load(tmp_path / "a", model=model)  # nothing is read yet
    assert read == []
    x = got.params["model.layers.0.mlp.experts.gate_up_proj"]
    mesh = cf.Mesh(ep=4)
    part = make_parts(x, cf.Spec("(ep e) o i").bind(mesh, x.shape), mesh, [1])[0]
    assert sum(read) == part.nbytes and torch.equal(part, make(x)[1:2])


def test_frozen_weights_that_a_load_placed_are_taken_as_they_lie(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
    module[0].requires_grad_(False)
    cf.save_pretrained(cf.functional(module), None, tmp_path)
    losses, x, mesh = [], torch.randn(4, 8), cf.Mesh(dp=2)
    for options in ({}, {"mesh": mesh, "specs": {"0.weight": "(dp o) i"}}):
        model = cf.load(tmp_path, model=cf.functional(module), **options)
        step_fn, state = cf.train_step(model, cf.adapt(torch.optim.SGD, lr=0.1), loss=lambda out: (out**2).mean())
        losses.append(cf.shard(step_fn, mesh)(state, x)[1]["loss"].full())
    torch.testing.assert_close(*losses)


def test_a_lazy_model_is_placed_by_the_step(tmp_path) -> None:
    saved("llama", tmp_path / "a")
    model = cf.load(tmp_path / "a", model=unbuilt("llama").train())
    step_fn, state = cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=1e-2))
    ids = torch.randint(0, 64, (4, 8))
    batch = {"input_ids": ids, "labels": ids}
    step = cf.shard(step_fn, MESH)
    state = step.init(state, batch)
    reference = tr.LlamaForCausalLM.from_pretrained(tmp_path / "a")
    assert torch.equal(state["params"]["model.norm.weight"].full(), reference.model.norm.weight)
    _, metrics = step(state, batch)
    assert abs(float(metrics["loss"]) - float(reference(**batch).loss)) < 1e-5


def test_frozen_weights_and_a_trained_state(tmp_path) -> None:
    cls, config = saved("llama", tmp_path / "a")
    model = cf.load(tmp_path / "a", model=cf.functional(cls(config), trainable="*.mlp.*"), mesh=MESH)
    assert model.frozen and isinstance(next(iter(model.frozen.values())), cf.DTensor)
    state = {"params": {name: x * 2 for name, x in model.params.items()}, "buffers": model.buffers, "opt": {}}
    cf.save_pretrained(model, state, tmp_path / "b", dtype=torch.bfloat16)
    got, want = cls.from_pretrained(tmp_path / "b", dtype="auto"), cls.from_pretrained(tmp_path / "a")
    assert got.dtype == torch.bfloat16
    factor = {name: 2 if ".mlp." in name else 1 for name, _ in want.named_parameters()}
    both = zip(got.named_parameters(), want.parameters(), strict=True)
    assert all(torch.equal(x, (y * factor[n]).bfloat16()) for (n, x), y in both)


def test_tied_weights_are_saved_once(tmp_path) -> None:
    config = tr.LlamaConfig(**SMALL, tie_word_embeddings=True)
    model = cf.functional(tr.LlamaForCausalLM(config))
    cf.save_pretrained(model, None, tmp_path / "a")
    assert "lm_head.weight" not in stored_names(tmp_path / "a")
    got = tr.LlamaForCausalLM.from_pretrained(tmp_path / "a")
    assert got.lm_head.weight is got.model.embed_tokens.weight
    assert torch.equal(got.lm_head.weight, model.params["model.embed_tokens.weight"])


def test_other_modules_are_saved_under_their_own_names(tmp_path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    cf.save_pretrained(cf.functional(module), None, tmp_path / "a")
    found = load_file(tmp_path / "a" / "model.safetensors")
    other = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    other.load_state_dict(found)
    got = cf.load(tmp_path / "a", model=other, mesh=MESH, specs={"0.weight": "(dp o) i"})
    assert str(got.params["0.weight"].spec) == "(dp a) b" and torch.equal(got.params["0.weight"].full(), module[0].weight)
    flat = cf.load(tmp_path / "a")
    assert list(flat) == list(found) and torch.equal(flat["0.weight"], module[0].weight)


def test_files_of_others_stay_and_old_shards_go(tmp_path) -> None:
    model = cf.functional(MODELS["llama"][0](MODELS["llama"][1]))
    cf.save_pretrained(model, None, tmp_path / "a", shard_bytes=10_000)
    (tmp_path / "a" / "tokenizer.json").write_text("{}")
    assert len(glob.glob(f"{tmp_path}/a/model-*")) > 1
    cf.save_pretrained(model, None, tmp_path / "a")
    assert sorted(os.listdir(tmp_path / "a")) == [
        "colofunc.json", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"
    ]  # fmt: skip
    assert os.listdir(tmp_path) == ["a"]


def test_peft_adapters_are_saved_as_peft_does(tmp_path) -> None:
    peft = pytest.importorskip("peft")
    base = tr.LlamaForCausalLM(MODELS["llama"][1])
    module = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    cf.save_pretrained(cf.functional(module), None, tmp_path / "a")
    module.save_pretrained(tmp_path / "b")
    ours, theirs = (load_file(tmp_path / k / "adapter_model.safetensors") for k in "ab")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)
    assert (tmp_path / "a" / "adapter_config.json").exists()


@pytest.mark.parametrize("how", ["missing", "unexpected", "shape", "codes"])
def test_a_folder_that_does_not_fit(tmp_path, how) -> None:
    cls, config = saved("gpt2", tmp_path)
    path = tmp_path / "model.safetensors"
    found = load_file(path)
    if how == "missing":
        found.pop("transformer.ln_f.weight")
    elif how == "unexpected":
        found["transformer.ln_g.weight"] = torch.ones(2)
    elif how == "codes":
        found["transformer.ln_f.weight"] = torch.ones(16, dtype=torch.int8)
    else:
        found["transformer.ln_f.weight"] = torch.ones(2)
    save_file(found, path, metadata={"format": "pt"})
    said = {
        "missing": r"missing 'transformer\.ln_f\.weight'",
        "unexpected": r"unexpected 'transformer\.ln_g\.weight'",
        "shape": r"transformer\.ln_f\.weight is \(2,\) in the folder and \(16,\) in the model",
        "codes": r"transformer\.ln_f\.weight is int8 in the folder and float32 in the model; where another library has quantized it, take",
    }
    module = cls(config)
    with pytest.raises(CheckpointError, match=f"does not fit GPT2LMHeadModel: {said[how]}"):
        cf.load(tmp_path, model=module)
    if how in ("missing", "unexpected"):
        got = cf.load(tmp_path, model=module, strict=False)
        own = module.transformer.ln_f.weight if how == "missing" else found["transformer.ln_f.weight"]
        assert torch.equal(got.params["transformer.ln_f.weight"], own)


def test_pickles_are_refused(tmp_path) -> None:
    cls, config = MODELS["gpt2"]
    torch.save(cls(config).state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"holds its weights as a pickle, 'pytorch_model\.bin'.*save_pretrained\(other_folder\)"):
        cf.load(tmp_path, model=cls(config))


def test_wrong_arguments(tmp_path) -> None:
    module = torch.nn.Linear(2, 2)
    model = cf.functional(module)
    with pytest.raises(InputError, match="missing parameter 'bias'"):
        cf.save_pretrained(model, {"weight": torch.ones(2, 2)}, tmp_path / "a")
    with pytest.raises(InputError, match="unknown 'wieght'; did you mean 'weight'"):
        cf.save_pretrained(model, {**model.params, "wieght": 1}, tmp_path / "a")
    with pytest.raises(InputError, match="dtype='fp7'"):
        cf.save_pretrained(model, None, tmp_path / "a", dtype="fp7")
    cf.save_pretrained(model, None, tmp_path / "a")
    with pytest.raises(InputError, match=r"model=dict; give an nn\.Module"):
        cf.load(tmp_path / "a", model={})
    with pytest.raises(InputError, match="give mesh= too"):
        cf.load(tmp_path / "a", model=module, specs="(dp a) ...")


def on_ranks(path):
    cls, config = MODELS["mixtral"]
    mesh = cf.Mesh(ep=2)
    specs = {"*.experts.*_proj": "(ep e) o i", "*.q_proj.weight": "(ep o) i"}
    model = cf.load(f"{path}/a", model=cf.functional(cf.lazy(lambda: cls(config))), mesh=mesh, specs=specs)
    cf.save_pretrained(model, model.params, f"{path}/b", shard_bytes=20_000)
    return model.params["model.layers.1.mlp.experts.down_proj"].local


@pytest.mark.dist
def test_two_processes(tmp_path) -> None:
    cls, _ = saved("mixtral", tmp_path / "a")
    parts = launch(on_ranks, 2, str(tmp_path), timeout_s=180)
    want, got = (cls.from_pretrained(tmp_path / k) for k in "ab")
    assert torch.equal(torch.cat(parts), want.model.layers[1].mlp.experts.down_proj)
    assert all(torch.equal(x, y) for x, y in zip(got.parameters(), want.parameters(), strict=True))


@pytest.mark.parametrize("how", ["library", "late"])
def test_a_full_disk_leaves_the_weights_that_were_there(tmp_path, monkeypatch, how) -> None:
    """Errors of safetensors are no OSErrors; one after the first of several files must not leave old and new ones together."""
    torch.manual_seed(0)
    model = cf.functional(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
    ones = {name: torch.ones_like(x) for name, x in model.params.items()}
    cf.save_pretrained(model, ones, tmp_path / "m", shard_bytes=100)
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    module = importlib.import_module("colofunc.functional.save_pretrained")
    if how == "library":
        monkeypatch.setattr(module, "save_file", lambda *a, **k: (_ for _ in ()).throw(SafetensorError("No space left")))
    else:
        monkeypatch.setattr(module.Writing, "commit", lambda self: (_ for _ in ()).throw(OSError("No space left")))
    with pytest.raises(CheckpointError, match="No space left; the weights that were there are intact"):
        cf.save_pretrained(model, {name: x * 2 for name, x in ones.items()}, tmp_path / "m", shard_bytes=100)
    assert os.listdir(tmp_path) == ["m"] and len(list((tmp_path / "m").iterdir())) > 3
    assert all((x == 1).all() for x in cf.load(tmp_path / "m").values())
    monkeypatch.undo()
    cf.save_pretrained(model, {name: x * 2 for name, x in ones.items()}, tmp_path / "m")
    assert sorted(os.listdir(tmp_path / "m")) == ["colofunc.json", "model.safetensors", "tokenizer.json"] and os.listdir(tmp_path) == ["m"]
    assert all((x == 2).all() for x in cf.load(tmp_path / "m").values())


def test_into_the_working_directory(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = cf.functional(torch.nn.Linear(2, 2))
    for k in range(2):
        cf.save_pretrained(model, {name: torch.full_like(x, k) for name, x in model.params.items()}, ".", shard_bytes=16)
    assert all((x == 1).all() for x in cf.load(".").values()) and os.getcwd() == str(tmp_path)


@pytest.mark.parametrize("shard_bytes", [5_000_000_000, 2_000])
@torch.no_grad()
def test_modules_of_diffusers_are_read_back_by_diffusers(tmp_path, shard_bytes) -> None:
    diffusers = pytest.importorskip("diffusers")
    blocks = dict(down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"), block_out_channels=(4, 8))
    module = diffusers.UNet2DModel(sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, norm_num_groups=2, **blocks)
    model = cf.functional(module)
    values = {name: x + 0.1 for name, x in model.params.items()}
    cf.save_pretrained(model, values, tmp_path / "a", shard_bytes=shard_bytes)
    module.save_pretrained(tmp_path / "b")
    assert json.loads((tmp_path / "a/config.json").read_text()) == json.loads((tmp_path / "b/config.json").read_text())
    again = diffusers.UNet2DModel.from_pretrained(tmp_path / "a")
    assert all(torch.equal(x, values[name]) for name, x in again.named_parameters())
    x = torch.randn(2, 1, 8, 8)
    torch.testing.assert_close(again.eval()(x, 3).sample, model.eval().apply(values, model.buffers, x, 3)[0].sample)
    loaded = cf.load(tmp_path / "a", model=cf.functional(module))
    assert all(torch.equal(x, values[name]) for name, x in loaded.params.items())
