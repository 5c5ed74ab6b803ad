"""low.check_finite: the operator at which a NaN or an infinity is born, in forward, backward or update; masks are no finding."""

import inspect
from typing import Any

import pytest
import torch

import colofunc as cf
from colofunc.executors.launch import launch

MESH = cf.Mesh(dp=2, tp=2, topology="ideal")
MESHES = [cf.Mesh(dp=2, topology="ideal"), MESH]
ROWS = ({"w": "i o"}, "(dp b) i")


def loss_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
    h = x @ params["w"]
    return h.square().sum(1).sqrt().mean()  # its gradient at 0 is 0/0


LINE = f"test_finite.py:{inspect.getsourcelines(loss_fn)[1] + 2} in loss_fn"


def step_fn(state: Any, x: torch.Tensor) -> Any:
    loss, grads = cf.value_and_grad(loss_fn)(state, x)
    return {"w": state["w"] - 0.1 * grads["w"]}, loss


def arguments(zero_row: int | None = 5) -> tuple[Any, torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(8, 4, dtype=torch.float64, generator=gen)
    if zero_row is not None:
        x[zero_row] = 0.0
    return {"w": torch.randn(4, 4, dtype=torch.float64, generator=gen)}, x


def finite(fn: Any, *args: Any, mesh: cf.Mesh = MESH, specs: Any = None) -> Any:
    return cf.shard(fn, mesh, in_specs=specs).lower(*args).check_finite(*args)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_gradient_that_is_not_finite_though_the_loss_is(mesh: cf.Mesh) -> None:
    state, x = arguments()
    step = cf.shard(step_fn, mesh, in_specs=ROWS)
    assert float(step(state, x)[1]) > 0.0
    found = step.lower(state, x).check_finite(state, x)
    assert not found.finite
    assert (found.first.phase, found.first.line, found.first.kind) == ("backward", LINE, "inf")
    assert set(found.first.ranks) <= set(range(mesh.size // 2, mesh.size))  # row 5 is the second half's
    assert "backward" in str(found) and LINE in found.table()


@pytest.mark.parametrize("mesh", MESHES)
def test_a_finite_step(mesh: cf.Mesh) -> None:
    found = finite(step_fn, *arguments(None), mesh=mesh, specs=ROWS)
    assert found.finite and found.first is None and found.values > 5
    assert str(found).startswith("finite: ")


def test_log_of_zero_times_zero() -> None:
    def entropy(p: torch.Tensor) -> torch.Tensor:
        logs = p.log()
        return (p * logs).sum()

    p = torch.tensor([[0.5, 0.5], [0.0, 1.0]])
    found = finite(entropy, p)
    assert [(d.kind, d.operator) for d in found.found] == [("inf", "aten.log.default"), ("nan", "aten.mul.Tensor")]
    assert found.first.count >= 1 and "test_finite.py" in found.first.line


def test_masks_are_no_finding() -> None:
    def attend(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = scores.masked_fill(torch.ones(4, 4).triu(1).bool(), float("-inf")) + mask
        return torch.softmax(hidden, -1).sum(0)

    mask = torch.zeros(4, 4).masked_fill(torch.eye(4).flip(0).bool(), float("-inf"))
    mask[0] = 0.0
    assert finite(attend, torch.randn(4, 4), mask).finite
    mask[0, 0] = float("-inf")  # now the first row sees nothing
    found = finite(attend, torch.randn(4, 4), mask)
    assert (found.first.kind, found.first.operator.split(".")[1]) == ("nan", "_softmax")


def test_what_the_caller_gave_and_what_the_update_made() -> None:
    state, x = arguments(None)
    x[3, 1] = float("nan")
    first = finite(step_fn, state, x).first
    assert (first.name, first.kind, first.phase, first.made_by) == ("x", "nan", "input", "the caller")

    def update(state: Any, lr: torch.Tensor) -> Any:
        return {"w": state["w"] / lr}

    first = finite(update, state, torch.tensor(0.0, dtype=torch.float64)).first
    assert first.kind == "inf" and first.operator == "aten.div.Tensor" and first.count >= 16


def test_padding_is_not_looked_at() -> None:
    mesh = cf.Mesh(dp=2, topology="ideal")
    x = cf.distribute(torch.rand(5) + 1.0, "(dp b~)", mesh)
    assert cf.shard(lambda x: x.log(), mesh).lower(x).check_finite(x).finite


def on_two_ranks() -> Any:
    state, x = arguments()
    found = finite(step_fn, state, x, mesh=MESHES[0], specs=ROWS)
    return found.first.line, found.first.ranks, found.first.count, len(found.found)


@pytest.mark.dist
def test_real_ranks_agree() -> None:
    state, x = arguments()
    here = finite(step_fn, state, x, mesh=MESHES[0], specs=ROWS)
    one, other = launch(on_two_ranks, 2, timeout_s=120)
    assert one == other == (here.first.line, here.first.ranks, here.first.count, len(here.found))
