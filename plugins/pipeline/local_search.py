"""Local search: takes actions off the longest path of a pipeline's timetable, one after another.

Problem: a list scheduler decides as it goes, and a W that seems to fill a wait can keep, much later, the last gradients
on their way up. Idea: the step ends where its longest path does, a chain of actions of which each waits for the one
before. The path stays on a rank for a block of actions, then follows a send to another one. Only what moves an action
out of its block, in front of it or behind it, can shorten the path. Of these moves one is tried after the other, in
random order from a fixed seed; one that makes the step no slower is kept, as there are often several paths of one
length.

Source: the moves are those of job shops (Nowicki and Smutnicki, A fast taboo search algorithm for the job shop problem,
1996).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

import attrs

import colofunc as cf
from colofunc.ext import Action, ActionTable, StageCosts

INF = float("inf")
_NEAR = 1e-9
"""Times, and bytes of the cap, that differ by a smaller part are equal."""
MOST_PLAYED = 600_000
"""Actions that one search plays at most, over all its walks: about 0.3 seconds."""

WALKS = 3
"""Walks from the same table, which draw different moves."""

RankRows = tuple[tuple[int, ...], ...]
"""Per rank, the numbers of its actions in order."""


def least_s(rank_of: Sequence[int], microbatches: int, costs: StageCosts, by_span: bool = False) -> float:
    """No table takes less, whatever the memory. rank_of: per stage.

    A rank does its work, behind the first forwards of the stages in front. Between a stage's first forward and its last
    W some stage k behind it (or itself) does all its F and I, the first forward goes down to k, and the last gradient
    comes back up.
    """
    stages = range(costs.stages)
    head_s = [0.0]
    back_s = [0.0]
    for stage in stages[:-1]:
        apart = rank_of[stage] != rank_of[stage + 1]
        head_s.append(head_s[-1] + costs.forward_s[stage] + costs.send_s[stage] * apart)
        back_s.append(back_s[-1] + costs.input_s[stage] + costs.send_back_s[stage] * apart)
    least = 0.0
    for rank in range(1 + max(rank_of)):
        here = [stage for stage in stages if rank_of[stage] == rank]
        first = here[0]
        begins_s = 0.0 if by_span else head_s[first]
        work_s = sum(costs.forward_s[stage] + costs.input_s[stage] + costs.weight_s[stage] for stage in here)
        least = max(least, begins_s + microbatches * work_s)
        for stage in stages[first:]:
            between_s = microbatches * (costs.forward_s[stage] + costs.input_s[stage])
            there_and_back_s = head_s[stage] - head_s[first] + back_s[stage] - back_s[first]
            least = max(least, begins_s + there_and_back_s + between_s + costs.weight_s[first])
    return least


def improve(
    table: ActionTable, costs: StageCosts, cap_bytes: float | None = None, by_span: bool = False
) -> ActionTable:
    """A table that takes less time within the cap, its backwards in two parts; the same one where none is found.

    by_span: the time is the longest span of one rank, not the end of the last.
    """
    search = OrderSearch(table, costs, INF if cap_bytes is None else cap_bytes * (1 + _NEAR), by_span)
    rank_of = [table.rank_of[stage] for stage in range(table.stages)]
    return search.run(least_s(rank_of, table.microbatches, costs, by_span))


@attrs.frozen(eq=False)
class PlayedOrder:
    """What came of an order: per action when it begins and ends, and the action that it waited for (-1: none)."""

    begins_s: Sequence[float]
    ends_s: Sequence[float]
    waited_for: Sequence[int]


class OrderSearch:
    """A table with its actions as numbers, so that an order is played fast."""

    def __init__(self, table: ActionTable, costs: StageCosts, cap_bytes: float, by_span: bool) -> None:
        self.table, self.cap_bytes, self.by_span = table, cap_bytes, by_span
        self.actions: list[Action] = []
        self.rank: list[int] = []  # per action
        rows = []
        for rank, row in enumerate(table.rows):
            first = len(self.actions)
            for action in row:
                for kind in "IW" if action.kind == "B" else action.kind:
                    self.actions.append(attrs.evolve(action, kind=kind))
                    self.rank.append(rank)
            rows.append(tuple(range(first, len(self.actions))))
        self.rows: RankRows = tuple(rows)
        self.left = MOST_PLAYED // len(self.actions)
        self.seconds = [costs.seconds(action) for action in self.actions]
        self.bytes = [cf.ext.bytes_of(action, costs) for action in self.actions]
        number = {action: k for k, action in enumerate(self.actions)}
        # Per action (-1: none): what it reads of a neighbour; what of its own stage and microbatch stands in front of
        # it and behind it.
        self.needs, self.before, self.behind = ([-1] * len(self.actions) for _ in range(3))
        # Per action, the stage and the direction in which it hands on what it makes; None for a W.
        self.sent = [None if action.kind == "W" else (action.stage, action.kind) for action in self.actions]
        # Per action, seconds to send what it makes; -1 where nobody on another rank reads it.
        self.sends_s = [-1.0] * len(self.actions)
        for k, action in enumerate(self.actions):
            stage, microbatch = action.stage, action.microbatch
            if action.kind != "F":
                self.before[k] = number[Action(stage, "F" if action.kind == "I" else "I", microbatch)]
                self.behind[self.before[k]] = k
            if action.kind == "F" and stage:
                self._link(number[Action(stage - 1, "F", microbatch)], k, costs.send_s[stage - 1])
            if action.kind == "I" and stage < costs.stages - 1:
                self._link(number[Action(stage + 1, "I", microbatch)], k, costs.send_back_s[stage])

    def _link(self, maker: int, reader: int, send_s: float) -> None:
        self.needs[reader] = maker
        if self.rank[maker] != self.rank[reader]:
            self.sends_s[maker] = send_s

    def run(self, enough_s: float) -> ActionTable:
        """Walks until enough was played, or the step takes `enough_s`."""
        played = self.play(self.rows)
        assert played is not None, "a checked table has no deadlock"
        first_s = best_s = self.takes_s(self.rows, played)
        if not all(map(self.fits, self.rows)):
            return self.table
        best = self.rows
        draw = Random(0)
        for _ in range(WALKS):
            rows, takes_s = self.walk(self.rows, first_s, enough_s, draw)
            if takes_s < best_s:
                best, best_s = rows, takes_s
            if best_s <= enough_s * (1 + _NEAR):
                break
        if best_s >= first_s * (1 - _NEAR):
            return self.table
        table_rows = []
        for row in best:
            table_rows.append(tuple(self.actions[k] for k in row))
        return ActionTable(tuple(table_rows))

    def walk(self, rows: RankRows, takes_s: float, enough_s: float, draw: Random) -> tuple[RankRows, float]:
        """(rows, seconds) where no move is left that makes the step no slower, or nothing more may be played."""
        while takes_s > enough_s * (1 + _NEAR):
            played = self.play(rows)
            assert played is not None, "only what ends is kept"
            moves = list(self.moves(rows, played))
            draw.shuffle(moves)
            for rank, place, target in moves:
                row = _with_move(rows[rank], place, target)
                if not self.fits(row):
                    continue
                if not self.left:
                    return rows, takes_s
                self.left -= 1
                other = (*rows[:rank], row, *rows[rank + 1 :])
                after = self.play(other)
                if after is not None and self.takes_s(other, after) <= takes_s * (1 + 1e-12):
                    rows, takes_s = other, min(takes_s, self.takes_s(other, after))
                    break
            else:
                break
        return rows, takes_s

    def play(self, rows: RankRows) -> PlayedOrder | None:
        """As `cf.ext.simulate` does; None for a deadlock."""
        count = len(self.actions)
        begins_s, ends_s, arrives_s = [0.0] * count, [INF] * count, [INF] * count
        waited_for = [-1] * count
        # Of an action whose result left behind another one's: the one whose send began when it was made.
        sent_with = list(range(count))
        free_s, wire_free_s, places = [0.0] * len(rows), [0.0] * len(rows), [0] * len(rows)
        last_sent = [-1] * len(rows)
        blocked: dict[int, int] = {}
        ready = list(range(len(rows)))
        while ready:
            rank = ready.pop()
            row, now_s = rows[rank], free_s[rank]
            for place in range(places[rank], len(row)):
                k = row[place]
                need = self.needs[k]
                waited_for[k] = row[place - 1] if place else -1
                if need >= 0:
                    if arrives_s[need] == INF:
                        blocked[need] = rank
                        break
                    if arrives_s[need] > now_s:
                        now_s = arrives_s[need]
                        waited_for[k] = sent_with[need]
                begins_s[k] = now_s
                now_s += self.seconds[k]
                ends_s[k] = arrives_s[k] = now_s
                send_s = self.sends_s[k]
                if send_s >= 0:
                    if wire_free_s[rank] > now_s:
                        sent_with[k] = sent_with[last_sent[rank]]
                    arrives_s[k] = wire_free_s[rank] = max(wire_free_s[rank], now_s) + send_s
                    last_sent[rank] = k
                places[rank] = place + 1
                if k in blocked:
                    ready.append(blocked.pop(k))
            free_s[rank] = now_s
        return None if blocked else PlayedOrder(begins_s, ends_s, waited_for)

    def takes_s(self, rows: RankRows, played: PlayedOrder) -> float:
        """Seconds of a step."""
        return max(self._times_s(rows, played))

    def _times_s(self, rows: RankRows, played: PlayedOrder) -> list[float]:
        """Per rank, what counts of it: when it ends, or its span."""
        times_s = []
        for row in rows:
            begin_s = played.begins_s[row[0]] if self.by_span else 0.0
            times_s.append(played.ends_s[row[-1]] - begin_s)
        return times_s

    def fits(self, row: Sequence[int]) -> bool:
        """Whether what a rank keeps is within the cap at every moment."""
        held = 0.0
        for k in row:
            at_begin, at_end = self.bytes[k]
            held += at_begin
            if held > self.cap_bytes:
                return False
            held += at_end
            if held > self.cap_bytes:
                return False
        return True

    def moves(self, rows: RankRows, played: PlayedOrder) -> Iterator[tuple[int, int, int]]:
        """(rank, place, other place) of actions of the longest path that could be in front of their block, or behind
        it.
        """
        blocks = self._blocks(rows, played)
        for number, block in enumerate(blocks):
            rank = self.rank[block[0]]
            row = rows[rank]
            begin = row.index(block[0])
            end = begin + len(block)
            for place in range(begin, end):
                k = row[place]
                # The step begins with its first block and ends with its last: nothing is in front of the one or behind
                # the other.
                if number > 0 and place > begin and self._may_pass(k, self.before[k], row[begin:place]):
                    yield rank, place, begin
                is_last = number == len(blocks) - 1 or place == end - 1
                if not is_last and self._may_pass(k, self.behind[k], row[place + 1 : end]):
                    yield rank, place, end - 1

    def _may_pass(self, k: int, bound: int, others: Sequence[int]) -> bool:
        """Whether an action may change places with others of its rank. bound: what of its own stage and microbatch it
        may not pass.

        What a stage sends stays in the order of the other stages: NCCL delivers messages in the order in which they are
        sent.
        """
        if bound in others:
            return False
        sent = self.sent[k]
        return sent is None or all(self.sent[other] != sent for other in others)

    def _blocks(self, rows: RankRows, played: PlayedOrder) -> list[list[int]]:
        """The longest path, in parts that stay on one rank."""
        times_s = self._times_s(rows, played)
        slowest = rows[times_s.index(max(times_s))]
        begin_s = played.begins_s[slowest[0]] if self.by_span else 0.0
        k = slowest[-1]
        path = [k]
        while played.waited_for[k] >= 0 and played.begins_s[played.waited_for[k]] >= begin_s:
            k = played.waited_for[k]
            path.append(k)
        blocks: list[list[int]] = []
        for k in reversed(path):
            if blocks and self.rank[blocks[-1][-1]] == self.rank[k]:
                blocks[-1].append(k)
            else:
                blocks.append([k])
        return blocks


def _with_move(row: tuple[int, ...], place: int, target: int) -> tuple[int, ...]:
    """A row whose action at a place is at another one."""
    without = row[:place] + row[place + 1 :]
    return (*without[:target], row[place], *without[target:])
