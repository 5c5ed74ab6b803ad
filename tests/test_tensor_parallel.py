"""tensor("1d", axis) on unmodified models: which products pair, what goes over the wire, and the numbers.

Closed form (Megatron-LM, 1909.08053): per layer and step four all-reduces of (b, s, d), 2 (n-1)/n b s d each; with the
stream split along the sequence a reduce-scatter and an all-gather of (n-1)/n b s d in place of each.
"""

from collections import Counter
from typing import Any

import pytest
import torch
from colofunc_plugins import tensor, zero
from torch import nn

import colofunc as cf
from colofunc.program.passes.simplify import simplify
from colofunc.program.tracing.trace import trace
from colofunc.testing import check

TOPOLOGY = "4xa100-80g"
TP2 = cf.Mesh(tp=2, topology=TOPOLOGY)
BOTH = cf.Mesh(dp=2, tp=2, topology=TOPOLOGY)
B, S, D, LAYERS, ITEM = 4, 8, 32, 2, 8
STREAM = B * S * D * ITEM  # bytes of one (b, s, d)


def built(family: str) -> Any:
    """(step, state, batch) of a small model."""
    torch.manual_seed(0)
    if family == "vit":
        timm = pytest.importorskip("timm")
        size = dict(img_size=16, patch_size=4, depth=LAYERS, embed_dim=D, num_heads=4, num_classes=10)
        net = timm.create_model("vit_tiny_patch16_224", **size).double()
        batch = {"x": torch.randn(B, 3, 16, 16, dtype=torch.float64), "y": torch.randint(0, 10, (B,))}
        loss = lambda out, b: nn.functional.cross_entropy(out, b["y"])  # noqa: E731
        return *cf.train_step(cf.functional(net), cf.adapt(torch.optim.AdamW, lr=1e-3), loss=loss, inputs=lambda b: ((b["x"],), {})), batch
    transformers = pytest.importorskip("transformers")
    base = dict(vocab_size=64, bos_token_id=1, eos_token_id=1, pad_token_id=0)
    size = dict(hidden_size=D, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4, max_position_embeddings=S)
    drop = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    still = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    name, options = {
        "gpt2": ("GPT2LMHeadModel", dict(n_embd=D, n_layer=LAYERS, n_head=4, n_positions=S, **drop)),
        "llama": ("LlamaForCausalLM", dict(num_key_value_heads=2, **size)),
        "bert": ("BertForMaskedLM", dict(**size, **still)),
        "t5": ("T5ForConditionalGeneration", dict(d_model=D, d_kv=8, d_ff=64, num_layers=1, num_heads=4, dropout_rate=0.0)),
    }[family]
    cls = getattr(transformers, name)
    net = cls(cls.config_class(**base, **options, decoder_start_token_id=0)).double()
    ids = torch.randint(2, 64, (B, S))
    step, state = cf.train_step(cf.functional(net), cf.adapt(torch.optim.AdamW, lr=1e-3), clip=1.0)
    return step, state, {"input_ids": ids, "labels": ids.clone()}


def mlp(width: int = 16, hidden: int = 64) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)).double()
    fn = lambda out, b: (out**2).mean()  # noqa: E731
    step, state = cf.train_step(cf.functional(net), cf.adapt(torch.optim.AdamW, lr=1e-2), loss=fn, inputs=lambda b: ((b,), {}))
    return step, state, torch.randn(8, width, dtype=torch.float64)


def pairs(family: str, n: int = 2) -> tuple[dict[str, int], set[str], set[str]]:
    """(column -> stripes, rows, vocabulary) by module path."""
    step, state, batch = built(family)
    program = simplify(trace(step, (state, batch)).program)
    found = cf.ext.product_pairs(program, cf.Mesh(tp=n), "tp")
    return {p.path: s for p, s in found.columns.items()}, {p.path for p in found.rows}, {p.path for p in found.vocabulary}


def specs(low: Any) -> dict[str, str]:
    return {leaf.name: leaf.spec for leaf in low.plan.inputs}


def streams(low: Any, rows: int) -> Counter[str]:
    """Collectives over tp by kind, of what a rank sees of whole (b, s, d) tensors: `rows` elements."""
    found: Counter[str] = Counter()
    for node in low.program.nodes:
        kind = node.target.removeprefix("colofunc.").removesuffix("_start")
        if kind in ("all_reduce", "reduce_scatter", "all_gather") and "tp" in node.args[1]:
            sizes = [_numel(low.program.values[i].shape) for i in (*node.refs, *node.outs)]
            found[kind] += max(sizes) == rows and node.phase != "update"
    return found


def _numel(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


# ---- pairs ----


def test_pairs_of_llama() -> None:
    columns, rows, vocabulary = pairs("llama")
    layer = "model.layers.0."
    split = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"}
    assert {p.removeprefix(layer) for p in columns if p.startswith(layer)} == split
    assert {p for p in rows if p.startswith(layer)} == {layer + "self_attn.o_proj", layer + "mlp.down_proj"}
    assert vocabulary == {"lm_head"} and set(columns.values()) == {1}


@pytest.mark.parametrize(("family", "fused"), [("gpt2", "transformer.h.0.attn.c_attn"), ("vit", "blocks.0.attn.qkv")])
def test_fused_weights_are_split_in_stripes(family: str, fused: str) -> None:
    columns, rows, _ = pairs(family)
    assert columns[fused] == 3 and len(rows) == 2 * LAYERS


def test_heads_that_do_not_divide_stay_whole_and_the_rest_is_split() -> None:
    columns, rows, _ = pairs("llama", n=4)  # two heads of keys and values
    assert not any("attn" in p for p in (*columns, *rows))
    assert any("gate_proj" in p for p in columns) and any("down_proj" in p for p in rows)


# ---- bytes ----


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_four_all_reduces_per_layer(family: str) -> None:
    """And one each for the embedding and for the gradient of the output layer's input."""
    step, state, batch = built(family)
    low = cf.shard(step, TP2, tensor("1d", "tp")).lower(state, batch)
    assert streams(low, B * S * D) == {"all_reduce": 4 * LAYERS + 2}
    moved = low.cost().bytes["all_reduce", "tp"]
    closed = (4 * LAYERS + 2) * STREAM  # 2 (n-1)/n = 1
    assert closed <= moved < closed + 4 * B * S * ITEM  # the softmax over the split vocabulary: a few numbers per token
    assert {k for k, _ in low.cost().bytes} == {"all_reduce"}


def test_along_the_sequence_the_same_bytes_in_two_halves() -> None:
    step, state, batch = built("llama")
    low = cf.shard(step, TP2, tensor("1d", "tp", sequence=True)).lower(state, batch)
    moved = low.cost().bytes
    half, small = STREAM // 2, 64 * D  # small: gradients of the norms' weights, summed over the sequence
    assert (4 * LAYERS + 2) * half <= moved["reduce_scatter", "tp"] < (4 * LAYERS + 2) * half + (2 * LAYERS + 1) * small
    # Groups of products read the stream whole: once in forward, its gradient once in backward, but for the output layer's.
    assert (4 * LAYERS + 1) * half <= moved["all_gather", "tp"] < (4 * LAYERS + 1) * half + (2 * LAYERS + 1) * small
    assert str(low.plan).startswith("tp: Megatron column/row with sequence parallel, vocabulary parallel (tensor(1d, tp))")


def test_where_weights_lie() -> None:
    step, state, batch = built("gpt2")
    lies = specs(cf.shard(step, TP2, tensor("1d", "tp")).lower(state, batch))
    block = "transformer.h.0."
    assert lies[f"state.params.{block}mlp.c_fc.weight"] == "a (tp b)" and lies[f"state.params.{block}mlp.c_fc.bias"] == "(tp a)"
    assert lies[f"state.params.{block}mlp.c_proj.weight"] == "(tp a) b" and lies[f"state.params.{block}mlp.c_proj.bias"] == "a"
    assert lies["state.params.transformer.wte.weight"] == "(tp a) b"
    striped = cf.Spec("d (3 tp o)").bind(TP2, (D, 3 * D))
    for name in (f"state.params.{block}attn.c_attn.weight", f"state.opt.exp_avg.{block}attn.c_attn.weight"):
        assert cf.Spec(lies[name], b=3).bind(TP2, (D, 3 * D)) is striped
    assert lies[f"state.opt.exp_avg.{block}mlp.c_proj.weight"] == "(tp a) b"


# ---- numbers ----


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "t5", "vit"])
def test_models_equal_the_single_device(family: str) -> None:
    step, state, batch = built(family)
    with cf.testing.float64():
        assert check(cf.shard(step, TP2, tensor("1d", "tp")), state, batch).worst < 1e-10


@pytest.mark.parametrize(
    ("family", "sequence"),
    [("gpt2", False), ("llama", True), *(pytest.param(*one, marks=pytest.mark.sweep) for one in (("gpt2", True), ("llama", False)))],
)
def test_with_zero_on_a_second_axis(family: str, sequence: bool) -> None:
    step, state, batch = built(family)
    staged = cf.shard(step, BOTH, zero(3, "dp"), tensor("1d", "tp", sequence=sequence))
    with cf.testing.float64():
        checked = check(staged, state, batch)
    assert checked.worst < 1e-10
    words = str(checked.low.plan)
    assert words.startswith("dp: ZeRO-3 (zero(3, dp)) · tp: Megatron column/row")


def test_storage_is_minor_to_compute() -> None:
    """A bias that both plans split: `(tp dp o)`, so that a gather over dp gives what tensor parallelism works on."""
    step, state, batch = mlp()
    staged = cf.shard(step, BOTH, zero(3, "dp"), tensor("1d", "tp"))
    assert specs(staged.lower(state, batch))["state.params.0.bias"] == "(tp dp a)"
    assert check(staged, state, batch).worst < 1e-10


# ---- auto ----


def test_auto_splits_every_product() -> None:
    step, state, batch = mlp()
    staged = cf.shard(step, TP2, tensor("auto", "tp"))
    products = [d for d in staged.lower(state, batch).plan.find("colofunc.linear") if d.phase == "forward"]
    assert len(products) == 2 and all(dict(d.axes).get("tp") in ("i", "o") for d in products)
    assert check(staged, state, batch).worst < 1e-10


# ---- refused ----


def test_without_a_pair_it_says_so() -> None:
    torch.manual_seed(0)
    fn = lambda out, b: out.mean()  # noqa: E731
    net = cf.functional(nn.Linear(8, 8))
    step, state = cf.train_step(net, cf.adapt(torch.optim.SGD, lr=1e-2), loss=fn, inputs=lambda b: ((b,), {}))
    with pytest.raises(cf.PlanError, match="finds no two products with weights"):
        cf.shard(step, TP2, tensor("1d", "tp")).lower(state, torch.randn(4, 8))


def test_bad_arguments() -> None:
    with pytest.raises(cf.PlanError, match=r"modes '1d', 'auto', '2d', '2\.5d', '3d', not '4d'"):
        tensor("4d", "tp")
    with pytest.raises(cf.PlanError, match="takes one axis"):
        tensor("1d", ("tp", "ep"))  # type: ignore[arg-type]
    step, state, batch = mlp()
    with pytest.raises(cf.MeshError, match="tq"):
        cf.shard(step, TP2, tensor("1d", "tq")).lower(state, batch)
