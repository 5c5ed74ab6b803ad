"""What is kept for backward where forward is no chain: a linear program over rounds, rounded.

Problem: a chain is cut where little crosses, and what crosses far (the skips of a U-shaped net, the features of a dense one) is
held all the time, because no stage owns it. Idea: forward and backward are cut in rounds, and for each piece of memory that
forward makes two numbers between 0 and 1 say whether it lies there at the beginning of a round and whether it is made in it.

    least    seconds of what is made
    so that  what a round reads lies there, or is made in it                1 <= S[t, v] + R[t, v]
             what is made has what it is made of                      R[t, v] <= S[t, u] + R[t, u]
             what lies there lay there before, or was made          S[t+1, v] <= S[t, v] + R[t, v]
             bytes in every round are at most so many     sum of (S + R)[t, v] bytes[v] + others[t] <= M

Whole numbers take too long. The fractions are rounded in two phases: S by a threshold, and then what has to be made follows.
Several M and thresholds give several orders of work; which of them keeps to a budget is for the accountant to say.

Source: Checkmate (Jain et al., 1910.02653, section 5), there with a round per operator.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property, partial
from itertools import accumulate, pairwise

import attrs
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_array

from colofunc.planner.recompute.stages import NodeS
from colofunc.program.aliases import aliases
from colofunc.program.ir import Program
from colofunc.program.passes.recompute import Replay

PIECES = 128
"""At most this many pieces of memory are variables, the largest that backward reads; smaller ones are kept."""
ROUNDS = 20
"""Forward and backward are cut into this many rounds each, of equal bytes that are made and last read there."""
LEVELS = 16
"""Amounts of memory between what is held if all is kept and the least."""
THRESHOLDS = (0.5, 0.3, 0.15, 0.05, 0.7, 0.9)
SKIPS = 2
"""Of a chain everything is some stage's but what the last one makes."""
SMALL = 1 << 10
ITERATIONS = 20_000
"""Limit of the simplex method for one amount of memory; what would take more is not proposed."""

Rounded = NDArray[np.bool_]


@attrs.frozen(eq=False)
class Piece:
    """Memory that forward makes and backward reads. `reads`: numbers of the pieces that it is made of, `cost_s`: from these."""

    group: int
    nbytes: int
    cost_s: float
    reads: frozenset[int]
    made: int  # round
    wanted: frozenset[int]  # rounds in which it is read where nothing is made again


@attrs.frozen(eq=False)
class Rounds:
    """A program in rounds. `ends`: behind the last node of each; the last one is what follows backward. `others`: bytes beside pieces."""

    program: Program
    ends: tuple[int, ...]
    pieces: tuple[Piece, ...]
    others: tuple[int, ...]
    values: dict[int, tuple[int, ...]]  # group -> values that forward makes in it, of all that may be dropped
    last: dict[int, int]  # group that backward does not read -> round of its last reader

    def replay(self, held: Rounded) -> Program:
        """The program in which piece v lies there at the beginning of round t where `held[t, v]`."""
        again, begin = Replay(self.program), 0
        number = {piece.group: v for v, piece in enumerate(self.pieces)}
        for t, end in enumerate(self.ends):
            for group, values in self.values.items():
                gone = not held[t, number[group]] if group in number else self.last[group] < t
                if gone:
                    again.drop(values)
            for k in range(begin, end):
                again.run(k)
            begin = end
        return again.finish()

    @cached_property
    def most_bytes(self) -> int:
        """If all is kept until it is read for the last time."""
        def kept_bytes(t: int) -> int:
            return sum(piece.nbytes for piece in self.pieces if piece.made <= t <= max(piece.wanted))

        return max(other_bytes + kept_bytes(t) for t, other_bytes in enumerate(self.others))


def relaxed(program: Program, node_s: NodeS, owned: Collection[int] = ()) -> Iterator[Callable[[], Program]]:
    """Orders of work, fastest first by what the linear programs say.

    owned: groups of memory that a chain's stages own. None where that is all, where there is a loop or no backward.
    """
    rounds = rounds_of(program, node_s)
    if rounds is None or sum(piece.group not in owned for piece in rounds.pieces) < SKIPS:
        return
    found = dict[bytes, tuple[float, Rounded]]()
    for level in range(1, LEVELS):
        fractions = solve(rounds, rounds.most_bytes * level / LEVELS)
        if fractions is None:
            continue
        for threshold in THRESHOLDS:
            held = fractions[0] > threshold
            found.setdefault(held.tobytes(), (fractions[1], held))
    for _, held in sorted(found.values(), key=lambda one: one[0]):
        yield partial(rounds.replay, held)


def solve(rounds: Rounds, most_bytes: float) -> tuple[NDArray[np.float64], float] | None:
    """(S of the linear program, its seconds); None where nothing keeps to so many bytes, or the solver does not get there."""
    pieces, n, turns = rounds.pieces, len(rounds.pieces), len(rounds.ends)

    def held(t: int, v: int) -> int:
        return t * n + v

    def made(t: int, v: int) -> int:
        return (turns + t) * n + v

    rows, low = list[tuple[tuple[int, float], ...]](), list[float]()
    lower, upper = np.zeros(2 * turns * n), np.ones(2 * turns * n)
    for v, piece in enumerate(pieces):
        lower[made(piece.made, v)] = 1
        for t in range(turns):
            if t <= piece.made:
                upper[held(t, v)] = 0
            if t < piece.made:
                upper[made(t, v)] = 0
            if t in piece.wanted:
                rows.append(((held(t, v), 1), (made(t, v), 1)))
                low.append(1)
            if t > piece.made:
                rows += [((held(t, u), 1), (made(t, u), 1), (made(t, v), -1)) for u in piece.reads]
                low += [0] * len(piece.reads)
                rows.append(((held(t - 1, v), 1), (made(t - 1, v), 1), (held(t, v), -1)))
                low.append(0)
    for t in range(turns):
        rows.append(tuple((at(t, v), -piece.nbytes / most_bytes) for v, piece in enumerate(pieces) for at in (held, made)))
        low.append(rounds.others[t] / most_bytes - 1)
    cost = np.concatenate([np.zeros(turns * n), np.tile([piece.cost_s for piece in pieces], turns)])
    scale = float(cost.max()) or 1.0
    at = [(k, column, value) for k, row in enumerate(rows) for column, value in row]
    r, c, x = (np.array(part) for part in zip(*at, strict=True))
    matrix = csr_array((-x.astype(float), (r, c)), shape=(len(rows), len(cost)))
    result = linprog(
        cost / scale, A_ub=matrix, b_ub=-np.array(low), bounds=np.stack([lower, upper], axis=1), method="highs-ds",
        options={"maxiter": ITERATIONS},
    )  # fmt: skip
    return None if result.status != 0 else (result.x[: turns * n].reshape(turns, n), float(result.fun) * scale)


def rounds_of(program: Program, node_s: NodeS) -> Rounds | None:
    """None where there is a loop, no backward, or nothing to choose."""
    back = [k for k, node in enumerate(program.nodes) if node.phase == "backward"]
    if not back or not back[0] or any(node.loop is not None for node in program.nodes):
        return None
    facts = _Facts(program, back[0], back[-1])
    saved = facts.saved()[:PIECES]
    if len(saved) < 2:
        return None
    ends = _ends(facts, saved)
    turn = [t for t, (a, b) in enumerate(pairwise((0, *ends))) for _ in range(a, b)]
    number = {g: v for v, g in enumerate(saved)}
    pieces = []
    for g in saved:
        need, nodes = facts.made_of(g, number)
        cost_s = sum(node_s(program.nodes[k], program.values) for k in nodes)
        wanted = frozenset({turn[k] for k in facts.readers[g]})
        made = max(turn[k] for k in facts.makers[g] if k < facts.first)
        pieces.append(Piece(g, facts.nbytes[g], cost_s, frozenset(number[u] for u in need), made, wanted | {made}))
    free = {g: tuple(facts.values[g]) for g in facts.values if g not in facts.rests}
    last = {g: max([turn[k] for k in (*facts.readers.get(g, ()), *facts.makers[g])]) for g in free if g not in number}
    return Rounds(program, ends, tuple(pieces), _others(facts, ends, number), free, last)


class _Facts:
    """Who makes and reads the memory of a step, by group."""

    def __init__(self, program: Program, first: int, last: int) -> None:
        self.program, self.first, self.end, self.memory = program, first, last, aliases(program)
        self.makers, self.readers, self.values = dict[int, list[int]](), dict[int, list[int]](), dict[int, list[int]]()
        self.nbytes = dict[int, int]()
        self.maker = program.made_at
        for o, k in self.maker.items():
            g = self.memory.group(o)
            self.nbytes[g] = max(self.nbytes.get(g, 0), program.values[o].nbytes)
            self.makers.setdefault(g, []).append(k)
            if k < first or g in self.values:  # backward's views of it go with it
                self.values.setdefault(g, []).append(o)
        for k, node in enumerate(program.nodes):
            for g in dict.fromkeys(self.memory.group(r) for r in node.refs):
                self.readers.setdefault(g, []).append(k)
        held = {self.memory.group(i) for i in (*program.inputs, *program.outputs)}
        late = set()
        for group, readers in self.readers.items():
            if readers[-1] > last or any(program.nodes[k].phase == "update" for k in readers):
                late.add(group)
        tiny = {g for g in self.values if self.nbytes[g] <= SMALL}
        self.rests = held | late | tiny

    def saved(self) -> list[int]:
        """Groups that forward makes and backward reads, or that forward reads late; the largest first."""
        mine = [g for g in self.values if g not in self.rests and any(k >= self.first for k in self.readers.get(g, ()))]
        return sorted(mine, key=lambda g: (-self.nbytes[g], g))

    def made_of(self, group: int, pieces: dict[int, int]) -> tuple[set[int], set[int]]:
        """(pieces, nodes): what it takes to make a group again from pieces and from what is always there."""
        need, nodes, todo = set[int](), set[int](), [k for k in self.makers[group] if k < self.first]
        while todo:
            k = todo.pop()
            if k in nodes:
                continue
            nodes.add(k)
            for r in self.program.nodes[k].refs:
                g = self.memory.group(r)
                if g in pieces and g != group:
                    need.add(g)
                elif r in self.maker and g not in self.rests:
                    todo.append(self.maker[r])
        return need, nodes


def _ends(facts: _Facts, saved: Sequence[int]) -> tuple[int, ...]:
    """Where rounds end: about as many bytes of pieces are made, or read for the first time by backward, in each."""
    n = facts.end + 1
    weight = [0] * n
    for g in saved:
        weight[max(k for k in facts.makers[g] if k < facts.first)] += facts.nbytes[g]
        weight[min(k for k in facts.readers[g] if k >= facts.first)] += facts.nbytes[g]
    ends = set[int]()
    for a, b in ((0, facts.first), (facts.first, n)):
        total = list(accumulate(weight[a:b]))
        for r in range(1, ROUNDS):
            ends.add(a + next(k for k, w in enumerate(total, 1) if w * ROUNDS >= total[-1] * r))
        ends.add(b)
    return tuple(sorted(ends | {len(facts.program.nodes)}))


def _others(facts: _Facts, ends: Sequence[int], pieces: dict[int, int]) -> tuple[int, ...]:
    """Per round bytes of what is made and is no piece, at its worst moment."""
    change = np.zeros(len(facts.program.nodes) + 1, dtype=np.int64)
    for g, makers in facts.makers.items():
        if g not in pieces:
            change[min(makers)] += facts.nbytes[g]
            change[max([*makers, *facts.readers.get(g, ())]) + 1] -= facts.nbytes[g]
    line = np.cumsum(change)
    return tuple(int(line[a:b].max(initial=0)) for a, b in pairwise((0, *ends)))
