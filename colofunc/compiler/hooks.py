"""Hooks of transforms: they are called here, and what they give is looked at here.

Problem: a hook is anybody's function. What it gives by mistake (None, a field that another hook changes, an alternative
that returns nothing) fails far from it, in code that its author has never seen, or not at all. Idea: each hook changes
fields of the build that are its own (`CHANGES`), of known types, and functions that it adds are called by ones that
look at their results; an error names the transform and the hook.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from colofunc.compiler.passes import interface_fault
from colofunc.compiler.transform import Build, Hook, InputTiers, Move, Rewrite, Search, Transform, UnknownFieldError
from colofunc.errors import PlanError, PluginError
from colofunc.mesh import Mesh
from colofunc.planner.candidate import FinishedProgram, Finishing
from colofunc.planner.offload.choice import Hint
from colofunc.planner.offload.fastest import Offloaded
from colofunc.planner.sharding.constraints import Constraints
from colofunc.program.cost import NodeSeconds
from colofunc.program.ir import Program

CHANGES: Mapping[str, tuple[str, ...]] = {
    "wrap": ("fn",),
    "grow": ("state", "others"),
    "rewrite_global": ("program",),
    "constrain": ("constraints",),
    "candidates": ("alternatives", "searches", "moves", "cuts_of"),
    "rewrite_local": ("program",),
}
"""Hook -> the fields of a build that it may change."""


def through(hook: str, build: Build) -> Build:
    """The build behind one hook of all transforms.

    Raises PlanError where two of them say what a pipeline's cuts are.
    """
    cut_by = ""
    for transform in build.transforms:
        changed = applied(transform, hook, build)
        if changed.cuts_of is not build.cuts_of:
            if cut_by:
                raise PlanError(
                    f"{cut_by} and {transform.name} both say what a pipeline's cuts are (cuts_of in their hooks "
                    f"{hook}), and one of a chain may. Try: a chain without one of them"
                )
            cut_by = transform.name
        build = changed
    return build


def applied(transform: Transform, hook: str, build: Build) -> Build:
    """The build behind one hook of a transform.

    Raises PlanError where the hook gives something else, or changes what is not its own.
    """
    function: Hook | None = getattr(transform, hook)
    if function is None:
        return build
    who = f"transform {transform.name!r}: its hook {hook}"
    try:
        changed = function(build)
    except UnknownFieldError as error:
        raise PlanError(f"{who} changes what no build has: {error}") from error
    if not isinstance(changed, Build):
        raise PlanError(
            f"{who} gave {type(changed).__name__}, not a build; return build.evolve(...) with what it changes"
        )
    _check_fields(who, hook, build, changed)
    _check_values(who, hook, build, changed)
    return _looked_at(who, build, changed) if hook == "candidates" else changed


def _check_fields(who: str, hook: str, before: Build, behind: Build) -> None:
    for field in attrs.fields_dict(Build):
        if getattr(behind, field) is getattr(before, field) or field in CHANGES[hook]:
            continue
        others = [other for other, fields in CHANGES.items() if field in fields]
        instead = (
            f"the hook {' or '.join(others)} for that" if others else f"leave {field} as it is, as every hook has to"
        )
        raise PlanError(f"{who} changed {field}, and may change {', '.join(CHANGES[hook])} only. Try: {instead}")


def _check_values(who: str, hook: str, before: Build, behind: Build) -> None:
    """Raises PlanError where a field that the hook may change has a value of a wrong type."""
    if hook == "wrap" and not callable(behind.fn):
        raise PlanError(_wrong(who, "fn", behind.fn, "a function that takes the arguments of build.fn"))
    if hook == "grow" and behind.state is None and before.state is not None:
        raise PlanError(_wrong(who, "state", None, "build.state with what the transform keeps in it"))
    if hook == "grow" and not (isinstance(behind.others, tuple) and len(behind.others) == len(before.others)):
        raise PlanError(_wrong(who, "others", behind.others, "a tuple of as many arguments as build.others has"))
    if hook in ("rewrite_global", "rewrite_local") and not isinstance(behind.program, Program):
        raise PlanError(_wrong(who, "program", behind.program, "the program that an Editor's done() gives"))
    if hook == "constrain" and not isinstance(behind.constraints, Constraints):
        raise PlanError(_wrong(who, "constraints", behind.constraints, "build.constraints | cf.ext.Constraints(...)"))
    if hook == "candidates":
        _check_candidates(who, behind)


def _check_candidates(who: str, build: Build) -> None:
    for field in ("alternatives", "searches", "moves"):
        value: Any = getattr(build, field)
        if not isinstance(value, tuple):
            raise PlanError(_wrong(who, field, value, f"a tuple, (*build.{field}, ...)"))
    for rewrites in build.alternatives:
        if not isinstance(rewrites, Sequence) or not rewrites or not all(map(callable, rewrites)):
            wanted = "each of them as functions (program, mesh) -> program, at least one"
            raise PlanError(_wrong(who, "alternatives", rewrites, wanted))
    for field in ("searches", "moves"):
        for function in getattr(build, field):
            if not callable(function):
                raise PlanError(_wrong(who, field, function, f"functions, as cf.ext.Build says of {field}"))
    if build.cuts_of is not None and not callable(build.cuts_of):
        raise PlanError(_wrong(who, "cuts_of", build.cuts_of, "a function of a table of actions, or None"))


def _wrong(who: str, field: str, value: Any, wanted: str) -> str:
    return f"{who} gave {value!r} as {field}. Try: {wanted}"


# ---- functions that the hook `candidates` adds ----


def _looked_at(who: str, before: Build, behind: Build) -> Build:
    """What was added, each called by a function that looks at its result."""

    def added(field: str, look: Callable[[str, Any], Any]) -> tuple[Any, ...]:
        there = set(map(id, getattr(before, field)))
        return tuple(each if id(each) in there else look(who, each) for each in getattr(behind, field))

    return behind.evolve(
        alternatives=added("alternatives", _alternatives),
        searches=added("searches", _search),
        moves=added("moves", _move),
    )


def _alternatives(who: str, rewrites: Sequence[Rewrite]) -> Sequence[Rewrite]:
    return tuple(_alternative(who, rewrite) for rewrite in rewrites)


def _alternative(who: str, rewrite: Rewrite) -> Rewrite:
    def checked(program: Program, mesh: Mesh) -> Program:
        written = rewrite(program, mesh)
        if not isinstance(written, Program):
            raise PluginError(
                f"{who} added an alternative that gave {written!r}. Try: return the program it has written"
            )
        fault = interface_fault(program, written)
        if fault:
            raise PluginError(f"{who} added an alternative that {fault}")
        return written

    return checked


def _search(who: str, search: Search) -> Search:
    def checked(
        program: Program, node_s: NodeSeconds, finish: Finishing, budget_bytes: int | None, /
    ) -> tuple[FinishedProgram | None, FinishedProgram]:
        found = search(program, node_s, finish, budget_bytes)
        if isinstance(found, tuple) and len(found) == 2:
            fits, leanest = found
            if (fits is None or isinstance(fits, FinishedProgram)) and isinstance(leanest, FinishedProgram):
                return found
        raise PluginError(
            f"{who} added a search that gave {found!r}. Try: return (what fits or None, the leanest), both as finish(...) "
            "gives them"
        )

    return checked


def _move(who: str, move: Move) -> Move:
    def checked(
        program: Program,
        mesh: Mesh,
        node_s: NodeSeconds,
        budget_bytes: int | None,
        lies: InputTiers,
        /,
        *,
        like: Hint | None = None,
    ) -> Offloaded:
        moved = move(program, mesh, node_s, budget_bytes, lies, like=like)
        if not isinstance(moved, Offloaded):
            raise PluginError(f"{who} added a move that gave {moved!r}. Try: return cf.ext.Offloaded(program, ...)")
        return moved

    return checked
