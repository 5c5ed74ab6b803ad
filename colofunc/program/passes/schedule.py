"""Schedule: when nodes of a local program run.

Two small passes that change order and nothing else:

    updates_early   an in-place update runs as soon as its gradient is there, so gradients do not all live at once
    overlap         a collective becomes a start, as early as its operand allows, and a wait just before the first use

A gather of stored state has its operand from the very beginning; starting all of them at once would hold the whole
model. `overlap` starts a collective earlier than it stands only as far as few others that were moved up are in flight.
A gradient that is sent is read when all are there, if the step clips by their norm; waiting for it then would hold what
is sent of the whole model. So it is waited for earlier where operands in flight would take more than a few do.
The order of collectives is part of the program, hence the same on all ranks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping

import attrs

from colofunc.program.aliases import Aliases, aliases
from colofunc.program.editor import Editor
from colofunc.program.facts import is_wire, kind_of, may_alias, written
from colofunc.program.ir import Node, Program, Ref
from colofunc.spec.layout import At

WAIT = "colofunc.wait"
_Stream = tuple[object, At | None]
IN_FLIGHT = 2
"""Operands that live on only because a collective in flight reads them may take so many times the largest of them."""


def updates_early(program: Program) -> Program:
    """Move in-place nodes up to right behind what they need: their operands, and the last reader of what they write.

    So do the scalars that updates read (step counts, learning rates), which stand behind the gradients in the trace,
    and casts that only this update reads: gradients in half precision would all wait for the last of them otherwise.
    """
    memory = aliases(program)
    casts = _casts(program)
    made: dict[int, int] = {}  # value -> the place its maker stands behind
    touched: dict[int, int] = {}  # memory group -> last node so far that read or wrote it
    wrote: dict[int, int] = {}  # memory group -> last node so far that wrote it
    place: list[tuple[int, int]] = []
    for index, node in enumerate(program.nodes):
        changed = {memory.group(id) for id in written(node)}
        at = index
        if (changed and not node.outs) or _is_scalar_work(program, node):
            chain = _chain(program, casts, node) if changed else []
            at = -1
            for moved in (node, *(program.nodes[cast] for cast in chain)):
                for id in moved.refs:
                    if casts.get(id) not in chain:
                        at = max(at, made.get(id, -1), wrote.get(memory.group(id), -1))
            for group in changed:
                at = max(at, touched.get(group, -1))
            for cast in chain:
                place[cast] = (min(at, place[cast][0]), cast)
        place.append((at, index))
        made.update(dict.fromkeys(node.results, at))
        for id in node.refs:
            touched[memory.group(id)] = index
        for group in changed:
            wrote[group] = index
    # A moved node stands behind node `at`: that node's own place is (at, at), and at < index.
    return program.by_place(place)


def _casts(program: Program) -> dict[int, int]:
    """What a cast makes for one reader alone -> the cast."""
    reads = Counter(program.outputs)
    for node in program.nodes:
        reads.update(node.refs)
    casts: dict[int, int] = {}
    for index, node in enumerate(program.nodes):
        if node.target != "aten._to_copy.default":
            continue
        out = node.outs[0]
        if out is not None and reads[out] == 1:
            casts[out] = index
    return casts


def _chain(program: Program, casts: dict[int, int], node: Node) -> list[int]:
    """The casts that end in an operand of a node and are read for nothing else."""
    chain = [casts[id] for id in node.refs if id in casts]
    for cast in chain:  # which grows meanwhile
        chain += [casts[id] for id in program.nodes[cast].refs if id in casts]
    return chain


def _is_scalar_work(program: Program, node: Node) -> bool:
    """Whether a node of the update only makes 0-dim values; it may run whenever its operands are there."""
    if node.phase != "update" or not node.outs or kind_of(node) is not None or may_alias(node) or written(node):
        return False
    return all(out is not None and program.values[out].shape == () for out in node.outs)


def overlap(
    program: Program, ahead: int = 2, ahead_bytes: int = 1 << 24, body: bool = False, ids: Iterator[int] | None = None
) -> Program:
    """Split collectives into starts and waits.

    `ahead`: how many collectives that were moved up may be in flight; more while their results are within
    `ahead_bytes`. `body`: of a loop, which takes outputs as soon as they are there: one that nobody else reads is
    waited for behind the next collective of its kind. `ids`: of new values.
    """
    made = program.made_at
    first = _taken(program, made) if body else _first_uses(program)
    wrote: dict[int, list[int]] = {}
    memory = aliases(program)
    for index, node in enumerate(program.nodes):
        for id in written(node):
            wrote.setdefault(memory.group(id), []).append(index)
    edit = Editor(program, ids)
    starts: dict[int, list[Node]] = {}  # in front of position k, with the packing that goes along
    waits: dict[At | None, _Waits] = {}  # of the ranks that run them
    # Groups along other axes have streams of their own, and other ranks have other streams: their collectives neither
    # count nor keep an order with these.
    hoisted: dict[_Stream, list[tuple[int, int]]] = {}  # first use and bytes of collectives that were moved up
    waited: set[int] = set()
    floor: dict[tuple[str, _Stream], int] = {}  # starts of one kind and stream keep their order
    for index, node in enumerate(program.nodes):
        if not is_wire(node) or node.target.endswith("_start"):
            continue
        (out,) = node.outs
        if out is None or out not in first:
            continue
        value = program.values[out]
        packing = _packing(program, made, node)  # moves up with what it is for
        needs = node.refs if packing is None else program.nodes[packing].refs
        ready = max((made.get(id, -1) for id in needs), default=-1) + 1
        for id in needs:
            for write in wrote.get(memory.group(id), ()):
                if write < index:
                    ready = max(ready, write + 1)
        if not waited.isdisjoint(node.refs):
            ready = index  # its operand is waited for just before its first use, which is here
        waited.add(out)
        # It must have ended before something is written over its operand.
        used = first[out]
        for id in node.refs:
            for write in wrote.get(memory.group(id), ()):
                if write > index:
                    used = min(used, write)
        stream = stream_of(node)
        flying = hoisted.setdefault(stream, [])
        gate = _gate(flying, value.nbytes, ahead, ahead_bytes)
        at = min(index, max(ready, gate, floor.get((node.target, stream), 0)))
        if at < index:
            flying.append((min(used, index), value.nbytes))
        floor[node.target, stream] = at
        fresh = edit.new(value)
        start = attrs.evolve(node, target=f"{node.target}_start", outs=(fresh,))
        wait = Node(WAIT, (Ref(fresh),), (), (out,), node.phase, node.path, node.line, node.note, on=node.on)
        # A start in front of its own pack takes the pack along, also where it only takes the pack's place.
        if packing is not None and at <= packing:
            starts.setdefault(at, []).append(program.nodes[packing])
            edit.drop(packing)
        starts.setdefault(at, []).append(start)
        of_ranks = waits.setdefault(node.on, _Waits())
        of_ranks.add(wait, used, index, _held_bytes(program, memory, made, index))
        edit.drop(index)
    # Waits first: the operand of a start may be what a wait at the same place delivers.
    waits_at: dict[int, list[Node]] = {}
    for of_ranks in waits.values():
        for position, nodes in of_ranks.by_position().items():
            waits_at.setdefault(position, []).extend(nodes)
    for index in sorted({*starts, *waits_at}):
        edit.insert(index, *waits_at.get(index, ()), *starts.get(index, ()))
    return edit.done()


def stream_of(collective: Node) -> _Stream:
    """The stream that a collective runs on: its axes, and which ranks run it."""
    return collective.args[1], collective.on


def waits_within(program: Program) -> bool:
    """Whether collectives of a program, or of a loop in it, were started and are waited for: then it is in its order."""
    return any(WAIT in each.targets for each in program.with_bodies())


@attrs.define(eq=False)
class _Wait:
    node: Node
    position: int  # in front of which it stands
    held_bytes: int  # of operands that live until then because of it


class _Waits:
    """Where each collective is waited for: in front of its first use, or earlier, for operands in flight not to take
    too much.
    """

    def __init__(self) -> None:
        self.all: list[_Wait] = []
        self.flying: deque[_Wait] = deque()  # those that hold operands, the oldest first
        self.flying_bytes = self.largest_bytes = 0

    def add(self, node: Node, used: int, index: int, held_bytes: int) -> None:
        """One that stands at `index` and is used at `used`: those before it are waited for right behind, as far as that
        is needed.
        """
        wait = _Wait(node, used, held_bytes)
        self.all.append(wait)
        if not held_bytes:
            return
        self.flying.append(wait)
        self.flying_bytes += held_bytes
        self.largest_bytes = max(self.largest_bytes, held_bytes)
        while self.flying[0].position <= index + 1 or self.flying_bytes > IN_FLIGHT * self.largest_bytes:
            oldest = self.flying.popleft()
            self.flying_bytes -= oldest.held_bytes
            oldest.position = min(oldest.position, index + 1)
            if not self.flying:
                return

    def by_position(self) -> dict[int, list[Node]]:
        found: dict[int, list[Node]] = {}
        for wait in self.all:
            found.setdefault(wait.position, []).append(wait.node)
        return found


def _held_bytes(program: Program, memory: Aliases, made: Mapping[int, int], index: int) -> int:
    """Bytes of the operands of a collective that were made in the program and that nobody reads behind it."""
    dying: dict[int, int] = {}  # memory group -> bytes
    for ref in program.nodes[index].refs:
        group = memory.group(ref)
        if group in made and memory.last_read(group) <= index and not memory.is_output(group):
            dying[group] = max(dying.get(group, 0), program.values[group].nbytes)
    return sum(dying.values())


def _packing(program: Program, made: Mapping[int, int], node: Node) -> int | None:
    """The node that does nothing but pack what a gather sends.

    None unless it reads only what the caller gave, or casts of that.
    """
    at = made.get(node.refs[0])
    if at is None or program.nodes[at].target != "colofunc.pack":
        return None
    given = set(program.inputs)
    for i in program.nodes[at].refs:
        maker = made.get(i)
        if maker is not None and program.nodes[maker].target == "aten._to_copy.default":
            i = program.nodes[maker].refs[0]
        if i not in given:
            return None
    return at


def _gate(hoisted: list[tuple[int, int]], nbytes: int, ahead: int, ahead_bytes: int) -> int:
    """The first position at which one more collective of `nbytes` may be in flight."""
    total = nbytes
    for many, (used, flying) in enumerate(reversed(hoisted), 1):
        total += flying
        if many >= ahead and total > ahead_bytes:
            return used
    return 0


def next_of_kind(program: Program) -> dict[int, int]:
    """Index of a collective -> of the next one of its kind and stream; len(nodes) for the last."""
    found: dict[int, int] = {}
    later: dict[tuple[str, _Stream], int] = {}
    for index in range(len(program.nodes) - 1, -1, -1):
        if is_wire(node := program.nodes[index]):
            kind = node.target, stream_of(node)
            found[index] = later.get(kind, len(program.nodes))
            later[kind] = index
    return found


def _taken(program: Program, made: Mapping[int, int]) -> dict[int, int]:
    """First uses in the body of a loop.

    An output that a collective delivers is used behind the next collective of its kind and stream.
    """
    first, after = _first_uses(program), next_of_kind(program)
    for out in program.outputs:
        if made.get(out) in after:
            first[out] = min(first[out], after[made[out]] + 1, len(program.nodes))
    return first


def _first_uses(program: Program) -> dict[int, int]:
    """Value id -> index of the first node that reads it; len(nodes) for outputs that no node reads."""
    first: dict[int, int] = dict.fromkeys(program.outputs, len(program.nodes))
    for index in range(len(program.nodes) - 1, -1, -1):
        for ref in program.nodes[index].refs:
            first[ref] = index
    return first
