"""Bytes as people write them, and the room that a tier of memory is given: bytes, or a part of what there is.

>>> parse_bytes("1.5GiB", "budget")
1610612736
>>> parse_bytes("80GB", "budget")
80000000000
>>> parse_room("6GiB", "budget"), parse_room(0.5, "budget"), parse_room("0.5", "budget"), parse_room("auto", "budget")
((6442450944, None), (None, 0.5), (None, 0.5), (None, None))
"""

from __future__ import annotations

import re

from colofunc.errors import InputError

UNITS = (
    {"": 1, "b": 1}
    | {f"{p}b": 1000**k for k, p in enumerate("kmgt", 1)}
    | {f"{p}ib": 1024**k for k, p in enumerate("kmgt", 1)}
)
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*")
_PART = re.compile(r"\s*([0-9]*\.[0-9]+)\s*")  # as a command line gives it: no unit, and a point, so that "1" is a byte
_WORDS = "write a number of bytes above 0, or one with a unit such as '6GiB' or '80GB'"

MemoryLimit = tuple[int | None, float | None]
"""(bytes, part of the memory that there is); neither: all of it."""


def parse_bytes(size: str | int, what: str) -> int:
    """A number of bytes from "6GiB", "512 MiB", "80GB" or a number. Raises InputError naming `what`."""
    return _bytes(size, what, _WORDS)


def parse_room(room: str | int | float, what: str) -> MemoryLimit:
    """A budget: bytes as above, a part of the memory that there is (0.5 or "0.5"), or "auto", all of it.

    Raises InputError.
    """
    if isinstance(room, str) and room.strip() == "auto":
        return None, None
    found = _PART.fullmatch(room) if isinstance(room, str) else None
    if found is not None or isinstance(room, float):
        part = float(room if found is None else found[1])
        if not 0 < part <= 1:
            says = (
                "is no part of a memory, which is above 0 and at most 1; write 0.5, a whole number of bytes, or '6GiB'"
            )
            raise InputError(f"{what}: {room!r} {says}")
        return None, part
    return _bytes(room, what, f"{_WORDS}, a part of the memory such as 0.5, or 'auto' for all of it"), None


def _bytes(size: str | int | float, what: str, words: str) -> int:
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    found = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if found is None or found[2].lower() not in UNITS:
        raise InputError(f"{what}: {size!r} is no size; {words}")
    nbytes = float(found[1]) * UNITS[found[2].lower()]
    if nbytes < 1:
        raise InputError(f"{what}: {size!r} is no size, it comes to less than one byte; {words}")
    return int(nbytes)


def size_text(nbytes: float) -> str:
    """`57.7 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} TiB"
