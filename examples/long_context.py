"""A long context on few tokens per rank: ring attention over `cp`, ZeRO-3 over `dp`, an unmodified LLaMA.

    python examples/long_context.py                                    # dp=2 x cp=2 simulated ranks, under a minute
    python examples/long_context.py --cp 4 --tokens 512                # the same tokens per rank, twice the context
    torchrun --nproc-per-node 2 examples/long_context.py --dp 1        # the same file on real ranks (gloo)

The two lines that matter are `ring("cp")` and `zero(3, "dp")`: every rank holds `tokens / cp` tokens of `rows / dp`
rows and a part of the weights. Keys and values travel round the ring, dealt in stripes so that the causal mask leaves
all ranks the same work. Labels are shifted inside the model's own loss, across the ranks. The activations of a rank
depend on its own tokens alone: the last lines plan contexts of twice and four times the length on as many more ranks.

The task: the second half of each row repeats the first, so whoever reads `tokens / 2` back predicts it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from colofunc_plugins import ring, zero
from transformers import LlamaConfig, LlamaForCausalLM

import colofunc as cf

VOCABULARY = 32


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dp", type=int, default=2, help="ranks over rows and weights (default %(default)s)")
    parser.add_argument("--cp", type=int, default=2, help="ranks over the tokens of a row (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a row (default %(default)s)")
    parser.add_argument("--rows", type=int, default=4, help="rows of a batch (default %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="training steps (default %(default)s)")
    parser.add_argument(
        "--longer", type=int, default=4, help="plan contexts up to so many times as long (default %(default)s)"
    )
    parser.add_argument("--width", type=int, default=64, help="width of the model (default %(default)s)")
    return parser.parse_args(argv)


def built(width: int, tokens: int) -> tuple[Any, Any]:
    """A training step and its state."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=tokens, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = cf.functional(LlamaForCausalLM(config))
    return cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=3e-3), clip=1.0)


def batch_of(rows: int, tokens: int, seed: int) -> dict[str, torch.Tensor]:
    """Rows whose second half repeats the first; only the second half counts."""
    half = torch.randint(1, VOCABULARY, (rows, tokens // 2), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": half.repeat(1, 2), "labels": torch.cat([torch.full_like(half, -100), half], 1)}


def main(argv: Sequence[str] | None = None) -> float:
    options = parse(argv)
    mesh = cf.Mesh(dp=options.dp, cp=options.cp, topology="8xa100-80g")
    step_fn, state = built(options.width, options.tokens)
    step = cf.shard(step_fn, mesh, ring("cp"), zero(3, "dp"))
    first = batch_of(options.rows, options.tokens, 0)
    if mesh.is_main:
        print(str(step.lower(state, first).plan).splitlines()[0])
    state = step.init(state, first)
    loss = 0.0
    for n in range(options.steps):
        state, metrics = step(state, batch_of(options.rows, options.tokens, n))
        loss = float(metrics["loss"])
        if mesh.is_main and (n % 5 == 0 or n + 1 == options.steps):
            print(f"step {n:>3}  loss {loss:.4f}")
    if mesh.is_main:
        planned(options)
    return loss


def planned(options: argparse.Namespace) -> None:
    """What longer contexts would take on more ranks; nothing is run."""
    for times in (t for t in (1, 2, 4, 8) if t <= options.longer):
        tokens, cp = options.tokens * times, options.cp * times
        step_fn, state = built(options.width, tokens)
        mesh = cf.Mesh(dp=options.dp, cp=cp, topology="ideal")
        low = cf.shard(step_fn, mesh, ring("cp"), zero(3, "dp")).lower(state, batch_of(options.rows, tokens, 0))
        peak = low.memory().peak_bytes["device"]
        wire = low.cost().wire_bytes
        print(
            f"{tokens:>6} tokens on {mesh.size:>3} ranks: peak {peak / 2**20:.2f} MiB a rank, {wire / 2**20:.2f} MiB "
            "received"
        )


if __name__ == "__main__":
    main()
