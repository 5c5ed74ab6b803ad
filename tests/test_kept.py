"""What is kept of a step that is prepared again: the whole plan of the same program, the decisions for other lengths."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from colofunc_plugins import tensor, zero

import colofunc as cf
from colofunc.compiler import planning
from colofunc.planner.sharding import assign
from colofunc.testing import check, models

MESH = cf.Mesh(dp=2, tp=2, topology="ideal")


class Searches:
    """How many plans were made, and how many operators and leaves had more than one way in each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open: list[int] = []
        within, allowed = planning.within, assign.allowed

        def counted(*args: Any, **options: Any) -> Any:
            self.open.append(0)
            return within(*args, **options)

        def looked_at(*args: Any) -> Any:
            options = allowed(*args)
            self.open[-1] += len(options) > 1
            return options

        monkeypatch.setattr(planning, "within", counted)
        monkeypatch.setattr(assign, "allowed", looked_at)


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
    assert len(searches.open) == 1


def test_state_that_requires_grad_until_it_is_placed_is_planned_once(searches: Searches) -> None:
    w, x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True), torch.randn(8, 4, dtype=torch.float64)
    check(cf.shard(descend, MESH), w, x)
    assert len(searches.open) == 1


@pytest.mark.parametrize("plans", [(), (zero(3, "dp"),), (tensor("1d", "tp"),)], ids=["found", "zero3", "1d"])
def test_another_length_decides_as_the_first_did(plans: Any, searches: Searches) -> None:
    step_fn, state = language()
    step = cf.shard(step_fn, MESH, *plans)
    with cf.testing.float64():
        state = step.init(state, tokens(8))
        first = step.lower(state, tokens(8)).plan
        second = step.lower(state, tokens(12)).plan
    assert len(searches.open) == 2 and searches.open[0] > 0
    assert searches.open[1] <= 2  # the batch itself, which has another shape
    assert {d.keys[0]: d.strategy for d in second.decisions} == {d.keys[0]: d.strategy for d in first.decisions}


def test_a_batch_of_another_order_is_planned_from_the_start(searches: Searches) -> None:
    step_fn, state = language()
    step = cf.shard(step_fn, MESH)
    step.lower(state, tokens(4))
    step.lower(state, tokens(12))
    assert searches.open[1] >= searches.open[0] > 0


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
        for length in (8, 12, 7, 5, 16):
            got = step(placed, tokens(length))[1]["loss"]
            assert abs(float(got) - float(step.eager(state, tokens(length))[1]["loss"])) <= 1e-10
