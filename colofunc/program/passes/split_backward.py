"""Split backward: gradients of weights in nodes of their own, where one operator makes them and the input's.

Problem: a schedule with I and W has something to put into its bubbles where gradients of weights are operators apart
from those of inputs, as those of products are. The backward of a convolution makes all of them in one call, for which
the stage before waits. Idea: in the program of all ranks, before anything is placed, such a node becomes two.

    %5, %6, %7 = convolution_backward(%g, %x, %w, ..., [True, True, True])
      ->  %5 = convolution_backward(%g, %x, %w, ..., [True, False, False])
          %6, %7 = convolution_backward(%g, %x, %w, ..., [False, True, True])

The numbers are the same: a convolution's gradients are calls apart within torch, too.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from colofunc.program.editor import Editor
from colofunc.program.ir import Node, Program

CONVOLUTION = "aten.convolution_backward.default"

Split = Callable[[Editor, Node], tuple[Node, ...] | None]
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


def _split_convolution(edit: Editor, node: Node) -> tuple[Node, ...] | None:
    *operands, mask = node.args
    of_input, *of_weights = mask
    if not of_input or not any(of_weights):
        return None
    made, *rest = node.outs
    inputs = attrs.evolve(node, args=(*operands, (True, False, False)), outs=(made, None, None))
    weights = attrs.evolve(node, args=(*operands, (False, *of_weights)), outs=(None, *rest))
    return inputs, weights


SPLITS: dict[str, Split] = {CONVOLUTION: _split_convolution}
