"""Training in float8 under every mode: a sample in which each stands, all of it with `-m sweep`. Counts are printed (`pytest -s`)."""

from collections.abc import Iterable

import pytest
from fp8_matrix import MODES, SCALINGS, Cell, every, run, sample

import colofunc as cf


def tried(cells: Iterable[Cell]) -> None:
    """Fails once, with every cell that is not as it should be."""
    count, errors, broken = 0, 0, []
    for cell in cells:
        count += 1
        try:
            print(f"{cell}: {run(cell):.1e}", flush=True)
            if cell.mixes:
                broken.append(f"{cell}: no error, though its scales are of all rows")
        except (AssertionError, cf.ColofuncError) as error:
            if cell.mixes and isinstance(error, cf.PlanError) and "fp8_scale in" in str(error) and "mixes the samples" in str(error):
                errors += 1
            else:
                broken.append(f"{cell}: {type(error).__name__}: {str(error)[:600]}")
    print(f"\n{count} combinations tried, {count - errors - len(broken)} equal, {errors} refused as scales of all rows")
    assert not broken, "\n\n".join(broken)


@pytest.mark.filterwarnings("ignore:the plan uses")
@pytest.mark.parametrize("cell", sample(), ids=str)
def test_combination(cell: Cell) -> None:
    tried([cell])


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:the plan uses")
@pytest.mark.parametrize("scaling", SCALINGS)
def test_combinations(scaling: str) -> None:
    tried(cell for cell in every() if cell.scaling == scaling)


def test_the_sample_has_every_word() -> None:
    cells = sample()
    assert {cell.scaling for cell in cells} == set(SCALINGS) and {cell.mode for cell in cells} == set(MODES)
