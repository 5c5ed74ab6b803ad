"""Writing through a view: from the view's new value to its base's.

Eager results are values of their own, so `x[0] = 5` (a view, then a write to it) has to be carried back to `x`. Each
view operator has an inverse: a slice is scattered, a reshape is reshaped back, a transpose is transposed again.

    write_back(aten.select.int, (0, 3), base, row)   # base with row 3 replaced
"""

from __future__ import annotations

from typing import Any

import torch

from colofunc.errors import InputError

aten = torch.ops.aten

_RESHAPED = frozenset({aten.view, aten.unsqueeze, aten.squeeze, aten._unsafe_view, aten.alias})
_SCATTERED: dict[Any, Any] = {aten.select: torch.select_scatter, aten.slice: torch.slice_scatter, aten.diagonal: torch.diagonal_scatter}


def write_back(func: Any, args: tuple[Any, ...], base: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """`base` after `view = func(base, *args)` got a new value. Raises InputError where the view has no inverse."""
    packet = func.overloadpacket
    if packet in _RESHAPED:
        return view.reshape(base.shape)
    if packet in _SCATTERED:
        return _SCATTERED[packet](base, view, *args)
    if packet is aten.t:
        return view.t()
    if packet is aten.transpose:
        return view.transpose(*args)
    if packet is aten.permute:
        order = [d % base.dim() for d in args[0]]
        return view.permute([order.index(d) for d in range(base.dim())])
    raise InputError(f"a write to a view made by {func} cannot be carried back to its base; write to the base itself, or clone() first")
