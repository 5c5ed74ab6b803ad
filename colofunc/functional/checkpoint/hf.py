"""What transformers knows about its own files: names, conversions, ties, configuration. Nothing here for other modules.

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

from colofunc.functional.checkpoint import plainfile
from colofunc.functional.checkpoint.place import Entry
from colofunc.program.lazy import LazyTensor, without_data
from colofunc.spec.regions import Pick, Region, extent, take


def is_transformers(module: nn.Module) -> bool:
    """Whether this is a model of transformers, without importing it."""
    return _has_base(module, "transformers.modeling_utils", "PreTrainedModel")


def is_peft(module: nn.Module) -> bool:
    return _has_base(module, "peft.peft_model", "PeftModel")


def is_diffusers(module: nn.Module) -> bool:
    return _has_base(module, "diffusers.models.modeling_utils", "ModelMixin")


def _has_base(module: nn.Module, library_module: str, name: str) -> bool:
    """Whether a class of a library is among those of a module, without importing the library."""
    return any(cls.__module__ == library_module and cls.__name__ == name for cls in type(module).__mro__)


def stem(module: nn.Module) -> str:
    """How the names of the library's weight files begin."""
    if is_peft(module):
        return plainfile.ADAPTERS
    return plainfile.DIFFUSERS if is_diffusers(module) else plainfile.WHOLE


def canonical_names(module: nn.Module) -> dict[str, str]:
    """Every name of a parameter or buffer -> the first name of the same tensor.

    That is how `cf.functional` calls it.
    """
    first: dict[int, str] = {}
    found = {}
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        found[name] = first.setdefault(id(tensor), name)
    return found


def cast(entry: Entry, dtype: torch.dtype) -> Entry:
    """The entry with its values in another dtype."""
    if entry.dtype == dtype:
        return entry
    read = entry.read
    return attrs.evolve(entry, dtype=dtype, read=lambda piece, picks: read(piece, picks).to(dtype))


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


def has_name(module: nn.Module) -> Callable[[str], bool]:
    """Whether a name in a file is that of a parameter or buffer of the module."""
    if not is_transformers(module):
        return canonical_names(module).__contains__
    names = _Names.of(module)

    def has(key: str) -> bool:
        return names.converted(key)[0] in names.known

    return has


def entries_for(module: nn.Module, stored: dict[str, Entry]) -> dict[str, Entry]:
    """Stored entries under the module's names, converted where the library's mapping says so."""
    if not is_transformers(module):
        return stored
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


def without_ignored(module: nn.Module, missing: list[str], unexpected: list[str]) -> tuple[list[str], list[str]]:
    """The names without those that the library itself does not report."""
    if not is_transformers(module):
        return missing, unexpected
    library: Any = module
    absent = list(library._keys_to_ignore_on_load_missing or ())
    extra = [*(library._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"]
    return _not_matching(missing, absent), _not_matching(unexpected, extra)


def _not_matching(names: list[str], patterns: list[str]) -> list[str]:
    left: list[str] = []
    for name in names:
        if not any(re.search(pattern, name) for pattern in patterns):
            left.append(name)
    return left


# ---- saving ----


def stored_groups(module: nn.Module, values: Mapping[str, Tensor]) -> list[list[str]]:
    """Names to be written, those together that one conversion needs together."""
    if is_peft(module):
        return [list(values)]
    names = canonical_names(module)
    persistent = dict.fromkeys(names[name] for name in module.state_dict() if name in names)
    written = [name for name in persistent if name in values]
    if not is_transformers(module):
        return [[name] for name in written]
    ignored = list(module._keys_to_ignore_on_save or ())  # type: ignore[arg-type]
    return _joined(module, {name: _empty(values[name]) for name in written if name not in ignored})


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


def to_stored(module: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Values of one group as they are written.

    This is the inverse of the conversions, ties once under the name that is loaded.
    """
    if is_peft(module):
        from peft import get_peft_model_state_dict

        return dict(get_peft_model_state_dict(module, state_dict=tensors))
    names = canonical_names(module)
    if not is_transformers(module):
        aliases: dict[str, Tensor] = {}
        for name in module.state_dict():
            if names.get(name) in tensors:
                aliases[name] = tensors[names[name]] if name == names[name] else tensors[names[name]].clone()
        return aliases
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, Tensor] = revert_weight_conversion(module, dict(tensors))
    return found


def config_dtype(module: nn.Module) -> torch.dtype | None:
    """The dtype that the module's configuration names, None where it names none."""
    config = getattr(module, "config", None)
    said = getattr(config, "dtype", None)
    found = getattr(torch, said, None) if isinstance(said, str) else said
    return found if isinstance(found, torch.dtype) else None


def save_config(module: Any, folder: Path, dtype: torch.dtype | None) -> None:
    """The configuration beside the weights, as the library's own save writes it."""
    if is_peft(module):
        for config in module.peft_config.values():
            config.save_pretrained(folder)
        return
    if not is_transformers(module):
        _save_own_config(module, folder)
        return
    # A copy: the module is the user's.
    config = type(module.config).from_dict(module.config.to_dict())
    config.architectures = [type(module).__name__]
    config.dtype = str(dtype or module.dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    if module.can_generate():
        module.generation_config.save_pretrained(folder)


def _save_own_config(module: Any, folder: Path) -> None:
    """The configuration of a module that writes it itself, under a name that its class has."""
    name = getattr(type(module), "config_name", None)
    if not isinstance(name, str) or not callable(getattr(module, "save_config", None)):
        return
    module.save_config(folder)
