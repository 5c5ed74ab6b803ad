"""Trained weights as a folder that their library reads.

    cf.save_pretrained(model, state, "trained/")    # AutoModel.from_pretrained("trained/") gives the same logits

Tensors are gathered one file's worth at a time and written by rank 0, under the names and in the shapes that the
module's library says (`checkpoint.libraries`); adapters and quantized weights as other libraries keep them.
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
from torch import Tensor

from colofunc.errors import CheckpointError, InputError, near
from colofunc.functional.adapters import Adapter, global_value
from colofunc.functional.checkpoint import packed_writing, plainfile
from colofunc.functional.checkpoint.folder import Writing, sync
from colofunc.functional.checkpoint.index import PLAIN, write_index
from colofunc.functional.checkpoint.libraries import (
    MERGED,
    adapter_formats,
    check_no_adapters,
    check_no_whole_weights,
    config_dtype,
    library_of,
)
from colofunc.functional.checkpoint.parts import Ranks
from colofunc.functional.modules import Model
from colofunc.ops.quantized import Quantized

SHARD_BYTES = 5_000_000_000
DEADLINE_S = 1800.0


def save_pretrained(
    model: Model,
    state: Mapping[str, Any] | None,
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    shard_bytes: int = SHARD_BYTES,
    adapters: str = MERGED,
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
    groups = form.groups(values)
    written = [name for group in groups for name in group]
    packing = packed_writing.Packing.of(layout, module, values, written, form.merges)
    cast = config_dtype(module) if dtype == "config" else dtype
    if isinstance(cast, str):
        raise InputError(f"save_pretrained: dtype={cast!r}; give a torch.dtype, 'config' or None")
    ranks = Ranks.of(packed_writing.meshes_of_values(given.values()))
    writing = Writing(path, overwrite, form.kin)
    error: BaseException | None = None
    shards: _Shards | None = None
    if ranks.rank == 0:
        try:
            form.check_folder(writing.path)
            count = len(list(_split(values, groups, cast, shard_bytes)))
            shards = _Shards(writing.begin(), form.stem, count)
        except Exception as problem:
            error = problem
    try:
        for files in _split(values, groups, cast, shard_bytes):
            # Every rank takes part in every gather, also when writing has failed (the library's errors are no
            # OSErrors).
            names = [name for group in files for name in group]
            gathered: dict[str, Tensor] = {}
            packed: dict[str, Any] = {}
            for name in names:
                if name not in packing.weights:
                    gathered[name] = _whole(form.value(values, name), cast)
            for name in names:
                if name in packing.weights:
                    packed[name] = packing.gathered(name, cast)
            if shards is not None and error is None:
                stored: dict[str, Tensor] = {}
                try:
                    for group in files:
                        if group[0] in packed:
                            stored |= packing.to_stored(group, packed[group[0]], form.to_stored)
                        else:
                            stored |= form.to_stored({name: gathered[name] for name in group})
                    shards.add(stored, packing.header(stored, cast or config_dtype(module)))
                except Exception as problem:
                    error = problem
        if shards is not None and error is None:
            try:
                shards.finish()
                form.save_config(writing.folder, cast)
                packing.save_config(writing.folder, cast or config_dtype(module))
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
    alone: bool  # adapters only, which may lie beside the weights that they belong to

    def value(self, values: Mapping[str, Tensor], name: str) -> Tensor:
        return self.merges[name].merged(values) if name in self.merges else values[name]

    def check_folder(self, path: Path) -> None:
        if self.alone:
            check_no_whole_weights(path)
        else:
            check_no_adapters(path)

    @property
    def kin(self) -> tuple[str, ...]:
        """Weights as readers of such a folder look for them.

        Beside new ones, old ones of another name would be read instead.
        """
        return plainfile.weight_globs(self.stem)


def _format(model: Model, adapters: str) -> _Format:
    """Raises InputError where there is no such format, or none that holds the model."""
    module = model.plain
    library, formats = library_of(module), adapter_formats()
    own = library.adapters
    if adapters != MERGED and adapters not in formats:
        known = " or ".join(repr(name) for name in (MERGED, *formats))
        raise InputError(f"save_pretrained: adapters={adapters!r}; {known}")
    if own is not None and adapters not in (MERGED, own.name):
        raise InputError(
            f"save_pretrained: adapters={adapters!r}, and the model has adapters of {own.name}. Try: "
            f"adapters={own.name!r}"
        )
    if own is not None and model.adapters:
        raise InputError(
            f"save_pretrained: cf.lora adapted a model that has adapters of {own.name}, and no file holds both. "
            f"Try: cf.lora(cf.functional({own.merge}), ...)"
        )
    if adapters == MERGED or own is not None:
        return _Format(
            groups=partial(library.groups, module),
            to_stored=partial(library.to_stored, module),
            save_config=partial(library.save_config, module),
            merges={adapter.weight: adapter for adapter in model.adapters},
            stem=library.stem,
            alone=own is not None,
        )
    if not model.adapters:
        raise InputError(
            f"save_pretrained: adapters={adapters!r}, and the model has none. Try: the model that cf.lora(...) returned"
        )
    chosen = formats[adapters]
    return _Format(
        groups=partial(chosen.groups, model.adapters),
        to_stored=chosen.to_stored,
        save_config=partial(chosen.save_config, module, model.adapters),
        merges={},
        stem=chosen.stem,
        alone=True,
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
    given = dict(state)
    if "params" in state:
        given = {**state["params"], **state.get("frozen", {}), **state.get("buffers", {})}
    unknown = [name for name in given if name not in own]
    missing = [name for name in model.params if name not in given]
    if unknown or missing:
        words = [f"missing parameter {name!r}" for name in missing[:4]]
        words += [f"unknown {name!r}{near(name, own)}" for name in unknown[:4]]
        raise InputError(
            f"save_pretrained: {'; '.join(words)}. Try: the state that the step returned, or its ['params']"
        )
    return own | given


def _whole(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    full = global_value(value).cpu()
    if dtype is not None and full.is_floating_point():
        return full.to(dtype)
    return full


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
    stored = dtype if dtype is not None and x.is_floating_point() else x.dtype
    return x.numel() * stored.itemsize


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
        file = f"{self._stem}-{self._written:05d}-of-{self._count:05d}.safetensors"
        if self._count == 1:
            file = plainfile.single(self._stem)
        whole: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            # A part of a larger memory would be written with all of it.
            part = tensor.untyped_storage().nbytes() != tensor.nbytes
            whole[name] = tensor.contiguous().clone() if part else tensor.contiguous()
        save_file(whole, self._folder / file, metadata={"format": "pt", **header})
        self._map |= dict.fromkeys(tensors, file)
        self._bytes += sum(tensor.nbytes for tensor in whole.values())

    def finish(self) -> None:
        if self._count > 1:
            index = {"metadata": {"total_size": self._bytes}, "weight_map": dict(sorted(self._map.items()))}
            (self._folder / plainfile.index_name(self._stem)).write_text(json.dumps(index, indent=2) + "\n")


def _flushed(folder: Path) -> None:
    """Have the files of the library's own writers on disk."""
    for file in folder.iterdir():
        sync(file)
