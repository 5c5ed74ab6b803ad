"""The loop that microbatches become: its memory, its accumulators, its cost and text, on every executor."""

from __future__ import annotations

from itertools import cycle
from types import ModuleType

import attrs
import pytest
import torch
from least_named import limited
from live_bytes import measure
from microbatches import MESHES, loops, regression

import colofunc as cf
from colofunc.errors import PlanError
from colofunc.executors.compiled import compile_segments
from colofunc.executors.simulated import SimulatedProgram
from colofunc.plugins import build_registry
from colofunc.program.check import check_program
from colofunc.program.editor import Editor
from colofunc.program.ir import Node, Program, Ref
from colofunc.program.lower import lower
from colofunc.program.passes.fold import fold
from colofunc.program.passes.reuse import added_in_place
from colofunc.program.passes.time import LoweringRules, over_time
from colofunc.program.tracing.trace import record_local
from colofunc.testing import programs
from colofunc.testing.parts import parts

CPU = torch.device("cpu")


def with_rules(program: Program, microbatches: int):
    """The arguments of `over_time` for a program of one device."""
    registry = build_registry(())
    batch = [i for i in program.inputs if program.values[i].role == "batch"]
    return program, batch, microbatches, "time", LoweringRules(registry.rule, registry.extra_strategies, record_local)


def folded(program: Program, microbatches: int) -> Program:
    return fold(over_time(*with_rules(program, microbatches)), "time", microbatches)


def uncommented(text):
    return [line.split("    # ")[0] for line in text.splitlines()]


def test_nothing_is_unrolled_and_activations_shrink():
    step, state, batch = programs.attention_block(16)
    whole = cf.shard(step, cf.Mesh()).lower(state, batch).memory().peak_bytes["device"]
    lows = [cf.accumulate(step, m).lower(state, batch) for m in (2, 4, 8)]
    assert len({sum(len(loop.body.nodes) for loop in loops(low.program)) + len(low.program.nodes) for low in lows}) == 1
    peaks = [low.memory().peak_bytes["device"] for low in lows]
    assert whole > peaks[0] > peaks[1] > peaks[2]
    # What shrinks halves each time; what does not is the state and the accumulators.
    assert (peaks[0] - peaks[1]) / (peaks[1] - peaks[2]) == pytest.approx(2, rel=0.1)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [("mlp", "one"), ("attention_block", "one"), ("embedding_loss", "one"), ("attention_block", "dp"), ("embedding_loss", "dp")],
)
def test_the_accountant_and_the_executor_agree_to_the_byte(name, mesh):
    step, state, batch = programs.NAMED[name](8)
    low = cf.accumulate(cf.shard(step, MESHES[mesh]), 4).lower(state, batch)
    leaves = [leaf.detach() for leaf in torch.utils._pytree.tree_leaves((state, batch))]
    leaves += [torch.zeros((), dtype=torch.int64)] * (len(low.program.inputs) - len(low.program.constants) - len(leaves))  # a seed
    placed = zip(leaves, low.input_layouts, strict=False)
    shards = [[part.contiguous().clone() for part in parts(leaf, layout, low.mesh)] for leaf, layout in placed]
    assert measure(low.program, low.mesh, shards).timeline == dict(low.memory().timeline)


def test_a_budget_that_only_microbatches_meet():
    step, state, batch = programs.attention_block(16)
    with pytest.raises(PlanError, match="no plan found within"):
        cf.shard(step, limited(cf.Mesh(), 300_000)).lower(state, batch)
    low = cf.accumulate(cf.shard(step, limited(cf.Mesh(), 300_000)), 4).lower(state, batch)
    assert low.memory().peak_bytes["device"] <= 300_000


def deep(depth: int = 6, width: int = 32):
    """Layers whose parameters are more than their activations."""
    torch.manual_seed(0)
    state = {f"w{k}": torch.randn(width, width, dtype=torch.float64) / 6 for k in range(depth)}

    def step(state, batch):
        def loss_of(params):
            h = batch["x"]
            for k in range(depth):
                h = torch.tanh(h @ params[f"w{k}"])
            return h.square().mean()

        loss, grads = cf.value_and_grad(loss_of)(state)
        return {k: v - 0.1 * grads[k] for k, v in state.items()}, loss

    return step, state, {"x": torch.randn(32, width, dtype=torch.float64)}


def test_where_memory_is_short_parameters_are_gathered_in_every_trip():
    step, state, batch = deep()
    ample = cf.Mesh(dp=4, topology="ideal")
    zero = {"w*": "(dp a) b"}
    roomy = cf.accumulate(cf.shard(step, ample, zero, in_specs=(None, "(dp b) ...")), 2).lower(state, batch)
    budget = roomy.memory().peak_bytes["device"] // 2
    tight = cf.accumulate(cf.shard(step, limited(ample, budget), zero, in_specs=(None, "(dp b) ...")), 2)
    low = tight.lower(state, batch)
    assert low.memory().peak_bytes["device"] <= budget
    assert low.cost().wire_bytes > roomy.cost().wire_bytes
    cf.testing.check(tight, state, batch)


def test_one_accumulator_per_gradient_and_the_update_outside():
    step, state, batch = programs.mlp()
    program = cf.accumulate(step, 2).lower(state, batch).program
    counting, working = loops(program)
    assert counting.gathers == ("sum",)  # labels
    assert working.gathers == ("sum",) * (len(state["params"]) + 1)  # gradients and the loss
    assert sum("adamw" in node.target for node in program.nodes) == len(state["params"])
    assert "linear" not in " ".join(node.target for node in counting.body.nodes)


def test_what_only_a_sum_reads_is_added_to_it_as_it_is_made():
    step, state, batch = deep()
    low = cf.accumulate(cf.shard(step, cf.Mesh()), 2).lower(state, batch)
    loop = loops(low.program)[-1]
    added = added_in_place(loop)
    assert len(added) == len(state)
    out = loop.body.outputs[next(iter(added.values()))]
    edit = Editor(loop.body)
    edit.insert(len(loop.body.nodes), Node("aten.neg.default", (Ref(out),), (), (edit.new(loop.body.values[out]),)))
    read = added_in_place(attrs.evolve(loop, body=edit.done()))
    assert len(read) == len(added) - 1 and out not in {loop.body.outputs[k] for k in read.values()}
    partition = ((0,),) * (len(low.program.inputs) - len(low.program.constants))
    assert SimulatedProgram(low.program, low.mesh).write(partition, CPU).function().source.count("mm_added(") == len(added)


@pytest.mark.parametrize("mesh", [cf.Mesh(dp=2), cf.Mesh(tp=2)])
def test_a_tied_weight_s_gradients_are_added_to_one_sum(mesh):
    """Lanes share what they look up and not what they multiply, or all of it."""
    torch.manual_seed(0)
    state = {"w": torch.randn(12, 8, dtype=torch.float64)}

    def step(state, batch):
        def loss_of(params):
            logits = torch.tanh(torch.nn.functional.embedding(batch["x"], params["w"])) @ params["w"].t()
            return torch.nn.functional.cross_entropy(logits, batch["x"])

        loss, grads = cf.value_and_grad(loss_of)(state)
        return {"w": state["w"] - 0.1 * grads["w"]}, loss

    chain = cf.accumulate(cf.shard(step, mesh, auto="dp" in mesh.axis_names), 4)
    cf.testing.check(chain, state, {"x": torch.randint(0, 12, (16,))}, steps=2)


def test_of_lanes_whose_kernels_differ_none_adds_to_its_sum_as_it_is_made():
    """A kernel of a plugin makes a tensor, also where another lane's call gets none: each is added behind."""
    answers = cycle((True, False))
    kernel = cf.ext.Kernel("aten.mm.default", "cpu", lambda call: next(answers), lambda call, rates: 0.0, lambda call: 0, torch.mm)
    plugin = ModuleType("every_other_product")
    plugin.colofunc_kernels = cf.hookimpl(lambda: [kernel])
    state, batch = {"w": torch.randn(8, 4, dtype=torch.float64)}, {"x": torch.randn(16, 8, dtype=torch.float64)}

    def step(state, batch):
        loss, grads = cf.value_and_grad(lambda params: (batch["x"] @ params["w"]).tanh().mean())(state)
        return {"w": state["w"] - 0.1 * grads["w"]}, loss

    chain = cf.accumulate(cf.shard(step, cf.Mesh(tp=2), in_specs=("r (tp c)", None), plugins=[plugin]), 4)
    low = chain.lower(state, batch)
    assert len(added_in_place(loops(low.program)[-1])) == 1
    partition = ((0, 1),) * (len(low.program.inputs) - len(low.program.constants))
    source = SimulatedProgram(low.program, low.mesh).write(partition, CPU).function().source
    assert "mm_added(" not in source
    cf.testing.check(chain, state, batch, steps=2)


def test_what_a_loop_gathers_is_known_as_a_copy_of_the_whole_value():
    """`step.compare` finds by it what to look at; a mean over all labels comes out of local code."""

    def step(state, batch):
        mean = lambda w: torch.nn.functional.cross_entropy(batch["x"] @ w, batch["y"])  # noqa: E731
        loss, grad = cf.value_and_grad(mean)(state["w"])
        return {"w": state["w"] - 0.1 * grad}, {"loss": loss}

    state, batch = {"w": torch.randn(8, 5)}, {"x": torch.randn(8, 8), "y": torch.arange(8) % 5}
    low = cf.accumulate(cf.shard(step, cf.Mesh(dp=2)), 2).lower(state, batch)
    gathered = [low.program.values[out] for node in low.program.nodes if node.loop is not None for out in node.results]
    assert len(gathered) >= 2 and all(value.of is not None for value in gathered)


def test_half_precision_is_accumulated_as_it_is_made():
    """Gradients that a cast widens are summed behind the cast."""
    step, state, batch = programs.mlp(dtype=torch.float32)
    program = cf.accumulate(cf.precision(step, "bf16"), 4).lower(state, batch).program
    kept = {loop.body.values[o].dtype for loop in loops(program) for o in loop.body.outputs}
    assert torch.bfloat16 not in kept


@pytest.mark.parametrize("mesh", ["one", "dp"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_accumulators_are_no_narrower_than_float32(dtype, mesh):
    """512 gradients of 1: a bfloat16 sum ends at 256, where one more is rounded away; a float16 one of 4096 at 2048."""
    rows = 4096 if dtype == torch.float16 else 512

    def step(w, x):
        _, grad = cf.value_and_grad(lambda w: (x * w).sum(0).sum())(w)
        return w + grad

    specs = (None, "(dp b) i") if mesh == "dp" else None
    staged = cf.accumulate(cf.shard(step, MESHES[mesh], in_specs=specs), rows // 2)
    w, x = torch.zeros(3, dtype=dtype), torch.ones(rows, 3, dtype=dtype)
    kept = {loop.body.values[o].dtype for loop in loops(staged.lower(w, x).program) for o in loop.body.outputs}
    got = staged(w, x).full()
    assert kept == {torch.float32} and got.dtype == dtype and got.tolist() == [rows] * 3


def test_one_microbatch_is_the_step_itself():
    step, state, batch = programs.mlp()
    assert cf.accumulate(step, 1).lower(state, batch).text() == cf.shard(step, cf.Mesh()).lower(state, batch).text()


def test_the_order_of_transforms_does_not_matter():
    step, state, batch = programs.mlp()
    mesh = MESHES["dp tp"]
    a = cf.accumulate(cf.shard(step, mesh), 2).lower(state, batch)
    b = cf.shard(cf.accumulate(step, 2), mesh).lower(state, batch)
    assert uncommented(a.text()) == uncommented(b.text())  # comments have the line that called


def test_cost_counts_every_trip():
    step, state, batch = programs.mlp(16)
    whole, parts_ = (cf.accumulate(step, m).lower(state, batch).cost() for m in (1, 4))
    assert parts_.flops == pytest.approx(whole.flops, rel=0.1)


def test_a_text_has_the_body():
    step, state, batch = programs.mlp()
    low = cf.accumulate(step, 2).lower(state, batch)
    assert "2 times over time\n    %" in low.text()


def test_a_loop_is_checked():
    step, state, (x, y) = regression()
    low = cf.shard(step, cf.Mesh()).lower(state, x, y)
    inputs = dict(zip(low.global_program.inputs, low.input_layouts, strict=True))
    program = folded(lower(low.global_program, low.choices, inputs, low.output_layouts, low.mesh, record_local), 2)
    check_program(program, cf.Mesh())
    at = next(k for k, node in enumerate(program.nodes) if node.loop is not None)
    node = program.nodes[at]
    wrong = attrs.evolve(node, loop=attrs.evolve(node.loop, gathers=("stack",) * len(node.outs)))
    with pytest.raises(cf.ProgramError, match="the loop's stack gives"):
        check_program(program.with_nodes((*program.nodes[:at], wrong, *program.nodes[at + 1 :])), cf.Mesh())


def test_time_is_an_axis_of_a_mesh():
    """Before it is folded, the program runs on a mesh that has `time` as an axis, all microbatches at once."""
    step, state, batch = programs.embedding_loss(8)
    low = cf.shard(step, cf.Mesh(), donate=()).lower(state, batch)
    split = over_time(*with_rules(low.global_program, 4))
    leaves = [leaf.detach() for leaf in torch.utils._pytree.tree_leaves((state, batch))]
    together = SimulatedProgram(split, cf.Mesh(time=4))([[leaf] * 4 for leaf in leaves])
    after = SimulatedProgram(folded(low.global_program, 4), cf.Mesh())([[leaf] for leaf in leaves])
    for a, b in zip(together, after, strict=True):
        torch.testing.assert_close(a[0], b[0], rtol=1e-10, atol=1e-10)


def accumulated_on_real_ranks():
    step, state, batch = programs.embedding_loss(8)
    sharded = cf.shard(step, cf.Mesh(dp=2, topology="ideal"), in_specs=(None, "(dp b) ..."))
    return cf.testing.check(cf.accumulate(sharded, 4), state, batch).steps


@pytest.mark.dist
def test_real_ranks():
    assert cf.launch(accumulated_on_real_ranks, 2) == [2, 2]


def test_compiled_bodies():
    """With the compiler "eager", so that the segments and their loop are tried without a C++ compiler."""
    step, state, batch = programs.mlp()
    low = cf.accumulate(step, 2).on("compiled").lower(state, batch)
    leaves = [leaf.detach() for leaf in torch.utils._pytree.tree_leaves((state, batch))]
    segmented, bound = compile_segments(low.program, "eager")
    working = loops(segmented)[1]
    assert len(working.body.nodes) < 10 < len(loops(low.program)[1].body.nodes)
    got = SimulatedProgram(segmented, cf.Mesh(), bound)([[leaf.clone()] for leaf in leaves])
    expected = SimulatedProgram(low.program, cf.Mesh())([[leaf.clone()] for leaf in leaves])
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a[0], b[0], rtol=1e-10, atol=1e-10)
