"""Plans on disk: the second start of a script does not search again.

Problem: planning takes seconds, and a script is started many times. Idea: a plan is kept under a hash of everything
that decides it (program, mesh with topology, constraints, budget, plugins, colofunc's own sources) and is found again
by it. Rebuilding picks, per operator, the strategy that the plan names among the candidates, so nothing is searched;
the lowered program's hash is kept beside the plan and must come out again, else it is planned anew.

    COLOFUNC_CACHE=/scratch/plans python train.py       # another folder; "off" keeps nothing. Default: ~/.cache/colofunc

Files are JSON with a checksum, written whole or not at all (`colofunc/cache.py`); one that is damaged is dropped with a
line. Rank 0 alone reads and writes.
"""

from __future__ import annotations

import hashlib
import inspect
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from math import prod
from pathlib import Path
from typing import Any

import attrs
import torch

from colofunc import env, untrusted
from colofunc.cache import Cache
from colofunc.compiler.decisions import Candidates, Decisions
from colofunc.compiler.lowered import Lowered
from colofunc.errors import ColofuncError, PlanError
from colofunc.executors.rank_program import program_hash
from colofunc.mesh import Mesh
from colofunc.planner.plan import Decision, Plan
from colofunc.planner.sharding.constraints import Constraints
from colofunc.planner.sharding.explain import node_keys, strategies_in
from colofunc.planner.sharding.flows import copies_of
from colofunc.plugins import Registry
from colofunc.plugins.operators import OPERATORS
from colofunc.program.ir import Program
from colofunc.program.lower import Choice, call_in
from colofunc.spec.layout import Layout
from colofunc.spec.rule import Strategy
from colofunc.spec.spec import bind, names_of

# ---- plans of steps that are prepared again ----
#
# Problem: a longer batch, or state that is placed now and was plain before, is another signature, which is traced and
# was planned from the start, for seconds. Idea: a plan says of each operator how it works, and that can be said of
# another length, too.
#
#     is_again      the very program that was planned before, and everything lies as it was planned: nothing is planned
#     nearest       the step of a like size: what its plan decides is where the search for this one begins
#                   (`budget.plan_from_known`)
#
# What it decides need not be best here (weights that are gathered for each use cost as much for a long batch as for a
# short one), so it is compared with what a search from there finds. State that is placed stays: where it lies is a
# constraint of every search. A plan that was found for a batch of another order of size is no guide: what was too small
# to split may be worth it now. What was found from another length goes into no file: another start of the script may
# come to this length first.


LIKE = 2.0
"""Batches whose numbers of elements differ by at most this factor are of a like size."""


def is_again(low: Lowered, program: Program, donated: tuple[int, ...], given: Mapping[int, Layout]) -> bool:
    """Whether `low` is the plan of this very program, for arguments that lie as they do now.

    `given`: input -> where it lies.
    """
    planned = low.global_program
    if low.donated != donated or len(program.nodes) != len(planned.nodes):
        return False
    lies = dict(zip(planned.inputs, low.input_layouts, strict=False))
    if any(lies.get(id) is not layout for id, layout in given.items()):
        return False
    return _described(program, low.mesh) == _described(planned, low.mesh) and _same_constants(program, planned)


def _described(program: Program, mesh: Mesh) -> tuple[object, ...]:
    """All that decides a plan, of a global program."""
    inputs = [(program.values[id].name, program.values[id].role) for id in program.inputs]
    nodes = [(node.path, node.phase) for node in program.nodes]
    # Which outputs share memory with which inputs follows from the plan.
    return program_hash(attrs.evolve(program, aliases=()), mesh), inputs, nodes


def _same_constants(one: Program, other: Program) -> bool:
    """Whether numbers that the programs carry are equal; the hash does not look at those of large ones."""
    for id, tensor in one.constants.items():
        there = other.constants.get(id)
        if there is None or there.dtype != tensor.dtype or not torch.equal(there, tensor):
            return False
    return True


def nearest(before: Sequence[Lowered], program: Program) -> Lowered | None:
    """The step whose batch is nearest in size to the program's, if it is of a like size."""
    best, least = None, LIKE
    for low in before:
        ratio = _ratio(low.global_program, program)
        if ratio < least or (best is None and ratio == least):
            best, least = low, ratio
    return best


def _ratio(one: Program, other: Program) -> float:
    """How many times more elements the larger batch of two programs has."""
    sizes = sorted((_batch_elements(one), _batch_elements(other)))
    return sizes[1] / sizes[0]


def _batch_elements(program: Program) -> int:
    values = (program.values[id] for id in program.inputs)
    return max(1, sum(prod(value.shape) for value in values if value.role == "batch"))


KEEP_ABOVE_S = 0.5
"""Plans that were found faster are not worth a file."""

PlannedProgram = tuple[Decisions, Program]


def remembered(
    key: str,
    search: Callable[[], PlannedProgram],
    rebuild: Callable[[Plan], PlannedProgram],
    say: Callable[[str], None],
) -> PlannedProgram:
    """What `search()` gives, from the plan kept under `key` where there is one."""
    folder = env.plan_folder()
    if folder is None:
        return search()
    cache = Cache(folder)
    try:
        made = _from_cache(cache, key, rebuild)
    except Exception as error:  # whatever a kept file leads to, the search decides
        cache.drop(key)
        say(f"the kept plan {cache.path(key)} is dropped, planning anew: {_first_line(error)}")
        made = None
    if made is not None:
        return made
    began = time.perf_counter()
    decided, local = search()
    if time.perf_counter() - began > KEEP_ABOVE_S:
        try:
            cache.write(key, {"lowered": local_hash(local), "plan": decided.plan.to_dict()})
        except (OSError, untrusted.Wrong) as error:
            say(f"the plan could not be kept in {folder}: {error}")
    return decided, local


def _from_cache(cache: Cache, key: str, rebuild: Callable[[Plan], PlannedProgram]) -> PlannedProgram | None:
    """The plan kept under a key, made again; None where there is none. Raises what is wrong with it."""
    entry = cache.read(key)
    if entry is None:
        return None
    kept = untrusted.build(_Entry, entry, "entry")
    decided, local = rebuild(Plan.from_dict(kept.plan, str(cache.path(key))))
    if local_hash(local) != kept.lowered:
        raise PlanError("it no longer gives the program that it gave")
    return decided, local


@attrs.frozen
class _Entry:
    """A kept plan, and the hash of the program that it gave."""

    lowered: str
    plan: Any


def _first_line(error: Exception) -> str:
    words = str(error).splitlines() or [""]
    return words[0] if isinstance(error, (ColofuncError, untrusted.Wrong)) else f"{type(error).__name__}: {words[0]}"


def local_hash(local: Program) -> str:
    """Of a lowered program on its own mesh."""
    return program_hash(local, Mesh())


def key_of(
    program: Program,
    mesh: Mesh,
    registry: Registry,
    constraints: Constraints,
    hooks: Iterable[Callable[..., Any]],
    *more: Any,
) -> str:
    """A hash of all that decides a plan.

    `hooks`: of transforms, by the text of their modules. `more`: budget, axes, named plans, what the chain of
    transforms asks for.
    """
    digest = hashlib.sha256(program_hash(program, mesh).encode())
    for node in program.nodes:
        digest.update(repr((node.path, node.phase)).encode())
    for id in program.inputs:
        digest.update(repr((program.values[id].name, program.values[id].role)).encode())
    for item in sorted(constraints.items):
        said_of_item = [(constraint.says, constraint.key) for constraint in constraints.items[item]]
        digest.update(repr((item, said_of_item)).encode())
    for said in (constraints.regather, constraints.chunks, constraints.scatter, constraints.at):
        digest.update(repr(sorted(said.items())).encode())
    for position in sorted(constraints.outputs):
        digest.update(repr((position, constraints.outputs[position].text())).encode())
    digest.update(repr((more, registry.plugins, torch.__version__)).encode())
    digest.update(_sources(registry, program, hooks).encode())
    return digest.hexdigest()[:40]


def _sources(registry: Registry, program: Program, hooks: Iterable[Callable[..., Any]]) -> str:
    """The text of colofunc, and of every module that gave something that may decide.

    That is a rule, a strategy, a pass, an operator of the program, or a hook.
    """
    functions: list[Any] = [*registry.rules.values(), *registry.passes.values()]
    for of_target in registry.strategies.values():
        functions += of_target
    for target in sorted({node.target for node in program.nodes}):
        if target in OPERATORS:
            functions.append(OPERATORS[target].reference)
    functions += map(_function, hooks)
    files = {function.__code__.co_filename for function in functions if inspect.isfunction(function)}
    return own_sources() + "".join(_of_file(name) for name in sorted(files))


def _function(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The function behind a hook, which may be a part of one or an object that can be called."""
    while isinstance(hook, partial):
        hook = hook.func
    if inspect.isfunction(hook):
        return hook
    return getattr(type(hook), "__call__")  # noqa: B004, B009


@lru_cache(maxsize=1)
def own_sources() -> str:
    """A hash of colofunc's own modules."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _of_file(name: str) -> str:
    try:
        return hashlib.sha256(Path(name).read_bytes()).hexdigest()
    except OSError:  # defined in a notebook or a console: its name has to do
        return name


# ---- from a plan back to decisions ----


def decided_by(plan: Plan, program: Program, mesh: Mesh, candidates: Candidates, constraints: Constraints) -> Decisions:
    """The decisions that a plan of this very program describes. Raises PlanError where a strategy is not to be had."""
    candidates.follow_wishes(constraints)
    of_key: dict[str, Decision] = {}
    for decided in plan.decisions:
        of_key.update(dict.fromkeys(decided.keys, decided))
    found: dict[Any, Strategy] = {}
    choices = []
    for node, key in zip(program.nodes, node_keys(program), strict=True):
        call, _ = call_in(program, node)
        decision = of_key.get(key)
        if decision is None:
            raise PlanError(f"the plan says nothing of {key}")
        same = (call, id(decision))
        if same not in found:
            options = [*candidates.along(node, _axes(decision, mesh), None)]
            options += strategies_in(decision, call, candidates.rule(call), mesh)
            found[same] = _strategy(decision, options, names_of(mesh))
        choices.append(Choice(found[same], candidates.rule(call)))
    layouts: dict[int, Layout] = {}
    for input_id, leaf in zip(program.inputs, plan.inputs, strict=True):
        layouts[input_id] = bind(leaf.spec, mesh, program.values[input_id].shape)
    outputs: list[Layout] = []
    for output_id, spec in zip(program.outputs, plan.outputs, strict=True):
        outputs.append(bind(spec, mesh, program.values[output_id].shape))
    names = set(plan.regather)
    regather = copies_of(program, [input_id for input_id in program.inputs if program.values[input_id].name in names])
    return Decisions(tuple(choices), layouts, tuple(outputs), plan, regather)


def _axes(decision: Decision, mesh: Mesh) -> tuple[str, ...]:
    """The axes that a decision speaks of: in its specs ("(dp b) +tp"), or as those that it splits along."""
    words = {axis for axis, _ in decision.axes}
    for spec in (*decision.ins, *decision.outs):
        for word in (spec or "").replace("(", " ").replace(")", " ").split():
            words.add(word)
            words.update(word.lstrip("+").replace(":", " ").split())
    return tuple(axis for axis in mesh.axis_names if axis in words)


def _strategy(decision: Decision, options: Sequence[Strategy], taken: tuple[str, ...]) -> Strategy:
    for option in options:
        if option.name != decision.strategy:
            continue
        ins = tuple(layout.text(taken) for layout in option.ins)
        outs = tuple(None if layout is None else layout.text(taken) for layout in option.outs)
        if ins == decision.ins and outs == decision.outs:
            return option
    raise PlanError(f"the plan's {decision.strategy} for {decision.path} {decision.target} is not among its strategies")


__all__ = ["decided_by", "key_of", "local_hash", "own_sources", "remembered"]
