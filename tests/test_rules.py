"""Rules of the plain families, each tried by brute force on real parts (see rule_oracle)."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from rule_oracle import check_op, check_strategies, make_call

import colofunc.ops.linear
import colofunc.ops.update  # noqa: F401 - registers the operators
from colofunc.errors import SpecError
from colofunc.mesh import Mesh
from colofunc.program.tracing.trace import record_local
from colofunc.spec.rule import TensorType
from colofunc.spec.rules import build as rule_texts
from colofunc.spec.rules import rule_for, strategies_for
from colofunc.spec.rules.pattern import bind
from colofunc.spec.strategies import build

f64 = torch.float64


def r(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=f64)


CASES = {
    "add": (("aten.add.Tensor", r(6, 10), r(10)), {"d0", "d1"}),
    "add alpha": (("aten.add.Tensor", r(6, 1), r(1, 10)), {"d0", "d1"}),
    "add scalar": (("aten.add.Scalar", r(6), 1.5), {"d0"}),
    "mul": (("aten.mul.Tensor", r(6, 10), r(6, 1)), {"d0", "d1"}),
    "where": (("aten.where.self", r(6, 4) > 0, r(6, 4), r(4)), {"d0", "d1"}),
    "masked_fill": (("aten.masked_fill.Scalar", r(6, 4), r(6, 4) > 0, 0.0), {"d0", "d1"}),
    "masked_fill inf": (("aten.masked_fill.Scalar", r(6, 4), r(6, 4) > 0, -1e9), {"d0", "d1"}),
    "gelu_backward": (("aten.gelu_backward.default", r(6), r(6)), {"d0"}),
    "view": (("aten.view.default", r(2, 12), (2, 3, 4)), {"f0", "f1", "f2"}),
    "view merge": (("aten.view.default", r(2, 3, 4), (6, 4)), {"f0", "f1", "f2"}),
    "view crossing": (("aten.view.default", r(4, 6), (6, 4)), {"f0", "f1"}),
    "view minus one": (("aten.view.default", r(4, 6), (-1,)), {"f0", "f1"}),
    "squeeze": (("aten.squeeze.default", r(2, 1, 3)), {"f0", "f1"}),
    "squeeze dim": (("aten.squeeze.dim", r(2, 1, 3), 0), {"f0", "f1"}),
    "expand": (("aten.expand.default", r(4, 1), (6, 4, 10)), {"d0", "d1", "d2"}),
    "permute": (("aten.permute.default", r(2, 3, 4), (2, 0, 1)), {"d0", "d1", "d2"}),
    "slice blocks": (("aten.slice.Tensor", r(12, 6), 0, 4, 12), {"c", "d1"}),
    "slice odd": (("aten.slice.Tensor", r(12, 6), 0, 1, 12), {"d1"}),
    "slice step": (("aten.slice.Tensor", r(12, 6), 0, 0, 12, 2), {"d1", "j"}),
    "slice step from one": (("aten.slice.Tensor", r(12, 6), 0, 1, 2**63 - 1, 3), {"d1", "j"}),
    "slice step to the last": (("aten.slice.Tensor", r(12, 6), 0, 1, 11, 3), {"d1", "j"}),
    "slice step of a part": (("aten.slice.Tensor", r(12, 6), 0, 0, 9, 2), {"d1"}),
    "slice_backward step": (("aten.slice_backward.default", r(6, 6), (12, 6), 0, 1, 12, 2), {"d1", "j"}),
    "slice_scatter step": (("aten.slice_scatter.default", r(12, 6), r(6, 6), 0, 1, 12, 2), {"d1", "j"}),
    "slice_backward": (("aten.slice_backward.default", r(8, 6), (12, 6), 0, 4, 12, 1), {"c", "d1"}),
    "slice_scatter": (("aten.slice_scatter.default", r(12, 6), r(8, 6), 0, 4, 12), {"c", "d1"}),
    "split qkv": (("aten.split.Tensor", r(4, 18), 6, 1), {"d0", "c"}),
    "split uneven": (("aten.split_with_sizes.default", r(4, 20), (12, 4, 4), 1), {"d0", "c"}),
    "cat": (("aten.cat.default", [r(4, 6), r(4, 12)], 1), {"d0", "c"}),
    "cat empty": (("aten.cat.default", [r(0), r(4, 6)], -1), {"d0", "c"}),
    "stack": (("aten.stack.default", [r(4, 6), r(4, 6)], 1), {"d0", "d2"}),
    "repeat": (("aten.repeat.default", r(4), (6, 2)), {"r0", "r1", "d0"}),
    "pad": (("aten.constant_pad_nd.default", r(4, 6), (1, 2)), {"d0"}),
    "select": (("aten.select.int", r(4, 6), 0, 1), {"d1"}),
    "select_backward": (("aten.select_backward.default", r(6), (4, 6), 0, 1), {"d1"}),
    "unbind": (("aten.unbind.int", r(2, 6)), {"d1"}),
    "sum": (("aten.sum.dim_IntList", r(4, 6), [1]), {"d0", "d1"}),
    "sum all": (("aten.sum.default", r(4, 6)), {"d0", "d1"}),
    "mean": (("aten.mean.dim", r(4, 6, 10), [0, 2]), {"d0", "d1", "d2"}),
    "mean all": (("aten.mean.default", r(4, 6)), {"d0", "d1"}),
    "amax": (("aten.amax.default", r(4, 6), [1], True), {"d0", "d1"}),
    "max dim": (("aten.max.dim", r(4, 6), 1), {"d0"}),
    "var": (("aten.var.correction", r(4, 6), [1]), {"d0"}),
    "mm": (("aten.mm.default", r(4, 6), r(6, 10)), {"m", "k", "n"}),
    "bmm": (("aten.bmm.default", r(2, 4, 6), r(2, 6, 10)), {"b", "m", "k", "n"}),
    "matmul": (("aten.matmul.default", r(2, 3, 4, 6), r(3, 6, 10)), {"b0", "b1", "m", "k", "n"}),
    "addmm": (("aten.addmm.default", r(10), r(4, 6), r(6, 10)), {"m", "k", "n"}),
    "baddbmm": (("aten.baddbmm.default", r(2, 1, 10), r(2, 4, 6), r(2, 6, 10)), {"b", "m", "k", "n"}),
    "full": (("aten.full.default", (6, 4), 2.0), {"d0", "d1"}),
    "new_zeros": (("aten.new_zeros.default", r(3), (6, 4)), {"d0", "d1"}),
    "zeros_like": (("aten.zeros_like.default", r(6, 4)), {"d0", "d1"}),
    "arange": (("aten.arange.default", 6), {"d0"}),
    "amax all": (("aten.amax.default", r(4, 6)), {"d0", "d1"}),
    "argmax": (("aten.argmax.default", r(4, 6), 1), {"d0"}),
    "any": (("aten.any.dim", r(4, 6) > 0, 1), {"d0"}),
    "all": (("aten.all.dims", r(4, 6, 10) > 0, (0, 2)), {"d1"}),
    "count_nonzero": (("aten.count_nonzero.dim_IntList", r(4, 6), (0,)), {"d0", "d1"}),
    "median": (("aten.median.dim", r(4, 6), 1), {"d0"}),
    "diagonal": (("aten.diagonal.default", r(4, 6, 10), 0, 1, 2), {"d0"}),
    "diagonal_backward": (("aten.diagonal_backward.default", r(4, 6), (4, 6, 10), 0, 1, 2), {"d0"}),
    "diagonal_scatter": (("aten.diagonal_scatter.default", r(4, 6, 10), r(4, 6), 0, 1, 2), {"d0"}),
    "tril": (("aten.tril.default", r(4, 6, 10), 1), {"d0"}),
    "reflection_pad": (("aten.reflection_pad1d.default", r(4, 6, 10), (1, 2)), {"d0", "d1"}),
    "reflection_pad backward": (
        ("aten.reflection_pad1d_backward.default", r(4, 6, 13), r(4, 6, 10), (1, 2)),
        {"d0", "d1"},
    ),
    "roll": (("aten.roll.default", r(4, 6), (1,), (0,)), {"d1"}),
    "flip": (("aten.flip.default", r(4, 6), (0,)), {"d1"}),
    "unfold": (("aten.unfold.default", r(4, 6), 1, 2, 1), {"d0"}),
    "view_as_complex": (("aten.view_as_complex.default", r(4, 6, 2)), {"b0", "b1"}),
    "as_strided": (("aten.as_strided.default", r(4, 6), (4, 2, 3), (6, 3, 1)), {"f0", "f1", "f2"}),
    "as_strided of size 1": (("aten.as_strided.default", r(4, 6, 1), (4, 6, 1), (6, 1, 4)), {"f0", "f1"}),
    "einsum": (("aten.einsum.default", "bij,bjk->bik", [r(2, 4, 6), r(2, 6, 10)]), {"b", "i", "j", "k"}),
}


@pytest.mark.parametrize("name", CASES)
def test_rule_holds_and_splits(name: str) -> None:
    (target, *args), factors = CASES[name]
    split = {f for f in check_op(target, *args) if " " not in f and not f.startswith(("sum", "max"))}
    assert split == factors


x, w, b = r(2, 4, 6), r(10, 6), r(10)
LINEAR = {
    "linear": (("colofunc.linear", x, w), {"b0", "b1", "i", "o"}),
    "linear bias": (("colofunc.linear", x, w, b), {"b0", "b1", "i", "o"}),
    "linear_dx": (("colofunc.linear_dx", r(2, 4, 10), w), {"b0", "b1", "i", "o"}),
    "linear_dw": (("colofunc.linear_dw", r(2, 4, 10), x), {"b0", "b1", "i", "o"}),
}


@pytest.mark.parametrize("name", LINEAR)
def test_linear_and_its_gradients_split_everywhere(name: str) -> None:
    (target, *args), factors = LINEAR[name]
    assert factors <= check_op(target, *args)


def test_a_bias_is_added_once_where_the_contraction_is_split() -> None:
    call, _ = make_call("colofunc.linear", (x, w, b), {})
    rule = rule_for(call)
    strategy = build(call, rule, {"i": ((2, "tp"), (3, None))})
    assert strategy.ins[2].pending == strategy.outs[0].pending == (("tp", "sum"),)


def test_optimizer_updates_split_like_the_parameter() -> None:
    p, scalar = r(4, 6), torch.tensor(1e-3, dtype=f64)
    step = torch.tensor(3.0)
    adamw = ("colofunc.adamw", p, r(4, 6), r(4, 6), r(4, 6).abs(), step, scalar, 0.9, 0.99, 1e-8, 0.01, True)
    assert {"d0", "d1"} <= check_op(*adamw)
    assert {"d0", "d1"} <= check_op("colofunc.sgd", p, r(4, 6), r(4, 6), step, scalar, 0.9, 0.0, 0.01, False)
    nadam = (0.9, 0.99, 1e-8, 0.1, 0.0, 0.01, 0.0)  # keeps a number beside its tensors
    product = torch.tensor(0.9, dtype=f64)
    assert {"d0", "d1"} <= check_op("colofunc.update", "NAdam", p, r(4, 6), product, r(4, 6), r(4, 6).abs(), step, scalar, nadam)


def test_a_pending_sum_does_not_pass_a_constant() -> None:
    call, _ = make_call("aten.add.Tensor", (r(4), 1.0), {})
    assert rule_for(call).linear == ()


def test_a_pending_sum_does_not_pass_a_narrowing_cast() -> None:
    narrow, _ = make_call("aten._to_copy.default", (r(4),), {"dtype": torch.float32})
    wide, _ = make_call("aten._to_copy.default", (r(4).float(),), {"dtype": f64})
    assert rule_for(narrow).linear == () and rule_for(wide).linear == (frozenset({0}),)


def test_pattern_with_any_number_of_dims() -> None:
    call, _ = make_call("aten.mm.default", (r(4, 6), r(6, 10)), {})
    assert bind("b* i, i o -> b* o", call, reduce={"i": "sum"}).text() == "b0 i, i o -> b0 o"
    assert bind("b i, o i -> b o", call) is None


def labels(*shape: int, classes: int = 30) -> torch.Tensor:
    found = torch.randint(0, classes, shape)
    found.view(-1)[::4] = -100
    return found


aten = torch.ops.aten
x34, w30 = r(4, 30), r(30)
bn = r(6, 10, 2), r(10), r(10), r(10), r(10).abs()
bn_saved = aten._native_batch_norm_legit_functional(*bn, True, 0.1, 1e-5)
ln = aten.native_layer_norm(x34, [30], w30, w30, 1e-5)
rms = aten._fused_rms_norm(x34, [30], w30, 1e-5)
gn_x = r(4, 30, 2)
gn = aten.native_group_norm(gn_x, w30, w30, 4, 30, 2, 5, 1e-5)
mask3 = (True, True, True)
target, nll_total = labels(4), torch.tensor(7.0, dtype=f64)
probability = torch.sigmoid(r(6, 10))

NORMS = {
    "softmax": ("aten._softmax.default", x34, 1, False),
    "safe softmax": ("aten._safe_softmax.default", x34, 1),
    "log_softmax": ("aten._log_softmax.default", x34, 1, False),
    "softmax backward": ("aten._softmax_backward_data.default", r(4, 30), torch.softmax(x34, 1), 1, f64),
    "log_softmax backward": ("aten._log_softmax_backward_data.default", r(4, 30), torch.log_softmax(x34, 1), 1, f64),
    "layer norm": ("aten.native_layer_norm.default", x34, (30,), w30, w30, 1e-5),
    "layer norm plain": ("aten.native_layer_norm.default", x34, (30,), None, None, 1e-5),
    "layer norm backward": ("aten.native_layer_norm_backward.default", r(4, 30), x34, (30,), *ln[1:], w30, w30, mask3),
    "rms norm": ("aten._fused_rms_norm.default", x34, (30,), w30, 1e-5),
    "rms norm backward": ("aten._fused_rms_norm_backward.default", r(4, 30), x34, (30,), rms[1], w30, (True, True)),
    "our rms norm": ("colofunc.rms_norm", x34, (30,), w30, 1e-5),
    "our rms norm plain": ("colofunc.rms_norm", x34, (30,), None, 1e-5),
    "our rms norm dx": ("colofunc.rms_norm_dx", r(4, 30), x34, (30,), rms[1], w30),
    "our rms norm dx plain": ("colofunc.rms_norm_dx", r(4, 30), x34, (30,), rms[1], None),
    "batch norm": ("aten._native_batch_norm_legit_functional.default", *bn, True, 0.1, 1e-5),
    "batch norm without state": ("aten._native_batch_norm_legit.no_stats", *bn[:3], True, 0.1, 1e-5),
    "batch norm backward": (
        "aten.native_batch_norm_backward.default",
        r(6, 10, 2),
        bn[0],
        bn[1],
        *bn[3:],
        *bn_saved[1:3],
        True,
        1e-5,
        mask3,
    ),
    "vector norm": ("aten.linalg_vector_norm.default", x34, 2),
    "vector norm 3": ("aten.linalg_vector_norm.default", x34, 3, (1,), True),
}
PLAIN = {
    "our rms norm dw": ("colofunc.rms_norm_dw", r(4, 30), x34, (30,), rms[1]),
    "group norm": ("aten.native_group_norm.default", gn_x, w30, w30, 4, 30, 2, 5, 1e-5),
    "group norm backward": (
        "aten.native_group_norm_backward.default",
        r(4, 30, 2),
        gn_x,
        *gn[1:],
        w30,
        4,
        30,
        2,
        5,
        mask3,
    ),
    "batch norm evaluated": ("aten._native_batch_norm_legit_no_training.default", *bn, 0.1, 1e-5),
    "batch norm evaluated backward": (
        "aten.native_batch_norm_backward.default",
        r(6, 10, 2),
        bn[0],
        bn[1],
        *bn[3:],
        r(0),
        r(0),
        False,
        1e-5,
        mask3,
    ),
    **{f"nll {k}": ("aten.nll_loss_forward.default", x34, target, None, k, -100) for k in range(3)},
    **{f"nll weight {k}": ("aten.nll_loss_forward.default", x34, target, w30.abs(), k, -100) for k in range(3)},
    **{f"nll back {k}": ("aten.nll_loss_backward.default", r(), x34, target, None, k, -100, nll_total) for k in (1, 2)},
    "nll back none": ("aten.nll_loss_backward.default", r(4), x34, target, w30.abs(), 0, -100, nll_total),
    "nll2d": ("aten.nll_loss2d_forward.default", r(2, 30, 2, 3), labels(2, 2, 3), w30.abs(), 1, -100),
    "nll2d back": (
        "aten.nll_loss2d_backward.default",
        r(),
        r(2, 30, 2, 3),
        labels(2, 2, 3),
        w30.abs(),
        1,
        -100,
        nll_total,
    ),
    **{f"mse {k}": ("aten.mse_loss.default", r(6, 10), r(6, 10), k) for k in range(3)},
    "mse back": ("aten.mse_loss_backward.default", r(), r(6, 10), r(6, 10), 1),
    "huber": ("aten.huber_loss.default", r(6, 10), r(6, 10), 1, 0.7),
    "bce": ("aten.binary_cross_entropy.default", probability, probability, r(10).abs(), 1),
    "bce back": ("aten.binary_cross_entropy_backward.default", r(), probability, probability, r(6, 10).abs(), 1),
    "bce logits": ("aten.binary_cross_entropy_with_logits.default", r(6, 10), probability, None, None, 1),
    "glu": ("aten.glu.default", r(4, 12), 1),
    "glu back": ("aten.glu_backward.default", r(4, 6), r(4, 12), 1),
}


@pytest.mark.parametrize("name", PLAIN | NORMS)
def test_norm_or_loss_splits(name: str) -> None:
    assert check_op(*(PLAIN | NORMS)[name]) or name == "vector norm"


@pytest.mark.parametrize("name", NORMS)
def test_a_normalised_dim_is_split_with_collectives(name: str) -> None:
    tried = check_strategies(*NORMS[name])
    assert len(tried) >= 3


@pytest.mark.parametrize("name", NORMS)
def test_local_code_is_recorded_with_the_shapes_it_promises(name: str) -> None:
    target, *args = NORMS[name]
    call, _ = make_call(target, tuple(args), {})
    mesh = Mesh(dp=2)
    for strategy in strategies_for(call, mesh):
        types = [TensorType(lay.local_shape, t.dtype) for lay, t in zip(strategy.ins, call.ins, strict=True)]
        program = record_local(partial(strategy.local, mesh=mesh), types)
        made = [(program.values[o].shape, program.values[o].dtype) for o in program.outputs]
        assert made == [
            (lay.local_shape, t.dtype) for lay, t in zip(strategy.outs, call.outs, strict=True) if t is not None
        ]


def test_vocabulary_parallel_loss_uses_the_global_weight() -> None:
    assert {"d0", "d1"} <= check_op("aten.nll_loss_forward.default", x34, target, None, 1, -100)


def test_one_row_of_scores_keeps_its_weight_as_torch_has_it() -> None:
    """`nll_loss` of a single row returns a total weight although nothing is reduced."""
    assert "d0" in check_op("aten.nll_loss_forward.default", torch.randn(6), torch.tensor(2), None, 0, -100)


def test_complex_numbers_have_no_pending_maximum() -> None:
    x = torch.randn(6, 6, dtype=torch.complex64)
    assert check_op("aten.unsqueeze.default", x, 0)
    assert check_op("aten.diagonal_scatter.default", x, torch.randn(6, dtype=torch.complex64), 0, -2, -1) is not None


def test_distances_of_one_matrix_to_a_batch_have_a_gradient_without_rule() -> None:
    a, b = torch.randn(3, 5), torch.randn(2, 4, 5)
    grad, distances = torch.randn(2, 3, 4), torch.cdist(a, b, p=1.0)
    assert check_op("aten._cdist_backward.default", grad, a, b, 1.0, distances) is not None


def test_text_of_an_operand_that_is_not_closed_is_an_error() -> None:
    """Of a rule whose pattern depends on the call: `(g` would be a factor's name."""
    with pytest.raises(SpecError, match=r"unbalanced parentheses: '\(' is never closed") as caught:
        rule_texts.bind(make_call("aten.exp.default", (r(4, 6),), {})[0], {0: "n (g c"}, ["n (g c"])
    assert caught.value.__notes__ == ["in the pattern of an operand 'n (g c'"]
