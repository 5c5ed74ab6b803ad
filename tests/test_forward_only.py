"""Forward-only steps (evaluation, inference) on the state of every named plan, in the order in which real ranks run them."""

from typing import Any

import pytest
import torch
from matrix import CONTEXT, TENSOR, ZERO, Cell, mesh_of, module_of, staged, step_of

import colofunc as cf
from colofunc.executors.backend import SimulatedBackend
from colofunc.executors.simulated import SimulatedProgram
from colofunc.program.passes.overlapped import overlapped
from colofunc.testing.check import run_reference

QUICK = (
    Cell("zero3", ranks=2), Cell("hybrid"), Cell(tensor="1d+sp", ranks=2), Cell(context="ring", ranks=2), Cell(kind="experts", ranks=2),
)  # fmt: skip
ALL = [Cell(zero) for zero in ZERO]
ALL += [Cell(tensor=tensor, ranks=8 if tensor in ("2.5d", "3d") else 4) for tensor in TENSOR]
ALL += [Cell(context=context) for context in CONTEXT]
ALL += [Cell(kind="experts"), Cell("zero3", "1d"), Cell("zero3", "1d", kind="experts", ranks=8)]


def evaluation(kind: str) -> tuple[Any, Any, Any]:
    """(forward-only step, state of training, batch) of a kind of model."""
    _, state, batch = step_of(kind, layers=1)
    model = cf.functional(module_of(kind, torch.float64, 1))

    def evaluate(state: Any, batch: Any) -> Any:
        out, _ = model.apply(state["params"], state["buffers"], **batch)
        return out.loss, out.logits

    return evaluate, state, batch


def evaluated(cell: Cell) -> tuple[float, torch.Tensor]:
    """Loss and logits on state that lies as training under the cell's plans wants it."""
    with cf.testing.float64():
        evaluate, state, batch = evaluation(cell.kind)
        placed = staged(cell, step_of(cell.kind, layers=1)[0]).init(state, batch)
        loss, logits = cf.shard(evaluate, mesh_of(cell))(placed, batch)
        return float(loss), logits.full()


def expected(cell: Cell) -> tuple[float, torch.Tensor]:
    with cf.testing.float64():
        loss, logits = run_reference(*evaluation(cell.kind))
    return float(loss), logits


def compile_as_real_ranks(self: SimulatedBackend, program: Any, mesh: cf.Mesh) -> SimulatedProgram:
    return SimulatedProgram(overlapped(program), mesh)


def check(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedBackend, "compile", compile_as_real_ranks)
    torch.testing.assert_close(evaluated(cell), expected(cell), atol=1e-10, rtol=0)


@pytest.mark.parametrize("cell", QUICK, ids=str)
def test_evaluation_in_the_order_of_real_ranks(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    check(cell, monkeypatch)


@pytest.mark.sweep
@pytest.mark.parametrize("cell", ALL, ids=str)
def test_evaluation_of_every_plan_in_the_order_of_real_ranks(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    check(cell, monkeypatch)
