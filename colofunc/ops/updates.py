"""Which operators update a parameter and its state, by what their definitions say."""

from __future__ import annotations

from collections.abc import Mapping

from colofunc.ops.define import OPERATORS
from colofunc.ops.twins import twin_of
from colofunc.ops.update import adamw as adamw  # the modules that define them
from colofunc.ops.update_lamb import lamb_direction as lamb_direction
from colofunc.ops.update_lion import lion as lion
from colofunc.ops.update_packed import adamw8 as adamw8
from colofunc.ops.update_rounded import adamw_rounded as adamw_rounded
from colofunc.ops.update_rules import update as update

UPDATES: Mapping[str, int] = {
    name: operator.gradient_at
    for name, operator in OPERATORS.items()
    if operator.gradient_at is not None and twin_of(name) is not None
}
"""Functional update -> which argument is the gradient."""
IN_PLACE: frozenset[str] = frozenset(twin.target for twin in map(twin_of, UPDATES) if twin is not None)
"""The same in place."""
