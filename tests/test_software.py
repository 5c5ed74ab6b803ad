"""Plans of what other software runs: which kernel of attention, how collectives run; and published rows by the public API alone."""

from __future__ import annotations

from typing import Any

import attrs
import colofunc_plugins
import pytest
import torch
from colofunc_plugins import tensor, zero
from test_executors import R, program

import colofunc as cf
from bench._published_rows import RUNS
from bench._published_steps import machine, module_of, planned
from colofunc.compiler.lowered import Lowered
from colofunc.errors import PlanError, TopologyError
from colofunc.mesh.curves import attention_flops_per_s, curves_of
from colofunc.program import beside_products
from colofunc.program.ir import Program

ATTAINED = cf.Mesh(topology="8xh100").topology

GATHER = [
    ("colofunc.all_gather", (R(0), ("tp",), 4, 0), (1,)), ("aten.view.default", (R(1), [4]), (2,)), ("aten.mm.default", (R(2), R(2)), (3,)),
    ("colofunc.reduce_scatter", (R(3), ("tp",), 4, 0), (4,)), ("colofunc.all_gather", (R(4), ("dp",), 4, 0), (5,)),
]  # fmt: skip


def chunked_s(monkeypatch: pytest.MonkeyPatch, made: Program, **taken_s: float) -> list[float | None]:
    """What the pass writes to each node, where operators take so long."""
    monkeypatch.setattr(beside_products, "node_s", lambda node, values, mesh, rule_of: taken_s[node.target.split(".")[1]])
    mesh = cf.Mesh(dp=2, tp=4, topology=ATTAINED.with_software(collectives={"tp": "chunks"}))
    found = beside_products.in_chunks(made, mesh, lambda call: None)
    return [None if node.kernel is None else node.kernel.seconds for node in found.nodes]


@pytest.mark.parametrize(("wire_s", "product_s", "left_s"), [(4.0, 10.0, 1.0), (4.0, 1.0, 3.0), (4.0, 3.5, 1.0)])
def test_what_runs_in_chunks_leaves_one_piece_or_what_is_longer_than_the_product(
    monkeypatch: pytest.MonkeyPatch, wire_s: float, product_s: float, left_s: float
) -> None:
    made = program([0], GATHER, [], [(4,)] * 6)
    found = chunked_s(monkeypatch, made, all_gather=wire_s, reduce_scatter=wire_s, view=0.0, mm=product_s)
    assert found == [left_s, None, None, left_s, None]  # what other axes move is not cut


def test_a_gather_that_no_product_reads_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    made = program([0], [*GATHER[:2], ("aten.neg.default", (R(2),), (3,))], [], [(4,)] * 4)
    assert chunked_s(monkeypatch, made, all_gather=4.0, view=0.0, neg=9.0) == [None, None, None]


# ---- whole steps ----


def layer(topology: cf.Topology, **options: Any) -> Lowered:
    """A LLaMA of one layer on four ranks of a box, tensor parallel along the sequence."""
    with torch.device("meta"):
        module = module_of(attrs.evolve(RUNS[0].model, hidden=1024, ffn=4096, vocabulary=1024, heads=8, kv_heads=8), 1, 2048)
    model, opt = cf.functional(module.to(torch.bfloat16)), cf.adapt(torch.optim.SGD, lr=0.1)
    step_fn, state = cf.train_step(model, opt)
    mesh = cf.Mesh(tp=4, topology=topology)
    step = cf.shard(step_fn, mesh, tensor("1d", "tp", sequence=True, **options), plugins=[colofunc_plugins])
    ids = cf.abstract((4, 2048), torch.int64)
    return step.on("distributed").lower(state, {"input_ids": ids, "labels": ids})


def test_chunks_take_less_than_collectives_that_start_early_and_those_less_than_where_each_is_waited_for() -> None:
    chunks, early, waits = (layer(ATTAINED.with_software(collectives={"tp": way})) for way in ("chunks", "early", "waits"))
    assert chunks.plan.cost_s < early.plan.cost_s < waits.plan.cost_s
    assert chunks.cost().communication_s < early.cost().communication_s == waits.cost().communication_s
    assert layer(ATTAINED).plan.cost_s == early.plan.cost_s
    # What is waited for at once is hidden by nothing, and all of it is.
    held = [term for term in waits.terms() if term.what.endswith(" tp")]
    assert held and all(term.hidden_s == pytest.approx(0.0, abs=1e-12) for term in held)


def test_gradients_of_one_input_are_reduced_one_by_one_where_the_plan_says_so() -> None:
    """Of q, k and v three in place of one, of gate and up two; what comes out is the same."""
    summed, apart = layer(ATTAINED), layer(ATTAINED, apart=True)
    key = ("reduce_scatter", "tp")
    assert apart.cost().calls[key] == summed.cost().calls[key] + 3
    assert apart.cost().bytes[key] > summed.cost().bytes[key]


def test_a_step_whose_gradients_are_reduced_one_by_one_computes_the_same() -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.down = torch.nn.LayerNorm(8), torch.nn.Linear(16, 8)
            self.gate, self.up = torch.nn.Linear(8, 16), torch.nn.Linear(8, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(x)
            return x + self.down(torch.nn.functional.silu(self.gate(y)) * self.up(y))

    with cf.testing.float64():
        model, opt = cf.functional(Two().double()), cf.adapt(torch.optim.SGD, lr=0.1)
        step_fn, state = cf.train_step(model, opt, loss=lambda out: out.square().mean())
        x = torch.randn(2, 4, 8, dtype=torch.float64)
        plans = [tensor("1d", "tp", sequence=True, apart=apart) for apart in (False, True)]
        steps = [cf.shard(step_fn, cf.Mesh(tp=2), plan, plugins=[colofunc_plugins]) for plan in plans]
        cf.testing.check(steps[1], state, x)
        summed, apart = (step.lower(state, x).cost().bytes["reduce_scatter", "tp"] for step in steps)
    assert apart == summed + 2 * 4 * 8 * 8 // 2  # the gradient of one (2, 4, 8) more, of which half is sent


def test_attention_counts_by_the_kernel_that_is_named() -> None:
    """Backward of one layer, beside what else it does: half of flash's rate is twice its seconds."""
    known = curves_of("h100").attention
    found = {}
    for kernel in ("flash", "triton", "cudnn"):
        low = layer(ATTAINED.with_software(attention=kernel))
        (node,) = (node for node in low.program.nodes if node.target == "colofunc.attention_backward")
        found[kernel] = node.kernel.seconds - ATTAINED.device.launch_s
        rate = attention_flops_per_s(known, kernel, 128, 1024.5, True)
        pairs = 2048 * 2049 / 2
        assert found[kernel] == pytest.approx(5 * 4 * 2 * pairs * 256 / rate, rel=1e-6)
    assert found["triton"] == pytest.approx(2 * found["flash"], rel=1e-6)


# ---- published rows ----


def test_the_public_api_alone_gives_the_seconds_of_the_bench() -> None:
    """Megatron's M2 and TorchTune's U1, each planned with two layers, written down without a word of the bench."""
    h100 = cf.Mesh(topology="8xh100").topology.with_software(attention="cudnn", collectives={"tp": "chunks"}, fused=True)
    megatron = cf.Mesh(dpo=3, dp=16, tp=2, topology=h100)
    plans = [zero(1, "dp", replicate="dpo"), tensor("1d", "tp", sequence=True)]
    by_hand = {"M2": public(megatron, "M2", plans, "distributed", "bf16", (192, 4096))}
    a100 = cf.Mesh(topology="a100-80g").topology.with_software(attention="flash")
    by_hand["U1"] = public(cf.Mesh(dp=1, topology=a100), "U1", [], "distributed", None, (2, 4096))
    for id, low in by_hand.items():
        run = next(run for run in RUNS if run.id == id)
        of_bench = planned(run, (2,)).lows[0]
        assert low.lanes().end_s == pytest.approx(of_bench.lanes().end_s, rel=1e-9)
        assert low.plan.cost_s == pytest.approx(of_bench.plan.cost_s, rel=1e-9)


def public(mesh: cf.Mesh, id: str, plans: list[Any], executor: str, precision: str | None, size: tuple[int, int]) -> Lowered:
    run = next(run for run in RUNS if run.id == id)
    module = module_of(run.model, 2, run.tokens)
    model, opt = cf.functional(module if precision else module.to(torch.bfloat16)), cf.adapt(torch.optim.AdamW, lr=1e-4)
    step_fn, state = cf.train_step(model, opt)
    step = cf.shard(step_fn, mesh, *plans, plugins=[colofunc_plugins])
    step = cf.precision(step, precision) if precision else step
    ids = cf.abstract(size, torch.int64)
    return step.on(executor).lower(state, {"input_ids": ids, "labels": ids})


def test_replaying_a_step_on_the_machine_that_it_was_planned_for_gives_its_seconds() -> None:
    run = next(run for run in RUNS if run.id == "U2")
    steps = planned(run, (1, 2))
    assert steps.seconds_on(machine(run)) == pytest.approx(steps.seconds(), rel=1e-9)


# ---- mistakes ----


def test_software_that_nobody_has_is_an_error_with_a_near_name() -> None:
    rates = r"; it has rates of flash, cudnn, triton, flash3$"
    with pytest.raises(TopologyError, match=rf"device 'h100' has no attention by 'flahs'; did you mean 'flash'.*{rates}"):
        ATTAINED.with_software(attention="flahs")
    none = "; it has rates of no kernel: plan for one that was measured"
    with pytest.raises(TopologyError, match=rf"device 'h100' has no attention by 'cudnn'.*{none}"):
        cf.topology("8xh100:datasheet").with_software(attention="cudnn")
    with pytest.raises(TopologyError, match=r"uncompiled='loss' is one path; write a list of paths, uncompiled=\['loss'\]"):
        cf.Mesh(topology="8xh100").topology.with_software(uncompiled="loss")
    with pytest.raises(TopologyError, match=r"collectives of an axis run 'chunk'; did you mean 'chunks'"):
        ATTAINED.with_software(collectives={"tp": "chunk"})


def test_apart_is_of_sequences() -> None:
    of_sequences = r"tensor\('1d', apart=True\) is of gradients that are scattered along the sequence; add sequence=True"
    with pytest.raises(PlanError, match=of_sequences):
        tensor("1d", "tp", apart=True)
    with pytest.raises(PlanError, match=r"tensor\('2d'\) has no apart; it is of tensor\('1d', 'tp', sequence=True, apart=True\)"):
        tensor("2d", ("x", "y"), apart=True)


def test_software_is_kept_in_a_topologys_file(tmp_path: Any) -> None:
    told = ATTAINED.with_software(attention="cudnn", collectives={"tp": "chunks", "dp": "early"})
    told.save(tmp_path / "told.json")
    assert cf.Topology.load(tmp_path / "told.json") == told != ATTAINED
    assert "software" not in ATTAINED.to_dict() and told.with_software() == ATTAINED
