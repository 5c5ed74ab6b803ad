"""What the plans of one axis and of grids share: parts of fused weights, and experts, each of which is a pair of products."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import colofunc as cf

EXPERTS = ("colofunc.experts", "colofunc.experts_backward")
STRIPES = (1, 2, 3)
"""Into how many parts a fused weight may be cut (query, key, value: 3), each of which is split over the axis."""


def group(axes: str, name: str, stripes: int = 1) -> str:
    """One dim of a spec: the axes on a factor, in so many stripes."""
    return f"({stripes} {axes} {name})" if stripes > 1 else f"({axes} {name})"


def hidden(program: Any, rules: cf.Rules, axis: str) -> Iterator[tuple[int, str, dict[int, cf.Layout]]]:
    """(node, module path, weight -> how it lies) of every layer of experts that is split by hidden units: a column and row pair in each."""
    made = program.producers()
    for index, node in enumerate(program.nodes):
        way = rules.place(node, "f", axis) if node.target == EXPERTS[0] else None
        if way is not None:
            leaves = ((cf.products.leaf_of(program, made, ref)[0], lies) for ref, lies in zip(node.refs[3:], way.ins[3:], strict=True))
            yield index, node.path, {id: lies for id, lies in leaves if id is not None and lies is not None}


def routers(program: Any, every: Collection[int]) -> set[int]:
    """Of products (node indices) those whose result says which experts a token goes to: first met from a layer's choice and weights."""
    at = {node.outs[0]: index for index, node in enumerate(program.nodes) if index in every}
    made, found, seen = program.producers(), set[int](), set[int]()
    todo = [ref for node in program.nodes if node.target == EXPERTS[0] for ref in node.refs[1:3]]
    while todo:
        id = todo.pop()
        if id in at:
            found.add(at[id])
        elif id in made and id not in seen:
            todo += made[id].refs
        seen.add(id)
    return found
