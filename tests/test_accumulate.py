"""Accumulation over microbatches: the numbers of the whole batch, in a loop, on every mesh."""

from __future__ import annotations

import re

import attrs
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import colofunc as cf
from colofunc.dtensor.parts import parts
from colofunc.errors import InputError, PlanError
from colofunc.executors.compiled import compile_segments
from colofunc.executors.measure import measure
from colofunc.executors.simulated import SimulatedProgram, run_simulated
from colofunc.plugins import build_registry
from colofunc.program import serialize
from colofunc.program.check import check_program
from colofunc.program.ir import Loop, Program
from colofunc.program.loop import fold
from colofunc.program.lower import lower
from colofunc.program.text import text
from colofunc.program.time import Rules, over_time
from colofunc.program.trace import record_local
from colofunc.testing import programs

MESHES = {
    "one": cf.Mesh(),
    "dp": cf.Mesh(dp=2, topology="ideal"),
    "tp": cf.Mesh(tp=2, topology="ideal"),
    "dp tp": cf.Mesh(dp=2, tp=2, topology="ideal"),
}


def loops(program: Program) -> list[Loop]:
    return [node.loop for node in program.nodes if node.loop is not None]


def with_rules(program: Program, microbatches: int):
    """The arguments of `over_time` for a program of one device."""
    registry = build_registry(())
    batch = [i for i in program.inputs if program.values[i].role == "batch"]
    return program, batch, microbatches, "time", Rules(registry.rule, registry.extra_strategies, record_local)


def folded(program: Program, microbatches: int) -> Program:
    return fold(over_time(*with_rules(program, microbatches)), "time", microbatches)


def uncommented(text):
    return [line.split("    # ")[0] for line in text.splitlines()]


def regression(reduction="mean"):
    """A step on plain tensors: two inputs, a squared loss, gradient descent."""
    torch.manual_seed(0)
    state = {"w": torch.randn(6, 4, dtype=torch.float64), "b": torch.zeros(4, dtype=torch.float64)}
    x, y = torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)

    def step(state, x, y):
        def loss_of(params):
            return F.mse_loss(torch.tanh(x @ params["w"] + params["b"]), y, reduction=reduction)

        loss, grads = cf.value_and_grad(loss_of)(state)
        return {k: v - 0.1 * grads[k] for k, v in state.items()}, loss

    return step, state, (x, y)


# ---- the numbers of the whole batch ----


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", ["mlp", "attention_block", "embedding_loss"])
def test_equals_the_whole_batch(name, mesh):
    step, state, batch = programs.NAMED[name](8)
    for microbatches in (2, 4):
        cf.testing.check(cf.accumulate(cf.shard(step, MESHES[mesh]), microbatches), state, batch)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_two_arguments_are_named_by_a_tuple_or_one_follows(reduction):
    step, state, (x, y) = regression(reduction)
    # y is read with x, so it is sliced where x is split
    accumulated = cf.accumulate(step, microbatches=4, batch="x")
    cf.testing.check(accumulated, state, x, y)
    assert len(loops(accumulated.lower(state, x, y).program)) == 1


def test_mean_of_means_would_be_wrong():
    """The labels of `embedding_loss` are spread unevenly; what a loop by hand gives differs by more than any tolerance."""
    step, state, batch = programs.embedding_loss(8)
    _, loss = cf.accumulate(step, microbatches=4)(state, batch)
    by_hand = sum(float(step(state, {k: v[i : i + 2] for k, v in batch.items()})[1]) for i in range(0, 8, 2)) / 4
    whole = float(step(state, batch)[1])
    assert abs(float(loss) - whole) < 1e-12 < 1e-4 < abs(by_hand - whole)


def test_dropout_draws_the_same_numbers_bit_for_bit():
    torch.manual_seed(0)
    x = torch.randn(8, 6, dtype=torch.float64)

    def step(w, x):
        return w, F.dropout(x, 0.5, True)

    with cf.random(7):
        whole = cf.shard(step, cf.Mesh())(torch.zeros(1), x)[1].full()
    for mesh in MESHES.values():
        with cf.random(7):
            assert torch.equal(cf.accumulate(cf.shard(step, mesh), 2)(torch.zeros(1), x)[1].full(), whole)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("mesh", ["one", "dp tp"])
def test_language_models_with_uneven_labels(family, mesh):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = dict(vocab_size=32, bos_token_id=0, eos_token_id=0)
    if family == "gpt2":
        config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, n_positions=16, **small)  # with dropout
        make = transformers.GPT2LMHeadModel
    else:
        sizes = dict(num_hidden_layers=1, hidden_size=16, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1)
        config = transformers.LlamaConfig(**sizes, max_position_embeddings=16, **small)
        make = transformers.LlamaForCausalLM
    labels = (ids := torch.randint(0, 32, (8, 8))).clone()
    labels[0, 2:], labels[5, 1:] = -100, -100
    with cf.testing.float64():
        model = cf.functional(make(config).double().train())
        step, state = cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=1e-2), clip=0.5)
        batch = {"input_ids": ids, "labels": labels}
        cf.testing.check(cf.accumulate(cf.shard(step, MESHES[mesh]), 4), state, batch)


def test_sharded_state_is_gathered_and_reduced_once():
    """ZeRO's layouts: no gather of a parameter and no reduction of a gradient is repeated by the loop."""
    step, state, batch = programs.mlp(1024)  # rows enough to pay for reducing gradients
    sharded = cf.shard(step, MESHES["dp"], lambda name, shape: "(dp a) ..." if shape else None, in_specs=(None, "(dp b) ..."))
    cf.testing.check(cf.accumulate(sharded, 4), state, batch)
    program = cf.accumulate(sharded, 4).lower(state, batch).program
    body = [node.target for loop in loops(program) for node in loop.body.nodes]
    assert "colofunc.reduce_scatter" in [n.target for n in program.nodes]
    assert not {"colofunc.reduce_scatter", "colofunc.all_gather"} & set(body)


def test_outputs_of_each_sample_are_put_together():
    _, state, (x, y) = regression()

    def evaluate(state, batch):
        out = torch.tanh(batch["x"] @ state["w"] + state["b"])
        return out, (out - batch["y"]).abs().amax(), ((out - batch["y"]) ** 2).sum(1)

    for mesh in MESHES.values():
        cf.testing.check(cf.accumulate(cf.shard(evaluate, mesh), 2), state, {"x": x, "y": y})
    (loop,) = loops(cf.accumulate(evaluate, 2).lower(state, {"x": x, "y": y}).program)
    assert sorted(loop.gathers) == ["max", "stack", "stack"]


def test_statistics_of_the_inputs_are_exact():
    """What only the batch's own rows are needed for runs in a loop before; it costs no second forward."""
    torch.manual_seed(0)

    def step(w, x):
        normal = (x - x.mean(0)) / x.std(0)
        return w - 0.1 * cf.value_and_grad(lambda w: (normal @ w).square().mean())(w)[1]

    w, x = torch.randn(4, 3, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    accumulated = cf.accumulate(step, 4)
    cf.testing.check(accumulated, w, x)
    assert len(loops(accumulated.lower(w, x).program)) > 1


def test_one_element_of_each_row():
    """`h[arange(b), last]`, as sequence classifiers pick their last token."""
    torch.manual_seed(0)

    def step(w, batch):
        def loss_of(w):
            h = torch.tanh(batch["x"] @ w)
            return F.cross_entropy(h[torch.arange(len(h)), batch["length"] - 1], batch["y"])

        loss, grad = cf.value_and_grad(loss_of)(w)
        return w - grad, loss

    batch = {"x": torch.randn(8, 4, 6).double(), "length": torch.randint(1, 5, (8,)), "y": torch.randint(0, 5, (8,))}
    cf.testing.check(cf.accumulate(step, 4), torch.randn(6, 5, dtype=torch.float64), batch)


# ---- operators that mix samples ----


def contrastive(w, x):
    def loss_of(w):
        h = F.normalize(x @ w, dim=1)
        return F.cross_entropy(h @ h.T, torch.arange(len(x)))

    loss, grad = cf.value_and_grad(loss_of)(w)
    return w - grad, loss


def test_batch_norm_is_refused_by_name():
    step, state, batch = programs.conv_net(8)
    with pytest.raises(PlanError, match=r"batch_norm.* in 'norm' .*mixes the samples of the batch.*mixing=\"per-microbatch\""):
        cf.accumulate(step, 2).lower(state, batch)


def test_batch_norm_over_sharded_rows_is_refused_by_its_own_name():
    """The first thing that microbatches cannot follow is a collective in its local code."""
    module = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)).double().train()
    opt = cf.adapt(torch.optim.AdamW, lr=0.1)
    step, state = cf.train_step(cf.functional(module), opt, loss=lambda out, batch: out.square().mean(), inputs=lambda x: ((x,), {}))
    zero = pytest.importorskip("colofunc_plugins").zero
    with pytest.raises(PlanError, match=r"batch_norm.* in '1' .*mixes the samples of the batch, so 2 microbatches"):
        cf.accumulate(cf.shard(step, MESHES["dp"], zero(3, "dp")), 2).lower(state, torch.randn(8, 6, dtype=torch.float64))


@pytest.mark.parametrize("rows", [8, 32])
@pytest.mark.parametrize(
    ("axes", "stage"),
    [({}, 0), ({"dp": 2}, 0), ({"tp": 2}, 0), ({"dp": 2, "tp": 2}, 0), ({"dp": 2}, 1), ({"dp": 2}, 3), ({"dp": 2, "tp": 2}, 3)],
)
def test_batch_norm_is_refused_whatever_the_plan(rows, axes, stage):
    """Where every rank has all rows it could be computed behind the loop, over the whole batch; then nothing is accumulated."""
    plans = [pytest.importorskip("colofunc_plugins").zero(stage, "dp")] if stage else []
    module = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)).double().train()
    opt = cf.adapt(torch.optim.AdamW, lr=0.1)
    step, state = cf.train_step(cf.functional(module), opt, loss=lambda out, batch: out.square().mean(), inputs=lambda x: ((x,), {}))
    staged = cf.shard(step, cf.Mesh(**axes, topology="ideal"), *plans)
    with pytest.raises(PlanError) as caught:
        cf.accumulate(staged, 4).lower(state, torch.randn(rows, 6, dtype=torch.float64))
    said = re.sub(r"\(test_accumulate.py:\d+ in \w+\)", "(line)", str(caught.value))
    assert said == (
        "_native_batch_norm_legit_functional.default in '1' (line) mixes the samples of the batch, so 4 microbatches cannot be computed "
        'one after another; write mixing="per-microbatch" to treat each microbatch by itself (the numbers change), or drop cf.accumulate'
    )


def test_contrastive_loss_is_refused_both_ways():
    w, x = torch.randn(4, 3), torch.randn(8, 4)
    with pytest.raises(PlanError, match=r"mixes the samples of the batch, so 2 microbatches"):
        cf.accumulate(contrastive, 2).lower(w, x)
    with pytest.raises(PlanError, match="needs all rows at once"):
        cf.accumulate(contrastive, 2, mixing="per-microbatch").lower(w, x)


@pytest.mark.parametrize("mesh", ["one", "dp", "zero1", "zero3"])
def test_per_microbatch_norm_is_a_loop_by_hand(mesh):
    torch.manual_seed(0)
    plans = [pytest.importorskip("colofunc_plugins").zero(int(mesh[4:]), "dp")] if "zero" in mesh else []
    module = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2)).double().train()
    x, y = torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)
    model = cf.functional(module)

    def step(params, batch):
        def loss_of(params):
            out, buffers = model.apply(params, model.buffers, batch["x"])
            return F.mse_loss(out, batch["y"]), buffers

        (loss, buffers), grads = cf.value_and_grad(loss_of, has_aux=True)(params)
        return {k: v - 0.1 * grads[k] for k, v in params.items()}, loss, buffers["1.running_mean"]

    specs = (None, "(dp b) ...") if mesh == "dp" else None
    axes = MESHES["one" if mesh == "one" else "dp"]
    accumulated = cf.accumulate(cf.shard(step, axes, *plans, in_specs=specs), 2, mixing="per-microbatch")
    got = accumulated(model.params, {"x": x, "y": y})
    # On two ranks, a microbatch is a part of what each rank has.
    rows = [[0, 1, 4, 5], [2, 3, 6, 7]] if mesh != "one" else [[0, 1, 2, 3], [4, 5, 6, 7]]
    hands = [step(model.params, {"x": x[r], "y": y[r]}) for r in rows]
    for name, value in got[0].items():
        torch.testing.assert_close(value.full(), (hands[0][0][name] + hands[1][0][name]) / 2, rtol=1e-10, atol=1e-10)
    for k in (1, 2):
        torch.testing.assert_close(got[k].full(), (hands[0][k] + hands[1][k]) / 2, rtol=1e-10, atol=1e-10)


# ---- the loop ----


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


def limited(mesh: cf.Mesh, capacity_bytes: int) -> cf.Mesh:
    """The same mesh with devices of so many bytes."""
    tiers = tuple(attrs.evolve(t, capacity_bytes=capacity_bytes) if t.name == "device" else t for t in mesh.topology.tiers)
    return cf.Mesh(**dict(mesh.axes), topology=attrs.evolve(mesh.topology, tiers=tiers))


def test_a_budget_that_only_microbatches_meet():
    step, state, batch = programs.attention_block(16)
    with pytest.raises(PlanError, match="cannot be met"):
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


def test_text_and_saved_programs_have_the_body(tmp_path):
    step, state, batch = programs.mlp()
    low = cf.accumulate(step, 2).lower(state, batch)
    assert "2 times over time\n    %" in low.text()
    serialize.save(low.program, tmp_path / "program")
    again = serialize.load(tmp_path / "program")
    assert text(again) == low.text()
    leaves = [leaf.detach() for leaf in torch.utils._pytree.tree_leaves((state, batch))]
    runs = [run_simulated(p, cf.Mesh(), [[leaf.clone()] for leaf in leaves]) for p in (low.program, again)]
    assert all(torch.equal(a[0], b[0]) for a, b in zip(*runs, strict=True))


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
    together = run_simulated(split, cf.Mesh(time=4), [[leaf] * 4 for leaf in leaves])
    after = run_simulated(folded(low.global_program, 4), cf.Mesh(), [[leaf] for leaf in leaves])
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
    expected = run_simulated(low.program, cf.Mesh(), [[leaf.clone()] for leaf in leaves])
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a[0], b[0], rtol=1e-10, atol=1e-10)


# ---- bad input ----


def test_microbatches_have_to_divide_the_rows():
    step, state, batch = programs.mlp(12)
    with pytest.raises(PlanError, match=r"5 microbatches do not divide the 12 rows of 'batch.x'; use one of 1, 2, 3, 4, 6, 12"):
        cf.accumulate(step, 5).lower(state, batch)
    with pytest.raises(PlanError, match="4 microbatches, which have to divide the rows that a rank has"):
        cf.accumulate(cf.shard(step, MESHES["dp"], in_specs=(None, "(dp b) ...")), 4).lower(state, batch)


def test_arguments_are_checked():
    step, state, batch = programs.mlp()
    with pytest.raises(PlanError, match="microbatches=0 is no whole number above 0"):
        cf.accumulate(step, 0)
    with pytest.raises(PlanError, match="unknown mixing 'per-batch'; did you mean 'per-microbatch'"):
        cf.accumulate(step, 2, mixing="per-batch")
    with pytest.raises(InputError, match="batch='bach' names no argument; did you mean 'batch'"):
        cf.accumulate(step, 2, batch="bach").lower(state, batch)
    with pytest.raises(InputError, match="has no tensor with a dim 0 to split"):
        cf.accumulate(lambda w, s: w * s, 2).lower(torch.ones(3), torch.tensor(2.0))


def test_leaves_of_another_leading_size_stay_whole():
    """A table, a scale: whatever has not as many rows as most leaves is the same for all microbatches."""
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 4), "y": torch.randn(8, 4), "scale": torch.tensor(2.0), "table": torch.randn(1, 4)}

    def step(w, batch):
        return w - ((batch["x"] * batch["scale"] + batch["table"] - batch["y"]) @ w).mean(0)

    doubles = {k: v.double() for k, v in batch.items()}
    cf.testing.check(cf.accumulate(step, 4), torch.randn(4, 4, dtype=torch.float64), doubles)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_every_reduction_of_a_loss_with_ignored_labels_runs_in_one_loop(reduction):
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 4, dtype=torch.float64), "y": torch.tensor([0, -100, 2, -100, -100, 3, 1, 0])}

    def step(w, batch):
        def loss_of(w):
            return F.cross_entropy(batch["x"] @ w, batch["y"], reduction=reduction).sum() / 7

        return w - cf.value_and_grad(loss_of)(w)[1]

    staged = cf.accumulate(cf.shard(step, MESHES["dp"]), 2)
    cf.testing.check(staged, torch.randn(4, 5, dtype=torch.float64), batch)


# ---- any program ----

def test_few_rows_stay_where_they_are():
    """Six microbatches of one row a rank: a plan that moves rows between dp and tp is made again with rows on one of them."""
    torch.manual_seed(0)

    def step(w, batch):
        def loss_of(w):
            h = torch.tanh(batch["x"] @ w).cumsum(1)
            return (h.sum(1) * batch["i"]).sum() / batch["i"].sum()

        loss, grad = cf.value_and_grad(loss_of)(w)
        return w - grad, loss

    batch = {"x": torch.randn(12, 6, dtype=torch.float64), "i": torch.randint(1, 6, (12,))}
    cf.testing.check(cf.accumulate(cf.shard(step, MESHES["dp tp"]), 6), torch.randn(6, 6, dtype=torch.float64), batch)


# Layers of (b, 6) -> (b, 6) that do not mix rows; `t` is a table of the state, `i` the batch's own integers.
LAYERS = {
    "linear": lambda h, w, t, i: torch.tanh(h @ w),
    "softmax": lambda h, w, t, i: torch.softmax(h, 1) * w.sum(0),
    "embedding": lambda h, w, t, i: h + F.embedding(i, t),
    "norm": lambda h, w, t, i: F.layer_norm(h, (6,), w[0], w[1]),
    "heads": lambda h, w, t, i: torch.einsum("bhd,hde->bhe", h.view(-1, 2, 3), w.view(4, 3, 3)[:2]).reshape(-1, 6),
    "rows of rows": lambda h, w, t, i: (h.unsqueeze(1) + t[:2]).flatten(0, 1).sin().unflatten(0, (-1, 2)).prod(1),
    "cumsum": lambda h, w, t, i: h.cumsum(1) / 6,
    "mask": lambda h, w, t, i: torch.where((i > 1).unsqueeze(1), h, w.mean()),
    "dropout": lambda h, w, t, i: F.dropout(h, 0.3, True),
    "inputs' mean": lambda h, w, t, i: h - i.double().mean() * w.diagonal(),
    "sorted": lambda h, w, t, i: h.sort(1).values.flip(1),
    "convolution": lambda h, w, t, i: F.conv1d(h.unsqueeze(1), w[:1, :3].unsqueeze(1), padding=1).squeeze(1),
}
LOSSES = {
    "mean": lambda h, i: h.square().mean(),
    "sum": lambda h, i: h.square().sum(),
    "labels": lambda h, i: F.cross_entropy(h, torch.where(i > 3, -100, i)),
    "weighted": lambda h, i: (h.sum(1) * i).sum() / i.sum(),
    "two": lambda h, i: h.mean() + (h[:, 0] * (i == 2)).sum() / (i == 2).sum(),
}


@settings(max_examples=30)
@given(
    st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=4),
    st.sampled_from(sorted(LOSSES)),
    st.sampled_from([2, 3, 4, 6]),
    st.sampled_from(["one", "dp", "dp tp"]),
)
def test_any_program_gives_the_numbers_of_the_whole_batch(layers, loss, microbatches, mesh):
    torch.manual_seed(0)
    state = {"t": torch.randn(6, 6, dtype=torch.float64)}
    state |= {f"w{k}": torch.randn(6, 6, dtype=torch.float64) for k in range(len(layers))}
    batch = {"x": torch.randn(12, 6, dtype=torch.float64), "i": torch.randint(0, 6, (12,))}

    def step(state, batch):
        def loss_of(params):
            h = batch["x"]
            for k, layer in enumerate(layers):
                h = LAYERS[layer](h, params[f"w{k}"], params["t"], batch["i"])
            return LOSSES[loss](h, batch["i"]), h

        (value, h), grads = cf.value_and_grad(loss_of, has_aux=True)(state)
        return {k: v - 0.01 * grads[k] for k, v in state.items()}, value, h

    if mesh != "one" and microbatches == 4:
        microbatches = 3  # of the six rows that a rank has
    cf.testing.check(cf.accumulate(cf.shard(step, MESHES[mesh]), microbatches), state, batch)
