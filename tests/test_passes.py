"""What a step goes through, pass by pass: names, programs, differences, and what can be left out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from colofunc_plugins import ring, tensor, zero
from torch import nn

import colofunc as cf
from colofunc.compiler.passes import REWRITES
from colofunc.testing import check

DP = cf.Mesh(dp=2, topology="8xa100-80g")
Chain = Callable[[Any], Any]
CHAINS: dict[str, Chain] = {
    "alone": lambda step: cf.shard(step, cf.Mesh()),
    "found": lambda step: cf.shard(step, cf.Mesh(dp=2, tp=2, topology="8xa100-80g")),
    "zero": lambda step: cf.shard(step, DP, zero(3, "dp")),
    "tensor": lambda step: cf.shard(step, cf.Mesh(dp=2, tp=2), zero(1, "dp"), tensor("1d", "tp")),
    "accumulate": lambda step: cf.accumulate(cf.shard(step, DP, zero(2, "dp")), microbatches=2),
    "checkpoint": lambda step: cf.checkpoint(cf.shard(step, DP, zero(3, "dp")), policy="dots"),
    "budget": lambda step: cf.checkpoint(cf.shard(step, DP, zero(3, "dp")), budget=24_000),
    "offload": lambda step: cf.offload(cf.shard(step, DP, zero(3, "dp")), policy="host"),
    "offload within": lambda step: cf.offload(cf.checkpoint(cf.shard(step, cf.Mesh())), budget=20_000),
    "precision": lambda step: cf.precision(cf.shard(step, DP, zero(3, "dp")), "bf16"),
    "real": lambda step: cf.shard(step, DP, zero(3, "dp")).on("distributed"),
    "compiled": lambda step: cf.shard(step, cf.Mesh()).on("compiled"),
}


def training(dtype: torch.dtype = torch.float32) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)).to(dtype)
    step, state = cf.train_step(
        cf.functional(net), cf.adapt(torch.optim.AdamW, lr=1e-2), lambda out, b: (out - b[1]).pow(2).mean(), inputs=lambda b: ((b[0],), {})
    )
    return step, state, (torch.randn(16, 16, dtype=dtype), torch.randn(16, 4, dtype=dtype))


@pytest.mark.parametrize("name", CHAINS)
def test_passes_run_again_end_in_the_program_that_runs(name: str) -> None:
    step, state, batch = training()
    low = CHAINS[name](step).lower(state, batch)
    names = low.passes.names  # which raises where they end in another program
    assert names[:4] == ("trace", "simplify", "lift", "as_read") and names[-4:] == ("narrow_updates", "squares", "one_call", "order")
    assert names.index("lower") < names.index("kernels") < names.index("pack") < names.index("in_place")
    assert ("searches" in names) == ("checkpoint" in {t.name for t in CHAINS[name](step).transforms})
    assert ("moves" in names) == name.startswith("offload")
    assert low.after("order").text() == low.text()
    assert low.after("trace").program is low.traced.program
    assert all(stage.took_s >= 0 for stage in low.passes)


def test_a_plan_from_the_cache_has_its_passes_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from colofunc.compiler import plan_cache

    monkeypatch.setenv("COLOFUNC_CACHE", str(tmp_path))
    monkeypatch.setattr(plan_cache, "KEEP_ABOVE_S", 0.0)
    step, state, batch = training()
    texts = []
    for _ in range(2):
        low = CHAINS["offload within"](step).lower(state, batch)
        texts.append([low.after(name).text() for name in low.passes.names])
    assert texts[0] == texts[1]


def test_what_a_pass_changes_is_shown_line_by_line() -> None:
    step, state, batch = training()
    passes = CHAINS["zero"](step).lower(state, batch).passes
    assert "+" in passes.diff("pack") and "bucket of" in passes.diff("pack")
    assert passes.diff("lift") == "" and passes.diff("trace").startswith("--- before trace")
    table = str(passes)
    assert [line.split()[0] for line in table.splitlines()] == ["pass", *passes.names]
    assert "lift" in table and "(changes nothing)" in table
    with pytest.raises(cf.PlanError, match="no pass 'packs'; did you mean 'pack'"):
        passes.diff("packs")
    with pytest.raises(cf.PlanError, match="no pass 'offload'"):
        CHAINS["zero"](step).lower(state, batch).after("offload")


SHORTENED = ("found", "zero", "accumulate", "offload")
# All passes are left out of every chain, and each alone of one, the chains in turn; each of every chain in the sweep.
LEFT_OUT = [(name, "all of them") for name in SHORTENED]
for _at, _pass in enumerate(REWRITES):
    for _other, _name in enumerate(SHORTENED):
        _marks = () if _at % len(SHORTENED) == _other else (pytest.mark.sweep,)
        LEFT_OUT.append(pytest.param(_name, _pass, marks=_marks))


@pytest.mark.parametrize(("name", "left_out"), LEFT_OUT)
def test_the_numbers_stay_without_any_pass_that_can_be_left_out(name: str, left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = REWRITES if left_out == "all of them" else (left_out,)
    monkeypatch.setenv("COLOFUNC_PASSES", ",".join(f"-{each}" for each in names))
    step, state, batch = training(torch.float64)
    with cf.testing.float64():
        chain = CHAINS[name](step)
        assert not set(names) & set(chain.lower(state, batch).passes.names)
        check(chain, state, batch, steps=2)


def test_what_is_made_again_and_the_order_of_real_ranks_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine of cards, as whose ranks plan: collectives are started early there."""
    mesh = cf.Mesh(dp=2, topology="8xa100-80g")
    step, state, batch = training()
    gathered = {}
    for without in ("", "-searches", "-order"):
        monkeypatch.setenv("COLOFUNC_PASSES", without)
        low = cf.checkpoint(cf.shard(step, mesh, zero(3, "dp")), policy="nothing").lower(state, batch)
        assert without.removeprefix("-") not in low.passes.names
        gathered[without] = [node.target for node in low.program.nodes if "all_gather" in node.target]
    assert gathered[""] == ["colofunc.all_gather_start"] * 2  # backward gathers weights again
    assert gathered["-searches"] == ["colofunc.all_gather_start"] and gathered["-order"] == ["colofunc.all_gather"] * 2


def test_a_pass_of_a_plugin_and_a_hook_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plugin:
        @cf.hookimpl
        def colofunc_passes(self) -> Any:
            return {"as_it_was": lambda program, mesh: program}

    step, state, batch = training()
    chain = cf.precision(cf.shard(step, DP, zero(3, "dp"), plugins=[Plugin()]), "bf16")
    assert {"as_it_was", "precision.rewrite_local"} <= set(chain.lower(state, batch).passes.names)
    monkeypatch.setenv("COLOFUNC_PASSES", "-as_it_was, -precision.rewrite_local")
    again = cf.precision(cf.shard(step, DP, zero(3, "dp"), plugins=[Plugin()]), "bf16")
    assert not {"as_it_was", "precision.rewrite_local"} & set(again.lower(state, batch).passes.names)


def test_what_cannot_be_left_out_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    step, state, batch = training()
    for value, says in (
        ("-packs", "leaves out 'packs', which is no pass that can be left out; did you mean 'pack'"),
        ("-lower", "leaves out 'lower', which is no pass that can be left out"),
        ("pack", "COLOFUNC_PASSES='pack' leaves nothing out; write COLOFUNC_PASSES=-pack"),
    ):
        monkeypatch.setenv("COLOFUNC_PASSES", value)
        with pytest.raises(cf.ColofuncError, match=says):
            CHAINS["zero"](step).lower(state, batch)


def test_long_sequences_and_frozen_weights_go_through_all_passes() -> None:
    torch.manual_seed(0)
    weight = torch.randn(128, 128, dtype=torch.float64)  # large enough to become a hidden input

    def step(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x @ weight, x, is_causal=True)

    low = cf.shard(step, cf.Mesh(cp=2), ring("cp")).lower(torch.randn(2, 2, 128, 128, dtype=torch.float64))
    assert low.passes.diff("lift") != "" and len(low.hidden) == 1
