"""Kernels in C++ beside what torch has for the same: products with weights in 8 and 4 bits, and a step that decodes one token with them.

A product is x (rows, 4096) bfloat16 with a weight of 4096 x 4096, of which several are used in turn, as those of a model's layers are:
none is in a cache. Beside it: `F.linear` with the weight in bfloat16, torch's own weight-only products where it has them, the reference
of our operator, which runs where there is no compiler, and torchao's weight-only int8 where that is installed, which colofunc does not
need: `pip install torchao` in an environment of its own, beside this torch. Products whose inputs are in int8 too are those of
`int8-dynamic` and `smoothquant`, with what rounds the inputs. The step is a stack of perceptrons whose weights are arguments, staged by
`cf.shard` with and without `cf.quantize`. In front stands what the first use costs: compiling, and loading in later processes. Times of
products are CPU seconds of one thread, in alternating rounds, and the median of the rounds' ratios counts.

With many rows multiplying takes the time, and a product with a weight in 8 bits multiplies as many numbers of bfloat16 as `F.linear`. How
long a processor takes for those alone, from registers (`products.cpp`), bounds what either can gain: that row stands beside 64 rows, and
so does `F.linear` with a weight that a cache holds, whose memory costs nothing.
"""

from __future__ import annotations

import ctypes
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import colofunc as cf
from bench import Row, Section, pairs, ratio, seconds
from bench._loops import compiled
from colofunc.ops import native, native_build
from colofunc.ops.int8_products import exact_sums, int8_rows, rounded_linear, row_size
from colofunc.ops.quantized import OPERATORS, Quantized, unpacked
from colofunc.ops.quantizers import BUILT_IN

SIZE = 4096
WEIGHTS = 6
COUNTS = (1, 8, 64)
WHOLE_COUNTS = (1, 8, 64, 512)
ROUNDS = 21
# The step: its weights are 185 MB in bfloat16.
WIDTH, HIDDEN, DEPTH = 2048, 5632, 4
# Products of one round, so that a round is longer than the clock's steps.
IN_A_ROW = 3
CONVOLUTIONS = ((64, 64, 3), (320, 32, 3))
"""(channels, height and width, of the kernel): as in a ResNet, and in Stable Diffusion's UNet at 256 x 256 pixels."""
# Of `products.cpp`: products of an instruction, and sums that run side by side.
NUMBERS, CHAINS = 32, 16
# Of a weight, so that one of them stays in a cache of the second level.
PARTS = 16
MULTIPLIES_BFLOAT16 = 3  # a level of `native.limit_level`


# In a process that finds the library.
LOADING = """
import time, torch
from colofunc.ops import native, native_build
start = time.perf_counter()
assert native.ready("cpu")
print(time.perf_counter() - start)
"""
LOADS = 5


def first_use() -> list[Row]:
    """What the compiler takes, all its processes together, and what a later process does that finds the library."""
    with tempfile.TemporaryDirectory() as folder:
        before, start = os.times(), time.monotonic()
        native_build.build(Path(folder, "native"))
        after, took_s = os.times(), time.monotonic() - start
        cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
        variables = {**os.environ, "COLOFUNC_CACHE": folder}
        command = [sys.executable, "-c", LOADING]
        loads = [float(subprocess.check_output(command, env=variables, text=True)) for _ in range(LOADS)]
    return [
        Row("first use: the kernels for the CPU are compiled", f"{cpu_s:.1f} CPU s, {took_s:.1f} s"),
        Row("first use in a later process: they are loaded", f"{1e3 * statistics.median(loads):.1f} ms"),
    ]


def in_turn(product: Callable[[Any], Tensor], weights: Sequence[Any]) -> Callable[[], None]:
    """Some products, each with the next weight."""
    following = cycle(weights)

    def run() -> None:
        for _ in range(IN_A_ROW):
            product(next(following))

    return run


def ours(x: Tensor, weight: Quantized) -> Tensor:
    found: Tensor = OPERATORS[weight.form].linear(x, *weight.parts, None)
    return found


def reference(x: Tensor, weight: Quantized) -> Tensor:
    os.environ["COLOFUNC_NATIVE"] = "off"
    try:
        return ours(x, weight)
    finally:
        os.environ["COLOFUNC_NATIVE"] = "require"


def int8_of_torch(weight: Quantized) -> tuple[Tensor, Tensor]:
    return weight.data, weight.scale.to(torch.bfloat16)


def int4_of_torch(weight: Quantized) -> tuple[Tensor, Tensor]:
    """Its numbers are meant less 8, and its zeros are in units of the weight."""
    assert weight.zero is not None
    data = torch._convert_weight_to_int4pack_for_cpu(unpacked(weight.data).to(torch.int32).contiguous(), 1)
    zeros = (8.0 - weight.zero.to(torch.float32)) * weight.scale
    return data, torch.stack((weight.scale.T, zeros.T), -1).to(torch.bfloat16).contiguous()


def int8_product(x: Tensor, weight: tuple[Tensor, Tensor]) -> Tensor:
    return torch._weight_int8pack_mm(x, *weight)


def int4_product(x: Tensor, weight: tuple[Tensor, Tensor]) -> Tensor:
    return torch._weight_int4pack_mm_for_cpu(x, weight[0], 128, weight[1])


# Scheme -> (name of torch's product, its form of a weight, the product).
OF_TORCH = {
    "int8": ("torch._weight_int8pack_mm", int8_of_torch, int8_product),
    "int4-g128": ("torch._weight_int4pack_mm_for_cpu", int4_of_torch, int4_product),
}


def torchaos_weights(narrow: Sequence[Tensor]) -> list[Tensor]:
    """Weights as torchao packs them in int8; none where it is not installed."""
    if find_spec("torchao") is None:
        return []
    from torchao.quantization import Int8WeightOnlyConfig, quantize_  # not there everywhere

    layers = []
    for weight in narrow:
        layer = nn.Linear(SIZE, SIZE, bias=False, device="meta")
        layer.weight = nn.Parameter(weight, requires_grad=False)
        quantize_(layer, Int8WeightOnlyConfig())
        layers.append(layer.weight)
    return layers


def products(scheme: str) -> list[Row]:
    """One scheme beside `F.linear`, torch's own product, the reference and torchao's."""
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(SIZE, SIZE, generator=generator) / SIZE**0.5 for _ in range(WEIGHTS)]
    narrow = [w.to(torch.bfloat16) for w in whole]
    packed = [BUILT_IN[scheme].pack(w) for w in whole]
    name, form, theirs = OF_TORCH[scheme]
    formed = [form(w) for w in packed]
    torchaos = torchaos_weights(narrow) if scheme == "int8" else []
    rows = []
    for count in COUNTS:
        x = torch.randn(count, SIZE, generator=generator).to(torch.bfloat16)
        torch.testing.assert_close(theirs(x, formed[0]), ours(x, packed[0]), rtol=0.05, atol=0.05)
        runs = [
            in_turn(partial(ours, x), packed), in_turn(partial(F.linear, x), narrow), in_turn(partial(theirs, x), formed),
            in_turn(partial(reference, x), packed),
        ]  # fmt: skip
        if torchaos:
            torch.testing.assert_close(F.linear(x, torchaos[0]), ours(x, packed[0]), rtol=0.05, atol=0.05)
            runs.append(in_turn(partial(F.linear, x), torchaos))
        found = pairs(*runs, count=ROUNDS, warm=2)
        rows += compared(f"{scheme} product, {count} row{'s' if count > 1 else ''}", name, found, scheme == "int8")
    return rows


def compared(what: str, name: str, found: Sequence[tuple[float, ...]], has_target: bool) -> list[Row]:
    """Columns of `found`: ours, `F.linear`, torch's own product, the reference, and torchao's where it is installed."""
    rows = [Row(f"{what}: ours", f"{1e3 * sorted(times[0] for times in found)[len(found) // 2] / IN_A_ROW:.2f} ms")]
    others = [(1, "F.linear in bfloat16", 1.5), (2, name, 1.0), (3, "the reference", None)]
    if len(found[0]) > len(others) + 1:
        others.append((4, "torchao's int8 weights", 1.0))
    for column, other, target in others:
        middle, text = ratio(found, column, 0)
        if target is None or not has_target:
            rows.append(Row(f"{what}: {other} / ours", text))
        else:
            rows.append(Row(f"{what}: {other} / ours", text, f"at least {target}", middle >= target))
    return rows


def whole_products() -> list[Row]:
    """Inputs in int8 too: a layer's whole work on rows in bfloat16, beside `F.linear`, weights in int8 alone and the reference's sums."""
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(SIZE, SIZE, generator=generator) / SIZE**0.5 for _ in range(WEIGHTS)]
    narrow = [w.to(torch.bfloat16) for w in whole]
    packed = [BUILT_IN["int8"].pack(w) for w in whole]
    rows = []
    for count in WHOLE_COUNTS:
        x = torch.randn(count, SIZE, generator=generator).clamp(-5, 5)
        outlying = x.clone()
        outlying[:, ::1024] *= 40
        plain, large = x.to(torch.bfloat16), outlying.to(torch.bfloat16)
        found = pairs(
            in_turn(partial(rounded, large, 6.0), packed), in_turn(partial(rounded, plain, math.inf), packed),
            in_turn(partial(F.linear, plain), narrow), in_turn(partial(ours, plain), packed), in_turn(partial(by_floats, plain), packed),
            count=ROUNDS, warm=2,
        )  # fmt: skip
        rows += whole_compared(f"int8 inputs and weights, {count} row{'s' if count > 1 else ''}", found)
    return rows


def rounded(x: Tensor, threshold: float, weight: Quantized) -> Tensor:
    return rounded_linear(x, None, weight.data, weight.scale, threshold)


def by_floats(x: Tensor, weight: Quantized) -> Tensor:
    """The sums alone as they are made where a device has no product of whole numbers."""
    return exact_sums(int8_rows(x, row_size(x, math.inf), math.inf), weight.data)


def whole_compared(what: str, found: Sequence[tuple[float, ...]]) -> list[Row]:
    """Columns of `found`: with outliers, without, `F.linear`, weights alone in int8, the reference's sums."""
    times = [1e3 * sorted(times[column] for times in found)[len(found) // 2] / IN_A_ROW for column in (0, 1)]
    rows = [Row(f"{what}: int8-dynamic with 4 columns of outliers, smoothquant", f"{times[0]:.2f} ms, {times[1]:.2f} ms")]
    for other, name in ((2, "F.linear in bfloat16"), (3, "weights alone in int8"), (4, "sums by float32")):
        texts = [ratio(found, other, column)[1] for column in (0, 1)]
        rows.append(Row(f"{what}: {name} / int8-dynamic, / smoothquant", ", ".join(texts)))
    return rows


def convolutions() -> list[Row]:
    """What a convolution would take as such a product, beside torch's in bfloat16: its input is laid out once for every number of the
    kernel first."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for channels, side, kernel in CONVOLUTIONS:
        x = torch.randn(1, channels, side, side, generator=generator).to(torch.bfloat16)
        w = torch.randn(channels, channels, kernel, kernel, generator=generator) / (channels * kernel**2) ** 0.5
        narrow, packed = w.to(torch.bfloat16), BUILT_IN["int8"].pack(w.flatten(1))
        laid_out = partial(F.unfold, x, kernel, padding=kernel // 2)
        found = pairs(
            partial(F.conv2d, x, narrow, padding=kernel // 2),
            lambda laid_out=laid_out, packed=packed: rounded(laid_out().transpose(1, 2), math.inf, packed),
            lambda laid_out=laid_out: laid_out().transpose(1, 2).contiguous(),
            count=ROUNDS, warm=2,
        )  # fmt: skip
        what = f"convolution of {kernel} x {kernel}, {channels} channels, {side} x {side}"
        texts = [ratio(found, 0, column)[1] for column in (1, 2)]
        rows.append(Row(f"{what}: bfloat16 / int8 inputs and weights as a product, / laying out alone", ", ".join(texts)))
    return rows


def least() -> list[Row]:
    """What multiplying alone takes of a product of the most rows, where the processor multiplies bfloat16."""
    rows = COUNTS[-1]
    library, times = compiled("products.cpp"), ctypes.c_long(rows * SIZE * SIZE // NUMBERS // CHAINS)
    generator = torch.Generator().manual_seed(0)
    narrow = [torch.randn(SIZE, SIZE, generator=generator).to(torch.bfloat16) for _ in range(WEIGHTS)]
    x = torch.randn(rows, SIZE, generator=generator).to(torch.bfloat16)
    following = cycle(narrow)
    part = narrow[0][: SIZE // PARTS].contiguous()

    def by_parts() -> None:
        for _ in range(PARTS):
            F.linear(x, part)

    found = pairs(lambda: library.multiply(times), lambda: F.linear(x, next(following)), by_parts, count=ROUNDS, warm=2)
    what = f"product of bfloat16, {rows} rows"
    return [
        Row(f"{what}: its multiplications alone", f"{1e3 * sorted(times[0] for times in found)[len(found) // 2]:.2f} ms"),
        Row(f"{what}: F.linear in bfloat16 / that, the most that fewer bits can gain", ratio(found, 1, 0)[1]),
        Row(f"{what}: F.linear in bfloat16 / as many by a weight that a cache holds", ratio(found, 1, 2)[1]),
    ]


def decode(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """One token through all layers."""
    for layer in range(DEPTH):
        x = x + F.linear(F.silu(F.linear(x, params[f"{layer}.up.weight"])), params[f"{layer}.down.weight"])
    return x


def decoding() -> list[Row]:
    """The staged step in bfloat16, int8 and int4, one token at a time."""
    generator = torch.Generator().manual_seed(0)
    params = {}
    for layer in range(DEPTH):
        for name, shape in (("up", (HIDDEN, WIDTH)), ("down", (WIDTH, HIDDEN))):
            params[f"{layer}.{name}.weight"] = torch.randn(shape, generator=generator).to(torch.bfloat16) / shape[1] ** 0.5
    token = torch.randn(1, WIDTH, generator=generator).to(torch.bfloat16)
    steps = [cf.shard(decode, cf.Mesh()), *(cf.quantize(cf.shard(decode, cf.Mesh()), scheme) for scheme in OF_TORCH)]
    runs = []
    for step in steps:
        runs.append(partial(step, step.init(params, token), token))
    times = pairs(*runs, count=ROUNDS, warm=2)
    rows = [Row("a step of one token, weights in bfloat16", seconds(times, 0))]
    for column, scheme, target in ((1, "int8", 1.5), (2, "int4-g128", 2.0)):
        middle, text = ratio(times, 0, column)
        rows.append(Row(f"a step of one token: bfloat16 / {scheme}", text, f"at least {target}", middle >= target))
    return rows


def bench() -> Section:
    os.environ["COLOFUNC_NATIVE"] = "require"  # what runs where there is a compiler
    native.ready("cpu")
    level = native.limit_level(9)
    bound = least() if level >= MULTIPLIES_BFLOAT16 else []
    beside = "torchao is not installed" if find_spec("torchao") is None else f"torchao {version('torchao')}"
    rows = [*first_use(), *products("int8"), *bound, *products("int4-g128"), *whole_products(), *convolutions(), *decoding()]
    return Section(
        "Kernels in C++",
        f"weights of {SIZE} x {SIZE}, {WEIGHTS} in turn; the step has {DEPTH} layers, {WIDTH} and {HIDDEN} wide; instruction set {level} "
        f"of `native.limit_level`, {torch.get_num_threads()} thread(s), torch {torch.__version__}, {beside}, "
        f"load average {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores",
        rows,
    )
