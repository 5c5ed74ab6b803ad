"""What the user fixed beforehand, as constraints for the planner.

Four sources, all meaning "this tensor lies so": DTensor arguments that already lie somewhere, `in_specs` and
`out_specs` (trees of specs in which a prefix speaks for everything below it), named plans and globs, and an earlier
plan given back. Rows of batches for which nobody gave a spec are a fifth: they lie as usual on axes that no plan names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from colofunc.compiler.transform import Sharding
from colofunc.errors import InputError, PlanError, SpecError, near
from colofunc.mesh import Mesh
from colofunc.ops.quantized import Quantized
from colofunc.planner.plan import PlanOfAxis
from colofunc.planner.sharding.constraints import NONE, Constraint, Constraints, leaf_strategy
from colofunc.planner.sharding.explain import constraints_from
from colofunc.planner.wishes.propagation import Rules
from colofunc.planner.wishes.wish import Wish, wishes_of
from colofunc.planner.wishes.wish_constraints import constraints_of
from colofunc.program.ir import Program
from colofunc.program.tracing.trace import Traced
from colofunc.program.tracing.tree import Tree
from colofunc.spec.layout import At, Layout, at_text
from colofunc.spec.rule import Strategy
from colofunc.spec.spec import Spec, bind


def specs_of(specs: Any, tree: Tree, what: str) -> Iterator[tuple[int, str, str | Spec | Layout]]:
    """(leaf position, leaf name, spec) for every tensor leaf that `specs` speaks for.

    `specs` has the structure of the tree, or a prefix of it; None leaves everything below to the planner. Raises
    InputError naming the path where the structures differ or a spec stands on a leaf that is no tensor.
    """
    yield from _walk(specs, tree, what, [0])


def _walk(specs: Any, tree: Tree, path: str, at: list[int]) -> Iterator[tuple[int, str, str | Spec | Layout]]:
    here = f"{path} ({tree.name or 'the whole'})"
    if isinstance(specs, (str, Spec, Layout)) or specs is None:
        if tree.kind == "static" and specs is not None:
            raise InputError(
                f"{here}: spec {str(specs)!r} stands on {tree.value!r}, which is no tensor; write None there"
            )
        for number, leaf in enumerate(tree.leaves()):
            # Of a quantized weight a spec is about its numbers; where scales lie follows from how they are used.
            if specs is not None and not (number and tree.type is Quantized):
                yield at[0], leaf.name, specs
            at[0] += 1
        return
    if isinstance(specs, Mapping):
        items = {str(k): v for k, v in specs.items()}
    elif isinstance(specs, (list, tuple)):
        items = {str(place): v for place, v in enumerate(specs)}
    else:
        raise InputError(f"{here}: {specs!r} is no spec; write a string such as '(dp b) ...', a cf.Spec, or None")
    keys = [str(key) for key in tree.keys]
    if tree.kind in ("tensor", "static") or set(items) != set(keys):
        missing = [key for key in keys if key not in items]
        unknown = [k for k in items if k not in keys]
        says = "is deeper than the value"
        if missing:
            says = f"misses {', '.join(map(repr, missing[:5]))}"
        elif unknown:
            says = f"has {unknown[0]!r}{near(unknown[0], keys)}"
        raise InputError(
            f"{here}: the tree of specs {says}; give one spec per leaf, or one spec (or None) for the whole branch"
        )
    for key, child in zip(keys, tree.children, strict=True):
        yield from _walk(items[key], child, path, at)


NO_WEIGHTS = (
    "nothing in the step says which argument has the weights (no gradient, no product of a known form), so all count "
    "as the batch. Try: model = cf.functional(module), and out, buffers = model.apply(params, buffers, ...), "
    "which says it; of a function without a module, in_specs= says how each argument lies"
)


def constraints_of_user(
    program: Program,
    traced: Traced,
    mesh: Mesh,
    sharding: Sharding,
    given: Mapping[int, Layout],
    usual: Mapping[int, Layout],
    plan: Any,
    rules: Rules,
) -> tuple[Constraints, dict[str, PlanOfAxis]]:
    """All constraints, and which plan speaks for which axis.

    `usual`: how rows of batches lie for which nobody gave a spec. `rules`: what operators can do, by all plugins of the
    step.
    """
    constraints = _given(program, given) | _specs(program, traced, mesh, sharding)
    wishes: list[Wish] = []
    named: dict[str, PlanOfAxis] = {}
    for place, part in enumerate(sharding.plans):
        name = str(getattr(part, "name", None) or f"plan {place + 1}")
        try:
            mine = wishes_of(part, program, name, mesh, rules)
        except PlanError as error:
            if traced.knows_no_weights:
                error.add_note(NO_WEIGHTS)
            raise
        wishes += mine
        speaking = PlanOfAxis(name, bool(getattr(part, "splits_products", False)))
        for wish in mine:
            for axis in wish.axes or ():
                named.setdefault(axis, speaking)
    if wishes:
        constraints = constraints | constraints_of(wishes, program, mesh, rules)
    if plan is not None:
        constraints = constraints | constraints_from(plan, program, mesh, rules.rule)
    rows = _as_usual(program, mesh, usual, named, constraints)
    if rows:
        constraints = constraints | constraints_of(rows, program, mesh, rules)
    return constraints, named


def wished_axes(mesh: Mesh, constraints: Constraints, named: Mapping[str, PlanOfAxis]) -> tuple[str, ...]:
    """The axes that somebody speaks for: named plans, specs of leaves and outputs, strategies of operators."""
    axes = set(named)
    for of_item in constraints.items.values():
        for constraint in of_item:
            for offer in constraint.offers:
                axes |= _split_axes(offer)
            if isinstance(constraint.key, tuple) and constraint.key[0] == "node":
                axes |= {axis for axis, _ in constraint.key[1]}
    for layout in constraints.outputs.values():
        axes.update(layout.axes)
    return tuple(axis for axis in mesh.axis_names if axis in axes)


def _split_axes(offer: Strategy) -> set[str]:
    """The axes along which what a strategy gives is split."""
    axes: set[str] = set()
    for layout in offer.outs:
        if layout is not None:
            axes.update(layout.axes)
    return axes


def staying(program: Program, state: Mapping[int, Layout], constraints: Constraints) -> Constraints:
    """The constraints, and that a state stays split as it is, if they allow that for every leaf of it.

    Otherwise they say nothing of where it is: it is placed as a plain state would be. A leaf that alone stayed behind,
    such as the moments of a parameter that a plan moves, would be converted in every step. In which memory it lies is
    this step's to decide.
    """
    state = {id: layout.with_tier("device") for id, layout in state.items()}
    for position, id in enumerate(program.inputs):
        layout = state.get(id)
        if layout is None:
            continue
        leaf = leaf_strategy(layout)
        at = constraints.at.get(position, layout.at)
        if at != layout.at or not all(constraint.accepts(leaf) for constraint in constraints.items.get(position, ())):
            return constraints
    return constraints | _given(program, state)


def _given(program: Program, given: Mapping[int, Layout]) -> Constraints:
    items: dict[int, tuple[Constraint, ...]] = {}
    for position, id in enumerate(program.inputs):
        layout = given.get(id)
        if layout is not None:
            says = (
                f"{program.values[id].name} already lies as {layout.text()!r} (step.init(state, ...) places a state "
                "anew; donate=(k, ...) has what the step returns for argument k lie as this does)"
            )
            items[position] = (pin(layout, says),)
    return Constraints(items)


def _as_usual(
    program: Program, mesh: Mesh, usual: Mapping[int, Layout], named: Mapping[str, PlanOfAxis], constraints: Constraints
) -> list[Wish]:
    """Rows of batches stay where they are on axes of which nobody speaks: no plan, and no spec of this input."""
    wishes = []
    for position, id in enumerate(program.inputs):
        layout = usual.get(id)
        if layout is None:
            continue
        taken = set(named)
        for constraint in constraints.items.get(position, ()):
            taken.update(constraint.axes or mesh.axis_names)  # without axes it means the whole layout
        axes = tuple(axis for axis in layout.axes if axis not in taken)
        value = program.values[id]
        if axes:
            wishes.append(Wish(value.name, layout, axes, (value.role,), "the usual rows of cf.batches"))
    return wishes


def _specs(program: Program, traced: Traced, mesh: Mesh, sharding: Sharding) -> Constraints:
    found = NONE
    if sharding.in_specs is not None:
        tree = traced.in_tree
        specs = _by_position(sharding.in_specs, tree)
        if len(tree.children) == 1 and not isinstance(specs, (tuple, list)):
            specs = (specs,)
        items = {}
        for position, name, spec in specs_of(specs, tree, "in_specs"):
            value = program.values[program.inputs[position]]
            layout = _bind(spec, mesh, value.shape, f"in_specs of {name!r}")
            items[position] = (pin(layout, f"in_specs: {name} as {layout.text()!r}"),)
        found = found | Constraints(items)
    if sharding.out_specs is not None:
        outputs = {}
        for position, name, spec in specs_of(sharding.out_specs, traced.out_tree, "out_specs"):
            value = program.values[program.outputs[position]]
            layout = _bind(spec, mesh, value.shape, f"out_specs of {name!r}")
            if layout.pending:
                raise SpecError(
                    f"out_specs of {name!r}: {layout.text()!r} is pending; outputs are reduced, drop the +axis"
                )
            outputs[position] = layout
        found = found | Constraints({}, outputs)
    return found


def _by_position(specs: Any, tree: Tree) -> Any:
    """`in_specs` by the names of the function's parameters, as a tuple in their order.

    Parameters left out are automatic. A dict for the one argument of a function stays what it is, unless it has the
    argument's own name as its only key.
    """
    names = [child.name for child in tree.children]
    if not isinstance(specs, Mapping) or not specs:
        return specs
    positions = set(range(len(names)))
    if set(specs) <= positions | set(map(str, positions)):
        return specs
    if len(names) == 1 and (list(specs) != names or names[0] in map(str, tree.children[0].keys)):
        return specs
    for name in specs:
        if name not in names:
            raise InputError(
                f"in_specs names {name!r}, which is no parameter of the step{near(str(name), names, 'parameters')}"
            )
    return tuple(specs.get(name) for name in names)


def _bind(spec: str | Spec | Layout, mesh: Mesh, shape: tuple[int, ...], what: str) -> Layout:
    try:
        return bind(spec, mesh, shape)
    except SpecError as error:
        error.add_note(f"in {what}")
        raise


def without_tiers(constraints: Constraints, program: Program) -> tuple[Constraints, dict[int, str]]:
    """The constraints on a device that has room for all, and the other tiers that inputs lie in, by position.

    Where tensors are split and where in memory they lie are decided one after the other; see
    `planner/offload/fastest.py`.
    """
    items, tiers = dict(constraints.items), dict[int, str]()
    for position, some in constraints.items.items():
        if position >= len(program.inputs):
            continue
        changed: list[Constraint] = []
        for constraint in some:
            layout = _pinned(constraint)
            if layout is not None:
                tiers[position] = layout.tier  # the last one's holds
                constraint = pin(layout.with_tier("device"), constraint.says)
            changed.append(constraint)
        items[position] = tuple(changed)
        if tiers.get(position) == "device":
            del tiers[position]
    pairs = dict(program.aliases)
    for out, layout in constraints.outputs.items():
        if layout.tier != "device" and tiers.get(pairs.get(out, -1)) != layout.tier:
            raise SpecError(
                f"out_specs {layout.text()!r}: only state that in_specs keep in {layout.tier} memory stays there; drop "
                f"the @{layout.tier}"
            )
    outputs = {out: layout.with_tier("device") for out, layout in constraints.outputs.items()}
    return attrs.evolve(constraints, items=items, outputs=outputs), tiers


def without_places(constraints: Constraints, program: Program, mesh: Mesh) -> Constraints:
    """The constraints on tensors that are everywhere, with where they exist in `at`.

    Who has what is decided apart from how it is split. Raises PlanError where an axis at whose indices values exist is to split others.
    """
    items, at = dict(constraints.items), dict(constraints.at)
    for position in range(len(program.inputs)):
        some = []
        for constraint in constraints.items.get(position, ()):
            layout = _pinned(constraint)
            if layout is not None and layout.at is not None:
                at[position] = layout.at
                constraint = pin(layout.with_at(None), constraint.says)
            some.append(constraint)
        if some:
            items[position] = tuple(some)
    outputs = {out: layout.with_at(None) for out, layout in constraints.outputs.items()}
    placed = {axis for axis, _ in at.values()}
    for constraints_of_item in items.values():
        for constraint in constraints_of_item:
            if not placed or not constraint.offers:
                continue
            both = _split_axes(constraint.offers[0]) & placed
            if both:
                axis = both.pop()
                raise PlanError(
                    f"{constraint.says} splits along axis {axis!r}, at whose indices other tensors exist "
                    f"({_first_at(at, program, axis)}); use another axis of {mesh!r} for one of them"
                )
    return attrs.evolve(constraints, items=items, outputs=outputs, at=at)


def _pinned(constraint: Constraint) -> Layout | None:
    """The layout that a constraint asks for as a whole."""
    is_pin = isinstance(constraint.key, tuple) and constraint.key[0] == "pin"
    return constraint.offers[0].outs[0] if is_pin else None


def _first_at(at: Mapping[int, At], program: Program, axis: str) -> str:
    position = next(position for position, (on, _) in sorted(at.items()) if on == axis)
    return f"{program.values[program.inputs[position]].name} {at_text(at[position])}"


def pin(layout: Layout, says: str) -> Constraint:
    """Exactly this layout for an input leaf."""

    def accepts(strategy: Strategy) -> bool:
        return strategy.outs[0] is layout

    return Constraint(("pin", layout), accepts, says, (leaf_strategy(layout),))
