"""Copies that changes of layout make, as seconds of the device.

Problem: what a collective delivers seldom lies as its reader wants it. A gather along dim 1 delivers the parts one
behind the other, and weights that were gathered as one buffer lie in strides; bringing them in place is a kernel that
reads and writes all of it, and so is making contiguous what is sent. Idea: a pass that changes nothing of a program but
the seconds of such rearrangements (`Node.kernel`, where the clock looks first).

    with_copies(program, mesh)      # rearrange "n b s d -> b (n s) d" takes twice its bytes by the memory's rate

Whether a rearrangement copies depends on strides. Those of what only describes other memory are followed; everything
else is taken to be contiguous, which the accountant (`program.memory`) knows better and takes longer to ask.

Other frameworks do the same: torch's functional collectives concatenate the parts of a gather along another dim than
the first, and those that a reduce-scatter sends (torch/distributed/_functional_collectives.py, `all_gather_tensor`,
`reduce_scatter_tensor`), and FSDP2 splits what it has gathered into its parameters (`foreach_all_gather_copy_out` in
torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py). FSDP1 does not: its parameters are views of a flat one
(`Software.flat`). Collectives that run in chunks bring each piece to where its product reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs

from colofunc.mesh import Mesh
from colofunc.mesh.software import CHUNKS
from colofunc.ops.kernels import COPY, Planned
from colofunc.program.facts import is_wire, kind_of
from colofunc.program.ir import Node, Program
from colofunc.program.memory import Meta, contiguous, results_of
from colofunc.spec.strategies import FREE

REARRANGE, WAIT = "colofunc.rearrange", "colofunc.wait"


def with_copies(program: Program, mesh: Mesh) -> Program:
    """A local program whose rearrangements have the seconds of their copies. Bodies of loops too."""
    found: dict[int, Node] = {}
    for index, node in enumerate(program.nodes):
        if node.loop is not None:
            body = with_copies(node.loop.body, mesh)
            if body is not node.loop.body:
                found[index] = attrs.evolve(node, loop=attrs.evolve(node.loop, body=body))
    for index in _copying(program, mesh):
        node = program.nodes[index]
        (out,) = node.results
        value = program.values[out]
        seconds = mesh.compute_s(0.0, 2.0 * value.nbytes, str(value.dtype), "elementwise")
        found[index] = attrs.evolve(node, kernel=Planned(COPY, seconds, 0))
    if not found:
        return program
    return program.with_nodes(found.get(index, node) for index, node in enumerate(program.nodes))


def _copying(program: Program, mesh: Mesh) -> list[int]:
    """Positions of the nodes behind which a copy stands: those that make one, and those that make what is sent out of
    memory that is not contiguous."""
    chunked = mesh.topology.software.axes(CHUNKS)
    is_flat = mesh.topology.software.flat
    lies = _Lies(program)
    found: dict[int, None] = {}
    for index, node in enumerate(program.nodes):
        if node.kernel is not None:
            continue
        if node.target == REARRANGE:
            source = lies.source(node.refs[0])
            if _is_in_chunks(source, chunked) or (is_flat and lies.is_part(node.refs[0])):
                continue
            made = results_of(node, program, lies)[0]
            if made is not None and made[0] < 0:
                found[index] = None
        elif is_wire(node) and node.target != "colofunc.all_gather_flat" and not _is_in_chunks(node, chunked):
            maker = program.made_at.get(node.refs[0])
            if maker is not None and lies.only_describes(program.nodes[maker]) and lies.has_gaps(node.refs[0]):
                found[maker] = None
    return [index for index in found if _on_device(program.nodes[index], program)]


def _is_in_chunks(node: Node | None, chunked: frozenset[str]) -> bool:
    """Whether a node is a collective that brings its pieces, or takes them, one by one."""
    return bool(chunked) and node is not None and is_wire(node) and chunked.issuperset(node.args[1])


def _on_device(node: Node, program: Program) -> bool:
    return all(program.values[i].tier == "device" for i in (*node.refs, *node.results))


class _Lies(Mapping[int, Meta]):
    """How values lie, worked out when they are asked for."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.known: dict[int, Meta] = {}

    def __getitem__(self, id: int) -> Meta:
        known = self.known.get(id)
        if known is None:
            known = self.known[id] = self._found(id)
        return known

    def __iter__(self) -> Iterator[int]:
        return iter(self.program.values)

    def __len__(self) -> int:
        return len(self.program.values)

    def only_describes(self, node: Node) -> bool:
        """Whether a node makes no memory, or a copy at most."""
        return node.target in (REARRANGE, WAIT) or node.target.rsplit(".", 1)[0] in FREE

    def has_gaps(self, id: int) -> bool:
        """Whether a value is not contiguous."""
        shape, strides, dtype = self[id]
        known = contiguous(shape, dtype)[1]
        return any(size > 1 and step != own for size, step, own in zip(shape, strides, known, strict=True))

    def source(self, id: int) -> Node | None:
        """The node that made the memory that a value describes."""
        node = self.program.makers.get(id)
        while node is not None and self.only_describes(node):
            node = self.program.makers.get(node.refs[0])
        return node

    def is_part(self, id: int) -> bool:
        """Whether a value describes a part of a gather of several tensors."""
        node = self.program.makers.get(id)
        is_part = False
        while node is not None and self.only_describes(node):
            is_part = is_part or node.target == "aten.slice.Tensor"
            node = self.program.makers.get(node.refs[0])
        kind = None if node is None else kind_of(node)
        return is_part and kind is not None and kind[0] == "all_gather"

    def _found(self, id: int) -> Meta:
        node, value = self.program.makers.get(id), self.program.values[id]
        if node is not None and self.only_describes(node):
            for out, made in zip(node.outs, results_of(node, self.program, self), strict=True):
                if out == id and made is not None:
                    return made[3]
        return contiguous(value.shape, value.dtype)
