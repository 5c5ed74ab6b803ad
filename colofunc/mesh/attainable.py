"""What programs attain of a data sheet's figures.

Problem: no product reaches the rate that a data sheet gives for tensor cores, and no collective that of the links. A plan that believes
the sheet is too fast everywhere, and not by the same factor. Idea: multiply each rate by the share that published programs attain; a
device of which nothing is published gets the middle of the others.

    attainable(PRESETS["8xh100"])      # also Mesh(dp=8, topology="8xh100:attainable")

Sources: the best products of stas00/ml-engineering (its maximum achievable FLOPS); of collectives that book, the table for sm_90 of XLA's
collective interpolator, and NVIDIA/nccl-tests#119.
"""

from __future__ import annotations

import attrs

from colofunc.mesh.topology import Rate, Topology

MEMORY_PART = 0.9
"""Share of a device's memory bandwidth that a large copy attains. A typical value: no published figure is at hand."""
PCIE_PART = 0.88
"""Share of PCI Express that a copy attains: 55.4 and 55.1 GB/s between host and H200, whose link has 63 (stas00/ml-engineering)."""
NETWORK_PART = 0.95
"""Share of network cards that a collective attains: 382 of 400 GB/s for 32 B200 (stas00/ml-engineering), 96 of 100 for 24 A100
(NVIDIA/nccl-tests#119)."""


@attrs.frozen
class Attained:
    """Shares of a data sheet's figures. `half`, `float8`: products in 16 and 8 bits. `links`: an all-gather over links in a box."""

    half: float = 0.8
    float8: float = 0.73
    links: float = 0.78


ATTAINED = {
    # 271 of 312 T; an all-reduce of 235 of 300 GB/s on 8 (NVIDIA/nccl-tests#119).
    "a100-40g": Attained(half=0.87), "a100-80g": Attained(half=0.87),
    # 795 of 989.5 T and 1403 of 1979 T; an all-gather of 400 GB/s over 8 is 350 of 450 GB/s on the wire (XLA, sm_90).
    "h100": Attained(half=0.80, float8=0.71), "h200": Attained(half=0.80, float8=0.73),
    # 1745 of 2250 T and 3433 of 4500 T; all-reduces that the switches add up reach 846 of 900 GB/s, of all-gathers nothing is published.
    "b200": Attained(half=0.78, float8=0.76), "gb200": Attained(half=0.78, float8=0.76),
}  # fmt: skip


def attainable(topology: Topology) -> Topology:
    """A topology of data sheets with what programs attain of its rates, memory and links."""
    device = topology.device
    shares = ATTAINED.get(device.name, Attained())
    rates = tuple(Rate(rate.dtype, rate.flops_per_s * _share(rate.dtype, shares)) for rate in device.rates)
    levels = []
    for level in topology.levels:
        if level.name in ("infiniband", "ethernet"):
            part = NETWORK_PART
        elif level.name == "pcie":
            part = PCIE_PART
        else:
            part = shares.links
        levels.append(attrs.evolve(level, bandwidth_bytes_per_s=level.bandwidth_bytes_per_s * part))
    links = []
    for link in topology.links:
        part = PCIE_PART if {link.src, link.dst} == {"device", "host"} else 1.0  # a drive's figures are of its vendor's programs
        links.append(attrs.evolve(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * part))
    device = attrs.evolve(device, rates=rates, memory_bytes_per_s=device.memory_bytes_per_s * MEMORY_PART)
    return attrs.evolve(topology, device=device, levels=tuple(levels), links=tuple(links))


def _share(dtype: str, shares: Attained) -> float:
    return shares.float8 if dtype in ("float8", "int8") else shares.half
