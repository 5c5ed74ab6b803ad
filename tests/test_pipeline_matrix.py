"""Pipelines beside every other mode: a sample in which each stands at least once; all of it with `-m sweep`.

What a cell is, and when it counts, stands in `pipeline_matrix.py`. Counts are printed (`pytest -s`).
"""

import types
from collections import Counter

import pytest
from pipeline_matrix import COLUMNS, LAYERS, Cell, beside, bytes_differ, core, quick, run, step_of
from pipelined import loop_of

import colofunc as cf
from colofunc.testing import check
from colofunc.testing.check import doubled_inside

PARTS = 12  # of the sweep, to be run side by side


def tried(cells: list[Cell], layers: int = LAYERS) -> None:
    """Fails once, with every broken cell."""
    outcomes, broken = [], []
    for cell in cells:
        try:
            outcomes.append(run(cell, layers))
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
    tried([cell], layers=1)  # what lies between two layers the blocks of cells without a model have, and the sweep


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(PARTS))
def test_combinations(part: int) -> None:
    tried([*core(), *beside()][part::PARTS])


def test_the_sample_has_every_word_and_the_sweep_every_combination() -> None:
    words = {(column, word) for column, words in COLUMNS.items() for word in words}
    assert {(column, getattr(cell, column)) for cell in quick() for column in COLUMNS} == words
    assert len(set(core())) == 11 * 4 * 2 * 3 * 2
    assert {cell.beside for cell in beside()} == set(COLUMNS["beside"]) - {""}


def test_weight_gradients_before_and_behind_an_earlier_stage_of_the_same_rank() -> None:
    """The gradient of a residual is read by the weight gradient of its stage and by the stage before, on one rank, in either order."""
    plugin = types.ModuleType("in_turn")
    rows = [
        "0F0 0F1 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 0I1 0W1",
        "1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 2I1 1I1 2W1 1W1",  # of microbatch 0 weights first, of microbatch 1 the stage before
    ]
    table = cf.ext.ActionTable.parse(rows)
    schedule = cf.ext.Schedule("in-turn", lambda *_: table, stages_per_rank=2, placement="v", splits_backward=True)
    plugin.colofunc_schedules = cf.hookimpl(lambda: {"in-turn": schedule}, specname="colofunc_schedules")
    step, state, batch = step_of("", "float64")
    # Stage 2 begins within a block: its residual goes by it.
    stages = {"blocks.0.*": 0, "blocks.1.*": 1, "blocks.2.norm.*": 1, "blocks.2.*": 2, "blocks.3.*": 3}
    with cf.testing.float64():
        state, batch = doubled_inside((state, batch))
        chain = cf.pipeline(cf.shard(step, cf.Mesh(pp=2), plugins=[plugin]), microbatches=2, schedule="in-turn", stages=stages)
        low = chain.lower(state, batch)
        check(chain, state, batch)
    body, timetable = loop_of(low.program).body, loop_of(low.program).timetable
    spans = dict(zip(timetable.parts, timetable.spans(), strict=True))
    read = {part: {ref for node in body.nodes[first:end] for ref in node.refs} for part, (first, end) in spans.items()}
    both = {ref for ref in read[2, "W"] & read[1, "I"] if ref in body.makers}
    assert {body.makers[ref].phase for ref in both} == {"backward"} and not both & read[1, "W"], "the gradient of the residual"
    assert not bytes_differ(chain, low, state, batch)
