"""QLoRA: fine-tune adapters through a frozen model in 4 bits, beside the same with the model as it was.

    python examples/qlora.py                                                  # a small LLaMA on dp=2 simulated ranks, under a minute
    torchrun --nproc-per-node 2 examples/qlora.py                             # the same file on real ranks (gloo)
    python examples/qlora.py --model path/to/llama --data "texts/*.txt" --precision bf16 --out adapters        # a model of your own

The two lines that matter are `cf.lora(base, ...)`, which freezes the model and adds thin matrices beside its
projections, and `cf.quantize(step, "nf4")`, which keeps the frozen weights in 4 bits; `zero(3, "dp")` splits what is
left of them over the ranks, and `cf.checkpoint` makes activations again instead of keeping them. What is printed for
both: the loss on text that was not trained on, in bits per token, the peak of a rank and its frozen weights, as the
plan counts them.

Without `--model` the script first trains a small LLaMA on Python's sources, byte by byte, and then adapts it to the
same in capitals. Source: Dettmers et al. 2023, "QLoRA" (2305.14314).
"""

from __future__ import annotations

import argparse
import glob
import math
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from colofunc_plugins import zero
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import colofunc as cf

HELD_OUT = 16
"""One of so many rows is not trained on."""


@attrs.frozen
class Result:
    """Bits per token on held-out text before and after, and what a rank holds."""

    before: float
    after: float
    peak_bytes: int
    frozen_bytes: int


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", help="folder with config.json and safetensors", default="")
    parser.add_argument("--data", help="glob of text files, with --model", default="")
    parser.add_argument("--out", help="folder for the adapters, in peft's format", default="")
    parser.add_argument("--dp", type=int, default=2, help="ranks")
    parser.add_argument("--scheme", default="nf4", help="nf4, int4-g128, int8 or fp8")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="what is computed in")
    parser.add_argument("--rank", type=int, default=8, help="rank of the adapters")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate")
    parser.add_argument("--rows", type=int, default=4, help="rows of a batch")
    parser.add_argument("--length", type=int, default=64, help="tokens of a row")
    parser.add_argument("--steps", type=int, default=40, help="steps of fine-tuning")
    parser.add_argument("--first", type=int, default=60, help="steps of training the small model, without --model")
    parser.add_argument("--width", type=int, default=256, help="width of the small model")
    return parser.parse_args(argv)


# ---- text ----


def sources(limit: int = 400_000) -> bytes:
    """Python's standard library."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return b"".join(file.read_bytes() for file in files)[:limit]


def texts(options: argparse.Namespace) -> torch.Tensor:
    """Ids of what is fine-tuned on, one long row."""
    if not options.model:
        return torch.tensor(list(sources().upper()))
    files = sorted(glob.glob(options.data, recursive=True))
    if not files:
        raise SystemExit(f"--data {options.data!r} matches no file")
    text = "\n\n".join(Path(file).read_text(errors="replace") for file in files)
    return torch.tensor(AutoTokenizer.from_pretrained(options.model)(text)["input_ids"])


class Rows:
    """Pieces of `length` ids: some at random to train on, and the ones held out."""

    def __init__(self, ids: torch.Tensor, length: int, rows: int) -> None:
        pieces = ids[: len(ids) // length * length].view(-1, length)
        held_out = torch.arange(len(pieces)) % HELD_OUT == 0
        self.trained, self.held_out, self.rows = pieces[~held_out], pieces[held_out], rows

    def batch(self, number: int) -> dict[str, torch.Tensor]:
        """Batch `number` of training, (rows, length)."""
        draw = torch.Generator().manual_seed(number)
        return labelled(self.trained[torch.randint(0, len(self.trained), (self.rows,), generator=draw)])

    def test(self) -> dict[str, torch.Tensor]:
        """Rows that are not trained on, spread over the text: (8 * rows, length)."""
        count = 8 * self.rows
        return labelled(self.held_out[torch.arange(count) * len(self.held_out) // count])


def labelled(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": ids, "labels": ids}


# ---- the model ----


def base_model(options: argparse.Namespace, mesh: cf.Mesh) -> cf.Model:
    """The model that is fine-tuned: of a folder, read rank by rank when it is placed, or a small one that is trained
    here.
    """
    if options.model:
        config = AutoConfig.from_pretrained(options.model)
        return cf.load(options.model, model=cf.functional(cf.lazy(lambda: AutoModelForCausalLM.from_config(config))))
    width = options.width
    config = LlamaConfig(
        vocab_size=256, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=options.length, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = cf.functional(LlamaForCausalLM(config))
    step_fn, state = cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=3e-3), clip=1.0)
    step = cf.shard(step_fn, mesh, zero(3, "dp"))
    rows = Rows(torch.tensor(list(sources())), options.length, 2 * options.rows)
    for number in range(options.first):
        state, metrics = step(state, rows.batch(number))
    if mesh.is_main:
        print(
            f"a LLaMA of 2 layers of {width}, {options.first} steps on Python's sources: loss "
            f"{float(metrics['loss']):.3f}",
            flush=True,
        )
    params = {name: weight.full() for name, weight in state["params"].items()}
    return cf.functional(model.to_module(params))


def fine_tuned(base: cf.Model, scheme: str, rows: Rows, options: argparse.Namespace, mesh: cf.Mesh) -> Result:
    """Adapters trained beside the frozen model in a scheme; "": as it is."""
    torch.manual_seed(0)  # the same adapters to start from, whatever the scheme
    model = cf.lora(base, where="*_proj", rank=options.rank)
    step_fn, state = cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=options.lr), clip=1.0)

    def loss_fn(params: Any, batch: Any) -> torch.Tensor:
        return model.apply(params, model.buffers, **batch)[0].loss

    def staged(fn: Any) -> Any:
        found = cf.shard(fn, mesh, zero(3, "dp"))
        if options.precision != "fp32":
            found = cf.precision(found, options.precision)
        return cf.quantize(found, scheme, where="*_proj.weight") if scheme else found

    step, test = cf.checkpoint(staged(step_fn), policy="nothing"), staged(loss_fn)
    low = step.lower(state, rows.batch(0))
    frozen = [low.program.values[id] for id in low.program.inputs if low.program.values[id].role == "frozen"]
    state = step.init(state, rows.batch(0))
    before = float(test(state["params"], rows.test()))
    for number in range(options.steps):
        state, _ = step(state, rows.batch(number))
    after = float(test(state["params"], rows.test()))
    if options.out and scheme:
        cf.save_pretrained(model, state, options.out, adapters="peft")
    nats = 1 / math.log(2)
    return Result(before * nats, after * nats, low.memory().peak_bytes["device"], sum(value.nbytes for value in frozen))


def main(argv: Sequence[str] | None = None) -> dict[str, Result]:
    """Fine-tune with and without quantized weights; what was found, by scheme ("": none)."""
    options = parse(argv)
    torch.manual_seed(0)
    mesh = cf.Mesh(dp=options.dp)
    base = base_model(options, mesh)
    rows = Rows(texts(options), options.length, options.rows)
    found = {scheme: fine_tuned(base, scheme, rows, options, mesh) for scheme in ("", options.scheme)}
    if mesh.is_main:
        for scheme, result in found.items():
            quality = f"{result.before:.3f} to {result.after:.3f} bits per token"
            memory = f"peak {result.peak_bytes / 2**20:.2f} MiB a rank, {result.frozen_bytes / 2**20:.2f} MiB of it frozen weights"
            print(f"{scheme or 'as it was':>9}  {quality}  {memory}", flush=True)
    return found


if __name__ == "__main__":
    main()
