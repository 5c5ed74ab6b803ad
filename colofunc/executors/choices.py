"""Which kernel a node gets, while its line is written: for the device that runs it, and where its rank stands.

Problem: what a plan counts is for the machine that it was made for; a step may run elsewhere, and a guard may ask where
a rank's rows stand. Idea: the table of kernels travels with the program, and each line of the source asks it once.

    chosen = choices.of(node, lane)       # None: the operator's own implementation
    chosen.kernel.fn(*chosen.arguments)

On the CPU there is nothing to choose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import attrs
import torch

from colofunc.mesh.detection import found_topology
from colofunc.ops.built_in import CUDA_KERNELS
from colofunc.ops.kernels import Kernel, Rates, bound, capability_at, choose, signature, table_of
from colofunc.program.ir import Node, Program, Ref, Value
from colofunc.program.passes.kernels import call_of_node, rates_of
from colofunc.program.positions import Positions

BUILT_IN = table_of(CUDA_KERNELS)


@attrs.frozen(eq=False)
class ChosenKernel:
    """`arguments`: all of the operator, by position; tensors of the host in place of what the kernel reads there."""

    kernel: Kernel
    arguments: tuple[Any, ...]


class Choices:
    """The kernels of one program on one device."""

    def __init__(self, program: Program, device: torch.device, place: Callable[[Sequence[str], int], int]) -> None:
        """`program`: as it was before operators between attention were compiled to functions that nobody looks into."""
        self._table = BUILT_IN if program.kernels is None else program.kernels
        self._program, self._device, self._place = program, device, place
        self._loops: list[Node] = []  # around the line that is written
        self._known: dict[tuple[int, ...], Positions] = {}  # lane and loops -> what the host knows there

    def enter(self, node: Node) -> None:
        """The lines that follow are in the body of a loop."""
        self._loops.append(node)

    def leave(self) -> None:
        self._loops.pop()

    def of(self, node: Node, values: Mapping[int, Value], lane: int) -> ChosenKernel | None:
        """The kernel of a node; None: the operator's own implementation."""
        candidates = self._table.get((node.target, self._device.type), ())
        if not candidates or any(values[ref].tier != "device" for ref in node.refs):
            return None
        known = self._positions(lane)
        call = call_of_node(node, values, known, capability_at(self._device))
        kernel = choose(candidates, call, _rates(self._device))
        if kernel is None:
            return None
        every = zip(signature(node.target), bound(node.target, node.args, dict(node.kwargs)), strict=True)
        return ChosenKernel(
            kernel, tuple(_argument(arg, known if name in kernel.on_host else None) for (name, _), arg in every)
        )

    def _positions(self, lane: int) -> Positions:
        key = (lane, *(id(node) for node in self._loops))
        if key not in self._known:
            found = Positions(self._program, lambda axes: self._place(axes, lane))
            for node in self._loops:
                found = found.inside(_same(node, found.program))
            self._known[key] = found
        return self._known[key]


@cache
def _rates(device: torch.device) -> Rates | None:
    """What the device that runs the step can do; None where there is none to ask."""
    return rates_of(found_topology(1, 1, device)) if device.type == "cuda" and torch.cuda.is_available() else None


def _same(loop: Node, program: Program) -> Node:
    """A loop as it was before its body was compiled."""
    return next(node for node in program.nodes if node.loop is not None and node.outs == loop.outs)


def _argument(arg: Any, known: Positions | None) -> Any:
    if isinstance(arg, list):  # a default of the schema
        return tuple(arg)
    if type(arg) is Ref and known is not None and known.run(arg.id) is not None:
        return known.tensor(arg.id)
    return arg
