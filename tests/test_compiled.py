"""Compiled segments: where programs are cut, what is one function, and that a compiler sees what operators compute."""

from functools import partial

import attrs
import pytest
import torch
from colofunc_plugins import tensor, zero
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import colofunc as cf
from colofunc.executors.compiled import compile_segments, graph_of, shared
from colofunc.executors.segments import LONGEST, SegmentPiece, pieces
from colofunc.executors.simulated import SimulatedProgram
from colofunc.mesh import Mesh
from colofunc.ops.define import FOR_COMPILERS, KERNELS
from colofunc.ops.wire import wire_pack
from colofunc.program.ir import Node, Program, Ref, Value
from colofunc.spec.layout import replicated

R = Ref
EAGER = "aot_eager"


def program(inputs, nodes, outputs, shapes, dtype=torch.float64):
    """A local program; `shapes`: of value 0, 1, ... ; nodes as (target, args, outs)."""
    values = {i: Value(i, tuple(s), dtype, layout=replicated(tuple(s))) for i, s in enumerate(shapes)}
    made = tuple(Node(target, tuple(args), (), tuple(outs), line="step.py:1") for target, args, outs in nodes)
    return Program(tuple(inputs), made, tuple(outputs), values, stage="local")


def targets(program):
    return [node.target for node in program.nodes]


def functions_of(module, x, mesh, *plans):
    """(calls, functions, operators in functions) of the compiled training step of a module."""
    step_fn, state = cf.train_step(cf.functional(module), cf.adapt(torch.optim.AdamW, lr=0.1), loss=lambda out: (out**2).mean())
    segmented, bound = compile_segments(cf.shard(step_fn, mesh, *plans).lower(state, x).program)
    return sum(target in bound for target in targets(segmented)), len(bound), sum(len(segment.piece.nodes) for segment in bound.values())


# ---- where a program is cut ----


def test_rearrange_does_not_cut():
    nodes = [
        ("colofunc.rearrange", (R(0), "(a b) c -> b a c", ("a",), (2,)), (1,)),
        ("aten.sin.default", (R(1),), (2,)),
        ("colofunc.rearrange", (R(2), "b a c -> a (b c)", (), ()), (3,)),
        ("aten.exp.default", (R(3),), (4,)),
    ]
    p = program([0], nodes, [4], [(4, 3), (2, 2, 3), (2, 2, 3), (2, 6), (2, 6)])
    x = [torch.randn(4, 3, dtype=torch.float64)]
    segmented, bound = compile_segments(p, EAGER)
    assert targets(segmented) == ["segment.0."]
    torch.testing.assert_close(SimulatedProgram(segmented, Mesh(), bound)([x]), SimulatedProgram(p, Mesh())([x]), rtol=0, atol=0)


@pytest.mark.parametrize("between", ["all_reduce", "attention", "update", "foreign"])
def test_what_is_no_business_of_a_compiler_cuts(between):
    cuts = {
        "all_reduce": ("colofunc.all_reduce", (R(2), ("dp",), 2, "sum"), (3,)),
        "attention": ("colofunc.attention", (R(2), R(2), R(2), None, 1.0, True, 0), (3, None)),
        "update": ("colofunc.sgd_", (R(2), R(1), None, R(1), R(1), 0.0, 0.0, 0.0, False), ()),
        "foreign": ("mylib.scan", (R(2),), (3,)),
    }
    pair = [("aten.sin.default", (R(0),), (1,)), ("aten.exp.default", (R(1),), (2,))]
    again = [("aten.sin.default", (R(2),), (4,)), ("aten.exp.default", (R(4),), (5,))]
    p = program([0], [*pair, cuts[between], *again], [5], [(1, 1, 4, 3)] * 6)
    found = pieces(p)
    assert [(piece.first, piece.count) for piece in found] == [(0, 2), (3, 2)]
    assert found[0].outs == ((1, 2) if between == "update" else (2,))


def test_what_lies_on_the_host_is_not_compiled():
    pair = [("aten.sin.default", (R(0),), (1,)), ("aten.exp.default", (R(1),), (2,))]
    p = program([0], pair, [2], [(4,)] * 3)
    assert pieces(p)
    on_host = {i: value.in_tier("host") for i, value in p.values.items()}
    assert not pieces(p.with_nodes(p.nodes, on_host))


@pytest.mark.parametrize(
    "nodes",
    [
        [("aten.sin.default", (R(0),), (1,))],
        [("aten.t.default", (R(0),), (1,)), ("aten.sin.default", (R(1),), (2,)), ("aten.t.default", (R(2),), (3,))],
        [("aten.sin.default", (R(0),), (1,)), ("aten.exp.default", (R(0),), (2,)), ("aten.cos.default", (R(0),), (3,))],
        [("aten.mm.default", (R(0), R(0)), (1,)), ("aten.mm.default", (R(1), R(0)), (2,))],
    ],
    ids=["one", "views around one", "nothing in common", "products"],
)
def test_nothing_to_fuse_is_left_as_it_is(nodes):
    p = program([0], nodes, [nodes[-1][2][0]], [(4, 4)] * 4)
    assert compile_segments(p)[0].nodes == p.nodes


def test_views_at_the_ends_stand_outside():
    """Of two layers that lie at different places of one buffer the function is the same."""
    nodes = [
        ("aten.slice.Tensor", (R(0), 0, 0, 4), (1,)),
        ("aten.sin.default", (R(1),), (2,)),
        ("aten.slice.Tensor", (R(0), 0, 4, 8), (3,)),
        ("aten.add.Tensor", (R(2), R(3)), (4,)),
        ("aten.unsqueeze.default", (R(4), 0), (5,)),
        ("colofunc.all_reduce", (R(5), ("dp",), 1, "sum"), (6,)),
        ("aten.slice.Tensor", (R(0), 0, 8, 12), (7,)),
        ("aten.sin.default", (R(7),), (8,)),
        ("aten.slice.Tensor", (R(0), 0, 12, 16), (9,)),
        ("aten.add.Tensor", (R(8), R(9)), (10,)),
    ]
    p = program([0], nodes, [6, 10], [(16,), (4,), (4,), (4,), (4,), (1, 4), (1, 4), (4,), (4,), (4,), (4,)])
    segmented, bound = compile_segments(p, EAGER)
    views = ["aten.slice.Tensor"] * 2
    assert targets(segmented) == [*views, "segment.0.", "aten.unsqueeze.default", "colofunc.all_reduce", *views, "segment.0."]
    x = [torch.randn(16, dtype=torch.float64)]
    mesh = Mesh(dp=1)
    torch.testing.assert_close(SimulatedProgram(segmented, mesh, bound)([x]), SimulatedProgram(p, mesh)([x]), rtol=0, atol=0)


# ---- what is one function ----


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("aten.add.Tensor", (R(1), 1), (2,)), ("aten.add.Tensor", (R(1), 1.0), (2,))),
        (("aten.add.Tensor", (R(1), 1), (2,)), ("aten.add.Tensor", (R(1), True), (2,))),
        (("aten.add.Tensor", (R(1), R(0)), (2,)), ("aten.add.Tensor", (R(0), R(1)), (2,))),
        (("aten.add.Tensor", (R(1), R(1)), (2,)), ("aten.mul.Tensor", (R(1), R(1)), (2,))),
    ],
)
def test_functions_differ_where_their_operators_do(first, second):
    head = ("aten.sin.default", (R(0),), (1,))
    one, other = (pieces(program([0], [head, node], [2], [(4,)] * 3))[0] for node in (first, second))
    values = {i: Value(i, (4,), torch.float64) for i in range(3)}
    assert one.text(values) != other.text(values)
    assert one.text(values) == pieces(program([0], [head, first], [2], [(4,)] * 3))[0].text(values)
    assert one.text(values) != one.text({i: Value(i, (4,), torch.float32) for i in range(3)})
    assert one.text(values) != one.text({i: Value(i, (5,), torch.float64) for i in range(3)})


@pytest.mark.parametrize(("kind", "dropout"), [("tp", 0.0), pytest.param("dp", 0.0, marks=pytest.mark.sweep), ("dp", 0.1)])
def test_functions_do_not_grow_with_layers(kind, dropout):
    def of(depth):
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True)
        net = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        mesh, plan = (Mesh(tp=2), tensor("1d", "tp")) if kind == "tp" else (Mesh(dp=2), zero(3, "dp"))
        return functions_of(net, cf.abstract((4, 8, 16)), mesh, plan)

    few, many = of(4), of(8)
    assert many[1] <= few[1]  # as few functions
    assert many[0] > 1.5 * few[0]  # called more often


def test_a_long_program_on_one_device_is_cut_where_it_repeats_itself():
    def of(depth):
        layers = [layer for _ in range(depth) for layer in (nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8))]
        return functions_of(nn.Sequential(*layers), cf.abstract((4, 8)), Mesh())

    few, many = of(60), of(120)
    assert many[0] > 1.5 * few[0]
    assert max(few[2], many[2]) < 2 * LONGEST


def test_segments_are_not_long_where_they_repeat():
    """With a period that does not divide their number, and other operators around and between."""
    names = ["sin", "cos", "exp", "tanh", "neg", "abs", "sigmoid"]
    body = [names[k % 7] for k in range(7 * 101 + 3)]
    text = ["sqrt", "log", *body, "ceil", "floor", *reversed(body), "round"]
    nodes = [(f"aten.{name}.default", (R(k),), (k + 1,)) for k, name in enumerate(text)]
    p = program([0], nodes, [len(text)], [(4,)] * (len(text) + 1))
    found = pieces(p)
    assert [k for piece in found for k in range(piece.first, piece.first + piece.count)] == list(range(len(text)))
    assert max(piece.count for piece in found) <= LONGEST
    assert len({piece.text(p.values) for piece in found}) <= 5


def test_call_sites_are_operands_of_one_function():
    """Dropout behind each of two layers: one function, whose masks differ, fused with its neighbours."""
    nodes = [
        ("aten.sin.default", (R(0),), (2,)),
        ("colofunc.dropout", (R(2), R(1), 7, 0.5), (3,)),
        ("aten.exp.default", (R(3),), (4,)),
        ("colofunc.all_reduce", (R(4), ("dp",), 1, "sum"), (5,)),
        ("aten.sin.default", (R(5),), (6,)),
        ("colofunc.dropout", (R(6), R(1), 8, 0.5), (7,)),
        ("aten.exp.default", (R(7),), (8,)),
    ]
    p = program([0, 1], nodes, [4, 8], [(60,), (), *[(60,)] * 7])
    p = attrs.evolve(p, values={**p.values, 1: attrs.evolve(p.values[1], dtype=torch.int64)})
    segmented, bound = compile_segments(p, EAGER)
    assert targets(segmented) == ["segment.0.", "colofunc.all_reduce", "segment.0."]
    inputs, mesh = [[r(60)], [SEED]], Mesh(dp=1)
    got, want = SimulatedProgram(segmented, mesh, bound)(inputs), SimulatedProgram(p, mesh)(inputs)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert len(bound["segment.0."].compiled) == 1


# ---- how operands lie ----


def test_a_function_is_compiled_anew_for_other_strides():
    nodes = [("aten.sin.default", (R(0),), (1,)), ("aten.view.default", (R(1), (12,)), (2,)), ("aten.exp.default", (R(2),), (3,))]
    p = program([0], nodes, [3], [(3, 4), (3, 4), (12,), (12,)])
    (segment,) = compile_segments(p, EAGER)[1].values()
    x = torch.randn(3, 4, dtype=torch.float64)
    for given in (x, x.t().contiguous().t(), x + 1):
        torch.testing.assert_close(segment(given)[0], given.sin().reshape(12).exp())
    assert len(segment.compiled) == 2


def test_a_function_that_writes_sees_how_its_operands_overlap():
    nodes = [("aten.mul.Tensor", (R(0), 2.0), (2,)), ("colofunc.write_", (R(1), R(2)), ()), ("aten.add.Tensor", (R(0), R(2)), (3,))]
    p = program([0, 1], nodes, [3], [(4,)] * 4)
    (segment,) = compile_segments(p, EAGER)[1].values()
    for offset in (0, 1, 4):
        memory = torch.arange(8.0, dtype=torch.float64)
        want = memory.clone()
        a, b = want[:4], want[offset : offset + 4]
        doubled = a * 2
        b.copy_(doubled)
        total = a + doubled
        (got,) = segment(memory[:4], memory[offset : offset + 4])
        torch.testing.assert_close((memory, got), (want, total))
    assert shared([want[:4], want[4:]]) == ()
    assert shared([want[:4], want[3:]]) != shared([want[:4], want[2:]])


# ---- what a compiler sees ----


SEED = torch.tensor(5)


def r(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def classes(*shape):
    return torch.randint(0, 3, shape)


CODES = torch.arange(-6, 6, dtype=torch.int8).view(3, 4)
SEEN = {
    "colofunc.linear": [(r(2, 3, 4), r(5, 4), r(5)), (r(4), r(5, 4))],
    "colofunc.linear_dx": [(r(2, 3, 5), r(5, 4))],
    "colofunc.linear_dw": [(r(2, 3, 5), r(2, 3, 4))],
    "colofunc.rms_norm": [(r(2, 3, 4), (4,), r(4), 1e-5), (r(2, 3, 4), (3, 4), None, 1e-5)],
    "colofunc.rms_norm_dx": [(r(2, 3, 4), r(2, 3, 4), (4,), r(2, 3, 1), r(4)), (r(2, 3, 4), r(2, 3, 4), (3, 4), r(2, 1, 1), None)],
    "colofunc.rms_norm_dw": [(r(2, 3, 4), r(2, 3, 4), (4,), r(2, 3, 1)), (r(2, 4), r(2, 4), (2, 4), r(1, 1))],
    "colofunc.pack": [((r(4), r(2, 3)), 0, torch.float32), ((r(2, 3), r(2, 2, 2), r(2, 0)), 1, torch.float64)],
    "colofunc.write_": [(r(2, 3), r(6)), (r(3, 2).t(), r(6))],
    "colofunc.shift": [(r(3, 5), 1, -1, 0.0), (classes(4), 0, 2, -100)],
    "colofunc.fit": [(r(3, 5), (4, 2))],
    "colofunc.pack_saved": [(r(3, 4, 6), 2, 3, torch.int8), (r(2, 4, 6).transpose(0, 1), 1, 2, torch.float8_e4m3fn)],
    "colofunc.widen_saved": [
        (CODES, r(3, 2), torch.int8, torch.float64), (CODES.abs().view(torch.uint8), r(3), torch.float8_e4m3fn, torch.bfloat16),
    ],
    "colofunc.sum_of_squares": [(r(3, 5),), (r(5, 4).t(),), (r(2, 0),)],
    "colofunc.slice_scatter_": [(r(3, 5), r(3, 2), 1, 1, 3)],
    "colofunc.select_scatter_": [(r(3, 5), r(3), 1, -1)],
    "colofunc.diagonal_scatter_": [(r(3, 5), r(3), 1)],
    "colofunc.log_softmax_": [(r(3, 5), 1), (r(3, 5), 0)],
    "colofunc.cross_entropy_dx_": [
        (r(6, 3).log_softmax(1), r(()), torch.tensor([0, 1, 2, -100, 0, 2]), how, -100, torch.tensor(5.0, dtype=torch.float64))
        for how in (1, 2)
    ] + [(r(3, 3).log_softmax(1), r(3), classes(3), 0, -100, torch.tensor(3.0, dtype=torch.float64))],
    "colofunc.random_bits": [(SEED, 3, (4, 5)), (SEED, 3, (4, 12), (4, 12), (24, 2), torch.tensor(1))],
    "colofunc.random_uniform": [(SEED, 3, (4, 5), dtype) for dtype in (torch.float32, torch.bfloat16)],
    "colofunc.random_bernoulli": [(SEED, 3, (4, 500), torch.bool, 0.9), (SEED, 3, (), torch.float32, 0.5)],
    "colofunc.dropout": [
        (r(4, 500), SEED, 3, 0.1), (r(5, 4).t(), SEED, 3, 0.5, (4, 5), (10, 1), torch.tensor(7)), (r(4).bfloat16(), SEED, 3, 1 / 3),
        (r(4, 5), SEED, 3, 1.0),
    ],
    "colofunc.wire_pack": [(r(3, 37), scheme, n) for scheme, n in (("int8", 2), ("int4-g8", 3), ("fp8-g16", 1))],
    "colofunc.wire_open": [
        (wire_pack(r(3, 37), scheme, n), (3, 37), torch.float64, scheme) for scheme, n in (("int8", 2), ("int4-g8", 3), ("fp8-g16", 1))
    ],
    "colofunc.wire_sum": [(wire_pack(r(3, 40), scheme, 3), (5, 8), torch.float64, scheme) for scheme in ("int8", "int4-g8", "fp8-g16")],
    "colofunc.wire_left": [
        (r(3, 40), wire_pack(r(3, 40), "int8", 3), "int8", None, None, None),
        (r(3, 40), wire_pack(r(3, 40), "int8", 3), "int8", r(40), wire_pack(r(40), "int8", 1), torch.tensor(1)),
    ],
    "colofunc.carry": [(r(3, 5), r(3, 5))],
    "colofunc.residual": [(r(3, 5), "params.w")],
}  # fmt: skip


def test_every_operator_that_a_compiler_sees_is_tried_here():
    assert set(SEEN) == set(FOR_COMPILERS)


@pytest.mark.parametrize("target", SEEN)
def test_a_compiler_sees_operators_of_torch_with_the_same_numbers(target):
    for args in SEEN[target]:
        first, second, third = ([x.clone() if isinstance(x, torch.Tensor) else x for x in args] for _ in range(3))
        want, got = KERNELS[target](*first), FOR_COMPILERS[target](*second)
        tensors = [(a, b) for a, b in zip(first, second) if isinstance(a, torch.Tensor)]
        for a, b in [(want, got), *tensors] if want is not None else tensors:
            torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)
        graph = make_fx(partial(FOR_COMPILERS[target], *third), tracing_mode="fake", _allow_non_fake_inputs=True)().graph
        names = {str(node.target) for node in graph.nodes if node.op == "call_function"}
        assert names and not [name for name in names if not name.startswith(("aten.", "prims."))]
        assert "aten._local_scalar_dense.default" not in names


@pytest.mark.parametrize("target", ["random_bits", "random_uniform", "random_bernoulli", "dropout"])
def test_random_numbers_fuse_with_their_neighbours(target):
    """Inductor writes one kernel for a card where every word that is mixed has the shape of the result (a key of one element would be a
    kernel of its own), and computes products of bare positions in 32 bits."""
    first = (r(6, 40),) if target == "dropout" else ()
    middle = {
        "random_bits": ((6, 40),), "random_uniform": ((6, 40), torch.float32), "random_bernoulli": ((6, 40), torch.bool, 0.9),
        "dropout": (0.9,),
    }[target]  # fmt: skip
    function = partial(FOR_COMPILERS[f"colofunc.{target}"], *first)
    graph = make_fx(lambda seed, site, offset: function(seed, site, *middle, (6, 40), (80, 1), offset))(SEED, SEED, SEED).graph
    mixing = [node for node in graph.nodes if node.target is torch.ops.aten.bitwise_xor.Tensor]
    assert len(mixing) >= 8 and {node.meta["val"].shape for node in mixing} == {(6, 40)}
    positions = [node for node in graph.nodes if node.target is torch.ops.aten.arange.default]
    assert positions and {user.target for node in positions for user in node.users} == {torch.ops.aten.bitwise_or.Scalar}


def test_a_graph_is_made_for_the_device_of_its_operands():
    nodes = (
        Node("aten.full.default", ((4,), 1.0), (("dtype", torch.float64), ("device", torch.device("cpu"))), (1,)),
        Node("aten.arange.default", (4,), (("dtype", torch.float64),), (2,)),
        Node("aten.add.Tensor", (R(0), R(1)), (), (3,)),
        Node("aten.add.Tensor", (R(3), R(2)), (), (4,)),
    )
    graph = graph_of(SegmentPiece(0, 4, (), nodes, (0,), (4,), ()), torch.device("meta"))
    assert graph(torch.empty(4, dtype=torch.float64, device="meta"))[0].device.type == "meta"


def test_updates_side_by_side_are_one_call() -> None:
    """And do not stand between the operators of the backward pass, which are one function with those of the forward pass."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8))]
    step_fn, state = cf.train_step(cf.functional(nn.Sequential(*layers)), cf.adapt(torch.optim.AdamW, lr=0.1), lambda out: (out**2).mean())
    step, batch = cf.shard(step_fn, Mesh()).on("compiled"), torch.randn(64, 8)
    program = step.lower(step.init(state, batch), batch).program
    segmented, bound = compile_segments(program, EAGER)
    assert len(bound) == 1 and set(targets(segmented)) == {*bound, "colofunc.adamw_"}
    run = SimulatedProgram(segmented, Mesh(), bound)
    inputs = ((0,),) * sum(i not in segmented.constants for i in segmented.inputs)
    source = run.write(inputs, torch.device("cpu")).function().source
    assert source.count("adamw_all_(") == 1 and source.count("adamw_(") == 0


def test_a_compiled_step_is_planned_by_its_fused_kernels_and_as_real_ranks_run_it():
    """Before there are any: collectives run beside compute, and what is fused is written once. Small updates go together later."""
    width = 1024
    layers = [one for _ in range(4) for one in (nn.Linear(width, width, device="meta"), nn.GELU(), nn.LayerNorm(width, device="meta"))]
    step_fn, state = cf.train_step(cf.functional(nn.Sequential(*layers)), cf.adapt(torch.optim.AdamW, lr=0.1), loss=lambda out: out.mean())
    step = cf.shard(step_fn, cf.Mesh(dp=8, topology="8xh100"), zero(3, "dp"))
    eager, compiled = (step.on(name).lower(state, cf.abstract((1 << 17, width))) for name in ("distributed", "compiled"))
    assert compiled.plan.cost_s == pytest.approx(compiled.lanes().end_s, rel=0.01)
    assert any(term.hidden_s > 0 for term in compiled.terms() if term.what.startswith("all_gather"))
    assert compiled.plan.cost_s < 0.95 * eager.plan.cost_s
