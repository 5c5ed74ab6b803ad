"""Topologies of common machines, from published figures.

Problem: a plan must be possible before anybody has logged in to the machine. Idea: three small tables (devices, boxes,
which device sits in which box) and a resolver for names, files and records. `NxDEVICE` is a node of N devices.

>>> resolve_topology("8xa100-80g:datasheet").device.memory_bytes_per_s
2039000000000.0

A sheet's rates are dense (no structured sparsity) with 32-bit accumulation, its bandwidths of links those of the
standard. Programs attain less, so a name stands for what they attain (`colofunc.mesh.attainable`), and
`8xh100:datasheet` for the sheet itself; a profiled file (`colofunc.mesh.profile`) is better than either. Capacities are
the printed decimal gigabytes: a few per cent under the physical size, which is what contexts and allocators take.
Latencies and launch times are typical values, which no data sheet gives.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping

import attrs

from colofunc.errors import TopologyError, near
from colofunc.mesh.attainable import attainable
from colofunc.mesh.topology import Device, Level, Link, Rate, Tier, Topology

DEFAULT_TOPOLOGY = "gloo-cpu"
DATASHEET = ":datasheet"

GB, TB, T = 10**9, 10**12, 1e12
_US = 1e-6
_LAUNCH_S = 5 * _US
_NET_US = 6
"""A message of a ring from box to box, a typical value. NVIDIA's library chooses its protocols by 4 and 14
(NVIDIA/nccl, src/graph/tuning.cc, hwLat, rings by LL128 and Simple): with 14 Megatron's rows of 48 boxes and one rank
in each (M4 of `bench published`) are 30 % too slow, with 6 they are 16 %."""
_SIMPLE_US = 14
"""The same by the Simple protocol (NVIDIA/nccl, src/graph/tuning.cc, hwLat), which small all-reduces over 32 B200 took:
by 14 those of 1 to 256 MB are 1.3 to 1.45 times too fast, by 6 they would be 1.4 to 1.7 times (stas00/ml-engineering;
tests/test_curves.py)."""

# PCI Express x16, each direction, 128b/130b coding: 3.0 is 8 GT/s a lane, 4.0 is 16, 5.0 is 32 (PCI-SIG).
_PCIE3, _PCIE4, _PCIE5 = 15.75e9, 31.5e9, 63.0e9


def _device(name: str, memory_bytes_per_s: float, **flops_per_s: float) -> Device:
    return Device(name, tuple(Rate(d, f) for d, f in flops_per_s.items()), memory_bytes_per_s, _LAUNCH_S)


def _geforce(name: str, memory_bytes_per_s: float, float32: float, **flops_per_s: float) -> Device:
    """GeForce since Ampere: tf32 is as fast as float32, halves with 32-bit accumulation twice, float64 a 64th."""
    half = 2 * float32
    rates = dict(float64=float32 / 64, float32=float32, tf32=float32, bfloat16=half, float16=half)
    return _device(name, memory_bytes_per_s, **rates, **flops_per_s)


# NVIDIA A100 data sheet (SXM; float64 and tf32 on tensor cores). 80 GB: 2,039 GB/s; 40 GB: 1,555 GB/s.
_A100 = dict(float64=19.5 * T, float32=19.5 * T, tf32=156 * T, bfloat16=312 * T, float16=312 * T, int8=624 * T)
# NVIDIA H100 and H200 data sheets (SXM), halved where the sheet counts sparsity. H100: 3.35 TB/s; H200: 4.8 TB/s.
_H100 = dict(
    float64=67 * T,
    float32=67 * T,
    tf32=494.5 * T,
    bfloat16=989.5 * T,
    float16=989.5 * T,
    float8=1979 * T,
    int8=1979 * T,
)
# NVIDIA H100 data sheet, PCIe (2 TB/s) and NVL (3.9 TB/s) columns, halved where it counts sparsity.
_H100_PCIE = dict(
    float64=51 * T,
    float32=51 * T,
    tf32=378 * T,
    bfloat16=756.5 * T,
    float16=756.5 * T,
    float8=1513 * T,
    int8=1513 * T,
)
_H100_NVL = dict(
    float64=60 * T,
    float32=60 * T,
    tf32=417.5 * T,
    bfloat16=835.5 * T,
    float16=835.5 * T,
    float8=1670.5 * T,
    int8=1670.5 * T,
)
# NVIDIA H800 data sheet (SXM): an H100 with float64 of 1 T and less NVLink. H20 product brief: 78 multiprocessors, 4.0
# TB/s, 96 GB.
_H800 = _H100 | dict(float64=1 * T)
_H20 = dict(float64=1 * T, float32=44 * T, tf32=74 * T, bfloat16=148 * T, float16=148 * T, float8=296 * T, int8=296 * T)
# NVIDIA Blackwell architecture technical brief, HGX B200 (1,000 W), halved where it counts sparsity. 8 TB/s; 180 GB of
# a B200 are usable (DGX B200 data sheet: 1,440 GB in 8).
_B200 = dict(
    float64=40 * T,
    float32=80 * T,
    tf32=1100 * T,
    bfloat16=2250 * T,
    float16=2250 * T,
    float8=4500 * T,
    int8=4500 * T,
)
# NVIDIA GB200 NVL72 data sheet, a 72nd of the rack, halved where it counts sparsity: 13.4 TB and 576 TB/s of HBM3e.
_GB200 = dict(
    float64=40 * T,
    float32=80 * T,
    tf32=1250 * T,
    bfloat16=2500 * T,
    float16=2500 * T,
    float8=5000 * T,
    int8=5000 * T,
)
# NVIDIA L40S data sheet, 864 GB/s; float64 is 1/64 of float32 (Ada white paper).
_L40S = dict(
    float64=1.43 * T,
    float32=91.6 * T,
    tf32=183 * T,
    bfloat16=362.05 * T,
    float16=362.05 * T,
    float8=733 * T,
    int8=733 * T,
)
# NVIDIA L4 data sheet, 300 GB/s, halved where it counts sparsity; float64 is 1/64 of float32.
_L4 = dict(
    float64=0.47 * T, float32=30.3 * T, tf32=60 * T, bfloat16=121 * T, float16=121 * T, float8=242.5 * T, int8=242.5 * T
)
# NVIDIA A10G, for which there is no public sheet: Amazon's figures (G5 instances), 600 GB/s; float64 is 1/64 of float32
# as in GA102.
_A10G = dict(float64=0.55 * T, float32=35 * T, tf32=35 * T, bfloat16=70 * T, float16=70 * T, int8=140 * T)
# AMD Instinct MI300X data sheet, matrix cores, dense: 5.3 TB/s.
_MI300X = dict(
    float64=163.4 * T,
    float32=163.4 * T,
    tf32=653.7 * T,
    bfloat16=1307.4 * T,
    float16=1307.4 * T,
    float8=2614.9 * T,
    int8=2614.9 * T,
)
# NVIDIA V100 data sheet (SXM2): 900 GB/s; no bfloat16 and no int8 tensor cores.
_V100 = dict(float64=7.8 * T, float32=15.7 * T, float16=125 * T)

DEVICES: dict[str, tuple[Device, int]] = {  # name -> device, memory capacity in bytes
    "a100-40g": (_device("a100-40g", 1555e9, **_A100), 40 * GB),
    "a100-80g": (_device("a100-80g", 2039e9, **_A100), 80 * GB),
    "h100": (_device("h100", 3350e9, **_H100), 80 * GB),
    # The variant of 500 W with HBM2e that pytorch/torchtitan describes (benchmarks/llama3_h100_202412): 2.4 TB/s, 96
    # GB.
    "h100-96g": (_device("h100-96g", 2400e9, **_H100), 96 * GB),
    "h200": (_device("h200", 4800e9, **_H100), 141 * GB),
    "h100-pcie": (_device("h100-pcie", 2000e9, **_H100_PCIE), 80 * GB),
    "h100-nvl": (_device("h100-nvl", 3900e9, **_H100_NVL), 94 * GB),
    "h800": (_device("h800", 3350e9, **_H800), 80 * GB),
    "h20": (_device("h20", 4000e9, **_H20), 96 * GB),
    "v100-16g": (_device("v100-16g", 900e9, **_V100), 16 * GB),
    "v100": (_device("v100", 900e9, **_V100), 32 * GB),
    "b200": (_device("b200", 8000e9, **_B200), 180 * GB),
    "gb200": (_device("gb200", 8000e9, **_GB200), 186 * GB),
    "l40s": (_device("l40s", 864e9, **_L40S), 48 * GB),
    "l4": (_device("l4", 300e9, **_L4), 24 * GB),
    "a10g": (_device("a10g", 600e9, **_A10G), 24 * GB),
    "mi300x": (_device("mi300x", 5300e9, **_MI300X), 192 * GB),
    # NVIDIA RTX Blackwell white paper, GeForce RTX 5090.
    "rtx5090": (_geforce("rtx5090", 1792e9, 104.8 * T, float8=419 * T, int8=838 * T), 32 * GB),
    # NVIDIA Ada white paper, GeForce RTX 4090.
    "rtx4090": (_geforce("rtx4090", 1008e9, 82.6 * T, float8=330.3 * T, int8=660.6 * T), 24 * GB),
    # NVIDIA GA102 white paper, GeForce RTX 3090 and 3080 (10 GB).
    "rtx3090": (
        _device(
            "rtx3090",
            936.2e9,
            float64=0.556 * T,
            float32=35.6 * T,
            tf32=35.6 * T,
            bfloat16=71 * T,
            float16=71 * T,
            int8=284 * T,
        ),
        24 * GB,
    ),
    "rtx3080": (_geforce("rtx3080", 760.3e9, 29.8 * T, int8=238 * T), 10 * GB),
    # NVIDIA's product pages, GeForce RTX 3060 (12 GB; 3584 cores) and 3050 (8 GB; 2560 cores), both at 1.78 GHz, with
    # memory of 15 and 14 Gb/s a pin on 192 and 128 pins; int8 is 8 times float32, as in GA102.
    "rtx3060": (_geforce("rtx3060", 360e9, 12.7 * T, int8=101.9 * T), 12 * GB),
    "rtx3050": (_geforce("rtx3050", 224e9, 9.1 * T, int8=72.8 * T), 8 * GB),
    # NVIDIA Turing white paper, TU106 as in the GeForce RTX 2070 (reference clocks) and 2060: 448 and 336 GB/s; float64
    # is 1/32 of float32; float16 with 32-bit accumulation is half of the 59.7 T and 51.6 T with 16-bit.
    "rtx2070": (_device("rtx2070", 448e9, float64=0.23 * T, float32=7.5 * T, float16=29.9 * T, int8=119.4 * T), 8 * GB),
    "rtx2060": (_device("rtx2060", 336e9, float64=0.2 * T, float32=6.45 * T, float16=25.8 * T, int8=103.2 * T), 6 * GB),
}


@attrs.frozen
class Box:
    """What devices sit in: links in the box, links between boxes, host memory, disks."""

    inner: Level  # its size is set by the number of devices
    outer: Level
    host_bytes: int
    disk_bytes: int
    pcie_bytes_per_s: float
    disk_read_bytes_per_s: float
    disk_write_bytes_per_s: float
    # half of what the memory of both sockets gives at best, which an elementwise kernel reaches
    host_bytes_per_s: float
    inner_devices: int = 1  # what the links in the box join at least, where that is more than share a host


def _level(name: str, bytes_per_s: float, latency_us: float, sharing: str = "device") -> Level:
    return Level(name, None, bytes_per_s, latency_us * _US, sharing)  # type: ignore[arg-type]


# Data-centre U.2 drives: about 7.0 GB/s read and 3.8 GB/s write each (PCIe 4.0 x4, vendors' sheets).
# DGX A100 data sheet: NVLink 600 GB/s both ways, NVSwitch; 8 x HDR 200 Gb/s; 2 TB; 8 x 3.84 TB.
_DGX_A100 = Box(
    inner=_level("nvlink", 300e9, 3),
    outer=_level("infiniband", 25e9, _NET_US),
    host_bytes=2 * TB,
    disk_bytes=30 * TB,
    pcie_bytes_per_s=_PCIE4,
    disk_read_bytes_per_s=56e9,
    disk_write_bytes_per_s=30.4e9,
    host_bytes_per_s=205e9,  # 2 x 8 channels of DDR4-3200
)
# DGX H100 and H200 data sheets: NVLink 900 GB/s both ways; 8 x NDR 400 Gb/s; 2 TB; 8 x 3.84 TB.
_DGX_H100 = Box(
    inner=_level("nvlink", 450e9, 3),
    outer=_level("infiniband", 50e9, _NET_US),
    host_bytes=2 * TB,
    disk_bytes=30 * TB,
    pcie_bytes_per_s=_PCIE5,
    disk_read_bytes_per_s=56e9,
    disk_write_bytes_per_s=30.4e9,
    host_bytes_per_s=307e9,  # DDR5-4800, 2 x 8
)
# DGX B200 data sheet: NVLink 14.4 TB/s both ways in 8; 8 x 400 Gb/s; 2 TB; 8 x 3.84 TB.
_DGX_B200 = attrs.evolve(
    _DGX_H100,
    inner=_level("nvlink", 900e9, 3),
    outer=_level("infiniband", 50e9, _SIMPLE_US),
    host_bytes_per_s=358e9,  # DDR5-5600, 2 x 8
)
# GB200 NVL72 data sheet: 72 in one NVLink domain, 4 and 2 Grace CPUs a tray. A Grace has 480 GB, 512 GB/s, and
# NVLink-C2C of 900 GB/s both ways for its two devices. A tray has 4 x 400 Gb/s and 4 x 3.84 TB.
_GB200_TRAY = Box(
    inner=_level("nvlink", 900e9, 3),
    outer=_level("infiniband", 50e9, _NET_US),
    host_bytes=960 * GB,
    disk_bytes=15 * TB,
    pcie_bytes_per_s=225e9,
    disk_read_bytes_per_s=28e9,
    disk_write_bytes_per_s=15.2e9,
    host_bytes_per_s=512e9,
    inner_devices=72,
)
# MI300X platform data sheet: 7 Infinity Fabric links of 128 GB/s both ways, one to each other device and no switch, in a
# server of 8 x 400 Gb/s, 2 TB, 8 x 3.84 TB.
# DDR5-4800, 2 x 12
_MI300X_PLATFORM = attrs.evolve(_DGX_H100, inner=_level("infinity", 448e9, 3, "pairs"), host_bytes_per_s=460e9)
# A server without links of its own between devices: 200 Gb/s a node, 1 TB, 2 x 3.84 TB.
_SERVER_PCIE4 = Box(
    inner=_level("pcie", _PCIE4, 10),
    outer=_level("infiniband", 25e9, _NET_US, "uplink"),
    host_bytes=TB,
    disk_bytes=7680 * GB,
    pcie_bytes_per_s=_PCIE4,
    disk_read_bytes_per_s=14e9,
    disk_write_bytes_per_s=7.6e9,
    host_bytes_per_s=307e9,  # DDR5-4800, 2 x 8
)
# Cards in slots: a bridge joins two of 600 GB/s both ways, others meet on PCIe, which is what a plan may count on.
_SERVER_PCIE5 = attrs.evolve(
    _SERVER_PCIE4,
    inner=_level("pcie", _PCIE5, 10),
    outer=_level("infiniband", 50e9, _NET_US, "uplink"),
    host_bytes=2 * TB,
    pcie_bytes_per_s=_PCIE5,
)
# DGX-1 (V100) data sheet: 6 links of 25 GB/s each way; 4 x EDR 100 Gb/s a node; 512 GB; 4 x 1.92 TB SATA.
_DGX_1 = Box(
    inner=_level("nvlink", 150e9, 3),
    outer=_level("infiniband", 50e9, _NET_US, "uplink"),
    host_bytes=512 * GB,
    disk_bytes=7680 * GB,
    pcie_bytes_per_s=_PCIE3,
    disk_read_bytes_per_s=2.2e9,
    disk_write_bytes_per_s=2.0e9,
    host_bytes_per_s=68e9,  # DDR4-2133, 2 x 4
)
# A desktop: peer traffic through the host's PCIe, 10 Gb/s Ethernet, one NVMe drive.
_PC_PCIE4 = Box(
    inner=_level("pcie", _PCIE4, 10),
    outer=_level("ethernet", 1.25e9, 50, "uplink"),
    host_bytes=128 * GB,
    disk_bytes=2 * TB,
    pcie_bytes_per_s=_PCIE4,
    disk_read_bytes_per_s=7e9,
    disk_write_bytes_per_s=5e9,
    host_bytes_per_s=25e9,  # 2 x DDR4-3200
)
_PC_PCIE5 = attrs.evolve(
    _PC_PCIE4,
    inner=_level("pcie", _PCIE5, 10),
    pcie_bytes_per_s=_PCIE5,
    disk_read_bytes_per_s=14e9,
    disk_write_bytes_per_s=12e9,
    host_bytes_per_s=45e9,  # 2 x DDR5-5600
)
# A card with 8 lanes.
_PC_PCIE4_X8 = attrs.evolve(
    _PC_PCIE4,
    inner=_level("pcie", _PCIE4 / 2, 10),
    host_bytes=32 * GB,
    disk_bytes=TB,
    pcie_bytes_per_s=_PCIE4 / 2,
)
_PC_PCIE3 = attrs.evolve(
    _PC_PCIE4_X8,
    inner=_level("pcie", _PCIE3, 10),
    pcie_bytes_per_s=_PCIE3,
    disk_read_bytes_per_s=3.5e9,
    disk_write_bytes_per_s=3e9,
    host_bytes_per_s=21e9,  # 2 x DDR4-2666
)

_BOXES: dict[str, Box] = {
    "a100-40g": attrs.evolve(
        _DGX_A100, host_bytes=TB, disk_bytes=15 * TB, disk_read_bytes_per_s=28e9, disk_write_bytes_per_s=15.2e9
    ),
    "a100-80g": _DGX_A100,
    "h100": _DGX_H100,
    "h100-96g": _DGX_H100,
    "h200": _DGX_H100,
    "h800": attrs.evolve(_DGX_H100, inner=_level("nvlink", 200e9, 3)),  # NVLink 400 GB/s both ways
    "h20": _DGX_H100,
    "h100-pcie": _SERVER_PCIE5,
    "h100-nvl": _SERVER_PCIE5,
    "v100-16g": _DGX_1,
    "v100": _DGX_1,
    "b200": _DGX_B200,
    "gb200": _GB200_TRAY,
    "l40s": _SERVER_PCIE4,
    "l4": _SERVER_PCIE4,
    "a10g": _SERVER_PCIE4,
    "mi300x": _MI300X_PLATFORM,
    "rtx5090": _PC_PCIE5,
    "rtx4090": _PC_PCIE4,
    "rtx3090": _PC_PCIE4,
    "rtx3080": _PC_PCIE4,
    "rtx3060": _PC_PCIE4,
    "rtx3050": _PC_PCIE4_X8,
    "rtx2070": _PC_PCIE3,
    "rtx2060": _PC_PCIE3,
}

_CARDS = [name for name in DEVICES if name.startswith("rtx")]
# One device of these is one desktop: a mesh of several uses several slots of the same one.
_SLOTS = dict.fromkeys(_CARDS, 8)
_ALIASES = {"v100-32g": "v100", "h100-80g": "h100", "h200-141g": "h200", "b200-180g": "b200", "mi300x-192g": "mi300x"}
_ALIASES |= {name.replace("rtx", "rtx-"): name for name in _CARDS} | {name.removeprefix("rtx"): name for name in _CARDS}


def node(name: str, device_name: str, devices: int) -> Topology:
    """Nodes of `devices` devices each, joined by the outer level of the device's usual box."""
    device, capacity_bytes = DEVICES[device_name]
    box = _BOXES[device_name]
    joined = max(devices, box.inner_devices)
    inner = (attrs.evolve(box.inner, size=joined),) if joined > 1 else ()
    pcie, read, write = box.pcie_bytes_per_s, box.disk_read_bytes_per_s, box.disk_write_bytes_per_s
    return Topology(
        name=name,
        device=device,
        node_devices=devices,
        levels=(*inner, box.outer),
        tiers=(
            Tier("device", capacity_bytes, shared=False),
            Tier("host", box.host_bytes, shared=True),
            Tier("disk", box.disk_bytes, shared=True),
        ),
        links=(
            Link("device", "host", pcie, 10 * _US, shared=False),
            Link("host", "device", pcie, 10 * _US, shared=False),
            Link("host", "disk", write, 100 * _US, shared=True),
            Link("disk", "host", read, 100 * _US, shared=True),
        ),
        host_bytes_per_s=box.host_bytes_per_s,
    )


def _gloo_cpu() -> Topology:
    """One CPU box running a process with one thread per rank; rounded figures of `profile_mesh` on a two-core box.

    Capacities are unlimited on purpose: reading the box's memory here would make plans differ between machines.
    """
    rates = (
        Rate("float64", 40e9),
        Rate("float32", 80e9),
        Rate("bfloat16", 20e9),
        Rate("float16", 10e9),
        Rate("int8", 80e9),
    )  # of int8 the rate of float32, by which whole numbers are multiplied where a CPU has no instructions for them
    return Topology(
        name="gloo-cpu",
        device=Device("cpu", rates, 10e9, _LAUNCH_S),
        node_devices=8,
        levels=(_level("loopback", 2e9, 100, "medium"),),
        tiers=tuple(Tier(name, None, shared=name != "device") for name in ("device", "host", "disk")),
        links=(
            Link("device", "host", 5e9, 2 * _US, shared=True),
            Link("host", "device", 5e9, 2 * _US, shared=True),
            Link("host", "disk", 1e9, 100 * _US, shared=True),
            Link("disk", "host", 2e9, 100 * _US, shared=True),
        ),
        host_bytes_per_s=10e9,
    )


def _ideal() -> Topology:
    """Free communication and unlimited memory; computing still takes time, so that splitting work pays."""
    return Topology(
        name="ideal",
        device=attrs.evolve(DEVICES["a100-80g"][0], name="ideal", launch_s=0.0),
        node_devices=1,
        levels=(_level("ideal", math.inf, 0),),
        tiers=tuple(Tier(name, None, shared=False) for name in ("device", "host", "disk")),
        links=tuple(
            Link(src, dst, math.inf, 0.0, shared=False)
            for src, dst in (("device", "host"), ("host", "device"), ("host", "disk"), ("disk", "host"))
        ),
    )


_NODES = (
    "8xa100-40g", "8xa100-80g", "8xh100", "8xh200", "8xb200", "4xgb200", "8xl40s", "8xmi300x", "8xv100", "8xv100-16g",
    "8xh100-pcie", "8xh100-nvl", "8xh800", "8xh20", "8xl4", "8xa10g",
)  # fmt: skip
BOARDS = ("4xa100-40g", "4xa100-80g", "4xh100", "4xh200")
"""HGX boards of four devices: NVLink joins each pair of them by a third of its links, and there is no switch (NVIDIA,
HGX A100 and HGX H100 4-GPU; Lenovo ThinkSystem SD665-N V3 product guide)."""


def _board(name: str) -> Topology:
    box = node(f"{name}-hgx", name[2:], int(name[0]))
    inner, *outer = box.levels
    return attrs.evolve(box, levels=(attrs.evolve(inner, sharing="pairs"), *outer))


SHEETS: dict[str, Topology] = {
    **{name: node(name, name, _SLOTS.get(name, 1)) for name in DEVICES},
    **{name: node(name, name[2:], int(name[0])) for name in _NODES},
    **{f"{name}-hgx": _board(name) for name in BOARDS},
}
"""Presets with the figures of data sheets."""
_RECORDS = {"gloo-cpu": _gloo_cpu(), "ideal": _ideal()}


class _Presets(Mapping[str, Topology]):
    """Presets by name, with what programs attain; each is made when it is asked for, since the files of curves are read
    for it.
    """

    def __getitem__(self, name: str) -> Topology:
        if name in _RECORDS:
            return _RECORDS[name]
        return attainable(SHEETS[name])

    def __iter__(self) -> Iterator[str]:
        return iter([*_RECORDS, *SHEETS])

    def __len__(self) -> int:
        return len(_RECORDS) + len(SHEETS)


PRESETS: Mapping[str, Topology] = _Presets()


def resolve_topology(
    topology: str | os.PathLike[str] | Topology, extra: Mapping[str, Topology] | None = None
) -> Topology:
    """A topology from a record, a name of `extra` (plugins) or `PRESETS`, `NxDEVICE`, or the path of a saved file.

    A name of a device or of a box stands for what programs attain on it, "NAME:datasheet" for the figures of its data
    sheet.
    """
    if isinstance(topology, Topology):
        return topology
    if isinstance(topology, os.PathLike):
        return Topology.load(topology)
    if not isinstance(topology, str):
        raise TopologyError(f"topology is {topology!r}; give a name, a path or a Topology")
    if extra and topology in extra:
        return extra[topology]
    if topology in PRESETS:
        return PRESETS[topology]
    sheet = _sheet(topology.removesuffix(DATASHEET))
    if sheet is not None and topology.endswith(DATASHEET):
        return attrs.evolve(sheet, name=topology)
    if sheet is not None:
        return attainable(sheet)
    if topology.endswith(".json") or os.sep in topology:
        return Topology.load(topology)
    known = [*PRESETS, *(extra or {})]
    if topology.removesuffix(DATASHEET) in known:
        raise TopologyError(f"topology {topology!r} has no data sheet; leave out {DATASHEET!r}")
    raise TopologyError(
        f"no topology {topology!r}{near(topology, [*known, *_ALIASES], 'topologies')} (or NxDEVICE such as "
        "'4xa100-80g', or the path of a .json file)"
    )


def _sheet(name: str) -> Topology | None:
    """The data sheets' figures of a preset or of `NxDEVICE`; None for another name."""
    if name in SHEETS:
        return SHEETS[name]
    match = re.fullmatch(r"(?:(\d+)x)?(.+)", name)
    if match is None or match.group(1) == "0":
        return None
    device = _ALIASES.get(match.group(2), match.group(2))
    return node(name, device, int(match.group(1) or 1)) if device in DEVICES else None
