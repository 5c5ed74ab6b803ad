"""What a plan says to people: one time for one step, axes that do nothing, tables and questions."""

import warnings
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from colofunc_plugins import tensor, zero
from quantize_matrix import WHERE, Net

import colofunc as cf
from colofunc.planner.describe import UNUSED
from colofunc.testing.models import Language


def training() -> tuple[Any, Any, torch.Tensor]:
    torch.manual_seed(0)
    step_fn, state = cf.train_step(cf.functional(Language()), cf.adapt(torch.optim.AdamW), loss=lambda out: (out**2).mean())
    return step_fn, state, torch.randint(0, 32, (8, 8))


# ---- one time ----

CHAINS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda step: step,
    "microbatches": lambda step: cf.accumulate(step, microbatches=2),
    "bf16": lambda step: cf.precision(step, "bf16"),
    "host": lambda step: cf.offload(step, policy="host"),
}


@pytest.mark.parametrize("executor", ["simulated", "distributed"])
@pytest.mark.parametrize("chain", CHAINS)
def test_a_step_has_one_time(chain: str, executor: str) -> None:
    """The sentence of the plan says what `low.lanes()` plays, which the command line prints."""
    step, state, batch = training()
    low = cf.shard(CHAINS[chain](step), cf.Mesh(dp=2), zero(3, "dp")).on(executor).lower(state, batch)
    assert low.plan.cost_s == pytest.approx(low.lanes().end_s, rel=1e-9)
    assert low.plan.communication_s == pytest.approx(low.lanes().busy_s().get("collectives", 0.0), rel=1e-9)


# ---- axes that do nothing ----


def test_an_axis_that_splits_nothing_is_said_to_be_unused() -> None:
    step, state, batch = training()
    said = r"uses 12% of the computing of Mesh\(dp=2, tp=4\) \(every rank computes everything along dp, tp\)"
    with pytest.warns(UserWarning, match=said):
        plan = cf.shard(step, cf.Mesh(dp=2, tp=4), auto=False).lower(state, batch).plan
    assert [use.words for use in plan.axes] == [UNUSED, UNUSED]
    assert "replicated" not in str(plan)


def test_a_machine_that_works_is_not_warned_of() -> None:
    step, state, batch = training()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = cf.shard(step, cf.Mesh(dp=2, tp=2), zero(3, "dp"), auto=False).lower(state, batch).plan
    assert [use.words for use in plan.axes] == ["ZeRO-3", UNUSED]


def test_work_without_products_is_not_called_unused() -> None:
    plan = cf.shard(lambda x: x.sin() * 2, cf.Mesh(dp=2), in_specs=("(dp a) b",)).lower(torch.randn(8, 8)).plan
    assert plan.axes[0].words == "elementwise work split"


def test_an_axis_is_called_the_same_in_whatever_numbers_products_are() -> None:
    """Weights in float8 or int8 are split by columns and rows as plain ones are, and nothing is gathered."""
    torch.manual_seed(0)
    model = cf.functional(Net())

    def apply(params: Any, tokens: torch.Tensor) -> torch.Tensor:
        return model.apply(params, model.buffers, tokens)[0]

    steps = {"plain": apply, "fp8": cf.fp8(apply, where=WHERE), "int8": cf.quantize(apply, "int8", where=WHERE)}
    words = {}
    for name, step in steps.items():
        staged = cf.shard(step, cf.Mesh(dp=2, tp=2), zero(3, "dp"), tensor("1d", "tp"))
        plan = staged.lower(model.params, torch.randint(0, 16, (8, 8))).plan
        words[name] = [use.words for use in plan.axes]
    assert words["plain"] == ["ZeRO-3", "Megatron column/row"]
    assert words["fp8"] == words["int8"] == words["plain"]


@cf.operator("wordstest.experts", rule="b d, d -> b d", linear=[{0}, {1}])
def scaled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * w


@cf.operator("wordstest.attention_pool", rule="b [d] -> b")
def pooled(x: torch.Tensor) -> torch.Tensor:
    return x.softmax(-1)[:, 0]


@cf.operator("wordstest.embedding", rule="v d -> v d")
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def test_operators_of_others_are_not_taken_for_ours_of_a_like_name() -> None:
    def step(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return pooled(scaled(doubled(x), w) @ v)

    specs = ("(dp b) d", "_", "_ (tp o)")
    plan = cf.shard(step, cf.Mesh(dp=2, tp=2), in_specs=specs).lower(torch.randn(8, 8), torch.randn(8), torch.randn(8, 8)).plan
    assert [use.words for use in plan.axes] == ["data parallel", "column parallel"]


@pytest.mark.parametrize("bags", [False, True])
def test_rows_of_a_table_that_are_split_are_said_of_lookups_and_bags(bags: bool) -> None:
    def step(table: torch.Tensor, w: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        rows = F.embedding_bag(index, table, mode="sum") if bags else F.embedding(index, table).sum(1)
        return rows @ w

    index = torch.randint(0, 16, (8, 4))
    specs = ("(tp v) _", "_ (tp o)", "_ _")
    plan = cf.shard(step, cf.Mesh(tp=2), in_specs=specs).lower(torch.zeros(1 << 16, 64), torch.randn(64, 4096), index).plan
    assert [use.words for use in plan.axes] == ["column parallel, vocabulary parallel"]


def test_lookups_at_indices_that_are_split_are_not_called_vocabulary_parallel() -> None:
    def step(table: torch.Tensor, w: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return F.embedding(index, table).sum(1) @ w

    specs = ("_ _", "_ (tp o)", "(tp b) _")
    inputs = torch.zeros(16, 1024), torch.randn(1024, 1024), torch.randint(0, 16, (8, 512))
    plan = cf.shard(step, cf.Mesh(tp=2), in_specs=specs).lower(*inputs).plan
    assert [use.words for use in plan.axes] == ["column parallel"]


# ---- tables and questions ----


def layers(n: int) -> Any:
    """A step over `n` identical layers."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()) for _ in range(n)))
    step_fn, state = cf.train_step(cf.functional(net), cf.adapt(torch.optim.AdamW), loss=lambda out: (out**2).mean())
    return cf.shard(step_fn, cf.Mesh(dp=2), zero(3, "dp")).lower(state, torch.randn(4, 8)).plan


def test_a_table_is_text_and_has_identical_layers_once() -> None:
    two, six = layers(2), layers(6)
    assert isinstance(six.table(), str) and str(six) in six.table()
    forward = [line for line in six.table(costly=None).splitlines() if "*.* linear " in line]
    assert [line.split()[3] for line in forward] == ["6"]
    assert len(six.table(costly=None).splitlines()) <= len(two.table(costly=None).splitlines()) + 4


def test_a_short_table_says_what_it_leaves_out() -> None:
    plan = layers(2)
    lines = plan.table(costly=2).splitlines()
    assert len(lines) == 5 and lines[-1].startswith("and ") and "more lines" in lines[-1] and "costly=None" in lines[-1]


def test_why_takes_parameters_batch_and_modules_alike() -> None:
    step, state, batch = training()
    plan = cf.shard(step, cf.Mesh(dp=2), zero(3, "dp")).lower(state, batch).plan
    for name in ("block.qkv.weight", "params.block.qkv.weight", "state.params.block.qkv.weight"):
        text = plan.why(name)
        assert "state.params.block.qkv.weight param float32[48, 16] kept as '(dp a) b'" in text
        assert "dim 0 in 2 parts over dp" in text and "read by block.qkv linear" in text
    assert "batch batch int64[8, 8] kept as '(dp a) b'" in plan.why("batch")
    assert "block.qkv colofunc.linear" in plan.why("block.qkv") and "wished: zero(3, dp)" in plan.why("block.qkv")


def test_why_explains_factors_and_what_costs_the_difference() -> None:
    step, state, batch = training()
    text = cf.shard(step, cf.Mesh(dp=2, tp=2), zero(3, "dp")).lower(state, batch).plan.why("block.qkv")
    assert "dp splits b0: dim 0 of operand 0, dim 0 of the result" in text
    assert "no result has it, so every rank of dp makes a term of a sum" in text
    assert "computing, +" in text and " communication)" in text


def test_factors_that_stay_whole_keep_their_brackets() -> None:
    step, state, batch = training()
    plan = cf.shard(step, cf.Mesh(dp=2), zero(3, "dp")).lower(state, batch).plan
    assert "d0 d1 [d2], [d2], [d2]" in plan.table(costly=None) and "[d2]" in plan.why("norm")


def test_why_of_a_module_that_only_holds_others() -> None:
    net = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(8, 8)))
    step_fn, state = cf.train_step(cf.functional(net), cf.adapt(torch.optim.SGD), loss=lambda out: (out**2).mean())
    plan = cf.shard(step_fn, cf.Mesh(dp=2), zero(3, "dp")).lower(state, torch.randn(4, 8)).plan
    assert "0.0 colofunc.linear" in plan.why("0")


def test_saved_plans_answer_as_before(tmp_path: Any) -> None:
    plan = layers(2)
    plan.save(tmp_path / "plan.json")
    again = cf.Plan.load(tmp_path / "plan.json")
    assert again == plan and again.why("*.0") == plan.why("*.0") and again.table() == plan.table()


# ---- products that stay whole ----


@attrs.frozen
class HalfSplit:
    """A plan of anybody that splits the first of two products, and leaves the second whole."""

    splits_products: bool
    axes: tuple[str, ...] = ("tp",)
    name: str = "anybody's"

    def wishes(self, program: Any, mesh: cf.Mesh) -> list[cf.ext.Wish]:
        first, second = (node for node in program.nodes if node.target == "colofunc.linear")
        wants = ((first, "{tp: o}"), (second, "{tp: whole}"))
        return [cf.ext.Wish("*", want, self.axes, targets=(node.target,), values=node.outs) for node, want in wants]


def test_products_that_a_plan_of_anybody_leaves_whole_are_named_where_it_is_to_split_them() -> None:
    def step(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(x, p["a"]).relu(), p["b"])

    params, x = {"a": torch.randn(8, 8), "b": torch.randn(8, 8)}, torch.randn(4, 8)
    notes = [cf.shard(step, cf.Mesh(tp=2), HalfSplit(splits)).lower(params, x).plan.notes for splits in (True, False)]
    assert notes[0][0].startswith("tp: each of 2 ranks does 50 % of the products whole, linear in ") and notes[1] == ()
