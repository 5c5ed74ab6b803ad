"""What stays between its uses so that fewest bytes are copied: one linear program.

Problem: what is needed farthest ahead should leave, says Belady, where all copies cost the same. They do not: a weight
that comes back has its copy on the host already, an activation has to be stored first; state that stays saves copies at
both ends of a step for room in the whole of it. Idea: between two uses of an item lies a *gap*. Keeping it saves a
fetch, and a store if no other gap of that value asks for one; at every position the gaps that are kept fit beside what
is needed there. That is a linear program (for one size and clean items its solutions are whole, because every gap is a
stretch of positions), and its few fractions are rounded. `policy="bytes"` is made of it; where time decides it wins
none, and a fifth of the bytes (GPT 1.5B, `bench memory_plans`).

    item 0  use ... gap ... use        room 4: one of the two fits; item 1 was written, so keeping it saves
    item 1      use ... gap ... use    a store and a fetch, and item 0 leaves: its fetch is all that is copied

Source: the interval form of paging as minimum cost flow (A. Bar-Noy et al., "A unified approach to approximating
resource allocation and scheduling", 2001; D. Berger et al., 1711.03709, for sizes).
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from colofunc.planner.offload.evict import Facts, Stay, spread
from colofunc.planner.offload.timeline import Links

WHOLE = 1e-6
NEVER, ALWAYS = -1, -2
"""Gaps that have no variable: the host writes in between, so that nothing can be kept; nothing lies between, so that
all is."""
ITERATIONS = 20_000
"""Limit of the simplex method: counted, not timed, so that every rank stops where the others do."""


def fewest(facts: Facts, room_bytes: int, stay: float = 1.0) -> tuple[list[int], list[list[Stay]]]:
    """(residents, stays of all others) for which about the fewest bytes are copied.

    At most `room_bytes` lie on the device wherever a position does not need more. stay: part of the state that may be
    resident.
    """
    found = _Fewest(facts, room_bytes, stay)
    return found.rounded(found.solve() or [0.0] * len(found.saved))


class Found(NamedTuple):
    """`asked`: part of the state that may be resident, `used`: that the linear program keeps."""

    asked: float
    used: float
    residents: list[int]
    stays: list[list[Stay]]


class Programs:
    """`fewest` for many rooms, solved once where the answer is the same."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.known: dict[int, list[Found]] = {}
        self.hopeless: set[int] = set()  # rooms

    def at(self, room_bytes: int, stay: float) -> Found | None:
        """None where the solver takes too many iterations."""
        known = self.known.setdefault(room_bytes, [])
        for one in known:
            if one.asked == stay or one.used <= stay <= one.asked:
                return one
        program = _Fewest(self.facts, room_bytes, stay)
        part = None if room_bytes in self.hopeless else program.solve()
        if part is None:
            self.hopeless.add(room_bytes)
            return None
        known.append(Found(stay, program.state(part), *program.rounded(part)))
        return known[-1]

    def least_bytes(self, room_bytes: int) -> int:
        return least_bytes(self.facts, room_bytes)


def least_bytes(facts: Facts, room_bytes: int) -> int:
    """Bytes that no choice copies less than: those of the linear program before it is rounded; 0 where that takes too
    long.
    """
    return _Fewest(facts, room_bytes, 1.0).least_bytes()


class _Fewest:
    """Variables: is a gap kept, is a value stored, is an item resident. In bytes, of the largest item as the unit."""

    def __init__(self, facts: Facts, room_bytes: int, stay: float) -> None:
        self.facts, self.stay = facts, stay
        self.room = room_bytes - facts.base - facts.needed
        self.saved: list[float] = []  # by variable: bytes that are not copied
        self.held: list[list[tuple[int, int]]] = []  # by variable: the positions that it needs room at
        self.item: list[int] = []
        self.gaps: list[list[int]] = []  # by item: its gaps; NEVER, ALWAYS or a variable
        self.resident: dict[int, int] = {}  # item -> its variable
        self.below: list[tuple[int, int]] = []  # the first is at most the second
        for index, item in enumerate(facts.trace.items):
            self.gaps.append(self._gaps(index))
            uses, writes = facts.uses[index], facts.versions[index]
            if item.home and item.stays and not item.host_uses and uses and not item.fixed:
                ends = [(a, b) for a, b in ((0, uses[0]), (uses[-1] + 1, facts.size)) if a < b]
                mine = self.resident[index] = self._variable(index, 1 + sum(v.outlives for v in writes), ends)
                self.below += [(mine, gap) for gap in self.gaps[index] if gap >= 0]
            elif item.fixed:
                self._fix(index)

    def _fix(self, index: int) -> None:
        """Take the room of an item that cannot leave."""
        uses, item = self.facts.uses[index], self.facts.trace.items[index]
        if item.home or uses:
            self.room[slice(None) if item.home else slice(uses[0], uses[-1] + 1)] -= item.nbytes
            for begin, end in self.facts.stretches[index]:
                self.room[begin:end] += item.nbytes
        for gap in self.gaps[index]:
            if gap >= 0:
                self.held[gap] = []

    def _variable(self, item: int, copies: float, held: list[tuple[int, int]]) -> int:
        self.item.append(item)
        self.saved.append(copies * self.facts.nbytes[item])
        self.held.append(held)
        return len(self.saved) - 1

    def _gaps(self, index: int) -> list[int]:
        found, stored, at = list[int](), dict[int, int](), -1
        uses, versions = self.facts.uses[index], self.facts.versions[index]
        for a, ahead, held in zip(uses, self.facts.next_use[index][:-1], self.facts.held[index], strict=False):
            while at + 1 < len(versions) and versions[at + 1].written <= a:
                at += 1
            if ahead == self.facts.never or held:
                found.append(NEVER if ahead == self.facts.never else ALWAYS)
                continue
            gap = self._variable(index, 1.0, [(a + 1, ahead)])
            found.append(gap)
            if at >= 0 and versions[at].host_read < 0 and not versions[at].outlives:
                if at not in stored:
                    stored[at] = self._variable(index, 1.0, [])  # the value is not stored
                self.below.append((stored[at], gap))
        return found

    def state(self, part: list[float]) -> float:
        """The part of the state that is resident."""
        sizes = [(self.facts.nbytes[i], part[k]) for i, k in self.resident.items()]
        return sum(n * x for n, x in sizes) / (sum(n for n, _ in sizes) or 1)

    def rounded(self, part: list[float]) -> tuple[list[int], list[list[Stay]]]:
        room = np.maximum(self.room, 0)
        kept = [False] * len(part)

        def keep(some: list[int]) -> bool:
            """Keep all of them, if they fit."""
            new = [k for k in some if not kept[k]]
            spans = [(*span, self.facts.nbytes[self.item[k]]) for k in new for span in self.held[k]]
            if any((room[a:b] < nbytes).any() for a, b, nbytes in spans):
                return False
            for a, b, nbytes in spans:
                room[a:b] -= nbytes
            for k in new:
                kept[k] = True
            return True

        def states(least: float) -> list[int]:
            """Items that are resident for at least that part and fit, most first."""
            order = sorted(
                (i for i, k in self.resident.items() if part[k] >= least), key=lambda i: (-part[self.resident[i]], i)
            )
            return [i for i in order if keep([self.resident[i], *(k for k in self.gaps[i] if k >= 0)])]

        residents = set(states(1 - WHOLE))
        gaps = [k for mine in self.gaps for k in mine if k >= 0 and (part[k] > WHOLE or not self.held[k])]
        for gap in sorted(gaps, key=lambda k: (-round(part[k], 6), k)):
            keep([gap])
        residents |= {*states(WHOLE), *(i for i, item in enumerate(self.facts.trace.items) if item.fixed and item.home)}
        return sorted(residents), [[] if i in residents else self._stays(i, kept) for i in range(len(self.gaps))]

    def least_bytes(self) -> int:
        fixed = [i for i, item in enumerate(self.facts.trace.items) if item.fixed and item.home]
        none = [False] * len(self.saved)
        stays = [[] if i in fixed else self._stays(i, none) for i in range(len(self.gaps))]
        _, copies = spread(
            self.facts, stays, fixed, sum(self.facts.nbytes) + int(self.facts.base.max(initial=0)), Links(1.0, 1.0, 0.0)
        )
        parts = self.solve()
        if parts is None:
            return 0
        saved = sum(part * nbytes for part, nbytes in zip(parts, self.saved, strict=True))
        return ceil(sum(self.facts.nbytes[copy.item] for copy in copies) - saved * (1 + 1e-9))

    def solve(self) -> list[float] | None:
        """Of every variable the part that is worth it; None where the solver does not get there."""
        count, size, room = len(self.saved), self.facts.size, np.maximum(self.room, 0)
        if not count:
            return []
        spans = [(k, *span, self.facts.nbytes[self.item[k]]) for k, held in enumerate(self.held) for span in held]
        ks, begins, ends, nbytes = np.asarray(spans, dtype=np.int64).reshape(-1, 4).T
        inner = ends < size
        # between these the same gaps are open
        points: np.ndarray = np.unique(np.concatenate(([0], begins, ends[inner])))
        begins, ends, room = (
            np.searchsorted(points, begins),
            np.searchsorted(points, ends),
            np.minimum.reduceat(room, points),
        )
        size = len(points)
        unit, positions = float(max(self.facts.nbytes)) or 1.0, np.arange(size)
        # What is held at p and what is free there add up to the room; each row less the one before has few entries.
        left = count + positions
        rows: np.ndarray = np.concatenate((begins, ends[inner], positions, positions[1:]))
        columns = np.concatenate((ks, ks[inner], left, left[:-1]))
        values = np.concatenate((nbytes / unit, -nbytes[inner] / unit, np.ones(size), -np.ones(size - 1)))
        equal = coo_matrix((values, (rows, columns)), shape=(size, count + size)).tocsr()
        lower, upper = np.asarray(self.below, dtype=np.int64).reshape(-1, 2).T
        rows, columns = np.tile(np.arange(len(lower)), 2), np.concatenate((lower, upper))
        values, bounds = np.repeat((1.0, -1.0), len(lower)), [0.0] * len(lower)
        if self.stay < 1.0 and self.resident:
            mine = list(self.resident.values())
            sizes = np.asarray([self.facts.nbytes[i] for i in self.resident]) / unit
            rows, columns = np.concatenate((rows, np.full(len(mine), len(lower)))), np.concatenate((columns, mine))
            values, bounds = np.concatenate((values, sizes)), [*bounds, self.stay * float(sizes.sum())]
        most = coo_matrix((values, (rows, columns)), shape=(len(bounds), count + size)).tocsr() if bounds else None
        found = linprog(
            np.concatenate((-np.asarray(self.saved) / unit, np.zeros(size))), most, bounds or None, equal,
            np.diff(room, prepend=0) / unit, np.asarray([(0, 1)] * count + [(0, np.inf)] * size), method="highs-ds",
            options={"maxiter": ITERATIONS},
        )  # fmt: skip
        return [float(x) for x in found.x[:count]] if found.status == 0 else None

    def _stays(self, index: int, kept: list[bool]) -> list[Stay]:
        uses, item, out = self.facts.uses[index], self.facts.trace.items[index], list[Stay]()
        begin = 0
        for k, gap in enumerate([*self.gaps[index], NEVER] if uses else []):
            if gap == NEVER or (gap >= 0 and not kept[gap]):
                first, after = uses[begin], uses[begin - 1] + 1 if begin else 0
                out.append(Stay(first, uses[k], index, not item.home and first == item.uses[0], after))
                begin = k + 1
        return out
