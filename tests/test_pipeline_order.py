"""What real ranks do in a pipeline, in which order, beside the simulator's order and that of the rank's program.

A rank's order is a list of words: "0F2" (an action that it begins), "1 -> 2" (what came from rank 1, for microbatch 2) and "2 <- 1" (what
it sends to rank 1, of microbatch 2).
"""

import random
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from pipelined import loop_of, mlp
from test_pipeline import losses_of_one_device

import colofunc as cf
from colofunc.executors.groups import ProcessGroups
from colofunc.executors.launch import launch
from colofunc.executors.messages import PostedActions, Receiver
from colofunc.program.ir import Loop
from colofunc.program.places import RECEIVE, SEND, on_rank

RANKS, MICROBATCHES = 4, 8
SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-v", "any-legal")


def any_legal(ranks: int, microbatches: int, *_: Any) -> cf.ext.ActionTable:
    """Two stages a rank in a V; who goes on, and with what, is drawn among all that could."""
    draw = random.Random(5)
    places = [*range(ranks), *reversed(range(ranks))]
    rows: list[list[cf.ext.Action]] = [[] for _ in range(ranks)]
    left = [cf.ext.Action(stage, kind, m) for stage in range(2 * ranks) for kind in "FIW" for m in range(microbatches)]
    needs = cf.ext.ActionTable((tuple(left),)).needs
    while left:
        done = {action for row in rows for action in row}
        chosen = draw.choice([action for action in left if done.issuperset(needs(action))])
        rows[places[chosen.stage]].append(chosen)
        left.remove(chosen)
    return cf.ext.ActionTable(tuple(map(tuple, rows)))


PLUGIN = types.ModuleType("any_legal")
ANY_LEGAL = cf.ext.Schedule("any-legal", any_legal, stages_per_rank=2, placement="v", splits_backward=True)
PLUGIN.colofunc_schedules = cf.hookimpl(lambda: {"any-legal": ANY_LEGAL}, specname="colofunc_schedules")


def table_of(schedule: str) -> cf.ext.ActionTable:
    made = ANY_LEGAL if schedule == "any-legal" else cf.ext.schedule_named(schedule)
    return made.table(RANKS, MICROBATCHES)


def pipelined(schedule: str) -> tuple[Any, Any, Any]:
    step, state, batch = mlp(8)
    step = cf.shard(step, cf.Mesh(pp=RANKS), plugins=[PLUGIN])
    return cf.pipeline(step, microbatches=MICROBATCHES, schedule=schedule), state, batch


def of_table(rows: list[list[cf.ext.Action]], rank: int) -> list[str]:
    """What follows from who needs what. rows: of all ranks.

    The first stage has nobody to give a gradient to: its I is empty, and its W is the first to read what came.
    """
    rank_of = {action.stage: number for number, row in enumerate(rows) for action in row}
    words = []
    for action in rows[rank]:
        before, behind = rank_of.get(action.stage - 1, rank), rank_of.get(action.stage + 1, rank)
        reads = {"F": before, "I": behind if action.stage else rank, "B": behind, "W": rank if action.stage else behind}
        gives = {"F": behind, "I": before, "B": before, "W": rank}
        words.append(str(action))
        if reads[action.kind] != rank:
            words.append(f"{reads[action.kind]} -> {action.microbatch}")
        if gives[action.kind] != rank:
            words.append(f"{action.microbatch} <- {gives[action.kind]}")
    return words


def of_program(low: Any, rank: int) -> list[str]:
    """What stands in a rank's program, action after action."""
    loop = loop_of(on_rank(low.program, low.mesh, rank).program)
    spans = dict(zip(loop.cut_by.parts, loop.cut_by.spans(), strict=True))
    words = []
    for action in loop.cut_by.table.rows[0]:
        words.append(str(action))
        first, end = spans[action.stage, action.kind]
        for node in loop.body.nodes[first:end]:
            words += [word for word in (message(node, action.microbatch),) if word]
    return words


def message(node: Any, microbatch: int) -> str:
    if node.target == RECEIVE:
        return f"{node.args[2]} -> {microbatch}"
    return f"{microbatch} <- {node.args[4][0]}" if node.target == SEND else ""


class Recorded:
    """What a rank does within the loop of a step, while it does it."""

    def __init__(self, loop: Loop) -> None:
        self.loop, self.words, self.inside = loop, [], False
        self.nodes = {(node.target, dict(node.kwargs)["tag"]): node for node in loop.body.nodes if node.target in (SEND, RECEIVE)}

    def message(self, target: str, number: int) -> None:
        tag, microbatch = divmod(number, self.loop.trips)
        if self.inside:
            self.words.append(message(self.nodes[target, tag], microbatch))

    def actions(self, order: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        self.inside = True
        for part, microbatch in order:
            stage, kind = self.loop.cut_by.parts[part]
            self.words.append(f"{stage}{kind}{microbatch}")
            yield part, microbatch
        self.inside = False


def done_in_a_step(schedules: tuple[str, ...]) -> dict[str, tuple[list[str], list[float]]]:
    """By schedule, (what this rank does in a step, the losses of that step and the next one)."""
    begun, sender, received = PostedActions.__iter__, ProcessGroups.sender, Receiver.__call__
    found = {}
    for schedule in schedules:
        chain, state, batch = pipelined(schedule)
        low = chain.lower(state, batch)
        recorded = Recorded(loop_of(on_rank(low.program, low.mesh, low.mesh.rank).program))

        def sending(*about: Any, recorded: Recorded = recorded) -> Any:
            send = sender(*about)

            def sent(x: torch.Tensor, tag: int, **how: Any) -> torch.Tensor:
                recorded.message(SEND, tag)
                return send(x, tag, **how)

            return sent

        def receiving(receiver: Receiver, tag: int, recorded: Recorded = recorded) -> torch.Tensor:
            recorded.message(RECEIVE, tag)
            return received(receiver, tag)

        def beginning(ahead: PostedActions, recorded: Recorded = recorded) -> Iterator[tuple[int, int]]:
            return recorded.actions(begun(ahead))

        patched = mock.patch.multiple(PostedActions, __iter__=beginning), mock.patch.multiple(Receiver, __call__=receiving)
        with patched[0], patched[1], mock.patch.multiple(ProcessGroups, sender=sending):
            state, metrics = chain(chain.init(state, batch), batch)
        _, next_metrics = chain(state, batch)
        found[schedule] = recorded.words, [float(metrics["loss"]), float(next_metrics["loss"])]
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_program_of_a_rank_has_the_simulators_order(schedule: str) -> None:
    chain, state, batch = pipelined(schedule)
    low = chain.lower(state, batch)
    played = [[span.action for span in row] for row in low.pipeline().rows]
    assert played == [list(row) for row in table_of(schedule).rows]
    for rank in range(RANKS):
        assert of_program(low, rank) == of_table(played, rank)


@pytest.mark.dist
def test_four_real_ranks_follow_the_simulators_order_and_compute_what_one_device_does() -> None:
    """Also by a table that nobody would make: every legal one ends."""
    expected = losses_of_one_device()
    done = launch(done_in_a_step, RANKS, SCHEDULES, timeout_s=200)
    for schedule in SCHEDULES:
        table = table_of(schedule)
        simulated = cf.ext.simulate(table, cf.ext.StageCosts.uniform(table.stages))
        played = [[span.action for span in row] for row in simulated.rows]
        for rank in range(RANKS):
            words, losses = done[rank][schedule]
            assert words == of_table(played, rank)
            assert losses == pytest.approx(expected, rel=1e-10)
