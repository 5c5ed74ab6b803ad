"""The least that an error names, of a step under each way to limit its memory.

    least_named.check(lambda nbytes: cf.checkpoint(step, budget=nbytes), args)      # raises AssertionError with what was named
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, cast

import attrs

import colofunc as cf
from colofunc.compiler.decisions import Decisions
from colofunc.compiler.least_budget import Trial
from colofunc.planner.candidate import FinishedProgram
from colofunc.program.ir import Program

LEAST = re.compile(r"the least found has a peak of ([\d,]+) B")


def limited(mesh: cf.Mesh, nbytes: int) -> cf.Mesh:
    """A machine like that of `mesh` whose devices have so many bytes."""
    tiers = tuple(attrs.evolve(tier, capacity_bytes=nbytes) if tier.name == "device" else tier for tier in mesh.topology.tiers)
    return mesh.with_topology(attrs.evolve(mesh.topology, tiers=tiers))


# step on a mesh, bytes -> the step with that limit
LIMITS: dict[str, Callable[[Callable[[cf.Mesh], Any], cf.Mesh, int], Any]] = {
    "shard": lambda on, mesh, nbytes: on(limited(mesh, nbytes)),
    "checkpoint": lambda on, mesh, nbytes: cf.checkpoint(on(mesh), budget=nbytes),
    "offload": lambda on, mesh, nbytes: cf.offload(on(mesh), budget=nbytes),
    "both": lambda on, mesh, nbytes: cf.checkpoint(cf.offload(on(mesh)), budget=nbytes),
}


def tried(peak_bytes: int, budget_bytes: int, more_s: float = 0.0) -> Trial:
    """A plan of so many bytes, as a search would have found it."""
    program = Program((), (), (), {}, {}, (), "inplace")
    return Trial(cast(Decisions, None), FinishedProgram(program, peak_bytes, more_s), budget_bytes)


def peak(staged: Any, *args: Any) -> int:
    return int(staged.lower(*args).memory().peak_bytes["device"])


def named(staged: Any, *args: Any) -> int | None:
    """Bytes that the error names; None where there is a plan."""
    try:
        staged.lower(*args)
    except cf.PlanError as refused:
        found = LEAST.search(str(refused))
        assert found is not None, str(refused)
        return int(found[1].replace(",", ""))
    return None


def check(limit: Callable[[int], Any], *args: Any, given: int = 1000, exact: bool = False) -> int:
    """The least that an error names for a budget of `given` bytes. It can be given, and every smaller one that is refused is refused
    with the same words.

    exact: a byte less has to be refused. Only of small programs is every order and every sharding looked at; of others what is named
    is the leanest plan found in a few searches, and one for a byte less may go another way and find a leaner one. No page and no
    error says that there is none ("the least found has a peak of ...; give at least that").
    """
    least = named(limit(given), *args)
    assert least is not None and least > given, (given, least)
    assert peak(limit(least), *args) <= least, f"{least:,} B were named, and the plan for them takes more"
    less = named(limit(least - 1), *args)
    if exact or less is not None:
        assert less == least, f"{least:,} B were named for {given:,}, and {less} for {least - 1:,}"
    else:
        assert peak(limit(least - 1), *args) < least, f"a plan for {least - 1:,} B takes more"
    return least
