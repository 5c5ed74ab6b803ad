"""The command line, on a script of a few lines; what it prints, draws and refuses."""

import importlib
import json
import re
import runpy
import shutil
import sys

import pytest
from typer.testing import CliRunner

import colofunc as cf
from colofunc import cli
from colofunc.command.machine import machine
from colofunc.program.lanes import LANES

SCRIPT = """
import torch
import colofunc as cf

net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(2)))
model, opt = cf.functional(net), cf.adapt(torch.optim.AdamW, lr=1e-3)
step, _ = cf.train_step(model, opt, loss=lambda out, b: (out**2).mean(), inputs=lambda b: ((b,), {}))
staged = cf.shard(step, cf.Mesh(dp=2), {"*.weight": "(dp o) i"})
number = 3

def example():
    return {"params": model.params, "buffers": model.buffers, "opt": opt.init(model.params)}, cf.abstract((256, 64))

def plan_me():
    return step, *example()

def small():
    net = torch.nn.Linear(8, 8)
    return *cf.train_step(cf.functional(net), cf.adapt(torch.optim.SGD, lr=0.1), loss=lambda out: out.sum()), cf.abstract((16, 8))

def wrong():
    return step

def other():
    return {"state": 1}
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "my_training.py"
    path.write_text(SCRIPT)
    return path


def run(*words):
    done = CliRunner().invoke(cli.app, ["plan", *map(str, words)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, " ".join(done.output.split())


def test_a_plan_says_memory_by_kind_and_seconds(script):
    code, said = run(f"{script}:step", "--device", "a100-40g")
    assert code == 0
    assert "my_training.py:step on a100-40g, one device · device 37.25 GiB a rank · host 931.3 GiB a rank" in said
    assert "tensors within 31.72 GiB" in said
    assert "device: peak" in said and "optimizer state" in said and "my_training.py:7" in said
    assert "a step takes" in said and "compute" in said
    assert "main.py" not in said and "cli.py" not in said  # lines are the user's, or none


def test_a_function_that_returns_all_three_plans_the_same(script):
    first, second = (run(f"{script}:{name}", "--device", "h100")[1].split(" ", 1)[1] for name in ("step", "plan_me"))
    assert first.split("device: peak")[1] == second.split("device: peak")[1]


def test_a_budget_is_met_and_drawn(script, tmp_path):
    picture, trace, save = tmp_path / "plan.png", tmp_path / "trace.json", tmp_path / "plan.json"
    code, said = run(
        f"{script}:step", "--device", "rtx-2060", "--budget", "300KiB", "--host", "8GiB",
        "--picture", picture, "--trace", trace, "--save", save,
    )  # fmt: skip
    assert code == 0 and "device 5.588 GiB a rank · host 8 GiB a rank · tensors within 300 KiB" in said and f"wrote {picture}" in said
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert cf.Plan.load(save).topology == "rtx-2060"
    events = json.loads(trace.read_text())["traceEvents"]
    held = [sum(e["args"].values()) for e in events if e["ph"] == "C" and e["name"] == "device bytes"]
    assert 0 < max(held) <= 300 * 1024
    assert {e["cat"] for e in events if e["ph"] == "X"} == {"forward", "backward", "update"}


def test_a_disk_that_is_not_here_is_planned_drawn_and_taken_over_by_the_step_that_has_one(script, tmp_path):
    picture, trace, save = tmp_path / "plan.png", tmp_path / "trace.json", tmp_path / "plan.json"
    script.write_text(script.read_text().replace("(256, 64)", "(128, 64)"))  # half the batch: the search, most of this test, is shorter
    words = [f"{script}:step", "--device", "a100-40g", "--budget", "150KiB", "--host", "100KiB", "--within", "offload"]
    code, said = run(*words, "--disk", "1GB,7GB/s,5GB/s", "--picture", picture, "--trace", trace, "--save", save)
    assert code == 0 and "disk 953.7 MiB a rank" in said and "on disk: " in said and "disk: peak" in said
    assert picture.read_bytes()[:4] == b"\x89PNG"
    events = json.loads(trace.read_text())["traceEvents"]
    assert any(e["ph"] == "C" and e["name"] == "disk bytes" and sum(e["args"].values()) for e in events)
    moved_s = [e["dur"] / 1e6 for e in events if e["ph"] == "X" and e["tid"] == LANES.index("disk")]
    assert moved_s and run(*words)[0] == 1  # nowhere else is there room

    module = importlib.import_module("my_training")  # the command has loaded it
    state, batch = module.example()
    staged = cf.offload(cf.shard(module.step, cf.Mesh(topology="a100-40g")), budget="150KiB", host="100KiB", disk=tmp_path)
    low = staged.with_plan(cf.Plan.load(save)).lower(state, batch)
    assert {layout.tier for layout in low.input_layouts} >= {"disk"}
    both = list(zip(cf.Plan.load(save).inputs, low.input_layouts, strict=True))
    assert [x.tier for x in low.input_layouts] == ["disk" if "@disk" in str(leaf.spec) else x.tier for leaf, x in both]


def test_the_rates_of_a_disk_are_those_that_are_named(tmp_path):
    mesh = machine("a100-40g", "", "", "", "1GB,7GB/s,5GB/s")(cf.Mesh())
    assert mesh.capacity_bytes("disk") == 10**9
    assert mesh.copy_s(7e9, "disk", "host") == pytest.approx(1.0001) and mesh.copy_s(5e9, "host", "disk") == pytest.approx(1.0001)
    plain, sized = (machine("a100-40g", "", "", "", disk)(cf.Mesh()) for disk in ("", "2TB"))
    assert sized.copy_s(1e9, "disk", "host") == plain.copy_s(1e9, "disk", "host") and sized.capacity_bytes("disk") == 2 * 10**12
    here = machine("a100-40g", "", "", "", str(tmp_path))(cf.Mesh()).capacity_bytes("disk")
    assert 0 < here <= shutil.disk_usage(tmp_path).total


TIME = r"([\d.]+ [mµn]?s)"


@pytest.mark.parametrize(("name", "words"), [("staged", ()), ("hosted", ("--within", "")), ("step", ("--mesh", "dp=2,tp=2"))])
def test_a_step_has_one_time_in_the_sentence_the_table_and_the_command(script, tmp_path, name, words):
    script.write_text(script.read_text() + "\nhosted = cf.offload(staged, policy='host')\n")
    _, said = run(f"{script}:{name}", "--device", "h100", *words, "--save", tmp_path / "p.json")
    plan = cf.Plan.load(tmp_path / "p.json")
    sentence = re.search(TIME + " per step", str(plan))[1]
    assert re.search("a step takes " + TIME, said)[1] == sentence == re.search(TIME + " per step", plan.table())[1]
    assert f"{sentence} per step" in said  # the sentence above the table


def test_a_plan_for_a_disk_without_a_directory_does_not_run(script):
    run(f"{script}:step", "--device", "h100")
    module = importlib.import_module("my_training")
    step = cf.offload(cf.shard(module.step, cf.Mesh(topology="a100-40g")), policy="disk", disk=True)
    state, batch = module.example()
    assert step.lower(state, batch).memory().peak_bytes["disk"] > 0
    with pytest.raises(cf.errors.InputError, match=r"keeps something on disk, and no directory is named for it. Try: cf.offload\(step"):
        step.init(state, batch)


def test_a_last_box_that_is_partly_used_is_said(script):
    code, said = run(f"{script}:small", "--device", "a100-80g", "--mesh", "dp=12", "--rows", 0)
    assert code == 0 and "boxes of 8 devices: 12 ranks use 4 of the last one" in said


LARGE = """
def large():
    net = cf.lazy(lambda: torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(6))))
    step, state = cf.train_step(cf.functional(net), cf.adapt(torch.optim.AdamW, lr=1e-3), loss=lambda out: (out**2).mean())
    return step, state, cf.abstract((ROWS, 1024))
"""


@pytest.mark.parametrize("within", ["checkpoint,offload", "checkpoint", ""])
@pytest.mark.parametrize("axes, rows", [("dp=1", 0.6), ("dp=1", 1.1), ("dp=2", 0.6), pytest.param("dp=2", 1.1, marks=pytest.mark.sweep)])
def test_a_plan_leaves_room_for_all_that_it_says_is_on_the_card(script, within, axes, rows):
    """rows: so many that the activations alone are that part of a V100. A plan that cannot be made is an error, no plan that is no fit."""
    card_bytes = cf.mesh.resolve_topology("v100").tier("device").capacity_bytes
    number = int(rows * card_bytes / (6 * 4096)) * int(axes[-1]) // 64 * 64
    script.write_text(script.read_text() + LARGE.replace("ROWS", str(number)))
    code, said = run(f"{script}:large", "--device", "v100", "--mesh", axes, "--within", within)
    assert "no fit" not in said
    if code:
        assert within != "checkpoint,offload" and "no plan found within" in said
    else:
        assert re.search(r"together [\d.]+ GiB, [\d.]+ [GMK]iB to spare", said)


def test_a_budget_holds_whatever_the_step_says_itself(script):
    script.write_text(script.read_text() + "\nlarge = cf.checkpoint(cf.shard(step, cf.Mesh()), budget='1GiB')\n")
    code, said = run(f"{script}:large", "--device", "rtx-2060", "--budget", "100KiB", "--within", "")
    assert code == 1 and "no plan found within 102,400 B a rank" in said


def test_a_mesh_has_as_many_devices(script):
    code, said = run(f"{script}:step", "--device", "a100-80g", "--mesh", "dp=2,tp=2", "--rows", 3)
    assert code == 0 and "on 4xa100-80g, dp=2 tp=2" in said and "strategy" in said and "collectives" in said
    assert "of the last one" not in said
    code, said = run(f"{script}:staged", "--topology", "8xh100")
    assert code == 0 and "my_training.py:staged on 8xh100, dp=2" in said and "all_gather" in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["{}"], "names no step; write script.py:NAME"),
        (["{}:stop"], "has no 'stop'; did you mean 'step'?"),
        (["{}:number"], "is of type int; name a step function"),
        (["{}:wrong"], "has to return (step, state, batch); it returned"),
        (["{}:step", "--example", "another"], "has no function 'another' that returns what"),
        (["{}:step", "--example", "other"], "other() of {} returned dict; return the arguments of the step as a tuple"),
        (["nowhere.py:step"], "there is no file 'nowhere.py'"),
        (["nowhere:step"], "there is no module 'nowhere'"),
        (["{}:step", "--device", "a100-40gb"], "did you mean 'a100-40g'"),
        (["{}:step", "--device", "h100", "--topology", "8xh100"], "both name a machine; give one of them"),
        (["{}:step", "--mesh", "dp:2"], "'dp:2' is no axis with a size; write dp=2,tp=4"),
        (["{}:step", "--mesh", "dp=2,dp=4"], "names axis 'dp' twice, with 2 and 4; write it once"),
        (["{}:step", "--budget", "lots"], "--budget: 'lots' is no size"),
        (["{}:step", "--disk", "/nowhere/at/all"], "--disk '/nowhere/at/all' is no directory that is here, and no size; make it, or write"),
        (["{}:step", "--disk", "2TB,7GB/s"], "--disk '2TB,7GB/s': write a size, or a size and the rates to read and to write at"),
        (["{}:step", "--disk", "2TB,fast,slow"], "--disk: 'fast' is no size"),
        (["{}:step", "--disk", "2TB", "--within", "checkpoint"], "--disk is of use to offload only"),
        (["{}:step", "--device", "h100", "--within", "prayer"], "--within 'prayer' is nothing that may be done to meet a budget;"),
        (["{}:small", "--device", "h100", "--budget", "100B"], "no plan found within 100 B a rank"),
    ],
)
def test_what_is_missing_is_said(script, words, says):
    code, said = run(*(word.format(script) for word in words))
    assert code == 1 and says.format(script).replace(" ", "") in said.replace(" ", "")  # long paths are broken over lines


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--picture", "/nowhere/at/all.png"], "--picture /nowhere/at/all.png cannot be written: No such file or directory; name"),
        (["--trace", "/nowhere/at/all.json"], "--trace /nowhere/at/all.json cannot be written: No such file or directory; name"),
        (["--save", "/nowhere/at/all.json"], "--save /nowhere/at/all.json cannot be written: No such file or directory; name"),
        (["--save", "/"], "--save / cannot be written: Is a directory; name a file"),
        (["--picture", "plan"], "the picture cannot be written to 'plan': its ending is none of"),
        (["--trace", "one.json", "--save", "one.json"], "--trace and --save both name one.json; write two files"),
    ],
)
def test_files_that_cannot_be_written_are_said_before_the_script_is_loaded(tmp_path, monkeypatch, words, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slow.py").write_text("from pathlib import Path\nPath('loaded').touch()\n")
    code, said = run("slow.py:step", *words)
    assert code == 1 and says in said and not list(tmp_path.glob("[!s]*"))


def test_what_was_in_a_file_stays_until_there_is_a_plan(script, tmp_path):
    (tmp_path / "plan.json").write_text("before")
    code, _ = run(f"{script}:stop", "--save", tmp_path / "plan.json", "--trace", tmp_path / "trace.json")
    assert code == 1 and (tmp_path / "plan.json").read_text() == "before" and not (tmp_path / "trace.json").exists()


@pytest.mark.parametrize(
    ("lines", "says", "at"),
    [
        ("import torch\ntorch.ones(2, 3) @ torch.ones(2, 3)\n", "mat1 and mat2 shapes cannot be multiplied", 2),
        ("import colofunc as cf\n\ncf.Mesh(dp=0)\n", "MeshError: axis 'dp' has size 0", 3),
        ("import colofunc as cf\ncf.functional(3)\n", "Error: ", 2),
        ("import nothing_of_the_kind\n", "ModuleNotFoundError: No module named 'nothing_of_the_kind'", 1),
        ("def step(a, b)\n    return a\n", "SyntaxError: expected ':'", 1),
        ("def step(a, b):\n    return a\ndef example():\n    return {}['x']\n", "KeyError: 'x'", 4),
        ("def step():\n    return {}['x']\n", "KeyError: 'x'", 2),
        ("import torch\ndef step(a, b):\n    return a @ b\nexample = lambda: (torch.ones(2, 3),) * 2\n", "got [2, 3] X [2, 3]", 3),
    ],
)
def test_an_error_of_the_script_is_its_own(tmp_path, lines, says, at):
    (tmp_path / "broken_script.py").write_text(lines)
    code, said = run(f"{tmp_path / 'broken_script.py'}:step")
    assert code == 1 and "failed, and nothing was planned" in said
    assert says in said
    assert f'broken_script.py", line {at}' in said and said.count("File ") == 1


def test_a_defect_of_ours_is_not_taken_for_the_scripts(script, monkeypatch):
    inside = {}
    exec(compile("def lower(*_):\n    raise ZeroDivisionError('ours')", cli.__file__, "exec"), inside)
    monkeypatch.setattr(cf.Staged, "lower", inside["lower"])
    done = CliRunner().invoke(cli.app, ["plan", f"{script}:step", "--device", "h100"])
    assert isinstance(done.exception, ZeroDivisionError)


def test_a_script_that_ends_the_program_is_told_why_nothing_came(tmp_path):
    (tmp_path / "ends.py").write_text("raise SystemExit(0)\n")
    code, said = run(f"{tmp_path / 'ends.py'}:step")
    assert code == 1 and "ended the program (exit 0) while it was read; put what it does as a program under if __name__" in said


def test_a_script_without_an_example_is_told_how(tmp_path):
    path = tmp_path / "bare.py"
    path.write_text("def step(state, batch):\n    return state, batch\n")
    code, said = run(f"{path}:step")
    assert code == 1 and "neither example() nor inputs()" in said and "`def example(): return state, batch`" in said


def test_devices_are_listed():
    done = CliRunner().invoke(cli.app, ["devices"])
    assert done.exit_code == 0 and "rtx2060        device 5.588 GiB" in done.output


def test_the_package_is_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["colofunc", "devices"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("colofunc", run_name="__main__")
    assert ended.value.code == 0 and "rtx2060        device 5.588 GiB" in capsys.readouterr().out


def test_a_pipeline_by_options(script):
    code, said = run(f"{script}:step", "--device", "a100-40g", "--mesh", "dp=2", "--pp", 2, "--schedule", "zb-h1", "--microbatches", 8)
    assert code == 0, said
    assert "on 4xa100-40g, pp=2 dp=2" in said
    assert "pp: pipeline of 2 stages, zb-h1, 8 microbatches, bubble " in said
    assert "pp stages weights and states peak computes waits" in said and "rank 0 0" in said and "rank 1 0F" in said


def test_microbatches_are_chosen(script):
    code, said = run(f"{script}:step", "--device", "a100-40g", "--pp", 2, "--microbatches", "auto")
    assert code == 0, said
    assert "chosen: 1 microbatch, cut by time not 2 microbatches, cut by time: " in said, said


def test_a_pipeline_beside_the_mesh_of_the_step(script):
    code, said = run(f"{script}:staged", "--device", "a100-40g", "--pp", 2)
    assert code == 0, said
    assert "pp=2 dp=2" in said and "pipeline of 2 stages, 1f1b, 4 microbatches" in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--schedule", "zb-v"), "--schedule zb-v is of a pipeline; say with --pp how many ranks it has"),
        (("--microbatches", 4), "--microbatches 4 is of a pipeline; say with --pp how many ranks it has"),
        (("--pp", 2, "--microbatches", "most"), "--microbatches 'most': write a number of microbatches above 0, such as 4, or auto"),
        (("--pp", 2, "--microbatches", "0"), "--microbatches '0': write a number of microbatches above 0, such as 4, or auto"),
        (("--pp", -2), "--pp -2 is no number of ranks; write how many a pipeline has, such as --pp 4"),
        (("--pp", 2, "--mesh", "pp=2"), "--pp 2: the mesh has an axis 'pp' of 2 already; leave it out of --mesh"),
        (("--pp", 2, "--schedule", "1f2b"), "unknown schedule '1f2b'; did you mean '1f1b'?"),
        (("--pp", 4), "4 stages, and the forward pass has 2 operators with weights of their own"),
    ],
)
def test_pipelines_that_cannot_be(script, words, says):
    code, said = run(f"{script}:step", "--device", "a100-40g", *words)
    assert code == 1 and says in said
