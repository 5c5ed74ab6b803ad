"""Simulator of a pipeline: when each action of a table runs, and what each rank keeps.

Problem: whether a schedule is good depends on the costs of the stages, of communication, and on memory. Idea: a rank
runs its row as early as it can: an action begins when the rank is free and what it needs has arrived. The sends of a
rank leave one after another, beside its work.

>>> table = ActionTable.parse(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"])
>>> simulated = simulate(table, StageCosts.uniform(2))
>>> simulated.makespan_s, simulated.bubble, simulated.peak_bytes
(9.0, 0.3333333333333333, (2.0, 1.0))

Source: the bubble rate is that of Zero Bubble Pipeline Parallelism (2401.10241, section 5.3): the longest span of one
rank, less its work, in parts of the span.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs

from colofunc.errors import PlanError
from colofunc.program.actions import KINDS, Action, ActionTable
from colofunc.program.pipeline_schedule import StageCosts


@attrs.frozen
class Span:
    """One action on its rank, in seconds from the begin of the step."""

    rank: int
    action: Action
    start_s: float
    end_s: float


@attrs.frozen
class Simulated:
    """What came of a table. `rows`: per rank, its actions in order."""

    costs: StageCosts
    rows: tuple[tuple[Span, ...], ...]

    @cached_property
    def makespan_s(self) -> float:
        """Until the last action of all ranks has ended."""
        return max((row[-1].end_s for row in self.rows if row), default=0.0)

    @cached_property
    def spans_s(self) -> tuple[float, ...]:
        """Per rank, from the begin of its first action to the end of its last."""
        return tuple(row[-1].end_s - row[0].start_s if row else 0.0 for row in self.rows)

    @cached_property
    def work_s(self) -> tuple[float, ...]:
        """Per rank, seconds in which it works."""
        seconds = []
        for row in self.rows:
            seconds.append(sum(span.end_s - span.start_s for span in row))
        return tuple(seconds)

    @property
    def bubble(self) -> float:
        """(longest span of one rank - longest work of one rank) / that span."""
        longest_s = max(self.spans_s)
        return (longest_s - max(self.work_s)) / longest_s

    @cached_property
    def peak_bytes(self) -> tuple[float, ...]:
        """Per rank, the most that it keeps for backwards at one moment."""
        peaks = []
        for rank in range(len(self.rows)):
            peaks.append(max((held for _, held in self.bytes_over_time(rank)), default=0.0))
        return tuple(peaks)

    def text(self, width: int = 120) -> str:
        """The picture of the papers: a lane per rank, time from left to right. An action begins with its microbatch.

            rank 0  0FF1FF2FF0BBBBB1BBBBB2BBBBB

        What follows is the kind: F, B, I or W; where a rank has several stages, in small letters for all but its first.
        Blanks are waits.
        """
        scale = width / self.makespan_s if self.makespan_s else 0.0
        head = len(f"rank {len(self.rows) - 1}  ")
        lines = []
        for rank, row in enumerate(self.rows):
            cells = [" "] * width
            for span in row:
                begin, end = round(span.start_s * scale), round(span.end_s * scale)
                cells[begin:end] = _cell(span.action, min(each.action.stage for each in row), end - begin)
            lines.append(f"rank {rank}".ljust(head) + "".join(cells).rstrip())
        return "\n".join(lines)

    def bytes_over_time(self, rank: int) -> list[tuple[float, float]]:
        """(second, bytes kept from then on) of a rank, in order."""
        held = 0.0
        points = []
        for span in self.rows[rank]:
            start, end = bytes_of(span.action, self.costs)
            if start:
                held += start
                points.append((span.start_s, held))
            if end:
                held += end
                points.append((span.end_s, held))
        return points


def bytes_of(action: Action, costs: StageCosts) -> tuple[float, float]:
    """(bytes that are kept from the begin of an action on, those from its end on); what is given back is negative."""
    kept, weight_kept = costs.kept_bytes[action.stage], costs.weight_kept_bytes[action.stage]
    if action.kind == "F":
        return kept, 0.0
    if action.kind == "I":
        return 0.0, weight_kept - kept
    if action.kind == "W":
        return 0.0, -weight_kept
    return 0.0, -kept


def simulate(table: ActionTable, costs: StageCosts) -> Simulated:
    """Play a table. Raises PlanError where it ends in a deadlock, or where costs are of another number of stages."""
    if costs.stages != table.stages:
        raise PlanError(f"a table of {table.stages} stages was given costs of {costs.stages}; give a figure per stage")
    order = table.places_in_order  # which raises where there is none
    numbers, numbered, needs = table.numbers, table.numbered_rows, table.other_needs
    seconds, sends = _seconds_by_kind(costs), _sends_by_kind(table, costs)
    free_s = [0.0] * table.ranks
    wire_free_s = [0.0] * table.ranks
    arrives_s: dict[int, float] = {}  # number of an action whose result is sent -> when it is there
    rows: list[list[Span]] = [[] for _ in table.rows]
    for rank, position in order:
        # What it needs of this rank has ended.
        start_s = max(free_s[rank], arrives_s.get(needs[rank][position], 0.0))
        number = numbered[rank][position]
        which = numbers.kind_and_stage(number)
        end_s = free_s[rank] = start_s + seconds[which]
        rows[rank].append(Span(rank, table.rows[rank][position], start_s, end_s))
        sent_s = sends[which]
        if sent_s is not None:
            wire_free_s[rank] = arrives_s[number] = max(wire_free_s[rank], end_s) + sent_s
    return Simulated(costs, tuple(map(tuple, rows)))


class Player:
    """A table to be played for many costs, of which only the end is asked."""

    def __init__(self, table: ActionTable) -> None:
        self.ranks, self.stages = table.ranks, table.stages
        # rank, kind, stage, what it needs of another rank or -1, its send or -1
        self._steps: list[tuple[int, str, int, int, int]] = []
        step_of: dict[int, int] = {}  # number of an action that is sent -> its step
        for step, (rank, position) in enumerate(table.places_in_order):
            action, send = table.rows[rank][position], self._send(table.rows[rank][position], table)
            need = step_of.get(table.other_needs[rank][position], -1)
            self._steps.append((rank, action.kind, action.stage, need, send))
            if send >= 0:
                step_of[table.numbered_rows[rank][position]] = step

    @property
    def actions(self) -> int:
        """How many there are."""
        return len(self._steps)

    def _send(self, action: Action, table: ActionTable) -> int:
        """The place of its seconds in `send_s` and, behind those, `send_back_s`."""
        if action.kind == "W":
            return -1
        pair, reader = (action.stage, action.stage + 1) if action.kind == "F" else (action.stage - 1, action.stage - 1)
        if not 0 <= reader < self.stages or table.rank_of[reader] == table.rank_of[action.stage]:
            return -1
        return pair if action.kind == "F" else self.stages - 1 + pair

    def end_s(self, costs: StageCosts, behind_s: Sequence[float] | None = None) -> float:
        """When the last rank ends: `simulate(table, costs).makespan_s` where nothing comes behind its row.

        behind_s: per rank, seconds of what does.
        """
        backward_s = [inputs + weights for inputs, weights in zip(costs.input_s, costs.weight_s, strict=True)]
        seconds = {"F": costs.forward_s, "I": costs.input_s, "W": costs.weight_s, "B": backward_s}
        sends_s = (*costs.send_s, *costs.send_back_s)
        free_s, wire_free_s = [0.0] * self.ranks, [0.0] * self.ranks
        arrives_s = [0.0] * len(self._steps)
        for k, (rank, kind, stage, need, send) in enumerate(self._steps):
            start_s = free_s[rank]
            if need >= 0 and arrives_s[need] > start_s:
                start_s = arrives_s[need]
            end_s = free_s[rank] = start_s + seconds[kind][stage]
            if send >= 0:
                arrives_s[k] = wire_free_s[rank] = max(wire_free_s[rank], end_s) + sends_s[send]
        if behind_s is None:
            return max(free_s)
        return max(end_s + more_s for end_s, more_s in zip(free_s, behind_s, strict=True))


def _seconds_by_kind(costs: StageCosts) -> list[float]:
    """Seconds of each kind and stage, in the order of `Numbers.kind_and_stage`."""
    return [costs.seconds(Action(stage, kind, 0)) for kind in KINDS for stage in range(costs.stages)]


def _sends_by_kind(table: ActionTable, costs: StageCosts) -> list[float | None]:
    """Of each kind and stage, seconds to send what it makes to the rank that reads it; None where that is its own, or
    nobody.
    """
    rank_of, last = table.rank_of, table.stages - 1
    apart = [rank_of[stage] != rank_of[stage + 1] for stage in range(last)]
    ahead = [*(send if here else None for send, here in zip(costs.send_s, apart, strict=True)), None]
    back = [None, *(send if here else None for send, here in zip(costs.send_back_s, apart, strict=True))]
    of_kind: Mapping[str, list[float | None]] = {"F": ahead, "B": back, "I": back, "W": [None] * table.stages}
    return [seconds for kind in KINDS for seconds in of_kind[kind]]


def _cell(action: Action, first_stage: int, width: int) -> str:
    """An action in so many letters."""
    letter = action.kind if action.stage == first_stage else action.kind.lower()
    return f"{action.microbatch}".ljust(width, letter)[:width]


def chrome_events(simulated: Simulated) -> dict[str, Any]:
    """A Chrome trace (chrome://tracing, ui.perfetto.dev): a thread per rank, and a counter of its bytes.

    Times there are microseconds.
    """
    events: list[dict[str, Any]] = []
    for rank, row in enumerate(simulated.rows):
        events.append({"ph": "M", "pid": 0, "tid": rank, "name": "thread_name", "args": {"name": f"rank {rank}"}})
        for span in row:
            microseconds = {"ts": span.start_s * 1e6, "dur": (span.end_s - span.start_s) * 1e6}
            names = {"name": str(span.action), "cat": span.action.kind}
            arguments = {"stage": span.action.stage, "microbatch": span.action.microbatch}
            events.append({"ph": "X", "pid": 0, "tid": rank, **names, **microseconds, "args": arguments})
        for second, held in simulated.bytes_over_time(rank):
            events.append(
                {"ph": "C", "pid": 0, "ts": second * 1e6, "name": f"kept on rank {rank}", "args": {"bytes": held}}
            )
    return {"traceEvents": events}
