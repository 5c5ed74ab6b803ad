"""The planner's search against trying every choice, and what it finds on named programs."""

import itertools
from collections.abc import Callable

import attrs
import numpy as np
import pytest
import torch
from choice_problem import Problem, cost, solve
from interpreter import run_reference

from colofunc.errors import PlanError
from colofunc.executors.simulated import SimulatedProgram
from colofunc.mesh import Mesh
from colofunc.planner.describe import describe
from colofunc.planner.sharding.assign import Assignment, assign
from colofunc.planner.sharding.by_axes import assign_by_axes
from colofunc.planner.sharding.classes import starred, tie
from colofunc.planner.sharding.constraints import Constraint, Constraints, leaf_strategy
from colofunc.planner.sharding.search import Effort
from colofunc.program.ir import Node, Program, Ref, Value
from colofunc.program.lower import Choice, call_of, lower
from colofunc.program.memory import memory
from colofunc.program.passes.inplace import in_place
from colofunc.program.tracing.trace import record_local, trace
from colofunc.spec.conversions.conversion import conversion_s
from colofunc.spec.layout import Layout
from colofunc.spec.rule import Cost, Strategy
from colofunc.spec.rules import rule_for, strategies_for
from colofunc.spec.strategies import enumerate_layouts, enumerate_strategies
from colofunc.testing.parts import part

GREEDY = Effort(exact_elements=1)  # never exact: the neighbourhood search alone


def brute_force(problem: Problem) -> tuple[int, ...]:
    """The best of all choices by trying each."""
    choices = itertools.product(*(range(len(costs)) for costs in problem.costs))
    return min(choices, key=lambda choice: cost(problem, choice))


MESH = Mesh(dp=2, tp=4, topology="8xa100-80g")


# ---- the pure problem ----


def random_problem(seed: int, most: int = 7) -> Problem:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 5, int(rng.integers(2, most)))
    costs = tuple(rng.random(n) for n in sizes)
    tables = []
    for _ in range(int(rng.integers(0, 2 * len(sizes)))):
        a, b = (int(v) for v in rng.integers(0, len(sizes), 2))
        tables.append(((a, b), int(rng.integers(1, 4)) * 2 * rng.random((sizes[a], sizes[b]))))
    three = tuple(int(v) for v in rng.permutation(len(sizes))[:3])
    return Problem(costs, (*tables, (three, rng.random(tuple(sizes[list(three)])))))


@pytest.mark.parametrize("seed", range(20))
def test_solve_is_exact(seed: int) -> None:
    problem = random_problem(seed)
    assert cost(problem, solve(problem)) == pytest.approx(cost(problem, brute_force(problem)), rel=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_search_without_exact_solution_is_close(seed: int) -> None:
    problem = random_problem(seed)
    found = solve(problem, effort=attrs.evolve(GREEDY, pass_elements=64))
    assert cost(problem, found) <= 1.02 * cost(problem, brute_force(problem))


def test_solve_is_the_same_twice_and_for_large_problems() -> None:
    rng = np.random.default_rng(0)
    table = rng.random((12, 12))
    n = 120
    costs = tuple(rng.random(12) for _ in range(n))
    problem = Problem(costs, tuple(((i, int(j)), table) for i in range(n) for j in rng.integers(0, n, 2)))
    first = solve(problem)
    assert first == solve(problem)
    # no single change improves what the search returns
    for v in range(n):
        for i in range(12):
            assert cost(problem, (*first[:v], i, *first[v + 1 :])) >= cost(problem, first) - 1e-9


def test_forbidden_choices_are_avoided() -> None:
    either, never = np.array([0.0, 5.0]), np.array([[np.inf, 0.0], [np.inf, np.inf]])
    assert solve(Problem((either, either), (((0, 1), never),))) == (0, 1)


# ---- small programs against all assignments ----


def random_program(seed: int) -> Program:
    """Up to ten operators on two inputs; values are used many times, some operators are matrix products."""
    rng = np.random.default_rng(seed)
    shape = (1024, 1024)
    values = {i: Value(i, shape, torch.float32, name, role) for i, name, role in ((0, "w", "param"), (1, "x", "batch"))}
    nodes = []
    for _ in range(int(rng.integers(4, 11))):
        a, b = (int(i) for i in rng.integers(max(0, len(values) - 4), len(values), 2))
        target = ("aten.mm.default", "aten.add.Tensor", "aten.tanh.default", "aten.t.default")[int(rng.integers(0, 4))]
        args = (Ref(a), Ref(b)) if target[5:7] in ("mm", "ad") else (Ref(a),)
        values[len(values)] = Value(len(values), shape, torch.float32)
        nodes.append(Node(target, args, (), (len(values) - 1,)))
    used = {r for n in nodes for r in n.refs}
    outputs = tuple(i for i in values if i not in used and i > 1)
    return Program((0, 1), tuple(nodes), outputs, values)


def candidates_of(
    program: Program, mesh: Mesh, most: int | None = None, seed: int = 0
) -> Callable[[Node | Value], tuple]:
    """All strategies, or `most` of them drawn at random."""
    rng = np.random.default_rng(seed)
    drawn: dict[int, tuple] = {}

    def candidates(item: Node | Value) -> tuple:
        if id(item) not in drawn:
            if isinstance(item, Value):
                found = enumerate_layouts(item.shape, mesh)
            else:
                call, _ = call_of(item, program.values)
                found = (*enumerate_strategies(call, rule_for(call), mesh), *strategies_for(call, mesh))
            if most is not None and len(found) > most:
                found = tuple(found[i] for i in sorted(rng.permutation(len(found))[:most]))
            drawn[id(item)] = found
        return drawn[id(item)]

    return candidates


def all_costs(program: Program, mesh: Mesh, candidates: Callable) -> np.ndarray:
    """The true cost of every assignment, written anew: strategies, and conversions from the nearest copy."""
    items = [program.values[i] for i in program.inputs] + list(program.nodes)
    options = [candidates(item) for item in items]
    grid = np.indices([len(o) for o in options]).reshape(len(items), -1)
    numbers: dict[Layout, int] = {}
    outs: dict[int, np.ndarray] = {}
    wants: dict[int, list[np.ndarray]] = {i: [] for i in program.values}
    total = np.zeros(grid.shape[1])

    def number(layouts: list[Layout], picks: np.ndarray) -> np.ndarray:
        return np.array([numbers.setdefault(x, len(numbers)) for x in layouts])[picks]

    for item, strategies, picks in zip(items, options, grid, strict=True):
        if isinstance(item, Value):
            outs[item.id] = number(list(strategies), picks)
            continue
        own = [
            (mesh.compute_s(s.cost.flops, s.cost.nbytes, "float32") if s.cost.flops or s.cost.nbytes else 0.0)
            + s.cost.extra_s
            for s in strategies
        ]
        total += np.array(own)[picks]
        outs[item.outs[0]] = number([s.outs[0] for s in strategies], picks)
        for k, ref in enumerate(item.refs):
            wants[ref].append(number([s.ins[k] for s in strategies], picks))
    for id in program.outputs:
        rest = np.array([numbers.setdefault(x.with_pending(()), len(numbers)) for x in list(numbers)])
        wants[id].append(rest[outs[id]])
    every = list(numbers)
    table = np.array(
        [[0.0 if a is b else conversion_s(a, b, mesh, 4) if a.shape == b.shape else 0.0 for b in every] for a in every]
    )
    for id, targets in wants.items():
        for k, target in enumerate(targets):
            total += np.minimum.reduce([table[have, target] for have in (outs[id], *targets[:k])])
    return total


@pytest.mark.parametrize("effort", [Effort(), GREEDY], ids=["exact", "search"])
@pytest.mark.parametrize("seed", range(20))
def test_small_programs_are_within_two_percent_of_the_optimum(seed: int, effort: Effort) -> None:
    program = random_program(seed)
    mesh = Mesh(tp=4, topology="8xa100-80g")
    candidates = candidates_of(program, mesh, most=3, seed=seed)
    best = all_costs(program, mesh, candidates).min()
    found = assign(program, mesh, candidates, convert_s=conversion_s, effort=effort)
    assert best * (1 - 1e-9) <= found.cost_s <= 1.02 * best


# ---- named programs ----


def mlp(width: int, batch: int, layers: int) -> Program:
    """A step of plain gradient descent on residual blocks `h + w2 gelu(w1 h)`; state is argument 0."""

    def step(params: dict, batch: tuple) -> tuple:
        h, y = batch
        for i in range(layers):
            up = torch.nn.functional.gelu(torch.nn.functional.linear(h, params[f"h.{i}.w1"]))
            h = h + torch.nn.functional.linear(up, params[f"h.{i}.w2"])
        loss = ((h - y) ** 2).mean()
        grads = torch.autograd.grad(loss, list(params.values()))
        return {k: p - 0.1 * g for (k, p), g in zip(params.items(), grads, strict=True)}, loss.detach()

    def weight(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, device="meta", requires_grad=True)

    shapes = {"w1": (4 * width, width), "w2": (width, 4 * width)}
    params = {f"h.{i}.{w}": weight(*shape) for i in range(layers) for w, shape in shapes.items()}
    x = torch.empty(batch, width, device="meta")
    program = trace(step, (params, (x, x))).program
    return attrs.evolve(program, aliases=tuple((i, i) for i in range(len(params))))


def plan(program: Program, mesh: Mesh = MESH, **options: object) -> Assignment:
    return assign(program, mesh, candidates_of(program, mesh), convert_s=conversion_s, **options)  # type: ignore[arg-type]


def batch_axes(program: Program, found: Assignment) -> set[str]:
    return {a for i in program.inputs if program.values[i].role == "batch" for _, a in found.inputs[i].dims[0] if a}


def test_large_batches_are_data_parallel() -> None:
    program = mlp(256, 1 << 16, 2)
    found = plan(program)
    assert batch_axes(program, found) == {"dp", "tp"}


def test_a_budget_is_met_and_shards_the_states() -> None:
    program = mlp(2048, 1 << 12, 4)
    params = [i for i in program.inputs if program.values[i].role == "param"]
    whole = sum(program.values[i].nbytes for i in params)
    pinned = Constraints({0: (), **{k: (_copies(),) for k, i in enumerate(program.inputs) if i in params}})
    rich = plan(program, constraints=pinned)
    assert all(rich.inputs[i].is_replicated for i in params)
    tight = plan(program, budget_bytes=rich.peak_bytes * 2 // 3)
    assert tight.peak_bytes <= rich.peak_bytes * 2 // 3
    assert sum(tight.inputs[i].local_numel * 4 for i in params) <= whole // 4


def said(program: Program, mesh: Mesh, found: Assignment) -> str:
    return " · ".join(words for _, words in describe(program, mesh, found.strategies, found.inputs))


def test_the_three_named_cases_are_found() -> None:
    dp, tp = Mesh(dp=4, topology="8xa100-80g"), Mesh(tp=4, topology="8xa100-80g")
    small = mlp(256, 1 << 16, 2)
    copies = Constraints({k: (_copies(),) for k, i in enumerate(small.inputs) if small.values[i].role == "param"})
    assert said(small, dp, plan(small, dp, constraints=copies)) == "data parallel"
    large = mlp(2048, 1 << 14, 4)
    limit = plan(large, dp, constraints=Constraints({0: (_copies(),)})).peak_bytes
    assert said(large, dp, plan(large, dp, budget_bytes=limit - (1 << 20))) == "ZeRO-3"
    wide = mlp(8192, 2048, 2)
    assert said(wide, tp, plan(wide, tp)).startswith("Megatron column/row")


def test_a_budget_forces_parameters_to_be_gathered_again() -> None:
    mesh = Mesh(dp=4, topology="8xa100-80g")
    program = mlp(64, 256, 6)
    every = candidates_of(program, mesh)

    def zero3(item: Node | Value) -> list:
        """Parameters split, products along the batch: the gathered parameters are what can be saved."""
        if isinstance(item, Value):
            return [lay for lay in every(item) if lay.axes or item.role != "param"]
        return [s for s in every(item) if "linear" not in item.target or (s.axes and s.axes[0][1].startswith("b"))]

    kept = assign(program, mesh, zero3, convert_s=conversion_s)
    found = assign(program, mesh, zero3, convert_s=conversion_s, budget_bytes=kept.peak_bytes * 3 // 4)
    assert not kept.regather
    assert found.regather == {i for i in program.inputs if program.values[i].role == "param"}
    choices = [
        Choice(s, rule_for(call_of(n, program.values)[0])) for n, s in zip(program.nodes, found.strategies, strict=True)
    ]

    def local(regather: frozenset[int]) -> Program:
        return lower(program, choices, found.inputs, found.outputs, mesh, record_local, regather)

    once, again = local(frozenset()), local(found.regather)
    peaks = [memory(in_place(p)).peak_bytes["device"] for p in (once, again)]
    assert peaks[1] <= kept.peak_bytes * 3 // 4 < peaks[0]
    torch.manual_seed(0)
    inputs = [0.1 * torch.randn(program.values[i].shape) for i in program.inputs if i not in program.constants]
    shards = [
        [part(x, found.inputs[i], mesh, rank) for rank in range(mesh.size)]
        for i, x in zip(program.inputs, inputs, strict=False)
    ]
    outs = [SimulatedProgram(p, mesh)([list(map(torch.clone, x)) for x in shards]) for p in (once, again)]
    for a, b in zip(*outs, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    whole = run_reference(program, inputs)
    for out, expected, layout in zip(outs[1], whole, found.outputs, strict=True):
        for rank, x in enumerate(out):
            torch.testing.assert_close(x, part(expected, layout, mesh, rank), rtol=1e-5, atol=1e-5)


def _copies() -> Constraint:
    return Constraint("copies", lambda s: s.outs[0] is not None and s.outs[0].is_replicated, "copies of parameters")


def test_an_impossible_budget_says_the_least_and_what_dominates() -> None:
    program = mlp(512, 64, 2)
    with pytest.raises(
        PlanError, match=r"budget of 1 KiB per rank cannot be met.*least peak is estimated as .*(param|activation)"
    ):
        plan(program, budget_bytes=1024)


def test_layers_are_tied_and_cost_the_same_as_untied() -> None:
    program = mlp(512, 4096, 12)
    assert tie(program).size == tie(mlp(512, 4096, 24)).size < 100
    found = plan(program)
    assert len(found.strategies) == len(program.nodes)
    untied = plan(program, tied=False)
    assert found.cost_s <= 1.02 * untied.cost_s


def test_ties_keep_constrained_items_apart() -> None:
    program = mlp(64, 64, 12)
    free = tie(program)
    item = free.members[free.of_input(10)][0]
    apart = tie(program, lambda i: i == item)
    assert apart.of_item.count(apart.of_item[item]) == 1


def test_starred() -> None:
    assert starred("h.12.attn.0") == "h.*.attn.*"


def test_constraint_that_cannot_be_met_names_operator_and_wish() -> None:
    program = mlp(64, 64, 1)
    never = Constraint("never", lambda s: False, "wish 'batch' -> whole")
    with pytest.raises(
        PlanError, match=r"wish 'batch' -> whole cannot be done: input 'params.h.0.w1' of shape \(256, 64\) has"
    ):
        plan(program, constraints=Constraints({0: (never,)}))


def test_donated_leaves_return_to_their_layout() -> None:
    program = mlp(256, 512, 1)
    found = plan(program)
    for out, leaf in program.aliases:
        assert found.outputs[out] is found.inputs[program.inputs[leaf]]
    assert not any(layout.pending for layout in found.outputs)


def test_the_plan_is_deterministic() -> None:
    program = mlp(256, 512, 10)
    first, second = plan(program), plan(program)
    assert [s.name for s in first.strategies] == [s.name for s in second.strategies]


def by_axes_candidates(program: Program, mesh: Mesh) -> Callable:
    """Candidates over some axes on top of fixed ones, by filtering the joint enumeration."""
    whole = candidates_of(program, mesh)

    def only(layout: Layout | None, axes: set[str]) -> object:
        if layout is None:
            return None
        dims = tuple(tuple(a for _, a in dim if a in axes) for dim in layout.dims)
        return dims, tuple(p for p in layout.pending if p[0] in axes)

    def candidates(item: Node | Value, axes: tuple[str, ...], fixed: Strategy | None) -> list:
        rest = {a for a in mesh.axis_names if a not in axes}
        out = []
        for s in whole(item):
            layouts = (s,) if isinstance(s, Layout) else (*s.ins, *s.outs)
            had = [None] * len(layouts) if fixed is None else [*fixed.ins, *fixed.outs]
            empty = [only(x, rest) if fixed is not None else x and ((),) * len(x.dims) for x in had]
            want = [e if fixed is not None else (((),) * len(x.dims), ()) for e, x in zip(empty, layouts)]
            if all(x is None or only(x, rest) == w for x, w in zip(layouts, want)):
                out.append(s)
        return out

    return candidates


def test_three_axes_one_at_a_time() -> None:
    mesh = Mesh(a=2, b=2, c=2, topology="8xa100-80g")
    program = mlp(64, 1 << 14, 1)
    found = assign_by_axes(program, mesh, by_axes_candidates(program, mesh), convert_s=conversion_s)
    whole = plan(program, Mesh(a=8, topology="8xa100-80g"))
    assert found.cost_s <= 1.02 * whole.cost_s
    assert batch_axes(program, found) == {"a", "b", "c"}


def test_strategies_with_communication_inside_are_charged() -> None:
    program = random_program(3)
    mesh = Mesh(tp=4, topology="ideal")
    base = candidates_of(program, mesh)

    def dear(item: Node | Value) -> tuple:
        found = base(item)
        if isinstance(item, Value):
            return found
        return tuple(attrs.evolve(s, cost=Cost(s.cost.flops, s.cost.nbytes, 0, 1.0 if s.axes else 0.0)) for s in found)

    found = assign(program, mesh, dear, convert_s=conversion_s)
    assert all(not s.axes for s in found.strategies)


def test_conversions_of_one_value_to_one_layout_are_paid_once() -> None:
    program = mlp(256, 512, 1)
    found = plan(program)
    steps = [found.model.steps(f, found.choice) for f in range(len(found.model.flows))]
    again = sum(seconds * flow.count for flow, some in zip(found.model.flows, steps) for _, _, seconds in some)
    assert again == pytest.approx(found.model.conversions_s(found.choice))
    for some in steps:
        assert len({to for _, to, _ in some}) == len(some)


def test_itertools_oracle_agrees_with_the_judge() -> None:
    program = random_program(1)
    mesh = Mesh(tp=4, topology="8xa100-80g")
    candidates = candidates_of(program, mesh, most=2, seed=1)
    found = assign(program, mesh, candidates, convert_s=conversion_s)
    costs = all_costs(program, mesh, candidates)
    offered = [candidates(item) for item in (*(program.values[i] for i in program.inputs), *program.nodes)]
    sizes = [len(o) for o in found.model.options]
    for choice in itertools.islice(itertools.product(*map(range, sizes)), 200):
        # The planner leaves out options that are of no use, and numbers those that are left.
        picked = [(s[o].ins, s[o].outs) for s, o in zip(found.model.options, choice, strict=True)]
        among = [[leaf_strategy(s) if isinstance(s, Layout) else s for s in some] for some in offered]
        places = [[(s.ins, s.outs) for s in some].index(want) for some, want in zip(among, picked, strict=True)]
        flat = np.ravel_multi_index(places, [len(some) for some in offered])
        # 1e-6: the planner adds 1e-18 s per local element to break ties
        assert found.model.true_cost(choice) == pytest.approx(costs[flat], rel=1e-6)
