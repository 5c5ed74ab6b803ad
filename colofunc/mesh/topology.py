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
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import attrs

from colofunc.errors import TopologyError, near

T = TypeVar("T")

FORMAT_VERSION = 1
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute")
TIERS = ("device", "host", "disk")

Sharing = Literal["device", "uplink", "medium"]
"""Whose a level's bandwidth is: each device's own link · one uplink per inner domain (a node's network card), shared
by its devices · one medium per domain (a bus, the memory of a CPU box), shared by all devices in it."""


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
    """One device: how fast it computes and how fast it reads its own memory."""

    name: str
    rates: tuple[Rate, ...]
    memory_bytes_per_s: float = attrs.field(validator=_positive, converter=float)
    launch_s: float = attrs.field(validator=_not_negative, converter=float)


@attrs.frozen
class Level:
    """Links that join inner domains (single devices at the innermost level) into domains of `size` devices.

    size: devices of one domain, None for as many as there are. bandwidth: each direction, of whom `sharing` says.
    """

    name: str
    size: int | None = attrs.field(validator=_positive_or_none)
    bandwidth_bytes_per_s: float = attrs.field(validator=_positive, converter=float)
    latency_s: float = attrs.field(validator=_not_negative, converter=float)
    sharing: Sharing = attrs.field(default="device", validator=_one_of("device", "uplink", "medium"))


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
class Topology:
    """A machine: `node_devices` devices share a node's host memory and disks; `levels` are ordered inside out.

    host_bytes_per_s: what an elementwise kernel on the host (an update) reads and writes, all devices of a node together.
    """

    name: str
    device: Device
    node_devices: int = attrs.field(validator=_positive)
    levels: tuple[Level, ...]
    tiers: tuple[Tier, ...]
    links: tuple[Link, ...]
    measured: tuple[Measured, ...] = ()
    host_bytes_per_s: float = attrs.field(default=100e9, validator=_positive, converter=float)

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
        if sorted(x.name for x in self.tiers) != sorted(TIERS):
            raise TopologyError(
                f"topology {self.name!r} has tiers {[x.name for x in self.tiers]}; give exactly {', '.join(TIERS)}"
            )

    @property
    def max_devices(self) -> int | None:
        """How many devices the links can join; None for any number."""
        return self.levels[-1].size if self.levels else 1

    def tier(self, name: str) -> Tier:
        """The memory tier of that name."""
        for tier in self.tiers:
            if tier.name == name:
                return tier
        raise TopologyError(f"no memory tier {name!r}{near(name, TIERS, 'tiers')}")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a readable, versioned JSON file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n")

    def to_dict(self) -> dict[str, Any]:
        """The versioned JSON values of the file format."""
        return {"colofunc_topology": FORMAT_VERSION, **_encode(self)}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Topology:
        """A topology from the values of the file format; raises TopologyError on unknown, missing, ill-typed fields."""
        version = data.get("colofunc_topology") if isinstance(data, Mapping) else None
        if version != FORMAT_VERSION:
            raise TopologyError(
                f"the topology has format version {version!r}, this colofunc reads {FORMAT_VERSION}; "
                "write it again with Topology.save"
            )
        return _topology({key: value for key, value in data.items() if key != "colofunc_topology"})

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Topology:
        """Read what `save` wrote; raises TopologyError as `from_dict` does, and on files that cannot be read."""
        try:
            data = json.loads(Path(path).read_text())
        except OSError as error:
            raise TopologyError(f"cannot read topology file {str(path)!r}: {error.strerror or error}") from error
        except ValueError as error:
            raise TopologyError(f"topology file {str(path)!r} is not JSON: {error}") from error
        try:
            return Topology.from_dict(data)
        except TopologyError as error:
            error.add_note(f"in topology file {str(path)!r}")
            raise


def _encode(value: Any) -> Any:
    """Records to JSON values; JSON has no infinity, so an infinite bandwidth is the word 'unlimited'."""
    if attrs.has(type(value)):
        return {field.name: _encode(getattr(value, field.name)) for field in attrs.fields(type(value))}
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    return "unlimited" if value == math.inf else value


def _topology(data: Mapping[str, Any]) -> Topology:
    nested = {"levels": Level, "tiers": Tier, "links": Link, "measured": Measured}
    fields: dict[str, Any] = dict(data)
    for name, cls in nested.items():
        if name in fields:
            fields[name] = tuple(
                _record(cls, item, f"{name}[{i}]") for i, item in enumerate(_typed(fields[name], list, name))
            )
    if "device" in fields:
        device = dict(_typed(fields["device"], dict, "device"))
        if "rates" in device:
            rates = _typed(device["rates"], list, "device.rates")
            device["rates"] = tuple(_record(Rate, item, f"device.rates[{i}]") for i, item in enumerate(rates))
        fields["device"] = _record(Device, device, "device")
    return _record(Topology, fields, "topology")


_CHECKED = {"str": str, "float": (int, float), "int": int, "bool": bool}


def _record(cls: type[T], data: Any, where: str) -> T:
    """One attrs record from a JSON object, with errors that name the place and near names."""
    values = dict(_typed(data, dict, where))
    fields = {field.name: field for field in attrs.fields(cls)}  # type: ignore[arg-type]
    for name in values:
        if name not in fields:
            raise TopologyError(f"{where} has an unknown field {name!r}{near(name, fields, 'fields')}")
    for name, field in fields.items():
        if name not in values:
            if field.default is attrs.NOTHING:
                raise TopologyError(f"{where} lacks the field {name!r}; add it, or write the file with Topology.save")
            continue
        if values[name] == "unlimited" and field.type == "float":
            values[name] = math.inf
        plain = str(field.type).removesuffix(" | None")
        if plain in _CHECKED and not (values[name] is None and plain != field.type):
            _typed(values[name], _CHECKED[plain], f"{where}.{name}")
    return cls(**values)


def _typed(value: Any, kind: Any, where: str) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        wanted = " or ".join(k.__name__ for k in kind) if isinstance(kind, tuple) else kind.__name__
        raise TopologyError(f"{where} is {value!r}; it must be of type {wanted}")
    return value
