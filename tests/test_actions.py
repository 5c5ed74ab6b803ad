"""Tables of actions: text and CSV, what is wrong with a table, and one order for all ranks."""

from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import _Action

import colofunc as cf
from colofunc.plugins import build_registry
from colofunc.plugins.registry import schedule_named
from colofunc.program.actions import Action, ActionTable, check_table, linear_order

GOOD = ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")


def refuses(message: str, *rows: str, **options: Any) -> None:
    with pytest.raises(cf.PlanError) as error:
        check_table(ActionTable.parse(rows), **options)
    assert str(error.value) == message


# ---- text ----


@given(st.integers(0, 99), st.sampled_from("FBIW"), st.integers(0, 999))
def test_an_action_is_written_as_torch_writes_it(stage: int, kind: str, microbatch: int) -> None:
    action = Action(stage, kind, microbatch)
    assert Action.parse(str(action)) == action
    assert repr(_Action.from_str(str(action))) == str(action)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F0", "'F0' is no action; write stage, kind and microbatch, such as 2F0"),
        ("2f0", "'2f0' is no action; write stage, kind and microbatch, such as 2F0"),
        ("2F", "'2F' names no microbatch; write 2F0 for the first"),
        (
            "2SEND_F0",
            "'2SEND_F0': 'SEND_F' is none of the kinds F, B, I, W; leave sends, receives and gathers out, which follow from these",
        ),
    ],
)
def test_what_is_no_action(text: str, message: str) -> None:
    with pytest.raises(cf.PlanError) as error:
        Action.parse(text)
    assert str(error.value) == message


def test_a_kind_that_there_is_not() -> None:
    with pytest.raises(cf.PlanError, match=r"an action has the kind 'X'; it is F \(forward\), B"):
        Action(0, "X", 0)


def test_csv_goes_both_ways_and_blanks_are_left_out() -> None:
    table = ActionTable.parse(GOOD)
    assert table.to_csv() == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    assert ActionTable.from_csv(table.to_csv()) == table
    assert ActionTable.from_csv("0F0,0F1,,,0B0,,0B1\n,1F0,1B0,1F1,1B1\n") == table
    with pytest.raises(cf.PlanError, match=r"^line 2 of a table of actions: '1X0': 'X' is none of the kinds"):
        ActionTable.from_csv("0F0,0B0\n1X0,1B0\n")


# ---- what is wrong ----


def test_good_tables() -> None:
    table = ActionTable.parse(GOOD)
    check_table(table, stages=2, microbatches=2)
    assert (table.stages, table.microbatches, dict(table.rank_of)) == (2, 2, {0: 0, 1: 1})
    check_table(ActionTable.parse(["0F0 0I0 0W0", "1F0 1B0"]))  # a mixed one
    check_table(ActionTable.parse(["0F0 0F1", "1F0 1F1"]), backward=False)


def test_missing_and_repeated() -> None:
    lacks = "a table for 2 stages and 2 microbatches lacks "
    refuses(lacks + "1F1, 1B1 (or 1I1 and 1W1)", GOOD[0], "1F0 1B0")
    refuses(lacks + "1W1", GOOD[0], "1F0 1B0 1F1 1I1")
    refuses("a table for 3 stages and 2 microbatches lacks 2F0, 2B0 (or 2I0 and 2W0), 2F1, 2B1 (or 2I1 and 2W1)", *GOOD, stages=3)
    refuses("a table for 2 stages and 1 microbatches has 0F1, 0B1, 1F1, 1B1; numbers begin at 0", *GOOD, microbatches=1)
    refuses("a table has 1F1 more than once; a stage does an action once for a microbatch", GOOD[0], "1F0 1B0 1F1 1F1 1B1")
    refuses("a table has 1B1 and 1W1: B is I and W in one; write B alone, or I and W", GOOD[0], "1F0 1B0 1F1 1B1 1W1")
    refuses("a table of forwards alone has 0B0, 0B1, 1B0, 1B1; leave backwards out", *GOOD, backward=False)
    refuses("stage 1 is on rank 0 and, by 1F0, on rank 1; give a stage to one rank", "0F0 1F1 0F1 0B0 0B1", "1F0 1B0 1B1")


def test_wrong_order() -> None:
    refuses("rank 1 has 1B0 before 1F0, which it needs; put 1F0 first", GOOD[0], "1B0 1F0 1F1 1B1")
    refuses("rank 0 has 0W0 before 0I0, which it needs; put 0I0 first", "0F0 0W0 0I0", "1F0 1B0")
    refuses(
        "a table of actions ends in a deadlock: 0B0 waits for 1B0, which stands behind 1F1 on rank 1; 1F1 waits for 0F1, which stands "
        "behind 0B0 on rank 0; change the order on one of these ranks",
        "0F0 0B0 0F1 0B1",
        "1F0 1F1 1B0 1B1",
    )


def test_an_order_of_what_is_not_there() -> None:
    with pytest.raises(cf.PlanError, match="1F0 on rank 1 waits for 0F0, which no rank runs; add it"):
        list(linear_order(ActionTable.parse(["", "1F0 1B0"])))


@st.composite
def tables(draw: st.DrawFn) -> ActionTable:
    """Every action of a few stages on ranks of their own, in any order that keeps each stage's own: with and without deadlock."""
    stages, microbatches = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    rows = []
    for stage in range(stages):
        lists = []
        for microbatch in range(microbatches):
            kinds = draw(st.sampled_from(["FB", "FIW"]))
            lists.append([Action(stage, kind, microbatch) for kind in kinds])
        row = []
        while any(lists):
            row.append(draw(st.sampled_from([one for one in lists if one])).pop(0))
        rows.append(tuple(row))
    return ActionTable(tuple(rows))


def has_order(table: ActionTable) -> bool:
    """By search over all states: how far each rank has come."""
    reached = {(0,) * table.ranks}
    goal = tuple(map(len, table.rows))
    waiting = list(reached)
    while waiting:
        at = waiting.pop()
        done = {action for row, end in zip(table.rows, at) for action in row[:end]}
        for rank, row in enumerate(table.rows):
            if at[rank] < len(row) and set(table.needs(row[at[rank]])) <= done:
                after = (*at[:rank], at[rank] + 1, *at[rank + 1 :])
                if after not in reached:
                    reached.add(after)
                    waiting.append(after)
    return goal in reached


@given(tables())
@settings(max_examples=200, deadline=None)
def test_an_order_is_found_exactly_where_there_is_one(table: ActionTable) -> None:
    if not has_order(table):
        with pytest.raises(cf.PlanError, match="ends in a deadlock: "):
            check_table(table)
        return
    check_table(table)
    order = list(linear_order(table))
    for rank, row in enumerate(table.rows):
        assert tuple(action for place, action in order if place == rank) == row
    position = {action: index for index, (_, action) in enumerate(order)}
    for action in position:
        assert all(position[need] < position[action] for need in table.needs(action))


# ---- schedules ----

SCHEDULES = build_registry().schedules


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_legal_for_every_size(name: str) -> None:
    for ranks, more in product((1, 2, 3, 4, 8), (0, 1, 2, 5, 12)):
        groups = more * ranks if SCHEDULES[name].whole_groups else more
        SCHEDULES[name].table(ranks, SCHEDULES[name].least_microbatches(ranks) + groups)


def test_placements() -> None:
    loop = cf.ext.Schedule("a", len, stages_per_rank=2)  # type: ignore[arg-type]
    assert [loop.rank_of(stage, 3) for stage in range(6)] == [0, 1, 2, 0, 1, 2]
    vee = cf.ext.Schedule("a", len, stages_per_rank=2, placement="v")  # type: ignore[arg-type]
    assert [vee.rank_of(stage, 3) for stage in range(6)] == [0, 1, 2, 2, 1, 0]


def test_mistakes_of_a_schedule_name_it() -> None:
    wrong = cf.ext.Schedule("wrong", lambda p, m, costs, cap: ActionTable.parse(["1F0 1B0", "0F0 0B0"]))
    with pytest.raises(cf.PlanError, match=r"schedule 'wrong' has stage 1 on rank 0, and its placement 'loop' says rank 1; change one"):
        wrong.table(2, 1)
    with pytest.raises(cf.PlanError, match=r"schedule 'wrong' on 2 ranks: a table for 2 stages and 2 microbatches lacks 0F1"):
        wrong.table(2, 2)
    many = cf.ext.Schedule("many", len, least_per_rank=2)  # type: ignore[arg-type]
    with pytest.raises(cf.PlanError, match=r"'many' needs at least 8 microbatches on 4 ranks and has 7; give microbatches=8, or another"):
        many.table(4, 7)
    with pytest.raises(cf.PlanError, match=r"schedule '1f1b' has 2 stages on 2 ranks and was given costs of 3"):
        SCHEDULES["1f1b"].table(2, 2, cf.ext.StageCosts.uniform(3))
    with pytest.raises(cf.PlanError, match=r"has the placement 'u'; give 'loop' or 'v'"):
        cf.ext.Schedule("a", len, placement="u")  # type: ignore[arg-type]


def test_a_name_that_there_is_not() -> None:
    with pytest.raises(cf.PlanError, match=r"there is no pipeline schedule '1fib'; did you mean '1f1b'"):
        schedule_named("1fib")
