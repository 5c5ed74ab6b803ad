"""Tensors that modules keep beside parameters and buffers, in plain attributes, containers and helper objects.

Problem: a table may lie in a dict of lists or in an object that is an attribute; and a module that fills one while it
is traced would keep a tensor without data. Idea: one bounded walk over what plain attributes reach, and a copy of the
containers from before the trace, from which whatever the trace put there is taken out again.

    self.cache = None    -> the trace: self.cache = <traced>    -> after the trace: self.cache = None
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import attrs
from torch import Tensor, nn

from colofunc import compat

REGISTERED = ("_parameters", "_buffers", "_modules")
# Containers within containers are followed this far, and no further into objects that reach the whole program.
MOST_DEPTH = 8
OPAQUE = (nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType)


@attrs.frozen
class ContainerBefore:
    """A container as it was before a trace. `attribute`: which one leads to it; None for the module's own namespace."""

    module: nn.Module
    attribute: str | None
    container: dict[Any, Any] | list[Any] | set[Any]
    before: dict[Any, Any] | list[Any] | set[Any]


def plain_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, value) of a module's attributes beside what it has registered."""
    for name, value in list(vars(module).items()):
        if name not in REGISTERED:
            yield name, value


def reached(value: Any, depth: int = MOST_DEPTH, seen: set[int] | None = None) -> Iterator[Any]:
    """Tensors and containers that a value is or holds, each container once."""
    if isinstance(value, Tensor):
        yield value
        return
    inside = _inside(value)
    seen = set() if seen is None else seen
    if inside is None or id(value) in seen or depth == 0:
        return
    seen.add(id(value))
    yield value
    for item in inside:
        yield from reached(item, depth - 1, seen)


def _inside(value: Any) -> list[Any] | None:
    """What a container or plain object holds; None for anything else."""
    # Other mappings may read a file at each look.
    if isinstance(value, (dict, types.MappingProxyType)):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    namespace = None if isinstance(value, OPAQUE) else getattr(value, "__dict__", None)
    return [namespace] if isinstance(namespace, dict) else None


def kept_attributes(module: nn.Module) -> list[ContainerBefore]:
    """What the plain attributes of a module and its submodules hold now."""
    kept = []
    for part in module.modules():
        kept.append(ContainerBefore(part, None, vars(part), dict(vars(part))))
        for name, value in plain_attributes(part):
            for container in reached(value):
                for kind in (dict, list, set):
                    if isinstance(container, kind):
                        kept.append(ContainerBefore(part, name, container, kind(container)))
    return kept


def put_back(kept: ContainerBefore) -> list[tuple[str, Tensor]]:
    """Take what a trace has put into a container out of it. Returns these tensors, each with its attribute."""
    container, before = kept.container, kept.before
    if not isinstance(container, dict) or not isinstance(before, dict):
        old = {id(item) for item in before}
        traced: list[Tensor] = []
        for item in container:
            if id(item) not in old:
                traced += _traced(item)
        if traced and isinstance(container, list):
            container[:] = before
        elif traced and isinstance(container, set):
            container.clear()
            container.update(before)
        return [(str(kept.attribute), tensor) for tensor in traced]
    found = []
    for key, item in list(container.items()):
        if key in before and before[key] is item:
            continue
        traced = _traced(item)
        found += [(kept.attribute or str(key), tensor) for tensor in traced]
        if traced and key in before:
            container[key] = before[key]
        elif traced:
            del container[key]
    return found


def _traced(value: Any) -> list[Tensor]:
    tensors = [x for x in reached(value) if isinstance(x, Tensor)]
    return [x for x in tensors if isinstance(compat.unwrap_functorch(x), compat.FakeTensor)]
