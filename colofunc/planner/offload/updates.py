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
from itertools import accumulate

import attrs

from colofunc.ops.updates import IN_PLACE
from colofunc.planner.offload.trace import Ground
from colofunc.program.facts import is_pointwise, kind_of, takes_device, written
from colofunc.program.ir import Node
from colofunc.program.passes.tiered import is_view

SPLITS = (0.0, 1.0, 0.5, 0.75)
"""Shares of the updates on the host that are tried first."""
EVERY = 8
"""Where there are at most this many updates, every share is tried."""
WRITE = "colofunc.write_"
CAST = "aten._to_copy.default"
LIGHT = frozenset({CAST, "aten.mul.Tensor", "aten.mul.Scalar", "aten.div.Tensor", "aten.div.Scalar", "aten.add.Tensor"})


def splits(
    ground: Ground, update: str | None, placed: Mapping[int, str | None], share: float | None, tried: Sequence[float],
    seen: set[frozenset[int]],
) -> Iterator[tuple[float, frozenset[int]]]:  # fmt: skip
    """Sets of nodes that run on the host: all updates but the last few, with the light work that only they read.

    share: the only one that is asked for. tried: shares before, best first; then those between it and its neighbours.
    seen: sets before.
    """
    updates = updates_of(ground)
    weigh = [update.nbytes for update in updates]
    total = sum(weigh)
    for part in _shares(update, weigh, tried) if share is None or update is not None else (share,):
        chosen: list[Update] = []
        so_far = 0
        for one, nbytes in zip(updates, weigh, strict=True):
            stays = any(placed.get(storage) == "device" for storage in one.written)
            if so_far + nbytes <= part * total and not stays:
                chosen.append(one)
                so_far += nbytes
        nodes = frozenset(k for one in chosen for k in one.nodes)
        found = _with_light(ground, nodes) | _narrowed(ground, chosen)
        if found not in seen:
            seen.add(found)
            yield part, found


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
    """All updates of a program, in the order in which they end.

    From each node that writes state the way back, as far as one update alone reads what is made. Two writers are one
    update where the one reads the new value that the other writes, as a parameter's update reads the new momentum.
    """
    nodes = ground.program.nodes
    state = {ground.lies.home[i] for i in ground.program.inputs if ground.program.values[i].role in ("param", "state")}
    readers = ground.program.readers
    outputs = set(ground.program.outputs)
    owner: dict[int, int] = {}  # node -> the writer that names its update
    joined: dict[int, int] = {}  # a writer that names no update any more -> the one that does

    def name(k: int) -> int | None:
        writer = owner.get(k)
        while writer in joined:
            writer = joined[writer]
        return writer

    for k in reversed(range(len(nodes))):
        node = nodes[k]
        writes_state = node.target == WRITE and ground.lies.home[node.refs[0]] in state
        if node.target in IN_PLACE or writes_state:
            owner[k] = k
            continue
        reading = {j for o in node.results for j in readers.get(o, ())}
        names = {name(j) for j in reading}
        if not names or None in names or outputs.intersection(node.outs) or not _belongs(node, ground):
            continue
        whole = {n for n in names if n is not None and nodes[n].target == WRITE}
        if len(whole) < len(names) or (len(whole) > 1 and not any(nodes[j].target == WRITE for j in reading)):
            continue
        first, *others = sorted(whole, reverse=True)
        joined.update(dict.fromkeys(others, first))
        owner[k] = first
    together: dict[int, list[int]] = {}
    for k in sorted(owner):
        together.setdefault(name(k) or k, []).append(k)
    return [_update(ground, together[last]) for last in sorted(together) if _computes(ground, together[last])]


def _computes(ground: Ground, group: Sequence[int]) -> bool:
    """Whether nodes do more than write what was made elsewhere: a parameter that comes out of an all-gather is no
    update.
    """
    nodes = ground.program.nodes
    return any(nodes[k].target != WRITE and not is_view(nodes[k], ground.lies) for k in group)


def _belongs(node: Node, ground: Ground) -> bool:
    """Whether a node that only an update reads is part of it: all of the phase, elsewhere what is elementwise and makes
    nothing smaller.
    """
    if is_view(node, ground.lies):
        return True
    if not able(node, ground):
        return False
    values = ground.program.values
    made = max((values[o].nbytes for o in node.results), default=0)
    return node.phase == "update" or (is_pointwise(node.target) and made >= max(values[i].nbytes for i in node.refs))


def _update(ground: Ground, nodes: Sequence[int]) -> Update:
    program = ground.program
    writers = tuple(k for k in nodes if program.nodes[k].target in IN_PLACE or program.nodes[k].target == WRITE)
    ids = [i for k in writers for i in written(program.nodes[k])]
    nbytes = sum(program.values[i].nbytes for i in ids)
    return Update(writers, frozenset(nodes), frozenset(ground.lies.home[i] for i in ids), nbytes)


def able(node: Node, ground: Ground) -> bool:
    """Whether an operator may run on the host: one that computes, from tensors that it is given."""
    if kind_of(node) is not None or not node.refs or is_view(node, ground.lies):
        return False
    return not (node.target.startswith("aten.") and takes_device(node.target) and node.target != CAST)


def _shares(update: str | None, weigh: Sequence[int], tried: Sequence[float]) -> Sequence[float]:
    if update is not None:
        return (0.0,) if update == "device" else (1.0,)
    if tried:
        below = [share for share in tried if share < tried[0]]
        above = [share for share in tried if share > tried[0]]
        return [(tried[0] + share) / 2 for share in (max(below, default=tried[0]), min(above, default=tried[0]))]
    first = ((n + 0.5) / max(1, sum(weigh)) for n in accumulate(weigh[:-1]))
    return (0.0, 1.0, *first) if len(weigh) <= EVERY else SPLITS


def _with_light(ground: Ground, chosen: frozenset[int]) -> frozenset[int]:
    """`chosen` and the elementwise work whose results nobody else reads, where it makes a gradient wider before it
    travels.
    """
    if not chosen:
        return chosen
    program, found = ground.program, set(chosen)
    read = ground.program.readers
    kept = set(program.outputs)
    for k in reversed(range(len(program.nodes))):
        node = program.nodes[k]
        if node.target not in LIGHT or len(node.outs) != 1 or node.outs[0] is None or node.outs[0] in kept:
            continue
        readers_ = set(read.get(node.outs[0], ()))
        big = max((program.values[i].nbytes for i in node.refs), default=0)
        if readers_ and readers_ <= found and program.values[node.outs[0]].nbytes >= big:
            found.add(k)
    return frozenset(found)


def _narrowed(ground: Ground, chosen: Sequence[Update]) -> frozenset[int]:
    """Casts of what is updated on the host to a narrower dtype: the narrow copy travels."""
    program = ground.program
    state = {storage for update in chosen for storage in update.written}
    first = min((k for update in chosen for k in update.writers), default=0)
    return frozenset(
        k
        for k, node in enumerate(program.nodes)
        if node.target == CAST
        and node.outs[0] is not None
        and ground.lies.home[node.refs[0]] in state
        and program.values[node.outs[0]].nbytes < program.values[node.refs[0]].nbytes
        and k <= first  # an update may have changed it by then
    )
