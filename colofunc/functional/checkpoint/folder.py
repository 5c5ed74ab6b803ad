"""Folders that are whole or not there: a lock, a temporary name, one rename at the end.

Problem: a job is killed while it saves, the disk fills, two jobs save to one place; the last checkpoint must survive
all of it, and so must everything that is no checkpoint. Idea: everything is written to `path.tmp-<token>`, flushed, and
renamed to `path`, where an old checkpoint is swapped for the new one in one step. `path.colofunc-lock` is held
meanwhile (`flock`, which ends with its process, so a stale lock is one that nobody holds). What a killed save left is
removed by the next.

    with Writing(path) as folder:          # path.tmp-...; removed again if the block raises
        ...
    # path is the new folder now

The index of a folder lists the files that were written with it (`index.py`). Only these are replaced or removed; other
files of the folder stay. A folder with other files and no index is refused unless `overwrite` is said.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import attrs

from colofunc import owned
from colofunc.errors import CheckpointError
from colofunc.functional.checkpoint.index import (
    INCOMPLETE,
    INDEX,
    MARK,
    PLAIN,
    files_written,
    format_of,
    index_bytes,
    write_durably,
)

TOKEN_LETTERS = 12
LOCK = ".colofunc-lock"
HOLDER = b"process "  # what a lock begins with


@attrs.frozen
class SavePlace:
    """Where a save has its lock and its temporary folders: beside its folder, or in it (`name` is then empty)."""

    parent: Path
    name: str

    def named(self, ending: str) -> Path:
        return self.parent / f"{self.name}{ending}"


def _beside(path: Path) -> SavePlace:
    return SavePlace(path.parent, path.name)


# ---- finding a folder ----


def resolve_folder(path: str | os.PathLike[str]) -> Path:
    """The folder that `path` means: itself, or the last of those that a `*` in its name matches, by their numbers."""
    found = owned.given(path, "load", CheckpointError)
    if "*" in found.name:
        some = [p for p in found.parent.glob(found.name) if p.is_dir() and _is_checkpoint(p)]
        if not some:
            raise CheckpointError(
                f"no checkpoint matches {str(path)!r}. Try: a name with * for the number, such as 'run/step-*'"
            )
        return max(some, key=_numbers)
    if not found.exists():
        # A swap in two steps that was interrupted between them.
        for old in _left(_beside(found), "old"):
            return old
        raise CheckpointError(
            f"there is no checkpoint at {str(path)!r}. Try: a folder that cf.save has written; 'run/step-*' is the last of "
            "several"
        )
    return found


def _is_checkpoint(path: Path) -> bool:
    name = re.search(r"\.(tmp|old|gone)-[\w-]+$", path.name)
    return name is None and any((path / f).exists() for f in (INDEX, ".metadata", "config.json"))


def _numbers(path: Path) -> tuple[list[int], str]:
    return [int(n) for n in re.findall(r"\d+", path.name)], path.name


# ---- removing what is older ----


def keep_newest(path: Path, count: int) -> None:
    """Remove all but the `count` newest of the checkpoints beside `path` whose names differ in numbers only.

    Of each, the files that its own index lists: what somebody put beside them stays, and so does a folder of anybody
    else's.
    """
    alike = [p for p in _alike(path, "") if not p.is_symlink() and p.is_dir() and files_written(p) is not None]
    alike.sort(key=_numbers)
    for old in alike[:-count]:
        if old != path:
            _retire(old)
    for ending in (".gone-", LOCK):
        for left in _alike(path, ending):
            _finish(left.with_name(left.name[: left.name.rindex(ending)]))


def _alike(path: Path, ending: str) -> list[Path]:
    """What lies beside `path` with its name, but for numbers, and this ending.

    One that ends in "-" may have a token behind it.
    """
    words = [re.escape(word) for word in re.split(r"\d+", path.name)]
    token = "[0-9a-f]{12}" if ending.endswith("-") else ""
    pattern = re.compile(r"\d+".join(words) + re.escape(ending) + token)
    return [p for p in sorted(path.parent.iterdir()) if pattern.fullmatch(p.name)]


def _retire(old: Path) -> None:
    """Remove a checkpoint; one that is killed here leaves no half of it under a name that is loaded."""
    gone = old.with_name(f"{old.name}.gone-{os.urandom(6).hex()}")
    os.rename(old, gone)
    _discard(gone, old)


def _finish(path: Path) -> None:
    """Remove what killed processes left of `path`, unless one is saving to it."""
    lock = Lock(_beside(path), path)
    if lock.free():
        _remove_left(_beside(path), path)
        lock.release()


def _left(place: SavePlace, kind: str) -> Iterator[Path]:
    """Folders of checkpoints that saves to a place have named: kind "tmp", "old" or "gone" and a token."""
    pattern = re.compile(re.escape(place.name) + rf"\.{kind}-[0-9a-f]{{{TOKEN_LETTERS}}}(-gone)?")
    if place.parent.is_dir():
        named = [
            p for p in sorted(place.parent.iterdir()) if pattern.fullmatch(p.name) and p.is_dir() and not p.is_symlink()
        ]
        yield from (p for p in named if (p / MARK).is_file() or files_written(p) is not None or not os.listdir(p))


def _remove_left(place: SavePlace, path: Path) -> None:
    """Remove what killed saves to `path` left; its lock is held."""
    for left in _left(place, "tmp"):
        if (left / MARK).is_file():
            shutil.rmtree(left)
        else:  # it has changed places with `path` already
            _discard(left, path)
    for left in _left(place, "old"):
        if path.exists():
            _discard(left, path)
        else:
            left.rename(path)
    for left in _left(place, "gone"):
        _discard(left, path)


def _discard(old: Path, new: Path) -> None:
    """Remove the files of an old checkpoint.

    What else was in its folder goes to the new one, or stays where there is none.
    """
    ours, listed = files_written(old) or {}, files_written(new) or {}
    others = owned.foreign(old, ours)
    kept = [name for name in ours if name in listed and name not in (INDEX, MARK)]
    for name in [*others, *kept] if new.is_dir() else ():
        target = new / name
        if not os.path.lexists(old / name):
            continue
        if not os.path.lexists(target):
            os.rename(old / name, target)
        elif name in listed or os.path.samestat(os.lstat(old / name), os.lstat(target)):
            (old / name).unlink()  # overwriting it was asked for, or this is a second link to it
    if not owned.remove(old, ours, last=INDEX) and not new.exists():
        os.rename(old, new)  # other files, under the name that they were given


# ---- the lock ----


class Lock:
    """`path.colofunc-lock`, held from `take` to `release`; the file says who has it."""

    def __init__(self, place: SavePlace, of: Path) -> None:
        self.path = place.named(LOCK)
        self._of = of
        self._fd = -1

    def take(self) -> None:
        """Raises CheckpointError naming host and process where another one holds it."""
        while True:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = os.pread(fd, 4096, 0).decode(errors="replace") or "another process"
                os.close(fd)
                raise CheckpointError(
                    f"{holder} is saving to {str(self._of)!r}; wait for it, or save to another folder"
                ) from error
            said_before = os.pread(fd, len(HOLDER), 0)
            if said_before not in (b"", HOLDER):
                os.close(fd)
                raise CheckpointError(
                    f"{str(self.path)!r} is no lock of colofunc; it was not touched. Save under another name"
                )
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

    def __init__(self, path: str | os.PathLike[str], overwrite: bool = False, kin: Sequence[str] = ()) -> None:
        """overwrite: a folder that no save made may be written into; files in it that get no new content stay.

        kin: globs of the files that readers of such a folder look for. With them other files may have been there
        before; only those that match are in the way, `overwrite` removes them, and what earlier saves wrote beside them
        is kept.
        """
        self.path = Path(os.path.realpath(owned.given(path, "save", CheckpointError)))  # a link stays one
        if not self.path.name:
            raise CheckpointError(
                f"save to {str(self.path)!r}: this is the root of the file system; name a folder in it"
            )
        self.overwrite = overwrite
        self.kin = tuple(kin)
        self.token = os.urandom(6).hex()
        # Only checkpoints change places with one another; other folders are written into.
        try:
            self.inside = self.path.is_dir() and (
                _is_fixed(self.path) or (files_written(self.path) is None and bool(os.listdir(self.path)))
            )
        except OSError as error:
            raise CheckpointError(
                f"save to {str(self.path)!r}: {error.strerror or error}; save to another folder"
            ) from error
        self._place = SavePlace(self.path, "") if self.inside else _beside(self.path)
        self.folder = self._place.named(f".tmp-{self.token}")
        self._lock = Lock(self._place, self.path)

    def begin(self) -> Path:
        """Take the lock, remove what killed saves left, make the folder.

        Raises CheckpointError where others have files there.
        """
        self._check(())
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock.take()
        try:
            _remove_left(self._place, self.path)
            self.folder.mkdir()
            (self.folder / MARK).touch()
        except BaseException:
            self._lock.release()
            raise
        return self.folder

    def join(self, folder: str) -> None:
        """Another rank has made this folder."""
        self.folder = Path(folder)
        self.token = folder[-TOKEN_LETTERS:]

    def commit(self) -> None:
        """Everything is written: make it durable and put it in the place of what was there."""
        names = [name for name in os.listdir(self.folder) if name != MARK]
        self._check(names)
        sync(self.folder)
        if self.inside:
            self._merge(names)
        elif self.path.exists():
            self._swap()
        else:
            os.rename(self.folder, self.path)
        (self.path / MARK).unlink(missing_ok=True)
        self._remove_kin()
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

    # ---- what is there ----

    def kept(self) -> dict[str, int | None]:
        """What earlier saves wrote into the folder and this one does not replace."""
        if not self.kin:
            return {}
        ours = files_written(self.path) or {}
        stay: dict[str, int | None] = {}
        for name, size in ours.items():
            if name in (INDEX, MARK) or self._is_kin(name) or os.path.lexists(self.folder / name):
                continue
            if owned.is_ours(self.path / name, size):
                stay[name] = size
        return stay

    def _check(self, new: Sequence[str]) -> None:
        """Raise CheckpointError where the folder holds files that this save did not write and would replace or mix with
        its own.
        """
        if not os.path.lexists(self.path):
            return
        if not self.path.is_dir():
            raise CheckpointError(f"{str(self.path)!r} is a file; a checkpoint is a folder, give another name")
        for name in new:
            if (self.path / name).is_dir():
                raise CheckpointError(
                    f"save to {str(self.path)!r}: the folder {name!r} in it is in the way; save to another folder"
                )
        if self.overwrite:
            return
        there = format_of(self.path)
        if there not in (None, INCOMPLETE) and (there == PLAIN) != bool(self.kin):
            what = "a folder of cf.save_pretrained" if there == PLAIN else "a checkpoint of cf.save"
            raise CheckpointError(
                f"{str(self.path)!r} is {what}; nothing was touched. Save to another folder, or pass overwrite=True"
            )
        ours = files_written(self.path)
        others = [name for name in owned.foreign(self.path, ours or {}) if not self._is_own(name)]
        in_way = [name for name in others if name in new or self._is_kin(name)]
        if not self.kin and ours is None:
            in_way = others
        if in_way:
            more = f" and {len(in_way) - 4} more" if len(in_way) > 4 else ""
            raise CheckpointError(
                f"{str(self.path)!r} holds {', '.join(map(repr, in_way[:4]))}{more}, which no save of colofunc wrote; "
                "nothing there was touched. Save to another folder, or pass overwrite=True to write into this one"
            )

    def _is_own(self, name: str) -> bool:
        """A lock or a temporary folder in a folder that is written into."""
        return self.inside and (name == LOCK or name.startswith(".tmp-"))

    def _is_kin(self, name: str) -> bool:
        return any(fnmatchcase(name, glob) for glob in self.kin)

    def _remove_kin(self) -> None:
        """Files of another's that a reader would take for part of this save.

        They were checked, or overwriting them was asked for.
        """
        for name in owned.foreign(self.path, files_written(self.path) or {}):
            if self._is_kin(name) and not (self.path / name).is_dir():
                (self.path / name).unlink()

    # ---- into its place ----

    def _swap(self) -> None:
        """Change places with the checkpoint that is there.

        Other files of its folder come along: at once, folders right behind it.
        """
        for name in [*owned.foreign(self.path, files_written(self.path) or {}), *self.kept()]:
            source, target = self.path / name, self.folder / name
            if not os.path.lexists(target) and not (source.is_dir() and not source.is_symlink()):
                with contextlib.suppress(OSError):  # no hard links here: it is moved behind the swap
                    os.link(source, target, follow_symlinks=False)
        (self.path / MARK).unlink(missing_ok=True)  # left where a save was killed at its very end
        old = self._place.named(f".old-{self.token}")
        if swap_folders(self.folder, self.path):
            os.rename(self.folder, old)
        else:
            os.rename(self.path, old)
            os.rename(self.folder, self.path)
        _discard(old, self.path)

    def _merge(self, new: Sequence[str]) -> None:
        """Move the files into the folder.

        Until the last of them, the index, is there, the folder says that it is incomplete.
        """
        before = files_written(self.path) or {}
        between = self.folder / (INDEX + ".part")
        files = dict.fromkeys([*before, *new])
        write_durably(between, index_bytes({"format": INCOMPLETE, "files": files}))
        os.replace(between, self.path / INDEX)
        # Indices of libraries name shards: none is there while old and new shards are.
        owned.remove(self.path, {name: size for name, size in before.items() if name.endswith(".index.json")})
        for name in sorted(new, key=lambda name: (name == INDEX, name.endswith(".json"), name)):
            sync(self.folder / name)
            os.replace(self.folder / name, self.path / name)
        listed = files_written(self.path) or {}
        owned.remove(self.path, {name: size for name, size in before.items() if name not in listed})
        owned.remove(self.folder, {MARK: None})


def _is_fixed(path: Path) -> bool:
    """Whether a folder is a mount, or one that this process works in."""
    try:
        return path.is_mount() or Path.cwd().is_relative_to(path)
    except FileNotFoundError:  # the working directory was removed
        return False


def sync(path: Path) -> None:
    """Have a file or folder on disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


AT_FDCWD, RENAME_EXCHANGE = -100, 2


def swap_folders(a: Path, b: Path) -> bool:
    """Swap two folders in one step (Linux: renameat2 with RENAME_EXCHANGE); False where the system cannot."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return int(call(AT_FDCWD, os.fsencode(a), AT_FDCWD, os.fsencode(b), RENAME_EXCHANGE)) == 0
