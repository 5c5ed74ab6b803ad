"""Gemini's and Elixir's policies: what they place where, in budgets, with the numbers of one device."""

from typing import Any

import pytest
from colofunc_plugins import elixir, gemini
from colofunc_plugins.gemini import chunk_states
from test_offload import one, peak, training

import colofunc as cf
from colofunc.testing import check

SIZES = [("param", 100)] * 4 + [("state", 200)] * 4 + [("state", 4)]
STATES = [cf.State(f"{role}{k}", role, nbytes) for k, (role, nbytes) in enumerate(SIZES)]


def placed(policy: cf.MemoryPolicy, budget: int | None = None) -> str:
    """One letter a state: d or h."""
    return "".join((tier or "-")[0] for tier in policy.place(STATES, cf.Room(budget, 100, 1)))


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


def test_elixir_gives_bytes_to_what_saves_most_by_its_rates() -> None:
    both = placed(elixir(), 100 + 400)
    # One rank: 8 bytes there and back at 18.1 and 25 GB/s and an Adam of 5.15 against 50 billion parameters a second, a byte of
    # moments, save 0.07 ns; a byte of a parameter saves 2 / 25 GB/s = 0.08 ns, so parameters come first.
    assert both == "dddd" + "hhhh" + "d" and placed(elixir(), 100 + 800) == "dddd" + "ddhh" + "d"


IN = {"host": (gemini("host"), 0.7), "static": (gemini("static", param=0.5), 0.9), "auto": (gemini(), 0.7), "elixir": (elixir(), 0.7)}


@pytest.mark.parametrize("name", IN)
def test_numbers_and_budget_hold(name: str) -> None:
    step, *args = training()
    policy, share = IN[name]
    budget = int(peak(cf.shard(step, one()), *args) * share)
    staged = cf.offload(cf.shard(step, one()), policy=policy, budget=budget)
    assert peak(staged, *args) <= budget
    check(staged, *args, steps=2)


def test_chunk_states_are_free_where_only_the_host_has_them() -> None:
    step, *args = training()
    low = cf.offload(cf.shard(step, one()), policy=gemini("host")).lower(*args)
    of = {c.name: [state for _, state in c.changes] for c in chunk_states(low)}
    words = of["state.params.4.weight"]
    assert words[0] == "free" and words.count("compute") >= 2 and words[-1] == "free"
    low = cf.offload(cf.shard(step, one()), policy=gemini("device")).lower(*args)
    assert all("free" not in [state for _, state in c.changes] for c in chunk_states(low))


@pytest.mark.parametrize("wrong", [dict(placement="hots"), dict(param=1.5), dict(margin=-1)])
def test_what_gemini_does_not_have_is_named(wrong: Any) -> None:
    with pytest.raises(cf.PlanError, match=str(next(iter(wrong.values())))):
        gemini(**wrong)
