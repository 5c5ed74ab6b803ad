"""Folders of `torch.distributed.checkpoint`: written through torch's own writer, read without running pickles.

Problem: other tools speak DCP, whose metadata is a pickle, and a pickle may run anything. Idea: torch writes (our
planner tells it which parts there are); metadata and data are read as plain data (`unpickled.py`), in which the names
of torch's own records stand for records of the reader, and every other name is refused.

    boxes("w", region)                      # the region as slices, for the writer in `dcp_planner`
    found = read_metadata(folder)            # name -> DcpEntry (shape, dtype, chunks)
"""

from __future__ import annotations

import io
import itertools
import os
import zipfile
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

from colofunc import untrusted
from colofunc.errors import CheckpointError, InputError
from colofunc.functional.checkpoint.files import PieceToWrite, file_inside
from colofunc.functional.checkpoint.unpickled import NoPickle, PickleCall, Record, read_pickle, record
from colofunc.spec.regions import IndexSpan, Pick, Region, common, take

METADATA = ".metadata"
MOST_METADATA_BYTES = 1 << 30
MOST_KEYS = 100  # containers around a leaf
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


def _runs(span: IndexSpan) -> list[IndexSpan]:
    at = np.sort(span.indices())
    cuts = np.flatnonzero(np.diff(at) != 1) + 1
    return [IndexSpan(int(run[0]), ((len(run), 1),)) for run in np.split(at, cuts)]


def value_of(item: PieceToWrite, box: Region) -> torch.Tensor:
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
class DcpEntry:
    """One entry of the metadata; dtype None is an object."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    chunks: tuple[Chunk, ...]


def read_metadata(folder: Path, crc32: int | None = None) -> tuple[dict[str, DcpEntry], dict[str, tuple[Any, ...]]]:
    """(name -> entry, name -> keys) of a DCP folder. Raises CheckpointError where its pickle wants what is not torch's.

    crc32: the checksum that its bytes must have, if it is known.
    """
    path = folder / METADATA
    try:
        data = untrusted.read_bytes(path, MOST_METADATA_BYTES)
    except (OSError, untrusted.Wrong) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); the checkpoint is incomplete") from error
    if crc32 is not None and zlib.crc32(data) != crc32:
        raise CheckpointError(
            f"{path} is not what was saved (checksum); load another checkpoint, or copy this one again"
        )
    try:
        metadata = _state(read_pickle(data, partial(_known, path)), "Metadata")
        infos = {_index(at): _state(info, "_StorageInfo") for at, info in metadata["storage_data"].items()}
        found = {
            _text(name): _stored(_text(name), entry, infos) for name, entry in metadata["state_dict_metadata"].items()
        }
        return found, _paths(metadata.get("planner_data"))
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path} is no metadata of torch.distributed.checkpoint: {type(error).__name__}: {error}"
        ) from error


def _state(made: Any, *kinds: str) -> dict[str, Any]:
    """The fields of a record of one of these kinds."""
    if type(made) is not Record or made.kind not in kinds or type(made.state) is not dict:
        raise NoPickle(f"a record of {' or '.join(kinds)} is expected")
    return made.state


def _text(value: Any) -> str:
    if type(value) is not str:
        raise NoPickle(f"a name is expected, not {type(value).__name__}")
    return value


def _number(value: Any) -> int:
    """A position or a size, as a file may have it."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise NoPickle(f"a position or size is expected, not {value!r:.40}")
    return value


def _sizes(value: Any) -> tuple[int, ...]:
    if type(value) is Record and value.kind == "Size":
        (value,) = value.args
    return tuple(_number(n) for n in value)


def _index(at: Any) -> tuple[str, tuple[int, ...] | None]:
    """(name, offset), under which torch keeps where a chunk is."""
    fields = _state(at, "MetadataIndex")
    offset = fields.get("offset")
    return _text(fields["fqn"]), None if offset is None else _sizes(offset)


def _paths(said: Any) -> dict[str, tuple[Any, ...]]:
    """Name -> keys, with which the nesting is rebuilt; none where another planner left something else."""
    paths = said if type(said) is dict else {}
    for keys in paths.values():
        if (
            type(keys) not in (tuple, list)
            or not 0 < len(keys) <= MOST_KEYS
            or any(type(key) not in (str, int) for key in keys)
        ):
            raise NoPickle(f"keys of a leaf are expected, not {keys!r:.40}")
    return {_text(name): tuple(keys) for name, keys in paths.items()}


def _stored(name: str, entry: Any, infos: dict[Any, dict[str, Any]]) -> DcpEntry:
    fields = _state(entry, "BytesStorageMetadata", "TensorStorageMetadata") if entry.state is not None else {}
    if entry.kind == "BytesStorageMetadata":
        return DcpEntry((), None, (_chunk(name, infos[name, None], Region(())),))
    dtype, *_ = fields["properties"].state
    if not isinstance(dtype, torch.dtype):
        raise NoPickle(f"{name!r} has no dtype")
    chunks = []
    for chunk in fields["chunks"]:
        part = _state(chunk, "ChunkStorageMetadata")
        offsets, sizes = _sizes(part["offsets"]), _sizes(part["sizes"])
        info = infos.get((name, offsets)) or infos[name, None]
        chunks.append(_chunk(name, info, Region.box(offsets, sizes)))
    return DcpEntry(_sizes(fields["size"]), dtype, tuple(chunks))


def _chunk(name: str, info: dict[str, Any], region: Region) -> Chunk:
    if info.get("transform_descriptors"):
        raise CheckpointError(
            f"{name!r} is stored through {info['transform_descriptors']!r:.80}, which only its writer can undo"
        )
    return Chunk(file_inside(_text(info["relative_path"])), _number(info["offset"]), _number(info["length"]), region)


def read_chunk(folder: Path, name: str, verify: bool, chunk: Chunk, picks: tuple[Pick, ...]) -> torch.Tensor:
    """The elements at `picks` of a chunk, which is read whole."""
    value = read_object(folder, name, chunk, verify)
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != chunk.region.shape:
        raise CheckpointError(
            f"{folder / chunk.file}: {name!r} {chunk.region.text()} is not the tensor that the metadata says"
        )
    return take(value, picks)


def read_object(folder: Path, name: str, chunk: Chunk, verify: bool = True) -> Any:
    """What `torch.save` wrote. verify: compare the checksums that its zip archive has of each record."""
    path = folder / chunk.file
    try:
        return read_saved(_bytes_of(path, name, chunk), verify)
    except Changed as error:
        raise CheckpointError(
            f"{path}: the bytes of {name!r} are not those that were saved (checksum of {str(error)!r}); load another "
            "checkpoint, copy this one again, or write verify=False where torch was told to write no checksums"
        ) from error
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path}: {name!r} cannot be read: {type(error).__name__}: {error}") from error


def _bytes_of(path: Path, name: str, chunk: Chunk) -> bytearray:
    with untrusted.open_file(path) as file:
        if chunk.start + chunk.nbytes > os.fstat(file.fileno()).st_size:
            raise CheckpointError(f"{path} is truncated: {name!r} should reach byte {chunk.start + chunk.nbytes}")
        memory = bytearray(chunk.nbytes)
        file.seek(chunk.start)
        count = file.readinto(memory)
    if count < chunk.nbytes:
        raise CheckpointError(f"{path} is truncated: {name!r} should reach byte {chunk.start + chunk.nbytes}")
    return memory


_RECORDS = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
}  # fmt: skip


def _known(path: Path, module: str, name: str) -> Any:
    """The records that torch itself puts into a DCP metadata, and nothing else."""
    if name in _RECORDS.get(module, ()):
        return record(name)
    if (module, name) == ("collections", "OrderedDict"):
        return PickleCall(dict)
    if module.split(".")[0] == "pathlib" and name.endswith("Path"):
        return record("Path")
    dtype = torch_dtype(module, name)
    if dtype is not None:
        return dtype
    raise CheckpointError(
        f"{path} asks for {module}.{name}, which is none of torch's checkpoint records; a pickle may run anything, "
        "so it is not read. Load it with torch where you trust it, and save it as safetensors"
    )


# ---- what torch.save wrote ----
#
# Problem: `torch.load(weights_only=True)` trusts the sizes that the file claims and gives memory for them. Idea:
# records are stored, so that each is a range of the bytes that are there, and a tensor is a view of that range, within
# its bounds.
#
#     read_saved(memory, verify=True)         # memory: bytearray of one archive


_STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16, "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64, "IntStorage": torch.int32, "ShortStorage": torch.int16, "CharStorage": torch.int8,
    "ByteStorage": torch.uint8, "BoolStorage": torch.bool, "ComplexFloatStorage": torch.complex64, "ComplexDoubleStorage": torch.complex128,
}  # fmt: skip
_LOCAL_HEADER_BYTES = 30


class Changed(ValueError):
    """A record whose checksum is not the archive's."""


def torch_dtype(module: str, name: str) -> torch.dtype | None:
    """The dtype of that name, None where it is none."""
    found = getattr(torch, name, None) if module == "torch" and name.isidentifier() else None
    return found if isinstance(found, torch.dtype) else None


def read_saved(memory: bytearray, verify: bool) -> Any:
    """The object. Tensors share `memory`.

    Raises Changed for a record with another checksum, other errors for damaged archives.
    """
    archive = zipfile.ZipFile(io.BytesIO(memory))
    records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    for info in records.values():
        if info.compress_type != zipfile.ZIP_STORED or info.file_size > len(memory):
            raise NoPickle(f"{info.filename!r} is compressed, which torch does not do")
    changed = archive.testzip() if verify else None
    if changed is not None:
        raise Changed(changed)
    parts = {name: _range(memory, info) for name, info in records.items()}
    if bytes(parts.get("byteorder", b"little")) != b"little":
        raise NoPickle("its bytes are in big-endian order")
    return read_pickle(bytes(parts["data.pkl"]), _rebuilt, lambda said: _storage(said, parts))


def _range(memory: bytearray, info: zipfile.ZipInfo) -> memoryview:
    """The bytes of a stored record."""
    lengths = memory[info.header_offset + 26 : info.header_offset + _LOCAL_HEADER_BYTES]
    start = (
        info.header_offset
        + _LOCAL_HEADER_BYTES
        + int.from_bytes(lengths[:2], "little")
        + int.from_bytes(lengths[2:], "little")
    )
    part = memoryview(memory)[start : start + info.file_size]
    if len(part) < info.file_size:
        raise NoPickle(f"{info.filename!r} reaches over the end")
    return part


def _rebuilt(module: str, name: str) -> Any:
    """What the archives of plain data ask for."""
    dtype = torch_dtype(module, name)
    if dtype is not None:
        return dtype
    if (module, name) in _MAKERS:
        return _MAKERS[module, name]
    if module == "torch" and name in _STORAGES:
        return _STORAGES[name]
    raise NoPickle(f"it asks for {module}.{name}, which is no plain data")


def _storage(said: Any, parts: dict[str, memoryview]) -> Record:
    """A range of the archive's bytes, from ("storage", dtype, key, device, number of elements)."""
    _, dtype, key, _, count = said
    part = parts[f"data/{key}"]
    itemsize = 1 if dtype is None else dtype.itemsize
    if type(count) is not int or not 0 <= count * itemsize <= len(part):
        raise NoPickle(f"it claims {count} elements of a record of {len(part)} bytes")
    return Record("storage", (part[: count * itemsize], dtype))


def _tensor(storage: Any, offset: int, size: Any, stride: Any, grad: Any, hooks: Any, *more: Any) -> torch.Tensor:
    """A view of a storage. more: a dtype, for those that have no storage of their own; torch's flags, which plain
    values lack.
    """
    dtypes = [item for item in more if isinstance(item, torch.dtype)]
    if type(storage) is not Record or storage.kind != "storage" or any(item for item in more if item not in dtypes):
        raise NoPickle("it has a tensor that is no plain one")
    part, dtype = storage.args
    if dtypes:
        dtype = dtypes[0]
    if 0 in size and not len(part):
        return torch.empty(tuple(size), dtype=dtype)
    if not len(part):
        return torch.empty(0, dtype=dtype).as_strided(size, stride, offset)
    flat = torch.frombuffer(part, dtype=dtype)
    return flat.as_strided(tuple(size), tuple(stride), offset)


_MAKERS: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): PickleCall(lambda *pairs: dict(*pairs)),
    ("torch", "Size"): PickleCall(lambda *sizes: torch.Size(*sizes)),
    ("torch", "device"): PickleCall(lambda *words: torch.device(*words)),
    ("torch._utils", "_rebuild_tensor_v2"): PickleCall(_tensor),
    ("torch._utils", "_rebuild_tensor_v3"): PickleCall(_tensor),
    ("torch._utils", "_rebuild_parameter"): PickleCall(lambda data, grad, hooks: data),
    ("torch.storage", "UntypedStorage"): None,  # of bytes
}
