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
    found: list[str] = []
    if size // cut != 1:
        sizes[name] = size // cut
        found.append(name)
    if cut > 1:
        found.append("c")
    return tuple(found)


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
    cut = gcd(low, high - low, size)
    if step != 1 and low < step and taken * step == size:
        # One of every `step` elements, which stay together.
        sizes |= {"j": taken, "k": step}
        scale = (dim, size, low, size, step)
        return put(full, dim, ("j", "k")), put(full, dim, ("j",)), {"whole": frozenset("k"), "scale": scale}
    if step != 1 or cut <= 1 or high == low:
        sizes |= {"k": size, "j": taken}
        return put(full, dim, ("k",)), put(full, dim, ("j",)), {"whole": frozenset("kj")}
    outer = put(full, dim, blocks(cut, sizes, "k", size))
    inner = put(full, dim, blocks(cut, sizes, "j", high - low))
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
        # the second argument is put into what has the first one already
        from_call = Call(call.target, args, kwargs, call.ins, call.outs)
        return with_arg(from_call, at + 1, "end", high * local // size)

    return localize


def slice_(call: Call) -> Rule | None:
    dim, dims, sizes = split_dim(call, 1)
    size = call.ins[0].shape[dim]
    whole, sliced, more = _slice_rule(call, dims, sizes, dim, size, 2)
    scale = more.pop("scale", None)
    return moves([whole], [sliced], sizes, localize=_scaled(2, scale, 0), **more)


def slice_backward(call: Call) -> Rule | None:
    dims, sizes = dims_of(out_shape(call))
    dim = wrap(call.arg(2, "dim"), len(dims))
    whole, sliced, more = _slice_rule(call, dims, sizes, dim, out_shape(call)[dim], 3)
    scale = more.pop("scale", None)
    inner = _scaled(3, scale, None)

    def localize(call: Call, ins: tuple[Layout, ...], outs: tuple[Layout | None, ...]) -> Args:
        assert outs[0] is not None
        args, kwargs = inner(call, ins, outs) if inner else (call.args, call.kwargs)
        return with_arg(Call(call.target, args, kwargs, call.ins, call.outs), 1, "input_sizes", outs[0].local_shape)

    return moves([sliced], [whole], sizes, localize=localize, monotone=(), **more)


def slice_scatter(call: Call) -> Rule | None:
    dim, dims, sizes = split_dim(call, 2)
    whole, sliced, more = _slice_rule(call, dims, sizes, dim, call.ins[0].shape[dim], 3)
    scale = more.pop("scale", None)
    return moves([whole, sliced], [whole], sizes, localize=_scaled(3, scale, 0), **more)


def narrow(call: Call) -> Rule | None:
    dim, dims, sizes = split_dim(call, 1)
    return moves(
        [dims], [put(dims, dim, ("j",))], sizes | {"j": out_shape(call)[dim]}, whole=frozenset((*dims[dim], "j"))
    )


def split(call: Call) -> Rule | None:
    """split, split_with_sizes, chunk: equal blocks of the gcd of all sizes stay free."""
    dim, dims, sizes = split_dim(call, 2)
    pieces = [result.shape[dim] for result in call.outs if result is not None]
    cut = gcd(*pieces)
    if cut == 0 or len(pieces) != len(call.outs):
        return None
    sizes.pop(f"d{dim}", None)
    whole_dim = put(dims, dim, blocks(cut, sizes, "k", sum(pieces)))
    outs = [put(dims, dim, blocks(cut, sizes, f"k{number}", size)) for number, size in enumerate(pieces)]
    whole = _block_counts(sizes)

    def localize(call: Call, ins: tuple[Layout, ...], outs: tuple[Layout | None, ...]) -> Args:
        # how many chunks does not depend on the size
        if call.target.startswith("aten.chunk"):
            return call.args, call.kwargs
        local = [layout.local_shape[dim] for layout in outs if layout is not None]
        # an int says the size of each piece, a tuple that of all
        old = call.arg(1, "split_sizes")
        if isinstance(old, int):
            return with_arg(call, 1, "split_size", local[0])
        return with_arg(call, 1, "split_sizes", tuple(local))

    return moves([whole_dim], outs, sizes, whole=whole, localize=localize)


def _block_counts(sizes: dict[str, int]) -> frozenset[str]:
    """The factors that count blocks: `k`, `k0`, ..."""
    return frozenset(factor for factor in sizes if factor.startswith("k"))


def unbind(call: Call) -> Rule | None:
    dim, dims, sizes = split_dim(call, 1)
    return moves([dims], [put(dims, dim) for _ in call.outs], sizes, whole=frozenset(dims[dim]))


def cat(call: Call) -> Rule | None:
    out = out_shape(call)
    dim = wrap(call.arg(1, "dim", 0), len(out))
    # An operand of shape (0,) joins anything: what an empty key-value cache is.
    full = [number for number, operand in enumerate(call.ins) if operand.shape != (0,) or len(out) == 1]
    cut = gcd(*(call.ins[number].shape[dim] for number in full))
    if cut == 0:
        return None
    dims, sizes = dims_of(out)
    sizes.pop(f"d{dim}", None)
    ins: list[Operand] = []
    total = 0
    for number, operand in enumerate(call.ins):
        size = operand.shape[dim] if number in full else 0
        total += size
        piece = blocks(cut, sizes, f"k{number}", size)
        ins.append(put(dims, dim, piece) if number in full else ((f"k{number}",),))
    joined = put(dims, dim, blocks(cut, sizes, "k", total))
    sums = (frozenset(full),)
    return moves(ins, [joined], sizes, whole=_block_counts(sizes), linear=sums, monotone=sums)


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
    whole: set[str] = set()
    if shape:  # dim 0 of a tensor without dims is none
        for dim in whole_dims:
            whole.update(dims[wrap(dim, len(shape))])
    return moves([dims], [dims], sizes, whole=frozenset(whole), **more)


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
    for dim in range(offset, len(before)):
        # Widths stand from the last dim to the first.
        low, high = widths[2 * (len(before) - 1 - dim) : 2 * (len(before) - dim)]
        if (low, high) != (0, 0):
            whole.update((*dims[dim], f"p{dim}"))
            sizes[f"p{dim}"] = after[dim]
            out[dim] = (f"p{dim}",)
    # Reflection and replication repeat elements, which keeps sums and maxima; a constant keeps sums if it is 0.
    is_constant = "constant" in call.target
    linear = ONE if not is_constant or call.arg(2, "value", 0) in (0, None, False) else ()
    monotone = () if is_constant else ONE
    return moves([dims], [tuple(out)], sizes, whole=frozenset(whole), linear=linear, monotone=monotone)


def pad_backward(call: Call) -> Rule | None:
    """reflection_pad, replication_pad: the gradient has the padded dims, which are whole."""
    dims, sizes = dims_of(call.ins[1].shape)
    padded = len(call.arg(2, "padding")) // 2
    grad = list(dims)
    whole: set[str] = set()
    for dim in range(len(dims) - padded, len(dims)):
        sizes[f"p{dim}"] = call.ins[0].shape[dim]
        grad[dim] = (f"p{dim}",)
        whole.update((*dims[dim], f"p{dim}"))
    return moves([tuple(grad), dims], [dims], sizes, whole=frozenset(whole), linear=ONE, monotone=())


def _diagonal_dims(
    call: Call, operand: Operand, sizes: dict[str, int], size: int, dim1_at: int, default1: int, default2: int
) -> tuple[Operand, frozenset[str]]:
    """(the other dims with the diagonal `g`, of `size`, behind them; what is whole). The arguments dim1 and dim2 begin
    at `dim1_at`.
    """
    dim1 = wrap(call.arg(dim1_at, "dim1", default1), len(operand))
    dim2 = wrap(call.arg(dim1_at + 1, "dim2", default2), len(operand))
    sizes["g"] = size
    rest = [dim for number, dim in enumerate(operand) if number not in (dim1, dim2)]
    return (*rest, ("g",)), frozenset((*operand[dim1], *operand[dim2], "g"))


def diagonal(call: Call) -> Rule | None:
    dims, sizes = dims_of(call.ins[0].shape)
    out, whole = _diagonal_dims(call, dims, sizes, out_shape(call)[-1], 2, 0, 1)
    return moves([dims], [out], sizes, whole=whole)


def diagonal_backward(call: Call) -> Rule | None:
    out, sizes = dims_of(out_shape(call))
    grad, whole = _diagonal_dims(call, out, sizes, call.ins[0].shape[-1], 3, 0, 1)
    return moves([grad], [out], sizes, whole=whole, monotone=(), localize=sizes_from_out(1, "input_sizes"))


def diagonal_scatter(call: Call) -> Rule | None:
    dims, sizes = dims_of(call.ins[0].shape)
    part, whole = _diagonal_dims(call, dims, sizes, call.ins[1].shape[-1], 3, 0, 1)
    return moves([dims, part], [dims], sizes, whole=whole)


def diag_embed(call: Call) -> Rule | None:
    out, sizes = dims_of(out_shape(call))
    source, whole = _diagonal_dims(call, out, sizes, call.ins[0].shape[-1], 2, -2, -1)
    return moves([source], [out], sizes, whole=whole, monotone=())


def unfold(call: Call) -> Rule | None:
    dim, dims, sizes = _dim_of_windows(call)
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


def _dim_of_windows(call: Call) -> tuple[int, Operand, dict[str, int]]:
    shape = call.ins[0].shape
    return wrap(call.arg(1, "dimension", 0), len(shape)), *dims_of(shape)


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
