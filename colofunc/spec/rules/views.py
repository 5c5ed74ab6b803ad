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
from colofunc.spec.parts import row_major
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
    sides = (_Side(before), _Side(after))

    def new(size: int) -> str:
        name = f"f{len(sizes)}"
        sizes[name] = size
        return name

    # Shared factors are taken off both shapes, from the front and then from the back, as long as there are any.
    for from_front in (True, False):
        while True:
            dims = [side.next_dim(from_front) for side in sides]
            if dims[0] is None or dims[1] is None:
                break
            common = gcd(sides[0].rest[dims[0]], sides[1].rest[dims[1]])
            if common == 1:
                break
            name = new(common)
            for side, dim in zip(sides, dims, strict=True):
                assert dim is not None
                side.take(dim, name, common, from_front)
    operands: list[Operand] = []
    for side in sides:
        operand: list[Factors] = []
        for dim, left in enumerate(side.rest):
            middle = [new(left)] if left > 1 else []
            whole.update(middle)
            operand.append((*side.heads[dim], *middle, *reversed(side.tails[dim])))
        operands.append(tuple(operand))
    return operands[0], operands[1], sizes, frozenset(whole)


class _Side:
    """One shape while factors are taken off it. `rest`: what is left of each dim."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.rest = list(shape)
        self.heads: list[list[str]] = [[] for _ in shape]  # factors from the front of each dim
        self.tails: list[list[str]] = [[] for _ in shape]  # from its back, the last first

    def next_dim(self, from_front: bool) -> int | None:
        """The first dim, or the last one, of which something is left."""
        dims = range(len(self.rest))
        for dim in dims if from_front else reversed(dims):
            if self.rest[dim] > 1:
                return dim
        return None

    def take(self, dim: int, name: str, size: int, from_front: bool) -> None:
        ends = self.heads if from_front else self.tails
        ends[dim].append(name)
        self.rest[dim] //= size


def view(call: Call) -> Rule | None:
    before, after = call.ins[0].shape, out_shape(call)
    # an empty tensor has no factors to follow
    if prod(before) != prod(after) or prod(before) == 0:
        return None
    operand, result, sizes, whole = refine(before, after)
    return moves([operand], [result], sizes, whole=whole, localize=sizes_from_out(1))


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
    before, out, sizes = _broadcast(call)
    return moves([before], [out], sizes, localize=sizes_from_out(1))


def expand_as(call: Call) -> Rule | None:
    before, out, sizes = _broadcast(call)
    return moves([before, out], [out], sizes, linear=ONE, monotone=ONE)


def _broadcast(call: Call) -> tuple[Operand, Operand, dict[str, int]]:
    """(dims of the operand, which are the last ones; dims of the result; sizes). A dim of size 1 has no factor."""
    out, sizes = dims_of(out_shape(call))
    shape = call.ins[0].shape
    last = out[len(out) - len(shape) :]
    before = tuple(() if size == 1 else dim for dim, size in zip(last, shape, strict=True))
    return before, out, sizes


def repeat(call: Call) -> Rule | None:
    before, sizes = dims_of(call.ins[0].shape)
    times = tuple(call.arg(1, "repeats"))
    if 0 in times or 0 in call.ins[0].shape:
        return None
    offset = len(times) - len(before)
    aligned: Operand = (*((),) * offset, *before)
    # d0 becomes (r0 d0): the copies lie one behind the other.
    out: list[Factors] = []
    for number, (count, dim) in enumerate(zip(times, aligned, strict=True)):
        repeated: Factors = ()
        if count != 1:
            repeated = (f"r{number}",)
            sizes[f"r{number}"] = count
        out.append((*repeated, *dim))

    def localize(call: Call, ins: tuple[Layout, ...], outs: tuple[Layout | None, ...]) -> Args:
        assert outs[0] is not None
        have = (1,) * offset + ins[0].local_shape
        local_times = [out_size // size for out_size, size in zip(outs[0].local_shape, have, strict=True)]
        return with_arg(call, 1, "repeats", tuple(local_times))

    return moves([before], [tuple(out)], sizes, localize=localize)


# --- permutations


def _permuted(call: Call, order: Sequence[int]) -> Rule:
    dims, sizes = dims_of(call.ins[0].shape)
    return moves([dims], [tuple(dims[dim] for dim in order)], sizes)


def permute(call: Call) -> Rule | None:
    ndim = len(call.ins[0].shape)
    return _permuted(call, [wrap(dim, ndim) for dim in call.arg(1, "dims")])


def transpose(call: Call) -> Rule | None:
    ndim = len(call.ins[0].shape)
    order = list(range(ndim))
    if ndim:
        one, other = wrap(call.arg(1, "dim0"), ndim), wrap(call.arg(2, "dim1"), ndim)
        order[one], order[other] = other, one
    return _permuted(call, order)


def t(call: Call) -> Rule | None:
    return _permuted(call, list(reversed(range(len(call.ins[0].shape)))))


def swap_last(call: Call) -> Rule | None:
    ndim = len(call.ins[0].shape)
    return _permuted(call, [*range(ndim - 2), ndim - 1, ndim - 2])


def movedim(call: Call) -> Rule | None:
    ndim = len(call.ins[0].shape)
    source, target = call.arg(1, "source"), call.arg(2, "destination")
    if isinstance(source, int):
        source, target = (source,), (target,)
    from_dim = {wrap(new, ndim): wrap(old, ndim) for old, new in zip(source, target, strict=True)}
    # The others keep their order.
    rest = [dim for dim in range(ndim) if dim not in from_dim.values()]
    order = [from_dim[dim] if dim in from_dim else rest.pop(0) for dim in range(ndim)]
    return _permuted(call, order)


def as_strided(call: Call) -> Rule | None:
    """Only where it says what a view says: contiguous strides over all elements (those of size-1 dims do not count)."""
    size, stride = tuple(call.arg(1, "size")), tuple(call.arg(2, "stride"))
    if call.arg(3, "storage_offset") not in (None, 0) or prod(size) != prod(call.ins[0].shape):
        return None
    for count, given, contiguous in zip(size, stride, row_major(size), strict=True):
        if count != 1 and given != contiguous:
            return None
    rule = view(call)

    def localize(call: Call, ins: tuple[Layout, ...], outs: tuple[Layout | None, ...]) -> Args:
        assert outs[0] is not None
        local = outs[0].local_shape
        return (call.args[0], local, row_major(local)), ()

    return None if rule is None else attrs.evolve(rule, localize=localize)


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
