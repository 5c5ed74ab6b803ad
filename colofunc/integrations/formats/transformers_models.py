"""What transformers knows about its own files: names, conversions, ties, configuration.

transformers 5 keeps a conversion mapping per model type (`transformers.conversion_mapping`); its renamings and
converters are used as they are, and their inverse (`revert_weight_conversion`) when saving.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from colofunc.functional.checkpoint.libraries import Library, has_base, persistent_names
from colofunc.functional.checkpoint.place import Entry
from colofunc.program.lazy import LazyTensor, without_data
from colofunc.spec.regions import Pick, Region, extent, take

# ---- loading ----


@attrs.frozen(eq=False)
class _Names:
    """What the library's mapping makes of names in files. `known`: the names that the module has."""

    known: Mapping[str, Tensor]
    renamings: Sequence[Any]
    converters: Sequence[Any]
    by_pattern: Mapping[str, Any]  # pattern -> the converter that reads it
    rename: Callable[..., tuple[str, str | None]]

    @staticmethod
    def of(module: Any) -> _Names:
        """Of a model of transformers."""
        from transformers import conversion_mapping, core_model_loading

        mapping = conversion_mapping.get_model_conversion_mapping(module)
        renamings = [entry for entry in mapping if isinstance(entry, core_model_loading.WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, core_model_loading.WeightConverter)]
        by_pattern = {}
        for converter in converters:
            by_pattern.update(dict.fromkeys(converter.source_patterns, converter))
        known = dict(module.state_dict())
        rename = partial(
            core_model_loading.rename_source_key, base_model_prefix=module.base_model_prefix, meta_state_dict=known
        )
        return _Names(known, renamings, converters, by_pattern, rename)

    def converted(self, key: str) -> tuple[str, str | None]:
        """(the module's name, the pattern of the converter that reads the tensor or None) of a name in a file."""
        name, pattern = self.rename(key, self.renamings, self.converters)
        if name not in self.known and key in self.known:
            name, pattern = self.rename(key, [], [])
        return name, pattern


def _has_name(module: nn.Module) -> Callable[[str], bool]:
    """Whether a name in a file is that of a parameter or buffer of the module."""
    names = _Names.of(module)

    def has(key: str) -> bool:
        return names.converted(key)[0] in names.known

    return has


def _entries(module: nn.Module, stored: dict[str, Entry]) -> dict[str, Entry]:
    """Stored entries under the module's names, converted where the library's mapping says so."""
    from transformers import core_model_loading

    names = _Names.of(module)
    found: dict[str, Entry] = {}
    groups: dict[str, _Group] = {}
    for key in sorted(stored, key=core_model_loading.dot_natural_key):
        name, pattern = names.converted(key)
        if pattern is None:
            found[name] = stored[key]
        else:
            converter = names.by_pattern[pattern]
            group = groups.setdefault(name, _Group(name, converter, module))
            group.sources.setdefault(pattern, []).append(stored[key])
    for group in groups.values():
        found |= group.entries()
    return found


@attrs.define
class _Group:
    """Stored tensors that one converter turns into parameters."""

    name: str
    converter: Any
    module: Any
    sources: dict[str, list[Entry]] = attrs.field(factory=dict)

    def entries(self) -> dict[str, Entry]:
        """What comes out, found out on tensors without data."""
        empty: dict[str, list[Tensor]] = {}
        for pattern, entries in self.sources.items():
            empty[pattern] = [torch.empty(entry.shape, dtype=entry.dtype, device="meta") for entry in entries]
        converted = {}
        for name, tensor in self._convert(empty).items():
            region = (Region.whole(tensor.shape), name)
            read = partial(self._read, len(tensor))
            converted[name] = Entry(name, tuple(tensor.shape), tensor.dtype, (region,), read)
        return converted

    def _convert(self, tensors: dict[str, list[Tensor]]) -> dict[str, Tensor]:
        fresh = copy.deepcopy(self.converter)
        for pattern, of_pattern in tensors.items():
            for tensor in of_pattern:
                fresh.add_tensor(self.name, self.name, pattern, tensor)
        converted = {}
        for name, result in fresh.convert(self.name, model=self.module, config=self.module.config).items():
            converted[name] = result[0] if isinstance(result, list) else result
        return converted

    def _read(self, rows: int, name: str, picks: Sequence[Pick]) -> Tensor:
        """The converted tensor at these positions.

        Of experts that are stacked, only those that are asked for are read.
        """
        low, high = extent(picks[0])
        stacked = self._stacks() and all(len(entries) == rows for entries in self.sources.values())
        if not stacked:
            low, high = 0, rows
        whole: dict[str, list[Tensor]] = {}
        for pattern, entries in self.sources.items():
            chosen = entries[low:high] if stacked else entries
            whole[pattern] = [entry.region(Region.whole(entry.shape)) for entry in chosen]
        first = picks[0]
        shifted = slice(first.start - low, first.stop - low, first.step) if isinstance(first, slice) else first - low
        return take(self._convert(whole)[name], [shifted, *picks[1:]])

    def _stacks(self) -> bool:
        """Whether row k of the result comes from stored tensor k alone."""
        first, *rest = self.converter.operations
        if type(first).__name__ != "MergeModulelist" or first.dim != 0:
            return False
        for operation in rest:
            if type(operation).__name__ not in ("Concatenate", "Chunk", "Interleave") or operation.dim in (0, None):
                return False
        return True


def _reported(module: Any, missing: list[str], unexpected: list[str]) -> tuple[list[str], list[str]]:
    """The names without those that the library itself does not report."""
    absent = list(module._keys_to_ignore_on_load_missing or ())
    extra = [*(module._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"]
    return _not_matching(missing, absent), _not_matching(unexpected, extra)


def _not_matching(names: list[str], patterns: list[str]) -> list[str]:
    left: list[str] = []
    for name in names:
        if not any(re.search(pattern, name) for pattern in patterns):
            left.append(name)
    return left


# ---- saving ----


def _groups(module: Any, values: Mapping[str, Tensor]) -> list[list[str]]:
    """Names to be written, those together that one conversion needs together."""
    ignored = list(module._keys_to_ignore_on_save or ())
    empty: dict[str, Tensor] = {}
    for name in persistent_names(module, values):
        if name not in ignored:
            empty[name] = _empty(values[name])
    return _joined(module, empty)


def _empty(x: Tensor) -> Tensor:
    return without_data(x) if isinstance(x, LazyTensor) else torch.empty(x.shape, dtype=x.dtype, device="meta")


def _joined(module: Any, empty: dict[str, Tensor]) -> list[list[str]]:
    """Groups whose separate conversion gives what the conversion of all gives, tried on tensors without data."""
    from transformers.core_model_loading import revert_weight_conversion

    def shapes_stored(tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
        return _shapes(revert_weight_conversion(module, tensors))

    whole = shapes_stored(dict(empty))
    if whole == _shapes(empty):
        return [[name] for name in empty]
    singles: list[list[str]] = []
    rest: dict[str, Tensor] = {}
    stored_alone: dict[str, tuple[int, ...]] = {}
    for name, tensor in empty.items():
        stored = shapes_stored({name: tensor})
        as_in_whole = all(whole.get(key) == shape and key not in stored_alone for key, shape in stored.items())
        if stored and as_in_whole:
            singles.append([name])
            stored_alone |= stored
        else:
            rest[name] = tensor
    if not rest:
        return singles
    if shapes_stored(dict(rest)) | stored_alone != whole:
        return [list(empty)]
    return [*singles, list(rest)]


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _to_stored(module: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Values of one group as they are written.

    This is the inverse of the conversions, ties once under the name that is loaded.
    """
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, Tensor] = revert_weight_conversion(module, dict(tensors))
    return found


def _save_config(module: Any, folder: Path, dtype: torch.dtype | None) -> None:
    """The configuration beside the weights, as the library's own save writes it."""
    # A copy: the module is the user's.
    config = type(module.config).from_dict(module.config.to_dict())
    config.architectures = [type(module).__name__]
    config.dtype = str(dtype or module.dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    if module.can_generate():
        module.generation_config.save_pretrained(folder)


TRANSFORMERS = Library(
    "transformers",
    owns=has_base("transformers.modeling_utils", "PreTrainedModel"),
    has_name=_has_name,
    entries=_entries,
    reported=_reported,
    groups=_groups,
    to_stored=_to_stored,
    save_config=_save_config,
    # What GPT-2 and other older models have in place of linear layers: a convolution over one position.
    has_transposed_weight=has_base("transformers.pytorch_utils", "Conv1D"),
)
