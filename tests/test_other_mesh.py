"""From one mesh to another: the parts are those of the whole value, and no rank is sent more than it is to hold."""

import random
import re
from typing import Any

import pytest
import torch

import colofunc as cf
from colofunc.dtensor import tensor as dtensor
from colofunc.executors.launch import launch
from colofunc.spec.parts import holds
from colofunc.spec.regions import count, region_of
from colofunc.spec.spec import bind
from colofunc.spec.transfer import Transfer, TransferPiece, part
from colofunc.testing.parts import parts

MESHES = ({"a": 2}, {"a": 3}, {"a": 4}, {"a": 2, "b": 2}, {"a": 2, "b": 3}, {"a": 2, "b": 2, "c": 2}, {})
DTYPES = (torch.float64, torch.bfloat16, torch.bool, torch.complex64, torch.int8)


def drawn_spec(draw: random.Random, axes: dict[str, int], dims: int) -> str:
    """Axes on random dims, in blocks, striped, or (as sizes do not always divide) padded; some are left out."""
    names = [[f"d{k}"] for k in range(dims)]
    for axis in draw.sample(list(axes), len(axes)):
        if names and draw.random() < 0.75:
            dim = draw.choice(names)
            dim.insert(draw.choice([0, len(dim)]), axis)
    words = [dim[0] if len(dim) == 1 else f"({' '.join(dim)})" for dim in names]
    return " ".join(words)


def drawn(seed: int) -> tuple[torch.Tensor, str, cf.Mesh, str, cf.Mesh]:
    draw = random.Random(seed)
    dims = draw.choice([0, 1, 2, 2, 3])
    shape = [draw.choice([1, 4, 6, 8, 12]) for _ in range(dims)]
    dtype = draw.choice(DTYPES)
    x = torch.arange(torch.Size(shape).numel()).reshape(shape)
    first, second = draw.choice(MESHES), draw.choice(MESHES)
    specs = [drawn_spec(draw, axes, dims) for axes in (first, second)]
    return (x % 7).to(dtype), specs[0], cf.Mesh(**first), specs[1], cf.Mesh(**second)


def laid(x: torch.Tensor, spec: str, mesh: cf.Mesh) -> cf.DTensor | None:
    """None where that spec does not fit the shape."""
    try:
        return cf.distribute(x, spec, mesh)
    except cf.SpecError:
        return None


def bytes_of(piece: TransferPiece, itemsize: int) -> int:
    return itemsize * torch.Size(piece.shape).numel()


def check(seed: int) -> bool:
    x, spec, mesh, other_spec, other = drawn(seed)
    source, want = laid(x, spec, mesh), laid(x, other_spec, other)
    if source is None or want is None or mesh == other:
        return False
    got = cf.distribute(source, other_spec, other)
    assert got.sharding == want.sharding and got.mesh == other
    for mine, expected in zip(got.shards, want.shards, strict=True):
        assert torch.equal(mine, expected), (seed, spec, other_spec)
    plan = Transfer(source.sharding, mesh, want.sharding, other)
    received = [(rank, piece) for rank in range(other.size) for piece in plan.received(rank)]
    sent = [(rank, target, piece) for rank in range(mesh.size) for target, piece in plan.sent(rank).items()]
    between = {(piece.source, target, piece.shape) for target, piece in received if piece.source != target}
    assert between == {(rank, target, tuple(map(count, piece.there))) for rank, target, piece in sent} and len(between) == len(sent)
    for rank in range(other.size):
        mine = [piece for target, piece in received if target == rank]
        assert sum(bytes_of(piece, 1) for piece in mine) == region_of(want.sharding, other, rank).numel
        if rank < mesh.size and holds(source.sharding.at, mesh, rank):  # what it holds already does not travel
            assert all(region_of(source.sharding, mesh, piece.source) != region_of(source.sharding, mesh, rank) for piece in mine
                       if piece.source != rank)  # fmt: skip
    return True


def test_random_layouts_on_random_meshes() -> None:
    tried = sum(check(seed) for seed in range(400))
    assert tried > 150


def drawn_layout(seed: int) -> tuple[torch.Tensor, cf.Layout, cf.Mesh]:
    """A tensor and how it is to lie: in stripes, padded, with terms that are pending, or at some ranks alone."""
    draw = random.Random(seed)
    axes = draw.choice(MESHES)
    dims = draw.choice([0, 1, 2, 2, 3])
    shape = [draw.choice([1, 5, 6, 8, 12]) for _ in range(dims)]
    spec = drawn_spec(draw, axes, dims)
    for k in range(dims):
        padded, striped = (f" d{k})", f" d{k}~)"), (rf"\(([abc ]*) d{k}\)", rf"(2 \1 d{k})")
        spec = spec.replace(*padded) if draw.random() < 0.5 else re.sub(*striped, spec)
    left = [axis for axis in axes if axis not in spec]
    if left and draw.random() < 0.5:
        spec += draw.choice([" +{}", " max:{}", " @{}=0", " @{}=1"]).format(left[0])
    x = torch.arange(torch.Size(shape).numel()).reshape(shape)
    mesh = cf.Mesh(**axes)
    return (x % 7).to(draw.choice(DTYPES)), bind(spec, mesh, x.shape), mesh


def test_what_is_placed_lies_as_the_layout_says() -> None:
    """By definition, on layouts with stripes, padding, pending terms and missing ranks."""
    seen = set[str]()
    for seed in range(600):
        try:
            x, layout, mesh = drawn_layout(seed)
        except cf.SpecError:
            continue
        text = layout.text()
        seen |= {sign for sign in ("~", "+", "max", "@") if sign in text}
        seen |= {"stripes" for dim in layout.dims if len(dim) > 1 and dim[0][1] is None}
        for rank, expected in enumerate(parts(x, layout, mesh)):
            assert torch.equal(part(x, layout, mesh, rank), expected), (seed, text, rank)
    assert len(seen) == 5


@pytest.mark.sweep
def test_more_random_layouts() -> None:
    print(f"{sum(check(seed) for seed in range(400, 20_000))} pairs of layouts on pairs of meshes equal")


def test_a_sum_that_is_pending_is_taken_first() -> None:
    mesh, other = cf.Mesh(dp=2), cf.Mesh(tp=3)
    whole = torch.randn(6, 4, dtype=torch.float64)
    parts = [whole * 0.25, whole * 0.75]
    pending = cf.from_local(parts, "b d +dp", mesh, shape=(6, 4))
    got = cf.distribute(pending, "(tp b) d", other)
    torch.testing.assert_close(got.full(), whole)


def test_values_of_some_ranks() -> None:
    x = torch.randn(4, 6)
    source = cf.distribute(x, "(dp a) b @pp=1", cf.Mesh(pp=2, dp=2))
    got = cf.distribute(source, "a (tp b) @pp=0", cf.Mesh(pp=2, tp=3))
    assert [part.numel() for part in got.shards] == [8, 8, 8, 0, 0, 0] and torch.equal(got.full(), x)


def test_gradients_come_back_as_the_tensor_lies() -> None:
    x = cf.distribute(torch.randn(4, 6, dtype=torch.float64), "(dp a) b", cf.Mesh(dp=2)).requires_grad_()
    y = cf.distribute(x, "a (tp b)", cf.Mesh(tp=3))
    (y * y).sum().backward()
    assert x.grad is not None and x.grad.mesh == x.mesh
    torch.testing.assert_close(x.grad.full(), 2 * x.detach().full())


def trained(mesh: cf.Mesh, plan: Any, state: Any = None) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8)).double()
    step_fn, made = cf.train_step(cf.functional(net), cf.adapt(torch.optim.AdamW, lr=1e-2), loss=lambda out: out.square().mean())
    step, x = cf.shard(step_fn, mesh, plan), torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    state, metrics = step(step.init(made if state is None else state, x), x)
    return state, metrics["loss"].full()


def twice(first: cf.Mesh, second: cf.Mesh) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses of two steps, each on a mesh of its own."""
    state, loss = trained(first, {"*.weight": f"({first.axis_names[0]} o) i"})
    return loss, trained(second, {"*.weight": f"o ({second.axis_names[0]} i)"}, state)[1]


@pytest.mark.parametrize("axes", [{"tp": 2}, {"tp": 4}])
def test_a_state_goes_on_elsewhere_without_being_whole_anywhere(axes: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    want = twice(cf.Mesh(dp=1), cf.Mesh(dp=1))
    state, loss = trained(cf.Mesh(dp=2), {"*.weight": "(dp o) i"})

    def whole(*args: Any) -> Any:
        raise AssertionError("the state was brought together")

    with monkeypatch.context() as patch:
        patch.setattr(dtensor._Full, "forward", staticmethod(whole))
        moved = cf.shard(lambda s, x: (s, x.sum()), cf.Mesh(**axes), donate=()).init(state, torch.zeros(4))
    torch.testing.assert_close(loss, want[0])
    for name, leaf in moved["params"].items():
        assert leaf.mesh == cf.Mesh(**axes) and torch.equal(leaf.full(), state["params"][name].full())
    torch.testing.assert_close(trained(cf.Mesh(**axes), {"*.weight": "o (tp i)"}, state)[1], want[1])


def on_real_ranks() -> list[Any]:
    """(the part is right, so is that of a tensor that was whole on each, losses of a step on each of two meshes)."""
    first, second = cf.Mesh(dp=2), cf.Mesh(tp=2)
    x = torch.arange(48.0).reshape(8, 6)
    got = cf.distribute(cf.distribute(x, "(dp a) b", first), "a (tp b)", second)
    kept = cf.distribute(cf.distribute(x, "a b", first), "a (tp b)", second)
    rank = second.rank
    return [torch.equal(got.local, x[:, 3 * rank : 3 * rank + 3]), torch.equal(kept.local, got.local), *twice(first, second)]


@pytest.mark.dist
def test_real_ranks_send_each_other_what_they_lack() -> None:
    want = twice(cf.Mesh(dp=1), cf.Mesh(dp=1))
    for same, kept, *losses in launch(on_real_ranks, 2):
        assert same and kept
        torch.testing.assert_close(losses, list(want))
