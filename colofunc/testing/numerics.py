"""float64: a mode in which unmodified models really compute in float64.

Models upcast losses, norms and rotary tables to float32 by name, so `.double()` alone leaves float32 islands whose
rounding hides real errors. Inside `with float64():` every float32 dtype that reaches a torch function, every
`.float()`, every array that becomes a tensor and every default dtype is float64, and `Model.apply` computes with frozen
weights and buffers in float64. A constant of float32 becomes float64 where it meets float64. What is computed of such
constants alone stays in float32, because nothing tells a constant from a leaf that a step is given in float32 on
purpose; it is made once for all ranks, so both sides have the same. Half precisions that a step asks for
(`cf.precision`) stay what they are. A sharded step and the single device then agree to 1e-10, and where anything
narrower was on the way to what is derived for that (`bounds`).

>>> with float64():
...     torch.ones(2).float().softmax(0, dtype=torch.float32).dtype
torch.float64
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from colofunc import compat
from colofunc.ops.dtypes import DOUBLED
from colofunc.ops.grouped import grouped_mm

_DOUBLE: dict[Any, Callable[..., Any]] = {torch.Tensor.float: torch.Tensor.double}
# Functions that take their dtype from an array, which no argument names.
_FROM_ARRAYS = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, torch.frombuffer})

_GROUPED = frozenset({F.grouped_mm, compat.grouped_mm})


class _Double(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = _DOUBLE.get(func, func)
        if not kwargs and len(args) == 1 and isinstance(args[0], torch.Tensor) and func not in _FROM_ARRAYS:
            # Nothing meets here, and no dtype is named: most calls are such, those of attributes among them.
            return func(*args)
        kwargs = {name: _double(value) for name, value in (kwargs or {}).items()}
        args = tuple(map(_double, args))
        if _mixes([*args, *kwargs.values()]) and not (func.__name__.endswith("_") or "out" in kwargs):
            args = tuple(map(_double_tensor, args))
            kwargs = {name: _double_tensor(value) for name, value in kwargs.items()}
        if func in _GROUPED:
            return _grouped(func, *args, **kwargs)
        out = func(*args, **kwargs)
        return out.double() if func in _FROM_ARRAYS and out.dtype is torch.float32 else out


def _grouped(func: Any, x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor | None = None, **more: Any) -> Any:
    """A product of groups, which torch has for narrower dtypes only."""
    plain = offs is not None and all(value is None for value in more.values())
    if plain and x.dtype is torch.float64 and (x.dim(), w.dim()) == (2, 3):
        return grouped_mm.apply(x, w, offs)
    return func(x, w, offs=offs, **more)


def _double(x: Any) -> Any:
    return torch.float64 if x is torch.float32 else x


def _mixes(arguments: list[Any]) -> bool:
    """Whether a constant of float32 meets float64, which torch refuses in products of matrices."""
    dtypes = {x.dtype for x in arguments if isinstance(x, torch.Tensor)}
    return {torch.float32, torch.float64} <= dtypes


def _double_tensor(x: Any) -> Any:
    return x.double() if isinstance(x, torch.Tensor) and x.dtype is torch.float32 else x


@contextmanager
def float64() -> Iterator[None]:
    """Turn every float32 cast and factory inside the block to float64 (parameters still need `.double()`; `check` does
    it).
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    token = DOUBLED.set(True)
    try:
        with _Double():
            yield
    finally:
        DOUBLED.reset(token)
        torch.set_default_dtype(before)
