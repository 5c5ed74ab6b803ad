"""Which of torch's CUDA kernels takes a call of attention, how long it runs and what memory of its own it holds.

The records of the kernels in `attention_cuda` and `attention_flex`; guards look at shapes, dtypes, options and at
positions that the host knows.

Sources: conditions of torch's `sdp_utils` and of the flash API that torch builds; Dao, FlashAttention-2 (2307.08691),
figures 4 to 6, for the shares of peak rates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from colofunc.ops import attention_cuda as cuda
from colofunc.ops.attention_bands import BandBlock, Comb, combs, visible_pairs
from colofunc.ops.attention_cuda import bias_heads, bias_rows, head_width, multiple
from colofunc.ops.attention_flex import BLOCK, flex, flex_backward
from colofunc.ops.attention_parts import OTHER_MAX_SCORES
from colofunc.ops.kernels import Kernel, KernelCall, Like, Rates, anything, has_triton

FORWARD, BACKWARD = "colofunc.attention", "colofunc.attention_backward"
HALVES = (torch.bfloat16, torch.float16)
# Blocks of a launch's second and third dim.
MAX_GRID = 65535
# Flash kernels have heads of up to so many elements; backward above the second only where shared memory is large.
MAX_HEAD, MAX_HEAD_SMALL = 256, 192
LARGE_SHARED = ((8, 0), (9, 0), (10, 0))
# FlexAttention has heads of at least so many elements, and is compiled, which takes seconds, where there is so much to
# do: below, what it saves in a step of many layers is earned back in thousands of steps.
LEAST_FLEX_HEAD, LEAST_FLEX_FLOPS = 16, 2e10


# ---- guards ----


def _fused(call: KernelCall, dtypes: Sequence[torch.dtype]) -> bool:
    """What all of torch's fused kernels ask."""
    return _computed(call, dtypes) and not _has_grad_lse(call)


def _has_grad_lse(call: KernelCall) -> bool:
    return call.target == BACKWARD and call["grad_lse"] is not None


def _computed(call: KernelCall, dtypes: Sequence[torch.dtype]) -> bool:
    """What all of torch's kernels ask."""
    q, k, v = call["q"], call["k"], call["v"]
    if torch.version.hip is not None or call.capability < (7, 0) or call["dropout"] != 0.0:
        return False
    if q.dtype not in dtypes or not q.dtype == k.dtype == v.dtype or not min(*q.shape, *k.shape, *v.shape):
        return False
    if q.dtype == torch.bfloat16 and call.capability < (8, 0):
        return False
    return max(q.shape[:2]) <= MAX_GRID


def _positions(x: Like | None) -> tuple[int, int] | None:
    """Where rows or columns stand; None: the host does not know."""
    if x is None:
        return 0, 1
    return x.run if x.shape or x.run is None else (x.run[0], 1)


def _calls(call: KernelCall) -> tuple[Comb, ...] | None:
    """What a kernel without a bias would be called with; None where that does not say it all."""
    return None if call["code"] is not None or call["bias"] is not None else _bands(call)


def _bands(call: KernelCall) -> tuple[Comb, ...] | None:
    """What positions alone show; None where the host does not know, or they make no bands."""
    places = _positions(call["q_offset"]), _positions(call["k_offset"])
    return combs(call["causal"], call["window"], *places, call["q"].shape[2], call["k"].shape[2])


def _one_cut(call: KernelCall) -> BandBlock | None:
    """Of a single call."""
    found = _calls(call)
    return found[0].cut if found is not None and len(found) == 1 else None


def _needs_dbias(call: KernelCall) -> bool:
    return call.target == BACKWARD and bool(call["need_dbias"]) and call["bias"] is not None


def _flash_takes(call: KernelCall) -> bool:
    """Ampere or newer, bands, heads that fit; flash takes a window that is wider than the columns for none at all."""
    there = torch.backends.cuda.is_flash_attention_available() and torch.backends.cuda.flash_sdp_enabled()
    if not there or not _fused(call, HALVES) or call.capability < (8, 0):
        return False
    wide, found = head_width(call["q"], call["v"]), _calls(call)
    large = call.target == FORWARD or wide <= MAX_HEAD_SMALL or call.capability in LARGE_SHARED
    if wide > MAX_HEAD or not large or found is None:
        return False
    return all(comb.cut.right < comb.cut.j1 - comb.cut.j0 for comb in found)


def _cudnn_takes(call: KernelCall) -> bool:
    """As flash, but rows and columns are counted from the beginning."""
    if not torch.backends.cuda.cudnn_sdp_enabled() or not _fused(call, HALVES) or call.capability < (8, 0):
        return False
    (_, _, s, e), t, f = call["q"].shape, call["k"].shape[2], call["v"].shape[3]
    part = _one_cut(call)
    if part is None or (part.i0, part.i1, part.j0, part.j1) != (0, s, 0, t) or e % 8 or f % 8 or max(e, f) > 128:
        return False
    return s > 1 and (part.whole or (part.causal and s == t))


def _efficient_takes(call: KernelCall) -> bool:
    if not torch.backends.cuda.mem_efficient_sdp_enabled() or not _fused(call, (*HALVES, torch.float32)):
        return False
    found = _calls(call)
    return found is not None and all(comb.cut.whole or comb.cut.top_left for comb in found)


def _biased_takes(call: KernelCall) -> bool:
    """Everything without dropout; a bias that is wider than q would be narrowed."""
    bias = call["bias"]
    if not torch.backends.cuda.mem_efficient_sdp_enabled() or not _fused(call, (*HALVES, torch.float32)):
        return False
    return bias is None or bias.dtype in (torch.bool, call["q"].dtype)


def _flex_takes(call: KernelCall) -> bool:
    """What fused kernels take with a bias of all pairs, or not at all: documents, padding, positions that lie on the
    device or make no bands, biases without gradient, gradients of the log-sum-exp. Where flash is switched off, this is
    too: it is the same algorithm.
    """
    if (
        not (has_triton() and torch.backends.cuda.flash_sdp_enabled())
        or not _computed(call, HALVES)
        or call.capability < (8, 0)
    ):
        return False
    (_, _, s, e), t, f, bias = call["q"].shape, call["k"].shape[2], call["v"].shape[3], call["bias"]
    large = call.target == FORWARD or max(e, f) <= MAX_HEAD_SMALL or call.capability in LARGE_SHARED
    if min(s, t) < BLOCK or min(e, f) < LEAST_FLEX_HEAD or max(e, f) > MAX_HEAD or e % 8 or f % 8 or not large:
        return False
    if bias is not None and (
        _needs_dbias(call) or bias.numel < 2 or not (bias.dtype.is_floating_point or bias.dtype == torch.bool)
    ):
        return False
    lacking = _calls(call) is None or _has_grad_lse(call)
    return lacking and _flops(call, _band_pairs(call)) >= LEAST_FLEX_FLOPS


def _band_pairs(call: KernelCall) -> int:
    """Pairs of a row and a column that positions leave; all where the host does not know.

    Of documents nobody knows beforehand.
    """
    found = _bands(call)
    return call["q"].shape[2] * call["k"].shape[2] if found is None else sum(visible_pairs(comb.cut) for comb in found)


# ---- seconds and bytes ----

# Shares of a device's peak rate that kernels reach on long rows, where its file has no rates of theirs: there cuDNN's
# and FlexAttention's stand behind flash. On Hopper they do not (`python -m bench gpu --slice 5`).
SHARES = {"flash": 0.6, "cudnn": 0.55, "flex": 0.5, "efficient": 0.35, "blockwise": 0.3}
# Kernels that make the lists of blocks, as inductor writes them: forward, and backward, which wants them by columns
# too.
FLEX_LAUNCHES = {FORWARD: 12, BACKWARD: 20}


def _flops(call: KernelCall, pairs: int) -> int:
    passes = 2 if call.target == FORWARD else 5  # products that backward makes, scores among them
    return passes * call["q"].shape[0] * call["q"].shape[1] * pairs * (call["q"].shape[3] + call["v"].shape[3])


def _seconds(call: KernelCall, rates: Rates, share: str, pairs: int | None = None) -> float:
    q, k, v = call["q"], call["k"], call["v"]
    (b, h, s, _), f = q.shape, v.shape[3]
    found = _calls(call) or ()
    pairs = sum(visible_pairs(comb.cut) for comb in found) if pairs is None else pairs
    flops = _flops(call, pairs)
    moved = (q.nbytes + k.nbytes + v.nbytes) * (
        1 if call.target == FORWARD else 2
    ) + 2 * b * h * s * f * q.dtype.itemsize
    launches_s = max(1, len(found)) * rates.launch_s
    return max(flops / _rate(call, rates, share, pairs / max(1, s)), moved / rates.bytes_per_s) + launches_s


def _rate(call: KernelCall, rates: Rates, share: str, keys: float) -> float:
    """Operations a second: by the table of a kernel, or of flash, to which the others then stand as their shares do."""
    dtype, head, backward = call["q"].dtype, max(call["q"].shape[3], call["v"].shape[3]), call.target == BACKWARD
    if dtype in HALVES and share != "blockwise":
        for known, part in ((share, 1.0), ("flash", SHARES[share] / SHARES["flash"])):
            attained = rates.attention_flops_per_s(known, head, keys, backward)
            if attained is not None:
                return part * attained
    return SHARES[share] * rates.flops_per_s(dtype)


def _biased_seconds(call: KernelCall, rates: Rates) -> float:
    """All pairs, and a bias that is written, looked at and read."""
    s, t = call["q"].shape[2], call["k"].shape[2]
    made = bias_heads(call["bias"], call["code"]) * s * t * call["q"].dtype.itemsize
    return _seconds(call, rates, "efficient", s * t) + 3 * made / rates.bytes_per_s + 4 * rates.launch_s


def _flex_seconds(call: KernelCall, rates: Rates) -> float:
    """Where positions show something, a bias or a mask that is read, and lists of blocks."""
    bias = call["bias"]
    read_s = 0.0 if bias is None else bias.nbytes / rates.bytes_per_s
    return _seconds(call, rates, "flex", _band_pairs(call)) + read_s + FLEX_LAUNCHES[call.target] * rates.launch_s


def _pads(call: KernelCall, wide: int) -> int:
    """Copies of operands whose heads are filled up."""
    names = ("q", "k", "v") if call.target == FORWARD else ("q", "k", "v", "grad_out", "out")
    some = [call[name] for name in names]
    return sum(x.numel // x.shape[3] * wide * x.dtype.itemsize for x in some if x.shape[3] != wide)


def _parts_bytes(call: KernelCall) -> int:
    """Of several calls: forward their results and the sum, backward the sum of dQ."""
    count, q, f = len(_calls(call) or ()), call["q"], call["v"].shape[3]
    out = q.numel // q.shape[3] * f
    if count < 2:
        return 0
    return count * out * q.dtype.itemsize + 8 * out if call.target == FORWARD else 4 * q.numel


def _flash_bytes(call: KernelCall) -> int:
    """Of mha_bwd: a float32 copy of dQ and a number a row, rows filled up to 128; dK and dV for each query head."""
    q, k, v = call["q"], call["k"], call["v"]
    wide, (b, h, s, _), (_, g, t, _) = head_width(q, v), q.shape, k.shape
    held = _pads(call, wide) + _parts_bytes(call)
    if call.target == FORWARD:
        return held
    filled, heads = multiple(s, 128), multiple(wide, 32 if wide <= 128 else 64)
    held += 4 * b * h * filled * (heads + 1)
    return held + (2 * b * h * t * wide * q.dtype.itemsize if g != h else 0)


def _cudnn_bytes(call: KernelCall) -> int:
    """Backward keeps dQ in float32, and dK and dV for each query head."""
    q, k = call["q"], call["k"]
    if call.target == FORWARD:
        return 0
    return 4 * q.numel + 4 * (q.shape[0] * q.shape[1] * q.shape[2]) + (2 * q.nbytes if q.shape[1] != k.shape[1] else 0)


def _efficient_bytes(call: KernelCall) -> int:
    """Keys for each query head, heads filled up, and backward's sums in float32."""
    q, k, v = call["q"], call["k"], call["v"]
    (b, h, s, e), (_, g, t, _), f = q.shape, k.shape, v.shape[3]
    repeated = b * h * t * (e + f) * q.dtype.itemsize if g != h else 0
    held = repeated + (0 if e % 8 == f % 8 == 0 else _pads(call, head_width(q, v)))
    if call.target == FORWARD:
        return held
    return held + repeated + 4 * b * h * (s * e + t * (e + f) + s)


def _biased_bytes(call: KernelCall) -> int:
    """The bias of a block: where it is shown, its numbers, and its gradient."""
    q, t = call["q"], call["k"].shape[2]
    b, h, s, _ = q.shape
    heads = b * h if _needs_dbias(call) else bias_heads(call["bias"], call["code"])
    rows = bias_rows(s, t, heads)
    made = bias_heads(call["bias"], call["code"]) * rows * t * (q.dtype.itemsize + 2)
    return _efficient_bytes(call) + made + (b * h * rows * t * q.dtype.itemsize if _needs_dbias(call) else 0)


def _flex_bytes(call: KernelCall) -> int:
    """Numbers of rows, lists of blocks with what sorts them, numbers of each block, positions; results whose operands
    lie otherwise.
    """
    q, k, bias, code = call["q"], call["k"], call["bias"], call["code"]
    (b, h, s, _), t, f = q.shape, k.shape[2], call["v"].shape[3]
    rows, columns = -(-s // BLOCK), -(-t // BLOCK)
    masks = bias_heads(bias if bias is not None and bias.dtype == torch.bool else None, code)
    bounds = 1 + (0 if code is None else code.shape[0] * code.shape[1])
    per_row, per_pair = (2, 16) if call.target == FORWARD else (3, 48)
    held = (
        4 * per_row * b * h * s
        + per_pair * masks * (rows + 1) * (columns + 1)
        + 16 * bounds * (2 * rows + columns)
        + 24 * (s + t)
    )
    results = b * h * s * f * q.dtype.itemsize if call.target == FORWARD else q.nbytes + k.nbytes + call["v"].nbytes
    return held + results


def _kernel(target: str, guard: Any, cost_s: Any, workspace: Any, fn: Callable[..., Any]) -> Kernel:
    return Kernel(target, "cuda", guard, cost_s, workspace, fn, ("q_offset", "k_offset"))


_TAKES: tuple[tuple[Any, Any, Any, Any, Any], ...] = (
    (_flash_takes, partial(_seconds, share="flash"), _flash_bytes, cuda.flash, cuda.flash_backward),
    (_cudnn_takes, partial(_seconds, share="cudnn"), _cudnn_bytes, cuda.cudnn, cuda.cudnn_backward),
    (_efficient_takes, partial(_seconds, share="efficient"), _efficient_bytes, cuda.efficient, cuda.efficient_backward),
    (_biased_takes, _biased_seconds, _biased_bytes, cuda.biased, cuda.biased_backward),
    (_flex_takes, _flex_seconds, _flex_bytes, flex, flex_backward),
)
FUSED: tuple[Kernel, ...] = tuple(
    _kernel(target, guard, cost_s, workspace, fn)
    for guard, cost_s, workspace, forward, backward in _TAKES
    for target, fn in ((FORWARD, forward), (BACKWARD, backward))
)


# ---- block-wise ----


def _scores(call: KernelCall) -> tuple[int, int]:
    """(all scores, scores of a block), in bytes."""
    (b, h, s, _), t = call["q"].shape, call["k"].shape[2]
    wide = torch.promote_types(call["q"].dtype, torch.float32).itemsize
    rows = min(s, max(1, OTHER_MAX_SCORES // max(1, b * h * t)))
    return b * h * s * t * wide, b * h * rows * t * wide


def _blockwise_seconds(call: KernelCall, rates: Rates) -> float:
    """Products in float32, and scores that an operator at a time reads and writes: six of them forward, twice that
    backward.
    """
    every, block = _scores(call)
    passes = 6 if call.target == FORWARD else 12
    products_s = _seconds(call, rates, "blockwise", call["q"].shape[2] * call["k"].shape[2])
    return products_s + passes * (2 * every / rates.bytes_per_s + max(1, every // max(1, block)) * rates.launch_s)


def _blockwise_bytes(call: KernelCall) -> int:
    """Of a block: scores, weights and one more of their size; backward also their gradients.

    Sums of dK and dV are float32.
    """
    _, block = _scores(call)
    return 3 * block if call.target == FORWARD else 5 * block + 4 * (call["k"].numel + call["v"].numel)


def blockwise_kernels(forward: Callable[..., Any], backward: Callable[..., Any]) -> tuple[Kernel, ...]:
    """What takes every call that none of torch's kernels does, on CUDA."""
    pair = ((FORWARD, forward), (BACKWARD, backward))
    return tuple(_kernel(target, anything, _blockwise_seconds, _blockwise_bytes, fn) for target, fn in pair)
