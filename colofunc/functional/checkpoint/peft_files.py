"""Adapters of `cf.lora` in peft's files: `adapter_model.safetensors` and `adapter_config.json`, without importing peft.

    peft.PeftModel.from_pretrained(base, folder)              # the base with the adapters that were trained here

peft wraps a model, so that its names begin with `base_model.model.`, and keeps each matrix in a layer of its own
(`lora_A.weight`). Ranks and alphas that differ between layers stand in `rank_pattern` and `alpha_pattern`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from colofunc import owned
from colofunc.errors import CheckpointError
from colofunc.functional.adapters import Adapter
from colofunc.functional.checkpoint import plainfile
from colofunc.functional.checkpoint.index import written
from colofunc.functional.checkpoint.place import Entry
from colofunc.untrusted import Wrong, check, read_json

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


# ---- reading ----
#     model = cf.lora(cf.functional(base), "*.q_proj", rank=8, alpha=16.0)
#     model = cf.load("adapters/", model=model)                 # written by cf.save_pretrained(adapters="peft"), or by peft
#
# The file has each matrix under the layer's path; its shape says the rank. The configuration says the scale, on which the result
# depends as much: an adapter of another scale than the model's is an error, not another result.


MATRIX = re.compile(re.escape(PREFIX) + r"(.+)\.(lora_[AB])\.weight")
NOT_READ = ("use_dora", "lora_bias", "modules_to_save", "use_qalora", "use_bdlora", "alora_invocation_tokens", "trainable_token_indices")
SHOWN = 8  # differences that an error lists
_TOLERANCE = 1e-6  # relative: alphas are written as decimal numbers


@attrs.frozen
class _Config:
    """What changes the result of adapters whose matrices are known."""

    lora_alpha: float
    alpha_pattern: Mapping[str, float]
    root: bool  # scaled by alpha / sqrt(rank)

    def alpha(self, path: str) -> float:
        for end, alpha in self.alpha_pattern.items():
            if path == end or path.endswith(f".{end}"):
                return alpha
        return self.lora_alpha

    def scale(self, path: str, rank: int) -> float:
        return self.alpha(path) / (math.sqrt(rank) if self.root else rank)


def holds_adapters(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def entries(folder: Path, adapters: Sequence[Adapter], strict: bool) -> dict[str, Entry]:
    """Stored matrices by the names of `adapters`. Raises CheckpointError that lists what does not fit.

    strict=False: adapters that the folder lacks are left out, and those that `adapters` lack.
    """
    config = _read_config(folder)
    stored = plainfile.header(folder / plainfile.single(plainfile.ADAPTERS))
    matrices = {name: match for name in stored if (match := MATRIX.fullmatch(name))}
    found = {f"{match[1]}.{match[2]}": stored[name] for name, match in matrices.items()}
    other = sorted(stored.keys() - matrices.keys())
    if other:
        raise CheckpointError(f"{folder} holds {other[0]!r}, which is no matrix of a linear layer's adapter. Try: peft's own reader")
    wrong = [text for adapter in adapters for text in _differences(adapter, found, config, strict)]
    wanted = {name for adapter in adapters for name in adapter.names}
    paths = list(dict.fromkeys(match[1] for match in matrices.values()))
    if strict:
        known = {adapter.path for adapter in adapters}
        wrong += [f"{path!r} is adapted in the folder and not in the model" for path in paths if path not in known]
    if wrong:
        more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise CheckpointError(
            f"the adapters in {folder} do not fit the model's: {'; '.join(wrong[:SHOWN])}{more}. Try: {_call(paths, found, config)}"
        )
    return {name: entry for name, entry in found.items() if name in wanted}


def without_adapters(folder: Path) -> CheckpointError:
    """The error where the model has no adapters, and the folder nothing else."""
    stored = plainfile.header(folder / plainfile.single(plainfile.ADAPTERS))
    matrices = {name: match for name in stored if (match := MATRIX.fullmatch(name))}
    found = {f"{match[1]}.{match[2]}": stored[name] for name, match in matrices.items()}
    paths = list(dict.fromkeys(match[1] for match in matrices.values()))
    return CheckpointError(f"{folder} holds adapters alone, and the model has none. Try: {_call(paths, found, _read_config(folder))}")


def _differences(adapter: Adapter, found: Mapping[str, Entry], config: _Config, strict: bool) -> list[str]:
    absent = [name for name in adapter.names if name not in found]
    if absent:
        return [f"{name!r} is not in the folder" for name in absent] if strict or len(absent) == 1 else []
    a, b = (found[name].shape for name in adapter.names)
    if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
        return [f"{adapter.path!r} has matrices of {a} and {b} in the folder"]
    if a[0] != adapter.rank:
        return [f"{adapter.path!r} has rank {a[0]} in the folder and {adapter.rank} in the model"]
    scale = config.scale(adapter.path, a[0])
    if not math.isclose(scale, adapter.scale, rel_tol=_TOLERANCE):
        return [f"{adapter.path!r} is scaled by {scale:g} in the folder and by alpha / rank = {adapter.scale:g} in the model"]
    return []


def _call(paths: Sequence[str], found: Mapping[str, Entry], config: _Config) -> str:
    """The call of `cf.lora` that gives the folder's adapters."""
    kinds: dict[tuple[int, float], list[str]] = {}
    for path in paths:
        a = found.get(f"{path}.lora_A")
        rank = a.shape[0] if a is not None and a.shape else 1
        kinds.setdefault((rank, config.scale(path, rank) * rank), []).append(path)
    calls = []
    for (rank, alpha), some in kinds.items():
        where = ", ".join(repr(path) for path in some[:3]) + (", ..." if len(some) > 3 else "")
        calls.append(f"cf.lora(model, [{where}], rank={rank}, alpha={alpha:g})")
    return ", then ".join(calls[:3]) or "a folder that holds adapters"


def _read_config(folder: Path) -> _Config:
    """Raises CheckpointError where the folder has what changes the result in another way than `cf.lora` does."""
    path = folder / CONFIG
    try:
        content = check(dict[str, Any], read_json(path), "configuration")
        kind = check(str, content.get("peft_type"), "peft_type")
        base = check(float, content.get("lora_alpha"), "lora_alpha") if kind == "LORA" else 0.0
        patterns = check(dict[str, float], content.get("alpha_pattern") or {}, "alpha_pattern")
        bias = content.get("bias", "none")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except Wrong as error:
        raise CheckpointError(f"{path} is no configuration of adapters: {error}") from error
    if kind != "LORA":
        raise CheckpointError(f"{path} is of {kind!r} adapters; only 'LORA' is read. Try: peft's own reader, and cf.functional(peft_model)")
    used = [name for name in NOT_READ if content.get(name)] + ([f"bias={bias!r}"] if bias != "none" else [])
    if used:
        raise CheckpointError(f"{path} asks for {', '.join(used)}, which cf.lora has not. Try: cf.functional(peft_model)")
    return _Config(base, {_literal(path, key): alpha for key, alpha in patterns.items()}, bool(content.get("use_rslora")))


def _literal(path: Path, key: str) -> str:
    """The path that a pattern stands for. Patterns are regular expressions, and those of a file are not run."""
    bare = re.sub(r"\\(.)", r"\1", key.removeprefix("^").removesuffix("$"))
    rest = re.sub(r"\\.", "", key.removeprefix("^").removesuffix("$"))
    if re.search(r"[*+?\[\](){}|^$]", rest):
        raise CheckpointError(f"{path}: alpha_pattern {key!r} is a regular expression. Try: the paths of the layers in its place")
    return bare
