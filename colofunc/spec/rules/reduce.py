"""Reductions: a reduced factor may be split where partial results can be combined.

    sum  b s -> b      an axis on s leaves +axis
    amax b s -> b      an axis on s leaves max:axis
    mean b s -> b      local sum / global count, leaves +axis
    var  b s -> b      s is whole: a partial variance is no term of anything

`argmax` and the like need to know positions, so their dim is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from colofunc.spec.layout import Layout
from colofunc.spec.rule import Call, Factors, Rule
from colofunc.spec.rules.build import LocalCode
from colofunc.spec.rules.pattern import RuleFn, bind, dims_of, wrap
from colofunc.spec.rules.pointwise import keeps_sums


def reduced_dims(dim: Any, ndim: int) -> tuple[int, ...]:
    """The dims that a `dim` argument names: None and () are all of them."""
    if dim is None or dim == () or ndim == 0:
        return tuple(range(ndim))
    dims = dim if isinstance(dim, (tuple, list)) else (dim,)
    return tuple(sorted(wrap(each, ndim) for each in dims))


def reduced(
    call: Call, dims: Sequence[int], keepdim: bool, how: str | None, *, linear: bool = False, **more: Any
) -> Rule:
    """The rule of a reduction over `dims` of operand 0, for every result. `how` None: the reduced dims are whole."""
    operand, sizes = dims_of(call.ins[0].shape)
    gone: list[str] = []
    for dim in dims:
        gone += operand[dim]
    out: list[Factors] = []
    for dim, dim_factors in enumerate(operand):
        if dim not in dims:
            out.append(dim_factors)
        elif keepdim:
            out.append(())
    return Rule(
        (operand, *(() for _ in call.ins[1:])),
        tuple(None if typ is None else tuple(out) for typ in call.outs),
        sizes,
        dict.fromkeys(gone, how) if how else {},
        frozenset() if how else frozenset(gone),
        (frozenset({0}),) if linear else (),
        **more,
    )


def _all_dims(call: Call, how: str | None, **more: Any) -> Rule:
    """The rule of a reduction over everything."""
    return reduced(call, range(len(call.ins[0].shape)), False, how, **more)


def _over(
    dim_at: int,
    keepdim_at: int,
    how: str | None,
    linear: bool = False,
    local: LocalCode | None = None,
    default: Any = None,
) -> RuleFn:
    """A reduction with (dim, keepdim) arguments at these positions; overloads without them reduce everything."""

    def rule(call: Call) -> Rule | None:
        ndim = len(call.ins[0].shape)
        dims = reduced_dims(call.arg(dim_at, "dim", default), ndim)
        keepdim = bool(call.arg(keepdim_at, "keepdim", False))
        passes = linear and keeps_sums(call, frozenset({0}))
        return reduced(call, dims, keepdim, how, linear=passes, local=local)

    return rule


def amax(how: str) -> RuleFn:
    """A maximum passes pending maxima of its operand as well."""

    def rule(call: Call) -> Rule | None:
        shape = call.ins[0].shape
        dims = reduced_dims(call.arg(1, "dim"), len(shape))
        same = (frozenset({0}),) if how == "max" else ()
        whole = call.ins[0].dtype is torch.bool
        return reduced(call, dims, bool(call.arg(2, "keepdim", False)), None if whole else how, monotone=same)

    return rule


def max_(how: str) -> RuleFn:
    """max and min: over everything, over one dim (values and indices), or of two tensors."""

    def rule(call: Call) -> Rule | None:
        overload = call.target.rsplit(".", 1)[-1]
        if overload == "default":
            return _all_dims(call, None if call.ins[0].dtype is torch.bool else how)
        if overload == "dim":
            dims = reduced_dims(call.arg(1, "dim"), len(call.ins[0].shape))
            return reduced(call, dims, bool(call.arg(2, "keepdim", False)), None)
        return None

    return rule


def _mean_local(call: Call, ins: tuple[Layout, ...], outs: tuple[Layout | None, ...]) -> Callable[..., Any] | None:
    """Where a reduced factor is split: the local mean's share of the global one."""
    dims = reduced_dims(call.arg(1, "dim"), len(call.ins[0].shape))
    count = prod(call.ins[0].shape[dim] for dim in dims)
    local_count = prod(ins[0].local_shape[dim] for dim in dims)
    split = count // max(1, local_count)
    if split <= 1:
        return None
    keepdim = bool(call.arg(2, "keepdim", False))
    dtype = call.arg(3, "dtype") if call.target.endswith("dim") else call.arg(1, "dtype")

    def local(x: torch.Tensor, mesh: Any) -> torch.Tensor:
        return torch.ops.aten.mean.dim(x, list(dims), keepdim, dtype=dtype) / split

    return local


def mean(call: Call) -> Rule | None:
    if call.target.endswith("default"):
        return _all_dims(call, "sum", linear=keeps_sums(call, frozenset({0})), local=_mean_local_all)
    return _over(1, 2, "sum", True, _mean_local)(call)


def _mean_local_all(call: Call, ins: tuple[Layout, ...], outs: tuple[Layout | None, ...]) -> Callable[..., Any] | None:
    split = prod(call.ins[0].shape) // max(1, ins[0].local_numel)
    dtype = dict(call.kwargs).get("dtype")
    return None if split <= 1 else lambda x, mesh: torch.ops.aten.mean.default(x, dtype=dtype) / split


def var(call: Call) -> Rule | None:
    """var, std, var_mean, std_mean: `dim`, `correction` and `names` overloads, and the one over everything."""
    overload = call.target.rsplit(".", 1)[-1]
    if overload == "default":
        return _all_dims(call, None)
    if overload == "correction":
        keepdim = dict(call.kwargs).get("keepdim", False)
    else:
        keepdim = call.arg(3, "keepdim", False)
    return reduced(call, reduced_dims(call.arg(1, "dim"), len(call.ins[0].shape)), bool(keepdim), None)


def vector_norm(call: Call) -> Rule | None:
    """linalg_vector_norm(x, ord, dim, keepdim): maxima and counts combine, other norms need their dims whole."""
    order = call.arg(1, "ord", 2)
    dims = reduced_dims(call.arg(2, "dim"), len(call.ins[0].shape))
    how = {float("inf"): "max", float("-inf"): "min", 0: "sum", 1: "sum"}.get(order)
    return reduced(call, dims, bool(call.arg(3, "keepdim", False)), how)


def norm(call: Call) -> Rule | None:
    """aten.norm.Scalar / ScalarOpt_dim."""
    dims = reduced_dims(call.arg(2, "dim"), len(call.ins[0].shape))
    return reduced(call, dims, bool(call.arg(3, "keepdim", False)), None)


def prod_(call: Call) -> Rule | None:
    """A product of partial products is no pending reduction that we have: whole."""
    if call.target.endswith("default"):
        return _all_dims(call, None)
    return _over(1, 2, None)(call)


def sum_to_size(call: Call) -> Rule | None:
    """Sum of the broadcast dims; local code, because its argument is a size."""
    out = call.outs[0]
    if out is None:
        return None
    operand, sizes = dims_of(call.ins[0].shape)
    offset = len(operand) - len(out.shape)
    result: list[Factors] = []
    for dim_factors, size in zip(operand[offset:], out.shape, strict=True):
        result.append(() if size == 1 else dim_factors)
    kept = set().union(*result)

    def local(call: Call, ins: tuple[Layout, ...], outs: tuple[Layout | None, ...]) -> Callable[..., Any] | None:
        assert outs[0] is not None
        size = outs[0].local_shape
        return lambda x, mesh: x.sum_to_size(size)

    reduce = {factor: "sum" for factor in sizes if factor not in kept}
    return Rule((operand,), (tuple(result),), sizes, reduce, linear=(frozenset({0}),), local=local)


def histc(call: Call) -> Rule | None:
    """d* -> [z]: counts add up, if the range does not follow from the data."""
    if call.arg(2, "min", 0) == call.arg(3, "max", 0):
        return None
    return bind("d* -> [z]", call, reduce={"d*": "sum"})


RULES: dict[str, RuleFn] = {
    "aten.histc.default": histc,
    "colofunc.sum_of_squares": lambda call: bind("d* -> ", call, reduce={"d*": "sum"}),
    "aten.sum": _over(1, 2, "sum", linear=True),
    "aten.nansum": _over(1, 2, "sum"),
    "aten.sum.default": lambda call: _all_dims(call, "sum", linear=keeps_sums(call, frozenset({0}))),
    "aten.sum_to_size.default": sum_to_size,
    "aten.mean": mean,
    "aten.amax": amax("max"),
    "aten.amin": amax("min"),
    "aten.aminmax": lambda call: reduced(
        call,
        reduced_dims(dict(call.kwargs).get("dim"), len(call.ins[0].shape)),
        bool(dict(call.kwargs).get("keepdim", False)),
        None,
    ),
    "aten.max": max_("max"),
    "aten.min": max_("min"),
    "aten.argmax": _over(1, 2, None),
    "aten.argmin": _over(1, 2, None),
    "aten.prod": prod_,
    "aten.any": _over(1, 2, None),
    "aten.all": _over(1, 2, None),
    "aten.var": var,
    "aten.std": var,
    "aten.var_mean": var,
    "aten.std_mean": var,
    "aten.linalg_vector_norm": vector_norm,
    "aten.norm": norm,
    "aten.logsumexp": _over(1, 2, None),
    "aten.count_nonzero": _over(1, 99, "sum"),
    "aten.median.dim": _over(1, 2, None),
    "aten.nanmedian.dim": _over(1, 2, None),
    "aten.mode.default": _over(1, 2, None, default=-1),
    "aten.median.default": lambda call: _all_dims(call, None),
    "aten.nanmedian.default": lambda call: _all_dims(call, None),
    "aten.kthvalue.default": _over(2, 3, None, default=-1),
}
