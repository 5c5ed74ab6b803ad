"""The slices, the most valuable first."""

from __future__ import annotations

from bench.gpu import (
    attention,
    checks,
    clock,
    compiled,
    experts,
    fp8,
    host,
    llama,
    lora,
    memory,
    native,
    nccl,
    offload,
    quantize,
    randomness,
    wire,
    zoo,
)
from bench.gpu.parts import Slice

SLICES: tuple[Slice, ...] = (
    checks.SLICE, zoo.SLICE, host.SLICE, llama.SLICE, attention.SLICE, randomness.SLICE, memory.SLICE, experts.SLICE, clock.SLICE,
    offload.SLICE, compiled.SLICE, nccl.SLICE, native.SLICE, fp8.SLICE, quantize.SLICE,
    lora.SLICE, wire.SLICE,
)  # fmt: skip
