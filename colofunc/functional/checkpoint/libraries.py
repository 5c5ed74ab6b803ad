"""How the libraries that models come from store them: a table of records, which plugins fill.

    library_of(module).entries(module, stored)      # stored tensors under the module's names

Problem: a library renames, splits and merges tensors between its modules and its files. Idea: a `Library` says by which
modules it is known, and has a function for each question that reading and writing ask. Its defaults are what holds of
any `nn.Module`: tensors lie in files under the module's own names. A library that keeps adapters apart from the model
gives an `AdapterFormat` too. Those that this project knows are in `integrations/formats`, and come by the hook
`colofunc_model_libraries` like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from colofunc import owned
from colofunc.errors import CheckpointError, PluginError
from colofunc.functional.adapters import Adapter
from colofunc.functional.checkpoint import plainfile
from colofunc.functional.checkpoint.index import files_written
from colofunc.functional.checkpoint.place import Entry
from colofunc.plugins.registry import formats_registry, own_formats

MERGED = "merged"
"""What `adapters=` of `cf.save_pretrained` says of adapters in the weights that they adapt: no format has this name."""


# ---- what holds of any module ----


def has_base(library_module: str, name: str) -> Callable[[nn.Module], bool]:
    """Whether a class of a library is among those of a module: a function that does not import the library."""

    def owns(module: nn.Module) -> bool:
        return any(cls.__module__ == library_module and cls.__name__ == name for cls in type(module).__mro__)

    return owns


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


def persistent_names(module: nn.Module, values: Mapping[str, Tensor]) -> list[str]:
    """Those of the names of `values` that the module's state dict has, in its order."""
    names = canonical_names(module)
    persistent = dict.fromkeys(names[name] for name in module.state_dict() if name in names)
    return [name for name in persistent if name in values]


def config_dtype(module: nn.Module) -> torch.dtype | None:
    """The dtype that the module's configuration names, None where it names none."""
    config = getattr(module, "config", None)
    said = getattr(config, "dtype", None)
    found = getattr(torch, said, None) if isinstance(said, str) else said
    return found if isinstance(found, torch.dtype) else None


def _own_name(module: nn.Module) -> Callable[[str], bool]:
    return canonical_names(module).__contains__


def _as_stored(module: nn.Module, stored: dict[str, Entry]) -> dict[str, Entry]:
    return stored


def _all_reported(module: nn.Module, missing: list[str], unexpected: list[str]) -> tuple[list[str], list[str]]:
    return missing, unexpected


def _one_by_one(module: nn.Module, values: Mapping[str, Tensor]) -> list[list[str]]:
    return [[name] for name in persistent_names(module, values)]


def _with_ties(module: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under all names that the state dict has for them."""
    names = canonical_names(module)
    aliases: dict[str, Tensor] = {}
    for name in module.state_dict():
        if names.get(name) in tensors:
            aliases[name] = tensors[names[name]] if name == names[name] else tensors[names[name]].clone()
    return aliases


def _no_layer(layer: nn.Module) -> bool:
    return False


def _save_own_config(module: Any, folder: Path, dtype: torch.dtype | None) -> None:
    """The configuration of a module that writes it itself, under a name that its class has."""
    name = getattr(type(module), "config_name", None)
    if not isinstance(name, str) or not callable(getattr(module, "save_config", None)):
        return
    module.save_config(folder)


# ---- the records ----


@attrs.frozen(eq=False)
class AdapterFormat:
    """How a library keeps the adapters of `cf.lora` in files of their own.

    `name`: what `adapters=` of `cf.save_pretrained` calls it. `config`: the name of the file by which a folder is known
    to hold such adapters. `stem`: how the names of its weight files begin, which those of whole models must not.
    `groups(adapters, values)`: names to be written, those together that one file needs together.
    `to_stored(tensors)`: values of a group under their names in the file. `save_config(module, adapters, folder,
    dtype)`: writes `config`. `entries(folder, adapters, strict)`: stored matrices by the names of `adapters`; raises
    CheckpointError that lists what does not fit. `alone(folder)`: the error for a model without adapters, where the
    folder holds nothing else. `merge`: how a user merges adapters into a model of the library, for an error.
    """

    name: str
    config: str
    stem: str
    groups: Callable[[Sequence[Adapter], Mapping[str, Tensor]], list[list[str]]]
    to_stored: Callable[[dict[str, Tensor]], dict[str, Tensor]]
    save_config: Callable[[nn.Module, Sequence[Adapter], Path, torch.dtype | None], None]
    entries: Callable[[Path, Sequence[Adapter], bool], dict[str, Entry]]
    alone: Callable[[Path], CheckpointError]
    merge: str


@attrs.frozen(eq=False)
class Library:
    """How a library stores its models. What is not given holds of any module.

    `owns(module)`: whether it is a model of the library, found out without importing it (`has_base`). `stem`: how the
    names of its weight files begin. `has_name(module)`: a function that says whether a name in a file is that of a
    parameter or buffer of the module. `entries(module, stored)`: stored tensors under the module's names, converted.
    `reported(module, missing, unexpected)`: these names without those that the library does not report itself.
    `groups(module, values)`: names to be written, those together that one conversion needs together.
    `to_stored(module, tensors)`: values of one group as they are written. `save_config(module, folder, dtype)`: writes
    the configuration beside the weights. `has_transposed_weight(layer)`: whether a layer, of any model, is a linear layer
    of the library whose weight is (in, out), and not (out, in) as in `nn.Linear`; for `cf.lora`, which finds such layers
    by it. `adapters`: for a library whose own models are adapters alone in their files.
    """

    name: str
    owns: Callable[[nn.Module], bool]
    stem: str = plainfile.WHOLE
    has_name: Callable[[nn.Module], Callable[[str], bool]] = _own_name
    entries: Callable[[nn.Module, dict[str, Entry]], dict[str, Entry]] = _as_stored
    reported: Callable[[nn.Module, list[str], list[str]], tuple[list[str], list[str]]] = _all_reported
    groups: Callable[[nn.Module, Mapping[str, Tensor]], list[list[str]]] = _one_by_one
    to_stored: Callable[[nn.Module, dict[str, Tensor]], dict[str, Tensor]] = _with_ties
    save_config: Callable[[nn.Module, Path, torch.dtype | None], None] = _save_own_config
    has_transposed_weight: Callable[[nn.Module], bool] = _no_layer
    adapters: AdapterFormat | None = None


def _any(module: nn.Module) -> bool:
    return True


PLAIN = Library("torch", owns=_any)
"""Of a module that is of no library that is known."""


# ---- the table ----


def libraries() -> dict[str, Library]:
    """Name -> library: this project's first, then those of installed plugins."""
    found: dict[str, Library] = {}
    for name, library in formats_registry().model_libraries.items():
        if library.name != name:
            raise PluginError(
                f"colofunc_model_libraries: {name!r} is a library of the name {library.name!r}; give it its own name"
            )
        found[name] = library
    return found


def library_of(module: nn.Module) -> Library:
    """The library that a module is of; `PLAIN` where none that is known has it.

    Those of plugins are asked first: their models may be subclasses of models of this project's libraries. Raises
    PluginError where two of plugins have it. Of this project's the last one is taken.
    """
    own = own_formats().model_libraries
    owning = [library for name, library in libraries().items() if name not in own and library.owns(module)]
    if len(owning) > 1:
        raise PluginError(
            f"colofunc_model_libraries: {owning[0].name!r} and {owning[1].name!r} both have a module of "
            f"{type(module).__name__} as their own, and a module is of one library. Try: owns= in one of them that "
            "leaves it out, or only one of their plugins installed"
        )
    ours = [library for library in own.values() if library.owns(module)]
    return [PLAIN, *ours, *owning][-1]


def has_transposed_weight(layer: nn.Module) -> bool:
    """Whether a library that is known says that this is a linear layer whose weight is (in, out)."""
    return any(library.has_transposed_weight(layer) for library in libraries().values())


def whole_stems() -> tuple[str, ...]:
    """How the names of files of whole models begin, in any library that is known."""
    known = [library.stem for library in libraries().values() if library.adapters is None]
    return tuple(dict.fromkeys([plainfile.WHOLE, *known]))


def adapter_formats() -> dict[str, AdapterFormat]:
    """Name -> format of files of adapters."""
    found: dict[str, AdapterFormat] = {}
    for library in libraries().values():
        one = library.adapters
        if one is None:
            continue
        if one.name in found or one.name == MERGED:
            raise PluginError(
                f"colofunc_model_libraries: {library.name!r} calls its format of adapters {one.name!r}, which is taken. "
                f"Try: AdapterFormat({library.name!r}, ...)"
            )
        for other in found.values():
            if one.config == other.config:
                raise PluginError(
                    f"colofunc_model_libraries: the formats of adapters {other.name!r} and {one.name!r} are both known "
                    f"by the file {one.config!r}, so that a folder with it would be of both. Try: another config= in "
                    f"AdapterFormat({one.name!r}, ...)"
                )
        found[one.name] = one
    return found


def stored_adapters(folder: Path) -> AdapterFormat | None:
    """The format of the adapters that a folder holds, None where it holds none.

    Raises CheckpointError where it holds adapters in two formats, of which a model could get one only.
    """
    held = [one for one in adapter_formats().values() if (folder / one.config).is_file()]
    if len(held) > 1:
        raise CheckpointError(
            f"{str(folder)!r} holds adapters of {held[0].name!r} ({held[0].config}) and of {held[1].name!r} "
            f"({held[1].config}), and which of them belong to the model is not known. Try: a folder for each"
        )
    return held[0] if held else None


# ---- adapters beside whole weights ----


def check_no_adapters(path: Path) -> None:
    """Raises CheckpointError where whole weights would come to lie beside adapters, which readers add to them."""
    for one in adapter_formats().values():
        if (path / one.config).exists():
            raise CheckpointError(
                f"{str(path)!r} holds adapters ({one.config}), which from_pretrained would add to the weights that are "
                f"written there. Try: another folder, or adapters={one.name!r}"
            )


def check_no_whole_weights(path: Path) -> None:
    """Raises CheckpointError where adapters would come to lie beside a whole model that we wrote, which may have them
    merged.

    Weights that somebody else wrote are a base, and adapters may lie beside them.
    """
    globs: list[str] = []
    for stem in whole_stems():
        globs += plainfile.weight_globs(stem)
    for name, size in (files_written(path) or {}).items():
        whole = any(fnmatchcase(name, glob) for glob in globs)
        if whole and owned.is_ours(path / name, size):
            raise CheckpointError(
                f"{str(path)!r} holds a whole model that cf.save_pretrained wrote ({name}); from_pretrained would add "
                "the adapters to its weights, in which they may be merged already. Nothing was touched. Try: another "
                "folder for the adapters"
            )
