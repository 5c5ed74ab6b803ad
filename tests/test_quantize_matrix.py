"""Quantized weights under every mode: a sample in which each stands, all of it with `-m sweep`. Counts are printed (`pytest -s`)."""

import pytest
from quantize_matrix import KINDS, MODES, ORDERS, SCHEMES, Cell, every, run, sample, tried


@pytest.mark.filterwarnings("ignore:the plan uses")
@pytest.mark.parametrize("cell", sample(), ids=str)
def test_combination(cell: Cell) -> None:
    tried([cell], run)


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:the plan uses")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_combinations(scheme: str) -> None:
    tried((cell for cell in every() if cell.scheme == scheme), run)


def test_the_sample_has_every_word() -> None:
    cells = sample()
    for words, found in ((SCHEMES, {c.scheme for c in cells}), (tuple(MODES), {c.mode for c in cells})):
        assert set(words) == found
    assert {c.kind for c in cells} == set(KINDS) and {c.order for c in cells} == set(ORDERS)
