"""Tokens over ranks: what a plan that splits the sequence wants to know of a step, and its wishes about all but
attention.

    cf.ext.tokens.attention(program, "direct(cp)")                          the calls of attention
    cf.ext.tokens.wishes(program, mesh, "(cp s)", ("cp",), "direct(cp)")    contiguous; "(s cp)": dealt round

Problem: a step does not say which of its dims are tokens. Idea: attention does: they are what its rows and columns are
as many as. A leaf of the batch is split if its dim 1 is as long; where no leaf is, the values in which these arise are
(patches of an image). From there the layout is followed through the program: embeddings, norms, products, the loss.
Attention is crossed: it takes and gives tokens as they lie, and what it does with them is another wish of the plan, for
its own `cf.ext.AttentionPattern`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from math import prod
from typing import Any

import attrs

from colofunc.errors import PlanError
from colofunc.mesh import Mesh
from colofunc.ops.torch_facts import BATCHED_PRODUCTS
from colofunc.planner.wishes.products import root
from colofunc.planner.wishes.propagation import Rules
from colofunc.planner.wishes.reading import origins, score_products, written_attention
from colofunc.planner.wishes.wish import Wish
from colofunc.program.ir import Node, Program
from colofunc.program.lower import call_in
from colofunc.spec.layout import Layout
from colofunc.spec.rules.attention_call import AttentionCall
from colofunc.spec.spec import Spec

# ---- attention that is written out ----
#     scores = q @ k.transpose(-2, -1) * scale + mask       bmm (b h) s e, (b h) e t -> (b h) s t
#     out = dropout(softmax(scores)) @ v                    bmm (b h) s t, (b h) t e -> (b h) s e
#
# Problem: scores that are capped, have sinks or terms of their own are no call of attention, which a pattern could
# replace; they are a dozen operators between two batched products. Idea: none of them looks from one head to another.
# What the products read is wished split by heads, what comes out by tokens again, and all between them follows; the
# conversions are the exchange.
#
#     forward     q, k (b axis h) .. ..     v (b axis h) t e     out (b h) (axis s) e
#     backward    dout as v                                      dq, dk, dv by tokens


@attrs.frozen
class WrittenAttention:
    """One attention: the softmax of its scores, the products that give these, and those that read the weights."""

    softmax: Node
    first: tuple[Node, ...]
    second: tuple[Node, ...]
    batch: int  # rows of the batch among the leading dim of a product
    tokens: tuple[int, int]  # rows and columns of scores


def written_calls(program: Program) -> Iterator[WrittenAttention]:
    """Every attention of a program that is written out, forward."""
    for softmax in written_attention(program):
        first = tuple(score_products(program, program.makers, softmax.refs[0]))
        shape = program.values[softmax.refs[0]].shape
        # A sink is a column of scores, and no token.
        columns = program.values[first[0].refs[-1]].shape[-1]
        batch = shape[0] if len(shape) > 3 else 1
        yield WrittenAttention(softmax, first, tuple(_reading(program, softmax)), batch, (shape[-2], columns))


def _reading(program: Program, softmax: Node) -> Iterator[Node]:
    """The forward products of weights with values: the first that are met behind a softmax, as their first operand."""
    todo, seen = list(softmax.results), set[int]()
    while todo:
        id = todo.pop()
        if id in seen:
            continue
        seen.add(id)
        for node in (program.nodes[index] for index in program.readers.get(id, ())):
            if node.phase != "forward":
                continue
            if node.target not in BATCHED_PRODUCTS:
                todo += node.results
            elif node.refs[-2] == id:
                yield node


def layouts_exchanged(
    program: Program, mesh: Mesh, axis: str, tokens: str, name: str, instead: str = ""
) -> dict[int, Layout]:
    """Value -> how it lies: by heads over `axis` what products read, by tokens (an einops group) what comes out, also
    in backward.

    Raises PlanError, in the name of a plan, where heads do not divide over the axis; `instead`: what else to write.
    """
    found: dict[int, Layout] = {}
    roles: dict[int, list[tuple[str, WrittenAttention]]] = {}
    for each in written_calls(program):
        for node in (*each.first, *each.second):
            for ref in node.refs[-2:]:
                found[ref] = _by_heads(program, mesh, axis, each, ref, name, instead)
        for node in each.second:
            found |= _by_tokens(program, mesh, tokens, each, node.outs[0], 1)
        made = program.makers
        for role, nodes, place in (
            ("q", each.first, -2),
            ("k", each.first, -1),
            ("p", each.second, -2),
            ("v", each.second, -1),
        ):
            for node in nodes:
                roles.setdefault(root(made, node.refs[place]), []).append((role, each))
    for node in program.nodes:
        if node.phase == "backward" and node.target in BATCHED_PRODUCTS:
            found |= _backward(program, mesh, axis, tokens, node, roles, name, instead)
    return found


def _backward(
    program: Program,
    mesh: Mesh,
    axis: str,
    tokens: str,
    node: Node,
    roles: Mapping[int, list[tuple[str, WrittenAttention]]],
    name: str,
    instead: str,
) -> dict[int, Layout]:
    """What a product of backward reads and gives, by the operand of forward that it reads; nothing where that is not
    clear.
    """
    made = program.makers
    known = [pair for ref in node.refs[-2:] for pair in roles.get(root(made, ref), ())]
    if len(known) != 1:
        return {}
    ((role, each),) = known
    found = {ref: _by_heads(program, mesh, axis, each, ref, name, instead) for ref in node.refs[-2:]}
    if role != "v":
        # Beside k stands the gradient of scores, and what comes out is that of q; and so on.
        found |= _by_tokens(program, mesh, tokens, each, node.outs[0], 2 if role == "q" else 1)
    return found


def _by_heads(
    program: Program, mesh: Mesh, axis: str, each: WrittenAttention, id: int, name: str, instead: str
) -> Layout:
    shape, ranks = program.values[id].shape, mesh.axis_size(axis)
    heads, rest = divmod(shape[0], each.batch)
    if not rest and heads % ranks == 0:
        cut = f"{each.batch} " if each.batch > 1 else ""
        return Spec(f"({cut}{axis} _) _ _").bind(mesh, shape)
    if shape[0] % ranks:
        other = f", or {instead}" if instead else ""
        raise PlanError(
            f"{name}: {heads} heads that are written out at {each.softmax.line} do not divide over the {ranks} ranks "
            f"of {axis!r}; use fewer ranks{other}"
        )
    return Spec(f"({axis} _) _ _").bind(mesh, shape)


def _by_tokens(
    program: Program, mesh: Mesh, tokens: str, each: WrittenAttention, id: int | None, dim: int
) -> dict[int, Layout]:
    """Where a dim of a value is tokens: the value by these."""
    if id is None or program.values[id].shape[dim] not in each.tokens:
        return {}
    words = ["_", "_", "_"]
    words[dim] = tokens
    return {id: Spec(" ".join(words)).bind(mesh, program.values[id].shape)}


__all__ = ["attention", "wishes"]


def attention(program: Program, name: str, written: bool = False, instead: str = "") -> list[AttentionCall]:
    """The calls of attention, forward.

    Raises PlanError, in the name of a plan, where there is none; with `written` not where a model writes out its
    scores. `instead`: what to take where a model does so and the plan cannot use them.
    """
    nodes, scores = _nodes(program), list(written_attention(program))
    if not nodes and not (written and scores):
        line = f" (it is written out at {scores[0].line})" if scores else ""
        raise PlanError(
            f"{name} finds no attention in this step{line}; it knows torch's scaled_dot_product_attention"
            + (f"; where a model has none, {instead}" if scores and instead else ""),
            about="attention",
        )
    return [AttentionCall(call_in(program, node)[0]) for node in nodes]


def wishes(
    program: Program, mesh: Mesh, tokens: str, axes: tuple[str, ...], name: str, written: bool = False, rules: Rules | None = None,
    heads: str = "", instead: str = "",
) -> list[Wish]:  # fmt: skip
    """Wishes that tokens lie over `axes` as an einops group says, wherever they come from.

    `written`: so do the rows of scores that a model writes out; the keys are gathered before the products. `heads`: an
    axis; such scores are split by their heads over it, and tokens are exchanged for heads before the products and back
    behind them; `instead`: what else to write where these heads do not divide. `rules`: those that the plan was given.
    Raises PlanError, in the name of a plan, where tokens or heads do not divide over the ranks.
    """
    shapes = {id: value.shape for id, value in program.values.items()}
    rows = {id: shapes[id][-2] for node in _nodes(program) for id in node.refs[:3]}  # q, k and v
    lengths = set(rows.values())
    for each in written_calls(program) if written else ():
        rows[each.softmax.refs[0]] = each.tokens[0]
        lengths |= {*each.tokens}  # columns of scores are tokens, too
    batch = [value for id in program.inputs if (value := program.values[id]).role == "batch" and len(value.shape) > 1]
    leaves = [leaf for leaf in batch if leaf.shape[1] in lengths]
    given = {leaf.shape[1] for leaf in leaves}
    _check(lengths, given, prod(mesh.axis_size(axis) for axis in mesh.atoms(axes)), name)
    how: dict[str, Any] = dict(
        source=name, along=True, across=AttentionCall.TARGETS, gathers=BATCHED_PRODUCTS if written and not heads else ()
    )
    found = [Wish(leaf.name, f"_ {tokens} ...", axes, ("batch",), **how) for leaf in leaves]
    wanted = {id: Spec(f"... {tokens} _").bind(mesh, shapes[id]) for id, size in rows.items() if size not in given}
    arise = origins(program, rules or Rules(program, mesh), wanted)
    if heads:
        arise |= layouts_exchanged(program, mesh, heads, tokens, name, instead)
    return [*found, *(Wish("*", layout, axes, values=(id,), **how) for id, layout in arise.items())]


def _nodes(program: Program) -> list[Node]:
    return [node for node in program.nodes if node.phase == "forward" and node.target == AttentionCall.FORWARD]


def _check(lengths: Collection[int], given: Collection[int], ranks: int, name: str) -> None:
    for size in (size for size in sorted(lengths) if size % ranks):
        about, way = "", f"take a multiple (cf.pad with multiple={ranks} makes one), or fewer ranks"
        if size not in given:
            about = "tokens"
            way = (
                "they arise inside the model, where nothing can be padded: take inputs of another size, leave out a "
                "class token, or split heads instead (tensor parallelism)"
            )
        raise PlanError(f"{name}: {size} tokens do not divide over {ranks} ranks; {way}", about=about)
