"""A call like the last one skips the look-up; every way in which it can differ goes through it, with the right result or error."""

import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import colofunc as cf
from colofunc.compiler.guard import Guard, reader
from colofunc.compiler.surroundings import look_around
from colofunc.program.tracing.tree import flatten, unflatten

State = dict[str, Any]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Per call since: whether a guard let it through."""
    found: list[bool] = []
    ask = Guard.given

    def told(self: Guard, args: tuple[Any, ...]) -> Any:
        given = ask(self, args)
        found.append(given is not None)
        return given

    monkeypatch.setattr(Guard, "given", told)
    yield found


def add(state: State, x: torch.Tensor, times: float = 1.0) -> tuple[State, torch.Tensor]:
    moved = {name: w + times * x.to(w.dtype).sum() for name, w in state.items()}
    return moved, sum(w.sum() for w in moved.values())


def fresh() -> State:
    return {"a": torch.arange(4.0), "b": torch.ones(2, 2)}


def warm(mesh: cf.Mesh | None = None, fn: Callable[..., Any] = add, **options: Any) -> tuple[Any, State]:
    """A step with its state, after two calls."""
    step = cf.shard(fn, mesh or cf.Mesh(), **options)
    state = step.init(fresh(), torch.ones(3))
    for _ in range(2):
        state, _ = step(state, torch.ones(3))
    return step, state


def whole(state: State) -> State:
    return {name: w.full() if isinstance(w, cf.DTensor) else w for name, w in state.items()}


def agrees(step: Any, state: State, *args: Any) -> State:
    """One call, compared with the function itself."""
    right, total = add(whole(state), *args)
    state, found = step(state, *args)
    for name, w in whole(state).items():
        assert w.dtype == right[name].dtype and w.equal(right[name])
    assert found.full().equal(total)
    return state


@pytest.mark.parametrize("mesh", [cf.Mesh(), cf.Mesh(dp=2, topology="ideal")], ids=["one", "two"])
def test_a_call_like_the_last_one_is_not_looked_up(mesh: cf.Mesh, asked: list[bool]) -> None:
    step, state = warm(mesh)
    asked.clear()
    for k in range(3):
        state = agrees(step, state, torch.full((3,), float(k)))
    assert asked == [True] * 3
    assert all(w.owned and w.home is not None for w in state.values())


def test_lengths_that_take_turns_each_have_a_guard(asked: list[bool]) -> None:
    step, state = warm()
    state = agrees(step, state, torch.ones(5))
    asked.clear()
    for length in (3, 5, 3, 5):
        state = agrees(step, state, torch.ones(length))
    assert asked.count(True) == 4


# Each makes of (state, x) what a later call is given; the guard must not let it through.
DIFFERENT: dict[str, Callable[[State, torch.Tensor], tuple[Any, ...]]] = {
    "plain state of another dtype": lambda state, x: ({k: w.double() for k, w in whole(state).items()}, x),
    "another dtype of the batch": lambda state, x: (state, x.double()),
    "another shape": lambda state, x: (state, torch.ones(4)),
    "a gradient wanted of the batch": lambda state, x: (state, x.requires_grad_()),
    "a gradient wanted of the state": lambda state, x: ({k: w.requires_grad_() for k, w in state.items()}, x),
    "keys in another order": lambda state, x: (dict(reversed(state.items())), x),
    "one key more": lambda state, x: ({**state, "c": torch.zeros(())}, x),
    "an argument more": lambda state, x: (state, x, 2.0),
    "an integer for a tensor": lambda state, x: (state, x, 2),
    "another spec": lambda state, x: ({k: cf.distribute(w, "(a dp)" + " b" * (w.dim() - 1), MESH) for k, w in whole(state).items()}, x),
}
MESH = cf.Mesh(dp=2, topology="ideal")


@pytest.mark.parametrize("which", DIFFERENT)
def test_what_differs_is_looked_up_and_right(which: str, asked: list[bool]) -> None:
    step, state = warm(MESH)
    args = DIFFERENT[which](state, torch.ones(3))
    asked.clear()
    agrees(step, *args)
    assert True not in asked


def test_a_plain_state_of_the_same_kind_is_let_through_and_left_alone(asked: list[bool]) -> None:
    step, state = warm()
    plain = whole(state)
    before = {name: w.clone() for name, w in plain.items()}
    asked.clear()
    agrees(step, plain, torch.ones(3))
    assert asked == [True] and all(plain[name].equal(w) for name, w in before.items())


def test_a_consumed_state_names_the_call_that_consumed_it() -> None:
    step, state = warm()
    step(state, torch.ones(3))
    with pytest.raises(cf.ConsumedError, match=r"was donated to add at test_guard.py") as error:
        step(state, torch.ones(3))
    assert any("as argument 'state.a'" in note for note in error.value.__notes__)


def test_a_written_or_reshaped_state_is_looked_up(asked: list[bool]) -> None:
    step, state = warm()
    state["a"].mul_(2.0)
    asked.clear()
    state = agrees(step, state, torch.ones(3))
    assert asked == [True] and state["a"].home is not None  # still of the shape and in the layout that is wanted
    state["b"].unsqueeze_(0)
    assert state["b"].home is None
    asked.clear()
    agrees(step, state, torch.ones(3))
    assert True not in asked


def test_one_tensor_in_two_places_is_written_once() -> None:
    step, state = warm()
    agrees(step, {"a": state["a"], "b": state["a"].reshape(2, 2)}, torch.ones(3))
    step, state = warm()
    agrees(step, state, state["a"].full()[:3])
    step, state = warm()
    part = state["a"].local  # the step's own memory, as the batch
    right = add(whole(state), part[:3].clone())[0]
    found, _ = step(state, part[:3])
    assert all(found[name].full().equal(w) for name, w in right.items())


def test_another_mesh_is_an_error_and_the_next_call_goes_on() -> None:
    step, state = warm()
    other = {name: cf.distribute(w, "a" if w.dim() == 1 else "a b", cf.Mesh(tp=2)) for name, w in fresh().items()}
    with pytest.raises(cf.InputError, match=r"lies on Mesh\(tp=2"):
        step(other, torch.ones(3))
    agrees(step, state, torch.ones(3))


def test_another_tier_is_looked_up(asked: list[bool]) -> None:
    step, state = warm()
    low = step.lower(state, torch.ones(3))
    host = {name: cf.distribute(w.full(), low.input_layouts[k].with_tier("host"), cf.Mesh()) for k, (name, w) in enumerate(state.items())}
    asked.clear()
    agrees(step, host, torch.ones(3))
    assert True not in asked


MODEL = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(1.0))


def through(state: State, x: torch.Tensor) -> tuple[State, torch.Tensor]:
    return {name: w + 1.0 for name, w in state.items()}, MODEL[1](x @ x.t() if x.dim() == 2 else x).sum()


@pytest.fixture
def modes() -> Iterator[None]:
    yield
    MODEL.train()


def test_a_switch_of_the_mode_is_seen(modes: None, asked: list[bool]) -> None:
    step, state = warm(fn=through)
    state, dropped = step(state, torch.ones(3))
    MODEL[1].eval()
    asked.clear()
    state, kept = step(state, torch.ones(3))
    assert asked == [False] and (float(dropped), float(kept)) == (0.0, 3.0)
    MODEL[1] = torch.nn.Dropout(1.0)  # another module in its place
    state, dropped = step(state, torch.ones(3))
    assert float(dropped) == 0.0


def test_autocast_around_a_call_is_part_of_its_signature(modes: None, capfd: pytest.CaptureFixture[str]) -> None:
    MODEL.eval()
    step, state = warm(fn=through)
    x = torch.rand(4, 4)
    for _ in range(2):
        state, plain = step(state, x)
        with torch.autocast("cpu", torch.bfloat16):
            state, cast = step(state, x)
            right = through(whole(state), x)[1]
        assert (plain.dtype, cast.dtype) == (torch.float32, right.dtype) == (torch.float32, torch.bfloat16)
        assert cast.full().equal(right) and plain.full().equal(through(whole(state), x)[1])
    assert "traced again for the autocast of (cpu, cuda): (None, None) -> (bfloat16, None)" in capfd.readouterr().err


def descend(state: State, x: torch.Tensor) -> tuple[State, torch.Tensor]:
    """The new state is made of a number that ranks have to tell one another."""
    total = sum(w.sum() for w in state.values()) + x.sum()
    return {name: w - 0.1 * total for name, w in state.items()}, total


def test_a_call_that_failed_before_its_update_leaves_the_state() -> None:
    step, state = warm(MESH, descend)
    with cf.testing.fail(rank=0, at="all_reduce"), pytest.raises(cf.ColofuncError, match="a test asked for it"):
        step(state, torch.ones(3))
    right, total = descend(whole(state), torch.ones(3))
    state, found = step(state, torch.ones(3))
    torch.testing.assert_close((whole(state), found.full()), (right, total))


def test_surroundings_stand_until_what_was_found_is_another_thing() -> None:
    scale, model = 2.0, torch.nn.Sequential(torch.nn.Tanh())

    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x) * scale

    found = look_around(step)
    assert found.stands() and found.key == look_around(step).key
    model.append(torch.nn.Tanh())
    assert not found.stands()
    found = look_around(step)
    scale = 3.0
    assert not found.stands()
    found = look_around(step)
    model.eval()
    assert not found.stands() and found.key != look_around(step).key


@pytest.mark.parametrize("left", range(13))
@pytest.mark.parametrize("right", range(13))
def test_a_tree_is_like_another_exactly_where_their_keys_are_equal(left: int, right: int) -> None:
    x = torch.ones(2)
    trees = [(x,), (x, x), [x], {"a": x, "b": 1}, {"b": 1, "a": x}, {"a": x, "b": True}, {"a": x, "b": "1"}, (x, None), (x, 1.0)]
    trees += [{"a": x, "b": x}, {"a": x, "c": x}, ({"a": x, "b": x}, x), ()]
    tree = flatten(trees[left])[1]
    leaves = reader(tree)(trees[right])
    assert (leaves is not None) == (tree.key() == flatten(trees[right])[1].key())
    assert leaves is None or len(leaves) == len(flatten(trees[right])[0])


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


def nested_settings() -> Any:
    return types.SimpleNamespace(inner=types.SimpleNamespace(scales=[1.0, {"scale": 1.0}]))


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], float], Callable[[Any], Any]]] = {
    "namespace": (lambda: types.SimpleNamespace(scale=1.0), lambda o: o.scale, lambda o: setattr(o, "scale", 2.0)),
    "slots": (Slotted, lambda o: o.scale, lambda o: setattr(o, "scale", 2.0)),
    "nested": (nested_settings, lambda o: o.inner.scales[1]["scale"], lambda o: o.inner.scales[1].update(scale=2.0)),
    "set": (lambda: {1}, len, lambda o: o.add(2)),
    "bytearray": (lambda: bytearray(b"\1"), lambda o: o[0], lambda o: o.append(3) or o.__setitem__(0, 2)),
    "array of objects": (lambda: np.array([1.0, "a"], dtype=object), lambda o: o[0], lambda o: o.__setitem__(0, 2.0)),
    "list of a class": (lambda: type("Numbers", (list,), {})([1.0]), lambda o: o[0], lambda o: o.__setitem__(0, 2.0)),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_what_an_argument_holds_may_change_between_calls(asked: list[bool], kind: str) -> None:
    make, read, change = CHANGES[kind]
    settings, x = make(), torch.ones(4)
    step = cf.shard(lambda x, settings: x * read(settings), cf.Mesh(dp=2))
    for _ in range(3):
        assert step(x, settings).full().equal(x)
    assert asked[-1]  # while nothing changes, the guard lets a call through
    change(settings)
    for _ in range(2):
        assert step(x, settings).full().equal(x * 2)
    assert step(x, make()).full().equal(x)


def test_a_tree_is_rebuilt_from_as_many_leaves_as_it_has() -> None:
    x = torch.ones(2)
    for obj in ((x, x), {"a": x, "b": {"c": x}}, [{"a": x}, x, 3], {"a": (), "b": x}):
        leaves, tree = flatten(obj)
        fresh = [torch.full((2,), float(k)) for k, _ in enumerate(leaves)]
        again = flatten(unflatten(tree, fresh))
        assert again[1] == tree and all(a is b for a, b in zip(again[0], fresh, strict=True))
        with pytest.raises(cf.ColofuncError, match="was given"):
            unflatten(tree, [*fresh, x])
    with pytest.raises(cf.ColofuncError, match="holds 2 tensors and was given 1"):
        unflatten(flatten((x, x))[1], [x])
