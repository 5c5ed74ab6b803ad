"""Tracing: what a step computes is what its program computes, and what no program can repeat is an error."""

import dataclasses
import random
import types
from collections import UserDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import attrs
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import colofunc as cf
from colofunc.dtensor.rule import TensorType
from colofunc.errors import ColofuncError, InputError, TraceError
from colofunc.ops import canonical
from colofunc.program.reference import run_reference
from colofunc.program.trace import Traced, phase, record_local, signature, trace, watch_modules
from colofunc.program.trace_tree import flatten
from colofunc.testing.trees import compare

f64 = torch.float64


def close(a: Any, b: Any) -> None:
    """Same tree, equal leaves."""
    mine, tree = flatten(a)
    theirs, other = flatten(b)
    assert tree.names() == other.names()
    assert mine
    for name, x, y in zip(tree.names(), mine, theirs, strict=True):
        torch.testing.assert_close(x.detach(), y.detach(), rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def same(fn: Callable[..., Any], *args: Any) -> Traced:
    """Trace, run the program, compare with the function itself under the same canonical operators."""
    traced = trace(fn, args)
    inputs = traced.pack(args)
    before = [t.clone() for t in inputs]
    seed = [torch.tensor(7)] if traced.uses_seed else []
    out = traced.unpack(run_reference(traced.program, inputs + seed))
    with canonical.single_device(torch.tensor(7)):
        expected = fn(*args)
    close(out, expected)
    for x, y in zip(inputs, before, strict=True):
        assert torch.equal(x, y)
    return traced


def targets(traced: Traced) -> list[str]:
    return [node.target for node in traced.program.nodes]


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


# ---- in-place writes and views ----


def _slice_add(x: torch.Tensor) -> Any:
    y = x * 1.0
    y[1:].add_(x[:-1])
    return y


def _transposed(x: torch.Tensor) -> Any:
    y = x * 1.0
    z = y.t()
    z.mul_(2)
    z[0] = 3.0
    return y, z


def _chunks(x: torch.Tensor) -> Any:
    y = x.clone()
    a, b = y.chunk(2, dim=1)
    a.copy_(b)
    b += a
    return y, a, b


def _index_put(x: torch.Tensor) -> Any:
    y = x.clone()
    y[torch.tensor([0, 2]), 1] = 5.0
    y.index_put_((torch.tensor([1, 1]),), x[:2], accumulate=True)
    y[y > 1] = 0.0
    return y


def _views_of_views(x: torch.Tensor) -> Any:
    y = x.clone()
    v = y.view(-1)[2:].view(-1, 2)
    w = y.unsqueeze(0).squeeze(0).select(0, 1)
    v[:, 0].neg_()
    w.add_(1)
    return y, v, w, y.diagonal().mul_(2), y


def _out_argument(x: torch.Tensor) -> Any:
    y = torch.empty_like(x)
    torch.add(x, 1, out=y[:])
    return y


def _fills(x: torch.Tensor) -> Any:
    y = x.clone()
    y[0].zero_()
    y[1:2].fill_(2.5)
    y.t()[1].fill_(x.sum())
    return y, y.masked_fill_(y > 2, 0.0), y.clamp_(min=0)


def _strided(x: torch.Tensor) -> Any:
    y = (x * 2).t()
    y.as_strided((2, 2), (1, 3)).add_(1)
    z = x.clone()
    z.unfold(1, 2, 1)[:, 0, 0].mul_(3)
    return y, z, y.as_strided((2,), (1,), 3)


def _shape_in_place(x: torch.Tensor) -> Any:
    y = x.clone()
    z = y.view(4, 3)
    y.unsqueeze_(0).transpose_(1, 2)
    z[0] = 7.0
    y.squeeze_().t_()
    w = (x * 2).as_strided_((4, 3), (1, 4))
    w.add_(1)
    return y, y.shape[0] * x, z, w


def _channels_last(x: torch.Tensor) -> Any:
    y = F.adaptive_avg_pool2d(x.view(1, 3, 2, 2).to(memory_format=torch.channels_last), 1)
    return y, F.adaptive_avg_pool2d(x.view(1, 3, 2, 2), 1) * 2


def _foreach(x: torch.Tensor) -> Any:
    a, b = x.clone(), x * 2
    torch._foreach_add_([a, b], [b, x], alpha=2)
    torch._foreach_mul_([a, b], 3.0)
    return a, b, torch._foreach_norm([a, b])


def _in_place_under_autograd(x: torch.Tensor) -> Any:
    w = x.detach().requires_grad_()
    y = w * 2
    y[:, 1:].mul_(w[:, :-1])
    y.add_(1).neg_()
    y[0, 0] = 0.0
    (y * y).sum().backward()
    return y, w.grad


def _data_swap(x: torch.Tensor) -> Any:
    y = torch.zeros_like(x)
    y.data = x * 2
    return y + 1


def _casts(x: torch.Tensor) -> Any:
    y = torch.zeros(3, 4, dtype=torch.float32)
    y.copy_(x)
    y += x
    z = y.view(torch.int32)
    z.add_(1)
    return y, z


@pytest.mark.parametrize(
    "fn",
    [
        _slice_add, _transposed, _chunks, _index_put, _views_of_views, _out_argument, _fills, _strided, _foreach,
        _shape_in_place, _channels_last, _in_place_under_autograd, _data_swap, _casts,
    ],
)  # fmt: skip
def test_mutation_becomes_functional(fn: Callable[..., Any]) -> None:
    traced = same(fn, torch.randn(3, 4, dtype=f64))
    for name in targets(traced):
        assert not name.split(".")[1].endswith("_"), name


@pytest.mark.parametrize(
    ("size", "stride", "offset"),
    [
        ((4, 3), (1, 4), 0),
        ((12,), (1,), 0),
        ((2, 1, 3), (3, 99, 1), 4),
        ((4, 5, 3), (3, 0, 1), 0),
        ((3, 4), (4, 1), 0),
        ((2,), (1,), 3),
    ],
)
def test_strides_become_words(size: Any, stride: Any, offset: int) -> None:
    traced = same(lambda x: (x * 1).as_strided(size, stride, offset), torch.randn(3, 4, dtype=f64))
    assert "aten.as_strided.default" not in targets(traced)


def test_views_are_derived_again_only_when_read() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        v = y[0]
        y.add_(1)
        y.add_(2)
        return v

    assert targets(same(step, torch.randn(2, 3, dtype=f64))).count("aten.select.int") == 2


# ---- trees, names, statics ----


class Pair(NamedTuple):
    a: torch.Tensor
    b: Any


@dataclasses.dataclass(frozen=True)
class Record:
    x: torch.Tensor
    mode: str


@attrs.frozen
class Box:
    items: list[torch.Tensor]


def test_trees_and_names() -> None:
    args = (
        {"w": torch.ones(2), "deep.name": Pair(torch.ones(1), None)},
        Record(torch.ones(2), "sum"),
        UserDict({"ids": torch.arange(2)}),
        Box([torch.ones(1), torch.ones(2)]),
        np.float64(0.5),
        np.arange(3.0),
    )

    def step(state: Any, record: Record, batch: Any, box: Box, lr: torch.Tensor, table: torch.Tensor) -> Any:
        assert record.mode == "sum"
        new = {
            k: (v * lr if isinstance(v, torch.Tensor) else v._replace(a=v.a + batch["ids"])) for k, v in state.items()
        }
        return new, Record(record.x * table.sum(), record.mode), Box(box.items[::-1]), batch

    traced = trace(step, args)
    assert traced.names == (
        "state.w", "state.deep.name.a", "record.x", "batch.ids", "box.items.0", "box.items.1", "lr", "table",
    )  # fmt: skip
    out = traced.unpack(run_reference(traced.program, traced.pack(args)))
    assert isinstance(out[0]["deep.name"], Pair) and out[0]["deep.name"].b is None
    assert isinstance(out[1], Record) and isinstance(out[2], Box) and isinstance(out[3], UserDict)
    assert torch.equal(out[0]["w"], torch.full((2,), 0.5)) and torch.equal(out[1].x, torch.full((2,), 3.0))
    assert ("record.mode", "sum") in traced.static


def test_a_float_argument_is_exact_and_does_not_promote() -> None:
    traced = same(lambda x, lr: x * lr, torch.randn(3), 0.1)
    assert traced.program.value(traced.program.outputs[0]).dtype == torch.float32


def test_signature_tells_calls_apart() -> None:
    x = torch.ones(2)
    assert signature((x, 0.1)) == signature((x + 1, 0.2))
    assert signature((x, 1)) != signature((x, 2)) != signature((x, True))
    assert signature((x,)) != signature((x.double(),)) != signature((torch.ones(3),))
    assert signature((x,), flags=(True,)) != signature((x,), flags=(False,))
    assert hash(signature(({"a": x},))) == hash(signature(({"a": x},)))


def test_pack_refuses_another_structure() -> None:
    traced = trace(lambda a, n: a["x"] * n, ({"x": torch.ones(2)}, 3))
    with pytest.raises(InputError, match="another structure"):
        traced.pack(({"y": torch.ones(2)}, 3))
    with pytest.raises(InputError, match="static"):
        traced.pack(({"x": torch.ones(2)}, 4))


def test_outputs_may_repeat_and_be_inputs() -> None:
    same(lambda x: (x, x, x.detach(), {"n": None, "k": 3}), torch.randn(2))


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


def test_a_random_operator_without_a_counter_based_form_is_refused() -> None:
    with pytest.raises(TraceError, match=r"random operator aten\.\w+.* at test_trace.py:\d+ in"):
        trace(lambda x: torch._standard_gamma(x), (torch.ones(3),))


# ---- what is refused ----


def test_data_dependent_branch() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x
        return -x

    with pytest.raises(
        TraceError, match=r"data-dependent control flow: .* at test_trace.py:\d+ in step.*torch.where"
    ):
        trace(step, (torch.ones(3),))
    for fn in (
        lambda x: x[x > 0],
        lambda x: torch.nonzero(x),
        lambda x: x * x.sum().item(),
        lambda x: torch.unique(x),
    ):
        with pytest.raises(TraceError, match="data-dependent"):
            trace(fn, (torch.ones(3),))


def test_write_to_an_input() -> None:
    def step(state: dict[str, torch.Tensor]) -> Any:
        state["w"][0].add_(1)
        return state

    with pytest.raises(
        TraceError, match=r"in place to its input 'state.w' at test_trace.py:\d+ in step.*return the new value"
    ):
        trace(step, ({"w": torch.ones(2)},))


def test_write_to_a_captured_tensor() -> None:
    outside = torch.zeros(2)

    def step(x: torch.Tensor) -> Any:
        outside.add_(x)
        return x

    with pytest.raises(TraceError, match=r"captured from outside at test_trace.py:\d+ in step"):
        trace(step, (torch.ones(2),))
    assert torch.equal(outside, torch.zeros(2))


def test_backward_into_a_captured_parameter() -> None:
    model = nn.Linear(2, 2)

    def step(x: torch.Tensor) -> Any:
        loss = model(x).sum()
        loss.backward()
        return loss

    with pytest.raises(TraceError, match="captured from outside; pass parameters as an argument"):
        trace(step, (torch.ones(1, 2),))
    assert model.weight.grad is None


def test_host_randomness_is_refused() -> None:
    for draw in (random.random, np.random.rand):
        with pytest.raises(TraceError, match="Python's or NumPy's random generator"):
            trace(lambda x, draw=draw: x * float(draw()), (torch.ones(2),))


def test_leaked_tensors_are_refused_when_used() -> None:
    kept: list[torch.Tensor] = []

    def step(x: torch.Tensor) -> Any:
        out = x + (kept[0] if kept else 0)
        kept.append(out)
        return out

    with pytest.raises(TraceError, match="the step keeps a tensor"):
        trace(step, (torch.ones(2),))
    with pytest.raises(TraceError, match="trace that has ended"):
        kept[0] + 1
    with pytest.raises(TraceError, match="made by an earlier trace"):
        trace(step, (torch.ones(2),))


def test_output_of_unknown_type() -> None:
    with pytest.raises(TraceError, match=r"out.1 of type object"):
        trace(lambda x: (x, object()), (torch.ones(2),))


def test_errors_of_operators_stay_torch_errors() -> None:
    with pytest.raises(RuntimeError, match="broadcast") as info:
        trace(lambda x: x + torch.ones(3), (torch.ones(2),))
    assert "aten.add.Tensor on torch.float32 [2], torch.float32 [3] at test_trace.py:" in info.value.__notes__[0]


def test_formatting_a_traced_value() -> None:
    seen: list[str] = []

    def step(x: torch.Tensor) -> Any:
        seen.extend([f"{x.sum():.3f}", str(x), repr(x)])
        return x + 1

    same_but = trace(step, (torch.ones(2),))
    assert len(same_but.program.nodes) >= 1
    assert all("traced" in s for s in seen)


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


def test_trace_errors_are_colofunc_errors() -> None:
    assert issubclass(TraceError, ColofuncError)


# ---- leaks ----

KEPT = []


def keeps_in(holder):
    """Steps that keep their loss somewhere outside, by the words for where."""
    seen, by_name, thing = [], {}, types.SimpleNamespace()

    def closure(x):
        loss = (x * 2).sum()
        seen.append(loss)
        return loss

    def dictionary(x):
        by_name["loss"] = (x * 2).sum()
        return x * 2

    def attribute(x):
        thing.last = x + 1
        return x * 2

    def global_list(x):
        KEPT.append(x * 3)
        return x * 2

    def with_graph(x):
        w = torch.ones(3, requires_grad=True)
        seen.append((w * x).sum())
        return x * 2

    def nonlocal_name(x):
        nonlocal last
        last = x * 2
        return last.sum()

    last = None
    return {f.__name__: f for f in (closure, dictionary, attribute, global_list, with_graph, nonlocal_name)}[holder]


@pytest.mark.parametrize(
    ("holder", "where"),
    [
        ("closure", "in a list"),
        ("dictionary", "in a dict, under 'loss'"),
        ("attribute", "in attribute 'last' of a SimpleNamespace"),
        ("global_list", "in a list"),
        ("with_graph", "in a list"),
        ("nonlocal_name", "in a variable of an outer function"),
    ],
)
def test_a_tensor_that_leaves_the_step_is_an_error_at_this_trace(holder, where):
    with pytest.raises(TraceError) as caught:
        trace(keeps_in(holder), (torch.ones(3),))
    text = str(caught.value)
    assert where in text and "test_trace.py:" in text and f"in {holder}" in text and "return the tensor from the step" in text
    KEPT.clear()


def test_what_is_dropped_again_is_no_leak():
    scratch = []

    def step(x):
        scratch.append(x * 2)
        cycle = {"x": x + 1}
        cycle["me"] = cycle  # only the collector can free it
        return scratch.pop().sum()

    assert len(trace(step, (torch.ones(3),)).program.outputs) == 1 and scratch == []


def test_a_module_that_keeps_a_tensor_is_a_warning():
    class Caching(torch.nn.Module):
        def forward(self, x):
            self.table = x.cumsum(0)
            return self.table * 2

    module = Caching()
    with pytest.warns(UserWarning, match="in attribute 'table' of a module Caching"):
        trace(module, (torch.ones(3),))
    with pytest.raises(TraceError, match="a trace that has ended"):
        module.table + 1


# ---- float arguments ----

OPERANDS = {
    "int": torch.tensor([1, 2, 3]),
    "int32_0dim": torch.tensor(3, dtype=torch.int32),
    "bool": torch.tensor([True, False]),
    "float32_0dim": torch.tensor(1.7),
    "bfloat16_0dim": torch.tensor(1.7, dtype=torch.bfloat16),
    "float32": torch.tensor([0.3, 1.7]),
    "bfloat16": torch.tensor([0.3, 1.7], dtype=torch.bfloat16),
    "float64": torch.tensor([0.3, 1.7], dtype=f64),
    "complex64_0dim": torch.tensor(1 + 2j),
}
WITH_A_FLOAT: dict[str, Callable[..., Any]] = {
    "add": lambda x, a: x + a,
    "radd": lambda x, a: a + x,
    "mul": lambda x, a: x * a,
    "sub": lambda x, a: a - x,
    "div": lambda x, a: x / a,
    "pow": lambda x, a: x**a,
    "rpow": lambda x, a: a**x,
    "less": lambda x, a: x < a,
    "equal": lambda x, a: x == a,
    "where": lambda x, a: torch.where(x != 0, x, a),
    "where_number": lambda x, a: torch.where(x != 0, a, 0.0),
    "arithmetic": lambda x, a: x * (2 * a + a * a),
    "negative": lambda x, a: x * -a,
    "two": lambda x, a: (x * a) * a,
}


@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("name", WITH_A_FLOAT)
def test_a_float_promotes_as_python_does(name, operand):
    fn, x = WITH_A_FLOAT[name], OPERANDS[operand]
    if (name, operand) in (("sub", "bool"), ("less", "complex64_0dim")):
        return  # torch refuses these
    want = fn(x, 0.3)
    traced = trace(fn, (x, 0.3))
    (got,) = run_reference(traced.program, traced.pack((x, 0.3)))
    assert got.dtype == want.dtype == traced.program.values[traced.program.outputs[0]].dtype
    assert torch.equal(got, want)


def test_a_float_in_place_and_in_a_gradient():
    def step(x, n, a):
        y = x.clone()
        y.mul_(a)
        y += n * a
        return y.sum() * a, torch.autograd.grad(y.sum() * a, x)[0]

    args = (torch.tensor([0.1, 0.7], requires_grad=True), torch.tensor([1, 2]), 0.3)
    traced = trace(step, args)
    for a, b in zip(run_reference(traced.program, traced.pack(args)), step(*args), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def test_a_tensor_in_place_of_a_float_is_another_signature():
    assert signature((torch.ones(2), 0.5)) != signature((torch.ones(2), torch.tensor(0.5, dtype=f64)))


def test_a_module_under_two_names_gets_its_own_tensors_back():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(2, 2)
            self.b = nn.Sequential(self.a, nn.Linear(2, 2))
            self.b[1].weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x))

    module = Twice()
    before = dict(module.named_parameters())
    model = cf.functional(module)
    x = torch.ones(1, 2)
    params = {k: v + 1 for k, v in model.params.items()}
    traced = trace(lambda p, x: model.apply(p, {}, x)[0], (params, x))
    assert all(a is before[name] for name, a in module.named_parameters()) and set(params) == {"a.weight", "a.bias", "b.1.bias"}
    (got,) = run_reference(traced.program, traced.pack((params, x)))
    inner = F.linear(F.linear(x, params["a.weight"], params["a.bias"]), params["a.weight"], params["a.bias"])
    close(got, F.linear(inner, params["a.weight"], params["b.1.bias"]))


class Mine(NamedTuple):
    w: torch.Tensor


@dataclasses.dataclass
class Held:
    w: torch.Tensor


@attrs.frozen
class Kept:
    w: torch.Tensor


KINDS_OF_STATES = [Mine, Held, Kept, lambda w: (w,), lambda w: [w], lambda w: defaultdict(dict, w=w), lambda w: UserDict(w=w)]


@pytest.mark.parametrize("kind", KINDS_OF_STATES)
def test_states_of_every_kind_are_trained_and_checked(kind):
    def step(state, x):
        (w,) = flatten(state)[0]
        return kind(w * 2 + x), x.sum()

    staged = cf.shard(step, cf.Mesh(dp=2))
    assert cf.testing.check(staged, kind(torch.ones(4)), torch.ones(4)).steps == 2
    state, _ = staged(staged.init(kind(torch.ones(4)), torch.ones(4)), torch.ones(4))
    assert type(state) is type(kind(torch.ones(4)))


def test_a_wrong_record_is_named_by_its_field():
    with pytest.raises(cf.CheckError, match=r"out\[0\]\.w: differs"):
        compare([Kept(torch.ones(2))], [Kept(torch.zeros(2))], "out")
    with pytest.raises(cf.CheckError, match=r"unexpected \['out\.w'\], missing \['out\[0\]'\]"):
        compare(Kept(torch.ones(2)), [torch.ones(2)], "out")
