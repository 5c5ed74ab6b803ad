"""Packed gathers: a quantized weight that lies sharded is gathered packed, and widened behind the gather.

Problem: a weight that is widened for a product (see `packed_reads`) may be widened on its shard and gathered wide,
which takes fewer collectives. In a loop over microbatches all widened weights then lie beside the loop, where they were
gathered once. Idea: widening is row by row, and column group by column group, so it gives the same bits before a gather
as behind it. The packed tensors are gathered in its place, a fraction of the bytes, and the loop widens one weight at a
time (`fold.fold`).

    %3 = int8_dequantize(%1, %2)    %4 = all_gather(%3, ('dp',), 4)    %5 = rearrange(%4, 'a b c -> (a b) c')
    ->
    %6 = all_gather(%1, ('dp',), 4)    %7 = rearrange(%6, 'a b c -> (a b) c')
    %8 = all_gather(%2, ('dp',), 4)    %9 = rearrange(%8, 'a b -> (a b)')         %5 = int8_dequantize(%7, %9)

Where the widened shard is turned in front of its gather, as backward reads it, the turn goes behind the gather too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import attrs

from colofunc.ops.quantized import DEQUANTIZE
from colofunc.ops.targets import RESHAPES
from colofunc.program.editor import Editor
from colofunc.program.ir import Node, Program, Ref
from colofunc.program.passes.packed_reads import CAST, DIVISION, TURNS
from colofunc.spec.layout import Layout, axes_of, make_layout

GATHER, REARRANGE = "colofunc.all_gather", "colofunc.rearrange"


def gathered_packed(program: Program, widening: Collection[str] = DEQUANTIZE, is_shared: bool = False) -> Program:
    """`program` (local) with packed tensors gathered in place of widened ones, where only the gather reads what was
    widened.

    widening: the operators that give a wide tensor of packed ones, the numbers first, which lie alike along each dim
    that they have. is_shared: also where others read the widened shard, which stays for them.
    """
    edit = Editor(program)
    parts: dict[tuple[Any, ...], Ref] = {}
    chains: list[_Gathered] = []
    for index, node in enumerate(program.nodes):
        if node.target in widening:
            chain = _Gathered.behind(program, index, is_shared)
            if chain is not None:
                chains.append(chain)
    # Parts are gathered where the first chain is written that reads them, so chains are written in the order of their
    # places.
    chains.sort(key=lambda chain: chain.rearrange)
    for chain in chains:
        chain.write(edit, parts)
    return edit.done()


def _only_reader(program: Program, id: int) -> int | None:
    """The index of the one node that reads a value."""
    readers = program.readers.get(id, ())
    return readers[0] if len(readers) == 1 and id not in program.outputs else None


def _only_gather(program: Program, id: int) -> int | None:
    """The index of the one gather of a value that others read, too."""
    gathers = [reader for reader in program.readers.get(id, ()) if program.nodes[reader].target == GATHER]
    return gathers[0] if len(gathers) == 1 else None


@attrs.frozen
class _Gathered:
    """A weight that is widened and gathered.

    `chain`: indices of the nodes from its `dequantize` to the last before the gather.
    """

    program: Program
    chain: tuple[int, ...]
    gather: int
    rearrange: int
    dims: tuple[int, ...]  # of what each node of the chain gives: the one along which it is gathered

    @property
    def dim(self) -> int:
        """Of the matrix as it is packed, along which it is gathered."""
        return self.dims[0]

    @staticmethod
    def behind(program: Program, index: int, is_shared: bool = False) -> _Gathered | None:
        """What follows the `dequantize` at `index`; None where that is no gather, or one of another kind."""
        chain = [index]
        while True:
            made = program.nodes[chain[-1]].results[0]
            reader = _only_reader(program, made)
            if reader is None and is_shared:
                reader = _only_gather(program, made)
            if reader is None:
                return None
            if program.nodes[reader].target == GATHER:
                break
            chain.append(reader)
        put = _only_reader(program, program.nodes[reader].results[0])
        if put is None or program.nodes[put].target != REARRANGE:
            return None
        part = program.values[program.nodes[reader].refs[0]]
        dims = _dims_back(program, chain, gathered_dim(program.nodes[put].args[1], len(part.shape)))
        found = None if dims is None else _Gathered(program, tuple(chain), reader, put, dims)
        return found if found is not None and found._fits() else None

    def _fits(self) -> bool:
        """Whether each packed tensor lies along the dim as the widened one does: over axes of which the minor ones are
        gathered.
        """
        nodes, values = self.program.nodes, self.program.values
        first, gathered = nodes[self.chain[0]], tuple(nodes[self.gather].args[1])
        whole = values[nodes[self.rearrange].results[0]].layout
        if whole is None or first.on != nodes[self.gather].on:
            return False
        axes = (*axes_of(whole.dims[self.dims[-1]]), *gathered)
        for id in (*first.refs, first.results[0]):
            layout = values[id].layout
            if layout is None or layout.is_padded:
                return False
            if self.dim < len(layout.dims) and (
                axes_of(layout.dims[self.dim]) != axes or not _in_blocks(layout, self.dim)
            ):
                return False
        return True

    def write(self, edit: Editor, parts: dict[tuple[Any, ...], Ref]) -> None:
        """The packed tensors gathered, and the weight widened from them. parts: what is gathered already."""
        nodes, values = self.program.nodes, self.program.values
        first, gather = nodes[self.chain[0]], nodes[self.gather]
        refs = [self._part(edit, parts, part) for part in first.refs]
        last = nodes[self.rearrange]
        stays = _only_reader(self.program, nodes[self.chain[-1]].results[0]) is None
        args: tuple[Any, ...] = (*refs, *first.args[len(refs) :])
        for index, dim in zip(self.chain, self.dims, strict=True):
            node = nodes[index]
            at_end = index == self.chain[-1]
            (own,) = node.results
            out = last.results[0] if at_end else edit.new(values[own], shape=self._shape(own, dim), layout=None)
            if node.target in RESHAPES:
                args = (args[0], self._shape(own, dim))
            edit.insert(self.rearrange, attrs.evolve(node, args=args, outs=(out,), on=gather.on))
            if not stays:
                edit.drop(index)
            if not at_end:
                following = nodes[self.chain[self.chain.index(index) + 1]]
                args = (Ref(out), *following.args[1:])
        edit.drop(self.gather)
        edit.drop(self.rearrange)

    def _shape(self, id: int, dim: int) -> tuple[int, ...]:
        """Of a value of the chain, behind the gather along its dim `dim`."""
        shape = list(self.program.values[id].shape)
        shape[dim] *= self.program.nodes[self.gather].args[2]
        return tuple(shape)

    def _part(self, edit: Editor, parts: dict[tuple[Any, ...], Ref], id: int) -> Ref:
        """A packed tensor as it is read behind the gather."""
        nodes, value = self.program.nodes, self.program.values[id]
        gather = nodes[self.gather]
        assert value.layout is not None, "it fits"
        if self.dim >= len(value.shape):
            return Ref(id)  # a scale of rows, where columns are gathered
        key = (id, self.dim, gather.args[1], gather.phase, gather.on)
        if key in parts:
            return parts[key]
        times = gather.args[2]
        pattern = joining_pattern(len(value.shape), self.dim)
        whole = list(value.shape)
        whole[self.dim] *= times
        stacked = edit.new(value, shape=(times, *value.shape), layout=None, role="activation", of=None)
        out = edit.new(
            value,
            shape=tuple(whole),
            layout=_without(value.layout, self.dim, gather.args[1]),
            role="activation",
            of=None,
        )
        edit.insert(self.rearrange, attrs.evolve(gather, args=(Ref(id), *gather.args[1:]), outs=(stacked,)))
        put = attrs.evolve(nodes[self.rearrange], args=(Ref(stacked), pattern, (), ()), outs=(out,))
        edit.insert(self.rearrange, put)
        parts[key] = Ref(out)
        return parts[key]


def _dims_back(program: Program, chain: Sequence[int], last: int | None) -> tuple[int, ...] | None:
    """The dim `last` of what a chain gives, as it is a dim of what each of its nodes gives.

    None where one of them mixes it with others.
    """
    dims = [last]
    for index, before in pairwise(reversed(chain)):
        dims.insert(0, _dim_before(program, before, index, dims[0]))
    known = tuple(dim for dim in dims if dim is not None)
    return known if len(known) == len(chain) else None


def _dim_before(program: Program, before: int, index: int, dim: int | None) -> int | None:
    """The dim `dim` of what a node gives, as it is a dim of the widened weight that it reads.

    None where parts along it give others.

    A cast leaves it, a turn moves it; a view and a division by numbers of columns leave rows only.
    """
    node = program.nodes[index]
    widened, made = program.nodes[before].results[0], node.results[0]
    if dim is None or not node.refs or node.refs[0] != widened:
        return None
    old, new = program.values[widened].shape, program.values[made].shape
    if node.target == CAST:
        return dim
    if node.target in TURNS:
        return _turn(node, len(old))[dim]
    if dim > 0:
        return None
    if node.target == DIVISION:
        by_columns = (
            len(node.refs) == 2 and program.values[node.refs[1]].shape == old[1:] and node.refs[1] in program.inputs
        )
        return 0 if by_columns else None
    return 0 if node.target in RESHAPES and old[:1] == new[:1] else None


def _turn(node: Node, count: int) -> list[int]:
    """The dims of what a node of TURNS reads, in the order in which it gives them."""
    order = list(range(count))
    if node.target == "aten.permute.default":
        return [dim % count for dim in node.args[1]]
    one, other = (0, count - 1) if node.target == "aten.t.default" else (dim % count for dim in node.args[1:3])
    order[one], order[other] = order[other], order[one]
    return order


def gathered_dim(pattern: str, dims: int) -> int | None:
    """The dim along which what an all-gather has stacked in front is joined: "a b c -> (a b) c" is 0; None: in another
    way.
    """
    return next((dim for dim in range(min(2, dims)) if pattern == joining_pattern(dims, dim)), None)


def joining_pattern(dims: int, dim: int) -> str:
    """The pattern that joins dim 0 of a stack with dim `dim` of its tensors of so many dims, in front of it."""
    names = [chr(ord("a") + k) for k in range(dims + 1)]
    after: list[str] = names[1:]
    after[dim] = f"(a {after[dim]})"
    return f"{' '.join(names)} -> {' '.join(after)}"


def _in_blocks(layout: Layout, dim: int) -> bool:
    """Whether each rank has one run of a dim."""
    return all(axis is not None for _, axis in layout.dims[dim][:-1])


def _without(layout: Layout, dim: int, gathered: Sequence[str]) -> Layout:
    """The layout of what is gathered along a dim, over axes that are the minor ones there."""
    kept = [(size, axis) for size, axis in layout.dims[dim] if axis is not None and axis not in gathered]
    dims = list(layout.dims)
    dims[dim] = (*kept, (layout.shape[dim] // prod(size for size, _ in kept), None))
    return make_layout(tuple(dims), layout.shape, layout.pending, layout.tier, layout.scheme, layout.at)
