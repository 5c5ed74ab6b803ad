"""Fine-tune a Hugging Face causal language model from a local folder on text files; stop and resume at any step.

    python examples/finetune_lm.py --model path/to/llama --data "texts/*.txt" --out run        # simulated ranks
    torchrun --nproc-per-node 2 examples/finetune_lm.py --model ... --data ... --out run --tp 1 # real ranks (gloo)
    python examples/finetune_lm.py --model ... --data ... --out run --budget 6GiB --host 8GiB --disk /nvme/me # larger than memory

Weights go from the folder straight into the ranks' parts. Every `--save-every` steps the state, the position in the
data and the random numbers are written beside the training; started again with the same arguments, after `kill -9` or a
power cut, the script goes on from the last whole checkpoint with the numbers that it would have had. The result, in
`run/model`, is a folder that transformers loads.
"""

from __future__ import annotations

import argparse
import glob
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import colofunc as cf


def tokens_of(files: list[str], folder: str) -> torch.Tensor:
    """All files as one long row of ids, by the folder's tokenizer; byte by byte where it has none."""
    text = "\n\n".join(Path(f).read_text(errors="replace") for f in files)
    if any((Path(folder) / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        return torch.tensor(AutoTokenizer.from_pretrained(folder)(text)["input_ids"])
    return torch.tensor(list(text.encode()))


class Rows(torch.utils.data.Dataset):
    """Consecutive pieces of `length` ids; the model shifts labels by itself."""

    def __init__(self, ids: torch.Tensor, length: int) -> None:
        self.rows = ids[: len(ids) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, n: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[n], "labels": self.rows[n]}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--model", required=True, help="folder with config.json and safetensors", default=argparse.SUPPRESS
    )
    parser.add_argument("--data", required=True, help="glob of text files", default=argparse.SUPPRESS)
    parser.add_argument(
        "--out", required=True, help="folder for checkpoints and the trained model", default=argparse.SUPPRESS
    )
    parser.add_argument(
        "--dp", type=int, default=-1, help="data-parallel ranks; -1: what torchrun leaves, 2 if simulated"
    )
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel ranks")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps in all, also when resumed")
    parser.add_argument("--batch", type=int, default=8, help="rows of the global batch")
    parser.add_argument("--length", type=int, default=128, help="tokens of a row")
    parser.add_argument("--lr", type=float, default=1e-4, help="learning rate")
    parser.add_argument("--microbatches", type=int, default=1, help="parts of a batch that run one after another")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="what is computed in")
    parser.add_argument(
        "--budget", help="device memory a rank ('6GiB', 0.5): the rest is made again or on the host", default=""
    )
    parser.add_argument(
        "--disk", help="directory for state that memory has no room for; without --host for all of it", default=""
    )
    parser.add_argument("--host", help="host memory a rank for what is not on the device", default="")
    parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> list[float]:
    """Train, and return the losses of the steps that this run has done."""
    args = parse(argv)
    torch.manual_seed(0)
    real = torch.distributed.is_torchelastic_launched()
    mesh = cf.Mesh(dp=args.dp if real or args.dp > 0 else 2, tp=args.tp)

    config = AutoConfig.from_pretrained(args.model)
    model = cf.load(args.model, model=cf.functional(cf.lazy(lambda: AutoModelForCausalLM.from_config(config)))).train()
    opt = cf.adapt(
        torch.optim.AdamW, lr=args.lr, groups={"*.bias": {"weight_decay": 0.0}, "*ln_*": {"weight_decay": 0.0}}
    )
    step_fn, state = cf.train_step(model, opt, clip=1.0)
    step = cf.shard(step_fn, mesh)
    if args.precision != "fp32":
        step = cf.precision(step, args.precision)
    if args.microbatches > 1:
        step = cf.accumulate(step, microbatches=args.microbatches)
    if args.budget or args.disk or args.host:
        policy = "disk" if args.disk and not args.host else "auto"
        memory = {"budget": args.budget or "auto", "host": args.host or "auto", "disk": args.disk or None}
        step = cf.offload(cf.checkpoint(step), policy=policy, **memory)

    files = sorted(glob.glob(args.data, recursive=True))
    if not files:
        raise SystemExit(f"--data {args.data!r} matches no file")
    rows = Rows(tokens_of(files, args.model), args.length)
    data = cf.batches(DataLoader(rows, args.batch, shuffle=True, drop_last=True), mesh)

    out = Path(args.out)
    if any(path.name[5:].isdigit() for path in out.glob("step-*")):  # not only what a save left that was killed
        state = cf.load(out / "step-*", mesh=mesh, batches=data)  # the newest
    done, losses = int(state["opt"]["step"]), []
    if mesh.is_main:
        print(f"{len(rows)} rows of {args.length} ids; {'resumed after' if done else 'from'} step {done}", flush=True)
    while done < args.steps:
        for batch in data:
            state, metrics = step(state, batch)
            done += 1
            losses.append(float(metrics["loss"]))
            if mesh.is_main:
                print(
                    f"step {done}  loss {losses[-1]:.6f}  gradient norm {float(metrics['grad_norm']):.4f}", flush=True
                )
            if done % args.save_every == 0 or done == args.steps:
                cf.save(out / f"step-{done:06d}", state, batches=data, wait=done == args.steps, keep=2)
            if done == args.steps:
                break
    cf.save_pretrained(model, state, out / "model")
    return losses


if __name__ == "__main__":
    main()
