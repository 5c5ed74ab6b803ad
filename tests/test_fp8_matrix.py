"""Training in float8 under every mode: a sample in which each stands, all of it with `-m sweep`. Counts are printed (`pytest -s`)."""

import pytest
from fp8_matrix import MODES, SCALINGS, Cell, every, run, sample
from quantize_matrix import tried

import colofunc as cf


def refused(cell: Cell, error: Exception) -> bool:
    """Whether a cell whose scales are of all rows says so."""
    return cell.mixes and isinstance(error, cf.PlanError) and "fp8_scale in" in str(error) and "mixes the samples" in str(error)


@pytest.mark.filterwarnings("ignore:the plan uses")
@pytest.mark.parametrize("cell", sample(), ids=str)
def test_combination(cell: Cell) -> None:
    tried([cell], run, {cell} if cell.mixes else (), refused)


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:the plan uses")
@pytest.mark.parametrize("scaling", SCALINGS)
def test_combinations(scaling: str) -> None:
    cells = [cell for cell in every() if cell.scaling == scaling]
    tried(cells, run, {cell for cell in cells if cell.mixes}, refused)


def test_the_sample_has_every_word() -> None:
    cells = sample()
    assert {cell.scaling for cell in cells} == set(SCALINGS) and {cell.mode for cell in cells} == set(MODES)
