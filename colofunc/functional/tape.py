"""Tape: what a constructor did to tensors, in order, and how to do it again for one of them.

Problem: initial values come from a chain of in-place operators on views (`weight.normal_()`, `weight[pad].zero_()`,
`weight.copy_(table)`), drawn from one generator. Idea: every memory (`TapeMemory`) keeps the numbers of the entries that
wrote to it. To make a tensor, collect backwards what its value needs and run that forwards, each draw from the state
that the generator had when it was recorded.

    0  w = empty(4, 2)         cell A            make(w) needs 3 (writes all of A) and 4:
    1  w.uniform_()            cell A  draws         generator <- state before 3; normal_; zero_
    2  b = zeros(4)            cell B
    3  w.normal_()             cell A  draws         entry 1 is overwritten, so it is not run again
    4  w[0].zero_()            cell A
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch.utils import _pytree as pytree

from colofunc import compat
from colofunc.errors import InputError
from colofunc.program.lazy import LazyTensor, Slices, make

aten = torch.ops.aten
META = torch.device("meta")
# In-place operators whose result does not depend on what was there.
OVERWRITES = {
    aten.normal_.default, aten.uniform_.default, aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.copy_.default,
    aten.random_.default, aten.random_.to, getattr(aten.random_, "from"), aten.bernoulli_.float, aten.exponential_.default,
    aten.log_normal_.default, aten.cauchy_.default, aten.geometric_.default,
}  # fmt: skip


@attrs.define(eq=False)
class TapeMemory:
    """One memory: a meta tensor that stands for it, and the numbers of the entries that wrote to it."""

    base: torch.Tensor
    writes: list[int] = attrs.field(factory=list)


@attrs.frozen(eq=False)
class View:
    """A tensor of the tape as an argument: where it lies in its cell."""

    cell: TapeMemory
    like: torch.Tensor  # meta

    @property
    def covers(self) -> bool:
        """Whether it is all of its cell, element by element."""
        return self.like.numel() * self.like.itemsize == self.cell.base.untyped_storage().nbytes()


@attrs.define(eq=False)
class TapedCall:
    """One call. `made`: (position among the flat results, cell, meta) of new memories.

    `written`: cells it writes to.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    default_dtype: torch.dtype
    written: tuple[View, ...]
    made: tuple[tuple[int, TapeMemory, torch.Tensor], ...] = ()
    draws: bool = False
    state: torch.Tensor | None = None  # of the generator before the call

    def views(self) -> list[View]:
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, View)]


@attrs.frozen(eq=False)
class FromTape:
    """The value of one tensor of a tape."""

    tape: Tape
    view: View

    def make(self) -> torch.Tensor:
        return self.tape.value(self.view)

    def read(self, box: Slices) -> torch.Tensor | None:
        return None

    def token(self) -> int:
        return self.tape.token(self.view)


class Tape:
    """Entries in order.

    `limit`: how many random numbers are drawn while recording (a quarter at once), None for all.
    """

    def __init__(self, limit: int | None) -> None:
        self.entries: list[TapedCall] = []
        self._limit = limit
        self._drawn = 0
        self._late: torch.Tensor | None = None  # state of the generator where drawing was put off
        self._undrawn: list[TapedCall] = []
        self._scratch = torch.empty(0, dtype=torch.uint8)

    # ---- recording ----

    def add(self, entry: TapedCall) -> None:
        number = len(self.entries)
        self.entries.append(entry)
        cells = {id(view.cell): view.cell for view in entry.written}  # each once
        for cell in cells.values():
            cell.writes.append(number)
        for _, cell, _ in entry.made:
            cell.writes.append(number)
        if entry.draws:
            self._draw(entry)

    def _draw(self, entry: TapedCall) -> None:
        """Move the generator on as the call does, now or later."""
        generator = entry.kwargs.get("generator")
        if isinstance(generator, torch.Generator):
            entry.state = generator.get_state()
            self._throw_away(entry, len(self.entries) - 1)
            return
        if self._late is None:
            count = sum(view.like.numel() for view in entry.written)
            count += sum(like.numel() for _, _, like in entry.made)
            self._drawn += count
            if self._limit is not None and (self._drawn > self._limit or count > self._limit // 4):
                self._late = torch.get_rng_state()
            else:
                entry.state = torch.get_rng_state()
                self._throw_away(entry, len(self.entries) - 1)
                return
        self._undrawn.append(entry)

    def _throw_away(self, entry: TapedCall, number: int) -> None:
        """Run a call that draws, for what it does to the generator."""
        written = {id(view) for view in entry.written}
        known: dict[int, torch.Tensor] = {}  # how much is drawn may depend on what is read
        for view in entry.views():
            if id(view) not in written:
                known[id(view)] = self._value(view, number)

        def argument(x: Any) -> Any:
            if isinstance(x, View):
                return known[id(x)] if id(x) in known else self._scratch_like(x.like)
            return make(x) if isinstance(x, LazyTensor) else x

        with _as_recorded(entry.default_dtype):
            args, kwargs = pytree.tree_map(argument, (entry.args, entry.kwargs))
            entry.func(*args, **kwargs)

    def _scratch_like(self, like: torch.Tensor) -> torch.Tensor:
        """Memory of this geometry whose values nobody reads."""
        extent = 0  # bytes from the first element to the end of the last
        if like.numel():
            last = sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
            extent = (1 + last) * like.itemsize
        if self._scratch.numel() < extent:
            self._scratch = torch.empty(extent, dtype=torch.uint8)
        return torch.empty(0, dtype=like.dtype).set_(self._scratch.untyped_storage(), 0, like.shape, like.stride())

    def close(self) -> None:
        """End of the recording. Where numbers are still to be drawn, the generator goes on from a seed of its own."""
        self._scratch = torch.empty(0, dtype=torch.uint8)
        if self._late is not None:
            torch.default_generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_()))

    @property
    def put_off(self) -> bool:
        return self._late is not None

    def _catch_up(self) -> None:
        """Draw what was put off, to know the generator's state at every entry."""
        if not self._undrawn:
            return
        assert self._late is not None, "entries are put off from a known state on"
        numbers = {id(entry): number for number, entry in enumerate(self.entries)}
        before = torch.get_rng_state()
        try:
            torch.set_rng_state(self._late)
            while self._undrawn:
                entry = self._undrawn[0]
                entry.state = torch.get_rng_state()
                self._throw_away(entry, numbers[id(entry)])
                self._undrawn.pop(0)
                self._late = torch.get_rng_state()
        finally:
            torch.set_rng_state(before)
            self._scratch = torch.empty(0, dtype=torch.uint8)

    # ---- making ----

    def value(self, view: View) -> torch.Tensor:
        """What a tensor holds after everything that was recorded, in memory of its own."""
        return self._value(view, len(self.entries))

    def token(self, view: View) -> int:
        """From the first state of the generator and the entries that the value takes."""
        state = next((entry.state for entry in self.entries if entry.state is not None), self._late)
        seed = b"" if state is None else state.numpy().tobytes()
        needed, _ = self._needed(view.cell, len(self.entries))
        calls = [(number, str(self.entries[number].func)) for number in needed]
        return zlib.crc32(repr(calls).encode(), zlib.crc32(seed))

    def _value(self, view: View, until: int) -> torch.Tensor:
        with compat.disable_modes(), compat.no_function_modes(), torch.no_grad():
            needed, keep = self._needed(view.cell, until)
            if any(self.entries[number].draws and self.entries[number].state is None for number in needed):
                self._catch_up()
            last: dict[int, int] = {}  # cell -> the last entry that reads or writes it
            for number in needed:
                for read in self.entries[number].views():
                    last[id(read.cell)] = number
            memories: dict[int, torch.UntypedStorage] = {}
            for number in needed:
                self._run(self.entries[number], memories)
                for cell in list(memories):
                    if cell != keep and last.get(cell, number) <= number:
                        del memories[cell]
            out = _at(memories[keep] if keep in memories else _memory(view.cell), view.like)
            return out if view.covers else out.clone()

    def _needed(self, cell: TapeMemory, until: int) -> tuple[list[int], int]:
        """Entries that the value of a cell before entry `until` takes, in order."""
        needed: set[int] = set()
        known: dict[int, int] = {}
        pending = [(cell, until)]
        while pending:
            here, bound = pending.pop()
            if known.get(id(here), -1) >= bound:
                continue
            known[id(here)] = bound
            for number in reversed(here.writes):
                if number >= bound:
                    continue
                entry = self.entries[number]
                overwrites = entry.func in OVERWRITES
                if number not in needed:
                    needed.add(number)
                    for view in entry.views():
                        if not (overwrites and view in entry.written):
                            pending.append((view.cell, number))
                if overwrites and any(view.cell is here and view.covers for view in entry.written):
                    break  # what was there before makes no difference
        return sorted(needed), id(cell)

    def _run(self, entry: TapedCall, memories: dict[int, torch.UntypedStorage]) -> None:
        def argument(x: Any) -> Any:
            if isinstance(x, View):
                if id(x.cell) not in memories:
                    memories[id(x.cell)] = _memory(x.cell)
                return _at(memories[id(x.cell)], x.like)
            if isinstance(x, torch.Generator) and entry.state is not None:
                return x.clone_state().set_state(entry.state)
            return make(x) if isinstance(x, LazyTensor) else x

        args, kwargs = pytree.tree_map(argument, (entry.args, entry.kwargs))
        before = torch.get_rng_state() if entry.draws else None
        try:
            if entry.state is not None and not isinstance(entry.kwargs.get("generator"), torch.Generator):
                torch.set_rng_state(entry.state)
            with _as_recorded(entry.default_dtype):
                flat = pytree.tree_leaves(entry.func(*args, **kwargs))
        finally:
            if before is not None:
                torch.set_rng_state(before)
        for position, cell, like in entry.made:
            memories[id(cell)] = _laid_out(flat[position], like, cell).untyped_storage()


def _memory(cell: TapeMemory) -> torch.UntypedStorage:
    return torch.empty(cell.base.untyped_storage().nbytes(), dtype=torch.uint8).untyped_storage()


def _at(memory: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=like.dtype).set_(memory, like.storage_offset(), like.shape, like.stride())


def _laid_out(real: torch.Tensor, like: torch.Tensor, cell: TapeMemory) -> torch.Tensor:
    """A result in the geometry that was recorded for it."""
    same = (real.stride(), real.storage_offset()) == (like.stride(), like.storage_offset()) or real.numel() < 2
    if same and real.untyped_storage().nbytes() == cell.base.untyped_storage().nbytes():
        return real
    return _at(_memory(cell), like).copy_(real)


@contextmanager
def _as_recorded(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    if before != dtype:
        torch.set_default_dtype(dtype)
    try:
        with torch.no_grad():
            yield
    finally:
        if before != dtype:
            torch.set_default_dtype(before)


class Recording(compat.TorchDispatchMode):
    """While it is on, tensors that are made on the CPU have no data, and what is done to them goes to the tape."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = tape
        self._plain: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}  # id -> (tensor, version, copy)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        written = _written(func, args, kwargs)
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if not any(map(self._is_mine, leaves)) and (leaves or not _makes_on_cpu(func, kwargs)):
            if draws and self.tape.put_off:
                raise InputError(
                    f"lazy: {func} draws for a tensor that has data, in a model whose draws are put off. Try: draw=True"
                )
            return func(*args, **kwargs)
        written_here = [x for x in written if self._is_mine(x)]
        results = None
        if len(written_here) == len(written):
            results = self._without_data(func, args, kwargs)
        if results is None and written_here:
            raise InputError(f"lazy: {func} writes to a tensor what cannot be known without data")
        if results is None:
            return self._with_data(func, args, kwargs)
        if not any(isinstance(result, torch.Tensor) for result in pytree.tree_leaves(results)):
            return results
        return self._record(func, args, kwargs, results, written_here, draws)

    def _is_mine(self, x: Any) -> bool:
        return isinstance(x, LazyTensor) and isinstance(x.source, FromTape) and x.source.tape is self.tape

    def _without_data(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The call on meta tensors; None where it takes data."""
        metas, named = pytree.tree_map_only(torch.Tensor, self._meta, (args, kwargs))
        if _has_device(func):
            named["device"] = META
        named.pop("pin_memory", None)
        if isinstance(named.get("generator"), torch.Generator):
            named["generator"] = None
        try:
            return func(*metas, **named)
        except (RuntimeError, NotImplementedError):
            return None

    def _meta(self, x: torch.Tensor) -> torch.Tensor:
        if self._is_mine(x):
            return x.source.view.like  # type: ignore[attr-defined]
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=META)

    def _with_data(self, func: Any, args: Any, kwargs: Any) -> Any:
        made, named = pytree.tree_map_only(LazyTensor, make, (args, kwargs))
        return func(*made, **named)

    def _record(self, func: Any, args: Any, kwargs: Any, results: Any, written: list[Any], draws: bool) -> Any:
        flat, tree = pytree.tree_flatten(results)
        owners: dict[int, Any] = {}  # the meta tensor of an operand -> the operand
        cells: dict[int, TapeMemory] = {}  # memory -> its cell
        for x in pytree.tree_leaves((args, kwargs)):
            if self._is_mine(x):
                view = x.source.view
                owners[id(view.like)] = x
                cells[compat.storage_key(view.like)] = view.cell
        made: list[tuple[int, TapeMemory, torch.Tensor]] = []
        out: list[Any] = []
        for place, result in enumerate(flat):
            if not isinstance(result, torch.Tensor):
                out.append(result)
            elif id(result) in owners:
                out.append(owners[id(result)])  # an operator in place returns its operand
            else:
                key = compat.storage_key(result)
                if key not in cells:
                    cells[key] = TapeMemory(result)
                    made.append((place, cells[key], result))
                out.append(LazyTensor(FromTape(self.tape, View(cells[key], result)), result))
        if made or written:
            views, named = pytree.tree_map_only(torch.Tensor, self._argument, (args, kwargs))
            wrote = {id(x.source.view) for x in written}
            arguments = pytree.tree_leaves((views, named))
            places = tuple(x for x in arguments if isinstance(x, View) and id(x) in wrote)
            self.tape.add(TapedCall(func, views, named, torch.get_default_dtype(), places, tuple(made), draws))
        for x in written:
            if x.shape != x.source.view.like.shape or x.stride() != x.source.view.like.stride():
                raise InputError(f"lazy: {func} changes the shape of a tensor in place, which a lazy one cannot follow")
        return pytree.tree_unflatten(out, tree)

    def _argument(self, x: torch.Tensor) -> Any:
        """How the tape keeps a tensor: a view of a cell, another lazy tensor, or a copy of data as it is now."""
        if self._is_mine(x):
            return x.source.view  # type: ignore[attr-defined]
        if isinstance(x, LazyTensor):
            return LazyTensor(x.source, x)
        known = self._plain.get(id(x))
        if known is None or known[0] is not x or known[1] != compat.version(x):
            known = self._plain[id(x)] = (x, compat.version(x), x.detach().clone())
        return known[2]


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Operands that a call writes to."""
    found: list[torch.Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else None
            value = kwargs.get(argument.name, value)
            found += [x for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]
    return found


def _makes_on_cpu(func: Any, kwargs: Any) -> bool:
    """Whether a call without tensors makes one on the CPU."""
    device = kwargs.get("device")
    on_cpu = device is None or torch.device(device).type == "cpu"
    return on_cpu and _has_device(func)


def _has_device(func: Any) -> bool:
    """Whether a call says on which device it makes what it returns."""
    return any(argument.name == "device" for argument in func._schema.arguments)
