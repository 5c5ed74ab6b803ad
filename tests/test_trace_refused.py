"""What no program can repeat is an error at the user's line: branches on data, writes to what is outside, host randomness."""

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import colofunc as cf
from colofunc.errors import ColofuncError, TraceError
from colofunc.program.tracing.trace import trace


def test_a_random_operator_without_a_counter_based_form_is_refused() -> None:
    with pytest.raises(TraceError, match=r"random operator aten\.\w+.* at test_trace_refused.py:\d+ in"):
        trace(lambda x: torch._standard_gamma(x), (torch.ones(3),))


@pytest.mark.parametrize("name", ["lt", "le", "gt", "ge"])
@pytest.mark.parametrize("bound", [-0.5, -0.0, 0, 0.5, 1, 1.5])
def test_a_branch_on_a_random_number_is_taken_where_none_decides_otherwise(name: str, bound: float) -> None:
    """As transformers ask for each layer whether it is left out, also where none is. A uniform number may be 0, and is below 1."""
    compare = getattr(torch, name)
    ends = {bool(compare(torch.tensor(x), bound)) for x in (0.0, 0.5 - 2**-24, 0.5, 0.5 + 2**-24, 1 - 2**-24)}

    def step(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if compare(torch.rand([]), bound) else x + 2

    if len(ends) == 2:
        with pytest.raises(TraceError, match=r"a random number decides at test_trace_refused.py:\d+ in step what runs"):
            trace(step, (torch.zeros(2),))
        return
    program = trace(step, (torch.zeros(2),)).program
    assert [node.args[1] for node in program.nodes if node.target == "aten.add.Tensor"] == [1 if ends == {True} else 2]


def test_data_dependent_branch() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x
        return -x

    with pytest.raises(
        TraceError, match=r"data-dependent control flow: .* at test_trace_refused.py:\d+ in step.*torch.where"
    ):
        trace(step, (torch.ones(3),))
    for fn in (
        lambda x: x[x > 0],
        lambda x: torch.nonzero(x),
        lambda x: x * x.sum().item(),
        lambda x: torch.unique(x),
    ):
        with pytest.raises(TraceError, match="data-dependent"):
            trace(fn, (torch.ones(3),))


def test_write_to_an_input() -> None:
    def step(state: dict[str, torch.Tensor]) -> Any:
        state["w"][0].add_(1)
        return state

    with pytest.raises(
        TraceError,
        match=r"in place to its input 'state.w' at test_trace_refused.py:\d+ in step; write to a .clone\(\) of it.*return the new value",
    ):
        trace(step, ({"w": torch.ones(2)},))


def test_write_to_a_captured_tensor() -> None:
    outside = torch.zeros(2)

    def step(x: torch.Tensor) -> Any:
        outside.add_(x)
        return x

    with pytest.raises(TraceError, match=r"captured from outside at test_trace_refused.py:\d+ in step"):
        trace(step, (torch.ones(2),))
    assert torch.equal(outside, torch.zeros(2))


def test_backward_into_a_captured_parameter() -> None:
    model = nn.Linear(2, 2)

    def step(x: torch.Tensor) -> Any:
        loss = model(x).sum()
        loss.backward()
        return loss

    with pytest.raises(TraceError, match="captured from outside; pass parameters as an argument"):
        trace(step, (torch.ones(1, 2),))
    assert model.weight.grad is None


def test_host_randomness_is_refused() -> None:
    for draw in (random.random, np.random.rand):
        with pytest.raises(TraceError, match="Python's or NumPy's random generator"):
            trace(lambda x, draw=draw: x * float(draw()), (torch.ones(2),))


def test_leaked_tensors_are_refused_when_used() -> None:
    kept: list[torch.Tensor] = []

    def step(x: torch.Tensor) -> Any:
        out = x + (kept[0] if kept else 0)
        kept.append(out)
        return out

    with pytest.raises(TraceError, match="the step keeps a tensor"):
        trace(step, (torch.ones(2),))
    with pytest.raises(TraceError, match="trace that has ended"):
        kept[0] + 1
    with pytest.raises(TraceError, match="made by an earlier trace"):
        trace(step, (torch.ones(2),))


def test_output_of_unknown_type() -> None:
    with pytest.raises(TraceError, match=r"out.1 of type object"):
        trace(lambda x: (x, object()), (torch.ones(2),))


def test_errors_of_operators_stay_torch_errors() -> None:
    with pytest.raises(RuntimeError, match="broadcast") as info:
        trace(lambda x: x + torch.ones(3), (torch.ones(2),))
    assert "aten.add.Tensor on torch.float32 [2], torch.float32 [3] at test_trace_refused.py:" in info.value.__notes__[0]


def test_formatting_a_traced_value() -> None:
    seen: list[str] = []

    def step(x: torch.Tensor) -> Any:
        seen.extend([f"{x.sum():.3f}", str(x), repr(x)])
        return x + 1

    same_but = trace(step, (torch.ones(2),))
    assert len(same_but.program.nodes) >= 1
    assert all("traced" in s for s in seen)


def test_trace_errors_are_colofunc_errors() -> None:
    assert issubclass(TraceError, ColofuncError)


def test_a_choice_of_functions_by_value_is_refused() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))  # type: ignore[no-any-return]

    with pytest.raises(TraceError, match=r"test_trace_refused.py:\d+ in step takes functions .*Try: torch.where"):
        trace(step, (torch.ones(2),))


def test_nested_tensors_are_refused() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.nested.nested_tensor([x[:3], x[:2]], layout=torch.jagged).values()  # type: ignore[no-any-return]

    with pytest.raises(TraceError, match=r"nested tensor is made at test_trace_refused.py:\d+ in step"):
        trace(step, (torch.ones(4),))


def test_a_checkpoint_that_calls_backward_is_refused() -> None:
    def step(w: torch.Tensor) -> Any:
        return cf.value_and_grad(lambda w: torch.utils.checkpoint.checkpoint(torch.tanh, w, use_reentrant=True).sum())(w)

    with pytest.raises(TraceError, match=r"test_trace_refused.py:\d+ in step goes through .*Try: use_reentrant=False"):
        trace(step, (torch.ones(2),))
