"""What a step is planned for: the machine that options describe, a pipeline in front of its axes, and what may be done
to save memory.

    --device a100-40g --mesh dp=2,tp=4        eight of these devices in one node
    --pp 4 --schedule zb-h1                   an axis pp of four ranks beside those of the mesh
    --disk 2TB,7GB/s,5GB/s                    a drive that need not be here
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from colofunc.compiler.staged import Staged, in_place_of
from colofunc.errors import InputError, MeshError, near
from colofunc.mesh import Mesh, Topology, resolve_topology
from colofunc.mesh.card import card_memory
from colofunc.mesh.detection import margin_bytes
from colofunc.mesh.sizes import parse_bytes, parse_room
from colofunc.program.passes.kernels import capability_on
from colofunc.transforms.checkpoint import checkpoint
from colofunc.transforms.offload import offload, with_disk
from colofunc.transforms.pipeline import AUTO, pipeline
from colofunc.transforms.shard import shard

MOVES: dict[str, Callable[[Any], Any]] = {"checkpoint": checkpoint, "offload": offload}
"""What may be done to meet a budget."""
MICROBATCHES = 2
"""For each rank of a pipeline, where nobody says how many there are: a third of 1F1B is bubble at worst."""
NODE_DEVICES = 8
"""At most this many devices in a node of a machine that is named by its device."""


def axes_of_text(text: str) -> dict[str, int]:
    """`dp=2,tp=4` as axes of a mesh."""
    axes: dict[str, int] = {}
    for part in text.replace(" ", ",").split(","):
        name, equals, size = part.partition("=")
        if part and (not equals or not size.lstrip("-").isdigit()):
            raise MeshError(f"--mesh {text!r}: {part!r} is no axis with a size; write dp=2,tp=4")
        if name in axes:
            raise MeshError(f"--mesh {text!r} names axis {name!r} twice, with {axes[name]} and {size}; write it once")
        if part:
            axes[name] = int(size)
    return axes


# ---- the machine ----


def machine(device: str, topology: str, host: str, budget: str, disk: str = "") -> Callable[[Mesh], Mesh]:
    """The mesh on what the options name: as many devices as it has ranks, at most eight in a node.

    A budget is that of the device, so that it holds whatever the step says itself. Of a card plans get what a machine
    that was found gives them: not what libraries, communicators and the driver take.
    """
    if device and topology:
        raise InputError(f"--device {device} and --topology {topology} both name a machine; give one of them")

    def on_machine(mesh: Mesh) -> Mesh:
        name = topology
        if not name and device:
            name = f"{min(NODE_DEVICES, mesh.size)}x{device}" if mesh.size > 1 else device
        described: Topology = resolve_topology(name) if name else mesh.topology
        if host:
            described = _with_capacity(described, "host", _tier_bytes(described, "host", host, "--host"))
        if disk:
            described = _with_disk(described, disk)
        if budget:
            budget_bytes = _tier_bytes(described, "device", budget, "--budget")
            described = attrs.evolve(described, budget_bytes=budget_bytes)
        card_bytes = described.tier("device").capacity_bytes
        if card_bytes is not None and not described.reserved_bytes and capability_on(described) is not None:
            described = attrs.evolve(described, reserved_bytes=margin_bytes(card_bytes, 0, mesh.size))
        return mesh.with_topology(described)

    return on_machine


def _tier_bytes(topology: Topology, tier: str, text: str, option: str) -> int | None:
    """Bytes, a part of what the tier has, or "auto": all of it."""
    nbytes, part = parse_room(text, option)
    capacity_bytes = topology.tier(tier).capacity_bytes
    if part is None:
        return capacity_bytes if nbytes is None else nbytes
    if capacity_bytes is None:
        raise InputError(
            f"{option} {text} is a part of the {tier}'s memory, which topology {topology.name!r} does not limit; "
            "write bytes such as 6GiB, or name a --device"
        )
    return int(part * capacity_bytes)


def _with_capacity(topology: Topology, name: str, nbytes: int | None) -> Topology:
    tiers = []
    for tier in topology.tiers:
        tiers.append(attrs.evolve(tier, capacity_bytes=nbytes) if tier.name == name else tier)
    return attrs.evolve(topology, tiers=tuple(tiers))


def disk_argument(disk: str) -> str | bool | None:
    """What `cf.offload(disk=)` is given for `--disk`: a directory, True for a disk that is only planned for, None
    without one.
    """
    if not disk:
        return None
    if Path(disk).is_dir():
        return disk
    if disk[0].isdigit():
        return True
    raise InputError(
        f"--disk {disk!r} is no directory that is here, and no size; make it, or write --disk 2TB or "
        "--disk 2TB,7GB/s,5GB/s for a disk that need not be here"
    )


def _with_disk(topology: Topology, disk: str) -> Topology:
    """A disk of a size, at the rates that are said; of a directory: what is free there."""
    if isinstance(disk_argument(disk), str):
        return _with_capacity(topology, "disk", shutil.disk_usage(disk).free)
    size, *rates = disk.split(",")
    if len(rates) not in (0, 2):
        raise InputError(
            f"--disk {disk!r}: write a size, or a size and the rates to read and to write at, such as 2TB,7GB/s,5GB/s"
        )
    bytes_per_s = [float(parse_bytes(rate.removesuffix("/s"), "--disk")) for rate in rates]
    rate_of = dict(zip((("disk", "host"), ("host", "disk")), bytes_per_s, strict=False))
    links = []
    for link in topology.links:
        rate = rate_of.get((link.src, link.dst), link.bandwidth_bytes_per_s)
        links.append(attrs.evolve(link, bandwidth_bytes_per_s=rate))
    sized = _with_capacity(topology, "disk", parse_bytes(size, "--disk"))
    return attrs.evolve(sized, links=tuple(links))


# ---- the step on it ----


def in_stages(
    step: Any, axes: dict[str, int], ranks: int, schedule: str, microbatches: str
) -> tuple[Any, dict[str, int]]:
    """The step as a pipeline on an axis `pp` in front of the mesh's others, as the options say. ranks: 0 for none."""
    if ranks < 0:
        raise InputError(
            f"--pp {ranks} is no number of ranks; write how many a pipeline has, such as --pp 4, or leave it out"
        )
    if not ranks:
        if schedule or microbatches:
            option = f"--schedule {schedule}" if schedule else f"--microbatches {microbatches}"
            raise InputError(f"{option} is of a pipeline; say with --pp how many ranks it has")
        return step, axes

    if isinstance(step, Staged):
        if step.transform("pipeline") is not None:
            raise InputError(f"--pp {ranks}: the step has cf.pipeline already; leave --pp out")
        if step.sharded is not None and not axes:
            axes = _axes_without_views(step.mesh, ranks)
    if "pp" in axes:
        raise InputError(f"--pp {ranks}: the mesh has an axis 'pp' of {axes['pp']} already; leave it out of --mesh")
    count = _microbatches(microbatches, MICROBATCHES * ranks)
    return pipeline(step, "pp", count, schedule or "1f1b"), {"pp": ranks, **axes}


def _axes_without_views(mesh: Mesh, ranks: int) -> dict[str, int]:
    if mesh.views:
        views = ", ".join(mesh.views)
        raise InputError(f"--pp {ranks}: the step's mesh has views ({views}); write cf.pipeline in the script")
    return {name: mesh.axis_size(name) for name in mesh.axis_names}


def _microbatches(text: str, default: int) -> int | str:
    """A number of microbatches, or "auto"."""
    if not text:
        return default
    if text == AUTO:
        return text
    if not text.isdecimal() or not int(text):
        raise InputError(f"--microbatches {text!r}: write a number of microbatches above 0, such as {default}, or auto")
    return int(text)


def step_on_machine(
    step: Any,
    axes: dict[str, int],
    on: Callable[[Mesh], Mesh],
    allowed: list[str],
    disk: str | bool | None = None,
) -> Staged:
    """The step on the machine.

    With what may be done to meet the budget (`allowed`), where it does not say so itself.
    """
    for name in allowed:
        if name not in MOVES:
            alike = near(name, MOVES, "transforms")
            raise InputError(f"--within {name!r} is nothing that may be done to meet a budget{alike}")
    own = {name for name in MOVES if isinstance(step, Staged) and step.transform(name) is not None}
    if disk and "offload" not in allowed and "offload" not in own:
        raise InputError("--disk is of use to offload only; leave --within out, or write --within offload")

    sharded = step.sharded if isinstance(step, Staged) else None
    if axes or sharded is None:
        mesh = on(Mesh(**axes))  # type: ignore[arg-type]
    else:
        mesh = on(step.mesh)
    if not allowed and not own:
        mesh = _for_what_is_kept(mesh)

    if sharded is None:
        step = shard(step, mesh)
    else:
        on_mesh = attrs.evolve(sharded, sharding=attrs.evolve(step.sharding, mesh=mesh))
        step = in_place_of(step, sharded, on_mesh)
    if disk or mesh.capacity_bytes("device") is not None:
        for name in allowed:
            if step.transform(name) is None:
                step = MOVES[name](step)
    if disk:
        step = with_disk(step, disk)
    # As real ranks run it: what is in flight counts.
    staged: Staged = step.on("distributed") if mesh.size > 1 else step
    return staged


def _for_what_is_kept(mesh: Mesh) -> Mesh:
    """The mesh for a plan that may make nothing again and copy nothing: it has to leave room for gaps between its
    blocks alone.
    """
    card = card_memory(mesh.topology, 0, mesh.size, is_tight=False)
    if card is None or not mesh.topology.reserved_bytes:
        return mesh
    limit_bytes = min(card.kept_bytes, mesh.topology.budget_bytes or card.kept_bytes)
    return mesh.with_topology(attrs.evolve(mesh.topology, budget_bytes=limit_bytes))
