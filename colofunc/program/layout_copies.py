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
(`Software.flat`). Collectives that run in chunks bring each piece to where its product reads it. Software whose kernels
are by hand (`Software.fused`) lays out what it computes as it is read: of it only copies beside collectives count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache, lru_cache

import attrs
import torch

from colofunc.mesh import Mesh
from colofunc.mesh.software import CHUNKS
from colofunc.ops.kernels import COPY, PlannedKernel
from colofunc.ops.targets import is_view
from colofunc.program.beside_products import is_in_chunks
from colofunc.program.facts import WIRE, is_wire, rearrange_steps
from colofunc.program.ir import LOOP, Node, Program
from colofunc.program.result_storages import ResultStorage, StridedMeta, contiguous, rearranged, storages_of

REARRANGE, WAIT, SLICE = "colofunc.rearrange", "colofunc.wait", "aten.slice.Tensor"
WIRES = frozenset(f"colofunc.{kind}{end}" for kind in WIRE - {"all_gather_flat"} for end in ("", "_start"))
"""Collectives that want what they send to be contiguous; a gather of flat buffers takes them as they lie."""
SEEN = WIRES | {REARRANGE}
"""Without these there are no copies to be counted."""


def with_copies(program: Program, mesh: Mesh) -> Program:
    """A local program whose rearrangements have the seconds of their copies. Bodies of loops too."""
    found: dict[int, Node] = {}
    for index, node in enumerate(program.nodes if LOOP in program.targets else ()):
        if node.loop is not None:
            body = with_copies(node.loop.body, mesh)
            if body is not node.loop.body:
                found[index] = attrs.evolve(node, loop=attrs.evolve(node.loop, body=body))
    for index, copied in _copying(program, mesh).items():
        seconds = 0.0
        for id in copied:
            value = program.values[id]
            seconds += mesh.compute_s(0.0, 2.0 * value.nbytes, str(value.dtype), "elementwise")
        found[index] = attrs.evolve(program.nodes[index], kernel=PlannedKernel(COPY, seconds, 0))
    if not found:
        return program
    return program.with_nodes(found.get(index, node) for index, node in enumerate(program.nodes))


def _copying(program: Program, mesh: Mesh) -> dict[int, set[int]]:
    """Position of a node behind which copies stand -> the results that are copied.

    Such nodes make a copy, or make what is sent out of memory that is not contiguous.
    """
    if program.targets.isdisjoint(SEEN):
        return {}
    software = mesh.topology.software
    chunked, is_flat, by_hand = software.axes(CHUNKS), software.flat, software.fused
    nodes, lies = program.nodes, _Lies(program)
    makers = lies.makers
    found: dict[int, set[int]] = {}
    # This runs for every candidate of a plan, so most nodes are told by their target alone.
    for index, node in enumerate(nodes):
        target = node.target
        if only_describes(target):
            for out in node.outs:
                makers[out] = index
            if target != REARRANGE or (is_flat and lies.is_part(node.args[0].id)):
                continue
            if by_hand and not lies.was_brought(node.args[0].id):
                continue
            if not (chunked and lies.came_in_chunks(node.args[0].id, chunked)) and lies.is_copied(node):
                found[index] = set(node.results)
        elif target in WIRES:
            sent = node.args[0].id
            maker = makers.get(sent)
            if maker is not None and lies.has_gaps(sent) and not (chunked and is_in_chunks(node, program, chunked)):
                found.setdefault(maker, set()).add(sent)
    return {
        index: copied
        for index, copied in found.items()
        if nodes[index].kernel is None and _on_device(nodes[index], program)
    }


def _on_device(node: Node, program: Program) -> bool:
    return all(program.values[i].tier == "device" for i in (*node.refs, *node.results))


@cache
def only_describes(target: str) -> bool:
    """Whether an operator makes no memory, or a copy at most."""
    return target == REARRANGE or is_view(target)


@lru_cache(maxsize=1 << 14)
def _of_contiguous(
    pattern: str, names: tuple[str, ...], sizes: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[bool, bool]:
    """Of a rearrangement of what is contiguous: whether it copies, and whether what it gives has gaps."""
    home, _, _, meta = rearranged(contiguous(shape, torch.bfloat16), rearrange_steps(pattern, names, sizes, shape))
    return home < 0, _have_gaps(meta)


def _have_gaps(meta: StridedMeta) -> bool:
    shape, strides, dtype = meta
    dense = contiguous(shape, dtype)[1]
    return any(size > 1 and step != own for size, step, own in zip(shape, strides, dense, strict=True))


class _Lies(Mapping[int, StridedMeta]):
    """How values lie, worked out when they are asked for. `makers`: of values that only describe other memory, the
    position of the node that makes each, as far as the program was read."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.makers: dict[int | None, int] = {}
        self.known: dict[int, StridedMeta] = {}

    def __getitem__(self, id: int) -> StridedMeta:
        known = self.known.get(id)
        if known is None:
            known = self.known[id] = self._found(id)
        return known

    def __iter__(self) -> Iterator[int]:
        return iter(self.program.values)

    def __len__(self) -> int:
        return len(self.program.values)

    def is_copied(self, node: Node) -> bool:
        """Whether a rearrangement makes memory of its own."""
        ref, pattern, names, sizes = node.args
        if ref.id not in self.makers:
            return _of_contiguous(pattern, names, sizes, self.program.values[ref.id].shape)[0]
        return self._rearranged(node)[0] < 0

    def has_gaps(self, id: int) -> bool:
        """Whether a value that describes other memory is not contiguous."""
        node = self.program.nodes[self.makers[id]]
        if node.target == REARRANGE and node.args[0].id not in self.makers:
            ref, pattern, names, sizes = node.args
            return _of_contiguous(pattern, names, sizes, self.program.values[ref.id].shape)[1]
        return _have_gaps(self[id])

    def was_brought(self, id: int) -> bool:
        """Whether a value describes what a collective has brought."""
        return self._collective(id) is not None

    def came_in_chunks(self, id: int, chunked: frozenset[str]) -> bool:
        """Whether a value describes what a collective in chunks has brought."""
        collective = self._collective(id)
        return collective is not None and is_in_chunks(collective, self.program, chunked)

    def is_part(self, id: int) -> bool:
        """Whether a value describes a part of a gather of several tensors."""
        is_slice = False
        at = id
        while at in self.makers:
            node = self.program.nodes[self.makers[at]]
            is_slice = is_slice or node.target == SLICE
            at = node.refs[0]
        collective = self._collective(id)
        return is_slice and collective is not None and collective.target.startswith("colofunc.all_gather")

    def _collective(self, id: int) -> Node | None:
        """The collective whose result a value describes."""
        while id in self.makers:
            id = self.program.nodes[self.makers[id]].refs[0]
        node = self.program.makers.get(id)
        if node is not None and node.target == WAIT:
            node = self.program.makers.get(node.refs[0])
        return node if node is not None and is_wire(node) else None

    def _rearranged(self, node: Node) -> ResultStorage:
        ref, pattern, names, sizes = node.args
        return rearranged(self[ref.id], rearrange_steps(pattern, names, sizes, self.program.values[ref.id].shape))

    def _found(self, id: int) -> StridedMeta:
        value = self.program.values[id]
        if id in self.makers:
            node = self.program.nodes[self.makers[id]]
            # Parts of buffers and their rearrangements are most of them; the accountant knows the others.
            if node.target == REARRANGE:
                return self._rearranged(node)[3]
            if node.target == SLICE and len(node.args) < 5:
                return value.shape, self[node.args[0].id][1], value.dtype
            for out, made in zip(node.outs, storages_of(node, self.program, self), strict=True):
                if out == id and made is not None:
                    return made[3]
        return contiguous(value.shape, value.dtype)
