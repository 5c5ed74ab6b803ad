"""Collectives that run in chunks beside products, where the software of a machine does so.

Problem: frameworks for large models cut the gathers and reduce-scatters of tensor parallelism in pieces, so that the
links work while the product computes what they bring or take. The executors here run them whole; a plan that is
compared with such a run has to count what is left of them. Idea: a pass that changes nothing of a program but the
seconds of those collectives (`Node.kernel`, where the clock looks first).

    in_chunks(program, mesh, rule_of)      # of the axes that `Topology.with_software(collectives={"tp": "chunks"})` names

Note [In chunks]. A gather over n ranks whose result a product reads, and a reduce-scatter of what a product makes, are
cut in n pieces of which each runs beside the product of another: one piece has nothing to run beside, and what takes
longer than the product has not either. So the device waits for max(t / n, t - product) in place of t. All other
collectives stay whole.
"""

from __future__ import annotations

from collections.abc import Mapping

from colofunc.mesh import Mesh
from colofunc.mesh.software import CHUNKS
from colofunc.ops.kernels import PlannedKernel
from colofunc.program.cost import RuleOf, collective_of, node_s
from colofunc.program.editor import Editor
from colofunc.program.facts import is_product
from colofunc.program.ir import Node, Program

MOST_STEPS = 4
"""At most this many views, changes of layout, casts, sums and waits stand between a collective and its product."""


def in_chunks(program: Program, mesh: Mesh, rule_of: RuleOf) -> Program:
    """A local program with what the device waits for collectives that run in chunks. Bodies of loops too."""
    axes = mesh.topology.software.axes(CHUNKS)
    return _chunked(program, mesh, rule_of, axes) if axes else program


def _chunked(program: Program, mesh: Mesh, rule_of: RuleOf, axes: frozenset[str]) -> Program:
    edit = Editor(program)
    for index, node in enumerate(program.nodes):
        if node.loop is not None:
            edit.change_body(index, _chunked(node.loop.body, mesh, rule_of, axes))
            continue
        seconds = _waited_s(node, program, mesh, rule_of, axes)
        if seconds is not None:
            edit.change(index, kernel=PlannedKernel("in chunks", seconds, 0))
    return edit.done()


def is_in_chunks(node: Node, program: Program, axes: frozenset[str]) -> bool:
    """Whether a collective brings its pieces to products, or takes them from there, one by one; see Note [In chunks]."""
    collective = collective_of(node, program.values)
    if collective is None:
        return False
    kind, along, _, _ = collective
    if kind not in ("all_gather", "reduce_scatter") or not axes.issuperset(along):
        return False
    return bool(_products(node, program, behind=kind == "all_gather"))


def _waited_s(node: Node, program: Program, mesh: Mesh, rule_of: RuleOf, axes: frozenset[str]) -> float | None:
    """Of a collective that runs in chunks; None for anything else."""
    collective = collective_of(node, program.values)
    if collective is None or node.kernel is not None:  # one that has its seconds was looked at before
        return None
    kind, _, ranks, _ = collective
    if not is_in_chunks(node, program, axes):
        return None
    products = _products(node, program, behind=kind == "all_gather")
    whole_s = node_s(node, program.values, mesh, rule_of)
    longest_s = max(node_s(product, program.values, mesh, rule_of) for product in products)
    return max(whole_s / ranks, whole_s - longest_s)


def _products(node: Node, program: Program, behind: bool) -> list[Node]:
    """The products that read a result, or make an operand, with no other product in between."""
    found: dict[int, Node] = {}
    near = [node]
    for _ in range(MOST_STEPS):
        further: list[Node] = []
        for one in near:
            for other in _neighbours(one, program, behind):
                if is_product(other.target):
                    found[id(other)] = other
                else:
                    further.append(other)
        near = further
    return list(found.values())


def _neighbours(node: Node, program: Program, behind: bool) -> list[Node]:
    if not behind:
        return [program.makers[ref] for ref in node.refs if ref in program.makers]
    readers: Mapping[int, tuple[int, ...]] = program.readers
    return [program.nodes[k] for out in node.results for k in readers.get(out, ())]
