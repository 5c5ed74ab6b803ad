"""What a call costs beyond plain PyTorch: training steps of small models on one device, and microseconds a leaf.

Plain is the unmodified model, `loss.backward()` and `torch.optim.AdamW(fused=True)`; ours is `cf.shard(step, cf.Mesh())` with
`cf.adapt(torch.optim.AdamW)`, whose update is the same fused kernel. A leaf is a tensor of the state or the batch. What a call costs by
itself is the whole of it less the straight-line function of its operators, which is timed within. Part of it is to make the tensors that
come out and to drop those that they replace: that alone is timed too, of as many as a call returns, in the same rounds. All is CPU
seconds, in alternating pairs, and the middle of the pairs counts.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch
import torch.utils._pytree as pytree
from torch import nn

import colofunc as cf
from bench import Row, Section
from bench._steps import Step
from colofunc.executors.step_function import StepFunction

PAIRS = 40
STEPS = 10
"""Steps in a row that are timed together."""
MOST_US_A_LEAF = 3.0
LEAVES_400 = "perceptron of 33 layers, 128 wide, 64 rows"
"""Its 132 tensors and their moments are about 400 leaves."""
MOST_CALL_S = 1.2e-3
"""Of about 400 leaves."""
MOST_SHARE = 0.03


def perceptron(width: int, depth: int) -> nn.Module:
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))]
    return nn.Sequential(*layers)


def convolutions(channels: int, depth: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1)]
    for _ in range(depth):
        layers += [nn.GroupNorm(4, channels), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1)]
    return nn.Sequential(*layers)


def attention(width: int, depth: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron of 8 layers, 128 wide, 64 rows": (lambda: perceptron(128, 8), (64, 128)),
    LEAVES_400: (lambda: perceptron(128, 33), (64, 128)),
    "perceptron of 12 layers, 256 wide, 128 rows": (lambda: perceptron(256, 12), (128, 256)),
    "convolutions, 6 of 16 channels, 8 images of 32 x 32": (lambda: convolutions(16, 6), (8, 3, 32, 32)),
    "transformer of 4 layers, 128 wide, 4 x 64 tokens": (lambda: attention(128, 4), (4, 64, 128)),
}


@contextmanager
def operators_timed() -> Iterator[list[float]]:
    """Seconds that the straight-line functions of steps take inside, in a list of one."""
    spent, run = [0.0], StepFunction.__call__

    def timed(self: StepFunction, inputs: list[torch.Tensor]) -> Any:
        start = time.process_time()
        try:
            return run(self, inputs)
        finally:
            spent[0] += time.process_time() - start

    StepFunction.__call__ = timed  # type: ignore[method-assign]
    try:
        yield spent
    finally:
        StepFunction.__call__ = run  # type: ignore[method-assign]


def plain(module: nn.Module, x: torch.Tensor) -> Step:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)

    def step() -> float:
        optimizer.zero_grad()
        loss = module(x).square().mean()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def through_colofunc(module: nn.Module, x: torch.Tensor) -> tuple[Step, Callable[[], None], int]:
    """Our step, what makes tensors as its results are, and how many leaves a call takes."""
    model = cf.functional(module)
    step_fn, state = cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=1e-4), loss=lambda out: out.square().mean())
    staged = cf.shard(step_fn, cf.Mesh())
    held = {"state": staged.init(state, x)}

    def step() -> float:
        held["state"], metrics = staged(held["state"], x)
        return float(metrics["loss"])

    makers = []
    for leaf in pytree.tree_leaves(held["state"]):
        assert leaf.home is not None, "a step has placed it"
        makers.append((leaf.home.maker(leaf.parts[0].device, leaf.role), leaf.parts))
    made: list[cf.DTensor] = []

    def make() -> None:
        made[:] = [maker(list(parts)) for maker, parts in makers]

    return step, make, len(staged.lower(held["state"], x).input_layouts)


@attrs.frozen
class Times:
    """Of one model, the middle of all pairs."""

    plain_s: float
    ours_s: float
    ratio: float
    call_s: float  # of ours, outside of the operators
    made_s: float  # of call_s: making the results and dropping the old ones
    leaves: int


def _seconds(step: Step) -> float:
    start = time.process_time()
    for _ in range(STEPS):
        step()
    return (time.process_time() - start) / STEPS


def times_of(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> Times:
    torch.manual_seed(0)
    first, second = make(), make()
    second.load_state_dict(first.state_dict())
    x = torch.randn(shape)
    theirs = plain(first, x)
    ours, make, leaves = through_colofunc(second, x)
    rows: list[tuple[float, float, float, float]] = []
    with operators_timed() as spent:
        for _ in range(3):
            theirs(), ours()
        for _ in range(PAIRS):
            plain_s, spent[0] = _seconds(theirs), 0.0
            ours_s = _seconds(ours)
            call_s = ours_s - spent[0] / STEPS
            start = time.process_time()
            make()
            rows.append((plain_s, ours_s, call_s, time.process_time() - start))
    middle = statistics.median
    return Times(
        plain_s=middle(row[0] for row in rows),
        ours_s=middle(row[1] for row in rows),
        ratio=middle(row[1] / row[0] for row in rows),
        call_s=middle(row[2] for row in rows),
        made_s=middle(row[3] for row in rows),
        leaves=leaves,
    )


def bench() -> Section:
    rows = []
    for name, (make, shape) in MODELS.items():
        found = times_of(make, shape)
        a_leaf_us, share = found.call_s / found.leaves * 1e6, found.call_s / found.plain_s
        rows.append(Row(f"{name}: plain / ours", f"{found.plain_s * 1e3:.2f} / {found.ours_s * 1e3:.2f} ms"))
        rows.append(Row("ours / plain", f"{found.ratio:.3f}", f"at most {1 + MOST_SHARE:.2f}", found.ratio <= 1 + MOST_SHARE))
        rows.append(
            Row(
                "a call outside of its operators",
                f"{a_leaf_us:.1f} us a leaf ({found.leaves} leaves), {share:.1%} of plain",
                f"at most {MOST_US_A_LEAF:.0f} us a leaf",
                a_leaf_us <= MOST_US_A_LEAF,
            )
        )
        made_us = found.made_s / found.leaves * 1e6
        rows.append(Row("of it to make the results, and drop what they replace", f"{made_us:.1f} us a leaf"))
        if name == LEAVES_400:
            target = f"under {MOST_CALL_S * 1e3:.1f} ms"
            rows.append(Row("the same of the whole call", f"{found.call_s * 1e3:.2f} ms", target, found.call_s < MOST_CALL_S))
    return Section(
        "A call of a small step beside plain PyTorch",
        f"AdamW fused in both, float32, {torch.get_num_threads()} thread(s), torch {torch.__version__}, middle of {PAIRS} pairs, "
        f"load average {os.getloadavg()[0]:.0f} on {os.cpu_count()} processors",
        rows,
    )
