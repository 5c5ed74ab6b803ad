"""Frozen weights lie once, in the dtype in which a step reads them."""

import itertools
from typing import Any

import pytest
import torch
from colofunc_plugins import zero
from torch import nn

import colofunc as cf
from colofunc.functional.lora import lora

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def adapters(dtype: torch.dtype, width: int = 64, lazy: bool = False) -> tuple[Any, Any, Any, Any]:
    """A step that trains adapters beside frozen weights, which were loaded in `dtype`."""
    torch.manual_seed(0)

    def build() -> nn.Module:
        layers = (layer for _ in range(2) for layer in (nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()))
        return nn.Sequential(*layers).to(dtype)

    model = lora(cf.functional(cf.lazy(build) if lazy else build()), where="*", rank=2)
    step, state = cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=1e-2), loss=lambda out: out.float().square().mean())
    return step, state, torch.randn(8, width), model


def frozen(low: Any) -> dict[str, Any]:
    return {low.program.values[i].name: low.program.values[i] for i in low.hidden_ids}


@pytest.mark.parametrize("lazy", [False, True])
def test_frozen_weights_under_a_precision_take_what_they_take_when_loaded_in_it(lazy: bool) -> None:
    lows = []
    for dtype in (F32, BF16):
        step, state, batch, model = adapters(dtype, lazy=lazy)
        whole = cf.shard(step, cf.Mesh(topology="a100-40g"))
        lows.append(cf.precision(cf.offload(whole, policy="host"), "bf16").lower(state, batch))
    wide, narrow = lows
    assert wide.memory().peak_bytes == narrow.memory().peak_bytes
    assert wide.cost().seconds == narrow.cost().seconds
    assert sum(value.nbytes for value in frozen(wide).values()) == sum(t.nbytes for t in model.frozen.values())


CHAINS = {
    "alone": lambda step: cf.shard(step, cf.Mesh(dp=1)),
    "zero": lambda step: cf.shard(step, cf.Mesh(dp=2), zero(3, "dp")),
    "offloaded": lambda step: cf.offload(cf.shard(step, cf.Mesh(dp=2)), policy="host"),
    "microbatches": lambda step: cf.accumulate(cf.shard(step, cf.Mesh(dp=2)), microbatches=2),
    "made again": lambda step: cf.checkpoint(cf.shard(step, cf.Mesh(dp=1)), policy="nothing"),
}


@pytest.mark.parametrize("chain, precision", [*((chain, "bf16") for chain in CHAINS), ("alone", "fp16")])
def test_beside_other_transforms_no_frozen_weight_is_cast_in_the_step(chain: str, precision: str) -> None:
    step, state, batch, _ = adapters(F32)
    staged = cf.precision(CHAINS[chain](step), precision)
    low = staged.lower(state, batch)
    dtype = BF16 if precision == "bf16" else F16
    assert {value.dtype for value in frozen(low).values()} == {dtype}
    placed = staged.init(state, batch)
    assert low.compare(placed, batch).equal
    want, got = staged.eager(state, batch), staged(placed, batch)
    torch.testing.assert_close(got[1]["loss"].full(), want[1]["loss"], rtol=2**-7, atol=0.0)


def test_an_override_keeps_a_frozen_weight_as_it_was_loaded() -> None:
    step, state, batch, _ = adapters(F32)
    policy = cf.Policy(compute="bf16", overrides={"3": "fp32"})
    found = frozen(cf.precision(cf.shard(step, cf.Mesh(dp=1)), policy).lower(state, batch))
    assert {name for name, value in found.items() if value.dtype is F32} == {"frozen.3.weight", "frozen.3.bias"}


READS = {
    "bf16": lambda x, w: (x.to(BF16) @ w.to(BF16)).float(),
    "bf16 again": lambda x, w: (w.to(BF16) * 2).float() @ x.T,
    "fp16": lambda x, w: (x.to(F16) * w.to(F16)).float(),
    "as it is": lambda x, w: x @ w,
    "wider": lambda x, w: (x.double() @ w.double()).float(),
    "whole numbers": lambda x, w: x * w.to(torch.int32),
}


@pytest.mark.parametrize("names", [names for n in (1, 2) for names in itertools.combinations(READS, n)], ids=" and ".join)
def test_what_is_captured_lies_narrow_only_where_every_read_is(names: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(160, 160), torch.randn(160, 160)  # large enough to be an input

    def step(x: torch.Tensor) -> Any:
        return [READS[name](x, weight) for name in names]

    staged = cf.shard(step, cf.Mesh(dp=1))
    (value,) = frozen(staged.lower(x)).values()
    dtypes = {BF16 if name.startswith("bf16") else F16 if name == "fp16" else F32 for name in names}
    assert value.dtype is (dtypes.pop() if len(dtypes) == 1 else F32)
    for want, got in zip(step(x), staged(x), strict=True):
        assert torch.equal(got.full(), want)


def test_two_steps_with_two_precisions_each_read_their_own() -> None:
    step, state, batch, model = adapters(F32)
    narrow = cf.precision(cf.shard(step, cf.Mesh(dp=1)), "bf16")
    narrow(narrow.init(state, batch), batch)
    plain = cf.shard(lambda params, x: model.apply(params, {}, x)[0], cf.Mesh(dp=1))
    torch.testing.assert_close(plain(state["params"], batch).full(), model.apply(state["params"], {}, batch)[0])


def test_a_model_without_values_may_be_in_the_dtype_that_is_computed_in() -> None:
    """Autocast knows nothing of the device on which weights without data lie."""
    with torch.device("meta"):
        step, state, _, _ = adapters(BF16)
    low = cf.precision(cf.shard(step, cf.Mesh(dp=2)), "bf16").lower(state, cf.abstract((8, 64)))
    assert {value.dtype for value in frozen(low).values()} == {BF16}
