"""The parts of a lazy weight in a quantizer's format, lazy themselves: packed while they are read, some rows at a time.

    packed_lazily(quantizer, weight, check) -> Quantized

Problem: a file holds a weight of which a rank keeps some rows or columns in 4 bits, and neither the weight nor its numbers in float32 have
room beside what is kept. Idea: a row's numbers depend on this row only, so whoever asks for a box of a part gets it block of rows after
block: read, packed, cut to the columns that are asked for, forgotten. The parts of a weight are placed one after the other; what stands
beside its numbers (scales, zeros: a few hundredths of them) is kept from the first to the others, so that rows are read once. A scheme
that asks something of all rows (awq, smoothquant: scales of inputs; nvfp4: the largest number) has them read once more in front, by every
rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import attrs
import torch
from torch import Tensor

from colofunc.ops.quantized import Quantized
from colofunc.ops.quantizers import Quantizer, Whole, rows_at_once, whole_of, widened
from colofunc.program.lazy import Box, LazyTensor, lazy_tensor, make

Check = Callable[[Quantized], Quantized]
Rows = tuple[int, int]  # first, end


def packed_lazily(quantizer: Quantizer, weight: LazyTensor, check: Check) -> Quantized:
    """`check` sees what some rows were packed to, and raises where that cannot be."""
    like = quantizer.pack(torch.empty(weight.shape, dtype=weight.dtype, device="meta"))
    packing = _Packing(quantizer, weight, check)
    parts: dict[str, Any] = {}
    for name, part in zip(quantizer.format.parts, like.parts, strict=True):
        parts[name] = lazy_tensor(part.shape, part.dtype, packing.maker(name, part), packing.reader(name, part))
    if like.input_scale is not None:
        parts["input_scale"] = lazy_tensor(like.input_scale.shape, like.input_scale.dtype, packing.input_scale)
    return attrs.evolve(like, **parts)


@attrs.frozen(eq=False)
class _Packing:
    """One weight. `beside`: rows -> parts other than the numbers, which were made with these and have not been asked for yet.

    `wholes`: what the scheme asks of all rows, once it is known.
    """

    quantizer: Quantizer
    weight: LazyTensor
    check: Check
    beside: dict[Rows, dict[str, Tensor]] = attrs.field(factory=dict)
    wholes: list[Whole] = attrs.field(factory=list)

    def maker(self, name: str, like: Tensor) -> Callable[[], Tensor]:
        """What makes all of a part."""

        def whole() -> Tensor:
            rows = 0, self.weight.shape[0]
            known = self._known(name, rows)
            if known is not None:
                return known
            value = make(self.weight)
            found = self._collected(name, like, rows, lambda first, end: value[first:end])
            assert found is not None
            return found

        return whole

    def reader(self, name: str, like: Tensor) -> Callable[[Box], Tensor | None]:
        """What makes a box of a part; it gives None where the weight can be read as a whole only."""
        def read(box: Box) -> Tensor | None:
            rows = box[0].start, box[0].stop
            known = self._known(name, rows)
            if known is not None:
                return known[(slice(None), *box[1:])].clone()
            return self._collected(name, like, rows, self._read, box[1:])

        return read

    def input_scale(self) -> Tensor:
        """The scale of the weight's inputs."""
        scale = self._whole().input_scale
        assert scale is not None
        return scale.clone()

    def _whole(self) -> Whole:
        """What the scheme asks of all rows: they are read, block after block, before the first of them is packed."""
        if not self.wholes:
            self.wholes.append(whole_of(self.quantizer, self._all_rows, prod(self.weight.shape[1:])))
        return self.wholes[0]

    def _all_rows(self) -> Iterator[Tensor]:
        whole: Tensor | None = None
        for first, end in self._blocks((0, self.weight.shape[0])):
            block = self._read(first, end) if whole is None else whole[first:end]
            if block is None:
                whole = make(self.weight)
                block = whole[first:end]
            yield widened(block.flatten(1))

    def _read(self, first: int, end: int) -> Tensor | None:
        """Some rows; None where the weight can be read as a whole only."""
        every = tuple(slice(0, size) for size in self.weight.shape[1:])
        return self.weight.source.read((slice(first, end), *every))

    def _known(self, name: str, rows: Rows) -> Tensor | None:
        kept = self.beside.get(rows, {})
        found = kept.pop(name, None)
        if not kept:
            self.beside.pop(rows, None)
        return found

    def _collected(
        self, name: str, like: Tensor, rows: Rows, of_rows: Callable[[int, int], Tensor | None], columns: Box = ()
    ) -> Tensor | None:
        """Some rows of a part, of which `columns`, from blocks of the weight's rows; None where these cannot be read."""
        out = torch.empty(like[(slice(*rows), *columns)].shape, dtype=like.dtype)
        whole = self._whole() if self.quantizer.asks_all_rows else None
        beside: dict[str, list[Tensor]] = {}
        for first, end in self._blocks(rows):
            block = of_rows(first, end)
            if block is None:
                return None
            packed = self.check(self.quantizer.pack(block, whole))
            parts = dict(zip(self.quantizer.format.parts, packed.parts, strict=True))
            out[first - rows[0] : end - rows[0]] = parts.pop(name)[(slice(None), *columns)]
            if name == "data":
                for other, part in parts.items():
                    beside.setdefault(other, []).append(part)
        if beside:
            self.beside[rows] = {other: torch.cat(pieces) for other, pieces in beside.items()}
        return out

    def _blocks(self, rows: Rows) -> Iterator[Rows]:
        step = rows_at_once(self.weight.shape)
        for first in range(rows[0], rows[1], step):
            yield first, min(rows[1], first + step)
