"""Profiler: measure the running mesh in seconds and give the figures back as a Topology.

Problem: data sheets are optimistic and the box at hand is in none. Idea: time every collective along every axis at a
few sizes, fit alpha + beta·bytes, time matrix products and copies, and put the figures in place of the mesh's own. All
ranks end with the figures of rank 0, and with what other devices measure otherwise; the caller saves them.

>>> profile_mesh(mesh, seconds=5).save("mybox.json")        # then Mesh(dp=2, tp=4, topology="mybox.json")

The fit minimises squared *relative* errors under alpha, beta >= 0 (Lawson and Hanson's NNLS): plain least squares
would let the largest size decide alone, and a negative latency would break the planner.

Note [As in a step]. A plan compares seconds of operators with seconds of collectives, so all are measured alike: the least of a
few short runs, because a run that another program interrupts says nothing of the machine (at ten programs on two cores the
middle of three copies of 32 MiB was six times the least), and each behind a write to other memory, because what a step reads
lay elsewhere a moment ago (in a loop of nothing else a collective starts in a fifth of the time that it takes between layers).
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import attrs
import torch
import torch.distributed as dist

from colofunc import env
from colofunc.errors import MeshError
from colofunc.mesh.detection import found_topology
from colofunc.mesh.device import device_of, node_devices
from colofunc.mesh.mesh import Mesh
from colofunc.mesh.topology import KINDS, Device, Link, Measured, Rate, Tier, Topology

SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

_REPEATS = 5
_OFTEN, _SMALL_BYTES = 20, 1 << 16  # small collectives are timed so often: a start is short, and easily interrupted on some rank
_LONG_S = 0.005  # longer runs are seldom left alone by others
_COLD_BYTES = 1 << 22  # what is written between two runs: more than a core keeps for itself
_COPIED_BYTES = 1 << 22  # of a copy within a CPU's memory: beyond what a core keeps, and done before anybody interrupts
_CARD_BYTES = 1 << 28  # of a copy within a GPU's memory, and from and to the host
_ITEM_BYTES = 4  # collectives are timed on float32
_SAYS = " (measured)"
_SAME = 1.1
"""Ranks whose speeds, and memories, differ by less are alike."""

Samples = dict[tuple[str, str], list[tuple[int, float]]]  # (axis, kind) -> (bytes, seconds)


def profile_mesh(mesh: Mesh, sizes: Sequence[int] = SIZES, seconds: float = 5.0, ranks: bool | None = None) -> Topology:
    """The mesh's topology with measured figures in place of its own.

    With a process group (every rank must call), times each collective along each axis at `sizes` (bytes of the full
    buffer, at least two different ones) and the device; without one, the device only. The two smallest sizes are always
    measured, everything else stays inside `seconds`. Rates of dtypes that cannot be timed, disk figures and links
    between other levels stay as they are.

    ranks: True compares the ranks: the topology says which of them compute faster or slower than rank 0 or have other memory
    (`Topology.with_rank`), so that `cf.pipeline` gives each what it can do. None does so where devices have other names or other
    memory, False leaves what the topology says of ranks. On busy CPUs a measured difference may come from other programs.
    """
    wanted = sorted(set(sizes))
    if len(wanted) < 2 or wanted[0] < 1:
        raise MeshError(f"profile sizes {tuple(sizes)} do not fix a line; give two or more different numbers of bytes")
    distributed = dist.is_available() and dist.is_initialized()
    if distributed and dist.get_world_size() != mesh.size:
        raise MeshError(
            f"{mesh!r} has {mesh.size} ranks, the process group {dist.get_world_size()}; profile a mesh of its size"
        )
    device = _device(mesh)
    start = time.perf_counter()
    measured = mesh.topology.measured
    if distributed:
        samples = _time_collectives(mesh, device, wanted, start + 0.7 * seconds)
        measured = tuple(fit(axis, mesh.axis_size(axis), kind, points) for (axis, kind), points in samples.items())
    topology = _time_device(mesh, device, start + seconds)
    topology = attrs.evolve(topology, name=topology.name.removesuffix(_SAYS) + _SAYS, measured=measured)
    if distributed:
        each: list[Topology] = [topology] * mesh.size
        dist.all_gather_object(each, topology)
        topology = _with_ranks(each, ranks)
    return topology


def _with_ranks(each: Sequence[Topology], ranks: bool | None) -> Topology:
    """The figures of rank 0, with what the others have measured otherwise of their own devices."""
    first = each[0]
    if ranks is False:
        return first
    if ranks is None and all(one.device.name == first.device.name and _has_memory_of(one, first) for one in each):
        return attrs.evolve(first, ranks=())
    topology = attrs.evolve(first, ranks=())
    for rank, one in enumerate(each):
        speed, alike = _times_as_fast(one.device, first.device), _has_memory_of(one, first)
        if not alike or not 1 / _SAME < speed < _SAME:
            topology = topology.with_rank(rank, speed, None if alike else one.tier("device").capacity_bytes)
    return topology


def _has_memory_of(one: Topology, other: Topology) -> bool:
    """Whether devices have about the same memory: like hosts tell of some pages more or less."""
    mine, theirs = one.tier("device").capacity_bytes, other.tier("device").capacity_bytes
    if mine is None or theirs is None:
        return mine == theirs
    return max(mine, theirs) < _SAME * min(mine, theirs)


def _times_as_fast(device: Device, other: Device) -> float:
    """How many times as fast as another one a device multiplies matrices: the geometric mean over dtypes that both have."""
    shared = device.flops_per_s.keys() & other.flops_per_s.keys()
    return statistics.geometric_mean([device.flops_per_s[d] / other.flops_per_s[d] for d in shared]) if shared else 1.0


def fit(axis: str, size: int, kind: str, points: Sequence[tuple[int, float]]) -> Measured:
    """Least relative squares of seconds = alpha + beta·bytes with alpha, beta >= 0."""
    rows = torch.tensor([[1.0 / s, n / s] for n, s in points], dtype=torch.float64)
    # Columns of very different sizes upset NNLS, so both are scaled to 1 and the answer scaled back.
    scale = rows.abs().amax(0)
    optimize = importlib.import_module("scipy.optimize")  # takes long to import, so only where it is used
    alpha, beta = optimize.nnls((rows / scale).numpy(), [1.0] * len(points))[0]
    return Measured(axis, size, kind, float(alpha / scale[0]), float(beta / scale[1]))


def _device(mesh: Mesh) -> torch.device:
    """Where this rank measures: where steps on the mesh run; where the other ranks are not there, the GPU that this one would have."""
    joined = dist.is_available() and dist.is_initialized()
    return device_of(mesh if joined or mesh.device is not None else Mesh())


def _sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _seconds(run: Callable[[], object], device: torch.device, repeats: int = _REPEATS) -> float:
    """Least seconds of one run, after one to warm up. See Note [As in a step]."""
    run()
    elsewhere, taken = torch.zeros(_COLD_BYTES, dtype=torch.uint8, device=device), []
    for _ in range(repeats):
        elsewhere.add_(1)
        _sync(device)
        start = time.perf_counter()
        run()
        _sync(device)
        taken.append(time.perf_counter() - start)
    return max(min(taken), 1e-9)


# --- collectives


def _time_collectives(mesh: Mesh, device: torch.device, sizes: Sequence[int], deadline: float) -> Samples:
    """Seconds of the slowest rank, the same on all ranks."""
    groups = {axis: _subgroup(mesh, axis) for axis, size in mesh.axes if size > 1}
    samples: Samples = {(axis, kind): [] for axis in groups for kind in KINDS}
    # Sizes outermost: when time is up, every axis and kind has the same sizes.
    for place, size in enumerate(sizes):
        for (axis, kind), points in samples.items():
            repeats = _OFTEN if size <= _SMALL_BYTES else _REPEATS
            expected_s = points[-1][1] * max(1.0, size / points[-1][0]) * (repeats + 1) if points else 0.0
            if place >= 2 and not _agreed(time.perf_counter() + expected_s < deadline, device):
                continue
            nbytes, run = _collective(kind, mesh.group_of(dist.get_rank(), (axis,)), groups[axis], size, device)
            dist.barrier()
            slowest = torch.tensor([_seconds(run, device, repeats)], dtype=torch.float64, device=device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            points.append((nbytes, float(slowest)))
    for group in groups.values():
        if group is not None:
            dist.destroy_process_group(group)
    return samples


def _subgroup(mesh: Mesh, axis: str) -> dist.ProcessGroup | None:
    """This rank's group along an axis; None is the whole world."""
    groups = mesh.groups((axis,))
    if len(groups) == 1:
        return None
    mine, _ = dist.new_subgroups_by_enumeration([list(group) for group in groups])
    assert isinstance(mine, dist.ProcessGroup), "the groups along an axis hold every rank"
    return mine


def _agreed(yes: bool, device: torch.device) -> bool:
    """Rank 0's answer on every rank: clocks differ, and a rank that skips a collective leaves the others waiting."""
    answer = torch.tensor([int(yes)], device=device)
    dist.broadcast(answer, src=0)
    return bool(answer.item())


def _collective(
    kind: str, ranks: tuple[int, ...], group: dist.ProcessGroup | None, size: int, device: torch.device
) -> tuple[int, Callable[[], object]]:
    """(bytes as the cost model counts them, a call that runs it once), near `size` bytes."""
    n, here = len(ranks), ranks.index(dist.get_rank())
    part = max(1, size // _ITEM_BYTES // n)
    full = torch.zeros(part * n, device=device)
    if kind == "all_gather":
        mine = torch.zeros(part, device=device)
        return full.nbytes, lambda: dist.all_gather_into_tensor(full, mine, group=group)
    if kind == "reduce_scatter":
        mine = torch.zeros(part, device=device)
        return full.nbytes, lambda: dist.reduce_scatter_tensor(mine, full, group=group)
    if kind == "all_reduce":
        return full.nbytes, lambda: dist.all_reduce(full, group=group)
    other = torch.zeros_like(full)
    if kind == "all_to_all":
        return full.nbytes, lambda: dist.all_to_all_single(other, full, group=group)
    succ, pred = ranks[(here + 1) % n], ranks[here - 1]

    def shift() -> None:
        ops = [dist.P2POp(dist.isend, full, succ, group), dist.P2POp(dist.irecv, other, pred, group)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    return full.nbytes, shift


# --- one device


def _time_device(mesh: Mesh, device: torch.device, deadline: float) -> Topology:
    """The mesh's topology with this device's rates, bandwidths and capacities."""
    base = mesh.topology
    if device.type == "cuda":
        found = found_topology(node_devices(), mesh.size, device)
        base = found if mesh.assumed else attrs.evolve(base, reserved_bytes=found.reserved_bytes)
    rates = {rate.dtype: rate.flops_per_s for rate in base.device.rates}
    rates.update(_matmul_rates(device, deadline))
    tiny = torch.zeros(1, device=device)

    def launches() -> None:
        for _ in range(100):
            tiny.add_(1)

    big = torch.ones(_CARD_BYTES if device.type == "cuda" else _COPIED_BYTES, dtype=torch.uint8)
    here, there = torch.empty_like(big, device=device), torch.zeros_like(big, device=device)
    record = Device(
        name=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        rates=tuple(Rate(name, flops) for name, flops in rates.items()),
        memory_bytes_per_s=2 * big.nbytes / _seconds(lambda: here.copy_(there), device),  # read and written
        launch_s=_seconds(launches, device) / 100,
    )
    pinned = big.pin_memory() if device.type == "cuda" else big
    seconds = {
        ("host", "device"): _seconds(lambda: here.copy_(pinned), device),
        ("device", "host"): _seconds(lambda: pinned.copy_(there), device),
    }
    # All ranks copy at once, so contention is already in the figures: they count per device.
    links = tuple(
        attrs.evolve(link, bandwidth_bytes_per_s=big.nbytes / seconds[link.src, link.dst], shared=False)
        if (link.src, link.dst) in seconds
        else link
        for link in base.links
    )
    launch = env.launched()
    sharing = launch.local_world_size if launch else base.node_devices
    tiers = tuple(_capacities(base, device, min(sharing, mesh.size)))
    return attrs.evolve(base, device=record, links=_with_both(links, seconds, big.nbytes), tiers=tiers, node_devices=sharing)


def _with_both(links: tuple[Link, ...], seconds: dict[tuple[str, str], float], nbytes: int) -> tuple[Link, ...]:
    have = {(link.src, link.dst) for link in links}
    new = (Link(*ends, nbytes / s, 0.0, shared=False) for ends, s in seconds.items() if ends not in have)
    return (*links, *new)


def _matmul_rates(device: torch.device, deadline: float) -> Iterator[tuple[str, float]]:
    """(dtype, operations per second) of square matrix products, grown until one is long or time is up.

    On a CPU the middle of all sizes: a step has products of every size and shape, and none does better than these. On a GPU small
    ones are nothing but launches, which count by themselves, so there the best is the rate.
    """
    for place, dtype in enumerate(DTYPES):
        n, rates = 128, list[float]()
        # A share of what is left, so that a dtype that is slow here does not starve the ones after it.
        until = time.perf_counter() + max(0.0, deadline - time.perf_counter()) / (len(DTYPES) - place + 1)
        while n <= 8192:
            try:
                a = torch.ones(n, n, dtype=dtype, device=device)
                taken_s = _seconds(lambda a=a: a @ a, device)  # type: ignore[misc]
            except RuntimeError:  # no kernel for this dtype here: the planner uses the nearest that has one
                break
            rates.append(2.0 * n**3 / taken_s)
            # The next size takes eight times as long, and runs once more than it counts.
            if taken_s > _LONG_S or time.perf_counter() + 8 * (_REPEATS + 1) * taken_s > until:
                break
            n *= 2
        if rates:
            yield str(dtype).removeprefix("torch."), max(rates) if device.type == "cuda" else statistics.median(rates)


def _capacities(base: Topology, device: torch.device, node_ranks: int) -> Iterator[Tier]:
    """Device and host memory as they are; on a CPU box the ranks share the memory that their cgroup allows."""
    host_bytes = env.memory_limit_bytes()
    for tier in base.tiers:
        if tier.name == "device" and device.type == "cuda":
            yield Tier("device", torch.cuda.get_device_properties(device).total_memory, shared=False)
        elif tier.name == "device" and host_bytes is not None:
            yield Tier("device", host_bytes // node_ranks, shared=False)
        elif tier.name == "host" and host_bytes is not None:
            yield Tier("host", host_bytes, shared=True)
        else:
            yield tier
