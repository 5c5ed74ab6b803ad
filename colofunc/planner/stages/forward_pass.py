"""What the forward pass of a program reads, and what crosses a cut of it: where a stage may begin, and what that hands
on and keeps.

    reading = reading_of(program)
    reading.narrow_places(4)          # positions of nodes that read a weight first, where little crosses
    reading.crossing_bytes(place)     # what nodes in front of one of them hand on

Problem: a cut has its price in what crosses it and in what stands on either side, and a traced step does not say where
its layers end. Idea: a cut is possible in front of a node that is the first to read some weight. Values are told apart
by what they are computed of: what depends on weights alone, or on none, is made anew by each stage that reads it and
crosses nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from colofunc.program.aliases import aliases
from colofunc.program.facts import behind_forward
from colofunc.program.ir import Program, computed_once

WEIGHTS = frozenset({"param", "frozen", "buffer"})
"""Roles of inputs that lie where they are read."""


@computed_once
def reading_of(program: Program) -> Reading:
    """What the forward pass of a program reads."""
    return Reading(program)


def _forward_pass(program: Program) -> frozenset[int]:
    """Positions of the nodes of the forward pass; of all forward nodes where there is no backward.

    An update that is written by hand, and what a step keeps for the next one, are computed outside of a gradient too,
    but behind it: they are made of gradients, or stand behind the last of them. What backward needs the results of is
    always of the pass. The rest in front of backward is too: the last product of a loss that is a mean of scores,
    running statistics, a head whose loss is only shown.
    """
    forward = [k for k, node in enumerate(program.nodes) if node.phase == "forward"]
    backward = [k for k, node in enumerate(program.nodes) if node.phase == "backward"]
    if not backward:
        return frozenset(forward)
    needed = {ref for k in backward for ref in program.nodes[k].refs}
    found = set[int]()
    for k in reversed(forward):
        node = program.nodes[k]
        if any(id in needed for id in node.results):
            found.add(k)
            needed.update(node.refs)
    behind = behind_forward(program)
    found.update(k for k in range(backward[-1]) if k not in behind)
    return frozenset(found)


class Reading:
    """What the forward pass reads.

    `forward`: positions of its nodes. `places`: of those that are the first to read some weight.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.forward = _forward_pass(program)
        weights = {id: frozenset({k}) for k, id in enumerate(program.inputs) if program.values[id].role in WEIGHTS}
        # value -> the inputs that it is computed of, and of nothing else
        self.of_weights: dict[int, frozenset[int]] = dict(weights)
        # values that depend on no input: positions, causal masks
        of_none = {id for id in program.inputs if program.values[id].role == "constant"}
        self.computed: set[int] = set()  # values that depend on a weight and on the batch: what a stage hands on
        uses: dict[int, list[int]] = {}
        places = []
        for index in sorted(self.forward):
            node = program.nodes[index]
            read = frozenset[int]().union(*(self.of_weights.get(ref, frozenset()) for ref in node.refs))
            if of_none.issuperset(node.refs):
                of_none.update(node.results)
                continue
            if all(ref in self.of_weights or ref in of_none for ref in node.refs):
                # A rotary table is made of a buffer and positions. Rows of a trained table (position embeddings, relative
                # biases) are handed on: made by several stages, their gradients would be added up between these.
                is_trained = any(program.values[program.inputs[position]].role == "param" for position in read)
                if not is_trained or of_none.isdisjoint(node.refs):
                    self.of_weights.update(dict.fromkeys(node.results, read))
                    continue
            if read or any(ref in self.computed for ref in node.refs):
                self.computed.update(node.results)
            if read - uses.keys():
                places.append(index)
            for position in read:
                uses.setdefault(position, []).append(index)
        self.places = places
        self.uses = {position: tuple(found) for position, found in uses.items()}
        self._crossing, self._crossing_values = self._count_crossing()

    def _count_crossing(self) -> tuple[np.ndarray, np.ndarray]:
        """Per position, (bytes, number) of the values that nodes in front of it hand on to forward nodes at it or
        behind it.
        """
        nbytes, values = np.zeros(len(self.program.nodes) + 1), np.zeros(len(self.program.nodes) + 1)
        for id in self.computed:
            readers = [k for k in self.program.readers.get(id, ()) if k in self.forward]
            if readers:
                begin, end = self.program.made_at[id] + 1, readers[-1] + 1
                nbytes[begin] += self.program.values[id].nbytes
                nbytes[end] -= self.program.values[id].nbytes
                values[begin] += 1
                values[end] -= 1
        return np.cumsum(nbytes), np.cumsum(values)

    def narrow_places(self, least: int) -> list[int]:
        """The places where no fewer values cross at the next ones, as between layers and not within one; all where
        these are fewer than `least`.

        Within a layer a residual crosses beside what the layer computes, forward and backward. How large they are says
        nothing of where a layer ends: that has its price in the cut.
        """
        crossing = [self._crossing_values[place] for place in self.places]
        narrow = self.places[:1]
        for k in range(1, len(self.places)):
            if crossing[k] <= min(crossing[max(k - 1, 1) : k + 2]):
                narrow.append(self.places[k])
        return narrow if len(narrow) >= least else self.places

    def kept_bytes(self, begins: Sequence[int]) -> np.ndarray:
        """(pieces + 1,) bytes of weights that pieces in front of each begin to read, with their gradients and optimizer
        state.

        begins: where pieces begin. State counts with the weights in proportion to these.
        """
        program = self.program
        inputs = [program.values[id] for id in program.inputs]
        trained = sum(value.nbytes for value in inputs if value.role == "param")
        state = sum(value.nbytes for value in inputs if value.role == "state")
        backward = any(node.phase == "backward" for node in program.nodes)
        times = (2.0 if backward else 1.0) + (state / trained if trained else 0.0)
        kept = np.zeros(len(begins) + 1)
        for position, uses in self.uses.items():
            value = inputs[position]
            piece = bisect_right(begins, uses[0])
            kept[piece] += value.nbytes * (times if value.role == "param" else 1.0)
        return np.cumsum(kept)

    def saved_bytes(self, begins: Sequence[int]) -> np.ndarray:
        """(pieces + 1,) bytes that pieces in front of each make of the batch and that backward reads; views count as
        what they look at.
        """
        program, memory = self.program, aliases(self.program)
        sizes: dict[int, int] = {}
        made_in: dict[int, int] = {}
        for id in self.computed:
            if any(program.nodes[k].phase == "backward" for k in program.readers.get(id, ())):
                group = memory.group(id)
                sizes[group] = max(sizes.get(group, 0), program.values[id].nbytes)
                made_in[group] = min(made_in.get(group, len(program.nodes)), program.made_at[id])
        saved = np.zeros(len(begins) + 1)
        for group, nbytes in sizes.items():
            piece = bisect_right(begins, made_in[group])
            saved[piece] += nbytes
        return np.cumsum(saved)

    def crossing_bytes(self, place: int) -> int:
        return int(self._crossing[place])
