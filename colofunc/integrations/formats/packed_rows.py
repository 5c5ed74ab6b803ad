"""Weights in 8 bits with a scale for each row, as compressed-tensors saves them.

    x.weight         int8 (o, i), or float8_e4m3fn (o, i)
    x.weight_scale   (o, 1), a scale for each row; of one number, a scale of the whole weight

Source: compressed-tensors (formats "int-quantized" and "float-quantized", strategies "channel" and "tensor").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from colofunc.functional.checkpoint.packed_tensors import PackedLayout, Tensors, boxed, part
from colofunc.integrations.formats.packed_int4 import INPUTS, SCALES, check_inputs
from colofunc.ops.quantized import Quantized
from colofunc.program.lazy import Slices

SCALE, ZERO = "weight_scale", "weight_zero_point"
KEYS = ("weight", SCALE, ZERO, *INPUTS)


def _reader(form: str, dtype: torch.dtype) -> Callable[[Tensors], Quantized]:
    """What reads weights of this dtype in one of our formats."""

    def read(tensors: Tensors) -> Quantized:
        if ZERO in tensors.entries:
            raise tensors.wrong(
                ZERO, "shifts numbers, which no format in 8 bits here has", "symmetric=True when quantizing"
            )
        check_inputs(tensors)
        stored = tensors.matrix("weight", (dtype,))
        rows = stored.shape[0]
        scales = tensors.checked(SCALE, SCALES)
        whole = scales.shape in ((), (1,), (1, 1))
        if not whole and scales.shape not in ((rows, 1), (rows,)):
            raise tensors.wrong(
                SCALE, f"has shape {scales.shape}, and should have {(rows, 1)}", "strategy='channel' when quantizing"
            )

        def numbers(box: Slices) -> Tensor:
            held = boxed(stored, box)
            return held if dtype is torch.int8 else held.view(torch.uint8)

        def scale(box: Slices) -> Tensor:
            if whole:
                held = (
                    boxed(scales, tuple(slice(0, 1) for _ in scales.shape))
                    .reshape(1)
                    .expand(box[0].stop - box[0].start)
                )
            else:
                held = boxed(scales, (box[0], *(slice(0, 1) for _ in scales.shape[1:]))).reshape(-1)
            return tensors.finite(SCALE, held.to(torch.float32))

        data = part(stored.shape, torch.int8 if dtype is torch.int8 else torch.uint8, numbers)
        return Quantized(form, form, stored.shape, torch.float32, data=data, scale=part((rows,), torch.float32, scale))

    return read


def _claims(dtype: torch.dtype) -> Callable[[Tensors], bool]:
    def claims(tensors: Tensors) -> bool:
        return tensors.dtype("weight") is dtype

    return claims


def _write_int8(name: str, weight: Quantized) -> dict[str, Tensor]:
    return {"weight": weight.data, SCALE: weight.scale.unsqueeze(1)}


def _write_fp8(name: str, weight: Quantized) -> dict[str, Tensor]:
    return {"weight": weight.data.view(torch.float8_e4m3fn), SCALE: weight.scale.unsqueeze(1)}


def _config(kind: str) -> Callable[[Sequence[str], torch.dtype], dict[str, Any]]:
    def config(skipped: Sequence[str], dtype: torch.dtype) -> dict[str, Any]:
        weights = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "channel", "dynamic": False}
        return {
            "quant_method": "compressed-tensors", "format": f"{kind}-quantized", "quantization_status": "compressed",
            "ignore": list(skipped),
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "format": f"{kind}-quantized"}},
        }  # fmt: skip

    return config


INT_QUANTIZED = PackedLayout(
    "int-quantized", form="int8", forms=("int8",), marks=(SCALE,), needs=("weight", SCALE), keys=KEYS,
    read=_reader("int8", torch.int8), write=_write_int8, config=_config("int"), claims=_claims(torch.int8),
)  # fmt: skip
FLOAT_QUANTIZED = PackedLayout(
    "float-quantized", form="fp8", forms=("fp8",), marks=(SCALE,), needs=("weight", SCALE), keys=KEYS,
    read=_reader("fp8", torch.float8_e4m3fn), write=_write_fp8, config=_config("float"), claims=_claims(torch.float8_e4m3fn),
)  # fmt: skip
