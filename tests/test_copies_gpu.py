"""What only a GPU can say: copies run beside compute, host memory is pinned, the budget holds, and the numbers are the CPU's."""

import gc
from typing import Any

import pytest
import torch
from test_offload import training

import colofunc as cf
from colofunc.executors.copies import Copier
from colofunc.executors.pools import Pool, in_tier, pinned_like
from colofunc.mesh.device import device_of
from colofunc.program.passing import Passing, SizeClass
from colofunc.testing.trees import compare

pytestmark = pytest.mark.gpu


def on_gpu(tree: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda x: x.cuda() if isinstance(x, torch.Tensor) else x, tree)


ROUNDING = 1 << 20
"""Bytes: a small allocation is rounded up to 512, and a step of these has hundreds."""


def held_before() -> int:
    """Bytes on the card that no step counts: what lay there, and the workspace that a first product makes."""
    gc.collect()
    torch.ones(8, 8, dtype=torch.float64, device="cuda") @ torch.ones(8, 8, dtype=torch.float64, device="cuda")
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def pinned_pool(nbytes: int, count: int) -> Pool:
    pool = Pool(Passing((SizeClass(nbytes, count),), 0, frozenset()))
    pool.allocate(pinned=True)
    return pool


def test_the_pool_and_state_on_the_host_are_pinned() -> None:
    pool, x = pinned_pool(1 << 20, 2), torch.randn(64, 64, device="cuda").t()
    there = pool.like(x)
    assert there.is_pinned() and there.stride() == x.stride()
    own = pinned_like(x)
    assert own.is_pinned() and own.stride() == x.stride() and torch.equal(own.copy_(x), x.cpu())
    gpu = torch.device("cuda", torch.cuda.current_device())
    assert in_tier(x, "host", gpu).is_pinned() and in_tier(own, "host", gpu) is own and in_tier(own, "device", gpu).is_cuda
    assert device_of(cf.Mesh(device="cuda")) == gpu and device_of(cf.Mesh(device="cpu")).type == "cpu"


def test_what_goes_out_and_comes_back_is_the_same_while_buffers_go_round() -> None:
    """Two buffers for a hundred values in flight one behind the other; each is written to as soon as it is free."""
    copier, pool, device = Copier(), pinned_pool(1 << 24, 2), torch.device("cuda")
    found, wanted = [], []
    for k in range(100):
        x = torch.full((1 << 22,), float(k), device=device)
        there = copier.start("to_host", (x,), device, pool).wait()
        x.fill_(-1.0)  # the device has waited, so this is behind the copy
        back = copier.start("to_device", (there,), device).wait()
        del there
        found.append(back[::4097].sum())
        wanted.append(float(k) * len(range(0, 1 << 22, 4097)))
    copier.finish()
    assert [float(x) for x in found] == wanted and pool.used == 0


def test_the_host_waits_for_what_it_reads_and_writes() -> None:
    copier, device = Copier(), torch.device("cuda")
    state = pinned_like(torch.zeros(1 << 22)).fill_(1.0)
    for k in range(20):
        copy = copier.start("to_device", (state,), device).wait()
        copier.settle((), (state,))
        state.add_(1.0)
        assert float(copy.mean()) == float(k + 1)
        copier.start("put", (state, copy + 1.0), device).wait()
        copier.settle((state,))
        assert float(state[0]) == float(state[-1]) == float(k + 2)
    copier.finish()


def test_copies_run_beside_compute() -> None:
    """A copy and a product that take about as long take less than both together; of many tries the best, no time of its own."""
    copier, device, pool = Copier(), torch.device("cuda"), pinned_pool(1 << 28, 1)
    x, a = torch.randn(1 << 26, device=device), torch.randn(4096, 4096, device=device)

    def seconds(copies: bool, products: int) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        copying = copier.start("to_host", (x,), device, pool) if copies else None
        for _ in range(products):
            a @ a
        if copying is not None:
            copying.wait()
        end.record()
        copier.finish()
        end.synchronize()
        return begin.elapsed_time(end)

    seconds(True, 1)
    one, copy = (min(seconds(*what) for _ in range(5)) for what in ((False, 8), (True, 0)))
    products = max(1, round(8 * copy / one))
    both, alone = (min(seconds(copies, products) for _ in range(5)) for copies in (True, False))
    assert both < 0.8 * (copy + alone)


@pytest.mark.parametrize("share", [0.7, 0.4])
def test_a_step_on_the_gpu_gives_the_numbers_of_the_cpu_within_its_budget(share: float) -> None:
    step, state, batch = training(layers=3, d=64, rows=256)
    plain = cf.shard(step, cf.Mesh(topology="a100-40g"))
    whole = plain.lower(state, batch).memory().peak_bytes["device"]
    staged = cf.offload(cf.shard(step, cf.Mesh(topology="a100-40g", device="cuda")), budget=int(share * whole))
    before = held_before()
    placed, there = staged.init(on_gpu(state), on_gpu(batch)), on_gpu(batch)
    low = staged.lower(placed, there)
    host = [x for x in torch.utils._pytree.tree_leaves(placed) if isinstance(x, cf.DTensor) and "@host" in str(x.spec)]
    assert all(part.is_pinned() for x in host for part in x.parts) and (host or share > 0.5)
    placed, _ = staged(placed, there)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        placed, _ = staged(placed, there)
    taken, counted = torch.cuda.max_memory_allocated() - before, low.memory().peak_bytes["device"]
    assert taken <= 1.03 * counted + ROUNDING, f"{taken:,} bytes, {counted:,} planned"
    for _ in range(4):
        state, _ = step(state, batch)
    compare(placed, state)
