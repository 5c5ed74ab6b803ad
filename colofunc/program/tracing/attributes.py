"""Tensors that modules hold in plain attributes: tables, or values computed of parameters and kept.

Problem: a module may keep what it computed of a parameter (attention biases, looked up once, in a dict for eval mode). A
trace takes such a tensor for a constant, so the parameter trains without its gradient. Idea: a table stands for no
parameter. What a trace captures is refused if it has a gradient's history, or if its module has a parameter that the same
forward does not read. Of what was made since the model was taken apart the parameters of submodules count too, and where
there are none those of the nearest module around it that has some.

    model = functional(module)
    module(x)                      # fills the attributes rope.cos and attn.bias_cache
    step(state, batch)             # TraceError: ... attribute 'bias_cache' of 'attn' ...: attn.biases is not read

What the forward puts into attributes while it is traced is taken out of them after the trace (see `held`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from colofunc import compat
from colofunc.errors import TraceError
from colofunc.program.tracing.held import keep, plain_attributes, reached
from colofunc.program.tracing.meta import Attribute, active, user_line
from colofunc.program.tracing.roles import is_traced

Known = Mapping[int, "weakref.ref[Tensor]"]

REMEDY = "clear that attribute before the step (eval mode fills it: call model.train() first), or compute the tensor in the step"


def known_attributes(module: nn.Module) -> Known:
    """The tensors that modules hold beside parameters and buffers now, by their identity."""
    return {id(tensor): weakref.ref(tensor) for _, _, tensor in _plain_tensors(module)}


@contextmanager
def watch_attributes(
    module: nn.Module, known: Known, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
) -> Iterator[None]:
    """While a trace is active, what the module's forward reads of its attributes must be tables.

    `buffers`: those that stand in the places of the module's own, whose parameters and buffers nothing may read.
    """
    here = active()
    if here is None:
        yield
        return
    if not any(kept.module is module for kept in here.kept):
        here.kept += keep(module)
    before = here.attributes, here.read, here.replaced
    here.attributes, here.read = {}, []
    here.replaced = {id(own): name for name, own in module.named_parameters() if name in params and is_traced(params[name])}
    own_buffers = {id(own): name for name, own in module.named_buffers() if name in buffers}
    for path, name, tensor in _plain_tensors(module):
        earlier = known.get(id(tensor))
        here.attributes[id(tensor)] = Attribute(path, name, earlier is not None and earlier() is tensor, own_buffers.get(id(tensor), ""))
    try:
        yield
        for attribute in here.read:
            if attribute.buffer and _is_written(buffers[attribute.buffer]):
                raise _another_way(attribute.buffer)
        for path in dict.fromkeys(attribute.path for attribute in here.read):
            _refuse_stand_ins(module, path, [attribute for attribute in here.read if attribute.path == path], params)
    finally:
        here.attributes, here.read, here.replaced = before


def refuse_computed(tensor: Tensor) -> None:
    """Raise TraceError where a captured tensor was computed of something that is differentiated."""
    here = active()
    name = None if here is None else here.replaced.get(id(tensor))
    if name is not None:
        raise _another_way(name)
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


def _another_way(name: str) -> TraceError:
    return TraceError(
        f"the step at {user_line()} reads {name!r} of a module by another way than the attribute of that name (a list of weights, or "
        "what a module of TorchScript keeps), so that it would have no gradient and never change. Try: the attribute itself in the "
        "module's forward; in place of a module of TorchScript, the Python module that it was made of"
    )


def _refuse_stand_ins(
    module: nn.Module, path: str, attributes: list[Attribute], params: Mapping[str, Tensor]
) -> None:
    """Raise where a forward reads attributes of the module at `path`, and not all parameters that they may be computed of."""
    names = [name for name, _ in module.get_submodule(path).named_parameters(path, recurse=False)]
    if not all(attribute.known for attribute in attributes):
        names = _parameters_around(module, path)
    for name in names:
        if name in params and not _is_read(params[name]):
            kept = ", ".join(dict.fromkeys(repr(attribute.name) for attribute in attributes))
            raise TraceError(
                f"the step reads what module {path or '(the model itself)'!r} keeps in attribute {kept}, and does not read the "
                f"parameter {name!r}, which that may be computed of: it would train without its gradient. Try: {REMEDY}"
            )


def _parameters_around(module: nn.Module, path: str) -> list[str]:
    """The parameters of the module at `path` and below, or of the nearest module around it that has some."""
    while True:
        names = [name for name, _ in module.get_submodule(path).named_parameters(path)]
        if names or not path:
            return names
        path = path.rpartition(".")[0]


def _is_written(tensor: Tensor) -> bool:
    cell: Any = compat.unwrap_functorch(tensor).__dict__.get("_colofunc_cell")
    return cell is not None and bool(cell.storage.version)


def _is_read(tensor: Tensor) -> bool:
    cell: Any = compat.unwrap_functorch(tensor).__dict__.get("_colofunc_cell")
    return cell is None or any(cell.vid in node.refs for node in cell.storage.owner.nodes)


def _plain_tensors(module: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """(path of the module, attribute, tensor); also what containers and helper objects hold that are attributes."""
    for path, part in module.named_modules():
        for name, value in plain_attributes(part):
            for tensor in reached(value):
                if isinstance(tensor, Tensor) and not isinstance(tensor, nn.Parameter):
                    yield path, name, tensor
