"""Split backward: gradients of weights in nodes of their own, where one operator makes them and the input's.

Problem: a schedule with I and W has something to put into its bubbles where gradients of weights are operators apart
from those of inputs, as those of products are. The backward of a convolution, and that of experts, makes all of them in
one call, for which the stage before waits. Idea: such a node becomes two.

    %5, %6, %7 = convolution_backward(%g, %x, %w, ..., [True, True, True])
      ->  %5 = convolution_backward(%g, %x, %w, ..., [True, False, False])
          %6, %7 = convolution_backward(%g, %x, %w, ..., [False, True, True])

    %5, %6, %7, ... = experts_backward(%g, %x, ...)
      ->  %5, %6, %dh, %a = experts_input_gradients(%g, %x, ...)
          %7, ... = experts_weight_gradients(%dh, %a, %g, %x, ...)

The numbers are the same. It is done to what one rank runs, where it is known who computes what (gradients of hidden
units are of the rank that has the expert, and never travel), and to the program of all ranks for the costs of cuts.
Experts in float8 stay whole, and nodes of which only gradients of weights are read.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from colofunc.ops.experts_parts import EXPERTS_BACKWARD, INPUT_GRADIENTS, WEIGHT_GRADIENTS
from colofunc.ops.kernels import bound, signature
from colofunc.program.editor import Editor
from colofunc.program.ir import Node, Program, Ref

CONVOLUTION = "aten.convolution_backward.default"

SplitNode = Callable[[Editor, Node], tuple[Node, Node] | None]
"""The nodes in place of one, that of the input's gradient first; None where it stays as it is."""


def split_backward(program: Program) -> Program:
    """`program` with gradients of weights apart from those of inputs, or itself where they are so already."""
    edit, changed = Editor(program), False
    for index, node in enumerate(program.nodes):
        split = SPLITS.get(node.target)
        if split is None or node.phase != "backward":
            continue
        nodes = split(edit, node)
        if nodes is not None:
            edit.replace(index, *nodes)
            changed = True
    return edit.done() if changed else program


def _split_convolution(edit: Editor, node: Node) -> tuple[Node, Node] | None:
    *operands, mask = node.args
    of_input, *of_weights = mask
    made, *rest = node.outs
    if not of_input or not any(of_weights) or not _is_read(edit.program, made):
        return None
    inputs = attrs.evolve(node, args=(*operands, (True, False, False)), outs=(made, None, None))
    weights = attrs.evolve(node, args=(*operands, (False, *of_weights)), outs=(None, *rest))
    return inputs, weights


def _split_experts(edit: Editor, node: Node) -> tuple[Node, Node] | None:
    names = [name for name, _ in signature(node.target)]
    given = dict(zip(names, bound(node.target, node.args, dict(node.kwargs)), strict=True))
    if not given.pop("need_weights") or given.pop("float8"):
        return None
    dx, dweight, *gradients = node.outs
    if not any(_is_read(edit.program, id) for id in (dx, dweight)):
        return None
    values = edit.program.values
    index, up, down = (values[given[name].id] for name in ("index", "gate_up", "down"))
    hidden, units = (2, 1) if given["transposed"] else (1, 2)
    sizes = (up.shape[hidden], down.shape[units])
    # They exist where the node runs, which says it; no layout puts what the ranks have together.
    made = attrs.evolve(up, role="activation", name="", layout=None, of=None, place=up.tier)
    kept = [edit.new(made, shape=(*index.shape, size)) for size in sizes]
    operands = tuple(given.values())
    inputs = attrs.evolve(node, target=INPUT_GRADIENTS, args=operands, kwargs=(), outs=(dx, dweight, *kept))
    operands = (*map(Ref, kept), *operands)
    weights = attrs.evolve(node, target=WEIGHT_GRADIENTS, args=operands, kwargs=(), outs=tuple(gradients))
    return inputs, weights


def _is_read(program: Program, id: int | None) -> bool:
    return id is not None and (id in program.readers or id in program.times_returned)


SPLITS: dict[str, SplitNode] = {CONVOLUTION: _split_convolution, EXPERTS_BACKWARD: _split_experts}
