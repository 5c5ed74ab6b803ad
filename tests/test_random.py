"""Counter-based random numbers: any part equals that part of the whole, and the numbers look random."""

import pytest
import torch
import torch.nn.functional as F

from colofunc.errors import InputError
from colofunc.ops import canonical
from colofunc.ops import random as R

SEED = torch.tensor(5)
DRAWS = {
    "bits": lambda **k: R.random_bits(SEED, 3, **k),
    "uniform": lambda **k: R.random_uniform(SEED, 3, dtype=torch.float32, **k),
    "normal": lambda **k: R.random_normal(SEED, 3, dtype=torch.float64, **k),
    "bernoulli": lambda **k: R.random_bernoulli(SEED, 3, dtype=torch.bool, p=0.3, **k),
    "dropout": lambda shape, **k: R.dropout(torch.ones(shape), SEED, 3, 0.3, **k),
}


def reference_bits(seed: int, site: int, index: int) -> int:
    """SplitMix64 in Python integers, written out."""
    mask = (1 << 64) - 1

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    gamma = 0x9E3779B97F4A7C15
    key = mix((mix(seed & mask) + (site + 1) * gamma) & mask)
    z = mix((key + index * gamma) & mask)
    return z - (1 << 64) if z >> 63 else z


@pytest.mark.parametrize("seed", [0, 5, -3, 2**62])
def test_bits_are_splitmix64(seed: int) -> None:
    got = R.random_bits(torch.tensor(seed), 2, (50,))
    assert got.tolist() == [reference_bits(seed, 2, i) for i in range(50)]


def test_the_key_on_other_devices_is_the_same() -> None:
    """Devices without cheap `item()` mix the key with tensor operators: same integers."""

    class Elsewhere(torch.Tensor):
        device = torch.device("cuda")

    for seed in (0, 5, -3, 2**62):
        key = R._key(torch.tensor(seed).as_subclass(Elsewhere), 7)
        assert isinstance(key, torch.Tensor) and int(key) == R._key(torch.tensor(seed), 7)


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize(
    ("pick", "sizes", "strides", "offset"),
    [
        ((slice(None), slice(3, 6)), (4, 3), (6, 1), 3),  # columns in blocks
        ((slice(2, 4), slice(None)), (2, 6), (6, 1), 12),  # rows in blocks
        ((slice(1, 4, 2), slice(None)), (2, 6), (12, 1), 6),  # rows striped
        ((slice(0, 4, 2), slice(1, 6, 3)), (2, 2), (12, 3), 1),  # both
    ],
)
def test_a_part_is_that_part_of_the_whole(name, pick, sizes, strides, offset) -> None:
    whole = DRAWS[name](shape=(4, 6))
    part = DRAWS[name](shape=sizes, sizes=sizes, strides=strides, offset=torch.tensor(offset))
    assert torch.equal(part, whole[pick])


def test_dims_of_several_atoms() -> None:
    """Block-cyclic: dim 1 of (2, 12) as (3 blocks, 2 ranks, 2); rank 1 holds (3, 2) of it."""
    whole = DRAWS["bits"](shape=(2, 12))
    part = DRAWS["bits"](shape=(2, 6), sizes=(2, 3, 2), strides=(12, 4, 1), offset=torch.tensor(2))
    assert torch.equal(part, whole.view(2, 3, 2, 2)[:, :, 1].reshape(2, 6))


@pytest.mark.parametrize("shape", [(3, 70_000), (70_000, 3), (100_000,), (), (0, 4), (2, 3, 40_000)])
def test_tiles_cover_every_element_once(shape) -> None:
    got = R.random_bits(SEED, 0, shape).flatten()
    assert got.numel() == torch.Size(shape).numel() == got.unique().numel()
    for i in (0, got.numel() // 2, got.numel() - 1):
        if got.numel():
            assert got[i] == reference_bits(5, 0, i)


def test_uniform_moments_and_range() -> None:
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        u = R.random_uniform(SEED, 1, (200_000,), dtype).double()
        assert u.min() >= 0.0 and u.max() < 1.0
        # Means of 200,000 draws: standard error 6.5e-4; bfloat16 draws are multiples of 1/256, low by half of one.
        step = 0.5 / 256 if dtype == torch.bfloat16 else 0.0
        assert abs(u.mean() + step - 0.5) < 4e-3 and abs(u.var() - 1 / 12) < 2e-3


def test_float32_is_the_top_of_float64() -> None:
    wide, narrow = (R.random_uniform(SEED, 1, (1000,), d) for d in (torch.float64, torch.float32))
    assert (wide - narrow).abs().max() <= 2.0**-24


def test_bytes_are_uniform_and_bits_independent() -> None:
    bits = R.random_bits(SEED, 4, (1 << 16,))
    for shift in range(0, 64, 8):
        counts = torch.bincount((bits >> shift) & 255, minlength=256).double()
        chi2 = ((counts - 256) ** 2 / 256).sum()
        assert 160 < chi2 < 370  # 255 degrees of freedom: mean 255, standard deviation 22.6
    ones = torch.stack([(bits >> k) & 1 for k in range(64)]).double() * 2 - 1
    correlation = (ones @ ones.T / bits.numel()).fill_diagonal_(0)
    assert correlation.abs().max() < 5.5 / 256  # standard error 1/256, 4032 entries


def test_neighbouring_seeds_sites_and_indices_are_unrelated() -> None:
    draws = [R.random_normal(torch.tensor(s), site, (50_000,), torch.float64) for s in (0, 1, 2) for site in (0, 1, 2)]
    x = torch.stack(draws)
    correlation = torch.corrcoef(x).fill_diagonal_(0)
    assert correlation.abs().max() < 5 / 50_000**0.5
    lagged = (x[:, 1:] * x[:, :-1]).mean(1)
    assert lagged.abs().max() < 5 / 50_000**0.5


def test_changing_one_bit_of_the_key_changes_half_of_the_bits() -> None:
    base = R.random_bits(torch.tensor(1234), 0, (4096,))
    for k in range(0, 63, 9):
        changed = R.random_bits(torch.tensor(1234 ^ (1 << k)), 0, (4096,)) ^ base
        flipped = sum(((changed >> b) & 1).double().mean() for b in range(64)) / 64
        assert abs(flipped - 0.5) < 0.01


def test_normal_moments_and_tails() -> None:
    x = R.random_normal(SEED, 2, (400_000,), torch.float32).double()
    assert abs(x.mean()) < 8e-3 and abs(x.var() - 1) < 1.2e-2 and abs((x**4).mean() - 3) < 0.1
    assert abs((x.abs() > 1.96).double().mean() - 0.05) < 2e-3 and x.isfinite().all()


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_bernoulli_has_its_probability(p: float) -> None:
    x = R.random_bernoulli(SEED, 2, (100_000,), torch.float32, p)
    assert abs(x.mean() - p) < 6e-3
    if p in (0.0, 1.0):
        assert (x == p).all()


@pytest.mark.parametrize("p", [0.1, 0.5, 1.0])
def test_dropout_backward_makes_the_same_mask(p: float) -> None:
    x = torch.randn(50, 40, dtype=torch.float64, requires_grad=True)
    y = R.dropout(x, SEED, 7, p)
    g = torch.randn_like(y)
    keep = (y != 0).double()
    scale = 0.0 if p == 1.0 else 1 / (1 - p)
    torch.testing.assert_close(y.detach(), x.detach() * keep * scale, rtol=1e-15, atol=0)
    torch.testing.assert_close(torch.autograd.grad(y, x, g)[0], g * keep * scale, rtol=1e-15, atol=0)
    assert abs(keep.mean() - (1 - p)) < 0.05


def test_dropout_agrees_with_torch_in_distribution() -> None:
    x = torch.ones(100_000)
    ours, theirs = R.dropout(x, SEED, 0, 0.3), F.dropout(x, 0.3)
    assert ours.max() == theirs.max() and abs(ours.mean() - theirs.mean()) < 0.015


def test_randperm_is_a_permutation_and_uniform() -> None:
    with canonical.single_device(SEED):
        rows = torch.stack([torch.randperm(4) for _ in range(4000)])
    assert torch.equal(rows.sort(1).values, torch.arange(4).expand(4000, 4))
    counts = torch.stack([torch.bincount(column, minlength=4) for column in rows.T])
    assert (counts - 1000).abs().max() < 150  # standard error 27


@pytest.mark.parametrize("replacement", [True, False])
def test_multinomial_follows_its_weights(replacement: bool) -> None:
    weights = torch.tensor([0.1, 0.0, 0.6, 0.3])
    with canonical.single_device(SEED):
        drawn = torch.multinomial(weights.expand(20_000, 4), 2, replacement)
    first = torch.bincount(drawn[:, 0], minlength=4) / 20_000
    assert (first - weights).abs().max() < 0.02
    assert (drawn != 1).all() and (replacement or (drawn[:, 0] != drawn[:, 1]).all())


def test_exponential_and_randint_follow_their_laws() -> None:
    with canonical.single_device(SEED):
        waits, dice = torch.empty(100_000).exponential_(2.0), torch.randint(1, 7, (60_000,))
    assert abs(waits.mean() - 0.5) < 0.01 and abs((waits > 1.0).double().mean() - 0.1353) < 0.006
    assert dice.min() == 1 and dice.max() == 6 and (torch.bincount(dice)[1:] - 10_000).abs().max() < 500


def test_cauchy_geometric_and_log_normal_follow_their_laws() -> None:
    with canonical.single_device(SEED):
        cauchy, trials = torch.empty(100_000).cauchy_(1.0, 2.0), torch.empty(100_000).geometric_(0.25)
        logs = torch.empty(100_000).log_normal_(0.5, 0.3).log()
    quarters = torch.quantile(cauchy, torch.tensor([0.25, 0.5, 0.75]))
    torch.testing.assert_close(quarters, torch.tensor([-1.0, 1.0, 3.0]), atol=0.06, rtol=0)
    assert trials.min() == 1 and abs(trials.mean() - 4.0) < 0.06 and abs((trials == 1).double().mean() - 0.25) < 0.006
    assert abs(logs.mean() - 0.5) < 0.005 and abs(logs.std() - 0.3) < 0.005


@pytest.mark.parametrize("name", ["bits", "uniform", "normal", "bernoulli"])
def test_opcheck(name: str) -> None:
    op = {
        "bits": R.random_bits,
        "uniform": R.random_uniform,
        "normal": R.random_normal,
        "bernoulli": R.random_bernoulli,
    }[name]
    middle = {"bits": (), "bernoulli": (torch.float32, 0.3)}.get(name, (torch.float32,))
    torch.library.opcheck(op.op, (SEED, 1, (4, 3), *middle, (4, 3), (6, 1), torch.tensor(3)))


def test_opcheck_dropout() -> None:
    torch.library.opcheck(R.dropout.op, (torch.randn(4, 5, requires_grad=True), SEED, 1, 0.2))


def test_atoms_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match="do not fit together"):
        R.random_bits.kernel(SEED, 0, (4, 6), (4, 5), (6, 1))
