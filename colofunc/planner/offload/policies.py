"""Policies of memory: which tier state is kept in between steps, and where it is updated.

    only_moments = cf.ext.MemoryPolicy("moments", lambda states, room: ["host" if s.role == "state" else None for s in
    states]) step = cf.offload(step, policy=only_moments)

A policy says where what lasts lies; when it moves follows from the step's uses (`planner/offload/fastest.py`). What it
leaves open is chosen by time. Plugins name policies with the hook `colofunc_memory_policies`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf

import attrs

from colofunc.errors import PlanError


@attrs.frozen
class State:
    """One input leaf that lasts from step to step, as a policy sees it: in order of first use, bytes of one rank."""

    name: str
    role: str  # "param", "frozen", "state", "buffer"
    nbytes: int


@attrs.frozen
class Room:
    """What a policy knows of the machine: bytes of device memory a rank (None: no limit), the peak of all that is no
    state, and the ranks that share a host."""

    budget_bytes: int | None
    other_bytes: int
    ranks: int


PlaceStates = Callable[[Sequence[State], Room], Sequence[str | None]]


@attrs.frozen
class MemoryPolicy:
    """Which tier state lies in, and where it is updated; None leaves a choice to cost.

    place: the tier of each state between steps ("device", "host", "disk" or None), given all of them. update: "device",
    "host" or None. activations: whether what forward keeps for backward may be copied to the host. where: glob of
    module paths -> "host" or "device", where their operators run; of others cost decides (`host_operators`). slack: of
    all that takes at most this part longer than the fastest, what copies fewest bytes. measure: so many first steps are
    timed and the step is planned again (`cf.offload(measure=)`).
    """

    name: str
    place: PlaceStates = attrs.field(default=lambda states, room: [None] * len(states), repr=False)
    update: str | None = None
    activations: bool = True
    where: Mapping[str, str] = attrs.field(factory=dict, hash=False)
    slack: float = 0.0
    measure: int = 0


SCALAR = 8  # bytes of a step count, which goes with nobody
AUTO = MemoryPolicy("auto")
BYTES = MemoryPolicy("bytes", slack=inf)
DEVICE = MemoryPolicy("device", lambda states, room: ["device"] * len(states), "device", activations=False)
GIVEN = MemoryPolicy("given", lambda states, room: ["device"] * len(states), activations=False)
"""Of a step that nobody offloads: what was given elsewhere stays there, and moves nothing else."""
DISK = MemoryPolicy("disk", lambda states, room: ["disk" if s.nbytes > SCALAR else None for s in states])
HOST = MemoryPolicy(
    "host", lambda states, room: ["host" if s.nbytes > SCALAR else None for s in states], activations=False
)


def policy_places(policy: MemoryPolicy, states: Sequence[State], room: Room) -> Sequence[str | None]:
    """What the policy says, or an error that says what is wrong with it."""
    found = list(policy.place(states, room))
    wrong = [tier for tier in found if tier not in ("device", "host", "disk", None)]
    if len(found) != len(states) or wrong:
        said = f"{wrong[0]!r}" if wrong else f"{len(found)} tiers for {len(states)} states"
        raise PlanError(
            f"memory policy {policy.name!r} says {said}; its place() gives 'device', 'host', 'disk' or None for each "
            "state"
        )
    return found
