"""Executors: the simulated mesh, writes in place to shared tensors, asynchronous pairs, faults, notes on errors."""

import random

import attrs
import pytest
import torch
from einops import rearrange
from torch.utils._python_dispatch import TorchDispatchMode

from colofunc.errors import FaultError, ProgramError
from colofunc.executors import kernels
from colofunc.executors.compiled import compile_segments
from colofunc.executors.faults import fail
from colofunc.executors.kernels import callable_of, rearrange_text
from colofunc.executors.simulated import SimulatedProgram
from colofunc.mesh import Mesh
from colofunc.ops.linear import FOR_MATRICES
from colofunc.ops.targets import resolve
from colofunc.program.facts import rearrange_steps
from colofunc.program.ir import Node, Program, Ref, Value
from colofunc.program.passes.inplace import in_place
from colofunc.program.passes.overlapped import overlapped
from colofunc.program.passes.schedule import overlap, updates_early
from colofunc.spec.layout import replicated

R = Ref
MESH = Mesh(dp=2, tp=2)


def program(inputs, nodes, outputs, shapes, **fields):
    """A local float64 program; `shapes`: of value 0, 1, ... ; nodes as (target, args, outs)."""
    values = {i: Value(i, tuple(s), torch.float64, layout=replicated(tuple(s))) for i, s in enumerate(shapes)}
    made = tuple(Node(target, tuple(args), (), tuple(outs), line="step.py:1") for target, args, outs in nodes)
    return Program(tuple(inputs), made, tuple(outputs), values, stage="local", **fields)


def per_rank(*shape):
    return [torch.randn(*shape, dtype=torch.float64) for _ in range(4)]


@pytest.mark.parametrize("pattern, names, sizes, shape", [
    ("a (b c) -> b a c", ("b",), (2,), (4, 6)),
    ("a b c -> (b a) c", (), (), (2, 3, 4)),
    ("(a b) c -> a b c", ("a",), (2,), (6, 5)),
    ("1 a -> a 1", (), (), (1, 3)),
    ("(a b c) -> (c a) b", ("a", "c"), (2, 5), (30,)),
])  # fmt: skip
def test_rearrange_is_einops(pattern, names, sizes, shape):
    x = torch.randn(shape)
    got = eval(rearrange_text("x", rearrange_steps(pattern, names, sizes, shape)))
    torch.testing.assert_close(got, rearrange(x, pattern, **dict(zip(names, sizes))), rtol=0, atol=0)


@pytest.mark.parametrize("kind, options, shape, want", [
    ("all_gather", (), (3,), lambda xs, i: torch.stack(xs)),
    ("all_reduce", ("sum",), (3,), lambda xs, i: xs[0] + xs[1]),
    ("all_reduce", ("max",), (3,), lambda xs, i: torch.maximum(*xs)),
    ("reduce_scatter", ("sum",), (2, 3), lambda xs, i: xs[0][i] + xs[1][i]),
    ("all_to_all", (), (2, 3), lambda xs, i: torch.stack([xs[0][i], xs[1][i]])),
    ("permute", ((1, 0),), (3,), lambda xs, i: xs[1 - i]),
    ("take_shard", (), (2, 3), lambda xs, i: xs[i][i]),
    ("keep_first", ("sum",), (3,), lambda xs, i: xs[i] * (i == 0)),
    ("keep_first", ("max",), (3,), lambda xs, i: xs[i]),
])  # fmt: skip
@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_collectives(kind, options, shape, want, axis):
    p = program([0], [(f"colofunc.{kind}", (R(0), (axis,), 2, *options), (1,))], [1], [shape, shape])
    xs = per_rank(*shape)
    (got,) = SimulatedProgram(p, MESH)([xs])
    for group in MESH.groups((axis,)):
        for i, r in enumerate(group):
            torch.testing.assert_close(got[r], want([xs[m] for m in group], i), rtol=0, atol=0)


def test_ranks_that_share_compute_once():
    p = program([0, 1], [("aten.mul.Tensor", (R(0), R(1)), (2,)), ("aten.neg.default", (R(1),), (3,))], [2, 3], [(3,)] * 4)
    x, y = per_rank(3)[:2]
    run = SimulatedProgram(p, MESH)
    run([[x, x, y, y], [y] * 4])
    (function,) = run._functions.values()
    assert function.source.count(" mul(") == 2
    assert function.source.count(" neg(") == 1


def test_equal_views_of_one_memory_are_one_tensor():
    # Ranks may hold different objects over the same memory: an update in place must happen once.
    nodes = [("colofunc.sgd_", (R(0), R(1), None, R(2), R(2), 0.0, 0.0, 0.0, False), ())]
    p = program([0, 1, 2], nodes, [0], [(3,), (3,), ()])
    w, g, lr = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64), torch.ones((), dtype=torch.float64)
    (out,) = SimulatedProgram(p, MESH)([[w.view(3) for _ in range(4)], [g] * 4, [lr] * 4])
    assert [o.tolist() for o in out] == [[-1.0] * 3] * 4


def test_write_to_a_shared_tensor_with_different_operands():
    nodes = [("colofunc.sgd_", (R(0), R(1), None, R(2), R(2), 0.0, 0.0, 0.0, False), ())]
    p = program([0, 1, 2], nodes, [0], [(3,), (3,), ()])
    w, lr, gs = torch.zeros(3, dtype=torch.float64), torch.ones((), dtype=torch.float64), per_rank(3)
    (out,) = SimulatedProgram(p, MESH)([[w] * 4, gs, [lr] * 4])
    for got, g in zip(out, gs):
        torch.testing.assert_close(got, -g)
    assert len({id(o) for o in out}) == 4


def test_write_to_an_input_that_another_input_shares():
    nodes = [("colofunc.sgd_", (R(0), R(1), None, R(2), R(2), 0.0, 0.0, 0.0, False), ()), ("aten.neg.default", (R(1),), (3,))]
    p = program([0, 1, 2], nodes, [0, 3], [(3,), (3,), (), (3,)])
    w, lr = torch.ones(3, dtype=torch.float64), torch.ones((), dtype=torch.float64)
    new, neg = SimulatedProgram(p, MESH)([[w] * 4, [w] * 4, [lr] * 4])
    assert new[0].tolist() == [0.0] * 3
    assert neg[0].tolist() == [-1.0] * 3


def test_started_collective_is_nan_until_the_wait():
    nodes = [
        ("colofunc.all_reduce_start", (R(0), ("dp",), 2, "sum"), (1,)),
        ("aten.neg.default", (R(1),), (2,)),
        ("colofunc.wait", (R(1),), (3,)),
    ]
    p = program([0], nodes, [2, 3], [(3,)] * 4)
    xs = per_rank(3)
    early, late = SimulatedProgram(p, MESH)([xs])
    assert all(e.isnan().all() for e in early)
    torch.testing.assert_close(late[0], xs[0] + xs[2])


def test_overlap_keeps_numbers_and_order():
    nodes = [
        ("aten.neg.default", (R(0),), (2,)),
        ("aten.exp.default", (R(2),), (3,)),
        ("colofunc.all_gather", (R(1), ("dp",), 2), (4,)),
        ("colofunc.rearrange", (R(4), "a b -> (a b)", (), ()), (5,)),
        ("colofunc.all_reduce", (R(3), ("tp",), 2, "sum"), (6,)),
        ("aten.add.Tensor", (R(3), R(3)), (7,)),
        ("colofunc.all_reduce", (R(6), ("dp",), 2, "sum"), (8,)),
    ]
    p = program([0, 1], nodes, [5, 7, 8], [(3,), (2,), (3,), (3,), (2, 2), (4,), (3,), (3,), (3,)])
    split = overlap(p)
    targets = [n.target.removeprefix("colofunc.") for n in split.nodes]
    assert targets[0] == "all_gather_start"
    assert targets.index("all_reduce_start") < targets.index("aten.add.Tensor") < len(targets) - 2
    xs, ys = per_rank(3), per_rank(2)
    for a, b in zip(SimulatedProgram(p, MESH)([xs, ys]), SimulatedProgram(split, MESH)([xs, ys])):
        for s, t in zip(a, b):
            torch.testing.assert_close(s, t, rtol=0, atol=0)


def test_a_gather_of_what_the_first_node_packs_keeps_its_pack():
    pack = ("colofunc.pack", ((R(0), R(1)), 0, torch.float64), (2,))
    p = program([0, 1], [pack, ("colofunc.all_gather", (R(2), ("dp",), 2), (3,))], [3], [(3,), (2,), (5,), (2, 5)])
    assert [node.target for node in overlap(p).nodes] == ["colofunc.pack", "colofunc.all_gather_start", "colofunc.wait"]


def test_what_a_gather_sends_is_packed_ahead_also_where_it_is_cast_first() -> None:
    """Masters in float32: the casts stand in front of all work, and the pack goes up to them with its gather."""
    nodes = [
        ("aten._to_copy.default", (R(0),), (1,)), ("aten.neg.default", (R(0),), (2,)),
        ("colofunc.pack", ((R(1),), 0, torch.float32), (3,)), ("colofunc.all_gather", (R(3), ("dp",), 2, 0), (4,)),
        ("aten.neg.default", (R(4),), (5,)),
    ]  # fmt: skip
    p = program([0], nodes, [2, 5], [(4,)] * 4 + [(8,)] * 2)
    targets = [node.target for node in overlap(p).nodes]
    assert targets == [
        "aten._to_copy.default", "colofunc.pack", "colofunc.all_gather_start", "aten.neg.default", "colofunc.wait", "aten.neg.default",
    ]  # fmt: skip


def test_gathers_along_an_axis_start_by_themselves_whatever_goes_along_others() -> None:
    """Three along tp, each of what was made right before, do not hold up the one along dp, which the caller gave."""
    nodes = []
    for k in range(3):
        nodes += [("aten.neg.default", (R(0),), (2 + 2 * k,)), ("colofunc.all_gather", (R(2 + 2 * k), ("tp",), 2, 0), (3 + 2 * k,))]
    nodes += [("colofunc.all_gather", (R(1), ("dp",), 2, 0), (8,))]
    p = program([0, 1], nodes, [3, 5, 7, 8], [(4,), (4,), (4,), (8,), (4,), (8,), (4,), (8,), (8,)])
    starts = [node.args[1] for node in overlap(p).nodes if node.target == "colofunc.all_gather_start"]
    assert starts == [("dp",), ("tp",), ("tp",), ("tp",)]


def test_a_pass_that_moves_a_node_before_its_operand_is_an_error():
    p = program([0], [("aten.neg.default", (R(0),), (1,)), ("aten.abs.default", (R(1),), (2,))], [2], [(3,)] * 3)
    with pytest.raises(ProgramError, match=r"node 0, aten.abs.default at step.py:1, was moved before what makes its %1"):
        p.reordered(p.nodes[::-1])
    with pytest.raises(ProgramError, match="has lost what makes the output %2"):
        p.reordered(p.nodes[:1])


def random_program(draw):
    """Packs, gathers, sums and arithmetic over a few vectors in any order; any of them may be the first."""
    shapes, nodes = [(3,)] * 3, []
    for _ in range(draw.randint(2, 10)):
        refs = [R(draw.choice([i for i, s in enumerate(shapes) if s == (3,)])) for _ in range(2)]
        kind = draw.choice(["pack", "gather", "all_reduce", "add", "relu"])
        out = len(shapes)
        if kind == "pack":
            nodes.append(("colofunc.pack", (tuple(refs), 0, torch.float64), (out,)))
            nodes.append(("colofunc.all_gather", (R(out), ("dp",), 2), (out + 1,)))
            nodes.append(("aten.select.int", (R(out + 1), 0, 1), (out + 2,)))
            nodes.append(("aten.slice.Tensor", (R(out + 2), 0, 1, 4), (out + 3,)))
            shapes += [(6,), (2, 6), (6,), (3,)]
        elif kind == "gather":
            nodes.append(("colofunc.all_gather", (refs[0], ("tp",), 2), (out,)))
            nodes.append(("aten.select.int", (R(out), 0, 0), (out + 1,)))
            shapes += [(2, 3), (3,)]
        elif kind == "all_reduce":
            nodes.append(("colofunc.all_reduce", (refs[0], ("dp",), 2, "sum"), (out,)))
            shapes.append((3,))
        else:
            args, target = (refs, "aten.add.Tensor") if kind == "add" else (refs[:1], "aten.relu.default")
            nodes.append((target, args, (out,)))
            shapes.append((3,))
    return program([0, 1, 2], nodes, draw.sample(range(3, len(shapes)), 2), shapes)


@pytest.mark.parametrize("seed", range(60))
def test_what_real_ranks_run_gives_what_stands_in_the_program(seed):
    p = random_program(random.Random(seed))
    given = [per_rank(3) for _ in p.inputs]
    for a, b in zip(SimulatedProgram(p, MESH)(given), SimulatedProgram(overlapped(p), MESH)(given)):
        for s, t in zip(a, b):
            torch.testing.assert_close(s, t, rtol=0, atol=0)


def test_fault_is_raised_once_reached():
    p = program([0], [("colofunc.all_gather", (R(0), ("dp",), 2), (1,))], [1], [(3,), (2, 3)])
    run = SimulatedProgram(p, MESH)
    with fail(rank=1, at="all_gather", skip=1):
        run([per_rank(3)])
        with pytest.raises(FaultError, match="rank 1 fails at all_gather"):
            run([per_rank(3)])
    run([per_rank(3)])


def test_error_names_the_node():
    p = program([0, 1], [("aten.mm.default", (R(0), R(1)), (2,))], [2], [(2, 3), (3, 2), (2, 2)])
    with pytest.raises(RuntimeError) as caught:
        SimulatedProgram(p, MESH)([per_rank(2, 3), per_rank(4, 2)])
    assert any("aten.mm.default" in note and "step.py:1" in note for note in caught.value.__notes__)


# ---- in place ----

ADAMW = (0.9, 0.999, 1e-8, 0.01, True)


def adamw_program(*, reads_after=False, returns_old=False, view=False):
    """param 0, grad source 1, moments 2 and 3, step 4, lr 5; new values 7, 8, 9."""
    nodes = [("aten.neg.default", (R(1),), (6,))]
    if view:
        nodes.append(("aten.view.default", (R(0), (3, 1)), (10,)))
    nodes.append(("colofunc.adamw", (R(0), R(6), R(2), R(3), R(4), R(5), *ADAMW), (7, 8, 9, None)))
    if reads_after:
        nodes.append(("aten.exp.default", (R(10 if view else 0),), (11,)))
    outputs = [7, 8, 9] + ([11] if reads_after else []) + ([0] if returns_old else [])
    shapes = [(3,), (3,), (3,), (3,), (), (), (3,), (3,), (3,), (3,), (3, 1), (3, 1) if view else (3,)]
    return program([0, 1, 2, 3, 4, 5], nodes, outputs, shapes, aliases=((0, 0), (1, 2), (2, 3)))


def adamw_inputs():
    state = [torch.randn(3, dtype=torch.float64) for _ in range(3)] + [torch.rand(3, dtype=torch.float64)]
    return [[x] * 4 for x in (*state, torch.tensor(2.0, dtype=torch.float64), torch.tensor(0.1, dtype=torch.float64))]


def test_update_becomes_in_place():
    p = adamw_program()
    q = in_place(p)
    assert [n.target for n in q.nodes] == ["aten.neg.default", "colofunc.adamw_"]
    assert q.outputs == (0, 2, 3)
    inputs = adamw_inputs()
    want = SimulatedProgram(p, MESH)([[x[0].clone()] * 4 for x in inputs])
    got = SimulatedProgram(q, MESH)(inputs)
    assert got[0][0] is inputs[0][0]
    for a, b in zip(want, got):
        torch.testing.assert_close(a[0], b[0], rtol=0, atol=0)


@pytest.mark.parametrize("unsafe", [dict(reads_after=True), dict(returns_old=True), dict(view=True, reads_after=True)])
def test_update_leaves_alone_an_old_value_that_is_read(unsafe):
    p = adamw_program(**unsafe)
    q = in_place(p)
    (update,) = (n for n in q.nodes if n.target == "colofunc.adamw_")
    assert update.args[0].id not in q.inputs and q.outputs[0] not in q.inputs  # a copy of the parameter is updated
    inputs = adamw_inputs()
    want = SimulatedProgram(p, MESH)([[x[0].clone()] * 4 for x in inputs])
    got = SimulatedProgram(q, MESH)(inputs)
    for a, b in zip(want, got):
        torch.testing.assert_close(a[0], b[0], rtol=0, atol=0)


def test_updates_move_up_to_their_gradient():
    nodes = [
        ("aten.neg.default", (R(2),), (5,)),
        ("aten.exp.default", (R(2),), (6,)),
        ("aten.mul.Tensor", (R(0), R(6)), (7,)),
        ("colofunc.sgd_", (R(0), R(5), None, R(3), R(3), 0.0, 0.0, 0.0, False), ()),
        ("colofunc.sgd_", (R(1), R(6), None, R(3), R(3), 0.0, 0.0, 0.0, False), ()),
    ]
    p = program([0, 1, 2, 3], nodes, [0, 1, 7], [(3,), (3,), (3,), (), (), (3,), (3,), (3,)])
    moved = updates_early(p)
    # The first update writes what the multiplication reads, so it stays behind it; the second only needs its gradient.
    assert [n.args[0].id for n in moved.nodes] == [2, 2, 1, 0, 0]
    assert [n.target for n in moved.nodes][2:] == ["colofunc.sgd_", "aten.mul.Tensor", "colofunc.sgd_"]


@pytest.mark.parametrize("also", ["", "reader", "output"])
def test_casts_of_gradients_move_with_their_updates(also):
    nodes = [
        ("aten.neg.default", (R(2),), (5,)),
        ("aten.exp.default", (R(2),), (6,)),
        ("aten.sin.default", (R(2),), (7,)),
        ("aten._to_copy.default", (R(5),), (8,)),
        ("aten._to_copy.default", (R(8),), (9,)),
        ("colofunc.sgd_", (R(0), R(9), None, R(3), R(3), 0.0, 0.0, 0.0, False), ()),
    ]
    nodes += [("aten.cos.default", (R(9),), (10,))] * (also == "reader")
    p = program([0, 1, 2, 3], nodes, [0, 9] if also == "output" else [0], [(3,), (3,), (3,), (), ()] + [(3,)] * 6)
    moved = [n.target.split(".")[1] for n in updates_early(p).nodes]
    rest = ["exp", "sin"]
    if also:  # somebody else reads the cast where it stands
        assert moved[: 6] == ["neg", *rest, "_to_copy", "_to_copy", "sgd_"]
    else:
        assert moved == ["neg", "_to_copy", "_to_copy", "sgd_", *rest]


@pytest.mark.parametrize("later, targets", [
    ((), ["aten.mm.default", "aten.add.out", "aten.add.out"]),
    (("aten.exp.default", (R(2),), (5,)), ["aten.mm.default", "aten.add.Tensor", "aten.add.out"]),
    (("aten.view.default", (R(2), (4,)), (5,)), ["aten.mm.default", "aten.add.Tensor", "aten.add.out"]),
])  # fmt: skip
def test_sums_go_into_fresh_tensors(later, targets):
    nodes = [("aten.mm.default", (R(0), R(1)), (2,)), ("aten.add.Tensor", (R(0), R(2)), (3,)), ("aten.add.Tensor", (R(3), R(1)), (4,))]
    if later:
        nodes.append(later)
    shapes = [(2, 2)] * 5 + [(4,) if later and "view" in later[0] else (2, 2)]
    p = program([0, 1], nodes, [4, 5] if later else [4], shapes)
    q = in_place(p)
    assert [n.target for n in q.nodes][:3] == targets
    inputs = [per_rank(2, 2), [per_rank(2, 2)[0]] * 4]
    for a, b in zip(SimulatedProgram(p, MESH)(inputs), SimulatedProgram(q, MESH)(inputs)):
        for s, t in zip(a, b):
            torch.testing.assert_close(s, t, rtol=0, atol=0)


def test_compiled_segments_are_exact():
    nodes = [
        ("colofunc.linear", (R(0), R(1)), (2,)),
        ("aten.split.Tensor", (R(2), 1, 1), (3, 4)),
        ("aten.mul.Tensor", (R(3), R(4)), (5,)),
        ("colofunc.all_reduce", (R(5), ("tp",), 2, "sum"), (6,)),
        ("aten.tanh.default", (R(6),), (7,)),
    ]
    p = program([0, 1], nodes, [7, 2], [(4, 3), (2, 3), (4, 2), (4, 1), (4, 1), (4, 1), (4, 1), (4, 1)])
    inputs = [per_rank(4, 3), per_rank(2, 3)]
    segmented, bound = compile_segments(p, "aot_eager")
    assert [n.target for n in segmented.nodes] == ["segment.0.", "colofunc.all_reduce", "aten.tanh.default"]
    got = SimulatedProgram(segmented, MESH, bound)(inputs)
    for a, b in zip(SimulatedProgram(p, MESH)(inputs), got):
        for s, t in zip(a, b):
            torch.testing.assert_close(s, t)


def test_compiled_segment_writes_in_place():
    p = in_place(adamw_program())
    inputs = adamw_inputs()
    want = SimulatedProgram(p, MESH)([[x[0].clone()] * 4 for x in inputs])
    segmented, bound = compile_segments(p, "aot_eager")
    got = SimulatedProgram(segmented, MESH, bound)(inputs)
    assert got[0][0] is inputs[0][0]
    for a, b in zip(want, got):
        torch.testing.assert_close(a[0], b[0])


def test_statistics_of_a_norm_that_are_a_view():
    """torch's own kernel reads mean and rstd without strides: a rank's rows of them would be other rows."""
    x, grad, w = torch.randn(2, 8, 4), torch.randn(2, 8, 4), torch.randn(4)
    _, mean, rstd = torch.ops.aten.native_layer_norm(x, [4], w, w, 1e-5)
    parts = [t[:, 4:] for t in (grad, x, mean, rstd)]
    fn = callable_of("aten.native_layer_norm_backward.default")
    got = fn(*parts[:2], [4], *parts[2:], w, w, [True] * 3)
    want = fn(*(t.contiguous() for t in parts[:2]), [4], *(t.contiguous() for t in parts[2:]), w, w, [True] * 3)
    assert all(torch.equal(a, b) for a, b in zip(got, want))


OF_GROUPS = ("aten.native_group_norm.default", "aten.native_group_norm_backward.default")


def test_a_group_norm_is_given_what_lies_one_behind_another():
    """torch's kernels for CUDA refuse other operands, or read them without strides."""
    def strided(*shape):
        return torch.randn(*reversed(shape)).permute(*range(len(shape))[::-1])

    x, grad, w, mean, rstd = strided(2, 6, 3, 3), strided(2, 6, 3, 3), torch.randn(6), torch.randn(2, 2), torch.rand(2, 2)
    calls = {
        OF_GROUPS[0]: ((x, w, w, 2, 6, 9, 2, 1e-5), (0,)),
        OF_GROUPS[1]: ((grad, x, mean, rstd, w, 2, 6, 9, 2, [True] * 3), (0, 1)),
    }
    for target, (args, dense) in calls.items():
        with Seen() as seen:
            got = callable_of(target)(*args)
        assert all(seen.contiguous[k] for k in dense)
        want = resolve(target)(*(a.contiguous() if k in dense else a for k, a in enumerate(args)))
        assert all(torch.equal(a, b) for a, b in zip(got, want))


class Seen(TorchDispatchMode):
    """Which operands of a group norm were contiguous."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "group_norm" in str(func):
            self.contiguous = [isinstance(a, torch.Tensor) and a.is_contiguous() for a in args]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("view", [False, True], ids=["whole", "view"])
def test_what_lanes_share_is_written_for_each_by_whatever_name_it_is_read_later(view):
    """As where memory is copied to the host behind the last write to it, by the name of its first value."""
    mesh, common = Mesh(dp=2), torch.randn(4, 3, dtype=torch.float64)
    mine = [torch.randn(12, dtype=torch.float64) for _ in range(2)] if view else [torch.randn(4, 3, dtype=torch.float64) for _ in range(2)]
    look = [("aten.view.default", (R(1), (12,)), (3,))] if view else []
    into = R(3) if view else R(1)
    nodes = [
        ("aten.neg.default", (R(0),), (1,)),
        *look,
        ("aten.mul.out", (R(2), into), (4,)),
        ("aten.neg.default", (R(1),), (5,)),
    ]
    shape = (12,) if view else (4, 3)
    made = program([0, 2], nodes, [4, 5], [(4, 3), (4, 3), shape, (12,), shape, (4, 3)])
    made = attrs.evolve(made, nodes=tuple(attrs.evolve(n, kwargs=(("out", into),)) if "out" in n.target else n for n in made.nodes))
    got = SimulatedProgram(made, mesh)([[common, common], mine])
    for rank in range(2):
        want = -common * mine[rank].view(4, 3)
        torch.testing.assert_close(got[0][rank].view(4, 3), want, rtol=0, atol=0)
        torch.testing.assert_close(got[1][rank], -want, rtol=0, atol=0)


X = torch.linspace(-2, 2, 12).reshape(3, 4)
QUICK = {
    "aten.add.Tensor": [((X, X[0]), {}), ((X, 2), {}), ((X, X), dict(alpha=3)), ((X > 0, X), {}), ((X.long(), 0.5), {})],
    "aten.add.out": [((X, X), dict(out=torch.empty(3, 4)))],
    "aten.gelu.default": [((X,), {}), ((X,), dict(approximate="tanh"))],
    "aten.mul.Tensor": [((X, X[0]), {}), ((X, 2.0), {}), ((X > 0, X > 1), {}), ((X.half(), torch.tensor(2.0)), {})],
    "aten.mul.out": [((X, 3.0), dict(out=torch.empty(3, 4))), ((X, X), dict(out=torch.empty(3, 4)))],
    "aten.native_layer_norm.default": [((X, (4,), X[0], None, 1e-5), {}), ((X, (3, 4), None, None, 1e-5), {})],
    "aten.permute.default": [((X, (1, 0)), {}), ((X, (-1, 0)), {})],
    "aten.relu.default": [((X,), {}), ((X.long(),), {})],
    "aten.select.int": [((X, 0, 1), {}), ((X, -1, -2), {})],
    "aten.squeeze.dim": [((X[None], 0), {}), ((X[..., None], -1), {}), ((X, 1), {})],
    "aten.transpose.int": [((X, 0, 1), {}), ((X, -1, -2), {})],
    "aten.unsqueeze.default": [((X, 0), {}), ((X, -1), {})],
    "aten.view.default": [((X, (12,)), {}), ((X.t(), (2, 6)), {}), ((X, (-1, 2)), {}), ((X[0, :1], ()), {})],
    "aten.sum.dim_IntList": [((X, (0,)), {}), ((X, (0, -1), True), {}), ((X, ()), {}), ((X, None), {}), ((X > 0, (0,)), {}),
                             ((X, (1,)), dict(dtype=torch.float64))],
}  # fmt: skip


@pytest.mark.parametrize("target", QUICK)
def test_a_quick_way_to_call_an_operator_is_that_operator(target):
    assert callable_of(target) is not resolve(target)
    for args, kwargs in QUICK[target]:
        quick, slow = (fn(*args, **kwargs) for fn in (callable_of(target), resolve(target)))
        torch.testing.assert_close(quick, slow, rtol=0, atol=0)


OF_MATRICES = {
    "colofunc.linear": [(X, X, None), (X, X, X[:, 0]), (X.t(), X.t(), None)],
    "colofunc.linear_dx": [(X, X.t()), (X.t(), X)],
    "colofunc.linear_dw": [(X, X), (X.t(), X[:, :4].t())],
}


@pytest.mark.parametrize("target", OF_MATRICES)
def test_a_call_for_matrices_is_that_operator(target):
    assert callable_of(target, 2) is not callable_of(target, 3) is callable_of(target)
    for args in OF_MATRICES[target]:
        torch.testing.assert_close(callable_of(target, 2)(*args), callable_of(target)(*args), rtol=0, atol=0)


def test_every_call_for_matrices_is_compared():
    assert {fn.__name__.removeprefix("_") for fn in FOR_MATRICES} == {name.removeprefix("colofunc.") for name in OF_MATRICES}


def test_every_quick_way_is_compared():
    by_strides = {"aten.native_layer_norm_backward.default", "aten.nll_loss2d_backward.default", *OF_GROUPS}
    assert {name for name in kernels._FAST if name.startswith("aten.")} - QUICK.keys() == by_strides


def test_views_that_want_neighbours_in_memory_take_any_strides():
    """What ranks send may lie transposed where one device has it in order."""
    pairs = torch.randn(2, 3, 4, dtype=torch.float64).permute(1, 2, 0)
    as_complex = resolve("aten.view_as_complex.default")
    assert torch.equal(as_complex(pairs), torch.view_as_complex(pairs.contiguous()))
    assert as_complex(pairs.contiguous()[:, 1:]).untyped_storage().nbytes() == pairs.nbytes  # where it can, it is a view
    numbers = torch.arange(24, dtype=torch.int16).view(4, 6).T
    for dtype in (torch.int8, torch.float16, torch.int32, torch.int64):
        assert torch.equal(resolve("aten.view.dtype")(numbers, dtype), numbers.contiguous().view(dtype))
