"""The least that an error names can be given, and no named policy fits below it: generated steps, sharded or in microbatches."""

import random
from typing import Any

import least_named
import pytest
import random_cases
import torch
from least_named import named, peak, tried
from torch import nn

import colofunc as cf
from colofunc.compiler.least_budget import Trial, least_budget
from colofunc.planner.recompute.policies import NAMED, RecomputePolicy

POLICIES: tuple[str | RecomputePolicy, ...] = (*NAMED, cf.every(2), cf.every(4))


class Net(nn.Module):
    """Convolutions down and up again with skips, drawn from a seed: widths, depth, norms, how skips join."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        depth, width = draw.choice([1, 2, 3]), draw.choice([4, 8])
        self.joins, self.act = draw.choice(["cat", "add"]), draw.choice([nn.ReLU, nn.SiLU])
        self.convs, norm = draw.choice([1, 2]), draw.choice([lambda n: nn.GroupNorm(2, n), lambda n: nn.Identity()])
        sizes = [width << k for k in range(depth + 1)]
        widths = [*zip(sizes[1:], sizes[:-1], strict=True)][::-1]  # from the narrowest picture up
        double = 2 if self.joins == "cat" else 1
        self.down = nn.ModuleList(self.block(i, o, norm) for i, o in zip([3, *sizes[:-1]], sizes, strict=True))
        self.up = nn.ModuleList(nn.ConvTranspose2d(i, o, 2, stride=2) for i, o in widths)
        self.merge = nn.ModuleList(self.block(double * o, o, norm) for _, o in widths)

    def block(self, inside: int, outside: int, norm: Any) -> nn.Module:
        layers: list[nn.Module] = []
        for k in range(self.convs):
            layers += [nn.Conv2d(inside if k == 0 else outside, outside, 3, padding=1), norm(outside), self.act()]
        return nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for k, block in enumerate(self.down):
            x = block(x if k == 0 else nn.functional.max_pool2d(x, 2))
            skips.append(x)
        skips.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x, skip = up(x), skips.pop()
            x = merge(torch.cat([x, skip], 1) if self.joins == "cat" else x + skip)
        return x


CHAINS = {
    "one device": lambda step: cf.shard(step, cf.Mesh()),
    "two ranks": lambda step: cf.shard(step, cf.Mesh(dp=2)),
    "microbatches": lambda step: cf.accumulate(cf.shard(step, cf.Mesh()), microbatches=2),
}


def training(seed: int) -> Any:
    with torch.device("meta"):
        net = Net(seed)
    step, state = cf.train_step(cf.functional(net), cf.adapt(torch.optim.SGD, lr=0.1), loss=lambda out: out.square().mean())
    return step, state, cf.abstract((4, 3, 32, 32))


def check_least(seed: int, chain: str, copies: bool = False, exact: bool = False) -> None:
    step, *args = training(seed)
    base = CHAINS[chain](step)
    base = cf.offload(base) if copies else base
    least = least_named.check(lambda nbytes: cf.checkpoint(base, budget=nbytes), *args, exact=exact)
    if not copies:
        assert least <= min(peak(cf.checkpoint(base, policy=policy), *args) for policy in POLICIES), (seed, chain)


def check_random(seed: int, limit: str, exact: bool = False) -> None:
    """Of a generated program on a generated mesh, with generated specs, whether it trains or not."""
    case = random_cases.draw(seed)
    parts = dict(case.links).get("accumulate")

    def on(mesh: cf.Mesh) -> Any:
        step = cf.shard(case.function(), mesh, in_specs=case.in_specs, out_specs=case.out_specs)
        return cf.accumulate(step, **parts) if parts else step

    def limited(nbytes: int) -> Any:
        return least_named.LIMITS[limit](on, cf.Mesh(**case.axes), nbytes)

    try:
        on(cf.Mesh(**case.axes)).lower(*case.arguments())
    except cf.ColofuncError as error:  # then nothing is said of memory
        if not case.refusal(error):
            raise
        pytest.skip(f"refused whatever the limit: {case.refusal(error)}")
    least_named.check(limited, *case.arguments(), given=1, exact=exact)


@pytest.mark.parametrize(("seed", "limit"), [*((2, limit) for limit in least_named.LIMITS), (1, "shard")])
def test_however_memory_is_limited_the_least_that_is_named_can_be_given(seed: int, limit: str) -> None:
    check_random(seed, limit, exact=True)


@pytest.mark.sweep
@pytest.mark.parametrize("limit", least_named.LIMITS)
@pytest.mark.parametrize("seed", [0, 1])
def test_of_larger_programs_a_byte_less_is_refused(seed: int, limit: str) -> None:
    check_random(seed, limit, exact=True)


@pytest.mark.sweep
@pytest.mark.parametrize("limit", least_named.LIMITS)
@pytest.mark.parametrize("seed", range(3, 32))
def test_of_random_programs(seed: int, limit: str) -> None:
    check_random(seed, limit)


def test_the_memory_of_a_machine_counts_as_it_is_counted() -> None:
    """Sharding alone is searched for by an estimate; what it finds leanest is counted before anything is refused or named."""
    step, *args = training(2)
    least = least_named.check(lambda nbytes: cf.shard(step, least_named.limited(cf.Mesh(dp=2), nbytes)), *args, exact=True)
    assert least <= peak(cf.shard(step, cf.Mesh(dp=2)), *args)


@pytest.mark.parametrize("seed, chain", [(2, "one device")])
def test_the_least_that_is_named_can_be_given_and_no_policy_needs_less(seed: int, chain: str) -> None:
    check_least(seed, chain, exact=True)


def test_many_small_steps_down_are_one_large() -> None:
    """Each search for a byte less ends with the first plan that fits, here eight bytes less; one that finds none has seen the leanest."""
    asked = list[int]()

    def leanest(budget_bytes: int) -> Trial:
        asked.append(budget_bytes)
        fits = next((nbytes for nbytes in range(2000, 1000, -8) if nbytes <= budget_bytes), None)
        seen = 2000 if budget_bytes < 10 else 1008
        return tried(fits or seen, budget_bytes)

    assert least_budget(leanest, large=False).done.peak_bytes == 1008
    assert asked == [1, 1999, 996, 1007]


def test_where_half_leads_nowhere_small_steps_go_on() -> None:
    def leanest(budget_bytes: int) -> Trial:
        return tried(next((nbytes for nbytes in (96, 94, 92, 90) if nbytes <= budget_bytes), 98), budget_bytes)

    assert least_budget(leanest, large=False).done.peak_bytes == 90


@pytest.mark.parametrize(
    "seed, chain", [(2, "microbatches"), (1, "one device"), pytest.param(0, "microbatches", marks=pytest.mark.sweep)]
)
def test_where_copies_are_made_the_least_that_is_named_and_more_can_be_given(seed: int, chain: str) -> None:
    step, *args = training(seed)
    base = CHAINS[chain](step)
    least = named(cf.offload(base, budget=1000), *args)
    assert least is not None
    for budget in (least, least + least // 50, 2 * least):
        assert peak(cf.offload(base, budget=budget), *args) <= budget


@pytest.mark.sweep
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("seed", range(30))
def test_of_many_steps(seed: int, chain: str) -> None:
    check_least(seed, chain)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(8))
def test_where_values_may_be_copied_or_made_again(seed: int) -> None:
    check_least(seed, "one device", copies=True)


def test_a_budget_that_a_named_policy_keeps_to_has_a_plan() -> None:
    """In microbatches the stages of a net with skips are worse candidates than a policy."""
    step, *args = training(5)
    base = CHAINS["microbatches"](step)
    budget = min(peak(cf.checkpoint(base, policy=policy), *args) for policy in POLICIES)
    assert peak(cf.checkpoint(base, budget=budget), *args) <= budget
