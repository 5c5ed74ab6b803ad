"""Tensors that modules hold in plain attributes: tables, or values computed of parameters and kept.

Problem: a module may keep what it computed of a parameter (attention biases, looked up once, in a dict for eval mode).
A trace takes such a tensor for a constant, so the parameter trains without its gradient. Idea: a table stands for no
parameter. What a trace captures is refused if it has a gradient's history, if the module computes it of parameters
again once it is gone (see `_refuse_refilled`), or if its module has a parameter that the same forward does not read. Of
what was made since the model was taken apart the parameters of submodules count too, and where there are none those of
the nearest module around it that has some. This holds for modules of `cf.functional` and for every other that the step
calls.

    model = functional(module)
    module(x)                      # fills the attributes rope.cos and attn.bias_cache
    step(state, batch)             # TraceError: ... attribute 'bias_cache' of 'attn' ... computed of 'attn.biases' at model.py:9

What the forward puts into attributes while it is traced is taken out of them after the trace (see `_put_back`). Not
seen is what was computed without a gradient and lies in no attribute of a module or its class (a global, a cache of a
plain function), in a buffer, as a NumPy array or number, or in an attribute that is read outside of the forward, or that
the module does not fill in again, of a parameter that the forward reads besides.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from colofunc import compat
from colofunc.errors import TraceError
from colofunc.program.tracing.captured import REMEDY, another_way
from colofunc.program.tracing.infer import contiguous
from colofunc.program.tracing.meta import Attribute, Whereabouts, activate, active_stacks
from colofunc.program.tracing.module_tensors import (
    ContainerBefore,
    attribute_of,
    kept_attributes,
    plain_attributes,
    reached,
    refill,
)
from colofunc.program.tracing.ops import handler_of
from colofunc.program.tracing.record import Recorder
from colofunc.program.tracing.roles import is_traced
from colofunc.program.tracing.tree import map_tensors

KnownTensors = Mapping[int, "weakref.ref[Tensor]"]


def known_attributes(module: nn.Module) -> KnownTensors:
    """The tensors that modules hold beside parameters and buffers now, by their identity."""
    return {id(tensor): weakref.ref(tensor) for _, _, tensor in _plain_tensors(module)}


@contextmanager
def watch_attributes(
    module: nn.Module,
    known: KnownTensors | None,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    calls: dict[str, ModuleCall] | None = None,
) -> Iterator[None]:
    """While a trace is active, what the module's forward reads of its attributes must be tables.

    `known`: the tensors in attributes when the model was taken apart, None where nobody took it apart. `buffers`: those
    that stand in the places of the module's own, whose parameters and buffers nothing may read. `calls`: of submodules,
    to which the caller may add that of the module itself.
    """
    here = active_stacks()
    if here is None:
        yield
        return
    if known is not None and not any(kept.module is module for kept in here.kept):
        here.kept += kept_attributes(module)
    calls = {} if calls is None else calls
    trained = {name for name in params if is_traced(params[name])}
    own = _attributes(module, known, buffers)
    before = here.attributes, here.read, here.replaced, here.watched
    # What modules around this one keep may be read in here, too.
    here.attributes = {**here.attributes, **{key: (*here.attributes.get(key, ()), at) for key, at in own.items()}}
    here.read = []
    here.replaced = {**here.replaced, **{id(p): name for name, p in module.named_parameters() if name in trained}}
    here.watched = here.watched | {id(part) for part in module.modules()}
    try:
        paths = {attribute.path for attribute in own.values()}
        with _noted_calls(module, paths | {""} if paths else paths, calls):
            yield
        _refuse_what_was_read(module, [x for x in here.read if own.get(id(x.tensor)) is x], calls, params, buffers)
    finally:
        before[1].extend(here.read)
        here.attributes, here.read, here.replaced, here.watched = before


def _attributes(module: nn.Module, known: KnownTensors | None, buffers: Mapping[str, Tensor]) -> dict[int, Attribute]:
    """By the tensor's id: what a module and its submodules keep in plain attributes."""
    own_buffers = {id(own): name for name, own in module.named_buffers() if name in buffers}
    found = {}
    for path, name, tensor in _plain_tensors(module, None if known is None else buffers):
        known_now = known is None
        if known is not None:
            earlier = known.get(id(tensor))
            known_now = earlier is not None and earlier() is tensor
        found[id(tensor)] = Attribute(path, name, tensor, known_now, own_buffers.get(id(tensor), ""))
    kept_by_torch = compat.parametrized_weights()
    if kept_by_torch:
        paths = {id(part): path for path, part in module.named_modules()}
        for (part, name), tensor in kept_by_torch.items():
            if part in paths:
                found[id(tensor)] = Attribute(paths[part], name, tensor, known=False)
    return found


def _refuse_what_was_read(
    module: nn.Module,
    read: list[Attribute],
    calls: Mapping[str, ModuleCall],
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
) -> None:
    """Raise where one of these attributes is no table."""
    for attribute in read:
        if attribute.buffer and _is_written(buffers[attribute.buffer]):
            raise another_way(attribute.buffer)
    trained = {name for name in params if is_traced(params[name])}
    if trained and torch.is_grad_enabled():
        _refuse_computed_buffers(module, buffers)
    here = active_stacks()
    for attribute in dict.fromkeys(read):
        question = attribute.path, id(attribute.tensor), frozenset(trained)
        if here is not None and question not in here.asked:
            _refuse_refilled(module, attribute, calls, trained)
            here.asked.add(question)
    for path in dict.fromkeys(attribute.path for attribute in read):
        _refuse_stand_ins(module, path, [attribute for attribute in read if attribute.path == path], params)


def _refuse_computed_buffers(module: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Raise where a buffer that is read has a gradient's history, which its value alone has not."""
    for name, own in module.named_buffers():
        if own.grad_fn is not None and name in buffers and _is_read(buffers[name]):
            raise TraceError(
                f"the step reads the buffer {name!r} of a module, which was computed, by "
                f"{own.grad_fn.name().removesuffix('0')}, of something that requires a gradient; as a buffer it has "
                "none. Try: compute it in the module's forward, or register it with .detach() if it is a constant"
            )


# ---- modules that are called by nobody's `apply` ----
#
# Problem: a step may call a module with other weights by `torch.func.functional_call`, or as it is. Idea: every call of
# a module is seen while a trace runs, and at that time the weights are in their places. The outermost one is watched,
# its submodules with it.
#
#     functional_call(module, params, (x,))     ->     watch_attributes(module, None, what it holds now, {})


@attrs.define(eq=False)
class _Opened:
    """A watch over a module that runs, `depth` times inside of itself."""

    module: nn.Module
    calls: dict[str, ModuleCall]
    watch: AbstractContextManager[None]
    depth: int = 1


@contextmanager
def watch_called(here: Whereabouts) -> Iterator[None]:
    """Inside, what modules keep in attributes is watched, whoever calls them."""
    opened: list[_Opened] = []

    def enter(module: nn.Module, args: Any) -> None:
        if active_stacks() is not here:
            return
        if opened and opened[-1].module is module:
            opened[-1].depth += 1
        elif id(module) not in here.watched:
            calls: dict[str, ModuleCall] = {}
            watch = watch_attributes(module, None, dict(module.named_parameters()), {}, calls)
            opened.append(_Opened(module, calls, watch))
            watch.__enter__()

    def leave(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        if active_stacks() is not here or not opened or opened[-1].module is not module:
            return
        opened[-1].depth -= 1
        if opened[-1].depth:
            return
        last = opened.pop()
        last.calls.setdefault("", (args, kwargs))
        # A forward that fails has no result.
        last.watch.__exit__(*(sys.exc_info() if out is None else (None, None, None)))

    handles = [
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(leave, with_kwargs=True, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _noted_calls(module: nn.Module, paths: set[str], calls: dict[str, ModuleCall]) -> Iterator[None]:
    """The first call of each of these submodules, while the model runs."""

    def note(path: str) -> Any:
        return lambda part, args, kwargs: calls.setdefault(path, (args, kwargs)) and None

    # Modules of TorchScript take no hooks.
    handles = []
    for path, part in module.named_modules():
        if path in paths and not isinstance(part, torch.jit.ScriptModule):
            handles.append(part.register_forward_pre_hook(note(path), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _refuse_stand_ins(module: nn.Module, path: str, attributes: list[Attribute], params: Mapping[str, Tensor]) -> None:
    """Raise where a forward reads attributes of the module at `path`, and not all parameters that they may be computed
    of.
    """
    names = [name for name, _ in module.get_submodule(path).named_parameters(path, recurse=False)]
    if not all(attribute.known for attribute in attributes):
        names = _parameters_around(module, path)
    for name in names:
        if name in params and not _is_read(params[name]):
            kept = ", ".join(dict.fromkeys(repr(attribute.name) for attribute in attributes))
            raise TraceError(
                f"the step reads what module {path or '(the model itself)'!r} keeps in attribute {kept}, and does not "
                f"read the parameter {name!r}, which that may be computed of: it would train without its gradient. "
                f"Try: {REMEDY}"
            )


def _refuse_refilled(
    module: nn.Module, attribute: Attribute, calls: Mapping[str, ModuleCall], trained: set[str]
) -> None:
    """Raise where the module, called with that attribute empty, computes it of parameters again."""
    path = (
        attribute.path if attribute.path in calls else ""
    )  # another method than forward is called by somebody's forward
    if attribute.buffer or not attribute.tensor.dtype.is_floating_point or path not in calls:
        return
    within = {name.removeprefix(f"{path}.") for name in trained if not path or name.startswith(f"{path}.")}
    holder = module.get_submodule(attribute.path)
    maker = maker_of(module.get_submodule(path), calls[path], within, holder, attribute.name, attribute.tensor)
    if maker is not None:
        names = [repr(f"{path}.{name}" if path else name) for name in maker.parameters]
        what = f"parameter {', '.join(names[:3])}" if names else "what is trained"
        raise TraceError(
            f"the step reads a tensor of shape {tuple(attribute.tensor.shape)} that is {attribute}, where a call "
            f"before the step put what it computed of {what} at {maker.line}: as a constant it would have no gradient. "
            f"Try: {REMEDY}"
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


def _plain_tensors(module: nn.Module, buffers: Collection[str] | None = None) -> Iterator[tuple[str, str, Tensor]]:
    """(path of the module, attribute, tensor); also what containers and helper objects hold that are attributes.

    `buffers`: those that the module had when it was taken apart. What was registered since then is an attribute.
    """
    if buffers is not None:
        for name, tensor in module.named_buffers():
            if name not in buffers:
                path, _, attribute = name.rpartition(".")
                yield path, attribute, tensor
    for path, part in module.named_modules():
        for name, value in plain_attributes(part):
            for tensor in reached(value):
                if isinstance(tensor, Tensor) and not isinstance(tensor, nn.Parameter):
                    yield path, name, tensor


# ---- attributes that are filled again ----
#
# Problem: attention biases that were looked up once, under `torch.no_grad()` and before the model was taken apart, are
# a tensor like any table; nothing on it says where it comes from. Idea: ask the module. The attribute is emptied, the
# module is called once more on tensors without data, and what it fills in again tells: a tensor that requires a
# gradient was computed of a parameter, at a line that is known; another is a table. One that is not filled in again was
# made by somebody else, in a constructor, and stays a constant.
#
#     self.cache["cpu"]  ->  removed  ->  forward  ->  self.cache["cpu"] = biases[:, table]       computed, at model.py:109
#
# Everything that the call changes in the module's attributes is put back.


ModuleCall = tuple[tuple[Any, ...], dict[str, Any]]  # of a module: (args, kwargs), tensors of a trace among them


@attrs.frozen
class AttributeMaker:
    """What a module computes again: at which line, of which parameters (or of none of its own: of what it is called
    with).
    """

    line: str
    parameters: tuple[str, ...]


def maker_of(
    called: nn.Module, call: ModuleCall, trained: Collection[str], holder: nn.Module, name: str, tensor: Tensor
) -> AttributeMaker | None:
    """Who computes what `holder` keeps in attribute `name` of what is trained; None where it is not so computed.

    `tensor`: what lies there now. `called`: a module with the holder in it, or the holder; `call`: a call of its
    forward; `trained`: the names of those of its parameters that are.
    """
    for empty in _ways_to_empty(holder, name, tensor):
        with _put_back(called, holder, name):
            empty()
            found = _filled_in(called, call, trained, holder, name)
        if found is not None:
            return found[0] if found else None
    return None


def _filled_in(
    called: nn.Module, call: ModuleCall, trained: Collection[str], holder: nn.Module, name: str
) -> list[AttributeMaker] | None:
    """The makers of what a call leaves in the attribute, none for a table; None where it leaves nothing there."""
    rec = Recorder(handler_of)
    with compat.disable_modes(), compat.no_function_modes(), activate(rec.where), rec, torch.enable_grad():
        parameters = {key: _stand_in(rec, p, key in trained) for key, p in called.named_parameters()}
        buffers = {key: _stand_in(rec, b, False) for key, b in called.named_buffers()}
        args, kwargs = (map_tensors(lambda x: _stand_in(rec, x, x.requires_grad), part) for part in call)
        try:
            functional_call(called, {**parameters, **buffers}, args, kwargs)
        except Exception:
            # A forward that cannot do without the attribute does not fill it in. One that fails later (where it draws
            # random numbers: the modes of the trace are off) has done so.
            rec.raised = None
    made = [x for x in reached(attribute_of(holder, name)) if isinstance(x, compat.FakeTensor)]
    names = {rec.cell(p).vid: key for key, p in parameters.items() if key in trained}
    return [_maker(rec, rec.cell(x).vid, names) for x in made if x.requires_grad] if made else None


def _maker(rec: Recorder, vid: int, names: dict[int, str]) -> AttributeMaker:
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
    return AttributeMaker(line, tuple(sorted(found)))


def _stand_in(rec: Recorder, tensor: Tensor, differentiated: bool) -> Tensor:
    vid = rec.new_value(tuple(tensor.shape), tensor.dtype)
    fake = rec.tensor(rec.root(vid, contiguous(tensor.shape, tensor.dtype)))
    return fake.requires_grad_(differentiated and tensor.dtype.is_floating_point)


def _ways_to_empty(holder: nn.Module, name: str, tensor: Tensor) -> Iterator[Callable[[], None]]:
    """Ways to take a tensor out of an attribute, the smallest first: what a module takes for "not filled yet" is its
    own.
    """
    value = attribute_of(holder, name)
    registered = vars(holder)["_buffers"] if name in vars(holder).get("_buffers", {}) else None

    def take_out() -> None:
        for container in reached(value):
            if isinstance(container, dict):
                for key in [key for key, item in container.items() if item is tensor]:
                    del container[key]
            elif isinstance(container, (list, deque)):
                refill(container, [item for item in container if item is not tensor])
            elif isinstance(container, functools._lru_cache_wrapper):
                container.cache_clear()

    def replace(new: Any) -> Callable[[], None]:
        return lambda: vars(holder).__setitem__(name, new)

    if registered is not None:
        yield lambda: registered.__setitem__(name, None)
        yield lambda: registered.__delitem__(name)
        return
    if value is not tensor:
        yield take_out
    if isinstance(value, (dict, list)):
        yield replace(type(value)())
    yield replace(None)
    yield lambda: vars(holder).pop(name, None)


@contextmanager
def _put_back(called: nn.Module, holder: nn.Module, name: str) -> Iterator[None]:
    """What a call changes in attributes of modules is put back; a cache of a function is emptied."""
    kept, registered = kept_attributes(called), holder._buffers
    if name in registered:
        kept.append(ContainerBefore(holder, None, registered, dict(registered)))
    caches = [x for x in reached(attribute_of(holder, name)) if isinstance(x, functools._lru_cache_wrapper)]
    try:
        yield
    finally:
        for part in kept:
            refill(part.container, part.before)
        for cache in caches:
            cache.cache_clear()
