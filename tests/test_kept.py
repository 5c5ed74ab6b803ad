"""What is kept of a step that is prepared again: the whole plan of the same program, the decisions for other lengths."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from colofunc_plugins import tensor, zero

import colofunc as cf
from colofunc.compiler import budget, named_candidates, planning
from colofunc.compiler.completion import Completion
from colofunc.planner import joint
from colofunc.testing import check, models

MESH = cf.Mesh(dp=2, tp=2, topology="ideal")


class Searches:
    """`plans`: how many were made from nothing. `finished`: shardings that were completed, of any plan."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plans, self.finished = 0, 0
        search, finish = planning.plan_for_budget, Completion.finish

        def planned(*args: Any, **options: Any) -> Any:
            self.plans += 1
            return search(*args, **options)

        def completed(*args: Any) -> Any:
            self.finished += 1
            return finish(*args)

        monkeypatch.setattr(named_candidates, "MOST_NODES", 0)  # what is counted beside a search is no part of it
        monkeypatch.setattr(planning, "plan_for_budget", planned)
        monkeypatch.setattr(Completion, "finish", completed)


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> Searches:
    return Searches(monkeypatch)


def tokens(length: int, rows: int = 4) -> torch.Tensor:
    return torch.randint(0, 32, (rows, length), generator=torch.Generator().manual_seed(length))


def next_token(out: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def language() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = cf.functional(models.Language().double())
    return cf.train_step(model, cf.adapt(torch.optim.SGD, lr=0.1), loss=next_token, inputs=lambda batch: ((batch,), {}))


def descend(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return w.detach() - 0.1 * torch.func.grad(lambda w: ((x @ w) ** 2).mean())(w)


def on_the_host(step: Any) -> Any:
    return cf.offload(step, policy="host")


@pytest.mark.parametrize("wrap", [lambda step: step, cf.checkpoint, on_the_host], ids=["plain", "checkpoint", "offload"])
def test_check_plans_once(wrap: Any, searches: Searches) -> None:
    step_fn, state = language()
    with cf.testing.float64():
        check(wrap(cf.shard(step_fn, MESH, zero(3, "dp"))), state, tokens(8))
    assert searches.plans == 1


def test_state_that_requires_grad_until_it_is_placed_is_planned_once(searches: Searches) -> None:
    w, x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True), torch.randn(8, 4, dtype=torch.float64)
    check(cf.shard(descend, MESH), w, x)
    assert searches.plans == 1


@pytest.mark.parametrize("plans", [(), (zero(3, "dp"),), (tensor("1d", "tp"),)], ids=["found", "zero3", "1d"])
def test_state_stays_where_it_is_at_another_length(plans: Any, searches: Searches) -> None:
    step_fn, state = language()
    step = cf.shard(step_fn, MESH, *plans)
    with cf.testing.float64():
        state = step.init(state, tokens(8))
        first = step.lower(state, tokens(8)).plan
        second = step.lower(state, tokens(12)).plan
    assert searches.plans == 1
    assert [leaf.spec for leaf in second.inputs if leaf.role != "batch"] == [leaf.spec for leaf in first.inputs if leaf.role != "batch"]


def perceptron(width: int) -> tuple[Any, Any]:
    layers = [make for _ in range(2) for make in (torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width))]
    model = cf.functional(torch.nn.Sequential(*layers))
    return cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=0.1), loss=lambda out, x: out.square().mean(), inputs=lambda x: ((x,), {}))


@pytest.mark.parametrize("width, rows", [(64, 256), (192, 256), (256, 1024)])
def test_another_length_is_as_fast_as_planned_from_nothing(width: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_candidates, "MOST_NODES", 0)  # a named plan that wins would be the same for both lengths
    step_fn, state = perceptron(width)
    mesh, batch = cf.Mesh(dp=2, tp=2), cf.abstract((2 * rows, width))
    step = cf.shard(step_fn, mesh)
    first = step.lower(state, cf.abstract((rows, width))).plan
    new = cf.shard(step_fn, mesh).lower(state, batch).plan.cost_s
    as_the_first = cf.shard(step_fn, mesh).with_plan(first).lower(state, batch).plan.cost_s
    assert as_the_first > 1.01 * new  # else nothing had to be found
    assert step.lower(state, batch).plan.cost_s <= 1.01 * new


def test_a_large_step_is_searched_from_the_plan_of_the_first_length(searches: Searches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "MEDIUM", 0)  # every step is a large one
    step_fn, state = language()
    step, batch = cf.shard(step_fn, cf.Mesh(dp=2, tp=2)), tokens(12, rows=16)
    step.lower(state, tokens(8, rows=16))
    second = step.lower(state, batch).plan.cost_s
    assert searches.plans == 1
    assert second <= 1.01 * cf.shard(step_fn, cf.Mesh(dp=2, tp=2)).lower(state, batch).plan.cost_s


def test_a_second_length_keeps_to_its_budget_with_little_work(searches: Searches) -> None:
    step_fn, state = language()
    batch, mesh = tokens(12, rows=16), cf.Mesh(dp=2, topology="ideal")  # each sharding is finished with a search of its own
    whole = cf.shard(step_fn, mesh).lower(state, batch).memory().peak_bytes["device"]
    least = int(0.8 * whole)
    step = cf.checkpoint(cf.shard(step_fn, mesh), budget=least)
    step.lower(state, tokens(8, rows=16))
    before = searches.finished
    second = step.lower(state, batch)
    assert searches.finished - before <= 2 + joint.MAX_PRICES_FROM_KNOWN
    new = cf.checkpoint(cf.shard(step_fn, mesh), budget=least).lower(state, batch)
    assert second.memory().peak_bytes["device"] <= least
    assert second.plan.cost_s <= 1.01 * new.plan.cost_s


def test_a_batch_of_another_order_is_planned_from_the_start(searches: Searches) -> None:
    step_fn, state = language()
    step = cf.shard(step_fn, MESH)
    step.lower(state, tokens(4))
    step.lower(state, tokens(12))
    assert searches.plans == 2


def test_what_the_first_length_decided_and_the_second_cannot_do_is_planned_from_the_start() -> None:
    step = cf.shard(lambda x: (x * 2).sum(0), cf.Mesh(dp=2, topology="ideal"))
    for rows in (4, 6, 5, 7, 8):  # 5 and 7 rows cannot be split evenly
        x = torch.randn(rows, 3, dtype=torch.float64)
        torch.testing.assert_close(step(x).full(), (x * 2).sum(0))


def test_a_large_constant_that_has_changed_is_not_kept() -> None:
    table = torch.zeros(300, 300, dtype=torch.float64)  # larger than what the program's hash looks at
    step = cf.shard(lambda x: x + table, cf.Mesh(dp=2))
    x = torch.randn(300, 300, dtype=torch.float64)
    torch.testing.assert_close(step(x).full(), x)
    table += 1
    torch.testing.assert_close(step(x).full(), x + 1)


@pytest.mark.parametrize("plans", [(), (zero(3, "dp"),), (tensor("1d", "tp", sequence=True),)], ids=["found", "zero3", "1d+sp"])
def test_numbers_at_many_lengths(plans: Any) -> None:
    step_fn, state = language()
    step = cf.shard(step_fn, MESH, *plans, donate=())
    with cf.testing.float64():
        placed = step.init(state, tokens(8))
        for length in (8, 7, 12):  # the first one, one that two ranks cannot split evenly, and one that they can
            got = step(placed, tokens(length))[1]["loss"]
            assert abs(float(got) - float(step.eager(state, tokens(length))[1]["loss"])) <= 1e-10
