"""Chunks: one collective per flat buffer of parameters, for what a plan wants packed so (ZeRO).

Problem: a gather per weight and per bias, and a reduction for each of their gradients. Idea: parameters are packed in
the order in which the program reads them (`packing`), and a pass over the local program puts together, chunk by chunk,

    gathers of stored parameters     once per phase, where the first of the chunk is needed; a cast goes into the packing
    reductions of gradients          where the last one of the chunk is there
    gathers of updated parameters    where the last one of the chunk is updated

    all_gather(w0) linear all_gather(b0) ...        ->        all_gather_flat(w0, b0, ...)  slice  linear ...

Only what tensors hold is sent: chunks are as large as the search says, and what they leave empty costs nothing here.
Parameters keep their own layouts. Those of a chunk that a step donates lie one behind the other in memory (`buffers_of`
says which, `executors` and `compiler` keep them so), so that they are gathered without a copy; updates in place write
through.

A gathered chunk is (ranks, elements of a rank), so one parameter's rows (n, a/n, b) lie a whole
chunk apart from rank to rank and b apart inside: no strides of a matrix (a, b) say that, unless the chunk holds one
parameter, which is then a view. So every other weight is copied once out of the buffer, as FSDP2 does. A batched
product over ranks could read it as it lies, but gives (n, tokens, a/n), and putting that in order copies activations
instead, as torch's products write no strided blocks. What would do: one call that gathers each tensor into a buffer of
its own (`all_gather_into_tensor_coalesced`, NCCL's group call). It has several results, and a collective of a program
has one.

Which parameter a collective is about follows from data flow: a gather's operand is made from it; a reduction's result,
or an output that takes its place, reaches its update with as many elements.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import attrs

from colofunc.program.editor import Editor
from colofunc.program.facts import is_cast, kind_of, may_alias, written
from colofunc.program.ir import Node, Program, Value
from colofunc.program.passes.merge import merge
from colofunc.program.passes.packing import chunk_size, pack_chunks

_MOVES = frozenset({"aten._to_copy.default", "colofunc.rearrange", "colofunc.take_shard", "colofunc.fit"})
# A searched chunk has at least so many elements, or a part of all: few collectives, and little that is gathered at
# once.
LARGE, FEWEST = 1 << 25, 4
_MERGED = ("colofunc.all_gather", "colofunc.reduce_scatter", "colofunc.all_reduce")


@attrs.frozen
class _Owned:
    """A collective of a parameter.

    `chain`: nodes that make its operand from `source`; it may run where `source` is there.
    """

    index: int
    owner: int  # input of the whole program
    numel: int  # of the parameter, gathered
    source: int
    chain: tuple[int, ...]
    early: bool  # made from stored parameters alone


@attrs.define(eq=False)
class _Scope:
    """A program or the body of one of its loops. `outer`: its inputs that are inputs of the whole program.

    `about`: its inputs that moves and casts alone make of inputs of the whole program.
    """

    program: Program
    outer: Mapping[int, int]
    about: Mapping[int, int]
    behind: Mapping[int, int]  # outputs of a body -> what they are outside
    around: _Scope | None = None
    owned: list[_Owned] = attrs.field(factory=list)

    def origin(self, id: int) -> tuple[int, tuple[int, ...]]:
        """What a value is made from by moves alone, and by which nodes, in order."""
        chain: list[int] = []
        while (at := self.program.made_at.get(id)) is not None and _is_move(self.program.nodes[at]):
            chain.insert(0, at)
            (id,) = self.program.nodes[at].refs
        return id, tuple(chain)


def _is_move(node: Node) -> bool:
    """Whether a node may as well run elsewhere: a view, a move or a cast of one operand, without communication."""
    if node.target in _MOVES:
        return True
    return len(node.refs) == 1 and kind_of(node) is None and may_alias(node) and not written(node)


def chunked(
    program: Program, wanted: Mapping[int, int | str]
) -> tuple[Program, Mapping[tuple[int | None, ...], frozenset[int]]]:
    """`program` (functional, local) with one collective per chunk, and the results of these collectives.

    wanted: inputs that lie in chunks -> elements of a chunk, or "auto". Results are named per scope: () is the program,
    what a loop's node defines is its body.
    """
    if not wanted:
        return program, {}
    scopes = _scopes(program)
    for scope in scopes.values():
        _find(scope, wanted)
    chunk_of, members = _packed(scopes, wanted)
    if not chunk_of:
        return program, {}
    order = _orders(scopes, members)
    edit = Editor(program)
    apart: dict[tuple[int | None, ...], frozenset[int]] = {}
    for at, scope in scopes.items():
        if at >= 0:
            body, made = _merged(scope, chunk_of, order)
            apart[program.nodes[at].outs] = frozenset(made)
            edit.change_body(at, body)
    scopes[-1].program = edit.done()
    out, made = _merged(scopes[-1], chunk_of, order)
    return out, {**apart, (): frozenset(made)}


def buffers_of(program: Program) -> tuple[tuple[int, ...], ...]:
    """Positions of donated inputs that lie one behind the other in a buffer of their own, as `chunked` wants them."""
    donated = {program.inputs[into]: into for _, into in program.aliases}
    runs: dict[tuple[int, ...], None] = {}
    for _, scope in sorted(_scopes(program).items()):
        for node in scope.program.nodes:
            if node.target.removesuffix("_start") in ("colofunc.all_gather_flat", "colofunc.pack"):
                run = tuple(donated.get(scope.outer.get(id, -1), -1) for id in node.refs)
                if -1 not in run and len(set(run)) == len(run) > 1:
                    runs[run] = None
    # Long runs first: an input lies in one buffer.
    found: list[tuple[int, ...]] = []
    taken: set[int] = set()
    for run in sorted(runs, key=len, reverse=True):
        if taken.isdisjoint(run):
            found.append(run)
            taken.update(run)
    return tuple(found)


# ---- which collectives are about which parameters ----


def _scopes(program: Program) -> dict[int, _Scope]:
    """The program (-1) and the bodies of its loops, by the index of their node.

    Not those in parts, which keep their collectives apart.
    """
    given = {id: id for id in program.inputs}
    top = _Scope(program, given, given, {})
    found = {-1: top}
    for index, node in enumerate(program.nodes):
        if node.loop is None or node.loop.timetable is not None:
            continue
        body = node.loop.body
        outer: dict[int, int] = {}
        about: dict[int, int] = {}
        for into, id in zip(body.inputs, node.refs, strict=True):
            if id in top.outer:
                outer[into] = id
            source, _ = top.origin(id)
            if source in top.outer:
                about[into] = source
        behind = {inner: out for inner, out in zip(body.outputs, node.outs, strict=True) if out is not None}
        found[index] = _Scope(body, outer, about, behind, top)
    return found


def _find(scope: _Scope, wanted: Mapping[int, int | str]) -> None:
    values = scope.program.values
    for index, node in enumerate(scope.program.nodes):
        if node.target not in _MERGED or not values[node.refs[0]].shape:
            continue
        gather = node.target == "colofunc.all_gather"
        whole = node.outs[0] if gather else node.refs[0]
        source, chain = scope.origin(node.refs[0])
        owner = scope.about.get(source) if gather else None
        early = owner in wanted
        if not early:
            owner = _updated(scope, node.outs[0], wanted)
            source, chain = node.refs[0], ()
        if owner in wanted and owner is not None and whole is not None:
            scope.owned.append(_Owned(index, owner, prod(values[whole].shape), source, chain, early))


def _updated(scope: _Scope | None, id: int | None, wanted: Mapping[int, int | str]) -> int | None:
    """The wanted parameter in whose update a value goes, through operators that keep its elements, or whose place it
    takes.
    """
    pending, seen = [id], {id}
    while pending and scope is not None:
        at = pending.pop(0)
        values, program = scope.program.values, scope.program
        if at is None:
            continue
        if at in scope.behind:
            return _updated(scope.around, scope.behind[at], wanted)
        if scope.around is None:
            for out, into in program.aliases:
                if program.outputs[out] == at and program.inputs[into] in wanted:
                    return program.inputs[into]
        for index in program.readers.get(at, ()):
            node = program.nodes[index]
            if node.phase == "update":
                owners = [scope.about.get(scope.origin(ref)[0]) for ref in node.refs if ref != at]
                for owner in owners:
                    if owner is not None and owner in wanted:
                        return owner
            elif not _is_move(node) and node.target not in (*_MERGED, "aten.add.Tensor"):
                continue
            sizes = (prod(values[at].shape), _scattered(node, at, values))
            for result in node.results:
                if result not in seen and prod(values[result].shape) in sizes:
                    seen.add(result)
                    pending.append(result)
    return None


def _scattered(node: Node, id: int, values: Mapping[int, Value]) -> int:
    """Elements of a further reduction's result, of a gradient that is reduced along one axis after the other."""
    return prod(values[id].shape) // int(node.args[2]) if node.target == "colofunc.reduce_scatter" else -1


# ---- which parameters lie in which chunk ----


def _packed(scopes: Mapping[int, _Scope], wanted: Mapping[int, int | str]) -> tuple[dict[int, int], list[list[int]]]:
    """(parameter -> its chunk, parameters of each chunk in the order of their use)."""
    top = scopes[-1].program
    numel: dict[int, int] = {}
    family: dict[int, Any] = {}
    for _, scope in sorted(scopes.items()):
        for one in scope.owned:
            axes = tuple(scope.program.nodes[one.index].args[1])
            numel[one.owner] = max(numel.get(one.owner, 0), one.numel)
            family.setdefault(one.owner, (str(top.values[one.owner].dtype), axes, str(wanted[one.owner])))
    used: dict[int, tuple[int, int]] = {}
    for at, scope in sorted(scopes.items()):
        for id, outer in scope.about.items():
            reads = scope.program.readers.get(id, ())
            if outer in numel and reads:
                first = (reads[0], 0) if at < 0 else (at, reads[0])
                used[outer] = min(used.get(outer, first), first)
    order = sorted(numel, key=lambda id: (used.get(id, (len(top.nodes), 0)), top.inputs.index(id)))
    families: dict[Any, list[int]] = {}
    for id in order:
        families.setdefault(family[id], []).append(id)
    searched: list[list[int]] = []  # elements of the parameters of each family whose chunks are to be sized
    for key, ids in families.items():
        if key[2] == "auto":
            searched.append([numel[id] for id in ids])
    found = chunk_size(*searched, least=min(LARGE, sum(map(sum, searched)) // FEWEST)) if searched else 0
    members: list[list[int]] = []
    for key, ids in families.items():
        size = found if key[2] == "auto" else int(key[2])
        sizes = [numel[id] for id in ids]
        for positions in pack_chunks(sizes, size):
            members.append([ids[position] for position in positions])
    chunk_of: dict[int, int] = {}
    for chunk, ids in enumerate(members):
        chunk_of.update(dict.fromkeys(ids, chunk))
    return chunk_of, members


def _orders(scopes: Mapping[int, _Scope], members: Sequence[Sequence[int]]) -> dict[int, tuple[int, int]]:
    """Donated parameter -> (chunk, place in its buffer): first those that are gathered in most phases, so that runs are
    whole.
    """
    top = scopes[-1].program
    donated = {top.inputs[into] for _, into in top.aliases}
    times: dict[int, set[Any]] = {}
    for at, scope in scopes.items():
        for one in scope.owned:
            if one.early and one.owner in donated and scope.outer.get(one.source) == one.owner:
                times.setdefault(one.owner, set()).add((at, scope.program.nodes[one.index].phase))
    out: dict[int, tuple[int, int]] = {}
    for chunk, ids in enumerate(members):
        gathered = [id for id in ids if id in times]
        gathered.sort(key=lambda id: -len(times[id]))
        for place, id in enumerate(gathered):
            out[id] = (chunk, place)
    return out


# ---- the program ----


@attrs.define(eq=False)
class _Group:
    """Collectives that become one."""

    members: list[_Owned]
    arrived: int = 0


def _merged(
    scope: _Scope, chunk_of: Mapping[int, int], order: Mapping[int, tuple[int, int]]
) -> tuple[Program, set[int]]:
    """The program of a scope with its groups put together, and the results of the collectives that stand for them."""
    nodes = scope.program.nodes
    groups: dict[Any, _Group] = {}
    for one in scope.owned:
        node = nodes[one.index]
        dtype = scope.program.values[node.refs[0]].dtype
        phase = node.phase if one.early else ""
        key = (node.target, node.args[1:], node.on, dtype, chunk_of[one.owner], phase, one.early)
        groups.setdefault(key, _Group([])).members.append(one)
    together: list[_Group] = []
    for group in groups.values():
        first = group.members[0]
        # One alone is packed too if that is its cast: what is sent then need not live from its cast to its gather.
        if len(group.members) > 1 or len(_kept(first, nodes)) < len(first.chain):
            together.append(group)
    # A group that would wait for itself falls apart, until the others can be put in an order.
    while together:
        edit = Editor(scope.program)
        made = _scheduled(scope, together, edit, order)
        if isinstance(made, list):
            live = _alive(made, scope.program.outputs)
            results: set[int] = set()
            for node in live:
                if node.note.startswith("chunk of") and kind_of(node) is not None:
                    results.update(node.results[:1])
            for group in groups.values():
                if group not in together:
                    results |= _results(group.members, nodes)
            return edit.written(live), results
        together.remove(made)
    return scope.program, _results(scope.owned, nodes)


def _results(members: Sequence[_Owned], nodes: Sequence[Node]) -> set[int]:
    """The results of collectives that stay apart."""
    outs = [nodes[one.index].outs[0] for one in members]
    return {out for out in outs if out is not None}


def _scheduled(
    scope: _Scope, groups: Sequence[_Group], edit: Editor, order: Mapping[int, tuple[int, int]]
) -> list[Node] | _Group:
    """The nodes in their order, each as soon as its operands are there; a group that would wait for itself, if there is
    one.
    """
    nodes = scope.program.nodes
    group_of = {one.index: group for group in groups for one in group.members}
    for each in groups:
        each.arrived = 0
    there, out, emitted = set(scope.program.inputs), list[Node](), set[int]()
    waiting: dict[int, list[int]] = {}  # value -> nodes that wait for it

    def emit(added: Sequence[Node]) -> list[int]:
        """Append nodes; what waited for what they define."""
        out.extend(added)
        freed: list[int] = []
        for node in added:
            for id in node.results:
                there.add(id)
                freed += waiting.pop(id, ())
        return freed

    def ready(index: int) -> list[int] | None:
        """Emit what stands at `index` if it can be; the nodes that waited for it, or None."""
        group = group_of.get(index)
        needs = [one.source for one in group.members] if group is not None else nodes[index].refs
        for id in needs:
            if id not in there:
                waiting.setdefault(id, []).append(index)
                return None
        emitted.add(index)
        if group is None:
            return emit([nodes[index]])
        emitted.update(one.index for one in group.members)
        added: list[Node] = []
        for one in group.members:
            for position in _kept(one, nodes):
                if position not in emitted:
                    emitted.add(position)
                    added.append(nodes[position])
        return emit([*added, *_one(scope, group, edit, order)])

    for index in range(len(nodes)):
        if index in emitted:
            continue
        group = group_of.get(index)
        if group is not None:
            group.arrived += 1
            if group.arrived != (1 if group.members[0].early else len(group.members)):
                continue
        freed = [index]
        while freed:
            found = ready(heapq.heappop(freed))
            for position in found or ():
                heapq.heappush(freed, position)
    if len(emitted) == len(nodes):
        return out
    return next(stuck for stuck in groups if stuck.members[0].index not in emitted)


def _kept(one: _Owned, nodes: Sequence[Node]) -> tuple[int, ...]:
    """The nodes of a chain that have to run before the packing: all but a cast, which is part of it."""
    if one.chain and is_cast(nodes[one.chain[-1]]):
        return one.chain[:-1]
    return one.chain


def _one(scope: _Scope, group: _Group, edit: Editor, order: Mapping[int, tuple[int, int]]) -> list[Node]:
    """The collective of a group, with its packing and its pieces."""
    nodes = scope.program.nodes
    members = group.members
    if members[0].early:
        members = sorted(members, key=lambda one: order.get(one.owner, (-1, one.index)))
    sources = []
    for one in members:
        kept = _kept(one, nodes)
        if len(kept) < len(one.chain):
            sources.append(nodes[one.chain[-1]].refs[0])
        else:
            sources.append(nodes[one.index].refs[0])
    if not members[0].early:
        sources = [_uncast(scope, id) for id in sources]
    head = nodes[members[0].index]
    values = scope.program.values
    same_dtype = all(values[id].dtype == values[head.refs[0]].dtype for id in sources)
    # What lies in one run of a buffer is sent as it lies.
    places = [order.get(scope.outer.get(id, -1)) for id in dict.fromkeys(sources)]
    adjacent = same_dtype and head.target == "colofunc.all_gather" and len(places) > 1 and _is_run(places)
    return merge([nodes[one.index] for one in members], edit, f"chunk of {len(members)}", sources, adjacent)


def _is_run(places: Sequence[tuple[int, int] | None]) -> bool:
    """Whether places (chunk, place in its buffer) follow one another."""
    known = [place for place in places if place is not None]
    return len(known) == len(places) and all(after[1] == before[1] + 1 for before, after in pairwise(known))


def _uncast(scope: _Scope, id: int) -> int:
    """What a value that nobody else reads was cast from; the packing casts it."""
    at = scope.program.made_at.get(id)
    node = scope.program.nodes[at] if at is not None else None
    alone = len(scope.program.readers.get(id, ())) == 1 and id not in scope.program.outputs
    return node.refs[0] if node is not None and is_cast(node) and alone else id


def _alive(nodes: Sequence[Node], outputs: Sequence[int]) -> list[Node]:
    """Without the moves that nobody reads any more."""
    read, kept = set(outputs), list[Node]()
    for node in reversed(nodes):
        if not _is_move(node) or not read.isdisjoint(node.outs):
            kept.append(node)
            read.update(node.refs)
    return kept[::-1]
