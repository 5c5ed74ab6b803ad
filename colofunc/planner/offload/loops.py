"""Loops under a budget: the body copies what it reads, trip by trip.

Problem: a loop over microbatches is one position of the step and reads every parameter, so all of them would have to be
on the device at once. Idea: its body is a program like any other. State that it reads may come to it on the host, and
is copied where the body uses it; activations may leave and come back; the same copies happen in every trip, and the
loop takes as many times longer. What is not copied lies on the device for the whole loop.

So do the gradients that it sums, which are as large as the parameters. Where there is no room for them, their sums lie
on the host: each trip's share goes there as soon as it is made and is added there, and what reads the sum behind the
loop finds it there.

The budget of a body is what the device has left beside all that cannot leave it meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from colofunc.mesh import Mesh
from colofunc.planner.offload.host_operators import with_operators
from colofunc.planner.offload.policies import MemoryPolicy
from colofunc.planner.offload.residency import Residency, Trace, least_budget, reside
from colofunc.planner.offload.trace import Ground, of_lies, trace_of_ground, write_copies
from colofunc.program.cost import NodeSeconds
from colofunc.program.editor import Editor
from colofunc.program.ir import Loop, Node
from colofunc.program.memory import lies, memory, memory_of_body
from colofunc.program.passes.reuse import added_in_place
from colofunc.program.result_storages import StridedMeta

NOTHING: frozenset[int] = frozenset()


def opened(
    ground: Ground, mesh: Mesh, node_s: NodeSeconds, states: Mapping[int, str | None], limit: int, policy: MemoryPolicy
) -> Ground | None:
    """The ground of the program whose loops copy for themselves; None where there is no loop, or nothing has to leave.

    A loop with a timetable copies nothing: what it reads is there when it begins.
    """
    inside = {k: node.loop for k, node in enumerate(ground.program.nodes) if node.loop is not None}
    loops = {k: loop for k, loop in inside.items() if loop.timetable is None}
    if not loops or (max(ground.held, default=0) <= limit and not policy.where):
        return None
    items, trace = trace_of_ground(ground, NOTHING, states, limit)
    edit, device_s = Editor(ground.program), list(ground.device_s)
    host_reads: dict[int, frozenset[int]] = {}
    for k, loop in loops.items():
        room = limit - _beside(ground, k, loop, items, trace)
        loop, host_reads[k], device_s[k] = _opened(ground, k, loop, room, mesh, node_s, states, policy)
        edit.change(k, loop=loop)
    program = edit.done()
    held = memory(program).timeline["device"]
    found = of_lies(program, lies(program), held, mesh, node_s, ground.given)
    for k in loops:  # storages of inputs are numbered first, so what a loop takes is named as before
        host_reads[k] |= {found.lies.home[out] for out in host_outs(program.nodes[k])}
    return attrs.evolve(found, device_s=tuple(device_s), host_reads=host_reads)


def host_outs(node: Node) -> list[int]:
    """Results of a loop that its body makes on the host."""
    if node.loop is None:
        return []
    body = node.loop.body
    outs = []
    for out, inner in zip(node.outs, body.outputs, strict=True):
        if out is not None and body.values[inner].tier == "host":
            outs.append(out)
    return outs


def _beside(ground: Ground, k: int, loop: Loop, items: list[int], trace: Trace) -> int:
    """Bytes that lie on the device while the loop runs, whatever its body does."""
    operands = {ground.lies.home[ref] for ref in ground.program.nodes[k].refs}
    needed = 0
    for storage, item in zip(items, trace.items, strict=True):
        in_flight = any(begin < k < end for begin, end in item.held)
        # The state that it reads may come to the body bit by bit.
        if (k in item.uses or in_flight) and not (item.home and storage in operands):
            needed += item.nbytes
    _, held = memory_of_body(
        loop.body, _metas(ground, k, loop), added_in_place(loop).values()
    )  # as the loop was counted
    return trace.base[k] - max(held, default=0) + needed


def _metas(ground: Ground, k: int, loop: Loop) -> dict[int, StridedMeta]:
    refs = ground.program.nodes[k].refs
    return {into: ground.lies.metas[ref] for into, ref in zip(loop.body.inputs, refs, strict=True)}


def _opened(
    ground: Ground,
    k: int,
    loop: Loop,
    limit: int,
    mesh: Mesh,
    node_s: NodeSeconds,
    states: Mapping[int, str | None],
    policy: MemoryPolicy,
) -> tuple[Loop, frozenset[int], float]:
    """(the loop with copies in its body, the storages that it takes on the host, seconds of all trips).

    What gathers from tables on the host runs there where that is faster, as outside of loops; gradients that it makes
    so are summed there.
    """
    refs, body = ground.program.nodes[k].refs, loop.body
    found, held = memory_of_body(body, _metas(ground, k, loop))
    # storage of the body -> storage outside that it is
    outer = {found.home[into]: ground.lies.home[ref] for into, ref in zip(body.inputs, refs, strict=True)}
    body_states: dict[int, str | None] = {}
    for inside_storage, storage in outer.items():
        if storage in states and states[storage] != "device":
            body_states[inside_storage] = states[storage]
    inner = of_lies(body, found, held, mesh, node_s, {})
    sums = _sums(loop, inner)
    tries = _tried(inner, NOTHING, 0, body_states, limit, policy)
    # Where it has too much: no room for some more of the largest sums, at last for none.
    for count in range(1, len(sums) + 1):
        over = min(tried.over for tried in tries)
        if not over:
            break
        largest = [*sums][:count]
        saved = sum(sums[storage] for storage in largest)
        if count == len(sums) or saved >= over:
            tries += _tried(inner, frozenset(largest), saved, body_states, limit, policy)

    def trip_s(tried: _Try) -> float:
        # A sum on the host is read and written, and what is added to it read.
        summed_bytes = sum(sums[storage] for storage in tried.leave)
        return max(tried.made.seconds, mesh.host_s(3 * summed_bytes))

    best = min(tries, key=lambda tried: (tried.over, trip_s(tried)))
    written = write_copies(inner, best.on_host, best.items, best.trace, best.made, stay=True, leave=best.leave)
    away: set[int] = set()
    for number, item in enumerate(best.trace.items):
        if item.home and number not in best.made.residents:
            away.add(outer[best.items[number]])
    return attrs.evolve(loop, body=written), frozenset(away), trip_s(best) * loop.trips


@attrs.frozen(eq=False)
class _Try:
    """A body with copies. `over`: bytes that it has too much; `leave`: storages of what is summed on the host."""

    over: int
    on_host: frozenset[int]
    items: list[int]
    trace: Trace
    made: Residency
    leave: frozenset[int]


def _tried(
    inner: Ground, leave: frozenset[int], saved: int, states: Mapping[int, str | None], limit: int, policy: MemoryPolicy
) -> list[_Try]:
    """A body in each way to run its operators. saved: bytes that the sums would take beside it, were they not on the
    host.
    """
    tries, limit = [], limit + saved
    for _, on_host in with_operators(inner, policy.where, policy.update, states, max(limit, 1), [(0.0, NOTHING)]):
        items, trace = trace_of_ground(inner, on_host, states, max(limit, 1), leave=leave)
        least = least_budget(trace)[0]
        made = reside(trace, max(limit, least), inner.links)
        tries.append(_Try(max(0, least - limit), on_host, items, trace, made, leave))
    return tries


def _sums(loop: Loop, inner: Ground) -> dict[int, int]:
    """Storages of what a body makes and a loop sums, all of each -> bytes; the largest first."""
    homes = [inner.lies.home[out] for out in loop.body.outputs]
    found: dict[int, int] = {}
    for number, out, how in zip(homes, loop.body.outputs, loop.gathers, strict=True):
        value, storage = inner.program.values[out], inner.lies.storages[number]
        whole = storage.value == out and storage.nbytes == value.nbytes and homes.count(number) == 1
        if how == "sum" and whole and storage.born >= 0 and value.tier == "device" and value.shape:
            found[number] = value.nbytes
    return dict(sorted(found.items(), key=lambda sized: -sized[1]))
