"""Tensors that modules keep beside parameters and buffers, in plain attributes, containers and helper objects.

Problem: a table may lie in a dict of lists, in an object or a function that is an attribute, or in a dict of the
class; and a module that fills one while it
is traced would keep a tensor without data. Idea: one bounded walk over what plain attributes reach, and a copy of the
containers from before the trace, from which whatever the trace put there is taken out again.

    self.cache = None    -> the trace: self.cache = <traced>    -> after the trace: self.cache = None
"""

from __future__ import annotations

import functools
import gc
import types
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from colofunc import compat

REGISTERED = ("_parameters", "_buffers", "_modules")
# Containers within containers are followed this far, and no further into objects that reach the whole program.
MOST_DEPTH = 8
OPAQUE = (nn.Module, type, types.ModuleType)
# What holds nothing: long lists of these are passed over quickly.
ATOMS = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size})
# What is looked at of a class: tensors and containers that its objects share, and caches of its methods.
SHARED = (Tensor, dict, list, set, deque, functools._lru_cache_wrapper)
Container = dict[Any, Any] | list[Any] | set[Any] | deque[Any]


@attrs.frozen
class ContainerBefore:
    """A container as it was before a trace. `attribute`: which one leads to it; None for the module's own namespace."""

    module: nn.Module
    attribute: str | None
    container: Container
    before: Container


def plain_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, value) of a module's attributes beside what it has registered, and of containers of its class."""
    own = vars(module)
    for name, value in list(own.items()):
        if name not in REGISTERED:
            yield name, value
    for cls in _own_classes(type(module)):
        for name, value in list(vars(cls).items()):
            if isinstance(value, SHARED) and name not in own and not name.startswith("__"):
                yield name, value


def attribute_of(module: nn.Module, name: str) -> Any:
    """What `plain_attributes` says, or a buffer; None where there is none."""
    namespaces = [vars(module), vars(module).get("_buffers", {}), *map(vars, _own_classes(type(module)))]
    return next((namespace[name] for namespace in namespaces if name in namespace), None)


def _own_classes(cls: type) -> list[type]:
    """The classes of a module that are not torch's base class."""
    return [base for base in cls.__mro__ if base not in nn.Module.__mro__]


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
        if type(item) not in ATOMS:
            yield from reached(item, depth - 1, seen)


def _inside(value: Any) -> list[Any] | None:
    """What a container, a function or a plain object holds; None for anything else."""
    # Other mappings may read a file at each look.
    if isinstance(value, (dict, types.MappingProxyType)):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return list(value)
    if isinstance(value, types.FunctionType):
        return _inside_function(value)
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, functools._lru_cache_wrapper):
        return gc.get_referents(value)  # the function, and the results that are remembered
    if isinstance(value, OPAQUE):
        return None
    namespace = getattr(value, "__dict__", None)
    slots = _slots(value)
    if isinstance(namespace, dict):
        return [namespace, *slots]
    return slots or None


def _inside_function(function: types.FunctionType) -> list[Any]:
    """What a function has of its own: defaults, and the variables of functions around it."""
    held = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # a variable that has no value yet
            held.append(cell.cell_contents)
    return held


def _slots(value: Any) -> list[Any]:
    """What lies in the slots of an object."""
    held = []
    for cls in type(value).__mro__:
        if "__slots__" in vars(cls):
            for member in list(vars(cls).values()):
                if isinstance(member, types.MemberDescriptorType):
                    with suppress(AttributeError):  # a slot that is empty
                        held.append(member.__get__(value))
    return held


def kept_attributes(module: nn.Module) -> list[ContainerBefore]:
    """What the plain attributes of a module and its submodules hold now."""
    kept: list[ContainerBefore] = []
    for part in module.modules():
        kept.append(ContainerBefore(part, None, vars(part), dict(vars(part))))
        for name, value in plain_attributes(part):
            for container in reached(value):
                for kind in (dict, list, set, deque):
                    if isinstance(container, kind):
                        kept.append(ContainerBefore(part, name, container, kind(container)))
    return kept


def refill(container: Container, before: Container) -> None:
    """Put into a container what it held before."""
    if isinstance(container, list):
        container[:] = before
    elif isinstance(container, deque):
        container.clear()
        container.extend(before)
    else:
        container.clear()
        container.update(before)


def put_back(kept: ContainerBefore) -> list[tuple[str, Tensor]]:
    """Take what a trace has put into a container out of it. Returns these tensors, each with its attribute."""
    container, before = kept.container, kept.before
    if not isinstance(container, dict) or not isinstance(before, dict):
        old = {id(item) for item in before}
        traced: list[Tensor] = []
        for item in container:
            if id(item) not in old:
                traced += _traced(item)
        if traced:
            refill(container, before)
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
