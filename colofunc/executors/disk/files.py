"""The files behind the disk tier: where they lie, who owns them, and how bytes reach them.

Problem: data that does not fit in memory lies in files, and a process can be killed, a disk can fill up and a directory
can vanish at any moment. Idea: two files of equal layout, each with room for every chunk, taken from the file system
before the first use. Every process has a folder of its own, locked while the process lives, so that what a dead one
left can be told from what a living one uses. Which of the two versions counts is known to the process alone: no other
reads it.

    directory/                            named by the user, must exist
      colofunc-disk-rank00000-3f9c.../    one store
        lock                              held with flock(2); says host, process and rank
        version-0, version-1              chunk k at the same offset in both, offsets and lengths rounded up to 4096 bytes

Bytes pass the page cache where the file system can (`direct_io`): a training step must not push its own data out of
memory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import platform
import re
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from colofunc import owned
from colofunc.errors import DiskError
from colofunc.executors.direct_io import ByteArray, is_direct, read_at, set_direct, write_at
from colofunc.executors.disk.layout import VERSIONS, DiskLayout, disk_bytes
from colofunc.mesh.sizes import size_text

LOCK = "lock"
PREFIX = "colofunc-disk-rank"

TRY = {
    errno.ENOSPC: "free space there, or name a directory of a larger file system",
    errno.EDQUOT: "free space within the quota, or name a directory of another file system",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), or name a directory of another file system",
    errno.EACCES: "name a directory that this user may write to",
    errno.EPERM: "name a directory that this user may write to",
    errno.EROFS: "name a directory that this user may write to",
    errno.ENOENT: "name a directory that nothing removes while it is in use",
}


def disk_error(doing: str, path: str | os.PathLike[str], error: OSError, more: str = "") -> DiskError:
    hint = TRY.get(error.errno or 0, "look at the disk and its file system, or name another directory")
    return DiskError(f"{doing} {os.fspath(path)!r}: {error.strerror or error}{more}. Try: {hint}")


# ---- the folder of one store ----


class Files:
    """The open files of a store in this process. Made by `create`, which owns the lock; `shut` ends it."""

    def __init__(self, path: Path, lock_fd: int, layout: DiskLayout) -> None:
        self.path, self.layout = path, layout
        self.owner = os.getpid()
        self._lock_fd = lock_fd
        self._folder_fd = owned.open_folder(path)
        self._fds: list[int] = []

    def allocate(self) -> None:
        for name in VERSIONS[: self.layout.versions]:
            # Opened without O_DIRECT: a file system that refuses it would have made the file already.
            flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CREAT | os.O_EXCL
            self._fds.append(os.open(name, flags, 0o600, dir_fd=self._folder_fd))
            if self.layout.file_bytes:
                os.posix_fallocate(self._fds[-1], 0, self.layout.file_bytes)
            set_direct(self._fds[-1], True)

    @property
    def direct(self) -> bool:
        """Whether bytes pass the page cache."""
        return all(is_direct(fd) for fd in self._fds)

    def write(self, version: int, data: ByteArray, at: int) -> None:
        """All of `data` to byte `at`; both are multiples of a page."""
        fd = self._fds[version]
        if os.fstat(fd).st_nlink == 0:  # the system would go on writing to a file that nobody can find
            raise FileNotFoundError(errno.ENOENT, "the file was removed")
        write_at(fd, data, at)

    def read(self, version: int, into: ByteArray, at: int) -> None:
        count = read_at(self._fds[version], into, at)
        if count < len(into):
            raise OSError(errno.EIO, f"the file ends at byte {at + count}")

    def shut(self) -> None:
        """Close everything, remove the files, give the lock back. Not for a forked process."""
        for fd in self._fds:
            os.close(fd)
        _erase(self.path, self._folder_fd)
        os.close(self._folder_fd)
        _unlock(self._lock_fd)


def create(directory: str | os.PathLike[str], layout: DiskLayout, rank: int) -> Files:
    """A folder with everything allocated. Raises DiskError before anything is left behind."""
    parent = owned.given(directory, "disk", DiskError)
    if not parent.exists():
        raise DiskError(f"the disk directory {str(parent)!r} does not exist. Try: mkdir -p {parent}")
    if not parent.is_dir():
        raise DiskError(f"the disk directory {str(parent)!r} is a file. Try: name a directory")
    try:
        others = _sweep(parent)
        _check_room(parent, layout, others)
        path, lock_fd = _make(parent, rank)
    except DiskError:
        raise
    except OSError as error:
        raise disk_error("cannot make a store in", parent, error) from error
    files = Files(path, lock_fd, layout)
    try:
        files.allocate()
    except BaseException as error:
        files.shut()
        if isinstance(error, OSError):
            raise disk_error("cannot allocate in", parent, error, f" ({_room(parent, layout)})") from error
        raise
    return files


def _room(parent: Path, layout: DiskLayout) -> str:
    room = os.statvfs(parent)
    free, needed = room.f_bavail * room.f_frsize, disk_bytes(layout.sizes, layout.versions)
    versions = "two versions" if layout.versions > 1 else "one version"
    return (
        f"needed: {size_text(needed)} = {needed} bytes for {versions} of every chunk ({len(layout.sizes)}); "
        f"free: {size_text(free)} = {free} bytes"
    )


def _check_room(parent: Path, layout: DiskLayout, others: Sequence[Path]) -> None:
    room = os.statvfs(parent)
    if disk_bytes(layout.sizes, layout.versions) > room.f_bavail * room.f_frsize:
        lying = f"; stores that lie there: {', '.join(sorted(path.name for path in others))}" if others else ""
        why = f"has too little room ({_room(parent, layout)}{lying})"
        raise DiskError(f"the disk directory {str(parent)!r} {why}. Try: {TRY[errno.ENOSPC]}")


# ---- locks: whose folder it is ----


def _make(parent: Path, rank: int) -> tuple[Path, int]:
    """A new folder with its lock held.

    One that sweeps at the same moment can only take it away before it is locked: then again.
    """
    while True:
        path = parent / f"{PREFIX}{rank:05d}-{secrets.token_hex(6)}"
        path.mkdir(0o700)
        try:
            fd = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except FileNotFoundError:
            continue
        if _lock(fd):
            os.pwrite(fd, json.dumps({"host": platform.node(), "pid": os.getpid(), "rank": rank}).encode(), 0)
            return path, fd


def _lock(fd: int) -> bool:
    """Take the lock of an open file; False (and closed) where another has it or has removed it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return False
    except BaseException:
        os.close(fd)
        raise
    if os.fstat(fd).st_nlink == 0:
        os.close(fd)
        return False
    return True


def _unlock(fd: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_UN)  # said aloud: a forked child may still have the file open
    os.close(fd)


def _owner(fd: int) -> dict[str, Any]:
    """What the lock says; nothing where its owner was killed before it could sign, or where it is no lock of ours."""
    try:
        said = json.loads(os.pread(fd, 4096, 0))
    except (ValueError, RecursionError):
        return {}
    kinds = {"host": str, "pid": int, "rank": int}
    signed = (
        type(said) is dict
        and said.keys() == kinds.keys()
        and all(type(said[key]) is kind for key, kind in kinds.items())
    )
    return said if signed else {}


def _open_lock(path: Path) -> int:
    """The lock of a store. Raises OSError where it, or the store, is a link."""
    folder_fd = owned.open_folder(path)
    try:
        return os.open(LOCK, os.O_RDWR | os.O_NOFOLLOW, dir_fd=folder_fd)
    finally:
        os.close(folder_fd)


def _stores(parent: Path) -> Iterator[Path]:
    """Folders that have the names of stores, and are no links."""
    pattern = re.compile(rf"{PREFIX}\d{{5}}-[0-9a-f]{{12}}")
    yield from (p for p in sorted(parent.iterdir()) if pattern.fullmatch(p.name) and p.is_dir() and not p.is_symlink())


def _sweep(parent: Path) -> list[Path]:
    """Remove what dead processes of this host left; the other stores that lie there."""
    others = []
    for path in _stores(parent):
        try:
            fd = _open_lock(path)
        except FileNotFoundError:
            with contextlib.suppress(OSError):
                path.rmdir()  # one that was killed between its first two system calls: empty
            continue
        except OSError:
            others.append(path)  # another user's, or no store
            continue
        if not _lock(fd):
            others.append(path)
            continue
        owner = _owner(fd)
        if owner.get("host") == platform.node():
            folder_fd = owned.open_folder(path)
            _erase(path, folder_fd)
            os.close(folder_fd)
        else:
            others.append(path)
        _unlock(fd)
    return others


def _erase(path: Path, folder_fd: int) -> None:
    # The lock last: without it nobody would finish this.
    owned.remove_files(folder_fd, dict.fromkeys((*VERSIONS, LOCK)), last=LOCK)
    with contextlib.suppress(OSError):  # gone, or moved, or it holds files of somebody else
        path.rmdir()
