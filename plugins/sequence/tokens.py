"""Attention that is written out, and where tokens come from that no leaf of the batch has: patches of an image, frames of a sound.

    x (b, c, h, w)  ->  conv (b, d, h', w')  ->  view (b, d, s)  ->  ...  ->  q (b, heads, s, e)

Walked backwards from q: whoever can give its result split as its reader wants it passes the wish on to what it reads. Where that
ends tokens arise, and are split.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import colofunc as cf

PRODUCTS = ("aten.bmm.default", "aten.baddbmm.default")


def written_out(program: Any) -> Iterator[Any]:
    """Softmaxes over the last dim of scores (..., s, t): of what a product of two activations gives, scaled, capped, masked."""
    made = program.producers()
    for node in program.nodes:
        if node.phase == "forward" and node.target == "aten._softmax.default":
            shape = program.values[node.refs[0]].shape
            if len(shape) > 2 and node.args[1] in (-1, len(shape) - 1) and _is_product(program, made, node.refs[0]):
                yield node


def _is_product(program: Any, made: Mapping[int, Any], id: int) -> bool:
    """Whether a value is one, but for operators that keep its size."""
    size, todo, seen = prod(program.values[id].shape), [id], set[int]()
    while todo:
        node = made.get(id := todo.pop())
        if node is not None and id not in seen:
            if node.target in PRODUCTS:
                return True
            todo += [r for r in node.refs if prod(program.values[r].shape) == size]
        seen.add(id)
    return False


def origins(program: Any, rules: cf.Rules, wanted: Mapping[int, cf.Layout]) -> dict[int, cf.Layout]:
    """Value -> how it lies, of the first values that have the tokens that are wanted split (value -> layout)."""
    made, todo = program.producers(), list(wanted.items())
    found: dict[int, cf.Layout] = {}
    seen: set[int] = set()
    while todo:
        id, layout = todo.pop()
        if id in seen:
            continue
        seen.add(id)
        node = made.get(id)
        if program.values[id].role in ("param", "frozen") or (node is not None and not node.refs):
            continue  # a table of positions: it is taken as its reader wants it
        way = None if node is None else rules.give(node, node.outs.index(id), layout)
        before = [] if way is None else [(r, lies) for r, lies in zip(node.refs, way.ins, strict=True) if not lies.is_replicated]
        tokens = [r for r, _ in before if program.values[r].role not in ("param", "frozen")]
        todo += before
        if not tokens:
            found[id] = layout
    return found
