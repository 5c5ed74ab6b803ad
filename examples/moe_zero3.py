"""A mixture of experts with ZeRO-3 and expert parallelism: an unmodified transformers model, two plans, one step.

    python examples/moe_zero3.py                                               # four simulated ranks, a minute
    torchrun --nproc-per-node 4 examples/moe_zero3.py                          # the same file on real ranks (gloo)
    python examples/moe_zero3.py --family deepseek_v3 --capacity 1.25          # drop what is over capacity

Rows of the batch lie on both axes. Experts lie on `ep`, all states are split over `dp`, too. The model learns to copy:
the second half of each sequence repeats the first.
"""

from __future__ import annotations

import argparse

import torch
import transformers
from colofunc_plugins import experts, zero

import colofunc as cf

COMMON = dict(
    vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=16,
    num_experts_per_tok=2, experts_implementation="grouped_mm", eos_token_id=None, bos_token_id=None, pad_token_id=None,
)  # fmt: skip
FAMILIES = {
    "mixtral": ("Mixtral", dict(intermediate_size=64, num_local_experts=4, output_router_logits=True)),
    "qwen3_moe": ("Qwen3Moe", dict(moe_intermediate_size=32, num_experts=4, head_dim=8, norm_topk_prob=True, output_router_logits=True)),
    "olmoe": ("Olmoe", dict(intermediate_size=64, num_experts=4, output_router_logits=True)),
    "deepseek_v3": ("DeepseekV3", dict(moe_intermediate_size=32, n_routed_experts=4, num_local_experts=4, n_group=2, topk_group=1,
                                       first_k_dense_replace=1, n_shared_experts=1, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=4,
                                       qk_nope_head_dim=4, v_head_dim=8)),
}  # fmt: skip


def build(family: str) -> torch.nn.Module:
    """A small model of the family."""
    name, sizes = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**COMMON, **sizes)
    return getattr(transformers, f"{name}ForCausalLM")(config)


def rows(n: int, step: int) -> dict[str, torch.Tensor]:
    """Sequences whose second half repeats the first."""
    half = torch.randint(1, 32, (n, 6), generator=torch.Generator().manual_seed(step))
    ids = torch.cat([half, half], 1)
    return {"input_ids": ids, "labels": torch.where(torch.arange(12) < 6, -100, ids)}


def main(argv: list[str] | None = None) -> tuple[float, float]:
    """Train, and return the first and the last loss."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--family", choices=FAMILIES, default="mixtral", help="the architecture")
    parser.add_argument("--dp", type=int, default=2, help="ranks that split states")
    parser.add_argument("--ep", type=int, default=2, help="ranks that split experts")
    parser.add_argument(
        "--capacity", type=float, default=None, help="the share of its even load that an expert takes at most"
    )
    parser.add_argument("--steps", type=int, default=60, help="training steps")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    mesh = cf.Mesh(dp=args.dp, ep=args.ep)
    step_fn, state = cf.train_step(cf.functional(build(args.family)), cf.adapt(torch.optim.AdamW, lr=3e-3), clip=1.0)
    step = cf.shard(step_fn, mesh, zero(3, "dp"), experts("ep"))
    if args.capacity is not None:
        step = cf.expert_capacity(step, args.capacity)
    state = step.init(state, rows(32, 0))
    if mesh.is_main:
        low = step.lower(state, rows(32, 0))
        print(str(low.plan).splitlines()[0])
        print(low.cost())
    losses = []
    for n in range(args.steps):
        state, metrics = step(state, rows(32, n))
        losses.append(float(metrics["loss"]))
        if mesh.is_main and n % 10 == 0:
            print(f"step {n}: loss {losses[-1]:.3f}")
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
