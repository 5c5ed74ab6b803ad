"""What `torch.save` wrote, read as data: plain containers, numbers, strings and tensors of a zip archive.

Problem: `torch.load(weights_only=True)` trusts the sizes that the file claims and gives memory for them. Idea: records are
stored, so that each is a range of the bytes that are there, and a tensor is a view of that range, within its bounds.

    read_saved(memory, verify=True)         # memory: bytearray of one archive
"""

from __future__ import annotations

import io
import zipfile
from typing import Any

import torch

from colofunc.functional.checkpoint.unpickled import Maker, NoPickle, Record, read_pickle

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
    """The object. Tensors share `memory`. Raises Changed for a record with another checksum, other errors for damaged archives."""
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
    return read_pickle(bytes(parts["data.pkl"]), _known, lambda said: _storage(said, parts))


def _range(memory: bytearray, info: zipfile.ZipInfo) -> memoryview:
    """The bytes of a stored record."""
    lengths = memory[info.header_offset + 26 : info.header_offset + _LOCAL_HEADER_BYTES]
    start = info.header_offset + _LOCAL_HEADER_BYTES + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
    part = memoryview(memory)[start : start + info.file_size]
    if len(part) < info.file_size:
        raise NoPickle(f"{info.filename!r} reaches over the end")
    return part


def _known(module: str, name: str) -> Any:
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
    """A view of a storage. more: a dtype, for those that have no storage of their own; torch's flags, which plain values lack."""
    dtypes = [item for item in more if isinstance(item, torch.dtype)]
    if type(storage) is not Record or storage.kind != "storage" or any(item for item in more if item not in dtypes):
        raise NoPickle("it has a tensor that is no plain one")
    part, dtype = storage.args
    dtype = dtypes[0] if dtypes else dtype
    if not len(part):
        return torch.empty(tuple(size), dtype=dtype) if 0 in size else torch.empty(0, dtype=dtype).as_strided(size, stride, offset)
    flat = torch.frombuffer(part, dtype=dtype)
    return flat.as_strided(tuple(size), tuple(stride), offset)


_MAKERS: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): Maker(lambda *pairs: dict(*pairs)),
    ("torch", "Size"): Maker(lambda *sizes: torch.Size(*sizes)),
    ("torch", "device"): Maker(lambda *words: torch.device(*words)),
    ("torch._utils", "_rebuild_tensor_v2"): Maker(_tensor),
    ("torch._utils", "_rebuild_tensor_v3"): Maker(_tensor),
    ("torch._utils", "_rebuild_parameter"): Maker(lambda data, grad, hooks: data),
    ("torch.storage", "UntypedStorage"): None,  # of bytes
}

__all__ = ["Changed", "read_saved", "torch_dtype"]
