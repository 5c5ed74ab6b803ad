"""Buckets: many small collectives become one on a flat buffer, with exactly the same numbers.

Problem: a collective costs a latency whatever its size, and a model has two small parameters for every large one. Idea:
collectives of the same kind, axes and dtype share one buffer where a latency costs more than copying in and out:

    rs(b0) rs(b1) rs(b2)        ->        pack(b0, b1, b2)  reduce_scatter  slice slice slice

Gathers move up to the first of their bucket, whose operands are there already; reductions wait for the last of theirs,
as long as nobody reads a result in between. A bucket is closed where its transfer takes many latencies, so that what
follows can still overlap it. Collectives of an update that follow one another, as in a sum over several axes, are put
side by side first, and what reads the results of a bucket may share one as well. A result of the step that is a small
part of a bucket, as a loss among gradients, is copied out of it, so that who keeps it does not keep the bucket. The
order is part of the program, hence the same on all ranks. Where a machine is said to run software that gathers a block
at a time (`Software.blocks`), each block is a bucket, however large, and no bucket has members of two.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from math import inf
from types import MappingProxyType
from typing import Any

import attrs

from colofunc.mesh import Mesh
from colofunc.ops.targets import is_view
from colofunc.program.cost import collective_of
from colofunc.program.editor import Editor
from colofunc.program.ir import Node, Program, Ref
from colofunc.program.passes.loop import changed
from colofunc.program.passes.merge import merge

COPIES = 4  # reads and writes of a byte that goes into a buffer and out again
LATENCIES = 20  # a bucket is full when its transfer takes this many
MOST_STEPS = 4
"""At most so many casts and changes of layout stand between a gradient and the collective that reduces it."""
NONE: frozenset[int] = frozenset()
_NUMBERED = re.compile(r"(.*?\b\d+)(?:\.|$)")
_KINDS = ("colofunc.all_gather", "colofunc.reduce_scatter", "colofunc.all_reduce")


@attrs.define
class BucketLimit:
    """The bytes that a bucket may have, and of the sizes that were asked about the largest that is allowed and the
    least that is not.

    Any other limit from `allowed_bytes` up to below `refused_bytes` gives the same buckets.
    """

    nbytes: float
    allowed_bytes: float = 0.0
    refused_bytes: float = inf

    def allows(self, nbytes: int) -> bool:
        if nbytes <= self.nbytes:
            self.allowed_bytes = max(self.allowed_bytes, nbytes)
            return True
        self.refused_bytes = min(self.refused_bytes, nbytes)
        return False

    def decides_alike(self, nbytes: float) -> bool:
        return self.allowed_bytes <= nbytes < self.refused_bytes


@attrs.define
class _Bucket:
    members: list[int]
    nbytes: int
    until: int  # first read of a result so far


def buckets(
    program: Program,
    mesh: Mesh,
    apart: Mapping[tuple[int | None, ...], frozenset[int]] = MappingProxyType({}),
    most: BucketLimit | None = None,
) -> Program:
    """`program` (functional, local) with small collectives put together, in the bodies of loops too.

    apart: values whose collectives stay as they are, of the program (key ()) and of bodies (what their node defines).
    most: no bucket is larger.
    """
    most = BucketLimit(inf) if most is None else most
    edit = Editor(program)
    for index, node in enumerate(program.nodes):
        if node.loop is not None:
            inside = partial(_bucketed, mesh=mesh, apart=apart.get(node.outs, NONE), most=most)
            edit.change(index, loop=changed(node.loop, inside))
    return _results_copied_out(_bucketed(edit.done(), mesh, apart.get((), NONE), most))


def _bucketed(program: Program, mesh: Mesh, apart: frozenset[int], most: BucketLimit) -> Program:
    """What reads results of a bucket may share one as well, now that they are all there."""
    while True:
        program = _side_by_side(program, mesh, apart, most)
        found = [b.members for b in _find(program, mesh, apart, most) if len(b.members) > 1]
        if not found:
            return program
        edit = Editor(program)
        for members in found:
            gather = program.nodes[members[0]].target == "colofunc.all_gather"
            for index in members:
                edit.drop(index)
            together = merge([program.nodes[member] for member in members], edit, f"bucket of {len(members)}")
            edit.replace(members[0] if gather else members[-1], *together)
        program = edit.done()


def _side_by_side(program: Program, mesh: Mesh, apart: frozenset[int], most: BucketLimit) -> Program:
    """The program with small collectives of an update moved up to the first of their kind.

    A sum over several axes takes several collectives, each of which reads what the one before gives: `rs0 ar0 ag0 rs1
    ar1 ag1`. No two of them could share a bucket, because what the first gives is read before the second begins. All
    gradients are there, so the order may as well be `rs0 rs1 ar0 ar1 ag0 ag1`.
    """
    places: list[tuple[int, int]] = []  # of each node: (index of a node, number behind it)
    made: dict[int, tuple[int, int]] = {}
    groups: dict[Any, _Group] = {}
    for index, node in enumerate(program.nodes):
        places.append((index, 0))
        member = _member(program, index, mesh, apart) if node.phase == "update" else None
        if member is not None:
            group = groups.get(member.key)
            moved = None if group is None else _moved(program, index, made, group.end)
            together = member.nbytes + (0 if group is None else group.nbytes)
            if group is None or moved is None or not (member.fits(together) and most.allows(together)):
                groups[member.key] = _Group(index, member.nbytes)
            else:
                for each in moved:
                    places[each] = group.end
                    made.update(dict.fromkeys(program.nodes[each].results, group.end))
                group.count, group.nbytes = group.count + 1, together
        made.update(dict.fromkeys(node.results, places[index]))
    order = sorted(range(len(places)), key=places.__getitem__)
    return program if order == sorted(order) else program.reordered(program.nodes[index] for index in order)


@attrs.define
class _Group:
    """Collectives that are put side by side, behind the first of them."""

    first: int
    nbytes: int
    count: int = 1

    @property
    def end(self) -> tuple[int, int]:
        """The place behind the last of them."""
        return self.first, self.count


def _moved(
    program: Program, index: int, made: Mapping[int, tuple[int, int]], here: tuple[int, int]
) -> list[int] | None:
    """The nodes that move to a place: a collective, and those before it that lay out its operand.

    None: its operand is not made there.
    """
    moved = []
    for ref in program.nodes[index].refs:
        if made.get(ref, (-1, 0)) < here:
            continue
        maker = program.made_at[ref]
        node = program.nodes[maker]
        lays_out = node.target == "colofunc.rearrange" or is_view(node.target)
        if not lays_out or any(made.get(source, (-1, 0)) >= here for source in node.refs):
            return None
        moved.append(maker)
    return [*moved, index]


def _find(program: Program, mesh: Mesh, apart: frozenset[int], most: BucketLimit) -> list[_Bucket]:
    made = program.made_at
    first = _first_reads(program)
    open_buckets: dict[Any, _Bucket] = {}
    every: list[_Bucket] = []
    # value -> the bucket of the reduction that makes it, which waits for its last member
    reduced: dict[int | None, _Bucket] = {}
    for index, node in enumerate(program.nodes):
        member = _member(program, index, mesh, apart)
        if member is None:
            continue
        is_gather = node.target == "colofunc.all_gather"
        used = first.get(node.outs[0], len(program.nodes)) if node.outs[0] is not None else len(program.nodes)
        bucket = open_buckets.get(member.key)
        together = member.nbytes + (0 if bucket is None else bucket.nbytes)
        if bucket is not None and member.fits(together) and most.allows(together):
            waits = reduced.get(node.refs[0])
            early = made.get(node.refs[0], -1) < bucket.members[0] and (
                waits is None or waits.members[-1] < bucket.members[0]
            )
            if early if is_gather else index < bucket.until:
                if not is_gather:
                    reduced[node.outs[0]] = bucket
                elif waits is not None:  # read where the gathers are, from now on
                    waits.until = min(waits.until, bucket.members[0])
                bucket.members.append(index)
                bucket.nbytes += member.nbytes
                bucket.until = min(bucket.until, used)
                continue
        open_buckets[member.key] = _Bucket([index], member.nbytes, used)
        if not is_gather:
            reduced[node.outs[0]] = open_buckets[member.key]
        every.append(open_buckets[member.key])
    return every


@attrs.frozen
class _Member:
    """A collective that may share a bucket: with those of the same key, up to `full_bytes`."""

    key: tuple[Any, ...]
    nbytes: int
    full_bytes: float

    def fits(self, together_bytes: int) -> bool:
        return together_bytes <= self.full_bytes


def _member(program: Program, index: int, mesh: Mesh, apart: frozenset[int]) -> _Member | None:
    """None: that is no collective, or one that shares no start."""
    node = program.nodes[index]
    if node.target not in _KINDS or node.outs[0] in apart:
        return None
    collective = collective_of(node, program.values)
    if collective is None:
        return None
    kind, axes, _, nbytes = collective
    alpha_s, beta_s = mesh.alpha_beta(kind, axes)
    block = _block_of(program, index) if mesh.topology.software.blocks else ""
    # A block goes as one, however large: its last members would wait behind what the first have let begin.
    is_whole = bool(block) and kind != "all_reduce"
    if not is_whole and COPIES * nbytes / mesh.topology.device.memory_bytes_per_s >= alpha_s:
        return None
    # What is gathered anew in backward was let go of in between.
    phase = node.phase if kind == "all_gather" else ""
    key = (kind, node.args[1:], node.on, program.values[node.refs[0]].dtype, phase, block)
    return _Member(key, nbytes, inf if is_whole or not beta_s else LATENCIES * alpha_s / beta_s)


def _results_copied_out(program: Program) -> Program:
    """The program with a copy of each result that lies in a bucket of which results are less than half.

    It is made behind the last node that reads the bucket, where the bucket is let go of.
    """
    within: dict[int, list[int]] = {}  # bucket -> results of the program in it
    for out in dict.fromkeys(program.outputs):
        bucket = _bucket_of(program, out)
        if bucket is not None:
            within.setdefault(bucket, []).append(out)
    edit = Editor(program)
    copies: dict[int, int] = {}
    for bucket, outs in within.items():
        if 2 * sum(program.values[out].nbytes for out in outs) >= program.values[bucket].nbytes:
            continue
        behind = _last_read(program, bucket) + 1
        for out in outs:
            copies[out] = edit.new(program.values[out])
            maker = program.makers[out]
            copy = attrs.evolve(maker, target="aten.clone.default", args=(Ref(out),), kwargs=(), outs=(copies[out],))
            edit.insert(behind, copy)
    return edit.done(outputs=[copies.get(out, out) for out in program.outputs]) if copies else program


def _bucket_of(program: Program, id: int) -> int | None:
    """The buffer of which a value is a view, where several collectives share it."""
    while (maker := program.makers.get(id)) is not None and _looks(maker):
        id = maker.refs[0]
    if maker is None or maker.target not in _KINDS:
        return None
    packs = program.makers.get(maker.refs[0])
    return id if packs is not None and packs.target == "colofunc.pack" else None


def _looks(node: Node) -> bool:
    return is_view(node.target) or node.target == "colofunc.rearrange"


def _last_read(program: Program, bucket: int) -> int:
    """The last node that reads a bucket or a view of it."""
    last, views = program.made_at[bucket], [bucket]
    while views:
        for reader in program.readers.get(views.pop(), ()):
            last = max(last, reader)
            if _looks(program.nodes[reader]):
                views += program.nodes[reader].results
    return last


def _block_of(program: Program, index: int) -> str:
    """The block whose parameters or gradients a collective moves: that of the module where it stands, or of what made
    its operand.
    """
    node = program.nodes[index]
    for _ in range(MOST_STEPS):
        block = _block(node.path)
        maker = program.made_at.get(node.refs[0]) if node.refs else None
        if block or maker is None:
            return block
        node = program.nodes[maker]
    return ""


def _block(path: str) -> str:
    """The outermost numbered module on a path, "" for none: `layers.3` of `layers.3.mlp.up`."""
    found = _NUMBERED.match(path)
    return "" if found is None else found.group(1)


def _first_reads(program: Program) -> dict[int, int]:
    first: dict[int, int] = {}
    for index in range(len(program.nodes) - 1, -1, -1):
        first.update(dict.fromkeys(program.nodes[index].refs, index))
    return first
