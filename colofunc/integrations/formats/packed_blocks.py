"""Weights in float8 with a scale for each block of 128 x 128, as transformers saves them and DeepSeek-V3's files have
them.

    x.weight             float8_e4m3fn (o, i)
    x.weight_scale_inv   (o/128, i/128), rounded up: what the numbers of a block are multiplied by

In the format `fp8_g128` each row has scales of its own, so rows of a block get copies of one scale, and may lie on
ranks by themselves.

Source: transformers, `integrations/finegrained_fp8.py` and `FineGrainedFP8Config`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from colofunc.errors import InputError
from colofunc.functional.checkpoint.packed_tensors import PackedLayout, Tensors, boxed, part
from colofunc.integrations.formats.packed_int4 import SCALES
from colofunc.ops.quantized import FORMATS, Quantized
from colofunc.program.lazy import Slices

SCALE, INPUTS = "weight_scale_inv", "activation_scale"
FORM = FORMATS["fp8_g128"]
BLOCK = FORM.group
"""Rows and columns of a block."""


def _read(tensors: Tensors) -> Quantized:
    if INPUTS in tensors.entries:
        raise tensors.wrong(
            INPUTS,
            "is for static scales of inputs, which are not read",
            "a copy of the folder without such tensors, for its weights alone",
        )
    sizes = tensors.config.get("weight_block_size", [BLOCK, BLOCK])
    if sizes is None or list(sizes) != [BLOCK, BLOCK]:
        raise tensors.wrong(
            SCALE,
            f"is of blocks of {sizes!r} by the configuration, and {BLOCK} x {BLOCK} can be read",
            f"weight_block_size=({BLOCK}, {BLOCK})",
        )
    stored = tensors.matrix("weight", (torch.float8_e4m3fn,))
    rows, columns = stored.shape
    if columns % BLOCK:
        raise tensors.wrong(
            "weight",
            f"has {columns} columns, and groups of the format {FORM.name} are of {BLOCK}",
            "unquantized weights",
        )
    scales = tensors.checked(SCALE, SCALES, (-(-rows // BLOCK), columns // BLOCK))

    def numbers(box: Slices) -> Tensor:
        return boxed(stored, box).view(torch.uint8)

    def scale(box: Slices) -> Tensor:
        first, end = box[0].start, box[0].stop
        held = boxed(scales, (slice(first // BLOCK, -(-end // BLOCK)), box[1])).to(torch.float32)
        of_rows = tensors.finite(SCALE, held).repeat_interleave(BLOCK, 0)
        skipped = first % BLOCK
        return of_rows[skipped : skipped + end - first]

    data = part(stored.shape, torch.uint8, numbers)
    return Quantized(
        "fp8-g128",
        FORM.name,
        stored.shape,
        torch.float32,
        data=data,
        scale=part((rows, columns // BLOCK), torch.float32, scale),
    )


def _write(name: str, weight: Quantized) -> dict[str, Tensor]:
    """Raises InputError where rows of one block have different scales."""
    scale = weight.scale[::BLOCK].contiguous()
    if not torch.equal(scale.repeat_interleave(BLOCK, 0)[: len(weight.scale)], weight.scale):
        raise InputError(
            f"{name!r} has scales of single rows, and the layout 'finegrained-fp8' has one for {BLOCK} rows. Try: "
            "weights that were read from such a folder; the scheme 'fp8' and layout='float-quantized', which has a "
            "scale for each row"
        )
    return {"weight": weight.data.view(torch.float8_e4m3fn), SCALE: scale}


def _config(skipped: Sequence[str], dtype: torch.dtype) -> dict[str, Any]:
    return {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK], "modules_to_not_convert": list(skipped),
    }  # fmt: skip


def _claims(tensors: Tensors) -> bool:
    return tensors.dtype("weight") is torch.float8_e4m3fn


FINEGRAINED_FP8 = PackedLayout(
    "finegrained-fp8", form=FORM.name, forms=(FORM.name,), marks=(SCALE,), needs=("weight", SCALE), keys=("weight", SCALE, INPUTS),
    read=_read, write=_write, config=_config, claims=_claims,
)  # fmt: skip
