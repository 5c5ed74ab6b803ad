"""What a conversion must cost, found without the planner: all states that collectives can reach, by what ranks hold.

A state is, per rank, the set of global indices that it holds (a bit mask over the elements of the index tensor), and
the axes over which values are still terms of a sum. Moves are the collectives themselves, over every set of binary
mesh axes and with chunks cut at every binary digit of every dim; their price is the number of elements that the
busiest rank receives. Where a rank keeps an element in its memory does not matter here. Distances are Dijkstra's
(SciPy) on the graph of all states. Nothing here knows layouts' atoms, refinements or cost formulas.
"""

from __future__ import annotations

from itertools import combinations, permutations, product

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import dijkstra

State = tuple[tuple[int, ...], frozenset[int]]  # masks by rank, pending axes (bit of the rank number, from the left)
MOVES = 1 << 10  # weights are elements * MOVES + 1: bytes first, then moves; and no edge of weight zero


def mask_of(indices: torch.Tensor) -> int:
    mask = 0
    for i in indices.flatten().tolist():
        mask |= 1 << int(i)
    return mask


class Oracle:
    """All states of a tensor of `shape` (powers of two) on 2 x 2 x ... ranks (`axes` binary axes)."""

    def __init__(self, shape: tuple[int, ...], axes: int, any_permutation: bool = False) -> None:
        self.axes, self.ranks = axes, 2**axes
        self.any_permutation = any_permutation
        index = torch.arange(int(np.prod(shape))).reshape(shape)
        self.full = mask_of(index)
        self.digits = []  # per binary digit of a dim: the elements where it is 0
        for d, size in enumerate(shape):
            digit = torch.arange(size).reshape([-1 if k == d else 1 for k in range(len(shape))]).expand(shape)
            self.digits += [mask_of(index[(digit >> k) % 2 == 0]) for k in range(size.bit_length() - 1)]
        self.subsets = [g for r in range(1, axes + 1) for g in combinations(range(axes), r)]
        self.numbers: dict[State, int] = {}
        self._chunks: dict[tuple[int, tuple[int, ...]], list[int] | None] = {}
        self._groups: dict[tuple[int, ...], list[list[int]]] = {}
        self.edges: list[tuple[int, int, int]] = []
        self._explore(((self.full,) * self.ranks, frozenset()))
        rows, cols, weights = map(np.array, zip(*self._least()))
        n = len(self.numbers)
        self.graph = csr_array((weights, (rows, cols)), shape=(n, n))

    def distances(self, source: State) -> dict[State, int]:
        """Elements received by the busiest rank on the cheapest way to every state."""
        found = dijkstra(self.graph, indices=self.numbers[source])
        return {state: int(found[n]) // MOVES if np.isfinite(found[n]) else -1 for state, n in self.numbers.items()}

    def _least(self) -> list[tuple[int, int, int]]:
        least: dict[tuple[int, int], int] = {}
        for a, b, w in self.edges:
            least[a, b] = min(w, least.get((a, b), w))
        return [(a, b, w) for (a, b), w in least.items()]

    def _explore(self, first: State) -> None:
        self.numbers[first] = 0
        queue = [first]
        for state in queue:
            for after, elements in self.neighbours(state):
                if after not in self.numbers:
                    self.numbers[after] = len(self.numbers)
                    queue.append(after)
                self.edges.append((self.numbers[state], self.numbers[after], elements * MOVES + 1))

    def groups(self, over: tuple[int, ...]) -> list[list[int]]:
        """Ranks that differ only in these axes, row-major inside."""
        found: dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]] = {}
        for rank, where in enumerate(product((0, 1), repeat=self.axes)):
            key = tuple(i for a, i in enumerate(where) if a not in over)
            found.setdefault(key, []).append((tuple(where[a] for a in over), rank))
        return [[rank for _, rank in sorted(group)] for group in found.values()]

    def chunks(self, mask: int, digits: tuple[int, ...]) -> list[int] | None:
        """The mask cut at digits into equal chunks, first digit major; None where they are not equal."""
        key = (mask, digits)
        if key not in self._chunks:
            self._chunks[key] = self._cut_mask(mask, digits)
        return self._chunks[key]

    @staticmethod
    def _cut_mask(mask: int, digits: tuple[int, ...]) -> list[int] | None:
        out = [mask]
        for digit in digits:
            out = [part for chunk in out for part in (chunk & digit, chunk & ~digit)]
        even = len({chunk.bit_count() for chunk in out}) == 1 and out[0]
        return out if even else None

    def neighbours(self, state: State) -> list[tuple[State, int]]:
        masks, pending = state
        held = masks[0].bit_count()
        out: list[tuple[State, int]] = []
        for over in self.subsets:
            n = 2 ** len(over)
            groups = self._groups.setdefault(over, self.groups(over))
            same = all(len({masks[r] for r in g}) == 1 for g in groups)
            apart = all(sum(masks[r] for r in g) == self.union(masks, g) for g in groups)
            if pending.issuperset(over) and same:
                out.append(((masks, pending - set(over)), 2 * (n - 1) * held // n))  # all-reduce
                out += self.cut(masks, pending - set(over), groups, len(over), (n - 1) * held // n)
            if not pending.intersection(over):
                if same and len(over) == 1:
                    out.append(((masks, pending | set(over)), 0))  # zeros but on the first
                    out += self.cut(masks, pending, groups, 1, 0)  # local slice
                if apart:
                    gathered = self.place(groups, [[self.union(masks, g)] * n for g in groups])
                    out.append(((gathered, pending), (n - 1) * held))
                    out += self.exchange(masks, pending, groups, len(over), (n - 1) * held // n)
            out += self.permute(masks, pending, over, groups, held)
        return out

    def union(self, masks: tuple[int, ...], group: list[int]) -> int:
        out = 0
        for r in group:
            out |= masks[r]
        return out

    def place(self, groups: list[list[int]], new: list[list[int]]) -> tuple[int, ...]:
        out = [0] * self.ranks
        for group, members in zip(groups, new):
            for rank, mask in zip(group, members):
                out[rank] = mask
        return tuple(out)

    def cut(self, masks, pending, groups, count, elements) -> list[tuple[State, int]]:
        """Every member keeps its chunk."""
        out = []
        for digits in permutations(self.digits, count):
            new = [self.chunks(masks[g[0]], digits) for g in groups]
            if None not in new:
                out.append(((self.place(groups, new), pending), elements))
        return out

    def exchange(self, masks, pending, groups, count, elements) -> list[tuple[State, int]]:
        """Chunk j of every member goes to member j."""
        out = []
        for digits in permutations(self.digits, count):
            cut = [[self.chunks(masks[r], digits) for r in g] for g in groups]
            if any(chunks is None for members in cut for chunks in members):
                continue
            new = [[sum(chunks[j] for chunks in members) for j in range(len(members))] for members in cut]
            out.append(((self.place(groups, new), pending), elements))
        return out

    def permute(self, masks, pending, over, groups, held) -> list[tuple[State, int]]:
        """Ranks exchange all that they hold, as a permutation of axes (or any, where nothing is pending)."""
        out = []
        if len(over) > 1:
            for order in permutations(range(len(over))):
                if any(k == o for k, o in enumerate(order)):
                    continue
                members = list(product((0, 1), repeat=len(over)))
                table = [members.index(tuple(m[order[k]] for k in range(len(over)))) for m in members]
                new = self.place(groups, [[masks[g[t]] for t in table] for g in groups])
                # Member m gets from the member whose k-th index is m[order[k]]: role of axis k is now axis order[k]'s.
                moved = frozenset(over[order[over.index(a)]] if a in over else a for a in pending)
                out.append(((new, moved), held))
        if self.any_permutation and not pending and len(over) == self.axes:
            out += [((tuple(masks[t] for t in table), pending), held) for table in permutations(range(self.ranks))]
        return out
