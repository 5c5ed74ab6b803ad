"""Adapters of `cf.lora` in peft's files: `adapter_model.safetensors` and `adapter_config.json`, without importing peft;
and how models of peft itself are stored.

    peft.PeftModel.from_pretrained(base, folder)              # the base with the adapters that were trained here

peft wraps a model, so that its names begin with `base_model.model.`, and keeps each matrix in a layer of its own
(`lora_A.weight`). Ranks and alphas that differ between layers stand in `rank_pattern` and `alpha_pattern`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from colofunc.errors import CheckpointError
from colofunc.functional.adapters import Adapter
from colofunc.functional.checkpoint import plainfile
from colofunc.functional.checkpoint.libraries import AdapterFormat, Library, has_base
from colofunc.functional.checkpoint.place import Entry
from colofunc.untrusted import Wrong, check, read_json

CONFIG = "adapter_config.json"
STEM = "adapter_model"
"""Of `adapter_model.safetensors`."""
PREFIX = "base_model.model."


def _groups(adapters: Sequence[Adapter], values: Mapping[str, Tensor]) -> list[list[str]]:
    """All in one: peft reads one file."""
    names: list[str] = []
    for adapter in adapters:
        names += adapter.names
    return [names]


def _to_stored(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by their names in peft's files."""
    return {f"{PREFIX}{name}.weight": tensor for name, tensor in tensors.items()}


def _save_config(module: nn.Module, adapters: Sequence[Adapter], folder: Path, dtype: torch.dtype | None) -> None:
    """The configuration of the adapters of `module`, which has none itself."""
    (folder / CONFIG).write_text(json.dumps(_config(module, adapters), indent=2) + "\n")


def _config(module: Any, adapters: Sequence[Adapter]) -> dict[str, Any]:
    """The content of the file. Ranks and alphas of most layers stand once; what differs has a pattern of its own."""
    first = adapters[0]
    name = getattr(module, "name_or_path", None)
    rank_pattern, alpha_pattern = {}, {}
    for adapter in adapters:
        pattern = re.escape(adapter.path)
        if adapter.rank != first.rank:
            rank_pattern[pattern] = adapter.rank
        if adapter.alpha != first.alpha:
            alpha_pattern[pattern] = adapter.alpha
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
        "rank_pattern": rank_pattern,
        "alpha_pattern": alpha_pattern,
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


# ---- reading ----
#     model = cf.lora(cf.functional(base), "*.q_proj", rank=8, alpha=16.0)
#     model = cf.load("adapters/", model=model)                 # written by cf.save_pretrained(adapters="peft"), or by peft
#
# The file has each matrix under the layer's path; its shape says the rank. The configuration says the scale, on which
# the result depends as much: an adapter of another scale than the model's is an error, not another result.


MATRIX = re.compile(re.escape(PREFIX) + r"(.+)\.(lora_[AB])\.weight")
"""Name of a matrix in the file: (path of the layer, which of its two matrices)."""
NOT_READ = (
    "use_dora",
    "lora_bias",
    "modules_to_save",
    "use_qalora",
    "use_bdlora",
    "alora_invocation_tokens",
    "trainable_token_indices",
)
"""Options that change the result, and that `cf.lora` has not."""
SHOWN = 8
"""An error lists at most this many differences."""
_TOLERANCE = 1e-6
"""Relative difference of two scales that count as equal: alphas are written as decimal numbers."""


@attrs.frozen
class _Config:
    """What changes the result of adapters whose matrices are known."""

    lora_alpha: float
    alpha_pattern: Mapping[str, float]
    root: bool  # scaled by alpha / sqrt(rank)

    def alpha(self, path: str) -> float:
        """Of a layer: that of the first pattern that its path ends in, else that of all layers."""
        for end, alpha in self.alpha_pattern.items():
            if path == end or path.endswith(f".{end}"):
                return alpha
        return self.lora_alpha

    def scale(self, path: str, rank: int) -> float:
        """What the product of a layer's two matrices is multiplied with."""
        return self.alpha(path) / (math.sqrt(rank) if self.root else rank)


@attrs.frozen
class _Stored:
    """What a folder holds. `matrices`: by our names, `model.q_proj.lora_A`. `paths`: of adapted layers.

    `other`: names of tensors that are no such matrix, sorted.
    """

    matrices: Mapping[str, Entry]
    paths: Sequence[str]
    other: Sequence[str]


def _stored(folder: Path) -> _Stored:
    matrices: dict[str, Entry] = {}
    paths: dict[str, None] = {}
    other = []
    for name, entry in plainfile.read_header(folder / plainfile.single(STEM)).items():
        match = MATRIX.fullmatch(name)
        if match is None:
            other.append(name)
            continue
        path, which = match.groups()
        matrices[f"{path}.{which}"] = entry
        paths[path] = None
    return _Stored(matrices, tuple(paths), sorted(other))


def _entries(folder: Path, adapters: Sequence[Adapter], strict: bool) -> dict[str, Entry]:
    """Stored matrices by the names of `adapters`. Raises CheckpointError that lists what does not fit.

    strict=False: adapters that the folder lacks are left out, and those that `adapters` lack.
    """
    config = _read_config(folder)
    stored = _stored(folder)
    if stored.other:
        raise CheckpointError(
            f"{folder} holds {stored.other[0]!r}, which is no matrix of a linear layer's adapter. Try: peft's own "
            "reader"
        )
    wrong: list[str] = []
    wanted: set[str] = set()
    for adapter in adapters:
        wrong += _differences(adapter, stored.matrices, config, strict)
        wanted.update(adapter.names)
    if strict:
        known = {adapter.path for adapter in adapters}
        wrong += [
            f"{path!r} is adapted in the folder and not in the model" for path in stored.paths if path not in known
        ]
    if wrong:
        more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise CheckpointError(
            f"the adapters in {folder} do not fit the model's: {'; '.join(wrong[:SHOWN])}{more}. Try: "
            f"{_call(stored, config)}"
        )
    return {name: entry for name, entry in stored.matrices.items() if name in wanted}


def _alone(folder: Path) -> CheckpointError:
    """The error where the model has no adapters, and the folder nothing else."""
    call = _call(_stored(folder), _read_config(folder))
    return CheckpointError(f"{folder} holds adapters alone, and the model has none. Try: {call}")


def _differences(adapter: Adapter, matrices: Mapping[str, Entry], config: _Config, strict: bool) -> list[str]:
    """In words, why the stored matrices are not an adapter's. Not strict: it may lack both of them."""
    absent = [name for name in adapter.names if name not in matrices]
    if len(absent) == 2 and not strict:
        return []
    if absent:
        return [f"{name!r} is not in the folder" for name in absent]
    a, b = (matrices[name].shape for name in adapter.names)
    if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
        return [f"{adapter.path!r} has matrices of {a} and {b} in the folder"]
    if a[0] != adapter.rank:
        return [f"{adapter.path!r} has rank {a[0]} in the folder and {adapter.rank} in the model"]
    scale = config.scale(adapter.path, a[0])
    if not math.isclose(scale, adapter.scale, rel_tol=_TOLERANCE):
        return [
            f"{adapter.path!r} is scaled by {scale:g} in the folder and by alpha / rank = {adapter.scale:g} in the "
            "model"
        ]
    return []


def _call(stored: _Stored, config: _Config) -> str:
    """The call of `cf.lora` that gives the folder's adapters."""
    paths_of: dict[tuple[int, float], list[str]] = {}  # (rank, alpha) -> layers
    for path in stored.paths:
        a = stored.matrices.get(f"{path}.lora_A")
        rank = a.shape[0] if a is not None and a.shape else 1
        paths_of.setdefault((rank, config.scale(path, rank) * rank), []).append(path)
    calls = []
    for (rank, alpha), paths in paths_of.items():
        where = ", ".join(repr(path) for path in paths[:3])
        if len(paths) > 3:
            where += ", ..."
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
        raise CheckpointError(
            f"{path} is of {kind!r} adapters; only 'LORA' is read. Try: peft's own reader, and "
            "cf.functional(peft_model)"
        )
    used = [name for name in NOT_READ if content.get(name)]
    if bias != "none":
        used.append(f"bias={bias!r}")
    if used:
        raise CheckpointError(
            f"{path} asks for {', '.join(used)}, which cf.lora has not. Try: cf.functional(peft_model)"
        )
    alpha_pattern = {_literal(path, pattern): alpha for pattern, alpha in patterns.items()}
    return _Config(base, alpha_pattern, root=bool(content.get("use_rslora")))


def _literal(path: Path, pattern: str) -> str:
    """The path that a pattern stands for. Patterns are regular expressions, and those of a file are not run.

    path: of the file, for the CheckpointError where a pattern stands for more than one path.
    """
    text = pattern.removeprefix("^").removesuffix("$")
    unescaped = re.sub(r"\\.", "", text)  # what is left without the escaped characters
    if re.search(r"[*+?\[\](){}|^$]", unescaped):
        raise CheckpointError(
            f"{path}: alpha_pattern {pattern!r} is a regular expression. Try: the paths of the layers in its place"
        )
    return re.sub(r"\\(.)", r"\1", text)


# ---- models of peft itself ----


def _own_groups(module: nn.Module, values: Mapping[str, Tensor]) -> list[list[str]]:
    return [list(values)]


def _own_to_stored(module: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    from peft import get_peft_model_state_dict

    return dict(get_peft_model_state_dict(module, state_dict=tensors))


def _own_save_config(module: Any, folder: Path, dtype: torch.dtype | None) -> None:
    for config in module.peft_config.values():
        config.save_pretrained(folder)


PEFT = Library(
    "peft",
    owns=has_base("peft.peft_model", "PeftModel"),
    stem=STEM,
    groups=_own_groups,
    to_stored=_own_to_stored,
    save_config=_own_save_config,
    adapters=AdapterFormat(
        "peft",
        config=CONFIG,
        stem=STEM,
        groups=_groups,
        to_stored=_to_stored,
        save_config=_save_config,
        entries=_entries,
        alone=_alone,
        merge="peft_model.merge_and_unload()",
    ),
)
