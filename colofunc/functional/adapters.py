"""Low-rank adapters as values: what `cf.lora` put beside a weight, and that weight with the adapter merged into it.

    adapter = Adapter("model.layers.0.self_attn.q_proj", rank=8, alpha=16.0, dropout=0.0, transposed=False)
    weight = adapter.merged(values)              # values: ".weight", ".lora_A" and ".lora_B" of that layer, by name

`Model` keeps these records: what makes an ordinary module of it, or writes files, asks them.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch
from torch import Tensor

from colofunc.dtensor.tensor import DTensor
from colofunc.program.lazy import make


@attrs.frozen
class Adapter:
    """The two thin matrices beside the weight of the layer at `path`: lora_A (rank, in) and lora_B (out, rank)."""

    path: str
    rank: int
    alpha: float
    dropout: float
    transposed: bool  # the weight is (in, out)

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def weight(self) -> str:
        """The name of the weight that is adapted."""
        return f"{self.path}.weight"

    @property
    def names(self) -> tuple[str, str]:
        """The names of the two matrices."""
        return f"{self.path}.lora_A", f"{self.path}.lora_B"

    def merged(self, values: Mapping[str, Tensor]) -> Tensor:
        """The weight with its adapter in it, computed in at least float32. Collective where the values are sharded."""
        weight, a, b = (global_value(values[name]) for name in (self.weight, *self.names))
        wide = torch.promote_types(weight.dtype, torch.float32)
        product = b.to(wide) @ a.to(wide) * self.scale
        if self.transposed:
            product = product.T
        return (weight.to(wide) + product).to(weight.dtype)


def global_value(x: Tensor) -> Tensor:
    """The whole of a tensor in this process: gathered, or made where it is lazy. Collective where it is sharded."""
    return x.full().detach() if isinstance(x, DTensor) else make(x.detach())
