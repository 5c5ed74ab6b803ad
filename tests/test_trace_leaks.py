"""Tensors of a trace that a step keeps outside are errors at that trace, with the line that made them."""

import functools
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


@pytest.mark.parametrize("size", [0, 8, None], ids=["nothing", "some", "everything"])
@pytest.mark.parametrize("several", [False, True], ids=["a tensor", "a list"])
def test_a_cache_of_a_function_is_emptied(size, several):
    """Libraries remember tables of positions so."""

    @functools.lru_cache(maxsize=size)
    def table(n):
        positions = torch.arange(n) * 2.0
        return [positions, positions + 1] if several else positions

    def step(x):
        made = table(3)
        return x * (made[1] if several else made) + (table(3)[1] if several else table(3))

    for _ in range(2):
        trace(step, (torch.ones(3),))
        assert table.cache_info().currsize == 0
    assert torch.is_tensor(table(3)[1]) and table(3)[1].tolist() == ([1.0, 3.0, 5.0] if several else 2.0)


def test_what_a_cached_function_keeps_elsewhere_is_still_an_error():
    @functools.lru_cache
    def kept(x):
        kept.last = x * 2
        return kept.last

    with pytest.raises(TraceError, match="the step keeps a tensor"):
        trace(lambda x: kept(x) + 1, (torch.ones(3),))
