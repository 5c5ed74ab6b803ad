"""Folders of Hugging Face models: weights straight into shards (`save_pretrained` writes trained ones back).

    model = cf.load("llama/", model=cf.functional(cf.lazy(lambda: LlamaForCausalLM(config))))      # read when placed
    model = cf.load("llama/", model=model, mesh=mesh, specs={"*.q_proj.weight": "(tp o) i"})       # placed now

Problem: names and shapes in files differ from those in the module (renamed parts, experts that were saved one by one),
tied weights are stored once, some buffers not at all. Idea: the library that the module is of says which stored tensors
make which parameter (`checkpoint.libraries`); each parameter becomes a stored entry like any other, whose reader runs
the conversion.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from colofunc.errors import CheckpointError, InputError, near
from colofunc.functional.checkpoint import packed_layouts, plainfile
from colofunc.functional.checkpoint.files import dtype_name
from colofunc.functional.checkpoint.libraries import (
    Library,
    canonical_names,
    library_of,
    stored_adapters,
    whole_stems,
)
from colofunc.functional.checkpoint.packed_tensors import boxed
from colofunc.functional.checkpoint.place import (
    Entry,
    cast_entry,
    device_for,
    layout_for,
    placed_entry,
    specs_by_name,
    whole_tensor,
)
from colofunc.functional.modules import Model, functional
from colofunc.mesh import Mesh
from colofunc.program.lazy import LazyTensor, lazy_tensor, make
from colofunc.spec.regions import Region, take


def load_model(
    folder: Path, model: Any, mesh: Mesh | None, specs: Any, strict: bool, device: torch.device | str | None
) -> Model:
    """The model with the folder's weights in its params, frozen and buffers; its module is not changed.

    A model of `cf.lazy` without mesh gets values that are read when they are placed or used. strict=False: parameters
    that the folder lacks keep the model's own values, names that the model lacks are left out. A folder of adapters
    alone fills those of `cf.lora`; the weights stay the model's.
    """
    if isinstance(model, nn.Module):
        model = functional(model)
    if not isinstance(model, Model):
        raise InputError(
            f"load: model={type(model).__name__}; give an nn.Module, cf.lazy(...) or cf.functional(...) of one"
        )
    if mesh is None and specs is not None:
        raise InputError("load: specs= say how tensors lie on a mesh; give mesh= too")
    held: dict[str, Tensor] = {**model.params, **model.frozen, **model.buffers}
    found = _found(folder, model, held, strict)
    chosen = specs_by_name(specs, {"dict": {name: {"tensor": name} for name in found}}, found)
    there = device_for(mesh, device)

    def one(name: str, own: Tensor) -> Tensor:
        entry = found.get(name)
        if entry is None:
            if mesh is None:
                return own
            entry = _of(name, own)
            return placed_entry(entry, layout_for(entry, mesh, None), mesh, there, asked=False)
        if mesh is not None:
            spec = chosen.get(name)
            return placed_entry(entry, layout_for(entry, mesh, spec), mesh, there, asked=spec is not None)
        if isinstance(own, LazyTensor) and device is None:
            if entry.packed is not None:
                return packed_layouts.lazily(entry)
            return lazy_tensor(entry.shape, entry.dtype, partial(whole_tensor, entry), partial(boxed, entry))
        return whole_tensor(entry, there)

    def all_of(group: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: one(name, own) for name, own in group.items()}

    return attrs.evolve(model, params=all_of(model.params), frozen=all_of(model.frozen), buffers=all_of(model.buffers))


def _found(folder: Path, model: Model, held: Mapping[str, Tensor], strict: bool) -> dict[str, Entry]:
    """What the folder has for the model: weights, or adapters of `cf.lora`, or both.

    Adapters may lie beside the base that they belong to.
    """
    module = model.module
    library = library_of(module)
    adapters = stored_adapters(folder)
    if adapters is None or adapters is library.adapters:
        return _fitting(module, library, _entries(folder, module, library), held, str(folder), strict)
    whole = plainfile.holds_whole(folder, whole_stems())
    if not model.adapters and not whole:
        raise adapters.alone(folder)
    found: dict[str, Entry] = {}
    if whole:
        of_adapters = {name for adapter in model.adapters for name in adapter.names}
        base = {name: value for name, value in held.items() if name not in of_adapters}
        found = _fitting(module, library, _entries(folder, module, library), base, str(folder), strict)
    if model.adapters:
        for name, entry in adapters.entries(folder, model.adapters, strict).items():
            found[name] = cast_entry(entry, held[name].dtype)
        _check_shapes(found, held, folder)
    return found


def _entries(folder: Path, module: nn.Module, library: Library) -> dict[str, Entry]:
    """Whole weights of a folder by the names that the module's library gives them."""
    return library.entries(module, packed_layouts.packed_entries(folder, library.has_name(module)))


def _of_other_shapes(found: Mapping[str, Entry], held: Mapping[str, Tensor]) -> list[str]:
    """What is stored in another shape than the model has, in words."""
    wrong: list[str] = []
    for name, entry in found.items():
        own_shape = tuple(held[name].shape)
        if entry.shape != own_shape:
            wrong.append(f"{name} is {entry.shape} in the folder and {own_shape} in the model")
    return wrong


def _check_shapes(found: Mapping[str, Entry], held: Mapping[str, Tensor], folder: Path) -> None:
    wrong = _of_other_shapes(found, held)
    if wrong:
        raise CheckpointError(
            f"{folder} does not fit the model: {'; '.join(wrong[:8])}. Try: the base model that it was trained on"
        )


def _of(name: str, own: Tensor) -> Entry:
    """The model's own value in the place of a stored one."""
    if own.is_meta:
        raise CheckpointError(
            f"{name!r} is not in the folder and has no data in the model; build the model with cf.lazy"
        )

    def read(value: Any, picks: Any) -> Tensor:
        return take(make(value).detach().cpu(), picks)

    return Entry(name, tuple(own.shape), own.dtype, ((Region.whole(own.shape), own),), read)


def _fitting(
    module: nn.Module,
    library: Library,
    entries: dict[str, Entry],
    held: Mapping[str, Tensor],
    where: str,
    strict: bool,
) -> dict[str, Entry]:
    """Entries by the model's names.

    Raises CheckpointError that lists what is missing, unexpected or of another shape.
    """
    names = canonical_names(module)
    found: dict[str, Entry] = {}
    unexpected = []
    for name, entry in entries.items():
        if names.get(name) in held:
            found.setdefault(names[name], entry)
        else:
            unexpected.append(name)
    stored = {names[name] for name in module.state_dict() if names.get(name) in held}
    missing = [name for name in held if name in stored and name not in found]
    missing, unexpected = library.reported(module, missing, unexpected)
    wrong = _of_other_shapes(found, held)
    for name, entry in found.items():
        own = held[name].dtype
        if _is_real(entry.dtype) != _is_real(own):
            quantized = "; where another library has quantized it, take the folder that it was made of"
            wrong.append(
                f"{name} is {dtype_name(entry.dtype)} in the folder and {dtype_name(own)} in the model{quantized}"
            )
    if strict:
        wrong += [f"missing {name!r}{near(name, unexpected, 'unexpected')}" for name in missing]
        wrong += [f"unexpected {name!r}" for name in unexpected]
    if wrong:
        more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        hint = "; strict=False keeps the model's own values for what is missing" if missing or unexpected else ""
        raise CheckpointError(f"{where} does not fit {type(module).__name__}: {'; '.join(wrong[:8])}{more}{hint}")
    return {name: cast_entry(entry, held[name].dtype) for name, entry in found.items()}


def _is_real(dtype: torch.dtype) -> bool:
    """Whether it is no dtype of whole numbers: a cast from these would take codes for values."""
    return dtype.is_floating_point or dtype.is_complex
