"""How other libraries keep models, adapters and quantized weights: a plugin, given by the hooks that other plugins use.

    transformers_models.py          names, conversions, ties and configuration of models of transformers
    peft_adapters.py                adapters of `cf.lora` in peft's files, and peft's own models
    diffusers_models.py             how files of diffusers are called
    packed_bitsandbytes.py          quantized weights: NF4 and int8 of bitsandbytes
    packed_int4.py                  GPTQ, AWQ and int4 of compressed-tensors
    packed_rows.py                  int8 and float8 of compressed-tensors
    packed_blocks.py                float8 in blocks of 128 x 128
    packed_torchao.py               weights of torchao

No library is imported before a model of it is read or written; what is only a layout of files needs none.
"""

from __future__ import annotations

from collections.abc import Mapping

from colofunc.functional.checkpoint.libraries import Library
from colofunc.functional.checkpoint.packed_tensors import PackedLayout
from colofunc.integrations.formats.diffusers_models import DIFFUSERS
from colofunc.integrations.formats.packed_bitsandbytes import INT8, NF4
from colofunc.integrations.formats.packed_blocks import FINEGRAINED_FP8
from colofunc.integrations.formats.packed_int4 import AWQ, GPTQ, PACK_QUANTIZED
from colofunc.integrations.formats.packed_rows import FLOAT_QUANTIZED, INT_QUANTIZED
from colofunc.integrations.formats.packed_torchao import FLOAT8, INT4, MXFP8, NVFP4
from colofunc.integrations.formats.packed_torchao import INT8 as TORCHAO_INT8
from colofunc.integrations.formats.peft_adapters import PEFT
from colofunc.integrations.formats.transformers_models import TRANSFORMERS
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
LAYOUTS: Mapping[str, PackedLayout] = {one.name: one for one in ALL}
LIBRARIES: Mapping[str, Library] = {one.name: one for one in (PEFT, TRANSFORMERS, DIFFUSERS)}


@hookimpl
def colofunc_packed_layouts() -> Mapping[str, PackedLayout]:
    return LAYOUTS


@hookimpl
def colofunc_model_libraries() -> Mapping[str, Library]:
    return LIBRARIES
