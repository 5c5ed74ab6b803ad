"""What is kept so that fewest bytes are copied: against a search over all that could be kept."""

import re
from itertools import product
from random import Random
from typing import Any

import pytest
from copies import check
from test_offload import one, peak, training

import colofunc as cf
from colofunc.mesh.sizes import parse_bytes
from colofunc.planner.offload import least_traffic as solver
from colofunc.planner.offload.evict import Stay, TraceFacts, evict, spread
from colofunc.planner.offload.least_traffic import Programs, least_bytes, least_traffic
from colofunc.planner.offload.residency import SKETCH, Links, OffloadItem, ResidencySearch, Trace, reside

LINKS = Links(4.0, 4.0, 0.0)


def moved(trace: Trace, room: int, stay: float = 1.0) -> int:
    facts = TraceFacts(trace)
    residents, stays = least_traffic(facts, room, stay)
    return sum(facts.nbytes[c.item] for c in spread(facts, stays, residents, room, LINKS)[1])


def test_what_was_written_stays_and_what_has_its_copy_leaves() -> None:
    """Both are needed again at the end; Belady would drop the value that was made, which is needed last, and store it first."""
    trace = Trace((1.0,) * 5, (), (0, 0, 4, 0, 0), (OffloadItem(4, False, (0, 4)), OffloadItem(4, True, (1, 3), stays=False)))
    assert moved(trace, 12) == 4 and moved(trace, 8) == 8
    facts = TraceFacts(trace)
    assert len(spread(facts, evict(facts, 8, ()), (), 8, LINKS)[1]) == 3


def test_state_stays_where_that_saves_both_of_its_copies() -> None:
    trace = Trace((1.0,) * 4, (), (0,) * 4, (OffloadItem(4, True, (1,), {1}), OffloadItem(4, True, (2,)), OffloadItem(4, True, (3,))))
    facts = TraceFacts(trace)
    assert least_traffic(facts, 8, 1.0)[0] == [0] and moved(trace, 8) == 8
    assert least_traffic(facts, 8, 0.0)[0] == [] and moved(trace, 8, 0.0) == 16


def test_fixed_items_keep_their_room() -> None:
    items = (OffloadItem(4, True, (1,), fixed=True), OffloadItem(4, False, (0, 2), fixed=True), OffloadItem(4, True, (0, 2)))
    trace = Trace((1.0,) * 3, (), (0,) * 3, items)
    residents, stays = least_traffic(TraceFacts(trace), 8)
    assert residents == [0] and stays[1] == [Stay(0, 2, 1, True, 0)] and len(stays[2]) == 2


def least(trace: Trace, room: int) -> int:
    """Fewest bytes of all choices of gaps: what is kept lies in the room, what is not is fetched, and stored once a value."""
    facts, best = TraceFacts(trace), 10**9
    gaps = [(i, k) for i in range(len(trace.items)) for k in range(len(facts.uses[i]) - 1)]
    able = [i for i, item in enumerate(trace.items) if item.home and item.stays and facts.uses[i]]
    for kept, stay in product(product((0, 1), repeat=len(gaps)), product((0, 1), repeat=len(able))):
        on = {gap for gap, k in zip(gaps, kept, strict=True) if k}
        residents = {i for i, s in zip(able, stay, strict=True) if s}
        if any(i in residents and (i, k) not in on for i, k in gaps):
            continue
        held = list(facts.base + facts.needed)
        for i, k in on:
            for p in range(facts.uses[i][k] + 1, facts.uses[i][k + 1]):
                held[p] += facts.nbytes[i]
        for i in residents:
            for p in (*range(facts.uses[i][0]), *range(facts.uses[i][-1] + 1, facts.size)):
                held[p] += facts.nbytes[i]
        if max(held) <= room:
            best = min(best, sum(copied(facts, i, on) for i in range(len(trace.items)) if i not in residents))
    return best


def copied(facts: TraceFacts, i: int, on: set[tuple[int, int]]) -> int:
    item, uses = facts.trace.items[i], facts.uses[i]
    fetches = (1 if item.home and uses else 0) + sum((i, k) not in on for k in range(len(uses) - 1))
    writes = sorted({*item.writes, *(() if item.home else uses[:1])})
    stores = 0
    for at, written in enumerate(writes):
        end = writes[at + 1] if at + 1 < len(writes) else facts.size
        left = any((i, k) not in on and written <= uses[k] < end for k in range(len(uses) - 1))
        stores += left or (item.home and at == len(writes) - 1)
    return (fetches + stores) * item.nbytes


@pytest.mark.parametrize("seed", range(40))
def test_of_one_size_nothing_copies_less(seed: int) -> None:
    random, size = Random(seed), 7
    items = []
    for k in range(3):
        uses = tuple(sorted(random.sample(range(size), random.randint(1, 3))))
        home = k > 0 and random.random() < 0.7
        items.append(OffloadItem(1, home, uses, {p for p in uses if random.random() < 0.4}, stays=random.random() < 0.7))
    trace = Trace((1.0,) * size, (), (0,) * size, tuple(items))
    room = max(2, int(TraceFacts(trace).needed.max()))
    assert moved(trace, room) == least(trace, room)
    assert least_bytes(TraceFacts(trace), room) == least(trace, room)


@pytest.mark.parametrize("seed", range(20))
def test_of_any_sizes_nothing_copies_less_than_what_is_said(seed: int) -> None:
    random, size = Random(seed), 6
    items = []
    for k in range(3):
        nbytes, reads = random.randint(1, 9), tuple(sorted(random.sample(range(size), random.randint(1, 3))))
        items.append(OffloadItem(nbytes, k < 2, reads, stays=random.random() < 0.7))
    trace = Trace((1.0,) * size, (), tuple(random.randint(0, 4) for _ in range(size)), tuple(items))
    facts = TraceFacts(trace)
    room = int((facts.needed + facts.base).max()) + random.randint(0, 6)
    assert 0 <= least_bytes(facts, room) <= least(trace, room) <= moved(trace, room)
    assert least_bytes(facts, 10**6) == least(trace, 10**6)


@pytest.mark.parametrize("seed", range(10))
def test_plans_with_slack_hold_their_budget_and_move_no_more(seed: int) -> None:
    random = Random(seed)
    uses = [tuple(sorted(random.sample(range(30), random.randint(1, 4)))) for _ in range(12)]
    items = tuple(OffloadItem(random.randint(1, 5), random.random() < 0.6, u, {p for p in u if random.random() < 0.3}) for u in uses)
    trace = Trace((1.0,) * 30, (), (0,) * 30, items)
    budget = int(TraceFacts(trace).needed.max()) + 6
    fast, lean = reside(trace, budget, LINKS), reside(trace, budget, LINKS, 0.5)
    for found in (fast, lean):
        check(trace, found, budget)
    assert sum(lean.moved_bytes) <= sum(fast.moved_bytes) and fast.seconds <= lean.seconds <= 1.5 * fast.seconds


def drawn(seed: int) -> tuple[Trace, int]:
    random = Random(seed)
    uses = [tuple(sorted(random.sample(range(30), random.randint(1, 4)))) for _ in range(12)]
    items = tuple(OffloadItem(random.randint(1, 5), random.random() < 0.6, u, {p for p in u if random.random() < 0.3}) for u in uses)
    trace = Trace((1.0,) * 30, (), (0,) * 30, items)
    return trace, int(TraceFacts(trace).needed.max()) + 6


@pytest.mark.parametrize("seed", range(5))
def test_what_is_solved_once_for_many_parts_of_the_state_saves_as_much_as_for_each(seed: int) -> None:
    trace, room = drawn(seed)
    programs, parts = Programs(TraceFacts(trace)), (1.0, 0.9, 0.7, 0.5, 0.3, 0.0)

    def saved(part: float) -> float:
        one = solver._GapProgram(TraceFacts(trace), room, part)
        return sum(x * n for x, n in zip(one.solve() or (), one.saved, strict=True))

    found = [programs.at(room, part) for part in parts]
    assert len({id(got) for got in found}) < len(parts)
    for got, part in zip(found, parts, strict=True):
        assert got is not None and got.used <= part + 1e-9 <= got.asked + 1e-9 and saved(got.asked) == pytest.approx(saved(part))


def test_a_linear_program_that_takes_too_long_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    trace, room = drawn(3)
    monkeypatch.setattr(solver, "ITERATIONS", 1)
    assert Programs(TraceFacts(trace)).at(room, 1.0) is None and least_bytes(TraceFacts(trace), room) == 0
    for slack in (0.0, 0.5):
        check(trace, reside(trace, room, LINKS, slack), room)
    search = ResidencySearch(trace, room, LINKS)
    search.sketch([point for point in SKETCH if point.least_traffic])
    assert search.best is None and search.gave_up


def test_a_plan_says_that_a_linear_program_took_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    step, *args = training()
    budget = int(peak(cf.shard(step, one()), *args) * 0.6)
    plan = lambda: cf.offload(cf.shard(step, one()), policy="bytes", budget=budget).lower(*args)  # noqa: E731
    assert "too many iterations" not in str(plan().plan.memory)
    monkeypatch.setattr(solver, "ITERATIONS", 1)
    low = plan()
    assert "too many iterations" in str(low.plan.memory) and low.memory().peak_bytes["device"] <= budget


def test_a_step_that_aims_at_bytes_stays_in_its_budget_and_copies_no_more() -> None:
    step, *args = training()
    budget = int(peak(cf.shard(step, one()), *args) * 0.6)
    away = cf.ext.MemoryPolicy("all", lambda states, room: ["host" if s.nbytes > 8 else None for s in states], "host")
    found = {policy: cf.offload(cf.shard(step, one()), policy=policy, budget=budget).lower(*args) for policy in ("auto", "bytes", away)}
    copied = {policy: sum(low.program.values[n.refs[0]].nbytes for n in low.program.nodes if _copies(n)) for policy, low in found.items()}
    assert all(low.memory().peak_bytes["device"] <= budget for low in found.values()) and 0 < copied["bytes"] <= min(copied.values())
    said = {policy: re.findall(r"no choice copies less than ([\d.]+ \w+)", "\n".join(low.plan.memory)) for policy, low in found.items()}
    assert not said["auto"] and 0.5 * copied["bytes"] < parse_bytes(*said["bytes"], "least") <= 1.001 * copied["bytes"]


def _copies(node: Any) -> bool:
    return node.target.removeprefix("colofunc.").removesuffix("_start") in ("to_device", "to_host", "put")
