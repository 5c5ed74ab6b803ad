"""From an assignment to a Plan: what each decision costs, which collectives it needs, what else could have been.

The communication of a decision is the conversions that its operands were the first to ask for; a conversion that an
earlier operator already asked for is that one's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import attrs

from colofunc.errors import PlanError
from colofunc.mesh import KINDS, Mesh
from colofunc.planner.describe import describe, repeated
from colofunc.planner.plan import Alternative, AxisUse, Decision, Leaf, Plan
from colofunc.planner.plan_table import size_text, time_text
from colofunc.planner.sharding.assign import Assignment
from colofunc.planner.sharding.classes import starred
from colofunc.planner.sharding.constraints import NONE, Constraint, Constraints
from colofunc.planner.sharding.eliminate import BIG
from colofunc.planner.sharding.flows import Flow, settled
from colofunc.program.ir import Node, Program, Ref
from colofunc.program.passes.simplify_known import ATTENTION
from colofunc.program.text import target_text
from colofunc.spec.conversions.conversion import conversion
from colofunc.spec.layout import At, Layout
from colofunc.spec.rule import Rule, Strategy
from colofunc.spec.spec import bind, names_of

# A mask of more bytes than this is named in the plan: 16,384 rows and columns of bool.
MAX_MASK_BYTES = 1 << 27
STAGES = "stages: parameters and their work at its indices"  # of an axis at whose indices values exist
SHOWN = 4  # readers and other specs of a leaf that a plan keeps
RuleOf = Callable[[Node], Rule | None]


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
    rule_of: RuleOf = lambda node: None,
    named: Mapping[str, str] | None = None,
    constraints: Constraints = NONE,
    budget_bytes: int | None = None,
) -> Plan:
    """The plan of an assignment. `named`: axis -> the named plan that speaks for it; other axes were found."""
    keys = node_keys(program)
    budgeted = budget_bytes is not None
    paid = _paid(found, mesh)
    taken = names_of(mesh)
    decisions = []
    for c, members in enumerate(found.ties.members):
        if members[0] >= found.ties.n_inputs:
            nodes = [m - found.ties.n_inputs for m in members]
            share = paid.get(c, _Share())
            decisions.append(_decide(program, found, c, nodes, keys, share, rule_of, constraints, budgeted, taken))
    readers = _readers(program)
    leaves = tuple(_leaf(program, found, k, readers, constraints, taken) for k in range(len(program.inputs)))
    by = named or {}
    once = [program.inputs[k] for k, again in constraints.regather.items() if again is False]
    said = describe(program, mesh, found.strategies, found.inputs, once, any(constraints.scatter.values()))
    staged = {axis for axis, _ in constraints.at.values()}
    said = tuple((axis, STAGES if axis in staged else text) for axis, text in said)
    uses = tuple(AxisUse(a, text, by.get(a, "found")) for a, text in said)
    return Plan(
        mesh.axes,
        mesh.topology.name,
        tuple(decisions),
        leaves,
        tuple(layout.text(taken) for layout in found.outputs),
        uses,
        found.cost_s,
        sum(share.seconds for share in paid.values()) + sum(s.cost.extra_s for s in found.strategies),
        found.peak_bytes,
        budget_bytes,
        tuple(program.values[i].name for i in program.inputs if i in found.regather),
        notes=(*_dense_masks(program), *_repeated(program, mesh, found, by)),
    )


def _repeated(program: Program, mesh: Mesh, found: Assignment, named: Mapping[str, str]) -> tuple[str, ...]:
    """A line for each axis of a plan of tensor parallelism that leaves products whole."""
    axes = [a for a in mesh.axis_names if mesh.axis_size(a) > 1 and named.get(a, "").startswith("tensor")]
    lines = (repeated(program, mesh, found.strategies, axis) for axis in axes)
    return tuple(line for line in lines if line)


def _dense_masks(program: Program) -> tuple[str, ...]:
    """A line for each large mask that attention reads as a tensor: no rank sees less of it than its own rows."""
    readers: dict[int, Node] = {}
    for node in program.nodes:
        where = ATTENTION.get(node.target)
        if where is not None and isinstance(node.args[where[0]], Ref):
            readers.setdefault(node.args[where[0]].id, node)
    notes = []
    for vid, node in readers.items():
        mask = program.values[vid]
        if mask.nbytes > MAX_MASK_BYTES:
            notes.append(
                f"{node.path or 'attention'} reads a dense mask {mask.shape} of {size_text(mask.nbytes)}: it is no "
                "band, and not made by & "
                "of comparisons of a vector per row with a vector per column (position[j] <= position[i], document[j] "
                "== document[i], "
                "keep[j]). Try: a bool mask that is written so"
            )
    return tuple(notes)


def _decide(
    program: Program,
    found: Assignment,
    c: int,
    nodes: Sequence[int],
    keys: Sequence[str],
    share: _Share,
    rule_of: RuleOf,
    constraints: Constraints,
    budgeted: bool,
    taken: tuple[str, ...],
) -> Decision:
    node = program.nodes[nodes[0]]
    strategy = found.strategies[nodes[0]]
    rule = rule_of(node)
    alternatives = _alternatives(found, c)
    inside = strategy.cost.extra_s
    own = float(found.model.seconds[c][found.choice[c]]) - inside
    wishes = [w.says for w in constraints.items.get(found.ties.members[c][0], ()) if w.says]
    return Decision(
        starred(node.path) if len({program.nodes[n].path for n in nodes}) > 1 else node.path,
        node.target,
        node.phase,
        "" if rule is None else rule.text(),
        strategy.name,
        strategy.axes,
        tuple(layout.text(taken) for layout in strategy.ins),
        tuple(None if layout is None else layout.text(taken) for layout in strategy.outs),
        own,
        inside + share.seconds / len(nodes),
        share.collectives,
        _reason(wishes, alternatives, rule, len(found.model.options[c]), budgeted),
        tuple(keys[n] for n in nodes),
        alternatives,
    )


def _reason(
    wishes: Sequence[str], alternatives: Sequence[Alternative], rule: Rule | None, count: int, budgeted: bool
) -> str:
    if wishes:
        return "wished: " + "; ".join(wishes)
    if rule is None and count == 1:
        return "no rule: runs replicated"
    if count == 1:
        return "the only strategy"
    finite = [a for a in alternatives if a.more_s < BIG]
    if not finite:
        return "all others clash with their neighbours"
    if budgeted and finite[0].more_s < -1e-9:
        return f"{finite[0].strategy} would save {time_text(-finite[0].more_s)}, but not memory"
    if finite[0].more_s <= 1e-9:
        return f"as good as {finite[0].strategy}"
    return f"next best {finite[0].strategy} +{time_text(finite[0].more_s)}"


def _alternatives(found: Assignment, c: int) -> tuple[Alternative, ...]:
    chosen = found.choice[c]
    if len(found.model.options[c]) == 1:
        return ()
    row = found.model.row(c, found.choice)
    out = []
    for o, s in enumerate(found.model.options[c]):
        if o != chosen:
            more = float(row[o] - row[chosen])
            more_compute_s = found.model.weight[c] * (_computing(found, c, o) - _computing(found, c, chosen))
            out.append(Alternative(s.name, s.axes, float("inf") if more >= BIG / 2 else more, more_compute_s))
    return tuple(sorted(out, key=lambda a: a.more_s))


def _computing(found: Assignment, c: int, option: int) -> float:
    """Seconds of one operator without the communication inside it."""
    return float(found.model.seconds[c][option]) - found.model.options[c][option].cost.extra_s


def _paid(found: Assignment, mesh: Mesh) -> dict[int, _Share]:
    """Class -> the conversions that its operands were first to want; outputs pay with their producer."""
    paid: dict[int, _Share] = {}
    for f, coded in enumerate(found.model.coded):
        flow = coded.flow
        source, targets = coded.at(found.choice)
        payer = _payers(flow, coded.layouts[source], [coded.layouts[t] for t in targets])
        for src, dst, seconds in found.model.steps(f, found.choice):
            c = payer.get(dst, flow.producer)
            if c < 0 or found.ties.members[c][0] < found.ties.n_inputs:
                c = flow.producer  # a donated output goes back to its leaf at its producer's expense
            paid[c] = paid.get(c, _Share()).plus(flow.count * seconds, _collectives(src, dst, mesh, flow.itemsize))
    return paid


def _payers(flow: Flow, source: Layout, targets: Sequence[Layout]) -> dict[Layout, int]:
    payer: dict[Layout, int] = {}
    for use, target in zip(flow.uses, targets, strict=True):
        payer.setdefault(target, use[0])
    if flow.settle is not None:
        payer.setdefault(settled(source, flow.settle), flow.producer)
    return payer


def _collectives(src: Layout, dst: Layout, mesh: Mesh, itemsize: int) -> list[str]:
    moves = conversion(src, dst, mesh, itemsize).moves
    names = []
    for move in moves:
        if move.target in KINDS:
            axes = move.args[0] if move.args and isinstance(move.args[0], tuple) else ()
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


def _specs(found: Assignment, c: int, taken: tuple[str, ...]) -> tuple[Alternative, ...]:
    """The best other specs of a class of leaves."""
    chosen = found.choice[c]
    row = found.model.row(c, found.choice)
    others = []
    for o, strategy in enumerate(found.model.options[c]):
        layout = strategy.outs[0]
        more_s = float(row[o] - row[chosen])
        if o != chosen and layout is not None and more_s < BIG / 2:
            others.append(Alternative(repr(layout.text(taken)), strategy.axes, more_s, 0.0))
    return tuple(sorted(others, key=lambda other: other.more_s)[:SHOWN])


def constraints_from(plan: Plan, program: Program, mesh: Mesh) -> Constraints:
    """Decide as `plan` did wherever it speaks: nodes by key, input leaves by name. Other nodes and leaves stay open.

    Raises PlanError where the mesh has other axes, or the plan knows nothing of this program.
    """
    if tuple(plan.mesh) != tuple(mesh.axes):
        raise PlanError(
            f"the plan is for mesh {dict(plan.mesh)}, this one is {dict(mesh.axes)}; plan anew or use the plan's mesh"
        )
    of_key = {key: d for d in plan.decisions for key in d.keys}
    of_leaf = {leaf.name: leaf for leaf in plan.inputs}
    items: dict[int, tuple[Constraint, ...]] = {}
    at: dict[int, At] = {}
    n = len(program.inputs)
    for k, id in enumerate(program.inputs):
        leaf = of_leaf.get(program.values[id].name)
        if leaf is not None and leaf.shape == program.values[id].shape:
            items[k] = (_keeps((leaf.spec,), (), leaf.spec, mesh, f"the plan's {leaf.spec!r} for {leaf.name}"),)
            at.update({} if leaf.at is None else {k: leaf.at})
    for k, key in enumerate(node_keys(program)):
        d = of_key.get(key)
        if d is not None:
            items[n + k] = (_keeps(d.outs, d.ins, d.strategy, mesh, f"the plan's {d.strategy} for {key}"),)
    if not items:
        raise PlanError("the plan matches no operator and no input of this step; it was made for another function")
    return Constraints(items, at=at)


def _keeps(outs: tuple[str | None, ...], ins: tuple[str, ...], name: str, mesh: Mesh, says: str) -> Constraint:
    """Layouts as a plan has them.

    Where axes are decided one after another, those that have been decided lie as there.
    """
    taken, axes = names_of(mesh), tuple(a for a in mesh.axis_names if mesh.axis_size(a) > 1)

    def accepts(s: Strategy) -> bool:
        from_ins = tuple(layout.text(taken) for layout in s.ins)
        from_outs = tuple(None if layout is None else layout.text(taken) for layout in s.outs)
        return from_ins == ins and from_outs == outs

    def partly(decided: tuple[str, ...]) -> Callable[[Strategy], bool]:
        def holds(s: Strategy) -> bool:
            pairs = [*zip(s.ins, ins, strict=True), *zip(s.outs, outs, strict=True)]
            return all(
                _alike(layout, bind(text, mesh, layout.shape), decided)
                for layout, text in pairs
                if layout is not None and text
            )

        return holds

    return Constraint(("plan", name, ins, outs), accepts, says, axes=axes, partly=partly)


def _alike(a: Layout, b: Layout, axes: Collection[str]) -> bool:
    """Whether two layouts place these axes alike."""

    def on(layout: Layout) -> list[list[str | None]]:
        return [[x for _, x in dim if x in axes] for dim in layout.dims]

    def pending(layout: Layout) -> list[tuple[str, str]]:
        return [p for p in layout.pending if p[0] in axes]

    return on(a) == on(b) and pending(a) == pending(b)
