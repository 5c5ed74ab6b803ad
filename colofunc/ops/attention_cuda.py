"""Attention on CUDA: torch's own kernels behind `colofunc.attention` and its backward.

Problem: torch has several fused kernels, and each takes only some calls. Idea: each is a `Kernel` whose guard says what
it takes:

    flash       bfloat16, float16; causal, windows, offsets, stripes (bands, see `attention_bands`), grouped heads
    cudnn       the same, without offsets and windows; on Hopper about twice as fast
    efficient   float32 too; nothing masked, or causal from the top left corner
    flex        FlexAttention, see `attention_flex`: documents, padding, masks, biases without gradient, offsets on the device
    biased      the efficient kernel with a bias: the same and the gradient of a bias; a mask is made for as many rows at once as
                `MAX_BIAS` allows, mostly all

What none of them takes is computed block-wise by `attention`: float64, and dropout, whose bits are ours
(`ops/random.py`) and not those that torch's kernels draw. Torch's switches hold here too:
`torch.nn.attention.sdpa_kernel`.

Results: out (b, h, s, f) with memory order (b, s, h, f), lse (b, h, s) float32 and contiguous. Rows that see nothing
never reach a flash kernel. Blocks of a ring enter backward with the merged out and lse, which the kernels take as they
are.

Sources: Dao, FlashAttention-2 (2307.08691), figures 4 to 6, for the shares of peak rates; Rabe and Staats,
Self-attention does not need O(n^2) memory (2112.05682), for the efficient kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from colofunc.ops.attention_bands import BandBlock, Comb, combs
from colofunc.ops.attention_parts import (
    Block,
    blocks,
    cut_bias,
    empty_results,
    float_bias,
    fold,
    known_positions,
    like_rows,
    make_options,
    merge,
    repeat,
    rows_major,
    take_columns,
    take_rows,
    with_keep,
)
from colofunc.ops.kernels import Like

aten = torch.ops.aten
# Elements of a bias that is made at once; in halves 128 MiB.
MAX_BIAS = 1 << 26
# The efficient kernel reads the log-sum-exp of so many rows at once, and rows of a bias that begin at a multiple of so
# many elements.
LSE_ROWS, BIAS_COLUMNS = 32, 16


# ---- shapes ----


def multiple(n: int, of: int) -> int:
    return -(-n // of) * of


def head_width(*operands: Tensor | Like) -> int:
    """Elements of a head as flash kernels want them: of keys and values alike, a multiple of 8."""
    return multiple(max(x.shape[-1] for x in operands), 8)


def _padded(x: Tensor, width: int) -> Tensor:
    """Zeros behind the elements of a head; and memory that kernels can read 16 bytes at a time."""
    if x.shape[-1] != width:
        return F.pad(x, (0, width - x.shape[-1]))
    strides = (stride for size, stride in zip(x.shape, x.stride()[:-1], strict=False) if size > 1)
    even = all(stride % 8 == 0 for stride in strides) and x.storage_offset() % 8 == 0
    return x if even and x.stride(-1) == 1 else x.contiguous()


def _rows(x: Tensor, width: int) -> Tensor:
    """(b, h, s, e) -> (b, s, h, width)."""
    return _padded(x.transpose(1, 2), width)


def _narrowed(x: Tensor, width: int) -> Tensor:
    """(b, s, h, width) -> (b, h, s, e), in rows' order."""
    return rows_major((x if x.shape[-1] == width else x[..., :width]).transpose(1, 2))


# ---- what is cut off ----


def _combs(
    q: Tensor, k: Tensor, causal: bool, window: int, q_offset: Tensor | None, k_offset: Tensor | None
) -> tuple[Comb, ...]:
    rows, columns = known_positions(q_offset), known_positions(k_offset)
    found = combs(causal, window, rows, columns, q.shape[2], k.shape[2])
    assert found is not None, "the guard has let a call through whose positions make no bands"
    return found


AttentionForward = Callable[[Tensor, Tensor, Tensor, float, BandBlock], tuple[Tensor, Tensor]]
AttentionBackward = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float, BandBlock], tuple[Tensor, Tensor, Tensor]
]


def _columns(x: Tensor, comb: Comb) -> Tensor:
    """A view of the columns that some row sees."""
    every = x if comb.step == 1 else x[:, :, comb.first :: comb.step]
    return every[:, :, comb.cut.j0 : comb.cut.j1]


def _forward(
    run: AttentionForward, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, causal: bool,
    window: int, dropout: float, seed: Tensor | None, site: int, q_offset: Tensor | None, k_offset: Tensor | None, *placed: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A kernel over the rows and columns that see each other, mostly one call."""
    results = []
    for comb in _combs(q, k, causal, window, q_offset, k_offset):
        rows, keys, values = slice(comb.cut.i0, comb.cut.i1), _columns(k, comb), _columns(v, comb)
        if rows == slice(0, q.shape[2]):
            results.append(run(q, keys, values, scale, comb.cut))
            continue
        out, lse = _blind(q, v)
        out[:, :, rows], lse[:, :, rows] = run(q[:, :, rows], keys, values, scale, comb.cut)
        results.append((out, lse))
    if len(results) > 1:
        outs, lses = zip(*results, strict=True)
        return merge(outs, lses)
    return results[0] if results else _blind(q, v)


def _blind(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Results of rows that see nothing."""
    out, lse = empty_results(q, v)
    return out.zero_(), lse.fill_(-torch.inf)


def _backward(
    run: AttentionBackward, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, scale: float,
    causal: bool, window: int, dropout: float, seed: Tensor | None, site: int, q_offset: Tensor | None, k_offset: Tensor | None,
    *placed: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    found, nothing = _combs(q, k, causal, window, q_offset, k_offset), q.new_empty(0)
    if len(found) == 1 and found[0].step == 1 and _entire(found[0].cut, q, k):
        return *run(grad, q, k, v, out, lse, scale, found[0].cut), nothing
    # Rows' gradients of several calls are summed, so they are summed wide.
    dq = like_rows(q, torch.promote_types(q.dtype, torch.float32) if len(found) > 1 else None).zero_()
    dk, dv = like_rows(k).zero_(), like_rows(v).zero_()
    for comb in found:
        rows = slice(comb.cut.i0, comb.cut.i1)
        row_wise = (
            grad[:, :, rows],
            q[:, :, rows],
            _columns(k, comb),
            _columns(v, comb),
            out[:, :, rows],
            lse[:, :, rows],
        )
        bq, bk, bv = run(*row_wise, scale, comb.cut)
        dq[:, :, rows] += bq
        _columns(dk, comb).copy_(bk)
        _columns(dv, comb).copy_(bv)
    return dq.to(q.dtype), dk, dv, nothing


def _entire(part: BandBlock, q: Tensor, k: Tensor) -> bool:
    return (part.i0, part.i1, part.j0, part.j1) == (0, q.shape[2], 0, k.shape[2])


# ---- flash ----


def _window(part: BandBlock) -> dict[str, int]:
    return {} if part.whole or part.causal else {"window_size_left": part.left, "window_size_right": part.right}


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float, part: BandBlock) -> tuple[Tensor, Tensor]:
    rows, keys, values = (_rows(x, head_width(q, v)) for x in (q, k, v))
    sizes = (None, None, rows.shape[1], keys.shape[1])
    found = aten._flash_attention_forward(
        rows, keys, values, *sizes, 0.0, part.causal, False, scale=scale, **_window(part)
    )
    return _narrowed(found[0], v.shape[-1]), found[1]


def _flash_grads(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, part: BandBlock
) -> tuple[Tensor, Tensor, Tensor]:
    dout, rows, keys, values, result = (_rows(x, head_width(q, v)) for x in (grad, q, k, v, out))
    sizes = (None, None, rows.shape[1], keys.shape[1])
    # the state of a dropout that there is not
    unused = (q.new_empty(2, dtype=torch.uint64), q.new_empty((), dtype=torch.uint64))
    dq, dk, dv = aten._flash_attention_backward(
        dout,
        rows,
        keys,
        values,
        result,
        lse.contiguous(),
        *sizes,
        0.0,
        part.causal,
        *unused,
        scale=scale,
        **_window(part),
    )
    return _narrowed(dq, q.shape[-1]), _narrowed(dk, k.shape[-1]), _narrowed(dv, v.shape[-1])


# ---- cuDNN ----


def _cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float, part: BandBlock) -> tuple[Tensor, Tensor]:
    found = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, part.causal, False, scale=scale)
    return rows_major(found[0]), found[1].reshape(q.shape[:3])


@lru_cache(maxsize=1)
def _cudnn_lse_dims() -> int:
    """Three, or a fourth of size 1: as this torch's shape function has it."""
    q = torch.empty(1, 1, 8, 8, dtype=torch.bfloat16, device="meta")
    return aten._scaled_dot_product_cudnn_attention(q, q, q, None, True)[1].dim()


def _cudnn_grads(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, part: BandBlock
) -> tuple[Tensor, Tensor, Tensor]:
    stats = lse.contiguous() if _cudnn_lse_dims() == 3 else lse.contiguous().unsqueeze(-1)
    unused = (q.new_empty((), dtype=torch.int64), q.new_empty((), dtype=torch.int64))
    dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, stats, *unused, None, None, None, q.shape[2], k.shape[2], 0.0, part.causal, scale=scale
    )
    return rows_major(dq), rows_major(dk), rows_major(dv)


# ---- efficient ----


def _operands(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As the efficient kernel takes them: a key head for each query head, heads of whole 16 bytes."""
    h = q.shape[1]
    return tuple(_padded(x.transpose(1, 2), head_width(x)).transpose(1, 2) for x in (q, repeat(k, h), repeat(v, h)))  # type: ignore[return-value]


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    found = aten._scaled_dot_product_efficient_attention(*_operands(q, k, v), bias, True, 0.0, causal, scale=scale)
    out = found[0] if found[0].shape[-1] == v.shape[-1] else found[0][..., : v.shape[-1]]
    return rows_major(out), found[1][..., : q.shape[2]].contiguous()


def _efficient_grads(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, scale: float, causal: bool,
    dbias: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    short = -q.shape[2] % LSE_ROWS
    stats = F.pad(lse, (0, short), value=torch.inf) if short else lse.contiguous()
    dout, result = (_padded(x.transpose(1, 2), head_width(v)).transpose(1, 2) for x in (grad, out))
    unused = (q.new_empty((), dtype=torch.int64), q.new_empty((), dtype=torch.int64))
    dq, dk, dv, db = aten._scaled_dot_product_efficient_attention_backward(
        dout, *_operands(q, k, v), bias, result, stats, *unused, 0.0, [True, True, True, dbias], causal, scale=scale
    )
    dk, dv = (fold(x, k.shape[1]) for x in (dk, dv))
    # Without the columns that were padded. A view of all of them would be a copy in `rows_major`.
    cut_off: list[Tensor] = []
    for x, like in ((dq, q), (dk, k), (dv, v)):
        cut_off.append(x if x.shape[-1] == like.shape[-1] else x[..., : like.shape[-1]])
    dq, dk, dv = map(rows_major, cut_off)
    return dq, dk, dv, db if dbias else None


def _unbiased(q: Tensor, k: Tensor, v: Tensor, scale: float, part: BandBlock) -> tuple[Tensor, Tensor]:
    return _efficient(q, k, v, None, scale, part.top_left and not part.whole)


def _unbiased_grads(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, part: BandBlock
) -> tuple[Tensor, Tensor, Tensor]:
    return _efficient_grads(grad, q, k, v, None, out, lse, scale, part.top_left and not part.whole)[:3]


# ---- efficient, with a bias ----


def bias_heads(call_bias: Tensor | Like | None, code: Tensor | Like | None) -> int:
    """How many rows and columns of a bias are made: for each sample and head that has its own."""
    shape = () if call_bias is None else tuple(call_bias.shape[:-2])[-2:]
    heads = shape[-1] if shape else 1
    samples = max(shape[-2] if len(shape) > 1 else 1, 1 if code is None else code.shape[0])
    return samples * heads


def bias_rows(s: int, t: int, heads: int) -> int:
    """Rows of a block: as few blocks as the bound allows, all of a size."""
    most = max(LSE_ROWS, MAX_BIAS // max(1, heads * t) // LSE_ROWS * LSE_ROWS)
    return s if s <= most else multiple(-(-s // -(-s // most)), LSE_ROWS)


def _made_bias(bias: Tensor | None, block: Block, q: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The bias of a block for all samples and heads, and which rows see nothing; None where all see all."""
    made = float_bias(with_keep(cut_bias(bias, block), block.keep), q.dtype)
    if made is None:
        return None, None
    b, h, rows, columns = q.shape[0], q.shape[1], block.i1 - block.i0, block.j1 - block.j0
    made = made.expand(*made.shape[:3], columns)
    if made.stride(-1) != 1 or any(
        size > 1 and stride % BIAS_COLUMNS for size, stride in zip(made.shape[:3], made.stride()[:3], strict=True)
    ):
        room = made.new_empty((*made.shape[:3], multiple(columns, BIAS_COLUMNS)))
        made = room[..., :columns].copy_(made)
    return made.expand(b, h, rows, columns), made.amax(-1, keepdim=True) == -torch.inf


def _biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, *options: Any) -> tuple[Tensor, Tensor]:
    opt = make_options(q, k, scale, *options)
    out, lse = empty_results(q, v)
    for block in blocks(q, k, opt, bias_rows(q.shape[2], k.shape[2], bias_heads(bias, opt.code))):
        rows = slice(block.i0, block.i1)
        if block.j0 == block.j1:
            out[:, :, rows], lse[:, :, rows] = 0, -torch.inf
            continue
        made, blind = _made_bias(bias, block, q)
        o, m = _efficient(take_rows(q, block), take_columns(k, block), take_columns(v, block), made, scale, False)
        if blind is not None:
            o, m = o.masked_fill(blind, 0.0), m.masked_fill(blind.squeeze(-1), -torch.inf)
        if block.i1 - block.i0 == q.shape[2]:
            return o, m
        out[:, :, rows], lse[:, :, rows] = o, m
    return out, lse


def _biased_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *options, need_dbias, _ = rest
    opt = make_options(q, k, scale, *options)
    needed = bool(need_dbias) and bias is not None
    # A row that sees nothing has weights exp(-inf - lse), which are 0 for every finite lse.
    finite = lse.nan_to_num(neginf=0.0)
    dq = like_rows(q)
    dk, dv = (like_rows(x, torch.promote_types(x.dtype, torch.float32)).zero_() for x in (k, v))
    dbias = torch.zeros_like(bias) if needed and bias is not None else q.new_empty(0)
    heads = q.shape[0] * q.shape[1] if needed else bias_heads(bias, opt.code)
    for block in blocks(q, k, opt, bias_rows(q.shape[2], k.shape[2], heads)):
        rows, columns = slice(block.i0, block.i1), slice(block.j0, block.j1)
        if block.j0 == block.j1:
            dq[:, :, rows] = 0
            continue
        made, _ = _made_bias(bias, block, q)
        operands = (take_rows(grad, block), take_rows(q, block), take_columns(k, block), take_columns(v, block))
        results = (take_rows(out, block), finite[:, :, rows])
        bq, bk, bv, db = _efficient_grads(*operands, made, *results, scale, False, needed)
        if db is not None:
            part = cut_bias(dbias, block)
            assert part is not None
            part += db.sum_to_size(part.shape)
        if block.i1 - block.i0 == q.shape[2] and block.j1 - block.j0 == k.shape[2]:
            return bq, bk, bv, dbias
        dq[:, :, rows] = bq
        dk[:, :, columns] += bk
        dv[:, :, columns] += bv
    return dq, dk.to(k.dtype), dv.to(v.dtype), dbias


# ---- the kernels, with the arguments of the operators ----


def flash(*args: Any) -> tuple[Tensor, Tensor]:
    return _forward(_flash, *args)


def flash_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _backward(_flash_grads, *args)


def cudnn(*args: Any) -> tuple[Tensor, Tensor]:
    return _forward(_cudnn, *args)


def cudnn_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _backward(_cudnn_grads, *args)


def efficient(*args: Any) -> tuple[Tensor, Tensor]:
    return _forward(_unbiased, *args)


def efficient_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _backward(_unbiased_grads, *args)


def biased(*args: Any) -> tuple[Tensor, Tensor]:
    return _biased(*args)


def biased_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _biased_backward(*args)
