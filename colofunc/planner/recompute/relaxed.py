"""What is kept for backward where forward is no chain: a linear program over rounds, rounded.

Problem: a chain is cut where little crosses, and what crosses far (the skips of a U-shaped net, the features of a dense
one) is held all the time, because no stage owns it. Idea: forward and backward are cut in rounds, and for each piece of
memory that forward makes two numbers between 0 and 1 say whether it lies there at the beginning of a round and whether
it is made in it.

    least    seconds of what is made
    so that  what a round reads lies there, or is made in it                1 <= S[t, v] + R[t, v]
             what is made has what it is made of                      R[t, v] <= S[t, u] + R[t, u]
             what lies there lay there before, or was made          S[t+1, v] <= S[t, v] + R[t, v]
             bytes in every round are at most so many     sum of (S + R)[t, v] bytes[v] + others[t] <= M

Whole numbers take too long. The fractions are rounded in two phases: S by a threshold, and then what has to be made
follows. Several M and thresholds give several orders of work; which of them keeps to a budget is for the accountant to
say.

Source: Checkmate (Jain et al., 1910.02653, section 5), there with a round per operator.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property, partial
from itertools import accumulate, pairwise

import attrs
import numpy as np
from numpy.typing import NDArray

from colofunc.program.aliases import aliases
from colofunc.program.cost import NodeSeconds
from colofunc.program.ir import Program
from colofunc.program.passes.recompute import Replay

PIECES = 128
"""At most this many pieces of memory are variables, the largest that backward reads; smaller ones are kept."""
ROUNDS = 20
"""Forward and backward are cut into this many rounds each, of equal bytes that are made and last read there."""
LEVELS = 16
"""Amounts of memory between what is held if all is kept and the least."""
THRESHOLDS = (0.5, 0.3, 0.15, 0.05, 0.7, 0.9)
"""From what part on a piece that a linear program keeps in part is kept, in the order in which they are tried."""
SKIPS = 2
"""Of a chain everything is some stage's but what the last one makes."""
SMALL = 1 << 10
"""Values of at most so many bytes are kept whatever the program says."""
ITERATIONS = 20_000
"""Limit of the simplex method for one amount of memory; what would take more is not proposed."""

Rounded = NDArray[np.bool_]


@attrs.frozen(eq=False)
class KeptMemory:
    """Memory that forward makes and backward reads.

    `reads`: numbers of the pieces that it is made of, `cost_s`: from these.
    """

    group: int
    nbytes: int
    cost_s: float
    reads: frozenset[int]
    made: int  # round
    read_in: frozenset[int]  # rounds in which it is read where nothing is made again


@attrs.frozen(eq=False)
class Rounds:
    """A program in rounds.

    `ends`: behind the last node of each; the last one is what follows backward.
    `others`: bytes beside pieces, by round.
    `values`: group -> values that forward makes in it, of all that may be dropped.
    `last`: group that backward does not read -> round of its last reader.
    """

    program: Program
    ends: tuple[int, ...]
    pieces: tuple[KeptMemory, ...]
    others: tuple[int, ...]
    values: dict[int, tuple[int, ...]]
    last: dict[int, int]

    def replay(self, held: Rounded) -> Program:
        """The program in which piece `number` lies there at the beginning of round `turn` where `held[turn, number]`.
        """
        replay = Replay(self.program)
        number_of = {piece.group: number for number, piece in enumerate(self.pieces)}
        begin = 0
        for turn, end in enumerate(self.ends):
            for group, values in self.values.items():
                if group in number_of:
                    is_gone = not held[turn, number_of[group]]
                else:
                    is_gone = self.last[group] < turn
                if is_gone:
                    replay.drop(values)
            for index in range(begin, end):
                replay.run(index)
            begin = end
        return replay.finish()

    @cached_property
    def most_bytes(self) -> int:
        """If all is kept until it is read for the last time."""
        by_round = list(self.others)
        for piece in self.pieces:
            for turn in range(piece.made, max(piece.read_in) + 1):
                by_round[turn] += piece.nbytes
        return max(by_round)


def relaxed(program: Program, node_s: NodeSeconds, owned: Collection[int] = ()) -> Iterator[Callable[[], Program]]:
    """Orders of work, fastest first by what the linear programs say.

    owned: groups of memory that a chain's stages own. None where that is all, where there is a loop or no backward.
    """
    rounds = rounds_of(program, node_s)
    if rounds is None or sum(piece.group not in owned for piece in rounds.pieces) < SKIPS:
        return
    seconds_and_held = dict[bytes, tuple[float, Rounded]]()  # by the bytes of what is held
    for level in range(1, LEVELS):
        solution = solve(rounds, rounds.most_bytes * level / LEVELS)
        if solution is None:
            continue
        fractions, seconds = solution
        for threshold in THRESHOLDS:
            held = fractions > threshold
            seconds_and_held.setdefault(held.tobytes(), (seconds, held))
    for _, held in sorted(seconds_and_held.values(), key=lambda pair: pair[0]):
        yield partial(rounds.replay, held)


def solve(rounds: Rounds, most_bytes: float) -> tuple[NDArray[np.float64], float] | None:
    """(S of the linear program, its seconds); None where nothing keeps to so many bytes, or the solver does not get
    there.
    """
    pieces, turns = rounds.pieces, len(rounds.ends)
    count = len(pieces)

    # The variables: S[turn, piece], and behind all of them R[turn, piece].
    def held(turn: int, number: int) -> int:
        return turn * count + number

    def made(turn: int, number: int) -> int:
        return (turns + turn) * count + number

    # A row is a sum of variables times factors that is at least `least` of it.
    rows, least = list[tuple[tuple[int, float], ...]](), list[float]()
    lower, upper = np.zeros(2 * turns * count), np.ones(2 * turns * count)
    for number, piece in enumerate(pieces):
        lower[made(piece.made, number)] = 1
        for turn in range(turns):
            here, now = held(turn, number), made(turn, number)
            if turn <= piece.made:
                upper[here] = 0
            if turn < piece.made:
                upper[now] = 0
            if turn in piece.read_in:
                rows.append(((here, 1), (now, 1)))
                least.append(1)
            if turn > piece.made:
                for operand in piece.reads:
                    rows.append(((held(turn, operand), 1), (made(turn, operand), 1), (now, -1)))
                    least.append(0)
                rows.append(((held(turn - 1, number), 1), (made(turn - 1, number), 1), (here, -1)))
                least.append(0)
    for turn in range(turns):
        bytes_taken = list[tuple[int, float]]()
        for number, piece in enumerate(pieces):
            share = -piece.nbytes / most_bytes
            bytes_taken += [(held(turn, number), share), (made(turn, number), share)]
        rows.append(tuple(bytes_taken))
        least.append(rounds.others[turn] / most_bytes - 1)

    from scipy.optimize import linprog
    from scipy.sparse import csr_array

    cost = np.concatenate([np.zeros(turns * count), np.tile([piece.cost_s for piece in pieces], turns)])
    scale = float(cost.max()) or 1.0
    row_of, column_of, factors = list[int](), list[int](), list[float]()
    for row_number, row in enumerate(rows):
        for column, factor in row:
            row_of.append(row_number)
            column_of.append(column)
            factors.append(factor)
    matrix = csr_array((-np.array(factors, dtype=float), (row_of, column_of)), shape=(len(rows), len(cost)))
    result = linprog(
        cost / scale,
        A_ub=matrix,
        b_ub=-np.array(least),
        bounds=np.stack([lower, upper], axis=1),
        method="highs-ds",
        options={"maxiter": ITERATIONS},
    )
    if result.status != 0:
        return None
    return result.x[: turns * count].reshape(turns, count), float(result.fun) * scale


def rounds_of(program: Program, node_s: NodeSeconds) -> Rounds | None:
    """None where there is a loop, no backward, or nothing to choose."""
    backward = [index for index, node in enumerate(program.nodes) if node.phase == "backward"]
    if not backward or not backward[0] or any(node.loop is not None for node in program.nodes):
        return None
    facts = _Facts(program, backward[0], backward[-1])
    saved = facts.saved()[:PIECES]
    if len(saved) < 2:
        return None
    ends = _ends(facts, saved)
    turn_of = list[int]()  # index of a node -> its round
    for turn, end in enumerate(ends):
        turn_of += [turn] * (end - len(turn_of))

    number_of = {group: number for number, group in enumerate(saved)}
    pieces = []
    for group in saved:
        operands, indices = facts.made_of(group, number_of)
        made = max(turn_of[index] for index in facts.makers[group] if index < facts.first)
        piece = KeptMemory(
            group=group,
            nbytes=facts.nbytes[group],
            cost_s=sum(node_s(program.nodes[index], program.values) for index in indices),
            reads=frozenset(number_of[operand] for operand in operands),
            made=made,
            read_in=frozenset([made, *(turn_of[index] for index in facts.readers[group])]),
        )
        pieces.append(piece)

    values, last = dict[int, tuple[int, ...]](), dict[int, int]()
    for group, of_group in facts.values.items():
        if group in facts.stays:
            continue
        values[group] = tuple(of_group)
        if group not in number_of:
            users = (*facts.readers.get(group, ()), *facts.makers[group])
            last[group] = max(turn_of[index] for index in users)
    return Rounds(program, ends, tuple(pieces), _others(facts, ends, number_of), values, last)


class _Facts:
    """Who makes and reads the memory of a step, by group: indices of nodes. `stays`: groups that are never dropped."""

    def __init__(self, program: Program, first: int, last: int) -> None:
        self.program, self.first, self.end = program, first, last
        self.memory = aliases(program)
        self.maker = program.made_at
        self.makers = dict[int, list[int]]()
        self.readers = dict[int, list[int]]()
        self.values = dict[int, list[int]]()
        self.nbytes = dict[int, int]()
        for value, index in self.maker.items():
            group = self.memory.group(value)
            self.nbytes[group] = max(self.nbytes.get(group, 0), program.values[value].nbytes)
            self.makers.setdefault(group, []).append(index)
            if index < first or group in self.values:  # backward's views of it go with it
                self.values.setdefault(group, []).append(value)
        for index, node in enumerate(program.nodes):
            for group in dict.fromkeys(self.memory.group(ref) for ref in node.refs):
                self.readers.setdefault(group, []).append(index)
        self.stays = self._stays(last)

    def _stays(self, last: int) -> set[int]:
        """What the caller has, what is read behind backward, and what is tiny."""
        groups = {self.memory.group(value) for value in (*self.program.inputs, *self.program.outputs)}
        for group, readers in self.readers.items():
            if readers[-1] > last or any(self.program.nodes[index].phase == "update" for index in readers):
                groups.add(group)
        groups.update(group for group in self.values if self.nbytes[group] <= SMALL)
        return groups

    def saved(self) -> list[int]:
        """Groups that forward makes and backward reads, or that forward reads late; the largest first."""
        groups = []
        for group in self.values:
            readers = self.readers.get(group, ())
            if group not in self.stays and any(index >= self.first for index in readers):
                groups.append(group)
        return sorted(groups, key=lambda group: (-self.nbytes[group], group))

    def made_of(self, group: int, pieces: dict[int, int]) -> tuple[set[int], set[int]]:
        """(pieces, nodes): what it takes to make a group again from pieces and from what is always there."""
        operands, indices = set[int](), set[int]()
        to_run = [index for index in self.makers[group] if index < self.first]
        while to_run:
            index = to_run.pop()
            if index in indices:
                continue
            indices.add(index)
            for ref in self.program.nodes[index].refs:
                of_ref = self.memory.group(ref)
                if of_ref in pieces and of_ref != group:
                    operands.add(of_ref)
                elif ref in self.maker and of_ref not in self.stays:
                    to_run.append(self.maker[ref])
        return operands, indices


def _ends(facts: _Facts, saved: Sequence[int]) -> tuple[int, ...]:
    """Where rounds end: about as many bytes of pieces are made, or read for the first time by backward, in each."""
    behind = facts.end + 1
    weights = [0] * behind
    for group in saved:
        last_made = max(index for index in facts.makers[group] if index < facts.first)
        first_read = min(index for index in facts.readers[group] if index >= facts.first)
        weights[last_made] += facts.nbytes[group]
        weights[first_read] += facts.nbytes[group]
    ends = {len(facts.program.nodes)}
    for begin, end in ((0, facts.first), (facts.first, behind)):
        sums = list(accumulate(weights[begin:end]))
        for number in range(1, ROUNDS):
            length = next(length for length, weight in enumerate(sums, 1) if weight * ROUNDS >= sums[-1] * number)
            ends.add(begin + length)
        ends.add(end)
    return tuple(sorted(ends))


def _others(facts: _Facts, ends: Sequence[int], pieces: dict[int, int]) -> tuple[int, ...]:
    """Per round bytes of what is made and is no piece, at its worst moment."""
    change = np.zeros(len(facts.program.nodes) + 1, dtype=np.int64)
    for group, makers in facts.makers.items():
        if group not in pieces:
            change[min(makers)] += facts.nbytes[group]
            change[max([*makers, *facts.readers.get(group, ())]) + 1] -= facts.nbytes[group]
    alive = np.cumsum(change)
    return tuple(int(alive[begin:end].max(initial=0)) for begin, end in pairwise((0, *ends)))
