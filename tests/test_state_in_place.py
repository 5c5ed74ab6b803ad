"""State that a step takes and gives back is written where it lies: no second cache, counted and measured, the same memory every step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_memory import agree
from torch import Tensor, nn

import colofunc as cf
from colofunc.executors.compiled import compile_segments
from colofunc.executors.simulated import SimulatedProgram
from colofunc.program.facts import written
from colofunc.testing import check
from colofunc.testing.parts import parts

D = torch.float64
SLOTS = 16
MESHES = {"one": (cf.Mesh(), None), "dp2": (cf.Mesh(dp=2), "(dp b) ..."), "tp2": (cf.Mesh(tp=2), "b (tp h) ...")}
Write = Callable[[Tensor, Tensor, Tensor], Tensor]


def at(cache: Tensor, position: Tensor) -> Tensor:
    return torch.arange(cache.shape[2])[:, None] == position


def setting(cache: Tensor, x: Tensor, position: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
    """As models write into a cache of their own."""
    cache = cache.clone()
    change(cache)
    return cache


# cache: (b, h, SLOTS, d), x: (b, h, 1, d), position: (1,)
WRITES: dict[str, Write] = {
    "index_copy": lambda c, x, p: c.index_copy(2, p, x),
    "index_copy_": lambda c, x, p: setting(c, x, p, lambda mine: mine.index_copy_(2, p, x)),
    "scatter": lambda c, x, p: c.scatter(2, p.expand(x.shape), x),
    "index_add": lambda c, x, p: c.index_add(2, p, x),
    "where": lambda c, x, p: torch.where(at(c, p), x, c),
    "masked_fill": lambda c, x, p: c.masked_fill(at(c, p), 0.5),
    "slice": lambda c, x, p: setting(c, x, p, lambda mine: mine[:, :, 3:4].copy_(x)),
    "select": lambda c, x, p: setting(c, x, p, lambda mine: mine[:, :, 3].copy_(x[:, :, 0])),
    "part of a part": lambda c, x, p: setting(c, x, p, lambda mine: mine[:, :, 4:8][:, :, 2:3].copy_(x)),
    "part times": lambda c, x, p: setting(c, x, p, lambda mine: mine[:, :, 1:3].mul_(0.5)),
    "part by index": lambda c, x, p: setting(c, x, p, lambda mine: mine[..., :2].index_copy_(2, p, x[..., :2])),
    "decay": lambda c, x, p: c * 0.9 + 0.1 * x,
    "decay, turned": lambda c, x, p: (0.1 * x).add(c * 0.9),
    "lerp": lambda c, x, p: c.lerp(x, 0.1),
    "twice": lambda c, x, p: (c.index_copy(2, p, x) * 0.5).tanh(),
}


def decoding(write: Write) -> Callable[[Any, Any], Any]:
    def step(state: dict[str, Tensor], x: Tensor) -> Any:
        keys, values = write(state["k"], x, state["at"]), write(state["v"], 2 * x, state["at"])
        return {"k": keys, "v": values, "at": state["at"] + 1}, keys.amax(2) * values.sum(2)

    return step


def empty(dtype: torch.dtype = D) -> dict[str, Tensor]:
    return {"k": torch.zeros(2, 4, SLOTS, 8, dtype=dtype), "v": torch.ones(2, 4, SLOTS, 8, dtype=dtype), "at": torch.tensor([3])}


def staged(step: Any, on: str, **options: Any) -> Any:
    mesh, spec = MESHES[on]
    specs = None if spec is None else ({"k": spec, "v": spec, "at": "a"}, spec)
    return cf.shard(step, mesh, in_specs=specs, **options)


def pointers(state: Any) -> list[int]:
    return [part.data_ptr() for name in state for part in state[name].shards]


def placed(low: Any, *args: Any) -> list[list[Tensor]]:
    leaves = torch.utils._pytree.tree_leaves(args)
    return [[part.contiguous().clone() for part in parts(x, layout, low.mesh)] for x, layout in zip(leaves, low.input_layouts, strict=True)]


@pytest.mark.parametrize("on", MESHES)
@pytest.mark.parametrize("how", WRITES)
def test_a_cache_is_written_where_it_lies(how: str, on: str) -> None:
    x = torch.randn(2, 4, 1, 8, dtype=D)
    step = staged(decoding(WRITES[how]), on)
    low = step.lower(empty(), x)
    cache_bytes = low.program.values[low.program.inputs[0]].nbytes
    held_bytes = sum(low.program.values[i].nbytes for i in low.program.inputs)
    peak_bytes = agree(low.program, placed(low, {name: empty()[name] for name in ("k", "v", "at")}, x), low.mesh).peak_bytes["device"]
    assert peak_bytes - held_bytes < cache_bytes, "there is room for another cache"
    state = step.init(empty(), x)
    before = pointers(state)
    for _ in range(3):
        state, _ = step(state, x)
        assert pointers(state) == before
    check(step, empty(), x, steps=3)


IN_PLACE: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "index_copy_": lambda c, x, p: c.index_copy_(2, p, x),
    "rows": lambda c, x, p: c[:, :, 3:4].copy_(x),
    "assignment": lambda c, x, p: c.__setitem__((slice(None), slice(None), slice(3, 4)), x),
    "assignment by index": lambda c, x, p: c.__setitem__((slice(None), slice(None), p), x),
    "add_": lambda c, x, p: c.add_(x),
    "mul_": lambda c, x, p: c.mul_(0.5),
}


@pytest.mark.parametrize("how", IN_PLACE)
def test_what_the_error_of_a_write_to_an_argument_says_is_so(how: str) -> None:
    """The argument itself is not written to, a clone of it is; it is a second cache only where the first one is kept."""

    def step_of(of: Callable[[Tensor], Tensor]) -> Callable[[Any, Any], Any]:
        def step(state: dict[str, Tensor], x: Tensor) -> Any:
            cache = of(state["k"])
            IN_PLACE[how](cache, x, state["at"])
            return {"k": cache, "at": state["at"] + 1}, cache.sum(2)

        return step

    state, x = {"k": torch.ones(2, 4, SLOTS, 8, dtype=D), "at": torch.tensor([3])}, torch.randn(2, 4, 1, 8, dtype=D)
    says = r"'state.k' at test_state_in_place.*; write to a .clone\(\) of it.* donated, .*: no copy is made"
    with pytest.raises(cf.TraceError, match=says):
        cf.shard(step_of(lambda cache: cache), cf.Mesh(dp=2)).lower(state, x)
    caches = dict[tuple[int, ...], int]()
    for donate in ((0,), ()):
        staged_step = cf.shard(step_of(Tensor.clone), cf.Mesh(dp=2), in_specs=({"k": "(dp b) ...", "at": "a"}, "(dp b) ..."), donate=donate)
        check(staged_step, state, x)
        low = staged_step.lower(state, x)
        cache_bytes = low.program.values[low.program.inputs[0]].nbytes
        caches[donate] = low.memory().peak_bytes["device"] // cache_bytes
    assert caches == {(0,): 1, (): 2}


def test_steps_that_must_not_write_over_what_they_read() -> None:
    """Whoever reads the old value behind the new one, or gives it back, gets the old one."""

    def reads(s: Any, x: Tensor) -> Any:
        new = s["c"] * 2
        return {"c": new}, (s["c"] + x).sum()

    def a_view_is_read(s: Any, x: Tensor) -> Any:
        row, new = s["c"][0], s["c"].index_fill(0, torch.tensor([0]), 7.0)
        return {"c": new}, row * x[0]

    def shifts(s: Any, x: Tensor) -> Any:
        return {"c": torch.cat([s["c"][1:], x[:1]])}, x.sum()

    def turns(s: Any, x: Tensor) -> Any:
        return {"c": s["c"] + s["c"].t()}, x.sum()

    def keeps_a_part(s: Any, x: Tensor) -> Any:
        part = s["c"][1:3]
        return {"c": s["c"].slice_scatter(part * 2, 0, 1, 3)}, part.sum()

    for step in (reads, a_view_is_read, shifts, turns, keeps_a_part):
        for mesh in (cf.Mesh(), cf.Mesh(dp=2)):
            check(cf.shard(step, mesh), {"c": torch.randn(4, 4, dtype=D)}, torch.randn(4, 4, dtype=D), steps=2)


def test_states_that_change_places() -> None:
    def swap(s: Any, x: Tensor) -> Any:
        return {"a": s["b"], "b": s["a"]}, x.sum()

    def swap_and_scale(s: Any, x: Tensor) -> Any:
        return {"a": s["b"] * 2, "b": s["a"] * 3}, x.sum()

    def from_the_other(s: Any, x: Tensor) -> Any:
        a = s["a"] * 0.5 + s["b"]
        return {"a": a, "b": s["b"] - a}, a.sum()

    def one_for_both(s: Any, x: Tensor) -> Any:
        new = s["a"] * 2
        return {"a": new, "b": new}, new.sum()

    state = {"a": torch.randn(4, 3, dtype=D), "b": torch.randn(4, 3, dtype=D)}
    for step in (swap, swap_and_scale, from_the_other, one_for_both):
        for mesh in (cf.Mesh(), cf.Mesh(dp=2)):
            check(cf.shard(step, mesh), state, torch.ones(2, dtype=D), steps=3)


LOOKS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda w: w, "turned": lambda w: w.t(), "a row": lambda w: w[0], "another": lambda w: (w * 2).view(-1),
}  # fmt: skip


@pytest.mark.parametrize("how", LOOKS)
def test_what_was_given_out_of_the_state_stays_as_it_was(how: str) -> None:
    """The next step writes over the state, and not over what this one returned beside it."""
    look = LOOKS[how]

    def step(s: Any, x: Tensor) -> Any:
        new = s["w"] - 0.1 * x
        return {"w": new, "still": s["still"]}, (look(new), look(s["still"]))

    def fresh() -> dict[str, Tensor]:
        return {"w": torch.eye(3, dtype=D), "still": torch.ones(3, 3, dtype=D)}

    x = torch.ones(3, 3, dtype=D)
    staged = cf.shard(step, cf.Mesh(dp=2))
    state = staged.init(fresh(), x)
    state, first = staged(state, x)
    want = [y.full().clone() for y in first]
    state, _ = staged(state, x)
    assert all(torch.equal(y.full(), kept) for y, kept in zip(first, want, strict=True))
    assert torch.allclose(want[0], look(torch.eye(3, dtype=D) - 0.1))
    assert "aten.sub.out" in {node.target for node in staged.lower(fresh(), x).program.nodes}


@pytest.mark.parametrize("mesh", [cf.Mesh(), cf.Mesh(dp=2)], ids=str)
def test_running_statistics_are_updated_where_they_lie(mesh: cf.Mesh) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)).double()
    model, opt = cf.functional(net), cf.adapt(torch.optim.SGD, lr=0.1)
    step, state = cf.train_step(model, opt, loss=lambda out: out.square().mean())
    batch = torch.randn(8, 3, 8, 8, dtype=D)
    staged = cf.shard(step, mesh, in_specs=(None, None if mesh.size == 1 else "(dp b) ..."))
    low = staged.lower(state, batch)
    changed = {low.program.values[i].name for node in low.program.nodes for i in written(node)}
    assert {"state.buffers.1.running_mean", "state.buffers.1.running_var"} <= changed
    mine = staged.init(state, batch)

    def where(state: Any) -> list[int]:
        return [part.data_ptr() for name, x in state["buffers"].items() if "running" in name for part in x.shards]

    before = where(mine)
    for _ in range(3):
        mine, _ = staged(mine, batch)
        assert where(mine) == before
    check(staged, state, batch, steps=2)


@pytest.mark.parametrize("how", ["index_copy", "part by index", "select", "decay", "twice"])
def test_compiled_segments_write_where_it_lies(how: str) -> None:
    x = torch.randn(2, 4, 1, 8, dtype=D)
    low = staged(decoding(WRITES[how]), "dp2").on("compiled").lower(empty(), x)
    segmented, bound = compile_segments(low.program, "aot_eager")
    assert any(any(segment.piece.changed) for segment in bound.values())
    given = placed(low, {name: empty()[name] for name in ("k", "v", "at")}, x)
    got = SimulatedProgram(segmented, low.mesh, bound)(given)
    assert [[part.data_ptr() for part in parts] for parts in got[:2]] == [[part.data_ptr() for part in parts] for parts in given[:2]]
    want, out = decoding(WRITES[how])(empty(), x)
    for shards, value in zip((got[0], got[1], got[3]), (want["k"], want["v"], out), strict=True):
        torch.testing.assert_close(torch.cat(shards), value)


def test_a_cache_that_was_made_by_repeating_one_row_can_be_written() -> None:
    """What a step gives back need not be a view of one row, over which nothing can be written."""

    def fill(x: Tensor) -> Any:
        return {"k": x.expand(2, 4, SLOTS, 8), "v": x.expand(2, 4, SLOTS, 8), "at": torch.tensor([3])}

    x = torch.randn(2, 4, 1, 8, dtype=D)
    step = decoding(WRITES["index_copy"])
    for mesh in (cf.Mesh(), cf.Mesh(dp=2)):
        decode = cf.shard(step, mesh)
        state, found = decode(cf.shard(fill, mesh)(x), x)
        want_state, want = step(fill(x), x)
        state, found = decode(state, x)
        want_state, want = step(want_state, x)
        torch.testing.assert_close((state["k"].full(), found.full()), (want_state["k"], want))


@pytest.mark.parametrize("mesh", [cf.Mesh(), cf.Mesh(dp=2)], ids=["one", "dp"])
def test_what_a_step_has_looked_up_stays_when_another_one_trains(mesh: cf.Mesh) -> None:
    """A step that consumes nothing may return its argument, or a view of it."""
    fn, state = cf.train_step(cf.functional(nn.Linear(4, 4)), cf.adapt(torch.optim.AdamW, lr=0.1), loss=lambda out: out.square().mean())
    train, x = cf.shard(fn, mesh), torch.ones(4, 4)
    look = cf.shard(lambda s, x: (s["params"]["weight"], s["params"]["weight"].t(), x.sum()), mesh, donate=())
    state = train.init(state, x)
    weight, turned, _ = look(state, x)
    before = weight.full().clone()
    state, _ = train(state, x)
    assert torch.equal(weight.full(), before) and torch.equal(turned.full(), before.t())
    assert not torch.equal(state["params"]["weight"].full(), before)
