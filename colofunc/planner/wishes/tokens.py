"""Tokens over ranks: what a plan that splits the sequence wants to know of a step, and its wishes about all but attention.

    cf.ext.tokens.attention(program, "direct(cp)")                          the calls of attention
    cf.ext.tokens.wishes(program, mesh, "(cp s)", ("cp",), "direct(cp)")    contiguous; "(s cp)": dealt round

Problem: a step does not say which of its dims are tokens. Idea: attention does: they are what its rows and columns are as many
as. A leaf of the batch is split if its dim 1 is as long; where no leaf is, the values in which these arise are (patches of an
image). From there the layout is followed through the program: embeddings, norms, products, the loss. Attention is crossed: it
takes and gives tokens as they lie, and what it does with them is another wish of the plan, for its own `cf.ext.AttentionPattern`.
"""

from __future__ import annotations

from collections.abc import Collection
from math import prod
from typing import Any

from colofunc.errors import PlanError
from colofunc.mesh import Mesh
from colofunc.planner.wishes import written_attention as written_out
from colofunc.planner.wishes.propagation import Rules
from colofunc.planner.wishes.reading import PRODUCTS, origins, written_attention
from colofunc.planner.wishes.wish import Wish
from colofunc.program.ir import Node, Program
from colofunc.program.lower import call_of
from colofunc.spec.rules.attention_call import AttentionCall
from colofunc.spec.spec import Spec

__all__ = ["attention", "wishes"]


def attention(program: Program, name: str, written: bool = False, instead: str = "") -> list[AttentionCall]:
    """The calls of attention, forward.

    Raises PlanError, in the name of a plan, where there is none; with `written` not where a model writes out its scores.
    `instead`: what to take where a model does so and the plan cannot use them.
    """
    nodes, scores = _nodes(program), list(written_attention(program))
    if not nodes and not (written and scores):
        line = f" (it is written out at {scores[0].line})" if scores else ""
        raise PlanError(
            f"{name} finds no attention in this step{line}; it knows torch's scaled_dot_product_attention, which transformers "
            "calls with attn_implementation='sdpa'" + (f"; where a model has none, {instead}" if scores and instead else "")
        )
    return [AttentionCall(call_of(node, program.values)[0]) for node in nodes]


def wishes(
    program: Program, mesh: Mesh, tokens: str, axes: tuple[str, ...], name: str, written: bool = False, rules: Rules | None = None,
    heads: str = "",
) -> list[Wish]:  # fmt: skip
    """Wishes that tokens lie over `axes` as an einops group says, wherever they come from.

    `written`: so do the rows of scores that a model writes out; the keys are gathered before the products.
    `heads`: an axis; such scores are split by their heads over it, and tokens are exchanged for heads before the products and back
    behind them. `rules`: those that the plan was given. Raises PlanError, in the name of a plan, where tokens do not divide over the ranks.
    """
    shapes = {id: value.shape for id, value in program.values.items()}
    rows = {id: shapes[id][-2] for node in _nodes(program) for id in node.refs[:3]}  # q, k and v
    lengths = set(rows.values())
    for each in written_out.written(program) if written else ():
        rows[each.softmax.refs[0]] = each.tokens[0]
        lengths |= {*each.tokens}  # columns of scores are tokens, too
    batch = [value for id in program.inputs if (value := program.values[id]).role == "batch" and len(value.shape) > 1]
    leaves = [leaf for leaf in batch if leaf.shape[1] in lengths]
    given = {leaf.shape[1] for leaf in leaves}
    _check(lengths, given, prod(mesh.axis_size(axis) for axis in mesh.atoms(axes)), name)
    how: dict[str, Any] = dict(source=name, along=True, across=AttentionCall.TARGETS, gathers=PRODUCTS if written and not heads else ())
    found = [Wish(leaf.name, f"_ {tokens} ...", axes, ("batch",), **how) for leaf in leaves]
    wanted = {id: Spec(f"... {tokens} _").bind(mesh, shapes[id]) for id, size in rows.items() if size not in given}
    arise = origins(program, rules or Rules(program, mesh), wanted)
    if heads:
        arise |= written_out.exchanged(program, mesh, heads, tokens, name)
    return [*found, *(Wish("*", layout, axes, values=(id,), **how) for id, layout in arise.items())]


def _nodes(program: Program) -> list[Node]:
    return [node for node in program.nodes if node.phase == "forward" and node.target == AttentionCall.FORWARD]


def _check(lengths: Collection[int], given: Collection[int], ranks: int, name: str) -> None:
    for size in (size for size in sorted(lengths) if size % ranks):
        way = f"take a multiple (cf.pad with multiple={ranks} makes one), or fewer ranks"
        if size not in given:
            way = (
                "they arise inside the model, where nothing can be padded: take inputs of another size, leave out a class token "
                "(timm: class_token=False, global_pool='avg'), or split heads instead (tensor parallelism)"
            )
        raise PlanError(f"{name}: {size} tokens do not divide over {ranks} ranks; {way}")
