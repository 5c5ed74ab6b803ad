"""Host memory for copies: a pool that is allocated once, and pinned pages.

Problem: a copy runs beside compute only from pinned memory, which takes long to allocate; and a step should not fail in
its middle for want of memory. Idea: the finished program says how many buffers of each size are in use at one time
(`program.passing`); they are allocated together before the first step, handed out, and come back when nobody has the
tensor, or a view of it, any more.

    pool = Pool(passing(program), ranks=1)
    pool.allocate()
    x = pool.like(activation)       # a tensor of any content that lies as a copy of `activation` would
    del x                           # its buffer is free again

On a machine with CUDA the memory is pinned; elsewhere it is pages like any others. All of it goes with the pool and the
last tensor. See Note [Who keeps host memory] in `pages`.
"""

from __future__ import annotations

import time
import weakref
from bisect import bisect_left
from collections.abc import Iterable, Mapping

import torch

from colofunc.errors import CapacityError
from colofunc.executors.disk.tensors import OnDisk
from colofunc.executors.pages import pages
from colofunc.mesh.sizes import size_text
from colofunc.program.facts import is_copy
from colofunc.program.ir import Program
from colofunc.program.passing import Passing, buffer_bytes, passing

LET_GO_S = 1.0
"""A thread that has written a buffer to disk may have it a moment longer than whoever waited for that."""


class Pool:
    """Buffers of the sizes of a plan, for so many ranks in this process.

    `growths`: how often memory was taken: once, and again after a step that failed and left tensors behind. `most`:
    size -> the most buffers that were in use at one time. `spoils`: what comes back is filled with NaN, for tests on a
    CPU: on a GPU a copy may still read it.
    """

    def __init__(self, plan: Passing, ranks: int = 1) -> None:
        self.plan = plan
        self.growths = 0
        self.spoils = False
        self.most: dict[int, int] = {c.nbytes: 0 for c in plan.classes}
        self._counts = {c.nbytes: c.count * ranks for c in sorted(plan.classes, key=lambda c: c.nbytes)}
        self._sizes = list(self._counts)
        self._slab: _Slab | None = None

    @property
    def nbytes(self) -> int:
        """Of all buffers."""
        return sum(size * count for size, count in self._counts.items())

    @property
    def used(self) -> int:
        """Buffers that somebody has."""
        return (
            0 if self._slab is None else sum(count - len(self._slab.free[size]) for size, count in self._counts.items())
        )

    def allocate(self, pinned: bool = False) -> None:
        """Before a step: take the memory, if it was not taken or a step that failed still holds some of it."""
        until = time.monotonic() + LET_GO_S
        while self.used and time.monotonic() < until:
            time.sleep(1e-4)
        if self.nbytes and (self._slab is None or self.used):
            self._slab = _Slab(self._counts, pinned)
            self.growths += 1

    def like(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor of any content in host memory that lies as a copy of x does."""
        shape = torch.empty_like(x, dtype=dtype, device="meta", memory_format=torch.preserve_format)
        if not shape.nbytes:
            return torch.empty_like(shape, device="cpu", memory_format=torch.preserve_format)
        return self.empty(shape.nbytes).view(shape.dtype).as_strided(shape.shape, shape.stride())

    def stack(self, x: torch.Tensor, n: int) -> torch.Tensor:
        """A tensor of any content for n like x, one behind the other."""
        return self.like(torch.empty((n, *x.shape), dtype=x.dtype, device="meta"))

    def empty(self, nbytes: int) -> torch.Tensor:
        """So many bytes of any content. Raises CapacityError where all buffers of their size are in use."""
        assert self._slab is not None or not self.nbytes, "allocate() comes first"
        at = bisect_left(self._sizes, nbytes)
        size = self._sizes[at] if at < len(self._sizes) else 0
        free = [] if self._slab is None or not size else self._slab.free[size]
        until = time.monotonic() + LET_GO_S
        while size and not free and time.monotonic() < until:
            time.sleep(1e-4)
        if self._slab is None or not free:
            there = ", ".join(f"{count} x {size_text(n)}" for n, count in self._counts.items()) or "none"
            raise CapacityError(
                f"the pool of host memory has no buffer left for {nbytes:,} B: all {self._counts.get(size, 0)} of "
                f"{size_text(size)} are in use (of {there}). The plan counts what a step holds at one time; run it "
                "once more after `del` of what holds on to them"
            )
        offset = free.pop()
        self.most[size] = max(self.most[size], self._counts[size] - len(free))
        array = self._slab.memory[offset : offset + nbytes]
        weakref.finalize(array, self._slab.back, size, offset, self.spoils).atexit = False
        return torch.from_numpy(array)


class _Slab:
    """The memory of a pool; `free`: size -> where buffers that nobody has begin."""

    def __init__(self, counts: Mapping[int, int], pinned: bool) -> None:
        self.memory = pages(sum(size * count for size, count in counts.items()), pinned)
        self.free: dict[int, list[int]] = {}
        at = 0
        for size, count in counts.items():
            self.free[size] = [at + size * k for k in reversed(range(count))]
            at += size * count

    def back(self, size: int, offset: int, spoils: bool) -> None:
        if spoils:
            self.memory[offset : offset + size] = 0xFF  # NaN in every floating dtype
        self.free[size].append(offset)


def pool_of(program: Program, ranks: int, whole: Program | None = None) -> Pool | None:
    """The pool that a program needs.

    None where nothing passes through the host. whole: what it was before it was compiled.
    """
    plan = passing(whole or program) if copies_between_tiers(whole or program) else None
    return Pool(plan, ranks) if plan is not None and plan.classes else None


def copies_between_tiers(program: Program) -> bool:
    """Whether a program copies between tiers, in loops too."""
    return any(
        is_copy(node) or (node.loop is not None and copies_between_tiers(node.loop.body)) for node in program.nodes
    )


def pinned_like(x: torch.Tensor) -> torch.Tensor:
    """Pinned memory of its own for what lasts, lying as a copy of x does: to the page, not to the next power of two."""
    shape = torch.empty_like(x, device="meta", memory_format=torch.preserve_format)
    if not shape.nbytes:
        return torch.empty_like(shape, device="cpu", memory_format=torch.preserve_format)
    flat = torch.from_numpy(pages(buffer_bytes(shape.nbytes, 0), pinned=True, seen=True)[: shape.nbytes])
    return flat.view(shape.dtype).as_strided(shape.shape, shape.stride())


STAGED_BYTES = 64 << 20
"""Larger tensors are not copied to pinned memory on their way to a GPU: that memory stays taken."""


def sent(x: torch.Tensor, gpu: torch.device) -> torch.Tensor:
    """A tensor of the host on its way to a GPU. Whoever reads it there next reads it whole; the host does not wait.

    It travels through pinned memory of its own, so that the caller may write to `x` at once.
    """
    if x.nbytes > STAGED_BYTES or x.device.type != "cpu":
        return x.to(gpu)
    staged = torch.empty_like(x, pin_memory=True, memory_format=torch.preserve_format).copy_(x)
    return staged.to(gpu, non_blocking=True)


def in_tier(x: torch.Tensor, tier: str, device: torch.device) -> torch.Tensor:
    """x where a value of that tier lies if steps run on `device`; x itself where it is there.

    What lies on disk stays there.
    """
    if isinstance(x, OnDisk) or tier == "disk":
        return x
    if device.type == "cpu":
        return x if x.is_cpu else x.to(device)
    if tier == "host":
        return x if x.is_cpu and x.is_pinned() else pinned_like(x).copy_(x)
    return x if x.device == device else sent(x, device)


_CPU = torch.device("cpu")


def accelerator(tensors: Iterable[torch.Tensor]) -> torch.device:
    """Where a program on these inputs runs: their GPU, or the CPU where they lie on the host only."""
    if not torch.cuda.is_initialized():  # then there is no tensor on one
        return _CPU
    return next((x.device for x in tensors if x.is_cuda), _CPU)


def reads_host_only(program: Program) -> bool:
    """Whether no input lies in the device's memory by its tier, so that inputs cannot say where the program runs."""
    return not any(program.values[id].tier == "device" for id in program.inputs if id not in program.constants)
