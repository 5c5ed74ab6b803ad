"""Modules as functions: `cf.functional(module)` separates what a module computes from what it holds.

Problem: an `nn.Module` hides its parameters and statistics in attributes and changes them in place; a step that is
planned takes and returns them. Idea: three dicts by dotted name and a pure `apply`.

    model = functional(module)                       # module itself is not changed
    out, buffers = model.apply(model.params, model.buffers, x)

`params` are trainable, `frozen` are not and enter `apply` by themselves (a trace sees captured tensors), `buffers` are
running statistics and tables. A weight that is used twice has one name.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any
from weakref import ref

import attrs
import torch
from torch import Tensor, nn
from torch.func import functional_call

from colofunc import compat
from colofunc.dtensor.roles import give_role
from colofunc.dtensor.tensor import DTensor
from colofunc.errors import InputError, TraceError, near
from colofunc.functional.adapters import Adapter
from colofunc.functional.gradients import warn_of_eval_mode
from colofunc.ops import policy
from colofunc.ops.dtypes import DOUBLED, doubled_tensors
from colofunc.ops.plain import refuse_unlike
from colofunc.ops.quantized import Quantized, still_packed
from colofunc.ops.quantized_frozen import as_packed, opened_weight, sources
from colofunc.program.lazy import LazyTensor, make
from colofunc.program.tracing.attributes import KnownTensors, known_attributes, watch_attributes
from colofunc.program.tracing.meta import name_frozen, watch_modules
from colofunc.program.tracing.modules_used import note_model
from colofunc.program.tracing.roles import is_traced, mark_role

NamedTensors = dict[str, Tensor]


@attrs.frozen(eq=False)
class Model:
    """A module taken apart. Build it with `functional`."""

    module: nn.Module
    params: NamedTensors
    frozen: NamedTensors
    buffers: NamedTensors
    adapters: tuple[Adapter, ...] = ()  # of `cf.lora`
    adapted: nn.Module | None = None  # the module that `cf.lora` was given, which has no adapters
    attributes: KnownTensors = attrs.field(
        init=False, repr=False
    )  # tensors of the module that are no parameters or buffers

    @attributes.default
    def _held_now(self) -> KnownTensors:
        return known_attributes(self.module)

    @property
    def key(self) -> tuple[bool, ...]:
        """Train or eval mode of every submodule: part of what decides whether a trace can be used again."""
        return tuple(map(compat.is_training, self.module.modules()))

    @property
    def plain(self) -> nn.Module:
        """The user's own kind of module: without adapters."""
        return self.module if self.adapted is None else self.adapted

    def train(self, mode: bool = True) -> Model:
        """The same model in train mode (or eval mode). Modes belong to the module, so the receiver changes too."""
        self.module.train(mode)
        return self

    def eval(self) -> Model:
        """The same model in eval mode."""
        return self.train(False)

    def apply(
        self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], *args: Any, **kwargs: Any
    ) -> tuple[Any, NamedTensors]:
        """(out, new buffers): the module's forward with these parameters; nothing that is passed in changes."""
        self._check_names(params, buffers)
        note_model(self)
        mark_role("param", params.values())
        mark_role("buffer", buffers.values())
        # The forward may write to its buffers in place, so it gets copies.
        copies = {name: b.clone() for name, b in buffers.items()}
        frozen = as_packed(self.frozen)
        warn_of_eval_mode(self.module)
        # Weights that the step has not passed in, but taken from outside, are as good as frozen.
        name_frozen({**sources(frozen), **{name: p for name, p in params.items() if not is_traced(p)}})
        widened = {name: opened_weight(weight) for name, weight in frozen.items()}
        held = {**doubled_tensors(widened), **params, **doubled_tensors(copies)}
        watched = watch_attributes(self.module, self.attributes, params, copies)
        keep_hooks(self.module, params)
        with watch_modules(self.module), watched, policy.inside(self.module, held, [*self.frozen, *params]):
            placed = _everywhere(self.module, held)
            out = _called(self.module, placed, args, kwargs)
        # A forward may also have put another tensor in a buffer's place.
        after = {name: placed[name].detach() for name in copies}
        if DOUBLED.get():
            # Copied, because a dtype that is named would be doubled as well. A tensor in a buffer's place may have
            # another shape.
            after = {name: buffers[name].new_empty(buffer.shape).copy_(buffer) for name, buffer in after.items()}
        return out, after

    def _check_names(self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        for what, value in (("parameters", params), ("buffers", buffers)):
            if not isinstance(value, Mapping):
                raise InputError(
                    f"apply: the {what} are a {type(value).__name__}. Try: model.apply(params, buffers, *inputs)"
                )
        for name, weight in params.items():
            if isinstance(weight, Quantized):
                raise TraceError(f"apply, {name!r}: {still_packed(weight.scheme)}")
        if params.keys() == self.params.keys() and buffers.keys() == self.buffers.keys():
            return
        found = []
        for what, given, wanted in (("parameter", params, self.params), ("buffer", buffers, self.buffers)):
            found += [f"missing {what} {name!r}" for name in wanted if name not in given]
            found += [f"unknown {what} {name!r}{near(name, wanted)}" for name in given if name not in wanted]
        more = f" and {len(found) - 8} more" if len(found) > 8 else ""
        raise InputError(f"apply: {'; '.join(found[:8])}{more}. Try: the dicts of model.params and model.buffers")

    def to_module(
        self, params: Mapping[str, Tensor] | None = None, buffers: Mapping[str, Tensor] | None = None
    ) -> nn.Module:
        """A new module that holds these values (the model's own by default). Collective where they are sharded.

        What is lazy is made here. Adapters of `cf.lora` are merged into the weights that they adapt.
        """
        params = self.params if params is None else params
        buffers = self.buffers if buffers is None else buffers
        self._check_names(params, buffers)
        values = {**self.frozen, **params, **buffers}
        merged = {adapter.weight: adapter.merged(values) for adapter in self.adapters}
        return filled(self.plain, values | merged)


class _Around(nn.Module):
    """A module around another. Torch swaps the parameters of a module of TorchScript only where it is a submodule."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inside(*args, **kwargs)


def _called(module: nn.Module, placed: NamedTensors, args: Any, kwargs: Any) -> Any:
    if not isinstance(module, torch.jit.ScriptModule):
        return functional_call(module, placed, args, kwargs, tie_weights=False)
    around = {f"inside.{name}": tensor for name, tensor in placed.items()}
    out = functional_call(_Around(module), around, args, kwargs, tie_weights=False)
    placed.update((name.removeprefix("inside."), tensor) for name, tensor in around.items())
    return out


def _everywhere(module: nn.Module, held: Mapping[str, Tensor]) -> NamedTensors:
    """`held` under one name for each place: a weight of two modules has two, a module under two names has one.

    Torch's own tying swaps the tensors of a shared module twice, and leaves in the module what was swapped in.
    """
    placed = dict(held)
    first: dict[int, str] = {}
    for prefix, part in module.named_modules():
        for own in (part.named_parameters, part.named_buffers):
            for name, tensor in own(prefix, recurse=False, remove_duplicate=False):
                canonical = first.setdefault(id(tensor), name)
                if canonical in held:
                    placed[name] = held[canonical]
    return placed


def filled(module: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    """A copy of the module in which parameters and buffers have these values, in memory of their own."""
    memo: dict[int, Any] = {}
    named = [*module.named_parameters(), *module.named_buffers()]
    for name, old in named:
        value = values.get(name, old).detach()
        if value.shape != old.shape:
            raise InputError(f"to_module: {name!r} has shape {tuple(value.shape)}, the module wants {tuple(old.shape)}")
        full = value.full() if isinstance(value, DTensor) else make(value)
        full = full.clone() if full is value else full
        memo[id(old)] = full.to(old.dtype)
        if isinstance(old, nn.Parameter):
            memo[id(old)] = nn.Parameter(memo[id(old)], old.requires_grad)
    for part in module.modules():
        memo |= {id(x): make(x) for x in vars(part).values() if isinstance(x, LazyTensor)}
    copied = copy.deepcopy(module, memo)
    _fill_scripted(copied, {name: memo[id(old)] for name, old in named})
    return copied


def _fill_scripted(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Modules of TorchScript copy their own tensors, whatever the memo says."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        value = values[name]
        if tensor is not value:
            with torch.no_grad():
                tensor.detach_().copy_(value)
            tensor.requires_grad_(value.requires_grad)


def functional(module: nn.Module, trainable: str | Iterable[str] = "*") -> Model:
    """Take a module apart. `trainable`: globs over dotted names; "*" trains what the module says requires a gradient.

    Raises InputError where a glob matches no parameter, or one that cannot be differentiated.
    """
    if not isinstance(module, nn.Module):
        what = module.__name__ if isinstance(module, type) else f"a {type(module).__name__}"
        raise InputError(f"functional wants an nn.Module, not {what}. Try: cf.functional(Model(config))")
    globs = (trainable,) if isinstance(trainable, str) else tuple(trainable)
    named = dict(module.named_parameters())
    refuse_unseen(named)
    for glob in globs:
        if glob != "*" and not any(fnmatchcase(name, glob) for name in named):
            raise InputError(f"trainable={glob!r} matches no parameter{near(glob, named)}")

    def trains(name: str, p: Tensor) -> bool:
        if globs == ("*",):
            return p.requires_grad
        return any(fnmatchcase(name, glob) for glob in globs)

    params = {name: p.detach() for name, p in named.items() if trains(name, p)}
    whole = [name for name, p in params.items() if not p.is_floating_point()]
    if whole:
        raise InputError(
            f"{whole[0]!r} holds {params[whole[0]].dtype} and cannot be trained. Try: a glob that leaves it out"
        )
    frozen = {name: p.detach() for name, p in named.items() if name not in params}
    buffers = {name: b.detach() for name, b in module.named_buffers()}
    for role, made in (("param", params), ("frozen", frozen), ("buffer", buffers)):
        give_role(role, made.values())
    return Model(module, params, frozen, buffers)


def abstract(shape: Iterable[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor that has a shape and a dtype and no data, to plan a step before there is a batch."""
    sizes = tuple(shape) if isinstance(shape, Iterable) else (-1,)
    if not all(isinstance(size, int) and size >= 0 for size in sizes):
        raise InputError(f"abstract: {shape!r} is no shape. Try: cf.abstract((8, 1024), torch.int64)")
    return torch.empty(sizes, dtype=dtype, device="meta")


# ---- hooks and classes of parameters ----
#
# Problem: `cf.functional` takes values out of parameters, and what a user hung on them stays behind: a hook that masks
# a gradient (to train some rows only) would be dropped without a word. Idea: hooks of gradients are hung on the tensors
# that stand for the parameters, wherever these are differentiated; what has no meaning there is refused.
#
#     p.register_hook(lambda grad: grad * mask)     # honoured: the step's gradient of p is masked


@attrs.frozen(eq=False)
class Hung:
    """A parameter's hook on a tensor that stands for it: it runs for as long as it is on the parameter."""

    parameter: ref[Tensor]
    handle: int  # by which the parameter knows it

    def __call__(self, grad: Tensor) -> Any:
        parameter = self.parameter()
        hook = None if parameter is None else compat.gradient_hooks(parameter).get(self.handle)
        return None if hook is None else hook(grad)


def keep_hooks(module: nn.Module, params: Mapping[str, Tensor]) -> None:
    """Hang the hooks of the module's parameters on the tensors that stand for them, once for each tensor.

    They stay there behind the call, as the backward pass comes later. One that is removed from its parameter does
    nothing.
    """
    for name, parameter in module.named_parameters():
        hooks = compat.gradient_hooks(parameter)
        tensor = params.get(name)
        if not hooks or tensor is None or not tensor.requires_grad or tensor is parameter:
            continue
        already = {hung.handle for hung in compat.gradient_hooks(tensor).values() if isinstance(hung, Hung)}
        for handle in hooks:
            if handle not in already:
                tensor.register_hook(Hung(ref(parameter), handle))


def refuse_unseen(parameters: Mapping[str, Tensor]) -> None:
    """Raise InputError where a parameter has something on it that a function of its values cannot see."""
    for name, parameter in parameters.items():
        if compat.accumulation_hooks(parameter):
            raise InputError(
                f"functional: parameter {name!r} has a hook from register_post_accumulate_grad_hook, which runs when a "
                "gradient is put in .grad, and a step has none. Try: remove the hook, and do what it does with the "
                "gradients that value_and_grad returns (a hook from register_hook is honoured)"
            )
        if nn.parameter.is_lazy(parameter):
            raise InputError(
                f"functional: parameter {name!r} has no shape yet. Try: one call of the module on a batch before"
            )
        if not isinstance(parameter, DTensor):
            refuse_unlike(parameter, f"functional: parameter {name!r}", InputError)
