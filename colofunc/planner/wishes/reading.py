"""Reading a traced program: what a named plan wants to know of a step before it wishes.

    cf.ext.reading.rows(program, 4, name)               the leaves of the batch that have its rows, which 4 ranks divide
    cf.ext.reading.moments(program)                     state leaf -> the parameter that it belongs to
    cf.ext.reading.with_moments(program, specs)         specs of parameters, and the same for their moments
    cf.ext.reading.origins(program, rules, wanted)      where values arise that are to lie so
    cf.ext.reading.written_attention(program)           softmaxes of scores, where a model does not call attention as one
    cf.ext.reading.experts(program, mesh, "tp", name)   layers of experts, each of which an axis splits as a column and row pair
    cf.ext.reading.routers(program, some)               which of these products say where a token goes
    cf.ext.reading.stored(program, id)                  the leaves that a weight is kept in: itself, or the parts of a quantized one

A model may make its tokens itself, as a vision transformer does of patches; `origins` walks back to where:

    x (b, c, h, w)  ->  conv (b, d, h', w')  ->  view (b, d, s)  ->  ...  ->  q (b, heads, s, e)

What operators can do is asked of `cf.ext.Rules`, where a layout goes of `cf.ext.follow`, products of `cf.ext.products`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from typing import TypeVar

import attrs

from colofunc.errors import PlanError
from colofunc.mesh import Mesh
from colofunc.ops.experts_parts import EXPERTS, EXPERTS_BACKWARD
from colofunc.ops.fp8 import carried
from colofunc.ops.quantized import DEQUANTIZE
from colofunc.ops.saved_activations import WIDEN
from colofunc.ops.targets import keeps_order
from colofunc.ops.torch_facts import BATCHED_PRODUCTS
from colofunc.planner.wishes.products import leaf_of
from colofunc.planner.wishes.propagation import Rules
from colofunc.planner.wishes.wish import Wish
from colofunc.program.ir import Node, Program, Value
from colofunc.spec.layout import Layout

WantT = TypeVar("WantT")

__all__ = ["experts", "moments", "origins", "routers", "rows", "stored", "with_moments", "written_attention"]


def rows(program: Program, ranks: int, name: str) -> list[Value]:
    """The leaves of the batch with as many rows (dim 0) as most of them.

    Raises PlanError, in the name of a plan, where there is no batch or `ranks` do not divide the rows.
    """
    leaves = [
        program.values[i] for i in program.inputs if program.values[i].role == "batch" and program.values[i].shape
    ]
    if not leaves:
        raise PlanError(
            f"{name} splits the batch, and this step has no batch: no argument behind the state has a tensor"
        )
    sizes = [v.shape[0] for v in leaves]
    most = max(sizes, key=sizes.count)
    if most % ranks:
        raise PlanError(
            f"{name}: the {most} rows of the batch ({leaves[0].name!r}) do not divide over {ranks} ranks; "
            f"take a multiple of these (cf.pad(batch, multiple=1, rows={ranks}) adds rows that labels or a mask leave "
            "out)"
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


def with_moments(program: Program, specs: Mapping[int, WantT]) -> dict[int, WantT]:
    """Leaf -> spec, and the moments of each of these parameters alike."""
    return {**specs, **{state: specs[id] for state, id in moments(program).items() if id in specs}}


def stored(program: Program, id: int) -> tuple[int, ...]:
    """The leaves that a weight is kept in, all with its dim 0: itself, cast or not; the parts of a quantized one that
    is widened.

    () where it is computed otherwise.
    """
    made, values = program.makers, program.values
    while id in made:
        node = made[id]
        if node.target in DEQUANTIZE:
            return tuple(part for part in node.refs if part not in made)
        read = node.refs[:1] if node.target == WIDEN else carried(node.target, node.refs)
        if len(read) != 1 or not _keeps_dim_0(node, values[node.refs[0]].shape, values[id].shape):
            return ()
        id = node.refs[0]
    return (id,)


def _keeps_dim_0(node: Node, before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    return before == after or (keeps_order(node.target) and before[:1] == after[:1])


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

    Walked backwards: whoever can give its result as its reader wants it passes the wish on to what it reads. Where that
    ends, a factor arises. A seed for `cf.ext.Wish(values=...)`.
    """
    made, todo = program.makers, list(wanted.items())
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


def written_attention(program: Program) -> Iterator[Node]:
    """Attention that is written out: softmaxes over the last dim of scores (..., s, t), which a product of two
    activations gives, scaled, capped, masked as they may be."""
    made = program.makers
    for node in program.nodes:
        if node.phase == "forward" and node.target == "aten._softmax.default":
            shape = program.values[node.refs[0]].shape
            if (
                len(shape) > 2
                and node.args[1] in (-1, len(shape) - 1)
                and any(score_products(program, made, node.refs[0]))
            ):
                yield node


def score_products(program: Program, made: Mapping[int, Node], id: int) -> Iterator[Node]:
    """The batched products that a value is, but for operators that keep its size or put columns beside it (a sink)."""
    todo, seen = [id], set[int]()
    while todo:
        node = made.get(id := todo.pop())
        if node is not None and id not in seen:
            if node.target in BATCHED_PRODUCTS:
                yield node
            else:
                todo += [r for r in node.refs if _keeps_rows(node, program.values[r].shape, program.values[id].shape)]
        seen.add(id)


def _keeps_rows(node: Node, before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    joined = node.target == "aten.cat.default" and before[:-1] == after[:-1]
    return joined or prod(before) == prod(after)


# ---- mixtures of experts ----


def experts(
    program: Program, mesh: Mesh, axis: str, name: str, rows: Sequence[str] = (), rules: Rules | None = None
) -> Iterator[tuple[int, list[Wish], dict[int, Layout]]]:
    """Layers of experts whose hidden units `axis` divides, a column and row pair in each, with tokens on the axes of
    `rows`: (node index, wishes in the name of a plan, weight -> how it lies). `rules`: those that the plan was
    given."""
    rules = rules or Rules(program, mesh)
    words = {axis: "f"} | {other: "b0" for other in rows if mesh.axis_size(other) > 1}
    for index, node in enumerate(program.nodes):
        way = rules.place(node, "f", axis) if node.target == EXPERTS else None
        if way is not None:
            leaves: dict[int, Layout] = {}
            for ref, lies in zip(node.refs[3:], way.ins[3:], strict=True):
                if lies is not None:
                    leaves |= _leaves_of(program, rules, ref, lies)
            held = Wish(
                node.path or "*",
                "",
                tuple(words),
                source=name,
                targets=(EXPERTS, EXPERTS_BACKWARD),
                phases=("forward", "backward"),
            )
            wishes = [attrs.evolve(held, want=f"{{{a}: {word}}}") for a, word in words.items()]
            yield index, wishes, leaves


def _leaves_of(program: Program, rules: Rules, id: int, lies: Layout) -> dict[int, Layout]:
    """The leaf behind a weight that is to lie so; of a quantized one the parts, as far as they can be split like it."""
    leaf, swapped = leaf_of(program, program.makers, id)
    if leaf is not None and not swapped:
        return {leaf: lies}
    if not stored(program, id):
        return {}
    found, todo = dict[int, Layout](), [(id, lies)]
    while todo:
        id, layout = todo.pop()
        node = program.makers.get(id)
        if node is None:
            found[id] = layout
            continue
        way = rules.give(node, node.outs.index(id), layout)
        if way is not None:
            todo += [(ref, before) for ref, before in zip(node.refs, way.ins, strict=True) if before is not None]
    return found


def routers(program: Program, some: Collection[int]) -> set[int]:
    """Of products (node indices) those whose result says which experts a token goes to: first met from a layer's choice
    and weights.
    """
    at = {node.outs[0]: index for index, node in enumerate(program.nodes) if index in some}
    made, found, seen = program.makers, set[int](), set[int]()
    todo = [ref for node in program.nodes if node.target == EXPERTS for ref in node.refs[1:3]]
    while todo:
        id = todo.pop()
        if id in at:
            found.add(at[id])
        elif id in made and id not in seen:
            todo += made[id].refs
        seen.add(id)
    return found
