"""Chunks: how many collectives there are and what they move, where parameters lie, when gathers start, and the numbers."""

from collections import Counter
from itertools import pairwise
from typing import Any
from unittest import mock

import attrs
import pytest
import torch
from colofunc_plugins import tensor, zero
from live_bytes import measure
from test_executors import program
from test_zero import DP2, DP4, language, mlp, nbytes, wires
from torch import nn
from torch.utils import _pytree as pytree

import colofunc as cf
from colofunc.compiler import sharder
from colofunc.compiler.decisions import Decisions, decide
from colofunc.executors.launch import launch
from colofunc.executors.simulated import SimulatedProgram, own_memory
from colofunc.ops.flat import are_adjacent, as_adjacent, flat_of
from colofunc.program.check import check_program
from colofunc.program.facts import is_wire
from colofunc.program.ir import Ref
from colofunc.program.memory import memory
from colofunc.program.passes import one_call, overlapped
from colofunc.program.passes.chunks import buffers_of, chunked
from colofunc.program.passes.coalesce import delay_updates, delay_views
from colofunc.program.passes.one_call import runs_of_updates
from colofunc.program.passes.packing import pack_chunks
from colofunc.program.passes.schedule import overlap
from colofunc.testing import check

R = Ref
WIDTH, LAYERS = 32, 4


def deep(mesh: cf.Mesh = DP2, plan: Any = None, dtype: torch.dtype = torch.float64, clip: float | None = None) -> Any:
    """Equal layers, each a chunk of its own."""
    torch.manual_seed(0)
    net = nn.Sequential(*[m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]).to(dtype)
    opt = cf.adapt(torch.optim.AdamW, lr=1e-2)
    step, state = cf.train_step(cf.functional(net), opt, loss=lambda o, b: (o**2).mean(), inputs=lambda b: ((b,), {}), clip=clip)
    plan = plan or zero(3, "dp", chunk=WIDTH * (WIDTH + 1), regather=True)
    return cf.shard(step, mesh, plan), state, torch.randn(8, WIDTH, dtype=dtype)


def calls(low: Any) -> Counter[str]:
    return Counter({kind: n for (kind, _), n in low.cost().calls.items()})


def parts(state: Any, rank: int = 0) -> list[torch.Tensor]:
    return [p.parts[rank] for p in state["params"].values()]


# ---- how many collectives, of how many bytes ----


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_one_gather_and_one_reduction_per_chunk(stage: int) -> None:
    step, state, batch = mlp(clip=None)
    for chunk in (4224, 1 << 20):  # a layer, everything
        n = len(pack_chunks([p.numel() for p in state["params"].values()], chunk))
        low = cf.shard(step, DP4, zero(stage, "dp", chunk=chunk)).lower(state, batch)
        assert calls(low) == {"all_gather": n, "reduce_scatter": n, "all_reduce": 1}  # the loss
        assert wires(low) == {"all_gather": nbytes(state) * 3 // 4, "reduce_scatter": nbytes(state) * 3 // 4}


def test_a_language_model_is_gathered_twice_and_reduced_once_per_chunk() -> None:
    with cf.testing.float64():
        step, state, batch = language("gpt2")
        staged = cf.shard(step, DP4, zero(3, "dp", chunk=5000, regather=True))
        low = staged.lower(state, batch)
        n = len(pack_chunks([p.numel() for p in state["params"].values()], 5000))
        assert calls(low)["all_gather"] == 2 * n and calls(low)["reduce_scatter"] == n == 7
        assert wires(low)["reduce_scatter"] == nbytes(state) * 3 // 4
        assert check(staged, state, batch).worst < 1e-10


def test_the_searched_size_holds_the_usual_parameters() -> None:
    step, state, batch = deep(plan=zero(3, "dp", chunk="auto"))
    low = step.lower(state, batch)
    assert calls(low) == {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 1}


def test_low_precision_is_gathered_and_the_policys_dtype_reduced() -> None:
    _, state, batch = deep(dtype=torch.float32)
    elements = sum(p.numel() for p in state["params"].values()) * 3 // 4
    read_again = (LAYERS - 1) * WIDTH * WIDTH * 3 // 4  # the first weight and the biases are not read in backward
    for reduce, nbytes_ in (("fp32", 4), ("bf16", 2)):
        policy = cf.Policy(compute="bf16", reduce=reduce)
        low = cf.precision(deep(DP4, dtype=torch.float32)[0], policy).lower(state, batch)
        assert wires(low) == {"all_gather": 2 * (elements + read_again), "reduce_scatter": nbytes_ * elements}
        packed = [low.program.values[n.outs[0]].dtype for n in low.program.nodes if n.target == "colofunc.pack" and n.args[1] == 0]
        assert packed == [torch.bfloat16] * (2 * LAYERS - 1)


def agrees_to_the_byte(step: Any, state: Any, batch: Any, p: Any, low: Any) -> None:
    leaves = [leaf.parts for leaf in pytree.tree_leaves(step.on("simulated").init(state, batch))]
    # A chunk is one piece of memory, but where the program has a part of it on the host.
    on_host = [parts for parts, layout in zip(leaves, low.input_layouts, strict=False) if layout.tier != "device"]
    split = {part.untyped_storage().data_ptr() for parts in on_host for part in parts}
    inputs = [[part.clone() if part.untyped_storage().data_ptr() in split else part for part in parts] for parts in leaves]
    inputs.append([x.clone() for x in cf.distribute(batch, low.input_layouts[len(inputs)], DP2).parts])
    want = SimulatedProgram(low.after("one_call").program, DP2)([[x.clone() for x in shards] for shards in inputs])
    measured = measure(p, DP2, inputs)
    assert memory(p).timeline == measured.timeline
    for got, expected in zip(measured.outputs, want, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


# ---- where parameters lie ----


def test_parameters_of_a_chunk_lie_side_by_side_and_are_updated_there() -> None:
    step, state, batch = deep()
    assert [n.target for n in step.lower(state, batch).program.nodes].count("colofunc.all_gather_flat_start") == LAYERS
    placed = step.init(state, batch)
    layers = [parts(placed)[k : k + 2] for k in range(0, 2 * LAYERS, 2)]
    before = [x.data_ptr() for x in parts(placed)]
    assert all(map(are_adjacent, layers))
    out, _ = step(placed, batch)
    assert [x.data_ptr() for x in parts(out)] == before
    want, _ = step.eager(state, batch)
    for name, p in out["params"].items():
        assert p.full().shape == state["params"][name].shape
        torch.testing.assert_close(p.full(), want["params"][name], rtol=1e-12, atol=1e-12)


def test_a_state_from_elsewhere_is_brought_together() -> None:
    step, state, batch = deep()
    plain = deep(plan=zero(3, "dp", chunk=1))[0].init(state, batch)  # every parameter is a chunk of its own
    assert not are_adjacent(parts(plain)[:2])
    out, _ = step(plain, batch)
    assert are_adjacent(parts(out)[:2])
    torch.testing.assert_close(out["params"]["0.weight"].full(), step.eager(state, batch)[0]["params"]["0.weight"])


def test_saved_files_have_parameters(tmp_path: Any) -> None:
    step, state, batch = deep()
    cf.save(tmp_path / "x", step(step.init(state, batch), batch)[0])
    back = cf.load(tmp_path / "x")
    assert {k: v.shape for k, v in back["params"].items()} == {k: v.shape for k, v in state["params"].items()}
    torch.testing.assert_close(back["params"]["2.bias"], step.eager(state, batch)[0]["params"]["2.bias"])


def test_what_is_not_donated_is_packed() -> None:
    step, state, batch = mlp()
    low = cf.shard(step, DP2, zero(3, "dp", chunk=1 << 20), donate=()).lower(state, batch)
    assert "colofunc.all_gather_flat" not in {n.target for n in low.program.nodes} and not buffers_of(low.program)
    assert calls(low)["all_gather"] == 1


def test_flat_buffers() -> None:
    buffer, other = torch.arange(6.0), torch.arange(2.0)
    a, b = buffer[:2], buffer[2:].view(2, 2)
    assert are_adjacent([a, b]) and flat_of([a, b]).data_ptr() == buffer.data_ptr() and as_adjacent([a, b])[1] is b
    assert not are_adjacent([b, a]) and not are_adjacent([a, other])
    assert flat_of([b, a]).tolist() == [2, 3, 4, 5, 0, 1] and are_adjacent(as_adjacent([b, a, other, torch.empty(0)]))


@pytest.mark.parametrize("lead", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_pack_is_the_same_however_its_tensors_lie(lead: int, dtype: torch.dtype) -> None:
    def make(*shape: int) -> torch.Tensor:
        return torch.randn(2, *shape, dtype=dtype)

    plain, striding, empty = [make(3), make(4, 5), make()], [make(5, 4).mT, make(3)], [make(0), make(3)]
    for xs in (plain, striding, empty, [make(1).expand(2, 7)], [make(2), make(3).float()]):
        found = torch.ops.colofunc.pack(xs, lead, dtype)
        assert found.dtype == dtype and found.equal(torch.cat([x.reshape(*x.shape[:lead], -1) for x in xs], lead).to(dtype))
        assert all(found.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() for x in xs)


def test_neighbours_in_a_buffer_are_not_copied_and_overlaps_are() -> None:
    buffer = torch.zeros(8)
    for ends, kept in (((0, 4, 8), [True, True]), ((0, 5, 8), [False, False])):
        flat = given = [buffer[ends[0] : ends[1]], buffer[4 : ends[2]]]
        own_memory(flat := list(given), ((0,), (0,)), [0, 1])
        assert [x is y for x, y in zip(flat, given, strict=True)] == kept


# ---- when ----


def test_the_next_chunk_is_gathered_before_this_one_is_used_and_no_further() -> None:
    step, state, batch = deep()
    unordered = step.on("distributed").lower(state, batch).after("one_call").program
    ordered = overlap(delay_views(delay_updates(unordered)), ahead_bytes=0)
    flying, most, order = 0, 0, []
    for node in ordered.nodes:
        started = {n.outs[0]: n for n in ordered.nodes if n.target.endswith("_start")}
        if "gather" in node.target:
            flying, order = flying + 1, [*order, "gather"]
        elif node.target == "colofunc.wait" and "gather" in started[node.refs[0]].target:
            flying, order = flying - 1, [*order, "wait"]
        elif node.target.startswith("colofunc.linear"):
            order.append("work")
        most = max(most, flying)
    assert most <= 3  # the one that is waited for and two ahead
    seen = 0
    for k, what in enumerate(order):
        seen += what == "wait"
        if what == "work" and seen < 2 * LAYERS - 1:
            assert order[:k].count("gather") > seen  # the next one is under way


def test_a_chunk_of_gradients_is_reduced_under_the_backward_of_the_next() -> None:
    step, state, batch = deep()
    nodes = step.on("distributed").lower(state, batch).program.nodes
    starts = [k for k, n in enumerate(nodes) if n.target == "colofunc.reduce_scatter_start"]
    waits = {n.refs[0]: k for k, n in enumerate(nodes) if n.target == "colofunc.wait"}
    assert len(starts) == LAYERS
    for k in starts[:-1]:
        work = [n.target for n in nodes[k : waits[nodes[k].outs[0]]]]
        assert "colofunc.linear_dw" in work


@pytest.mark.parametrize("stage", [2, 3])
def test_collectives_overlap_inside_microbatches(stage: int) -> None:
    """The next layer's gather is under way while one works, and one layer's gradients are reduced under the next one's backward."""
    step, state, batch = deep(plan=zero(stage, "dp", chunk=WIDTH * (WIDTH + 1), regather=True if stage == 3 else None))
    staged = cf.accumulate(step, microbatches=2)
    low = staged.on("distributed").lower(state, batch)
    (body,) = [n.loop.body for n in low.program.nodes if n.loop is not None]
    waits = {n.refs[0]: k for k, n in enumerate(body.nodes) if n.target == "colofunc.wait"}
    reduced = [(k, waits[n.outs[0]]) for k, n in enumerate(body.nodes) if n.target == "colofunc.reduce_scatter_start"]
    assert len(reduced) == LAYERS and not any("_start" not in n.target for n in body.nodes if is_wire(n))
    for (start, wait), (later, _) in pairwise(reduced):
        assert start < later < wait and "colofunc.linear_dw" in [n.target for n in body.nodes[start:wait]]
    assert all(wait < reduced[k + 2][0] for k, (_, wait) in enumerate(reduced[:-2]))  # two at most
    if stage == 3:
        gathers = [k for k, n in enumerate(body.nodes) if "gather" in n.target]
        work = [k for k, n in enumerate(body.nodes) if n.target == "colofunc.linear"]
        assert all(gathers[layer + 1] < work[layer] for layer in range(LAYERS - 1))
    agrees_to_the_byte(staged, state, batch, low.program, low)


@pytest.mark.parametrize(("chunk", "calls"), [("auto", 1), (WIDTH * (WIDTH + 1), LAYERS)])
def test_gradients_of_a_chunk_are_used_in_one_call_on_real_ranks(chunk: int | str, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They arrive together, and their views stand in front of all updates; large ones, which do not wait for other chunks."""
    monkeypatch.setattr(one_call, "SMALL_BYTES", 0)
    step, state, batch = deep(plan=zero(3, "dp", chunk=chunk))
    low = step.on("distributed").lower(state, batch)
    running = low.program
    updates = sum(node.target == "colofunc.adamw_" for node in running.nodes)
    assert updates == 2 * LAYERS and updates - sum(len(run) - 1 for run in runs_of_updates(running).values()) == calls
    agrees_to_the_byte(step, state, batch, running, low)
    with mock.patch.object(overlapped, "updates_side_by_side", lambda program: program):
        apart = step.on("distributed").lower(state, batch).program
    assert apart.nodes != running.nodes and memory(apart).peak_bytes == memory(running).peak_bytes


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("executor", ["simulated", "distributed"])
def test_the_accountant_counts_chunks_to_the_byte(executor: str, stage: int) -> None:
    step, state, batch = deep(plan=zero(stage, "dp", chunk=WIDTH * (WIDTH + 1)), clip=1.0)
    low = step.on(executor).lower(state, batch)
    agrees_to_the_byte(step, state, batch, low.program, low)


def test_chunks_bound_what_is_gathered_at_once() -> None:
    """ZeRO-3 with a chunk per layer holds a few layers at its peak, all of them with one chunk; where nothing is gathered ahead."""
    peaks = {}
    for chunk in (WIDTH * (WIDTH + 1), 1 << 20):
        step, state, batch = deep(plan=zero(3, "dp", chunk=chunk, regather=True))
        peaks[chunk] = step.on("simulated").lower(state, batch).memory().peak_bytes["device"]
    small, large = peaks.values()
    layer = WIDTH * (WIDTH + 1) * 8
    assert large - small > (LAYERS - 3) * layer


def test_the_planner_counts_gradients_as_they_are_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's gradients are whole only until its chunk is reduced: the estimate is near what is counted."""
    estimates = list[int]()

    def seen(*args: Any, **said: Any) -> Decisions:
        decided = decide(*args, **said)
        estimates.append(decided.plan.peak_bytes)
        return decided

    monkeypatch.setattr(sharder, "decide", seen)
    step, state, batch = deep(DP4)
    low = step.on("simulated").lower(state, batch)
    assert low.plan.peak_bytes == low.memory().peak_bytes["device"] == pytest.approx(estimates[-1], rel=0.15)


# ---- numbers ----


# Both sizes in turn, so that each stage and each mesh has both; the other one in the sweep.
CLIPPED = [
    pytest.param(stage, regather, mesh, chunk, marks=() if (n + k) % 2 == (chunk == "auto") else pytest.mark.sweep)
    for n, (stage, regather) in enumerate([(1, None), (2, None), (3, False), (3, True)])
    for k, mesh in enumerate([DP2, DP4])
    for chunk in ("auto", 1100)
]


@pytest.mark.parametrize(("stage", "regather", "mesh", "chunk"), CLIPPED)
def test_numbers_with_clipping(stage: int, regather: bool | None, mesh: cf.Mesh, chunk: int | str) -> None:
    assert check(*deep(mesh, zero(stage, "dp", chunk=chunk, regather=regather), clip=1.0)).worst < 1e-10


def test_chunks_in_the_loop_of_microbatches() -> None:
    step, state, batch = deep()
    staged = cf.accumulate(step, microbatches=2)
    assert check(staged, state, batch).worst < 1e-10


def two_steps(stage: int, microbatches: int = 1) -> tuple[dict[str, torch.Tensor], bool, bool]:
    """Parameters after two steps, whether those of a chunk lie side by side, and whether all stayed where they were."""
    step, state, batch = deep(plan=zero(stage, "dp", chunk=WIDTH * (WIDTH + 1)), clip=1.0)
    step = cf.accumulate(step, microbatches)
    state = step.init(state, batch)
    before = [x.data_ptr() for x in parts(state)]
    for _ in range(2):
        state, _ = step(state, batch)
    stayed = before == [x.data_ptr() for x in parts(state)]
    return {k: v.full() for k, v in state["params"].items()}, are_adjacent(parts(state)[:2]), stayed


@pytest.mark.dist
@pytest.mark.parametrize(("stage", "microbatches"), [(1, 1), (3, 1), (2, 2)])
def test_two_real_ranks(stage: int, microbatches: int) -> None:
    want, beside, _ = two_steps(stage, microbatches)
    for got, there, stayed in launch(two_steps, 2, stage, microbatches, timeout_s=200):
        assert there is beside is (stage == 3) and stayed
        for name, p in want.items():
            torch.testing.assert_close(got[name], p, rtol=1e-10, atol=1e-10)


# ---- the pass alone ----

GATHERS = [("colofunc.all_gather", (R(k), ("dp",), 2), (4 + k,)) for k in range(2)]


def small(nodes: Any, shapes: Any, outputs: Any, aliases: Any = ((0, 0), (1, 1))) -> Any:
    return program([0, 1, 2, 3], nodes, outputs, shapes, aliases=aliases)


def run(p: Any) -> Any:
    torch.manual_seed(0)
    return SimulatedProgram(p, DP2)([[torch.randn(p.values[i].shape, dtype=torch.float64) for _ in range(2)] for i in p.inputs])


def test_a_group_that_waits_for_itself_is_dissolved() -> None:
    """The second reduction needs the first one's result."""
    nodes = [
        ("colofunc.all_reduce", (R(2), ("dp",), 2, "sum"), (4,)),
        ("aten.add.Tensor", (R(4), R(3)), (5,)),
        ("colofunc.all_reduce", (R(5), ("dp",), 2, "sum"), (6,)),
        ("aten.add.Tensor", (R(0), R(4)), (7,)),
        ("aten.add.Tensor", (R(1), R(6)), (8,)),
    ]
    p = update_last(small(nodes, [(3,)] * 9, [7, 8]))
    out, made = chunked(p, {0: 100, 1: 100})
    assert out == p and made[()] == {4, 6}


def update_last(p: Any) -> Any:
    return p.with_nodes(attrs.evolve(n, phase="update") if n.outs[0] in p.outputs else n for n in p.nodes)


def test_only_what_is_wanted_is_gathered_together() -> None:
    p = small(GATHERS, [(3,)] * 4 + [(2, 3)] * 2, [4, 5], aliases=())
    assert chunked(p, {}) == (p, {}) and chunked(p, {0: 100})[0] == p
    out, made = chunked(p, {0: 100, 1: 100})
    check_program(out, DP2)
    gathered = [n for n in out.nodes if n.target == "colofunc.all_gather"]
    assert len(gathered) == 1 and gathered[0].outs[0] in made[()]
    assert all(torch.equal(x, y) for a, b in zip(run(p), run(out), strict=True) for x, y in zip(a, b, strict=True))


def test_readers_wait_for_their_chunk() -> None:
    """A result that is read before the last of its chunk is there is read behind it."""
    nodes = [
        ("colofunc.all_reduce", (R(2), ("dp",), 2, "sum"), (4,)),
        ("aten.add.Tensor", (R(0), R(4)), (5,)),
        ("colofunc.all_reduce", (R(3), ("dp",), 2, "sum"), (6,)),
        ("aten.add.Tensor", (R(1), R(6)), (7,)),
    ]
    p = update_last(small(nodes, [(3,)] * 8, [5, 7]))
    out, made = chunked(p, {0: 100, 1: 100})
    check_program(out, DP2)
    assert [n.target.split(".")[1] for n in out.nodes] == ["pack", "all_reduce", "slice", "slice", "rearrange", "rearrange", "add", "add"]
    assert all(torch.equal(x, y) for a, b in zip(run(p), run(out), strict=True) for x, y in zip(a, b, strict=True))
    assert made[()]


def test_beside_tensor_parallelism() -> None:
    """Chunks over dp of what tp splits; norms, which tp copies, are gathered with them."""
    mesh = cf.Mesh(dp=2, tp=2, topology="4xa100-80g")
    with cf.testing.float64():
        step, state, batch = language("llama")
        plans = [zero(3, "dp", chunk=chunk, regather=True) for chunk in (None, 1 << 20)]
        few, one = (cf.shard(step, mesh, plan, tensor("1d", "tp")) for plan in plans)
        checked = check(one, state, batch)
        many, two = few.lower(state, batch).cost(), checked.low.cost()
        assert many.bytes["all_gather", "dp"] == two.bytes["all_gather", "dp"] and two.calls["all_gather", "dp"] == 2
        assert checked.worst < 1e-10
