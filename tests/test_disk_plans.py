"""Plans with a disk: whether the choice of device and host sees it, and what is said of a disk that is too small."""

import random
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
from test_offload import one, peak, training

import colofunc as cf
from colofunc.planner.offload.disk import on_disk
from colofunc.planner.offload.fastest import fastest_offload
from colofunc.planner.offload.policies import AUTO, HOST
from colofunc.program.cost import node_s
from colofunc.program.lanes import played
from colofunc.program.memory import memory


def slower(mesh: cf.Mesh, times: int) -> cf.Mesh:
    every = mesh.topology.links
    disk = {x: attrs.evolve(x, bandwidth_bytes_per_s=x.bandwidth_bytes_per_s / times) for x in every if "disk" in (x.src, x.dst)}
    return mesh.with_topology(attrs.evolve(mesh.topology, links=tuple(disk.get(x, x) for x in every)))


def disk_bytes(mesh: cf.Mesh, nbytes: int) -> cf.Mesh:
    tiers = [attrs.evolve(t, capacity_bytes=nbytes) if t.name == "disk" else t for t in mesh.topology.tiers]
    return mesh.with_topology(attrs.evolve(mesh.topology, tiers=tuple(tiers)))


def both_ways(shape: dict[str, int], disk: int, budget: float, host: float, policy: Any = AUTO) -> tuple[float, bool, float, bool]:
    """(seconds of the fastest without a disk and then what the host lacks on disk, whether it fits; the same decided at once)."""
    step, *args = training(**shape)
    mesh = slower(one(), disk)
    low = cf.shard(step, mesh).lower(*args)
    seconds = partial(node_s, mesh=mesh, rule_of=low.registry.rule)
    limit = int(low.memory().peak_bytes["device"] * budget)
    plain = fastest_offload(low.program, mesh, seconds, limit, policy)
    room = int(memory(plain.program).peak_bytes.get("host", 0) * host)
    after = on_disk(plain.program, mesh, seconds, room, {}).program
    once = fastest_offload(low.program, mesh, seconds, limit, policy, host_bytes=room, disk=True)
    end_s = [played(p, mesh, seconds).end_s for p in (after, once.program)]
    fits = [memory(p).peak_bytes.get("host", 0) <= room for p in (after, once.program)]
    assert fits[1] == (not once.short)
    return end_s[0], fits[0], end_s[1], fits[1]


def test_what_is_on_the_device_depends_on_what_the_disk_takes() -> None:
    after_s, fits, once_s, fits_too = both_ways(dict(layers=2, d=512, rows=128), disk=2, budget=0.55, host=0.7)
    assert fits and fits_too and once_s < 0.95 * after_s


def test_what_the_host_cannot_do_with_one_choice_it_may_with_another() -> None:
    _, fits, _, fits_too = both_ways(dict(layers=2, d=512, rows=2048), disk=1, budget=0.7, host=0.5)
    assert fits_too and not fits


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(n, marks=pytest.mark.sweep) for n in range(2, 60))])
def test_random_plans_are_never_slower_than_the_disk_as_an_afterthought(seed: int) -> None:
    rng = random.Random(seed)
    shape = dict(layers=rng.choice((1, 2)), d=rng.choice((16, 128, 512)), rows=rng.choice((64, 512, 2048)))
    policy = rng.choice((AUTO, AUTO, HOST))
    chosen = rng.choice((1, 4)), rng.choice((0.4, 0.55, 0.7)), rng.choice((0.5, 0.7, 0.9))
    after_s, fits, once_s, fits_too = both_ways(shape, *chosen, policy)
    assert not fits or (fits_too and once_s <= after_s * (1 + 1e-9))


def test_making_again_is_weighed_against_the_disk(tmp_path: Path) -> None:
    """Activations that go to disk and back take longer than to make them again: with `checkpoint` they are."""
    step, *args = training(layers=1, d=64, rows=4096)
    base = cf.shard(step, slower(one(), 8))
    moved = cf.offload(base, budget=int(0.57 * peak(base, *args)), host="5MiB", disk=tmp_path).lower(*args)
    either = cf.offload(cf.checkpoint(base), budget=int(0.57 * peak(base, *args)), host="5MiB", disk=tmp_path).lower(*args)
    assert moved.lanes().busy_s()["disk"] > 0
    assert either.lanes().end_s < 0.8 * moved.lanes().end_s and either.memory().peak_bytes["host"] <= 5 << 20


def test_a_disk_that_is_too_small_for_two_versions_is_named(tmp_path: Path) -> None:
    step, *args = training(layers=0)
    state = peak(cf.offload(cf.shard(step, one()), policy="disk", disk=tmp_path), *args, tier="disk")
    enough, short = (cf.offload(cf.shard(step, disk_bytes(one(), n)), policy="disk", disk=tmp_path) for n in (2 * state, 2 * state - 1))
    assert peak(enough, *args, tier="disk") == state
    with pytest.raises(cf.CapacityError, match=r"two versions of the state on disk and what a step writes there .* a larger disk"):
        short.lower(*args)
