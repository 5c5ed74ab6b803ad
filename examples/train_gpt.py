"""Train a small GPT-2 on the sources of Python's standard library, on four ranks that you do not have.

    make demo                                                   # four simulated ranks in this process
    torchrun --nproc-per-node 2 examples/train_gpt.py --dp 1    # the same file on real ranks (gloo, tp=2)

The step function below is ordinary PyTorch for one device. One line makes it run on a mesh.
"""

from __future__ import annotations

import argparse
import math
import os
import pathlib
import sys
import sysconfig
import time

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # the demo's own output is enough

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import GPT2Config, GPT2LMHeadModel, OPTConfig, OPTForCausalLM

import colofunc as cf

PICTURES = ("loss.png", "memory.png")
CONTEXT = 128


def corpus(limit: int = 4_000_000) -> torch.Tensor:
    """Bytes of the standard library's sources, one long tensor."""
    files = sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(f.read_bytes() for f in files)[:limit]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def batch_at(data: torch.Tensor, n: int, size: int, masked: bool = False) -> dict[str, torch.Tensor]:
    """Batch number `n`: (size, CONTEXT) ids and labels. `masked`: rows keep very different numbers of labels."""
    rows = torch.Generator().manual_seed(n)
    starts = torch.randint(0, len(data) - CONTEXT, (size,), generator=rows)
    ids = torch.stack([data[s : s + CONTEXT] for s in starts])
    labels = ids.clone()
    if masked:
        for row in range(size):
            labels[row, : CONTEXT * row // size] = -100  # ignored by the loss
    return {"input_ids": ids, "labels": labels}


def make_step(model: cf.Model, opt: cf.Optimizer):
    """The training step for one device."""

    def loss_fn(params, buffers, batch):
        out, buffers = model.apply(params, buffers, **batch)
        return out.loss, buffers

    def step_fn(state, batch):
        (loss, buffers), grads = cf.value_and_grad(loss_fn, has_aux=True)(state["params"], state["buffers"], batch)
        grads, norm = cf.clip_by_global_norm(grads, 1.0)
        params, opt_state = opt.update(grads, state["opt"], state["params"])
        return {"params": params, "buffers": buffers, "opt": opt_state}, {"loss": loss, "grad_norm": norm}

    return step_fn


def train(step, step_fn, state, reference, data, args, console):
    """Run the sharded step beside the single device's; returns the two loss curves and the final state."""
    placed = step.init(state, batch_at(data, 0, args.batch))
    ours, theirs = [], []
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=console.quiet) as bar:
        task = bar.add_task("training", total=args.steps, note="")
        for n in range(args.steps):
            batch = batch_at(data, n, args.batch, masked=n == args.steps // 2)
            placed, metrics = step(placed, batch)
            reference, expected = step_fn(reference, batch)
            ours.append(float(metrics["loss"]))
            theirs.append(float(expected["loss"]))
            note = f"loss {ours[-1]:.4f}  one device {theirs[-1]:.4f}  difference {abs(ours[-1] - theirs[-1]):.1e}"
            if n == args.steps // 2:
                bar.console.print(f"  step {n}: rows with 0 to {CONTEXT - CONTEXT // args.batch} labels masked; {note}")
            bar.update(task, advance=1, note=note)
    worst = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    console.print(f"  largest difference of the loss over {args.steps} steps: {worst:.1e} (float32)")
    return placed, ours, theirs


def generate(model, params, buffers, prompt: bytes, count: int) -> str:
    """A little text, one byte at a time."""
    module = model.to_module(params, buffers).eval()
    ids = torch.tensor([list(prompt)])
    chooser = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _ in range(count):
            logits = module(input_ids=ids[:, -CONTEXT:]).logits[0, -1] / 0.7
            ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1, generator=chooser)[None]], 1)
    return bytes(ids[0].tolist()).decode("utf-8", "replace")


def plan_big(console) -> None:
    """Plan a training step of OPT-30B for eight A100s: no weights, no GPU, only shapes."""
    began = time.perf_counter()
    config = OPTConfig(
        hidden_size=7168,
        ffn_dim=28672,
        num_hidden_layers=48,
        num_attention_heads=56,
        word_embed_proj_dim=7168,
        dropout=0.0,
    )
    with torch.device("meta"):
        module = OPTForCausalLM(config)
    model, opt = cf.functional(module), cf.adapt(torch.optim.AdamW, lr=1e-4)
    state = {"params": model.params, "buffers": model.buffers, "opt": opt.init(model.params)}
    ids = cf.abstract((8, 1024), torch.int64)
    step = cf.shard(make_step(model, opt), cf.Mesh(dp=2, tp=4, topology="8xa100-80g"))
    low = step.lower(state, {"input_ids": ids, "labels": ids})
    billions = sum(p.numel() for p in model.params.values()) / 1e9
    console.print(f"  OPT, {billions:.1f}B parameters, 8xA100-80G, batch 8 x 1024: [bold]{low.plan}[/bold]")
    peak = low.memory().peak_bytes["device"] / 2**30
    took_s = time.perf_counter() - began
    console.print(
        f"  estimated {low.cost().seconds:.2f} s a step, peak {peak:.1f} GiB a rank; planned in {took_s:.1f} s"
    )


def curve(low, budget_bytes: int, top_bytes: int, console, width: int = 100, height: int = 9) -> None:
    """One rank's memory over a step, operator by operator; the budget is the red line, and red is what is above it."""
    held = low.memory().timeline["device"]
    columns = [max(held[len(held) * c // width : len(held) * (c + 1) // width + 1]) for c in range(width)]
    line = round(height * budget_bytes / top_bytes)
    for row in reversed(range(height)):
        bars = "".join(" ▁▂▃▄▅▆▇█"[min(8, max(0, int(8 * (height * nbytes / top_bytes - row))))] for nbytes in columns)
        console.print(f"  [{'red' if row >= line else 'green'}]{bars}[/]")
        if row == line:
            console.print(f"  [red]{'─' * width}[/] {budget_bytes / 2**20:.1f} MiB")


def with_less(step, low, batch, loss: float, state, console):
    """The same step within a budget of memory: what backward needs is made again.

    Returns it lowered, and the budget.
    """
    peak = low.memory().peak_bytes["device"]
    budget = int(0.75 * peak)
    lean = cf.checkpoint(step.with_plan(low.plan), budget=budget)
    lowered = lean.lower(state, batch)
    console.print(f"  before: peak {peak / 2**20:.1f} MiB a rank")
    curve(low, budget, peak, console)
    console.print(f"      step = cf.checkpoint(step, budget={budget})     # split as before")
    curve(lowered, budget, peak, console)
    _, metrics = lean(lean.init(state, batch), batch)
    more = lowered.cost().seconds / low.cost().seconds - 1
    console.print(
        f"  peak {lowered.memory().peak_bytes['device'] / 2**20:.1f} MiB a rank for {more:.1%} more time as planned; "
        f"loss of the first step {float(metrics['loss']):.4f}, difference {abs(float(metrics['loss']) - loss):.1e}"
    )
    return lowered, budget


def as_pipeline(step_fn, size: int, batch, loss: float, state, console) -> None:
    """The first step once more, its layers on two groups of ranks that work on one microbatch after another."""
    mesh = cf.Mesh(pp=2, dp=size // 2)
    parts = math.gcd(4, len(batch["input_ids"]))
    step = cf.pipeline(cf.shard(step_fn, mesh), microbatches=parts, schedule="zb-h1")
    console.print(f'      step = cf.pipeline(cf.shard(step_fn, {mesh}), microbatches={parts}, schedule="zb-h1")')
    low = step.lower(state, batch)
    console.print(low.pipeline().text(), markup=False, highlight=False)
    _, metrics = step(step.init(state, batch), batch)
    console.print(
        f"  loss of the first step {float(metrics['loss']):.4f}, difference {abs(float(metrics['loss']) - loss):.1e}"
    )


def pictures(losses, reference, low, budget: int, folder: pathlib.Path, console) -> None:
    """The loss beside the single device's, and one rank's memory over the step under its budget."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from colofunc.pictures import memory_picture

    folder.mkdir(parents=True, exist_ok=True)
    fig, ax = plt.subplots(figsize=(7, 4))
    ax.plot(reference, label="one device", lw=4, alpha=0.4)
    ax.plot(losses, label="simulated mesh", lw=1.2, color="black")
    ax.set(xlabel="step", ylabel="loss (nats per byte)", title="The same curve")
    ax.legend()
    fig.savefig(folder / PICTURES[0], dpi=130, bbox_inches="tight")
    memory_picture(low, folder / PICTURES[1], budget, "One rank's memory over one step, under its budget")
    console.print(f"  {folder / PICTURES[0]}, {folder / PICTURES[1]}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("demo_out"))
    parser.add_argument("--quick", action="store_true", help="skip OPT-30B and the text")
    args = parser.parse_args()
    others = [path.name for path in args.out.iterdir() if path.name not in PICTURES] if args.out.is_dir() else []
    if others:
        parser.error(
            f"--out {args.out} holds {others[0]!r}; name a new folder, since {' and '.join(PICTURES)} are replaced "
            "there"
        )
    return args


def main() -> None:
    args = parse()
    mesh = cf.Mesh(dp=args.dp, tp=args.tp)
    console = Console(quiet=not mesh.is_main, highlight=False)
    if not console.is_terminal:
        console = Console(quiet=not mesh.is_main, highlight=False, width=140)
    head = console.rule

    head("1. an ordinary step function")
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=CONTEXT, n_embd=args.width, n_layer=args.layers, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    module = GPT2LMHeadModel(config)
    model, opt = cf.functional(module), cf.adapt(torch.optim.AdamW, lr=6e-4, weight_decay=0.01)
    step_fn = make_step(model, opt)
    state = {"params": model.params, "buffers": model.buffers, "opt": opt.init(model.params)}
    data = corpus()
    millions = sum(p.numel() for p in model.params.values()) / 1e6
    console.print(f"  GPT-2, {millions:.1f}M parameters, {len(data) / 1e6:.1f} MB of Python sources, byte level")
    console.print("      state, metrics = step_fn(state, batch)")

    head("2. the one line")
    console.print(f"      step = cf.shard(step_fn, {mesh})")
    step = cf.shard(step_fn, mesh)
    low = step.lower(state, batch_at(data, 0, args.batch))
    console.print(f"  the plan: [bold]{low.plan}[/bold]")
    console.print(low.plan.table(costly=8), markup=False, highlight=False, soft_wrap=True)

    head("3. train, beside the single device")
    reference = {k: dict(v) for k, v in state.items()}
    placed, ours, theirs = train(step, step_fn, state, reference, data, args, console)

    head("4. what it cost")
    console.print(str(low.cost()))
    console.print(f"  peak {low.memory().peak_bytes['device'] / 2**20:.1f} MiB a rank")

    head("5. the same step in less memory")
    lean, budget = with_less(step, low, batch_at(data, 0, args.batch), ours[0], state, console)

    head("6. the same step as a pipeline")
    if mesh.size % 2 == 0:
        as_pipeline(step_fn, mesh.size, batch_at(data, 0, args.batch), ours[0], state, console)
    else:
        console.print("  two stages of as many ranks each want an even number of ranks")

    head("7. break it on purpose")
    try:
        cf.distribute(torch.zeros(8, 6), "(ddp b) d", mesh)
    except cf.ColofuncError as error:
        console.print('  cf.distribute(x, "(ddp b) d", mesh)')
        console.print(f"  [red]{type(error).__name__}[/red]: {error}")

    if not args.quick:
        head("8. plan a model that fits on no machine here")
        plan_big(console)
        head("9. a little text")
        params = {k: v.full() for k, v in placed["params"].items()}
        buffers = {k: v.full() for k, v in placed["buffers"].items()}
        if mesh.is_main:
            console.print(generate(model, params, buffers, b"def main(", 160), markup=False)

    head("pictures")
    if mesh.is_main:
        pictures(ours, theirs, lean, budget, args.out, console)
    console.print(
        "\n  next: change --dp and --tp; run it under torchrun --nproc-per-node 2 with --dp 1; print(low.text());\n"
        "  put your own step function in place of step_fn; see docs/ for plans, plugins and tests on a CPU mesh"
    )


if __name__ == "__main__":
    sys.exit(main())
