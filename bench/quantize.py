"""Quantized weights: the published cases, planned without a machine, and small ones of their kind, run.

BLOOM-176B in int8 on 8 devices (published: 44.06 GB of weights each in fp16, 23.2 GB in int8), the parts of Stable Diffusion 2 for one
image of 512 x 512 in float32 and in int8 under bf16, and a QLoRA step of LLaMA-70B on one device of 48 GB. Models are of their public
configurations and have no values; bytes are the accountant's. A small QLoRA step is run, beside what the formula says that it holds. Each
plan is made in a process of its own.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from colofunc_plugins import tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import colofunc as cf
from bench import Row, Section, forget_peak, fresh, peak_rss_bytes, rss_bytes
from bench.memory_plans import gb, tokens
from colofunc.cli import machine
from colofunc.planner.plan_table import time_text
from tests.live_bytes import Held

BLOOM_LIMIT_BYTES = 23.2e9
DIFFUSION_RATIO = 2.5
LLAMA_BUDGET = "48GB"
LOADED_WIDTH = 4096


def weight_bytes(low: Any) -> int:
    """Bytes of a rank's weights: what is read of a model, packed or not."""
    inputs = [low.program.values[id] for id in low.program.inputs]
    return sum(value.nbytes for value in inputs if value.role in ("frozen", "param", "buffer"))


def largest_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference, as a part of the largest value."""
    return float((got.double() - want.double()).abs().max() / want.double().abs().max())


# ---- BLOOM ----


def bloom(width: int, layers: int, heads: int, vocabulary: int, dtype: torch.dtype) -> tuple[Any, Callable[[Any, Any], Any]]:
    """A model without values, and its logits as a function of (params, ids)."""
    from transformers import BloomConfig, BloomForCausalLM

    config = BloomConfig(vocab_size=vocabulary, hidden_size=width, n_layer=layers, n_head=heads, use_cache=False)
    model = cf.functional(cf.lazy(lambda: BloomForCausalLM(config).to(dtype).eval()))

    def logits(params: Any, ids: torch.Tensor) -> torch.Tensor:
        return model.apply(params, model.buffers, input_ids=ids, use_cache=False)[0].logits

    return model, logits


def bloom_plan() -> dict[str, Any]:
    """Bytes of a rank's weights and its peak, for BLOOM's public configuration in bf16."""
    model, logits = bloom(14336, 70, 112, 250880, torch.bfloat16)
    mesh = machine("a100-80g", "", "", "")(cf.Mesh(tp=8))
    step = cf.quantize(cf.shard(logits, mesh, tensor("1d", "tp")), "int8")
    began = time.process_time()
    low = step.lower(model.params, cf.abstract((1, 16), torch.int64))
    took_s = time.process_time() - began
    return {"weights": weight_bytes(low), "peak": low.memory().peak_bytes["device"], "cpu_s": took_s, "nodes": len(low.program.nodes)}


def bloom_run() -> dict[str, Any]:
    """A small BLOOM in float32 on 8 simulated ranks: bytes of a rank's weights as planned and as placed, and errors of its logits."""
    torch.manual_seed(0)
    model, logits = bloom(512, 4, 8, 1024, torch.float32)
    ids = torch.randint(0, 1024, (2, 16))
    step = cf.quantize(cf.shard(logits, cf.Mesh(tp=8), tensor("1d", "tp")), "int8")
    planned = weight_bytes(step.lower(model.params, ids))
    params = step.init(model.params, ids)
    placed = sum(map(part_bytes, params.values()))
    got = step(params, ids).full()
    one_device = cf.quantize(logits, "int8")(model.params, ids).full()
    plain = cf.shard(logits, cf.Mesh())(model.params, ids).full()
    return {"planned": planned, "placed": placed, "one": largest_error(got, one_device), "plain": largest_error(got, plain)}


def bloom_rows() -> list[Row]:
    plan, run = fresh("quantize", "m.bloom_plan()"), fresh("quantize", "m.bloom_run()")
    figure = f"weights {gb(plan['weights'])} each, peak {gb(plan['peak'])}; {plan['nodes']:,} operators, {plan['cpu_s']:.0f} CPU s to plan"
    errors = f"logits differ by {run['one']:.1e} of the largest from int8 on one device, by {run['plain']:.1e} from float32"
    return [
        Row("BLOOM-176B, int8, 8 devices", figure, "at most 23.20 GB of weights each", plan["weights"] <= BLOOM_LIMIT_BYTES),
        Row("BLOOM of 4 layers of 512, int8, run on 8 simulated ranks", f"{run['placed']:,} B of weights a rank; {errors}",
            f"the plan's {run['planned']:,} B", run["placed"] == run["planned"]),
        load_row("int8"),
        load_row("nf4"),
    ]  # fmt: skip


def loaded(folder: str, scheme: str) -> dict[str, int]:
    """On one of two real ranks: bytes that it holds behind `init` of a BLOOM in a folder, and how far its peak was above these."""
    ids = cf.abstract((1, 16), torch.int64)
    mesh = cf.Mesh(tp=2)

    def placed(path: str, width: int) -> tuple[int, int]:
        model, logits = bloom(width, 2, 8, 1024, torch.bfloat16)
        model = cf.load(path, model=model)
        step = cf.quantize(cf.shard(logits, mesh, tensor("1d", "tp")), scheme)
        step.lower(model.params, ids)
        gc.collect()
        forget_peak()
        before = rss_bytes()
        params = step.init(model.params, ids)
        return sum(map(part_bytes, params.values())), peak_rss_bytes() - before

    placed(f"{folder}/small", 128)  # what is imported and compiled along the way does not count
    held, grown = placed(f"{folder}/large", LOADED_WIDTH)
    return {"held": held, "beyond": grown - held}


def part_bytes(weight: Any) -> int:
    """Bytes of a rank's part of a weight, packed or not."""
    parts = weight.parts if isinstance(weight, cf.ext.Quantized) else (weight,)
    return sum(part.local.numel() * part.local.itemsize for part in parts)


def load_run(scheme: str) -> dict[str, Any]:
    """In how many files the weights are, and `loaded` of both ranks.

    The ranks' allocator gives back what is freed: else the peak of a process has up to 0.1 GB of it by chance.
    """
    from transformers import BloomConfig, BloomForCausalLM

    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(256 << 10)
    with tempfile.TemporaryDirectory() as folder:
        for name, width, file_size in (("small", 128, "100KB"), ("large", LOADED_WIDTH, "100MB")):
            config = BloomConfig(vocab_size=1024, hidden_size=width, n_layer=2, n_head=8)
            model = BloomForCausalLM(config).to(torch.bfloat16)
            model.save_pretrained(f"{folder}/{name}", max_shard_size=file_size)
        files = len(list(Path(folder, "large").glob("*.safetensors")))
        return {"files": files, "ranks": cf.launch(loaded, 2, folder, scheme)}


def load_row(scheme: str) -> Row:
    run = fresh("quantize", f"m.load_run({scheme!r})")
    ranks = run["ranks"]
    worst = max(rank["beyond"] for rank in ranks)
    held, largest = max(rank["held"] for rank in ranks), 4 * LOADED_WIDTH * LOADED_WIDTH * 2
    figure = f"from {run['files']} files: {gb(held)} of weights a rank, peak of the process {gb(worst)} above them"
    name = f"BLOOM of 2 layers of {LOADED_WIDTH} in bf16, read from safetensors in {scheme} on 2 processes"
    return Row(name, figure, f"at most its largest tensor, {gb(largest)}, above", worst <= largest and run["files"] > 1)


# ---- Stable Diffusion 2 ----


@attrs.frozen
class Part:
    """One of the networks, or a small one of its kind.

    `make`: the module. `batch`: shapes and dtypes of its arguments. `result`: what is used of its output.
    """

    make: Callable[[bool], torch.nn.Module]
    batch: Callable[[bool], Mapping[str, Any]]
    result: Callable[[Any], torch.Tensor]


def text_encoder(small: bool) -> torch.nn.Module:
    from transformers import CLIPTextConfig, CLIPTextModel

    width, layers, heads = (64, 2, 4) if small else (1024, 23, 16)
    config = CLIPTextConfig(
        hidden_size=width, intermediate_size=4 * width, num_attention_heads=heads, num_hidden_layers=layers, hidden_act="gelu",
        vocab_size=49408, max_position_embeddings=77,
    )  # fmt: skip
    return CLIPTextModel(config)


def unet(small: bool) -> torch.nn.Module:
    from diffusers import UNet2DConditionModel

    widths, heads, text = ((32, 64, 128, 128), (2, 4, 8, 8), 64) if small else ((320, 640, 1280, 1280), (5, 10, 20, 20), 1024)
    return UNet2DConditionModel(
        sample_size=64, in_channels=4, out_channels=4, layers_per_block=2, block_out_channels=widths, cross_attention_dim=text,
        down_block_types=("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",), up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
        attention_head_dim=heads, use_linear_projection=True,
    )  # fmt: skip


class Decoder(torch.nn.Module):
    """What makes an image of latents: the half of the autoencoder that inference uses."""

    def __init__(self, small: bool) -> None:
        from diffusers import AutoencoderKL

        super().__init__()
        vae = AutoencoderKL(
            block_out_channels=(32, 32, 64, 64) if small else (128, 256, 512, 512), down_block_types=("DownEncoderBlock2D",) * 4,
            layers_per_block=2, latent_channels=4, up_block_types=("UpDecoderBlock2D",) * 4,
        )  # fmt: skip
        self.post_quant_conv, self.decoder = vae.post_quant_conv, vae.decoder

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.post_quant_conv(latents))


def latents(small: bool) -> Any:
    side = 16 if small else 64
    return cf.abstract((1, 4, side, side))


def unet_batch(small: bool) -> dict[str, Any]:
    text = cf.abstract((1, 77, 64 if small else 1024))
    return {"sample": latents(small), "timestep": cf.abstract((1,), torch.int64), "encoder_hidden_states": text}


PARTS = {
    "text encoder": Part(text_encoder, lambda small: {"input_ids": cf.abstract((1, 77), torch.int64)}, lambda out: out.last_hidden_state),
    "UNet": Part(unet, unet_batch, lambda out: out.sample),
    "VAE decoder": Part(Decoder, lambda small: {"latents": latents(small)}, lambda out: out),
}


def part_of(name: str, small: bool) -> tuple[Any, Callable[[Any, Any], torch.Tensor]]:
    """The model of a part, without values, and its result as a function of (params, batch)."""
    part = PARTS[name]
    model = cf.functional(cf.lazy(lambda: part.make(small).eval()))

    def forward(params: Any, batch: Any) -> torch.Tensor:
        return part.result(model.apply(params, model.buffers, **batch)[0])

    return model, forward


def part_in_torch(name: str) -> dict[str, int]:
    """The peak of a part in float32 as PyTorch runs it, operator by operator, without gradients: distinct storages that are alive.

    Workspace within an operator does not count, here as in plans.
    """
    part = PARTS[name]
    with FakeTensorMode(), torch.no_grad():
        module = part.make(False).eval()
        batch = {key: torch.empty(like.shape, dtype=like.dtype) for key, like in part.batch(False).items()}
        given = [*module.parameters(), *module.buffers(), *batch.values()]
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in given}
        with Held(given) as held:
            module(**batch)
    return {"peak": sum(storages.values()) + held.peak_bytes}


def part_plan(name: str, scheme: str) -> dict[str, Any]:
    """Bytes of the weights of a part, its peak, and the activations at it; scheme "": float32."""
    model, forward = part_of(name, small=False)
    step = cf.shard(forward, machine("rtx3090", "", "", "")(cf.Mesh()))
    if scheme:
        step = cf.quantize(cf.precision(step, "bf16"), scheme)
    low = step.lower(model.params, PARTS[name].batch(False))
    report, weights = low.memory(), weight_bytes(low)
    found = {"weights": weights, "peak": report.peak_bytes["device"], "activations": report.kinds().get("activations", 0)}
    return {**found, "least": weights + largest_convolution_bytes(low)}


def largest_convolution_bytes(low: Any) -> int:
    """What a convolution reads and writes, which no order of operators makes less: only tiles of the image do."""
    values = low.program.values
    convolutions = [node for node in low.program.nodes if node.target == "aten.convolution.default"]
    return max((values[node.refs[0]].nbytes + values[node.outs[0]].nbytes for node in convolutions), default=0)


def part_run(name: str) -> dict[str, float]:
    """A small part, run: the errors of bf16 and of int8 under bf16 against float32."""
    torch.manual_seed(0)
    model, forward = part_of(name, small=True)
    params = cf.shard(forward, cf.Mesh()).init(model.params, PARTS[name].batch(True))
    params = {key: weight.full() for key, weight in params.items()}
    batch = {}
    for key, like in PARTS[name].batch(True).items():
        batch[key] = torch.randn(like.shape) if like.dtype.is_floating_point else torch.randint(0, 1000, like.shape)
    want = cf.shard(forward, cf.Mesh())(params, batch).full()
    narrow = cf.precision(cf.shard(forward, cf.Mesh()), "bf16")
    return {
        "bf16": largest_error(narrow(params, batch).full(), want),
        "int8": largest_error(cf.quantize(narrow, "int8")(params, batch).full(), want),
    }


def diffusion_rows() -> list[Row]:
    rows = []
    plain = {name: fresh("quantize", f"m.part_in_torch({name!r})") for name in PARTS}
    wide = {name: fresh("quantize", f"m.part_plan({name!r}, '')") for name in PARTS}
    small = {name: fresh("quantize", f"m.part_plan({name!r}, 'int8')") for name in PARTS}
    target = f"at least {DIFFUSION_RATIO} times below float32 in PyTorch"
    for name in PARTS:
        rows += part_rows(name, plain[name], wide[name], small[name], target)
    weights = sum(part["weights"] for part in wide.values())
    # With all weights on the device, and one part running after the other.
    before = weights + max(plain[name]["peak"] - wide[name]["weights"] for name in PARTS)
    between, after = all_parts(wide), all_parts(small)
    figure = (
        f"{gb(before)} in float32 in PyTorch, {gb(between)} by our plan, {gb(after)} in int8 under bf16: {before / after:.2f} and "
        f"{between / after:.2f} times less"
    )
    rows.append(Row("all three on one device, one running after the other", figure, target, before / after >= DIFFUSION_RATIO))
    for name in PARTS:
        error = fresh("quantize", f"m.part_run({name!r})")
        rows.append(Row(f"a small {name}, run", f"{error['int8']:.1e} of the largest from float32; bf16 alone {error['bf16']:.1e}"))
    return rows


def part_rows(name: str, plain: Mapping[str, int], wide: Mapping[str, int], small: Mapping[str, int], target: str) -> list[Row]:
    """A part in int8 under bf16 beside float32: in PyTorch, and by our own plan, which holds less.

    Where the ratio to our own plan is below the target, the figure has the most that any order of operators could make of it.
    """
    less, less_than_ours = plain["peak"] / small["peak"], wide["peak"] / small["peak"]
    title = f"Stable Diffusion 2, {name} alone"
    beside_torch = f"peak {gb(plain['peak'])} in PyTorch, {gb(small['peak'])} in int8: {less:.2f} times less"
    kinds = (("weights", "weights"), ("activations at the peak", "activations"))
    parts = ", ".join(f"{kind} {gb(wide[key])} to {gb(small[key])}" for kind, key in kinds)
    figure = f"{gb(wide['peak'])} by our plan: {less_than_ours:.2f} times less ({parts})"
    if less_than_ours < DIFFUSION_RATIO:
        # (W + A) / (w + A / 2) >= r, with activations A in float32, is A <= (W - r w) / (r / 2 - 1).
        most = wide["least"] / small["least"]
        enough = (wide["weights"] - DIFFUSION_RATIO * small["weights"]) / (DIFFUSION_RATIO / 2 - 1)
        figure += (
            f". The most is {most:.2f}: bf16 halves activations and no more, {DIFFUSION_RATIO} times less takes at most "
            f"{gb(enough)} of them in float32, and one convolution reads and writes {gb(wide['least'] - wide['weights'])}"
        )
    ours = f"at least {DIFFUSION_RATIO} times below our own float32 plan"
    return [
        Row(title, beside_torch, target, less >= DIFFUSION_RATIO),
        Row(f"{title}, beside our own float32", figure, ours, less_than_ours >= DIFFUSION_RATIO),
    ]


def all_parts(parts: Mapping[str, Mapping[str, int]]) -> int:
    """The peak with all weights on the device, and one part running after the other."""
    weights = sum(part["weights"] for part in parts.values())
    return weights + max(part["peak"] - part["weights"] for part in parts.values())


# ---- LLaMA ----


def llama_plan() -> dict[str, Any]:
    """A QLoRA step (nf4, adapters of rank 16 on all projections) of LLaMA-70B."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8, vocab_size=32000,
        max_position_embeddings=4096,
    )  # fmt: skip
    model = cf.lora(cf.functional(cf.lazy(lambda: LlamaForCausalLM(config).to(torch.bfloat16))), where="*.*_proj", rank=16)
    step_fn, state = cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=1e-4))
    mesh = machine("l40s", "", "256GiB", "")(cf.Mesh())
    step = cf.offload(cf.checkpoint(cf.shard(step_fn, mesh)), budget=LLAMA_BUDGET)
    step = cf.precision(cf.quantize(step, "nf4", where="*_proj.weight"), "bf16")
    began = time.process_time()
    low = step.lower(state, tokens(1, 512))
    took_s = time.process_time() - began
    peak = dict(low.memory().peak_bytes)
    return {"weights": weight_bytes(low), "peak": peak, "kinds": low.memory().kinds(), "step_s": low.lanes().end_s, "cpu_s": took_s}


def llama_row() -> Row:
    found = fresh("quantize", "m.llama_plan()")
    peak = found["peak"]
    parts = ", ".join(f"{kind} {gb(nbytes)}" for kind, nbytes in list(found["kinds"].items())[:4])
    memory = f"peak {gb(peak['device'])} ({parts}), {gb(peak.get('host', 0))} on the host"
    figure = f"weights and adapters {gb(found['weights'])}, {memory}; step {time_text(found['step_s'])} as planned"
    name = "LLaMA-70B, QLoRA in nf4, 1 x 512 tokens, one L40S"
    return Row(name, f"{figure}; {found['cpu_s']:.0f} CPU s to plan", f"at most {LLAMA_BUDGET}", peak["device"] <= 48e9)


# ---- QLoRA, run ----


@attrs.frozen
class Sizes:
    """A LLaMA with adapters, and its batch."""

    width: int = 1024
    hidden: int = 4096
    layers: int = 6
    vocabulary: int = 1024
    rank: int = 16
    rows: int = 4
    length: int = 256


def formula_bytes(sizes: Sizes) -> dict[str, int]:
    """What QLoRA has to hold, all but weights in float32, by what it is of.

    Weights: projections in nf4, table, head and norms as they are. Adapters: each number four times, with its gradient and two moments.
    Boundaries: the input of each layer. A layer: what its backward reads, of each token 7 widths (both norms' results, queries, keys,
    values, attention's result, the sum behind it) and 4 hidden widths (gate, up, the activated gate, their product).
    """
    d, f, tokens_held = sizes.width, sizes.hidden, sizes.rows * sizes.length
    shapes = [(d, d)] * 4 + [(f, d)] * 2 + [(d, f)]
    packed = sum(o * i // 2 + o * i // 64 + 4 * o for o, i in shapes)
    plain = 4 * (2 * sizes.vocabulary * d + (2 * sizes.layers + 1) * d)
    adapters = sizes.layers * sum(sizes.rank * (o + i) for o, i in shapes)
    return {
        "weights": sizes.layers * packed + plain,
        "adapters": 4 * 4 * adapters,
        "boundaries": 4 * sizes.layers * tokens_held * d,
        "a layer": 4 * tokens_held * (7 * d + 4 * f),
    }


def qlora_run() -> dict[str, Any]:
    """A QLoRA step within the bytes of the formula: its peak as counted, and what the process grew by when it was placed and run."""
    qlora_step(Sizes(width=128, hidden=512, layers=2))  # what is imported and compiled along the way does not count
    return qlora_step(Sizes())


def qlora_step(sizes: Sizes) -> dict[str, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=sizes.vocabulary, hidden_size=sizes.width, intermediate_size=sizes.hidden, num_hidden_layers=sizes.layers,
        num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=sizes.length, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = cf.lora(cf.functional(cf.lazy(lambda: LlamaForCausalLM(config))), where="*_proj", rank=sizes.rank)
    step_fn, state = cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=1e-3))
    ids = torch.randint(0, sizes.vocabulary, (sizes.rows, sizes.length))
    batch = {"input_ids": ids, "labels": ids}
    formula = formula_bytes(sizes)
    quantized = cf.quantize(cf.shard(step_fn, cf.Mesh()), "nf4", where="*_proj.weight")
    without = quantized.lower(state, batch).memory().peak_bytes["device"]
    # Of a small model logits and what is widened at a time are most of it.
    step = cf.checkpoint(quantized, budget=sum(formula.values()) if sizes == Sizes() else "1GB")
    counted = step.lower(state, batch).memory().peak_bytes["device"]
    gc.collect()
    forget_peak()
    before = rss_bytes()
    state = step.init(state, batch)
    losses = []
    for _ in range(2):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return {"formula": formula, "counted": counted, "without": without, "grown": peak_rss_bytes() - before, "losses": losses}


def qlora_row() -> Row:
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(256 << 10)  # of the process that runs it
    found = fresh("quantize", "m.qlora_run()")
    total = sum(found["formula"].values())
    parts = ", ".join(f"{what} {gb(nbytes)}" for what, nbytes in found["formula"].items())
    figure = (
        f"peak {gb(found['counted'])} as counted, the process grew by {gb(found['grown'])} while it was placed and run; "
        f"{gb(found['without'])} without recomputation"
    )
    name = "QLoRA of a LLaMA of 6 layers of 1024 in nf4, 4 x 256 tokens, float32, run on a CPU"
    # The counted peak is within the formula because that is the budget, so what the process grew by is compared, too.
    met = max(found["counted"], found["grown"]) <= total and found["losses"][1] < found["losses"][0]
    return Row(name, figure, f"the formula's {gb(total)} ({parts})", met)


def bench() -> Section:
    setting = (
        f"Public configurations, no values; batch 1, 512 x 512 pixels; torch {torch.__version__}. Activations are halved by bf16, and no "
        "scheme here makes them smaller. Processes that read have MALLOC_MMAP_THRESHOLD_ of 256 KiB: glibc keeps freed memory otherwise."
    )
    return Section("Quantized weights: the published cases", setting, [*bloom_rows(), *diffusion_rows(), llama_row(), qlora_row()])
