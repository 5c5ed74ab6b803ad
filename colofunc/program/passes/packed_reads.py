"""Packed reads: what reads a quantized weight reads its packed tensors, and a widened weight lives no longer than one
reader.

Problem: the step's own code is given widened weights, so that the traced program widens all of them first and holds all
of them. Idea: a product reads the packed tensors, a lookup in a table widens the rows that it has found (and divides
them by the scale of the weight's inputs, where it has one), and for every other reader (a convolution, a transposed
product) the weight is widened right in front of it, for each reader anew.

    %3 = int8_dequantize(%1, %2)   %9 = linear(%x, %3)          ->     %9 = int8_linear(%x, %1, %2)
    %3 = int8_dequantize(%1, %2)   %9 = embedding(%3, %ids)     ->     %9 = int8_dequantize(embedding(%1, %ids), embedding(%2, %ids))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import attrs
import torch

from colofunc.ops.linear import linear
from colofunc.ops.quantized import DEQUANTIZE, PACKED_READERS
from colofunc.ops.targets import RESHAPES
from colofunc.program.editor import Editor
from colofunc.program.ir import Node, Program, Ref, map_refs

CAST = "aten._to_copy.default"
VIEW = "aten.view.default"
TURNS = frozenset(("aten.t.default", "aten.transpose.int", "aten.permute.default"))
LOOKUP = "aten.embedding.default"
DIVISION = "aten.div.Tensor"
"""By the scale of a weight's inputs, which is an input of the program."""
SHAPES = RESHAPES | TURNS
"""Operators that only look at a widened weight in another shape: a reshape is told other sizes where what it reads is
gathered."""
NARROW = (torch.bfloat16, torch.float16)

# what makes a widened weight: its dequantize first, then casts, divisions and changes of shape
WideningChain = tuple[Node, ...]


def read_packed(program: Program) -> Program:
    """The program whose readers of quantized weights read the packed tensors, or a weight that is widened in front of
    them.
    """
    edit = Editor(program)
    chains: dict[int, WideningChain] = {}
    for index, node in enumerate(program.nodes):
        first = node.refs[0] if node.refs else None
        if node.target in DEQUANTIZE:
            chains[node.results[0]] = (node,)
        elif first in chains and goes_on(program, node):
            chains[node.results[0]] = (*chains[first], node)
        elif (
            node.target in PACKED_READERS
            and node.refs[1] in chains
            and node.refs[0] not in chains
            and _is_matrix(chains[node.refs[1]])
        ):
            edit.replace(index, _product(node, chains[node.refs[1]][0]))
        elif node.target == LOOKUP and first in chains and _is_matrix_or_divided(program, chains[first]):
            edit.replace(index, *_lookup(edit, node, chains[first]))
        elif not chains.keys().isdisjoint(node.refs):
            edit.replace(index, *_widened_here(edit, node, chains))
    return _without_unread(edit.done(), chains)


def goes_on(program: Program, node: Node) -> bool:
    """Whether a node that reads a widened weight only gives it another floating dtype or another shape, or divides it
    by an input.
    """
    if node.target == DIVISION:
        return len(node.refs) == 2 and node.refs[1] in program.inputs
    return node.target in SHAPES or (node.target == CAST and program.values[node.results[0]].dtype.is_floating_point)


def _is_matrix(chain: WideningChain) -> bool:
    """Whether it is the matrix of the packed tensors, in whatever dtype."""
    return all(node.target == CAST for node in chain[1:])


def _is_matrix_or_divided(program: Program, chain: WideningChain) -> bool:
    """Whether it is the matrix of the packed tensors, in whatever dtype, or that over one number for each of its
    columns.
    """
    columns = program.values[chain[0].results[0]].shape[1:]
    for node in chain[1:]:
        by_columns = node.target == DIVISION and program.values[node.refs[1]].shape == columns
        if node.target != CAST and not by_columns:
            return False
    return True


def _product(product: Node, source: Node) -> Node:
    """A product with the parts of a weight in the weight's place."""
    target = PACKED_READERS[product.target][DEQUANTIZE[source.target]]
    parts = source.args[:-1]
    rest: tuple[Any, ...] = ()
    if product.target == linear.name:
        rest = (product.args[2] if len(product.args) > 2 else dict(product.kwargs).get("b"),)
    return attrs.evolve(product, target=target, args=(product.args[0], *parts, *rest), kwargs=())


def _lookup(edit: Editor, lookup: Node, chain: WideningChain) -> list[Node]:
    """A lookup in each packed tensor, and the rows that were found widened.

    `lookup`: (o, i) at ids (b...) -> (b..., i).
    """
    nodes: list[Node] = []

    def add(target: str, args: tuple[Any, ...], like: int, shape: tuple[int, ...], dtype: torch.dtype) -> Ref:
        out = edit.new(edit.program.values[like], shape=shape, dtype=dtype, name="", role="activation")
        nodes.append(attrs.evolve(lookup, target=target, args=args, kwargs=(), outs=(out,)))
        return Ref(out)

    ids = lookup.refs[1]
    batch = edit.program.values[ids].shape
    rows, result = prod(batch), lookup.results[0]
    found: list[Ref] = []
    for part in chain[0].refs:
        value = edit.program.values[part]
        table, width = Ref(part), value.shape[1:]
        if not width:  # scales of rows: embedding takes matrices
            table = add(VIEW, (table, (value.shape[0], 1)), result, (value.shape[0], 1), value.dtype)
        columns = width or (1,)
        row = add(LOOKUP, (table, Ref(ids)), result, (*batch, *columns), value.dtype)
        found.append(add(VIEW, (row, (rows, *width)), result, (rows, *width), value.dtype))
    dtypes = [edit.program.values[node.results[0]].dtype for node in chain]
    last = edit.program.values[result].shape
    wide = add(chain[0].target, (*found, chain[0].args[-1]), result, (rows, last[-1]), dtypes[0])
    for node, dtype in zip(chain[1:], dtypes[1:], strict=True):
        # A division by numbers of columns is the same for any rows.
        wide = add(node.target, (wide, *node.args[1:]), result, (rows, last[-1]), dtype)
        nodes[-1] = attrs.evolve(nodes[-1], kwargs=node.kwargs)
    nodes.append(attrs.evolve(lookup, target=VIEW, args=(wide, last), kwargs=()))
    return nodes


def _widened_here(edit: Editor, reader: Node, chains: Mapping[int, WideningChain]) -> list[Node]:
    """A reader, and in front of it the weights that it reads, widened for it alone."""
    nodes: list[Node] = []
    instead: dict[int, int] = {}
    for id in dict.fromkeys(reader.refs):
        if id not in chains:
            continue
        copy: int | None = None
        for node, dtype in _at_once(edit.program, chains[id]):
            out = edit.new(edit.program.values[node.results[0]], dtype=dtype)
            args = node.args if copy is None else (Ref(copy), *node.args[1:])
            nodes.append(
                attrs.evolve(node, args=args, outs=(out,), phase=reader.phase, path=reader.path, line=reader.line)
            )
            copy = out
        assert copy is not None
        instead[id] = copy
    args, kwargs = map_refs((reader.args, reader.kwargs), lambda id: Ref(instead.get(id, id)))
    return [*nodes, attrs.evolve(reader, args=args, kwargs=kwargs)]


def _at_once(program: Program, chain: WideningChain) -> list[tuple[Node, torch.dtype]]:
    """The nodes of a chain and what dtypes they give.

    A weight that is cast from float32 to a narrow dtype is widened to that one.

    The numbers are the same: `dequantize` computes in float32 and casts last.
    """
    dtypes = [program.values[node.results[0]].dtype for node in chain]
    casts = [node for node in chain if node.target == CAST]
    plain = len(casts) == 1 and casts[0].kwargs == (("dtype", dtypes[-1]),)
    plain = plain and all(node.target != DIVISION for node in chain)  # which is of float32 numbers
    if not plain or dtypes[0] is not torch.float32 or dtypes[-1] not in NARROW:
        return list(zip(chain, dtypes, strict=True))
    source = attrs.evolve(chain[0], args=(*chain[0].args[:-1], dtypes[-1]))
    shapes = [node for node in chain[1:] if node.target != CAST]
    return [(node, dtypes[-1]) for node in (source, *shapes)]


def _without_unread(program: Program, chains: Mapping[int, WideningChain]) -> Program:
    """The program without widened weights that nobody reads any more."""
    read = set(program.outputs)
    kept: list[Node] = []
    for node in reversed(program.nodes):
        if any(out in chains for out in node.results) and not any(out in read for out in node.results):
            continue
        read.update(node.refs)
        kept.append(node)
    if len(kept) == len(program.nodes):
        return program
    return Editor(program).written(reversed(kept))


def packed_inputs(program: Program, parts: Sequence[int]) -> tuple[int, ...] | None:
    """The inputs that the packed operands `parts` are or are looked up in; None where they are something else."""
    found = []
    for id in parts:
        while id in program.makers and program.makers[id].target in (VIEW, LOOKUP):
            id = program.makers[id].refs[0]
        if id not in program.inputs:
            return None
        found.append(id)
    return tuple(found)
