"""Guarded calls are as calls that are looked up: random trees of arguments, and random changes between calls.

Two steps of one function get the same calls, one of them with guards and one without. Whatever happens to the arguments in between,
both give the same values or the same error, and both have prepared as many steps.
"""

import collections
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

import colofunc as cf
from colofunc.compiler.guard import CallLeaves, Guard
from colofunc.program.tracing.tree import flatten, map_tensors, unflatten, walk

Pair = collections.namedtuple("Pair", "first second")


@attrs.define
class Record:
    first: Any
    second: Any


class Registered:
    """A container that torch was told of."""

    def __init__(self, *items: Any) -> None:
        self.items = items


pytree.register_pytree_node(Registered, lambda x: (list(x.items), None), lambda items, _: Registered(*items))


class Doubled(torch.nn.Module):
    """What a step captures: it computes something else in eval mode."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if self.training else x


MODULE = Doubled()


@pytest.fixture(scope="module", autouse=True)
def modes() -> Iterator[None]:
    yield
    MODULE.train()


def step_fn(state: Any, x: torch.Tensor) -> Any:
    numbers = sum(leaf for _, leaf in walk(state) if type(leaf) is int)
    total = x.sum() * (1 + numbers)
    for _, leaf in walk(state):
        if isinstance(leaf, torch.Tensor):
            total = total + leaf.sum()
    return map_tensors(lambda w: w + 1, state), MODULE(total)


LEAVES: dict[str, Callable[[], Any]] = {
    "row": lambda: torch.arange(4.0),
    "matrix": lambda: torch.ones(2, 2),
    "float64": lambda: torch.ones(2, dtype=torch.float64),
    "integers": lambda: torch.arange(2),
    "parameter": lambda: torch.nn.Parameter(torch.ones(2), requires_grad=False),
    "float": lambda: 0.5,
    "array": lambda: np.ones(2, dtype=np.float32),
    "None": lambda: None,
    "number": lambda: 3,
    "text": lambda: "text",
}
CONTAINERS: dict[str, Callable[..., Any]] = {
    "dict": lambda *items: {f"k{k}": item for k, item in enumerate(items)},
    "list": lambda *items: list(items),
    "tuple": lambda *items: items,
    "named tuple": lambda *items: Pair(items[0], items[-1]),
    "record": lambda *items: Record(items[0], items[-1]),
    "registered": Registered,
}
# A tree as data, so that each of the two steps gets one of its own.
TREES = st.recursive(
    st.sampled_from(list(LEAVES)),
    lambda inner: st.tuples(st.sampled_from(list(CONTAINERS)), st.lists(inner, min_size=1, max_size=3)),
    max_leaves=6,
)


def build(tree: Any) -> Any:
    return LEAVES[tree]() if isinstance(tree, str) else CONTAINERS[tree[0]](*map(build, tree[1]))


def full(x: Any) -> Any:
    return x.full() if isinstance(x, cf.DTensor) else x


def on_first_leaf(change: Callable[[torch.Tensor], Any]) -> Callable[[Any], Any]:
    """A change of the first tensor in a state, which nobody else has."""

    def changed(state: Any) -> Any:
        leaves, tree = flatten(state)
        return unflatten(tree, [change(leaves[0]), *leaves[1:]]) if leaves else state

    return changed


def on_first_dict(change: Callable[[dict[str, Any]], Any]) -> Callable[[Any], Any]:
    def changed(state: Any) -> Any:
        if type(state) is dict:
            return change(state)
        if type(state) in (list, tuple) and state:
            return type(state)([changed(state[0]), *state[1:]])
        return state

    return changed


def switch(state: Any) -> Any:
    MODULE.train(not MODULE.training)
    return state


MESH = cf.Mesh(dp=2, topology="ideal")
CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda state: state,
    "plain": lambda state: map_tensors(full, state),
    "shape": on_first_leaf(lambda x: full(x).reshape(-1).repeat(2)),
    "strides": on_first_leaf(lambda x: full(x).repeat(2, *[1] * max(1, x.dim() - 1)).mT),
    "dtype": on_first_leaf(lambda x: full(x).double()),
    "meta": on_first_leaf(lambda x: full(x).to("meta")),
    "a gradient": on_first_leaf(lambda x: full(x).double().requires_grad_()),
    "a gradient in place": on_first_leaf(lambda x: x.requires_grad_() if x.is_floating_point() else x),
    "written": on_first_leaf(lambda x: x.mul_(2)),
    "another dim in place": on_first_leaf(lambda x: x.unsqueeze_(0)),
    "detached": on_first_leaf(lambda x: x.detach()),
    "placed otherwise": on_first_leaf(lambda x: cf.distribute(full(x).reshape(-1), "(dp a)" if x.numel() % 2 == 0 else "a", MESH)),
    "another mesh": on_first_leaf(lambda x: cf.distribute(full(x).reshape(-1), "a", cf.Mesh(tp=2))),
    "a float": on_first_leaf(lambda x: 0.5),
    "nothing there": on_first_leaf(lambda x: None),
    "a key more": on_first_dict(lambda d: {**d, "more": torch.ones(2)}),
    "a key less": on_first_dict(lambda d: dict(list(d.items())[1:])),
    "keys in another order": on_first_dict(lambda d: dict(reversed(d.items()))),
    "in a list": lambda state: [state],
    "another mode": switch,
}


class Counted:
    """A step with or without guards. `outcome` is a call of it: what came out, in words and numbers."""

    def __init__(self, guarded: bool) -> None:
        self.step = cf.shard(step_fn, MESH)
        self.guarded = guarded
        self.let_through = False

    def outcome(self, state: Any, x: torch.Tensor) -> tuple[Any, Any]:
        """(state behind the call, what there is to compare)."""
        ask = Guard.given

        def told(guard: Guard, args: tuple[Any, ...]) -> CallLeaves | None:
            given = ask(guard, args) if self.guarded else None
            self.let_through |= given is not None
            return given

        self.let_through = False
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Guard, "given", told)
            try:
                state, total = self.step(state, x)
            except Exception as error:
                return state, (type(error), str(error), getattr(error, "__notes__", []), self.prepared)
        values = [(str(x.dtype), full(x).tolist(), x.spec if isinstance(x, cf.DTensor) else None) for x in flatten(state)[0]]
        return state, (values, full(total).tolist(), self.prepared)

    @property
    def prepared(self) -> int:
        return sum(map(len, self.step.compiler._ready.values()))


def as_looked_up(tree: Any, changes: list[str]) -> None:
    outcomes: list[list[Any]] = []
    for guarded in (True, False):
        MODULE.train()
        step, state, found = Counted(guarded), build(tree), list[Any]()
        for change in ("nothing", "nothing", *changes, "nothing", "nothing"):
            state = CHANGES[change](state) if not _is_lost(state) else build(tree)
            state, outcome = step.outcome(state, torch.ones(3))
            found.append(outcome)
        outcomes.append(found)
    for change, with_guard, without in zip(("", "", *changes, "", ""), *outcomes, strict=True):
        assert with_guard == without, change


of_any = given(TREES, st.lists(st.sampled_from(list(CHANGES)), min_size=1, max_size=5))


@settings(max_examples=15, deadline=None)
@of_any
def test_guarded_calls_are_as_calls_that_are_looked_up(tree: Any, changes: list[str]) -> None:
    as_looked_up(tree, changes)


@pytest.mark.sweep
@settings(max_examples=200, deadline=None)
@of_any
def test_so_are_many_more(tree: Any, changes: list[str]) -> None:
    as_looked_up(tree, changes)


def _is_lost(state: Any) -> bool:
    """Whether the last call has failed in a way that left nothing to go on with."""
    return any(isinstance(x, cf.DTensor) and x.is_consumed for x in flatten(state)[0]) or any(x.is_meta for x in flatten(state)[0])


LIKELY = ["row", ("dict", ["row", "None", "number"]), ("record", ["matrix", ("list", ["row"])]), ("registered", ["row"])]


@pytest.mark.parametrize("tree", LIKELY)
def test_such_a_call_is_let_through_where_nothing_has_changed(tree: Any) -> None:
    step, state = Counted(guarded=True), build(tree)
    for _ in range(3):
        state, _ = step.outcome(state, torch.ones(3))
    assert step.let_through
