"""Files of others: no save, no store and no cache removes, replaces or follows what colofunc did not write."""

import contextlib
import importlib
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from saved import bits, tensors

import colofunc as cf
from colofunc.command.report import write_files
from colofunc.errors import CheckpointError, DiskError
from colofunc.executors.disk.store import DiskStore
from colofunc.functional.checkpoint import folder, index
from colofunc.pictures import memory_picture

SOURCES = {"train.py": "print(1)\n", "data/words.txt": "words", ".git/HEAD": "ref"}


def put(path: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return path


def texts(path: Path) -> dict[str, str]:
    return {str(p.relative_to(path)): p.read_text() for p in sorted(path.rglob("*")) if p.is_file() and p.suffix != ".safetensors"}


def pretrained(path: object, value: float = 1.0, **options: object) -> None:
    model = cf.functional(torch.nn.Linear(2, 2))
    cf.save_pretrained(model, {name: torch.full_like(x, value) for name, x in model.params.items()}, path, **options)


# ---- cf.save ----


@pytest.mark.parametrize("name", [".", "", "work", "link", "link/", "../work", "./link/../work"])
@pytest.mark.parametrize("format", ["safetensors", "dcp"])
def test_a_folder_with_other_files_is_refused_and_untouched(tmp_path, monkeypatch, name, format) -> None:
    work = put(tmp_path / "work", SOURCES)
    (work / "work").symlink_to(work)
    (work / "link").symlink_to(work)
    monkeypatch.chdir(work)
    with pytest.raises(CheckpointError, match=r"no path" if not name else r"work' holds .*no save of colofunc wrote.*overwrite=True"):
        cf.save(name, tensors(), format=format)
    assert texts(work).items() >= SOURCES.items() and len(os.listdir(work)) == 5 and os.listdir(tmp_path) == ["work"]


def test_overwrite_adds_the_checkpoint_and_keeps_other_files(tmp_path) -> None:
    work = put(tmp_path / "work", SOURCES)
    inode = (work / "data").stat().st_ino
    cf.save(work, tensors(), overwrite=True)
    assert texts(work).items() >= SOURCES.items() and (work / "data").stat().st_ino == inode
    assert bits(cf.load(work)["w"]) == bits(tensors()["w"]) and os.listdir(tmp_path) == ["work"]
    cf.save(work, tensors(1))  # from now on it is a checkpoint, with other files beside
    assert texts(work).items() >= SOURCES.items() and bits(cf.load(work)["w"]) == bits(tensors(1)["w"])


def test_what_lies_beside_a_checkpoint_outlives_it(tmp_path) -> None:
    for k in range(4):
        cf.save(tmp_path / f"step-{k}", {"k": k}, keep=2)
        put(tmp_path / f"step-{k}", {"notes.txt": f"run {k}", "eval/loss.txt": "0.1"})
    assert sorted(os.listdir(tmp_path)) == ["step-0", "step-1", "step-2", "step-3"]
    assert texts(tmp_path / "step-0") == {"notes.txt": "run 0", "eval/loss.txt": "0.1"}
    cf.save(tmp_path / "step-3", {"k": 7})
    assert cf.load(tmp_path / "step-*")["k"] == 7 and (tmp_path / "step-3" / "notes.txt").read_text() == "run 3"


def test_keep_removes_no_model_of_another_library(tmp_path) -> None:
    put(tmp_path / "llama-2", {"config.json": "{}", "model.safetensors": "weights"})
    (tmp_path / "llama-1").symlink_to("llama-2")
    cf.save(tmp_path / "llama-3", tensors(), keep=1)
    assert texts(tmp_path / "llama-2") == {"config.json": "{}"} and (tmp_path / "llama-1").is_symlink()


def test_files_named_like_ours_are_not_ours(tmp_path) -> None:
    """Locks of other tools, folders with the names of temporary ones, a file in a checkpoint that was exchanged."""
    put(tmp_path, {"uv.lock": "packages", "uv.tmp-old/a.txt": "a", "uv.tmp-0123456789ab/b.txt": "b", "uv.old-0123456789zz/c.txt": "c"})
    before = texts(tmp_path)
    cf.save(tmp_path / "uv", tensors())
    assert texts(tmp_path).items() >= before.items()
    (tmp_path / "uv" / "rank-00000-00000.safetensors").write_bytes(b"another")
    with pytest.raises(CheckpointError, match=r"uv' holds 'rank-00000-00000\.safetensors', which no save"):
        cf.save(tmp_path / "uv", tensors())
    assert (tmp_path / "uv" / "rank-00000-00000.safetensors").read_bytes() == b"another"
    cf.save(tmp_path / "uv", tensors(), overwrite=True)
    assert bits(cf.load(tmp_path / "uv")["w"]) == bits(tensors()["w"])


def test_the_lock_is_no_link_and_an_empty_folder_is_free(tmp_path, monkeypatch) -> None:
    (tmp_path / "notes").write_text("mine")
    (tmp_path / f"c{folder.LOCK}").symlink_to(tmp_path / "notes")
    with pytest.raises(CheckpointError):
        cf.save(tmp_path / "c", tensors())
    assert (tmp_path / "notes").read_text() == "mine"
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for k in range(2):  # the working directory changes places with no other: it is written into
        cf.save(".", {"k": k})
        assert cf.load(".")["k"] == k
    assert sorted(os.listdir()) == ["colofunc.json", "rank-00000-00000.safetensors"]
    assert sorted(os.listdir(tmp_path)) == [f"c{folder.LOCK}", "here", "notes"]


def test_checkpoints_of_before_files_were_listed_are_known(tmp_path) -> None:
    cf.save(tmp_path / "c", tensors())
    content = {key: value for key, value in index.read_index(tmp_path / "c").items() if key != "files"}
    index.write_durably(tmp_path / "c" / index.INDEX, index.index_bytes(content))
    cf.save(tmp_path / "c", tensors(1))
    assert bits(cf.load(tmp_path / "c")["w"]) == bits(tensors(1)["w"]) and len(os.listdir(tmp_path / "c")) == 2


@pytest.mark.parametrize("kind", [None, index.PLAIN, index.INCOMPLETE])
@pytest.mark.parametrize("name", ["../precious", "sub/precious", "/precious", "..", "train.py"])
def test_an_index_that_somebody_crafted_makes_no_file_its_own(tmp_path, kind, name) -> None:
    (tmp_path / "precious").write_text("mine")
    cf.save(tmp_path / "c", tensors())
    (tmp_path / "c" / "sub").mkdir()
    mine = {"sub/precious": "mine", "train.py": "mine"}
    put(tmp_path / "c", mine)
    content = index.read_index(tmp_path / "c")
    absolute = name.replace("/precious", f"{tmp_path}/precious") if name[0] == "/" else name
    content["files"] |= {absolute: None}
    index.write_durably(tmp_path / "c" / index.INDEX, index.index_bytes(content | ({"format": kind} if kind else {})))
    for overwrite in (False, True):
        with contextlib.suppress(CheckpointError):
            cf.save(tmp_path / "c", tensors(1), overwrite=overwrite, keep=1)
        assert texts(tmp_path / "c").items() >= mine.items() and (tmp_path / "precious").read_text() == "mine"


@pytest.mark.parametrize("at", ["swap_folders", "_discard", "sync"])
def test_a_save_that_is_killed_loses_no_file_of_others(tmp_path, monkeypatch, at) -> None:
    cf.save(tmp_path / "c", tensors())
    put(tmp_path / "c", SOURCES)
    with monkeypatch.context() as patch:
        patch.setattr(folder.Writing, "abandon", lambda self: os.close(self._lock._fd))  # as the end of a process
        patch.setattr(folder, at, lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            cf.save(tmp_path / "c", tensors(1))
    cf.save(tmp_path / "c", tensors(2))
    assert texts(tmp_path / "c").items() >= SOURCES.items() and os.listdir(tmp_path) == ["c"]
    assert bits(cf.load(tmp_path / "c")["w"]) == bits(tensors(2)["w"])


# ---- save_pretrained ----


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "model-00001-of-00002.safetensors"])
def test_weights_of_another_library_are_replaced_on_demand_only(tmp_path, name) -> None:
    put(tmp_path / "m", {name: "theirs", "tokenizer.json": "{}"})
    with pytest.raises(CheckpointError, match=rf"m' holds '{name}', which no save of colofunc wrote.*overwrite=True"):
        pretrained(tmp_path / "m")
    assert (tmp_path / "m" / name).read_text() == "theirs"
    pretrained(tmp_path / "m", overwrite=True)
    assert sorted(os.listdir(tmp_path / "m")) == ["colofunc.json", "model.safetensors", "tokenizer.json"]
    assert (cf.load(tmp_path / "m")["weight"] == 1).all()


def test_weights_that_another_library_wrote_over_ours(tmp_path) -> None:
    pretrained(tmp_path / "m")
    (tmp_path / "blob").write_text("theirs")
    (tmp_path / "m" / "model.safetensors").unlink()
    (tmp_path / "m" / "model.safetensors").symlink_to(tmp_path / "blob")
    with pytest.raises(CheckpointError, match="which no save of colofunc wrote"):
        pretrained(tmp_path / "m")
    pretrained(tmp_path / "m", overwrite=True)
    assert (tmp_path / "blob").read_text() == "theirs" and (cf.load(tmp_path / "m")["weight"] == 1).all()


def test_into_the_working_directory_beside_its_sources(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(put(tmp_path / "work", SOURCES))
    for k in range(3):
        pretrained(".", float(k), shard_bytes=16 if k == 1 else 1000)
        assert (cf.load(".")["weight"] == k).all()
    assert texts(tmp_path / "work").items() >= SOURCES.items() and os.listdir(tmp_path) == ["work"]
    with pytest.raises(CheckpointError, match="no path"):
        pretrained("")


def test_a_checkpoint_and_a_model_are_not_mixed(tmp_path) -> None:
    cf.save(tmp_path / "c", tensors())
    with pytest.raises(CheckpointError, match=r"is a checkpoint of cf\.save; nothing was touched"):
        pretrained(tmp_path / "c")
    pretrained(tmp_path / "m")
    with pytest.raises(CheckpointError, match=r"is a folder of cf\.save_pretrained; nothing was touched"):
        cf.save(tmp_path / "m", tensors())
    assert bits(cf.load(tmp_path / "c")["w"]) == bits(tensors()["w"]) and (cf.load(tmp_path / "m")["weight"] == 1).all()


# ---- the disk tier ----


def test_stores_that_are_links_or_none_lose_nothing(tmp_path) -> None:
    """What has the name of a store that a dead process left, and is none, in whole or in part."""
    dead = {"host": platform.node(), "pid": 1, "rank": 0}
    files = {"lock": json.dumps(dead), "version-0": "mine", "notes": "mine"}
    names = [f"colofunc-disk-rank00000-{k * 12}" for k in "abcd"] + ["colofunc-disk-rank00000-mine"]
    put(tmp_path / "work", files)
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / names[0]).symlink_to(tmp_path / "work")
    put(tmp_path / "disk" / names[1], files | {"lock": "[1]"})
    put(tmp_path / "disk" / names[2], files | {"lock": json.dumps({"host": platform.node()})})
    put(tmp_path / "disk" / names[3], {"notes": "mine"})
    for name in ("lock", "version-0"):
        (tmp_path / "disk" / names[3] / name).symlink_to(tmp_path / "work" / name)
    put(tmp_path / "disk" / names[4], files)
    before = texts(tmp_path)
    with DiskStore(tmp_path / "disk", [16], rank=0):
        assert texts(tmp_path).items() >= before.items()
    assert texts(tmp_path) == before
    with pytest.raises(DiskError, match="no path"):
        DiskStore("", [16], rank=0)


# ---- single files ----


def test_a_plan_or_a_topology_replaces_its_own_kind_only(tmp_path) -> None:
    low = cf.shard(lambda x: x + 1, cf.Mesh(dp=2)).lower(torch.ones(2))
    for name, thing in (("plan", low.plan), ("topology", low.mesh.topology)):
        (tmp_path / "train.py").write_text("print(1)")
        with pytest.raises(cf.ColofuncError, match=r"train.py' is a file without 'colofunc_\w+', so none that this would replace"):
            thing.save(tmp_path / "train.py")
        assert (tmp_path / "train.py").read_text() == "print(1)"
        for _ in range(2):
            thing.save(tmp_path / f"{name}.json")


def test_a_plan_is_replaced_whole_and_its_links_keep_what_they_hold(tmp_path, monkeypatch) -> None:
    for shape in ((2,), (2, 2)):
        plan = cf.shard(lambda x: x + 1, cf.Mesh(dp=2)).lower(torch.ones(shape)).plan
        plan.save(tmp_path / "plan.json")
        if len(shape) == 1:
            os.link(tmp_path / "plan.json", tmp_path / "backup.json")
            (tmp_path / "link.json").symlink_to(tmp_path / "plan.json")
    assert cf.Plan.load(tmp_path / "backup.json").inputs[0].shape == (2,) and cf.Plan.load(tmp_path / "plan.json").inputs[0].shape == (2, 2)
    before = (tmp_path / "plan.json").read_text()
    with monkeypatch.context() as patch, pytest.raises(cf.ColofuncError, match="cannot be written: no space"):
        patch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError(28, "no space")))
        plan.save(tmp_path / "link.json")
    plan.save(tmp_path / "link.json")
    assert (tmp_path / "plan.json").read_text() == before and (tmp_path / "link.json").is_symlink() and len(os.listdir(tmp_path)) == 3


def writers(tmp_path: Path) -> dict[str, Callable[[object], object]]:
    """All that writes to a path that it is given."""
    step = cf.shard(lambda x: x + 1, cf.Mesh(dp=2))
    low = step.lower(torch.ones(2))
    return {
        "cf.save": lambda path: cf.save(path, tensors()),
        "save_pretrained": pretrained,
        "Plan.save": low.plan.save,
        "Topology.save": low.mesh.topology.save,
        "profile": lambda path: step.profile(path, torch.ones(2), steps=1),
        "picture": lambda path: memory_picture(low, path),
        "--trace": lambda path: write_files(Console(quiet=True), low, "step", None, "", path, ""),
        "disk": lambda path: DiskStore(path, [16], rank=0).close(),
    }


READERS: dict[str, Callable[[object], object]] = {
    "cf.load": cf.load,
    "Plan.load": cf.Plan.load,
    "Topology.load": cf.Topology.load,
    "configure": cf.configure,
}
NO_PATHS = [None, b"x", 3, 1.5, [], object(), "", "a\0b", "n" * 300, "f/x", "\ud800"]


@pytest.mark.parametrize("path", NO_PATHS, ids=[f"{path!r:.20}" for path in NO_PATHS])
def test_what_is_no_path_is_an_error_of_ours_everywhere(tmp_path, monkeypatch, path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f").write_text("a file")
    for name, use in [*writers(tmp_path).items(), *READERS.items()]:
        if name == "--trace" and not path:
            continue  # none is asked for
        with pytest.raises(cf.ColofuncError) as caught:
            use(path)
        assert "Try" in str(caught.value) or ";" in str(caught.value), name
    assert os.listdir(tmp_path) == ["f"]


def test_a_name_too_long_for_what_is_beside_it_is_an_error_of_ours(tmp_path) -> None:
    for save in (lambda path: cf.save(path, tensors()), pretrained):
        with pytest.raises(CheckpointError, match="nnn"):
            save(tmp_path / ("n" * 250))  # its lock and its temporary folder have longer names
    assert os.listdir(tmp_path) == []


def test_a_tilde_is_the_home_folder_everywhere(tmp_path, monkeypatch) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    for number, (name, write) in enumerate(writers(tmp_path).items()):
        if name != "disk":  # wants a folder that is there
            write(f"~/{number}.png")
            assert (tmp_path / "home" / f"{number}.png").exists(), name
    assert cf.load("~/0.png").keys() == tensors().keys()
    assert cf.Plan.load("~/2.png") and cf.Topology.load("~/3.png") and cf.Mesh(dp=2, topology=Path("~/3.png"))
    DiskStore("~", [16], rank=0).close()
    assert os.listdir(tmp_path / "here") == []


@pytest.mark.parametrize("name", ["Plan.save", "Topology.save", "profile", "picture", "--trace"])
def test_single_files_replace_their_own_kind_only(tmp_path, name) -> None:
    kinds = writers(tmp_path)
    kinds[name](str(tmp_path / "own.png"))
    kinds[name](str(tmp_path / "own.png"))
    texts = {"text": b"import colofunc", "json": b'{"traceEvents": []}', "png": b"\x89PNG\r\n\x1a\n" + bytes(100)}
    for other, content in texts.items():
        path = tmp_path / other
        path = path.with_suffix(".png") if name == "picture" else path
        path.write_bytes(content)
        with pytest.raises(cf.ColofuncError, match="was not touched"):
            kinds[name](str(path))
        assert path.read_bytes() == content


# ---- any folder ----


NAMES = st.sampled_from([
    "a.txt", "colofunc.json", "rank-00000-00000.safetensors", "config.json", "model.safetensors", ".metadata", "__0_0.distcp", "sub/a",
    "sub/colofunc.json", ".colofunc-lock", ".tmp-0123456789ab/a", "model-00001-of-00002.safetensors",
])  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.sets(NAMES, max_size=4), st.booleans(), st.sampled_from(["safetensors", "dcp", "pretrained"]), st.booleans())
def test_no_file_of_others_is_lost_in_any_folder(tmp_path_factory, names, ours, how, inside) -> None:
    path = tmp_path_factory.mktemp("any") / "c"

    def save() -> None:
        if how == "pretrained":
            pretrained(path)
        else:
            cf.save(path, tensors(), format=how)

    path.mkdir()
    if ours:
        save()
    others = {name: f"of others: {name}" for name in names if not (path / name).exists()}
    put(path, others)
    with pytest.MonkeyPatch.context() as patch:
        if inside:
            patch.setattr(importlib.import_module("colofunc.functional.checkpoint.folder"), "_is_fixed", lambda path: True)
        try:
            save()
        except CheckpointError:
            assert others
        else:
            assert cf.load(path)
    assert {name: (path / name).read_text() for name in others} == others and os.listdir(path.parent) == ["c"]
