"""Tensors that a step takes from outside: which of them cannot be constants of its program.

Problem: a captured tensor is a constant, and a constant has no gradient and never changes. Idea: what certainly has one in
the function that the user wrote is an error where it is captured: a tensor with a gradient's history, and a parameter of a
module for which the step passes another value. (What modules keep in attributes is looked at in `attributes`.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from colofunc.errors import TraceError
from colofunc.program.tracing.meta import active, user_line

REMEDY = "clear that attribute before the step (eval mode fills it: call model.train() first), or compute the tensor in the step"


def refuse_computed(tensor: Tensor) -> None:
    """Raise TraceError where a captured tensor was computed of something that is differentiated."""
    here = active()
    name = None if here is None else here.replaced.get(id(tensor))
    if name is not None:
        raise another_way(name)
    attribute = None if here is None else here.attributes.get(id(tensor))
    where = "it captured from outside" if attribute is None else f"is {attribute}"
    if tensor.grad_fn is not None and torch.is_grad_enabled():
        raise TraceError(
            f"the step at {user_line()} reads a tensor of shape {tuple(tensor.shape)} that {where} and that was computed, by "
            f"{tensor.grad_fn.name().removesuffix('0')}, of something that requires a gradient; as a constant it would have none. "
            + (f"Try: {REMEDY}" if attribute else "Try: compute it in the step, or .detach() it outside if it is a constant")
        )
    if attribute is not None and here is not None:
        here.read.append(attribute)


def another_way(name: str) -> TraceError:
    return TraceError(
        f"the step at {user_line()} reads {name!r} of a module by another way than the attribute of that name (a list of weights, or "
        "what a module of TorchScript keeps), so that it would have no gradient and never change. Try: the attribute itself in the "
        "module's forward; in place of a module of TorchScript, the Python module that it was made of"
    )
