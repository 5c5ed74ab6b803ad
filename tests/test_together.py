"""Two plans whose ways of one operator enumeration does not have: stripes of a fused weight and rows of a flat batch."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from colofunc_plugins import ring, tensor, ulysses
from torch import Tensor, nn

import colofunc as cf
from colofunc.testing import check, programs


class Fused(nn.Module):
    """Attention with one weight for queries, keys and values, and products over rows of a flat batch, as GPT-2 has it."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.bias = nn.Parameter(torch.randn(width, 3 * width) / 4), nn.Parameter(torch.zeros(3 * width))
        self.out, self.last = nn.Parameter(torch.randn(width, width) / 4), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        found = torch.addmm(self.bias, x.reshape(b * s, d), self.qkv).view(b, s, 3 * d).split(d, 2)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in found)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b * s, d)
        return torch.addmm(self.last, mixed, self.out).view(b, s, d)


SAID = {"ulysses": (ulysses("cp"), "Ulysses"), "ring": (ring("cp"), "context parallel (striped)")}


@pytest.mark.parametrize(("sequence", "said"), SAID.values(), ids=SAID)
def test_a_fused_weight_in_stripes_beside_rows_of_a_flat_batch(sequence: Any, said: str) -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(2, 8, 16, dtype=torch.float64)}
    step = programs.training(Fused().double(), batch, lambda out, b: F.mse_loss(out, b["x"]))
    staged = cf.shard(step.fn, cf.Mesh(cp=2, tp=2, topology="8xa100-80g"), sequence, tensor("1d", "tp"))
    checked = check(staged, step.state, step.batch)
    assert checked.worst <= 1e-10
    low = checked.low
    products = {c.axes for c in low.plan.decisions if c.target == "aten.addmm.default"}
    assert {dict(axes)["tp"] for axes in products} == {"n", "k"} and all(dict(axes)["cp"] == "m" for axes in products)
    assert {leaf.name: leaf.spec for leaf in low.plan.inputs}["state.params.qkv"].endswith("(b tp 8)")  # 3 stripes
    assert [use.words.split(",")[0] for use in low.plan.axes] == [said, "Megatron column/row"]
