"""Stages: a training step as a chain, cut where little goes from one part of forward to the next.

Problem: to keep or to make again is a question per value, and a step has thousands. Idea: forward is cut where what is
alive between two nodes is least (`cuts`; behind a block of a transformer, only the residual stream is). What crosses a
cut is what a stage needs to run again; what else backward reads of a stage may be kept or not: `ForwardStage` has ways to keep
it, from everything to nothing.

What every stage reads (masks, positions, the output of an encoder) is held all the time, and so are outputs of the
step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise

import attrs

from colofunc.planner.recompute.chain import Back, ChainStage, KeepOption, Run
from colofunc.planner.recompute.cuts import ForwardFacts, forward_facts
from colofunc.program.cost import NodeSeconds
from colofunc.program.ir import Node, Program
from colofunc.program.passes.recompute import Replay

WAYS = 12
"""At most this many ways to keep a stage."""
LONG = 100
"""Chains of more parts are joined where parts keep nothing."""

Keeps = Callable[[Node, Sequence[Node]], bool]
Rung = tuple[frozenset[int], float]
"""A way to keep a stage: the memory groups that stay, and seconds to make the others again."""


@attrs.frozen(eq=False)
class ForwardStage:
    """One stage. `made`: values that may be dropped; `out`: those of them that later stages read in forward.

    `saved`: memory groups that backward reads -> bytes. `keeps`: parallel to `stage.ways`, the values that stay.
    """

    nodes: range
    made: frozenset[int]
    out: frozenset[int]
    saved: Mapping[int, int]
    back: range
    stage: ChainStage
    keeps: tuple[frozenset[int], ...]


@attrs.frozen(eq=False)
class ForwardChain:
    """A program's forward in parts, and where backward begins. Programs without a backward have no parts."""

    program: Program
    parts: tuple[ForwardStage, ...]

    @property
    def stages(self) -> tuple[ChainStage, ...]:
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


def chain_of(program: Program, node_s: NodeSeconds, keeps: Keeps | None = None, every: int = 1) -> ForwardChain:
    """The chain of a local program. `keeps(node, readers in forward)`: a policy; each stage then has one way only, the
    policy's.

    `every`: so many stages are one.
    """
    facts = forward_facts(program)
    if facts.first is None:
        return ForwardChain(program, ())
    ranges, stage_of, rests, backs = facts.divided(every, keeps is not None)
    parts = []
    for number, nodes in enumerate(ranges):
        parts.append(_part(facts, nodes, number, stage_of, rests, backs[number], node_s, keeps))
    return ForwardChain(program, tuple(parts))


def joined_stages(chain: ForwardChain) -> ForwardChain:
    """Of a long chain, parts that keep nothing and hand nothing on are one with what follows: a search has less to tell
    apart.
    """
    # a short chain is searched as it is
    if len(chain.parts) <= LONG:
        return chain
    nodes = chain.program.nodes
    parts: list[ForwardStage] = []
    open_parts: list[ForwardStage] = []  # parts that become one with the next
    for part, later in zip(chain.parts, (*chain.parts[1:], None), strict=True):
        open_parts.append(part)
        # Ranks of a pipeline have orders of their own, so their stages stay apart.
        same_ranks = later is not None and nodes[part.nodes[0]].on == nodes[later.nodes[0]].on
        if not (_holds_nothing(part) and same_ranks):
            parts.append(_one(open_parts))
            open_parts = []
    return attrs.evolve(chain, parts=tuple(parts))


def _holds_nothing(part: ForwardStage) -> bool:
    """Whether a part hands nothing on, and keeps nothing, in no way to keep it."""
    if part.out or part.stage.out_bytes:
        return False
    return all(way.nbytes == 0 and way.again_s == 0 for way in part.stage.ways)


def _one(parts: Sequence[ForwardStage]) -> ForwardStage:
    """Of parts one behind the other, all but the last keep nothing."""
    first, last = parts[0], parts[-1]
    saved: dict[int, int] = {}
    for part in parts:
        saved.update(part.saved)
    stage = attrs.evolve(
        last.stage,
        forward_s=sum(part.stage.forward_s for part in parts),
        backward_s=sum(part.stage.backward_s for part in parts),
    )
    return attrs.evolve(
        last,
        nodes=range(first.nodes.start, last.nodes.stop),
        made=frozenset().union(*(part.made for part in parts)),
        saved=saved,
        back=range(last.back.start, first.back.stop),
        stage=stage,
    )


def _part(
    facts: ForwardFacts,
    nodes: range,
    number: int,
    stage_of: Mapping[int, int],
    rests: Collection[int],
    back: range,
    node_s: NodeSeconds,
    keeps: Keeps | None,
) -> ForwardStage:
    program = facts.program
    members = _members(facts, nodes, rests)
    sizes: dict[int, int] = {}
    for group, values in members.items():
        sizes[group] = max(program.values[value].nbytes for value in values)
    outs, saved = _outs_and_saved(facts, members, number, stage_of)
    if keeps is None:
        rungs = _ladder(facts, nodes, saved, outs, sizes, node_s)
    else:
        rungs = _by_policy(facts, nodes, saved, outs, members, node_s, keeps)

    out_bytes = sum(sizes[group] for group in outs)
    ways = tuple(KeepOption(out_bytes + _nbytes(rung, sizes), rung[1]) for rung in rungs)
    stage = ChainStage(_seconds(program, nodes, node_s), _seconds(program, back, node_s), out_bytes, ways)

    handed_on = _values(outs, members)
    stays = tuple(handed_on | _values(kept, members) for kept, _ in rungs)
    made = _values(members, members)
    return ForwardStage(nodes, made, handed_on, {group: sizes[group] for group in saved}, back, stage, stays)


def _outs_and_saved(
    facts: ForwardFacts, members: Mapping[int, Collection[int]], number: int, stage_of: Mapping[int, int]
) -> tuple[set[int], set[int]]:
    """(memory groups of stage `number` that later stages read in forward, others that backward reads)."""
    first = facts.first or 0
    outs: set[int] = set()
    saved: set[int] = set()
    for group, values in members.items():
        readers: list[int] = []
        for value in values:
            readers += facts.readers.get(value, ())
        if any(reader < first and stage_of[reader] > number for reader in readers):
            outs.add(group)
        elif any(first <= reader <= facts.last for reader in readers):
            saved.add(group)
    return outs, saved


def _values(groups: Iterable[int], members: Mapping[int, Collection[int]]) -> frozenset[int]:
    return frozenset().union(*(members[group] for group in groups))


def _seconds(program: Program, nodes: Iterable[int], node_s: NodeSeconds) -> float:
    return sum(node_s(program.nodes[k], program.values) for k in nodes)


def _members(facts: ForwardFacts, nodes: range, rests: Collection[int]) -> dict[int, set[int]]:
    """Memory group -> values in it, of what a stage makes and may drop."""
    inputs = set(facts.program.inputs)
    members: dict[int, set[int]] = {}
    for k in nodes:
        for value in facts.program.nodes[k].outs:
            if value is not None and value not in rests and facts.group(value) not in inputs:
                members.setdefault(facts.group(value), set()).add(value)
    return members


def _by_policy(
    facts: ForwardFacts,
    nodes: range,
    saved: Collection[int],
    outs: Collection[int],
    members: Mapping[int, Collection[int]],
    node_s: NodeSeconds,
    keeps: Keeps,
) -> list[Rung]:
    """All that backward reads, and what a policy keeps of it."""
    program = facts.program

    def kept(value: int) -> bool:
        maker = program.nodes[facts.maker[value]]
        # A loop over microbatches is the whole step: what it sums up, such as gradients that are reduced behind it, is
        # not made twice.
        return maker.loop is not None or keeps(maker, facts.read_by(value))

    chosen = {group for group, values in members.items() if any(map(kept, values))}
    again = _again(facts, nodes, saved, chosen | set(outs))
    # What is made again may start from what its nodes read; the policy's other values need not stay.
    needed = set(saved)
    for k in again:
        needed.update(facts.group(ref) for ref in program.nodes[k].refs)
    return [(frozenset(saved), 0.0), (frozenset(chosen & needed), _seconds(program, sorted(again), node_s))]


def _again_s(
    facts: ForwardFacts, nodes: range, saved: Collection[int], kept: Collection[int], node_s: NodeSeconds
) -> float:
    """Seconds to make what is saved but not kept, from what is kept."""
    return _seconds(facts.program, sorted(_again(facts, nodes, saved, kept)), node_s)


def _again(facts: ForwardFacts, nodes: range, saved: Collection[int], kept: Collection[int]) -> set[int]:
    """The nodes of a stage that make what is saved but not kept, from what is kept."""
    program, first = facts.program, facts.first or 0

    def is_missing(value: int | None) -> bool:
        if value is None or facts.group(value) not in saved or facts.group(value) in kept:
            return False
        return any(reader >= first for reader in facts.readers.get(value, ()))

    again = set[int]()
    pending = [k for k in nodes if any(map(is_missing, program.nodes[k].outs))]
    while pending:
        k = pending.pop()
        if k in again:
            continue
        again.add(k)
        for ref in program.nodes[k].refs:
            maker = facts.maker.get(ref)
            if maker is not None and maker in nodes and facts.group(ref) not in kept:
                pending.append(maker)
    return again


def _ladder(
    facts: ForwardFacts,
    nodes: range,
    saved: Collection[int],
    outs: Collection[int],
    sizes: Mapping[int, int],
    node_s: NodeSeconds,
) -> list[Rung]:
    """Ways to keep a stage, from everything to nothing: each step drops what costs least to make again per byte."""
    kept, seconds = set(saved), 0.0
    rungs = [(frozenset(kept), seconds)]
    while kept:
        # Every group is tried anew: what it costs depends on what else is gone.
        trials: dict[int, float] = {}
        for group in kept:
            trials[group] = _again_s(facts, nodes, saved, (kept - {group}) | set(outs), node_s)
        dropped = min(sorted(kept), key=lambda group: (trials[group] - seconds) / sizes[group])
        kept.discard(dropped)
        seconds = trials[dropped]
        rungs.append((frozenset(kept), seconds))
    return _few(rungs, sizes)


def _few(rungs: list[Rung], sizes: Mapping[int, int]) -> list[Rung]:
    """At most `WAYS` rungs, about evenly spaced in bytes; of equal seconds the last, but always both ends."""
    if len(rungs) <= 2:
        return rungs
    # Of two with equal seconds the lower one has fewer bytes.
    middle = [rung for rung, lower in pairwise(rungs[1:]) if rung[1] < lower[1]]
    if not middle:
        return [rungs[0], rungs[-1]]
    top = _nbytes(rungs[0], sizes)
    aims = [top * (1 - k / (WAYS - 1)) for k in range(1, WAYS - 1)]
    chosen = {min(middle, key=partial(_off, sizes, aim)) for aim in aims}
    return [rungs[0], *sorted(chosen, key=lambda rung: -_nbytes(rung, sizes)), rungs[-1]]


def _nbytes(rung: Rung, sizes: Mapping[int, int]) -> int:
    return sum(sizes[group] for group in rung[0])


def _off(sizes: Mapping[int, int], aim: float, rung: Rung) -> float:
    return abs(_nbytes(rung, sizes) - aim)
