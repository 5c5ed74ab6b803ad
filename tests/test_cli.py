"""The command line, on a script of a few lines; what it prints, draws and refuses."""

import json

import pytest
from typer.testing import CliRunner

import colofunc as cf
from colofunc import cli

SCRIPT = """
import torch
import colofunc as cf

net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
model, opt = cf.functional(net), cf.adapt(torch.optim.AdamW, lr=1e-3)
step, _ = cf.train_step(model, opt, loss=lambda out, b: (out**2).mean(), inputs=lambda b: ((b,), {}))
staged = cf.shard(step, cf.Mesh(dp=2), {"*.weight": "(dp o) i"})
number = 3

def example():
    return {"params": model.params, "buffers": model.buffers, "opt": opt.init(model.params)}, cf.abstract((256, 64))

def plan_me():
    return step, *example()

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
    assert code == 0 and "device 300 KiB a rank · host 8 GiB a rank" in said and f"wrote {picture}" in said
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert cf.Plan.load(save).topology == "rtx-2060"
    events = json.loads(trace.read_text())["traceEvents"]
    held = [sum(e["args"].values()) for e in events if e["ph"] == "C" and e["name"] == "device bytes"]
    assert 0 < max(held) <= 300 * 1024
    assert {e["cat"] for e in events if e["ph"] == "X"} == {"forward", "backward", "update"}


def test_a_budget_holds_whatever_the_step_says_itself(script):
    script.write_text(script.read_text() + "\nlarge = cf.checkpoint(cf.shard(step, cf.Mesh()), budget='1GiB')\n")
    code, said = run(f"{script}:large", "--device", "rtx-2060", "--budget", "100KiB", "--within", "")
    assert code == 1 and "no plan found within 102,400 B a rank" in said


def test_a_mesh_has_as_many_devices(script):
    code, said = run(f"{script}:step", "--device", "a100-80g", "--mesh", "dp=2,tp=2", "--rows", 3)
    assert code == 0 and "on 4xa100-80g, dp=2 tp=2" in said and "strategy" in said and "collectives" in said
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
        (["{}:step", "--budget", "lots"], "--budget: 'lots' is no size"),
        (["{}:step", "--device", "h100", "--within", "prayer"], "--within 'prayer'; transforms: 'checkpoint', 'offload'"),
        (["{}:step", "--device", "h100", "--budget", "1KiB"], "no plan found within 1,024 B a rank"),
        (["{}:step", "--device", "h100", "--picture", "/nowhere/at/all.png"], "the picture cannot be written to '/nowhere/at/all.png'"),
        (["{}:step", "--device", "h100", "--trace", "/nowhere/at/all.json"], "--trace: /nowhere/at/all.json cannot be written"),
    ],
)
def test_what_is_missing_is_said(script, words, says):
    code, said = run(*(word.format(script) for word in words))
    assert code == 1 and says.format(script).replace(" ", "") in said.replace(" ", "")  # long paths are broken over lines


def test_a_script_without_an_example_is_told_how(tmp_path):
    path = tmp_path / "bare.py"
    path.write_text("def step(state, batch):\n    return state, batch\n")
    code, said = run(f"{path}:step")
    assert code == 1 and "neither example() nor inputs()" in said and "`def example(): return state, batch`" in said


def test_devices_are_listed():
    done = CliRunner().invoke(cli.app, ["devices"])
    assert done.exit_code == 0 and "rtx2060        device 5.588 GiB" in done.output
