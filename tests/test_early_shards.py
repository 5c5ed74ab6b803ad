"""Shards of what forward gathered: taken behind the last reader of the whole, the same numbers from less memory."""

import attrs
import matrix
import pytest
import torch
from matrix import Cell, step_of
from matrix_memory import Narrow
from matrix_memory import run as run_within
from test_executors import program

import colofunc as cf
from colofunc.executors.simulated import SimulatedProgram
from colofunc.mesh import Mesh
from colofunc.program.check import check_program
from colofunc.program.ir import Program, Ref
from colofunc.program.memory import lies, memory
from colofunc.program.passes import early_shards as module
from colofunc.program.passes.early_shards import early_shards
from colofunc.testing.check import doubled_inside

R = Ref
MESH = Mesh(dp=2, tp=2)
ROWS = 1 << 18  # of float64: each rank's is 2 MiB
GATHER = ("colofunc.all_gather", (R(0), ("dp",), 2), (1,))
READ = ("aten.relu.default", (R(1),), (2,))
MOVE = ("colofunc.rearrange", (R(1), "a b -> a b", (), ()), (3,))
TAKE = ("colofunc.take_shard", (R(3), ("tp",), 2), (4,))
USE = ("aten.neg.default", (R(4),), (5,))
SHAPES = [(ROWS,), (2, ROWS), (2, ROWS), (2, ROWS), (ROWS,), (ROWS,)]


def with_phases(nodes, outputs, forward, shapes=SHAPES):
    """A program whose first `forward` nodes are of forward, the others of backward."""
    p = program([0], nodes, outputs, shapes)
    phases = ["forward"] * forward + ["backward"] * (len(nodes) - forward)
    return attrs.evolve(p, nodes=tuple(attrs.evolve(n, phase=phase) for n, phase in zip(p.nodes, phases, strict=True)))


def targets(p):
    return [node.target.split(".")[1] for node in p.nodes]


def run(p, rows=ROWS):
    torch.manual_seed(0)
    return SimulatedProgram(p, MESH)([[torch.randn(rows, dtype=torch.float64) for _ in range(4)]])


def test_a_shard_is_taken_where_forward_needs_the_whole_for_the_last_time():
    p = with_phases([GATHER, READ, ("aten.neg.default", (R(2),), (6,)), MOVE, TAKE, USE], [5, 6], 3, [*SHAPES, (2, ROWS)])
    early = early_shards(p)
    check_program(early, MESH)
    assert targets(early) == "all_gather relu rearrange take_shard clone neg neg".split()
    assert [node.phase for node in early.nodes[:5]] == ["forward"] * 5
    found = lies(early)
    assert found.storages[found.home[4]].nbytes == 8 * ROWS  # of its own: the whole is let go of
    at = targets(early).index("neg")
    assert memory(p).timeline["device"][2] - memory(early).timeline["device"][at] == 8 * ROWS
    for a, b in zip(run(p), run(early), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


KEPT = {
    "backward reads the whole": [GATHER, READ, MOVE, TAKE, USE, ("aten.neg.default", (R(1),), (6,))],
    "backward reads the whole through a view": [
        GATHER, READ, ("aten.view.default", (R(1), (2, ROWS)), (6,)), MOVE, TAKE, USE, ("aten.neg.default", (R(6),), (7,)),
    ],
    "the move has another reader": [GATHER, READ, MOVE, TAKE, USE, ("aten.neg.default", (R(3),), (6,))],
    "forward makes the shard": [GATHER, READ, MOVE, TAKE, USE],
    "it is backward that gathers": [GATHER, READ, MOVE, TAKE, USE],
}  # fmt: skip
IN_FORWARD = {"forward makes the shard": 5, "it is backward that gathers": 0, "backward reads the whole through a view": 3}


@pytest.mark.parametrize("why", KEPT)
def test_nothing_is_taken_early_where_that_saves_nothing(why: str):
    nodes = KEPT[why]
    read = {ref for _, args, _ in nodes for ref in args if isinstance(ref, Ref)}
    outputs = [out for _, _, (out,) in nodes if R(out) not in read]
    p = with_phases(nodes, outputs, IN_FORWARD.get(why, 2), [*SHAPES, (2, ROWS), (2, ROWS)])
    check_program(p, MESH)
    assert targets(early_shards(p)) == targets(p)


def test_what_is_given_or_returned_stays_as_it_is():
    given = with_phases(
        [("aten.relu.default", (R(0),), (1,)), ("colofunc.take_shard", (R(0), ("tp",), 2), (2,)), ("aten.neg.default", (R(2),), (3,))],
        [1, 3], 1, [(2, ROWS), (2, ROWS), (ROWS,), (ROWS,)],
    )  # fmt: skip
    assert targets(early_shards(given)) == targets(given)
    returned = with_phases([GATHER, READ, MOVE, TAKE, USE], [1, 2, 5], 2)
    assert targets(early_shards(returned)) == targets(returned)


def test_a_small_saving_is_not_worth_an_operator():
    few = 1 << 14
    shapes = [tuple(few if size == ROWS else size for size in shape) for shape in SHAPES]
    small = with_phases([GATHER, READ, MOVE, TAKE, USE], [2, 5], 2, shapes)
    assert targets(early_shards(small)) == targets(small)


def test_two_shards_that_are_no_less_than_the_whole_leave_it():
    other = ("colofunc.take_shard", (R(1), ("dp",), 2), (6,))
    nodes = [GATHER, READ, MOVE, TAKE, USE, other, ("aten.neg.default", (R(6),), (7,))]
    both = with_phases(nodes, [2, 5, 7], 2, [*SHAPES, (ROWS,), (ROWS,)])
    assert targets(early_shards(both)) == targets(both)


def test_a_copy_that_would_stand_at_the_top_of_forward_is_not_made():
    """Nothing runs between the last reader and the shard, so that the whole would be held with the copy of its part."""
    total = ("aten.sum.default", (R(1),), (2,))
    p = with_phases([GATHER, total, MOVE, TAKE, ("aten.sum.default", (R(4),), (5,))], [2, 5], 2, [*SHAPES[:2], (), *SHAPES[3:5], ()])
    assert targets(early_shards(p)) == targets(p)


def test_what_a_move_has_copied_is_no_part_of_the_whole():
    """Of four gathered shards two are copied in another order; both are read in backward, so that nothing is saved."""
    nodes = [
        ("colofunc.all_gather", (R(0), ("dp", "tp"), 4), (1,)),
        ("aten.slice.Tensor", (R(1), 0, 0, 2), (2,)),
        ("colofunc.rearrange", (R(2), "a (b c) -> b (a c)", ("b",), (2,)), (3,)),
        ("aten.sum.default", (R(3),), (4,)),
        ("aten.relu.default", (R(0),), (9,)),
        ("colofunc.take_shard", (R(3), ("tp",), 2), (5,)),
        ("colofunc.take_shard", (R(3), ("dp",), 2), (6,)),
        ("aten.sum.default", (R(5),), (7,)),
        ("aten.sum.default", (R(6),), (8,)),
    ]
    p = with_phases(nodes, [4, 7, 8, 9], 5, [(ROWS,), (4, ROWS), (2, ROWS), (2, ROWS), (), (ROWS,), (ROWS,), (), (), (ROWS,)])
    check_program(p, MESH)
    assert targets(early_shards(p)) == targets(p)


CELLS = [Cell(tensor="2d"), Cell(tensor="2d", extra="accumulate"), Cell(tensor="2.5d", ranks=8), Cell("zero3", "2d", ranks=8)]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_steps_are_equal_with_every_shard_taken_early(cell: Cell, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "LEAST_BYTES", 1)
    step, state, batch = step_of(cell.kind, cell.extra, cell.precision, 1)
    with cf.testing.float64():
        state, batch = doubled_inside((state, batch))
        staged = matrix.staged(cell, step)
        low = staged.lower(state, batch)
        assert _copies(low.program)
        assert str(low.compare(state, batch)).startswith("equal")
        assert cf.testing.check(staged, state, batch).worst < 1e-10


def test_what_is_made_again_needs_no_shard_from_forward(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "LEAST_BYTES", 1)
    step, state, batch = step_of("dense", "", "float64", 2)
    for policy, are_copied in (("everything", True), ("nothing", False)):
        low = cf.checkpoint(matrix.staged(Cell(tensor="2d"), step), policy=policy).lower(state, batch)
        assert bool(_copies(low.program)) == are_copied
        assert not [n for n in low.program.nodes if n.target == "aten.clone.default" and n.outs[0] not in low.program.last_uses]


@pytest.mark.parametrize("column", ["checkpoint", "offload", "both"])
def test_in_a_narrow_memory_too(column: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "LEAST_BYTES", 1)
    assert run_within(Narrow(Cell(tensor="2d"), column, layers=2, split=True)).worst < 1e-10


def _copies(program: Program) -> int:
    """How many shards are copied in forward, in loops too."""
    inside = sum(_copies(node.loop.body) for node in program.nodes if node.loop is not None)
    shards = {out for node in program.nodes if node.target == "colofunc.take_shard" for out in node.results}
    copied = [n for n in program.nodes if n.target == "aten.clone.default" and n.phase == "forward" and n.refs[0] in shards]
    return inside + len(copied)
