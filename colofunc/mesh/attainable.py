"""What programs attain of a data sheet's figures.

Problem: no product reaches the rate that a data sheet gives for tensor cores, and no collective that of the links. A
plan that believes the sheet is too fast everywhere, and not by the same factor. Idea: put what the device's file of
curves says in place of the sheet's figures (`colofunc.mesh.curves`); a device without a file gets the middle of the
others.

    attainable(SHEETS["8xh100"])      # also Mesh(dp=8, topology="8xh100")
"""

from __future__ import annotations

import attrs

from colofunc.errors import TopologyError, near
from colofunc.mesh.curves import Curves, curves_of
from colofunc.mesh.topology import Device, Rate, Topology

HALF_PART, FLOAT8_PART, LINKS_PART = 0.8, 0.73, 0.78
"""Of products in 16 and in 8 bits, and of links in a box, where a device has no file: the middle of those that have
one."""
MEMORY_PART = 0.9
"""Share of a device's memory bandwidth that a large copy attains. A typical value: no published figure is at hand."""
PCIE_PART = 0.88
"""Share of PCI Express that a copy attains: 55.4 and 55.1 GB/s between host and H200, whose link has 63
(stas00/ml-engineering)."""
NETWORK_PART = 0.95
"""Share of network cards that a collective attains: 382 of 400 GB/s for 32 B200 (stas00/ml-engineering), 96 of 100 for
24 A100 (NVIDIA/nccl-tests#119)."""
CONTENTION = 0.189
"""By what part of its time a kernel takes longer beside a collective (arXiv 2507.03114), where a device has no file, or
its file does not say."""
BITS_8 = ("float8", "int8")


def attainable(topology: Topology) -> Topology:
    """A topology of data sheets with what programs attain of its rates, memory and links.

    Raises TopologyError where the curves of its device have products of which the sheet knows nothing, or that are
    faster than it says.
    """
    device = topology.device
    curves = curves_of(device.name)
    if curves is not None:
        _check_products(curves, device)
    links_part = LINKS_PART if curves is None else curves.links.share
    gain = 1.0 if curves is None or curves.all_reduce is None else curves.all_reduce.times
    levels = []
    for level in topology.levels:
        if level.name in ("infiniband", "ethernet"):
            part, latency_s = NETWORK_PART, level.latency_s
        elif level.name == "pcie":
            part, latency_s = PCIE_PART, level.latency_s
        else:
            part, latency_s = links_part, level.latency_s if curves is None else curves.latency_s
            level = attrs.evolve(level, all_reduce_gain=gain)
        levels.append(
            attrs.evolve(level, bandwidth_bytes_per_s=level.bandwidth_bytes_per_s * part, latency_s=latency_s)
        )
    copies_part = PCIE_PART if curves is None else curves.copies.share
    links = []
    for link in topology.links:
        part = (
            copies_part if {link.src, link.dst} == {"device", "host"} else 1.0
        )  # a drive's figures are of its vendor's programs
        links.append(attrs.evolve(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * part))
    rates = tuple(Rate(rate.dtype, rate.flops_per_s * _product_part(rate, topology, curves)) for rate in device.rates)
    if curves is None:
        device = attrs.evolve(device, rates=rates, memory_bytes_per_s=device.memory_bytes_per_s * MEMORY_PART)
    else:
        memory = device.memory_bytes_per_s * curves.memory.share
        device = attrs.evolve(
            device, rates=rates, memory_bytes_per_s=memory, launch_s=curves.launch_s, attention=curves.attention
        )
        device = attrs.evolve(device, sustained=curves.sustained.share, tiles=curves.tiles)
    known = None if curves is None else curves.contention
    device = attrs.evolve(device, contention=CONTENTION if known is None else known.share)
    return attrs.evolve(topology, device=device, levels=tuple(levels), links=tuple(links))


def _check_products(curves: Curves, device: Device) -> None:
    sheet = {rate.dtype: rate.flops_per_s for rate in device.rates}
    for one in curves.products:
        where = f"curves of {device.name!r}: products of {one.dtype!r}"
        if one.dtype not in sheet:
            raise TopologyError(
                f"{where} are none of the data sheet's, which has {', '.join(sheet)}{near(one.dtype, sheet)}"
            )
        if one.flops_per_s > sheet[one.dtype]:
            raise TopologyError(
                f"{where} reach {one.flops_per_s:.4g} a second, more than the data sheet's {sheet[one.dtype]:.4g}"
            )


def _product_part(rate: Rate, topology: Topology, curves: Curves | None) -> float:
    """What products of a dtype attain of their rate; a dtype that no curve has attains what those of its width do."""
    narrow = rate.dtype in BITS_8
    if curves is not None:
        sheet = {one.dtype: one.flops_per_s for one in topology.device.rates}
        for like in (rate.dtype, "float8" if narrow else "bfloat16"):
            attained = curves.product_flops_per_s(like)
            if attained is not None and like in sheet:
                return attained / sheet[like]
    return FLOAT8_PART if narrow else HALF_PART
