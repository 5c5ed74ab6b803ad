"""Folders of torch.distributed.checkpoint: written for torch, read from torch, nothing in them is run."""

import os
import pickle
from pathlib import Path
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
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(CheckpointError, match=r"asks for (posix|os)\.system, which is none of torch's checkpoint records"):
        cf.load(tmp_path / "c")
    (tmp_path / "c" / ".metadata").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match=r"is no metadata of torch\.distributed\.checkpoint"):
        cf.load(tmp_path / "c")


ATTACKS: dict[str, bytes] = {
    "a class's attribute": b"ctorch.distributed.checkpoint.metadata\nBytesStorageMetadata\n(N}S'__init__'\nN\x86b.",
    "a class's dict": b"ctorch.distributed.checkpoint.metadata\nMetadata\n}X\x08\0\0\0__init__Nsb.",
    "a function": b"ctorch.serialization\n_get_layout\n}X\x06\0\0\0harmedNsb.",
    "a dtype": b"ctorch\nfloat32\n}X\x06\0\0\0harmedNsb.",
    "a path": b"cpathlib\nPosixPath\n(N}X\x06\0\0\0harmedNs\x86b.",
    "a memo of 64 GiB": b"Nr\xff\xff\xff\xff.",
    "a string of 8 EiB": b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.",
    "an extension": b"\x82\x01.",
    "an instance": b"(ios\nsystem\n.",
}


@pytest.mark.parametrize("what", ATTACKS)
def test_a_dcp_metadata_changes_nothing_that_is_torchs(tmp_path, what) -> None:
    from torch.distributed.checkpoint import metadata

    before = {name: dict(vars(kind)) for name, kind in vars(metadata).items() if isinstance(kind, type)}
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / ".metadata").write_bytes(ATTACKS[what])
    with pytest.raises(CheckpointError):
        cf.load(tmp_path / "c")
    assert before == {name: dict(vars(kind)) for name, kind in vars(metadata).items() if isinstance(kind, type)}
    assert not hasattr(torch.serialization._get_layout, "harmed") and not hasattr(Path, "harmed")


@pytest.mark.parametrize("size", [(1 << 40, 1 << 20), (1 << 62, 1 << 62), (9, 6)])
def test_sizes_are_bounded_by_the_bytes_that_are_there(tmp_path, size, monkeypatch) -> None:
    """Of a tensor that no memory could hold, asked for before anything is read."""
    from torch.distributed import checkpoint

    checkpoint.save({"w": torch.ones(8, 6)}, checkpoint_id=tmp_path / "c")
    path = tmp_path / "c" / ".metadata"
    found = pickle.loads(path.read_bytes())
    found.state_dict_metadata["w"].size = torch.Size(size)
    found.state_dict_metadata["w"].chunks[0].sizes = torch.Size(size)
    path.write_bytes(pickle.dumps(found))
    monkeypatch.setattr(torch, "empty", None)
    with pytest.raises(CheckpointError, match="'w'"):
        cf.load(tmp_path / "c")


def test_a_storage_that_claims_more_than_its_record(tmp_path) -> None:
    from torch.distributed import checkpoint

    checkpoint.save({"w": torch.ones(7)}, checkpoint_id=tmp_path / "c")
    path = tmp_path / "c" / "__0_0.distcp"
    claims = path.read_bytes().replace(b"cpuq\x04K\x07t", b"cpuq\x04K\xfft")
    path.write_bytes(claims)
    with pytest.raises(CheckpointError, match="claims 255 elements of a record of 28 bytes"):
        cf.load(tmp_path / "c", verify=False)


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
