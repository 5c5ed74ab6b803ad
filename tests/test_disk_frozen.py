"""Frozen weights on disk: those that nobody has in memory go there, in one version, and are only read."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from colofunc_plugins import zero
from live_bytes import measure
from test_disk_state import files
from test_offload import one, peak
from torch.utils import _pytree as pytree

import colofunc as cf
from colofunc.dtensor.placed import SHELF
from colofunc.errors import DiskError
from colofunc.executors.backend import backend_for
from colofunc.executors.disk.store import DiskStore
from colofunc.executors.disk.tensors import OnDisk
from colofunc.testing import check


def adapted(lazy: bool, d: int = 16) -> tuple[cf.Model, Any, Any, torch.Tensor]:
    """(model, step, state, batch): two linear layers of a lazily made network that are frozen, one of them with an adapter."""

    def build() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(d, 4 * d), torch.nn.GELU(), torch.nn.Linear(4 * d, d)).double()

    torch.manual_seed(0)
    model = cf.lora(cf.functional(cf.lazy(build) if lazy else build()), where="0", rank=1)
    opt = cf.adapt(torch.optim.SGD, lr=0.1, momentum=0.9)
    step, state = cf.train_step(model, opt, loss=lambda out, batch: (out**2).mean(), inputs=lambda batch: ((batch,), {}))
    return model, step, state, torch.randn(8, d, dtype=torch.float64)


def lying(model: cf.Model, mesh: cf.Mesh) -> dict[str, str]:
    """Frozen weights that were placed -> their tiers."""
    found = {name: SHELF.layout(x, mesh) for name, x in model.frozen.items()}
    return {name: layout.tier for name, layout in found.items() if layout is not None}


def parts(model: cf.Model) -> list[torch.Tensor]:
    return [part for x in model.frozen.values() for some in SHELF._kept.get(x, {}).values() for one in some for part in one.shards]


def params(state: Any) -> dict[str, torch.Tensor]:
    return {name: x.full() for name, x in state["params"].items()}


def trained(staged: Any, state: Any, batch: Any, steps: int = 2) -> Any:
    state = staged.init(state, batch)
    for _ in range(steps):
        state, _ = staged(state, batch)
    return state


def test_frozen_weights_of_a_lazy_model_lie_on_disk_in_one_version(tmp_path: Path) -> None:
    model, step, state, batch = adapted(lazy=True)
    base = cf.shard(step, one())
    room = int(0.6 * peak(cf.offload(base, policy="host"), state, batch, tier="host"))
    staged = cf.offload(base, policy="host", host=room, disk=tmp_path)
    low = staged.lower(state, batch)
    assert "of frozen weights" in low.plan.memory[-1] and "written: 0 B" in low.plan.memory[-1]
    assert low.compare(state, batch).first is None and not files(tmp_path)  # to look at it takes no room
    placed = staged.init(state, batch)
    given = [list(x.parts) if isinstance(x, cf.DTensor) else [x] for some in (placed, batch) for x in pytree.tree_leaves(some)]
    hidden = low.hidden_parts(backend_for(low.mesh))
    assert measure(low.program, low.mesh, [*given, *hidden]).timeline == dict(low.memory().timeline)
    there = [part for part in parts(model) if isinstance(part, OnDisk)]
    held = low.memory().peak_bytes
    assert held["disk"] == sum(part.nbytes for part in there) > 0 and held["host"] <= room
    assert [path.name for path in files(tmp_path)] == ["lock", "version-0"]
    want = params(trained(base, state, batch))
    found = params(trained(staged, state, batch))
    assert all(torch.equal(found[name], want[name]) for name in want)
    (store,) = {part.store for part in there}
    with pytest.raises(DiskError, match=r"chunk 0 of '.*' counts and has one version, so it is only read. Try: x.clone\(\)"):
        store.write(0, torch.zeros(store.sizes[0], dtype=torch.uint8))


def test_what_its_owner_has_in_memory_stays_there(tmp_path: Path) -> None:
    model, step, state, batch = adapted(lazy=False)
    base = cf.shard(step, one())
    staged = cf.offload(base, policy="disk", disk=tmp_path)
    low = staged.lower(state, batch)
    frozen = sum(x.nbytes for x in model.frozen.values())
    assert low.memory().peak_bytes["host"] >= frozen and low.memory().peak_bytes["disk"] < frozen
    trained(staged, state, batch)
    assert set(lying(model, one()).values()) == {"host"} and not any(isinstance(part, OnDisk) for part in parts(model))
    with pytest.raises(cf.CapacityError, match=r"and not on disk takes .* of host memory a rank"):
        cf.offload(cf.shard(step, one()), policy="host", host=frozen // 2, disk=tmp_path).lower(state, batch)


def test_another_function_reads_them_where_they_lie_and_they_go_with_the_model(tmp_path: Path) -> None:
    def use() -> None:
        model, step, state, batch = adapted(lazy=True)
        staged = cf.offload(cf.shard(step, one()), policy="disk", disk=tmp_path)
        placed = trained(staged, state, batch, steps=1)
        score = cf.shard(lambda state, batch: model.apply(state["params"], state["buffers"], batch)[0].sum(), one())
        before, folders = params(placed), sorted(tmp_path.iterdir())
        want = model.apply(before, {}, batch)[0].sum()
        assert set(lying(model, one()).values()) == {"disk"}
        assert abs(float(score(placed, batch)) - float(want)) <= 1e-10 and sorted(tmp_path.iterdir()) == folders
        assert len(folders) == 2  # of the state, of the frozen weights

    use()
    gc.collect()
    assert not files(tmp_path)


def test_where_the_disk_fails_before_all_lie_there_the_next_call_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, step, state, batch = adapted(lazy=True)
    staged = cf.offload(cf.shard(step, one()), policy="disk", disk=tmp_path)
    write, count = DiskStore.write, []

    def full(store: DiskStore, chunk: int, *of: Any) -> Any:
        count.append(chunk)
        if len(count) == 3:
            raise DiskError("no space")
        return write(store, chunk, *of)

    monkeypatch.setattr(DiskStore, "write", full)
    with pytest.raises(DiskError, match="no space"):
        staged.init(state, batch)
    monkeypatch.undo()
    found = params(trained(staged, state, batch))
    assert set(lying(model, one()).values()) == {"disk"}
    want = params(trained(cf.shard(step, one()), state, batch))
    assert all(torch.equal(found[name], want[name]) for name in want)


@pytest.mark.parametrize("name", ["zero3", "accumulate"])
def test_beside_other_modes(tmp_path: Path, name: str) -> None:
    model, step, state, batch = adapted(lazy=True)
    mesh = cf.Mesh(dp=2, topology="8xa100-40g") if name == "zero3" else one()
    base = cf.shard(step, mesh, zero(3, "dp")) if name == "zero3" else cf.accumulate(cf.shard(step, mesh), microbatches=2)
    staged = cf.offload(base, policy="disk", disk=tmp_path)
    check(staged, state, batch, steps=2)
    assert set(lying(model, mesh).values()) == {"disk"}


def test_frozen_weights_that_are_an_argument_lie_on_disk_as_state_does(tmp_path: Path) -> None:
    w = torch.randn(64, 64, dtype=torch.float64)
    step = cf.shard(lambda state, x: (state, (x @ state["frozen"]["w"]).sum()), one())
    staged = cf.offload(step, policy="disk", disk=tmp_path)
    x = torch.randn(4, 64, dtype=torch.float64)
    state = staged.init({"frozen": {"w": w}}, x)
    for _ in range(2):
        state, total = staged(state, x)
        assert abs(float(total) - float((x @ w).sum())) <= 1e-10 * max(1.0, float((x @ w).abs().sum()))
    assert isinstance(state["frozen"]["w"].local, OnDisk)


def test_what_is_committed_in_a_store_of_one_version_survives_a_rollback(tmp_path: Path) -> None:
    with DiskStore(tmp_path, [4, 4], versions=1) as store:
        store.write(0, torch.tensor([1, 2, 3, 4], dtype=torch.uint8)).wait()
        store.commit()
        store.write(1, torch.zeros(4, dtype=torch.uint8)).wait()
        store.rollback()
        into = torch.zeros(4, dtype=torch.uint8)
        store.read(0, into).wait()
        assert into.tolist() == [1, 2, 3, 4] and not store.changed
        with pytest.raises(DiskError, match="chunk 1 was never written"):
            store.read(1, into)
