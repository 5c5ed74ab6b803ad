"""Bytes as people write them.

>>> parse_bytes("1.5GiB", "budget")
1610612736
>>> parse_bytes("80GB", "budget")
80000000000
"""

from __future__ import annotations

import re

from colofunc.errors import InputError

UNITS = {"": 1, "b": 1} | {f"{p}b": 1000**k for k, p in enumerate("kmgt", 1)} | {f"{p}ib": 1024**k for k, p in enumerate("kmgt", 1)}
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*")


def parse_bytes(size: str | int, what: str) -> int:
    """A number of bytes from "6GiB", "512 MiB", "80GB" or a number. Raises InputError naming `what`."""
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    found = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if found is None or found[2].lower() not in UNITS or float(found[1]) == 0:
        raise InputError(f"{what}: {size!r} is no size; write a number of bytes above 0, or one with a unit such as '6GiB' or '80GB'")
    return int(float(found[1]) * UNITS[found[2].lower()])


def size_text(nbytes: float) -> str:
    """`57.7 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} TiB"
