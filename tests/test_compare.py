"""step.compare and low.compare: equal where nothing is wrong; where something is, the value right behind it and the user's line."""

import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from colofunc_plugins import zero

import colofunc as cf
from colofunc.compiler import named_candidates
from colofunc.compiler.compare import looked_at
from colofunc.compiler.tolerance import Allowed, Reference, bounds_of
from colofunc.executors import simulated_collectives
from colofunc.executors.launch import launch
from colofunc.program.ir import Node, Program
from colofunc.program.passes.loop import change_bodies
from colofunc.program.tracing.record import run_node
from colofunc.program.tracing.trace import trace
from colofunc.testing import models

MESH = cf.Mesh(dp=2, tp=2, topology="ideal")
MESHES = [cf.Mesh(tp=2, topology="ideal"), MESH]
SPECS = ({"w1": "i (tp o)", "w2": "(tp i) o", "b": "o"}, "(dp b) i")


def net(state: Any, x: torch.Tensor) -> Any:
    h = torch.relu(x @ state["w1"])
    y = torch.addmm(state["b"], h, state["w2"])  # summed over tp
    return {"loss": (y**2).mean(), "y": y}


START = inspect.getsourcelines(net)[1]
LINE_H, LINE_Y = f"test_compare.py:{START + 1} in net", f"test_compare.py:{START + 2} in net"


def arguments() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    shapes = {"w1": (8, 16), "w2": (16, 4), "b": (4,)}
    state = {k: torch.randn(*shape, dtype=torch.float64, generator=gen) for k, shape in shapes.items()}
    return state, torch.randn(8, 8, dtype=torch.float64, generator=gen)


class Fault:
    """A plugin whose pass replaces the nodes of the local program that `change` gives another one for."""

    def __init__(self, change: Callable[[Node, Program], Node | None]) -> None:
        self.change = change
        self.hit = 0

    @cf.hookimpl
    def colofunc_passes(self) -> Any:
        return {"fault": self.run}

    def run(self, program: Program, mesh: cf.Mesh) -> Program:
        found = [self.change(node, program) for node in program.nodes]
        self.hit += sum(node is not None for node in found)
        return program.with_nodes(new or old for new, old in zip(found, program.nodes, strict=True))


def compared(*plugins: Any, mesh: cf.Mesh = MESH, specs: Any = SPECS) -> Any:
    specs = specs if "dp" in mesh.shape else ({**specs[0]}, "b i")
    return cf.shard(net, mesh, in_specs=specs, out_specs={"loss": "", "y": "b o"}, plugins=plugins).compare(*arguments())


# ---- nothing is wrong ----


@pytest.mark.parametrize("mesh", MESHES)
def test_equal_where_nothing_is_wrong(mesh: cf.Mesh) -> None:
    found = compared(mesh=mesh)
    assert found.equal and found.first is None
    assert found.worst <= 1e-10 and found.values >= 8
    assert str(found).startswith("equal: ")


def test_a_training_step_with_dropout_compares_and_consumes_nothing() -> None:
    torch.manual_seed(0)
    model = cf.functional(models.Language(dropout=0.3).double())
    loss = lambda out, batch: (out**2).mean()  # noqa: E731
    step_fn, state = cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=1e-2), loss=loss, inputs=lambda batch: ((batch,), {}))
    step, batch = cf.shard(step_fn, MESH), torch.arange(32).reshape(4, 8)
    state = step.init(state, batch)
    before = {k: v.full() for k, v in state["params"].items()}
    position = torch.get_rng_state()
    found = step.lower(state, batch).compare(state, batch)
    assert found.equal and found.values > 100
    assert torch.equal(torch.get_rng_state(), position)
    assert all(torch.equal(v.full(), before[k]) for k, v in state["params"].items())
    step(state, batch)  # nothing was consumed


def test_a_pass_that_is_left_out_is_left_out_here_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """COLOFUNC_PASSES shows that a pass is at fault."""

    def negated(node: Node, program: Program) -> Node | None:
        return attrs.evolve(node, target="aten.neg.default") if node.target == "aten.relu.default" else None

    assert not compared(Fault(negated)).equal
    monkeypatch.setenv("COLOFUNC_PASSES", "-fault")
    left_out = Fault(negated)
    assert compared(left_out).equal and left_out.hit == 0


@pytest.mark.parametrize("change", [lambda s: cf.accumulate(s, microbatches=2), lambda s: cf.precision(s, "bf16")])
def test_chains_compare_on_their_placed_state(change: Any) -> None:
    torch.manual_seed(0)
    loss = lambda out, batch: (out**2).mean()  # noqa: E731
    opt = cf.adapt(torch.optim.SGD, lr=1e-2)
    step_fn, state = cf.train_step(cf.functional(models.Mlp()), opt, loss=loss, inputs=lambda batch: ((batch,), {}))
    step, batch = change(cf.shard(step_fn, MESH)), torch.randn(8, 16)
    found = step.compare(step.init(state, batch), batch)
    assert found.equal and found.values > 30


def test_what_went_through_bfloat16_is_compared_as_such() -> None:
    low = cf.shard(lambda x, y: ((x.bfloat16() * 3).double(), x + y, (x > 0).bfloat16() @ y.bfloat16()), MESH).lower(
        torch.ones(4, 4, dtype=torch.float64), torch.ones(4, 4, dtype=torch.float64)
    )
    bounds = bounds_of(low.global_program, None)
    assert [bounds[o] for o in low.global_program.outputs] == [2e-2, 1e-10, 2e-2]
    assert {bounds[i] for i in low.global_program.inputs} == {1e-10}
    assert set(bounds_of(low.global_program, 0.5).values()) == {0.5}


def adam_in_bf16(*plugins: Any, lr: float = 5e-2) -> tuple[Any, Any, torch.Tensor]:
    torch.manual_seed(0)
    loss = lambda out, batch: (out**2).mean() * 1e-2  # noqa: E731
    model, opt = cf.functional(models.Mlp()), cf.adapt(torch.optim.AdamW, lr=lr)
    step_fn, state = cf.train_step(model, opt, loss=loss, inputs=lambda batch: ((batch,), {}))
    return cf.precision(cf.shard(step_fn, MESH, plugins=plugins), "bf16"), state, torch.randn(8, 16)


def test_where_only_rounding_is_left_of_a_gradient_adam_moves_by_its_rate() -> None:
    """Such weights differ by 2 lr, which is no error; weights whose gradient is larger than its rounding may not."""
    step, state, batch = adam_in_bf16()
    low = step.lower(state, batch)
    assert low.compare(state, batch).equal
    assert {d.operator for d in low.compare(state, batch, tolerance=2e-2).differences} == {"colofunc.adamw"}


@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_sums_that_cancel_lose_more_than_others(half: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of a bias of layer norm, the sums by which fp16 finds what is not finite: 0.02 and 0.002 were too little."""
    monkeypatch.setattr(named_candidates, "MOST_NODES", 0)  # whose sums are others, which overflow in fp16
    torch.manual_seed(0)
    loss = lambda out, batch: (out**2).mean()  # noqa: E731
    model, opt = cf.functional(models.Language()), cf.adapt(torch.optim.SGD, lr=0.1, momentum=0.9)
    step_fn, state = cf.train_step(model, opt, loss=loss, inputs=lambda batch: ((batch,), {}), clip=1.0)
    batch = torch.arange(64).reshape(8, 8) % 32
    found = cf.precision(cf.shard(step_fn, MESH), half).compare(state, batch)
    assert found.equal and found.worst > {"bf16": 2e-2, "fp16": 2e-3}[half]


def test_what_an_update_may_be_off_by() -> None:
    """Adam's first step is lr, whatever the gradient's size: by no more than rounding where it is larger than its error."""
    step, state, batch = adam_in_bf16()
    program = step.lower(state, batch).global_program
    node = next(n for n in program.nodes if n.target == "colofunc.adamw")
    grad = torch.tensor([1.0, 0.5, 1e-3])
    operands = [torch.ones(3), grad, torch.zeros(3), torch.zeros(3), torch.tensor(1.0), torch.tensor(5e-2)]
    values = dict(zip(node.refs, operands, strict=True))
    inputs = [torch.zeros(program.values[i].shape, dtype=program.values[i].dtype) for i in program.inputs if i not in program.constants]
    allowed = Allowed(program, inputs, (), None)
    allowed.ran(node, values, run_node(node, values))
    new, first, second, _ = (allowed.elements[o] for o in node.outs)
    assert new[:2].max() < 1e-4 and float(new[2]) == pytest.approx(2 * 5e-2, rel=1e-3)
    assert first.tolist() == pytest.approx([0.1 * 2e-2] * 3, rel=1e-3)
    assert second.tolist() == pytest.approx([1e-3 * (1.02**2 - 1), 1e-3 * (0.52**2 - 0.25), 1e-5], rel=1e-2)  # the last is float32's own


# ---- injected faults ----


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_dropped_reduction_in_bf16(phase: str) -> None:
    """Gradients of 1e-4, of which a share is missing: nothing beside 1, and Adam's step would not show it."""
    fault = Fault(lambda node, program: drop_reductions(node, program) if node.phase == phase else None)
    step, state, batch = adam_in_bf16(fault)
    first = step.lower(state, batch).compare(state, batch).first
    assert fault.hit and first.phase == phase and first.line


def drop_reductions(node: Node, program: Program) -> Node | None:
    if node.target == "colofunc.all_reduce" and node.line:
        return attrs.evolve(node, target="aten.clone.default", args=node.args[:1])
    return attrs.evolve(node, target="colofunc.take_shard", args=node.args[:3]) if "reduce_scatter" in node.target else None


@pytest.mark.parametrize("mesh", MESHES)
def test_a_dropped_reduction(mesh: cf.Mesh) -> None:
    fault = Fault(drop_reductions)
    first = compared(fault, mesh=mesh).first
    assert fault.hit
    assert (first.operator, first.line, first.phase) == ("aten.addmm.default", LINE_Y, "forward")
    assert "+tp" not in first.spec and "+tp" in first.made_by and "reduce" not in first.made_by
    assert first.ranks == tuple(range(mesh.size)) and first.difference > 1e-3


@pytest.mark.parametrize("mesh", MESHES)
def test_a_permuted_all_gather(mesh: cf.Mesh) -> None:
    def permute(node: Node, program: Program) -> Node | None:
        source = program.makers.get(node.refs[0]) if node.refs else None
        if node.target != "colofunc.rearrange" or source is None or source.target != "colofunc.all_gather":
            return None
        left, right = node.args[1].split(" -> ")
        other = right.replace("(a b)", "(b a)").replace("(a c)", "(c a)")
        return attrs.evolve(node, args=(node.args[0], f"{left} -> {other}", *node.args[2:]))

    fault = Fault(permute)
    specs = ({"w1": "i o", "w2": "i o", "b": "o"}, "b (tp i)")  # x is gathered, or the product reduced
    step = cf.shard(lambda state, x: torch.softmax(x, 1) @ state["w1"], mesh, in_specs=specs, out_specs="b o", plugins=(fault,))
    first = step.compare(*arguments()).first
    assert fault.hit
    assert first.line.startswith("test_compare.py:") and "all_gather" in first.made_by and first.difference > 1e-3


@pytest.mark.parametrize("mesh", MESHES)
def test_a_double_counted_bias(mesh: cf.Mesh) -> None:
    def everywhere(node: Node, program: Program) -> Node | None:
        return attrs.evolve(node, target="aten.clone.default", args=node.args[:1]) if node.target == "colofunc.keep_first" else None

    fault = Fault(everywhere)
    found = compared(fault, mesh=mesh)
    assert fault.hit
    assert (found.first.name, found.first.spec, found.first.line) == ("state.b", "a +tp", LINE_Y)
    assert found.first.made_by.startswith("clone, which brings 'a' to 'a +tp'") and LINE_Y in found.first.made_by
    assert found.differences[1].line == LINE_Y  # and what follows from it
    assert "state.b" in found.table() and len(found.table(1).splitlines()) == 2


@pytest.mark.parametrize("mesh", MESHES)
def test_a_strategy_with_wrong_local_code(mesh: cf.Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_candidates, "MOST_NODES", 0)  # which do not take it

    class Wrong:
        @cf.hookimpl
        def colofunc_strategies(self) -> Any:
            return {"aten.relu.default": self.strategies}

        def strategies(self, call: Any, mesh: cf.Mesh) -> Any:
            layout = cf.Spec("a (tp b)").bind(mesh, call.ins[0].shape)
            yield cf.Strategy("{tp: mine}", (layout,), (layout,), cf.Cost(), lambda x, *, mesh: torch.relu(x) * 1.001)

    step = cf.shard(net, mesh, in_specs=SPECS if "dp" in mesh.shape else (SPECS[0], "b i"), plugins=(Wrong(),))
    first = step.compare(*arguments()).first
    assert (first.operator, first.line, first.strategy) == ("aten.relu.default", LINE_H, "{tp: mine}")
    assert "{tp: mine}" in first.made_by and "differs by" in str(first)


def test_a_collective_that_the_executor_gets_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    first_only = lambda members, how: members[0].clone()  # noqa: E731
    monkeypatch.setitem(simulated_collectives._MEMBERS, "all_reduce", first_only)
    monkeypatch.setitem(simulated_collectives._MEMBERS, "reduce_scatter", lambda members, how: [members[0][j] for j in range(len(members))])
    first = compared().first
    assert (first.operator, first.line) == ("aten.addmm.default", LINE_Y)
    assert "reduce" in first.made_by and "(tp)" in first.made_by


def test_the_reference_keeps_only_what_will_be_asked_for() -> None:
    def deep(x: torch.Tensor) -> torch.Tensor:
        for k in range(20):
            x = torch.sin(x * k)
        return x

    traced = trace(deep, (torch.ones(3),)).program
    reference = Reference(traced, [torch.ones(3)], Counter(dict.fromkeys(traced.values, 1)))
    kept = []
    for id in traced.values:
        reference.take(id)
        kept.append(len(reference.env))
    assert len(traced.values) > 30 and max(kept) <= 2
    assert torch.equal(reference.value(traced.outputs[0]), deep(torch.ones(3)))


def test_a_pass_after_lowering_is_named() -> None:
    step = cf.shard(net, MESH, in_specs=SPECS)
    low = step.lower(*arguments())
    scaled = [attrs.evolve(n, args=(*n.args[:1], 7.0)) if n.target == "aten.div.Tensor" else n for n in low.program.nodes]
    found = attrs.evolve(low, program=low.program.with_nodes(scaled)).compare(*arguments())
    assert [d.line for d in found.differences] == [f"test_compare.py:{START + 3} in net"]
    assert found.first.made_by.startswith("the passes after lowering")


def squashed(state: Any, x: torch.Tensor) -> Any:
    h = torch.relu(x @ state["w1"])
    y = torch.tanh(torch.addmm(state["b"], h, state["w2"]))  # summed over tp, in every microbatch
    return {"loss": (y**2).mean(), "y": y}


def accumulated() -> tuple[Any, Any]:
    """One row per microbatch, so that rows cannot be split over tp."""
    state, x = arguments()
    specs = (SPECS[0], "b i")
    return cf.accumulate(cf.shard(squashed, MESHES[0], in_specs=specs), 2).lower(state, x[:2]), (state, x[:2])


def test_what_runs_in_a_loop_is_compared_per_microbatch() -> None:
    low, args = accumulated()
    (loop,) = [node.loop for node in low.program.nodes if node.loop is not None]
    found = low.compare(*args)
    assert found.equal and found.worst <= 1e-10
    asked = looked_at(loop.body, low.global_program, {"time": 2})
    assert len(asked) >= 5 and all(n % 2 == 0 for n in asked.values())
    assert found.executed == sum(looked_at(low.program, low.global_program).values()) + 2  # and its two outputs
    assert f"{found.executed} of them in the program that runs" in str(found)


def test_a_wrong_collective_inside_of_the_loop() -> None:
    low, args = accumulated()
    hit = []

    def dropped(program: Program) -> Program:
        hit.extend(n for n in program.nodes if drop_reductions(n, program))
        return program.with_nodes(drop_reductions(n, program) or n for n in program.nodes)

    first = attrs.evolve(low, program=change_bodies(low.program, dropped)).compare(*args).first
    assert len(hit) == 1
    assert (first.operator, first.line) == ("aten.addmm.default", f"test_compare.py:{inspect.getsourcelines(squashed)[1] + 2} in squashed")
    assert first.made_by.startswith("the passes after lowering") and "of microbatch 1 of 2" in first.made_by
    assert first.ranks == (0, 1) and first.difference > 1e-3


def test_a_microbatch_that_has_the_rows_of_another() -> None:
    def always_the_first(program: Program) -> Program:
        change = lambda n: attrs.evolve(n, target="aten.select.int", args=(n.args[0], 0, 0))  # noqa: E731
        return program.with_nodes(change(n) if n.target == "colofunc.take_shard" and n.args[1] == ("time",) else n for n in program.nodes)

    low, args = accumulated()
    first = attrs.evolve(low, program=change_bodies(low.program, always_the_first)).compare(*args).first
    assert first.name == "x" and "of microbatch 2 of 2" in first.made_by


def test_copies_that_are_not_equal_are_the_callers() -> None:
    state, x = arguments()
    wrong = cf.from_local([x + rank for rank in range(4)], "b i", MESH)
    found = cf.shard(net, MESH).compare(state, wrong)
    assert found.first.name == "x" and found.first.made_by.startswith("the caller") and found.first.ranks == (1, 2, 3)


def test_a_function_that_is_not_what_was_traced() -> None:
    calls: list[int] = []

    def impure(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x * len(calls)

    found = cf.shard(impure, MESH).compare(torch.ones(4, 4))
    assert found.first.made_by.startswith("tracing or simplifying")


FACTOR = {"of": 2.0}


def scaled_loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (x @ w).square().mean() * FACTOR["of"]


def test_what_changed_outside_is_named_where_it_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(w: torch.Tensor, x: torch.Tensor) -> Any:
        loss, grad = cf.value_and_grad(scaled_loss)(w, x)
        return w - grad, loss

    staged, args = cf.shard(step, MESH), (torch.ones(4, 4), torch.ones(8, 4))
    assert staged.compare(*args).equal
    monkeypatch.setitem(FACTOR, "of", 3.0)
    found = staged.compare(*args)
    assert "in scaled_loss" in found.first.line and "has changed since its trace" in str(found)


# ---- real ranks ----


def on_two_ranks() -> list[Any]:
    mesh = cf.Mesh(tp=2, topology="ideal")
    right, fault = compared(mesh=mesh), Fault(drop_reductions)
    apart = cf.shard(lambda x: x.sin(), mesh, in_specs=("a b @tp=1",))
    for look in (apart.compare, apart.lower(torch.ones(4, 4)).check_finite):
        with pytest.raises(cf.PlanError, match=r'run at some ranks of .* only is not looked at .* Try: step.on\("simulated"\)'):
            look(torch.ones(4, 4))
    return [right.equal, right.values, *attrs.astuple(compared(fault, mesh=mesh).first)]


@pytest.mark.dist
def test_real_ranks_find_the_same() -> None:
    one, other = launch(on_two_ranks, 2, timeout_s=120)
    here = compared(Fault(drop_reductions), mesh=MESHES[0]).first
    assert one == other and one[0]
    assert one[2:] == list(attrs.astuple(here))


def test_a_copy_that_an_update_is_written_into_is_looked_at_behind_it() -> None:
    """ZeRO-1 with whole parameters: each rank updates a copy of its part, and gathers the parts."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)).double()
    step_fn, state = cf.train_step(
        cf.functional(net), cf.adapt(torch.optim.AdamW, lr=1e-2), lambda out, b: out.pow(2).mean(), inputs=lambda b: ((b,), {})
    )
    step, batch = cf.shard(step_fn, cf.Mesh(dp=2, topology="8xa100-80g"), zero(1, "dp")), torch.randn(8, 8, dtype=torch.float64)
    text = step.lower(state, batch).text()
    assert "clone" in text and "adamw_" in text
    found = step.compare(state, batch)
    assert found.equal, found
