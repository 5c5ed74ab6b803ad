"""Pages of the host, pinned where a card copies from and to them."""

from __future__ import annotations

import mmap
import weakref

import numpy as np
import torch

PORTABLE = 1
"""Pinned for all devices of the process: cudaHostRegisterPortable."""


def pages(nbytes: int, pinned: bool = False) -> np.ndarray:
    """Bytes that begin at a page, of any content. They go when nobody has a slice of the array."""
    memory = np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), np.uint8)
    if pinned:
        address = memory.ctypes.data
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(address, memory.nbytes, PORTABLE)))
        weakref.finalize(memory, unpin, address).atexit = False
    return memory


def unpin(address: int) -> None:
    torch.cuda.synchronize()  # a copy from or to it may still run
    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(address)))
