"""Budgets that are far too small are refused early, and the error says what no sharding goes below."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from least_named import named, peak

import colofunc as cf
from colofunc.compiler.budget import SMALL
from colofunc.compiler.completion import Completion
from colofunc.planner.candidate import FinishedProgram
from colofunc.planner.joint import FRONTIER_PRICES_LARGE, MAX_PRICES_FAR_OVER, Proposal, decide_jointly
from colofunc.program.ir import Program
from colofunc.program.tracing.tree import walk

NOTHING = Program((), (), (), {}, {}, (), "inplace")


def asked(peak: int, least: int, max_prices: int = 6) -> int:
    """How many shardings are proposed where all hold `peak` bytes, of a budget of 100."""
    proposed = list[Proposal[int]]()

    def propose(aim: int | None, price_s: float) -> Proposal[int]:
        proposed.append(Proposal(len(proposed), 1.0 + 0.3 * len(proposed) ** 2, 1000 - 10 * len(proposed), len(proposed)))
        return proposed[-1]

    finish = lambda plan, below_s: FinishedProgram(NOTHING, peak, 0.0)  # noqa: E731
    best, leanest = decide_jointly(propose, finish, 100, tries=1, max_prices=max_prices, lower_bound=lambda: least)
    assert best is None and leanest.done.peak_bytes == peak
    return len(proposed)


def test_where_every_sharding_needs_far_too_much_none_but_the_fastest_is_looked_at() -> None:
    assert asked(peak=500, least=201) == 1


def test_where_the_leanest_holds_far_too_much_few_prices_are_tried() -> None:
    assert asked(peak=201, least=0) == 2 + MAX_PRICES_FAR_OVER < asked(peak=199, least=0) == 2 + 6


def perceptron(mesh: cf.Mesh) -> tuple[cf.Staged, object, torch.Tensor]:
    net = torch.nn.Sequential(torch.nn.Linear(32, 64, bias=False), torch.nn.ReLU(), torch.nn.Linear(64, 32, bias=False))
    loss = lambda out, _: (out**2).mean()  # noqa: E731
    step, state = cf.train_step(cf.functional(net), cf.adapt(torch.optim.SGD, lr=0.1), loss, inputs=lambda b: ((b,), {}))
    return cf.shard(step, mesh), state, torch.randn(256, 32)


def test_the_error_says_what_no_sharding_goes_below() -> None:
    """256 x 64 floats on two ranks are 32768 bytes."""
    base, *args = perceptron(cf.Mesh(dp=2, topology="8xa100-40g"))
    with pytest.raises(cf.PlanError, match="however it is sharded one operator makes 32,768 B"):
        cf.offload(base, budget=10_000).lower(*args)


def test_the_error_says_what_its_arguments_take() -> None:
    """Four matrices of 16 KiB, and two moments of each."""
    net = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(4)))
    step, state = cf.train_step(cf.functional(net), cf.adapt(torch.optim.Adam, lr=0.1), lambda out: out.square().mean())
    base = cf.shard(step, cf.Mesh(dp=2, topology="8xa100-40g"))
    x = torch.randn(4, 64)
    taken = sum(leaf.nbytes for _, leaf in walk((state, x))) // 2
    with pytest.raises(cf.PlanError, match=f"however it is sharded its arguments take {taken:,} B"):
        cf.checkpoint(base, budget=10_000).lower(state, x)


def test_of_a_budget_that_is_far_too_small_few_shardings_are_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the least that is named can be given."""
    net = torch.nn.Sequential(*(layer for _ in range(14) for layer in (torch.nn.Linear(8, 8), torch.nn.Tanh())))
    step, state = cf.train_step(cf.functional(net), cf.adapt(torch.optim.SGD, lr=0.1), lambda out: out.square().mean())
    base, x = cf.shard(step, cf.Mesh(dp=2, topology="8xa100-40g")), torch.randn(64, 8)
    finished, finish = list[int](), Completion.finish

    def noted(self: Completion, *args: Any) -> FinishedProgram:
        finished.append(len(self.program.nodes))
        return finish(self, *args)

    monkeypatch.setattr(Completion, "finish", noted)
    least = named(cf.checkpoint(base, budget=1000), state, x)
    assert least is not None and finished[0] > SMALL and len(finished) <= 1 + 2 + FRONTIER_PRICES_LARGE
    assert peak(cf.checkpoint(base, budget=least), state, x) <= least


@pytest.mark.parametrize(
    ("ranks", "chain", "says"),
    [
        (2, lambda step: cf.offload(step, budget=10_000, policy="device"), "policy='auto' in cf.offload"),
        (1, lambda step: cf.offload(cf.checkpoint(step, policy="dots"), budget=10_000), "policy='auto' in cf.checkpoint"),
        (1, lambda step: cf.offload(step, budget=10_000, policy="bytes"), None),
        (1, lambda step: cf.checkpoint(cf.offload(step, budget=10_000)), None),
    ],
    ids=["offload", "checkpoint", "bytes", "free"],
)
def test_the_error_names_a_policy_that_forbids_what_needs_less(ranks: int, chain: Callable[[Any], Any], says: str | None) -> None:
    base, *args = perceptron(cf.Mesh(dp=ranks, topology="8xa100-40g"))
    with pytest.raises(cf.PlanError, match="the least found has a peak of") as refused:
        chain(base).lower(*args)
    assert says in str(refused.value) if says else "policy=" not in str(refused.value)
