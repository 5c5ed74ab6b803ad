"""What a stage holds while its backward runs, as the accountant counts it.

Problem: the search over stages takes the gradient of a stage's output and all that the stage made for what its backward
needs. Backward of two branches holds two gradients, an operator that writes over its operand holds none, and where that is
wrong by a tenth the search plans for the wrong moment. Idea: two orders of work are counted, the one that keeps everything
and the one that keeps least, and what is alive at each stage's backward beside inputs and earlier stages is what it needs.

    alive, everything kept   inputs | stage 0 | stage 1 | stage 2, its gradients        needs of stage 2, kept whole
    alive, least kept        inputs | 0 | 1 | stage 2 made again, its gradients         needs of stage 2, made again

What later stages left behind (gradients of parameters, mostly) is not of the stage's needs: a chain has it apart, as
`left_bytes`, so that equal layers have equal needs, wherever they stand.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import attrs
import numpy as np

from colofunc.planner.recompute.chain import Back, Run
from colofunc.planner.recompute.stages import Chain, Part
from colofunc.program.ir import Node
from colofunc.program.memory import lies
from colofunc.program.passes.inplace import in_place


def measured(chain: Chain) -> Chain:
    """The chain with `Kept.needs_bytes` and `left_bytes` as counted; a program with loops is left as it is."""
    if not chain.parts or any(node.loop is not None for node in chain.program.nodes):
        return chain
    (whole, later), (lean, _) = (_alive(chain, way) for way in (0, -1))
    left = [0, *(before - own for before, own in pairwise(later))]
    whole, lean = ([alive - beside for alive, beside in zip(some, later, strict=True)] for some in (whole, lean))
    return attrs.evolve(chain, parts=tuple(map(_counted, chain.parts, whole, lean, left)))


def _counted(part: Part, whole: int, lean: int, left: int) -> Part:
    """Between the two that were counted, needs go as what is kept does."""
    ways = part.stage.ways
    most, least = ways[0].nbytes, ways[-1].nbytes
    share = [(way.nbytes - least) / (most - least) if most > least else 1.0 for way in ways]
    found = [max(way.nbytes, round(lean + (whole - lean) * s)) for way, s in zip(ways, share, strict=True)]
    kept = tuple(attrs.evolve(way, needs_bytes=n) for way, n in zip(ways, found, strict=True))
    return attrs.evolve(part, stage=attrs.evolve(part.stage, ways=kept, left_bytes=left))


def _alive(chain: Chain, way: int) -> tuple[list[int], list[int]]:
    """Bytes by stage, where all are kept in this way: alive at its worst moment, and what of these later stages left behind.

    Beside inputs and what earlier stages hold.
    """
    last = len(chain.parts) - 1
    runs = [Run(s, way % len(part.stage.ways)) for s, part in enumerate(chain.parts)]
    done = in_place(chain.replay([*runs, *(Back(s) for s in range(last, -1, -1))]))
    device = [s for s in lies(done).storages if s.tier == "device"]
    born = np.array([storage.born for storage in device], dtype=np.int64)
    dies = np.array([storage.dies for storage in device], dtype=np.int64)
    nbytes = np.array([storage.nbytes for storage in device], dtype=np.int64)
    count = len(done.nodes)
    change = np.zeros(count + 2, dtype=np.int64)
    np.add.at(change, np.maximum(born, 0), nbytes)
    np.add.at(change, np.minimum(dies, count - 1) + 1, -nbytes)
    line = np.cumsum(change[:count])
    base = int(nbytes[born < 0].sum())
    forward = _ends(chain, done.nodes, [part.nodes for part in chain.parts])
    backward = _ends(chain, done.nodes, [part.back for part in reversed(chain.parts)])
    begins = [0, *(end + 1 for end in forward)]
    after = [begins[-1], *(end + 1 for end in backward)]
    alive, left = list[int](), list[int]()
    for s in range(last + 1):
        windows = ((begins[s], begins[s + 1]), (after[last - s], after[last - s + 1]))
        earlier = (born >= 0) & (born < begins[s])
        beside = [int(nbytes[earlier & (dies >= a)].sum()) for a, _ in windows]
        alive.append(max(int(line[a:b].max(initial=base)) - base - held for (a, b), held in zip(windows, beside, strict=True)))
        begin, end = windows[1]
        left.append(int(nbytes[(born >= after[0]) & (born < begin) & (dies >= end)].sum()))
    return alive, left


def _ends(chain: Chain, nodes: Sequence[Node], ranges: Sequence[range]) -> list[int]:
    """Where each of these parts of the program ends in another order of it, by the values that it makes first."""
    made = {o: k for k, node in enumerate(nodes) for o in node.results}
    found, before = [], -1
    for part in ranges:
        mine = [made[o] for k in part for o in chain.program.nodes[k].outs if o in made]
        before = max([before, *mine])
        found.append(before)
    return found
