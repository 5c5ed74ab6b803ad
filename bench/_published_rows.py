"""Published runs that today's modes can express, as facts: model, layout, what is made again, compiled or not, and what was measured.

The split was fixed before the first fit: rows with an even number calibrate, the others test (`Run.calibrates`). Names of runs and sources:

T torchtitan, benchmarks/llama3_h100_202412 and asyncTP_llama3_h100_2025-06, docs/performance.md; T42: pytorch/ao torchao/float8/README
K KempnerInstitute/KempnerForge benchmarks/mfu_scaling · U meta-pytorch/torchtune · P mosaicml/llm-foundry scripts/train/benchmarking
D NVIDIA/dgxc-benchmarking v25.02 · M NVIDIA/Megatron-LM images/model_table
E Aleph-Alpha/NeurIPS-WANT-submission-efficient-parallelization-layouts

`HELD_OUT` was never used for a fit. Its rows were written down together, before any of them was predicted, and none is dropped for being
missed. Sources, repository and path at a commit; t is the table's figure for tokens a second and GPU, s for seconds of a step:

TA pytorch/torchtitan docs/performance.md@0413364 (t) · TH the same file, later, Llama 3.1 405B (t; read as of the 500 W card: its footnote)
I foundation-model-stack/fms-fsdp README.md@0d31998 (t); links between boxes: pytorch/pytorch.github.io
  _posts/2024-03-13-maximizing-training.md@2ad1005, which also has IH (t)
MH mosaicml/llm-foundry scripts/train/benchmarking/README.md@061f2c7, H100 (t); kernels of attention: sweep.sh@2542a2e
N NVIDIA/dgxc-benchmarking nemotron/README_15b.md@0b71cfd and nemotron4-15b-synth.yaml@8f5cbb3 (s)
S jzhang38/TinyLlama README.md@026587c and pretrain/tinyllama.py@01c9c77 (t)
C karpathy/llm.c scripts/run_gpt2_1558M.sh@039904e (s)
KF KempnerInstitute/KempnerForge benchmarks/mfu_scaling/mfu_scaling_2026-04-05.md and mfu_bench.sh@9f3f03a (s)
FP flagos-ai/FlagPerf training/nvidia/llama1_7B-paddle/README.md, pull request 278 (t)

Looked at and left out, as a part of their configuration is not known or not expressed here: FlashAttention's GPT-3 runs (dropout within
attention); nanoGPT (which card, attention by hand); fms-fsdp on H100, 7 B and 13 B (how they are sharded, which layers are made again), and
compiled (only shares of a peak that are rounded to 2 digits); torchtitan's 70B with asynchronous tensor parallelism (figures in a picture);
SmolLM3 (its network and optimizer's sharding); BigScience's pipelines (attention by hand in float16); Megatron's on several stages (rows of
a microbatch, stages a rank); runs in float8, and of mixtures of experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Literal

import attrs

Again = Literal["none", "full", "operators", "layers"]
"""What forward makes again for backward: nothing · all but the inputs of layers · every second product · all of every second layer."""

Attention = Literal["flash", "triton", "cudnn"]
"""Kernels of attention, by the names in the devices' files. flash: FlashAttention-2, which torch has · triton: FlashAttention
as llm-foundry's `attn_impl: triton` · cudnn: that of Transformer Engine and llm.c on sm_90."""
Fused = Literal["", "compiled", "by hand"]
"""What is fused between products: nothing, what torch compiles, what Megatron, NeMo, Lit-GPT and llm.c have kernels for by hand."""
Logits = Literal["float32", "as computed", "gathered"]
"""What the loss reads: logits as float32 · in the dtype of the last product · so, and under tensor parallelism gathered to each rank."""
Collectives = Literal["early", "waits", "chunks"]
"""How collectives of tensor parallelism run, see `colofunc.mesh.software`. In T, TH, K and KF, which have torch's DTensor, each is waited
for."""


@attrs.frozen
class Model:
    """A decoder. `gated`: LLaMA's perceptron of three products and RMS norms, else two products and layer norms, as OPT has them; with
    fewer heads of keys, or rotary positions, as Nemotron has them."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    gated: bool = True
    tied: bool = False


@attrs.frozen
class Run:
    """One published run. `sequences`: of a step, all ranks; `microbatches`: one after another. `zero`: stage over dp, 0 for none.

    `measured_s`: of a step. `masters`: float32 copies of parameters. `attention`: the kernel that the run used. `collectives`: how those of
    tensor parallelism run. `apart`: whether each product has the gradient of its input reduced and scattered by itself. `uplink_gb_s`:
    GB/s of the one link that a box has to others, where that is not the usual one. `sums`: what gradients are summed in between ranks,
    where there are masters. `reduces`: whether gradients are reduced in each microbatch, or whole ones behind the last. `logits`: what the
    loss reads. `flat`: parameters are views of a flat one (FSDP's first version). `loss_as_written`: the loss is called behind a compiled
    model. `keeps_logits`: a variable holds a microbatch's logits until the next has its own. `whole_embedding`: tensor parallelism leaves
    the embedding whole. `unknown`: what of the configuration had to be assumed.
    """

    id: str
    group: str
    model: Model
    topology: str
    axes: Mapping[str, int]
    tokens: int
    sequences: int
    measured_s: float
    microbatches: int = 1
    zero: int = 3
    again: Again = "none"
    fused: Fused = "compiled"
    masters: bool = True
    attention: Attention = "flash"
    collectives: Collectives = "early"
    apart: bool = False
    peak_gib: float | None = None
    peak_of: Literal["alive", "reserved"] = "reserved"
    uplink_gb_s: float | None = None
    sums: Literal["float32", "bfloat16"] = "float32"
    reduces: Literal["each", "last"] = "each"
    logits: Logits = "float32"
    flat: bool = False
    loss_as_written: bool = False
    keeps_logits: bool = False
    whole_embedding: bool = False
    schedule: str = ""
    unknown: str = ""

    @property
    def ranks(self) -> int:
        return prod(self.axes.values())

    @property
    def calibrates(self) -> bool:
        return int(self.id[1:]) % 2 == 0


L8 = Model(32, 4096, 32, 8, 14336, 128256)
L70 = Model(80, 8192, 64, 8, 28672, 128256)
L3 = Model(28, 3072, 24, 8, 8192, 128256, tied=True)
K15 = Model(40, 5120, 40, 8, 17920, 128256)
E13 = Model(40, 5120, 40, 40, 13824, 128000)
L405 = Model(126, 16384, 128, 8, 53248, 128256)
LLAMA2_7, LLAMA2_13 = Model(32, 4096, 32, 32, 11008, 32000), Model(40, 5120, 40, 40, 13824, 32000)
CODE_LLAMA_34, LLAMA2_70 = Model(48, 8192, 64, 8, 22016, 32000), Model(80, 8192, 64, 8, 28672, 32000)
TINY_LLAMA = Model(22, 2048, 32, 4, 5632, 32000)
G175 = Model(96, 12288, 96, 96, 49152, 51200, gated=False, tied=True)
NEMOTRON_15 = Model(32, 6144, 48, 8, 24576, 256000, gated=False)


def _opt(layers: int, hidden: int, heads: int, vocabulary: int) -> Model:
    return Model(layers, hidden, heads, heads, 4 * hidden, vocabulary, gated=False, tied=True)


def _tokens_s(per_gpu: float, gpus: int, tokens: int, sequences: int) -> float:
    """Seconds of a step by its tokens a second and device."""
    return tokens * sequences / (per_gpu * gpus)


def _titan(id: str, model: Model, topology: str, axes: dict[str, int], sequences: int, tokens_s: float, gpus: int, **more: object) -> Run:
    seconds = _tokens_s(tokens_s, gpus, 8192, sequences)
    return Run(id, f"T{model.hidden}", model, topology, axes, 8192, sequences, seconds, **more)  # type: ignore[arg-type]


# Composer keeps float32 masters in each of its modes, which it casts before a gather (mosaicml/composer#2047, its documentation), and sums
# gradients in bfloat16: "PURE" by name; "DEFAULT" said no dtype for them until October 2023 (#2628), so that they stay in that of the
# parameters (torch's `FlatParamHandle._init_param_reduce_dtypes`). The tables came on 18 October (llm-foundry#543), by scripts that name
# images of May and August (sweep.sh).
_COMPOSER: Mapping[str, object] = dict(fused="", attention="triton", flat=True, sums="bfloat16")


def _mosaic(id: str, model: Model, tokens: int, each: int, times: int, tokens_s: float, again: Again = "none") -> Run:
    rows = 8 * each * times
    seconds = _tokens_s(tokens_s, 8, tokens, rows)
    more = dict(again=again, **_COMPOSER)
    return Run(id, "P", model, "8xa100-80g", {"dp": 8}, tokens, rows, seconds, times, **more)  # type: ignore[arg-type]


def _megatron(id: str, heads: int, hidden: int, layers: int, tp: int, sequences: int, tflops: float) -> Run:
    model, tokens = _opt(layers, hidden, heads, 131072), 4096
    each = 72 * layers * hidden**2 * (1 + tokens / (6 * hidden) + model.vocabulary / (12 * layers * hidden))  # Megatron's own formula
    seconds = each * tokens * sequences / (tflops * 1e12 * 48 * tp)
    axes = {"dpo": 3, "dp": 16, "tp": tp}  # 48 ranks divide no vocabulary
    # "We perform fine-grained overlapping of ... tensor-parallel (--tp-comm-overlap)": Megatron-LM's README, above its table of models.
    collectives = "chunks" if tp > 1 else "early"
    more = dict(zero=1, fused="by hand", attention="cudnn", collectives=collectives, unknown="rows of a microbatch: all 4 of a rank")
    return Run(id, "M", model, "8xh100", axes, tokens, sequences, seconds, **more)  # type: ignore[arg-type]


# KempnerForge at the commit that its report names, 01b461a. scripts/train.py: the loss is `F.cross_entropy` of the logits as they are, and
# all microbatches but the last run under `set_requires_gradient_sync(False)` (training/grad.py), so that FSDP2 adds up whole gradients, in
# its `reduce_dtype`, float32 (distributed/parallel.py; torch's `FSDPParam.to_accumulated_grad_if_needed`). The column "Mem/GPU" is
# `torch.cuda.max_memory_allocated` (metrics/tracker.py, `peak_gb`): what was alive.
# What is compiled is the model (`build_parallel_model`); the loss is called behind it, and its variable `logits` lives
# until the next microbatch has its own.
_FORGE: Mapping[str, object] = dict(
    again="full", masters=False, reduces="last", logits="as computed", peak_of="alive", loss_as_written=True, keeps_logits=True
)
# Under tensor parallelism by torch's DTensor each of q, k, v, gate and up has its input as a part of the sequence, and the output layer
# gives every rank all of the logits (`output_layouts=Replicate()`), while the embedding stays whole on each ("Token embedding: Replicated";
# distributed/tensor_parallel.py).
_FORGE_TP: Mapping[str, object] = {**_FORGE, "logits": "gathered", "collectives": "waits", "apart": True, "whole_embedding": True}


def _kempner(id: str, dp: int, sequences: int, seconds: float, peak_gib: float) -> Run:
    axes = {"dp": dp, "tp": 4}
    return Run(id, "K15", K15, "4xh200-hgx", axes, 4096, sequences, seconds, 4, peak_gib=peak_gib, **_FORGE_TP)  # type: ignore[arg-type]


_D_S = {8: 12.78, 16: 12.99, 32: 13.00, 64: 13.00, 128: 13.16}
_TITAN_CARD = "8xh100-96g"

RUNS: tuple[Run, ...] = (
    _titan("T1", L8, _TITAN_CARD, {"dp": 8}, 16, 5762, 8, again="operators", fused="", peak_gib=82.4),
    _titan("T2", L8, _TITAN_CARD, {"dp": 8}, 16, 6667, 8, again="operators", peak_gib=77.0),
    _titan("T25", L8, _TITAN_CARD, {"dp": 8, "tp": 8}, 96, 4378, 64, again="operators", collectives="waits"),
    _titan("T33", L8, "8xa100-80g", {"dp": 64}, 64, 2904, 64, again="layers", fused=""),
    _titan("T34", L8, "8xa100-80g", {"dp": 64}, 64, 2973, 64, again="operators", fused=""),
    _titan("T35", L70, "8xa100-80g", {"dp": 64}, 64, 331, 64, again="full", fused=""),
    _titan("T42", L8, _TITAN_CARD, {"dp": 8}, 8, 6150, 8, again="operators", peak_gib=47.7, unknown="which H100: as the other rows"),
    # The report says 4 rows in each of 2 microbatches, as here; the commands of these two in its driver, mfu_bench.sh, say 2 in each of 4.
    Run("K1", "K8", L8, "4xh200-hgx", {"dp": 1}, 4096, 8, 3.13, 2, peak_gib=80.7, **_FORGE),
    Run("K2", "K8", L8, "4xh200-hgx", {"dp": 2}, 4096, 16, 3.50, 2, peak_gib=62.4, **_FORGE),
    Run("K3", "K8", L8, "4xh200-hgx", {"dp": 4}, 4096, 32, 3.36, 2, peak_gib=61.1, **_FORGE),
    Run("K10", "K15", K15, "4xh200-hgx", {"dp": 8}, 4096, 128, 14.81, 4, fused="", peak_gib=88.5, **_FORGE),
    _kempner("K11", 2, 32, 4.79, 45.1),
    _kempner("K12", 4, 64, 4.87, 39.2),
    _kempner("K13", 8, 128, 5.03, 36.3),
    Run("U1", "U", L3, "a100-80g", {"dp": 1}, 4096, 2, 8192 / 7075, fused="", masters=False, peak_gib=60.0, peak_of="alive"),
    Run("U2", "U", L3, "a100-80g", {"dp": 1}, 4096, 2, 8192 / 8998, masters=False, peak_gib=51.0, peak_of="alive"),
    _mosaic("P1", _opt(32, 4096, 32, 50368), 2048, 6, 2, 4641),
    _mosaic("P2", _opt(32, 4096, 32, 50368), 16384, 4, 2, 2453, "full"),
    _mosaic("P3", _opt(40, 5120, 40, 50368), 2048, 2, 3, 2262),
    _mosaic("P4", _opt(48, 7168, 56, 50368), 2048, 3, 21, 916, "full"),
    _mosaic("P5", _opt(48, 7168, 56, 50368), 8192, 1, 21, 574, "full"),
    *(
        Run(f"D{k}", "D", L8, "8xh100", {"dp": n // 2, "cp": 2}, 8192, 16 * n, seconds, 32, 1, fused="by hand", attention="cudnn")
        for k, (n, seconds) in enumerate(_D_S.items(), 1)
    ),
    _megatron("M1", 16, 2048, 24, 1, 192, 409),
    _megatron("M2", 32, 4096, 30, 2, 192, 466),
    _megatron("M3", 48, 6144, 32, 4, 192, 489),
    _megatron("M4", 56, 7168, 48, 8, 192, 460),
    Run("E1", "E", E13, "8xa100-80g", {"dp": 64}, 2048, 2048, 26.5, 32, 1, fused="by hand"),
    Run("E2", "E", E13, "8xa100-80g", {"dp": 32, "tp": 2}, 2048, 2048, 29.7, 32, 1, fused="by hand"),
    Run("E4", "E", E13, "8xa100-80g", {"dp": 32, "tp": 2}, 2048, 2048, 31.3, 64, 1, fused="by hand"),
)

OTHERS: tuple[Run, ...] = (
    _mosaic("P101", _opt(48, 7168, 56, 50368), 1024, 6, 21, 946, "full"),
    _mosaic("P102", _opt(48, 7168, 56, 50368), 4096, 1, 21, 814, "full"),
    _mosaic("P103", _opt(40, 5120, 40, 50368), 4096, 10, 3, 2060, "full"),
    _mosaic("P104", _opt(40, 5120, 40, 50368), 8192, 5, 3, 1795, "full"),
    _mosaic("P105", _opt(40, 5120, 40, 50368), 16384, 3, 3, 1431, "full"),
    _mosaic("P106", _opt(32, 4096, 32, 50368), 8192, 8, 2, 3206, "full"),
)
"""Rows of the table that P1 to P5 are from, looked up when all else was settled: they neither calibrate nor test, and say what a run is
worth that nobody has looked at before."""


def _held(id: str, model: Model, topology: str, axes: dict[str, int], tokens: int, each: int, tokens_s: float, **more: object) -> Run:
    """FSDP without accumulation: sequences of a rank, tokens a second and GPU."""
    ranks = prod(axes.values())
    rows = each * ranks // axes.get("tp", 1)
    return Run(id, id[:2], model, topology, axes, tokens, rows, _tokens_s(tokens_s, ranks, tokens, rows), **more)  # type: ignore[arg-type]


def _mosaic_h100(id: str, model: Model, gpus: int, tokens: int, each: int, times: int, tokens_s: float, **more: object) -> Run:
    rows = gpus * each * times
    seconds, axes = _tokens_s(tokens_s, gpus, tokens, rows), {"dp": gpus}
    more = dict(**_COMPOSER, **more)
    return Run(id, "MH", model, "8xh100", axes, tokens, rows, seconds, times, **more)  # type: ignore[arg-type]


def _nemotron(id: str, dp: int, seconds: float) -> Run:
    """Each rank has 4 microbatches of 4 rows; gathers and reduce-scatters of tensor parallelism in chunks (`ub_tp_comm_overlap`)."""
    more = dict(zero=1, fused="by hand", attention="cudnn", collectives="chunks")
    return Run(id, "N", NEMOTRON_15, "8xh100", {"dp": dp, "tp": 4}, 4096, 16 * dp, seconds, 4, **more)  # type: ignore[arg-type]


def _kempner_held(id: str, model: Model, axes: dict[str, int], each: int, times: int, seconds: float, peak_gib: float) -> Run:
    rows = axes.get("dp", 1) * each * times
    return Run(id, "KF", model, "4xh200-hgx", axes, 4096, rows, seconds, times, peak_gib=peak_gib, **_FORGE_TP)  # type: ignore[arg-type]


_EAGER = dict(fused="")
# fms_fsdp/policies/mixed_precision.py@8ec8256 and pretraining/policies/ before it: `bfSixteen`
_IBM = dict(fused="", flat=True, sums="bfloat16")

HELD_OUT: tuple[Run, ...] = (
    _held("TA1", LLAMA2_13, "8xa100-80g", {"dp": 64}, 4096, 2, 2162, **_EAGER),
    _held("TA2", LLAMA2_13, "8xa100-80g", {"dp": 64}, 4096, 2, 1914, again="layers", **_EAGER),
    _held("TA3", LLAMA2_13, "8xa100-80g", {"dp": 64}, 4096, 2, 1904, again="operators", **_EAGER),
    _held("TA4", LLAMA2_70, "8xa100-80g", {"dp": 64}, 4096, 1, 355, again="operators", **_EAGER),
    _held("TA5", LLAMA2_70, "8xa100-80g", {"dp": 64}, 4096, 2, 353, again="full", **_EAGER),
    _held("TH1", L405, _TITAN_CARD, {"dp": 16, "tp": 8}, 8192, 2, 109, again="full", collectives="waits", **_EAGER),
    _held("I1", LLAMA2_7, "8xa100-80g", {"dpo": 16, "dp": 8}, 4096, 2, 3760, uplink_gb_s=50, **_IBM),
    _held("I2", LLAMA2_13, "8xa100-80g", {"dpo": 16, "dp": 8}, 4096, 1, 1700, uplink_gb_s=50, **_IBM),
    _held("I3", CODE_LLAMA_34, "8xa100-80g", {"dp": 128}, 4096, 8, 772, again="full", uplink_gb_s=50, **_IBM),
    _held("I4", LLAMA2_70, "8xa100-80g", {"dp": 128}, 4096, 6, 380, again="full", uplink_gb_s=50, **_IBM),
    _held("IH1", CODE_LLAMA_34, "8xh100", {"dp": 96}, 4096, 2, 1550, again="full", uplink_gb_s=100, **_IBM),
    _held("IH2", LLAMA2_70, "8xh100", {"dp": 96}, 4096, 2, 800, again="full", uplink_gb_s=100, **_IBM),
    _mosaic_h100("MH1", _opt(24, 2048, 16, 50368), 8, 512, 56, 4, 52275),
    _mosaic_h100("MH2", _opt(32, 4096, 32, 50368), 8, 2048, 6, 1, 10643),
    _mosaic_h100("MH3", _opt(48, 7168, 56, 50368), 8, 2048, 3, 21, 2002, again="full"),
    _mosaic_h100("MH4", _opt(80, 8192, 64, 50368), 64, 2048, 8, 4, 1039, again="full", unknown="links between boxes: the usual ones"),
    _nemotron("N1", 4, 2.812),
    _nemotron("N2", 128, 2.875),
    Run(
        "S1", "S", TINY_LLAMA, "8xa100-40g", {"dp": 16}, 2048, 1024, _tokens_s(24000, 16, 2048, 1024), 8, fused="by hand",
        flat=True,
        reduces="last",  # `fabric.no_backward_sync` but in the last microbatch
        unknown="links between boxes: the usual ones",
    ),
    Run("C1", "C", _opt(48, 1600, 25, 50304), "8xh100", {"dp": 8}, 1024, 1024, 2.80, 8, zero=1, fused="by hand", attention="cudnn"),
    _kempner_held("KF1", L8, {"tp": 2}, 4, 2, 2.49, 57.8),
    _kempner_held("KF2", L8, {"tp": 4}, 4, 2, 1.30, 39.4),
    _kempner_held("KF3", L8, {"dp": 2, "tp": 2}, 4, 2, 2.52, 45.9),
    _kempner_held("KF4", L8, {"dp": 8, "tp": 4}, 4, 2, 1.68, 27.6),
    _kempner_held("KF5", L70, {"dp": 8, "tp": 4}, 2, 4, 14.85, 93.2),
)


def _gpt3(id: str, dp: int, seconds: float) -> Run:
    """64 microbatches of a row each; collectives of tensor parallelism in chunks, as of the other rows of D and N."""
    more = dict(zero=1, fused="by hand", attention="cudnn", collectives="chunks", schedule="interleaved-1f1b", unknown="two stages a rank")
    return Run(id, "D", G175, "8xh100", {"pp": 8, "dp": dp, "tp": 4}, 2048, 64 * dp, seconds, 64, **more)  # type: ignore[arg-type]


PIPELINED: tuple[Run, ...] = (
    Run("E3", "E", E13, "8xa100-80g", {"pp": 2, "dp": 32}, 2048, 2048, 31.1, 64, 1, fused="by hand", schedule="1f1b"),
    Run("E5", "E", E13, "8xa100-80g", {"pp": 2, "dp": 32}, 2048, 2048, 33.1, 32, 1, fused="by hand", schedule="1f1b"),
    _gpt3("D35", 4, 8.309),
    _gpt3("D36", 32, 8.453),
    Run(
        "R2", "R", G175, "8xa100-80g", {"pp": 8, "tp": 8}, 2048, 64, 13.75, 64, 0, schedule="interleaved-1f1b", fused="by hand",
        unknown="two stages a rank, it has three; which kernel of attention",
    ),
)
"""Pipelines of the tables that other rows are from, and R: arXiv 2205.05198, 175 B with sequence parallelism and attention made again,
which flash attention is. Predicted when all else was settled: they neither calibrate nor test."""


_MPT: Mapping[str, Model] = {
    "125M": _opt(12, 768, 12, 50368), "350M": _opt(24, 1024, 16, 50368), "760M": _opt(24, 1536, 12, 50368),
    "1B": _opt(24, 2048, 16, 50368), "3B": _opt(32, 2560, 20, 50368), "7B": _opt(32, 4096, 32, 50368),
    "13B": _opt(40, 5120, 40, 50368), "30B": _opt(48, 7168, 56, 50368), "70B": _opt(80, 8192, 64, 50368),
}  # fmt: skip


def _mosaic_a100(
    id: str, model: str, gpus: int, gb: int, tokens: int, each: int, times: int, tokens_s: float, again: Again = "none"
) -> Run:  # fmt: skip
    rows = gpus * each * times
    unknown = "links between boxes: the usual ones" if gpus > 8 else ""
    more = dict(again=again, unknown=unknown, **_COMPOSER)
    seconds = _tokens_s(tokens_s, gpus, tokens, rows)
    return Run(id, id[:2], _MPT[model], f"8xa100-{gb}g", {"dp": gpus}, tokens, rows, seconds, times, **more)  # type: ignore[arg-type]


def _llm_c(id: str, layers: int, hidden: int, heads: int, each: int, seconds: float) -> Run:
    """524,288 tokens a step."""
    model, times = _opt(layers, hidden, heads, 50304), 64 // each
    return Run(id, "CA", model, "8xa100-80g", {"dp": 8}, 1024, 512, seconds, times, zero=1, fused="by hand")


def _flag_perf(id: str, axes: dict[str, int], zero: int, times: int, tokens_s: float, **more: object) -> Run:
    """LLaMA of 7 B in float16 by PaddlePaddle, microbatches of 4 rows: norms and attention are fused, nothing is made again."""
    rows = 4 * axes["dp"] * times
    seconds = _tokens_s(tokens_s, 8, 2048, rows)
    more = dict(zero=zero, fused="", unknown="which version of FlashAttention; one kernel for a norm, as several here", **more)
    return Run(id, "FP", LLAMA2_7, "8xa100-80g", axes, 2048, rows, seconds, times, **more)  # type: ignore[arg-type]


FURTHER: tuple[Run, ...] = (
    _titan("T4", L8, _TITAN_CARD, {"dp": 128}, 256, 5605, 128, again="operators", fused="", peak_gib=67.0),
    _titan("T5", L8, _TITAN_CARD, {"dp": 128}, 256, 6514, 128, again="operators", peak_gib=62.0),
    _titan("T26", L8, _TITAN_CARD, {"dp": 8, "tp": 8}, 96, 4809, 64, again="operators", collectives="chunks"),
    Run("U4", "U", L3, "a100-80g", {"dp": 1}, 4096, 2, 8192 / 7210, again="full", masters=False, unknown="the loss in pieces, as one here"),
    _llm_c("CA1", 12, 768, 12, 64, 0.300),
    _llm_c("CA2", 24, 1024, 16, 64, 0.820),
    _llm_c("CA3", 36, 1280, 20, 32, 1.7),
    _mosaic_h100("MH5", _MPT["30B"], 8, 8192, 1, 21, 1384, again="full"),
    _mosaic_h100("MH6", _MPT["30B"], 8, 4096, 1, 21, 1802, again="full"),
    _mosaic_h100("MH7", _MPT["13B"], 8, 2048, 2, 1, 4792),
    _mosaic_h100("MH8", _MPT["13B"], 64, 2048, 2, 1, 4800, unknown="links between boxes: the usual ones"),
    _mosaic_h100("MH9", _MPT["7B"], 8, 65536, 1, 2, 1956, again="full"),
    _mosaic_h100("MH10", _MPT["760M"], 8, 2048, 24, 2, 63147),
    _mosaic_h100("MH11", _MPT["3B"], 8, 512, 40, 6, 27965),
    _mosaic_h100("MH12", _MPT["70B"], 32, 2048, 2, 16, 882, again="full", unknown="links between boxes: the usual ones"),
    _mosaic_h100("MH13", _MPT["760M"], 8, 1024, 48, 2, 78581),
    _mosaic_h100("MH14", _MPT["1B"], 8, 65536, 1, 2, 5506, again="full"),
    _mosaic_a100("MA1", "125M", 8, 80, 2048, 40, 2, 142830),
    _mosaic_a100("MA2", "125M", 8, 80, 65536, 1, 2, 20368),
    _mosaic_a100("MA3", "350M", 8, 80, 512, 128, 2, 69330),
    _mosaic_a100("MA4", "760M", 8, 80, 512, 96, 2, 29446),
    _mosaic_a100("MA5", "3B", 8, 80, 2048, 10, 2, 10811),
    _mosaic_a100("MA6", "13B", 8, 80, 32768, 1, 3, 1016, "full"),
    _mosaic_a100("MA7", "70B", 32, 80, 2048, 2, 16, 373, "full"),
    _mosaic_a100("MF1", "13B", 8, 40, 2048, 4, 16, 1668, "full"),
    _mosaic_a100("MF2", "13B", 16, 40, 2048, 10, 1, 1993, "full"),
    _mosaic_a100("MF3", "70B", 64, 40, 2048, 2, 1, 276, "full"),
    _mosaic_a100("MF4", "70B", 128, 40, 2048, 4, 1, 376, "full"),
    _mosaic_h100("MH15", _MPT["30B"], 16, 2048, 10, 3, 2263, again="full", unknown="links between boxes: the usual ones"),
    _mosaic_h100("MH16", _MPT["13B"], 8, 4096, 10, 3, 4717, again="full"),
    _flag_perf("FP1", {"dp": 8}, 2, 64, 4267),
    _flag_perf("FP2", {"dp": 4, "tp": 2}, 1, 128, 3888, collectives="waits"),
)
"""Further rows of the tables of T, U, MH and of llm.c's scripts, chosen to find where the clock fails, when all else was settled: they
neither calibrate nor test, and none is dropped for being missed. MA, MF: llm-foundry's tables of A100 with 80 and 40 GB. MH15, MH16
and FP came last, each written down as it stands before it was predicted."""
