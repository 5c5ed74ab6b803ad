"""Sorting and scanning along one dim: that dim is whole, the others are free.

    sort      d0 [s] -> d0 [s], d0 [s]
    topk      d0 [s] -> d0 [k], d0 [k]
    cumsum    d0 [s] -> d0 [s]            linear; a strategy splits s

Operators whose result size is data (unique) and those that count over everything (histc) have no rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from colofunc.mesh import Mesh
from colofunc.ops.collectives import all_gather
from colofunc.spec.rule import Call, Rule, Strategy
from colofunc.spec.rules.build import LocalFn, StrategyFn, along, bind
from colofunc.spec.rules.local import first_of
from colofunc.spec.rules.opened import Split, nbytes_without, opened
from colofunc.spec.rules.pattern import RuleFn, wrap


def _kept(index: int) -> RuleFn:
    """The result has all dims; `index`: where `dim` stands among positional arguments."""

    def rule(call: Call) -> Rule | None:
        return along(call, [_dim(call, index)])

    return rule


def cumsum(call: Call) -> Rule | None:
    shape, out = call.ins[0].shape, call.outs[0]
    if not shape or out is None:
        return None
    dim = wrap(_dim(call, 1), len(shape))
    dims = " ".join("[s]" if d == dim else f"d{d}" for d in range(len(shape)))
    return bind(call, {0: dims}, [dims], linear=[{0}] if out.dtype == call.ins[0].dtype else [])


def _split_cumsum(call: Call, mesh: Mesh) -> Iterable[Strategy]:
    """Each rank scans its run and adds the totals of the runs before it."""
    dim = wrap(_dim(call, 1), len(call.ins[0].shape)) if call.ins[0].shape else 0

    def code(call: Call, split: Split) -> LocalFn:
        atoms, dtype = split.ins[0].dims[dim], call.arg(2, "dtype")

        def local(x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
            out = torch.ops.aten.cumsum.default(x, dim, dtype=dtype)
            totals = all_gather(out.select(dim, -1), split.axes, mesh)
            runs = torch.arange(totals.shape[0]) * x.shape[dim]
            earlier = (runs < first_of(atoms, mesh)).reshape([-1] + [1] * (totals.dim() - 1))
            before = torch.where(earlier, totals, 0).sum(0, dtype=out.dtype)
            return out + before.unsqueeze(dim)

        return local

    def traffic(call: Call, split: Split) -> float:
        return nbytes_without(split.ins[0], dim, call.ins[0].dtype)

    return opened(call, mesh, cumsum(call), ["s"], code, traffic)


def _dim(call: Call, index: int) -> int:
    # The stable overloads take everything by keyword.
    return int(call.arg(99 if call.target.endswith(".stable") else index, "dim", -1))


def _named(names: Sequence[str], rule: RuleFn) -> dict[str, RuleFn]:
    return {f"aten.{name}": rule for name in names}


RULES: dict[str, RuleFn] = {
    **_named(["sort", "argsort", "cumprod", "cummax", "cummin", "logcumsumexp"], _kept(1)),
    **_named(["topk"], _kept(2)),
    "aten.cumsum": cumsum,
}
STRATEGIES: dict[str, StrategyFn] = {"aten.cumsum": _split_cumsum}
