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

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from itertools import product
from math import inf

import attrs
import numpy as np

from colofunc.errors import PlanError
from colofunc.planner.stages.cuts import Device, Line
from colofunc.program.aliases import aliases
from colofunc.program.ir import Node, Program

BISECTIONS = 40
"""So often the least cap that some cut keeps to is halved."""
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
        found = {bisect_right(self.ends[:-1], use) for use in self.uses.get(position, ())}
        return tuple(sorted(found))


@attrs.frozen
class Held:
    """What a stage keeps for backwards: of each stage, so many microbatches at once, each this part of the batch's rows on a rank."""

    in_flight: tuple[int, ...]
    part: float


class CutProblem:
    """A global program's forward pass, to be cut in so many stages.

    node_s: seconds of a node on one device. send_s: seconds to hand on so many bytes. devices: of each stage, where they differ; where
    no cut fits their memory, as without recomputation or offload, they are told apart by their speeds alone. ranks: of each stage, where a
    rank has several. Raises PlanError where there are fewer places to cut than stages need.
    """

    def __init__(
        self,
        program: Program,
        stages: int,
        node_s: Callable[[Node], float],
        send_s: Callable[[int], float],
        devices: Sequence[Device] = (),
        ranks: Sequence[int] = (),
    ) -> None:
        self.program = program
        self.ranks = ranks or range(stages)
        self.reading = _Reading(program)
        places = self.reading.narrow_places(stages)
        if len(places) < stages:
            raise PlanError(
                f"{stages} stages, and the forward pass has {len(places)} operators with weights of their own to begin one at; "
                f"use at most {max(1, len(places))} stages"
            )
        seconds = np.array([node_s(node) if k in self.reading.forward else 0.0 for k, node in enumerate(program.nodes)])
        self.until = np.concatenate([[0.0], np.cumsum(seconds)])
        self.begins = [0, *places[1:]]
        self.devices: Sequence[Device] = devices or [Device(1.0, inf)] * stages
        received_s = np.array([0.0, *(send_s(self.reading.crossing_bytes(place)) for place in places[1:])])
        self.line = Line(self.until[[*self.begins, len(program.nodes)]], received_s, self.reading.kept_bytes(self.begins))

    def on(self, devices: Sequence[Device]) -> CutProblem:
        """The same, on other devices."""
        other = copy(self)
        other.devices = devices
        return other

    def balanced(self) -> Cuts:
        """The cuts whose slowest stage is the fastest; from there, where a rank has several stages, those whose slowest rank is faster."""
        over = self._over_capacity()
        chosen = self._fastest(over)
        if not chosen:
            over = [None] * len(self.devices)
            chosen = self._fastest(over)
        return self._cuts(self._evened(chosen, over) if len(set(self.ranks)) < len(self.devices) else chosen)

    def slowest_rank_s(self) -> float:
        """Seconds of the slowest rank's stages by `balanced`."""
        return max(self._seconds_of_ranks(self.balanced().seconds).values())

    def _evened(self, chosen: Sequence[int], over: Sequence[np.ndarray | None]) -> list[int]:
        """A piece goes from a stage of the slowest rank to one of another, and all cuts in between by one piece, as long as that helps."""
        best, best_s = list(chosen), self._by_rank_s(chosen)
        while True:
            ways = [way for way in self._given_away(best) if self._may_be(way, over)]
            fastest = min(ways, key=self._by_rank_s, default=best)
            if self._by_rank_s(fastest) >= best_s:
                return best
            best, best_s = fastest, self._by_rank_s(fastest)

    def _given_away(self, chosen: Sequence[int]) -> Iterator[list[int]]:
        """Every way for the slowest rank to have a piece less."""
        of_ranks = self._seconds_of_ranks(self._stage_seconds(chosen))
        slowest = max(of_ranks, key=lambda rank: of_ranks[rank])
        givers = [stage for stage, rank in enumerate(self.ranks) if rank == slowest]
        takers = [stage for stage, rank in enumerate(self.ranks) if rank != slowest]
        for giver, taker in product(givers, takers):
            first, last, by = (giver + 1, taker, -1) if giver < taker else (taker + 1, giver, 1)
            yield [begin + by if first <= stage <= last else begin for stage, begin in enumerate(chosen)]

    def _may_be(self, chosen: Sequence[int], over: Sequence[np.ndarray | None]) -> bool:
        """Whether each stage has a piece, and room for what it has."""
        ends = (*chosen[1:], self.line.pieces)
        if any(begin >= end for begin, end in zip(chosen, ends, strict=True)):
            return False
        return all(too_much is None or not too_much[begin, end] for begin, end, too_much in zip(chosen, ends, over, strict=True))

    def _by_rank_s(self, chosen: Sequence[int]) -> list[float]:
        """Seconds of each rank's stages together, the slowest rank first; then of the slowest stage."""
        seconds = self._stage_seconds(chosen)
        of_ranks = self._seconds_of_ranks(seconds)
        return [*(round(one, 15) for one in sorted(of_ranks.values(), reverse=True)), max(seconds)]

    def _stage_seconds(self, chosen: Sequence[int]) -> list[float]:
        ends = (*chosen[1:], self.line.pieces)
        until, received_s = self.line.until, self.line.received_s
        return [
            float((until[end] - until[begin]) / device.speed + received_s[begin])
            for begin, end, device in zip(chosen, ends, self.devices, strict=True)
        ]

    def _seconds_of_ranks(self, seconds: Sequence[float]) -> dict[int, float]:
        of_ranks: dict[int, float] = {}
        for rank, each in zip(self.ranks, seconds, strict=True):
            of_ranks[rank] = of_ranks.get(rank, 0.0) + each
        return of_ranks

    def leaner(self, held: Held, levels: int) -> list[Cuts]:
        """The cuts whose fullest stage holds least, then faster ones that hold more, up to `balanced`, which is left out.

        Each is the fastest within a cap on what a stage holds: weights, gradients, optimizer state, and for so many microbatches what
        backward reads. Where recomputation or offload help this is an estimate, as is the part of a rank where other axes split layers.
        """
        needs = self._needs(held)
        balanced = self.balanced()
        most = self._peak(balanced, needs)
        low, high = 0.0, most
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            if self._fastest([need > middle for need in needs]):
                high = middle
            else:
                low = middle
        found: list[Cuts] = []
        for level in range(levels):
            cap_bytes = high + (most - high) * level / levels
            chosen = self._fastest([need > cap_bytes for need in needs])
            cuts = self._cuts(chosen)
            if cuts.ends != balanced.ends and all(cuts.ends != other.ends for other in found):
                found.append(cuts)
        return found

    def _needs(self, held: Held) -> list[np.ndarray]:
        """Of each stage [i, j]: bytes where it has the pieces i..j-1, in parts of its device's memory where devices differ."""
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

    def _peak(self, cuts: Cuts, needs: Sequence[np.ndarray]) -> float:
        firsts = [0, *cuts.ends[:-1]]
        pieces = [*(self.begins.index(first) for first in firsts), len(self.begins)]
        return max(float(need[pieces[k], pieces[k + 1]]) for k, need in enumerate(needs))

    def _over_capacity(self) -> list[np.ndarray | None]:
        return [self.line.over(device.capacity_bytes) for device in self.devices]

    def _fastest(self, over: Sequence[np.ndarray | None]) -> list[int]:
        speeds = [device.speed for device in self.devices]
        return self.line.in_order(over, speeds)[0]

    def _cuts(self, chosen: Sequence[int]) -> Cuts:
        ends = (*(self.begins[k] for k in chosen[1:]), len(self.program.nodes))
        return Cuts(ends, tuple(self._stage_seconds(chosen)), self.reading.uses)


def cuts_at(program: Program, ends: tuple[int, ...]) -> Cuts:
    """Cuts that are known by where they are; nobody has timed them."""
    return Cuts(ends, (), _Reading(program).uses)


def _forward_pass(program: Program) -> frozenset[int]:
    """Positions of the nodes of the forward pass; of all forward nodes where there is no backward.

    An update that is written by hand, and what a step keeps for the next one, are computed outside of a gradient too, but behind it: they
    are made of gradients, or stand behind the last of them. What backward needs the results of is always of the pass. The rest in front
    of backward is too: the last product of a loss that is a mean of scores, running statistics, a head whose loss is only shown.
    """
    forward = [k for k, node in enumerate(program.nodes) if node.phase == "forward"]
    backward = [k for k, node in enumerate(program.nodes) if node.phase == "backward"]
    if not backward:
        return frozenset(forward)
    needed = {ref for k in backward for ref in program.nodes[k].refs}
    found = set[int]()
    for k in reversed(forward):
        node = program.nodes[k]
        if any(id in needed for id in node.results):
            found.add(k)
            needed.update(node.refs)
    of_gradients = set[int]()
    for k, node in enumerate(program.nodes[: backward[-1]]):
        if node.phase != "forward" or any(ref in of_gradients for ref in node.refs):
            of_gradients.update(node.results)
        else:
            found.add(k)
    return frozenset(found)


class _Reading:
    """What the forward pass reads. `forward`: positions of its nodes. `places`: of those that are the first to read some weight."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.forward = _forward_pass(program)
        weights = {id: frozenset({k}) for k, id in enumerate(program.inputs) if program.values[id].role in WEIGHTS}
        self.of_weights: dict[int, frozenset[int]] = dict(weights)  # value -> the inputs that it is computed of, and of nothing else
        self.computed: set[int] = set()  # values that depend on a weight and on the batch: what a stage hands on
        uses: dict[int, list[int]] = {}
        places = []
        for index in sorted(self.forward):
            node = program.nodes[index]
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
        self._crossing, self._crossing_values = self._count_crossing()

    def _count_crossing(self) -> tuple[np.ndarray, np.ndarray]:
        """Per position, (bytes, number) of the values that nodes in front of it hand on to forward nodes at it or behind it."""
        nbytes, values = np.zeros(len(self.program.nodes) + 1), np.zeros(len(self.program.nodes) + 1)
        for id in self.computed:
            readers = [k for k in self.program.readers.get(id, ()) if k in self.forward]
            if readers:
                begin, end = self.program.made_at[id] + 1, readers[-1] + 1
                nbytes[begin] += self.program.values[id].nbytes
                nbytes[end] -= self.program.values[id].nbytes
                values[begin] += 1
                values[end] -= 1
        return np.cumsum(nbytes), np.cumsum(values)

    def narrow_places(self, least: int) -> list[int]:
        """The places where no fewer values cross at the next ones, as between layers and not within one; all where these are fewer than
        `least`.

        Within a layer a residual crosses beside what the layer computes, forward and backward. How large they are says nothing of where a
        layer ends: that has its price in the cut.
        """
        crossing = [self._crossing_values[place] for place in self.places]
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

    def saved_bytes(self, begins: Sequence[int]) -> np.ndarray:
        """(pieces + 1,) bytes that pieces in front of each make of the batch and that backward reads; views count as what they look at."""
        program, memory = self.program, aliases(self.program)
        sizes: dict[int, int] = {}
        made_in: dict[int, int] = {}
        for id in self.computed:
            if any(program.nodes[k].phase == "backward" for k in program.readers.get(id, ())):
                group = memory.group(id)
                sizes[group] = max(sizes.get(group, 0), program.values[id].nbytes)
                made_in[group] = min(made_in.get(group, len(program.nodes)), program.made_at[id])
        saved = np.zeros(len(begins) + 1)
        for group, nbytes in sizes.items():
            piece = int(np.searchsorted(begins, made_in[group], side="right"))
            saved[piece] += nbytes
        return np.cumsum(saved)

    def crossing_bytes(self, place: int) -> int:
        return int(self._crossing[place])
