"""Sizes that a checkpoint claims, held against the bytes that are there, before any memory is asked for.

Problem: a file says that a tensor has 10^15 elements, or that a piece of it is a range of 2^60 indices, and whoever believes
it asks for that memory. Idea: a piece has no more elements than its bytes, its bytes lie in its file, and the pieces of a
tensor have no fewer elements than the tensor, so that what is asked for is bounded by the size of the folder.

    Bounds(folder).check("w", (4, 8), torch.float32, [(region, "rank-00000-00000.safetensors", 128, 128)])
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path

import attrs
import torch

from colofunc.errors import CheckpointError
from colofunc.spec.layout import Dim, make_layout
from colofunc.spec.regions import Region, Span

PADDED = 4  # what the padded parts of a tensor hold is at most so many times its elements,
PADDING = 1 << 16  # and so many more, of one that is smaller than the number of ranks

Stored = tuple[Region, str, int, int]  # region, file, first byte, bytes


@attrs.frozen
class Bounds:
    """The files of one folder and their sizes."""

    folder: Path
    _sizes: dict[str, int | None] = attrs.field(factory=dict)

    def check(self, name: str, shape: Sequence[int], dtype: torch.dtype, pieces: Sequence[Stored]) -> None:
        """Raise CheckpointError where the pieces of a tensor cannot be what the folder says."""
        if any(n < 0 for n in shape):
            raise CheckpointError(f"{self.folder}: {name!r} has shape {tuple(shape)}; load another checkpoint")
        left = prod(shape)
        for region, file, start, nbytes in pieces:
            spans_fit = len(region.spans) == len(shape) and all(_fits(span, n) for span, n in zip(region.spans, shape, strict=True))
            if not spans_fit or region.numel * dtype.itemsize > nbytes:
                raise CheckpointError(f"{self.folder / file}: a piece of {name!r} {tuple(shape)} has {nbytes} bytes, which cannot hold it")
            size = self._size(file)
            if size is not None and start + nbytes > size:
                raise CheckpointError(
                    f"{self.folder / file} is truncated: {name!r} should reach byte {start + nbytes}, the file has {size}; load another "
                    "checkpoint, or copy this one again"
                )
            left -= region.numel
        if left > 0:
            raise CheckpointError(
                f"{name!r}: {left} of {prod(shape)} elements {Region.whole(shape).text()} are in no file; it is incomplete"
            )

    def check_dims(self, name: str, shape: Sequence[int], dims: Sequence[Dim]) -> None:
        """Raise CheckpointError where the layout that a tensor was saved in has far more room than the tensor."""
        make_layout(tuple(dims), tuple(shape))
        sizes = [n for dim in dims for n, _ in dim]
        if any(n < 0 for n in sizes) or prod(sizes) > PADDED * prod(shape) + PADDING:
            raise CheckpointError(f"{self.folder}: {name!r} {tuple(shape)} was saved in parts {sizes}, which have more room than it needs")

    def _size(self, file: str) -> int | None:
        """None where there is no such file, which is said when it is read."""
        if file not in self._sizes:
            try:
                self._sizes[file] = (self.folder / file).stat().st_size
            except OSError:
                self._sizes[file] = None
        return self._sizes[file]


def _fits(span: Span, size: int) -> bool:
    """Whether a span is within a dim; padding at its end may reach over it as far as twice the dim."""
    count = prod(n for n, _ in span.loops)
    numbers = [span.start, span.limit or 0, *(n for loop in span.loops for n in loop)]
    if any(n < 0 for n in numbers) or count > 2 * size + PADDING:
        return False
    if count == 0:
        return True
    last = span.start + sum((n - 1) * stride for n, stride in span.loops)
    return last < size or (span.limit is not None and span.limit <= size)


__all__ = ["Bounds"]
