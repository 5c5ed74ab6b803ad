"""Slice 5: attention beside torch's flash kernels, forward and with the backward, and with a mask of documents beside FlexAttention.
Flash and FlexAttention stand beside one another too, and so do FlexAttention and a dense mask: what the guards choose between.

Eight calls in a row are one run, each with the result of the one before as its query, so that the start of a run counts for little.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import colofunc as cf
from bench import Row
from bench.gpu.measuring import Run, side_by_side
from bench.gpu.parts import Part, Setup, Slice, at_most, not_run
from bench.gpu.sizes import REAL
from colofunc.mesh.stopwatch import card_s

CALLS = 8
PUBLISHED = {1024: 221, 4096: 294, 8192: 308}
"""TFLOP/s of FlashAttention-2 on an H100, heads of 128, causal, forward and backward (Dao-AILab/flash-attention, assets)."""
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Operands = dict[str, Tensor]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def chain(attend: Attend, x: Operands) -> Tensor:
    q = x["q"]
    for _ in range(CALLS):
        q = attend(q, x["k"], x["v"])
    return q


def operands(setup: Setup, length: int, device: str = "cuda") -> Operands:
    heads, key_heads, width = setup.sizes.heads
    rows = torch.Generator().manual_seed(0)
    shapes = {"q": heads, "k": key_heads, "v": key_heads, "g": heads}
    return {name: torch.randn(1, n, length, width, generator=rows).to(setup.sizes.dtype).to(device) for name, n in shapes.items()}


def with_backward(attend: Attend, x: Operands) -> Any:
    """Gradients of a sum that has `g` as the result's gradient."""

    def weighed(given: Operands) -> Tensor:
        return (chain(attend, given) * x["g"]).float().sum()

    return cf.value_and_grad(weighed)({name: x[name] for name in "qkv"})


def eager_backward(attend: Attend, x: Operands) -> Any:
    leaves = [x[name].detach().requires_grad_() for name in "qkv"]
    out = (chain(attend, dict(zip("qkv", leaves, strict=True))) * x["g"]).float().sum()
    return torch.autograd.grad(out, leaves)


def flash(run: Callable[[], Any]) -> Run:
    def kernels_of_flash() -> Any:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return run()

    return kernels_of_flash


def staged(fn: Callable[..., Any], *args: Any) -> Run:
    step = cf.shard(fn, cf.Mesh(device="cuda"))
    return lambda: step(*args)


def rows_of(what: str, flops: float, mine: Run, theirs: Run | None, why: str, other: str, setup: Setup) -> list[Row]:
    runs = {"ours": mine} | ({other: theirs} if theirs is not None else {})
    taken = side_by_side(runs, setup.sizes.repeats)
    rows = [Row(f"{what}, {name}", f"{1e3 * s / CALLS:.4g} ms, {flops * CALLS / s / 1e12:.0f} TFLOP/s") for name, s in taken.items()]
    if theirs is None:
        return [*rows, not_run(f"{what}, ours / {other}", why)]
    ratio = taken["ours"] / taken[other]
    return [*rows, at_most(f"{what}, ours / {other}, time", ratio, 1.05, f"{ratio:.3f}")]


def length(k: int, setup: Setup) -> list[Row]:
    if k >= len(setup.sizes.lengths):
        return [not_run("attention", "these sizes have fewer lengths")]
    tokens, heads, width = setup.sizes.lengths[k], setup.sizes.heads[0], setup.sizes.heads[2]
    x, flops = operands(setup, tokens), 2.0 * tokens * tokens * heads * width  # 4 s² h e, of which causality leaves half
    why = setup.without("eager")
    alone, whole = (None, None) if why else (flash(partial(chain, causal, x)), flash(partial(eager_backward, causal, x)))
    forward = rows_of("forward", flops, staged(partial(chain, causal), x), alone, why, "flash", setup)
    both = rows_of("forward and backward", 3.5 * flops, staged(partial(with_backward, causal), x), whole, why, "flash", setup)
    published = PUBLISHED.get(tokens)
    return [*forward, *both, *([Row("published, FlashAttention-2 on an H100", f"{published} TFLOP/s")] if published else [])]


def documents(setup: Setup) -> list[Row]:
    """Four documents in a row; a token sees those of its own before it. Two thirds of what is causal is never looked at."""
    tokens = setup.sizes.lengths[-1]
    x = operands(setup, tokens)
    of = torch.arange(tokens, device="cuda") // (tokens // 4)
    why = setup.without("eager", "inductor")
    flops = 3.5 * 2.0 * tokens * tokens / 4 * setup.sizes.heads[0] * setup.sizes.heads[2]
    theirs = None if why else partial(eager_backward, flex(of), x)
    mine = staged(partial(with_backward, partial(masked, of)), x)
    return rows_of("documents, forward and backward", flops, mine, theirs, why, "FlexAttention", setup)


def kernels(setup: Setup) -> list[Row]:
    """The same attention by two kernels: causal by flash and by FlexAttention, documents by FlexAttention and by a dense mask."""
    tokens = setup.sizes.lengths[-1]
    x = operands(setup, tokens)
    of = torch.arange(tokens, device="cuda") // (tokens // 4)
    why = setup.without("eager", "inductor")
    by_flex = None if why else partial(eager_backward, flex(torch.zeros_like(of)), x)
    found = beside("causal", {"flash": staged(partial(with_backward, causal), x), "FlexAttention": by_flex}, why, setup)
    by_flex, by_mask = (staged(partial(with_backward, partial(masked, of)), x) for _ in range(2))
    return [*found, *beside("documents", {"FlexAttention": by_flex, "a dense mask": dense(by_mask)}, "", setup)]


def beside(what: str, runs: dict[str, Run | None], why: str, setup: Setup) -> list[Row]:
    """Two ways, and what the first takes of the second's time."""
    first, second = runs
    ratio = f"{what}, {first} / {second}, time"
    given = {name: run for name, run in runs.items() if run is not None}
    if len(given) < 2:
        return [not_run(ratio, why)]
    taken = side_by_side(given, setup.sizes.repeats)
    rows = [Row(f"{what} by {name}, forward and backward", f"{1e3 * s / CALLS:.4g} ms") for name, s in taken.items()]
    return [*rows, Row(ratio, f"{taken[first] / taken[second]:.3f}")]


RATED = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
RATED_HEADS = (64, 128)


def rates(setup: Setup) -> list[Row]:
    """Operations a second of torch's kernels for causal rows, what a device's file has under `attention`: forward and backward apart."""
    why = setup.without("eager")
    if why:
        return [not_run("rates of kernels", why)]
    rows = []
    for name, backend in RATED.items():
        for head in RATED_HEADS:
            found = [rate_of(backend, head, tokens, setup) for tokens in setup.sizes.rated]
            points = ", ".join(f"[{tokens / 2:g}, {1e-12 * f:.0f}e12, {1e-12 * b:.0f}e12]" for tokens, (f, b) in found)
            rows.append(Row(f"{name}, heads of {head}: [keys of a row, forward, backward]", points))
    return rows


def rate_of(backend: SDPBackend, head: int, tokens: int, setup: Setup) -> tuple[int, tuple[float, float]]:
    """(tokens, (forward, backward)); as many heads, and rows, as fill a card."""
    width = setup.sizes.rated_width
    rows, heads = max(1, width // tokens), max(1, 2048 // head)
    q, k, v = (torch.randn(rows, heads, tokens, head, device="cuda", dtype=setup.sizes.dtype, requires_grad=True) for _ in range(3))
    flops = 2.0 * rows * heads * tokens * tokens * head  # 4 s² h e, of which causality leaves half
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        grad = torch.randn_like(out)
        runs = {
            "forward": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            "backward": lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True),
        }
        taken = {name: on_the_card(run, setup.sizes.repeats) for name, run in runs.items()}
    return tokens, (flops / taken["forward"], 2.5 * flops / taken["backward"])


def on_the_card(run: Run, repeats: int) -> float:
    """Seconds of a run on the card alone, the host ahead of it."""
    for _ in range(3):
        run()

    def in_a_row() -> None:
        for _ in range(repeats):
            run()

    return card_s(in_a_row, torch.device("cuda", torch.cuda.current_device())) / repeats


def dense(run: Callable[[], Any]) -> Run:
    """Without flash, FlexAttention is not taken either: the efficient kernel is, with a mask of all pairs."""

    def by_a_dense_mask() -> Any:
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            return run()

    return by_a_dense_mask


def masked(of: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """of: (s,), the document of each token."""
    at = torch.arange(len(of), device=q.device)
    mask = (of[:, None] == of[None, :]) & (at[:, None] >= at[None, :])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def flex(of: Tensor, compiler: Callable[..., Any] = torch.compile) -> Attend:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (of[q] == of[k]) & (q >= k)

    block = create_block_mask(seen, None, None, len(of), len(of), device=of.device)
    return partial(compiler(flex_attention), block_mask=block, enable_gqa=True)


SLICE = Slice(5, "Attention beside flash, 32 query and 8 key heads of 128, bfloat16, causal", (
    *(Part(f"{n} tokens", partial(length, k)) for k, n in enumerate(REAL.lengths)), Part("documents", documents),
    Part("kernels beside one another", kernels), Part("rates", rates),
))  # fmt: skip
