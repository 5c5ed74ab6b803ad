"""Weights in 4 bits with a scale and a zero for each group of columns, eight numbers in an int32, as GPTQ, AWQ and
compressed-tensors save.

    weight = (number - zero) scale, of groups of 128 columns (inputs)

                   gptq                           awq                               pack-quantized
    numbers        qweight (i / 8, o)             qweight (i, o / 8)                weight_packed (o, i / 8)
                   an int32 has 8 inputs          an int32 has 8 outputs: 0, 2, 4,  an int32 has 8 inputs
                                                  6, 1, 3, 5, 7
    zeros          qzeros (g, o / 8), less 1      qzeros (g, o / 8), in that order  weight_zero_point (o / 8, g), 8 where there is none
    scales         scales (g, o)                  scales (g, o)                     weight_scale (o, g)
    else           g_idx (i): the group of each                                     weight_shape (2): o, i
                   input

Bits count from the lowest. With `checkpoint_format` "gptq_v2" in the configuration, GPTQ's zeros are what they are;
otherwise 1 is added to each, in one sum of the int32, as GPTQModel does and undoes it: a zero of 0 takes a one from its
neighbour there, which other readers do not know. Weights with such zeros are read so, and not written.

Sources: AutoGPTQ and GPTQModel (`QuantLinear.pack`, `convert_gptq_v1_to_v2_format`), AutoAWQ (`WQLinear_GEMM`),
compressed-tensors (`pack_to_int32`); transformers saves all three as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from colofunc.errors import InputError
from colofunc.functional.checkpoint.packed_tensors import PackedLayout, Tensors, boxed, part
from colofunc.functional.checkpoint.place import Entry
from colofunc.ops.quantized import FORMATS, Quantized, packed_nibbles, unpacked
from colofunc.program.lazy import Slices

GROUP = FORMATS["int4"].group
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight outputs stands at each place of an int32, from the lowest bits on."""
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""At which place each of eight outputs stands."""
ONES = 0x11111111
"""1 in each of the eight numbers of an int32."""
WORDS = 16
"""int32 of each row that are unpacked at a time where they are turned."""
SCALES = (torch.float16, torch.bfloat16, torch.float32)
INPUTS = ("input_scale", "input_zero_point")
"""What static quantization of inputs has measured. Steps round inputs by their own largest numbers, and would drop
it."""
SHAPES = (torch.int64, torch.int32)
MIDDLE = 8
"""The zero of numbers that are symmetric around it."""


def _nibbles(words: Tensor) -> Tensor:
    """The numbers of int32 (a, b), (a, 8 b), from the lowest bits on."""
    return unpacked(words.contiguous().view(torch.uint8))


def _words(numbers: Tensor) -> Tensor:
    """int32 (a, b) of numbers (a, 8 b)."""
    return packed_nibbles(numbers).view(torch.int32)


def _placed(numbers: Tensor, places: Sequence[int]) -> Tensor:
    """Eight numbers after the others, each eight in another order."""
    return numbers.unflatten(1, (-1, 8))[..., list(places)].flatten(1)


def _eighths(rows: slice) -> tuple[slice, slice]:
    """(which int32 hold these of eight numbers each, where they are in what these hold)."""
    first, end = rows.start // 8, -(-rows.stop // 8)
    return slice(first, end), slice(rows.start - 8 * first, rows.stop - 8 * first)


# ---- shapes ----


def _check_bits(tensors: Tensors, bits: object) -> None:
    if bits not in (4, None):
        raise tensors.wrong(
            "qweight", f"has {bits} bits a number by the configuration, and 4 can be read", "bits=4 when quantizing"
        )


def groups_of(tensors: Tensors, key: str, count: int, columns: int) -> int:
    """How many of our groups have one scale. Raises CheckpointError where groups cannot be ours."""
    if columns % GROUP or columns % count or columns // count % GROUP:
        raise tensors.wrong(
            key,
            f"has {count} groups of {columns} columns, and the format int4 has groups of {GROUP}",
            f"group_size={GROUP} when quantizing",
        )
    return columns // count // GROUP


def _check_rows(tensors: Tensors, key: str, rows: int, attempt: str) -> None:
    """Raises CheckpointError where zeros, packed along rows, would not fill their int32."""
    if rows % 8:
        raise tensors.wrong(key, f"is of {rows} rows, and eight share an int32", attempt)


def _rows_fit(name: str, weight: Quantized, layout: str) -> None:
    """Raises InputError where zeros, packed along rows, would not fill their int32."""
    rows = weight.shape[0]
    if rows % 8:
        raise InputError(
            f"{name!r} has {rows} rows, and the layout {layout!r} packs zeros of eight in an int32. Try: layout=None"
        )


def _weight(
    shape: tuple[int, int],
    data: Callable[[Slices], Tensor],
    scale: Callable[[Slices], Tensor],
    zero: Callable[[Slices], Tensor],
) -> Quantized:
    rows, columns = shape
    return Quantized(
        "int4-g128", "int4", shape, torch.float32,
        data=part((rows, columns // 2), torch.uint8, data),
        scale=part((rows, columns // GROUP), torch.float32, scale),
        zero=part((rows, columns // GROUP), torch.uint8, zero),
    )  # fmt: skip


def of_groups(each: int, columns: slice, read: Callable[[slice], Tensor]) -> Tensor:
    """What our groups `columns` have, of `read(theirs)`: (rows, theirs), where a group of theirs is `each` of ours."""
    ours = torch.arange(columns.start, columns.stop) // each
    theirs = slice(columns.start // each, -(-columns.stop // each))
    return read(theirs)[:, ours - theirs.start]


def _transposed_scales(tensors: Tensors, entry: Entry, each: int, box: Slices) -> Tensor:
    def read(theirs: slice) -> Tensor:
        return boxed(entry, (theirs, box[0])).T.to(torch.float32)

    return tensors.finite("scales", of_groups(each, box[1], read))


def _transposed_zeros(
    entry: Entry, each: int, box: Slices, places: Sequence[int] | None = None, add: int = 0
) -> Tensor:
    """Zeros of (g, o / 8). places: where eight outputs stand in an int32; add: to each int32."""
    words, inside = _eighths(box[0])

    def read(theirs: slice) -> Tensor:
        numbers = _nibbles(boxed(entry, (theirs, words)) + add)
        if places is not None:
            numbers = _placed(numbers, places)
        return numbers[:, inside].T

    return of_groups(each, box[1], read)


# ---- GPTQ ----


def _has_words(tensors: Tensors) -> bool:
    """Whether there are numbers in int32, and nothing beside them that would be the weight already."""
    return "weight" not in tensors.entries and torch.int32 in (tensors.dtype("qweight"), tensors.dtype("qzeros"))


def _read_gptq(tensors: Tensors) -> Quantized:
    _check_bits(tensors, tensors.config.get("bits"))
    version = tensors.config.get("checkpoint_format", "gptq")
    if version not in ("gptq", "gptq_v2"):
        raise tensors.wrong(
            "qweight", f"is in the format {version!r} by the configuration", "checkpoint_format 'gptq' or 'gptq_v2'"
        )
    qweight = tensors.matrix("qweight", (torch.int32,))
    rows, columns = qweight.shape[1], 8 * qweight.shape[0]
    scales = tensors.matrix("scales", SCALES)
    count = scales.shape[0]
    each = groups_of(tensors, "scales", count, columns)
    _check_rows(tensors, "scales", rows, "modules_in_block_to_quantize when quantizing, without this layer")
    tensors.checked("scales", SCALES, (count, rows))
    qzeros = tensors.checked("qzeros", (torch.int32,), (count, rows // 8))
    if "g_idx" in tensors.entries:
        groups = tensors.whole("g_idx", (torch.int32, torch.int64), (columns,))
        if not torch.equal(groups.to(torch.int64), torch.arange(columns) // (each * GROUP)):
            raise tensors.wrong(
                "g_idx", "has columns that are not in the order of their groups", "desc_act=False when quantizing"
            )

    def data(box: Slices) -> Tensor:
        # Two inputs in a byte, the first in its low half, as here: the bytes of an int32 are four of ours.
        first, end = box[1].start // 4, -(-box[1].stop // 4)
        held = boxed(qweight, (slice(first, end), box[0])).contiguous().view(torch.uint8)
        ours = held.unflatten(1, (-1, 4)).permute(1, 0, 2).flatten(1)
        return ours[:, box[1].start - 4 * first : box[1].stop - 4 * first]

    def zero(box: Slices) -> Tensor:
        return _transposed_zeros(qzeros, each, box, add=0 if version == "gptq_v2" else ONES)

    return _weight((rows, columns), data, partial(_transposed_scales, tensors, scales, each), zero)


def _is_gptq(tensors: Tensors) -> bool:
    return _has_words(tensors) and not _is_awq(tensors)


def _write_gptq(name: str, weight: Quantized) -> dict[str, Tensor]:
    _rows_fit(name, weight, "gptq")
    zero = _zeros(weight)
    if bool((zero == 0).any()) or bool((zero > 15).any()):
        raise InputError(
            f"{name!r} has groups whose zero is 0 or 16, which the layout 'gptq' has no code for. Try: layout='awq' or "
            "'pack-quantized'"
        )
    columns = weight.shape[1]
    data = weight.data.unflatten(1, (-1, 4)).permute(1, 0, 2).contiguous().view(torch.int32).squeeze(2)
    return {
        "qweight": data,
        "qzeros": _words((zero - 1).T.contiguous()),
        "scales": _halves(name, weight.scale).T.contiguous(),
        "g_idx": (torch.arange(columns) // GROUP).to(torch.int32),
    }


def _zeros(weight: Quantized) -> Tensor:
    assert weight.zero is not None
    return weight.zero


def _halves(name: str, scale: Tensor) -> Tensor:
    """Scales as these layouts have them. Raises InputError where one is none of them."""
    half = scale.to(torch.float16)
    if not torch.equal(half.to(torch.float32), scale):
        raise InputError(
            f"{name!r} has scales that float16 does not hold, as the layouts 'gptq' and 'awq' do. Try: "
            "layout='pack-quantized', which keeps them in float32"
        )
    return half


def _config_gptq(skipped: Sequence[str], dtype: torch.dtype) -> dict[str, Any]:
    return {
        "quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False, "checkpoint_format": "gptq",
        "modules_to_not_convert": list(skipped),
    }  # fmt: skip


GPTQ = PackedLayout(
    "gptq", form="int4", forms=("int4",), marks=("qweight", "qzeros"), needs=("qweight", "qzeros", "scales"),
    keys=("qweight", "qzeros", "scales", "g_idx"), read=_read_gptq, write=_write_gptq, config=_config_gptq, claims=_is_gptq,
)  # fmt: skip


# ---- AWQ ----


def _is_awq(tensors: Tensors) -> bool:
    """As the configuration says, or else as the shapes do."""
    if not _has_words(tensors):
        return False
    said = tensors.config.get("quant_method")
    if said in ("gptq", "awq"):
        return bool(said == "awq")
    qweight, scales = tensors.entries.get("qweight"), tensors.entries.get("scales")
    if qweight is None or scales is None:
        return False
    return qweight.shape[1:] != scales.shape[1:]


def _read_awq(tensors: Tensors) -> Quantized:
    _check_bits(tensors, tensors.config.get("bits", tensors.config.get("w_bit")))
    version = tensors.config.get("version", "gemm")
    if str(version).lower() != "gemm":
        raise tensors.wrong(
            "qweight", f"is of the version {version!r} by the configuration, and 'gemm' can be read", "version='gemm'"
        )
    qweight = tensors.matrix("qweight", (torch.int32,))
    rows, columns = 8 * qweight.shape[1], qweight.shape[0]
    scales = tensors.matrix("scales", SCALES)
    count = scales.shape[0]
    each = groups_of(tensors, "scales", count, columns)
    tensors.checked("scales", SCALES, (count, rows))
    qzeros = tensors.checked("qzeros", (torch.int32,), (count, rows // 8))

    def data(box: Slices) -> Tensor:
        words, inside = _eighths(box[0])
        held = boxed(qweight, (slice(2 * box[1].start, 2 * box[1].stop), words))
        out = torch.empty((8 * held.shape[1], len(held) // 2), dtype=torch.uint8)
        for first in range(0, held.shape[1], WORDS):  # a few, as single numbers take the room of two
            few = held[:, first : first + WORDS]
            out[8 * first : 8 * (first + few.shape[1])] = packed_nibbles(_placed(_nibbles(few), AWQ_PLACES).T)
        return out[inside]

    def zero(box: Slices) -> Tensor:
        return _transposed_zeros(qzeros, each, box, AWQ_PLACES)

    return _weight((rows, columns), data, partial(_transposed_scales, tensors, scales, each), zero)


def _write_awq(name: str, weight: Quantized) -> dict[str, Tensor]:
    _rows_fit(name, weight, "awq")
    zero = _zeros(weight)
    if bool((zero > 15).any()):
        raise InputError(
            f"{name!r} has groups whose zero is 16, for which the layout 'awq' has no code. Try: layout=None"
        )
    return {
        "qweight": _words(_placed(unpacked(weight.data).T.contiguous(), AWQ_ORDER)),
        "qzeros": _words(_placed(zero.T.contiguous(), AWQ_ORDER)),
        "scales": _halves(name, weight.scale).T.contiguous(),
    }


def _config_awq(skipped: Sequence[str], dtype: torch.dtype) -> dict[str, Any]:
    return {
        "quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": list(skipped),
    }  # fmt: skip


AWQ = PackedLayout(
    "awq", form="int4", forms=("int4",), marks=("qweight", "qzeros"), needs=("qweight", "qzeros", "scales"),
    keys=("qweight", "qzeros", "scales"), read=_read_awq, write=_write_awq, config=_config_awq, claims=_is_awq,
)  # fmt: skip


# ---- compressed-tensors ----


def check_inputs(tensors: Tensors) -> None:
    """Raises CheckpointError where inputs are to be rounded by scales in the folder."""
    for key in INPUTS:
        if key in tensors.entries:
            raise tensors.wrong(
                key,
                "is for static scales of inputs, which are not read",
                "dynamic=True of input_activations when quantizing, or a copy of the folder without such tensors, for "
                "its weights alone",
            )


def _is_packed(tensors: Tensors) -> bool:
    if "weight" in tensors.entries:
        return False
    if "weight_packed" in tensors.entries:
        return tensors.dtype("weight_packed") is torch.int32
    return "weight_scale" in tensors.entries and tensors.dtype("weight_shape") in SHAPES


def _read_packed(tensors: Tensors) -> Quantized:
    check_inputs(tensors)
    shape = tensors.whole("weight_shape", SHAPES, (2,))
    rows, columns = (int(size) for size in shape)
    words = tensors.matrix("weight_packed", (torch.int32,))
    if words.shape != (rows, -(-columns // 8)):
        raise tensors.wrong(
            "weight_packed", f"has shape {words.shape}, and a weight of shape {(rows, columns)} in 4 bits {(rows, -(-columns // 8))}",
            "num_bits=4 when quantizing",
        )  # fmt: skip
    if "weight_g_idx" in tensors.entries:
        raise tensors.wrong(
            "weight_g_idx", "says that columns are not in the order of their groups", "actorder=None when quantizing"
        )
    scales = tensors.matrix("weight_scale", SCALES)
    count = scales.shape[1]
    each = groups_of(tensors, "weight_scale", count, columns)
    tensors.checked("weight_scale", SCALES, (rows, count))
    zeros = None
    if "weight_zero_point" in tensors.entries:
        _check_rows(tensors, "weight_zero_point", rows, "symmetric=True when quantizing, which has no zeros")
        zeros = tensors.checked("weight_zero_point", (torch.int32,), (rows // 8, count))

    def data(box: Slices) -> Tensor:
        first, end = box[1].start // 4, -(-box[1].stop // 4)
        held = boxed(words, (box[0], slice(first, end))).contiguous().view(torch.uint8)
        return held[:, box[1].start - 4 * first : box[1].stop - 4 * first]

    def scale(box: Slices) -> Tensor:
        def read(theirs: slice) -> Tensor:
            return boxed(scales, (box[0], theirs)).to(torch.float32)

        return tensors.finite("weight_scale", of_groups(each, box[1], read))

    def zero(box: Slices) -> Tensor:
        if zeros is None:
            return torch.full([s.stop - s.start for s in box], MIDDLE, dtype=torch.uint8)
        at, inside = _eighths(box[0])

        def read(theirs: slice) -> Tensor:
            return _nibbles(boxed(zeros, (at, theirs)).T).T[inside]

        return of_groups(each, box[1], read)

    return _weight((rows, columns), data, scale, zero)


def _write_packed(name: str, weight: Quantized) -> dict[str, Tensor]:
    _rows_fit(name, weight, "pack-quantized")
    zero = _zeros(weight)
    if bool((zero > 15).any()):
        raise InputError(
            f"{name!r} has groups whose zero is 16, for which the layout 'pack-quantized' has no code. Try: layout=None"
        )
    return {
        "weight_packed": weight.data.contiguous().view(torch.int32),
        "weight_scale": weight.scale,
        "weight_zero_point": _words(zero.T.contiguous()).T.contiguous(),
        "weight_shape": torch.tensor(weight.shape),
    }


def _config_packed(skipped: Sequence[str], dtype: torch.dtype) -> dict[str, Any]:
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": False,
        "strategy": "group",
        "group_size": GROUP,
        "dynamic": False,
    }
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed", "ignore": list(skipped),
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "format": "pack-quantized"}},
    }  # fmt: skip


PACK_QUANTIZED = PackedLayout(
    "pack-quantized", form="int4", forms=("int4",), marks=("weight_packed", "weight_shape"),
    needs=("weight_packed", "weight_scale", "weight_shape"),
    keys=("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", *INPUTS), read=_read_packed,
    write=_write_packed, config=_config_packed, claims=_is_packed,
)  # fmt: skip
