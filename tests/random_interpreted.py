"""Runs the Triton kernels of random numbers in Triton's interpreter, and compares bits with the CPU's. Started by `test_random_kernels`
in a process of its own, because the interpreter replaces parts of Triton.

    python tests/random_interpreted.py [cases] [seed]
"""

from __future__ import annotations

import os
import random
import sys
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from colofunc.ops import random as R
from colofunc.ops import random_kernels, random_triton

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
PROBABILITIES = (0.0, 0.9, 0.5, 1 / 3, 0.004, 1.0 - 2.0**-41, 1.0)
converted = interpreter._convert_float


def convert_as_cards_do(data, of, to, rounding):
    """The interpreter rounds halves of bfloat16 away from zero and loses carries."""
    if (of, to) != (tl.float32, tl.bfloat16):
        return converted(data, of, to, rounding)
    wide = torch.from_numpy(np.ascontiguousarray(data).view(np.float32))
    return wide.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def place(draw: random.Random, dims: int) -> tuple[list[int], list[int], list[int], int | None]:
    """(local shape, sizes, strides, offset) of a part: each dim is blocks, of which a rank holds every, or some, or one."""
    shape, sizes, strides = [], [], []
    row = 1
    for _ in range(dims):
        inner, ranks, outer = draw.choice([1, 2, 3, 8, 16, 24]), draw.choice([1, 1, 2, 3]), draw.choice([1, 1, 2, 5])
        shape.insert(0, inner * outer)
        sizes[:0] = [outer, inner]
        strides[:0] = [row * inner * ranks, row]
        row *= inner * ranks * outer
    return shape, sizes, strides, draw.choice([None, 0, 3, 8, 21, 2**33 + 5])


def laid_out(draw: random.Random, shape: list[int], dtype: torch.dtype) -> Tensor:
    """Contiguous, permuted, sliced or expanded."""
    how = draw.choice(["contiguous", "permuted", "sliced", "expanded"])
    order = list(range(len(shape)))
    if how == "permuted":
        draw.shuffle(order)
    x = torch.randn([shape[k] for k in order]).to(dtype).permute([order.index(k) for k in range(len(shape))])
    if how == "sliced":
        return torch.randn([n + 2 for n in shape]).to(dtype)[tuple(slice(1, n + 1) for n in shape)]
    return x[:1].expand(shape) if how == "expanded" and shape else x


def units_apart(a: Tensor, b: Tensor) -> int:
    """How many floating-point numbers lie between."""
    ints = {torch.float64: torch.int64, torch.float32: torch.int32}.get(a.dtype, torch.int16)
    return int((a.contiguous().view(ints) - b.contiguous().view(ints)).abs().max()) if a.numel() else 0


def check(draw: random.Random) -> None:
    shape, sizes, strides, first = place(draw, draw.choice([0, 1, 2, 2, 3]))
    rest = (sizes, strides, None if first is None else torch.tensor(first))
    seed, site = torch.tensor(draw.choice([0, 5, -3, 2**62])), draw.choice([0, 3, 70_000])
    dtype, q = draw.choice(FLOATS), draw.choice(PROBABILITIES)
    made = random_kernels.numbers("bits", seed, site, shape, torch.int64, rest)
    assert torch.equal(made, R.random_bits(seed, site, shape, *rest)), "bits"
    made = random_kernels.numbers("uniform", seed, site, shape, dtype, rest)
    assert torch.equal(made, R.random_uniform(seed, site, shape, dtype, *rest)), ("uniform", dtype)
    made = random_kernels.numbers("normal", seed, site, shape, dtype, rest)
    # In float64 the difference of two algorithms shows.
    apart, most = units_apart(made, R.random_normal(seed, site, shape, dtype, *rest)), 16 if dtype == torch.float64 else 2
    assert apart <= most, ("normal", dtype, apart)
    stored = draw.choice([torch.bool, torch.int64, torch.uint8, dtype])
    made = random_kernels.bernoulli(seed, site, shape, stored, q, rest)
    assert torch.equal(made, R.random_bernoulli(seed, site, shape, stored, q, *rest)), ("bernoulli", stored, q)
    x = laid_out(draw, shape, dtype)
    p = min(1.0 - q, 0.999)
    made, want = random_kernels.dropout(x, seed, site, p, rest), R.dropout.kernel(x, seed, site, p, *rest)
    assert torch.equal(made, want) and made.stride() == want.stride(), ("dropout", dtype, q, x.shape, x.stride())


def check_tables(draw: random.Random) -> None:
    """Blocks of attention's mask."""
    rows, columns = (torch.tensor(sorted(draw.sample(range(5000), n))) for n in (7, 33))
    index, q = R.Index(rows, columns), draw.choice(PROBABILITIES)
    made = random_kernels.keep_table(torch.tensor(5), 3, index, q, torch.float32)
    assert torch.equal(made, R._keep(index, q, torch.tensor(5), 3, torch.float32)), ("tables", q)


def main(cases: int = 8, first: int = 0) -> None:
    interpreter._convert_float = convert_as_cards_do
    random_kernels.launch = random_triton.fill
    for number in range(first, first + cases):
        draw = random.Random(number)
        # A seed of the host, and one that a kernel reads.
        known = mock.patch.object(random_kernels, "_known", lambda value: 0 if value is None else value)
        try:
            if number % 2:
                check(draw)
            else:
                with known:
                    check(draw)
            check_tables(draw)
        except AssertionError as error:
            raise AssertionError(f"case {number}: {error}") from error
    x = torch.tensor([float("nan"), 1.0, -1.0] * 20)  # NaN stays NaN, and zeros have signs
    made, want = random_kernels.dropout(x, torch.tensor(5), 3, 0.5, ([], [], None)), R.dropout.kernel(x, torch.tensor(5), 3, 0.5)
    assert torch.equal(made.nan_to_num(7.0).view(torch.int32), want.nan_to_num(7.0).view(torch.int32))
    print(f"{cases} cases agree")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
