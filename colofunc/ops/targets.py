"""Targets: the operator names in a program and the callables they stand for.

`aten.mm.default` is `torch.ops.aten.mm.default`; `colofunc.linear` is `torch.ops.colofunc.linear.default` (outside of
`aten`, the overload `default` is left out). Programs are functional, so a view may as well be a copy: view targets
resolve to their `reshape` form, which runs for any strides.

>>> target_of(resolve("aten.mm.default"))
'aten.mm.default'
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from colofunc.errors import ProgramError
from colofunc.ops.scatter import COPIES_FIRST
from colofunc.ops.torch_facts import facts_of_torch, torch_targets

RESHAPES = frozenset(("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default"))
"""Those that are told the sizes of their result: `view(x, sizes)`."""
KEEP_ORDER = frozenset(torch_targets("keeps_order"))
"""Those whose result has all elements of their operand, in their order, in another shape."""

# Kernels may return other strides than the trace saw; a reshape copies only where a view is impossible.
_RELAXED = {
    "aten.view.default": "aten.reshape.default",
    "aten._unsafe_view.default": "aten.reshape.default",
}


def _as_strided(
    x: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int | None = None
) -> torch.Tensor:
    """Strides in a program are those of the contiguous tensor."""
    return torch.ops.aten.as_strided.default(x.contiguous(), size, stride, offset)


def _view_as_complex(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.view_as_complex.default(x if _lies_in_units(x, 2) else x.contiguous())


def _view_as(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    units = max(1, dtype.itemsize // x.dtype.itemsize)
    lies = x.dtype.itemsize == dtype.itemsize or _lies_in_units(x, units)
    return torch.ops.aten.view.dtype(x if lies else x.contiguous(), dtype)


def _lies_in_units(x: torch.Tensor, count: int) -> bool:
    """Whether each `count` neighbours of the last dim are one piece of memory, which another dtype can be read from."""
    begins = (*x.stride()[:-1], x.storage_offset())
    return x.stride(-1) == 1 and all(step % count == 0 for step in begins)


# Kernels for values that have no strides of their own.
_BY_VALUE: dict[str, Callable[..., torch.Tensor]] = {
    "aten.as_strided.default": _as_strided,
    "aten.view_as_complex.default": _view_as_complex,
    "aten.view.dtype": _view_as,
    **COPIES_FIRST,
}


def is_view(target: str) -> bool:
    """Whether an operator of torch only describes memory anew, so that it costs nothing to run; a reshape where no view
    is possible, which copies, is among them.
    """
    return facts_of_torch(target).view


def keeps_order(target: str) -> bool:
    """Whether an operator is a reshape: all elements of its operand, in their order, in another shape."""
    return facts_of_torch(target).keeps_order


def may_copy(target: str) -> bool:
    """Whether a view copies where its operand does not lie as it wants it."""
    return target in RESHAPES or target in _BY_VALUE or target == "aten._reshape_alias.default"


@cache
def resolve(target: str) -> Callable[..., Any]:
    """The callable of a target; raises ProgramError where no such operator is registered."""
    by_value = _BY_VALUE.get(target)
    if by_value is not None:
        return by_value
    return overload(_RELAXED.get(target, target))


@cache
def overload(target: str) -> Any:
    """The operator overload that `target` names, exactly.

    Raises ProgramError for none, and for one that opens files.
    """
    namespace, _, rest = target.partition(".")
    name, _, variant = rest.partition(".")
    try:
        found = getattr(getattr(getattr(torch.ops, namespace), name), variant or "default")
    except (AttributeError, RuntimeError) as error:
        raise ProgramError(f"operator {target!r} is not registered; import the module that defines it") from error
    if not isinstance(found, type(torch.ops.aten.mm.default)):
        raise ProgramError(f"{target!r} is no operator")
    if any(argument.name == "filename" for argument in found._schema.arguments):
        raise ProgramError(f"operator {target!r} reads or writes a file, which no step may do")
    return found


@cache
def argument_names(target: str) -> frozenset[str]:
    """The names of an operator's arguments."""
    return frozenset(argument.name for argument in overload(target)._schema.arguments)


@cache
def argument_at(target: str, name: str) -> int:
    """The position of an argument of an operator, by its schema; raises ProgramError where it has none of this name."""
    for position, argument in enumerate(overload(target)._schema.arguments):
        if argument.name == name:
            return position
    raise ProgramError(f"{target!r} has no argument {name!r}. Try: one of {sorted(argument_names(target))}")


def forget_targets() -> None:
    """Targets are looked up anew: an operator was registered again under its name."""
    for known in (resolve, overload, argument_names, argument_at, target_of):
        known.cache_clear()


@cache
def target_of(func: Any) -> str:
    """The target string of an operator overload: `aten.mm.default`, and `mylib.scan` for libraries beside torch."""
    name = str(func)
    return name if name.startswith(("aten.", "prims.", "prim.")) else name.removesuffix(".default")
