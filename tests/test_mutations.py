"""Every kind of file that is read, changed in every way: a ColofuncError or a value, no file touched, nothing run.

A case is a number: `COUNT` of each kind by default, a thousand in the sweep. The seed of one that falls is printed.
"""


import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from mutated import mutated_bytes, mutated_checked, mutated_json
from safetensors.torch import save_file
from saved import state, tensors

import colofunc as cf
from colofunc.cache import Cache
from colofunc.compiler import plan_cache
from colofunc.testing import programs

COUNT, MANY = 40, 1000


@attrs.frozen
class Kind:
    """What is written once, which of its files are changed and how, and what reads it."""

    write: Callable[[Path], Any]
    file: str  # a glob
    change: Callable[[bytes, int], bytes]
    read: Callable[[Path, Any], Any]


def plan(path: Path) -> Any:
    step, *args = programs.NAMED["mlp"]()
    low = cf.shard(step, cf.Mesh(dp=2, tp=2, topology="8xa100-80g")).lower(*args)
    low.plan.save(path / "plan.json")
    return low


def read_plan(path: Path, low: Any) -> None:
    found = cf.Plan.load(path / "plan.json")
    str(found), found.diff(low.plan), found.to_dict()


def cache(path: Path) -> Any:
    low = plan(path)
    Cache(path, 1 << 20).write("a" * 40, {"lowered": plan_cache.local_hash(low.program), "plan": low.plan.to_dict()})
    (path / "plan.json").unlink()
    return low


def read_cache(path: Path, low: Any) -> None:
    """The plan is made again from what was kept, or anew; what is not good is dropped, with one line."""
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLOFUNC_CACHE", str(path))
        made = plan_cache.remembered("a" * 40, lambda: (low, "searched"), lambda plan: rebuilt(plan, low), said.append)  # type: ignore[arg-type,return-value]
    assert len(said) == (made[1] == "searched") and (not said or not list(path.iterdir()))


def rebuilt(found: cf.Plan, low: Any) -> Any:
    """What rebuilding needs of a plan: the decisions of this very program, under its specs."""
    if found.to_dict() != low.plan.to_dict():
        raise KeyError("another plan")
    return low, low.program


YAML = """
mesh: {dp: 2, tp: 2}
zero: {stage: 3, axis: dp}
parallel:
  "*.fc1.weight": "(tp o) i"
checkpoint: {budget: 1GiB}
precision: bf16
clip: 1.0
accumulate: {microbatches: 4}
"""


def config(path: Path) -> None:
    (path / "run.yaml").write_text(YAML)


def topology(path: Path) -> None:
    cf.Mesh(dp=2, topology="8xa100-80g").topology.save(path / "box.json")


def load_all(path: Path, _: Any) -> None:
    cf.load(path)
    cf.load(path, mesh=cf.Mesh(dp=2))


def checkpoint(path: Path) -> None:
    cf.save(path / "c", {"p": state(), "n": [3, 0.5], "k": {1: torch.float32}})


def weights(path: Path) -> None:
    save_file(tensors(), path / "model.safetensors", metadata={"format": "pt"})


def by_torch(path: Path) -> None:
    from torch.distributed import checkpoint

    checkpoint.save({"p": tensors(), "lr": 0.5, "n": [torch.ones(2), 3]}, checkpoint_id=path)


def index(data: bytes, seed: int) -> bytes:
    return mutated_checked(data, seed, '{"crc32": "%08x", "checkpoint": ')


def entry(data: bytes, seed: int) -> bytes:
    return mutated_checked(data, seed, '{"colofunc_cache": 1, "crc32": "%08x", "entry": ')


def header(data: bytes, seed: int) -> bytes:
    """The header of a safetensors file."""
    size = int.from_bytes(data[:8], "little")
    if seed % 3 == 0:
        return mutated_bytes(data[: 8 + size], seed) + data[8 + size :]
    text = mutated_json(data[8 : 8 + size], seed)
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


KINDS = {
    "plan": Kind(plan, "plan.json", mutated_json, read_plan),
    "cache": Kind(cache, "*.json", entry, read_cache),
    "configuration": Kind(config, "run.yaml", mutated_bytes, lambda path, _: cf.configure(path / "run.yaml")),
    "topology": Kind(topology, "box.json", mutated_json, lambda path, _: cf.Topology.load(path / "box.json")),
    "checkpoint": Kind(checkpoint, "c/colofunc.json", index, lambda path, _: load_all(path / "c", _)),
    "weights": Kind(weights, "model.safetensors", header, load_all),
    "dcp": Kind(by_torch, ".metadata", mutated_bytes, load_all),
    "dcp data": Kind(by_torch, "*.distcp", mutated_bytes, load_all),
}  # fmt: skip


def contents(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def run(kind: Kind, path: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases 0 to `count`, each in a folder of its own beside files that nobody may touch."""
    outside = path / "outside"
    outside.mkdir()
    (outside / "notes").write_text("mine")
    monkeypatch.chdir(outside)
    monkeypatch.setattr(os, "system", lambda words: pytest.fail(f"ran {words!r}"))
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **options: pytest.fail(f"ran {args!r}"))
    clean = path / "clean"
    clean.mkdir()
    made = kind.write(clean)
    for seed in range(count):
        folder = path / "case"
        shutil.copytree(clean, folder)
        (file,) = folder.glob(kind.file)
        file.write_bytes(kind.change(file.read_bytes(), seed))
        try:
            kind.read(folder, made)
        except cf.ColofuncError:
            pass
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        assert contents(outside) == {"notes": b"mine"} and sorted(os.listdir(path)) == ["case", "clean", "outside"], seed
        shutil.rmtree(folder)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", KINDS)
def test_a_changed_file_is_an_error_with_a_name(tmp_path, monkeypatch, name) -> None:
    run(KINDS[name], tmp_path, COUNT, monkeypatch)


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", KINDS)
def test_thousands_of_changed_files(tmp_path, monkeypatch, name) -> None:
    run(KINDS[name], tmp_path, MANY, monkeypatch)
