"""Weights as bitsandbytes and transformers save them: NF4 in blocks, and int8 with a scale for each row.

    x.weight            uint8 (o i / 2, 1): two levels in a byte, the first in its high half, of the rows one after the other
    x.weight.absmax     float32 (o i / 64): the largest of each block of 64; or, quantized a second time ("double quantization"),
                        uint8: places in nested_quant_map (256), times nested_absmax of 256 blocks, plus nested_offset
    x.weight.quant_map  float32 (16): the levels
    x.weight.quant_state.bitsandbytes__nf4    the bytes of a JSON object: blocksize, shape, dtype, nested_blocksize, nested_offset

    x.weight            int8 (o, i)
    x.SCB               float32 (o): the largest of each row, so that a weight is int8 SCB / 127
    x.weight_format     uint8: 0 for rows

A block of NF4 is a block of our `nf4_g64` where rows are whole blocks. Larger blocks are several of ours with one
scale. Scales that are quantized themselves become float32, with the numbers that bitsandbytes computes.

Source: bitsandbytes 0.50, `QuantState.as_dict` and `Linear8bitLt`; both are checked against what it dequantizes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod
from typing import Any

import attrs
import torch
from torch import Tensor

from colofunc import untrusted
from colofunc.functional.checkpoint.files import dtype_name
from colofunc.functional.checkpoint.packed_tensors import PackedLayout, Tensors, boxed, part, reshaped
from colofunc.functional.checkpoint.place import Entry
from colofunc.ops.quantized import NF4_LEVELS, Quantized, nf4_scales
from colofunc.program.lazy import Slices

BLOCK = 64
STATE_BYTES = 64 * 1024
"""Most bytes of a layer's JSON object; real ones have a few hundred."""
STATE, STATE_FP4 = "weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4"
ABSMAX, MAP = "weight.absmax", "weight.quant_map"
NESTED_ABSMAX, NESTED_MAP = "weight.nested_absmax", "weight.nested_quant_map"


# ---- NF4 ----


def _is_nf4(tensors: Tensors) -> bool:
    """By the state where there is one: numbers may be stored under any dtype then (`bnb_4bit_quant_storage`)."""
    return STATE in tensors.entries or STATE_FP4 in tensors.entries or tensors.dtype("weight") is torch.uint8


@attrs.frozen
class _State:
    """What the JSON object says."""

    shape: tuple[int, ...]
    blocksize: int
    nested_blocksize: int
    nested_offset: float


def _read_nf4(tensors: Tensors) -> Quantized:
    if STATE_FP4 in tensors.entries:
        raise tensors.wrong(
            STATE_FP4, "says FP4, whose levels no format here has", "bnb_4bit_quant_type='nf4' when quantizing"
        )
    if STATE not in tensors.entries:
        raise tensors.wrong(STATE, "is missing, without which the shape of the weight is not known")
    state = _state(tensors)
    rows, columns = state.shape
    stored = tensors.checked("weight", (torch.uint8,))
    if stored.shape not in ((rows * columns // 2, 1), (1, rows * columns // 2), (rows * columns // 2,)):
        raise tensors.wrong(
            "weight", f"has shape {stored.shape}, and a weight of shape {state.shape} has {rows * columns // 2} bytes"
        )
    levels = tensors.whole(MAP, (torch.float32,), (16,))
    if not torch.equal(levels, torch.tensor(NF4_LEVELS)):
        raise tensors.wrong(MAP, "does not hold the levels of NF4", "bnb_4bit_quant_type='nf4' when quantizing")
    data = reshaped(stored, (rows, columns // 2))

    def numbers(box: Slices) -> Tensor:
        held = boxed(data, box)
        return (held << 4) | (held >> 4)  # here the first of two numbers is in the low half

    scales = _Scales.of(tensors, state)
    return Quantized(
        "nf4-g64", "nf4_g64", state.shape, torch.float32,
        data=part((rows, columns // 2), torch.uint8, numbers),
        scale=part((rows, columns // BLOCK), torch.float32, scales.box),
    )  # fmt: skip


def _state(tensors: Tensors) -> _State:
    """The JSON object. Raises CheckpointError where it does not describe a weight that our format holds."""
    size = prod(tensors.checked(STATE, (torch.uint8,)).shape)
    if size > STATE_BYTES:
        raise tensors.wrong(STATE, f"has {size} bytes, and at most {STATE_BYTES} are read")
    text = tensors.whole(STATE, (torch.uint8,)).numpy().tobytes()
    try:
        said = untrusted.check(dict[str, Any], untrusted.parse_json(text), "it")
        kind = untrusted.check(str, said.get("quant_type"), "quant_type")
        state = _State(
            shape=untrusted.check(tuple[int, ...], said.get("shape"), "shape"),
            blocksize=untrusted.check(int, said.get("blocksize"), "blocksize"),
            nested_blocksize=untrusted.check(int, said.get("nested_blocksize", 256), "nested_blocksize"),
            nested_offset=untrusted.check(float, said.get("nested_offset", 0.0), "nested_offset"),
        )
    except ValueError as error:
        raise tensors.wrong(STATE, f"is no state of bitsandbytes: {error}") from error
    if kind != "nf4":
        raise tensors.wrong(STATE, f"says {kind!r}", "bnb_4bit_quant_type='nf4' when quantizing")
    if len(state.shape) != 2 or min(state.shape) < 1:
        raise tensors.wrong(STATE, f"says the shape {state.shape}, and a weight is a matrix")
    if state.blocksize < BLOCK or state.blocksize % BLOCK:
        raise tensors.wrong(
            STATE, f"says blocksize {state.blocksize}, and blocks here are of {BLOCK}", "blocks of 64 when quantizing"
        )
    if state.shape[1] % BLOCK:
        raise tensors.wrong(
            STATE,
            f"says the shape {state.shape}: blocks of {BLOCK} that reach over the ends of rows are in no format here",
            "llm_int8_skip_modules when quantizing, with this layer",
        )
    if state.nested_blocksize < 1:
        raise tensors.wrong(STATE, f"says nested_blocksize {state.nested_blocksize}")
    return state


@attrs.frozen(eq=False)
class _Scales:
    """The scales of blocks, of a file.

    `nested`: (places' values, scale of each 256 blocks) where they are quantized themselves.
    """

    tensors: Tensors
    state: _State
    absmax: Entry
    nested: tuple[Tensor, Tensor] | None

    @staticmethod
    def of(tensors: Tensors, state: _State) -> _Scales:
        """Checked against the shape that the weight has."""
        blocks = -(-state.shape[0] * state.shape[1] // state.blocksize)
        twice = NESTED_ABSMAX in tensors.entries or NESTED_MAP in tensors.entries
        if not twice:
            if tensors.entries[ABSMAX].dtype is torch.uint8:
                raise tensors.wrong(
                    NESTED_ABSMAX, "is missing, without which scales that are quantized themselves cannot be read"
                )
            return _Scales(tensors, state, tensors.checked(ABSMAX, (torch.float32,), (blocks,)), None)
        for key in (NESTED_ABSMAX, NESTED_MAP):
            if key not in tensors.entries:
                raise tensors.wrong(
                    key, "is missing, without which scales that are quantized themselves cannot be read"
                )
        absmax = tensors.checked(ABSMAX, (torch.uint8,), (blocks,))
        values = tensors.whole(NESTED_MAP, (torch.float32,), (256,))
        outer = tensors.whole(NESTED_ABSMAX, (torch.float32,), (-(-blocks // state.nested_blocksize),))
        return _Scales(tensors, state, absmax, (values, outer))

    def box(self, box: Slices) -> Tensor:
        """Some rows and columns of our scales, (o, i / 64)."""
        rows, columns = (torch.arange(s.start, s.stop) for s in box)
        ours = rows.unsqueeze(1) * (self.state.shape[1] // BLOCK) + columns
        theirs = ours // (self.state.blocksize // BLOCK)
        if not theirs.numel():
            return torch.empty(theirs.shape)
        first, end = int(theirs.min()), int(theirs.max()) + 1
        held = boxed(self.absmax, (slice(first, end),))
        if self.nested is not None:
            values, outer = self.nested
            held = (
                values[held.to(torch.int64)] * outer[torch.arange(first, end) // self.state.nested_blocksize]
                + self.state.nested_offset
            )
        return self.tensors.finite(ABSMAX, held[theirs - first])


def _write_nf4(name: str, weight: Quantized) -> dict[str, Tensor]:
    rows, columns = weight.shape
    scale = weight.scale
    if weight.outer is not None:
        scale = nf4_scales(scale, weight.outer, torch.float32)
    state = {"quant_type": "nf4", "blocksize": BLOCK, "dtype": dtype_name(weight.dtype), "shape": [rows, columns]}
    return {
        "weight": ((weight.data << 4) | (weight.data >> 4)).reshape(-1, 1),
        ABSMAX: scale.reshape(-1),
        MAP: torch.tensor(NF4_LEVELS),
        STATE: torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }


def _config_nf4(skipped: Sequence[str], dtype: torch.dtype) -> dict[str, Any]:
    return {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": False, "bnb_4bit_quant_storage": "uint8", "bnb_4bit_compute_dtype": dtype_name(dtype),
        "llm_int8_skip_modules": list(skipped),
    }  # fmt: skip


NF4 = PackedLayout(
    "bitsandbytes-nf4", form="nf4_g64", forms=("nf4_g64", "nf4"), marks=(ABSMAX, MAP, STATE, STATE_FP4), needs=("weight", ABSMAX, MAP),
    keys=("weight", ABSMAX, MAP, NESTED_ABSMAX, NESTED_MAP, STATE, STATE_FP4), read=_read_nf4, write=_write_nf4, config=_config_nf4,
    claims=_is_nf4,
)  # fmt: skip


# ---- int8 ----

ROWS = 0
"""What weight_format says of weights that lie row by row; others were orders of tensor cores, which are no longer
written."""


def _is_int8(tensors: Tensors) -> bool:
    if "weight" in tensors.entries:
        return tensors.dtype("weight") is torch.int8
    return "SCB" in tensors.entries and tensors.dtype("weight_format") is torch.uint8


def _read_int8(tensors: Tensors) -> Quantized:
    stored = tensors.matrix("weight", (torch.int8,))
    largest = tensors.checked("SCB", (torch.float32,), stored.shape[:1])
    if "weight_format" in tensors.entries:
        said = tensors.whole("weight_format", (torch.uint8,), ())
        if int(said) != ROWS:
            raise tensors.wrong(
                "weight_format", f"is {int(said)}, and only {ROWS}, rows, is known", "a newer bitsandbytes, to save it"
            )

    def numbers(box: Slices) -> Tensor:
        return boxed(stored, box)

    def scales(box: Slices) -> Tensor:
        return _steps(tensors.finite("SCB", boxed(largest, box)))

    data, scale = part(stored.shape, torch.int8, numbers), part(stored.shape[:1], torch.float32, scales)
    return Quantized("int8", "int8", stored.shape, torch.float32, data=data, scale=scale)


def _steps(largest: Tensor) -> Tensor:
    """Our scale of rows with these largest numbers."""
    return largest / torch.full_like(largest, 127.0)


def _write_int8(name: str, weight: Quantized) -> dict[str, Tensor]:
    """Rows' largest are those that give our scales back; scales that none gives (of weights in float64) change in the
    last place.
    """
    about = weight.scale * 127.0
    infinity = torch.full_like(about, torch.inf)
    near = torch.stack((about, torch.nextafter(about, infinity), torch.nextafter(about, -infinity)))
    best = (_steps(near) - weight.scale).abs().argmin(0)
    largest = near.gather(0, best.unsqueeze(0)).squeeze(0)
    return {"weight": weight.data, "SCB": largest, "weight_format": torch.tensor(ROWS, dtype=torch.uint8)}


def _config_int8(skipped: Sequence[str], dtype: torch.dtype) -> dict[str, Any]:
    return {
        "quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True, "llm_int8_threshold": 6.0,
        "llm_int8_has_fp16_weight": False, "llm_int8_skip_modules": list(skipped),
    }  # fmt: skip


INT8 = PackedLayout(
    "bitsandbytes-int8", form="int8", forms=("int8",), marks=("SCB", "weight_format"), needs=("weight", "SCB"),
    keys=("weight", "SCB", "weight_format"), read=_read_int8, write=_write_int8, config=_config_int8, claims=_is_int8,
)  # fmt: skip
