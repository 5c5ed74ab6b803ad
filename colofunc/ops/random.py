"""Random numbers that do not depend on who computes them.

Problem: a sequential generator gives a rank's part of a tensor other numbers than one device gives the whole.
Idea: element number `index` of call site `site` under `seed` is a pure function of the three. `index` is the row-major
position in the *global* tensor, so any part of it can be made anywhere, in any order, and again in the backward.

    random_uniform(seed, site=3, shape=(4, 6), dtype=torch.float32)                   # the whole
    random_uniform(seed, 3, (4, 3), torch.float32, (4, 3), (6, 1), tensor(3))         # its right half, same bits

`sizes` and `strides` list the local atoms of all dims, major first, and their strides in the global index; `offset`
(0-dim int64) is added: local coordinate c has index `offset + sum(c_k * strides_k)`. Empty means row-major over
`shape`. The atoms of a dim multiply to its local size.

Bits are the index-th output of SplitMix64 whose state and site are mixed from the seed: `mix(key + index * GAMMA)`.
It takes eleven integer operations, equal on every device; it passes BigCrush, and two streams of one program overlap
with probability about (elements drawn)^2 / 2^64.
Source: Steele, Lea and Flood, Fast splittable pseudorandom number generators (2014), figure 16, with Stafford's mix 13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod, sqrt
from typing import Any

import attrs
import torch
from torch import Tensor

from colofunc.errors import InputError
from colofunc.ops.define import define
from colofunc.ops.masks import keep_tiles, mix_
from colofunc.ops.seeds import GAMMA, MASK64, mix_int, signed

# Elements mixed at a time: two int64 buffers that stay in the second-level cache.
TILE = 1 << 16
Place = tuple[Sequence[int], Sequence[int], Tensor | None]  # (sizes, strides, offset)
# Bits that a uniform number of a dtype can hold exactly in [0, 1).
UNIFORM_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


# ---- indices ----


@attrs.frozen(eq=False)
class Index:
    """The global indices of a local tensor: element (r, c) has rows[r] + columns[c].

    `columns` is given, or where they are equally spaced only its first tile: then there are `count` of them, and those
    of tile k are the first ones plus `k * TILE * stride`.
    """

    rows: Tensor
    columns: Tensor
    count: int
    stride: int | None = None

    def tile(self, c: int, width: int) -> tuple[Tensor, int]:
        """(first columns, what to add) for the columns c : c + width."""
        if self.stride is None:
            return self.columns[c : c + width], 0
        return self.columns[: min(width, self.count - c)], c * self.stride


def dim_indices(
    shape: Sequence[int], sizes: Sequence[int], strides: Sequence[int], device: torch.device
) -> list[Tensor]:
    """Per dim of `shape`, the contribution (n,) int64 of each of its coordinates to the global index,
    without offset.
    """
    atoms = [a for a in zip(*_atoms(shape, sizes, strides), strict=True) if a[0] != 1]
    found = []
    for n in shape:
        mine, size = [], 1
        while size < n and atoms:
            mine.append(atoms.pop(0))
            size *= mine[-1][0]
        if size != n:
            raise InputError(
                f"sizes {tuple(sizes)} do not group to the dims of shape {tuple(shape)}. Try: one atom per dim"
            )
        found.append(_outer_sum(mine, device))
    return found


def _atoms(shape: Sequence[int], sizes: Sequence[int], strides: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    if len(sizes) == 0 and len(strides) == 0:
        return shape, [prod(shape[k + 1 :]) for k in range(len(shape))]
    if len(sizes) != len(strides) or prod(sizes) != prod(shape):
        raise InputError(f"sizes {tuple(sizes)}, strides {tuple(strides)} and shape {tuple(shape)} do not fit together")
    return sizes, strides


def _outer_sum(atoms: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """(prod of sizes,) of sum(c_k * stride_k), row-major over the atoms."""
    total = torch.zeros(1, dtype=torch.int64, device=device)
    for size, stride in atoms:
        total = (total.unsqueeze(1) + torch.arange(size, device=device) * stride).flatten()
    return total


def _index(
    shape: Sequence[int], sizes: Sequence[int], strides: Sequence[int], offset: Tensor | None, device: torch.device
) -> Index:
    merged: list[tuple[int, int]] = []
    for size, stride in zip(*_atoms(shape, sizes, strides), strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    rows = _outer_sum(merged[:-1], device)
    if offset is not None:
        rows = rows + offset
    count, stride = merged[-1] if merged else (1, 1)
    return Index(rows, _outer_sum([(min(count, TILE), stride)], device), count, stride)


# ---- bits ----


def _key(seed: Tensor, site: int) -> Tensor | int:
    """The stream of a call site: mixed twice, so that neighbouring seeds and sites share nothing."""
    if seed.device.type == "cpu":
        return signed(mix_int(mix_int(int(seed) & MASK64) + (site + 1) * GAMMA & MASK64))
    first = mix_(seed.clone(), torch.empty_like(seed)).add_(signed((site + 1) * GAMMA))
    return mix_(first, torch.empty_like(first))


def _tiles(index: Index, seed: Tensor, site: int, top_only: bool) -> Iterator[tuple[slice, slice, Tensor]]:
    """(rows, columns, bits) tile by tile; the bits are a buffer that the next tile overwrites."""
    n, m = index.rows.numel(), index.count
    rows, first = index.rows * signed(GAMMA) + _key(seed, site), index.columns * signed(GAMMA)
    scaled = attrs.evolve(index, columns=first)
    width = max(1, min(m, TILE))
    height = max(1, TILE // width)
    buffer = torch.empty((2, min(n, height) * width), dtype=torch.int64, device=seed.device)
    for r in range(0, n, height):
        for c in range(0, m, width):
            row = rows[r : r + height]
            column, start = scaled.tile(c, width)
            shape = (row.numel(), column.numel())
            z, spare = (b[: shape[0] * shape[1]].view(shape) for b in buffer)
            torch.add(row.unsqueeze(1) + signed(start * GAMMA), column, out=z)
            yield slice(r, r + height), slice(c, c + width), mix_(z, spare, top_only)


def _filled(
    seed: Tensor,
    site: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    place: Place,
    to: Callable[[Tensor], Tensor],
    top_only: bool = False,
) -> Tensor:
    """A tensor of `shape` whose tiles are `to(bits)`."""
    index = _index(shape, *place, seed.device)
    out = torch.empty((index.rows.numel(), index.count), dtype=dtype, device=seed.device)
    if out.numel():
        for r, c, bits in _tiles(index, seed, site, top_only):
            out[r, c] = to(bits)
    return out.view(tuple(shape))


def _top(bits: Tensor, count: int) -> Tensor:
    return bits.bitwise_right_shift_(64 - count).bitwise_and_((1 << count) - 1)


def _runs(index: Index) -> tuple[Tensor, Tensor | int]:
    """(rows, columns) for `keep_tiles`: the number of columns where they are consecutive."""
    if index.stride is not None:
        if index.stride == 1 or index.count == 1:
            return index.rows, index.count
        return index.rows, torch.arange(index.count, device=index.rows.device) * index.stride
    if index.columns.device.type == "cpu" and index.count:
        first = index.columns[0]
        if torch.equal(index.columns, torch.arange(index.count) + first):
            return index.rows + first, index.count
    return index.rows, index.columns


def _keep(index: Index, q: float, seed: Tensor, site: int, dtype: torch.dtype = torch.bool) -> Tensor:
    """(rows, columns) with ones where a draw of probability q says yes."""
    out = torch.empty((index.rows.numel(), index.count), dtype=dtype, device=seed.device)
    for r, c, keep in keep_tiles(*_runs(index), q, _key(seed, site), dtype):
        out[r, c] = keep
    return out


# ---- operators ----


def _check_seed(seed: Tensor) -> None:
    if seed.dim() != 0 or seed.dtype != torch.int64:
        raise InputError(
            f"a seed is a 0-dim int64 tensor, not {seed.dtype} of shape {tuple(seed.shape)}. Try: torch.tensor(0)"
        )


def _random_bits(
    seed: Tensor,
    site: int,
    shape: Sequence[int],
    sizes: Sequence[int] = (),
    strides: Sequence[int] = (),
    offset: Tensor | None = None,
) -> Tensor:
    return _filled(seed, site, shape, torch.int64, (sizes, strides, offset), lambda bits: bits)


def _random_uniform(
    seed: Tensor, site: int, shape: Sequence[int], dtype: torch.dtype, sizes: Sequence[int] = (),
    strides: Sequence[int] = (),
    offset: Tensor | None = None,
) -> Tensor:  # fmt: skip
    count = UNIFORM_BITS[dtype]
    place = (sizes, strides, offset)
    return _filled(seed, site, shape, dtype, place, lambda bits: _top(bits, count), count <= 31).mul_(2.0**-count)


def _random_normal(
    seed: Tensor, site: int, shape: Sequence[int], dtype: torch.dtype, sizes: Sequence[int] = (),
    strides: Sequence[int] = (),
    offset: Tensor | None = None,
) -> Tensor:  # fmt: skip
    def inverse(bits: Tensor) -> Tensor:
        # Inverse distribution function in float64, so that float32 results agree to an ulp between devices. 52 bits and
        # a half: never 0 or 1.
        u = _top(bits, 52).to(torch.float64).add_(0.5).mul_(2.0**-51).sub_(1.0)
        return u.erfinv_().mul_(sqrt(2.0))

    return _filled(seed, site, shape, dtype, (sizes, strides, offset), inverse)


def _random_bernoulli(
    seed: Tensor, site: int, shape: Sequence[int], dtype: torch.dtype, p: float, sizes: Sequence[int] = (),
    strides: Sequence[int] = (),
    offset: Tensor | None = None,
) -> Tensor:  # fmt: skip
    index = _index(shape, sizes, strides, offset, seed.device)
    return _keep(index, p, seed, site, dtype).view(tuple(shape))


def _dropout(
    x: Tensor,
    seed: Tensor,
    site: int,
    p: float,
    sizes: Sequence[int] = (),
    strides: Sequence[int] = (),
    offset: Tensor | None = None,
) -> Tensor:
    if p >= 1.0:
        return torch.zeros_like(x)
    index = _index(x.shape, sizes, strides, offset, seed.device)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    flat, source = (t.view(index.rows.numel(), index.count) for t in (out, x.contiguous()))
    for r, c, keep in keep_tiles(*_runs(index), 1.0 - p, _key(seed, site), x.dtype):
        part = flat[r, c]
        # Ones and zeros times x, then the factor, which half precision could not hold.
        torch.mul(source[r, c], keep, out=part).mul_(1.0 / (1.0 - p))
        if not isinstance(r, slice):
            flat[r, c] = part
    # Memory order is kept, as by an elementwise operator.
    return out if x.is_contiguous() else torch.empty_like(x).copy_(out)


def keep_mask(seed: Tensor, site: int, p: float, dims: Sequence[Tensor], dtype: torch.dtype = torch.bool) -> Tensor:
    """Dropout's keep mask of a block, as ones and zeros of `dtype`, given the index contribution of each dim (the first one
    carries the offset).
    """
    lead = dims[0]
    for d in dims[1:-1]:
        lead = (lead.unsqueeze(1) + d).flatten()
    index = Index(lead, dims[-1], dims[-1].numel())
    out = _keep(index, 1.0 - p, seed, site, dtype)
    return out.view([d.numel() for d in dims])


def _fake_bits(
    seed: Tensor,
    site: int,
    shape: Sequence[int],
    sizes: Sequence[int] = (),
    strides: Sequence[int] = (),
    offset: Tensor | None = None,
) -> Tensor:
    _check_seed(seed)
    return seed.new_empty(shape)


def _fake(seed: Tensor, site: int, shape: Sequence[int], dtype: torch.dtype, *rest: Any, **options: Any) -> Tensor:
    _check_seed(seed)
    return seed.new_empty(shape, dtype=dtype)


def _dropout_fake(
    x: Tensor,
    seed: Tensor,
    site: int,
    p: float,
    sizes: Sequence[int] = (),
    strides: Sequence[int] = (),
    offset: Tensor | None = None,
) -> Tensor:
    _check_seed(seed)
    if not 0.0 <= p <= 1.0:
        raise InputError(f"dropout: p is {p}. Try: a probability between 0 and 1")
    return torch.empty_like(x)


def _save_dropout(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, seed, ctx.site, ctx.p, ctx.sizes, ctx.strides, offset = inputs
    ctx.save_for_backward(seed, offset)


def _dropout_backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    # The mask is made again from its key; nothing is stored.
    seed, offset = ctx.saved_tensors
    dx = dropout.apply(g, seed, ctx.site, ctx.p, ctx.sizes, ctx.strides, offset)
    return dx, None, None, None, None, None, None


_PLACE = "int[] sizes=[], int[] strides=[], Tensor? offset=None"
random_bits = define(f"random_bits(Tensor seed, int site, int[] shape, {_PLACE}) -> Tensor", _random_bits, _fake_bits)
random_uniform = define(
    f"random_uniform(Tensor seed, int site, int[] shape, ScalarType dtype, {_PLACE}) -> Tensor", _random_uniform, _fake
)
random_normal = define(
    f"random_normal(Tensor seed, int site, int[] shape, ScalarType dtype, {_PLACE}) -> Tensor", _random_normal, _fake
)
random_bernoulli = define(
    f"random_bernoulli(Tensor seed, int site, int[] shape, ScalarType dtype, float p, {_PLACE}) -> Tensor",
    _random_bernoulli,
    _fake,
)
dropout = define(
    f"dropout(Tensor x, Tensor seed, int site, float p, {_PLACE}) -> Tensor",
    _dropout, _dropout_fake, (_save_dropout, _dropout_backward),
)  # fmt: skip
