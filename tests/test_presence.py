"""Ranks that wait for one another: who is where is said on both sides; a killed or stopped peer is noticed, at any time."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import attrs
import pytest
import torch

import colofunc as cf
from colofunc.errors import CollectiveError, InputError
from colofunc.executors import watch
from colofunc.executors.backend import backend_for
from colofunc.executors.groups import Groups
from colofunc.executors.presence import Limits, Process, noticed, ranks_text, started


def wait_for_one_another():
    """Ranks come late, are stopped until the other has noticed, and at last one is killed."""
    mesh = cf.Mesh(dp=2)
    cf.join(mesh, limit_s=60, notice_s=0.6)
    backend = backend_for(mesh)
    lines = []

    def say_and_wake(rank, text):
        lines.append(text)
        stopped = re.search(r"process (\d+).* stopped", text)
        if stopped:
            os.kill(int(stopped[1]), signal.SIGCONT)

    watch.say = say_and_wake
    for at_fault, what in ((1, "late"), (1, "stopped"), (0, "stopped")):
        if backend.rank == at_fault:
            time.sleep(1.5)
            if what == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
        watch.meet(backend.watch, f"{what} {at_fault}")
    everyone = backend.watch.exchange("lines", json.dumps(lines), 60)
    if backend.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        watch.meet(backend.watch, "killed 1")
    except CollectiveError as error:
        error.add_note(json.dumps([json.loads(text) for text in everyone]))
        raise


@pytest.mark.dist
def test_peers_that_do_not_come_are_noticed():
    says = r"killed 1 at .*: rank 1 will not come here \(not in a step yet; its process \d+ has ended\)"
    with pytest.raises(CollectiveError, match=says) as told:
        cf.launch(wait_for_one_another, 2, timeout_s=90)
    rank0, rank1 = ("\n".join(lines) for lines in json.loads(told.value.__notes__[0]))
    where = r"has waited \d s at late 1 at test_presence.py:\d+ in wait_for_one_another"
    assert re.search(where + r" for rank 1 \(not in a step yet\); it gives up after 60 s", rank0)
    assert re.search(r"rank 0 " + where + r" for this rank, which is not in a step yet; all ranks must call", rank1)
    assert re.search(r"has waited \d s at stopped 1 .* for rank 1 \(not in a step yet; its process \d+ is stopped\)", rank0)
    assert re.search(r"has had no answer from rank 0 \(process \d+ on .*, stopped\) for \d s; this rank is stopped 0 at test", rank1)


def test_a_process_is_seen_to_stop_and_to_end():
    child = subprocess.Popen([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"], stdout=subprocess.PIPE)
    try:
        child.stdout.read(1)
        seen = attrs.evolve(Process.own(), pid=child.pid, began=started(child.pid))
        assert seen.condition() == "running"
        os.kill(child.pid, signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert seen.condition() == "stopped"
        assert attrs.evolve(seen, began="1").condition() == "ended"  # the number was given to another process
        assert attrs.evolve(seen, place="another machine").condition() == ""
    finally:
        child.kill()
        child.communicate()
    assert seen.condition() == "ended"


def test_joining_says_that_it_waits(capsys):
    with noticed(1, "for all of the 2 processes to join", Limits(60, 0.01)):
        time.sleep(0.2)
    assert capsys.readouterr().err == "[rank 1] has waited 0.01 s for all of the 2 processes to join; it gives up after 60 s\n"
    with noticed(1, "for nobody", Limits(60, 10)):
        pass
    assert capsys.readouterr().err == ""


def test_a_few_of_many_ranks_are_named():
    assert ranks_text([1, 3], ["", "after step 2"]) == "rank 1; rank 3 (after step 2)"
    assert ranks_text(range(6), [""] * 6) == "rank 0; rank 1; rank 2; rank 3 and 2 more"


def test_groups_along_axes_have_the_same_limit(monkeypatch):
    made = []
    monkeypatch.setattr(torch.distributed, "new_group", lambda ranks, timeout: made.append((ranks, timeout.total_seconds())))
    Groups(cf.Mesh(dp=2, tp=2), 0, "gloo", 77.0).of(("tp",))
    assert made == [([0, 1], 77.0), ([2, 3], 77.0)]


def test_limits_are_positive_and_need_no_processes():
    cf.join(cf.Mesh(dp=2), limit_s=60)
    with pytest.raises(InputError, match=r"limit_s=0 and notice_s=10.0 have to be positive. Try: cf.join\(mesh, limit_s=600\)"):
        cf.join(cf.Mesh(dp=2), limit_s=0)
