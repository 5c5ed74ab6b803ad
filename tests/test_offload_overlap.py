"""Collectives that run while a step copies between tiers: started in front of the work that hides them, as planned, within the budget."""

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from test_chunks import LAYERS, agrees_to_the_byte, deep
from test_executors import program

import colofunc as cf
from colofunc.planner.offload.residency import Residency, ScheduledCopy, reside
from colofunc.planner.offload.trace import ground_of, trace_of_ground, write_copies
from colofunc.program.cost import node_s
from colofunc.program.facts import is_copy, is_wire
from colofunc.program.ir import Ref
from colofunc.program.lanes import played
from colofunc.program.memory import memory
from colofunc.program.passes.overlapped import overlapped

R = Ref


def test_an_offloaded_zero3_step_gathers_and_reduces_under_its_work() -> None:
    """Every collective is started; each gather is under way while the layer before computes, each reduction under the next backward."""
    step, state, batch = deep()
    alone = step.on("distributed").lower(state, batch).memory().peak_bytes["device"]
    budget = alone * 7 // 10
    low = cf.offload(step, budget=budget).on("distributed").lower(state, batch)
    nodes = low.program.nodes
    assert any(map(is_copy, nodes)) and low.memory().peak_bytes["device"] <= budget
    assert all(node.target.endswith("_start") for node in nodes if is_wire(node))
    assert overlapped(low.program) is low.program  # what was planned is what runs
    waits = {node.refs[0]: k for k, node in enumerate(nodes) if node.target == "colofunc.wait"}
    gathers = [k for k, node in enumerate(nodes) if "gather" in node.target]
    reduced = [k for k, node in enumerate(nodes) if "reduce_scatter" in node.target]
    assert len(gathers) == 2 * LAYERS - 1 and len(reduced) == LAYERS
    for k in gathers[1:]:
        assert any("colofunc.linear" in node.target for node in nodes[k : waits[nodes[k].outs[0]]])
    for k in reduced[:-1]:
        assert any(node.target == "colofunc.linear_dw" for node in nodes[k : waits[nodes[k].outs[0]]])
    assert all(waits[nodes[k].outs[0]] < later for k, later in pairwise(gathers[::2]))  # no more than two in flight
    agrees_to_the_byte(step, state, batch, low.program, low)


def test_copies_are_planned_beside_work_and_not_beside_what_the_device_does_not_wait_for() -> None:
    """A gather that a product hides takes none of the device's time, so no copy can be hidden behind it."""
    nodes = [
        ("colofunc.all_gather_start", (R(0), ("dp",), 2), (2,)),
        ("aten.mm.default", (R(1), R(1)), (3,)),
        ("colofunc.wait", (R(2),), (4,)),
        ("aten.sin.default", (R(4),), (5,)),
    ]
    p = program([0, 1], nodes, [3, 5], [(8, 8), (512, 512), (2, 8, 8), (512, 512), (2, 8, 8), (2, 8, 8)])
    mesh = cf.Mesh(dp=2, topology="8xa100-80g")
    seconds = partial(node_s, mesh=mesh, rule_of=lambda call: None)
    ground = ground_of(p, mesh, seconds)
    assert seconds(p.nodes[0], p.values) > 0 == ground.device_s[0]
    assert abs(sum(ground.device_s) - played(p, mesh, seconds).end_s) < 1e-12


def with_a_host(nodes: Any, outputs: Any, shapes: Any, on_host: Any) -> Any:
    """(ground of a program whose operators take the device hardly any time, the storages that may move, their trace)."""
    ground = ground_of(program([0], nodes, outputs, shapes), cf.Mesh(topology="a100-40g"), lambda node, values: 1e-6)
    return ground, *trace_of_ground(ground, frozenset(on_host), {}, 1 << 30)


@pytest.mark.parametrize("there", ["aten.sin.default", "aten.neg_.default"])
def test_a_result_that_the_host_reads_or_changes_is_on_the_device_in_the_end(there: str) -> None:
    """It was counted up to where it is read last, and plans held more than their budget."""
    nodes = [("aten.sin.default", (R(0),), (1,)), (there, (R(1),), (2,))]
    nodes += [("aten.sin.default", (R(k),), (k + 1,)) for k in (2, 3, 4)]
    nodes[2] = ("aten.sin.default", (R(0),), (3,))
    ground, items, trace = with_a_host(nodes, [1, 2, 5], [(1024, 1024)] * 6, {1})
    read = next(item for storage, item in zip(items, trace.items, strict=True) if storage == ground.lies.home[1])
    assert read.host_uses == {1} and 4 in read.uses
    assert read.held == (((0, 4),) if there == "aten.sin.default" else ())
    budget = max(ground.held)
    found = reside(trace, budget, ground.links)
    written = write_copies(ground, frozenset({1}), items, trace, found)
    assert memory(written).peak_bytes["device"] == found.peak_bytes <= budget


def test_what_the_device_needs_again_does_not_wait_for_the_host_that_reads_it() -> None:
    """Of a bucket of gradients some are read on the host and some on the device, which waited until the host was through."""
    size = 1 << 20
    nodes = [
        ("aten.sin.default", (R(0),), (1,)),
        *(("aten.slice.Tensor", (R(1), 0, k * size, (k + 1) * size), (2 + k,)) for k in range(4)),
        *(("aten.cos.default", (R(2 + k),), (6 + k,)) for k in range(3)),  # on the host
        ("aten.cos.default", (R(5),), (9,)),
    ]
    shapes = [(4 * size,), (4 * size,), *[(size,)] * 8]
    ground, items, trace = with_a_host(nodes, [6, 7, 8, 9], shapes, {5, 6, 7})
    bucket = items.index(ground.lies.home[1])
    moves = (ScheduledCopy(bucket, "store", start=1, done=5, free=5), ScheduledCopy(bucket, "fetch", start=8, done=8))
    found = Residency(moves, frozenset(), 0, 0.0, (0, 0))
    written = write_copies(ground, frozenset({5, 6, 7}), items, trace, found)
    order = [(node.target, written.values[node.results[0]].tier) for node in written.nodes if node.results]
    cosines = [tier for target, tier in order if target == "aten.cos.default"]
    assert cosines == ["device", "host", "host", "host"]
