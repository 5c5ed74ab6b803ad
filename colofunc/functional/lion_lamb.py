"""Lion and LAMB, which `torch.optim` does not have, as classes in its style and as updates of one parameter.

    opt = cf.adapt(cf.Lion, lr=1e-4, weight_decay=0.1)                   # as any class of torch.optim
    opt = cf.adapt(cf.LAMB, lr=2e-3, groups={"*.bias": cf.adapt(torch.optim.AdamW, lr=1e-3, weight_decay=0.0)})
    cf.Lion(module.parameters(), lr=1e-4).step()                         # and alone, as a trainer of another library calls it

The formulas, and what runs them: `colofunc.ops.update_lion`, `colofunc.ops.update_lamb`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from colofunc.errors import InputError
from colofunc.ops.update import sgd, sgd_
from colofunc.ops.update_lamb import lamb_direction, lamb_direction_, trust_ratios
from colofunc.ops.update_lion import lion, lion_


def _check(lr: Any, betas: Any, weight_decay: Any, lr_text: str, betas_text: str) -> None:
    """Raises InputError where an option that both classes have is out of range. The texts: what to try."""
    if not lr >= 0.0:
        raise InputError(f"lr={lr!r} would move parameters up the gradient. Try: lr={lr_text}, or maximize=True")
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise InputError(f"betas={betas!r} is no pair of numbers. Try: betas={betas_text}")
    for place, beta in enumerate(betas):
        if not 0.0 <= beta < 1.0:
            raise InputError(f"betas[{place}]={beta!r} is not from 0 to below 1, the share that a mean keeps. Try: betas[{place}]=0.9")
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

    toward = exp_avg betas[0] + (1 - betas[0]) grad; param = param (1 - lr weight_decay) - lr sign(toward); then exp_avg =
    exp_avg betas[1] + (1 - betas[1]) grad. Against AdamW the paper takes a rate 3 to 10 times smaller and as much more decay. For
    `cf.adapt`, or by itself. Raises InputError for an option out of range. Source: Chen et al. 2023, 2302.06675.
    """

    def __init__(
        self, params: Any, lr: float | Tensor = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0, *,
        maximize: bool = False,
    ) -> None:  # fmt: skip
        _check(lr, betas, weight_decay, "1e-4", "(0.9, 0.99)")
        super().__init__(params, dict(lr=lr, betas=tuple(betas), weight_decay=weight_decay, maximize=maximize))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update, in place; a parameter without a gradient stays."""
        loss = _loss(closure)
        for group in self.param_groups:
            for p, state in _with_gradients(self, group, ("exp_avg",)):
                lr = torch.as_tensor(group["lr"], dtype=torch.float64)
                lion_.kernel(p, p.grad, state["exp_avg"], lr, *map(float, group["betas"]), group["weight_decay"], group["maximize"])
        return loss


class LAMB(torch.optim.Optimizer):
    """LAMB: a parameter moves along Adam's direction by lr times its own length. States `exp_avg` and `exp_avg_sq`.

    direction = Adam's step + weight_decay param; param -= lr |param| / |direction| direction, with a ratio of 1 where a norm is 0. Norms
    are of whole parameters on any mesh. Biases and norm weights are mostly left to another optimizer, by a group. For `cf.adapt`, or by
    itself. Raises InputError for an option out of range. Source: You et al. 2019, 1904.00962, with bias correction, phi the identity.
    """

    def __init__(
        self, params: Any, lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6,
        weight_decay: float = 0.01, *, maximize: bool = False,
    ) -> None:  # fmt: skip
        _check(lr, betas, weight_decay, "1e-3", "(0.9, 0.999)")
        if not eps >= 0.0:
            raise InputError(f"eps={eps!r} may make a denominator 0. Try: eps=1e-6")
        super().__init__(params, dict(lr=lr, betas=tuple(betas), eps=eps, weight_decay=weight_decay, maximize=maximize))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update, in place; a parameter without a gradient stays."""
        loss = _loss(closure)
        for group in self.param_groups:
            for p, state in _with_gradients(self, group, ("exp_avg", "exp_avg_sq")):
                direction, squares = lamb_direction_.kernel(
                    p, p.grad, state["exp_avg"], state["exp_avg_sq"], state["step"], *map(float, group["betas"]), group["eps"],
                    group["weight_decay"], group["maximize"],
                )  # fmt: skip
                rate = torch.as_tensor(group["lr"], dtype=torch.float64, device=p.device) * trust_ratios([squares])[0]
                sgd_.kernel(p, direction, None, state["step"], rate, 0.0, 0.0, 0.0, False)
        return loss


def _with_gradients(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    """(parameter, state) of those with a gradient, with their updates counted."""
    for p in group["params"]:
        if p.grad is None:
            continue
        if p.grad.is_sparse:
            what = f"the gradient of a parameter of shape {tuple(p.shape)}"
            raise InputError(f"{type(optimizer).__name__}: {what} is sparse. Try: sparse=False in its layer")
        state = optimizer.state[p]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state |= {key: torch.zeros_like(p) for key in keys}
        state["step"] += 1
        yield p, state


# ---- for cf.adapt ----

Tensors = dict[str, Tensor]
Options = Mapping[str, Mapping[str, Any]]  # name of a parameter -> its options
Update = Callable[
    [Tensors, Mapping[str, Tensors], Tensors, Tensor, Mapping[str, Tensor], Options, Tensor | None], tuple[Tensors, dict[str, Tensors]]
]


@attrs.frozen
class Own:
    """What `adapt` has to know of a class here. `states`: keys of the state, which have the parameter's shape.

    update(grads, state, params, step, rates, options, finite) -> (params, state), pure. All but step and finite are by name, the state by
    key and name.
    """

    states: tuple[str, ...]
    update: Update


def _lion(
    grads: Tensors, state: Mapping[str, Tensors], params: Tensors, step: Tensor, rates: Mapping[str, Tensor], options: Options,
    finite: Tensor | None,
) -> tuple[Tensors, dict[str, Tensors]]:  # fmt: skip
    new: Tensors = {}
    means: Tensors = {}
    for n, p in params.items():
        o = options[n]
        betas = map(float, o["betas"])
        new[n], means[n] = lion(p, grads[n], state["exp_avg"][n], rates[n], *betas, o["weight_decay"], o["maximize"], finite)
    return new, {"exp_avg": means}


def _lamb(
    grads: Tensors, state: Mapping[str, Tensors], params: Tensors, step: Tensor, rates: Mapping[str, Tensor], options: Options,
    finite: Tensor | None,
) -> tuple[Tensors, dict[str, Tensors]]:  # fmt: skip
    means: Tensors = {}
    uncentered: Tensors = {}
    directions: Tensors = {}
    squares: Tensors = {}
    for n, p in params.items():
        o = options[n]
        directions[n], squares[n], means[n], uncentered[n] = lamb_direction(
            p, grads[n], state["exp_avg"][n], state["exp_avg_sq"][n], step, *map(float, o["betas"]), o["eps"], o["weight_decay"],
            o["maximize"], finite,
        )  # fmt: skip
    ratios = trust_ratios(list(squares.values()))
    new: Tensors = {}
    for (n, p), ratio in zip(params.items(), ratios.unbind(), strict=True):
        new[n], _ = sgd(p, directions[n], None, step, rates[n] * ratio, 0.0, 0.0, 0.0, False, False, finite)
    return new, {"exp_avg": means, "exp_avg_sq": uncentered}


OWN: Mapping[type[torch.optim.Optimizer], Own] = {
    Lion: Own(("exp_avg",), _lion),
    LAMB: Own(("exp_avg", "exp_avg_sq"), _lamb),
}
