"""Parameters that are gathered in 8 bits: the transform of `cf.quantize(gathers=...)`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from colofunc.compiler.transform import Build, Transform
from colofunc.errors import InputError, near
from colofunc.mesh.sizes import size_text
from colofunc.ops.saved_activations import NUMBERS, WIDEN
from colofunc.program.ir import Program
from colofunc.program.passes.packed_gathers import gathered_packed
from colofunc.program.passes.rounded_parameters import gathered_bytes, read_rounded, rounded_in_front

GATHERS = "quantize_gathers"


def rounded_parameters(form: Any) -> Transform:
    """Forward and backward read large parameters in a form. Raises InputError where there is no such form."""
    if not isinstance(form, str) or form not in NUMBERS:
        said = f"cf.quantize(gathers={form!r}): parameters are gathered in {' or '.join(map(repr, NUMBERS))}, or as they are"
        raise InputError(f"{said}{near(form, NUMBERS, 'forms') if isinstance(form, str) else ''}")
    return Transform(
        GATHERS,
        {"form": form},
        rewrite_global=partial(_rounded, NUMBERS[form]),
        rewrite_local=_gathered,
        changes_numbers=True,
        says=partial(_said, form),
    )


def _rounded(numbers: torch.dtype, build: Build) -> Build:
    return build.evolve(program=read_rounded(build.program, numbers))


def _gathered(build: Build) -> Build:
    """Wherever a plan gathers, one tensor in place of two, numbers and scales are gathered all the same."""
    return build.evolve(program=rounded_in_front(gathered_packed(build.program, (WIDEN,), is_shared=True)))


def _said(form: str, program: Program, local: Program) -> tuple[str, ...]:
    narrow, wide = gathered_bytes(local)
    if not narrow:
        return (f"parameters in {form} where they are read: none is gathered so, and gathers= only rounds them",)
    return (
        f"parameters are gathered in {form}: {size_text(narrow)} a step of each rank, {size_text(wide)} as they are "
        "kept",
    )
