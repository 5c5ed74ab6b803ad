"""Specs: what they bind to, how they print, and what they say when they cannot."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colofunc.errors import SpecError
from colofunc.mesh import Mesh
from colofunc.spec.layout import make_layout
from colofunc.spec.spec import Spec, as_spec, bind, spec_of
from colofunc.testing.parts import part
from colofunc.testing.strategies import layouts, meshes

MESH = Mesh(dp=2, sp=2, tp=3, views={"all": ("dp", "tp")})

BOUND = [
    ("(dp b) s (tp d)", (4, 5, 6), (((2, "dp"), (2, None)), ((5, None),), ((3, "tp"), (2, None)))),
    ("b (s sp)", (3, 4), (((3, None),), ((2, None), (2, "sp")))),
    ("(4 sp c) d", (16, 3), (((4, None), (2, "sp"), (2, None)), ((3, None),))),
    ("(dp b sp s) 3", (16, 3), None),
    ("... (tp d)", (2, 3, 6), (((2, None),), ((3, None),), ((3, "tp"), (2, None)))),
    ("(dp b) ...", (2,), (((2, "dp"),),)),
    ("(all b) d", (12, 2), (((2, "dp"), (3, "tp"), (2, None)), ((2, None),))),
    ("dp tp 1", (2, 3, 1), (((2, "dp"),), ((3, "tp"),), ())),
    ("(tp v~) d", (10, 2), (((3, "tp"), (4, None)), ((2, None),))),
    ("(dp 3~)", (5,), (((2, "dp"), (3, None)),)),
    ("", (), ()),
    ("(dp b) d", (0, 3), (((2, "dp"), (0, None)), ((3, None),))),
]


@pytest.mark.parametrize(("text", "shape", "dims"), [row for row in BOUND if row[2] is not None])
def test_bind(text: str, shape: tuple[int, ...], dims) -> None:
    assert Spec(text).bind(MESH, shape) is make_layout(dims, shape)


def test_sizes_by_keyword() -> None:
    assert Spec("(a sp c) d", a=4).bind(MESH, (16, 3)) is Spec("(4 sp c) d").bind(MESH, (16, 3))


def test_pending_and_tier() -> None:
    layout = Spec("(dp b) s +sp max:tp @host").bind(MESH, (4, 4))
    assert layout.pending == (("sp", "sum"), ("tp", "max")) and layout.tier == "host"
    assert Spec("b +all").bind(MESH, (4,)).pending == (("dp", "sum"), ("tp", "sum"))


def test_axes_of_one_rank_leave_no_trace() -> None:
    assert Spec("(dp b) +tp").bind(Mesh(dp=1, tp=1), (4,)) is Spec("b").bind(MESH, (4,))


def test_a_part_is_what_einops_says() -> None:
    x = torch.arange(4 * 5 * 6).reshape(4, 5, 6)
    layout = Spec("(dp b) s (tp d)").bind(MESH, x.shape)
    rank = MESH.rank_at({"dp": 1, "sp": 0, "tp": 2})
    assert torch.equal(part(x, layout, MESH, rank), x[2:4, :, 4:6])


@given(st.data())
def test_round_trip(data) -> None:
    mesh = data.draw(meshes())
    shape = tuple(data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), max_size=3)))
    layout = data.draw(layouts(mesh, shape)).with_tier(data.draw(st.sampled_from(["device", "host"])))
    assert Spec(layout.text()).bind(mesh, shape) is layout
    assert spec_of(layout, mesh).bind(mesh, shape) is layout


def test_text_avoids_one_letter_axes_that_it_does_not_place() -> None:
    mesh = Mesh(a=2, c=2, views={"b": ("a", "c")})
    layout = Spec("x (c y)").bind(mesh, (4, 4))
    assert spec_of(layout, mesh).pattern == "d (c e)"
    assert spec_of(layout, mesh).bind(mesh, (4, 4)) is layout


def test_equal_text_is_an_equal_spec() -> None:
    assert Spec("( dp  b ) s") == Spec("(dp b) s") and hash(Spec("(dp b) s")) == hash(Spec(" (dp b) s"))
    assert pickle.loads(pickle.dumps(Spec("(a dp)", a=2))) == Spec("(a dp)", a=2)
    assert str(Spec("(dp b) s")) == "(dp b) s" and repr(Spec("(a dp)", a=2)) == "Spec('(a dp)', a=2)"


def test_jax() -> None:
    layout = Spec.jax(("dp", None, ("tp", "sp"))).bind(MESH, (4, 5, 12))
    assert layout is Spec("(dp b) s (tp sp d)").bind(MESH, (4, 5, 12))


def test_bind_takes_text_specs_and_layouts() -> None:
    layout = bind("(dp b)", MESH, (4,))
    assert bind(layout, MESH, [4]) is layout and bind(as_spec("(dp b)"), MESH, (4,)) is layout
    with pytest.raises(SpecError, match="another shape"):
        bind(layout, MESH, (8,))


WRONG = [
    ("(ddp b) d", (4, 4), "'ddp' is no mesh axis; did you mean 'dp'?"),
    ("(a b) d", (4, 4), "2 factors of unknown size, 'a', 'b'"),
    ("(dp b) (dp c)", (4, 4), "mesh axis 'dp' is used 2 times"),
    ("(dp b) (all c)", (4, 6), "mesh axis 'dp' is used 2 times"),
    ("(dp b) +dp", (4,), "mesh axis 'dp' is used 2 times"),
    ("b b", (4, 4), "factor 'b' is used 2 times"),
    ("b s d", (4, 4), "spec has 3 dims, the tensor has 2"),
    ("... b s d", (4, 4), "spec has 3 dims besides '...', the tensor has 2"),
    ("(tp b)", (4,), "splits a dim of size 4 by 3, which does not divide it; pad with 'b~'"),
    ("dp", (4,), "dp multiplies to 2 but the dim has size 4; add a local factor such as '(dp _)'"),
    ("(dp 4)", (4,), "(dp 4) multiplies to 8, more than the dim's 4"),
    ("b +tq", (4,), "'+tq' names no mesh axis; did you mean 'tp'?"),
]


@pytest.mark.parametrize(("text", "shape", "message"), WRONG)
def test_bind_errors_name_spec_shape_and_mesh(text: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        Spec(text).bind(MESH, shape)
    assert message in str(caught.value)
    assert caught.value.__notes__ == [f"in spec {text!r} for a tensor of shape {shape} on {MESH!r}"]


MALFORMED = [
    ("(dp b", "'(' is never closed"),
    ("dp) b", "')' without '('"),
    ("((dp b) c)", "a group inside a group"),
    ("b @hots", "no memory tier 'hots'; did you mean 'host'?"),
    ("b mean:tp", "no pending reduction 'mean'"),
    ("b +", "names no axis"),
    ("(0 dp)", "a factor of size 0"),
    ("b @host @disk", "two tiers"),
    ("... b ...", "'...' stands twice"),
    ("b-c", "'b-c' is no name"),
    ("(b @host)", "'@host' inside a group"),
]


@pytest.mark.parametrize(("text", "message"), MALFORMED)
def test_malformed_specs(text: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        Spec(text)
    assert message in str(caught.value) and caught.value.__notes__ == [f"in spec {text!r}"]


def test_sizes_must_belong_to_a_local_factor() -> None:
    with pytest.raises(SpecError, match="belongs to no factor; did you mean 'ab'"):
        Spec("(ab dp)", abc=2)
    with pytest.raises(SpecError, match="is a mesh axis"):
        Spec("(dp b)", dp=2).bind(MESH, (4,))
