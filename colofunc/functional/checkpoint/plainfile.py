"""Folders and files of plain safetensors, as Hugging Face libraries write them: names, shapes and where the bytes are.

    entries(folder, (WHOLE,))["model.norm.weight"].shape      # from model.safetensors, or the files that an index names
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from colofunc import untrusted
from colofunc.errors import CheckpointError
from colofunc.functional.checkpoint.files import NAMES, StoredPiece, read_piece
from colofunc.functional.checkpoint.place import Entry
from colofunc.spec.regions import Region

WHOLE = "model"
"""How the names of weight files of whole models begin, where their library has no name of its own."""
WHOLE_COPY = "another copy of the file, from where it was saved or downloaded"
OWN = re.compile(r"rank-\d{5}-\d{5}\.safetensors")  # files of cf.save
_DTYPES = {name: dtype for dtype, name in NAMES.items()}
MOST_HEADER_BYTES = 100_000_000  # the format's own limit


def entries(folder: Path, stems: Sequence[str]) -> dict[str, Entry]:
    """Name -> tensor of a folder, in which names of files of a whole model begin with one of `stems`.

    Raises CheckpointError where there are no safetensors, and says why pickles are not read.
    """
    found: dict[str, Entry] = {}
    for path in files(folder, stems):
        found |= read_header(path)
    return found


def single(stem: str) -> str:
    """The name of the file of a model that is not split."""
    return f"{stem}.safetensors"


def index_name(stem: str) -> str:
    """The name of the list of the files of one that is."""
    return f"{stem}.safetensors.index.json"


def weight_globs(stem: str) -> tuple[str, ...]:
    """What matches the names of weight files and of their list."""
    return (index_name(stem), single(stem), f"{stem}-*-of-*.safetensors")


def holds_whole(folder: Path, stems: Sequence[str]) -> bool:
    """Whether the folder has the weights of a model, and not those of adapters alone."""
    return any((folder / name).exists() for stem in stems for name in (index_name(stem), single(stem)))


def files(folder: Path, stems: Sequence[str]) -> list[Path]:
    if folder.is_file():
        return [folder]
    for stem in stems:
        if (folder / index_name(stem)).exists():
            return _listed(folder, folder / index_name(stem))
        if (folder / single(stem)).exists():
            return [folder / single(stem)]
    some = sorted(folder.glob("*.safetensors"))
    if not some:
        raise CheckpointError(_nothing(folder))
    if all(OWN.fullmatch(path.name) for path in some):
        if (folder / "colofunc.json").exists():
            raise CheckpointError(
                f"{folder} holds a state that cf.save wrote, and no model's own files. Try: state = cf.load({str(folder)!r})"
            )
        raise CheckpointError(
            f"{folder} holds parts of tensors, but not their index colofunc.json; the checkpoint is incomplete"
        )
    return some


def _listed(folder: Path, listing: Path) -> list[Path]:
    try:
        names = sorted(set(untrusted.read_json(listing)["weight_map"].values()))
    except OSError as error:
        raise CheckpointError(f"{listing} cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{listing} is no index of safetensors: {error!r}") from error
    return [_inside(folder, listing, name) for name in names]


def _inside(folder: Path, listing: Path, name: Any) -> Path:
    if not isinstance(name, str) or Path(name).name != name:
        raise CheckpointError(f"{listing} names the file {name!r}, which is not one of its folder")
    return folder / name


def _nothing(folder: Path) -> str:
    pickles = sorted(p.name for end in ("*.bin", "*.pt", "*.pth", "*.ckpt") for p in folder.glob(end))
    if pickles:
        return (
            f"{folder} holds its weights as a pickle, {pickles[0]!r}, which may run code when it is read; where you "
            "trust it, convert it once: Model.from_pretrained(folder).save_pretrained(other_folder)"
        )
    return f"{folder} holds no checkpoint: no colofunc.json, no .metadata of torch.distributed.checkpoint, no *.safetensors"


def read_header(path: Path) -> dict[str, Entry]:
    """Name -> tensor of one safetensors file."""
    try:
        with untrusted.open_file(path) as file:
            length = int.from_bytes(file.read(8), "little")
            if length > MOST_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            data = untrusted.parse_json(file.read(length))
            size = file.seek(0, 2)
        data.pop("__metadata__", None)
        return {name: _entry(path, name, said, 8 + length, size) for name, said in data.items()}
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = str(error) if isinstance(error, untrusted.Wrong) else repr(error)
        raise CheckpointError(f"{path} is no safetensors file: {why}. Try: {WHOLE_COPY}") from error


def _entry(path: Path, name: str, said: dict[str, Any], base: int, size: int) -> Entry:
    shape = tuple(int(n) for n in said["shape"])
    if said["dtype"] not in _DTYPES:
        raise CheckpointError(f"{path}: {name!r} has dtype {said['dtype']!r}, which torch cannot hold")
    dtype, (begin, end) = _DTYPES[said["dtype"]], said["data_offsets"]
    region = Region.whole(shape)
    if region.numel * dtype.itemsize != end - begin:
        raise CheckpointError(f"{path}: {name!r} {shape} {said['dtype']} does not have {end - begin} bytes")
    if base + end > size:
        raise CheckpointError(
            f"{path} is truncated: {name!r} should reach byte {base + end}, the file has {size}. Try: {WHOLE_COPY}"
        )
    piece = StoredPiece(path.name, base + begin, end - begin, region, b"")
    return Entry(name, shape, dtype, ((region, piece),), partial(_read, path.parent, name, dtype))


def _read(folder: Path, name: str, dtype: torch.dtype, piece: StoredPiece, picks: Any) -> torch.Tensor:
    return read_piece(folder, name, dtype, piece, picks, verify=False)
