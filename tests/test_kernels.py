"""Kernels of an operator for a device: given by plugins, chosen by guard and cost, counted by the clock and the accountant."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from colofunc_plugins import gather_kv, ring, ulysses
from pretended import Machine, on_card
from torch import Tensor

import colofunc as cf
from colofunc.executors.compiled import compile_segments
from colofunc.executors.simulated import SimulatedProgram
from colofunc.ops.kernels import choose, describe, run_of
from colofunc.plugins import build_registry
from colofunc.program.ir import Program
from colofunc.program.passes.kernels import capability_on
from colofunc.program.positions import Positions

H100 = cf.Mesh(topology="8xh100:datasheet")


@pytest.fixture(autouse=True)
def built_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where torch was built without CUDA."""
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)


def attend(params: list[Tensor], x: Tensor) -> Tensor:
    b, s, d = x.shape
    q, k, v = (F.linear(x, w).view(b, s, 4, 8).transpose(1, 2) for w in params)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y.transpose(1, 2).reshape(b, s, d).float().pow(2).mean()


def step(params: list[Tensor], x: Tensor) -> tuple[list[Tensor], Tensor]:
    loss, grads = cf.value_and_grad(attend)(params, x)
    return grads, loss


def arguments(dtype: torch.dtype = torch.bfloat16, rows: int = 64) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(0)
    return [(torch.randn(32, 32) / 4).to(dtype) for _ in range(3)], torch.randn(2, rows, 32).to(dtype)


# ---- the hook ----


def kernel(name: str, seconds: float, fits: Any, made: list[str], target: str = "aten.gelu.default") -> cf.ext.Kernel:
    def fn(x: Tensor, approximate: str) -> Tensor:
        made.append(f"{name} {approximate}")
        return torch.ops.aten.gelu.default(x, approximate=approximate)

    fn.__name__ = name
    return cf.ext.Kernel(target, "cuda", fits, lambda call, rates: seconds, lambda call: 4096, fn)


def giving(*kernels: cf.ext.Kernel) -> Any:
    made = ModuleType("giving")
    made.colofunc_kernels = cf.hookimpl(lambda: list(kernels))  # type: ignore[attr-defined]
    return made


def two(x: Tensor) -> Tensor:
    return F.gelu(x[:, :8], approximate="tanh") + F.gelu(x[:, :3]).sum()


def test_a_plugin_s_kernel_is_called_where_its_guard_agrees_and_nothing_is_quicker() -> None:
    made: list[str] = []
    wide = kernel("wide", 3e-6, lambda call: call["self"].shape[1] > 4, made)
    slow = kernel("slow", 5e-6, lambda call: call["approximate"] == "tanh", made)
    with Machine() as machine:
        run = cf.shard(two, cf.Mesh(device="cuda"), plugins=[giving(slow, wide)])
        x = torch.randn(4, 9)
        found = run(on_card(machine, x)).full().cpu()
    assert made == ["wide tanh"], "the narrow one is no plugin's"
    torch.testing.assert_close(found, two(x))


def test_on_the_cpu_and_for_other_devices_nothing_changes() -> None:
    made: list[str] = []
    run = cf.shard(F.gelu, cf.Mesh(), plugins=[giving(kernel("any", 0.0, lambda call: True, made))])
    x = torch.randn(4, 9)
    torch.testing.assert_close(run(x).full(), F.gelu(x))
    assert not made


def test_the_plan_counts_the_seconds_and_the_memory_of_the_kernel_that_a_call_gets() -> None:
    x = torch.randn(4, 512)
    made: list[str] = []
    plain = cf.shard(F.gelu, H100).lower(x)
    low = cf.shard(F.gelu, H100, plugins=[giving(kernel("counted", 0.25, lambda call: True, made))]).lower(x)
    assert low.cost().seconds == pytest.approx(0.25)
    assert low.lanes().end_s == pytest.approx(0.25)
    assert low.memory().peak_bytes["device"] == plain.memory().peak_bytes["device"] + 4096
    assert low.memory().kinds()["workspaces"] == 4096
    assert "counted" in str(low.memory())
    elsewhere = cf.shard(F.gelu, cf.Mesh(topology="ideal"), plugins=[giving(kernel("counted", 0.25, lambda call: True, made))]).lower(x)
    assert "workspaces" not in elsewhere.memory().kinds()


def test_of_kernels_that_cost_the_same_the_project_s_own_is_taken() -> None:
    own = build_registry().kernels["colofunc.attention", "cuda"]
    cost_s = own[0].cost_s
    mine = cf.ext.Kernel("colofunc.attention", "cuda", lambda call: True, lambda call, rates: cost_s(call, rates), lambda call: 0, len)
    registry = build_registry((giving(mine),))
    q = torch.empty(1, 2, 16, 8, dtype=torch.bfloat16, device="meta")
    call = describe("colofunc.attention", (q, q, q, None, 1.0, True, 0, 0.0, None, 0, None, None, [], [], None, None, None, None), (9, 0))
    assert choose(registry.kernels["colofunc.attention", "cuda"], call) is own[0]


# ---- an operator of a plugin, with its kernel ----


@pytest.fixture(scope="module")
def decayed() -> Any:
    """The file of the example, as `plugins=[module]` takes it."""
    file = Path(__file__).parents[1] / "examples" / "scan_plugin" / "colofunc_decayed.py"
    spec = importlib.util.spec_from_file_location("colofunc_decayed", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def one_by_one(x: Tensor, decay: float) -> Tensor:
    y = x.clone()
    for t in range(1, x.shape[-1]):
        y[..., t] += decay * y[..., t - 1]
    return y


def test_the_example_s_operator_is_what_it_says(decayed: Any) -> None:
    x = torch.randn(2, 3, 37, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(decayed.decayed_sum(x, 0.9), one_by_one(x.detach(), 0.9), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(decayed.doubled(x, 0.9), one_by_one(x.detach(), 0.9), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda x: decayed.decayed_sum(x, 0.9), x)
    assert cf.testing.check_strategies(None, decayed.decayed_sum, cf.testing.sample(torch.randn(4, 6, dtype=torch.float64), 0.5))


@pytest.mark.parametrize("longer", [0, -1])
def test_the_example_s_kernel_runs_on_a_card_where_its_guard_agrees(longer: int, decayed: Any) -> None:
    x = torch.randn(3, decayed.LONG + longer, dtype=torch.float64)
    with Machine() as machine:
        run = cf.shard(lambda x: decayed.decayed_sum(x, 0.9), cf.Mesh(device="cuda"), plugins=[decayed])
        found = run(on_card(machine, x)).full().cpu()
        passes, products = machine.launches["aten.add_.Tensor"], machine.launches["aten.mm.default"]
    assert (passes, products) == ((9, 0) if longer == 0 else (0, 1))
    torch.testing.assert_close(found, one_by_one(x, 0.9), rtol=1e-10, atol=1e-10)


def test_the_plan_counts_the_example_s_kernel_forward_and_backward(decayed: Any) -> None:
    def forgetting(x: Tensor) -> Tensor:
        return decayed.decayed_sum(x, 0.9)

    long, short = torch.randn(64, decayed.LONG), torch.randn(64, decayed.LONG - 1)
    low = cf.shard(forgetting, H100, plugins=[decayed]).lower(long)
    (node,) = low.program.nodes
    assert node.target == "scan.decayed_sum" and node.kernel is not None and node.kernel.name == "doubled"
    assert low.cost().seconds == pytest.approx(node.kernel.seconds)
    assert low.memory().kinds()["workspaces"] == node.kernel.workspace_bytes == long.nbytes
    both = cf.shard(lambda x: cf.value_and_grad(lambda x: forgetting(x).square().sum())(x), H100, plugins=[decayed]).lower(long)
    kernels = [node.kernel for node in both.program.nodes if node.target == "scan.decayed_sum"]
    assert [kernel.name for kernel in kernels] == ["doubled", "doubled"]
    for mesh, x in ((H100, short), (cf.Mesh(), long)):
        (other,) = cf.shard(forgetting, mesh, plugins=[decayed]).lower(x).program.nodes
        assert other.target == "scan.decayed_sum" and other.kernel is None


# ---- attention ----


def nodes_of(program: Program) -> list[Any]:
    return [node for node in program.nodes if "attention" in node.target]


def test_an_8b_layer_is_planned_with_flash_its_seconds_and_its_memory() -> None:
    def layer(x: Tensor) -> Tensor:
        q, k, v = x.split((4096, 1024, 1024), -1)
        q, k, v = (y.unflatten(-1, (-1, 128)).transpose(1, 2) for y in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).float().sum()

    x = cf.abstract((1, 8192, 6144), torch.bfloat16)
    low = cf.shard(lambda x: cf.value_and_grad(layer)(x), H100).lower(x)
    forward, backward = nodes_of(low.program)
    assert (forward.kernel.name, backward.kernel.name) == ("flash", "flash_backward")
    # Half of the pairs, two products of 128 each: 550 GFLOP; at 60 % of 989.5 TFLOP/s.
    assert forward.kernel.seconds == pytest.approx(4 * 32 * 8192 * 8193 / 2 * 128 / (0.6 * 989.5e12), rel=0.01)
    assert backward.kernel.seconds == pytest.approx(2.5 * forward.kernel.seconds, rel=0.01)
    # A float32 copy of dQ and a number a row; dK and dV of each query head in bfloat16.
    assert backward.kernel.workspace_bytes == 4 * 32 * 8192 * 129 + 2 * 32 * 8192 * 128 * 2
    report = low.memory()
    at = low.program.nodes.index(backward)
    assert report.by_kind["device"]["workspaces"][at] == backward.kernel.workspace_bytes
    assert sum(node.kernel.seconds for node in (forward, backward)) < low.cost().compute_s


@pytest.mark.parametrize(("plan", "dtype", "forward", "backward"), [
    (ring, torch.bfloat16, "_flash_attention_forward", "_flash_attention_backward"),
    (ulysses, torch.bfloat16, "_flash_attention_forward", "_flash_attention_backward"),
    (gather_kv, torch.bfloat16, "_flash_attention_forward", "_flash_attention_backward"),
    (gather_kv, torch.float32, "_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward"),
])  # fmt: skip
def test_parts_of_a_sequence_reach_torch_s_kernels_and_nobody_waits(plan: Any, dtype: torch.dtype, forward: str, backward: str) -> None:
    params, x = arguments(dtype)
    wanted, _ = step([w.double() for w in params], x.double())
    with Machine() as machine:
        run = cf.shard(step, cf.Mesh(cp=2, device="cuda"), plan("cp"), auto=False, donate=())
        there = on_card(machine, params), on_card(machine, x)
        run(*there)
        machine.forget_counts()
        grads, _ = run(*there)
        assert not machine.waits, machine.places
        called = {name.split(".")[1] for name in machine.launches if "attention" in name}
        found = [g.full().cpu() for g in grads]
    assert called == {forward, backward}
    bound = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for got, right in zip(found, wanted, strict=True):
        assert float((got.double() - right).abs().max() / right.abs().max()) < bound


def test_where_a_rank_stands_is_known_on_the_host() -> None:
    """Of the chain of operators that local code makes of it, also once results are written in place."""
    low = cf.shard(step, cf.Mesh(cp=4), gather_kv("cp"), auto=False).lower(*arguments())
    offsets = [node.args[10 if node.target == "colofunc.attention" else 13] for node in nodes_of(low.program)]
    assert len(offsets) == 2
    for offset in offsets:
        for rank in range(4):
            known = Positions(low.program, lambda axes, rank=rank: rank)
            made = known.tensor(offset.id)
            assert made is not None
            assert run_of(made) == known.run(offset.id) == (rank, 4)
        unknown = Positions(low.program, lambda axes: None)
        assert unknown.run(offset.id) is None


def test_devices_of_topologies_are_cuda_s_or_not() -> None:
    found = {name: capability_on(cf.topology(name)) for name in ("8xh200", "8xa100-80g", "8xv100", "ideal", "gloo-cpu", "8xmi300x")}
    assert found == {"8xh200": (9, 0), "8xa100-80g": (8, 0), "8xv100": (7, 0), "ideal": None, "gloo-cpu": None, "8xmi300x": None}


@pytest.mark.parametrize("microbatches", [1, 2])
def test_compiled_segments_and_loops_do_not_hide_where_a_rank_stands(microbatches: int) -> None:
    params, x = arguments()
    run = cf.accumulate(cf.shard(step, cf.Mesh(cp=2), gather_kv("cp"), auto=False, donate=()), microbatches=microbatches)
    program = run.lower(params, x).program
    segmented, functions = compile_segments(program, "eager")
    assert functions
    with Machine():
        compiled = SimulatedProgram(segmented, cf.Mesh(cp=2), functions, whole=program)
        count = len([i for i in program.inputs if i not in program.constants])
        written = compiled.write(((0, 1),) * count, torch.device("cuda", 0))
    called = [line.split(" = ")[1].split("(")[0] for line in written.lines if "flash" in line or "biased" in line]
    assert sorted(set(called)) == ["flash", "flash_backward"]


# ---- the search ----


def seconds_of(low: Any) -> dict[str, float]:
    """What the search has counted for one call of attention and its backward."""
    return {d.target: d.compute_s for d in low.plan.decisions if "attention" in d.target}


@pytest.mark.parametrize("size", [1, 2])
def test_the_search_counts_the_kernel_that_the_clock_counts(size: int) -> None:
    """Dropout has only the block-wise kernel, many times slower than what the roofline says."""
    q = cf.abstract((2, 16, 2048, 64), torch.bfloat16)

    def dropped(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, is_causal=True, dropout_p=0.1).float().pow(2).mean()

    low = cf.shard(lambda q: cf.value_and_grad(dropped)(q), cf.Mesh(dp=size, topology="8xh100")).lower(q)
    counted = {node.target: node.kernel.seconds for node in nodes_of(low.program)}
    assert len(counted) == 2
    assert seconds_of(low) == pytest.approx(counted, rel=0.1)  # the clock counts every launch


@pytest.mark.parametrize("plan", [ring, ulysses, gather_kv])
def test_the_search_counts_kernels_of_patterns(plan: Any) -> None:
    """Of one rank: within a third of what the clock counts, which shows kernels where the first rank stands."""
    params, x = arguments(rows=65536)
    low = cf.shard(step, cf.Mesh(cp=4, topology="8xh100"), plan("cp"), auto=False).lower(params, x)
    counted = sum(node.kernel.seconds for node in nodes_of(low.program))
    assert sum(seconds_of(low).values()) == pytest.approx(counted, rel=0.34)
