"""Saves and disk on a card: copies to pinned memory that the host does not wait for one by one, and that steps do not overtake."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pretended import Machine, on_card
from test_offload import training

import colofunc as cf
from colofunc.executors.copies import COPIER
from colofunc.executors.disk.tensors import ChunkRoom
from colofunc.functional.checkpoint import staging
from colofunc.functional.checkpoint.files import PieceToWrite
from colofunc.spec.regions import Region

D = torch.float64


ARRIVED = "event: functional/checkpoint/staging.py wait"  # for a snapshot, or for a window of one


def state_of(n: int = 6) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    made = {f"w{k}": torch.randn(3 + k, 4, dtype=D) for k in range(n)}
    return {**made, "count": torch.tensor(7), "halves": torch.randn(5).half(), "none": torch.zeros(0, 3), "t": torch.randn(4, 6).t()}


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("format", ["safetensors", "dcp"])
def test_a_save_waits_for_the_card_by_events_only_and_holds_what_was_then(wait: bool, format: str, tmp_path: Path) -> None:
    want = state_of()
    for seed in range(2):
        with Machine(seed=seed) as machine:
            state = on_card(machine, {name: x / 2 for name, x in want.items() if x.dtype != torch.int64}) | {"count": want["count"]}
            state = {name: x * 2 if name != "count" else x for name, x in state.items()}  # still to be computed
            machine.forget_counts()
            saving = cf.save(tmp_path / f"{seed}-{wait}", state, wait=wait, format=format)
            for name, x in state.items():
                if name != "count":
                    x.fill_(0)  # the next step writes in place
            saving.wait()
            # Whoever waits for the save waits for the copies, once; else its thread does.
            assert (machine.places if wait else machine.beside)[ARRIVED] == 1
            assert not machine.places.keys() - ({ARRIVED} if wait else set()), machine.places
            assert not machine.beside.keys() - {ARRIVED}, machine.beside
        loaded = cf.load(tmp_path / f"{seed}-{wait}")
        for name, x in want.items():
            assert torch.equal(loaded[name], x), name


def test_a_state_on_a_mesh_is_saved_while_it_is_written_to(tmp_path: Path) -> None:
    for seed in range(2):
        with Machine(seed=seed) as machine:
            mesh = cf.Mesh(dp=2, device="cuda")
            x = cf.distribute(torch.arange(8.0, dtype=D), "(dp _)", mesh)
            machine.forget_counts()
            savings = []
            for k in range(3):
                savings.append(cf.save(tmp_path / f"{seed}-{k}", {"x": x}, wait=False))
                for shard in x.shards:
                    shard.mul_(2)
            assert not machine.waits, machine.places
            savings[-1].wait()
        for k in range(3):
            assert torch.equal(cf.load(tmp_path / f"{seed}-{k}")["x"], torch.arange(8.0, dtype=D) * 2**k)


def items_of(tensors: list[torch.Tensor]) -> list[PieceToWrite]:
    return [PieceToWrite(f"x{k}", x.dtype, Region.whole(x.shape), lambda x=x: x) for k, x in enumerate(tensors)]


def test_a_save_that_is_waited_for_stages_a_window_ahead_in_bounded_memory() -> None:
    torch.manual_seed(0)
    plain = [torch.randn(n, dtype=D) for n in (30, 20, 10, 70, 5, 60, 1)]
    for seed in range(2):
        with Machine(seed=seed) as machine:
            there = [machine.to_card(x) for x in plain]
            held, copies = [], []
            for item, x in zip(staging.stage_ahead(items_of([t * 1 for t in there]), 64 * 8), plain, strict=True):
                assert torch.equal(item.value(), x)
                held.append(sum(machine._registered.values()))
                copies.append(machine.copies)
            assert copies[0] < len(plain)
            assert machine.places == {ARRIVED: 4}  # once a window: the file is written meanwhile
            assert max(held) <= 4 * 4096  # two windows and what is given back when the next one takes its place


def test_windows_that_are_asked_for_in_another_order_are_copied_again() -> None:
    torch.manual_seed(0)
    plain = [torch.randn(n, dtype=D) for n in (60, 61, 62, 63)]
    with Machine() as machine:
        items = staging.stage_ahead(items_of([machine.to_card(x) for x in plain]), 64 * 8)
        for k in (3, 0, 2, 2, 1, 3):
            assert torch.equal(items[k].value(), plain[k])


@pytest.mark.parametrize("wait", [True, False])
def test_what_lies_on_the_card_is_staged_where_other_parts_lie_on_disk(wait: bool, tmp_path: Path) -> None:
    step, *args = training(layers=1)
    want = state_of()
    (tmp_path / "disk").mkdir()
    with Machine() as machine, torch.cuda.stream(torch.cuda.Stream()):
        staged = cf.offload(cf.shard(step, cf.Mesh(device="cuda")), policy="disk", disk=tmp_path / "disk")
        state = staged.init(*args)
        halves = on_card(machine, {name: x / 2 for name, x in want.items() if x.is_floating_point()})
        there = {name: x * 2 for name, x in halves.items()}  # by the current stream, behind which the thread of the save comes
        machine.forget_counts()
        saving = cf.save(tmp_path / "saved", {"state": state, "more": there}, wait=wait)
        if not wait:
            assert not machine.waits  # the call ends when the thread has written what steps may write to
            for x in there.values():
                x.fill_(0)
        saving.wait()
        found = machine.places if wait else machine.beside
        assert found[ARRIVED] == 1 and not (machine.places + machine.beside).keys() - {ARRIVED}
    loaded = cf.load(tmp_path / "saved")["more"]
    for name, x in loaded.items():
        assert torch.equal(x, want[name]), name


def test_pinned_memory_is_used_again_by_the_next_save(tmp_path: Path) -> None:
    found = []
    with Machine() as machine:
        state: Any = on_card(machine, {"x": torch.randn(100, dtype=D)})
        for k in range(3):
            cf.save(tmp_path / str(k), state, wait=False).wait()
            found.append(dict(machine._registered))
    assert found[0] and found[0] == found[1] == found[2]


# ---- disk ----


@pytest.mark.parametrize("policy", ["disk", "host"])
def test_the_host_does_not_wait_for_copies_between_the_card_the_host_and_the_disk(policy: str, tmp_path: Path) -> None:
    """But for the gradients with which it updates the state itself; what lies on disk is read and written by threads."""
    step, *args = training(layers=1)
    want = cf.shard(step, cf.Mesh(device="cpu"))
    expected, _ = want(want.init(*args), args[1])
    for seed in range(2):
        with Machine(seed=seed) as machine:
            staged = cf.offload(cf.shard(step, cf.Mesh(device="cuda")), policy=policy, disk=tmp_path if policy == "disk" else None)
            state = staged.init(*args)
            batch = on_card(machine, args[1])
            state, _ = staged(state, batch)
            machine.forget_counts()
            state, _ = staged(state, batch)
            assert machine.places.keys() == {"event: executors/copies.py settle"}, machine.places
            again = staged.init(*args)
            again, _ = staged(again, batch)
            for name, x in expected["params"].items():
                assert torch.allclose(again["params"][name].full().cpu(), x.full(), rtol=1e-10, atol=1e-12), name


def test_a_buffer_that_a_card_still_reads_is_not_read_into(tmp_path: Path) -> None:
    """The thread of the disk waits for the copy out of it; the host does not."""
    for seed in range(2):
        with Machine(seed=seed) as machine:
            device = torch.device("cuda", 0)
            room = ChunkRoom(tmp_path, [800] * 6)
            parts = [room.keep(torch.full((100,), float(k), dtype=D)) for k in range(6)]
            found = []
            for part in parts:
                read = COPIER.start("to_host", (part,), device)
                sent = COPIER.start("to_device", (read.wait(),), device)
                del read
                found.append(sent.wait())
                del sent
            assert not machine.waits, machine.places
            assert [float(x.sum()) for x in found] == [100.0 * k for k in range(6)]
            COPIER.finish()
