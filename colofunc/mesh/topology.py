"""Topology: what the machine under a mesh can do, in figures that a file can hold.

Problem: a planner needs seconds, not adjectives. Idea: a frozen record of the device (rates, memory), of the levels
of links between devices (innermost first), of the memory tiers and the links between them, and of what a profiler
measured. Presets are made of published figures; a file holds measured ones. Nothing here knows a mesh.

>>> Topology.load("mybox.json") == topology        # after topology.save("mybox.json")

Source of the cost model: alpha-beta (Hockney 1994), level by level; see `colofunc.mesh.cost`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import attrs

from colofunc import owned, untrusted
from colofunc.errors import TopologyError, near
from colofunc.mesh.curves import AttentionRate, Tiles, WorkRate, attention_flops_per_s
from colofunc.mesh.sizes import size_text
from colofunc.mesh.software import Software, software

FORMAT_VERSION = 1
MARK = "colofunc_topology"
INFINITY = "unlimited"
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute")
TIERS = ("device", "host", "disk")

_NOT_IN_OLDER_FILES = (
    ("attention", ()), ("sustained", 1.0), ("work", ()), ("host_launch_s", 0.0), ("host_view_s", 0.0), ("contention", 0.0),
    ("tiles", None),
)  # fmt: skip
"""Fields of a device, and what they are where a file has none."""

LevelSharing = Literal["device", "pairs", "uplink", "medium"]
"""Whose a level's bandwidth is: each device's own link, through a switch to any other · each device's own, an equal
part of it to each other device of its domain · one uplink per inner domain (a node's network card), shared by its
devices · one medium per domain (a bus, the memory of a CPU box), shared by all devices in it."""


def _positive(instance: object, attribute: attrs.Attribute[Any], value: float) -> None:
    if not value > 0:
        raise TopologyError(f"{type(instance).__name__}.{attribute.name} is {value!r}; give a number above 0")


def _not_negative(instance: object, attribute: attrs.Attribute[Any], value: float) -> None:
    if not 0 <= value < math.inf:
        raise TopologyError(f"{type(instance).__name__}.{attribute.name} is {value!r}; give a finite number, 0 or more")


def _positive_or_none(instance: object, attribute: attrs.Attribute[Any], value: float | None) -> None:
    if value is not None:
        _positive(instance, attribute, value)


def _one_of(*names: str) -> Any:
    def check(instance: object, attribute: attrs.Attribute[Any], value: str) -> None:
        if value not in names:
            raise TopologyError(f"{type(instance).__name__}.{attribute.name} is {value!r}{near(value, names)}")

    return check


@attrs.frozen
class Rate:
    """Floating-point (or integer) operations per second for one dtype; a multiply-add counts two."""

    dtype: str
    flops_per_s: float = attrs.field(validator=_positive, converter=float)


@attrs.frozen
class Device:
    """One device: how fast it computes and how fast it reads its own memory.

    sustained: `rates` are this part of what single products reach, because that much is left where whole steps of them
    run. attention, work: rates of kernels by size, where they are known. host_launch_s, host_view_s: in which the host
    hands out a kernel, and makes a view; 0 where that is not known. contention: by how much longer an operator takes
    while a collective runs beside it, 0.2 for a fifth; 0 where the clock is not to count that (`program.lanes`, Note
    [Contention with compute]). tiles: by which the rate of a product goes by its sizes (`mesh.curves`, Note
    [Products]); None where all have the same.
    """

    name: str
    rates: tuple[Rate, ...]
    memory_bytes_per_s: float = attrs.field(validator=_positive, converter=float)
    launch_s: float = attrs.field(validator=_not_negative, converter=float)
    attention: tuple[AttentionRate, ...] = ()
    sustained: float = attrs.field(default=1.0, validator=_positive, converter=float)
    work: tuple[WorkRate, ...] = ()
    host_launch_s: float = attrs.field(default=0.0, validator=_not_negative, converter=float)
    host_view_s: float = attrs.field(default=0.0, validator=_not_negative, converter=float)
    contention: float = attrs.field(default=0.0, validator=_not_negative, converter=float)
    tiles: Tiles | None = None

    @cached_property
    def flops_per_s(self) -> Mapping[str, float]:
        """Operations a second by dtype."""
        return {one.dtype: one.flops_per_s for one in self.rates}

    def work_rate(self, kind: str, dtype: str) -> WorkRate | None:
        """Of kernels of a kind; those of another dtype than products are alike by their bytes."""
        for one in self.work:
            if one.kind == kind and (kind != "product" or one.dtype == dtype):
                return one
        return None


@attrs.frozen
class Level:
    """Links that join inner domains (single devices at the innermost level) into domains of `size` devices.

    size: devices of one domain, None for as many as there are. bandwidth: each direction, of whom `sharing` says.
    all_reduce_gain: by what an all-reduce is faster than twice a gather of its bytes, where switches add up (NVLink
    SHARP).
    """

    name: str
    size: int | None = attrs.field(validator=_positive_or_none)
    bandwidth_bytes_per_s: float = attrs.field(validator=_positive, converter=float)
    latency_s: float = attrs.field(validator=_not_negative, converter=float)
    sharing: LevelSharing = attrs.field(default="device", validator=_one_of("device", "pairs", "uplink", "medium"))
    all_reduce_gain: float = attrs.field(default=1.0, validator=_positive, converter=float)


@attrs.frozen
class Tier:
    """A memory tier. capacity: None is unlimited; `shared` capacity belongs to all devices of a node together."""

    name: str = attrs.field(validator=_one_of(*TIERS))
    capacity_bytes: int | None = attrs.field(validator=_positive_or_none)
    shared: bool


@attrs.frozen
class Link:
    """One direction between two tiers. `shared` bandwidth belongs to all devices of a node together."""

    src: str = attrs.field(validator=_one_of(*TIERS))
    dst: str = attrs.field(validator=_one_of(*TIERS))
    bandwidth_bytes_per_s: float = attrs.field(validator=_positive, converter=float)
    latency_s: float = attrs.field(validator=_not_negative, converter=float)
    shared: bool


@attrs.frozen
class Measured:
    """Seconds of one collective over one axis of a known size: alpha_s + beta_s_per_byte * nbytes."""

    axis: str
    size: int = attrs.field(validator=_positive)
    kind: str = attrs.field(validator=_one_of(*KINDS))
    alpha_s: float = attrs.field(validator=_not_negative, converter=float)
    beta_s_per_byte: float = attrs.field(validator=_not_negative, converter=float)


@attrs.frozen
class RankDevice:
    """How the device of one rank differs from `Topology.device`.

    speed: it computes so many times as fast (0.5: half as fast). capacity_bytes: its own memory; None: that of the
    tier.
    """

    rank: int = attrs.field(validator=_not_negative)
    speed: float = attrs.field(default=1.0, validator=_positive, converter=float)
    capacity_bytes: int | None = attrs.field(default=None, validator=_positive_or_none)


@attrs.frozen
class Topology:
    """A machine: `node_devices` devices share a node's host memory and disks; `levels` are ordered inside out.

    host_bytes_per_s: what an elementwise kernel on the host (an update) reads and writes, all devices of a node
    together. reserved_bytes: of each device's memory, what no plan may use: the driver's context, buffers of
    collectives, workspaces of libraries. ranks: the devices that are not as `device` says; see `with_rank`. software:
    see `with_software`. budget_bytes: what a plan may hold on a device at most, where that is less than the device has.
    """

    name: str
    device: Device
    node_devices: int = attrs.field(validator=_positive)
    levels: tuple[Level, ...]
    tiers: tuple[Tier, ...]
    links: tuple[Link, ...]
    measured: tuple[Measured, ...] = ()
    host_bytes_per_s: float = attrs.field(default=100e9, validator=_positive, converter=float)
    reserved_bytes: int = attrs.field(default=0, validator=_not_negative)
    ranks: tuple[RankDevice, ...] = ()
    software: Software = attrs.field(factory=Software)
    budget_bytes: int | None = attrs.field(default=None, validator=_positive_or_none)

    def __attrs_post_init__(self) -> None:
        size: int | None = 1
        for level in self.levels:
            if size is None or (level.size is not None and (level.size < size or level.size % size)):
                raise TopologyError(
                    f"topology {self.name!r}: level {level.name!r} of size {level.size} does not hold whole domains of "
                    f"the level inside it (size {size}); list levels from the inside out, an unlimited one last"
                )
            size = level.size
        for what, names in (("level", [x.name for x in self.levels]), ("tier", [x.name for x in self.tiers])):
            if len(set(names)) != len(names):
                raise TopologyError(f"topology {self.name!r}: a {what} is listed twice in {names}; give each one name")
        capacity_bytes = next((x.capacity_bytes for x in self.tiers if x.name == "device"), None)
        numbers = [device.rank for device in self.ranks]
        if len(set(numbers)) != len(numbers):
            raise TopologyError(f"topology {self.name!r}: a rank is listed twice in {numbers}; give each one device")
        own_bytes = [device.capacity_bytes for device in self.ranks if device.capacity_bytes is not None]
        if own_bytes and (capacity_bytes is None or min(own_bytes) < capacity_bytes):
            capacity_bytes = min(own_bytes)
        if capacity_bytes is not None and self.reserved_bytes >= capacity_bytes:
            raise TopologyError(
                f"topology {self.name!r} reserves {self.reserved_bytes:,} of the device's {capacity_bytes:,} bytes; "
                "leave some for plans"
            )
        if sorted(x.name for x in self.tiers) != sorted(TIERS):
            raise TopologyError(
                f"topology {self.name!r} has tiers {[x.name for x in self.tiers]}; give exactly {', '.join(TIERS)}"
            )

    @property
    def max_devices(self) -> int | None:
        """How many devices the links can join; None for any number."""
        return self.levels[-1].size if self.levels else 1

    def with_rank(self, rank: int, speed: float = 1.0, capacity_bytes: int | None = None) -> Topology:
        """The same machine with another device at a rank, as where cards of two generations stand in one rack.

        speed: it computes so many times as fast as the others. capacity_bytes: its own memory; None: as the others.
        `cf.pipeline` cuts layers by both, and plans keep to the memory of each rank. Raises TopologyError for figures
        that are not above 0.
        """
        others = tuple(device for device in self.ranks if device.rank != rank)
        return attrs.evolve(self, ranks=(*others, RankDevice(rank, speed, capacity_bytes)))

    def with_software(
        self,
        attention: str = "",
        collectives: Mapping[str, str] | None = None,
        fused: bool = False,
        blocks: bool = False,
        flat: bool = False,
        uncompiled: Sequence[str] = (),
    ) -> Topology:
        """The same machine, on which other software runs the step: what a plan for it says is to be compared with that
        software's runs.

        attention: the kernel by whose rates attention counts, of those that the device's file has ("flash", "cudnn",
        "triton", "flash3"); "" for the quickest of torch's. collectives: mesh axis -> "early" (as here), "waits" or
        "chunks", see `colofunc.mesh.software`. fused: it has kernels by hand for what stands between products, which
        copy nothing between layouts but what collectives bring and take; what is compiled is `step.on("compiled")`.
        blocks: no collective has parameters of two blocks (modules with a number), as in FSDP; here as many go together
        as a message's latency makes worth it. flat: gathered parameters are views of one flat tensor, as in FSDP's
        first version; here, and in its second, they are copied out of what came. uncompiled: paths of modules that a
        compiled step leaves as they are, such as a loss that is called behind a compiled model.

        Plans only: a step that runs uses its own kernels. Raises TopologyError for a kernel without rates, or a way
        that there is not.
        """
        known = dict.fromkeys(one.kernel for one in self.device.attention)
        if attention and attention not in known:
            there = (
                f"; it has rates of {', '.join(known)}"
                if known
                else "; it has rates of no kernel: plan for one that was measured"
            )
            raise TopologyError(
                f"device {self.device.name!r} has no attention by {attention!r}{near(attention, known)}{there}"
            )
        return attrs.evolve(self, software=software(attention, collectives or {}, fused, blocks, flat, uncompiled))

    def rank(self, rank: int) -> RankDevice:
        """What is known of the device of a rank."""
        for device in self.ranks:
            if device.rank == rank:
                return device
        return RankDevice(rank)

    def tier(self, name: str) -> Tier:
        """The memory tier of that name."""
        for tier in self.tiers:
            if tier.name == name:
                return tier
        raise TopologyError(f"no memory tier {name!r}{near(name, TIERS, 'tiers')}")

    def figures(self, like: Device | None = None) -> dict[str, float]:
        """What plans read of a device, in the units that the names say.

        like: attention and kernels by size are given in the sizes that are known of this other device; None: of this
        one.
        """
        device, sizes = self.device, like or self.device
        found = {}
        for rate in device.rates:
            found[f"{rate.dtype} products at best, TFLOP/s"] = rate.flops_per_s / device.sustained / 1e12
        found["part of products' rate that steps have left"] = device.sustained
        found["its memory, GB/s"] = device.memory_bytes_per_s / 1e9
        found["a kernel beside its work, microseconds"] = device.launch_s * 1e6
        found["how much longer a kernel takes beside a collective"] = device.contention
        found["a kernel that the host hands out, microseconds"] = device.host_launch_s * 1e6
        found["a view that the host makes, microseconds"] = device.host_view_s * 1e6
        for one in sizes.attention:
            for keys, _, _ in one.points:
                for backward, word in ((False, "forward"), (True, "backward")):
                    name = f"{one.kernel} attention {word}, heads of {one.head}, {keys:g} keys a row, TFLOP/s"
                    found[name] = (
                        attention_flops_per_s(device.attention, one.kernel, one.head, keys, backward) or 0.0
                    ) / 1e12
        for curve in sizes.work:
            known, is_product = device.work_rate(curve.kind, curve.dtype), curve.kind == "product"
            for work, _ in curve.points:
                size, unit, scale = (
                    (f"{work / 1e9:.3g} GFLOP", "TFLOP/s", 1e12) if is_product else (size_text(work), "GB/s", 1e9)
                )
                if known is not None:
                    per_s = known.at(work)
                else:
                    per_s = device.flops_per_s.get(curve.dtype, 0.0) if is_product else device.memory_bytes_per_s
                found[f"{curve.dtype} {curve.kind} of {size}, {unit}"] = per_s / scale
        for link in self.links:
            if {link.src, link.dst} == {"host", "device"}:
                found[f"{link.src} to {link.dst}, GB/s"] = link.bandwidth_bytes_per_s / 1e9
        found["updates on the host, all devices of a node together, GB/s"] = self.host_bytes_per_s / 1e9
        return {name: figure for name, figure in found.items() if figure}

    def diff(self, other: Topology) -> str:
        """This machine's figures of a device beside another's, such as what was measured beside a preset: a line a
        figure.
        """
        others, lines = other.figures(self.device), [f"{self.name} beside {other.name}:"]
        for name, figure in self.figures().items():
            beside = f", {others[name]:.4g} there ({figure / others[name]:.2f})" if name in others else ""
            lines.append(f"  {name}: {figure:.4g}{beside}")
        return "\n".join(lines)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a readable, versioned JSON file. Raises TopologyError where the path is a file that is no topology."""
        text = json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"
        owned.write_text(path, text, MARK, "Topology.save", TopologyError)

    def to_dict(self) -> dict[str, Any]:
        """The versioned JSON values of the file format."""
        data = {"colofunc_topology": FORMAT_VERSION, **_encode(self)}
        if not self.reserved_bytes:  # a field that files of older versions do not have
            del data["reserved_bytes"]
        for name, absent in _NOT_IN_OLDER_FILES:
            if getattr(self.device, name) == absent:
                del data["device"][name]
        for level, values in zip(self.levels, data["levels"], strict=True):
            if level.all_reduce_gain == 1.0:
                del values["all_reduce_gain"]
        if not self.ranks:
            del data["ranks"]
        if self.software == Software():
            del data["software"]
        if self.budget_bytes is None:
            del data["budget_bytes"]
        return data

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Topology:
        """A topology from the values of the file format; raises TopologyError on unknown, missing, ill-typed fields."""
        version = data.get("colofunc_topology") if isinstance(data, Mapping) else None
        if version != FORMAT_VERSION:
            raise TopologyError(
                f"the topology has format version {version!r:.80}, this colofunc reads {FORMAT_VERSION}; "
                "write it again with Topology.save"
            )
        fields = {key: value for key, value in data.items() if key != "colofunc_topology"}
        try:
            return untrusted.build(Topology, fields, "topology", infinity=INFINITY)
        except untrusted.Wrong as error:
            raise TopologyError(f"{error}; mend it, or write the file with Topology.save") from error

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Topology:
        """Read what `save` wrote; raises TopologyError as `from_dict` does, and on files that cannot be read."""
        where = owned.given(path, "Topology.load", TopologyError, owned.A_FILE)
        try:
            data = untrusted.read_json(where)
        except OSError as error:
            way = "name a file that is there, or a machine such as 8xh100"
            raise TopologyError(f"cannot read topology file {str(path)!r}: {error.strerror or error}; {way}") from error
        except ValueError as error:
            raise TopologyError(f"topology file {str(path)!r} cannot be used: {error}") from error
        try:
            return Topology.from_dict(data)
        except TopologyError as error:
            error.add_note(f"in topology file {str(path)!r}")
            raise


def _encode(value: Any) -> Any:
    """Records to JSON values; JSON has no infinity, so an infinite bandwidth is a word."""
    if attrs.has(type(value)):
        return {field.name: _encode(getattr(value, field.name)) for field in attrs.fields(type(value))}
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    return INFINITY if value == math.inf else value
