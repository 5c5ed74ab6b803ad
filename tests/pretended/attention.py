"""Torch's CUDA attention operators, as plain functions on CPU tensors.

Problem: these operators have no CPU kernel, so what calls them cannot be tried without a GPU. Idea: compute what they compute, in
float64, and be as strict as they are: layouts, dtypes, alignment, the shape and padding of the log-sum-exp, which corner a causal
mask begins in, and what a row that sees nothing gives.

    ATTENTION[torch.ops.aten._flash_attention_forward.default](q, k, v, None, None, s, t, 0.0, True, False)

Conventions (torch's `flash_api.cpp`, `attention.cu`, `attention_backward.cu`): flash counts causal masks and windows from the last
row's last column, takes fewer key heads, gives lse (b, h, s), +inf for a row that sees nothing; the efficient kernel counts from the
first, wants a key head for each query head, and rows of a bias that begin at multiples of 8 elements, and pads lse to a multiple of
32 with +inf; cuDNN gives lse (b, h, s, 1), or (b, h, s) where torch's shape function says so. No dropout: its bits are those of the
device's generator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
# Tests of the callers may add float64, which no such kernel takes.
HALVES = [torch.bfloat16, torch.float16]
EFFICIENT = [torch.bfloat16, torch.float16, torch.float32]


def refuse(wrong: bool, why: str) -> None:
    """As TORCH_CHECK."""
    if wrong:
        raise RuntimeError(why)


# ---- what all have in common; q (b, h, s, e), k (b, g, t, e), v (b, g, t, f) ----


def _repeated(x: Tensor, h: int) -> Tensor:
    return x.double().repeat_interleave(h // x.shape[1], 1)


def _weights(q: Tensor, k: Tensor, bias: Tensor | None, keep: Tensor, scale: float) -> Tensor:
    """Scores, (b, h, s, t), -inf where nothing is seen."""
    scores = q.double() @ _repeated(k, q.shape[1]).mT * scale
    if bias is not None:
        scores = scores + bias.double()
    return scores.masked_fill(~keep, -torch.inf)


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, keep: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """(out, lse), both float64; lse is -inf and out 0 where a row sees nothing."""
    scores = _weights(q, k, bias, keep, q.shape[-1] ** -0.5 if scale is None else scale)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.nan_to_num(neginf=0.0).unsqueeze(-1)).exp()
    return weights @ _repeated(v, q.shape[1]), lse


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, keep: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dscores), from `out` and `lse` as they are given."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    h, g = q.shape[1], k.shape[1]
    weights = (_weights(q, k, bias, keep, scale) - lse.double().unsqueeze(-1)).exp()
    inner = (grad.double() * out.double()).sum(-1, keepdim=True)
    dscores = weights * (grad.double() @ _repeated(v, h).mT - inner)
    dq = dscores @ _repeated(k, h) * scale
    dk, dv = dscores.mT @ q.double() * scale, weights.mT @ grad.double()
    return dq, *(x.unflatten(1, (g, h // g)).sum(2) for x in (dk, dv)), dscores


def _band(s: int, t: int, left: int, right: int, corner: int) -> Tensor:
    """Row i sees columns from i + corner - left to i + corner + right; a negative number is no bound."""
    ahead = torch.arange(t)[None, :] - torch.arange(s)[:, None] - corner
    keep = torch.ones(s, t, dtype=torch.bool)
    if left >= 0:
        keep &= ahead >= -left
    if right >= 0:
        keep &= ahead <= right
    return keep


def _filled(like: Tensor, value: Tensor) -> Tensor:
    return torch.empty_like(like).copy_(value)


def _wide(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _check(operands: Sequence[Tensor], dtypes: Sequence[torch.dtype], what: str) -> None:
    q = operands[0]
    refuse(any(x.dim() != 4 for x in operands), f"{what}: operands of 4 dims")
    refuse(q.dtype not in dtypes, f"{what}: no kernel for {q.dtype}")
    refuse(any(x.dtype != q.dtype for x in operands), f"{what}: operands of one dtype")
    refuse(any(x.stride(-1) != 1 for x in operands[:3]), f"{what}: the last dim must be contiguous")
    refuse(any(not x.numel() for x in operands), f"{what}: nothing to compute")


# ---- flash; (b, s, h, e) ----


def _flash_checks(q: Tensor, k: Tensor, v: Tensor, cum: Sequence[Any], dropout: float, what: str) -> None:
    _check((q, k, v), HALVES, what)
    refuse(any(c is not None for c in cum), f"{what}: packed sequences are not emulated")
    refuse(dropout != 0.0, f"{what}: dropout is not emulated")
    refuse(q.shape[-1] % 8 != 0 or q.shape[-1] > 256, f"{what}: head_size must be a multiple of 8, at most 256")
    refuse(not q.shape[-1] == k.shape[-1] == v.shape[-1], f"{what}: heads of one size")
    refuse(k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[2] % k.shape[2] != 0, f"{what}: shapes do not fit")
    for x in (q, k, v):
        odd = any(n > 1 and stride % 8 for n, stride in zip(x.shape, x.stride()[:-1], strict=False))
        refuse(odd or x.storage_offset() % 8 != 0, f"{what}: heads begin at multiples of 16 bytes")


def _flash_keep(s: int, t: int, causal: bool, left: int | None, right: int | None) -> Tensor:
    left, right = -1 if left is None else left, -1 if right is None else right
    left, right = -1 if left >= t else left, -1 if right >= t else right
    if causal and s > 1:
        right = 0
    return _band(s, t, left, right, t - s)


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float,
    is_causal: bool, return_debug_mask: bool, *, scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None, **more: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    _flash_checks(q, k, v, (cum_seq_q, cum_seq_k, *more.values()), dropout_p, "flash forward")
    refuse((max_q, max_k) != (q.shape[1], k.shape[1]), "flash forward: lengths are those of the operands")
    keep = _flash_keep(max_q, max_k, is_causal, window_size_left, window_size_right)
    out, lse = _attend(*(x.transpose(1, 2) for x in (q, k, v)), None, keep, scale)
    lse = lse.masked_fill(lse == -torch.inf, torch.inf).to(_wide(q)).contiguous()
    state = (torch.empty(2, dtype=torch.uint64), torch.empty((), dtype=torch.uint64))
    return _filled(q, out.transpose(1, 2)), lse, *state, q.new_empty(0)


def flash_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None,
    max_q: int, max_k: int, dropout_p: float, is_causal: bool, rng_state: Tensor, unused: Tensor, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    _flash_checks(q, k, v, (cum_seq_q, cum_seq_k), dropout_p, "flash backward")
    refuse(out.shape != q.shape or grad_out.shape != q.shape or out.dtype != q.dtype, "flash backward: out and its gradient are as q")
    refuse(grad_out.dtype != q.dtype, "flash backward: operands of one dtype")
    refuse(lse.shape != (q.shape[0], q.shape[2], max_q) or lse.dtype != _wide(q), "flash backward: lse (b, h, s), float32")
    refuse(not lse.is_contiguous(), "flash backward: lse is read as contiguous")
    keep = _flash_keep(max_q, max_k, is_causal, window_size_left, window_size_right)
    heads = (x.transpose(1, 2) for x in (grad_out, q, k, v))
    dq, dk, dv, _ = _gradients(*heads, None, out.transpose(1, 2), lse, keep, scale)
    return _filled(q, dq.transpose(1, 2)), _filled(k, dk.transpose(1, 2)), _filled(v, dv.transpose(1, 2))


def scaled_flash(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False, return_debug_mask: bool = False, *,
    scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    rows = tuple(x.transpose(1, 2) for x in (q, k, v))
    sizes = (q.shape[2], k.shape[2])
    out, lse, seed, offset, mask = flash_forward(*rows, None, None, *sizes, dropout_p, is_causal, return_debug_mask, scale=scale)
    return out.transpose(1, 2), lse, None, None, *sizes, seed, offset, mask


def scaled_flash_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, scale: float | None = None
) -> tuple[Tensor, ...]:
    rows = (x.transpose(1, 2) for x in (grad_out, q, k, v, out))
    return tuple(x.transpose(1, 2) for x in flash_backward(*rows, lse, *rest, scale=scale))


# ---- efficient; (b, h, s, e) ----


def _efficient_checks(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout: float, what: str) -> None:
    _check((q, k, v), EFFICIENT, what)
    refuse(dropout != 0.0, f"{what}: dropout is not emulated")
    refuse(not q.shape[1] == k.shape[1] == v.shape[1], f"{what}: as many key heads as query heads")
    refuse(q.shape[3] != k.shape[3] or k.shape[2] != v.shape[2] or q.shape[0] != k.shape[0], f"{what}: shapes do not fit")
    least = 8 if q.dtype in HALVES else 4
    for x in (q, k, v):
        odd = any(n > 1 and stride % least for n, stride in zip(x.shape, x.stride()[:-1], strict=False))
        refuse(odd or x.shape[-1] % least != 0, f"{what}: heads of whole 16 bytes")
    if bias is None:
        return
    refuse(bias.dtype != q.dtype, f"{what}: invalid dtype for bias")
    refuse(bias.shape != (*q.shape[:3], k.shape[2]), f"{what}: a bias of all samples, heads, rows and columns")
    strides = (stride for n, stride in zip(bias.shape, bias.stride()[:-1], strict=False) if n > 1)
    refuse(bias.stride(-1) != 1 or any(stride % 8 for stride in strides), f"{what}: attn_bias is not correctly aligned")


def _rows_major(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.transpose(1, 2).to(dtype, copy=True, memory_format=torch.contiguous_format).transpose(1, 2)


def efficient_forward(
    q: Tensor, k: Tensor, v: Tensor, attn_bias: Tensor | None, compute_log_sumexp: bool, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    _efficient_checks(q, k, v, attn_bias, dropout_p, "efficient forward")
    s, t = q.shape[2], k.shape[2]
    out, lse = _attend(q, k, v, attn_bias, _band(s, t, -1, 0 if is_causal else -1, 0), scale)
    # A sum of exponentials of 0 is counted as 1 before its logarithm is taken.
    stats = torch.full((*q.shape[:2], -(-s // 32) * 32), torch.inf, dtype=_wide(q))
    stats[..., :s] = lse.nan_to_num(neginf=0.0)
    state = (torch.empty((), dtype=torch.int64), torch.empty((), dtype=torch.int64))
    return _rows_major(out, q.dtype), stats if compute_log_sumexp else stats[..., :0].clone(), *state


def efficient_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, attn_bias: Tensor | None, out: Tensor, lse: Tensor, philox_seed: Tensor,
    philox_offset: Tensor, dropout_p: float, grad_input_mask: Sequence[bool], is_causal: bool = False, *, scale: float | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    _efficient_checks(q, k, v, attn_bias, dropout_p, "efficient backward")
    s, t = q.shape[2], k.shape[2]
    refuse(lse.shape != (*q.shape[:2], -(-s // 32) * 32) or lse.stride(-1) != 1, "efficient backward: lse is read 32 rows at a time")
    refuse(lse.dtype != _wide(q), "efficient backward: lse is float32")
    refuse(out.shape != (*q.shape[:3], v.shape[3]) or grad_out.shape != out.shape, "efficient backward: out and its gradient fit")
    refuse(out.dtype != q.dtype or grad_out.dtype != q.dtype, "efficient backward: operands of one dtype")
    keep = _band(s, t, -1, 0 if is_causal else -1, 0)
    dq, dk, dv, db = _gradients(grad_out, q, k, v, attn_bias, out, lse[..., :s], keep, scale)
    dbias = None
    if attn_bias is not None and grad_input_mask[3]:
        room = torch.empty(*q.shape[:3], -(-t // 16) * 16, dtype=q.dtype)
        dbias = room[..., :t].copy_(db)
    return *(_rows_major(x, q.dtype) for x in (dq, dk, dv)), dbias


# ---- cuDNN; (b, h, s, e) ----


def stats_of(lse: Tensor) -> Tensor:
    """(b, h, s) as this torch has it for cuDNN."""
    q = torch.empty(1, 1, 8, 8, dtype=torch.bfloat16, device="meta")
    return lse if aten._scaled_dot_product_cudnn_attention.default(q, q, q, None, True)[1].dim() == 3 else lse.unsqueeze(-1)


def _like_dims(q: Tensor, shape: Sequence[int]) -> Tensor:
    """An empty tensor whose dims lie in the order in which those of q lie."""
    order = sorted(range(q.dim()), key=lambda d: -q.stride(d))
    return q.new_empty([shape[d] for d in order]).permute([order.index(d) for d in range(q.dim())])


def cudnn_forward(
    q: Tensor, k: Tensor, v: Tensor, attn_bias: Tensor | None, compute_log_sumexp: bool, dropout_p: float = 0.0,
    is_causal: bool = False, return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    _check((q, k, v), HALVES, "cuDNN forward")
    refuse(dropout_p != 0.0, "cuDNN forward: dropout is not emulated")
    refuse(any(x.shape[3] % 8 or x.shape[3] > 128 for x in (q, k, v)), "cuDNN forward: heads of a multiple of 8, at most 128")
    s, t = q.shape[2], k.shape[2]
    refuse(is_causal and s > t, "cuDNN forward: causal with more rows than columns")
    out, lse = _attend(q, k, v, attn_bias, _band(s, t, -1, 0 if is_causal else -1, 0), scale)
    state = (torch.empty((), dtype=torch.int64), torch.empty((), dtype=torch.int64))
    result = _like_dims(q, (*q.shape[:3], v.shape[3])).copy_(out)
    return result, stats_of(lse).to(_wide(q)), None, None, s, t, *state, None


def cudnn_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, philox_seed: Tensor, philox_offset: Tensor,
    attn_bias: Tensor | None, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float,
    is_causal: bool, *, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    _check((q, k, v), HALVES, "cuDNN backward")
    refuse(lse.shape != stats_of(q[..., 0]).shape, "cuDNN backward: lse as forward gives it")
    keep = _band(q.shape[2], k.shape[2], -1, 0 if is_causal else -1, 0)
    dq, dk, dv, _ = _gradients(grad_out, q, k, v, attn_bias, out, lse.reshape(q.shape[:3]), keep, scale)
    return _filled(q, dq), _filled(k, dk), _filled(v, dv)


ATTENTION: dict[Any, Callable[..., Any]] = {
    aten._flash_attention_forward.default: flash_forward,
    aten._flash_attention_backward.default: flash_backward,
    aten._scaled_dot_product_flash_attention.default: scaled_flash,
    aten._scaled_dot_product_flash_attention_backward.default: scaled_flash_backward,
    aten._scaled_dot_product_efficient_attention.default: efficient_forward,
    aten._scaled_dot_product_efficient_attention_backward.default: efficient_backward,
    aten._scaled_dot_product_cudnn_attention.default: cudnn_forward,
    aten._scaled_dot_product_cudnn_attention_backward.default: cudnn_backward,
}
