"""RMS norm in a step: torch's numbers and gradients, in one operator forward and one for each gradient, on meshes too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import colofunc as cf
from colofunc.ops.canonical import single_device
from colofunc.ops.norms import rms_norm

FORMS = {
    "last": (((6, 4, 8), (8,)), True, 1e-5),
    "two dims": (((6, 4, 8), (4, 8)), True, 1e-6),
    "all dims": (((4, 8), (4, 8)), True, 1e-5),
    "no weight": (((6, 8), (8,)), False, 1e-3),
    "torch's eps": (((6, 8), (8,)), True, None),
}  # fmt: skip


def operands(form: str, dtype: torch.dtype) -> tuple[Tensor, tuple[int, ...], Tensor | None, float | None]:
    (size, shape), has_weight, eps = FORMS[form]
    x = torch.randn(size, dtype=dtype)
    x[0] = 0  # where eps decides alone
    return x, shape, torch.randn(shape, dtype=dtype) if has_weight else None, eps


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
def test_numbers_and_gradients_are_those_of_torch(form: str, dtype: torch.dtype) -> None:
    x, shape, weight, eps = operands(form, dtype)
    leaves = [t for t in (x, weight) if t is not None]
    g = torch.randn(x.shape, dtype=dtype)

    def found() -> list[Tensor]:
        given = [t.clone().requires_grad_() for t in leaves]
        y = F.rms_norm(given[0], shape, given[1] if weight is not None else None, eps)
        return [y, *torch.autograd.grad(y, given, g)]

    want = found()
    with single_device():
        got = found()
    assert got[0].dtype == dtype and "rms_norm" in type(got[0].grad_fn).__name__
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * float(b.abs().max()))


@pytest.mark.parametrize("form", ["last", "two dims", "no weight"])
def test_second_derivatives(form: str) -> None:
    x, shape, weight, eps = operands(form, torch.float64)
    x = x[-2:] + 0.5
    given = [t.requires_grad_() for t in (x, weight) if t is not None]

    def of(x: Tensor, w: Tensor | None = None) -> Tensor:
        return rms_norm.apply(x, shape, w, eps)[0]

    assert torch.autograd.gradcheck(of, given) and torch.autograd.gradgradcheck(of, given)


def step(p: dict[str, Tensor], x: Tensor) -> Any:
    def loss(p: dict[str, Tensor], x: Tensor) -> Tensor:
        h = F.rms_norm(x, x.shape[-1:], p["norm"], 1e-5) @ p["up"]
        return (F.rms_norm(h, h.shape[-1:]) @ p["down"]).square().sum()

    return cf.value_and_grad(loss, argnums=(0, 1))(p, x)


def parameters() -> dict[str, Tensor]:
    sizes = {"norm": (8,), "up": (8, 12), "down": (12, 8)}
    return {name: torch.randn(size, dtype=torch.float64) for name, size in sizes.items()}


def test_a_step_keeps_its_input_and_a_number_a_row() -> None:
    low = cf.shard(step, cf.Mesh()).lower(parameters(), torch.randn(4, 6, 8, dtype=torch.float64))
    targets = [node.target for node in low.program.nodes]
    assert [targets.count(f"colofunc.rms_norm{what}") for what in ("", "_dx", "_dw")] == [2, 2, 1]
    assert not any("rsqrt" in target or "mean" in target for target in targets)


@pytest.mark.parametrize("spec", ["(dp b) (tp s) d", "(dp b) s (tp d)", "b s (dp tp d)"])
def test_on_a_mesh(spec: str) -> None:
    p, x = parameters(), torch.randn(4, 6, 8, dtype=torch.float64)
    cf.testing.check(cf.shard(step, cf.Mesh(dp=2, tp=2), in_specs=(None, spec)), p, x)


def test_a_model_with_rms_norm_trains() -> None:
    model = cf.functional(nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8), nn.Linear(8, 8), nn.RMSNorm(8, elementwise_affine=False)).double())
    step_fn, state = cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=0.1), lambda y: y.sin().mean())
    cf.testing.check(cf.shard(step_fn, cf.Mesh(dp=2)), state, torch.randn(4, 8, dtype=torch.float64), steps=2)


@pytest.mark.parametrize("call", [
    lambda x: F.rms_norm(x, (8,), torch.ones(8, dtype=torch.float64)),  # of another dtype
    lambda x: F.rms_norm(x[:0], (8,)),
    lambda x: torch.func.jvp(lambda x: F.rms_norm(x, (8,)), (x,), (torch.ones_like(x),))[1],
], ids=["another dtype", "empty", "forward mode"])  # fmt: skip
def test_the_rest_is_left_to_torch(call: Any) -> None:
    x = torch.randn(4, 8)
    want = call(x)
    with single_device():
        torch.testing.assert_close(call(x), want)
    torch.testing.assert_close(cf.shard(call, cf.Mesh())(x).full(), want)
    with pytest.raises(RuntimeError, match="normalized_shape"), single_device():
        F.rms_norm(x, (7,))
