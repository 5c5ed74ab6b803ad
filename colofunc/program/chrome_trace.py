"""Chrome traces (chrome://tracing, ui.perfetto.dev): the lanes of one rank as events, its memory as counters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from colofunc.program.lanes import LANES, Busy, Lanes
from colofunc.program.memory_report import MemoryReport

TRACE_MARK = "colofunc_trace"  # in files of traces, near their beginning
ROUNDING_S = 1e-9  # trips of a loop begin where one ends, up to this


def chrome_trace(played: Lanes, report: MemoryReport, words: str) -> dict[str, Any]:
    """Events of every lane, and the bytes of each kind as counters."""
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": words}}]
    rows = _rows(played.busy)
    # Every lane has a row, where nothing runs in it, too; further rows stand below.
    drawn = {(lane, 0) for lane in LANES} | set(rows)
    in_order = sorted(drawn, key=lambda row: (row[1], LANES.index(row[0])))
    tids = {row: tid for tid, row in enumerate(in_order)}
    for (lane, copy), tid in tids.items():
        name = f"{lane} {copy + 1}" if copy else lane
        events.append({"ph": "M", "pid": 0, "tid": tid, "name": "thread_name", "args": {"name": name}})
    for busy, row in zip(played.busy, rows, strict=True):
        node = busy.node
        where = {"module": node.path, "phase": node.phase, "line": node.line, "note": node.note, "position": busy.index}
        event = {"ph": "X", "pid": 0, "tid": tids[row], "name": busy.label, "cat": node.phase, "args": where}
        event |= {"ts": 1e6 * busy.start_s, "dur": 1e6 * (busy.end_s - busy.start_s)}  # in microseconds
        events.append(event)
    for tier, kinds in report.by_kind.items():
        held = [(kind, line) for kind, line in kinds.items() if any(line)]
        before: tuple[int, ...] = ()
        for position, start_s in enumerate(played.starts_s):
            now = tuple(line[position] for _, line in held)
            if now != before:
                args = {kind: nbytes for (kind, _), nbytes in zip(held, now, strict=True)}
                events.append({"ph": "C", "pid": 0, "name": f"{tier} bytes", "ts": 1e6 * start_s, "args": args})
            before = now
    return trace_of(events, words)


def _rows(operators: Sequence[Busy]) -> list[tuple[str, int]]:
    """(lane, number) of the row in which each operator is drawn.

    Collectives over other links run beside one another, each in a row of its own.
    """
    rows: list[tuple[str, int]] = [("", 0)] * len(operators)
    ends: dict[str, list[float]] = {}  # lane -> when each of its rows is free
    for position in sorted(range(len(operators)), key=lambda position: operators[position].start_s):
        busy = operators[position]
        free = ends.setdefault(busy.lane, [])
        number = 0
        while number < len(free) and free[number] > busy.start_s + ROUNDING_S:
            number += 1
        free[number : number + 1] = [busy.end_s]
        rows[position] = busy.lane, number
    return rows


def trace_of(events: list[dict[str, Any]], words: str) -> dict[str, Any]:
    """The content of a Chrome trace, which begins with what tells ours from others'."""
    return {"otherData": {TRACE_MARK: 1, "note": words}, "traceEvents": events, "displayTimeUnit": "ms"}
