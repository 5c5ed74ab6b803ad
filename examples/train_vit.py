"""Train a timm vision transformer on scikit-learn's handwritten digits, to above 95 % of unseen images.

    python examples/train_vit.py                                                # four simulated ranks, half a minute
    torchrun --nproc-per-node 2 examples/train_vit.py                           # the same file on real ranks (gloo)

The 1,797 images of 8x8 pixels come with scikit-learn. Training and evaluation are two functions on one state: the state
that the first one places stays where it is while the second one reads it.
"""

from __future__ import annotations

import argparse
import math

import timm
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import colofunc as cf


def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images (n, 1, 8, 8) in -2..2 and labels (n,), of the training and of the test part."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)[:, None] / 4 - 2
    labels = torch.tensor(found.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1440], order[1440:]
    return images[train], labels[train], images[test], labels[test]


def make_functions(model: cf.Model, opt: cf.Optimizer):
    """The training step and the evaluation, as one writes them for one device."""

    def train_fn(state, batch):
        def loss_fn(params):
            image = batch["image"] + 0.3 * torch.randn_like(batch["image"])  # the same noise on every mesh
            logits, buffers = model.apply(params, state["buffers"], image)
            return F.cross_entropy(logits, batch["label"]), buffers

        (loss, buffers), grads = cf.value_and_grad(loss_fn, has_aux=True)(state["params"])
        params, opt_state = opt.update(grads, state["opt"], state["params"])
        return {"params": params, "buffers": buffers, "opt": opt_state}, loss

    def eval_fn(params, buffers, batch):
        logits, _ = model.apply(params, buffers, batch["image"])
        return (logits.argmax(-1) == batch["label"]).sum()

    return train_fn, eval_fn


def main(argv: list[str] | None = None) -> float:
    """Train, and return the share of unseen digits that are right."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--dp", type=int, default=-1, help="data-parallel ranks; -1: what torchrun leaves, 2 if simulated"
    )
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel ranks")
    parser.add_argument("--epochs", type=int, default=20, help="times through the images")
    parser.add_argument("--batch", type=int, default=48, help="images of the global batch")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    real = torch.distributed.is_torchelastic_launched()
    mesh = cf.Mesh(dp=args.dp if real or args.dp > 0 else 2, tp=args.tp)
    images, labels, test_images, test_labels = digits()
    steps = args.epochs * (len(labels) // args.batch)
    model = cf.functional(
        timm.create_model(
            "vit_tiny_patch16_224",
            img_size=8,
            patch_size=2,
            in_chans=1,
            num_classes=10,
            embed_dim=64,
            depth=2,
            num_heads=4,
            global_pool="avg",
            class_token=False,
            weight_init="jax",
        )
    )
    warm = steps // 10
    opt = cf.adapt(
        torch.optim.AdamW,
        lr=lambda n: 6e-3 * torch.minimum(n / warm, 0.5 + 0.5 * torch.cos(math.pi * n / steps)),
        weight_decay=0.05,
    )
    train_fn, eval_fn = make_functions(model, opt)
    train, evaluate = cf.shard(train_fn, mesh), cf.shard(eval_fn, mesh)

    state = {"params": model.params, "buffers": model.buffers, "opt": opt.init(model.params)}
    state = train.init(state, {"image": images[: args.batch], "label": labels[: args.batch]})
    accuracy = 0.0
    for epoch in range(args.epochs):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch + 1))
        model.train()
        for rows in order[: steps // args.epochs * args.batch].split(args.batch):
            state, loss = train(state, {"image": images[rows], "label": labels[rows]})
        model.eval()
        right = evaluate(state["params"], state["buffers"], {"image": test_images, "label": test_labels})
        accuracy = int(right) / len(test_labels)
        if mesh.is_main:
            print(f"epoch {epoch + 1:2d}  loss {float(loss):.4f}  right on unseen digits {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
