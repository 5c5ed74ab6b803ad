"""A choice from which moves are tried: what is known of it is what the cost model says anew."""

import numpy as np
import pytest
import torch
from searched_model import searched_model

import colofunc as cf
from colofunc.planner.sharding.model import PairwiseModel
from colofunc.planner.sharding.search import Position, _sweep
from colofunc.testing import models


@pytest.fixture(scope="module")
def model() -> PairwiseModel:
    """The cost model of a small language model's step on four ranks, where memory has a price."""
    step, state = cf.train_step(
        cf.functional(models.Language()), cf.adapt(torch.optim.SGD, lr=0.1), loss=lambda out, _: out.sum(), inputs=lambda b: ((b,), {})
    )
    sharded = cf.shard(step, cf.Mesh(dp=2, tp=2, topology="ideal"))
    found = searched_model(lambda: sharded.lower(state, torch.zeros(4, 8, dtype=torch.int64)))
    rng = np.random.default_rng(0)
    extra = [rng.random(len(options)) * 1e-6 for options in found.options]
    return found.priced(rng.random(len(found.flows)) * 1e-9, extra)


def drawn(model: PairwiseModel, rng: np.random.Generator) -> dict[int, int]:
    classes = rng.choice(len(model.options), size=rng.integers(1, 4), replace=False).tolist()
    return {c: int(rng.integers(len(model.options[c]))) for c in classes}


@pytest.mark.parametrize("seed", range(3))
def test_after_any_moves_it_costs_what_the_model_says(model: PairwiseModel, seed: int) -> None:
    rng = np.random.default_rng(seed)
    here, gains, losses = Position(model, [0] * len(model.options)), 0, 0
    for _ in range(300):
        moves = drawn(model, rng)
        after = list(here.choice)
        for c, o in moves.items():
            after[c] = o
        change_s, told_s = model.true_cost(after) - model.true_cost(here.choice), here.change_s(moves)
        near = 1e-9 * model.true_cost(here.choice)
        if change_s < 0:  # else it is enough that it is no gain
            assert told_s == pytest.approx(change_s, rel=0, abs=near)
            gains += 1
        else:
            assert -near <= told_s <= change_s + near
            losses += 1
        c = next(iter(moves))
        assert np.array_equal(here.row(c), model.row(c, here.choice))
        if change_s < 0 or rng.random() < 0.3:
            here.move(moves)
            assert here.choice == after
    assert gains and losses


@pytest.mark.parametrize("seed", range(3))
def test_a_sweep_that_knows_what_is_settled_makes_the_moves_of_one_that_does_not(model: PairwiseModel, seed: int) -> None:
    rng = np.random.default_rng(seed)
    here, skipped, gains = Position(model, [0] * len(model.options)), 0, 0
    for turn in range(12):
        if turn % 3:  # go on from the end of a sweep, with a few classes moved
            here.go_to([drawn(model, rng).get(c, o) if rng.random() < 0.02 else o for c, o in enumerate(here.choice)])
        else:
            here.go_to([int(rng.integers(len(options))) for options in model.options])
        start, best = list(here.choice), model.true_cost(here.choice)
        skipped += len(here.settled)
        known, fresh = _sweep(here, best), _sweep(Position(model, start), best)
        assert known[0] == fresh[0] and known[2] == fresh[2]
        assert known[1] == pytest.approx(model.true_cost(known[0]), rel=1e-9)
        gains += known[2]
    assert gains and skipped
