"""Seconds of operators as they were measured, in place of those that rates of the machine give.

Problem: a plan that hides copies beside operators is as good as their times. Idea: the same call takes the same time
wherever it stands, so what was measured is kept by call (operator, shapes and dtypes of operands, other arguments), and
a program that has never run is timed with it. What was not measured takes its modelled time, slower or faster by as
much as all others.

    timed = timings(program, seconds, model)            # seconds[k]: of the k-th node, bodies of loops in their order
    timed.node_s(node, values, model)

Collectives and copies keep their modelled time: what a clock sees of them is how long somebody waited.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import attrs

from colofunc.program.cost import NodeSeconds
from colofunc.program.facts import is_called_with_others, kind_of
from colofunc.program.ir import Node, Program, Value, map_refs

CallKey = tuple[Any, ...]


@attrs.frozen(eq=False)
class Timed:
    """Seconds by call, and how many times longer than modelled they took together."""

    seconds: Mapping[CallKey, float]
    ratio: float

    def node_s(self, node: Node, values: Mapping[int, Value], model: NodeSeconds) -> float:
        """Seconds of a node; of a loop all its trips."""
        if node.loop is not None:
            body = node.loop.body
            return node.loop.trips * sum(self.node_s(inner, body.values, model) for inner in body.nodes)
        if kind_of(node) is not None:
            return model(node, values)
        if is_called_with_others(node):  # what is measured is called by itself
            return model(node, values) * self.ratio
        found = self.seconds.get(call(node, values))
        return model(node, values) * self.ratio if found is None else found


def call(node: Node, values: Mapping[int, Value]) -> CallKey:
    """What one call has in common with all that take as long."""

    def like(i: int) -> tuple[object, ...]:
        return values[i].shape, values[i].dtype, values[i].tier

    return node.target, repr(map_refs((node.args, node.kwargs), like))


def measured_nodes(program: Program) -> Iterator[tuple[Node, Mapping[int, Value]]]:
    """The nodes of a program in the order in which an executor writes them; a loop comes behind its body."""
    for node in program.nodes:
        if node.loop is not None:
            yield from measured_nodes(node.loop.body)
        yield node, program.values


def timings(program: Program, seconds: Sequence[float], model: NodeSeconds) -> Timed:
    """What was measured, of one visit of each of `measured_nodes`.

    Work on the host is left out: it says nothing of the device's.
    """
    found: dict[CallKey, list[float]] = {}
    modelled: dict[CallKey, float] = {}
    for (node, values), took in zip(measured_nodes(program), seconds, strict=True):
        ids = (*node.refs, *node.results)
        if kind_of(node) is None and all(values[id].tier == "device" for id in ids):
            found.setdefault(call(node, values), []).append(took)
            modelled[call(node, values)] = model(node, values)
    known = {key: median(times) for key, times in found.items()}
    whole = sum(modelled[key] * len(found[key]) for key in known)
    return Timed(known, sum(known[key] * len(found[key]) for key in known) / whole if whole else 1.0)
