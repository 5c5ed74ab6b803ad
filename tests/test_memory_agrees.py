"""The accountant, which plans, against what simulated ranks really hold: to the byte, for every kind of program.

Problem: a rule about views, buffers or lifetimes that is right for one step is wrong for the next. Idea: random steps,
random chains of transforms on random meshes, and at every position of the program that comes of it the same number.
"""

import pytest
import torch
import torch.nn.functional as F
from colofunc_plugins import ring, tensor, ulysses, zero
from hypothesis import given, settings
from hypothesis import strategies as st
from least_named import limited
from live_bytes import measure

import colofunc as cf
from colofunc.compiler.observation import arguments_of
from colofunc.errors import CapacityError, PlanError
from colofunc.program.memory import memory
from colofunc.program.memory_report import KINDS
from colofunc.program.passes.overlapped import overlapped
from colofunc.testing import programs

B, N = 8, 8  # rows of the batch; length and width are equal, so that a transposition keeps the shape


def agree(staged, state, batch):
    """Both numbers at every position; returns what was lowered."""
    args = staged.arguments((state, batch))
    low = staged.lower(state, batch)
    given = arguments_of(low, args)
    measured, report = measure(low.program, low.mesh, given.copies(range(len(given.shards)))), low.memory()
    assert dict(report.timeline) == measured.timeline
    for tier, line in report.timeline.items():
        assert set(report.by_kind[tier]) == set(KINDS)
        assert tuple(map(sum, zip(*report.by_kind[tier].values(), strict=True))) == line
        assert sum(live.nbytes for live in report.alive[tier]) == report.peak_bytes[tier] == sum(report.kinds(tier).values())
    return low


ONE, DP, TP, CP = cf.Mesh(), cf.Mesh(dp=2), cf.Mesh(dp=2, tp=2), cf.Mesh(cp=2)
CHAINS = {
    "plain": lambda f: cf.shard(f, ONE),
    "data parallel": lambda f: cf.shard(f, DP),
    "zero 1": lambda f: cf.shard(f, DP, zero(1, "dp")),
    "zero 3 in chunks": lambda f: cf.shard(f, DP, zero(3, "dp", chunk="auto")),
    "zero 3 gathered anew": lambda f: cf.shard(f, DP, zero(3, "dp", chunk=64, regather=True)),
    "tensor": lambda f: cf.shard(f, TP, tensor("1d", "tp"), zero(2, "dp")),
    "ring": lambda f: cf.shard(f, CP, ring("cp")),
    "ulysses": lambda f: cf.shard(f, CP, ulysses("cp")),
    "checkpoint": lambda f: cf.checkpoint(cf.shard(f, ONE), policy="nothing"),
    "checkpoint of zero 3": lambda f: cf.checkpoint(cf.shard(f, DP, zero(3, "dp", chunk="auto")), policy="dots"),
    "microbatches": lambda f: cf.accumulate(cf.shard(f, ONE), 4),
    "microbatches of zero 2": lambda f: cf.accumulate(cf.shard(f, DP, zero(2, "dp", chunk="auto")), 2),
    "checkpoint in microbatches": lambda f: cf.accumulate(cf.checkpoint(cf.shard(f, DP), policy="nothing"), 2),
    "bf16": lambda f: cf.precision(cf.shard(f, DP, zero(3, "dp")), "bf16"),
    "checkpoint in bf16": lambda f: cf.checkpoint(cf.precision(cf.shard(f, TP, tensor("1d", "tp"), zero(3, "dp")), "bf16"), policy="dots"),
    "fp16": lambda f: cf.precision(cf.shard(f, DP, zero(1, "dp")), "fp16"),
    "host": lambda f: cf.offload(cf.shard(f, ONE), policy="host"),
    "host of zero 3": lambda f: cf.offload(cf.shard(f, DP, zero(3, "dp", chunk="auto")), policy="host"),
    "host in microbatches": lambda f: cf.offload(cf.accumulate(cf.precision(cf.shard(f, ONE), "bf16"), 2), policy="host"),
    "everything": lambda f: cf.accumulate(CHAINS["checkpoint in bf16"](f), 2),
}


# What another chain has too stays for the sweep.
PARTS = ("data parallel", "zero 1", "checkpoint", "checkpoint of zero 3", "microbatches", "bf16", "checkpoint in bf16", "host")


@pytest.mark.parametrize("chain", [pytest.param(chain, marks=[pytest.mark.sweep] * (chain in PARTS)) for chain in CHAINS])
def test_named_chains_agree(chain):
    step = programs.attention_block(8, dtype=torch.float32, dropout=0.0 if chain in ("ring", "ulysses") else 0.1)
    staged = CHAINS[chain](step.fn)
    low = agree(staged, step.state, step.batch)
    if low.mesh.size > 1:  # in the order of real ranks, with collectives in flight
        running, given = overlapped(low.program), arguments_of(low, staged.arguments((step.state, step.batch)))
        measured = measure(running, low.mesh, given.copies(range(len(given.shards))))
        assert dict(memory(running).timeline) == measured.timeline


@pytest.mark.parametrize("name", ["mlp", "conv_net", "embedding_loss"])
def test_other_models_agree(name):
    step = programs.NAMED[name](8)
    agree(cf.checkpoint(cf.shard(step.fn, TP, zero(3, "dp", chunk="auto")), policy="nothing"), step.state, step.batch)


# What a random forward is made of: h is (B, N, N), w is (N, N).
OPS = {
    "linear": lambda h, w: F.linear(h, w),
    "product": lambda h, w: h @ w.t() / N,
    "gelu": lambda h, w: F.gelu(h),
    "norm": lambda h, w: F.layer_norm(h, (N,), w[0], w[1]),
    "softmax": lambda h, w: h.softmax(-1),
    "transpose": lambda h, w: h.transpose(1, 2),
    "copy": lambda h, w: h.transpose(1, 2).contiguous(),
    "heads": lambda h, w: h.view(B, N, 2, N // 2).transpose(1, 2).reshape(B, N, N),
    "attention": lambda h, w: F.scaled_dot_product_attention(*(h.view(B, N, 2, 4).transpose(1, 2),) * 3).transpose(1, 2).reshape(B, N, N),
    "swap": lambda h, w: torch.cat(h.chunk(2, -1)[::-1], -1),
    "slices": lambda h, w: torch.stack([h[:, ::2], h[:, 1::2]], 2).flatten(1, 2),
    "residual": lambda h, w: h + torch.tanh(h),
    "in place": lambda h, w: h.clone().mul_(0.5).add_(w),
    "expand": lambda h, w: h.mean(1, keepdim=True).expand_as(h) * h,
    "pad": lambda h, w: F.pad(h, (0, 1))[..., :-1],
    "where": lambda h, w: torch.where(h > 0, h, w),
    "dropout": lambda h, w: F.dropout(h, 0.3),
    "half": lambda h, w: (h.bfloat16() * w.bfloat16()).to(h.dtype),
    "einsum": lambda h, w: torch.einsum("bsi,io->bso", h, w) / N,
    "gather": lambda h, w: h.gather(2, h.argsort(-1)),
}  # fmt: skip


def made_of(names, optimizer):
    """A training step whose forward applies the operators in turn, each with a weight of its own where it reads one."""
    opt = cf.adapt(optimizer, lr=1e-2)

    def step(state, batch):
        def loss_of(params):
            h = batch["x"]
            for k, name in enumerate(names):
                h = OPS[name](h, params[f"w{k % 3}"])
            return (h - batch["y"]).square().mean()

        loss, grads = cf.value_and_grad(loss_of)(state["params"])
        params, opt_state = opt.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": opt_state}, loss

    params = {f"w{k}": torch.randn(N, N) for k in range(3)}
    return step, {"params": params, "opt": opt.init(params)}, {"x": torch.randn(B, N, N), "y": torch.randn(B, N, N)}


WRAPS = {
    "checkpoint": lambda f: cf.checkpoint(f, policy="nothing"),
    "dots": lambda f: cf.checkpoint(f, policy="dots"),
    "accumulate": lambda f: cf.accumulate(f, 2),
    "bf16": lambda f: cf.precision(f, "bf16"),
    "host": lambda f: cf.offload(f, policy="host"),
}
CLASH = {"checkpoint", "dots"}
PLANS = {"none": (), "zero 1": (zero(1, "dp"),), "zero 3": (zero(3, "dp"),), "chunks": (zero(3, "dp", chunk="auto"),)}


@settings(max_examples=16)
@given(
    st.lists(st.sampled_from(sorted(OPS)), min_size=1, max_size=6),
    st.sampled_from([ONE, DP, TP]),
    st.sampled_from(sorted(PLANS)),
    st.lists(st.sampled_from(sorted(WRAPS)), unique=True, max_size=3).filter(lambda wraps: not set(wraps) >= CLASH),
    st.sampled_from([torch.optim.SGD, torch.optim.AdamW]),
)
def test_random_steps_agree(names, mesh, plan, wraps, optimizer):
    step, state, batch = made_of(names, optimizer)
    staged = cf.shard(step, mesh, *(PLANS[plan] if mesh is not ONE else ()))
    for wrap in wraps:
        staged = WRAPS[wrap](staged)
    agree(staged, state, batch)


# ---- kinds, words, capacities ----


def lowered(chain, batch=8):
    step = programs.mlp(batch)
    return CHAINS[chain](step.fn).lower(step.state, step.batch)


def test_kinds_follow_what_made_a_value():
    state = sum(v.numel() * 8 for v in programs.mlp().state["params"].values())
    plain, three = lowered("plain").memory(), lowered("zero 3 gathered anew").memory()
    assert plain.by_kind["device"]["parameters"][0] == state
    assert plain.by_kind["device"]["optimizer state"][0] == 2 * state + 4 + 4  # node 0 makes the next number of the step
    assert three.by_kind["device"]["parameters"][0] == state // 2
    assert max(three.by_kind["device"]["parameter copies"]) > 0 == max(plain.by_kind["device"]["parameter copies"])
    assert max(plain.by_kind["device"]["gradients"]) > 0 == plain.by_kind["device"]["gradients"][0]
    assert max(plain.by_kind["device"]["collective buffers"]) == 0


def test_what_is_cast_to_be_a_gradient_is_one():
    step = programs.mlp(dtype=torch.float32)
    report = cf.precision(cf.shard(step.fn, ONE), "bf16").lower(step.state, step.batch).memory()
    largest = max(v.numel() for v in step.state["params"].values())
    assert max(report.by_kind["device"]["gradients"]) == largest * (2 + 4)


def test_activations_grow_with_the_batch_and_nothing_else_of_the_state_does():
    small, large = (lowered("plain", batch).memory() for batch in (8, 32))
    few, many = small.by_kind["device"], large.by_kind["device"]
    assert max(many["activations"]) > 3 * max(few["activations"])
    assert all(max(many[kind]) == max(few[kind]) for kind in ("parameters", "optimizer state"))
    # Gradients may wait for a common update, in room that activations have left.
    assert max(many["gradients"]) <= max(many["parameters"])


def test_a_person_sees_what_to_do():
    step = programs.mlp(512)
    text = str(cf.shard(step.fn, ONE).lower(step.state, step.batch).memory())
    head, curve, first, *rest = text.splitlines()
    assert head.startswith("device: peak ") and " of fc2, test_memory_agrees.py:" in head
    assert set(curve.strip()) <= set("▁▂▃▄▅▆▇█") and "█" in curve
    assert first.split()[0] == "activations" and "cf.checkpoint(step, budget=...)" in first
    assert any("linear" in line and "test_memory_agrees.py:" in line for line in rest)


def test_identical_layers_are_one_line():
    net = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(6)))
    step_fn, state = cf.train_step(
        cf.functional(net), cf.adapt(torch.optim.SGD, lr=0.1), loss=lambda out, b: out.sum(), inputs=lambda b: ((b,), {})
    )
    report = cf.shard(step_fn, ONE).lower(state, torch.ones(4, 8)).memory()
    assert "   6 x      256 B  parameters         state.params.*.weight" in str(report)


def test_what_does_not_fit_names_what_is_alive_and_the_line():
    step = programs.mlp(512)
    low = cf.shard(step.fn, ONE).lower(step.state, step.batch)
    peak, words = low.memory().peak_bytes["device"], r"activations .*largest: .*linear.*test_memory_agrees\.py:\d+"
    with pytest.raises(CapacityError, match=rf"a rank would hold .*{words}.*Try for the activations: .*cf\.checkpoint"):
        low.memory().check({"device": peak - 1})
    low.memory().check({"device": peak, "host": None})
    given = arguments_of(low, (step.state, step.batch))
    with pytest.raises(CapacityError, match=rf"a simulated rank holds .* of device memory at operator \d+ of .*{words}"):
        measure(low.program, limited(ONE, peak - 1), given.copies(range(len(given.shards))))
    with pytest.raises(PlanError, match=rf"the least found has a peak of .*It holds .*{words}"):
        cf.checkpoint(cf.shard(step.fn, ONE), policy="everything", budget=peak - 1).lower(step.state, step.batch)


def test_what_one_rank_keeps_of_a_sum_holds_no_more_than_the_others_zeros():
    """A part of larger memory: the first rank would hold all of it."""

    def add(base, index, new):
        return (base.flip(0) * 2)[:, :1].index_add(0, index, new)

    step = cf.shard(add, cf.Mesh(dp=2, topology="ideal"), in_specs=("a b", "(dp a)", "(dp a) b"), out_specs="a b")
    args = torch.randn(3, 600), torch.arange(2).repeat(512), torch.randn(1024, 1)
    low = step.lower(*args)
    assert "keep_first" in low.text()
    measured = measure(low.program, low.mesh, arguments_of(low, step.arguments(args)).copies(range(3)))
    assert dict(low.memory().timeline) == measured.timeline
