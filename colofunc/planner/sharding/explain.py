"""From an assignment to a Plan: what each decision costs, which collectives it needs, what else could have been.

The communication of a decision is the conversions that its operands were the first to ask for; a conversion that an
earlier operator already asked for is that one's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import attrs

from colofunc.errors import PlanError, SpecError
from colofunc.mesh import KINDS, Mesh
from colofunc.planner.describe import describe, repeated_products
from colofunc.planner.plan import Alternative, AxisUse, Decision, Leaf, Plan, PlanOfAxis
from colofunc.planner.plan_table import size_text, time_text
from colofunc.planner.sharding.assign import Assignment
from colofunc.planner.sharding.classes import starred
from colofunc.planner.sharding.constraints import NONE, Constraint, Constraints, leaf_strategy
from colofunc.planner.sharding.eliminate import BIG
from colofunc.planner.sharding.flows import Flow, settled_layout
from colofunc.program.ir import Node, Program
from colofunc.program.lower import call_in
from colofunc.program.passes.simplify_known import mask_of
from colofunc.program.text import target_text
from colofunc.spec.conversions.conversion import conversion
from colofunc.spec.layout import At, Layout, is_major
from colofunc.spec.rule import Call, Rule, Strategy
from colofunc.spec.spec import bind, names_of
from colofunc.spec.strategies import as_operands_lie

# A mask of more bytes than this is named in the plan: 16,384 rows and columns of bool.
MAX_MASK_BYTES = 1 << 27
STAGES = "stages: parameters and their work at its indices"  # of an axis at whose indices values exist
SHOWN = 4  # readers and other specs of a leaf that a plan keeps
EQUAL_S = 1e-9  # options that differ by less cost the same
RuleOfNode = Callable[[Node], Rule | None]


@attrs.frozen
class _Share:
    """Conversions that one class pays for: seconds of all members, and what they are."""

    seconds: float = 0.0
    collectives: tuple[str, ...] = ()

    def plus(self, seconds: float, names: Sequence[str]) -> _Share:
        return _Share(self.seconds + seconds, tuple(dict.fromkeys((*self.collectives, *names))))


def node_keys(program: Program) -> tuple[str, ...]:
    """A stable key per node: "path|target|phase|occurrence"."""
    seen: dict[tuple[str, str, str], int] = {}
    keys = []
    for node in program.nodes:
        base = (node.path, node.target, node.phase)
        seen[base] = seen.get(base, -1) + 1
        keys.append("|".join((*base, str(seen[base]))))
    return tuple(keys)


def make_plan(
    program: Program,
    mesh: Mesh,
    found: Assignment,
    rule_of: RuleOfNode = lambda node: None,
    named: Mapping[str, PlanOfAxis] | None = None,
    constraints: Constraints = NONE,
    budget_bytes: int | None = None,
) -> Plan:
    """The plan of an assignment. `named`: axis -> the plan that speaks for it; other axes were found."""
    named = named or {}
    keys = node_keys(program)
    paid = _paid(found, mesh)
    taken = names_of(mesh)
    decide = _Decider(program, found, keys, rule_of, constraints, budget_bytes is not None, taken)
    decisions = []
    for number, members in enumerate(found.ties.members):
        # Classes of leaves come first; they stand in the plan as inputs.
        if members[0] >= found.ties.n_inputs:
            decisions.append(decide.decision(number, paid.get(number, _Share())))
    readers = _readers(program)
    leaves = [_leaf(program, found, position, readers, constraints, taken) for position in range(len(program.inputs))]
    conversions_s = sum(share.seconds for share in paid.values())
    inside_s = sum(strategy.cost.extra_s for strategy in found.strategies)
    return Plan(
        mesh.axes,
        mesh.topology.name,
        tuple(decisions),
        tuple(leaves),
        tuple(layout.text(taken) for layout in found.outputs),
        _axis_uses(program, mesh, found, named, constraints),
        found.cost_s,
        conversions_s + inside_s,
        found.peak_bytes,
        budget_bytes,
        tuple(program.values[id].name for id in program.inputs if id in found.regather),
        notes=(*_dense_masks(program), *_repeated(program, mesh, found, named)),
    )


def _axis_uses(
    program: Program, mesh: Mesh, found: Assignment, named: Mapping[str, PlanOfAxis], constraints: Constraints
) -> tuple[AxisUse, ...]:
    """What each mesh axis is used for, in the field's words."""
    gathered_once = [program.inputs[position] for position, again in constraints.regather.items() if again is False]
    scatters = any(constraints.scatter.values())
    staged = {axis for axis, _ in constraints.at.values()}
    uses = []
    for axis, text in describe(program, mesh, found.strategies, found.inputs, gathered_once, scatters):
        said = STAGES if axis in staged else text
        by = named[axis].name if axis in named else "found"
        uses.append(AxisUse(axis, said, by))
    return tuple(uses)


def _repeated(program: Program, mesh: Mesh, found: Assignment, named: Mapping[str, PlanOfAxis]) -> tuple[str, ...]:
    """A line for each axis of a plan that is to split products and leaves some whole."""
    lines = []
    for axis in mesh.axis_names:
        if mesh.axis_size(axis) > 1 and axis in named and named[axis].splits_products:
            lines.append(repeated_products(program, mesh, found.strategies, axis))
    return tuple(line for line in lines if line)


def _dense_masks(program: Program) -> tuple[str, ...]:
    """A line for each large mask that attention reads as a tensor: no rank sees less of it than its own rows."""
    readers: dict[int, Node] = {}
    for node in program.nodes:
        mask = mask_of(node)
        if mask is not None:
            # layers share a mask: the first of them is named
            readers.setdefault(mask.id, node)
    notes = []
    for vid, node in readers.items():
        value = program.values[vid]
        if value.nbytes > MAX_MASK_BYTES:
            notes.append(
                f"{node.path or 'attention'} reads a dense mask {value.shape} of {size_text(value.nbytes)}: it is no "
                "band, and not made by & of comparisons of a vector per row with a vector per column "
                "(position[j] <= position[i], document[j] == document[i], keep[j]). Try: a bool mask that is written so"
            )
    return tuple(notes)


@attrs.frozen(eq=False)
class _Decider:
    """Writes down what was decided for a class of operators. `taken`: names that no local factor may have."""

    program: Program
    found: Assignment
    keys: Sequence[str]
    rule_of: RuleOfNode
    constraints: Constraints
    budgeted: bool
    taken: tuple[str, ...]

    def decision(self, number: int, share: _Share) -> Decision:
        """`share`: the conversions that the class pays for."""
        found, taken = self.found, self.taken
        members = found.ties.members[number]
        nodes = [member - found.ties.n_inputs for member in members]
        node = self.program.nodes[nodes[0]]
        strategy = found.strategies[nodes[0]]
        rule = self.rule_of(node)
        alternatives = _alternatives(found, number)
        inside_s = strategy.cost.extra_s
        own_s = float(found.model.seconds[number][found.choice[number]]) - inside_s
        wishes = [wish.says for wish in self.constraints.items.get(members[0], ()) if wish.says]
        one_path = len({self.program.nodes[k].path for k in nodes}) == 1
        return Decision(
            node.path if one_path else starred(node.path),
            node.target,
            node.phase,
            "" if rule is None else rule.text(),
            strategy.name,
            strategy.axes,
            _texts(strategy.ins, taken),
            _optional_texts(strategy.outs, taken),
            own_s,
            inside_s + share.seconds / len(nodes),
            share.collectives,
            _reason(wishes, alternatives, rule, len(found.model.options[number]), self.budgeted),
            tuple(self.keys[k] for k in nodes),
            alternatives,
        )


def _texts(layouts: Sequence[Layout], taken: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(layout.text(taken) for layout in layouts)


def _optional_texts(layouts: Sequence[Layout | None], taken: tuple[str, ...]) -> tuple[str | None, ...]:
    return tuple(None if layout is None else layout.text(taken) for layout in layouts)


def _reason(
    wishes: Sequence[str], alternatives: Sequence[Alternative], rule: Rule | None, count: int, budgeted: bool
) -> str:
    if wishes:
        return "wished: " + "; ".join(wishes)
    if rule is None and count == 1:
        return "no rule: runs replicated"
    if count == 1:
        return "the only strategy"
    possible = [alternative for alternative in alternatives if alternative.more_s < BIG]
    if not possible:
        return "all others clash with their neighbours"
    best = possible[0]
    # Under a budget the faster one may hold more.
    if budgeted and best.more_s < -EQUAL_S:
        return f"{best.strategy} would save {time_text(-best.more_s)}, but not memory"
    if best.more_s <= EQUAL_S:
        return f"as good as {best.strategy}"
    return f"next best {best.strategy} +{time_text(best.more_s)}"


def _alternatives(found: Assignment, number: int) -> tuple[Alternative, ...]:
    """The options that a class did not take, cheapest first."""
    if len(found.model.options[number]) == 1:
        return ()
    chosen = found.choice[number]
    row = found.model.row(number, found.choice)
    weight = found.model.weight[number]
    chosen_compute_s = _compute_s(found, number, chosen)
    alternatives = []
    for option, strategy in enumerate(found.model.options[number]):
        if option == chosen:
            continue
        more_s = float(row[option] - row[chosen])
        # what clashes with a neighbour is not merely slow
        if more_s >= BIG / 2:
            more_s = float("inf")
        more_compute_s = weight * (_compute_s(found, number, option) - chosen_compute_s)
        alternatives.append(Alternative(strategy.name, strategy.axes, more_s, more_compute_s))
    return tuple(sorted(alternatives, key=lambda alternative: alternative.more_s))


def _compute_s(found: Assignment, number: int, option: int) -> float:
    """Seconds of one operator without the communication inside it."""
    return float(found.model.seconds[number][option]) - found.model.options[number][option].cost.extra_s


def _paid(found: Assignment, mesh: Mesh) -> dict[int, _Share]:
    """Class -> the conversions that its operands were first to want; outputs pay with their producer."""
    paid: dict[int, _Share] = {}
    for position, coded in enumerate(found.model.coded):
        flow = coded.flow
        # Who is the first to want a layout pays for it; the others read the same copy.
        source, targets = coded.at(found.choice)
        payer_of = _payers(flow, coded.layouts[source], [coded.layouts[target] for target in targets])
        for before, after, seconds in found.model.steps(position, found.choice):
            payer = payer_of.get(after, flow.producer)
            if payer < 0 or found.ties.members[payer][0] < found.ties.n_inputs:
                payer = flow.producer  # a donated output goes back to its leaf at its producer's expense
            names = _collectives(before, after, mesh, flow.itemsize)
            paid[payer] = paid.get(payer, _Share()).plus(flow.count * seconds, names)
    return paid


def _payers(flow: Flow, source: Layout, targets: Sequence[Layout]) -> dict[Layout, int]:
    payer: dict[Layout, int] = {}
    for use, target in zip(flow.uses, targets, strict=True):
        payer.setdefault(target, use[0])
    if flow.settle is not None:
        payer.setdefault(settled_layout(source, flow.settle), flow.producer)
    return payer


def _collectives(before: Layout, after: Layout, mesh: Mesh, itemsize: int) -> list[str]:
    """`all_gather dp`, ...: what a conversion between two layouts runs."""
    names = []
    for move in conversion(before, after, mesh, itemsize).moves:
        if move.target not in KINDS:
            continue
        axes: tuple[object, ...] = ()
        if move.args and isinstance(move.args[0], tuple):
            axes = move.args[0]
        names.append(f"{move.target} {','.join(map(str, axes))}".strip())
    return names


def _leaf(
    program: Program,
    found: Assignment,
    position: int,
    readers: Mapping[int, Sequence[str]],
    constraints: Constraints,
    taken: tuple[str, ...],
) -> Leaf:
    id = program.inputs[position]
    value = program.values[id]
    wishes = [wish.says for wish in constraints.items.get(position, ()) if wish.says]
    return Leaf(
        value.name,
        value.role,
        value.shape,
        str(value.dtype).removeprefix("torch."),
        found.inputs[id].text(taken),
        "wished: " + "; ".join(wishes) if wishes else "",
        tuple(dict.fromkeys(readers.get(id, ())))[:SHOWN],
        _specs(found, found.ties.of_item[position], taken),
        constraints.at.get(position),
    )


def _readers(program: Program) -> dict[int, list[str]]:
    """Input -> the operators that read it, in the order of the program."""
    readers: dict[int, list[str]] = {id: [] for id in program.inputs}
    for node in program.nodes:
        for id in node.refs:
            if id in readers:
                readers[id].append(f"{node.path} {target_text(node.target)}".strip())
    return readers


def _specs(found: Assignment, number: int, taken: tuple[str, ...]) -> tuple[Alternative, ...]:
    """The best other specs of a class of leaves."""
    chosen = found.choice[number]
    row = found.model.row(number, found.choice)
    others = []
    for option, strategy in enumerate(found.model.options[number]):
        layout = strategy.outs[0]
        more_s = float(row[option] - row[chosen])
        if option != chosen and layout is not None and more_s < BIG / 2:
            others.append(Alternative(repr(layout.text(taken)), strategy.axes, more_s, 0.0))
    return tuple(sorted(others, key=lambda other: other.more_s)[:SHOWN])


def constraints_from(plan: Plan, program: Program, mesh: Mesh, rule_of: RuleOfNode = lambda node: None) -> Constraints:
    """Decide as `plan` did wherever it speaks: nodes by key, input leaves by name. Other nodes and leaves stay open.

    What no search offers by itself, such as weights in stripes, is offered. Raises PlanError where the mesh has other
    axes, or the plan knows nothing of this program.
    """
    # Specs name axes, so those of another mesh mean nothing here.
    if tuple(plan.mesh) != tuple(mesh.axes):
        raise PlanError(
            f"the plan is for mesh {dict(plan.mesh)}, this one is {dict(mesh.axes)}; plan anew or use the plan's mesh"
        )
    decision_of: dict[str, Decision] = {}
    for decided in plan.decisions:
        decision_of.update(dict.fromkeys(decided.keys, decided))
    leaf_of = {leaf.name: leaf for leaf in plan.inputs}
    items: dict[int, tuple[Constraint, ...]] = {}
    at: dict[int, At] = {}
    for position, id in enumerate(program.inputs):
        value = program.values[id]
        leaf = leaf_of.get(value.name)
        if leaf is None or leaf.shape != value.shape:
            continue
        says = f"the plan's {leaf.spec!r} for {leaf.name}"
        layout = bind(leaf.spec, mesh, leaf.shape)
        stripes = () if is_major(layout) else (leaf_strategy(layout),)
        items[position] = (_keeps((leaf.spec,), (), leaf.spec, mesh, says, stripes),)
        if leaf.at is not None:
            at[position] = leaf.at
    offered: dict[tuple[str, Call], tuple[Strategy, ...]] = {}
    # Items are numbered through: first the inputs, then the nodes.
    keyed = zip(program.nodes, node_keys(program), strict=True)
    for item, (node, key) in enumerate(keyed, len(program.inputs)):
        decision = decision_of.get(key)
        if decision is None:
            continue
        says = f"the plan's {decision.strategy} for {key}"
        call, _ = call_in(program, node)
        like = (decision.keys[0], call)  # identical layers ask the same
        if like not in offered:
            offered[like] = strategies_in(decision, call, rule_of(node), mesh)
        items[item] = (_keeps(decision.outs, decision.ins, decision.strategy, mesh, says, offered[like]),)
    if not items:
        raise PlanError("the plan matches no operator and no input of this step; it was made for another function")
    return Constraints(items, at=at)


def strategies_in(decision: Decision, call: Call, rule: Rule | None, mesh: Mesh) -> tuple[Strategy, ...]:
    """The strategy that a decision describes, where no enumeration has it: some operand lies in stripes."""
    if rule is None or len(decision.ins) != len(call.ins):  # a call of the same name that reads something else
        return ()
    try:
        layouts = [bind(text, mesh, given.shape) for text, given in zip(decision.ins, call.ins, strict=True)]
    except SpecError:  # sizes are others here, and do not divide
        return ()
    if all(map(is_major, layouts)):
        return ()
    strategy = as_operands_lie(call, rule, layouts, decision.axes)
    return () if strategy is None else (strategy,)


def _keeps(
    outs: tuple[str | None, ...],
    ins: tuple[str, ...],
    name: str,
    mesh: Mesh,
    says: str,
    offers: tuple[Strategy, ...],
) -> Constraint:
    """Layouts as a plan has them.

    Where axes are decided one after another, those that have been decided lie as there.
    """
    taken = names_of(mesh)
    axes = tuple(axis for axis in mesh.axis_names if mesh.axis_size(axis) > 1)

    def accepts(strategy: Strategy) -> bool:
        return _texts(strategy.ins, taken) == ins and _optional_texts(strategy.outs, taken) == outs

    def accepts_on(decided: tuple[str, ...]) -> Callable[[Strategy], bool]:
        def holds(strategy: Strategy) -> bool:
            # A plan says layouts as text; of them only the axes that are decided by now are compared.
            pairs = [*zip(strategy.ins, ins, strict=True), *zip(strategy.outs, outs, strict=True)]
            for layout, text in pairs:
                if layout is None or not text:
                    continue
                if not _alike(layout, bind(text, mesh, layout.shape), decided):
                    return False
            return True

        return holds

    return Constraint(("plan", name, ins, outs), accepts, says, offers, axes, partly=accepts_on)


def _alike(one: Layout, other: Layout, axes: Collection[str]) -> bool:
    """Whether two layouts place these axes alike."""
    return _placed(one, axes) == _placed(other, axes)


def _placed(layout: Layout, axes: Collection[str]) -> tuple[list[list[str | None]], list[tuple[str, str]]]:
    """What a layout does with some axes: those on each dim, and those that are pending."""
    dims = []
    for dim in layout.dims:
        dims.append([axis for _, axis in dim if axis in axes])
    return dims, [(axis, how) for axis, how in layout.pending if axis in axes]
