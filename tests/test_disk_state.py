"""cf.offload(disk=): state lies on disk, memory holds what its budget allows, the numbers are the same, a failure changes nothing."""

import copy
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from colofunc_plugins import tensor, zero
from test_offload import agrees, one, peak, training

import colofunc as cf
from colofunc.errors import DiskError
from colofunc.executors.copies import COPIER
from colofunc.executors.disk.store import DiskStore
from colofunc.executors.disk.tensors import OnDisk
from colofunc.executors.launch import launch
from colofunc.program.facts import is_copy
from colofunc.testing import check


def on_disk(state: Any) -> list[OnDisk]:
    leaves = [*state["params"].values(), *(x for some in state["opt"].values() if isinstance(some, dict) for x in some.values())]
    return [part for leaf in leaves for part in leaf.parts if isinstance(part, OnDisk)]


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def fulls(state: Any) -> dict[str, torch.Tensor]:
    return {f"{key}.{n}": x.full() for key in ("exp_avg", "exp_avg_sq") for n, x in state["opt"][key].items()} | {
        n: x.full() for n, x in state["params"].items()
    }


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


# ---- what is planned, and what runs ----


def test_all_state_on_disk_gives_the_numbers_of_one_device_and_the_bytes_that_were_counted(tmp_path: Path) -> None:
    step, *args = training(layers=2)
    staged = cf.offload(cf.shard(step, one()), policy="disk", disk=tmp_path)
    low = staged.lower(*args)
    state = staged.init(*args)
    assert state["params"]["0.1.weight"].spec == cf.Spec("a b @disk") and len(on_disk(state)) == 30
    agrees(low, state, args[1])
    held = low.memory().peak_bytes
    assert held["disk"] == sum(part.nbytes for part in on_disk(state)) > held["host"] > 0
    assert low.lanes().busy_s()["disk"] > 0 and "on disk" in low.plan.memory[-1]
    assert check(staged, *args, steps=2).worst == 0.0


@pytest.mark.parametrize("room", [0.9, 0.6])
def test_the_host_holds_what_it_may_and_the_disk_the_rest(tmp_path: Path, room: float) -> None:
    step, *args = training(layers=2)
    base = cf.shard(step, one())
    limit = int(peak(cf.offload(base, policy="host"), *args, tier="host") * room)
    staged = cf.offload(base, policy="host", host=limit, disk=tmp_path)
    low, state = staged.lower(*args), staged.init(*args)
    assert low.memory().peak_bytes["disk"] > 0 and low.memory().peak_bytes["host"] <= limit
    agrees(low, state, args[1])
    assert check(staged, *args, steps=2).worst == 0.0


def test_activations_that_no_memory_holds_go_to_disk_and_come_back(tmp_path: Path) -> None:
    step, *args = training(layers=2)
    base = cf.shard(step, one())
    staged = cf.offload(base, budget=int(0.4 * peak(base, *args)), host=60_000 + 1_500, disk=tmp_path)
    low, state = staged.lower(*args), staged.init(*args)
    spilled = [n for n in low.program.nodes if n.target.startswith("colofunc.to_disk")]
    assert len(spilled) >= 3 and low.memory().peak_bytes["host"] <= 61_500
    agrees(low, state, args[1])
    for _ in range(3):  # its room is given again
        state, _ = staged(state, args[1])
    assert len([path for path in files(tmp_path) if path.name == "version-0"]) == 2  # of the state, and of the step
    assert len([path for path in files(tmp_path) if path.name == "version-1"]) == 1
    assert check(staged, *args, steps=2).worst == 0.0


def test_where_the_host_has_room_nothing_lies_on_disk(tmp_path: Path) -> None:
    step, *args = training(layers=2)
    plain, named = (cf.offload(cf.shard(step, one()), policy="host", disk=disk).lower(*args) for disk in (None, tmp_path))
    assert named.text() == plain.text() and not files(tmp_path)


def test_a_host_that_is_too_small_for_the_largest_piece_is_named(tmp_path: Path) -> None:
    step, *args = training(layers=0)
    with pytest.raises(cf.CapacityError, match=r"and not on disk takes .* of host memory a rank"):
        cf.offload(cf.shard(step, one()), policy="host", host=10_000, disk=tmp_path).lower(*args)
    with pytest.raises(cf.CapacityError, match=r'cf\.offload\(disk="DIR"\)'):
        cf.offload(cf.shard(step, one()), policy="host", host=10_000).lower(*args)


def test_a_larger_host_reads_less(tmp_path: Path) -> None:
    step, *args = training(layers=2)
    base = cf.shard(step, one())
    whole = peak(cf.offload(base, policy="host"), *args, tier="host")
    moved = []
    for share in (0.4, 0.7, 1.0):
        program = cf.offload(base, policy="host", host=int(whole * share), disk=tmp_path).lower(*args).program
        ends = [(program.values[n.refs[-1]], n) for n in program.nodes if is_copy(n)]
        moved.append(sum(v.nbytes for v, n in ends if v.tier == "disk"))
    assert moved == sorted(moved, reverse=True) and moved[0] > moved[-1] == 0


CHAINS: dict[str, Any] = {
    "zero3": lambda fn: cf.shard(fn, cf.Mesh(dp=2, topology="8xa100-40g"), zero(3, "dp")),
    "zero1 and tensor": lambda fn: cf.shard(fn, cf.Mesh(dp=2, tp=2, topology="8xa100-40g"), zero(1, "dp"), tensor("1d", "tp")),
    "accumulate": lambda fn: cf.accumulate(cf.shard(fn, one()), microbatches=4),
    "checkpoint": lambda fn: cf.checkpoint(cf.shard(fn, one())),
}


@pytest.mark.parametrize("name", CHAINS)
def test_beside_other_modes(tmp_path: Path, name: str) -> None:
    step, *args = training(layers=2)
    staged = cf.offload(CHAINS[name](step), policy="disk", disk=tmp_path)
    assert staged.lower(*args).memory().peak_bytes["disk"] > 0
    check(staged, *args, steps=2)


def test_the_masters_of_a_narrower_step_lie_on_disk(tmp_path: Path) -> None:
    step, *args = training(layers=1)
    plain, disk = (cf.offload(cf.precision(cf.shard(step, one()), "bf16"), policy=p, disk=tmp_path) for p in ("device", "disk"))
    (a, _), (b, _) = (staged(staged.init(*args), args[1]) for staged in (plain, disk))
    assert any(isinstance(part, OnDisk) for part in b["params"]["1.weight"].parts)
    assert equal({n: x.full() for n, x in a["params"].items()}, {n: x.full() for n, x in b["params"].items()})


# ---- the state between steps ----


def test_another_function_reads_it_where_it_lies(tmp_path: Path) -> None:
    step, *args = training(layers=2)
    staged = cf.offload(cf.shard(step, one()), policy="disk", disk=tmp_path)
    state, _ = staged(staged.init(*args), args[1])
    score = cf.shard(lambda state, batch: sum(p.sum() for p in state["params"].values()) + batch["x"].sum(), one())
    want = sum(p.full().sum() for p in state["params"].values()) + args[1]["x"].sum()
    before = [(id(p), p.number) for p in on_disk(state)]
    assert abs(float(score(state, args[1])) - float(want)) <= 1e-10
    assert [(id(p), p.number) for p in on_disk(state)] == before
    state, _ = staged(state, args[1])
    assert len({p.store.path for p in on_disk(state) if p.store}) == 1


def test_files_go_with_the_state_and_nothing_else_is_touched(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "colofunc-disk-rank00000-mine").mkdir()
    (tmp_path / "colofunc-disk-rank00000-mine" / "notes").write_text("mine")
    step, *args = training(layers=1)
    staged = cf.offload(cf.shard(step, one()), policy="disk", disk=tmp_path)
    state = staged.init(*args)
    state, _ = staged(state, args[1])
    assert len(files(tmp_path)) > 2
    del state
    gc.collect()
    assert [path.name for path in files(tmp_path)] == ["notes", "mine.txt"]


def test_a_state_on_disk_that_is_placed_again_is_a_second_one(tmp_path: Path) -> None:
    step, *args = training(layers=1)
    staged = cf.offload(cf.shard(step, one()), policy="disk", disk=tmp_path)
    first = staged.init(*args)
    second = staged.init(first, args[1])
    moved, _ = staged(second, args[1])
    assert equal({n: x.full() for n, x in first["params"].items()}, args[0]["params"])
    assert not equal({n: x.full() for n, x in moved["params"].items()}, args[0]["params"])
    assert len({part.store.path for state in (first, moved) for part in on_disk(state) if part.store}) == 2


def test_a_function_that_only_reads_commits_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    staged, state, args = trained_once(tmp_path)
    commit, committed = DiskStore.commit, []
    monkeypatch.setattr(DiskStore, "commit", lambda store: (committed.append(store), commit(store)))
    cf.shard(lambda state: sum(p.sum() for p in state["params"].values()), one())(state)
    assert not committed
    state, _ = staged(state, args[1])
    assert committed


def test_a_part_on_disk_is_a_tensor_like_others(tmp_path: Path) -> None:
    step, *args = training(layers=1)
    staged = cf.offload(cf.shard(step, one()), policy="disk", disk=tmp_path)
    w, plain = staged.init(*args)["params"]["1.weight"], args[0]["params"]["1.weight"]
    near = w.redistribute("a b")
    assert isinstance(w.local, OnDisk) and not isinstance(near.local, OnDisk) and torch.equal(near.full(), plain)
    assert torch.equal((w @ w.t()).full(), plain @ plain.t()) and torch.equal(copy.deepcopy(w).full(), plain)
    assert staged.lower(*args).compare(*args).first is None and staged.lower(*args).check_finite(*args).first is None


# ---- failures ----


def test_a_directory_that_cannot_be_used_is_an_error_before_anything_is_placed(tmp_path: Path) -> None:
    step, *args = training(layers=1)
    (tmp_path / "file").write_text("")
    for name, said in (("missing", "does not exist. Try: mkdir -p"), ("file", "is a file. Try: name a directory")):
        with pytest.raises(DiskError, match=said):
            cf.offload(cf.shard(step, one()), policy="disk", disk=tmp_path / name).init(*args)
    assert all(not x.is_meta for x in args[0]["params"].values())


def test_a_directory_that_nobody_may_write_to(tmp_path: Path, monkeypatch: Any) -> None:
    step, *args = training(layers=1)

    def mkdir(self: Path, *args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(DiskError, match=r"Permission denied. Try: name a directory that this user may write to"):
        cf.offload(cf.shard(step, one()), policy="disk", disk=tmp_path).init(*args)


def test_a_disk_without_room_says_how_much_is_needed(tmp_path: Path, monkeypatch: Any) -> None:
    step, *args = training(layers=1)
    real = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((*real[:4], 2, *real[5:])))
    with pytest.raises(DiskError, match=r"has too little room \(needed: .* for two versions of every chunk"):
        cf.offload(cf.shard(step, one()), policy="disk", disk=tmp_path).init(*args)
    assert not files(tmp_path)


def trained_once(folder: Path, layers: int = 1) -> tuple[Any, Any, Any]:
    step, *args = training(layers=layers)
    staged = cf.offload(cf.shard(step, one()), policy="disk", disk=folder)
    state, _ = staged(staged.init(*args), args[1])
    return staged, state, args


def test_a_step_that_fails_after_its_first_write_changes_nothing_on_disk(tmp_path: Path, monkeypatch: Any) -> None:
    _, state, args = trained_once(tmp_path)
    before, step = fulls(state), float(state["opt"]["step"])
    start, writes = COPIER.start, []

    def fail_at_third(kind: str, operands: Any, device: Any) -> Any:
        writes.extend([kind] * (kind == "put"))
        if len(writes) == 3:
            raise OSError("pulled")
        return start(kind, operands, device)

    fresh = cf.offload(cf.shard(training(layers=1)[0], one()), policy="disk", disk=tmp_path)
    monkeypatch.setattr(COPIER, "start", fail_at_third)
    parts = on_disk(state)
    with pytest.raises(OSError, match="pulled"):
        fresh(state, args[1])
    monkeypatch.undo()
    assert len(writes) == 3 and all(part.writing is None for part in parts)
    there = dict(zip(before, _by_name(before, parts), strict=True))
    assert equal(before, there) and step == 1.0


def _by_name(before: dict[str, torch.Tensor], parts: list[OnDisk]) -> list[torch.Tensor]:
    """The parts as they were listed (parameters, moments), in the order of `before` (moments, parameters)."""
    count = len(before) // 3
    return [part.read() for part in (*parts[count:], *parts[:count])]


def test_a_step_that_failed_with_values_of_its_own_on_disk_can_be_called_again(tmp_path: Path, monkeypatch: Any) -> None:
    step, *args = training(layers=2)
    base = cf.shard(step, one())
    staged = cf.offload(base, budget=int(0.4 * peak(base, *args)), host=61_500, disk=tmp_path)
    state = staged.init(*args)
    start, spilled = COPIER.start, []

    def fail_at_third(kind: str, operands: Any, device: Any) -> Any:
        spilled.extend([kind] * (kind == "to_disk"))
        if kind == "to_disk" and len(spilled) == 3:
            raise OSError("pulled")
        return start(kind, operands, device)

    monkeypatch.setattr(COPIER, "start", fail_at_third)
    failing = cf.offload(base, budget=int(0.4 * peak(base, *args)), host=61_500, disk=tmp_path)
    with pytest.raises(OSError, match="pulled") as held:
        failing(state, args[1])
    monkeypatch.undo()
    moved, _ = staged(state, args[1])  # while the error, and with it the values, are still held
    again, _ = failing(failing.init(*args), args[1])
    assert held.traceback and equal(fulls(moved), fulls(again))


def test_a_byte_that_the_disk_changed_is_no_number(tmp_path: Path) -> None:
    staged, state, args = trained_once(tmp_path)
    part = on_disk(state)[1]
    assert part.store is not None
    for version in Path(part.store.path).glob("version-*"):
        with open(version, "r+b") as file:
            file.write(b"\xff" * version.stat().st_size)
    with pytest.raises(DiskError, match="is not what was written: checksum"):
        staged(state, args[1])


@pytest.mark.parametrize("bad", ["6GiBs", 0, -3, 0.0, 1.5, "lots"])
def test_host_budgets_that_are_none_are_named(bad: Any) -> None:
    with pytest.raises(cf.ColofuncError, match=r"cf\.offload\(host"):
        cf.offload(lambda x: x, host=bad)


def test_a_disk_that_is_no_path_and_a_policy_without_one() -> None:
    for bad in (3, ""):
        with pytest.raises(cf.ColofuncError, match=rf"cf\.offload\(disk={bad!r}\): give the path of a directory"):
            cf.offload(lambda x: x, disk=bad)
    with pytest.raises(cf.ColofuncError, match=r"policy='disk'\) needs a directory"):
        cf.offload(lambda x: x, policy="disk")
    with pytest.raises(cf.PlanError, match=r"host=0.5\) is a part of the host's memory, which topology 'ideal' does not limit"):
        cf.offload(cf.shard(lambda x: x + 1, cf.Mesh(topology="ideal")), host=0.5).lower(torch.ones(2))


# ---- real ranks ----


def trained(folder: str) -> Any:
    torch.set_num_threads(1)
    step, *args = training(layers=2)
    staged = cf.offload(cf.shard(step, cf.Mesh(dp=2, topology="8xa100-40g"), zero(3, "dp")), policy="disk", disk=folder)
    state = staged.init(*args)
    mine = {p.store.path for p in on_disk(state) if p.store}
    for _ in range(2):
        state, _ = staged(state, args[1])
    cf.save(f"{folder}/saved", state)
    again = fulls(cf.load(f"{folder}/saved", mesh=staged.lower(*args).mesh))
    return fulls(state), equal(fulls(state), again), mine, spilled(folder, args)


def spilled(folder: str, args: Any) -> tuple[int, dict[str, torch.Tensor]]:
    """(copies of activations to disk, the parameters) behind two steps in little memory of either kind."""
    base = cf.shard(training(layers=2)[0], cf.Mesh(dp=2, topology="8xa100-40g"), zero(3, "dp"))
    lean = cf.offload(base, budget=int(0.45 * peak(base, *args)), host=36_000, disk=folder)
    state = lean.init(*args)
    for _ in range(2):
        state, _ = lean(state, args[1])
    nodes = lean.lower(*args).program.nodes
    return sum(n.target.startswith("colofunc.to_disk") for n in nodes), {n: p.full() for n, p in state["params"].items()}


@pytest.mark.dist
def test_on_real_ranks_each_has_a_store_of_its_own(tmp_path: Path) -> None:
    step, state, batch = training(layers=2)
    for _ in range(2):
        state, _ = step(state, batch)
    found = launch(trained, 2, str(tmp_path), timeout_s=300)
    assert found[0][2].isdisjoint(found[1][2]) and all(len(mine) == 1 for _, _, mine, _ in found)
    for values, again, _, (copies, lean) in found:
        assert again and copies
        for name, p in state["params"].items():
            assert (values[name] - p).abs().max() <= 1e-10 and (lean[name] - p).abs().max() <= 1e-10
    assert not [path for path in files(tmp_path) if "colofunc-disk" in str(path)]
