"""Training in float8 under every mode, in both orders, against the same function on one device.

    SCALINGS x MODES x {cf.fp8 first, cf.fp8 last}

Modes with experts have them in float8 too. A cell is *equal* when in float64 two training steps of the staged function are those of the
emulated one on one device, and when its products are in float8, forward and backward. Scales that are made of all rows of a batch cannot be
computed a microbatch at a time: these cells raise the error that says so.
"""

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from quantize_matrix import MODES as QUANTIZED_MODES
from quantize_matrix import ORDERS, Mixture, Net, targets, tokens
from torch import nn
from torch.utils import _pytree as pytree

import colofunc as cf
from colofunc.ops.fp8 import PRODUCTS

SCALINGS = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed")
MODES = QUANTIZED_MODES
EXPERTS = ("colofunc.experts", "colofunc.experts_backward")
MICROBATCHES = ("accumulate", "pipeline", "pipeline+zero1", "pipeline+tensor")
OF_ALL_ROWS = ("tensorwise", "rowwise")
"""Scalings that make a scale of all rows of the batch."""


@attrs.frozen
class Cell:
    """One combination."""

    scaling: str
    mode: str
    order: str

    def __str__(self) -> str:
        return f"{self.scaling}-{self.mode}-{self.order}"

    @property
    def mixes(self) -> bool:
        """Whether it cannot be computed a microbatch at a time."""
        return self.mode in MICROBATCHES and self.scaling in OF_ALL_ROWS


def every() -> Iterator[Cell]:
    """All cells."""
    for scaling in SCALINGS:
        for mode in MODES:
            for order in ORDERS:
                if mode != "alone" or order == "first":
                    yield Cell(scaling, mode, order)


def sample() -> list[Cell]:
    """A few cells in which every scaling, mode and order stands."""
    chosen = []
    for number, mode in enumerate(MODES):
        scaling = SCALINGS[-1] if mode in MICROBATCHES else SCALINGS[number % len(SCALINGS)]
        chosen.append(Cell(scaling, mode, "first" if mode == "alone" else ORDERS[number // 2 % 2]))
    return chosen


def step_of(net: Callable[[], nn.Module] = Net) -> tuple[Callable[..., Any], Any]:
    """(training step, its state)."""
    torch.manual_seed(0)
    model = cf.functional(net())
    return cf.train_step(model, cf.adapt(torch.optim.SGD, lr=0.1), loss=lambda out: out.square().mean())


def staged(cell: Cell, step_fn: Callable[..., Any]) -> Any:
    mode = MODES[cell.mode]
    if cell.order == "first":
        return mode.place(cf.fp8(step_fn, where=mode.where, scaling=cell.scaling))
    return cf.fp8(mode.place(step_fn), where=mode.where, scaling=cell.scaling)


def run(cell: Cell) -> float:
    """The largest difference from one device. Raises where the cell is not equal."""
    step_fn, state = step_of(MODES[cell.mode].net)
    step = staged(cell, step_fn)
    if cell.mode == "bf16":
        worst = cf.testing.check(step, state, tokens(), steps=2).worst
        check_products(cell, step.lower(state, tokens()).program)
        return worst
    state = pytree.tree_map_only(torch.Tensor, lambda x: x.double() if x.is_floating_point() else x, state)
    with cf.testing.float64():
        worst = cf.testing.check(step, state, tokens(), steps=2).worst
        check_products(cell, step.lower(state, tokens()).program)
    assert worst <= 1e-10, worst
    return worst


def check_products(cell: Cell, program: cf.ext.Program) -> None:
    """Both layers multiply in float8, forward and backward, and experts where there are some."""
    counts = [list(targets(program)).count(name) for name in PRODUCTS]
    wanted = [2, 2, 0 if cell.scaling == "rowwise_with_gw_hp" else 2]
    repeated = cell.mode.startswith(("checkpoint", "pipeline"))  # a product is made again, or one of its stages stands apart
    assert all(a == b or (repeated and a >= b > 0) for a, b in zip(counts, wanted, strict=True)), counts
    layers = [node for node in program.nodes if node.target in EXPERTS]
    assert len(layers) == (2 if MODES[cell.mode].net is Mixture else 0)
    assert all(node.args[-1] is True for node in layers), "experts are in float8, forward and backward"
