"""A run that is killed at any moment and started again ends with the bits of one that was not."""

import hashlib
import multiprocessing
import random
import shutil
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import colofunc as cf
from colofunc.functional.checkpoint import index

STEPS = 14


def train(path: str, axes: str, pause_s: float = 0.0, steps: int = STEPS, say: Callable[[object], None] = print) -> str:
    """Train to `steps` from wherever the folder stands, saving every step in the background; a hash of the end.

    say: is told the step from which it goes on, and each step whose save has begun.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    mesh = cf.Mesh(**{axes: 2}, topology="ideal")
    module = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
    model = cf.functional(module)
    data = TensorDataset(torch.randn(22, 6), torch.randn(22, 3))
    loader = DataLoader(data, 4, shuffle=True, generator=torch.Generator().manual_seed(3), drop_last=True)
    step_fn, state = cf.train_step(
        model, cf.adapt(torch.optim.AdamW, lr=1e-2),
        loss=lambda out, batch: (out - batch[1]).square().mean(), inputs=lambda batch: ((batch[0],), {}),
    )  # fmt: skip
    step = cf.shard(step_fn, mesh)
    batches = cf.batches(loader, mesh, "...")
    state = {"train": step.init(state, [torch.zeros(4, 6), torch.zeros(4, 3)]), "steps": 0}
    if any("." not in found.name for found in Path(path).glob("step-*")):  # not only what a killed save left
        state = cf.load(Path(path) / "step-*", mesh=mesh, like=state, batches=batches)
    say(state["steps"])
    savings = []  # none, where the last step was saved before the kill
    while state["steps"] < steps:
        for batch in batches:
            trained, _ = step(state["train"], batch)
            state = {"train": trained, "steps": state["steps"] + 1}
            savings.append(cf.save(f"{path}/step-{state['steps']}", state, batches=batches, wait=False, keep=2))
            say(state["steps"])
            time.sleep(pause_s)
            if state["steps"] == steps:
                break
    for saving in savings:
        saving.wait()
    return digest(state)


def digest(state: dict) -> str:
    found = hashlib.sha256()
    for name, x in sorted(state["train"]["params"].items()):
        found.update(name.encode() + x.full().numpy().tobytes())
    for key in ("exp_avg", "exp_avg_sq"):
        for name, x in sorted(state["train"]["opt"][key].items()):
            found.update(name.encode() + x.full().numpy().tobytes())
    return found.hexdigest()


@pytest.mark.parametrize("axes", ["dp", "tp"])
def test_a_run_in_two_halves_ends_like_one(tmp_path, axes) -> None:
    whole = train(str(tmp_path / "whole"), axes)
    for steps in (5, 11):  # an epoch has 5: at the end of the first one, and within the third
        train(str(tmp_path / f"part{steps}"), axes, steps=steps)
        assert train(str(tmp_path / f"part{steps}"), axes) == whole


def test_the_hash_sees_random_numbers_and_data(tmp_path) -> None:
    """What a resumed run that forgot its position would end with is something else."""
    whole = train(str(tmp_path / "whole"), "dp")
    train(str(tmp_path / "part"), "dp", steps=4)
    for forgotten in ("random", "batches"):
        found = shutil.copytree(tmp_path / "part", tmp_path / forgotten)
        content = index.read_index(found / "step-4")
        content[forgotten] = index.read_index(found / "step-3")[forgotten]
        for name in list(content["tensors"]):
            if name.startswith(f"~{forgotten}"):
                content["tensors"][name] = index.read_index(found / "step-3")["tensors"][name]
        for path in (found / "step-3").glob("*.safetensors"):
            shutil.copy(path, found / "step-4" / "old.safetensors")
        for name, tensor in content["tensors"].items():
            if name.startswith(f"~{forgotten}"):
                for piece in tensor["pieces"]:
                    piece[0] = "old.safetensors"
        index.write_index(found / "step-4", content)
        assert train(str(found), "dp") != whole


KILLS = 4
KILLED_STEPS = 20  # more than are seen before all kills


def in_a_process(pipe: Connection, path: str) -> None:
    pipe.send(train(path, "dp", pause_s=0.05, steps=KILLED_STEPS, say=pipe.send))


def heard(pipe: Connection, most: int) -> int | str:
    """The last of that many messages: a step, or the hash of the end, after which nothing comes."""
    said = pipe.recv()
    for _ in range(most - 1):
        if isinstance(said, str):
            break
        said = pipe.recv()
    return said


@pytest.mark.dist
def test_killed_at_any_moment_it_resumes_bit_for_bit(tmp_path) -> None:
    """SIGKILL two or three steps after each start, at a moment of the step that is drawn; the last run gets through."""
    want = train(str(tmp_path / "whole"), "dp", steps=KILLED_STEPS)
    processes = multiprocessing.get_context("forkserver")  # the server has torch already, as for real ranks
    draw = random.Random(0)
    kills, starts, said = 0, [], None
    while not isinstance(said, str):
        mine, theirs = processes.Pipe(duplex=False)
        child = processes.Process(target=in_a_process, args=(theirs, str(tmp_path / "run")))
        child.start()
        theirs.close()
        starts.append(mine.recv())
        if kills == KILLS:
            said = heard(mine, KILLED_STEPS + 1)
            child.join(120)
            assert child.exitcode == 0
            break
        said = heard(mine, draw.randint(2, 3))
        time.sleep(draw.uniform(0.0, 0.06))
        child.kill()
        child.join()
        kills += 1
    assert kills >= 2 and len(set(starts)) >= 2, starts
    assert said == want
