"""Tensors that a step takes from outside: which of them cannot be constants of its program.

Problem: a captured tensor is a constant, and a constant has no gradient and never changes. Idea: what certainly has one
in the function that the user wrote is an error where it is captured: a tensor with a gradient's history, and a
parameter of a module for which the step passes another value. (What modules keep in attributes is looked at in
`attributes`.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch
from torch import Tensor

from colofunc import compat
from colofunc.errors import TraceError
from colofunc.ops.plain import has_operators
from colofunc.program.editor import Editor
from colofunc.program.ir import Node, Program, Value
from colofunc.program.lazy import LazyTensor
from colofunc.program.tracing.meta import Attribute, Whereabouts, active_stacks, maker_line, user_line, variable_of

REMEDY = "clear that attribute before the step (eval mode fills it: call model.train() first), or compute the tensor in the step"


def refuse_computed(tensor: Tensor, name: str | None) -> None:
    """Raise TraceError where a captured tensor was computed of something that is differentiated.

    `name`: of one that counts as a frozen weight. Asked at each read: only one with gradients enabled would lose a
    gradient, and that need not be the first.
    """
    here = active_stacks()
    replaced = None if here is None or name is not None else here.replaced.get(id(tensor))
    if replaced is not None:
        raise another_way(replaced)
    attributes = () if here is None or name is not None else here.attributes.get(id(tensor), ())
    if tensor.grad_fn is not None and _with_gradients(here):
        raise _was_computed(tensor, tensor.grad_fn.name().removesuffix("0"), name, attributes)
    if here is not None:
        here.read += attributes


def _was_computed(tensor: Tensor, maker: str, name: str | None, attributes: Sequence[Attribute]) -> TraceError:
    """The error for a tensor with a gradient's history, with all that is known of where it comes from."""
    remedy = "compute it in the step, or .detach() it outside if it is a constant"
    if attributes:
        where, remedy = f"is {attributes[-1]}", REMEDY
    elif name is not None:
        where = f"is the weight {name.partition('.')[2]!r} given to a model from outside"
    else:
        variable = variable_of(tensor)
        where = f"it captured from outside as {variable}" if variable else "it captured from outside"
    line = maker_line(tensor)
    return TraceError(
        f"the step at {user_line()} reads a tensor of shape {tuple(tensor.shape)} that {where} and that was computed, "
        f"by {maker}{f' at {line}' if line else ''}, of something that requires a gradient; as a constant it would have "
        f"none. Try: {remedy}"
    )


def _with_gradients(here: Whereabouts | None) -> bool:
    """Whether the step reads with gradients enabled.

    In the forward of an autograd Function (canonical operators are some) torch disables them; what counts there is what
    the step last said.
    """
    if torch.is_grad_enabled():
        return True
    said = here is not None and here.gradients and not torch.is_inference_mode_enabled()
    return said and not compat.in_backward()


def another_way(name: str) -> TraceError:
    return TraceError(
        f"the step at {user_line()} reads {name!r} of a module by another way than the attribute of that name (a list "
        "of weights, or what a module of TorchScript keeps), so that it would have no gradient and never change. Try: "
        "the attribute itself in the module's forward; in place of a module of TorchScript, the Python module that it "
        "was made of"
    )


# ---- what becomes an input ----
# Problem: a step captures tensors from outside, above all frozen weights; as constants of the program they lie whole on
# every rank. Idea: they are inputs behind the caller's own. The planner chooses where they lie, the accountant counts a
# rank's part, and who runs the program passes their parts. Small tables stay constants.
#
#     inputs (state, batch, seed), constants {5: 4 B, 6: 2 GiB}     ->     inputs (state, batch, seed, 6), constants {5: 4 B}


# Captured tensors up to this size stay constants, unless they are somebody's frozen weights or lie on several ranks.
SMALL_BYTES = 1 << 16


def lift(program: Program, captured: Mapping[int, torch.Tensor]) -> tuple[Program, tuple[torch.Tensor, ...]]:
    """(program, its hidden inputs in order). `captured`: value id -> tensor; only these are lifted."""
    chosen = []
    for vid in program.constants:
        if vid in captured and (_is_large(program.values[vid]) or _lies_on_ranks(captured[vid])):
            chosen.append(vid)
    if not chosen:
        return program, ()
    constants = {vid: t for vid, t in program.constants.items() if vid not in chosen}
    edit = Editor(program)
    values = edit.values
    for place, vid in enumerate(chosen):
        values[vid] = attrs.evolve(values[vid], name=values[vid].name or f"captured.{place}", role="frozen")
    _no_constants(values, program.nodes, chosen)
    users = tuple(vid for vid in program.inputs if vid not in program.constants)
    lifted = edit.written(program.nodes, inputs=(*users, *chosen, *constants), constants=constants)
    return lifted, tuple(captured[vid] for vid in chosen)


def placed_are_no_constants(program: Program, captured: Mapping[int, torch.Tensor]) -> Program:
    """The program where nothing that is made of a captured DTensor counts as known, so that no pass computes it."""
    placed = [vid for vid in program.constants if vid in captured and _lies_on_ranks(captured[vid])]
    if not placed:
        return program
    values = dict(program.values)
    _no_constants(values, program.nodes, placed)
    return attrs.evolve(program, values=values)


def _no_constants(values: dict[int, Value], nodes: Sequence[Node], inputs: Sequence[int]) -> None:
    """These, and what is made of them, depend on an input."""
    for vid in inputs:
        values[vid] = attrs.evolve(values[vid], device_free=False)
    for node in nodes:
        if not all(values[ref].device_free for ref in node.refs):
            for out in node.outs:
                if out is not None and values[out].device_free:
                    values[out] = attrs.evolve(values[out], device_free=False)


def _lies_on_ranks(tensor: torch.Tensor) -> bool:
    """A DTensor, of which no rank may have the whole; what is lazy has been made if it is small."""
    return has_operators(type(tensor)) and not isinstance(tensor, LazyTensor)


def _is_large(value: Value) -> bool:
    return value.role == "frozen" or value.nbytes > SMALL_BYTES
