"""Pipelines beside every other mode: a sample in which each stands at least once; all of it with `-m sweep`.

What a cell is, and when it counts, stands in `pipeline_matrix.py`. Counts are printed (`pytest -s`).
"""

from collections import Counter

import pytest
from pipeline_matrix import COLUMNS, Cell, beside, core, quick, run

import colofunc as cf

PARTS = 12  # of the sweep, to be run side by side


def tried(cells: list[Cell]) -> None:
    """Fails once, with every broken cell."""
    outcomes, broken = [], []
    for cell in cells:
        try:
            outcomes.append(run(cell))
            print(f"{cell}: {outcomes[-1].refused or f'{outcomes[-1].worst:.1e}'}", flush=True)
        except (AssertionError, cf.ColofuncError) as error:
            broken.append(f"{cell}: {type(error).__name__}: {str(error)[:600]}")
            print(f"{cell}: broken, {broken[-1]}", flush=True)
    why = Counter(o.refused for o in outcomes if o.refused)
    equal = sum(not o.refused for o in outcomes)
    print(f"\n{len(cells)} combinations tried, {equal} equal, {sum(why.values())} refused {dict(why)}, {len(broken)} broken")
    assert not broken, "\n\n".join(broken)


@pytest.mark.parametrize("cell", quick(), ids=str)
def test_combination(cell: Cell) -> None:
    tried([cell])


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(PARTS))
def test_combinations(part: int) -> None:
    tried([*core(), *beside()][part::PARTS])


def test_the_sample_has_every_word_and_the_sweep_every_combination() -> None:
    words = {(column, word) for column, words in COLUMNS.items() for word in words}
    assert {(column, getattr(cell, column)) for cell in quick() for column in COLUMNS} == words
    assert len(set(core())) == 11 * 4 * 2 * 3 * 2
    assert {cell.beside for cell in beside()} == set(COLUMNS["beside"]) - {""}
