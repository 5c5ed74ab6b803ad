"""A step with a loss scale that only one of mesh and one device skips: neither is wrong, and what each of them made is checked."""

from typing import Any

import pytest
import torch
from colofunc_plugins import zero

import colofunc as cf
from colofunc.testing.check import comparable_step, policy_of
from colofunc.testing.models import Language
from colofunc.transforms.precision import LOSS_SCALE


def test_a_dynamic_scale_overflows_in_the_sum_of_one_device_and_not_on_the_mesh() -> None:
    """The gradient of a norm's weight is twice 50272 in the second step: inf in float16, finite in the mesh's float32."""
    torch.manual_seed(0)
    step_fn, state = cf.train_step(cf.functional(Language()), cf.adapt(torch.optim.SGD, lr=1e-2), loss=lambda out: (out**2).mean())
    batch = torch.randint(0, 32, (8, 8))
    step = cf.shard(cf.precision(step_fn, "fp16"), cf.Mesh(dp=2), zero(3, "dp"))
    assert cf.testing.check(step, state, batch, steps=4).steps == 4


def linear(signs: tuple[float, ...], scale: float = 1.0) -> tuple[Any, Any, Any]:
    """A step whose gradient is a sum of `scale` times 40000 a row with that sign; rows in order on the ranks."""

    def step(state: Any, batch: Any) -> Any:
        loss, grads = cf.value_and_grad(lambda p: (batch["x"] @ p["w"]).float().mul(batch["y"]).sum())(state)
        return {name: p - 1e-5 * grads[name] for name, p in state.items()}, loss

    batch = {"x": torch.full((len(signs), 2), 40.0), "y": torch.tensor(signs)[:, None] * 1000.0}
    policy = cf.Policy(compute="fp16", loss_scale=scale)
    return cf.precision(cf.shard(step, cf.Mesh(dp=2), zero(1, "dp")), policy), {"w": torch.ones(2, 1)}, batch


OVERFLOWS = {"in the sum": (1.0, 1.0), "in a part": (1.0, 1.0, -1.0, -0.8), "nowhere": (1.0, -0.5), "everywhere": (2.0, 2.0)}
SKIPS = {"in the sum": (True, False), "in a part": (False, True), "nowhere": (False, False), "everywhere": (True, True)}


@pytest.mark.parametrize("where", OVERFLOWS)
def test_who_overflows_decides_alone_and_is_checked(where: str) -> None:
    step, state, batch = linear(OVERFLOWS[where])
    first = step.arguments((state,))[0]
    outs = step.eager(first, batch)[0], step(step.init(state, batch), batch)[0]
    assert tuple(bool(out["loss_scale"]["skipped"]) for out in outs) == SKIPS[where]
    assert cf.testing.check(step, state, batch).steps == 2


def test_compare_says_that_only_one_of_both_overflows() -> None:
    step, state, batch = linear(OVERFLOWS["in the sum"])
    found = step.compare(step.init(state, batch), batch)
    assert not found.equal and "Try: compare with a smaller loss scale" in str(found.first)
    step, state, batch = linear(OVERFLOWS["nowhere"])
    assert step.compare(step.init(state, batch), batch).equal


# ---- what is no overflow of sums is found ----


def given(step: Any, state: Any, batch: Any) -> tuple[Any, Any, Any]:
    """(the state with its scale, a step on the mesh, a step on one device)."""
    first = step.arguments((state,))[0]
    return first, lambda state: step(step.init(state, batch), batch), lambda state: step.eager(state, batch)


def compared(where: str, spoiled: Any) -> float:
    """`comparable` and `compare` where the mesh's step is spoiled: `spoiled(new state, loss scale it began with)`."""
    step, state, batch = linear(OVERFLOWS[where])
    first, on_mesh, on_device = given(step, state, batch)

    def mesh_run(state: Any) -> Any:
        new, loss = on_mesh(state)
        new = {k: v.full() if k != "loss_scale" else {n: x.full() for n, x in v.items()} for k, v in new.items()}
        return spoiled(new, float(state["loss_scale"]["scale"])), loss

    policy = policy_of(step)
    assert policy is not None
    got, expected, _ = comparable_step(policy, first, mesh_run(first), on_device(first), 2, mesh_run, on_device, "")
    return cf.testing.compare(got, expected)


def half_of_the_gradient(new: Any, scale: float) -> Any:
    return new | {"w": (new["w"] + torch.ones(2, 1)) / 2}


def taken_with_a_rank_s_infinity(new: Any, scale: float) -> Any:
    return new | {"w": torch.full_like(new["w"], -float("inf")), "loss_scale": new["loss_scale"] | {"skipped": torch.tensor(0)}}


def skipped_and_changed(new: Any, scale: float) -> Any:
    return new | {"w": new["w"] - 1e-3} if scale == 1.0 else new


def always_skipped(new: Any, scale: float) -> Any:
    return new | {"w": torch.ones(2, 1), "loss_scale": new["loss_scale"] | {"skipped": torch.tensor(1), "good": torch.tensor(0)}}


def another_scale(new: Any, scale: float) -> Any:
    return new | {"loss_scale": new["loss_scale"] | {"scale": torch.tensor(2.0)}}


WRONG = [
    ("in the sum", half_of_the_gradient, "differs by"), ("in a part", half_of_the_gradient, "differs by"),
    ("everywhere", taken_with_a_rank_s_infinity, "differs by inf"), ("in the sum", another_scale, "scale.*differs by"),
    ("in a part", skipped_and_changed, "state of a step that was skipped"), ("nowhere", always_skipped, "do not skip the same steps"),
    ("in the sum", taken_with_a_rank_s_infinity, "differs by inf"),
]  # fmt: skip


@pytest.mark.parametrize(("where", "spoiled", "message"), WRONG)
def test_a_wrong_step_is_found_beside_an_overflow(where: str, spoiled: Any, message: str) -> None:
    assert compared(where, lambda new, scale: new) < 1e-3
    with pytest.raises(cf.CheckError, match=message):
        compared(where, spoiled)


def test_states_and_records_are_taken_apart_and_joined() -> None:
    record = {"scale": torch.tensor(4.0), "good": torch.tensor(1), "skipped": torch.tensor(0)}
    for bare in ({"w": torch.ones(2)}, (torch.ones(2),), [torch.ones(2)]):
        assert LOSS_SCALE.split(LOSS_SCALE.join(bare, record)) == (record, bare)
