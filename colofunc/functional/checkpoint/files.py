"""Files of tensors: safetensors, written and read in pieces, with a checksum for every block.

Problem: a rank needs some rows of a tensor, and a flipped bit in them must not pass. Idea: the file is an ordinary
safetensors file (https://huggingface.co/docs/safetensors: length of the header, JSON header, data); beside it, in the
index of the checkpoint, stands a CRC-32 of every MiB of every stored piece. A reader fetches whole blocks, only those
that hold what it needs, and checks each. Written here and not by the library, because its writer holds the interpreter
lock, which would stop training while a save runs in the background, and returns no checksums.

    pieces = write_file(folder / "a.safetensors", [PieceToWrite("w", (4, 8), torch.float32, region, lambda: w)])
    read_piece(folder, "w", torch.float32, pieces[0], picks)
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

from colofunc.errors import CheckpointError
from colofunc.functional.checkpoint.disk import FileStream, fetch, stream_to_disk
from colofunc.functional.checkpoint.pages import empty
from colofunc.spec.regions import Pick, Region, extent, take

BLOCK_BYTES = 1 << 20
# The names of the format; a dtype that it lacks is stored as bytes (the index knows what they are).
NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0", torch.complex64: "C64",
}  # fmt: skip
# What moves elements of a given size: not every dtype has indexing kernels.
CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


@attrs.frozen
class PieceToWrite:
    """A piece to be written: `value()` gives the elements of `region`.

    `on_disk`: it reads them from there, in its turn.
    """

    name: str
    dtype: torch.dtype
    region: Region
    value: Callable[[], torch.Tensor]
    on_disk: bool = False

    @property
    def nbytes(self) -> int:
        return self.region.numel * self.dtype.itemsize


@attrs.frozen
class StoredPiece:
    """A stored piece: where its bytes are, which elements they are, and the checksums of their blocks."""

    file: str
    start: int
    nbytes: int
    region: Region
    sums: bytes  # 4 bytes a block, little endian

    def to_json(self) -> list[Any]:
        return [self.file, self.start, self.nbytes, self.region.to_json(), base64.b64encode(self.sums).decode()]

    @staticmethod
    def from_json(data: Sequence[Any]) -> StoredPiece:
        """Raises ValueError where the checksums are not those of so many bytes."""
        file, start, nbytes, region, sums = data
        checksums = base64.b64decode(sums, validate=True)
        if start < 0 or nbytes < 0 or len(checksums) != 4 * -(-nbytes // BLOCK_BYTES):
            raise ValueError(f"a piece of {nbytes} bytes from byte {start} on has {len(checksums) // 4} checksums")
        return StoredPiece(file_inside(file), start, nbytes, Region.from_json(region), checksums)


def file_inside(file: Any) -> str:
    """The name of a file as an index gives it. Raises CheckpointError where it leads out of the folder."""
    name = str(file)
    if not name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise CheckpointError(f"the checkpoint names the file {name!r}, which is not one of its folder; it is not read")
    return name


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(
            f"this torch has no dtype {name!r}, which the checkpoint holds; load it with a newer torch"
        )
    return found


# ---- writing ----


def bytes_of(x: torch.Tensor) -> memoryview:
    """The elements of a tensor as bytes in row-major order; a view where it lies so in host memory."""
    plain = x.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    if plain.stride() != (1,):  # a single element counts as contiguous with any stride, and cannot be viewed as bytes
        plain = plain.clone(memory_format=torch.contiguous_format)
    return memory_of_bytes(plain.view(torch.uint8))


def memory_of_bytes(x: torch.Tensor) -> memoryview:
    """The memory of a tensor of bytes."""
    array: Any = x.numpy()
    return memoryview(array)


def header(items: Sequence[PieceToWrite]) -> bytes:
    """The safetensors header of a file that holds these items one after another."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for item in items:
        name = NAMES.get(item.dtype)
        shape = item.region.shape if name is not None else (item.nbytes,)
        entries[item.name] = {"dtype": name or "U8", "shape": list(shape), "data_offsets": [start, start + item.nbytes]}
        start += item.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_file(path: Path, items: Sequence[PieceToWrite]) -> list[StoredPiece]:
    """Write and flush one file; the pieces in order. Values are asked for one at a time."""
    head = header(items)
    pieces = []
    with open(path, "xb", buffering=0) as file, stream_to_disk(file.fileno()) as out:
        out.write(memoryview(head))
        start = len(head)
        for item in items:
            sums = _write_blocks(out, bytes_of(item.value()))
            pieces.append(StoredPiece(path.name, start, item.nbytes, item.region, sums))
            start += item.nbytes
    return pieces


def _write_blocks(out: FileStream, data: memoryview) -> bytes:
    """Their checksums.

    Summing and copying release the interpreter lock, and a block that was summed is in the processor's cache.
    """
    sums = np.zeros(-(-len(data) // BLOCK_BYTES), dtype="<u4")
    for k in range(len(sums)):
        block = data[k * BLOCK_BYTES : (k + 1) * BLOCK_BYTES]
        sums[k] = zlib.crc32(block)
        out.write(block)
    return sums.tobytes()


# ---- reading ----


def read_piece(
    folder: Path, name: str, dtype: torch.dtype, piece: StoredPiece, picks: Sequence[Pick], verify: bool = True
) -> torch.Tensor:
    """The elements at `picks` of a stored piece, read with no more blocks than they need.

    Raises CheckpointError that names the file and the tensor where bytes are missing or differ from what was written.
    """
    shape = piece.region.shape or (1,)
    picks = picks or (slice(0, 1, 1),)
    row_bytes = dtype.itemsize * prod(shape[1:])
    low, high = extent(picks[0])
    begin, end = low * row_bytes, high * row_bytes
    if begin >= end:
        return torch.empty(
            [len(range(size)[p]) if isinstance(p, slice) else len(p) for size, p in zip(shape, picks)], dtype=dtype
        )
    first, needed = _needed_blocks(shape, picks, dtype.itemsize)
    base = min(begin, first * BLOCK_BYTES)
    stop = max(end, min((first + len(needed)) * BLOCK_BYTES, piece.nbytes))
    # Untouched pages of an empty tensor cost no memory, so that blocks which are not read may have their place in it.
    buffer = empty(stop - base)
    _read_blocks(folder, name, piece, first, needed, memory_of_bytes(buffer[first * BLOCK_BYTES - base :]), verify)
    rows = buffer[begin - base : end - base].view(CARRIERS[dtype.itemsize])
    inner = take(rows.reshape(high - low, *shape[1:]), [shifted(picks[0], low), *picks[1:]])
    return inner.view(dtype) if piece.region.shape else inner.view(dtype).reshape(())


def shifted(pick: Pick, by: int) -> Pick:
    """The same rows, counted from row `by` on."""
    return slice(pick.start - by, pick.stop - by, pick.step) if isinstance(pick, slice) else pick - by


def _needed_blocks(shape: Sequence[int], picks: Sequence[Pick], itemsize: int) -> tuple[int, np.ndarray]:
    """The first block that is needed; for it and each after it to the last: whether it is."""
    spans = [extent(pick) for pick in picks]
    split = max((d for d, ((a, b), n) in enumerate(zip(spans, shape, strict=True)) if (a, b) != (0, n)), default=0)
    inner = itemsize * prod(shape[split + 1 :])
    starts = np.zeros(1, dtype=np.int64)
    for d in range(split):
        at = np.arange(shape[d])[picks[d]]
        starts = (starts[:, None] * shape[d] + at).reshape(-1)
    starts = starts * shape[split]
    low = (starts + spans[split][0]) * inner // BLOCK_BYTES
    high = ((starts + spans[split][1]) * inner - 1) // BLOCK_BYTES
    edges = np.zeros(int(high.max()) - int(low.min()) + 2, dtype=np.int64)
    np.add.at(edges, low - low.min(), 1)
    np.add.at(edges, high - low.min() + 1, -1)
    return int(low.min()), np.cumsum(edges[:-1]) > 0


def _read_blocks(
    folder: Path, name: str, piece: StoredPiece, first: int, needed: np.ndarray, target: memoryview, verify: bool
) -> None:
    """Read the needed blocks to their places in `target`, which begins at block `first`."""
    sums = np.frombuffer(piece.sums, dtype="<u4")
    path = folder / piece.file
    wanted = (first + np.flatnonzero(needed)).tolist()
    blocks = []
    for k in wanted:
        begin, end = k * BLOCK_BYTES, min((k + 1) * BLOCK_BYTES, piece.nbytes)
        blocks.append((piece.start + begin, target[begin - first * BLOCK_BYTES : end - first * BLOCK_BYTES]))

    def check(at: int, count: int) -> None:
        k, memory = wanted[at], blocks[at][1]
        if count < len(memory):
            raise CheckpointError(
                f"{path} is truncated: {name!r} should reach byte {piece.start + piece.nbytes}, the file has "
                f"{path.stat().st_size}; load another checkpoint, or copy this one again"
            )
        if verify and (k >= len(sums) or zlib.crc32(memory) != sums[k]):
            raise CheckpointError(
                f"{path}: the bytes of {name!r} {piece.region.text()} are not those that were saved (checksum of block "
                f"{k}); load another checkpoint, or copy this one again"
            )

    try:
        fetch(path, blocks, check)
    except OSError as error:
        raise CheckpointError(
            f"{path}, which holds {name!r}, cannot be read ({error}); the checkpoint is incomplete"
        ) from error
