"""Which updates run on the host: all but the last few, by bytes, with the light work around them.

Problem: an update on the host saves copies of moments and masters, and is slower there; the last ones of a step are waited for.
Idea: updates run in the order in which gradients come, so a *share* says it all: the first updates with so many of the bytes
run on the host, the rest on the device. A few shares are tried, then those half way to the neighbours of the best.

    share 0.75    host: layer 3, 2, 1      device: layer 0, whose update hides the copies of the others

Casts go with them where that makes narrower what travels: gradients leave as they were computed, masters come back narrow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from colofunc.ops.update import IN_PLACE
from colofunc.planner.offload.trace import Ground
from colofunc.program.facts import written

SPLITS = (0.0, 1.0, 0.5, 0.75)
"""Shares that are tried first."""
EVERY = 8
"""Of up to so many updates every share is."""
UPDATES = frozenset(target for target, _ in IN_PLACE.values())
CAST = "aten._to_copy.default"
LIGHT = frozenset({CAST, "aten.mul.Tensor", "aten.mul.Scalar", "aten.div.Tensor", "aten.div.Scalar", "aten.add.Tensor"})


def splits(
    ground: Ground, update: str | None, placed: Mapping[int, str | None], share: float | None, tried: Sequence[float],
    seen: set[frozenset[int]],
) -> Iterator[tuple[float, frozenset[int]]]:  # fmt: skip
    """Sets of nodes that run on the host: all updates but the last few, with the light work that only they read.

    share: the only one that is asked for. tried: shares before, best first; then those between it and its neighbours. seen: sets
    before.
    """
    updates = [k for k, node in enumerate(ground.program.nodes) if node.target in UPDATES]
    weigh = [sum(ground.program.values[i].nbytes for i in written(ground.program.nodes[k])) for k in updates]
    total = sum(weigh)
    for part in _shares(update, weigh, tried) if share is None or update is not None else (share,):
        chosen, so_far = [], 0
        for k, n in zip(updates, weigh, strict=True):
            stays = any(placed.get(ground.lies.home[i]) == "device" for i in written(ground.program.nodes[k]))
            if so_far + n <= part * total and not stays:
                chosen.append(k)
                so_far += n
        found = _with_light(ground, frozenset(chosen)) | _narrowed(ground, chosen)
        if found not in seen:
            seen.add(found)
            yield part, found


def _shares(update: str | None, weigh: Sequence[int], tried: Sequence[float]) -> Sequence[float]:
    if update is not None:
        return (0.0,) if update == "device" else (1.0,)
    if tried:
        below, above = ([share for share in tried if (share > tried[0]) is up and share != tried[0]] for up in (False, True))
        return [(tried[0] + share) / 2 for share in (max(below, default=tried[0]), min(above, default=tried[0]))]
    first = ((n + 0.5) / max(1, sum(weigh)) for n in accumulate(weigh[:-1]))
    return (0.0, 1.0, *first) if len(weigh) <= EVERY else SPLITS


def _with_light(ground: Ground, chosen: frozenset[int]) -> frozenset[int]:
    """`chosen` and the elementwise work whose results nobody else reads, where it makes a gradient wider before it travels."""
    if not chosen:
        return chosen
    program, found = ground.program, set(chosen)
    read: dict[int, set[int]] = {}
    for k, node in enumerate(program.nodes):
        for i in node.refs:
            read.setdefault(i, set()).add(k)
    kept = set(program.outputs)
    for k in reversed(range(len(program.nodes))):
        node = program.nodes[k]
        if node.target not in LIGHT or len(node.outs) != 1 or node.outs[0] is None or node.outs[0] in kept:
            continue
        readers_ = read.get(node.outs[0], set())
        big = max((program.values[i].nbytes for i in node.refs), default=0)
        if readers_ and readers_ <= found and program.values[node.outs[0]].nbytes >= big:
            found.add(k)
    return frozenset(found)


def _narrowed(ground: Ground, chosen: Sequence[int]) -> frozenset[int]:
    """Casts of what is updated on the host to a narrower dtype: the narrow copy travels."""
    program, mine = ground.program, {ground.lies.home[i] for k in chosen for i in written(ground.program.nodes[k])}
    return frozenset(
        k
        for k, node in enumerate(program.nodes)
        if node.target == CAST
        and node.outs[0] is not None
        and ground.lies.home[node.refs[0]] in mine
        and program.values[node.outs[0]].nbytes < program.values[node.refs[0]].nbytes
        and not (chosen and k > min(chosen))  # an update may have changed it by then
    )
