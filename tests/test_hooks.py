"""What hangs on a module's parameters: hooks, parametrizations, classes of their own. Honoured, or refused by name."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

import colofunc as cf

X = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2).double()


def masked() -> nn.Module:
    module = linear()
    rows = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    module.weight.register_hook(lambda grad: grad * rows)
    return module


def called_twice() -> nn.Module:
    module = linear()
    module.weight.register_hook(lambda grad: grad * grad)  # of the sum of both calls
    module.weight.register_hook(lambda grad: grad + 1)
    return nn.Sequential(module, nn.Linear(2, 3).double(), module)


def backward_hook() -> nn.Module:
    inner = linear()
    inner.register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 0.5,))
    return nn.Sequential(nn.Linear(3, 3).double(), inner)


def tanh_weight() -> nn.Module:
    module = linear()
    nn.utils.parametrize.register_parametrization(module, "weight", nn.Tanh())
    return module


HONOURED = {
    "register_hook": masked,
    "hooks of a shared module": called_twice,
    "full_backward_hook": backward_hook,
    "parametrization": tanh_weight,
    "weight_norm": lambda: parametrizations.weight_norm(linear()),
    "weight_norm of old": lambda: weight_norm(linear()),
    "spectral_norm": lambda: parametrizations.spectral_norm(linear()).eval(),
    "spectral_norm of old": lambda: spectral_norm(linear()).eval(),
    "orthogonal": lambda: parametrizations.orthogonal(linear()),
    "prune": lambda: prune.random_unstructured(linear(), "weight", 0.5),
}


@pytest.mark.filterwarnings("ignore:a training step runs", "ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("name", HONOURED)
def test_gradients_are_those_of_the_module(name):
    module = HONOURED[name]()
    model = cf.functional(module)

    def step(params, x):
        return cf.value_and_grad(lambda p: model.apply(p, model.buffers, x)[0].square().mean())(params)

    _, grads = cf.shard(step, cf.Mesh(dp=2))(model.params, X)
    module(X).square().mean().backward()
    cf.testing.compare(grads, {key: p.grad for key, p in module.named_parameters()})


class Doubled(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out * 2 if func is torch.nn.functional.linear else out


def test_what_a_function_of_values_cannot_see_is_refused():
    accumulates, own_class = linear(), linear()
    accumulates.weight.register_post_accumulate_grad_hook(lambda p: None)
    own_class.weight = nn.Parameter(own_class.weight.detach().as_subclass(Doubled))
    for module, words in (
        (accumulates, "'weight' has a hook from register_post_accumulate_grad_hook.*value_and_grad"),
        (own_class, "'weight' is a Doubled, a tensor class with operators of its own"),
        (nn.LazyLinear(2), "'weight' has no shape yet. Try: one call"),
    ):
        with pytest.raises(cf.InputError, match=words):
            cf.functional(module)


def gradients(model):
    """(a step for gradients, the module's own)."""

    def step(params, x):
        return cf.value_and_grad(lambda p: model.apply(p, model.buffers, x)[0].square().mean())(params)[1]

    def right():
        model.module.zero_grad()
        model.module(X).square().mean().backward()
        return {key: p.grad for key, p in model.module.named_parameters()}

    return cf.shard(step, cf.Mesh(dp=2)), right


HANGS = {
    "on a parameter": lambda module: module[0].weight.register_hook(lambda grad: grad * 3),
    "behind a forward": lambda module: module[0].register_forward_hook(lambda part, args, out: out * 2),
    "before a forward": lambda module: module[1].register_forward_pre_hook(lambda part, args: (args[0] + 1,)),
    "behind a backward": lambda module: module[1].register_full_backward_hook(lambda part, grads, out: (grads[0] * 2,)),
}


@pytest.mark.parametrize("hang", HANGS)
def test_a_hook_that_comes_or_goes_after_the_first_call_is_seen(hang):
    model = cf.functional(nn.Sequential(linear(), nn.Linear(2, 2).double()))
    step, right = gradients(model)
    for _ in range(2):
        cf.testing.compare(step(model.params, X), right())
    handle = HANGS[hang](model.module)
    for _ in range(2):
        cf.testing.compare(step(model.params, X), right())
    handle.remove()
    cf.testing.compare(step(model.params, X), right())
    assert sum(len(known) for known in step.compiler._ready.values()) == 2  # the first is found again


def test_without_a_step_too_a_hook_runs_for_as_long_as_it_is_on_the_parameter():
    model = cf.functional(linear())
    params = {name: p.clone().requires_grad_() for name, p in model.params.items()}

    def weight_grad():
        loss = model.apply(params, {}, X)[0].square().mean()
        return torch.autograd.grad(loss, params["weight"])[0]

    plain = weight_grad()
    handles = [model.module.weight.register_hook(double) for _ in range(2)]
    assert weight_grad().equal(plain * 4) and weight_grad().equal(plain * 4)
    for left, handle in enumerate(reversed(handles)):
        handle.remove()
        assert weight_grad().equal(plain * (2, 1)[left])


def double(grad):
    return grad * 2
