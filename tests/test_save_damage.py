"""Saved folders that somebody changed, cut short or mixed up: errors that name file and tensor."""

import shutil
from typing import Any

import pytest
import torch
from saved import state

import colofunc as cf
from colofunc.errors import CheckpointError
from colofunc.functional.checkpoint import index

# ---- changed files ----


def data_file(path) -> Any:
    (found,) = path.glob("*.safetensors")
    return found


def flip(path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(data)


def test_a_flipped_bit_names_file_and_tensor(tmp_path) -> None:
    cf.save(tmp_path / "c", {"a": {"w": torch.zeros(5)}}, random=False)
    flip(data_file(tmp_path / "c"), -3)
    with pytest.raises(CheckpointError, match=r"rank-00000-00000.safetensors: the bytes of 'a\.w' \[0:5\] are not those that were saved"):
        cf.load(tmp_path / "c")
    assert cf.load(tmp_path / "c", verify=False)["a"]["w"][4] != 0


def test_a_truncated_file(tmp_path) -> None:
    cf.save(tmp_path / "c", {"w": torch.zeros(5)}, random=False)
    path = data_file(tmp_path / "c")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="is truncated: 'w' should reach byte"):
        cf.load(tmp_path / "c", verify=False)


def test_files_that_were_exchanged(tmp_path) -> None:
    for k in range(2):
        cf.save(tmp_path / f"c{k}", {"w": torch.full((5,), float(k))}, random=False)
    shutil.copy(data_file(tmp_path / "c0"), data_file(tmp_path / "c1"))
    with pytest.raises(CheckpointError, match="the bytes of 'w'"):
        cf.load(tmp_path / "c1")
    data_file(tmp_path / "c1").unlink()
    with pytest.raises(CheckpointError, match="which holds 'w', cannot be read"):
        cf.load(tmp_path / "c1")


@pytest.mark.parametrize("at", [3, 60, 100, -5])
def test_a_changed_index(tmp_path, at) -> None:
    cf.save(tmp_path / "c", {"w": torch.zeros(5), "n": 7})
    flip(tmp_path / "c" / index.INDEX, at)
    with pytest.raises(CheckpointError, match=r"colofunc.json is not what was saved \(checksum\)"):
        cf.load(tmp_path / "c")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: None, "there is no checkpoint at"),
        (lambda p: p.mkdir(), "holds no checkpoint: no colofunc.json"),
        (lambda p: (p.mkdir(), (p / "pytorch_model.bin").write_bytes(b"")), "as a pickle, 'pytorch_model.bin'.*convert it"),
        (
            lambda p: (p.mkdir(), (p / "model.safetensors").write_bytes(b"\x08" + b"\0" * 7 + b"notjson!")),
            r"is no safetensors file: it is not JSON.* Try: another copy",
        ),
        (lambda p: (p.mkdir(), (p / "model.safetensors").write_bytes(b"\xff" * 20)), "is no safetensors file"),
        (lambda p: (p.mkdir(), (p / "model.safetensors.index.json").write_text('{"weight_map": {"w": "../x"}}')), "not one of its folder"),
    ],
)
def test_foreign_folders(tmp_path, make, says) -> None:
    make(tmp_path / "c")
    with pytest.raises(CheckpointError, match=f"(?s){says}"):
        cf.load(tmp_path / "c")


def test_elements_that_are_in_no_file(tmp_path) -> None:
    cf.save(tmp_path / "c", {"w": cf.distribute(torch.ones(4), "(dp a)", cf.Mesh(dp=2))}, random=False)
    content = index.read_index(tmp_path / "c")
    content["tensors"]["w"]["pieces"].pop()
    index.write_index(tmp_path / "c", content)
    with pytest.raises(CheckpointError, match=r"'w': 2 of 4 elements \[0:4\] are in no file"):
        cf.load(tmp_path / "c")


def test_any_flipped_bit_is_found(tmp_path) -> None:
    cf.save(tmp_path / "c", state(), random=False)
    for path in (tmp_path / "c").iterdir():
        start = 8 + int.from_bytes(path.read_bytes()[:8], "little") if path.suffix == ".safetensors" else 0
        for at in range(start, path.stat().st_size - 1, 37):
            flip(path, at)
            with pytest.raises(CheckpointError):
                cf.load(tmp_path / "c")
            flip(path, at)
    cf.load(tmp_path / "c")


# ---- changed folders ----


def test_parts_without_their_index_are_no_plain_folder(tmp_path) -> None:
    cf.save(tmp_path / "c", state())
    (tmp_path / "c" / "colofunc.json").unlink()
    with pytest.raises(CheckpointError, match=r"not their index colofunc\.json; the checkpoint is incomplete"):
        cf.load(tmp_path / "c")


def test_changed_dcp_folders(tmp_path) -> None:
    x = torch.arange(2048.0)
    cf.save(tmp_path / "c", {"x": x}, format="dcp")
    data = (tmp_path / "c" / "__0_0.distcp").read_bytes()
    at = data.index(x.numpy().tobytes())
    for name, where, says in (("__0_0.distcp", at + 4000, "the bytes of 'x' are not those that were saved"), (".metadata", 50, "checksum")):
        flip(tmp_path / "c" / name, where)
        with pytest.raises(CheckpointError, match=says):
            cf.load(tmp_path / "c")
        flip(tmp_path / "c" / name, where)
    assert torch.equal(cf.load(tmp_path / "c")["x"], x)
    (tmp_path / "c" / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"cannot be read .*; the checkpoint is incomplete"):
        cf.load(tmp_path / "c")


def test_an_index_that_leads_out_of_its_folder(tmp_path) -> None:
    cf.save(tmp_path / "c", {"x": torch.ones(1)})
    content = index.read_index(tmp_path / "c")
    content["tensors"]["x"]["pieces"][0][0] = "../secret"
    index.write_index(tmp_path / "c", content)
    with pytest.raises(CheckpointError, match=r"'\.\./secret', which is not one of its folder"):
        cf.load(tmp_path / "c")
