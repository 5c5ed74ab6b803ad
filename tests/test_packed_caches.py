"""cf.quantize(caches=): key-value caches in int8 by rows, against quantizing by hand; written where they lie, on any mesh."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_memory_agrees import agree

import colofunc as cf
from colofunc.ops.packed_rows import PackedRows

LAYERS, SLOTS = 4, 64
MESHES = {"one": cf.Mesh(), "dp": cf.Mesh(dp=2), "dp, tp": cf.Mesh(dp=2, tp=2)}


def rows_by_hand(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers and scales of the rows of a tensor."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.where(scale == 0, 0, x / scale).round().to(torch.int8), scale


def decode(state: Any, x: torch.Tensor) -> Any:
    """A token goes through layers of attention, each with a cache of its own."""
    new = {"at": state["at"] + 1}
    for layer in range(LAYERS):
        k = state[f"k{layer}_cache"].index_copy(2, state["at"], torch.tanh(x))
        v = state[f"v{layer}_cache"].clone()
        v.index_copy_(2, state["at"], x * 0.3)
        mask = torch.arange(SLOTS) <= state["at"]
        x = x + F.scaled_dot_product_attention(x, k, v, attn_mask=mask.view(1, 1, 1, SLOTS))
        new |= {f"k{layer}_cache": k, f"v{layer}_cache": v}
    return new, x


def by_hand(state: Any, x: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """The same with caches (numbers, scales), of which a row is rounded when it is written."""
    new = {"at": state["at"] + 1}
    for layer in range(LAYERS):
        wide = {}
        for name, rows in (("k", torch.tanh(x)), ("v", x * 0.3)):
            key = f"{name}{layer}_cache"
            written = [old.index_copy(2, state["at"], part) for old, part in zip(state[key], rows_by_hand(rows))]
            new[key] = tuple(written)
            wide[name] = written[0] * written[1]
        mask = torch.arange(SLOTS) <= state["at"]
        x = x + F.scaled_dot_product_attention(x, wide["k"], wide["v"], attn_mask=mask.view(1, 1, 1, SLOTS))
    return new, x


def caches(dtype: torch.dtype = torch.float64) -> tuple[Any, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    state: Any = {"at": torch.tensor([3])}
    for layer in range(LAYERS):
        for name in "kv":
            cache = torch.randn(4, 8, SLOTS, 32, generator=draw, dtype=dtype)
            cache[:, :, 3:] = 0
            state[f"{name}{layer}_cache"] = cache
    return state, torch.randn(4, 8, 1, 32, generator=draw, dtype=dtype)


@pytest.mark.filterwarnings("ignore:the plan uses")
@pytest.mark.parametrize("on", MESHES)
def test_steps_are_those_of_quantizing_by_hand(on: str) -> None:
    state, x = caches()
    step = cf.quantize(cf.shard(decode, MESHES[on]), caches="*_cache")
    wanted = {key: value if key == "at" else rows_by_hand(value) for key, value in state.items()}
    placed = step.init(state, x)
    for _ in range(3):
        placed, out = step(placed, x)
        wanted, expected = by_hand(wanted, x)
        torch.testing.assert_close(out.full(), expected, rtol=1e-12, atol=1e-12)
        for key, value in wanted.items():
            if key != "at":
                assert isinstance(placed[key], PackedRows)
                assert torch.equal(placed[key].data.full(), value[0]), key
                torch.testing.assert_close(placed[key].scale.full(), value[1], rtol=1e-12, atol=0)
    cf.testing.check(step, state, x, steps=2)


def test_a_row_keeps_its_numbers_and_nothing_moves() -> None:
    state, x = caches(torch.float32)
    step = cf.quantize(cf.shard(decode, cf.Mesh()), caches="*_cache")
    placed = step.init(state, x)
    before = {key: (cache.data.full().clone(), cache.data.shards[0].data_ptr()) for key, cache in placed.items() if key != "at"}
    for _ in range(4):
        placed, _ = step(placed, x)
    for key, (data, pointer) in before.items():
        assert torch.equal(placed[key].data.full()[:, :, :3], data[:, :, :3])
        assert placed[key].data.shards[0].data_ptr() == pointer


def test_what_is_counted_is_what_is_held_and_only_a_layer_is_wide() -> None:
    state, x = caches(torch.float32)
    low = agree(cf.quantize(cf.shard(decode, cf.Mesh(dp=2)), caches="*_cache"), state, x)
    held = sum(low.program.values[id].nbytes for id in low.program.inputs)
    plain = cf.shard(decode, cf.Mesh(dp=2)).lower(state, x)
    wide = sum(plain.program.values[id].nbytes for id in plain.program.inputs)
    assert held < 0.3 * wide
    assert low.memory().peak_bytes["device"] < held + 1.2 * wide / LAYERS
    assert low.memory().peak_bytes["device"] < 0.6 * plain.memory().peak_bytes["device"]


def test_caches_in_one_tensor() -> None:
    """All layers in one tensor: of each layer a view is written, and the layer alone is widened."""

    def stacked(state: Any, x: torch.Tensor) -> Any:
        cache = state["cache"].clone()
        for layer in range(LAYERS):
            cache[layer, :, :, 5:6] = x
            x = x + F.scaled_dot_product_attention(x, cache[layer], cache[layer])
        return {"cache": cache}, x

    state, x = {"cache": torch.randn(LAYERS, 2, 4, 32, 16, dtype=torch.float64)}, torch.randn(2, 4, 1, 16, dtype=torch.float64)
    for mesh in (cf.Mesh(), cf.Mesh(tp=2)):
        step = cf.quantize(cf.shard(stacked, mesh), caches="cache")
        low = cf.testing.check(step, state, x, steps=2).low
        widened = [node for node in low.global_program.nodes if node.target == "colofunc.widen_saved"]
        assert widened and all(low.global_program.values[node.results[0]].shape == (2, 4, 32, 16) for node in widened)


def test_a_prompt_makes_whole_caches_and_other_functions_read_them() -> None:
    def prompt(state: Any, x: torch.Tensor) -> Any:
        return {"cache": torch.tanh(x), "at": state["at"]}, x.sum()

    def read(state: Any, x: torch.Tensor) -> Any:
        return (state["cache"] * x).sum()

    state, x = {"cache": torch.zeros(2, 8, 64), "at": torch.tensor([0])}, torch.randn(2, 8, 64)
    mesh = cf.Mesh(dp=2)
    filled, _ = cf.quantize(cf.shard(prompt, mesh), caches="cache")(state, x)
    data, scale = rows_by_hand(torch.tanh(x))
    assert torch.equal(filled["cache"].data.full(), data)
    found = cf.quantize(cf.shard(read, mesh), caches="cache")(filled, x)
    torch.testing.assert_close(found.full(), (data * scale * x).sum())


def test_plans_mean_the_cache_by_its_name() -> None:
    state, x = caches(torch.float32)
    step = cf.quantize(cf.shard(decode, cf.Mesh(tp=2), {"*_cache": "b (tp h) s d"}), caches="*_cache")
    placed = step.init(state, x)
    assert str(placed["k0_cache"].data.spec) == "a (tp b) c d" and str(placed["k0_cache"].scale.spec).startswith("a (tp b) c")
    cf.testing.check(step, state, x)


def test_they_are_saved_and_loaded(tmp_path: Any) -> None:
    state, x = caches(torch.float32)
    step = cf.quantize(cf.shard(decode, cf.Mesh(dp=2)), caches="*_cache")
    placed, _ = step(step.init(state, x), x)
    cf.save(tmp_path / "state", placed)
    loaded = cf.load(tmp_path / "state", like=placed)
    assert torch.equal(loaded["k0_cache"].data.full(), placed["k0_cache"].data.full())
    assert torch.equal(step(loaded, x)[1].full(), step(placed, x)[1].full())


# ---- mistakes ----


def test_a_cache_that_is_changed_otherwise_is_refused() -> None:
    def moves(state: Any, x: torch.Tensor) -> Any:
        return {"cache": torch.cat([state["cache"][:, 1:], x], 1)}, x.sum()

    with pytest.raises(cf.InputError, match=r"the step changes 'state.cache' otherwise than by writing rows into it, by cat"):
        cf.quantize(moves, caches="cache").lower({"cache": torch.zeros(2, 8, 64)}, torch.zeros(2, 1, 64))


def test_globs_that_match_no_cache_are_refused() -> None:
    state, x = caches(torch.float32)
    with pytest.raises(cf.InputError, match="caches='k9_cache' matches no tensor of floating-point rows in the state; did you mean"):
        cf.quantize(decode, caches="k9_cache").lower(state, x)
    with pytest.raises(cf.InputError, match=r"cf.quantize\(caches=\[3\]\): give a glob"):
        cf.quantize(decode, caches=[3])  # type: ignore[list-item]
    with pytest.raises(cf.InputError, match="matches no tensor of floating-point rows"):
        cf.quantize(decode, caches="at").lower(state, x)


def test_a_cache_of_another_size_is_refused() -> None:
    def grows(state: Any, x: torch.Tensor) -> Any:
        return {"cache": torch.cat([state["cache"], x], 1)}, x.sum()

    with pytest.raises(cf.InputError, match=r"returns 'cache' as \(2, 9, 64\)"):
        cf.quantize(grows, caches="cache").lower({"cache": torch.zeros(2, 8, 64)}, torch.zeros(2, 1, 64))
