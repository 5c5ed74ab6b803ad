"""A list scheduler of pipelines: plays the step and decides, whenever a rank is free, what it does next.

Problem: named schedules are made for stages that are alike. Idea: run the clock with the real seconds of each stage and
direction and of communication. A free rank takes an I that has arrived, else an F that memory admits, else it fills the
wait with a W. The order in which ranks did so is the table.

Memory cannot end in a deadlock: a forward is admitted only where one more forward of each later stage of the rank fits
too, so that the oldest microbatch can always go on.

Source: Zero Bubble Pipeline Parallelism (2401.10241, section 3.1), whose heuristic this resembles; rules and limits are
ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import attrs

import colofunc as cf
from colofunc.ext import Action, ActionTable, StageCosts

INF = float("inf")
_NEAR = 1e-9
"""Moments that differ by fewer seconds, and bytes by less of the cap, are equal."""


@attrs.frozen
class ListRules:
    """How a free rank decides.

    forward_first: whether an F that is ready goes before an I. patience: a W is begun only where the wait until the
    next I or F that is under way is at least so many parts of the W. warmup: before its first I a stage runs the F that
    fit until the earliest moment at which that I can arrive, and so many more, in parts of an F. An F too many keeps
    that I waiting, and with it those of all earlier stages.
    """

    forward_first: bool = False
    patience: float = 0.0
    warmup: float = INF


def schedule_list(
    rank_of: Sequence[int],
    microbatches: int,
    costs: StageCosts,
    cap_bytes: float | None = None,
    rules: ListRules | None = None,
) -> ActionTable:
    """The table that comes of it. rank_of: per stage. Raises PlanError where a microbatch does not fit on a rank."""
    table = schedule_within(rank_of, microbatches, costs, INF, cap_bytes, rules)
    assert table is not None, "it may end at any moment"
    return table


def schedule_within(
    rank_of: Sequence[int],
    microbatches: int,
    costs: StageCosts,
    within_s: float,
    cap_bytes: float | None = None,
    rules: ListRules | None = None,
) -> ActionTable | None:
    """The same; None as soon as some rank cannot have ended its work by `within_s`."""
    play = _Play(rank_of, microbatches, costs, INF if cap_bytes is None else cap_bytes, rules or ListRules())
    return play.run(within_s)


@lru_cache(maxsize=8)
def _actions(stages: int, microbatches: int) -> dict[str, list[list[Action]]]:
    """Kind -> stage -> microbatch -> the action: one of each for all lists that are made of so many."""
    actions: dict[str, list[list[Action]]] = {}
    for kind in ("F", "I", "W"):
        actions[kind] = []
        for stage in range(stages):
            actions[kind].append([Action(stage, kind, microbatch) for microbatch in range(microbatches)])
    return actions


class _Play:
    """The step as far as it was played. Ranks are looked at in the order of the moments at which each can go on."""

    def __init__(
        self, rank_of: Sequence[int], microbatches: int, costs: StageCosts, cap_bytes: float, rules: ListRules
    ) -> None:
        self.rank_of, self.microbatches = rank_of, microbatches
        self.costs, self.cap_bytes, self.rules = costs, cap_bytes, rules
        self.last = costs.stages - 1
        ranks = 1 + max(rank_of)
        self.stages_of: list[list[int]] = [[] for _ in range(ranks)]
        for stage in range(costs.stages):
            self.stages_of[rank_of[stage]].append(stage)
        self.free_s = [0.0] * ranks
        self.left_s = [self._work_s(rank) for rank in range(ranks)]
        self.wire_free_s = [0.0] * ranks
        self.held_bytes = [0.0] * ranks
        self.rows: list[list[Action]] = [[] for _ in range(ranks)]
        # Per stage, so many of its forwards, input gradients and weight gradients are done.
        self.forwards, self.inputs, self.weights = [0] * costs.stages, [0] * costs.stages, [0] * costs.stages
        self.done = {"F": self.forwards, "I": self.inputs, "W": self.weights}
        self.actions = _actions(costs.stages, microbatches)
        self.seconds = {"F": costs.forward_s, "I": costs.input_s, "W": costs.weight_s}
        # kind -> per stage, bytes that are held behind an action and were not in front of it
        self.more_bytes: dict[str, list[float]] = {}
        for kind, stages in self.actions.items():
            self.more_bytes[kind] = [sum(cf.ext.bytes_of(of_stage[0], costs)) for of_stage in stages]
        # Per stage and microbatch, when the input (of F) and the gradient (of I) arrive; behind the last one never.
        self.forward_at = [[INF] * (microbatches + 1) for _ in range(costs.stages)]
        self.gradient_at = [[INF] * (microbatches + 1) for _ in range(costs.stages)]
        self.forward_at[0] = [*[0.0] * microbatches, INF]
        self.most_bytes = self.cap_bytes * (1 + _NEAR)
        self.looks_at = self._looks_at(self._reserves())
        self.most_before = self._most_before() if rules.warmup < INF else [microbatches] * costs.stages

    def _work_s(self, rank: int) -> float:
        """Seconds of all that a rank has to do."""
        costs, here = self.costs, self.stages_of[rank]
        return self.microbatches * sum(
            costs.forward_s[stage] + costs.input_s[stage] + costs.weight_s[stage] for stage in here
        )

    def _most_before(self) -> list[int]:
        """Per stage, forwards that fit between the arrival of its first input and that of its first gradient, where
        nothing waits.
        """
        forward_at = 0.0
        arrives = [0.0]
        for stage in range(self.last):
            forward_at += self.costs.forward_s[stage] + self._apart(stage, self.costs.send_s[stage])
            arrives.append(forward_at)
        gradient_at = forward_at + self.costs.forward_s[self.last]
        most = [1] * self.costs.stages
        for stage in range(self.last, -1, -1):
            forward_s = self.costs.forward_s[stage]
            most[stage] = self.microbatches
            if forward_s > 0:
                fit = (gradient_at - arrives[stage]) / forward_s
                most[stage] = max(1, int(fit + self.rules.warmup + _NEAR))
            if stage:
                gradient_at += self.costs.input_s[stage] + self._apart(stage - 1, self.costs.send_back_s[stage - 1])
        return most

    def _apart(self, stage: int, send_s: float) -> float:
        """Seconds from a stage to the next, which may be on the same rank."""
        return 0.0 if self.rank_of[stage] == self.rank_of[stage + 1] else send_s

    def _reserves(self) -> list[float]:
        """Per stage, bytes that its F leaves: for one F of each later stage of its rank, and for an I that leaves more
        than it frees.
        """
        reserves = []
        for stage, rank in enumerate(self.rank_of):
            kept, weight_kept = self.costs.kept_bytes, self.costs.weight_kept_bytes
            here = self.stages_of[rank]
            later = sum(kept[other] for other in here if other > stage)
            grows = max(0.0, max(weight_kept[other] - kept[other] for other in here))
            if kept[stage] + later + grows > self.cap_bytes * (1 + _NEAR):
                needed = sum(kept[other] for other in here) + grows
                raise cf.PlanError(
                    f"one microbatch keeps {needed:g} bytes on rank {rank} of the pipeline, more than the "
                    f"{self.cap_bytes:g} that it may; give more memory, or more and smaller microbatches"
                )
            reserves.append(later + grows)
        return reserves

    def _looks_at(self, reserve_bytes: Sequence[float]) -> list[list[tuple[int, float, float, float]]]:
        """Per rank, (stage, bytes that its F keeps, that it leaves, that its W keeps), the later stage first: it gives
        memory back sooner.
        """
        kept, weight_kept = self.costs.kept_bytes, self.costs.weight_kept_bytes
        of_ranks = []
        for stages in self.stages_of:
            of_ranks.append([(s, kept[s], reserve_bytes[s], weight_kept[s]) for s in reversed(stages)])
        return of_ranks

    def run(self, within_s: float) -> ActionTable | None:
        left = 3 * self.costs.stages * self.microbatches
        starts_s = [INF] * len(self.rows)
        choices: list[tuple[int, str] | None] = [None] * len(self.rows)
        touched = set(range(len(self.rows)))
        while left:
            for rank in touched:
                starts_s[rank], choices[rank] = self._choice(rank)
            start_s = min(starts_s)
            rank = starts_s.index(start_s)
            choice = choices[rank]
            if choice is None:
                raise cf.PlanError(
                    f"no rank of the pipeline can go on within {self.cap_bytes:g} bytes; give more memory"
                )
            stage, kind = choice
            self._do(rank, stage, kind, start_s)
            if self.free_s[rank] + self.left_s[rank] > within_s:
                return None
            left -= 1
            touched = {rank}
            for beside in (stage - 1, stage + 1):
                if 0 <= beside <= self.last:
                    touched.add(self.rank_of[beside])
        return ActionTable(tuple(map(tuple, self.rows)))

    def _choice(self, rank: int) -> tuple[float, tuple[int, str] | None]:
        """When a rank goes on, and with what: (stage, kind) of the next microbatch."""
        free_s = self.free_s[rank]
        forwards, backwards = self._ready(rank)
        soonest_s = INF
        for at_s, _ in forwards:
            soonest_s = min(soonest_s, at_s)
        for at_s, _ in backwards:
            soonest_s = min(soonest_s, at_s)
        # A weight gradient fills the wait for anything else, where the wait is long enough.
        if soonest_s > free_s + _NEAR:
            weight = self._weight(rank)
            if weight is not None:
                wait_s = soonest_s - free_s
                if wait_s >= self.rules.patience * self.costs.weight_s[weight] or soonest_s == INF:
                    return free_s, (weight, "W")
        if soonest_s == INF:
            return INF, None
        start_s = max(free_s, soonest_s)
        kinds = (("F", forwards), ("I", backwards)) if self.rules.forward_first else (("I", backwards), ("F", forwards))
        for kind, stages in kinds:
            for at_s, stage in stages:
                if at_s <= start_s + _NEAR:
                    return start_s, (stage, kind)
        raise AssertionError("one of them is the soonest")

    def _ready(self, rank: int) -> tuple[list[tuple[float, int]], list[tuple[float, int]]]:
        """(moment from which it can run, stage) of the next forwards and backwards, as far as it is known and memory
        admits them.
        """
        forwards, backwards = [], []
        held_bytes, most_bytes = self.held_bytes[rank], self.most_bytes
        for stage, kept, reserve, weight_kept in self.looks_at[rank]:
            forward, backward = self.forwards[stage], self.inputs[stage]
            at = self.forward_at[stage][forward]
            if at < INF and held_bytes + kept + reserve <= most_bytes:
                if backward or forward < self.most_before[stage]:
                    forwards.append((at, stage))
            at = self.gradient_at[stage][backward]  # which comes behind the forward
            if at < INF and (weight_kept <= kept or held_bytes + weight_kept - kept <= most_bytes):
                backwards.append((at, stage))
        return forwards, backwards

    def _weight(self, rank: int) -> int | None:
        """The stage of a rank whose weight gradient is next: of the earliest microbatch, and there the later stage;
        None: there is none.
        """
        found = None
        for stage in self.stages_of[rank]:
            if self.weights[stage] >= self.inputs[stage]:
                continue
            if found is None or self.weights[stage] <= self.weights[found]:
                found = stage
        return found

    def _do(self, rank: int, stage: int, kind: str, start_s: float) -> None:
        done = self.done[kind]
        microbatch = done[stage]
        done[stage] += 1
        took_s = self.seconds[kind][stage]
        end_s = start_s + took_s
        self.rows[rank].append(self.actions[kind][stage][microbatch])
        self.free_s[rank] = end_s
        self.left_s[rank] -= took_s
        self.held_bytes[rank] += self.more_bytes[kind][stage]
        if kind == "F":
            if stage == self.last:
                self.gradient_at[stage][microbatch] = end_s
            else:
                self.forward_at[stage + 1][microbatch] = self._arrives_s(stage, stage + 1, end_s)
        if kind == "I" and stage:
            self.gradient_at[stage - 1][microbatch] = self._arrives_s(stage, stage - 1, end_s)

    def _arrives_s(self, made: int, read: int, end_s: float) -> float:
        """When a result is there: at once on the same rank, else when the sends before it have left, and it too."""
        rank = self.rank_of[made]
        if rank == self.rank_of[read]:
            return end_s
        sent_s = self.costs.send_s[made] if made < read else self.costs.send_back_s[read]
        self.wire_free_s[rank] = max(self.wire_free_s[rank], end_s) + sent_s
        return self.wire_free_s[rank]
