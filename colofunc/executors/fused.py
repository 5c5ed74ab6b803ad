"""What compiled segments cost: the clock of a program whose elementwise operators are fused.

Problem: the clock counts every operator of a program by the bytes that it reads and writes, and a compiler leaves out
what only its own kernels would read. Idea: within a piece that is compiled as a whole (`segments.pieces`) operators
that can be fused are grouped by the products between them: what is made and read between the same two products stays on
the chip, everything else is written once and read once by each group. A group is one launch. Products are as they were:
the compiler calls the library for them.

    norm linear silu mul linear add  ->  [norm] linear [silu mul] linear [add]

The program that comes back has the seconds on its nodes, where the clock looks first (`Node.kernel`): those of a group
on its first node. A norm is one group although it reads its rows twice, because they fit on the chip.

What of it is written to memory: `unwritten`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from colofunc.executors.segments import pieces
from colofunc.mesh import Mesh
from colofunc.ops.kernels import COPY, FUSED, PlannedKernel
from colofunc.program.beside_products import in_chunks
from colofunc.program.cost import RuleOf, node_work
from colofunc.program.editor import Editor
from colofunc.program.facts import is_product, written
from colofunc.program.ir import Node, Program, Value
from colofunc.program.layout_copies import with_copies
from colofunc.program.passes.one_call import with_one_launch

NAME = "compiled"
FREE = PlannedKernel(FUSED, 0.0, 0)


def fused(program: Program, mesh: Mesh, rule_of: RuleOf) -> Program:
    """A local program with what its operators take once it is compiled. Bodies of loops too."""
    edit = Editor(program)
    for index, node in enumerate(program.nodes):
        if node.loop is not None:
            edit.change_body(index, fused(node.loop.body, mesh, rule_of))
    for piece in pieces(program, mesh.topology.software.uncompiled):
        inside = range(piece.first, piece.first + piece.count)
        where = {id(program.nodes[index]): index for index in inside}
        for group in fusion_groups(piece.nodes):
            seconds = _group_s(group, piece.outs, piece.nodes, program.values, mesh, rule_of)
            for place, node in enumerate(group):
                kernel = FREE if place or seconds == 0.0 else PlannedKernel(FUSED, seconds, 0)
                edit.change(where[id(node)], kernel=kernel)
    return edit.done()


def as_executed(program: Program, executor: str | None, mesh: Mesh, rule_of: RuleOf) -> Program:
    """A program with the seconds of copies between layouts, of updates that are called at once, and of fused operators,
    where the executor fuses them.

    Also with those of other software that is planned for.
    """
    fuses = executor == NAME or mesh.topology.software.fused
    copied = with_copies(program, mesh)
    executed = fused(copied, mesh, rule_of) if fuses else copied
    return with_one_launch(in_chunks(executed, mesh, rule_of), mesh, rule_of)


def fusion_groups(nodes: Sequence[Node]) -> list[list[Node]]:
    """The operators of a piece that are no products.

    They are grouped by how many products stand before them on the longest way to them.
    """
    depth: dict[int, int] = {}  # of a value: products up to it
    found: dict[int, list[Node]] = {}
    for node in nodes:
        here = max((depth.get(ref, 0) for ref in node.refs), default=0)
        if is_product(node.target):
            here += 1
        else:
            found.setdefault(here, []).append(node)
        for id in (*node.results, *written(node)):
            depth[id] = here
    return list(found.values())


def _group_s(
    group: Sequence[Node],
    outs: Sequence[int],
    nodes: Sequence[Node],
    values: Mapping[int, Value],
    mesh: Mesh,
    rule_of: RuleOf,
) -> float:
    """Seconds of one kernel that reads what comes from outside of a group and writes what is read there."""
    inside = {id(node) for node in group}
    made = {out for node in group for out in node.results}
    read_elsewhere = set(outs)
    for node in nodes:
        if id(node) not in inside:
            read_elsewhere.update(node.refs)
    moved = flops = 0.0
    dtype = "float32"
    read: set[int] = set()
    changed: set[int] = set()
    for node in group:
        if node.kernel is None or node.kernel.name != COPY:
            work, own_bytes, dtype_here = node_work(node, values, rule_of)
            if not own_bytes:  # a view
                continue
            flops, dtype = flops + work, dtype_here
        read.update(node.refs)
        changed.update(written(node))
        moved += sum(values[out].nbytes for out in node.results if out in read_elsewhere)
    # What comes from outside is read once, and what is written over several times is written once.
    moved += sum(values[outer].nbytes for outer in (*(read - made), *(changed - made)))
    return mesh.compute_s(flops, moved, dtype) if moved else 0.0
