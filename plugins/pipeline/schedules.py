"""Named pipeline schedules: each a function that gives a table of actions.

    1f1b on 2 ranks, 3 microbatches:     rank 0   0F0 0F1 0B0 0F2 0B1 0B2
                                         rank 1   1F0 1B0 1F1 1B1 1F2 1B2

Source: GPipe (1811.06965); 1F1B of PipeDream-Flush (2006.09503); interleaved of Megatron-LM (2104.04473); ZB-H1 and
ZB-H2 of Zero Bubble Pipeline Parallelism (2401.10241); ZB-V, V-Half and V-Min are named after Pipeline Parallelism with
Controllable Memory (2405.15362) and made by our list scheduler under their limits of memory; DualPipeV as DeepSeek
published it (the order of its eight phases).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from math import ceil

from colofunc_plugins.pipeline.list_scheduler import INF, ListRules, schedule_list, schedule_within
from colofunc_plugins.pipeline.local_search import improve

import colofunc as cf
from colofunc.ext import Action, ActionTable, StageCosts


def gpipe(
    ranks: int, microbatches: int, costs: StageCosts | None = None, cap_bytes: float | None = None
) -> ActionTable:
    """All forwards, then all backwards: a rank keeps what every microbatch needs."""
    rows = []
    for rank in range(ranks):
        forwards = [Action(rank, "F", microbatch) for microbatch in range(microbatches)]
        backwards = [Action(rank, "B", microbatch) for microbatch in range(microbatches)]
        rows.append((*forwards, *backwards))
    return ActionTable(tuple(rows))


def one_f_one_b(
    ranks: int, microbatches: int, costs: StageCosts | None = None, cap_bytes: float | None = None
) -> ActionTable:
    """Forwards until the first backward can begin, then a forward and a backward in turn: rank i keeps p - i
    microbatches.
    """
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


def interleaved(chunks: int = 2) -> cf.ext.Schedule:
    """Interleaved 1F1B with so many stages on a rank: `1/chunks` of the bubble of 1F1B for more activations and sends."""
    name = "interleaved-1f1b" if chunks == 2 else f"interleaved-1f1b-{chunks}"
    return cf.ext.Schedule(
        name, partial(_interleaved, chunks), stages_per_rank=chunks, least_per_rank=1, whole_groups=True
    )


def _interleaved(
    chunks: int, ranks: int, microbatches: int, costs: StageCosts | None = None, cap_bytes: float | None = None
) -> ActionTable:
    """Groups of `ranks` microbatches pass through the first stage of a rank, then through its second, and so on."""
    rows = []
    for rank in range(ranks):
        forwards: list[Action] = []
        backwards: list[Action] = []
        for chunk, microbatch in _in_groups(chunks, ranks, microbatches):
            forwards.append(Action(chunk * ranks + rank, "F", microbatch))
            backwards.append(Action((chunks - 1 - chunk) * ranks + rank, "B", microbatch))
        warmup = min(2 * (ranks - 1 - rank) + (chunks - 1) * ranks + 1, len(forwards))
        row = forwards[:warmup]
        for position, backward in enumerate(backwards):
            row.append(backward)
            row += forwards[warmup + position : warmup + position + 1]
        rows.append(tuple(row))
    return ActionTable(tuple(rows))


def _in_groups(chunks: int, ranks: int, microbatches: int) -> Iterator[tuple[int, int]]:
    """(chunk, microbatch) in the order of Megatron-LM."""
    for first in range(0, microbatches, ranks):
        for chunk in range(chunks):
            for microbatch in range(first, min(first + ranks, microbatches)):
                yield chunk, microbatch


def zero_bubble_h1(
    ranks: int, microbatches: int, costs: StageCosts | None = None, cap_bytes: float | None = None
) -> ActionTable:
    """As many microbatches in flight as 1F1B; rank i (from 0) puts off the weights of i microbatches, which fill its
    end.
    """
    rows = [_split_row(rank, microbatches, ranks - rank, rank) for rank in range(ranks)]
    return ActionTable(tuple(rows))


def zero_bubble_h2(
    ranks: int, microbatches: int, costs: StageCosts | None = None, cap_bytes: float | None = None
) -> ActionTable:
    """Twice the microbatches of 1F1B in flight, so that the first ranks do not wait either."""
    rows = [_split_row(rank, microbatches, 2 * (ranks - rank) - 1, 2 * rank) for rank in range(ranks)]
    return ActionTable(tuple(rows))


def _split_row(stage: int, microbatches: int, warmup: int, put_off: int) -> tuple[Action, ...]:
    """`warmup` forwards, then I, W, F in turn, where W is of the microbatch that is `put_off` before."""
    warmup = min(warmup, microbatches)
    row = [Action(stage, "F", microbatch) for microbatch in range(warmup)]
    for microbatch in range(microbatches + put_off):
        if microbatch < microbatches:
            row.append(Action(stage, "I", microbatch))
        if microbatch >= put_off:
            row.append(Action(stage, "W", microbatch - put_off))
        if microbatch + warmup < microbatches:
            row.append(Action(stage, "F", microbatch + warmup))
    return tuple(row)


def dual_pipe_v(
    ranks: int, microbatches: int, costs: StageCosts | None = None, cap_bytes: float | None = None
) -> ActionTable:
    """DualPipeV: two stages a rank in the shape of a V, backward in two parts only where a wait is filled."""
    return ActionTable(tuple(_DualRow(ranks, rank, microbatches).row() for rank in range(ranks)))


class _DualRow:
    """One rank's row: counts what each of its two stages has come to.

    `near`: the stage of the way down, `far`: of the way back.
    """

    def __init__(self, ranks: int, rank: int, microbatches: int) -> None:
        self.ranks, self.rank, self.microbatches = ranks, rank, microbatches
        self.near, self.far = rank, 2 * ranks - 1 - rank
        self.next = {(stage, kind): 0 for stage in (self.near, self.far) for kind in "FB"}
        self.weights: list[tuple[int, int]] = []
        self.actions: list[Action] = []

    def forward(self, stage: int) -> None:
        self._append(stage, "F", "F")

    def backward(self, stage: int, split: bool = False) -> None:
        microbatch = self._append(stage, "B", "I" if split else "B")
        if split:
            self.weights.append((stage, microbatch))

    def weight(self) -> None:
        stage, microbatch = self.weights.pop(0)
        self.actions.append(Action(stage, "W", microbatch))

    def _append(self, stage: int, counter: str, kind: str) -> int:
        microbatch = self.next[stage, counter]
        self.next[stage, counter] += 1
        self.actions.append(Action(stage, kind, microbatch))
        return microbatch

    def row(self) -> tuple[Action, ...]:
        behind = self.ranks - 1 - self.rank  # ranks further down
        self._fill(behind)
        for _ in range(self.microbatches - 2 * self.ranks + self.rank + 1):
            self.forward(self.near)
            self.backward(self.far)
            self.forward(self.far)
            self.backward(self.near)
        for _ in range(behind):
            self.backward(self.far)
            self.forward(self.far)
            self.backward(self.near)
        self._drain(behind)
        return tuple(self.actions)

    def _fill(self, behind: int) -> None:
        for _ in range(2 * behind):
            self.forward(self.near)
        for _ in range(self.rank + 1):
            self.forward(self.near)
            self.forward(self.far)
        for _ in range(behind):
            self.backward(self.far, split=True)
            self.weight()
            self.forward(self.far)

    def _drain(self, behind: int) -> None:
        """Backwards alone: from the middle of them on weights are put off, and fill the waits that follow."""
        left = 2 * (self.rank + 1)
        for position in range(left):
            stage = self.near if position % 2 else self.far
            self.backward(stage, split=position >= self.rank + 1)
        for _ in range(behind):
            self.weight()
            self.backward(self.near, split=True)
        while self.weights:
            self.weight()


def zero_bubble_v(
    ranks: int, microbatches: int, costs: StageCosts | None = None, cap_bytes: float | None = None
) -> ActionTable:
    """Two stages a rank in the shape of a V within the memory of 1F1B: no bubble where F, I and W take the same."""
    return _alike_v(ranks, microbatches, 2 * ranks)


def v_half(
    ranks: int, microbatches: int, costs: StageCosts | None = None, cap_bytes: float | None = None
) -> ActionTable:
    """A V within half of the memory of 1F1B, and one stage's activations."""
    return _alike_v(ranks, microbatches, ranks + 1)


def v_min(
    ranks: int, microbatches: int, costs: StageCosts | None = None, cap_bytes: float | None = None
) -> ActionTable:
    """A V within a third of the memory of 1F1B, and two stages' activations."""
    return _alike_v(ranks, microbatches, ceil(2 * ranks / 3) + 2)


def _alike_v(ranks: int, microbatches: int, most_kept: int) -> ActionTable:
    """As if all actions took the same. most_kept: activations of one stage and microbatch, on a rank at once."""
    alike = StageCosts.uniform(2 * ranks, weight_kept=0.0)
    rank_of = [*range(ranks), *reversed(range(ranks))]
    tables = _two_lists(rank_of, microbatches, alike, most_kept)
    return min(tables, key=lambda table: cf.ext.simulate(table, alike).bubble)


def _two_lists(
    rank_of: Sequence[int], microbatches: int, costs: StageCosts, cap_bytes: float | None
) -> list[ActionTable]:
    """A list that prefers backwards, and one that prefers forwards."""
    tables = []
    for forward_first in (False, True):
        tables.append(schedule_list(rank_of, microbatches, costs, cap_bytes, ListRules(forward_first=forward_first)))
    return tables


def automatic(
    name: str, stages_per_rank: int, placement: str, others: tuple[cf.ext.Schedule, ...], by_span: bool = False
) -> cf.ext.Schedule:
    """A schedule that looks at costs: the fastest within the cap of `others`, which have the same stages, and of lists
    by several rules. That one is improved by local search.

    by_span: fastest is the one whose longest span of one rank is shortest, not the one that ends first. That is the
    time of a step where each rank goes on to the next step by itself, as with a post-validated optimizer (2401.10241,
    section 4).
    """
    make = partial(_fastest, stages_per_rank, placement, others, by_span)
    draft = partial(_drafted, stages_per_rank, placement)
    return cf.ext.Schedule(
        name, make, stages_per_rank, placement, splits_backward=True, looks_at_costs=True, draft=draft
    )


def of_placements(among: tuple[cf.ext.Schedule, ...]) -> cf.ext.Schedule:
    """The schedule "auto": the fastest of those that look at costs and have one placement each; the first of them where
    there are no costs to look at.
    """
    first = among[0]
    make = partial(_of_placements, among)
    return cf.ext.Schedule(
        "auto", make, first.stages_per_rank, first.placement, splits_backward=True, looks_at_costs=True, among=among
    )


def _of_placements(
    among: tuple[cf.ext.Schedule, ...],
    ranks: int,
    microbatches: int,
    costs: StageCosts | None = None,
    cap_bytes: float | None = None,
) -> ActionTable:
    if costs is None:
        costs = StageCosts.uniform(among[0].stages(ranks))
    tables = []
    errors = []
    for schedule in among:
        if schedule.stages(ranks) != costs.stages:
            continue
        try:
            tables.append(schedule.table(ranks, microbatches, costs, cap_bytes))
        except cf.PlanError as error:  # a rank has other stages there, which may keep more than the cap
            errors.append(error)
    if not tables:
        raise errors[0]
    return _fastest_of([(table, cf.ext.simulate(table, costs)) for table in tables], cap_bytes, by_span=False)


def _fastest(
    stages_per_rank: int,
    placement: str,
    others: tuple[cf.ext.Schedule, ...],
    by_span: bool,
    ranks: int,
    microbatches: int,
    costs: StageCosts | None = None,
    cap_bytes: float | None = None,
) -> ActionTable:
    if costs is None:
        costs = StageCosts.uniform(ranks * stages_per_rank)
    rank_of = _ranks_of(stages_per_rank, placement, ranks)
    played = _lists(rank_of, microbatches, costs, cap_bytes, by_span)
    for other in others:
        if other.takes(ranks, microbatches):
            table = other.table(ranks, microbatches, costs, cap_bytes)
            played.append((table, cf.ext.simulate(table, costs)))
    return improve(_fastest_of(played, cap_bytes, by_span), costs, cap_bytes, by_span)


Played = tuple[ActionTable, cf.ext.Simulated]
PATIENCES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of a W's seconds, how long a rank has to wait for other work before it begins one, in schedules that are drafted."""


def _lists(
    rank_of: Sequence[int], microbatches: int, costs: StageCosts, cap_bytes: float | None, by_span: bool
) -> list[Played]:
    """A list by each of the rules.

    Where the one that ends first is taken, those that cannot be it are not played to their end.
    """
    played = []
    within_s = INF
    for rules in RULES:
        table = schedule_within(rank_of, microbatches, costs, within_s * (1 + MARGIN), cap_bytes, rules)
        if table is None:
            continue
        simulated = cf.ext.simulate(table, costs)
        played.append((table, simulated))
        if cap_bytes is None and not by_span:
            within_s = min(within_s, simulated.makespan_s)
    return played


def _drafted(
    stages_per_rank: int,
    placement: str,
    ranks: int,
    microbatches: int,
    costs: StageCosts | None = None,
    cap_bytes: float | None = None,
) -> ActionTable:
    """The faster of two lists, which says how two cuts compare."""
    if costs is None:
        costs = StageCosts.uniform(ranks * stages_per_rank)
    rank_of = _ranks_of(stages_per_rank, placement, ranks)
    tables = _two_lists(rank_of, microbatches, costs, cap_bytes)
    return min(tables, key=lambda table: cf.ext.simulate(table, costs).makespan_s)


def _ranks_of(stages_per_rank: int, placement: str, ranks: int) -> list[int]:
    """Per stage, its rank."""
    shape = cf.ext.Schedule("auto", gpipe, stages_per_rank, placement)
    return [shape.rank_of(stage, ranks) for stage in range(shape.stages(ranks))]


def _fastest_of(played: Sequence[Played], cap_bytes: float | None, by_span: bool) -> ActionTable:
    """Of those that fit; of equally fast ones the one that keeps least."""
    fitting = []
    for table, simulated in played:
        if cap_bytes is None or max(simulated.peak_bytes) <= cap_bytes * (1 + 1e-9):
            seconds = (max(simulated.spans_s), simulated.makespan_s) if by_span else (simulated.makespan_s,)
            fitting.append((*seconds, max(simulated.peak_bytes), len(fitting), table))
    return min(fitting)[-1]


RULES = (
    *(ListRules(forward_first, patience=patience) for forward_first, patience in product((False, True), PATIENCES)),
    *(ListRules(patience=patience, warmup=warmup) for patience, warmup in product(PATIENCES[:3], (0.0, 0.75))),
)
"""What the list scheduler of `auto` tries."""
MARGIN = 1e-6
"""A list that ends later than the best by a smaller part is played to its end: sums of seconds are rounded."""


@cf.hookimpl
def colofunc_schedules() -> dict[str, cf.ext.Schedule]:
    """The schedules that ship with colofunc, by name.

    `auto` is the fastest of one stage a rank, and two in the shape of a V or in turn.
    """
    split = partial(cf.ext.Schedule, splits_backward=True)
    one = (
        cf.ext.Schedule("gpipe", gpipe),
        cf.ext.Schedule("1f1b", one_f_one_b),
        split("zb-h1", zero_bubble_h1),
        split("zb-h2", zero_bubble_h2),
    )
    in_turn = (interleaved(),)
    vee = (
        split("zb-v", zero_bubble_v, 2, "v"),
        split("v-half", v_half, 2, "v"),
        split("v-min", v_min, 2, "v"),
        split("dualpipev", dual_pipe_v, 2, "v", least_per_rank=2),
    )
    placed = (
        automatic("auto-one", 1, "loop", one),
        automatic("auto-v", 2, "v", vee),
        automatic("auto-interleaved", 2, "loop", in_turn),
    )
    span = automatic("auto-span", 1, "loop", one, by_span=True)
    records = (*one, *in_turn, *vee, of_placements(placed), *placed, span)
    return {record.name: record for record in records}
