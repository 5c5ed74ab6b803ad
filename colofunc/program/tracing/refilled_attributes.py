"""Whether what a module keeps in an attribute was computed of its parameters, however it got there.

Problem: attention biases that were looked up once, under `torch.no_grad()` and before the model was taken apart, are a tensor
like any table; nothing on it says where it comes from. Idea: ask the module. The attribute is emptied, the module is called
once more on tensors without data, and what it fills in again tells: a tensor that requires a gradient was computed of a
parameter, at a line that is known; another is a table. One that is not filled in again was made by somebody else, in a
constructor, and stays a constant.

    self.cache["cpu"]  ->  removed  ->  forward  ->  self.cache["cpu"] = biases[:, table]       computed, at model.py:109

Everything that the call changes in the module's attributes is put back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.func import functional_call

from colofunc import compat
from colofunc.program.tracing.infer import contiguous
from colofunc.program.tracing.meta import activate
from colofunc.program.tracing.module_tensors import Kept, keep, reached
from colofunc.program.tracing.ops import handler_of
from colofunc.program.tracing.record import Recorder
from colofunc.program.tracing.tree import map_tensors

Call = tuple[tuple[Any, ...], dict[str, Any]]  # of a module: (args, kwargs), tensors of a trace among them


@attrs.frozen
class Maker:
    """What a module computes again: at which line, of which parameters (or of none of its own: of what it is called with)."""

    line: str
    parameters: tuple[str, ...]


def maker_of(
    called: nn.Module, call: Call, trained: Collection[str], holder: nn.Module, name: str, tensor: Tensor
) -> Maker | None:
    """Who computes what `holder` keeps in attribute `name` of what is trained; None where it is not so computed.

    `tensor`: what lies there now. `called`: a module with the holder in it, or the holder; `call`: a call of its forward;
    `trained`: the names of those of its parameters that are.
    """
    for empty in _ways_to_empty(holder, name, tensor):
        with _put_back(keep(called)):
            empty()
            found = _filled_in(called, call, trained, holder, name)
        if found is not None:
            return found[0] if found else None
    return None


def _filled_in(called: nn.Module, call: Call, trained: Collection[str], holder: nn.Module, name: str) -> list[Maker] | None:
    """The makers of what a call leaves in the attribute, none for a table; None where it leaves nothing there."""
    rec = Recorder(handler_of)
    with compat.disable_modes(), compat.no_function_modes(), activate(rec.where), rec, torch.enable_grad():
        parameters = {key: _stand_in(rec, p, key in trained) for key, p in called.named_parameters()}
        buffers = {key: _stand_in(rec, b, False) for key, b in called.named_buffers()}
        args, kwargs = (map_tensors(lambda x: _stand_in(rec, x, x.requires_grad), part) for part in call)
        try:
            functional_call(called, {**parameters, **buffers}, args, kwargs)
        except Exception:
            # A forward that cannot do without the attribute does not fill it in. One that fails later (where it draws random
            # numbers: the modes of the trace are off) has done so.
            rec.raised = None
    made = [x for x in reached(vars(holder).get(name)) if isinstance(x, compat.FakeTensor)]
    names = {rec.cell(p).vid: key for key, p in parameters.items() if key in trained}
    return [_maker(rec, rec.cell(x).vid, names) for x in made if x.requires_grad] if made else None


def _maker(rec: Recorder, vid: int, names: dict[int, str]) -> Maker:
    """`names`: those of parameters, by their values."""
    line = rec.producer[vid].line if vid in rec.producer else ""
    found, pending, seen = [], [vid], {vid}
    while pending:
        top = pending.pop()
        if top in names:
            found.append(names[top])
        refs = rec.producer[top].refs if top in rec.producer else ()
        pending += [ref for ref in refs if ref not in seen]
        seen.update(refs)
    return Maker(line, tuple(sorted(found)))


def _stand_in(rec: Recorder, tensor: Tensor, differentiated: bool) -> Tensor:
    vid = rec.new_value(tuple(tensor.shape), tensor.dtype)
    fake = rec.tensor(rec.root(vid, contiguous(tensor.shape, tensor.dtype)))
    return fake.requires_grad_(differentiated and tensor.dtype.is_floating_point)


def _ways_to_empty(holder: nn.Module, name: str, tensor: Tensor) -> Iterator[Callable[[], None]]:
    """Ways to take a tensor out of an attribute, the smallest first: what a module takes for "not filled yet" is its own."""
    value = vars(holder)[name]

    def take_out() -> None:
        for container in reached(value):
            if isinstance(container, dict):
                for key in [key for key, item in container.items() if item is tensor]:
                    del container[key]
            elif isinstance(container, list):
                container[:] = [item for item in container if item is not tensor]

    def replace(new: Any) -> Callable[[], None]:
        return lambda: vars(holder).__setitem__(name, new)

    if value is not tensor:
        yield take_out
    if isinstance(value, (dict, list)):
        yield replace(type(value)())
    yield replace(None)
    yield lambda: vars(holder).pop(name)


@contextmanager
def _put_back(kept: list[Kept]) -> Iterator[None]:
    try:
        yield
    finally:
        for part in kept:
            if isinstance(part.container, list):
                part.container[:] = part.before
            else:
                part.container.clear()
                part.container.update(part.before)
