"""Lion and LAMB, which `torch.optim` does not have, as classes in its style and as updates of one parameter.

    opt = cf.adapt(cf.Lion, lr=1e-4, weight_decay=0.1)                   # as any class of torch.optim
    opt = cf.adapt(cf.LAMB, lr=2e-3, groups={"*.bias": cf.adapt(torch.optim.AdamW, lr=1e-3, weight_decay=0.0)})
    cf.Lion(module.parameters(), lr=1e-4).step()                         # and alone, as trainers of other libraries do

The formulas, and what runs them: `colofunc.ops.update_lion`, `colofunc.ops.update_lamb`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import attrs
import torch
from torch import Tensor

from colofunc.errors import InputError
from colofunc.ops.update import sgd, sgd_
from colofunc.ops.update_lamb import lamb_direction, lamb_direction_, trust_ratios
from colofunc.ops.update_lion import lion, lion_


def _check_number(name: str, value: Any, instead: str) -> None:
    """Raises InputError unless an option is a number, or a tensor of one. instead: what to try."""
    single = isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)
    if not single or math.isnan(value):
        raise InputError(f"{name}={value!r} is no number. Try: {name}={instead}")


def _check(lr: Any, betas: Any, weight_decay: Any, lr_text: str, betas_text: str) -> None:
    """Raises InputError where an option that both classes have is out of range. The texts: what to try."""
    _check_number("lr", lr, lr_text)
    if not lr >= 0.0:
        raise InputError(f"lr={lr!r} would move parameters up the gradient. Try: lr={lr_text}, or maximize=True")
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise InputError(f"betas={betas!r} is no pair of numbers. Try: betas={betas_text}")
    for place, beta in enumerate(betas):
        name = f"betas[{place}]"
        _check_number(name, beta, "0.9")
        if not 0.0 <= beta < 1.0:
            raise InputError(f"{name}={beta!r} is not from 0 to below 1, the share that a mean keeps. Try: {name}=0.9")
    _check_number("weight_decay", weight_decay, "0.0")
    if not weight_decay >= 0.0:
        raise InputError(f"weight_decay={weight_decay!r} would let weights grow. Try: weight_decay=0.0")


def _loss(closure: Callable[[], Any] | None) -> Any:
    """What a closure of torch.optim gives: it computes the loss and the gradients."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class Lion(torch.optim.Optimizer):
    """Lion: every element moves by lr, the way that a mean of gradients says. One state, `exp_avg`.

    toward = exp_avg betas[0] + (1 - betas[0]) grad; param = param (1 - lr weight_decay) - lr sign(toward);
    exp_avg = exp_avg betas[1] + (1 - betas[1]) grad. Against AdamW the paper takes a rate 3 to 10 times smaller and as
    much more decay. For `cf.adapt`, or by itself. Raises InputError for an option out of range. Source: Chen et al.
    2023, 2302.06675.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        _check(lr, betas, weight_decay, "1e-4", "(0.9, 0.99)")
        super().__init__(params, dict(lr=lr, betas=tuple(betas), weight_decay=weight_decay, maximize=maximize))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update, in place; a parameter without a gradient stays."""
        loss = _loss(closure)
        for group in self.param_groups:
            lr = torch.as_tensor(group["lr"], dtype=torch.float64)
            betas = map(float, group["betas"])
            options = *betas, group["weight_decay"], group["maximize"]
            for p, grad, state in _with_gradients(self, group, ("exp_avg",)):
                lion_.kernel(p, grad, state["exp_avg"], lr, *options)
        return loss


class LAMB(torch.optim.Optimizer):
    """LAMB: a parameter moves along Adam's direction by lr times its own length. States `exp_avg` and `exp_avg_sq`.

    direction = Adam's step + weight_decay param; param -= lr |param| / |direction| direction, with a ratio of 1 where a
    norm is 0. Norms are of whole parameters on any mesh. Biases and norm weights are mostly left to another optimizer,
    by a group. For `cf.adapt`, or by itself. Raises InputError for an option out of range. Source: You et al. 2019,
    1904.00962, with bias correction, phi the identity.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        maximize: bool = False,
    ) -> None:
        _check(lr, betas, weight_decay, "1e-3", "(0.9, 0.999)")
        _check_number("eps", eps, "1e-6")
        if not eps >= 0.0:
            raise InputError(f"eps={eps!r} is negative. Try: eps=1e-6")
        super().__init__(params, dict(lr=lr, betas=tuple(betas), eps=eps, weight_decay=weight_decay, maximize=maximize))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update, in place; a parameter without a gradient stays."""
        loss = _loss(closure)
        for group in self.param_groups:
            betas = map(float, group["betas"])
            options = *betas, group["eps"], group["weight_decay"], group["maximize"]
            for p, grad, state in _with_gradients(self, group, ("exp_avg", "exp_avg_sq")):
                moments = state["exp_avg"], state["exp_avg_sq"]
                direction, squares = lamb_direction_.kernel(p, grad, *moments, state["step"], *options)
                lr = torch.as_tensor(group["lr"], dtype=torch.float64, device=p.device)
                rate = lr * trust_ratios([squares])[0]
                sgd_.kernel(p, direction, None, state["step"], rate, 0.0, 0.0, 0.0, False)
        return loss


def _with_gradients(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], keys: Sequence[str]
) -> Iterator[tuple[Tensor, Tensor, dict[str, Tensor]]]:
    """(parameter, gradient, state) of the parameters with a gradient; their updates are counted in the state."""
    name = type(optimizer).__name__
    for p in group["params"]:
        if p.grad is None:
            continue
        shape = tuple(p.shape)
        if p.grad.is_sparse:
            raise InputError(
                f"{name}: the gradient of a parameter of shape {shape} is sparse. Try: sparse=False in its layer"
            )
        if p.is_complex():
            raise InputError(
                f"{name}: a parameter of shape {shape} is complex. Try: a real one of shape {(*shape, 2)}, read as "
                "torch.view_as_complex(parameter)"
            )
        state = optimizer.state[p]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state |= {key: torch.zeros_like(p) for key in keys}
        state["step"] += 1
        yield p, p.grad, state


# ---- for cf.adapt ----

NamedTensors = dict[str, Tensor]
Updated = tuple[NamedTensors, dict[str, NamedTensors]]  # (params, state)


@attrs.frozen
class UpdateInputs:
    """What an update of all parameters reads. All but `step` and `finite` are by name, the state by key and name."""

    params: NamedTensors
    grads: NamedTensors
    state: Mapping[str, NamedTensors]
    step: Tensor
    rates: Mapping[str, Tensor]
    options: Mapping[str, Mapping[str, Any]]
    finite: Tensor | None


@attrs.frozen
class Own:
    """What `adapt` has to know of a class here.

    `states`: keys of the state, which have the parameter's shape. `update`: pure.
    """

    states: tuple[str, ...]
    update: Callable[[UpdateInputs], Updated]


def _lion(given: UpdateInputs) -> Updated:
    new: NamedTensors = {}
    means: NamedTensors = {}
    for n, p in given.params.items():
        o = given.options[n]
        new[n], means[n] = lion(
            p, given.grads[n], given.state["exp_avg"][n], given.rates[n], *map(float, o["betas"]), o["weight_decay"],
            o["maximize"], given.finite,
        )  # fmt: skip
    return new, {"exp_avg": means}


def _lamb(given: UpdateInputs) -> Updated:
    step, finite = given.step, given.finite
    means: NamedTensors = {}
    uncentered: NamedTensors = {}
    directions: NamedTensors = {}
    squares: NamedTensors = {}
    for n, p in given.params.items():
        o = given.options[n]
        directions[n], squares[n], means[n], uncentered[n] = lamb_direction(
            p, given.grads[n], given.state["exp_avg"][n], given.state["exp_avg_sq"][n], step, *map(float, o["betas"]),
            o["eps"], o["weight_decay"], o["maximize"], finite,
        )  # fmt: skip
    ratios = trust_ratios(list(squares.values()))
    new: NamedTensors = {}
    for (n, p), ratio in zip(given.params.items(), ratios.unbind(), strict=True):
        rate = given.rates[n] * ratio
        new[n], _ = sgd(p, directions[n], None, step, rate, 0.0, 0.0, 0.0, False, False, finite)
    return new, {"exp_avg": means, "exp_avg_sq": uncentered}


OWN: Mapping[type[torch.optim.Optimizer], Own] = {
    Lion: Own(("exp_avg",), _lion),
    LAMB: Own(("exp_avg", "exp_avg_sq"), _lamb),
}
