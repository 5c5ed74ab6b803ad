"""Narrow gradients: an update reads a gradient in the dtype in which it was computed.

Problem: in mixed precision a gradient in bfloat16 is cast to float32, and only then updates a float32 parameter: six
bytes an element are read and written, and four held, for a number that the update could widen itself. Idea: where the
update is the only reader of the cast, it reads what was cast.

    %9 = _to_copy(%8: bf16 @host, dtype=f32)   adamw_(%1, %9, %2, %3, ...)     ->     adamw_(%1, %8: bf16 @host, %2, %3, ...)

Updates that run so say it where they are defined (`narrow_where`): Adam and AdamW without amsgrad, SGD without
dampening, Lion, LAMB's direction. On a GPU they do by a kernel of ours (`narrow_on_device`, `ext/cuda/cuda/update.cu`),
and only large parameters gain: small ones are updated in one call, which reads one dtype (`one_call`). A machine where
that kernel could not be compiled casts within the update, so it counts as a workspace.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import attrs

from colofunc.mesh import Mesh
from colofunc.ops.define import OPERATORS
from colofunc.ops.kernels import PlannedKernel, bound, signature
from colofunc.ops.update_narrow import is_narrow
from colofunc.program.aliases import aliases
from colofunc.program.editor import Editor
from colofunc.program.facts import is_cast, written
from colofunc.program.ir import Node, Program
from colofunc.program.passes.kernels import capability_on

LEAST_CAPABILITY = (8, 0)
"""Compute capability of the first cards with products in bfloat16, A100s."""
LARGE = 1 << 20
"""Elements of a parameter from which on memory takes longer than a call of its own."""


def narrow_gradients(program: Program) -> Program:
    """`program` without the casts on the host that `droppable_casts` finds."""
    edit = Editor(program)
    for index, cast in droppable_casts(program).items():
        if _all_in(program, "host", index, cast):
            _drop(edit, cast)
    return edit.done()


def narrow_updates(program: Program, mesh: Mesh) -> Program:
    """`program` without the casts of large gradients on a GPU, or itself where there are none."""
    capability = capability_on(mesh.topology)
    if capability is None or capability < LEAST_CAPABILITY:
        return program
    device, edit = mesh.topology.device, Editor(program)
    changed = False
    for index, cast in droppable_casts(program).items():
        has_kernel = OPERATORS[program.nodes[index].target].narrow_on_device
        if not has_kernel or _elements(program, index) < LARGE:
            continue
        if not _all_in(program, "device", index, cast):
            continue
        (source,), (result,) = program.nodes[cast].refs, program.nodes[cast].results
        narrow, wide = program.values[source], program.values[result]
        moved_bytes = narrow.nbytes + _moved_bytes(program, index)
        seconds = device.launch_s + moved_bytes / device.memory_bytes_per_s
        edit.change(index, kernel=PlannedKernel("narrow gradient", seconds, wide.nbytes))
        _drop(edit, cast)
        changed = True
    return edit.done() if changed else program


def _elements(program: Program, update: int) -> int:
    return prod(program.values[program.nodes[update].refs[0]].shape)


def _moved_bytes(program: Program, update: int) -> int:
    """What an update reads and writes beside its gradient, in bytes: most write over the parameter, LAMB's direction
    only reads it, and has results.
    """
    node, values = program.nodes[update], program.values
    into = written(node)
    moved_bytes = 2 * sum(values[id].nbytes for id in into) + sum(values[id].nbytes for id in node.results)
    param = node.refs[0]
    return moved_bytes if param in into else moved_bytes + values[param].nbytes


def _all_in(program: Program, tier: str, update: int, cast: int) -> bool:
    for node in (program.nodes[update], program.nodes[cast]):
        if any(program.values[id].tier != tier for id in (*node.refs, *node.results)):
            return False
    return True


def _drop(edit: Editor, cast: int) -> None:
    """Whoever reads what a node casts reads what was cast, under the same name."""
    program, node = edit.program, edit.program.nodes[cast]
    (source,), (wide,) = node.refs, node.results
    gradient = program.values[wide]
    edit.values[source] = attrs.evolve(program.values[source], name=gradient.name, role=gradient.role)
    edit.rename(wide, source)
    edit.drop(cast)


def droppable_casts(program: Program) -> Mapping[int, int]:
    """Position of an update -> position of the cast of its gradient, where it could read what is cast, and nobody else
    reads the cast.
    """
    found: dict[int, int] = {}
    for index, node in enumerate(program.nodes):
        if not _takes_narrow(node):
            continue
        param, gradient = node.refs[:2]
        cast = program.made_at.get(gradient)
        if cast is None or program.readers[gradient] != (index,) or gradient in program.outputs:
            continue
        made = program.nodes[cast]
        if not is_cast(made):
            continue
        values, source = program.values, made.refs[0]
        if values[param].dtype == values[gradient].dtype and is_narrow(values[param].dtype, values[source].dtype):
            if not changes_between(program, source, cast, index):
                found[index] = cast
    return found


def _takes_narrow(node: Node) -> bool:
    """Whether an update reads a gradient as it comes, as its definition says."""
    operator = OPERATORS.get(node.target)
    if operator is None or operator.narrow_where is None:
        return False
    names = (name for name, _ in signature(node.target))
    return operator.narrow_where(dict(zip(names, bound(node.target, node.args, dict(node.kwargs)), strict=True)))


def changes_between(program: Program, source: int, begin: int, end: int) -> bool:
    """Whether a node between two positions writes to the memory of a value."""
    memory = aliases(program)
    group = memory.group(source)
    return any(memory.group(id) == group for node in program.nodes[begin + 1 : end] for id in written(node))
