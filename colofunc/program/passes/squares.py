"""Squares in one pass: on a host the sum of a large tensor's squares is one operator (`colofunc.ops.squares`).

Problem: the norm by which gradients are clipped is traced as a product and a sum, with a tensor between them that is as
large as the gradient. To write and read that, in pages that are mapped anew each time, takes longer than the update.
Idea: behind all that plans and places, where the sum is the product's only reader, it reads what was squared.

    %9 = mul.Tensor(%8, %8)   %10 = sum(%9)     ->     %10 = sum_of_squares(%8)

A gradient in bfloat16 or float16 is cast to float32 first. Where the product alone reads the cast, the sum reads what
was cast: each element is widened by itself, which is exact, and is squared and summed in the same order, so the bits
are those of the sum of the cast.

GPUs keep the two: there both are bounded by launches or fused by a compiler.
"""

from __future__ import annotations

from math import prod

import torch

from colofunc.mesh import Mesh
from colofunc.ops.update_narrow import GRADS
from colofunc.program.editor import Editor
from colofunc.program.facts import is_cast
from colofunc.program.ir import Node, Program, Ref
from colofunc.program.passes.kernels import capability_on
from colofunc.program.passes.narrow_gradients import changes_between

PRODUCT, SUM, IN_ONE_PASS = "aten.mul.Tensor", "aten.sum.default", "colofunc.sum_of_squares"
LARGE = 1 << 18
"""Elements from which on memory takes longer than calls, with the kernel and without."""


def squares_in_one_pass(program: Program, mesh: Mesh) -> Program:
    """`program` with sums of squares of large tensors on the host, in float32, in one operator each, or itself where
    there are none.
    """
    is_host = capability_on(mesh.topology) is None
    edit, found = Editor(program), False
    for index, node in enumerate(program.nodes):
        product = _product_of(program, index, node)
        if product is None:
            continue
        squared = program.nodes[product].refs[0]
        value = program.values[squared]
        if value.dtype != torch.float32 or prod(value.shape) < LARGE or not (is_host or value.tier == "host"):
            continue
        if changes_between(program, squared, product, index):
            continue
        cast = _cast_of(program, squared, product, index)
        if cast is not None:
            edit.drop(cast)
            squared = program.nodes[cast].refs[0]
        edit.drop(product)
        edit.change(index, target=IN_ONE_PASS, args=(Ref(squared),), kernel=None)
        found = True
    return edit.done() if found else program


def _product_of(program: Program, index: int, node: Node) -> int | None:
    """Position of the product of a tensor with itself that a sum alone reads."""
    if node.target != SUM or node.kwargs or len(node.args) != 1:
        return None
    (summed,) = node.refs
    product = program.made_at.get(summed)
    if product is None or program.readers[summed] != (index,) or summed in program.outputs:
        return None
    made = program.nodes[product]
    if (
        made.target != PRODUCT
        or made.kwargs
        or made.on != node.on
        or len(made.refs) != 2
        or made.refs[0] != made.refs[1]
    ):
        return None
    return product


def _cast_of(program: Program, squared: int, product: int, index: int) -> int | None:
    """Position of the cast of a narrow tensor to float32 that the product at `product` alone reads, where the sum at
    `index` can do so.
    """
    cast = program.made_at.get(squared)
    if cast is None or program.readers[squared] != (product,) or squared in program.outputs:
        return None
    made, sums = program.nodes[cast], program.nodes[index]
    if not is_cast(made) or made.on != sums.on:
        return None
    source, wide = program.values[made.refs[0]], program.values[squared]
    if source.dtype not in GRADS or source.tier != wide.tier or changes_between(program, made.refs[0], cast, index):
        return None
    return cast
