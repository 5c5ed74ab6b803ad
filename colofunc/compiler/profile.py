"""step.profile: run a lowered step a few times with a clock behind every node; see `colofunc.executors.profile`.

The state is not consumed: the steps run on copies of it, on the same batch, with one seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch

from colofunc import owned
from colofunc.compiler.observation import arguments_of
from colofunc.errors import InputError
from colofunc.executors.profile import Clock, Profile, Timing, of_all_ranks, seconds_of, timings, write_trace
from colofunc.mesh.cost import rate
from colofunc.ops.debug import quiet
from colofunc.program.chrome_trace import TRACE_MARK
from colofunc.program.cost import node_work

if TYPE_CHECKING:
    from colofunc.compiler.lowered import Lowered


def profile(low: Lowered, args: tuple[Any, ...], path: str | PathLike[str], steps: int = 3) -> Profile:
    """Measure `steps` steps, write a Chrome trace to `path` (rank 0), return the figures. Collective on real ranks."""
    if steps < 1:
        raise InputError(f"profile: {steps} steps; measure at least 1")
    where = owned.given(path, "profile", InputError, owned.A_FILE)
    if not where.parent.is_dir():
        raise InputError(f"profile: there is no folder {where.parent} to write {where.name} to; make it first")
    owned.check_own_kind(where, TRACE_MARK, "profile", InputError)  # before anything is measured
    arguments = arguments_of(low, args)
    inputs = arguments.copies(range(len(arguments.shards)))
    device = inputs[0][0].device if inputs else torch.device("cpu")
    backend, clock = arguments.backend, Clock(device)
    bare = backend.observe(low.program, low.mesh, lambda writer, index, node: None)
    clocked = backend.observe(low.program, low.mesh, clock)
    with torch.no_grad(), quiet():
        bare(inputs), clocked(inputs)  # compiled and warm from here on
        plain_s, clocked_s, seen = [], [], []
        for _ in range(steps):
            plain_s.append(seconds_of(lambda: bare(inputs), device))
            clocked_s.append(seconds_of(lambda: seen.append(clock.one_step(lambda: clocked(inputs))), device))
    measured = timings(clock.nodes, seen)
    everyone = [measured] if backend.watch is None else of_all_ranks(measured)
    lengths_s = [_length_s(visits) for visits in seen]
    overhead = sum(clocked_s) / sum(plain_s) - 1.0
    seconds = (sum(plain_s) / steps, sum(lengths_s) / steps, overhead)
    figures = _figures(low, everyone, seconds, steps, backend.watch is None)
    if backend.watch is None or backend.watch.rank == 0:
        words = "one device"
        if figures.simulated and figures.ranks > 1:
            words = "all ranks, simulated in one process: times are of the simulation"
        write_trace(where, everyone, lengths_s, words)
    return figures


def _length_s(visits: Sequence[tuple[int, float, float]]) -> float:
    """How long a step took, by (node, start, seconds) of what ran in it."""
    return max((start_s + took_s for _, start_s, took_s in visits), default=0.0)


def _figures(
    low: Lowered, everyone: Sequence[Any], seconds: tuple[float, float, float], steps: int, here: bool
) -> Profile:
    flops = ideal_s = 0.0
    for node in low.global_program.nodes:
        work, _, dtype = node_work(node, low.global_program.values, low.registry.rule)
        flops += work
        ideal_s += work / rate(low.priced.topology, dtype)
    cost, topology, simulated = low.cost(), low.priced.topology, here and low.mesh.size > 1
    ideal_s /= low.mesh.size
    utilization: float | None = None
    if simulated:
        peak = "the mesh is simulated"
    elif topology.name == "ideal":
        peak = "the topology is 'ideal', which has no peak: name one, cf.Mesh(topology=...)"
    else:
        peak, utilization = f"of topology {topology.name!r}", ideal_s / seconds[0]
    exposed = tuple(_communication_s(nodes) for nodes in everyone)
    return Profile(
        simulated, low.executor == "compiled", low.mesh.size, steps, *seconds, flops, ideal_s,
        peak, utilization, exposed, everyone[0], dict(cost.bytes), dict(cost.calls),
    )  # fmt: skip


def _communication_s(nodes: Sequence[Timing]) -> float:
    """Seconds of one rank in communication."""
    return sum(node.mean_s for node in nodes if node.communication)
