"""The cuts of a planned pipeline as data: what a step takes where they are, and where else they could be.

    cuts = low.plan.pipeline.cuts
    cuts.counted(cuts.begins).step_s                  # seconds of a step by the estimate that cuts are compared by
    cuts.counted(cuts.moved(2, 11)).step_s            # with stage 2 beginning at piece 11

Problem: why a stage begins where it does is known to the search for cuts, which is over when somebody asks. Idea: the
plan keeps what the search goes by, a few figures for each piece between two places where a stage may begin, and the
actions of its schedule. From these any cut is played again, as the search plays it.

These are estimates (`PieceCosts`), of the order of actions that the plan has. They say by how much one cut is better
than another; what a step takes in full is what the plan says of itself.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import attrs
import numpy as np

from colofunc.planner.stages.assignment import CutProblem
from colofunc.planner.stages.piece_costs import KINDS, PieceCosts
from colofunc.planner.stages.simulate import Player
from colofunc.program.actions import ActionTable
from colofunc.program.pipeline_schedule import StageCosts


@attrs.frozen
class Piece:
    """What stands between two places where a stage may begin: figures of one microbatch on one of the ranks that share
    it, of speed 1.

    path: the module of the operator that begins it. weights: names of those that it is the first to read.
    received_bytes, received_s: what crosses in front of it. update_s, kept_bytes: of a step; weights with gradients and
    optimizer state, as if no axis but that of the pipeline divided them. saved_bytes: what backward reads.
    """

    path: str
    weights: tuple[str, ...]
    forward_s: float
    input_s: float
    weight_s: float
    update_s: float
    received_bytes: float
    received_s: float
    kept_bytes: float
    saved_bytes: float


@attrs.frozen
class CutCount:
    """What a step by one cut takes. step_s: seconds; without_sends_s: the same where sends take none.

    work_s, held_bytes: per rank of the pipeline's axis. received_bytes: per stage, what it receives of one microbatch.
    """

    step_s: float
    without_sends_s: float
    work_s: tuple[float, ...]
    held_bytes: tuple[float, ...]
    received_bytes: tuple[float, ...]


@attrs.frozen
class OtherSchedule:
    """A schedule for the same stages that was not asked for, and what a step by it takes."""

    name: str
    count: CutCount


@attrs.frozen
class StageCuts:
    """Where stages begin. begins: of each stage, the piece. rows: of each rank, its actions. speeds: of each stage's
    ranks.

    given: whether stages= said so. others: further schedules for these stages.
    """

    pieces: tuple[Piece, ...]
    begins: tuple[int, ...]
    rows: tuple[str, ...]
    speeds: tuple[float, ...]
    backward: bool
    given: bool = False
    others: tuple[OtherSchedule, ...] = ()

    @cached_property
    def table(self) -> ActionTable:
        """The actions of each rank."""
        return ActionTable.parse(self.rows)

    @cached_property
    def _player(self) -> Player:
        return Player(self.table)

    def counted(self, begins: Sequence[int]) -> CutCount:
        """What a step takes whose stages begin with these pieces."""
        return self.counted_by(self.table, self._player, begins)

    def counted_by(self, table: ActionTable, player: Player, begins: Sequence[int]) -> CutCount:
        """The same by another table of as many stages. player: of that table."""
        costs, updates_s = self.costs(begins), self._seconds(begins, "update_s")
        behind_s, work_s, held = [0.0] * table.ranks, [0.0] * table.ranks, [0.0] * table.ranks
        for stage, rank in sorted(table.rank_of.items()):
            behind_s[rank] += updates_s[stage]
            held[rank] += self._held_bytes(table, begins, stage)
        for rank, row in enumerate(table.rows):
            work_s[rank] = behind_s[rank] + sum(costs.seconds(action) for action in row)
        free = [0.0] * len(costs.send_s)
        without_sends = attrs.evolve(costs, send_s=free, send_back_s=free)
        return CutCount(
            player.end_s(costs, behind_s),
            player.end_s(without_sends, behind_s),
            tuple(work_s),
            tuple(held),
            tuple(self.pieces[begin].received_bytes for begin in begins),
        )

    def costs(self, begins: Sequence[int]) -> StageCosts:
        """Of the stages that begin with these pieces."""
        sends_s = [self.pieces[begin].received_s for begin in begins[1:]]
        back_s = sends_s if self.backward else [0.0] * len(sends_s)
        nothing = [0.0] * len(begins)
        return StageCosts(
            self._seconds(begins, "forward_s"),
            self._seconds(begins, "input_s"),
            self._seconds(begins, "weight_s"),
            sends_s,
            back_s,
            nothing,
            nothing,
        )

    def moved(self, stage: int, piece: int) -> tuple[int, ...]:
        """The cut with a stage that begins at another piece; neighbours that it meets give way, a piece a stage.

        stage, piece: from 1 on, with a piece left for each stage on either side.
        """
        begins = list(self.begins)
        begins[stage] = piece
        for before in range(stage - 1, 0, -1):
            begins[before] = min(begins[before], begins[before + 1] - 1)
        for behind in range(stage + 1, len(begins)):
            begins[behind] = max(begins[behind], begins[behind - 1] + 1)
        return tuple(begins)

    def may_begin(self, stage: int, piece: int) -> bool:
        """Whether each stage has a piece where one begins there."""
        return stage <= piece <= len(self.pieces) - (len(self.begins) - stage)

    def by_hand(self, begins: Sequence[int]) -> dict[str, int]:
        """What `stages=` of `cf.pipeline` is to be for a cut: name of a weight -> the first stage that reads it."""
        found = {}
        for number, piece in enumerate(self.pieces):
            stage = sum(begin <= number for begin in begins) - 1
            found.update(dict.fromkeys(piece.weights, stage))
        return found

    def _held_bytes(self, table: ActionTable, begins: Sequence[int], stage: int) -> float:
        """Weights with what belongs to them, and what the schedule keeps of so many microbatches."""
        pieces = self._of_stage(begins, stage)
        one = pieces[0].received_bytes + sum(piece.saved_bytes for piece in pieces)
        return sum(piece.kept_bytes for piece in pieces) + table.in_flight[stage] * one

    def _of_stage(self, begins: Sequence[int], stage: int) -> tuple[Piece, ...]:
        end = begins[stage + 1] if stage + 1 < len(begins) else len(self.pieces)
        return self.pieces[begins[stage] : end]

    def _seconds(self, begins: Sequence[int], name: str) -> list[float]:
        """Per stage, the sum of a figure of its pieces, by the speed of its ranks."""
        seconds = []
        for stage, speed in enumerate(self.speeds):
            seconds.append(sum(getattr(piece, name) for piece in self._of_stage(begins, stage)) / speed)
        return seconds


def pieces_of_problem(
    problem: CutProblem, costs: PieceCosts, microbatches: int, sharing: int, send_s: Callable[[float], float]
) -> tuple[Piece, ...]:
    """The pieces of a problem. sharing: ranks that share a stage. send_s: seconds to send so many bytes."""
    program, reading = problem.program, problem.reading
    seconds = {kind: np.diff(costs.until[kind] @ np.array([1.0 / microbatches, 1.0])) for kind in KINDS}
    updates_s, kept = np.diff(costs.updates_s), np.diff(problem.line.kept)
    saved = np.diff(reading.saved_bytes(problem.begins)) / (microbatches * sharing)
    weights = _weights(problem)
    pieces = []
    for number, begin in enumerate(problem.begins):
        received = float(costs.crossing_bytes[number]) / microbatches
        piece = Piece(
            program.nodes[begin].path if number else "",
            weights.get(number, ()),
            float(seconds["F"][number]),
            float(seconds["I"][number]),
            float(seconds["W"][number]),
            float(updates_s[number]),
            received,
            send_s(received) if number else 0.0,
            float(kept[number]),
            float(saved[number]),
        )
        pieces.append(piece)
    return tuple(pieces)


def begins_of(problem: CutProblem, assigned: Mapping[int, Sequence[int]], stages: int) -> tuple[int, ...] | None:
    """The pieces that begin the stages to which inputs, by position, were given; None where one begins within a piece."""
    begins: list[int] = []
    positions = _positions(problem)
    for number in range(len(problem.begins)):
        here = {assigned[position][0] for position in positions.get(number, ()) if position in assigned}
        if not here:
            continue
        if len(here) > 1 or next(iter(here)) not in (len(begins) - 1, len(begins)):
            return None
        if next(iter(here)) == len(begins):
            begins.append(number if begins else 0)
    return tuple(begins) if len(begins) == stages else None


def _weights(problem: CutProblem) -> dict[int, tuple[str, ...]]:
    """Piece -> names of the weights that it is the first to read."""
    inputs = [problem.program.values[id] for id in problem.program.inputs]
    names: dict[int, tuple[str, ...]] = {}
    for piece, positions in _positions(problem).items():
        names[piece] = tuple(inputs[position].name for position in positions)
    return names


def _positions(problem: CutProblem) -> dict[int, list[int]]:
    """Piece -> positions of the inputs that it is the first to read."""
    found: dict[int, list[int]] = {}
    for position, uses in problem.reading.uses.items():
        piece = bisect_right(problem.begins, uses[0]) - 1
        found.setdefault(piece, []).append(position)
    return found
