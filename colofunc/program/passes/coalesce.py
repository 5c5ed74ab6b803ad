"""When collectives and what depends on them run: reduce early, update late.

Problem: lowering converts a value where its consumer stands, so every gradient waits unreduced for the update at the
end of the step: all gradients are held whole, and all their communication comes at once, when there is nothing left to
overlap it with. Idea: a collective that makes its operand smaller (or no larger, the operand dying with it) moves up to
right behind the operand.

    dw_1  dw_0 ... | reduce_scatter(dw_0) adamw  reduce_scatter(dw_1) adamw
        ->  dw_1 reduce_scatter(dw_1)  dw_0 reduce_scatter(dw_0) ... | adamw adamw

The program is functional here, so any order in which operands come first gives the same values. The order is part of
the program, hence the same on all ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from math import inf

from colofunc.program.aliases import Aliases, aliases
from colofunc.program.facts import is_wire, kind_of, may_alias, written
from colofunc.program.ir import Node, Program
from colofunc.program.passes.loop import change_bodies
from colofunc.program.passes.schedule import next_of_kind, stream_of

_REDUCES = frozenset({"reduce_scatter", "all_reduce"})
ALONE_BYTES = 1 << 20
"""Smallest operand whose second reduction moves up. The first reduction of a smaller one waits in its queue for longer
than it takes, and small ones that are left to the end go together (`passes.buckets`). A constant: how long it waits
depends on what else is queued, which the latency of a link does not say, and the order of a program is chosen before
its machine is asked."""


def reduce_early(program: Program) -> Program:
    """Move reductions, and the layout moves that prepare them, up to right behind their operands.

    In the body of a loop so does what its node gathers over the trips.
    """
    return _early(change_bodies(program, lambda body: _early(body, gathered=True)))


def _early(program: Program, gathered: bool = False) -> Program:
    made, readers = program.made_at, program.readers
    outputs = set(program.outputs)
    chains: list[list[int]] = []
    for index, node in enumerate(program.nodes):
        ends = _is_reduction(node) or (gathered and _is_move(node) and node.outs[0] in outputs)
        if not ends or not _only_reader(node, readers, outputs):
            continue
        chain = [index]
        along = _goes_along if _is_reduction(node) else _is_move
        at = made.get(node.refs[0], -1)
        while at >= 0 and along(program.nodes[at]) and _only_reader(program.nodes[at], readers, outputs):
            chain.insert(0, at)
            at = made.get(program.nodes[at].refs[0], -1)
        chains.append(chain)
    return program.reordered(program.nodes[k] for k in _order(program, chains))


def _order(program: Program, chains: Sequence[list[int]]) -> list[int]:
    """Each chain up to its first reduction goes behind its operand, a second one behind the operand of a later chain,
    and so on.

    A reduction of what another one delivers waits for it, and the device with it. So there has to be work in between:
    of later chains those count whose operand is at least half as large, such as another weight's and not that of the
    bias beside it.
    """
    operands = {chain[0]: program.nodes[chain[0]].refs[0] for chain in chains}
    behind = sorted((program.made_at.get(id, -1), program.values[id].nbytes) for id in operands.values())
    place = {k: (k, 0, k) for k in range(len(program.nodes))}  # in the order of what nodes stand behind
    for chain in chains:
        operand = operands[chain[0]]
        at, nbytes = program.made_at.get(operand, -1), program.values[operand].nbytes
        for many, part in enumerate(_parts(program, chain)):
            if many:
                later = (other for other, size in behind[bisect_right(behind, (at, inf)) :] if 2 * size >= nbytes)
                at = next(later, part[0]) if nbytes >= ALONE_BYTES else part[0]
            if at < part[0]:
                place.update({k: (at, 1 + many, k) for k in part})
            else:  # it stays, and what reads it stands behind all of it
                at = part[-1]
    return sorted(place, key=lambda k: place[k])


def _parts(program: Program, chain: Sequence[int]) -> list[list[int]]:
    """A chain behind each of its reductions."""
    parts: list[list[int]] = [[]]
    for k in chain:
        parts[-1].append(k)
        if _is_reduction(program.nodes[k]):
            parts.append([])
    return [part for part in parts if part]


def _is_reduction(node: Node) -> bool:
    return (kind_of(node) or ("", False))[0] in _REDUCES


def _goes_along(node: Node) -> bool:
    """Whether a node in front of a reduction moves up with it: what prepares it, and another one, as where ranks in a
    box sum first.
    """
    return _is_move(node) or _is_reduction(node)


def _is_move(node: Node) -> bool:
    """Whether a node only prepares a reduction: a layout move, or the cast to the dtype that sums are taken in."""
    return node.target in ("colofunc.rearrange", "aten._to_copy.default") and len(node.refs) == 1


def _only_reader(node: Node, readers: Mapping[int, Sequence[int]], outputs: set[int]) -> bool:
    (operand,) = node.refs
    return len(readers[operand]) == 1 and operand not in outputs


def delay_updates(program: Program, lag: int = 2) -> Program:
    """Move in-place updates of what a collective delivers behind the next `lag` collectives along its axes, which then
    overlap it.

    For executors whose collectives are asynchronous; what an update writes stays unread and unwritten in between.
    Collectives along other axes (those of tensor parallelism, of which a block has many) have a stream of their own,
    and say nothing of how far this one has come.
    """
    memory = aliases(program)
    made, touches = program.made_at, _Touches(program, memory)
    wires_of: dict[object, list[int]] = {}
    for index, node in enumerate(program.nodes):
        if is_wire(node):
            wires_of.setdefault(stream_of(node), []).append(index)
    place: list[tuple[int, bool]] = []
    for index, node in enumerate(program.nodes):
        at = index
        if written(node) and not node.outs:
            sources = [made.get(memory.group(ref), -1) for ref in node.refs]
            last = max((source for source in sources if source >= 0 and is_wire(program.nodes[source])), default=None)
            if last is not None:
                wires = wires_of[stream_of(program.nodes[last])]
                beyond = bisect_right(wires, last) + lag - 1
                at = touches.free_until(index, wires[beyond] if beyond < len(wires) else len(program.nodes) - 1)
        place.append((at, at != index))
    return program.by_place(place)


class _Touches:
    """Where memory is read and written, by group and in order.

    Nobody scans a program for each of thousands of nodes.
    """

    def __init__(self, program: Program, memory: Aliases) -> None:
        self.program, self.memory = program, memory
        self.reads: dict[int, list[int]] = {}
        self.writes: dict[int, list[int]] = {}
        for index, node in enumerate(program.nodes):
            for group in {memory.group(ref) for ref in node.refs}:
                self.reads.setdefault(group, []).append(index)
            for group in {memory.group(id) for id in written(node)}:
                self.writes.setdefault(group, []).append(index)

    def free_until(self, index: int, end: int) -> int:
        """The last node up to `end` behind which node `index` may run instead of where it stands."""
        node, group = self.program.nodes[index], self.memory.group
        later = [_first_behind(self.reads.get(group(id), ()), index) for id in written(node)]
        later += [_first_behind(self.writes.get(group(ref), ()), index) for ref in node.refs]
        first = min((position for position in later if position is not None), default=None)
        return max(index, end) if first is None or first > end else first - 1


def _first_behind(positions: Sequence[int], index: int) -> int | None:
    at = bisect_right(positions, index)
    return positions[at] if at < len(positions) else None


def delay_views(program: Program) -> Program:
    """Move views of what a collective delivers down to their first reader: until then nobody waits for it.

    Where somebody does (`colofunc.wait`), that was decided.
    """
    memory = aliases(program)
    made, touches = program.made_at, _Touches(program, memory)
    place = [(index, 1) for index in range(len(program.nodes))]
    readers: dict[int, tuple[int, int]] = {}  # value -> place of its first reader
    for index in range(len(program.nodes) - 1, -1, -1):
        node = program.nodes[index]
        if may_alias(node) and not written(node) and not is_wire(node) and node.target != "colofunc.wait" and node.refs:
            source = made.get(memory.group(node.refs[0]), -1)
            first = min((readers[out] for out in node.outs if out in readers), default=None)
            if source >= 0 and is_wire(program.nodes[source]) and first is not None:
                free = touches.free_until(index, first[0] - 1)
                place[index] = (free + 1, 0) if free > index else (index, 1)
        for ref in node.refs:
            readers[ref] = min(readers.get(ref, place[index]), place[index])
    return program.by_place(place)


def delay_outputs(body: Program) -> Program:
    """Move views of what a collective delivers, of which a loop takes nothing but outputs, behind the next one of its
    kind.

    What is computed until then overlaps it: a loop takes an output where it stands.
    """
    memory, outputs = aliases(body), set(body.outputs)
    made, touches = body.made_at, _Touches(body, memory)
    after = next_of_kind(body)
    read = body.readers
    place = [(index, 0) for index in range(len(body.nodes))]
    moved: set[int] = set()
    for index in range(len(body.nodes) - 1, -1, -1):
        node = body.nodes[index]
        if not (may_alias(node) and not written(node) and not is_wire(node) and node.refs):
            continue
        source = made.get(memory.group(node.refs[0]), -1)
        ends = all((out in outputs or out in read) and moved.issuperset(read.get(out, ())) for out in node.results)
        if source >= 0 and is_wire(body.nodes[source]) and ends:
            moved.add(index)
            place[index] = (touches.free_until(index, min(after[source], len(body.nodes) - 1)), 1)
    return body.by_place(place)
