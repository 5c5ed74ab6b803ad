"""Folders that are whole or not there: a lock, a temporary name, one rename at the end.

Problem: a job is killed while it saves, the disk fills, two jobs save to one place; the last checkpoint must survive all
of it. Idea: everything is written to `path.tmp-<token>`, flushed, and renamed to `path`, where an old folder is swapped
for the new one in one step. `path.lock` is held meanwhile (`flock`, which ends with its process, so a stale lock is one
that nobody holds). What a killed save left is removed by the next.

    with Writing(path) as folder:          # path.tmp-...; removed again if the block raises
        ...
    # path is the new folder now
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import re
import shutil
import socket
import time
import zlib
from pathlib import Path
from typing import Any

from colofunc.errors import CheckpointError

INDEX = "colofunc.json"
VERSION = 1
_HEAD = re.compile(rb'\{"crc32": "([0-9a-f]{8})", "checkpoint": ')


# ---- the index ----


def write_index(folder: Path, content: dict[str, Any]) -> None:
    """One line of JSON with the checksum of its content."""
    text = json.dumps({"version": VERSION, **content}, separators=(",", ":"), allow_nan=False).encode()
    write_durably(folder / INDEX, b'{"crc32": "%08x", "checkpoint": ' % zlib.crc32(text) + text + b"}\n")


def read_index(folder: Path) -> dict[str, Any]:
    """The content of a folder's index. Raises CheckpointError where it is missing, changed or of another version."""
    path = folder / INDEX
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{folder} holds no checkpoint of colofunc: {path.name} cannot be read ({error})") from error
    head = _HEAD.match(data)
    text = data[head.end() : -2] if head is not None else b""
    if head is None or int(head[1], 16) != zlib.crc32(text):
        raise CheckpointError(f"{path} is not what was saved (checksum); load another checkpoint, or copy this one again")
    content: dict[str, Any] = json.loads(text)
    if content["version"] != VERSION:
        raise CheckpointError(f"{path} is of version {content['version']}, this colofunc reads {VERSION}; use one of its time")
    return content


def write_durably(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


# ---- finding a folder ----


def resolve(path: str | os.PathLike[str]) -> Path:
    """The folder that `path` means: itself, or the last of those that a `*` in its name matches, by their numbers."""
    found = Path(path)
    if "*" in found.name:
        some = [p for p in found.parent.glob(found.name) if p.is_dir() and _is_checkpoint(p)]
        if not some:
            raise CheckpointError(f"no checkpoint matches {str(path)!r}")
        return max(some, key=_numbers)
    if not found.exists():
        # A swap in two steps that was interrupted between them.
        for old in sorted(found.parent.glob(found.name + ".old-*")):
            return old
        raise CheckpointError(f"there is no checkpoint at {str(path)!r}")
    return found


def _is_checkpoint(path: Path) -> bool:
    name = re.search(r"\.(tmp|old)-[\w-]+$", path.name)
    return name is None and any((path / f).exists() for f in (INDEX, ".metadata", "config.json"))


def _numbers(path: Path) -> tuple[list[int], str]:
    return [int(n) for n in re.findall(r"\d+", path.name)], path.name


def keep_newest(path: Path, count: int) -> None:
    """Remove all but the `count` newest of the checkpoints beside `path` whose names differ in numbers only."""
    shape = re.sub(r"\d+", "*", path.name)
    alike = [p for p in path.parent.glob(shape) if re.sub(r"\d+", "*", p.name) == shape and p.is_dir() and _is_checkpoint(p)]
    alike.sort(key=_numbers)
    for old in alike[:-count]:
        if old != path:
            for name in (INDEX, ".metadata"):  # first, so that one that is killed here leaves no half checkpoint
                (old / name).unlink(missing_ok=True)
            shutil.rmtree(old)
    for half in path.parent.glob(shape):
        if re.sub(r"\d+", "*", half.name) == shape and half.is_dir() and _is_half_removed(half):
            shutil.rmtree(half)
    for lock in path.parent.glob(shape + ".lock"):
        other = Lock(lock.with_name(lock.name.removesuffix(".lock")))
        if other.free():
            _remove_left(lock.with_name(lock.name.removesuffix(".lock")))
            other.release()


def _is_half_removed(path: Path) -> bool:
    """A save gives a folder its name when it is whole: files without an index were left when it was being removed."""
    files = {p.name for p in path.iterdir()}
    ours = re.compile(r"rank-\d{5}-\d{5}\.safetensors|__\d+_\d+\.distcp")
    return bool(files) and all(ours.fullmatch(name) for name in files)


def _remove_left(path: Path) -> None:
    """Remove what killed saves to `path` left; its lock is held."""
    for left in path.parent.glob(path.name + ".tmp-*"):
        shutil.rmtree(left)
    for left in path.parent.glob(path.name + ".old-*"):
        shutil.rmtree(left) if path.exists() else left.rename(path)


# ---- the lock ----


class Lock:
    """`path.lock`, held from `take` to `release`; the file says who has it."""

    def __init__(self, path: Path) -> None:
        self.path = path.with_name(path.name + ".lock")
        self._fd = -1

    def take(self) -> None:
        """Raises CheckpointError naming host and process where another one holds it."""
        while True:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = os.pread(fd, 4096, 0).decode(errors="replace") or "another process"
                os.close(fd)
                raise CheckpointError(
                    f"{holder} is saving to {str(self.path).removesuffix('.lock')!r}; wait for it, or save to another folder"
                ) from error
            if self._is_current(fd):
                break
            os.close(fd)  # the holder before us removed the file as we came
        self._fd = fd
        os.ftruncate(fd, 0)
        said = f"process {os.getpid()} on host {socket.gethostname()} (since {time.strftime('%Y-%m-%d %H:%M:%S')})"
        os.pwrite(fd, said.encode(), 0)

    def free(self) -> bool:
        """Take it where nobody holds it."""
        try:
            self.take()
        except CheckpointError:
            return False
        return True

    def _is_current(self, fd: int) -> bool:
        try:
            return os.fstat(fd).st_ino == os.stat(self.path).st_ino
        except FileNotFoundError:
            return False

    def release(self) -> None:
        if self._fd >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1


# ---- the folder that is being written ----


class Writing:
    """The temporary folder of a save to `path`; `commit` makes it `path`, `abandon` removes it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.realpath(path))  # a link stays one
        self.token = os.urandom(6).hex()
        self.folder = self.path.with_name(f"{self.path.name}.tmp-{self.token}")
        self._lock = Lock(self.path)

    def begin(self) -> Path:
        """Take the lock, remove what killed saves left, make the folder."""
        if self.path.is_file():
            raise CheckpointError(f"{str(self.path)!r} is a file; a checkpoint is a folder, give another name")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock.take()
        try:
            _remove_left(self.path)
            self.folder.mkdir()
        except BaseException:
            self._lock.release()
            raise
        return self.folder

    def rename(self, token: str) -> None:
        """Another rank has made the folder, with this token."""
        self.token = token
        self.folder = self.path.with_name(f"{self.path.name}.tmp-{token}")

    def commit(self) -> None:
        """Everything is written: make it durable and put it in the place of what was there."""
        sync(self.folder)
        if self.path.exists():
            self._swap()
        else:
            os.rename(self.folder, self.path)
        sync(self.path.parent)
        self._lock.release()

    def abandon(self) -> None:
        # Under another name first: other ranks may still be writing, and they look whether the folder is there.
        gone = self.folder.with_name(self.folder.name + "-gone")
        with contextlib.suppress(OSError):
            os.rename(self.folder, gone)
        shutil.rmtree(gone, ignore_errors=True)
        self._lock.release()

    def __enter__(self) -> Path:
        return self.begin()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self.abandon()
            return
        try:
            self.commit()
        except BaseException:
            self.abandon()
            raise

    def _swap(self) -> None:
        old = self.path.with_name(f"{self.path.name}.old-{self.token}")
        if exchange(self.folder, self.path):
            os.rename(self.folder, old)
        else:
            os.rename(self.path, old)
            os.rename(self.folder, self.path)
        shutil.rmtree(old)


def sync(path: Path) -> None:
    """Have a file or folder on disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


AT_FDCWD, RENAME_EXCHANGE = -100, 2


def exchange(a: Path, b: Path) -> bool:
    """Swap two folders in one step (Linux: renameat2 with RENAME_EXCHANGE); False where the system cannot."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return int(call(AT_FDCWD, os.fsencode(a), AT_FDCWD, os.fsencode(b), RENAME_EXCHANGE)) == 0
