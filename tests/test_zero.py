"""zero(stage, axes): where everything lies, what goes over the wire against the closed forms, and the numbers.

Closed forms (ZeRO, 1910.02054), P bytes of parameters on n ranks, n' = (n-1)/n: stages 1 and 2 reduce-scatter gradients
and gather parameters, 2 n' P; stage 3 gathers parameters for forward and for backward, at most 3 n' P.
"""

from collections import Counter
from typing import Any

import attrs
import colofunc_plugins
import pytest
import torch
from colofunc_plugins import tensor, zero
from torch import nn

import colofunc as cf
from colofunc.mesh import wire_bytes
from colofunc.program.cost import collective_of
from colofunc.testing import check

TOPOLOGY = "4xa100-80g"
DP2, DP4 = (cf.Mesh(dp=n, topology=TOPOLOGY) for n in (2, 4))


def mlp(
    width: int = 32, hidden: int = 128, rows: int = 8, clip: float | None = 1.0, freeze: str = "", opt: Any = torch.optim.AdamW,
    **options: Any,
) -> Any:  # fmt: skip
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width)).double()
    for name, p in net.named_parameters():
        p.requires_grad_(not freeze or not name.startswith(freeze))
    batch = {k: torch.randn(rows, width, dtype=torch.float64) for k in "xy"}
    fn = lambda out, b: ((out - b["y"]) ** 2).mean()  # noqa: E731
    step, state = cf.train_step(cf.functional(net), cf.adapt(opt, lr=1e-2, **options), loss=fn, inputs=lambda b: ((b["x"],), {}), clip=clip)
    return step, state, batch


def language(family: str) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    common = dict(vocab_size=64, bos_token_id=1, eos_token_id=1)
    if family == "gpt2":
        config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=16, **common)
        net = transformers.GPT2LMHeadModel(config)
    else:
        size = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
        net = transformers.LlamaForCausalLM(transformers.LlamaConfig(max_position_embeddings=16, **size, **common))
    step, state = cf.train_step(cf.functional(net.double()), cf.adapt(torch.optim.AdamW, lr=1e-3), clip=1.0)
    ids = torch.randint(0, 64, (8, 8))
    return step, state, {"input_ids": ids, "labels": ids.clone()}


def specs(low: Any) -> dict[str, str]:
    return {leaf.name: leaf.spec for leaf in low.plan.inputs}


def nbytes(state: Any) -> int:
    return sum(p.numel() * p.element_size() for p in state["params"].values())


def wires(low: Any, axis: str = "dp") -> Counter[str]:
    """Bytes by kind, without scalars (losses, norms)."""
    found = Counter({kind: n for (kind, on), n in low.cost().bytes.items() if on == axis})
    for node in low.program.nodes:
        collective = collective_of(node, low.program.values)
        if collective is None:
            continue
        kind, axes, n, nbytes = collective
        if axes == (axis,) and nbytes <= 64:
            found[kind] -= wire_bytes(kind, nbytes, n)
    return Counter({kind: n for kind, n in found.items() if n})


# ---- where things lie, and what moves ----


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("mesh", [DP2, DP4])
def test_one_and_two_split_moments_and_move_twice_the_parameters(stage: int, mesh: cf.Mesh) -> None:
    step, state, batch = mlp()
    low = cf.shard(step, mesh, zero(stage, "dp")).lower(state, batch)
    lies, n = specs(low), mesh.axis_size("dp")
    assert lies["batch.x"] == "(dp a) b" and lies["state.params.0.weight"] == "a b" and lies["state.params.0.bias"] == "a"
    assert lies["state.opt.exp_avg.0.weight"] == "(dp a) b" and lies["state.opt.exp_avg_sq.2.bias"] == "(dp a)"
    each = nbytes(state) * (n - 1) // n
    assert wires(low) == {"reduce_scatter": each, "all_gather": each}


@pytest.mark.parametrize("mesh", [DP2, DP4])
def test_three_splits_parameters_and_gathers_again_what_backward_reads(mesh: cf.Mesh) -> None:
    step, state, batch = mlp()
    n = mesh.axis_size("dp")
    kept, again = (cf.shard(step, mesh, zero(3, "dp", regather=how)).lower(state, batch) for how in (False, True))
    assert specs(again)["state.params.0.weight"] == specs(again)["state.opt.exp_avg.0.weight"] == "(dp a) b"
    each = nbytes(state) * (n - 1) // n
    assert wires(kept) == {"reduce_scatter": each, "all_gather": each}
    # The first layer's weight and the biases have no reader in backward: 3 n' P is what a deep net comes near to.
    second = state["params"]["2.weight"].numel() * 8 * (n - 1) // n
    assert wires(again) == {"reduce_scatter": each, "all_gather": each + second}


def test_the_plan_says_it_in_the_fields_words() -> None:
    step, state, batch = mlp()
    for stage in (1, 2, 3):
        said = str(cf.shard(step, DP2, zero(stage, "dp")).lower(state, batch).plan)
        assert said.startswith(f"dp: ZeRO-{stage} (zero({stage}, dp)) on dp=2")


def test_memory_falls_with_every_stage() -> None:
    """AdamW in one precision: 3 P of state. Stage 1 keeps P + 2 P / n of it, stage 3 keeps 3 P / n."""
    step, state, batch = mlp(128, 512)
    kept = {}
    for stage in (1, 3):
        low = cf.shard(step, DP4, zero(stage, "dp")).lower(state, batch)
        inputs = [low.program.values[i] for i in low.program.inputs]
        kept[stage] = sum(v.layout.local_numel * v.dtype.itemsize for v in inputs if v.role in ("param", "state") and v.shape)
        kept[stage, "peak"] = low.memory().peak_bytes["device"]
    assert kept[1] == nbytes(state) * (1 + 2 / 4) and kept[3] == nbytes(state) * 3 / 4
    assert kept[3, "peak"] < kept[1, "peak"] < cf.shard(step, cf.Mesh()).lower(state, batch).memory().peak_bytes["device"]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("chunk", [None, "auto"])
def test_everything_is_updated_where_it_lies(stage: int, chunk: Any) -> None:
    """Whole parameters too: what is gathered of their new shards is written over the old ones."""
    step, state, batch = mlp(32, 129)
    staged = cf.shard(step, DP4, zero(stage, "dp", chunk=chunk))
    placed = staged.init(state, batch)
    leaves = [x for kind in ("exp_avg", "exp_avg_sq") for x in placed["opt"][kind].values()] + list(placed["params"].values())
    before = [[part.data_ptr() for part in x.parts] for x in leaves]
    out, _ = staged(placed, batch)
    after = [x for kind in ("exp_avg", "exp_avg_sq") for x in out["opt"][kind].values()] + list(out["params"].values())
    assert [[part.data_ptr() for part in x.parts] for x in after] == before
    assert check(staged, state, batch).worst < 1e-10


def test_bf16_halves_the_bytes_of_gathers() -> None:
    step, state, batch = *_single(), {k: torch.randn(8, 32) for k in "xy"}
    plain = cf.shard(step, DP2, zero(3, "dp"))
    narrow = cf.precision(plain, "bf16")
    a, b = wires(plain.lower(state, batch)), wires(narrow.lower(state, batch))
    assert b["all_gather"] * 2 == a["all_gather"] and b["reduce_scatter"] == a["reduce_scatter"]
    # A policy of the parameters' own dtype changes nothing, on any mesh.
    assert check(cf.precision(cf.shard(mlp()[0], DP2, zero(3, "dp")), cf.Policy(torch.float64, torch.float64)), *mlp()[1:]).worst < 1e-10


def _single() -> Any:
    net = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 32))
    fn = lambda out, b: ((out - b["y"]) ** 2).mean()  # noqa: E731
    return cf.train_step(cf.functional(net), cf.adapt(torch.optim.AdamW, lr=1e-2), loss=fn, inputs=lambda b: ((b["x"],), {}))


@pytest.mark.parametrize("stage", [1, 3])
def test_microbatches_gather_once_and_reduce_once(stage: int) -> None:
    step, state, batch = mlp()
    staged = cf.accumulate(cf.shard(step, DP2, zero(stage, "dp")), microbatches=2)
    assert wires(staged.lower(state, batch)) == {"reduce_scatter": nbytes(state) // 2, "all_gather": nbytes(state) // 2}
    assert check(staged, state, batch).worst < 1e-10


# ---- numbers ----


# One family on every stage and both on the last; what is left is the same paths again.
STAGES_OF = [pytest.param(f, s, marks=pytest.mark.sweep if f == "gpt2" and s < 3 else ()) for f in ("gpt2", "llama") for s in (1, 2, 3)]


@pytest.mark.parametrize(("family", "stage"), STAGES_OF)
def test_language_models_equal_the_single_device(family: str, stage: int) -> None:
    with cf.testing.float64():
        assert check(cf.shard(language(family)[0], DP4, zero(stage, "dp")), *language(family)[1:]).worst < 1e-10


def test_one_rank_is_the_step_itself() -> None:
    step, state, batch = mlp()
    staged = cf.shard(step, cf.Mesh(dp=1), zero(3, "dp"))
    assert not staged.lower(state, batch).cost().calls
    assert check(staged, state, batch).worst < 1e-10


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_shapes_that_nothing_divides(stage: int, clip: float | None) -> None:
    """Small ones are copied, large ones padded and updated where they lie: P to the next multiple moves, twice."""
    step, state, batch = mlp(13, 337, clip=clip)
    staged = cf.shard(step, DP2, zero(stage, "dp"))
    low = staged.lower(state, batch)
    lies, each = specs(low), 2 * 338 * 13 * 8 // 2
    assert lies["state.opt.exp_avg.0.weight"] == "(dp a~) b" and lies["state.opt.exp_avg.2.weight"] == "a (dp b~)"
    assert lies["state.params.0.weight"] == ("(dp a~) b" if stage == 3 else "a b") and lies["state.params.0.bias"] == "a"
    moved = wires(low)
    assert moved["reduce_scatter"] == moved["all_gather"] == each and moved["all_reduce"] < 2 * (13 + 337 + 4) * 8
    assert check(staged, state, batch).worst < 1e-10
    assert check(cf.accumulate(staged, 2), state, batch).worst < 1e-10


GATHERED = ("Adamax", "Rprop")  # what they keep of a zero is not zero
OPTIONS = {
    "RMSprop": {"momentum": 0.9, "centered": True, "weight_decay": 0.1},
    "Adagrad": {"initial_accumulator_value": 0.1},
    "ASGD": {"t0": 1, "weight_decay": 0.1},
}


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "RMSprop", "NAdam", "ASGD", "Adamax"])
def test_padded_updates_of_other_optimizers(name: str) -> None:
    check_padded_updates(name)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["Adadelta", "RAdam", "Rprop"])
def test_padded_updates_of_the_rest(name: str) -> None:
    check_padded_updates(name)


def check_padded_updates(name: str) -> None:
    """Whatever its update, a parameter is gathered once, for its use, and never for the update; the numbers are the same."""
    step, state, batch = mlp(13, 337, opt=getattr(torch.optim, name), **OPTIONS.get(name, {}))
    staged = cf.shard(step, DP4, zero(3, "dp"))
    padded = 2 * 340 * 13 * 8 * 3 // 4
    assert (wires(staged.lower(state, batch))["all_gather"] == padded) is (name not in GATHERED)
    assert check(staged, state, batch, steps=3).worst < 1e-10


def test_without_eps_a_zero_over_a_zero_is_none() -> None:
    step, state, batch = mlp(13, 337, opt=torch.optim.RMSprop, eps=0.0)
    staged = cf.shard(step, DP4, zero(3, "dp"))
    assert wires(staged.lower(state, batch))["all_gather"] > 2 * 340 * 13 * 8 * 3 // 4


def test_a_padded_master_is_gathered_in_the_compute_dtype() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(13, 337), nn.ReLU(), nn.Linear(337, 13))
    fn = lambda out, b: (out**2).mean()  # noqa: E731
    step, state = cf.train_step(cf.functional(net), cf.adapt(torch.optim.AdamW, lr=1e-2), loss=fn, inputs=lambda b: ((b,), {}), clip=1.0)
    staged = cf.precision(cf.shard(step, DP2, zero(3, "dp", regather=False)), "bf16")
    moved = wires(staged.lower(state, torch.randn(8, 13)))
    assert moved["all_gather"] == 2 * 338 * 13 * 2 // 2 and moved["reduce_scatter"] == 2 * moved["all_gather"]


def test_another_dim_is_taken_where_the_first_does_not_divide() -> None:
    step, state, batch = mlp(32, 129)
    staged = cf.shard(step, DP4, zero(3, "dp"))
    assert specs(staged.lower(state, batch))["state.params.0.weight"] == "a (dp b)"
    assert check(staged, state, batch).worst < 1e-10


def test_frozen_weights_are_split_and_never_reduced() -> None:
    step, state, batch = mlp(64, 512, freeze="0")  # above 64 KiB: a hidden input of the step
    staged = cf.shard(step, DP2, zero(3, "dp"))
    low = staged.lower(state, batch)
    frozen = {leaf.name: leaf.spec for leaf in low.plan.inputs if leaf.role == "frozen"}
    assert frozen and "(dp a) b" in frozen.values()
    assert wires(low)["reduce_scatter"] == nbytes(state) // 2
    assert check(staged, state, batch).worst < 1e-10


class Odd(nn.Module):
    """A layer that nobody calls, and one weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.unused = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x)))


def test_unused_and_tied_parameters_and_groups() -> None:
    torch.manual_seed(0)
    opt = cf.adapt(torch.optim.AdamW, lr=1e-2, groups={"*.bias": dict(weight_decay=0)})
    fn = lambda out, b: (out**2).mean()  # noqa: E731
    step, state = cf.train_step(cf.functional(Odd().double()), opt, loss=fn, inputs=lambda b: ((b,), {}))
    staged = cf.shard(step, DP2, zero(3, "dp"))
    batch = torch.randn(4, 16, dtype=torch.float64)
    assert specs(staged.lower(state, batch))["state.params.unused.weight"] == "(dp a) b"
    assert check(staged, state, batch).worst < 1e-10


@pytest.mark.parametrize("opt", [torch.optim.Adagrad, torch.optim.SGD])
def test_other_optimizers(opt: Any) -> None:
    step, state, batch = mlp(opt=opt)
    assert check(cf.shard(step, DP2, zero(3, "dp")), state, batch).worst < 1e-10


# ---- in chunks, on two and four ranks ----


@pytest.mark.parametrize("mesh", [DP2, DP4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_unused_tied_grouped_clipped_and_accumulated(mesh: cf.Mesh, stage: int) -> None:
    torch.manual_seed(0)
    opt = cf.adapt(torch.optim.AdamW, lr=1e-2, groups={"*.bias": dict(weight_decay=0)}, weight_decay=0.1)
    fn = lambda out, b: (out**2).mean()  # noqa: E731
    step, state = cf.train_step(cf.functional(Odd().double()), opt, loss=fn, inputs=lambda b: ((b,), {}), clip=0.1)
    staged = cf.accumulate(cf.shard(step, mesh, zero(stage, "dp", chunk="auto")), microbatches=2)
    assert check(staged, state, torch.randn(8, 16, dtype=torch.float64)).worst < 1e-10


@pytest.mark.parametrize("mesh", [DP2, DP4])
def test_frozen_weights_in_chunks(mesh: cf.Mesh) -> None:
    step, state, batch = mlp(64, 512, freeze="0")
    staged = cf.shard(step, mesh, zero(3, "dp", chunk=1 << 20, regather=True))
    low = staged.lower(state, batch)
    n = mesh.axis_size("dp")
    assert wires(low)["reduce_scatter"] == nbytes(state) * (n - 1) // n
    assert check(staged, state, batch).worst < 1e-10


# ---- what stages and memory change ----


def narrow(stage: int, mesh: cf.Mesh = DP4, microbatches: int = 1, **options: Any) -> Any:
    step, state = _single()
    staged = cf.precision(cf.shard(step, mesh, zero(stage, "dp", chunk="auto", **options)), "bf16")
    staged = cf.accumulate(staged, microbatches)
    return staged.lower(state, {k: torch.randn(8 * microbatches, 32) for k in "xy"}), state


def test_masters_are_optimizer_state_in_every_stage() -> None:
    """bf16: 12 P / n of masters and moments; what is gathered is P of 2 bytes, once; what is reduced is P of 4."""
    elements = sum(p.numel() for p in _single()[1]["params"].values()) * 3 // 4
    for stage in (1, 2, 3):
        low, state = narrow(stage, **({"regather": False} if stage == 3 else {}))
        inputs = [low.program.values[i] for i in low.program.inputs]
        kept = sum(v.nbytes for v in inputs if v.role in ("param", "state") and v.shape)
        assert kept == 3 * nbytes(state) // 4
        assert wires(low) == {"all_gather": 2 * elements, "reduce_scatter": 4 * elements}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_masters_do_not_make_it_another_stage(stage: int) -> None:
    """Stage 1 stores masters as stage 3 stores parameters, and keeps what it computes with."""
    low, _ = narrow(stage)
    assert str(low.plan).startswith(f"dp: ZeRO-{stage} (zero({stage}, dp)) on dp=4")


def test_stage_two_reduces_every_microbatch_and_stage_one_once() -> None:
    (one, state), (two, _), (three, _) = narrow(1, microbatches=2), narrow(2, microbatches=2), narrow(3, microbatches=2)
    assert wires(two)["reduce_scatter"] == 2 * wires(one)["reduce_scatter"] == 2 * wires(three)["reduce_scatter"]
    assert [summed_bytes(low) for low in (one, two)] == [nbytes(state), nbytes(state) // 4]  # float32: 4 P, and 4 P / n
    peaks = [low.memory().peak_bytes["device"] for low in (one, two)]
    assert peaks[1] < peaks[0]


def summed_bytes(low: Any) -> int:
    """Of the gradients that the loop over microbatches adds up."""
    (loop,) = [node for node in low.program.nodes if node.loop is not None]
    return sum(low.program.values[o].nbytes for o in loop.outs if low.program.values[o].shape)


def test_whole_gradients_are_reduced_once_where_the_plan_says_so() -> None:
    """Stage 3 that gathers in each microbatch: 4 P of sums in place of 4 P / n, and half of the reductions."""
    (each, state), (last, _) = (narrow(3, microbatches=2, regather=True, reduce=how) for how in ("each", "last"))
    assert wires(each)["reduce_scatter"] == 2 * wires(last)["reduce_scatter"]
    assert wires(each)["all_gather"] == wires(last)["all_gather"]
    assert [summed_bytes(low) for low in (each, last)] == [nbytes(state) // 4, nbytes(state)]


@pytest.mark.parametrize("how", ["each", "last"])
def test_numbers_however_gradients_are_reduced(how: str) -> None:
    step, state, batch = mlp(rows=16)
    staged = cf.accumulate(cf.shard(step, DP2, zero(3, "dp", regather=True, reduce=how)), 4)
    assert check(staged, state, batch).worst < 1e-12


@pytest.mark.parametrize(("stage", "weights", "gradients"), [(1, 1, 1), (2, 1, 4), (3, 4, 4)])
def test_model_states_to_the_byte(stage: int, weights: int, gradients: int) -> None:
    """While microbatches run: 2 P of weights and 4 P of sums as the stage divides them, and 12 P / n."""
    low, state = narrow(stage, microbatches=2, **({"regather": True} if stage == 3 else {}))
    p = sum(x.numel() for x in state["params"].values())
    others = {"batch.x", "batch.y", *(f"%{i}" for i in low.program.constants)}
    alive = [live for live in low.memory().at_peak if "(each trip)" not in live.name and live.name not in others]
    assert sum(live.nbytes for live in alive if live.shape) == 2 * p // weights + 4 * p // gradients + 12 * p // 4


@pytest.mark.parametrize("microbatches", [2, 4])
def test_microbatches_where_an_embedding_is_looked_up_on_shards(microbatches: int) -> None:
    """Ids come to the ranks that have the rows; all the work stays in the loop nevertheless."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(1 << 16, 32), nn.Linear(32, 32)).double()
    fn = lambda out, b: (out**2).mean()  # noqa: E731
    step, state = cf.train_step(cf.functional(net), cf.adapt(torch.optim.AdamW, lr=1e-2), loss=fn, inputs=lambda b: ((b,), {}))
    staged = cf.precision(cf.shard(step, DP4, zero(3, "dp")), cf.Policy(torch.float64, torch.float32))
    staged, batch = cf.accumulate(staged, microbatches), torch.randint(0, 1 << 16, (16, 3))
    nodes = staged.lower(state, batch).program.nodes
    (loop,) = [node.loop for node in nodes if node.loop is not None]
    tables = [loop.body.values[n.refs[0]].shape for n in loop.body.nodes if n.target == "aten.embedding.default"]
    assert tables == [(1 << 14, 32)]
    assert not any(word in n.target for n in nodes for word in ("linear", "embedding"))
    assert check(staged, state, batch, tolerance=1e-5).worst < 1e-5  # computed in float32


def with_budget(nbytes: int) -> cf.Mesh:
    usual = cf.topology(TOPOLOGY)
    tiers = tuple(attrs.evolve(t, capacity_bytes=nbytes) if t.name == "device" else t for t in usual.tiers)
    return cf.Mesh(dp=4, topology=attrs.evolve(usual, tiers=tiers))


def test_parameters_are_gathered_again_where_memory_asks() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(128, 128) for _ in range(6)])
    fn = lambda o, b: (o**2).mean()  # noqa: E731
    step, state = cf.train_step(cf.functional(net), cf.adapt(torch.optim.SGD, lr=0.1), loss=fn, inputs=lambda b: ((b,), {}))
    batch = torch.randn(8192, 128)
    layer = 128 * 129  # a chunk; in one bucket with all others a gather lets go of nothing
    # In one process nothing is in flight, so that what is held is what is gathered.
    least = cf.shard(step, DP4, zero(3, "dp", regather=True, chunk=layer)).on("simulated").lower(state, batch)
    roomy = cf.shard(step, DP4, zero(3, "dp", chunk=layer)).on("simulated").lower(state, batch)
    budget = (least.memory().peak_bytes["device"] + roomy.memory().peak_bytes["device"]) // 2
    tight = cf.shard(step, with_budget(budget), zero(3, "dp", chunk=layer)).on("simulated").lower(state, batch)
    assert tight.memory().peak_bytes["device"] <= budget < roomy.memory().peak_bytes["device"]
    assert wires(roomy)["all_gather"] == nbytes(state) * 3 // 4 < wires(tight)["all_gather"] == wires(least)["all_gather"]


# ---- hybrid ----

HYBRID = cf.Mesh(dpo=2, dpi=2, topology=TOPOLOGY)


def test_hybrid_copies_over_one_axis_and_may_split_moments_over_both() -> None:
    step, state, batch = mlp()
    for moments, spec in ((None, "(dpi a) b"), (("dpi", "dpo"), "(dpi dpo a) b")):
        staged = cf.shard(step, HYBRID, zero(3, "dpi", replicate="dpo", optimizer=moments))
        low = staged.lower(state, batch)
        lies = specs(low)
        assert lies["batch.x"] == "(dpo dpi a) b" and lies["state.params.0.weight"] == "(dpi a) b"
        assert lies["state.opt.exp_avg.0.weight"] == spec
        assert wires(low, "dpi")["all_gather"] == nbytes(state) // 2  # parameters are gathered inside dpi only
        assert check(staged, state, batch).worst < 1e-10


@pytest.mark.parametrize("chunk", [None, "auto"])
def test_hybrid_moves_what_the_closed_forms_say_on_each_axis(chunk: Any) -> None:
    """P inside a node of n_i, P / n_i across: reduce-scatter and gather inside, an all-reduce or its two halves across."""
    step, state, batch = mlp(128, 512, rows=16)
    mesh, p = cf.Mesh(dpo=2, dpi=4, topology="4xa100-80g"), nbytes(state)  # two nodes of four
    low = cf.shard(step, mesh, zero(3, "dpi", replicate="dpo", chunk=chunk)).lower(state, batch)
    assert wires(low, "dpi") == {"all_gather": 3 * p // 4, "reduce_scatter": 3 * p // 4}
    loss_bytes = wire_bytes("all_reduce", 8, 2)  # by itself or in one buffer with gradients
    assert wires(low, "dpo").keys() == {"all_reduce"} and low.cost().bytes["all_reduce", "dpo"] == 2 * (p // 4) // 2 + loss_bytes
    low = cf.shard(step, mesh, zero(3, "dpi", replicate="dpo", optimizer=("dpi", "dpo"), chunk=chunk)).lower(state, batch)
    assert wires(low, "dpi")["all_gather"] == 3 * p // 4 and wires(low, "dpo")["all_gather"] == (p // 4) // 2
    reduced = sum(n for (kind, _), n in low.cost().bytes.items() if kind == "reduce_scatter")
    assert reduced == 7 * p // 8  # as over all eight at once


def test_three_axes_with_tensor_parallelism() -> None:
    mesh = cf.Mesh(dpo=2, dpi=2, tp=2, topology="8xa100-80g")
    step, state, batch = mlp()
    staged = cf.shard(step, mesh, zero(3, "dpi", replicate="dpo"), tensor("1d", "tp"))
    words = [use.words for use in staged.lower(state, batch).plan.axes]
    assert words == ["data parallel", "ZeRO-3", "Megatron column/row"]
    assert check(staged, state, batch).worst < 1e-10


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_small_tensor_whose_parts_do_not_divide_is_copied(stage: int, reverse: bool) -> None:
    """A bias of 30 on two ranks for tensor parallelism: 15 are no parts for two more."""
    step, state, batch = mlp(hidden=30)
    plans = [zero(stage, "dp"), tensor("1d", "tp")]
    checked = check(cf.shard(step, cf.Mesh(dp=2, tp=2, topology=TOPOLOGY), *(plans[::-1] if reverse else plans)), state, batch)
    places = {leaf.name: leaf.spec for leaf in checked.low.plan.inputs}
    assert places["state.opt.exp_avg.0.bias"] == "(tp a)" and places["state.opt.exp_avg.2.bias"] == "(dp a)"


# ---- refused ----


def test_two_plans_for_one_axis_are_both_named() -> None:
    step, state, batch = mlp()
    with pytest.raises(cf.PlanError, match=r"clash on axis 'dp' of 'state.params.2.weight': zero\(3, dp\).*tensor\(1d, dp\)"):
        cf.shard(step, DP2, zero(3, "dp"), tensor("1d", "dp")).lower(state, batch)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: zero(4, "dp"), "stages 1, 2 and 3, not 4"),
        (lambda: zero(True, "dp"), "not True"),
        (lambda: zero(3, ()), "needs an axis"),
        (lambda: zero(3, "dp", replicate="dp"), "cannot both split and copy"),
        (lambda: zero(3, "dp", optimizer="tp"), "must be among"),
        (lambda: zero(1, "dp", regather=True), "gathers no parameters"),
        (lambda: zero(3, "dp", chunk=0), "chunk=0 is no number of elements"),
        (lambda: zero(3, "dp", chunk="big"), "chunk='big' is no number"),
        (lambda: zero(3, "dp", reduce="late"), "reduce='late' is no way to reduce gradients; write reduce=\"each\" or reduce=\"last\""),
        (lambda: zero(2, "dp", reduce="last"), 'zero\\(2\\) keeps no whole gradient, so reduce="last" cannot be; use stage 1, or drop it'),
    ],
)
def test_refused(make: Any, says: str) -> None:
    with pytest.raises(cf.PlanError, match=says):
        make()


def test_rows_and_axes_are_checked() -> None:
    step, state, batch = mlp(rows=7)
    with pytest.raises(cf.PlanError, match=r"the 7 rows of the batch \('batch.x'\) do not divide over 2 ranks"):
        cf.shard(step, DP2, zero(3, "dp")).lower(state, batch)
    with pytest.raises(cf.MeshError, match="dpp"):
        cf.shard(step, DP2, zero(3, "dpp")).lower(state, batch)


def test_by_configuration() -> None:
    chain = cf.configure({"mesh": {"dp": 2}, "parallel": {"zero": {"stage": 3, "axes": "dp"}}}, plugins=[colofunc_plugins])
    step, state, batch = mlp()
    assert specs(chain.apply(step).lower(state, batch))["state.params.0.weight"] == "(dp a) b"
