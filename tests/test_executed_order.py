"""No executor reorders: operators run in the order that the plan's seconds and bytes were counted in.

That is `low.program`, which accountant and clock are given; planned for real ranks, its collectives are started early. What runs is
recorded as it is called; collectives and rearrangements, which are written in other ways, are looked at in the source of the step: each
of its lines is of a node.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import pytest
from colofunc_plugins import zero

import colofunc as cf
from colofunc.executors import distributed, simulated, source
from colofunc.executors.distributed import Distributed
from colofunc.executors.launch import launch
from colofunc.program.facts import is_copy
from colofunc.program.ir import Program
from colofunc.program.memory import memory
from colofunc.program.passes.schedule import waits_within
from colofunc.program.places import has_places, on_rank
from colofunc.program.text import text
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
    return ran, [node.target for node in low.program.nodes]


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    """The programs that a backend of real ranks has written, without processes."""
    programs_given: list[Program] = []
    monkeypatch.setattr(distributed, "RankProgram", lambda program, *args, **kwargs: programs_given.append(program))
    monkeypatch.setattr(Distributed, "_groups_of", lambda self, mesh: None)
    return programs_given


def backend_of(rank: int) -> Distributed:
    backend: Distributed = object.__new__(Distributed)
    backend.rank, backend.watch, backend._carriers = rank, None, {"cpu": "gloo"}
    return backend


@pytest.mark.parametrize("wrap", list(WRAPPED))
def test_real_ranks_are_given_what_was_counted(wrap: str, given: list[Program]) -> None:
    step, state, batch = staged(wrap)
    low = step.on("distributed").lower(state, batch)
    backend_of(0).compile(low.program, low.mesh)
    assert given == [low.program] and waits_within(low.program)
    assert any(is_copy(node) for node in low.program.nodes) == (wrap == "offloaded")


def test_ranks_of_a_pipeline_are_given_their_part_of_what_was_counted(given: list[Program]) -> None:
    """The union of all ranks' programs is in its order, and what a rank runs is what is left of it without the others' nodes."""
    step = programs.attention_block(batch=8)
    mesh = cf.Mesh(pp=2, dp=2)
    chain = cf.pipeline(cf.shard(step.fn, mesh, zero(1, "dp")), microbatches=4).on("distributed")
    low = chain.lower(step.state, step.batch)
    assert has_places(low.program) and waits_within(low.program)
    for rank in range(mesh.size):
        backend_of(rank).compile(low.program, low.mesh)
        part = on_rank(low.program, low.mesh, rank)
        assert text(given[rank]) == text(part.program)
        assert list(part.nodes) == sorted(part.nodes)
        counted = low.memory(rank=rank).timeline["device"]
        assert len(counted) == len(memory(part.program, sent=True).timeline["device"])


@pytest.mark.sweep
@pytest.mark.dist
def test_real_ranks_run_what_was_counted_in_its_order() -> None:
    for ran, counted in launch(real_rank, 2, "sharded", timeout_s=100):
        kinds = set(ran)
        assert len(kinds) > 8
        assert once_each(ran) == once_each([target for target in counted if target in kinds])
