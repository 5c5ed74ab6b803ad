"""Collectives that run while a step copies between tiers: started in front of the work that hides them, as planned, within the budget."""

from functools import partial
from itertools import pairwise

from test_chunks import LAYERS, agrees_to_the_byte, deep
from test_executors import program

import colofunc as cf
from colofunc.planner.offload.trace import ground_of
from colofunc.program.cost import node_s
from colofunc.program.facts import is_copy, is_wire
from colofunc.program.ir import Ref
from colofunc.program.lanes import played
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
