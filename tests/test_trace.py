"""Tracing: what a step computes is what its program computes, and what no program can repeat is an error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from interpreter import run_reference
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from traced import close, f64, same, targets

from colofunc.program.tracing.trace import phase, record_local, trace, watch_modules
from colofunc.spec.rule import TensorType


def sgd(model: nn.Module, loss_of: Callable[..., torch.Tensor], lr: float = 0.1) -> Callable[..., Any]:
    """A training step of a module through functional_call, with gradients by `backward`."""

    def step(params: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor], *batch: Any) -> Any:
        live = {k: v.detach().requires_grad_() for k, v in params.items()}
        kept = {k: v.clone() for k, v in buffers.items()}
        with watch_modules(model):
            out = functional_call(model, {**live, **kept}, batch[:1])
        loss = loss_of(out, *batch[1:])
        loss.backward()
        with phase("update"):
            new = {k: v.detach() - lr * v.grad if v.grad is not None else v.detach() for k, v in live.items()}
        return new, kept, loss

    return step


def state_of(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return {k: v.detach() for k, v in model.named_parameters()}, dict(model.named_buffers())


# ---- training steps ----


def test_mlp_step_equals_eager() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    traced = same(
        sgd(model, F.mse_loss), *state_of(model), torch.randn(5, 4, dtype=f64), torch.randn(5, 3, dtype=f64)
    )
    assert targets(traced).count("colofunc.linear") == 2
    roles = {traced.program.value(i).name: traced.program.value(i).role for i in traced.program.inputs}
    assert roles["params.0.weight"] == "param" and roles["batch.0"] == "batch"
    assert {n.phase for n in traced.program.nodes} == {"forward", "backward", "update"}
    linear = next(n for n in traced.program.nodes if n.target == "colofunc.linear")
    backward = next(n for n in traced.program.nodes if n.target == "colofunc.linear_dw")
    assert linear.path == "0" and backward.path == "2"
    assert linear.line == backward.line and "in step" in linear.line


def test_batch_norm_statistics_come_out() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)).double()
    traced = same(
        sgd(model, F.mse_loss), *state_of(model), torch.randn(3, 3, 4, 4, dtype=f64), torch.randn(3, 2, dtype=f64)
    )
    assert "aten._native_batch_norm_legit_functional.default" in targets(traced)
    same(
        sgd(model.eval(), F.mse_loss),
        *state_of(model),
        torch.randn(3, 3, 4, 4, dtype=f64),
        torch.randn(3, 2, dtype=f64),
    )


def test_batch_norm_without_running_statistics() -> None:
    model = nn.BatchNorm1d(4, track_running_stats=False).double()
    same(sgd(model, F.mse_loss), *state_of(model), torch.randn(5, 4, dtype=f64), torch.randn(5, 4, dtype=f64))


def test_func_grad_and_value_and_grad() -> None:
    def loss(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(F.linear(x, p["w"], p["b"])) ** 2).sum()

    p = {"w": torch.randn(3, 4, dtype=f64), "b": torch.randn(3, dtype=f64)}
    traced = same(lambda p, x: torch.func.grad_and_value(loss)(p, x), p, torch.randn(5, 4, dtype=f64))
    assert [traced.program.value(i).role for i in traced.program.inputs] == ["param", "param", "batch"]


def test_gradients_carry_the_name_of_their_parameter() -> None:
    def by_backward(w: torch.Tensor, x: torch.Tensor) -> Any:
        w = w.detach().requires_grad_()
        (x @ w).sum().backward()
        return w.grad

    def by_grad(w: torch.Tensor, x: torch.Tensor) -> Any:
        w = w.detach().requires_grad_()
        return torch.autograd.grad((x @ w).sum(), w)[0]

    by_func = torch.func.grad(lambda w, x: (x @ w).sum())
    for step in (by_backward, by_grad, lambda w, x: by_func(w, x)):
        program = trace(step, (torch.randn(3, 4), torch.randn(5, 3))).program
        value = program.value(program.outputs[0])
        assert (value.role, value.name) == ("grad", "grad.w")


def test_a_leaf_that_requires_grad_is_a_parameter() -> None:
    def step(w: torch.Tensor, x: torch.Tensor) -> Any:
        (x @ w).sum().backward()
        return w.grad

    program = trace(step, (torch.randn(3, 4, requires_grad=True), torch.randn(5, 3))).program
    assert [program.value(i).role for i in program.inputs] == ["param", "batch"]
    assert program.value(program.outputs[0]).role == "grad"


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_interpolation_stays_one_operator(mode: str) -> None:
    traced = same(lambda x: F.interpolate(x, scale_factor=2, mode=mode), torch.randn(1, 2, 3, 3, dtype=f64))
    assert targets(traced) == [f"aten.upsample_{mode}2d.default"]


def test_inference_mode() -> None:
    def step(w: torch.Tensor, x: torch.Tensor) -> Any:
        with torch.inference_mode():
            return F.layer_norm(torch.matmul(x, w), (4,)).softmax(-1)

    same(step, torch.randn(3, 4, dtype=f64), torch.randn(2, 5, 3, dtype=f64))


def test_second_derivative() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        (g,) = torch.autograd.grad((x**4).sum(), x, create_graph=True)
        return torch.autograd.grad((g * g).sum(), x)[0]

    same(step, torch.randn(3, dtype=f64))


@pytest.mark.parametrize("reentrant", [False])
def test_checkpoint_is_a_hint(reentrant: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()

    def step(params: dict[str, torch.Tensor], x: torch.Tensor) -> Any:
        live = {k: v.detach().requires_grad_() for k, v in params.items()}
        run = lambda x: checkpoint(model, x, use_reentrant=reentrant)  # noqa: E731
        holder = nn.Module()
        holder.inner, holder.forward = model, run
        functional_call(holder, {f"inner.{k}": v for k, v in live.items()}, (x,)).sum().backward()
        return {k: v.grad for k, v in live.items()}

    args = (state_of(model)[0], torch.randn(3, 4, dtype=f64))
    traced = trace(step, args)
    assert targets(traced).count("aten.tanh.default") == 1
    out = traced.unpack(run_reference(traced.program, traced.pack(args)))
    close(out, torch.func.grad(lambda p: functional_call(model, p, (args[1],)).sum())(args[0]))


def test_backward_through_a_recomputed_function() -> None:
    def step(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        w = w.detach().requires_grad_()
        checkpoint(lambda w: torch.tanh(x @ w), w, use_reentrant=True).sum().backward()
        return w.grad

    same(step, torch.randn(4, 2, dtype=f64), torch.randn(3, 4, dtype=f64))


# ---- values known while tracing ----


def test_python_may_ask_for_what_depends_on_no_input() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        mask = torch.arange(4) > 1
        if mask.any() and int(mask.sum()) == 2 and mask.tolist()[0] is False:
            return x[:, mask] * len(torch.nonzero(mask))
        return x

    same(step, torch.randn(3, 4, dtype=f64))


def test_literals_and_captured_tensors_are_constants() -> None:
    table = torch.randn(4, dtype=f64)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=f64)
        y += 1
        return x * table + y + float(table[0])

    traced = same(step, torch.randn(4, dtype=f64))
    assert len(traced.program.constants) == 2
    assert all(traced.program.value(i).role == "constant" for i in traced.program.constants)


def test_mask_values_are_marked_free_of_inputs() -> None:
    traced = trace(lambda x: torch.where(torch.ones(3, 3, dtype=torch.bool).tril(), x, 0.0), (torch.randn(3, 3),))
    free = {n.target: traced.program.value(n.outs[0]).device_free for n in traced.program.nodes}
    assert free["aten.tril.default"] and not free["aten.where.self"]


# ---- randomness ----


def test_random_operators_take_the_seed() -> None:
    def step(w: torch.Tensor, x: torch.Tensor) -> Any:
        w = w.detach().requires_grad_()
        h = F.dropout(x @ w, 0.5) + torch.rand(3, 4, dtype=f64) + torch.zeros(3, 4, dtype=f64).normal_()
        h.sum().backward()
        return h, w.grad

    traced = same(step, torch.randn(4, 4, dtype=f64), torch.randn(3, 4, dtype=f64))
    assert traced.uses_seed and traced.program.value(traced.program.inputs[-1]).role == "seed"
    assert not trace(lambda x: x + 1, (torch.ones(2),)).uses_seed


# ---- devices and autocast ----


def test_one_symbolic_device() -> None:
    def step(x: torch.Tensor) -> Any:
        y = x.to("cuda").cuda() + torch.ones(2, device="cuda") + torch.arange(2, device=x.device)
        return y.to(device="cuda", dtype=torch.float16).cpu()

    traced = trace(step, (torch.ones(2),))
    assert traced.program.value(traced.program.outputs[0]).dtype == torch.float16
    assert not any("device" in dict(n.kwargs) for n in traced.program.nodes)


def test_cpu_autocast() -> None:
    def step(x: torch.Tensor, w: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x, w), x @ w

    traced = same(step, torch.randn(2, 2), torch.randn(2, 2))
    assert {traced.program.value(o).dtype for o in traced.program.outputs} == {torch.bfloat16}
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.filterwarnings("error:CUDA is not available")
def test_autocast_of_an_absent_device_is_honoured() -> None:
    def step(x: torch.Tensor, w: torch.Tensor) -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            y, z = F.linear(x, w), x @ w
            with torch.autocast("cpu", enabled=False):
                exact = x @ w
        return y, z, exact, x @ w

    traced = trace(step, (torch.randn(2, 2), torch.randn(2, 2)))
    kinds = [traced.program.value(o).dtype for o in traced.program.outputs]
    assert kinds == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]
    assert not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda")


def test_autocast_under_func_grad() -> None:
    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return F.linear(x, w).float().sum()

    traced = trace(torch.func.grad(loss), (torch.randn(2, 2), torch.randn(2, 2)))
    assert any(n.target == "colofunc.linear_dw" for n in traced.program.nodes)
    assert traced.program.value(traced.program.outputs[0]).dtype == torch.float32


# ---- optimizers ----


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (torch.optim.SGD, dict(momentum=0.9)), (torch.optim.AdamW, {}), (torch.optim.RMSprop, {}),
        (torch.optim.NAdam, {}),
        (torch.optim.Adagrad, {}), (torch.optim.Adam, dict(foreach=True)), (torch.optim.Adam, dict(fused=True)),
    ],
)  # fmt: skip
def test_torch_optimizers_inside_a_step(cls: Any, options: dict[str, Any]) -> None:
    def step(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        p = nn.Parameter(w.clone())
        opt = cls([p], lr=0.1, **options)
        for _ in range(2):
            opt.zero_grad()
            ((x @ p) ** 2).sum().backward()
            opt.step()
        return p.detach()

    same(step, torch.randn(3, 4, dtype=f64), torch.randn(5, 3, dtype=f64))


# ---- local code ----


def test_record_local() -> None:
    program = record_local(lambda a, b: (a @ b, a.sum(0)), [TensorType((2, 3), f64), TensorType((3, 4), f64)])
    a, b = torch.randn(2, 3, dtype=f64), torch.randn(3, 4, dtype=f64)
    out = run_reference(program, [a, b])
    assert torch.equal(out[0], a @ b) and torch.equal(out[1], a.sum(0))
    assert [n.target for n in program.nodes] == ["aten.mm.default", "aten.sum.dim_IntList"]
