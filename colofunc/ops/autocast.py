"""Autocast for devices that this machine does not have.

Problem: `torch.autocast("cuda", torch.bfloat16)` warns and does nothing where there is no GPU, so a step planned on a
laptop for a cluster would silently be a float32 step. Idea: while a step is traced, an autocast object that torch is
about to switch off becomes one that casts on the CPU, where the tensors of the trace are said to be.

    with honoured_autocast():
        with torch.autocast("cuda", torch.bfloat16):
            x @ w                      # bfloat16, with or without a GPU

Only objects made inside are touched; nothing in torch is replaced.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

_SWITCHED_OFF = "CUDA is not available or torch_xla is imported"


class HonouredAutocast(torch.autocast):
    """An autocast of an absent device: casts on the CPU."""

    def __enter__(self) -> Any:
        self._on_cpu = torch.autocast("cpu", self.fast_dtype)
        return self._on_cpu.__enter__()

    def __exit__(self, *exc: Any) -> Any:
        return self._on_cpu.__exit__(*exc)


@contextmanager
def honoured_autocast() -> Iterator[None]:
    """Inside, `torch.autocast` of an absent device casts on the CPU instead of doing nothing."""
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=_SWITCHED_OFF)
        show = warnings.showwarning

        def shown(message: Any, *args: Any, **kwargs: Any) -> None:
            made = _autocast_being_made() if str(message).startswith(_SWITCHED_OFF) else None
            if made is None:
                show(message, *args, **kwargs)
            else:
                made.__class__ = HonouredAutocast

        warnings.showwarning = shown  # catch_warnings puts the old one back
        yield


def as_traced() -> AbstractContextManager[Any]:
    """Inside, autocast around the caller is off: casts are in the program already."""
    on = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    if not on:
        return _NOTHING
    stack = ExitStack()
    for device in on:
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack


_NOTHING = nullcontext()


def _autocast_being_made() -> torch.autocast | None:
    """The object whose constructor is warning."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        made = frame.f_locals.get("self")
        if frame.f_code.co_name == "__init__" and isinstance(made, torch.autocast):
            return made
        frame = frame.f_back
    return None
