"""Gemini and Elixir: where state lies, as these systems decide it.

    step = cf.offload(cf.shard(step_fn, mesh, zero(3, "dp")), policy=gemini("auto", margin=0.6), budget="20GiB")
    step = cf.offload(cf.shard(step_fn, mesh, zero(3, "dp")), policy=elixir(), budget="20GiB")

Problem: chunks of parameters and optimizer state have to lie somewhere between their uses, and a system that looks while it
runs learns too late. Idea: the traced program is the statistics that Gemini gathers in warm-up (`warmup` measures seconds,
too), so a policy only says which tier each state is kept in; what moves when follows from the uses (`cf.offload`). In these
systems' words: a chunk is *held* where it lies, *computed* with while an operator reads it, and *free* on the device where only
the host has it (`chunk_states`); the *margin* is what the device has left beside parameters and non-model data, and a ratio of
it takes optimizer state.

Source: PatrickStar (2108.05818) for chunk states and margin; Colossal-AI's Gemini for the policies' names; Elixir (2212.05339)
for the rates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import log
from typing import Any, Literal

import attrs

import colofunc as cf

__all__ = ["chunk_states", "elixir", "gemini"]

Placement = Literal["device", "host", "static", "auto"]
PLACEMENTS = ("device", "host", "static", "auto")
SCALAR = 8  # bytes: step counts stay with the device
ADAM_BYTES = 16.0  # of float32 parameter, gradient and two moments, which a rate in parameters is about


def gemini(
    placement: Placement = "auto", *, param: float = 0.0, optim: float = 1.0, margin: float = 0.5, warmup: int = 0
) -> cf.MemoryPolicy:
    """A policy for `cf.offload`.

    "device": all state on the device. "host": all on the host, updated there. "static": parts `param` of the parameters' and
    `optim` of the optimizer state's bytes on the host, the last used first; updated where the moments lie. "auto": parameters
    stay as long as they leave room, `margin` (0 to 1) of what is left then takes optimizer state, the first used first.
    warmup: so many first steps are measured; then the step is planned again with their seconds in place of modelled ones.
    """
    if placement not in PLACEMENTS:
        raise cf.PlanError(f"gemini has no placement {placement!r}; it has {', '.join(PLACEMENTS)}")
    for name, part in (("param", param), ("optim", optim), ("margin", margin)):
        if not 0 <= part <= 1:
            raise cf.PlanError(f"gemini({name}={part}): a part is between 0 and 1")
    if warmup < 0:
        raise cf.PlanError(f"gemini(warmup={warmup}): give how many first steps are measured, such as 2")

    def place(states: Sequence[cf.State], room: cf.Room) -> Sequence[str | None]:
        if placement in ("device", "host"):
            return [placement if s.nbytes > SCALAR else "device" for s in states]
        if placement == "static":
            away = _last(states, "param", param) | _last(states, "state", optim)
        elif room.budget_bytes is None:
            away = set()
        else:
            left = room.budget_bytes - room.other_bytes
            held = _first(states, ("frozen", "buffer", "param"), left)
            left -= sum(states[k].nbytes for k in held)
            held |= _first(states, ("state",), left * margin)
            away = set(range(len(states))) - held
        return ["host" if k in away and s.nbytes > SCALAR else "device" for k, s in enumerate(states)]

    update = {"device": "device", "host": "host"}.get(placement)
    return cf.MemoryPolicy(f"gemini {placement}", place, update, activations=False, measure=warmup)


def elixir() -> cf.MemoryPolicy:
    """Elixir's search with its published rates: bytes of the device go to what saves most seconds each.

    A parameter on the device saves its copy in, once forward and once backward; moments there save the gradient's way to the
    host and the parameter's way back, and the difference of the two Adams.
    """

    def place(states: Sequence[cf.State], room: cf.Room) -> Sequence[str | None]:
        if room.budget_bytes is None:
            return [None] * len(states)
        n = room.ranks
        up, down = (16.3 * n + 8.7) * 1e9 / n, (15.8 * n + 2.3) * 1e9 / n  # bytes/s a rank
        slow, fast = (1.66 * log(n) + 5.15) * 1e9 / n, 50e9  # parameters/s a rank
        saves = {"param": 2 / up, "frozen": 2 / up, "buffer": 2 / up}
        saves["state"] = (4 / down + 4 / up + 1 / slow - 1 / fast) / (ADAM_BYTES / 2)  # of a parameter, over its moments' bytes
        order = sorted(range(len(states)), key=lambda k: (-saves.get(states[k].role, 0.0), k))
        held = _taken(states, order, room.budget_bytes - room.other_bytes)
        return ["device" if k in held or s.nbytes <= SCALAR else "host" for k, s in enumerate(states)]

    return cf.MemoryPolicy("elixir", place, activations=False)


def _first(states: Sequence[cf.State], roles: Iterable[str], nbytes: float) -> set[int]:
    """The first states of these roles that fit in so many bytes."""
    return _taken(states, [k for k, s in enumerate(states) if s.role in tuple(roles)], nbytes)


def _last(states: Sequence[cf.State], role: str, part: float) -> set[int]:
    """The last states of a role, with at most that part of its bytes; all of them where the part is 1."""
    mine = [k for k, s in enumerate(states) if s.role == role and s.nbytes > SCALAR]
    return _taken(states, mine[::-1], part * sum(states[k].nbytes for k in mine))


def _taken(states: Sequence[cf.State], order: Sequence[int], nbytes: float) -> set[int]:
    found, left = set[int](), nbytes
    for k in order:
        if states[k].nbytes <= left:
            found.add(k)
            left -= states[k].nbytes
    return found


@attrs.frozen
class ChunkStates:
    """What happens to one state in a step: (node, "free" | "hold" | "compute") where that changes."""

    name: str
    changes: tuple[tuple[int, str], ...]


def chunk_states(low: Any) -> tuple[ChunkStates, ...]:
    """Of each parameter and moment of a lowered step, in Gemini's words: "compute" while a node on the device reads it, "hold"
    while the device keeps it, "free" while only the host does."""
    program = low.program
    source = {i: i for i in program.inputs}  # a copy of an input, or a view of it -> the input
    reads: dict[int, list[int]] = {}
    spans: dict[int, list[int]] = {}
    last = program.last_uses()
    for k, node in enumerate(program.nodes):
        name = node.target.removeprefix("colofunc.").removesuffix("_start")
        if name in ("to_device", "to_host", "wait", "put") and node.refs[0] in source:
            source.update({o: source[node.refs[0]] for o in node.outs if o is not None})
            continue
        for i in node.refs:
            if i in source and program.values[i].tier == "device":
                reads.setdefault(source[i], []).append(k)
    for value, i in source.items():
        if program.values[value].tier == "device" and value != i:
            made = next(k for k, node in enumerate(program.nodes) if value in node.outs)
            spans.setdefault(i, []).extend(range(made, last.get(value, made) + 1))
    out = []
    for i in program.inputs:
        value = program.values[i]
        if value.role in ("param", "state", "frozen", "buffer"):
            held = set(spans.get(i, ())) if value.tier != "device" else set(range(len(program.nodes)))
            out.append(ChunkStates(value.name, tuple(_changes(len(program.nodes), held, set(reads.get(i, ()))))))
    return tuple(out)


def _changes(count: int, held: set[int], read: set[int]) -> Iterable[tuple[int, str]]:
    before = ""
    for k in range(count):
        now = "compute" if k in read else "hold" if k in held else "free"
        if now != before:
            yield k, now
        before = now


@cf.hookimpl
def colofunc_memory_policies() -> Mapping[str, cf.MemoryPolicy]:
    return {"gemini": gemini(), "elixir": elixir(), **{f"gemini_{name}": gemini(name) for name in ("device", "host", "static", "auto")}}
