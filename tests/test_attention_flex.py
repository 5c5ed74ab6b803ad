"""Attention with masks that no fused kernel takes, by FlexAttention: numbers, guards, the pretended card, and the code that is compiled."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pretended.attention as emulated
import pretended.flex as emulated_flex
import pytest
import torch
import torch.nn.functional as F
from attention_calls import (
    BACKWARD,
    FORWARD,
    backward_args,
    chosen,
    compare,
    eight_billion,
    forward_args,
    on_the_card,
    takers,
)
from colofunc_plugins import gather_kv, ring, ulysses
from cuda_code import allocated_bytes, flex_in_a_process
from pretended import Machine, on_card
from pretended.kernels import BUILT_WITH_CUDA
from torch import Tensor
from triton_interpreted import differences_in_a_process

import colofunc as cf
from colofunc import compat
from colofunc.ops import attention_flex as flexible
from colofunc.ops import attention_guards as guards
from colofunc.ops.attention import blockwise, blockwise_backward
from colofunc.ops.attention_flex import flex, flex_backward
from colofunc.ops.attention_parts import merge
from colofunc.ops.define import KERNELS
from colofunc.ops.kernels import describe


@pytest.fixture(autouse=True)
def built_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where torch was built without CUDA."""
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(guards, "has_triton", lambda: True)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 8 rows and columns, no call is too small, and launches count as nothing; both sides take float32 and float64."""
    wide = (torch.float32, torch.float64)
    monkeypatch.setattr(flexible, "BLOCK", 8)
    monkeypatch.setattr(guards, "BLOCK", 8)
    monkeypatch.setattr(guards, "LEAST_FLEX_FLOPS", 0)
    monkeypatch.setattr(guards, "FLEX_LAUNCHES", {FORWARD: 0, BACKWARD: 0})
    monkeypatch.setattr(guards, "HALVES", (*guards.HALVES, *wide))
    monkeypatch.setattr(emulated, "HALVES", [*emulated.HALVES, *wide])


@pytest.fixture(params=["blocks", "eager"])
def on_host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled: operators that look at the lists of blocks as the compiled kernel does, or torch's own on the host."""
    monkeypatch.setattr(flexible, "launch", emulated_flex.as_written)
    if request.param == "blocks":
        functions = SimpleNamespace(flex_attention=emulated_flex.forward, flex_attention_backward=emulated_flex.backward)
        monkeypatch.setattr(compat, "_flex", functions)


# ---- kinds of masks ----

B, ROWS, COLUMNS = 2, 37, 45


def heads(n: int, length: int, width: int = 16) -> Tensor:
    return torch.randn(B, length, n, width, dtype=torch.float64).transpose(1, 2)


def operands(rows: int = ROWS, columns: int = COLUMNS, **more: Any) -> dict[str, Any]:
    """Four query heads on two key heads; values are wider than keys."""
    return {"q": heads(4, rows), "k": heads(2, columns), "v": heads(2, columns, 24), "scale": 0.3, **more}


def documents(rows: int = ROWS, columns: int = COLUMNS, batch: int = B, codes: int = 1) -> dict[str, Tensor]:
    """Runs of columns that belong together; rows see their own."""
    code = torch.randint(0, 4, (batch, codes, columns)).sort(-1).values
    least = torch.randint(0, 4, (batch, codes, rows)).sort(-1).values
    return {"code": code, "least": least, "most": least.clone()}


def padding() -> dict[str, Tensor]:
    """The last columns of each sample are none; of one sample all."""
    keep = (torch.arange(COLUMNS) < torch.tensor([[0], [30]])).long()[:, None]
    ones = torch.ones(B, 1, ROWS, dtype=torch.long)
    return {"code": keep, "least": ones, "most": ones}


def some_rows() -> Tensor:
    return torch.randperm(60)[:ROWS].sort().values


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "documents": lambda: operands(**documents()),
    "documents, causal": lambda: operands(causal=True, **documents()),
    "documents, the same for all samples": lambda: operands(**documents(batch=1)),
    "documents, a sliding window": lambda: operands(causal=True, window=9, **documents()),
    "documents by two numbers": lambda: operands(**documents(codes=2)),
    "padding": lambda: operands(**padding()),
    "padding, causal": lambda: operands(causal=True, **padding()),
    "documents, a block of a ring": lambda: operands(causal=True, q_offset=torch.tensor(30), k_offset=torch.tensor(16), **documents()),
    "documents, a stripe": lambda: operands(causal=True, q_offset=torch.arange(ROWS) * 3 + 1, **documents()),
    "positions anywhere": lambda: operands(causal=True, window=20, q_offset=some_rows(), k_offset=torch.randperm(60)[:COLUMNS]),
    "a mask of bool": lambda: operands(bias=torch.rand(B, 1, ROWS, COLUMNS) < 0.6),
    "a mask of bool, causal": lambda: operands(causal=True, bias=torch.rand(1, 4, ROWS, COLUMNS) < 0.9),
    "a mask of bool by columns": lambda: operands(bias=torch.rand(B, 1, 1, COLUMNS) < 0.5),
    "a bias": lambda: operands(bias=torch.randn(1, 4, ROWS, COLUMNS, dtype=torch.float64)),
    "a bias of rows and columns": lambda: operands(bias=torch.randn(ROWS, COLUMNS, dtype=torch.float64)),
    "a bias, a sliding window": lambda: operands(causal=True, window=9, bias=torch.randn(B, 4, ROWS, COLUMNS, dtype=torch.float64)),
    "a bias, documents": lambda: operands(bias=torch.randn(B, 1, 1, COLUMNS, dtype=torch.float64), **documents()),
    "whole blocks": lambda: operands(32, 64, causal=True, code=torch.arange(64)[None, None] // 16, least=torch.zeros(1, 1, 32).long(),
                                     most=torch.arange(32)[None, None] // 8),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_is_that_of_the_operator_forward_and_backward(kind: str, small: None, on_host: None) -> None:
    torch.manual_seed(0)
    call = KINDS[kind]()
    args = forward_args(call)
    wanted = blockwise(*args)
    compare(flex(*args), wanted, kind)
    assert flex in [kernel.fn for kernel in takers(FORWARD, args)]
    grad, grad_lse = torch.randn_like(wanted[0]), torch.randn_like(wanted[1])
    for given in (None, grad_lse):
        back = backward_args(call, grad, *wanted, grad_lse=given)
        compare(flex_backward(*back), blockwise_backward(*back), kind)
        assert flex_backward in [kernel.fn for kernel in takers(BACKWARD, back)]


def test_the_gradient_of_the_log_sum_exp_is_taken_with_any_mask(small: None, on_host: None) -> None:
    """Flash takes none: a causal mask alone comes here with it, and stays there without."""
    torch.manual_seed(0)
    for call in (operands(), operands(causal=True), operands(causal=True, window=9)):
        wanted = blockwise(*forward_args(call))
        assert flex not in [kernel.fn for kernel in takers(FORWARD, forward_args(call))]
        back = backward_args(call, torch.randn_like(wanted[0]), *wanted, grad_lse=torch.randn_like(wanted[1]))
        assert flex_backward in [kernel.fn for kernel in takers(BACKWARD, back)]
        compare(flex_backward(*back), blockwise_backward(*back), "causal")


def test_blocks_that_show_nothing_are_left_out_and_those_that_show_all_are_not_asked(small: None) -> None:
    of = torch.arange(64) // 16
    vectors = {"code": of[None, None], "least": of[None, None], "most": of[None, None]}
    x = {"q": torch.empty(1, 1, 64, 16), "k": torch.empty(1, 1, 64, 16), **vectors}
    kind = flexible.FlexKind(tuple(x), 1.0, True, 0)
    some, full = flexible._shown(flexible._bounds(x, kind), None, 64, 64, torch.device("cpu"))
    of_blocks = torch.arange(8) // 2
    same = of_blocks[:, None] == of_blocks
    below = torch.arange(8)[None] < torch.arange(8)[:, None]
    assert some[0, 0].equal(same & (below | torch.eye(8).bool()))
    assert full[0, 0].equal(same & below)


def test_blocks_of_a_ring_merge_and_their_gradients_take_the_merged_out_and_lse(small: None, on_host: None) -> None:
    torch.manual_seed(0)
    n, size = 3, 16
    of = torch.randint(0, 4, (B, 1, n * size)).sort(-1).values
    whole = operands(n * size, n * size, causal=True, code=of, least=of, most=of)
    grad = torch.randn(B, 4, n * size, 24, dtype=torch.float64)
    out, lse = blockwise(*forward_args(whole))
    slopes = blockwise_backward(*backward_args(whole, grad, out, lse))
    dk, dv = torch.zeros_like(whole["k"]), torch.zeros_like(whole["v"])
    for me in range(n):
        rows = slice(me * size, (me + 1) * size)
        calls = []
        for r in range(n):
            columns = slice(r * size, (r + 1) * size)
            part = {"q": whole["q"][:, :, rows], "k": whole["k"][:, :, columns], "v": whole["v"][:, :, columns], "code": of[..., columns]}
            where = {"q_offset": torch.tensor(me * size), "k_offset": torch.tensor(r * size)}
            calls.append({"scale": 0.3, "causal": True, "least": of[..., rows], "most": of[..., rows], **part, **where})
        merged = merge(*zip(*[flex(*forward_args(call)) for call in calls], strict=True))
        compare(merged, (out[:, :, rows], lse[:, :, rows]), me)
        dq = torch.zeros_like(whole["q"][:, :, rows])
        for r, call in enumerate(calls):
            columns = slice(r * size, (r + 1) * size)
            parts = flex_backward(*backward_args(call, grad[:, :, rows], *merged))
            dq += parts[0]
            dk[:, :, columns] += parts[1]
            dv[:, :, columns] += parts[2]
        torch.testing.assert_close(dq, slopes[0][:, :, rows], rtol=1e-10, atol=1e-10)
    compare((dk, dv), slopes[1:3], "ring")


# ---- who takes what ----


def long(length: int = 8192) -> dict[str, Tensor]:
    of = torch.empty(1, 1, length, dtype=torch.int64, device="meta")
    return {"code": of, "least": of, "most": of}


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


TAKEN: dict[str, dict[str, Any]] = {
    "documents or padding": long(),
    "and not causal": long() | {"causal": False},
    "and a sliding window": long() | {"window": 1024},
    "positions on the device": {"q_offset": meta(dtype=torch.int64)},
    "a mask of bool": {"bias": meta(1, 1, 8192, 8192, dtype=torch.bool)},
    "a bias": {"bias": meta(1, 32, 8192, 8192)},
}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("what", TAKEN)
def test_it_is_taken_for_what_fused_kernels_lack(what: str, backward: bool) -> None:
    assert chosen(eight_billion(), backward=backward, **TAKEN[what]) == ("flex_backward" if backward else "flex")


def sized(length: int, width: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    return {name: meta(1, n, length, width, dtype=dtype) for name, n in (("q", 32), ("k", 8), ("v", 8))}


REFUSED: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "dropout, whose bits are ours": (long() | {"dropout": 0.1, "seed": meta(dtype=torch.int64)}, (9, 0)),
    "float32": (long() | sized(8192, 128, torch.float32), (9, 0)),
    "float64": (long() | sized(8192, 128, torch.float64), (9, 0)),
    "heads of fewer than 16": (long() | sized(8192, 8), (9, 0)),
    "heads of more than 256": (long() | sized(8192, 264), (9, 0)),
    "heads of no multiple of 8": (long() | sized(8192, 100), (9, 0)),
    "fewer rows than a block": (long(64) | sized(64, 128), (9, 0)),
    "so little to do that to compile it does not pay": (long(256) | sized(256, 128), (9, 0)),
    "a card before Ampere": (long() | sized(8192, 128, torch.float16), (7, 5)),
}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("why", REFUSED)
def test_it_is_refused_for(why: str, backward: bool) -> None:
    more, capability = REFUSED[why]
    assert "flex" not in chosen(eight_billion(), capability, backward, **more)


def test_a_bias_with_a_gradient_is_refused_backward() -> None:
    call = eight_billion(bias=meta(1, 32, 8192, 8192))
    lse = torch.empty(1, 32, 8192, device="meta")
    names = [[k.fn.__name__ for k in takers(BACKWARD, backward_args(call, call["q"], call["q"], lse, needed))] for needed in (False, True)]
    assert ["flex_backward" in some for some in names] == [True, False]


def test_torch_s_switch_for_flash_and_a_missing_triton_refuse_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    call = eight_billion(**long())
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION]):
        assert chosen(call) == "biased"
    with sdpa_kernel([SDPBackend.MATH]):
        assert chosen(call) == "blockwise"
    assert chosen(call) == "flex"
    monkeypatch.setattr(guards, "has_triton", lambda: False)
    assert chosen(call) == "biased"


# ---- on the pretended card ----


@pytest.mark.parametrize("kind", KINDS)
def test_on_the_card_it_is_one_kernel_each_way_and_nothing_waits(kind: str, small: None) -> None:
    torch.manual_seed(0)
    call = {name: x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in KINDS[kind]().items()}
    wanted = blockwise(*forward_args(call))
    grad, grad_lse = torch.randn_like(wanted[0]), torch.randn_like(wanted[1])
    slopes = blockwise_backward(*backward_args(call, grad, *wanted, grad_lse=grad_lse))
    with Machine(seed=1) as machine:
        here = on_the_card(machine, call)
        given, of_lse = on_card(machine, grad), on_card(machine, grad_lse)
        machine.forget_counts()
        found = KERNELS[FORWARD](*forward_args(here))
        back = KERNELS[BACKWARD](*backward_args(here, given, *found, grad_lse=of_lse))
        assert not machine.waits, machine.places
        called = {name: n for name, n in machine.launches.items() if "attention" in name}
        found, back = [x.cpu() for x in found], [x.cpu() for x in back]
    assert called == {"higher_order.flex_attention": 1, "higher_order.flex_attention_backward": 1}
    for got, right in zip((*found, *back), (*wanted, *slopes), strict=True):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-4)


def attend(params: list[Tensor], x: Tensor, of: Tensor) -> Tensor:
    """Documents packed into rows of a batch; a token sees those of its own before it."""
    b, s, d = x.shape
    q, k, v = (F.linear(x, w).view(b, s, 2, 16).transpose(1, 2) for w in params)
    at = torch.arange(s, device=x.device)
    mask = (of[:, None, :, None] == of[:, None, None, :]) & (at[:, None] >= at)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return y.transpose(1, 2).reshape(b, s, d).pow(2).mean()


def step(params: list[Tensor], x: Tensor, of: Tensor) -> tuple[list[Tensor], Tensor]:
    loss, grads = cf.value_and_grad(attend)(params, x, of)
    return grads, loss


@pytest.mark.parametrize("plan", [None, ring, ulysses, gather_kv])
def test_a_step_over_packed_documents_comes_here_on_a_card_and_nobody_waits(plan: Any, small: None) -> None:
    torch.manual_seed(0)
    params, x = [torch.randn(32, 32) / 4 for _ in range(3)], torch.randn(2, 32, 32)
    of = torch.randint(0, 3, (2, 32)).sort(-1).values
    wanted, _ = step([w.double() for w in params], x.double(), of)
    with Machine() as machine:
        plans = [] if plan is None else [plan("cp")]
        run = cf.shard(step, cf.Mesh(cp=len(plans) + 1, device="cuda"), *plans, auto=False, donate=())
        there = on_card(machine, params), on_card(machine, x), on_card(machine, of)
        run(*there)
        machine.forget_counts()
        grads, _ = run(*there)
        assert not machine.waits, machine.places
        called = {name for name in machine.launches if "attention" in name}
        found = [g.full().cpu() for g in grads]
    assert called == {"higher_order.flex_attention", "higher_order.flex_attention_backward"}
    for got, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(got.double(), right, rtol=1e-4, atol=1e-5)


def test_a_plan_counts_its_seconds_and_its_memory() -> None:
    def layer(x: Tensor, of: Tensor) -> Tensor:
        q, k, v = x.split((4096, 1024, 1024), -1)
        q, k, v = (y.unflatten(-1, (-1, 128)).transpose(1, 2) for y in (q, k, v))
        at = torch.arange(x.shape[1])
        mask = (of[:, None, :, None] == of[:, None, None, :]) & (at[:, None] >= at)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).float().sum()

    x, of = cf.abstract((1, 8192, 6144), torch.bfloat16), cf.abstract((1, 8192), torch.int64)
    low = cf.shard(lambda x, of: cf.value_and_grad(layer)(x, of), cf.Mesh(topology="8xh100:datasheet")).lower(x, of)
    forward, backward = [node for node in low.program.nodes if "attention" in node.target]
    assert (forward.kernel.name, backward.kernel.name) == ("flex", "flex_backward")
    # Half of the pairs, two products of 128 each: 550 GFLOP; at 50 % of 989.5 TFLOP/s.
    assert forward.kernel.seconds == pytest.approx(4 * 32 * 8192 * 8193 / 2 * 128 / (0.5 * 989.5e12), rel=0.06)
    assert backward.kernel.seconds == pytest.approx(2.5 * forward.kernel.seconds, rel=0.06)
    report = low.memory()
    at = low.program.nodes.index(backward)
    assert report.by_kind["device"]["workspaces"][at] == backward.kernel.workspace_bytes > 8 * 32 * 8192


# ---- compiled once ----


def test_ranks_compile_the_same_whatever_stands_in_their_rows(monkeypatch: pytest.MonkeyPatch, small: None) -> None:
    """Positions and documents are operands; shapes, strides, dtypes and the kind of mask are what is compiled for."""
    made: list[Any] = []

    def compiler(graph: torch.fx.GraphModule, inputs: Any, name: str) -> Any:
        made.append((name, [node.name for node in graph.graph.nodes if node.op == "placeholder"]))
        return graph

    monkeypatch.setattr(compat, "compile_graph", compiler)
    monkeypatch.setattr(flexible, "_compiled", {})
    torch.manual_seed(0)
    for rank in range(3):
        call = operands(causal=True, q_offset=torch.tensor(37 * rank), k_offset=torch.tensor(5), **documents())
        wanted = blockwise(*forward_args(call))
        compare(flex(*forward_args(call)), wanted, rank)
        back = backward_args(call, torch.randn_like(wanted[0]), *wanted)
        compare(flex_backward(*back), blockwise_backward(*back), rank)
    vectors = ["code", "least", "most"]
    assert made == [
        ("inductor", ["q", "k", "v", *vectors, "row", "column"]),
        ("inductor", ["q", "k", "v", *vectors, "out", "lse", "grad_out", "row", "column"]),
    ]
    flex(*forward_args(operands(**documents())))
    flex(*forward_args(operands(36, **documents(36))))
    assert len(made) == 4


def test_where_it_cannot_be_compiled_the_error_says_what_to_take_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(compat, "compile_graph", broken)
    with pytest.raises(RuntimeError, match="no compiler") as caught:
        flex(*forward_args(operands(**documents())))
    assert caught.value.__notes__ == [
        "while attention was compiled by torch's FlexAttention. Try: run the step inside "
        "`with torch.nn.attention.sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION])`, which takes a dense mask"
    ]


# ---- the code that is compiled for a card ----

needs_cuda = pytest.mark.skipif(not BUILT_WITH_CUDA, reason="this torch was built without CUDA")
SIZES = (2, 8, 2, 1024, 1024, 64, 64)
ODD = (2, 6, 2, 1000, 1100, 96, 48)  # lengths of no whole blocks, heads that are filled up, values of another width


def assert_one_kernel_each_way(codes: list[str], sizes: Any) -> None:
    """The template's kernel once, Triton around it, nothing on the host; and no more memory than a plan counts."""
    b, h, g, s, t, e, f = sizes
    for code, backward in zip(codes, (False, True) * (len(codes) // 2), strict=True):
        call = code[code.index("def call") :]
        assert len(re.findall(r"= async_compile\.triton\('triton_tem_\w*flex_attention", code)) == 1
        assert not re.findall(r"cpp_fused\w*|empty_strided_cpu\w*|extern_kernels\.\w+|\.item\(\)|\.cpu\(\)", call)
        results = 2 * b * (h * s * e + g * t * (e + f)) if backward else 2 * b * h * s * f + 4 * b * h * s
        x = {"q": meta(b, h, s, e), "k": meta(b, g, t, e), "v": meta(b, g, t, f), "scale": 1.0, "causal": True, **long(t)}
        x |= {name: meta(b, 1, s, dtype=torch.int64) for name in ("least", "most")} | {"code": meta(b, 1, t, dtype=torch.int64)}
        lse = meta(b, h, s, dtype=torch.float32)
        args = backward_args(x, meta(b, h, s, f), meta(b, h, s, f), lse, grad_lse=lse) if backward else forward_args(x)
        held = guards._flex_bytes(describe(BACKWARD if backward else FORWARD, args, (9, 0)))
        assert allocated_bytes(call) - results <= held


EVERY_KIND = [
    "documents", "causal documents", "causal window documents grad_lse", "causal positions", "mask", "causal mask grad_lse", "bias",
    "window bias documents",
]  # fmt: skip


@needs_cuda
def test_inductor_writes_triton_for_it() -> None:
    codes = flex_in_a_process(["causal documents"], SIZES, assembled=False)
    assert_one_kernel_each_way(codes, SIZES)
    for code in codes:  # words that the template reads and has no defaults for
        assert {"PRESCALE_QK", "ROWS_GUARANTEED_SAFE", "BLOCKS_ARE_CONTIGUOUS", "OUTPUT_LOGSUMEXP"} <= constants(code)


def constants(code: str) -> set[str]:
    return set(re.findall(r"(\w+) ?: tl\.constexpr", code))


@needs_cuda
@pytest.mark.sweep
@pytest.mark.parametrize("sizes", [SIZES, ODD])
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_what_inductor_writes_for_every_kind_assembles(kind: str, sizes: Any) -> None:
    assert_one_kernel_each_way(flex_in_a_process([kind], sizes, assembled=True), sizes)


@needs_cuda
@pytest.mark.sweep
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_what_inductor_writes_gives_the_numbers(kind: str) -> None:
    """In Triton's interpreter, from operands in float32: out, lse and gradients, of lengths of no whole blocks."""
    found = differences_in_a_process(kind, (1, 2, 1, 200, 160, 16, 32))
    assert len(found) == 5 and all(value < 1e-5 for value in found.values()), found  # float32's rounding of sums over 160 columns
