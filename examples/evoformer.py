"""Axial attention over an alignment, Evoformer style, sharded by dynamic axial parallelism: a plan of twenty lines.

    python examples/evoformer.py                                                # four simulated ranks, under a minute
    torchrun --nproc-per-node 2 examples/evoformer.py                           # the same file on real ranks (gloo)

An alignment is a table of s sequences (rows) by r positions (columns). Row attention mixes positions within a sequence,
column attention mixes sequences at a position, and a table of pairs of positions is fed by the mean outer product of
columns and biases the next row attention:

    msa  (b, s, r, d)   row attention + pair bias -> column attention -> transition -> outer product mean -+
    pair (b, r, r, c)   <- transition <- triangle update <-------------------------------------------------+

Row attention is independent of other rows, column attention of other columns. So neither needs a collective if the
table is split by rows for the one and by columns for the other, and between them it changes hands by one all-to-all.
`DynamicAxial` says just that. Of each block and step it costs three gathers forward (the bias, one operand of each
product over pairs), their three reduce-scatters backward, and an all-to-all of the table for each change of hands,
twice a block.

The task: which positions belong together? Paired positions hold the same letter in every sequence, but for noise; the
model reads the alignment and predicts the pairs. Source: Jumper et al., AlphaFold (2021), supplement, algorithms 6 to
11; Cheng et al., FastFold (2203.00854), which calls this dynamic axial parallelism.
"""

from __future__ import annotations

import argparse
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

import colofunc as cf

LETTERS = 20


class RowAttention(nn.Module):
    """Every row attends along its columns; a bias per head and pair of columns is read from the pair table."""

    def __init__(self, d: int, c: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm, self.pair_norm = heads, nn.LayerNorm(d), nn.LayerNorm(c)
        self.qkv, self.gate, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d), nn.Linear(d, d)
        self.bias = nn.Linear(c, heads, bias=False)

    def forward(self, msa: Tensor, pair: Tensor) -> Tensor:
        x = self.norm(msa)
        q, k, v = rearrange(self.qkv(x), "b s r (n h e) -> n s (b h) r e", n=3, h=self.heads)
        bias = rearrange(self.bias(self.pair_norm(pair)), "b i j h -> 1 (b h) i j")  # the same for every row
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.out(self.gate(x).sigmoid() * rearrange(mixed, "s (b h) r e -> b s r (h e)", h=self.heads))


class ColumnAttention(nn.Module):
    """Every column attends along its rows."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(d)
        self.qkv, self.gate, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, msa: Tensor) -> Tensor:
        x = self.norm(msa)
        q, k, v = rearrange(self.qkv(x), "b s r (n h e) -> n r (b h) s e", n=3, h=self.heads)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(self.gate(x).sigmoid() * rearrange(mixed, "r (b h) s e -> b s r (h e)", h=self.heads))


class Transition(nn.Module):
    """A feed-forward net at every place of a table."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(self.norm(x))))


class OuterProductMean(nn.Module):
    """(b, s, r, d) -> (b, r, r, c): what two columns have in common, over all rows."""

    def __init__(self, d: int, c: int, p: int) -> None:
        super().__init__()
        self.norm, self.left, self.right = nn.LayerNorm(d), nn.Linear(d, p), nn.Linear(d, p)
        self.out = nn.Linear(p * p, c)

    def forward(self, msa: Tensor) -> Tensor:
        x = self.norm(msa)
        outer = torch.einsum("bsip,bsjq->bijpq", self.left(x), self.right(x)) / msa.shape[1]
        return self.out(outer.flatten(3))


class TriangleUpdate(nn.Module):
    """Pair ij from the pairs ik and jk: what two positions know of every third."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.norm, self.left, self.right = nn.LayerNorm(c), nn.Linear(c, c), nn.Linear(c, c)
        self.gate, self.mid, self.out = nn.Linear(c, c), nn.LayerNorm(c), nn.Linear(c, c)

    def forward(self, pair: Tensor) -> Tensor:
        x = self.norm(pair)
        edges = torch.einsum("bikc,bjkc->bijc", self.left(x), self.right(x)) / pair.shape[2]
        return self.gate(x).sigmoid() * self.out(self.mid(edges))


class Block(nn.Module):
    def __init__(self, d: int, c: int, heads: int) -> None:
        super().__init__()
        self.row, self.column, self.msa_transition = RowAttention(d, c, heads), ColumnAttention(d, heads), Transition(d)
        self.outer, self.triangle, self.pair_transition = OuterProductMean(d, c, 8), TriangleUpdate(c), Transition(c)

    def forward(self, msa: Tensor, pair: Tensor) -> tuple[Tensor, Tensor]:
        msa = msa + self.row(msa, pair)
        msa = msa + self.column(msa)
        msa = msa + self.msa_transition(msa)
        pair = pair + self.outer(msa)
        pair = pair + self.triangle(pair)
        return msa, pair + self.pair_transition(pair)


class Evoformer(nn.Module):
    """Letters (b, s, r) -> logits (b, r, r): whether two positions belong together."""

    def __init__(self, depth: int = 2, d: int = 32, c: int = 16, heads: int = 4, distances: int = 256) -> None:
        super().__init__()
        self.embed, self.distance = nn.Embedding(LETTERS, d), nn.Embedding(distances, c)
        self.blocks = nn.ModuleList(Block(d, c, heads) for _ in range(depth))
        self.last, self.head = nn.LayerNorm(c), nn.Linear(c, 1)

    def forward(self, letters: Tensor) -> Tensor:
        b, _, r = letters.shape
        place = torch.arange(r)
        msa = self.embed(letters)
        pair = self.distance((place[:, None] - place).abs()).expand(b, -1, -1, -1)
        for block in self.blocks:
            msa, pair = block(msa, pair)
        logits = self.head(self.last(pair)).squeeze(-1)
        return logits + logits.transpose(1, 2)


# ---- the plan: which dim of its table a module splits ----

ROWS, COLUMNS = 1, 2  # of msa (b, s, r, d); of pair (b, r, r, c) dim 1 is the first position
SPLIT = {
    "embed": ROWS, "*.row.*": ROWS,
    "*.column.*": COLUMNS, "*.msa_transition*": COLUMNS, "*.outer.norm": COLUMNS, "*.outer.left": COLUMNS, "*.outer.right": COLUMNS,
    "*.outer.out": 1, "*.triangle.*": 1, "*.pair_transition*": 1, "last": 1, "head": 1,
}  # fmt: skip


@attrs.frozen
class DynamicAxial:
    """A named plan, as a third party would write one: wishes about operators and leaves, no code of its own."""

    axes: tuple[str, ...] = ("dap",)
    name: str = "dynamic axial"

    def wishes(self, program: Any, mesh: cf.Mesh) -> list[cf.ext.Wish]:
        (axis,), both = self.axes, ("forward", "backward")
        found = []
        for match, dim in SPLIT.items():  # b of linear, d of norms and what is pointwise, i of embeddings
            want = tuple(f"{{{axis}: {factor}{dim}}}" for factor in "bdi")
            found.append(cf.ext.Wish(match, want, source=self.name, phases=both))
        # its batch: rows for the one, columns for the other
        attention = ("colofunc.attention", "colofunc.attention_backward")
        found.append(cf.ext.Wish("*", f"{{{axis}: b}}", source=self.name, targets=attention, phases=both))
        found.append(cf.ext.Wish("*letters", f"b ({axis} s) r", roles=("batch",), source=self.name))
        found.append(cf.ext.Wish("*pairs", f"b ({axis} i) j", roles=("batch",), source=self.name))
        found.append(cf.ext.Wish("*", "...", axes=self.axes, roles=("param", "state"), source=self.name))
        return found


# ---- the task ----


def alignments(n: int, rows: int, columns: int, seed: int) -> dict[str, Tensor]:
    """`n` alignments whose positions are paired at random: letters (n, rows, columns), pairs (n, columns, columns)."""
    gen = torch.Generator().manual_seed(seed)
    letters, pairs = torch.randint(LETTERS, (n, rows, columns), generator=gen), torch.zeros(n, columns, columns)
    for k in range(n):
        i, j = torch.randperm(columns, generator=gen)[: columns // 2 * 2].view(2, -1)
        same = torch.rand(rows, len(i), generator=gen) < 0.8
        letters[k][:, j] = torch.where(same, letters[k][:, i], letters[k][:, j])
        pairs[k, i, j] = pairs[k, j, i] = 1.0
    return {"letters": letters, "pairs": pairs}


def make_step(depth: int = 2, d: int = 32, c: int = 16, lr: float = 3e-3) -> tuple[Any, Any]:
    """(step function, state), as one writes them for one device."""
    model, opt = cf.functional(Evoformer(depth, d, c)), cf.adapt(torch.optim.AdamW, lr=lr)

    def loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits, batch["pairs"])

    return cf.train_step(model, opt, loss=loss, inputs=lambda batch: batch["letters"], clip=1.0)


def main(argv: list[str] | None = None) -> list[float]:
    """Train; the losses."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--dap", type=int, default=-1, help="ranks of the axis; -1: what torchrun has, 4 if simulated")
    parser.add_argument("--steps", type=int, default=40, help="steps of training")
    parser.add_argument("--rows", type=int, default=16, help="sequences of an alignment")
    parser.add_argument("--columns", type=int, default=16, help="positions of an alignment")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    real = torch.distributed.is_torchelastic_launched()
    mesh = cf.Mesh(dap=args.dap if real or args.dap > 0 else 4)
    step_fn, state = make_step()
    step = cf.shard(step_fn, mesh, DynamicAxial())
    first = alignments(4, args.rows, args.columns, seed=0)
    low = step.lower(state, first)
    if mesh.is_main:
        print(low.plan)
        print(", ".join(f"{n} {kind}" for (kind, _), n in low.cost().calls.items()))
    state, losses = step.init(state, first), []
    for n in range(args.steps):
        state, metrics = step(state, alignments(4, args.rows, args.columns, seed=n))
        losses.append(float(metrics["loss"]))
        if mesh.is_main and n % 10 == 9:
            print(f"step {n + 1:3d}  loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
