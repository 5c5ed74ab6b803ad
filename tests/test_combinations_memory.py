"""Recomputation and offload beside every parallel mode: a sample by default, every mode and pair with `-m sweep`.

What a cell is, and when it counts, stands in `matrix_memory.py`. Counts are printed (`pytest -s`).
"""

from collections import Counter
from collections.abc import Iterator, Sequence

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


def tried(cells: Sequence[Narrow]) -> None:
    """Every cell; fails once, with all that are broken."""
    equal, why, broken = 0, Counter[str](), []
    for cell in cells:
        try:
            outcome = run(cell)
            equal += not outcome.refused
            why.update([outcome.refused] if outcome.refused else [])
            print(f"{cell}: {outcome.refused or f'{outcome.worst:.1e}'}", flush=True)
        except (AssertionError, cf.ColofuncError) as error:
            broken.append(f"{cell} on {cell.cell.sizes}: {type(error).__name__}: {str(error)[:600]}")
            print(f"{cell}: broken, {broken[-1]}", flush=True)
    print(f"\n{len(cells)} combinations tried, {equal} equal, {why.total()} refused {dict(why)}, {len(broken)} broken")
    assert not broken, "\n\n".join(broken)


@pytest.mark.parametrize("cell", QUICK, ids=str)
def test_within_a_budget(cell: Narrow) -> None:
    tried([cell])


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(PARTS))
def test_combinations_within_a_budget(part: int) -> None:
    tried(sweep()[part::PARTS])


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
    plain = matrix.staged(Cell("zero1"), step)
    low = plain.lower(state, batch)
    whole = low.memory().peak_bytes["device"]
    for column in MEMORY.values():
        assert shown(column, low, low.program)
    assert any("the budget is" in line for line in held(plain, low, state, batch, whole - 1))
    assert not any("counted" in line for line in held(plain, low, state, batch, whole))
