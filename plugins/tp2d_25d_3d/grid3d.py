"""3D: a product over a cube of ranks, each of X, W and Y on all three axes and copied by none.

    X: (z y b) (x i)      W: (x z i) (y o)      Y: (z x b) (y o)

    Y  = X W       gather X along y, W along z       reduce_scatter along x
    dX = dY W^T    gather dY along x, W along z      reduce_scatter along y
    dW = X^T dY    gather X along y, dY along x      reduce_scatter along z

Problem: on a grid of two axes a rank still receives whole rows and columns of blocks. Idea (Agarwal): of the three
factors b, i and o each lies on one axis, z, x and y; a matrix has two of them, and is kept split over the third, along
which it is gathered for the product or scattered after it. Y comes out as X stood, with x and y exchanged, so the next
product takes it as it is with its axes exchanged: directions alternate, and nothing is converted in between.

Per product a rank receives [b i (y-1) + b o (x-1) + i o (z-1)] / (x y z) elements, forward and in each gradient. The
gathered operands and the terms of the result stand whole in between: b i / (x z) + i o / (x y) + b o / (y z) elements.
Source: Agarwal et al., A three-dimensional approach to parallel matrix multiplication (IBM J. R&D 39, 1995);
2105.14450.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import attrs
import torch
from colofunc_plugins.tp2d_25d_3d.summa import STRIPES, AxisWords, FactorAxes

import colofunc as cf
from colofunc.ext import products

T = torch.Tensor


@attrs.frozen
class Cube:
    """x: the axis of i, y: of o, z: of b. Each matrix is stored along the axis of the factor that it has not."""

    x: str
    y: str
    z: str

    @property
    def lies(self) -> FactorAxes:
        """Where the axes lie in X, W, Y and the bias."""
        return self.layer(self.z)

    def layer(self, z: str) -> FactorAxes:
        """The same with z, or without it ("")."""
        x, y = self.x, self.y
        return {
            "x": {"b": f"{z} {y}", "i": x},
            "w": {"i": f"{x} {z}", "o": y},
            "y": {"b": f"{z} {x}", "o": y},
            "bias": {"o": y},
        }

    def words(self, stripes: int) -> AxisWords:
        """What a wish calls the pattern."""
        outputs = "3d outputs" + (f" in {stripes}" if stripes > 1 else "")
        return (self.x, "3d inputs"), (self.y, outputs), (self.z, "3d rows")

    def strategies(self, call: Any, mesh: cf.Mesh) -> Iterator[cf.Strategy]:
        """The cube's strategies for a call, and those of one layer of it, for a planner that has not come to z."""
        for stripes in STRIPES:
            words = self.words(stripes)
            costs, code = partial(self.cost, call, mesh), self.local
            yield from products.strategies(
                call, mesh, self.lies, words, partial(costs, False), partial(code, False), stripes=stripes
            )
            layer = partial(
                products.strategies, call, mesh, self.layer(""), words[:2], partial(costs, True), partial(code, True)
            )
            yield from layer(stripes=stripes, hidden=(self.z,))

    def along(self, flat: bool) -> dict[str, str]:
        """The axis along which each matrix is stored split, and whole in the product."""
        return {"x": self.y, "y": self.x} if flat else {"x": self.y, "w": self.z, "y": self.x}

    def cost(self, call: Any, mesh: cf.Mesh, flat: bool, form: products.Form, way: cf.Strategy) -> tuple[float, int]:
        """(seconds on the wire, bytes of what is gathered and of the terms of the result)."""
        return form.wire(call, way, mesh, self.along(flat))

    def local(self, flat: bool, form: products.Form, way: cf.Strategy) -> Callable[..., T]:
        """The local code of one strategy: gather, multiply, scatter the result where it is stored split."""
        shape, along = way.outs[0].local_shape, self.along(flat)

        def local(*shards: T, mesh: cf.Mesh) -> T:
            matrices = dict[str, T]()
            for name, matrix in form.matrices(shards).items():
                matrices[name] = cf.ext.local.gathered(matrix, 0, along[name], mesh) if name in along else matrix
            found = form.product(matrices)
            if form.wanted in along:
                found = cf.ext.local.scattered(found, 0, along[form.wanted], mesh)
            if "bias" in matrices:
                found = found + matrices["bias"]
            return form.given(found, shape)

        return local
