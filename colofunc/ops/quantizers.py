"""Quantizers: how the numbers of a quantized weight are chosen. These round to nearest; those that have measured inputs
of layers are in `colofunc/ops/gptq.py` and `colofunc/ops/input_scales.py`.

    int8         a row's largest is 127                                       |w - w'| <= scale / 2
    int8-dynamic the same, and inputs of linear layers in int8 too (`colofunc/ops/quantized_inputs.py`)
    fp8          a row's largest is 448, the largest of e4m3fn
    fp8-e5m2     a row's largest is 57344, the largest of e5m2
    fp8-g128     as fp8, for each 128 columns of a row
    fp8-dynamic, fp8-g128-dynamic: as fp8 and fp8-g128, and inputs of linear layers in float8 too
                 (`colofunc/ops/fp8_products.py`)
    int4-g128    groups of 128 columns: 0 to 15 between their least and largest, with 0 exact
    nf4          blocks of 64 columns: the nearest of the 16 levels of a normal variable; the blocks' scales in 8 bits
    nf4-g64      the same blocks and levels, with their scales in float32, as bitsandbytes rounds without double quantization
    mxfp8        blocks of 32 columns: e4m3fn times a power of two (`colofunc/ops/small_floats.py`)
    nvfp4        blocks of 16 columns: e2m1 times a scale in e4m3fn, times one of the whole weight

    Quantizer("int8", form="int8", quantize=int8)        # a record; plugins give theirs with the hook `colofunc_quantizers`

What a function does it does row by row, in torch operators whose result does not depend on an order (maximum, division,
rounding): the numbers of a row are the same whichever rows are quantized with it, so a rank may quantize its own. What
is of the whole weight (scales of inputs, its largest number) is found of all rows before the first of them is
quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import attrs
import torch
from torch import Tensor

from colofunc import compat
from colofunc.errors import InputError, PluginError, plugin_faults
from colofunc.ops.fp8_products import FORMS as FLOAT8_FORMS
from colofunc.ops.quantized import (
    FORMATS,
    NF4_LEVELS,
    Format,
    Quantized,
    fp8_bits,
    fp8_e5m2_bits,
    nf4_scales,
    packed_nibbles,
)
from colofunc.ops.small_floats import E5M2, LARGEST, mxfp8_numbers, nvfp4_numbers

QuantizeFn = Callable[..., Mapping[str, Tensor]]
InputScale = Callable[[Iterable[Tensor]], Tensor]
BLOCK_BYTES = 4 << 20
"""A weight is packed so much of it in float32 at a time, where a single row is not more: what is held meanwhile is a
few times that."""

OUTLIERS = 6.0
"""Inputs of this size and more are not rounded by int8-dynamic, as in LLM.int8()."""


@attrs.frozen(eq=False)
class Whole:
    """What a scheme has found of all rows of a weight.

    `input_scale`: (i,), see `Quantizer`. `largest`: () max |w|, of scaled columns.
    """

    input_scale: Tensor | None = None
    largest: Tensor | None = None


@attrs.frozen
class Quantizer:
    """A scheme: which format its weights have, and how their numbers are chosen.

    `quantize(weight)`: (o, i) of float32 or float64 -> the parts of the format by name ("data", "scale", ...); a row's
    result may depend on this row only. `form`: "int8", "fp8", "fp8_e5m2", "fp8_g128", "int4", "nf4", "nf4_g64", "mxfp8"
    or "nvfp4" (`ops/quantized.py`). `outliers`: inputs of linear layers are rounded to int8 too, row by row while the
    step runs, but for those that are at least so large; None: they are not. `float8_inputs`: inputs of linear layers
    are rounded to float8 too, with scales as the format has them, and products are in float8; of the formats "fp8" and
    "fp8_g128" only, and without `outliers`. `input_scale(blocks)`: a weight as blocks of its rows, (some, i) each in
    order -> (i,) float32, positive: columns are multiplied by it before `quantize`, and inputs divided by it; None: by
    nothing. `by_largest`: `quantize(weight, largest)` is given max |w| of the whole weight too, () in the dtype of its
    rows. `by_name`: weight's name -> the scheme for it, of the same name and form, of schemes that have measured
    something of each weight; its `quantize`, `outliers`, `float8_inputs` and `input_scale` count for this weight.
    """

    name: str
    form: str = attrs.field(kw_only=True)
    quantize: QuantizeFn = attrs.field(kw_only=True, eq=False)
    outliers: float | None = attrs.field(default=None, kw_only=True)
    float8_inputs: bool = attrs.field(default=False, kw_only=True)
    input_scale: InputScale | None = attrs.field(default=None, kw_only=True)
    by_largest: bool = attrs.field(default=False, kw_only=True)
    by_name: Callable[[str], Quantizer] | None = attrs.field(default=None, kw_only=True)

    @form.validator
    def _is_known(self, attribute: object, value: str) -> None:
        if value not in FORMATS:
            raise InputError(f"Quantizer {self.name!r}: there is no format {value!r}. Try: one of {', '.join(FORMATS)}")

    @outliers.validator
    def _is_positive(self, attribute: object, value: float | None) -> None:
        if value is not None and not value > 0:
            raise InputError(
                f"Quantizer {self.name!r}: outliers={value!r} rounds no input. Try: 6.0, or None for inputs as they are"
            )

    @float8_inputs.validator
    def _is_possible(self, attribute: object, value: bool) -> None:
        if value and self.form not in FLOAT8_FORMS:
            raise InputError(
                f"Quantizer {self.name!r}: float8_inputs=True multiplies in float8, and its weights are in the format "
                f"{self.form!r}. Try: form= of {', '.join(FLOAT8_FORMS)}"
            )
        if value and self.outliers is not None:
            raise InputError(
                f"Quantizer {self.name!r}: outliers={self.outliers!r} rounds inputs to int8, and float8_inputs=True to "
                "float8. Try: one of them"
            )

    @property
    def rounds_inputs(self) -> bool:
        """Whether inputs of linear layers are rounded while a step runs."""
        return self.float8_inputs or self.outliers is not None

    @property
    def format(self) -> Format:
        """The format of its weights."""
        return FORMATS[self.form]

    def named(self, name: str) -> Quantizer:
        """The scheme for a weight of this name. Raises InputError where `by_name` gives none, or another one."""
        if self.by_name is None:
            return self
        found: object = self.by_name(name)
        call = f"Quantizer {self.name!r}: by_name({name!r})"
        wanted = f"Quantizer({self.name!r}, form={self.form!r}, quantize=...)"
        if not isinstance(found, Quantizer):
            kind = type(found).__name__
            raise InputError(f"{call} returned a {kind}. Try: by_name= that returns the scheme for a weight, {wanted}")
        if (found.name, found.form) != (self.name, self.form):
            raise InputError(
                f"{call} returned the scheme {found.name!r} in the format {found.form!r}, and all weights of a scheme "
                f"have its name and format. Try: {wanted}"
            )
        return attrs.evolve(found, by_name=self.by_name)  # by which `packed` knows that it is calibrated

    def refuses(self, shape: tuple[int, ...]) -> str:
        """Why a weight of this shape cannot be taken, "" where it can."""
        if len(shape) < 2:
            return f"{self.name} takes matrices, and convolutions as matrices of their rows"
        group, columns = self.format.group, prod(shape[1:])
        if columns % group:
            return f"{self.name} takes groups of {group} columns, and {columns} is no multiple of it"
        return "" if prod(shape) else f"{self.name} takes weights with elements"

    @property
    def asks_all_rows(self) -> bool:
        """Whether something of all rows of a weight is found before the first of them is packed."""
        return self.input_scale is not None or self.by_largest

    def pack(self, weight: Tensor, whole: Whole | None = None) -> Quantized:
        """The weight in this scheme, some rows after the others.

        `whole`: where `weight` is some rows of a larger one, what was found of the whole; None: it is found here.
        """
        matrix = weight.detach().flatten(1)
        if whole is None:
            whole = self._whole(matrix)
        step = rows_at_once(matrix.shape)
        # A tensor of another kind (on ranks, without data) is taken as it is: its rows need not be in one place.
        if matrix.shape[0] <= step or matrix.is_meta or type(matrix) is not Tensor:
            parts = self._numbers(matrix, whole)
        else:
            parts = {}
            for first in range(0, matrix.shape[0], step):
                for name, part in self._numbers(matrix[first : first + step], whole).items():
                    if name not in parts:
                        parts[name] = part.new_empty((matrix.shape[0], *part.shape[1:]))
                    parts[name][first : first + step] = part
        return Quantized(
            self.name, self.form, tuple(weight.shape), weight.dtype, **parts, input_scale=whole.input_scale
        )

    def _numbers(self, rows: Tensor, whole: Whole) -> dict[str, Tensor]:
        """The parts of some rows. Raises PluginError where `quantize` fails, or gives other parts."""
        rows = _scaled(rows, whole.input_scale)
        what = f"colofunc_quantizers: quantize of Quantizer {self.name!r}"
        wanted = f"a dict of the parts of {self.form!r}: {', '.join(map(repr, self.format.parts))}"
        with plugin_faults(what, wanted):
            parts = dict(self.quantize(rows, whole.largest) if self.by_largest else self.quantize(rows))
        wrong = [name for name, part in parts.items() if not isinstance(part, Tensor)]
        if parts.keys() != set(self.format.parts) or wrong:
            has = ", ".join(map(repr, parts)) or "nothing"
            raise PluginError(f"{what} gave {has}{', which are no tensors' if wrong else ''}. Try: {wanted}")
        return parts

    def _whole(self, matrix: Tensor) -> Whole:
        """What the scheme asks of all rows of a weight."""
        if not self.asks_all_rows:
            return Whole()
        if matrix.is_meta or isinstance(matrix, compat.FakeTensor):
            scale = None if self.input_scale is None else matrix.new_empty(matrix.shape[1], dtype=torch.float32)
            return Whole(scale, widened_rows(matrix.new_empty(())) if self.by_largest else None)
        if type(matrix) is not Tensor:  # on ranks, which tell one another their largest
            return whole_of(self, lambda: [matrix], matrix.shape[1])
        step = rows_at_once(matrix.shape)

        def blocks() -> Iterator[Tensor]:
            for first in range(0, matrix.shape[0], step):
                yield widened_rows(matrix[first : first + step])

        return whole_of(self, blocks, matrix.shape[1])


NOT_FINITE = "NaN or infinite numbers"


def _no_scale(scale: object, columns: int) -> str:
    """Why this is no scale of so many inputs, "" where it is one."""
    if not isinstance(scale, Tensor):
        return f"a {type(scale).__name__}"
    if (scale.dtype, tuple(scale.shape)) != (torch.float32, (columns,)):
        return f"{_said(scale.dtype)} {tuple(scale.shape)}"
    if not bool(scale.isfinite().all()):
        return NOT_FINITE
    return "" if bool((scale > 0).all()) else "numbers that are not above 0"


def whole_of(quantizer: Quantizer, blocks: Callable[[], Iterable[Tensor]], columns: int) -> Whole:
    """What a scheme asks of all rows of a weight, of `blocks()` of them.

    Raises InputError where its `input_scale` gives no scale.
    """
    scale = None if quantizer.input_scale is None else _scale_of_inputs(quantizer, blocks, columns)
    if not quantizer.by_largest:
        return Whole(scale)
    largest: Tensor | None = None
    for rows in blocks():
        found = _scaled(rows, scale).abs().amax()
        largest = found if largest is None else torch.maximum(largest, found)
    return Whole(scale, largest)


def _scaled(rows: Tensor, input_scale: Tensor | None) -> Tensor:
    """Rows as quantizers are given them."""
    return widened_rows(rows) if input_scale is None else widened_rows(rows) * input_scale


def _scale_of_inputs(quantizer: Quantizer, blocks: Callable[[], Iterable[Tensor]], columns: int) -> Tensor:
    """What `quantizer.input_scale` gives for a weight, of `blocks()` of its rows.

    Raises InputError where it is no scale of `columns` inputs. Where the weight itself is not finite, its scale may be
    so too: whoever knows the weight's name says that.
    """
    assert quantizer.input_scale is not None
    scale: Any = quantizer.input_scale(blocks())
    wrong = _no_scale(scale, columns)
    if wrong == NOT_FINITE and not all(bool(rows.isfinite().all()) for rows in blocks()):
        wrong = ""
    if wrong:
        should = f"float32 ({columns},), finite and above 0"
        raise InputError(
            f"Quantizer {quantizer.name!r}: input_scale= returned {wrong}. Try: input_scale= that returns {should}"
        )
    found: Tensor = scale
    return found


def widened_rows(rows: Tensor) -> Tensor:
    """Rows in the dtype in which quantizers are given them: float32, or float64 where they are."""
    return rows.to(torch.promote_types(rows.dtype, torch.float32))


def rows_at_once(shape: Sequence[int]) -> int:
    """How many rows of a weight are packed at a time."""
    return max(1, BLOCK_BYTES // max(1, 4 * prod(shape[1:])))


def _steps(largest: Tensor, most: float) -> Tensor:
    """The scale at which `largest` becomes `most`, as it is kept. A row of zeros has the scale 0."""
    # By a tensor: divided by a number, a card multiplies by its rounded inverse, and would give other bits than the
    # host.
    return (largest / torch.full_like(largest, most)).to(torch.float32)


def _divided(weight: Tensor, scale: Tensor) -> Tensor:
    """The weight in units of its scales; zeros where a scale is 0."""
    scale = scale.to(weight.dtype)
    return weight / torch.where(scale == 0, torch.ones_like(scale), scale)


def int8(weight: Tensor) -> dict[str, Tensor]:
    """Per row, symmetric: -127 to 127."""
    scale = _steps(weight.abs().amax(1), 127.0)
    numbers = _divided(weight, scale.unsqueeze(1)).round().clamp(-127, 127)
    return {"data": numbers.to(torch.int8), "scale": scale}


def fp8(weight: Tensor) -> dict[str, Tensor]:
    """Per row: float8_e4m3fn, of which 448 is the largest. The bits are kept as uint8, which every backend can send."""
    scale = _steps(weight.abs().amax(1), 448.0)
    return {"data": fp8_bits(_divided(weight, scale.unsqueeze(1))), "scale": scale}


def fp8_e5m2(weight: Tensor) -> dict[str, Tensor]:
    """As `fp8` in float8_e5m2, which has a bit less and reaches further below a row's largest: to 2^-32 of it, in place
    of 2^-18.
    """
    scale = _steps(weight.abs().amax(1), LARGEST[E5M2])
    return {"data": fp8_e5m2_bits(_divided(weight, scale.unsqueeze(1))), "scale": scale}


def fp8_g128(weight: Tensor) -> dict[str, Tensor]:
    """As `fp8`, with a scale for each group of columns of a row."""
    groups = weight.unflatten(1, (-1, FORMATS["fp8_g128"].group))
    scale = _steps(groups.abs().amax(2), 448.0)
    return {"data": fp8_bits(_divided(groups, scale.unsqueeze(2)).flatten(1)), "scale": scale}


def int4(weight: Tensor) -> dict[str, Tensor]:
    """Per group of columns, from its least to its largest number, 0 being among them."""
    groups = weight.unflatten(1, (-1, FORMATS["int4"].group))
    scale, zero = int4_grid(groups)
    numbers = int4_numbers(groups, scale, zero)
    return {"data": packed_nibbles(numbers.flatten(1)), "scale": scale, "zero": zero.to(torch.uint8)}


def int4_grid(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Scale (float32) and zero of each of the groups (..., columns): 0 to 15 between their least and largest number, 0
    being among them.
    """
    least, largest = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = _steps(largest - least, 15.0)
    return scale, _divided(-least, scale).round().clamp(0, 15)


def int4_numbers(groups: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """The nearest of 0 to 15, (..., columns), on a grid (...,)."""
    return (_divided(groups, scale.unsqueeze(-1)).round() + zero.unsqueeze(-1)).clamp(0, 15)


def nf4(weight: Tensor) -> dict[str, Tensor]:
    """Per block of columns, and the scales of a row's blocks in 8 bits against the largest of them."""
    blocks = weight.unflatten(1, (-1, FORMATS["nf4"].group))
    largest = blocks.abs().amax(2)
    outer = largest.amax(1).to(torch.float32)
    scale = (_divided(largest, outer.unsqueeze(1)) * 255.0).round().clamp(0, 255).to(torch.uint8)
    relative = _divided(blocks, nf4_scales(scale, outer, weight.dtype).unsqueeze(2))
    return {"data": _nearest_levels(relative), "scale": scale, "outer": outer}


def nf4_g64(weight: Tensor) -> dict[str, Tensor]:
    """Per block of columns, whose largest is 1."""
    blocks = weight.unflatten(1, (-1, FORMATS["nf4_g64"].group))
    scale = blocks.abs().amax(2).to(torch.float32)
    return {"data": _nearest_levels(_divided(blocks, scale.unsqueeze(2))), "scale": scale}


def _nearest_levels(relative: Tensor) -> Tensor:
    """Which of the levels of NF4 are nearest to numbers (o, blocks, columns), two in a byte."""
    levels = torch.tensor(NF4_LEVELS, dtype=relative.dtype)
    between = (levels[1:] + levels[:-1]) / 2
    return packed_nibbles(torch.bucketize(relative.contiguous(), between).flatten(1))


def mxfp8(weight: Tensor) -> dict[str, Tensor]:
    """Per block of 32 columns: e4m3fn, and a power of two."""
    data, scale = mxfp8_numbers(weight)
    return {"data": data, "scale": scale}


def nvfp4(weight: Tensor, largest: Tensor) -> dict[str, Tensor]:
    """Per block of 16 columns: e2m1, and a scale in e4m3fn, which is relative to the largest number of the weight."""
    data, scale, outer = nvfp4_numbers(weight, largest)
    return {"data": data, "scale": scale, "outer": outer}


BUILT_IN: Mapping[str, Quantizer] = {
    one.name: one
    for one in (
        Quantizer("int8", form="int8", quantize=int8),
        Quantizer("int8-dynamic", form="int8", quantize=int8, outliers=OUTLIERS),
        Quantizer("int4-g128", form="int4", quantize=int4),
        Quantizer("nf4", form="nf4", quantize=nf4),
        Quantizer("nf4-g64", form="nf4_g64", quantize=nf4_g64),
        Quantizer("fp8", form="fp8", quantize=fp8),
        Quantizer("fp8-e5m2", form="fp8_e5m2", quantize=fp8_e5m2),
        Quantizer("fp8-g128", form="fp8_g128", quantize=fp8_g128),
        Quantizer("fp8-dynamic", form="fp8", quantize=fp8, float8_inputs=True),
        Quantizer("fp8-g128-dynamic", form="fp8_g128", quantize=fp8_g128, float8_inputs=True),
        Quantizer("mxfp8", form="mxfp8", quantize=mxfp8),
        Quantizer("nvfp4", form="nvfp4", quantize=nvfp4, by_largest=True),
    )
}


def misfit(weight: Quantized) -> str:
    """Which part of a weight is not what its format has for the weight's shape, "" where all of them are."""
    wanted = _parts_of(weight.form, weight.shape)
    given = [(part.dtype, tuple(part.shape)) for part in weight.parts]
    if len(given) != len(wanted):
        return f"it has {len(given)} parts, and {weight.form} has {len(wanted)}"
    for name, (dtype, shape), (own_dtype, own_shape) in zip(weight.format.parts, given, wanted, strict=True):
        if (dtype, shape) != (own_dtype, own_shape):
            return f"its {name} is {_said(dtype)} {shape}, and {weight.form} has {_said(own_dtype)} {own_shape}"
    scale, columns = weight.input_scale, prod(weight.shape[1:])
    if scale is not None and (scale.dtype, tuple(scale.shape)) != (torch.float32, (columns,)):
        return f"its input_scale is {_said(scale.dtype)} {tuple(scale.shape)}, and that of {columns} columns is float32 ({columns},)"
    return ""


def _said(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@lru_cache(maxsize=1024)
def _parts_of(form: str, shape: tuple[int, ...]) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """(dtype, shape) of each part of a weight of this shape."""
    quantizer = next(one for one in BUILT_IN.values() if one.form == form)
    with compat.disable_modes(), compat.no_function_modes(), torch.no_grad():
        parts = quantizer.pack(torch.empty(shape, device="meta")).parts
    return [(part.dtype, tuple(part.shape)) for part in parts]
