"""The index of a saved folder: one line of JSON with its checksum, and the list of the files that were written with it.

    write_index(folder, {"state": tree, "tensors": {...}})      # behind all other files of the folder
    read_index(folder)["files"]                                  # {"rank-00000-00000.safetensors": 4096}
    files_written(folder)                                              # the same and the index; None where no save of ours made the folder
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from colofunc import untrusted
from colofunc.errors import CheckpointError

INDEX = "colofunc.json"
MARK = ".colofunc-writing"  # in a folder that is being written, from the start until it has its name
VERSION = 1
# the format of a folder that other libraries read: the index lists files and says nothing of tensors
PLAIN = "pretrained"
INCOMPLETE = "incomplete"  # the format of a folder whose files are being exchanged one by one
_HEAD = re.compile(rb'\{"crc32": "([0-9a-f]{8})", "checkpoint": ')
# Names that `cf.save` gives.
_ENDINGS = (".safetensors", ".distcp", ".metadata", ".json")  # all else is ours with its size only
_NAMED = re.compile(r"rank-\d{5}-\d{5}\.safetensors|__\d+_\d+\.distcp|\.metadata")


def write_index(folder: Path, content: dict[str, Any], kept: Mapping[str, int | None] | None = None) -> None:
    """Write the index of a folder whose other files are all there, which it lists. kept: files that will be put beside
    them.
    """
    files = {**(kept or {}), **{entry.name: entry.stat().st_size for entry in os.scandir(folder) if _is_listed(entry)}}
    write_durably(folder / INDEX, index_bytes({**content, "files": files}))


def _is_listed(entry: os.DirEntry[str]) -> bool:
    return entry.is_file(follow_symlinks=False) and entry.name not in (INDEX, MARK)


def index_bytes(content: dict[str, Any]) -> bytes:
    """One line of JSON with the checksum of its content."""
    text = json.dumps({"version": VERSION, **content}, separators=(",", ":"), allow_nan=False).encode()
    return b'{"crc32": "%08x", "checkpoint": ' % zlib.crc32(text) + text + b"}\n"


def read_index(folder: Path) -> dict[str, Any]:
    """The content of a folder's index. Raises CheckpointError where it is missing, changed or of another version."""
    path = folder / INDEX
    try:
        data = untrusted.read_bytes(path)
    except (OSError, untrusted.Wrong) as error:
        raise CheckpointError(
            f"{folder} holds no checkpoint of colofunc: {path.name} cannot be read ({error})"
        ) from error
    head = _HEAD.match(data)
    text = data[head.end() : -2] if head is not None else b""
    if head is None or int(head[1], 16) != zlib.crc32(text):
        raise CheckpointError(
            f"{path} is not what was saved (checksum); load another checkpoint, or copy this one again"
        )
    try:
        content = untrusted.check(dict[str, Any], untrusted.parse_json(text), "the index")
        for name in untrusted.check(dict[str, int | None], content.get("files", {}), "files"):
            if name in ("", ".", "..") or "/" in name or "\0" in name:
                raise untrusted.Wrong(f"files has {name!r:.80}, which is no name of a file in this folder")
    except untrusted.Wrong as error:
        raise CheckpointError(f"{path} is damaged: {error}; load another checkpoint") from error
    if content.get("version") != VERSION:
        raise CheckpointError(
            f"{path} is of version {content.get('version')!r:.80}, this colofunc reads {VERSION}; use one of its time"
        )
    return dict(content)


def files_written(folder: Path) -> dict[str, int | None] | None:
    """The files that the save which made this folder wrote, with their sizes; None where no save of colofunc made it.

    An index that somebody crafted makes no file its own that has another name than saves give.
    """
    try:
        content = read_index(folder)
    except CheckpointError:
        return None
    files = content.get("files")
    if files is None:  # written before the index listed them
        files = dict.fromkeys(os.listdir(folder))
    if content.get("format") not in (PLAIN, INCOMPLETE):
        files = {name: size for name, size in files.items() if _NAMED.fullmatch(name)}
    files = {name: size for name, size in files.items() if size is not None or name.endswith(_ENDINGS)}
    return {**files, INDEX: None, MARK: None}


def format_of(folder: Path) -> str | None:
    """The format that a folder's index names; None where no save of colofunc made it."""
    try:
        return str(read_index(folder).get("format", "safetensors"))
    except CheckpointError:
        return None


def write_durably(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
