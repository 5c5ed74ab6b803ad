"""Slice 15: a decode-shaped step, one token at a time, with weights of each scheme beside bfloat16: seconds, and bytes on the card."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import colofunc as cf
from bench import Row
from bench.gpu.measuring import Run, clear, side_by_side
from bench.gpu.parts import Part, Setup, Slice, at_least

LAYERS = 32
AIMS = {"int8": 1.5, "int4-g128": 2.0, "nf4": 1.5, "int8-dynamic": 1.0, "fp8-dynamic": 1.0, "fp8-g128-dynamic": 1.0}
"""Scheme -> how many times as many tokens a second as in bfloat16 it should have."""


def decode(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    """One token through all layers, each of which reads its weight whole."""
    for weight in weights.values():
        x = x + F.linear(x, weight).mean(-1, keepdim=True)
    return x


def held(setup: Setup, scheme: str) -> tuple[Run, int]:
    """(a step, bytes of its weights on the card); scheme: "" for bfloat16."""
    rows, columns = setup.sizes.packed
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for layer in range(LAYERS):
        weights[f"{layer}.weight"] = (torch.randn(rows, columns, generator=generator) / columns**0.5).to(setup.sizes.dtype)
    token = torch.randn(1, columns, generator=generator).to(setup.sizes.dtype).to("cuda")
    before = clear()
    step: Any = cf.shard(decode, cf.Mesh(device="cuda"))
    if scheme:
        step = cf.quantize(step, scheme)
    state = step.init(weights, token)
    return partial(step, state, token), clear() - before


def decoding(scheme: str, setup: Setup) -> list[Row]:
    plain, plain_bytes = held(setup, "")
    packed, packed_bytes = held(setup, scheme)
    taken = side_by_side({"bfloat16": plain, scheme: packed}, setup.sizes.repeats)
    ratio = taken["bfloat16"] / taken[scheme]
    text = f"{ratio:.2f} ({1e3 * taken['bfloat16']:.3g} and {1e3 * taken[scheme]:.3g} ms)"
    less = plain_bytes / max(1, packed_bytes)
    return [
        at_least(f"tokens/s, {scheme} / bfloat16", ratio, AIMS[scheme], text),
        Row(f"weights on the card, bfloat16 / {scheme}", f"{less:.2f} ({plain_bytes / 1e6:,.1f} and {packed_bytes / 1e6:,.1f} MB)"),
    ]


SLICE = Slice(15, "A step of one token with quantized weights", tuple(
    Part(f"decode, {scheme}", partial(decoding, scheme)) for scheme in AIMS
))  # fmt: skip
