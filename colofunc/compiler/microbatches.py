"""Microbatches: the batch in equal parts, one after another, with the numbers of the whole batch.

What `cf.accumulate` and `cf.pipeline` have in common: which leaves are the batch, that every rank's rows come in equal parts, and the
program of one rank as a loop over them (`program.passes.time`, `program.passes.loop`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from math import prod

from colofunc.compiler.transform import Build, Rewrite
from colofunc.errors import InputError, PlanError, near
from colofunc.mesh import Mesh
from colofunc.planner.sharding.constraints import Constraint, Constraints, NotSo
from colofunc.program.ir import Program, Value
from colofunc.program.passes.loop import RowsMove, fold, unmixed
from colofunc.program.passes.time import Rules, lies_over_time, over_time
from colofunc.program.tracing.trace import Traced, record_local
from colofunc.program.tracing.tree import Tree
from colofunc.spec.layout import Layout
from colofunc.spec.rule import Strategy


def check_number(microbatches: int | str, transform: str) -> None:
    """Raises PlanError for what is no number of microbatches."""
    if not isinstance(microbatches, int) or isinstance(microbatches, bool) or microbatches < 1:
        raise PlanError(f"microbatches={microbatches!r} is no whole number above 0; write cf.{transform}(step, microbatches=4)")


def loops_over(microbatches: int, batch: int | str | None, mixing: str, build: Build) -> list[Rewrite]:
    """The ways to do it: gathers and reductions outside of the loop, then in it, but for those that somebody wants there."""
    traced, asked = build.traced, build.constraints
    leaves = _leaves(_argument(traced, batch), traced)
    rules = Rules(build.registry.rule, build.registry.extra_strategies, record_local)
    if mixing != "error" and not _mixes(leaves, microbatches, rules, traced.program):
        mixing = "error"  # nothing is estimated that another choice of rows computes exactly
    pinned = partial(_rows_on, leaves, microbatches, rules)
    scatter, gather = ((True,) if any(said.values()) else (False, True) for said in (asked.scatter, asked.regather))
    return [partial(_accumulated, leaves, microbatches, mixing, rules, pinned, *each) for each in product(scatter, gather)]


def _mixes(leaves: dict[str, tuple[int, ...]], microbatches: int, rules: Rules, program: Program) -> bool:
    """Whether the step itself, on one device, has an operator that mixes samples."""
    try:
        unmixed(_places(leaves, microbatches, rules, program)[2], "time", microbatches)
    except PlanError:
        return True
    return False


def rows_of(batch: int | str | None, build: Build) -> int:
    """How many rows the batch has."""
    leaves = _leaves(_argument(build.traced, batch), build.traced)
    return next(iter(leaves.values()))[0]


def on_rows(batch: int | str | None, build: Build) -> frozenset[int]:
    """Positions of the nodes of the global program that read rows of the batch: each microbatch runs them."""
    leaves = _leaves(_argument(build.traced, batch), build.traced)
    rows = rows_of(batch, build)
    if rows == 1:
        return frozenset()
    parts = next(number for number in range(2, rows + 1) if rows % number == 0)
    rules = Rules(build.registry.rule, build.registry.extra_strategies, record_local)
    _, places_of, _ = _places(leaves, parts, rules, build.program)
    found = set()
    inputs = len(build.program.inputs)
    for item, places in places_of.items():
        if item >= inputs and any(places[: len(build.program.nodes[item - inputs].refs)]):
            found.add(item - inputs)
    return frozenset(found)


def equal_parts(microbatches: int, batch: int | str | None, mixing: str, build: Build) -> Build:
    """However the mesh splits the batch, what a rank has of it comes in equal parts: in the leaves and wherever they flow.

    Raises PlanError where an operator mixes samples: of the step itself, so on every mesh and with every plan. A plan may bring all
    rows to every rank and compute such an operator behind the loop, but then it is not accumulated, and only some plans do.
    """
    if microbatches == 1:
        return build
    leaves = _leaves(_argument(build.traced, batch), build.traced)
    rules = Rules(build.registry.rule, build.registry.extra_strategies, record_local)
    rows, places_of, over = _places(leaves, microbatches, rules, build.program)
    unmixed(over, "time", microbatches, mixing)
    says = f"{microbatches} microbatches, which have to divide the rows that a rank has ({_padded(f'{microbatches} * ranks')}),"
    items = {}
    for item, places in places_of.items():
        items[item] = (Constraint(("microbatches", microbatches, places), partial(_divides, microbatches, rows, places), says),)
    return build.evolve(constraints=build.constraints | Constraints(items))


def _rows_on(
    leaves: dict[str, tuple[int, ...]], microbatches: int, rules: Rules, axes: frozenset[str], program: Program, all_of_them: bool
) -> Constraints:
    """Rows of the batch lie on these axes only, wherever they flow: nothing moves them between ranks.

    all_of_them: and they do lie on each of these, so that no rank has rows of another one either.
    """
    rows, places_of, _ = _places(leaves, microbatches, rules, program)
    says = f"rows of {microbatches} microbatches stay on {', '.join(sorted(axes)) or 'no axis'}"
    items = {}
    for item, places in places_of.items():
        items[item] = (Constraint(("rows on", axes, places, all_of_them), partial(_stay, rows, places, axes, all_of_them), says),)
    return Constraints(items)


Place = tuple[int, int]  # (dim, size of what stands before) of the rows of the batch in a value


def _places(
    leaves: dict[str, tuple[int, ...]], microbatches: int, rules: Rules, program: Program
) -> tuple[int, dict[int, tuple[Place | None, ...]], Program]:
    """How many rows the batch has, per item (input or node) of a global program where they are in operands and results, and
    the program over time."""
    ids = [i for i in program.inputs if leaves.get(program.values[i].name) == program.values[i].shape]
    for id in ids:
        _check_divides(program.values[id], microbatches)
    lies, over = lies_over_time(program, ids, microbatches, "time", rules)
    found = {}
    for item, (ins, outs) in enumerate([((), (i,)) for i in program.inputs] + [(node.refs, node.outs) for node in program.nodes]):
        places = tuple(None if i is None else _rows_at(lies.get(i)) for i in (*ins, *outs))
        if any(places):
            found[item] = places
    return program.values[ids[0]].shape[0], found, over


def _rows_at(over: Layout | None) -> Place | None:
    """Where the rows of the batch are in a value, by where time lies in it."""
    for d, dim in enumerate(over.dims if over is not None else ()):
        before = 1
        for size, owner in dim:
            if owner is not None:
                return d, before
            before *= size
    return None


def _row_axes(rows: int, places: tuple[Place | None, ...], strategy: Strategy) -> Iterator[list[tuple[int, str]]]:
    """Per operand and result that has them: (ways, mesh axis) that split the rows."""
    for place, layout in zip(places, (*strategy.ins, *strategy.outs), strict=True):
        if place is None or layout is None:
            continue
        d, before = place
        held, skipped, found = rows, 1, []
        for size, axis in layout.dims[d]:
            if skipped < before:
                skipped *= size
            elif held > 1:
                found += [(min(size, held), axis)] if axis is not None else []
                held //= min(size, held)
        yield found


def _divides(microbatches: int, rows: int, places: tuple[Place | None, ...], strategy: Strategy) -> bool:
    """Whether the rows that a rank has under a strategy come in equal microbatches, in every operand and result."""
    every = (prod(n for n, _ in found) for found in _row_axes(rows, places, strategy))
    return not any(rows % ways or rows // ways % microbatches for ways in every)


def _stay(rows: int, places: tuple[Place | None, ...], axes: frozenset[str], all_of_them: bool, strategy: Strategy) -> bool:
    for found in _row_axes(rows, places, strategy):
        on = {axis for _, axis in found}
        if not on <= axes or (all_of_them and on != axes):
            return False
    return True


def _argument(traced: Traced, batch: int | str | None) -> Tree:
    """The argument that is the batch."""
    arguments = traced.in_tree.children[0].children
    names = [a.name for a in arguments]
    if batch is None:
        batch = min(1, len(arguments) - 1)
    if isinstance(batch, str):
        if batch not in names:
            raise InputError(f"batch={batch!r} names no argument{near(batch, names, 'arguments')}")
        batch = names.index(batch)
    if not isinstance(batch, int) or not -len(arguments) <= batch < len(arguments):
        raise InputError(f"batch={batch!r} is no argument: the step takes {len(arguments)}; write one of {', '.join(map(repr, names))}")
    return arguments[batch]


def _leaves(argument: Tree, traced: Traced) -> dict[str, tuple[int, ...]]:
    """Name -> global shape of the leaves whose dim 0 is the batch: the leading size that most of them have."""
    names = set(argument.names())
    shapes = {v.name: v.shape for i in traced.program.inputs if (v := traced.program.values[i]).name in names and v.shape}
    if not shapes:
        raise InputError(f"argument {argument.name!r} has no tensor with a dim 0 to split; name the batch with batch=")
    sizes = Counter(shape[0] for shape in shapes.values())
    most = max(sizes, key=lambda n: (sizes[n], n))
    return {name: shape for name, shape in shapes.items() if shape[0] == most}


def _accumulated(
    leaves: dict[str, tuple[int, ...]], microbatches: int, mixing: str, rules: Rules,
    pinned: Callable[..., Constraints], scatter: bool, gather: bool, program: Program, mesh: Mesh,
) -> Program:  # fmt: skip
    """The loop. scatter, gather: what is done in each microbatch."""
    axis = next(name for name in ("time", "time_", "microbatch_time") if name not in mesh)
    split = [v.id for v in program.values.values() if _is_leaf(v, leaves)]
    split = [id for id in split if program.values[id].shape[0] % microbatches == 0]
    make = partial(_loops, program, split, microbatches, axis, mixing, rules, scatter=scatter, gather=gather)
    # Where rows are brought to other ranks, as ids for an embedding that is looked up on shards, rows t, t + n, ... are the same
    # microbatch on both sides, and runs of rows are not: what lies between them could not be in the loop.
    minor = len({program.values[id].shape[0] for id in split}) > 1
    try:
        return make(minor=minor)
    except PlanError as error:
        if mesh.size == 1:
            raise
        try:  # the batch is split over more axes inside the program than at its entry
            return make(minor=not minor)
        except PlanError:
            # The step itself mixes no samples (`equal_parts` has looked): here rows move between ranks, which brings those of several
            # microbatches to one. Once more with rows that stay where the batch is; where that fails too, this error is what is said.
            here = Counter(layout.dims[0] for i in program.inputs if i in split and (layout := program.values[i].layout) is not None)
            axes = frozenset(axis for _, axis in here.most_common(1)[0][0] if axis is not None) if here else frozenset()
            raise NotSo(str(error), partial(pinned, axes, all_of_them=not isinstance(error, RowsMove))) from None


def _loops(
    program: Program, split: list[int], microbatches: int, axis: str, mixing: str, rules: Rules,
    scatter: bool, gather: bool, minor: bool = False,
) -> Program:  # fmt: skip
    return fold(over_time(program, split, microbatches, axis, rules, minor, scatter), axis, microbatches, mixing, gather)


def _is_leaf(value: Value, leaves: dict[str, tuple[int, ...]]) -> bool:
    """Whether a value is a leaf of the batch, in whatever layout it was brought to."""
    return value.layout is not None and bool(value.name) and leaves.get(value.name) == value.layout.shape


def _check_divides(value: Value, microbatches: int) -> None:
    rows = value.shape[0]
    if rows % microbatches:
        whole = value.layout is None or not value.layout.axes
        where = "" if whole else f" that a rank has of the {value.layout.shape[0]} in {value.layout.text()!r}"  # type: ignore[union-attr]
        fit = [n for n in range(1, rows + 1) if rows % n == 0]
        multiple = f"{microbatches} * ranks" if value.layout is None else str(microbatches * (value.layout.shape[0] // rows))
        raise PlanError(
            f"{microbatches} microbatches do not divide the {rows} rows of {value.name!r}{where}; "
            f"use one of {', '.join(map(str, fit))} microbatches, another batch size, or pad it: {_padded(multiple)}"
        )


def _padded(multiple: str) -> str:
    """What to write for a batch whose rows do not divide. Not done unasked: the loss has to leave such rows out."""
    ranks = ", ranks: those that split the batch" if "ranks" in multiple else ""
    calls = f"cf.pad(batch, multiple=1, rows={multiple}) or cf.batches(loader, mesh, rows={multiple})"
    return f"{calls} adds rows that labels or a mask leave out{ranks}"
