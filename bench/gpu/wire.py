"""Slice 17: gradients in few bits (`wire=`): what a card takes to pack and to add up messages, beside reading and writing their bytes.

One card sends nothing, so what the wire saves is not measured here: that is its bytes, which are written down, times the links' rate.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from colofunc_plugins import zero

import colofunc as cf
from bench import Row
from bench.gpu.measuring import ids, side_by_side, staged_run, training
from bench.gpu.models import Llama
from bench.gpu.parts import Part, Setup, Slice, at_most
from colofunc.ops.wire import scheme_of, wire_open, wire_pack, wire_sum

SCHEMES = ("int8", "int4", "fp8")
MEMBERS = 8
"""Ranks that sum a gradient: a message has a row for each, and each adds up so many rows."""
PASSES = 2.0
"""Packing or adding up should take at most so many times as reading and writing its bytes once: a group's largest comes first."""
NEAR = 0.02
"""Of a loss: results are bfloat16, and sums are taken in another order."""


def gradient(setup: Setup, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of many sizes, as those of gradients are."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(min(1 << 20, setup.sizes.gradient), generator=generator).exp().sub(1)
    return numbers.to(dtype).repeat(setup.sizes.gradient // numbers.numel())


def bits(scheme: str, setup: Setup) -> list[Row]:
    """A message that the card packs, and what it opens one to, against the host's."""
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        x = gradient(setup, dtype)[: 1 << 22]
        name = scheme_of(scheme).name
        here = wire_pack(x, name, MEMBERS)
        there = wire_pack(x.to("cuda"), name, MEMBERS)
        opened = wire_open(here.to("cuda"), x.shape, dtype, name).cpu()
        apart = int((there.cpu() != here).sum()) + int((opened != wire_open(here, x.shape, dtype, name)).sum())
        what = f"bytes packed and numbers opened that differ from the CPU's, {str(dtype).removeprefix('torch.')}"
        rows.append(Row(what, f"{apart} of {here.numel() + x.numel():,}", "none", apart == 0))
    return rows


def speed(scheme: str, setup: Setup) -> list[Row]:
    """Packing a gradient in bfloat16 for all ranks, and adding up what a rank is sent; a copy says what the card's memory does."""
    name, x = scheme_of(scheme).name, gradient(setup, setup.sizes.dtype).to("cuda")
    packed = wire_pack(x, name, MEMBERS)
    part = (x.numel() // MEMBERS,)
    runs = {
        "a copy": x.clone,
        "packing": partial(wire_pack, x, name, MEMBERS),
        "adding up": partial(wire_sum, packed, part, x.dtype, name),
    }
    taken = side_by_side(runs, setup.sizes.repeats)
    moved = {"packing": x.nbytes + packed.nbytes, "adding up": packed.nbytes + x.nbytes // MEMBERS}
    rate = 2 * x.nbytes / taken["a copy"]
    rows = [
        Row("bytes of a message / of the gradient", f"{packed.nbytes / x.nbytes:.3f} ({x.numel():,} numbers in bfloat16)"),
        Row("rate of a copy, read and written", f"{rate / 1e9:,.0f} GB/s"),
    ]
    for what, nbytes in moved.items():
        ratio = taken[what] * rate / nbytes
        text = f"{ratio:.2f} ({1e3 * taken[what]:.3g} ms for {nbytes / 1e6:,.0f} MB)"
        rows.append(at_most(f"{what}, seconds / its bytes at that rate", ratio, PASSES, text))
    return rows


def step(scheme: str, setup: Setup) -> list[Row]:
    """The losses of three steps of ZeRO-2 on two simulated ranks that send gradients so, on the card and on the host."""
    of = setup.sizes.narrow
    step_fn, state = training(lambda: Llama(of.shape, torch.bfloat16))
    losses = {}
    for device in ("cuda", "cpu"):
        staged: Any = cf.shard(step_fn, cf.Mesh(dp=2, device=device), zero(2, "dp"))
        staged = cf.quantize(staged, wire=scheme)
        run = staged_run(staged, state, {name: x.to(device) for name, x in ids(of).items()})
        losses[device] = [float(run()) for _ in range(3)]
    apart = max(abs(a - b) / abs(b) for a, b in zip(losses["cuda"], losses["cpu"], strict=True))
    return [at_most("largest difference of the loss over three steps, card / host", apart, NEAR, f"{apart:.1e} ({losses['cuda']})")]


SLICE = Slice(17, "Gradients in few bits: messages of eight ranks", (
    *(Part(f"bits, {scheme}", partial(bits, scheme)) for scheme in SCHEMES),
    *(Part(f"a step, {scheme}", partial(step, scheme)) for scheme in SCHEMES),
    *(Part(f"speed, {scheme}", partial(speed, scheme)) for scheme in SCHEMES),
))  # fmt: skip
