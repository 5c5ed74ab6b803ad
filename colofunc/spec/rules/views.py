"""Operators that only describe the elements anew: reshapes, permutations, broadcasts.

    view (2, 12) -> (2, 3, 4)       f0 (f1 f2) -> f0 f1 f2          common refinement of both shapes
    view (4, 6) -> (6, 4)           (f0 [f2]) ([f3] f1) -> ...      boundaries that do not nest: the rest is whole
    permute, transpose              d0 d1 d2 -> d2 d0 d1
    expand (4, 1) -> (6, 4, 5)      d1 1 -> d0 d1 d2

All are linear and monotone in their tensors: an element of the result is an element of an operand.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, prod
from typing import Any

import attrs

from colofunc.spec.layout import Layout
from colofunc.spec.rule import Call, Factors, Operand, Rule
from colofunc.spec.rules.pattern import Args, RuleFn, dims_of, pattern, sets, sizes_from_out, with_arg, wrap

ONE = sets([{0}])  # linear or monotone in operand 0


def moves(ins: Sequence[Operand], outs: Sequence[Operand | None], sizes: dict[str, int], **more: Any) -> Rule:
    """A rule whose results hold elements of the operands: sums of all of them and maxima pass."""
    every = sets([range(len(ins))]) if ins else ()
    return Rule(tuple(ins), tuple(outs), sizes, **{"linear": every, "monotone": every, **more})


def out_shape(call: Call) -> tuple[int, ...]:
    assert call.outs[0] is not None
    return call.outs[0].shape


# --- view and its kin


def refine(before: tuple[int, ...], after: tuple[int, ...]) -> tuple[Operand, Operand, dict[str, int], frozenset[str]]:
    """Factors of two shapes with equal numel: shared digits of both, and whole ones where boundaries do not nest."""
    sizes: dict[str, int] = {}
    whole: set[str] = set()
    heads: tuple[list[list[str]], list[list[str]]] = ([[] for _ in before], [[] for _ in after])
    tails: tuple[list[list[str]], list[list[str]]] = ([[] for _ in before], [[] for _ in after])
    rest = (list(before), list(after))

    def new(size: int) -> str:
        name = f"f{len(sizes)}"
        sizes[name] = size
        return name

    for ends in (heads, tails):
        order = [list(range(len(r))) if ends is heads else list(reversed(range(len(r)))) for r in rest]
        while True:
            at = [next((i for i in o if r[i] > 1), None) for o, r in zip(order, rest, strict=True)]
            if at[0] is None or at[1] is None:
                break
            common = gcd(rest[0][at[0]], rest[1][at[1]])
            if common == 1:
                break
            name = new(common)
            for side, i in enumerate((at[0], at[1])):
                ends[side][i].append(name)
                rest[side][i] //= common
    dims: list[Operand] = []
    for side in (0, 1):
        operand: list[Factors] = []
        for i, left in enumerate(rest[side]):
            middle = [new(left)] if left > 1 else []
            whole.update(middle)
            operand.append((*heads[side][i], *middle, *reversed(tails[side][i])))
        dims.append(tuple(operand))
    return dims[0], dims[1], sizes, frozenset(whole)


def view(call: Call) -> Rule | None:
    before, after = call.ins[0].shape, out_shape(call)
    if prod(before) != prod(after) or prod(before) == 0:
        return None
    a, b, sizes, whole = refine(before, after)
    return moves([a], [b], sizes, whole=whole, localize=sizes_from_out(1))


def reshape_like(call: Call) -> Rule | None:
    """squeeze, flatten: a view whose arguments do not say the size, so that a dim of local size 1 misleads it."""
    rule = view(call)
    if rule is None:
        return None

    def local(call: Call, ins: tuple[Layout, ...], outs: tuple[Layout | None, ...]) -> Any:
        out = outs[0]
        if out is None or not (ins[0].axes or out.axes):
            return None
        shape = out.local_shape
        return lambda x, mesh: x.reshape(shape)

    return Rule(
        rule.ins, rule.outs, rule.sizes, whole=rule.whole, linear=rule.linear, monotone=rule.monotone, local=local
    )


def unsqueeze(call: Call) -> Rule | None:
    dims, sizes = dims_of(call.ins[0].shape)
    at = wrap(call.arg(1, "dim"), len(dims) + 1)
    return moves([dims], [(*dims[:at], (), *dims[at:])], sizes)


def expand(call: Call) -> Rule | None:
    out, sizes = dims_of(out_shape(call))
    offset = len(out) - len(call.ins[0].shape)
    before = tuple(() if n == 1 else out[offset + i] for i, n in enumerate(call.ins[0].shape))
    return moves([before], [out], sizes, localize=sizes_from_out(1))


def expand_as(call: Call) -> Rule | None:
    out, sizes = dims_of(out_shape(call))
    offset = len(out) - len(call.ins[0].shape)
    before = tuple(() if n == 1 else out[offset + i] for i, n in enumerate(call.ins[0].shape))
    return moves([before, out], [out], sizes, linear=ONE, monotone=ONE)


def repeat(call: Call) -> Rule | None:
    before, sizes = dims_of(call.ins[0].shape)
    times = tuple(call.arg(1, "repeats"))
    offset = len(times) - len(before)
    sizes |= {f"r{i}": n for i, n in enumerate(times)}
    out = tuple(
        ((f"r{i}",) if times[i] != 1 else ()) + (before[i - offset] if i >= offset else ()) for i in range(len(times))
    )
    if 0 in times or 0 in call.ins[0].shape:
        return None

    def localize(call: Call, ins: tuple[Layout, ...], outs: tuple[Layout | None, ...]) -> Args:
        assert outs[0] is not None
        have = (1,) * offset + ins[0].local_shape
        return with_arg(call, 1, "repeats", tuple(n // m for n, m in zip(outs[0].local_shape, have, strict=True)))

    used = {f for dim in out for f in dim}
    return moves([before], [out], {f: n for f, n in sizes.items() if f in used}, localize=localize)


# --- permutations


def _permuted(call: Call, order: Sequence[int]) -> Rule:
    dims, sizes = dims_of(call.ins[0].shape)
    return moves([dims], [tuple(dims[i] for i in order)], sizes)


def permute(call: Call) -> Rule | None:
    ndim = len(call.ins[0].shape)
    return _permuted(call, [wrap(i, ndim) for i in call.arg(1, "dims")])


def transpose(call: Call) -> Rule | None:
    ndim = len(call.ins[0].shape)
    order = list(range(ndim))
    if ndim:
        i, j = wrap(call.arg(1, "dim0"), ndim), wrap(call.arg(2, "dim1"), ndim)
        order[i], order[j] = j, i
    return _permuted(call, order)


def t(call: Call) -> Rule | None:
    return _permuted(call, list(reversed(range(len(call.ins[0].shape)))))


def swap_last(call: Call) -> Rule | None:
    ndim = len(call.ins[0].shape)
    return _permuted(call, [*range(ndim - 2), ndim - 1, ndim - 2])


def movedim(call: Call) -> Rule | None:
    ndim = len(call.ins[0].shape)
    source, target = call.arg(1, "source"), call.arg(2, "destination")
    source, target = ((source,), (target,)) if isinstance(source, int) else (source, target)
    order: list[int | None] = [None] * ndim
    for s, d in zip(source, target, strict=True):
        order[wrap(d, ndim)] = wrap(s, ndim)
    rest = iter(i for i in range(ndim) if i not in order)
    return _permuted(call, [next(rest) if o is None else o for o in order])


def as_strided(call: Call) -> Rule | None:
    """Only where it says what a view says: contiguous strides over all elements (those of size-1 dims do not count)."""
    size, stride = tuple(call.arg(1, "size")), tuple(call.arg(2, "stride"))
    if call.arg(3, "storage_offset") not in (None, 0) or prod(size) != prod(call.ins[0].shape):
        return None
    if any(n != 1 and have != want for n, have, want in zip(size, stride, _contiguous(size), strict=True)):
        return None
    rule = view(call)

    def localize(call: Call, ins: tuple[Layout, ...], outs: tuple[Layout | None, ...]) -> Args:
        assert outs[0] is not None
        local = outs[0].local_shape
        return (call.args[0], local, _contiguous(local)), ()

    return None if rule is None else attrs.evolve(rule, localize=localize)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def view_dtype(call: Call) -> Rule | None:
    """The bits under another name: any split, but sums do not pass."""
    out = call.outs[0]
    if out is None or out.shape != call.ins[0].shape:
        return None
    dims, sizes = dims_of(out.shape)
    return Rule((dims,), (dims,), sizes)


_BY_NAME: dict[RuleFn, str] = {
    view: "view.default reshape.default _unsafe_view.default view_copy.default reshape_copy.default",
    reshape_like: "squeeze squeeze_copy flatten unflatten ravel _reshape_copy",
    unsqueeze: "unsqueeze unsqueeze_copy",
    expand: "expand expand_copy broadcast_to",
    expand_as: "expand_as",
    repeat: "repeat",
    permute: "permute permute_copy",
    transpose: "transpose transpose_copy swapaxes swapdims",
    t: "t t_copy numpy_T",
    swap_last: "mT mH adjoint matrix_H",
    movedim: "movedim moveaxis",
    as_strided: "as_strided as_strided_copy",
    view_dtype: "view.dtype view_copy.dtype",
    pattern("b* -> b* [z]", linear=[{0}]): "view_as_real view_as_real_copy",
    pattern("b* [z] -> b*", linear=[{0}]): "view_as_complex view_as_complex_copy",
}

RULES: dict[str, RuleFn] = {f"aten.{name}": fn for fn, names in _BY_NAME.items() for name in names.split()}
