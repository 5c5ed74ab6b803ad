"""The rules of all operators, merged from one table per family.

`rule_for(call)` looks for the operator with its overload ("aten.mm.default"), then without ("aten.add"), then asks
torch whether it is pointwise. None: the call cannot be expressed and runs replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import ModuleType

import attrs

from colofunc.errors import RuleError
from colofunc.mesh import Mesh
from colofunc.spec.rule import Call, Rule, Strategy
from colofunc.spec.rules import (
    attention,
    conv,
    debug,
    embedding,
    experts,
    factories,
    fft,
    fp8,
    images,
    index,
    layers,
    linalg,
    losses,
    matmul,
    norms,
    pointwise,
    quantized,
    random,
    reduce,
    shift,
    slices,
    softmax,
    sort_scan,
    updates,
    views,
    wire,
)
from colofunc.spec.rules.build import StrategyFn
from colofunc.spec.rules.pattern import RuleFn

# One module per family; an operator stands in one family only.
FAMILIES: tuple[ModuleType, ...] = (
    pointwise,
    updates,
    views,
    slices,
    shift,
    factories,
    reduce,
    matmul,
    quantized,
    fp8,
    wire,
    norms,
    softmax,
    losses,
    conv,
    images,
    index,
    embedding,
    sort_scan,
    layers,
    fft,
    linalg,
    random,
    attention,
    experts,
    debug,
)


def _merge() -> tuple[dict[str, RuleFn], dict[str, StrategyFn]]:
    rules: dict[str, RuleFn] = {}
    strategies: dict[str, StrategyFn] = {}
    for module in FAMILIES:
        _add(rules, vars(module)["RULES"], module.__name__)
        _add(strategies, vars(module).get("STRATEGIES", {}), module.__name__)
    return rules, strategies


def _add(
    table: dict[str, RuleFn] | dict[str, StrategyFn], more: Mapping[str, Callable[..., object]], family: str
) -> None:
    twice = sorted(set(table) & set(more))
    if twice:
        raise RuleError(f"family {family!r} defines {', '.join(twice)} again; keep an operator in one family")
    table.update(more)  # type: ignore[arg-type]


RULES, STRATEGIES = _merge()
# Rules of operators that `cf.operator` registered. They are the process's own, as the operators are in torch.
REGISTERED: dict[str, RuleFn] = {}


def base_of(target: str) -> str:
    """`aten.add.Tensor` -> `aten.add`; our own operators have no overloads."""
    return ".".join(target.split(".")[:2])


def rule_for(call: Call) -> Rule | None:
    """The call's rule, or None where it runs replicated."""
    fn = RULES.get(call.target) or RULES.get(base_of(call.target)) or REGISTERED.get(call.target)
    if fn is None:
        if not pointwise.is_pointwise(call):
            return None
        fn = pointwise.pointwise
    rule = fn(call)
    return None if rule is None else _guarded(rule, call)


def _guarded(rule: Rule, call: Call) -> Rule:
    """Dims of size 0 are never split: every size divides 0, and nothing would be gained.

    Complex numbers have no maximum.
    """
    if rule.monotone and any(t.dtype.is_complex for t in call.ins):
        rule = attrs.evolve(rule, monotone=())
    empty = frozenset(f for f, n in rule.sizes.items() if n == 0)
    return attrs.evolve(rule, whole=rule.whole | empty) if empty else rule


def strategies_for(call: Call, mesh: Mesh) -> tuple[Strategy, ...]:
    """Strategies beyond the rule: local code with collectives of its own."""
    fn = STRATEGIES.get(call.target) or STRATEGIES.get(base_of(call.target))
    return () if fn is None else tuple(fn(call, mesh))
