"""checkpoint: what forward makes for backward is kept, or made again, so that the peak stays within a budget.

    step = cf.checkpoint(cf.shard(step_fn, mesh, zero(3, "dp")), budget="10GiB")   # the fastest that fits
    step = cf.checkpoint(step_fn, policy="dots")                                   # a policy, as in JAX
    step = cf.checkpoint(step_fn, policy=cf.save_only("*.attn"))                   # what these modules return is kept
    step = cf.checkpoint(step_fn, policy=cf.every(2))                              # two stages at a time are made again

Problem: memory for activations is chosen layer by layer by hand, and what it saves is found out by trying. Idea: the
step is one program, so what is kept is a question of order alone (`program/passes/recompute.py`); forward is a chain of
stages (`planner/recompute/stages.py`), and the best order for any amount of memory is known
(`planner/recompute/chain.py`). Collectives are priced like operators: to gather a parameter anew is to make it again.
Random operators make the same numbers.

The step keeps its numbers to the bit where its operators do. Hints of `torch.utils.checkpoint` in the model are not
needed and not followed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from colofunc.compiler.step_compiler import stage
from colofunc.compiler.transform import Build, Transform
from colofunc.errors import PlanError, near
from colofunc.mesh.sizes import parse_room
from colofunc.planner.candidate import FinishedProgram, Finishing
from colofunc.planner.recompute.fastest import by_policy, fit_recomputed
from colofunc.planner.recompute.policies import NAMED, RecomputePolicy, check_modules
from colofunc.program.cost import NodeSeconds
from colofunc.program.ir import Program


def checkpoint(
    step_fn: Callable[..., Any] | None = None,
    *,
    budget: str | int | float | None = None,
    policy: str | RecomputePolicy = "auto",
) -> Any:
    """The step within `budget` bytes a rank, at every moment: the fastest way found.

    budget: "10GiB", a number of bytes, a part of the device's memory (0.5 or "0.5"), or "auto", as without one: all
    that the mesh's topology has, of a CUDA card what context, libraries, communicators and fragments leave of it.
    policy: "auto" chooses by cost, per value; "everything" keeps all, "nothing" only what goes from stage to stage,
    "dots" the results of products, convolutions and attention; `cf.save_only(globs)` what these modules return,
    `cf.every(n)` every n-th stage. Raises PlanError with the least peak found where nothing fits.
    """
    chosen = _policy(policy)
    limit = parse_room("auto" if budget is None else budget, "cf.checkpoint(budget=)")
    transform = Transform(
        "checkpoint",
        {"budget": limit, "policy": chosen},
        constrain=partial(_check, chosen),
        candidates=partial(_search_too, chosen),
        budget=limit,
        wider="" if chosen is None else "policy='auto' in cf.checkpoint",
    )
    return stage(step_fn, transform)


OTHER_WORDS = {"full": "nothing", "selective": "dots", "none": "everything"}
"""What Megatron and torchtitan call recomputation -> the policy that does the same."""


def _policy(policy: str | RecomputePolicy) -> RecomputePolicy | None:
    """None: by cost."""
    if isinstance(policy, RecomputePolicy):
        return policy
    names = ("auto", *NAMED)
    if not isinstance(policy, str):
        raise PlanError(
            f"cf.checkpoint(policy={policy!r}): a policy is one name ({', '.join(map(repr, names))}), or made by "
            "cf.save_only or cf.every; several modules go into one: cf.save_only('*.attn', '*.mlp')"
        )
    if policy in OTHER_WORDS:
        raise PlanError(
            f"cf.checkpoint has no policy {policy!r}: policies say, as JAX's, which activations are saved. "
            f"Megatron's and torchtitan's {policy!r} is policy={OTHER_WORDS[policy]!r}"
        )
    if policy not in names:
        raise PlanError(
            f"cf.checkpoint has no policy {policy!r}{near(str(policy), names, 'policies')}; or cf.save_only(...), "
            "cf.every(n)"
        )
    return NAMED.get(policy)


def _check(policy: RecomputePolicy | None, build: Build) -> Build:
    """What is kept constrains no layout, but modules that a policy names have to be there."""
    if policy is not None:
        check_modules(policy, build.program)
    return build


def _search_too(policy: RecomputePolicy | None, build: Build) -> Build:
    return build.evolve(searches=(*build.searches, partial(_search, policy)))


def _search(
    policy: RecomputePolicy | None, program: Program, node_s: NodeSeconds, finish: Finishing, budget_bytes: int | None
) -> tuple[FinishedProgram | None, FinishedProgram]:
    if policy is None:
        return fit_recomputed(program, node_s, finish, budget_bytes, finish.below_s)
    done = by_policy(program, node_s, policy, finish)
    return (done if budget_bytes is None or done.fits(budget_bytes) else None), done
