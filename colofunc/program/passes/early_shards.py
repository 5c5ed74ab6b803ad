"""Shards of what forward gathered are taken where forward needs the whole for the last time.

Problem: lowering converts a value where its reader stands, from the cheapest copy there is. Where forward reads a value
whole and backward reads a shard of it, the cheapest copy is the whole one, which then is held until backward, though a
part of it would do. Idea: take the shard behind the last reader in forward, as a copy, so that the whole one is let go.

    %g = all_gather(%x)   linear(%g, ...) | ...  take_shard(%g)  linear_dw(...)
        ->  all_gather  linear  clone(take_shard(%g)) | ...  linear_dw

A copy of one shard takes little beside the collective that gathered all of them. OPT-30B on 2 x 4 ranks holds 8.4 GB
less by it. It comes behind the search for what is made again: a whole that backward makes anew is held by nobody.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set

import attrs

from colofunc.program.editor import Editor
from colofunc.program.facts import kind_of
from colofunc.program.ir import Node, Program, Ref
from colofunc.program.memory import StorageMap, lies, memory
from colofunc.program.passes.loop import change_bodies

LEAST_BYTES = 1 << 20
"""What has to be saved by it: below, one more operator is not worth it."""


@attrs.frozen
class _Chain:
    """Positions of the layout moves in front of a shard, and of the node that takes it, last; the value that they begin
    at, and the shard.
    """

    nodes: tuple[int, ...]
    source: int
    shard: int


def early_shards(program: Program) -> Program:
    """Take shards of what forward alone reads whole behind its last reader there, where that saves memory."""
    return _early(change_bodies(program, _early))


def _early(program: Program) -> Program:
    chains = list(_chains(program))
    if not chains:
        return program
    found = lies(program)
    chains_of: dict[int, list[_Chain]] = {}  # by the storage that a shard is a part of
    for chain in chains:
        if found.home[chain.shard] == found.home[chain.source]:
            chains_of.setdefault(found.home[chain.source], []).append(chain)
    last_of = _last_uses(program, found, [chain for of_one in chains_of.values() for chain in of_one])

    edit = Editor(program)
    changed = False
    for storage, of_one in chains_of.items():
        last = last_of.get(storage, len(program.nodes))
        is_later = all(last < chain.nodes[0] for chain in of_one)
        saved_bytes = found.storages[storage].nbytes - sum(program.values[chain.shard].nbytes for chain in of_one)
        if is_later and program.nodes[last].phase == "forward" and saved_bytes >= LEAST_BYTES:
            changed = True
            for chain in of_one:
                _take(edit, chain, last)
    if not changed:
        return program
    early = edit.done()
    # Where the shard is copied, both are there: of a single one that may be the most that forward ever holds.
    return early if _held_in_forward(early) <= _held_in_forward(program) else program


def _chains(program: Program) -> Iterator[_Chain]:
    """Shards that are taken behind forward, each with the layout moves that only lead to it."""
    made, readers, outputs = program.made_at, program.readers, set(program.outputs)
    for index, node in enumerate(program.nodes):
        if node.phase == "forward" or (kind_of(node) or ("", False))[0] != "take_shard":
            continue
        nodes: tuple[int, ...] = (index,)
        source = node.refs[0]
        while len(readers[source]) == 1 and source not in outputs:
            before = made.get(source, -1)
            if before < 0 or program.nodes[before].target != "colofunc.rearrange":
                break
            nodes, source = (before, *nodes), program.nodes[before].refs[0]
        yield _Chain(nodes, source, node.results[0])


def _last_uses(program: Program, found: StorageMap, chains: Sequence[_Chain]) -> Mapping[int, int]:
    """Storage -> the last node that makes or reads any of its values, but for `chains` and what reads their shards; none
    for what is there from the start or leaves the program.
    """
    moved = {k for chain in chains for k in chain.nodes}
    of_shards = _with_views(program, found, {chain.shard for chain in chains})
    last_of: dict[int, int] = {}
    for index, node in enumerate(program.nodes):
        if index not in moved:
            for id in (*node.refs, *node.results):
                if id not in of_shards:
                    last_of[found.home[id]] = index
    for id in (*program.inputs, *program.outputs):
        if id not in of_shards:
            last_of.pop(found.home[id], None)
    return last_of


def _with_views(program: Program, found: StorageMap, ids: Set[int]) -> Set[int]:
    """These values and all views of them."""
    seen = set(ids)
    for node in program.nodes:
        seen.update(out for out in node.results if found.base_of.get(out) in seen)
    return seen


def _take(edit: Editor, chain: _Chain, last: int) -> None:
    """The chain behind node `last`, and a copy of its shard in the shard's name."""
    program = edit.program
    phase = program.nodes[last].phase
    moved = [attrs.evolve(program.nodes[k], phase=phase) for k in chain.nodes]
    taking = moved[-1]
    view = edit.new(program.values[chain.shard])
    # The view is the copy of the global value, the copy of that a temporary: it is no state that is written later.
    edit.values[chain.shard] = attrs.evolve(program.values[chain.shard], of=None)
    moved[-1] = attrs.evolve(taking, outs=(view,))
    note = "the whole is let go of"
    copy = Node(
        "aten.clone.default", (Ref(view),), (), (chain.shard,), phase, taking.path, taking.line, note, on=taking.on
    )
    edit.insert(last + 1, *moved, copy)
    for k in chain.nodes:
        edit.drop(k)


def _held_in_forward(program: Program) -> int:
    """The most bytes on the device while forward runs."""
    held = memory(program).timeline["device"]
    forward = (held_bytes for held_bytes, node in zip(held, program.nodes, strict=False) if node.phase == "forward")
    return max(forward, default=0)
