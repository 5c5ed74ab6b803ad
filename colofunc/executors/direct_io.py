"""Direct I/O: bytes between a file and host memory, past the page cache where the file system can (`O_DIRECT`).

Problem: a training step or a checkpoint must not push other data out of memory, and a copy to the page cache costs more
processor time than anything else on the way to a disk. But not every file system can do without it, and some take the
flag and refuse the call. Idea: the flag is a property of the open file. A call that is refused takes it away, once, and
goes the usual way.

    set_direct(fd, True)
    write_at(fd, data, at=0)       # all of it; `data` begins at a page and has whole pages (`padded_bytes`, `pages.pages`)
    is_direct(fd)                  # False where the file system refused
"""

from __future__ import annotations

import errno
import fcntl
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

DIRECT = getattr(os, "O_DIRECT", 0)  # 0 where the system has no such thing
PAGE_BYTES = 4096  # address, offset and length of direct I/O are multiples of a disk's block, which divides this

ByteArray = NDArray[np.uint8]


def padded_bytes(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def whole_pages(data: ByteArray) -> bool:
    """Whether direct I/O takes this memory as it is."""
    return data.ctypes.data % PAGE_BYTES == 0 and len(data) % PAGE_BYTES == 0


def set_direct(fd: int, on: bool) -> bool:
    """Pass the page cache from now on, or no longer; whether it does: some file systems cannot."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | DIRECT if on else flags & ~DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return on and DIRECT != 0


def is_direct(fd: int) -> bool:
    """Whether what is written passes the page cache."""
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & DIRECT)


def write_at(fd: int, data: ByteArray | memoryview, at: int) -> None:
    """All of `data` to byte `at` of a file. Raises OSError."""
    while len(data):
        count = _moved(os.pwritev, fd, data, at)
        data, at = data[count:], at + count


def read_at(fd: int, into: ByteArray | memoryview, at: int) -> int:
    """Fill `into` from byte `at` on; how much of it the file had. Raises OSError."""
    count = 0
    while count < len(into):
        got = _moved(os.preadv, fd, into[count:], at + count)
        if not got:
            break
        count += got
    return count


def _moved(move: Any, fd: int, data: ByteArray | memoryview, at: int) -> int:
    """Bytes moved by one system call, past the page cache unless the file system refuses."""
    try:
        return move(fd, [data], at)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    # Some take the flag and refuse the call; one that ended within a block leaves the rest unaligned. The flag is the
    # file's, so another thread may have taken it away since: ask for nothing, try once without.
    set_direct(fd, False)
    return move(fd, [data], at)
