"""What benches of whole training steps share: our step as a thunk that returns its loss, and the peak of a warm one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import colofunc as cf
from bench import forget_peak, peak_rss_bytes, rss_bytes

Step = Callable[[], float]


def ours(module: torch.nn.Module, data: dict[str, torch.Tensor], place: Callable[[Any], Any]) -> Step:
    """A training step of `module` with AdamW, as `place` stages it; each call is one step and gives its loss."""
    step_fn, state = cf.train_step(cf.functional(module), cf.adapt(torch.optim.AdamW, lr=1e-4))
    staged = place(step_fn)
    held: dict[str, Any] = {"state": staged.init(state, data)}

    def step() -> float:
        held["state"], metrics = staged(held["state"], data)
        return float(metrics["loss"])

    return step


def peak_bytes(make_module: Callable[[], torch.nn.Module], make_step: Callable[[torch.nn.Module], Step], own_copy: bool) -> int:
    """Peak resident bytes of a warm step above those of the imports, in this (fresh) process.

    own_copy: the step's state is a copy of the module's parameters, which are let go; else the module is the only one.
    """
    before = rss_bytes()
    torch.manual_seed(0)
    module = make_module()
    step = make_step(module)
    if own_copy:
        for p in module.parameters():
            p.data = torch.empty(0)
    step()
    forget_peak()
    step()
    return peak_rss_bytes() - before
