"""The combination matrix in a narrow memory: recomputation and offload beside every parallel mode, on simulated ranks.

    {checkpoint, offload, both} x the cells of `matrix.py`

    outcome = run(Narrow(Cell("zero3", kind="experts"), "both"))

A cell is one of the matrix within a share of what it holds without a budget: that of its column, or, where the planner says that
this cannot be, within what it says is the least (`SPARE` more; it is taken at its word). It is *equal* when two steps give what the
function itself gives on one device, the modes' signatures are there, and memory shows its own:

- no simulated rank ever holds more than the budget, and the most that one holds is what the plan says, to the byte; so is
  every other position of the program, in both tiers;
- `offload`: state lies on the host, and something that forward made goes there and comes back;
- `checkpoint`: some operator of the forward pass runs again for backward.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import matrix
import narrow
from live_bytes import measure
from matrix import Cell, known_of, signature, staged, step_of

import colofunc as cf
from colofunc.compiler.observation import arguments_of
from colofunc.program.ir import Program
from colofunc.program.passes.recompute import AGAIN
from colofunc.testing import check
from colofunc.testing.check import doubled_inside


@attrs.frozen
class Memory:
    """A column's entry. `share`: of the bytes that a cell holds at its peak without a budget; `most`: what the least possible may be of
    them. Of bytes that the column can do something about: what is only made again holds state and gradients as before."""

    within: Callable[[Any, int], Any]
    share: float
    most: float
    away: bool = False  # something lies on the host
    again: bool = False  # something is made again


MEMORY: Mapping[str, Memory] = {
    "checkpoint": Memory(lambda step, budget: cf.checkpoint(step, budget=budget), 0.6, 0.8, again=True),
    "offload": Memory(lambda step, budget: cf.offload(step, budget=budget), 0.35, 0.7, away=True),
    "both": Memory(
        lambda step, budget: cf.offload(cf.checkpoint(step, policy="dots"), budget=budget), 0.3, 0.6, away=True, again=True
    ),
}


@attrs.frozen
class Narrow:
    """A cell of the matrix within a budget."""

    cell: Cell
    column: str
    layers: int = 1
    share: float | None = None  # instead of the column's, and no more
    split: bool = False  # as without a budget: only what lies where in memory is left to plan

    def __str__(self) -> str:
        return f"{self.column}-{self.cell}"


# ---- a cell ----


@attrs.frozen
class Found:
    """As `matrix.Outcome`, and the share of its peak that a cell had; `least`: the planner said that its column's cannot be."""

    worst: float
    refused: str = ""
    share: float = 0.0
    least: bool = False


def run(some: Narrow) -> Found:
    """Plan within the budget, check what is held, run two steps, compare. Raises AssertionError where the cell is broken."""
    cell = some.cell
    step, state, batch = step_of(cell.kind, cell.extra, cell.precision, some.layers)
    if cell.precision == "bf16":
        return _run(some, step, state, batch, functools.partial(narrow.check, known=known_of(cell.kind, cell.extra, some.layers)))
    with cf.testing.float64():
        state, batch = doubled_inside((state, batch))
        return _run(some, step, state, batch, check)


def _run(some: Narrow, step: Any, state: Any, batch: Any, compare: Callable[..., Any]) -> Found:
    try:
        whole = staged(some.cell, step).lower(state, batch)
    except cf.ColofuncError as error:
        sizes = some.cell.sizes or {}
        known = [r for r in matrix.REFUSED if re.search(r.says, str(error)) and r.holds(some.cell, sizes)]
        if not known:
            raise
        return Found(0.0, known[0].why)
    within, budget, low = _tightest(some, step, state, batch, whole)
    wrong = [*signature(some.cell, low), *shown(MEMORY[some.column], low), *held(within, low, state, batch, budget)]
    assert not wrong, f"{some} on {some.cell.sizes}: " + "; ".join(wrong) + f"\n{low.plan}"
    asked, _ = _budgets(some, whole)
    return Found(compare(within, state, batch).worst, share=budget / whole.memory().peak_bytes["device"], least=budget > asked)


SPARE = 1.03
"""A budget of the least that the planner found, and so much for what a budget changes beside it (how large buckets may be)."""
LEAST = re.compile(r"the least found has a peak of ([\d,]+) B")
LASTING = ("parameters", "optimizer state", "gradients", "other")


def _budgets(some: Narrow, without: Any) -> tuple[int, int]:
    """(bytes that are asked of a cell, and what the least possible may be).

    By the peak before the update, in which there is nothing to make again. A loop over microbatches is not before it only.
    """
    memory, report = MEMORY[some.column], without.memory()
    held = zip(report.timeline["device"], without.program.nodes, strict=False)
    peak = max(held_bytes for held_bytes, node in held if node.phase != "update" or node.loop is not None)
    if some.share is not None:
        return int(peak * some.share), int(peak * some.share)
    at = report.timeline["device"].index(peak)
    stays = 0 if memory.away else sum(report.by_kind["device"][kind][at] for kind in LASTING)
    return stays + int(memory.share * (peak - stays)), stays + int(memory.most * (peak - stays))


def _tightest(some: Narrow, step: Any, state: Any, batch: Any, without: Any) -> tuple[Any, int, Any]:
    """(the step within the least that is asked of it or can be, its budget, lowered). without: the same without a budget."""
    base = staged(some.cell, step)
    base = base.with_plan(without.plan) if some.split else base
    memory = MEMORY[some.column]
    budget, most = _budgets(some, without)
    for _ in range(4):
        within = memory.within(base, budget)
        try:
            low = within.lower(state, batch)
            if not memory.again or is_made_again(low.program):
                return within, budget, low
            # A leaner way to run the same keeps to the budget by itself (a sum over microbatches that is reduced in
            # each): the share is taken of what that one holds.
            budget, most = _budgets(some, low)
        except cf.PlanError as error:
            least = LEAST.search(str(error))
            if least is None or budget >= most:
                raise
            budget = min(most, int(int(least[1].replace(",", "")) * SPARE))
    raise AssertionError(f"{some}: four budgets, of which none can be kept to by making something again")


# ---- signatures ----


def held(within: Any, low: Any, state: Any, batch: Any, budget: int) -> list[str]:
    """What does not agree between the budget, the plan, the accountant, and what simulated ranks hold while they run."""
    given = arguments_of(low, within.arguments((state, batch)))
    measured, counted = measure(low.program, low.mesh, given.copies(range(len(given.shards)))), low.memory()
    most = max(measured.timeline["device"])
    wrong = [f"{most:,} B held, the budget is {budget:,} B"] if most > budget else []
    wrong += [f"the plan says {low.plan.peak_bytes:,} B, {most:,} B are held"] if low.plan.peak_bytes != most else []
    for tier, line in counted.timeline.items():
        off = [k for k, (a, b) in enumerate(zip(line, measured.timeline[tier], strict=True)) if a != b]
        wrong += [f"{tier}: {line[k]:,} B counted and {measured.timeline[tier][k]:,} B held at operator {k}" for k in off[:3]]
    return wrong


def shown(memory: Memory, low: Any) -> list[str]:
    """What a column does not show; empty if all is there."""
    wrong = []
    if memory.away:
        lasting = [v for v in map(low.program.value, low.program.inputs) if v.shape and v.role in ("param", "state", "frozen")]
        wrong += [] if any(v.tier == "host" for v in lasting) else ["no weight or moment lies on the host"]
        made = memory.again or any(_goes_and_comes(p) for p in _programs(low.program))
        wrong += [] if made else ["nothing that is made goes to the host"]
    if memory.again:
        wrong += [] if is_made_again(low.program) else ["nothing is made again"]
    return wrong


def is_made_again(program: Program) -> bool:
    """Whether some operator runs once more for backward, as the search says of it."""
    return any(node.note.startswith(AGAIN) for each in _programs(program) for node in each.nodes)


def _goes_and_comes(program: Program) -> bool:
    """Whether a value that an operator made is copied to the host, and from there back."""
    there = {o for node in program.nodes if node.target.startswith("colofunc.to_host") for o in node.outs if o is not None}
    for node in program.nodes:  # behind its wait it has another number
        if node.target == "colofunc.wait" and node.refs[0] in there:
            there.update(o for o in node.outs if o is not None)
    return any(node.target.startswith("colofunc.to_device") and node.refs[0] in there for node in program.nodes)


def _programs(program: Program) -> list[Program]:
    """A program and the bodies of its loops."""
    return [program, *(p for node in program.nodes if node.loop is not None for p in _programs(node.loop.body))]


# ---- which cells ----

QUICK = (
    Narrow(Cell("zero3", kind="experts"), "both", share=0.4, split=True),
    Narrow(Cell("zero1", "1d"), "both", share=0.4, split=True),
    Narrow(Cell("zero2", context="ring", precision="bf16"), "both", share=0.5, split=True),
    Narrow(Cell("hybrid"), "both", share=0.5, split=True),
    Narrow(Cell(tensor="1d+sp", context="ulysses", precision="bf16"), "both", share=0.5, split=True),
    Narrow(Cell(tensor="2d", precision="bf16"), "both", share=0.4, split=True),
    Narrow(Cell("zero3"), "checkpoint", share=0.6, split=True),
    Narrow(Cell(tensor="1d", ranks=2), "offload", share=0.4),
)
"""Each mode beside each column, on two axes: grids over three take as long to plan as all of these, microbatches twice as long
(`test_offload` and `test_checkpoint` have them); both are in the sweep."""


def sweep() -> list[Narrow]:
    """All columns beside every mode alone on 4 ranks and 8, every pair on the smallest mesh that holds it, and each extra."""
    cells = [c for c in matrix.every() if matrix.modes_in(c) == 1 and c.ranks in (4, 8)]
    smallest: dict[tuple[str, ...], Cell] = {}
    for c in matrix.every():
        if matrix.modes_in(c) == 2:
            smallest.setdefault((c.zero, c.tensor, c.context, c.kind, c.precision), c)
    plain = (Cell("zero1"), Cell("zero2"), Cell("zero3"), Cell(context="ring"))
    extras = [attrs.evolve(c, extra=extra) for extra in matrix.EXTRAS[1:] for c in plain]
    alone = [Narrow(c, column, layers=2) for c in (*cells, *extras) for column in MEMORY]
    return [*alone, *(Narrow(c, "both") for c in smallest.values()), *(Narrow(c, "offload") for c in smallest.values())]
