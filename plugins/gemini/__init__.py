"""Gemini and Elixir: where state lies, as these systems decide it.

    step = cf.offload(cf.shard(step_fn, mesh, zero(3, "dp")), policy=gemini("auto", margin=0.6), budget="20GiB")
    step = cf.offload(cf.shard(step_fn, mesh, zero(3, "dp")), policy=elixir(), budget="20GiB")

Problem: chunks of parameters and optimizer state have to lie somewhere between their uses, and a system that looks
while it runs learns too late. Idea: the traced program is the statistics that Gemini gathers in warm-up (`warmup`
measures seconds, too), so a policy only says which tier each state is kept in; what moves when follows from the uses
(`cf.offload`). In these systems' words: a chunk is *held* where it lies, *computed* with while an operator reads it,
and *free* on the device where only the host has it; the *margin* is what the device has left beside parameters and
non-model data, and a ratio of it takes optimizer state.

Source: PatrickStar (2108.05818) for chunk states and margin; Colossal-AI's Gemini for the policies' names; Elixir
(2212.05339) for its rates and search (`rcache.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import attrs
from colofunc_plugins.gemini.rcache import divided, rates

import colofunc as cf

__all__ = ["elixir", "gemini"]

Placement = Literal["device", "host", "static", "auto"]
PLACEMENTS = ("device", "host", "static", "auto")
SCALAR = 8  # bytes: step counts stay with the device


def gemini(
    placement: Placement = "auto", *, param: float = 0.0, optim: float = 1.0, margin: float = 0.5, warmup: int = 0
) -> cf.ext.MemoryPolicy:
    """A policy for `cf.offload`.

    "device": all state on the device. "host": all on the host, updated there. "static": parts `param` of the
    parameters' and `optim` of the optimizer state's bytes on the host, the last used first; updated where the moments
    lie. "auto": parameters stay as long as they leave room, `margin` (0 to 1) of what is left then takes optimizer
    state, the first used first. warmup: so many first steps are measured; then the step is planned again with their
    seconds in place of modelled ones.
    """
    if placement not in PLACEMENTS:
        raise cf.PlanError(f"gemini has no placement {placement!r}; it has {', '.join(PLACEMENTS)}")
    for name, part in (("param", param), ("optim", optim), ("margin", margin)):
        if not 0 <= part <= 1:
            raise cf.PlanError(f"gemini({name}={part}): a part is between 0 and 1")
    if warmup < 0:
        raise cf.PlanError(f"gemini(warmup={warmup}): give how many first steps are measured, such as 2")

    def place(states: Sequence[cf.ext.State], room: cf.ext.Room) -> Sequence[str | None]:
        everything = set(range(len(states)))
        if placement == "device":
            away = set[int]()
        elif placement == "host":
            away = everything
        elif placement == "static":
            away = _last(states, "param", param) | _last(states, "state", optim)
        elif room.budget_bytes is None:
            away = set()
        else:
            left = room.budget_bytes - room.other_bytes
            held = _first(states, ("frozen", "buffer", "param"), left)
            left -= sum(states[number].nbytes for number in held)
            held |= _first(states, ("state",), left * margin)
            away = everything - held
        tiers = []
        for number, state in enumerate(states):
            tiers.append("host" if number in away and state.nbytes > SCALAR else "device")
        return tiers

    update = {"device": "device", "host": "host"}.get(placement)
    return cf.ext.MemoryPolicy(f"gemini {placement}", place, update, activations=False, measure=warmup)


def elixir() -> cf.ext.MemoryPolicy:
    """Elixir's search over its published model: so many chunks with their optimizer state on the device, the rest
    through a cache.

    As published: rates of copies and of both Adams by the number of devices that share a host; chunks of one size,
    packed in order of use; a cache of blocks that replays the step by Belady's rule; every division of the room between
    chunks that stay and blocks, by seconds. Not as published: chunks are as large as the largest parameter (there their
    size is searched for, here the parameters that a policy sees lie in ZeRO's chunks already); rates are not measured
    on the machine; what the cache does is left to `cf.offload`, which also overlaps it with the work that the model
    leaves out.
    """

    def place(states: Sequence[cf.ext.State], room: cf.ext.Room) -> Sequence[str | None]:
        if room.budget_bytes is None:
            return [None] * len(states)
        chunks = _chunks([state.nbytes if state.role == "param" else 0 for state in states])
        followers = _followers(states)
        moments: list[list[int]] = []  # the optimizer state of each chunk
        for chunk in chunks:
            moments.append([])
            for parameter in chunk:
                moments[-1] += followers.get(parameter, ())
        chunk_bytes = max((_nbytes(states, chunk) for chunk in chunks), default=0)
        state_bytes = max((_nbytes(states, members) for members in moments), default=0)
        kept, _ = divided(
            len(chunks), chunk_bytes, state_bytes, room.budget_bytes - room.other_bytes, rates(room.ranks)
        )

        held = set().union(*chunks[:kept], *moments[:kept])
        tiers: list[str | None] = []
        for number, state in enumerate(states):
            if state.role not in ("param", "state"):
                tiers.append(None)
            elif number in held or state.nbytes <= SCALAR:
                tiers.append("device")
            else:
                tiers.append("host")
        return tiers

    return cf.ext.MemoryPolicy("elixir", place, activations=False)


def _nbytes(states: Sequence[cf.ext.State], members: Sequence[int]) -> int:
    return sum(states[number].nbytes for number in members)


def _chunks(sizes: Sequence[int]) -> list[list[int]]:
    """Those with bytes, in order, in chunks of at most the largest one's bytes."""
    chunks: list[list[int]] = []
    largest = max(sizes, default=0)
    left = 0
    for number, nbytes in enumerate(sizes):
        if not nbytes:
            continue
        if nbytes > left:
            chunks.append([])
            left = largest
        chunks[-1].append(number)
        left -= nbytes
    return chunks


def _followers(states: Sequence[cf.ext.State]) -> dict[int, list[int]]:
    """Parameter -> optimizer states that are named after it: the longest end that a parameter's dotted name shares."""
    owners: dict[str, int] = {}  # every end of a name -> the parameter, -1 where two share it
    for number, state in enumerate(states):
        if state.role == "param":
            for end in _ends(state.name):
                owners[end] = -1 if end in owners else number
    found: dict[int, list[int]] = {}
    for number, state in enumerate(states):
        if state.role != "state":
            continue
        shared = [end for end in _ends(state.name) if end in owners]
        owner = owners[shared[0]] if shared else -1
        if owner >= 0:
            found.setdefault(owner, []).append(number)
    return found


def _ends(name: str) -> list[str]:
    """Every end of a dotted name, longest first: a.b.c, b.c, c."""
    parts = name.split(".")
    return [".".join(parts[begin:]) for begin in range(len(parts))]


def _first(states: Sequence[cf.ext.State], roles: Iterable[str], nbytes: float) -> set[int]:
    """The first states of these roles that fit in so many bytes."""
    return _taken(states, [number for number, state in enumerate(states) if state.role in tuple(roles)], nbytes)


def _last(states: Sequence[cf.ext.State], role: str, part: float) -> set[int]:
    """The last states of a role, with at most that part of its bytes; all of them where the part is 1."""
    movable = [number for number, state in enumerate(states) if state.role == role and state.nbytes > SCALAR]
    return _taken(states, movable[::-1], part * _nbytes(states, movable))


def _taken(states: Sequence[cf.ext.State], order: Sequence[int], nbytes: float) -> set[int]:
    """As many of the states as fit, in an order; one that does not fit is passed over."""
    taken: set[int] = set()
    left = nbytes
    for number in order:
        if states[number].nbytes <= left:
            taken.add(number)
            left -= states[number].nbytes
    return taken


@cf.hookimpl
def colofunc_memory_policies() -> Mapping[str, Callable[..., cf.ext.MemoryPolicy]]:
    return {"gemini": gemini, "elixir": elixir, **{f"gemini_{name}": partial(gemini, name) for name in PLACEMENTS}}
