"""Quantized weights under every mode: a sample in which each stands, all of it with `-m sweep`. Counts are printed (`pytest -s`)."""

from collections.abc import Iterable

import pytest
from quantize_matrix import KINDS, MODES, ORDERS, SCHEMES, Cell, every, run, sample

import colofunc as cf


def tried(cells: Iterable[Cell]) -> None:
    """Fails once, with every cell that is not equal."""
    count, broken = 0, []
    for cell in cells:
        count += 1
        try:
            print(f"{cell}: {run(cell):.1e}", flush=True)
        except (AssertionError, cf.ColofuncError) as error:
            broken.append(f"{cell}: {type(error).__name__}: {str(error)[:600]}")
    print(f"\n{count} combinations tried, {count - len(broken)} equal")
    assert not broken, "\n\n".join(broken)


@pytest.mark.filterwarnings("ignore:the plan uses")
@pytest.mark.parametrize("cell", sample(), ids=str)
def test_combination(cell: Cell) -> None:
    tried([cell])


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:the plan uses")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_combinations(scheme: str) -> None:
    tried(cell for cell in every() if cell.scheme == scheme)


def test_the_sample_has_every_word() -> None:
    cells = sample()
    for words, found in ((SCHEMES, {c.scheme for c in cells}), (tuple(MODES), {c.mode for c in cells})):
        assert set(words) == found
    assert {c.kind for c in cells} == set(KINDS) and {c.order for c in cells} == set(ORDERS)
