"""torch.distributions in a step: densities, entropies, divergences and samples with their gradients, on meshes."""

import warnings
from typing import Any

import pytest
import torch
from torch import distributions as D

import colofunc as cf

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

FAMILIES: dict[str, Any] = {
    "normal": lambda x: D.Normal(x, x.exp()),
    "gamma": lambda x: D.Gamma(x.exp(), x.exp() + 1),
    "categorical": lambda x: D.Categorical(logits=x),
    "bernoulli": lambda x: D.Bernoulli(logits=x),
    "laplace": lambda x: D.Laplace(x, x.exp()),
    "beta": lambda x: D.Beta(x.exp(), x.exp() + 1),
    "dirichlet": lambda x: D.Dirichlet(x.exp()),
    "multivariate normal": lambda x: D.MultivariateNormal(x, torch.eye(3, dtype=x.dtype)),
    "independent": lambda x: D.Independent(D.Normal(x, x.exp()), 1),
    "one hot": lambda x: D.OneHotCategorical(logits=x),
}
SAMPLED = {
    **{name: FAMILIES[name] for name in ("normal", "laplace", "multivariate normal", "independent")},
    "cauchy": lambda x: D.Cauchy(x, x.exp()),
    "exponential": lambda x: D.Exponential(x.exp()),
    "gumbel": lambda x: D.Gumbel(x, x.exp()),
    "log normal": lambda x: D.LogNormal(x, x.exp()),
    "uniform": lambda x: D.Uniform(x, x + x.exp()),
    "relaxed": lambda x: D.RelaxedBernoulli(torch.tensor(0.5, dtype=x.dtype), logits=x),
}
LEFT_OUT = "ignore:torch.distributions checks the values of its arguments:UserWarning"


@pytest.fixture(autouse=True)
def validates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's default, which `torch.compile` switches off for the whole process where another test has used it."""
    monkeypatch.setattr(D.Distribution, "_validate_args", True)


@pytest.mark.filterwarnings(LEFT_OUT)
@pytest.mark.parametrize("name", FAMILIES)
def test_densities_entropies_and_divergences(name):
    family = FAMILIES[name]

    def step(x):
        here, other = family(x), family(x * 0.5)
        kinds = {"categorical": x.argmax(-1), "bernoulli": (x > 0).to(x.dtype)}
        one_hot = torch.nn.functional.one_hot(x.argmax(-1), 3).to(x.dtype)
        value = kinds.get(name, one_hot if name == "one hot" else here.mean).detach()
        return here.log_prob(value).sum() + here.entropy().sum() + D.kl_divergence(here, other).sum()

    def with_gradient(x):
        return cf.value_and_grad(step)(x)

    cf.testing.compare(cf.shard(with_gradient, cf.Mesh(dp=2), in_specs=("(dp a) b",))(X), with_gradient(X))


@pytest.mark.filterwarnings(LEFT_OUT)
@pytest.mark.parametrize("name", SAMPLED)
def test_samples_and_their_gradients_do_not_depend_on_the_mesh(name):
    def step(x):
        return cf.value_and_grad(lambda x: SAMPLED[name](x).rsample().sum())(x)

    results = []
    for axes, spec in (({"dp": 1}, "a b"), ({"dp": 2}, "(dp a) b"), ({"dp": 2, "tp": 3}, "(dp a) (tp b)")):
        with cf.random(7):
            results.append([part.full() for part in cf.shard(step, cf.Mesh(**axes), in_specs=(spec,))(X)])
    cf.testing.compare(results[1], results[0])
    cf.testing.compare(results[2], results[0])
    assert results[0][1].abs().sum() > 0


def test_one_warning_for_the_checks_that_are_left_out():
    def step(x):
        return D.Normal(x, x.exp()).entropy() + D.Laplace(x, x.exp()).entropy()

    with pytest.warns(UserWarning, match=r"at test_distributions.py:\d+ in step.*validate_args=False") as caught:
        cf.testing.compare(cf.shard(step, cf.Mesh(dp=2))(X), step(X))
    assert len([w for w in caught if "torch.distributions" in str(w.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cf.shard(lambda x: D.Normal(x, 1.0, validate_args=False).entropy(), cf.Mesh(dp=1))(X)


def test_what_depends_on_no_input_is_still_checked():
    with pytest.raises(ValueError, match="Expected parameter scale"):
        cf.shard(lambda x: x + D.Normal(0.0, torch.tensor(-1.0)).mean, cf.Mesh(dp=1))(X)


def test_a_choice_by_value_is_refused():
    with pytest.raises(cf.TraceError, match=r"torch.distributions chooses by the values .*test_distributions.py:\d+ .*torch.where"):
        cf.shard(lambda x: D.VonMises(x, x.exp(), validate_args=False).sample(), cf.Mesh(dp=1))(X)
