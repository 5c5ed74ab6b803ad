"""The launch of `colofunc.ops.random_kernels` on a pretended card: the numbers by their definition, where the kernel would write.

As strict as a kernel: what it is given addresses of lies on the card, and it runs when its stream gets there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from colofunc.ops import draws
from colofunc.ops.random_kernels import Draw
from pretended.tensors import OnCard

if TYPE_CHECKING:
    from pretended.machine import Machine


def launch(machine: Machine, out: Tensor, x: Tensor | None, seed: Tensor | int, offset: Tensor | int, draw: Draw) -> None:
    given = (out, x, seed, offset, *(draw.tables or ()))
    for value in given:
        if isinstance(value, Tensor) and not isinstance(value, OnCard):
            raise RuntimeError("a kernel of a card is given an address of the host: on a card an illegal memory access")
    real_out, real_x, real_seed, real_offset, *tables = [value.cpu_view if isinstance(value, OnCard) else value for value in given]

    def kernel() -> None:
        index = (tables[0].unsqueeze(1) + tables[1]).flatten() if tables else far_of(draw, 1)
        numbers = numbers_of(draw, index + real_offset, torch.as_tensor(real_seed), out.dtype)
        if real_x is not None:
            extent = real_x.untyped_storage().nbytes() // real_x.itemsize - real_x.storage_offset()
            numbers = numbers * real_x.as_strided((extent,), (1,))[far_of(draw, 2)]
            numbers = (numbers.to(torch.float64 if out.dtype == torch.float64 else torch.float32) * draw.scale).to(out.dtype)
        real_out.as_strided((real_out.numel(),), (1,)).copy_(numbers)

    machine.launches[f"random {draw.kind}"] += 1
    machine.current_stream(out.device).launch(kernel)


def far_of(draw: Draw, which: int) -> Tensor:
    """How far each element of the result is, in the order of its memory: 1: in the global index, 2: in the operand."""
    total = torch.zeros(1, dtype=torch.int64)
    for atom in draw.atoms:
        total = (total.unsqueeze(1) + torch.arange(atom[0]) * atom[which]).flatten()
    return total


def numbers_of(draw: Draw, index: Tensor, seed: Tensor, dtype: torch.dtype) -> Any:
    key = draws.key_of(seed, draw.site)
    if draw.kind == "bits":
        return draws.bits(index, key)
    if draw.kind == "uniform":
        return draws.uniform(index, key, dtype)
    if draw.kind == "normal":
        return draws.normal(index, key, dtype)
    threshold = draw.threshold
    return draws.keep(threshold.byte / 256 + threshold.rest / 2.0**39, index, key).to(dtype)
