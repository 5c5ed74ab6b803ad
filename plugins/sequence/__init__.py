"""Sequence parallelism: the tokens of one sequence over the ranks of an axis, for contexts that fit no single device.

    step = cf.shard(step_fn, mesh, ring("cp"))                       # keys travel, block by block
    step = cf.shard(step_fn, mesh, ulysses("cp"))                    # all-to-all: tokens to heads and back
    step = cf.shard(step_fn, mesh, ring("r", heads="u"))             # both: heads over u, blocks over r
    step = cf.shard(step_fn, mesh, gather_kv("cp"))                  # every rank gathers the keys

Problem: activations grow with the sequence, and attention is the only operator that looks from one token to another.
Idea: the batch's tokens lie on the axis, and so does everything behind them: embeddings, norms, products and the loss
work on a part of the tokens each, gradients of weights are sums over the axis. Attention alone gets a pattern of its
own.
"""

from __future__ import annotations

from colofunc_plugins.sequence.plan import SequencePlan, gather_kv, ring, ulysses

__all__ = ["SequencePlan", "gather_kv", "ring", "ulysses"]
