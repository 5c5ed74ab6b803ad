"""The elementwise optimizers beside Adam and SGD as one operator, `colofunc.update`, and its in-place twin.

Problem: RMSprop or NAdam in aten is a dozen nodes per parameter, which cannot be grouped by chunk nor run in place.
Idea: one operator `update(kind, param, grad, a, b, c, step, lr, options)` whose body is a pure rule per kind, chosen by
name; at most three states, of the parameter's shape or 0-dim (NAdam's product of momenta), None where a kind has fewer.

    new, square_avg, _, _ = update("RMSprop", param, grad, square_avg, None, None, step, lr, options_of("RMSprop",
    {...}))

A rule sees float64 0-dim counts and rates, so schedules need no retrace, and the parameter in at least float32.
Adafactor and Muon look at whole rows or matrices and are not here. Source: Zeiler, ADADELTA (2012), algorithm 1; Duchi
et al., AdaGrad (2011); Kingma and Ba (2015), algorithm 2 (AdaMax); Dozat, NAdam (2016); Liu et al., RAdam (2020),
algorithm 2; Tieleman and Hinton, RMSProp (2012); Riedmiller and Braun, Rprop (1993); Polyak and Juditsky (1992) for
averaged SGD. Details (where eps stands, what is damped) as in `torch.optim`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from colofunc.ops.define import define_update

States = tuple[Tensor, ...]
RuleOptions = Mapping[str, float]
UpdateRule = Callable[[Tensor, Tensor, States, Tensor, Tensor, RuleOptions], tuple[Tensor, States]]


@attrs.frozen
class OptimizerKind:
    """`states` and `options` are the class's own names, in the order in which the operator takes them."""

    rule: UpdateRule
    states: tuple[str, ...]
    options: tuple[str, ...]


def options_of(kind: str, options: Mapping[str, Any]) -> list[float]:
    """The options of a `torch.optim` class as the operator takes them: pairs are spread, truth values are 0 or 1."""
    found: list[float] = []
    for name in KINDS[kind].options:
        value = options[name]
        found += [float(v) for v in (value if isinstance(value, (tuple, list)) else (value,))]
    return found


# ---- rules: (param, grad, states, count, rate, options) -> (param, states) ----


def _adadelta(p: Tensor, g: Tensor, s: States, t: Tensor, lr: Tensor, o: RuleOptions) -> tuple[Tensor, States]:
    square, moved = s
    square = o["rho"] * square + (1 - o["rho"]) * g * g
    delta = (moved + o["eps"]).sqrt() / (square + o["eps"]).sqrt() * g
    return p - lr * delta, (square, o["rho"] * moved + (1 - o["rho"]) * delta * delta)


def _adagrad(p: Tensor, g: Tensor, s: States, t: Tensor, lr: Tensor, o: RuleOptions) -> tuple[Tensor, States]:
    total = s[0] + g * g
    return p - lr / (1 + (t - 1) * o["lr_decay"]) * (g / (total.sqrt() + o["eps"])), (total,)


def _adamax(p: Tensor, g: Tensor, s: States, t: Tensor, lr: Tensor, o: RuleOptions) -> tuple[Tensor, States]:
    mean = s[0].lerp(g, 1 - o["betas"])
    largest = torch.maximum(s[1] * o["betas.1"], g.abs() + o["eps"])
    return p - lr / (1 - o["betas"] ** t) * (mean / largest), (mean, largest)


def _asgd(p: Tensor, g: Tensor, s: States, t: Tensor, lr: Tensor, o: RuleOptions) -> tuple[Tensor, States]:
    eta, mu, average = s
    p = p * (1 - o["lambd"] * eta) - eta * g
    average = average + (p - average) * mu
    return p, (lr / (1 + o["lambd"] * lr * t) ** o["alpha"], 1 / (t - o["t0"]).clamp(min=1.0), average)


def _nadam(p: Tensor, g: Tensor, s: States, t: Tensor, lr: Tensor, o: RuleOptions) -> tuple[Tensor, States]:
    product, mean, square = s
    here, there = (o["betas"] * (1 - 0.5 * 0.96 ** ((t + k) * o["momentum_decay"])) for k in (0, 1))
    product = (product.to(torch.float64) * here).to(product.dtype)
    mean = mean.lerp(g, 1 - o["betas"])
    square = o["betas.1"] * square + (1 - o["betas.1"]) * g * g
    root = (square / (1 - o["betas.1"] ** t)).sqrt() + o["eps"]
    passed = product.to(torch.float64)
    p = p - lr * (1 - here) / (1 - passed) * (g / root) - lr * there / (1 - passed * there) * (mean / root)
    return p, (product, mean, square)


def _radam(p: Tensor, g: Tensor, s: States, t: Tensor, lr: Tensor, o: RuleOptions) -> tuple[Tensor, States]:
    mean, square = s[0].lerp(g, 1 - o["betas"]), o["betas.1"] * s[1] + (1 - o["betas.1"]) * g * g
    power = o["betas.1"] ** t
    most = 2 / (1 - o["betas.1"]) - 1
    length = most - 2 * t * power / (1 - power)  # of the moving average
    rectified = (length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length)
    tractable = length > 5
    scale = rectified.clamp(min=0).sqrt() * (1 - power).sqrt()
    step = torch.where(tractable, scale / (square.sqrt() + o["eps"]), torch.ones_like(square))
    return p - lr / (1 - o["betas"] ** t) * mean * step, (mean, square)


def _rmsprop(p: Tensor, g: Tensor, s: States, t: Tensor, lr: Tensor, o: RuleOptions) -> tuple[Tensor, States]:
    square, buffer, mean = s
    square = o["alpha"] * square + (1 - o["alpha"]) * g * g
    variance = square
    if o["centered"]:
        mean = mean.lerp(g, 1 - o["alpha"])
        variance = square - mean * mean
    step = g / (variance.sqrt() + o["eps"])
    if o["momentum"]:
        step = buffer = o["momentum"] * buffer + step
    return p - lr * step, (square, buffer, mean)


def _rprop(p: Tensor, g: Tensor, s: States, t: Tensor, lr: Tensor, o: RuleOptions) -> tuple[Tensor, States]:
    sign = (g * s[0]).sign()
    factor = torch.where(sign > 0, o["etas.1"], torch.where(sign < 0, o["etas"], 1.0))
    size = (s[1] * factor.to(s[1].dtype)).clamp(o["step_sizes"], o["step_sizes.1"])
    g = torch.where(sign < 0, torch.zeros_like(g), g)
    return p - g.sign() * size, (g, size)


_ADAMS = ("betas", "eps", "weight_decay", "maximize")
KINDS: dict[str, OptimizerKind] = {
    "Adadelta": OptimizerKind(_adadelta, ("square_avg", "acc_delta"), ("rho", "eps", "weight_decay", "maximize")),
    "Adagrad": OptimizerKind(_adagrad, ("sum",), ("lr_decay", "eps", "weight_decay", "maximize")),
    "Adamax": OptimizerKind(_adamax, ("exp_avg", "exp_inf"), _ADAMS),
    "ASGD": OptimizerKind(_asgd, ("eta", "mu", "ax"), ("lambd", "alpha", "t0", "weight_decay", "maximize")),
    "NAdam": OptimizerKind(
        _nadam, ("mu_product", "exp_avg", "exp_avg_sq"), (*_ADAMS, "momentum_decay", "decoupled_weight_decay")
    ),
    "RAdam": OptimizerKind(_radam, ("exp_avg", "exp_avg_sq"), (*_ADAMS, "decoupled_weight_decay")),
    "RMSprop": OptimizerKind(
        _rmsprop,
        ("square_avg", "momentum_buffer", "grad_avg"),
        ("alpha", "eps", "momentum", "centered", "weight_decay", "maximize"),
    ),
    "Rprop": OptimizerKind(_rprop, ("prev", "step_size"), ("etas", "step_sizes", "maximize")),
}
_PAIRS = ("betas", "etas", "step_sizes")


# ---- the operator ----


def _named(kind: OptimizerKind, options: Sequence[float]) -> dict[str, float]:
    names = [n for o in kind.options for n in ((o, f"{o}.1") if o in _PAIRS else (o,))]
    return dict(zip(names, options, strict=True))


def _update_(
    kind: str, param: Tensor, grad: Tensor, a: Tensor | None, b: Tensor | None, c: Tensor | None, step: Tensor, lr: Tensor,
    options: Sequence[float], finite: Tensor | None = None,
) -> None:  # fmt: skip
    rules = KINDS[kind]
    named = _named(rules, options)
    wide = torch.promote_types(param.dtype, torch.float32)
    wide_param, wide_grad = param.to(wide), grad.to(wide)
    count, rate = step.to(param.device, torch.float64), lr.to(param.device, torch.float64)
    if finite is not None:
        finite = finite.to(param.device)
    if named["maximize"]:
        wide_grad = -wide_grad
    decay = named.get("weight_decay", 0.0)
    if decay and named.get("decoupled_weight_decay"):
        wide_param = wide_param * (1 - rate * decay)
    elif decay:
        wide_grad = wide_grad + decay * wide_param
    states = (a, b, c)[: len(rules.states)]
    held = [_held(state, param, wide) for state in states]
    new_param, new_states = rules.rule(wide_param, wide_grad, tuple(held), count, rate, named)
    for old, new in zip((param, *states), (new_param, *new_states), strict=True):
        if old is not None:  # a step that is skipped leaves everything as it was
            old.copy_(new if finite is None else torch.where(finite, new.to(old.dtype), old))


def _held(state: Tensor | None, param: Tensor, wide: torch.dtype) -> Tensor:
    """A state as a rule reads it."""
    if state is None:
        # One that these options do not use stands in as it would be if it had never been written.
        return param.new_zeros((), dtype=wide)
    return state if state.dim() == 0 else state.to(wide)


update, update_ = define_update(
    "update_(str kind, Tensor(a!) param, Tensor grad, Tensor(b!)? a, Tensor(c!)? b, Tensor(d!)? c, Tensor step, "
    "Tensor lr, float[] options, Tensor? finite=None) -> ()",
    _update_,
)  # fmt: skip
