"""Plan records, the field's words, wishes and plans as constraints."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from least_named import limited

import colofunc as cf
from colofunc.errors import PlanError
from colofunc.mesh import Mesh
from colofunc.planner.describe import Shares, words
from colofunc.planner.plan import OtherWay, Plan, PlanOfAxis, matches, parse_axes
from colofunc.planner.sharding.assign import Assignment, assign
from colofunc.planner.sharding.constraints import NONE, Constraints
from colofunc.planner.sharding.explain import constraints_from, make_plan, node_keys
from colofunc.planner.wishes.leaf_constraints import NamedValues
from colofunc.planner.wishes.wish import Wish, wishes_of
from colofunc.planner.wishes.wish_constraints import constraints_of
from colofunc.program.ir import Node, Program, Ref, Value
from colofunc.program.lower import call_of
from colofunc.spec.conversions.conversion import conversion_s
from colofunc.spec.rules import rule_for, strategies_for
from colofunc.spec.strategies import enumerate_layouts, enumerate_strategies
from colofunc.testing import models, programs

MESH = Mesh(dp=2, tp=2, topology="8xa100-80g")


def mlp(batch: int = 64, width: int = 256) -> Program:
    """x -> fc1 -> gelu -> fc2, with paths as a module gives them."""
    shapes = {
        0: ((4 * width, width), "params.h.0.fc1.weight", "param"),
        1: ((width, 4 * width), "params.h.0.fc2.weight", "param"),
    }
    shapes |= {2: ((batch, width), "batch", "batch"), 3: ((4 * width, width), "opt.h.0.fc1.weight", "state")}
    values = {i: Value(i, shape, torch.float32, name, role) for i, (shape, name, role) in shapes.items()}
    for i, shape in ((4, (batch, 4 * width)), (5, (batch, 4 * width)), (6, (batch, width)), (7, (4 * width, width))):
        values[i] = Value(i, shape, torch.float32)
    nodes = (
        Node("colofunc.linear", (Ref(2), Ref(0)), (), (4,), "forward", "h.0.fc1"),
        Node("aten.gelu.default", (Ref(4),), (), (5,), "forward", "h.0.act"),
        Node("colofunc.linear", (Ref(5), Ref(1)), (), (6,), "forward", "h.0.fc2"),
        Node("aten.mul.Tensor", (Ref(3), Ref(0)), (), (7,), "update", ""),
    )
    return Program((0, 1, 2, 3), nodes, (6, 7), values, {}, ((1, 3),))


def rule_of(program: Program) -> Callable[[Node], Any]:
    return lambda node: rule_for(call_of(node, program.values)[0])


def decide(program: Program, constraints: Constraints = NONE, mesh: Mesh = MESH) -> Assignment:
    def candidates(item: Node | Value) -> tuple:
        if isinstance(item, Value):
            return enumerate_layouts(item.shape, mesh)
        call, _ = call_of(item, program.values)
        return (*enumerate_strategies(call, rule_for(call), mesh), *strategies_for(call, mesh))

    return assign(program, mesh, candidates, constraints, conversion_s)


def plan_of(program: Program, wishes: Any = (), **options: Any) -> Plan:
    constraints = (
        constraints_of(wishes_of(wishes, program, mesh=MESH), program, MESH) if wishes else NONE
    )
    return make_plan(program, MESH, decide(program, constraints), rule_of(program), constraints=constraints, **options)


MEGATRON = {"h.*.fc1.weight": "(tp o) i", "h.*.fc2.weight": "o (tp i)", "*.fc1": "{tp: o}", "*.fc2": "{tp: i}"}


# ---- the record ----


def test_save_and_load_give_the_same_plan(tmp_path: Path) -> None:
    plan = plan_of(mlp())
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_files_that_are_no_plans_are_named(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(PlanError, match="cannot read plan"):
        Plan.load(path)
    path.write_text("{")
    with pytest.raises(PlanError, match="is not JSON"):
        Plan.load(path)
    path.write_text(json.dumps({"colofunc_plan": 99}))
    with pytest.raises(PlanError, match="no plan of version 1 but 99"):
        Plan.load(path)
    path.write_text(json.dumps({"colofunc_plan": 1, "mesh": []}))
    with pytest.raises(PlanError, match="is damaged"):
        Plan.load(path)


def test_costs_of_decisions_add_up_to_the_total() -> None:
    plan = plan_of(mlp(), MEGATRON)
    assert sum(d.cost_s for d in plan.decisions) == pytest.approx(plan.cost_s, rel=1e-6)
    assert sum(d.count * d.communication_s for d in plan.decisions) == pytest.approx(plan.communication_s, rel=1e-6)


def test_a_table_keeps_brackets_and_says_notes() -> None:
    plan = cf.shard(lambda x: x.softmax(1) + 1, cf.Mesh(dp=2)).lower(torch.randn(4, 6)).plan
    printed = attrs.evolve(plan, notes=("a [note]",), memory=("[bold] words",)).table()
    assert all(text in printed for text in ("[d1]", "a [note]", "[bold] words"))


def test_one_sentence_and_table() -> None:
    plan = plan_of(mlp(), MEGATRON, named={"tp": PlanOfAxis("the user")})
    assert "tp: Megatron column/row (the user)" in str(plan)
    assert "on dp=2 tp=2 (8xa100-80g)" in str(plan)
    text = plan.table()
    assert "h.0.fc1 linear" in text and "tp: o" in text and "all_reduce tp" in text


def test_diff_names_what_changed() -> None:
    free, pinned = plan_of(mlp(), {"*.fc1": "{tp: whole, dp: whole}"}), plan_of(mlp(), MEGATRON)
    assert free.diff(free) == ""
    changes = free.diff(pinned)
    assert "h.0.fc1|colofunc.linear|forward|0: {} -> {" in changes


def test_why_lists_the_choice_and_alternatives() -> None:
    plan = plan_of(mlp(), MEGATRON)
    text = plan.why("*.fc1")
    assert "h.0.fc1 colofunc.linear [forward]" in text
    assert "wished: the plan: '*.fc1' -> '{tp: o}'" in text
    assert "instead {" in text
    with pytest.raises(PlanError, match=r"matches no operator, module, leaf or collective of the plan; did you mean .*'h.0.fc1'"):
        plan.why("h.0.fc3")


def test_why_not_gives_the_price_or_the_reason() -> None:
    plan = plan_of(mlp())
    chosen = plan.find("*.fc1")[0]
    assert "is what was chosen" in plan.why_not(chosen.strategy, "*.fc1")
    other = chosen.alternatives[0].strategy
    assert f"{other} instead of {chosen.strategy}" in plan.why_not(other, "*.fc1")
    assert "no strategy 'ring'; its rule is" in plan.why_not("ring", "*.fc1")
    assert f"did you mean {chosen.strategy!r}" in plan.why_not(chosen.strategy.replace("}", "]"), "*.fc1")


def test_a_question_about_strategies_is_not_taken_for_one_about_ways() -> None:
    plan = plan_of(mlp())
    lost = ("2 microbatches, cut by memory", "12 microbatches, cut by time")
    others = tuple(OtherWay(way, None, 0, "too large") for way in lost)
    piped = attrs.evolve(plan, way="4 microbatches, cut by time", others=others)
    for what in ("b", "c", "m", "i", "{}", "tp: i"):
        assert piped.why_not(what, "*.fc1") == plan.why_not(what, "*.fc1")
    assert piped.why_not("2 micro") == piped.why_not("cut by memory") == "2 microbatches, cut by memory: too large"
    assert piped.why_not("4 microbatches, cut by ti") == "4 microbatches, cut by time is what was chosen"
    assert len(piped.why_not("cut").splitlines()) == 3 and len(piped.why_not("by time").splitlines()) == 2


def test_find_takes_real_paths_of_folded_layers() -> None:
    decision = attrs.evolve(
        plan_of(mlp()).decisions[0], path="h.*.fc1", keys=("h.0.fc1|t|forward|0", "h.1.fc1|t|forward|0")
    )
    plan = attrs.evolve(plan_of(mlp()), decisions=(decision,))
    assert plan.find("h.1.fc1") == (decision,)
    assert "×2" in plan.why("h.1.fc1")


def test_words_of_globs_and_strategies() -> None:
    assert matches("params.h.0.fc1.weight", "h.0.fc1.weight") and not matches("params.xh.0", "h.0")
    names = ("params.h.0.fc1.weight", "params.h.10.fc1.weight", "w", "a..b", ".a", "a.", "h.0.w.h.0.w")
    values = {k: Value(k, (1,), torch.float32, name, "param") for k, name in enumerate(names)}
    found = NamedValues.of(list(values.values())).numbers
    globs = {*names, "h.0.fc1.weight", "0.fc1.weight", "weight", "b", ".b", "", "a", "h.0.w", "fc1", "0"}
    for glob in globs:  # without a wildcard names are looked up; both ways mean the same leaves
        assert list(found.get(glob, ())) == [k for k, name in enumerate(names) if matches(name, glob)], glob
    assert parse_axes("{dp: b, tp: o}") == (("dp", "b"), ("tp", "o"))
    assert parse_axes("ring") == ()


def test_keys_are_stable_and_distinct() -> None:
    program = mlp()
    twice = attrs.evolve(program, nodes=(*program.nodes, program.nodes[0]))
    assert node_keys(twice)[0] == "h.0.fc1|colofunc.linear|forward|0"
    assert node_keys(twice)[-1] == "h.0.fc1|colofunc.linear|forward|1"


# ---- the field's words ----

WORK = dict.fromkeys(("batch", "sequence", "column", "row", "heads", "whole"), 0.0)


@pytest.mark.parametrize(
    ("work", "params", "grads", "states", "stream", "expected"),
    [
        ({"batch": 1.0}, 0, 0, 0, False, "data parallel"),
        ({"batch": 1.0}, 0, 0, 1, False, "ZeRO-1"),
        ({"batch": 1.0}, 0, 1, 1, False, "ZeRO-2"),
        ({"batch": 1.0}, 1, 1, 1, False, "ZeRO-3"),
        ({"column": 0.5, "row": 0.5}, 1, 1, 1, False, "Megatron column/row"),
        ({"column": 0.5, "row": 0.4, "heads": 0.1}, 1, 1, 1, True, "Megatron column/row with sequence parallel"),
        ({"column": 1.0}, 1, 1, 1, False, "column parallel"),
        ({"sequence": 1.0}, 0, 0, 0, False, "sequence parallel"),
        ({"whole": 1.0}, 0, 0, 0, False, "unused: every rank computes everything"),
        ({"whole": 1.0}, 0, 0, 1, False, "sharded optimizer state, every rank computes everything"),
        ({"whole": 1.0}, 1, 1, 1, False, "sharded storage, gathered for use"),
        ({"batch": 0.6, "row": 0.4}, 0, 0, 0, False, "mostly data parallel, 40 % tensor"),
    ],
)
def test_words(work: dict, params: float, grads: float, states: float, stream: bool, expected: str) -> None:
    assert words(Shares({**WORK, **work}, params, grads, states, False, stream)) == expected


@pytest.mark.parametrize(
    ("attention", "products", "work", "expected"),
    [
        ("g", "b1", {"sequence": 0.6, "heads": 0.4}, "Ulysses"),
        ("r", "b1", {"sequence": 0.3, "heads": 0.7}, "Ulysses"),
        ("heads", "b1", {"sequence": 1.0}, "Ulysses"),  # heads that the axis does not divide
        ("s", "b1", {"sequence": 1.0}, "context parallel (gathered keys)"),
        ("ring", "b1", {"sequence": 1.0}, "context parallel (ring)"),
        ("g", "o", {"column": 0.3, "row": 0.3, "heads": 0.4}, "Megatron column/row"),
        ("b", "summa rows", {"batch": 1.0}, "tensor parallel (summa rows)"),
        ("whole", "b1", {"sequence": 0.8, "whole": 0.2}, "sequence parallel"),
        ("b", "b0", {"batch": 1.0}, "data parallel"),
    ],
)
def test_words_of_what_attention_and_patterns_do(attention: str, products: str, work: dict, expected: str) -> None:
    assert words(Shares({**WORK, **work}, 0, 0, 0, False, False, False, attention, products)) == expected


@pytest.mark.parametrize(("heads", "expected"), [(4, "Ulysses"), (1, "context parallel (gathered keys)")])
def test_long_sequences_are_called_by_their_names_where_they_are_found(heads: int, expected: str) -> None:
    torch.manual_seed(0)
    net = models.Attention(64, heads)
    step = programs.training(net, {"x": torch.zeros(1, 8, 64)}, lambda out, batch: out.square().mean())
    batch = {"x": cf.abstract((1, 1 << 16, 64), torch.float32)}
    plan = cf.shard(step.fn, cf.Mesh(cp=4, topology="8xa100-80g")).lower(step.state, batch).plan
    assert str(plan).startswith(f"cp: {expected}") and plan.axes[0].by == "found"


def test_data_parallel_and_megatron_are_recognised_in_a_plan() -> None:
    both = {**MEGATRON, "*.fc1": "{dp: b0, tp: o}", "*.fc2": "{dp: b0, tp: i}"}
    plan = plan_of(mlp(), both)
    assert [(a.axis, a.words.split(",")[0]) for a in plan.axes][1] == ("tp", "Megatron column/row")
    assert plan.axes[0].words.startswith(("data parallel", "ZeRO"))


# ---- wishes ----


def wish_constraints(wishes: Any, program: Program | None = None, mesh: Mesh = MESH) -> Constraints:
    program = program or mlp()
    return constraints_of(wishes_of(wishes, program, mesh=mesh), program, mesh)


def test_a_spec_pins_the_axes_it_names_and_leaves_the_others() -> None:
    program = mlp()
    found = decide(program, wish_constraints({"*.fc1.weight": "o (tp i)"}))
    assert "tp" in {a for _, a in found.inputs[0].dims[1]}
    kept = wish_constraints({"*.fc1.weight": "o i"})
    assert decide(program, kept).inputs[0].is_replicated


def test_wishes_mean_parameters_before_other_leaves() -> None:
    assert set(wish_constraints({"*.fc1.weight": "(tp o) i"}).items) == {0}
    assert set(wish_constraints(Wish("*.fc1.weight", "(tp o) i", roles=("state",))).items) == {3}
    assert set(wish_constraints({"batch": "(dp b) i"}).items) == {2}


def test_functions_and_striped_specs_are_wishes_too() -> None:
    program = mlp()
    found = decide(program, wish_constraints(lambda name, shape: "(o tp) i" if name.endswith("fc1.weight") else None))
    assert found.inputs[0].text() == "(a tp) b"


def test_a_strategy_wish_holds_for_the_forward_operator() -> None:
    program = mlp()
    found = decide(program, wish_constraints({"*.fc1": "{tp: o}"}))
    assert ("tp", "o") in found.strategies[0].axes


def test_clash_names_both_wishes() -> None:
    zero = Wish("*", "(tp o) ...", axes=("tp",), source="zero(3, 'tp')")
    with pytest.raises(
        PlanError, match=r"clash on axis 'tp' of 'params.h.0.fc2.weight'.*zero\(3, 'tp'\).*dim 0.*dim 1"
    ):
        wish_constraints([zero, {"*.fc2.weight": "o (tp i)"}])
    dp = Wish("*", "(dp o) ...", axes=("dp",), source="zero(3, 'dp')")
    assert set(wish_constraints([dp, {"*.fc2.weight": "o (tp i)"}]).items) == {0, 1}


def test_a_wish_that_matches_nothing_gives_near_names() -> None:
    with pytest.raises(PlanError, match=r"'\*.fc3.weight'.*matches nothing; .*params.h.0.fc1.weight"):
        wish_constraints({"*.fc3.weight": "(tp o) i"})
    assert wish_constraints(Wish("nothing", "(tp o) i", optional=True)).items == {}


def test_a_wish_that_an_operator_cannot_do_names_the_rule() -> None:
    with pytest.raises(PlanError, match=r"no operator there has these factors \(colofunc.linear: .* -> .*\)"):
        wish_constraints({"*.fc1": "{tp: heads}"})
    with pytest.raises(PlanError, match=r"\{tp: b0\}.*rule .*cannot be done: colofunc.linear in 'h.0.fc1'"):
        program = mlp(batch=63)
        decide(program, wish_constraints({"*.fc1": "{tp: b0}"}, program))


def test_a_spec_that_does_not_fit_names_the_tensor() -> None:
    with pytest.raises(PlanError, match=r"cannot be done on 'params.h.0.fc1.weight' of shape \(1024, 256\)"):
        wish_constraints({"*.fc1.weight": "(tp o)"})


@attrs.frozen
class Shard:
    """A named plan: all parameters on their first dim."""

    axes: tuple[str, ...]

    def wishes(self, program: Program, mesh: Mesh) -> list[Wish]:
        return [Wish("*", f"({self.axes[0]} o) ...", source="shard")]


def test_a_named_plan_speaks_for_its_axes_only() -> None:
    program = mlp()
    found = decide(program, wish_constraints([Shard(("dp",)), {"*.fc2.weight": "o (tp i)"}], program))
    assert found.inputs[1].dims[0][0][1] == "dp"
    assert "tp" in {a for _, a in found.inputs[1].dims[1]}
    with pytest.raises(ValueError, match="no axis 'ddp'"):
        wish_constraints(Shard(("ddp",)))


def test_a_wish_about_two_axes_holds_while_they_are_decided_in_turn() -> None:
    """The first round decides tp and dpo, the second dpi: dpo must not be put where the wish keeps it out."""
    mesh = Mesh(dpo=2, dpi=2, tp=4, topology="16xa100-80g")
    hybrid = Wish("w", ("(dpi a) b", "a (dpi b)"), axes=("dpo", "dpi"))
    step = cf.shard(lambda w: w.exp().sum(), mesh, [hybrid, {"w": "(tp a) b"}])
    low = step.lower(cf.abstract((4096, 4096)))
    assert {i.name: i.spec for i in low.plan.inputs}["w"] in ("(tp dpi a) b", "(dpi tp a) b", "(tp a) (dpi b)")


@pytest.mark.parametrize("plan", [3, {"*": 4}, lambda name, shape: None])
def test_what_is_no_plan_is_said(plan: Any) -> None:
    with pytest.raises(PlanError, match=r"give a|return a spec"):
        wishes_of(plan, mlp())


# ---- an earlier plan as constraints ----


def test_a_plan_constrains_the_next_planning(tmp_path: Path) -> None:
    program = mlp()
    odd = plan_of(program, {"*.fc1": "{dp: i, tp: i}"})
    odd.save(tmp_path / "plan.json")
    again = decide(program, constraints_from(Plan.load(tmp_path / "plan.json"), program, MESH))
    assert odd.diff(make_plan(program, MESH, again, rule_of(program))) == ""


def test_a_plan_of_another_mesh_or_function_is_refused() -> None:
    plan = plan_of(mlp())
    with pytest.raises(PlanError, match="the plan is for mesh"):
        constraints_from(plan, mlp(), Mesh(dp=4))
    with pytest.raises(PlanError, match="matches no operator"):
        constraints_from(attrs.evolve(plan, decisions=(), inputs=()), mlp(), MESH)


def test_plans_bind_back_on_meshes_with_one_letter_axes(tmp_path: Path) -> None:
    mesh = cf.Mesh(a=2, c=2)

    def step(w: dict, x: torch.Tensor) -> tuple:
        y = (x @ w["w"]).tanh()
        return {"w": w["w"] - y.sum() * w["w"]}, y

    args = ({"w": torch.randn(8, 8)}, torch.randn(16, 8))
    first = cf.shard(step, mesh).lower(*args)
    first.plan.save(tmp_path / "plan.json")
    again = cf.shard(step, mesh).with_plan(Plan.load(tmp_path / "plan.json")).lower(*args)
    assert again.plan.diff(first.plan) == ""
    for leaf, layout in zip(first.plan.inputs, first.input_layouts, strict=True):
        assert cf.Spec(leaf.spec).bind(mesh, leaf.shape) is layout


# ---- real models through cf.shard ----


def lowered(mesh: Mesh, optimizer: Any, rows: int, width: int, *plans: Any) -> Any:
    """A model of transformers, planned without data; LLaMA of two layers for tensor parallelism, GPT-2 of one else."""
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        if "tp" in mesh.axis_names:
            size = {"hidden_size": width, "intermediate_size": 4 * width, "num_attention_heads": 8, "num_hidden_layers": 2}
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**size, vocab_size=512))
        else:
            size = {"n_embd": width, "n_head": 8, "n_layer": 1, "n_positions": 64}
            drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0)
            config = transformers.GPT2Config(**size, **drop, vocab_size=512, bos_token_id=0, eos_token_id=0)
            model = transformers.GPT2LMHeadModel(config)
    step, state = cf.train_step(cf.functional(model), cf.adapt(optimizer, lr=1e-3))
    ids = cf.abstract((rows, 64), torch.int64)
    return cf.shard(step, mesh, *plans).lower(state, {"input_ids": ids, "labels": ids})


A100 = cf.Mesh(dp=4, topology="8xa100-80g")


def test_a_real_model_with_whole_parameters_is_data_parallel() -> None:
    plan = lowered(A100, torch.optim.SGD, 512, 64, {"*": "..."}).plan
    assert str(plan).startswith("dp: data parallel (found)")


def test_a_real_model_under_a_memory_limit_is_zero_3() -> None:
    copies = {"*": "...", "*exp_avg*": Wish("", "...", roles=("state",))}
    most = lowered(A100, torch.optim.AdamW, 512, 256, copies).memory().peak_bytes["device"]
    low = lowered(limited(A100, most - (1 << 20)), torch.optim.AdamW, 512, 256)
    assert low.memory().peak_bytes["device"] <= most - (1 << 20)
    assert str(low.plan).startswith("dp: ZeRO-3 (found)")


def test_a_real_model_is_cut_as_megatron_cuts_it() -> None:
    plan = lowered(cf.Mesh(tp=4, topology="8xa100-80g"), torch.optim.AdamW, 2, 2048).plan
    assert str(plan).startswith("tp: Megatron column/row")
    for glob, factor in {"*.[qkv]_proj": "o", "*.o_proj": "i", "*.gate_proj": "o", "*.up_proj": "o", "*.down_proj": "i"}.items():
        forward = [d for d in plan.find(glob) if d.phase == "forward" and d.target == "colofunc.linear"]
        assert forward and {d.axes for d in forward} == {(("tp", factor),)}, glob


@pytest.mark.filterwarnings("ignore:the plan uses")  # half of the ranks have no rows of their own
@pytest.mark.parametrize("batch", [pytest.param(16, marks=pytest.mark.sweep), 8])
def test_parts_of_axes_are_no_plan_that_nobody_asked_for(batch: int) -> None:
    """Tensors of 16 x 8 ranks lie on whole axes, where sizes are such that parts of an axis (`dp[4:4]`) would do too."""
    with torch.device("meta"):
        model = cf.functional(models.Language(8192, 2048, heads=8))
    opt = cf.adapt(torch.optim.SGD, lr=1e-3)
    step, state = cf.train_step(model, opt, loss=lambda out, b: out.square().mean(), inputs=lambda b: ((b,), {}))
    mesh = cf.Mesh(dp=16, tp=8, topology="8xa100-80g")
    low = cf.shard(step, mesh).lower(state, cf.abstract((batch, 32), torch.int64))
    specs = {leaf.spec for leaf in low.plan.inputs} | set(low.plan.outputs)
    for decision in low.plan.decisions:
        specs.update(decision.ins, filter(None, decision.outs))
    assert any("dp" in spec for spec in specs) and any("tp" in spec for spec in specs)
    assert not [spec for spec in specs if "[" in spec]


PLANS_TWICE = """
import sys, torch
import colofunc as cf
from colofunc.testing.models import Language
step, state = cf.train_step(cf.functional(Language(64, 64)), cf.adapt(torch.optim.AdamW, lr=1e-3), clip=1.0,
    loss=lambda out, batch: torch.nn.functional.cross_entropy(out.flatten(0, 1), batch["y"].flatten()),
    inputs=lambda batch: ((batch["x"],), {}))
ids = cf.abstract((8, 32), torch.int64)
cf.shard(step, cf.Mesh(dp=2, tp=2, topology="8xa100-80g")).lower(state, {"x": ids, "y": ids}).plan.save(sys.argv[1])
"""


def test_plans_are_the_same_bytes_in_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process and in one that hashes words in another way."""
    here, there = str(tmp_path / "here.json"), str(tmp_path / "there.json")
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    subprocess.run([sys.executable, "-c", PLANS_TWICE, there], check=True, env=environment, timeout=300)
    monkeypatch.setattr(sys, "argv", ["-c", here])
    exec(compile(PLANS_TWICE, "<string>", "exec"), {"__name__": "__main__"})
    assert Path(here).read_bytes() == Path(there).read_bytes()
