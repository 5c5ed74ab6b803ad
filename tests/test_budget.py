"""The budget sweep of `bench/budget.py` on small models: never above the budget, never behind what torch has."""

from typing import Any

import pytest
import torch
from test_checkpoint import made_again
from torch import nn

import colofunc as cf
from colofunc.compiler.step_compiler import stage
from colofunc.compiler.transform import Transform

orders = pytest.importorskip("bench._orders", reason="needs the partitioner of a recent torch", exc_type=ImportError)
budget = pytest.importorskip("bench.budget", exc_type=ImportError)


def gpt2() -> tuple[Any, Any, Any]:
    return budget.gpt(64, 4, 4, 4, 128)


class Bottleneck(nn.Module):
    """Two convolutions with norms around a narrow middle, as ResNet-50 has them."""

    def __init__(self, wide: int, narrow: int) -> None:
        super().__init__()
        self.parts = nn.Sequential(
            nn.Conv2d(wide, narrow, 1, bias=False), nn.BatchNorm2d(narrow), nn.ReLU(),
            nn.Conv2d(narrow, wide, 3, padding=1, bias=False), nn.BatchNorm2d(wide),
        )  # fmt: skip
        self.act = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(x + self.parts(x))


def resnet() -> tuple[Any, Any, Any]:
    with torch.device("meta"):
        blocks = (Bottleneck(16, 4) for _ in range(5))
        net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *blocks, nn.AvgPool2d(16), nn.Flatten(), nn.Linear(16, 8))
    batch = {"x": cf.abstract((16, 3, 16, 16)), "y": cf.abstract((16,), torch.int64)}
    loss = lambda out, batch: nn.functional.cross_entropy(out, batch["y"])  # noqa: E731
    return budget.adamw(net, batch, loss=loss, inputs=lambda batch: ((batch["x"],), {}))


KEPT = 1 << 13
"""Bytes of what is too small to be made again (`planner/recompute/stages.py`, SMALL), which torch's ways drop."""
MODELS = {"gpt2": (gpt2, [f"transformer.h.{k}" for k in range(4)]), "resnet": (resnet, [f"{k}" for k in range(1, 6)])}


@pytest.mark.parametrize("name", MODELS)
def test_within_every_budget_and_behind_neither_of_torchs_ways(name: str) -> None:
    make, functions = MODELS[name]
    args = make()
    whole, torchs, sequences = budget.others(args, functions, budgets=(0.0, 0.4, 1.0))
    assert len(torchs) == 3 and len(sequences) == len(functions) - 1
    tried = [p for p in (*budget.front(torchs), *budget.front(sequences)) if p.peak_bytes < 0.95 * whole.peak_bytes]
    assert len(tried) >= 2
    for theirs in tried:
        mine = budget.ours(args, theirs.peak_bytes + KEPT)
        assert mine is not None and mine.peak_bytes <= theirs.peak_bytes + KEPT
        assert mine.seconds <= theirs.seconds * (1 + 1e-9), (theirs, mine)


def orders_of(name: str, make: Any) -> tuple[Any, Any]:
    """(the program that a way gets, the program that it makes)"""
    seen: list[Any] = []

    def refit(program: Any, node_s: Any, finish: Any, _: Any) -> Any:
        seen.append((program, make(program, node_s)))
        return (finish(program),) * 2

    step, state, batch = MODELS[name][0]()
    looks = Transform("checkpoint", candidates=lambda build: build.evolve(searches=(refit,)))
    stage(cf.shard(step, cf.Mesh()), looks).lower(state, batch)
    return seen[0]


def test_segments_are_made_again_as_wholes_but_the_last() -> None:
    functions = MODELS["resnet"][1]
    program, made = orders_of("resnet", lambda program, node_s: orders.sequential(program, functions, 2))
    again = {made.nodes[k].path.split(".")[0] for k in made_again(made)}
    convolutions = [k for k in made_again(made) if "convolution" in made.nodes[k].target]
    assert again == {"1", "2"} and len(convolutions) == 4  # five functions: two, and three that are kept
    assert len(made.nodes) > len(program.nodes)


def test_the_partitioner_saves_less_for_a_smaller_budget() -> None:
    counts = []
    for share in (0.0, 0.4, 1.0):
        _, made = orders_of("resnet", lambda program, node_s, share=share: orders.partitioned(program, node_s, share))
        counts.append(sum("convolution" in made.nodes[k].target for k in made_again(made)))
    assert counts[0] == 11 and counts[0] > counts[1] > counts[2] == 0
