"""Torch placements: both ways, and against the shards that torch itself makes."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from colofunc import compat
from colofunc.dtensor.convert_run import run_moves
from colofunc.dtensor.flat import Flat, cut, from_flat, join_pieces, pack, piece_range, to_flat
from colofunc.dtensor.parts import parts
from colofunc.dtensor.placements import from_placements, to_placements
from colofunc.dtensor.spec import Spec
from colofunc.errors import SpecError
from colofunc.mesh import Mesh
from colofunc.testing.strategies import layouts, meshes

MESH = Mesh(dp=2, tp=2)


def strided(dim: int, factor: int):
    return compat.strided_shard(dim, factor)


TABLE = [
    ((Shard(0), Shard(1)), "(dp b) (tp d)"),
    ((Shard(0), Shard(0)), "(dp tp b) d"),
    ((strided(0, 2), Shard(0)), "(tp dp b) d"),
    ((Replicate(), strided(1, 4)), "b (4 tp d)"),
    ((Partial(), Replicate()), "b d +dp"),
    ((Partial("max"), Shard(-1)), "b (tp d) max:dp"),
]


@pytest.mark.parametrize(("placements", "text"), TABLE)
def test_table(placements, text: str) -> None:
    layout = Spec(text).bind(MESH, (8, 8))
    assert from_placements(placements, MESH, (8, 8)) is layout
    assert from_placements(to_placements(layout, MESH), MESH, (8, 8)) is layout


@given(st.data())
def test_round_trip(data) -> None:
    mesh = data.draw(meshes())
    layout = data.draw(layouts(mesh, (8, 6, 4), padded=False))
    assert from_placements(to_placements(layout, mesh), mesh, layout.shape) is layout


def test_uneven_shard_is_a_padded_spec() -> None:
    layout = from_placements((Shard(0), Replicate()), MESH, (5, 2))
    assert layout is Spec("(dp b~) d").bind(MESH, (5, 2))
    assert to_placements(layout, MESH) == (Shard(0), Replicate())


def test_order_of_mesh_dims() -> None:
    assert from_placements((Shard(0), Shard(0)), MESH, (8,), order=("tp", "dp")) is Spec("(tp dp b)").bind(MESH, (8,))


REAL = [(Shard(0), Shard(0)), (strided(0, 2), Shard(0)), (strided(1, 6), Shard(1)), (Shard(1), strided(0, 4))]


@pytest.mark.parametrize("placements", REAL)
def test_shards_are_torchs(placements) -> None:
    x = torch.arange(8 * 12).reshape(8, 12)
    want = parts(x, from_placements(placements, MESH, x.shape), MESH)
    for rank in range(4):
        dist.init_process_group("fake", rank=rank, world_size=4)
        try:
            mesh = init_device_mesh("cpu", (2, 2))
            got = distribute_tensor(x, mesh, placements, src_data_rank=None).to_local()
        finally:
            dist.destroy_process_group()
        assert torch.equal(got, want[rank])


WRONG = [
    ((Shard(0),), "1 placements for mesh dims ('dp', 'tp')"),
    ((Partial("avg"), Replicate()), "pending reduction 'avg'"),
    ((Shard(2), Replicate()), "splits dim 2 of a tensor with 2 dims"),
    ((Shard(1), Shard(1)), "a second split of an uneven dim"),
]


@pytest.mark.parametrize(("placements", "message"), WRONG)
def test_errors(placements, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        from_placements(placements, MESH, (8, 6))
    assert message in str(caught.value) and "from placements" in caught.value.__notes__[0]


def test_an_axis_that_would_be_cut() -> None:
    with pytest.raises(SpecError, match="would be cut"):
        from_placements((strided(0, 2), Shard(0)), Mesh(dp=2, tp=4), (8,))


def test_unlike_torchs_padding() -> None:
    with pytest.raises(SpecError, match="padded dim 0"):
        to_placements(Spec("(dp 4~)").bind(MESH, (5,)), MESH)


# ---- flat ranges ----

CHUNKED = Mesh(dp=2, tp=3, sp=2)
FIRST, SECOND = Flat(36, 0, ("tp", "dp")), Flat(36, 25, ("tp", "dp"))


def test_pieces_may_be_empty() -> None:
    flat = Flat(chunk=12, offset=2, axes=("dp",))
    assert [piece_range(flat, 5, i, Mesh(dp=4)) for i in range(4)] == [(0, 1), (1, 4), (4, 5), (5, 5)]


def test_cut_and_join() -> None:
    x = torch.arange(10)
    pieces = cut(x, SECOND, CHUNKED)
    by_index = {CHUNKED.index(rank, SECOND.axes): len(piece) for rank, piece in enumerate(pieces)}
    assert by_index == {0: 0, 1: 0, 2: 0, 3: 0, 4: 5, 5: 5}  # slices of 6; the tensor is 25..35
    assert torch.equal(join_pieces(pieces, SECOND, (10,), CHUNKED), x)


@pytest.mark.parametrize("text", ["(dp a) b", "a (sp tp b)", "a b", "a b +sp", "a b +dp +tp"])
def test_flat_to_any_layout_and_back(text: str) -> None:
    x = torch.arange(24.0).reshape(4, 6) + 1
    layout = Spec(text).bind(CHUNKED, x.shape)
    gathered = from_flat(FIRST, layout, CHUNKED, 4)
    assert sum(move.target == "all_gather" for move in gathered.moves) == 1
    got = run_moves(pack([x, torch.ones(10)], [FIRST, SECOND], CHUNKED), gathered.moves, CHUNKED)
    assert all(map(torch.equal, got, parts(x, layout, CHUNKED)))
    back = run_moves(parts(x, layout, CHUNKED), to_flat(layout, FIRST, CHUNKED, 4).moves, CHUNKED)
    assert all(map(torch.equal, back, pack([x], [FIRST], CHUNKED)))


def test_a_pending_sum_enters_a_chunk_by_one_reduce_scatter() -> None:
    layout = Spec("a b +dp +tp").bind(CHUNKED, (4, 6))
    moves = to_flat(layout, FIRST, CHUNKED, 4)
    assert [m.target for m in moves.moves] == ["put_range", "rearrange", "reduce_scatter"]
    assert moves.wire_bytes == 36 * 4 * 5 // 6


def test_a_range_that_does_not_fit() -> None:
    with pytest.raises(SpecError, match="12 elements at 30 do not fit a buffer of 36"):
        piece_range(Flat(36, 30, ("dp",)), 12, 0, CHUNKED)
    with pytest.raises(SpecError, match="not split evenly"):
        cut(torch.ones(5), Flat(35, 0, ("dp",)), CHUNKED)
