"""Seconds and bytes of collectives, copies and computation on a topology.

Problem: a planner asks millions of times what a collective over some axes costs. Idea: the cost is alpha + beta·bytes,
so the two numbers are worked out once per (kind, axes) from where the groups' ranks really sit.

>>> wire_bytes("all_gather", 1024, 4)
768

Note [Levels]. A group of n ranks occupies d_k domains of level k (d_-1 = n devices, 1 domain at the outermost level it
spans). Its rings pass through all ranks, so (n-1)/n of the buffer crosses every link on the way: within a box each
device's own, between boxes those of all the group's devices in a box together, a ring for each. Pieces follow one
another, so the slowest level alone decides about bytes, while the first piece takes a message for each hop: d_(k-1) -
d_k of level k, n-1 in all. Published all-reduces agree: 32 B200 and 24 A100 in boxes of 8 reach what the network cards
of a box have together (382 of 400 and 96 of 100 GB/s), and 1 MB over 32 B200 takes 0.29 ms, 62 messages, of 0.41
(stas00/ml-engineering, NVIDIA/nccl-tests#119; tests/test_curves.py). NCCL itself counts messages of an all-reduce over
several boxes 1.4 times (src/graph/tuning.cc, "plateau effect of ring"), which would be 0.40 ms; those of its two halves
it does not, which all plans would take for the whole then. It is left out. An all-to-all reaches the peers outside its
own domain directly, so its shares are the fractions of peers that are new at each level, one level after the other.

Note [Contention]. SPMD: all groups of a collective run at once. A "device" link is each device's own. An "uplink"
carries the traffic of all devices of its inner domain. A "medium" carries that of all devices of its domain. Links in
"pairs" lead from each device to each other one: two of four devices use a third of theirs. Of a permute those ranks of
an inner domain share its uplink whose giver is outside: one of each group in a ring shift by one, all where the shift
is by a whole domain.

Source: alpha-beta model (Hockney 1994); Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication
Operations in MPICH", 2005, for the byte counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from colofunc.errors import MeshError, TopologyError, near
from colofunc.mesh.topology import KINDS, Level, Topology

RankGroup = tuple[int, ...]
Stage = Callable[[str, tuple[str, int]], tuple[float, float] | None]
"""What was measured of a collective along an axis, or a part of one, of a size; None where nothing was."""

# What to use when a device has no rate of its own for a dtype: the next in line that it has.
_INSTEAD: dict[str, tuple[str, ...]] = {
    "float64": ("float32",),
    "bfloat16": ("float32",),
    "float16": ("bfloat16", "float32"),
    "tf32": ("float32",),
    "float8": ("float16", "bfloat16", "float32"),
    "int8": ("float16", "float32"),
    "uint8": ("int8", "float16", "float32"),
    "complex128": ("float64", "float32"),
}


def check_kind(kind: str) -> str:
    """The kind of a collective that a cost is that of, or an error with near names: a send costs what a permutation
    does, one message.
    """
    if kind == "send":
        return "permute"
    if kind not in KINDS:
        raise MeshError(f"no collective {kind!r}{near(kind, KINDS, 'collectives')}")
    return kind


def wire_bytes(kind: str, nbytes: int, n: int) -> int:
    """Bytes that each of n devices receives (ring algorithms), rounded up.

    nbytes: the group's full buffer for all_gather (its output), reduce_scatter (its input) and all_reduce; the local
    buffer for all_to_all and permute.
    """
    kind = check_kind(kind)
    if n <= 1:
        return 0
    if kind == "permute":
        return nbytes
    times = 2 if kind == "all_reduce" else 1
    return -(-times * (n - 1) * nbytes // n)


@attrs.frozen
class GroupShape:
    """How the ranks of a group lie: `size` ranks; per level `domains`, see `group_shapes`."""

    size: int
    domains: tuple[tuple[int, int], ...]


def group_shapes(topology: Topology, groups: Sequence[RankGroup]) -> tuple[GroupShape, ...]:
    """How groups of equal size lie, each way once. For every kind of collective alike, so that a mesh asks once.

    Per level: domains that a group occupies, and the fewest ranks of it in one of them. See Note [Levels]. The fewest,
    because the rank with the most peers outside its domain is the slowest.
    """
    ranks = np.sort(np.array(groups), axis=1)
    size = ranks.shape[1]
    if size < 2:
        return ()
    columns = [
        _domains(ranks if level.size is None else ranks // level.size, level.size is None) for level in topology.levels
    ]
    ways = np.unique(np.concatenate(columns, axis=1), axis=0) if columns else np.zeros((1, 0), dtype=np.int64)
    return tuple(GroupShape(size, tuple(zip(way[::2], way[1::2], strict=True))) for way in ways.tolist())


def _domains(homes: NDArray[np.int64], one: bool) -> NDArray[np.int64]:
    """Per row of ranks' domains, in order: how many there are, and the ranks of the one that has the fewest. one: all
    are the same.
    """
    rows, size = homes.shape
    if one:
        return np.tile([1, size], (rows, 1))
    begins = np.ones((rows, size), dtype=bool)  # where a domain's ranks begin
    begins[:, 1:] = homes[:, 1:] != homes[:, :-1]
    at = np.flatnonzero(begins)
    lengths = np.diff(at, append=rows * size)
    counts = begins.sum(axis=1)
    first = np.concatenate(([0], np.cumsum(counts)[:-1]))
    return np.stack([counts, np.minimum.reduceat(lengths, first)], axis=1)


def crossed(ways: Sequence[GroupShape]) -> tuple[int, ...]:
    """The levels at which some group joins several domains, inner ones first; the innermost alone where none does."""
    found = set[int]()
    for way in ways:
        outside = way.size
        for level, (domains, _) in enumerate(way.domains):
            if domains < outside:
                found.add(level)
            outside = domains
    return tuple(sorted(found)) or (0,)


def alpha_beta(topology: Topology, kind: str, ways: Sequence[GroupShape], mesh_size: int) -> tuple[float, float]:
    """(seconds, seconds per byte) of the slowest group of one collective but a permute; bytes as in `wire_bytes`."""
    check_kind(kind)
    costs = [_group_cost(topology.levels, kind, way.size, way.domains, mesh_size) for way in ways]
    return max((a for a, _ in costs), default=0.0), max((b for _, b in costs), default=0.0)


def _group_cost(
    levels: Sequence[Level], kind: str, n: int, domains: tuple[tuple[int, int], ...], mesh_size: int
) -> tuple[float, float]:
    alpha_s = beta_s = 0.0
    outside, near_ranks, inner_size = n, 1, 1  # domains one level further in, its ranks per domain, its size
    for level, (d, ranks) in zip(levels, domains, strict=True):
        if d < outside:
            sharers: float = _sharers(level, inner_size, mesh_size)
            # of links to as many others, those to peers are of use
            if level.sharing == "pairs" and level.size is not None:
                sharers = (level.size - 1) / max(1, ranks - 1)
            gain = level.all_reduce_gain if kind == "all_reduce" else 1.0
            s_per_byte = sharers / (level.bandwidth_bytes_per_s * gain)
            if kind == "all_to_all":
                alpha_s += (math.ceil(outside / d) - 1) * level.latency_s
                beta_s += (ranks - near_ranks) / n * s_per_byte
            else:
                alpha_s += (outside - d) * level.latency_s
                beta_s = max(beta_s, (n - 1) / n / near_ranks * s_per_byte)
        outside, near_ranks, inner_size = d, ranks, level.size or inner_size
    times = 2 if kind == "all_reduce" else 1
    return times * alpha_s, times * beta_s


def rotation(n: int, by: int = 1) -> tuple[int, ...]:
    """The table of a ring shift over n members: per member the one whose data it gets."""
    return tuple((k - by) % n for k in range(n))


def permute_alpha_beta(
    topology: Topology, groups: Sequence[RankGroup], table: Sequence[int], mesh_size: int
) -> tuple[float, float]:
    """`alpha_beta` of a permute. table: per member of a group the one whose data it gets.

    The slowest pair decides, of those whose data crosses one box as of those between boxes: many that share a bus may
    take longer than the one that leaves it. A device's own links carry what stays within their level; an uplink or a
    medium also what goes further.
    """
    ranks = np.array(groups)
    givers = ranks[:, list(table)]
    alpha_s = beta_s = 0.0
    inner_size = 1
    for level in topology.levels:
        homes, outer_size = ranks // inner_size, level.size or max(mesh_size, inner_size)
        domains = ranks // outer_size
        crosses = homes != givers // inner_size
        ends_here = crosses & (domains == givers // outer_size)
        sharers: float = 0
        if level.sharing == "uplink" and crosses.any():
            sharers = int(np.bincount(homes[crosses]).max())
        elif level.sharing == "medium" and crosses.any():
            sharers = int(np.bincount(domains[crosses]).max())
        elif level.sharing == "pairs" and level.size is not None and ends_here.any():
            sharers = level.size - 1  # one of a device's links leads to its peer
        elif ends_here.any():
            sharers = 1
        if sharers:
            alpha_s, beta_s = max(alpha_s, level.latency_s), max(beta_s, sharers / level.bandwidth_bytes_per_s)
        inner_size = level.size or inner_size
    return alpha_s, beta_s


def _sharers(level: Level, inner_size: int, mesh_size: int) -> int:
    """How many devices use one link of this level at once. See Note [Contention]."""
    if level.sharing in ("device", "pairs"):
        return 1
    if level.sharing == "uplink":
        return min(mesh_size, inner_size)
    return min(mesh_size, level.size or mesh_size)


def scaled_figures(
    measured: tuple[float, float], part: tuple[float, float], whole: tuple[float, float]
) -> tuple[float, float]:
    """Figures of a part of an axis that was measured as a whole: as much less as the links that it spans let expect.

    part, whole: what `alpha_beta` says of both. Where that is nothing, as of free links, the figures stay.
    """
    alpha_s, beta_s = (m * p / w if w else m for m, p, w in zip(measured, part, whole, strict=True))
    return alpha_s, beta_s


def measured_alpha_beta(stage: Stage, kind: str, axes: Sequence[tuple[str, int]]) -> tuple[float, float] | None:
    """The same from the profiler's figures, None unless every axis was measured at its size. stage: those of one axis.

    Several axes are priced as stages, one axis at a time, the slowest axis while the buffer is smallest.
    """
    if len(axes) == 1:
        return stage(kind, axes[0])
    parts = [stage(kind, axis) for axis in axes]
    if not axes or any(part is None for part in parts):
        return None
    if kind == "all_to_all":
        return sum(p[0] for p in parts if p), sum(p[1] for p in parts if p)
    if kind == "permute":
        return max(p[0] for p in parts if p), max(p[1] for p in parts if p)
    order = sorted(axes, key=lambda axis: -(stage(kind, axis) or (0.0, 0.0))[1])
    # An all-reduce over several axes scatters over the fast ones, reduces over the slowest, and gathers again.
    kinds = (
        [(kind,)] * len(order)
        if kind != "all_reduce"
        else [(kind,)] + [("reduce_scatter", "all_gather")] * (len(order) - 1)
    )
    alpha_s = beta_s = 0.0
    fraction = 1.0 / math.prod(size for _, size in order)  # of the full buffer that a stage's result (or input) is
    for axis, names in zip(order, kinds, strict=True):
        fraction *= axis[1]
        for name in names:
            part = stage(name, axis)
            if part is None:
                return None
            alpha_s, beta_s = alpha_s + part[0], beta_s + part[1] * fraction
    return alpha_s, beta_s


def compute_s(topology: Topology, flops: float, nbytes: float, dtype_name: str, kind: str = "") -> float:
    """Roofline: the longer of computing and moving `nbytes` through device memory, plus one launch.

    kind: see `Device.work_rate`; kernels of a kind that the device has no rates of are those of the roofline alone.
    """
    device = topology.device
    known = device.work_rate(kind, dtype_name.removeprefix("torch.")) if kind and device.work else None
    if known is None:
        return max(flops / rate(topology, dtype_name), nbytes / device.memory_bytes_per_s) + device.launch_s
    if kind == "product":
        return max(flops / known.at(flops), nbytes / device.memory_bytes_per_s) + device.launch_s
    return (known.seconds(nbytes) if nbytes else 0.0) + device.launch_s


def rate(topology: Topology, dtype_name: str) -> float:
    """Operations per second for a dtype ("float32" or "torch.float32"); a dtype without a rate uses the nearest."""
    rates = topology.device.flops_per_s
    if dtype_name in rates:
        return rates[dtype_name]
    name = dtype_name.removeprefix("torch.")
    name = "float8" if name.startswith("float8") else name
    for candidate in (name, *_INSTEAD.get(name, ()), "float32"):
        if candidate in rates:
            return rates[candidate]
    raise TopologyError(f"device {topology.device.name!r} has no rate for {dtype_name!r} or float32; add a Rate")


def copy_s(topology: Topology, nbytes: float, src_tier: str, dst_tier: str, node_ranks: int) -> float:
    """Seconds to move bytes between tiers while all `node_ranks` devices of a node do the same.

    A device may have a link of its own: what the host's memory gives, twice what an elementwise kernel reaches, is for
    all.
    """
    topology.tier(src_tier), topology.tier(dst_tier)  # raise on unknown names
    if src_tier == dst_tier or nbytes == 0:
        return 0.0
    links = {(link.src, link.dst): link for link in topology.links}
    hops = [(src_tier, dst_tier)] if (src_tier, dst_tier) in links else [(src_tier, "host"), ("host", dst_tier)]
    seconds = 0.0
    for hop in hops:
        link = links.get(hop)
        if link is None:
            raise TopologyError(f"topology {topology.name!r} has no link {hop[0]} -> {hop[1]}; add one to its links")
        each = link.bandwidth_bytes_per_s / (node_ranks if link.shared else 1)
        if "host" in hop and math.isfinite(each):  # on an ideal machine no link has a limit
            each = min(each, 2 * topology.host_bytes_per_s / node_ranks)
        seconds += link.latency_s + nbytes / each
    return seconds
