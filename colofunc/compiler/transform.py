"""Transforms and builds: what anybody can do to a step on its way to a program that runs.

Problem: a transform has something to say at several moments: around the function, in the state, in the traced program,
of what the planner may decide, and of what one rank runs. Idea: one frozen record, the `Build`, says what is known of a
step so far. A `Transform` is a name, options, and some of six hooks; each takes a build and gives one back. Built-in
transforms and those of others use the same.

    def halved(step_fn=None):
        return cf.ext.stage(step_fn, cf.ext.Transform("halved", rewrite_local=halve))

    def halve(build: cf.ext.Build) -> cf.ext.Build:
        return build.evolve(program=shorter(build.program, build.mesh))

Several transforms of a chain may use the same hook. They do so in an order that does not depend on the chain, so that
`a(b(f))` and `b(a(f))` are the same step: by name, but for what `behind` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any, Protocol

import attrs

from colofunc.errors import PlanError, near
from colofunc.mesh import Mesh
from colofunc.mesh.sizes import MemoryLimit
from colofunc.planner.candidate import FinishedProgram, Finishing
from colofunc.planner.offload.choice import Hint
from colofunc.planner.offload.fastest import Offloaded
from colofunc.planner.sharding.constraints import NONE, Constraints
from colofunc.planner.stages.report import CutsOf
from colofunc.plugins.registry import Registry, bringing
from colofunc.program.cost import NodeSeconds
from colofunc.program.ir import Program
from colofunc.program.tracing.trace import Traced

Rewrite = Callable[[Program, Mesh], Program]


BUILT_IN = frozenset(
    "accumulate checkpoint expert_capacity fp8 local_stats offload pipeline precision quantize shard".split()
)
"""Names of the transforms that are functions of this package."""


class UnknownFieldError(PlanError):
    """A field that a hook wants to change, and that no build has."""


def _none() -> Sequence[Variant]:
    return ()


@attrs.frozen(eq=False)
class Variant:
    """One way to write a transform that leaves something open: a record with everything said.

    `words`: what it says, such as "8 microbatches, cut by time"; no two of a step are alike.
    `at_least_s`: gives seconds that a step takes at least in this way.
    `about`: a group and seconds by an estimate. Of the ways of one group, those that are clearly behind one that fits
    without help are not planned. None: there is no estimate.
    `leaner`: gives further ways, which are tried only where this one fits a budget with help alone (values made again,
    copies), or not at all.
    """

    transform: Transform
    words: str
    at_least_s: Callable[[], float]
    about: tuple[str, float] | None = None
    leaner: Callable[[], Sequence[Variant]] = _none


@attrs.frozen(eq=False)
class OpenChoices:
    """Choices of a transform on which the state and the trace depend, such as the scheme of each weight.

    `closed`: a choice, which can be a key and be sent to other ranks -> the transform with it.
    `search`: given what finishes the chain with a choice (a `Lowered`, or in a line why it fits no budget), the choice
    that is taken; it runs on rank 0.
    `sketched`: a choice -> the transform with it that the search finishes the chain with, which is counted and never
    runs, so it needs no values; None: `closed`.
    `recalled`: what was taken before, as `Transform.taken` says it -> the choice, without a search; PlanError where it
    may not be chosen here. None: there is always a search.
    """

    closed: Callable[[Any], Transform]
    search: Callable[[Callable[[Any], Any]], Any]
    sketched: Callable[[Any], Transform] | None = None
    recalled: Callable[[Mapping[str, str]], Any] | None = None


class Search(Protocol):
    """Looks for an order of one rank's program that fits: what is made again, and when.

    `finish` completes an order and counts its peak, and says from how many seconds more on one is of no use. Returns
    (what fits or None, the leanest that was tried).
    """

    def __call__(
        self, program: Program, node_s: NodeSeconds, finish: Finishing, budget_bytes: int | None, /
    ) -> tuple[FinishedProgram | None, FinishedProgram]: ...


@attrs.frozen
class InputTiers:
    """Where inputs lie before a step.

    `tiers`: position -> tier, of those that lie somewhere already or are wished to.
    `captured`: position of what the step captured -> whether somebody has it in memory as it is.
    """

    tiers: Mapping[int, str]
    captured: Mapping[int, bool]


class Move(Protocol):
    """Writes copies between tiers into a finished program of one rank. like: what to take over, for an estimate."""

    def __call__(
        self,
        program: Program,
        mesh: Mesh,
        node_s: NodeSeconds,
        budget_bytes: int | None,
        lies: InputTiers,
        /,
        *,
        like: Hint | None = None,
    ) -> Offloaded: ...


@attrs.frozen(eq=False)
class Build:
    """What is known of one step so far. A hook returns it with what it has changed: `build.evolve(program=...)`.

    `transforms`: all of the chain, in the order of the hooks.
    `mesh`: with the figures that a plan counts by, from the trace on.
    `fn`: the step function (changed by `wrap`).
    `state`: argument 0 of a call (`grow`). `others`: the arguments behind it (`grow`).
    `program`: the global one (`rewrite_global`), or in `rewrite_local` one rank's.
    `traced`: names and trees of arguments and results.
    `registry`: what plugins bring.
    `budget_bytes`: the device memory that a plan keeps to; None: no limit, or before anything is planned.
    `constraints`: what the planner may not decide otherwise (`constrain`).
    `alternatives`, `searches`, `moves`: ways to finish a program (`candidates`). Each transform adds to them: several
    ways to write one rank's program, the fastest first; a search for an order that fits; what writes copies between
    tiers. What they give is finished and counted, and the fastest that fits is taken.
    `way`: the words of the variant that a followed plan took; "": it took none, or no plan is followed.
    `cuts_of`: of a pipeline, what the plan says of its cuts, by the table of actions that runs (`candidates`). One
    transform of a chain may set it, and two are an error.
    """

    transforms: tuple[Transform, ...]
    mesh: Mesh
    # What is not known yet is None: no hook runs so early that asks for it.
    fn: Callable[..., Any] = None  # type: ignore[assignment]
    state: Any = None
    others: tuple[Any, ...] = ()
    program: Program = None  # type: ignore[assignment]
    traced: Traced = None  # type: ignore[assignment]
    registry: Registry = None  # type: ignore[assignment]
    budget_bytes: int | None = None
    constraints: Constraints = NONE
    alternatives: tuple[Sequence[Rewrite], ...] = ()
    searches: tuple[Search, ...] = ()
    moves: tuple[Move, ...] = ()
    way: str = ""
    cuts_of: CutsOf | None = None

    def evolve(self, **changes: Any) -> Build:
        """The same build, but for `changes`. Raises PlanError for a field that no build has."""
        fields = attrs.fields_dict(Build)
        for name in changes:
            if name not in fields:
                raise UnknownFieldError(f"{name!r} is no field of a build{near(name, fields, 'fields')}")
        return attrs.evolve(self, **changes)

    @property
    def hooks(self) -> tuple[Hook, ...]:
        """The functions of all hooks."""
        functions = list[Hook]()
        for transform in self.transforms:
            for name in HOOKS:
                function: Hook | None = getattr(transform, name)
                if function is not None:
                    functions.append(function)
        return tuple(functions)

    @property
    def microbatches(self) -> int:
        """In how many parts a batch is computed."""
        return max((transform.microbatches for transform in self.transforms), default=1)


Hook = Callable[[Build], Build]
Variants = Callable[[Build], Sequence[Variant]]


@attrs.frozen(eq=False)
class Sharding:
    """How a step is asked to lie on a mesh, as the user said it.

    `plans`: what pins names to specs, in the order in which they are asked.
    `in_specs`, `out_specs`: trees of specs for arguments and results.
    `donate`: "auto", or positions: which arguments are consumed.
    `auto`: whether axes that no plan names are searched.
    `plugins`: modules asked beside the installed ones.
    `agree_every`: after this many steps ranks compare their copies; 0: never.
    """

    mesh: Mesh
    plans: tuple[Any, ...] = ()
    in_specs: Any = None
    out_specs: Any = None
    donate: str | tuple[int, ...] = "auto"
    auto: bool = True
    plugins: tuple[Any, ...] = ()
    agree_every: int = 0

    @property
    def all_plugins(self) -> tuple[Any, ...]:
        """The plugins beside the installed ones: those that were given, and plans that are plugins themselves."""
        return (*self.plugins, *bringing(self.plans))


@attrs.frozen(eq=False)
class Transform:
    """One step of a chain. `options`: its own arguments; their texts are part of what a cached plan is found by.

    The hooks, in the order in which they run:

    `wrap`: puts something around `build.fn` before it is traced, and before the single-device reference runs it.
    `grow`: argument 0 with what the transform keeps in it, at every call; a state that has it already comes back as is.
    The other arguments (`build.others`) may be changed as well, but for how many they are.
    `rewrite_global`: changes the traced program before anything is placed; inputs and outputs stay what they are.
    `constrain`: adds what the planner may not decide otherwise.
    `candidates`: adds ways to finish a program.
    `rewrite_local`: changes the program of one rank, behind the passes of plugins.

    Its place in a chain:

    `behind`: names of transforms whose hooks run before this one's.
    `clashes`: other transform -> why the two cannot stand in one chain, and what to do instead.

    What it asks for:

    `budget`: the device memory that it keeps to, in bytes or as a part; (None, None): all there is; None: no limit.
    `microbatches`: in how many parts it computes the batch.
    `sharding`: how it asks the step to lie on a mesh; one of a chain may.
    `disk`: the directory for what is kept on disk (True: a temporary one); one of a chain may.
    `measure`: this many first steps are timed, and then what moves when is planned again.
    `wider`: what to write instead where its policy forbids what would need less memory.

    What it leaves open; of each kind one transform of a chain may, and two are an error:

    `variants`: of a traced step, the ways to write this transform; () where nothing is open. Each is planned as if it
    had been written so, and the fastest that fits is taken; of a plan that is followed (`Build.way`) the one with its
    words, which variants have to include whatever the budget is now. `open`: of a call's arguments, choices on which
    the state and the trace depend. The chain is finished with several before anything else is done, and one is taken
    (`settling`). A transform that has it has no hooks; what is taken has. `decided`: what was taken there. `taken`: the
    same as plans keep it, pairs such as (weight, scheme).

    What it says of a plan:

    `notes`: lines for the plan.
    `says`: gives further lines, of the global program and of the one that a rank runs.
    `changes_numbers`: whether what `rewrite_global` makes of the program has other numbers than it, so that one device
    runs it too (`Staged.reference`).
    """

    name: str
    options: Mapping[str, Any] = attrs.field(factory=dict)
    wrap: Hook | None = attrs.field(default=None, kw_only=True)
    grow: Hook | None = attrs.field(default=None, kw_only=True)
    rewrite_global: Hook | None = attrs.field(default=None, kw_only=True)
    constrain: Hook | None = attrs.field(default=None, kw_only=True)
    candidates: Hook | None = attrs.field(default=None, kw_only=True)
    rewrite_local: Hook | None = attrs.field(default=None, kw_only=True)
    behind: tuple[str, ...] = attrs.field(default=(), kw_only=True)
    clashes: Mapping[str, str] = attrs.field(factory=dict, kw_only=True)
    budget: MemoryLimit | None = attrs.field(default=None, kw_only=True)
    microbatches: int = attrs.field(default=1, kw_only=True)
    sharding: Sharding | None = attrs.field(default=None, kw_only=True)
    disk: str | bool | None = attrs.field(default=None, kw_only=True)
    measure: int = attrs.field(default=0, kw_only=True)
    wider: str = attrs.field(default="", kw_only=True)
    variants: Variants | None = attrs.field(default=None, kw_only=True)
    open: Callable[[tuple[Any, ...]], OpenChoices] | None = attrs.field(default=None, kw_only=True)
    decided: Any = attrs.field(default=None, kw_only=True)
    taken: tuple[tuple[str, str], ...] = attrs.field(default=(), kw_only=True)
    notes: tuple[str, ...] = attrs.field(default=(), kw_only=True)
    says: Callable[[Program, Program], Sequence[str]] | None = attrs.field(default=None, kw_only=True)
    changes_numbers: bool = attrs.field(default=False, kw_only=True)

    @property
    def auto_budget(self) -> bool:
        """Whether it keeps to all the memory that there is."""
        return self.budget == (None, None)


def behind_hook(before: Hook | None, hook: Hook) -> Hook:
    """A hook of a transform behind the one that it has."""

    def both(build: Build) -> Build:
        return hook(build if before is None else before(build))

    return both


HOOKS = ("wrap", "grow", "rewrite_global", "constrain", "candidates", "rewrite_local")


def in_order(chain: Iterable[Transform]) -> tuple[Transform, ...]:
    """The transforms in the order of their hooks: by name, but for what they say they are behind.

    Raises PlanError for a circle.
    """
    by_name = {transform.name: transform for transform in chain}
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for name in sorted(by_name):
        predecessors = [other for other in by_name[name].behind if other in by_name]
        sorter.add(name, *predecessors)
    try:
        sorter.prepare()
    except CycleError as error:
        circle = " behind ".join(reversed(error.args[1]))
        raise PlanError(
            f"transforms that say they are behind one another: {circle}; drop one of them, or its `behind`"
        ) from error

    # Of those that nothing has to precede any more, the first by name is next.
    ready = list[str]()
    ordered = list[Transform]()
    while sorter.is_active():
        ready = sorted((*ready, *sorter.get_ready()))
        name = ready.pop(0)
        ordered.append(by_name[name])
        sorter.done(name)
    return tuple(ordered)
