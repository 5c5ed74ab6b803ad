"""Saving from several processes: each its own parts, and all or none of them."""

import errno
import os
from typing import Any

import pytest
import torch
from saved import MESH, bits, state, tensors

import colofunc as cf
from colofunc.errors import CheckpointError
from colofunc.executors.launch import launch
from colofunc.functional.checkpoint import disk


def on_ranks(path: str) -> Any:
    mesh = cf.Mesh(dp=2)
    made = {name: cf.distribute(x, "(dp a) ..." if x.dim() else "", mesh) for name, x in tensors().items()} | {"plain": torch.arange(5)}
    cf.save(path + "/ours", made)
    cf.save(path + "/behind", made, wait=False).wait()
    cf.save(path + "/dcp", made, format="dcp")
    four = cf.load(path + "/four", mesh=mesh, specs={"w": "a (dp b)"})
    failed = ""
    try:
        cf.save(path + "/ours", {**made, "bad": torch.ones(3) if mesh.rank else tensors})
    except Exception as error:
        failed = str(error)
    return four["w"].local.tolist(), failed


@pytest.mark.dist
def test_two_processes(tmp_path) -> None:
    cf.save(tmp_path / "four", state())
    (left, bad), (right, other) = launch(on_ranks, 2, str(tmp_path), timeout_s=120)
    assert torch.equal(torch.tensor(left), tensors()["w"][:, :3]) and torch.equal(torch.tensor(right), tensors()["w"][:, 3:])
    for name in ("ours", "behind", "dcp"):
        got = cf.load(tmp_path / name)
        assert bits(got["w"]) == bits(tensors()["w"]) and got["plain"].tolist() == list(range(5)) and int(got["n"]) == 3
        sharded = cf.load(tmp_path / name, mesh=MESH, specs={"w": "(tp a) (dp b)"})
        assert bits(sharded["w"].full()) == bits(tensors()["w"])
    assert "bad: function cannot be saved" in bad and "failed on rank 0" in other
    assert sorted(os.listdir(tmp_path)) == ["behind", "dcp", "four", "ours"]


def one_disk_full(path: str) -> str:
    mesh = cf.Mesh(dp=2)
    x = cf.distribute(torch.ones(4, 4), "(dp a) b", mesh)
    cf.save(path, {"x": x})
    if mesh.rank == 1:

        def fail(*args: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        disk.write_at = fail
    try:
        cf.save(path, {"x": x * 2}, deadline_s=20)
    except CheckpointError as error:
        return str(error)
    return "saved"


@pytest.mark.dist
def test_a_disk_that_is_full_on_one_rank(tmp_path) -> None:
    said = launch(one_disk_full, 2, str(tmp_path / "c"), timeout_s=120)
    assert "rank 1 failed" in said[0] and "No space left" in said[1]
    assert os.listdir(tmp_path) == ["c"] and cf.load(tmp_path / "c")["x"].sum() == 16
