"""Sequence plans on models of other shapes: fused projections, few key heads beside tensor parallelism, against one device."""

from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from colofunc_plugins import gather_kv, ring, tensor, ulysses, zero
from test_sequence import assert_split, built, equal, mesh, words

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
    step, state = cf.train_step(cf.functional(net), cf.adapt(torch.optim.SGD, lr=1e-2), loss=loss, inputs=lambda b: ((b["ids"],), {}))
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


# ---- tokens that arise inside the model ----


def vision(**more: Any) -> Any:
    """A vision transformer of timm on images of 4 by 4 patches."""
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    size = dict(img_size=16, patch_size=4, embed_dim=16, depth=1, num_heads=4, num_classes=8)
    net = timm.models.vision_transformer.VisionTransformer(**size, **more).double()
    batch = {"x": torch.randn(2, 3, 16, 16, dtype=torch.float64), "y": torch.tensor([1, 5])}
    loss = lambda out, batch: F.cross_entropy(out, batch["y"])  # noqa: E731
    step, state = cf.train_step(cf.functional(net), cf.adapt(torch.optim.SGD, lr=1e-2), loss=loss, inputs=lambda b: ((b["x"],), {}))
    return step, state, batch


PATCHES = dict(class_token=False, global_pool="avg")


@pytest.mark.parametrize(("plan", "word"), [(ring("cp"), "ring"), (ulysses("cp"), "g"), (gather_kv("cp"), "gathered")])
def test_patches_of_an_image(plan: Any, word: str) -> None:
    low = equal(*vision(**PATCHES), mesh(cp=2), plan, steps=1)
    assert words(low, "cp") == {word} and low.coverage().efficiency > 0.95
    lengths = {low.program.values[n.refs[0]].shape[1] for n in low.program.nodes if n.target == "colofunc.linear" and "blocks" in n.path}
    assert lengths == {8}  # of 16 tokens


def test_a_class_token_and_registers_beside_patches() -> None:
    """1 + 3 + 16 tokens arise where they are put together."""
    low = equal(*vision(reg_tokens=3), mesh(cp=2), ring("cp"), steps=1)
    assert words(low, "cp") == {"ring"}


def test_seventeen_tokens_are_refused_with_a_way_out() -> None:
    says = r"17 tokens do not divide over 2 ranks; they arise inside.*leave out a class token.*tensor.*\ntimm: class_token"
    with pytest.raises(cf.PlanError, match=says):
        cf.shard(vision()[0], mesh(cp=2), ring("cp")).lower(*vision()[1:])


def test_frames_of_a_sound() -> None:
    """Whisper: the decoder's tokens are in the batch, the encoder's come out of convolutions."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    size = dict(d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, num_mel_bins=4)
    ends = dict(bos_token_id=1, eos_token_id=1, pad_token_id=0, decoder_start_token_id=1, begin_suppress_tokens=None, suppress_tokens=None)
    config = transformers.WhisperConfig(
        vocab_size=32, encoder_ffn_dim=16, decoder_ffn_dim=16, max_source_positions=12, max_target_positions=8, **size, **ends
    )
    net = transformers.WhisperForConditionalGeneration(config).double()
    step, state = cf.train_step(cf.functional(net), cf.adapt(torch.optim.SGD, lr=1e-2))
    batch = {"input_features": torch.randn(2, 4, 24, dtype=torch.float64), "labels": torch.randint(2, 32, (2, 8))}
    low = equal(step, state, batch, mesh(cp=2), ring("cp"), steps=1)
    assert words(low, "cp") == {"striped"}


@pytest.mark.parametrize(("plan", "word"), [(ring("cp"), "ring"), (gather_kv("cp"), "gathered")])
def test_windows_of_an_image(plan: Any, word: str) -> None:
    """Swin: attention inside windows of 16 patches, the second time shifted; half of each window is a rank's."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    size = dict(image_size=16, patch_size=2, num_channels=3, embed_dim=8, depths=[2], num_heads=[2], window_size=4)
    net = transformers.SwinForImageClassification(transformers.SwinConfig(num_labels=4, drop_path_rate=0.0, **size)).double()
    step, state = cf.train_step(cf.functional(net), cf.adapt(torch.optim.SGD, lr=1e-2))
    batch = {"pixel_values": torch.randn(2, 3, 16, 16, dtype=torch.float64), "labels": torch.tensor([0, 3])}
    low = equal(step, state, batch, mesh(cp=2), plan, steps=1)
    assert words(low, "cp") == {word} and low.coverage().efficiency > 0.9


def test_a_batch_of_one_dim() -> None:
    def step(state: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = (batch * state).reshape(1, 1, 8, 2)
        return state, F.scaled_dot_product_attention(x, x, x).square().mean()

    low = equal(step, torch.ones((), dtype=torch.float64), torch.randn(16, dtype=torch.float64), mesh(cp=2), ring("cp"), steps=1)
    assert words(low, "cp") == {"ring"}


# ---- attention that is written out ----


def gemma2() -> Any:
    """Gemma 2 caps its scores by a tanh, which no fused attention of torch does: it has "eager" only."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    size = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=4)
    ends = dict(vocab_size=32, bos_token_id=1, eos_token_id=1, pad_token_id=0)
    config = transformers.Gemma2Config(sliding_window=8, query_pre_attn_scalar=4, attn_implementation="eager", **ends, **size)
    step, state = cf.train_step(cf.functional(transformers.Gemma2ForCausalLM(config).double()), cf.adapt(torch.optim.SGD, lr=1e-2))
    ids = torch.randint(2, 32, (2, 16))
    return step, state, {"input_ids": ids, "labels": ids}


def products(low: Any) -> list[tuple[int, ...]]:
    """Shapes of a rank's batched products, forward."""
    values = low.program.values
    return [values[n.outs[0]].shape for n in low.program.nodes if n.phase == "forward" and n.target == "aten.bmm.default"]


@pytest.mark.parametrize("balance", [None, "stripes"])
def test_rows_of_scores_that_are_written_out(balance: str | None) -> None:
    """8 of 16 rows of scores over all 16 columns, whose softmax is whole."""
    low = equal(*gemma2(), mesh(cp=2), gather_kv("cp", balance=balance), steps=1)
    assert products(low) == [(8, 8, 16), (8, 8, 4)]
    assert low.coverage().efficiency > 0.95
    assert_split(low, "cp", rows=2 * 16 * 16)


def test_rows_of_scores_beside_heads_of_tensor() -> None:
    low = equal(*gemma2(), mesh(cp=2, tp=2), gather_kv("cp"), tensor("1d", "tp"), steps=1)
    assert products(low) == [(4, 8, 16), (4, 8, 4)]


def test_heads_of_scores_that_are_written_out() -> None:
    """All 16 rows of 2 of 4 heads; q, k, v and what comes out are exchanged, and their gradients."""
    low = equal(*gemma2(), mesh(cp=2), ulysses("cp"), steps=1)
    assert products(low) == [(4, 16, 16), (4, 16, 4)]
    assert low.coverage().efficiency > 0.95
    assert_split(low, "cp", rows=2 * 16 * 16)
    assert sum(node.target == "colofunc.all_to_all_start" for node in low.program.nodes) == 8


@pytest.mark.parametrize(
    ("axes", "plans"),
    [(dict(cp=4), ()), (dict(dp=2, cp=2), (zero(3, "dp"),)), (dict(cp=2, tp=2), (tensor("1d", "tp"),))],
    ids=["a head each", "zero", "tensor"],
)  # fmt: skip
def test_heads_that_are_written_out_beside_other_plans(axes: dict[str, int], plans: tuple[Any, ...]) -> None:
    low = equal(*gemma2(), mesh(**axes), ulysses("cp"), *plans, steps=1)
    assert prod(products(low)[0]) == 8 * 16 * 16 // 4
    assert low.coverage().efficiency > 0.9


def test_written_out_heads_that_do_not_divide() -> None:
    step, state, batch = gemma2()
    says = r"4 heads that are written out at modeling_gemma2.* do not divide over the 16 ranks of 'cp'; use fewer ranks, or gather_kv"
    with pytest.raises(cf.PlanError, match=says):
        cf.shard(step, mesh(cp=16), ulysses("cp")).lower(state, batch)


@pytest.mark.parametrize("plan", [ring("cp")], ids=["ring"])
def test_a_ring_of_scores_that_are_written_out_is_refused(plan: Any) -> None:
    step, state, batch = gemma2()
    says = r"no attention in this step \(it is written out at modeling_gemma2.*; where a model has none, take gather_kv\('cp'\)"
    with pytest.raises(cf.PlanError, match=says):
        cf.shard(step, mesh(cp=2), plan).lower(state, batch)
