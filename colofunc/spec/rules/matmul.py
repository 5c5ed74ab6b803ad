"""Contractions: a factor on the left only is summed, so an axis placed on it leaves a pending sum.

    linear      b* i, o i, o -> b* o     dp on b: data parallel · tp on o: column parallel · tp on i: row parallel
    linear_dx   b* o, o i    -> b* i
    linear_dw   b* o, b* i   -> o i      dp on b: the gradient pends over dp, to be reduce-scattered

A bias is an addend: where the contraction is split it must be counted once. Flops: 2 per combination of factors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import attrs

from colofunc.spec.rule import Call, Factors, Operand, Rule
from colofunc.spec.rules.pattern import RuleFn, bind, pattern, with_flops

TWO = [{0}, {1}]


def _contract(text: str, reduce: str) -> RuleFn:
    """A product of two tensors, linear in each."""
    return pattern(text, reduce=dict.fromkeys(reduce.split(), "sum"), linear=TWO, mults=True)


def product(text: str, call: Call) -> Rule | None:
    """The rule of what reads as a linear layer, or as one of its gradients: "b i, o i, o -> b o", with any number of dims
    for b; the bias comes last, and a call may leave it out.
    """
    whole, without_bias, summed = _patterns(text)
    if len(call.ins) == 2:
        found = bind(without_bias, call, reduce={summed: "sum"}, linear=TWO)
    else:
        found = bind(whole, call, reduce={summed: "sum"}, linear=[{0, 2}, {1, 2}], addends=frozenset({2}))
    return found and with_flops(found)


@cache
def _patterns(text: str) -> tuple[str, str, str]:
    """The pattern of a product, the one without a bias, and the factor that is summed."""
    left, right = text.split("->")
    first, second, *_ = left.split(",")
    summed = next(factor for factor in "bio" if factor not in right.split())
    starred = [each.replace("b", "b*") for each in (text, f"{first}, {second} -> {right}", summed)]
    return starred[0], starred[1], starred[2]


def with_addend(text: str) -> Callable[[Call], Rule | None]:
    """beta * c + alpha * a @ b, where c broadcasts to the result: joint linearity, and c counted once."""
    names = text.split("->")[1].split()

    def rule(call: Call) -> Rule | None:
        out = call.outs[0]
        if out is None:
            return None
        found = bind(text, Call(call.target, call.args, call.kwargs, call.ins[1:], call.outs))
        if found is None:
            return None
        shape = call.ins[0].shape
        offset = len(names) - len(shape)
        addend: list[Factors] = []
        for n, name, size in zip(shape, names[offset:], out.shape[offset:], strict=True):
            addend.append((name,) if n == size else ())
        summed = frozenset(found.sizes) - frozenset(names)
        return with_flops(
            attrs.evolve(
                found,
                ins=(tuple(addend), *found.ins),
                reduce=dict.fromkeys(summed, "sum"),
                linear=(frozenset({0, 1}), frozenset({0, 2})),
                addends=frozenset({0}),
            )
        )

    return rule


def matmul(call: Call) -> Rule | None:
    """torch.matmul: batch dims broadcast at the right, 1-dim operands are vectors."""
    a, b = call.ins[0].shape, call.ins[1].shape
    if not a or not b:
        return None
    sizes: dict[str, int] = {"k": a[-1]}
    batch: dict[int, int] = {}
    for shape in (a[:-2], b[:-2]):
        for i, n in enumerate(reversed(shape)):
            batch[i] = max(batch.get(i, 1), n)
    sizes |= {f"b{i}": n for i, n in batch.items()}

    def lead(shape: tuple[int, ...]) -> list[Factors]:
        return [(f"b{i}",) if n == batch[i] else () for i, n in reversed(list(enumerate(reversed(shape))))]

    left: Operand = (*lead(a[:-2]), *([("m",)] if len(a) > 1 else []), ("k",))
    right: Operand = (*lead(b[:-2]), ("k",), *([("n",)] if len(b) > 1 else []))
    out = tuple((f"b{i}",) for i in sorted(batch, reverse=True))
    if len(a) > 1:
        sizes["m"], out = a[-2], (*out, ("m",))
    if len(b) > 1:
        sizes["n"], out = b[-1], (*out, ("n",))
    return with_flops(Rule((left, right), (out,), sizes, {"k": "sum"}, linear=(frozenset({0}), frozenset({1}))))


def einsum(call: Call) -> Rule | None:
    """aten.einsum with plain letters: its text is a rule already."""
    text = call.arg(0, "equation").replace(" ", "")
    if "." in text or "->" not in text or len(call.ins) < 1:
        return None
    left, right = text.split("->")
    if any(len(set(term)) != len(term) for term in left.split(",")):
        return None
    spaced = ", ".join(" ".join(term) for term in left.split(",")) + " -> " + " ".join(right)
    summed = {c: "sum" for c in left if c != "," and c not in right}
    found = bind(spaced, call, reduce=summed, linear=[{k} for k in range(len(call.ins))])
    return found and with_flops(found)


RULES: dict[str, RuleFn] = {
    "colofunc.linear": partial(product, "b i, o i, o -> b o"),
    "colofunc.linear_dx": partial(product, "b o, o i -> b i"),
    "colofunc.linear_dw": partial(product, "b o, b i -> o i"),
    "aten.linear.default": partial(product, "b i, o i, o -> b o"),
    "aten.mm.default": _contract("m k, k n -> m n", "k"),
    "aten.bmm.default": _contract("b m k, b k n -> b m n", "k"),
    "aten.matmul.default": matmul,
    "aten.dot.default": _contract("k, k -> ", "k"),
    "aten.vdot.default": _contract("k, k -> ", "k"),
    "aten.mv.default": _contract("m k, k -> m", "k"),
    "aten.outer.default": _contract("m, n -> m n", ""),
    "aten.ger.default": _contract("m, n -> m n", ""),
    "aten.addmm.default": with_addend("m k, k n -> m n"),
    "aten.baddbmm.default": with_addend("b m k, b k n -> b m n"),
    "aten.addbmm.default": with_addend("b m k, b k n -> m n"),
    "aten.addmv.default": with_addend("m k, k -> m"),
    "aten.addr.default": with_addend("m, n -> m n"),
    "aten.einsum.default": einsum,
    "aten.kron.default": lambda call: None,
}
