"""Plain tensors: memory with sizes and strides, and no operators of their own.

Problem: a program computes with the values of tensors. A sparse or quantised one has no such memory, and a class of
tensors that says itself what operators do would not be asked. Idea: what is no plain tensor is refused by name where it
is given, with the call that makes a plain one of it.

    refuse_unlike(x, "argument 'x'", InputError)     # argument 'x' is torch.sparse_coo ... Try: x.to_dense()
"""

from __future__ import annotations

from typing import Any

import torch

from colofunc import compat
from colofunc.errors import ColofuncError


def refuse_unlike(x: torch.Tensor, what: str, kind: type[ColofuncError]) -> None:
    """Raise `kind` where a tensor, which is no DTensor, has values that a program cannot compute with as they are."""
    # Our own kinds are placed by the step: frozen weights may lie on the mesh already, or have no values yet.
    ours = type(x).__module__.startswith("colofunc.")
    if not ours and not isinstance(x, compat.FakeTensor) and has_operators(type(x)):
        raise kind(
            f"{what} is a {type(x).__name__}, a tensor class with operators of its own, which a step would not call. "
            "Try: x.as_subclass(torch.Tensor) to compute with its values (x.full() of a DTensor), or what it computes "
            "written in the step"
        )
    if x.is_nested:
        raise kind(
            f"{what} is a nested tensor; a step computes with dense ones. Try: torch.nested.to_padded_tensor(x, 0.0) "
            "and a mask"
        )
    if x.layout is not torch.strided:
        raise kind(f"{what} is {x.layout}; a step computes with dense tensors. Try: x.to_dense()")
    if x.is_quantized:
        raise kind(f"{what} is quantised ({x.dtype}); a step computes with dense tensors. Try: x.dequantize()")


def has_operators(kind: Any) -> bool:
    """Whether a class of tensors says itself what operators do."""
    if kind in (torch.Tensor, torch.nn.Parameter):
        return False
    plain = (_function(torch.Tensor), compat.no_torch_function)
    return _function(kind) not in plain or kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def _function(kind: Any) -> Any:
    """What a class does with torch functions."""
    return getattr(kind.__torch_function__, "__func__", kind.__torch_function__)
