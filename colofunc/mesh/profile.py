"""Profiler: measure the running mesh in seconds and give the figures back as a Topology.

Problem: data sheets are optimistic and the box at hand is in none. Idea: time every collective along every axis at a
few sizes, fit alpha + beta·bytes, time matrix products and copies, and put the figures in place of the mesh's own. All
ranks end with the figures of rank 0, and with what other devices measure otherwise; the caller saves them.

>>> profile_mesh(mesh, seconds=5).save("mybox.json")        # then Mesh(dp=2, tp=4, topology="mybox.json")

The fit minimises squared *relative* errors under alpha, beta >= 0 (Lawson and Hanson's NNLS): plain least squares would
let the largest size decide alone, and a negative latency would break the planner. How one run is timed says
`stopwatch`, what of a device is measured `device_profile`.

It is a function and no method of `Mesh`, which is data: this module reads meshes, and a mesh knows nothing of
stopwatches and process groups.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import attrs
import torch
import torch.distributed as dist

from colofunc import env
from colofunc.errors import MeshError
from colofunc.mesh.detection import found_topology, host_threads
from colofunc.mesh.device import device_of, node_devices
from colofunc.mesh.device_profile import copies_s, host_update_bytes_per_s, measured_device
from colofunc.mesh.mesh import Mesh
from colofunc.mesh.stopwatch import REPEATS, least_run_s
from colofunc.mesh.topology import KINDS, Device, Link, Measured, Tier, Topology

SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24)

# small collectives are timed so often: a start is short, and easily interrupted on some rank
_OFTEN, _SMALL_BYTES = 20, 1 << 16
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
    between other levels stay as they are. `Topology.diff` says how far another topology's figures, such as a preset's,
    are from these.

    ranks: True compares the ranks: the topology says which of them compute faster or slower than rank 0 or have other
    memory (`Topology.with_rank`), so that `cf.pipeline` gives each what it can do. None does so where devices have
    other names or other memory, False leaves what the topology says of ranks. On busy CPUs a measured difference may
    come from other programs.
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
    """How many times as fast as another one a device multiplies matrices: the geometric mean over dtypes that both
    have.
    """
    shared = device.flops_per_s.keys() & other.flops_per_s.keys()
    return statistics.geometric_mean([device.flops_per_s[d] / other.flops_per_s[d] for d in shared]) if shared else 1.0


def fit(axis: str, size: int, kind: str, points: Sequence[tuple[int, float]]) -> Measured:
    """Least relative squares of seconds = alpha + beta·bytes with alpha, beta >= 0."""
    from scipy.optimize import nnls

    rows = torch.tensor([[1.0 / s, n / s] for n, s in points], dtype=torch.float64)
    # Columns of very different sizes upset NNLS, so both are scaled to 1 and the answer scaled back.
    scale = rows.abs().amax(0)
    alpha, beta = nnls((rows / scale).numpy(), [1.0] * len(points))[0]
    return Measured(axis, size, kind, float(alpha / scale[0]), float(beta / scale[1]))


def _device(mesh: Mesh) -> torch.device:
    """Where this rank measures: where steps on the mesh run; where the other ranks are not there, the GPU that this one
    would have.
    """
    joined = dist.is_available() and dist.is_initialized()
    return device_of(mesh if joined or mesh.device is not None else Mesh())


# --- collectives


def _time_collectives(mesh: Mesh, device: torch.device, sizes: Sequence[int], deadline: float) -> Samples:
    """Seconds of the slowest rank, the same on all ranks."""
    groups = {axis: _subgroup(mesh, axis) for axis, size in mesh.axes if size > 1}
    samples: Samples = {(axis, kind): [] for axis in groups for kind in KINDS}
    # Sizes outermost: when time is up, every axis and kind has the same sizes.
    for place, size in enumerate(sizes):
        for (axis, kind), points in samples.items():
            repeats = _OFTEN if size <= _SMALL_BYTES else REPEATS
            expected_s = points[-1][1] * max(1.0, size / points[-1][0]) * (repeats + 1) if points else 0.0
            if place >= 2 and not _agreed(time.perf_counter() + expected_s < deadline, device):
                continue
            nbytes, run = _collective(kind, mesh.group_of(dist.get_rank(), (axis,)), groups[axis], size, device)
            dist.barrier()
            slowest = torch.tensor(
                [least_run_s(run, device, repeats, by_host=True)], dtype=torch.float64, device=device
            )
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
    # All ranks copy at once, so contention for memory is already in the figures: they count per device.
    copied_bytes, seconds = copies_s(device)
    links = tuple(
        attrs.evolve(link, bandwidth_bytes_per_s=copied_bytes / seconds[link.src, link.dst], shared=False)
        if (link.src, link.dst) in seconds
        else link
        for link in base.links
    )
    launch = env.launched()
    sharing = launch.local_world_size if launch else base.node_devices
    tiers = tuple(_capacities(base, device, min(sharing, mesh.size)))
    return attrs.evolve(
        base,
        device=measured_device(base.device, device, deadline),
        links=_with_both(links, seconds, copied_bytes),
        tiers=tiers,
        node_devices=sharing,
        host_bytes_per_s=_host_bytes_per_s(min(sharing, mesh.size)),
    )


def _host_bytes_per_s(node_ranks: int) -> float:
    """Of updates on the host, by all ranks of a node together: each measures at the same time, one alone with the
    threads of all.
    """
    if dist.is_available() and dist.is_initialized():
        dist.barrier()
        return node_ranks * host_update_bytes_per_s()
    before = torch.get_num_threads()
    torch.set_num_threads(host_threads(node_ranks))
    try:
        return host_update_bytes_per_s()
    finally:
        torch.set_num_threads(before)


def _with_both(links: tuple[Link, ...], seconds: dict[tuple[str, str], float], nbytes: int) -> tuple[Link, ...]:
    have = {(link.src, link.dst) for link in links}
    new = (Link(*ends, nbytes / s, 0.0, shared=False) for ends, s in seconds.items() if ends not in have)
    return (*links, *new)


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
