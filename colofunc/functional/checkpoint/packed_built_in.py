"""The layouts of other libraries' quantized weights that this project knows, given by the hook that other plugins use.
"""

from __future__ import annotations

from collections.abc import Mapping

from colofunc.functional.checkpoint.packed_bitsandbytes import INT8, NF4
from colofunc.functional.checkpoint.packed_blocks import FINEGRAINED_FP8
from colofunc.functional.checkpoint.packed_int4 import AWQ, GPTQ, PACK_QUANTIZED
from colofunc.functional.checkpoint.packed_rows import FLOAT_QUANTIZED, INT_QUANTIZED
from colofunc.functional.checkpoint.packed_tensors import PackedLayout
from colofunc.functional.checkpoint.packed_torchao import FLOAT8, INT4, MXFP8, NVFP4
from colofunc.functional.checkpoint.packed_torchao import INT8 as TORCHAO_INT8
from colofunc.plugins.hookspecs import hookimpl

ALL = (
    NF4,
    INT8,
    GPTQ,
    AWQ,
    PACK_QUANTIZED,
    FINEGRAINED_FP8,
    INT_QUANTIZED,
    FLOAT_QUANTIZED,
    TORCHAO_INT8,
    FLOAT8,
    INT4,
    MXFP8,
    NVFP4,
)
BUILT_IN: Mapping[str, PackedLayout] = {one.name: one for one in ALL}


@hookimpl
def colofunc_packed_layouts() -> Mapping[str, PackedLayout]:
    return BUILT_IN
