"""What one rank does late or wrongly outside of a step: its peers end with a message that names it, and say what is known of it.

Ranks are processes as a launcher starts them. Rank 0 serves the store through which ranks know of one another: where it is the one
at fault, its peer says what it has heard of it before. All pairs run at once, for they mostly wait.
"""

import atexit
import importlib
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

import colofunc as cf
from colofunc.errors import CheckpointError
from colofunc.executors import lookout, watch
from colofunc.executors.backend import backend_for
from colofunc.executors.lookout import Activity
from colofunc.executors.presence import Limits
from colofunc.functional.checkpoint import disk, waiting
from colofunc.functional.checkpoint.folder import Writing
from colofunc.functional.checkpoint.parts import Ranks
from colofunc.functional.checkpoint.waiting import Patience

DEADLINE_S = 40.0  # all have ended long before, also on a busy machine


def step_of(mesh: cf.Mesh, group: Any = None) -> None:
    """What a step is to its peers: its number, and a collective in it."""
    tie = backend_for(mesh).watch
    with tie.step("train"), tie:
        torch.distributed.all_reduce(torch.ones(1), group=group)


def raises(mesh: cf.Mesh, at_fault: bool, path: str) -> None:
    step_of(mesh)
    if at_fault:
        time.sleep(2.0)  # peers have heard of its step
        raise ValueError("no rows are left")
    step_of(mesh)


def leaves(mesh: cf.Mesh, at_fault: bool, path: str) -> None:
    step_of(mesh)
    if at_fault:
        sys.exit(0)
    step_of(mesh)


def is_stopped(mesh: cf.Mesh, at_fault: bool, path: str) -> None:
    group = torch.distributed.new_group(timeout=timedelta(seconds=2))
    lookout.LOST_AFTER_S = watch.TELL_S = 1.0
    if at_fault:
        os.kill(os.getpid(), signal.SIGSTOP)
    step_of(mesh, group)


def is_killed_in_a_save(mesh: cf.Mesh, at_fault: bool, path: str, wait: bool = True) -> None:
    x = cf.distribute(torch.ones(4, 2), "(dp a) b", mesh)
    if at_fault:
        disk.write_at = lambda *given: os.kill(os.getpid(), signal.SIGKILL)
    cf.save(path, {"x": x}, wait=wait).wait()


def is_killed_in_a_background_save(mesh: cf.Mesh, at_fault: bool, path: str) -> None:
    is_killed_in_a_save(mesh, at_fault, path, wait=False)


HERE = r"at test_late_faults.py:\d+ in \w+"
ENDED = r"its process \d+ has ended"
CASES: list[tuple[Callable[[cf.Mesh, bool, str], None], int, int, str]] = [  # what, by which rank, how its peer ends, what that says
    (raises, 0, 1, rf"rank 1, in step 2 \(train\) {HERE}, lost or waited in vain for its peers \(rank 0: when last heard of after step 1 "
                   rf"\(train\) {HERE}; {ENDED} with ValueError: no rows are left {HERE.split(' in')[0]}"),
    (leaves, 1, 1, rf"rank 0, in step 2 \(train\) {HERE}, lost .* its peers \(rank 1: after step 1 \(train\) {HERE}; {ENDED}\)"),
    (is_stopped, 0, 1, r"rank 1, in step 1 .* in vain for its peers \(rank 0: when .* not in a step yet; its process \d+ is stopped\)"),
    (is_killed_in_a_save, 0, 1, rf"CheckpointError: save to '.*': rank 0: when .*; {ENDED}; it had not finished it"),
    (is_killed_in_a_background_save, 1, 1, rf"CheckpointError: save to '.*': rank 1: not .* yet; {ENDED}; it had not written its part"),
]  # fmt: skip


def as_a_script(rank: int, port: int, case: int, folder: str) -> None:
    """One rank, started by a launcher that serves the store; its end is an interpreter's."""
    what, at_fault, _, _ = CASES[case]
    output = os.open(f"{folder}/{what.__name__}-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")  # fmt: skip
    torch.set_num_threads(1)
    mesh = cf.Mesh(dp=2, topology="ideal")
    code = 0
    try:
        cf.join(mesh, limit_s=60.0, notice_s=1.0)
        what(mesh, rank == at_fault, f"{folder}/{what.__name__}")
    except SystemExit:
        pass
    except Exception as error:
        sys.last_value = error
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    os._exit(code)


@pytest.mark.dist
def test_peers_say_which_rank_is_lost_and_what_is_known_of_it(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in CASES]
    pairs = [
        [context.Process(target=as_a_script, args=(rank, store.port, case, str(tmp_path))) for rank in range(2)]
        for case, store in enumerate(stores)
    ]
    until = time.monotonic() + DEADLINE_S
    try:
        for process in (process for pair in pairs for process in pair):
            process.start()
        peers = [pair[1 - at_fault] for pair, (_, at_fault, _, _) in zip(pairs, CASES, strict=True)]
        for peer in peers:
            peer.join(until - time.monotonic())
        codes = [peer.exitcode for peer in peers]
    finally:
        for process in (process for pair in pairs for process in pair if process.pid is not None):
            process.kill()
            process.join()
    for code, (what, at_fault, wanted, says) in zip(codes, CASES, strict=True):
        said = (tmp_path / f"{what.__name__}-{1 - at_fault}").read_text()
        assert code == wanted and re.search(says, said), f"{what.__name__}: {code}\n{said}"


class Killed(RuntimeError):
    """What torch's handler of SIGCHLD raises, wherever the main thread is, where a worker of a DataLoader was killed."""


class Interrupted:
    """A store in whose wait a signal comes."""

    def set(self, key: str, text: str) -> None:
        pass

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        raise Killed("DataLoader worker (pid 4711) is killed by signal: Killed.")


def test_an_error_of_a_signal_handler_is_not_taken_for_a_late_rank() -> None:
    tie = object.__new__(watch.Watch)
    tie._store, tie._rounds, tie.rank, tie.size, tie._activity = Interrupted(), 0, 0, 2, Activity(0, 2, Limits())
    with pytest.raises(Killed):
        tie.exchange("the next batch", "", 60.0)
    assert tie._activity.waiting is None


class Peers:
    """A watch that knows of one rank, and has lost it in a collective."""

    rank = 0

    def __init__(self, condition: str) -> None:
        self.condition = condition

    def fate(self, rank: int) -> tuple[str, str]:
        return self.condition, f"rank {rank}: after step 7; its process 4711 is {self.condition}"

    def lost(self, error: BaseException) -> str:
        return "rank 0 lost rank 1" if "gloo" in str(error) else ""


def test_files_of_a_rank_are_waited_for_as_long_as_it_may_write_them(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr(waiting, "LOOK_S", 0.0)
    done = iter([False, True, True])
    Patience(Peers("ended"), "save to 'c'", 60.0).wait(1, lambda: next(done), "had not")  # the last thing that it did
    with pytest.raises(CheckpointError, match=r"save to 'c': rank 1: after step 7; its process 4711 is ended; it had not written"):
        Patience(Peers("ended"), "save to 'c'", 60.0).wait(1, lambda: False, "had not written")
    with pytest.raises(CheckpointError, match=r"save to 'c': rank 1 had not written after 0.1 s \(rank 1: after step 7; .* is stopped\)"):
        Patience(Peers("stopped"), "save to 'c'", 0.1).wait(1, lambda: False, "had not written")
    assert capsys.readouterr().err.count("[rank 0] waits in save to 'c' for rank 1: after step 7; its process 4711 is stopped") == 1


def test_a_rank_that_is_lost_while_torch_writes_is_named(tmp_path: Path, monkeypatch) -> None:
    dcp_planner = importlib.import_module("colofunc.functional.checkpoint.dcp_planner")
    saves = importlib.import_module("colofunc.functional.save")
    job = saves._Job(tmp_path / "c", {}, [], Ranks(0, 2, Peers("ended")), [], None, 60.0, writing=Writing(tmp_path / "c", False))
    for text, says in (("gloo: Connection reset by peer", "save to '.*c': rank 0 lost rank 1"), ("no such leaf", "^no such leaf")):

        def fail(*given: Any, text: str = text) -> None:
            raise RuntimeError(text)

        monkeypatch.setattr(dcp_planner, "write", fail)
        with pytest.raises(RuntimeError if says[0] == "^" else CheckpointError, match=says):
            job.run_dcp()
