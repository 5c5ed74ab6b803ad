"""How far each output of one call may be from one device's, derived as `low.compare` derives it.

A bound per dtype is false in both directions: half of a small gradient is within 0.02 of nothing, and Adam moves a weight by its
whole rate, this way or that, where only rounding is left of a gradient. See `compiler/tolerance.py`. It costs one more run of the
step on one device (three where there are half precisions), so it is worked out when somebody asks.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import Any

import torch

from colofunc.compiler.lowered import Lowered
from colofunc.compiler.observation import arguments_of
from colofunc.compiler.tolerance import Allowed, Reference
from colofunc.ops.updates import UPDATES
from colofunc.program.ir import Program, Ref


class Bounds:
    """Of the outputs of one call. args: plain values; seed: torch's, with which the call draws its random numbers.

    where: what a name begins with in an error. goes_on: output 0 is the next argument 0, so that it has the names of that.
    """

    def __init__(self, low: Lowered, args: tuple[Any, ...], seed: int, where: str = "", goes_on: bool = False) -> None:
        self._low = low
        self._where = where
        self._goes_on = goes_on
        self._args = args
        self._seed = seed

    def of(self, position: int, expected: torch.Tensor) -> float | torch.Tensor | None:
        """As a share of max(1, max|expected|), or for every element; None where the step has no such output."""
        outputs = self._low.global_program.outputs
        if position >= len(outputs):
            return None
        return self._allowed.of(outputs[position], expected)

    def name(self, position: int) -> str | None:
        """What the plan calls an output: that of a state by the name of the argument that it comes back as."""
        traced = self._low.traced
        if position >= len(traced.out_names):
            return None
        first = traced.in_tree.children[0].children[0]
        if self._goes_on and position < len(first.names()):
            return f"{self._where}{traced.names[position]}"
        return f"{self._where}{traced.out_names[position]}"

    @cached_property
    def _allowed(self) -> Allowed:
        program = self._low.global_program
        torch.manual_seed(self._seed)
        inputs = arguments_of(self._low, self._args).whole()
        asked = Counter({*program.outputs, *_gradients(program)})
        allowed = Allowed(program, inputs, tuple(asked), None)
        reference = Reference(program, inputs, asked, allowed.ran)
        with torch.no_grad():
            for output in program.outputs:
                reference.value(output)
        return allowed


def _gradients(program: Program) -> list[int]:
    """What updates read, whose own bounds say how far the update may be off."""
    found = []
    for node in program.nodes:
        place = UPDATES.get(node.target)
        if place is not None and isinstance(node.args[place], Ref):
            found.append(node.args[place].id)
    return found
