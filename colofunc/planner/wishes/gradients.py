"""Gradients: which operators of the update work on a gradient element by element.

Problem: a parameter's update is pinned by where its state lies, and a gradient passes through others before (clipping, the
squares of its norm, a loss scale). Left free, they may ask for other layouts, and the gradient travels twice. Idea: follow a
gradient from where it is made, through elementwise operators that keep its shape.

    grad.w -> mul(g, g)          squares of the norm: here, and no further, its sum has another shape
           -> mul(g, factor)     what the update reads
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from heapq import heapify, heappop, heappush

from colofunc.program.facts import is_pointwise
from colofunc.program.ir import Program, Value, computed_once


@computed_once
def gradients(program: Program) -> tuple[Value, ...]:
    """All gradients of a program."""
    return tuple(value for value in program.values.values() if value.role == "grad")


def worked_on(program: Program, grads: Iterable[Value]) -> Iterator[tuple[int, Value]]:
    """(index of a node of the update, the gradient that it works on) for these gradients.

    Plans ask for one parameter at a time, so only what reads a gradient is looked at, and what reads that.
    """
    from_ = {grad.id: grad for grad in grads}
    readers = _elementwise_readers(program)
    ahead = [index for id in from_ for index in readers.get(id, ())]
    heapify(ahead)
    last = -1
    while ahead:
        index = heappop(ahead)
        if index == last:
            continue
        last, node = index, program.nodes[index]
        (out,) = node.results
        read = {from_[i].id: from_[i] for i in node.refs if i in from_ and from_[i].shape == program.values[out].shape}
        if len(read) == 1:
            (grad,) = read.values()
            from_[out] = grad
            yield index, grad
            for reader in readers.get(out, ()):
                heappush(ahead, reader)


@computed_once
def _elementwise_readers(program: Program) -> Mapping[int, list[int]]:
    """Value -> positions of the elementwise operators of the update that read it."""
    found: dict[int, list[int]] = {}
    for index, node in enumerate(program.nodes):
        if node.phase == "update" and len(node.outs) == 1 == len(node.results) and is_pointwise(node.target):
            for id in dict.fromkeys(node.refs):
                found.setdefault(id, []).append(index)
    return found
