"""Twins: the operator that writes what another one computes over memory that is there, as torch's schemas say.

Problem: a list of operators that can work in place is never complete, and says again what each schema says. Idea: a
name, its arguments and what is written of them (`Tensor(a!)`) are enough.

    index_copy(x, ...) -> y                  index_copy_(x!, ...)                       "_" behind the name
    native_norm_functional(...) -> y, m, v   native_norm(..., m!, v!) -> y              "_functional" gone
    mul(x, y) -> z                           mul(x, y, out=z!)                          `out_twin`
    slice_scatter(x, ...) -> y               colofunc::slice_scatter_(x!, ...)          ours, where torch has none (`ops.scatter`)

The twin's own results come first among those of the functional operator, and those that it writes follow in the order
of the arguments that they are written over. Random operators have no twin, since the order of draws would have to be
theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import attrs
import torch

from colofunc.errors import ProgramError
from colofunc.ops.targets import overload, target_of


@attrs.frozen
class Twin:
    """`target` takes the same arguments.

    `places`: (result of the functional operator, argument that it is written over).

    `own`: how many results are its own; the others are what it has written (`aliased`).
    """

    target: str
    places: tuple[tuple[int, int], ...]
    own: int
    aliased: int

    def outs(self, outs: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """The results of the functional operator that are still its own."""
        return (*outs[: self.own], *(None,) * self.aliased)


@cache
def twin_of(target: str) -> Twin | None:
    """The in-place form of a functional operator; None where there is none."""
    functional = _registered(target)
    if functional is None or not _is_functional(functional) or torch.Tag.nondeterministic_seeded in functional.tags:
        return None
    for name in _names(target):
        found = _registered(name)
        if found is None:
            continue
        written = [place for place, argument in enumerate(found._schema.arguments) if _is_written(argument)]
        own = sum(returned.alias_info is None for returned in found._schema.returns)
        if (
            written
            and _arguments(found) == _arguments(functional)
            and own + len(written) == len(functional._schema.returns)
        ):
            places = tuple((own + place, position) for place, position in enumerate(written))
            return Twin(name, places, own, len(found._schema.returns) - own)
    return None


@cache
def out_twin(target: str) -> tuple[str, str] | None:
    """(operator, argument) that gives a functional one its result's memory.

    None where torch has none that takes no more than that.

    Those that torch generates are none: they compute the result elsewhere and copy it.
    """
    functional = _registered(target)
    if functional is None or not _is_functional(functional) or len(functional._schema.returns) != 1:
        return None
    wanted = _arguments(functional)
    for each in _siblings(functional):
        if torch.Tag.generated in each.tags or not each._schema.arguments:
            continue
        last = each._schema.arguments[-1]
        if last.kwarg_only and _is_written(last) and _arguments(each)[:-1] == wanted:
            return target_of(each), last.name
    return None


@cache
def functional_of(target: str) -> tuple[str, str] | None:
    """(functional operator, argument that it does not have or "") of one that `twin_of` or `out_twin` gives for a
    single result.
    """
    namespace, _, rest = target.partition(".")
    name, _, variant = rest.partition(".")
    if name.endswith("_"):
        behind = f".{variant}" if variant else ""
        for plain in (f"{namespace}.{name[:-1]}{behind}", f"aten.{name[:-1]}.{variant or 'default'}"):
            twin = twin_of(plain)
            if twin is not None and twin.target == target:
                return plain, ""
        return None
    operator = _registered(target)
    for each in [] if operator is None else _siblings(operator):
        out = out_twin(target_of(each))
        if out is not None and out[0] == target:
            return target_of(each), out[1]
    return None


def _names(target: str) -> Iterator[str]:
    namespace, _, rest = target.partition(".")
    name, _, variant = rest.partition(".")
    behind = f".{variant}" if variant else ""
    yield f"{namespace}.{name}_{behind}"
    if name.endswith("_functional"):
        yield f"{namespace}.{name.removesuffix('_functional')}{behind}"
    if namespace == "aten":
        yield f"colofunc.{name}_"


def _registered(target: str) -> Any:
    """The operator of a target; None for one that only executors know, and for a name that nobody has."""
    try:
        return overload(target)
    except ProgramError:
        return None


def _siblings(operator: Any) -> list[Any]:
    packet = operator.overloadpacket
    return [getattr(packet, name) for name in packet.overloads()]


def _is_functional(operator: Any) -> bool:
    schema = operator._schema
    return not schema.is_mutable and all(returned.alias_info is None for returned in schema.returns)


def _is_written(argument: Any) -> bool:
    return (
        argument.alias_info is not None
        and argument.alias_info.is_write
        and not isinstance(argument.type, torch.ListType)
    )


def _arguments(operator: Any) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in operator._schema.arguments]
