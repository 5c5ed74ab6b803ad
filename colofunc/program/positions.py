"""Positions that the host knows: integers that follow from constants and from where a rank stands.

Problem: attention on a part of a sequence reads where its rows stand from a tensor on the device. A host that looked at
it would wait until the device has come there. Idea: a few operators make such a tensor from `axis_index` and constants,
so the host can compute it too, when the program is written.

    known = Positions(program, lambda axes: mesh.index(rank, axes))
    known.run(id)            # (first, step) of an offset, or of the positions of a stripe; None: only the device knows
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import attrs
import torch

from colofunc import compat
from colofunc.ops.kernels import HostRange, run_of
from colofunc.ops.targets import overload, resolve
from colofunc.program.facts import kind_of, takes_device, written
from colofunc.program.ir import Node, Program, map_refs

INTEGERS = (torch.int64, torch.int32, torch.bool)
MAX_ELEMENTS = 1 << 21  # of a tensor that is made on the host
PositionOf = Callable[[Sequence[str]], int | None]


@attrs.define(eq=False)
class Positions:
    """`place(axes)`: the index of a rank along axes; None where it is no rank's alone (the trip of a loop).

    `given`: of the body of a loop, what the inputs are outside of it.
    """

    program: Program
    place: PositionOf
    given: Mapping[int, torch.Tensor | None] = attrs.field(factory=dict)
    _known: dict[int, torch.Tensor | None] = attrs.field(factory=dict, init=False)

    def run(self, id: int) -> HostRange | None:
        """The value as a run of integers; None where the host does not know it, or it is no run."""
        value = self.program.values.get(id)
        if value is None or value.dtype != torch.int64 or len(value.shape) > 1:
            return None
        tensor = self.tensor(id)
        return None if tensor is None else run_of(tensor)

    def tensor(self, id: int) -> torch.Tensor | None:
        """The value on the host; None where the host does not know it."""
        if id not in self._known:
            self._known[id] = self._make(id)
        return self._known[id]

    def inside(self, node: Node) -> Positions:
        """Those of the body of a loop."""
        assert node.loop is not None
        loop = node.loop
        outside = zip(loop.body.inputs, node.refs, strict=True)
        given = {into: self.tensor(i) for into, i in outside}
        return Positions(loop.body, lambda axes: None if loop.axis in axes else self.place(axes), given)

    def _make(self, id: int) -> torch.Tensor | None:
        value = self.program.values[id]
        if value.dtype not in INTEGERS or prod(value.shape) > MAX_ELEMENTS:
            return None
        if id in self.program.constants:
            constant = self.program.constants[id]
            return constant if constant.device.type == "cpu" else None
        if id in self.given:
            return self.given[id]
        node = self.program.makers.get(id)
        if node is None:
            return None
        kind = kind_of(node)
        if kind is not None:
            place = self.place(node.args[0]) if kind[0] == "axis_index" else None
            return None if place is None else torch.tensor(place)
        return self._computed(node)

    def _computed(self, node: Node) -> torch.Tensor | None:
        if not node.target.startswith("aten.") or len(node.outs) != 1 or _random(node.target):
            return None
        operands = {ref: self.tensor(ref) for ref in node.refs}
        if any(x is None for x in operands.values()):
            return None
        # its result is all that counts
        operands.update({id: operands[id].clone() for id in written(node)})  # type: ignore[union-attr]
        keywords: dict[str, Any] = {name: map_refs(arg, operands.__getitem__) for name, arg in node.kwargs}
        if takes_device(node.target):
            keywords["device"] = torch.device("cpu")
        with compat.no_function_modes():
            result = resolve(node.target)(*map_refs(node.args, operands.__getitem__), **keywords)
        return result if isinstance(result, torch.Tensor) else None


def _random(target: str) -> bool:
    return torch.Tag.nondeterministic_seeded in overload(target).tags
