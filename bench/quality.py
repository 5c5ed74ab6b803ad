"""What low precision does to a model: a small LLaMA of bytes, trained on the demo's text (Python's standard library).

Trained with AdamW in 32 bits and with `state_bits=8`, from the same weights on the same batches; the first is then evaluated on text that
it was not trained on with its weights in every scheme of `cf.quantize`, by the bits that it needs for a byte.
"""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import colofunc as cf
from bench import Row, Section, fresh
from colofunc.ops.quantizers import BUILT_IN

STEPS = 300
ROWS, CONTEXT = 8, 128
HELD_OUT_ROWS = 64
CALIBRATION_BATCHES = 8
WHERE = "*_proj.weight"
BOUND = 0.005


def text() -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes to train on, and those of every tenth file, which are held out."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    parts = [b"".join(file.read_bytes() for file in files if (files.index(file) % 10 == 0) == held) for held in (False, True)]
    trained, held_out = (torch.frombuffer(bytearray(part[:4_000_000]), dtype=torch.uint8).long() for part in parts)
    return trained, held_out


def batch(data: torch.Tensor, number: int, rows: int = ROWS) -> dict[str, torch.Tensor]:
    """Batch `number`: (rows, CONTEXT) ids and labels."""
    draw = torch.Generator().manual_seed(number)
    starts = torch.randint(0, len(data) - CONTEXT, (rows,), generator=draw)
    ids = torch.stack([data[start : start + CONTEXT] for start in starts])
    return {"input_ids": ids, "labels": ids}


def new_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        max_position_embeddings=CONTEXT, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return cf.functional(LlamaForCausalLM(config))


def trained(bits: int) -> tuple[Any, dict[str, torch.Tensor], int]:
    """The model, its weights after `STEPS` steps, and the bytes of its moments."""
    model, (data, _) = new_model(), text()
    step_fn, state = cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=1e-3, state_bits=bits), clip=1.0)
    step = cf.shard(step_fn, cf.Mesh())
    moments = [x for key, part in state["opt"].items() if key != "step" for x in part.values()]
    nbytes = sum(x.numel() * x.itemsize for x in moments)
    for number in range(STEPS):
        state, _ = step(state, batch(data, number))
    return model, {name: weight.full() for name, weight in state["params"].items()}, nbytes


def forward(model: Any) -> Callable[[Any, Any], torch.Tensor]:
    def loss(params: Any, rows: Any) -> torch.Tensor:
        return model.apply(params, model.buffers, **rows)[0].loss

    return loss


def bits_per_byte(step: Any, params: Any) -> float:
    """On the held-out text; the same rows for every scheme."""
    _, held_out = text()
    return float(step(params, batch(held_out, -1, HELD_OUT_ROWS))) / math.log(2)


def optimizer(bits: int) -> dict[str, Any]:
    """Bits per byte after training, and what the moments take; of 32 bits also with the weights in each scheme."""
    model, params, nbytes = trained(bits)
    found = bits_per_byte(cf.shard(forward(model), cf.Mesh()), params)
    parameters = sum(weight.numel() for weight in params.values())
    by_scheme = schemes(model, params) if bits == 32 else {}
    return {"bits": found, "moments": nbytes, "parameters": parameters, "schemes": by_scheme}


def schemes(model: Any, params: Any) -> dict[str, float]:
    """Scheme -> bits per byte."""
    loss, (data, _) = forward(model), text()
    calibration = cf.shard(cf.input_moments(loss, where=WHERE), cf.Mesh())
    moments = [calibration(params, batch(data, STEPS + number)) for number in range(CALIBRATION_BATCHES)]
    found = {}
    for scheme in (*BUILT_IN.values(), cf.gptq(moments)):
        found[scheme.name] = bits_per_byte(cf.quantize(loss, scheme, where=WHERE), params)
    return found


def bench() -> Section:
    wide, narrow = fresh("quality", "m.optimizer(32)"), fresh("quality", "m.optimizer(8)")
    ratio = narrow["bits"] / wide["bits"]
    moments = f"moments {wide['moments'] / 2**20:.2f} MiB and {narrow['moments'] / 2**20:.2f} MiB"
    figure = f"{wide['bits']:.4f} and {narrow['bits']:.4f} bits per byte ({ratio - 1:+.2%}); {moments}"
    rows = [Row(f"AdamW with moments in 32 and in 8 bits, {STEPS} steps", figure, f"within {BOUND:.1%}", abs(ratio - 1) <= BOUND)]
    exact, by_scheme = wide["bits"], wide["schemes"]
    for scheme, bits in by_scheme.items():
        target, met = "", None
        if scheme == "gptq":
            target, met = "nearer than int4-g128, which rounds to nearest", bits < by_scheme["int4-g128"]
        rows.append(Row(f"weights in {scheme}", f"{bits:.4f} bits per byte, {exact:.4f} as they were ({bits - exact:+.4f})", target, met))
    setting = (
        f"LLaMA, 2 layers of 256, {wide['parameters'] / 1e6:.1f} million parameters, bytes of Python's standard library, {STEPS} steps of "
        f"{ROWS} x {CONTEXT}, float32; {HELD_OUT_ROWS} rows of files that were not trained on; "
        f"gptq from {CALIBRATION_BATCHES} batches. torch {torch.__version__}."
    )
    return Section("Low precision: quality on the demo's text", setting, rows)
