"""Measured, planned again: the same numbers, other copies where times are others, and the old plan where there is no better one."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from colofunc_plugins import gemini, zero
from test_offload import one, peak, training

import colofunc as cf
from colofunc.compiler import step_compiler, warmup
from colofunc.executors.launch import launch
from colofunc.executors.profile import Clock
from colofunc.program.cost import node_s
from colofunc.program.facts import is_copy
from colofunc.program.timed import call, measured_nodes, timings
from colofunc.testing.trees import compare


def told(seconds: Any) -> type[Clock]:
    """A clock for which an operator takes what somebody says, `seconds(node)`."""

    class Told(Clock):
        def one_step(self, run: Any) -> list[tuple[int, float, float]]:
            super().one_step(run)
            return [(site, 0.0, seconds(node)) for site, node in enumerate(self.nodes)]

    return Told


def slow_updates(node: Any) -> float:
    """Updates on the device take long, so they had better run on the host."""
    return 1e-4 if node.phase == "update" else 1e-6


def moves(low: Any) -> list[tuple[int, str]]:
    """Every copy, with how many operators that compute stand before it."""
    found, before = [], 0
    for node in low.program.nodes:
        if is_copy(node):
            found.append((before, node.target))
        before += node.target.startswith("aten")
    return found


def offloaded(mesh: cf.Mesh, share: float, *plans: Any, **options: Any) -> tuple[Any, Any]:
    step, *args = training(layers=2, d=24, rows=32)
    whole = peak(cf.shard(step, mesh, *plans), *args)
    return cf.offload(cf.shard(step, mesh, *plans), budget=int(share * whole), **options), (step, *args)


def steps(run: Any, count: int, state: Any, batch: Any) -> Any:
    for _ in range(count):
        state, _ = run(state, batch)
    return state


def test_what_was_measured_stands_for_equal_calls_and_scales_the_others() -> None:
    model = lambda node, values: 1.0  # noqa: E731
    step, *args = training(layers=2, d=16, rows=8)
    program = cf.shard(step, one()).lower(*args).program
    nodes = list(measured_nodes(program))
    timed = timings(program, [3.0 if node.target == "colofunc.linear" else 2.0 for node, _ in nodes], model)
    assert {timed.node_s(node, values, model) for node, values in nodes if node.target == "colofunc.linear"} == {3.0}
    other = cf.shard(step, one()).lower(args[0], {k: torch.ones(4, 16, dtype=torch.float64) for k in "xy"}).program
    unseen = [timed.node_s(n, v, model) for n, v in measured_nodes(other) if call(n, v) not in timed.seconds and n.target[:4] == "aten"]
    assert unseen and set(unseen) == {timed.ratio} and 2.0 < timed.ratio < 3.0


def test_a_loop_takes_as_long_as_all_trips_of_its_body() -> None:
    step, *args = training(layers=2, d=16, rows=8)
    program = cf.accumulate(cf.shard(step, one()), microbatches=4).lower(*args).program
    nodes = list(measured_nodes(program))
    model = lambda node, values: 0.0  # noqa: E731
    timed = timings(program, [1.0] * len(nodes), model)
    (loop,) = (node for node in program.nodes if node.loop is not None)
    inside = [n for n in loop.loop.body.nodes if timed.node_s(n, loop.loop.body.values, model)]
    assert timed.node_s(loop, program.values, model) == 4 * len(inside) > 0


def test_other_times_give_another_plan_and_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "Clock", told(slow_updates))
    staged, (step, *args) = offloaded(one(), 0.6, measure=2)
    first = staged.lower(*args)
    state, batch = steps(staged, 2, staged.init(*args), args[1]), args[1]
    assert staged.lower(state, batch) is first
    old = state
    state = steps(staged, 1, state, batch)
    then = staged.lower(state, batch)
    assert then is not first and moves(then) != moves(first)
    assert then.memory().peak_bytes["device"] <= 0.6 * peak(cf.shard(step, one()), *args)
    with pytest.raises(cf.ConsumedError):
        old["params"]["0.1.weight"].full()
    state = steps(staged, 2, state, batch)
    assert compare(state, steps(step, 5, *args)) == 0.0
    assert staged.lower(state, batch) is then and staged.lower(*args) is then  # whoever begins anew begins with it


def test_a_policy_asks_for_it_and_state_goes_where_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "Clock", told(slow_updates))
    staged, (step, *args) = offloaded(one(), 0.7, policy=gemini("auto", warmup=1))
    assert staged.transform("offload").options["measure"] == 1
    assert compare(steps(staged, 3, staged.init(*args), args[1]), steps(step, 3, *args)) == 0.0


def test_a_plan_that_is_no_faster_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that says what the model says: the plan is the best that is known already."""
    staged, (_, *args) = offloaded(one(), 0.6, measure=1)
    low = staged.lower(*args)
    model = partial(node_s, mesh=low.mesh, rule_of=low.registry.rule)
    monkeypatch.setattr(warmup, "Clock", told(lambda node: model(node, low.program.values)))
    state = steps(staged, 3, staged.init(*args), args[1])
    assert staged.lower(state, args[1]) is low


def test_a_plan_that_cannot_be_made_leaves_the_old_one_standing(monkeypatch: pytest.MonkeyPatch) -> None:
    staged, (step, *args) = offloaded(one(), 0.6, measure=1)
    state, prepare = steps(staged, 1, staged.init(*args), args[1]), step_compiler.prepare

    def failing(*args: Any) -> Any:
        if len(args) > 4:
            raise cf.PlanError("nothing fits any more")
        return prepare(*args)

    monkeypatch.setattr(step_compiler, "prepare", failing)
    with pytest.warns(UserWarning, match=r"keeps its plan: none could be made .* \(nothing fits any more\)"):
        state = steps(staged, 1, state, args[1])
    assert compare(steps(staged, 1, state, args[1]), steps(step, 3, *args)) == 0.0


def test_a_simulated_mesh_is_not_measured_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    staged, (step, *args) = offloaded(cf.Mesh(dp=2, topology="2xa100-40g"), 0.9, zero(1, "dp"), measure=1)
    compare(steps(staged, 2, staged.init(*args), args[1]), steps(step, 2, *args))
    assert "is not measured: times of a simulated mesh say nothing of its ranks" in capsys.readouterr().err


@pytest.mark.parametrize("measure", [-1, 2.0, True])
def test_steps_to_measure_are_a_whole_number(measure: Any) -> None:
    with pytest.raises(cf.InputError, match="give how many first steps are timed, such as 2"):
        cf.offload(measure=measure)
    with pytest.raises(cf.PlanError, match="give how many first steps are measured"):
        gemini(warmup=-1)


def two_ranks() -> tuple[Any, str, bool]:
    """Each rank has other times; what the slower one says holds for both."""
    slow = dist.get_rank() == 1
    warmup.Clock = told(lambda node: slow_updates(node) if slow else 1e-6)  # type: ignore[misc]
    staged, (_, *args) = offloaded(cf.Mesh(dp=2, topology="2xa100-40g"), 0.8, zero(1, "dp"), measure=1)
    first = staged.lower(*args)
    state = steps(staged, 3, staged.init(*args), args[1])
    low = staged.lower(state, args[1])
    return {name: x.full() for name, x in state["params"].items()}, low.text(), low is not first


@pytest.mark.dist
def test_real_ranks_decide_alike_by_the_slowest_of_them() -> None:
    (params, text, other), (same, text_, _) = launch(two_ranks, 2)
    step, *args = training(layers=2, d=24, rows=32)
    assert other and text == text_ and compare(params, same) == 0.0
    compare(params, steps(step, 3, *args)["params"])
