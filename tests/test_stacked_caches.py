"""Writes into parts of one donated tensor, one behind the other: made where it lies, and reads in between see what was there."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_memory import agree
from torch import Tensor

import colofunc as cf
from colofunc.testing import check
from colofunc.testing.parts import parts

D = torch.float64
LAYERS, SLOTS, WIDTH = 4, 6, 5
State = dict[str, Tensor]


def inputs() -> tuple[State, State]:
    torch.manual_seed(0)
    state = {name: torch.randn(LAYERS, SLOTS, WIDTH, dtype=D) for name in "cd"}
    x = {"v": torch.randn(1, WIDTH, dtype=D), "layer": torch.randn(SLOTS, WIDTH, dtype=D), "at": torch.tensor([2])}
    return state, {**x, "mask": torch.arange(SLOTS)[:, None] == 3}


def setting(cache: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
    cache = cache.clone()
    change(cache)
    return cache


def by_index(cache: Tensor, x: State) -> Tensor:
    def change(mine: Tensor) -> None:
        for layer in range(LAYERS):
            mine[layer].index_copy_(0, x["at"], x["v"] * layer)

    return setting(cache, change)


def by_slice(cache: Tensor, x: State) -> Tensor:
    def change(mine: Tensor) -> None:
        for layer in range(LAYERS):
            mine[layer, 2:3].copy_(x["v"] * layer)

    return setting(cache, change)


def by_halves(cache: Tensor, x: State) -> Tensor:
    def change(mine: Tensor) -> None:
        mine[:, :3].mul_(0.5)
        mine[:, 3:].add_(x["v"])

    return setting(cache, change)


def again(cache: Tensor, x: State) -> Tensor:
    return setting(cache, lambda mine: [mine[1].index_copy_(0, x["at"] + turn, x["v"]) for turn in range(3)])


def then_all(cache: Tensor, x: State) -> Tensor:
    return by_index(torch.where(x["mask"], x["v"], cache), x) * 0.5


def reading(cache: Tensor, x: State) -> Tensor:
    """Each layer reads its own cache, written by then, and what it makes is written by the next one."""

    def change(mine: Tensor) -> None:
        row = x["v"]
        for layer in range(LAYERS):
            held = mine[layer]
            held.index_copy_(0, x["at"], row)
            row = torch.softmax(row @ held.mT, -1) @ held

    return setting(cache, change)


CACHES = (by_index, by_slice, by_halves, again, then_all, reading)


@pytest.mark.parametrize("write", CACHES, ids=lambda write: write.__name__)
def test_no_layer_of_a_stacked_cache_is_copied(write: Callable[[Tensor, State], Tensor]) -> None:
    def step(s: State, x: State) -> Any:
        new = write(s["c"], x)
        return {"c": new}, new.sum(-1)

    _, x = inputs()
    cache = torch.randn(LAYERS, SLOTS, 64, dtype=D)
    x = {**x, "v": torch.randn(1, 64, dtype=D)}
    staged = cf.shard(step, cf.Mesh())
    low = staged.lower({"c": cache}, x)
    leaves = zip(torch.utils._pytree.tree_leaves(({"c": cache}, x)), low.input_layouts, strict=True)
    placed = [[part.contiguous().clone() for part in parts(leaf, layout, low.mesh)] for leaf, layout in leaves]
    held_bytes = sum(low.program.values[id].nbytes for id in low.program.inputs)
    peak_bytes = agree(low.program, placed, low.mesh).peak_bytes["device"]
    assert peak_bytes - held_bytes < cache[0].nbytes, "there is room for a copy of a layer"
    state = staged.init({"c": cache}, x)
    before = state["c"].shards[0].data_ptr()
    state, _ = staged(state, x)
    assert state["c"].shards[0].data_ptr() == before
    check(staged, {"c": cache}, x, steps=2)


# What a step does next: a cache, a value of either from before, two layers, a slot -> the new cache.
Write = Callable[[Tensor, Tensor, int, int, int, State], Tensor]
WRITES: dict[str, Write] = {
    "layer": lambda c, old, i, j, at, x: c.select_scatter(c[i].index_copy(0, x["at"], x["v"]), 0, i),
    "layer, by a view": lambda c, old, i, j, at, x: setting(c, lambda mine: mine[i].index_copy_(0, x["at"], x["v"])),
    "slot": lambda c, old, i, j, at, x: setting(c, lambda mine: mine[i, at : at + 1].copy_(x["v"] * 2)),
    "part of a part": lambda c, old, i, j, at, x: setting(c, lambda mine: mine[i, at : at + 2].mul_(0.5)),
    "half": lambda c, old, i, j, at, x: setting(c, lambda mine: mine[: i + 1].add_(x["v"])),
    "width": lambda c, old, i, j, at, x: setting(c, lambda mine: mine[..., :2].add_(x["v"][0, :2])),
    "of another layer": lambda c, old, i, j, at, x: setting(c, lambda mine: mine[i].copy_(mine[j] * 2)),
    "swapped": lambda c, old, i, j, at, x: c.select_scatter(c[j], 0, i).select_scatter(c[i], 0, j),
    "of before": lambda c, old, i, j, at, x: c.select_scatter(old[j].tanh(), 0, i),
    "times before": lambda c, old, i, j, at, x: setting(c, lambda mine: mine[i].mul_(old[j])),
    "where": lambda c, old, i, j, at, x: torch.where(x["mask"], old * 0.5, c),
    "all": lambda c, old, i, j, at, x: c * 0.9,
    "with before": lambda c, old, i, j, at, x: c + old,
    "diagonal": lambda c, old, i, j, at, x: c.diagonal_scatter(c.diagonal(0, 0, 1) * 0.5, 0, 0, 1),
}
READS = ("now", "before", "a part of before", "both at once")


def chain(seed: int) -> Callable[[State, State], Any]:
    """A step that writes into two caches and reads them, and what they held before, in some order."""
    draw = random.Random(seed)
    kinds = [*WRITES, *READS, "layer", "layer, by a view", "a part of before"]
    drawn = []
    for _ in range(1 + seed % 9):
        drawn.append((draw.choice(kinds), draw.randrange(LAYERS), draw.randrange(LAYERS), draw.randrange(SLOTS - 1), draw.choice("ccd")))

    def step(s: State, x: State) -> Any:
        now, before, out = dict(s), list(s.values()), x["v"].sum()
        layers = [x["layer"]]
        for kind, i, j, at, name in drawn:
            old = before[(i + j) % len(before)]
            if kind in WRITES:
                now[name] = WRITES[kind](now[name], old, i, j, at, x)
            elif kind == "now":
                out = out + (now[name][i] * now[name][j]).sum()
            elif kind == "before":
                out = out + (old[i] * now[name][j]).sum()
            elif kind == "a part of before":
                out = out + (layers[i % len(layers)] * now[name][j]).sum()
                layers.append(now[name][i].index_copy(0, x["at"], x["v"]))
                now[name] = now[name].select_scatter(layers[-1], 0, i)
            else:
                out = out + (now["c"][i] * now["d"][j]).sum()
                layers.append(x["layer"] * (at + 1))
                now = {"c": now["c"].select_scatter(layers[-1], 0, i), "d": now["d"].select_scatter(layers[-1], 0, j)}
            before += now.values()
        return now, out

    return step


@pytest.mark.parametrize("mesh", [cf.Mesh(), cf.Mesh(tp=2)], ids=["one", "tp2"])
@pytest.mark.parametrize("first", range(0, 120, 30))
def test_whatever_is_written_in_between_everybody_reads_what_was_there(first: int, mesh: cf.Mesh) -> None:
    for seed in range(first, first + (30 if mesh.size == 1 else 5)):
        step, (want, x) = chain(seed), inputs()
        staged = cf.shard(step, mesh)
        state = staged.init(want, x)
        for _ in range(2):
            (state, out), (want, want_out) = staged(state, x), step(want, x)
            found = {name: cache.full() for name, cache in state.items()}
            torch.testing.assert_close((found, out.full()), (want, want_out), msg=lambda text, seed=seed: f"seed {seed}: {text}")


def test_a_layer_that_is_read_behind_the_next_write_keeps_what_was_in_it() -> None:
    def step(s: State, x: State) -> Any:
        layer = s["c"][1].index_copy(0, x["at"], x["v"])
        cache = s["c"].select_scatter(layer, 0, 1)
        cache = cache.select_scatter(cache[1] * 2, 0, 1)
        return {"c": cache}, layer.sum() + cache.sum()

    (state, x), mesh = inputs(), cf.Mesh()
    check(cf.shard(step, mesh), {"c": state["c"]}, x, steps=2)


def test_a_layer_that_two_caches_get_is_made_in_one_of_them() -> None:
    def step(s: State, x: State) -> Any:
        read = (s["c"][1] * s["d"][2]).sum()
        layer = x["layer"] * 2
        return {"c": s["c"].select_scatter(layer, 0, 1), "d": s["d"].select_scatter(layer, 0, 2)}, read

    state, x = inputs()
    staged = cf.shard(step, cf.Mesh())
    check(staged, state, x, steps=2)
    targets = [node.target for node in staged.lower(state, x).program.nodes]
    assert targets.count("aten.mul.out") == targets.count("colofunc.select_scatter_") == 1


def test_hundreds_of_writes_follow_one_another() -> None:
    """As many as Python's calls could not go through one within the other."""

    def step(s: State, x: State) -> Any:
        cache = s["c"]
        for turn in range(700):
            cache = cache.select_scatter(cache[turn % LAYERS] * 0.9, 0, turn % LAYERS) if turn % 2 else cache * 0.9
        return {"c": cache}, x["v"].sum()

    state, x = inputs()
    low = cf.shard(step, cf.Mesh()).lower({"c": state["c"]}, x)
    assert {node.target for node in low.program.nodes} == {"aten.mul.out", "aten.select.int", "aten.sum.default"}
