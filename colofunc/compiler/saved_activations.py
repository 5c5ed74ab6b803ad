"""A transform that keeps activations in 8 bits for backward, with whatever else it does.

The traced program is rewritten (`program/passes/saved_activations.py`), of which the function on one device makes one,
too.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import attrs
import torch

from colofunc.compiler.transform import Build, Transform, behind_hook
from colofunc.errors import InputError, near
from colofunc.mesh.sizes import size_text
from colofunc.ops.saved_activations import LEAST_ELEMENTS, NUMBERS
from colofunc.program.ir import Program
from colofunc.program.passes.saved_activations import bytes_kept, save_packed


def checked_form(form: Any) -> str | None:
    """The name of a form of saved activations, None where they stay as they are.

    Raises InputError where there is no such form.
    """
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
        rewrite_global=behind_hook(transform.rewrite_global, partial(_rewritten, NUMBERS[form])),
        changes_numbers=True,
        says=partial(_said, form),
    )


def _rewritten(numbers: torch.dtype, build: Build) -> Build:
    return build.evolve(program=save_packed(build.program, numbers))


def _said(form: str, program: Program, local: Program) -> tuple[str, ...]:
    count, packed_bytes, wide_bytes = bytes_kept(program)
    if not count:
        return (
            f"activations for backward in {form}: none, as nothing of at least {LEAST_ELEMENTS} numbers in rows is "
            "kept",
        )
    return (
        f"activations for backward in {form}: {count} values, {size_text(packed_bytes)} of {size_text(wide_bytes)} of "
        "the whole batch",
    )
