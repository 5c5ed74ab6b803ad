"""The clock of compiled steps: what fused operators read and write, by hand, and that nothing else changes."""

import pytest
from test_executors import R, program

import colofunc as cf
from colofunc.executors.fused import fused
from colofunc.program.cost import program_cost

MESH = cf.Mesh(topology="a100-80g")
N = 1 << 20


def no_rule(call):
    return None


def seconds(made):
    return program_cost(fused(made, MESH, no_rule), MESH, no_rule).seconds


def test_a_chain_is_one_launch_that_reads_once_and_writes_once():
    chain = [("aten.neg.default", (R(0),), (1,)), ("aten.exp.default", (R(1),), (2,)), ("aten.relu.default", (R(2),), (3,))]
    made = program([0], chain, [3], [(N,)] * 4)
    assert program_cost(made, MESH, no_rule).seconds == pytest.approx(3 * MESH.compute_s(N, 16 * N, "float64"))
    assert seconds(made) == pytest.approx(MESH.compute_s(3 * N, 16 * N, "float64"))


def test_what_is_read_behind_a_product_is_written_in_front_of_it():
    side = 256
    around = [
        ("aten.neg.default", (R(0),), (1,)), ("aten.exp.default", (R(1),), (2,)), ("aten.mm.default", (R(2), R(2)), (3,)),
        ("aten.relu.default", (R(3),), (4,)), ("aten.add.Tensor", (R(4), R(1)), (5,)),
    ]  # fmt: skip
    made, nbytes = program([0], around, [5], [(side, side)] * 6), 8 * side * side
    ahead = MESH.compute_s(2 * side**2, 3 * nbytes, "float64")  # reads 0, writes 1 and 2
    product = MESH.compute_s(side**2, 3 * nbytes, "float64")  # without a rule, as many operations as elements
    behind = MESH.compute_s(2 * side**2, 3 * nbytes, "float64")  # reads 3 and 1, writes 5
    assert seconds(made) == pytest.approx(ahead + product + behind)


def test_collectives_are_as_they_were():
    mesh = cf.Mesh(dp=2, topology="2xa100-80g")
    wire = ("colofunc.all_reduce", (R(1), ("dp",), 2, "sum"), (2,))
    nodes = [("aten.neg.default", (R(0),), (1,)), wire, ("aten.neg.default", (R(2),), (3,))]
    made = program([0], nodes, [3], [(N,)] * 4)
    assert program_cost(fused(made, mesh, no_rule), mesh, no_rule) == program_cost(made, mesh, no_rule)


def test_a_compiled_step_is_clocked_as_one():
    def step(x):
        for _ in range(4):
            x = (x.sin() * 2.0 + 1.0).relu()
        return x

    plain, compiled = (cf.shard(step, MESH).on(name).lower(cf.abstract((N,))) for name in ("simulated", "compiled"))
    assert compiled.cost().seconds == pytest.approx(MESH.compute_s(0, 8 * N, "float32"), rel=0.3)
    assert plain.cost().seconds > 8 * compiled.cost().seconds and compiled.lanes().end_s == pytest.approx(compiled.cost().seconds)
