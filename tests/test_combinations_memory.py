"""Recomputation and offload beside every parallel mode: a sample by default, every mode and pair with `-m sweep`.

What a cell is, and when it counts, stands in `matrix_memory.py`. Counts are added up over all cells and printed at the end.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import attrs
import matrix
import pytest
import torch
from matrix import Cell, step_of
from matrix_memory import MEMORY, QUICK, Narrow, held, run, shown, sweep

import colofunc as cf

PARTS = 24  # of the sweep, to be run side by side


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("COLOFUNC_QUIET", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


Record = Callable[[str, object], None]
# What is wrong with a broken cell, by what is said of it (`matrix_memory.held`).
BROKEN = {"the budget is": "over budget", "counted and": "bytes differ", "the plan says": "bytes differ"}


def tried(cells: Sequence[Narrow], record: Record) -> None:
    """Every cell, counted; fails once, with all that are broken."""
    counts, broken = Counter[str](), []
    for cell in cells:
        counts["tried"] += 1
        try:
            found = run(cell)
            counts[f"refused ({found.refused})" if found.refused else "equal"] += 1
            counts["equal within what the planner says is the least"] += found.least
            print(f"{cell}: {found.refused or f'{found.worst:.1e} within {found.share:.0%}'}", flush=True)
        except (AssertionError, cf.ColofuncError) as error:
            broken.append(f"{cell} on {cell.cell.sizes}: {type(error).__name__}: {str(error)[:600]}")
            counts[next((how for words, how in BROKEN.items() if words in str(error)), "broken")] += 1
            print(f"{cell}: broken, {broken[-1]}", flush=True)
    record("counts", {"over budget": 0, "bytes differ": 0, "broken": 0, **counts})
    assert not broken, "\n\n".join(broken)


@pytest.mark.parametrize("cell", QUICK, ids=str)
def test_within_a_budget(cell: Narrow, record_property: Record) -> None:
    tried([cell], record_property)


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(PARTS))
def test_combinations_within_a_budget(part: int, record_property: Record) -> None:
    tried(sweep()[part::PARTS], record_property)


# ---- the matrix itself ----


def test_the_sample_has_each_column_beside_each_mode_on_two_axes_and_the_sweep_beside_every_mode_and_pair() -> None:
    def beside(cells: Sequence[Narrow], entries: tuple[str, ...]) -> set[tuple[str, str, str]]:
        also = {"both": ("both", *entries)}
        return {(e, c, getattr(n.cell, c)) for n in cells for c in matrix.COLUMNS for e in also.get(n.column, (n.column,))}

    modes = {(c, name) for c, table in matrix.COLUMNS.items() for name, mode in table.items() if len(mode.axes) < 3}
    assert {(e, *m) for e in ("checkpoint", "offload") for m in modes} <= beside(QUICK, ("checkpoint", "offload"))
    every = {(c, name) for c, table in matrix.COLUMNS.items() for name in table}
    assert {(e, *m) for e in MEMORY for m in every} <= beside(sweep(), ())
    pairs = {attrs.evolve(c, ranks=0) for c in matrix.every() if matrix.modes_in(c) == 2}
    assert pairs <= {attrs.evolve(n.cell, ranks=0) for n in sweep()}


def test_a_column_that_does_nothing_is_seen() -> None:
    """The signature of each column, and of a budget, on a step that has neither."""
    step, state, batch = step_of("dense", layers=1)
    plain = matrix.staged(Cell("zero1", ranks=2), step)
    low = plain.lower(state, batch)
    whole = low.memory().peak_bytes["device"]
    for column in MEMORY.values():
        assert shown(column, low)
    assert any("the budget is" in line for line in held(plain, low, state, batch, whole - 1))
    assert not any("counted" in line for line in held(plain, low, state, batch, whole))
