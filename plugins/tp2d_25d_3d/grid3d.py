"""3D: a product over a cube of ranks, each of X, W and Y on all three axes and copied by none.

    X: (z y b) (x i)      W: (x z i) (y o)      Y: (z x b) (y o)

    Y  = X W       gather X along y, W along z       reduce_scatter along x
    dX = dY W^T    gather dY along x, W along z      reduce_scatter along y
    dW = X^T dY    gather X along y, dY along x      reduce_scatter along z

Problem: on a grid of two axes a rank still receives whole rows and columns of blocks. Idea (Agarwal): of the three factors b, i
and o each lies on one axis, z, x and y; a matrix has two of them, and is kept split over the third, along which it is
gathered for the product or scattered after it. Y comes out as X stood, with x and y exchanged, so the next product takes
it as it is with its axes exchanged: directions alternate, and nothing is converted in between.

Per product a rank receives [b i (y-1) + b o (x-1) + i o (z-1)] / (x y z) elements, forward and in each gradient. The gathered
operands and the terms of the result stand whole in between: b i / (x z) + i o / (x y) + b o / (y z) elements.
Source: Agarwal et al., A three-dimensional approach to parallel matrix multiplication (IBM J. R&D 39, 1995); 2105.14450.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any

import attrs
import torch
from colofunc_plugins.tp2d_25d_3d.grids import FORMS, NAMES, Form, Lies, parts, patterns

import colofunc as cf

T = torch.Tensor
TARGETS = tuple(FORMS)
INPUTS, OUTPUTS, ROWS = "3d inputs", "3d outputs", "3d rows"


def lies(x: str, y: str, z: str, stripes: int) -> Lies:
    """Where x (inputs), y (outputs) and z (rows) lie in X, W, Y and the bias."""
    o = y if stripes == 1 else f"{stripes} {y}"
    return {"x": {"b": f"{z} {y}", "i": x}, "w": {"i": f"{x} {z}", "o": o}, "y": {"b": f"{z} {x}", "o": o}, "bias": {"o": o}}


def words(x: str, y: str, z: str, stripes: int) -> tuple[tuple[str, str], ...]:
    """What a wish calls the pattern."""
    return (x, INPUTS), (y, OUTPUTS if stripes == 1 else f"{OUTPUTS} in {stripes}"), (z, ROWS)


def strategies(call: Any, mesh: cf.Mesh) -> Iterator[cf.Strategy]:
    """The cube over every three axes of the mesh."""
    axes = [a for a in mesh.axis_names if mesh.axis_size(a) > 1]
    for x, y, z in permutations(axes, 3):
        cube = Cube(x, y, z)

        def extra(form: Form, way: cf.Strategy, cube: Cube = cube) -> tuple[float, int]:
            return cube.cost(form, way, call, mesh)

        def code(form: Form, way: cf.Strategy, cube: Cube = cube) -> Callable[..., T]:
            return cube.local(form, way)

        yield from patterns(
            call, mesh, lambda n, c=cube: lies(c.x, c.y, c.z, n), lambda n, c=cube: words(c.x, c.y, c.z, n), code, extra
        )  # fmt: skip


@attrs.frozen
class Cube:
    """x: the axis of i, y: of o, z: of b. Each matrix is stored along the axis of the factor that it has not."""

    x: str
    y: str
    z: str

    def cost(self, form: Form, way: cf.Strategy, call: Any, mesh: cf.Mesh) -> tuple[float, int]:
        """(seconds on the wire, bytes of what is gathered and of the terms of the result)."""
        seconds, peak = 0.0, 0
        for name, axis in (("x", self.y), ("w", self.z), ("y", self.x)):
            nbytes = parts(form, way, call)[name] * mesh.axis_size(axis)
            seconds += mesh.collective_s("reduce_scatter" if name == NAMES[form.out] else "all_gather", nbytes, (axis,))
            peak += nbytes
        return seconds, peak

    def local(self, form: Form, way: cf.Strategy) -> Callable[..., T]:
        """The local code of one strategy."""
        shape = way.outs[0].local_shape

        def local(*shards: T, mesh: cf.Mesh) -> T:
            given = form.matrices(shards)
            along = {"x": self.y, "w": self.z, "y": self.x}
            whole = {name: _gathered(given[name], axis, mesh) for name, axis in along.items() if name in given}
            if "y" not in given:
                y = _scattered(torch.mm(whole["x"], whole["w"]), self.x, mesh)
                return form.given(y if "bias" not in given else y + given["bias"], shape)
            if "w" in given:
                return form.given(_scattered(torch.mm(whole["y"], whole["w"].t()), self.y, mesh), shape)
            return form.given(_scattered(torch.mm(whole["x"].t(), whole["y"]), self.z, mesh), shape)

        return local


def _gathered(m: T, axis: str, mesh: cf.Mesh) -> T:
    """All members' rows: (rows, columns) -> (n rows, columns)."""
    return cf.collectives.all_gather(m.contiguous(), (axis,), mesh).flatten(0, 1)


def _scattered(m: T, axis: str, mesh: cf.Mesh) -> T:
    """The sum of all members' terms, each rank its rows: (n rows, columns) -> (rows, columns)."""
    return cf.collectives.reduce_scatter(m.unflatten(0, (mesh.axis_size(axis), -1)), (axis,), mesh)
