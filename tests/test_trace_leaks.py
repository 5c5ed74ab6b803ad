"""Tensors of a trace that a step keeps outside are errors at that trace, with the line that made them."""

import gc
import sys
import types

import pytest
import torch

from colofunc.errors import TraceError
from colofunc.program.tracing.trace import trace

KEPT = []


@pytest.fixture(scope="module", autouse=True)
def few_objects() -> None:
    """A leak is looked for among all objects; those that other tests have left are frozen like what was imported (see conftest.py)."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def kept_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A global that keeps a tensor is found where the collector looks: what is older than a test is frozen here (see conftest.py)."""
    monkeypatch.setattr(sys.modules[__name__], "KEPT", [])


def keeps_in(holder):
    """Steps that keep their loss somewhere outside, by the words for where."""
    seen, by_name, thing = [], {}, types.SimpleNamespace()

    def closure(x):
        loss = (x * 2).sum()
        seen.append(loss)
        return loss

    def dictionary(x):
        by_name["loss"] = (x * 2).sum()
        return x * 2

    def attribute(x):
        thing.last = x + 1
        return x * 2

    def global_list(x):
        KEPT.append(x * 3)
        return x * 2

    def with_graph(x):
        w = torch.ones(3, requires_grad=True)
        seen.append((w * x).sum())
        return x * 2

    def nonlocal_name(x):
        nonlocal last
        last = x * 2
        return last.sum()

    last = None
    return {f.__name__: f for f in (closure, dictionary, attribute, global_list, with_graph, nonlocal_name)}[holder]


@pytest.mark.parametrize(
    ("holder", "where"),
    [
        ("closure", "in a list"),
        ("dictionary", "in a dict, under 'loss'"),
        ("attribute", "in attribute 'last' of a SimpleNamespace"),
        ("global_list", "in a list"),
        ("with_graph", "in a list"),
        ("nonlocal_name", "in a variable of an outer function"),
    ],
)
def test_a_tensor_that_leaves_the_step_is_an_error_at_this_trace(holder, where):
    with pytest.raises(TraceError) as caught:
        trace(keeps_in(holder), (torch.ones(3),))
    text = str(caught.value)
    assert where in text and "test_trace_leaks.py:" in text and f"in {holder}" in text and "return the tensor from the step" in text


def test_what_is_dropped_again_is_no_leak():
    scratch = []

    def step(x):
        scratch.append(x * 2)
        cycle = {"x": x + 1}
        cycle["me"] = cycle  # only the collector can free it
        return scratch.pop().sum()

    assert len(trace(step, (torch.ones(3),)).program.outputs) == 1 and scratch == []


def test_a_module_that_keeps_a_tensor_is_a_warning():
    class Caching(torch.nn.Module):
        def forward(self, x):
            self.table = x.cumsum(0)
            return self.table * 2

    module = Caching()
    with pytest.warns(UserWarning, match="in attribute 'table' of a module Caching"):
        trace(module, (torch.ones(3),))
    with pytest.raises(TraceError, match="a trace that has ended"):
        module.table + 1
