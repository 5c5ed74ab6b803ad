"""What `cf.testing.check` allows in float32 and half precisions: what rounding does in this step, and no more."""

from typing import Any

import pytest
import torch
from colofunc_plugins import zero

import colofunc as cf
from colofunc.errors import CheckError
from colofunc.testing.check import OutputTolerances
from colofunc.testing.models import Language

MESH = cf.Mesh(dp=2)


def training(optimizer: Any = torch.optim.AdamW) -> tuple[Any, Any, torch.Tensor]:
    torch.manual_seed(0)
    step_fn, state = cf.train_step(cf.functional(Language()), cf.adapt(optimizer, lr=1e-2), loss=lambda out: (out**2).mean())
    return step_fn, state, torch.randint(0, 32, (8, 8))


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("policy", [None, "bf16", cf.Policy(compute="fp16", loss_scale=16.0)], ids=["float32", "bf16", "fp16"])
def test_a_right_step_needs_no_tolerance_by_hand(optimizer: Any, policy: Any) -> None:
    """Adam moves a weight by its rate where only rounding is left of a gradient; that is no mistake."""
    step_fn, state, batch = training(optimizer)
    step = step_fn if policy is None else cf.precision(step_fn, policy)
    assert cf.testing.check(cf.shard(step, MESH, zero(3, "dp")), state, batch, steps=2).steps == 2


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_a_right_step_in_half_precision_needs_none_inside_float64_either(optimizer: Any, policy: Any) -> None:
    """Masters and moments are float64 there, and what they are made of is not."""
    step_fn, state, batch = training(optimizer)
    with cf.testing.float64():
        assert cf.testing.check(cf.shard(cf.precision(step_fn, policy), MESH, zero(3, "dp")), state, batch, steps=2).steps == 2


def test_a_leaf_is_allowed_what_it_was_computed_through() -> None:
    step = cf.shard(lambda x: (x * 2, x.to(torch.bfloat16).double() * 2, x.float().sum(0).double()), MESH, in_specs=("(dp a) b",))
    x = torch.randn(4, 4, dtype=torch.float64)
    bounds = OutputTolerances(step.lower(x), (x,), 0)
    allowed = [bounds.of(k, out) for k, out in enumerate(step.eager(x))]
    assert allowed[0] == 1e-10 and allowed[2] == 1e-5
    assert isinstance(allowed[1], float) and 2.0**-9 < allowed[1] < 0.1
    with pytest.raises(CheckError, match=r"out.0: differs by.*allowed 1e-10"):
        cf.testing.compare([y + 1e-6 for y in step.eager(x)], list(step.eager(x)), "out", bounds=bounds)


def test_what_is_made_of_float32_constants_alone_is_made_once_for_all_ranks() -> None:
    table = torch.linspace(-1, 1, 1 << 15) + 3.0
    step = cf.shard(lambda x: (x * table.square().sum(), x * 2), cf.Mesh(dp=2, topology="ideal"), in_specs=("(dp a)",))
    with cf.testing.float64():
        assert cf.testing.check(step, torch.randn(8, dtype=torch.float64)).worst < 1e-10


@pytest.mark.parametrize("policy", ["bf16", cf.Policy(compute="fp16", loss_scale=16.0)], ids=["bf16", "fp16"])
def test_a_wrong_step_is_found_in_half_precision(policy: Any) -> None:
    """Half of a gradient is missing: within the dtype's bound times max(1, ...), and not within what rounding does."""
    step_fn, state, batch = training(torch.optim.SGD)
    step = cf.shard(cf.precision(step_fn, policy), MESH, zero(3, "dp"))
    bounds = OutputTolerances(step.lower(state, batch), step.arguments((state, batch)), 0)
    looked = 0
    expected, _ = step.eager(state, batch)
    for position, (name, new) in enumerate(expected["params"].items()):
        change = float((new - state["params"][name]).abs().max())
        if change > 1e-3:
            allowed = bounds.of(position, new)
            assert isinstance(allowed, torch.Tensor) and float(allowed.max()) < 0.5 * change, name
            looked += 1
    assert looked > 5


def test_small_results_in_half_precision_are_not_compared_with_one() -> None:
    step = cf.shard(lambda x: (x * 2,), MESH, in_specs=("(dp a) b",))
    x = torch.full((4, 4), 1e-3, dtype=torch.bfloat16)
    bounds = OutputTolerances(step.lower(x), (x,), 0)
    assert cf.testing.check(step, x).worst == 0.0
    with pytest.raises(CheckError, match="differs by"):
        cf.testing.compare((x,), (x * 2,), "out", bounds=bounds)
    assert cf.testing.compare((x,), (x * 2,), "out") < 2e-2  # which the dtype's own bound lets pass


def test_the_hint_names_float64_where_rounding_may_be_the_reason() -> None:
    wrong, right = {"x": torch.ones(2) * 1.1}, {"x": torch.ones(2)}
    with pytest.raises(CheckError, match=r"with cf\.testing\.float64\(\)"):
        cf.testing.compare(wrong, right)
    with pytest.raises(CheckError) as caught:
        cf.testing.compare({"x": wrong["x"].double()}, {"x": right["x"].double()})
    assert "float64()" not in str(caught.value) and "step.lower" in str(caught.value)


def test_errors_of_check_have_the_plan_s_names_of_leaves() -> None:
    step_fn, state, batch = training(torch.optim.SGD)
    step = cf.shard(step_fn, MESH, zero(3, "dp"))
    with pytest.raises(CheckError) as caught:
        cf.testing.check(step, state, batch, tolerance=-1.0)
    names = {leaf.name for leaf in step.lower(state, batch).plan.inputs}
    said = [line.split(": ")[1].split(" [")[0] for line in str(caught.value).splitlines() if line.startswith("step 0: ")]
    assert len(said) == 8 and set(said) <= names
