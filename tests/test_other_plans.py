"""A state that lies on the mesh already, as a file had it or another step: a step with other plans lays it anew."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from colofunc_plugins import tensor, zero

import colofunc as cf
from colofunc.executors.launch import launch

MESH = cf.Mesh(pp=2, dp=2)
STEPS: dict[str, Callable[[Any], Any]] = {
    "automatic": lambda fn: cf.shard(fn, MESH),
    "ZeRO-3": lambda fn: cf.shard(fn, MESH, zero(3, ("pp", "dp"))),
    "tensor": lambda fn: cf.shard(fn, MESH, tensor("1d", "dp")),
    "stages": lambda fn: cf.pipeline(cf.shard(fn, MESH, zero(1, "dp")), axis="pp", microbatches=4),
    "host": lambda fn: cf.offload(cf.shard(fn, MESH, zero(1, "pp")), policy="host"),
}


def training() -> tuple[Any, Any]:
    torch.manual_seed(0)
    wide, narrow = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
    net = torch.nn.Sequential(wide, torch.nn.Tanh(), narrow, torch.nn.Tanh(), torch.nn.Linear(8, 8)).double()
    return cf.train_step(cf.functional(net), cf.adapt(torch.optim.AdamW, lr=1e-2), loss=lambda out: out.square().mean())


def rows() -> torch.Tensor:
    return torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def whole(state: Any) -> dict[str, torch.Tensor]:
    return {name: value.full() for name, value in state["params"].items()}


def trained(step: Any, state: Any, steps: int) -> Any:
    for _ in range(steps):
        state, _ = step(state, rows())
    return state


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    """After three steps on one device."""
    fn, state = training()
    step = cf.shard(fn, cf.Mesh())
    return whole(trained(step, step.init(state, rows()), 3))


def close(state: Any, expected: dict[str, torch.Tensor]) -> None:
    for name, value in whole(state).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("first", STEPS)
def test_training_goes_on_under_other_plans(first: str, expected: dict[str, torch.Tensor], tmp_path: Path) -> None:
    fn, plain = training()
    step = STEPS[first](fn)
    state = trained(step, step.init(plain, rows()), 1)
    cf.save(tmp_path / "state", state)
    before = whole(state)
    for second in STEPS:
        step = STEPS[second](fn)
        close(trained(step, cf.load(tmp_path / "state", mesh=MESH), 2), expected)
        close(trained(step, step.init(state, rows()), 2), expected)
    assert all(torch.equal(value, before[name]) for name, value in whole(state).items())  # the originals stay the caller's


def test_state_on_disk_goes_on_elsewhere(expected: dict[str, torch.Tensor], tmp_path: Path) -> None:
    fn, plain = training()
    disk = cf.offload(cf.shard(fn, MESH, zero(1, "dp")), policy="disk", disk=tmp_path)
    state = trained(disk, disk.init(plain, rows()), 1)
    cf.save(tmp_path / "state", state)
    other = cf.offload(cf.shard(fn, MESH, zero(3, "pp")), policy="disk", disk=tmp_path)
    for step in (STEPS["ZeRO-3"](fn), STEPS["automatic"](fn), other):
        close(trained(step, cf.load(tmp_path / "state", mesh=MESH), 2), expected)
        close(trained(step, step.init(state, rows()), 2), expected)


def specs(state: Any) -> dict[str, str]:
    moments = {f"{moment} of {name}": str(x.spec) for moment in ("exp_avg", "exp_avg_sq") for name, x in state["opt"][moment].items()}
    return moments | {name: str(x.spec) for name, x in state["params"].items()}


def test_all_of_it_stays_where_plans_allow_that_and_is_placed_as_a_plain_state_elsewhere(tmp_path: Path) -> None:
    fn, plain = training()
    sharded, automatic, whole_weights = STEPS["ZeRO-3"](fn), STEPS["automatic"](fn), cf.shard(fn, MESH, zero(1, ("pp", "dp")))
    state = sharded.init(plain, rows())
    cf.save(tmp_path / "state", state)
    assert specs(trained(automatic, cf.load(tmp_path / "state", mesh=MESH), 1)) == specs(state)
    assert specs(automatic.init(state, rows())) == specs(state)
    fresh = specs(whole_weights.init(plain, rows()))
    assert specs(trained(whole_weights, cf.load(tmp_path / "state", mesh=MESH), 1)) == fresh != specs(state)
    assert specs(whole_weights.init(state, rows())) == fresh


def test_memory_is_chosen_by_the_step_that_goes_on(tmp_path: Path) -> None:
    fn, plain = training()
    host, device = STEPS["host"](fn), cf.shard(fn, MESH, zero(1, "pp"))
    kept = host.init(plain, rows())
    cf.save(tmp_path / "state", kept)
    tiers = [{x.sharding.tier for x in state["opt"]["exp_avg"].values()} for state in (kept, device.init(kept, rows()))]
    loaded = trained(device, cf.load(tmp_path / "state", mesh=MESH), 1)
    back = host.init(loaded, rows())
    tiers += [{x.sharding.tier for x in state["opt"]["exp_avg"].values()} for state in (loaded, back)]
    assert tiers == [{"host"}, {"device"}, {"device"}, {"host"}]


def test_what_was_asked_for_is_no_guess(tmp_path: Path) -> None:
    fn, plain = training()
    state = STEPS["ZeRO-3"](fn).init(plain, rows())
    cf.save(tmp_path / "state", state)
    step = STEPS["tensor"](fn)
    words = r"clashes with state\.params\.\d\.weight already lies as .* \(step\.init\(state, \.\.\.\) places a state anew; donate="
    asked = cf.load(tmp_path / "state", mesh=MESH, specs="(pp dp a) ...")
    for given in (state, asked, cf.load(tmp_path / "state", like=state)):
        with pytest.raises(cf.PlanError, match=words):
            step(given, rows())
    assert specs(step.init(asked, rows())) == specs(step.init(plain, rows()))


def test_parts_that_were_laid_anew_have_memory_of_their_own() -> None:
    step = cf.shard(lambda state: {"w": 2 * state["w"]}, MESH, in_specs={"state": {"w": "(pp a) b"}})
    whole_on_all = cf.distribute(torch.ones(8, 8), "a b", MESH)
    for part in step.init({"w": whole_on_all})["w"].shards:
        assert part.untyped_storage().nbytes() == part.nbytes


SPLIT = ["a b", "(dp a) b", "(pp a) b", "(pp dp a) b", "(dp pp a) b", "(dp a) (pp b)", "(pp a) b @dp=0", "a b @pp=1", "(dp a) b @pp=0"]


@pytest.mark.parametrize("spec", SPLIT)
def test_from_all_ranks_to_some_and_back(spec: str) -> None:
    x = torch.arange(64.0).reshape(8, 8)
    for other in SPLIT:
        want = cf.distribute(x, other, MESH)
        got = cf.distribute(x, spec, MESH).redistribute(other)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(got.shards, want.shards, strict=True)), other


@pytest.mark.parametrize("at", ["@pp=0", "@pp=1", "@dp=0"])
def test_a_pending_sum_is_taken_before_some_ranks_keep_it(at: str) -> None:
    terms = torch.arange(64.0).reshape(4, 4, 4)
    for axis, first, second in (("pp", (0, 2), (1, 3)), ("dp", (0, 1), (2, 3))):
        copies = list(terms)
        sums = {rank: terms[list(group)].sum(0) for group in (first, second) for rank in group}
        summed = cf.from_local(copies, f"a b +{axis}", MESH, shape=(4, 4)).redistribute(f"a b {at}")
        kept = {rank: part for rank, part in enumerate(summed.shards) if part.numel()}
        assert len(kept) == 2 and all(torch.equal(part, sums[rank]) for rank, part in kept.items())


def on_two_ranks() -> dict[str, torch.Tensor]:
    mesh = cf.Mesh(dp=2)
    fn, plain = training()
    first, second = cf.shard(fn, mesh, zero(3, "dp")), cf.shard(fn, mesh, tensor("1d", "dp"))
    state = trained(first, first.init(plain, rows()), 1)
    return whole(trained(second, second.init(state, rows()), 2))


@pytest.mark.dist
def test_real_ranks(expected: dict[str, torch.Tensor]) -> None:
    for found, name in itertools.product(launch(on_two_ranks, 2, timeout_s=120), expected):
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-12)
