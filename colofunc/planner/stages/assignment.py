"""Assignment: which stage each parameter of a traced step belongs to, by what the step computes with it.

Problem: a model is a module tree, a pipeline needs a line: contiguous parts of the forward pass that take equally long
and hand little on. Idea: forward nodes stand in the order in which they ran. A cut is possible in front of a node that
reads a weight; its price is what crosses it. The cuts are those whose slowest stage, with what it receives, is the
fastest, and a parameter is in the stages of its readers.

    embedding | layer 0 | layer 1 | head         4 stages of one module each; a tied weight is in the first and the last

What depends on no weight (masks, rotary tables) crosses nothing: each stage makes it anew.

Where ranks differ, the seconds of a stage are divided by the speed of its ranks, and its weights, with gradients and
optimizer state, have to fit there. The optimum is exact for the ranks in their order: dynamic programming over (stages,
pieces), as in `cuts`. Where a rank has several stages, the sums of these count, of seconds and of bytes: all cuts are
compared where they are few, else pieces go from one stage to another as long as that helps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from copy import copy
from functools import cached_property, partial
from itertools import combinations
from math import comb, inf

import attrs
import numpy as np

from colofunc.errors import PlanError
from colofunc.planner.stages.cuts import Line, StageDevice
from colofunc.planner.stages.forward_pass import reading_of
from colofunc.program.ir import Node, Program

BISECTIONS = 40
"""Number of bisections for the least cap that some cut keeps to."""
MOST_CUTS = 20_000
"""Up to this many cuts, every one is looked at."""
NEAR = 1e-9
"""Relative difference below which two numbers of bytes count as equal."""


@attrs.frozen
class Cuts:
    """`ends`: position behind the last forward node of each stage. `seconds`: of each stage, forward, with what it
    receives.

    `uses`: position of an input -> positions of the forward nodes that read it or what is computed of weights alone.
    """

    ends: tuple[int, ...]
    seconds: tuple[float, ...]
    uses: dict[int, tuple[int, ...]]

    def stages_of(self, position: int) -> tuple[int, ...]:
        """The stages that read an input."""
        found = {bisect_right(self.ends[:-1], use) for use in self.uses.get(position, ())}
        return tuple(sorted(found))


@attrs.frozen
class StageActivations:
    """What a stage keeps for backwards: of each stage, so many microbatches at once, each this part of the batch's rows
    on a rank.
    """

    in_flight: tuple[int, ...]
    part: float


class CutProblem:
    """A global program's forward pass, to be cut in so many stages.

    node_s: seconds of a node on one device. send_s: seconds to hand on so many bytes. devices: of each stage, the whole
    of what its rank has, where they differ; where no cut fits their memory, as without recomputation or offload, they
    are told apart by their speeds alone. ranks: of each stage, where a rank has several. Raises PlanError where there
    are fewer places to cut than stages need.

    A cut is written as the pieces that begin its stages, several as an array (cuts, stages) of these.
    """

    def __init__(
        self,
        program: Program,
        stages: int,
        node_s: Callable[[Node], float],
        send_s: Callable[[int], float],
        devices: Sequence[StageDevice] = (),
        ranks: Sequence[int] = (),
    ) -> None:
        self.program = program
        self.ranks = ranks or range(stages)
        self.reading = reading_of(program)
        places = self.reading.narrow_places(stages)
        if len(places) < stages:
            raise PlanError(
                f"{stages} stages, and the forward pass has {len(places)} operators with weights of their own to begin "
                "one at; "
                f"use at most {max(1, len(places))} stages"
            )
        seconds = np.array([node_s(node) if k in self.reading.forward else 0.0 for k, node in enumerate(program.nodes)])
        self.until = np.concatenate([[0.0], np.cumsum(seconds)])
        self.begins = [0, *places[1:]]
        self.devices: Sequence[StageDevice] = devices or [StageDevice(1.0, inf)] * stages
        received_s = np.array([0.0, *(send_s(self.reading.crossing_bytes(place)) for place in places[1:])])
        self.line = Line(
            self.until[[*self.begins, len(program.nodes)]], received_s, self.reading.kept_bytes(self.begins)
        )

    def on(self, devices: Sequence[StageDevice]) -> CutProblem:
        """The same, on other devices."""
        other = copy(self)
        other.devices = devices
        other.__dict__.pop("_chosen", None)
        return other

    def balanced(self) -> Cuts:
        """The cuts whose slowest stage is the fastest; where a rank has several stages, those whose slowest rank is."""
        return self.cuts(self.balanced_begins())

    def balanced_begins(self) -> list[int]:
        """The pieces that begin the stages of `balanced`."""
        return self._chosen[0]

    def slowest_rank_s(self) -> float:
        """Seconds of the slowest rank's stages by `balanced`."""
        return float(self._rank_seconds(np.array([self.balanced_begins()])).max())

    def may_be(self, cuts: np.ndarray) -> np.ndarray:
        """(cuts,) whether each stage has a piece, and each rank room for what it has, where any cut leaves room."""
        _, fits = self._chosen
        return self._have_pieces(cuts) & (self._over_bytes(cuts) <= 0.0 if fits else True)

    def near(self, begins: Sequence[int]) -> np.ndarray:
        """(cuts, stages) every way for a stage to have a piece less and another one more; all cuts in between move by
        one piece.
        """
        ways = [np.array(begins)]
        for giver in range(len(begins)):
            for taker in range(len(begins)):
                moved = np.array(begins)
                if giver < taker:
                    moved[giver + 1 : taker + 1] -= 1
                else:
                    moved[taker + 1 : giver + 1] += 1
                ways.append(moved)
        cuts = np.unique(np.array(ways), axis=0)
        return np.asarray(cuts[self._have_pieces(cuts)])

    def every(self) -> np.ndarray | None:
        """(cuts, stages) all cuts; None where these are more than `MOST_CUTS`."""
        stages, pieces = len(self.devices), self.line.pieces
        if comb(pieces - 1, stages - 1) > MOST_CUTS:
            return None
        return np.array([(0, *rest) for rest in combinations(range(1, pieces), stages - 1)])

    @cached_property
    def _chosen(self) -> tuple[list[int], bool]:
        """The balanced cut, and whether it leaves room on every rank."""
        roomy: list[np.ndarray | None] = [None] * len(self.devices)
        fitting = self._fastest(self._over_capacity())
        if not self._several:
            return (fitting, True) if fitting else (self._fastest(roomy), False)
        chosen = self._least(fitting or self._fastest(roomy), [self._over_bytes, self._by_rank_s])
        if self._over_bytes(np.array([chosen]))[0] <= 0.0:
            return chosen, True
        return self._least(self._fastest(roomy), [self._by_rank_s]), False

    @property
    def _several(self) -> bool:
        """Whether a rank has several stages."""
        return len(set(self.ranks)) < len(self.devices)

    def _least(self, begins: list[int], order: Sequence[Callable[[np.ndarray], np.ndarray]]) -> list[int]:
        """Of all cuts, or of those that moves from the given one lead to, the least by some figures, the first of which
        counts most.
        """
        every = self.every()
        if every is not None:
            return self._least_of(every, order)
        best = begins
        while True:
            found = self._least_of(np.vstack([[best], self.near(best)]), order)
            if found == best:
                return best
            best = found

    def _least_of(self, cuts: np.ndarray, order: Sequence[Callable[[np.ndarray], np.ndarray]]) -> list[int]:
        """Of equals the first."""
        columns = [column for figures in order for column in np.atleast_2d(figures(cuts).T)]
        return [int(begin) for begin in cuts[np.lexsort(columns[::-1])[0]]]

    def _have_pieces(self, cuts: np.ndarray) -> np.ndarray:
        """(cuts,) whether each stage has a piece."""
        return np.asarray((np.diff(cuts, axis=1, append=self.line.pieces) > 0).all(axis=1))

    def _over_bytes(self, cuts: np.ndarray) -> np.ndarray:
        """(cuts,) bytes that do not fit on the ranks."""
        kept = self._of_ranks(self.line.kept[self._ends(cuts)] - self.line.kept[cuts])
        rooms = np.array([self.devices[self.ranks.index(rank)].capacity_bytes for rank in dict.fromkeys(self.ranks)])
        return np.asarray(np.maximum(kept - rooms, 0.0).sum(axis=1))

    def _by_rank_s(self, cuts: np.ndarray) -> np.ndarray:
        """(cuts, ranks + 1) seconds of each rank's stages together, the slowest rank first; then of the slowest stage.
        """
        seconds = self._stage_seconds(cuts)
        of_ranks = -np.sort(-self._of_ranks(seconds), axis=1)
        return np.hstack([np.round(of_ranks, 15), seconds.max(axis=1, keepdims=True)])

    def _rank_seconds(self, cuts: np.ndarray) -> np.ndarray:
        return self._of_ranks(self._stage_seconds(cuts))

    def _stage_seconds(self, cuts: np.ndarray) -> np.ndarray:
        """(cuts, stages) forward, with what a stage receives."""
        speeds = np.array([device.speed for device in self.devices])
        until, received_s = self.line.until, self.line.received_s
        return np.asarray((until[self._ends(cuts)] - until[cuts]) / speeds + received_s[cuts])

    def _ends(self, cuts: np.ndarray) -> np.ndarray:
        return np.hstack([cuts[:, 1:], np.full((len(cuts), 1), self.line.pieces)])

    def _of_ranks(self, figures: np.ndarray) -> np.ndarray:
        """(cuts, ranks) sums over the stages of each rank."""
        ranks = list(dict.fromkeys(self.ranks))
        has_stage = np.zeros((len(self.ranks), len(ranks)))
        for stage, rank in enumerate(self.ranks):
            has_stage[stage, ranks.index(rank)] = 1.0
        return np.asarray(figures @ has_stage)

    def leaner(self, held: StageActivations, levels: int) -> list[Cuts]:
        """The cuts whose fullest stage holds least, then faster ones that hold more, up to `balanced`, which is left
        out.

        Each is the fastest within a cap on what a stage holds: weights, gradients, optimizer state, and for so many
        microbatches what backward reads. Where recomputation or offload help this is an estimate, as is the part of a
        rank where other axes split layers.
        """
        needs = self._needs(held)
        balanced = self.balanced_begins()
        most = self._peak(balanced, needs)
        lean = self._leanest(needs, most)
        least = self._peak(lean, needs)
        found: list[list[int]] = []
        for level in range(levels):
            cap_bytes = least + (most - least) * level / levels
            chosen = lean if level == 0 and self._several else self._within(cap_bytes, needs, lean)
            if chosen != balanced and chosen not in found:
                found.append(chosen)
        return [self.cuts(chosen) for chosen in found]

    def _leanest(self, needs: Sequence[np.ndarray], most: float) -> list[int]:
        """The cut whose fullest rank holds least. most: bytes that some cut keeps to."""
        low, high = 0.0, most
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            if self._fastest([need > middle for need in needs]):
                high = middle
            else:
                low = middle
        lean = self._fastest([need > high for need in needs])
        return self._least(lean, [partial(self._peaks, needs), self._by_rank_s]) if self._several else lean

    def _within(self, cap_bytes: float, needs: Sequence[np.ndarray], lean: list[int]) -> list[int]:
        """The fastest cut whose fullest rank holds no more; from the leanest on, where a rank has several stages."""
        if not self._several:
            return self._fastest([need > cap_bytes * (1 + NEAR) for need in needs])

        def over_bytes(cuts: np.ndarray) -> np.ndarray:
            return np.maximum(self._peaks(needs, cuts) - cap_bytes * (1 + NEAR), 0.0)

        return self._least(lean, [over_bytes, self._by_rank_s])

    def _needs(self, held: StageActivations) -> list[np.ndarray]:
        """Of each stage [i, j]: bytes where it has the pieces i..j-1, in parts of its device's memory where devices
        differ.
        """
        saved = self.reading.saved_bytes(self.begins)
        crossing = np.array([0.0, *(self.reading.crossing_bytes(place) for place in self.begins[1:])])
        rooms = [device.capacity_bytes for device in self.devices]
        needs = []
        for in_flight, room in zip(held.in_flight, rooms, strict=True):
            kept = self.line.kept[None, :] - self.line.kept[:-1, None]
            activations = saved[None, :] - saved[:-1, None] + crossing[:, None]
            scale = max(rooms) / room if room < inf else 1.0
            needs.append((kept + in_flight * held.part * activations) * scale)
        return needs

    def _peak(self, begins: Sequence[int], needs: Sequence[np.ndarray]) -> float:
        """Bytes of the fullest rank."""
        return float(self._peaks(needs, np.array([begins]))[0])

    def _peaks(self, needs: Sequence[np.ndarray], cuts: np.ndarray) -> np.ndarray:
        """(cuts,) bytes of the fullest rank."""
        ends = self._ends(cuts)
        of_stages = np.stack([need[cuts[:, k], ends[:, k]] for k, need in enumerate(needs)], axis=1)
        return np.asarray(self._of_ranks(of_stages).max(axis=1))

    def _over_capacity(self) -> list[np.ndarray | None]:
        return [self.line.over(device.capacity_bytes) for device in self.devices]

    def _fastest(self, over: Sequence[np.ndarray | None]) -> list[int]:
        speeds = [device.speed for device in self.devices]
        return self.line.in_order(over, speeds)[0]

    def cuts(self, begins: Sequence[int]) -> Cuts:
        """The cut whose stages begin with these pieces."""
        ends = (*(self.begins[k] for k in begins[1:]), len(self.program.nodes))
        seconds = self._stage_seconds(np.array([begins]))[0]
        return Cuts(ends, tuple(float(each) for each in seconds), self.reading.uses)


def cuts_at(program: Program, ends: tuple[int, ...]) -> Cuts:
    """Cuts that are known by where they are; nobody has timed them."""
    return Cuts(ends, (), reading_of(program).uses)
