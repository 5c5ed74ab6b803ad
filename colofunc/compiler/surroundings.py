"""What lies around a call and is part of the traced program: default dtype, autocast, modules' modes, frozen weights.

Problem: Python runs once per signature, so what a step function finds around it has to be a part of the signature; and
to look for all of it at each call costs more than many a small step. Idea: looking for it also says where it was found.
As long as the same things are bound there, and have the modes and children that they had, nothing has to be looked for
again.

    found = look_around(step_fn)      # walks closures, globals and modules
    found.key                         # part of the signature
    found.stands()                    # the same, without the walk
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, lru_cache, partial
from types import CellType, CodeType, FunctionType
from typing import Any

import attrs
import torch

from colofunc.program.tracing.modules_used import FrozenWeights, Modes, ModuleMode

DEPTH = 3
"""Functions within functions that are looked into."""


@attrs.define(eq=False)
class Surroundings:
    """What was found around a step function, and where."""

    ambient: tuple[Any, ...]
    flags: list[Any] = attrs.field(factory=list)
    places: list[tuple[Callable[[], Any], Any]] = attrs.field(factory=list)  # (what reads a name, what it was bound to)
    modes: list[ModuleMode] = attrs.field(factory=list)
    frozen: list[FrozenWeights] = attrs.field(factory=list)

    @property
    def key(self) -> tuple[Any, ...]:
        """Part of the signature: (default dtype, autocast, train or eval modes and frozen weights)."""
        return *self.ambient, tuple(self.flags)

    def stands(self) -> bool:
        """Whether all of it is as it was found."""
        if ambient() != self.ambient:
            return False
        for read, was in self.places:
            if read() is not was:
                return False
        return self._asked.stand() and all(weights.stands() for weights in self.frozen)

    @cached_property
    def _asked(self) -> Modes:
        """The modes; first read when all have been found."""
        return Modes.of(self.modes)


def ambient() -> tuple[Any, ...]:
    """What torch itself has around a call: the default dtype, and that of autocast on each device, where it is on."""
    return torch.get_default_dtype(), (_autocast_dtype("cpu"), _autocast_dtype("cuda"))


def _autocast_dtype(device: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def look_around(fn: Callable[..., Any]) -> Surroundings:
    """Default dtype, autocast, train or eval mode of every module that a step function uses from outside, and which
    frozen weights a model has.

    Looked for in its closure, defaults and the globals that it names, and in functions found there: a switch of the
    mode, or another tensor as a frozen weight, means another trace. A model that lies elsewhere is noted when a trace
    calls it (`modules_used`).
    """
    found = Surroundings(ambient())
    _walk(fn, DEPTH, {id(fn)}, found)
    return found


def _walk(fn: Any, depth: int, seen: set[int], found: Surroundings) -> None:
    held: list[Any] = []
    for cell in getattr(fn, "__closure__", None) or ():
        held.append(cell_content(cell))
        found.places.append((partial(cell_content, cell), held[-1]))
    held += [getattr(fn, "__self__", None), *(getattr(fn, "__defaults__", None) or ())]
    if isinstance(fn, FunctionType):
        around = fn.__globals__
        for name in sorted(global_names(fn.__code__)[0]):
            thing = around.get(name, UNBOUND)
            found.places.append((partial(around.get, name, UNBOUND), thing))
            if (
                not isinstance(thing, FunctionType) or thing.__globals__ is around
            ):  # functions of other files are not the user's step
                held.append(thing)
    for thing in held:
        _look_at(thing, depth, seen, found)


def _look_at(thing: Any, depth: int, seen: set[int], found: Surroundings) -> None:
    """A module, a record such as a model of `cf.functional`, or a function in which there is more to find."""
    parts: dict[str, Any] = {"": thing}
    if attrs.has(type(thing)):
        parts = {field.name: getattr(thing, field.name) for field in attrs.fields(type(thing))}
        for name, piece in parts.items():
            found.places.append((partial(getattr, thing, name), piece))
    for name, piece in parts.items():
        if isinstance(piece, torch.nn.Module):
            modes = [ModuleMode.of(module) for module in piece.modules()]
            found.modes += modes
            found.flags += [mode.training for mode in modes]
        elif name == "frozen" and isinstance(piece, dict):
            weights = FrozenWeights.of(piece)
            found.frozen.append(weights)
            found.flags += weights.ids
        elif depth and callable(piece) and hasattr(piece, "__closure__") and id(piece) not in seen:
            seen.add(id(piece))
            _walk(piece, depth - 1, seen, found)


# ---- names that a step reads ----
#
# Problem: Python runs once per signature, so a function that reads a global sees the value of its trace for ever,
# however often the name is bound anew. Idea: the code says which names it reads; what they were bound to is remembered
# with the trace and looked at before each call, which costs a dictionary look-up per name.
#
#     scale = 2.0
#     step = cf.shard(lambda x: x * scale, mesh)       # reads: global 'scale' = 2.0
#     step(x); scale = 3.0; step(x)                    # traced again: global 'scale' was 2.0 and is 3.0
#
# Watched are numbers, strings, None, tensors that the trace captured, and functions of the same file with what they
# read in turn. Not watched: what lies inside of other things (an attribute, an item of a dict or list), and names that
# the function itself writes.


PLAIN = (bool, int, float, complex, str, type(None))
UNBOUND = object()
"""What a name without a value is bound to."""


@attrs.frozen(eq=False)
class Read:
    """One name that a trace has read, and what it was bound to."""

    name: str  # "global 'scale'"
    now: Callable[[], Any]
    was: Any

    def change(self) -> str:
        """In words, what has become of it; empty where it is what it was."""
        now = self.now()
        if now is self.was or (type(now) is type(self.was) and isinstance(now, PLAIN) and repr(now) == repr(self.was)):
            return ""
        if isinstance(self.was, PLAIN) and isinstance(now, PLAIN):
            return f"{self.name} was {self.was!r} and is {now!r}"
        return f"{self.name} was bound to another {'function' if isinstance(self.was, FunctionType) else 'value'}"


def reads_of(fn: Any, captured: Iterable[torch.Tensor]) -> tuple[Read, ...]:
    """The names that `fn` reads, directly or through functions of its file. `captured`: tensors that its trace took."""
    tensors = {id(t) for t in captured}
    found: dict[tuple[str, int], Read] = {}
    for read in _names_within(fn, 4, set()):
        if isinstance(read.was, (*PLAIN, FunctionType)) or id(read.was) in tensors:
            found.setdefault((read.name, id(read.was)), read)
    return tuple(found.values())


def _names_within(fn: Any, depth: int, seen: set[int]) -> Iterator[Read]:
    fn = getattr(fn, "__func__", fn)
    if not isinstance(fn, FunctionType) or id(fn) in seen or depth < 0:
        if attrs.has(type(fn)):  # a transform's record around a function
            for field in attrs.fields(type(fn)):
                yield from (
                    _names_within(getattr(fn, field.name), depth - 1, seen) if callable(getattr(fn, field.name)) else ()
                )
        return
    seen.add(id(fn))
    read, written = global_names(fn.__code__)
    around = fn.__globals__
    for name in read - written:
        value = around.get(name, UNBOUND)
        yield Read(f"global {name!r}", partial(around.get, name, UNBOUND), value)
        if isinstance(value, FunctionType) and value.__globals__ is around:
            yield from _names_within(value, depth - 1, seen)
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False):
        value = cell_content(cell)
        if name not in written:
            yield Read(f"{name!r} of the function around", partial(cell_content, cell), value)
        yield from _names_within(value, depth - 1, seen)


def cell_content(cell: CellType) -> Any:
    """What a closure's cell holds."""
    try:
        return cell.cell_contents
    except ValueError:  # a name that is assigned later
        return UNBOUND


@lru_cache(maxsize=1 << 12)
def global_names(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """(globals that the code reads, globals and names of functions around that it writes).

    Those of functions inside are included.
    """
    read, written = set(), set()
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            read.add(step.argval)
        elif step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") or (
            step.opname == "STORE_DEREF" and step.argval in code.co_freevars
        ):
            written.add(step.argval)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            more, stored = global_names(inner)
            read |= more
            written |= stored
    return frozenset(read), frozenset(written)
