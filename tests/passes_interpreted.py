"""Runs the Triton kernels of `fp8_triton` and `experts_triton` in Triton's interpreter, and compares numbers with torch's. Started by
`test_passes_triton` in a process of its own, because the interpreter replaces parts of Triton.

    python tests/passes_interpreted.py
"""

from __future__ import annotations

import itertools
import math
import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
from random_interpreted import convert_as_cards_do
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

from colofunc.ops import experts_triton, fp8, fp8_triton
from colofunc.ops.experts_parts import ExpertWeights
from colofunc.ops.small_floats import E4M3, E5M2, LARGEST

NARROW = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = ((5, 7), (3, 4, 130), (1,), (), (1, 1))
# Of several programs: more than `SPLIT` rows and `COLUMNS` columns, more than a `CHUNK`, rows of more than a `BLOCK`. A program widens
# what it reads first, so that one dtype for each of them says as much as all.
LARGE = ((torch.bfloat16, (260, 130)), (torch.float16, (40_000,)), (torch.float32, (2, 2_100)))


def drawn(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * torch.exp(4 * torch.randn(shape, generator=generator))).to(dtype)


def some_dims(dims: int) -> list[tuple[int, ...] | None]:
    return [None, (dims - 1,), tuple(range(dims - 1))] if dims > 1 else [None]


def maxima_and_casts() -> int:
    count = 0
    for dtype, shape in (*itertools.product(NARROW, SHAPES), *LARGE):
        x = drawn(*shape, dtype=dtype, seed=len(shape))
        for dims in some_dims(len(shape)):
            want = fp8.abs_max.kernel(x, dims)
            got = fp8_triton.abs_max(x, dims)
            assert torch.equal(got, want) and got.dtype is want.dtype, (dtype, shape, dims)
            for format, power_of_2 in ((E4M3, False), (E5M2, False), (E4M3, True)):
                scale = fp8.fp8_scale.kernel(want, LARGEST[format], power_of_2)
                of = fp8.scales_of(x.shape, scale.shape)
                assert of is not None
                bits = fp8_triton.cast(x, scale, format, of)
                assert torch.equal(bits, fp8.fp8_cast.kernel(x, scale, format)), (dtype, shape, dims, format)
                count += 1
    return count


def every_number_of_16_bits() -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for format in (E4M3, E5M2):
        for size in (1.0, 3e-5):
            scale = torch.tensor(size)
            bits, want = fp8_triton.cast(every, scale, format, "one"), fp8.fp8_cast.kernel(every, scale, format)
            assert bits[~every.isnan()].equal(want[~every.isnan()])
            assert bits[every.isnan()].view(format).float().isnan().all()


def what_is_not_finite() -> None:
    for bad in (math.inf, -math.inf, math.nan):
        for dims in some_dims(2):
            x = drawn(3, 40, dtype=torch.bfloat16, seed=0)
            x[1, 7] = bad
            torch.testing.assert_close(fp8_triton.abs_max(x, dims), fp8.abs_max.kernel(x, dims), equal_nan=True, rtol=0, atol=0)


def as_they_lie() -> None:
    """Operands that are turned, cut or expanded are read where they are."""
    x = drawn(6, 5, 40, dtype=torch.bfloat16, seed=1)
    views = (x[0].t(), x.mT, x.permute(1, 2, 0), x.permute(2, 0, 1), x[:, ::2, 3:17], x[:, :1, ::2], x[:1].expand(4, 5, 40), x[0, 0, ::3])
    heads = x[:, :4].reshape(2, 3, 4, 8, 5)
    of_4_dims = (heads[0].permute(2, 0, 1, 3), heads[0].permute(1, 2, 0, 3)[:, ::2])
    of_more = (heads.permute(3, 1, 0, 2, 4), heads.expand(1, 2, 3, 4, 8, 5).mT)
    for view in (*views, *of_4_dims, *of_more):
        for dims in some_dims(view.dim()):
            amax = fp8.abs_max.kernel(view, dims)
            assert torch.equal(amax, fp8.abs_max.kernel(view.contiguous(), dims))
            scale = fp8.fp8_scale.kernel(amax, LARGEST[E4M3], False)
            of = fp8.scales_of(view.shape, scale.shape)
            assert of is not None
            with WithoutCopies():
                bits = fp8_triton.cast(view, scale, E4M3, of)
            assert bits.is_contiguous() and torch.equal(bits, fp8.fp8_cast.kernel(view, scale, E4M3)), (view.shape, dims)


class WithoutCopies(TorchDispatchMode):
    """Inside, a contiguous copy of a tensor is an error. The interpreter's own copies, to the host and back, are others."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten.clone.default
        return func(*args, **(kwargs or {}))


def turned() -> None:
    for rows, columns in ((130, 70), (1, 5), (64, 64), (3, 200)):
        bits = torch.randint(0, 256, (rows, columns), dtype=torch.uint8)
        assert torch.equal(fp8_triton.transposed(bits), bits.t())


def units() -> None:
    """Against torch's operators, that round one by one; an exponential may differ in its last bit."""
    for dtype, near in ((torch.float32, 1e-6), (torch.bfloat16, 2**-7), (torch.float16, 2**-10)):
        for rows, f in ((5, 7), (3, 2_050)):
            h, da = (drawn(rows, size, dtype=torch.float32, seed=size).clamp(-8, 8).to(dtype) for size in (2 * f, f))
            scale = torch.rand(rows, 1, generator=torch.Generator().manual_seed(0)).to(dtype)
            empty = torch.empty(0)
            w = ExpertWeights(empty, empty, None, None, "silu", gated=True, transposed=False)
            a = w.activated(h)
            made, dh, dots = experts_triton.gated_backward(da, scale, h)
            near_to = {"rtol": near, "atol": near}
            torch.testing.assert_close(experts_triton.gated(h), a, **near_to)
            torch.testing.assert_close(made, a, **near_to)
            torch.testing.assert_close(dh, w.activated_backward(da * scale, h), rtol=2 * near, atol=2 * near)
            terms = da.double() * a.double()
            torch.testing.assert_close(dots.double(), terms.sum(-1), rtol=2 * near, atol=2 * near * float(terms.abs().sum(-1).max()))


def zeros() -> None:
    for ends in ([2, 2, 5], [0, 0, 0], [7, 7, 7], [0, 3, 7]):
        of = torch.tensor(ends, dtype=torch.int32)
        rows = experts_triton.zero_rows(torch.ones(7, 1_030), of)
        assert rows.sum(1).tolist() == [1_030.0 * (row < ends[-1]) for row in range(7)]
        groups = experts_triton.zero_groups(torch.ones(3, 33, 40), of)
        sizes = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
        assert groups.sum((1, 2)).tolist() == [33.0 * 40 * (size > 0) for size in sizes]


def main() -> None:
    interpreter._convert_float = convert_as_cards_do
    print(f"{maxima_and_casts()} casts")
    every_number_of_16_bits()
    what_is_not_finite()
    as_they_lie()
    turned()
    units()
    zeros()


if __name__ == "__main__":
    main()
