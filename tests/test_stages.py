"""Stages: values that exist on some ranks (`@pp=1`), operators that run there, and what is sent between them."""

import random
import re
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from colofunc_plugins import stages, tensor, zero
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

import colofunc as cf
from colofunc.compiler import completion
from colofunc.executors.disk.tensors import OnDisk
from colofunc.executors.launch import launch
from colofunc.program.check import check_program
from colofunc.program.memory import memory
from colofunc.program.places import on_rank
from colofunc.spec.conversions.conversion import conversion, conversion_s
from colofunc.spec.conversions.pattern import pattern_s
from colofunc.testing import check

MESH = cf.Mesh(pp=2, dp=2, topology="8xa100-80g")
TWO = {"0.*": 0, "2.*": 1, "4.*": 1}


def mlp(optimizer: Any = torch.optim.AdamW) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    step, state = cf.train_step(
        cf.functional(net), cf.adapt(optimizer, lr=1e-2), lambda out, b: (out - b[1]).pow(2).mean(), inputs=lambda b: ((b[0],), {})
    )
    return step, state, (torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64))


# ---- layouts ----


@pytest.mark.parametrize("text", ["a b @pp=1", "(dp a) b @pp=0", "a b +dp @pp=1", "a b @host @pp=0", "(dp a) b"])
def test_a_layout_says_where_a_value_exists(text: str) -> None:
    layout = cf.Spec(text).bind(MESH, (8, 4))
    assert layout.text() == text and cf.Spec(layout.text()).bind(MESH, (8, 4)) is layout


def test_at_all_indices_is_everywhere() -> None:
    assert cf.Spec("a b @pp=0,1").bind(MESH, (8, 4)) is cf.Spec("a b").bind(MESH, (8, 4))
    assert cf.Spec("a b @pp=0").bind(cf.Mesh(pp=1), (8, 4)).at is None
    assert cf.Spec("a @pp=3,0").bind(cf.Mesh(pp=4), (8,)).text() == "a @pp=0,3"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a b @pp=2", "index 2 of axis 'pp' is not in 0..1"),
        ("a b @qq=0", "names no mesh axis; axes: 'dp', 'pp'"),
        ("(pp a) b @pp=0", "mesh axis 'pp' is used 2 times"),
        ("a b +pp @pp=0", "mesh axis 'pp' is used 2 times"),
        ("a b @pp=", "says no indices of an axis"),
        ("a b @pp=0,0", "says an index twice"),
        ("a b @pp=0 @dp=1", "two places"),
    ],
)
def test_bad_places_are_errors(text: str, says: str) -> None:
    with pytest.raises(cf.SpecError, match=re.escape(says)):
        cf.Spec(text).bind(MESH, (8, 4))


def test_the_ranks_at_indices_of_axes() -> None:
    mesh = cf.Mesh(pp=3, dp=2)
    assert mesh.at(pp=1) == (2, 3) and mesh.at(pp=(0, 2), dp=1) == (1, 5) and mesh.at() == tuple(range(6))
    with pytest.raises(cf.MeshError, match=r"index 3 of axis 'pp' is not in 0\.\.2"):
        mesh.at(pp=3)
    with pytest.raises(cf.MeshError, match="no axis 'pq'"):
        mesh.at(pq=0)


SPECS = ["a b", "(dp a) b", "a (dp b)", "(tp dp a) b"]
PLACES = ["", " @pp=0", " @pp=1", " @pp=2", " @pp=0,2"]


@pytest.mark.parametrize("seed", range(40))
def test_a_value_stays_itself_wherever_it_goes(seed: int) -> None:
    draw = random.Random(seed)
    mesh, x = cf.Mesh(pp=3, dp=2, tp=2), torch.randn(8, 4, dtype=torch.float64)
    moved = cf.distribute(x, draw.choice(SPECS) + draw.choice(PLACES), mesh)
    for _ in range(3):
        source = moved.sharding
        moved = moved.redistribute(draw.choice(SPECS) + draw.choice(PLACES))
        target = moved.sharding
        assert torch.equal(moved.full(), x)
        for rank, shard in enumerate(moved.shards):
            here = target.at is None or mesh.coordinates(rank)["pp"] in target.at[1]
            assert shard.shape == (target.local_shape if here else (0,))
        moves = conversion(source, target, mesh, 8).moves
        there = source.at is None or (target.at is not None and set(target.at[1]) <= set(source.at[1]))
        assert [move.target for move in moves].count("send") == (not there)


def test_a_sum_at_one_stage_takes_no_help_from_the_others() -> None:
    """Between boxes a gradient is summed sooner in halves, if both stages had a copy of it; one stage has none of the other's."""
    mesh = cf.Mesh(pp=2, dp=32, topology="8xa100-80g")
    layouts = [cf.Spec(text).bind(mesh, (1 << 17, 1 << 12)) for text in ("a b +dp", "(dp a) b")]
    anywhere, there = conversion(*layouts, mesh, 4), conversion(*(one.with_at(("pp", (1,))) for one in layouts), mesh, 4)
    assert [move.args[0] for move in anywhere.moves if move.target in ("take_shard", "all_gather")] == [("pp",), ("pp",)]
    assert [move.target for move in there.moves if move.target != "rearrange"] == ["reduce_scatter"]
    assert anywhere.cost_s < there.cost_s == conversion_s(*layouts, mesh, 4, apart="pp") == pattern_s(*layouts, mesh, 4, apart="pp")


def test_stages_of_several_boxes_each() -> None:
    model = cf.functional(nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 4096)).to("meta"))
    step_fn, state = cf.train_step(model, cf.adapt(torch.optim.SGD, lr=0.1), lambda out: out.square().mean())
    step = cf.shard(step_fn, cf.Mesh(pp=2, dp=32, topology="8xa100-80g"), zero(1, "dp"))
    low = cf.pipeline(step, microbatches=2).lower(state, cf.abstract((64, 4096)))
    sums = [node for node in low.program.nodes if node.target == "colofunc.reduce_scatter_start"]
    assert sums and all(node.args[1] == ("dp",) and node.on is not None for node in sums)


def test_eager_operators_run_where_their_operands_are() -> None:
    x, y = torch.randn(8, 4, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    a, b = cf.distribute(x, "(dp a) b @pp=1", MESH), cf.distribute(y, "a b @pp=1", MESH)
    made = a @ b
    assert made.spec.pattern.endswith("@pp=1") and torch.equal(made.full(), x @ y)
    assert made.shards[0].shape == (0,)
    assert torch.equal((a @ cf.distribute(y, "a b", MESH)).full(), x @ y)
    apart = a @ cf.distribute(y, "a b @pp=0", MESH)
    assert torch.equal(apart.full(), x @ y)


JOINED: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "product": lambda a, b: a @ b.mT,
    "stack": lambda a, b: torch.stack([a, b]),
    "cat": lambda a, b: torch.cat([a, b]),
    "add_": lambda a, b: a.clone().add_(b),
    "copy_": lambda a, b: a.clone().copy_(b),
    "where": lambda a, b: torch.where(a > 0, a, b),
}
ALONG = ("(pp a) b", "a (pp b)", "(dp pp a) b", "(a pp) (dp b)", "(pp a~) b")


@pytest.mark.parametrize("name", JOINED)
@pytest.mark.parametrize("along", ALONG)
def test_eager_operators_join_what_is_at_an_index_and_what_is_split_along_its_axis(along: str, name: str) -> None:
    rows = 7 if "~" in along else 8
    x, y = torch.randn(rows, 4, dtype=torch.float64), torch.randn(rows, 4, dtype=torch.float64)
    for place in ("a b @pp=1", "a (dp b) @pp=0"):
        a, b = cf.distribute(x, place, MESH), cf.distribute(y, along, MESH)
        made, turned = JOINED[name](a, b), JOINED[name](b, a)
        torch.testing.assert_close(made.full(), JOINED[name](x, y))
        torch.testing.assert_close(turned.full(), JOINED[name](y, x))
        if name.endswith("_"):  # what is written to stays where it is
            assert (made.sharding, turned.sharding) == (a.clone().sharding, b.clone().sharding)
        else:
            assert made.sharding.at == turned.sharding.at == a.sharding.at


def test_a_pending_sum_over_the_axis_of_a_place_is_added_up_first() -> None:
    x = torch.randn(8, 4, dtype=torch.float64)
    pending = cf.distribute(x, "a (pp b)", MESH) @ cf.distribute(x.mT.contiguous(), "(pp a) b", MESH)
    pending = pending.redistribute("a b +pp") if not pending.sharding.pending else pending
    made = pending + cf.distribute(torch.ones(8, 8, dtype=torch.float64), "a b @pp=1", MESH)
    torch.testing.assert_close(made.full(), x @ x.mT + 1)


# ---- results ----


@pytest.mark.parametrize("asked", [*ALONG, "a b @pp=0", "a b @pp=1", "(dp a) b @pp=0", "a b @dp=1"])
@pytest.mark.parametrize("weight", ["i o @pp=1", "i (dp o) @pp=0"])
def test_a_result_lies_as_it_is_asked_to(weight: str, asked: str) -> None:
    """Split along the axis of its place, or at another index, wherever it is computed."""
    step = cf.shard(lambda w, x: x @ w, MESH, in_specs=(weight, "b i @pp=0"), out_specs=asked)
    w, x = torch.randn(6, 4, dtype=torch.float64), torch.randn(7 if "~" in asked else 8, 6, dtype=torch.float64)
    low = step.lower(w, x)
    check_program(low.program, MESH)
    found, compared = step(w, x), step.compare(w, x)
    assert found.sharding is cf.distribute(x @ w, asked, MESH).sharding
    assert torch.equal(found.full(), x @ w) and compared.equal


# ---- steps ----

CHAINS: dict[str, Callable[[Any], Any]] = {
    "stages": lambda step: cf.shard(step, MESH, stages("pp", TWO)),
    "alone": lambda step: cf.shard(step, MESH, stages("pp", TWO), auto=False),
    "zero1": lambda step: cf.shard(step, MESH, stages("pp", TWO), zero(1, "dp")),
    "zero2": lambda step: cf.shard(step, MESH, stages("pp", TWO), zero(2, "dp")),
    "zero3": lambda step: cf.shard(step, MESH, stages("pp", TWO), zero(3, "dp")),
    "microbatches": lambda step: cf.accumulate(CHAINS["stages"](step), microbatches=2),
    "microbatches, zero3": lambda step: cf.accumulate(CHAINS["zero3"](step), microbatches=2),
    "checkpoint": lambda step: cf.checkpoint(CHAINS["zero1"](step), policy="nothing"),
    "budget": lambda step: cf.checkpoint(CHAINS["zero3"](step), budget=10_500),
    "offload": lambda step: cf.offload(CHAINS["zero1"](step), policy="host"),
}


@pytest.mark.parametrize("name", CHAINS)
def test_training_equals_one_device(name: str) -> None:
    step, state, batch = mlp()
    with cf.testing.float64():
        chain = CHAINS[name](step)
        low = check(chain, state, batch, steps=2).low
        assert {node.on for each in low.program.with_bodies() for node in each.nodes} >= {("pp", (0,)), ("pp", (1,))}
        check_program(low.program, MESH)
    assert CHAINS[name](step).compare(state, batch).equal


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad])
def test_other_optimizers_follow_their_parameters(optimizer: Any) -> None:
    step, state, batch = mlp(optimizer)
    chain = CHAINS["zero3"](step)
    low = chain.lower(state, batch)
    for value in (low.program.values[i] for i in low.program.inputs):
        if value.role in ("param", "state") and value.shape:
            stage = 0 if re.search(r"\.0\.(weight|bias)$", value.name) else 1
            assert value.layout is not None and value.layout.at == ("pp", (stage,)), value.name
    with cf.testing.float64():
        check(chain, state, batch, steps=2)


def gpt2(layers: int = 2) -> tuple[Any, Any, Any]:
    """With a tied weight: the embedding of stage 0 is the head of the last."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=layers, n_embd=16, n_head=2, vocab_size=32, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    step, state = cf.train_step(cf.functional(GPT2LMHeadModel(config).double()), cf.adapt(torch.optim.AdamW, lr=1e-3), clip=0.5)
    ids = torch.randint(32, (4, 8))
    return step, state, {"input_ids": ids, "labels": ids}


GPT2 = {"transformer.wte.*": (0, 1), "transformer.wpe.*": 0, "transformer.h.0.*": 0, "transformer.h.1.*": 1, "transformer.ln_f.*": 1}


def test_a_tied_weight_is_at_two_stages() -> None:
    step, state, batch = gpt2()
    mesh = cf.Mesh(pp=4, dp=1, topology="8xa100-80g")
    places = {"transformer.wte.*": (0, 3), "transformer.wpe.*": 0, "transformer.h.0.*": 1, "transformer.h.1.*": 2, "transformer.ln_f.*": 3}
    with cf.testing.float64():
        chain = cf.shard(step, mesh, stages("pp", places))
        low = check(chain, state, batch, steps=2).low
    weight = next(v for v in map(low.program.value, low.program.inputs) if v.name.endswith("params.transformer.wte.weight"))
    assert weight.layout is not None and weight.layout.at == ("pp", (0, 3))


@pytest.mark.parametrize("plans", [(zero(3, "dp"),), (tensor("1d", "dp"),), ()])
def test_a_language_model_with_clipping_in_two_stages(plans: tuple[Any, ...]) -> None:
    step, state, batch = gpt2()
    with cf.testing.float64():
        check(cf.shard(step, MESH, stages("pp", GPT2), *plans), state, batch, steps=2)


def test_an_encoder_and_a_decoder() -> None:
    torch.manual_seed(0)
    sizes = dict(vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0)
    net = T5ForConditionalGeneration(T5Config(decoder_start_token_id=0, **sizes)).double()
    step, state = cf.train_step(cf.functional(net), cf.adapt(torch.optim.SGD, lr=1e-2))
    batch = {"input_ids": torch.randint(32, (4, 6)), "labels": torch.randint(32, (4, 5))}
    places = {"encoder.*": 0, "decoder.*": 1, "shared.*": (0, 1)}
    with cf.testing.float64():
        check(cf.shard(step, MESH, stages("pp", places), zero(1, "dp")), state, batch, steps=2)


class Skips(nn.Module):
    """A value of the first stage is read by the last one, past the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle, self.up = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = torch.tanh(self.down(x))
        return self.up(torch.cat([torch.tanh(self.middle(first)), first], 1))


def test_a_skip_past_a_stage_travels_once() -> None:
    torch.manual_seed(0)
    step, state = cf.train_step(
        cf.functional(Skips().double()), cf.adapt(torch.optim.SGD, lr=1e-2), lambda out, b: out.pow(2).mean(), inputs=lambda b: ((b,), {})
    )
    chain = cf.shard(step, cf.Mesh(pp=3, topology="8xa100-80g"), stages("pp", {"down.*": 0, "middle.*": 1, "up.*": 2}))
    batch = torch.randn(8, 8, dtype=torch.float64)
    with cf.testing.float64():
        check(chain, state, batch, steps=2)
    sent = [node for node in chain.lower(state, batch).program.nodes if node.target == "colofunc.send" and node.phase == "forward"]
    large = [node.args[3:] for node in sent if chain.lower(state, batch).program.values[node.refs[0]].shape]
    assert sorted(large) == [(0, (1,)), (1, (2,))]  # the middle stage has what it would be sent with already


def test_a_forward_only_step() -> None:
    torch.manual_seed(0)
    net = cf.functional(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)).double())

    def infer(params: Any, x: torch.Tensor) -> torch.Tensor:
        return net.apply(params, net.buffers, x)[0]

    x = torch.randn(8, 8, dtype=torch.float64)
    step = cf.shard(infer, MESH, stages("pp", TWO))
    out = step(step.init(net.params, x), x)
    assert out.spec.pattern.endswith("@pp=1")
    torch.testing.assert_close(out.full(), infer(net.params, x))


# ---- what a rank has, holds and runs ----


def test_a_rank_runs_its_part_and_holds_its_stage_only() -> None:
    step, state, batch = mlp()
    low = CHAINS["zero3"](step).lower(state, batch)
    runs = [on_rank(low.program, MESH, rank).program for rank in range(4)]
    for mine in runs:
        check_program(mine, MESH)
        assert all(node.on is None for node in mine.nodes)
        assert {node.target for node in mine.nodes} >= {"colofunc.send", "colofunc.receive"}
    assert runs[0] == runs[1] and runs[2] == runs[3]
    peaks = [low.memory(rank).peak_bytes["device"] for rank in range(4)]
    assert peaks == [memory(mine).peak_bytes["device"] for mine in runs]
    assert low.memory().peak_bytes["device"] == max(peaks) == low.plan.peak_bytes
    assert max(peaks) < memory(low.program).peak_bytes["device"], "of the union, as if one rank did it all"
    assert max(low.cost(rank).flops for rank in range(4)) < low.cost(0).flops + low.cost(2).flops


def test_a_later_stage_waits_for_an_earlier_one() -> None:
    step, state, batch = mlp()
    low = CHAINS["alone"](step).lower(state, batch)
    first, last = low.lanes(0), low.lanes(2)
    assert len(first.starts_s) == len(on_rank(low.program, MESH, 0).program.nodes)
    linear = next(busy for busy in last.busy if busy.label == "linear")
    sent = next(busy for busy in first.busy if busy.label == "send")
    assert linear.start_s >= sent.end_s > 0


def test_state_lies_on_its_stage_and_is_saved_and_loaded_onto_any_mesh(tmp_path: Any) -> None:
    step, state, batch = mlp()
    chain = CHAINS["zero3"](step)
    placed = chain.init(state, batch)
    weight = placed["params"]["2.weight"]
    assert [tuple(shard.shape) for shard in weight.shards] == [(0,), (0,), (8, 16), (8, 16)]
    assert weight.local.numel() == 0 and torch.equal(weight.full(), state["params"]["2.weight"])
    placed, _ = chain(placed, batch)
    cf.save(str(tmp_path / "run"), placed)
    wanted = {name: x.full() for name, x in placed["params"].items()}
    for mesh in (MESH, cf.Mesh(dp=2), cf.Mesh(pp=2), cf.Mesh(pp=4), None):
        loaded = cf.load(str(tmp_path / "run"), mesh=mesh)["params"]
        for name, x in loaded.items():
            assert torch.equal(x.full() if isinstance(x, cf.DTensor) else x, wanted[name])
        if mesh is MESH:
            assert loaded["2.weight"].sharding is placed["params"]["2.weight"].sharding
            assert loaded["2.weight"].shards[0].numel() == 0


def test_a_plan_says_where_leaves_are_and_is_given_back() -> None:
    step, state, batch = mlp()
    plan = CHAINS["zero3"](step).lower(state, batch).plan
    again = cf.Plan.from_dict(plan.to_dict())
    assert again.leaf("state.params.2.weight").at == ("pp", (1,))
    low = cf.shard(step, MESH).with_plan(again).lower(state, batch)
    assert low.input_layouts[2].at == ("pp", (1,))
    assert low.plan.leaf("state.opt.exp_avg.0.weight").at == ("pp", (0,))
    assert "stages" in next(use.words for use in low.plan.axes if use.axis == "pp")


# ---- what cannot be ----


@pytest.mark.parametrize(
    ("plans", "says"),
    [
        ((stages("pp", {"0.*": 0, "7.*": 1}),), "'7.*' matches no parameter; the first are"),
        ((stages("pp", {"0.*": 2}),), "'0.*' is to be at index 2, and Mesh(pp=2, dp=2"),
        ((stages("pp", {"0.*": 0}), zero(3, "pp")), "stages(pp)"),
        ((stages("pp", {"0.*": 0}), stages("dp", {"2.*": 0})), "placed at indices of 2 axes, dp, pp"),
    ],
)
def test_what_cannot_be_placed_is_an_error(plans: tuple[Any, ...], says: str) -> None:
    step, state, batch = mlp()
    with pytest.raises(cf.PlanError, match=re.escape(says)):
        cf.shard(step, MESH, *plans).lower(state, batch)


def test_state_lies_on_the_disk_of_its_stage(tmp_path: Any) -> None:
    step, state, batch = mlp()
    chain = cf.offload(CHAINS["zero1"](step), policy="disk", disk=str(tmp_path))
    check(chain, state, batch, steps=2)
    placed = chain.init(state, batch)
    weight = placed["params"]["2.weight"]
    assert [isinstance(part, OnDisk) for part in weight.parts_in_flight] == [rank in MESH.at(pp=1) for rank in range(MESH.size)]
    assert torch.equal(weight.full(), state["params"]["2.weight"]) and chain(placed, batch)[0]["params"]["2.weight"].sharding.tier == "disk"


def test_stages_without_places_are_an_error() -> None:
    with pytest.raises(cf.PlanError, match="places nothing"):
        stages("pp", {})
    with pytest.raises(cf.PlanError, match="give an index of 'pp'"):
        stages("pp", {"0.*": -1})


def test_a_node_that_reads_what_is_elsewhere_is_an_error() -> None:
    step, state, batch = mlp()
    program = CHAINS["alone"](step).lower(state, batch).program
    index = next(k for k, node in enumerate(program.nodes) if node.on == ("pp", (1,)))
    edit = cf.ext.Editor(program)
    edit.replace(index, attrs.evolve(program.nodes[index], on=("pp", (0,))))
    with pytest.raises(cf.ProgramError, match="@pp=0"):
        check_program(edit.done(), MESH)


# ---- real ranks ----


def train(plan_of: str, steps: int = 2) -> dict[str, torch.Tensor]:
    with cf.testing.float64():
        step, state, batch = mlp()
        chain = cf.shard(step, cf.Mesh(pp=2), stages("pp", TWO))
        chain = cf.accumulate(chain, microbatches=2) if plan_of == "microbatches" else chain
        state = chain.init(state, batch)
        for _ in range(steps):
            state, metrics = chain(state, batch)
        assert state["params"]["0.weight"].local.numel() == (128 if cf.Mesh(pp=2).rank == 0 else 0)
        float(metrics["loss"])
        return {name: x.full() for name, x in state["params"].items()}


def both() -> dict[str, dict[str, torch.Tensor]]:
    return {name: train(name) for name in ("plain", "microbatches")}


@pytest.mark.dist
def test_two_real_ranks_compute_what_one_device_does() -> None:
    with cf.testing.float64():
        step, state, batch = mlp()
        for _ in range(2):
            state, _ = step(state, batch)
    for found in launch(both, 2):
        for mine in found.values():
            for name, x in state["params"].items():
                torch.testing.assert_close(mine[name], x, rtol=1e-10, atol=1e-10)


def split_results() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    mesh, w, x = cf.Mesh(pp=2), torch.randn(6, 4, dtype=torch.float64), torch.randn(8, 6, dtype=torch.float64)
    found = {}
    for asked in ("(pp a) b", "a (pp b)", "a b @pp=0"):
        made = cf.shard(lambda w, x: x @ w, mesh, in_specs=("i o @pp=1", "b i @pp=0"), out_specs=asked)(w, x)
        found[asked] = made.full() - x @ w
    at, along = cf.distribute(x, "a b @pp=1", mesh), cf.distribute(x, "(pp a) b", mesh)
    found["eager"] = (at + along).full() - 2 * x
    found["in place"] = along.clone().add_(at).full() - 2 * x
    return found


@pytest.mark.dist
def test_two_real_ranks_split_what_one_of_them_has() -> None:
    for found in launch(split_results, 2):
        for difference in found.values():
            torch.testing.assert_close(difference, torch.zeros_like(difference))


def test_a_weight_that_is_everywhere_is_read_in_every_phase_though_it_is_gathered_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is at both stages is at one of them as it is: no conversion, of which a phase would need one of its own."""
    as_it_is = completion.lower

    def lower(program: Any, choices: Any, *layouts: Any, **more: Any) -> Any:
        weights = frozenset(id for id in program.inputs if program.values[id].role == "param")
        mesh, record_local, _ = layouts[2:]
        return as_it_is(program, choices, *layouts[:2], mesh, record_local, weights, **more)

    monkeypatch.setattr(completion, "lower", lower)
    step, state, batch = gpt2()
    with cf.testing.float64():
        check(cf.shard(step, MESH, stages("pp", GPT2)), state, batch)
