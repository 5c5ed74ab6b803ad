"""Mesh: named axes over ranks, and what things cost on them.

Problem: parallel code speaks of ranks; people think in directions (data, tensor, pipeline). Idea: a mesh is a tuple of
named axes over row-major ranks (the last axis is fastest), an immutable value that needs no processes. A *view* is
another name for several axes, so that one part of a model can use the same ranks differently.

>>> mesh = Mesh(dp=2, tp=2, views={"all": ("dp", "tp")})
>>> mesh.groups(("dp",)), mesh.axis_size("all")
(((0, 2), (1, 3)), 4)

Source: named mesh axes as in GSPMD (2105.04663, section 3); costs in `colofunc.mesh.cost`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs
import torch.distributed as dist

from colofunc import env
from colofunc.errors import MeshError, near
from colofunc.mesh import cost
from colofunc.mesh.arguments import check_name, check_views, infer_sizes, sizes_text
from colofunc.mesh.parts import RankGroups, axis_part, groups, offsets, other_parts
from colofunc.mesh.presets import DEFAULT_TOPOLOGY, resolve_topology
from colofunc.mesh.topology import Topology


@attrs.frozen(init=False, repr=False, eq=False)
class Mesh:
    """Named axes over ranks 0..size-1, row-major. Immutable, hashable, equal by value, picklable.

    Keywords are axes in order, `name=size`; one size may be -1 where a launcher tells the number of ranks. views: name
    -> atomic axes, first is major. topology: a name, a Topology, or the path of a topology file; without one, steps on
    real ranks are planned for what the machine is measured at. device: where steps run, "cpu" or "cuda"; None: the GPU
    on ranks of an NCCL group, and for a mesh of one where there is one, else the host.
    """

    axes: tuple[tuple[str, int], ...]
    topology: Topology
    assumed: bool  # nobody named a topology: its figures are no machine's
    device: str | None
    _views: tuple[tuple[str, tuple[str, ...]], ...]
    _sizes: Mapping[str, int]  # axes and views
    _key: tuple[object, ...]
    _hash: int
    _costs: dict[tuple[str, tuple[str, ...], tuple[int, ...]], tuple[float, float]]  # memo of `alpha_beta`
    _ways: dict[tuple[str, ...], tuple[cost.GroupShape, ...]]  # how the groups along axes lie, for `alpha_beta`

    def __init__(
        self,
        /,
        *,
        views: Mapping[str, Iterable[str]] | None = None,
        topology: str | os.PathLike[str] | Topology | None = None,
        device: str | None = None,
        **axes: int,
    ) -> None:
        for name in axes:
            check_name(name, "axis")
        sizes = infer_sizes(axes)
        checked = check_views(sizes, views or {})
        resolved = resolve_topology(DEFAULT_TOPOLOGY if topology is None else topology)
        size = math.prod(sizes.values())
        if resolved.max_devices is not None and size > resolved.max_devices:
            raise MeshError(
                f"a mesh of {size} ranks ({sizes_text(sizes)}) is larger than topology {resolved.name!r}, which joins "
                f"{resolved.max_devices} devices; add an outer level to it or make the mesh smaller"
            )
        if device is not None and device not in ("cpu", "cuda"):
            raise MeshError(f"device {device!r} is not 'cpu', 'cuda' or None{near(str(device), ('cpu', 'cuda'))}")
        all_sizes = dict(sizes)
        for view, members in checked:
            all_sizes[view] = math.prod(sizes[axis] for axis in members)
        key = (tuple(sizes.items()), checked, resolved, device)
        self.__attrs_init__(
            tuple(sizes.items()),
            resolved,
            topology is None,
            device,
            checked,
            MappingProxyType(all_sizes),
            key,
            hash(key),
            {},
            {},
        )

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mesh):
            return NotImplemented
        return self is other or self._key == other._key

    def __reduce__(self) -> tuple[object, ...]:
        # Rebuilt on the other side: hashes of strings differ between processes.
        return _rebuild, (self.axes, self._views, None if self.assumed else self.topology, self.device)

    def __repr__(self) -> str:
        parts = [f"{name}={size}" for name, size in self.axes]
        if self._views:
            parts.append(f"views={dict(self._views)!r}")
        if self.topology.name != DEFAULT_TOPOLOGY:
            parts.append(f"topology={self.topology.name!r}")
        if self.device is not None:
            parts.append(f"device={self.device!r}")
        return f"Mesh({', '.join(parts)})"

    # --- axes and views

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Names of the atomic axes, major first."""
        return tuple(name for name, _ in self.axes)

    @property
    def views(self) -> Mapping[str, tuple[str, ...]]:
        """View name -> atomic axes."""
        return MappingProxyType(dict(self._views))

    @property
    def shape(self) -> dict[str, int]:
        """Atomic axis name -> size, in order."""
        return dict(self.axes)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(size for _, size in self.axes)

    def __contains__(self, name: object) -> bool:
        return name in self._sizes

    def axis_size(self, name: str) -> int:
        """Size of an axis, or the product of a view's axes."""
        if name not in self._sizes:
            raise self._unknown(name)
        return self._sizes[name]

    def expand(self, name: str) -> tuple[str, ...]:
        """Atomic axes of a name: an axis gives itself, a view its axes."""
        if name not in self._sizes:
            raise self._unknown(name)
        return dict(self._views).get(name, (name,))

    def atoms(self, names: Iterable[str]) -> tuple[str, ...]:
        """Atomic axes of several axes and views, in the given order; raises MeshError where one is repeated.

        A part of an axis, "dp[2:2]", stays as it is; see Note [Parts of axes].
        """
        names = (names,) if isinstance(names, str) else tuple(names)
        atoms: list[str] = []
        for name in names:
            if "[" in name:
                atoms.append(name)
            else:
                atoms += self.expand(name)
        for atom in atoms:
            self._check_part(atom)
        if len(set(atoms)) != len(atoms):
            twice = next(atom for atom in atoms if atoms.count(atom) > 1)
            raise MeshError(f"axis {twice!r} is used twice in {names} on {self!r}; name each axis once")
        return tuple(atoms)

    def ordered(self, names: Iterable[str]) -> tuple[str, ...]:
        """Atomic axes of names in the mesh's own order (major first)."""
        order = {axis: place for place, axis in enumerate(self.axis_names)}

        def place(name: str) -> tuple[int, int]:
            axis, stride, _ = axis_part(name)
            return order[axis], -stride  # of parts of one axis the one with the larger stride is major

        return tuple(sorted(self.atoms(names), key=place))

    def rest(self, names: Iterable[str]) -> tuple[str, ...]:
        """Atomic axes that are not among the names, in the mesh's order; of an axis used in part, the other parts."""
        chosen = self.atoms(names)
        # Parts of one axis leave other parts of it.
        if any("[" in name for name in chosen):
            return other_parts(self.axes, chosen)
        return tuple(name for name, _ in self.axes if name not in chosen)

    def stride(self, axis: str) -> int:
        """How far apart in rank two neighbours along an atomic axis are."""
        names = self.axis_names
        if axis not in names:
            raise self._unknown(axis, names)
        return math.prod(size for _, size in self.axes[names.index(axis) + 1 :])

    # --- ranks

    def coordinates(self, rank: int) -> dict[str, int]:
        """Atomic axis -> index of a rank."""
        self._check_rank(rank)
        out: dict[str, int] = {}
        # the last axis is the fastest
        for name, size in reversed(self.axes):
            rank, out[name] = divmod(rank, size)
        return dict(reversed(out.items()))

    def rank_at(self, coordinates: Mapping[str, int]) -> int:
        """The rank with these coordinates: every atomic axis once."""
        for name in coordinates:
            if name not in self.shape:
                raise self._unknown(name, self.axis_names)
        rank = 0
        for name, size in self.axes:
            if name not in coordinates:
                raise MeshError(f"coordinates {dict(coordinates)} of {self!r} lack axis {name!r}; give every axis")
            index = coordinates[name]
            if not 0 <= index < size:
                raise MeshError(f"index {index} of axis {name!r} is not in 0..{size - 1} on {self!r}")
            rank = rank * size + index
        return rank

    def index(self, rank: int, names: str | Iterable[str]) -> int:
        """Row-major index of a rank along axes and views (first is major): its place in its group."""
        here, out = self.coordinates(rank), 0
        for atom in self.atoms(names):
            axis, stride, _ = axis_part(atom)
            size = self.part_size(atom)
            out = out * size + here[axis] // stride % size
        return out

    def part_size(self, name: str) -> int:
        """Size of an axis, a view or a part of an axis."""
        return axis_part(name)[2] or self.axis_size(name)

    def at(self, **indices: int | Sequence[int]) -> tuple[int, ...]:
        """The ranks at these indices of axes: `mesh.at(pp=1)`, `mesh.at(pp=(0, 3), dp=0)`."""
        wanted: dict[str, tuple[int, ...]] = {}
        for axis, given in indices.items():
            if axis not in self.shape:
                raise self._unknown(axis, self.axis_names)
            wanted[axis] = (given,) if isinstance(given, int) else tuple(given)
            for index in wanted[axis]:
                if not 0 <= index < self.shape[axis]:
                    raise MeshError(f"index {index} of axis {axis!r} is not in 0..{self.shape[axis] - 1} on {self!r}")
        ranks = []
        for rank in range(self.size):
            place = self.coordinates(rank)
            if all(place[axis] in given for axis, given in wanted.items()):
                ranks.append(rank)
        return tuple(ranks)

    def groups(self, axes: Iterable[str]) -> RankGroups:
        """All groups of ranks that differ only in `axes` (axes or views).

        Inside a group, row-major by the given order of axes (first is major); groups are ordered row-major by the
        remaining axes.
        """
        return groups(self.axes, self.atoms(axes))

    def group_of(self, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
        """The group of `groups(axes)` that holds a rank."""
        self._check_rank(rank)
        atoms = self.atoms(axes)
        here = self.coordinates(rank)
        # the first member of the group has index 0 along these axes
        for axis, stride, size in map(axis_part, atoms):
            here[axis] -= here[axis] // stride % (size or self._sizes[axis]) * stride
        base = self.rank_at(here)
        return tuple(base + offset for offset in offsets(self.axes, atoms))

    @property
    def rank(self) -> int:
        """This process's rank: of the process group, else of the launcher, else 0."""
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank()
        launch = env.launched()
        return 0 if launch is None else launch.rank

    @property
    def is_main(self) -> bool:
        """Whether this process is rank 0."""
        return self.rank == 0

    # --- files

    def to_dict(self) -> dict[str, Any]:
        """JSON values that `from_dict` turns back into an equal mesh, the topology's figures included."""
        return {
            "axes": [list(axis) for axis in self.axes],
            "views": {name: list(axes) for name, axes in self._views},
            "topology": self.topology.to_dict(),
            "device": self.device,
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Mesh:
        """A mesh from what `to_dict` gave."""
        topology = Topology.from_dict(data["topology"])
        return Mesh(views=data["views"], topology=topology, device=data["device"], **dict(data["axes"]))

    @property
    def fingerprint(self) -> str:
        """A hash that is equal in every process and run, for caches on disk; `hash` is not."""
        return hashlib.sha256(json.dumps(self.to_dict()).encode()).hexdigest()[:16]

    # --- costs

    def with_topology(self, topology: str | os.PathLike[str] | Topology) -> Mesh:
        """The same mesh on another machine (or on measured figures)."""
        return Mesh(views=dict(self._views), topology=topology, device=self.device, **self.shape)

    def alpha_beta(self, kind: str, axes: Iterable[str], table: tuple[int, ...] = ()) -> tuple[float, float]:
        """(seconds, seconds per byte) of a collective over axes or views; (0, 0) for groups of one.

        table: of a permute, per member of a group (row-major by `axes`) the one whose data it gets; none: a ring shift
        by one.
        """
        key = (kind, tuple(axes) if not isinstance(axes, str) else (axes,), table)
        found = self._costs.get(key)
        if found is None:
            found = self._costs[key] = self._alpha_beta(*key)
        return found

    def link_levels(self, axes: Iterable[str]) -> tuple[int, ...]:
        """The topology's levels whose links a collective over `axes` uses, inner ones first; the innermost where it
        crosses none.

        With 4 devices in a box and axes dp=2, tp=4, `("tp",)` uses (0,), `("dp",)` (1,), as it has one rank in each
        box, and both together (0, 1).
        """
        names = tuple(name for name in self.ordered(axes) if self.part_size(name) > 1)
        if not names or len(self.topology.levels) < 2:
            return (0,)
        return cost.crossed(self._ways_of(names))

    def collective_s(self, kind: str, nbytes: float, axes: Iterable[str], table: tuple[int, ...] = ()) -> float:
        """Seconds of a collective that every group over `axes` runs at once.

        kind: all_gather, reduce_scatter, all_reduce, all_to_all, permute. nbytes: of the group's full buffer for the
        first three (output, input, either), of the local buffer for the others. table: of a permute, per member of a
        group (row-major by `axes`) the one whose data it gets; none: a ring shift by one.
        """
        alpha_s, beta_s = self.alpha_beta(kind, axes, table)
        return alpha_s + beta_s * nbytes if nbytes else 0.0

    def compute_s(self, flops: float, nbytes: float, dtype_name: str, kind: str = "") -> float:
        """Roofline seconds of one kernel that reads and writes `nbytes` of device memory.

        kind: of `colofunc.mesh.curves.KINDS`; where the machine has rates of such kernels by size, they count.
        """
        return cost.compute_s(self.topology, flops, nbytes, dtype_name, kind)

    @property
    def view_s(self) -> float:
        """Seconds of a view where the host computes; on a card they are those of the host, which runs ahead."""
        device = self.topology.device
        return 0.0 if device.host_launch_s else device.host_view_s

    def capacity_bytes(self, tier: str) -> int | None:
        """What one rank may hold in a tier ("device", "host", "disk"); None is unlimited.

        Where ranks have devices that differ: what each of them may hold, the least of all.
        """
        record = self.topology.tier(tier)
        if tier == "device":
            # where all devices are alike one stands for all
            ranks = range(self.size) if self.topology.ranks else (0,)
            capacities = [self.device_bytes(rank) for rank in ranks]
            return min((capacity for capacity in capacities if capacity is not None), default=None)
        if record.capacity_bytes is None or not record.shared:
            return record.capacity_bytes
        return record.capacity_bytes // self.node_ranks

    def device_bytes(self, rank: int) -> int | None:
        """What a rank may hold on its own device; None is unlimited."""
        self._check_rank(rank)
        own_bytes = self.topology.rank(rank).capacity_bytes
        capacity_bytes = self.topology.tier("device").capacity_bytes if own_bytes is None else own_bytes
        usable_bytes = None if capacity_bytes is None else capacity_bytes - self.topology.reserved_bytes
        limits = [limit for limit in (usable_bytes, self.topology.budget_bytes) if limit is not None]
        return min(limits, default=None)

    def speed(self, ranks: Iterable[int]) -> float:
        """How many times as fast as the topology's device the slowest of some ranks computes."""
        if not self.topology.ranks:
            return 1.0
        return min(self.topology.rank(rank).speed for rank in ranks)

    def copy_s(self, nbytes: float, src_tier: str, dst_tier: str) -> float:
        """Seconds for every rank to copy `nbytes` between tiers at once; device to disk goes through host memory."""
        return cost.copy_s(self.topology, nbytes, src_tier, dst_tier, self.node_ranks)

    def host_s(self, nbytes: float) -> float:
        """Seconds for every rank to have the host read and write `nbytes` of its memory in an elementwise kernel."""
        return nbytes * self.node_ranks / self.topology.host_bytes_per_s

    @property
    def node_ranks(self) -> int:
        """Ranks that share one node's host memory and disks."""
        return min(self.topology.node_devices, self.size)

    # --- internal

    def _alpha_beta(self, kind: str, axes: tuple[str, ...], table: tuple[int, ...]) -> tuple[float, float]:
        kind = cost.check_kind(kind)
        spanned = [(name, self.part_size(name)) for name in self.ordered(axes) if self.part_size(name) > 1]
        # groups of one, and permutations that move nothing
        if not spanned or table == tuple(range(len(table) or 1)):
            return 0.0, 0.0
        names = tuple(name for name, _ in spanned)
        measured = cost.measured_alpha_beta(self._measured, kind, spanned) if self.topology.measured else None
        if measured is None:
            return self._by_table(axes, table) if table else self._of_links(kind, names)
        if table:  # what was measured is a ring shift by one
            return cost.scaled_figures(measured, self._by_table(axes, table), self._of_links(kind, names))
        return measured

    def _by_table(self, axes: tuple[str, ...], table: tuple[int, ...]) -> tuple[float, float]:
        """What the links give a permute; its table counts members in the order of `axes`."""
        return cost.permute_alpha_beta(self.topology, self.groups(axes), table, self.size)

    def _of_links(self, kind: str, names: tuple[str, ...]) -> tuple[float, float]:
        """What the links between the ranks of each group give; a permute is a ring shift by one."""
        if kind == "permute":
            return self._by_table(names, cost.rotation(math.prod(map(self.part_size, names))))
        return cost.alpha_beta(self.topology, kind, self._ways_of(names), self.size)

    def _ways_of(self, names: tuple[str, ...]) -> tuple[cost.GroupShape, ...]:
        """How the groups along parts of axes lie."""
        ways = self._ways.get(names)
        if ways is None:
            ways = self._ways[names] = cost.group_shapes(self.topology, self.groups(names))
        return ways

    def _measured(self, kind: str, named: tuple[str, int]) -> tuple[float, float] | None:
        """What was measured along an axis; a part of one has the axis' own links, and fewer ranks on them."""
        name = named[0]
        axis = axis_part(name)[0]
        wanted = (axis, self.shape.get(axis), kind)
        for measured in self.topology.measured:
            if (measured.axis, measured.size, measured.kind) == wanted:
                alpha_beta = measured.alpha_s, measured.beta_s_per_byte
                break
        else:
            return None
        if axis == name:
            return alpha_beta
        part, whole = self._of_links(kind, (name,)), self._of_links(kind, (axis,))
        return cost.scaled_figures(alpha_beta, part, whole)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise MeshError(f"rank {rank} is not in 0..{self.size - 1} of {self!r}")

    def _check_part(self, name: str) -> None:
        axis, stride, size = axis_part(name)
        if size and (axis not in self.shape or self.shape[axis] % (stride * size)):
            raise MeshError(f"{name!r} is no part of an axis of {self!r}; stride * size must divide the axis")

    def _unknown(self, name: str, known: Iterable[str] | None = None) -> MeshError:
        names = tuple(self._sizes) if known is None else tuple(known)
        return MeshError(f"no axis {name!r} on {self!r}{near(str(name), names, 'axes')}")


def _rebuild(
    axes: tuple[tuple[str, int], ...],
    views: tuple[tuple[str, tuple[str, ...]], ...],
    topology: Topology | None,
    device: str | None,
) -> Mesh:
    return Mesh(views=dict(views), topology=topology, device=device, **dict(axes))
