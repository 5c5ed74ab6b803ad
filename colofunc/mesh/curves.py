"""Curves: what a device reaches of its data sheet, by kind of work and by size, read from a file of its own.

Problem: no product reaches the rate of a data sheet, no short attention that of a long one, no collective that of its
links, and a plan that believes the sheet is too fast everywhere, and not by the same factor. Idea: a file per device in
`colofunc/mesh/devices/` holds what was measured of it, each figure with its source, and the clock reads nothing else
where there is one.

    attention_flops_per_s(curves_of("h100").attention, "flash", 128, 4096.0, backward=True)     # 308 T: 8,192 causal rows

Note [Products]. A product of (m, k) and (k, n) takes a launch and the longer of 2mnk operations at the rate of
`products` and of the bytes of its three matrices at that of memory: sizes count through both. On the 11 products that
XLA's table has for sm_90 that is within 8 % (root mean square of logarithms), 15 % at worst.

Where a device's file has `tiles`, the rate goes by m, n and k as well. A result is computed in tiles, one a processor
at a time, so that all wait for the last wave; a tile takes as long as k + `ramp` steps, as its loop along k has to fill
and its result to be written. A library has tiles of several sizes and takes those with which it ends first. Rates of
`products` are those of the shape `best`, at which they were measured, and other shapes stand to it as this model has
them. One constant more was fitted to the same 11 products, the ramp; all else is counted or given. It follows them
within 6 %, 10 % at worst.

The rate of a kernel of attention grows with the number of keys that a row has, because each block of rows begins and
ends once. Tables are published for causal masks, where a row of a sequence of s has s/2 keys on average; a call is
looked up by its keys, causal or not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs

from colofunc import untrusted
from colofunc.errors import TopologyError, near

FORMAT = 1
FOLDER = Path(__file__).parent / "devices"
MOST_BYTES = 1 << 20
HOST_KERNEL = "cpu"
SMALL_BYTES = 1 << 20
"""Kernels that move less have seconds that hardly depend on how much: what they do beside it counts."""
"""The name of torch's attention on a host among kernels of attention."""
KINDS = ("product", "elementwise", "transcendental", "normalisation", "softmax", "reduction", "gather", "update")
"""Kernels that a machine's own rates tell apart: matrix products; sums, products and copies of elements; exponentials
and the like of each; norms of rows; softmax of rows; sums over rows; rows that are looked up; AdamW and the like, in
one kernel."""


def _above_zero(instance: object, attribute: attrs.Attribute[Any], value: float) -> None:
    if not 0 < value < math.inf:
        raise TopologyError(f"{type(instance).__name__}.{attribute.name} is {value!r}; give a finite number above 0")


def _a_part(instance: object, attribute: attrs.Attribute[Any], value: float) -> None:
    if not 0 < value <= 1:
        raise TopologyError(f"{type(instance).__name__}.{attribute.name} is {value!r}; give a part above 0, at most 1")


def _said(instance: object, attribute: attrs.Attribute[Any], value: str) -> None:
    if not value.strip():
        raise TopologyError(f"{type(instance).__name__}.{attribute.name} is empty; say where the figure is from")


@attrs.frozen
class ProductRate:
    """Operations a second of large products of one dtype, at best."""

    dtype: str
    flops_per_s: float = attrs.field(validator=_above_zero, converter=float)
    source: str = attrs.field(validator=_said)


@attrs.frozen
class Tiles:
    """How products are cut up on a device; see Note [Products].

    processors: that compute tiles side by side. sizes: rows and columns of the tiles that there are. ramp: steps along
    k by which each tile takes longer. best: (m, n, k) of the product that reaches the rate of `products`. error:
    relative, what the fit leaves.
    """

    processors: int = attrs.field(validator=_above_zero)
    sizes: tuple[tuple[int, int], ...]
    ramp: float = attrs.field(validator=_above_zero, converter=float)
    best: tuple[int, int, int]
    source: str = attrs.field(validator=_said)
    error: float = 0.0

    def __attrs_post_init__(self) -> None:
        numbers = [number for size in self.sizes for number in size]
        if not numbers or min(*numbers, *self.best) <= 0:
            raise TopologyError(
                f"Tiles: sizes {self.sizes!r:.80} and best {self.best!r:.80}; give at least one size, and numbers "
                "above 0"
            )

    def times(self, m: float, n: float, k: float, batch: float = 1.0) -> float:
        """How many times longer than at the rate of `products` a batch of (m, k) by (k, n) products takes."""
        return self._taken(m, n, k, batch) / self._taken(*self.best, batch=1.0)

    def _taken(self, m: float, n: float, k: float, batch: float) -> float:
        """Seconds beside those at the rate of full waves, without a ramp."""
        taken = []
        for rows, columns in self.sizes:
            tiles = batch * math.ceil(m / rows) * math.ceil(n / columns)
            waves = math.ceil(tiles / self.processors)
            taken.append(waves * rows * columns * self.processors)
        return min(taken) * (k + self.ramp) / (batch * m * n * k)


@attrs.frozen
class AttentionRate:
    """Operations a second of a kernel for heads of `head` elements: (keys of a row, forward, backward), fewest keys
    first.
    """

    kernel: str
    head: int = attrs.field(validator=_above_zero)
    points: tuple[tuple[float, float, float], ...]
    source: str = attrs.field(validator=_said)

    def __attrs_post_init__(self) -> None:
        keys = [point[0] for point in self.points]
        if not keys or sorted(set(keys)) != keys or min(map(min, self.points)) <= 0:
            raise TopologyError(
                f"AttentionRate of {self.kernel!r}: points {self.points!r:.80}; give numbers above 0, fewest keys first"
            )


@attrs.frozen
class WorkRate:
    """Rates of one kind of kernels by their size: (work of a call, work a second), least work first; beside a launch.

    kind: one of `KINDS`. The work of a product is operations, that of all others bytes read and written.
    """

    kind: str
    dtype: str
    points: tuple[tuple[float, float], ...]
    source: str

    def __attrs_post_init__(self) -> None:
        if self.kind not in KINDS:
            raise TopologyError(f"WorkRate.kind is {self.kind!r}{near(self.kind, KINDS)}")
        works = [point[0] for point in self.points]
        if not works or sorted(set(works)) != works or min(map(min, self.points)) <= 0:
            raise TopologyError(
                f"WorkRate of {self.kind!r}: points {self.points!r:.80}; give numbers above 0, least work first"
            )

    def at(self, work: float) -> float:
        """Work a second of a call of so much."""
        return _between(self.points, work)

    def seconds(self, nbytes: float) -> float:
        """Of a kernel that moves so many bytes, beside a launch. Smaller ones than were measured take what the smallest
        does, where that is small itself: some kinds have more to do than a launch before they begin, such as an update
        that looks at seven tensors.
        """
        least = self.points[0][0]
        counted = max(nbytes, least) if least <= SMALL_BYTES else nbytes
        return counted / self.at(counted)


@attrs.frozen
class Share:
    """What programs reach of a data sheet's figure, a part of it. `error`: relative, where it comes from a fit."""

    share: float = attrs.field(validator=_a_part, converter=float)
    source: str = attrs.field(validator=_said)
    error: float = 0.0


@attrs.frozen
class Gain:
    """How many times faster something is than without it."""

    times: float = attrs.field(validator=_above_zero, converter=float)
    source: str = attrs.field(validator=_said)


@attrs.frozen
class Curves:
    """What devices reach. `sustained`: the part of the rates of `products` that is left where whole steps of them run.

    `memory`: of the device's memory, by elementwise kernels. `launch_s`: of a kernel, beside its work. `links`: of
    those in a box, by collectives; `latency_s`: of one of their messages; `all_reduce`: what an all-reduce gains in a
    box whose switches add up, None where they do not. `copies`: of the link between device and host. `contention`: by
    what part of its time a kernel takes longer while a collective runs beside it; None where that is not known.
    `tiles`: by which the rate of a product goes by its sizes; None: it does not.
    """

    devices: tuple[str, ...]
    products: tuple[ProductRate, ...]
    sustained: Share
    memory: Share
    launch_s: float = attrs.field(validator=_above_zero, converter=float)
    launch_source: str = attrs.field(validator=_said)
    links: Share
    latency_s: float = attrs.field(validator=_above_zero, converter=float)
    latency_source: str = attrs.field(validator=_said)
    copies: Share
    attention: tuple[AttentionRate, ...] = ()
    contention: Share | None = None
    all_reduce: Gain | None = None
    tiles: Tiles | None = None

    def product_flops_per_s(self, dtype: str) -> float | None:
        """Of large products of a dtype in a step; None where nothing is known."""
        best = next((one.flops_per_s for one in self.products if one.dtype == dtype), None)
        return None if best is None else best * self.sustained.share


def attention_flops_per_s(
    known: tuple[AttentionRate, ...], kernel: str, head: int, keys: float, backward: bool
) -> float | None:
    """Of a kernel by the elements of a head and the mean number of keys of a row; None where nothing is known of it."""
    column = 2 if backward else 1
    heads = sorted((one for one in known if one.kernel == kernel), key=lambda one: one.head)
    if not heads:
        return None
    return _between([(float(one.head), _between([(p[0], p[column]) for p in one.points], keys)) for one in heads], head)


def _between(points: Sequence[tuple[float, float]], at: float) -> float:
    """Straight between neighbours by the logarithm of the place; beyond the ends what the ends have."""
    if at <= points[0][0]:
        return points[0][1]
    for (left, low), (right, high) in pairwise(points):
        if at <= right:
            return low + (high - low) * math.log(at / left) / math.log(right / left)
    return points[-1][1]


def curves_of(device: str) -> Curves | None:
    """The curves of a device by the name of its preset; None where no file has them."""
    return _shipped().get(device)


@cache
def _shipped() -> dict[str, Curves]:
    """All files of this folder. Raises TopologyError on a damaged one, and where two say what one device reaches."""
    found: dict[str, Curves] = {}
    for path in sorted(FOLDER.glob("*.json")):
        curves = read_curves(path)
        for device in curves.devices:
            if device in found:
                raise TopologyError(
                    f"curves file {str(path)!r} is of device {device!r}, and so is another file; name it in one of them"
                )
            found[device] = curves
    return found


def read_curves(path: Path) -> Curves:
    """Curves from a file. Raises TopologyError with the first value that is none, and what it must be."""
    try:
        data = untrusted.read_json(path, MOST_BYTES)
        if not isinstance(data, dict) or data.pop("colofunc_curves", None) != FORMAT:
            raise untrusted.Wrong(f'it does not begin with "colofunc_curves": {FORMAT}')
        return untrusted.build(Curves, data, "curves")
    except (untrusted.Wrong, TopologyError, OSError) as error:
        raise TopologyError(
            f"curves file {str(path)!r} cannot be used: {error}; docs/devices.md says what it holds"
        ) from error
