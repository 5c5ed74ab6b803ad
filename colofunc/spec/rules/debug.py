"""`cf.debug.print` and `tap`: what the main rank shows is whole; what every rank shows of its own lies as it does."""

from __future__ import annotations

from colofunc.spec.rule import Call, Operand, Rule
from colofunc.spec.rules.pattern import RuleFn


def shown(call: Call) -> Rule:
    """One factor per dim; equal dims of several tensors share one, so that tensors that lie alike are shown as they
    lie.
    """
    sizes: dict[str, int] = {}
    ins: list[Operand] = []
    for typ in call.ins:
        ins.append(tuple((f"d{k}n{n}",) if n != 1 else () for k, n in enumerate(typ.shape)))
        sizes |= {f"d{k}n{n}": n for k, n in enumerate(typ.shape) if n != 1}
    own = bool(call.arg(3, "ranks", False))
    return Rule(
        tuple(ins),
        (),
        sizes,
        dict.fromkeys(sizes, "sum") if own else {},
        frozenset() if own else frozenset(sizes),
        flops=0,
    )


RULES: dict[str, RuleFn] = {"colofunc.debug": shown}
