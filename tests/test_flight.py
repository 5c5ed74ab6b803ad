"""What a GPU has not come past while its host has gone on: named, looked after until it has passed, and ended with its communicators."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pretended import Machine
from pretended.nccl import Nccl

import colofunc as cf
from colofunc import compat
from colofunc.errors import CollectiveError
from colofunc.executors import flight as flights
from colofunc.executors import lookout, watch
from colofunc.executors.backend import backend_for
from colofunc.executors.flight import Flight, abort_all
from colofunc.executors.places import RankProgress, whereabouts, write_on_gpu, write_place
from colofunc.executors.presence import Limits


class Passing:
    """An event or a collective of a GPU that passes when a test says so."""

    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed

    is_completed = query

    def synchronize(self) -> None:
        self.passed = True


def launched(flight: Flight, step: int, *names: str) -> tuple[list[Passing], Passing]:
    works, end = [Passing() for _ in names], Passing()
    flight.begin(step, f"in step {step} (train)")
    for name, work in zip(names, works, strict=True):
        flight.started(name, [work])
    flight.end(end)
    return works, end


def test_the_first_collective_that_has_not_passed_is_where_a_gpu_is() -> None:
    flight = Flight()
    assert not flight.used and flight.waiting(9.0) is None
    (gather, reduce), end = launched(flight, 3, "all_gather of a", "all_reduce of b")
    (later,), second = launched(flight, 4, "all_gather of c")
    first = flight.waiting(9.0)
    assert first is not None and (first.what, first.step, first.on_gpu) == ("in all_gather of a, in step 3 (train)", 3, True)
    assert flight.waiting(9.0) is first  # since then
    later.passed = reduce.passed = True  # out of order: the first is what counts
    assert flight.waiting(9.0) is first
    gather.passed = True
    behind = flight.waiting(9.0)
    assert behind is not first and behind is not None and behind.what == "in step 3 (train)"
    end.passed = True
    assert flight.waiting(9.0).what == "in step 4 (train)" and flight.passed == 3  # type: ignore[union-attr]
    second.passed = True
    assert flight.waiting(9.0) is None and flight.passed == 4


def test_steps_that_have_passed_are_not_kept() -> None:
    flight = Flight()
    for step in range(1, 50):
        works, end = launched(flight, step, "all_gather", "all_reduce")
        for each in (*works, end):
            each.passed = True
    assert len(flight._steps) == 1 and flight.passed == 48


def test_a_step_that_is_interrupted_on_the_host_is_not_waited_for() -> None:
    flight = Flight()
    flight.begin(1, "in step 1 (train)")
    flight.started("all_gather", [Passing()])
    assert flight.waiting(9.0).what == "in all_gather, in step 1 (train)"  # type: ignore[union-attr]
    flight.give_up()
    assert flight.waiting(9.0) is None
    flight.started("all_gather", [Passing()])  # outside of a step
    assert flight.waiting(9.0) is None


def test_the_end_of_a_script_waits_for_its_gpu() -> None:
    flight = Flight()
    _, end = launched(flight, 1)
    flight.wait()
    assert end.passed and flight.waiting(9.0) is None


def test_communicators_are_ended_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    met = threading.Barrier(3)  # one after the other, the first would wait for ever
    monkeypatch.setattr(compat, "all_groups", lambda: ["world", "dp", "tp"])
    monkeypatch.setattr(compat, "abort", lambda group, device: met.wait(60))
    assert abort_all() == ["world", "dp", "tp"] and not met.broken
    monkeypatch.setattr(flights, "ABORT_S", 0.01)
    monkeypatch.setattr(compat, "abort", lambda group, device: threading.Event().wait(60))
    assert abort_all() == ["world", "dp", "tp"]  # one that does not end holds nobody up


class Store(dict[str, Any]):
    set = dict.__setitem__

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


def test_a_step_is_done_where_it_has_passed_on_the_gpu() -> None:
    store = Store()
    assert whereabouts(store, 1) == RankProgress()
    write_place(store, 1, 7, "after step 7 (train)", 7)
    assert whereabouts(store, 1) == RankProgress(7, "after step 7 (train)", 7) and whereabouts(store, 1).words == "after step 7 (train)"
    write_on_gpu(store, 1, 4, "in all_gather of a, in step 5 (train)")
    assert whereabouts(store, 1).done == 4
    assert whereabouts(store, 1).words == "after step 7 (train); its GPU is in all_gather of a, in step 5 (train)"


# ---- two ranks with pretended cards ----


def gathered(state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return state + (x @ x.T).sum()


def lose_a_peer() -> dict[str, Any]:
    """Rank 1 comes late to a step, and then not at all; rank 0's host has left the step long before its GPU could."""
    rank = dist.get_rank()
    Nccl(Machine(cards=2, seed=rank, card=rank).__enter__()).__enter__()  # as long as the process: its GPU never gets to an end
    mesh = cf.Mesh(dp=2)
    cf.join(mesh, limit_s=60, notice_s=0.2)
    tie = backend_for(mesh).watch
    assert tie is not None
    reasons: list[str] = []
    ended: list[int] = []
    aborted: list[Any] = []
    lookout.LOST_AFTER_S = watch.TELL_S = 0.5
    lookout.os = SimpleNamespace(_exit=ended.append)  # type: ignore[assignment]
    lookout.print = lambda text, **options: reasons.append(text)  # type: ignore[attr-defined]
    compat.abort = lambda group, device: aborted.append(group) or True  # type: ignore[assignment,func-returns-value]
    step = cf.shard(gathered, mesh, in_specs=("a", "(dp r) c"), out_specs="a", donate=())
    state, x = torch.zeros(3).double(), torch.ones(4, 2).double()
    float(step(state, x).sum())
    done = whereabouts(tie._store, rank).done

    def until(text: str) -> None:
        over = time.monotonic() + 60
        while not any(text in reason for reason in reasons) and time.monotonic() < over:
            time.sleep(0.01)

    if rank == 0:
        before = tie.limits
        tie.limits = Limits(0.6, 0.2)  # from before the step on: a wait keeps the limit that it began with
        out = step(state, x)  # the host is past it
        here = tie._activity.here
        until("which is in all_")
        tie.limits = before
        told = [reason for reason in reasons if "which is in all_" in reason]
        tie.exchange("rank 1 may come", "", 60)
        late = float(out.sum())
    else:
        tie.exchange("rank 1 may come", "", 60)
        late = float(step(state, x).sum())
    tie.exchange("rank 1 goes", "", 60)
    if rank == 1:
        until("has waited")  # rank 0 has said so to this one as well
        tie._store.set("heard", json.dumps(reasons))
        os.kill(os.getpid(), signal.SIGKILL)
    step(state, x)
    until("is lost")
    lost = [reason for reason in reasons if "is lost" in reason]
    counts = {"ended": len(ended), "aborted": len(aborted), "done": done}
    return {"late": late, "here": here, "told": told, "lost": lost, "heard": json.loads(tie._store.get("heard")), **counts}


def result_of_rank_0() -> None:
    raise CollectiveError(json.dumps(lose_a_peer()))


@pytest.mark.dist
def test_a_peer_that_is_late_or_lost_behind_the_host_is_named_with_step_and_operator() -> None:
    with pytest.raises(CollectiveError) as told:
        cf.launch(result_of_rank_0, 2, timeout_s=90)
    found = json.loads(str(told.value))
    assert found["here"].startswith("after step 2 (gathered)")
    at = r"in all_\w+ .*over dp \(.*test_flight.py:\d+.*\), in step 2 \(gathered\)"
    late = rf"rank 0 has waited \d+ s for its GPU, which is {at} .*\(rank 1: (in|after) step 1 .*cf.join\(mesh, limit_s=1.8\)"
    assert re.search(late, found["told"][0])
    assert any(re.search(late, text) for text in found["heard"])
    assert found["late"] == 96.0  # it came in the end
    at = at.replace("step 2", "step 3")
    assert re.search(rf"rank 1 is lost \(.*step 2 .*; its process \d+ has ended\) while rank 0 is {at}", found["lost"][0])
    assert found["ended"] >= 2 and found["aborted"] >= found["ended"]
    assert found["done"] <= 1
