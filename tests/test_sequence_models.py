"""Sequence plans on models of other shapes: fused projections, few key heads beside tensor parallelism, against one device."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from colofunc_plugins import ring, tensor, ulysses
from test_sequence import built, equal, mesh, words

import colofunc as cf


class Fused(torch.nn.Module):
    """A decoder of one block whose q, k and v are one Linear, cut as timm does or by `chunk`."""

    def __init__(self, cut: str, d: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.cut, self.heads = cut, heads
        self.embed, self.norm, self.head = torch.nn.Embedding(32, d), torch.nn.LayerNorm(d), torch.nn.Linear(d, 32)
        self.qkv, self.proj = torch.nn.Linear(d, 3 * d), torch.nn.Linear(d, d)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        b, s, d = x.shape
        qkv = self.qkv(self.norm(x))
        if self.cut == "unbind":
            q, k, v = qkv.reshape(b, s, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            q, k, v = (part.view(b, s, self.heads, -1).transpose(1, 2) for part in qkv.chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + self.proj(out.transpose(1, 2).reshape(b, s, d)))


def fused(cut: str) -> Any:
    """(step, state, batch)"""
    torch.manual_seed(0)
    net, ids = Fused(cut).double(), torch.randint(0, 32, (2, 16))
    loss = lambda out, batch: F.cross_entropy(out.flatten(0, 1), batch["labels"].flatten())  # noqa: E731
    step, state = cf.train_step(cf.functional(net), cf.adapt(torch.optim.AdamW, lr=1e-3), loss=loss, inputs=lambda b: ((b["ids"],), {}))
    return step, state, {"ids": ids, "labels": ids.clone()}


def specs(low: Any) -> dict[str, str]:
    return {leaf.name.rpartition("params.")[2]: leaf.spec for leaf in low.plan.inputs if leaf.name.startswith("state.params")}


@pytest.mark.parametrize("plan", [ring("cp"), ring("cp", balance=None), ulysses("cp")], ids=["stripes", "blocks", "ulysses"])
@pytest.mark.parametrize("cut", ["unbind", "chunk"])
def test_a_fused_linear_of_queries_keys_and_values(cut: str, plan: Any) -> None:
    """Beside tensor parallelism each rank has its columns of each of the three parts."""
    low = equal(*fused(cut), mesh(cp=2, tp=2), plan, tensor("1d", "tp"), steps=1)
    assert words(low, "tp") == {"g"} and words(low, "cp") <= {"striped", "ring", "g"}
    assert specs(low)["qkv.weight"].startswith("(a tp ")


def test_a_fused_linear_whose_parts_differ_in_size() -> None:
    """Phi-3: two key heads beside four query heads, and rotary angles for all of a head, which leaves an empty rest."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    size = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
    config = transformers.Phi3Config(vocab_size=32, bos_token_id=1, eos_token_id=1, pad_token_id=0, **size)
    step, state = cf.train_step(cf.functional(transformers.Phi3ForCausalLM(config).double()), cf.adapt(torch.optim.SGD, lr=1e-2))
    ids = torch.randint(2, 32, (2, 16))
    low = equal(step, state, {"input_ids": ids, "labels": ids}, mesh(cp=2, tp=2), ring("cp"), tensor("1d", "tp"), steps=1)
    assert words(low, "cp") == {"striped"} and words(low, "tp") == {"g"}


EIGHT = dict(num_attention_heads=8, hidden_size=32)


@pytest.mark.parametrize(
    ("ranks", "plan", "heads", "over"),
    [
        (dict(cp=2, tp=2), ulysses("cp"), dict(num_key_value_heads=1), ("heads", "r")),
        (dict(cp=2, tp=4), ulysses("cp"), EIGHT, ("g", "r")),
        (dict(cp=2, tp=4), ring("cp"), EIGHT, ("striped", "r")),
    ],
    ids=["one key head", "tensor over groups", "ring"],
)
def test_fewer_key_heads_than_ranks_beside_tensor(ranks: Any, plan: Any, heads: Any, over: tuple[str, str]) -> None:
    """Where key heads do not cover tp, every rank has all of them and some query heads of each group."""
    low = equal(*built("llama", **heads), mesh(**ranks), plan, tensor("1d", "tp"), steps=1)
    assert (words(low, "cp"), words(low, "tp")) == ({over[0]}, {over[1]})
    mine, o = specs(low), "model.layers.0.self_attn.o_proj.weight"
    assert "tp" in mine[o].split(" ", 1)[1]
    if over[1] == "r":
        assert "tp" in mine[o.replace("o_proj", "q_proj")] and "tp" not in mine[o.replace("o_proj", "k_proj")]
