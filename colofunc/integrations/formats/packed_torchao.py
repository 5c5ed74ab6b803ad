"""Weights as torchao flattens them for safetensors, and transformers saves with its `TorchAoConfig`.

    x._weight_qdata        torchao-int8     int8 (o, i)
                           torchao-float8   float8_e4m3fn (o, i)
                           torchao-int4     int8 (o, i), of -8 to 7
                           torchao-mxfp8    float8_e4m3fn (o, i)
                           torchao-nvfp4    uint8 (o, i/2), the even column in the low half
    x._weight_scale        (o, 1), or (o, groups) of torchao-int4; float8_e8m0fnu (o, i/32) of torchao-mxfp8 and
                           float8_e4m3fn (o, i/16) of torchao-nvfp4, or in the order of a card (Note [Tiles of scales])
    x._weight_zero_point   int8, as scales: 0 of torchao-int8, not there of torchao-float8 and in mx and nv formats
    x._weight_per_tensor_scale   float32, one number, of some torchao-nvfp4

    weight = (number - zero) scale

The file's header says of each tensor which class it is of, with what it was made by; torchao reads no file without.
What is read here needs none of it: dtypes and shapes tell the layouts apart. Other classes of torchao's are refused:
`Int4Tensor` has zeros in floating point whose meaning is that of kernels for CUDA.

Note [Tiles of scales]: tensor cores read the scales of blocks in tiles of 128 rows by 4 blocks, and a file has them so.
Row r of a tile is r % 32 of its 32 lines of 16, place r // 32 of the four in it, of 4 blocks each. Tiles are filled up
with zeros, and stand one behind the other, those of the same rows first; as a matrix they are 32 rows by 16 columns
each.

Source: torchao 0.18, `torchao/prototype/safetensors` (names and header), `Int8Tensor`, `Float8Tensor`,
`IntxUnpackedToInt8Tensor`, `MXTensor`, `NVFP4Tensor`. Tiles: NVIDIA's manual of cuBLAS, "1D block scaling factors
layout".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from colofunc.errors import InputError
from colofunc.functional.checkpoint.files import dtype_name
from colofunc.functional.checkpoint.packed_tensors import PackedLayout, Tensors, boxed, part
from colofunc.integrations.formats.packed_int4 import GROUP, MIDDLE, SCALES, groups_of, of_groups
from colofunc.ops.quantized import Quantized, packed_nibbles, unpacked
from colofunc.ops.small_floats import MX_BLOCK, NV_BLOCK
from colofunc.program.lazy import Slices

DATA, SCALE, ZERO = "_weight_qdata", "_weight_scale", "_weight_zero_point"
PER_TENSOR = "_weight_per_tensor_scale"
OF_INPUTS = (
    "_weight_act_quant_scale",
    "_weight_act_quant_zero_point",
    "_weight_act_pre_scale",
    "_weight_act_per_tensor_scale",
)
"""What static quantization of inputs has measured, and what inputs are multiplied by."""
KEYS = (DATA, SCALE, ZERO, PER_TENSOR, *OF_INPUTS)
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
TILE_ROWS, TILE_BLOCKS = 128, 4
LINES, LINE = 32, 16
"""A tile of scales as it is stored: Note [Tiles of scales]."""
INT4_DTYPE = {"_type": "torch.dtype", "_data": "int4"}


def _check_inputs(tensors: Tensors) -> None:
    for key in OF_INPUTS:
        if key in tensors.entries:
            raise tensors.wrong(
                key,
                "is about inputs, and is not read",
                "a configuration of torchao for weights alone, or dynamic inputs",
            )


def _no_zeros(tensors: Tensors, rows: slice) -> None:
    """Raises CheckpointError where numbers of these rows are shifted."""
    if ZERO in tensors.entries and bool(boxed(tensors.checked(ZERO, (torch.int8,)), (rows, slice(0, 1))).any()):
        raise tensors.wrong(
            ZERO, "shifts numbers, which no format in 8 bits here has", "MappingType.SYMMETRIC when quantizing"
        )


def _rows_reader(form: str, dtype: torch.dtype) -> Callable[[Tensors], Quantized]:
    """What reads weights of this dtype with a scale for each row, or one."""

    def read(tensors: Tensors) -> Quantized:
        _check_inputs(tensors)
        stored = tensors.matrix(DATA, (dtype,))
        rows = stored.shape[0]
        scales = tensors.checked(SCALE, SCALES)
        whole = scales.shape == (1, 1)
        if not whole and scales.shape != (rows, 1):
            raise tensors.wrong(
                SCALE, f"has shape {scales.shape}, and should have {(rows, 1)}", "PerRow() when quantizing"
            )

        def numbers(box: Slices) -> Tensor:
            held = boxed(stored, box)
            return held if dtype is torch.int8 else held.view(torch.uint8)

        def scale(box: Slices) -> Tensor:
            (asked,) = box
            of_rows = slice(0, 1) if whole else asked
            _no_zeros(tensors, of_rows)
            held = boxed(scales, (of_rows, slice(0, 1))).reshape(-1).expand(asked.stop - asked.start)
            return tensors.finite(SCALE, held.to(torch.float32))

        data = part(stored.shape, torch.int8 if dtype is torch.int8 else torch.uint8, numbers)
        return Quantized(form, form, stored.shape, torch.float32, data=data, scale=part((rows,), torch.float32, scale))

    return read


def _read_int4(tensors: Tensors) -> Quantized:
    _check_inputs(tensors)
    stored = tensors.matrix(DATA, (torch.int8,))
    rows, columns = stored.shape
    scales = tensors.matrix(SCALE, SCALES)
    each = groups_of(tensors, SCALE, scales.shape[1], columns)
    zeros = tensors.checked(ZERO, (torch.int8,), scales.shape)
    if scales.shape[0] != rows:
        raise tensors.wrong(SCALE, f"has shape {scales.shape}, and the weight needs {(rows, scales.shape[1])}")

    def shifted(key: str, held: Tensor) -> Tensor:
        if bool(((held < -MIDDLE) | (held >= MIDDLE)).any()):
            raise tensors.wrong(key, "has numbers of more than 4 bits", "weight_dtype=torch.int4 when quantizing")
        return (held + MIDDLE).to(torch.uint8)

    def numbers(box: Slices) -> Tensor:
        held = boxed(stored, (box[0], slice(2 * box[1].start, 2 * box[1].stop)))
        return packed_nibbles(shifted(DATA, held))

    def scale(box: Slices) -> Tensor:
        held = of_groups(each, box[1], lambda theirs: boxed(scales, (box[0], theirs)))
        return tensors.finite(SCALE, held.to(torch.float32))

    def zero(box: Slices) -> Tensor:
        return shifted(ZERO, of_groups(each, box[1], lambda theirs: boxed(zeros, (box[0], theirs))))

    groups = (rows, columns // GROUP)
    return Quantized(
        "int4-g128", "int4", stored.shape, torch.float32,
        data=part((rows, columns // 2), torch.uint8, numbers), scale=part(groups, torch.float32, scale),
        zero=part(groups, torch.uint8, zero),
    )  # fmt: skip


def _scales_of_blocks(tensors: Tensors, dtype: torch.dtype, rows: int, blocks: int) -> Callable[[Slices], Tensor]:
    """What reads a box of the scales (rows, blocks), as their bits."""
    stored = tensors.matrix(SCALE, (dtype,))
    across = -(-blocks // TILE_BLOCKS)
    tiled = (-(-rows // TILE_ROWS) * LINES, across * LINE)
    if stored.shape not in ((rows, blocks), tiled):
        raise tensors.wrong(SCALE, f"has shape {stored.shape}, and should have {(rows, blocks)} or, in tiles, {tiled}")

    def read(box: Slices) -> Tensor:
        if stored.shape == (rows, blocks):
            held = boxed(stored, box)
        else:
            first, last = box[0].start // TILE_ROWS, -(-box[0].stop // TILE_ROWS)
            tiles = boxed(stored, (slice(LINES * first, LINES * last), slice(0, tiled[1]))).view(torch.uint8)
            # (tile of rows, tile of blocks, row % 32, row // 32, block)
            tiles = tiles.reshape(last - first, across, LINES, LINE // TILE_BLOCKS, TILE_BLOCKS)
            plain = tiles.permute(0, 3, 2, 1, 4).reshape((last - first) * TILE_ROWS, across * TILE_BLOCKS)
            held = plain[box[0].start - first * TILE_ROWS : box[0].stop - first * TILE_ROWS, box[1]].contiguous()
        tensors.finite(SCALE, held.view(dtype).to(torch.float32))
        return held.view(torch.uint8)

    return read


def _read_mxfp8(tensors: Tensors) -> Quantized:
    _check_inputs(tensors)
    stored = tensors.matrix(DATA, (E4M3,))
    rows, columns = stored.shape
    if columns % MX_BLOCK:
        raise tensors.wrong(DATA, f"has {columns} columns, and blocks have {MX_BLOCK}")

    def numbers(box: Slices) -> Tensor:
        return boxed(stored, box).view(torch.uint8)

    scale = part((rows, columns // MX_BLOCK), torch.uint8, _scales_of_blocks(tensors, E8M0, rows, columns // MX_BLOCK))
    data = part(stored.shape, torch.uint8, numbers)
    return Quantized("mxfp8", "mxfp8", stored.shape, torch.float32, data=data, scale=scale)


def _read_nvfp4(tensors: Tensors) -> Quantized:
    _check_inputs(tensors)
    stored = tensors.matrix(DATA, (torch.uint8,))
    rows, columns = stored.shape[0], 2 * stored.shape[1]
    if columns % NV_BLOCK:
        raise tensors.wrong(DATA, f"has {columns} columns, and blocks have {NV_BLOCK}")
    whole = torch.ones(1)
    if PER_TENSOR in tensors.entries:
        entry = tensors.checked(PER_TENSOR, (torch.float32,))
        if entry.shape not in ((), (1,), (1, 1)):
            raise tensors.wrong(PER_TENSOR, f"has shape {entry.shape}, and should be one number")
        whole = tensors.finite(PER_TENSOR, tensors.whole(PER_TENSOR, (torch.float32,))).reshape(1)

    def numbers(box: Slices) -> Tensor:
        return boxed(stored, box)

    def outer(box: Slices) -> Tensor:
        return whole.expand(box[0].stop - box[0].start)

    scale = part((rows, columns // NV_BLOCK), torch.uint8, _scales_of_blocks(tensors, E4M3, rows, columns // NV_BLOCK))
    return Quantized(
        "nvfp4", "nvfp4", (rows, columns), torch.float32,
        data=part(stored.shape, torch.uint8, numbers), scale=scale, outer=part((rows,), torch.float32, outer),
    )  # fmt: skip


def _has_groups(tensors: Tensors) -> bool:
    scale = tensors.entries.get(SCALE)
    return scale is not None and len(scale.shape) == 2 and scale.shape[1] > 1


def _claims_int8(tensors: Tensors) -> bool:
    return tensors.dtype(DATA) is torch.int8 and not _has_groups(tensors)


def _claims_float8(tensors: Tensors) -> bool:
    return tensors.dtype(DATA) is E4M3 and tensors.dtype(SCALE) is not E8M0 and not _has_groups(tensors)


def _claims_mxfp8(tensors: Tensors) -> bool:
    return tensors.dtype(DATA) is E4M3 and tensors.dtype(SCALE) is E8M0


def _claims_nvfp4(tensors: Tensors) -> bool:
    return tensors.dtype(DATA) is torch.uint8 and tensors.dtype(SCALE) is E4M3


def _claims_int4(tensors: Tensors) -> bool:
    return tensors.dtype(DATA) is torch.int8 and _has_groups(tensors)


# ---- writing ----


def _write_int8(name: str, weight: Quantized) -> dict[str, Tensor]:
    scale = weight.scale.unsqueeze(1)
    return {DATA: weight.data, SCALE: scale, ZERO: torch.zeros(scale.shape, dtype=torch.int8)}


def _write_float8(name: str, weight: Quantized) -> dict[str, Tensor]:
    return {DATA: weight.data.view(E4M3), SCALE: weight.scale.unsqueeze(1)}


def _write_int4(name: str, weight: Quantized) -> dict[str, Tensor]:
    assert weight.zero is not None
    if weight.scale.shape[1] == 1:
        raise InputError(
            f"{name!r} has a single group of {GROUP} columns, and such a weight has the same tensors in torchao's "
            "classes for 4 and 8 bits. Try: layout='pack-quantized', or layout=None"
        )
    return {
        DATA: (unpacked(weight.data).to(torch.int8) - MIDDLE),
        SCALE: weight.scale,
        ZERO: weight.zero.to(torch.int8) - MIDDLE,
    }


def _dtype(dtype: torch.dtype) -> dict[str, str]:
    return {"_type": "torch.dtype", "_data": dtype_name(dtype)}


def _about(data: Tensor, scale: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """What the header says of a weight that was `dtype`."""
    columns = data.shape[1]
    said: dict[str, Any] = {"block_size": [1, columns // scale.shape[1]], "dtype": _dtype(dtype)}
    if data.dtype is E4M3:
        said |= {
            "mm_config": None,
            "act_quant_kwargs": None,
            "kernel_preference": {"_type": "KernelPreference", "_data": "AUTO"},
        }
        return {"_type": "Float8Tensor", "_data": said, "_tensor_data_names": ["qdata", "scale"]}
    names = ["qdata", "scale", "zero_point"]
    if scale.shape[1] == 1:
        said |= {"act_quant_kwargs": None, "reduce_range": False}
        return {"_type": "Int8Tensor", "_data": said, "_tensor_data_names": names}
    said |= {"target_dtype": INT4_DTYPE, "activation_quantization": None}
    return {"_type": "IntxUnpackedToInt8Tensor", "_data": said, "_tensor_data_names": names}


def _header(stored: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, str]:
    """What a file with these tensors says beside them. dtype: of weights that are quantized, as they were."""
    said: dict[str, str] = {}
    for key, x in stored.items():
        layer, _, suffix = key.rpartition(".")
        if suffix == DATA:
            said[f"{layer}.weight"] = json.dumps(_about(x, stored[f"{layer}.{SCALE}"], dtype))
        elif suffix not in KEYS:
            said[key] = json.dumps({"_type": "Tensor"})
    return {**said, "tensor_names": json.dumps(list(said))}


def _config(name: str, **made_by: Any) -> Callable[[Sequence[str], torch.dtype], dict[str, Any]]:
    def config(skipped: Sequence[str], dtype: torch.dtype) -> dict[str, Any]:
        how = {"_type": name, "_version": 2, "_data": made_by}
        return {
            "quant_method": "torchao", "quant_type": {"default": how}, "modules_to_not_convert": list(skipped),
            "include_input_output_embeddings": False, "untie_embedding_weights": False,
        }  # fmt: skip

    return config


_PER_ROW = {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}
_INT4 = {
    "weight_dtype": INT4_DTYPE,
    "granularity": {"_type": "PerGroup", "_version": 1, "_data": {"group_size": GROUP}},
    "mapping_type": {"_type": "MappingType", "_data": "ASYMMETRIC"},
    "intx_packing_format": {"_type": "IntxPackingFormat", "_data": "UNPACKED_TO_INT8"},
}
INT8 = PackedLayout(
    "torchao-int8", form="int8", forms=("int8",), marks=(DATA,), needs=(DATA, SCALE), keys=KEYS, read=_rows_reader("int8", torch.int8),
    write=_write_int8, config=_config("Int8WeightOnlyConfig", granularity=_PER_ROW), claims=_claims_int8, header=_header,
)  # fmt: skip
FLOAT8 = PackedLayout(
    "torchao-float8", form="fp8", forms=("fp8",), marks=(DATA,), needs=(DATA, SCALE), keys=KEYS, read=_rows_reader("fp8", E4M3),
    write=_write_float8, config=_config("Float8WeightOnlyConfig", weight_dtype=_dtype(E4M3), granularity=_PER_ROW), claims=_claims_float8,
    header=_header,
)  # fmt: skip
INT4 = PackedLayout(
    "torchao-int4", form="int4", forms=("int4",), marks=(DATA,), needs=(DATA, SCALE, ZERO), keys=KEYS, read=_read_int4,
    write=_write_int4, config=_config("IntxWeightOnlyConfig", **_INT4), claims=_claims_int4, header=_header,
)  # fmt: skip
MXFP8 = PackedLayout(
    "torchao-mxfp8", form="mxfp8", forms=(), marks=(DATA,), needs=(DATA, SCALE), keys=KEYS, read=_read_mxfp8, claims=_claims_mxfp8,
)  # fmt: skip
NVFP4 = PackedLayout(
    "torchao-nvfp4", form="nvfp4", forms=(), marks=(DATA,), needs=(DATA, SCALE), keys=KEYS, read=_read_nvfp4, claims=_claims_nvfp4,
)  # fmt: skip
