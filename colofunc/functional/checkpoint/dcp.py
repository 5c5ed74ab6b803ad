"""Folders of `torch.distributed.checkpoint`: written through torch's own writer, read without running pickles.

Problem: other tools speak DCP, whose metadata is a pickle, and a pickle may run anything. Idea: torch writes (our planner
tells it which parts there are); the metadata is read by an unpickler that knows torch's own record classes by name and
refuses everything else, and the data by `torch.load(weights_only=True)`.

    boxes("w", region)                      # the region as slices, for the writer in `dcp_planner`
    found = read_metadata(folder)            # name -> Stored (shape, dtype, chunks)
"""

from __future__ import annotations

import io
import itertools
import pickle
import zipfile
import zlib
from pathlib import Path, PurePosixPath
from typing import Any

import attrs
import numpy as np
import torch

from colofunc.errors import CheckpointError, InputError
from colofunc.functional.checkpoint.files import Item, inside
from colofunc.functional.checkpoint.regions import Pick, Region, Span, common, take

METADATA = ".metadata"
MOST_BOXES = 4096  # of one part; a stripe of single elements has as many as elements


# ---- writing ----


def boxes(name: str, region: Region) -> list[Region]:
    """The region as slices, which is all that DCP knows."""
    if region.is_box:
        return [region]
    runs = [_runs(span) for span in region.spans]
    if np.prod([len(r) for r in runs]) > MOST_BOXES:
        raise InputError(
            f"{name}: a part {region.text()} is {np.prod([len(r) for r in runs])} slices, too many for DCP; save "
            'x.redistribute(...) to contiguous shards, or use format="safetensors"'
        )
    return [Region(tuple(some)) for some in itertools.product(*runs)]


def _runs(span: Span) -> list[Span]:
    at = np.sort(span.indices())
    cuts = np.flatnonzero(np.diff(at) != 1) + 1
    return [Span(int(run[0]), ((len(run), 1),)) for run in np.split(at, cuts)]


def value_of(item: Item, box: Region) -> torch.Tensor:
    """The elements of a box of an item, in host memory."""
    value = item.value().detach()
    if item.region != box:
        picks = common(item.region, box)
        assert picks is not None, "a box is cut from its item"
        value = take(value, picks[0])
    return value.cpu().contiguous()


# ---- reading ----


@attrs.frozen
class Chunk:
    """A stored box of a tensor, or a stored object: a stream of `torch.save` inside a file."""

    file: str
    start: int
    nbytes: int
    region: Region


@attrs.frozen
class Stored:
    """One entry of the metadata; dtype None is an object."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    chunks: tuple[Chunk, ...]


def read_metadata(folder: Path, crc32: int | None = None) -> tuple[dict[str, Stored], dict[str, tuple[Any, ...]]]:
    """(name -> entry, name -> keys) of a DCP folder. Raises CheckpointError where its pickle wants what is not torch's.

    crc32: the checksum that its bytes must have, if it is known.
    """
    path = folder / METADATA
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error}); the checkpoint is incomplete") from error
    if crc32 is not None and zlib.crc32(data) != crc32:
        raise CheckpointError(f"{path} is not what was saved (checksum); load another checkpoint, or copy this one again")
    try:
        metadata: Any = _Restricted(io.BytesIO(data), path).load()
        infos: dict[tuple[str, Any], Any] = {(at.fqn, at.offset): info for at, info in metadata.storage_data.items()}
        found = {name: _stored(name, entry, infos) for name, entry in metadata.state_dict_metadata.items()}
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path} is no metadata of torch.distributed.checkpoint: {type(error).__name__}: {error}") from error
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    return found, {name: tuple(keys) for name, keys in paths.items()}


def _stored(name: str, entry: Any, infos: dict[tuple[str, Any], Any]) -> Stored:
    if type(entry).__name__ == "BytesStorageMetadata":
        info = infos[name, None]
        return Stored((), None, (Chunk(inside(info.relative_path), info.offset, info.length, Region(())),))
    chunks = []
    for chunk in entry.chunks:
        info = infos.get((name, chunk.offsets)) or infos[name, None]
        if info.transform_descriptors:
            raise CheckpointError(f"{name!r} is stored through {info.transform_descriptors}, which only its writer can undo")
        chunks.append(Chunk(inside(info.relative_path), info.offset, info.length, Region.box(chunk.offsets, chunk.sizes)))
    return Stored(tuple(entry.size), entry.properties.dtype, tuple(chunks))


def read_chunk(folder: Path, name: str, verify: bool, chunk: Chunk, picks: tuple[Pick, ...]) -> torch.Tensor:
    """The elements at `picks` of a chunk, which is read whole."""
    value = read_object(folder, name, chunk, verify)
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != chunk.region.shape:
        raise CheckpointError(f"{folder / chunk.file}: {name!r} {chunk.region.text()} is not the tensor that the metadata says")
    return take(value, picks)


def read_object(folder: Path, name: str, chunk: Chunk, verify: bool = True) -> Any:
    """What `torch.save` wrote. verify: compare the checksums that its zip archive has of each record."""
    path = folder / chunk.file
    try:
        with open(path, "rb") as file:
            file.seek(chunk.start)
            data = file.read(chunk.nbytes)
        if len(data) < chunk.nbytes:
            raise CheckpointError(f"{path} is truncated: {name!r} should reach byte {chunk.start + chunk.nbytes}")
        changed = zipfile.ZipFile(io.BytesIO(data)).testzip() if verify else None
        if changed is not None:
            raise CheckpointError(
                f"{path}: the bytes of {name!r} are not those that were saved (checksum of {changed!r}); load another checkpoint, copy "
                "this one again, or write verify=False where torch was told to write no checksums"
            )
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path}: {name!r} cannot be read: {type(error).__name__}: {error}") from error


_RECORDS = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "torch": {"Size"},
}  # fmt: skip


class _Restricted(pickle.Unpickler):
    """Knows the records that torch itself puts into a DCP metadata, and nothing else."""

    def __init__(self, data: io.BytesIO, path: Path) -> None:
        super().__init__(data)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "pathlib" and name.endswith("Path"):
            return PurePosixPath
        found = getattr(torch, name, None) if module == "torch" and name.isidentifier() else None
        if name in _RECORDS.get(module, ()) or isinstance(found, torch.dtype):
            return super().find_class(module, name)
        raise CheckpointError(
            f"{self._path} asks for {module}.{name}, which is none of torch's checkpoint records; a pickle may run anything, "
            "so it is not read. Load it with torch where you trust it, and save it as safetensors"
        )
