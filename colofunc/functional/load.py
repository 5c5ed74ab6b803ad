"""Loading: `cf.load(path)` gives a saved state back, bit for bit, on whatever mesh it is wanted now.

    state = cf.load("run/step-200")                                    # plain tensors
    state = cf.load("run/step-*", mesh=mesh)                           # the last one; as it was split, as far as it goes
    state = cf.load(path, mesh=mesh, specs={"*.weight": "(dp o) ..."}) # one spec, a prefix of the tree, or globs
    state = cf.load(path, like=step.init(state, batch))                # where and as the example is
    model = cf.load("meta-llama/", model=cf.functional(cf.lazy(build)))  # a folder of transformers

Each process reads the bytes that its ranks hold and no others, and checks them. Nothing in the folder is run: record
types are rebuilt from `like` or come back as dicts. Folders of `torch.distributed.checkpoint` and plain safetensors
folders are read as well.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Literal

import attrs
import torch

from colofunc.dtensor.tensor import DTensor
from colofunc.errors import CheckpointError, InputError
from colofunc.executors.backend import backend_for
from colofunc.functional import pretrained
from colofunc.functional.checkpoint import dcp, plainfile, tree
from colofunc.functional.checkpoint.files import StoredPiece, dtype_name, dtype_of, read_piece
from colofunc.functional.checkpoint.folder import resolve_folder
from colofunc.functional.checkpoint.index import INCOMPLETE, INDEX, PLAIN, read_index
from colofunc.functional.checkpoint.libraries import whole_stems
from colofunc.functional.checkpoint.place import (
    Entry,
    device_for,
    layout_for,
    placed_entry,
    specs_by_name,
    whole_tensor,
)
from colofunc.functional.checkpoint.tree import Matched, tensor_names, unpack
from colofunc.functional.save import Resumable
from colofunc.mesh import Mesh
from colofunc.ops.seeds import set_random_state
from colofunc.program.tracing.tree import flatten
from colofunc.spec.layout import Dim, make_layout
from colofunc.spec.regions import IndexSpan, Region
from colofunc.untrusted import check

# ---- sizes that a folder claims ----
#
# Problem: a file says that a tensor has 10^15 elements, or that a piece of it is a range of 2^60 indices, and whoever
# believes it asks for that memory. Idea: a piece has no more elements than its bytes, its bytes lie in its file, and
# the pieces of a tensor have no fewer elements than the tensor, so that what is asked for is bounded by the size of the
# folder.
#
#     FolderSizes(folder).check("w", (4, 8), torch.float32, [(region, "rank-00000-00000.safetensors", 128, 128)])


PADDED = 4  # what the padded parts of a tensor hold is at most so many times its elements,
PADDING = 1 << 16  # and so many more, of one that is smaller than the number of ranks

StoredRange = tuple[Region, str, int, int]  # region, file, first byte, bytes


@attrs.frozen
class FolderSizes:
    """The files of one folder and their sizes."""

    folder: Path
    _sizes: dict[str, int | None] = attrs.field(factory=dict)

    def check(self, name: str, shape: Sequence[int], dtype: torch.dtype, pieces: Sequence[StoredRange]) -> None:
        """Raise CheckpointError where the pieces of a tensor cannot be what the folder says."""
        if any(size < 0 for size in shape):
            raise CheckpointError(f"{self.folder}: {name!r} has shape {tuple(shape)}; load another checkpoint")
        left = prod(shape)
        for region, file, start, nbytes in pieces:
            spans_fit = len(region.spans) == len(shape) and all(map(_fits, region.spans, shape))
            if not spans_fit or region.numel * dtype.itemsize > nbytes:
                raise CheckpointError(
                    f"{self.folder / file}: a piece of {name!r} {tuple(shape)} has {nbytes} bytes, which cannot hold it"
                )
            size = self._size(file)
            if size is not None and start + nbytes > size:
                raise CheckpointError(
                    f"{self.folder / file} is truncated: {name!r} should reach byte {start + nbytes}, the file has "
                    f"{size}; load another checkpoint, or copy this one again"
                )
            left -= region.numel
        if left > 0:
            raise CheckpointError(
                f"{name!r}: {left} of {prod(shape)} elements {Region.whole(shape).text()} are in no file; it is "
                "incomplete"
            )

    def check_dims(self, name: str, shape: Sequence[int], dims: Sequence[Dim]) -> None:
        """Raise CheckpointError where the layout that a tensor was saved in has far more room than the tensor."""
        make_layout(tuple(dims), tuple(shape))
        sizes = [size for dim in dims for size, _ in dim]
        if any(size < 0 for size in sizes) or prod(sizes) > PADDED * prod(shape) + PADDING:
            raise CheckpointError(
                f"{self.folder}: {name!r} {tuple(shape)} was saved in parts {sizes}, which have more room than it needs"
            )

    def _size(self, file: str) -> int | None:
        """None where there is no such file, which is said when it is read."""
        if file not in self._sizes:
            try:
                self._sizes[file] = (self.folder / file).stat().st_size
            except OSError:
                self._sizes[file] = None
        return self._sizes[file]


def _fits(span: IndexSpan, size: int) -> bool:
    """Whether a span is within a dim; padding at its end may reach over it as far as twice the dim."""
    numbers = [span.start, span.limit or 0]
    for loop in span.loops:
        numbers += loop
    count = prod(times for times, _ in span.loops)
    if min(numbers) < 0 or count > 2 * size + PADDING:
        return False
    if count == 0:
        return True
    last = span.start + sum((times - 1) * stride for times, stride in span.loops)
    return last < size or (span.limit is not None and span.limit <= size)


READERS = min(4, os.cpu_count() or 1)


@attrs.frozen
class _Found:
    """What a folder holds: the tree of the state, tensors by name, objects by name, random state and position."""

    tree: Any
    entries: dict[str, Entry]
    content: dict[str, Any]
    token: str = ""


def load(
    path: str | os.PathLike[str],
    *,
    mesh: Mesh | None = None,
    specs: Any = None,
    like: Any = None,
    model: Any = None,
    strict: bool = True,
    verify: bool = True,
    random: bool = True,
    batches: Resumable | None = None,
    device: torch.device | str | None = None,
) -> Any:
    """The state that was saved at `path`. Collective on real ranks, where a mesh says so.

    mesh: place every tensor on it; without a mesh tensors are plain. specs: one spec, a prefix of the tree, or globs
    over names; what they do not name keeps the spec it was saved in as far as the mesh has its axes. like: an example
    with the same tree, whose types, shapes and dtypes must agree and whose layouts are used; strict=False keeps its
    values for what the folder lacks. model: fill a model from a folder of transformers, or the adapters of a `cf.lora`
    model from one of peft. random: go on with the random numbers where the save left them. batches: a loader to be set
    to its saved position. verify: compare checksums. Raises CheckpointError that names the file and tensor of what is
    missing, changed or does not fit.
    """
    folder = resolve_folder(path)
    if model is not None:
        if like is not None or batches is not None:
            raise InputError(
                "load: model= fills a model from a folder with its weights; like= and batches= belong to saved states"
            )
        return _together(mesh, path, lambda: (pretrained.load_model(folder, model, mesh, specs, strict, device), ""))
    where = mesh
    if mesh is None:
        examples, _ = flatten(like)
        where = next((x.mesh for x in examples if isinstance(x, DTensor)), None)
    return _together(where, path, lambda: _load(folder, where, specs, like, strict, verify, random, batches, device))


def _together(mesh: Mesh | None, path: str | os.PathLike[str], work: Callable[[], tuple[Any, str]]) -> Any:
    """Run the work on all ranks of the mesh; where one fails or reads another version, all raise."""
    watch = backend_for(mesh).watch if mesh is not None else None
    what = f"load of {str(path)!r}"
    try:
        result, token = work()
    except Exception as error:
        if watch is not None:
            watch.give_up(what, error, watch.deadline_s)
        raise
    if watch is not None:
        watch.agree(what, token, watch.deadline_s, last=True)
    return result


def _load(
    folder: Path, mesh: Mesh | None, specs: Any, like: Any, strict: bool, verify: bool, random: bool,
    batches: Resumable | None, device: torch.device | str | None,
) -> tuple[Any, str]:  # fmt: skip
    found = _open(folder, verify)
    build, examples = _matched(found, like, str(folder), strict)
    if mesh is None and specs is not None:
        raise InputError("load: specs= say how tensors lie on a mesh; give mesh= too")
    chosen, there = specs_by_name(specs, found.tree, found.entries), device_for(mesh, device)

    def one(name: str) -> Any:
        entry, example = found.entries[name], examples.get(name)
        at = there
        if isinstance(example, torch.Tensor) and not example.is_meta and device is None:
            at = example.device
        if mesh is None:
            return whole_tensor(entry, at)
        spec = chosen.get(name)
        if spec is not None or not isinstance(example, DTensor) or example.mesh != mesh:
            return placed_entry(entry, layout_for(entry, mesh, spec), mesh, at, asked=spec is not None)
        layout = example.sharding
        x = placed_entry(entry, layout_for(entry, mesh, layout.with_pending(())), mesh, at, asked=True)
        if layout.pending:
            return x.redistribute(layout)  # which the first of the ranks has, and the others zeros of
        return x

    wanted = list(tensor_names(found.tree)) if like is None else list(examples)
    state = build(_read_all(wanted, one))
    # Only now, when everything could be read.
    if batches is not None:
        batches.load_state_dict(_aside(found, "batches", folder))
    if random and "random" in found.content:
        set_random_state(_aside(found, "random", folder))
    return state, found.token


def _read_all(wanted: list[str], one: Callable[[str], Any]) -> dict[str, Any]:
    """Reading and summing release the interpreter lock."""
    if len(wanted) < 2 or READERS < 2:
        return {name: one(name) for name in wanted}
    with ThreadPoolExecutor(READERS) as pool:
        return dict(zip(wanted, pool.map(one, wanted), strict=True))


def _matched(
    found: _Found, like: Any, where: str, strict: bool
) -> tuple[Callable[[dict[str, Any]], Any], dict[str, Any]]:
    """(values -> state, name -> example)."""
    if like is None:
        return partial(unpack, found.tree), {}

    def accept(name: str, example: torch.Tensor, path: str) -> str | None:
        entry = found.entries[name]
        if tuple(example.shape) == entry.shape and example.dtype == entry.dtype:
            return None
        return (
            f"{path} is {tuple(entry.shape)} {dtype_name(entry.dtype)} in the folder and {tuple(example.shape)} "
            f"{dtype_name(example.dtype)} in the example"
        )

    matched = Matched(accept)
    build = matched.walk(found.tree, like)
    matched.check(where, strict)
    return build, matched.examples


def _aside(found: _Found, what: str, folder: Path) -> Any:
    """What was saved beside the state."""
    if what not in found.content:
        raise CheckpointError(f"{folder} was saved without {what}; give {what}= when saving")
    tree = found.content[what]
    return unpack(tree, {name: whole_tensor(found.entries[name]) for name in tensor_names(tree)})


# ---- opening a folder ----


def _open(folder: Path, verify: bool) -> _Found:
    kind = ""
    if (folder / INDEX).exists():
        content = read_index(folder)
        kind = content.get("format", "safetensors")
        if kind == INCOMPLETE:
            raise CheckpointError(
                f"{folder}: a save into this folder was interrupted; load another checkpoint, or save to it again"
            )
        if kind != PLAIN:
            try:
                return _ours(folder, content, verify)
            except ValueError as error:
                raise CheckpointError(f"{folder / INDEX} is damaged: {error}; load another checkpoint") from error
    if kind != PLAIN and (folder / dcp.METADATA).exists():
        return _torch_folder(folder, verify)
    entries = plainfile.entries(folder, whole_stems())
    return _Found({"dict": {name: {"tensor": name} for name in entries}}, entries, {})


@attrs.frozen
class _Tensor:
    """What the index says of a tensor."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[tuple[str, int, int, tuple[tuple[int, tuple[tuple[int, int], ...], int | None], ...], str], ...]
    dims: tuple[tuple[tuple[int, str | None], ...], ...] | None = None
    tier: Literal["device", "host", "disk"] = "device"
    at: tuple[str, tuple[int, ...]] | None = None


def _ours(folder: Path, content: dict[str, Any], verify: bool) -> _Found:
    """A folder of cf.save. Raises Wrong where its index is not what a save writes."""
    token = check(str, content.get("token"), "token")
    if content.get("format") == "dcp":
        entries = _dcp_entries(folder, verify, check(int, content.get("metadata"), "metadata"))[0]
    else:
        entries = _own_entries(folder, check(dict[str, _Tensor], content.get("tensors"), "tensors"), verify)
    for part in ("state", "random", "batches"):
        if part == "state" or part in content:
            tree.check_tree(content.get(part), entries)
    return _Found(content["state"], entries, content, token)


def _own_entries(folder: Path, tensors: Mapping[str, _Tensor], verify: bool) -> dict[str, Entry]:
    found, bounds = {}, FolderSizes(folder)
    for name, said in tensors.items():
        dtype = dtype_of(said.dtype)
        pieces = [StoredPiece.from_json(piece) for piece in said.pieces]
        claimed = [(piece.region, piece.file, piece.start, piece.nbytes) for piece in pieces]
        bounds.check(name, said.shape, dtype, claimed)
        if said.dims is not None:
            bounds.check_dims(name, said.shape, said.dims)
        read = partial(_read_own, folder, name, dtype, verify)
        regions = tuple((piece.region, piece) for piece in pieces)
        found[name] = Entry(name, said.shape, dtype, regions, read, said.dims, said.tier, said.at)
    return found


def _read_own(
    folder: Path, name: str, dtype: torch.dtype, verify: bool, piece: StoredPiece, picks: Any
) -> torch.Tensor:
    return read_piece(folder, name, dtype, piece, picks, verify)


def _dcp_entries(
    folder: Path, verify: bool, crc32: int | None = None
) -> tuple[dict[str, Entry], dict[str, dcp.Chunk], dict[str, tuple[Any, ...]]]:
    """(tensors, objects, keys)."""
    stored, paths = dcp.read_metadata(folder, crc32 if verify else None)
    entries, objects, bounds = {}, {}, FolderSizes(folder)
    for name, entry in stored.items():
        if entry.dtype is None:
            objects[name] = entry.chunks[0]
            continue
        claimed = [(chunk.region, chunk.file, chunk.start, chunk.nbytes) for chunk in entry.chunks]
        bounds.check(name, entry.shape, entry.dtype, claimed)
        read = partial(dcp.read_chunk, folder, name, verify)
        chunks: tuple[tuple[Region, Any], ...] = tuple((chunk.region, chunk) for chunk in entry.chunks)
        entries[name] = Entry(name, entry.shape, entry.dtype, chunks, read)
    return entries, objects, paths


def _torch_folder(folder: Path, verify: bool) -> _Found:
    """A DCP folder that torch wrote: nested as its metadata says, else by its flat names."""
    entries, objects, paths = _dcp_entries(folder, verify)
    root: dict[str, Any] = {}
    for name in [*entries, *objects]:
        leaf: Any = {"tensor": name}
        if name not in entries:
            leaf = {"value": dcp.read_object(folder, name, objects[name], verify)}
        at, *rest = paths.get(name, (name,))
        here = root
        for key in rest:
            here = here.setdefault(at, {})
            at = key
        here[at] = _Leaf(leaf)
    return _Found(_nested(root), entries, {})


@attrs.frozen
class _Leaf:
    tree: Any


def _nested(node: Any) -> Any:
    if isinstance(node, _Leaf):
        return node.tree
    if node and all(isinstance(key, int) for key in node):
        return {"list": [_nested(node[key]) for key in sorted(node)]}
    return {"dict": {str(key): _nested(child) for key, child in node.items()}}


__all__ = ["load"]
