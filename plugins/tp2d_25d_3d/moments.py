"""Optimizer state lies as the parameter that it belongs to: same shape, and the name ends alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def moments(program: Any) -> Iterator[tuple[Any, int]]:
    """(value, id of the weight that it belongs to) of every state leaf that has dims."""
    weights = [program.values[id] for id in program.inputs if program.values[id].role == "param"]
    for id in program.inputs:
        value = program.values[id]
        if value.role != "state" or not value.shape:
            continue
        alike = [w for w in weights if w.shape == value.shape]
        best = max(alike, key=lambda w: _common(w.name, value.name), default=None)
        if best is not None and _common(best.name, value.name):
            yield value, best.id


def _common(a: str, b: str) -> int:
    """How many of the last parts of two dotted names agree."""
    n = 0
    for x, y in zip(reversed(a.split(".")), reversed(b.split("."))):
        if x != y:
            break
        n += 1
    return n
