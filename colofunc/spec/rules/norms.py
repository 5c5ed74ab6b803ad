"""Normalisations: statistics need their dims whole, or local code that all-reduces sums.

    native_layer_norm           b* [z*], [z*], [z*] -> b* [z*], b* 1, b* 1      opened at z: sums over the axes
    native_layer_norm_backward  dx keeps b*; dw and db sum over b*: pending, to be reduce-scattered
    native_group_norm           n (g [q]) [s*], (g [q]), (g [q]) -> ..., n g, n g
    batch norm, training        [n] c [s*], c, c, c, c -> [n] c [s*], c, c, c, c   opened at n and s: the statistics
                                are those of the whole batch, as on one device
    batch norm, evaluation      n c s*: elementwise

Source of the backward formulas: Ioffe and Szegedy (1502.03167), section 3; the same with other dims for layer norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any

import torch

from colofunc.mesh import Mesh
from colofunc.ops.collectives import all_reduce
from colofunc.ops.kernels import wide
from colofunc.spec.layout import Layout
from colofunc.spec.rule import Call, Factors, Operand, Ref, Rule, Strategy, TensorType
from colofunc.spec.rules.build import LocalFn
from colofunc.spec.rules.opened import Split, opened
from colofunc.spec.rules.pattern import Args, RuleFn, dims_of, factors, with_arg
from colofunc.spec.rules.reduce import reduced_dims, vector_norm

T = torch.Tensor


def _pick(shards: Sequence[T], value: Any) -> T | None:
    return shards[value.id] if isinstance(value, Ref) else None


def _in_types(results: Sequence[T], types: Sequence[TensorType | None]) -> tuple[T | None, ...]:
    """Results in the dtypes that the operator gives; None for those that it leaves out."""
    cast: list[T | None] = []
    for result, typ in zip(results, types, strict=True):
        cast.append(None if typ is None else result.to(typ.dtype))
    return tuple(cast)


def _rule(
    call: Call, operands: dict[Any, Operand], outs: Sequence[Operand | None], sizes: dict[str, int], **more: Any
) -> Rule | None:
    """A rule from argument -> dims (arguments that are absent are left out); None if an operand is not covered."""
    ins = {arg.id: dims for arg, dims in operands.items() if isinstance(arg, Ref)}
    if set(ins) != set(range(len(call.ins))):
        return None
    results: list[Operand | None] = []
    for dims, typ in zip(outs, call.outs, strict=True):
        results.append(None if typ is None else dims)
    return Rule(tuple(ins[number] for number in range(len(ins))), tuple(results), sizes, **more)


# --- layer norm and rms norm


def _layer_dims(call: Call, at: int) -> tuple[Operand, Operand, Operand, dict[str, int]]:
    """(x, statistics, weight) dims and sizes; `at`: the position of normalized_shape, after x."""
    x = call.args[at - 1].id
    shape = call.ins[x].shape
    normalized = len(call.args[at])
    kept = len(shape) - normalized
    dims, sizes = dims_of(shape)
    # Statistics keep the normalized dims, with size 1.
    statistics = (*dims[:kept], *((),) * normalized)
    return dims, statistics, dims[kept:], sizes


def layer_norm(call: Call) -> Rule | None:
    """native_layer_norm(x, shape, w, b, eps); rms_norm(x, shape, w, eps), ours and torch's."""
    x, stat, z, sizes = _layer_dims(call, 1)
    tensors = {call.args[0]: x, call.args[2]: z}
    # rms norm has no bias
    if "layer" in call.target:
        tensors[call.args[3]] = z
    return _rule(
        call, tensors, (x, stat, stat)[: len(call.outs)], sizes, whole=frozenset(factors(z)), localize=_local_shape(1)
    )


def layer_norm_backward(call: Call) -> Rule | None:
    """native_layer_norm_backward(g, x, shape, mean, rstd, w, b, mask); that of rms norm has no mean and b, and ours
    gives dx alone.
    """
    x, stat, z, sizes = _layer_dims(call, 2)
    args = call.args
    if "layer" in call.target:
        tensors = {args[0]: x, args[1]: x, args[3]: stat, args[4]: stat, args[5]: z, args[6]: z}
        outs: tuple[Operand, ...] = (x, z, z)
    else:
        tensors = {args[0]: x, args[1]: x, args[3]: stat, args[4]: z}
        outs = (x, z)[: len(call.outs)]
    batch = dict.fromkeys(factors(x) - factors(z), "sum")
    more = dict(whole=frozenset(factors(z)), linear=(frozenset({args[0].id}),), localize=_local_shape(2))
    return _rule(call, tensors, outs, sizes, reduce=batch, **more)


def rms_norm_dw(call: Call) -> Rule | None:
    """rms_norm_dw(g, x, shape, rstd): a sum over b*, with nothing whole."""
    x, stat, z, sizes = _layer_dims(call, 2)
    args = call.args
    batch = dict.fromkeys(factors(x) - factors(z), "sum")
    more = dict(linear=(frozenset({args[0].id}),), localize=_local_shape(2))
    return _rule(call, {args[0]: x, args[1]: x, args[3]: stat}, (z,), sizes, reduce=batch, **more)


def _local_shape(at: int) -> Callable[..., Args]:
    """normalized_shape from the local x (only `opened` strategies, which have their own code, would change it)."""

    def localize(call: Call, ins: tuple[Layout, ...], outs: tuple[Layout | None, ...]) -> Args:
        local = ins[call.args[at - 1].id].local_shape
        return with_arg(call, at, "normalized_shape", local[len(local) - len(call.args[at]) :])

    return localize


def _layer_forward(call: Call, split: Split) -> LocalFn:
    is_layer = "layer" in call.target
    x_at, w_at = call.args[0], call.args[2]
    b_at = call.args[3] if is_layer else None
    # counted from the end: a local part has as many dims as the whole
    dims = tuple(range(-len(call.args[1]), 0))
    count, axes = prod(call.args[1]), split.axes
    eps = call.args[4] if is_layer else call.args[3]
    if eps is None:
        eps = torch.finfo(call.ins[0].dtype).eps
    out, stat = call.outs[0], call.outs[1]
    assert out is not None and stat is not None

    def local(*shards: T, mesh: Mesh) -> tuple[T, ...]:
        x = shards[x_at.id].to(wide(out.dtype))
        statistics: list[T] = []
        if is_layer:
            mean = all_reduce(x.sum(dims, keepdim=True), axes, mesh) / count
            statistics.append(mean)
            x = x - mean
        rstd = torch.rsqrt(all_reduce((x * x).sum(dims, keepdim=True), axes, mesh) / count + eps)
        statistics.append(rstd)
        y, w, b = x * rstd, _pick(shards, w_at), _pick(shards, b_at)
        if w is not None:
            y = y * w
        if b is not None:
            y = y + b
        y = y.to(out.dtype)
        return y, *(statistic.to(stat.dtype) for statistic in statistics)

    return local


def _layer_backward(call: Call, split: Split) -> LocalFn:
    is_layer = "layer" in call.target
    args = call.args
    mean_at, rstd_at, w_at = (args[3], args[4], args[5]) if is_layer else (None, args[3], args[4])
    ndim = len(call.ins[args[1].id].shape)
    kept = ndim - len(args[2])
    dims, batch = tuple(range(kept, ndim)), tuple(range(kept))
    count, axes = prod(args[2]), split.axes
    types = call.outs

    def local(*shards: T, mesh: Mesh) -> tuple[T | None, ...]:
        g, x, rstd = shards[args[0].id], shards[args[1].id], shards[rstd_at.id]
        high = wide(x.dtype)
        g, x, w = g.to(high), x.to(high), _pick(shards, w_at)
        mean = _pick(shards, mean_at)
        normal = (x if mean is None else x - mean) * rstd
        gw = g if w is None else g * w  # gradient of the normalized values
        inner = all_reduce((gw * normal).sum(dims, keepdim=True), axes, mesh) / count
        dx = gw - normal * inner
        if mean is not None:
            dx = dx - all_reduce(gw.sum(dims, keepdim=True), axes, mesh) / count
        results = [dx * rstd]
        if len(types) > 1:
            results.append((g * normal).sum(batch) if batch else g * normal)
        if is_layer:
            results.append(g.sum(batch) if batch else g)
        return _in_types(results, types)

    return local


def _stat_bytes(call: Call, split: Split) -> float:
    """Two numbers per normalised group."""
    shape_at = 2 if isinstance(call.args[1], Ref) else 1  # behind x
    x, normalized = split.ins[call.args[shape_at - 1].id], len(call.args[shape_at])
    groups = prod(x.local_shape[: len(x.local_shape) - normalized])
    return 2.0 * groups * wide(call.ins[0].dtype).itemsize


def _open_layer(rule: RuleFn, code: Callable[[Call, Split], LocalFn], call: Call, mesh: Mesh) -> Iterator[Strategy]:
    found = rule(call)
    if found is None:
        return iter(())
    return opened(call, mesh, found, sorted(found.whole), code, _stat_bytes, 2)


# --- group norm


def _group_dims(call: Call, x_at: int, group: int) -> tuple[Operand, Operand, Factors, dict[str, int]]:
    """(x, statistics, channels) dims and sizes: channels are (g [q])."""
    shape = call.ins[call.args[x_at].id].shape
    sizes = {"n": shape[0], "g": group, "q": shape[1] // group}
    channels: Factors = ("g", "q")
    dims: list[Factors] = [("n",), channels]
    for number, size in enumerate(shape[2:]):
        sizes[f"s{number}"] = size
        dims.append((f"s{number}",))
    return tuple(dims), (("n",), ("g",)), channels, sizes


def _group_whole(sizes: dict[str, int]) -> frozenset[str]:
    return frozenset(sizes) - {"n", "g"}


def group_norm(call: Call) -> Rule | None:
    """native_group_norm(x, w, b, N, C, HxW, group, eps)."""
    x, stat, channels, sizes = _group_dims(call, 0, call.args[6])
    if len(call.ins[0].shape) < 2 or 0 in call.ins[0].shape:
        return None
    tensors: dict[Any, Operand] = {call.args[0]: x, call.args[1]: (channels,), call.args[2]: (channels,)}

    def localize(call: Call, ins: tuple[Layout, ...], outs: tuple[Layout | None, ...]) -> Args:
        return _group_args(call, 3, 6, ins[0])

    return _rule(call, tensors, (x, stat, stat), sizes, whole=_group_whole(sizes), localize=localize)


def group_norm_backward(call: Call) -> Rule | None:
    """native_group_norm_backward(g, x, mean, rstd, w, N, C, HxW, group, mask)."""
    a = call.args
    x, stat, channels, sizes = _group_dims(call, 1, a[8])
    tensors: dict[Any, Operand] = {a[0]: x, a[1]: x, a[2]: stat, a[3]: stat, a[4]: (channels,)}

    def localize(call: Call, ins: tuple[Layout, ...], outs: tuple[Layout | None, ...]) -> Args:
        return _group_args(call, 5, 8, ins[a[1].id])

    more = dict(whole=_group_whole(sizes), linear=(frozenset({a[0].id}),), localize=localize)
    return _rule(call, tensors, (x, (channels,), (channels,)), sizes, reduce={"n": "sum"}, **more)


def _group_args(call: Call, at: int, group_at: int, x: Layout) -> Args:
    """N, C and group of the local part; the split of channels is a split of groups."""
    args = list(call.args)
    channels = x.local_shape[1]
    args[at], args[at + 1] = x.local_shape[0], channels
    args[group_at] = call.args[group_at] * channels // x.shape[1]
    return tuple(args), call.kwargs


# --- batch norm


def _batch_dims(call: Call, x_at: int) -> tuple[Operand, Operand, dict[str, int]]:
    dims, sizes = dims_of(call.ins[call.args[x_at].id].shape)
    return dims, (dims[1],), sizes


def _is_training(call: Call) -> bool:
    name = call.target.split(".")[1]
    if name == "_native_batch_norm_legit_no_training":
        return False
    if call.target.endswith("no_stats"):
        return True
    return bool(call.args[7] if "backward" in name else call.args[5])


def batch_norm(call: Call) -> Rule | None:
    """native_batch_norm(x, w, b, mean, var, training, momentum, eps), its functional form, and without statistics."""
    x, c, sizes = _batch_dims(call, 0)
    tensors = {call.args[0]: x, call.args[1]: c, call.args[2]: c}
    if not call.target.endswith("no_stats"):
        tensors.update({call.args[3]: c, call.args[4]: c})
    # Statistics of all rows: no axis splits these, but where local code adds the ranks' sums up.
    if _is_training(call):
        whole = frozenset(factors(x) - factors(c))
        return _rule(call, tensors, (x, *(c,) * (len(call.outs) - 1)), sizes, whole=whole)
    # Evaluation: the saved statistics are empty (CPU), or those given. They do not depend on the rows.
    outs: list[Operand] = [x]
    copied: set[tuple[int, str]] = set()
    for number, typ in enumerate(call.outs[1:], 1):
        empty = typ is not None and typ.shape == (0,)
        if empty:
            sizes = sizes | {"none": 0}
        dims: Operand = (("none",),) if empty else c
        outs.append(dims)
        copied.update((number, factor) for factor in factors(x) - factors(dims))
    whole = frozenset({"none"} & set(sizes))
    return _rule(call, tensors, outs, sizes, whole=whole, copied=frozenset(copied))


def batch_norm_backward(call: Call) -> Rule | None:
    """native_batch_norm_backward(g, x, w, mean, var, save_mean, save_invstd, train, eps, mask)."""
    x, c, sizes = _batch_dims(call, 1)
    a = call.args
    tensors = {a[0]: x, a[1]: x, **dict.fromkeys(a[2:7], c)}
    for saved in a[5:7]:  # evaluation on CPU saves nothing
        if isinstance(saved, Ref) and call.ins[saved.id].shape == (0,):
            tensors[saved] = (("none",),)
            sizes = sizes | {"none": 0}
    rest = factors(x) - factors(c)
    linear = (frozenset({a[0].id}),)
    if _is_training(call):
        return _rule(call, tensors, (x, c, c), sizes, whole=frozenset(rest), linear=linear)
    whole = frozenset({"none"} & set(sizes))
    return _rule(call, tensors, (x, c, c), sizes, reduce=dict.fromkeys(rest, "sum"), whole=whole, linear=linear)


def _shaped(vector: T, ndim: int) -> T:
    """A vector of channels, to broadcast along dim 1 of `ndim` dims."""
    return vector.reshape(-1, *(1,) * (ndim - 2))


def _batch_forward(call: Call, split: Split) -> LocalFn:
    no_stats = call.target.endswith("no_stats")
    a, axes = call.args, split.axes
    momentum, eps = a[4 if no_stats else 6], a[5 if no_stats else 7]
    shape = call.ins[0].shape
    count = prod(shape) // shape[1]
    dims = tuple(dim for dim in range(len(shape)) if dim != 1)
    types = call.outs

    def local(*shards: T, mesh: Mesh) -> tuple[T, ...]:
        x = shards[a[0].id]
        x = x.to(wide(x.dtype))
        mean = all_reduce(x.sum(dims), axes, mesh) / count
        centred = x - _shaped(mean, x.dim())
        var = all_reduce((centred * centred).sum(dims), axes, mesh) / count
        rstd = torch.rsqrt(var + eps)
        y, w, b = centred * _shaped(rstd, x.dim()), _pick(shards, a[1]), _pick(shards, a[2])
        if w is not None:
            y = y * _shaped(w, x.dim())
        if b is not None:
            y = y + _shaped(b, x.dim())
        results = [y, mean, rstd]
        if len(types) == 5:
            # running statistics; their variance is the unbiased one
            old_mean, old_var = shards[a[3].id], shards[a[4].id]
            results.append((1 - momentum) * old_mean + momentum * mean)
            results.append((1 - momentum) * old_var + momentum * var * (count / (count - 1)))
        return tuple(result for result in _in_types(results, types) if result is not None)

    return local


def _batch_backward(call: Call, split: Split) -> LocalFn:
    a, axes, types = call.args, split.axes, call.outs
    shape = call.ins[a[1].id].shape
    count = prod(shape) // shape[1]
    dims = tuple(dim for dim in range(len(shape)) if dim != 1)

    def local(*shards: T, mesh: Mesh) -> tuple[T | None, ...]:
        g, x = shards[a[0].id], shards[a[1].id]
        high, ndim = wide(x.dtype), x.dim()
        g, x, w = g.to(high), x.to(high), _pick(shards, a[2])
        rstd = _shaped(shards[a[6].id], ndim)
        normal = (x - _shaped(shards[a[5].id], ndim)) * rstd
        # Mean and variance depend on every row, so the gradient of each row loses its part of two sums.
        db = all_reduce(g.sum(dims), axes, mesh)
        dw = all_reduce((g * normal).sum(dims), axes, mesh)
        dx = (g - _shaped(db, ndim) / count - normal * _shaped(dw, ndim) / count) * rstd
        if w is not None:
            dx = dx * _shaped(w, ndim)
        return _in_types((dx, dw, db), types)

    return local


def _channel_bytes(call: Call, split: Split) -> float:
    """Two numbers per channel."""
    x_at = 1 if "backward" in call.target else 0
    x = split.ins[call.args[x_at].id]
    return 2.0 * x.local_shape[1] * wide(call.ins[0].dtype).itemsize


def _open_batch(rule: RuleFn, code: Callable[[Call, Split], LocalFn], call: Call, mesh: Mesh) -> Iterator[Strategy]:
    found = rule(call)
    if found is None or not _is_training(call) or _has_side_effect(call):
        return iter(())
    return opened(call, mesh, found, sorted(found.whole), code, _channel_bytes, 2)


def _has_side_effect(call: Call) -> bool:
    """native_batch_norm writes running statistics behind the schema's back; traces use the functional form."""
    return call.target.split(".")[1] in ("native_batch_norm",) and isinstance(call.args[3], Ref)


# --- vector norm


def _norm_code(call: Call, split: Split) -> LocalFn:
    order = float(call.arg(1, "ord", 2))
    dims = list(reduced_dims(call.arg(2, "dim"), len(call.ins[0].shape)))
    keepdim, axes, out = bool(call.arg(3, "keepdim", False)), split.axes, call.outs[0]
    assert out is not None

    def local(x: T, *, mesh: Mesh) -> T:
        x = x.abs().to(wide(out.dtype))
        powers = (x * x if order == 2 else x**order).sum(dims, keepdim)
        total = all_reduce(powers, axes, mesh)
        return (torch.sqrt(total) if order == 2 else total ** (1 / order)).to(out.dtype)

    return local


def _open_norm(call: Call, mesh: Mesh) -> Iterator[Strategy]:
    rule = vector_norm(call)
    if rule is None or not rule.whole:
        return iter(())

    def traffic(call: Call, split: Split) -> float:
        out = split.outs[0]
        return float(out.local_numel * wide(call.ins[0].dtype).itemsize) if out else 0.0

    return opened(call, mesh, rule, sorted(rule.whole), _norm_code, traffic)


_BATCH_FORWARD = (
    "native_batch_norm",
    "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_no_training",
)

RULES: dict[str, RuleFn] = {
    "aten.native_layer_norm": layer_norm,
    "aten._fused_rms_norm": layer_norm,
    "colofunc.rms_norm": layer_norm,
    "aten.native_layer_norm_backward": layer_norm_backward,
    "aten._fused_rms_norm_backward": layer_norm_backward,
    "colofunc.rms_norm_dx": layer_norm_backward,
    "colofunc.rms_norm_dw": rms_norm_dw,
    "aten.native_group_norm": group_norm,
    "aten.native_group_norm_backward": group_norm_backward,
    **{f"aten.{name}": batch_norm for name in _BATCH_FORWARD},
    "aten.native_batch_norm_backward": batch_norm_backward,
}
STRATEGIES = {
    "aten.native_layer_norm": partial(_open_layer, layer_norm, _layer_forward),
    "aten._fused_rms_norm": partial(_open_layer, layer_norm, _layer_forward),
    "colofunc.rms_norm": partial(_open_layer, layer_norm, _layer_forward),
    "aten.native_layer_norm_backward": partial(_open_layer, layer_norm_backward, _layer_backward),
    "aten._fused_rms_norm_backward": partial(_open_layer, layer_norm_backward, _layer_backward),
    "colofunc.rms_norm_dx": partial(_open_layer, layer_norm_backward, _layer_backward),
    **{f"aten.{name}": partial(_open_batch, batch_norm, _batch_forward) for name in _BATCH_FORWARD},
    "aten.native_batch_norm_backward": partial(_open_batch, batch_norm_backward, _batch_backward),
    "aten.linalg_vector_norm": _open_norm,
}
