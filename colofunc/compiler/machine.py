"""The machine under a mesh that names no topology: a GPU says what it is, a host is measured at the first use on real
ranks.

Problem: a plan is made of seconds, and a mesh without a topology has those of a small CPU box, whatever it runs on;
where a collective starts in milliseconds, thirty small ones are slower than five large ones however they are shared.
Idea: with one process a rank the ranks are there to be measured, once for a machine and a mesh. Rank 0 says whether
that was done before, and what was found; a plan is made by it alone. Of GPUs nothing need be measured: what they say of
themselves finds a preset (`mesh/detection.py`). Where several ranks are simulated on the host nothing is measured or
found: plans of tests are equal everywhere. A mesh that says `device="cuda"` is planned for the GPUs that are here,
simulated or not, and where there are none for a stated default.

    priced = as_measured(mesh, watch, say)      # the mesh itself where it names a topology, or is simulated on the host

Figures lie beside the cached plans (`COLOFUNC_CACHE`); `COLOFUNC_MEASURE=off` measures nothing, `on` measures GPUs too.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable

import attrs
import torch
import torch.distributed as dist

from colofunc import env
from colofunc.cache import Cache
from colofunc.errors import TopologyError
from colofunc.executors.distributed import broadcast_object
from colofunc.executors.watch import Watch
from colofunc.mesh import Mesh, Topology
from colofunc.mesh.detection import assumed_topology, found_topology
from colofunc.mesh.device import device_of, node_devices, on_gpu, usable_gpus
from colofunc.mesh.profile import profile_mesh
from colofunc.untrusted import Wrong

SECONDS = 2.0
"""What measuring may take; the two smallest sizes of each collective are measured in any case."""
SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 23)
"""Bytes of the buffers that collectives are timed at; the smallest shows what it takes to start one."""

METHOD = 5
"""Figures that were measured in another way are not read."""

CAUTION = 1.25
"""The measured time to start a collective is multiplied by this. Starts vary most of all that is measured, and add up:
where two plans take the same time within the clock's error, the one of fewer collectives wins."""

_FOUND: dict[tuple[Mesh, str], Topology] = {}
"""What this process has measured or read, by mesh and process group backend."""


def as_measured(mesh: Mesh, watch: Watch | None, say: Callable[[str], None]) -> Mesh:
    """`mesh` with the figures of the machine that it is on. Collective at the first use of a mesh on real ranks."""
    if not mesh.assumed:
        return mesh
    if on_gpu(mesh) and (watch is not None or mesh.size == 1 or mesh.device == "cuda"):
        return _on_gpus(mesh, watch, say) if usable_gpus() else mesh.with_topology(assumed_topology(mesh.size))
    if watch is None or not env.measures():
        return mesh
    known = mesh, str(dist.get_backend())
    if known not in _FOUND:
        _FOUND[known] = cautious(_found(mesh, watch, say))
    return mesh.with_topology(_FOUND[known])


def _on_gpus(mesh: Mesh, watch: Watch | None, say: Callable[[str], None]) -> Mesh:
    """By what rank 0's GPU says of itself, and what is free there when it is first asked.

    Measured where somebody wants that.
    """
    device = device_of(mesh)
    card = torch.cuda.get_device_properties(device)
    known = mesh, f"{card.name} {card.total_memory}"
    if known not in _FOUND:
        if watch is None:
            found = found_topology(node_devices(), mesh.size, device)
        else:
            with watch:
                found = broadcast_object(found_topology(node_devices(), mesh.size, device) if mesh.is_main else None)
        if watch is not None and env.measures_gpus():
            found = cautious(_found(mesh.with_topology(found), watch, say))
        _FOUND[known] = found
    return mesh.with_topology(_FOUND[known])


def cautious(found: Topology) -> Topology:
    """The figures to plan by: collectives as measured, their starts dearer.

    A kind that seems to start faster than the middle of all kinds along its axis was lucky, and a search would make
    everything of it.
    """
    starts = []
    for one in found.measured:
        middle_s = statistics.median(other.alpha_s for other in found.measured if other.axis == one.axis)
        starts.append(attrs.evolve(one, alpha_s=max(one.alpha_s, middle_s) * CAUTION))
    return attrs.evolve(found, measured=tuple(starts))


def _found(mesh: Mesh, watch: Watch, say: Callable[[str], None]) -> Topology:
    folder, key = env.plan_folder(), key_of_machine(mesh, str(dist.get_backend()))
    cache = None if folder is None else Cache(folder)
    with watch:
        kept: Topology | None = broadcast_object(kept_figures(cache, key, say) if watch.rank == 0 else None)
    if kept is not None:
        return kept
    began = time.perf_counter()
    with watch:
        found = profile_mesh(mesh, SIZES, SECONDS)
    if watch.rank == 0:
        say(f"{mesh} names no topology, so this machine was measured in {time.perf_counter() - began:.1f} s")
        keep_figures(cache, key, found, say)
    return found


def key_of_machine(mesh: Mesh, backend: str) -> str:
    """The name under which the figures of this machine under a mesh are kept."""
    said = (
        env.machine_key(),
        mesh.axes,
        sorted(mesh.views.items()),
        mesh.device,
        backend,
        torch.__version__,
        SIZES,
        METHOD,
    )
    return hashlib.sha256(repr(said).encode()).hexdigest()[:40]


def kept_figures(cache: Cache | None, key: str, say: Callable[[str], None]) -> Topology | None:
    """What was measured before; None where there is nothing that can be read."""
    if cache is None:
        return None
    try:
        entry = cache.read(key)
        return None if entry is None else Topology.from_dict(entry)
    except (OSError, Wrong, TopologyError) as error:
        cache.drop(key)
        say(f"the figures of this machine in {cache.path(key)} are dropped, measuring again: {error}")
        return None


def keep_figures(cache: Cache | None, key: str, found: Topology, say: Callable[[str], None]) -> None:
    """A folder that cannot be written to costs the next start a measurement."""
    if cache is None:
        return
    try:
        cache.write(key, found.to_dict())
    except (OSError, Wrong) as error:
        say(f"the figures of this machine could not be kept in {cache.folder}: {error}")
