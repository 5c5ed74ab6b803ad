"""Adapters of `cf.lora` in files: merged, and in peft's format; read by transformers and peft, against what was trained."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from colofunc_plugins import zero
from safetensors.torch import load_file
from torch import nn

import colofunc as cf
from colofunc.errors import CheckpointError, InputError
from colofunc.testing.models import Mlp

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")


def llama() -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32}
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))  # type: ignore[no-any-return]


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 32, "n_positions": 16}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False)
    return transformers.GPT2LMHeadModel(config)  # type: ignore[no-any-return]


def tokens() -> torch.Tensor:
    return torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(1))


def with_values(model: cf.Model) -> cf.Model:
    """All adapters, those of an earlier call too, with values that count."""
    draw = torch.Generator().manual_seed(3)

    def drawn(group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: torch.randn(x.shape, generator=draw) * 0.2 if "lora_" in name else x for name, x in group.items()}

    return attrs.evolve(model, params=drawn(model.params), frozen=drawn(model.frozen))


def logits(model: cf.Model) -> torch.Tensor:
    out, _ = model.eval().apply(model.params, model.buffers, input_ids=tokens())
    return out.logits  # type: ignore[no-any-return]


def twice(model: cf.Model) -> cf.Model:
    return cf.lora(cf.lora(model, "*.q_proj", rank=2, alpha=6), "*.0.*.up_proj", rank=3, alpha=4, dropout=0.1)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[cf.Model], cf.Model]]] = {
    "by-last-names": (llama, lambda model: cf.lora(model, ("*.q_proj", "*.v_proj"), rank=2)),
    "some-layers": (llama, lambda model: cf.lora(model, "*.1.self_attn.q_proj", rank=2)),
    "two-calls": (llama, twice),
    "transposed": (gpt2, lambda model: cf.lora(model, "*.c_attn", rank=2)),
    "both-kinds-of-layer": (gpt2, lambda model: cf.lora(model, ("*.c_fc", "lm_head"), rank=2)),
}


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_adapters_are_read_back_merged_and_by_peft(tmp_path: Path, case: str) -> None:
    build, adapt = CASES[case]
    model = with_values(adapt(cf.functional(build())))
    want = logits(model)
    cf.save_pretrained(model, None, tmp_path / "merged")
    whole, report = type(build()).from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not report["unexpected_keys"] and not report["missing_keys"]
    torch.testing.assert_close(whole.eval()(input_ids=tokens()).logits, want)
    cf.save_pretrained(model, None, tmp_path / "alone", adapters="peft")
    assert sorted(os.listdir(tmp_path / "alone")) == ["adapter_config.json", "adapter_model.safetensors", "colofunc.json"]
    wrapped = peft.PeftModel.from_pretrained(build(), tmp_path / "alone").eval()
    torch.testing.assert_close(wrapped(input_ids=tokens()).logits, want)


class Nested(nn.Module):
    """A layer at the top whose name is the end of another path."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.deep = nn.ModuleDict({"fc": inner, "up": nn.Linear(4, 4)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) + self.deep["up"](self.deep["fc"](x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("inner", [nn.Linear(4, 4), nn.LayerNorm(4)])
@torch.no_grad()
def test_peft_finds_the_layers_that_were_meant(tmp_path: Path, inner: nn.Module) -> None:
    module = Nested(inner)
    model = with_values(cf.lora(cf.lora(cf.functional(module), "fc", rank=3, alpha=4), "up", rank=2, alpha=9))
    cf.save_pretrained(model, None, tmp_path, adapters="peft")
    x = torch.randn(3, 4)
    wrapped = peft.PeftModel.from_pretrained(module, tmp_path)
    torch.testing.assert_close(wrapped(x), model.apply(model.params, {}, x)[0])


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "bf16": lambda step: cf.precision(step, "bf16"),
    "fp16": lambda step: cf.precision(step, "fp16"),
    "microbatches": lambda step: cf.accumulate(step, microbatches=2),
    "host": lambda step: cf.offload(step, policy="host"),
    "all": lambda step: cf.offload(cf.accumulate(cf.precision(step, "fp16"), microbatches=2), policy="host"),
}


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_what_a_wrapped_step_trained_is_what_is_read(tmp_path: Path, wrapper: str, adapted: bool) -> None:
    """Masters, loss scales, tiers and shards are states of the step; none of it is lost or left in the files."""
    torch.manual_seed(0)
    model = cf.functional(Mlp(16, 32))
    model = cf.lora(model, "fc1", rank=2) if adapted else model
    step_fn, state = cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=0.1), loss=lambda out: (out**2).mean())
    step = cf.shard(WRAPPERS[wrapper](step_fn), cf.Mesh(dp=2), zero(3, "dp"))
    batch = torch.randn(8, 16)
    for _ in range(2):
        state, _ = step(state, batch)
    cf.save_pretrained(model, state, tmp_path)
    again = Mlp(16, 32)
    again.load_state_dict(load_file(tmp_path / "model.safetensors"))
    params = {name: x.full() for name, x in state["params"].items()}
    torch.testing.assert_close(again(batch), model.apply(params, {}, batch)[0])
    assert not torch.equal(again.fc1.weight, model.plain.fc1.weight)  # it was trained


@pytest.mark.parametrize("shard_bytes", [2_000, 1_000_000])
@pytest.mark.parametrize("order", [("merged", "peft"), ("peft", "merged")])
def test_merged_weights_and_their_adapters_lie_in_two_folders(tmp_path: Path, order: tuple[str, str], shard_bytes: int) -> None:
    """transformers would add the adapters of a folder to weights that have them already."""
    model = with_values(cf.lora(cf.functional(llama()), "*.q_proj", rank=2))
    cf.save_pretrained(model, None, tmp_path / "a", adapters=order[0], shard_bytes=shard_bytes)
    before = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    for overwrite in (False, True):
        with pytest.raises(CheckpointError, match=r"holds (adapters|a whole model).*Try: another folder"):
            cf.save_pretrained(model, None, tmp_path / "a", adapters=order[1], shard_bytes=shard_bytes, overwrite=overwrite)
    assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()} == before
    cf.save_pretrained(model, None, tmp_path / "a", adapters=order[0])  # the same kind is replaced


def test_adapters_may_lie_beside_a_base_that_somebody_else_wrote(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    model = with_values(cf.lora(cf.functional(llama()), "*.q_proj", rank=2))
    for _ in range(2):
        cf.save_pretrained(model, None, tmp_path, adapters="peft")
    read = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(read(input_ids=tokens()).logits, logits(model))


def test_adapters_of_peft_leave_the_base_where_it_is(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    wrapped = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    cf.save_pretrained(cf.functional(wrapped), None, tmp_path)
    assert {"model.safetensors", "adapter_model.safetensors"} <= set(os.listdir(tmp_path))


def test_what_no_file_can_hold() -> None:
    plain = cf.functional(Mlp())
    with pytest.raises(InputError, match="adapters='peft', and the model has none"):
        cf.save_pretrained(plain, None, "unused", adapters="peft")
    with pytest.raises(InputError, match="adapters='pfet'; 'merged' or 'peft'"):
        cf.save_pretrained(plain, None, "unused", adapters="pfet")
    wrapped = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    both = cf.lora(cf.functional(wrapped), "*.up_proj", rank=2)
    with pytest.raises(InputError, match=r"has adapters of peft, and no file holds both.*merge_and_unload"):
        cf.save_pretrained(both, None, "unused")
