"""A transform that keeps activations in 8 bits for backward, with whatever else it does.

Problem: it changes gradients, so what a step is compared with has to do the same, and what is kept is seen in the traced program only.
Idea: the traced program is rewritten (`program/passes/saved_activations.py`). The function on one device, which nobody traces, is run
as the program of a mesh of one: the same trace, with the same rewriting.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import attrs
import torch

from colofunc.compiler.staged import Staged
from colofunc.compiler.step_compiler import StepCompiler
from colofunc.compiler.transform import Build, Transform
from colofunc.dtensor.tensor import DTensor
from colofunc.errors import InputError, near
from colofunc.mesh.sizes import size_text
from colofunc.ops.saved_activations import NUMBERS
from colofunc.program.ir import Program
from colofunc.program.passes.saved_activations import bytes_kept, save_packed
from colofunc.program.tracing.meta import active
from colofunc.program.tracing.tree import map_tensors


def checked_form(form: Any) -> str | None:
    """The name of a form of saved activations, None where they stay as they are. Raises InputError where there is no such form."""
    if form is None or (isinstance(form, str) and form in NUMBERS):
        return form
    said = f"cf.quantize(activations={form!r}): what backward reads is kept in {' or '.join(map(repr, NUMBERS))}, or as it is"
    raise InputError(f"{said}{near(form, NUMBERS, 'forms') if isinstance(form, str) else ''}")


def with_saved(transform: Transform, form: str | None) -> Transform:
    """The transform, which keeps activations for backward in a form, too; itself where that is None."""
    if form is None:
        return transform
    return attrs.evolve(
        transform,
        options={**transform.options, "activations": form},
        wrap=partial(_wrapped, transform.wrap),
        rewrite_global=partial(_rewritten, transform.rewrite_global, NUMBERS[form]),
        says=partial(_said, form),
    )


def _rewritten(before: Callable[[Build], Build] | None, numbers: torch.dtype, build: Build) -> Build:
    build = build if before is None else before(build)
    return build.evolve(program=save_packed(build.program, numbers))


def _said(form: str, program: Program) -> tuple[str, ...]:
    count, packed_bytes, wide_bytes = bytes_kept(program)
    if not count:
        return (f"activations for backward in {form}: none, as nothing of at least 4096 numbers in rows is kept",)
    return (
        f"activations for backward in {form}: {count} values, {size_text(packed_bytes)} of {size_text(wide_bytes)} of the whole batch",
    )


def _wrapped(before: Callable[[Build], Build] | None, build: Build) -> Build:
    build = build if before is None else before(build)
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


def _plain(x: torch.Tensor) -> torch.Tensor:
    return x.full() if isinstance(x, DTensor) else x
