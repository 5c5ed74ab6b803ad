"""Packed rows: a tensor of which a step writes some rows at a time, kept in int8 with a scale for each row of its last
dim.

    cache = PackedRows.of(torch.zeros(8, 16, 4096, 128))       # data int8 (8, 16, 4096, 128), scale float32 (8, 16, 4096, 1)
    cache.dequantize()                                         # (8, 16, 4096, 128), in the dtype that it had

Problem: a key-value cache of a long text is larger than the weights. Idea: as a quantized weight, it is plain tensors
that go wherever tensors go; both have all dims of the cache but the last, which a scale has once, so that one way to
write rows writes both.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from colofunc.ops.saved_activations import pack_saved, widen_saved

NUMBERS = torch.int8


@attrs.frozen(eq=False, repr=False)
class PackedRows:
    """What a tree holds in the place of a tensor in packed rows.

    `dtype`: that it had. `data` has its name in a program.
    """

    dtype: torch.dtype
    data: Tensor
    scale: Tensor

    @staticmethod
    def of(x: Tensor) -> PackedRows:
        """The rows of a tensor, packed."""
        return PackedRows(x.dtype, *pack_saved(x, x.dim() - 1, x.shape[-1], NUMBERS))

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return sum(part.numel() * part.itemsize for part in (self.data, self.scale))

    def dequantize(self) -> Tensor:
        """The tensor that they stand for."""
        return widen_saved(self.data, self.scale, NUMBERS, self.dtype)

    def __repr__(self) -> str:
        return f"PackedRows({tuple(self.data.shape)}, {str(self.dtype).removeprefix('torch.')}, {self.nbytes:,} bytes)"
