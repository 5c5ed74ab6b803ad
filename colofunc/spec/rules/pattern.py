"""Rules from text: `pattern("m k, k n -> m n", reduce={"k": "sum"}, linear=[{0}, {1}])` is the rule of `mm`.

One word per dim. A word in brackets is a factor that must be whole; `b*` stands for any number of dims (b0, b1, ...,
the same wherever it appears); `1` is a dim of size 1; `-` is a result that is not a tensor. Parsed once, bound to each
call's shapes; a call whose shapes do not fit the text has no rule (None), which means that it runs replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any

import attrs

from colofunc.errors import SpecError
from colofunc.spec.layout import Layout
from colofunc.spec.rule import Call, Factors, Operand, Rule

RuleFn = Callable[[Call], Rule | None]
Args = tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]
Sets = Iterable[Iterable[int]]


@cache
def _parse(text: str) -> tuple[tuple[tuple[str, ...] | None, ...], tuple[tuple[str, ...] | None, ...]]:
    if text.count("->") != 1:
        raise SpecError(
            f"the pattern {text!r} of a rule has no two sides; write operands -> results, such as 'm k, k n -> m n'"
        )
    left, right = text.split("->")

    def side(words: str) -> tuple[tuple[str, ...] | None, ...]:
        if not words.strip() and "," not in words:
            return ((),) if words else ()
        return tuple(None if part.strip() == "-" else tuple(part.split()) for part in words.split(","))

    return side(left) if left.strip() else (), side(right)


def bind(
    text: str, call: Call, *, reduce: Mapping[str, str] | None = None, linear: Sets = (), **more: Any
) -> Rule | None:
    """The rule that `text` gives for this call's shapes; None where they do not fit."""
    left, right = _parse(text)
    if len(left) != len(call.ins) or len(right) != len(call.outs):
        return None
    sizes: dict[str, int] = {}
    whole: set[str] = set()
    stars: dict[str, int] = {}
    ins: list[Operand] = []
    outs: list[Operand | None] = []
    for words, typ in zip(left, call.ins, strict=True):
        operand = _operand(words or (), typ.shape, sizes, whole, stars)
        if operand is None:
            return None
        ins.append(operand)
    for words, out in zip(right, call.outs, strict=True):
        bound = None if words is None or out is None else _operand(words, out.shape, sizes, whole, stars)
        if bound is None and words is not None and out is not None:
            return None
        outs.append(bound)
    spread: dict[str, str] = {}
    for name, how in (reduce or {}).items():
        spread.update(dict.fromkeys(_expand(name, stars), how))
    return Rule(tuple(ins), tuple(outs), sizes, spread, frozenset(whole), sets(linear), **more)


def _operand(
    words: tuple[str, ...], shape: tuple[int, ...], sizes: dict[str, int], whole: set[str], stars: dict[str, int]
) -> Operand | None:
    # `b*` stands for as many dims as the others leave.
    free = len(shape) - len(words) + sum(word.strip("[]").endswith("*") for word in words)
    dims: list[Factors] = []
    for word in words:
        name = word.strip("[]")
        if name.endswith("*"):
            count = stars.setdefault(name[:-1], free)
            names = [f"{name[:-1]}{number}" for number in range(count)]
            free -= count
        else:
            names = [name]
        for factor in names:
            if len(dims) >= len(shape):
                return None
            size = shape[len(dims)]
            if factor == "1":
                if size != 1:
                    return None
                dims.append(())
                continue
            if sizes.setdefault(factor, size) != size:
                return None
            if word.startswith("["):
                whole.add(factor)
            dims.append((factor,))
    return tuple(dims) if len(dims) == len(shape) else None


def _expand(name: str, stars: Mapping[str, int]) -> list[str]:
    """`b*` -> b0, b1, ...: as many as it stands for."""
    if not name.endswith("*"):
        return [name]
    return [f"{name[:-1]}{number}" for number in range(stars.get(name[:-1], 0))]


def sets(groups: Sets) -> tuple[frozenset[int], ...]:
    return tuple(frozenset(g) for g in groups)


def pattern(
    text: str, *, reduce: Mapping[str, str] | None = None, linear: Sets = (), mults: bool = False, **more: Any
) -> RuleFn:
    """A rule function from text. `mults`: costs 2 operations per combination of all factors (matrix products)."""
    _parse(text)

    def rule(call: Call) -> Rule | None:
        found = bind(text, call, reduce=reduce, linear=linear, **more)
        return with_flops(found) if mults and found is not None else found

    return rule


def with_flops(rule: Rule) -> Rule:
    """The rule with the flops of a contraction: a multiply and an add per combination of factors."""
    return attrs.evolve(rule, flops=2 * prod(rule.sizes.values()))


# --- small things that rule functions share


def dims_of(shape: Sequence[int], name: str = "d") -> tuple[Operand, dict[str, int]]:
    """One factor per dim: `((d0,), (d1,))` and their sizes; a dim of size 1 has none."""
    operand = tuple((f"{name}{i}",) if n != 1 else () for i, n in enumerate(shape))
    return operand, {f"{name}{i}": n for i, n in enumerate(shape) if n != 1}


def factors(*operands: Operand | None) -> set[str]:
    """All factors of the operands."""
    return {f for op in operands if op is not None for dim in op for f in dim}


def with_arg(call: Call, index: int, name: str, value: Any) -> Args:
    """The call's arguments with one replaced, wherever it was given."""
    if index < len(call.args):
        return (*call.args[:index], value, *call.args[index + 1 :]), call.kwargs
    return call.args, tuple((k, v) for k, v in call.kwargs if k != name) + ((name, value),)


def wrap(dim: int, ndim: int) -> int:
    """A dim number counted from the front."""
    return dim + ndim if dim < 0 else dim


def sizes_from_out(index: int, name: str = "size") -> Callable[..., Args]:
    """`localize` for operators whose argument `index` is the size of the result."""

    def localize(call: Call, ins: tuple[Layout, ...], outs: tuple[Layout | None, ...]) -> Args:
        out = outs[0]
        return (call.args, call.kwargs) if out is None else with_arg(call, index, name, out.local_shape)

    return localize
