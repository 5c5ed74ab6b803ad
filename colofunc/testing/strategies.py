"""Hypothesis strategies for meshes, shapes, specs and layouts. Needs the extra `hypothesis`.

    @given(cases())
    def test_round_trip(case):
        mesh, shape, layout = case

Everything is small: a simulated mesh runs all ranks in one process. Shrinks towards fewer axes and whole tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from colofunc.errors import InputError
from colofunc.mesh import Mesh
from colofunc.spec.layout import REDUCTIONS, Atom, Layout, make_layout

try:
    from hypothesis import strategies as st
except ImportError as error:
    raise InputError("colofunc.testing.strategies needs hypothesis. Try: pip install hypothesis") from error

AXES = ("dp", "tp", "sp", "ep")
SIZES = (1, 2, 3, 4, 6, 8, 12)


@st.composite
def meshes(draw: Any, max_axes: int = 3, max_ranks: int = 16, topology: str | None = None) -> Mesh:
    """Simulated meshes of small axes, of size 1 and odd sizes too."""
    sizes: list[int] = []
    for _ in range(draw(st.integers(1, max_axes))):
        room = max_ranks // prod(sizes)
        sizes.append(draw(st.sampled_from([n for n in (2, 3, 4, 1, 5, 6) if n <= room])))
    axes: dict[str, Any] = dict(zip(AXES, sizes))
    return Mesh(topology=topology, **axes)


def shapes(max_dims: int = 3, sizes: Sequence[int] = SIZES) -> Any:
    """Shapes with sizes that small axes divide, and with some that they do not."""
    return st.lists(st.sampled_from(list(sizes)), min_size=0, max_size=max_dims).map(tuple)


@st.composite
def layouts(
    draw: Any, mesh: Mesh, shape: tuple[int, ...], pending: Sequence[str] = REDUCTIONS, padded: bool = True
) -> Layout:
    """Any layout of `shape`: axes anywhere among any local factors, copies, pending reductions of one kind."""
    how = draw(st.sampled_from(list(pending))) if pending else None
    dims: list[list[Atom]] = [[] for _ in shape]
    terms = []
    for axis in draw(st.permutations(mesh.axis_names)):
        n = mesh.shape[axis]
        fits: list[int] = []
        for dim, size in enumerate(shape):
            if padded or size % (n * _split_size(dims[dim])) == 0:
                fits.append(dim)
        where = draw(st.sampled_from(["copy", *fits, *(["pending"] if how else [])]))
        if where == "pending" and how and n > 1:
            terms.append((axis, how))
        elif isinstance(where, int):
            dims[where].append((n, axis))
    for atoms, size in zip(dims, shape, strict=True):
        for factor in _factors(draw, -(-size // _split_size(atoms))):
            atoms.insert(draw(st.integers(0, len(atoms))), (factor, None))
    return make_layout(tuple(map(tuple, dims)), shape, tuple(terms))


def _split_size(atoms: Sequence[Atom]) -> int:
    """Into how many parts these atoms split a dim."""
    return prod(size for size, _ in atoms)


def specs(mesh: Mesh, shape: tuple[int, ...], padded: bool = False) -> Any:
    """Texts of specs that fit `shape` on `mesh`, without pending reductions: what `cf.distribute` takes."""
    return layouts(mesh, shape, pending=(), padded=padded).map(lambda layout: layout.text())


@st.composite
def cases(draw: Any, padded: bool = True) -> tuple[Mesh, tuple[int, ...], Layout]:
    """(mesh, shape, layout) of one tensor."""
    mesh, shape = draw(meshes()), draw(shapes())
    return mesh, shape, draw(layouts(mesh, shape, padded=padded))


def _factors(draw: Any, size: int) -> list[int]:
    out = []
    while size > 1:
        out.append(draw(st.sampled_from([n for n in range(2, size + 1) if size % n == 0])))
        size //= out[-1]
    return out


@st.composite
def problems(draw: Any, padded: bool = True) -> tuple[Mesh, Layout, Layout]:
    """(mesh, source, target) of one tensor: a conversion."""
    mesh, shape = draw(meshes()), draw(shapes())
    return mesh, draw(layouts(mesh, shape, padded=padded)), draw(layouts(mesh, shape, padded=padded))
