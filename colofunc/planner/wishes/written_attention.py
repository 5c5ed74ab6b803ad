"""Attention that is written out, under plans that exchange tokens for heads around it.

    scores = q @ k.transpose(-2, -1) * scale + mask       bmm (b h) s e, (b h) e t -> (b h) s t
    out = dropout(softmax(scores)) @ v                    bmm (b h) s t, (b h) t e -> (b h) s e

Problem: scores that are capped, have sinks or terms of their own are no call of attention, which a pattern could replace; they are
a dozen operators between two batched products. Idea: none of them looks from one head to another. What the products read is wished
split by heads, what comes out by tokens again, and all between them follows; the conversions are the exchange.

    forward     q, k (b axis h) .. ..     v (b axis h) t e     out (b h) (axis s) e
    backward    dout as v                                      dq, dk, dv by tokens
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs

from colofunc.errors import PlanError
from colofunc.mesh import Mesh
from colofunc.planner.wishes.products import root
from colofunc.planner.wishes.reading import PRODUCTS, score_products, written_attention
from colofunc.program.ir import Node, Program
from colofunc.spec.layout import Layout
from colofunc.spec.spec import Spec

__all__ = ["Written", "exchanged", "written"]


@attrs.frozen
class Written:
    """One attention: the softmax of its scores, the products that give these, and those that read the weights."""

    softmax: Node
    first: tuple[Node, ...]
    second: tuple[Node, ...]
    batch: int  # rows of the batch among the leading dim of a product
    tokens: tuple[int, int]  # rows and columns of scores


def written(program: Program) -> Iterator[Written]:
    """Every attention of a program that is written out, forward."""
    for softmax in written_attention(program):
        first = tuple(score_products(program, program.makers, softmax.refs[0]))
        shape = program.values[softmax.refs[0]].shape
        # A sink is a column of scores, and no token.
        columns = program.values[first[0].refs[-1]].shape[-1]
        batch = shape[0] if len(shape) > 3 else 1
        yield Written(softmax, first, tuple(_reading(program, softmax)), batch, (shape[-2], columns))


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
            if node.target not in PRODUCTS:
                todo += node.results
            elif node.refs[-2] == id:
                yield node


def exchanged(program: Program, mesh: Mesh, axis: str, tokens: str, name: str) -> dict[int, Layout]:
    """Value -> how it lies: by heads over `axis` what products read, by tokens (an einops group) what comes out, also in backward.

    Raises PlanError, in the name of a plan, where heads do not divide over the axis.
    """
    found: dict[int, Layout] = {}
    roles: dict[int, list[tuple[str, Written]]] = {}
    for each in written(program):
        for node in (*each.first, *each.second):
            for ref in node.refs[-2:]:
                found[ref] = _by_heads(program, mesh, axis, each, ref, name)
        for node in each.second:
            found |= _by_tokens(program, mesh, tokens, each, node.outs[0], 1)
        made = program.makers
        for role, nodes, place in (("q", each.first, -2), ("k", each.first, -1), ("p", each.second, -2), ("v", each.second, -1)):
            for node in nodes:
                roles.setdefault(root(program, made, node.refs[place]), []).append((role, each))
    for node in program.nodes:
        if node.phase == "backward" and node.target in PRODUCTS:
            found |= _backward(program, mesh, axis, tokens, node, roles, name)
    return found


def _backward(
    program: Program, mesh: Mesh, axis: str, tokens: str, node: Node, roles: Mapping[int, list[tuple[str, Written]]], name: str
) -> dict[int, Layout]:
    """What a product of backward reads and gives, by the operand of forward that it reads; nothing where that is not clear."""
    made = program.makers
    known = [pair for ref in node.refs[-2:] for pair in roles.get(root(program, made, ref), ())]
    if len(known) != 1:
        return {}
    ((role, each),) = known
    found = {ref: _by_heads(program, mesh, axis, each, ref, name) for ref in node.refs[-2:]}
    if role != "v":
        # Beside k stands the gradient of scores, and what comes out is that of q; and so on.
        found |= _by_tokens(program, mesh, tokens, each, node.outs[0], 2 if role == "q" else 1)
    return found


def _by_heads(program: Program, mesh: Mesh, axis: str, each: Written, id: int, name: str) -> Layout:
    shape, ranks = program.values[id].shape, mesh.axis_size(axis)
    heads, rest = divmod(shape[0], each.batch)
    if not rest and heads % ranks == 0:
        cut = f"{each.batch} " if each.batch > 1 else ""
        return Spec(f"({cut}{axis} _) _ _").bind(mesh, shape)
    if shape[0] % ranks:
        raise PlanError(
            f"{name}: {heads} heads that are written out at {each.softmax.line} do not divide over the {ranks} ranks of {axis!r}; use "
            f"fewer ranks, or gather_kv({axis!r}), which splits tokens only"
        )
    return Spec(f"({axis} _) _ _").bind(mesh, shape)


def _by_tokens(program: Program, mesh: Mesh, tokens: str, each: Written, id: int | None, dim: int) -> dict[int, Layout]:
    """Where a dim of a value is tokens: the value by these."""
    if id is None or program.values[id].shape[dim] not in each.tokens:
        return {}
    words = ["_", "_", "_"]
    words[dim] = tokens
    return {id: Spec(" ".join(words)).bind(mesh, program.values[id].shape)}
