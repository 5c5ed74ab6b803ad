"""Saved activations in 8 bits: what forward makes and backward reads is kept packed, and widened in front of what reads
it there.

    %3 = gelu(%2)  %4 = linear(%3, %w)  ...  %9 = linear_dw(%g, %3)
    ->
    %3 = gelu(%2)  %5, %6 = pack_saved(%3)  %4 = linear(%3, %w)  ...  %7 = widen_saved(%5, %6)  %9 = linear_dw(%g, %7)

Problem: memory for activations is most of what a training step holds. Idea: the step is one program, so what is kept
for backward is seen in it: values that nodes of forward make and nodes of backward read. Forward reads the value as it
is, and so its outputs are the same to the bit; behind its last reader there the value is gone. As this is done in front
of every plan, whatever shards, recomputes or copies treats the packed tensors as any other.

A view that backward reads is made again of the widened value. It is widened for readers that stand near to one another
once, and for one far behind anew (`NEAR`), so that nothing lies wide in between.

What stays as it is: whole numbers and masks; what is small, or has no rows (`group_of`); what does not depend on the
batch (a weight in another dtype); what the step returns, or an update reads; statistics beside a larger result of their
operator (the logarithms of sums that attention keeps); and what backward reads before anything else that was kept, such
as the logarithms of probabilities of a loss, since it would be widened while nothing else has been freed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import torch

from colofunc.ops.saved_activations import PACK, WIDEN, ScaleGroups, group_of, scale_dtype_of
from colofunc.program.aliases import aliases
from colofunc.program.editor import Editor
from colofunc.program.facts import may_alias
from colofunc.program.ir import Node, Program, Ref, Value, computed_once, reading

NEAR = 24
"""Readers in backward with at most so many nodes between them share a widened value."""
ACTIVATIONS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
BACKWARD = "backward"
NOTE = "kept in 8 bits for backward"


@attrs.frozen
class _Saved:
    """One value that is kept. `read`: positions of the nodes of backward that read it or a view of it, ascending.

    `last`: that of the last node of forward that does. `packed`: in front of which node it is packed.
    """

    value: Value
    groups: ScaleGroups
    last: int
    packed: int
    read: tuple[int, ...]


def save_packed(program: Program, numbers: torch.dtype) -> Program:
    """`program` (global) with the activations that backward reads kept as `numbers` (int8 or float8 e4m3)."""
    found = _kept(program)
    if not found:
        return program
    edit = Editor(program)
    instead: dict[int, dict[int, int]] = {}  # position of a reader -> what it reads in place of what
    for saved in found:
        _write(program, edit, saved, numbers, instead)
    for position, names in instead.items():
        edit.replace(position, reading(program.nodes[position], names))
    return edit.done()


def _write(
    program: Program, edit: Editor, saved: _Saved, numbers: torch.dtype, instead: dict[int, dict[int, int]]
) -> None:
    """The node that packs a value in forward, and those that widen it in front of its readers in backward."""
    value, groups = saved.value, saved.groups
    behind = program.nodes[saved.packed - 1]
    beside = behind if value.id in behind.results else program.nodes[saved.packed]
    codes_dtype = torch.int8 if numbers is torch.int8 else torch.uint8
    count = value.shape[groups.dim] // groups.width
    scale_dtype = scale_dtype_of(value.dtype)
    codes = edit.new(value, dtype=codes_dtype, name="")
    scale = edit.new(value, shape=(*value.shape[: groups.dim], count), dtype=scale_dtype, name="")
    packed = attrs.evolve(
        beside, target=PACK, args=(Ref(value.id), groups.dim, groups.width, numbers), kwargs=(), outs=(codes, scale)
    )
    edit.insert(saved.packed, attrs.evolve(packed, note=NOTE))
    for stretch in _stretches(saved.read):
        first = program.nodes[stretch[0]]
        wide = edit.new(value, name="")
        widened = attrs.evolve(
            first, target=WIDEN, args=(Ref(codes), Ref(scale), numbers, value.dtype), kwargs=(), outs=(wide,)
        )
        edit.insert(stretch[0], attrs.evolve(widened, note=NOTE))
        there = {value.id: wide}
        for position in stretch:
            for ref in program.nodes[position].refs:
                for view in _views_to(program, value.id, ref, there):
                    edit.insert(stretch[0], _taken_again(program, edit, view, there))
                if ref in there:
                    instead.setdefault(position, {})[ref] = there[ref]


def _taken_again(program: Program, edit: Editor, view: Node, there: dict[int, int]) -> Node:
    """A view of forward of what is there now in place of its operand; its results join that."""
    view = reading(view, there)
    there.update({out: edit.new(program.values[out], name="") for out in view.results})
    outs = tuple(None if out is None else there[out] for out in view.outs)
    return attrs.evolve(view, outs=outs, phase=BACKWARD, note=NOTE)


def _stretches(read: Sequence[int]) -> Iterator[list[int]]:
    """Positions of readers, those that share a widened value together."""
    stretch = [read[0]]
    for position in read[1:]:
        if position - stretch[-1] > NEAR:
            yield stretch
            stretch = []
        stretch.append(position)
    yield stretch


def _views_to(program: Program, base: int, id: int, there: dict[int, int]) -> list[Node]:
    """The views that make a value of forward from its base, but for those that are there.

    () where it is no view of it.
    """
    chain: list[Node] = []
    while id not in there:
        node = program.makers.get(id)
        if node is None or not may_alias(node) or node.phase == BACKWARD or aliases(program).group(id) != base:
            return []
        chain.append(node)
        id = node.refs[0]
    return chain[::-1]


# ---- which values ----


def bytes_kept(program: Program) -> tuple[int, int, int]:
    """Of a program (global) behind `save_packed`: how many values are kept packed, their bytes, and what they would
    take as they are.
    """
    count = packed_bytes = wide_bytes = 0
    for node in program.nodes:
        if node.target == PACK:
            count += 1
            wide_bytes += program.values[node.refs[0]].nbytes
            packed_bytes += sum(program.values[out].nbytes for out in node.results)
    return count, packed_bytes, wide_bytes


def _kept(program: Program) -> list[_Saved]:
    """The values that are kept packed: those that lie while another one is read in backward, which is then gone."""
    every = [saved for saved in map(_Reads(program).of, _makers(program)) if saved is not None]
    kept: list[_Saved] = []
    for saved in every:
        if any(_frees_before(other, saved) for other in every):
            kept.append(saved)
    return kept


def _frees_before(other: _Saved, saved: _Saved) -> bool:
    """Whether backward comes to another kept value before this one, and forward is done with this one no later than
    with the other.
    """
    return other.read[0] < saved.read[0] and other.last >= saved.last


def _makers(program: Program) -> list[int]:
    """Positions of nodes of forward that make memory of their own which depends on the batch."""
    batch = {id for id in program.inputs if program.values[id].role == "batch"}
    found = []
    for position, node in enumerate(program.nodes):
        if batch.isdisjoint(node.refs):
            continue
        batch.update(node.results)
        if node.phase != BACKWARD and not may_alias(node):
            found.append(position)
    return found


class _Reads:
    """Who reads which memory of a program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.groups = aliases(program)
        self.readers = _readers_of_groups(program)

    def of(self, position: int) -> _Saved | None:
        """What is kept of what a node makes; None: nothing that is packed."""
        node = self.program.nodes[position]
        if node.phase != "forward" or not node.results:
            return None
        value = max((self.program.values[out] for out in node.results), key=lambda value: value.nbytes)
        if value.dtype not in ACTIVATIONS or self.groups.is_output(value.id):
            return None
        groups = group_of(value.shape)
        readers = self.readers.get(value.id, ())
        phases = {self.program.nodes[reader].phase for reader in readers}
        if groups is None or BACKWARD not in phases or "update" in phases:
            return None
        read = tuple(reader for reader in readers if self.program.nodes[reader].phase == BACKWARD)
        forward = [reader for reader in readers if reader not in read]
        return _Saved(value, groups, max(forward, default=position), self._packed(position, forward, read), read)

    def _packed(self, made: int, forward: Sequence[int], read: Sequence[int]) -> int:
        """In front of which node a value is packed: of those of forward whose backward reads it the last, or behind its
        maker.

        So what one part of forward (a stage) hands to the next one is packed by that which keeps it for its own
        backward.
        """
        nodes = self.program.nodes
        origins = {(nodes[reader].path, nodes[reader].line) for reader in read}
        keep = [reader for reader in forward if (nodes[reader].path, nodes[reader].line) in origins]
        return max(keep, default=made + 1)


@computed_once
def _readers_of_groups(program: Program) -> dict[int, tuple[int, ...]]:
    """First value of some memory -> positions of all nodes that read it or a view of it, ascending.

    Views that forward makes are no readers. Those that backward makes are, and who reads them is none: they become
    views of another value.
    """
    groups = aliases(program)
    found: dict[int, list[int]] = {}
    for position, node in enumerate(program.nodes):
        if may_alias(node) and node.phase == "forward":
            continue
        for group in dict.fromkeys(groups.group(ref) for ref in node.refs if not _is_late_view(program, ref)):
            found.setdefault(group, []).append(position)
    return {group: tuple(positions) for group, positions in found.items()}


def _is_late_view(program: Program, id: int) -> bool:
    """Whether backward has made a value as a view."""
    maker = program.makers.get(id)
    return maker is not None and maker.phase == BACKWARD and may_alias(maker)
