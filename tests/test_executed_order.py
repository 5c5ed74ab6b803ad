"""No executor reorders: operators run in the order that the plan's seconds and bytes were counted in.

That is the program itself on the simulated mesh (`low.program`), and on real ranks the program with its collectives started early
(`low.ordered()`, which accountant and clock are given). What runs is recorded as it is called; collectives and rearrangements, which
are written in other ways, are looked at in the source of the step: each of its lines is of a node.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import pytest
from colofunc_plugins import zero

import colofunc as cf
from colofunc.executors import simulated, source
from colofunc.executors.distributed import Distributed
from colofunc.executors.launch import launch
from colofunc.program.facts import is_copy
from colofunc.program.ir import Program
from colofunc.testing import programs

AXES = dict(dp=2)
WRAPPED: dict[str, Callable[[Any], Any]] = {
    "sharded": lambda step: step,
    "offloaded": lambda step: cf.offload(step, policy="host"),
    "made again": lambda step: cf.checkpoint(step, policy="nothing"),
}


def staged(wrap: str) -> tuple[Any, Any, Any]:
    step = programs.attention_block(batch=8)
    return WRAPPED[wrap](cf.shard(step.fn, cf.Mesh(**AXES), zero(3, "dp"))), step.state, step.batch


@contextmanager
def recorded() -> Iterator[list[str]]:
    """The targets of ordinary operators, as they are called."""
    ran: list[str] = []
    found = source.callable_of

    @functools.cache  # the source has one name for one object
    def recording(target: str, dims: int | None = None) -> Callable[..., Any]:
        kernel = found(target, dims)

        def call(*args: Any, **kwargs: Any) -> Any:
            ran.append(target)
            return kernel(*args, **kwargs)

        return call

    source.callable_of = recording
    try:
        yield ran
    finally:
        source.callable_of = found


def once_each(targets: list[str]) -> list[str]:
    """Ranks that do not share an operator's result call it one after another, as nodes of one kind do."""
    return [target for target, _ in groupby(targets)]


def in_order(program: Program, ran: list[str]) -> None:
    kinds = set(ran)
    assert len(kinds) > 8, "hardly anything was recorded"
    assert once_each(ran) == once_each([node.target for node in program.nodes if node.target in kinds])


@pytest.mark.parametrize("wrap", list(WRAPPED))
def test_the_simulated_mesh_runs_the_program_in_its_order(wrap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLOFUNC_NATIVE", "off")
    step, state, batch = staged(wrap)
    written: list[source.Writer] = []
    write = simulated.SimulatedProgram.write

    def writing(self: Any, *args: Any, **kwargs: Any) -> source.Writer:
        written.append(write(self, *args, **kwargs))
        return written[-1]

    monkeypatch.setattr(simulated.SimulatedProgram, "write", writing)
    low = step.lower(state, batch)
    state = step.init(state, batch)
    written.clear()
    with recorded() as ran:
        step(state, batch)
    assert low.ordered() is low.program
    in_order(low.program, ran)
    (writer,) = [writer for writer in written if writer.program is low.program]
    assert writer.origin == sorted(writer.origin)
    assert {low.program.nodes[number].target for number in writer.origin} >= {node.target for node in low.program.nodes}


def real_rank(wrap: str) -> tuple[list[str], list[str]]:
    """(what this rank ran in a step, the operators of the program that was counted)"""
    step, state, batch = staged(wrap)
    low = step.lower(state, batch)
    state = step.init(state, batch)
    with recorded() as ran:
        step(state, batch)
    return ran, [node.target for node in low.ordered().nodes]


@pytest.mark.parametrize("wrap", list(WRAPPED))
def test_real_ranks_are_given_what_was_counted(wrap: str) -> None:
    """Without processes: the order in which their backend has a program written is the one that the plan's figures are of."""
    step, state, batch = staged(wrap)
    low = step.on("distributed").lower(state, batch)
    given = Distributed.order(object.__new__(Distributed), low.program)
    assert given.nodes == low.ordered().nodes
    copies = any(is_copy(node) for node in low.program.nodes)
    assert copies == (wrap == "offloaded") and (given is low.program) == copies  # with its copies a program is as it runs


@pytest.mark.sweep
@pytest.mark.dist
def test_real_ranks_run_what_was_counted_in_its_order() -> None:
    for ran, counted in launch(real_rank, 2, "sharded", timeout_s=100):
        kinds = set(ran)
        assert len(kinds) > 8
        assert once_each(ran) == once_each([target for target in counted if target in kinds])
