"""As a program: a step on one device with what transforms do to its traced program.

Problem: a transform that rewrites the traced program may change numbers, and what a step is compared with has to have the same. Idea: the
function on one device, which nobody traces, is run as the program of a mesh of one: the same trace, with the same rewriting.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from colofunc.compiler.staged import Staged
from colofunc.compiler.step_compiler import StepCompiler
from colofunc.compiler.transform import Build, Transform
from colofunc.dtensor.tensor import DTensor
from colofunc.program.tracing.meta import active
from colofunc.program.tracing.tree import map_tensors


def as_program(build: Build) -> Build:
    """A build whose function, where it is not traced, runs rewritten by all transforms of the chain. For `wrap`, as the last thing."""
    fn = build.fn
    rewriting = tuple(
        Transform(each.name, each.options, rewrite_global=each.rewrite_global, behind=each.behind)
        for each in build.transforms
        if each.rewrite_global is not None
    )
    alone = Staged(fn, rewriting, StepCompiler(), executor="simulated")

    @wraps(fn)
    def stepped(*args: Any) -> Any:
        if active() is not None:
            return fn(*args)  # the trace, which is rewritten
        return map_tensors(_plain, alone(*args))

    return build.evolve(fn=stepped)


def hook_behind(before: Callable[[Build], Build] | None, hook: Callable[[Build], Build]) -> Callable[[Build], Build]:
    """A hook of a transform behind the one that it has."""

    def both(build: Build) -> Build:
        return hook(build if before is None else before(build))

    return both


def _plain(x: torch.Tensor) -> torch.Tensor:
    return x.full() if isinstance(x, DTensor) else x
