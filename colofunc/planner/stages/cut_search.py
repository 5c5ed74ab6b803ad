"""Where a pipeline is cut so that the step, as its schedule plays it, ends first.

    search = CutSearch(problem, pieces, schedule, ranks=4, microbatches=8, send_s=send_s)
    cuts, seconds = search.fastest()

Problem: the cut whose slowest stage is fastest forward need not be the one whose step ends first: backward has other
proportions, and where a rank has several stages, those of the slowest rank decide, and how long others wait for them.
Idea: play the schedule. A table is made once for the balanced cut, and played for others by their costs (`PieceCosts`).
A bound comes first: no step ends before its slowest rank has done its work, behind the first forward that comes to it.
Cuts are played in the order of their bounds until these are no better than the best step so far, so that most are never
played.

From the balanced cut on pieces move from stage to stage as long as that helps; where there are few cuts in all, every
one is looked at, so that the result is the best there is for that table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import numpy as np

from colofunc import progress
from colofunc.planner.stages.assignment import CutProblem, Cuts
from colofunc.planner.stages.piece_costs import KINDS, PieceCosts
from colofunc.planner.stages.simulate import Player
from colofunc.planner.stages.timetables import forward_only, in_parts
from colofunc.program.pipeline_schedule import Schedule, StageCosts

MOST_PLAYED = 600_000
"""Actions that a search plays at most: about 0.3 seconds."""
GAIN = 1e-6
"""A cut has to be better by this part."""


@attrs.define(eq=False)
class CutSearch:
    """Cuts of one problem by one schedule, of one placement. send_s: seconds to send so many bytes."""

    problem: CutProblem
    pieces: PieceCosts
    schedule: Schedule
    ranks: int
    microbatches: int
    send_s: Callable[[float], float]
    left: int = attrs.field(default=MOST_PLAYED, init=False)

    def fastest(self) -> tuple[Cuts, float]:
        """The cuts and the seconds of the schedule by them.

        With one microbatch, which has no schedule, the balanced ones.
        """
        chosen = self.problem.balanced_begins()
        if self.microbatches == 1:
            return self.problem.cuts(chosen), self._one_s(chosen)
        player = self._player(chosen)
        best, best_s = chosen, self._end_s(player, chosen)
        if len(chosen) > 1:
            best, best_s = self._moved(player, best, best_s)
            best, best_s = self._of_all(player, best, best_s)
        if self.schedule.looks_at_costs and best != chosen:  # a table for these very costs
            best_s = min(best_s, self._end_s(self._player(best), best))
        return self.problem.cuts(best), best_s

    def _one_s(self, begins: Sequence[int]) -> float:
        """Seconds of one microbatch, which goes through the stages one after another."""
        costs = self._costs(begins)
        return sum(costs.forward_s + costs.input_s + costs.weight_s + costs.send_s + costs.send_back_s) + max(
            self._behind_s(begins)
        )

    def _end_s(self, player: Player, begins: Sequence[int]) -> float:
        """Seconds of a step."""
        return player.end_s(self._costs(begins), self._behind_s(begins))

    def _behind_s(self, begins: Sequence[int]) -> list[float]:
        """Per rank of the schedule, seconds of what comes behind its row."""
        seconds = [0.0] * self.ranks
        for stage, update_s in enumerate(self.pieces.update_s(np.asarray(begins), self._speeds)):
            seconds[self.schedule.rank_of(stage, self.ranks)] += float(update_s)
        return seconds

    @property
    def _speeds(self) -> np.ndarray:
        """Per stage."""
        return np.array([device.speed for device in self.problem.devices])

    def _costs(self, begins: Sequence[int]) -> StageCosts:
        return self.pieces.stage_costs(begins, self._speeds.tolist(), self.microbatches, self.send_s)

    def _player(self, begins: Sequence[int]) -> Player:
        table = self.schedule.drafted(self.ranks, self.microbatches, self._costs(begins))
        return Player(in_parts(table) if self.pieces.backward else forward_only(table))

    def _moved(self, player: Player, best: list[int], best_s: float) -> tuple[list[int], float]:
        """Pieces go from one stage to another as long as that helps."""
        while True:
            moved, moved_s = self._best_of(player, self.problem.near(best), best, best_s)
            if moved == best:
                return best, best_s
            best, best_s = moved, moved_s

    def _of_all(self, player: Player, best: list[int], best_s: float) -> tuple[list[int], float]:
        """Of all cuts, where these are few."""
        every = self.problem.every()
        return (best, best_s) if every is None else self._best_of(player, every, best, best_s)

    def _best_of(self, player: Player, cuts: np.ndarray, best: list[int], best_s: float) -> tuple[list[int], float]:
        """The fastest of some cuts and the best so far."""
        cuts = cuts[self.problem.may_be(cuts)]
        bounds = self._at_least_s(cuts)
        for number in progress.over("pipeline cuts", np.argsort(bounds, kind="stable").tolist()):
            if bounds[number] >= best_s * (1 - GAIN) or self.left < player.actions:
                break
            self.left -= player.actions
            begins = [int(begin) for begin in cuts[number]]
            end_s = self._end_s(player, begins)
            if end_s < best_s * (1 - GAIN):
                best, best_s = begins, end_s
        return best, best_s

    def _at_least_s(self, cuts: np.ndarray) -> np.ndarray:
        """(cuts,) no step ends earlier: the slowest rank's work, behind the first forward that comes to it."""
        forward, inputs, weights = (self.pieces.seconds(kind, cuts, self.microbatches, self._speeds) for kind in KINDS)
        updates = self.pieces.update_s(cuts, self._speeds)
        before = np.cumsum(forward, axis=-1) - forward
        bounds = np.zeros(len(cuts))
        for rank in range(self.ranks):
            here = [stage for stage in range(cuts.shape[1]) if self.schedule.rank_of(stage, self.ranks) == rank]
            work = (forward[:, here] + inputs[:, here] + weights[:, here]).sum(axis=-1)
            bounds = np.maximum(bounds, before[:, here[0]] + self.microbatches * work + updates[:, here].sum(axis=-1))
        return bounds
