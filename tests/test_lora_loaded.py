"""Adapters read back into `cf.lora` models: what was saved, what peft saves, and every way in which they do not fit."""

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from colofunc_plugins import zero
from safetensors.torch import load_file, save_file
from torch import nn

import colofunc as cf
from colofunc.errors import CheckpointError
from colofunc.testing.models import Mlp

FILE, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def base(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Mlp(16, 32)


def adapted(rank: int = 2, alpha: float = 6.0, where: Any = ("fc1", "fc2"), module: nn.Module | None = None) -> cf.Model:
    return cf.lora(cf.functional(module or base()), where, rank=rank, alpha=alpha)


def with_values(model: cf.Model) -> cf.Model:
    draw = torch.Generator().manual_seed(3)
    return attrs.evolve(model, params={name: torch.randn(x.shape, generator=draw) for name, x in model.params.items()})


def saved(folder: Path, **config: Any) -> cf.Model:
    """A folder of adapters, its configuration changed."""
    model = with_values(adapted())
    cf.save_pretrained(model, None, folder, adapters="peft")
    content = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**content, **config}))
    return model


def output(model: cf.Model, x: torch.Tensor) -> torch.Tensor:
    return model.to_module()(x)  # type: ignore[no-any-return]


def test_what_was_saved_is_read_and_the_base_stays(tmp_path: Path) -> None:
    model = saved(tmp_path)
    back = cf.load(tmp_path, model=adapted())
    assert back.params.keys() == model.params.keys() and all(torch.equal(back.params[n], model.params[n]) for n in model.params)
    assert all(torch.equal(back.frozen[n], model.frozen[n]) for n in model.frozen)
    x = torch.randn(3, 16)
    assert torch.equal(output(back, x), output(model, x))


def test_two_calls_with_ranks_of_their_own_are_read(tmp_path: Path) -> None:
    def twice() -> cf.Model:
        return cf.lora(adapted(2, 6.0, "fc1"), "fc2", rank=3, alpha=4.5)

    model = with_values(twice())
    cf.save_pretrained(model, None, tmp_path, adapters="peft")
    back = cf.load(tmp_path, model=twice())
    names = [name for adapter in model.adapters for name in adapter.names]
    assert len(names) == 4
    for name in names:
        assert torch.equal({**back.params, **back.frozen}[name], {**model.params, **model.frozen}[name])


def test_they_go_on_training_on_a_mesh_as_where_they_were_made(tmp_path: Path) -> None:
    x, losses = torch.randn(8, 16), []
    for model in (saved(tmp_path), cf.load(tmp_path, model=adapted())):
        step_fn, state = cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=0.1), loss=lambda out: (out**2).mean())
        step = cf.shard(step_fn, cf.Mesh(dp=2), zero(3, "dp"))
        for _ in range(2):
            state, metrics = step(state, x)
        losses.append(metrics["loss"].full())
    torch.testing.assert_close(losses[0], losses[1])


def test_they_are_placed_on_a_mesh(tmp_path: Path) -> None:
    model = saved(tmp_path)
    back = cf.load(tmp_path, model=adapted(), mesh=cf.Mesh(dp=2), specs={"*.lora_A": "r (dp i)"})
    assert str(back.params["fc1.lora_A"].spec) == "a (dp b)"
    assert all(torch.equal(back.params[n].full(), model.params[n]) for n in model.params)


def test_adapters_beside_their_base_bring_both(tmp_path: Path) -> None:
    model = saved(tmp_path)
    save_file(base().state_dict(), tmp_path / "model.safetensors")
    back = cf.load(tmp_path, model=adapted(module=base(seed=1)))
    x = torch.randn(3, 16)
    torch.testing.assert_close(output(back, x), output(model, x))


def test_lazy_models_are_filled(tmp_path: Path) -> None:
    model = saved(tmp_path)
    back = cf.load(tmp_path, model=cf.lora(cf.functional(cf.lazy(base)), ("fc1", "fc2"), rank=2, alpha=6.0))
    assert all(torch.equal(torch.as_tensor(back.params[n]), model.params[n]) for n in model.params)


CALL = r"Try: cf.lora\(model, \['fc1', 'fc2'\], rank=2, alpha=6\)"
DIFFER = {
    "rank": (lambda: adapted(4, 12.0), r"'fc1' has rank 2 in the folder and 4 in the model; 'fc2' has.*" + CALL),
    "alpha": (lambda: adapted(2, 8.0), r"'fc1' is scaled by 3 in the folder and by alpha / rank = 4 in the model.*rank=2, alpha=6\)"),
    "more": (lambda: adapted(where="fc1"), r"'fc2' is adapted in the folder and not in the model"),
    "none": (lambda: cf.functional(base()), "holds adapters alone, and the model has none. " + CALL),
    "shape": (lambda: adapted(module=Mlp(8, 32)), r"fc1.lora_A is \(2, 16\) in the folder and \(2, 8\) in the model.*the base model"),
}


@pytest.mark.parametrize("case", DIFFER)
def test_adapters_that_differ_are_named(tmp_path: Path, case: str) -> None:
    saved(tmp_path)
    model, message = DIFFER[case]
    with pytest.raises(CheckpointError, match=message):
        cf.load(tmp_path, model=model())


def test_an_adapter_that_the_folder_lacks(tmp_path: Path) -> None:
    cf.save_pretrained(with_values(adapted(where="fc1")), None, tmp_path, adapters="peft")
    with pytest.raises(CheckpointError, match=r"'fc2.lora_A' is not in the folder; 'fc2.lora_B' is not in the folder"):
        cf.load(tmp_path, model=adapted())
    back = cf.load(tmp_path, model=adapted(), strict=False)
    assert back.params["fc1.lora_B"].any() and not back.params["fc2.lora_B"].any()


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "another-kind": ({"peft_type": "IA3"}, "is of 'IA3' adapters; only 'LORA' is read"),
    "dora": ({"use_dora": True}, "asks for use_dora, which cf.lora has not"),
    "bias": ({"bias": "all"}, "asks for bias='all'"),
    "whole-layers": ({"modules_to_save": ["head"]}, "asks for modules_to_save"),
    "root": ({"use_rslora": True}, r"'fc1' is scaled by 4.24264 in the folder"),
    "pattern": ({"alpha_pattern": {"(a+)+": 3}}, r"alpha_pattern '\(a\+\)\+' is a regular expression"),
    "one-layer": ({"alpha_pattern": {"^fc2": 3}}, r"'fc2' is scaled by 1.5 in the folder"),
    "no-number": ({"lora_alpha": "x"}, "is no configuration of adapters: lora_alpha"),
    "no-kind": ({"peft_type": None}, "is no configuration of adapters: peft_type"),
    "no-patterns": ({"alpha_pattern": [3]}, "is no configuration of adapters: alpha_pattern"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configurations_that_mean_something_else(tmp_path: Path, case: str) -> None:
    changes, message = CONFIGS[case]
    saved(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        cf.load(tmp_path, model=adapted())


def test_another_scale_that_the_model_has_too(tmp_path: Path) -> None:
    saved(tmp_path, use_rslora=True)
    model = cf.load(tmp_path, model=adapted(2, 6 * 2**0.5))
    assert model.params["fc1.lora_B"].any()


def test_files_that_hold_something_else(tmp_path: Path) -> None:
    saved(tmp_path)
    stored = load_file(tmp_path / FILE)
    save_file({**stored, "base_model.model.embed.lora_embedding_A": torch.ones(2, 4)}, tmp_path / FILE)
    with pytest.raises(CheckpointError, match=r"holds 'base_model.model.embed.lora_embedding_A', which is no matrix"):
        cf.load(tmp_path, model=adapted())
    (tmp_path / CONFIG).write_text("{")
    with pytest.raises(CheckpointError, match="is no configuration of adapters: it is not JSON"):
        cf.load(tmp_path, model=adapted())


def test_a_folder_that_peft_wrote(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=2, lora_alpha=6, target_modules=["fc1", "fc2"], rank_pattern={"fc2": 3}, alpha_pattern={"fc2": 5}, init_lora_weights=False
    )
    wrapped = peft.get_peft_model(base(), config)
    wrapped.save_pretrained(tmp_path)
    model = cf.load(tmp_path, model=cf.lora(adapted(2, 6.0, "fc1"), "fc2", rank=3, alpha=5.0))
    x = torch.randn(3, 16)
    torch.testing.assert_close(output(model, x), wrapped(x))
