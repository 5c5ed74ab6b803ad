"""Loops under a budget: the body copies what it reads, trip by trip.

Problem: a loop over microbatches is one position of the step and reads every parameter, so all of them would have to be on
the device at once. Idea: its body is a program like any other. State that it reads may come to it on the host, and is copied
where the body uses it; activations may leave and come back; the same copies happen in every trip, and the loop takes as many
times longer. What is not copied lies on the device for the whole loop.

The budget of a body is what the device has left beside all that cannot leave it meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from colofunc.mesh import Mesh
from colofunc.planner.host_operators import with_operators
from colofunc.planner.memory_policies import MemoryPolicy
from colofunc.planner.offload_trace import Ground, NodeS, of_lies, trace_of, write
from colofunc.planner.residency import Trace, least_budget, reside
from colofunc.program.ir import Loop, Node
from colofunc.program.memory import Meta, inside, lies, memory

NOTHING: frozenset[int] = frozenset()


def opened(
    ground: Ground, mesh: Mesh, node_s: NodeS, states: Mapping[int, str | None], limit: int, policy: MemoryPolicy
) -> Ground | None:
    """The ground of the program whose loops copy for themselves; None where there is no loop, or nothing has to leave."""
    loops = {k: node.loop for k, node in enumerate(ground.program.nodes) if node.loop is not None}
    if not loops or (max(ground.held, default=0) <= limit and not policy.where):
        return None
    items, trace = trace_of(ground, NOTHING, states, limit)
    nodes, device_s, host_reads = list(ground.program.nodes), list(ground.device_s), dict[int, frozenset[int]]()
    for k, loop in loops.items():
        room = limit - _beside(ground, k, loop, items, trace)
        loop, host_reads[k], device_s[k] = _opened(ground, k, loop, room, mesh, node_s, states, policy)
        nodes[k] = attrs.evolve(nodes[k], loop=loop)
    program = ground.program.with_nodes(nodes)
    held = memory(program).timeline["device"]
    found = of_lies(program, lies(program), held, mesh, node_s, ground.given)
    for k in loops:  # storages of inputs are numbered first, so what a loop takes is named as before
        host_reads[k] |= {found.lies.home[o] for o in host_outs(nodes[k])}
    return attrs.evolve(found, device_s=tuple(device_s), host_reads=host_reads)


def host_outs(node: Node) -> list[int]:
    """Results of a loop that its body makes on the host."""
    if node.loop is None:
        return []
    body = node.loop.body
    return [o for o, inner in zip(node.outs, body.outputs, strict=True) if o is not None and body.values[inner].tier == "host"]


def _beside(ground: Ground, k: int, loop: Loop, items: list[int], trace: Trace) -> int:
    """Bytes that lie on the device while the loop runs, whatever its body does."""
    operands = {ground.lies.home[i] for i in ground.program.nodes[k].refs}
    needed = sum(
        item.nbytes
        for s, item in zip(items, trace.items, strict=True)
        if k in item.uses and not (item.home and s in operands)
    )
    _, held = inside(loop.body, _metas(ground, k, loop))
    return trace.base[k] - max(held, default=0) + needed


def _metas(ground: Ground, k: int, loop: Loop) -> dict[int, Meta]:
    return {into: ground.lies.metas[i] for into, i in zip(loop.body.inputs, ground.program.nodes[k].refs, strict=True)}


def _opened(
    ground: Ground, k: int, loop: Loop, limit: int, mesh: Mesh, node_s: NodeS, states: Mapping[int, str | None], policy: MemoryPolicy
) -> tuple[Loop, frozenset[int], float]:
    """(the loop with copies in its body, the storages that it takes on the host, seconds of all trips).

    What gathers from tables on the host runs there where that is faster, as outside of loops; gradients that it makes so
    are summed there.
    """
    refs, body = ground.program.nodes[k].refs, loop.body
    found, held = inside(body, _metas(ground, k, loop))
    outer = {found.home[into]: ground.lies.home[i] for into, i in zip(body.inputs, refs, strict=True)}
    mine: dict[int, str | None] = {s: states[o] for s, o in outer.items() if o in states and states[o] != "device"}
    inner = of_lies(body, found, held, mesh, node_s, {})
    tries = []
    for _, on_host in with_operators(inner, policy.where, policy.update, mine, max(limit, 1), [(0.0, NOTHING)]):
        items, trace = trace_of(inner, on_host, mine, max(limit, 1))
        least = least_budget(trace)[0]
        tries.append((max(0, least - limit), on_host, items, trace, reside(trace, max(limit, least), inner.links)))
    _, on_host, items, trace, made = min(tries, key=lambda one: (one[0], one[-1].seconds))
    written = write(inner, on_host, items, trace, made, stay=True)
    away = frozenset(outer[items[m]] for m, item in enumerate(trace.items) if item.home and m not in made.residents)
    return attrs.evolve(loop, body=written), away, made.seconds * loop.trips
