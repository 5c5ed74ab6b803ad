"""Assignment: which stage each parameter of a traced step belongs to, by what the step computes with it.

Problem: a model is a module tree, a pipeline needs a line: contiguous parts of the forward pass that take equally long and hand little on.
Idea: forward nodes stand in the order in which they ran. A cut is possible in front of a node that reads a weight; its price is what
crosses it. The cuts are those whose slowest stage, with what it receives, is the fastest, and a parameter is in the stages of its readers.

    embedding | layer 0 | layer 1 | head         4 stages of one module each; a tied weight is in the first and the last

What depends on no weight (masks, rotary tables) crosses nothing: each stage makes it anew.

Where ranks differ, the seconds of a stage are divided by the speed of its ranks, and its weights, with gradients and optimizer state,
have to fit there. The optimum is exact for the ranks in their order: dynamic programming over (stages, pieces), as in `cuts`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

import attrs
import numpy as np

from colofunc.errors import PlanError
from colofunc.planner.stages.cuts import Device
from colofunc.program.ir import Node, Program

WEIGHTS = frozenset({"param", "frozen", "buffer"})
"""Roles of inputs that lie where they are read."""


@attrs.frozen
class Cuts:
    """`ends`: position behind the last forward node of each stage. `seconds`: of each stage, forward, with what it receives.

    `uses`: position of an input -> positions of the forward nodes that read it or what is computed of weights alone.
    """

    ends: tuple[int, ...]
    seconds: tuple[float, ...]
    uses: dict[int, tuple[int, ...]]

    def stages_of(self, position: int) -> tuple[int, ...]:
        """The stages that read an input."""
        found = {sum(end <= use for end in self.ends[:-1]) for use in self.uses.get(position, ())}
        return tuple(sorted(found))


def balanced_cuts(
    program: Program, stages: int, node_s: Callable[[Node], float], send_s: Callable[[int], float], devices: Sequence[Device] = ()
) -> Cuts:
    """The cuts of a global program's forward pass in so many stages.

    node_s: seconds of a node on one device. send_s: seconds to hand on so many bytes. devices: of each stage, where they differ; where
    no cut fits their memory, as without recomputation or offload, they are told apart by their speeds alone. Raises PlanError where there
    are fewer places to cut than stages need.
    """
    reading = _Reading(program)
    places = reading.narrow_places(stages)
    if len(places) < stages:
        raise PlanError(
            f"{stages} stages, and the forward pass has {len(places)} operators with weights of their own to begin one at; "
            f"use at most {max(1, len(places))} stages"
        )
    seconds = np.array([node_s(node) if node.phase == "forward" else 0.0 for node in program.nodes])
    until = np.concatenate([[0.0], np.cumsum(seconds)])
    begins = [0, *places[1:]]
    received_s = np.array([0.0, *(send_s(reading.crossing_bytes(place)) for place in places[1:])])
    devices = devices or [Device(1.0, inf)] * stages
    work_s = until[[*begins, len(program.nodes)]]
    chosen = _fastest_bottleneck(work_s, received_s, reading.kept_bytes(begins), devices)
    if not chosen:
        chosen = _fastest_bottleneck(work_s, received_s, np.zeros(len(begins) + 1), devices)
    firsts = [begins[k] for k in chosen]
    ends = (*firsts[1:], len(program.nodes))
    taken = []
    for first, end, k, device in zip(firsts, ends, chosen, devices, strict=True):
        taken.append(float((until[end] - until[first]) / device.speed + received_s[k]))
    return Cuts(ends, tuple(taken), reading.uses)


def _fastest_bottleneck(
    until: np.ndarray, received_s: np.ndarray, kept_bytes: np.ndarray, devices: Sequence[Device]
) -> list[int]:
    """Indices of the pieces that begin a stage, the first being 0. The slowest stage is as fast as can be; [] where none fits.

    until: (pieces + 1,) seconds in front of each piece, and of all. received_s: (pieces,) seconds to receive what piece k reads.
    kept_bytes: (pieces + 1,) as `until`, of what stays on the device. devices: of each stage.
    """
    pieces = len(received_s)
    # worst[j]: of the best way to cut pieces 0..j-1 in the stages so far, (slowest stage, seconds of all sends).
    worst = np.full(pieces + 1, np.inf)
    sends = np.full(pieces + 1, np.inf)
    worst[0] = sends[0] = 0.0
    begins: list[np.ndarray] = []
    for device in devices:
        # last[i, j]: seconds of a stage of the pieces i..j-1
        last = (until[None, :] - until[:-1, None]) / device.speed + received_s[:, None]
        slowest = np.maximum(worst[:-1, None], last)
        slowest[kept_bytes[None, :] - kept_bytes[:-1, None] > device.capacity_bytes] = np.inf
        slowest[np.tril_indices(pieces, 0, pieces + 1)] = np.inf  # a stage has a piece at least
        total = sends[:-1, None] + received_s[:, None]
        best = slowest.min(axis=0)
        ties = np.where(slowest <= best[None, :] * (1 + 1e-9), total, np.inf)
        first = ties.argmin(axis=0)
        worst, sends = best, ties.min(axis=0)
        begins.append(first)
    if np.isinf(worst[pieces]):
        return []
    found, end = list[int](), pieces
    for first in reversed(begins):
        end = int(first[end])
        found.append(end)
    return found[::-1]


class _Reading:
    """What the forward pass reads. `places`: positions of the nodes that are the first to read some weight."""

    def __init__(self, program: Program) -> None:
        self.program = program
        weights = {id: frozenset({k}) for k, id in enumerate(program.inputs) if program.values[id].role in WEIGHTS}
        self.of_weights: dict[int, frozenset[int]] = dict(weights)  # value -> the inputs that it is computed of, and of nothing else
        self.computed: set[int] = set()  # values that depend on a weight and on the batch: what a stage hands on
        uses: dict[int, list[int]] = {}
        places = []
        for index, node in enumerate(program.nodes):
            if node.phase != "forward":
                continue
            read = frozenset[int]().union(*(self.of_weights.get(ref, frozenset()) for ref in node.refs))
            if read and all(ref in self.of_weights for ref in node.refs):
                self.of_weights.update(dict.fromkeys(node.results, read))
                continue
            if read or any(ref in self.computed for ref in node.refs):
                self.computed.update(node.results)
            if read - uses.keys():
                places.append(index)
            for position in read:
                uses.setdefault(position, []).append(index)
        self.places = places
        self.uses = {position: tuple(found) for position, found in uses.items()}
        self._crossing = self._count_crossing()

    def _count_crossing(self) -> np.ndarray:
        """Per position, bytes that nodes in front of it hand on to forward nodes at it or behind it."""
        change = np.zeros(len(self.program.nodes) + 1)
        for id in self.computed:
            readers = [k for k in self.program.readers.get(id, ()) if self.program.nodes[k].phase == "forward"]
            if readers:
                change[self.program.made_at[id] + 1] += self.program.values[id].nbytes
                change[readers[-1] + 1] -= self.program.values[id].nbytes
        return np.cumsum(change)

    def narrow_places(self, least: int) -> list[int]:
        """The places where no less crosses at the next ones, as between layers and not within one; all where these are fewer than `least`.

        Within a layer a residual crosses beside what the layer computes, forward and backward.
        """
        crossing = [self.crossing_bytes(place) for place in self.places]
        narrow = self.places[:1]
        for k in range(1, len(self.places)):
            if crossing[k] <= min(crossing[max(k - 1, 1) : k + 2]):
                narrow.append(self.places[k])
        return narrow if len(narrow) >= least else self.places

    def kept_bytes(self, begins: Sequence[int]) -> np.ndarray:
        """(pieces + 1,) bytes of weights that pieces in front of each begin to read, with their gradients and optimizer state.

        begins: where pieces begin. State counts with the weights in proportion to these.
        """
        program = self.program
        inputs = [program.values[id] for id in program.inputs]
        trained = sum(value.nbytes for value in inputs if value.role == "param")
        state = sum(value.nbytes for value in inputs if value.role == "state")
        backward = any(node.phase == "backward" for node in program.nodes)
        times = (2.0 if backward else 1.0) + (state / trained if trained else 0.0)
        kept = np.zeros(len(begins) + 1)
        for position, uses in self.uses.items():
            value = inputs[position]
            piece = int(np.searchsorted(begins, uses[0], side="right"))
            kept[piece] += value.nbytes * (times if value.role == "param" else 1.0)
        return np.cumsum(kept)

    def crossing_bytes(self, place: int) -> int:
        return int(self._crossing[place])
