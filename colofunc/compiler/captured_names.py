"""What a step function reads from outside: names in globals and closures whose rebinding means another trace.

Problem: Python runs once per signature, so a function that reads a global sees the value of its trace for ever, however
often the name is bound anew. Idea: the code says which names it reads; what they were bound to is remembered with the trace
and looked at before each call, which costs a dictionary look-up per name.

    scale = 2.0
    step = cf.shard(lambda x: x * scale, mesh)       # reads: global 'scale' = 2.0
    step(x); scale = 3.0; step(x)                    # traced again: global 'scale' was 2.0 and is 3.0

Watched are numbers, strings, None, tensors that the trace captured, and functions of the same file with what they read
in turn. Not watched: what lies inside of other things (an attribute, an item of a dict or list), and names that the function
itself writes.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from types import CellType, CodeType, FunctionType
from typing import Any

import attrs
import torch

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
    for read in _walk(fn, 4, set()):
        if isinstance(read.was, (*PLAIN, FunctionType)) or id(read.was) in tensors:
            found.setdefault((read.name, id(read.was)), read)
    return tuple(found.values())


def _walk(fn: Any, depth: int, seen: set[int]) -> Iterator[Read]:
    fn = getattr(fn, "__func__", fn)
    if not isinstance(fn, FunctionType) or id(fn) in seen or depth < 0:
        if attrs.has(type(fn)):  # a transform's record around a function
            for field in attrs.fields(type(fn)):
                yield from _walk(getattr(fn, field.name), depth - 1, seen) if callable(getattr(fn, field.name)) else ()
        return
    seen.add(id(fn))
    read, written = names_of(fn.__code__)
    around = fn.__globals__
    for name in read - written:
        value = around.get(name, UNBOUND)
        yield Read(f"global {name!r}", partial(around.get, name, UNBOUND), value)
        if isinstance(value, FunctionType) and value.__globals__ is around:
            yield from _walk(value, depth - 1, seen)
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False):
        value = inside(cell)
        if name not in written:
            yield Read(f"{name!r} of the function around", partial(inside, cell), value)
        yield from _walk(value, depth - 1, seen)


def inside(cell: CellType) -> Any:
    """What a closure's cell holds."""
    try:
        return cell.cell_contents
    except ValueError:  # a name that is assigned later
        return UNBOUND


@lru_cache(maxsize=1 << 12)
def names_of(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """(globals that the code reads, globals and names of functions around that it writes), functions inside included."""
    read, written = set(), set()
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            read.add(step.argval)
        elif step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") or (step.opname == "STORE_DEREF" and step.argval in code.co_freevars):
            written.add(step.argval)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            more, stored = names_of(inner)
            read |= more
            written |= stored
    return frozenset(read), frozenset(written)
