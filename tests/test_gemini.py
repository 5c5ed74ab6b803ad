"""Gemini's and Elixir's policies: what they place where, in budgets, with the numbers of one device."""

from itertools import combinations
from math import log
from random import Random
from typing import Any

import pytest
from colofunc_plugins import elixir, gemini
from colofunc_plugins.gemini.rcache import divided, loads, rates
from test_offload import one, peak, training

import colofunc as cf
from colofunc.testing import check

SIZES = [("param", 100)] * 4 + [("state", 200)] * 4 + [("state", 4)]
STATES = [cf.ext.State(f"{role}{k}", role, nbytes) for k, (role, nbytes) in enumerate(SIZES)]


def placed(policy: cf.ext.MemoryPolicy, budget: int | None = None) -> str:
    """One letter a state: d or h."""
    return "".join((tier or "-")[0] for tier in policy.place(STATES, cf.ext.Room(budget, 100, 1)))


def test_what_each_placement_keeps_where() -> None:
    assert placed(gemini("device")) == "dddddddd" + "d"
    assert placed(gemini("host")) == "hhhhhhhh" + "d"
    assert placed(gemini("static", param=0.5, optim=0.25)) == "ddhhdddh" + "d"
    assert placed(gemini("static", param=0.0, optim=1.0)) == "ddddhhhh" + "d"


def test_auto_fills_the_margin_with_moments_in_order() -> None:
    assert placed(gemini("auto", margin=1.0), 100 + 400 + 450) == "dddd" + "ddhh" + "d"
    assert placed(gemini("auto", margin=0.5), 100 + 400 + 450) == "dddd" + "dhhh" + "d"
    assert placed(gemini("auto"), 100 + 250) == "ddhh" + "hhhh" + "d"  # no margin: parameters themselves do not fit
    assert placed(gemini("auto")) == "dddddddd" + "d"


CHUNKS = [cf.ext.State(f"params.{k}", "param", 100) for k in range(4)] + [cf.ext.State(f"opt.m.{k}", "state", 200) for k in (3, 2, 1, 0)]


def test_elixir_keeps_chunks_with_their_state_and_a_block_for_the_others() -> None:
    def placed(budget: int) -> str:
        return "".join((tier or "-")[0] for tier in elixir().place(CHUNKS, cf.ext.Room(budget, 100, 1)))

    assert placed(100 + 4 * 300) == "dddd" + "dddd"
    assert placed(100 + 700) == "ddhh" + "hhdd"  # the moments of parameters 1 and 0; a block is left
    assert placed(100 + 300) == "hhhh" + "hhhh"  # one chunk fits with its state, but no block beside it
    assert placed(50) == "hhhh" + "hhhh"


def test_the_replay_of_a_step_counts_its_loads() -> None:
    steps = [[0], [1, 2], [3], [3], [1, 2], [0]]
    assert loads(steps, 4) == 4 and loads(steps, 3) == 5
    assert 2 * loads(steps, 2) == 12  # published: what is loaded goes again
    for seed in range(60):
        random = Random(seed)
        steps = [sorted(random.sample(range(4), random.randint(1, 2))) for _ in range(6)]
        blocks = random.randint(2, 3)
        assert loads(steps, blocks) == least_loads(steps, blocks)


def least_loads(steps: list[list[int]], blocks: int) -> int:
    """By a search over everything that the cache could hold."""
    best = {frozenset[int](): 0}
    for need in steps:
        after: dict[frozenset[int], int] = {}
        for held, cost in best.items():
            rest = sorted(held - {*need})
            for n in range(min(len(rest), blocks - len(need)) + 1):
                for some in combinations(rest, n):
                    now = frozenset((*need, *some))
                    after[now] = min(after.get(now, 99), cost + len({*need} - held))
        best = after
    return min(best.values())


@pytest.mark.parametrize("ranks", [1, 8])
def test_elixirs_division_is_the_best_of_its_model(ranks: int) -> None:
    """The model again, by hand: of n chunks that go through b blocks the last b of forward are there when backward begins."""
    up, down = (16.3 * ranks + 8.7) * 1e9 / ranks, (15.8 * ranks + 2.3) * 1e9 / ranks
    slow = (1.66 * log(ranks) + 5.15) * 1e9 / ranks

    def model(kept: int, blocks: int) -> float:
        others = 6 - kept
        return (2 * others - blocks) * 100 / up + others * (100 / down + 25 / slow) + kept * 25 / 50e9

    for room in range(100, 2000, 150):
        able = [(k, b) for k in range(7) for b in range(7 - k) if k * 300 + b * 100 <= room and (b or k == 6)]
        kept, blocks = divided(6, 100, 200, room, rates(ranks))
        assert (kept, blocks) in able and model(kept, blocks) == pytest.approx(min(model(*each) for each in able), rel=1e-12)


IN = {"host": (gemini("host"), 0.7), "static": (gemini("static", param=0.5), 0.9), "auto": (gemini(), 0.7), "elixir": (elixir(), 0.7)}


@pytest.mark.parametrize("name", IN)
def test_numbers_and_budget_hold(name: str) -> None:
    step, *args = training()
    policy, share = IN[name]
    budget = int(peak(cf.shard(step, one()), *args) * share)
    staged = cf.offload(cf.shard(step, one()), policy=policy, budget=budget)
    assert peak(staged, *args) <= budget
    check(staged, *args, steps=2)


@pytest.mark.parametrize("wrong", [dict(placement="hots"), dict(param=1.5), dict(margin=-1)])
def test_what_gemini_does_not_have_is_named(wrong: Any) -> None:
    with pytest.raises(cf.PlanError, match=str(next(iter(wrong.values())))):
        gemini(**wrong)
