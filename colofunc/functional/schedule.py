"""torch's learning-rate schedulers as a function of the step.

Problem: a scheduler is host code that writes to `param_groups` after every step, which a trace runs once. Idea: run it
on the host beforehand, over an optimizer of one number, and keep what it did as a table; the rate of an update is the
table's entry at the number of updates done, which is in the optimizer's state and so is saved and resumed with it.

    lr = schedule(lambda opt: CosineAnnealingLR(opt, 1000), lr=3e-4, steps=1000)
    opt = adapt(torch.optim.AdamW, lr=lr)                          # after `steps` updates the last rate holds
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from colofunc.errors import InputError

Factory = Callable[[torch.optim.Optimizer], Any]


@attrs.frozen(eq=False)
class RateTable:
    """Rates by number of updates done, float64; calling it is a gather, so it traces."""

    rates: Tensor  # (steps,)

    def __call__(self, step: Tensor) -> Tensor:
        index = step.to(torch.int64).clamp(0, self.rates.shape[0] - 1)
        return self.rates.index_select(0, index.reshape(1)).reshape(())


def schedule(factory: Factory, lr: float = 1.0, *, steps: int) -> RateTable:
    """The rates that the scheduler `factory(optimizer)` gives `steps` updates, starting from `lr`.

    Pass it as `lr` of `adapt`, or of a group. Raises InputError for a scheduler that asks for a metric
    (ReduceLROnPlateau), that ends before `steps`, or that changes momenta, which are constants of a step.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise InputError(f"schedule: steps={steps!r} is no positive number of updates")
    number = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([number], lr=lr)
    scheduler = _made(factory, optimizer)
    rates: list[float] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deprecated arguments; the order of calls is right here
        for done in range(steps):
            rates.append(float(optimizer.param_groups[0]["lr"]))
            optimizer.step()
            if done + 1 < steps:
                _advance(scheduler, done)
    return RateTable(torch.tensor(rates, dtype=torch.float64))


def _made(factory: Factory, optimizer: torch.optim.Optimizer) -> Any:
    try:
        scheduler = factory(optimizer)
    except (TypeError, ValueError) as error:
        raise InputError(f"schedule: the factory cannot be called with an optimizer: {error}") from error
    if optimizer.param_groups[0]["momentum"] != 0:
        raise InputError(
            "schedule: the scheduler changes momenta, which are constants of a step. Try: cycle_momentum=False"
        )
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise InputError(
            "schedule: ReduceLROnPlateau decides on a metric of the host, which no table knows. Try: pass the rate to "
            "the step as a float argument and to opt.update(..., lr=rate), which needs no retrace"
        )
    if not isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
        raise InputError(
            f"schedule: the factory returned {type(scheduler).__name__}. Try: lambda opt: CosineAnnealingLR(opt, 100)"
        )
    return scheduler


def _advance(scheduler: Any, done: int) -> None:
    try:
        scheduler.step()
    except (ValueError, IndexError) as error:
        raise InputError(
            f"schedule: {type(scheduler).__name__} ends after {done + 1} updates ({error}). Try: steps={done + 1}"
        ) from error
