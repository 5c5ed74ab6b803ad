"""step.profile: every node of the program that runs is timed, by module and phase; the state stays; the file is a Chrome trace."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import colofunc as cf
from colofunc.executors.launch import launch
from colofunc.program.cost import program_cost
from colofunc.testing import models

MESHES = [cf.Mesh(dp=2, topology="ideal"), cf.Mesh(dp=2, tp=2, topology="ideal")]


def training(mesh: cf.Mesh) -> Any:
    torch.manual_seed(0)
    loss = lambda out, batch: (out**2).mean()  # noqa: E731
    opt = cf.adapt(torch.optim.AdamW, lr=1e-2)
    step_fn, state = cf.train_step(cf.functional(models.Language()), opt, loss=loss, inputs=lambda batch: ((batch,), {}))
    batch = torch.arange(32).reshape(4, 8)
    step = cf.shard(step_fn, mesh, {"*.weight": "(dp o) ..."} if mesh.size > 1 else {})
    return step, step.init(state, batch), batch


@pytest.mark.parametrize("mesh", MESHES)
def test_modules_and_phases_add_up(mesh: cf.Mesh, tmp_path: Path) -> None:
    step, state, batch = training(mesh)
    low = step.lower(state, batch)
    found = step.profile(tmp_path / "trace.json", state, batch, steps=2)
    assert found.steps == 2 and found.step_s > 0 and found.clocked_s > 0
    assert len(found.nodes) == len(low.program.nodes)
    assert {phase for (phase,) in found.by("phase")} == {"forward", "backward", "update"}
    assert any(path.startswith("block") for (path,) in found.by("path"))
    total = sum(node.mean_s for node in found.nodes)
    assert sum(found.by("path", "phase").values()) == pytest.approx(total) == pytest.approx(found.clocked_s)
    assert found.calls == low.cost().calls and found.wire_bytes == low.cost().bytes
    assert found.flops == pytest.approx(program_cost(low.global_program, mesh, low.registry.rule).flops)
    step(state, batch)  # not consumed


def test_the_table_says_what_the_times_are(tmp_path: Path) -> None:
    step, state, batch = training(MESHES[1])
    found = step.profile(tmp_path / "trace.json", state, batch, steps=1)
    text = found.table(most=3)
    assert found.utilisation is None and "utilisation unknown" in text and "the mesh is simulated" in text
    assert "4 simulated ranks in this process" in text and "times are of the simulation" in text
    assert "forward" in text and "the clocks add" in text and "all_gather(" in text and " more " in text
    assert str(found) == found.table()


def test_a_compiled_step_says_what_was_timed(tmp_path: Path) -> None:
    step, state, batch = training(cf.Mesh())
    step = step.on("compiled")
    assert "compiled when it runs" in step.profile(tmp_path / "trace.json", state, batch, steps=1).table()


def test_nodes_in_a_loop_are_timed_at_every_visit(tmp_path: Path) -> None:
    step, state, batch = training(MESHES[0])
    found = cf.accumulate(step, microbatches=4).profile(tmp_path / "trace.json", state, batch, steps=2)
    visits = {len(row) for node in found.nodes for row in node.seconds}
    assert visits == {1, 4}


def test_utilisation_on_a_device_that_is_known(tmp_path: Path) -> None:
    step, state, batch = training(cf.Mesh(topology="8xa100-80g"))
    found = step.profile(tmp_path / "trace.json", state, batch, steps=1)
    assert found.utilisation == pytest.approx(found.ideal_s / found.step_s) and 0 < found.utilisation < 1
    assert "peak of topology '8xa100-80g'" in found.table() and "%" in found.table()
    assert "simulated" not in found.table()
    unknown = training(cf.Mesh(topology="ideal"))
    assert unknown[0].profile(tmp_path / "trace.json", *unknown[1:], steps=1).utilisation is None


def test_the_file_is_a_chrome_trace(tmp_path: Path) -> None:
    step, state, batch = training(MESHES[0])
    found = step.profile(tmp_path / "trace.json", state, batch, steps=3)
    trace = json.loads((tmp_path / "trace.json").read_text())
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    operators = [e for e in spans if e["tid"] < 2]
    assert len(operators) == 3 * len(found.nodes)
    assert all(e["dur"] >= 0 and {"module", "phase", "line"} <= set(e["args"]) for e in spans)
    assert {e["name"] for e in spans if e["tid"] == 1} <= {n.target for n in found.nodes if n.communication}
    assert "simulated" in trace["otherData"]["note"]
    ends = [e["ts"] + e["dur"] for e in operators]
    assert all(b["ts"] >= end - 1e-3 for end, b in zip(ends, operators[1:], strict=False))  # one behind the other


def test_what_cannot_be_written_is_said_before_anything_runs(tmp_path: Path) -> None:
    step, state, batch = training(MESHES[0])
    with pytest.raises(cf.InputError, match="there is no folder"):
        step.profile(tmp_path / "missing" / "trace.json", state, batch)
    with pytest.raises(cf.InputError, match="measure at least 1"):
        step.profile(tmp_path / "trace.json", state, batch, steps=0)


def on_two_ranks(path: str) -> Any:
    step, state, batch = training(cf.Mesh(dp=2, topology="8xa100-80g"))
    found = step.profile(path, state, batch, steps=2)
    used = found.utilisation == pytest.approx(found.ideal_s / found.step_s) and 0 < found.utilisation < 1
    return found.simulated, found.exposed_s, found.clocked_s, found.table(), used, found.by("path")


@pytest.mark.dist
def test_real_ranks_say_what_nothing_hides(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    one, other = launch(on_two_ranks, 2, str(path), timeout_s=120)
    simulated, exposed, clocked, text, used, modules = one
    assert used and "model flops utilisation" in text and "peak of topology '8xa100-80g'" in text
    assert any(path.startswith("block") and took > 0 for (path,), took in modules.items())
    assert not simulated and len(exposed) == 2 and all(s > 0 for s in exposed) and exposed[0] < clocked
    assert exposed == other[1] and "communication that nothing hides" in text
    spans = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    assert {e["pid"] for e in spans} == {0, 1}
    assert any(e["tid"] == 1 and ("wait" in e["name"] or "reduce" in e["name"]) for e in spans)
