"""The pool of host memory: as many buffers as the program needs at one time, taken once, and never given out twice."""

import gc
import weakref
from typing import Any

import pytest
import torch
from colofunc_plugins import zero
from test_offload import one, peak, training

import colofunc as cf
from colofunc.compiler.observation import arguments_of
from colofunc.executors.launch import launch
from colofunc.executors.pools import Pool
from colofunc.executors.simulated import SimulatedProgram
from colofunc.program.facts import is_copy
from colofunc.program.passing import PAGE_BYTES, Passing, SizeClass, buffer_bytes, passing


def filled(*sizes: tuple[int, int], ranks: int = 1) -> Pool:
    pool = Pool(Passing(tuple(SizeClass(n, count) for n, count in sizes), 0, frozenset()), ranks)
    pool.allocate()
    return pool


def offloaded(share: float = 0.6, layers: int = 2, d: int = 24) -> tuple[Any, Any]:
    step, *args = training(layers, d, rows=32)
    whole = peak(cf.shard(step, one()), *args)
    return cf.offload(cf.shard(step, one()), budget=int(whole * share)), args


def running(staged: Any) -> Pool:
    """The pool of the one program that a step has compiled."""
    (ready,) = (r for some in staged.compiler._ready.values() for r in some if "run" in r.__dict__)
    return ready.run.pool


@pytest.mark.parametrize("steps", [0, 8, 4, 2, 1])
def test_sizes_are_whole_pages_and_rounded_by_so_much_at_most(steps: int) -> None:
    for nbytes in (1, 4096, 4097, 10_000, 1 << 20, (1 << 20) + 1, 3_333_333, (1 << 30) + 7):
        size = buffer_bytes(nbytes, steps)
        assert size >= nbytes and size % PAGE_BYTES == 0 and buffer_bytes(size, steps) == size
        assert size - nbytes < max(PAGE_BYTES, nbytes / steps if steps else 0)


def test_a_buffer_is_free_when_nobody_has_a_view_of_it() -> None:
    pool = filled((4096, 1))
    x = pool.like(torch.ones(4, 5).t())
    assert x.stride() == (1, 5) and x.untyped_storage().nbytes() == 80 and x.untyped_storage().data_ptr() % PAGE_BYTES == 0
    view = x[1:]
    del x
    with pytest.raises(cf.CapacityError, match=r"no buffer left for 8 B: all 1 of 4 KiB are in use \(of 1 x 4 KiB\)"):
        pool.empty(8)
    del view
    pool.empty(8)
    assert pool.used == 0 and pool.most == {4096: 1} and pool.growths == 1


def test_what_comes_back_is_spoiled_and_what_is_too_large_has_no_buffer() -> None:
    pool = filled((4096, 1), (8192, 1), ranks=2)
    assert pool.nbytes == 2 * (4096 + 8192)
    pool.spoils = True
    x = pool.like(torch.zeros(3)).zero_()
    there = torch.from_numpy(pool._slab.memory).view(torch.float32)  # type: ignore[union-attr]
    at = (x.data_ptr() - there.data_ptr()) // 4
    assert there[at : at + 3].tolist() == [0, 0, 0]
    del x
    assert there[at : at + 3].isnan().all()
    with pytest.raises(cf.CapacityError, match="all 0 of 0 B"):
        pool.empty(8193)


def test_a_step_that_failed_and_holds_on_to_buffers_costs_a_new_pool() -> None:
    pool = filled((4096, 1))
    kept = pool.like(torch.ones(3)).fill_(1.0)
    pool.allocate()
    other = pool.like(torch.ones(3)).fill_(2.0)
    assert pool.growths == 2 and kept.tolist() == [1, 1, 1]
    del kept, other
    assert pool.used == 0


def test_memory_goes_with_the_pool_and_the_last_tensor() -> None:
    pool = filled((4096, 2))
    x, memory = pool.like(torch.ones(3)), weakref.ref(pool._slab.memory)  # type: ignore[union-attr]
    del pool
    assert memory() is not None
    del x
    gc.collect()
    assert memory() is None


def test_the_plan_counts_what_is_in_use_at_one_time() -> None:
    """What runs says so: each buffer of each size is in use at some moment, and one more never."""
    staged, args = offloaded()
    low = staged.lower(*args)
    plan = passing(low.program)
    runner = SimulatedProgram(low.program, low.mesh)
    inputs = arguments_of(low, args)
    runner(inputs.copies(range(len(inputs.shards))))
    assert runner.pool is not None and runner.pool.most == {c.nbytes: c.count for c in plan.classes}  # neither more nor fewer
    assert runner.pool.nbytes == plan.nbytes == low.memory().pool.nbytes >= plan.peak_bytes > 0
    assert str(plan) in str(low.memory()) and str(plan).startswith("pool on the host: ")


def test_no_memory_is_taken_after_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    staged, args = offloaded()
    state, batch = staged.init(*args), args[1]
    state, _ = staged(state, batch)
    pool = running(staged)
    before = pool.growths, pool.nbytes, pool._slab
    monkeypatch.setattr("colofunc.executors.pools.pages", lambda *_: pytest.fail("host memory is allocated within a step"))
    for _ in range(3):
        state, _ = staged(state, batch)
    assert (pool.growths, pool.nbytes, pool._slab) == before and pool.used == 0
    memory = weakref.ref(pool._slab.memory)  # type: ignore[union-attr]
    del staged, state, pool, before
    gc.collect()
    assert memory() is None


@pytest.mark.parametrize("share", [0.8, 0.6])
def test_spoiled_buffers_change_no_number(share: float) -> None:
    staged, args = offloaded(share)
    low = staged.lower(*args)
    runner = SimulatedProgram(low.program, low.mesh)
    inputs = arguments_of(low, args)
    plain = runner(inputs.copies(range(len(inputs.shards))))
    assert runner.pool is not None
    runner.pool.spoils = True
    for _ in range(2):
        again = runner(inputs.copies(range(len(inputs.shards))))
        assert all(torch.equal(a, b) for x, y in zip(plain, again, strict=True) for a, b in zip(x, y, strict=True))


def test_ranks_of_the_simulated_mesh_have_a_pool_each() -> None:
    step, *args = training()
    mesh = cf.Mesh(dp=2, topology="2xa100-40g")
    whole = peak(cf.shard(step, mesh, zero(1, "dp")), *args)
    staged = cf.offload(cf.shard(step, mesh, zero(1, "dp")), budget=int(0.4 * whole))
    state, _ = staged(staged.init(*args), args[1])
    pool = running(staged)
    assert pool.nbytes == 2 * pool.plan.nbytes > 0 and pool.used == 0
    first = pool._slab
    state, _ = staged(state, args[1])
    assert pool._slab is first and pool.growths == 1


def test_loops_over_microbatches_take_from_the_pool() -> None:
    step, *args = training(layers=3, rows=64)
    whole = peak(cf.accumulate(cf.shard(step, one()), microbatches=4), *args)
    staged = cf.offload(cf.accumulate(cf.shard(step, one()), microbatches=4), budget=int(0.5 * whole))
    low = staged.lower(*args)
    bodies = [node.loop.body for node in low.program.nodes if node.loop is not None]
    assert any(is_copy(node) for body in bodies for node in body.nodes)
    state, _ = staged(staged.init(*args), args[1])
    pool = running(staged)
    state, _ = staged(state, args[1])
    assert pool.growths == 1 and pool.used == 0 and pool.most == {c.nbytes: c.count for c in pool.plan.classes}
    cf.testing.check(staged, *args, steps=2)


def two_ranks() -> None:
    step, *args = training(layers=2, d=16)
    mesh = cf.Mesh(dp=2, topology="2xa100-40g")
    whole = peak(cf.shard(step, mesh, zero(1, "dp")), *args)
    staged = cf.offload(cf.shard(step, mesh, zero(1, "dp")), budget=int(0.7 * whole))
    state, _ = staged(staged.init(*args), args[1])
    pool = running(staged)
    first, counted = pool._slab, dict(pool.most)
    for _ in range(3):
        state, _ = staged(state, args[1])
    assert pool._slab is first and pool.growths == 1 and pool.used == 0 and pool.nbytes == pool.plan.nbytes
    assert pool.most == counted == {c.nbytes: c.count for c in pool.plan.classes}


@pytest.mark.dist
def test_real_ranks_have_a_pool_each_and_take_no_more() -> None:
    launch(two_ranks, 2)
