"""Modules, gradients and optimizers as functions, against torch's own objects in float64."""

import contextlib
import copy

import pytest
import torch
from torch import nn

import colofunc as cf
from colofunc.errors import InputError
from colofunc.functional.gradients import clip_by_global_norm, value_and_grad
from colofunc.functional.modules import abstract, functional
from colofunc.functional.optimizers import adapt
from colofunc.functional.train import train_step
from colofunc.ops import canonical

D = torch.float64


def norm_net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


def bias_free_net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 2, bias=False)).double()


class Tied(nn.Module):
    """One weight under two names, one parameter on the outer module, one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(4))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x) * self.scale)


def same(a: dict, b: dict, tol: float = 1e-12) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(
            a[name], b[name].detach(), rtol=tol, atol=tol, msg=lambda m, name=name: f"{name}: {m}"
        )


# ---- modules ----


def test_apply_is_the_modules_forward_and_changes_nothing() -> None:
    net = norm_net()
    ref, x = copy.deepcopy(net), torch.randn(5, 3, dtype=D)
    model = functional(net)
    before = {n: b.clone() for n, b in model.buffers.items()}
    out, buffers = model.apply(model.params, model.buffers, x)
    torch.testing.assert_close(out, ref(x))
    same(buffers, dict(ref.named_buffers()))  # running statistics come out
    same(model.buffers, before)  # and nothing was written
    assert buffers["2.num_batches_tracked"] == 1 and net[2].num_batches_tracked == 0


def test_mode_is_part_of_the_key() -> None:
    model = functional(norm_net())
    x = torch.randn(5, 3, dtype=D)
    train_key = model.key
    _, buffers = model.eval().apply(model.params, model.buffers, x)
    same(buffers, model.buffers)
    assert model.key != train_key


def test_tied_outer_and_unused_parameters() -> None:
    net = Tied().double()
    model = functional(net)
    assert sorted(model.params) == ["embed.weight", "scale", "unused"]
    x = torch.tensor([[1, 2], [3, 1]])
    loss, grads = value_and_grad(lambda p: (model.apply(p, {}, x)[0] ** 2).mean())(model.params)
    want = (net(x) ** 2).mean()
    want.backward()
    torch.testing.assert_close(loss, want.detach())
    torch.testing.assert_close(grads["embed.weight"], net.embed.weight.grad)  # both uses
    torch.testing.assert_close(grads["scale"], net.scale.grad)
    assert torch.equal(grads["unused"], torch.zeros(2, dtype=D))


def test_frozen_weights_are_used_and_not_trained() -> None:
    net = norm_net()
    model = functional(net, trainable=("3.*",))
    assert sorted(model.params) == ["3.bias", "3.weight"] and "0.weight" in model.frozen
    x = torch.randn(5, 3, dtype=D)
    torch.testing.assert_close(model.apply(model.params, model.buffers, x)[0], copy.deepcopy(net)(x))
    net[0].weight.requires_grad_(False)
    assert "0.weight" in functional(net).frozen


def test_to_module_is_a_new_module_with_these_values() -> None:
    net = Tied().double()
    model = functional(net)
    changed = {n: p + 1 for n, p in model.params.items()}
    made = model.to_module(changed, model.buffers)
    assert made.head.weight is made.embed.weight  # still tied
    same(changed, dict(made.named_parameters()))
    assert not torch.equal(made.scale, net.scale)


def test_names_that_do_not_fit() -> None:
    model = functional(norm_net())
    with pytest.raises(InputError, match=r"'3.weigt' matches no parameter; did you mean '3.weight'"):
        functional(norm_net(), trainable="3.weigt")
    with pytest.raises(InputError, match=r"missing parameter '0.bias'.*unknown parameter 'x'"):
        model.apply({**{n: p for n, p in model.params.items() if n != "0.bias"}, "x": torch.ones(1)}, model.buffers)


def test_abstract_has_no_data() -> None:
    x = abstract((8, 1024), torch.int64)
    assert x.is_meta and x.shape == (8, 1024) and x.dtype == torch.int64


# ---- gradients ----


def test_gradients_of_nested_trees() -> None:
    params = {"a": {"w": torch.randn(3, dtype=D)}, "b": [torch.randn(3, dtype=D), torch.tensor(4)]}

    def f(p, x):
        return (p["a"]["w"] * p["b"][0] * x).sum(), {"seen": p["b"][1] + 1, "w": p["a"]["w"] * 2}

    x = torch.randn(3, dtype=D)
    (loss, aux), grads = value_and_grad(f, has_aux=True)(params, x)
    torch.testing.assert_close(grads["a"]["w"], params["b"][0] * x)
    torch.testing.assert_close(grads["b"][0], params["a"]["w"] * x)
    assert grads["b"][1] is None and aux["seen"] == 5
    assert not loss.requires_grad and not aux["w"].requires_grad and not params["a"]["w"].requires_grad


def test_argnums() -> None:
    x, y = torch.randn(3, dtype=D), torch.randn(3, dtype=D)
    _, (gx, gy) = value_and_grad(lambda a, b: (a * b).sum(), argnums=(0, 1))(x, y)
    assert torch.equal(gx, y) and torch.equal(gy, x)
    assert torch.equal(value_and_grad(lambda a, b: (a * b).sum(), argnums=1)(x, y)[1], x)


def test_a_gradient_of_a_gradient() -> None:
    def inner(x):
        value, g = value_and_grad(lambda z: (z**3).sum())(x)
        return (g**2).sum() + value

    x = torch.randn(4, dtype=D)
    _, g = value_and_grad(inner)(x)
    torch.testing.assert_close(g, 36 * x**3 + 3 * x**2)


def test_losses_that_cannot_be_differentiated() -> None:
    x = torch.randn(3)
    with pytest.raises(InputError, match=r"shape \(3,\), not a 0-dim floating tensor"):
        value_and_grad(lambda a: a)(x)
    with pytest.raises(InputError, match=r"not \(loss, aux\)"):
        value_and_grad(lambda a: a.sum(), has_aux=True)(x)
    with pytest.raises(InputError, match="no floating tensor"):
        value_and_grad(lambda a: a.sum())(torch.ones(3, dtype=torch.int64))


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_clip_is_torchs(max_norm: float) -> None:
    grads = {"a": torch.randn(3, 4, dtype=D), "b": {"c": torch.randn(5, dtype=D)}}
    leaves = [grads["a"].clone().requires_grad_(), grads["b"]["c"].clone().requires_grad_()]
    for leaf in leaves:
        leaf.grad = leaf.detach().clone()
    want = nn.utils.clip_grad_norm_(leaves, max_norm)
    clipped, norm = clip_by_global_norm(grads, max_norm)
    torch.testing.assert_close(norm, want)
    torch.testing.assert_close(clipped["a"], leaves[0].grad)
    torch.testing.assert_close(clipped["b"]["c"], leaves[1].grad)


# ---- the step ----

O = torch.optim


def test_gpt2_trains_as_in_torch() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2,
        n_embd=16,
        n_head=2,
        vocab_size=11,
        n_positions=8,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        bos_token_id=0,
        eos_token_id=0,
    )
    net = transformers.GPT2LMHeadModel(config).double()
    ref = copy.deepcopy(net)
    opt = O.AdamW(ref.parameters(), lr=1e-2)
    step, state = train_step(functional(net), adapt(O.AdamW, lr=1e-2), clip=1.0)
    ids = torch.randint(0, 11, (3, 8))
    for _ in range(3):
        opt.zero_grad()
        loss = ref(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(ref.parameters(), 1.0)
        opt.step()
        with canonical.single_device():
            state, metrics = step(state, dict(input_ids=ids, labels=ids))
        # The model computes its loss in float32 whatever its weights are.
        torch.testing.assert_close(metrics["loss"], loss.detach(), rtol=1e-6, atol=1e-6)
    same(state["params"], dict(ref.named_parameters()), tol=1e-5)


FORMS_OF_INPUTS = {
    "arguments of both kinds": lambda b: ((b["x"],), {}),
    "only keywords": lambda b: {"input": b["x"]},
    "a tuple": lambda b: (b["x"],),
    "a list": lambda b: [b["x"]],
    "the one argument": lambda b: b["x"],
}


@pytest.mark.parametrize("form", FORMS_OF_INPUTS)
def test_a_loss_that_sees_the_batch(form: str) -> None:
    net = bias_free_net()
    batch = {"x": torch.randn(5, 3, dtype=D), "y": torch.randint(0, 2, (5,))}
    step, state = train_step(
        functional(net), adapt(O.SGD, lr=0.1), loss=lambda out, b: nn.functional.cross_entropy(out, b["y"]), inputs=FORMS_OF_INPUTS[form]
    )
    want = nn.functional.cross_entropy(net(batch["x"]), batch["y"]).detach()
    torch.testing.assert_close(step(state, batch)[1]["loss"], want)


def test_a_loss_is_called_as_its_signature_says() -> None:
    """`inputs` decides nothing about the loss, nor does an argument that may be left out."""
    net, x = bias_free_net(), torch.randn(5, 3, dtype=D)
    want = net(x).square().mean().detach()

    def with_an_option(out: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return scale * out.square().mean()

    for loss in (with_an_option, lambda out: out.square().mean(), lambda out, batch: out.square().mean() + 0 * batch["x"].sum()):
        step, state = train_step(functional(net), adapt(O.SGD, lr=0.1), loss=loss, inputs=lambda b: b["x"])
        torch.testing.assert_close(step(state, {"x": x})[1]["loss"], want)


def test_a_model_without_a_loss() -> None:
    step, state = train_step(functional(bias_free_net()), adapt(O.SGD, lr=0.1))
    with pytest.raises(InputError, match="the model returns Tensor without a loss"):
        step(state, torch.randn(5, 3, dtype=D))


MODEL, SGD = cf.functional(nn.Linear(3, 3)), cf.adapt(torch.optim.SGD, lr=0.1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cf.functional(nn.Linear), "wants an nn.Module, not Linear"),
        (lambda: cf.functional(print), "not a builtin_function_or_method"),
        (lambda: cf.lazy(nn.Linear(2, 2)), "wants a function that builds the module, not a Linear"),
        (lambda: cf.abstract(5), "abstract: 5 is no shape"),
        (lambda: cf.abstract((-1, 3)), r"abstract: \(-1, 3\) is no shape"),
        (lambda: cf.train_step(nn.Linear(3, 3), SGD), r"given a Linear. Try: cf.functional\(module\)"),
        (lambda: cf.train_step(MODEL, torch.optim.SGD([torch.ones(1)])), "given a SGD. Try: cf.adapt"),
        (lambda: cf.train_step(cf.functional(nn.Linear(3, 3).requires_grad_(False)), SGD), "every parameter of the model is frozen"),
        (lambda: cf.train_step(MODEL, SGD, clip=0.0), "clip=0.0 would leave nothing"),
        (lambda: cf.train_step(MODEL, SGD, clip="1.0"), "clip='1.0' is no number. Try: clip=1.0"),
        (lambda: cf.train_step(MODEL, SGD, loss="mse"), "loss='mse' cannot be called. Try: loss=lambda out, batch:"),
        (lambda: cf.train_step(MODEL, SGD, loss=None), "loss=None cannot be called"),
        (
            lambda: cf.train_step(MODEL, SGD)[0]({"params": MODEL.params, "opt": {}}, {}),
            r"state of train_step has params, buffers and opt; this one has \['params', 'opt'\]. Try: the state that it returned",
        ),
        (lambda: cf.train_step(MODEL, SGD)[0](MODEL, {}), "this one has Model"),
        (lambda: cf.train_step(MODEL, SGD, inputs="x"), "inputs='x' cannot be called. Try: inputs=lambda batch:"),
        (lambda: cf.train_step(MODEL, SGD, inputs=["x"]), r"inputs=\['x'\] cannot be called"),
        (lambda: cf.train_step(MODEL, SGD, loss=lambda: 0), r"loss\(out\) or loss\(out, batch\), and this one takes \(\)"),
        (lambda: cf.train_step(MODEL, SGD, loss=lambda out, batch, step: out), r"this one takes \(out, batch, step\)"),
        (lambda: cf.clip_by_global_norm(MODEL.params, -1.0), "turn the gradients around"),
        (lambda: MODEL.apply(MODEL.params, torch.ones(3)), "the buffers are a Tensor"),
        (lambda: cf.lora(nn.Linear(3, 3), "*"), r"lora was given a Linear. Try: cf.lora\(cf.functional"),
    ],
)
def test_what_is_given_in_place_of_something_else(call, message) -> None:
    with pytest.raises(cf.InputError, match=message):
        call()


@pytest.mark.parametrize("doubled", [False, True])
def test_a_buffer_of_another_shape_in_its_place_is_the_new_buffer(doubled: bool) -> None:
    class Grown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("table", torch.zeros(1, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.table.shape[0] != x.shape[0]:
                self.table = torch.arange(x.shape[0] * 4.0).reshape(-1, 4)
            return self.linear(x + self.table)

    with cf.testing.float64() if doubled else contextlib.nullcontext():
        model, x = cf.functional(Grown()), torch.randn(3, 4)
        step = cf.shard(lambda params, buffers, x: model.apply(params, buffers, x), cf.Mesh())
        out, buffers = step(model.params, model.buffers, x)
        again, _ = step(model.params, buffers, x)
        assert buffers["table"].shape == (3, 4) and torch.equal(out.full(), again.full())
