"""Sharding, making again, copying and the places of updates, decided together, beside every decision that there is.

Small random steps (`_joint_cases.py`) that nothing was developed on: layers of two shardings each, and a budget below what the
fastest sharding holds. For each the product's decision and an exhaustive search (`_joint_oracle.py`). Counted are the steps that can
be done within their budget at all: how many decisions are within 5 % of the least seconds, and how many steps are wrongly called
not to be done. Small steps have all their shardings looked at, larger ones those to which prices of memory lead; here both ways
are gone.

    python -m bench jointly
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import attrs

from bench import Row, Section
from bench._joint_cases import INF, Case, Deciding, made
from bench._joint_oracle import optimum

NEAR = 1.05
EQUAL = 1e-4
"""Seconds that differ by less of them are equal."""
PARTS = (0.5, 0.6, 0.75, 0.9)


@attrs.frozen
class Counts:
    """Ours over the least there is, of every step that can be done; inf: found by the search, and called not to be done by us."""

    tried: int
    ratios: tuple[float, ...]

    @property
    def near(self) -> int:
        return sum(r <= NEAR for r in self.ratios)

    @property
    def denied(self) -> int:
        return sum(r == INF for r in self.ratios)

    @property
    def worst(self) -> float:
        return max((r for r in self.ratios if r < INF), default=1.0)

    def row(self, what: str) -> Row:
        best = sum(r <= 1 + EQUAL for r in self.ratios)
        done = len(self.ratios)
        figure = f"{self.near} of {done} that can be done within 5 %, {best} the optimum; at most {self.worst:.3f}; {self.denied} denied"
        return Row(f"{what}, {self.tried} steps", figure, "all within 5 %, none denied", self.near == done)


def ratio_of(case: Case, decider: Deciding) -> float | None:
    """Ours over the least there is; None where there is none. Where the search finds nothing faster, ours is it."""
    ours = decider.seconds()
    best = optimum(case, ours * (1 - EQUAL))
    if best == INF:
        return 1.0 if ours < INF else None
    return ours / best


def counted(cases: Iterable[Case], few: bool = True) -> Counts:
    """few: whether all shardings may be looked at."""
    found = [ratio_of(case, Deciding(case, few=few)) for case in cases]
    return Counts(len(found), tuple(r for r in found if r is not None))


def steps(seeds: Iterable[int], layers: int = 2, part: float | None = None) -> Iterator[Case]:
    """part: the budget, of what the fastest sharding holds; otherwise 0.6 to 0.99 by chance."""
    return (made(seed, layers, part=part) for seed in seeds)


def slower(cases: Iterable[Case]) -> tuple[int, int]:
    """(steps, those whose joint decision is slower than making again alone, moving alone, or sharding alone)."""
    found = []
    for case in cases:
        apart = [Deciding(case, moves=False), Deciding(case, again=False, prices=False), Deciding(case, moves=False, again=False)]
        found.append(Deciding(case).seconds() > min(one.seconds() for one in apart) * (1 + EQUAL))
    return len(found), sum(found)


ROWS: tuple[tuple[str, range, int, float | None, bool], ...] = (
    ("2 layers", range(5000, 5200), 2, None, True),
    ("3 layers", range(5000, 5025), 3, None, True),
    *((f"2 layers, {part} of the peak", range(6000, 6030), 2, part, True) for part in PARTS),
    ("2 layers as of a larger step", range(7000, 7200), 2, None, False),
    ("3 layers as of a larger step", range(7000, 7025), 3, None, False),
)
"""What, seeds, layers, part of the peak, whether all shardings are looked at."""
APART = range(2000, 2040)


def bench() -> Section:
    rows = [counted(steps(seeds, layers, part), few).row(what) for what, seeds, layers, part, few in ROWS]
    tried, worse = slower(steps(APART))
    rows.append(Row(f"slower than a separate choice, {tried} steps of 2 layers", f"{worse}", "0", worse == 0))
    return section(rows)


def section(rows: Sequence[Row]) -> Section:
    return Section(
        "Decided together",
        "Seeded random steps of two shardings a layer; the least by a search over shardings, making again, copies and the places of "
        "updates (`bench/_joint_oracle.py`). As of a larger step: not all shardings are looked at. Denied: called not to be done "
        "within the budget, and can be. `python -m bench jointly`.",
        rows,
    )
