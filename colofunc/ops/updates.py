"""Which operators update a parameter and its state, by what their definitions say.

    gradient_at("colofunc.adamw")          # 1: param is argument 0
    is_in_place_update("colofunc.adamw_")  # True

Whatever `define_update` has defined by then is found.
"""

from __future__ import annotations

from colofunc.ops.define import OPERATORS
from colofunc.ops.update import adamw as adamw  # the modules that define them
from colofunc.ops.update_lamb import lamb_direction as lamb_direction
from colofunc.ops.update_lion import lion as lion
from colofunc.ops.update_packed import adamw8 as adamw8
from colofunc.ops.update_rounded import adamw_rounded as adamw_rounded
from colofunc.ops.update_rules import update as update


def gradient_at(target: str) -> int | None:
    """Of a functional update, which argument is the gradient; None for all else."""
    operator = OPERATORS.get(target)
    return None if operator is None or operator.op._schema.is_mutable else operator.gradient_at


def is_update(target: str) -> bool:
    """Whether an operator is a functional update."""
    return gradient_at(target) is not None


def is_in_place_update(target: str) -> bool:
    """Whether an operator is an update that writes over the parameter and its state."""
    operator = OPERATORS.get(target)
    return operator is not None and operator.gradient_at is not None and operator.op._schema.is_mutable


def updates() -> tuple[str, ...]:
    """The functional updates that are defined by now."""
    return tuple(name for name in OPERATORS if is_update(name))
