"""When what runs: hand-made programs whose times are known, and that pictures show them."""

from itertools import pairwise

import attrs
import pytest
import torch
from colofunc_plugins import zero
from test_executors import R, program

import colofunc as cf
from colofunc.pictures import memory_picture, unrolled
from colofunc.program.chrome_trace import chrome_trace
from colofunc.program.lanes import Busy, Lanes, lanes
from colofunc.testing import programs

MESH = cf.Mesh(dp=2, topology="2xa100-40g:datasheet")  # without contention
N = 1 << 20
COPY_S = MESH.copy_s(8 * N, "host", "device")


def no_rule(call):
    return None


def played(nodes, shapes, places=None):
    made = program([0], nodes, [], shapes)
    for id, tier in (places or {}).items():
        made.values[id] = made.values[id].in_tier(tier)
    return lanes(made, MESH, no_rule)


def spans(found):
    return [(b.lane, b.start_s, b.end_s) for b in found.busy]


def test_compute_and_plain_collectives_follow_one_another():
    found = played([("aten.neg.default", (R(0),), (1,)), ("colofunc.all_reduce", (R(1), ("dp",), 2, "sum"), (2,))], [(N,)] * 3)
    neg, wire = MESH.compute_s(N, 16 * N, "float64"), MESH.collective_s("all_reduce", 8 * N, ("dp",))
    assert spans(found) == [("compute", 0.0, neg), ("collectives", neg, neg + wire)]
    assert found.starts_s == (0.0, neg) and found.end_s == neg + wire
    assert found.busy_s() == {"compute": pytest.approx(neg), "collectives": pytest.approx(wire)}


def test_what_was_started_is_hidden_until_it_is_waited_for():
    nodes = [
        ("colofunc.all_reduce_start", (R(0), ("dp",), 2, "sum"), (1,)),
        ("aten.neg.default", (R(0),), (2,)),
        ("colofunc.wait", (R(1),), (3,)),
        ("aten.neg.default", (R(3),), (4,)),
    ]
    found = played(nodes, [(N,)] * 5)
    neg, wire = MESH.compute_s(N, 16 * N, "float64"), MESH.collective_s("all_reduce", 8 * N, ("dp",))
    assert spans(found) == [("collectives", 0.0, wire), ("compute", 0.0, neg), ("compute", max(neg, wire), max(neg, wire) + neg)]


@pytest.mark.parametrize("contention", [0.0, 0.25, 3.0])
@pytest.mark.parametrize("count", [1, 40])
def test_an_operator_takes_longer_beside_a_collective_where_the_machine_says_so(contention, count):
    """Of what is left to do when the collective ends nothing is slowed; what is waited for has nothing beside it."""
    device = attrs.evolve(MESH.topology.device, contention=contention)
    slower = MESH.with_topology(attrs.evolve(MESH.topology, device=device))
    begun = ("colofunc.all_reduce_start", (R(0), ("dp",), 2, "sum"), (1,))
    nodes = [begun, *[("aten.neg.default", (R(0),), (2,))] * count, ("colofunc.wait", (R(1),), (3,)), ("aten.neg.default", (R(3),), (4,))]
    found = lanes(program([0], nodes, [], [(N,)] * 5), slower, no_rule)
    neg, wire = MESH.compute_s(N, 16 * N, "float64"), MESH.collective_s("all_reduce", 8 * N, ("dp",))
    # A second of the device does 1 / (1 + contention) of a second's work while the collective runs.
    beside = min(wire, count * neg * (1 + contention))
    compute = beside + count * neg - beside / (1 + contention)
    assert found.busy[count].end_s == pytest.approx(compute)
    assert found.end_s == pytest.approx(max(compute, wire) + neg)


def test_copies_have_an_engine_for_each_direction_and_queue_on_it():
    nodes = [
        ("colofunc.to_device_start", (R(0),), (1,)),
        ("colofunc.to_device_start", (R(0),), (2,)),
        ("colofunc.wait", (R(1),), (3,)),
        ("colofunc.to_host_start", (R(3),), (4,)),
        ("colofunc.wait", (R(2),), (5,)),
    ]
    found = played(nodes, [(N,)] * 6, dict.fromkeys([0, 4], "host"))
    assert spans(found) == [
        ("to device", 0.0, COPY_S), ("to device", COPY_S, 2 * COPY_S), ("to host", COPY_S, COPY_S + MESH.copy_s(8 * N, "device", "host")),
    ]  # fmt: skip
    assert found.starts_s[-1] == COPY_S and found.end_s == 2 * COPY_S


def test_the_host_works_beside_the_device():
    nodes = [
        ("aten.neg.default", (R(0),), (1,)),
        ("aten.neg.default", (R(1),), (2,)),
        ("colofunc.to_device", (R(2),), (3,)),
        ("aten.neg.default", (R(3),), (4,)),
    ]
    found = played(nodes, [(N,)] * 5, dict.fromkeys([0, 1, 2], "host"))
    one = MESH.host_s(16 * N)
    assert spans(found)[:3] == [("host", 0.0, one), ("host", one, 2 * one), ("to device", 2 * one, 2 * one + COPY_S)]
    assert found.busy[3].start_s == 2 * one + COPY_S and found.starts_s[:3] == (0.0, 0.0, 0.0)


def test_the_thread_that_hands_out_work_does_the_hosts():
    """What the device was given before goes on meanwhile; what comes behind it begins when the host is through."""
    nodes = [
        ("aten.neg.default", (R(0),), (1,)),
        ("colofunc.to_host_start", (R(0),), (2,)),
        ("colofunc.wait", (R(2),), (3,)),
        ("aten.neg.default", (R(3),), (4,)),
        ("aten.neg.default", (R(1),), (5,)),
    ]
    found = played(nodes, [(N,)] * 6, dict.fromkeys([2, 3, 4], "host"))
    neg, back, host = MESH.compute_s(N, 16 * N, "float64"), MESH.copy_s(8 * N, "device", "host"), MESH.host_s(16 * N)
    assert spans(found) == [
        ("compute", 0.0, neg), ("to host", neg, neg + back), ("host", neg + back, neg + back + host),
        ("compute", neg + back + host, 2 * neg + back + host),
    ]  # fmt: skip


def test_a_view_on_the_host_reads_none_of_what_it_looks_at():
    """The part of a bucket of gradients that an update on the host reads is a slice of the whole bucket, which costs what a view does."""
    host = attrs.evolve(MESH.topology.device, host_view_s=3e-6)
    mesh = MESH.with_topology(attrs.evolve(MESH.topology, device=host))
    nodes = [("aten.slice.Tensor", (R(0), 0, 0, 4), (1,)), ("aten.neg.default", (R(1),), (2,))]
    made = program([0], nodes, [], [(N,), (4,), (4,)])
    for id in range(3):
        made.values[id] = made.values[id].in_tier("host")
    assert lanes(made, mesh, no_rule).end_s == pytest.approx(mesh.view_s + mesh.host_s(64))


def test_a_copy_that_is_waited_for_right_away_is_there_for_the_host():
    nodes = [("aten.neg.default", (R(0),), (1,)), ("colofunc.to_host", (R(1),), (2,)), ("aten.neg.default", (R(2),), (3,))]
    found = played(nodes, [(N,)] * 4, dict.fromkeys([2, 3], "host"))
    assert [b.lane for b in found.busy] == ["compute", "to host", "host"]
    assert found.busy[2].start_s == found.busy[1].end_s >= found.busy[0].end_s > 0


def lowered():
    step = programs.mlp(64)
    return cf.shard(step.fn, cf.Mesh(dp=2, topology="2xa100-40g"), zero(3, "dp")).on("distributed").lower(step.state, step.batch)


def test_lanes_of_a_step_are_those_of_its_memory():
    low = lowered()
    found, report = low.lanes(), low.memory()
    assert len(found.starts_s) == len(report.timeline["device"]) == len(low.program.nodes)
    assert list(found.starts_s) == sorted(found.starts_s)
    assert found.end_s <= low.cost().seconds * (1 + 1e-9), "what is hidden costs nothing"
    for lane in ("compute", "collectives"):
        mine = [b for b in found.busy if b.lane == lane]
        assert mine and all(a.end_s <= b.start_s for a, b in pairwise(mine))


def test_a_trace_has_every_operator_and_the_peak():
    low = lowered()
    found, report = low.lanes(), low.memory()
    events = chrome_trace(found, report, "here")["traceEvents"]
    assert sum(e["ph"] == "X" for e in events) == len(found.busy)
    assert max(sum(e["args"].values()) for e in events if e["ph"] == "C") == report.peak_bytes["device"]
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} > {"compute", "collectives", "to device", "to host", "host"}


def test_collectives_that_overlap_are_drawn_in_rows_of_their_own():
    low = lowered()
    node, report = low.lanes().busy[0].node, low.memory()
    spans = [("compute", 0, 4), ("collectives", 0, 2), ("collectives", 1, 3), ("collectives", 2, 4), ("collectives", 3, 4)]
    busy = tuple(Busy(lane, start, end, "x", k, node) for k, (lane, start, end) in enumerate(spans))
    events = chrome_trace(Lanes(busy, (0.0,), 4.0), report, "here")["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    assert [names[e["tid"]] for e in events if e["ph"] == "X"] == ["compute"] + ["collectives", "collectives 2"] * 2


def test_pictures_are_drawn_and_say_the_budget(tmp_path):
    low = lowered()
    memory_picture(low, tmp_path / "plan.svg", budget_bytes=low.memory().peak_bytes["device"] + 1, title="my title")
    drawn = (tmp_path / "plan.svg").read_text()
    assert drawn.startswith("<?xml") and "#d62728" in drawn and "#9dbfe8" in drawn  # the budget's red, parameter copies
    with pytest.raises(cf.InputError, match="the picture cannot be written"):
        memory_picture(low, tmp_path / "plan.nothing")


def test_a_picture_of_copies_has_their_lanes(tmp_path):
    step = programs.mlp(64, width=64, dtype=torch.float32)
    whole = cf.shard(step.fn, cf.Mesh(topology="a100-40g")).lower(step.state, step.batch).memory().peak_bytes["device"]
    low = cf.offload(cf.shard(step.fn, cf.Mesh(topology="a100-40g")), budget=int(0.6 * whole)).lower(step.state, step.batch)
    assert {"compute", "to device"} <= set(low.lanes().busy_s())
    memory_picture(low, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 10_000


def test_microbatches_follow_one_another_and_the_picture_has_each(tmp_path):
    step = programs.mlp(64)
    low = cf.accumulate(cf.shard(step.fn, cf.Mesh(dp=2, topology="2xa100-40g"), zero(2, "dp")), 4).lower(step.state, step.batch)
    found, report = low.lanes(), low.memory()
    (at,) = [k for k, node in enumerate(low.program.nodes) if node.loop is not None and len(node.loop.body.nodes) > 20]
    trip = found.bodies[at]
    assert sum(b.index == at for b in found.busy) == 4 * len(trip.busy)
    assert found.starts_s[at + 1] - found.starts_s[at] == pytest.approx(4 * trip.end_s)
    times, held = unrolled(report, found, "device")
    whole = [sum(column) for column in zip(*held.values(), strict=True)]
    assert max(whole) == report.peak_bytes["device"] and all(b - a > -1e-12 for a, b in pairwise(times))
    body = len(low.program.nodes[at].loop.body.nodes)
    assert len(times) >= len(found.starts_s) - 1 + 4 * body
    memory_picture(low, tmp_path / "plan.png")


def test_kernels_begin_when_the_host_has_handed_them_out():
    """Where it is known how long the host takes, short kernels follow it, long ones hide it, and views are its work alone."""
    card = attrs.evolve(MESH.topology.device, launch_s=1e-6, host_launch_s=1e-3, host_view_s=4e-4)
    mesh = MESH.with_topology(attrs.evolve(MESH.topology, device=card))
    nodes = [("aten.neg.default", (R(0),), (1,)), ("aten.view.default", (R(1), [4]), (2,)), ("aten.neg.default", (R(2),), (3,))]
    short_s = mesh.compute_s(4, 64, "float64")
    found = lanes(program([0], nodes, [], [(4,)] * 4), mesh, no_rule)
    assert spans(found) == [("compute", 1e-3, 1e-3 + short_s), ("compute", pytest.approx(2.4e-3), pytest.approx(2.4e-3 + short_s))]
    wide = 1 << 28
    long_s = mesh.compute_s(wide, 16 * wide, "float64")
    nodes[1] = ("aten.view.default", (R(1), [wide]), (2,))
    assert long_s > 2e-3 and lanes(program([0], nodes, [], [(wide,)] * 4), mesh, no_rule).end_s == pytest.approx(1e-3 + 2 * long_s)


def test_views_take_time_where_the_host_computes():
    host = attrs.evolve(MESH.topology.device, host_view_s=4e-4)
    mesh = MESH.with_topology(attrs.evolve(MESH.topology, device=host))
    nodes = [("aten.view.default", (R(0), [4]), (1,)), ("aten.neg.default", (R(1),), (2,))]
    assert lanes(program([0], nodes, [], [(4,)] * 3), mesh, no_rule).end_s == pytest.approx(4e-4 + mesh.compute_s(4, 64, "float64"))


def begins_of_sums(mesh, *axes):
    """When all-reduces along axes begin that are started one behind the other."""
    nodes = [("colofunc.all_reduce_start", (R(0), (axis,), mesh.axis_size(axis), "sum"), (k + 1,)) for k, axis in enumerate(axes)]
    return [b.start_s for b in lanes(program([0], nodes, [], [(N,)] * 4), mesh, no_rule).busy]


def test_a_collective_over_boxes_with_several_ranks_in_each_keeps_the_links_within_them():
    mesh = cf.Mesh(dp=4, tp=4, topology="8xa100-40g")  # two of a dp group's ranks are in each box
    assert mesh.link_levels(("dp",)) == (0, 1)
    assert begins_of_sums(mesh, "dp", "tp") == [0.0, mesh.collective_s("all_reduce", 8 * N, ("dp",))]
    assert begins_of_sums(mesh, "tp", "dp") == [0.0, mesh.collective_s("all_reduce", 8 * N, ("tp",))]


def test_collectives_over_other_links_run_beside_one_another():
    """In a box and between boxes; over links of one level they follow one another, also of other axes."""
    mesh = cf.Mesh(dp=2, cp=2, tp=4, topology="8xa100-40g")
    assert [mesh.link_levels((axis,)) for axis in ("dp", "cp", "tp")] == [(1,), (0,), (0,)]
    assert mesh.link_levels(("dp", "tp")) == (0, 1) and cf.Mesh(dp=2).link_levels(("dp",)) == (0,)

    def begins(*axes):
        return begins_of_sums(mesh, *axes)

    first_s = mesh.collective_s("all_reduce", 8 * N, ("tp",))
    assert begins("tp", "dp", "cp") == [0.0, 0.0, first_s]
    assert begins("dp", "cp", "tp") == [0.0, 0.0, mesh.collective_s("all_reduce", 8 * N, ("cp",))]
