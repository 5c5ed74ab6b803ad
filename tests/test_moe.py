"""experts(axis): strategies proved, four model families with one greedy expert and two starving ones, bytes, rounds."""

import importlib.util
import sys
from collections import Counter
from math import ceil
from pathlib import Path

import pytest
import torch
from colofunc_plugins import experts, ring, tensor, ulysses, zero
from colofunc_plugins.moe.rows import from_slots, slots, to_slots

import colofunc as cf
from colofunc.testing import check, sample

D = torch.float64
# At random, some choices are of no expert: below 0, or e and more.
ROUTES = {"random": lambda n, k, e: torch.randint(-2, e + 2, (n, k)), "greedy": lambda n, k, e: torch.full((n, k), e - 1),
          "starving": lambda n, k, e: torch.randint(0, 2, (n, k))}  # fmt: skip


# ---- strategies ----


def operands(route, n=8, k=2, e=4, f=8, d=4, bias=False, transposed=False):
    up, down = torch.randn(e, 2 * f, d, dtype=D), torch.randn(e, d, f, dtype=D)
    if transposed:
        up, down = up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    biases = (torch.randn(e, 2 * f, dtype=D), torch.randn(e, d, dtype=D)) if bias else (None, None)
    return torch.randn(n, d, dtype=D), ROUTES[route](n, k, e), torch.rand(n, k, dtype=D), up, down, *biases, "silu", True, transposed


@pytest.mark.parametrize("form", [dict(), dict(bias=True, transposed=True)], ids=["plain", "biases"])
@pytest.mark.parametrize("route", ROUTES)
def test_dispatch_computes_what_the_operator_does(route, form) -> None:
    args, backward = operands(route, **form), [torch.randn(8, 4, dtype=D)]
    calls = {"colofunc.experts": [sample(*args)],
             "colofunc.experts_backward": [sample(*backward, *args, needed) for needed in (True, False)]}  # fmt: skip
    for target, samples in calls.items():
        done = cf.testing.check_strategies(experts("a"), target, *samples, meshes=[cf.Mesh(a=2), cf.Mesh(a=4), cf.Mesh(a=2, b=2)])
        assert {"{a: dispatch}", "{a: dispatch, b: b0}", "{a: dispatch, b: f}"} <= {d.strategy for d in done}
        done = cf.testing.check_strategies(experts(("a", "b")), target, *samples, meshes=[cf.Mesh(a=2, b=2)])
        assert {d.strategy for d in done} == {"{a: dispatch, b: dispatch}", "{a: staged, b: staged}"}


@pytest.mark.parametrize("route", ["random", "greedy"])
def test_several_rounds_lose_no_token(route) -> None:
    args = operands(route, n=32, k=1, e=8, f=2, d=2)
    backward = sample(torch.randn(32, 2, dtype=D), *args, True)
    for plan, mesh in ((experts("a"), cf.Mesh(a=8)), (experts(("a", "b")), cf.Mesh(a=2, b=4))):
        cf.testing.check_strategies(plan, "colofunc.experts", sample(*args), meshes=[mesh])
        cf.testing.check_strategies(plan, "colofunc.experts_backward", backward, meshes=[mesh])


def test_no_tokens_are_dispatched() -> None:
    args = operands("random", n=0)
    calls = {"colofunc.experts": sample(*args), "colofunc.experts_backward": sample(torch.randn(0, 4, dtype=D), *args, True)}
    for target, one in calls.items():
        done = cf.testing.check_strategies(experts("a"), target, one, meshes=[cf.Mesh(a=2)])
        assert "{a: dispatch}" in {d.strategy for d in done}


def test_choices_that_int32_does_not_hold_are_of_no_expert() -> None:
    """They travel in int32, beside choices of the same token that are of one."""
    args = list(operands("random"))
    args[1] = torch.tensor([[0, 2**32 + 1], [3, -(2**32) + 2], [2**33, 1], [2, 2**32 - 1]] * 2)
    calls = {"colofunc.experts": sample(*args), "colofunc.experts_backward": sample(torch.randn(8, 4, dtype=D), *args, True)}
    for target, one in calls.items():
        assert cf.testing.check_strategies(experts("a"), target, one, meshes=[cf.Mesh(a=2)])


def test_choices_of_no_expert_have_no_slot() -> None:
    index = torch.tensor([[-2, 4], [5, 3], [-1, 0], [torch.iinfo(torch.int64).max, torch.iinfo(torch.int64).min]])  # two owners of two
    slot, rows = slots(index, 2, 2, 2)
    assert slot.tolist() == [[-1, -1], [-1, 4], [-1, 0], [-1, -1]] and rows.tolist() == [[1, 1], [0, 0]]


def test_slots_hold_each_token_once_per_owner() -> None:
    index = torch.tensor([[0, 1], [2, 0], [3, 3], [-1, 2]])  # two owners of two experts
    slot, rows = slots(index, 2, 2, 2)
    assert slot.tolist() == [[0, -1], [4, 1], [5, -1], [-1, 6]] and rows.tolist() == [[2, 2], [1, 1]]
    x = torch.arange(4.0).unsqueeze(1)
    first, second = (to_slots(x, slot, 2, 2, t, -9.0).flatten().tolist() for t in (0, 1))
    assert (first, second) == ([0, 1, 1, 2], [-9, -9, 3, -9])
    back = sum(from_slots(to_slots(x, slot, 2, 2, t), slot, t) for t in (0, 1))
    assert back.flatten().tolist() == [0, 2, 2, 3]  # token 1 went to both


# ---- a model of our own ----


def own(mesh, *plans, wrap=lambda s: s, n=8, k=2, e=4, d=6, f=8, capacity=None, greedy=False, aux=0.0):
    """A step of one residual layer of experts."""
    torch.manual_seed(0)
    params = {"router": torch.randn(e, d, dtype=D), "up": torch.randn(e, 2 * f, d, dtype=D) / 2, "down": torch.randn(e, d, f, dtype=D) / 2}
    batch = {"x": torch.randn(n, d, dtype=D), "y": torch.randn(n, d, dtype=D)}
    if greedy:
        batch["x"][:, 0] = 9.0
        params["router"][:, 0] = torch.arange(e, dtype=D)

    def loss(p, b):
        logits = b["x"] @ p["router"].T
        index, weight, scores = cf.moe.route(logits, k)
        y = b["x"] + cf.moe.experts(b["x"], index, weight, p["up"], p["down"], capacity_factor=capacity)
        return ((y - b["y"]) ** 2).mean() + (aux * cf.moe.balance_loss(scores, index) if aux else 0) + 0.01 * cf.moe.z_loss(logits)

    def step(state, b):
        value, grads = cf.value_and_grad(loss)(state["params"], b)
        return {"params": {name: p - 0.1 * grads[name] for name, p in state["params"].items()}}, {"loss": value}

    return wrap(cf.shard(step, mesh, *plans)), {"params": params}, batch


PLACES = {
    "ep2": lambda: (cf.Mesh(ep=2), experts("ep")),
    "ep4": lambda: (cf.Mesh(ep=4), experts("ep")),
    "dp ep": lambda: (cf.Mesh(dp=2, ep=2), zero(3, "dp"), experts("ep")),
    "all ranks": lambda: (cf.Mesh(dp=2, ep=2), zero(3, ("dp", "ep")), experts("ep")),
    "two levels": lambda: (cf.Mesh(epo=2, epi=2), experts(("epo", "epi"))),
}


# Each place with each capacity and each kind of routing; every other pair of these two, by turns, is in the sweep.
ROUTED = [
    pytest.param(place, capacity, greedy, marks=pytest.mark.sweep if (p + c + greedy) % 2 else (), id=f"{place}-{capacity}-{routing}")
    for p, place in enumerate(PLACES)
    for c, capacity in enumerate((None, 0.5))
    for greedy, routing in enumerate(("even", "greedy"))
]


@pytest.mark.parametrize(("place", "capacity", "greedy"), ROUTED)
def test_numbers_of_one_device(place, capacity, greedy) -> None:
    step, state, batch = own(*PLACES[place](), capacity=capacity, greedy=greedy, aux=0.1)
    low = check(step, state, batch).low
    notes = {n.note for n in low.program.nodes if n.target in ("colofunc.experts", "colofunc.experts_backward")}
    assert all("dispatch" in note or "staged" in note for note in notes) and low.coverage().fallbacks == ()
    specs = {leaf.name.split(".")[-1]: leaf.spec for leaf in low.plan.inputs}
    assert specs["up"].strip("(").startswith("epo epi" if place == "two levels" else "ep")


def test_microbatches() -> None:
    check(*own(cf.Mesh(ep=2), experts("ep"), wrap=lambda s: cf.accumulate(s, 2), n=16))


def test_a_capacity_over_microbatches_is_refused() -> None:
    step, state, batch = own(cf.Mesh(ep=2), experts("ep"), wrap=lambda s: cf.accumulate(s, 2), n=16, capacity=0.5)
    with pytest.raises(cf.PlanError, match="mixes the samples of the batch"):
        step.lower(state, batch)


def test_microbatches_and_several_rounds() -> None:
    step, state, batch = own(cf.Mesh(ep=8), experts("ep"), wrap=lambda s: cf.accumulate(s, 2), n=128, k=1, e=8)
    check(step, state, batch, steps=1)


@pytest.mark.parametrize(("ranks", "k", "n"), [(2, 2, 16), (4, 1, 64), (8, 1, 64)])
def test_bytes_on_the_wire(ranks, k, n) -> None:
    """The closed form of `dispatch`: m expected rows per queue, payloads of width, choices (int32) and weights."""
    step, state, batch = own(cf.Mesh(ep=ranks), experts("ep"), n=n, k=k, e=8)
    low = step.lower(state, batch)
    d, m = 6, min(n // ranks, ceil(n // ranks * (1 - (1 - 1 / ranks) ** k)))
    forward, backward = 2 * d * 8 + k * (4 + 8), 3 * d * 8 + k * (4 + 2 * 8)
    assert low.cost().bytes["all_to_all", "ep"] == (ranks - 1) * m * (forward + backward)


@pytest.mark.parametrize("greedy", [False, True])
def test_what_travels_is_what_is_needed(greedy, monkeypatch) -> None:
    """Rows that an all-to-all moves, as the executor sees them: the longest queue of any pair of ranks."""
    moved = []
    monkeypatch.setattr("colofunc.executors.simulated_collectives.first_rows", lambda x, count: moved.append(count) or x[:, :count])
    step, state, batch = own(cf.Mesh(ep=4), experts("ep"), n=32, k=1, greedy=greedy)
    step(step.init(state, batch), batch)
    index = (batch["x"] @ state["params"]["router"].T).argmax(-1).reshape(4, 8)
    longest = max(Counter(rank).most_common(1)[0][1] for rank in index.tolist())
    rounds = max(r for r in (1, 2) if 8 % r == 0)
    want = {min(8 // rounds, max(0, longest - t * (8 // rounds))) for t in range(rounds)}
    assert set(moved) == want and (longest == 8) == greedy


def test_rounds_bound_the_buffers() -> None:
    step, state, batch = own(cf.Mesh(ep=8), experts("ep"), n=256, k=1, e=8)
    low = step.lower(state, batch)
    buffers = {low.program.values[n.refs[0]].shape for n in low.program.nodes if n.target == "colofunc.all_to_all"}
    assert {shape[:2] for shape in buffers} == {(8, 8)}  # 32 tokens of a rank in 4 rounds
    rounds = [n for n in low.program.nodes if n.target == "colofunc.experts"]
    assert len(rounds) == 4


# ---- transformers ----

SMALL = dict(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=16)
FAMILIES = {
    "mixtral": ("Mixtral", dict(intermediate_size=24, num_local_experts=4, output_router_logits=True)),
    "qwen3_moe": ("Qwen3Moe", dict(intermediate_size=24, head_dim=8, num_experts=4, moe_intermediate_size=8, norm_topk_prob=True,
                                   output_router_logits=True)),
    "olmoe": ("Olmoe", dict(intermediate_size=16, num_experts=4, output_router_logits=True, eos_token_id=1)),
    "deepseek_v3": ("DeepseekV3", dict(intermediate_size=24, moe_intermediate_size=8, n_routed_experts=4, num_local_experts=4, n_group=2,
                                       topk_group=1, n_shared_experts=1, first_k_dense_replace=0, kv_lora_rank=8, q_lora_rank=8,
                                       qk_rope_head_dim=4, v_head_dim=8, qk_nope_head_dim=4)),
}  # fmt: skip
STAGES = {
    "ep2": lambda: (cf.Mesh(ep=2), experts("ep")),
    "ep4": lambda: (cf.Mesh(ep=4), experts("ep")),
    "zero1": lambda: (cf.Mesh(dp=2, ep=2), zero(1, "dp"), experts("ep")),
    "zero3": lambda: (cf.Mesh(dp=2, ep=2), zero(3, "dp"), experts("ep")),
    "zero3 all": lambda: (cf.Mesh(dp=2, ep=2), zero(3, ("dp", "ep")), experts("ep")),
}


def language(family, implementation="grouped_mm", greedy=True, opt=torch.optim.SGD):
    """Two experts get all tokens, two none: router weights see one feature, which the embedding makes large."""
    tf = pytest.importorskip("transformers")
    name, more = FAMILIES[family]
    config = getattr(tf, f"{name}Config")(**SMALL, num_experts_per_tok=2, experts_implementation=implementation, **more)
    torch.manual_seed(0)
    net = getattr(tf, f"{name}ForCausalLM")(config).double()
    with torch.no_grad():
        net.get_input_embeddings().weight[:, 0] = 10.0
        for part, p in net.named_parameters():
            if part.endswith("mlp.gate.weight") and greedy:
                p.zero_()
                p[:2, 0] = torch.tensor([2.0, 1.0])
    ids = torch.randint(1, 31, (8, 6))
    step, state = cf.train_step(cf.functional(net), cf.adapt(opt, lr=0.05))
    return step, state, {"input_ids": ids, "labels": ids}


def trained(step, state, batch):
    new, _ = step(step.init(state, batch), batch)
    return {name: (p.full() - state["params"][name]).abs().amax((1, 2)) for name, p in new["params"].items() if ".experts." in name}


# Every family and every stage at least once, the family with most operators on the smallest mesh; the others in the sweep.
BY_DEFAULT = {("deepseek_v3", "ep2"), ("qwen3_moe", "ep4"), ("olmoe", "zero1"), ("mixtral", "zero3"), ("mixtral", "zero3 all")}
EVERY = [pytest.param(f, s, marks=() if (f, s) in BY_DEFAULT else pytest.mark.sweep) for f in FAMILIES for s in STAGES]


@pytest.mark.parametrize(("family", "stage"), EVERY)
def test_families_train_with_greedy_and_starving_experts(family, stage) -> None:
    step, state, batch = language(family)
    with cf.testing.float64():
        step = cf.shard(step, *STAGES[stage]())
        low = check(step, state, batch).low
        for moved in trained(step, state, batch).values():
            assert moved[:2].all() and not moved[2:].any()  # no gradient, no step
    assert {n.note.split(":")[1].split(",")[0] for n in low.program.nodes if n.target.startswith("colofunc.experts")} == {" dispatch}"} or (
        stage.startswith("zero")
    )
    assert low.coverage().fallbacks == () and not [n for n in low.program.nodes if "grouped" in n.target or "sort" in n.target]


@pytest.mark.parametrize("order", [1, -1])
def test_states_over_all_ranks_and_experts_over_some(order) -> None:
    """ZeRO-3 over dp and ep holds for dense weights, over dp alone for experts, whichever plan is named first."""
    step, state, batch = language("mixtral")
    plans = [zero(3, ("dp", "ep")), experts("ep")][::order]
    low = cf.shard(step, cf.Mesh(dp=2, ep=2), *plans).lower(state, batch)
    specs = {leaf.name.split("layers.0.")[-1]: leaf.spec for leaf in low.plan.inputs if ".params." in leaf.name}
    assert specs["self_attn.q_proj.weight"] == "(dp ep a) b" and specs["input_layernorm.weight"] == "(dp ep a)"
    assert specs["mlp.experts.gate_up_proj"].startswith("(ep ") and "dp" in specs["mlp.experts.gate_up_proj"]


def test_axes_that_are_decided_first_leave_room_for_experts() -> None:
    """Four experts over two ranks, when two other axes could have taken all of them before."""
    step, state, batch = own(cf.Mesh(dp=2, cp=2, ep=2), zero(3, "dp"), experts("ep"), e=4)
    check(step, state, batch, steps=1)
    specs = {leaf.name.split(".")[-1]: leaf.spec for leaf in step.lower(state, batch).plan.inputs}
    assert specs["up"].strip("(").startswith("ep") and "dp" in specs["up"]


def test_batched_mm_and_tensor_parallelism_beside() -> None:
    step, state, batch = language("mixtral", "batched_mm", greedy=False, opt=torch.optim.AdamW)
    with cf.testing.float64():
        step = cf.shard(step, cf.Mesh(ep=2, tp=2), experts("ep"), tensor("1d", "tp"))
        low = check(step, state, batch).low
    # Hidden units over tp: a column and row pair in each expert, gate and up alike.
    assert {n.note.split(" ", 1)[1] for n in low.program.nodes if n.target.startswith("colofunc.experts")} == {"{ep: dispatch, tp: f}"}
    weights = {leaf.name.split("experts.")[-1]: leaf.spec for leaf in low.plan.inputs if ".params." in leaf.name}
    assert weights["gate_up_proj"] == "(ep a) (b tp 12) c" and weights["down_proj"] == "(ep a) b (tp c)"


@pytest.mark.parametrize("other", [lambda: tensor("1d", "tp", sequence=True), lambda: ring("tp"), lambda: ulysses("tp")],
                         ids=["1d+sp", "ring", "ulysses"])  # fmt: skip
def test_tokens_of_a_sequence_over_another_axis(other) -> None:
    step, state, batch = language("mixtral", greedy=False)
    with cf.testing.float64():
        step = cf.shard(step, cf.Mesh(ep=2, tp=2), experts("ep"), other())
        low = check(step, state, batch, steps=1).low
    assert {n.note for n in low.program.nodes if n.target == "colofunc.experts"} == {"colofunc.experts {ep: dispatch, tp: b0}"}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_is_what_transformers_computes(family) -> None:
    """Against the model's own loop over experts, without colofunc."""
    found = {}
    for implementation in ("eager", "grouped_mm"):
        step, state, batch = language(family, implementation, greedy=False)
        with cf.testing.float64():
            staged = cf.shard(step, cf.Mesh(dp=1))
            new, metrics = step(state, batch) if implementation == "eager" else staged.eager(state, batch)
        found[implementation] = [metrics["loss"], *(new["params"][name] for name in sorted(new["params"]))]
    assert all((a - b).abs().max() <= 1e-10 * max(1.0, b.abs().max()) for a, b in zip(found["grouped_mm"], found["eager"], strict=True))


# ---- real ranks ----


def on_a_rank(greedy):
    step, state, batch = own(cf.Mesh(ep=2), experts("ep"), n=16, greedy=greedy, aux=0.1)
    placed = step.init(state, batch)
    for _ in range(2):
        placed, metrics = step(placed, batch)
    return float(metrics["loss"]), {name: p.full() for name, p in placed["params"].items()}


def on_ranks():
    return on_a_rank(False), on_a_rank(True)


@pytest.mark.dist
def test_two_processes() -> None:
    want = on_ranks()
    for found in cf.launch(on_ranks, 2, timeout_s=200):
        torch.testing.assert_close(found, want, atol=1e-10, rtol=0)


# ---- bad input ----


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(axis=("a", "b", "c")), "experts takes one axis or two different ones"),
        (dict(capacity_factor=0), "capacity_factor=0 leaves no place for any token"),
        (dict(capacity_factor=1.25), r"a plan never changes numbers; write cf.expert_capacity\(step, 1.25\)"),
        (dict(dropless=False), "needs a capacity"),
    ],
)
def test_refused_options(options, says) -> None:
    with pytest.raises(cf.PlanError, match=says):
        experts(**options)


def test_experts_that_the_axis_does_not_divide() -> None:
    step, state, batch = own(cf.Mesh(ep=4), experts("ep"), e=6)
    with pytest.raises(cf.PlanError, match=r"experts\(ep\): the 6 experts of 'the step' do not divide over 4 ranks"):
        step.lower(state, batch)


def test_rows_that_the_axis_does_not_divide() -> None:
    step, state, batch = own(cf.Mesh(ep=4), experts("ep"), n=6)
    with pytest.raises(cf.PlanError, match=r"the 6 rows of the batch .* do not divide over 4 ranks"):
        step.lower(state, batch)


def test_no_experts_in_the_step() -> None:
    step = cf.shard(lambda state, b: (state, (b * state).sum()), cf.Mesh(ep=2), experts("ep"))
    says = r"finds no experts in this step. Try: cf.moe.experts(?s:.*)\ntransformers: experts_implementation=.grouped_mm"
    with pytest.raises(cf.PlanError, match=says):
        step.lower(torch.ones(4), torch.ones(4))


def test_a_router_that_yields_nan_is_named() -> None:
    step, state, batch = own(cf.Mesh(ep=2), experts("ep"))
    state["params"]["router"][0, 0] = float("inf")
    batch["x"][:, 0] = 0.0  # inf * 0
    said = str(step.lower(state, batch).check_finite(state, batch))
    assert "nan" in said and "test_moe.py" in said and "in loss" in said


# ---- the recipe ----


def test_the_recipe_learns(monkeypatch, capsys) -> None:
    pytest.importorskip("transformers")
    found = importlib.util.spec_from_file_location("moe_zero3", Path(__file__).resolve().parents[1] / "examples" / "moe_zero3.py")
    module = importlib.util.module_from_spec(found)
    monkeypatch.setitem(sys.modules, "moe_zero3", module)
    found.loader.exec_module(module)
    first, last = module.main(["--steps", "31"])
    assert last < first - 0.25
    assert "dp: ZeRO-3 (zero(3, dp)) · ep: expert parallel (experts(ep))" in capsys.readouterr().out
