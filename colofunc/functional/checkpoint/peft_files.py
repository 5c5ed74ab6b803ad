"""Adapters of `cf.lora` in peft's files: `adapter_model.safetensors` and `adapter_config.json`, without importing peft.

    peft.PeftModel.from_pretrained(base, folder)              # the base with the adapters that were trained here

peft wraps a model, so that its names begin with `base_model.model.`, and keeps each matrix in a layer of its own
(`lora_A.weight`). Ranks and alphas that differ between layers stand in `rank_pattern` and `alpha_pattern`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from colofunc import owned
from colofunc.errors import CheckpointError
from colofunc.functional.adapters import Adapter
from colofunc.functional.checkpoint import plainfile
from colofunc.functional.checkpoint.index import written

CONFIG = "adapter_config.json"
PREFIX = "base_model.model."


def groups(adapters: Sequence[Adapter], values: Mapping[str, Tensor]) -> list[list[str]]:
    """All in one: peft reads one file."""
    return [[name for adapter in adapters for name in adapter.names]]


def to_stored(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{PREFIX}{name}.weight": tensor for name, tensor in tensors.items()}


def save_config(module: nn.Module, adapters: Sequence[Adapter], folder: Path, dtype: torch.dtype | None) -> None:
    """The configuration of the adapters of `module`, which has none itself."""
    (folder / CONFIG).write_text(json.dumps(_config(module, adapters), indent=2) + "\n")


def _config(module: Any, adapters: Sequence[Adapter]) -> dict[str, Any]:
    first = adapters[0]
    name = getattr(module, "name_or_path", None)
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": name if isinstance(name, str) and name else None,
        "task_type": None,
        "inference_mode": True,
        "bias": "none",
        "r": first.rank,
        "lora_alpha": first.alpha,
        # It has one for all layers; what a layer lost in training matters only to those who train on.
        "lora_dropout": max(adapter.dropout for adapter in adapters),
        "fan_in_fan_out": first.transposed,
        "target_modules": _targets(module, [adapter.path for adapter in adapters]),
        "rank_pattern": {re.escape(a.path): a.rank for a in adapters if a.rank != first.rank},
        "alpha_pattern": {re.escape(a.path): a.alpha for a in adapters if a.alpha != first.alpha},
    }


def _targets(module: nn.Module, paths: list[str]) -> list[str] | str:
    """What peft is told to adapt: last names where they say exactly these layers, as people write it, else paths."""
    known = [path for path, _ in module.named_modules()]
    last_names = sorted({path.rsplit(".", 1)[-1] for path in paths})
    for targets in (last_names, paths):
        if _selected(known, targets) == set(paths):
            return targets
    # Such a path is the end of another layer's. A string is a regular expression for whole paths.
    return "|".join(re.escape(path) for path in paths)


def _selected(known: Iterable[str], targets: Sequence[str]) -> set[str]:
    """The layers that peft finds: those with such a path, or with one that ends so from some dot on."""
    ends = tuple(f".{target}" for target in targets)
    return {path for path in known if path in targets or path.endswith(ends)}


def check_no_adapters(path: Path) -> None:
    """Raises CheckpointError where whole weights would come to lie beside adapters, which readers add to them."""
    if (path / CONFIG).exists():
        raise CheckpointError(
            f"{str(path)!r} holds adapters ({CONFIG}), which from_pretrained would add to the weights that are written there. "
            "Try: another folder, or adapters='peft'"
        )


def check_no_whole_weights(path: Path) -> None:
    """Raises CheckpointError where adapters would come to lie beside a whole model that we wrote, which may have them merged.

    Weights that somebody else wrote are a base, and adapters may lie beside them.
    """
    for name, size in (written(path) or {}).items():
        whole = any(fnmatchcase(name, glob) for stem in plainfile.WHOLE_STEMS for glob in plainfile.weight_globs(stem))
        if whole and owned.is_ours(path / name, size):
            raise CheckpointError(
                f"{str(path)!r} holds a whole model that cf.save_pretrained wrote ({name}); from_pretrained would add the adapters to "
                "its weights, in which they may be merged already. Nothing was touched. Try: another folder for the adapters"
            )
