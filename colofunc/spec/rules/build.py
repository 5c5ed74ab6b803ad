"""Rules whose pattern depends on the call: one text per operand, bound to the call's shapes.

Most families below know their operands only when they see the call (a dim argument, an optional bias), so they write
one text per operand and let `bind` find the sizes:

    bind(call, {0: "n (g c) [h]", 1: "(g o) c [k]"}, ["n (g o) [p]"], reduce={"c": "sum"}, sizes={"g": 2})

Brackets mark whole factors. A dim of size 1 whose name has another size elsewhere is broadcast and gets no factor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

from colofunc.errors import RuleError
from colofunc.mesh import Mesh
from colofunc.spec.layout import Layout
from colofunc.spec.rule import Call, Operand, Ref, Rule, Strategy, TensorType
from colofunc.spec.rules.pattern import Args, RuleFn
from colofunc.spec.strategies import place

Local = Callable[..., Any]
Localize = Callable[[Call, tuple[Layout, ...], tuple[Layout | None, ...]], Args]
Code = Callable[[Call, tuple[Layout, ...], tuple[Layout | None, ...]], Local | None]
StrategyFn = Callable[[Call, Mesh], Iterable[Strategy]]

Texts = dict[int | None, str]  # operand number -> its pattern; None is an operand that is absent
_DIM = re.compile(r"\(([^)]*)\)|(\S+)")


def at(call: Call, index: int, name: str) -> int | None:
    """Which operand the argument is; None where it is absent or not a tensor."""
    value = call.arg(index, name)
    return value.id if isinstance(value, Ref) else None


def _operand(text: str, whole: set[str]) -> Operand:
    dims = []
    for group, single in _DIM.findall(text):
        words = [single] if single else group.split()
        if single == "1":
            words = []
        for word in words:
            if word.startswith("["):
                whole.add(word.strip("[]"))
        dims.append(tuple(word.strip("[]") for word in words))
    return tuple(dims)


def _sizes(pairs: Sequence[tuple[Operand, TensorType]], sizes: dict[str, int]) -> None:
    """Fill in the factors' sizes from shapes: single names first (the largest wins over a broadcast 1), then groups."""
    for operand, typ in pairs:
        if len(operand) != len(typ.shape):
            raise RuleError(f"a pattern of {len(operand)} dims for a tensor of shape {typ.shape}")
        for dim, size in zip(operand, typ.shape, strict=True):
            if len(dim) == 1 and sizes.get(dim[0], 1) == 1:
                sizes[dim[0]] = size
    for operand, typ in pairs:
        for dim, size in zip(operand, typ.shape, strict=True):
            unknown = [f for f in dim if f not in sizes]
            if len(unknown) == 1:
                known = prod(sizes[f] for f in dim if f in sizes)
                sizes[unknown[0]] = size // known if known else 0


def bind(
    call: Call,
    ins: Texts,
    outs: Sequence[str],
    *,
    reduce: Mapping[str, str] | None = None,
    linear: Sequence[set[int | None]] = (),
    addends: Sequence[int | None] = (),
    copied: Sequence[tuple[int, str]] = (),
    localize: Localize | None = None,
    local: Code | None = None,
    flops: int | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Rule:
    """The rule for `call`. `ins`: operand number -> text; a number None is an absent operand and is left out."""
    whole: set[str] = set()
    left = [_operand(text, whole) for k, text in sorted((k, t) for k, t in ins.items() if k is not None)]
    right = [_operand(text, whole) for text in outs]
    if len(left) != len(call.ins):
        raise RuleError(f"{call.target}: {len(left)} operand patterns for {len(call.ins)} tensors")
    pairs = list(zip(left, call.ins, strict=True))
    pairs += [(op, typ) for op, typ in zip(right, call.outs, strict=True) if typ is not None]
    found = dict(sizes or {})
    _sizes(pairs, found)
    used = {f for op, _ in pairs for dim in op for f in dim}
    return Rule(
        tuple(_unbroadcast(op, typ, found) for op, typ in zip(left, call.ins, strict=True)),
        tuple(None if typ is None else _unbroadcast(op, typ, found) for op, typ in zip(right, call.outs, strict=True)),
        {f: n for f, n in found.items() if f in used},
        reduce={f: how for f, how in (reduce or {}).items() if f in used},
        whole=frozenset(whole & used),
        linear=tuple(frozenset(k for k in s if k is not None) for s in linear),
        addends=frozenset(k for k in addends if k is not None),
        copied=frozenset((n, f) for n, f in copied if call.outs[n] is not None),
        localize=localize,
        local=local,
        flops=flops,
    )


def _unbroadcast(operand: Operand, typ: TensorType, sizes: Mapping[str, int]) -> Operand:
    pairs = zip(operand, typ.shape, strict=True)
    return tuple(() if size == 1 and len(dim) == 1 and sizes[dim[0]] != 1 else dim for dim, size in pairs)


def names(prefix: str, n: int) -> list[str]:
    """`names("b", 3)` is ["b0", "b1", "b2"]."""
    return [f"{prefix}{i}" for i in range(n)]


def numbered(texts: Sequence[str]) -> Texts:
    """Patterns of operands 0, 1, ..."""
    return dict(enumerate(texts))


def whole(prefix: str, n: int) -> list[str]:
    """`n` whole dims named after `prefix`."""
    return [f"[{name}]" for name in names(prefix, n)]


def leading(keep: int, *, linear: Sequence[set[int | None]] = (), localize: Localize | None = None) -> RuleFn:
    """The rule of operators that work on the last `keep` dims of every tensor: what stands before is batch."""

    def rule(call: Call) -> Rule | None:
        ranks = {len(t.shape) - keep for t in (*call.ins, *call.outs) if t is not None}
        if len(ranks) != 1 or min(ranks) < 0:
            return None
        batch = names("b", ranks.pop())
        texts = [" ".join([*batch, *whole(f"x{k}_", keep)]) for k in range(len(call.ins) + len(call.outs))]
        n = len(call.ins)
        return bind(call, numbered(texts[:n]), texts[n:], linear=linear, localize=localize)

    return rule


def along(call: Call, dims: Sequence[int], *, linear: Sequence[set[int | None]] = ()) -> Rule | None:
    """Every tensor has the same dims; those in `dims` are whole (and may differ in size between tensors)."""
    rank = len(call.ins[0].shape)
    if any(t is not None and len(t.shape) != rank for t in (*call.ins, *call.outs)):
        return None
    held = {d % rank for d in dims} if rank else set()
    n, count = len(call.ins), len(call.ins) + len(call.outs)
    texts = [" ".join(f"[w{k}_{d}]" if d in held else f"d{d}" for d in range(rank)) for k in range(count)]
    return bind(call, numbered(texts[:n]), texts[n:], linear=linear)


def local_sizes(rule: Rule, ins: Sequence[Layout], outs: Sequence[Layout | None]) -> dict[str, int]:
    """Factor -> its local size, read off the layouts of the operands that have it."""
    found = dict(rule.sizes)
    for operand, layout in [*zip(rule.ins, ins, strict=True), *zip(rule.outs, outs, strict=True)]:
        if operand is None or layout is None:
            continue
        placement = place(operand, rule, layout)
        if placement is None:
            raise RuleError(f"layout {layout.text()} cuts across the factors of {rule.text()}; place axes on factors")
        for factor, atoms in placement.items():
            found[factor] = prod(n for n, axis in atoms if axis is None)
    return found


def batched(*keep: int, outs: Sequence[int], linear: Sequence[set[int | None]] = ()) -> RuleFn:
    """The rule of operators on the last `keep[k]` dims of operand k: the dims before are batch and broadcast.

    `outs`: the same for the results. A result that the operator leaves out (shape (0,)) does not depend on the batch.
    """

    def rule(call: Call) -> Rule | None:
        ranks = [len(t.shape) - n for t, n in zip(call.ins, keep, strict=False)]
        if len(call.ins) != len(keep) or len(call.outs) != len(outs) or min(ranks) < 0:
            return None
        batch = names("b", max(ranks))
        texts = [" ".join([*batch[len(batch) - ranks[k] :], *whole(f"x{k}_", n)]) for k, n in enumerate(keep)]
        results, copied = [], []
        for k, (typ, n) in enumerate(zip(call.outs, outs, strict=True)):
            if typ is not None and typ.shape == (0,) and len(batch) + n != 1:
                results.append(f"[z{k}]")
                copied += [(k, b) for b in batch]
            elif typ is not None and len(typ.shape) != len(batch) + n:
                return None
            else:
                results.append(" ".join([*batch, *whole(f"y{k}_", n)]))
        return bind(call, numbered(texts), results, linear=linear, copied=copied)

    return rule
