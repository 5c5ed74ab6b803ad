"""Writing into a part of a tensor: `slice_scatter` and its like, and their form in place.

Problem: `cache[:, :, 3:4] = keys` is traced as `slice_scatter`, which copies the whole cache, and torch has no form of
it in place. Idea: the view that its name says, and one copy into that.

    slice_scatter(x, part, dim, ...)    x.clone(), in it slice(dim, ...) <- part
    slice_scatter_(x, part, dim, ...)   slice(x, dim, ...) <- part
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from colofunc.ops.define import define
from colofunc.ops.facts import Facts

aten = torch.ops.aten
VIEWS: dict[str, str] = {
    "aten.slice_scatter.default": "aten.slice.Tensor",
    "aten.select_scatter.default": "aten.select.int",
    "aten.diagonal_scatter.default": "aten.diagonal.default",
}
"""The view that each writes through: it takes the same arguments but for the part."""


def _writer(view: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def kernel(x: Tensor, part: Tensor, *where: Any, **named: Any) -> Tensor:
        view(x, *where, **named).copy_(part)
        return x

    return kernel


def _copier(write: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Torch's own copy strides too, so that elements that share memory (a value that came of `expand` or `unfold`)
    would share it in the result, and all of them would be written."""

    def kernel(x: Tensor, *part_and_where: Any, **named: Any) -> Tensor:
        return write(x.clone(), *part_and_where, **named)

    return kernel


def _same(x: Tensor, *rest: Any, **named: Any) -> Tensor:
    return x


COPIES_FIRST: dict[str, Callable[..., Tensor]] = {}
"""What runs for the functional operators."""
for _target, _view in VIEWS.items():
    _, _name, _ = _target.split(".")
    _, _of, _overload = _view.split(".")
    _write = _writer(getattr(getattr(aten, _of), _overload))
    COPIES_FIRST[_target] = _copier(_write)
    _schema = str(getattr(aten, _name).default._schema).removeprefix("aten::")
    _schema = _schema.replace(f"{_name}(Tensor self", f"{_name}_(Tensor(a!) self").replace("-> Tensor", "-> Tensor(a!)")
    define(_schema, _write, _same, for_compilers=_write, facts=Facts(touches_part=True))
