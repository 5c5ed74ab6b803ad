"""Reading a traced program: what a named plan wants to know of a step before it wishes.

    cf.reading.rows(program, 4, name)               the leaves of the batch that have its rows, which 4 ranks divide
    cf.reading.moments(program)                     state leaf -> the parameter that it belongs to
    cf.reading.origins(program, rules, wanted)      where values arise that are to lie so
    cf.reading.written_attention(program)           softmaxes of scores, where a model does not call attention as one

A model may make its tokens itself, as a vision transformer does of patches; `origins` walks back to where:

    x (b, c, h, w)  ->  conv (b, d, h', w')  ->  view (b, d, s)  ->  ...  ->  q (b, heads, s, e)

What operators can do is asked of `cf.Rules`, where a layout goes of `cf.follow`, products of `cf.products`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from colofunc.dtensor.layout import Layout
from colofunc.errors import PlanError
from colofunc.planner.follow import Rules
from colofunc.program.ir import Node, Program, Value

__all__ = ["moments", "origins", "rows", "written_attention"]


def rows(program: Program, ranks: int, name: str) -> list[Value]:
    """The leaves of the batch with as many rows (dim 0) as most of them.

    Raises PlanError, in the name of a plan, where there is no batch or `ranks` do not divide the rows.
    """
    leaves = [program.values[i] for i in program.inputs if program.values[i].role == "batch" and program.values[i].shape]
    if not leaves:
        raise PlanError(f"{name} splits the batch, and this step has no batch: no argument behind the state has a tensor")
    sizes = [v.shape[0] for v in leaves]
    most = max(sizes, key=sizes.count)
    if most % ranks:
        raise PlanError(
            f"{name}: the {most} rows of the batch ({leaves[0].name!r}) do not divide over {ranks} ranks; "
            "take a multiple of these (cf.pad adds rows without weight)"
        )
    return [v for v in leaves if v.shape[0] == most]


def moments(program: Program) -> dict[int, int]:
    """State leaf with dims -> the parameter of its shape whose name has most of the last parts in common with its own."""
    weights = [program.values[id] for id in program.inputs if program.values[id].role == "param"]
    found = {}
    for id in program.inputs:
        value = program.values[id]
        alike = [w for w in weights if w.shape == value.shape] if value.role == "state" and value.shape else []
        best = max(alike, key=lambda w: _common(w.name, value.name), default=None)
        if best is not None and _common(best.name, value.name):
            found[id] = best.id
    return found


def _common(a: str, b: str) -> int:
    """How many of the last parts of two dotted names agree."""
    n = 0
    for x, y in zip(reversed(a.split(".")), reversed(b.split(".")), strict=False):
        if x != y:
            break
        n += 1
    return n


def origins(program: Program, rules: Rules, wanted: Mapping[int, Layout]) -> dict[int, Layout]:
    """Value -> how it lies, of the first values from which those that are wanted (value -> layout) come to lie so.

    Walked backwards: whoever can give its result as its reader wants it passes the wish on to what it reads. Where that ends,
    a factor arises. A seed for `cf.Wish(values=...)`.
    """
    made, todo = program.producers(), list(wanted.items())
    found: dict[int, Layout] = {}
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
        before = []
        if node is not None and way is not None:
            before = [(r, lies) for r, lies in zip(node.refs, way.ins, strict=True) if not lies.is_replicated]
        todo += before
        if all(program.values[r].role in ("param", "frozen") for r, _ in before):
            found[id] = layout
    return found


_PRODUCTS = ("aten.bmm.default", "aten.baddbmm.default")


def written_attention(program: Program) -> Iterator[Node]:
    """Attention that is written out: softmaxes over the last dim of scores (..., s, t), which a product of two activations
    gives, scaled, capped, masked as they may be."""
    made = program.producers()
    for node in program.nodes:
        if node.phase == "forward" and node.target == "aten._softmax.default":
            shape = program.values[node.refs[0]].shape
            if len(shape) > 2 and node.args[1] in (-1, len(shape) - 1) and _is_product(program, made, node.refs[0]):
                yield node


def _is_product(program: Program, made: Mapping[int, Node], id: int) -> bool:
    """Whether a value is one, but for operators that keep its size."""
    size, todo, seen = prod(program.values[id].shape), [id], set[int]()
    while todo:
        node = made.get(id := todo.pop())
        if node is not None and id not in seen:
            if node.target in _PRODUCTS:
                return True
            todo += [r for r in node.refs if prod(program.values[r].shape) == size]
        seen.add(id)
    return False
