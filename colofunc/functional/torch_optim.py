"""torch's own optimizers on functional values.

Problem: RMSprop, Adagrad, NAdam and others are code that writes to `param`, `param.grad` and `state[param]`, and turns
the step count into a Python number, which a trace cannot follow. Idea: build the class on copies, hand it the state,
run its single-tensor code once, and read the copies back. While it runs, a function mode keeps the step count a 0-dim
tensor, and rewrites the few calls that take a number only (`alpha=`, `value=`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from colofunc import compat
from colofunc.errors import InputError, near

Groups = Sequence[tuple[list[str], dict[str, Any]]]  # (names, options)
TRACEABLE = ("ASGD", "Adadelta", "Adagrad", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop")
REFUSED = {
    "LBFGS": "it evaluates the loss an unknown number of times",
    "SparseAdam": "it takes sparse gradients only",
    "Adafactor": "its step size is a Python number computed from the parameters",
}
# How torch runs the update, not what it computes.
RUNNING = ("foreach", "fused", "capturable", "differentiable")


def check(cls: type[torch.optim.Optimizer]) -> None:
    """Raise InputError unless the class is one that is known to trace."""
    name = cls.__name__
    if name in TRACEABLE and cls is getattr(torch.optim, name, None):
        return
    why = REFUSED.get(name, "it is not a class of torch.optim that is known to have no data-dependent code")
    raise InputError(f"optimizer {name} cannot be adapted: {why}. Try: torch.optim.AdamW, SGD, {', '.join(TRACEABLE)}")


def defaults(cls: type[torch.optim.Optimizer], lr: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """All options of the class with these set, checked by the class itself."""
    known = [k for k in inspect.signature(cls).parameters if k != "params"]
    unknown = [k for k in options if k not in known]
    if unknown:
        raise InputError(f"{cls.__name__} has no option {unknown[0]!r}{near(unknown[0], known)}")
    probe = torch.zeros(1, 1, requires_grad=True)
    rate = {} if lr is None or callable(lr) else {"lr": lr}
    if lr is not None and "lr" in known and inspect.signature(cls).parameters["lr"].default is inspect.Parameter.empty:
        rate = {"lr": 1e-3} | rate
    try:
        found = cls([probe], **rate, **options).defaults
    except (TypeError, ValueError) as error:
        raise InputError(f"{cls.__name__} refuses its options: {error}") from error
    return {k: v for k, v in found.items() if k not in RUNNING}


def _build(cls: type[torch.optim.Optimizer], groups: Groups, tensors: Mapping[str, Tensor]) -> torch.optim.Optimizer:
    known = inspect.signature(cls).parameters
    running = {k: v for k, v in {"foreach": False, "fused": False, "capturable": True}.items() if k in known}
    found = []
    for names, options in groups:
        given = {k: v for k, v in options.items() if k in known and not callable(v)}
        found.append({"params": [tensors[n] for n in names], **given})
    # Some constructors read an option only from their own arguments (Adagrad's initial accumulator).
    own = {k: v for k, v in found[0].items() if k != "params"}
    optimizer = cls(found, **{**own, **running})
    for group, (_, options) in zip(optimizer.param_groups, groups, strict=True):
        # Set after the constructor, which checks some of these with Python comparisons.
        group.update({k: v for k, v in options.items() if k not in running and not callable(v)})
    return optimizer


def init(cls: type[torch.optim.Optimizer], groups: Groups, params: Mapping[str, Tensor]) -> dict[str, Any]:
    """{key: {name: tensor}} as the class makes it before its first step, without the step count."""
    tensors = {n: torch.empty_like(p).requires_grad_() for n, p in params.items()}
    for t in tensors.values():
        t.grad = t.detach()
    optimizer = _build(cls, groups, tensors)
    for group in optimizer.param_groups:
        compat.init_optimizer_group(optimizer, group)
    return _read(optimizer, tensors)


def update(
    cls: type[torch.optim.Optimizer], groups: Groups, rates: Mapping[str, Tensor], grads: Mapping[str, Tensor],
    state: Mapping[str, Any], params: Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], dict[str, Any]]:  # fmt: skip
    """(params, state without the step count) after torch's own update on copies."""
    tensors = {n: p.clone().requires_grad_() for n, p in params.items()}
    numbers = [(names, {**o, "lr": rates[names[0]] if callable(o["lr"]) else o["lr"]}) for names, o in groups]
    optimizer = _build(cls, numbers, tensors)
    counted = cls is not torch.optim.Muon
    for n, t in tensors.items():
        t.grad = grads[n].detach()
        held = {key: part[n].clone() for key, part in state.items() if key != "step" and n in part}
        # In float64, so that powers of the count are as exact as those of a Python number.
        optimizer.state[t] = {**({"step": state["step"].to(torch.float64, copy=True)} if counted else {}), **held}
    with TensorNumbers():
        # Without the profiler's hooks, which are nothing to record.
        step: Callable[..., Any] = inspect.unwrap(cls.step)
        step(optimizer)
    return {n: t.detach() for n, t in tensors.items()}, _read(optimizer, tensors)


def _read(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    found: dict[str, dict[str, Tensor]] = {}
    for n, t in tensors.items():
        for key, value in optimizer.state.get(t, {}).items():
            if key == "step" or value is None:
                continue
            if not isinstance(value, Tensor):
                raise InputError(
                    f"{type(optimizer).__name__} keeps {key} as {type(value).__name__}, which no step can return"
                )
            found.setdefault(key, {})[n] = value.detach()
    return found


# ---- numbers that stay tensors ----


class _Accelerator:
    """What `tensor.device` says here: capturable code asserts on an accelerator, although it runs anywhere."""

    type = "cuda"


class TensorNumbers(TorchFunctionMode):
    """Python numbers of optimizer code stay 0-dim tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.item and args[0].dim() == 0:
            # float64, so that arithmetic with it is as exact as with the Python number it stands for.
            return args[0].to(torch.float64)
        if func == Tensor.device.__get__:
            return _Accelerator()
        number = kwargs.get("alpha", kwargs.get("value"))
        if isinstance(number, Tensor) and func in SCALED:
            return SCALED[func](number, *args)
        if func in PLAIN and len(args) > 1 and isinstance(args[1], Tensor) and args[1].dim() == 0 and args[0].dim() > 0:
            args = (args[0], args[1].to(args[0].dtype), *args[2:])
        return func(*args, **kwargs)


def _cast(number: Tensor, like: Tensor) -> Tensor:
    return number.to(like.dtype)


SCALED: dict[Any, Callable[..., Tensor]] = {
    Tensor.add: lambda a, x, y: x + _cast(a, x) * y,
    Tensor.add_: lambda a, x, y: x.add_(_cast(a, x) * y),
    Tensor.sub_: lambda a, x, y: x.sub_(_cast(a, x) * y),
    Tensor.addcmul_: lambda a, x, y, z: x.add_(_cast(a, x) * y * z),
    Tensor.addcdiv_: lambda a, x, y, z: x.add_(_cast(a, x) * (y / z)),
    Tensor.addcdiv: lambda a, x, y, z: x + _cast(a, x) * (y / z),
}
PLAIN = {Tensor.mul_, Tensor.div_, Tensor.add_, Tensor.sub_}
