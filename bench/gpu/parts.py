"""Slices and parts: what is measured, and what it needs."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from bench import Row
from bench.gpu.sizes import Sizes
from colofunc.ops import native

Need = Callable[[], str]
"""Empty, or why something is not here."""


@attrs.frozen
class Setup:
    """Where parts run: how large, and what they must do without.

    `lacks`: need -> why it is not here. `done`: parts of the slice that have rows. `notes`: what parts of one process
    keep for those behind them.
    """

    sizes: Sizes
    lacks: Mapping[str, str]
    done: Mapping[str, list[Row]] = attrs.field(factory=dict)
    notes: dict[str, Any] = attrs.field(factory=dict)

    def without(self, *needs: str) -> str:
        """Why one of these is not here; empty where all are."""
        return next((self.lacks[need] for need in needs if need in self.lacks), "")


@attrs.frozen
class Part:
    """A few rows that are measured in one go. `needs`: without them none of its rows can be."""

    name: str
    measure: Callable[[Setup], list[Row]]
    needs: tuple[str, ...] = ()


@attrs.frozen
class Slice:
    """Parts about one question, some minutes in all."""

    number: int
    title: str
    parts: tuple[Part, ...]


def not_run(what: str, why: str) -> Row:
    """The row of something that cannot be measured here."""
    return Row(what, f"not run: {why}")


def failed(what: str, error: BaseException | str) -> Row:
    """The row of something that should have run."""
    said = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return Row(what, f"failed: {said[:300]}", "it runs", False)


def at_most(what: str, found: float, limit: float, text: str) -> Row:
    return Row(what, text, f"at most {limit:g}", found <= limit)


def at_least(what: str, found: float, limit: float, text: str) -> Row:
    return Row(what, text, f"at least {limit:g}", found >= limit)


def lacks_here() -> dict[str, str]:
    """What this machine has not of what parts need."""
    needs: dict[str, Need] = {
        "a card": lambda: "" if torch.cuda.is_available() else "there is no usable GPU",
        "compute-sanitizer": lambda: "" if shutil.which("compute-sanitizer") else "compute-sanitizer is not on the path",
        "CUPTI": _no_cupti,
        "CUDA kernels": lambda: "" if native.ready("cuda") else "the kernels in CUDA could not be compiled, or are switched off",
        "inductor": lambda: _module("triton"),
        "nccl": lambda: "" if torch.distributed.is_available() and torch.distributed.is_nccl_available() else "this torch has no NCCL",
        "grouped_mm": lambda: "" if hasattr(torch.nn.functional, "grouped_mm") else "this torch has no F.grouped_mm",
        **{name: (lambda name=name: _module(name)) for name in ("pytest", "transformers", "timm")},
    }
    return {need: why for need, ask in needs.items() if (why := ask())}


def _no_cupti() -> str:
    found = torch.profiler.ProfilerActivity.CUDA in torch.profiler.supported_activities()
    return "" if found else "torch's profiler does not see the card here"


def _module(name: str) -> str:
    return "" if importlib.util.find_spec(name) is not None else f"{name} is not installed"
