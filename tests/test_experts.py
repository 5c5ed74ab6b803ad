"""Experts as one operator: against a loop over tokens and choices, caught from written-out layers, routed, capped."""

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from pretended import Machine, on_card
from pretended.kernels import EMULATED
from torch import Tensor

import colofunc as cf
from colofunc.ops.canonical import single_device
from colofunc.ops.define import KERNELS
from colofunc.ops.experts import (
    ACTS,
    expert_position,
    experts,
    experts_backward,
    experts_input_gradients,
    experts_weight_gradients,
)
from colofunc.ops.grouped import grouped_mm
from colofunc.testing import sample

D = torch.float64
FORMS = [(g, t, b) for g in (True, False) for t in (True, False) for b in (True, False)]
# At random, some choices are of no expert: below 0, or e and more.
CHOICES = {"random": lambda n, k, e: torch.randint(-2, e + 2, (n, k)), "greedy": lambda n, k, e: torch.full((n, k), e - 1),
           "starving": lambda n, k, e: torch.randint(0, 2, (n, k))}  # fmt: skip


def operands(choices="random", gated=True, transposed=False, bias=False, n=8, k=2, e=4, f=8, d=4):
    """x, index, weight, gate_up, down, gate_up_bias, down_bias."""
    c = 2 if gated else 1
    up, down = torch.randn(e, c * f, d, dtype=D), torch.randn(e, d, f, dtype=D)
    if transposed:
        up, down = up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    biases = (torch.randn(e, c * f, dtype=D), torch.randn(e, d, dtype=D)) if bias else (None, None)
    return torch.randn(n, d, dtype=D), CHOICES[choices](n, k, e), torch.rand(n, k, dtype=D), up, down, *biases


def one_by_one(x, index, weight, up, down, up_bias, down_bias, act, gated, transposed):
    """Every token and choice by itself."""
    rows = []
    for token, chosen, scales in zip(x, index.tolist(), weight, strict=True):
        y = torch.zeros_like(token)
        for i, scale in zip(chosen, scales, strict=True):
            if not 0 <= i < len(up):
                continue
            a, b = (up[i].T, down[i].T) if transposed else (up[i], down[i])
            h = a @ token + (0 if up_bias is None else up_bias[i])
            h = act(h[: len(h) // 2]) * h[len(h) // 2 :] if gated else act(h)
            y = y + scale * (b @ h + (0 if down_bias is None else down_bias[i]))
        rows.append(y)
    return torch.stack(rows)


def grads(fn, args):
    tensors = [a.detach().clone().requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
    out = fn(*tensors)
    wanted = [t for t in tensors if isinstance(t, Tensor) and t.requires_grad]
    grad = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).reshape(out.shape)
    found = torch.autograd.grad(out, wanted, grad, allow_unused=True)
    return out, [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, found, strict=True)]


def close(got, want):
    return (got - want).abs().max() <= 1e-10 * max(1.0, want.abs().max())


@pytest.mark.parametrize(("gated", "transposed", "bias"), FORMS)
@pytest.mark.parametrize("choices", CHOICES)
def test_forward_and_backward_are_those_of_a_loop(choices, gated, transposed, bias) -> None:
    args = operands(choices, gated, transposed, bias)
    want, wanted = grads(lambda *a: one_by_one(*a, F.silu, gated, transposed), args)
    for call in (experts, experts.apply):  # through the dispatcher, and as the autograd function of a trace
        got, found = grads(partial(_called, call, "silu", gated, transposed), args)
        assert close(got, want) and all(close(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("choices", CHOICES)
def test_no_tokens_have_no_results_and_zero_gradients(choices) -> None:
    args = operands(choices, bias=True, n=0)
    for call in (experts, experts.apply):
        out, (dx, dweight, *of_weights) = grads(partial(_called, call, "silu", True, False), args)
        assert out.shape == dx.shape == (0, 4) and dweight.shape == (0, 2)
        assert [d.shape for d in of_weights] == [a.shape for a in args[3:]] and not any(d.any() for d in of_weights)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_choices_of_no_expert_add_nothing_and_have_no_gradient(dtype) -> None:
    """-2, -1, e, e + 1 and the ends of the dtype."""
    ends = torch.iinfo(dtype)
    index = torch.tensor([[-2, 0], [-1, 4], [5, 3], [ends.min, ends.max]], dtype=dtype)
    args = operands(bias=True, n=4)
    args = (args[0], index, *args[2:])
    want, wanted = grads(lambda *a: one_by_one(*a, F.silu, True, False), args)
    got, found = grads(partial(_called, experts, "silu", True, False), args)
    assert close(got, want) and all(close(a, b) for a, b in zip(found, wanted, strict=True))
    assert not got[[1, 3]].any() and not found[0][[1, 3]].any()
    assert torch.equal(found[1] != 0, (index >= 0) & (index < 4))


def _called(call, act, gated, transposed, *args):
    return call(*args, act, gated, transposed)


@pytest.mark.parametrize("act", ACTS)
def test_activations_and_their_gradients(act) -> None:
    plain = {"gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "relu2": lambda x: F.relu(x) ** 2, "identity": lambda x: x,
             "gelu": F.gelu, "silu": F.silu, "relu": F.relu, "sigmoid": torch.sigmoid, "tanh": torch.tanh}[act]  # fmt: skip
    args = operands()
    want, wanted = grads(lambda *a: one_by_one(*a, plain, True, False), args)
    got, found = grads(lambda *a: experts.apply(*a, act, True, False), args)
    assert close(got, want) and all(close(a, b) for a, b in zip(found, wanted, strict=True))


def turns(args, limit):
    """Operands whose gates and ups stand in turn, so large that some are clamped; the loop of them."""
    x, index, weight, up, down, up_bias, down_bias = args
    up = (up * 3 * limit).detach()

    def loop(x, index, weight, up, down, up_bias, down_bias):
        out = torch.zeros_like(x)
        for n in range(len(x)):
            for i, s in zip(index[n].tolist(), weight[n], strict=True):
                if not 0 <= i < len(up):
                    continue
                h = up[i] @ x[n] + (0 if up_bias is None else up_bias[i])
                gate, value = h[::2].clamp(max=limit), h[1::2].clamp(-limit, limit)
                y = down[i] @ ((value + 1) * gate * torch.sigmoid(1.7 * gate)) + (0 if down_bias is None else down_bias[i])
                out = out + torch.nn.functional.one_hot(torch.tensor(n), len(x)).to(D)[:, None] * (s * y)
        return out

    return (x, index, weight, up, down, up_bias, down_bias), loop


@pytest.mark.parametrize("bias", [False, True])
def test_gates_in_turn_are_clamped_and_so_are_their_gradients(bias) -> None:
    args, loop = turns(operands(bias=bias), limit=0.5)
    want, wanted = grads(loop, args)
    got, found = grads(lambda *a: experts.apply(*a, "interleaved_swiglu:1.7:0.5", True, False), args)
    assert close(got, want) and all(close(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("transposed", [False, True])
def test_rules_of_gates_in_turn_hold_on_meshes(transposed) -> None:
    args, meshes = operands(transposed=transposed, bias=True), [cf.Mesh(a=2), cf.Mesh(a=2, b=2)]
    act = ("interleaved_swiglu:1.7:0.5", True, transposed)
    done = cf.testing.check_strategies(None, "colofunc.experts", sample(*args, *act), meshes=meshes)
    assert {"{a: b0}", "{a: e}", "{a: f}", "{a: e, b: f}"} <= {d.strategy for d in done}
    back = sample(torch.randn(8, 4, dtype=D), *args, *act, True)
    done = cf.testing.check_strategies(None, "colofunc.experts_backward", back, meshes=meshes)
    assert {"{a: b0}", "{a: e}", "{a: f}", "{a: e, b: f}"} <= {d.strategy for d in done}


def test_more_rows_than_a_kernel_takes_at_a_time(monkeypatch) -> None:
    args = operands("greedy", n=30)
    whole = grads(lambda *a: experts.apply(*a, "silu", True, False), args)
    monkeypatch.setattr("colofunc.ops.experts.ROWS", 7)
    split = grads(lambda *a: experts.apply(*a, "silu", True, False), args)
    assert close(split[0], whole[0]) and all(close(a, b) for a, b in zip(split[1], whole[1], strict=True))


def test_experts_without_tokens_have_zero_gradients_and_nan_stays_with_its_token() -> None:
    args = operands("starving")
    args[2][3, 1] = float("nan")
    out, (_, _, up, down) = grads(lambda *a: experts.apply(*a, "silu", True, False), args)
    assert not up[2:].any() and not down[2:].any() and up[:2].any()
    assert out[3].isnan().all() and not out[[0, 1, 2, 4, 5, 6, 7]].isnan().any()


# Half of the forms, each option on and off beside each other one; all of them in the sweep.
HALF = [pytest.param(*form, marks=[pytest.mark.sweep] * (sum(form) % 2)) for form in FORMS]


@pytest.mark.parametrize(("gated", "transposed", "bias"), HALF)
def test_rules_hold_on_meshes(gated, transposed, bias) -> None:
    args = operands(gated=gated, transposed=transposed, bias=bias)
    meshes = [cf.Mesh(a=2), cf.Mesh(a=2, b=2)]
    done = cf.testing.check_strategies(None, "colofunc.experts", sample(*args, "silu", gated, transposed), meshes=meshes)
    assert {"{a: b0}", "{a: e}", "{a: f}", "{a: e, b: f}"} <= {d.strategy for d in done}
    g = torch.randn(8, 4, dtype=D)
    samples = [sample(g, *args, "silu", gated, transposed, needed) for needed in (True, False)]
    done = cf.testing.check_strategies(None, "colofunc.experts_backward", *samples, meshes=meshes)
    assert {"{a: b0}", "{a: e}", "{a: f}", "{a: e, b: f}"} <= {d.strategy for d in done}


@pytest.mark.parametrize(("gated", "transposed", "bias"), FORMS)
@pytest.mark.parametrize("choices", CHOICES)
def test_a_backward_in_two_calls_has_the_bits_of_one(choices, gated, transposed, bias) -> None:
    args, g = operands(choices, gated, transposed, bias), torch.randn(8, 4, dtype=D)
    form = ("silu", gated, transposed)
    dx, dweight, dh, a = experts_input_gradients(g, *args, *form)
    found = (dx, dweight, *experts_weight_gradients(dh, a, g, *args, *form))
    assert all(torch.equal(got, want) for got, want in zip(found, experts_backward(g, *args, *form), strict=True))
    nobodys = (args[1] < 0) | (args[1] >= 4)
    assert dh.shape == (8, 2, (1 + gated) * 8) and a.shape == (8, 2, 8)
    assert not dh[nobodys].any() and not a[nobodys].any()


@pytest.mark.parametrize(("gated", "transposed", "bias"), [(True, False, True), (False, True, False)])
def test_rules_of_a_backward_in_two_calls_hold_on_meshes(gated, transposed, bias) -> None:
    args, g = operands(gated=gated, transposed=transposed, bias=bias), torch.randn(8, 4, dtype=D)
    form = ("silu", gated, transposed)
    _, _, dh, a = experts_input_gradients(g, *args, *form)
    meshes = [cf.Mesh(a=2), cf.Mesh(a=2, b=2)]
    calls = {"colofunc.experts_input_gradients": sample(g, *args, *form),
             "colofunc.experts_weight_gradients": sample(dh, a, g, *args, *form)}  # fmt: skip
    for target, one in calls.items():
        done = cf.testing.check_strategies(None, target, one, meshes=meshes)
        assert {"{a: b0}", "{a: e}", "{a: f}", "{a: e, b: f}"} <= {d.strategy for d in done}


def test_places_in_queues() -> None:
    index = torch.tensor([[0, 1], [1, 0], [3, 1], [-1, 0]])
    assert expert_position(index, 3).tolist() == [[0, 0], [1, 1], [-1, 2], [-1, 2]]
    done = cf.testing.check_strategies(None, "colofunc.expert_position", sample(torch.randint(-1, 5, (12, 2)), 5))
    assert "{a: b0, b: b0}" in {d.strategy for d in done}


def test_grouped_products_of_every_dtype() -> None:
    x, w, offs = torch.randn(6, 4, dtype=D), torch.randn(3, 4, 6, dtype=D), torch.tensor([2, 2, 5], dtype=torch.int32)

    def plain(x, w):
        return torch.cat([x[:2] @ w[0], x[2:5] @ w[2], torch.zeros(1, 6, dtype=D)])

    want, wanted = grads(plain, (x, w))
    got, found = grads(lambda x, w: grouped_mm.apply(x, w, offs), (x, w))
    assert close(got, want) and all(close(a, b) for a, b in zip(found, wanted, strict=True))
    assert cf.testing.check_strategies(None, "colofunc.grouped_mm", sample(x, w, offs))
    assert cf.testing.check_strategies(None, "colofunc.grouped_mm_dw", sample(x, torch.randn(6, 6, dtype=D), offs))


# ---- layers that are written out ----


def undone(perm):
    """The inverse of an order, as models write it."""
    back = torch.empty_like(perm)
    back[perm] = torch.arange(len(perm))
    return back


def written(x, index, weight, up, down, act=F.silu, change=lambda h: h, undo=undone):
    """A layer as models write it with grouped_mm."""
    n, k = index.shape
    ids, perm = torch.sort(index.reshape(-1))
    offs = torch.cumsum(torch.histc(ids.float(), bins=len(up), min=0, max=len(up) - 1), 0, dtype=torch.int32)
    gate, value = F.grouped_mm(x[perm // k], up.transpose(-2, -1), offs=offs).chunk(2, dim=-1)
    y = F.grouped_mm(change(act(gate) * value), down.transpose(-2, -1), offs=offs)
    y = y * weight.reshape(-1)[perm].unsqueeze(-1)
    return y[undo(perm)].view(n, k, -1).sum(dim=1)


def targets(fn, *args):
    return [n.target for n in cf.shard(fn, cf.Mesh(dp=2)).lower(*args).program.nodes]


def leaves_the_rest(x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor, *args: Any) -> torch.Tensor:
    """Torch's kernel on a card: rows behind the last offset are not written."""
    out, start = torch.full((x.shape[0], w.shape[2]), torch.nan, dtype=x.dtype), 0
    for group, end in enumerate(offs.tolist()):
        out[start:end] = x[start:end] @ w[group]
        start = end
    return out


@pytest.mark.parametrize(("offsets", "width"), [((3, 3, 7), 16), ((0, 0, 0), 16), ((2, 9, 10), 16), ((3, 3, 7), 12)])
def test_rows_of_no_group_are_zeros_on_a_card_too(offsets: tuple[int, ...], width: int) -> None:
    x, w, offs = torch.randn(10, 8).bfloat16(), torch.randn(3, 8, width).bfloat16(), torch.tensor(offsets, dtype=torch.int32)
    want = grouped_mm.apply(x, w, offs)
    with mock.patch.dict(EMULATED, {torch.ops.aten._grouped_mm.default: leaves_the_rest}), Machine() as machine:
        found = KERNELS["colofunc.grouped_mm"](*on_card(machine, (x, w, offs)))
        assert torch.equal(found.cpu(), want) and not found.cpu()[offsets[-1] :].any()
        assert bool(machine.launches["aten._grouped_mm.default"]) == (width % 8 == 0)  # else its rows are not aligned


def test_a_layer_written_with_grouped_mm_is_caught_whole() -> None:
    args = operands(choices="starving")[:5]
    step = cf.shard(lambda *a: written(*a), cf.Mesh(dp=2))
    assert [t for t in targets(written, *args) if "expert" in t or "grouped" in t] == ["colofunc.experts"]
    assert close(step(*args).full(), one_by_one(*args, None, None, F.silu, True, False))


def written_in_turn(x, index, weight, up, down, up_bias, down_bias, more=1, limit=0.5):
    """Experts with biases, gates and ups in turn and clamped, each choice with its own matrices."""
    n, k = index.shape
    ids = index.reshape(-1)
    h = torch.bmm(x.repeat_interleave(k, dim=0).unsqueeze(1), up.transpose(1, 2)[ids]).squeeze(1)
    h.add_(up_bias[ids])
    gate, value = h[..., ::2].clamp(min=None, max=0.5), h[..., 1::2].clamp(min=-limit, max=limit)
    y = torch.bmm(((value + more) * (gate * torch.sigmoid(gate * 1.7))).unsqueeze(1), down.transpose(1, 2)[ids]).squeeze(1)
    y.add_(down_bias[ids])
    return (y * weight.reshape(-1).unsqueeze(-1)).view(n, k, -1).sum(dim=1)


def test_experts_with_biases_and_gates_in_turn_are_caught_whole() -> None:
    args, loop = turns(operands(choices="starving", bias=True), limit=0.5)
    assert [t for t in targets(written_in_turn, *args) if "expert" in t or "bmm" in t] == ["colofunc.experts"]
    assert close(cf.shard(written_in_turn, cf.Mesh(dp=2))(*args).full(), loop(*args))


@pytest.mark.parametrize("other", [dict(more=2), dict(limit=0.7)])
def test_what_is_like_gates_in_turn_runs_as_it_is_written(other) -> None:
    args = turns(operands(choices="starving", bias=True), limit=0.5)[0]

    def fn(*a):
        return written_in_turn(*a, **other)

    assert "colofunc.experts" not in targets(fn, *args)
    assert close(cf.shard(fn, cf.Mesh(dp=2))(*args).full(), fn(*args))


@pytest.mark.parametrize("act", [F.elu, lambda g: F.silu(g).clamp(max=1.0)])
def test_other_activations_run_as_they_are_written(act) -> None:
    args = operands(choices="starving")[:5]

    def fn(*a):
        return written(*a, act=act)

    assert targets(fn, *args).count("colofunc.grouped_mm") == 2
    assert close(cf.shard(fn, cf.Mesh(dp=2))(*args).full(), one_by_one(*args, None, None, act, True, False))


def test_a_write_in_place_in_the_middle_is_not_lost() -> None:
    args = operands(choices="starving")[:5]

    def fn(*a):
        return written(*a, change=lambda h: h.mul_(3))

    assert "colofunc.experts" not in targets(fn, *args)
    assert close(cf.shard(fn, cf.Mesh(dp=2))(*args).full(), 3 * one_by_one(*args, None, None, F.silu, True, False))


def _hardtanh(g):
    return F.hardtanh(F.silu(g), inplace=True)


def _each_times_two(g):
    h = F.silu(g)
    torch._foreach_mul_([h], 2.0)
    return h


@pytest.mark.parametrize("act", [_hardtanh, _each_times_two])
def test_writes_in_place_that_no_name_tells_are_not_lost(act) -> None:
    args = operands(choices="starving")[:5]

    def fn(*a):
        return written(*a, act=act)

    assert close(cf.shard(fn, cf.Mesh(dp=2))(*args).full(), one_by_one(*args, None, None, act, True, False))


def _backwards(perm):
    back = torch.empty_like(perm)
    back[perm] = torch.arange(len(perm)).flip(0)
    return back


def _of_odd_numbers(perm):
    back = torch.empty_like(perm)
    back[perm] = torch.arange(1, 2 * len(perm), 2) % len(perm)
    return back


@pytest.mark.parametrize("undo", [_backwards, _of_odd_numbers, lambda perm: perm.argsort(descending=True)])
def test_rows_that_come_back_in_another_order_are_not_taken_for_experts(undo) -> None:
    args = operands(choices="starving")[:5]
    assert "colofunc.experts" not in targets(lambda *a: written(*a, undo=undo), *args)
    assert "colofunc.experts" in targets(lambda *a: written(*a, undo=torch.argsort), *args)


def test_a_sum_over_other_rows_is_not_taken_for_experts() -> None:
    """The same calls with the weights of other rows."""
    args = operands(choices="starving")[:5]

    def fn(x, index, weight, up, down):
        return written(x, index, weight.flip(0), up, down) + written(x, index, weight, up.flip(0), down.flip(0))

    want = one_by_one(args[0], args[1], args[2].flip(0), *args[3:], None, None, F.silu, True, False)
    want = want + one_by_one(*args[:3], args[3].flip(0), args[4].flip(0), None, None, F.silu, True, False)
    assert close(cf.shard(fn, cf.Mesh(dp=2))(*args).full(), want)


# ---- routing and losses ----


def test_softmax_routing() -> None:
    logits = torch.randn(5, 6, dtype=D)
    index, weight, scores = cf.moe.route(logits, 2)
    best = logits.argsort(-1, descending=True)[:, :2]
    assert torch.equal(index, best) and close(weight.sum(-1), torch.ones(5, dtype=D)) and close(scores, logits.softmax(-1))
    _, plain, _ = cf.moe.route(logits, 2, normalize=False, scale=2.0)
    assert close(plain, 2 * logits.softmax(-1).gather(1, best))


def test_bias_chooses_and_does_not_weigh() -> None:
    logits = torch.zeros(3, 4, dtype=D)
    index, weight, _ = cf.moe.route(logits, 1, scores="sigmoid", normalize=False, bias=torch.tensor([0.0, 0, 5, 0]))
    assert index.flatten().tolist() == [2, 2, 2] and close(weight, torch.full((3, 1), 0.5, dtype=D))


def test_groups_hold_every_choice() -> None:
    logits = torch.tensor([[9.0, -9, -9, 1, 1, 1.5]])  # the single best expert stands in the group whose two best are worse
    assert cf.moe.route(logits, 2, scores="sigmoid", groups=3, top_groups=1)[0].tolist() == [[5, 4]]
    assert cf.moe.route(logits, 2, scores="sigmoid")[0].tolist() == [[0, 5]]


def test_nan_among_the_logits_stays_with_its_token() -> None:
    logits = torch.randn(3, 4)
    logits[1, 2] = float("nan")
    index, weight, _ = cf.moe.route(logits, 2)
    assert weight[1].isnan().all() and weight[[0, 2]].isfinite().all() and ((index >= 0) & (index < 4)).all()


def test_losses() -> None:
    even, index = torch.full((4, 4), 0.25), torch.arange(4).reshape(4, 1)
    assert cf.moe.balance_loss(even, index) == 1
    assert cf.moe.balance_loss(F.one_hot(torch.zeros(4, dtype=torch.int64), 4).float(), torch.zeros(4, 1, dtype=torch.int64)) == 4
    torch.testing.assert_close(cf.moe.z_loss(torch.zeros(3, 4)), torch.tensor(4.0).log() ** 2)


@pytest.mark.parametrize(
    ("options", "says"),
    [(dict(k=9), "k=9 experts per token of 6"), (dict(k=2, scores="relu"), "scores='relu'"), (dict(k=2, groups=4), "groups=4"),
     (dict(k=3, groups=3, top_groups=1), "equal groups that hold k experts")],
)  # fmt: skip
def test_refused_routing(options, says) -> None:
    with pytest.raises(cf.InputError, match=says):
        cf.moe.route(torch.randn(4, 6), **options)


def test_refused_shapes_and_activations() -> None:
    x, index, weight, up, down, _, _ = operands()
    with pytest.raises(cf.RuleError, match=r"Try: gated=False or transposed=True"):
        cf.shard(lambda x: cf.moe.experts(x, index, weight, up.transpose(1, 2), down), cf.Mesh(dp=2)).lower(x)
    with pytest.raises(cf.RuleError, match="no activation 'swish'; it knows silu, gelu"):
        cf.shard(lambda x: cf.moe.experts(x, index, weight, up, down, act="swish"), cf.Mesh(dp=2)).lower(x)


# ---- capacity ----


def test_capacity_counts_in_the_order_of_tokens() -> None:
    args = operands("greedy", n=6, k=1)
    out = cf.moe.experts(*args[:5], capacity_factor=1.5)  # ceil(1.5 * 6 / 4) = 3 places
    whole = cf.moe.experts(*args[:5])
    assert close(out[:3], whole[:3]) and not out[3:].any() and whole[3:].any()


def test_the_transform_is_the_same_as_the_argument_on_every_mesh() -> None:
    args = operands(n=12)[:5]
    want = cf.moe.experts(*args, capacity_factor=0.5)
    for mesh in (cf.Mesh(dp=2), cf.Mesh(dp=2, tp=2)):
        rows = ("(dp n) d", "(dp n) k", "(dp n) k", None, None)
        step = cf.expert_capacity(cf.shard(lambda *a: cf.moe.experts(*a), mesh, in_specs=rows), 0.5)
        assert close(step(*args).full(), want)
    caught = cf.shard(cf.expert_capacity(factor=0.5)(written), cf.Mesh(dp=2))
    args = (args[0], args[1].clamp(0, 3), *args[2:])
    assert close(caught(*args).full(), cf.moe.experts(*args, capacity_factor=0.5))


@pytest.mark.parametrize("factor", [0, -1.0, True, float("inf"), "1"])
def test_capacity_zero_is_refused(factor) -> None:
    with pytest.raises(cf.InputError, match="no expert could take a token"):
        cf.expert_capacity(lambda x: x, factor)
    with pytest.raises(cf.InputError, match="no expert could take a token"):
        cf.moe.experts(*operands()[:5], capacity_factor=factor)


def test_a_capacity_without_experts_is_an_error() -> None:
    with pytest.raises(cf.PlanError, match="finds no experts in this step"):
        cf.expert_capacity(cf.shard(lambda x: x + 1, cf.Mesh(dp=2)), 1.5)(torch.ones(4))
    with single_device(), pytest.raises(cf.PlanError, match="finds no experts"):
        cf.expert_capacity(lambda x: x + 1, 1.5).reference(torch.ones(4))


@pytest.mark.gpu
@pytest.mark.parametrize("choices", CHOICES)
def test_the_kernels_on_a_gpu(choices) -> None:
    args = operands(choices, bias=True, n=64)
    there = [a.cuda() if isinstance(a, Tensor) else a for a in args]
    want, wanted = grads(lambda *a: experts.apply(*a, "silu", True, False), args)
    got, found = grads(lambda *a: experts.apply(*a, "silu", True, False), there)
    assert close(got.cpu(), want) and all(close(a.cpu(), b) for a, b in zip(found, wanted, strict=True))
