"""Tensors that lie on disk, and the host memory that they are read into.

Problem: a program reads and writes values in the tier "disk", and between its steps a state with parts there is looked
at, saved and handed on like any other. Idea: a part on disk is a tensor without memory that knows its chunk of a
`DiskStore`. A program's copies move it beside what else runs; any other operator reads it and works on what it has
read.

    room = ChunkRoom("/nvme", [x.nbytes for x in parts])   # taken now, or an error
    there = [room.keep(x) for x in parts]             # OnDisk, written; the parts may go
    copying = reading(there[0])                       # ahead of its use
    copying.wait() + 1;  there[1] + 1                 # the same, but for the time that it takes

What is read lies in buffers that begin at a page, so that direct I/O needs no second copy; they are given again, by
size, and never hold more at once than was in use at the busiest moment.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from colofunc import compat
from colofunc.errors import DiskError
from colofunc.executors.direct_io import padded_bytes
from colofunc.executors.disk.layout import BLOCK_BYTES, VERSIONS
from colofunc.executors.disk.queue import Before, Ticket
from colofunc.executors.disk.store import DiskStore
from colofunc.executors.pages import pages

aten = torch.ops.aten
_LIKE = frozenset({aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default})
_ITSELF = frozenset({aten.detach.default, aten.alias.default})


class OnDisk(torch.Tensor):
    """A tensor whose elements are a chunk of a store, which it keeps alive, or in files that have not been read yet."""

    store: DiskStore | None
    number: int  # of its chunk
    source: Callable[[], torch.Tensor] | None  # reads what is in no store
    writing: Ticket | None  # a write that nobody has waited for
    __torch_function__ = compat.no_torch_function

    @staticmethod
    def __new__(
        cls,
        like: torch.Tensor,
        store: DiskStore | None = None,
        number: int = 0,
        source: Callable[[], torch.Tensor] | None = None,
    ) -> OnDisk:
        """`like`: shape, strides and dtype. One without a store is read by `source`, and cannot be written."""
        self: OnDisk = compat.wrapper_subclass(cls, like.shape, strides=like.stride(), dtype=like.dtype, device="cpu")
        self.store, self.number, self.source, self.writing = store, number, source, None
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: `__new__` has done it."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func in _ITSELF:
            return args[0]
        if func is aten.copy_.default and isinstance(args[0], OnDisk):
            return writing(args[0], args[1].read() if isinstance(args[1], OnDisk) else args[1]).wait()
        if any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments) and isinstance(
            args[0], OnDisk
        ):
            raise DiskError(f"{func} cannot write to {args[0]!r}. Try: x.clone() first, which reads it into memory")
        if func in _LIKE:
            return func(args[0].shadow(), *args[1:], **{**kwargs, "device": kwargs.get("device") or "cpu"})
        args, kwargs = pytree.tree_map_only(OnDisk, OnDisk.read, (args, kwargs))
        return func(*args, **kwargs)

    def read(self) -> torch.Tensor:
        """The elements, in memory of their own."""
        return reading(self).wait() if self.source is None else self.source()

    def shadow(self) -> torch.Tensor:
        """A tensor without elements that lies as this one does."""
        with compat.no_function_modes():  # of its own dtype, also inside `float64()`
            return torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        where = "in a checkpoint" if self.store is None else f"chunk {self.number} of {self.store.path!r}"
        return f"on_disk({list(self.shape)}, {str(self.dtype).removeprefix('torch.')}, {where})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.read()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read().__reduce_ex__(protocol)

    # What torch does in C++ with the data itself.

    def tolist(self) -> Any:
        return self.read().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self.read().numpy(force=force)

    def data_ptr(self) -> int:
        raise DiskError(f"{self!r} has no address. Try: x.clone(), which reads it into memory")


def in_memory(x: torch.Tensor) -> torch.Tensor:
    """x, read where it lies on disk."""
    return x.read() if isinstance(x, OnDisk) else x


# ---- copies in flight ----


class Moving:
    """A read or write under way. `wait` gives its result; a failure is raised there."""

    __slots__ = ("_ended", "_ticket", "result")

    def __init__(self, result: torch.Tensor, ticket: Ticket | None, ended: Callable[[], None] | None = None) -> None:
        self.result, self._ticket, self._ended = result, ticket, ended

    def wait(self) -> torch.Tensor:
        if self._ticket is not None:
            self._ticket.wait()
        if self._ended is not None:
            self._ended()
        return self.result


def reading(x: OnDisk, pinned: bool = False, before: Callable[[torch.Tensor], Before | None] | None = None) -> Moving:
    """Begin to read `x` into a buffer, which is the result. Raises DiskError where a write has not been waited for.

    pinned: a card will copy it. before(buffer): what the thread waits for; the buffer may be one that a card still
    reads.
    """
    if x.writing is not None:
        raise DiskError(f"{x!r} is read while it is being written. Try: wait for the write first")
    if x.store is None:
        return Moving(x.read(), None)
    flat = STAGING.empty(x.numel() * x.itemsize, pinned)
    ticket = x.store.read(x.number, flat, None if before is None else before(flat))
    with compat.no_function_modes():  # its own dtype, also inside `float64()`
        return Moving(flat.view(x.dtype).as_strided(x.shape, x.stride()), ticket)


def writing(x: OnDisk, source: torch.Tensor, before: Before | None = None) -> Moving:
    """Begin to write `source`, which nobody may change until it is done, over `x`, which is the result. before: what
    comes first.
    """
    if x.store is None:
        raise DiskError(
            f"{x!r} is not to be written. Try: cf.offload(step, disk=...), which gives it room, or x.clone()"
        )
    if source.stride() != x.stride() or source.device.type != "cpu":
        if before is not None:
            before()
        with compat.no_function_modes():
            source, before = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(source), None
    x.writing = x.store.write(x.number, source.as_strided((x.numel(),), (1,)), before)

    def ended() -> None:
        x.writing = None

    return Moving(x, x.writing, ended)


PINNED_SHARE = 2
"""Pinned buffers, in use and free, may hold this many times the bytes that were in use at the busiest moment."""


class Staging:
    """Buffers for what is read: page-aligned, given again by size, never more than were in use at the busiest moment.

    Those for a card are pinned, and kept apart from others. To let go of one is to wait for the card, so there may be
    twice as many.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[int, bool], list[np.ndarray]] = {}
        self._free_bytes = self._used_bytes = self.peak_bytes = 0

    def empty(self, nbytes: int, pinned: bool = False) -> torch.Tensor:
        """A tensor of so many bytes, of any content; its memory comes back when nobody has it."""
        free = self._free.get((nbytes, pinned))
        if free:
            memory = free.pop()
            self._free_bytes -= nbytes
        else:
            self._make_room(nbytes, PINNED_SHARE if pinned else 1)
            memory = pages(nbytes, pinned)
        self._used_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self._used_bytes)
        array = np.frombuffer(memory, np.uint8, nbytes)
        weakref.finalize(array, self._back, memory, nbytes, pinned).atexit = False
        return torch.from_numpy(array)

    @property
    def held_bytes(self) -> int:
        """Of buffers in use and of those that wait."""
        return self._used_bytes + self._free_bytes

    def _back(self, memory: np.ndarray, nbytes: int, pinned: bool) -> None:
        self._used_bytes -= nbytes
        self._free_bytes += nbytes
        self._free.setdefault((nbytes, pinned), []).append(memory)

    def _make_room(self, nbytes: int, share: int) -> None:
        """Let go of buffers of other sizes: those in use and those that wait are at most `share` times what was ever in
        use.
        """
        most = share * max(self.peak_bytes, self._used_bytes + nbytes)
        for key in sorted(self._free, reverse=True):
            while self._free[key] and self._used_bytes + nbytes + self._free_bytes > most:
                self._free[key].pop()
                self._free_bytes -= key[0]


STAGING = Staging()
"""One for the process, as memory is."""


# ---- room for a state ----


def unread(shape: Sequence[int], dtype: torch.dtype, source: Callable[[], torch.Tensor]) -> OnDisk:
    """A tensor that `source()` reads whenever it is looked at, until a step gives it room on its own disk."""
    with compat.no_function_modes():
        return OnDisk(torch.empty(tuple(shape), dtype=dtype, device="meta"), source=source)


def _store(directory: str | os.PathLike[str], sizes: Sequence[int], rank: int, versions: int) -> DiskStore:
    block_bytes = min(BLOCK_BYTES, padded_bytes(max(sizes, default=1)) or padded_bytes(1))
    return DiskStore(
        directory, sizes, rank=rank, block_bytes=block_bytes, buffers_bytes=4 * block_bytes, versions=versions
    )


class ChunkRoom:
    """Chunks that are taken at once and written one after another.

    Raises DiskError, with nothing left behind, where they cannot be.

    once: what is kept is only read from then on, so it takes half the room, and counts at once.
    """

    def __init__(
        self, directory: str | os.PathLike[str], sizes: Sequence[int], rank: int = 0, once: bool = False
    ) -> None:
        self.store = _store(directory, sizes, rank, 1 if once else len(VERSIONS))
        self._next, self._once = 0, once

    def keep(self, x: torch.Tensor) -> OnDisk:
        """x on disk, in the next chunk. It is there when this returns."""
        with compat.no_function_modes():
            found = OnDisk(torch.empty(x.shape, dtype=x.dtype, device="meta"), self.store, self._next)
        self._next += 1
        try:
            writing(found, x).wait()
        except BaseException:
            if self._once:
                self.store.rollback()  # what it has kept so far stays
            raise
        if self._once:
            self.store.commit()
        return found


class Scratch:
    """Room for values of a step that go to disk and come back within it: one chunk for each, taken when this is made.

    A chunk is free again when nobody has the tensor in it.
    """

    def __init__(self, directory: str | os.PathLike[str], sizes: Sequence[int], rank: int = 0) -> None:
        self._store = _store(directory, sizes, rank, 1)
        self._free: dict[int, list[int]] = {}
        for number, nbytes in enumerate(sizes):
            self._free.setdefault(nbytes, []).append(number)

    def write(self, x: torch.Tensor, before: Before | None = None) -> Moving:
        free = self._free.get(x.nbytes)
        if not free:
            raise DiskError(
                f"there is no room for another {x.nbytes} bytes in {self._store.path!r}. Try: step.init, or the step "
                "by itself"
            )
        number = free.pop()
        on_disk = OnDisk(torch.empty_like(x, device="meta", memory_format=torch.preserve_format), self._store, number)
        weakref.finalize(on_disk, free.append, number).atexit = False
        return writing(on_disk, x, before)

    @contextmanager
    def used(self) -> Iterator[None]:
        """What runs inside and writes a value to disk writes it here."""
        before = SCRATCH.set(self)
        try:
            yield
        finally:
            SCRATCH.reset(before)


SCRATCH: ContextVar[Scratch | None] = ContextVar("SCRATCH", default=None)
"""Where the step that runs writes values of its own. Outside of one a tensor has one tier, and to write it there is to
copy it."""


class DiskTransaction:
    """What a step may write to, of all parts that it is given: all of it counts at its end, or none.

    Where no part lies on disk there is nothing to do. `committed`: some of it counts, so that to forget the rest is to
    lose the state.
    """

    def __init__(self, parts: Iterable[torch.Tensor]) -> None:
        self.committed = False
        held = list(parts)
        # Few kinds of tensors, and many of each.
        some = any(issubclass(kind, OnDisk) for kind in set(map(type, held)))
        self._parts = [x for x in held if isinstance(x, OnDisk)] if some else []
        self._stores = list({id(x.store): x.store for x in self._parts if x.store is not None}.values())

    def commit(self) -> None:
        for store in self._stores:
            if store.changed:
                store.commit()
                self.committed = True

    def rollback(self) -> None:
        for store in self._stores:
            store.rollback()
        for x in self._parts:
            x.writing = None
