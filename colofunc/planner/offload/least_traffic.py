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

from collections.abc import Collection, Iterable, Sequence
from hashlib import blake2b
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from colofunc.planner.offload.evict import Stay, TraceFacts, spread
from colofunc.planner.offload.timeline import Links

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

WHOLE = 1e-6
"""A part within this of 1 counts as the whole: the simplex method rounds."""
NEVER, ALWAYS = -1, -2
"""Gaps that have no variable: the host writes in between, so that nothing can be kept; nothing lies between, so that
all is."""
ITERATIONS = 20_000
"""Limit of the simplex method: counted, not timed, so that every rank stops where the others do."""


MOST_SOLVED = 128
"""At most this many solutions are kept."""
_SOLVED: dict[bytes, tuple[list[float] | None]] = {}
"""Solutions of the last programs. Orders of the same work, which differ in seconds, ask for the same ones: of the step
in the README 48 of 126 are different."""


def least_traffic(facts: TraceFacts, room_bytes: int, stay: float = 1.0) -> tuple[list[int], list[list[Stay]]]:
    """(residents, stays of all others) for which about the fewest bytes are copied.

    At most `room_bytes` lie on the device wherever a position does not need more. stay: part of the state that may be
    resident.
    """
    found = _GapProgram(facts, room_bytes, stay)
    return found.rounded(found.solve() or [0.0] * len(found.saved))


class TrafficSolution(NamedTuple):
    """`asked`: part of the state that may be resident, `used`: that the linear program keeps."""

    asked: float
    used: float
    residents: list[int]
    stays: list[list[Stay]]


class Programs:
    """`least_traffic` for many rooms, solved once where the answer is the same."""

    def __init__(self, facts: TraceFacts) -> None:
        self.facts = facts
        self.known: dict[int, list[TrafficSolution]] = {}
        self.hopeless: set[int] = set()  # rooms

    def at(self, room_bytes: int, stay: float) -> TrafficSolution | None:
        """None where the solver takes too many iterations."""
        known = self.known.setdefault(room_bytes, [])
        for found in known:
            if found.asked == stay or found.used <= stay <= found.asked:
                return found
        program = _GapProgram(self.facts, room_bytes, stay)
        part = None if room_bytes in self.hopeless else program.solve()
        # Other parts of the state take the solver as long, so this room is not tried again.
        if part is None:
            self.hopeless.add(room_bytes)
            return None
        known.append(TrafficSolution(stay, program.state(part), *program.rounded(part)))
        return known[-1]

    def least_bytes(self, room_bytes: int) -> int:
        return least_bytes(self.facts, room_bytes)


def least_bytes(facts: TraceFacts, room_bytes: int) -> int:
    """Bytes that no choice copies less than: those of the linear program before it is rounded; 0 where that takes too
    long.
    """
    return _GapProgram(facts, room_bytes, 1.0).least_bytes()


def _arrays(rows: csr_matrix | None) -> tuple[np.ndarray, ...]:
    """All that a sparse matrix consists of."""
    return () if rows is None else (rows.data, rows.indices, rows.indptr)


def _solution(
    saved: np.ndarray, fits: csr_matrix, room: np.ndarray, below: csr_matrix | None, bounds: Sequence[float]
) -> list[float] | None:
    """What `_GapProgram.solve` gives. Columns: variables, whose costs are `saved`, then what is free at positions."""
    from scipy.optimize import linprog

    count, size = len(saved), len(room)
    found = linprog(
        np.concatenate((saved, np.zeros(size))),
        below,
        bounds or None,
        fits,
        room,
        np.asarray([(0, 1)] * count + [(0, np.inf)] * size),
        method="highs-ds",
        options={"maxiter": ITERATIONS},
    )
    return [float(part) for part in found.x[:count]] if found.status == 0 else None


class _GapProgram:
    """Variables: is a gap kept, is a value stored, is an item resident. In bytes, of the largest item as the unit."""

    def __init__(self, facts: TraceFacts, room_bytes: int, stay: float) -> None:
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
            if item.fixed:
                self._fix(index)
            elif item.home and item.stays and not item.host_uses and facts.uses[index]:
                self._make_resident(index)

    def _make_resident(self, index: int) -> None:
        """A variable for state that may lie on the device for the whole step: it saves the copies at both ends."""
        uses = self.facts.uses[index]
        ends = [(begin, end) for begin, end in ((0, uses[0]), (uses[-1] + 1, self.facts.size)) if begin < end]
        outliving = sum(version.outlives for version in self.facts.versions[index])
        variable = self.resident[index] = self._variable(index, 1 + outliving, ends)
        # Only what is kept in every gap is resident.
        self.below += [(variable, gap) for gap in self.gaps[index] if gap >= 0]

    def _fix(self, index: int) -> None:
        """Take the room of an item that cannot leave."""
        uses, item = self.facts.uses[index], self.facts.trace.items[index]
        if item.home:
            self.room -= item.nbytes
        elif uses:
            self.room[uses[0] : uses[-1] + 1] -= item.nbytes
        if item.home or uses:
            # It is among what is needed there, which the room is without.
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
        facts = self.facts
        versions = facts.versions[index]
        gaps: list[int] = []
        stored: dict[int, int] = {}  # version -> the variable that says that it is not stored
        current = -1  # the version that the item has
        for use, ahead, held in zip(facts.uses[index], facts.next_use[index][:-1], facts.held[index], strict=False):
            while current + 1 < len(versions) and versions[current + 1].written <= use:
                current += 1
            if ahead == facts.never:
                gaps.append(NEVER)
                continue
            if held:
                gaps.append(ALWAYS)
                continue
            gap = self._variable(index, 1.0, [(use + 1, ahead)])
            gaps.append(gap)
            # A value that nothing else asks for on the host need not be stored where all its gaps are kept.
            if current >= 0 and versions[current].host_read < 0 and not versions[current].outlives:
                if current not in stored:
                    stored[current] = self._variable(index, 1.0, [])
                self.below.append((stored[current], gap))
        return gaps

    def state(self, part: list[float]) -> float:
        """The part of the state that is resident."""
        total = sum(self.facts.nbytes[item] for item in self.resident)
        resident = sum(self.facts.nbytes[item] * part[variable] for item, variable in self.resident.items())
        return resident / (total or 1)

    def rounded(self, part: list[float]) -> tuple[list[int], list[list[Stay]]]:
        """(residents, stays of all others): what is kept for a larger part first, as far as it fits."""
        room = np.maximum(self.room, 0)
        kept = [False] * len(part)

        def keep(variables: list[int]) -> bool:
            """Keep all of them, if they fit."""
            new = [variable for variable in variables if not kept[variable]]
            spans = self._spans(new)
            if any((room[begin:end] < nbytes).any() for _, begin, end, nbytes in spans):
                return False
            for _, begin, end, nbytes in spans:
                room[begin:end] -= nbytes
            for variable in new:
                kept[variable] = True
            return True

        def make_resident(least: float) -> list[int]:
            """Items that are resident for at least that part and fit, most first."""
            wished = [item for item, variable in self.resident.items() if part[variable] >= least]
            wished.sort(key=lambda item: (-part[self.resident[item]], item))
            fitting = []
            for item in wished:
                if keep([self.resident[item], *(gap for gap in self.gaps[item] if gap >= 0)]):
                    fitting.append(item)
            return fitting

        residents = set(make_resident(1 - WHOLE))
        gaps: list[int] = []
        # Fractions are rounded up, the largest first, as far as there is room.
        for own_gaps in self.gaps:
            gaps += [gap for gap in own_gaps if gap >= 0 and (part[gap] > WHOLE or not self.held[gap])]
        for gap in sorted(gaps, key=lambda gap: (-round(part[gap], 6), gap)):
            keep([gap])
        residents.update(make_resident(WHOLE))
        residents.update(self._fixed_at_home())
        return sorted(residents), self._all_stays(residents, kept)

    def _spans(self, variables: Iterable[int]) -> list[tuple[int, int, int, int]]:
        """(variable, begin, end, bytes) of the positions at which some variables need room."""
        spans = []
        for variable in variables:
            nbytes = self.facts.nbytes[self.item[variable]]
            spans += [(variable, begin, end, nbytes) for begin, end in self.held[variable]]
        return spans

    def _fixed_at_home(self) -> list[int]:
        return [index for index, item in enumerate(self.facts.trace.items) if item.fixed and item.home]

    def least_bytes(self) -> int:
        """Bytes of all copies where nothing is kept, less those that the linear program saves."""
        facts = self.facts
        fixed = self._fixed_at_home()
        stays = self._all_stays(fixed, [False] * len(self.saved))
        enough_bytes = sum(facts.nbytes) + int(facts.base.max(initial=0))
        _, copies = spread(facts, stays, fixed, enough_bytes, Links(1.0, 1.0, 0.0))
        parts = self.solve()
        if parts is None:
            return 0
        # Rounding of the solver must not make the bound too high.
        saved = sum(part * nbytes for part, nbytes in zip(parts, self.saved, strict=True))
        return ceil(sum(facts.nbytes[copy.item] for copy in copies) - saved * (1 + 1e-9))

    def solve(self) -> list[float] | None:
        """Of every variable the part that is worth it; None where the solver does not get there."""
        count = len(self.saved)
        if not count:
            return []
        unit = float(max(self.facts.nbytes)) or 1.0
        fits, room = self._fits(unit)
        below, bounds = self._below(unit, count + len(room))
        saved = -np.asarray(self.saved) / unit
        asked = (np.asarray([ITERATIONS]), saved, room, np.asarray(bounds), *_arrays(fits), *_arrays(below))
        key = blake2b(b"".join(len(each).to_bytes(8, "big") + each.tobytes() for each in asked)).digest()
        known = _SOLVED.get(key)
        if known is None:
            if len(_SOLVED) >= MOST_SOLVED:
                _SOLVED.clear()
            known = _SOLVED[key] = (_solution(saved, fits, room, below, bounds),)
        return known[0]

    def _fits(self, unit: float) -> tuple[csr_matrix, np.ndarray]:
        """(rows, their right sides): what is kept at a position, and what is free there, add up to the room.

        Each row less the one before: a gap then has two entries, however long it is. Columns: variables, then what is
        free at each position.
        """
        from scipy.sparse import coo_matrix

        count, end_of_all = len(self.saved), self.facts.size
        spans = np.asarray(self._spans(range(count)), dtype=np.int64).reshape(-1, 4)
        variables, begins, ends, nbytes = spans.T
        inner = ends < end_of_all
        # between these the same gaps are open
        points: np.ndarray = np.unique(np.concatenate(([0], begins, ends[inner])))
        begins, ends = np.searchsorted(points, begins), np.searchsorted(points, ends)
        room = np.minimum.reduceat(np.maximum(self.room, 0), points)
        size = len(points)
        positions = np.arange(size)
        free = count + positions
        rows = np.concatenate((begins, ends[inner], positions, positions[1:]))
        columns = np.concatenate((variables, variables[inner], free, free[:-1]))
        values = np.concatenate((nbytes / unit, -nbytes[inner] / unit, np.ones(size), -np.ones(size - 1)))
        fits = coo_matrix((values, (rows, columns)), shape=(size, count + size)).tocsr()
        return fits, np.diff(room, prepend=0) / unit

    def _below(self, unit: float, width: int) -> tuple[csr_matrix | None, list[float]]:
        """(rows, what they are at most): one variable is at most another, and so much of the state is resident."""
        from scipy.sparse import coo_matrix

        lower, upper = np.asarray(self.below, dtype=np.int64).reshape(-1, 2).T
        rows = np.tile(np.arange(len(lower)), 2)
        columns = np.concatenate((lower, upper))
        values = np.repeat((1.0, -1.0), len(lower))
        bounds = [0.0] * len(lower)
        if self.stay < 1.0 and self.resident:
            variables = list(self.resident.values())
            sizes = np.asarray([self.facts.nbytes[item] for item in self.resident]) / unit
            rows = np.concatenate((rows, np.full(len(variables), len(lower))))
            columns = np.concatenate((columns, variables))
            values = np.concatenate((values, sizes))
            bounds.append(self.stay * float(sizes.sum()))
        if not bounds:
            return None, []
        return coo_matrix((values, (rows, columns)), shape=(len(bounds), width)).tocsr(), bounds

    def _all_stays(self, residents: Collection[int], kept: list[bool]) -> list[list[Stay]]:
        return [[] if item in residents else self._stays(item, kept) for item in range(len(self.gaps))]

    def _stays(self, index: int, kept: list[bool]) -> list[Stay]:
        """The stretches between the gaps of an item that are not kept."""
        uses, item = self.facts.uses[index], self.facts.trace.items[index]
        if not uses:
            return []
        stays: list[Stay] = []
        begin = 0
        for number, gap in enumerate([*self.gaps[index], NEVER]):
            if gap == NEVER or (gap >= 0 and not kept[gap]):
                first = uses[begin]
                after = uses[begin - 1] + 1 if begin else 0
                made = not item.home and first == item.uses[0]
                stays.append(Stay(first, uses[number], index, made, after))
                begin = number + 1
        return stays
