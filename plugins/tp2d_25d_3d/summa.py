"""2D and 2.5D: SUMMA, a product over a grid of ranks with streamed panels.

    X: (x b) (y i)      W: (x i) (y o)      Y: (x b) (y o)           every matrix lies on both axes, nothing is copied

    Y  = X W       panel k: gather X along y and W along x           Y += X_k W_k
    dX = dY W^T    panel k: gather W along x                         reduce_scatter(dY W_k^T) along y
    dW = X^T dY    panel k: gather X along y                         reduce_scatter(X_k^T dY) along x

Problem: to gather X and W whole is as many bytes, and costs the memory that splitting them saved. Idea: a panel at a
time. SUMMA broadcasts panel k from its owner; in one program for all ranks a broadcast has no owner, so here every rank
gives a slice of each of its own blocks to every panel, which is the same sum in another order. A panel is an
all-gather, all panels together are the bytes of all broadcasts, and x and y need not be equal: i falls into lcm(x, y)
blocks. While a panel multiplies, the next one is on its way.

Per product a rank receives (y-1)/y of its row of X (of dX: sends), (x-1)/x of its column of W: [b i (y-1) + i o (x-1)]
/ (x y) elements. With a third axis on b this is Tesseract (2.5D): copies of the grid of weights, each with its part of
the rows. Source: SUMMA, van de Geijn and Watts (1997); Optimus (2104.05343); Tesseract (2105.14500).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import lcm
from typing import Any

import attrs
import torch

import colofunc as cf
from colofunc.ext import products

T = torch.Tensor
FactorAxes = Mapping[str, Mapping[str, str]]  # as `cf.ext.products` takes them
AxisWords = Sequence[tuple[str, str]]
STRIPES = (1, 2, 3)
"""Into how many parts a fused weight may be cut (query, key, value: 3), each of which is split over the axis."""


@attrs.frozen
class Grid:
    """Rows of activations on axis `x`, columns on `y`; more of the rows on `depth`."""

    x: str
    y: str
    depth: str | None = None

    @property
    def lies(self) -> FactorAxes:
        """Where the axes lie in X, W, Y and the bias."""
        return {
            "x": {"b": self.x, "i": self.y},
            "w": {"i": self.x, "o": self.y},
            "y": {"b": self.x, "o": self.y},
            "bias": {"o": self.y},
        }

    def words(self, stripes: int) -> AxisWords:
        """What a wish calls the pattern."""
        columns = "summa columns" + (f" in {stripes}" if stripes > 1 else "")
        words = ((self.x, "summa rows"), (self.y, columns))
        return words if self.depth is None else (*words, (self.depth, "summa depth"))

    def strategies(self, call: Any, mesh: cf.Mesh) -> Iterator[cf.Strategy]:
        """SUMMA for a call on this grid, and without its depth, for a planner that has not come to that axis."""
        cost, local = partial(self.cost, call, mesh), partial(self.local, mesh)
        for stripes in STRIPES:
            words = self.words(stripes)
            laid = partial(
                products.strategies, call, mesh, self.lies, words[:2], cost, local, stripes=stripes, sort=True
            )
            yield from laid(depth=words[2:])
            if self.depth is not None:
                yield from laid(hidden=(self.depth,))

    def cost(self, call: Any, mesh: cf.Mesh, form: products.Form, way: cf.Strategy) -> tuple[float, int]:
        """(seconds on the wire, bytes of two panels)."""
        count = panels(form.width, mesh.axis_size(self.x), mesh.axis_size(self.y))
        return form.wire(call, way, mesh, {"x": self.y, "w": self.x}, count, standing=2)

    def local(self, mesh: cf.Mesh, form: products.Form, way: cf.Strategy) -> Callable[..., T]:
        """The local code of one strategy."""
        count = panels(form.width, mesh.axis_size(self.x), mesh.axis_size(self.y))
        shape = way.outs[0].local_shape

        def local(*shards: T, mesh: cf.Mesh) -> T:
            stream = _Stream(self.x, self.y, count, mesh)
            make = {"x": stream.dx, "w": stream.dw, "y": stream.forward}[form.wanted]
            return form.given(make(**form.matrices(shards)), shape)

        return local


def panels(width: int, rows: int, columns: int) -> int:
    """How many panels: i falls into lcm(rows, columns) blocks, each of which gives a slice to every panel.

    As many as there are blocks, or the next number that divides a block.
    """
    blocks = lcm(rows, columns)
    block = width // blocks
    return next((n for n in range(blocks, block) if block % n == 0), block)


@attrs.frozen
class _Stream:
    """`count` panels. A panel stands with its factor i in front: (p, b) of X, (p, o) of W."""

    x: str
    y: str
    count: int
    mesh: cf.Mesh

    def panels(self, m: T, axis: str) -> Iterator[T]:
        """All members' slices of m: (i, rest) -> (p, rest), panel by panel."""
        return cf.ext.local.streamed(m, self.count, axis, self.mesh, self.blocks)

    def scattered(self, panels: Iterator[T], axis: str) -> T:
        """Of the sum of all members' panels the own part: (p, rest) each -> (i, rest)."""
        return cf.ext.local.collected(panels, axis, self.mesh, self.blocks)

    @property
    def blocks(self) -> int:
        return lcm(self.mesh.axis_size(self.x), self.mesh.axis_size(self.y))

    def forward(self, x: T, w: T, bias: T | None = None) -> T:
        """x (b, i), w (i, o) -> (b, o)."""
        y: T | None = bias
        for mine, theirs in zip(self.panels(x.t(), self.y), self.panels(w, self.x)):
            y = torch.mm(mine.t(), theirs) if y is None else torch.addmm(y, mine.t(), theirs)
        assert y is not None
        return y

    def dx(self, y: T, w: T) -> T:
        """y (b, o), w (i, o) -> (b, i)."""
        return self.scattered((torch.mm(panel, y.t()) for panel in self.panels(w, self.x)), self.y).t()

    def dw(self, x: T, y: T) -> T:
        """x (b, i), y (b, o) -> (i, o)."""
        return self.scattered((torch.mm(panel, y) for panel in self.panels(x.t(), self.y)), self.x)
