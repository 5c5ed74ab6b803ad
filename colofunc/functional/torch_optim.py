"""torch's own optimizers on functional values: their options, the state they begin with, and Muon's update.

Problem: what a class of `torch.optim` accepts and starts from is decided by its constructor, and Muon, which multiplies
whole matrices, has no short rule. Idea: build the class on copies and ask it; for an update, hand it the state, run its
single-tensor code once, and read the copies back. While it runs, a function mode rewrites the few calls that take a
Python number only (`alpha=`), so that the rate stays a 0-dim tensor.
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
from colofunc.ops.update_rules import KINDS
from colofunc.program.lazy import zeros_like

ParamGroups = Sequence[tuple[list[str], dict[str, Any]]]  # (names, options)
TRACEABLE = (*sorted(KINDS), "Muon")
REFUSED = {
    "LBFGS": "it evaluates the loss an unknown number of times",
    "SparseAdam": "it takes sparse gradients only",
    "Adafactor": "its step size is a Python number computed from the parameters",
}
# How torch runs the update, not what it computes.
RUNNING = ("foreach", "fused", "capturable", "differentiable")


def check_optimizer(cls: type[torch.optim.Optimizer]) -> None:
    """Raise InputError unless the class is one that is known to trace."""
    if not isinstance(cls, type):
        raise InputError(
            f"adapt wants a class of torch.optim, not {cls!r:.80}. Try: cf.adapt(torch.optim.AdamW, lr=3e-4)"
        )
    name = cls.__name__
    if name in TRACEABLE and cls is getattr(torch.optim, name, None):
        return
    why = REFUSED.get(name, "it is not a class of torch.optim that is known to have no data-dependent code")
    raise InputError(
        f"optimizer {name} cannot be adapted: {why}. Try: torch.optim.AdamW, SGD, {', '.join(TRACEABLE)}, or cf.Lion, "
        "cf.LAMB"
    )


def defaults(cls: type[torch.optim.Optimizer], lr: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """All options of the class with these set, checked by the class itself."""
    known = [k for k in inspect.signature(cls).parameters if k != "params"]
    unknown = [k for k in options if k not in known]
    if unknown:
        raise InputError(f"{cls.__name__} has no option {unknown[0]!r}{near(unknown[0], known)}")
    probe = torch.zeros(1, 1, requires_grad=True)
    if isinstance(lr, torch.optim.lr_scheduler.LRScheduler):
        raise InputError(
            f"lr is a {type(lr).__name__}. Try: cf.schedule(lambda opt: {type(lr).__name__}(opt, ...), lr=1e-3, "
            "steps=1000)"
        )
    rate = {} if lr is None or callable(lr) else {"lr": lr}
    if lr is not None and "lr" in known and inspect.signature(cls).parameters["lr"].default is inspect.Parameter.empty:
        rate = {"lr": 1e-3} | rate
    try:
        found = cls([probe], **rate, **options).defaults
    except (TypeError, ValueError) as error:
        raise InputError(f"{cls.__name__} refuses its options: {error}") from error
    return {k: v for k, v in found.items() if k not in RUNNING}


def _build(
    cls: type[torch.optim.Optimizer], groups: ParamGroups, tensors: Mapping[str, Tensor]
) -> torch.optim.Optimizer:
    known = inspect.signature(cls).parameters
    running = {k: v for k, v in {"foreach": False, "fused": False, "capturable": True}.items() if k in known}
    found = []
    for names, options in groups:
        given = {k: v for k, v in options.items() if k in known and not callable(v)}
        found.append({"params": [tensors[name] for name in names], **given})
    # Some constructors read an option only from their own arguments (Adagrad's initial accumulator).
    own = {k: v for k, v in found[0].items() if k != "params"}
    optimizer = cls(found, **{**own, **running})
    for group, (_, options) in zip(optimizer.param_groups, groups, strict=True):
        # Set after the constructor, which checks some of these with Python comparisons.
        group.update({k: v for k, v in options.items() if k not in running and not callable(v)})
    return optimizer


def init(cls: type[torch.optim.Optimizer], groups: ParamGroups, params: Mapping[str, Tensor]) -> dict[str, Any]:
    """{key: {name: tensor}} as the class makes it before its first step, without the step count."""
    tensors = {n: zeros_like(p).requires_grad_() for n, p in params.items()}
    for t in tensors.values():
        t.grad = t.detach()
    optimizer = _build(cls, groups, tensors)
    for group in optimizer.param_groups:
        compat.init_optimizer_group(optimizer, group)
    return _read(optimizer, tensors)


def update(
    cls: type[torch.optim.Optimizer], groups: ParamGroups, rates: Mapping[str, Tensor], grads: Mapping[str, Tensor],
    state: Mapping[str, Any], params: Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], dict[str, Any]]:  # fmt: skip
    """(params, state) after torch's own update on copies; for a class that counts no steps."""
    tensors = {n: p.clone().requires_grad_() for n, p in params.items()}
    numbers = [(names, {**o, "lr": rates[names[0]] if callable(o["lr"]) else o["lr"]}) for names, o in groups]
    optimizer = _build(cls, numbers, tensors)
    for n, t in tensors.items():
        t.grad = grads[n].detach()
        optimizer.state[t] = {key: part[n].clone() for key, part in state.items() if n in part}
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


class TensorNumbers(TorchFunctionMode):
    """Where torch takes a Python number only, a 0-dim tensor does as well."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.add_ and isinstance(kwargs.get("alpha"), Tensor):
            return args[0].add_(kwargs["alpha"].to(args[0].dtype) * args[1])
        return func(*args, **kwargs)
