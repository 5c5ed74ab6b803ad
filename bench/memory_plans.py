"""Plans for one machine that is not here: does it fit, in how many seconds, and how long does the answer take.

Each case is a whole training step (forward, loss, backward, AdamW), traced without weights and planned in a process of its
own. Peaks are those of the accountant, for the program that would run; seconds are the planner's model of the machine. A
new case is one entry of `CASES`; `python -m bench.memory_plans NAME` plans one and prints its memory, `--picture FILE` draws it.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

import colofunc as cf
from bench import Row, Section, fresh, peak_rss_bytes
from colofunc.cli import axes_of_text, machine
from colofunc.mesh.sizes import parse_bytes
from colofunc.planner.plan_table import time_text

LIMIT_S, LIMIT_GIB = 120, 4
UNCOUNTED = (
    "Published peaks also count what an allocator keeps in pieces that nobody can use, workspaces of kernels, the driver's context "
    "(half a gigabyte) and models beside the one that is trained (autoencoder, text encoder); these do not."
)
GIVE_UP_S = 600  # CPU seconds


def adamw(module: torch.nn.Module, batch: Mapping[str, Any], **options: Any) -> tuple[Any, Any, Any]:
    """A step of AdamW, its state without values, and a batch without values."""
    model, opt = cf.functional(module), cf.adapt(torch.optim.AdamW, lr=1e-4)
    step_fn, _ = cf.train_step(model, opt, **options)
    return step_fn, {"params": model.params, "buffers": model.buffers, "opt": opt.init(model.params)}, dict(batch)


def unet(rows: int) -> tuple[Any, Any, Any]:
    """Stable Diffusion 2's UNet (its published configuration): noise of latents 64 x 64 under a text of 77 tokens."""
    from diffusers import UNet2DConditionModel

    with torch.device("meta"):
        net = UNet2DConditionModel(
            sample_size=64, in_channels=4, out_channels=4, layers_per_block=2, block_out_channels=(320, 640, 1280, 1280),
            down_block_types=("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",), up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
            cross_attention_dim=1024, attention_head_dim=(5, 10, 20, 20), use_linear_projection=True,
        )  # fmt: skip

    def noisy(batch: Mapping[str, torch.Tensor]) -> Any:
        kept = batch["kept"][batch["time"]].view(-1, 1, 1, 1)
        return (kept.sqrt() * batch["latents"] + (1 - kept).sqrt() * batch["noise"], batch["time"], batch["text"]), {}

    def loss(out: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.mse_loss(out.sample, batch["noise"])

    image = cf.abstract((rows, 4, 64, 64))
    batch = {"latents": image, "noise": image, "text": cf.abstract((rows, 77, 1024)), "kept": cf.abstract((1000,))}
    return adamw(net, batch | {"time": cf.abstract((rows,), torch.int64)}, loss=loss, inputs=noisy)


def tokens(rows: int, length: int) -> dict[str, Any]:
    ids = cf.abstract((rows, length), torch.int64)
    return {"input_ids": ids, "labels": ids}


def gpt(width: int, layers: int, heads: int, rows: int, length: int = 1024) -> tuple[Any, Any, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        config = GPT2Config(n_embd=width, n_layer=layers, n_head=heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        return adamw(GPT2LMHeadModel(config), tokens(rows, length))


def opt(width: int, layers: int, heads: int, rows: int, length: int = 1024) -> tuple[Any, Any, Any]:
    from transformers import OPTConfig, OPTForCausalLM

    with torch.device("meta"):
        config = OPTConfig(
            hidden_size=width, ffn_dim=4 * width, num_hidden_layers=layers, num_attention_heads=heads, word_embed_proj_dim=width
        )
        return adamw(OPTForCausalLM(config).train(False), tokens(rows, length))


@attrs.frozen
class Case:
    """`chain`: the transforms around `shard`, inner first. `published`: what others report for the same."""

    name: str
    make: Callable[[], tuple[Any, Any, Any]]
    device: str
    chain: tuple[str, ...]
    budget: str = ""
    host: str = ""
    mesh: str = ""
    published: str = ""


KEPT, LEAN, MOVED = ("bf16",), ("bf16", "checkpoint"), ("bf16", "checkpoint", "offload")
HOSTED = ("bf16", "offload")
CASES = (
    Case("SD2 UNet, 16 images, float32, all kept", lambda: unet(16), "a100-80g", (), published="64.5 GB before anything was done"),
    Case("SD2 UNet, 16 images, bf16, all kept", lambda: unet(16), "a100-80g", KEPT, published="31.9 GB like for like"),
    Case("SD2 UNet, 16 images, bf16, made again", lambda: unet(16), "a100-80g", LEAN, "14.5GB"),
    Case("SD2 UNet, 16 images, bf16, made again and moved", lambda: unet(16), "a100-80g", MOVED, "11.6GB", published="11.6 GB"),
    Case("SD2 UNet, fine-tuning, 1 image in 8 GB", lambda: unet(1), "a100-40g", MOVED, "8GB", host="32GiB"),
    Case("GPT 1.5B on 6 GB, 1 row", lambda: gpt(1600, 48, 25, 1), "rtx-2060", MOVED, "6GB"),
    Case("GPT 18B on 24 GB, 1 row", lambda: gpt(6144, 40, 48, 1), "rtx-3090", HOSTED, "24GB", host="512GiB"),
    Case("OPT-30B on one device of 40 GB", lambda: opt(7168, 48, 56, 8), "a100-40g", MOVED, "40GB", host="512GiB"),
    Case("OPT-66B on 8 devices of 80 GB", lambda: opt(9216, 64, 72, 8), "a100-80g", HOSTED, "80GB", mesh="dp=8"),
)  # fmt: skip


def staged(case: Case, step: Any) -> Any:
    """The step of a case on its machine."""
    found = cf.shard(step, machine(case.device, "", case.host, "")(cf.Mesh(**axes_of_text(case.mesh))))
    budget = parse_bytes(case.budget, "budget") if case.budget else None
    for name in case.chain:
        if name == "checkpoint":
            found = cf.checkpoint(found, budget=None if "offload" in case.chain else budget)
        elif name == "offload":
            found = cf.offload(found, budget=budget)
        else:
            found = cf.precision(found, name)
    return found


def lowered(name: str) -> tuple[Any, float]:
    """A case planned, and the seconds that it took."""
    case = next(case for case in CASES if case.name == name)
    step, state, batch = case.make()
    began = time.process_time()
    low = staged(case, step).lower(state, batch)
    return low, time.process_time() - began


def too_long(*_: Any) -> None:
    raise TimeoutError(f"no plan after {GIVE_UP_S} CPU s")


def plan(name: str) -> dict[str, Any]:
    signal.signal(signal.SIGPROF, too_long)
    signal.setitimer(signal.ITIMER_PROF, GIVE_UP_S)
    began = time.process_time()
    try:
        low, took_s = lowered(name)
    except (cf.ColofuncError, TimeoutError) as error:
        return {"failed": str(error)[:300], "cpu_s": time.process_time() - began, "rss_bytes": peak_rss_bytes()}
    report, played = low.memory(), low.lanes()
    return {
        "cpu_s": took_s, "rss_bytes": peak_rss_bytes(), "peak_bytes": report.peak_bytes, "kinds": report.kinds(),
        "nodes": len(low.program.nodes), "step_s": played.end_s, "busy_s": played.busy_s(),
        "words": [*map(str, low.plan.axes), *low.plan.memory],
    }  # fmt: skip


def rows(case: Case) -> list[Row]:
    found = fresh("memory_plans", f"m.plan({case.name!r})")
    cheap = found["cpu_s"] <= LIMIT_S and found["rss_bytes"] <= LIMIT_GIB * 2**30
    cost = f"{found['cpu_s']:.0f} CPU s and {found['rss_bytes'] / 2**30:.1f} GiB to plan"
    limit = f"{case.budget + ', ' if case.budget else ''}{LIMIT_S} s, {LIMIT_GIB} GiB"
    if "failed" in found:
        return [Row(case.name, f"no plan; {cost}: {found['failed']}", limit, False)]
    peak = found["peak_bytes"]
    host = f" ({gb(peak['host'])} on the host)" if peak.get("host") else ""
    fits = not case.budget or peak["device"] <= parse_bytes(case.budget, "budget")
    said = f"peak {gb(peak['device'])}{host}, step {time_text(found['step_s'])} as planned; {found['nodes']:,} operators; {cost}"
    parts = ", ".join(f"{kind} {gb(nbytes)}" for kind, nbytes in list(found["kinds"].items())[:4])
    busy = ", ".join(f"{lane} {time_text(s)}" for lane, s in found["busy_s"].items())
    note = f"; {case.published} published" if case.published else ""
    more = "; ".join([f"at the peak: {parts}", f"busy: {busy}", *found["words"]])
    return [Row(case.name, said, limit + note, cheap and fits), Row("", more)]


def gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB"


def bench() -> Section:
    setting = f"Training steps (AdamW, float32 masters under bf16) planned without the machine, torch {torch.__version__}."
    setting = f"{setting} {UNCOUNTED}"
    return Section("Plans in memory", setting, [row for case in CASES for row in rows(case)])


if __name__ == "__main__":
    low, took_s = lowered(sys.argv[1])
    print(low.memory(), low.plan.memory, f"{took_s:.1f} CPU s, {peak_rss_bytes() / 2**30:.1f} GiB", sep="\n")
    if "--picture" in sys.argv:
        from colofunc.pictures import memory_picture

        budget = next((c.budget for c in CASES if c.name == sys.argv[1]), "")
        memory_picture(low, sys.argv[-1], parse_bytes(budget, "budget") if budget else None, sys.argv[1])
