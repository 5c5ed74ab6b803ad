"""What each piece of a forward pass takes, forward and backward: figures to play a schedule by before anything is
planned.

    pieces = PieceCosts.of(problem, node_s, launch_s, sharing)
    costs = pieces.stage_costs(begins, speeds, microbatches, send_s)          # `StageCosts` for the cut that begins there

Problem: where a pipeline is best cut is seen when its schedule is played, and the clock knows what stages take of a
finished program only. Idea: a piece is what stands between two places where a cut may be. A backward operator belongs
to the piece whose weights and results it reads, as in the finished program; it is a weight gradient (W) where each of
its results leads to one gradient of its own piece and to nothing else. What a stage takes is then the sum over its pieces. Updates of its
weights follow when its last microbatch is done.

These are estimates: how other axes split an operator is not known yet (its ranks share it evenly).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs
import numpy as np

from colofunc.planner.stages.assignment import CutProblem
from colofunc.program.ir import Node, Program
from colofunc.program.pipeline_schedule import StageCosts
from colofunc.program.placing import inputs_of_gradients, last_fed

KINDS = ("F", "I", "W")
MANY = -1
"""In place of a gradient: several are reached."""


@attrs.frozen(eq=False)
class PieceCosts:
    """Of each piece on one of the ranks that share a stage.

    until: kind of part -> (pieces + 1, 2) sums over the pieces in front of each: seconds of the whole batch beside
    launches, and seconds of the launches of one microbatch. updates_s: (pieces + 1,) seconds of updates in front of
    each. crossing_bytes: (pieces,) of the whole batch that a piece receives. backward: whether there is one.
    """

    until: Mapping[str, np.ndarray]
    updates_s: np.ndarray
    crossing_bytes: np.ndarray
    backward: bool

    @staticmethod
    def of(
        problem: CutProblem, program: Program, node_s: Callable[[Node], float], launch_s: float, sharing: int
    ) -> PieceCosts:
        """program: that of the problem, its calls with the kernels that a plan counts on; a backward node may be two
        there. node_s: seconds of a node on one device, its launch among them. sharing: ranks that share a stage."""
        begins = problem.begins
        parts = _Parts(program, problem)
        seconds = {kind: np.zeros((len(begins) + 1, 2)) for kind in KINDS}
        for index, (piece, kind) in parts.of_nodes().items():
            took_s = node_s(program.nodes[index])
            launch = min(took_s, launch_s)
            seconds[kind][piece + 1] += ((took_s - launch) / sharing, launch)
        updates = np.zeros(len(begins) + 1)
        for index, piece in parts.of_updates():
            updates[piece + 1] += node_s(program.nodes[index]) / sharing
        crossing = np.array([0.0, *(float(problem.reading.crossing_bytes(place)) for place in begins[1:])]) / sharing
        until = {kind: np.cumsum(each, axis=0) for kind, each in seconds.items()}
        return PieceCosts(until, np.cumsum(updates), crossing, parts.backward)

    @property
    def pieces(self) -> int:
        """How many there are."""
        return len(self.crossing_bytes)

    def seconds(self, kind: str, begins: np.ndarray, microbatches: int, speeds: np.ndarray) -> np.ndarray:
        """(..., stages) seconds of a part of each stage for one microbatch. begins: (..., stages) the piece that begins
        each stage.
        """
        return self._between(self.until[kind] @ np.array([1.0 / microbatches, 1.0]), begins) / speeds

    def update_s(self, begins: np.ndarray, speeds: np.ndarray) -> np.ndarray:
        """(..., stages) seconds of the updates of each stage's weights."""
        return self._between(self.updates_s, begins) / speeds

    def _between(self, until: np.ndarray, begins: np.ndarray) -> np.ndarray:
        ends = np.concatenate([begins[..., 1:], np.full((*begins.shape[:-1], 1), self.pieces)], axis=-1)
        return np.asarray(until[ends] - until[begins])

    def stage_costs(
        self, begins: Sequence[int], speeds: Sequence[float], microbatches: int, send_s: Callable[[float], float]
    ) -> StageCosts:
        """Of the stages that begin with these pieces. What they keep counts as nothing: a budget is for the accountant
        to keep to.

        speeds: of each stage's ranks. send_s: seconds to send so many bytes.
        """
        first, by = np.asarray(begins), np.asarray(speeds)
        forward, inputs, weights = (self.seconds(kind, first, microbatches, by).tolist() for kind in KINDS)
        sends = [send_s(float(self.crossing_bytes[begin]) / microbatches) for begin in begins[1:]]
        nothing = [0.0] * len(begins)
        return StageCosts(
            forward, inputs, weights, sends, sends if self.backward else [0.0] * len(sends), nothing, nothing
        )


class _Parts:
    """The piece and the kind of part of each node that a microbatch runs."""

    def __init__(self, program: Program, problem: CutProblem) -> None:
        reading = problem.reading
        self.program, self.begins, self.made_at = program, problem.begins, problem.program.made_at
        self.of_weights, self.computed = reading.of_weights, reading.computed
        # Where pieces begin is said of the problem's program. Forward nodes are the same in both, at other positions.
        self.place = dict(zip(_forward(program), _forward(problem.program), strict=True))
        self.gradient_of = inputs_of_gradients(program)
        self.backward = any(node.phase == "backward" for node in program.nodes)
        # Per input that is a weight, the pieces that read it.
        self.pieces_of: dict[int, set[int]] = {}
        for position, readers in reading.uses.items():
            self.pieces_of[position] = {self._at(reader) for reader in readers}
        self.position = {id: k for k, id in enumerate(program.inputs)}
        self.reached = self._reached()
        self.last_fed = self._last_fed()

    def of_nodes(self) -> dict[int, tuple[int, str]]:
        """Position of a node -> (piece, kind of part)."""
        found: dict[int, tuple[int, str]] = {}
        made: dict[int, int] = {}  # value of the backward pass -> its piece
        for index, node in enumerate(self.program.nodes):
            if node.phase == "forward":
                if any(id in self.computed for id in (*node.refs, *node.results)):
                    found[index] = self._at(self.place[index]), "F"
                continue
            if node.phase != "backward":
                continue
            piece = self._piece(node, made)
            made.update(dict.fromkeys(node.results, piece))
            found[index] = piece, "W" if self._is_of_weights(node, piece) else "I"
        return found

    def of_updates(self) -> Iterator[tuple[int, int]]:
        """(position of a node that updates a weight, a piece that reads the weight)."""
        for index, node in enumerate(self.program.nodes):
            if node.phase != "update":
                continue
            pieces: set[int] = set()
            for ref in node.refs:
                for position in self.of_weights.get(ref, ()):
                    pieces.update(self.pieces_of.get(position, ()))
            for piece in sorted(pieces):
                yield index, piece

    def _at(self, place: int) -> int:
        """The piece of a forward node, by its position in the problem's program."""
        return bisect_right(self.begins, place) - 1

    def _piece(self, node: Node, made: Mapping[int, int]) -> int:
        """The piece of the weight of which it makes the gradient, else the last whose results it reads; none behind its
        gradients, and none in front of a piece whose weights wait for it: what it reads may be of the first piece and
        of all, such as a rotary table."""
        for out in node.results:
            if out in self.gradient_of:
                pieces = self.pieces_of.get(self.position[self.gradient_of[out]], set())
                if len(pieces) == 1:
                    return next(iter(pieces))
        most = min((made[ref] for ref in node.refs if ref in made), default=len(self.begins) - 1)
        own = []
        for ref in node.refs:
            if ref in self.computed and ref not in made:
                own.append(self._at(self.made_at[ref]))
            for position in self.of_weights.get(ref, ()):
                own += self.pieces_of.get(position, ())
        known = [piece for piece in own if piece <= most]
        if not known:
            return most
        waiting = max((self.last_fed.get(out, 0) for out in node.results), default=0)
        return max(max(known), min(waiting, most))

    def _is_of_weights(self, node: Node, piece: int) -> bool:
        """Whether nothing but one gradient, of a weight of the same piece, waits for each of its results."""
        reached = {self.reached[out] for out in node.results if out in self.reached}
        if not reached or MANY in reached:
            return False
        weights = [self.position[self.gradient_of[gradient]] for gradient in reached]
        return all(piece in self.pieces_of.get(weight, ()) for weight in weights)

    def _last_fed(self) -> dict[int, int]:
        """Value of the backward pass -> the last piece to whose weights' gradients it leads."""
        piece_of: dict[int, int] = {}
        for gradient, weight in self.gradient_of.items():
            pieces = self.pieces_of.get(self.position[weight], set())
            if len(pieces) == 1:  # of a tied weight each piece makes its own part
                (piece_of[gradient],) = pieces
        return last_fed(self.program, piece_of)

    def _reached(self) -> dict[int, int]:
        """Value -> the gradient that it leads to in the backward pass, or MANY."""
        reached = {gradient: gradient for gradient in self.gradient_of}
        for node in reversed(self.program.nodes):
            if node.phase != "backward":
                continue
            found = {reached[out] for out in node.results if out in reached}
            if not found:
                continue
            mark = next(iter(found)) if len(found) == 1 else MANY
            for ref in node.refs:
                reached[ref] = mark if reached.get(ref, mark) == mark else MANY
        return reached


def _forward(program: Program) -> list[int]:
    """Positions of the nodes of the forward pass."""
    return [index for index, node in enumerate(program.nodes) if node.phase == "forward"]
