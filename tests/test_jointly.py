"""Sharding, keeping, making again and copying, decided together, against every decision that there is.

Small random steps and their oracle are those of `bench/jointly.py`, which counts over many; traced ones are held against the
separate choices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import attrs
import pytest
import torch
from colofunc_plugins import zero
from least_named import tried
from narrow_steps import training
from torch import nn

import colofunc as cf
from bench import jointly
from bench._joint_cases import INF, UNIT, Case, Deciding, Layer, made
from bench._joint_oracle import optimum
from colofunc.compiler import budget as budget_search
from colofunc.errors import CapacityError, PlanError
from colofunc.planner import joint as jointly_planned
from colofunc.planner.candidate import FinishedProgram


def proposing(there: dict[str, tuple[float, int]], aims: list[int]) -> jointly_planned.Propose[str]:
    """What is cheapest of some shardings (name -> seconds, bytes); the bytes that were aimed for are noted in `aims`."""

    def propose(aim: int | None, price_s: float) -> jointly_planned.Proposal[str]:
        if aim is not None:
            aims.append(aim)
        fits = [name for name, (_, nbytes) in there.items() if aim is None or nbytes <= aim]
        if not fits:
            raise PlanError("nothing is that lean")
        name = min(fits, key=lambda name: there[name][0] + price_s * there[name][1])
        return jointly_planned.Proposal(name, *there[name], key=name)

    return propose


# ---- tests ----


def test_shardings_between_the_fastest_and_the_leanest_are_found_without_a_plan() -> None:
    """The dearer of two that hold the same is on no line; at most so many prices are asked for, furthest apart first."""
    there = {"fast": (1.0, 100), "good": (1.5, 60), "also": (2.0, 40), "lean": (4.0, 10), "bad": (5.0, 60)}
    asked = list[float]()

    def propose(aim: int | None, price_s: float) -> jointly_planned.Proposal[str]:
        asked.append(price_s)
        leanest = "lean" if aim is not None else ""
        name = leanest or min(there, key=lambda name: there[name][0] + price_s * there[name][1])
        return jointly_planned.Proposal(name, *there[name], key=[name])

    assert [one.plan for one in jointly_planned.frontier(propose, 8)] == ["fast", "good", "also", "lean"]
    assert asked[:2] == [0.0, 0.0] and asked[2] == 3.0 / 90
    assert len(asked) < 8
    assert [one.plan for one in jointly_planned.frontier(propose, 0)] == ["fast", "lean"]


@pytest.mark.parametrize(("help_s", "alone"), [(0.1, 0), (3.0, 1)])
def test_sharding_alone_is_searched_where_its_bound_says_that_it_may_be_faster(help_s: float, alone: int) -> None:
    """Of the fastest (1 s, 100 B) and the leanest (3 s, 40 B), within 70 B. At .1 / 30 s a byte the fastest is the cheapest still, so
    whatever needs no help takes 1.1 s at least. Where help takes 3 s the prices that are asked say no more than 2 s."""
    there, aims = {"fast": (1.0, 100), "lean": (3.0, 40)}, list[int]()

    def finish(name: str, below_s: float) -> FinishedProgram:
        return tried(min(70, there[name][1]), 70, more_s=help_s if name == "fast" else 0.0).done

    best, _ = jointly_planned.decide_jointly(proposing(there, aims), finish, budget_bytes=70)
    assert best is not None and best.total_s == min(1.0 + help_s, 3.0) and len(aims) == alone


@pytest.mark.parametrize(("lean", "alone", "best_s"), [((9.0, 40), 0, 1.8), ((1.7, 60), 1, 1.7)])
def test_dearer_prices_may_rule_out_sharding_alone(lean: tuple[float, int], alone: int, best_s: float) -> None:
    """Of a large step the first price, .8 / 30 s a byte, says that whatever needs no help takes 1.77 s, and the best takes 1.8. Four times
    as dear a lean one of 9 s is no cheaper than `mid`, so that what keeps to 70 B takes 2.6 s."""
    there, aims = {"fast": (1.0, 100), "mid": (1.5, 80), "lean": lean}, list[int]()

    def finish(name: str, below_s: float) -> FinishedProgram:
        return tried(min(70, there[name][1]), 70, more_s={"fast": 0.8, "mid": 2.0, "lean": 0.0}[name]).done

    best, _ = jointly_planned.decide_jointly(proposing(there, aims), finish, budget_bytes=70, small=False)
    assert best is not None and best.total_s == pytest.approx(best_s) and len(aims) == alone


@pytest.mark.parametrize(("small", "finished"), [(True, {"fast", "good", "near"}), (False, {"fast", "good"})])
def test_what_a_price_says_is_no_faster_is_not_finished(small: bool, finished: set[str]) -> None:
    """`good` needs 5 B less for .1 s, so at that price a byte `near`, with 39 B too much, would take 1.78 s."""
    there, done = {"fast": (1.0, 100), "good": (1.2, 65), "near": (1.01, 99), "lean": (1.4, 55)}, set[str]()

    def propose(aim: int | None, price_s: float) -> jointly_planned.Proposal[str]:
        name = min(there, key=lambda name: there[name][0] + price_s * there[name][1])
        return jointly_planned.Proposal(name, *there[name], key=name)

    def finish(name: str, below_s: float) -> FinishedProgram:
        done.add(name)
        more_s, byte_s = {"fast": (0.6, None), "good": (0.1, 0.05), "near": (0.59, None), "lean": (0.0, None)}[name]
        return attrs.evolve(tried(60, 60, more_s=more_s).done, byte_s=byte_s)

    near = [jointly_planned.Proposal("near", *there["near"], key="near")]
    best, _ = jointly_planned.decide_jointly(propose, finish, budget_bytes=60, others=lambda price_s: near, small=small)
    assert best is not None and best.proposal.plan == "good" and best.total_s == pytest.approx(1.3) and done == finished


@pytest.mark.parametrize("small", [True, False])
def test_of_a_large_program_no_price_is_asked_where_nothing_can_be_faster(small: bool) -> None:
    """At .02 s, which the next byte costs the fastest, whatever holds too much takes 1.2 + 5 * .02 s at least; `good` takes 1.25."""
    there, prices = {"fast": (1.0, 100), "good": (1.2, 65), "lean": (2.0, 30)}, list[float]()

    def propose(aim: int | None, price_s: float) -> jointly_planned.Proposal[str]:
        prices.append(price_s)
        name = min(there, key=lambda name: there[name][0] + price_s * there[name][1])
        return jointly_planned.Proposal(name, *there[name], key=name)

    def finish(name: str, below_s: float) -> FinishedProgram:
        return attrs.evolve(tried(60, 60, more_s={"fast": 0.6, "good": 0.05, "lean": 0.0}[name]).done, byte_s=0.02)

    best, _ = jointly_planned.decide_jointly(propose, finish, budget_bytes=60, small=small)
    assert best is not None and best.proposal.plan == "good"
    assert prices[:2] == [0.0, 0.02] and (len(prices) > 2) == small


def test_the_oracle_by_hand() -> None:
    """One layer: w 2, x 1, dw 2 and a batch of 1. All stay: 3 s. In 5 units dw and w and the batch do, x is gone by then."""
    case = Case(((Layer(1.0, 1.0, 1.0, 1, 2),),), (), 2.0, 8.0)
    at = lambda units, **to: optimum(attrs.evolve(case, budget=units * 4 * UNIT + 8, **to))  # noqa: E731
    assert at(6) == 3.0
    assert at(5) == INF  # backward needs w, x, dw and the batch


def test_what_holds_more_and_takes_longer_is_on_no_line() -> None:
    assert jointly_planned._pareto_line([(100, 1.0), (60, 5.0), (10, 4.0), (10, 4.5), (40, 2.0)]) == [(10, 4.0), (40, 2.0), (100, 1.0)]


def seeds(*quick: int, sweep: tuple[int, ...]) -> list[Any]:
    """Of the seeds that show one thing those that take least are in the default run, the others in the sweep."""
    return [*quick, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in sweep)]


@pytest.mark.parametrize("seed", seeds(22, 61, 89, 116, 3208, sweep=(71, 165, 3032, 3255)))
def test_decisions_to_which_no_price_of_memory_leads(seed: int) -> None:
    """Found by prices alone: nothing that fits (22, 71, 3032), or what takes up to 2.8 times as long as it need."""
    assert jointly.counted([made(seed)]).near == 1


@pytest.mark.parametrize("seed", seeds(22, 3022, sweep=(42, 71, 102, 5099)))
def test_where_nothing_fits_operators_are_looked_at_that_are_too_large_alone(seed: int) -> None:
    """A larger step has too many shardings to look at all; prices alone find none here that fits."""
    assert Deciding(made(seed), few=False, room=False).seconds() == INF
    assert Deciding(made(seed), few=False).seconds() < INF


@pytest.mark.parametrize("seed", seeds(7079, sweep=(7185, 7195)))
def test_shardings_that_lean_to_one_kind_of_memory(seed: int) -> None:
    """Of a larger step; at one price for state and for what is made these take 5 to 25 % longer."""
    assert jointly.counted([made(seed)], few=False).near == 1


@pytest.mark.parametrize("count", [9, pytest.param(12, marks=pytest.mark.sweep)])
def test_decisions_are_within_five_percent_of_the_best_there_is(count: int) -> None:
    counts = jointly.counted(jointly.steps(range(count)))
    assert counts.near == len(counts.ratios) >= 6


@pytest.mark.sweep
@pytest.mark.parametrize(("seeds", "layers", "part", "few"), [row[1:] for row in jointly.ROWS], ids=[row[0] for row in jointly.ROWS])
def test_many_decisions(seeds: range, layers: int, part: float | None, few: bool) -> None:
    """`python -m bench jointly` has the counts."""
    counts = jointly.counted(jointly.steps(seeds, layers, part), few=few)
    assert counts.near == len(counts.ratios) >= 2


@pytest.mark.parametrize("count", [4, pytest.param(8, marks=pytest.mark.sweep)])
def test_never_slower_than_the_separate_choices(count: int) -> None:
    assert jointly.slower(jointly.steps(range(2000, 2000 + count))) == (count, 0)


def perceptron() -> tuple[object, object, object]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32)) for _ in range(2)))
    fn = lambda out, b: ((out - b) ** 2).mean()  # noqa: E731
    step, state = cf.train_step(cf.functional(net), cf.adapt(torch.optim.AdamW, lr=1e-2), loss=fn, inputs=lambda b: ((b,), {}))
    return step, state, torch.randn(256, 32)


def language(name: str) -> tuple[object, object, object]:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if name == "gpt2":
        config = transformers.GPT2Config(vocab_size=128, n_positions=64, n_embd=32, n_layer=2, n_head=2)
    else:
        config = transformers.LlamaConfig(
            vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2
        )
    net = transformers.AutoModelForCausalLM.from_config(config)
    step, state = cf.train_step(cf.functional(net), cf.adapt(torch.optim.AdamW, lr=1e-2), loss=lambda out: out.loss)
    ids = torch.randint(0, 128, (8, 64))
    return step, state, {"input_ids": ids, "labels": ids}


STEPS = {"mlp": perceptron, "gpt2": partial(language, "gpt2"), "llama": partial(language, "llama")}


def planned_s(chain: cf.Staged, args: Sequence[object], budget: int) -> float:
    """Seconds of the plan; inf where none is found."""
    try:
        low = chain.lower(*args)
    except (PlanError, CapacityError):
        return INF
    assert low.memory().peak_bytes["device"] <= budget
    return low.plan.cost_s


def compared(name: str, axes: dict[str, int], share: float) -> tuple[float, float]:
    """(seconds of the joint plan, the least of making again alone, moving alone, and sharding alone); inf where nothing is found."""
    step, *args = STEPS[name]()
    base = cf.shard(step, cf.Mesh(**axes, topology="8xa100-40g"))
    budget = int(base.lower(*args).memory().peak_bytes["device"] * share)
    joint = planned_s(cf.offload(cf.checkpoint(base), budget=budget), args, budget)
    apart = [cf.checkpoint(base, budget=budget), cf.offload(base, budget=budget), cf.offload(base, budget=budget, policy="device")]
    return joint, min(planned_s(chain, args, budget) for chain in apart)


def test_of_a_traced_step_the_joint_plan_is_no_slower_than_one_after_the_other() -> None:
    """Here making again is what a linear program proposes, and without copies it is faster than any stages with them."""
    joint, apart = compared("gpt2", {"dp": 1}, 0.85)
    assert joint < INF and joint <= apart * (1 + 1e-3)


@pytest.mark.sweep
@pytest.mark.parametrize("axes", [{"dp": 1}, {"dp": 2}, {"dp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("name", STEPS)
def test_of_traced_steps_the_joint_plan_is_no_slower_than_one_after_the_other(
    name: str, axes: dict[str, int], record_property: Callable[[str, object], None]
) -> None:
    found = [compared(name, axes, share) for share in (0.85, 0.65, 0.45)]
    held = [joint <= apart * (1 + 1e-3) for joint, apart in found]
    record_property("counts", {"tried": 3, "no slower": sum(held), "found a plan": sum(joint < INF for joint, _ in found)})
    assert all(held) and sum(joint < INF for joint, _ in found) >= 2


@pytest.mark.sweep
def test_a_traced_step_is_planned_as_well_without_a_look_at_all_its_shardings(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a larger one would be: prices, and what they do not lead to."""
    step, *args = perceptron()
    base = cf.shard(step, cf.Mesh(dp=2, topology="8xa100-40g"))
    budget = int(base.lower(*args).memory().peak_bytes["device"] * 0.45)
    looked = planned_s(cf.offload(cf.checkpoint(base), budget=budget), args, budget)
    monkeypatch.setattr(budget_search, "SMALL", 0)
    assert planned_s(cf.offload(cf.checkpoint(base), budget=budget), args, budget) <= looked * 1.05 < INF


@pytest.mark.parametrize("width, depth, rows", [(64, 4, 64), (32, 6, 32)])
@pytest.mark.parametrize("share", [0.97, 0.9])
def test_with_copies_a_step_is_no_slower_than_without_within_the_same_budget(width: int, depth: int, rows: int, share: float) -> None:
    """A budget limits buckets of collectives, which cost these steps a start each, and need not where larger ones fit."""
    net = nn.Sequential(*[part for _ in range(depth) for part in (nn.Linear(width, width), nn.GELU())])
    step_fn, state = training(net)
    data = {"x": cf.abstract((rows, width)), "y": cf.abstract((rows, width))}
    sharded = cf.shard(step_fn, cf.Mesh(dp=2), zero(3, "dp"))
    budget = int(sharded.lower(state, data).memory().peak_bytes["device"] * share)
    without = cf.checkpoint(sharded, budget=budget).lower(state, data)
    both = cf.checkpoint(cf.offload(sharded, budget=budget), budget=budget).lower(state, data)
    assert both.memory().peak_bytes["device"] <= budget
    assert both.lanes().end_s <= without.lanes().end_s * (1 + 1e-9)
