"""Plan, measure, plan again: the first steps of an offloaded step are timed, and what moves when is decided by these
times.

    step = cf.offload(cf.shard(step_fn, mesh), budget="20GiB", measure=2)      # or policy=gemini("auto", warmup=2)

Problem: how long an operator takes is a model until it has run. Idea: the first steps run as planned from the trace,
with a clock behind each operator (`executors/profile.py`). Then the program is finished once more: the sharding stays,
and what is made again, copied, kept and updated where is decided by what was measured, the most of any rank, so that
all decide alike. State moves to its new tier with the next call. A plan that cannot be made, or is no faster by these
times, changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from colofunc import env
from colofunc.compiler.disk_state import Shelves
from colofunc.dtensor.tensor import DTensor
from colofunc.executors.backend import Backend
from colofunc.executors.disk.tensors import in_memory
from colofunc.executors.pools import accelerator, in_tier
from colofunc.executors.profile import Clock
from colofunc.executors.simulated import Shards
from colofunc.executors.watch import Watch
from colofunc.mesh.device import device_of
from colofunc.program.cost import seconds_on
from colofunc.program.lanes import played
from colofunc.program.passes.one_call import with_one_launch
from colofunc.program.timed import Timed, timings
from colofunc.spec.layout import Layout

if TYPE_CHECKING:
    from colofunc.compiler.lowered import Lowered


def warmup(low: Lowered, backend: Backend, steps: int, name: str) -> Warmup | None:
    """What measures the first steps; None, and a line that says why, where their operators cannot be timed."""
    why = "a compiled step has no operators to time" if low.executor == "compiled" else ""
    if backend.watch is None and low.mesh.size > 1:
        why = "times of a simulated mesh say nothing of its ranks"
    if why:
        env.say(f"{name} is not measured: {why}")
    return None if why else Warmup(low, backend, steps)


class Warmup:
    """The first steps, timed. `left`: how many are still to run."""

    def __init__(self, low: Lowered, backend: Backend, steps: int) -> None:
        self.left = steps
        self._low, self._backend = low, backend
        self._clock: Clock | None = None
        self._run: Callable[[Sequence[Shards]], list[Shards]] | None = None
        self._best: list[float] = []  # per node, of one visit in the fastest step

    def run(self, inputs: Sequence[Shards]) -> list[Shards]:
        """One step, as the program says."""
        if self._run is None:
            self._clock = Clock(accelerator(part for parts in inputs for part in parts))
            self._run = self._backend.observe(self._low.program, self._low.mesh, self._clock)
        assert self._clock is not None, "made with the function"
        outs: list[list[Shards]] = []
        run = self._run
        visits = self._clock.one_step(lambda: outs.append(run(inputs)))
        took, times = [0.0] * len(self._clock.nodes), [0] * len(self._clock.nodes)
        for site, _, seconds in visits:
            took[site] += seconds
            times[site] += 1
        mine = [total / max(1, n) for total, n in zip(took, times, strict=True)]
        self._best = [min(pair) for pair in zip(self._best, mine, strict=True)] if self._best else mine
        self.left -= 1
        return outs[0]

    def timed(self) -> Timed:
        """What was measured, the most of any rank. Collective."""
        told = _told(self._best, self._backend.watch)
        most = [max(each) for each in zip(*told, strict=True)]
        low = self._low
        return timings(low.program, most, seconds_on(low.priced, low.registry.rule))


def agreed_by_all(yes: bool, watch: Watch | None) -> bool:
    """Whether all ranks say so. Collective."""
    return all(_told(yes, watch))


def _told(mine: Any, watch: Watch | None) -> list[Any]:
    """What each rank says."""
    if watch is None:
        return [mine]
    told = [None] * dist.get_world_size()
    with watch:
        dist.all_gather_object(told, mine)
    return told


def step_s(low: Lowered, timed: Timed) -> float:
    """Seconds of a step of this program, by what was measured."""
    rule = low.registry.rule
    program = with_one_launch(low.program, low.priced, rule)
    return played(program, low.priced, partial(timed.node_s, model=seconds_on(low.priced, rule))).end_s


def moved_leaves(
    leaves: Sequence[torch.Tensor],
    layouts: Sequence[Layout],
    low: Lowered,
    backend: Backend,
    directory: str | bool | None,
    name: str,
) -> list[torch.Tensor]:
    """The leaves in the tiers of new layouts, one after the other; what moved is consumed where it was."""
    there = [isinstance(x, DTensor) and x.sharding is not layout for x, layout in zip(leaves, layouts, strict=False)]
    shelves = Shelves(directory, leaves, layouts, [False] * len(leaves), low.mesh, backend)
    out: list[torch.Tensor] = []
    device = device_of(low.mesh)
    for leaf, layout, moves in zip(leaves, layouts, there, strict=False):
        if not moves or not isinstance(leaf, DTensor):
            out.append(leaf)
            continue
        owned, parts = leaf.owned, leaf.parts
        if layout.tier != "disk":
            read = {id(x): in_memory(x) for x in parts}
            done = {key: in_tier(x, layout.tier, device) for key, x in read.items()}
            parts = [done[id(x)] for x in parts]
        out.append(DTensor(shelves.keep(parts, layout), layout, low.mesh, backend, owned=owned, role=leaf.role))
        if owned:
            leaf.consume(f"{name}, which has planned again by what it measured and moved it")
    shelves.commit()
    return out
