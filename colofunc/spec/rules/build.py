"""Rules whose pattern depends on the call: one text per operand, bound to the call's shapes.

Most families below know their operands only when they see the call (a dim argument, an optional bias), so they write
one text per operand and let `bind` find the sizes:

    bind(call, {0: "n (g c) [h]", 1: "(g o) c [k]"}, ["n (g o) [p]"], reduce={"c": "sum"}, sizes={"g": 2})

Brackets mark whole factors. A dim of size 1 whose name has another size elsewhere is broadcast and gets no factor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

from colofunc.errors import RuleError
from colofunc.mesh import Mesh
from colofunc.ops.pattern_words import words
from colofunc.spec.layout import Layout
from colofunc.spec.rule import Call, Localize, Operand, Ref, Rule, Strategy, TensorType
from colofunc.spec.rules.pattern import RuleFn
from colofunc.spec.strategies import place

LocalFn = Callable[..., Any]
LocalCode = Callable[[Call, tuple[Layout, ...], tuple[Layout | None, ...]], LocalFn | None]
StrategyFn = Callable[[Call, Mesh], Iterable[Strategy]]

Texts = dict[int | None, str]  # operand number -> its pattern; None is an operand that is absent


def at(call: Call, index: int, name: str) -> int | None:
    """Which operand the argument is; None where it is absent or not a tensor."""
    value = call.arg(index, name)
    return value.id if isinstance(value, Ref) else None


def _operand(text: str, whole: set[str]) -> Operand:
    """The dims of an operand as its pattern gives them; factors in brackets are added to `whole`."""
    dims = []
    for dim in words(text, "the pattern of an operand"):
        group = dim if isinstance(dim, tuple) else (dim,)
        assert not any(word.many for word in group), f"{text!r}: here every dim has a word of its own"
        factors = tuple(word.text for word in group if word.text != "1")
        whole.update(word.text for word in group if word.whole)
        dims.append(factors)
    return tuple(dims)


def _fill_in_sizes(operands: Sequence[tuple[Operand, TensorType]], sizes: dict[str, int]) -> None:
    """Add the factors' sizes to `sizes`: of dims of one factor first (the largest wins over a broadcast 1), then of
    groups.
    """
    for operand, typ in operands:
        if len(operand) != len(typ.shape):
            raise RuleError(f"a pattern of {len(operand)} dims for a tensor of shape {typ.shape}")
        for dim, size in zip(operand, typ.shape, strict=True):
            if len(dim) == 1 and sizes.get(dim[0], 1) == 1:
                sizes[dim[0]] = size
    # The one factor of a group whose size nobody has said is what the others leave of the dim.
    for operand, typ in operands:
        for dim, size in zip(operand, typ.shape, strict=True):
            unknown = [factor for factor in dim if factor not in sizes]
            if len(unknown) == 1:
                known = prod(sizes[factor] for factor in dim if factor in sizes)
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
    local: LocalCode | None = None,
    flops: int | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Rule:
    """The rule for `call`, whose other arguments are those of `Rule`.

    `ins`: operand number -> text. A number None is an absent operand: it is left out, here and in `linear` and
    `addends`. What is said of factors that no tensor of the call has is left out too. Raises RuleError where texts and
    tensors differ in number or in dims.
    """
    texts = {number: text for number, text in ins.items() if number is not None}
    if len(texts) != len(call.ins):
        raise RuleError(f"{call.target}: {len(texts)} operand patterns for {len(call.ins)} tensors")
    whole: set[str] = set()
    operands = [_operand(texts[number], whole) for number in sorted(texts)]
    results = [_operand(text, whole) for text in outs]

    tensors = list(zip(operands, call.ins, strict=True))
    tensors += [(result, typ) for result, typ in zip(results, call.outs, strict=True) if typ is not None]
    all_sizes = dict(sizes or {})
    _fill_in_sizes(tensors, all_sizes)
    used = {factor for operand, _ in tensors for dim in operand for factor in dim}

    bound_outs: list[Operand | None] = []
    for result, out_type in zip(results, call.outs, strict=True):
        bound_outs.append(None if out_type is None else _unbroadcast(result, out_type, all_sizes))
    return Rule(
        tuple(_unbroadcast(operand, typ, all_sizes) for operand, typ in zip(operands, call.ins, strict=True)),
        tuple(bound_outs),
        {factor: size for factor, size in all_sizes.items() if factor in used},
        reduce={factor: how for factor, how in (reduce or {}).items() if factor in used},
        whole=frozenset(whole & used),
        linear=tuple(filter(None, map(_present, linear))),  # linear in no operand that is there says nothing
        addends=_present(addends),
        copied=frozenset((number, factor) for number, factor in copied if call.outs[number] is not None),
        localize=localize,
        local=local,
        flops=flops,
    )


def _present(positions: Iterable[int | None]) -> frozenset[int]:
    """Operands that are there."""
    return frozenset(position for position in positions if position is not None)


def _unbroadcast(operand: Operand, typ: TensorType, sizes: Mapping[str, int]) -> Operand:
    """The operand without the factors that its dims of size 1 only broadcast along."""
    dims = []
    for dim, size in zip(operand, typ.shape, strict=True):
        is_broadcast = size == 1 and len(dim) == 1 and sizes[dim[0]] != 1
        dims.append(() if is_broadcast else dim)
    return tuple(dims)


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
        batch_ranks = {len(typ.shape) - keep for typ in (*call.ins, *call.outs) if typ is not None}
        if len(batch_ranks) != 1 or min(batch_ranks) < 0:
            return None
        batch = names("b", batch_ranks.pop())
        n_ins = len(call.ins)
        texts = [" ".join([*batch, *whole(f"x{number}_", keep)]) for number in range(n_ins + len(call.outs))]
        return bind(call, numbered(texts[:n_ins]), texts[n_ins:], linear=linear, localize=localize)

    return rule


def along(call: Call, dims: Sequence[int], *, linear: Sequence[set[int | None]] = ()) -> Rule | None:
    """Every tensor has the same dims; those in `dims` are whole (and may differ in size between tensors)."""
    rank = len(call.ins[0].shape)
    if any(typ is not None and len(typ.shape) != rank for typ in (*call.ins, *call.outs)):
        return None
    whole_dims = {dim % rank for dim in dims} if rank else set()
    texts = []
    for number in range(len(call.ins) + len(call.outs)):
        # A whole dim has a factor for each tensor, since its sizes may differ.
        words = [f"[w{number}_{dim}]" if dim in whole_dims else f"d{dim}" for dim in range(rank)]
        texts.append(" ".join(words))
    n_ins = len(call.ins)
    return bind(call, numbered(texts[:n_ins]), texts[n_ins:], linear=linear)


def local_sizes(rule: Rule, ins: Sequence[Layout], outs: Sequence[Layout | None]) -> dict[str, int]:
    """Factor -> its local size, read off the layouts of the operands that have it.

    Raises RuleError where a layout cuts across factors.
    """
    sizes = dict(rule.sizes)
    for operand, layout in [*zip(rule.ins, ins, strict=True), *zip(rule.outs, outs, strict=True)]:
        if operand is None or layout is None:
            continue
        placement = place(operand, rule, layout)
        if placement is None:
            raise RuleError(f"layout {layout.text()} cuts across the factors of {rule.text()}; place axes on factors")
        for factor, atoms in placement.items():
            sizes[factor] = prod(size for size, axis in atoms if axis is None)
    return sizes


def batched(*keep: int, outs: Sequence[int], linear: Sequence[set[int | None]] = ()) -> RuleFn:
    """The rule of operators on the last `keep[k]` dims of operand k: the dims before are batch and broadcast.

    `outs`: the same for the results. A result that the operator leaves out (shape (0,)) does not depend on the batch.
    """

    def rule(call: Call) -> Rule | None:
        batch_ranks = [len(typ.shape) - kept for typ, kept in zip(call.ins, keep, strict=False)]
        if len(call.ins) != len(keep) or len(call.outs) != len(outs) or min(batch_ranks) < 0:
            return None
        batch = names("b", max(batch_ranks))
        operands = []
        for number, (batch_rank, kept) in enumerate(zip(batch_ranks, keep, strict=True)):
            own_batch = batch[len(batch) - batch_rank :]
            operands.append(" ".join([*own_batch, *whole(f"x{number}_", kept)]))
        results: list[str] = []
        copied: list[tuple[int, str]] = []
        for number, (out_type, kept) in enumerate(zip(call.outs, outs, strict=True)):
            rank = len(batch) + kept
            if out_type is not None and out_type.shape == (0,) and rank != 1:
                results.append(f"[z{number}]")
                copied += [(number, factor) for factor in batch]
            elif out_type is not None and len(out_type.shape) != rank:
                return None
            else:
                results.append(" ".join([*batch, *whole(f"y{number}_", kept)]))
        return bind(call, numbered(operands), results, linear=linear, copied=copied)

    return rule
