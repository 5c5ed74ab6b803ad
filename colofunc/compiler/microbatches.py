"""Microbatches: the batch in equal parts, one after another, with the numbers of the whole batch.

What `cf.accumulate` and `cf.pipeline` have in common: which leaves are the batch, that every rank's rows come in equal
parts, and the program of one rank as a loop over them (`program.passes.time`, `program.passes.fold`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from math import prod

from colofunc.compiler.transform import Build, Rewrite
from colofunc.errors import InputError, PlanError, near
from colofunc.mesh import Mesh
from colofunc.planner.sharding.constraints import Constraint, Constraints, NotSo
from colofunc.program.ir import Program, Value
from colofunc.program.passes.fold import fold, unmixed
from colofunc.program.passes.mixing import RowsMove
from colofunc.program.passes.time import LoweringRules, lies_over_time, over_time
from colofunc.program.tracing.trace import Traced, record_local
from colofunc.program.tracing.tree import Tree
from colofunc.spec.layout import Dim, Layout, axes_of
from colofunc.spec.rule import Strategy


def check_number(microbatches: int | str, transform: str) -> None:
    """Raises PlanError for what is no number of microbatches."""
    if not isinstance(microbatches, int) or isinstance(microbatches, bool) or microbatches < 1:
        raise PlanError(
            f"microbatches={microbatches!r} is no whole number above 0; write cf.{transform}(step, microbatches=4)"
        )


def loops_over(microbatches: int, batch: int | str | None, mixing: str, build: Build) -> list[Rewrite]:
    """The ways to do it: gathers and reductions outside of the loop, then in it, but for those that somebody wants
    there.
    """
    leaves = _leaves(batch, build.traced)
    rules = _rules(build)
    if mixing != "error" and not _mixes(leaves, microbatches, rules, build.traced.program):
        mixing = "error"  # nothing is estimated that another choice of rows computes exactly
    pinned = partial(_rows_on, leaves, microbatches, rules)
    scatter_inside = _ways_to_reduce(build.constraints)
    gather_inside = (True,) if any(build.constraints.regather.values()) else (False, True)
    rewrites: list[Rewrite] = []
    for scatter, gather in product(scatter_inside, gather_inside):
        rewrites.append(partial(_accumulated, leaves, microbatches, mixing, rules, pinned, scatter, gather))
    return rewrites


def _ways_to_reduce(constraints: Constraints) -> tuple[bool, ...]:
    """Whether gradients are reduced in each microbatch: what somebody wants, True where wishes differ, or both ways."""
    wanted = set(constraints.scatter.values())
    if not wanted:
        return False, True
    return (True in wanted,)


def _rules(build: Build) -> LoweringRules:
    """How operators split, as the passes over time ask for it."""
    return LoweringRules(build.registry.rule, build.registry.extra_strategies, record_local)


def _mixes(leaves: dict[str, tuple[int, ...]], microbatches: int, rules: LoweringRules, program: Program) -> bool:
    """Whether the step itself, on one device, has an operator that mixes samples."""
    try:
        _, _, over = _places(leaves, microbatches, rules, program)
        unmixed(over, "time", microbatches)
    except PlanError:
        return True
    return False


def rows_of(batch: int | str | None, build: Build) -> int:
    """How many rows the batch has."""
    shapes = list(_leaves(batch, build.traced).values())
    return shapes[0][0]


def on_rows(batch: int | str | None, build: Build) -> frozenset[int]:
    """Positions of the nodes of the global program that read rows of the batch: each microbatch runs them."""
    rows = rows_of(batch, build)
    if rows == 1:
        return frozenset()
    parts = next(number for number in range(2, rows + 1) if rows % number == 0)
    _, places_of, _ = _places(_leaves(batch, build.traced), parts, _rules(build), build.program)
    reading = set()
    inputs = len(build.program.inputs)
    for item, places in places_of.items():
        position = item - inputs
        if position < 0:
            continue
        of_operands = places[: len(build.program.nodes[position].refs)]
        if any(of_operands):
            reading.add(position)
    return frozenset(reading)


def equal_parts(
    microbatches: int, batch: int | str | None, mixing: str, build: Build, admits: Callable[[int], bool] = bool
) -> Build:
    """However the mesh splits the batch, what a rank has of it comes in equal parts: in the leaves and wherever they
    flow.

    admits: whether the transform takes another number of microbatches, where an error is to name some that would do.
    Raises PlanError where an operator mixes samples: of the step itself, so on every mesh and with every plan. A plan
    may bring all rows to every rank and compute such an operator behind the loop, but then it is not accumulated, and
    only some plans do.
    """
    if microbatches == 1:
        return build
    rows, places_of, over = _places(_leaves(batch, build.traced), microbatches, _rules(build), build.program)
    unmixed(over, "time", microbatches, mixing)
    says = f"{microbatches} microbatches that divide the rows of a rank ({_padded(f'{microbatches} * ranks')})"
    items = {}
    for item, places in places_of.items():
        accepts = partial(_divides, microbatches, rows, places)
        instead = partial(_other_numbers, rows, places, admits)
        items[item] = (Constraint(("microbatches", microbatches, places), accepts, says, instead=instead),)
    return build.evolve(constraints=build.constraints | Constraints(items))


def _rows_on(
    leaves: dict[str, tuple[int, ...]],
    microbatches: int,
    rules: LoweringRules,
    axes: frozenset[str],
    program: Program,
    all_of_them: bool,
) -> Constraints:
    """Rows of the batch lie on these axes only, wherever they flow: nothing moves them between ranks.

    all_of_them: they also lie on each of these axes, so that no rank has rows of another one.
    """
    rows, places_of, _ = _places(leaves, microbatches, rules, program)
    says = f"rows of {microbatches} microbatches stay on {', '.join(sorted(axes)) or 'no axis'}"
    items = {}
    for item, places in places_of.items():
        accepts = partial(_stay, rows, places, axes, all_of_them)
        items[item] = (Constraint(("rows on", axes, places, all_of_them), accepts, says),)
    return Constraints(items)


RowsPlace = tuple[int, int]
"""Of the rows of the batch in a value: (dim, size of what stands before them in it)."""


def _places(
    leaves: dict[str, tuple[int, ...]], microbatches: int, rules: LoweringRules, program: Program
) -> tuple[int, dict[int, tuple[RowsPlace | None, ...]], Program]:
    """(rows of the batch; per item, an input or a node of a global program, where they are in operands and results; the
    program over time)."""
    ids = [id for id in program.inputs if leaves.get(program.values[id].name) == program.values[id].shape]
    for id in ids:
        _check_divides(program.values[id], microbatches)
    lies, over = lies_over_time(program, ids, microbatches, rules)
    values_of_items: list[tuple[int | None, ...]] = [(id,) for id in program.inputs]
    values_of_items += [(*node.refs, *node.outs) for node in program.nodes]
    places_of = {}
    for item, values in enumerate(values_of_items):
        places = tuple(None if id is None else _rows_at(lies.get(id)) for id in values)
        if any(places):
            places_of[item] = places
    return program.values[ids[0]].shape[0], places_of, over


def _rows_at(over: Layout | None) -> RowsPlace | None:
    """Where the rows of the batch are in a value, by where time lies in it."""
    if over is None:
        return None
    for position, dim in enumerate(over.dims):
        before = 1
        for size, owner in dim:
            if owner is not None:
                return position, before
            before *= size
    return None


def _row_axes(rows: int, places: tuple[RowsPlace | None, ...], strategy: Strategy) -> Iterator[list[tuple[int, str]]]:
    """Per operand and result that has them: (ways, mesh axis) that split the rows."""
    for place, layout in zip(places, (*strategy.ins, *strategy.outs), strict=True):
        if place is None or layout is None:
            continue
        position, before = place
        rows_left, skipped = rows, 1
        row_axes = []
        for size, axis in layout.dims[position]:
            if skipped < before:
                skipped *= size
                continue
            if rows_left <= 1:
                break  # what follows in the dim is no rows, and a batch without rows has none to split
            ways = min(size, rows_left)
            rows_left //= ways
            if axis is not None:
                row_axes.append((ways, axis))
        yield row_axes


def _divides(microbatches: int, rows: int, places: tuple[RowsPlace | None, ...], strategy: Strategy) -> bool:
    """Whether the rows that a rank has under a strategy come in equal microbatches, in every operand and result."""
    for row_axes in _row_axes(rows, places, strategy):
        ranks = prod(ways for ways, _ in row_axes)
        if rows % ranks or rows // ranks % microbatches:
            return False
    return True


def _other_numbers(
    rows: int, places: tuple[RowsPlace | None, ...], admits: Callable[[int], bool], strategies: Sequence[Strategy]
) -> str:
    """Numbers of microbatches, above 1, into which rows come under one of some strategies."""
    found = []
    for number in range(2, rows + 1):
        if (
            rows % number == 0
            and admits(number)
            and any(_divides(number, rows, places, strategy) for strategy in strategies)
        ):
            found.append(number)
    return f"give microbatches={' or '.join(map(str, found))}" if found else ""


def _stay(
    rows: int, places: tuple[RowsPlace | None, ...], axes: frozenset[str], all_of_them: bool, strategy: Strategy
) -> bool:
    """Whether rows lie on some of the axes only, or on all of them, in every operand and result."""
    for row_axes in _row_axes(rows, places, strategy):
        split_by = {axis for _, axis in row_axes}
        if not split_by <= axes or (all_of_them and split_by != axes):
            return False
    return True


def _argument(traced: Traced, batch: int | str | None) -> Tree:
    """The argument that is the batch: that which is named, else by the roles of its leaves."""
    arguments = traced.in_tree.children
    names = [argument.name for argument in arguments]
    if batch is None:
        return _known_batch(traced)
    if isinstance(batch, str):
        if batch not in names:
            raise InputError(f"batch={batch!r} names no argument{near(batch, names, 'arguments')}")
        batch = names.index(batch)
    if not isinstance(batch, int) or not -len(arguments) <= batch < len(arguments):
        raise InputError(
            f"batch={batch!r} is no argument: the step takes {len(arguments)}; write one of "
            f"{', '.join(map(repr, names))}"
        )
    return arguments[batch]


def _known_batch(traced: Traced) -> Tree:
    """The first argument of which all leaves are the batch by their roles, else the first with such a leaf among
    others; of one argument, that one.

    Raises InputError where there is none.
    """
    arguments = traced.in_tree.children
    if len(arguments) == 1:
        return arguments[0]
    if traced.knows_no_weights:
        return arguments[1]  # all of them look like the batch, and weights come first more often than not
    values = dict(zip(traced.names, (traced.program.values[id] for id in traced.program.inputs), strict=False))
    for all_or_any in (all, any):
        for argument in arguments:
            leaves = [values[name] for name in argument.names() if values[name].shape]
            if leaves and all_or_any(leaf.role == "batch" for leaf in leaves):
                return argument
    raise InputError(
        "no argument of the step has rows of the batch, by the roles of its leaves. Try: batch= one of "
        f"{', '.join(repr(argument.name) for argument in arguments)}"
    )


def _leaves(batch: int | str | None, traced: Traced) -> dict[str, tuple[int, ...]]:
    """Name -> global shape of the leaves whose dim 0 is the batch: the leading size that most of them have."""
    argument = _argument(traced, batch)
    names = set(argument.names())
    shapes = {}
    for id in traced.program.inputs:
        value = traced.program.values[id]
        if value.name in names and value.shape:
            shapes[value.name] = value.shape
    if not shapes:
        raise InputError(
            f"argument {argument.name!r} has no tensor with a dim 0 to split. Try: batch= another argument"
        )
    leaves_with = Counter(shape[0] for shape in shapes.values())
    rows = max(leaves_with, key=lambda size: (leaves_with[size], size))
    return {name: shape for name, shape in shapes.items() if shape[0] == rows}


def _accumulated(
    leaves: dict[str, tuple[int, ...]], microbatches: int, mixing: str, rules: LoweringRules,
    pinned: Callable[..., Constraints], scatter: bool, gather: bool, program: Program, mesh: Mesh,
) -> Program:  # fmt: skip
    """The loop. scatter, gather: what is done in each microbatch."""
    axis = next(name for name in ("time", "time_", "microbatch_time") if name not in mesh)
    split = []
    for value in program.values.values():
        if _is_leaf(value, leaves) and value.shape[0] % microbatches == 0:
            split.append(value.id)
    make = partial(_loops, program, split, microbatches, axis, mixing, rules, scatter=scatter, gather=gather)
    # Where rows are brought to other ranks, as ids for an embedding that is looked up on shards, rows t, t + n, ... are
    # the same microbatch on both sides, and runs of rows are not: what lies between them could not be in the loop.
    minor = len({program.values[id].shape[0] for id in split}) > 1
    try:
        return make(minor=minor)
    except PlanError as error:
        if mesh.size == 1:
            raise
        try:  # the batch is split over more axes inside the program than at its entry
            return make(minor=not minor)
        except PlanError:
            # The step itself mixes no samples (`equal_parts` has looked): here rows move between ranks, which brings
            # those of several microbatches to one. Once more with rows that stay where the batch is; where that fails
            # too, this error is what is said.
            axes = _axes_of_rows(program, split)
            raise NotSo(str(error), partial(pinned, axes, all_of_them=not isinstance(error, RowsMove))) from None


def _axes_of_rows(program: Program, leaves: list[int]) -> frozenset[str]:
    """The axes that split dim 0 of most leaves of the batch."""
    dims: Counter[Dim] = Counter()
    for id in program.inputs:
        layout = program.values[id].layout
        if id in leaves and layout is not None:
            dims[layout.dims[0]] += 1
    if not dims:
        return frozenset()
    [(most_common, _)] = dims.most_common(1)
    return frozenset(axes_of(most_common))


def _loops(
    program: Program, split: list[int], microbatches: int, axis: str, mixing: str, rules: LoweringRules,
    scatter: bool, gather: bool, minor: bool = False,
) -> Program:  # fmt: skip
    """minor: rows t, t + n, ... of n microbatches are microbatch t, and not a run of rows."""
    over = over_time(program, split, microbatches, axis, rules, minor, scatter)
    return fold(over, axis, microbatches, mixing, gather)


def _is_leaf(value: Value, leaves: dict[str, tuple[int, ...]]) -> bool:
    """Whether a value is a leaf of the batch, in whatever layout it was brought to."""
    return value.layout is not None and bool(value.name) and leaves.get(value.name) == value.layout.shape


def _check_divides(value: Value, microbatches: int) -> None:
    """Raises PlanError where a leaf's rows do not come in so many microbatches."""
    rows = value.shape[0]
    if rows % microbatches == 0:
        return
    where = ""
    multiple = f"{microbatches} * ranks"
    if value.layout is not None:
        global_rows = value.layout.shape[0]
        multiple = str(microbatches * (global_rows // rows))
        if value.layout.axes:
            where = f" that a rank has of the {global_rows} in {value.layout.text()!r}"
    fitting = [str(number) for number in range(1, rows + 1) if rows % number == 0]
    raise PlanError(
        f"{microbatches} microbatches do not divide the {rows} rows of {value.name!r}{where}; "
        f"use one of {', '.join(fitting)} microbatches, another batch size, or pad it: {_padded(multiple)}"
    )


def _padded(multiple: str) -> str:
    """What to write for a batch whose rows do not divide. Not done unasked: the loss has to leave such rows out."""
    ranks = ", ranks: those that split the batch" if "ranks" in multiple else ""
    calls = f"cf.pad(batch, multiple=1, rows={multiple}) or cf.batches(loader, mesh, rows={multiple})"
    return f"{calls} adds rows that labels or a mask leave out{ranks}"
