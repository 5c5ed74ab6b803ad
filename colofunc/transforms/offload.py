"""offload: parameters, gradients, optimizer state and activations lie on the host where the device has no room for
them.

    step = cf.offload(cf.shard(step_fn, mesh, zero(3, "dp")), budget="6GiB")     # the fastest way within it
    step = cf.offload(step_fn, budget=0.5)                                       # half of what the device has
    step = cf.offload(step_fn, policy="host")                                    # all state on the host, whatever fits
    step = cf.offload(step_fn, budget="6GiB", host="16GiB", disk="/nvme")        # what the host has no room for, on disk

Problem: what does not fit is moved by hooks that learn too late what is needed next. Idea: the step is one program, so
all uses are known; `planner/offload/fastest.py` decides what stays, what is copied when, and where updates run, by the
time that it takes on a timeline of compute, host and copy engines. State that does not stay lies on the host, or on
disk, from `step.init` on, and its spec says so (`(dp o) i @host`). The numbers are the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import attrs

from colofunc.compiler.memory_limits import limit_bytes
from colofunc.compiler.staged import Staged, in_place_of, plugins_of
from colofunc.compiler.step_compiler import stage
from colofunc.compiler.transform import Build, InputTiers, Move, Transform
from colofunc.errors import InputError, PlanError, PluginError, near, plugin_faults
from colofunc.mesh import Mesh
from colofunc.mesh.sizes import MemoryLimit, parse_room
from colofunc.planner.offload import fastest
from colofunc.planner.offload.choice import Hint
from colofunc.planner.offload.fastest import Offloaded
from colofunc.planner.offload.policies import AUTO, BYTES, DEVICE, DISK, HOST, MemoryPolicy
from colofunc.plugins import build_registry, name_of
from colofunc.program.cost import NodeSeconds
from colofunc.program.ir import Program

BUILT_IN = {p.name: p for p in (AUTO, BYTES, DEVICE, HOST, DISK)}


def offload(
    step_fn: Callable[..., Any] | None = None,
    *,
    budget: str | int | float = "auto",
    policy: str | MemoryPolicy = "auto",
    host: str | int | float = "auto",
    disk: str | os.PathLike[str] | bool | None = None,
    where: Mapping[str, str] | None = None,
    measure: int | None = None,
) -> Any:
    """The step within `budget` bytes of device memory a rank, at every moment.

    budget: "6GiB", a number of bytes, a part of the device's memory (0.5 or "0.5"), or "auto": all of it, of a CUDA
    card what context, libraries, communicators and fragments leave. policy: "auto" decides by time, "bytes" by what is
    copied; "device" moves nothing, "host" and "disk" keep all state there; plugins have more (`gemini`), or a
    `MemoryPolicy`. host: of host memory a rank, in the same words; "auto" is what the topology has. disk: a directory
    for state that neither holds. Its room is taken by `step.init`, which raises DiskError where it cannot be; files go
    when nobody has the state any more, and what a killed process left goes when the next one begins there. True: only
    to plan for a disk of the topology's size; False: none. where: {"*.embed_tokens": "host"}: where operators of these
    modules run; for others cost decides. measure: so many first steps are timed, and what moves when is planned again
    (see `compiler/warmup.py`); a policy may ask for it. Raises PlanError with the least budget possible where nothing
    fits, CapacityError where the host cannot hold the rest.
    """
    limit = parse_room(budget, "cf.offload(budget=)")
    if not isinstance(policy, str | MemoryPolicy):
        raise PlanError(f"cf.offload(policy={policy!r}): give a name ({', '.join(BUILT_IN)}) or a MemoryPolicy")
    if isinstance(policy, str):
        _refuse_unknown(policy, step_fn)
    disk = None if disk is False else disk
    if disk is not None and disk is not True and (not isinstance(disk, str | os.PathLike) or not os.fspath(disk)):
        raise InputError(f"cf.offload(disk={disk!r}): give the path of a directory, such as '/nvme/me'")
    if disk is None and policy in ("disk", DISK):
        raise InputError("cf.offload(policy='disk') needs a directory; write cf.offload(..., disk='/nvme/me')")
    if measure is not None and (isinstance(measure, bool) or not isinstance(measure, int) or measure < 0):
        raise InputError(f"cf.offload(measure={measure!r}): give how many first steps are timed, such as 2")
    if measure is None:
        measure = policy.measure if isinstance(policy, MemoryPolicy) else 0
    room = parse_room(host, "cf.offload(host=)")
    directory = disk if disk is None or disk is True else os.path.expanduser(os.fspath(disk))
    chosen = _where({} if where is None else where)
    options: dict[str, Any] = {"budget": limit, "policy": policy, "host": room, "disk": directory, "where": chosen}
    options["measure"] = measure
    return stage(step_fn, _transform(options))


def _transform(options: dict[str, Any]) -> Transform:
    policy, where, host, disk = (options[word] for word in ("policy", "where", "host", "disk"))
    free = policy in ("auto", AUTO, "bytes", BYTES)
    return Transform(
        "offload",
        options,
        candidates=partial(_copies_too, policy, where, host, disk is not None),
        budget=options["budget"],
        disk=disk,
        measure=options["measure"],
        wider="" if free else "policy='auto' in cf.offload",
    )


def with_disk(step: Staged, disk: str | bool) -> Staged:
    """A step that is offloaded, with a disk where its chain has named none."""
    offloaded = step.transform("offload")
    assert offloaded is not None, "asked for of offloaded steps only"
    if step.disk is not None:
        return step
    return in_place_of(step, offloaded, _transform({**offloaded.options, "disk": disk}))


def _refuse_unknown(policy: str, step_fn: Any) -> None:
    """A name of no policy is refused at once. Before a `shard`, which may bring plugins, only what looks misspelt."""
    if policy in BUILT_IN:
        return
    sharded = isinstance(step_fn, Staged) and step_fn.sharded is not None
    found = build_registry(plugins_of(step_fn)).memory_policies
    hint = near(policy, (*BUILT_IN, *found), "policies")
    if policy in found or (not sharded and "did you mean" not in hint):
        return
    more = "" if sharded else " If a plugin has it, shard first: cf.offload(cf.shard(step, mesh, plugins=[...]), ...)"
    raise PlanError(f"cf.offload has no policy {policy!r}{hint}{more}")


def _constructed(name: str, constructor: Any) -> MemoryPolicy:
    """The policy that a plugin's constructor gives without options."""
    what = f"colofunc_memory_policies: the policy {name!r} from {name_of(constructor)}"
    remedy = "a constructor that can be called without options, and gives a cf.ext.MemoryPolicy"
    with plugin_faults(what, remedy):
        made = constructor() if callable(constructor) else constructor
    if not isinstance(made, MemoryPolicy):
        raise PluginError(f"{what} gave {made!r}. Try: {remedy}")
    return made


def _where(where: Mapping[str, str]) -> dict[str, str]:
    """Globs of modules -> where their operators run."""
    form = 'write globs of modules and where their operators run, such as where={"*.embed_tokens": "host"}'
    if not isinstance(where, Mapping):
        raise InputError(f"cf.offload(where={where!r}): {form}")
    for glob, place in where.items():
        if not isinstance(glob, str) or place not in ("device", "host"):
            raise InputError(
                f"cf.offload(where={{{glob!r}: {place!r}}}): operators run on the 'device' or on the 'host'; {form}"
            )
    return dict(where)


def _copies_too(
    policy: str | MemoryPolicy, where: Mapping[str, str], host: MemoryLimit, disk: bool, build: Build
) -> Build:
    """What writes the copies, once plugins are known."""
    policies = build.registry.memory_policies
    found = policy if isinstance(policy, MemoryPolicy) else {**BUILT_IN, **policies}.get(policy)
    if found is None:
        names = (*BUILT_IN, *policies)
        raise PlanError(f"cf.offload has no policy {policy!r}{near(str(policy), names, 'policies')}")
    if not isinstance(found, MemoryPolicy):
        found = _constructed(str(policy), found)
    found = attrs.evolve(found, where={**found.where, **where}) if where else found
    move: Move = partial(_copied, found, host, disk)
    return build.evolve(moves=(*build.moves, move))


def _copied(
    policy: MemoryPolicy,
    host: MemoryLimit,
    disk: bool,
    program: Program,
    mesh: Mesh,
    node_s: NodeSeconds,
    budget_bytes: int | None,
    lies: InputTiers,
    /,
    *,
    like: Hint | None = None,
) -> Offloaded:
    room = limit_bytes(host, mesh, "host", "cf.offload(host", "16GiB")
    captured = lies.captured if disk else dict.fromkeys(lies.captured, True)
    return fastest.fastest_offload(program, mesh, node_s, budget_bytes, policy, lies.tiers, room, disk, like, captured)
