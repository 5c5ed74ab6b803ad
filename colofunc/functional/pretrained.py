"""Folders of Hugging Face models: weights straight into shards, and trained weights back.

    model = cf.load("llama/", model=cf.functional(cf.lazy(lambda: LlamaForCausalLM(config))))      # read when placed
    model = cf.load("llama/", model=model, mesh=mesh, specs={"*.q_proj.weight": "(tp o) i"})       # placed now
    cf.save_pretrained(model, state, "trained/")                 # AutoModel.from_pretrained("trained/") gives the same logits

Problem: names and shapes in files differ from those in the module (renamed parts, experts that were saved one by one),
tied weights are stored once, some buffers not at all. Idea: transformers' own conversion mapping says which stored
tensors make which parameter; each parameter becomes a stored entry like any other, whose reader runs the conversion,
for stacked experts on those only that a rank holds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from colofunc.errors import CheckpointError, InputError, near
from colofunc.functional.adapters import Adapter, global_value
from colofunc.functional.checkpoint import hf, packed_layouts, packed_writing, peft_files, plainfile
from colofunc.functional.checkpoint.files import dtype_name
from colofunc.functional.checkpoint.folder import Writing, sync
from colofunc.functional.checkpoint.index import PLAIN, write_index
from colofunc.functional.checkpoint.packed_tensors import boxed
from colofunc.functional.checkpoint.parts import Ranks
from colofunc.functional.checkpoint.place import Entry, device_for, layout_for, placed, plain, specs_by_name
from colofunc.functional.modules import Model, functional
from colofunc.mesh import Mesh
from colofunc.ops.quantized import Quantized
from colofunc.program.lazy import LazyTensor, lazy_tensor, make
from colofunc.spec.regions import Region, take

SHARD_BYTES = 5_000_000_000
DEADLINE_S = 1800.0


# ---- loading ----


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
            return (
                own
                if mesh is None
                else placed(_of(name, own), layout_for(_of(name, own), mesh, None), mesh, there, asked=False)
            )
        if mesh is not None:
            spec = chosen.get(name)
            return placed(entry, layout_for(entry, mesh, spec), mesh, there, asked=spec is not None)
        if isinstance(own, LazyTensor) and device is None:
            if entry.packed is not None:
                return packed_layouts.lazily(entry)
            return lazy_tensor(entry.shape, entry.dtype, partial(plain, entry), partial(boxed, entry))
        return plain(entry, there)

    groups = [
        {name: one(name, own) for name, own in group.items()} for group in (model.params, model.frozen, model.buffers)
    ]
    return attrs.evolve(model, params=groups[0], frozen=groups[1], buffers=groups[2])


def _found(folder: Path, model: Model, held: Mapping[str, Tensor], strict: bool) -> dict[str, Entry]:
    """What the folder has for the model: weights, or adapters of `cf.lora`, or both where adapters lie beside their
    base.
    """
    if not peft_files.holds_adapters(folder) or hf.is_peft(model.module):
        entries = hf.entries_for(model.module, packed_layouts.entries(folder, hf.has_name(model.module)))
        return _fitting(model.module, entries, held, str(folder), strict)
    whole = plainfile.holds_whole(folder)
    if not model.adapters and not whole:
        raise peft_files.without_adapters(folder)
    found: dict[str, Entry] = {}
    if whole:
        own = {name for adapter in model.adapters for name in adapter.names}
        entries = hf.entries_for(model.module, packed_layouts.entries(folder, hf.has_name(model.module)))
        found = _fitting(
            model.module, entries, {name: x for name, x in held.items() if name not in own}, str(folder), strict
        )
    if model.adapters:
        found |= {
            name: hf.cast(entry, held[name].dtype)
            for name, entry in peft_files.entries(folder, model.adapters, strict).items()
        }
        _check_shapes(found, held, folder)
    return found


def _of_other_shapes(found: Mapping[str, Entry], held: Mapping[str, Tensor]) -> list[str]:
    """What is stored in another shape than the model has, in words."""
    return [
        f"{name} is {entry.shape} in the folder and {tuple(held[name].shape)} in the model"
        for name, entry in found.items()
        if entry.shape != tuple(held[name].shape)
    ]


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
    region = Region.whole(own.shape)
    return Entry(
        name,
        tuple(own.shape),
        own.dtype,
        ((region, own),),
        lambda value, picks: take(make(value).detach().cpu(), picks),
    )


def _fitting(
    module: nn.Module, entries: dict[str, Entry], held: Mapping[str, Tensor], where: str, strict: bool
) -> dict[str, Entry]:
    """Entries by the model's names.

    Raises CheckpointError that lists what is missing, unexpected or of another shape.
    """
    names = hf.canonical_names(module)
    found: dict[str, Entry] = {}
    unexpected = []
    for name, entry in entries.items():
        if names.get(name) in held:
            found.setdefault(names[name], entry)
        else:
            unexpected.append(name)
    stored = {names[name] for name in module.state_dict() if names.get(name) in held}
    missing = [name for name in held if name in stored and name not in found]
    missing, unexpected = hf.without_ignored(module, missing, unexpected)
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
    return {name: hf.cast(entry, held[name].dtype) for name, entry in found.items()}


def _is_real(dtype: torch.dtype) -> bool:
    """Whether it is no dtype of whole numbers: a cast from these would take codes for values."""
    return dtype.is_floating_point or dtype.is_complex


# ---- saving ----


def save_pretrained(
    model: Model,
    state: Mapping[str, Any] | None,
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    shard_bytes: int = SHARD_BYTES,
    adapters: str = "merged",
    overwrite: bool = False,
    layout: str | None = None,
) -> None:
    """Write the model with the values of `state` as its library reads them. Collective on real ranks.

    state: what `cf.train_step` gives ({"params", "buffers", ...}), or name -> tensor; None: the model's own values.
    dtype: to cast to while writing, "config" for the one that the module's configuration names. At most one file's
    worth of weights is held at a time, on rank 0. Other files in the folder (a tokenizer) stay. Adapters of peft are
    written alone, as peft does; modules without a configuration give `model.safetensors`. adapters: those of `cf.lora`
    are "merged" into the weights that they adapt, or written alone in "peft"'s format. overwrite: replace weights and
    configurations that something else wrote there; without it they are an error. layout: how another library keeps
    quantized weights ("bitsandbytes-nf4", "bitsandbytes-int8", "gptq", "awq", "pack-quantized", "int-quantized",
    "float-quantized"); None: they are widened. Raises InputError where it cannot hold them.
    """
    given = _values(model, state)
    values = {name: packed_writing.unopened(value) for name, value in given.items()}
    module = model.plain
    form = _format(model, adapters)
    packing = packed_writing.Packing.of(
        layout, module, values, [name for group in form.groups(values) for name in group], form.merges
    )
    cast = hf.config_dtype(module) if dtype == "config" else dtype
    if isinstance(cast, str):
        raise InputError(f"save_pretrained: dtype={cast!r}; give a torch.dtype, 'config' or None")
    ranks = Ranks.of(packed_writing.meshes(given.values()))
    writing = Writing(path, overwrite, form.kin)
    error: BaseException | None = None
    shards: _Shards | None = None
    groups = form.groups(values)
    if ranks.rank == 0:
        try:
            form.check_folder(writing.path)
            shards = _Shards(writing.begin(), form.stem, sum(1 for _ in _split(values, groups, cast, shard_bytes)))
        except Exception as problem:
            error = problem
    try:
        for files in _split(values, groups, cast, shard_bytes):
            # Every rank takes part in every gather, also when writing has failed (the library's errors are no
            # OSErrors).
            names = [name for group in files for name in group]
            gathered = {name: _whole(form.value(values, name), cast) for name in names if name not in packing.weights}
            packed = {name: packing.gathered(name, cast) for name in names if name in packing.weights}
            if shards is not None and error is None:
                stored: dict[str, Tensor] = {}
                try:
                    for group in files:
                        if group[0] in packed:
                            stored |= packing.to_stored(group, packed[group[0]], form.to_stored)
                        else:
                            stored |= form.to_stored({name: gathered[name] for name in group})
                    shards.add(stored, packing.header(stored, cast or hf.config_dtype(module)))
                except Exception as problem:
                    error = problem
        if shards is not None and error is None:
            try:
                shards.finish()
                form.save_config(writing.folder, cast)
                packing.save_config(writing.folder, cast or hf.config_dtype(module))
                _flushed(writing.folder)
                write_index(writing.folder, {"format": PLAIN}, writing.kept())
                writing.commit()
            except Exception as problem:
                error = problem
    finally:
        if ranks.rank == 0:
            writing.abandon()  # what was good has its name
    _end(writing, ranks, error)


@attrs.frozen
class _Format:
    """What is written of a model, and how."""

    groups: Callable[[Mapping[str, Tensor]], list[list[str]]]  # names that are converted together
    to_stored: Callable[[dict[str, Tensor]], dict[str, Tensor]]  # of one group, under the names in the file
    save_config: Callable[[Path, torch.dtype | None], None]
    merges: Mapping[str, Adapter]  # weight -> what is merged into it
    stem: str  # of the names of weight files

    def value(self, values: Mapping[str, Tensor], name: str) -> Tensor:
        return self.merges[name].merged(values) if name in self.merges else values[name]

    def check_folder(self, path: Path) -> None:
        if self._alone:
            peft_files.check_no_whole_weights(path)
        else:
            peft_files.check_no_adapters(path)

    @property
    def kin(self) -> tuple[str, ...]:
        """Weights as readers of such a folder look for them: beside new ones, old ones of another name would be read
        instead.
        """
        return plainfile.weight_globs(self.stem)

    @property
    def _alone(self) -> bool:
        """Adapters only, which may lie beside the weights that they belong to."""
        return self.stem == plainfile.ADAPTERS


def _format(model: Model, adapters: str) -> _Format:
    """Raises InputError where there is no such format, or none that holds the model."""
    module = model.plain
    own = hf.is_peft(module)
    if adapters not in ("merged", "peft"):
        raise InputError(f"save_pretrained: adapters={adapters!r}; 'merged' or 'peft'")
    if own and model.adapters:
        raise InputError(
            "save_pretrained: cf.lora adapted a model that has adapters of peft, and no file holds both. "
            "Try: cf.lora(cf.functional(peft_model.merge_and_unload()), ...)"
        )
    if adapters == "merged" or own:
        merges = {adapter.weight: adapter for adapter in model.adapters}
        groups, to_stored = partial(hf.stored_groups, module), partial(hf.to_stored, module)
        return _Format(groups, to_stored, partial(hf.save_config, module), merges, hf.stem(module))
    if not model.adapters:
        raise InputError(
            "save_pretrained: adapters='peft', and the model has none. Try: the model that cf.lora(...) returned"
        )
    groups = partial(peft_files.groups, model.adapters)
    return _Format(
        groups, peft_files.to_stored, partial(peft_files.save_config, module, model.adapters), {}, plainfile.ADAPTERS
    )


def _end(writing: Writing, ranks: Ranks, error: BaseException | None) -> None:
    what = f"save_pretrained to {str(writing.path)!r}"
    if error is None:
        if ranks.watch is not None:
            ranks.watch.agree(what, "done", DEADLINE_S, last=True)
        return
    if ranks.watch is not None:
        ranks.watch.give_up(what, error, DEADLINE_S)
    if isinstance(error, CheckpointError):
        raise error
    raise CheckpointError(f"{what} failed: {error}; the weights that were there are intact") from error


def _values(model: Model, state: Mapping[str, Any] | None) -> dict[str, Tensor | Quantized]:
    """Parameter and buffer names -> values; frozen ones are the model's."""
    own: dict[str, Tensor | Quantized] = {**model.frozen, **model.params, **model.buffers}
    if state is None:
        return own
    given = (
        {**state["params"], **state.get("frozen", {}), **state.get("buffers", {})} if "params" in state else dict(state)
    )
    unknown = [name for name in given if name not in own]
    missing = [name for name in model.params if name not in given]
    if unknown or missing:
        words = [f"missing parameter {n!r}" for n in missing[:4]] + [
            f"unknown {n!r}{near(n, own)}" for n in unknown[:4]
        ]
        raise InputError(
            f"save_pretrained: {'; '.join(words)}. Try: the state that the step returned, or its ['params']"
        )
    return own | given


def _whole(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    full = global_value(value).cpu()
    return full.to(dtype) if dtype is not None and full.is_floating_point() else full


def _split(
    values: Mapping[str, Tensor], groups: list[list[str]], dtype: torch.dtype | None, shard_bytes: int
) -> Iterator[list[list[str]]]:
    """Groups of names whose tensors fill one file each."""
    file: list[list[str]] = []
    held = 0
    for group in groups:
        size = sum(_nbytes(values[name], dtype) for name in group)
        if file and held + size > shard_bytes:
            yield file
            file, held = [], 0
        file.append(group)
        held += size
    if file:
        yield file


def _nbytes(x: Tensor, dtype: torch.dtype | None) -> int:
    return x.numel() * (dtype if dtype is not None and x.is_floating_point() else x.dtype).itemsize


class _Shards:
    """The files of a model, written one after another, and the index of several."""

    def __init__(self, folder: Path, stem: str, count: int) -> None:
        self._folder = folder
        self._stem = stem
        self._count = count
        self._written = 0
        self._map: dict[str, str] = {}
        self._bytes = 0

    def add(self, tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> None:
        self._written += 1
        name = (
            plainfile.single(self._stem)
            if self._count == 1
            else f"{self._stem}-{self._written:05d}-of-{self._count:05d}.safetensors"
        )
        whole = {
            k: v.contiguous().clone() if v.untyped_storage().nbytes() != v.nbytes else v.contiguous()
            for k, v in tensors.items()
        }
        save_file(whole, self._folder / name, metadata={"format": "pt", **header})
        self._map |= dict.fromkeys(tensors, name)
        self._bytes += sum(v.nbytes for v in whole.values())

    def finish(self) -> None:
        if self._count > 1:
            index = {"metadata": {"total_size": self._bytes}, "weight_map": dict(sorted(self._map.items()))}
            (self._folder / plainfile.index(self._stem)).write_text(json.dumps(index, indent=2) + "\n")


def _flushed(folder: Path) -> None:
    """Have the files of the library's own writers on disk."""
    for file in folder.iterdir():
        sync(file)
