"""Gradients: which operators of the update work on a gradient element by element.

Problem: a parameter's update is pinned by where its state lies, and a gradient passes through others before (clipping, the
squares of its norm, a loss scale). Left free, they may ask for other layouts, and the gradient travels twice. Idea: follow a
gradient from where it is made, through elementwise operators that keep its shape.

    grad.w -> mul(g, g)          squares of the norm: here, and no further, its sum has another shape
           -> mul(g, factor)     what the update reads
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from colofunc.program.facts import is_pointwise
from colofunc.program.ir import Program, Value


def worked_on(program: Program, meets: Callable[[str], bool]) -> Iterator[tuple[int, Value]]:
    """(index of a node of the update, the gradient that it works on) for gradients whose name meets a test."""
    from_: dict[int, Value] = {v.id: v for v in program.values.values() if v.role == "grad" and meets(v.name)}
    for index, node in enumerate(program.nodes):
        if node.phase != "update" or len(node.outs) != 1 or node.outs[0] is None or not is_pointwise(node.target):
            continue
        out = program.values[node.outs[0]]
        grads = {from_[i].id: from_[i] for i in node.refs if i in from_ and from_[i].shape == out.shape}
        if len(grads) == 1:
            (grad,) = grads.values()
            from_[out.id] = grad
            yield index, grad
