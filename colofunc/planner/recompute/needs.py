"""What a stage holds while its backward runs, as the accountant counts it.

Problem: the search over stages takes the gradient of a stage's output and all that the stage made for what its backward
needs. Backward of two branches holds two gradients, an operator that writes over its operand holds none, and where that
is wrong by a tenth the search plans for the wrong moment. Idea: two orders of work are counted, the one that keeps
everything and the one that keeps least, and what is alive at each stage's backward beside inputs and earlier stages is
what it needs.

    alive, everything kept   inputs | stage 0 | stage 1 | stage 2, its gradients        needs of stage 2, kept whole
    alive, least kept        inputs | 0 | 1 | stage 2 made again, its gradients         needs of stage 2, made again

What later stages left behind (gradients of parameters, mostly) is not of the stage's needs: a chain has it apart, as
`left_bytes`, so that equal layers have equal needs, wherever they stand.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from colofunc.planner.recompute.chain import Back, Run
from colofunc.planner.recompute.stages import ForwardChain, ForwardStage
from colofunc.program.ir import Node
from colofunc.program.memory import lies
from colofunc.program.passes.inplace import in_place


def measured(chain: ForwardChain) -> ForwardChain:
    """The chain with `KeepOption.needs_bytes` and `left_bytes` as counted; a program with loops is left as it is."""
    if not chain.parts or any(node.loop is not None for node in chain.program.nodes):
        return chain
    whole, later = _alive(chain, 0)
    lean, _ = _alive(chain, -1)
    parts = list[ForwardStage]()
    earlier_left = 0
    for part, whole_bytes, lean_bytes, later_bytes in zip(chain.parts, whole, lean, later, strict=True):
        # What a stage itself leaves behind is what is there more, seen from the stage before it.
        left_bytes = earlier_left - later_bytes if parts else 0
        parts.append(_counted(part, whole_bytes - later_bytes, lean_bytes - later_bytes, left_bytes))
        earlier_left = later_bytes
    return attrs.evolve(chain, parts=tuple(parts))


def _counted(part: ForwardStage, whole_bytes: int, lean_bytes: int, left_bytes: int) -> ForwardStage:
    """Between the two that were counted, needs go as what is kept does."""
    ways = part.stage.ways
    most, least = ways[0].nbytes, ways[-1].nbytes
    counted = []
    for way in ways:
        share = (way.nbytes - least) / (most - least) if most > least else 1.0
        needs_bytes = max(way.nbytes, round(lean_bytes + (whole_bytes - lean_bytes) * share))
        counted.append(attrs.evolve(way, needs_bytes=needs_bytes))
    return attrs.evolve(part, stage=attrs.evolve(part.stage, ways=tuple(counted), left_bytes=left_bytes))


def _alive(chain: ForwardChain, way: int) -> tuple[list[int], list[int]]:
    """Bytes by stage, where all are kept in this way: alive at its worst moment, and what of these later stages left
    behind.

    Beside inputs and what earlier stages hold.
    """
    last = len(chain.parts) - 1
    runs = [Run(number, way % len(part.stage.ways)) for number, part in enumerate(chain.parts)]
    done = in_place(chain.replay([*runs, *(Back(number) for number in range(last, -1, -1))]))
    device = [storage for storage in lies(done).storages if storage.tier == "device"]
    born = np.array([storage.born for storage in device], dtype=np.int64)
    dies = np.array([storage.dies for storage in device], dtype=np.int64)
    nbytes = np.array([storage.nbytes for storage in device], dtype=np.int64)

    # Bytes alive at each node, of which those that were there before the first are in all moments.
    count = len(done.nodes)
    change = np.zeros(count + 2, dtype=np.int64)
    np.add.at(change, np.maximum(born, 0), nbytes)
    np.add.at(change, np.minimum(dies, count - 1) + 1, -nbytes)
    alive_bytes = np.cumsum(change[:count])
    base_bytes = int(nbytes[born < 0].sum())

    # A stage works from one of these to the next: forward in order, backward behind it from the last stage to the
    # first.
    forward = _ends(chain, done.nodes, [part.nodes for part in chain.parts])
    backward = _ends(chain, done.nodes, [part.back for part in reversed(chain.parts)])
    forward_begins = [0, *(end + 1 for end in forward)]
    backward_begins = [forward_begins[-1], *(end + 1 for end in backward)]

    alive, left = list[int](), list[int]()
    for number in range(last + 1):
        turn = last - number
        windows = (
            (forward_begins[number], forward_begins[number + 1]),
            (backward_begins[turn], backward_begins[turn + 1]),
        )
        is_earlier = (born >= 0) & (born < forward_begins[number])
        own_bytes = []
        for begin, end in windows:
            earlier_bytes = int(nbytes[is_earlier & (dies >= begin)].sum())
            own_bytes.append(int(alive_bytes[begin:end].max(initial=base_bytes)) - base_bytes - earlier_bytes)
        alive.append(max(own_bytes))
        begin, end = windows[1]
        is_left = (born >= backward_begins[0]) & (born < begin) & (dies >= end)
        left.append(int(nbytes[is_left].sum()))
    return alive, left


def _ends(chain: ForwardChain, nodes: Sequence[Node], ranges: Sequence[range]) -> list[int]:
    """Where each of these parts of the program ends in another order of it, by the values that it makes first."""
    made_at = {}
    for index, node in enumerate(nodes):
        made_at.update(dict.fromkeys(node.results, index))
    ends, end = [], -1
    for part in ranges:
        for index in part:
            for out in chain.program.nodes[index].outs:
                if out is not None and out in made_at:
                    end = max(end, made_at[out])
        ends.append(end)
    return ends
