"""Named pipeline schedules: each a function that gives a table of actions.

    1f1b on 2 ranks, 3 microbatches:     rank 0   0F0 0F1 0B0 0F2 0B1 0B2
                                         rank 1   1F0 1B0 1F1 1B1 1F2 1B2

Source: GPipe (1811.06965); 1F1B of PipeDream-Flush (2006.09503).
"""

from __future__ import annotations

from collections.abc import Mapping

import colofunc as cf
from colofunc.ext import Action, ActionTable, StageCosts


def gpipe(ranks: int, microbatches: int, costs: StageCosts | None = None, cap_bytes: float | None = None) -> ActionTable:
    """All forwards, then all backwards: a rank keeps what every microbatch needs."""
    rows = []
    for rank in range(ranks):
        forwards = [Action(rank, "F", microbatch) for microbatch in range(microbatches)]
        backwards = [Action(rank, "B", microbatch) for microbatch in range(microbatches)]
        rows.append((*forwards, *backwards))
    return ActionTable(tuple(rows))


def one_f_one_b(ranks: int, microbatches: int, costs: StageCosts | None = None, cap_bytes: float | None = None) -> ActionTable:
    """Forwards until the first backward can begin, then a forward and a backward in turn: rank i keeps p - i microbatches."""
    rows = []
    for rank in range(ranks):
        warmup = min(ranks - rank, microbatches)
        row = [Action(rank, "F", microbatch) for microbatch in range(warmup)]
        for microbatch in range(microbatches):
            row.append(Action(rank, "B", microbatch))
            if microbatch + warmup < microbatches:
                row.append(Action(rank, "F", microbatch + warmup))
        rows.append(tuple(row))
    return ActionTable(tuple(rows))


@cf.hookimpl
def colofunc_schedules() -> Mapping[str, cf.ext.Schedule]:
    """The schedules that ship with colofunc, by name."""
    records = (
        cf.ext.Schedule("gpipe", gpipe),
        cf.ext.Schedule("1f1b", one_f_one_b),
    )
    return {record.name: record for record in records}
