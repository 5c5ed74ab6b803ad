"""Memory: live bytes of one rank, per tier, at every position of a local program.

Problem: whether a step fits must be known before it runs, and to the byte, or a budget is a guess. Idea: follow
storages, not values. A view lives in its operand's storage, an in-place update makes none, a collective makes a buffer;
a storage is held from the node that makes it to the last node that needs a value in it. Whether a reshape is a view
depends on strides, so each distinct call is run once on tensors without data (`meta`) and remembered.

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
from functools import lru_cache
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import attrs
import numpy as np
import torch

from colofunc import compat
from colofunc.ops.targets import resolve
from colofunc.program.facts import COPIES, is_wire, kind_of, lifetimes, rearrange_steps, takes_device
from colofunc.program.ir import Loop, Node, Program, Ref, Timetable, Value, map_refs
from colofunc.program.memory_report import KINDS, LinesByKind, Live, kinds_of, place_text
from colofunc.program.memory_report import MemoryReport as MemoryReport
from colofunc.program.passes.loop import gathered_at, last_uses, parts_that_read
from colofunc.program.passes.reuse import added_in_place, own_outputs_of_parts
from colofunc.program.places import RECEIVE
from colofunc.program.post_validation import kept_bytes, validates_late

Meta = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides, dtype
# Losses that write every element's into the memory of the result before they reduce it: it keeps that size.
_ROOMY = frozenset(
    f"aten.{name}.default" for name in ("mse_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy")
)
# Per result: (operand whose storage it lives in or -1, result whose new storage it shares, bytes of the storage, meta).
Made = tuple[int, int, int, Meta]


@attrs.frozen
class Fused:
    """What a compiler changes of one program. `unwritten`: values that no kernel writes, and the bytes that are written
    in place of each.

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
    storages += sent_copies(program, metas) if sent else []
    _gathered_inside(program, storages)
    if validates_late(program):
        nbytes, value = kept_bytes(program), program.inputs[0]
        storages.append(Storage(nbytes, "device", value, -1, len(program.nodes), kind="kept copies"))
    return _report(program, storages, makers)


def _gathered_inside(program: Program, storages: Sequence[Storage]) -> None:
    """What a loop with a timetable gathers is counted within it from its first part on, and behind it here."""
    for index, node in enumerate(program.nodes):
        if node.loop is not None and _is_one_ranks(node.loop.cut_by):
            for storage in storages:
                if storage.born == index and storage.value in node.outs and storage.inside is None:
                    storage.born = index + 1


def _is_one_ranks(timetable: Timetable | None) -> bool:
    return timetable is not None and len(timetable.table.rows) == 1


@attrs.frozen(eq=False)
class Lies:
    """Which storage each value of a program lies in.

    `within`: the operand that a view or a result in place is a part of.
    """

    storages: tuple[Storage, ...]
    home: Mapping[int, int]
    within: Mapping[int, int]
    metas: Mapping[int, Meta]


def lies(program: Program) -> Lies:
    """Where the values of a program lie, storages in the order in which they are made."""
    home: dict[int, int] = {}
    within: dict[int, int] = {}
    storages, _, metas = _storages(program, lifetimes(program), None, home, within)
    return Lies(tuple(storages), home, within, metas)


def inside(body: Program, given: Mapping[int, Meta], added: Collection[int] = ()) -> tuple[Lies, tuple[int, ...]]:
    """Where the values of a loop's body lie, and what it holds on the device at each node beside its inputs, which are
    `given`.

    added: outputs that are counted with what gathers them (`reuse.added_in_place`).
    """
    home: dict[int, int] = {}
    within: dict[int, int] = {}
    storages, makers, metas = _storages(body, last_uses(body), given, home, within)
    _count_with_the_sum(body, added, storages, home)
    report = _report(body, [*storages, *sent_copies(body, metas)], makers)
    return Lies(tuple(storages), home, within, metas), report.timeline["device"]


def _count_with_the_sum(
    body: Program, added: Collection[int], storages: Sequence[Storage], home: Mapping[int, int]
) -> None:
    """These outputs are no memory of their own: the first trip's is the sum, and others are added to it without being
    made.
    """
    for k in added:
        storages[home[body.outputs[k]]].nbytes = 0


def sent_copies(program: Program, metas: Mapping[int, Meta]) -> list[Storage]:
    """Contiguous copies of the operands of started collectives, from the start to the wait. metas: of its values, as
    `lies` has them.
    """
    last, out = program.last_uses, list[Storage]()
    for index, node in enumerate(program.nodes):
        kind = kind_of(node)
        if kind is not None and kind[1] and is_wire(node) and not _tensor(metas[node.refs[0]]).is_contiguous():
            value, started = program.values[node.refs[0]], node.outs[0]
            end = index if started is None else last.get(started, index)
            out.append(Storage(value.nbytes, value.tier, value.id, index, end, kind="collective buffers"))
    return out


def _report(
    program: Program, storages: list[Storage], makers: Mapping[int, Node], kinds: Mapping[int, str] | None = None
) -> MemoryReport:
    """kinds: of values, where they are known."""
    count, kinds = max(1, len(program.nodes)), kinds_of(program) if kinds is None else kinds
    tiers = sorted({s.tier for s in storages} | {"device"})
    row_of = {kind: row for row, kind in enumerate(KINDS)}
    changes = {tier: _Changes() for tier in tiers}
    for s in storages:
        s.kind = s.kind or (s.inside.kind if s.inside is not None else kinds.get(s.value, "other"))
        changes[s.tier].add(row_of[s.kind], max(0, s.born), s.nbytes)
        changes[s.tier].add(row_of[s.kind], min(s.dies, count - 1) + 1, -s.nbytes)
    by_kind = {tier: LinesByKind(_lines(changed, count)) for tier, changed in changes.items()}
    sums = {tier: lines.rows.sum(axis=0) for tier, lines in by_kind.items()}
    timeline = {tier: tuple(line.tolist()) for tier, line in sums.items()}
    peak_at = {tier: int(line.argmax()) for tier, line in sums.items()}
    peak = {tier: timeline[tier][peak_at[tier]] for tier in tiers}
    alive = {tier: tuple(_alive(program, storages, makers, tier, peak_at[tier])) for tier in tiers}
    places = {tier: place_text(program, at) for tier, at in peak_at.items()}
    return MemoryReport(
        peak, timeline, peak_at, by_kind, alive, places, {s.born: s.body for s in storages if s.body is not None}
    )


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
    alive = [s for s in storages if s.tier == tier and s.born <= at <= max(s.dies, s.born) and s.nbytes]
    return [_live(program, s, makers) for s in sorted(alive, key=lambda s: -s.nbytes)]


def _live(program: Program, storage: Storage, makers: Mapping[int, Node]) -> Live:
    if storage.inside is not None:
        return storage.inside
    value = program.values[storage.value]
    if storage.kind == "workspaces":
        user = program.nodes[storage.born]
        kernel = "" if user.kernel is None else f" ({user.kernel.name})"
        return Live(f"{user.target}{kernel}", storage.nbytes, (), "", user.line, user.path, storage.kind)
    node = makers.get(value.id)
    name = value.name or (f"%{value.id} {node.target}" if node is not None else f"%{value.id}")
    layout = value.layout.text() if value.layout is not None else ""
    return Live(
        name, storage.nbytes, value.shape, layout, node.line if node else "", node.path if node else "", storage.kind
    )


def _storages(
    program: Program,
    last: Mapping[int, int],
    given: Mapping[int, Meta] | None = None,
    where: dict[int, int] | None = None,
    within: dict[int, int] | None = None,
    sent: bool = False,
    fusion: Fusion | None = None,
) -> tuple[list[Storage], dict[int, Node], dict[int, Meta]]:
    """Every storage with its lifetime, the node that makes each value, and how values lie. `given`: inputs counted
    elsewhere.

    `where` and `within` are filled as `Lies` wants them.
    """
    fused = Fused(last=last) if fusion is None else fusion(program, last)
    # storages of which no kernel writes a value -> what is written instead
    last, unwritten = fused.last, dict[int, int]()
    end = len(program.nodes)
    storages: list[Storage] = []
    where = {} if where is None else where  # value -> storage
    within = {} if within is None else within
    metas: dict[int, Meta] = {}
    makers: dict[int, Node] = {}
    for id in program.inputs:
        value, constant = program.values[id], program.constants.get(id)
        metas[id] = _contiguous(value.shape, value.dtype)
        nbytes = value.nbytes if constant is None else constant.untyped_storage().nbytes()
        if constant is not None:
            metas[id] = (value.shape, tuple(constant.stride()), value.dtype)
        if given is not None:
            nbytes, metas[id] = 0, given[id]
        where[id] = len(storages)
        storages.append(Storage(nbytes, value.tier, id, -1, end))
    for index, node in enumerate(program.nodes):
        if node.loop is not None:
            storages += _inside(node, node.loop, metas, index, sent, fusion)
        own_bytes = fused.inner_bytes.get(index, 0) + (0 if node.kernel is None else node.kernel.workspace_bytes)
        if own_bytes:
            storages.append(Storage(own_bytes, "device", node.refs[0], index, index, kind="workspaces"))
        made = _results(node, program, metas)
        fresh: dict[int, int] = {}
        for o, one in zip(node.outs, made, strict=True):
            if one is None:
                continue
            operand, share, nbytes, meta = one
            if operand >= 0:
                home = where[node.refs[operand]]
            elif share in fresh:
                home = fresh[share]
            elif o is None:
                continue
            else:
                home = fresh[share] = len(storages)
                storages.append(Storage(nbytes, program.values[o].tier, o, index, index))
                unwritten[home] = fused.unwritten.get(o, 0)
            if o is None:
                continue
            where[o], metas[o], makers[o] = home, meta, node
            within.update({o: node.refs[operand]} if operand >= 0 else {})
            storages[home].dies = max(storages[home].dies, last.get(o, index), index)
            if o not in fused.unwritten:
                unwritten.pop(home, None)
    for home, nbytes in unwritten.items():
        storages[home].nbytes = nbytes
    return storages, makers, metas


def _inside(
    node: Node, loop: Loop, metas: Mapping[int, Meta], index: int, sent: bool, fusion: Fusion | None
) -> list[Storage]:
    """What the body of a loop holds at its peak. From the second trip on all that it gathers is there, too."""
    body = loop.body
    given = {into: metas[i] for into, i in zip(body.inputs, node.refs, strict=True)}
    last = last_uses(body)
    home: dict[int, int] = {}
    storages, makers, inner = _storages(body, last, given, home, sent=sent, fusion=fusion)
    storages += sent_copies(body, inner) if sent else []
    _count_with_the_sum(body, added_in_place(loop).values(), storages, home)
    if loop.cut_by is not None and _is_one_ranks(loop.cut_by):
        body, storages = _by_timetable(loop, storages, home, loop.cut_by, posted=sent)
    # What a value is does not depend on how often the timetable does its part.
    report, value = _report(body, storages, makers, kinds_of(loop.body)), loop.body.inputs[0] if loop.body.inputs else 0
    held = []
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
    numbers = {part: k for k, part in enumerate(timetable.parts)}
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
            expanded.append(
                Storage(
                    storage.nbytes, storage.tier, storage.value, born, dies, storage.inside, storage.kind, storage.body
                )
            )
    expanded += _waits_to_be_received_into(messages, body, [*begins.values(), len(nodes)])
    own = own_outputs_of_parts(loop) - set(added_in_place(loop).values())
    for index, outputs in gathered_at(body).items():
        part = timetable.part_at(index)
        first = min(begin for (number, _), begin in begins.items() if number == part)
        for k in outputs:
            value, times = body.values[body.outputs[k]], loop.trips if loop.gathers[k] == "stack" else 1
            born = first + index - spans[part][0] + (k in own)  # its own memory becomes that of the sum
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


def _contiguous(shape: tuple[int, ...], dtype: torch.dtype) -> Meta:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(shape), tuple(reversed(strides)), dtype


def _fresh(value: Value) -> Made:
    return -1, 0, value.nbytes, _contiguous(value.shape, value.dtype)


def _results(node: Node, program: Program, metas: Mapping[int, Meta]) -> tuple[Made | None, ...]:
    """How each result of a node lies in memory."""
    kind = kind_of(node)
    values = program.values
    if kind is None:
        return _ordinary(node, program, metas)
    if node.loop is not None:
        return tuple(None if o is None else (-1, k, *_fresh(values[o])[2:]) for k, o in enumerate(node.outs))
    if not node.outs:  # put, and a send to others only
        return ()
    (out,) = node.outs
    if out is None:
        return (None,)
    value = values[out]
    if kind[0] in COPIES:
        return _copied(kind[0], value, metas[node.refs[0]])
    if kind[0] == "wait":
        return ((0, 0, 0, metas[node.refs[0]]),)
    if kind[0] == "take_shard":
        shape, strides, dtype = metas[node.refs[0]]
        return ((0, 0, 0, (shape[1:], strides[1:], dtype)),)
    if kind[0] == "keep_first" and node.args[3] != "sum":
        return ((0, 0, 0, metas[node.refs[0]]),)
    if kind[0] == "rearrange":
        _, pattern, names, sizes = node.args
        steps = rearrange_steps(pattern, tuple(names), tuple(sizes), values[node.refs[0]].shape)
        return (_rearranged(metas[node.refs[0]], steps),)
    if kind[0] == "keep_first":
        # The first rank keeps its own, without what its memory holds beside it; the others make zeros, which the budget
        # must hold.
        shape, strides, dtype = metas[node.refs[0]]
        zeros = torch.zeros_like(_tensor((shape, strides, dtype)))
        return ((-1, 0, zeros.untyped_storage().nbytes(), (shape, tuple(zeros.stride()), dtype)),)
    return (_fresh(value),)


def _copied(kind: str, value: Value, meta: Meta) -> tuple[Made, ...]:
    """A copy in another tier lies as what it is a copy of."""
    if kind == "put":
        return ((0, 0, 0, meta),)
    like = torch.empty_like(_tensor(meta), memory_format=torch.preserve_format)
    return ((-1, 0, value.nbytes, (meta[0], tuple(like.stride()), meta[2])),)


@lru_cache(maxsize=1 << 14)
def _rearranged(meta: Meta, steps: Any) -> Made:
    x = out = _tensor(meta)
    first, order, final = steps
    out = out.reshape(first) if first is not None else out
    out = out.permute(order) if order is not None else out
    out = out.reshape(final) if final is not None else out
    return _describe((out,), (x,))[0] or (-1, 0, 0, meta)


def _tensor(meta: Meta) -> torch.Tensor:
    with compat.no_function_modes():
        return torch.empty_strided(meta[0], meta[1], dtype=meta[2], device="meta")


def _describe(results: tuple[Any, ...], operands: tuple[torch.Tensor, ...]) -> tuple[Made | None, ...]:
    homes = {compat.storage_key(x): k for k, x in reversed(list(enumerate(operands)))}
    fresh: dict[int, int] = {}
    out: list[Made | None] = []
    for k, result in enumerate(results):
        if not isinstance(result, torch.Tensor):
            out.append(None)
            continue
        key = compat.storage_key(result)
        meta = (tuple(result.shape), tuple(result.stride()), result.dtype)
        share = fresh.setdefault(key, k)
        out.append((homes.get(key, -1), share, result.untyped_storage().nbytes(), meta))
    return tuple(out)


def _ordinary(node: Node, program: Program, metas: Mapping[int, Meta]) -> tuple[Made | None, ...]:
    refs = node.refs
    order = iter(range(len(refs)))
    args, kwargs = map_refs((node.args, node.kwargs), lambda _: Ref(next(order)))
    try:
        dtypes = tuple(None if o is None else program.values[o].dtype for o in node.outs)
        made = _run_meta(node.target, args, kwargs, tuple(metas[r] for r in refs), dtypes)
    except Exception:
        made = None  # no shape function for these arguments: results in memory of their own
    if made is None or len(made) != len(node.outs):
        return tuple(None if o is None else (-1, k, *_fresh(program.values[o])[2:]) for k, o in enumerate(node.outs))
    return made


@lru_cache(maxsize=1 << 15)
def _run_meta(target: str, args: Any, kwargs: Any, metas: tuple[Meta, ...], dtypes: Any) -> tuple[Made | None, ...]:
    # `dtypes` of the results tell 1 from 1.0 and True, which are equal keys.
    operands = tuple(_tensor(m) for m in metas)
    place = torch.device("meta")

    def real(tree: Any) -> Any:
        if type(tree) is Ref:
            return operands[tree.id]
        if type(tree) is tuple:
            return tuple(real(item) for item in tree)
        return place if isinstance(tree, torch.device) else tree

    keywords = {k: real(v) for k, v in kwargs}
    if target.startswith("aten.") and takes_device(target) and not (metas and keywords.get("device") is None):
        keywords["device"] = place
    with compat.no_function_modes():  # what is around the caller changes no program
        results = _flat(resolve(target)(*real(args), **keywords))
    if target == "aten.native_batch_norm.default" and args[5] is False:
        results = (results[0], *(x.new_empty(0) for x in results[1:]))  # only training has statistics to save
    made = _describe(results, operands)
    if target in _ROOMY and made[0] is not None and made[0][3][0] == ():
        numel = torch.broadcast_tensors(*operands[:2])[0].numel()
        made = ((-1, 0, numel * made[0][3][2].itemsize, made[0][3]),)
    return made


def _flat(result: Any) -> tuple[Any, ...]:
    if isinstance(result, (tuple, list)):
        return tuple(item for part in result for item in _flat(part))
    return (result,) if result is not None else ()
