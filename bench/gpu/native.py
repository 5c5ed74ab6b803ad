"""Slice 13: kernels in CUDA beside what torch has: updates by narrow gradients, products with packed weights, sums over experts."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import Row
from bench.gpu.measuring import Run, side_by_side
from bench.gpu.parts import Part, Setup, Slice, at_most, not_run
from colofunc.ops import native_build
from colofunc.ops.experts import experts, experts_backward
from colofunc.ops.experts_native import add_choices, sorted_choices
from colofunc.ops.quantized import OPERATORS
from colofunc.ops.quantizers import BUILT_IN
from colofunc.ops.update import adamw_, sgd_
from colofunc.ops.update_fused import fused_adamw_, fused_sgd_
from colofunc.ops.update_lamb import lamb_direction_
from colofunc.ops.update_lion import lion_

K = 2
CALLS = 16
"""Of an operator in one measurement, which the host starts at once: it takes longer to start one than the card to run it."""
WEIGHTS = 4
"""Packed weights that are read in turn, more than the card's cache holds."""


@contextmanager
def without_kernels() -> Iterator[None]:
    with mock.patch.dict(os.environ, COLOFUNC_NATIVE="off"):
        yield


def captured(run: Run, setup: Setup) -> Run:
    """`run` as a CUDA graph, in which the host's time does not count; on a card that is pretended as it is."""
    run()
    if setup.without("a card"):
        return run
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def compared(what: str, runs: dict[str, Run], aims: dict[str, float], count: int, nbytes: float, setup: Setup) -> list[Row]:
    """What `ours` takes, and its time beside that of each of the others; `nbytes` that a call of ours moves."""
    graphs = {name: captured(run, setup) for name, run in runs.items()}
    taken = {name: seconds / count for name, seconds in side_by_side(graphs, setup.sizes.repeats).items()}
    rows = [Row(f"{what}, ours", f"{1e6 * taken['ours']:.1f} microseconds, {nbytes / taken['ours'] / 1e9:,.0f} GB/s")]
    for name, aim in aims.items():
        ratio = taken["ours"] / taken[name]
        rows.append(at_most(f"{what}, ours / {name}", ratio, aim, f"{ratio:.3f} ({1e6 * taken[name]:.1f} microseconds)"))
    return rows


def built(setup: Setup) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        path = native_build.build(Path(folder), native_build.cuda(native_build.architectures()))
        seconds = time.perf_counter() - began
        text = f"{seconds:.1f} s, {path.stat().st_size / 1e6:.1f} MB, {len(os.sched_getaffinity(0))} cores"
    return [at_most("compile and link the library for this card", seconds, 30.0, text)]


# ---- updates ----


def updates(setup: Setup) -> list[Row]:
    numel, dtype = setup.sizes.updated, setup.sizes.dtype
    p, m, v = (torch.zeros(numel, device="cuda") for _ in range(3))
    g = torch.full((numel,), 1e-3, dtype=dtype).to("cuda")
    step, lr = torch.tensor(3.0).to("cuda"), torch.tensor(1e-3, dtype=torch.float64).to("cuda")
    adam, sgd = (0.9, 0.999, 1e-8, 0.1, True), (0.9, 0.0, 0.1, True)

    def lion_in_pieces() -> None:
        with without_kernels():
            lion_.kernel(p, g, m, lr, 0.9, 0.99, 0.1)

    def lamb() -> None:
        lamb_direction_.kernel(p, g, m, v, step, 0.9, 0.999, 1e-6, 0.1)

    def lamb_in_pieces() -> None:
        with without_kernels():
            lamb()

    def cast_and_adamw() -> None:
        fused_adamw_([p], [g.float()], [m], [v], [], step, lr, *adam, False, None)

    def cast_and_sgd() -> None:
        fused_sgd_([p], [g.float()], [m], lr, 0.9, 0.1, True, False, None)

    torchs = "a cast and torch's fused kernel"
    every: dict[str, tuple[Run, str, Run, float, int]] = {
        "AdamW": (lambda: adamw_.kernel(p, g, m, v, step, lr, *adam), torchs, cast_and_adamw, 0.85, 26),
        "SGD with momentum": (lambda: sgd_.kernel(p, g, m, step, lr, *sgd), torchs, cast_and_sgd, 0.8, 18),
        "Lion": (lambda: lion_.kernel(p, g, m, lr, 0.9, 0.99, 0.1), "torch's operators", lion_in_pieces, 0.4, 18),
        "LAMB's direction and norms": (lamb, "torch's fused kernel and operators", lamb_in_pieces, 0.8, 38),
    }
    rows = []
    for name, (mine, other, theirs, aim, nbytes) in every.items():
        what = f"{name}, {numel:,} elements, gradient in {str(dtype).removeprefix('torch.')}"
        rows += compared(what, {"ours": mine, other: theirs}, {other: aim}, 1, nbytes * numel, setup)
    return rows


# ---- products ----


def products(scheme: str, setup: Setup) -> list[Row]:
    """A step of few tokens: `WEIGHTS` matrices in turn."""
    rows_of, columns = setup.sizes.packed
    generator = torch.Generator().manual_seed(0)
    wide = [torch.randn(rows_of, columns, generator=generator) / columns**0.5 for _ in range(WEIGHTS)]
    packs = [BUILT_IN[scheme].pack(w) for w in wide]
    parts = [[part.to("cuda") for part in pack.parts] for pack in packs]
    plain = [w.to(setup.sizes.dtype).to("cuda") for w in wide]
    linear, rows = OPERATORS[packs[0].form].linear.kernel, []
    packed_bytes = sum(part.nbytes for part in packs[0].parts)
    for count in (1, 8, 16):
        x = torch.randn(count, columns, generator=generator).to(setup.sizes.dtype).to("cuda")
        runs: dict[str, Run] = {
            "ours": in_turn(lambda i, x=x: linear(x, *parts[i], None)), "F.linear": in_turn(lambda i, x=x: F.linear(x, plain[i])),
        }  # fmt: skip
        aims = {"F.linear": 0.75 if scheme == "int8" else 0.5}
        what = f"{scheme}, {count} rows, ({rows_of}, {columns})"
        other = setup.without("a card") or (torchs_int8(x, parts) if scheme == "int8" else torchs_int4(x, parts))
        name = f"torch's {scheme.partition('-')[0]} product"
        if isinstance(other, str):
            rows.append(not_run(f"{what}, ours / {name}", other))
        else:
            runs[name], aims[name] = in_turn(other), 1.05
        rows += compared(what, runs, aims, CALLS, packed_bytes + x.nbytes + 2 * count * rows_of, setup)
    return rows


def in_turn(call: Callable[[int], Tensor]) -> Run:
    def run() -> None:
        for k in range(CALLS):
            call(k % WEIGHTS)

    return run


def torchs_int8(x: Tensor, parts: Sequence[Sequence[Tensor]]) -> Callable[[int], Tensor] | str:
    """torch._weight_int8pack_mm, or why it does not run here."""
    scales = [scale.to(x.dtype) for _, scale in parts]

    def call(i: int) -> Tensor:
        return torch._weight_int8pack_mm(x, parts[i][0], scales[i])

    return tried(call)


def torchs_int4(x: Tensor, parts: Sequence[Sequence[Tensor]]) -> Callable[[int], Tensor] | str:
    """torch._weight_int4pack_mm with groups of 128, or why it does not run here. What it computes is not looked at, only its time."""
    try:
        tiled = [torch._convert_weight_to_int4pack(data, 8) for data, _, _ in parts]
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120]}"
    scales = [torch.stack((scale, scale), -1).transpose(0, 1).contiguous().to(torch.bfloat16) for _, scale, _ in parts]
    return tried(lambda i: torch._weight_int4pack_mm(x, tiled[i], 128, scales[i]))


def tried(call: Callable[[int], Tensor]) -> Callable[[int], Tensor] | str:
    try:
        call(0)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120]}"
    return call


# ---- experts ----


def sums(setup: Setup) -> list[Row]:
    choices, count, d, _ = setup.sizes.grouped
    tokens, dtype = choices // K, setup.sizes.dtype
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(0, count, (tokens, K), generator=generator).to("cuda")
    rows = torch.randn(choices, d, generator=generator).to(dtype).to("cuda")
    weight = torch.rand(tokens, K, generator=generator).to(dtype).to("cuda")
    total = torch.zeros(tokens, d, device="cuda")
    order, _, _, place = sorted_choices(index, count)

    def sort_torch() -> None:
        with without_kernels():
            sorted_choices(index, count)

    def with_index_put() -> None:
        term = rows.float() * weight.flatten()[order, None].float()
        total.index_put_((order // K,), term, accumulate=True)

    def with_index_add() -> None:
        total.index_add_(0, order // K, rows.float() * weight.flatten()[order, None].float())

    what = f"{tokens:,} tokens, {K} of {count} experts, width {d:,}"
    runs: dict[str, Run] = {"ours": lambda: sorted_choices(index, count), "torch.sort": sort_torch}
    found = compared(f"sort, {what}", runs, {"torch.sort": 0.5}, 1, 40.0 * choices, setup)
    if place is None:
        return [*found, not_run(f"weighted sum, {what}", setup.without("a card") or "these sizes have no kernel")]
    runs = {
        "ours": lambda: add_choices(total, rows, place, weight, 0), "index_put_": with_index_put, "index_add_": with_index_add,
    }  # fmt: skip
    nbytes = rows.nbytes + 2.0 * total.nbytes
    return found + compared(f"weighted sum, {what}", runs, {"index_put_": 0.33, "index_add_": 0.6}, 1, nbytes, setup)


def layer(setup: Setup) -> list[Row]:
    """Forward and backward with and without sorts and sums of our own; products are the same."""
    choices, count, d, f = setup.sizes.grouped
    tokens, dtype = choices // K, setup.sizes.dtype
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(tokens, d, generator=generator).to(dtype).to("cuda") for _ in range(2))
    up, down = (torch.empty(shape, dtype=dtype, device="cuda").fill_(0.01) for shape in ((count, 2 * f, d), (count, d, f)))
    index = torch.randint(0, count, (tokens, K), generator=generator).to("cuda")
    weight = torch.rand(tokens, K, generator=generator).to(dtype).to("cuda")
    given = (x, index, weight, up, down, None, None, "silu", True, False)

    def ours() -> None:
        experts.kernel(*given, 1.0)
        experts_backward.kernel(g, *given, True, 1.0)

    def theirs() -> None:
        with without_kernels():
            ours()

    taken = side_by_side({"with": ours, "without": theirs}, max(1, setup.sizes.repeats // 4), warm=1)
    ratio = taken["with"] / taken["without"]
    text = f"{ratio:.3f} ({1e3 * taken['with']:.3f} ms)"
    return [at_most(f"a layer of {count} experts, forward and backward, with / without sorts and sums of our own", ratio, 1.0, text)]


SLICE = Slice(13, "Kernels in CUDA beside torch's", (
    Part("build", built, ("a card", "CUDA kernels")),
    Part("updates", updates, ("CUDA kernels",)),
    Part("int8", lambda setup: products("int8", setup), ("CUDA kernels",)),
    Part("int4", lambda setup: products("int4-g128", setup), ("CUDA kernels",)),
    Part("sums over experts", sums, ("CUDA kernels",)),
    Part("a layer of experts", layer, ("CUDA kernels",)),
))  # fmt: skip
