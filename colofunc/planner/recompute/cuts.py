"""Where forward is cut into stages: behind nodes where few bytes are alive.

    bytes alive   1 3 4 1 4 4 2 1 3 4 1
    cuts                1       1     1       stage 0 | stage 1 | stage 2 | stage 3

Counted are values on the way from the batch through the parameters to the loss. What every stage reads (masks,
positions, the output of an encoder) is alive at every cut, and says nothing about where to cut.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise

import attrs

from colofunc.program.aliases import aliases
from colofunc.program.facts import is_effect
from colofunc.program.ir import Node, Program, computed_once

SMALL = 1 << 10
"""Values of at most this many bytes are always kept."""
RISE = 1.25
"""Live bytes between two cuts must exceed those at the cuts by this factor."""
NEAR = 1.5
"""A cut has at most this many times the bytes of those next to it."""
BLOCK = 16
"""A cut is within a block if, at most this many times its bytes away on either side, there is one with less (by the
factor above)."""
FEW = 3
"""Where a chain is equally narrow everywhere, it is cut each time this many of its values have been made."""

Divided = tuple[list[range], dict[int, int], frozenset[int], list[range]]
"""The nodes of each stage, the stage of each node, values that are never dropped, the part of backward of each
stage."""


@attrs.frozen
class ForwardCut:
    """Forward cut behind a node: bytes that are alive there, and bytes that were made up to there."""

    at: int
    nbytes: int
    made_bytes: int


class ForwardFacts:
    """Who makes and who reads what, in forward and behind it."""

    def __init__(self, program: Program) -> None:
        self.program, self.memory = program, aliases(program)
        back = [k for k, node in enumerate(program.nodes) if node.phase == "backward"]
        self.first: int | None = back[0] if back and back[0] else None
        self.last = back[-1] if back else 0
        self.maker = program.made_at
        self.readers: Mapping[int, tuple[int, ...]] = program.readers
        self._divided: dict[tuple[int, bool], Divided] = {}

    @cached_property
    def cuts(self) -> list[ForwardCut]:
        """Where forward may be cut."""
        return _cuts(self)

    def divided(self, every: int, blocks: bool = False) -> Divided:
        """Forward in stages, where so many of those between cuts are one. blocks: leave out cuts within blocks."""
        if (every, blocks) not in self._divided:
            cuts = _between_blocks(self.cuts) if blocks else self.cuts
            ends = [0, *(cut.at + 1 for cut in cuts[every - 1 :: every]), self.first or 0]
            ranges = [range(begin, end) for begin, end in pairwise(ends) if end > begin]
            stage_of: dict[int, int] = {}
            for stage, nodes in enumerate(ranges):
                stage_of.update(dict.fromkeys(nodes, stage))
            rests = self.resting(stage_of)
            self._divided[every, blocks] = ranges, stage_of, rests, _backs(self, ranges, rests)
        return self._divided[every, blocks]

    def group(self, value: int) -> int:
        return self.memory.group(value)

    def read_by(self, value: int) -> list[Node]:
        """The nodes of forward that read a value."""
        return [self.program.nodes[k] for k in self.readers.get(value, []) if k < (self.first or 0)]

    def forward(self) -> list[int]:
        """Values that forward makes, in memory of their own."""
        inputs = set(self.program.inputs)
        first = self.first or 0
        return [value for value, maker in self.maker.items() if maker < first and self.group(value) not in inputs]

    def resting(self, stage_of: Mapping[int, int]) -> frozenset[int]:
        """Forward values that are never dropped."""
        groups = {self.group(value) for value in self.program.outputs}
        for value in self.forward():
            if self.program.values[value].nbytes <= SMALL or self._is_read_elsewhere(value, stage_of):
                groups.add(self.group(value))
        return frozenset(value for value in self.forward() if self.group(value) in groups)

    def _is_read_elsewhere(self, value: int, stage_of: Mapping[int, int]) -> bool:
        """Whether a value is read by more than its own stage, the next one and backward: later stages, the update, or
        who debugs.
        """
        nodes, first = self.program.nodes, self.first or 0
        maker = self.maker[value]
        if is_effect(nodes[maker].target):
            return True
        for reader in self.readers.get(value, ()):
            if reader > self.last or nodes[reader].phase == "update" or is_effect(nodes[reader].target):
                return True
            if reader < first and stage_of.get(reader, 0) > stage_of[maker] + 1:
                return True
        return False

    def streams(self) -> list[int]:
        """Values on the way from the batch through the parameters to the loss: what is cut."""
        roles = {id: self.program.values[id].role for id in self.program.inputs}
        batch = {id for id, role in roles.items() if role == "batch"}
        params = {id for id, role in roles.items() if role in ("param", "frozen")}
        for node in self.program.nodes[: self.first]:
            if not batch.isdisjoint(node.refs):
                batch.update(node.results)
            if not params.isdisjoint(node.refs):
                params.update(node.results)
        made = self.forward()
        of_batch = [value for value in made if value in batch]
        # In a loop over microbatches parameters may come in as casts that were made before it, whose role is not
        # "param".
        on_the_way = [value for value in of_batch if value in params]
        return on_the_way or of_batch or made


@computed_once
def forward_facts(program: Program) -> ForwardFacts:
    """What chains by several policies have in common."""
    return ForwardFacts(program)


def _between_blocks(cuts: Sequence[ForwardCut]) -> list[ForwardCut]:
    """Those that are not within a block: where much less is alive at a cut shortly before and at one shortly behind.

    What a block reads all along, as what a residual connection adds, would be kept for each cut within it: it is read
    by stages that do not follow at once. A search for the best order finds that out by itself; a policy has one way for
    each stage.
    """
    found = []
    for number, cut in enumerate(cuts):
        before = [other for other in cuts[:number] if cut.made_bytes - other.made_bytes <= BLOCK * cut.nbytes]
        behind = [other for other in cuts[number + 1 :] if other.made_bytes - cut.made_bytes <= BLOCK * cut.nbytes]
        if not (_any_narrower(before, cut) and _any_narrower(behind, cut)):
            found.append(cut)
    return found


def _any_narrower(others: Sequence[ForwardCut], cut: ForwardCut) -> bool:
    return any(other.nbytes * NEAR < cut.nbytes for other in others)


def _cuts(facts: ForwardFacts) -> list[ForwardCut]:
    """Nodes behind which the fewest bytes are alive, as seen from both sides; where they stay as few, behind every few
    values.
    """
    made, alive = _bytes_by_node(facts)
    made_so_far = list(accumulate(made))
    minima = _minima(made, alive)
    found = []
    for number, (at, nbytes) in enumerate(minima):
        least_nearby = min(other for _, other in minima[max(0, number - 1) : number + 2])
        if nbytes <= NEAR * least_nearby and at < len(alive) - 1:
            found.append(ForwardCut(at, nbytes, made_so_far[at]))
    return found


def _bytes_by_node(facts: ForwardFacts) -> tuple[list[int], list[int]]:
    """Of each node of forward: bytes that it makes, and bytes alive behind it that a later one reads."""
    first = facts.first or 0
    begins: dict[int, int] = {}
    ends: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for value in facts.streams():
        group, maker = facts.group(value), facts.maker[value]
        reads = [reader for reader in facts.readers.get(value, ()) if reader < first]
        begins[group] = min(begins.get(group, maker), maker)
        # Up to its last reader in forward; what none reads, to where the first value in this memory was made.
        ends[group] = max([ends.get(group, maker), *reads])
        sizes[group] = max(sizes.get(group, 0), facts.program.values[value].nbytes)

    made, change = [0] * (first + 1), [0] * (first + 1)
    for group, nbytes in sizes.items():
        if nbytes > SMALL:
            made[begins[group]] += nbytes
            change[begins[group]] += nbytes
            change[ends[group]] -= nbytes
    return made, list(accumulate(change[:first]))


def _minima(made: Sequence[int], alive: Sequence[int]) -> list[tuple[int, int]]:
    """(node, bytes alive behind it) where these are least before they rise; where they stay least, each time `FEW`
    values were made.
    """
    found: list[tuple[int, int]] = []
    lowest, at, made_since = float("inf"), -1, 0
    for node, nbytes in enumerate(alive):
        made_since += made[node]
        if nbytes and nbytes <= lowest:
            if nbytes == lowest and made_since >= FEW * nbytes:
                found.append((at, nbytes))
                made_since = 0
            elif nbytes < lowest:
                made_since = 0
            lowest, at = nbytes, node
        elif nbytes > lowest * RISE:
            found.append((at, int(lowest)))
            lowest, made_since = float("inf"), 0
    return found


def _backs(facts: ForwardFacts, stages: Sequence[range], rests: Collection[int]) -> list[range]:
    """The part of backward that belongs to each stage.

    It goes up to the last node that reads something of the stage, and on to the first that reads what an earlier stage
    made for its own backward. What a stage hands on is read by the next one's, too.
    """
    first = facts.first or 0
    end_of_all = facts.last + 1
    ends, begins = [], []
    for nodes in stages:
        end, begin = first, end_of_all
        made: list[int] = []
        for k in nodes:
            made += [value for value in facts.program.nodes[k].results if value not in rests]
        for value in made:
            readers = facts.readers.get(value, ())
            end = max([end, *(reader + 1 for reader in readers if reader <= facts.last)])
            handed_on = any(nodes.stop <= reader < first for reader in readers)
            if not handed_on:
                begin = min([begin, *(reader for reader in readers if reader >= first)])
        ends.append(end)
        begins.append(begin)

    backs: list[range] = []
    begin = first
    for stage in reversed(range(len(stages))):
        end = end_of_all if stage == 0 else max(begin, ends[stage], min(begins[:stage]))
        backs.append(range(begin, end))
        begin = end
    return backs[::-1]
