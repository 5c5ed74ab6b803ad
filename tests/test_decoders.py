"""Decoders under plans that split work: each rank has its fair share of it, in training and in forward-only steps.

Default: a few small ones; `-m sweep`: all decoders of the zoo. Where a plan cannot reach a fair share it says what stays whole.
"""

import warnings
from typing import Any

import pytest
import torch
import zoo
import zoo_transformers
from colofunc_plugins import experts, tensor, ulysses
from torch import nn

import colofunc as cf
from colofunc.testing import check
from colofunc.testing.models import Language

pytest.importorskip("transformers")

DECODERS = [*zoo_transformers.CAUSAL, *zoo_transformers.MORE_CAUSAL]
PLANS: dict[str, tuple[cf.Mesh, Any]] = {
    "1d": (cf.Mesh(tp=2), tensor("1d", "tp")),
    "2d": (cf.Mesh(x=2, y=2), tensor("2d", ("x", "y"))),
    "ulysses": (cf.Mesh(cp=2), ulysses("cp")),
}
EXPERTS = (cf.Mesh(ep=2), experts("ep"))
SLACK = 0.15
"""Norms, masks and tables of angles, which tensor parallelism repeats on every rank, are so much of a small model at most."""


def step_of(name: str, trains: bool) -> tuple[Any, Any, Any]:
    if trains:
        return zoo.step_of(name)
    module, batch, _ = zoo.build(name, train=False)
    model = cf.functional(module)
    inputs = {key: x for key, x in zoo.inputs_of(batch).items() if "labels" not in key}

    def logits(state: Any, batch: Any) -> torch.Tensor:
        found: torch.Tensor = model.apply(state["params"], state["buffers"], **batch)[0]["logits"]
        return found

    return logits, {"params": model.params, "buffers": model.buffers}, inputs


def work(plan: str, step: Any, state: Any, batch: Any) -> float:
    """Flops of a rank, of those that it would have if all were split evenly."""
    mesh, named = EXPERTS if plan == "experts" else PLANS[plan]
    alone = cf.shard(step, cf.Mesh()).lower(state, batch).cost().flops
    return cf.shard(step, mesh, named).lower(state, batch).cost().flops * mesh.size / alone


def is_fair(name: str, plan: str, trains: bool) -> None:
    ranks = PLANS[plan][0].size
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step, state, batch = step_of(name, trains)
    try:
        share = work(plan, step, state, batch)
    except cf.PlanError as error:
        named = ("these stay whole: ", "finds no attention in this step", "finds no two products", "ranks")
        assert any(words in str(error) for words in named), error
        return
    # At least half of the work with weights is split; what is not, every rank does.
    assert share <= 1 + 0.5 * (ranks - 1) + SLACK


FORWARD = [
    ("gpt2", "1d"), ("gpt_oss", "1d"), ("mixtral_dense", "1d"), ("llama", "ulysses"), ("gpt_oss", "ulysses"), ("gpt_oss", "2d"),
    ("gpt_oss_grouped", "ulysses"), ("bloom", "ulysses"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "plan"), FORWARD)
def test_a_forward_only_step_has_its_fair_share(name: str, plan: str) -> None:
    is_fair(name, plan, trains=False)


@pytest.mark.parametrize(
    ("name", "plan", "most"),
    [
        ("gpt_oss", "experts", 1.02),  # slots for the worst routing count as the rows that are expected in them
        ("deepseek_v32", "1d", 1.17),  # whole: what goes into its norms
    ],
)
def test_little_of_a_forward_only_step_is_done_twice(name: str, plan: str, most: float) -> None:
    assert work(plan, *step_of(name, trains=False)) < most


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_a_training_step_has_its_fair_share(name: str) -> None:
    assert work("1d", *step_of(name, trains=True)) < 1.1


@pytest.mark.sweep
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", DECODERS)
def test_any_decoder_has_its_fair_share_or_is_told_why_not(name: str, plan: str, trains: bool) -> None:
    is_fair(name, plan, trains)


# ---- experts that are written out ----


@pytest.mark.parametrize("name", ["gpt_oss", "gpt_oss_grouped"])
def test_experts_with_interleaved_gates_and_biases_are_a_column_and_row_pair(name: str) -> None:
    step, state, batch = step_of(name, trains=False)
    low = cf.shard(step, PLANS["1d"][0], PLANS["1d"][1]).lower(state, batch)
    lies = {leaf.name.removeprefix("state.params.model.layers.0.mlp.experts."): leaf.spec for leaf in low.plan.inputs}
    assert (lies["gate_up_proj"], lies["down_proj"]) == ("a b (tp c)", "a (tp b) c")


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["gpt_oss", "gpt_oss_grouped", "deepseek_v32"])
def test_experts_with_interleaved_gates_equal_one_device(name: str) -> None:
    with cf.testing.float64():
        step, state, batch = step_of(name, trains=True)
        assert check(cf.shard(step, *PLANS["1d"]), state, batch, steps=1).worst < 1e-10


# ---- what stays whole ----


def test_a_plan_names_what_every_rank_does_whole() -> None:
    """Low-rank projections and an indexer's keys have a norm over what they give; the heads of the indexer are split."""
    step, state, batch = step_of("deepseek_v32", trains=False)
    (note,) = cf.shard(step, *PLANS["1d"]).lower(state, batch).plan.notes
    assert note.startswith("tp: each of 2 ranks does 12 % of the products whole, linear in 'model.layers.*.self_attn.kv_a_proj_with_mqa', ")
    assert "indexer.wq_b" not in note and "indexer.weights_proj" not in note and "bmm" not in note
    assert note.endswith("what reads their results needs whole rows (a norm, a choice of the largest), or a size does not divide")
    step, state, batch = step_of("llama", trains=False)
    assert cf.shard(step, *PLANS["1d"]).lower(state, batch).plan.notes == ()


def test_an_error_says_what_is_not_reached() -> None:
    """Two small products are a pair; the large one in front has a norm over what it gives."""
    net = nn.Sequential(nn.Linear(32, 256), nn.LayerNorm(256), nn.Linear(256, 16), nn.GELU(), nn.Linear(16, 32)).double()
    opt = cf.adapt(torch.optim.SGD, lr=0.1)
    step, state = cf.train_step(cf.functional(net), opt, loss=lambda out: (out**2).mean())
    says = r"splits 36 % of the work with weights; these stay whole: colofunc.linear in '\*' on \(8, 32\) and \(256, 32\); use fewer ranks"
    with pytest.raises(cf.PlanError, match=says):
        cf.shard(step, *PLANS["1d"]).lower(state, torch.randn(8, 32, dtype=torch.float64))


# ---- a head without a loss ----


def ids() -> torch.Tensor:
    return torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("vocabulary", [True, False])
@pytest.mark.parametrize("ends", ["logits", "argmax", "another loss"])
def test_a_head_is_split_along_the_vocabulary_whatever_comes_behind_it(ends: str, vocabulary: bool) -> None:
    torch.manual_seed(0)
    model = cf.functional(Language().double())
    behind = {"logits": lambda x: x, "argmax": lambda x: x.argmax(-1), "another loss": lambda x: x.sort(-1).values[..., 0].mean()}

    def predict(params: Any, batch: torch.Tensor) -> Any:
        return behind[ends](model.apply(params, {}, batch)[0])

    step = cf.shard(predict, cf.Mesh(tp=2), tensor("1d", "tp", vocabulary=vocabulary))
    low = step.lower(model.params, ids())
    lies = {leaf.name: leaf.spec for leaf in low.plan.inputs}
    assert lies["params.embed.weight"] == ("(tp a) b" if vocabulary else "a b")
    torch.testing.assert_close(step(model.params, ids()).full(), predict(model.params, ids()), rtol=0, atol=1e-10)
