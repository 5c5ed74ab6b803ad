"""Memory of a pretended card, given out again as torch's caching allocator does.

Problem: what one stream frees while another still reads it is given to the next who asks. Idea: blocks belong to the stream that they were
allocated for. A block that is freed is spoiled by work of that stream and given to the next tensor of its size on that stream at once;
only `record_stream` makes it wait for others. What a missing wait or record would have read is NaN.

Sizes are rounded up to 512 bytes as there. Source: c10/cuda/CUDACachingAllocator.cpp, of which this has neither pools nor splitting.
"""

from __future__ import annotations

from collections import defaultdict

import torch

from pretended.streams import Mark, Stream

ROUNDED_TO = 512
SPOILED = 0xFF
"""Each byte of memory that nobody has written to: NaN in every floating dtype."""


class Block:
    """Memory of one tensor and its views."""

    def __init__(self, nbytes: int, stream: Stream) -> None:
        self.memory = torch.full((nbytes,), SPOILED, dtype=torch.uint8)
        self.stream = stream
        self.others: list[Mark] = []  # where other streams have used it, as far as `record_stream` said


class Handle:
    """Held by each tensor of a block; the block goes back with the last one."""

    def __init__(self, allocator: Allocator, block: Block, nbytes: int) -> None:
        self.block = block
        self._allocator = allocator
        self._nbytes = nbytes

    def __del__(self) -> None:
        self._allocator.free(self.block, self._nbytes)


class Allocator:
    """Of one card. `live_bytes`: as tensors ask for them; `rounded_bytes`: as blocks have them."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.live_bytes = self.peak_bytes = self.rounded_bytes = self.peak_rounded_bytes = 0
        self._free: dict[tuple[Stream, int], list[Block]] = defaultdict(list)
        self._used_elsewhere: list[Block] = []

    def allocate(self, nbytes: int, stream: Stream) -> Handle:
        rounded = max(1, -(-nbytes // ROUNDED_TO)) * ROUNDED_TO
        self._take_back()
        free = self._free[stream, rounded]
        block = free.pop() if free else Block(rounded, stream)
        self.live_bytes += nbytes
        self.rounded_bytes += rounded
        if self.rounded_bytes > self.capacity_bytes:
            self.live_bytes -= nbytes
            self.rounded_bytes -= rounded
            raise torch.OutOfMemoryError(f"CUDA out of memory (pretended). Tried to allocate {nbytes} bytes of {self.capacity_bytes}")
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.peak_rounded_bytes = max(self.peak_rounded_bytes, self.rounded_bytes)
        return Handle(self, block, nbytes)

    def free(self, block: Block, nbytes: int) -> None:
        self.live_bytes -= nbytes
        self.rounded_bytes -= block.memory.numel()
        if block.others:
            self._used_elsewhere.append(block)
        else:
            self._give_back(block)

    def reset_peak(self) -> None:
        self.peak_bytes, self.peak_rounded_bytes = self.live_bytes, self.rounded_bytes

    def _take_back(self) -> None:
        waiting, self._used_elsewhere = self._used_elsewhere, []
        for block in waiting:
            if all(mark.passed for mark in block.others):
                block.others.clear()
                self._give_back(block)
            else:
                self._used_elsewhere.append(block)

    def _give_back(self, block: Block) -> None:
        memory = block.memory
        block.stream.launch(lambda: memory.fill_(SPOILED))
        self._free[block.stream, memory.numel()].append(block)
