"""Slice 8: experts: grouped products and a whole layer, beside `F.grouped_mm`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import colofunc as cf
from bench import Row
from bench.gpu.measuring import Run, side_by_side
from bench.gpu.parts import Part, Setup, Slice, at_most, not_run
from colofunc.ops.grouped import grouped_mm

K = 2


def compared(what: str, flops: float, mine: Run, theirs: Run | None, why: str, setup: Setup) -> list[Row]:
    runs = {"ours": mine} | ({"F.grouped_mm": theirs} if theirs is not None else {})
    taken = side_by_side(runs, setup.sizes.repeats)
    rows = [Row(f"{what}, {name}", f"{1e3 * s:.4g} ms, {flops / s / 1e12:.0f} TFLOP/s") for name, s in taken.items()]
    if theirs is None:
        return [*rows, not_run(f"{what}, ours / F.grouped_mm", why)]
    ratio = taken["ours"] / taken["F.grouped_mm"]
    return [*rows, at_most(f"{what}, ours / F.grouped_mm, time", ratio, 1.1, f"{ratio:.3f}")]


def products(setup: Setup) -> list[Row]:
    tokens, experts, d, f = setup.sizes.grouped
    x, w = normal(setup, tokens, d), normal(setup, experts, d, f)
    # Uneven, as routers choose: the first has three times the share of the last.
    share = torch.linspace(3.0, 1.0, experts)
    ends = (share.cumsum(0) / share.sum() * tokens).round().to(torch.int32).to("cuda")
    why = setup.without("grouped_mm")
    theirs = None if why else lambda: F.grouped_mm(x, w, offs=ends)
    return compared("a grouped product", 2.0 * tokens * d * f, lambda: grouped_mm(x, w, ends), theirs, why, setup)


def layer(setup: Setup) -> list[Row]:
    """Routed tokens through gated experts, forward and backward."""
    tokens, experts, d, f = setup.sizes.grouped
    tokens = tokens // K
    x = {"x": normal(setup, tokens, d), "up": normal(setup, experts, 2 * f, d), "down": normal(setup, experts, d, f)}
    logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(0)).to("cuda")
    index, weight, _ = cf.moe.route(logits, k=K)
    weight = weight.to(setup.sizes.dtype)

    def mine(p: dict[str, Tensor], index: Tensor, weight: Tensor) -> Any:
        return cf.value_and_grad(lambda p: cf.moe.experts(p["x"], index, weight, p["up"], p["down"]).float().sum())(p)

    def theirs() -> Any:
        leaves = {name: t.detach().requires_grad_() for name, t in x.items()}
        return torch.autograd.grad(by_groups(leaves, index, weight).float().sum(), list(leaves.values()))

    step, why = cf.shard(mine, cf.Mesh(device="cuda")), setup.without("eager", "grouped_mm")
    flops = 3 * 2.0 * tokens * K * 3 * d * f
    return compared("a layer, forward and backward", flops, lambda: step(x, index, weight), None if why else theirs, why, setup)


def by_groups(p: dict[str, Tensor], index: Tensor, weight: Tensor) -> Tensor:
    """The same layer as models write it with `F.grouped_mm`."""
    order = index.flatten().argsort(stable=True)
    ends = torch.bincount(index.flatten(), minlength=p["up"].shape[0]).cumsum(0).to(torch.int32)
    rows = p["x"][order // K]
    gate, up = F.grouped_mm(rows, p["up"].transpose(1, 2), offs=ends).chunk(2, -1)
    y = F.grouped_mm(F.silu(gate) * up, p["down"].transpose(1, 2), offs=ends) * weight.flatten()[order, None]
    return torch.zeros_like(p["x"]).index_add(0, order // K, y)


def normal(setup: Setup, *shape: int) -> Tensor:
    from bench.gpu.models import weight

    return weight(*shape, dtype=setup.sizes.dtype).detach().to("cuda")


SLICE = Slice(8, "Experts beside F.grouped_mm, bfloat16", (Part("a product", products), Part("a layer", layer)))
