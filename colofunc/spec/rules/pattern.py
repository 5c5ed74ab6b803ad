"""Rules from text: `pattern("m k, k n -> m n", reduce={"k": "sum"}, linear=[{0}, {1}])` is the rule of `mm`.

One word per dim. A word in brackets is a factor that must be whole; `b*` stands for any number of dims (b0, b1, ...,
the same wherever it appears); `(h d)` is a dim of two factors, of which one is a dim elsewhere, so that both sizes are
told; `1` is a dim of size 1; `-` is a result that is not a tensor. Parsed once, bound to each call's shapes; a call
whose shapes do not fit the text has no rule (None), which means that it runs replicated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any

import attrs

from colofunc.errors import SpecError
from colofunc.ops.pattern_words import Dims, Word, words
from colofunc.spec.layout import Layout
from colofunc.spec.rule import Call, Factors, Operand, Rule

RuleFn = Callable[[Call], Rule | None]
Args = tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]
Sets = Iterable[Iterable[int]]


# Per operand or result its dims; None where `-` stands.
Side = tuple[Dims | None, ...]
_NAME = re.compile(r"[A-Za-z_]\w*\Z|1\Z")


@cache
def _parse(text: str) -> tuple[Side, Side]:
    if text.count("->") != 1:
        raise SpecError(
            f"the pattern {text!r} of a rule has no two sides; write operands -> results, such as 'm k, k n -> m n'"
        )
    left, right = text.split("->")
    try:
        sides = _side(left) if left.strip() else (), _side(right)
        _check_groups([*sides[0], *sides[1]])
    except SpecError as error:
        error.add_note(f"in the pattern {text!r} of a rule")
        raise
    return sides


def _side(text: str) -> Side:
    if not text.strip() and "," not in text:
        return ((),) if text else ()
    found = tuple(None if part.strip() == "-" else words(part) for part in text.split(","))
    for word in _all_words(found):
        if not _NAME.match(word.text):
            raise SpecError(f"{str(word)!r} is no factor; write a name, '[d]', '(h d)', 'b*' or 1")
    return found


def _all_words(side: Iterable[Dims | None]) -> Iterator[Word]:
    for dims in side:
        for dim in dims or ():
            yield from dim if isinstance(dim, tuple) else (dim,)


def _check_groups(operands: Sequence[Dims | None]) -> None:
    """Raise SpecError for a group of factors whose sizes cannot be told: of two or more no dim by itself is one, and no
    other group says it.
    """
    groups = [dim for dims in operands for dim in dims or () if isinstance(dim, tuple)]
    for group in groups:
        if any(word.many for word in group):
            raise SpecError("'*' inside a group; any number of dims is no one dim, so write 'b*' outside")
    singles = [dim for dims in operands for dim in dims or () if isinstance(dim, Word)]
    stars = tuple(word.text for word in singles if word.many)
    known = {word.text for word in singles if not word.many} | {"1"}

    def unknown_of(group: tuple[Word, ...]) -> list[str]:
        names = [word.text for word in group if word.text not in known]
        return [name for name in names if not any(name.rstrip("0123456789") == star for star in stars)]

    progress = True
    while progress:
        progress = False
        for group in groups:
            unknown = unknown_of(group)
            if len(unknown) == 1:
                known.update(unknown)
                progress = True
    for group in groups:
        unknown = unknown_of(group)
        if unknown:
            names = " and ".join(unknown)
            raise SpecError(
                f"nothing says how large {names} are in '({' '.join(map(str, group))})'; write the dim as one factor, "
                "or give an operand that has one of them as a dim"
            )


def bind(
    text: str, call: Call, *, reduce: Mapping[str, str] | None = None, linear: Sets = (), **more: Any
) -> Rule | None:
    """The rule that `text` gives for this call's shapes; None where they do not fit."""
    left, right = _parse(text)
    if len(left) != len(call.ins) or len(right) != len(call.outs):
        return None
    stars: dict[str, int] = {}
    ins = [_spread(dims or (), typ.shape, stars) for dims, typ in zip(left, call.ins, strict=True)]
    outs: list[Operand | None] = []
    for dims, out in zip(right, call.outs, strict=True):
        outs.append(None if dims is None or out is None else _spread(dims, out.shape, stars))
    shapes = [typ.shape for typ in call.ins] + [() if out is None else out.shape for out in call.outs]
    sizes = _sizes([*ins, *outs], shapes)
    if sizes is None:
        return None
    bound = [*left, *(dims if out is not None else None for dims, out in zip(right, outs, strict=True))]
    whole: set[str] = set()
    for word in _all_words(bound):
        if word.whole:
            whole.update(_expand(f"{word.text}*" if word.many else word.text, stars))
    spread: dict[str, str] = {}
    for name, how in (reduce or {}).items():
        spread.update(dict.fromkeys(_expand(name, stars), how))
    return Rule(tuple(ins), tuple(outs), sizes, spread, frozenset(whole), sets(linear), **more)


def _spread(dims: Dims, shape: tuple[int, ...], stars: dict[str, int]) -> Operand:
    """The factors of each dim. `b*` stands for as many dims as the others leave, wherever it appears."""
    free = len(shape) - sum(isinstance(dim, tuple) or not dim.many for dim in dims)
    factors: list[Factors] = []
    for dim in dims:
        if isinstance(dim, Word) and dim.many:
            count = stars.setdefault(dim.text, free)
            free -= count
            factors += [(f"{dim.text}{number}",) for number in range(count)]
            continue
        group = dim if isinstance(dim, tuple) else (dim,)
        factors.append(tuple(word.text for word in group if word.text != "1"))
    return tuple(factors)


def _sizes(operands: Sequence[Operand | None], shapes: Sequence[tuple[int, ...]]) -> dict[str, int] | None:
    """The size of each factor: of dims of one factor first, then what these leave of groups; None where shapes do not
    fit.
    """
    sizes: dict[str, int] = {}
    groups: list[tuple[Factors, int]] = []
    for operand, shape in zip(operands, shapes, strict=True):
        if operand is None:
            continue
        if len(operand) != len(shape):
            return None
        for factors, size in zip(operand, shape, strict=True):
            if len(factors) > 1:
                groups.append((factors, size))
            elif (sizes.setdefault(factors[0], size) if factors else 1) != size:
                return None
    while groups:
        left: list[tuple[Factors, int]] = []
        for factors, size in groups:
            unknown = [factor for factor in factors if factor not in sizes]
            known = prod(sizes[factor] for factor in factors if factor in sizes)
            if len(unknown) > 1:
                left.append((factors, size))
            elif (not unknown and known != size) or (unknown and (known == 0 or size % known)):
                return None
            elif unknown:
                sizes[unknown[0]] = size // known
        if len(left) == len(groups):
            return None
        groups = left
    return sizes


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
    """A rule function from text. `mults`: costs 2 operations per combination of all factors (matrix products).

    Raises SpecError for text that is no pattern, and for a group of factors whose sizes no operand tells.
    """
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
