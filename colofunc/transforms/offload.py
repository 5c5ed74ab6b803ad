"""offload: parameters, gradients, optimizer state and activations lie on the host where the device has no room for them.

    step = cf.offload(cf.shard(step_fn, mesh, zero(3, "dp")), budget="6GiB")     # the fastest way within it
    step = cf.offload(step_fn, budget=0.5)                                       # half of what the device has
    step = cf.offload(step_fn, policy="host")                                    # all state on the host, whatever fits

Problem: what does not fit is moved by hooks that learn too late what is needed next. Idea: the step is one program, so all
uses are known; `planner/offload.py` decides what stays, what is copied when, and where updates run, by the time that it
takes on a timeline of compute, host and copy engines. State that does not stay lies on the host from `step.init` on, and its
spec says so (`(dp o) i @host`). The numbers are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from colofunc.errors import InputError, PlanError, near
from colofunc.mesh.sizes import parse_bytes
from colofunc.planner import offload as planner
from colofunc.planner.memory_policies import AUTO, DEVICE, HOST, MemoryPolicy
from colofunc.transforms.compile import StepCompiler
from colofunc.transforms.staged import Intent, Staged, stage

BUILT_IN = {p.name: p for p in (AUTO, DEVICE, HOST)}


def offload(
    step_fn: Callable[..., Any] | None = None, *, budget: str | int | float = "auto", policy: str | MemoryPolicy = "auto"
) -> Any:
    """The step within `budget` bytes of device memory a rank, at every moment.

    budget: "6GiB", a number of bytes, a part of the device's memory (0.5), or "auto": all of it. policy: "auto" decides by
    time; "device" moves nothing, "host" keeps all state on the host; plugins have more (`gemini`), or a `MemoryPolicy`.
    Raises PlanError with the least budget possible where nothing fits, CapacityError where the host cannot hold the rest.
    """
    limit, part = _budget(budget)
    if not isinstance(policy, str | MemoryPolicy):
        raise PlanError(f"cf.offload(policy={policy!r}): give a name ({', '.join(BUILT_IN)}) or a MemoryPolicy")
    options = {"budget_bytes": limit, "budget_part": part, "policy": policy}
    intent = Intent("offload", options, move=partial(_move, policy))
    if step_fn is None:
        return lambda fn: stage(fn, intent, StepCompiler)
    staged: Staged = stage(step_fn, intent, StepCompiler)
    return staged


def _budget(budget: str | int | float) -> tuple[int | None, float | None]:
    """(bytes, part of the device's memory); neither: all of it."""
    if budget == "auto":
        return None, None
    if isinstance(budget, float):
        if not 0 < budget <= 1:
            raise InputError(f"cf.offload(budget={budget}): a fraction is above 0 and at most 1; write bytes as a whole number or '6GiB'")
        return None, budget
    return parse_bytes(budget, "cf.offload(budget=)"), None


def _move(policy: str | MemoryPolicy, policies: Mapping[str, Any], given: Mapping[int, str]) -> Any:
    """What `within.Ending` wants, once plugins and arguments are known."""
    found = policy if isinstance(policy, MemoryPolicy) else {**BUILT_IN, **policies}.get(policy)
    if found is None:
        names = (*BUILT_IN, *policies)
        raise PlanError(f"cf.offload has no policy {policy!r}{near(str(policy), names, 'policies')}")
    return partial(planner.offload, policy=found, given=given)
