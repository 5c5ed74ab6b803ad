"""Torch's caching allocator of a card, without a card: what it reserves for the tensors of a program.

Problem: a plan counts bytes of tensors, and a card gives out segments, of which parts lie idle. Idea: the allocator is a set of rules
that need no card: sizes rounded up, segments of 2 and 20 MiB or more, the smallest block that fits, split; neighbours that are free
become one. Played with the tensors of a planned step they say the least capacity with which it runs.

    allocator = Caching(capacity_bytes)
    block = allocator.take(5 << 20)          # OutOfMemory where nothing fits, after free segments have gone
    allocator.give(block)

Source: c10/cuda/CUDACachingAllocator.cpp (torch 2.11) with its default settings, of one stream.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

import attrs

from colofunc.program.ir import Program
from colofunc.program.memory import lies

MIB = 1 << 20
ROUND_BYTES, SMALL_BYTES, SMALL_SEGMENT_BYTES = 512, MIB, 2 * MIB
LARGE_BYTES, LARGE_SEGMENT_BYTES, LARGE_ROUND_BYTES = 10 * MIB, 20 * MIB, 2 * MIB
STEPS = 3


class OutOfMemory(Exception): ...


@attrs.define(eq=False)
class Block:
    """A part of a segment, and its neighbours in it."""

    nbytes: int
    segment: int
    small: bool
    free: bool = True
    before: Block | None = None
    behind: Block | None = None

    @property
    def whole(self) -> bool:
        """Whether it is all of its segment."""
        return self.before is None and self.behind is None


class Caching:
    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.reserved_bytes = 0
        self._segments = 0
        self._free: dict[bool, list[tuple[int, int, int, Block]]] = {True: [], False: []}  # by (size, segment, when it was freed)
        self._count = 0

    def take(self, nbytes: int) -> Block:
        size = max(1, -(-nbytes // ROUND_BYTES)) * ROUND_BYTES
        small = size <= SMALL_BYTES
        free = self._free[small]
        at = bisect_left(free, (size, -1, -1))
        block = free.pop(at)[-1] if at < len(free) else self._segment(size, small)
        block.free = False
        rest = block.nbytes - size
        if rest >= ROUND_BYTES if small else rest > SMALL_BYTES:
            other = Block(rest, block.segment, small, True, block, block.behind)
            if block.behind is not None:
                block.behind.before = other
            block.nbytes, block.behind = size, other
            self._put(other)
        return block

    def give(self, block: Block) -> None:
        for near in (block.before, block.behind):
            if near is not None and near.free:
                self._free[near.small].remove(next(entry for entry in self._entries(near) if entry[-1] is near))
                block.nbytes += near.nbytes
                if near is block.before:
                    block.before = near.before
                    if near.before is not None:
                        near.before.behind = block
                else:
                    block.behind = near.behind
                    if near.behind is not None:
                        near.behind.before = block
        block.free = True
        self._put(block)

    def _put(self, block: Block) -> None:
        self._count += 1
        insort(self._free[block.small], (block.nbytes, block.segment, self._count, block))

    def _entries(self, block: Block) -> Iterator[tuple[int, int, int, Block]]:
        free = self._free[block.small]
        at = bisect_left(free, (block.nbytes, block.segment, -1))
        while at < len(free) and free[at][:2] == (block.nbytes, block.segment):
            yield free[at]
            at += 1

    def _segment(self, size: int, small: bool) -> Block:
        if small:
            nbytes = SMALL_SEGMENT_BYTES
        elif size < LARGE_BYTES:
            nbytes = LARGE_SEGMENT_BYTES
        else:
            nbytes = -(-size // LARGE_ROUND_BYTES) * LARGE_ROUND_BYTES
        if self.reserved_bytes + nbytes > self.capacity_bytes:
            self._release()
        if self.reserved_bytes + nbytes > self.capacity_bytes:
            raise OutOfMemory
        self.reserved_bytes += nbytes
        self._segments += 1
        return Block(nbytes, self._segments, small)

    def _release(self) -> None:
        """Segments of which nothing is in use go back to the card."""
        for small, free in self._free.items():
            self.reserved_bytes -= sum(entry[0] for entry in free if entry[-1].whole)
            self._free[small] = [entry for entry in free if not entry[-1].whole]


def events_of(program: Program) -> tuple[list[int], list[tuple[int, int, int]], int]:
    """(bytes of what lasts, (born at node, dies behind node, bytes) of what a step makes, the number of nodes)."""
    storages = [s for s in lies(program).storages if s.tier == "device" and s.nbytes]
    lasting = [s.nbytes for s in storages if s.born < 0]
    own = [s for s in storages if s.born >= 0]
    return lasting, [(s.born, min(s.dies, len(program.nodes)), s.nbytes) for s in own], len(program.nodes)


def runs(program: Program, capacity_bytes: int, steps: int = STEPS) -> bool:
    """Whether steps of a program run within a capacity: what is made at a node is taken before what died there is given back."""
    lasting, own, count = events_of(program)
    made: dict[int, list[int]] = {}
    dead: dict[int, list[int]] = {}
    for k, (born, dies, _) in enumerate(own):
        made.setdefault(born, []).append(k)
        dead.setdefault(dies, []).append(k)
    caching, held = Caching(capacity_bytes), dict[int, Block]()
    try:
        for nbytes in lasting:
            caching.take(nbytes)
        for _ in range(steps):
            for at in range(count + 1):
                for k in made.get(at, ()):
                    held[k] = caching.take(own[k][2])
                for k in dead.get(at, ()):
                    caching.give(held.pop(k))
    except OutOfMemory:
        return False
    return True


def needed_bytes(program: Program, alive_bytes: int) -> int:
    """The least capacity with which a program runs, to a thousandth of what is alive at its peak."""
    low, high = alive_bytes - 1, alive_bytes + alive_bytes // 8 + 64 * MIB
    while not runs(program, high):
        low, high = high, 2 * high
    while high - low > max(LARGE_ROUND_BYTES, alive_bytes // 1000):
        middle = (low + high) // 2
        low, high = (low, middle) if runs(program, middle) else (middle, high)
    return high
