"""What a layout of quantized weights is made of: the tensors of one layer, checked, and read by boxes.

    PackedLayout("mine", form="int8", marks=("my_scale",), needs=("my_data", "my_scale"), ...)      # see packed_layouts.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from colofunc.errors import CheckpointError
from colofunc.functional.checkpoint.files import dtype_name
from colofunc.functional.checkpoint.place import Entry
from colofunc.ops.quantized import Quantized
from colofunc.program.lazy import LazyTensor, Slices, lazy_tensor
from colofunc.spec.regions import Region

WHOLE = "a copy of the folder that is whole, or the folder that it was made of"


@attrs.frozen(eq=False)
class Tensors:
    """The tensors of one layer of a folder.

    `entries`: by what follows "layer." in their names. `config`: "quantization_config".
    """

    folder: Path
    layer: str
    entries: Mapping[str, Entry]
    config: Mapping[str, Any]

    @property
    def file(self) -> str:
        """The file that holds the first of them."""
        return self._file(next(iter(self.entries)))

    def _file(self, key: str) -> str:
        entry = self.entries.get(key, next(iter(self.entries.values())))
        name = str(entry.pieces[0][1].file)
        return str((self.folder.parent if self.folder.is_file() else self.folder) / name)

    def wrong(self, key: str, what: str, attempt: str = WHOLE) -> CheckpointError:
        """An error about one of them."""
        return CheckpointError(f"{self._file(key)}: {f'{self.layer}.{key}'!r} {what}. Try: {attempt}")

    def dtype(self, key: str) -> torch.dtype | None:
        """The dtype of one of them; None where it is not there."""
        entry = self.entries.get(key)
        return None if entry is None else entry.dtype

    def checked(self, key: str, dtypes: Sequence[torch.dtype], shape: Sequence[int] | None = None) -> Entry:
        """A tensor that is of one of these dtypes, and of this shape where one is given. Raises CheckpointError."""
        entry = self.entries[key]
        if entry.dtype not in dtypes:
            wanted = " or ".join(dtype_name(dtype) for dtype in dtypes)
            raise self.wrong(key, f"is {dtype_name(entry.dtype)}, and should be {wanted}")
        if shape is not None and entry.shape != tuple(shape):
            raise self.wrong(key, f"has shape {entry.shape}, and the weight needs {tuple(shape)}")
        return entry

    def matrix(self, key: str, dtypes: Sequence[torch.dtype]) -> Entry:
        """A tensor with two dims."""
        entry = self.checked(key, dtypes)
        if len(entry.shape) != 2 or 0 in entry.shape:
            raise self.wrong(key, f"has shape {entry.shape}, and should be a matrix")
        return entry

    def whole(self, key: str, dtypes: Sequence[torch.dtype], shape: Sequence[int] | None = None) -> Tensor:
        """All of a small one, now."""
        entry = self.checked(key, dtypes, shape)
        return entry.region(Region.whole(entry.shape))

    def finite(self, key: str, scales: Tensor) -> Tensor:
        """Scales that were read. Raises CheckpointError where one is not finite."""
        if not bool(scales.isfinite().all()):
            raise self.wrong(key, "has NaN or infinite scales")
        return scales


ReadPacked = Callable[[Tensors], Quantized]
WritePacked = Callable[[str, Quantized], Mapping[str, Tensor]]


def _without_config(skipped: Sequence[str], dtype: torch.dtype) -> dict[str, Any]:
    return {}


def _nothing_more(stored: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, str]:
    return {}


@attrs.frozen(eq=False)
class PackedLayout:
    """How a library saves quantized weights.

    `form`: the format that they are read as; `forms`: those that can be written. `marks`: what follows "layer." in the
    name of a tensor that only such weights have. `needs`: the tensors without which there is no weight. `keys`: all
    that belong to it. `read(tensors)`: the weight, of lazy parts, float32. `write(name, weight)`: the tensors by key,
    of a weight whose parts have data; raises InputError where the layout cannot hold it. `config(skipped, dtype)`:
    "quantization_config" of a model in which the layers `skipped` stay as they are. `claims`: whether these tensors,
    some of them with its marks, are such a weight. Other models may have parameters of these names, so dtypes decide; a
    tensor that is missing or misshapen is left to `read`. `header(stored, dtype)`: what a file with these tensors says
    in its header beside them; dtype: of the weights before.
    """

    name: str
    form: str
    forms: tuple[str, ...]
    marks: tuple[str, ...]
    needs: tuple[str, ...]
    keys: tuple[str, ...]
    read: ReadPacked
    claims: Callable[[Tensors], bool]
    write: WritePacked | None = None
    config: Callable[[Sequence[str], torch.dtype], dict[str, Any]] = _without_config
    header: Callable[[Mapping[str, Tensor], torch.dtype], dict[str, str]] = _nothing_more


def part(shape: Sequence[int], dtype: torch.dtype, read: Callable[[Slices], Tensor]) -> LazyTensor:
    """A part of a weight, read by boxes; the whole is the largest of them."""

    def whole() -> Tensor:
        return read(tuple(slice(0, size) for size in shape)).contiguous()

    def box(where: Slices) -> Tensor:
        return read(where).contiguous()

    return lazy_tensor(shape, dtype, whole, box)


def boxed(entry: Entry, box: Slices) -> Tensor:
    """A box of a stored tensor."""
    return entry.region(Region.box([s.start for s in box], [s.stop - s.start for s in box]))


def reshaped(entry: Entry, shape: Sequence[int]) -> Entry:
    """The same bytes as a tensor of another shape; a file keeps them in row-major order."""
    region = Region.whole(shape)
    (_, piece), *_ = entry.pieces
    return attrs.evolve(entry, shape=tuple(shape), pieces=((region, attrs.evolve(piece, region=region)),))
