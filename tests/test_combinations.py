"""Every mode beside every other: a sample in which each stands at least once; all pairs and sampled triples with `-m sweep`.

What a cell is, and when it counts, stands in `matrix.py`. Counts are printed (`pytest -s`).
"""

from collections import Counter
from collections.abc import Iterator

import matrix
import pytest
import torch
from matrix import (
    COLUMNS,
    LAYERS,
    RANKS,
    Cell,
    Outcome,
    chosen,
    every,
    modes_in,
    quick,
    run,
    signature,
    staged,
    step_of,
)

import colofunc as cf

PARTS = 24  # of the sweep, to be run side by side


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("COLOFUNC_QUIET", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tried(cells: list[Cell], layers: int = LAYERS) -> list[Outcome]:
    """All outcomes; fails once, with every broken cell."""
    outcomes, broken = [], []
    for cell in cells:
        try:
            outcomes.append(run(cell, layers))
            print(f"{cell}: {outcomes[-1].refused or f'{outcomes[-1].worst:.1e}'}", flush=True)
        except (AssertionError, cf.ColofuncError) as error:
            broken.append(f"{cell} on {cell.sizes}: {type(error).__name__}: {str(error)[:600]}")
            print(f"{cell}: broken, {broken[-1]}", flush=True)
    why = Counter(o.refused for o in outcomes if o.refused)
    equal = sum(not o.refused for o in outcomes)
    print(f"\n{len(cells)} combinations tried, {equal} equal, {sum(why.values())} refused {dict(why)}, {len(broken)} broken")
    assert not broken, "\n\n".join(broken)
    return outcomes


@pytest.mark.parametrize("cell", quick(), ids=str)
def test_combination(cell: Cell) -> None:
    """Layers are planned alike: one of them where a cell takes long, both where it is dense and wide (and in the sweep)."""
    tried([cell], layers=LAYERS if (cell.kind, cell.precision) == ("dense", "float64") else 1)


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(PARTS))
def test_combinations(part: int) -> None:
    tried(chosen(most=320)[part::PARTS])


@pytest.mark.sweep
def test_a_pattern_over_three_axes_is_planned_at_once() -> None:
    """Among options that fit it: all of three axes together would take minutes."""
    step, state, batch = step_of("dense")
    mesh = cf.Mesh(a=2, b=2, c=2, topology="16xa100-80g")
    with cf.testing.float64():
        both = cf.shard(step, mesh, {"*.gate_proj": "{a: b0, b: o, c: i}"})
        split = [d for d in both.lower(state, batch).plan.find("*.gate_proj") if d.phase == "forward" and d.target == "colofunc.linear"]
        assert split and all({("a", "b0"), ("b", "o"), ("c", "i")} == set(d.axes) for d in split)
        assert cf.testing.check(both, state, batch).worst < 1e-10


# ---- the matrix itself ----


def test_the_sample_has_every_mode_and_the_sweep_all_pairs() -> None:
    sample, sweep = quick(), chosen(most=320)
    assert {(c, getattr(cell, c)) for cell in sample for c in COLUMNS} == {(c, name) for c, table in COLUMNS.items() for name in table}
    assert {cell.ranks for cell in sample} == set(RANKS)
    assert {cell for cell in every() if modes_in(cell) <= 2} <= set(sweep) and sum(modes_in(cell) > 2 for cell in sweep) > 40


def test_a_mode_that_does_nothing_is_seen() -> None:
    """The signature of ring attention on a plan that copies, of ZeRO-3 on one that is ZeRO-1, of a wrong gradient in bf16."""
    step, state, batch = step_of("dense")
    with cf.testing.float64():
        low = staged(Cell("zero1"), step).lower(state, batch)
    assert any("exp_avg" not in line and "params" in line for line in signature(Cell("zero3"), low))
    assert any("batch.input_ids" in line for line in signature(Cell(context="ring"), low))


def test_bf16_tells_a_gradient_that_lacks_a_part() -> None:
    step, state, batch = step_of("dense", "", "bf16", layers=1)
    less = {**batch, "labels": batch["labels"].clone()}
    less["labels"][8:] = -100  # the second half of the rows is not there
    narrow = staged(Cell("zero1", precision="bf16"), step)
    known = matrix.narrow.measured(narrow.reference, state, less)
    with pytest.raises(cf.CheckError, match="of its norm, allowed"):
        matrix.narrow.check(narrow, state, batch, known)


def test_a_refusal_counts_only_where_its_reason_is_true(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refuses:
        def lower(self, *args: object) -> None:
            raise cf.PlanError("too many ranks")

    monkeypatch.setattr(matrix, "staged", lambda cell, step: Refuses())
    monkeypatch.setattr(matrix, "REFUSED", (matrix.Refusal("too many", lambda cell, sizes: sizes["dp"] > 4, "why"),))
    assert run(Cell("zero1", ranks=8)).refused == "why"
    with pytest.raises(cf.PlanError):
        run(Cell("zero1", ranks=4))
