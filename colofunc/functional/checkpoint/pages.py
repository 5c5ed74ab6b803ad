"""Memory that is about to be filled: asked for in large pages.

Problem: filling fresh memory costs as much in page faults as in copying. Idea: tell the system that large pages are
welcome (Linux: madvise with MADV_HUGEPAGE), which halves the time of reading a file into it. It is advice: where it is
not taken, nothing changes.

    buffer = empty(1 << 30)          # torch.empty of bytes
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch

LARGE_PAGE_BYTES = 1 << 21
FROM_BYTES = 4 * LARGE_PAGE_BYTES  # smaller buffers come from memory that is in use already
MADV_HUGEPAGE = 14


def empty(nbytes: int) -> torch.Tensor:
    """`nbytes` bytes of fresh host memory."""
    buffer = torch.empty(nbytes, dtype=torch.uint8)
    advise = _advise() if nbytes >= FROM_BYTES else None
    if advise is not None:
        start = -(-buffer.data_ptr() // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES
        stop = (buffer.data_ptr() + nbytes) // LARGE_PAGE_BYTES * LARGE_PAGE_BYTES
        advise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), MADV_HUGEPAGE)
    return buffer


def copy(x: torch.Tensor) -> torch.Tensor:
    """A row-major copy in host memory."""
    if x.device.type != "cpu":
        return x.to("cpu").contiguous()
    target = empty(x.numel() * x.dtype.itemsize).view(x.dtype).reshape(x.shape)
    return target.copy_(x)


@lru_cache(maxsize=1)
def _advise() -> Any:
    """The system's madvise, None where there is none."""
    try:
        return ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
