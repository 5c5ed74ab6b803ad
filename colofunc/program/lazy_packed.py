"""The parts of a lazy weight in a quantizer's format, lazy themselves: packed while they are read, some rows at a time.

    packed_lazily(quantizer, weight, check) -> Quantized

Problem: a file holds a weight of which a rank keeps some rows or columns in 4 bits, and neither the weight nor its
numbers in float32 have room beside what is kept. Idea: a row's numbers depend on this row only, so whoever asks for a
box of a part gets it block of rows after block: read, packed, cut to the columns that are asked for, forgotten. The
parts of a weight are placed one after the other; what stands beside its numbers (scales, zeros: a few hundredths of
them) is kept from the first to the others, so that rows are read once. A scheme that asks something of all rows (awq,
smoothquant: scales of inputs; nvfp4: the largest number) has them read once more in front, by every rank.

A file may hold a weight in a format already. Its lazy tensor has a `PackedSource` as source: asked for values it widens what
it holds, and a scheme of the same format takes the stored parts, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import attrs
import torch
from torch import Tensor

from colofunc.errors import InputError
from colofunc.ops.quantized import Quantized
from colofunc.ops.quantizers import BUILT_IN, Quantizer, Whole, rows_at_once, whole_of, widened_rows
from colofunc.program.lazy import Applied, LazyTensor, Slices, lazy_tensor, make

Check = Callable[[Quantized], Quantized]
RowRange = tuple[int, int]  # first, end


def packed_lazily(quantizer: Quantizer, weight: LazyTensor, check: Check) -> Quantized:
    """`check` sees what some rows were packed to, and raises where that cannot be.

    Raises InputError where the weight is stored in a format, and the scheme has another one or measures weights anew.
    """
    stored = stored_in(weight)
    if stored is not None:
        return stored.taken(quantizer, weight.dtype)
    like = quantizer.pack(torch.empty(weight.shape, dtype=weight.dtype, device="meta"))
    packing = _Packing(quantizer, weight, check)
    parts: dict[str, Any] = {}
    for name, part in zip(quantizer.format.parts, like.parts, strict=True):
        parts[name] = lazy_tensor(part.shape, part.dtype, packing.maker(name, part), packing.reader(name, part))
    if like.input_scale is not None:
        parts["input_scale"] = lazy_tensor(like.input_scale.shape, like.input_scale.dtype, packing.input_scale)
    return attrs.evolve(like, **parts)


@attrs.frozen(eq=False)
class PackedSource:
    """The source of a weight that is stored in a format: what its parts stand for.

    `weight`: of lazy parts. `where`: for errors.
    """

    weight: Quantized
    where: str

    def make(self) -> Tensor:
        """The whole weight."""
        size = self.weight.shape
        rows = self._rows(slice(0, size[0]), slice(0, prod(size[1:])))
        return rows.reshape(size)

    def read(self, box: Slices) -> Tensor | None:
        """A box of a matrix; of a weight with more dims None, as its parts are those of a matrix."""
        return self._rows(*box) if len(box) == 2 else None

    def token(self) -> int:
        """As of other values that come from files."""
        return 0

    def taken(self, quantizer: Quantizer, dtype: torch.dtype) -> Quantized:
        """The weight in a scheme of its own format.

        Raises InputError for another one, which would round numbers a second time.
        """
        calibrated = quantizer.by_name is not None or quantizer.input_scale is not None
        if calibrated or quantizer.form != self.weight.form:
            names = [repr(one.name) for one in BUILT_IN.values() if one.form == self.weight.form]
            raise InputError(
                f"cf.quantize: {self.where} holds a weight in the format {self.weight.form!r}, and the scheme "
                f"{quantizer.name!r} would round it a second time. Try: the scheme {' or '.join(names)}, which takes "
                "its numbers as they are; cf.load(..., device='cpu') for widened weights"
            )
        return attrs.evolve(self.weight, scheme=quantizer.name, dtype=dtype)

    def _rows(self, rows: slice, columns: slice) -> Tensor:
        """Some rows and columns, widened a few rows at a time from parts that are read once."""
        form, total = self.weight.format, prod(self.weight.shape[1:])
        # Columns are cut between groups.
        first, end = columns.start // form.group * form.group, -(-columns.stop // form.group) * form.group
        parts: dict[str, Tensor] = {}
        for name, part in zip(form.parts, self.weight.parts, strict=True):
            width = prod(part.shape[1:])
            cut = (slice(first * width // total, end * width // total),) if part.dim() == 2 else ()
            parts[name] = _box_of(part, (rows, *cut))
        scale = self.weight.input_scale
        if scale is not None:
            scale = _box_of(scale, (slice(first, end),))
        out = torch.empty((rows.stop - rows.start, columns.stop - columns.start), dtype=self.weight.dtype)
        step = rows_at_once(out.shape)
        for row in range(0, len(out), step):
            few: dict[str, Any] = {name: part[row : row + step] for name, part in parts.items()}
            shape = (len(few["data"]), end - first)
            wide = attrs.evolve(self.weight, shape=shape, input_scale=scale, **few).dequantize()
            out[row : row + step] = wide[:, columns.start - first : columns.stop - first]
        return out


def _box_of(part: Tensor, box: Slices) -> Tensor:
    """A box of a part, of a lazy one without the rest where that is possible."""
    found = part.source.read(box) if isinstance(part, LazyTensor) else None
    return make(part)[box] if found is None else found


def stored_in(weight: Tensor) -> PackedSource | None:
    """What holds the weight in a format, where it is such a weight, or one in another dtype; else None."""
    while isinstance(weight, LazyTensor):
        source = weight.source
        if isinstance(source, PackedSource):
            return source
        if not isinstance(source, Applied) or source.func not in SAME_NUMBERS:
            return None
        weight = source.args[0]
    return None


SAME_NUMBERS = {torch.ops.aten.clone.default, torch.ops.aten._to_copy.default}


@attrs.frozen(eq=False)
class _Packing:
    """One weight.

    `beside`: rows -> parts other than the numbers, which were made with these and have not been asked for yet.

    `wholes`: what the scheme asks of all rows, once it is known.
    """

    quantizer: Quantizer
    weight: LazyTensor
    check: Check
    beside: dict[RowRange, dict[str, Tensor]] = attrs.field(factory=dict)
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

    def reader(self, name: str, like: Tensor) -> Callable[[Slices], Tensor | None]:
        """What makes a box of a part; it gives None where the weight can be read as a whole only."""

        def read(box: Slices) -> Tensor | None:
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
            yield widened_rows(block.flatten(1))

    def _read(self, first: int, end: int) -> Tensor | None:
        """Some rows; None where the weight can be read as a whole only."""
        every = tuple(slice(0, size) for size in self.weight.shape[1:])
        return self.weight.source.read((slice(first, end), *every))

    def _known(self, name: str, rows: RowRange) -> Tensor | None:
        kept = self.beside.get(rows, {})
        found = kept.pop(name, None)
        if not kept:
            self.beside.pop(rows, None)
        return found

    def _collected(
        self,
        name: str,
        like: Tensor,
        rows: RowRange,
        of_rows: Callable[[int, int], Tensor | None],
        columns: Slices = (),
    ) -> Tensor | None:
        """Some rows of a part, of which `columns`, from blocks of the weight's rows.

        None where these cannot be read.
        """
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

    def _blocks(self, rows: RowRange) -> Iterator[RowRange]:
        step = rows_at_once(self.weight.shape)
        for first in range(rows[0], rows[1], step):
            yield first, min(rows[1], first + step)
