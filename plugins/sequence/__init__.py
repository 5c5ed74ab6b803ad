"""Sequence parallelism: the tokens of one sequence over the ranks of an axis, for contexts that fit no single device.

    step = cf.shard(step_fn, mesh, ring("cp"))                       # keys travel, block by block
    step = cf.shard(step_fn, mesh, ulysses("cp"))                    # all-to-all: tokens to heads and back
    step = cf.shard(step_fn, mesh, ulysses("u"), ring("r"))          # both: heads over u, blocks over r
    step = cf.shard(step_fn, mesh, gather_kv("cp"))                  # every rank gathers the keys

Problem: activations grow with the sequence, and attention is the only operator that looks from one token to another.
Idea: the batch's tokens lie on the axis, and so does everything behind them: embeddings, norms, products and the loss
work on a part of the tokens each, gradients of weights are sums over the axis. Attention alone gets a pattern of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from colofunc_plugins.sequence.gathered import Gathered
from colofunc_plugins.sequence.heads import Heads
from colofunc_plugins.sequence.pattern import patterns
from colofunc_plugins.sequence.plan import Sequence, gather_kv, ring, ulysses
from colofunc_plugins.sequence.ring import Ring

import colofunc as cf

__all__ = ["Sequence", "gather_kv", "ring", "ulysses"]



def strategies(call: Any, mesh: cf.Mesh) -> Iterator[cf.Strategy]:
    """Every pattern over every axis."""
    yield from patterns(call, mesh, Ring)
    yield from patterns(call, mesh, Gathered)
    yield from patterns(call, mesh, Heads, stripes=False)


@cf.hookimpl
def colofunc_strategies() -> Mapping[str, Callable[..., Any]]:
    return {"colofunc.attention": strategies, "colofunc.attention_backward": strategies}
