"""Sizes of axes do not enter a search: as many options on 2 x 2 ranks as on 8 x 4, where the sizes of tensors divide by both.

They enter prices, and so what is the cheapest of these options; where communication is free, and computing is what counts, the same plan
is found.
"""

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from colofunc_plugins import tensor, zero
from torch import Tensor, nn

import colofunc as cf
from colofunc.planner.sharding import assign, search

MESHES = (dict(dp=2, tp=2), dict(dp=8, tp=4))
WIDTH, HEADS, ROWS = 4096, 64, 64  # twice the ranks of the larger mesh at least: heads, their width, rows
PLANS: dict[str, tuple[Any, ...]] = {"open": (), "named": (zero(3, "dp"), tensor(axis="tp"))}


class Block(nn.Module):
    """(b, s, w) -> the same: attention and a feed-forward net."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        q, k, v = (f(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Embedding(1024, WIDTH), Block(), Block(), nn.Linear(WIDTH, 1024, bias=False))


@cache
def training() -> tuple[Any, Any]:
    model = cf.functional(cf.lazy(two_layers))
    return cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=1e-3), loss=lambda out: out.logsumexp(-1).mean())


def step_of(axes: dict[str, int], plans: tuple[Any, ...], topology: str) -> tuple[Any, Any, Any]:
    step, state = training()
    sharded = cf.shard(step, cf.Mesh(**axes, topology=topology), *plans)
    return sharded, state, cf.abstract((ROWS, 64), torch.int64)


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each search: how many classes of operators it decides, and how many options they have; of all: how many moves were tried."""
    counted: list[int] = [0]
    build, change_s = assign.build_model, search.Position.change_s

    def building(program: Any, mesh: Any, ties: Any, options: Any, *args: Any, **kwargs: Any) -> Any:
        counted.extend((len(options), sum(map(len, options))))
        return build(program, mesh, ties, options, *args, **kwargs)

    def changing(self: search.Position, moves: Any) -> float:
        counted[0] += 1
        return change_s(self, moves)

    monkeypatch.setattr(assign, "build_model", building)
    monkeypatch.setattr(search.Position, "change_s", changing)
    monkeypatch.setenv("COLOFUNC_CACHE", "off")
    return counted


class Counted(Exception):
    """Ends a plan once its options are known."""


@pytest.mark.parametrize("plans", list(PLANS))
def test_a_search_has_as_many_options(plans: str, looked_at: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def searching(*args: Any, **kwargs: Any) -> Any:
        raise Counted

    monkeypatch.setattr(assign, "search_ends", searching)
    counts = []
    for axes in MESHES:
        looked_at[:] = [0]
        step, state, batch = step_of(axes, PLANS[plans], "8xa100-80g")
        with pytest.raises(Counted):
            step.lower(state, batch)
        counts.append(looked_at[1:])
    assert counts[0] == counts[1] and counts[0][1] > counts[0][0] > 100


def test_where_communication_is_free_the_same_plan_is_found_by_as_many_moves(looked_at: list[int]) -> None:
    found = []
    for axes in MESHES:
        looked_at[:] = [0]
        step, state, batch = step_of(axes, PLANS["named"], "ideal")
        low = step.lower(state, batch)
        layouts = [str(layout) for layout in (*low.input_layouts, *low.output_layouts)]
        found.append((layouts, [decision.strategy for decision in low.plan.find("*")], list(looked_at)))
    assert found[0] == found[1]
    assert found[0][2][0] > 0, "there was something to search"
