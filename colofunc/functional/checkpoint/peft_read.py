"""Adapters read back: a folder in peft's format into the adapters of a `cf.lora` model, without importing peft.

    model = cf.lora(cf.functional(base), "*.q_proj", rank=8, alpha=16.0)
    model = cf.load("adapters/", model=model)                 # written by cf.save_pretrained(adapters="peft"), or by peft

The file has each matrix under the layer's path; its shape says the rank. The configuration says the scale, on which the result
depends as much: an adapter of another scale than the model's is an error, not another result.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from colofunc.errors import CheckpointError
from colofunc.functional.adapters import Adapter
from colofunc.functional.checkpoint import plainfile
from colofunc.functional.checkpoint.peft_files import CONFIG, PREFIX
from colofunc.functional.checkpoint.place import Entry
from colofunc.untrusted import Wrong, check, read_json

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


__all__ = ["entries", "holds_adapters", "without_adapters"]
