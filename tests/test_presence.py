"""Ranks that wait for one another: who is where is said on both sides; a killed or stopped peer is noticed, at any time."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from itertools import count

import attrs
import pytest
import torch

import colofunc as cf
from colofunc.env import Launch
from colofunc.errors import CollectiveError, InputError
from colofunc.executors import lookout, presence, rendezvous, watch
from colofunc.executors.backend import backend_for
from colofunc.executors.groups import ProcessGroups
from colofunc.executors.lifeline import Lifelines
from colofunc.executors.places import whereabouts
from colofunc.executors.presence import Limits, Process, last_words, ranks_text, started
from colofunc.executors.rendezvous import Arrivals, Meeting


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

    lookout.say_presence = say_and_wake
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


def elsewhere():
    """As if every rank were on a machine of its own: processes cannot be seen, hosts have names."""
    real = Process.own()
    host = f"node{torch.distributed.get_rank()}"
    Process.own = staticmethod(lambda: attrs.evolve(real, host=host, place=host))


def wait_for_another_machine():
    elsewhere()
    mesh = cf.Mesh(dp=2)
    cf.join(mesh, limit_s=60, notice_s=0.4)
    tie = backend_for(mesh).watch
    presence.SILENT_S, lookout.LOST_AFTER_S, watch.TELL_S = 0.8, 0.5, 0.5
    pid = int(tie.exchange("processes", str(os.getpid()), 60)[1])
    lines, ends = [], []
    lookout.say_presence = lambda rank, text: (lines.append(text), "not heard" in text and os.kill(pid, signal.SIGCONT))
    tie._lookout._end = ends.append
    with tie.step("train"), tie:
        if mesh.rank == 1:
            os.kill(pid, signal.SIGSTOP)
            watch.meet(tie, "awake")
            os.kill(pid, signal.SIGKILL)
        watch.meet(tie, "awake")
        until = time.monotonic() + 60
        while not ends and time.monotonic() < until:  # a collective of which the transport does not say that it has failed
            time.sleep(0.05)
    try:
        watch.meet(tie, "a save")
    except CollectiveError as error:
        return lines, ends, str(error), attrs.astuple(whereabouts(tie._store, 1))
    return None


def results_of_rank_0(fn):
    """Rank 1 is killed: rank 0's result is in its error."""
    result = fn()
    raise CollectiveError(json.dumps(result))


@pytest.mark.dist
def test_a_process_of_another_machine_is_seen_to_end_and_to_fall_silent():
    with pytest.raises(CollectiveError) as told:
        cf.launch(results_of_rank_0, 2, wait_for_another_machine, timeout_s=90)
    lines, ends, error, place = json.loads(str(told.value))
    where = r"in step 1 \(train\) at test_presence.py:\d+ in wait_for_another_machine"
    assert any(re.search(rf"for rank 1 \({where}; not heard of for \d s \(process \d+ on node1\)\); it gives up", line) for line in lines)
    assert re.search(rf"rank 1 is lost \({where}; its process \d+ on node1 has ended\) while rank 0 is in step 1 \(train\)", ends[0])
    assert re.search(rf"a save at .*: rank 1 will not come here \({where}; its process \d+ on node1 has ended\)", error)
    assert place[0] == 0


def test_a_connection_that_closes_is_the_end_of_a_process():
    main = Lifelines.serve()
    code = f"""
import os, socket, struct, time
line = socket.create_connection(("127.0.0.1", {main.port}))
line.sendall(struct.pack("!16sI", bytes.fromhex("{main.token.hex()}"), 3))
print(1, flush=True)
time.sleep(60)
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    other = Lifelines.connect("127.0.0.1", main.port, b"?" * 16, 2)  # not one of this run
    mine = Lifelines.connect("127.0.0.1", main.port, main.token, 1)
    try:
        child.stdout.read(1)
        assert main.ended() == mine.ended() == []
    finally:
        child.kill()
        child.communicate()
    until = time.monotonic() + 10
    while not main.ended() and time.monotonic() < until:
        time.sleep(0.01)
    assert main.ended() == [3]
    main.close()
    assert mine.ended() == [0]
    mine.close()
    other.close()


@pytest.fixture
def not_started(monkeypatch):
    """Processes that the machine shows, for a rank that waits for one that has not come."""
    shown = {0: [os.getpid()]}
    monkeypatch.setattr(rendezvous, "started_here", lambda: shown)
    return shown


def waiting(limit_s, notice_s, missing, **options):
    arrivals = Arrivals(0, Limits(limit_s, notice_s), " at host:1", **options)
    arrivals.wait(missing)
    return arrivals


def test_a_rank_that_takes_long_to_start_is_waited_for_and_named(not_started, capsys):
    came = iter([[1]] * 12 + [[]])
    not_started[1] = [os.getpid()]
    waiting(60, 0.05, lambda: next(came))
    lines = capsys.readouterr().err.splitlines()
    first = lines[0]
    assert re.match(rf"\[rank 0\] has waited \d s for rank 1 \(its process {os.getpid()} has not joined yet\) to join at host:1;", first)
    assert len(lines) < 8  # again after three times as long


def test_a_rank_that_ended_before_it_joined_is_an_error(not_started):
    not_started[1] = [4711]

    looks = count()

    def missing():
        if next(looks) == 8:
            del not_started[1]
        return [1]

    with pytest.raises(CollectiveError, match=r"rank 1 \(its process 4711 has ended\) will not join at host:1; its own output says why"):
        waiting(60, 0.05, missing)
    with pytest.raises(CollectiveError, match=r"rank 1 \(no process of this machine was started as it\) will not join at host:1"):
        waiting(60, 0.05, lambda: [1], all_here=True)


def test_a_rank_that_is_stopped_before_it_joined_is_named_behind_what_started_it(not_started, monkeypatch):
    not_started[1] = [4711, 4712]  # `timeout` and what it runs
    monkeypatch.setattr(rendezvous, "process_state", {4711: "running", 4712: "stopped"}.get)
    with pytest.raises(CollectiveError, match=r"has waited \d s for rank 1 \(its process 4712 is stopped\) to join"):
        waiting(0.3, 0.02, lambda: [1])


def test_a_rank_of_which_nothing_is_known_is_waited_for_until_the_limit(not_started):
    not_started[0].append(1)  # more than one process of rank 0: it may have started the others with its own variables
    text = r"rank 0 has waited \d s for rank 1 .* to join at host:1. Where .* start, try: cf.join\(mesh, limit_s=0.9\)"
    for here in (True, False):
        with pytest.raises(CollectiveError, match=text):
            waiting(0.3, 0.02, lambda: [1], all_here=here)


def test_processes_of_a_run_are_known_by_the_variables_they_were_started_with(monkeypatch):
    run = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="12345")
    sleep = [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"]
    others = [dict(run, RANK="1"), dict(run, RANK="1", MASTER_PORT="12346")]
    children = [subprocess.Popen(sleep, env=other, stdout=subprocess.PIPE) for other in others]
    real = rendezvous._started_with
    try:
        [child.stdout.read(1) for child in children]
        monkeypatch.setattr(rendezvous, "_started_with", lambda process: {} if process == "self" else real(process))
        assert rendezvous.started_here() is None
        monkeypatch.setattr(rendezvous, "_started_with", lambda process: dict(run, RANK="0") if process == "self" else real(process))
        assert rendezvous.started_here() == {1: [children[0].pid]}
    finally:
        for child in children:
            child.kill()
            child.communicate()
    assert rendezvous.started_here() == {}


def test_ranks_find_one_another_before_there_is_a_group(not_started, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    main, other = (Launch(rank, 2, rank, 2, "127.0.0.1", port) for rank in range(2))
    with pytest.raises(CollectiveError, match=rf"rank 1 has waited .* for rank 0 .* to join at 127.0.0.1:{port}"):
        Meeting.at(other, Limits(0.3, 0.1))
    monkeypatch.setattr(rendezvous, "_MEETINGS", count())
    ours = Meeting.at(main, Limits(30))  # serves the store as long as it lives
    server, address = rendezvous.serve(ours, 0)
    monkeypatch.setattr(rendezvous, "_MEETINGS", count())  # another process counts for itself
    assert rendezvous.serve(Meeting.at(other, Limits(30)), 1) == (None, ("127.0.0.1", address[1]))
    assert server.port == address[1]


def test_a_store_that_is_gone_is_the_end_of_rank_0():
    def gone():
        raise torch.distributed.DistNetworkError("closed")

    with pytest.raises(CollectiveError, match="rank 0, through which ranks join, has ended; its own output says why"):
        rendezvous.patient(gone)()


def test_the_error_that_ends_a_script_is_what_others_are_told(monkeypatch):
    monkeypatch.delattr(sys, "last_value", raising=False)
    monkeypatch.delattr(sys, "ps1", raising=False)
    assert last_words() == ""
    try:
        raise ValueError("no rows")
    except ValueError as error:
        monkeypatch.setattr(sys, "last_value", error, raising=False)
    assert re.fullmatch(r"ValueError: no rows at test_presence.py:\d+", last_words())


def test_a_few_of_many_ranks_are_named():
    assert ranks_text([1, 3], ["", "after step 2"]) == "rank 1; rank 3 (after step 2)"
    assert ranks_text(range(6), [""] * 6) == "rank 0; rank 1; rank 2; rank 3 and 2 more"


def test_groups_along_axes_have_the_same_limit(monkeypatch):
    made = []
    monkeypatch.setattr(torch.distributed, "new_group", lambda ranks, timeout: made.append((ranks, timeout.total_seconds())))
    ProcessGroups(cf.Mesh(dp=2, tp=2), 0, {"cpu": "gloo"}, 77.0).of(("tp",))
    assert made == [([0, 1], 77.0), ([2, 3], 77.0)]


def test_limits_are_positive_and_need_no_processes():
    cf.join(cf.Mesh(dp=2), limit_s=60)
    with pytest.raises(InputError, match=r"limit_s=0 and notice_s=10.0 have to be positive. Try: cf.join\(mesh, limit_s=600\)"):
        cf.join(cf.Mesh(dp=2), limit_s=0)
