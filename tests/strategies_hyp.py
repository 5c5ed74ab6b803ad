"""Hypothesis strategies for meshes and layouts, in one place."""

from __future__ import annotations

from math import prod

from hypothesis import strategies as st

from colofunc.dtensor.layout import REDUCTIONS, Atom, Layout, make_layout
from colofunc.mesh import Mesh

AXES = ("dp", "tp", "sp", "ep")


@st.composite
def meshes(draw: st.DrawFn, max_axes: int = 3, max_ranks: int = 16, topology: str | None = None) -> Mesh:
    """Meshes of small axes (also of size 1 and odd sizes)."""
    sizes: list[int] = []
    for _ in range(draw(st.integers(1, max_axes))):
        room = max_ranks // prod(sizes)
        sizes.append(draw(st.sampled_from([n for n in (2, 3, 4, 1, 5, 6) if n <= room])))
    return Mesh(topology=topology, **dict(zip(AXES, sizes)))


def _factors(draw: st.DrawFn, size: int) -> list[int]:
    out = []
    while size > 1:
        out.append(draw(st.sampled_from([n for n in range(2, size + 1) if size % n == 0])))
        size //= out[-1]
    return out


@st.composite
def layouts(
    draw: st.DrawFn, mesh: Mesh, shape: tuple[int, ...], pending: tuple[str, ...] = REDUCTIONS, padded: bool = True
) -> Layout:
    """Any layout of `shape`: axes anywhere among any local factors, copies, pending reductions of one kind."""
    how = draw(st.sampled_from(pending)) if pending else None
    dims: list[list[Atom]] = [[] for _ in shape]
    terms = []
    for axis in draw(st.permutations(mesh.axis_names)):
        n = mesh.shape[axis]
        fits = [d for d, size in enumerate(shape) if padded or size % (n * prod(s for s, _ in dims[d])) == 0]
        where = draw(st.sampled_from(["copy", *fits, *(["pending"] if how else [])]))
        if where == "pending" and how and n > 1:
            terms.append((axis, how))
        elif isinstance(where, int):
            dims[where].append((n, axis))
    for dim, size in zip(dims, shape, strict=True):
        for factor in _factors(draw, -(-size // prod(s for s, _ in dim))):
            dim.insert(draw(st.integers(0, len(dim))), (factor, None))
    return make_layout(tuple(map(tuple, dims)), shape, tuple(terms))


@st.composite
def problems(draw: st.DrawFn, padded: bool = True) -> tuple[Mesh, Layout, Layout]:
    """(mesh, source, target) of one tensor."""
    mesh = draw(meshes())
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 12]), min_size=0, max_size=3)))
    return mesh, draw(layouts(mesh, shape, padded=padded)), draw(layouts(mesh, shape, padded=padded))
