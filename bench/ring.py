"""Attention over a split sequence: bytes against closed forms, activations that stay flat, causal work that is even.

Bytes: one attention block forward on abstract tensors (s = 8192, h = 1024, 8 ranks), as `low.cost()` counts them. Memory:
forward and backward of a llama of 2 layers, tokens in proportion to ranks, weights whole; the most that
`low.memory()` counts at any operator beside weights and their gradients (the peak of everything may lie at another operator,
where fewer activations live). Work: visible pairs of each rank under the layout of its tokens. Time: all ranks of
a ring in this process against dense attention on the same tokens, CPU seconds in alternating pairs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from colofunc_plugins import gather_kv, ring, ulysses
from transformers import LlamaConfig, LlamaForCausalLM

import colofunc as cf
from bench import Row, Section, pairs, ratio, seconds

RANKS, TOKENS, WIDTH, HEADS = 8, 8192, 1024, 16
PER_RANK = 512  # tokens of the model whose memory is looked at
TOPOLOGY = "8xa100-80g"
WEIGHTS = ("parameters", "gradients")  # kinds of memory that do not go by tokens
# DeepSpeed Ulysses (2309.14509) and Ring Attention (2310.01889): elements that a rank receives, forward.
FORMS = {"ulysses": 3_670_016, "ring": 14_680_064, "gather_kv": 14_680_064}


def block(state: torch.Tensor, batch: dict[str, torch.Tensor]) -> Any:
    """One attention of (b, s, h) queries, keys and values."""
    q, k, v = (batch[name].unflatten(-1, (HEADS, -1)).transpose(1, 2) for name in "qkv")
    return state, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def moved(name: str) -> int:
    """Elements that a rank receives in one block forward."""
    plan = {"ulysses": ulysses, "ring": ring, "gather_kv": gather_kv}[name]("cp")
    batch = {x: cf.abstract((1, TOKENS, WIDTH)) for x in "qkv"}
    spec = "b (cp s) d" if name == "ulysses" else "b (s cp) d"
    low = cf.shard(block, cf.Mesh(cp=RANKS, topology=TOPOLOGY), plan, out_specs=(None, spec)).lower(torch.zeros(1), batch)
    return low.cost().wire_bytes // 4


def model() -> cf.Model:
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
        max_position_embeddings=RANKS * PER_RANK,
    )  # fmt: skip
    return cf.functional(LlamaForCausalLM(config))


def activations(plan: str, ranks: int) -> int:
    """The most bytes of a rank at any operator that are neither weights nor gradients, with `PER_RANK` tokens each."""
    net = model()

    def loss(params: Any, batch: Any) -> torch.Tensor:
        out, _ = net.apply(params, net.buffers, **batch)
        return out.loss

    step = lambda params, batch: cf.value_and_grad(loss)(params, batch)  # noqa: E731
    ids = torch.zeros((1, ranks * PER_RANK), dtype=torch.int64)
    mesh = cf.Mesh(cp=ranks, topology=TOPOLOGY)
    made = {"ring": ring, "ulysses": ulysses}[plan]("cp")
    whole = {"*": cf.ext.Wish("*", "...", ("cp",))}
    low = cf.shard(step, mesh, made, whole, donate=()).lower(net.params, {"input_ids": ids, "labels": ids})
    lines = low.memory().by_kind["device"]
    return max(map(sum, zip(*(line for kind, line in lines.items() if kind not in WEIGHTS), strict=True)))


def even(layout: str, ranks: int, tokens: int) -> float:
    """The most that a rank has of causal pairs, against the mean."""
    positions = cf.distribute(torch.arange(tokens), layout, cf.Mesh(cp=ranks)).shards
    work = [int((p + 1).sum()) for p in positions]
    return max(work) * ranks / sum(work)


def times(ranks: int, tokens: int) -> list[tuple[float, ...]]:
    """CPU seconds of dense attention and of all ranks of a ring."""
    batch = {x: torch.randn(1, tokens, 256) for x in "qkv"}
    state = torch.zeros(1)
    dense = cf.shard(block, cf.Mesh())
    split = cf.shard(block, cf.Mesh(cp=ranks, topology=TOPOLOGY), ring("cp"))
    return pairs(lambda: dense(state.clone(), batch), lambda: split(state.clone(), batch), count=5)


def bench() -> Section:
    rows = []
    for name, form in FORMS.items():
        found = moved(name)
        rows.append(Row(f"elements received, {name}, forward (closed form {form:,})", f"{found:,}", "ratio 1.000", found == form))
    for plan in ("ring", "ulysses"):
        peaks = {n: activations(plan, n) for n in (2, 4, 8)}
        off = max(peaks.values()) / min(peaks.values()) - 1
        text = " · ".join(f"{n} ranks {peak / 2**20:.2f} MiB" for n, peak in peaks.items())
        target, met = ("within 0.5 %", off <= 0.005) if plan == "ring" else ("", None)
        rows.append(Row(f"peak activations, {plan}, {PER_RANK} tokens a rank", f"{text}: {100 * off:.2f} % apart", target, met))
    for layout, target in (("(s cp)", "at most 1.05"), ("(cp s)", "")):
        most = even(layout, 4, 4096)
        what = f"causal pairs, most of a rank / mean, 4 ranks, {layout}"
        rows.append(Row(what, f"{most:.3f}", target, most <= 1.05 if target else None))
    taken = times(4, 4096)
    _, text = ratio(taken, 1, 0)
    rows.append(Row("dense causal attention, 4096 tokens, CPU seconds", seconds(taken, 0)))
    rows.append(Row("all 4 ranks of a ring / dense, CPU seconds", text))
    setting = (
        f"topology {TOPOLOGY}; bytes on abstract tensors; memory of a llama of 2 layers, width 256, 8 heads of 4 groups, float32; "
        f"{torch.get_num_threads()} thread(s), torch {torch.__version__}"
    )
    return Section("Attention over a split sequence", setting, rows)


assert math.isclose(FORMS["ring"], 2 * (RANKS - 1) / RANKS * TOKENS * WIDTH)
