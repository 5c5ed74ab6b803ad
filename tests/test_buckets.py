"""Buckets, early reductions and late updates: other programs, the same numbers."""

import attrs
import pytest
import torch
from test_executors import program

from colofunc.executors.simulated import SimulatedProgram
from colofunc.mesh import Mesh
from colofunc.program.check import check_program
from colofunc.program.ir import Ref
from colofunc.program.memory import lies
from colofunc.program.passes.buckets import BucketLimit, buckets
from colofunc.program.passes.coalesce import delay_updates, delay_views, reduce_early
from colofunc.program.passes.schedule import overlap

R = Ref
MESH = Mesh(dp=2, tp=2)


def targets(p):
    return [node.target.split(".")[1] for node in p.nodes]


def run(p, shapes):
    torch.manual_seed(0)
    return SimulatedProgram(p, MESH)([[torch.randn(s, dtype=torch.float64) for _ in range(4)] for s in shapes])


CASES = {
    "all_gather": ([(3,), (2, 2), ()], lambda s: (2, *s)),
    "all_reduce": ([(3,), (2, 2), ()], lambda s: s),
    "reduce_scatter": ([(2, 3), (2, 2, 2), (2,)], lambda s: s[1:]),
}


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_a_bucket_gives_the_same_numbers(kind, axis):
    shapes, result = CASES[kind]
    how = () if kind == "all_gather" else ("sum",)
    nodes = [(f"colofunc.{kind}", (R(k), (axis,), 2, *how), (3 + k,)) for k in range(3)]
    p = program([0, 1, 2], nodes, [3, 4, 5], [*shapes, *map(result, shapes)])
    together = buckets(p, MESH)
    check_program(together, MESH)
    assert targets(together).count(kind) == 1 and together.outputs == p.outputs
    for a, b in zip(run(p, shapes), run(together, shapes), strict=True):
        for x, y in zip(a, b, strict=True):
            assert torch.equal(x, y)


def storage_of(p, id):
    found = lies(p)
    return found.storages[found.home[id]]


@pytest.mark.parametrize("results", [(4,), (3, 4)])
def test_a_small_result_is_copied_out_of_its_bucket(results):
    """Who keeps a loss that was summed with the gradients does not keep the gradients; a result that is most of its bucket stays there."""
    shapes = [(30,), (), (5,)]
    nodes = [("colofunc.all_reduce", (R(k), ("dp",), 2, "sum"), (3 + k,)) for k in range(3)]
    nodes += [("aten.relu.default", (R(3),), (6,)), ("aten.relu.default", (R(5),), (7,))]
    p = program([0, 1, 2], nodes, [*results, 6, 7], [*shapes, *shapes, (30,), (5,)])
    together = buckets(p, MESH)
    check_program(together, MESH)
    assert targets(together).count("all_reduce") == 1
    bucket = 8 * 36
    kept = [storage_of(together, out) for out in together.outputs[: len(results)]]
    assert [one.nbytes for one in kept] == ([8] if len(results) == 1 else [bucket, bucket])
    copied = [k for k, node in enumerate(together.nodes) if node.target == "aten.clone.default"]
    assert len(copied) == (len(results) == 1)
    if copied:  # behind all who read the bucket, which is let go of there
        (moved,) = (node.results[0] for node in together.nodes if node.target == "colofunc.all_reduce")
        assert storage_of(together, moved).dies == copied[0] and targets(together)[copied[0] - 1] == "relu"
    for a, b in zip(run(p, shapes), run(together, shapes), strict=True):
        for x, y in zip(a, b, strict=True):
            assert torch.equal(x, y)


def test_a_result_that_is_read_closes_its_bucket():
    nodes = [
        ("colofunc.all_reduce", (R(0), ("dp",), 2, "sum"), (1,)),
        ("aten.relu.default", (R(1),), (2,)),
        ("colofunc.all_reduce", (R(2), ("dp",), 2, "sum"), (3,)),
        ("colofunc.all_reduce", (R(0), ("dp",), 2, "max"), (4,)),
        ("colofunc.all_reduce", (R(0), ("tp",), 2, "sum"), (5,)),
    ]
    p = program([0], nodes, [3, 4, 5], [(3,)] * 6)
    assert buckets(p, MESH) == p


def update(p):
    """The program with all of its nodes in the update."""
    return p.reordered([attrs.evolve(node, phase="update") for node in p.nodes])


def chains(count, laid_out):
    """(a program of so many sums over both axes, shapes of its inputs): reduce-scatter, all-reduce and all-gather of each in turn."""
    nodes, values, outputs = [], [(2, 3 + k) for k in range(count)], []
    for k in range(count):
        size, first = 3 + k, len(values)
        nodes.append(("colofunc.reduce_scatter", (R(k), ("dp",), 2, "sum"), (first,)))
        values.append((size,))
        if laid_out:
            nodes.append(("colofunc.rearrange", (R(first), "a -> a", (), ()), (first + 1,)))
            values.append((size,))
        nodes.append(("colofunc.all_reduce", (R(len(values) - 1), ("tp",), 2, "sum"), (len(values),)))
        values.append((size,))
        nodes.append(("colofunc.all_gather", (R(len(values) - 1), ("dp",), 2), (len(values),)))
        values.append((2, size))
        nodes.append(("aten.relu.default", (R(len(values) - 1),), (len(values),)))
        values.append((2, size))
        outputs.append(len(values) - 1)
    return update(program(list(range(count)), nodes, outputs, values)), values[:count]


@pytest.mark.parametrize("laid_out", [False, True])
@pytest.mark.parametrize("count", [2, 5])
def test_sums_over_several_axes_take_one_message_of_each_kind(count, laid_out):
    p, shapes = chains(count, laid_out)
    together = buckets(p, MESH)
    check_program(together, MESH)
    kinds = targets(together)
    assert [kinds.count(kind) for kind in ("reduce_scatter", "all_reduce", "all_gather")] == [1, 1, 1]
    for a, b in zip(run(p, shapes), run(together, shapes), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_what_an_update_makes_is_not_asked_for_before_it_is_made():
    """The second gather reads what the update of the first value gives, so that both stay; so do collectives of the forward pass."""
    nodes = [
        ("colofunc.all_gather", (R(0), ("dp",), 2), (1,)),
        ("aten.sum.dim_IntList", (R(1), (0,)), (2,)),
        ("aten.relu.default", (R(2),), (3,)),
        ("colofunc.all_gather", (R(3), ("dp",), 2), (4,)),
    ]
    p = program([0], nodes, [4], [(3,), (2, 3), (3,), (3,), (2, 3)])
    assert buckets(update(p), MESH) == update(p)
    forward, _ = chains(3, False)
    forward = forward.reordered([attrs.evolve(node, phase="forward") for node in forward.nodes])
    assert [targets(buckets(forward, MESH)).count(kind) for kind in ("reduce_scatter", "all_reduce")] == [3, 3]


def test_a_bucket_that_is_full_ends_what_is_put_side_by_side():
    p, _ = chains(6, False)
    for most_bytes in (0, 40, 150, 1000):
        limited = buckets(p, MESH, most=BucketLimit(most_bytes))
        check_program(limited, MESH)
        sizes = [limited.values[node.refs[0]].nbytes for node in limited.nodes if node.target == "colofunc.all_reduce" and node.note]
        assert all(nbytes <= most_bytes for nbytes in sizes)
        assert bool(sizes) == (most_bytes >= 150), (most_bytes, sizes)


def test_large_collectives_and_free_ones_stay_alone():
    shapes = [(1 << 18,)] * 2
    nodes = [("colofunc.all_reduce", (R(k), ("dp",), 2, "sum"), (2 + k,)) for k in range(2)]
    p = program([0, 1], nodes, [2, 3], shapes * 2)
    assert buckets(p, MESH) == p
    small = program([0, 1], nodes, [2, 3], [(3,)] * 4)
    assert buckets(small, Mesh(dp=2, tp=2, topology="ideal")) == small
    assert buckets(small, MESH) != small


def test_reductions_follow_their_operands_and_nothing_else_moves():
    nodes = [
        ("aten.relu.default", (R(0),), (1,)),
        ("aten.relu.default", (R(1),), (2,)),
        ("colofunc.rearrange", (R(1), "(a b) -> a b", ("a", "b"), (2, 2)), (3,)),
        ("colofunc.reduce_scatter", (R(3), ("dp",), 2, "sum"), (4,)),
        ("colofunc.all_reduce", (R(2), ("dp",), 2, "sum"), (5,)),
    ]
    p = program([0], nodes, [4, 5, 2], [(4,), (4,), (4,), (2, 2), (2,), (4,)])
    early = reduce_early(p)
    # 1 and 2 are read by others as well: their reductions stay where they are.
    assert targets(early) == targets(p)
    alone = program([0], [nodes[0], nodes[2], ("aten.relu.default", (R(0),), (2,)), nodes[3]], [4, 2], [(4,), (4,), (4,), (2, 2), (2,)])
    assert targets(reduce_early(alone)) == ["relu", "rearrange", "reduce_scatter", "relu"]
    for a, b in zip(run(alone, [(4,)]), run(reduce_early(alone), [(4,)]), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("rows", "wanted"), [(1 << 18, "relu reduce_scatter relu reduce_scatter all_reduce relu all_reduce"),
                                              (4, "relu reduce_scatter relu reduce_scatter relu all_reduce all_reduce")])  # fmt: skip
def test_a_second_reduction_waits_beside_the_work_of_the_next_gradient(rows: int, wanted: str):
    nodes = [
        ("aten.relu.default", (R(0),), (1,)),
        ("aten.relu.default", (R(0),), (2,)),
        ("aten.relu.default", (R(0),), (3,)),
        *(("colofunc.reduce_scatter", (R(k), ("dp",), 2, "sum"), (k + 3,)) for k in (1, 2)),
        *(("colofunc.all_reduce", (R(k), ("tp",), 2, "sum"), (k + 2,)) for k in (4, 5)),
    ]
    p = program([0], nodes, [6, 7, 3], [(2, rows)] * 4 + [(rows,)] * 4)
    assert targets(reduce_early(p)) == wanted.split()  # small ones go together at the end; behind the last gradient comes no other


def test_a_third_reduction_stands_behind_a_second_one_that_stays():
    nodes = [
        ("aten.relu.default", (R(0),), (1,)),
        ("colofunc.all_reduce", (R(1), ("dp",), 2, "sum"), (2,)),
        ("colofunc.rearrange", (R(2), "a -> a", (), ()), (3,)),
        ("aten.relu.default", (R(0),), (4,)),
        ("aten.relu.default", (R(0),), (5,)),
        ("colofunc.all_reduce", (R(3), ("tp",), 2, "sum"), (6,)),
        ("colofunc.all_reduce", (R(6), ("pp",), 2, "sum"), (7,)),
        *(("colofunc.all_reduce", (R(k), ("dp",), 2, "sum"), (k + 4,)) for k in (4, 5)),
    ]
    p = program([0], nodes, [7, 8, 9], [(1 << 18,)] * 10)
    # 8 and 9 go up behind their gradients. No later gradient is made behind 6, so it stays, and so does 7, which reads it.
    assert [node.outs[0] for node in reduce_early(p).nodes] == [1, 2, 3, 4, 8, 5, 9, 6, 7]


def test_updates_run_behind_the_next_collectives_but_before_readers():
    nodes = [
        ("colofunc.all_reduce", (R(0), ("dp",), 2, "sum"), (4,)),
        ("aten.add_.Tensor", (R(1), R(4)), ()),
        ("colofunc.all_reduce", (R(2), ("dp",), 2, "sum"), (5,)),
        ("aten.relu.default", (R(5),), (6,)),
        ("aten.mul.Tensor", (R(6), R(1)), (7,)),
        ("aten.relu.default", (R(7),), (8,)),
    ]
    p = program([0, 1, 2], nodes, [8], [(3,)] * 9)
    late = delay_updates(p, lag=5)
    assert targets(late) == ["all_reduce", "all_reduce", "relu", "add_", "mul", "relu"]
    assert targets(delay_updates(p, lag=1)) == ["all_reduce", "all_reduce", "add_", "relu", "mul", "relu"]
    shapes = [(3,)] * 3
    (want,), (got,), (split,) = run(p, shapes), run(late, shapes), run(overlap(late), shapes)
    assert all(torch.equal(x, y) and torch.equal(x, z) for x, y, z in zip(want, got, split, strict=True))


def test_views_of_received_values_wait_for_their_reader():
    nodes = [
        ("colofunc.all_gather", (R(0), ("dp",), 2), (2,)),
        ("aten.view.default", (R(2), (6,)), (3,)),
        ("aten.relu.default", (R(1),), (4,)),
        ("aten.relu.default", (R(3),), (5,)),
    ]
    p = program([0, 1], nodes, [4, 5], [(3,), (3,), (2, 3), (6,), (3,), (6,)])
    assert targets(delay_views(p)) == ["all_gather", "relu", "view", "relu"]


def test_a_gather_does_not_move_before_the_reduction_that_it_reads():
    """The reduction waits for the last of its bucket, the gather would move to the first of its own."""
    nodes = [
        ("colofunc.all_reduce", (R(0), ("dp",), 2, "sum"), (2,)),
        ("colofunc.all_gather", (R(1), ("dp",), 2), (3,)),
        ("colofunc.all_reduce", (R(1), ("dp",), 2, "sum"), (4,)),
        ("colofunc.all_gather", (R(2), ("dp",), 2), (5,)),
    ]
    p = program([0, 1], nodes, [3, 4, 5], [(3,)] * 3 + [(2, 3), (3,), (2, 3)])
    together = buckets(p, MESH)
    check_program(together, MESH)
    for a, b in zip(run(p, [(3,), (3,)]), run(together, [(3,), (3,)]), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("blocks", [False, True])
def test_software_that_gathers_a_block_at_a_time_has_no_bucket_of_two(blocks: bool):
    """Four gathers of two blocks, and one of no block."""
    mesh = Mesh(tp=2, topology=Mesh(topology="8xh100").topology.with_software(blocks=blocks))
    nodes = [("colofunc.all_gather", (Ref(i), ("tp",), 2, 0), (i + 5,)) for i in range(5)]
    p = program(list(range(5)), nodes, list(range(5, 10)), [(4,)] * 5 + [(8,)] * 5)
    paths = ("layers.0.up", "layers.0.down", "layers.10.up", "layers.10.norm.1", "head")
    p = p.reordered([attrs.evolve(node, path=path) for node, path in zip(p.nodes, paths, strict=True)])
    gathers = [node.note for node in buckets(p, mesh).nodes if node.target == "colofunc.all_gather"]
    assert gathers == (["bucket of 2", "bucket of 2", ""] if blocks else ["bucket of 5"])


def test_software_that_gathers_a_block_at_a_time_does_so_however_large_it_is():
    """Two gathers that take longer than a latency, and the gradients of a block whose casts stand in no module."""
    size = 1 << 22
    nodes = [("colofunc.all_gather", (Ref(i), ("tp",), 2, 0), (i + 2,)) for i in range(2)]
    nodes += [("aten.neg.default", (Ref(i),), (i + 4,)) for i in range(2)]
    nodes += [("aten._to_copy.default", (Ref(i + 4),), (i + 6,)) for i in range(2)]
    nodes += [("colofunc.reduce_scatter", (Ref(i + 6), ("tp",), 2, "sum"), (i + 8,)) for i in range(2)]
    shapes = [(size,)] * 2 + [(2, size)] * 2 + [(size,)] * 2 + [(2, size // 2)] * 2 + [(size // 2,)] * 2
    p = program([0, 1], nodes, [2, 3, 8, 9], shapes)
    paths = ["layers.3.up", "layers.3.down", "layers.3.up", "layers.3.down", "", "", "", ""]
    p = p.reordered([attrs.evolve(node, path=path) for node, path in zip(p.nodes, paths, strict=True)])
    found = {}
    for blocks in (False, True):
        mesh = Mesh(tp=2, topology=Mesh(topology="8xh100").topology.with_software(blocks=blocks))
        found[blocks] = [node.target for node in buckets(p, mesh).nodes if "gather" in node.target or "scatter" in node.target]
    assert found[False] == ["colofunc.all_gather"] * 2 + ["colofunc.reduce_scatter"] * 2
    assert found[True] == ["colofunc.all_gather", "colofunc.reduce_scatter"]


def test_collectives_along_other_axes_do_not_say_how_far_a_reduction_has_come():
    """A gradient over `dp` is waited for behind the next collective over `dp`, however many over `tp` are between."""
    nodes = [
        ("colofunc.all_reduce", (R(0), ("dp",), 2, "sum"), (4,)),
        ("aten.add_.Tensor", (R(1), R(4)), ()),
        ("colofunc.all_gather", (R(2), ("tp",), 2, 0), (5,)),
        ("colofunc.all_reduce", (R(3), ("dp",), 2, "sum"), (6,)),
        ("aten.relu.default", (R(6),), (7,)),
    ]
    p = program([0, 1, 2, 3], nodes, [5, 7], [(3,), (3,), (3,), (3,), (3,), (2, 3), (3,), (3,)])
    assert targets(delay_updates(p, lag=1)) == ["all_reduce", "all_gather", "all_reduce", "add_", "relu"]
