"""How many bytes of a tier a plan may use: what the device has, what transforms were given, and what "auto" comes to.

    cf.offload(step, budget="6GiB")       6 GiB of the device, or what it has where that is less
    cf.offload(step, budget=0.5)          half of what it has
    cf.offload(step, budget="auto")       what a card's context, libraries and communicators leave of it
"""

from __future__ import annotations

from colofunc.compiler.staged import Staged
from colofunc.errors import PlanError
from colofunc.mesh import Mesh
from colofunc.mesh.card import card_memory
from colofunc.mesh.sizes import MemoryLimit
from colofunc.program.passes.kernels import capability_on


def device_limit_bytes(staged: Staged, priced: Mesh) -> int | None:
    """The smallest of what the device has and what transforms were given; None: without limit.

    Where ranks differ: what the roomiest has, and what the others lack to it counts as taken (`Completion`).
    """
    ranks = range(priced.size) if priced.topology.ranks else range(1)
    capacities = [priced.device_bytes(rank) for rank in ranks]
    limits = [max((nbytes for nbytes in capacities if nbytes is not None), default=None)]
    for transform in staged.transforms:
        if transform.auto_budget:
            limits.append(auto_bytes(priced))
        elif transform.budget is not None:
            limits.append(limit_bytes(transform.budget, priced, "device", f"cf.{transform.name}(budget", "6GiB"))
    return min((nbytes for nbytes in limits if nbytes is not None), default=None)


def auto_bytes(priced: Mesh) -> int | None:
    """What a budget "auto" comes to on each device; None is unlimited.

    Ranks whose own device has less are kept to that as well.

    Of a CUDA card, found or named, what its context, libraries, communicators and fragments leave.
    """
    topology = priced.topology
    usable_bytes = topology.tier("device").capacity_bytes
    card = None
    if capability_on(topology) is not None:
        card = card_memory(topology, 0, priced.size, is_tight=True)
    if card is not None:
        usable_bytes = card.budget_bytes
    elif usable_bytes is not None:
        usable_bytes -= topology.reserved_bytes
    return min((nbytes for nbytes in (usable_bytes, topology.budget_bytes) if nbytes is not None), default=None)


def limit_bytes(given: MemoryLimit, mesh: Mesh, tier: str, argument: str, example: str) -> int | None:
    """Bytes of a tier from (bytes, or a part of what a rank has). argument, example: the words of an error, such as
    `cf.offload(host` and `16GiB`.

    Raises PlanError for a part of what has no limit.
    """
    nbytes, part = given
    if nbytes is not None or part is None:
        return nbytes
    capacity_bytes = mesh.capacity_bytes(tier)
    if capacity_bytes is None:
        raise PlanError(
            f"{argument}={part}) is a part of the {tier}'s memory, which topology {mesh.topology.name!r} does not "
            f"limit; give bytes such as {example!r}, or a topology"
        )
    return int(part * capacity_bytes)
