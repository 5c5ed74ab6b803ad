"""Plans on disk: found again by everything that decides them, rebuilt without a search, never trusted blindly."""

import json
import os
import subprocess
import sys
import time

import pytest

import colofunc as cf
from colofunc.cache import Cache
from colofunc.compiler import plan_cache, planning
from colofunc.compiler.plan_cache import local_hash
from colofunc.testing import programs


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("COLOFUNC_CACHE", str(tmp_path / "plans"))
    monkeypatch.setattr(plan_cache, "KEEP_ABOVE_S", 0.0)
    return tmp_path / "plans"


@pytest.fixture
def searches(monkeypatch):
    """How often a plan was searched."""
    seen = []
    original = planning.plan_for_budget
    monkeypatch.setattr(planning, "plan_for_budget", lambda *args, **more: seen.append(1) or original(*args, **more))
    return seen


def lowered(name="mlp", axes=None, **options):
    step, state, batch = programs.NAMED[name]()
    return cf.shard(step, cf.Mesh(**(axes or {"dp": 2, "tp": 2}), topology="8xa100-80g"), **options).lower(state, batch)


@pytest.mark.parametrize("name", programs.NAMED)
def test_a_kept_plan_gives_the_same_program_without_a_search(name, folder, searches):
    first = lowered(name)
    assert searches == [1] and len(list(folder.iterdir())) == 1
    second = lowered(name)
    assert searches == [1] and local_hash(second.program) == local_hash(first.program)
    assert second.plan == first.plan


def test_three_axes(folder, searches):
    first, second = lowered(axes={"dp": 2, "sp": 2, "tp": 2}), lowered(axes={"dp": 2, "sp": 2, "tp": 2})
    assert searches == [1] and local_hash(second.program) == local_hash(first.program)


@pytest.mark.parametrize("other", [dict(axes={"dp": 4}), dict(auto=False), dict(name="conv_net"), dict(donate=())])
def test_whatever_decides_a_plan_is_part_of_its_key(other, folder, searches):
    lowered()
    lowered(**other)
    assert searches == [1, 1] and len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("damage", ["", "{}", '{"plan": {"colofunc_plan": 1}, "lowered": "x"}', None])
def test_a_damaged_file_is_ignored_with_a_line(damage, folder, searches, capsys):
    first = lowered()
    (path,) = folder.iterdir()
    path.write_text(path.read_text()[:500] if damage is None else damage)
    again = lowered()
    assert searches == [1, 1] and local_hash(again.program) == local_hash(first.program)
    assert f"the kept plan {path} is dropped" in capsys.readouterr().err


def test_a_plan_that_gives_another_program_is_not_used(folder, searches, capsys):
    first = lowered()
    (path,) = folder.iterdir()
    entry = json.loads(path.read_text())["entry"]
    Cache(folder).write(path.stem, entry | {"lowered": "another"})
    assert local_hash(lowered().program) == local_hash(first.program) and searches == [1, 1]
    assert "no longer gives the program that it gave" in capsys.readouterr().err


def test_nothing_is_kept_where_it_is_off_or_quick(folder, monkeypatch):
    monkeypatch.setattr(plan_cache, "KEEP_ABOVE_S", 1e9)
    lowered()
    assert not folder.exists()
    monkeypatch.setattr(plan_cache, "KEEP_ABOVE_S", 0.0)
    monkeypatch.setenv("COLOFUNC_CACHE", "off")
    lowered()
    assert not folder.exists()


ANOTHER = """
import colofunc as cf
from colofunc.testing import programs
from colofunc.compiler import plan_cache, planning

plan_cache.KEEP_ABOVE_S = 0.0
searched = []
search = planning.plan_for_budget
planning.plan_for_budget = lambda *args, **more: searched.append(1) or search(*args, **more)
step, state, batch = programs.NAMED["mlp"]()
low = cf.shard(step, cf.Mesh(dp=2, tp=2, topology="8xa100-80g")).lower(state, batch)
print(len(searched), plan_cache.local_hash(low.program))
"""


def test_another_process_finds_it(folder, searches, subprocess_env):
    first = lowered()
    env = {**subprocess_env, "COLOFUNC_CACHE": str(folder), "PYTHONHASHSEED": "1"}  # sets have another order there
    done = subprocess.run([sys.executable, "-c", ANOTHER], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == f"0 {local_hash(first.program)}"


# ---- the folder ----


KEYS = [f"{k:040x}" for k in range(6)]


def used(cache, key, at):
    cache.write(key, {"n": [0] * 300})
    os.utime(cache.path(key), (at, at))


def test_the_entries_that_were_not_used_for_longest_go_first(tmp_path):
    cache = Cache(tmp_path, most_bytes=3000)
    others = {"notes.txt": "mine" * 1000, f"{9:040x}.json": "no entry of ours" * 1000}
    for name, text in others.items():
        (tmp_path / name).write_text(text)
    for k in range(3):
        used(cache, KEYS[k], 1000 + k)
    assert cache.read(KEYS[0]) == {"n": [0] * 300}  # used now
    cache.write(KEYS[3], {"n": [0] * 300})
    assert sorted(p.stem for p in tmp_path.iterdir() if p.name not in others) == [KEYS[0], KEYS[2], KEYS[3]]
    assert all((tmp_path / name).read_text() == text for name, text in others.items())


def test_what_killed_writers_left_goes(tmp_path):
    for name, age in (("colofunc-abc.part", 7200), ("colofunc-def.part", 0), ("mine.part", 7200)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    Cache(tmp_path).write(KEYS[0], {})
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"{KEYS[0]}.json", "colofunc-def.part", "mine.part"]


@pytest.mark.parametrize("how", ["link", "folder", "link to a folder"])
def test_what_has_the_name_of_an_entry_and_is_none_stays(tmp_path, how, folder, searches, capsys):
    first = lowered()
    (path,) = folder.iterdir()
    path.unlink()
    if how == "folder":
        path.mkdir()
    else:
        (tmp_path / "mine").write_text("mine")
        path.symlink_to(tmp_path / "mine" if how == "link" else tmp_path)
    again = lowered()
    assert searches == [1, 1] and local_hash(again.program) == local_hash(first.program)
    assert "is dropped, planning anew: it is no file, but a link or a folder" in capsys.readouterr().err
    assert path.is_dir() if how == "folder" else path.is_symlink()


def test_a_size_that_is_none_is_named(folder, monkeypatch):
    monkeypatch.setenv("COLOFUNC_CACHE_MIB", "many")
    with pytest.raises(cf.ColofuncError, match="COLOFUNC_CACHE_MIB='many' is no number of MiB"):
        lowered()
