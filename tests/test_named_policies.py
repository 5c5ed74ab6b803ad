"""No named policy fits in a budget that is refused where policies are free: of checkpoint, of offload, of both, on one rank and on two.

Problem: what searches propose may be worse than what a policy says. Here the least that a free step can be given is compared with the
least under each policy, and with the peak that a policy has without a budget.
"""

from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from least_named import named, peak, tried
from torch import nn

import colofunc as cf
from colofunc.compiler.budget import _fastest_of
from colofunc.compiler.decisions import Decisions
from colofunc.compiler.least_budget import Trial, least_budget
from colofunc.planner.candidate import FinishedProgram
from colofunc.planner.recompute import fastest
from colofunc.planner.recompute.policies import NAMED, RecomputePolicy
from colofunc.plugins import build_registry
from colofunc.program.ir import Program
from colofunc.transforms.offload import BUILT_IN

KEPT: tuple[str | RecomputePolicy, ...] = (*NAMED, cf.every(1), cf.every(2), cf.every(3), cf.every(4), cf.every(8))
TIERS = (*(name for name in BUILT_IN if name != "disk"), *build_registry().memory_policies)  # "disk" wants a directory


class UNet(nn.Module):
    """Convolutions with batch norm, down and up again with skips. how: what differs between the ways in which people write it."""

    def __init__(self, how: str, width: int, levels: int) -> None:
        super().__init__()
        self.how = how
        sizes = [width << level for level in range(levels + 1)]
        steps = [*pairwise(sizes)]
        joined = 1 if how == "add" else 2
        self.first = self.block(3, width)
        self.down = nn.ModuleList(self.block(narrow, wide, stride=2 if how == "strided" else 1) for narrow, wide in steps)
        self.up = nn.ModuleList(nn.ConvTranspose2d(wide, narrow, 2, stride=2) for narrow, wide in reversed(steps))
        self.merge = nn.ModuleList(self.block(joined * narrow, narrow) for narrow, _ in reversed(steps))

    def block(self, inside: int, outside: int, stride: int = 1) -> nn.Module:
        conv, norm = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=self.how == "biased"), nn.BatchNorm2d(outside)
        act = nn.ReLU(inplace=self.how == "in place")
        return nn.Sequential(conv, act, norm) if self.how == "norm last" else nn.Sequential(conv, norm, act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, skips = self.first(x), []
        for block in self.down:
            skips.append(x)
            x = block(x if self.how == "strided" else nn.functional.max_pool2d(x, 2))
        for up, merge in zip(self.up, self.merge, strict=True):
            x, skip = up(x), skips.pop()
            x = merge(x + skip if self.how == "add" else torch.cat([x, skip], 1))
        return x


BOTH = "checkpoint, offload"
EACH, PARTS = [("checkpoint", slice(None)), ("offload", slice(None))], [(BOTH, slice(k, None, 3)) for k in range(3)]
"""(what limits memory, which of the policies are held against the free step): of both there are ninety, too many for one test."""
HOW = ("cat", "add", "in place", "norm last", "strided", "biased")


def unet(how: str, width: int = 4, levels: int = 2, picture: int = 16) -> Any:
    with torch.device("meta"):
        net = UNet(how, width, levels)
    return training(net, (4, 3, picture, picture))


def perceptron(width: int = 8) -> Any:
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 4))
    return training(net, (16, 4))


def training(net: nn.Module, batch: tuple[int, ...]) -> Any:
    optimizer = cf.adapt(torch.optim.AdamW, lr=0.1)
    step, state = cf.train_step(cf.functional(net), optimizer, loss=lambda out: out.square().mean())
    return step, state, cf.abstract(batch)


def under_policies(base: Any, where: str) -> Iterator[tuple[str, Any]]:
    """(the policies' names, bytes or None -> the step under them), those that are free first."""
    kept = ("auto", *KEPT) if "checkpoint" in where else (None,)
    tiers = TIERS if "offload" in where else (None,)  # "auto" comes first
    for keeps in kept:
        for tier in tiers:

            def limited(nbytes: int | None, keeps: Any = keeps, tier: Any = tier) -> Any:
                step = base if tier is None else cf.offload(base, policy=tier, **({} if nbytes is None else {"budget": nbytes}))
                return step if keeps is None else cf.checkpoint(step, policy=keeps, budget=nbytes)

            yield f"{getattr(keeps, 'name', keeps)}, {tier}", limited


def check_policies(training: Any, mesh: cf.Mesh, where: str, some: slice) -> None:
    step, *args = training
    (_, free), *policies = under_policies(cf.shard(step, mesh), where)
    least = named(free(1), *args)
    assert least is not None
    for name, limited in policies[some]:
        assert peak(limited(None), *args) >= least, name
        assert (named(limited(1), *args) or 0) >= least, name


def test_no_policy_needs_less_of_a_small_unet() -> None:
    check_policies(unet("norm last", width=2, levels=1, picture=8), cf.Mesh(), "checkpoint", some=slice(1, 2))


def test_no_policy_of_memory_needs_less_on_one_rank() -> None:
    assert TIERS[0] == "auto"
    check_policies(perceptron(), cf.Mesh(), "offload", some=slice(2, 4))


def test_what_a_sharding_of_the_pool_leads_to_is_named() -> None:
    """On several ranks a search may look at no sharding that is lean enough."""
    asked = list[int]()

    def near(nbytes: int) -> Trial:
        asked.append(nbytes)
        return tried(950 if nbytes < 940 else 700, nbytes)

    free, far = lambda nbytes: tried(900, nbytes), lambda nbytes: tried(990, nbytes)
    assert least_budget(free, large=False, pool=[far, near]).done.peak_bytes == 700
    assert asked == [1, 949, 350, 699]


def test_of_the_pool_the_fastest_that_fits_is_taken() -> None:
    def of_pool(peak_bytes: int, cost_s: float, more_s: float) -> Any:
        decided = SimpleNamespace(plan=SimpleNamespace(cost_s=cost_s))
        program = Program((), (), (), {}, {}, (), "inplace")
        return lambda nbytes: Trial(cast(Decisions, decided), FinishedProgram(program, peak_bytes, more_s), nbytes)

    pool = [of_pool(500, 1.0, 3.0), of_pool(800, 1.0, 1.0), of_pool(900, 1.0, 0.0), of_pool(700, 3.0, 0.0)]
    taken = _fastest_of(pool, 899)
    assert taken is not None and taken.done.peak_bytes == 800
    assert _fastest_of(pool, 499) is None


@pytest.mark.sweep
def test_a_budget_that_a_named_policy_meets_on_two_ranks_is_met_and_no_slower() -> None:
    step, *args = unet("add")
    step = cf.shard(step, cf.Mesh(dp=2))
    budget = named(cf.checkpoint(step, policy=cf.every(3), budget=1), *args)
    assert budget is not None
    free, third = (cf.checkpoint(step, policy=policy, budget=budget).lower(*args) for policy in ("auto", cf.every(3)))
    assert max(low.memory().peak_bytes["device"] for low in (free, third)) <= budget
    assert free.plan.cost_s <= third.plan.cost_s


def test_where_nothing_fits_all_policies_with_a_name_are_counted() -> None:
    step, *args = unet("add", width=2, levels=1, picture=8)
    program = cf.shard(step, cf.Mesh()).lower(*args).program
    whole = FinishedProgram(program, 1000, 0.0)

    def counted(budget_bytes: int) -> int:
        """How many policies are tried where each needs 900 bytes."""
        count = lambda one, like=None, moves=True: FinishedProgram(one, 900, 1.0)  # noqa: E731
        proposed = fastest._Proposals.of(program, lambda node, values: 0.0)
        return len(fastest._named(proposed, count, [whole], budget_bytes))

    assert counted(899) == len(fastest.CANDIDATES) + len(fastest.MORE)
    assert counted(900) == len(fastest.CANDIDATES)
    names = {policy.name for policy in (*fastest.CANDIDATES, *fastest.MORE)}
    assert names == {*NAMED, *(f"every({n})" for n in range(2, 9))}  # every(1) is "nothing"


@pytest.mark.sweep
@pytest.mark.parametrize(("where", "some"), EACH + PARTS)
@pytest.mark.parametrize("how", HOW)
def test_of_unets_on_one_rank(how: str, where: str, some: slice) -> None:
    check_policies(unet(how), cf.Mesh(), where, some)


@pytest.mark.sweep
@pytest.mark.parametrize(("where", "some"), EACH)
@pytest.mark.parametrize("how", HOW)
def test_of_unets_on_two_ranks(how: str, where: str, some: slice) -> None:
    check_policies(unet(how), cf.Mesh(dp=2), where, some)


@pytest.mark.sweep
@pytest.mark.parametrize(("where", "some"), EACH + PARTS)
@pytest.mark.parametrize("width", [4, 8, 32])
def test_of_perceptrons_on_two_ranks(width: int, where: str, some: slice) -> None:
    check_policies(perceptron(width), cf.Mesh(dp=2), where, some)
