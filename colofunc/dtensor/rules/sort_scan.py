"""Sorting and scanning along one dim: that dim is whole, the others are free.

    sort      d0 [s] -> d0 [s], d0 [s]
    topk      d0 [s] -> d0 [k], d0 [k]
    cumsum    d0 [s] -> d0 [s]            linear

Operators whose result size is data (unique) and those that count over everything (histc) have no rule.
"""

from __future__ import annotations

from collections.abc import Sequence

from colofunc.dtensor.rule import Call, Rule
from colofunc.dtensor.rules.build import StrategyFn, along
from colofunc.dtensor.rules.pattern import RuleFn


def _kept(index: int, linear: bool = False) -> RuleFn:
    """The result has all dims; `index`: where `dim` stands among positional arguments."""

    def rule(call: Call) -> Rule | None:
        same = call.outs[0] is not None and call.outs[0].dtype == call.ins[0].dtype
        return along(call, [_dim(call, index)], linear=[{0}] if linear and same else [])

    return rule


def _dim(call: Call, index: int) -> int:
    # The stable overloads take everything by keyword.
    return int(call.arg(99 if call.target.endswith(".stable") else index, "dim", -1))


def _named(names: Sequence[str], rule: RuleFn) -> dict[str, RuleFn]:
    return {f"aten.{name}": rule for name in names}


RULES: dict[str, RuleFn] = {
    **_named(["sort", "argsort", "cumprod", "cummax", "cummin", "logcumsumexp"], _kept(1)),
    **_named(["topk"], _kept(2)),
    **_named(["cumsum"], _kept(1, linear=True)),
}
STRATEGIES: dict[str, StrategyFn] = {}
