"""Stages: a training step as a chain, cut where little goes from one part of forward to the next.

Problem: to keep or to make again is a question per value, and a step has thousands. Idea: forward is cut where what is
alive between two nodes is least (behind a block of a transformer, only the residual stream is). What crosses a cut is
what a stage needs to run again; what else backward reads of a stage may be kept or not.

    bytes alive   1 3 4 1 4 4 2 1 3 4 1
    cuts                1       1     1       stage 0 | stage 1 | stage 2 | stage 3

What every stage reads (masks, positions, the output of an encoder) is held all the time, and so are outputs of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property, partial
from itertools import accumulate, pairwise

import attrs

from colofunc.ops.debug import DEBUG
from colofunc.planner.recompute.chain import Back, Kept, Run, Stage
from colofunc.program.aliases import aliases
from colofunc.program.ir import Node, Program, Value, computed_once
from colofunc.program.passes.recompute import Replay

SMALL = 1 << 10
"""Values of at most this many bytes are always kept."""
RISE = 1.25
"""Live bytes between two cuts must exceed those at the cuts by this factor."""
NEAR = 1.5
"""A cut has at most this many times the bytes of those next to it."""
BLOCK = 16
"""A cut is within a block if, at most this many times its bytes away on either side, there is one with less (by the factor above)."""
FEW = 3
"""Where a chain is equally narrow everywhere, it is cut each time this many of its values have been made."""
WAYS = 12
LONG = 100
"""Chains of more parts are joined where parts keep nothing."""

NodeS = Callable[[Node, Mapping[int, Value]], float]
Keeps = Callable[[Node, Sequence[Node]], bool]
Divided = tuple[list[range], dict[int, int], frozenset[int], list[range]]
"""The nodes of each stage, the stage of each node, values that are never dropped, the part of backward of each stage."""


@attrs.frozen(eq=False)
class Part:
    """One stage. `made`: values that may be dropped; `out`: those of them that later stages read in forward.

    `saved`: memory groups that backward reads -> bytes. `keeps`: parallel to `stage.ways`, the values that stay.
    """

    nodes: range
    made: frozenset[int]
    out: frozenset[int]
    saved: Mapping[int, int]
    back: range
    stage: Stage
    keeps: tuple[frozenset[int], ...]


@attrs.frozen(eq=False)
class Chain:
    """A program's forward in parts, and where backward begins. Programs without a backward have no parts."""

    program: Program
    parts: tuple[Part, ...]

    @property
    def stages(self) -> tuple[Stage, ...]:
        return tuple(part.stage for part in self.parts)

    def replay(self, order: Iterable[Run | Back]) -> Program:
        """The program that does the stages' work in this order."""
        return self.replayed(order).finish()

    def replayed(self, order: Iterable[Run | Back]) -> Replay:
        """The order of nodes in which the stages' work is done in this order."""
        made = Replay(self.program)
        seen: set[int] = set()
        for step in order:
            part = self.parts[step.stage]
            if isinstance(step, Back):
                for k in part.back:
                    made.run(k)
                made.drop(part.made)
                continue
            keep = part.out if step.way is None else part.out | part.keeps[step.way]
            if step.stage in seen:
                made.drop(part.made)
                made.want(sorted(keep if step.way is not None else part.out))
            else:
                seen.add(step.stage)
                for k in part.nodes:
                    made.run(k)
            made.drop(part.made - keep)
            if not step.first and step.stage:
                made.drop(self.parts[step.stage - 1].out)
        for k in range(self.parts[0].back.stop, len(self.program.nodes)):
            made.run(k)
        return made


def chain_of(program: Program, node_s: NodeS, keeps: Keeps | None = None, every: int = 1) -> Chain:
    """The chain of a local program. `keeps(node, readers in forward)`: a policy; each stage then has one way only, the policy's.

    `every`: so many stages are one.
    """
    facts = _facts(program)
    if facts.first is None:
        return Chain(program, ())
    ranges, stage_of, rests, backs = facts.divided(every, keeps is not None)
    parts = [_part(facts, nodes, s, stage_of, rests, backs[s], node_s, keeps) for s, nodes in enumerate(ranges)]
    return Chain(program, tuple(parts))


def joined(chain: Chain) -> Chain:
    """Of a long chain, parts that keep nothing and hand nothing on are one with what follows: a search has less to tell apart."""
    if len(chain.parts) <= LONG:
        return chain
    parts, before, nodes = list[Part](), list[Part](), chain.program.nodes
    for part, later in zip(chain.parts, (*chain.parts[1:], None), strict=True):
        before.append(part)
        nothing = not part.out and part.stage.out_bytes == 0 and all(way.nbytes == 0 and way.again_s == 0 for way in part.stage.ways)
        alike = later is not None and nodes[part.nodes[0]].on == nodes[later.nodes[0]].on  # ranks of a pipeline have orders of their own
        if not nothing or not alike:
            parts.append(_one(before))
            before = []
    return attrs.evolve(chain, parts=tuple(parts))


def _one(parts: Sequence[Part]) -> Part:
    """Of parts one behind the other, all but the last keep nothing."""
    first, last = parts[0], parts[-1]
    return attrs.evolve(
        last,
        nodes=range(first.nodes.start, last.nodes.stop),
        made=frozenset().union(*(part.made for part in parts)),
        saved={group: nbytes for part in parts for group, nbytes in part.saved.items()},
        back=range(last.back.start, first.back.stop),
        stage=attrs.evolve(
            last.stage,
            forward_s=sum(part.stage.forward_s for part in parts),
            backward_s=sum(part.stage.backward_s for part in parts),
        ),
    )


class _Facts:
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
    def cuts(self) -> list[Cut]:
        """Where forward may be cut."""
        return _cuts(self)

    def divided(self, every: int, blocks: bool = False) -> Divided:
        """Forward in stages, where so many of those between cuts are one. blocks: leave out cuts within blocks."""
        if (every, blocks) not in self._divided:
            cuts = [cut.at for cut in (_between_blocks(self.cuts) if blocks else self.cuts)]
            ends = [0, *(cut + 1 for cut in cuts[every - 1 :: every]), self.first or 0]
            ranges = [range(a, b) for a, b in pairwise(ends) if b > a]
            stage_of = {k: s for s, nodes in enumerate(ranges) for k in nodes}
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
        return [v for v, k in self.maker.items() if k < (self.first or 0) and self.group(v) not in inputs]

    def resting(self, stage_of: Mapping[int, int]) -> frozenset[int]:
        """Forward values that are never dropped."""
        found = set(self.program.outputs)
        for v in self.forward():
            readers = self.readers.get(v, ())
            at = stage_of[self.maker[v]]
            far = any(stage_of.get(k, at) > at + 1 for k in readers if k < (self.first or 0))
            late = any(k > self.last or self.program.nodes[k].phase == "update" for k in readers)
            shown = self.program.nodes[self.maker[v]].target == DEBUG or any(self.program.nodes[k].target == DEBUG for k in readers)
            if far or late or shown or self.program.values[v].nbytes <= SMALL:
                found.add(v)
        groups = {self.group(v) for v in found}
        return frozenset(v for v in self.forward() if self.group(v) in groups)

    def streams(self) -> list[int]:
        """Values on the way from the batch through the parameters to the loss: what is cut."""
        roles = {i: self.program.values[i].role for i in self.program.inputs}
        batch = {i for i, role in roles.items() if role == "batch"}
        params = {i for i, role in roles.items() if role in ("param", "frozen")}
        for node in self.program.nodes[: self.first]:
            outs = node.results
            if any(r in batch for r in node.refs):
                batch.update(outs)
            if any(r in params for r in node.refs):
                params.update(outs)
        every = self.forward()
        found = [v for v in every if v in batch and v in params]
        return found or every


@computed_once
def _facts(program: Program) -> _Facts:
    """What chains by several policies have in common."""
    return _Facts(program)


@attrs.frozen
class Cut:
    """Forward cut behind a node: bytes that are alive there, and bytes that were made up to there."""

    at: int
    nbytes: int
    made_bytes: int


def _between_blocks(cuts: Sequence[Cut]) -> list[Cut]:
    """Those that are not within a block: where much less is alive at a cut shortly before and at one shortly behind.

    What a block reads all along, as what a residual connection adds, would be kept for each cut within it: it is read by stages that do
    not follow at once. A search for the best order finds that out by itself; a policy has one way for each stage.
    """
    found = []
    for number, cut in enumerate(cuts):
        before = (other for other in cuts[:number] if cut.made_bytes - other.made_bytes <= BLOCK * cut.nbytes)
        behind = (other for other in cuts[number + 1 :] if other.made_bytes - cut.made_bytes <= BLOCK * cut.nbytes)
        if not all(any(other.nbytes * NEAR < cut.nbytes for other in side) for side in (before, behind)):
            found.append(cut)
    return found


def _cuts(facts: _Facts) -> list[Cut]:
    """Nodes behind which the fewest bytes are alive, as seen from both sides; where they stay as few, behind every few values."""
    first = facts.first or 0
    change, made = [0] * (first + 1), [0] * (first + 1)
    spans: dict[int, list[int]] = {}
    for v in facts.streams():
        reads = [k for k in facts.readers.get(v, ()) if k < first]
        span = spans.setdefault(facts.group(v), [facts.maker[v], facts.maker[v], 0])
        span[0] = min(span[0], facts.maker[v])
        span[1] = max([span[1], *reads])
        span[2] = max(span[2], facts.program.values[v].nbytes)
    for begin, end, nbytes in spans.values():
        if nbytes > SMALL:
            made[begin] += nbytes
            change[begin] += nbytes
            change[end] -= nbytes
    alive, curve = 0, []
    for step in change[:first]:
        alive += step
        curve.append(alive)
    so_far = list(accumulate(made))
    found: list[tuple[int, int]] = []
    low, at, since = float("inf"), -1, 0
    for k, nbytes in enumerate(curve):
        since += made[k]
        if nbytes and nbytes <= low:
            if nbytes == low and since >= FEW * nbytes:
                found.append((at, int(low)))
                since = 0
            elif nbytes < low:
                since = 0
            low, at = nbytes, k
        elif nbytes > low * RISE:
            found.append((at, int(low)))
            low, since = float("inf"), 0
    near = [min(b for _, b in found[max(0, k - 1) : k + 2]) for k in range(len(found))]
    return [
        Cut(at, nbytes, so_far[at]) for (at, nbytes), least in zip(found, near, strict=True) if nbytes <= NEAR * least and at < first - 1
    ]


def _backs(facts: _Facts, ranges: Sequence[range], rests: Collection[int]) -> list[range]:
    """The part of backward that belongs to each stage: up to the last node that reads something of it, and on to the first that
    reads what an earlier stage made for its own backward. What a stage hands on is read by the next one's, too."""
    first = facts.first or 0
    ends, begins = [first] * len(ranges), [facts.last + 1] * len(ranges)
    for s, nodes in enumerate(ranges):
        made = [o for k in nodes for o in facts.program.nodes[k].results if o not in rests]
        reads = {v: facts.readers.get(v, ()) for v in made}
        ends[s] = max([first, *(k + 1 for ks in reads.values() for k in ks if k <= facts.last)])
        own = [ks for ks in reads.values() if not any(nodes.stop <= k < first for k in ks)]
        begins[s] = min([facts.last + 1, *(k for ks in own for k in ks if first <= k)])
    out: list[range] = []
    begin = first
    for s in reversed(range(len(ranges))):
        end = facts.last + 1 if s == 0 else max(begin, ends[s], min(begins[:s]))
        out.append(range(begin, end))
        begin = end
    return out[::-1]


def _part(
    facts: _Facts,
    nodes: range,
    number: int,
    stage_of: Mapping[int, int],
    rests: Collection[int],
    back: range,
    node_s: NodeS,
    keeps: Keeps | None,
) -> Part:
    program = facts.program
    inputs = set(program.inputs)
    made = frozenset(
        o for k in nodes for o in program.nodes[k].outs
        if o is not None and o not in rests and facts.group(o) not in inputs
    )  # fmt: skip
    first = facts.first or 0
    outs = set()
    for value in made:
        if any(k < first and stage_of[k] > number for k in facts.readers.get(value, ())):
            outs.add(facts.group(value))
    sizes: dict[int, int] = {}
    for v in made:
        sizes[facts.group(v)] = max(sizes.get(facts.group(v), 0), program.values[v].nbytes)
    saved = {facts.group(v) for v in made if any(first <= k <= facts.last for k in facts.readers.get(v, ()))} - outs
    out_bytes = sum(sizes[g] for g in outs)
    members: dict[int, set[int]] = {}
    for v in made:
        members.setdefault(facts.group(v), set()).add(v)
    sets: list[tuple[frozenset[int], float]]
    if keeps is not None:
        chosen = {g for g in members if any(keeps(program.nodes[facts.maker[v]], facts.read_by(v)) for v in members[g])}
        again = _again(facts, nodes, saved, chosen | outs)
        read = {facts.group(r) for k in again for r in program.nodes[k].refs}  # what is made again may start from these
        again_s = sum(node_s(program.nodes[k], program.values) for k in sorted(again))
        sets = [(frozenset(saved), 0.0), (frozenset(chosen & (read | saved)), again_s)]
    else:
        sets = _ladder(facts, nodes, saved, outs, sizes, node_s)
    ways = tuple(Kept(out_bytes + _nbytes(rung, sizes), rung[1]) for rung in sets)
    forward_s, backward_s = (sum(node_s(program.nodes[k], program.values) for k in part) for part in (nodes, back))
    stage = Stage(forward_s, backward_s, out_bytes, ways)
    values = tuple(frozenset().union(*(members[g] for g in (*kept, *outs))) for kept, _ in sets)
    held = frozenset().union(*(members[g] for g in outs))
    return Part(nodes, made, held, {g: sizes[g] for g in saved}, back, stage, values)


def _again_s(facts: _Facts, nodes: range, saved: Collection[int], kept: Collection[int], node_s: NodeS) -> float:
    """Seconds to make what is saved but not kept, from what is kept."""
    program = facts.program
    return sum(node_s(program.nodes[k], program.values) for k in sorted(_again(facts, nodes, saved, kept)))


def _again(facts: _Facts, nodes: range, saved: Collection[int], kept: Collection[int]) -> set[int]:
    """The nodes of a stage that make what is saved but not kept, from what is kept."""
    program, again = facts.program, set[int]()
    missing = [
        k for k in nodes
        for o in program.nodes[k].outs
        if o is not None and facts.group(o) in saved and facts.group(o) not in kept
        and any(r >= (facts.first or 0) for r in facts.readers.get(o, []))
    ]  # fmt: skip
    while missing:
        k = missing.pop()
        if k in again:
            continue
        again.add(k)
        for r in program.nodes[k].refs:
            at = facts.maker.get(r)
            if at is not None and at in nodes and facts.group(r) not in kept:
                missing.append(at)
    return again


def _ladder(
    facts: _Facts, nodes: range, saved: Collection[int], outs: Collection[int], sizes: Mapping[int, int], node_s: NodeS
) -> list[tuple[frozenset[int], float]]:
    """Ways to keep a stage, from everything to nothing: each step drops what costs least to make again per byte."""
    kept, seconds = set(saved), 0.0
    rungs = [(frozenset(kept), seconds)]
    while kept:
        trials = {g: _again_s(facts, nodes, saved, (kept - {g}) | set(outs), node_s) for g in kept}
        gone = min(sorted(kept), key=lambda g: (trials[g] - seconds) / sizes[g])
        kept.discard(gone)
        seconds = trials[gone]
        rungs.append((frozenset(kept), seconds))
    return _few(rungs, sizes)


def _few(rungs: list[tuple[frozenset[int], float]], sizes: Mapping[int, int]) -> list[tuple[frozenset[int], float]]:
    """At most `WAYS` rungs, about evenly spaced in bytes; of equal seconds the last, but always both ends."""
    middle = [b for b, c in pairwise(rungs[1:]) if b[1] < c[1]]  # cheaper in bytes at the same seconds wins
    if len(rungs) <= 2 or not middle:
        return rungs if len(rungs) <= 2 else [rungs[0], rungs[-1]]
    top = _nbytes(rungs[0], sizes)
    aims = [top * (1 - k / (WAYS - 1)) for k in range(1, WAYS - 1)]
    chosen = {min(middle, key=partial(_off, sizes, aim)) for aim in aims}
    return [rungs[0], *sorted(chosen, key=lambda rung: -_nbytes(rung, sizes)), rungs[-1]]


def _nbytes(rung: tuple[frozenset[int], float], sizes: Mapping[int, int]) -> int:
    return sum(sizes[g] for g in rung[0])


def _off(sizes: Mapping[int, int], aim: float, rung: tuple[frozenset[int], float]) -> float:
    return abs(_nbytes(rung, sizes) - aim)
