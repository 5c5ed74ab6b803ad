"""Experts and grouped products on CUDA are records: chosen by guard and cost, counted by the accountant and the clock."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import colofunc as cf
from colofunc.ops.built_in import CUDA_KERNELS
from colofunc.ops.experts import experts
from colofunc.ops.grouped import grouped_mm
from colofunc.ops.kernels import Kernel, KernelCall, bound, choose, describe, table_of
from tests.live_bytes import Held

H100 = cf.Mesh(topology="8xh100")
TABLE = table_of(CUDA_KERNELS)


def layer(dtype: torch.dtype, experts: int, d: int, f: int, tokens: int, k: int, *form: Any) -> dict[str, tuple[Any, ...]]:
    """Calls of all six operators, on tensors without memory. form: gated, bias, act."""

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    gated, bias, act = form or (True, False, "silu")
    hidden = (1 + gated) * f
    biases = (empty(experts, hidden), empty(experts, d)) if bias else (None, None)
    x, offs = empty(tokens, d), empty(experts, dtype=torch.int32)
    weights = (empty(experts, hidden, d), empty(experts, d, f), *biases)
    routed = (x, empty(tokens, k, dtype=torch.int64), empty(tokens, k), *weights, act, gated)
    return {
        "colofunc.experts": routed,
        "colofunc.experts_backward": (x, *routed),
        "colofunc.experts_input_gradients": (x, *routed),
        "colofunc.experts_weight_gradients": (empty(tokens, k, hidden), empty(tokens, k, f), x, *routed),
        "colofunc.grouped_mm": (x, empty(experts, d, f), offs),
        "colofunc.grouped_mm_dw": (x, empty(tokens, f), offs),
    }


def takers(target: str, args: tuple[Any, ...], capability: tuple[int, int] = (9, 0)) -> tuple[list[Kernel], KernelCall]:
    call = describe(target, args, capability)
    return [kernel for kernel in TABLE[target, "cuda"] if kernel.guard(call)], call


@pytest.mark.parametrize(("dtype", "sizes"), [
    (torch.bfloat16, (8, 512, 1792, 1000, 2)),
    (torch.bfloat16, (32, 256, 96, 5000, 1, False, True, "gelu")),
    (torch.float32, (4, 512, 768, 500, 2, True, True, "interleaved_swiglu:1.7:7.0")),
])  # fmt: skip
def test_workspace_is_what_kernels_hold(dtype: torch.dtype, sizes: tuple[Any, ...]) -> None:
    """At least what is alive, and no more than a quarter above."""
    for target, given in layer(dtype, *sizes).items():
        args = bound(target, given, {})
        kernels, call = takers(target, args)
        assert len(kernels) == (2 if dtype == torch.bfloat16 else 1)
        for kernel in kernels:
            with Held(args) as held:
                made = kernel.fn(*args)
            results = sum(x.nbytes for x in tree_leaves(made))
            measured, counted = held.peak_bytes - results, kernel.workspace_bytes(call)
            assert measured <= counted <= 1.25 * measured + 1024, (target, kernel.fn.__name__, measured, counted)


@pytest.mark.parametrize(("capability", "width", "name"), [
    ((9, 0), 96, "grouped_experts"), ((9, 0), 92, "tiled_experts"), ((8, 0), 96, "tiled_experts"), ((12, 0), 96, "tiled_experts"),
])  # fmt: skip
def test_a_call_gets_torch_s_grouped_product_where_there_is_one(capability: tuple[int, int], width: int, name: str) -> None:
    args = bound("colofunc.experts", layer(torch.bfloat16, 8, 64, width, 100, 2)["colofunc.experts"], {})
    kernels, call = takers("colofunc.experts", args, capability)
    found = choose(kernels, call)
    assert found is not None
    assert found.fn.__name__ == name


def test_a_plan_counts_the_seconds_and_the_memory_of_experts() -> None:
    def step(x: Tensor, index: Tensor, weight: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return experts.apply(x, index, weight, up, down, None, None, "silu", True, False)

    shapes = ((4096, 512), (4096, 2), (4096, 2), (8, 2048, 512), (8, 512, 1024))
    operands = [cf.abstract(shape, torch.int64 if k == 1 else torch.bfloat16) for k, shape in enumerate(shapes)]
    low = cf.shard(step, H100).lower(*operands)
    (node,) = (node for node in low.program.nodes if node.target == "colofunc.experts")
    assert node.kernel is not None
    assert node.kernel.name == "grouped_experts"
    # 8,192 rows, three products of 512 x 1024 at 60 % of 989.5 TFLOP/s; the rest is memory and launches.
    assert node.kernel.seconds > 6 * 8192 * 512 * 1024 / (0.6 * 989.5e12)
    assert low.memory().kinds()["workspaces"] == node.kernel.workspace_bytes > 8192 * 2 * 1024 * 2
    assert low.cost().compute_s >= node.kernel.seconds


def test_a_grouped_product_is_planned_and_written_with_the_same_kernel() -> None:
    x, w, offs = cf.abstract((256, 64), torch.bfloat16), cf.abstract((4, 64, 32), torch.bfloat16), cf.abstract((4,), torch.int32)
    low = cf.shard(lambda *args: grouped_mm.apply(*args), H100).lower(x, w, offs)
    (node,) = (node for node in low.program.nodes if node.target == "colofunc.grouped_mm")
    assert node.kernel is not None and node.kernel.name == "grouped"
