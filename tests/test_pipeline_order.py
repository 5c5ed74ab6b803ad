"""What real ranks do in a pipeline, in which order, beside the simulator's order and that of the rank's program.

A rank's order is a list of words: "0F2" (an action that it begins), "1 -> 2" (what came from rank 1, for microbatch 2) and "2 <- 1" (what
it sends to rank 1, of microbatch 2).
"""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from pipelined import loop_of, mlp

import colofunc as cf
from colofunc.executors.groups import Groups
from colofunc.executors.launch import launch
from colofunc.executors.messages import Ahead, Receiver
from colofunc.program.ir import Loop
from colofunc.program.places import RECEIVE, SEND, on_rank

RANKS, MICROBATCHES = 4, 8
SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-v")


def pipelined(schedule: str) -> tuple[Any, Any, Any]:
    step, state, batch = mlp(8)
    return cf.pipeline(cf.shard(step, cf.Mesh(pp=RANKS)), microbatches=MICROBATCHES, schedule=schedule), state, batch


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


def done_in_a_step(schedules: tuple[str, ...]) -> dict[str, list[str]]:
    """By schedule, what this rank does."""
    begun, sender, received = Ahead.__iter__, Groups.sender, Receiver.__call__
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

        def beginning(ahead: Ahead, recorded: Recorded = recorded) -> Iterator[tuple[int, int]]:
            return recorded.actions(begun(ahead))

        patched = mock.patch.multiple(Ahead, __iter__=beginning), mock.patch.multiple(Receiver, __call__=receiving)
        with patched[0], patched[1], mock.patch.multiple(Groups, sender=sending):
            chain(chain.init(state, batch), batch)
        found[schedule] = recorded.words
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_program_of_a_rank_has_the_simulators_order(schedule: str) -> None:
    chain, state, batch = pipelined(schedule)
    low = chain.lower(state, batch)
    played = [[span.action for span in row] for row in low.pipeline().rows]
    assert played == [list(row) for row in cf.ext.schedule(schedule).table(RANKS, MICROBATCHES).rows]
    for rank in range(RANKS):
        assert of_program(low, rank) == of_table(played, rank)


@pytest.mark.dist
def test_real_ranks_do_what_the_simulator_says_in_its_order() -> None:
    done = launch(done_in_a_step, RANKS, SCHEDULES)
    for schedule in SCHEDULES:
        costs = cf.ext.StageCosts.uniform(cf.ext.schedule(schedule).stages(RANKS))
        simulated = cf.ext.simulate(cf.ext.schedule(schedule).table(RANKS, MICROBATCHES), costs)
        played = [[span.action for span in row] for row in simulated.rows]
        for rank in range(RANKS):
            assert done[rank][schedule] == of_table(played, rank)
