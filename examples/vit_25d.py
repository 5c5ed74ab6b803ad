"""A timm vision transformer on a 2.5D grid of ranks: one line says so.

    python examples/vit_25d.py                                            # 2 x 2 x 2 simulated ranks, under a minute
    torchrun --nproc-per-node 4 examples/vit_25d.py --depth 1             # 2 x 2 real ranks (gloo)

Every product is SUMMA on a 2 x 2 grid: weights lie in blocks, (i over x, o over y), and so do activations, (rows over
x, width over y). `depth` copies of the grid share out the rows. The model is timm's, the step is written for one
device.
"""

from __future__ import annotations

import argparse
from typing import Any

import timm
import torch
import torch.nn.functional as F
from colofunc_plugins import tensor

import colofunc as cf


def make_step(depth: int = 2, width: int = 32, size: int = 16, classes: int = 4) -> tuple[Any, Any]:
    """(step function, state), as one writes them for one device."""
    torch.manual_seed(0)
    options = dict(img_size=size, patch_size=4, embed_dim=width, depth=depth, num_heads=4, num_classes=classes)
    model = cf.functional(timm.create_model("vit_tiny_patch16_224", **options))
    opt = cf.adapt(torch.optim.AdamW, lr=5e-3)
    return cf.train_step(
        model, opt, loss=lambda out, batch: F.cross_entropy(out, batch["y"]), inputs=lambda batch: batch["x"]
    )


def colours(rows: int, size: int, seed: int) -> dict[str, torch.Tensor]:
    """Noise with a tint, and which of four: more or less red, more or less green."""
    rng = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (rows,), generator=rng)
    tint = torch.stack([y // 2, y % 2, torch.zeros_like(y)], 1) - 0.5
    return {"x": torch.randn(rows, 3, size, size, generator=rng) + tint[:, :, None, None], "y": y}


def main(argv: list[str] | None = None) -> list[float]:
    """Train; the losses."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--depth", type=int, default=2, help="copies of the 2 x 2 grid")
    parser.add_argument("--steps", type=int, default=30, help="steps of training")
    args = parser.parse_args(argv)

    step_fn, state = make_step()
    mesh = cf.Mesh(x=2, y=2, z=args.depth)
    step = cf.shard(step_fn, mesh, tensor("2.5d", ("x", "y", "z")))  # the one line
    first = colours(16, 16, seed=0)
    low = step.lower(state, first)
    if mesh.is_main:
        print(low.plan)
        weight = next(leaf for leaf in low.plan.inputs if leaf.name.endswith("blocks.0.mlp.fc1.weight"))
        print(f"{weight.name}: {weight.spec}")
    state, losses = step.init(state, first), []
    for n in range(args.steps):
        state, metrics = step(state, colours(16, 16, seed=n))
        losses.append(float(metrics["loss"]))
        if mesh.is_main and n % 10 == 9:
            print(f"step {n + 1:3d}  loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
