"""Axes decided one after the other, as a start of the joint search."""

from typing import Any

import pytest
import torch
from searched_model import searched_model
from test_named_candidates import training
from transformers import GPT2Config, GPT2LMHeadModel

import colofunc as cf
from colofunc.planner.sharding import assign, axis_starts
from colofunc.planner.sharding.model import PairwiseModel
from colofunc.planner.sharding.search import search_neighbours
from colofunc.spec.rule import Strategy

NO_DROPOUT = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def placed(strategy: Strategy) -> set[str]:
    """The axes that a strategy places anywhere, pending sums included."""
    axes: set[str] = set()
    for layout in (*strategy.ins, *strategy.outs):
        if layout is not None:
            axes |= {*layout.axes, *(axis for axis, _ in layout.pending)}
    return axes


@pytest.fixture(scope="module")
def model() -> PairwiseModel:
    """The cost model of two layers of attention on dp=2, tp=2."""
    step, *args = training("attention")
    return searched_model(lambda: cf.shard(step, cf.Mesh(dp=2, tp=2)).lower(*args))


@pytest.mark.parametrize("axes", [("dp", "tp"), ("tp", "dp")])
def test_each_axis_is_decided_among_options_that_leave_the_others(model: PairwiseModel, axes: tuple[str, ...]) -> None:
    turns: list[tuple[PairwiseModel, list[int]]] = []

    def search(some: PairwiseModel) -> list[int]:
        turns.append((some, search_neighbours(some)))
        return turns[-1][1]

    choice = axis_starts.axis_by_axis(model, axes, search)
    (first, found), (second, then) = turns
    assert set().union(*(placed(strategy) for options in first.options for strategy in options)) == {axes[0]}
    assert any(len(options) > 1 for options in second.options)
    # Options of the second turn have the first axis as it was decided, and all cost what they cost in the whole model.
    for before, option, options in zip(first.options, found, second.options, strict=True):
        assert all((axes[0] in placed(strategy)) == (axes[0] in placed(before[option])) for strategy in options)
    assert second.true_cost(then) == pytest.approx(model.true_cost(choice), rel=1e-12)
    assert model.true_cost(choice) <= first.true_cost(found) * (1 + 1e-12)


@pytest.mark.parametrize("of", ["attention", "dense"])
def test_what_is_cheap_along_each_axis_is_found(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this start the joint search ends a third higher."""
    monkeypatch.setenv("COLOFUNC_CACHE", "off")
    step, *args = training(of)
    planned = cf.shard(step, cf.Mesh(dp=4, tp=2)).lower(*args).plan.cost_s
    real = assign.search_ends

    def without(model: PairwiseModel, *args: Any) -> list[list[int]]:
        return real(model, *args[:-1])

    monkeypatch.setattr(assign, "search_ends", without)
    assert cf.shard(step, cf.Mesh(dp=4, tp=2)).lower(*args).plan.cost_s > 1.3 * planned


def test_both_ends_of_the_search_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second sharding is finished, too, and taken where its program is the sooner one."""
    monkeypatch.setenv("COLOFUNC_CACHE", "off")
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(vocab_size=512, n_positions=256, n_embd=64, n_layer=2, n_head=4, **NO_DROPOUT))
    step, state = cf.train_step(cf.functional(model), cf.adapt(torch.optim.AdamW, lr=1e-4))
    ids, mesh = cf.abstract((8, 32), torch.int64), cf.Mesh(dp=4, tp=2)
    args = state, {"input_ids": ids, "labels": ids}
    both = cf.shard(step, mesh).lower(*args).plan.cost_s
    real = assign._fastest
    monkeypatch.setattr(assign, "_fastest", lambda *args: (real(*args)[0], None))
    assert both < 0.95 * cf.shard(step, mesh).lower(*args).plan.cost_s
