"""Tensors that a step takes from outside and that were computed: refused wherever they would lose a gradient."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import colofunc as cf
from colofunc.program.tracing.trace import trace

D = torch.float64

BASE = torch.ones(4, 4, dtype=D, requires_grad=True)
X = torch.ones(3, 4, dtype=D)
ROWS = torch.tensor([[0, 1], [1, 2], [2, 3]])


def heads(x):
    return x.reshape(1, 1, -1, 4)


def lstm(x, weights):
    zeros = x.new_zeros(1, 4)
    return torch.lstm(x[None], (zeros[None], zeros[None]), weights, True, 1, 0.0, True, False, True)[0]


# The operator that reads it first -> (what was computed, a call that reads that).
CANONICAL = {
    "linear": (lambda: BASE * 2, lambda x, w: F.linear(x, w)),
    "linear, bias": (lambda: BASE[0] * 2, lambda x, w: F.linear(x, torch.eye(4, dtype=D), w)),
    "linear, and torch's product": (lambda: BASE * 2, lambda x, w: F.linear(x, w) + x @ w),
    "attention, key": (lambda: heads(BASE[:3] * 2), lambda x, w: F.scaled_dot_product_attention(heads(x), w, heads(x))),
    "attention, value": (lambda: heads(BASE[:3] * 2), lambda x, w: F.scaled_dot_product_attention(heads(x), heads(x), w)),
    "attention, mask": (
        lambda: (BASE * 2)[:3, :3],
        lambda x, w: F.scaled_dot_product_attention(heads(x), heads(x), heads(x), attn_mask=w),
    ),
    "dropout": (lambda: BASE[0] * 2, lambda x, w: x + F.dropout(w, 0.5)),
    "rms_norm": (lambda: BASE[0] * 2, lambda x, w: F.rms_norm(x, (4,), w)),
    "embedding": (lambda: BASE * 2, lambda x, w: x[:, None] + F.embedding(ROWS, w)),
    "embedding_bag": (lambda: BASE * 2, lambda x, w: x + F.embedding_bag(ROWS, w, mode="sum")),
    "grouped_mm": (
        lambda: (BASE * 2).float().bfloat16()[None],
        lambda x, w: F.grouped_mm(x.bfloat16(), w, offs=torch.tensor([3], dtype=torch.int32)),
    ),
    "experts": (
        lambda: (BASE * 2)[None],
        lambda x, w: cf.moe.experts(x, ROWS[:, :1] * 0, torch.ones(3, 1, dtype=D), w, torch.ones(1, 4, 4, dtype=D), gated=False),
    ),
    "lstm": (
        lambda: torch.cat([BASE] * 4),
        lambda x, w: lstm(x, [torch.ones(16, 4, dtype=D), w, torch.ones(16, dtype=D), torch.ones(16, dtype=D)]),
    ),
    "ctc_loss": (
        lambda: (BASE * 2)[:, None].log_softmax(-1),
        lambda x, w: F.ctc_loss(w, torch.tensor([[1, 2]]), torch.tensor([4]), torch.tensor([2])) * x,
    ),
}  # fmt: skip


@pytest.mark.parametrize("under", ["nothing", "value_and_grad", "autograd.grad"])
@pytest.mark.parametrize("name", CANONICAL)
def test_what_a_canonical_operator_reads_first_is_refused_if_it_was_computed(name, under):
    make, read = CANONICAL[name]
    weight = make()

    def step(p, x):
        if under == "nothing":
            return read(x * p, weight)
        if under == "autograd.grad":
            p = p.detach().requires_grad_()
            return torch.autograd.grad(read(x * p, weight).sum(), p)
        return cf.value_and_grad(lambda p: read(x * p, weight).sum())(p)

    with pytest.raises(cf.TraceError, match=r"test_trace_captured.py:\d+ in .*of something that requires a gradient"):
        trace(step, (torch.ones((), dtype=D), X))


@pytest.mark.parametrize("name", CANONICAL)
@pytest.mark.parametrize("without", [torch.no_grad, lambda: torch.set_grad_enabled(False)])
def test_what_is_read_without_gradients_is_a_constant(name, without):
    make, read = CANONICAL[name]
    weight = make()

    def step(x):
        with without():
            return read(x, weight) + 0

    assert trace(step, (X,)).captured
    constant = weight.detach()
    assert trace(lambda x: read(x, constant), (X,)).captured


def test_inference_mode_reads_without_gradients():
    weight = BASE * 2
    assert trace(torch.inference_mode()(lambda x: F.linear(x, weight)), (X,)).captured


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        return x * 2 * weight

    @staticmethod
    def backward(ctx, grad):
        return grad, grad


def test_what_a_function_of_the_user_reads_is_refused_if_it_was_computed():
    weight = BASE[0] * 2
    with pytest.raises(cf.TraceError, match="computed, by MulBackward, of something that requires a gradient"):
        trace(lambda x: Doubled.apply(x, weight), (X,))
    trace(torch.no_grad()(lambda x: Doubled.apply(x, weight)), (X,))


def test_a_first_read_without_gradients_does_not_hide_a_later_one():
    weight = BASE[0] * 2

    def step(x):
        with torch.no_grad():
            largest = weight.abs().max()
        return x * weight / largest

    with pytest.raises(cf.TraceError, match="computed, by MulBackward, of something that requires a gradient"):
        trace(step, (X,))


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("gradient", [False, True])
def test_weights_that_were_looked_up_before_and_kept_by_torch_are_refused(gradient, by_hand):
    module = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4).double())
    model = cf.functional(module)

    def step(params, x):
        if by_hand:
            return cf.value_and_grad(lambda p: torch.func.functional_call(module, p, (x,)).sum())(params)
        return cf.value_and_grad(lambda p: model.apply(p, model.buffers, x)[0].sum())(params)

    with nn.utils.parametrize.cached():
        with torch.set_grad_enabled(gradient):
            module(X)
        with pytest.raises(cf.TraceError, match="attribute 'weight'"):
            trace(step, (model.params, X))


@pytest.mark.parametrize("module", [nn.Linear(4, 4, bias=False), nn.Conv1d(4, 4, 1, bias=False)], ids=["linear", "conv"])
def test_computed_weights_that_are_given_to_a_model_from_outside_are_refused(module):
    model = cf.functional(module.double())
    weights = {"weight": model.params["weight"].requires_grad_() * 2}

    def step(scale, x, weights=weights):
        return cf.value_and_grad(lambda s: (model.apply(weights, {}, x)[0] * s).sum())(scale)

    with pytest.raises(cf.TraceError, match=r"is the weight 'weight' given to a model from outside .*by MulBackward"):
        trace(step, (torch.ones((), dtype=D), torch.ones(4, 4, dtype=D)))
    constant = {"weight": weights["weight"].detach()}
    assert trace(lambda scale, x: step(scale, x, constant), (torch.ones((), dtype=D), torch.ones(4, 4, dtype=D))).captured


def test_weights_that_are_computed_in_the_step_are_no_captures():
    model = cf.functional(nn.Linear(4, 4, bias=False).double())

    def step(scale, x):
        return cf.value_and_grad(lambda s: model.apply({"weight": model.params["weight"] * s}, {}, x)[0].sum())(scale)

    traced = trace(step, (torch.ones((), dtype=D), X))
    assert any(node.phase == "backward" for node in traced.program.nodes)


@pytest.mark.parametrize("spec", ["(dp a) b", "a b", "a (dp b)"])
def test_a_small_dtensor_that_is_captured_is_an_input(spec):
    mesh = cf.Mesh(dp=2)
    whole = torch.arange(16, dtype=D).reshape(4, 4)
    weight = cf.distribute(whole, spec, mesh)
    step = cf.shard(lambda x: F.linear(x, weight) + weight[0] * 2, mesh)
    cf.testing.compare(step(X), F.linear(X, whole) + whole[0] * 2)
    assert "captured.0" in {value.name for value in step.lower(X).program.values.values()}


def test_the_error_names_the_variable_and_the_line_of_the_maker_where_torch_knows_it():
    weight = BASE[0] * 2
    held = {"weights": [weight], "weight": weight}
    with pytest.raises(cf.TraceError, match=r"in <lambda> reads .* captured from outside as weight and .* by MulBackward, of"):
        trace(lambda x: F.rms_norm(x, (4,), weight), (X,))
    with pytest.raises(cf.TraceError, match=r"captured from outside as held\['weight'\] and"):
        trace(lambda x: x * held["weight"], (X,))

    def inner(x, scale):
        return x * scale

    with pytest.raises(cf.TraceError, match=r"in inner reads .* captured from outside as weight and"):
        trace(lambda x: inner(x, weight), (X,))
    with pytest.raises(cf.TraceError, match=r"captured from outside as by_default and"):
        trace(lambda x, by_default=weight: inner(x, by_default), (X,))
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        traceable = BASE[0] * 3
    with pytest.raises(cf.TraceError, match=r"by MulBackward at test_trace_captured.py:\d+ in test_the_error_names_the_var\w+, of"):
        trace(lambda x: x * traceable, (X,))
