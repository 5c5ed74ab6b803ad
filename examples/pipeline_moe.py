"""Four kinds of parallelism in one step: a pipeline, tensor parallelism, ZeRO and experts, of an unmodified Mixtral.

    python examples/pipeline_moe.py                                            # eight simulated ranks in this process
    python examples/pipeline_moe.py --schedule zb-v --microbatches 8           # two stages a rank
    torchrun --nproc-per-node 8 examples/pipeline_moe.py                       # the same file on real ranks (gloo)

Layers lie on `pp`, products are split over `tp`, the batch, experts and the states of all else over `dp`. The model
learns to copy: the second half of each sequence repeats the first.
"""

from __future__ import annotations

import argparse

import torch
import transformers
from colofunc_plugins import experts, tensor, zero

import colofunc as cf


def build(layers: int) -> torch.nn.Module:
    """A small Mixtral."""
    config = transformers.MixtralConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=4,
        max_position_embeddings=16, num_local_experts=4, num_experts_per_tok=2, experts_implementation="grouped_mm",
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


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
    parser.add_argument("--pp", type=int, default=2, help="ranks that layers are on")
    parser.add_argument("--dp", type=int, default=2, help="ranks that split the batch, experts and states")
    parser.add_argument("--tp", type=int, default=2, help="ranks that split products")
    parser.add_argument("--zero", type=int, default=1, choices=(0, 1, 2, 3), help="how much of the states is split")
    parser.add_argument("--schedule", default="1f1b", help="the pipeline's schedule")
    parser.add_argument("--microbatches", type=int, default=4, help="parts of a batch")
    parser.add_argument("--layers", type=int, default=4, help="of the model")
    parser.add_argument("--steps", type=int, default=40, help="training steps")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    mesh = cf.Mesh(pp=args.pp, dp=args.dp, tp=args.tp)
    step_fn, state = cf.train_step(cf.functional(build(args.layers)), cf.adapt(torch.optim.AdamW, lr=3e-3), clip=1.0)
    states = [zero(args.zero, "dp")] if args.zero else []
    step = cf.shard(step_fn, mesh, *states, tensor("1d", "tp"), experts("dp"))
    step = cf.pipeline(step, axis="pp", microbatches=args.microbatches, schedule=args.schedule)
    state = step.init(state, rows(32, 0))
    if mesh.is_main:
        low = step.lower(state, rows(32, 0))
        print(low.plan.table(costly=0))
        print(low.pipeline().text())
    losses = []
    for n in range(args.steps):
        state, metrics = step(state, rows(32, n))
        losses.append(float(metrics["loss"]))
        if mesh.is_main and n % 10 == 0:
            print(f"step {n}: loss {losses[-1]:.3f}")
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
