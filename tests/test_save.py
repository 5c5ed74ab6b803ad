"""Saving and loading states: bit for bit, onto any mesh, whole or not at all, and what is refused."""

import collections
import dataclasses
import math
import os
import shutil
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from saved import MESH, bits, state, tensors

import colofunc as cf
from colofunc.errors import CheckpointError, InputError
from colofunc.functional.checkpoint import files
from colofunc.testing.parts import parts

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint16, torch.bool,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128,
]  # fmt: skip


# ---- trees ----


class Point(collections.namedtuple("Point", "x y")):
    pass


@dataclasses.dataclass
class Record:
    w: Any
    n: int


@attrs.frozen
class Frozen:
    w: Any
    s: str


def test_containers_and_numbers_come_back(tmp_path) -> None:
    saved = {
        "list": [1, 2.5, None, True, "a\n\u00e9"], "tuple": (torch.tensor(1.0), ()), "nan": [math.nan, math.inf, -0.0], 3: {"x": 1 + 2j},
        "empty": {}, "dtype": torch.bfloat16, "array": np.arange(6, dtype=np.int16).reshape(2, 3),
    }  # fmt: skip
    cf.save(tmp_path / "c", saved)
    got = cf.load(tmp_path / "c")
    assert repr(got) == repr(saved)
    assert isinstance(got["array"], np.ndarray) and got["array"].dtype == np.int16


def test_names_that_collide_stay_apart(tmp_path) -> None:
    cf.save(tmp_path / "c", {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}})
    got = cf.load(tmp_path / "c")
    assert int(got["a.b"]) == 1 and int(got["a"]["b"]) == 2


def test_records_are_dicts_or_what_the_example_shows(tmp_path) -> None:
    other = collections.OrderedDict
    saved = {"p": Point(torch.ones(2), 3), "r": Record(torch.zeros(1), 4), "f": Frozen(torch.ones(1), "s"), "o": other(z=1)}
    cf.save(tmp_path / "c", saved)
    assert cf.load(tmp_path / "c")["r"] == {"w": torch.zeros(1), "n": 4}
    empty = {"p": Point(torch.empty(2), 0), "r": Record(torch.empty(1), 0), "f": Frozen(torch.empty(1), ""), "o": other(z=0)}
    got = cf.load(tmp_path / "c", like=empty)
    assert [type(v) for v in got.values()] == [Point, Record, Frozen, collections.OrderedDict]
    assert got["p"].y == 3 and got["r"].n == 4 and got["f"].s == "s" and got["o"]["z"] == 1 and got["p"].x.tolist() == [1, 1]


def test_a_value_that_nothing_could_rebuild_is_refused(tmp_path) -> None:
    with pytest.raises(InputError, match=r"opt\.fn: function cannot be saved"):
        cf.save(tmp_path / "c", {"opt": {"fn": tensors}})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (lambda: torch.ones(2, device="meta"), "x .* has no data yet"),
        (lambda: torch.ones(2, 2).to_sparse(), r"x is torch.sparse_coo.* x\.to_dense\(\)"),
    ],
)
def test_leaves_that_have_no_elements_are_refused(tmp_path, bad, says) -> None:
    with pytest.raises(InputError, match=says):
        cf.save(tmp_path / "c", {"x": bad()})


def test_a_pending_sum_is_saved_as_what_it_comes_to(tmp_path) -> None:
    whole = torch.arange(12.0).reshape(4, 3)
    cf.save(tmp_path / "c", {"x": cf.distribute(whole, "a b", MESH).redistribute("a b +tp")})
    assert torch.equal(cf.load(tmp_path / "c")["x"], whole)


def test_sizes_come_back_as_tuples(tmp_path) -> None:
    cf.save(tmp_path / "c", {"shape": torch.ones(2, 3).shape})
    assert cf.load(tmp_path / "c") == {"shape": (2, 3)}


# ---- bits ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_bit_for_bit_onto_another_mesh(tmp_path, dtype) -> None:
    x = torch.randint(0, 256, (6 * 10 * dtype.itemsize,), dtype=torch.uint8)
    x = (x % 2 if dtype == torch.bool else x).view(dtype)[:60].reshape(6, 10)
    cf.save(tmp_path / "c", {"x": cf.distribute(x, "(b~ dp) (2 tp c~)", MESH), "z": x[0, 0]})
    assert bits(cf.load(tmp_path / "c")["x"]) == bits(x)
    got = cf.load(tmp_path / "c", mesh=cf.Mesh(tp=3, ep=2), specs={"x": "(tp a) (b ep)"})
    assert bits(got["x"].full()) == bits(x) and bits(got["z"].full()) == bits(x[0, 0])
    assert got["x"].spec == cf.Spec("(tp a) (b ep)")


SPECS = ["(dp a) b", "a (dp b~)", "(a~ dp) b", "(tp dp a~) b", "(dp a~) (tp b~)", "(2 dp a~) b", "a (b~ tp dp)", "(a~ tp) (dp 2 b~)", "a b"]


@given(st.sampled_from(SPECS), st.sampled_from(SPECS), st.integers(1, 9), st.integers(1, 9))
def test_any_spec_to_any_spec(tmp_path_factory, src, dst, rows, cols) -> None:
    x = torch.arange(rows * cols, dtype=torch.int32).reshape(rows, cols) + 1
    other = cf.Mesh(tp=3, dp=2)
    src, dst = src.replace("a)", "a~)") if "a~" not in src else src, dst.replace("a)", "a~)") if "a~" not in dst else dst
    path = tmp_path_factory.mktemp("c") / "c"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "BLOCK_BYTES", 16)
        cf.save(path, [cf.distribute(x, src, MESH)], random=False)
        (got,) = cf.load(path, mesh=other, specs=dst)
    for mine, wanted in zip(got.shards, parts(x, got.sharding, other), strict=True):
        assert torch.equal(mine, wanted)
    shutil.rmtree(path)


def test_empty_tensors_and_scalars(tmp_path) -> None:
    held = {"s": cf.distribute(torch.tensor(2.5), "", MESH), "d": cf.distribute(torch.zeros(0, 4), "a (dp b)", MESH)}
    cf.save(tmp_path / "c", {"e": torch.zeros(0, 3), **held})
    got = cf.load(tmp_path / "c", mesh=MESH)
    assert got["e"].shape == (0, 3) and float(got["s"]) == 2.5 and got["d"].full().shape == (0, 4)


def test_values_of_lazy_tensors_are_saved(tmp_path) -> None:
    model = cf.functional(cf.lazy(lambda: torch.nn.Linear(3, 2)))
    cf.save(tmp_path / "c", model.params)
    torch.manual_seed(0)
    want = torch.nn.Linear(3, 2)
    torch.manual_seed(0)
    cf.save(tmp_path / "c", cf.functional(cf.lazy(lambda: torch.nn.Linear(3, 2))).params)
    assert bits(cf.load(tmp_path / "c")["weight"]) == bits(want.weight)


# ---- where it lies ----


def test_without_specs_tensors_lie_as_they_were_saved_as_far_as_axes_go(tmp_path) -> None:
    cf.save(tmp_path / "c", state())
    assert str(cf.load(tmp_path / "c", mesh=MESH)["w"].spec) == "(dp a) (tp b)"
    assert str(cf.load(tmp_path / "c", mesh=cf.Mesh(tp=3))["w"].spec) == "a (tp b)"
    assert cf.load(tmp_path / "c", mesh=cf.Mesh(tp=5, dp=4))["w"].sharding.axes == ("dp",)
    assert isinstance(cf.load(tmp_path / "c")["w"], torch.Tensor) and not isinstance(cf.load(tmp_path / "c")["w"], cf.DTensor)


def test_specs_by_prefix_glob_and_one_for_all(tmp_path) -> None:
    cf.save(tmp_path / "c", {"p": state(), "m": {"w": state()["w"]}, "k": [torch.ones(4), torch.ones(4)]})
    got = cf.load(tmp_path / "c", mesh=MESH, specs={"p": {"w": "a (dp b)"}, "k": ["(dp a)", None]})
    assert [str(x.spec) for x in (got["p"]["w"], got["m"]["w"], got["k"][0], got["k"][1])] == ["a (dp b)", "(dp a) (tp b)", "(dp a)", "a"]
    got = cf.load(tmp_path / "c", mesh=MESH, specs={"*.w": "(tp a) b"})
    assert str(got["p"]["w"].spec) == str(got["m"]["w"].spec) == "(tp a) b"
    assert str(cf.load(tmp_path / "c", mesh=MESH, specs="(dp a) ...")["p"]["b"].spec) == "(dp a)"


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        (dict(specs="a b"), InputError, "give mesh= too"),
        (dict(mesh=MESH, specs={"*.v": "a b"}), InputError, r"'\*\.v' matches no tensor"),
        (dict(mesh=MESH, specs={"w": "a b +tp"}), InputError, "w: .* is a pending sum"),
        (dict(mesh=MESH, specs={"w": "(dp a)"}), cf.SpecError, "spec has 1 dims, the tensor has 2"),
        (dict(mesh=MESH, specs={"w": 3}), InputError, r"specs\.w: 3 is no spec"),
        (dict(model=torch.nn.Linear(1, 1), like={}), InputError, "model= fills a model"),
    ],
)
def test_wrong_specs(tmp_path, options, error, says) -> None:
    cf.save(tmp_path / "c", state())
    with pytest.raises(error, match=says):
        cf.load(tmp_path / "c", **options)


def test_an_example_decides_where_and_what(tmp_path) -> None:
    cf.save(tmp_path / "c", state())
    mesh = cf.Mesh(x=3)
    example = {"w": cf.distribute(torch.empty(8, 6), "a (x b)", mesh), "b": torch.empty(6, device="meta"), "n": torch.tensor(0)}
    got = cf.load(tmp_path / "c", like=example)
    assert str(got["w"].spec) == "a (x b)" and got["w"].mesh == mesh and isinstance(got["b"], cf.DTensor)
    assert torch.equal(got["w"].full(), tensors()["w"])


@pytest.mark.parametrize(
    ("example", "says"),
    [
        ({"w": torch.empty(8, 6), "b": torch.empty(6), "m": torch.tensor(0)}, "missing 'm'; unexpected: 'n'; unexpected 'n'"),
        ({"w": torch.empty(6, 8), "b": torch.empty(6), "n": torch.tensor(0)}, r"w is \(8, 6\) float32 in the folder and \(6, 8\) float32"),
        ({"w": torch.empty(8, 6).half(), "b": torch.empty(6), "n": torch.tensor(0)}, "float32 in the folder .* float16 in the example"),
        ({"w": [torch.empty(8, 6)], "b": torch.empty(6), "n": torch.tensor(0)}, "w was saved as a leaf and is a container"),
        ({"w": torch.empty(8, 6), "b": torch.empty(6)}, r"unexpected 'n'.*strict=False"),
    ],
)
def test_an_example_that_does_not_fit(tmp_path, example, says) -> None:
    cf.save(tmp_path / "c", tensors())
    with pytest.raises(CheckpointError, match=f"(?s)is not like the example: .*{says}"):
        cf.load(tmp_path / "c", like=example)


def test_not_strict_keeps_the_examples_values(tmp_path) -> None:
    cf.save(tmp_path / "c", tensors())
    got = cf.load(tmp_path / "c", like={"w": torch.empty(8, 6), "new": torch.ones(2), "k": 5}, strict=False)
    assert got["new"].tolist() == [1, 1] and got["k"] == 5 and list(got) == ["w", "new", "k"]
    assert torch.equal(got["w"], tensors()["w"])


# ---- what else belongs to a run ----


class Loader:
    def __init__(self) -> None:
        self.position = {"epoch": 0, "seed": torch.tensor(5)}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.position)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state


def test_random_numbers_and_data_go_on(tmp_path) -> None:
    loader = Loader()
    loader.position["epoch"] = 3
    cf.save(tmp_path / "c", {"n": 1}, batches=loader)
    want = torch.rand(3), np.random.rand(2)
    fresh = Loader()
    assert cf.load(tmp_path / "c", batches=fresh) == {"n": 1}
    assert torch.equal(torch.rand(3), want[0]) and np.array_equal(np.random.rand(2), want[1])
    assert fresh.position == {"epoch": 3, "seed": torch.tensor(5)}
    torch.manual_seed(4)
    before = torch.get_rng_state()
    cf.load(tmp_path / "c", random=False)
    assert torch.equal(torch.get_rng_state(), before)
    cf.save(tmp_path / "d", {"n": 1})
    with pytest.raises(CheckpointError, match="was saved without batches"):
        cf.load(tmp_path / "d", batches=fresh)
