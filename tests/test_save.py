"""Saving and loading states: bit for bit, onto any mesh, whole or not at all, and what is refused."""

import collections
import dataclasses
import errno
import importlib
import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import colofunc as cf
from colofunc.dtensor.parts import parts
from colofunc.errors import CheckpointError, InputError
from colofunc.executors import disk_files
from colofunc.executors.launch import launch
from colofunc.functional.checkpoint import disk, files, folder, regions
from colofunc.functional.checkpoint.fetch import fetch
from colofunc.functional.checkpoint.parts import Ranks, assign

MESH = cf.Mesh(dp=2, tp=2)
DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint16, torch.bool,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128,
]  # fmt: skip


def bits(x: torch.Tensor) -> list[int]:
    return x.detach().contiguous().reshape(-1).view(torch.uint8).tolist()


def full(x: Any) -> Any:
    return x.full() if isinstance(x, cf.DTensor) else x


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(8, 6, generator=made), "b": torch.randn(6, generator=made), "n": torch.tensor(3)}


def state(mesh: cf.Mesh = MESH, seed: int = 0) -> dict[str, Any]:
    found = tensors(seed)
    specs = {"w": "(dp o) (tp i)", "b": "(dp o)", "n": ""}
    return {name: cf.distribute(x, specs[name], mesh) for name, x in found.items()}


# ---- trees ----


class Point(collections.namedtuple("Point", "x y")):
    pass


@dataclasses.dataclass
class Record:
    w: Any
    n: int


@attrs.frozen
class Frozen:
    w: Any
    s: str


def test_containers_and_numbers_come_back(tmp_path) -> None:
    saved = {
        "list": [1, 2.5, None, True, "a\n\u00e9"], "tuple": (torch.tensor(1.0), ()), "nan": [math.nan, math.inf, -0.0], 3: {"x": 1 + 2j},
        "empty": {}, "dtype": torch.bfloat16, "array": np.arange(6, dtype=np.int16).reshape(2, 3),
    }  # fmt: skip
    cf.save(tmp_path / "c", saved)
    got = cf.load(tmp_path / "c")
    assert repr(got) == repr(saved)
    assert isinstance(got["array"], np.ndarray) and got["array"].dtype == np.int16


def test_names_that_collide_stay_apart(tmp_path) -> None:
    cf.save(tmp_path / "c", {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}})
    got = cf.load(tmp_path / "c")
    assert int(got["a.b"]) == 1 and int(got["a"]["b"]) == 2


def test_records_are_dicts_or_what_the_example_shows(tmp_path) -> None:
    other = collections.OrderedDict
    saved = {"p": Point(torch.ones(2), 3), "r": Record(torch.zeros(1), 4), "f": Frozen(torch.ones(1), "s"), "o": other(z=1)}
    cf.save(tmp_path / "c", saved)
    assert cf.load(tmp_path / "c")["r"] == {"w": torch.zeros(1), "n": 4}
    empty = {"p": Point(torch.empty(2), 0), "r": Record(torch.empty(1), 0), "f": Frozen(torch.empty(1), ""), "o": other(z=0)}
    got = cf.load(tmp_path / "c", like=empty)
    assert [type(v) for v in got.values()] == [Point, Record, Frozen, collections.OrderedDict]
    assert got["p"].y == 3 and got["r"].n == 4 and got["f"].s == "s" and got["o"]["z"] == 1 and got["p"].x.tolist() == [1, 1]


def test_a_value_that_nothing_could_rebuild_is_refused(tmp_path) -> None:
    with pytest.raises(InputError, match=r"opt\.fn: function cannot be saved"):
        cf.save(tmp_path / "c", {"opt": {"fn": tensors}})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (lambda: cf.distribute(torch.ones(4), "b", MESH).redistribute("b +tp"), r"x .* is a pending sum, .* save x\.redistribute\('a'\)"),
        (lambda: torch.ones(2, device="meta"), "x .* has no data yet"),
        (lambda: torch.ones(2, 2).to_sparse(), r"x is torch.sparse_coo.* x\.to_dense\(\)"),
    ],
)
def test_leaves_that_have_no_elements_are_refused(tmp_path, bad, says) -> None:
    with pytest.raises(InputError, match=says):
        cf.save(tmp_path / "c", {"x": bad()})


# ---- bits ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_bit_for_bit_onto_another_mesh(tmp_path, dtype) -> None:
    x = torch.randint(0, 256, (6 * 10 * dtype.itemsize,), dtype=torch.uint8)
    x = (x % 2 if dtype == torch.bool else x).view(dtype)[:60].reshape(6, 10)
    cf.save(tmp_path / "c", {"x": cf.distribute(x, "(b~ dp) (2 tp c~)", MESH), "z": x[0, 0]})
    assert bits(cf.load(tmp_path / "c")["x"]) == bits(x)
    got = cf.load(tmp_path / "c", mesh=cf.Mesh(tp=3, ep=2), specs={"x": "(tp a) (b ep)"})
    assert bits(got["x"].full()) == bits(x) and bits(got["z"].full()) == bits(x[0, 0])
    assert got["x"].spec == cf.Spec("(tp a) (b ep)")


SPECS = ["(dp a) b", "a (dp b~)", "(a~ dp) b", "(tp dp a~) b", "(dp a~) (tp b~)", "(2 dp a~) b", "a (b~ tp dp)", "(a~ tp) (dp 2 b~)", "a b"]


@given(st.sampled_from(SPECS), st.sampled_from(SPECS), st.integers(1, 9), st.integers(1, 9))
def test_any_spec_to_any_spec(tmp_path_factory, src, dst, rows, cols) -> None:
    x = torch.arange(rows * cols, dtype=torch.int32).reshape(rows, cols) + 1
    other = cf.Mesh(tp=3, dp=2)
    src, dst = src.replace("a)", "a~)") if "a~" not in src else src, dst.replace("a)", "a~)") if "a~" not in dst else dst
    path = tmp_path_factory.mktemp("c") / "c"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "BLOCK_BYTES", 16)
        cf.save(path, [cf.distribute(x, src, MESH)], random=False)
        (got,) = cf.load(path, mesh=other, specs=dst)
    for mine, wanted in zip(got.shards, parts(x, got.sharding, other), strict=True):
        assert torch.equal(mine, wanted)
    shutil.rmtree(path)


def test_empty_tensors_and_scalars(tmp_path) -> None:
    held = {"s": cf.distribute(torch.tensor(2.5), "", MESH), "d": cf.distribute(torch.zeros(0, 4), "a (dp b)", MESH)}
    cf.save(tmp_path / "c", {"e": torch.zeros(0, 3), **held})
    got = cf.load(tmp_path / "c", mesh=MESH)
    assert got["e"].shape == (0, 3) and float(got["s"]) == 2.5 and got["d"].full().shape == (0, 4)


def test_values_of_lazy_tensors_are_saved(tmp_path) -> None:
    model = cf.functional(cf.lazy(lambda: torch.nn.Linear(3, 2)))
    cf.save(tmp_path / "c", model.params)
    torch.manual_seed(0)
    want = torch.nn.Linear(3, 2)
    torch.manual_seed(0)
    cf.save(tmp_path / "c", cf.functional(cf.lazy(lambda: torch.nn.Linear(3, 2))).params)
    assert bits(cf.load(tmp_path / "c")["weight"]) == bits(want.weight)


# ---- where it lies ----


def test_without_specs_tensors_lie_as_they_were_saved_as_far_as_axes_go(tmp_path) -> None:
    cf.save(tmp_path / "c", state())
    assert str(cf.load(tmp_path / "c", mesh=MESH)["w"].spec) == "(dp a) (tp b)"
    assert str(cf.load(tmp_path / "c", mesh=cf.Mesh(tp=3))["w"].spec) == "a (tp b)"
    assert cf.load(tmp_path / "c", mesh=cf.Mesh(tp=5, dp=4))["w"].sharding.axes == ("dp",)
    assert isinstance(cf.load(tmp_path / "c")["w"], torch.Tensor) and not isinstance(cf.load(tmp_path / "c")["w"], cf.DTensor)


def test_specs_by_prefix_glob_and_one_for_all(tmp_path) -> None:
    cf.save(tmp_path / "c", {"p": state(), "m": {"w": state()["w"]}, "k": [torch.ones(4), torch.ones(4)]})
    got = cf.load(tmp_path / "c", mesh=MESH, specs={"p": {"w": "a (dp b)"}, "k": ["(dp a)", None]})
    assert [str(x.spec) for x in (got["p"]["w"], got["m"]["w"], got["k"][0], got["k"][1])] == ["a (dp b)", "(dp a) (tp b)", "(dp a)", "a"]
    got = cf.load(tmp_path / "c", mesh=MESH, specs={"*.w": "(tp a) b"})
    assert str(got["p"]["w"].spec) == str(got["m"]["w"].spec) == "(tp a) b"
    assert str(cf.load(tmp_path / "c", mesh=MESH, specs="(dp a) ...")["p"]["b"].spec) == "(dp a)"


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        (dict(specs="a b"), InputError, "give mesh= too"),
        (dict(mesh=MESH, specs={"*.v": "a b"}), InputError, r"'\*\.v' matches no tensor"),
        (dict(mesh=MESH, specs={"w": "a b +tp"}), InputError, "w: .* is a pending sum"),
        (dict(mesh=MESH, specs={"w": "(dp a)"}), cf.SpecError, "spec has 1 dims, the tensor has 2"),
        (dict(mesh=MESH, specs={"w": 3}), InputError, r"specs\.w: 3 is no spec"),
        (dict(model=torch.nn.Linear(1, 1), like={}), InputError, "model= fills a model"),
    ],
)
def test_wrong_specs(tmp_path, options, error, says) -> None:
    cf.save(tmp_path / "c", state())
    with pytest.raises(error, match=says):
        cf.load(tmp_path / "c", **options)


def test_an_example_decides_where_and_what(tmp_path) -> None:
    cf.save(tmp_path / "c", state())
    mesh = cf.Mesh(x=3)
    example = {"w": cf.distribute(torch.empty(8, 6), "a (x b)", mesh), "b": torch.empty(6, device="meta"), "n": torch.tensor(0)}
    got = cf.load(tmp_path / "c", like=example)
    assert str(got["w"].spec) == "a (x b)" and got["w"].mesh == mesh and isinstance(got["b"], cf.DTensor)
    assert torch.equal(got["w"].full(), tensors()["w"])


@pytest.mark.parametrize(
    ("example", "says"),
    [
        ({"w": torch.empty(8, 6), "b": torch.empty(6), "m": torch.tensor(0)}, "missing 'm'; unexpected: 'n'; unexpected 'n'"),
        ({"w": torch.empty(6, 8), "b": torch.empty(6), "n": torch.tensor(0)}, r"w is \(8, 6\) float32 in the folder and \(6, 8\) float32"),
        ({"w": torch.empty(8, 6).half(), "b": torch.empty(6), "n": torch.tensor(0)}, "float32 in the folder .* float16 in the example"),
        ({"w": [torch.empty(8, 6)], "b": torch.empty(6), "n": torch.tensor(0)}, "w was saved as a leaf and is a container"),
        ({"w": torch.empty(8, 6), "b": torch.empty(6)}, r"unexpected 'n'.*strict=False"),
    ],
)
def test_an_example_that_does_not_fit(tmp_path, example, says) -> None:
    cf.save(tmp_path / "c", tensors())
    with pytest.raises(CheckpointError, match=f"(?s)is not like the example: .*{says}"):
        cf.load(tmp_path / "c", like=example)


def test_not_strict_keeps_the_examples_values(tmp_path) -> None:
    cf.save(tmp_path / "c", tensors())
    got = cf.load(tmp_path / "c", like={"w": torch.empty(8, 6), "new": torch.ones(2), "k": 5}, strict=False)
    assert got["new"].tolist() == [1, 1] and got["k"] == 5 and list(got) == ["w", "new", "k"]
    assert torch.equal(got["w"], tensors()["w"])


# ---- the folder ----


def test_it_is_ordinary_safetensors_without_pickle(tmp_path) -> None:
    cf.save(tmp_path / "c", {"w": torch.ones(2, 3), "h": torch.ones(3).bfloat16(), "z": torch.ones(2, dtype=torch.complex128)})
    (path,) = (tmp_path / "c").glob("*.safetensors")
    got = load_file(path)
    assert torch.equal(got["w"], torch.ones(2, 3)) and got["h"].dtype == torch.bfloat16
    assert sorted(p.suffix for p in (tmp_path / "c").iterdir()) == [".json", ".safetensors"]
    content = json.loads((tmp_path / "c" / folder.INDEX).read_text())["checkpoint"]
    assert content["tensors"]["w"]["shape"] == [2, 3] and content["tensors"]["z"]["dtype"] == "complex128"


def test_each_part_is_stored_once_and_writers_are_balanced() -> None:
    many = {f"x{k}": cf.distribute(torch.ones(8, 8), "(dp a) b", MESH) for k in range(8)} | {"p": torch.ones(64)}
    leaves = assign(many, Ranks(0, 4, None))
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
    piece = files.Piece.from_json(folder.read_index(tmp_path / "c")["tensors"]["x"]["pieces"][0])
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
    pwrite, control, flags = os.pwrite, disk_files.fcntl.fcntl, []

    def write(fd: int, data: Any, at: int) -> int:
        direct = bool(disk_files.DIRECT & control(fd, disk_files.fcntl.F_GETFL))
        flags.append(direct)
        if how == "refused when written" and direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return pwrite(fd, data[: 4096 if how == "short writes" else None], at)

    def controlled(fd: int, what: int, *args: int) -> int:
        if how == "refused when set" and args and args[0] & disk_files.DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return control(fd, what, *args)

    monkeypatch.setattr(os, "pwrite", write)
    monkeypatch.setattr(disk_files.fcntl, "fcntl", controlled)
    if how == "no such flag":
        monkeypatch.setattr(disk_files, "DIRECT", 0)
    made = torch.Generator().manual_seed(0)
    parts = [os.urandom(int(n)) for n in torch.randint(0, 20_000, (30,), generator=made)]
    with open(tmp_path / "f", "xb", buffering=0) as file, disk.stream(file.fileno()) as out:
        for part in parts:
            out.write(memoryview(part))
    assert (tmp_path / "f").read_bytes() == b"".join(parts) and not flags[-1]
    assert not any(flags) or how not in ("no such flag", "refused when set")


def test_a_stream_that_fails_says_so_and_ends_its_threads(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(disk, "BUFFER_BYTES", 4096)
    monkeypatch.setattr(disk, "write_at", lambda fd, data, at: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
    with open(tmp_path / "f", "xb", buffering=0) as file, pytest.raises(OSError, match="No space left"), disk.stream(file.fileno()) as out:
        for _ in range(100):
            out.write(memoryview(bytes(4096)))
    assert not [t for t in threading.enumerate() if t.name.startswith("colofunc-disk")]


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


# ---- whole or not at all ----


def test_a_save_over_an_older_one_replaces_it(tmp_path) -> None:
    cf.save(tmp_path / "c", tensors(0))
    cf.save(tmp_path / "c", tensors(1))
    assert bits(cf.load(tmp_path / "c")["w"]) == bits(tensors(1)["w"]) and os.listdir(tmp_path) == ["c"]


def test_where_the_system_cannot_swap_it_renames_twice(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(folder, "exchange", lambda a, b: False)
    cf.save(tmp_path / "c", tensors(0))
    cf.save(tmp_path / "c", tensors(1))
    assert bits(cf.load(tmp_path / "c")["w"]) == bits(tensors(1)["w"]) and os.listdir(tmp_path) == ["c"]
    os.rename(tmp_path / "c", tmp_path / "c.old-123")  # killed between the two
    assert bits(cf.load(tmp_path / "c")["w"]) == bits(tensors(1)["w"])
    cf.save(tmp_path / "c", tensors(2))
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize("where", ["write", "fsync", "rename"])
def test_a_failing_disk_leaves_the_last_one(tmp_path, monkeypatch, where) -> None:
    cf.save(tmp_path / "c", tensors(0))
    full_disk = OSError(errno.ENOSPC, "No space left on device")

    def fail(*args: Any) -> Any:
        raise full_disk

    owner, name = {"write": (disk, "write_at"), "fsync": (os, "fsync"), "rename": (folder.Writing, "_swap")}[where]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        says = "No space left on device; what was written is removed and the last checkpoint there is intact"
        with pytest.raises(CheckpointError, match=says):
            cf.save(tmp_path / "c", tensors(1))
    assert os.listdir(tmp_path) == ["c"] and bits(cf.load(tmp_path / "c")["w"]) == bits(tensors(0)["w"])
    cf.save(tmp_path / "c", tensors(1))


LIMITED = """
import resource, signal, sys, torch
import colofunc as cf
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
cf.save(sys.argv[1], {"w": torch.zeros(1000)})
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
try:
    cf.save(sys.argv[1], {"w": torch.ones(1_000_000)}, format=sys.argv[2])
except cf.CheckpointError as error:
    print(error)
"""


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
def test_a_file_that_cannot_grow(tmp_path, subprocess_env, format) -> None:
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "c"), format]
    done = subprocess.run(command, env=subprocess_env, capture_output=True, text=True, timeout=120)
    assert "File too large" in done.stdout, done.stderr
    assert "what was written is removed and the last checkpoint there is intact" in done.stdout, done.stderr
    assert os.listdir(tmp_path) == ["c"] and cf.load(tmp_path / "c")["w"].shape == (1000,)


def test_two_savers_of_one_folder(tmp_path) -> None:
    first = folder.Writing(tmp_path / "c")
    first.begin()
    with pytest.raises(CheckpointError, match=rf"process {os.getpid()} on host .* is saving to .*c'; wait for it"):
        cf.save(tmp_path / "c", tensors())
    first.abandon()
    cf.save(tmp_path / "c", tensors())
    assert os.listdir(tmp_path) == ["c"]


HOLDS = """
import os, sys, time, torch
import colofunc as cf
from colofunc.functional.checkpoint import disk
write, path = disk.write_at, sys.argv[1]

def slowly(*args):
    print("writing", flush=True)
    sys.stdin.readline()
    write(*args)

disk.write_at = slowly
cf.save(path, {"w": torch.full((1000,), 1.0)})
"""
RACES = """
import sys, torch
import colofunc as cf
won = 0
for k in range(40):
    try:
        cf.save(sys.argv[1], {"who": int(sys.argv[2]), "w": torch.full((5000,), float(won + 1)), "won": won + 1})
        won += 1
    except cf.CheckpointError as error:
        assert "is saving to" in str(error) and "wait for it, or save to another folder" in str(error), error
print(won)
"""


def test_another_process_that_saves_there_is_named(tmp_path, subprocess_env) -> None:
    """Two runs with one folder: the second one learns of the first, whose save is not touched."""
    cf.save(tmp_path / "c", {"w": torch.zeros(3)})
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path / "c")], env=subprocess_env, **pipes) as other:
        try:
            assert other.stdout.readline() == "writing\n"
            with pytest.raises(CheckpointError, match=rf"process {other.pid} on host .* is saving to .*c'; wait for it, or save to"):
                cf.save(tmp_path / "c", {"w": torch.ones(3)})
            assert cf.load(tmp_path / "c")["w"].tolist() == [0, 0, 0]
            other.communicate("go\n" * 100, timeout=60)
        finally:
            other.kill()
    assert other.returncode == 0 and cf.load(tmp_path / "c")["w"].shape == (1000,) and os.listdir(tmp_path) == ["c"]


def test_two_processes_that_save_to_one_folder_all_the_time(tmp_path, subprocess_env) -> None:
    """Whatever the order: each save is done or refused, and the folder holds one that was done, whole."""
    command = [sys.executable, "-c", RACES, str(tmp_path / "c")]
    runs = [subprocess.Popen([*command, str(k)], env=subprocess_env, stdout=subprocess.PIPE, text=True) for k in range(2)]
    try:
        won = [int(run.communicate(timeout=120)[0]) for run in runs]
    finally:
        for run in runs:
            run.kill()
    got = cf.load(tmp_path / "c")
    assert sum(won) > 0 and got["won"] == won[got["who"]] and os.listdir(tmp_path) == ["c"]
    assert torch.equal(got["w"], torch.full((5000,), float(got["won"])))


def test_what_a_killed_save_left_is_removed(tmp_path) -> None:
    (tmp_path / "c.tmp-12ab").mkdir()
    (tmp_path / "c.tmp-12ab" / "rank-00000-00000.safetensors").write_bytes(b"half")
    (tmp_path / "c.lock").write_text("process 1 on host gone")  # nobody holds it
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        cf.load(tmp_path / "c")
    cf.save(tmp_path / "c", tensors())
    assert os.listdir(tmp_path) == ["c"]


def test_a_file_in_the_way(tmp_path) -> None:
    (tmp_path / "c").write_text("notes")
    with pytest.raises(CheckpointError, match="is a file; a checkpoint is a folder"):
        cf.save(tmp_path / "c", tensors())
    assert (tmp_path / "c").read_text() == "notes"


def test_keep_and_the_last_one(tmp_path) -> None:
    for k in (1, 2, 9, 10, 11):
        cf.save(tmp_path / f"step-{k}", {"k": k}, keep=3)
    (tmp_path / "step-99").mkdir()  # no checkpoint
    assert sorted(os.listdir(tmp_path)) == ["step-10", "step-11", "step-9", "step-99"]
    assert cf.load(tmp_path / "step-*")["k"] == 11
    with pytest.raises(CheckpointError, match="no checkpoint matches"):
        cf.load(tmp_path / "run-*")
    with pytest.raises(InputError, match="keep=0"):
        cf.save(tmp_path / "step-1", {}, keep=0)


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
    flip(tmp_path / "c" / folder.INDEX, at)
    with pytest.raises(CheckpointError, match=r"colofunc.json is not what was saved \(checksum\)"):
        cf.load(tmp_path / "c")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: None, "there is no checkpoint at"),
        (lambda p: p.mkdir(), "holds no checkpoint: no colofunc.json"),
        (lambda p: (p.mkdir(), (p / "pytorch_model.bin").write_bytes(b"")), "as a pickle, 'pytorch_model.bin'.*convert it"),
        (lambda p: (p.mkdir(), (p / "model.safetensors").write_bytes(b"\x08" + b"\0" * 7 + b"notjson!")), "is no safetensors file"),
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
    content = folder.read_index(tmp_path / "c")
    content["tensors"]["w"]["pieces"].pop()
    folder.write_index(tmp_path / "c", content)
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


# ---- in the background ----


def test_a_background_save_holds_the_values_of_its_moment(tmp_path, monkeypatch) -> None:
    go = threading.Event()
    write = disk.write_at
    monkeypatch.setattr(disk, "write_at", lambda *args: go.wait(30) and write(*args))
    x, y = torch.zeros(1000), cf.distribute(torch.zeros(8), "(dp a)", MESH)
    saving = cf.save(tmp_path / "c", {"x": x, "y": y}, wait=False)
    assert not saving.done and "running" in repr(saving)
    x.fill_(1)
    y.add_(1)
    go.set()
    saving.wait()
    got = cf.load(tmp_path / "c")
    assert saving.done and got["x"].sum() == 0 and got["y"].sum() == 0


def test_what_goes_wrong_in_the_background_is_raised_by_wait_or_the_next_save(tmp_path, monkeypatch) -> None:
    def fail(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(disk, "write_at", fail)
        with pytest.raises(CheckpointError, match="No space left"):
            cf.save(tmp_path / "c", tensors(), wait=False).wait()
        forgotten = cf.save(tmp_path / "c", tensors(), wait=False)
        while not forgotten.done:
            time.sleep(0.01)
    with pytest.raises(CheckpointError, match="No space left") as caught:
        cf.save(tmp_path / "d", tensors())
    assert "an earlier save" in caught.value.__notes__[0]
    assert os.listdir(tmp_path) == []
    cf.save(tmp_path / "d", tensors())


ENDS = """
import sys, torch
import colofunc as cf
cf.save(sys.argv[1], {"w": torch.ones(2_000_000)}, wait=False)
"""


def test_a_background_save_ends_before_the_interpreter(tmp_path, subprocess_env) -> None:
    subprocess.run([sys.executable, "-c", ENDS, str(tmp_path / "c")], env=subprocess_env, check=True, timeout=120)
    assert cf.load(tmp_path / "c")["w"].sum() == 2_000_000 and os.listdir(tmp_path) == ["c"]


# ---- what else belongs to a run ----


class Loader:
    def __init__(self) -> None:
        self.position = {"epoch": 0, "seed": torch.tensor(5)}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.position)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state


def test_random_numbers_and_data_go_on(tmp_path) -> None:
    loader = Loader()
    loader.position["epoch"] = 3
    cf.save(tmp_path / "c", {"n": 1}, batches=loader)
    want = torch.rand(3), np.random.rand(2)
    fresh = Loader()
    assert cf.load(tmp_path / "c", batches=fresh) == {"n": 1}
    assert torch.equal(torch.rand(3), want[0]) and np.array_equal(np.random.rand(2), want[1])
    assert fresh.position == {"epoch": 3, "seed": torch.tensor(5)}
    torch.manual_seed(4)
    before = torch.get_rng_state()
    cf.load(tmp_path / "c", random=False)
    assert torch.equal(torch.get_rng_state(), before)
    cf.save(tmp_path / "d", {"n": 1})
    with pytest.raises(CheckpointError, match="was saved without batches"):
        cf.load(tmp_path / "d", batches=fresh)


# ---- torch.distributed.checkpoint ----


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


# ---- real ranks ----


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


def saves_behind_and_returns(path: str) -> None:
    make, started = files.write_file, threading.Event()

    def slow(*args: Any) -> Any:
        started.set()
        time.sleep(0.5)
        return make(*args)

    importlib.import_module("colofunc.functional.save").write_file = slow
    cf.save(path, {"x": torch.ones(3)}, wait=False)
    assert started.wait(10)


@pytest.mark.dist
def test_a_launched_rank_ends_its_background_save(tmp_path) -> None:
    launch(saves_behind_and_returns, 1, str(tmp_path / "c"), timeout_s=100)
    assert cf.load(tmp_path / "c")["x"].tolist() == [1, 1, 1]


def test_keep_removes_what_killed_saves_left_under_other_names(tmp_path) -> None:
    cf.save(tmp_path / "step-1", state())
    held = folder.Writing(tmp_path / "step-2")
    held.begin()
    killed = folder.Writing(tmp_path / "step-3")
    killed.begin()
    os.close(killed._lock._fd)  # as the end of its process does
    cf.save(tmp_path / "step-4", state())
    (tmp_path / "step-4" / "colofunc.json").unlink()  # killed while it was being removed
    cf.save(tmp_path / "step-5", state(), keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-1", "step-2.lock", held.folder.name, "step-5"]
    held.abandon()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-1", "step-5"]


def test_keep_with_dcp(tmp_path) -> None:
    for k in range(3):
        cf.save(tmp_path / f"step-{k}", {"x": torch.ones(1)}, format="dcp", keep=1)
    assert os.listdir(tmp_path) == ["step-2"]


def test_older_ones_that_cannot_be_removed(tmp_path, monkeypatch) -> None:
    cf.save(tmp_path / "step-1", {"x": torch.ones(1)})
    real = shutil.rmtree

    def refuse(path: Any, **options: Any) -> None:
        if str(path).endswith("step-1"):
            raise PermissionError(errno.EACCES, "no", str(path))
        real(path, **options)

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.raises(CheckpointError, match=r"step-2' is saved, but an older one could not be removed"):
        cf.save(tmp_path / "step-2", {"x": torch.ones(1)}, keep=1)
    assert int(cf.load(tmp_path / "step-*")["x"]) == 1


def test_a_folder_that_is_given_up_is_gone_at_once(tmp_path) -> None:
    """Other ranks may be writing into it, so removing it file by file may leave it there, and they would wait."""
    writing = folder.Writing(tmp_path / "c")
    writing.begin()
    real = shutil.rmtree

    def late(path: Any, **options: Any) -> None:
        assert not writing.folder.exists()
        real(path, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "rmtree", late)
        writing.abandon()
    assert not os.listdir(tmp_path)


def test_a_link_stays_a_link(tmp_path) -> None:
    cf.save(tmp_path / "a", {"x": torch.ones(1)})
    (tmp_path / "latest").symlink_to("a")
    cf.save(tmp_path / "latest", {"x": torch.zeros(1)})
    assert (tmp_path / "latest").is_symlink() and cf.load(tmp_path / "a")["x"] == 0
    assert sorted(os.listdir(tmp_path)) == ["a", "latest"]


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
    content = folder.read_index(tmp_path / "c")
    content["tensors"]["x"]["pieces"][0][0] = "../secret"
    folder.write_index(tmp_path / "c", content)
    with pytest.raises(CheckpointError, match=r"'\.\./secret', which is not one of its folder"):
        cf.load(tmp_path / "c")


def test_sizes_come_back_as_tuples(tmp_path) -> None:
    cf.save(tmp_path / "c", {"shape": torch.ones(2, 3).shape})
    assert cf.load(tmp_path / "c") == {"shape": (2, 3)}
