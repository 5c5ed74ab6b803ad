"""Gradients, and the operators of the update that work on one of them.

Problem: a parameter's update is pinned by where its state lies, and a gradient passes through others before (clipping,
the squares of its norm, a loss scale). Left free, they may ask for other layouts, and the gradient travels twice. Idea:
follow a gradient from where it is made, through elementwise operators that keep its shape.

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
    """(index of a node of the update, the gradient that it works on) for these gradients, in the order of the program.

    Plans ask for one parameter at a time, so only what reads a gradient is visited, and what reads that.
    """
    gradient_of = {grad.id: grad for grad in grads}  # value -> the gradient that it was made of
    readers = _elementwise_readers(program)
    ahead = list[int]()
    for id in gradient_of:
        ahead += readers.get(id, ())
    heapify(ahead)
    last = -1
    while ahead:
        index = heappop(ahead)
        if index == last:  # it reads several
            continue
        last, node = index, program.nodes[index]
        (out,) = node.results
        read = {}
        for ref in node.refs:
            grad = gradient_of.get(ref)
            if grad is not None and grad.shape == program.values[out].shape:
                read[grad.id] = grad
        if len(read) == 1:
            (grad,) = read.values()
            gradient_of[out] = grad
            yield index, grad
            for reader in readers.get(out, ()):
                heappush(ahead, reader)


@computed_once
def _elementwise_readers(program: Program) -> Mapping[int, list[int]]:
    """Value -> indices of the elementwise operators of the update that read it."""
    readers: dict[int, list[int]] = {}
    for index, node in enumerate(program.nodes):
        if node.phase == "update" and len(node.outs) == 1 == len(node.results) and is_pointwise(node.target):
            for id in dict.fromkeys(node.refs):
                readers.setdefault(id, []).append(index)
    return readers
