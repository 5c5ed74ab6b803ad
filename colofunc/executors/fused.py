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
from colofunc.ops.kernels import COPY, FUSED, Planned
from colofunc.program.beside_products import in_chunks
from colofunc.program.cost import RuleOf, node_work
from colofunc.program.editor import Editor
from colofunc.program.facts import is_product, written
from colofunc.program.ir import Node, Program, Value
from colofunc.program.layout_copies import with_copies

NAME = "compiled"
FREE = Planned(FUSED, 0.0, 0)


def fused(program: Program, mesh: Mesh, rule_of: RuleOf) -> Program:
    """A local program with what its operators take once it is compiled. Bodies of loops too."""
    edit = Editor(program)
    for index, node in enumerate(program.nodes):
        if node.loop is not None:
            edit.change_body(index, fused(node.loop.body, mesh, rule_of))
    for piece in pieces(program, mesh.topology.software.uncompiled):
        where = {
            id(node): k for k, node in enumerate(program.nodes[piece.first : piece.first + piece.count], piece.first)
        }
        for group in groups(piece.nodes):
            seconds = _group_s(group, piece.outs, piece.nodes, program.values, mesh, rule_of)
            for place, node in enumerate(group):
                kernel = FREE if place or seconds == 0.0 else Planned(FUSED, seconds, 0)
                edit.change(where[id(node)], kernel=kernel)
    return edit.done()


def as_executed(program: Program, executor: str | None, mesh: Mesh, rule_of: RuleOf) -> Program:
    """A program with the seconds of copies between layouts, of fused operators, where the executor fuses them, and with
    what other software is planned for.
    """
    fuses = executor == NAME or mesh.topology.software.fused
    copied = with_copies(program, mesh)
    executed = fused(copied, mesh, rule_of) if fuses else copied
    return in_chunks(executed, mesh, rule_of)


def groups(nodes: Sequence[Node]) -> list[list[Node]]:
    """The operators of a piece that are no products, by how many products stand before them on the longest way to them.
    """
    depth: dict[int, int] = {}  # of a value: products up to it
    found: dict[int, list[Node]] = {}
    for node in nodes:
        here = max((depth.get(i, 0) for i in node.refs), default=0)
        if is_product(node.target):
            here += 1
        else:
            found.setdefault(here, []).append(node)
        for i in (*node.results, *written(node)):
            depth[i] = here
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
    made = {i for node in group for i in node.results}
    read_elsewhere = {i for node in nodes if id(node) not in inside for i in node.refs} | set(outs)
    moved = flops = 0.0
    dtype, read, changed = "float32", set[int](), set[int]()
    for node in group:
        if node.kernel is None or node.kernel.name != COPY:
            work, own_bytes, dtype_here = node_work(node, values, rule_of)
            if not own_bytes:  # a view
                continue
            flops, dtype = flops + work, dtype_here
        read |= {i for i in node.refs if i not in made}
        moved += sum(values[i].nbytes for i in node.results if i in read_elsewhere)
        changed |= {i for i in written(node) if i not in made}
    moved += sum(values[i].nbytes for i in (*read, *changed))  # what is written over several times is written once
    return mesh.compute_s(flops, moved, dtype) if moved else 0.0
