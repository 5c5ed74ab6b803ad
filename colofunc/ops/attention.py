"""Attention, kept whole: q (b, h, s, e), k (b, g, t, e), v (b, g, t, f) -> out (b, h, s, f), lse (b, h, s).

Problem: traced through aten, attention becomes one of five device-bound kernels with a dense mask. Idea: one operator
that says what is meant (scale, causal, window, bias, dropout, grouped heads), with enough about positions that a rank
can compute its block and blocks can be merged:

    row i has position q_offset + i, column j has k_offset + j     (or the offsets list every position: striped blocks)
    causal: sees columns with position <= its own       window w > 0: and position > its own - w
    code (b, n, t), least, most (b, n, s): and those whose n codes lie in least[i] .. most[i]: documents that are packed into
      one row of a batch, columns that are padding. Sizes of 1 are broadcast in b.
    lse = log sum exp of the visible scores; a row that sees nothing gives out = 0 and lse = -inf

Two blocks of keys merge as `out = sum_k exp(lse_k - lse) out_k` with `lse = logaddexp(lse_k)`
(`attention_parts.merge`), and the backward of each block runs with the merged `out` and `lse`.

Dropout keeps weight (b, h, i, j) of the full batch by the counter-based bits of `colofunc.ops.random`: `sizes`,
`strides` and `offset` describe the rank's (b, h, s, t) block of the virtual weights as they do for `random_uniform`.

On CPU the kernel is torch's own flash attention, called per block of rows when a mask must be made, so that an (s, t)
matrix of the whole batch is never alive. On CUDA a call gets the quickest of torch's kernels that takes it
(`attention_cuda`), or the blocks of this module. Source: Dao et al., FlashAttention (2022), section 3; Milakov and
Gimelshein, Online normalizer calculation for softmax (2018).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from colofunc.errors import RuleError
from colofunc.ops.attention_guards import BACKWARD, FORWARD, FUSED, blockwise_kernels
from colofunc.ops.attention_parts import (
    Block,
    Options,
    blocks,
    cut_bias,
    empty_results,
    float_bias,
    fold,
    kept_factor,
    like_rows,
    make_options,
    mask_rows,
    outer,
    repeat,
    rows_major,
    score_rows,
    scores_of,
    take_columns,
    take_rows,
    transposed,
    weighted,
    with_keep,
)
from colofunc.ops.define import define
from colofunc.ops.facts import Facts
from colofunc.ops.kernels import Kernel, for_tensors, table_of

aten = torch.ops.aten
FLASH_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


# ---- on a device ----

_FUSED = table_of(FUSED)


def _attention(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    found = for_tensors(_FUSED, FORWARD, args, options)
    return blockwise(*args, **options) if found is None else found[0].fn(*found[1])


def _attention_backward(*args: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    found = for_tensors(_FUSED, BACKWARD, args, options)
    return blockwise_backward(*args, **options) if found is None else found[0].fn(*found[1])


# ---- forward ----


def blockwise(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, causal: bool = False, window: int = 0,
    dropout: float = 0.0, seed: Tensor | None = None, site: int = 0, q_offset: Tensor | None = None,
    k_offset: Tensor | None = None, sizes: Sequence[int] = (), strides: Sequence[int] = (),
    offset: Tensor | None = None, code: Tensor | None = None, least: Tensor | None = None, most: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    placed = (q_offset, k_offset, sizes, strides, offset)
    opt = make_options(q, k, scale, causal, window, dropout, seed, site, *placed, code, least, most)
    if _flash_can(q, k, v, opt):
        if _one_call(bias, opt):
            out, lse = _flash(q, k, v, float_bias(bias, q.dtype), opt)
            return rows_major(out), rows_major(lse)
        late = _late(k, bias, opt)
        if late is not None:
            return _late_rows(q, k, v, opt, late)
        return _by_rows(q, k, v, bias, opt, _flash_block, mask_rows(k, opt))
    return _by_rows(q, k, v, bias, opt, _math_block, score_rows(q, k))


def _flash_can(q: Tensor, k: Tensor, v: Tensor, opt: Options) -> bool:
    if q.device.type != "cpu" or opt.dropout != 0.0 or q.numel() == 0 or k.numel() == 0:
        return False
    same = q.shape[-1] == v.shape[-1] and q.dtype == k.dtype == v.dtype and q.dtype in FLASH_DTYPES
    return same and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1


def _one_call(bias: Tensor | None, opt: Options) -> bool:
    if opt.code is not None:
        return False
    return not opt.positional or (bias is None and opt.causal and opt.window == 0 and not opt.shifted)


# Note [Late rows]. A block of a causal ring is seen by rows that are `late` positions behind its columns, all alike:
# the first `late` rows see nothing, the others are an ordinary causal attention; if the columns are early enough, all
# see all.


def _late(k: Tensor, bias: Tensor | None, opt: Options) -> int | None:
    """How many rows see nothing (0: all rows see all columns); None where that does not say it all.

    See Note [Late rows].
    """
    offsets = [o for o in (opt.q_offset, opt.k_offset) if o is not None]
    if bias is not None or opt.code is not None or not opt.causal or opt.window or any(o.dim() for o in offsets):
        return None
    late = (0 if opt.k_offset is None else int(opt.k_offset)) - (0 if opt.q_offset is None else int(opt.q_offset))
    if late <= 1 - k.shape[2]:
        return 0
    return late if late > 0 else None


def _late_rows(q: Tensor, k: Tensor, v: Tensor, opt: Options, late: int) -> tuple[Tensor, Tensor]:
    if late == 0:
        out, lse = _flash(q, k, v, None, opt, causal=False)
        return rows_major(out), rows_major(lse)
    out, lse = empty_results(q, v)
    out[:, :, :late], lse[:, :, :late] = 0, -torch.inf
    rest = q.shape[2] - late
    if rest > 0:
        out[:, :, late:], lse[:, :, late:] = _flash(
            q[:, :, late:], k[:, :, :rest], v[:, :, :rest], None, opt, causal=True
        )
    return out, lse


def _late_grads(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, opt: Options, late: int
) -> tuple[Tensor, Tensor, Tensor]:
    if late == 0:
        return _flash_grads(grad, q, k, v, None, out, lse, opt, False)
    dq, dk, dv = (like_rows(x).zero_() for x in (q, k, v))
    rest = q.shape[2] - late
    if rest > 0:
        cut = (grad[:, :, late:], q[:, :, late:], k[:, :, :rest], v[:, :, :rest])
        found = _flash_grads(*cut, None, out[:, :, late:], lse[:, :, late:], opt, True)
        dq[:, :, late:], dk[:, :, :rest], dv[:, :, :rest] = found
    return dq, dk, dv


def _flash(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, opt: Options, causal: bool | None = None
) -> tuple[Tensor, Tensor]:
    causal = opt.causal if causal is None else causal
    kk, vv = repeat(k, q.shape[1]), repeat(v, q.shape[1])
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, kk, vv, 0.0, causal, attn_mask=bias, scale=opt.scale)
    if bias is not None:
        # The kernel gives 0 for a row that sees nothing, which is also a legal value.
        blind = bias.amax(-1) == -torch.inf
        if bool(blind.any()):
            lse = lse.masked_fill(blind, -torch.inf)
    return out, lse


def _by_rows(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, opt: Options, run: Any, rows: int
) -> tuple[Tensor, Tensor]:
    out, lse = empty_results(q, v)
    for block in blocks(q, k, opt, rows):
        if block.j0 == block.j1:
            out[:, :, block.i0 : block.i1] = 0
            lse[:, :, block.i0 : block.i1] = -torch.inf
            continue
        o, m = run(
            take_rows(q, block), take_columns(k, block), take_columns(v, block), cut_bias(bias, block), opt, block
        )
        out[:, :, block.i0 : block.i1] = o
        lse[:, :, block.i0 : block.i1] = m
    return out, lse


def _flash_block(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, opt: Options, block: Block
) -> tuple[Tensor, Tensor]:
    return _flash(q, k, v, float_bias(with_keep(bias, block.keep), q.dtype), opt, causal=False)


def _math_block(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, opt: Options, block: Block
) -> tuple[Tensor, Tensor]:
    scores = scores_of(q, k, with_keep(bias, block.keep), opt)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.nan_to_num(neginf=0.0).unsqueeze(-1))
    if opt.dropout > 0.0:
        weights = weights * kept_factor(opt, block, weights.dtype)
    return weighted(weights, v.to(weights.dtype)).to(q.dtype), lse


# ---- backward ----


def blockwise_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, scale: float,
    causal: bool = False, window: int = 0, dropout: float = 0.0, seed: Tensor | None = None, site: int = 0,
    q_offset: Tensor | None = None, k_offset: Tensor | None = None, sizes: Sequence[int] = (),
    strides: Sequence[int] = (), offset: Tensor | None = None, code: Tensor | None = None, least: Tensor | None = None,
    most: Tensor | None = None, need_dbias: bool = False, grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    placed = (q_offset, k_offset, sizes, strides, offset)
    opt = make_options(q, k, scale, causal, window, dropout, seed, site, *placed, code, least, most)
    dbias = torch.zeros_like(bias) if need_dbias and bias is not None else q.new_empty(0)
    if _flash_can(q, k, v, opt) and not need_dbias and grad_lse is None:
        finite = lse.nan_to_num(neginf=0.0) if bias is not None or opt.masked else lse
        if _one_call(bias, opt):
            return *_flash_grads(grad_out, q, k, v, float_bias(bias, q.dtype), out, finite, opt, opt.causal), dbias
        late = _late(k, bias, opt)
        if late is not None:
            return *_late_grads(grad_out, q, k, v, out, finite, opt, late), dbias
        return *_grads_by_rows(grad_out, q, k, v, bias, out, finite, opt, None, None, mask_rows(k, opt)), dbias
    finite = lse.nan_to_num(neginf=0.0)
    wide_bias = dbias if need_dbias else None
    return *_grads_by_rows(
        grad_out, q, k, v, bias, out, finite, opt, wide_bias, grad_lse, score_rows(q, k), math=True
    ), dbias


def _flash_grads(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    opt: Options,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    kk, vv = repeat(k, q.shape[1]), repeat(v, q.shape[1])
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, kk, vv, out, lse, 0.0, causal, attn_mask=bias, scale=opt.scale
    )
    return rows_major(dq), rows_major(fold(dk, k.shape[1])), rows_major(fold(dv, v.shape[1]))


def _grads_by_rows(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, opt: Options,
    dbias: Tensor | None, grad_lse: Tensor | None, rows: int, math: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    wide = torch.promote_types(q.dtype, torch.float32)
    dq = like_rows(q)
    # Key gradients of many blocks of rows are summed, so they are summed wide.
    dk, dv = like_rows(k, wide).zero_(), like_rows(v, wide).zero_()
    for block in blocks(q, k, opt, rows):
        if block.j0 == block.j1:
            dq[:, :, block.i0 : block.i1] = 0
            continue
        parts = (take_rows(grad, block), take_rows(q, block), take_columns(k, block), take_columns(v, block))
        cut, o, m = cut_bias(bias, block), take_rows(out, block), lse[:, :, block.i0 : block.i1]
        if math:
            g = None if grad_lse is None else grad_lse[:, :, block.i0 : block.i1]
            bq, bk, bv = _math_grads(*parts, cut, o, m, opt, block, cut_bias(dbias, block), g)
        else:
            mask = float_bias(with_keep(cut, block.keep), q.dtype)
            bq, bk, bv = _flash_grads(*parts, mask, o, m, opt, False)
        dq[:, :, block.i0 : block.i1] = bq
        dk[:, :, block.j0 : block.j1] += bk
        dv[:, :, block.j0 : block.j1] += bv
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _math_grads(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, opt: Options,
    block: Block,
    dbias: Tensor | None, grad_lse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    scores = scores_of(q, k, with_keep(bias, block.keep), opt)
    weights = torch.exp(scores - lse.unsqueeze(-1))
    grad, out = grad.to(weights.dtype), out.to(weights.dtype)
    dweights = outer(grad, v.to(weights.dtype))
    dropped = weights
    if opt.dropout > 0.0:
        kept = kept_factor(opt, block, weights.dtype)
        dropped, dweights = weights * kept, dweights * kept
    # Row sums of weights * dweights are those of grad * out, with or without dropout.
    inner = (grad * out).sum(-1, keepdim=True)
    if grad_lse is not None:
        inner = inner - grad_lse.unsqueeze(-1)
    dscores = weights * (dweights - inner)
    if dbias is not None:
        dbias += dscores.sum_to_size(dbias.shape)
    dq = weighted(dscores, k.to(weights.dtype)) * opt.scale
    dk = transposed(dscores, q.to(weights.dtype), k.shape[1]) * opt.scale
    return dq, dk, transposed(dropped, grad, v.shape[1])


# ---- the operators ----


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    fits = (
        q.dim() == k.dim() == v.dim() == 4 and q.shape[0] == k.shape[0] == v.shape[0] and k.shape[1:3] == v.shape[1:3]
    )
    if not fits or q.shape[3] != k.shape[3] or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise RuleError(
            f"attention: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} are not (b, h, s, e), (b, g, t, "
            "e), (b, g, t, f) with h a multiple of g. Try: transpose to heads before rows"
        )


def _attention_fake(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *rest: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    _check_shapes(q, k, v)
    return empty_results(q, v)


def _backward_fake(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    *rest: Any,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # 21 arguments before need_dbias, of which 8 are named above.
    need_dbias = options.get("need_dbias", rest[13] if len(rest) > 13 else False)
    dbias = torch.empty_like(bias) if need_dbias and bias is not None else q.new_empty(0)
    return like_rows(q), like_rows(k), like_rows(v), dbias


def _save_attention(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    (
        q,
        k,
        v,
        bias,
        ctx.scale,
        ctx.causal,
        ctx.window,
        ctx.dropout,
        seed,
        ctx.site,
        q_offset,
        k_offset,
        sizes,
        strides,
        offset,
        *box,
    ) = inputs
    ctx.sizes, ctx.strides = sizes, strides
    ctx.save_for_backward(q, k, v, bias, *output, seed, q_offset, k_offset, offset, *box)
    ctx.set_materialize_grads(False)


def _attention_grad(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, bias, out, lse, seed, q_offset, k_offset, offset, *box = ctx.saved_tensors
    if grad_out is None:
        if grad_lse is None:
            return (None,) * 18
        grad_out = torch.zeros_like(out)
    need_dbias = ctx.needs_input_grad[3]
    *grads, dbias = attention_backward(
        grad_out, q, k, v, bias, out, lse, ctx.scale, ctx.causal, ctx.window, ctx.dropout, seed, ctx.site, q_offset,
        k_offset,
        ctx.sizes, ctx.strides, offset, *box, need_dbias, grad_lse,
    )  # fmt: skip
    return (*grads, dbias if need_dbias else None, *(None,) * 14)


_OPTIONS = (
    "float scale, bool causal=False, int window=0, float dropout=0.0, Tensor? seed=None, int site=0, Tensor? "
    "q_offset=None, Tensor? k_offset=None, int[] sizes=[], int[] strides=[], Tensor? offset=None, Tensor? code=None, "
    "Tensor? least=None, Tensor? most=None"
)
attention_backward = define(
    "attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor out, Tensor lse, "
    f"{_OPTIONS}, bool need_dbias=False, Tensor? grad_lse=None) -> (Tensor, Tensor, Tensor, Tensor)",
    _attention_backward, _backward_fake, facts=Facts(own_memory=True, product=True, draws_by_place=True),
)  # fmt: skip
attention = define(
    f"attention(Tensor q, Tensor k, Tensor v, Tensor? bias, {_OPTIONS}) -> (Tensor, Tensor)",
    _attention, _attention_fake, (_save_attention, _attention_grad), facts=Facts(own_memory=True, product=True, draws_by_place=True),
)  # fmt: skip
CUDA_KERNELS: tuple[Kernel, ...] = (*FUSED, *blockwise_kernels(blockwise, blockwise_backward))
