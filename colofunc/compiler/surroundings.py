"""What lies around a call and is part of the traced program: default dtype, autocast, modules' modes, frozen weights.

Problem: Python runs once per signature, so what a step function finds around it has to be a part of the signature; and to
look for all of it at each call costs more than many a small step. Idea: looking for it also says where it was found. As
long as the same things are bound there, and have the modes and children that they had, nothing has to be looked for again.

    found = look_around(step_fn)      # walks closures, globals and modules
    found.key                         # part of the signature
    found.stands()                    # the same, without the walk
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from types import FunctionType
from typing import Any

import attrs
import torch

from colofunc.compiler.captured_names import UNBOUND, inside, names_of
from colofunc.program.tracing.modules_used import Mode, Modes, Weights

DEPTH = 3
"""Functions within functions that are looked into."""


@attrs.define(eq=False)
class Surroundings:
    """What was found around a step function, and where."""

    ambient: tuple[Any, ...]
    flags: list[Any] = attrs.field(factory=list)
    places: list[tuple[Callable[[], Any], Any]] = attrs.field(factory=list)  # (what reads a name, what it was bound to)
    modes: list[Mode] = attrs.field(factory=list)
    frozen: list[Weights] = attrs.field(factory=list)

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
    """What torch itself has around a call: the default dtype, and the dtype of autocast for each device that has it on."""
    on = tuple(torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None for device in ("cpu", "cuda"))
    return torch.get_default_dtype(), on


def look_around(fn: Callable[..., Any]) -> Surroundings:
    """Default dtype, autocast, train or eval mode of every module that a step function uses from outside, and which frozen
    weights a model has.

    Looked for in its closure, defaults and the globals that it names, and in functions found there: a switch of the mode,
    or another tensor as a frozen weight, means another trace. A model that lies elsewhere is noted when a trace calls it (`modules_used`).
    """
    found = Surroundings(ambient())
    _walk(fn, DEPTH, {id(fn)}, found)
    return found


def _walk(fn: Any, depth: int, seen: set[int], found: Surroundings) -> None:
    held: list[Any] = []
    for cell in getattr(fn, "__closure__", None) or ():
        held.append(inside(cell))
        found.places.append((partial(inside, cell), held[-1]))
    held += [getattr(fn, "__self__", None), *(getattr(fn, "__defaults__", None) or ())]
    if isinstance(fn, FunctionType):
        around = fn.__globals__
        for name in sorted(names_of(fn.__code__)[0]):
            thing = around.get(name, UNBOUND)
            found.places.append((partial(around.get, name, UNBOUND), thing))
            if not isinstance(thing, FunctionType) or thing.__globals__ is around:  # functions of other files are not the user's step
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
            modes = [Mode.of(module) for module in piece.modules()]
            found.modes += modes
            found.flags += [mode.training for mode in modes]
        elif name == "frozen" and isinstance(piece, dict):
            weights = Weights.of(piece)
            found.frozen.append(weights)
            found.flags += weights.ids
        elif depth and callable(piece) and hasattr(piece, "__closure__") and id(piece) not in seen:
            seen.add(id(piece))
            _walk(piece, depth - 1, seen, found)
