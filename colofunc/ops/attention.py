"""Attention, kept whole: q (b, h, s, e), k (b, g, t, e), v (b, g, t, f) -> out (b, h, s, f), lse (b, h, s).

Problem: traced through aten, attention becomes one of five device-bound kernels with a dense mask. Idea: one operator
that says what is meant (scale, causal, window, bias, dropout, grouped heads), with enough about positions that a rank
can compute its block and blocks can be merged:

    row i has position q_offset + i, column j has k_offset + j     (or the offsets list every position: striped blocks)
    causal: sees columns with position <= its own       window w > 0: and position > its own - w
    lse = log sum exp of the visible scores; a row that sees nothing gives out = 0 and lse = -inf

Two blocks of keys merge as `out = sum_k exp(lse_k - lse) out_k` with `lse = logaddexp(lse_k)` (`merge`), and the
backward of each block runs with the merged `out` and `lse`.

Dropout keeps weight (b, h, i, j) of the full batch by the counter-based bits of `colofunc.ops.random`: `sizes`,
`strides` and `offset` describe the rank's (b, h, s, t) block of the virtual weights as they do for `random_uniform`.

On CPU the kernel is torch's own flash attention, called per block of rows when a mask must be made, so that an (s, t)
matrix of the whole batch is never alive. Source: Dao et al., FlashAttention (2022), section 3; Milakov and
Gimelshein, Online normalizer calculation for softmax (2018).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from colofunc.errors import InputError, RuleError
from colofunc.ops.define import define
from colofunc.ops.random import dim_indices, keep_mask

aten = torch.ops.aten
FLASH_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Elements of scores alive at once on the plain path (all heads of a block of rows), and of a made mask.
MAX_SCORES = 1 << 22
MAX_MASK = 1 << 20


@attrs.frozen(eq=False)
class Options:
    """Everything but the tensors that are multiplied."""

    scale: float
    causal: bool
    window: int
    dropout: float
    seed: Tensor | None
    site: int
    q_offset: Tensor | None
    k_offset: Tensor | None
    index: Sequence[Tensor] | None  # of dropout: what each of b, h, s, t adds to the global index

    @property
    def positional(self) -> bool:
        return self.causal or self.window > 0

    @property
    def shifted(self) -> bool:
        return _nonzero(self.q_offset) or _nonzero(self.k_offset)


@attrs.frozen(eq=False)
class Block:
    """Rows i0:i1 and the columns j0:j1 that any of them may see; `keep` (rows, columns) or None if all are visible."""

    i0: int
    i1: int
    j0: int
    j1: int
    keep: Tensor | None


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The attention over several blocks of keys from its parts: outs (b, h, s, f), lses (b, h, s)."""
    stacked = torch.stack(tuple(lses))
    lse = torch.logsumexp(stacked, 0)
    # A row that no block sees has lse -inf; any finite number there gives weight 0.
    weights = torch.exp(stacked - lse.nan_to_num(neginf=0.0))
    total = torch.zeros_like(outs[0], dtype=lse.dtype)
    for weight, out in zip(weights, outs, strict=True):
        total = total + weight.unsqueeze(-1) * out
    return total.to(outs[0].dtype), lse


# ---- forward ----


def _attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, causal: bool = False, window: int = 0,
    dropout: float = 0.0, seed: Tensor | None = None, site: int = 0, q_offset: Tensor | None = None,
    k_offset: Tensor | None = None, sizes: Sequence[int] = (), strides: Sequence[int] = (), offset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    opt = _options(q, k, scale, causal, window, dropout, seed, site, q_offset, k_offset, sizes, strides, offset)
    if _flash_can(q, k, v, opt):
        if _one_call(bias, opt):
            out, lse = _flash(q, k, v, _float_bias(bias, q.dtype), opt)
            return _rows_major(out), _rows_major(lse)
        return _by_rows(q, k, v, bias, opt, _flash_block, _mask_rows(q, k))
    return _by_rows(q, k, v, bias, opt, _math_block, _score_rows(q, k))


def _flash_can(q: Tensor, k: Tensor, v: Tensor, opt: Options) -> bool:
    same = q.shape[-1] == v.shape[-1] and q.dtype == k.dtype == v.dtype and q.dtype in FLASH_DTYPES
    return same and q.device.type == "cpu" and opt.dropout == 0.0 and q.numel() > 0 and k.numel() > 0 and q.stride(-1) == 1


def _one_call(bias: Tensor | None, opt: Options) -> bool:
    return not opt.positional or (bias is None and opt.causal and opt.window == 0 and not opt.shifted)


def _flash(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, opt: Options, causal: bool | None = None) -> tuple[Tensor, Tensor]:
    causal = opt.causal if causal is None else causal
    kk, vv = _repeat(k, q.shape[1]), _repeat(v, q.shape[1])
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, kk, vv, 0.0, causal, attn_mask=bias, scale=opt.scale)
    if bias is not None:
        # The kernel gives 0 for a row that sees nothing, which is also a legal value.
        blind = bias.amax(-1) == -torch.inf
        if bool(blind.any()):
            lse = lse.masked_fill(blind, -torch.inf)
    return out, lse


def _by_rows(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, opt: Options, run: Any, rows: int) -> tuple[Tensor, Tensor]:
    out, lse = _empty_results(q, v)
    for block in _blocks(q, k, opt, rows):
        if block.j0 == block.j1:
            out[:, :, block.i0 : block.i1] = 0
            lse[:, :, block.i0 : block.i1] = -torch.inf
            continue
        o, m = run(_rows(q, block), _columns(k, block), _columns(v, block), _cut(bias, block), opt, block)
        out[:, :, block.i0 : block.i1] = o
        lse[:, :, block.i0 : block.i1] = m
    return out, lse


def _flash_block(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, opt: Options, block: Block) -> tuple[Tensor, Tensor]:
    return _flash(q, k, v, _float_bias(_with_keep(bias, block.keep), q.dtype), opt, causal=False)


def _math_block(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, opt: Options, block: Block) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, _with_keep(bias, block.keep), opt)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.nan_to_num(neginf=0.0).unsqueeze(-1))
    if opt.dropout > 0.0:
        weights = weights * _kept(opt, block, weights.dtype)
    return _weighted(weights, v.to(weights.dtype)).to(q.dtype), lse


# ---- backward ----


def _attention_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, scale: float,
    causal: bool = False, window: int = 0, dropout: float = 0.0, seed: Tensor | None = None, site: int = 0,
    q_offset: Tensor | None = None, k_offset: Tensor | None = None, sizes: Sequence[int] = (), strides: Sequence[int] = (),
    offset: Tensor | None = None, need_dbias: bool = False, grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    opt = _options(q, k, scale, causal, window, dropout, seed, site, q_offset, k_offset, sizes, strides, offset)
    dbias = torch.zeros_like(bias) if need_dbias and bias is not None else q.new_empty(0)
    if _flash_can(q, k, v, opt) and not need_dbias and grad_lse is None:
        finite = lse.nan_to_num(neginf=0.0) if bias is not None or opt.positional else lse
        if _one_call(bias, opt):
            return *_flash_grads(grad_out, q, k, v, _float_bias(bias, q.dtype), out, finite, opt, opt.causal), dbias
        return *_grads_by_rows(grad_out, q, k, v, bias, out, finite, opt, None, None, _mask_rows(q, k)), dbias
    finite = lse.nan_to_num(neginf=0.0)
    wide_bias = dbias if need_dbias else None
    return *_grads_by_rows(grad_out, q, k, v, bias, out, finite, opt, wide_bias, grad_lse, _score_rows(q, k), math=True), dbias


def _flash_grads(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, opt: Options, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    kk, vv = _repeat(k, q.shape[1]), _repeat(v, q.shape[1])
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, kk, vv, out, lse, 0.0, causal, attn_mask=bias, scale=opt.scale
    )
    return _rows_major(dq), _rows_major(_fold(dk, k.shape[1])), _rows_major(_fold(dv, v.shape[1]))


def _grads_by_rows(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, opt: Options,
    dbias: Tensor | None, grad_lse: Tensor | None, rows: int, math: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    wide = torch.promote_types(q.dtype, torch.float32)
    dq = _like_rows(q)
    # Key gradients of many blocks of rows are summed, so they are summed wide.
    dk, dv = _like_rows(k, wide).zero_(), _like_rows(v, wide).zero_()
    for block in _blocks(q, k, opt, rows):
        if block.j0 == block.j1:
            dq[:, :, block.i0 : block.i1] = 0
            continue
        parts = (_rows(grad, block), _rows(q, block), _columns(k, block), _columns(v, block))
        cut, o, m = _cut(bias, block), _rows(out, block), lse[:, :, block.i0 : block.i1]
        if math:
            g = None if grad_lse is None else grad_lse[:, :, block.i0 : block.i1]
            bq, bk, bv = _math_grads(*parts, cut, o, m, opt, block, _cut(dbias, block), g)
        else:
            mask = _float_bias(_with_keep(cut, block.keep), q.dtype)
            bq, bk, bv = _flash_grads(*parts, mask, o, m, opt, False)
        dq[:, :, block.i0 : block.i1] = bq
        dk[:, :, block.j0 : block.j1] += bk
        dv[:, :, block.j0 : block.j1] += bv
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _math_grads(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, opt: Options, block: Block,
    dbias: Tensor | None, grad_lse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    scores = _scores(q, k, _with_keep(bias, block.keep), opt)
    weights = torch.exp(scores - lse.unsqueeze(-1))
    grad, out = grad.to(weights.dtype), out.to(weights.dtype)
    dweights = _outer(grad, v.to(weights.dtype))
    dropped = weights
    if opt.dropout > 0.0:
        kept = _kept(opt, block, weights.dtype)
        dropped, dweights = weights * kept, dweights * kept
    # Row sums of weights * dweights are those of grad * out, with or without dropout.
    inner = (grad * out).sum(-1, keepdim=True)
    if grad_lse is not None:
        inner = inner - grad_lse.unsqueeze(-1)
    dscores = weights * (dweights - inner)
    if dbias is not None:
        dbias += dscores.sum_to_size(dbias.shape)
    dq = _weighted(dscores, k.to(weights.dtype)) * opt.scale
    dk = _transposed(dscores, q.to(weights.dtype), k.shape[1]) * opt.scale
    return dq, dk, _transposed(dropped, grad, v.shape[1])


# ---- pieces ----


def _nonzero(offset: Tensor | None) -> bool:
    return offset is not None and (offset.dim() > 0 or int(offset) != 0)


def _positions(offset: Tensor | None, n: int, device: torch.device) -> Tensor:
    if offset is not None and offset.dim() > 0:
        return offset
    start = torch.arange(n, device=device)
    return start if offset is None else start + offset


def _blocks(q: Tensor, k: Tensor, opt: Options, rows: int) -> Iterator[Block]:
    s, t = q.shape[2], k.shape[2]
    if not opt.positional:
        yield from (Block(i, min(i + rows, s), 0, t, None) for i in range(0, s, rows))
        return
    row, column = _positions(opt.q_offset, s, q.device), _positions(opt.k_offset, t, q.device)
    for i in range(0, s, rows):
        some = row[i : i + rows].unsqueeze(1)
        keep = column <= some if opt.causal else None
        if opt.window > 0:
            near = column > some - opt.window
            keep = near if keep is None else keep & near
        assert keep is not None
        seen = keep.any(0).nonzero()
        if seen.numel() == 0:
            yield Block(i, min(i + rows, s), 0, 0, None)
            continue
        j0, j1 = int(seen[0]), int(seen[-1]) + 1
        keep = keep[:, j0:j1]
        yield Block(i, min(i + rows, s), j0, j1, None if bool(keep.all()) else keep)


def _mask_rows(q: Tensor, k: Tensor) -> int:
    return max(32, min(512, MAX_MASK // max(1, k.shape[2])))


def _score_rows(q: Tensor, k: Tensor) -> int:
    return max(1, MAX_SCORES // max(1, q.shape[0] * q.shape[1] * k.shape[2]))


def _rows(x: Tensor, block: Block) -> Tensor:
    return x[:, :, block.i0 : block.i1]


def _columns(x: Tensor, block: Block) -> Tensor:
    return x[:, :, block.j0 : block.j1]


def _cut(bias: Tensor | None, block: Block) -> Tensor | None:
    """The part of a bias that belongs to a block; dims of size 1 are broadcast and stay. A view, so it can be written."""
    if bias is None:
        return None
    if bias.dim() < 4:
        bias = bias[(None,) * (4 - bias.dim())]
    if bias.shape[2] > 1:
        bias = bias[:, :, block.i0 : block.i1]
    if bias.shape[3] > 1:
        bias = bias[..., block.j0 : block.j1]
    return bias


def _with_keep(bias: Tensor | None, keep: Tensor | None) -> Tensor | None:
    if keep is None:
        return bias
    if bias is None:
        return keep[None, None]
    return bias & keep if bias.dtype == torch.bool else bias.masked_fill(~keep, -torch.inf)


def _float_bias(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The bias as the flash kernel takes it: four dims, of the dtype of q, last dim dense."""
    if bias is None:
        return None
    if bias.dim() < 4:
        bias = bias[(None,) * (4 - bias.dim())]
    if bias.dtype == torch.bool:
        return torch.zeros(bias.shape, dtype=dtype, device=bias.device).masked_fill_(~bias, -torch.inf)
    return bias.to(dtype)


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, opt: Options) -> Tensor:
    """(b, h, s, t) in at least float32, -inf where not visible."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = _outer(q.to(wide), k.to(wide)) * opt.scale
    if bias is None:
        return scores
    return scores.masked_fill(~bias, -torch.inf) if bias.dtype == torch.bool else scores + bias.to(wide)


def _group(x: Tensor, g: int) -> Tensor:
    """(b, h, s, e) -> (b, g, h/g * s, e): the heads of a group become rows, so no key is repeated."""
    b, h, s, e = x.shape
    return x.reshape(b, g, h // g * s, e)


def _outer(q: Tensor, k: Tensor) -> Tensor:
    """q (b, h, s, e), k (b, g, t, e) -> (b, h, s, t)."""
    b, h, s, _ = q.shape
    return torch.matmul(_group(q, k.shape[1]), k.mT).reshape(b, h, s, k.shape[2])


def _weighted(weights: Tensor, v: Tensor) -> Tensor:
    """weights (b, h, s, t), v (b, g, t, f) -> (b, h, s, f)."""
    b, h, s, _ = weights.shape
    return torch.matmul(_group(weights, v.shape[1]), v).reshape(b, h, s, v.shape[3])


def _transposed(weights: Tensor, x: Tensor, g: int) -> Tensor:
    """weights (b, h, s, t), x (b, h, s, e) -> (b, g, t, e), summed over rows and the heads of a group."""
    return torch.matmul(_group(weights, g).mT, _group(x, g))


def _repeat(k: Tensor, h: int) -> Tensor:
    """(b, g, t, e) -> (b, h, t, e): no copy where one group serves all heads."""
    b, g, t, e = k.shape
    if g == h:
        return k
    return k.expand(b, h, t, e) if g == 1 else k.unsqueeze(2).expand(b, g, h // g, t, e).reshape(b, h, t, e)


def _fold(dk: Tensor, g: int) -> Tensor:
    b, h, t, e = dk.shape
    return dk if g == h else dk.reshape(b, g, h // g, t, e).sum(2)


def _kept(opt: Options, block: Block, dtype: torch.dtype) -> Tensor:
    """Dropout's factor of each weight of the block: 1 / (1 - p) where kept, else 0."""
    assert opt.seed is not None and opt.index is not None
    b, h, s, t = opt.index
    keep = keep_mask(opt.seed, opt.site, opt.dropout, (b, h, s[block.i0 : block.i1], t[block.j0 : block.j1]))
    return keep.to(dtype).mul_(0.0 if opt.dropout >= 1.0 else 1.0 / (1.0 - opt.dropout))


def _options(
    q: Tensor, k: Tensor, scale: float, causal: bool, window: int, dropout: float, seed: Tensor | None, site: int,
    q_offset: Tensor | None, k_offset: Tensor | None, sizes: Sequence[int], strides: Sequence[int], offset: Tensor | None,
) -> Options:  # fmt: skip
    index = None
    if dropout > 0.0:
        if seed is None:
            raise InputError("attention with dropout needs a seed. Try: seed=torch.tensor(0)")
        index = dim_indices((*q.shape[:3], k.shape[2]), sizes, strides, q.device)
        if offset is not None:
            index[0] = index[0] + offset
    return Options(scale, causal, window, dropout, seed, site, q_offset, k_offset, index)


# Note [Memory order]: results are (b, h, s, ...) with memory order (b, s, h, ...) whatever the inputs have. Merging heads
# is then a view, and a view that was traced stays one on a rank whose inputs lie otherwise.


def _like_rows(q: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    b, h, s, e = q.shape
    return q.new_empty((b, s, h, e), dtype=dtype).transpose(1, 2)


def _rows_major(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _empty_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    b, h, s, _ = q.shape
    out = q.new_empty((b, s, h, v.shape[3])).transpose(1, 2)
    lse = q.new_empty((b, s, h), dtype=torch.promote_types(q.dtype, torch.float32)).transpose(1, 2)
    return out, lse


# ---- the operators ----


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    fits = q.dim() == k.dim() == v.dim() == 4 and q.shape[0] == k.shape[0] == v.shape[0] and k.shape[1:3] == v.shape[1:3]
    if not fits or q.shape[3] != k.shape[3] or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise RuleError(
            f"attention: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} are not (b, h, s, e), (b, g, t, e), (b, g, t, f) "
            "with h a multiple of g. Try: transpose to heads before rows"
        )


def _attention_fake(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
    _check_shapes(q, k, v)
    return _empty_results(q, v)


def _backward_fake(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, scale: float, *rest: Any, **options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # 17 arguments before need_dbias, of which 8 are named above.
    need_dbias = options.get("need_dbias", rest[10] if len(rest) > 10 else False)
    dbias = torch.empty_like(bias) if need_dbias and bias is not None else q.new_empty(0)
    return _like_rows(q), _like_rows(k), _like_rows(v), dbias


def _save_attention(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, v, bias, ctx.scale, ctx.causal, ctx.window, ctx.dropout, seed, ctx.site, q_offset, k_offset, sizes, strides, offset = inputs
    ctx.sizes, ctx.strides = sizes, strides
    ctx.save_for_backward(q, k, v, bias, *output, seed, q_offset, k_offset, offset)
    ctx.set_materialize_grads(False)


def _attention_grad(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, bias, out, lse, seed, q_offset, k_offset, offset = ctx.saved_tensors
    if grad_out is None:
        if grad_lse is None:
            return (None,) * 15
        grad_out = torch.zeros_like(out)
    need_dbias = ctx.needs_input_grad[3]
    *grads, dbias = attention_backward(
        grad_out, q, k, v, bias, out, lse, ctx.scale, ctx.causal, ctx.window, ctx.dropout, seed, ctx.site, q_offset, k_offset,
        ctx.sizes, ctx.strides, offset, need_dbias, grad_lse,
    )  # fmt: skip
    return (*grads, dbias if need_dbias else None, *(None,) * 11)


_OPTIONS = (
    "float scale, bool causal=False, int window=0, float dropout=0.0, Tensor? seed=None, int site=0, Tensor? q_offset=None, "
    "Tensor? k_offset=None, int[] sizes=[], int[] strides=[], Tensor? offset=None"
)
attention_backward = define(
    f"attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor out, Tensor lse, {_OPTIONS}, "
    "bool need_dbias=False, Tensor? grad_lse=None) -> (Tensor, Tensor, Tensor, Tensor)",
    _attention_backward, _backward_fake,
)  # fmt: skip
attention = define(
    f"attention(Tensor q, Tensor k, Tensor v, Tensor? bias, {_OPTIONS}) -> (Tensor, Tensor)",
    _attention, _attention_fake, (_save_attention, _attention_grad),
)  # fmt: skip
