"""Parameters that forward and backward read in 8 bits, so that they are gathered so: ZeRO-3's gathers take a quarter of
float32's bytes.

    %9 = linear(%x, %p)   ->   %5, %6 = pack_saved(%p)  %7 = widen_saved(%5, %6)  %9 = linear(%x, %7)

Problem: a rank that has a part of each parameter is sent the others two or three times a step, in the dtype that they
are kept in. What is sent can be narrower; but rounded on the way, a parameter would be another one wherever it is cut
differently. Idea: the traced program rounds, in front of every plan. A group of 32 to 128 numbers of a row has a scale,
and is never cut (`ops/saved_activations.py`), so that numbers are those of one device on every mesh; and rounding is
row by row, so that a plan may round a shard, gather a byte a number and widen behind that. The update reads the
parameter as it is; gradients are those for the rounded one, straight through the rounding.

Forward and backward round for themselves: what is gathered for one is not kept for the other.

Source: Wang et al. 2023, ZeRO++ (2306.10209), section 3.1, "quantized weight communication", which has blocks of the
flat shard.
"""

from __future__ import annotations

from functools import partial

import attrs
import torch

from colofunc.ops.saved_activations import LEAST_GROUP, PACK, WIDEN, ScaleGroups, group_of, scale_dtype_of
from colofunc.program.editor import Editor
from colofunc.program.ir import Program, Ref, Value, reading
from colofunc.program.passes.packed_gathers import GATHER, REARRANGE, gathered_dim, joining_pattern

NOTE = "parameters are read in 8 bits"
PACKED = (torch.int8, torch.uint8)


EVEN_ROWS = 64
"""A parameter whose rows so many ranks do not share evenly (a vocabulary of 50,257) may lie along its columns
instead."""


def groups_of(shape: tuple[int, ...]) -> ScaleGroups | None:
    """The groups of a parameter, from its shape alone; None where it is small.

    Small groups where columns may be cut.
    """
    groups = group_of(shape)
    if groups is None or shape[0] % EVEN_ROWS == 0 or groups.dim != len(shape) - 1 or groups.width % LEAST_GROUP:
        return groups
    return ScaleGroups(groups.dim, LEAST_GROUP)


def read_rounded(program: Program, numbers: torch.dtype) -> Program:
    """`program` (global) whose forward and backward read large parameters as `numbers` (int8 or float8 e4m3)."""
    edit = Editor(program)
    instead: dict[int, dict[int, int]] = {}  # position of a reader -> what it reads in place of what
    for id in program.inputs:
        value = program.values[id]
        groups = groups_of(value.shape)
        if value.role != "param" or not value.dtype.is_floating_point or groups is None:
            continue
        first: dict[str, int] = {}
        for position in program.readers.get(id, ()):
            phase = program.nodes[position].phase
            if phase == "update":
                continue
            if phase not in first:
                first[phase] = _write(program, edit, position, value, groups, numbers)
            instead.setdefault(position, {})[id] = first[phase]
    for position, names in instead.items():
        edit.replace(position, reading(program.nodes[position], names))
    return edit.done()


def _write(
    program: Program, edit: Editor, position: int, value: Value, groups: ScaleGroups, numbers: torch.dtype
) -> int:
    """A parameter rounded and widened in front of a reader; the widened value."""
    reader = program.nodes[position]
    like = attrs.evolve(value, name="", role="activation")
    codes = edit.new(like, dtype=torch.int8 if numbers is torch.int8 else torch.uint8)
    scales = (*value.shape[: groups.dim], value.shape[groups.dim] // groups.width)
    scale = edit.new(like, shape=scales, dtype=scale_dtype_of(value.dtype))
    wide = edit.new(like)
    packed = attrs.evolve(
        reader,
        target=PACK,
        args=(Ref(value.id), groups.dim, groups.width, numbers),
        kwargs=(),
        outs=(codes, scale),
        note=NOTE,
        loop=None,
    )
    edit.insert(position, packed)
    edit.insert(
        position, attrs.evolve(packed, target=WIDEN, args=(Ref(codes), Ref(scale), numbers, value.dtype), outs=(wide,))
    )
    return wide


# ---- in one rank's program ----


def rounded_in_front(program: Program) -> Program:
    """`program` (local) with shards rounded in place of what is gathered of them, where all that reads this rounds it.

        %4 = all_gather(%p, ('dp',), 4)  %5 = rearrange(%4, 'a b c -> (a b) c')  %6, %7 = pack_saved(%5, 1, 128, int8)
        ->
        %8, %9 = pack_saved(%p, 1, 128, int8)  %6 = rearrange(all_gather(%8), ...)  %7 = rearrange(all_gather(%9), ...)

    When a parameter is gathered, and whether for each phase anew, stays as it was planned for the parameter.
    """
    while True:
        found = next(
            (each for each in map(partial(_Gathered.of, program), range(len(program.nodes))) if each is not None), None
        )
        if found is None:
            return program
        program = found.written()


@attrs.frozen
class _Gathered:
    """A gather along one dim with what rounds its result.

    It stands at `gather`; the node at `join` puts its parts together, and those at `packs` round that, all alike.
    """

    program: Program
    gather: int
    join: int
    dim: int
    packs: tuple[int, ...]

    @staticmethod
    def of(program: Program, gather: int) -> _Gathered | None:
        """What follows a node; None where that is something else than a gather that is rounded."""
        node = program.nodes[gather]
        if node.target != GATHER or node.results[0] in program.outputs:
            return None
        readers = program.readers.get(node.results[0], ())
        if len(readers) != 1 or program.nodes[readers[0]].target != REARRANGE:
            return None
        (join,) = readers
        whole = program.nodes[join].results[0]
        packs = program.readers.get(whole, ())
        if whole in program.outputs or not packs or any(program.nodes[pack].target != PACK for pack in packs):
            return None
        part = program.values[node.refs[0]]
        dim = gathered_dim(program.nodes[join].args[1], len(part.shape))
        first = program.nodes[packs[0]]
        if dim is None or any(program.nodes[pack].args != first.args for pack in packs) or node.on != first.on:
            return None
        cut, width = first.args[1:3]
        # A group lies within dim `cut` and reaches over all dims behind it.
        if dim > cut or (dim == cut and part.shape[dim] % width):
            return None
        return _Gathered(program, gather, join, dim, packs)

    def written(self) -> Program:
        program, edit = self.program, Editor(self.program)
        nodes, values = program.nodes, program.values
        gather, join, first = nodes[self.gather], nodes[self.join], nodes[self.packs[0]]
        part = values[gather.refs[0]]
        _, cut, width, numbers = first.args
        shapes = (part.shape, (*part.shape[:cut], part.shape[cut] // width))
        narrow = []
        for shape, out in zip(shapes, first.results, strict=True):
            narrow.append(edit.new(values[out], shape=shape, layout=None))
        rounded = attrs.evolve(
            first, args=(gather.args[0], cut, width, numbers), outs=tuple(narrow), phase=gather.phase
        )
        edit.replace(self.gather, rounded)
        joined = []
        for id, shape, out in zip(narrow, shapes, first.results, strict=True):
            stacked = edit.new(values[out], shape=(int(gather.args[2]), *shape), layout=None)
            joined.append(attrs.evolve(gather, args=(Ref(id), *gather.args[1:]), outs=(stacked,), note=NOTE))
            pattern = joining_pattern(len(shape), self.dim)
            joined.append(attrs.evolve(join, args=(Ref(stacked), pattern, (), ()), outs=(out,), note=NOTE))
        edit.replace(self.join, *joined)
        for pack in self.packs:
            edit.drop(pack)
            for own, out in zip(nodes[pack].results, first.results, strict=True):
                if own != out:
                    edit.rename(own, out)
        return edit.done()


def gathered_bytes(program: Program) -> tuple[int, int]:
    """Of one rank's program: (bytes that it is sent of parameters in 8 bits, the same in the dtype that they have)."""
    narrow = wide = 0
    widths: list[int] = []
    for node in program.nodes:
        if node.target == PACK and node.note == NOTE:
            widths.append(program.values[node.refs[0]].dtype.itemsize)
    width = max(widths, default=4)
    for node in program.nodes:
        if node.loop is not None:
            inside = gathered_bytes(node.loop.body)
            narrow, wide = narrow + node.loop.trips * inside[0], wide + node.loop.trips * inside[1]
        elif node.target.startswith("colofunc.all_gather") and program.values[node.refs[0]].dtype in PACKED:
            sent = (int(node.args[2]) - 1) * program.values[node.refs[0]].nbytes
            narrow, wide = narrow + sent, wide + width * sent
    return narrow, wide
