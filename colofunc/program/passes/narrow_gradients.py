"""Narrow gradients: an update on the host reads a gradient in the dtype in which it was computed.

Problem: in mixed precision a gradient arrives on the host in bfloat16, is cast to float32 there, and only then updates a float32
parameter: six bytes an element are read and written, and four held, for a number that the update could widen itself. Idea: where the
update is the only reader of the cast, it reads what was cast.

    %9 = _to_copy(%8: bf16 @host, dtype=f32)   adamw_(%1, %9, %2, %3, ...)     ->     adamw_(%1, %8: bf16 @host, %2, %3, ...)

Updates that run so say it where they are defined (`narrow_where`): Adam and AdamW without amsgrad, SGD without dampening, Lion, LAMB's
direction. On a device the cast stays: torch's fused kernels read one dtype.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from colofunc.ops.define import OPERATORS
from colofunc.ops.kernels import bound, signature
from colofunc.ops.update_narrow import is_narrow
from colofunc.program.aliases import aliases
from colofunc.program.editor import Editor
from colofunc.program.facts import written
from colofunc.program.ir import Node, Program

CAST = "aten._to_copy.default"


def narrow_gradients(program: Program) -> Program:
    """`program` without the casts on the host that `droppable_casts` finds."""
    edit = Editor(program)
    for index, cast in droppable_casts(program).items():
        node = program.nodes[cast]
        (source,), (wide,) = node.refs, node.results
        if any(program.values[i].tier != "host" for i in (source, wide, *program.nodes[index].refs)):
            continue
        gradient = program.values[wide]
        edit.values[source] = attrs.evolve(program.values[source], name=gradient.name, role=gradient.role)
        edit.rename(wide, source)
        edit.drop(cast)
    return edit.done()


def droppable_casts(program: Program) -> Mapping[int, int]:
    """Position of an update -> position of the cast of its gradient, where it could read what is cast, and nobody else reads the cast."""
    found: dict[int, int] = {}
    for index, node in enumerate(program.nodes):
        if not _takes_narrow(node):
            continue
        param, gradient = node.refs[:2]
        cast = program.made_at.get(gradient)
        if cast is None or program.readers[gradient] != (index,) or gradient in program.outputs:
            continue
        made = program.nodes[cast]
        if made.target != CAST or [name for name, _ in made.kwargs] != ["dtype"]:
            continue
        values, source = program.values, made.refs[0]
        if values[param].dtype == values[gradient].dtype and is_narrow(values[param].dtype, values[source].dtype):
            if not _changes(program, source, cast, index):
                found[index] = cast
    return found


def _takes_narrow(node: Node) -> bool:
    """Whether an update reads a gradient as it comes, as its definition says."""
    operator = OPERATORS.get(node.target)
    if operator is None or operator.narrow_where is None:
        return False
    names = (name for name, _ in signature(node.target))
    return operator.narrow_where(dict(zip(names, bound(node.target, node.args, dict(node.kwargs)), strict=True)))


def _changes(program: Program, source: int, begin: int, end: int) -> bool:
    """Whether a node between two positions writes to the memory of a value."""
    memory = aliases(program)
    group = memory.group(source)
    return any(memory.group(i) == group for node in program.nodes[begin + 1 : end] for i in written(node))
