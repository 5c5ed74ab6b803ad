"""Updates in the memory of the host that keep less than 12 bytes an element, beside torch's fused AdamW.

Parameter and moments in bfloat16 whose writes are rounded by draws (`rounding="stochastic"`: 6 bytes an element), and moments in 8 bits
(`state_bits=8`: 2.06 bytes beside the parameter): the operators that a step calls, with their kernel in C++ and without. torch's fused
kernel updates parameter and moments in bfloat16 as they are, or in float32 by a float32 gradient; here the gradient is in bfloat16, and
cast for torch where it has to be.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench import Row, Section, pairs, ratio, seconds
from bench.native_updates import without_kernel
from colofunc.ops import native
from colofunc.ops.update_packed import adamw8_, block_of, packed_moment
from colofunc.ops.update_rounded import adamw_rounded_

SIDES = (1 << 10, 1 << 12)
LEAST_ELEMENTS = 1 << 22  # that one measurement updates, in several calls of a small size
MOST_TIMES = 2.0
"""Times that an update rounded by draws, or of moments in 8 bits, may take of torch's."""
NUMBERS = (0.9, 0.999, 1e-8, 0.01)


class Operands:
    """A square parameter with its gradient in bfloat16 and its states in every form."""

    def __init__(self, side: int) -> None:
        shape = (side, side)
        self.wide = [torch.randn(shape), *(torch.zeros(shape) for _ in range(2))]
        self.narrow = [x.bfloat16() for x in self.wide]
        blocks = block_of(shape)
        assert blocks is not None
        self.moments = (*packed_moment(self.wide[1], blocks, True), *packed_moment(self.wide[2], blocks, False))
        self.step, self.lr = torch.tensor(3.0), torch.tensor(1e-3)

    def of_torch(self, states: list[Tensor], grad: Tensor) -> None:
        param, first, second = ([x] for x in states)
        torch._fused_adamw_(
            param, [grad], first, second, [], [self.step], lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8, amsgrad=False,
            maximize=False,
        )  # fmt: skip

    def rounded(self, grad: Tensor) -> None:
        param, *moments = self.narrow
        adamw_rounded_(param, grad, *moments, self.step, self.lr, *NUMBERS, True, False, None, 5)

    def packed(self, grad: Tensor) -> None:
        adamw8_(self.wide[0], grad, *self.moments, self.step, self.lr, *NUMBERS, True)

    def packed_and_rounded(self, grad: Tensor) -> None:
        adamw8_(self.narrow[0], grad, *self.moments, self.step, self.lr, *NUMBERS, True, False, None, 5)


def repeated(update: Callable[[], Any], times: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(times):
            update()

    return run


def rows_of(side: int) -> list[Row]:
    x, grad = Operands(side), torch.randn(side, side).bfloat16()
    ways = {
        "rounded": lambda: x.rounded(grad),
        "packed": lambda: x.packed(grad),
        "both": lambda: x.packed_and_rounded(grad),
        "torch's in bfloat16": lambda: x.of_torch(x.narrow, grad),
        "torch's in float32": lambda: x.of_torch(x.wide, grad.float()),
        "rounded, without": lambda: without_kernel(x.rounded, grad),
        "packed, without": lambda: without_kernel(x.packed, grad),
    }
    calls = max(1, LEAST_ELEMENTS // side**2)
    times = pairs(*(repeated(way, calls) for way in ways.values()), count=9, warm=1)
    column = {name: number for number, name in enumerate(ways)}

    def row(above: str, below: str, what: str, most: float | None = None) -> Row:
        middle, text = ratio(times, column[above], column[below])
        said = ("", None) if most is None else (f"at most {most}", middle <= most)
        return Row(f"{side**2:,} elements: {what}", text, *said)

    return [
        Row(f"{side**2:,} elements: CPU seconds of {calls} update(s), rounded by draws", seconds(times, column["rounded"])),
        row("rounded", "torch's in bfloat16", "rounded by draws / torch's fused kernel in bfloat16", MOST_TIMES),
        row("rounded, without", "rounded", "rounded by draws, without a compiler / with"),
        Row(f"{side**2:,} elements: CPU seconds of {calls} update(s), moments in 8 bits", seconds(times, column["packed"])),
        row("packed", "torch's in float32", "moments in 8 bits / cast and torch's fused kernel in float32", MOST_TIMES),
        row("packed, without", "packed", "moments in 8 bits, without a compiler / with"),
        row("both", "torch's in bfloat16", "moments in 8 bits, rounded by draws / torch's fused kernel in bfloat16"),
    ]


def bench() -> Section:
    os.environ["COLOFUNC_NATIVE"] = "require"
    native.ready("cpu")
    setting = (
        f"AdamW, gradient in bfloat16, {torch.get_num_threads()} thread(s), torch {torch.__version__}, load average "
        f"{os.getloadavg()[0]:.0f} on {os.cpu_count()} cores."
    )
    return Section("Updates of small states on the host", setting, [row for side in SIDES for row in rows_of(side)])
