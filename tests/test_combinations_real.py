"""A few cells of the matrix on real gloo ranks: two steps and an evaluation, losses and every parameter as on one device."""

import pytest
import torch
from matrix import Cell, mesh_of, module_of, staged, step_of

import colofunc as cf
from colofunc.executors.launch import launch
from colofunc.testing.check import run_reference

pytestmark = pytest.mark.dist
LAYERS = 1  # every collective of a mode is there; what lies between two layers the simulated cells have
ON_TWO = (Cell("zero3", ranks=2), Cell(tensor="1d+sp", ranks=2), Cell(context="ring", ranks=2), Cell(kind="experts", ranks=2))
ON_FOUR = (Cell("zero3", "1d"), Cell("zero1", context="ulysses"), Cell(tensor="2d"), Cell("zero3", kind="experts"))


def evaluation(cell):
    """A forward-only step on the state of training."""
    model = cf.functional(module_of(cell.kind, torch.float64, LAYERS))
    return lambda state, batch: model.apply(state["params"], state["buffers"], **batch)[0].loss


def trained(cell):
    """Loss and parameters after two steps, whole, and the loss of an evaluation."""
    torch.set_num_threads(1)
    step, state, batch = step_of(cell.kind, layers=LAYERS)  # outside: the mode draws other numbers
    with cf.testing.float64():
        step = staged(cell, step)
        state = step.init(state, batch)
        for _ in range(2):
            state, metrics = step(state, batch)
        after = cf.shard(evaluation(cell), mesh_of(cell))(state, batch)
        return float(metrics["loss"]), float(after), {name: p.full() for name, p in state["params"].items()}


def trained_all(cells):
    return [trained(cell) for cell in cells]


def alone(cell):
    step, state, batch = step_of(cell.kind, layers=LAYERS)
    with cf.testing.float64():
        for _ in range(2):
            state, metrics = run_reference(step, state, batch)
        after = run_reference(evaluation(cell), state, batch)
    return float(metrics["loss"]), float(after), state["params"]


@pytest.mark.parametrize(
    ("ranks", "cells"),
    [(2, ON_TWO), (4, ON_FOUR[:2]), pytest.param(4, ON_FOUR[2:], marks=pytest.mark.sweep)],
    ids=["two", "four", "four, others"],
)
def test_cells_equal_one_device_on_real_ranks(ranks, cells) -> None:
    want = [alone(cell) for cell in cells]
    for rank in launch(trained_all, ranks, cells, timeout_s=400):
        for (*losses, params), (*expected, exact) in zip(rank, want, strict=True):
            torch.testing.assert_close(losses, expected, atol=1e-10, rtol=0)
            assert params.keys() == exact.keys()
            for name, p in params.items():
                assert (p - exact[name]).abs().max() <= 1e-10 * max(1.0, float(exact[name].abs().max())), name
