"""Policies for `checkpoint`: what is kept for backward, said by name. What goes from stage to stage always is.

    cf.checkpoint(step, policy="dots")                     # results of products, convolutions, attention
    cf.checkpoint(step, policy=cf.save_only("*.attn"))     # what these modules return
    cf.checkpoint(step, policy=cf.every(2))                # only the input of every second stage
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import attrs

from colofunc.errors import PlanError, near
from colofunc.planner.plan import matches
from colofunc.planner.recompute.stages import Keeps
from colofunc.program.facts import is_product
from colofunc.program.ir import Node, Program


@attrs.frozen
class RecomputePolicy:
    """What is kept for backward whatever the budget is. `keeps(node, readers)`: of what a node makes, given who reads
    it in forward. `every`: so many stages are made again as one. `globs`: modules that have to be there."""

    name: str
    keeps: Keeps = attrs.field(repr=False)
    every: int = 1
    globs: tuple[str, ...] = ()


def save_only(*globs: str) -> RecomputePolicy:
    """A policy for `checkpoint`: only what modules whose paths match return is kept for backward."""
    if not globs or not all(isinstance(g, str) for g in globs):
        raise PlanError(f"cf.save_only wants globs over module paths, not {globs!r}; write cf.save_only('*.attn')")
    return RecomputePolicy(f"save_only({', '.join(globs)})", partial(_returned, globs), globs=globs)


def check_modules(policy: RecomputePolicy, program: Program) -> None:
    """Raises PlanError where a glob of the policy names no module of the step."""
    paths = set(_paths(program))
    for glob in policy.globs:
        if not any(_inside(path, (glob,)) for path in paths):
            modules = {path.rsplit(".", k)[0] for path in paths for k in range(path.count(".") + 1)}
            anywhere = {f"*.{module.rpartition('.')[2]}" for module in modules if "." in module and "*" in glob}
            raise PlanError(
                f"cf.save_only: no operator stands in a module {glob!r}{near(glob, modules | anywhere, 'modules')}"
            )


def _paths(program: Program) -> Iterator[str]:
    for node in program.nodes:
        if node.path:
            yield node.path
        if node.loop is not None:
            yield from _paths(node.loop.body)


def _returned(globs: tuple[str, ...], node: Node, readers: Sequence[Node]) -> bool:
    """Whether a value is made within one of the modules and read outside of it."""
    return _inside(node.path, globs) and any(not _inside(reader.path, globs) for reader in readers)


def _inside(path: str, globs: tuple[str, ...]) -> bool:
    return any(matches(path, g) or matches(path, f"{g}.*") for g in globs)


def every(n: int) -> RecomputePolicy:
    """A policy for `checkpoint`: of each n stages only the input is kept; n of them are made again at once."""
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise PlanError(f"cf.every wants a number of stages, not {n!r}; write cf.every(2)")
    return RecomputePolicy(f"every({n})", lambda node, readers: False, n)


NAMED = {
    "everything": RecomputePolicy("everything", lambda node, readers: True),
    "nothing": RecomputePolicy("nothing", lambda node, readers: False),
    "dots": RecomputePolicy("dots", lambda node, readers: is_product(node.target)),
}
