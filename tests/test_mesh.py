"""Mesh: ranks, groups and views against numpy, errors, and the cost of collectives against closed forms."""

from __future__ import annotations

import json
import math
import pickle
import random
import re
import warnings
from itertools import permutations
from pathlib import Path

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colofunc import env
from colofunc.errors import ColofuncError, MeshError, TopologyError
from colofunc.mesh import KINDS, PRESETS, Level, Measured, Mesh, resolve_topology, wire_bytes
from colofunc.mesh.cost import rotation
from colofunc.mesh.topology import Topology

GB = 1e9


def flat(bandwidth_bytes_per_s: float, *levels: Level) -> Topology:
    """A topology of the given levels, or of one level of device-owned links without latency."""
    own = Level("flat", None, bandwidth_bytes_per_s, 0.0)
    return attrs.evolve(PRESETS["ideal"], name="flat", levels=levels or (own,))


@st.composite
def meshes(draw: st.DrawFn, topologies: tuple[str, ...] = ("ideal",)) -> Mesh:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    return Mesh(topology=draw(st.sampled_from(topologies)), **{f"a{i}": size for i, size in enumerate(sizes)})


# --- ranks


@given(meshes())
def test_ranks_are_row_major(mesh: Mesh) -> None:
    shape = tuple(mesh.shape.values())
    for rank in range(mesh.size):
        here = mesh.coordinates(rank)
        assert tuple(here) == mesh.axis_names
        assert tuple(here.values()) == tuple(np.unravel_index(rank, shape))
        assert mesh.rank_at(here) == rank


def brute_groups(mesh: Mesh, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    ranks = np.arange(mesh.size).reshape(tuple(mesh.shape.values()))
    rest = [i for i, name in enumerate(mesh.axis_names) if name not in axes]
    chosen = [mesh.axis_names.index(name) for name in axes]
    width = math.prod(mesh.axis_size(name) for name in axes)
    return tuple(map(tuple, ranks.transpose(*rest, *chosen).reshape(-1, width).tolist()))


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_groups_in_every_order(count: int) -> None:
    mesh = Mesh(a=2, b=3, c=5)
    for axes in permutations(mesh.axis_names, count):
        assert mesh.groups(axes) == brute_groups(mesh, axes)


@given(meshes(), st.data())
def test_a_rank_knows_its_group_and_its_place(mesh: Mesh, data: st.DataObject) -> None:
    names = data.draw(st.permutations(mesh.axis_names))
    axes = tuple(names[: data.draw(st.integers(0, len(names)))])
    groups = mesh.groups(axes)
    for rank in range(mesh.size):
        (mine,) = [group for group in groups if rank in group]
        assert mesh.group_of(rank, axes) == mine
        assert mesh.index(rank, axes) == mine.index(rank)


def test_parts_of_axes_are_axes_of_the_mesh_that_is_cut_there() -> None:
    # dp = d4 by d2 by d1, major first: the same ranks, with three names instead of one.
    whole, cut = Mesh(dp=12, tp=2), Mesh(d4=3, d2=2, d1=2, tp=2)
    part = {"d4": "dp[4:3]", "d2": "dp[2:2]", "d1": "dp[1:2]", "tp": "tp"}
    for count in range(1, 5):
        for axes in permutations(cut.axis_names, count):
            names = tuple(part[axis] for axis in axes)
            assert whole.groups(names) == cut.groups(axes)
            for rank in range(24):
                assert whole.index(rank, names) == cut.index(rank, axes)
                assert whole.group_of(rank, names) == cut.group_of(rank, axes)
            assert whole.alpha_beta("all_gather", names) == cut.alpha_beta("all_gather", axes)
            assert whole.ordered(names) == tuple(part[axis] for axis in cut.ordered(axes))
            if count == 2 and "tp" not in axes:
                assert whole.groups(whole.rest(names)) == cut.groups(cut.rest(axes))


def test_axis_helpers() -> None:
    mesh = Mesh(pp=2, dp=3, tp=4, views={"world": ("tp", "dp")})
    assert mesh.axes == (("pp", 2), ("dp", 3), ("tp", 4))
    assert (mesh.size, mesh.shape, mesh.axis_names) == (24, {"pp": 2, "dp": 3, "tp": 4}, ("pp", "dp", "tp"))
    assert [mesh.stride(name) for name in mesh.axis_names] == [12, 4, 1]
    assert mesh.ordered(("tp", "pp")) == ("pp", "tp")
    assert mesh.rest(("world",)) == ("pp",)
    assert "dp" in mesh and "world" in mesh and "x" not in mesh


def test_views_are_their_axes() -> None:
    mesh = Mesh(dpo=2, dpi=2, tp=2, views={"ep": ("dpi", "tp"), "pe": ("tp", "dpi")})
    assert (mesh.axis_size("ep"), mesh.expand("ep"), mesh.expand("tp")) == (4, ("dpi", "tp"), ("tp",))
    assert mesh.atoms(("dpo", "ep")) == ("dpo", "dpi", "tp")
    assert mesh.groups(("ep",)) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert mesh.groups(("pe",)) == ((0, 2, 1, 3), (4, 6, 5, 7))
    assert dict(mesh.views) == {"ep": ("dpi", "tp"), "pe": ("tp", "dpi")}


def test_a_mesh_of_one() -> None:
    for mesh in (Mesh(), Mesh(dp=1)):
        assert (mesh.size, mesh.rank, mesh.is_main) == (1, 0, True)
        assert mesh.groups(mesh.axis_names) == ((0,),)
        assert mesh.collective_s("all_reduce", 1 << 20, mesh.axis_names) == 0.0


# --- a value


def test_meshes_are_values() -> None:
    make = lambda **more: Mesh(dp=2, tp=4, views={"all": ("dp", "tp")}, topology="8xh100", **more)  # noqa: E731
    assert make() == make() and hash(make()) == hash(make())
    assert make() != make(device="cpu") and make() != Mesh(dp=2, tp=4) and make() != make().with_topology("8xh200")
    assert Mesh(dp=2, tp=4) != Mesh(tp=4, dp=2)
    copy = pickle.loads(pickle.dumps(make()))
    assert copy == make() and hash(copy) == hash(make()) and copy.axis_size("all") == 8
    with pytest.raises(AttributeError):
        make().axes = ()  # type: ignore[misc]


def test_meshes_pass_through_json() -> None:
    mesh = Mesh(tp=2, dp=4, views={"all": ("dp", "tp")}, topology="8xh100", device="cpu")
    assert Mesh.from_dict(json.loads(json.dumps(mesh.to_dict()))) == mesh
    others = [mesh.with_topology("8xh200"), Mesh(dp=4, tp=2), Mesh(tp=2, dp=4)]
    assert len({m.fingerprint for m in (mesh, *others)}) == 4
    # Strings hash differently in every process; a fingerprint must not.
    assert Mesh(dp=2, tp=4, topology="ideal").fingerprint == "18baa22b745f5a2f"


def test_repr() -> None:
    assert repr(Mesh(dp=2, tp=4)) == "Mesh(dp=2, tp=4)"
    full = Mesh(dp=2, tp=2, views={"all": ("dp", "tp")}, topology="8xh100", device="cuda")
    assert repr(full) == "Mesh(dp=2, tp=2, views={'all': ('dp', 'tp')}, topology='8xh100', device='cuda')"
    assert eval(repr(full)) == full


# --- launchers


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_open_size_is_inferred_under_a_launcher(bare: pytest.MonkeyPatch) -> None:
    with pytest.raises(MeshError, match="axis 'dp' is -1, but no launcher tells the rank count"):
        Mesh(dp=-1, tp=2)
    bare.setenv("WORLD_SIZE", "8")
    bare.setenv("RANK", "3")
    mesh = Mesh(dp=-1, tp=2)
    assert mesh == Mesh(dp=4, tp=2)
    assert mesh.rank == 3 and not mesh.is_main
    with pytest.raises(MeshError, match="8 launched ranks are no multiple of 3"):
        Mesh(dp=-1, tp=3)
    with pytest.raises(MeshError, match="only one can be inferred"):
        Mesh(dp=-1, tp=-1)


def test_launch_record(bare: pytest.MonkeyPatch) -> None:
    assert env.launched() is None
    for name, value in dict(RANK="5", WORLD_SIZE="8", LOCAL_RANK="1", LOCAL_WORLD_SIZE="4", MASTER_PORT="1234").items():
        bare.setenv(name, value)
    assert env.launched() == env.Launch(5, 8, 1, 4, "127.0.0.1", 1234)


@pytest.mark.parametrize("rank", ["2", "5", "-1"])
def test_a_rank_that_is_none_is_said_at_once(bare: pytest.MonkeyPatch, rank: str) -> None:
    bare.setenv("WORLD_SIZE", "2")
    bare.setenv("RANK", rank)
    with pytest.raises(ColofuncError, match=f"RANK={rank} is no rank of WORLD_SIZE=2; ranks count from 0, so the last is 1"):
        env.launched()


@pytest.mark.parametrize(("name", "text"), [("WORLD_SIZE", "two"), ("RANK", "0.5"), ("LOCAL_RANK", "a"), ("MASTER_PORT", "http")])
def test_a_number_that_is_none_is_said(bare: pytest.MonkeyPatch, name: str, text: str) -> None:
    for other, value in {"RANK": "0", "WORLD_SIZE": "2", name: text}.items():
        bare.setenv(other, value)
    with pytest.raises(ColofuncError, match=f"{name}='{text}' is no whole number, as a launcher .* Try: unset {name}"):
        Mesh(dp=-1)


def test_a_launch_needs_both_and_an_empty_variable_is_none(bare: pytest.MonkeyPatch) -> None:
    bare.setenv("RANK", "three")
    assert env.launched() is None
    bare.setenv("WORLD_SIZE", "")
    assert env.launched() is None


def test_a_misspelt_switch_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLOFUNC_QUITE", "1")
    env._say_misspelt.cache_clear()
    with pytest.warns(UserWarning, match="the environment variable COLOFUNC_QUITE is none of colofunc's; did you mean 'COLOFUNC_QUIET'"):
        env.switched_on("COLOFUNC_QUIET")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env.switched_on("COLOFUNC_QUIET")


def test_every_variable_that_a_launcher_sets_is_documented() -> None:
    asked = set(re.findall(r'(?:environ\.get|_integer)\("([A-Z_]+)"', Path(env.__file__).read_text()))
    page = (Path(__file__).parents[1] / "docs" / "environment.md").read_text()
    assert asked > {"RANK", "XDG_CACHE_HOME"} and all(f"`{name}`" in page for name in asked)


def test_switches_are_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLOFUNC_QUIET", "1")
    assert env.switched_on("COLOFUNC_QUIET")
    monkeypatch.setenv("COLOFUNC_QUIET", "off")
    assert not env.switched_on("COLOFUNC_QUIET")
    with pytest.raises(ColofuncError, match="did you mean 'COLOFUNC_QUIET'"):
        env.switch("COLOFUNC_QUITE")


def test_every_documented_switch_is_read() -> None:
    package = Path(env.__file__).parent
    sources = [path.read_text() for path in package.rglob("*.py")]
    asked = {name for source in sources for name in re.findall(r'\b(?:switch|switched_on)\("(\w+)"\)', re.sub(r">>>.*", "", source))}
    assert asked == set(env.SWITCHES)


# --- mistakes


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mesh(dp=0), "axis 'dp' has size 0; give a whole number, 1 or more"),
        (lambda: Mesh(dp=2.0), "axis 'dp' has size 2.0"),
        (lambda: Mesh(dp=True), "axis 'dp' has size True"),
        (lambda: Mesh(**{"d p": 2}), "axis name 'd p' is not an identifier"),
        (lambda: Mesh(max=2), "axis name 'max' is reserved"),
        (lambda: Mesh(dp=2, views={"host": ("dp",)}), "view name 'host' is reserved"),
        (lambda: Mesh(dp=2, views={"dp": ("dp",)}), "view 'dp' is also an axis"),
        (lambda: Mesh(dp=2, views={"v": ("dq",)}), "view 'v' names 'dq', which is no axis of the mesh; did you"),
        (lambda: Mesh(dp=2, views={"v": ("dp",), "w": ("v",)}), "a view's axes must be atomic"),
        (lambda: Mesh(dp=2, views={"v": ("dp", "dp")}), "name at least one axis, each once"),
        (lambda: Mesh(dp=2, views={"v": ()}), "name at least one axis, each once"),
        (lambda: Mesh(dp=2, device="gpu"), "device 'gpu' is not 'cpu', 'cuda' or None"),
        (lambda: Mesh(data=2).axis_size("date"), "no axis 'date' on Mesh\\(data=2\\); did you mean 'data'"),
        (lambda: Mesh(dp=2).expand("xyz"), "no axis 'xyz' on Mesh\\(dp=2\\); axes: 'dp'"),
        (lambda: Mesh(dp=2, views={"v": ("dp",)}).groups(("v", "dp")), "axis 'dp' is used twice"),
        (lambda: Mesh(dp=2).coordinates(2), "rank 2 is not in 0..1"),
        (lambda: Mesh(dp=2).rank_at({"dp": 2}), "index 2 of axis 'dp' is not in 0..1"),
        (lambda: Mesh(dp=2, tp=2).rank_at({"dp": 1}), "lack axis 'tp'"),
        (lambda: Mesh(dp=2).collective_s("allgather", 1, ("dp",)), "no collective 'allgather'; did you mean"),
        (lambda: Mesh(dp=4).groups(("dp[2:3]",)), r"'dp\[2:3\]' is no part of an axis of Mesh\(dp=4\)"),
        (lambda: Mesh(dp=4).groups(("tp[1:2]",)), r"'tp\[1:2\]' is no part of an axis"),
        (lambda: Mesh(dp=4).groups(("dp[2]",)), r"'dp\[2\]' is no axis and no part of one"),
        (lambda: Mesh(dp=4).groups(("dp", "dp[1:2]")), "parts of axis 'dp' overlap"),
        (lambda: Mesh(dp=4, topology=flat(1, Level("x", 2, 1, 0))), "larger than topology 'flat', which joins 2"),
    ],
)
def test_mistakes_say_what_to_do(make: object, message: str) -> None:
    with pytest.raises(MeshError, match=message):
        make()  # type: ignore[operator]


# --- bytes on the wire


def test_published_bytes_of_two_matmuls() -> None:
    bs, h, e, item = 4096, 1024, 4096, 2
    one = wire_bytes("all_reduce", bs * h * item, 8)
    x, y = 2, 4
    two = wire_bytes("all_reduce", bs * e // y * item, x) + wire_bytes("all_reduce", bs * h // x * item, y)
    q = 2
    three = sum(wire_bytes("all_reduce", n // q**2 * item, q) for n in (bs * e, bs * h, h * e))
    summa = sum(wire_bytes("all_gather", n // q * item, q) for n in (bs * h, h * e))
    assert (one, two, three, summa) == (14_680_064, 14_680_064, 12_582_912, 4_194_304)


def test_published_elements_of_attention_blocks() -> None:
    s, h, p = 8192, 1024, 8
    ulysses = 4 * wire_bytes("all_to_all", s * h // p, p)
    ring = 2 * (p - 1) * wire_bytes("permute", s * h // p, p)
    megatron = 2 * wire_bytes("all_gather", s * h, p) + 2 * wire_bytes("reduce_scatter", s * h, p)
    assert (ulysses, ring, megatron) == (3_670_016, 14_680_064, 29_360_128)


@pytest.mark.parametrize("n", [2, 3, 8, 64])
def test_zero_volumes(n: int) -> None:
    psi = 192 * 1000
    share = psi * (n - 1) // n
    assert wire_bytes("all_reduce", psi, n) == 2 * share
    assert wire_bytes("reduce_scatter", psi, n) + 2 * wire_bytes("all_gather", psi, n) == 3 * share


def test_a_group_of_one_moves_nothing() -> None:
    assert [wire_bytes(kind, 1000, 1) for kind in KINDS] == [0] * 5


# --- seconds


@given(meshes(tuple(sorted(PRESETS))), st.sampled_from(KINDS), *[st.integers(0, 1 << 40)] * 2, st.data())
@settings(max_examples=200, deadline=None)
def test_seconds_grow_with_bytes(mesh: Mesh, kind: str, one: int, two: int, data: st.DataObject) -> None:
    axes = tuple(data.draw(st.sets(st.sampled_from(mesh.axis_names))))
    small, large = (mesh.collective_s(kind, nbytes, axes) for nbytes in sorted((one, two)))
    assert 0.0 <= small <= large < math.inf
    if mesh.topology.name == "ideal" or all(mesh.axis_size(name) == 1 for name in axes):
        assert large == 0.0
    elif min(one, two) != max(one, two):
        assert small < large


@given(meshes(), st.sampled_from(KINDS), st.data())
def test_one_level_costs_the_wire_bytes(mesh: Mesh, kind: str, data: st.DataObject) -> None:
    axes = tuple(data.draw(st.sets(st.sampled_from(mesh.axis_names))))
    n = math.prod(mesh.axis_size(name) for name in axes)
    expected = wire_bytes(kind, n << 20, n) / GB
    assert mesh.with_topology(flat(GB)).collective_s(kind, n << 20, axes) == pytest.approx(expected, rel=1e-12)


@given(meshes(), st.sampled_from(KINDS), st.integers(1, 5), st.data())
def test_levels_of_equal_speed_cost_as_one(mesh: Mesh, kind: str, node: int, data: st.DataObject) -> None:
    # Also where nodes cut groups unevenly: every byte is charged to exactly one level.
    axes = tuple(data.draw(st.sets(st.sampled_from(mesh.axis_names))))
    n = math.prod(mesh.axis_size(name) for name in axes)
    two = flat(GB, Level("in", node, GB, 0.0), Level("out", None, GB, 0.0))
    expected = wire_bytes(kind, n << 20, n) / GB
    assert mesh.with_topology(two).collective_s(kind, n << 20, axes) == pytest.approx(expected, rel=1e-12)


def test_groups_use_the_links_they_span() -> None:
    """A ring through all ranks: a message a hop, and of bytes the slowest level decides, where 8 devices have 8 cards."""
    mesh = Mesh(dp=4, tp=8, topology="8xa100-80g:datasheet")
    nvlink, infiniband = (level.bandwidth_bytes_per_s for level in mesh.topology.levels)
    m = 1 << 30
    for axes, expected in (
        (("tp",), (7 * 3e-6, m * 7 / 8 / nvlink)),
        (("dp",), (3 * 6e-6, m * 3 / 4 / infiniband)),
        (("dp", "tp"), (28 * 3e-6 + 3 * 6e-6, m * 31 / 32 / min(nvlink, 8 * infiniband))),
    ):
        for kind, times in (("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)):
            assert mesh.collective_s(kind, m, axes) == pytest.approx(times * sum(expected), rel=1e-12)
    expected = m * (7 / nvlink + 24 / infiniband) / 32
    assert mesh.collective_s("all_to_all", m, ("dp", "tp")) == pytest.approx(7 * 3e-6 + 3 * 6e-6 + expected, rel=1e-12)
    assert mesh.collective_s("permute", m, ("dp", "tp")) == pytest.approx(6e-6 + m / infiniband, rel=1e-12)


def test_groups_share_the_uplink_of_their_node() -> None:
    mesh = Mesh(dp=2, cp=2, tp=4, topology="8xv100:datasheet")  # one uplink of 50 GB/s for the 8 devices of a node
    beta = {axes: mesh.alpha_beta("all_gather", axes)[1] for axes in (("dp",), ("dp", "cp"), ("dp", "cp", "tp"))}
    groups = {("dp",): 8, ("dp", "cp"): 4, ("dp", "cp", "tp"): 1}  # that leave a box at once, each with (n - 1)/n of its buffer
    for axes, leaving in groups.items():
        n = math.prod(mesh.axis_size(axis) for axis in axes)
        assert beta[axes] == pytest.approx((n - 1) / n * max(leaving / 50e9, 1 / 150e9 if n > 2 else 0.0))
    # A ring shift crosses a node boundary once per group: 8 groups, 4 groups, 1 group.
    shift = [mesh.alpha_beta("permute", axes)[1] for axes in beta]
    assert shift == pytest.approx([8 / 50e9, 4 / 50e9, 1 / 50e9])


def test_a_permute_shares_an_uplink_as_its_table_says() -> None:
    mesh = Mesh(dpo=2, dp=8, topology="8xv100:datasheet")
    both = ("dpo", "dp")
    nvlink, uplink = (level.bandwidth_bytes_per_s for level in mesh.topology.levels)
    crossing = {by: mesh.alpha_beta("permute", both, rotation(16, by))[1] * uplink for by in (1, 3, 8, 15)}
    assert crossing == pytest.approx({1: 1, 3: 3, 8: 8, 15: 1})
    neighbours = tuple(k ^ 1 for k in range(16))  # a swap inside of a box
    assert mesh.alpha_beta("permute", both, neighbours) == pytest.approx((mesh.topology.levels[0].latency_s, 1 / nvlink))
    one_pair = (8, *range(1, 8), 0, *range(9, 16))
    assert mesh.alpha_beta("permute", both, one_pair)[1] == pytest.approx(1 / uplink)
    assert mesh.alpha_beta("permute", both, tuple(range(16))) == (0.0, 0.0)
    # The same ring over the same ranks, listed by their place in a box first: each hop but one in two is to the other box.
    assert mesh.alpha_beta("permute", ("dp", "dpo"), rotation(16))[1] == pytest.approx(8 / uplink)


def test_a_measured_permute_is_a_ring_shift_and_others_follow_the_links() -> None:
    topology = attrs.evolve(Mesh(dp=16, topology="8xv100").topology, measured=(Measured("dp", 16, "permute", 1e-3, 1e-9),))
    mesh = Mesh(dp=16, topology=topology)
    assert mesh.alpha_beta("permute", ("dp",)) == mesh.alpha_beta("permute", ("dp",), rotation(16)) == (1e-3, 1e-9)
    assert mesh.alpha_beta("permute", ("dp",), rotation(16, 8)) == pytest.approx((1e-3, 8e-9))
    assert mesh.alpha_beta("permute", ("dp",), tuple(range(16))) == (0.0, 0.0)


def test_ranks_of_a_cpu_box_share_its_memory() -> None:
    few, many = Mesh(dp=2), Mesh(dp=2, tp=4)
    assert many.alpha_beta("all_gather", ("dp",))[1] == 4 * few.alpha_beta("all_gather", ("dp",))[1]


def test_the_slowest_group_decides() -> None:
    # Nodes of two: (0,1,2) is split 2+1, (3,4,5) 1+2; both cross. On a mesh of (a=2, b=2) nothing crosses along b.
    two = flat(1, Level("in", 2, 100.0, 0.0), Level("out", None, 1.0, 0.0))
    assert Mesh(a=2, b=3, topology=two).alpha_beta("all_gather", ("b",))[1] == pytest.approx(2 / 3)  # a rank alone in its node
    assert Mesh(a=2, b=3, topology=two).alpha_beta("all_to_all", ("b",))[1] == pytest.approx(2 / 3)  # rank 2 or 3
    assert Mesh(a=2, b=2, topology=two).alpha_beta("all_gather", ("b",))[1] == pytest.approx(1 / 200)


def test_the_order_of_axes_costs_nothing() -> None:
    mesh = Mesh(dp=2, tp=8, views={"all": ("tp", "dp")}, topology="8xv100")
    for kind in KINDS:
        assert len({mesh.alpha_beta(kind, axes) for axes in (("dp", "tp"), ("tp", "dp"), ("all",), "all")}) == 1


# --- measured figures


def measured(mesh: Mesh, bandwidth: dict[str, float], alpha_s: float = 0.0) -> Mesh:
    figures = tuple(
        Measured(axis, size, kind, alpha_s, wire_bytes(kind, size << 10, size) / (size << 10) / bandwidth[axis])
        for axis, size in mesh.axes
        for kind in KINDS
    )
    return mesh.with_topology(attrs.evolve(mesh.topology, measured=figures))


def test_measured_figures_replace_the_levels_at_their_size_only() -> None:
    mesh = measured(Mesh(dp=2, tp=4), {"dp": GB, "tp": GB}, alpha_s=1e-3)
    assert mesh.collective_s("all_reduce", 1000, ("tp",)) == pytest.approx(1e-3 + 1.5 * 1000 / GB)
    other = Mesh(dp=2, tp=2, topology=mesh.topology)
    assert other.alpha_beta("all_reduce", ("tp",)) == Mesh(dp=2, tp=2).alpha_beta("all_reduce", ("tp",))


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_measured_stages_move_what_one_ring_moves(kind: str) -> None:
    mesh = measured(Mesh(a=2, b=3, c=4), {"a": GB, "b": GB, "c": GB})
    expected = wire_bytes(kind, 24 << 10, 24) / GB
    assert mesh.collective_s(kind, 24 << 10, ("a", "b", "c")) == pytest.approx(expected, rel=1e-12)


def test_measured_stages_keep_the_slow_axis_for_the_small_buffer() -> None:
    mesh = measured(Mesh(slow=2, fast=4), {"slow": 1.0, "fast": 100.0}, alpha_s=1.0)
    assert mesh.alpha_beta("all_gather", ("fast", "slow")) == pytest.approx((2.0, 1 / 2 / 4 + 3 / 4 / 100))
    assert mesh.alpha_beta("all_reduce", ("fast", "slow")) == pytest.approx((3.0, 2 * (1 / 2 / 4 + 3 / 4 / 100)))
    assert mesh.alpha_beta("all_to_all", ("fast", "slow")) == pytest.approx((2.0, 1 / 2 + 3 / 4 / 100))
    assert mesh.alpha_beta("permute", ("fast", "slow")) == pytest.approx((1.0, 1.0))


# --- computing and copying


def test_roofline() -> None:
    mesh = Mesh(dp=8, topology="8xa100-80g:datasheet")
    launch = mesh.topology.device.launch_s
    assert mesh.compute_s(312e12, 0, "bfloat16") == pytest.approx(1 + launch)
    assert mesh.compute_s(312e12, 4 * 2039e9, "torch.bfloat16") == pytest.approx(4 + launch)
    assert Mesh(topology="ideal").compute_s(0, 0, "float32") == 0.0
    assert Mesh(topology="ideal").compute_s(1, 1, "float32") > 0.0


def test_a_dtype_without_a_rate_uses_the_nearest() -> None:
    mesh = Mesh(topology="v100")
    assert mesh.compute_s(1e15, 0, "bfloat16") == mesh.compute_s(1e15, 0, "float32")
    assert mesh.compute_s(1e15, 0, "int8") == mesh.compute_s(1e15, 0, "float16")
    assert mesh.compute_s(1e15, 0, "complex128") == mesh.compute_s(1e15, 0, "float64")
    assert mesh.compute_s(1e15, 0, "bool") == mesh.compute_s(1e15, 0, "float32")
    mesh = Mesh(topology="h100")
    assert mesh.compute_s(1e15, 0, "float8_e4m3fn") < mesh.compute_s(1e15, 0, "float16")


def test_capacities_are_per_rank() -> None:
    mesh = Mesh(dp=2, tp=4, topology="8xa100-40g")
    assert mesh.capacity_bytes("device") == 40 * 10**9
    assert mesh.capacity_bytes("host") == 10**12 // 8
    assert Mesh(dp=2, topology="8xa100-40g").capacity_bytes("host") == 10**12 // 2
    assert [Mesh(topology="ideal").capacity_bytes(tier) for tier in ("device", "host", "disk")] == [None] * 3
    with pytest.raises(TopologyError, match="no memory tier 'hots'; did you mean 'host'"):
        mesh.capacity_bytes("hots")


def test_copies_go_hop_by_hop_and_share_what_is_shared() -> None:
    mesh = Mesh(dp=8, topology="8xa100-80g:datasheet")
    up = mesh.copy_s(31.5e9, "device", "host")
    assert up == pytest.approx(1 + 10e-6)
    assert mesh.copy_s(30.4e9, "host", "disk") == pytest.approx(8 + 100e-6)
    assert mesh.copy_s(31.5e9, "device", "disk") == pytest.approx(up + mesh.copy_s(31.5e9, "host", "disk"))
    assert mesh.copy_s(10, "host", "host") == mesh.copy_s(0, "host", "device") == 0.0


def test_topologies_come_as_name_record_or_file(tmp_path: object) -> None:
    path = tmp_path / "box.json"  # type: ignore[operator]
    resolve_topology("8xh100").save(path)
    by = [Mesh(dp=8, topology=topology) for topology in ("8xh100", PRESETS["8xh100"], path, str(path))]
    assert all(mesh == by[0] for mesh in by)


def slowest_pair(mesh: Mesh, table: tuple[int, ...]) -> tuple[float, float]:
    """Of a permutation of all ranks: the latency of the farthest way, and seconds per byte of the link that is busiest for its rate."""
    latencies, seconds = [0.0], [0.0]
    inner = 1
    for level in mesh.topology.levels:
        outer = level.size or mesh.size
        crossing = [(rank, giver) for rank, giver in enumerate(table) if rank // inner != giver // inner]
        own = [rank for rank, giver in crossing if rank // outer == giver // outer]
        receivers = {"uplink": [rank // inner for rank, _ in crossing], "medium": [rank // outer for rank, _ in crossing]}
        users = receivers.get(level.sharing, own)
        if users:
            latencies.append(level.latency_s)
            each = level.size - 1 if level.sharing == "pairs" and level.size else 1
            seconds.append(each * max(map(users.count, users)) / level.bandwidth_bytes_per_s)
        inner = outer
    return max(latencies), max(seconds)


@pytest.mark.parametrize("topology", ["8xv100", "8xrtx4090", "4xh100-hgx", "8xa100-80g"])
def test_a_permute_takes_as_long_as_its_slowest_pair(topology: str) -> None:
    mesh = Mesh(dp=16, topology=topology)
    draw = random.Random(0)
    for _ in range(100):
        table = list(range(16))
        moved = draw.sample(range(16), draw.randint(2, 16))
        for place, giver in zip(moved, draw.sample(moved, len(moved)), strict=True):
            table[place] = giver
        assert mesh.alpha_beta("permute", ("dp",), tuple(table)) == pytest.approx(slowest_pair(mesh, tuple(table)))


def test_many_within_a_box_may_take_longer_than_the_one_that_leaves_it() -> None:
    base = Mesh(dp=16, topology="8xv100").topology
    bus = attrs.evolve(base.levels[0], sharing="medium", bandwidth_bytes_per_s=10e9)
    mesh = Mesh(dp=16, topology=attrs.evolve(base, levels=(bus, *base.levels[1:])))
    alpha_s, beta_s = mesh.alpha_beta("permute", ("dp",), rotation(16))
    assert alpha_s == base.levels[1].latency_s and beta_s == pytest.approx(8 / 10e9)
