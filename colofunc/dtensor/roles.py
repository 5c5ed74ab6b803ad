"""Roles that tensors carry: what `cf.functional`, `init` of an optimizer and a step have made is known for what it is
wherever it goes.

Problem: a step is a function of trees that people rearrange, so neither a place nor a word in a path says what a leaf
is. Idea: who makes a tensor notes its role, and a trace asks the tensors that it is given.

    give_role("param", model.params.values())         # by cf.functional; buffers, frozen weights and optimizer state alike
    role_of(tensor)                                   # "param"; "" where nobody has said one

What is computed from such a tensor is another tensor and has none. DTensors carry the role that their step's plan gave
them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from colofunc.dtensor.tensor import DTensor

LASTING = ("param", "frozen", "state", "buffer")
"""Roles that are carried: what goes from step to step."""
# plain and lazy tensors; an entry lives as long as its tensor
_GIVEN: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def give_role(role: str, tensors: Iterable[torch.Tensor]) -> None:
    """Note what these tensors are. The first who says it is right."""
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            tensor.role = tensor.role or role
        elif tensor not in _GIVEN:
            _GIVEN[tensor] = role


def role_of(tensor: torch.Tensor) -> str:
    """What a tensor carries; "" where nobody has said."""
    if isinstance(tensor, DTensor):
        return tensor.role
    return str(_GIVEN.get(tensor, ""))
