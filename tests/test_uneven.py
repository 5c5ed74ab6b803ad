"""Ranks whose devices differ: what a topology says of them, and pipelines whose stages are cut for them."""

import json
from collections.abc import Sequence
from itertools import combinations, pairwise, permutations
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from live_bytes import measure
from torch import nn

import colofunc as cf
from colofunc.compiler.observation import arguments_of
from colofunc.errors import CapacityError
from colofunc.planner.stages.assignment import CutProblem
from colofunc.planner.stages.cuts import Line, StageDevice
from colofunc.planner.stages.orders import best_order
from colofunc.testing import check
from colofunc.testing.check import doubled_inside

CARD = cf.topology("4xa100-80g")
# A device of which work takes long beside the start of a kernel.
SLOW = attrs.evolve(CARD, device=attrs.evolve(CARD.device, memory_bytes_per_s=1e8, launch_s=0.0))


# ---- what a topology says ----


def test_a_rank_with_another_device_is_saved_with_its_topology() -> None:
    topology = CARD.with_rank(1, speed=0.5).with_rank(3, speed=2, capacity_bytes=1 << 30).with_rank(1, speed=0.25)
    assert cf.Topology.from_dict(json.loads(json.dumps(topology.to_dict()))) == topology
    assert "ranks" not in CARD.to_dict()
    mesh = cf.Mesh(pp=2, dp=2, topology=topology)
    assert [mesh.speed([rank]) for rank in range(4)] == [1, 0.25, 1, 2] and mesh.speed((1, 3)) == 0.25
    assert mesh.device_bytes(3) == mesh.capacity_bytes("device") == (1 << 30) - topology.reserved_bytes  # all keep to the least
    assert mesh.device_bytes(0) == cf.Mesh(pp=2, dp=2, topology=CARD).capacity_bytes("device")
    assert mesh.fingerprint != cf.Mesh(pp=2, dp=2, topology=CARD).fingerprint


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(rank=0, speed=0), "RankDevice.speed is 0.0; give a number above 0"),
        (dict(rank=-1), "RankDevice.rank is -1; give a finite number, 0 or more"),
        (dict(rank=0, capacity_bytes=0), "RankDevice.capacity_bytes is 0; give a number above 0"),
    ],
)
def test_figures_of_a_rank_that_cannot_be(options: dict[str, Any], says: str) -> None:
    with pytest.raises(cf.TopologyError, match=f"^{says}$"):
        CARD.with_rank(**options)


# ---- the optimum, beside every cut that there is ----

PIECES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(0, 9)), min_size=2, max_size=7)
SPEEDS, CAPACITIES = st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([6.0, 12.0, float("inf")])
DEVICES = st.lists(st.builds(StageDevice, SPEEDS, CAPACITIES), min_size=1, max_size=4)


def slowest(pieces: list[tuple[int, int, int]], devices: list[StageDevice], begins: tuple[int, ...]) -> float:
    worst = 0.0
    for (first, end), device in zip(pairwise((*begins, len(pieces))), devices, strict=True):
        if sum(nbytes for _, _, nbytes in pieces[first:end]) > device.capacity_bytes:
            return float("inf")
        worst = max(worst, sum(work for work, _, _ in pieces[first:end]) / device.speed + pieces[first][1])
    return worst


@given(PIECES, DEVICES)
@settings(max_examples=200, deadline=None)
def test_the_slowest_stage_is_as_fast_as_any_cut_makes_it(pieces: list[tuple[int, int, int]], devices: list[StageDevice]) -> None:
    if len(devices) > len(pieces):
        devices = devices[: len(pieces)]
    pieces[0] = (pieces[0][0], 0, pieces[0][2])  # the first stage receives nothing
    work, received, nbytes = zip(*pieces, strict=True)
    line = Line(np.cumsum([0.0, *work]), np.array(received, dtype=float), np.cumsum([0.0, *nbytes]))
    found, _ = line.in_order([line.over(device.capacity_bytes) for device in devices], [device.speed for device in devices])
    best = min(slowest(pieces, devices, (0, *way)) for way in combinations(range(1, len(pieces)), len(devices) - 1))
    assert (slowest(pieces, devices, tuple(found)) if found else float("inf")) == best


@given(PIECES, st.lists(st.sampled_from([StageDevice(1.0, 40.0), StageDevice(0.5, 60.0), StageDevice(2.0, 25.0)]), min_size=2, max_size=5))
@settings(max_examples=60, deadline=None)
def test_the_order_is_as_good_as_any(pieces: list[tuple[int, int, int]], devices: list[StageDevice]) -> None:
    """Of all permutations, with one stage a device by dynamic programming, and with several by arrangements."""
    devices = devices[: len(pieces)]
    pieces[0] = (pieces[0][0], 0, pieces[0][2])
    problem = Problem(pieces)
    every = {order: best_slowest(pieces, [devices[k] for k in order]) for order in permutations(range(len(devices)))}
    given_s, least_s = every[tuple(range(len(devices)))], min(every.values())
    for several in (1, 2):
        found = best_order(devices, several, lambda order: problem.on([devices[k] for k in order]))
        if found is None:
            assert given_s <= least_s * (1 + 1e-6) or given_s == least_s
        else:
            assert every[found] == pytest.approx(least_s) and least_s < given_s


RANKS = st.sampled_from([(0, 1, 0, 1), (0, 1, 1, 0), (0, 1, 2, 0, 1, 2), (0, 1, 2, 2, 1, 0)])


@given(PIECES, RANKS, st.lists(st.sampled_from([6.0, 12.0, float("inf")]), min_size=3, max_size=3))
@settings(max_examples=100, deadline=None)
def test_the_slowest_rank_of_several_stages_is_as_fast_as_any_cut_makes_it(
    pieces: list[tuple[int, int, int]], ranks: tuple[int, ...], rooms: list[float]
) -> None:
    """A rank's stages have its memory together, and none has a part of its own; where no cut fits, speeds alone decide."""
    if len(pieces) < len(ranks):
        pieces = [*pieces, *[(3, 0, 1)] * (len(ranks) - len(pieces))]
    pieces[0] = (pieces[0][0], 0, pieces[0][2])
    problem = Problem(pieces, ranks).on([StageDevice(1.0, rooms[rank]) for rank in ranks])
    found = of_ranks(pieces, ranks, tuple(problem.balanced_begins()))
    ways = [of_ranks(pieces, ranks, (0, *way)) for way in combinations(range(1, len(pieces)), len(ranks) - 1)]
    fitting = [way for way in ways if all(nbytes <= rooms[rank] for rank, (_, nbytes) in way.items())]
    event(f"some cut fits: {bool(fitting)}")
    assert found in (fitting or ways)
    assert slowest_rank(found) == min(map(slowest_rank, fitting or ways))


def of_ranks(pieces: list[tuple[int, int, int]], ranks: tuple[int, ...], begins: tuple[int, ...]) -> dict[int, tuple[float, int]]:
    """Rank -> seconds and bytes of its stages."""
    found = dict.fromkeys(ranks, (0.0, 0))
    for rank, (first, end) in zip(ranks, pairwise((*begins, len(pieces))), strict=True):
        seconds, nbytes = found[rank]
        seconds += pieces[first][1] + sum(work for work, _, _ in pieces[first:end])
        found[rank] = seconds, nbytes + sum(kept for _, _, kept in pieces[first:end])
    return found


def slowest_rank(figures: dict[int, tuple[float, int]]) -> float:
    return max(seconds for seconds, _ in figures.values())


@pytest.mark.parametrize("ranks", [tuple(range(8)) * 2, (*range(8), *reversed(range(8)))])
def test_many_pieces_on_ranks_of_several_stages_fit_where_equal_parts_do_not(ranks: tuple[int, ...]) -> None:
    """Too many cuts to look at each: the heavy pieces stand at the front, and a rank's second stage leaves room for them."""
    pieces = [(2, 0, 4 if position < 16 else 1) for position in range(48)]
    problem = Problem(pieces, ranks).on([StageDevice(1.0, 13.0)] * 16)
    assert problem.every() is None and not problem._fastest([problem.line.over(13.0 / 2)] * 16)
    figures = of_ranks(pieces, ranks, tuple(problem.balanced_begins()))
    assert all(nbytes <= 13 for _, nbytes in figures.values())


class Problem(CutProblem):
    """Pieces whose seconds, sends and bytes are given."""

    def __init__(self, pieces: list[tuple[int, int, int]], ranks: tuple[int, ...] = ()) -> None:
        work, received, nbytes = zip(*pieces, strict=True)
        self.begins = list(range(len(pieces)))
        self.line = Line(np.cumsum([0.0, *work]), np.array(received, dtype=float), np.cumsum([0.0, *nbytes]))
        self.until = self.line.until
        self.program = SimpleNamespace(nodes=pieces)
        self.reading = SimpleNamespace(uses={})
        self.given = ranks

    @property
    def ranks(self) -> Sequence[int]:  # type: ignore[override]
        """By default one stage each."""
        return self.given or range(len(self.devices))


def best_slowest(pieces: list[tuple[int, int, int]], devices: list[StageDevice]) -> float:
    """Of all cuts, by hand; where none fits, by speeds alone."""
    ways = [(0, *way) for way in combinations(range(1, len(pieces)), len(devices) - 1)]
    best = min(slowest(pieces, devices, way) for way in ways)
    if best < float("inf"):
        return best
    return min(slowest(pieces, [StageDevice(device.speed, float("inf")) for device in devices], way) for way in ways)


# ---- pipelines ----


def layers(width: int = 16, rows: int = 512) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    blocks: list[nn.Module] = []
    for _ in range(8):
        blocks += [nn.Linear(width, width), nn.Tanh()]
    step, state = cf.train_step(
        cf.functional(nn.Sequential(*blocks).double()), cf.adapt(torch.optim.SGD, lr=1e-2), lambda out, b: out.pow(2).mean(),
        inputs=lambda b: ((b,), {}),
    )  # fmt: skip
    return step, state, torch.randn(rows, width, dtype=torch.float64)


def stage_of(low: Any) -> list[tuple[int, ...]]:
    """Per layer, the indices of `pp` that its weight is at."""
    return [leaf.at[1] for leaf in low.plan.inputs if leaf.role == "param" and leaf.name.endswith("weight")]


def lowered(topology: cf.Topology, schedule: str = "1f1b", stages: dict[str, int] | None = None) -> tuple[Any, Any]:
    step, state, batch = layers()
    chain = cf.pipeline(cf.shard(step, cf.Mesh(pp=2, topology=topology)), microbatches=4, schedule=schedule, stages=stages)
    return chain, chain.lower(state, batch)


def test_a_slow_rank_gets_fewer_layers_and_the_plan_says_so() -> None:
    _, even = lowered(SLOW)
    chain, uneven = lowered(SLOW.with_rank(1, speed=1 / 3))
    # The last rank has the loss beside its layers.
    assert stage_of(even).count((1,)) == 3 and stage_of(uneven).count((1,)) == 1
    assert "on ranks of speeds 1, 0.333333" in str(uneven.plan) and "speeds" not in str(even.plan)
    assert [use.speed for use in uneven.plan.pipeline.ranks] == [1, 1 / 3]
    assert cf.Plan.from_dict(uneven.plan.to_dict()) == uneven.plan
    by_halves = {f"{2 * layer}.*": layer // 4 for layer in range(8)}
    _, halves = lowered(SLOW.with_rank(1, speed=1 / 3), stages=by_halves)
    assert uneven.pipeline().makespan_s < 0.8 * halves.pipeline().makespan_s
    _, state, batch = layers()
    with cf.testing.float64():
        check(chain, *doubled_inside((state, batch)))


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zb-v", "auto"])
def test_placements_of_several_stages_look_at_speeds_too(schedule: str) -> None:
    chain, low = lowered(SLOW.with_rank(0, speed=1 / 3), schedule)
    assert stage_of(low).count((0,)) == 2
    _, state, batch = layers()
    with cf.testing.float64():
        check(chain, *doubled_inside((state, batch)))


def test_where_speeds_change_the_step_is_cut_anew_and_takes_the_state_over() -> None:
    step, state, batch = layers()
    expected = state
    with cf.testing.float64():
        expected, state, batch = doubled_inside((expected, state, batch))
        before = cf.pipeline(cf.shard(step, cf.Mesh(pp=2, topology=SLOW)), microbatches=4)
        placed = before.init(state, batch)
        after = cf.pipeline(cf.shard(step, before.mesh.with_topology(SLOW.with_rank(1, speed=1 / 3))), microbatches=4)
        moved = 0
        for chain in (before, after):
            counts = [sum(x.shards[1].numel() > 0 for x in placed["params"].values())]
            placed = chain.init(placed, batch)
            counts.append(sum(x.shards[1].numel() > 0 for x in placed["params"].values()))
            moved += counts[0] - counts[1]
            placed, _ = chain(placed, batch)
            expected, _ = step(expected, batch)
        assert moved > 0, "the slow rank has fewer layers than before"
        for name, x in placed["params"].items():
            torch.testing.assert_close(x.full(), expected["params"][name], rtol=1e-10, atol=1e-10)


def test_the_order_of_the_ranks_is_chosen() -> None:
    """In a V the first rank has the first layer and the last; the slow one is put where it has less, and the plan says so."""
    step, state, batch = layers()
    mesh = cf.Mesh(pp=4, topology=SLOW.with_rank(0, speed=1 / 3))
    chain = cf.pipeline(cf.shard(step, mesh), microbatches=4, schedule="zb-v")
    low = chain.lower(state, batch)
    assert low.plan.way == "4 microbatches, ranks in the order pp=1,0,2,3, cut by time"
    assert stage_of(low) == [(1,), (0,), (2,), (3,), (3,), (2,), (0,), (1,)]
    assert [use.stages for use in low.plan.pipeline.ranks] == [(1, 6), (0, 7), (2, 5), (3, 4)]
    as_it_stands = {f"{2 * layer}.*": layer for layer in range(8)}
    given = cf.pipeline(cf.shard(step, mesh), microbatches=4, schedule="zb-v", stages=as_it_stands).lower(state, batch)
    assert stage_of(given)[0] == (0,) and low.plan.cost_s < 0.9 * given.plan.cost_s
    with cf.testing.float64():
        check(chain, *doubled_inside((state, batch)))


def test_an_order_that_is_slower_by_the_clock_is_not_taken() -> None:
    step, state, batch = layers()
    topology = SLOW.with_rank(1, speed=1 / 3).with_rank(2, speed=0.5)
    low = cf.pipeline(cf.shard(step, cf.Mesh(pp=4, topology=topology)), microbatches=4, schedule="auto").lower(state, batch)
    assert low.plan.way == "4 microbatches, auto-one, cut by time" and "order" in low.plan.others[0].words
    assert all(other.cost_s is not None and other.cost_s > low.plan.cost_s for other in low.plan.others)
    assert "ranks in the order pp=" in low.plan.why_not("ranks in the order")


def test_the_roomiest_rank_comes_first_under_a_budget() -> None:
    """The first stage keeps most microbatches; the device with little memory is put behind."""
    step, state, batch = layers(16, 2048)
    free = cf.pipeline(cf.shard(step, cf.Mesh(pp=2, topology=SLOW)), microbatches=8)
    peaks = [use.peak_bytes for use in free.lower(state, batch).plan.pipeline.ranks]
    assert peaks[0] > peaks[1]
    room_bytes = (peaks[0] + peaks[1]) // 2 + SLOW.reserved_bytes
    mesh = cf.Mesh(pp=2, topology=SLOW.with_rank(0, capacity_bytes=room_bytes))
    chain = cf.checkpoint(cf.pipeline(cf.shard(step, mesh), microbatches=8))
    low = chain.lower(state, batch)
    assert "ranks in the order pp=1,0" in low.plan.way and not low.plan.memory
    assert low.plan.pipeline.ranks[0].peak_bytes <= room_bytes < low.plan.pipeline.ranks[1].peak_bytes


def test_a_rank_with_little_memory_gets_fewer_weights() -> None:
    """Four layers with their gradients do not fit on the first rank, and the second holds more than the first has."""
    layer_bytes = 2 * 64 * 65 * 8
    _, state, batch = layers(64, 8)
    step, _, _ = layers(64, 8)
    room_bytes = int(3.8 * layer_bytes)
    mesh = cf.Mesh(pp=2, topology=SLOW.with_rank(0, capacity_bytes=room_bytes + SLOW.reserved_bytes))
    chain = cf.pipeline(cf.shard(step, mesh), microbatches=4).on("simulated")
    with cf.testing.float64():
        state, batch = doubled_inside((state, batch))
        low = chain.lower(state, batch)
        assert stage_of(low).count((0,)) == 3
        peaks = [use.peak_bytes for use in low.plan.pipeline.ranks]
        assert peaks[0] <= room_bytes < peaks[1] == low.plan.peak_bytes
        check(chain, state, batch)
        given = arguments_of(low, chain.arguments((state, batch)))
        shards = given.copies(range(len(given.shards)))
        assert measure(low.program, mesh, shards).peak_bytes["device"] == low.plan.peak_bytes
        smaller = cf.Mesh(pp=2, topology=SLOW.with_rank(0, capacity_bytes=layer_bytes + SLOW.reserved_bytes))
        with pytest.raises(CapacityError, match="simulated rank 0 holds"):
            measure(low.program, smaller, shards)
    with pytest.raises(cf.PlanError, match="no plan found within"):
        cf.pipeline(cf.shard(step, smaller), microbatches=4).lower(state, batch)
