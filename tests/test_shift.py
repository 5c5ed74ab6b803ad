"""Shifts: the forms that are recognised, and parts of them on ranks, against plain indexing."""

import pytest
import torch
import torch.nn.functional as F

import colofunc as cf
from colofunc.mesh.cost import rotation
from colofunc.ops.shift import shift
from colofunc.program.passes.simplify import simplify
from colofunc.program.tracing.trace import trace
from colofunc.spec.rules.shift import _travelling
from colofunc.testing import check_strategies
from colofunc.testing.prove import sample

X = torch.arange(48).reshape(4, 12)


def moved(x: torch.Tensor, by: int, fill: int) -> torch.Tensor:
    columns = [x[:, i - by] if 0 <= i - by < x.shape[1] else torch.full_like(x[:, 0], fill) for i in range(x.shape[1])]
    return torch.stack(columns, 1)


def into(x: torch.Tensor, first: int | None) -> torch.Tensor:
    out = x.new_zeros(x.shape)
    out[:, 1:] = x[:, :-1].clone()
    if first is not None:
        out[:, 0] = first
    return out + 0


FORMS = {
    "labels": (lambda x: F.pad(x, (0, 1), value=-100)[..., 1:] + 0, -1, -100),
    "behind": (lambda x: F.pad(x, (2, 0), value=3)[:, :-2] + 0, 2, 3),
    "decoder": (lambda x: into(x, 5), 1, 5),
    "without a first": (lambda x: into(x, None), 1, 0),
    "cat": (lambda x: torch.cat([torch.full((4, 1), 7), x[:, :-1]], 1) + 0, 1, 7),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_become_one_operator(form: str) -> None:
    fn, by, fill = FORMS[form]
    nodes = [n for n in simplify(trace(fn, (X,)).program).nodes if n.target == "colofunc.shift"]
    assert [n.args[1:] for n in nodes] == [(1, by, fill)]
    assert torch.equal(fn(X), moved(X, by, fill))
    assert torch.equal(cf.shard(fn, cf.Mesh(a=2), in_specs="b (s a)")(X).full(), fn(X))


@pytest.mark.parametrize(
    "fn",
    [lambda x: F.pad(x, (1, 1))[:, 1:-1] + 0, lambda x: F.pad(x, (0, 1))[:, ::2] + 0, lambda x: torch.cat([x[:, :1], x[:, :-1]], 1) + 0],
)
def test_what_only_looks_like_a_shift(fn) -> None:
    assert not [n for n in simplify(trace(fn, (X,)).program).nodes if n.target == "colofunc.shift"]


@pytest.mark.parametrize("by", [1, -1, 3, -5, 7, -12, 20])
def test_parts_on_ranks(by: int) -> None:
    assert torch.equal(shift(X, 1, by, 9), moved(X, by, 9))
    meshes = [cf.Mesh(a=3), cf.Mesh(a=2, b=2)]
    names = {p.strategy for p in check_strategies(None, "colofunc.shift", sample(X.double(), 1, by, 9), meshes=meshes)}
    assert {"{a: d1}", "{a: d1, b: d1}", "{b: d1, a: d1}", "{b: d0, a: d1}"} <= names


@pytest.mark.parametrize("spec", ["b (s a)", "b (a s c)", "b (c s a)", "b (c a s)"])
def test_whatever_the_layout(spec: str) -> None:
    step = cf.shard(lambda x: shift(x, 1, -5, 9) * 2, cf.Mesh(a=2, c=2), in_specs=spec, out_specs=spec)
    assert torch.equal(step(X).full(), moved(X, -5, 9) * 2)


@pytest.mark.parametrize(("rows", "by", "hops"), [(4, 1, {1: 1}), (4, 32, {8: 4}), (4, 34, {8: 2, 9: 2}), (4, -1, {15: 1})])
def test_a_shift_costs_the_hops_that_it_makes(rows: int, by: int, hops: dict[int, int]) -> None:
    """Rows of a rank that go so many ranks further; `cost()` of what is run says the same. Eight ranks further all cross the uplink."""
    mesh = cf.Mesh(a=16, topology="8xv100")
    assert {n: part * rows for _, n, part in _travelling(((16, "a"), (rows, None)), by)} == hops
    seconds = sum(mesh.collective_s("permute", 8 * n, ("a",), rotation(16, far)) for far, n in hops.items())
    step = cf.shard(lambda x: shift(x, 0, by, 9), mesh, in_specs="(a s)", out_specs="(a s)", donate=())
    assert step.lower(torch.arange(16 * rows)).cost().communication_s == pytest.approx(seconds, rel=1e-12)
