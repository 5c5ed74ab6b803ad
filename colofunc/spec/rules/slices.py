"""Operators that cut, join and shift along a dim.

    slice (8,) [4:8]                ([k] c) -> c                    blocks of gcd(start, length, size) stay free
    slice (8,) [1::2]               (j [k]) -> j                    one of every k, which stay together
    split (12,) in 4, 8             ([k] c) -> c, ([k1] c)
    cat (6,), (3,)                  ([k0] c), ([k1] c) -> ([k] c)   the same, joined
    flip, roll, pad, diagonal       [d0] d1 -> [d0] d1              what moves is whole

All are linear and monotone in their tensors: an element of the result is an element of an operand, or zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any

from colofunc.spec.layout import Layout
from colofunc.spec.rule import Call, Factors, Operand, Rule
from colofunc.spec.rules.pattern import Args, RuleFn, dims_of, sizes_from_out, with_arg, wrap
from colofunc.spec.rules.views import ONE, moves, out_shape


def split_dim(call: Call, index: int) -> tuple[int, Operand, dict[str, int]]:
    """(dim, factors, sizes) of operand 0, whose dim argument is at `index`."""
    shape = call.ins[0].shape
    return wrap(call.arg(index, "dim", 0), len(shape)), *dims_of(shape)


def put(operand: Operand, dim: int, *groups: Factors) -> Operand:
    """The operand with dim `dim` replaced by these dims."""
    return (*operand[:dim], *groups, *operand[dim + 1 :])


def select(call: Call) -> Rule | None:
    dim, dims, sizes = split_dim(call, 1)
    return moves([dims], [put(dims, dim)], sizes, whole=frozenset(dims[dim]))


def select_backward(call: Call) -> Rule | None:
    out, sizes = dims_of(out_shape(call))
    dim = wrap(call.arg(2, "dim"), len(out))
    return moves([put(out, dim)], [out], sizes, whole=frozenset(out[dim]), localize=sizes_from_out(1, "input_sizes"))


def select_scatter(call: Call) -> Rule | None:
    dim, dims, sizes = split_dim(call, 2)
    return moves([dims, put(dims, dim)], [dims], sizes, whole=frozenset(dims[dim]))


def blocks(cut: int, sizes: dict[str, int], name: str, size: int) -> Factors:
    """`([name] c)`: a dim of `size` as whole blocks of `cut`, which may be split. `c` is shared by all such dims."""
    sizes["c"] = cut
    count = size // cut
    if count != 1:
        sizes[name] = count
    return ((name,) if count != 1 else ()) + (("c",) if cut > 1 else ())


def _bounds(size: int, start: int | None, end: int | None, step: int) -> tuple[int, int]:
    low, high, _ = slice(start, end, step).indices(size)
    return low, max(high, low)


def _slice_rule(
    call: Call, full: Operand, sizes: dict[str, int], dim: int, size: int, at: int
) -> tuple[Operand, Operand, dict[str, Any]]:
    """(whole operand, sliced operand, more) of slice and its scatter and backward; slice arguments begin at `at`."""
    step = call.arg(at + 2, "step", 1)
    low, high = _bounds(size, call.arg(at, "start"), call.arg(at + 1, "end"), step)
    if (low, high, step) == (0, size, 1) or size == 0:  # nothing cut from nothing, with any step, is nothing
        return full, full, {}
    sizes.pop(f"d{dim}", None)
    taken = len(range(low, high, step))
    if step != 1 and low < step and taken * step == size:
        sizes |= {"j": taken, "k": step}
        return (
            put(full, dim, ("j", "k")),
            put(full, dim, ("j",)),
            {"whole": frozenset("k"), "scale": (dim, size, low, size, step)},
        )
    if step != 1:
        sizes |= {"k": size, "j": taken}
        return put(full, dim, ("k",)), put(full, dim, ("j",)), {"whole": frozenset("kj")}
    cut = gcd(gcd(low, high - low), size)
    if cut <= 1 or high == low:
        sizes |= {"k": size, "j": high - low}
        return put(full, dim, ("k",)), put(full, dim, ("j",)), {"whole": frozenset("kj")}
    outer, inner = put(full, dim, blocks(cut, sizes, "k", size)), put(full, dim, blocks(cut, sizes, "j", high - low))
    return outer, inner, {"whole": frozenset("kj") & frozenset(sizes), "scale": (dim, size, low, high, step)}


def _scaled(at: int, scale: tuple[int, int, int, int, int] | None, which: int | None) -> Any:
    """localize for slices: start and end shrink with the dim, but not the place among each `step` elements.

    `which`: operand with the whole dim, None: the result.
    """
    if scale is None:
        return None
    dim, size, low, high, step = scale

    def localize(call: Call, ins: tuple[Layout, ...], outs: tuple[Layout | None, ...]) -> Args:
        whole = outs[0] if which is None else ins[which]
        assert whole is not None
        local = whole.local_shape[dim]
        args, kwargs = with_arg(call, at, "start", low * local // size if step == 1 else low)
        from_call = Call(call.target, args, kwargs, call.ins, call.outs)
        return with_arg(from_call, at + 1, "end", high * local // size)

    return localize


def slice_(call: Call) -> Rule | None:
    dim, dims, sizes = split_dim(call, 1)
    size = call.ins[0].shape[dim]
    a, b, more = _slice_rule(call, dims, sizes, dim, size, 2)
    scale = more.pop("scale", None)
    return moves([a], [b], sizes, localize=_scaled(2, scale, 0), **more)


def slice_backward(call: Call) -> Rule | None:
    dims, sizes = dims_of(out_shape(call))
    dim = wrap(call.arg(2, "dim"), len(dims))
    a, b, more = _slice_rule(call, dims, sizes, dim, out_shape(call)[dim], 3)
    scale = more.pop("scale", None)
    inner = _scaled(3, scale, None)

    def localize(call: Call, ins: tuple[Layout, ...], outs: tuple[Layout | None, ...]) -> Args:
        assert outs[0] is not None
        args, kwargs = inner(call, ins, outs) if inner else (call.args, call.kwargs)
        return with_arg(Call(call.target, args, kwargs, call.ins, call.outs), 1, "input_sizes", outs[0].local_shape)

    return moves([b], [a], sizes, localize=localize, monotone=(), **more)


def slice_scatter(call: Call) -> Rule | None:
    dim, dims, sizes = split_dim(call, 2)
    a, b, more = _slice_rule(call, dims, sizes, dim, call.ins[0].shape[dim], 3)
    scale = more.pop("scale", None)
    return moves([a, b], [a], sizes, localize=_scaled(3, scale, 0), **more)


def narrow(call: Call) -> Rule | None:
    dim, dims, sizes = split_dim(call, 1)
    return moves(
        [dims], [put(dims, dim, ("j",))], sizes | {"j": out_shape(call)[dim]}, whole=frozenset((*dims[dim], "j"))
    )


def split(call: Call) -> Rule | None:
    """split, split_with_sizes, chunk: equal blocks of the gcd of all sizes stay free."""
    dim, dims, sizes = split_dim(call, 2)
    pieces = [t.shape[dim] for t in call.outs if t is not None]
    cut = gcd(*pieces)
    if cut == 0 or len(pieces) != len(call.outs):
        return None
    sizes.pop(f"d{dim}", None)
    whole_dim = put(dims, dim, blocks(cut, sizes, "k", sum(pieces)))
    outs = [put(dims, dim, blocks(cut, sizes, f"k{i}", n)) for i, n in enumerate(pieces)]
    whole = frozenset(f for f in sizes if f.startswith("k"))

    def localize(call: Call, ins: tuple[Layout, ...], outs: tuple[Layout | None, ...]) -> Args:
        if call.target.startswith("aten.chunk"):
            return call.args, call.kwargs
        local = [o.local_shape[dim] for o in outs if o is not None]
        old = call.arg(1, "split_sizes")
        if isinstance(old, int):
            return with_arg(call, 1, "split_size", local[0])
        return with_arg(call, 1, "split_sizes", tuple(local))

    return moves([whole_dim], outs, sizes, whole=whole, localize=localize)


def unbind(call: Call) -> Rule | None:
    dim, dims, sizes = split_dim(call, 1)
    return moves([dims], [put(dims, dim) for _ in call.outs], sizes, whole=frozenset(dims[dim]))


def cat(call: Call) -> Rule | None:
    out = out_shape(call)
    dim = wrap(call.arg(1, "dim", 0), len(out))
    # An operand of shape (0,) joins anything: what an empty key-value cache is.
    empty = [t.shape == (0,) and len(out) != 1 for t in call.ins]
    pieces = [0 if e else t.shape[dim] for t, e in zip(call.ins, empty, strict=True)]
    cut = gcd(*pieces)
    if cut == 0:
        return None
    dims, sizes = dims_of(out)
    sizes.pop(f"d{dim}", None)
    ins = [put(dims, dim, blocks(cut, sizes, f"k{i}", n)) for i, n in enumerate(pieces)]
    ins = [((f"k{i}",),) if e else op for i, (op, e) in enumerate(zip(ins, empty, strict=True))]
    joined = put(dims, dim, blocks(cut, sizes, "k", sum(pieces)))
    full = (frozenset(i for i, e in enumerate(empty) if not e),)
    whole = frozenset(f for f in sizes if f.startswith("k"))
    return moves(ins, [joined], sizes, whole=whole, linear=full, monotone=full)


def stack(call: Call) -> Rule | None:
    out = out_shape(call)
    dim = wrap(call.arg(1, "dim", 0), len(out))
    dims, sizes = dims_of(out)
    return moves([put(dims, dim)] * len(call.ins), [dims], sizes, whole=frozenset(dims[dim]))


# --- whole dims


def keep(call: Call, whole_dims: Sequence[int], **more: Any) -> Rule | None:
    """Same dims before and after, some of them whole."""
    shape = call.ins[0].shape
    dims, sizes = dims_of(shape)
    held = [wrap(i, len(shape)) for i in whole_dims] if shape else []  # dim 0 of a tensor without dims is none
    whole = frozenset(f for i in held for f in dims[i])
    return moves([dims], [dims], sizes, whole=whole, **more)


def flip(call: Call) -> Rule | None:
    return keep(call, call.arg(1, "dims"))


def flip_lr(call: Call) -> Rule | None:
    return keep(call, [0] if call.target.startswith("aten.flipud") else [1])


def roll(call: Call) -> Rule | None:
    dims = call.arg(2, "dims", ())
    dims = (dims,) if isinstance(dims, int) else dims
    return keep(call, dims or range(len(call.ins[0].shape)))


def triangle(call: Call) -> Rule | None:
    return keep(call, (-1, -2), monotone=())


def pad(call: Call) -> Rule | None:
    """constant_pad_nd and friends: padded dims are whole; a pad with a value other than zero is not linear."""
    before, after = call.ins[0].shape, out_shape(call)
    widths = tuple(call.arg(1, "pad" if "constant" in call.target else "padding"))
    offset = len(before) - len(widths) // 2
    dims, sizes = dims_of(before)
    out: list[Factors] = list(dims)
    whole: set[str] = set()
    for i in range(offset, len(before)):
        low, high = widths[2 * (len(before) - 1 - i) : 2 * (len(before) - i)]
        if (low, high) != (0, 0):
            whole.update((*dims[i], f"p{i}"))
            sizes[f"p{i}"] = after[i]
            out[i] = (f"p{i}",)
    is_constant = "constant" in call.target
    linear = ONE if not is_constant or call.arg(2, "value", 0) in (0, None, False) else ()
    return moves(
        [dims], [tuple(out)], sizes, whole=frozenset(whole), linear=linear, monotone=() if is_constant else ONE
    )


def pad_backward(call: Call) -> Rule | None:
    """reflection_pad, replication_pad: the gradient has the padded dims, which are whole."""
    dims, sizes = dims_of(call.ins[1].shape)
    padded = len(call.arg(2, "padding")) // 2
    grad = list(dims)
    for i in range(len(dims) - padded, len(dims)):
        sizes[f"p{i}"] = call.ins[0].shape[i]
        grad[i] = (f"p{i}",)
    whole = frozenset(f for op in (grad, dims) for d in op[len(dims) - padded :] for f in d)
    return moves([tuple(grad), dims], [dims], sizes, whole=whole, linear=ONE, monotone=())


def diagonal(call: Call) -> Rule | None:
    dims, sizes = dims_of(call.ins[0].shape)
    i, j = (wrap(call.arg(k, name, k - 2), len(dims)) for k, name in ((2, "dim1"), (3, "dim2")))
    out = (*(d for n, d in enumerate(dims) if n not in (i, j)), ("g",))
    sizes["g"] = out_shape(call)[-1]
    return moves([dims], [out], sizes, whole=frozenset((*dims[i], *dims[j], "g")))


def diagonal_backward(call: Call) -> Rule | None:
    out, sizes = dims_of(out_shape(call))
    i, j = (wrap(call.arg(k, name, k - 3), len(out)) for k, name in ((3, "dim1"), (4, "dim2")))
    grad = (*(d for n, d in enumerate(out) if n not in (i, j)), ("g",))
    sizes["g"] = call.ins[0].shape[-1]
    whole = frozenset((*out[i], *out[j], "g"))
    return moves([grad], [out], sizes, whole=whole, monotone=(), localize=sizes_from_out(1, "input_sizes"))


def diagonal_scatter(call: Call) -> Rule | None:
    dims, sizes = dims_of(call.ins[0].shape)
    i, j = (wrap(call.arg(k, name, k - 3), len(dims)) for k, name in ((3, "dim1"), (4, "dim2")))
    part = (*(d for n, d in enumerate(dims) if n not in (i, j)), ("g",))
    sizes["g"] = call.ins[1].shape[-1]
    return moves([dims, part], [dims], sizes, whole=frozenset((*dims[i], *dims[j], "g")))


def diag_embed(call: Call) -> Rule | None:
    out, sizes = dims_of(out_shape(call))
    i, j = (wrap(call.arg(k, name, k - 4), len(out)) for k, name in ((2, "dim1"), (3, "dim2")))
    source = (*(d for n, d in enumerate(out) if n not in (i, j)), ("g",))
    sizes["g"] = call.ins[0].shape[-1]
    return moves([source], [out], sizes, whole=frozenset((*out[i], *out[j], "g")), monotone=())


def unfold(call: Call) -> Rule | None:
    dim, dims, sizes = _named_dim(call, 1, "dimension")
    if not dims:
        return None
    sizes |= {"n": out_shape(call)[dim], "w": out_shape(call)[-1]}
    return moves([dims], [(*put(dims, dim, ("n",)), ("w",))], sizes, whole=frozenset((*dims[dim], "n", "w")))


def unfold_backward(call: Call) -> Rule | None:
    out, sizes = dims_of(out_shape(call))
    if not out:
        return None
    dim = wrap(call.arg(2, "dim"), len(out))
    sizes |= {"n": call.ins[0].shape[dim], "w": call.ins[0].shape[-1]}
    whole = frozenset((*out[dim], "n", "w"))
    return moves(
        [(*put(out, dim, ("n",)), ("w",))],
        [out],
        sizes,
        whole=whole,
        monotone=(),
        localize=sizes_from_out(1, "input_sizes"),
    )


def _named_dim(call: Call, index: int, name: str) -> tuple[int, Operand, dict[str, int]]:
    shape = call.ins[0].shape
    return wrap(call.arg(index, name, 0), len(shape)), *dims_of(shape)


_BY_NAME: dict[RuleFn, str] = {
    select: "select select_copy",
    select_backward: "select_backward",
    select_scatter: "select_scatter",
    slice_: "slice slice_copy",
    slice_backward: "slice_backward",
    slice_scatter: "slice_scatter",
    narrow: "narrow narrow_copy",
    split: "split split_copy split_with_sizes split_with_sizes_copy chunk unsafe_split unsafe_split_with_sizes "
    "unsafe_chunk",
    unbind: "unbind unbind_copy",
    cat: "cat concat concatenate",
    stack: "stack",
    flip: "flip",
    flip_lr: "flipud fliplr",
    roll: "roll",
    triangle: "tril triu",
    pad: "constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d "
    "replication_pad1d replication_pad2d replication_pad3d",
    pad_backward: "reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward "
    "replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward",
    diagonal: "diagonal diagonal_copy",
    diagonal_backward: "diagonal_backward",
    diagonal_scatter: "diagonal_scatter",
    diag_embed: "diag_embed",
    unfold: "unfold unfold_copy",
    unfold_backward: "unfold_backward",
}

RULES: dict[str, RuleFn] = {f"aten.{name}": fn for fn, names in _BY_NAME.items() for name in names.split()}
