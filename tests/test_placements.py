"""Torch placements: both ways, and against the shards that torch itself makes."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from colofunc import compat
from colofunc.errors import SpecError
from colofunc.mesh import Mesh
from colofunc.spec.placements import from_placements, to_placements
from colofunc.spec.spec import Spec
from colofunc.testing.parts import parts
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
