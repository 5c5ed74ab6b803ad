"""Memory: live bytes of one rank, per tier, at every position of a local program.

Problem: whether a step fits must be known before it runs, and to the byte, or a budget is a guess. Idea: follow
storages, not values. A view lives in its operand's storage, an in-place update makes none, a collective makes a buffer;
a storage is held from the node that makes it to the last node that needs a value in it. Which storage a result lies in
says `result_storages`.

    report = memory(local)
    report.peak_bytes["device"]; report.timeline["device"][k]     # while node k runs: its operands and results too
    print(report)                                                 # what is alive at the peak, and which line made it

Inputs and constants count from beginning to end, because the caller holds them. What an operator holds for itself is
counted where its kernel says it, on the machine that the plan is made for (`passes.kernels`). `tests/live_bytes.py`
measures the same numbers on the simulated mesh, but for these. A collective between its start and its wait holds its
operand and its result; on real ranks (`sent=True`) also a copy of an operand that is not contiguous, and a pipeline's
messages from one action before they are received. A compiler leaves values unwritten, and a compiled function holds its
operands until it returns: both as `fusion` says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import attrs
import numpy as np

from colofunc.program.facts import is_wire, kind_of, lifetimes
from colofunc.program.ir import Loop, Node, Program, Timetable
from colofunc.program.memory_report import KINDS, LinesByKind, Live, kinds_of, place_text
from colofunc.program.memory_report import MemoryReport as MemoryReport
from colofunc.program.passes.loop import gathered_at, last_uses, parts_that_read
from colofunc.program.passes.reuse import added_in_place, own_outputs_of_parts
from colofunc.program.places import RECEIVE
from colofunc.program.post_validation import kept_bytes, validates_late
from colofunc.program.result_storages import StridedMeta, contiguous, storages_of, without_data


@attrs.frozen
class Fused:
    """What a compiler changes of one program.

    `unwritten`: values that no kernel writes, and the bytes that are written in place of each.

    `last`: until when each value is held. `inner_bytes`: what operators, by their position, keep that is no value of
    the program.
    """

    unwritten: Mapping[int, int] = MappingProxyType({})
    last: Mapping[int, int] = MappingProxyType({})
    inner_bytes: Mapping[int, int] = MappingProxyType({})


Fusion = Callable[[Program, Mapping[int, int]], Fused]
"""What a compiler makes of a program, or of a loop's body, and of the last node that needs each value in it."""


@attrs.define
class Storage:
    """A piece of memory, held from node `born` to node `dies` (-1 and the number of nodes: the caller's)."""

    nbytes: int
    tier: str
    value: int  # the first value that lives in it
    born: int
    dies: int
    inside: Live | None = None  # of a storage in the body of a loop, alive at the body's peak
    kind: str = ""  # where it is not that of its value
    body: MemoryReport | None = None  # of the loop that it is inside


def memory(program: Program, sent: bool = False, fusion: Fusion | None = None) -> MemoryReport:
    """Live bytes of one rank at every position of a local program (or a global one: then of one device).

    A loop is one position: what its body holds at its peak, beside what it reads and gathers. sent: count what real
    ranks copy in order to send it, while it is in flight (all of the operand; a backend may copy the parts for others
    only), and what they make room for before it is received. fusion: what a compiler leaves out and holds longer.
    """
    last = lifetimes(program)
    storages, makers, metas = _storages(program, last, sent=sent, fusion=fusion)
    if sent:
        storages += sent_copies(program, metas)
    _gathered_inside(program, storages)
    if validates_late(program):
        nbytes, value = kept_bytes(program), program.inputs[0]
        storages.append(Storage(nbytes, "device", value, -1, len(program.nodes), kind="kept copies"))
    return _report(program, storages, makers)


def _gathered_inside(program: Program, storages: Sequence[Storage]) -> None:
    """What a loop with a timetable gathers is counted within it from its first part on, and behind it here."""
    for index, node in enumerate(program.nodes):
        if node.loop is None or not _is_one_ranks(node.loop.cut_by):
            continue
        for storage in storages:
            if storage.born == index and storage.value in node.outs and storage.inside is None:
                storage.born = index + 1


def _is_one_ranks(timetable: Timetable | None) -> bool:
    return timetable is not None and len(timetable.table.rows) == 1


@attrs.frozen(eq=False)
class StorageMap:
    """Which storage each value of a program lies in.

    `base_of`: the operand that a view or a result in place is a part of.
    """

    storages: tuple[Storage, ...]
    home: Mapping[int, int]
    base_of: Mapping[int, int]
    metas: Mapping[int, StridedMeta]


def lies(program: Program) -> StorageMap:
    """Where the values of a program lie, storages in the order in which they are made."""
    home: dict[int, int] = {}
    base_of: dict[int, int] = {}
    storages, _, metas = _storages(program, lifetimes(program), None, home, base_of)
    return StorageMap(tuple(storages), home, base_of, metas)


def memory_of_body(
    body: Program, given: Mapping[int, StridedMeta], added: Collection[int] = ()
) -> tuple[StorageMap, tuple[int, ...]]:
    """Where the values of a loop's body lie, and what it holds on the device at each node beside its inputs, which are
    `given`.

    added: outputs that are counted with what gathers them (`reuse.added_in_place`).
    """
    home: dict[int, int] = {}
    base_of: dict[int, int] = {}
    storages, makers, metas = _storages(body, last_uses(body), given, home, base_of)
    _count_with_the_sum(body, added, storages, home)
    report = _report(body, [*storages, *sent_copies(body, metas)], makers)
    return StorageMap(tuple(storages), home, base_of, metas), report.timeline["device"]


def _count_with_the_sum(
    body: Program, added: Collection[int], storages: Sequence[Storage], home: Mapping[int, int]
) -> None:
    """These outputs are no memory of their own: the first trip's is the sum, and others are added to it without being
    made.
    """
    for place in added:
        storages[home[body.outputs[place]]].nbytes = 0


def sent_copies(program: Program, metas: Mapping[int, StridedMeta]) -> list[Storage]:
    """Contiguous copies of the operands of started collectives, from the start to the wait. metas: of its values, as
    `lies` has them.
    """
    last = program.last_uses
    copies: list[Storage] = []
    for index, node in enumerate(program.nodes):
        kind = kind_of(node)
        if kind is None or not kind[1] or not is_wire(node):
            continue
        value, started = program.values[node.refs[0]], node.outs[0]
        if not without_data(metas[value.id]).is_contiguous():
            end = index if started is None else last.get(started, index)
            copies.append(Storage(value.nbytes, value.tier, value.id, index, end, kind="collective buffers"))
    return copies


def _report(
    program: Program, storages: list[Storage], makers: Mapping[int, Node], kinds: Mapping[int, str] | None = None
) -> MemoryReport:
    """kinds: of values, where they are known."""
    count = max(1, len(program.nodes))
    if kinds is None:
        kinds = kinds_of(program)
    tiers = sorted({storage.tier for storage in storages} | {"device"})
    row_of = {kind: row for row, kind in enumerate(KINDS)}
    changes = {tier: _Changes() for tier in tiers}
    for storage in storages:
        if not storage.kind:
            storage.kind = kinds.get(storage.value, "other") if storage.inside is None else storage.inside.kind
        row, changed = row_of[storage.kind], changes[storage.tier]
        changed.add(row, max(0, storage.born), storage.nbytes)
        changed.add(row, min(storage.dies, count - 1) + 1, -storage.nbytes)
    peak: dict[str, int] = {}
    timeline: dict[str, tuple[int, ...]] = {}
    peak_at: dict[str, int] = {}
    by_kind: dict[str, LinesByKind] = {}
    alive: dict[str, tuple[Live, ...]] = {}
    places: dict[str, str] = {}
    for tier in tiers:
        by_kind[tier] = LinesByKind(_lines(changes[tier], count))
        total = by_kind[tier].rows.sum(axis=0)
        at = int(total.argmax())
        timeline[tier], peak_at[tier], peak[tier] = tuple(total.tolist()), at, int(total[at])
        alive[tier] = tuple(_alive(program, storages, makers, tier, at))
        places[tier] = place_text(program, at)
    bodies = {storage.born: storage.body for storage in storages if storage.body is not None}
    return MemoryReport(peak, timeline, peak_at, by_kind, alive, places, bodies)


@attrs.frozen(eq=False)
class _Changes:
    """What becomes more or less: the row of its kind, the position, and bytes more from there on."""

    rows: list[int] = attrs.field(factory=list)
    positions: list[int] = attrs.field(factory=list)
    nbytes: list[int] = attrs.field(factory=list)

    def add(self, row: int, position: int, nbytes: int) -> None:
        self.rows.append(row)
        self.positions.append(position)
        self.nbytes.append(nbytes)


def _lines(changes: _Changes, count: int) -> np.ndarray:
    """(kinds, count) bytes of each kind at each position."""
    more = np.zeros(len(KINDS) * (count + 1), dtype=np.int64)
    rows, positions = np.array(changes.rows, dtype=np.int64), np.array(changes.positions, dtype=np.int64)
    np.add.at(more, rows * (count + 1) + positions, np.array(changes.nbytes, dtype=np.int64))  # in one dim it is fast
    return np.asarray(np.cumsum(more.reshape(len(KINDS), count + 1)[:, :-1], axis=1))


def _alive(program: Program, storages: list[Storage], makers: Mapping[int, Node], tier: str, at: int) -> list[Live]:
    """What is alive at a position, largest first."""
    alive: list[Storage] = []
    for storage in storages:
        if storage.tier == tier and storage.nbytes and storage.born <= at <= max(storage.dies, storage.born):
            alive.append(storage)
    alive.sort(key=lambda storage: -storage.nbytes)
    return [_live(program, storage, makers) for storage in alive]


def _live(program: Program, storage: Storage, makers: Mapping[int, Node]) -> Live:
    if storage.inside is not None:
        return storage.inside
    value = program.values[storage.value]
    if storage.kind == "workspaces":
        user = program.nodes[storage.born]
        kernel = "" if user.kernel is None else f" ({user.kernel.name})"
        return Live(f"{user.target}{kernel}", storage.nbytes, (), "", user.line, user.path, storage.kind)
    layout = value.layout.text() if value.layout is not None else ""
    node = makers.get(value.id)
    if node is None:
        return Live(value.name or f"%{value.id}", storage.nbytes, value.shape, layout, "", "", storage.kind)
    name = value.name or f"%{value.id} {node.target}"
    return Live(name, storage.nbytes, value.shape, layout, node.line, node.path, storage.kind)


def _storages(
    program: Program,
    last: Mapping[int, int],
    given: Mapping[int, StridedMeta] | None = None,
    where: dict[int, int] | None = None,
    base_of: dict[int, int] | None = None,
    sent: bool = False,
    fusion: Fusion | None = None,
) -> tuple[list[Storage], dict[int, Node], dict[int, StridedMeta]]:
    """Every storage with its lifetime, the node that makes each value, and how values lie.

    `given`: inputs counted elsewhere.

    `where` and `base_of` are filled as in `StorageMap`.
    """
    fused = Fused(last=last) if fusion is None else fusion(program, last)
    # storages of which no kernel writes a value -> what is written instead
    last, unwritten = fused.last, dict[int, int]()
    end = len(program.nodes)
    storages: list[Storage] = []
    where = {} if where is None else where  # value -> storage
    base_of = {} if base_of is None else base_of
    metas: dict[int, StridedMeta] = {}
    makers: dict[int, Node] = {}
    for id in program.inputs:
        value, constant = program.values[id], program.constants.get(id)
        if given is not None:
            nbytes, metas[id] = 0, given[id]
        elif constant is not None:
            nbytes, metas[id] = constant.untyped_storage().nbytes(), (value.shape, constant.stride(), value.dtype)
        else:
            nbytes, metas[id] = value.nbytes, contiguous(value.shape, value.dtype)
        where[id] = len(storages)
        storages.append(Storage(nbytes, value.tier, id, -1, end))
    for index, node in enumerate(program.nodes):
        if node.loop is not None:
            storages += _inside(node, node.loop, metas, index, sent, fusion)
        own_bytes = fused.inner_bytes.get(index, 0)
        if node.kernel is not None:
            own_bytes += node.kernel.workspace_bytes
        if own_bytes:
            storages.append(Storage(own_bytes, "device", node.refs[0], index, index, kind="workspaces"))
        made = storages_of(node, program, metas)
        fresh: dict[int, int] = {}  # result whose new storage others share -> that storage
        for out, result in zip(node.outs, made, strict=True):
            if out is None or result is None:
                continue
            operand, share, nbytes, meta = result
            if operand >= 0:
                home = where[node.refs[operand]]
                base_of[out] = node.refs[operand]
            elif share in fresh:
                home = fresh[share]
            else:
                home = fresh[share] = len(storages)
                storages.append(Storage(nbytes, program.values[out].tier, out, index, index))
                unwritten[home] = fused.unwritten.get(out, 0)
            where[out], metas[out], makers[out] = home, meta, node
            storages[home].dies = max(storages[home].dies, last.get(out, index), index)
            if out not in fused.unwritten:
                unwritten.pop(home, None)
    for home, nbytes in unwritten.items():
        storages[home].nbytes = nbytes
    return storages, makers, metas


def _inside(
    node: Node, loop: Loop, metas: Mapping[int, StridedMeta], index: int, sent: bool, fusion: Fusion | None
) -> list[Storage]:
    """What the body of a loop holds at its peak. From the second trip on all that it gathers is there, too."""
    body = loop.body
    given = {into: metas[id] for into, id in zip(body.inputs, node.refs, strict=True)}
    last = last_uses(body)
    home: dict[int, int] = {}
    storages, makers, inner = _storages(body, last, given, home, sent=sent, fusion=fusion)
    if sent:
        storages += sent_copies(body, inner)
    _count_with_the_sum(body, added_in_place(loop).values(), storages, home)
    if loop.cut_by is not None and _is_one_ranks(loop.cut_by):
        body, storages = _by_timetable(loop, storages, home, loop.cut_by, posted=sent)
    # What a value is does not depend on how often the timetable does its part.
    report = _report(body, storages, makers, kinds_of(loop.body))
    value = loop.body.inputs[0] if loop.body.inputs else 0
    held: list[Storage] = []
    for tier, alive in report.alive.items():
        for live in alive:
            name = f"{live.name} (each trip)"
            each = Live(name, live.nbytes, live.shape, live.layout, live.line, live.path, live.kind)
            held.append(Storage(live.nbytes, tier, value, index, index, each, body=report))
    return held


def _by_timetable(
    loop: Loop, storages: Sequence[Storage], home: Mapping[int, int], timetable: Timetable, posted: bool
) -> tuple[Program, list[Storage]]:
    """One rank's body and its storages as often as its actions come, in their order: what a microbatch keeps from part
    to part is there while the parts of others run. With them what is gathered, from the first time on. home: value ->
    its storage.

    posted: what an action receives is there from the begin of the action before it, where real ranks make room for it,
    to the end of the one that reads it last, and longer where it is received into again (`_waits_to_be_received_into`).
    """
    body, (row,) = loop.body, timetable.table.rows
    numbers = {part: number for number, part in enumerate(timetable.parts)}
    spans = list(timetable.spans())
    nodes: list[Node] = []
    begins: dict[tuple[int, int], int] = {}  # (number of a part, microbatch) -> its first position
    before: dict[tuple[int, int], int] = {}  # the first position of the action before it
    for action in row:
        part = numbers[action.stage, action.kind]
        before[part, action.microbatch] = max(begins.values(), default=0)
        begins[part, action.microbatch] = len(nodes)
        nodes += body.nodes[slice(*spans[part])]
    number_of = {action: number for number, action in enumerate(begins)}
    messages: list[tuple[Storage, int, int]] = []  # (where it lies, action that receives, action that reads it last)
    expanded = []
    reads = _parts_that_hold(body, home, timetable)
    microbatches = {action.microbatch for action in row}
    for number, storage in enumerate(storages):
        if storage.born < 0:  # an input, which is counted outside
            continue
        first, last = timetable.part_at(storage.born), timetable.part_at(storage.dies)
        # the last part of the body need not be the last of a microbatch
        others = reads.get(number, set()) - {first, last}
        received = posted and body.nodes[storage.born].target == RECEIVE
        for microbatch in microbatches:
            born = begins[first, microbatch] + storage.born - spans[first][0]
            if received:
                born = before[first, microbatch]
            dies = begins[last, microbatch] + storage.dies - spans[last][0]
            if received:  # its memory is received into again, or given back, when the action has ended
                dies = begins[last, microbatch] + spans[last][1] - 1 - spans[last][0]
            for part in others:
                dies = max(dies, begins[part, microbatch] + spans[part][1] - 1 - spans[part][0])
            if received:
                last_number = max(number_of[part, microbatch] for part in (last, *others))
                messages.append((storage, number_of[first, microbatch], last_number))
            lies_in = storage.nbytes, storage.tier, storage.value
            expanded.append(Storage(*lies_in, born, dies, storage.inside, storage.kind, storage.body))
    expanded += _waits_to_be_received_into(messages, body, [*begins.values(), len(nodes)])
    own = own_outputs_of_parts(loop) - set(added_in_place(loop).values())
    for index, outputs in gathered_at(body).items():
        part = timetable.part_at(index)
        first = min(begin for (number, _), begin in begins.items() if number == part)
        for place in outputs:
            value = body.values[body.outputs[place]]
            times = loop.trips if loop.gathers[place] == "stack" else 1
            born = first + index - spans[part][0] + (place in own)  # its own memory becomes that of the sum
            expanded.append(Storage(value.nbytes * times, value.tier, value.id, born, len(nodes)))
    return attrs.evolve(body, nodes=tuple(nodes)), expanded


def _waits_to_be_received_into(
    messages: Sequence[tuple[Storage, int, int]], body: Program, begins: Sequence[int]
) -> list[Storage]:
    """What real ranks keep of messages that were read to their end, an action long, because what comes then goes into
    it (`Buffers.turn`).

    messages: (where one lies, number of the action that receives it, of the one that reads it last). begins: positions
    at which actions begin, and the end of the last one.
    """
    of_room: dict[Any, list[tuple[Storage, int, int]]] = {}
    for message in messages:
        value = body.values[message[0].value]
        of_room.setdefault((value.shape, value.dtype), []).append(message)
    waiting = []
    for alike in of_room.values():
        posted = Counter(max(0, receives - 1) for _, receives, _ in alike)
        ended = Counter(reads for _, _, reads in alike)
        storage, free = alike[0][0], 0
        for number, (begin, end) in enumerate(pairwise(begins)):
            free = min(free + ended[number - 1], posted[number] + posted[number + 1])
            free = max(0, free - posted[number])
            if free and begin < end:
                waiting.append(Storage(free * storage.nbytes, storage.tier, storage.value, begin, end - 1))
    return waiting


def _parts_that_hold(body: Program, home: Mapping[int, int], timetable: Timetable) -> dict[int, set[int]]:
    """Storage -> the parts that read a value in it, each to its end."""
    found: dict[int, set[int]] = {}
    for id, parts in parts_that_read(body, timetable).items():
        if id in home:
            found.setdefault(home[id], set()).update(parts)
    return found
