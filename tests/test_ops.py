"""Canonical operators against torch in float64: linear, attention, updates, and the modes that put them in place."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from colofunc.errors import RuleError, TraceError
from colofunc.ops import canonical
from colofunc.ops.attention import attention, attention_backward
from colofunc.ops.attention_parts import merge
from colofunc.ops.define import KERNELS, OPERATORS, define_update
from colofunc.ops.linear import linear, linear_dw, linear_dx
from colofunc.ops.twins import twin_of
from colofunc.ops.update import adamw, adamw_, sgd, sgd_
from colofunc.ops.update_packed import block_of, packed_moment
from colofunc.ops.update_rules import options_of, update, update_
from colofunc.ops.updates import is_in_place_update, updates

D = torch.float64


def rand(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(shape, dtype=D, requires_grad=grad)


# ---- linear ----


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_linear_is_torchs_with_its_gradients(lead: tuple[int, ...]) -> None:
    x, w, b = rand(*lead, 4, grad=True), rand(5, 4, grad=True), rand(5, grad=True)
    g = rand(*lead, 5)
    assert torch.equal(linear(x, w, b), F.linear(x, w, b))
    want = torch.autograd.grad(F.linear(x, w, b), (x, w, b), g)
    for run in (linear, linear.apply):
        for got, ref in zip(torch.autograd.grad(run(x, w, b), (x, w, b), g), want, strict=True):
            torch.testing.assert_close(got, ref, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("shape", [(3, 2, 4), (2, 3, 5, 4), (0, 2, 4), (3, 2, 0)])
def test_linear_of_tokens_before_rows_is_one_product(shape: tuple[int, ...]) -> None:
    """torch multiplies each row by itself where nothing needs a gradient, which takes longer."""
    x, w, b = rand(*shape).transpose(0, 1), rand(6, shape[-1]), rand(6)
    g = rand(*shape[:-1], 6).transpose(0, 1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        out, dx = KERNELS["colofunc.linear"](x, w, b), KERNELS["colofunc.linear_dx"](g, w)
    torch.testing.assert_close(out, F.linear(x, w, b), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(dx, g @ w, rtol=1e-13, atol=1e-13)
    assert out.is_contiguous() and "aten::bmm" not in {event.name for event in seen.events()}


@pytest.mark.parametrize("lies", ["rows", "tokens before rows", "a matrix"])
def test_results_of_linear_may_be_written_to(lies: str) -> None:
    """As an activation in place behind it does; a view of what a function made may not be written to under autograd."""
    w, b = (torch.randn(*size, dtype=torch.float64, requires_grad=True) for size in ((5, 4), (5,)))
    x = torch.randn(*((3, 4) if lies == "a matrix" else (3, 2, 4)), dtype=torch.float64)
    x = (x.transpose(0, 1) if lies == "tokens before rows" else x).requires_grad_()
    results = linear.apply(x, w, b), linear.apply(x, w, None), linear_dx.apply(x, w.T)
    found = torch.autograd.grad(sum(F.relu(y, inplace=True).sum() for y in results), (x, w))
    want = torch.autograd.grad(F.relu(F.linear(x, w, b)).sum() + 2 * F.relu(F.linear(x, w)).sum(), (x, w))
    assert all(torch.allclose(a, b) for a, b in zip(found, want, strict=True))


def test_linear_is_differentiable_twice() -> None:
    args = rand(2, 3, 4, grad=True), rand(5, 4, grad=True), rand(5, grad=True)
    assert torch.autograd.gradgradcheck(linear.op, args)


def test_linear_computes_only_the_gradients_that_are_needed() -> None:
    x, w = rand(3, 4, grad=True), rand(5, 4)

    def frozen(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(linear(x, w, None).sum(), x)[0]

    code = make_fx(frozen, tracing_mode="fake")(x, w).code
    assert "linear_dx" in code and "linear_dw" not in code


def test_func_grad_goes_through_apply() -> None:
    x, w = rand(3, 4), rand(5, 4)
    got = torch.func.grad(lambda w: (linear.apply(x, w, None) ** 2).sum())(w)
    torch.testing.assert_close(got, 2 * (x @ w.T).T @ x)


def test_linear_refuses_other_sizes_when_traced() -> None:
    with pytest.raises(RuleError, match=r"x \(3, 4\) ends in 4, and w \(5, 3\), \(out, in\), takes 3\. Try: x of shape \(3, 3\)"):
        make_fx(lambda x, w: linear(x, w, None), tracing_mode="fake")(rand(3, 4), rand(5, 3))
    with pytest.raises(RuleError, match=r"Try: w\.t\(\)"):
        make_fx(lambda x, w: linear(x, w, None), tracing_mode="fake")(rand(3, 4), rand(4, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_linear(dtype: torch.dtype) -> None:
    x, w, b = (torch.randn(s, dtype=dtype, requires_grad=True) for s in ((2, 3, 4), (5, 4), (5,)))
    torch.library.opcheck(linear.op, (x, w, b))
    g = torch.randn(2, 3, 5, dtype=dtype)
    torch.library.opcheck(linear_dx.op, (g, w))
    torch.library.opcheck(linear_dw.op, (g, x))


# ---- attention ----


def dense(q, k, v, bias=None, causal=False, window=0, rows=0, columns=0):
    """Attention by its definition; `rows` and `columns` are offsets or lists of positions."""
    r = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(r, 1), v.repeat_interleave(r, 1)
    s = q @ k.mT * 0.3
    i = rows if isinstance(rows, torch.Tensor) else torch.arange(q.shape[2]) + rows
    j = columns if isinstance(columns, torch.Tensor) else torch.arange(k.shape[2]) + columns
    seen = torch.ones(len(i), len(j), dtype=torch.bool)
    if causal:
        seen &= j <= i[:, None]
    if window:
        seen &= j > i[:, None] - window
    if bias is not None:
        s = s.masked_fill(~bias, -torch.inf) if bias.dtype == torch.bool else s + bias
    s = s.masked_fill(~seen, -torch.inf)
    lse = s.logsumexp(-1)
    return (s - lse.nan_to_num(neginf=0.0)[..., None]).exp() @ v, lse


def made_bias(kind: str | None) -> torch.Tensor | None:
    if kind == "bool":
        return torch.rand(2, 1, 1, 7) > 0.3
    return (
        None
        if kind is None
        else rand(*{"heads": (1, 4, 5, 7), "matrix": (5, 7), "rows": (2, 1, 5, 1)}[kind], grad=True)
    )


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("value_dim", [8, 6])  # 8 takes the flash kernel, 6 the plain path
@pytest.mark.parametrize("bias", [None, "bool", "heads", "matrix", "rows"])
@pytest.mark.parametrize(
    ("causal", "window", "rows", "columns"),
    [(0, 0, 0, 0), (1, 0, 0, 0), (1, 3, 0, 0), (0, 3, 0, 0), (1, 0, 4, 0), (1, 3, 3, 2), (1, 0, 0, 3)],
)
def test_attention_is_dense_attention(groups, value_dim, bias, causal, window, rows, columns) -> None:
    q, k, v = rand(2, 4, 5, 8, grad=True), rand(2, groups, 7, 8, grad=True), rand(2, groups, 7, value_dim, grad=True)
    b = made_bias(bias)
    leaves = (q, k, v) if bias in (None, "bool") else (q, k, v, b)
    offsets = [torch.tensor(n) if n else None for n in (rows, columns)]
    out, lse = attention(q, k, v, b, 0.3, bool(causal), window, q_offset=offsets[0], k_offset=offsets[1])
    want, want_lse = dense(q, k, v, b, causal, window, rows, columns)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, want_lse, rtol=1e-12, atol=1e-12)
    # Both results are differentiated: merging blocks needs the gradient of lse too.
    seen = want_lse > -torch.inf
    g, h = rand(*out.shape), rand(*lse.shape) * seen
    for kept in (torch.zeros_like(h), h):
        got = torch.autograd.grad((out * g).sum() + (lse[seen] * kept[seen]).sum(), leaves, retain_graph=True)
        ref = torch.autograd.grad((want * g).sum() + (want_lse[seen] * kept[seen]).sum(), leaves, retain_graph=True)
        for a, c in zip(got, ref, strict=True):
            torch.testing.assert_close(a, c, rtol=1e-11, atol=1e-11)


def test_attention_gradcheck_with_dropout_bias_and_lse() -> None:
    q, k, v, b = (
        rand(1, 2, 3, 4, grad=True),
        rand(1, 1, 5, 4, grad=True),
        rand(1, 1, 5, 3, grad=True),
        rand(2, 3, 5, grad=True),
    )
    seed = torch.tensor(7)
    assert torch.autograd.gradcheck(lambda *a: attention(*a, 0.5, True, 0, 0.4, seed, 1, torch.tensor(2)), (q, k, v, b))


@pytest.mark.parametrize("block", [(0, 3), (3, 5)])
def test_long_rows_are_blocked_and_equal(block, monkeypatch) -> None:
    monkeypatch.setattr("colofunc.ops.attention_parts.MAX_SCORES", 24)
    q, k, v = (
        rand(2, 4, 50, 8, grad=True),
        rand(2, 2, 50, 8, grad=True),
        rand(2, 2, 50, 6 + block[0] % 2 * 2, grad=True),
    )
    out, _ = attention(q, k, v, None, 0.3, True, block[1])
    want, _ = dense(q, k, v, None, True, block[1])
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
    g = rand(*out.shape)
    for a, c in zip(torch.autograd.grad(out, (q, k, v), g), torch.autograd.grad(want, (q, k, v), g), strict=True):
        torch.testing.assert_close(a, c, rtol=1e-11, atol=1e-11)


def test_two_blocks_of_keys_merge_to_the_whole() -> None:
    q, k, v = rand(2, 4, 6, 8), rand(2, 2, 6, 8), rand(2, 2, 6, 8)
    whole, whole_lse = attention(q, k, v, None, 0.3, True)
    parts = [
        attention(q, k[:, :, a : a + 3], v[:, :, a : a + 3], None, 0.3, True, k_offset=torch.tensor(a)) for a in (0, 3)
    ]
    assert parts[1][1][0, 0, 0] == -torch.inf  # row 0 sees nothing of the second block
    out, lse = merge([p[0] for p in parts], [p[1] for p in parts])
    torch.testing.assert_close(out, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-12, atol=1e-12)


def test_the_gradient_of_blocks_adds_up_with_the_merged_out_and_lse() -> None:
    q, k, v, g = rand(2, 4, 6, 8), rand(2, 2, 6, 8), rand(2, 2, 6, 8), rand(2, 4, 6, 8)
    out, lse = attention(q, k, v, None, 0.3, True)
    dq, dk, dv, _ = attention_backward(g, q, k, v, None, out, lse, 0.3, True)
    parts = [
        attention_backward(
            g, q, k[:, :, a : a + 3], v[:, :, a : a + 3], None, out, lse, 0.3, True, k_offset=torch.tensor(a)
        )
        for a in (0, 3)
    ]
    torch.testing.assert_close(parts[0][0] + parts[1][0], dq, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(torch.cat([p[1] for p in parts], 2), dk, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(torch.cat([p[2] for p in parts], 2), dv, rtol=1e-11, atol=1e-11)


def test_striped_rows_take_a_list_of_positions() -> None:
    q, k, v = rand(1, 2, 6, 8), rand(1, 2, 6, 8), rand(1, 2, 6, 8)
    whole, _ = attention(q, k, v, None, 0.3, True)
    odd = torch.tensor([1, 3, 5])
    part, _ = attention(q[:, :, odd], k, v, None, 0.3, True, q_offset=odd)
    torch.testing.assert_close(part, whole[:, :, odd], rtol=1e-12, atol=1e-12)


def test_dropped_weights_do_not_depend_on_who_computes_them() -> None:
    q, k, v, seed = rand(4, 6, 8, 8), rand(4, 6, 8, 8), rand(4, 6, 8, 8), torch.tensor(11)
    whole, _ = attention(q, k, v, None, 0.3, False, 0, 0.5, seed, 2)
    # Rank 1 of two over heads and rank 1 of two over rows: (b, h, s, t) = (4, 3, 4, 8) of (4, 6, 8, 8).
    part, _ = attention(
        q[:, 3:, 4:], k[:, 3:], v[:, 3:], None, 0.3, False, 0, 0.5, seed, 2,
        sizes=(4, 3, 4, 8), strides=(384, 64, 8, 1), offset=torch.tensor(3 * 64 + 4 * 8),
    )  # fmt: skip
    torch.testing.assert_close(part, whole[:, 3:, 4:], rtol=1e-12, atol=1e-12)


def test_attention_refuses_heads_that_do_not_group() -> None:
    with pytest.raises(RuleError, match="h a multiple of g"):
        make_fx(lambda q, k: attention(q, k, k, None, 1.0), tracing_mode="fake")(rand(1, 4, 5, 8), rand(1, 3, 5, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_attention(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, h, n, 8, dtype=dtype, requires_grad=True) for h, n in ((4, 5), (2, 7), (2, 7)))
    bias = torch.randn(4, 5, 7, dtype=dtype, requires_grad=True)
    torch.library.opcheck(attention.op, (q, k, v, None, 0.3, True))
    torch.library.opcheck(attention.op, (q, k, v, bias, 0.3, True, 0, 0.1, torch.tensor(3), 1))


def test_bfloat16_attention_is_close_to_float32() -> None:
    q, k, v = (torch.randn(2, 4, 9, 16) for _ in range(3))
    out, lse = attention(*(t.bfloat16() for t in (q, k, v)), None, 0.25, True)
    want, want_lse = attention(q, k, v, None, 0.25, True)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    torch.testing.assert_close(out.float(), want, rtol=2e-2, atol=2e-2)  # 8 bits of mantissa
    torch.testing.assert_close(lse, want_lse, rtol=2e-2, atol=2e-2)


# ---- updates ----


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("amsgrad", [True, False])
@pytest.mark.parametrize("maximize", [True, False])
@pytest.mark.parametrize(("dtype", "tol"), [(D, 1e-14), (torch.float32, 1e-6)])
def test_adamw_is_torchs(decoupled, amsgrad, maximize, dtype, tol) -> None:
    p = torch.randn(6, 5, dtype=dtype)
    ref = p.clone().requires_grad_()
    cls = torch.optim.AdamW if decoupled else torch.optim.Adam
    opt = cls([ref], lr=3e-2, weight_decay=0.1, amsgrad=amsgrad, maximize=maximize, foreach=False)
    m, v, top, lr = torch.zeros_like(p), torch.zeros_like(p), torch.zeros_like(p), torch.tensor(3e-2, dtype=D)
    for step in (1.0, 2.0, 3.0):
        g = torch.randn(5, 6, dtype=dtype).T  # lies otherwise in memory than the parameter
        ref.grad = g.clone()
        opt.step()
        p, m, v, new = adamw(
            p, g, m, v, torch.tensor(step), lr, 0.9, 0.999, 1e-8, 0.1, decoupled, amsgrad, top, maximize
        )
        top = new if amsgrad else top
    torch.testing.assert_close(p, ref.detach(), rtol=tol, atol=tol)


@pytest.mark.parametrize(
    ("momentum", "dampening", "nesterov", "decay"),
    [(0, 0, False, 0.1), (0.9, 0, False, 0), (0.9, 0.3, False, 0.1), (0.9, 0, True, 0.1)],
)
def test_sgd_is_torchs(momentum, dampening, nesterov, decay) -> None:
    p = rand(6, 5)
    ref = p.clone().requires_grad_()
    opt = torch.optim.SGD(
        [ref], lr=3e-2, momentum=momentum, dampening=dampening, nesterov=nesterov, weight_decay=decay, foreach=False
    )
    buffer, lr = (torch.zeros_like(p) if momentum else None), torch.tensor(3e-2, dtype=D)
    for step in (1.0, 2.0, 3.0):
        g = rand(6, 5)
        ref.grad = g.clone()
        opt.step()
        p, new = sgd(p, g, buffer, torch.tensor(step), lr, momentum, dampening, decay, nesterov)
        buffer = new if momentum else None
    torch.testing.assert_close(p, ref.detach(), rtol=1e-14, atol=1e-14)


def test_mixed_dtypes_take_the_plain_path() -> None:
    """bfloat16 parameters with float32 moments: the moments are exact, the parameter is rounded once."""
    p, g, lr = torch.randn(6).bfloat16(), torch.randn(6).bfloat16(), torch.tensor(1e-2, dtype=D)
    zeros = torch.zeros(6)
    got = adamw(p, g, zeros, zeros, torch.tensor(1.0), lr, 0.9, 0.999, 1e-8, 0.1, True)
    want = adamw(p.float(), g.float(), zeros, zeros, torch.tensor(1.0), lr, 0.9, 0.999, 1e-8, 0.1, True)
    assert got[0].dtype == torch.bfloat16
    torch.testing.assert_close(got[0], want[0].bfloat16())
    torch.testing.assert_close(got[1], want[1])


def in_place_of(target):
    twin = twin_of(target)
    return twin.target, twin.places


def test_twins_write_the_same_numbers_in_place() -> None:
    t = [rand(4), rand(4), rand(4), rand(4).abs(), torch.tensor(1.0), torch.tensor(0.1, dtype=D)]
    options = (0.9, 0.99, 1e-8, 0.1, True, True, rand(4).abs())
    cases = {"colofunc.adamw": (*t, *options), "colofunc.sgd": (t[0], t[1], t[2], t[4], t[5], 0.9, 0.0, 0.1, True)}
    rms = options_of("RMSprop", dict(alpha=0.9, eps=1e-8, momentum=0.5, centered=True, weight_decay=0.1, maximize=False))
    cases["colofunc.update"] = ("RMSprop", t[0], t[1], t[3] + 2, t[2], t[3] / 9, *t[4:], rms)
    cases["colofunc.lion"] = (*t[:3], t[5], 0.9, 0.99, 0.1)
    cases["colofunc.lamb_direction"] = (*t[:5], 0.9, 0.99, 1e-6, 0.1)
    p, g, m, v = rand(64, 64), rand(64, 64), rand(64, 64), rand(64, 64).abs()  # smaller ones have no moments in 8 bits
    blocks = block_of((64, 64))
    cases["colofunc.adamw8"] = (p, g, *packed_moment(m, blocks, True), *packed_moment(v, blocks, False), *t[4:], *options[:-1])
    halves = [x.bfloat16() for x in (p, g, m, v)]
    cases["colofunc.adamw_rounded"] = (*halves, *t[4:], *options[:-2], False, None, 3)
    assert cases.keys() == set(updates())
    for target, args in cases.items():
        twin, places = in_place_of(target)
        results = KERNELS[target](*args)
        written = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
        KERNELS[twin](*written)
        assert all(torch.equal(results[out], written[arg]) for out, arg in places)
        assert not torch.equal(results[0], args[places[0][1]])


def test_an_update_is_found_whenever_it_is_defined() -> None:
    def lower_(param, grad):
        param.sub_(grad)

    functional, in_place = define_update("opstest_lower_(Tensor(a!) param, Tensor grad) -> ()", lower_)
    try:
        assert functional.name in updates() and in_place.name not in updates()
        assert is_in_place_update(in_place.name) and not is_in_place_update(functional.name)
        assert in_place_of(functional.name)[0] == in_place.name
    finally:
        for operator in (functional, in_place):
            del OPERATORS[operator.name], KERNELS[operator.name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("go", [True, False])
@pytest.mark.parametrize("target", ["colofunc.adamw", "colofunc.sgd", "colofunc.update"])
def test_an_update_that_is_not_to_happen_leaves_every_bit(target, go, dtype) -> None:
    p, g, m, v = (torch.rand(5, 3).to(dtype) for _ in range(4))
    g[0, 0] = 1.0 if go else float("nan")
    rest = (torch.tensor(2.0), torch.tensor(0.1, dtype=D))
    # In bf16 one moment in another dtype takes the path without torch's fused kernel.
    cases = {
        "colofunc.adamw": (p, g, m, v.float(), *rest, 0.9, 0.99, 1e-8, 0.1, True, True, torch.rand(5, 3), False),
        "colofunc.sgd": (p, g, m, *rest, 0.9, 0.5, 0.1, True, False),
        "colofunc.update": ("RMSprop", p, g, v, m, v / 9, *rest, [0.9, 1e-8, 0.5, 1.0, 0.1, 0.0]),
    }
    args, (twin, places) = cases[target], in_place_of(target)
    results = KERNELS[target](*args, torch.tensor(go))
    written = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    KERNELS[twin](*written, torch.tensor(go))
    wanted = KERNELS[target](*args) if go else None
    for out, arg in places:
        old = args[arg] if wanted is None else wanted[out]
        assert torch.equal(results[out], old) and torch.equal(written[arg], old)


@pytest.mark.parametrize("op", [adamw, adamw_])
def test_opcheck_adamw(op) -> None:
    t = (
        torch.randn(3, 4),
        torch.randn(3, 4),
        torch.randn(3, 4),
        torch.rand(3, 4),
        torch.tensor(1.0),
        torch.tensor(0.1, dtype=D),
    )
    torch.library.opcheck(op.op, (*t, 0.9, 0.99, 1e-8, 0.1, True))
    torch.library.opcheck(op.op, (*t, 0.9, 0.99, 1e-8, 0.1, True, True, torch.rand(3, 4)))
    torch.library.opcheck(op.op, (*t, 0.9, 0.99, 1e-8, 0.1, True), {"finite": torch.tensor(False)})


@pytest.mark.parametrize("op", [sgd, sgd_])
def test_opcheck_sgd(op) -> None:
    t = (torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 4), torch.tensor(1.0), torch.tensor(0.1, dtype=D))
    torch.library.opcheck(op.op, (*t, 0.9, 0.0, 0.1, True))
    torch.library.opcheck(op.op, (*t, 0.9, 0.0, 0.1, True, False, torch.tensor(False)))


@pytest.mark.parametrize("op", [update, update_])
def test_opcheck_update(op) -> None:
    t = (torch.randn(3, 4), torch.randn(3, 4), torch.tensor(0.9), torch.randn(3, 4), torch.rand(3, 4), torch.tensor(1.0))
    options = [0.9, 0.99, 1e-8, 0.1, 0.0, 0.01, 0.0]
    torch.library.opcheck(op.op, ("NAdam", *t, torch.tensor(0.1, dtype=D), options))


# ---- the modes ----


class Log(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


X = torch.linspace(-1, 1, 120).reshape(2, 3, 4, 5)
P = torch.tensor([0.1, 0.9, 0.0, 2.0])
REPLACED = {
    "linear": (lambda: F.linear(X, torch.ones(3, 5)), "linear"),
    "sdpa": (lambda: F.scaled_dot_product_attention(X, X, X, dropout_p=0.1), "attention"),
    "dropout": (lambda: nn.Dropout(0.5)(X), "dropout"),
    "dropout in place": (lambda: F.dropout(X.clone(), 0.5, inplace=True), "dropout"),
    "feature dropout": (lambda: nn.Dropout2d(0.5)(X), "random_bernoulli"),
    "alpha dropout": (lambda: nn.AlphaDropout(0.5)(X), "random_bernoulli"),
    "drop path": (lambda: X.new_empty(2, 1, 1, 1).bernoulli_(0.5), "random_bernoulli"),
    "gumbel softmax": (lambda: F.gumbel_softmax(X), "random_uniform"),
    "rrelu": (lambda: F.rrelu(X, training=True), "random_uniform"),
    "fractional pool": (lambda: nn.FractionalMaxPool2d(2, output_size=4)(X.reshape(1, 1, 10, 12)), "random_uniform"),
    "rand": (lambda: torch.rand(2, 3, dtype=D), "random_uniform"),
    "randn": (lambda: torch.randn((2, 3)), "random_normal"),
    "rand_like": (lambda: torch.rand_like(X), "random_uniform"),
    "randint": (lambda: torch.randint(2, 5, size=(9,)), "random_uniform"),
    "randperm": (lambda: torch.randperm(7), "random_bits"),
    "bernoulli": (lambda: torch.bernoulli(torch.full((9,), 0.5)), "random_uniform"),
    "multinomial": (lambda: torch.multinomial(P, 2), "random_uniform"),
    "normal": (lambda: torch.normal(torch.zeros(3), torch.ones(3)), "random_normal"),
    "uniform_": (lambda: torch.empty(3).uniform_(2, 3), "random_uniform"),
    "normal_": (lambda: torch.empty(3).normal_(1.0, 2.0), "random_normal"),
    "exponential_": (lambda: torch.empty(3).exponential_(), "random_uniform"),
    "cauchy_": (lambda: torch.empty(3).cauchy_(1.0, 2.0), "random_uniform"),
    "geometric_": (lambda: torch.empty(30).geometric_(0.3), "random_uniform"),
    "log_normal_": (lambda: torch.empty(3).log_normal_(), "random_normal"),
    "random_": (lambda: torch.empty(3).random_(), "random_uniform"),
    "init": (lambda: nn.init.kaiming_uniform_(torch.empty(3, 3)), "random_uniform"),
    "distribution": (lambda: torch.distributions.Normal(0.0, 1.0).rsample((3,)), "random_normal"),
}


@pytest.mark.parametrize("name", REPLACED)
def test_the_mode_replaces(name: str) -> None:
    run, op = REPLACED[name]
    state = torch.get_rng_state()
    with canonical.single_device(torch.tensor(1)):
        with Log() as log:
            first = run()
        again = run()
    assert f"colofunc.{op}.default" in log.ops
    assert torch.equal(torch.get_rng_state(), state)  # torch's own generator was not asked
    if first.is_floating_point() and first.numel() > 2 and op.startswith("random"):
        assert not torch.equal(first, again)  # another call site
    with canonical.single_device(torch.tensor(1)):
        assert torch.equal(run(), first)


@pytest.mark.parametrize("fn", [lambda x: torch.meshgrid(x, x, indexing="ij")[0], torch.unique, F.threshold])
def test_a_helper_that_checks_in_place_of_its_function(fn) -> None:
    """Some functions leave the check for overrides to a private helper, and which do differs between versions."""
    x = torch.tensor([1.0, 2.0, 2.0])
    args = (1.0, 0.0) if fn is F.threshold else ()
    expected = fn(x, *args)
    with canonical.single_device():
        assert torch.equal(fn(x, *args), expected)


def test_multihead_attention_is_opened_up() -> None:
    mha = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
    x = torch.randn(2, 5, 8)
    with canonical.single_device(torch.tensor(1)), Log() as log:
        mha(x, x, x, need_weights=False)
    assert [op for op in log.ops if op.startswith("colofunc")] == [
        "colofunc.linear.default", "colofunc.attention.default", "colofunc.linear.default",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("q", "k"),
    [
        ((4, 3, 8), (4, 5, 8)),
        ((3, 8), (5, 8)),
        ((2, 2, 3, 3, 8), (2, 2, 3, 5, 8)),
        ((2, 4, 3, 8), (1, 4, 5, 8)),
        ((2, 4, 3, 8), (2, 1, 5, 8)),
    ],
)
@pytest.mark.parametrize("mask", [None, "bool", "full"])
def test_sdpa_of_any_rank(q, k, mask) -> None:
    query, key, value = rand(*q), rand(*k), rand(*k)
    m = None if mask is None else torch.rand(q[-2], k[-2]) > 0.3 if mask == "bool" else rand(*q[:-1], k[-2])
    want = F.scaled_dot_product_attention(query, key, value, m)
    with canonical.single_device():
        got = F.scaled_dot_product_attention(query, key, value, m)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_sdpa_with_grouped_heads_and_scale() -> None:
    q, k, v = rand(2, 4, 3, 8), rand(2, 2, 5, 8), rand(2, 2, 5, 8)
    want = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, scale=0.2, is_causal=True)
    with canonical.single_device():
        got = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, scale=0.2, is_causal=True)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_autocast_is_respected() -> None:
    x, w = torch.randn(3, 5), torch.randn(4, 5)
    with torch.autocast("cpu", torch.bfloat16):
        want = F.linear(x, w)
        with canonical.single_device():
            got = F.linear(x, w)
    assert got.dtype == torch.bfloat16 and torch.equal(got, want)


def test_dropout_off_is_the_input() -> None:
    with canonical.single_device():
        assert F.dropout(X, 0.5, training=False) is X and F.dropout(X, 0.0) is X


def test_without_a_seed_torchs_generator_decides() -> None:
    def run() -> torch.Tensor:
        with canonical.single_device():
            return F.dropout(X, 0.5)

    torch.manual_seed(3)
    first, second = run(), run()
    torch.manual_seed(3)
    assert torch.equal(run(), first) and not torch.equal(first, second)


def test_a_generator_of_its_own_is_refused() -> None:
    with canonical.single_device(), pytest.raises(TraceError, match=r"own torch.Generator"):
        torch.rand(3, generator=torch.Generator())


def test_sites_are_numbered_and_the_seed_is_asked_for_late() -> None:
    asked = []

    def seed() -> torch.Tensor:
        asked.append(1)
        return torch.tensor(5)

    (mode,) = canonical.modes(seed)
    with mode:
        F.linear(X, torch.ones(3, 5))
        assert not asked
        first, second = torch.rand(4), torch.rand(4)
    from_sites = [torch.ops.colofunc.random_uniform(torch.tensor(5), site, (4,), torch.float32) for site in (0, 1)]
    assert torch.equal(first, from_sites[0]) and torch.equal(second, from_sites[1])
