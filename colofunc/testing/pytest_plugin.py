"""Fixtures for tests of steps: put `pytest_plugins = ["colofunc.testing.pytest_plugin"]` in conftest.py.

    def test_step(mesh, float64):
        cf.testing.check(cf.shard(step_fn, mesh), state, batch)

`mesh` is dp=2, tp=2 on the ideal topology; with
`@pytest.mark.parametrize("mesh", ["dp=4", "dp=2 tp=2"], indirect=True)` it is whatever the words say. `float64` makes
the whole test compute in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from colofunc.errors import InputError
from colofunc.mesh import Mesh
from colofunc.testing.numerics import float64 as _float64

try:
    import pytest
except ImportError as error:
    raise InputError("colofunc.testing.pytest_plugin needs pytest. Try: pip install pytest") from error


def mesh_from(words: str) -> Mesh:
    """`mesh_from("dp=2 tp=2")`: a simulated mesh on the ideal topology."""
    axes: dict[str, Any] = {}
    for word in words.split():
        name, size = word.split("=")
        axes[name] = int(size)
    return Mesh(topology="ideal", **axes)


@pytest.fixture
def mesh(request: Any) -> Mesh:
    """A simulated mesh, dp=2 tp=2 unless the test says otherwise."""
    return mesh_from(getattr(request, "param", "dp=2 tp=2"))


@pytest.fixture
def float64() -> Iterator[None]:
    """The test computes in float64, whatever dtype its code names."""
    with _float64():
        yield
