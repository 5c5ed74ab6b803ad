"""Files that colofunc wrote, told from those that somebody else put beside them.

Problem: a path that a user gives may be a working directory with its sources, a link to one, or another program's
folder, and replacing "what was there" deletes it. Idea: a file is ours where a list that we wrote names it and where it
still is what the list says: a regular file, no link, of that size. Only such files are replaced or removed; folders go
when they are empty. Saved states, pretrained folders, stores of the disk tier and cached plans all ask here.

    ours = {"a.safetensors": 4096, "index.json": None}      # name -> bytes; None: of any size
    foreign(folder, ours)                                    # ["train.py"]: what is not ours
    remove(folder, ours)                                     # False: train.py is still there, and so is the folder
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from colofunc.errors import ColofuncError

OwnFiles = Mapping[str, int | None]

MARK_WITHIN_BYTES = 64
A_FOLDER = "a folder, such as 'run/step-100'"
A_FILE = "a file in a folder that is there, such as 'run/plan.json'"


def given(path: Any, what: str, kind: type[ColofuncError], such: str = A_FOLDER) -> Path:
    """The absolute path that a user gave; a `~` at its beginning is the home folder, as in a shell.

    such: what to write instead. Raises `kind` where it is no path, where it is empty ("" would mean the working
    directory), and where no file can have this name or this process may not look.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(text, str) or not text or "\0" in text:
        raise kind(f"{what}: {path!r:.80} is no path; write the name of {such}")
    try:
        where = Path(os.path.abspath(os.path.expanduser(text)))
        os.lstat(where)
    except FileNotFoundError:
        pass  # not there yet
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise kind(f"{what}: {text!r:.80} cannot be used: {why}; write the name of {such}") from error
    return where


def is_ours(path: Path | str, size: int | None, folder_fd: int | None = None) -> bool:
    """Whether this is a regular file, no link, with so many bytes. folder_fd: of the folder that a bare name is in."""
    try:
        found = os.stat(path, dir_fd=folder_fd, follow_symlinks=False)
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and size in (None, found.st_size)


def write_text(path: Any, text: str, mark: str, what: str, kind: type[ColofuncError]) -> None:
    """Write a file that has `mark` near its beginning.

    Raises `kind` where it cannot be written, and as `check_own_kind` does.

    A file that is there is whole until the new one is, and another hard link to it keeps what it holds; a link stays a
    link.
    """
    where = given(path, what, kind, A_FILE)
    check_own_kind(where, mark, what, kind)
    try:
        if not os.path.isfile(where):
            where.write_text(text, encoding="utf-8")
            return
        there = Path(os.path.realpath(where))
        beside = there.with_name(f".colofunc-{os.urandom(6).hex()}")
        try:
            beside.write_text(text, encoding="utf-8")
            beside.chmod(stat.S_IMODE(there.stat().st_mode))
            os.replace(beside, there)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise kind(f"{what}: {str(where)!r} cannot be written: {error.strerror or error}; name {A_FILE}") from error


def check_own_kind(
    where: Path, mark: str, what: str, kind: type[ColofuncError], within_bytes: int = MARK_WITHIN_BYTES
) -> None:
    """Raises `kind` where there is a file without `mark` in its first bytes, which nobody meant to lose."""
    if not os.path.isfile(where):
        return  # nothing is lost in devices; folders cannot be written
    try:
        with open(where, "rb") as file:
            begins = file.read(within_bytes)
    except OSError as error:
        raise kind(f"{what}: {str(where)!r} cannot be read: {error.strerror or error}; give another name") from error
    if begins and mark.encode() not in begins:
        said = f"{str(where)!r} is a file without {mark!r}, so none that this would replace"
        raise kind(f"{what}: {said}; it was not touched. Give another name")


def foreign(folder: Path, ours: OwnFiles) -> list[str]:
    """The names in a folder that are not ours, in order; none where there is no such folder."""
    if not os.path.lexists(folder):
        return []
    names = sorted(os.listdir(folder))
    return [name for name in names if name not in ours or not is_ours(folder / name, ours[name])]


def remove(folder: Path, ours: OwnFiles, last: str = "") -> bool:
    """Remove our files, `last` behind the others, then the folder if nothing else is in it; whether it is gone."""
    folder_fd = open_folder(folder)
    try:
        remove_files(folder_fd, ours, last)
    finally:
        os.close(folder_fd)
    with contextlib.suppress(OSError):
        folder.rmdir()
    return not folder.exists()


def remove_files(folder_fd: int, ours: OwnFiles, last: str = "") -> None:
    """Remove our files from a folder that is open, `last` behind the others."""
    for name in sorted(ours, key=lambda name: name == last):
        if is_ours(name, ours[name], folder_fd):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder_fd)


def open_folder(path: Path) -> int:
    """A descriptor of a folder that is no link. Raises OSError."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
