"""Random numbers that do not depend on who computes them.

Problem: a sequential generator gives a rank's part of a tensor other numbers than one device gives the whole.
Idea: element number `index` of call site `site` under `seed` is a pure function of the three. `index` is the row-major
position in the *global* tensor, so any part of it can be made anywhere, in any order, and again in the backward.

    random_uniform(seed, site=3, shape=(4, 6), dtype=torch.float32)                   # the whole
    random_uniform(seed, 3, (4, 3), torch.float32, (4, 3), (6, 1), tensor(3))         # its right half, same bits

`sizes`, `strides` and `offset` (0-dim int64) say which part of the global tensor this is: see `colofunc.ops.indices`.

On a GPU, and on a CPU where a C++ compiler was found (`colofunc.ops.native`), each operator is one launch
(`colofunc.ops.random_kernels`); else on the CPU tiles of words, elsewhere the plain expressions of
`colofunc.ops.draws`: the same bits.

Bits are the index-th output of SplitMix64 whose state and site are mixed from the seed: `mix(key + index * GAMMA)`.
It takes eleven integer operations, equal on every device; it passes BigCrush, and two streams of one program overlap
with probability about (elements drawn)^2 / 2^64.
Source: Steele, Lea and Flood, Fast splittable pseudorandom number generators (2014), figure 16, with Stafford's mix 13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colofunc.errors import InputError
from colofunc.ops import draws
from colofunc.ops import random_kernels as kernels
from colofunc.ops.define import define
from colofunc.ops.facts import Facts
from colofunc.ops.indices import Index, index_of, index_tensor
from colofunc.ops.masks import RandomWords, keep_tiles, mix_words
from colofunc.ops.random_kernels import StridedPlace
from colofunc.ops.seeds import GAMMA, MASK64, key_int, signed

# Elements mixed at a time on the CPU: two buffers of words that stay in the second-level cache.
TILE = 1 << 15
# (words, the part of the result that they decide): changes both.
Write = Callable[[RandomWords, Any], Any]
# (indices, key) -> numbers.
Plain = Callable[[Tensor, Tensor], Tensor]


def _key(seed: Tensor, site: int) -> Tensor | int:
    """The stream of a call site, without a look at a seed that another device holds."""
    if seed.device.type == "cpu":
        return key_int(int(seed), site)
    return draws.key_of(seed, site)


# ---- tiles ----


def _words(index: Index, key: int, top_only: bool) -> Iterator[tuple[slice, slice, RandomWords]]:
    """(rows, columns, bits) tile by tile, on the CPU; the bits are a buffer that the next tile overwrites.

    NumPy alone: a call of it costs a tenth of a call of torch, which in tiles of this size would be a third of the
    time.
    """
    assert isinstance(index.columns, tuple)
    n, (m, stride) = index.rows.numel(), index.columns
    width = max(1, min(m, TILE))
    height = max(1, TILE // width)
    rows = (index.rows * signed(GAMMA) + key).numpy().view(np.uint64)[:, None]
    columns = np.arange(width, dtype=np.uint64) * np.uint64(stride * GAMMA & MASK64)
    buffers = np.empty((2, min(n, height) * width), dtype=np.uint64)
    for r in range(0, n, height):
        for c in range(0, m, width):
            row, column = rows[r : r + height], columns[: m - c]
            z, spare = buffers[:, : row.size * column.size].reshape(2, row.size, column.size)
            np.add(row + np.uint64(c * stride * GAMMA & MASK64), column, out=z)
            mix_words(z, spare, top_only)
            yield slice(r, r + height), slice(c, c + width), z


def _filled(
    seed: Tensor,
    site: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    place: StridedPlace,
    write: Write,
    plain: Plain,
    top_only: bool = False,
) -> Tensor:
    """A tensor of `shape`: on the CPU `write` fills each of its tiles, elsewhere the tiles are what `plain` gives."""
    index = index_of(shape, *place, seed.device)
    out = torch.empty((index.rows.numel(), index.count), dtype=dtype, device=seed.device)
    if out.numel() == 0:
        return out.view(tuple(shape))
    key = _key(seed, site)
    if isinstance(key, Tensor):
        for r, c, numbers in index.tiles():
            out[r, c] = plain(numbers, key)
        return out.view(tuple(shape))
    # NumPy has no bfloat16, and rounds to half precision in one step where torch takes two.
    direct = dtype not in (torch.float16, torch.bfloat16)
    array = out.numpy() if direct else None
    for r, c, words in _words(index, key, top_only):
        if array is not None:
            write(words, array[r, c])
        else:
            wide = np.empty(words.shape)
            write(words, wide)
            out[r, c] = torch.from_numpy(wide)
    return out.view(tuple(shape))


def _columns(index: Index) -> tuple[Tensor, Tensor | int]:
    """(rows, columns) for `keep_tiles`: the number of columns where they are consecutive."""
    if isinstance(index.columns, tuple):
        count, stride = index.columns
        return index.rows, count if stride == 1 or count == 1 else index.listed()
    if index.rows.device.type == "cpu" and index.count:
        first = index.columns[0]
        if torch.equal(index.columns, torch.arange(index.count) + first):
            return index.rows + first, index.count
    return index.rows, index.columns


def _keep(index: Index, q: float, seed: Tensor, site: int, dtype: torch.dtype = torch.bool) -> Tensor:
    """(rows, columns) with ones where a draw of probability q says yes."""
    if kernels.has_kernel(seed, dtype):
        return kernels.keep_table(seed, site, index, q, dtype)
    out = torch.empty((index.rows.numel(), index.count), dtype=dtype, device=seed.device)
    for r, c, keep in keep_tiles(*_columns(index), q, _key(seed, site), dtype):
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
    place = (sizes, strides, offset)
    if kernels.has_kernel(seed, torch.int64):
        return kernels.numbers("bits", seed, site, shape, torch.int64, place)

    def write(words: RandomWords, part: Any) -> None:
        np.copyto(part, words.view(np.int64))

    return _filled(seed, site, shape, torch.int64, place, write, draws.bits)


def _random_uniform(
    seed: Tensor, site: int, shape: Sequence[int], dtype: torch.dtype, sizes: Sequence[int] = (),
    strides: Sequence[int] = (),
    offset: Tensor | None = None,
) -> Tensor:  # fmt: skip
    place = (sizes, strides, offset)
    if kernels.has_kernel(seed, dtype):
        return kernels.numbers("uniform", seed, site, shape, dtype, place)
    count = draws.UNIFORM_BITS[dtype]
    shift = np.uint64(64 - count)

    def write(words: RandomWords, part: Any) -> None:
        np.right_shift(words, shift, out=words)
        np.copyto(part, words.view(np.int64), casting="unsafe")
        np.multiply(part, 2.0**-count, out=part)

    def plain(index: Tensor, key: Tensor) -> Tensor:
        return draws.uniform(index, key, dtype)

    return _filled(seed, site, shape, dtype, place, write, plain, count <= draws.TOP_BITS)


def _random_normal(
    seed: Tensor, site: int, shape: Sequence[int], dtype: torch.dtype, sizes: Sequence[int] = (),
    strides: Sequence[int] = (),
    offset: Tensor | None = None,
) -> Tensor:  # fmt: skip
    place = (sizes, strides, offset)
    if kernels.has_kernel(seed, dtype):
        return kernels.numbers("normal", seed, site, shape, dtype, place)
    # In float64, so that float32 results agree to an ulp between devices.
    shift = np.uint64(64 - draws.NORMAL_BITS)

    def write(words: RandomWords, part: Any) -> None:
        np.right_shift(words, shift, out=words)
        u = np.multiply(words.view(np.int64), draws.NORMAL_SCALE)
        np.add(u, draws.NORMAL_SHIFT, out=u)
        torch.from_numpy(u).erfinv_()
        np.multiply(u, draws.SQRT2, out=part, casting="same_kind")

    def plain(index: Tensor, key: Tensor) -> Tensor:
        return draws.normal(index, key, dtype)

    return _filled(seed, site, shape, dtype, place, write, plain)


def _random_bernoulli(
    seed: Tensor, site: int, shape: Sequence[int], dtype: torch.dtype, p: float, sizes: Sequence[int] = (),
    strides: Sequence[int] = (),
    offset: Tensor | None = None,
) -> Tensor:  # fmt: skip
    if kernels.has_kernel(seed, dtype):
        return kernels.bernoulli(seed, site, shape, dtype, p, (sizes, strides, offset))
    index = index_of(shape, sizes, strides, offset, seed.device)
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
    if x.dtype in draws.UNIFORM_BITS and kernels.has_kernel(x, x.dtype):
        return kernels.dropout(x, seed, site, p, (sizes, strides, offset))
    index = index_of(x.shape, sizes, strides, offset, seed.device)
    out = torch.empty_like(x) if x.is_contiguous() else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    flat, source = (t.view(index.rows.numel(), index.count) for t in (out, x.contiguous()))
    for r, c, keep in keep_tiles(*_columns(index), 1.0 - p, _key(seed, site), x.dtype):
        part = flat[r, c]
        # Ones and zeros times x, then the factor, which half precision could not hold.
        torch.mul(source[r, c], keep, out=part).mul_(1.0 / (1.0 - p))
        if not isinstance(r, slice):
            flat[r, c] = part
    # Memory order is kept, as by an elementwise operator.
    return out if x.is_contiguous() else torch.empty_like(x).copy_(out)


def keep_mask(seed: Tensor, site: int, p: float, dims: Sequence[Tensor], dtype: torch.dtype = torch.bool) -> Tensor:
    """Dropout's keep mask of a block, as ones and zeros of `dtype`, given the index contribution of each dim (the first
    one carries the offset).
    """
    lead = dims[0]
    for d in dims[1:-1]:
        lead = (lead.unsqueeze(1) + d).flatten()
    index = Index(lead, dims[-1])
    out = _keep(index, 1.0 - p, seed, site, dtype)
    return out.view([dim.numel() for dim in dims])


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


# ---- for compilers ----
#
# Not normal numbers: `erfinv` of one element at a time, as inductor writes it for CPUs, takes several times as long as
# ours.


def _expression(
    seed: Tensor,
    site: int | Tensor,
    shape: Sequence[int],
    place: StridedPlace,
    draw: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """`draw` of the indices and the key, all of one shape: a compiler would compute the key, one number, in a kernel of
    its own.
    """
    key = draws.key_of(seed.expand(tuple(shape)), site)
    return draw(index_tensor(shape, *place, seed.device), key)


def _bits_expression(
    seed: Tensor, site: int | Tensor, shape: Sequence[int], sizes: Sequence[int] = (), strides: Sequence[int] = (),
    offset: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return _expression(seed, site, shape, (sizes, strides, offset), draws.bits)


def _uniform_expression(
    seed: Tensor, site: int | Tensor, shape: Sequence[int], dtype: torch.dtype, sizes: Sequence[int] = (), strides: Sequence[int] = (),
    offset: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return _expression(seed, site, shape, (sizes, strides, offset), partial(draws.uniform, dtype=dtype))


def _bernoulli_expression(
    seed: Tensor, site: int | Tensor, shape: Sequence[int], dtype: torch.dtype, p: float, sizes: Sequence[int] = (),
    strides: Sequence[int] = (), offset: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return _expression(seed, site, shape, (sizes, strides, offset), partial(draws.keep, p)).to(dtype)


def _dropout_expression(
    x: Tensor, seed: Tensor, site: int | Tensor, p: float, sizes: Sequence[int] = (), strides: Sequence[int] = (),
    offset: Tensor | None = None,
) -> Tensor:  # fmt: skip
    if p >= 1.0:
        return torch.zeros_like(x)
    keep = _expression(seed, site, x.shape, (sizes, strides, offset), partial(draws.keep, 1.0 - p))
    return x * keep.to(x.dtype) * (1.0 / (1.0 - p))


_PLACE = "int[] sizes=[], int[] strides=[], Tensor? offset=None"
random_bits = define(
    f"random_bits(Tensor seed, int site, int[] shape, {_PLACE}) -> Tensor", _random_bits, _fake_bits,
    for_compilers=_bits_expression, number="site", facts=Facts(draws_by_place=True),
)  # fmt: skip
random_uniform = define(
    f"random_uniform(Tensor seed, int site, int[] shape, ScalarType dtype, {_PLACE}) -> Tensor", _random_uniform, _fake,
    for_compilers=_uniform_expression, number="site", facts=Facts(draws_by_place=True),
)  # fmt: skip
random_normal = define(
    f"random_normal(Tensor seed, int site, int[] shape, ScalarType dtype, {_PLACE}) -> Tensor", _random_normal, _fake,
    facts=Facts(draws_by_place=True),
)  # fmt: skip
random_bernoulli = define(
    f"random_bernoulli(Tensor seed, int site, int[] shape, ScalarType dtype, float p, {_PLACE}) -> Tensor", _random_bernoulli, _fake,
    for_compilers=_bernoulli_expression, number="site", facts=Facts(draws_by_place=True),
)  # fmt: skip
dropout = define(
    f"dropout(Tensor x, Tensor seed, int site, float p, {_PLACE}) -> Tensor",
    _dropout, _dropout_fake, (_save_dropout, _dropout_backward), for_compilers=_dropout_expression, number="site",
    facts=Facts(draws_by_place=True),
)  # fmt: skip
OPERATORS = (random_bits, random_uniform, random_normal, random_bernoulli, dropout)
CUDA_KERNELS = kernels.records({operator.name: operator.kernel for operator in OPERATORS})
