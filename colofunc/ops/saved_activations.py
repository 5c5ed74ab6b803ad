"""Activations in 8 bits from forward to backward: numbers of one byte, and a scale for each group of elements.

    codes, scale = pack_saved(x, 1, 128, torch.int8)                    # x (b, 256): codes (b, 256), scale (b, 2)
    y = widen_saved(codes, scale, torch.int8, torch.float32)            # about x, in the dtype that it had

Problem: what forward keeps for backward is most of the memory of a training step, and backward only needs to know it
about. Idea: two operators, one behind what makes the value and one in front of what reads it in backward. A group is a
run of at most `GROUP` elements of one row: `group_of` says which, from the shape alone, so that numbers and scales are
those of one device wherever rows lie. A group never reaches over dim 0, so that a sample's numbers do not depend on the
others of its batch.

    numbers         a number stands for      scale                        |y - x| is at most
    int8            codes * scale            largest of the group / 127   scale / 2
    float8_e4m3fn   its bits, * scale        largest of the group / 448   |x| / 16 + scale / 1024

(and what the dtype of y rounds). The scale is in float32, of float64 in float64. 0 stays 0. A group with a number that
is not finite is not finite as a whole, so that backward shows it. Sources: Chen et al. 2021, "ActNN" (2104.14129),
which keeps groups of 256 elements in 2 to 8 bits, rounded at random; Xi et al. 2024, "COAT" (2410.19313), in float8 in
groups of a row. Here numbers are rounded to the nearest.
"""

from __future__ import annotations

from functools import cache
from math import prod

import attrs
import torch
from torch import Tensor

from colofunc.ops.define import define
from colofunc.ops.facts import Facts
from colofunc.ops.small_floats import E4M3, E4M3_LARGEST, e4m3_bits, e4m3_values

GROUP = 128
"""At most this many elements share a scale: 8.25 bits an element."""
LEAST_GROUP = 32
"""A value whose groups would be smaller stays as it is: scales would be too many."""
LEAST_ELEMENTS = 4096
"""A value with fewer elements stays as it is."""
AT_ONCE = 1 << 18
"""Elements that are widened at a time on the host."""
INT8_LARGEST = 127.0
LARGEST = {torch.int8: INT8_LARGEST, E4M3: E4M3_LARGEST}
NUMBERS = {"int8": torch.int8, "fp8": E4M3}
"""Name of a form -> what numbers are rounded to."""


@attrs.frozen
class ScaleGroups:
    """How a shape is cut: `width` elements of dim `dim`, with all dims behind it, share a scale."""

    dim: int
    width: int


@cache
def group_of(shape: tuple[int, ...]) -> ScaleGroups | None:
    """The largest groups of at most `GROUP` elements behind dim 0; None where a value of this shape stays as it is.

    >>> group_of((8, 1024, 768)), group_of((32, 64, 8, 8)), group_of((4096,))
    (ScaleGroups(dim=2, width=128), ScaleGroups(dim=1, width=2), None)
    """
    if prod(shape) < LEAST_ELEMENTS:
        return None
    found: ScaleGroups | None = None
    most, behind = 0, 1
    for dim in reversed(range(1, len(shape))):
        width = max((n for n in range(1, GROUP // behind + 1) if shape[dim] % n == 0), default=0)
        if width * behind > most:
            found, most = ScaleGroups(dim, width), width * behind
        behind *= shape[dim]
        if behind > GROUP:
            break
    return found if most >= LEAST_GROUP else None


def scale_dtype_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scales of values in `dtype`."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _packed(groups: Tensor, numbers: torch.dtype) -> tuple[Tensor, Tensor]:
    """Groups (n, size) -> what stands for them, (n, size), and their scales, (n,)."""
    wide = groups.to(scale_dtype_of(groups.dtype))
    largest = wide.abs().amax(1)
    # By a tensor: divided by a number, a card multiplies by its rounded inverse.
    scale = largest / torch.full_like(largest, LARGEST[numbers])
    # Numbers of a group of zeros, or of one too small to divide, are 0 whatever they are divided by.
    shares = wide / torch.where(scale == 0, torch.ones_like(scale), scale).unsqueeze(1)
    codes = e4m3_bits(shares) if numbers is E4M3 else shares.round().to(torch.int8)
    # Infinity times the 0 that others in its group become would still be NaN, but not times itself.
    return codes, torch.where(scale.isfinite(), scale, torch.full_like(scale, torch.nan))


def _pack_saved(x: Tensor, dim: int, width: int, numbers: torch.dtype) -> tuple[Tensor, Tensor]:
    codes, scale = _pack_saved_fake(x, dim, width, numbers)
    groups = x.reshape(scale.numel(), -1) if scale.numel() else x.reshape(0, 1)
    flat_codes, flat_scale = codes.view(groups.shape), scale.view(-1)
    for begin, end in _spans(groups):
        flat_codes[begin:end], flat_scale[begin:end] = _packed(groups[begin:end], numbers)
    return codes, scale


def _spans(groups: Tensor) -> list[tuple[int, int]]:
    """Ranges of groups that are wide at a time: on the host few, as they stay in its cache."""
    count, size = groups.shape
    step = max(1, AT_ONCE // max(1, size)) if groups.device.type == "cpu" else max(1, count)
    return [(begin, min(count, begin + step)) for begin in range(0, count, step)]


def _pack_saved_fake(x: Tensor, dim: int, width: int, numbers: torch.dtype) -> tuple[Tensor, Tensor]:
    codes = x.new_empty(x.shape, dtype=torch.uint8 if numbers is E4M3 else numbers)
    return codes, x.new_empty((*x.shape[:dim], x.shape[dim] // width), dtype=scale_dtype_of(x.dtype))


def _pack_whole(x: Tensor, dim: int, width: int, numbers: torch.dtype) -> tuple[Tensor, Tensor]:
    """In operators of torch alone, all at once."""
    shape = (*x.shape[:dim], x.shape[dim] // width)
    size = width * prod(x.shape[dim + 1 :])
    codes, scale = _packed(x.reshape(prod(shape), size), numbers)
    return codes.view(x.shape), scale.view(shape)


def _widen_saved(codes: Tensor, scale: Tensor, numbers: torch.dtype, dtype: torch.dtype) -> Tensor:
    out = codes.new_empty(codes.shape, dtype=dtype)
    if not scale.numel():
        return out
    groups, flat, scales = (x.reshape(scale.numel(), -1) for x in (codes, out, scale))
    for begin, end in _spans(groups):
        flat[begin:end] = _widened(groups[begin:end], scales[begin:end], numbers)
    return out


def _widened(groups: Tensor, scales: Tensor, numbers: torch.dtype) -> Tensor:
    wide = e4m3_values(groups, scales.dtype) if numbers is E4M3 else groups.to(scales.dtype)
    return wide * scales


def _widen_saved_fake(codes: Tensor, scale: Tensor, numbers: torch.dtype, dtype: torch.dtype) -> Tensor:
    return codes.new_empty(codes.shape, dtype=dtype)


def _widen_whole(codes: Tensor, scale: Tensor, numbers: torch.dtype, dtype: torch.dtype) -> Tensor:
    count = scale.numel()
    size = codes.numel() // max(1, count)
    return _widened(codes.reshape(count, size), scale.reshape(count, 1), numbers).to(dtype).view(codes.shape)


pack_saved = define(
    "pack_saved(Tensor x, int dim, int width, ScalarType numbers) -> (Tensor, Tensor)", _pack_saved, _pack_saved_fake,
    facts=Facts(own_memory=True), for_compilers=_pack_whole,
)  # fmt: skip
widen_saved = define(
    "widen_saved(Tensor codes, Tensor scale, ScalarType numbers, ScalarType dtype) -> Tensor", _widen_saved, _widen_saved_fake,
    facts=Facts(own_memory=True), for_compilers=_widen_whole,
)  # fmt: skip
PACK = pack_saved.name
WIDEN = widen_saved.name
