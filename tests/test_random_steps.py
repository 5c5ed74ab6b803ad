"""Random operators inside steps: equal numbers on every mesh, their laws, and what is refused."""

import pytest
import timm.layers
import torch
import torch.nn.functional as F

import colofunc as cf
from colofunc.errors import TraceError
from colofunc.ops import canonical

X = torch.linspace(-2, 2, 4 * 6 * 4 * 2, dtype=torch.float64).reshape(4, 6, 4, 2)
MODULE = torch.nn.Sequential(torch.nn.Dropout(0.4), timm.layers.DropPath(0.5)).train()

# Exact on every mesh: bits, uniform, Bernoulli and what is made of them.
EXACT = {
    "rand": lambda x: torch.rand(4, 6),
    "rand_like": lambda x: torch.rand_like(x),
    "randint": lambda x: torch.randint(3, 17, (4, 6)),
    "randperm": lambda x: torch.randperm(8),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli_": lambda x: torch.empty(4, 6).bernoulli_(0.3),
    "multinomial": lambda x: torch.multinomial(x.reshape(4, 48).softmax(-1), 3),
    "multinomial with replacement": lambda x: torch.multinomial(x.reshape(4, 48).softmax(-1), 5, replacement=True),
    "uniform_": lambda x: torch.empty(4, 6).uniform_(-1, 1),
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout1d": lambda x: F.dropout1d(x[..., 0], 0.3),
    "dropout2d": lambda x: F.dropout2d(x, 0.3),
    "dropout3d": lambda x: F.dropout3d(x[..., None], 0.3),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.3, training=True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "modules": lambda x: MODULE(x),
}  # fmt: skip
NORMAL = {
    "randn": lambda x: torch.randn(4, 6),
    "randn_like": lambda x: torch.randn_like(x),
    "normal_": lambda x: torch.empty(4, 6).normal_(1.0, 0.5),
}
MESHES = [{"dp": 2}, {"dp": 2, "tp": 2}, {"dp": 4}]


def on_one_device(fn, key):
    with cf.random(key), canonical.single_device():
        return fn(X)


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("name", [*EXACT, *NORMAL])
def test_numbers_do_not_depend_on_the_mesh(name, axes):
    fn = {**EXACT, **NORMAL}[name]
    want = on_one_device(fn, 11)
    spec = "(dp a) b ..." if want.dim() > 1 else "(dp a)"
    step = cf.shard(lambda x: fn(x), cf.Mesh(**axes), in_specs=("(dp a) ...",), out_specs=spec)
    with cf.random(11):
        first, second = step(X).full(), step(X).full()
    assert not torch.equal(first, second)
    if name in EXACT and name not in ("multinomial", "alpha_dropout", "feature_alpha_dropout"):
        assert torch.equal(first, want)
    elif name in EXACT:
        torch.testing.assert_close(first, want, rtol=0, atol=1e-12)
    else:
        lower, upper = want.nextafter(torch.tensor(-9.0).to(want)), want.nextafter(torch.tensor(9.0).to(want))
        two = (lower.nextafter(torch.tensor(-9.0).to(want)), upper.nextafter(torch.tensor(9.0).to(want)))
        assert ((first >= two[0]) & (first <= two[1])).all()


def test_attention_with_dropout_does_not_depend_on_the_mesh():
    q, k, v = (torch.randn(4, 2, 8, 4, dtype=torch.float64) for _ in range(3))

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.4, is_causal=True)

    with cf.random(2), canonical.single_device():
        want = attend(q, k, v)
    step = cf.shard(attend, cf.Mesh(dp=2, tp=2), in_specs=("(dp b) (tp h) s e",) * 3)
    with cf.random(2):
        torch.testing.assert_close(step(q, k, v).full(), want, atol=1e-12, rtol=0)


def test_two_calls_in_a_step_and_forward_and_backward():
    def step_fn(x):
        def loss(x):
            y = F.dropout(x, 0.5)
            return (y * F.dropout(x, 0.5).detach().ne(0)).sum(), y

        _, y = loss(x)
        (grad, kept) = torch.func.grad(loss, has_aux=True)(x)
        return y, grad, kept

    y, grad, kept = cf.shard(step_fn, cf.Mesh(dp=2))(X + 5)
    both = (grad.full() != 0) & (kept.full() == 0)
    assert not both.any(), "the backward pass has a mask of its own"
    assert not torch.equal(y.full() != 0, kept.full() != 0)
    assert 0.15 < (grad.full() != 0).double().mean() < 0.35  # two masks of one half


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, g: torch.rand(4, generator=g),
        lambda x, g: torch.randn(4, generator=g),
        lambda x, g: torch.randint(0, 4, (4,), generator=g),
        lambda x, g: torch.randint_like(x, 4, generator=g),
        lambda x, g: torch.randperm(4, generator=g),
        lambda x, g: torch.bernoulli(x.sigmoid(), generator=g),
        lambda x, g: torch.multinomial(x.reshape(4, 48).softmax(-1), 2, generator=g),
        lambda x, g: torch.empty(4).normal_(generator=g),
        lambda x, g: torch.normal(0.0, 1.0, (4,), generator=g),
    ],
)
def test_a_generator_of_its_own_is_refused_by_name(fn):
    generator = torch.Generator()
    with pytest.raises(TraceError, match=r"own torch.Generator.*without generator="):
        cf.shard(lambda x: fn(x, generator), cf.Mesh(dp=2))(X)


def test_other_laws_in_a_step():
    def draw(x):
        return torch.empty(40_000).exponential_(2.0), torch.randint(0, 10, (40_000,)), torch.randn(40_000), torch.rand(40_000)

    with cf.random(0):
        waits, dice, normal, uniform = (t.full().double() for t in cf.shard(draw, cf.Mesh(dp=2))(X))
    assert abs(waits.mean() - 0.5) < 0.0125 and abs(waits.var() - 0.25) < 0.02
    chi2 = ((torch.bincount(dice.long(), minlength=10) - 4000.0) ** 2 / 4000).sum()
    assert chi2 < 27.9  # 9 degrees of freedom, 1 in 1000
    assert abs(normal.mean()) < 0.025 and abs(normal.var() - 1) < 0.04 and abs((normal**3).mean()) < 0.1
    assert abs(torch.corrcoef(torch.stack([waits, dice, normal, uniform])).fill_diagonal_(0)).max() < 0.025
    ranks = (uniform * 20).long()
    assert ((torch.bincount(ranks, minlength=20) - 2000.0) ** 2 / 2000).sum() < 43.8  # 19 degrees of freedom
