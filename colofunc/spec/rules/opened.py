"""Strategies that split a dim which the rule wants whole, with local code that communicates.

    softmax  b [s] -> b [s]     opened at s: all-reduce the maximum, all-reduce the sum of exponentials

`opened` takes the rule, frees the given factors, and makes a strategy of every placement that uses one of them. A
result that lacks an opened factor is complete on every rank (the local code reduces it) unless `how` says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import attrs
import torch

from colofunc.mesh import Mesh
from colofunc.ops.kernels import wide
from colofunc.spec.layout import Layout, axes_of
from colofunc.spec.rule import Call, Rule, Strategy
from colofunc.spec.rules.build import LocalFn
from colofunc.spec.strategies import build, placements


@attrs.frozen
class Split:
    """What local code may ask: the axes on the opened factors, and the layouts."""

    axes: tuple[str, ...]
    ins: tuple[Layout, ...]
    outs: tuple[Layout | None, ...]


OpenedCode = Callable[[Call, Split], LocalFn]
Traffic = Callable[[Call, Split], float]  # bytes that are all-reduced over the opened axes


def opened(
    call: Call,
    mesh: Mesh,
    rule: Rule | None,
    factors: Collection[str],
    code: OpenedCode,
    traffic: Traffic,
    calls: int = 1,
    how: str | None = None,
) -> Iterator[Strategy]:
    """All strategies in which an opened factor is split. `calls`: how many all-reduces share the traffic."""
    if rule is None:
        return
    factors = [factor for factor in factors if rule.sizes.get(factor, 1) > 1]
    missing: set[tuple[int, str]] = set()
    for number, result in enumerate(rule.outs):
        if result is not None:
            kept = set().union(*result)
            missing.update((number, factor) for factor in factors if factor not in kept)
    free = attrs.evolve(
        rule,
        whole=rule.whole - set(factors),
        reduce={**rule.reduce, **dict.fromkeys(factors, how or "sum")},
        copied=rule.copied | (missing if how is None else set()),
    )
    axes = tuple(axis for axis in mesh.axis_names if mesh.axis_size(axis) > 1)
    for placement, passing in placements(free, mesh, axes):
        on: list[str] = []
        for factor in factors:
            on += axes_of(placement.get(factor, ()))
        if not on:
            continue
        strategy = build(call, free, placement, passing)
        split = Split(tuple(on), strategy.ins, strategy.outs)
        seconds = calls * mesh.collective_s("all_reduce", traffic(call, split) / max(calls, 1), on)
        yield attrs.evolve(strategy, local=code(call, split), cost=attrs.evolve(strategy.cost, extra_s=seconds))


def nbytes_without(layout: Layout, dim: int, dtype: torch.dtype) -> float:
    """Bytes of a local part once dim `dim` is reduced away."""
    return layout.local_numel / max(1, layout.local_shape[dim]) * wide(dtype).itemsize
