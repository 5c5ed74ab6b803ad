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
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from colofunc.dtensor.lazy import LazyTensor, lazy_tensor, make
from colofunc.dtensor.tensor import DTensor
from colofunc.errors import CheckpointError, InputError, near
from colofunc.functional.checkpoint import hf, plainfile
from colofunc.functional.checkpoint.folder import Writing, sync
from colofunc.functional.checkpoint.parts import Ranks
from colofunc.functional.checkpoint.place import Entry, layout_for, placed, plain, specs_by_name
from colofunc.functional.checkpoint.regions import Region
from colofunc.functional.modules import Model, functional
from colofunc.mesh import Mesh

SHARD_BYTES = 5_000_000_000
DEADLINE_S = 1800.0


# ---- loading ----


def load_model(
    folder: Path, model: Any, mesh: Mesh | None, specs: Any, strict: bool, device: torch.device | str | None
) -> Model:
    """The model with the folder's weights in its params, frozen and buffers; its module is not changed.

    A model of `cf.lazy` without mesh gets values that are read when they are placed or used. strict=False: parameters
    that the folder lacks keep the model's own values, names that the model lacks are left out.
    """
    if isinstance(model, nn.Module):
        model = functional(model)
    if not isinstance(model, Model):
        raise InputError(f"load: model={type(model).__name__}; give an nn.Module, cf.lazy(...) or cf.functional(...) of one")
    if mesh is None and specs is not None:
        raise InputError("load: specs= say how tensors lie on a mesh; give mesh= too")
    entries = hf.entries_for(model.module, plainfile.entries(folder))
    held: dict[str, Tensor] = {**model.params, **model.frozen, **model.buffers}
    found = _fitting(model.module, entries, held, str(folder), strict)
    chosen = specs_by_name(specs, {"dict": {name: {"tensor": name} for name in found}}, found)

    def one(name: str, own: Tensor) -> Tensor:
        entry = found.get(name)
        if entry is None:
            return own if mesh is None else placed(_of(name, own), layout_for(_of(name, own), mesh, None), mesh, device)
        if mesh is not None:
            return placed(entry, layout_for(entry, mesh, chosen.get(name)), mesh, device)
        if isinstance(own, LazyTensor) and device is None:
            return lazy_tensor(entry.shape, entry.dtype, partial(plain, entry), partial(_box, entry))
        return plain(entry, device)

    groups = [{name: one(name, own) for name, own in group.items()} for group in (model.params, model.frozen, model.buffers)]
    return attrs.evolve(model, params=groups[0], frozen=groups[1], buffers=groups[2])


def _of(name: str, own: Tensor) -> Entry:
    """The model's own value in the place of a stored one."""
    if own.is_meta:
        raise CheckpointError(f"{name!r} is not in the folder and has no data in the model; build the model with cf.lazy")
    region = Region.whole(own.shape)
    return Entry(name, tuple(own.shape), own.dtype, ((region, own),), lambda value, picks: hf.pick(make(value).detach().cpu(), picks))


def _box(entry: Entry, box: tuple[slice, ...]) -> Tensor:
    return entry.region(Region.box([s.start for s in box], [s.stop - s.start for s in box]))


def _fitting(module: nn.Module, entries: dict[str, Entry], held: Mapping[str, Tensor], where: str, strict: bool) -> dict[str, Entry]:
    """Entries by the model's names. Raises CheckpointError that lists what is missing, unexpected or of another shape."""
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
    wrong = [
        f"{name} is {entry.shape} in the folder and {tuple(held[name].shape)} in the model"
        for name, entry in found.items()
        if entry.shape != tuple(held[name].shape)
    ]
    if strict:
        wrong += [f"missing {name!r}{near(name, unexpected, 'unexpected')}" for name in missing]
        wrong += [f"unexpected {name!r}" for name in unexpected]
    if wrong:
        more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        hint = "; strict=False keeps the model's own values for what is missing" if missing or unexpected else ""
        raise CheckpointError(f"{where} does not fit {type(module).__name__}: {'; '.join(wrong[:8])}{more}{hint}")
    return {name: hf.cast(entry, held[name].dtype) for name, entry in found.items()}


# ---- saving ----


def save_pretrained(
    model: Model,
    state: Mapping[str, Any] | None,
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the model with the values of `state` as its library reads them. Collective on real ranks.

    state: what `cf.train_step` gives ({"params", "buffers", ...}), or name -> tensor; None: the model's own values.
    dtype: to cast to while writing, "config" for the one that the module's configuration names. At most one file's
    worth of weights is held at a time, on rank 0. Other files in the folder (a tokenizer) stay. Adapters of peft are
    written alone, as peft does; modules without a configuration give `model.safetensors`.
    """
    values = _values(model, state)
    module = model.module
    cast = hf.config_dtype(module) if dtype == "config" else dtype
    if isinstance(cast, str):
        raise InputError(f"save_pretrained: dtype={cast!r}; give a torch.dtype, 'config' or None")
    ranks = Ranks.of({x.mesh for x in values.values() if isinstance(x, DTensor)})
    writing = Writing(path)
    error: BaseException | None = None
    shards: _Shards | None = None
    groups = hf.stored_groups(module, values)
    if ranks.rank == 0:
        try:
            shards = _Shards(writing.begin(), shard_bytes, sum(1 for _ in _split(module, values, groups, cast, shard_bytes)))
        except Exception as problem:
            error = problem
    try:
        for files in _split(module, values, groups, cast, shard_bytes):
            # Every rank takes part in every gather, also when writing has failed (the library's errors are no OSErrors).
            gathered = {name: _whole(values[name], cast) for group in files for name in group}
            if shards is not None and error is None:
                try:
                    shards.add({k: v for group in files for k, v in hf.to_stored(module, {n: gathered[n] for n in group}).items()})
                except Exception as problem:
                    error = problem
        if shards is not None and error is None:
            try:
                shards.finish()
                hf.save_config(module, writing.folder, cast)
                _put(writing)
            except Exception as problem:
                error = problem
    finally:
        if ranks.rank == 0:
            writing.abandon()  # what was good has its name
    _end(writing, ranks, error)


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


def _values(model: Model, state: Mapping[str, Any] | None) -> dict[str, Tensor]:
    """Parameter and buffer names -> values; frozen ones are the model's."""
    own: dict[str, Tensor] = {**model.frozen, **model.params, **model.buffers}
    if state is None:
        return own
    given = {**state["params"], **state.get("frozen", {}), **state.get("buffers", {})} if "params" in state else dict(state)
    unknown = [name for name in given if name not in own]
    missing = [name for name in model.params if name not in given]
    if unknown or missing:
        words = [f"missing parameter {n!r}" for n in missing[:4]] + [f"unknown {n!r}{near(n, own)}" for n in unknown[:4]]
        raise InputError(f"save_pretrained: {'; '.join(words)}. Try: the state that the step returned, or its ['params']")
    return own | given


def _whole(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    full = value.full() if isinstance(value, DTensor) else make(value)
    full = full.detach().cpu()
    return full.to(dtype) if dtype is not None and full.is_floating_point() else full


def _split(
    module: nn.Module, values: Mapping[str, Tensor], groups: list[list[str]], dtype: torch.dtype | None, shard_bytes: int
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

    def __init__(self, folder: Path, shard_bytes: int, count: int) -> None:
        self._folder = folder
        self._count = count
        self._written = 0
        self._map: dict[str, str] = {}
        self._bytes = 0

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        self._written += 1
        name = plainfile.SINGLE if self._count == 1 else f"model-{self._written:05d}-of-{self._count:05d}.safetensors"
        whole = {k: v.contiguous().clone() if v.untyped_storage().nbytes() != v.nbytes else v.contiguous() for k, v in tensors.items()}
        save_file(whole, self._folder / name, metadata={"format": "pt"})
        self._map |= dict.fromkeys(tensors, name)
        self._bytes += sum(v.nbytes for v in whole.values())

    def finish(self) -> None:
        if self._count > 1:
            index = {"metadata": {"total_size": self._bytes}, "weight_map": dict(sorted(self._map.items()))}
            (self._folder / plainfile.INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _put(writing: Writing) -> None:
    """Give the files their place: the folder with what else was in it, in one step."""
    path = writing.path
    if path.is_dir() and (path.is_mount() or Path.cwd().is_relative_to(path)):
        _merge(writing)  # a folder that cannot be exchanged for another
        return
    if path.is_dir():
        _link(path, writing.folder, [p.name for p in _weights(path)])
    for file in writing.folder.rglob("*"):
        if file.is_file() and not file.is_symlink():
            sync(file)
    writing.commit()


def _weights(path: Path) -> list[Path]:
    """Where the weights of an earlier save are."""
    return [p for p in [*path.glob("model-*-of-*.safetensors"), path / plainfile.INDEX, path / plainfile.SINGLE] if p.exists()]


def _link(old: Path, new: Path, skip: list[str]) -> None:
    """Hard links (copies, where the system has none) in `new` to the files of `old` that it lacks."""
    for file in old.iterdir():
        target = new / file.name
        if file.is_dir() and not file.is_symlink():
            target.mkdir(exist_ok=True)
            _link(file, target, [])
        elif file.name not in skip and not os.path.lexists(target):
            try:
                os.link(file, target, follow_symlinks=False)
            except OSError:
                shutil.copy2(file, target, follow_symlinks=False)


def _merge(writing: Writing) -> None:
    """Move the files into the folder. The index goes first and comes last, so that nobody reads old and new shards together."""
    (writing.path / plainfile.INDEX).unlink(missing_ok=True)
    new = sorted(writing.folder.iterdir(), key=lambda p: (p.suffix == ".json", p.name))
    for path in new:
        if path.is_dir():
            shutil.copytree(path, writing.path / path.name, dirs_exist_ok=True)
        else:
            sync(path)
            os.replace(path, writing.path / path.name)
    for path in _weights(writing.path):
        if path.name not in {p.name for p in new}:
            path.unlink()
