"""Named schedules and the simulator: closed forms of bubble and memory, published makespans, and `auto` beside the named ones."""

import random
import re
from collections.abc import Callable
from itertools import product

import pytest
from colofunc_plugins.pipeline.local_search import OrderSearch, improve, least_s

import colofunc as cf
from bench.pipelines import INTERLEAVED, PAPER, SEARCHED, interleaved_spans
from colofunc.ext import ActionTable, StageCosts, simulate
from colofunc.planner.stages.placements import placed
from colofunc.planner.stages.simulate import Player, Simulated
from colofunc.plugins import build_registry
from colofunc.program.actions import check_table

SCHEDULES = build_registry().schedules
F, I, W = 3.0, 2.75, 1.5
KEPT, WEIGHT_KEPT = 1.0, 0.25


def played(name: str, ranks: int, microbatches: int, costs: StageCosts | None = None) -> Simulated:
    schedule = SCHEDULES[name]
    parts = schedule.stages_per_rank
    if costs is None:
        costs = StageCosts.uniform(schedule.stages(ranks), F / parts, I / parts, W / parts, kept=KEPT, weight_kept=WEIGHT_KEPT)
    return simulate(schedule.table(ranks, microbatches), costs)


BUBBLES = {
    "gpipe": lambda p: (p - 1) * (F + I + W),
    "1f1b": lambda p: (p - 1) * (F + I + W),
    "interleaved-1f1b": lambda p: (p - 1) * (F + I + W) / 2,
    "zb-h1": lambda p: (p - 1) * (F + I - W),
    "zb-h2": lambda p: (p - 1) * (F + I - 2 * W),
}
PEAKS = {
    "gpipe": lambda p, m, i: m,
    "1f1b": lambda p, m, i: p - i + 1,
    "interleaved-1f1b": lambda p, m, i: 2 * p + p - 1 - 2 * (i - 1),
    "zb-h1": lambda p, m, i: (p - i + 1) * KEPT + (i - 1) * WEIGHT_KEPT,
    "zb-h2": lambda p, m, i: (2 * p - 2 * i + 1) * KEPT + (2 * i - 2) * WEIGHT_KEPT,
}


@pytest.mark.parametrize(("name", "ranks"), [*product(BUBBLES, (2, 4, 8))])
def test_closed_forms(name: str, ranks: int) -> None:
    microbatches = 4 * ranks
    simulated = played(name, ranks, microbatches)
    assert max(simulated.spans_s) - microbatches * (F + I + W) == pytest.approx(BUBBLES[name](ranks), rel=1e-12)
    assert simulated.peak_bytes == tuple(PEAKS[name](ranks, microbatches, i) for i in range(1, ranks + 1))


@pytest.mark.parametrize("row", PAPER)
def test_the_table_of_the_zero_bubble_paper(row: tuple[float, ...]) -> None:
    ranks, microbatches = int(row[0]), int(row[1])
    costs = StageCosts.uniform(ranks, *row[2:5], send=row[5])
    for name, bubble in zip(("1f1b", "zb-h1", "zb-h2"), row[6:]):
        assert round(played(name, ranks, microbatches, costs).bubble, 4) == bubble


@pytest.mark.parametrize(("row", "published"), list(zip(PAPER, INTERLEAVED, strict=True)))
def test_the_interleaved_column_of_the_zero_bubble_paper(row: tuple[float, ...], published: tuple[int, float]) -> None:
    """The closed form of communication gives the paper's figures; Megatron's order waits for one round of sends more, p of them."""
    chunks, bubble = published
    ranks, microbatches, f, i, w, send = row[:6]
    ours_s, closed_s = interleaved_spans(row, chunks)
    assert round(1 - microbatches * (f + i + w) / closed_s, 4) == bubble
    assert ours_s - closed_s == pytest.approx(ranks * send, rel=1e-9)


@pytest.mark.parametrize(("ranks", "more"), [*product((2, 3, 4, 8), (0, 3, 12))])
def test_a_v_without_bubble(ranks: int, more: int) -> None:
    simulated = played("zb-v", ranks, 2 * ranks + more, StageCosts.uniform(2 * ranks, weight_kept=0.0))
    assert simulated.bubble == 0
    assert max(simulated.peak_bytes) == 2 * ranks  # of half stages: p of 1F1B's


@pytest.mark.parametrize(("ranks", "microbatches", "published"), [(2, 4, 26), (4, 10, 66), (8, 20, 134)])
def test_dualpipev(ranks: int, microbatches: int, published: int) -> None:
    """The published program runs a forward and a backward as one action, where a rank waits for both; here one may begin alone."""
    simulated = played("dualpipev", ranks, microbatches, StageCosts.uniform(2 * ranks))
    assert simulated.makespan_s == published - (ranks - 1)
    assert simulated.peak_bytes == (2 * ranks + 1,) * ranks


def test_memory_of_half_and_least() -> None:
    for ranks in (3, 6, 12):
        whole, half, least = (max(played(name, ranks, 3 * ranks, alike(ranks)).peak_bytes) for name in ("zb-v", "v-half", "v-min"))
        assert (whole, half, least) == (2 * ranks, ranks + 1, 2 * ranks / 3 + 2)


def alike(ranks: int) -> StageCosts:
    return StageCosts.uniform(2 * ranks, weight_kept=0.0)


def costs_by_chance(stages: int, seed: int) -> StageCosts:
    chance = random.Random(seed)
    columns = [[chance.uniform(low, 2.0) for _ in range(count)] for low, count in ((0.5, stages),) * 3 + ((0.0, stages - 1),) * 2]
    kept = [chance.uniform(0.5, 1.5) for _ in range(stages)]
    return StageCosts(*columns, kept, [one * chance.uniform(0.2, 1.0) for one in kept])


def test_a_table_without_a_stage_in_the_middle_is_refused_before_it_is_played() -> None:
    table = ActionTable.parse(["0F0 0B0", "2F0 2B0"])
    with pytest.raises(cf.PlanError, match="0B0 on rank 0 waits for 1B0, which no rank runs; add it"):
        simulate(table, StageCosts.uniform(3, 1.0, 1.0, 1.0))


NAMED = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipev")


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(4, 8))])
def test_auto_is_never_behind_a_named_one_within_its_memory(seed: int) -> None:
    """Whatever the placement: layers come in two pieces a rank, which a schedule with one stage a rank joins."""
    ranks = 2 + seed % 3
    pieces = costs_by_chance(2 * ranks, seed)
    theirs = {name: played(name, ranks, 2 * ranks, pieces.joined(2 // SCHEDULES[name].stages_per_rank)) for name in NAMED}
    for cap in (*(max(simulated.peak_bytes) for simulated in theirs.values()), None):
        table, costs = placed(SCHEDULES["auto"], ranks, 2 * ranks, pieces, cap)
        ours = simulate(table, costs)
        assert cap is None or max(ours.peak_bytes) <= cap * (1 + 1e-9)
        fitting = [each.makespan_s for each in theirs.values() if cap is None or max(each.peak_bytes) <= cap]
        assert ours.makespan_s <= min(fitting) * (1 + 1e-9)


def test_each_placement_is_taken_where_it_is_best() -> None:
    """Long sends are for one stage a rank, a fast way there and back for a V, and memory that a V does not have for stages in turn."""
    taken = set()
    for seed in range(12):
        pieces = costs_by_chance(8, seed)
        table, _ = placed(SCHEDULES["auto"], 4, 8, pieces, 6.0)
        ranks = tuple(table.rank_of[stage] for stage in range(table.stages))
        taken.add(ranks)
    assert taken == {(0, 1, 2, 3), (0, 1, 2, 3, 3, 2, 1, 0), (0, 1, 2, 3, 0, 1, 2, 3)}


def test_costs_of_pieces_are_joined() -> None:
    pieces = costs_by_chance(6, 1)
    joined = pieces.joined(3)
    assert joined.forward_s == pytest.approx([sum(pieces.forward_s[:3]), sum(pieces.forward_s[3:])])
    assert joined.kept_bytes == pytest.approx([sum(pieces.kept_bytes[:3]), sum(pieces.kept_bytes[3:])])
    assert joined.send_s == (pieces.send_s[2],) and joined.send_back_s == (pieces.send_back_s[2],)
    assert pieces.joined(1) == pieces
    with pytest.raises(cf.PlanError, match="6 stages cannot be joined by 4; give a divisor of 6"):
        pieces.joined(4)


def test_pieces_that_no_placement_has() -> None:
    message = "'auto' has 4 or 8 stages on 4 ranks and was given costs of 6 pieces; give a multiple of its stages"
    with pytest.raises(cf.PlanError, match=message):
        placed(SCHEDULES["auto"], 4, 8, StageCosts.uniform(6))
    with pytest.raises(cf.PlanError, match=r"schedule 'auto' has 4 or 8 stages on 4 ranks and was given costs of 6$"):
        SCHEDULES["auto"].table(4, 8, StageCosts.uniform(6))
    with pytest.raises(cf.PlanError, match=r"one microbatch keeps 2 bytes on rank 0 of the pipeline, more than the 1.5 that it may"):
        placed(SCHEDULES["auto"], 4, 8, StageCosts.uniform(8), 1.5)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_table_is_played_for_other_costs_as_it_is_simulated(name: str) -> None:
    schedule = SCHEDULES[name]
    table = schedule.table(3, 6)
    player = Player(table)
    for seed in range(3):
        costs = costs_by_chance(table.stages, seed)
        simulated = simulate(table, costs)
        assert player.end_s(costs) == simulated.makespan_s
        behind_s = [1.5, 0.5, 4.0]
        ends_s = [row[-1].end_s + more_s for row, more_s in zip(simulated.rows, behind_s, strict=True)]
        assert player.end_s(costs, behind_s) == max(ends_s)


@pytest.mark.parametrize("seed", range(4))
def test_the_longest_span_is_never_behind_a_named_one(seed: int) -> None:
    ranks, microbatches = 2 + seed % 3, 8
    costs = costs_by_chance(ranks, seed)
    ours, theirs = SCHEDULES["auto-span"].table(ranks, microbatches, costs), SCHEDULES["auto"].table(ranks, microbatches, costs)
    assert max(simulate(ours, costs).spans_s) <= max(simulate(theirs, costs).spans_s)
    for other in ("gpipe", "1f1b", "zb-h1", "zb-h2"):
        assert max(simulate(ours, costs).spans_s) <= max(played(other, ranks, microbatches, costs).spans_s)


# The others have more microbatches: the same search, for longer.
FOUND = [
    pytest.param(row, published, marks=() if row[1] == 24 or row == PAPER[4] else pytest.mark.sweep)
    for row, published in zip(PAPER, SEARCHED, strict=True)
]


@pytest.mark.parametrize(("row", "published"), FOUND)
def test_the_searched_column_of_the_zero_bubble_paper(row: tuple[float, ...], published: float) -> None:
    """Within twice the memory of 1F1B, by the longest span of one rank."""
    ranks, microbatches = int(row[0]), int(row[1])
    f, i, w, send = row[2:6]
    costs = StageCosts.uniform(ranks, f, i, w, send=send, weight_kept=0.37)
    simulated = simulate(SCHEDULES["auto-span"].table(ranks, microbatches, costs, 2 * ranks), costs)
    assert simulated.bubble <= published + 5e-5 and max(simulated.peak_bytes) <= 2 * ranks
    least = least_s(range(ranks), microbatches, costs, by_span=True)
    assert max(simulated.spans_s) >= least * (1 - 1e-9)
    if published == 0.0433:  # the first and the last gradient of the last stage leave no more, whatever the memory
        assert max(simulated.spans_s) == pytest.approx(least)


@pytest.mark.parametrize("name", [name for name, schedule in SCHEDULES.items() if not schedule.looks_at_costs])
def test_local_search_plays_as_the_simulator_and_never_makes_a_step_slower(name: str) -> None:
    ranks, microbatches = 3, 6
    schedule = SCHEDULES[name]
    for seed in range(3):
        costs = costs_by_chance(schedule.stages(ranks), seed)
        table = in_parts(schedule.table(ranks, microbatches, costs))
        before = simulate(table, costs)
        cap = max(before.peak_bytes)
        for by_span in (False, True):
            search = OrderSearch(table, costs, cap, by_span)
            takes_s = max(before.spans_s) if by_span else before.makespan_s
            assert search.takes_s(search.rows, search.play(search.rows)) == pytest.approx(takes_s, rel=1e-12)
            improved = improve(table, costs, cap, by_span)
            check_table(improved, table.stages, microbatches)
            after = simulate(improved, costs)
            assert (max(after.spans_s) if by_span else after.makespan_s) <= takes_s
            assert max(after.peak_bytes) <= cap * (1 + 1e-9)
            rank_of = [schedule.rank_of(stage, ranks) for stage in range(table.stages)]
            assert least_s(rank_of, microbatches, costs, by_span) <= (max(after.spans_s) if by_span else after.makespan_s)


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "seed", "cap"), [("auto-span", 3, 12, 114, None), ("auto", 4, 8, 214, 5.44068955)]
)
def test_local_search_leaves_messages_in_their_order(name: str, ranks: int, microbatches: int, seed: int, cap: float | None) -> None:
    """NCCL delivers in the order of sending: each stage does its forwards, and its input gradients, in the order of its neighbours."""
    table = SCHEDULES[name].table(ranks, microbatches, costs_by_chance(ranks, seed), cap)
    for kind in "FI":
        orders = {tuple(action.microbatch for action in row if action.kind == kind) for row in in_parts(table).rows}
        assert len(orders) == 1, (kind, orders)


def in_parts(table: ActionTable) -> ActionTable:
    """Every B as an I and a W."""
    text = re.sub(r"(\d+)B(\d+)", r"\1I\2 \1W\2", "\n".join(" ".join(map(str, row)) for row in table.rows))
    return ActionTable.parse(text.splitlines())


def test_memory_that_a_microbatch_does_not_have() -> None:
    message = r"one microbatch keeps 2 bytes on rank 0 of the pipeline, more than the 1.5 that it may; give more memory, or more and"
    with pytest.raises(cf.PlanError, match=message):
        SCHEDULES["auto-v"].table(2, 4, StageCosts.uniform(4), 1.5)


def test_groups_of_interleaved() -> None:
    message = r"'interleaved-1f1b' takes groups of 4 microbatches on 4 ranks, which do not divide 6; give microbatches=8, or another"
    with pytest.raises(cf.PlanError, match=message):
        SCHEDULES["interleaved-1f1b"].table(4, 6)


@pytest.mark.parametrize(
    ("name", "microbatches", "rows", "says"),
    [
        ("interleaved-1f1b", 6, 24, "do not divide 6; give microbatches=4 or 8 or 12 or 24, which divide the 24 rows of the batch"),
        ("interleaved-1f1b", 6, 6, "no such number divides the 6 rows of the batch: pad it to a multiple of 4, or give another schedule"),
        ("dualpipev", 6, 24, "has 6; give microbatches=8 or 12 or 24, which divide the 24 rows of the batch, or another schedule"),
        ("dualpipev", 6, 6, "no such number divides the 6 rows of the batch: pad it to a multiple of 8, or give another schedule"),
    ],
)
def test_numbers_that_are_advised_divide_the_batch(name: str, microbatches: int, rows: int, says: str) -> None:
    with pytest.raises(cf.PlanError, match=re.escape(says)) as refused:
        SCHEDULES[name].check_microbatches(4, microbatches, rows)
    advised = re.search(r"microbatches=([\d or]+),", str(refused.value))
    for number in advised.group(1).split(" or ") if advised else ():
        assert rows % int(number) == 0
        SCHEDULES[name].check_microbatches(4, int(number), rows)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: SCHEDULES["1f1b"].table(0, 4), "schedule '1f1b' was given 0 ranks; give a number from 1 on"),
        (lambda: SCHEDULES["1f1b"].table(2, 2.5), "schedule '1f1b' was given 2.5 microbatches; give a number from 1 on"),
        (lambda: StageCosts.uniform(2, float("nan")), "forward_s of a stage is nan; give seconds and bytes of at least 0"),
        (
            lambda: cf.ext.Schedule("mine", lambda *args: [["0F0"]]).table(1, 1),
            "schedule 'mine' made a list; its `make` returns a cf.ext.ActionTable",
        ),
    ],
)
def test_what_is_no_schedule_is_named(wrong: Callable[[], object], says: str) -> None:
    with pytest.raises(cf.PlanError, match=says):
        wrong()


def test_text_and_trace_of_a_simulated_table() -> None:
    simulated = played("1f1b", 2, 2, StageCosts.uniform(2, 1, 0.5, 0.5))
    assert simulated.text(18) == "rank 0  0FF1FF   0BB   1BB\nrank 1     0FF0BB1FF1BB"
    events = cf.ext.chrome_events(simulated)["traceEvents"]
    assert [event["name"] for event in events if event["ph"] == "X"] == "0F0 0F1 0B0 0B1 1F0 1B0 1F1 1B1".split()
    assert max(event["args"]["bytes"] for event in events if event["ph"] == "C") == 2


def test_text_of_a_v_has_later_stages_in_small_letters() -> None:
    simulated = played("zb-v", 2, 2, StageCosts.uniform(4))
    width = 2 * round(simulated.makespan_s)
    assert simulated.text(width).splitlines()[0] == "rank 0  0F1F  0f0i1f1i0I0w1I0W1w1W"


def test_sends_of_a_rank_leave_one_after_another() -> None:
    table = cf.ext.ActionTable.parse(["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"])
    simulated = simulate(table, StageCosts.uniform(2, send=3.0))
    assert [span.start_s for span in simulated.rows[1]] == [4.0, 7.0, 8.0, 10.0]
    assert [span.start_s for span in simulated.rows[0]] == [0.0, 1.0, 13.0, 16.0]


def test_costs_of_another_number_of_stages() -> None:
    with pytest.raises(cf.PlanError, match="a table of 2 stages was given costs of 3; give a figure per stage"):
        simulate(SCHEDULES["1f1b"].table(2, 2), StageCosts.uniform(3))
    with pytest.raises(cf.PlanError, match="costs of 2 stages have 2 figures send_s; give 1"):
        StageCosts((1, 1), (1, 1), (1, 1), (0, 0), (0,), (1, 1), (1, 1))
