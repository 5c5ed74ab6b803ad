"""The folder that cf.save writes: ordinary files, each part once, read in blocks, streamed to the disk."""

import errno
import importlib
import json
import os
import threading
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from saved import MESH, bits, tensors

import colofunc as cf
from colofunc.executors import direct_io
from colofunc.functional.checkpoint import disk, files, index
from colofunc.functional.checkpoint.disk import fetch
from colofunc.functional.checkpoint.parts import Ranks, assign_writers
from colofunc.spec import regions
from colofunc.testing.parts import parts

# ---- the folder ----


def test_it_is_ordinary_safetensors_without_pickle(tmp_path) -> None:
    cf.save(tmp_path / "c", {"w": torch.ones(2, 3), "h": torch.ones(3).bfloat16(), "z": torch.ones(2, dtype=torch.complex128)})
    (path,) = (tmp_path / "c").glob("*.safetensors")
    got = load_file(path)
    assert torch.equal(got["w"], torch.ones(2, 3)) and got["h"].dtype == torch.bfloat16
    assert sorted(p.suffix for p in (tmp_path / "c").iterdir()) == [".json", ".safetensors"]
    content = json.loads((tmp_path / "c" / index.INDEX).read_text())["checkpoint"]
    assert content["tensors"]["w"]["shape"] == [2, 3] and content["tensors"]["z"]["dtype"] == "complex128"


def test_each_part_is_stored_once_and_writers_are_balanced() -> None:
    many = {f"x{k}": cf.distribute(torch.ones(8, 8), "(dp a) b", MESH) for k in range(8)} | {"p": torch.ones(64)}
    leaves = assign_writers(many, Ranks(0, 4, None))
    written = [sum(item.nbytes for leaf in leaves for item in leaf.items(rank)) for rank in range(4)]
    assert sum(written) == 8 * 256 + 256 and max(written) - min(written) <= 256


def test_files_are_split_by_size(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(importlib.import_module("colofunc.functional.save"), "FILE_BYTES", 100)
    cf.save(tmp_path / "c", tensors(), random=False)
    assert len(list((tmp_path / "c").glob("*.safetensors"))) == 2
    assert bits(cf.load(tmp_path / "c")["w"]) == bits(tensors()["w"])


def test_only_the_blocks_that_a_part_needs_are_read(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(files, "BLOCK_BYTES", 64)
    x = torch.arange(64 * 16 * 4, dtype=torch.int32).reshape(64, 16, 4)
    cf.save(tmp_path / "c", {"x": x}, random=False)
    read: list[int] = []
    def counted(path, blocks, done):
        read.extend(len(memory) for _, memory in blocks)
        fetch(path, blocks, done)

    monkeypatch.setattr(files, "fetch", counted)
    (entry,) = cf.load(tmp_path / "c", mesh=cf.Mesh(a=4), specs="(a x) ...").values()
    assert torch.equal(entry.full(), x) and sum(read) == x.nbytes
    read.clear()
    piece = files.StoredPiece.from_json(index.read_index(tmp_path / "c")["tensors"]["x"]["pieces"][0])
    picks = (slice(8, 16, 1), slice(4, 8, 1), slice(0, 4, 1))
    assert torch.equal(files.read_piece(tmp_path / "c", "x", torch.int32, piece, picks), x[8:16, 4:8])
    assert sum(read) == x[8:16, 4:8].numel() * 4


def test_what_is_loaded_holds_no_more_memory_than_it_shows(tmp_path) -> None:
    cf.save(tmp_path / "c", {"x": torch.randn(600, 700)})
    got = cf.load(tmp_path / "c", mesh=cf.Mesh(a=3, b=2), specs="(a x) (b y)")["x"]
    assert all(part.untyped_storage().nbytes() == part.nbytes for part in got.shards)


# ---- the stream to the disk ----


@pytest.mark.parametrize("how", ["direct", "no such flag", "refused when set", "refused when written", "short writes"])
def test_a_stream_writes_the_bytes_that_it_is_given(tmp_path, monkeypatch, how) -> None:
    """Of any lengths, over many buffers, whatever the file system takes."""
    monkeypatch.setattr(disk, "BUFFER_BYTES", 8192)
    pwritev, control, flags = os.pwritev, direct_io.fcntl.fcntl, []

    def write(fd: int, buffers: list[Any], at: int) -> int:
        direct = bool(direct_io.DIRECT & control(fd, direct_io.fcntl.F_GETFL))
        flags.append(direct)
        if how == "refused when written" and direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return pwritev(fd, [buffers[0][: 4096 if how == "short writes" else None]], at)

    def controlled(fd: int, what: int, *args: int) -> int:
        if how == "refused when set" and args and args[0] & direct_io.DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return control(fd, what, *args)

    monkeypatch.setattr(os, "pwritev", write)
    monkeypatch.setattr(direct_io.fcntl, "fcntl", controlled)
    if how == "no such flag":
        monkeypatch.setattr(direct_io, "DIRECT", 0)
    made = torch.Generator().manual_seed(0)
    parts = [os.urandom(int(n)) for n in torch.randint(0, 20_000, (30,), generator=made)]
    with open(tmp_path / "f", "xb", buffering=0) as file, disk.stream_to_disk(file.fileno()) as out:
        for part in parts:
            out.write(memoryview(part))
    assert (tmp_path / "f").read_bytes() == b"".join(parts) and not flags[-1]
    assert not any(flags) or how not in ("no such flag", "refused when set")


def test_a_stream_that_fails_says_so_and_ends_its_threads(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(disk, "BUFFER_BYTES", 4096)
    monkeypatch.setattr(disk, "write_at", lambda fd, data, at: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
    before = set(threading.enumerate())  # a store of another test may still have its own
    full = pytest.raises(OSError, match="No space left")
    with open(tmp_path / "f", "xb", buffering=0) as file, full, disk.stream_to_disk(file.fileno()) as out:
        for _ in range(100):
            out.write(memoryview(bytes(4096)))
    assert not [t for t in set(threading.enumerate()) - before if t.name.startswith("colofunc-disk")]


# ---- regions ----


def test_regions_are_the_elements_of_parts() -> None:
    x = torch.arange(7 * 12).reshape(7, 12)
    for spec in ("(dp a~) (b tp)", "(a~ dp) (2 tp b)", "(tp dp a~) b", "(2 dp a~) (b tp 2)"):
        layout = cf.Spec(spec).bind(MESH, x.shape)
        for rank, part in enumerate(parts(x + 1, layout, MESH)):
            region = regions.region_of(layout, MESH, rank)
            rows, cols = (span.indices() for span in region.spans)
            assert torch.equal(regions.unpadded(part, layout, MESH, rank), (x + 1)[rows][:, cols])
            assert regions.Region.from_json(json.loads(json.dumps(region.to_json()))) == region
            filled = torch.zeros_like(part)
            regions.put(filled, regions.positions(layout, MESH, rank), (x + 1)[rows][:, cols])
            assert torch.equal(filled, part)
