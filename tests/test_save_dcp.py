"""Folders of torch.distributed.checkpoint: written for torch, read from torch, nothing in them is run."""

import os
from typing import Any

import pytest
import torch
from saved import MESH, bits, state, tensors

import colofunc as cf
from colofunc.errors import CheckpointError, InputError


def test_torch_reads_what_we_write_as_dcp(tmp_path) -> None:
    from torch.distributed import checkpoint

    striped = cf.distribute(torch.arange(6), "(a dp)", MESH)
    cf.save(tmp_path / "c", {"p": state(), "k": [torch.ones(2), 3], "lr": 0.5, "s": striped}, format="dcp")
    empty = {"w": torch.empty(8, 6), "b": torch.empty(6)}
    found = {"p": empty, "k": [torch.empty(2), 0], "lr": 0.0, "s": torch.empty(6, dtype=torch.int64)}
    checkpoint.load(found, checkpoint_id=tmp_path / "c")
    assert torch.equal(found["p"]["w"], tensors()["w"]) and found["k"][1] == 3 and found["lr"] == 0.5
    assert found["s"].tolist() == list(range(6))


def test_a_dcp_folder_of_ours_comes_back_whole(tmp_path) -> None:
    cf.save(tmp_path / "c", {"p": state(), "t": (1, None)}, format="dcp", wait=False).wait()
    want = torch.rand(2)
    got = cf.load(tmp_path / "c", mesh=cf.Mesh(x=2), specs={"*.w": "a (x b)"})
    assert got["t"] == (1, None) and bits(got["p"]["w"].full()) == bits(tensors()["w"]) and torch.equal(torch.rand(2), want)


def test_dcp_folders_of_torch(tmp_path) -> None:
    from torch.distributed import checkpoint

    checkpoint.save({"model": tensors(), "opt": [{"lr": 0.1}, torch.ones(2)], "step": 4}, checkpoint_id=tmp_path / "c")
    got = cf.load(tmp_path / "c", mesh=MESH, specs={"w": "(dp a) b"})
    assert got["step"] == 4 and got["opt"][0]["lr"] == 0.1 and str(got["model"]["w"].spec) == "(dp a) b"
    assert bits(got["model"]["w"].full()) == bits(tensors()["w"])
    like = cf.load(tmp_path / "c", like={"model": tensors(1), "opt": [{"lr": 0.0}, torch.empty(2)], "step": 0})
    assert bits(like["model"]["w"]) == bits(tensors()["w"])


class Harmful:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/harm",)


def test_a_dcp_metadata_that_asks_for_anything_else(tmp_path) -> None:
    import pickle

    (tmp_path / "c").mkdir()
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(CheckpointError, match=r"asks for (posix|os)\.system, which is none of torch's checkpoint records"):
        cf.load(tmp_path / "c")
    (tmp_path / "c" / ".metadata").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match=r"is no metadata of torch\.distributed\.checkpoint"):
        cf.load(tmp_path / "c")


def test_an_object_in_a_dcp_folder_that_is_no_plain_data(tmp_path) -> None:
    from torch.distributed import checkpoint

    checkpoint.save({"w": torch.ones(1), "bad": Harmful()}, checkpoint_id=tmp_path / "c")
    with pytest.raises(CheckpointError, match="'bad' cannot be read"):
        cf.load(tmp_path / "c")


def test_stripes_of_single_elements_do_not_fit_dcp(tmp_path) -> None:
    x = cf.distribute(torch.ones(10_000), "(a dp)", MESH)
    with pytest.raises(InputError, match="is 5000 slices, too many for DCP"):
        cf.save(tmp_path / "c", {"x": x}, format="dcp")
    assert os.listdir(tmp_path) == []
    with pytest.raises(InputError, match="no format 'pickle'"):
        cf.save(tmp_path / "c", {}, format="pickle")


def test_keep_with_dcp(tmp_path) -> None:
    for k in range(3):
        cf.save(tmp_path / f"step-{k}", {"x": torch.ones(1)}, format="dcp", keep=1)
    assert os.listdir(tmp_path) == ["step-2"]
