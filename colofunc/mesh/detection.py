"""The machine that is found: a topology by what a GPU says of itself, with what programs attain of its data sheet.

Problem: a mesh that names no topology is planned for some machine, and a GPU says which it is. Its data sheet is a
promise, though: no product reaches the rate of its tensor cores, no collective that of its links; and a card's memory
is not all there for tensors. Idea: the name of the device finds the preset, the device itself its memory and how many
of them there are; rates are multiplied by what was published of programs; and a margin that is stated, or what is taken
already where that is more, is not given to plans.

    found_topology(8, 8, device)      # "8xh100 (found)" on such a node; "NVIDIA RTX 4000 (estimated)" for a name without a preset
"""

from __future__ import annotations

import re
from typing import Any

import attrs
import torch

from colofunc import env
from colofunc.mesh.attainable import attainable
from colofunc.mesh.presets import DEVICES, PRESETS, node
from colofunc.mesh.topology import Device, Level, Rate, Topology

FOUND, ESTIMATED, ASSUMED = " (found)", " (estimated)", " (assumed)"

CUDA_DEFAULT = "8xh100"
"""What a mesh that wants GPUs is planned for where none is found and no topology is named."""

HOST_PART = 0.8
"""Of the host's memory."""

HOST_THREAD_BYTES_PER_S = 5.8e9
"""What a thread of the host reads and writes in an update: AdamW in bfloat16 on 16 cores beside an H100, 93 GB/s
(`make gpu`, slice 10)."""

CONTEXT_BYTES = 512 << 20
"""The driver's context and the kernels that it has loaded; typical of a data-centre card, less on small ones."""
LIBRARIES_BYTES = 512 << 20
"""Workspaces of cuBLAS (32 MiB a stream and handle on Hopper) and cuDNN, and what a caching allocator loses to
rounding."""
COLLECTIVES_BYTES = 2 << 30
"""Buffers of NCCL's communicators, of which a mesh has one for each set of axes."""
MOST_RESERVED = 8
"""At most this part (its 8th) of a small card is the stated margin."""
FRAGMENTS = 8
"""An 8th of what plans may use is left beside `budget="auto"`: what torch's caching allocator loses between blocks that
are in use.

Its rules, played with planned steps (`python -m bench fragmentation`), want up to an 8th more than is alive where a
budget made a plan recompute and copy, and a hundredth where all is kept.
`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` loses less.
"""
ROUND_BYTES = 256 << 20
"""What is taken already counts in such pieces, so that plans of two starts are the same."""


# What devices call themselves -> preset, the first that matches. Those of laptops are other chips.
_NAMES = (
    (r"GB200", "gb200"), (r"B200", "b200"), (r"H200", "h200"), (r"H100.*NVL", "h100-nvl"), (r"H100.*PCIe", "h100-pcie"),
    (r"H100", "h100"), (r"H800(?!.*PCIe)", "h800"), (r"H20\b", "h20"), (r"A100.*80GB", "a100-80g"), (r"A100.*40GB", "a100-40g"),
    (r"V100.*32GB", "v100"), (r"V100.*16GB", "v100-16g"), (r"\bL40S", "l40s"), (r"\bL4\b", "l4"), (r"A10G", "a10g"), (r"MI300X", "mi300x"),
    *((rf"RTX {name.removeprefix('rtx')}(?! ?Ti|.*SUPER| ?D\b)", name) for name in DEVICES if name.startswith("rtx")),
)  # fmt: skip
# Compute capability -> a preset of that architecture, and its multiprocessors.
_ARCHITECTURES = {
    7: ("v100", 80), 8: ("a100-80g", 108), 9: ("h100", 132), 10: ("b200", 148), 12: ("rtx5090", 170),
    (7, 5): ("rtx2070", 36), (8, 6): ("rtx3090", 82), (8, 9): ("rtx4090", 128),
}  # fmt: skip


def found_topology(node_devices: int, ranks: int, device: torch.device) -> Topology:
    """The topology of the machine that this process is on, by one of its GPUs. node_devices: how many of them steps use
    in a node.
    """
    properties: Any = torch.cuda.get_device_properties(device)
    name = preset_of(properties.name)
    base = (
        _estimated(properties, node_devices)
        if name is None
        else node(f"{node_devices}x{name}{FOUND}", name, node_devices)
    )
    if re.search("PCI-?E", properties.name, re.IGNORECASE):
        base = attrs.evolve(base, levels=tuple(_in_slots(level, base) for level in base.levels))
    has = {"device": properties.total_memory, "host": _host_bytes()}
    tiers = tuple(attrs.evolve(t, capacity_bytes=has.get(t.name) or t.capacity_bytes) for t in base.tiers)
    host_bytes_per_s = min(base.host_bytes_per_s, host_threads(node_devices) * HOST_THREAD_BYTES_PER_S)
    return attrs.evolve(
        attainable(base), tiers=tiers, host_bytes_per_s=host_bytes_per_s, reserved_bytes=margin_of(device, ranks)
    )


def host_threads(processes: int) -> int:
    """Threads of the host that work on updates at once, where each process of a node has as many as this one."""
    return min(processes * torch.get_num_threads(), env.cores())


def assumed_topology(ranks: int) -> Topology:
    """The stated default of a mesh that wants GPUs, planned as if it had been found; the host is the preset's."""
    base = PRESETS[CUDA_DEFAULT]
    total_bytes = base.tier("device").capacity_bytes
    assert total_bytes is not None, "a preset of a card says what memory it has"
    return attrs.evolve(base, name=CUDA_DEFAULT + ASSUMED, reserved_bytes=margin_bytes(total_bytes, 0, ranks))


def _host_bytes() -> int | None:
    """Of the memory that this process may use, what a plan may: the rest is for the script itself."""
    limit_bytes = env.memory_limit_bytes()
    return None if limit_bytes is None else int(limit_bytes * HOST_PART)


def margin_of(device: torch.device, ranks: int) -> int:
    """What no plan may use of a card as it is now."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return margin_bytes(total_bytes, max(0, total_bytes - free_bytes - torch.cuda.memory_reserved(device)), ranks)


def preset_of(device_name: str) -> str | None:
    """The preset of a device by the name that its driver gives it; None where there is none."""
    if "Laptop" in device_name or "Max-Q" in device_name or "MIG" in device_name:
        return None
    return next((preset for pattern, preset in _NAMES if re.search(pattern, device_name)), None)


def margin_bytes(total_bytes: int, taken_bytes: int, ranks: int) -> int:
    """What no plan may use of a card: the stated margin; where something is taken already, that and the rest of the
    margin.

    taken_bytes: by all but this process's tensors; the context of this process, where it is there, among it.
    """
    rest_bytes = LIBRARIES_BYTES + (COLLECTIVES_BYTES if ranks > 1 else 0)
    most_bytes = total_bytes // MOST_RESERVED
    stated_bytes = min(CONTEXT_BYTES + rest_bytes, most_bytes)
    pieces = -(-taken_bytes // ROUND_BYTES) * ROUND_BYTES
    return min(max(stated_bytes, pieces + min(rest_bytes, most_bytes)), total_bytes - 1)


def _in_slots(level: Level, base: Topology) -> Level:
    """Links in the box of a card that has none of its own: they are those to the host."""
    if level.name not in ("nvlink", "infinity"):
        return level
    link = next(link for link in base.links if (link.src, link.dst) == ("device", "host"))
    return attrs.evolve(level, name="pcie", bandwidth_bytes_per_s=link.bandwidth_bytes_per_s, latency_s=10e-6)


def _estimated(properties: Any, node_devices: int) -> Topology:
    """A device without a preset: one of its architecture, as large as its multiprocessors are many."""
    key = (properties.major, properties.minor)
    like, multiprocessors = _ARCHITECTURES.get(key) or _ARCHITECTURES.get(properties.major) or ("v100", 80)
    size = properties.multi_processor_count / multiprocessors
    base = node(f"{properties.name}{ESTIMATED}", like, node_devices)
    rates = tuple(Rate(rate.dtype, rate.flops_per_s * size) for rate in base.device.rates)
    clock_khz, wires = getattr(properties, "memory_clock_rate", 0), getattr(properties, "memory_bus_width", 0)
    said = 2 * clock_khz * 1e3 * wires / 8  # two transfers a clock; newer versions of torch say it
    device = Device(properties.name, rates, said or base.device.memory_bytes_per_s * size, base.device.launch_s)
    return attrs.evolve(base, device=device)
