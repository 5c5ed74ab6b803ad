"""Tensors of the disk tier: read by any operator, written by copies only; the queue that the plan sees, the buffers that reads fill."""

from pathlib import Path

import pytest
import torch

from colofunc.errors import DiskError
from colofunc.executors.disk.tensors import ChunkRoom, Scratch, Staging, reading, unread, writing
from colofunc.planner.offload.residency import Links, OffloadItem, ScheduledCopy, Trace
from colofunc.planner.offload.timeline import TraceLanes, play


def test_a_disk_has_one_queue_for_both_directions() -> None:
    items = (OffloadItem(8, True, (0,), writes={0}), OffloadItem(8, True, (2,)))
    trace = Trace(seconds=(1.0, 1.0, 1.0), host=(), base=(0, 0, 0), items=items)
    moves = (ScheduledCopy(0, "fetch", 0, 0), ScheduledCopy(0, "store", 1, 3), ScheduledCopy(1, "fetch", 1, 2))
    # 4 s of reading, 1 s of work; then two engines move 4 s beside one another, one queue 8 s; the last position takes 1 s.
    seconds = [play(TraceLanes(trace), moves, Links(2.0, 2.0, 0.0, queue)).makespan for queue in (False, True)]
    assert seconds == [5.0 + 4.0 + 1.0, 5.0 + 8.0 + 1.0]


def test_buffers_are_given_again_and_never_more_than_were_needed_at_once() -> None:
    staging = Staging()
    first, second = staging.empty(5000), staging.empty(300)
    where = first.data_ptr()
    assert staging.peak_bytes == 5300 and where % 4096 == 0
    del first
    again = staging.empty(5000)
    assert again.data_ptr() == where and staging.peak_bytes == 5300
    del again, second
    other = staging.empty(5300)
    assert other.nbytes == 5300 and staging.peak_bytes == 5300 and staging.held_bytes == 5300


def test_operators_read_it_and_writes_are_waited_for(tmp_path: Path) -> None:
    x = torch.randn(5, 7, dtype=torch.float64)
    there = ChunkRoom(tmp_path, [x.nbytes]).keep(x)
    assert torch.equal(there, x) and torch.equal(there + 1, x + 1) and torch.equal(there.t()[2], x[:, 2])
    assert torch.empty_like(there).shape == (5, 7) and there.tolist() == x.tolist()
    moving = writing(there, 2 * x)
    with pytest.raises(DiskError, match="is read while it is being written"):
        reading(there)
    assert torch.equal(moving.wait(), 2 * x)
    with pytest.raises(DiskError, match="cannot write to on_disk"):
        there.add_(1)


def test_what_was_not_read_yet_is_read_when_it_is_looked_at_and_not_written() -> None:
    asked = []
    there = unread((2,), torch.float64, lambda: asked.append(1) or torch.ones(2, dtype=torch.float64))
    assert there.shape == (2,) and not asked
    assert float(there.sum()) == 2.0 and len(asked) == 1
    with pytest.raises(DiskError, match="is not to be written"):
        there.copy_(torch.zeros(2))


def test_room_for_values_of_a_step_is_given_again(tmp_path: Path) -> None:
    x = torch.randn(3, 4).t()  # dims keep the order in which they lie
    scratch = Scratch(tmp_path, [x.nbytes])
    for k in range(3):
        there = scratch.write(k * x).wait()
        assert torch.equal(there, k * x) and there.stride() == x.stride()
        del there
    there = scratch.write(x).wait()
    with pytest.raises(DiskError, match="there is no room for another 48 bytes"):
        scratch.write(x)
    assert torch.equal(there, x)
