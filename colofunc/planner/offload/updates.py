"""Which updates run on the host: all but the last few, by bytes, with the light work around them.

Problem: an update on the host saves copies of moments and masters, and is slower there; the last ones of a step are
waited for. Idea: updates run in the order in which gradients come, so a *share* says it all: the first updates with so
many of the bytes run on the host, the rest on the device. A few shares are tried, then those half way to the neighbours
of the best.

    share 0.75    host: layer 3, 2, 1      device: layer 0, whose update hides the copies of the others

Casts go with them where that makes narrower what travels: gradients leave as they were computed, masters come back
narrow. Without that OPT-13B within 40 GB (`bench moved`) takes 65 % longer.

An update is one operator, or all that was traced of it: Muon's products of matrices, an optimizer written by hand
(`Update`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate

import attrs

from colofunc.ops.updates import is_in_place_update
from colofunc.planner.offload.trace import Ground, floor_bytes
from colofunc.program.facts import is_pointwise, kind_of, takes_device, written
from colofunc.program.ir import Node, kept_with
from colofunc.program.passes.tiered import looks_only

SPLITS = (0.0, 1.0, 0.5, 0.75)
"""Shares of the updates on the host that are tried first."""
EVERY = 8
"""Where there are at most this many updates, every share is tried."""
WRITE = "colofunc.write_"
CAST = "aten._to_copy.default"
LIGHT = frozenset({CAST, "aten.mul.Tensor", "aten.mul.Scalar", "aten.div.Tensor", "aten.div.Scalar", "aten.add.Tensor"})


def splits(
    ground: Ground, update: str | None, placed: Mapping[int, str | None], limit: int, share: float | None,
    tried: Sequence[float], seen: set[frozenset[int]],
) -> Iterator[tuple[float, frozenset[int]]]:  # fmt: skip
    """Sets of nodes that run on the host: all updates but the last few, with the light work that only they read.

    limit: bytes of the device. share: the only one that is asked for. tried: shares before, best first; then those
    between it and its neighbours. seen: sets before.
    """
    updates = updates_of(ground) if update is not None else _worth_moving(ground, placed, limit)
    sizes = [one.nbytes for one in updates]
    total = sum(sizes)
    shares = (share,) if share is not None and update is None else _shares(update, sizes, tried)
    for part in shares:
        chosen: list[Update] = []
        chosen_bytes = 0
        for one, nbytes in zip(updates, sizes, strict=True):
            # what is said to stay on the device is updated there
            stays = any(placed.get(storage) == "device" for storage in one.written)
            if chosen_bytes + nbytes <= part * total and not stays:
                chosen.append(one)
                chosen_bytes += nbytes
        nodes = frozenset().union(*(one.nodes for one in chosen))
        on_host = _with_light(ground, nodes) | _narrowed(ground, chosen)
        if on_host not in seen:
            seen.add(on_host)
            yield part, on_host


def _worth_moving(ground: Ground, placed: Mapping[int, str | None], limit: int) -> list[Update]:
    """All updates but those whose state is too small for a copy, and so stays where it is.

    On the host each of these would wait for copies that take a latency, whatever their size.
    """
    floor, storages = floor_bytes(ground, limit), ground.lies.storages
    found = list[Update]()
    for one in updates_of(ground):
        if any(storages[number].nbytes >= floor or placed.get(number) == "host" for number in one.written):
            found.append(one)
    return found


@attrs.frozen
class Update:
    """What runs together to bring a parameter and its state up to date.

    writers: the nodes that write state. nodes: these and all whose results nobody else reads. written: storages of
    state.
    """

    writers: tuple[int, ...]
    nodes: frozenset[int]
    written: frozenset[int]
    nbytes: int


def updates_of(ground: Ground) -> list[Update]:
    """All updates of a program, in the order in which they end."""
    return kept_with(ground.program, (updates_of, ground.lies), partial(_updates_of, ground))


def _updates_of(ground: Ground) -> list[Update]:
    """From each node that writes state the way back, as far as one update alone reads what is made. Two writers are one
    update where the one reads the new value that the other writes, as a parameter's update reads the new momentum.
    """
    program, home = ground.program, ground.lies.home
    nodes, readers = program.nodes, program.readers
    state = {home[id] for id in program.inputs if program.values[id].role in ("param", "state")}
    outputs = set(program.outputs)
    owner: dict[int, int] = {}  # node -> the writer that names its update
    joined: dict[int, int] = {}  # a writer that names no update any more -> the one that does

    def name(position: int) -> int | None:
        writer = owner.get(position)
        while writer in joined:
            writer = joined[writer]
        return writer

    for position in reversed(range(len(nodes))):
        node = nodes[position]
        writes_state = node.target == WRITE and home[node.refs[0]] in state
        if is_in_place_update(node.target) or writes_state:
            owner[position] = position
            continue
        # A node belongs to an update if all that read it do, and to one only.
        reading: set[int] = set()
        for out in node.results:
            reading.update(readers.get(out, ()))
        names = {name(reader) for reader in reading}
        if not names or None in names or outputs.intersection(node.outs) or not _belongs(node, ground):
            continue
        # What an update operator reads is its operand and no part of it: only updates that are written out grow.
        written_out = {writer for writer in names if writer is not None and nodes[writer].target == WRITE}
        if len(written_out) < len(names):
            continue
        if len(written_out) > 1 and not any(nodes[reader].target == WRITE for reader in reading):
            continue
        first, *others = sorted(written_out, reverse=True)
        joined.update(dict.fromkeys(others, first))
        owner[position] = first

    members: dict[int, list[int]] = {}
    for position in sorted(owner):
        members.setdefault(name(position) or position, []).append(position)
    return [_update(ground, members[last]) for last in sorted(members) if _computes(ground, members[last])]


def _computes(ground: Ground, group: Sequence[int]) -> bool:
    """Whether nodes do more than write what was made elsewhere: a parameter that comes out of an all-gather is no
    update.
    """
    members = [ground.program.nodes[position] for position in group]
    return any(node.target != WRITE and not looks_only(node, ground.lies) for node in members)


def _belongs(node: Node, ground: Ground) -> bool:
    """Whether a node that only an update reads is part of it: all of the phase, elsewhere what is elementwise and makes
    nothing smaller.
    """
    if looks_only(node, ground.lies):
        return True
    if not may_run_on_host(node, ground):
        return False
    if node.phase == "update":
        return True
    values = ground.program.values
    largest_made = max((values[out].nbytes for out in node.results), default=0)
    return is_pointwise(node.target) and largest_made >= max(values[ref].nbytes for ref in node.refs)


def _update(ground: Ground, positions: Sequence[int]) -> Update:
    program = ground.program
    writers: list[int] = []
    ids: list[int] = []
    for position in positions:
        node = program.nodes[position]
        if is_in_place_update(node.target) or node.target == WRITE:
            writers.append(position)
            ids += written(node)
    storages = frozenset(ground.lies.home[id] for id in ids)
    return Update(tuple(writers), frozenset(positions), storages, sum(program.values[id].nbytes for id in ids))


def may_run_on_host(node: Node, ground: Ground) -> bool:
    """Whether an operator may run on the host: one that computes, from tensors that it is given."""
    if kind_of(node) is not None or not node.refs or looks_only(node, ground.lies):
        return False
    return not (node.target.startswith("aten.") and takes_device(node.target) and node.target != CAST)


def _shares(update: str | None, sizes: Sequence[int], tried: Sequence[float]) -> Sequence[float]:
    """Shares of the updates to try. sizes: bytes of each update."""
    if update is not None:
        return (0.0,) if update == "device" else (1.0,)
    if tried:
        best = tried[0]
        below = max((share for share in tried if share < best), default=best)
        above = min((share for share in tried if share > best), default=best)
        return [(best + below) / 2, (best + above) / 2]
    if len(sizes) > EVERY:
        return SPLITS
    # Half a byte more than some first updates have: all of them go, and no other one.
    total = max(1, sum(sizes))
    return (0.0, 1.0, *((nbytes + 0.5) / total for nbytes in accumulate(sizes[:-1])))


def _with_light(ground: Ground, chosen: frozenset[int]) -> frozenset[int]:
    """`chosen` and the elementwise work whose results nobody else reads, where it makes a gradient wider before it
    travels.
    """
    if not chosen:
        return chosen
    program = ground.program
    found = set(chosen)
    kept = set(program.outputs)
    readers = program.readers
    for position in reversed(range(len(program.nodes))):
        node = program.nodes[position]
        if node.target not in LIGHT or len(node.outs) != 1 or node.outs[0] is None or node.outs[0] in kept:
            continue
        reading = set(readers.get(node.outs[0], ()))
        largest_read = max((program.values[ref].nbytes for ref in node.refs), default=0)
        if reading and reading <= found and program.values[node.outs[0]].nbytes >= largest_read:
            found.add(position)
    return frozenset(found)


def _narrowed(ground: Ground, chosen: Sequence[Update]) -> frozenset[int]:
    """Casts of what is updated on the host to a narrower dtype: the narrow copy travels."""
    program, home = ground.program, ground.lies.home
    state = frozenset().union(*(update.written for update in chosen))
    # Behind the first update a cast may read what that has changed.
    first = min((min(update.writers) for update in chosen), default=0)
    narrow: set[int] = set()
    for position, node in enumerate(program.nodes[: first + 1]):
        if node.target != CAST or node.outs[0] is None or home[node.refs[0]] not in state:
            continue
        if program.values[node.outs[0]].nbytes < program.values[node.refs[0]].nbytes:
            narrow.add(position)
    return frozenset(narrow)
