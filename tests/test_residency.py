"""Residency plans: the budget holds, every use finds its value, next uses decide.

Oracles share no code with the planner: `check` replays what lies where; the fewest fetches come from a search over all
contents of the device, the least makespan from trying every valid set of moves.
"""

from itertools import combinations, pairwise, permutations, product
from math import inf
from random import Random

import attrs
import pytest
from copies import check, simulate
from hypothesis import given, settings
from hypothesis import strategies as st

from colofunc.errors import PlanError, ProgramError
from colofunc.planner.offload.evict import TraceFacts, evict, spread
from colofunc.planner.offload.residency import Links, OffloadItem, Residency, ScheduledCopy, Trace, least_budget, reside
from colofunc.planner.offload.timeline import TraceLanes, bytes_by_position, device_uses, play, uses_that_change

LINKS = Links(4.0, 4.0, 0.0)
FREE = Links(inf, inf, 0.0)


def exposed_s(trace: Trace, plan: Residency) -> float:
    """What a plan takes beyond the same positions without copies."""
    return plan.seconds - simulate(trace, (), (), LINKS).makespan_s


# ---- small and by hand ----


def test_everything_fits_without_moves() -> None:
    items = (OffloadItem(4, True, (0, 2), {2}), OffloadItem(4, True, (1, 3)), OffloadItem(2, False, (0, 3)))
    trace = Trace((1.0,) * 4, (), (0,) * 4, items)
    plan = reside(trace, 10, LINKS)
    assert (plan.moves, plan.residents, plan.peak_bytes, exposed_s(trace, plan)) == ((), {0, 1}, 10, 0.0)


def test_an_impossible_budget_names_the_least_and_its_position() -> None:
    trace = Trace((1.0,) * 3, (), (1, 2, 1), (OffloadItem(4, True, (0, 1)), OffloadItem(3, True, (1, 2))))
    with pytest.raises(PlanError, match="least possible, 9 bytes: position 1 holds 2 bytes that cannot move and needs 7"):
        reside(trace, 8, LINKS)
    check(trace, reside(trace, 9, LINKS), 9)


@pytest.mark.parametrize(
    ("item", "says"),
    [
        (OffloadItem(4, True, (1, 0)), "ascending positions below 2"),
        (OffloadItem(4, True, (0, 2)), "ascending positions below 2"),
        (OffloadItem(4, True, (0,), {1}), "none of its uses"),
        (OffloadItem(4, True, (0,), (), {0}, fixed=True), "fixed on the device and needed on the host at \\[0\\]"),
        (OffloadItem(4, True, (0,), held=((0, 1),)), "held over \\(\\(0, 1\\),\\); give ascending pairs of its uses on the device \\[0\\]"),
        (OffloadItem(4, True, (0, 1), (), {1}, held=((0, 1),)), "ascending pairs of its uses on the device \\[0\\]"),
    ],
)
def test_a_trace_that_contradicts_itself_is_refused(item: OffloadItem, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        reside(Trace((1.0, 1.0), (), (0, 0), (item,)), 99, LINKS)


def test_a_fetch_hides_under_the_position_before() -> None:
    """Neither fits beside what the other's position holds; four bytes take one second, the first one has nothing to hide under."""
    trace = Trace((1.0, 1.0, 1.0), (), (5, 0, 4), (OffloadItem(4, True, (0,)), OffloadItem(4, True, (2,))))
    plan = reside(trace, 9, LINKS)
    assert plan.residents == set() and plan.moves == (ScheduledCopy(0, "fetch", 0, 0), ScheduledCopy(1, "fetch", 1, 2))
    assert (plan.seconds, exposed_s(trace, plan), plan.moved_bytes) == (4.0, 1.0, (8, 0))


def test_the_state_that_is_updated_last_stays_so_that_no_store_is_left_at_the_end() -> None:
    """Position i updates item i. The first and the last stay: three slots are left, for a store, a use and a fetch at once."""
    trace = Trace((2.0,) * 6, (), (0,) * 6, tuple(OffloadItem(4, True, (i,), {i}) for i in range(6)))
    plan = reside(trace, 20, LINKS)
    check(trace, plan, 20)
    assert {0, 5} <= plan.residents and exposed_s(trace, plan) == 0.0


def test_the_host_updates_while_the_device_goes_on() -> None:
    """A gradient (item 1) goes to the host, which updates state that never comes to the device."""
    trace = Trace((1.0, 1.0, 5.0, 4.0), {2}, (0,) * 4, (OffloadItem(9, True, (2,), {2}, {2}), OffloadItem(4, False, (0, 2), (), {2})))
    plan = reside(trace, 4, LINKS)
    check(trace, plan, 4)
    assert [(m.item, m.kind, m.start, m.done) for m in plan.moves] == [(1, "store", 1, 2)]
    assert (plan.seconds, plan.moved_bytes) == (7.0, (0, 4))  # 1 made, 1 copied, 5 on the host; the device is done at 6


def test_fixed_items_stay() -> None:
    items = (OffloadItem(4, True, (3,), fixed=True), OffloadItem(4, False, (0, 3), fixed=True), OffloadItem(4, True, (1, 2)))
    trace = Trace((1.0,) * 4, (), (0,) * 4, items)
    assert least_budget(trace) == (12, 1)
    plan = reside(trace, 12, LINKS)
    check(trace, plan, 12)
    assert 0 in plan.residents and all(m.item == 2 for m in plan.moves)


def test_what_is_in_flight_stays_between_its_ends() -> None:
    """Without the span, item 0 would make room for item 1 between its uses; with it, both lie there."""
    items = OffloadItem(4, True, (0, 3), stays=False), OffloadItem(6, True, (1,), stays=False)
    apart = Trace((1.0,) * 4, (), (0,) * 4, items)
    assert least_budget(apart) == (6, 1)
    held = Trace((1.0,) * 4, (), (0,) * 4, (attrs.evolve(items[0], held=((0, 3),)), items[1]))
    assert least_budget(held) == (10, 1)
    plan = reside(apart, 6, LINKS)
    check(apart, plan, 6)
    with pytest.raises(ProgramError, match=r"item 0 is not on the device at position [12], where something in flight needs it"):
        check(held, plan, 6)
    check(held, reside(held, 10, LINKS), 10)


def test_elixirs_replay_takes_twelve_moves() -> None:
    """Elixir (2212.05339): four chunks, two blocks. It counts every copy: each of the six loads ends in a write-back.

    All chunks lie on the host before and after, so none may be a resident; uses that write make every eviction a store.
    """
    steps = [[0], [1, 2], [3], [3], [1, 2], [0]]
    uses = [tuple(p for p, step in enumerate(steps) if i in step) for i in range(4)]
    trace = Trace((1.0,) * 6, (), (0,) * 6, tuple(OffloadItem(1, True, u, u, stays=False) for u in uses))
    plan = reside(trace, 2, FREE)
    check(trace, plan, 2)
    assert [m.kind for m in plan.moves].count("fetch") == 6 and len(plan.moves) == 12


# ---- the timeline by hand ----


def test_a_timeline_of_two_engines() -> None:
    """Fetch 8 bytes (2 s) under 1 s of compute, change them, store them under the last position."""
    trace = Trace((1.0, 1.0, 3.0), (), (1, 1, 1), (OffloadItem(8, True, (1,), {1}),))
    line = simulate(trace, (ScheduledCopy(0, "fetch", 0, 1), ScheduledCopy(0, "store", 2, 3)), (), LINKS)
    assert [(i.start_s, i.end_s, i.index) for i in line.device] == [(0.0, 1.0, 0), (2.0, 3.0, 1), (3.0, 6.0, 2)]
    assert [(i.start_s, i.end_s) for i in (*line.to_device, *line.to_host)] == [(0.0, 2.0), (3.0, 5.0)]
    assert (line.makespan_s, line.device_bytes) == (6.0, (9, 9, 9))


def test_a_fetch_waits_for_the_store_whose_bytes_it_takes() -> None:
    trace = Trace((1.0, 1.0), (), (0, 0), (OffloadItem(4, True, (0,), {0}), OffloadItem(4, True, (1,))))
    line = simulate(trace, (ScheduledCopy(0, "fetch", 0, 0), ScheduledCopy(0, "store", 1, 1), ScheduledCopy(1, "fetch", 1, 1)), (), LINKS)
    assert [i.start_s for i in line.to_device] == [0.0, 3.0] and line.makespan_s == 5.0


def test_lanes_wait_for_each_others_writes_of_one_copy() -> None:
    """Position 1 (host) changes a host copy that position 0 (device) reads there: in order, no copies."""
    trace = Trace((2.0, 1.0, 1.0), {1}, (0,) * 3, (OffloadItem(4, True, (0, 1), {1}, {0, 1}),), waits=((2, 1),))
    line = simulate(trace, (), (), LINKS)
    assert [(i.start_s, i.end_s) for i in (*line.device, *line.host)] == [(0.0, 2.0), (3.0, 4.0), (2.0, 3.0)]


# ---- the checker can refuse ----


@pytest.mark.parametrize("change", ["drop", "late", "early"])
def test_the_checker_refuses_plans_that_lost_a_move(change: str) -> None:
    refused = 0
    for seed in range(30):
        trace = made(Random(seed), 8, 5)
        budget = least_budget(trace)[0] + 1
        plan = reside(trace, budget, LINKS)
        for index, move in enumerate(plan.moves):
            if change == "late" and move.kind == "fetch":
                other = (attrs.evolve(move, done=min(move.done + 1, 8), free=min(move.done + 1, 8)),)
            elif change == "early" and move.kind == "store":
                other = (attrs.evolve(move, start=move.start - 1),)
            elif change == "drop":
                other = ()
            else:
                continue
            moves = sorted([*plan.moves[:index], *other, *plan.moves[index + 1 :]], key=lambda m: m.start)
            with pytest.raises(ProgramError):
                check(trace, attrs.evolve(plan, moves=tuple(moves)), 10**6)
            refused += 1
    assert refused > 10


def test_the_checker_refuses_a_peak_above_the_budget() -> None:
    trace = Trace((1.0,), (), (3,), (OffloadItem(4, True, (0,)),))
    plan = reside(trace, 7, LINKS)
    with pytest.raises(ProgramError, match="position 0 holds 7 bytes on the device, above 6"):
        check(trace, plan, 6)


# ---- many traces ----


def made(random: Random, positions: int, count: int, host: bool = False) -> Trace:
    """State, activations and gradients with random uses; positions of the host's lane need most things on the host."""
    lane = {p for p in range(positions) if host and random.random() < 0.25}
    items = []
    for _ in range(count):
        uses = tuple(sorted(random.sample(range(positions), random.randint(0, min(positions, 4)))))
        writes = {p for p in uses if random.random() < 0.4}
        there = {p for p in uses if random.random() < (0.9 if p in lane else 0.05 * host)}
        fixed = not there and random.random() < 0.05
        items.append(OffloadItem(random.randint(1, 4), random.random() < 0.6, uses, writes, there, fixed))
    seconds = tuple(random.choice([0.0, 0.5, 1.0, 2.0]) for _ in range(positions))
    return Trace(seconds, lane, tuple(random.randint(0, 3) for _ in range(positions)), tuple(items))


def in_flight(random: Random, trace: Trace) -> Trace:
    """The trace, where some items may not leave between two uses, none of them on the host in between."""
    items = []
    for item in trace.items:
        pairs = [(a, b) for a, b in pairwise(item.uses) if not {a, b} & item.host_uses and random.random() < 0.4]
        items.append(attrs.evolve(item, held=tuple(pairs)))
    return attrs.evolve(trace, items=tuple(items))


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 10**9), positions=st.integers(1, 14), count=st.integers(0, 8), host=st.booleans(), more=st.integers(0, 9))
def test_plans_hold(seed: int, positions: int, count: int, host: bool, more: int) -> None:
    """At the least budget and above: every use valid, never above budget, times and bytes as the timeline finds them."""
    random = Random(seed)
    trace = made(random, positions, count, host)
    trace = in_flight(random, trace) if seed % 2 else trace
    links = Links(random.choice([1.0, 4.0]), random.choice([1.0, 4.0]), random.choice([0.0, 0.1]))
    budget = least_budget(trace)[0] + more
    plan = reside(trace, budget, links)
    check(trace, plan, budget)
    line = simulate(trace, plan.moves, plan.residents, links)
    assert line.makespan_s == plan.seconds and max(line.device_bytes) == plan.peak_bytes <= budget
    for direction, kind in enumerate(("fetch", "store")):
        assert plan.moved_bytes[direction] == sum(trace.items[m.item].nbytes for m in plan.moves if m.kind == kind)
    assert reside(trace, budget, links) == plan


@pytest.mark.parametrize("seed", range(20))
def test_the_walk_that_places_copies_tells_the_timelines_time(seed: int) -> None:
    trace = made(Random(seed), 12, 8, host=seed % 2 == 1)
    budget = least_budget(trace)[0] + 2
    fixed = [i for i, item in enumerate(trace.items) if item.fixed and item.home]
    facts = TraceFacts(trace)
    seconds, copies = spread(facts, evict(facts, budget, fixed), fixed, budget, LINKS)
    assert seconds == play(facts.lanes, [copy.move() for copy in copies], LINKS).makespan


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(st.frozensets(st.integers(0, 5), min_size=1, max_size=2), min_size=1, max_size=12), room=st.integers(2, 4))
def test_belady_fetches_as_little_as_any_choice_of_evictions(steps: list[frozenset[int]], room: int) -> None:
    uses = [tuple(p for p, step in enumerate(steps) if i in step) for i in range(6)]
    trace = Trace((1.0,) * len(steps), (), (0,) * len(steps), tuple(OffloadItem(1, True, u) for u in uses))
    fetches = sum(len(stays) for stays in evict(TraceFacts(trace), room, ()))
    least = {frozenset[int](): 0}
    for step in steps:
        after: dict[frozenset[int], int] = {}
        for held, cost in least.items():
            rest = sorted(held - step)
            for size in range(min(len(rest), room - len(step)) + 1):
                for kept in combinations(rest, size):
                    content = step | frozenset(kept)
                    after[content] = min(after.get(content, 10**6), cost + len(step - held))
        least = after
    assert fetches == min(least.values())


# ---- against every plan there is ----


def plans_of(trace: Trace, index: int) -> list[tuple[tuple[ScheduledCopy, ...], bool, list[int]]]:
    """Every valid set of up to three moves of one item (fetches awaited at their need), with its bytes at each position."""
    item, n = trace.items[index], len(trace.seconds)
    alone = attrs.evolve(trace, base=(0,) * n, items=(item,), waits=())
    moves = [ScheduledCopy(0, "fetch", s, d) for d in device_uses(item) for s in range(d + 1)]
    for w in sorted(uses_that_change(item) - item.host_uses):
        for start, free in product(range(w + 1, n + 1), repeat=2):
            reads = [p for p in item.host_uses if start <= p <= free]
            moves += [ScheduledCopy(0, "store", start, min([free, *reads]), free)] if start <= free else []
    out = []
    if item.home and not item.host_uses and item.uses:
        out.append(((), True, [item.nbytes] * n))
    for count in range(4):
        for chosen in combinations(dict.fromkeys(moves), count):
            ordered = sorted(chosen, key=lambda m: (m.start, m.kind == "fetch"))
            held = bytes_by_position(alone, ordered, ())
            try:
                check(alone, Residency(tuple(ordered), frozenset(), max(held), 0.0, (0, 0)), 10**6)
            except ProgramError:
                continue
            out.append((tuple(attrs.evolve(m, item=index) for m in ordered), False, held))
    return out


def least_makespan(trace: Trace, budget: int, links: Links) -> float:
    lanes, best = TraceLanes(trace), inf
    for choice in product(*(plans_of(trace, i) for i in range(len(trace.items)))):
        if max(map(sum, zip(trace.base, *(held for _, _, held in choice), strict=True))) <= budget:
            moves = [m for mine, _, _ in choice for m in mine]
            for order in permutations(range(len(choice))):  # of moves that start at once
                issued = sorted(moves, key=lambda m: (m.start, m.kind == "fetch", order[m.item]))
                best = min(best, play(lanes, issued, links).makespan)
    return best


def test_tiny_plans_are_nearly_always_the_best_there_is() -> None:
    """98 % of several hundred traces were exact when this was written; the worst of other kinds was 18 % above."""
    ratios = []
    for seed in range(100):
        random = Random(seed)
        n = random.randint(3, 4)
        lane = {p for p in range(n) if seed % 3 == 0 and random.random() < 0.25}
        items = []
        for _ in range(random.randint(2, 3)):
            uses = sorted(random.sample(range(n), random.randint(1, 3)))
            writes = {p for p in uses if random.random() < 0.35}
            items.append(OffloadItem(random.randint(1, 3), random.random() < 0.65, tuple(uses), writes, lane & set(uses)))
        trace = Trace(tuple(random.choice([0.5, 1.0, 2.0]) for _ in range(n)), lane, (0,) * n, tuple(items))
        links = Links(random.choice([1.0, 4.0]), random.choice([1.0, 4.0]), 0.0)
        budget = least_budget(trace)[0] + seed % 2
        plan = reside(trace, budget, links)
        best = least_makespan(trace, budget, links) if plan.moves else inf
        if best < inf:  # needs no more than three moves of any item
            assert plan.seconds >= best - 1e-9
            ratios.append(plan.seconds / best)
    assert len(ratios) > 25
    assert sum(r <= 1.05 for r in ratios) >= 0.9 * len(ratios)


def test_more_budget_is_hardly_ever_slower() -> None:
    """Not proven, every budget is searched by itself: about one in 50 is slower than a smaller one, by up to 3 %."""
    slower, tried = [], 0
    for seed in range(12):
        random = Random(1000 + seed)
        trace = made(random, random.randint(8, 30), random.randint(4, 12), host=seed % 3 == 0)
        best = inf
        low, high = least_budget(trace)[0], 4 + sum(item.nbytes for item in trace.items)
        for budget in range(low, high, max(1, (high - low) // 12)):
            seconds = reside(trace, budget, LINKS).seconds
            slower += [seconds / best] if seconds > best + 1e-9 else []
            tried += 1
            best = min(best, seconds)
    assert tried > 120 and len(slower) <= 0.04 * tried and max(slower, default=1.0) < 1.05


# ---- a training step ----


def layered(layers: int) -> Trace:
    """Forward, then backward and update layer by layer: a parameter, its optimizer state, an activation and a gradient each."""
    items = []
    for layer in range(layers):
        backward = layers + 2 * (layers - 1 - layer)
        update = backward + 1
        items += [OffloadItem(10, True, (layer, backward, update), {update}), OffloadItem(40, True, (update,), {update})]
        items += [OffloadItem(30, False, (layer, backward)), OffloadItem(10, False, (backward, update))]
    seconds = (1.0,) * layers + (2.0, 0.1) * layers
    return Trace(seconds, (), (5,) * len(seconds), tuple(items))


@pytest.mark.parametrize("part", [2, 3, 6, 9])
def test_a_training_step_hides_all_copies_where_the_link_is_twice_as_fast_as_needed(part: int) -> None:
    trace = layered(40)
    plan = reside(trace, 40 * 80 // part, Links(60.0, 60.0, 0.001))
    check(trace, plan, 40 * 80 // part)
    assert exposed_s(trace, plan) < 1e-9 and len(plan.residents) > 0


def test_a_training_step_over_a_slow_link_is_near_the_bound_of_its_bytes() -> None:
    """A ninth of the memory, 107 s of fetches over half the link and 124 s of compute: within 15 % of hiding all."""
    trace = layered(40)
    plan = reside(trace, 40 * 80 // 9, Links(30.0, 30.0, 0.001))
    check(trace, plan, 40 * 80 // 9)
    assert plan.seconds < 1.15 * 124.0


def test_three_chunks_of_room_keep_both_engines_busy_through_updates() -> None:
    """Only updates: 50 bytes in and 50 out for each of 30. In series 60 transfers; with room for three, hardly more than 30."""
    trace = Trace((0.1,) * 30, (), (0,) * 30, tuple(OffloadItem(50, True, (p,), {p}) for p in range(30)))
    links = Links(50.0, 50.0, 0.0)
    assert reside(trace, 50, links).seconds == pytest.approx(63.0)
    assert reside(trace, 150, links).seconds < 35.0
