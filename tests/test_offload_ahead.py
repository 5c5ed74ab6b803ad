"""An offloaded step ends without a wait of the host: what its copies still read and write is looked at, written and given back behind them.

All on a pretended card, whose copies run late and in random order.
"""

from typing import Any

import attrs
import pytest
import torch
from pretended import Machine, on_card
from test_offload import training

import colofunc as cf
from colofunc.executors.copies import COPIER, Copying
from colofunc.executors.pages import pages
from colofunc.executors.pages_in_use import IN_USE, Flights
from colofunc.executors.pools import pinned_like
from colofunc.planner.offload.policies import HOST

ON_DEVICE = attrs.evolve(HOST, name="host, updated on the device", update="device")
LOOKED_AT = {"event: executors/copies.py _passed"}
D = torch.float64


def offloaded(mesh: cf.Mesh) -> tuple[Any, Any]:
    step, *args = training(layers=1)
    return cf.offload(cf.shard(step, mesh), policy=ON_DEVICE), args


def after(steps: int) -> dict[str, torch.Tensor]:
    """The parameters as a CPU computes them."""
    staged, (state, batch) = offloaded(cf.Mesh(device="cpu"))
    state = staged.init(state, batch)
    for _ in range(steps):
        state, _ = staged(state, batch)
    return {name: x.full().clone() for name, x in state["params"].items()}


def test_no_step_makes_the_host_wait_and_looking_at_its_state_does() -> None:
    want = after(3)
    for seed in range(2):
        with Machine(seed=seed) as machine:
            staged, (state, batch) = offloaded(cf.Mesh(device="cuda"))
            state, there = staged.init(state, batch), on_card(machine, batch)
            for _ in range(3):
                state, _ = staged(state, there)
                assert not machine.waits, machine.places
            assert {x.sharding.tier for x in state["params"].values()} == {"host"}
            for name, x in state["params"].items():
                assert torch.allclose(x.full(), want[name], rtol=1e-10, atol=1e-12), name
            assert machine.places.keys() == LOOKED_AT, machine.places


def test_a_save_holds_what_the_steps_before_it_have_computed(tmp_path: Any) -> None:
    want = after(2)
    for wait in (True, False):
        with Machine(seed=1) as machine:
            staged, (state, batch) = offloaded(cf.Mesh(device="cuda"))
            state, there = staged.init(state, batch), on_card(machine, batch)
            for _ in range(2):
                state, _ = staged(state, there)
            saving = cf.save(tmp_path / str(wait), state, wait=wait)
            for _ in range(2):
                state, _ = staged(state, there)
            saving.wait()
        for name, x in cf.load(tmp_path / str(wait))["params"].items():
            assert torch.allclose(x, want[name], rtol=1e-10, atol=1e-12), name


def test_what_has_passed_is_forgotten_at_the_end_of_a_step() -> None:
    with Machine() as machine:
        staged, (state, batch) = offloaded(cf.Mesh(device="cuda"))
        state, there = staged.init(state, batch), on_card(machine, batch)
        known = []
        for _ in range(4):
            state, _ = staged(state, there)
            machine.engine.drain()
            known.append(sum(len(flights.before(writes=True)) for flights in IN_USE._flights.values()))
        assert known[0] and known[1:] == known[:1] * 3  # of one step, not of all
        COPIER.finish()
        assert not IN_USE and not machine.waits


# ---- memory that others read and write ----


def doubled(mesh: cf.Mesh, x: torch.Tensor) -> tuple[Any, Any]:
    """A step that reads x, which lies on the host and is not its to write to; what it has of x."""
    step = cf.offload(cf.shard(lambda x: x * 2, mesh, donate=()), policy="host")
    return step, cf.distribute(x, "a @host", mesh)


@pytest.mark.parametrize("whose", ["local", "shards", "from_local"])
def test_memory_that_a_caller_has_may_be_written_to_when_a_step_returns(whose: str) -> None:
    for seed in range(6):
        with Machine(seed=seed):
            mesh = cf.Mesh(device="cuda")
            step, x = doubled(mesh, torch.ones(100, dtype=D))
            if whose == "from_local":
                mine = torch.ones(100, dtype=D).pin_memory()
                x = cf.from_local(mine, "a @host", mesh)
            else:
                mine = x.local if whose == "local" else x.shards[0]
            for value in (1.0, 2.0, 3.0):
                mine.fill_(value)
                assert torch.equal(step(x).full().cpu(), torch.full((100,), 2 * value, dtype=D))
            first = step(x)
            mine.fill_(7.0)
            assert torch.equal(first.full().cpu(), torch.full((100,), 6.0, dtype=D))


def test_a_pinned_tensor_of_the_caller_may_be_written_to_when_a_step_returns() -> None:
    for seed in range(6):
        with Machine(seed=seed) as machine:
            step, _ = doubled(cf.Mesh(device="cuda"), torch.ones(100, dtype=D))
            step = cf.offload(cf.shard(lambda x: x * 2, cf.Mesh(device="cuda"), in_specs=("a @host",), donate=()), policy="host")
            mine, found = torch.ones(100, dtype=D).pin_memory(), []
            step(mine)
            machine.forget_counts()
            for value in (1.0, 2.0, 3.0):
                mine.fill_(value)
                found.append(step(mine))
            assert not machine.waits, machine.places
            assert [float(x.full().sum()) for x in found] == [200.0, 400.0, 600.0]


def of_pages(value: float, seen: bool) -> torch.Tensor:
    """Pinned memory, as a pool has it or as tensors that callers see have it."""
    return torch.from_numpy(pages(400, pinned=True, seen=seen)).view(torch.float32).fill_(value)


@pytest.mark.parametrize("seen", [False, True])
def test_pinned_pages_go_when_their_copies_have_passed(seen: bool) -> None:
    """A copy out of them and one into them are under way when nobody has them any more."""
    for seed in range(6):
        with Machine(seed=seed) as machine:
            (card,) = machine.cards
            registered = len(machine._registered)
            host = of_pages(3.0, seen)
            coming = COPIER.start("to_device", (host,), card)
            del host
            there = machine.to_card(torch.ones(100))
            into = of_pages(0.0, seen)
            COPIER.start("put", (into, there), card).wait()
            del into
            assert len(machine._registered) == registered + 2 and not machine.waits
            assert isinstance(coming, Copying) and torch.equal(coming.wait().cpu(), torch.full((100,), 3.0))
            machine.engine.drain()
            COPIER.finish()
            assert len(machine._registered) == registered and not IN_USE


def test_pages_stay_for_a_copy_that_a_caller_has_begun() -> None:
    with Machine() as machine:
        x = cf.distribute(torch.full((100,), 4.0), "a @host", cf.Mesh(device="cuda"))
        mine = torch.empty(100, device="cuda").copy_(x.local, non_blocking=True)
        del x
        assert machine._registered and not machine.waits
        assert float(mine.sum()) == 400.0
        COPIER.finish()
        assert not machine._registered


# ---- what waits for what ----


class Point:
    """An event that passes when it is told to."""

    def __init__(self, passed: bool = False) -> None:
        self.passed = passed

    def query(self) -> bool:
        return self.passed


def test_who_writes_waits_for_who_reads_and_who_reads_for_the_last_who_wrote() -> None:
    flights = Flights()
    wrote, read, again = Point(), Point(), Point()
    flights.note(wrote, writes=True)
    flights.note(read, writes=False)
    assert flights.before(writes=False) == [wrote] and flights.before(writes=True) == [wrote, read]
    flights.note(again, writes=True)  # behind both
    assert flights.before(writes=True) == [again]
    flights.note(read, writes=False)
    flights.passed(writes=False)  # the host has read
    assert flights.before(writes=True) == [read]
    flights.passed(writes=True)
    assert not flights.before(writes=True)


def test_only_what_has_passed_is_forgotten() -> None:
    flights = Flights(Point(True), [Point(), Point(True)])
    assert not flights.over() and flights.filled is None and [p.passed for p in flights.read] == [False]
    flights.read[0].passed = True
    assert flights.over() and not flights.before(writes=True)
    assert not Flights(Point(), [Point(True)]).over()


@pytest.mark.parametrize("seed", range(8))
def test_a_copy_into_memory_stands_behind_an_earlier_copy_out_of_it(seed: int) -> None:
    """The stream that computes waits for neither, so nothing else holds the second copy back."""
    with Machine(seed=seed) as machine:
        (card,) = machine.cards
        host, new = pinned_like(torch.zeros(8)).fill_(2.0), machine.to_card(torch.full((8,), 5.0))
        out = [COPIER.start("to_device", (host,), card) for _ in range(3)]
        COPIER.start("put", (host, new), card)
        assert all(isinstance(copying, Copying) and float(copying.wait().sum()) == 16.0 for copying in out)
        COPIER.arrived((host,))
        assert float(host.sum()) == 40.0


@pytest.mark.parametrize("seed", range(8))
def test_the_host_writes_behind_an_earlier_copy_out_of_memory(seed: int) -> None:
    with Machine(seed=seed) as machine:
        (card,) = machine.cards
        host = pinned_like(torch.zeros(8)).fill_(2.0)
        out = COPIER.start("to_device", (host,), card)
        COPIER.settle((), (host,))
        host.fill_(9.0)
        assert isinstance(out, Copying) and float(out.wait().sum()) == 16.0
