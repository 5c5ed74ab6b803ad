"""Programs as data: checking, printing, saving, simplifying, running."""

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from interpreter import run_reference
from torch import nn
from torch.utils.checkpoint import checkpoint

from colofunc.errors import InputError, ProgramError
from colofunc.mesh import Mesh
from colofunc.ops.targets import overload, resolve, target_of
from colofunc.program.check import Checker, check_program
from colofunc.program.ir import Node, Program, Ref, Value, rewritten
from colofunc.program.passes.simplify import drop_dead, fold_masks, simplify, tidy
from colofunc.program.passes.simplify_known import _runs_of_mask, classify_runs
from colofunc.program.text import text
from colofunc.program.tracing.trace import phase, trace, watch_modules
from colofunc.spec.layout import make_layout, replicated

f64 = torch.float64


def program_of(fn: Callable[..., Any], *args: Any) -> Program:
    return trace(fn, args).program


def targets(program: Program) -> list[str]:
    return [node.target for node in program.nodes]


def same_results(fn: Callable[..., Any], *args: torch.Tensor) -> Program:
    """Simplifying changes no result; returns the simplified program."""
    before = program_of(fn, *args)
    after = simplify(before)
    check_program(after)
    for x, y in zip(run_reference(before, args), run_reference(after, args), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
    return after


# ---- text ----


def test_text_of_a_step() -> None:
    def step(w: torch.Tensor, x: torch.Tensor) -> Any:
        w = w.detach().requires_grad_()
        F.linear(x, w).sum().backward()
        with phase("update"):
            return w.detach() - 0.1 * w.grad

    lines = text(simplify(program_of(step, torch.ones(3, 2), torch.ones(4, 2)))).splitlines()
    assert lines[:2] == ["input %0 w: f32[3,2]    # param", "input %1 x: f32[4,2]    # batch"]
    assert any("= linear_dw(" in line and "# backward" in line and "test_program.py:" in line for line in lines)
    assert any("= sub.Tensor(%0, " in line and "# update" in line for line in lines)
    assert lines[-1].startswith("return %")


def test_text_shows_layouts() -> None:
    layout = make_layout((((2, "dp"), (4, None)), ((3, None),)), (8, 3), (("tp", "sum"),))
    value = Value(0, (4, 3), torch.float32, "x", "batch", layout)
    assert text(Program((0,), (), (0,), {0: value}, stage="local")) == (
        "input %0 x: f32[4,3] «(dp a) b +tp»    # batch\nreturn %0\n"
    )


def test_text_is_the_same_for_two_traces() -> None:
    step = lambda x: torch.softmax(x @ x.t(), -1)  # noqa: E731
    assert text(program_of(step, torch.ones(3, 3))) == text(program_of(step, torch.ones(3, 3)))


# ---- check ----


def _sum_program() -> Program:
    return program_of(lambda x: (x * 2).sum(), torch.ones(3))


def test_check_accepts_what_is_traced() -> None:
    check_program(_sum_program())


def test_check_shows_the_node_and_its_neighbours() -> None:
    program = _sum_program()
    mul, total = program.nodes
    with pytest.raises(ProgramError, match=r"read before it is defined\n--> .*sum.*\n    .*mul"):
        check_program(program.with_nodes([total, mul]))
    with pytest.raises(ProgramError, match="defined twice"):
        check_program(program.with_nodes([mul, mul, total]))
    with pytest.raises(ProgramError, match="never defined"):
        check_program(program.with_nodes([mul]))


def test_check_types_every_node() -> None:
    program = _sum_program()
    wrong = {**program.values, 1: attrs.evolve(program.values[program.nodes[0].outs[0]], shape=(4,))}
    vid = program.nodes[0].outs[0]
    values = {**wrong, vid: attrs.evolve(program.values[vid], shape=(4,))}
    with pytest.raises(ProgramError, match=r"is f32\[4\], the operator gives torch.float32 \(3,\)"):
        check_program(program.with_nodes(program.nodes, values))
    bad = attrs.evolve(program.nodes[0], target="aten.mm.default", args=(Ref(0), Ref(0)))
    with pytest.raises(ProgramError, match=r"aten.mm.default refuses its operands"):
        check_program(program.with_nodes([bad, program.nodes[1]]))
    unknown = attrs.evolve(program.nodes[0], target="aten.nothing.default")
    with pytest.raises(ProgramError, match="not registered"):
        check_program(program.with_nodes([unknown, program.nodes[1]]))


def test_a_checker_that_knows_a_node_sees_what_it_reads_and_makes_and_where_it_stands() -> None:
    program, check = _sum_program(), Checker()
    check(program)
    check(program)
    mul, total = program.nodes
    with pytest.raises(ProgramError, match="read before it is defined"):
        check(program.with_nodes([total, mul]))
    with pytest.raises(ProgramError, match="defined twice"):
        check(program.with_nodes([mul, mul, total]))
    values = {**program.values, mul.outs[0]: attrs.evolve(program.values[mul.outs[0]], shape=(4,))}
    with pytest.raises(ProgramError, match=r"is f32\[4\], the operator gives"):
        check(program.with_nodes([mul, total], values))  # the nodes are the same, a value is not
    given = program.inputs[0]
    values = {**program.values, given: attrs.evolve(program.values[given], shape=(4,))}
    with pytest.raises(ProgramError):
        check(program.with_nodes([mul, total], values))
    gather = Node("colofunc.all_gather", (Ref(0), ("dp",), 2), (), (1,))
    given, made = Value(0, (3,), f64, layout=replicated((3,))), Value(1, (2, 3), f64)
    local = Program((0,), (gather,), (), {0: given, 1: made}, stage="local")
    check(local)
    with pytest.raises(ProgramError, match=r"collective .* in a global program"):
        check(attrs.evolve(local, stage="global", values={0: attrs.evolve(given, layout=None), 1: made}))


def test_check_knows_the_stages() -> None:
    gather = Node("colofunc.all_gather", (Ref(0), ("dp",), 2), (), (1,))
    values = {0: Value(0, (3,), f64), 1: Value(1, (2, 3), f64)}
    program = Program((0,), (gather,), (1,), values)
    with pytest.raises(ProgramError, match=r"collective .* in a global program"):
        check_program(program)
    with pytest.raises(ProgramError, match="%0 has no layout in a local program"):
        check_program(attrs.evolve(program, stage="local"))
    layouts = {
        0: attrs.evolve(values[0], layout=make_layout((((2, "dp"), (3, None)),), (6,))),
        1: attrs.evolve(values[1], layout=replicated((2, 3))),
    }
    local = attrs.evolve(program, stage="local", values=layouts)
    check_program(local, Mesh(dp=2))
    with pytest.raises(ProgramError, match="axis 'dp', which the mesh does not have"):
        check_program(local, Mesh(tp=2))
    wrong = attrs.evolve(local, values={**layouts, 0: attrs.evolve(layouts[0], layout=replicated((6,)))})
    with pytest.raises(ProgramError, match=r"has shape .3,., its layout"):
        check_program(wrong)
    write = Node("aten.add_.Tensor", (Ref(0), 1.0), (), (2,))
    mutating = attrs.evolve(local, nodes=(gather, write), values={**layouts, 2: attrs.evolve(layouts[0], id=2)})
    with pytest.raises(ProgramError, match="only the in-place stage allows"):
        check_program(mutating)
    check_program(attrs.evolve(mutating, stage="inplace"))


def test_a_node_that_is_rewritten_keeps_all_that_it_is_not_given() -> None:
    """`rewritten` writes the fields by their places, as it is called for every node: here stands each of them."""
    names = [field.name for field in attrs.fields(Node) if field.init]
    kept = {name: object() for name in names if name not in ("args", "kwargs", "outs", "note", "on")}
    node = Node(args=(), kwargs=(), outs=(), **kept)
    given = {"args": (Ref(1),), "kwargs": (("dim", 0),), "outs": (7, None), "note": "why", "on": None}
    new = rewritten(node, *given.values())
    assert {name: getattr(new, name) for name in names} == kept | given
    assert (new.refs, new.results) == ((1,), (7,)), "what a node works out is its own"


def test_check_aliases() -> None:
    program = attrs.evolve(program_of(lambda x: (x + 1, x.sum()), torch.ones(3)), aliases=((0, 0),))
    check_program(program)
    with pytest.raises(ProgramError, match="cannot be updated in place"):
        check_program(attrs.evolve(program, aliases=((1, 0),)))


# ---- simplify ----


def test_views_and_copies_that_change_nothing_go() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = (
            x.clone()
            .view(2, 6)
            .view(3, 4)
            .t()
            .t()
            .transpose(0, 1)
            .transpose(1, 0)
            .permute(0, 1)
            .to(x.dtype)[:]
            .expand(3, 4)
        )
        return torch.cat([y, torch.zeros(0, dtype=x.dtype)]) + y.contiguous()

    assert targets(same_results(step, torch.randn(3, 4, dtype=f64))) == ["aten.add.Tensor"]


def test_equal_calls_are_computed_once_but_types_differ() -> None:
    def step(x: torch.Tensor) -> Any:
        return torch.exp(x) + torch.exp(x), x * 1, x * 1.0, x * 0.0, x * -0.0

    after = same_results(step, torch.arange(3))
    assert targets(after).count("aten.exp.default") == 1
    assert targets(after).count("aten.mul.Tensor") == 4


def test_different_draws_stay_different() -> None:
    program = simplify(program_of(lambda x: (torch.rand_like(x), torch.rand_like(x)), torch.ones(3)))
    assert len(program.nodes) == 2
    a, b = run_reference(program, [torch.ones(3), torch.tensor(1)])
    assert not torch.equal(a, b)


def test_recomputation_disappears() -> None:
    def step(w: torch.Tensor, x: torch.Tensor) -> Any:
        w = w.detach().requires_grad_()
        checkpoint(lambda w: torch.tanh(x @ w), w, use_reentrant=True).sum().backward()
        return w.grad

    args = torch.randn(4, 2, dtype=f64), torch.randn(3, 4, dtype=f64)
    assert targets(program_of(step, *args)).count("aten.tanh.default") == 2
    assert targets(same_results(step, *args)).count("aten.tanh.default") == 1


def test_dead_code_and_unused_constants_go() -> None:
    table = torch.randn(5, 5)
    program = program_of(lambda x: (x.exp().sum(), x + 1, table @ table)[1], torch.ones(3))
    assert len(program.nodes) == 4 and len(program.constants) == 1
    after = drop_dead(program)
    assert targets(after) == ["aten.add.Tensor"] and not after.constants and after.inputs == (0,)


def test_small_tables_become_constants() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        angle = torch.arange(4, dtype=f64)[:, None] * torch.tensor([1.0, 0.1], dtype=f64)
        return x * angle.cos() + torch.zeros(4, 2, dtype=f64)

    after = same_results(step, torch.randn(4, 2, dtype=f64))
    assert targets(after) == ["aten.mul.Tensor", "aten.full.default", "aten.add.Tensor"]
    assert [t.shape for t in after.constants.values()] == [(4, 2)]


# ---- masks ----


def _mask(rows: int, columns: int, keep: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return keep(torch.arange(rows)[:, None], torch.arange(columns)[None]).expand(rows, columns)


def classify(mask: torch.Tensor, rows: int, columns: int, causal: bool = False, window: int = 0) -> tuple[bool, int] | None:
    """As a mask of constants is read by the pass."""
    runs = _runs_of_mask(mask, columns)
    return None if runs is None else classify_runs(*runs, rows, columns, causal, window)


def test_masks_are_classified() -> None:
    causal = _mask(6, 6, lambda i, j: j <= i)
    window = _mask(6, 6, lambda i, j: (j <= i) & (j > i - 3))
    assert classify(torch.ones(6, 6, dtype=torch.bool), 6, 6) == (False, 0)
    assert classify(causal, 6, 6) == (True, 0)
    assert classify(causal.expand(2, 1, 6, 6), 6, 6) == (True, 0)
    assert classify(window, 6, 6) == (True, 3)
    assert classify(torch.zeros(6, 6).masked_fill(~window, torch.finfo(torch.float32).min), 6, 6) == (True, 3)
    assert classify(torch.zeros(6, 6).masked_fill(~causal, float("-inf")), 6, 6, window=3) == (True, 3)
    assert classify(_mask(6, 6, lambda i, j: j > i - 3), 6, 6) == (False, 3)
    assert classify(torch.ones(1, 1, dtype=torch.bool), 6, 6, causal=True) == (True, 0)
    assert classify(_mask(4, 6, lambda i, j: j <= i), 4, 6) == (True, 0)


def test_other_masks_are_left_alone() -> None:
    causal = _mask(6, 6, lambda i, j: j <= i)
    assert classify(_mask(4, 6, lambda i, j: j <= i + 2), 4, 6) is None
    assert classify(causal.flip(0), 6, 6) is None
    assert classify(torch.zeros(6, 6, dtype=torch.bool), 6, 6) is None
    assert classify(_mask(6, 6, lambda i, j: j < i), 6, 6) is None
    assert classify(torch.zeros(6, 6).masked_fill(~causal, -5.0), 6, 6) is None
    assert classify(torch.stack([causal, torch.ones_like(causal)])[:, None], 6, 6) is None


def _attend(keep: Callable[[int], torch.Tensor]) -> Callable[..., torch.Tensor]:
    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        mask = keep(q.shape[2])[None, None].expand(q.shape[0], 1, -1, -1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out, *torch.autograd.grad((out * out).sum(), (q, k, v))

    return step


@pytest.mark.parametrize(
    ("keep", "says"),
    [
        (lambda s: torch.ones(s, s, dtype=torch.bool).tril(), (True, 0)),
        (lambda s: torch.ones(s, s, dtype=torch.bool).tril().triu(-2), (True, 3)),
        (lambda s: torch.full((s, s), float("-inf"), dtype=f64).triu(1), (True, 0)),
        (lambda s: torch.zeros(s, s, dtype=f64), (False, 0)),
    ],
)
def test_a_known_mask_leaves_no_square_tensor(keep: Any, says: tuple[bool, int]) -> None:
    q, k, v = (torch.randn(2, 3, 7, 4, dtype=f64) for _ in range(3))
    after = same_results(_attend(keep), q, k, v)
    attention = [n for n in after.nodes if n.target.startswith("colofunc.attention")]
    assert [n.args[5:7] if n.target == "colofunc.attention" else n.args[8:10] for n in attention] == [says, says]
    assert not any(value.shape[-2:] == (7, 7) for value in after.values.values())


def test_an_unknown_mask_stays() -> None:
    q = torch.randn(2, 3, 7, 4, dtype=f64)
    band = lambda s: torch.ones(s, s, dtype=torch.bool).tril(2)  # noqa: E731
    after = same_results(_attend(band), q, q, q)
    assert isinstance(next(n for n in after.nodes if n.target == "colofunc.attention").args[3], Ref)


def test_a_mask_that_depends_on_an_input_stays() -> None:
    def step(q: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q, attn_mask=keep[:, None, None, :])

    program = fold_masks(program_of(step, torch.randn(2, 3, 7, 4), torch.ones(2, 7, dtype=torch.bool)))
    assert isinstance(next(n for n in program.nodes if n.target == "colofunc.attention").args[3], Ref)


# ---- running ----


def test_targets_resolve() -> None:
    assert target_of(overload("aten.mm.default")) == "aten.mm.default"
    assert target_of(overload("colofunc.linear")) == "colofunc.linear"
    x = torch.arange(6.0).view(2, 3).t()
    assert torch.equal(resolve("aten.view.default")(x, (6,)), x.reshape(6))
    assert torch.equal(resolve("aten.as_strided.default")(x, (2,), (3,), 1), x.contiguous().as_strided((2,), (3,), 1))
    with pytest.raises(ProgramError, match=r"'aten.nothing' is not registered"):
        resolve("aten.nothing")


def test_reference_counts_its_inputs() -> None:
    with pytest.raises(InputError, match="takes 1 tensors, 2 were given"):
        run_reference(_sum_program(), [torch.ones(3), torch.ones(3)])


# ---- models ----


def _models() -> dict[str, Callable[[], nn.Module]]:
    transformers = pytest.importorskip("transformers")
    sizes = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
    return {
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=64, n_positions=32)
        ),
        "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=2)),
        "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**sizes)),
        "mistral": lambda: transformers.MistralForCausalLM(
            transformers.MistralConfig(**sizes, num_key_value_heads=2, sliding_window=4)
        ),
    }


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "mistral"])
def test_model_steps_equal_eager(name: str) -> None:
    from colofunc.ops import canonical

    model = _models()[name]().double()
    params = {k: v.detach() for k, v in model.named_parameters()}
    ids = torch.randint(0, 64, (2, 14))

    def step(params: dict[str, torch.Tensor], ids: torch.Tensor) -> Any:
        live = {k: v.detach().requires_grad_() for k, v in params.items()}
        with watch_modules(model):
            loss = torch.func.functional_call(model, live, (), dict(input_ids=ids, labels=ids)).loss
        loss.backward()
        with phase("update"):
            return {k: v.detach() - 0.1 * v.grad for k, v in live.items() if v.grad is not None}, loss.detach()

    traced = trace(step, (params, ids))
    check_program(traced.program)
    seed = [torch.tensor(3)] if traced.uses_seed else []
    new, loss = traced.unpack(run_reference(traced.program, traced.pack((params, ids)) + seed))
    with canonical.single_device(torch.tensor(3)):
        expected, expected_loss = step(params, ids)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=1e-12)
    for k in expected:
        torch.testing.assert_close(new[k], expected[k].detach(), rtol=1e-12, atol=1e-12)
    # Dropping copies changes strides, and with them the order of sums inside kernels: losses are float32 here.
    after = simplify(traced.program)
    check_program(after)
    assert not any(v.shape[-2:] == (14, 14) for v in after.values.values())
    for x, y in zip(
        run_reference(after, traced.pack((params, ids)) + seed), [*expected.values(), expected_loss], strict=True
    ):
        torch.testing.assert_close(x, y.detach(), rtol=1e-6, atol=1e-6)


def test_tidy_keeps_outputs_that_are_inputs() -> None:
    program = tidy(program_of(lambda x: (x.clone(), x.view(3)), torch.ones(3)))
    assert program.outputs == (0, 0) and not program.nodes
