"""Seconds of attention in the search: those of the kernel that a rank's part of the call would get.

Problem: the clock counts the kernel that a call gets, which is several times slower than the roofline where dropout, a
bias or a window in float32 leaves only slow ones; a search that counts the roofline shares out the wrong work. Idea: a
strategy says how operands lie, so its part of the call can be shown to the kernels as the clock shows them the lowered
one.

    kernel_s = KernelSeconds(program, mesh, registry.kernels, rule_of)
    own_s(program, node, strategy, mesh, kernel_s)

A rank's rows stand last: under a causal mask the last rank has most to do, and the others wait for it. A pattern with
local code of its own (a ring) runs the kernel on blocks, as many as its operations are: it is counted by the rate that
the kernel has on a block of a rank's rows and columns. Launches count once, as those of every operator in the search:
the host runs ahead. Of a call that takes less than a launch on one device the roofline says enough. Everything is
memoised by the call and how its operands lie.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from colofunc.mesh import Mesh
from colofunc.ops.kernels import Kernel, KernelCall, Like, Table, bound, choose, signature
from colofunc.ops.targets import argument_at
from colofunc.program.ir import Node, Program, Ref
from colofunc.program.lower import call_in
from colofunc.program.passes.kernels import capability_on, rates_of
from colofunc.spec.layout import Layout
from colofunc.spec.rule import Call, Rule, Strategy
from colofunc.spec.rules.attention_call import AttentionCall

# Products of backward, a share of those of forward.
BACKWARD = 2.5


@attrs.define(eq=False)
class KernelSeconds:
    """Asked with a node and a strategy; None where the roofline is all that is known."""

    program: Program
    mesh: Mesh
    table: Table
    rule_of: Callable[[Node], Rule | None]
    _known: dict[Any, float | None] = attrs.field(factory=dict, init=False)

    def __call__(self, node: Node, strategy: Strategy) -> float | None:
        candidates = self.table.get((node.target, "cuda")) if node.target in AttentionCall.TARGETS else None
        capability = capability_on(self.mesh.topology)
        if not candidates or capability is None:
            return None
        call, _ = call_in(self.program, node)
        key = (call, strategy.ins, strategy.axes, strategy.cost)
        if key not in self._known:
            self._known[key] = self._seconds(call, self.rule_of(node), strategy, candidates, capability)
        return self._known[key]

    def _seconds(
        self,
        call: Call,
        rule: Rule | None,
        strategy: Strategy,
        candidates: Sequence[Kernel],
        capability: tuple[int, int],
    ) -> float | None:
        if rule is None:
            return None
        whole = _arguments(call, [operand.shape for operand in call.ins])
        arguments = _arguments(call, [layout.local_shape for layout in strategy.ins])
        if arguments["q_offset"] is not None or arguments["k_offset"] is not None or not _has_elements(arguments):
            return None
        launch_s = rates_of(self.mesh.topology).launch_s
        if self._kernel_s(KernelCall(call.target, tuple(whole.items()), capability), candidates) < launch_s:
            return None
        pattern = any(word not in rule.sizes for _, word in strategy.axes)
        arguments.update(_whole_block(arguments) if pattern else _last_rows(call, strategy.ins, arguments))
        shown = KernelCall(call.target, tuple(arguments.items()), capability)
        seconds = self._kernel_s(shown, candidates)
        return launch_s + (seconds * strategy.cost.flops / _flops(shown) if pattern else seconds)

    def _kernel_s(self, call: KernelCall, candidates: Sequence[Kernel]) -> float:
        """Of the kernel that a call gets, without launches; 0 where it gets none."""
        rates = rates_of(self.mesh.topology)
        kernel = choose(candidates, call, rates)
        return 0.0 if kernel is None else kernel.seconds(call, attrs.evolve(rates, launch_s=0.0))


def _arguments(call: Call, shapes: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    """All arguments by name, tensors of such shapes."""

    def like(arg: Any) -> Any:
        return Like(shapes[arg.id], call.ins[arg.id].dtype) if type(arg) is Ref else arg

    names = (name for name, _ in signature(call.target))
    return {name: like(arg) for name, arg in zip(names, bound(call.target, call.args, dict(call.kwargs)), strict=True)}


def _has_elements(arguments: Mapping[str, Any]) -> bool:
    return all(min(arguments[name].shape) > 0 for name in ("q", "k", "v"))


def _whole_block(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A block whose rows see all of its columns but the first row one less: kernels that know no positions are not for
    it.
    """
    if not (arguments["causal"] or arguments["window"]):
        return {}
    return {"causal": True, "window": 0, "q_offset": Like((), torch.int64, (max(0, arguments["k"].shape[2] - 2), 0))}


def _last_rows(call: Call, ins: Sequence[Layout], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Where the rows of the last rank stand, if rows are split and positions count."""
    q = ins[argument_at(call.target, "q")]
    atoms, s = q.dims[2], q.shape[2]
    split = [k for k, (_, axis) in enumerate(atoms) if axis is not None]
    if not split or not (arguments["causal"] or arguments["window"]):
        return {}
    rows = arguments["q"].shape[2]
    if split == list(range(len(split))):  # one run of rows
        return {"q_offset": Like((), torch.int64, (s - rows, 0))}
    step = s // rows
    return {"q_offset": Like((rows,), torch.int64, (step - 1, step))}


def _flops(call: KernelCall) -> float:
    """Of a call without a mask, as rules count them."""
    (b, h, s, e), (t, f) = call["q"].shape, call["v"].shape[2:]
    return 2.0 * b * h * s * t * (e + f) * (BACKWARD if call.target == AttentionCall.BACKWARD else 1.0)
