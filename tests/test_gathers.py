"""Parameters that forward and backward read in 8 bits, and that ranks are sent so."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch
from colofunc_plugins import tensor, zero
from torch import Tensor, nn

import colofunc as cf
from colofunc.errors import InputError, PlanError
from colofunc.ops.saved_activations import NUMBERS, ScaleGroups, group_of, pack_saved, widen_saved
from colofunc.program.passes.rounded_parameters import gathered_bytes, groups_of

Chain = Callable[[Any], Any]
LR = 0.5
DP, DT, PP = (cf.Mesh(**axes, topology="8xa100-80g") for axes in ({"dp": 2}, {"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}))
LARGE = ("0.weight", "2.weight", "4.weight")


def training() -> tuple[Any, Any, Tensor]:
    torch.manual_seed(0)
    layers = (nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 64))
    model = cf.functional(nn.Sequential(*layers))
    step, state = cf.train_step(model, cf.adapt(torch.optim.SGD, lr=LR), lambda out: out.square().mean())
    return step, state, torch.randn(16, 64)


def on(mesh: cf.Mesh, *plans: Any) -> Chain:
    return lambda step: cf.shard(step, mesh, *plans)


def chained(step: Any, *transforms: Chain) -> Any:
    return reduce(lambda made, transform: transform(made), transforms, step)


def narrow(form: str = "int8") -> Chain:
    return lambda step: cf.quantize(step, gathers=form)


def rounded(weight: Tensor, form: str) -> Tensor:
    groups = group_of(tuple(weight.shape))
    assert groups is not None
    packed = pack_saved(weight, groups.dim, groups.width, NUMBERS[form])
    wide: Tensor = widen_saved(*packed, NUMBERS[form], weight.dtype)
    return wide


@pytest.mark.parametrize("form", NUMBERS)
def test_forward_and_backward_read_rounded_parameters_and_updates_read_them_as_they_are(form: str) -> None:
    with cf.testing.float64():
        step, state, batch = training()
        params = {name: rounded(p, form) if name in LARGE else p for name, p in state["params"].items()}
        assert all(not torch.equal(params[name], state["params"][name]) for name in LARGE)
        moved, wanted = step({**state, "params": params}, batch)
        kept, metrics = narrow(form)(cf.shard(step, DP, zero(3, "dp")))(state, batch)
        torch.testing.assert_close(metrics["loss"].full(), wanted["loss"])
        for name, p in state["params"].items():
            torch.testing.assert_close(kept["params"][name].full() - p, moved["params"][name] - params[name], rtol=1e-9, atol=1e-12)


def test_a_number_is_off_by_no_more_than_is_said() -> None:
    x = torch.randn(64, 256, dtype=torch.float64) * torch.logspace(-3, 3, 64, dtype=torch.float64).unsqueeze(1)
    largest = x.unflatten(1, (2, 128)).abs().amax(2).repeat_interleave(128, 1)
    assert bool(((rounded(x, "int8") - x).abs() <= largest / 254 * (1 + 1e-12)).all())
    assert bool(((rounded(x, "fp8") - x).abs() <= torch.maximum(x.abs() / 16, largest / 458752) * (1 + 1e-12)).all())


ZERO3 = on(DP, zero(3, "dp"))
BESIDE: dict[str, tuple[Chain, ...]] = {
    "zero 1": (on(DP, zero(1, "dp")),),
    "zero 2": (on(DP, zero(2, "dp")),),
    "zero 3": (ZERO3,),
    "tensor": (on(DT, zero(3, "dp"), tensor("1d", "tp")),),
    "checkpoint": (ZERO3, lambda step: cf.checkpoint(step, policy="nothing")),
    "offload": (ZERO3, lambda step: cf.offload(step, policy="host")),
    "accumulate": (ZERO3, lambda step: cf.accumulate(step, microbatches=2)),
    "pipeline": (on(PP, zero(1, "dp")), lambda step: cf.pipeline(step, microbatches=2)),
    "gradients and activations": (ZERO3, lambda step: cf.quantize(step, wire="int8", activations="int8")),
}
GATHERED = ("zero 3", "tensor", "checkpoint", "offload", "accumulate", "gradients and activations")


@pytest.mark.filterwarnings("ignore:the plan uses")
@pytest.mark.parametrize("name", BESIDE)
def test_it_stands_beside_every_other_transform_in_either_order(name: str) -> None:
    """One program in both orders; it computes what one device does that rounds alike, and gathers a byte a number."""
    step, state, batch = training()
    last, first = chained(step, *BESIDE[name], narrow()), chained(step, narrow(), *BESIDE[name])
    low, other = (made.lower(state, batch) for made in (last, first))
    assert low.text() == other.text()
    sent, wide = gathered_bytes(low.program)
    assert (sent > 0) == (name in GATHERED) and wide == 4 * sent
    if "gradients" not in name:  # whose terms are rounded once each
        cf.testing.check(last, state, batch)


def test_a_table_that_ranks_share_by_columns_has_groups_that_they_do_not_cut() -> None:
    assert groups_of((768, 3072)) == ScaleGroups(1, 128) and groups_of((50257, 768)) == ScaleGroups(1, 32)
    assert groups_of((64, 64, 8, 8)) == group_of((64, 64, 8, 8)) and groups_of((4096,)) is None
    model = cf.functional(nn.Embedding(33, 256))
    step, state = cf.train_step(model, cf.adapt(torch.optim.SGD, lr=LR), lambda out: out.square().mean())
    made, ids = narrow()(cf.shard(step, cf.Mesh(dp=8), zero(3, "dp"))), torch.arange(32).view(8, 4)
    low = made.lower(state, ids)
    assert gathered_bytes(low.program)[0] == 33 * 256 * 7 // 8
    cf.testing.check(made, state, ids)


def test_every_large_gather_of_parameters_is_narrow_and_no_more_is_held() -> None:
    """Where the plan gathers once for both phases it still does, and keeps no more."""
    step, state, batch = training()
    plain, low = ZERO3(step).lower(state, batch), narrow()(ZERO3(step)).lower(state, batch)
    values = low.program.values
    gathered = [values[node.refs[0]] for node in low.program.nodes if "all_gather" in node.target]
    assert all(value.dtype is torch.int8 or value.nbytes < 4096 for value in gathered)
    parameters = sum(state["params"][name].numel() for name in LARGE)
    assert sum(value.nbytes for value in gathered if value.dtype is torch.int8) == parameters // 2
    assert low.memory().peak_bytes["device"] <= 1.01 * plain.memory().peak_bytes["device"]
    assert any(note.startswith("parameters are gathered in int8: ") for note in low.plan.notes)


def test_a_plan_that_gathers_nothing_says_so() -> None:
    step, state, batch = training()
    notes = narrow()(on(DP, zero(1, "dp"))(step)).lower(state, batch).plan.notes
    assert "parameters in int8 where they are read: none is gathered so, and gathers= only rounds them" in notes


def test_bad_input_is_said_at_once() -> None:
    step, _, _ = training()
    with pytest.raises(InputError, match=r"cf\.quantize\(gathers='int9'\): parameters are gathered in 'int8' or 'fp8', or as they are"):
        cf.quantize(step, gathers="int9")
    with pytest.raises(InputError, match=r"cf\.quantize\(gathers=8\): parameters are gathered in 'int8' or 'fp8', or as they are"):
        cf.quantize(step, gathers=8)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"quantize\(gathers=\.\.\.\) is applied twice to one step\. Try: one of them"):
        cf.quantize(cf.quantize(step, gathers="int8"), gathers="fp8")
