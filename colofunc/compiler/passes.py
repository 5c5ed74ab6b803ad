"""Passes: what a program goes through on its way to what runs, by name.

Problem: a program is rewritten a dozen times before it runs, and who looks for the pass that changed something has only
the last one. Idea: each is a `Pass` with a name; whoever runs a list of them may keep the program behind each one
(`PassOutput`), and may leave some out.

    print(low.passes)                    # names, operators behind each, what it changed, how long it took
    print(low.passes.diff("pack"))       # what one of them has changed, line by line
    print(low.after("lower").text())     # the program behind it
    COLOFUNC_PASSES=-pack,-in_place      # left out, to see whether the numbers are right without
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import unified_diff
from functools import partial
from typing import Any

import attrs

from colofunc import env
from colofunc.compiler.transform import Rewrite
from colofunc.errors import PlanError, PluginError, near, plugin_faults
from colofunc.mesh import Mesh
from colofunc.plugins import name_of
from colofunc.program.ir import Program
from colofunc.program.text import text

REWRITES = (
    "kernels", "searches", "early_shards", "reduce_early", "delay_views", "pack", "messages", "in_place", "narrow_updates",
    "squares", "one_call", "order",
)  # fmt: skip
"""Passes of our own that can be left out: a program is right without them, only slower or larger."""
OURS = frozenset((
    *REWRITES, "trace", "simplify", "lift", "as_read", "lower", "alternatives", "cut", "stage_sums", "moves",
))  # fmt: skip
"""All passes of our own."""


@attrs.frozen(eq=False)
class Pass:
    """A rewriting of a program. `optional`: whether it can be left out."""

    name: str
    run: Callable[[Program], Program]
    optional: bool = True


@attrs.frozen(eq=False)
class PassOutput:
    """The program behind a pass, and the seconds that it took."""

    name: str
    program: Program
    took_s: float


PassOutputs = tuple[PassOutput, ...]


def run_passes(
    passes: Iterable[Pass], program: Program, left_out: frozenset[str] = frozenset(), keep: bool = False
) -> tuple[Program, PassOutputs]:
    """The program behind all passes but those that are left out; with `keep` the one behind each, too."""
    stages = []
    for each in passes:
        if each.optional and each.name in left_out:
            continue
        began = time.perf_counter()
        program = each.run(program)
        if keep:
            stages.append(PassOutput(each.name, program, time.perf_counter() - began))
    return program, tuple(stages)


def passes_of_plugins(by_name: Mapping[str, Rewrite], mesh: Mesh) -> list[Pass]:
    """In the order of their names. Raises PluginError for one that is called as a pass of our own."""
    for name in by_name:
        if name in OURS:
            raise PluginError(
                f"colofunc_passes: the pass {name!r} from {name_of(by_name[name])} has the name of a pass of colofunc, "
                f"so that low.after({name!r}) and COLOFUNC_PASSES=-{name} would mean both. Try: {'my_' + name!r}"
            )
    return [Pass(name, partial(_by_plugin, name, by_name[name], mesh)) for name in sorted(by_name)]


def _by_plugin(name: str, rewrite: Rewrite, mesh: Mesh, program: Program) -> Program:
    """Raises PluginError where a plugin's pass fails, or gives no program, or one with other inputs or outputs."""
    what = f"colofunc_passes: the pass {name!r} from {name_of(rewrite)}"
    remedy = f"return program where there is nothing to do; COLOFUNC_PASSES=-{name}, which leaves it out"
    with plugin_faults(what, remedy):
        rewritten: Any = rewrite(program, mesh)
    if not isinstance(rewritten, Program):
        raise PluginError(f"{what} gave {rewritten!r}, which is no program. Try: {remedy}")
    fault = interface_fault(program, rewritten)
    if fault:
        raise PluginError(f"{what} {fault}")
    return rewritten


def left_out(names: Sequence[str]) -> frozenset[str]:
    """The passes that COLOFUNC_PASSES leaves out. names: of those that can be. Raises PlanError for any other."""
    asked = env.passes_left_out()
    for name in asked:
        if name not in names:
            raise PlanError(
                f"COLOFUNC_PASSES leaves out {name!r}, which is no pass that can be left "
                f"out{near(name, names, 'passes')}; low.passes lists what this step goes through"
            )
    return frozenset(asked)


@attrs.frozen(eq=False)
class Passes:
    """The passes of a step in the order in which they ran, each with the program behind it. Prints as a table."""

    stages: PassOutputs

    def __iter__(self) -> Iterator[PassOutput]:
        return iter(self.stages)

    def __len__(self) -> int:
        return len(self.stages)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(stage.name for stage in self.stages)

    def __getitem__(self, name: str) -> PassOutput:
        """Raises PlanError where the step went through no pass of that name."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise PlanError(f"this step went through no pass {name!r}{near(name, self.names, 'passes')}")

    def diff(self, name: str) -> str:
        """What a pass has changed, as a unified diff of the texts of the programs before and behind it.

        "" for nothing.
        """
        at = self.names.index(self[name].name)
        before = text(self.stages[at - 1].program).splitlines() if at else []
        behind = text(self.stages[at].program).splitlines()
        return "\n".join(unified_diff(before, behind, f"before {name}", f"behind {name}", lineterm="", n=1))

    def __str__(self) -> str:
        width = max(len(name) for name in self.names)
        lines = [f"{'pass':{width}}  operators    seconds"]
        before: Program | None = None
        for stage in self.stages:
            same = "  (changes nothing)" if before is not None and _same(before, stage.program) else ""
            lines.append(f"{stage.name:{width}}  {len(stage.program.nodes):9,}  {stage.took_s:9.4f}{same}")
            before = stage.program
        return "\n".join(lines)


def _same(before: Program, behind: Program) -> bool:
    return before is behind or (
        before.nodes == behind.nodes and before.outputs == behind.outputs and before.aliases == behind.aliases
    )


def check_interface(name: str, before: Program, behind: Program) -> None:
    """Raises PlanError where a rewriting of a program changes what goes in or comes out (`interface_fault`)."""
    fault = interface_fault(before, behind)
    if fault:
        raise PlanError(f"{name} {fault}")


def interface_fault(before: Program, behind: Program) -> str:
    """What a rewriting of a program does to its inputs and outputs, which have to stay; "" for nothing."""
    for what, old, new in (("inputs", before.inputs, behind.inputs), ("outputs", before.outputs, behind.outputs)):
        if _kinds(before, old) != _kinds(behind, new):
            return (
                f"gives the program other {what}: {len(new)} where there were {len(old)}, or of other shapes, dtypes "
                "and layouts; keep them, and put what is to be new into the state with the hook grow"
            )
    if before.inputs != behind.inputs:
        return "renames inputs of the program; keep their value ids, in their order"
    # A value is known by its maker too: who writes all nodes anew may use ids again.
    kept = [id for id in before.outputs if id in behind.outputs and before.makers.get(id) is behind.makers.get(id)]
    for place, (old_id, new_id) in enumerate(zip(before.outputs, behind.outputs, strict=True)):
        if old_id != new_id and old_id in kept and new_id in kept:
            earlier = before.outputs.index(new_id)
            return f"gives as output {place} of the program what was output {earlier}; keep each in its place"
    more = set(behind.aliases) - set(before.aliases)
    if more:
        out, into = min(more)
        return f"writes output {out} in place of input {into}, which the step keeps; leave aliases as they are"
    return ""


def _kinds(program: Program, ids: Sequence[int]) -> list[tuple[object, ...]]:
    values = [program.values.get(id) for id in ids]
    return [() if value is None else (value.shape, value.dtype, value.layout) for value in values]
