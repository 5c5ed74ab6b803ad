"""Attention on CUDA: torch's kernels behind our operators, on functions that compute what these do (`pretended.attention`)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pretended.attention as emulated
import pytest
import torch
from attention_calls import (
    BACKWARD,
    FORWARD,
    backward_args,
    chosen,
    compare,
    eight_billion,
    forward_args,
    generated,
    on_the_card,
    takers,
)
from pretended import Machine, on_card
from pretended.attention import ATTENTION
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from colofunc.ops import attention_cuda as cuda
from colofunc.ops import attention_guards as guards
from colofunc.ops.attention import blockwise, blockwise_backward
from colofunc.ops.attention_bands import cut, known_band, visible_pairs
from colofunc.ops.attention_parts import merge
from colofunc.ops.define import KERNELS
from colofunc.ops.kernels import KernelCall, Like, describe

aten = torch.ops.aten


class Emulated(TorchDispatchMode):
    """CUDA's operators on tensors of the host; which were called."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        run = ATTENTION.get(func)
        if run is None or args[0].is_meta:
            return func(*args, **(kwargs or {}))
        self.called.append(func.__name__)
        return run(*args, **(kwargs or {}))


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both sides take float64, so that what is told to kernels is compared to the last bits."""
    monkeypatch.setattr(guards, "HALVES", (*guards.HALVES, torch.float64))
    monkeypatch.setattr(emulated, "HALVES", [*emulated.HALVES, torch.float64])
    monkeypatch.setattr(emulated, "EFFICIENT", [*emulated.EFFICIENT, torch.float64])
    yield


@pytest.fixture(autouse=True)
def built_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where torch was built without CUDA."""
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(guards, "has_triton", lambda: True)


# ---- what kernels are told where masks are bands ----


def test_a_band_is_what_causal_masks_windows_offsets_and_stripes_show() -> None:
    cases = 0
    for s, t, ahead, window, causal, step in itertools.product((1, 2, 5, 6), (1, 4, 7), range(-8, 9), (0, 1, 3), (False, True), (1, 2)):
        rows, columns = (20 + ahead, step if s > 1 else 0), (20, step if t > 1 else 0)
        if not causal and not window:
            continue
        step = step if s > 1 or t > 1 else 1
        distance = {(i, j): 20 + ahead + step * i - 20 - step * j for i in range(s) for j in range(t)}
        wanted = {pair for pair, d in distance.items() if (not causal or d >= 0) and (not window or d < window)}
        band = known_band(causal, window, rows, columns)
        assert band is not None
        part = cut(band, s, t)
        assert (part is None) == (not wanted)
        if part is None:
            continue
        assert visible_pairs(part) == len(wanted)
        n, m = part.i1 - part.i0, part.j1 - part.j0
        ahead_of = {(i + part.i0, j + part.j0): j - i - (m - n) for i in range(n) for j in range(m)}
        shown = {p for p, a in ahead_of.items() if (part.left < 0 or a >= -part.left) and (part.right < 0 or a <= part.right)}
        assert shown == wanted
        assert {i for i, _ in shown} == set(range(part.i0, part.i1)), "a row that sees nothing reaches a kernel"
        assert not part.top_left or shown == {(i + part.i0, j + part.j0) for i in range(n) for j in range(m) if j <= i}
        cases += 1
    assert cases > 1000
    assert known_band(True, 0, None, (0, 1)) is None
    assert known_band(True, 0, (0, 2), (0, 3)) is None


# ---- the emulations are torch's operators ----


def layouts() -> Iterator[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Calls of torch's operators: shapes, strides and options of all sorts, numbers in bfloat16."""
    drawn = random.Random(0)
    for b, h, s, t, e in ((1, 2, 5, 5, 8), (2, 4, 40, 24, 16)):
        rows_first = drawn.random() < 0.5

        def heads(n: int, width: int, b: int = b, h: int = h, rows_first: bool = rows_first) -> Tensor:
            made = torch.randn(b, n, h, width).transpose(1, 2) if rows_first else torch.randn(b, h, n, width)
            return made.to(torch.bfloat16)

        q, k, v, grad = heads(s, e), heads(t, e), heads(t, e), heads(s, e)
        lse, padded = torch.randn(b, h, s), torch.randn(b, h, -(-s // 32) * 32)
        unsigned = torch.empty(2, dtype=torch.uint64), torch.empty((), dtype=torch.uint64)
        signed = torch.empty((), dtype=torch.int64), torch.empty((), dtype=torch.int64)
        scale = {"scale": 0.3}
        tokens = tuple(x.transpose(1, 2) for x in (q, k, v, grad))
        window = {"window_size_left": 3, "window_size_right": 2}
        flash, flash_grads = aten._flash_attention_forward.default, aten._flash_attention_backward.default
        yield flash, (*tokens[:3], None, None, s, t, 0.0, False, False), scale | window
        yield flash_grads, (tokens[3], *tokens[:3], tokens[0], lse, None, None, s, t, 0.0, True, *unsigned), scale
        yield aten._scaled_dot_product_flash_attention.default, (q, k, v, 0.0, True), scale
        more = (None, None, s, t, 0.0, False, *unsigned)
        yield aten._scaled_dot_product_flash_attention_backward.default, (grad, q, k, v, q, lse, *more), scale
        bias = torch.zeros(b, h, s, -(-t // 16) * 16, dtype=q.dtype)[..., :t]
        yield aten._scaled_dot_product_efficient_attention.default, (q, k, v, bias, True), scale
        yield aten._scaled_dot_product_efficient_attention.default, (q, k, v, None, True, 0.0, True), scale
        some = (grad, q, k, v, bias, q, padded, *signed, 0.0, [True, True, True, True], False)
        yield aten._scaled_dot_product_efficient_attention_backward.default, some, scale
        yield aten._scaled_dot_product_cudnn_attention.default, (q, k, v, None, True, 0.0, False), scale
        some = (grad, q, k, v, q, emulated.stats_of(lse), *signed, None, None, None, s, t, 0.0, False)
        yield aten._scaled_dot_product_cudnn_attention_backward.default, some, scale


def test_results_lie_as_torch_says_that_they_do_on_cuda() -> None:
    torch._C._ensureCUDADeviceGuardSet()
    called = set()
    for op, args, options in layouts():
        called.add(op)
        with FakeTensorMode() as mode:
            on_cuda = torch.utils._pytree.tree_map_only(
                Tensor, lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda"), args
            )
            said = op(*on_cuda, **options)
        assert mode is not None
        found = ATTENTION[op](*args, **options)
        assert len(said) == len(found), op
        for wanted, got in zip(said, found, strict=True):
            assert isinstance(wanted, Tensor) == isinstance(got, Tensor), op
            if isinstance(wanted, Tensor):
                layout = [(x.shape, x.dtype, x.stride() if x.numel() > 1 else ()) for x in (wanted, got)]
                assert layout[0] == layout[1], op
    assert called == set(ATTENTION)


def plain(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, scale: float, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Attention as the definition has it."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * scale if bias is None else q @ k.mT * scale + bias
    scores = scores.masked_fill(~keep, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


@pytest.mark.parametrize("causal", [False, True])
def test_emulations_give_the_numbers_of_attention_and_of_its_gradient(causal: bool, in_float64: None) -> None:
    torch.manual_seed(0)
    b, h, s, t, e = 2, 4, 5, 7, 8
    q, k, v = (torch.randn(b, n, w, e, dtype=torch.float64, requires_grad=True) for n, w in ((h, s), (h, t), (h, t)))
    bias = torch.zeros(b, h, s, 16, dtype=torch.float64)[..., :t].normal_().requires_grad_()
    grad = torch.randn(b, h, s, e, dtype=torch.float64)
    corner = {"flash": t - s, "efficient": 0, "cudnn": 0}
    for name, first in corner.items():
        keep = torch.arange(t)[None] - torch.arange(s)[:, None] <= (first if causal else t)
        given = bias if name == "efficient" and not causal else None
        wanted, lse = plain(q, k, v, keep, 0.4, given)
        slopes = torch.autograd.grad(wanted, (q, k, v, *([bias] if given is not None else [])), grad)
        x = [y.detach() for y in (q, k, v)]
        mask = None if given is None else given.detach()
        state = (torch.empty(()), torch.empty(()))
        if name == "flash":
            found = emulated.scaled_flash(*x, 0.0, causal, scale=0.4)
            back = emulated.scaled_flash_backward(grad, *x, *found[:2], None, None, s, t, 0.0, causal, *state, scale=0.4)
        elif name == "efficient":
            found = emulated.efficient_forward(*x, mask, True, 0.0, causal, scale=0.4)
            back = emulated.efficient_backward(grad, *x, mask, *found[:2], *state, 0.0, [True] * 4, causal, scale=0.4)
        else:
            found = emulated.cudnn_forward(*x, None, True, 0.0, causal, scale=0.4)
            back = emulated.cudnn_backward(grad, *x, *found[:2], *state, None, None, None, s, t, 0.0, causal, scale=0.4)
        torch.testing.assert_close(found[0], wanted.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found[1].reshape(b, h, -1)[..., :s], lse.detach(), rtol=1e-12, atol=1e-12)
        for slope, got in zip(slopes, back, strict=False):
            torch.testing.assert_close(got, slope, rtol=1e-11, atol=1e-11)


def test_emulations_refuse_what_torch_refuses() -> None:
    q = torch.randn(1, 2, 4, 12).to(torch.bfloat16)
    with pytest.raises(RuntimeError, match="multiple of 8"):
        emulated.scaled_flash(q, q, q)
    with pytest.raises(RuntimeError, match=r"no kernel for torch\.float32"):
        emulated.scaled_flash(*(torch.randn(1, 2, 4, 8),) * 3)
    q, k = torch.randn(1, 4, 4, 8), torch.randn(1, 2, 4, 8)
    with pytest.raises(RuntimeError, match="as many key heads"):
        emulated.efficient_forward(q, k, k, None, True)
    with pytest.raises(RuntimeError, match="not correctly aligned"):
        emulated.efficient_forward(q, q, q, torch.zeros(1, 4, 4, 4), True)


# ---- our operators on them ----


def test_kernels_of_torch_give_the_operator_on_generated_calls(in_float64: None) -> None:
    """Whatever a guard lets through, causal, windows, documents, grouped heads, offsets, stripes: to the last bits of float64."""
    torch.manual_seed(0)
    drawn, seen = random.Random(1), dict.fromkeys(("flash", "cudnn", "efficient", "biased"), 0)
    for case in range(130):
        call = generated(drawn)
        args = forward_args(call)
        wanted = blockwise(*args)
        grad = torch.randn_like(wanted[0])
        dbias = "bias" in call and call["bias"].is_floating_point()
        back = backward_args(call, grad, *wanted, dbias)
        slopes = blockwise_backward(*back)
        with Emulated():
            assert len(takers(FORWARD, args)) > 1, "none of torch's kernels takes this call"
            for kernel in takers(FORWARD, args):
                if kernel.fn is not blockwise:
                    compare(kernel.fn(*args), wanted, (case, kernel.fn.__name__))
                    seen[kernel.fn.__name__] += 1
            for kernel in takers(BACKWARD, back):
                if kernel.fn is not blockwise_backward:
                    compare(kernel.fn(*back), slopes, (case, kernel.fn.__name__))
    assert min(seen.values()) >= 5, seen


def test_rows_behind_a_cache_see_it_all_by_each_kernel_that_takes_them(in_float64: None) -> None:
    """Causal, s < t: flash counts from the last row and column, cuDNN from the first."""
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, 16, 8, dtype=torch.float64), torch.randn(1, 2, 24, 8, dtype=torch.float64)
    args = forward_args({"q": q, "k": k, "v": k, "scale": 0.3, "causal": True, "q_offset": torch.tensor(8)})
    wanted = plain(q, k, k, torch.ones(16, 24).tril(8).bool(), 0.3)
    kernels = takers(FORWARD, args)
    assert kernels
    for kernel in kernels:
        with Emulated():
            compare(kernel.fn(*args), wanted, kernel)


def test_blocks_of_a_ring_merge_and_their_gradients_take_the_merged_out_and_lse(in_float64: None) -> None:
    torch.manual_seed(0)
    n, size = 4, 12
    q, k, v, grad = (torch.randn(2, 24 * n // 2, h, 8, dtype=torch.float64).transpose(1, 2) for h in (4, 2, 2, 4))
    whole = {"q": q, "k": k, "v": v, "scale": 0.3, "causal": True}
    out, lse = blockwise(*forward_args(whole))
    slopes = blockwise_backward(*backward_args(whole, grad, out, lse))
    striped = lambda r: slice(r, None, n)  # noqa: E731
    blocks = lambda r: slice(r * size, (r + 1) * size)  # noqa: E731
    for part, step in ((blocks, 1), (striped, n)):
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        for me in range(n):
            mine = {"q": q[:, :, part(me)], "scale": 0.3, "causal": True}
            positions = [torch.arange(n * size)[part(r)] for r in range(n)]
            where = positions if step > 1 else [p[0] for p in positions]
            calls = [{**mine, "k": k[:, :, part(r)], "v": v[:, :, part(r)], "q_offset": where[me], "k_offset": where[r]} for r in range(n)]
            with Emulated():
                found = [cuda.flash(*forward_args(call)) for call in calls]
                merged = merge(*zip(*found, strict=True))
                grads = [cuda.flash_backward(*backward_args(call, grad[:, :, part(me)], *merged)) for call in calls]
            compare(merged, (out[:, :, part(me)], lse[:, :, part(me)]), ("ring", me))
            torch.testing.assert_close(sum(g[0] for g in grads), slopes[0][:, :, part(me)], rtol=1e-10, atol=1e-10)
            for r in range(n):
                dk[:, :, part(r)] += grads[r][1]
                dv[:, :, part(r)] += grads[r][2]
        compare((dk, dv), slopes[1:3], "ring")


# ---- who takes what ----


@pytest.mark.parametrize("backward", [False, True])
def test_a_call_gets_the_quickest_kernel_that_takes_it(backward: bool) -> None:
    call, end = eight_billion(), "_backward" if backward else ""
    assert chosen(call, backward=backward) == f"flash{end}"
    assert chosen(call, backward=backward, window=1024) == f"flash{end}"
    assert chosen(call, backward=backward, q_offset=torch.tensor(4096), k_offset=torch.tensor(0)) == f"flash{end}"
    unknown = {"q_offset": torch.empty((), dtype=torch.int64, device="meta")}
    assert chosen(call, backward=backward, **unknown) == f"flex{end}", "where rows stand lies on the device"
    # A card before Ampere has no flash; bfloat16 neither.
    assert chosen(call, (7, 5), backward) == f"blockwise{end}"
    halves = {name: x.to(torch.float16) if isinstance(x, Tensor) else x for name, x in call.items()}
    assert chosen(halves, (7, 5), backward) == f"efficient{end}"
    wide = {name: x.float() if isinstance(x, Tensor) else x for name, x in call.items()}
    assert chosen(wide, backward=backward) == f"efficient{end}"
    assert chosen(wide, backward=backward, window=1024) == f"biased{end}"
    keyed = {"dropout": 0.1, "seed": torch.empty((), dtype=torch.int64, device="meta")}
    assert chosen(call, backward=backward, **keyed) == f"blockwise{end}", "the bits of dropout are ours"
    least = torch.empty(1, 1, 8192, dtype=torch.int64, device="meta")
    assert chosen(call, backward=backward, code=least, least=least, most=least) == f"flex{end}"


def test_backward_of_large_heads_needs_the_shared_memory_of_large_cards() -> None:
    make = lambda h: torch.empty(1, 64, h, 256, dtype=torch.bfloat16, device="meta").transpose(1, 2)  # noqa: E731
    call = {"q": make(4), "k": make(4), "v": make(4), "scale": 0.1, "causal": True}
    assert chosen(call, (8, 9)) == "flash"
    assert chosen(call, (8, 9), backward=True) == "efficient_backward"
    assert chosen(call, (8, 0), backward=True) == "flash_backward"


def test_a_torch_that_was_built_without_flash_takes_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
        assert chosen(eight_billion()) in ("cudnn", "efficient")


def test_switches_of_torch_decide_here_too() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        assert chosen(eight_billion()) == "cudnn"
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION]):
        assert chosen(eight_billion()) == "efficient"
    with sdpa_kernel([SDPBackend.MATH]):
        assert chosen(eight_billion()) == "blockwise"


# ---- on the pretended card ----


def test_causal_attention_of_an_8b_shape_is_one_kernel_forward_and_one_backward() -> None:
    torch.manual_seed(0)
    make = lambda h: torch.randn(1, 96, h, 128).to(torch.bfloat16).transpose(1, 2)  # noqa: E731
    call = {"q": make(8), "k": make(2), "v": make(2), "scale": 128**-0.5, "causal": True}
    with Machine() as machine:
        here = on_the_card(machine, call)
        machine.forget_counts()
        out, lse = KERNELS[FORWARD](*forward_args(here))
        assert dict(machine.launches) == {"aten._flash_attention_forward.default": 1}
        machine.launches.clear()
        KERNELS[BACKWARD](*backward_args(here, here["q"], out, lse))
        assert dict(machine.launches) == {"aten._flash_attention_backward.default": 1}
        assert not machine.waits


def test_nothing_waits_on_the_card_and_numbers_are_those_of_the_host() -> None:
    torch.manual_seed(0)
    drawn, cases = random.Random(2), 15
    for case in range(cases):
        call = generated(drawn)
        if "bias" in call and case % 2:
            del call["bias"]
        call = {name: x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in call.items()}
        wanted = blockwise(*forward_args(call))
        grad = torch.randn_like(wanted[0])
        dbias = "bias" in call and call["bias"].is_floating_point()
        slopes = blockwise_backward(*backward_args(call, grad, *wanted, dbias))
        with Machine(seed=case) as machine:
            here = on_the_card(machine, call)
            if case % 3 == 0:  # where rows stand is on the card
                here = {name: on_card(machine, x) if isinstance(x, Tensor) else x for name, x in here.items()}
            there = on_card(machine, grad)
            machine.forget_counts()
            found = KERNELS[FORWARD](*forward_args(here))
            back = KERNELS[BACKWARD](*backward_args(here, there, *found, dbias))
            assert not machine.waits, machine.places
            found, back = [x.cpu() for x in found], [x.cpu() for x in back]
        for got, right in zip((*found, *back), (*wanted, *slopes), strict=True):
            torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-4, msg=lambda text, case=case: f"case {case}: {text}")


def test_dropout_keeps_its_bits_on_the_card_and_does_not_wait() -> None:
    torch.manual_seed(0)
    make = lambda: torch.randn(2, 20, 4, 8).transpose(1, 2)  # noqa: E731
    call = {"q": make(), "k": make(), "v": make(), "scale": 0.3, "causal": True, "dropout": 0.3, "seed": torch.tensor(7), "site": 3}
    wanted = blockwise(*forward_args(call))
    with Machine() as machine:
        here = on_the_card(machine, call)
        machine.forget_counts()
        found = KERNELS[FORWARD](*forward_args(here))
        assert not machine.waits, machine.places
        torch.testing.assert_close(found[0].cpu(), wanted[0], rtol=1e-5, atol=1e-5)


class Counted(TorchDispatchMode):
    """Operators of attention that are called, and what else is launched (all but views and empty tensors)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention: list[str] = []
        self.others: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = func.__name__
        if "attention" in name:
            self.attention.append(name)
        elif not any(r.alias_info is not None for r in func._schema.returns) and not name.startswith(("empty", "new_empty", "device")):
            self.others.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("rows", "more", "calls"), [
    (8192, {}, 1),
    (8192, {"window": 1024}, 1),
    (8192, {"q_offset": torch.tensor(8192), "k_offset": torch.tensor(0)}, 1),
    (8192, {"q_offset": torch.arange(8192) * 4 + 2, "k_offset": torch.arange(8192) * 4}, 1),
    (2048, {"q_offset": torch.arange(2048) * 4 + 2}, 4),
])  # fmt: skip
def test_torch_s_shape_functions_take_what_guards_let_through_at_full_size(rows: int, more: dict[str, Any], calls: int) -> None:
    """Of an 8B model: causal, a window, a block of a ring behind, stripes, and a stripe over all columns."""
    torch._C._ensureCUDADeviceGuardSet()
    with FakeTensorMode():
        sizes = ((rows, 32), (8192, 8), (8192, 8))
        q, k, v = (torch.empty(1, n, h, 128, dtype=torch.bfloat16, device="cuda").transpose(1, 2) for n, h in sizes)
    call = {"q": q, "k": k, "v": v, "scale": 128**-0.5, "causal": True}
    with Counted() as counted:
        out, lse = KERNELS[FORWARD](*forward_args(call | more))
        assert counted.attention == ["_flash_attention_forward.default"] * calls
        assert calls > 1 or not counted.others, "nothing but the kernel is launched"
        counted.attention.clear()
        grads = KERNELS[BACKWARD](*backward_args(call | more, out, out, lse))
        assert counted.attention == ["_flash_attention_backward.default"] * calls
        assert calls > 1 or not counted.others
    for got, said in zip((out, lse), torch.ops.colofunc.attention(*forward_args(call)), strict=True):
        assert (got.shape, got.stride(), got.dtype, got.device) == (said.shape, said.stride(), said.dtype, said.device)
    assert [g.shape for g in grads[:3]] == [x.shape for x in (q, k, v)]


def test_a_mask_is_made_for_bounded_rows_at_once(monkeypatch: pytest.MonkeyPatch, in_float64: None) -> None:
    monkeypatch.setattr(cuda, "MAX_BIAS", 32 * 40)
    torch.manual_seed(0)
    q, k = (torch.randn(2, n, 2, 8, dtype=torch.float64).transpose(1, 2) for n in (90, 40))
    bias = torch.randn(2, 90, 40, dtype=torch.float64)
    call = {"q": q, "k": k, "v": k, "scale": 0.3, "causal": True, "bias": bias}
    wanted = blockwise(*forward_args(call))
    grad = torch.randn_like(wanted[0])
    with Emulated() as mode:
        compare(cuda.biased(*forward_args(call)), wanted, "blocks")
        assert len(mode.called) == 3
        back = backward_args(call, grad, *wanted, True)
        compare(cuda.biased_backward(*back), blockwise_backward(*back), "blocks")


def test_a_guard_asks_nothing_of_the_device() -> None:
    """Fake tensors have no numbers: whoever reads one fails."""
    with FakeTensorMode():
        where = torch.empty((), dtype=torch.int64)
        q = torch.empty(1, 2, 8, 8, dtype=torch.bfloat16)
        args = forward_args({"q": q, "k": q, "v": q, "scale": 1.0, "causal": True, "q_offset": where})
        assert describe(FORWARD, args, (9, 0))["q_offset"] == Like((), torch.int64)
        assert [kernel.fn.__name__ for kernel in takers(FORWARD, args)] == ["biased", "blockwise"]


def test_a_call_is_described_by_name() -> None:
    call = KernelCall("aten.mm.default", (("self", Like((2, 3), torch.float32)),))
    assert call["self"].nbytes == 24
    with pytest.raises(KeyError, match=r"aten\.mm\.default has no argument 'x'"):
        call["x"]
