"""Where torch's own passes over memory are kept, and what a kernel in C++ would gain: norms, scaling, merging of attention, packing, the
backward of experts' weighted sums, weights to int8 and back.

Beside each of torch's ways stands a plain loop in C++ (`passes.cpp`, compiled here for this processor), or a copy, as fast as memory is.
Results go to memory that is there already, except where a row says that torch makes a new tensor: on a host that costs several times
the pass itself, for each page of it is mapped anew. What colofunc runs is marked "ours". Behind them stands a step of attention end to end:
by the kernel that is chosen for it, and with the scores of all pairs in memory.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

import colofunc as cf
from bench import Row, Section, pairs, ratio, seconds
from bench._loops import compiled
from colofunc.ops.attention import attention
from colofunc.ops.flat import PACK
from colofunc.ops.quantizers import BUILT_IN
from colofunc.ops.squares import sum_of_squares

SIZES = (1 << 16, 1 << 20, 1 << 25)
LEAST_ELEMENTS = 1 << 22  # of one measurement
ROUNDS = 9
Ways = Mapping[str, Callable[[], Any]]


def loops() -> ctypes.CDLL:
    library = compiled("passes.cpp")
    library.squares_float32.restype = library.squares_bfloat16.restype = ctypes.c_double
    return library


def at(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


def repeated(way: Callable[[], Any], times: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(times):
            way()

    return run


def rows_of(what: str, ways: Ways, numel: int) -> list[Row]:
    """The first way's time, and each other's as a multiple of it."""
    times = max(1, LEAST_ELEMENTS // numel)
    found = pairs(*(repeated(way, times) for way in ways.values()), count=ROUNDS, warm=2)
    first, *others = ways
    rows = [Row(f"{what}: CPU seconds of {times}, {first}", seconds(found, 0))]
    for column, name in enumerate(others, 1):
        rows.append(Row(f"{what}: {name} / {first}", ratio(found, column, 0)[1]))
    return rows


def norms(library: ctypes.CDLL, numel: int) -> list[Row]:
    x = torch.randn(numel)
    narrow, count = x.bfloat16(), ctypes.c_long(numel)
    torch.testing.assert_close(library.squares_float32(at(x), count), float(x.double().square().sum()), rtol=1e-5, atol=0.0)
    torch.testing.assert_close(library.squares_bfloat16(at(narrow), count), float(narrow.double().square().sum()), rtol=1e-5, atol=0.0)
    wide: Ways = {
        "one pass in C++": lambda: library.squares_float32(at(x), count),
        "colofunc.sum_of_squares (ours)": lambda: sum_of_squares.kernel(x),
        "square to a new tensor and sum": lambda: (x * x).sum(),
        "vector_norm": lambda: torch.linalg.vector_norm(x),
        "vector_norm of rows of 1,024": lambda: torch.linalg.vector_norm(x.view(-1, 1024), dim=1),
    }
    cast: Ways = {
        "one pass in C++": lambda: library.squares_bfloat16(at(narrow), count),
        "colofunc.sum_of_squares (ours)": lambda: sum_of_squares.kernel(narrow),
        "cast and square to new tensors and sum": lambda: narrow.float().square().sum(),
        "vector_norm in float32": lambda: torch.linalg.vector_norm(narrow, dtype=torch.float32),
    }
    size = f"{numel:,} elements"
    return [*rows_of(f"norm of {size} in float32", wide, numel), *rows_of(f"norm of {size} in bfloat16", cast, numel)]


def scaling(library: ctypes.CDLL, numel: int) -> list[Row]:
    """Of unscaling and clipping."""
    x, out, there, factor = torch.randn(numel), torch.empty(numel), torch.randn(numel), torch.tensor(1.0)
    inverse, found = torch.ones(1), torch.zeros(1)
    ways: Ways = {
        "one pass in C++": lambda: library.scale(at(out), at(x), ctypes.c_float(1.0), ctypes.c_long(numel)),
        "mul into memory that is there": lambda: torch.mul(x, factor, out=out),
        "mul to a new tensor (ours, where the gradient's memory cannot be written)": lambda: x * factor,
        "a copy": lambda: out.copy_(x),
        "mul in place (ours, where it can)": lambda: there.mul_(factor),
        "torch._amp_foreach_non_finite_check_and_unscale_ in place": lambda: torch._amp_foreach_non_finite_check_and_unscale_(
            [there], found, inverse
        ),
    }
    return rows_of(f"{numel:,} elements scaled", ways, numel)


def merging(library: ctypes.CDLL, rows: int, width: int = 64, heads: int = 8) -> list[Row]:
    """A block of ring attention: (1, heads, rows, width) of queries and as many keys."""
    q, k, v = (torch.randn(1, heads, rows, width) for _ in range(3))
    out, lse = (x.contiguous() for x in attention.kernel(q, k, v, None, width**-0.5, False, 0)[:2])
    part, m = torch.randn(out.shape), torch.randn(lse.shape)

    def torchs() -> tuple[Tensor, Tensor]:
        weight = torch.sigmoid((m - lse).nan_to_num(nan=0.0))
        return torch.lerp(out, part, weight.unsqueeze(-1)), torch.logaddexp(lse, m)

    def ours(out: Tensor, lse: Tensor) -> None:
        library.merge(at(out), at(lse), at(part), at(m), ctypes.c_long(heads * rows), ctypes.c_long(width))

    want, made = torchs(), (out.clone(), lse.clone())
    ours(*made)
    for one, other in zip(made, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    scratch = out.clone(), lse.clone()
    ways: Ways = {
        "one pass in C++": lambda: ours(*scratch),
        "sigmoid, lerp and logaddexp (ours)": torchs,
        "the block's attention": lambda: attention.kernel(q, k, v, None, width**-0.5, False, 0),
    }
    return rows_of(f"merge of a block of {rows:,} rows of {heads} heads of {width}", ways, LEAST_ELEMENTS)


def packing(numel: int, count: int) -> list[Row]:
    """Many tensors into a chunk and back."""
    whole = torch.randn(numel)
    parts = [x.clone() for x in whole.view(count, -1).unbind()]
    chunk, views = torch.empty(numel), list(torch.empty(numel).view(count, -1).unbind())
    ways: Ways = {
        "a copy of the whole": lambda: chunk.copy_(whole),
        "cat into memory that is there": lambda: torch.cat(parts, out=chunk),
        "colofunc.pack, to a new tensor (ours)": lambda: PACK.kernel(parts, 0, torch.float32),
        "a new tensor, filled by a copy of the whole": whole.clone,
        "unpack: torch._foreach_copy_": lambda: torch._foreach_copy_(parts, views),
        "unpack: views (ours)": lambda: chunk.view(count, -1).unbind(),
    }
    return rows_of(f"{count} tensors of {numel // count:,} elements packed", ways, numel)


def combining(library: ctypes.CDLL, tokens: int, k: int = 2, width: int = 1024) -> list[Row]:
    """The backward of y[token] += weight * rows[choice], of choices in the order of experts."""
    choices = tokens * k
    token = torch.randperm(choices) // k
    g, rows, weight = torch.randn(tokens, width), torch.randn(choices, width), torch.rand(choices)
    drows, dweight = torch.empty(choices, width), torch.empty(choices)

    def torchs() -> tuple[Tensor, Tensor]:
        chosen = g[token]
        return chosen * weight.unsqueeze(1), (chosen * rows).sum(-1)

    def ours() -> None:
        sizes = ctypes.c_long(choices), ctypes.c_long(width)
        library.combine_backward(at(drows), at(dweight), at(g), at(rows), at(weight), at(token), *sizes)

    ours()
    for one, other in zip((drows, dweight), torchs(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)
    ways: Ways = {"one pass in C++": ours, "a gather, two products and a sum (ours)": torchs}
    return rows_of(f"backward of the weighted sum of {choices:,} rows of {width:,}", ways, drows.numel())


def in_int8(library: ctypes.CDLL, rows: int, width: int) -> list[Row]:
    """A weight in float32 to int8 with a scale for each row, and back."""
    x = torch.randn(rows, width)
    numbers, scales, out = torch.empty(rows, width, dtype=torch.int8), torch.empty(rows), torch.empty(rows, width)
    sizes = ctypes.c_long(rows), ctypes.c_long(width)
    scheme = BUILT_IN["int8"]
    packed = scheme.pack(x)

    def to_int8() -> None:
        library.quantize(at(numbers), at(scales), at(x), *sizes)

    def back() -> None:
        library.dequantize(at(out), at(numbers), at(scales), *sizes)

    to_int8()
    back()
    torch.testing.assert_close(out, packed.dequantize(), rtol=0.0, atol=1.01 * float(scales.max()))
    size = f"{rows:,} x {width:,}"
    there: Ways = {"one pass in C++": to_int8, "torch's operators (ours)": lambda: scheme.pack(x)}
    again: Ways = {"one pass in C++": back, "torch's operators, to a new tensor (ours)": packed.dequantize}
    return [*rows_of(f"{size} to int8", there, x.numel()), *rows_of(f"{size} from int8", again, x.numel())]


def clipped(passes: str) -> Callable[[], Any]:
    """A step of one layer with 16.8 million weights that clips, by SGD without momentum."""
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(4096, 4096, bias=False), torch.randn(4, 4096)
    step_fn, state = cf.train_step(cf.functional(layer), cf.adapt(torch.optim.SGD, lr=1e-3), lambda out: out.square().mean(), clip=1.0)
    os.environ["COLOFUNC_PASSES"] = passes
    step = cf.shard(step_fn, cf.Mesh())
    kept = {"state": step.init(state, x)}
    os.environ.pop("COLOFUNC_PASSES")

    def run() -> None:
        kept["state"], _ = step(kept["state"], x)

    return run


def clipping() -> list[Row]:
    ways: Ways = {"as it runs": clipped(""), "without the pass `squares`": clipped("-squares")}
    return rows_of("a step of a layer of 4,096 x 4,096 that clips", ways, LEAST_ELEMENTS)


def by_kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def by_all_pairs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What is computed where no kernel is chosen: scores of all pairs lie in memory."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    above = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
    return scores.masked_fill(above, -torch.inf).softmax(-1) @ v


def attending(length: int, width: int = 512, heads: int = 8) -> list[Row]:
    """A step of an attention block, forward and backward, in float32: by the kernel that is chosen, and without one."""
    torch.manual_seed(0)
    weights = {name: torch.randn(width, width) / width**0.5 for name in ("q", "k", "v", "out")}
    x = torch.randn(1, length, width)

    def step_of(attend: Callable[..., Tensor]) -> Callable[..., Any]:
        def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
            q, k, v = ((x @ weights[name]).view(1, length, heads, -1).transpose(1, 2) for name in ("q", "k", "v"))
            return (attend(q, k, v).transpose(1, 2).reshape(1, length, width) @ weights["out"]).square().mean()

        def step(weights: dict[str, Tensor], x: Tensor) -> Any:
            return cf.value_and_grad(loss)(weights, x)

        return step

    ours, whole = (cf.shard(step_of(attend), cf.Mesh()) for attend in (by_kernel, by_all_pairs))
    for one, other in zip(tree_leaves(ours(weights, x)), tree_leaves(whole(weights, x)), strict=True):
        torch.testing.assert_close(one.full(), other.full(), rtol=1e-3, atol=1e-5)
    what = f"a step of attention over {length:,} tokens, {heads} heads of {width // heads}"
    ways: Ways = {"by the kernel that is chosen": lambda: ours(weights, x), "scores of all pairs in memory": lambda: whole(weights, x)}
    peaks = [step.lower(weights, x).memory().peak_bytes["device"] for step in (ours, whole)]
    peak = Row(f"{what}: peak, kernel / all pairs", f"{peaks[0] / 1e6:.1f} MB / {peaks[1] / 1e6:.1f} MB = {peaks[0] / peaks[1]:.2f}")
    return [*rows_of(what, ways, LEAST_ELEMENTS), peak]


def bench() -> Section:
    os.environ["COLOFUNC_NATIVE"] = "require"  # what runs where there is a compiler
    library = loops()
    rows = [row for numel in SIZES for row in (*norms(library, numel), *scaling(library, numel))]
    rows += [*clipping(), *merging(library, 512), *merging(library, 2048), *packing(1 << 20, 64), *packing(1 << 25, 64)]
    rows += [*combining(library, 512), *combining(library, 4096), *in_int8(library, 1024, 1024), *in_int8(library, 4096, 4096)]
    rows += [*attending(1024), *attending(4096)]
    return Section(
        "Passes over memory",
        f"{torch.get_num_threads()} thread(s), torch {torch.__version__}, load average {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores",
        rows,
    )
