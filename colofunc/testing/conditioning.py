"""last_bit: how far a function moves when its inputs move by their last bit.

No other order of summation can be closer to the reference than the reference is to itself. Deep networks with batch
norm over a few samples magnify a rounding error ten thousand times and more; there a fixed tolerance says nothing, and
the right one is measured: a difference within what one last bit of the inputs does is rounding, a larger one is not.

>>> moved = last_bit(lambda x: 1 / (x - 1), torch.tensor(1.0001, dtype=torch.float64))
>>> 1e-13 < moved < 1e-11
True
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from colofunc.program.closeness import scaled_difference
from colofunc.program.tracing.tree import map_tensors, walk
from colofunc.testing.check import FIRST_SEED, doubled_inside, run_reference, seeded
from colofunc.testing.trees import plain_copy


def last_bit(fn: Callable[..., Any], *args: Any, tries: int = 2) -> float:
    """The largest scaled difference of any output leaf.

    It is that over `tries` random choices of one bit up or down per element.
    """
    worst, args = 0.0, doubled_inside(args)
    with torch.random.fork_rng(devices=()):
        expected = _leaves(seeded(FIRST_SEED, run_reference, fn, *plain_copy(args)))
        for n in range(tries):
            gen = torch.Generator().manual_seed(n)
            moved = map_tensors(lambda x: _moved(x, gen), plain_copy(args))  # noqa: B023
            got = _leaves(seeded(FIRST_SEED, run_reference, fn, *moved))
            for a, b in zip(got, expected, strict=True):
                if isinstance(b, torch.Tensor) and b.is_floating_point():
                    worst = max(worst, scaled_difference(a.detach(), b.detach()))
    return worst


def _leaves(tree: Any) -> list[Any]:
    return [leaf for _, leaf in walk(tree)]


def _moved(x: torch.Tensor, gen: torch.Generator) -> torch.Tensor:
    """Each element of a floating tensor one representable number further, up or down; zeros are exact and stay."""
    if not x.is_floating_point():
        return x
    up = torch.rand(x.shape, generator=gen) < 0.5
    towards = torch.where(up, torch.full_like(x, float("inf")), torch.full_like(x, float("-inf")))
    moved = torch.where(x == 0, x, torch.nextafter(x.detach(), towards)).detach()
    return moved.requires_grad_(x.requires_grad)
