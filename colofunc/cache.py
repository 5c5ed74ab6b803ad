"""The cache folder: what is kept between runs of a script, within a size, and only there.

Problem: a cache grows until somebody deletes it, a changed file in it must not break a run, and the folder may hold
files of others or be a link to one. Idea: an entry is one file whose name and first bytes say that it is ours, with a
checksum. It is read within a size, dropped where it is not what was written, and the entries that were not used for
longest go first.

    cache = Cache(Path("~/.cache/colofunc").expanduser())
    cache.write(key, {"plan": ...})         # beside, then renamed: a reader sees the whole file or none
    cache.read(key)                         # None where there is no such entry; Wrong where it was changed

`key`: hexadecimal letters, as a hash has them. A link under the name of an entry is never followed, replaced or
removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import attrs

from colofunc import env, owned
from colofunc.untrusted import Wrong, parse_json

_NAME = re.compile(r"[0-9a-f]{40}\.json")
_PART = re.compile(r"colofunc-\w+\.part")
_HEAD = re.compile(rb'\{"colofunc_cache": 1, "crc32": "([0-9a-f]{8})", "entry": ')
_BEGINNINGS = (b'{"colofunc_cache": ', b'{"lowered": ')  # the second: of entries before they had a checksum
PART_S = 3600.0  # a file that is older was left by a process that was killed while it wrote


@attrs.frozen
class Cache:
    """One folder of entries, which need not be there."""

    folder: Path
    most_bytes: int = attrs.field(factory=env.cache_bytes)

    def path(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def read(self, key: str) -> Any | None:
        """The entry, None where there is none. Raises Wrong where it is no entry that was written, and OSError."""
        path = self.path(key)
        if not os.path.lexists(path):
            return None
        if not owned.is_ours(path, None):
            raise Wrong("it is no file, but a link or a folder")
        if path.stat().st_size > self.most_bytes:
            raise Wrong(f"it has {path.stat().st_size} bytes, more than the cache may hold")
        data = path.read_bytes()
        head = _HEAD.match(data)
        text = data[head.end() : -1] if head is not None else b""
        if head is None or int(head[1], 16) != zlib.crc32(text):
            raise Wrong("it is not what was written (checksum)")
        with contextlib.suppress(OSError):
            os.utime(path)  # used now
        return parse_json(text)

    def write(self, key: str, entry: Any) -> None:
        """Keep an entry, and drop the oldest while there are too many.

        Raises OSError; Wrong where something else has its name.
        """
        path = self.path(key)
        if os.path.lexists(path) and not owned.is_ours(path, None):
            raise Wrong(f"{str(path)!r} is no file, but a link or a folder")
        text = json.dumps(entry, allow_nan=False).encode()
        self.folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self.folder, prefix="colofunc-", suffix=".part")
        try:
            with open(handle, "wb") as file:
                file.write(b'{"colofunc_cache": 1, "crc32": "%08x", "entry": ' % zlib.crc32(text) + text + b"}")
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        self.evict()

    def drop(self, key: str) -> None:
        """Remove an entry that cannot be used, if it is a file."""
        if owned.is_ours(self.path(key), None):
            with contextlib.suppress(OSError):
                self.path(key).unlink()

    def evict(self) -> None:
        """Remove the entries that were not used for longest until the others fit. Files of others are not counted."""
        entries = []
        for path in self.folder.iterdir():
            with contextlib.suppress(OSError):
                if (
                    _PART.fullmatch(path.name)
                    and owned.is_ours(path, None)
                    and time.time() - path.stat().st_mtime > PART_S
                ):
                    path.unlink()
                elif _is_entry(path):
                    entries.append((path.stat().st_mtime_ns, path.stat().st_size, path))
        entries.sort()
        total = sum(size for _, size, _ in entries)
        for _, size, path in entries:
            if total <= self.most_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size


def _is_entry(path: Path) -> bool:
    """Whether the name and the first bytes of a file are those of an entry."""
    if not _NAME.fullmatch(path.name) or not owned.is_ours(path, None):
        return False
    with open(path, "rb") as file:
        return file.read(max(map(len, _BEGINNINGS))).startswith(_BEGINNINGS)


__all__ = ["Cache"]
