"""The recipes of examples/ that are about plans: they run, equal one device, and move what their plan says."""

import types
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from colofunc_plugins import zero
from test_examples import script

import colofunc as cf
from colofunc.testing import check, float64

TOPOLOGY = "4xa100-80g"  # no free communication: what is split is split because it was wished


@pytest.fixture(scope="module")
def evoformer() -> Iterator[types.ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        yield script("evoformer", patch)


@cache  # two tests look at the same plan
def lowered(evoformer: types.ModuleType, depth: int, **axes: int) -> Any:
    step, state = evoformer.make_step(depth, d=16, c=8)
    return cf.shard(step, cf.Mesh(**axes, topology=TOPOLOGY), evoformer.DynamicAxial()).lower(state, evoformer.alignments(2, 8, 12, 0))


def course(low: Any) -> list[str]:
    """The order of attention and of all-to-alls in the forward pass."""
    nodes = [n for n in low.program.nodes if n.phase == "forward" and n.target in ("colofunc.attention", "colofunc.all_to_all_start")]
    return [n.path.split(".")[-1] if n.target == "colofunc.attention" else "all_to_all" for n in nodes]


def test_an_evoformer_learns_which_positions_belong_together(evoformer: types.ModuleType) -> None:
    losses = evoformer.main(["--dap", "2", "--steps", "40", "--rows", "12", "--columns", "12"])
    assert losses[0] > 0.5 and losses[-1] < 0.15  # each step has new alignments: this is not memory


# Two ranks are those of the test beside ZeRO as well.
@pytest.mark.parametrize("axes", [pytest.param(dict(dap=2), marks=pytest.mark.sweep), dict(dap=4)])
def test_an_evoformer_equals_one_device(evoformer: types.ModuleType, axes: dict[str, int]) -> None:
    step, state = evoformer.make_step(1, d=16, c=8)
    staged = cf.shard(step, cf.Mesh(**axes, topology=TOPOLOGY), evoformer.DynamicAxial())
    with float64():
        assert check(staged, state, evoformer.alignments(2, 8, 12, 0)).worst <= 1e-10


def test_dynamic_axial_beside_zero(evoformer: types.ModuleType) -> None:
    step, state = evoformer.make_step(1, d=16, c=8)
    staged = cf.shard(step, cf.Mesh(dp=2, dap=2, topology=TOPOLOGY), zero(3, "dp"), evoformer.DynamicAxial())
    batch = evoformer.alignments(2, 8, 12, 0)
    with float64():
        checked = check(staged, state, batch)
    assert checked.worst <= 1e-10
    plan = checked.low.plan
    attention = [dict(c.axes) for c in plan.decisions if c.target == "colofunc.attention"]
    assert len(attention) == 2 and all(set(axes) == {"dp", "dap"} for axes in attention)


@pytest.mark.parametrize(("depth", "ranks"), [(1, 2), (2, 4)])
def test_a_table_changes_hands_twice_a_block(evoformer: types.ModuleType, depth: int, ranks: int) -> None:
    """Per block two all-to-alls of the table, and gathers of the bias and of one operand of each product over pairs."""
    low = lowered(evoformer, depth, dap=ranks)
    assert course(low) == (["row", "all_to_all", "column", "all_to_all"] * depth)[:-1]
    forward = Counter(n.target for n in low.program.nodes if n.phase == "forward" and n.path.startswith("blocks"))
    assert forward["colofunc.all_to_all_start"] == 2 * depth - 1 and forward["colofunc.all_gather_start"] == 3 * depth
    calls = low.cost().calls
    assert calls["all_to_all", "dap"] == 2 * (2 * depth - 1)  # backward mirrors it
    assert calls["reduce_scatter", "dap"] == 3 * depth + 1  # and all gradients in one


def test_no_attention_is_replicated(evoformer: types.ModuleType) -> None:
    low = lowered(evoformer, 2, dap=4)
    attention = [node for node in low.program.nodes if node.target.startswith("colofunc.attention")]
    lengths = {node.path.split(".")[-1]: low.program.values[node.refs[1]].shape[0] for node in attention}
    assert len(attention) == 8 and lengths == {"row": 8 // 4, "column": 12 // 4}
    decided = [dict(c.axes) for c in low.plan.decisions if c.target == "colofunc.attention"]
    assert decided == [{"dap": "b"}] * 2  # each stands for all layers


def test_the_planner_finds_axial_parallelism_by_itself(evoformer: types.ModuleType) -> None:
    step, state = evoformer.make_step(1, d=64, c=32)
    letters, pairs = cf.abstract((1, 128, 256), torch.int64), cf.abstract((1, 256, 256), torch.float32)
    low = cf.shard(step, cf.Mesh(dap=4, topology=TOPOLOGY)).lower(state, {"letters": letters, "pairs": pairs})
    assert course(low)[:3] == ["row", "all_to_all", "column"]
    assert [dict(c.axes) for c in low.plan.decisions if c.target == "colofunc.attention"] == [{"dap": "b"}] * 2
