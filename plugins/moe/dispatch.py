"""Expert parallelism as a strategy: tokens go to the ranks of their experts, and results come back.

    x (ep b) d, index (ep b) k, weight (ep b) k, gate_up (ep e) f d, down (ep e) d f  ->  y (ep b) d
    y: to slots, all-to-all, experts here, all-to-all, from slots                             per round
    backward: x and dy to slots, all-to-all, experts_backward here, dx and dweight back

Dropless and exact: every token reaches all of its experts, however they are chosen. Buffers are of fixed size, c rows
for each pair of ranks, and there are r rounds with r c = n (tokens of a rank), enough for all tokens to go to one rank.
Ranks agree on the longest queue by one all-reduce; a round moves as many rows as that needs, and none once all queues
are done.

    bytes received per rank, p ranks, queue of m tokens, width d, k choices, s bytes each:
      forward    (p - 1) m (2 d s + k (4 + s_w))  +  2 (p - 1)/p 8 n
      backward   (p - 1) m (3 d s + k (4 + 2 s_w)) + 2 (p - 1)/p 8 n          x travels again: nothing is kept between
    peak: 2 (forward) or 3 (backward) buffers of p c rows, beside the operator's own

With balanced routing m = n (1 - (1 - 1/p)^k); r is chosen so that c is 1.5 times that: then one round moves everything
and the others stay empty. "staged" is the same over two axes with an all-to-all over each, inner ranks first: what
crosses the outer level goes in one message per group instead of one per rank.

Source: GShard (2006.16668), section 3; DeepSpeed-MoE (2201.05596), section 5, for the hierarchical all-to-all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import ceil, prod
from typing import Any

import attrs
import torch
from colofunc_plugins.moe.rows import from_slots, slots, to_slots

import colofunc as cf
from colofunc import collectives

FORWARD, BACKWARD = "colofunc.experts", "colofunc.experts_backward"
SLACK = 1.5
"""A round has room for this many times the rows that an expert is expected to get."""
MOST_ROUNDS = 16
"""Tokens are sent in at most this many rounds."""


@attrs.frozen
class Dispatch:
    """One way to run one call. `axes`: over which experts lie, major first; `way`: how the other axes are placed."""

    call: Any
    mesh: cf.Mesh
    axes: tuple[str, ...]
    staged: bool
    way: cf.Strategy

    # ---- sizes ----

    @property
    def backward(self) -> bool:
        return bool(self.call.target == BACKWARD)

    @property
    def x(self) -> int:
        """Where the operand x stands."""
        return int(self.backward)

    @property
    def ranks(self) -> int:
        return prod(self.mesh.axis_size(a) for a in self.axes)

    @property
    def experts_each(self) -> int:
        """Of one rank."""
        return int(self.call.ins[self.x + 3].shape[0]) // self.ranks

    @property
    def tokens(self) -> int:
        """Of one rank."""
        return prod(self.way.ins[self.x].local_shape[:-1])

    @property
    def choices(self) -> int:
        return int(self.call.ins[self.x + 1].shape[-1])

    @property
    def width(self) -> int:
        return int(self.call.ins[self.x].shape[-1])

    @property
    def share(self) -> float:
        """Of a rank's tokens, those that one rank's experts are expected to see."""
        return float(1 - (1 - 1 / self.ranks) ** self.choices)

    @property
    def rounds(self) -> int:
        """A divisor of the number of tokens: as many as leave `SLACK` times the expected rows to each."""
        most = min(MOST_ROUNDS, int(1 / min(1.0, SLACK * self.share)))
        return max(count for count in range(1, most + 1) if self.tokens % count == 0)

    def expected(self, number: int) -> int:
        """Rows of each queue that a round is expected to move."""
        queue = self.tokens // self.rounds
        left = ceil(self.tokens * self.share) - number * queue
        return min(queue, max(0, left))

    def work(self, number: int) -> dict[tuple[int, str], float]:
        """The argument that says which part of the choices in a round's rows is expected to be of experts of this rank.

        With balanced routing each rank has n k choices in all rounds, and they lie in p c rows of k a round, of which
        most are empty.
        """
        filled = self.expected(number) / max(1, self.tokens // self.rounds)  # part of the rows that hold a token
        chosen = 1 / (self.ranks * self.share)  # part of such a token's choices
        return {(12 if self.backward else 10, "share"): filled * chosen}

    # ---- the strategy ----

    def strategy(self) -> cf.Strategy:
        word = "staged" if self.staged else "dispatch"
        words = [f"{axis}: {word}" for axis in self.axes]
        others = self.way.name.strip("{}")
        if others:
            words.append(others)
        name = "{" + ", ".join(words) + "}"
        axes = (*((axis, word) for axis in self.axes), *self.way.axes)
        local = partial(_without_mesh, self.run_backward if self.backward else self.run_forward)
        return attrs.evolve(self.way, name=name, local=local, cost=self.cost(), axes=axes)

    def cost(self) -> cf.Cost:
        """Of the way, and what is sent beside it, with the buffers it is sent from."""
        wide, per_token = self._bytes()
        groups = [(axis,) for axis in self.axes] if self.staged else [self.axes]
        seconds = self._all_reduce_s()
        for number in range(self.rounds):
            rows = self.ranks * self.expected(number)
            if not rows:
                continue
            for row_bytes in (*wide, *per_token):
                seconds += sum(self.mesh.collective_s("all_to_all", rows * row_bytes, group) for group in groups)
        peak = (3 if self.backward else 2) * self.ranks * (self.tokens // self.rounds) * max(wide)
        return attrs.evolve(
            self.way.cost, extra_s=self.way.cost.extra_s + seconds, peak_bytes=self.way.cost.peak_bytes + peak
        )

    def _bytes(self) -> tuple[list[int], list[int]]:
        """Bytes per row of each tensor that travels: of the width, and of the choices."""
        x, weight = self.call.ins[self.x], self.call.ins[self.x + 2]
        wide = [self.width * x.dtype.itemsize] * (3 if self.backward else 2)
        indices = self.choices * 4  # sent as int32
        weights = [self.choices * weight.dtype.itemsize] * (2 if self.backward else 1)
        return wide, [indices, *weights]

    def _all_reduce_s(self) -> float:
        return self.mesh.collective_s("all_reduce", 8.0 * self.tokens, self.axes)

    # ---- local code ----

    def exchange(self, x: torch.Tensor, rows: torch.Tensor, number: int) -> torch.Tensor:
        """Chunk j of (ranks, c, *) goes to rank j."""
        expected = self.expected(number)
        if not self.staged:
            return collectives.all_to_all(x, self.axes, self.mesh, rows, expected)
        outer, inner = self.axes
        n = self.mesh.axis_size(inner)
        x = collectives.rearrange(x, "(o i) c d -> i c o d", i=n)
        x = collectives.all_to_all(x, inner, self.mesh, rows, expected)
        x = collectives.rearrange(x, "i c o d -> o c i d")
        x = collectives.all_to_all(x, outer, self.mesh, rows, expected)
        return collectives.rearrange(x, "o c i d -> (o i) c d")

    def send(
        self, x: torch.Tensor, slot: torch.Tensor, rows: torch.Tensor, number: int, blank: float = 0.0
    ) -> torch.Tensor:
        return self.exchange(to_slots(x, slot, self.ranks, self.rounds, number, blank), rows, number)

    def queues(self, index: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Slots, and for each round how many rows it moves: one value each, at once, since the host has to learn it."""
        slot, rows = slots(index, self.experts_each, self.ranks, self.rounds)
        rows = collectives.all_reduce(rows, self.axes, self.mesh, "max")
        return slot, [rows[t] for t in range(self.rounds)]

    def narrow(self, index: torch.Tensor) -> torch.Tensor:
        """Indices as they travel; of no expert stays of no expert, also what int32 does not hold."""
        return index.clamp(-1, self.ranks * self.experts_each).to(torch.int32)

    def here(self, index: torch.Tensor) -> torch.Tensor:
        """Indices among the experts of this rank; those of others fall outside."""
        first = collectives.axis_index(self.axes, self.mesh) * self.experts_each
        return index - first.to(index.dtype)

    def weights(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The operands after (index, weight); ranks with parts of the hidden units add up, and the bias counts once."""
        found = list(shards)
        bias, parts = self.call.arg(self.x + 6, "down_bias"), [a for a, f in self.way.axes if f == "f"]
        if bias is not None and parts:
            found[bias.id] = collectives.keep_first(found[bias.id], parts, self.mesh)
        return found

    def run_forward(self, *shards: torch.Tensor) -> torch.Tensor:
        x, index, weight = (s.reshape(-1, s.shape[-1]) for s in shards[:3])
        slot, rows = self.queues(index)
        operands, total, chosen = self.weights(shards), None, self.narrow(index)
        for t in range(self.rounds):
            operands[0] = self.send(x, slot, rows[t], t)
            operands[1] = self.here(self.send(chosen, slot, rows[t], t, -1.0))
            operands[2] = self.send(weight, slot, rows[t], t)
            y = from_slots(self.exchange(cf.ext.local.rerun(self.call, operands, self.work(t)), rows[t], t), slot, t)
            total = y if total is None else total + y
        assert total is not None
        return total.reshape(shards[0].shape)

    def run_backward(self, *shards: torch.Tensor) -> tuple[torch.Tensor, ...]:
        g, x, index, weight = (s.reshape(-1, s.shape[-1]) for s in shards[:4])
        slot, rows = self.queues(index)
        operands, totals, chosen = self.weights(shards), None, self.narrow(index)
        for t in range(self.rounds):
            operands[0] = self.send(g, slot, rows[t], t)
            operands[1] = self.send(x, slot, rows[t], t)
            operands[2] = self.here(self.send(chosen, slot, rows[t], t, -1.0))
            operands[3] = self.send(weight, slot, rows[t], t)
            dx, dweight, *sums = cf.ext.local.rerun(self.call, operands, self.work(t))
            back = [from_slots(self.exchange(d, rows[t], t), slot, t) for d in (dx, dweight)]
            totals = [*back, *sums] if totals is None else [a + b for a, b in zip(totals, [*back, *sums], strict=True)]
        assert totals is not None
        return totals[0].reshape(shards[1].shape), totals[1].reshape(shards[3].shape), *totals[2:]


def strategies(call: Any, mesh: cf.Mesh, axes: tuple[str, ...]) -> Iterator[cf.Strategy]:
    """Dispatch over one axis, or over two at once and staged."""
    backward = call.target == BACKWARD
    x = int(backward)
    ranks = prod(mesh.axis_size(axis) for axis in axes)
    if ranks == 1 or call.ins[x].shape[0] % ranks or call.ins[x + 3].shape[0] % ranks:
        return
    by_row = {"b0": f"{' '.join(axes)} _"}
    by_expert = {"e": f"{' '.join(axes)} _"}
    ins = [by_row] * (3 + x) + [by_expert] * (len(call.ins) - 3 - x)
    outs = [by_row]
    if backward:
        outs.append(by_row)
        for gradient in call.outs[2:]:  # of weights and biases, of which some may be missing
            outs.append(by_expert if gradient is not None and gradient.shape != (0,) else {})
    for way in cf.ext.ways(call, mesh, ins, outs):
        if any(factor == "e" for _, factor in way.axes):
            continue
        for staged in (False, True)[: len(axes)]:
            yield Dispatch(call, mesh, axes, staged, way).strategy()


def _without_mesh(code: Any, *shards: torch.Tensor, mesh: cf.Mesh) -> Any:
    return code(*shards)
