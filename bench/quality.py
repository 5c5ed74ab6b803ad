"""What low precision does to a model: a small LLaMA of bytes, trained on the demo's text (Python's standard library).

Trained with AdamW in 32 bits and with `state_bits=8`, from the same weights on the same batches; the first is then evaluated on text that
it was not trained on with its weights in every scheme of `cf.quantize`, by the bits that it needs for a byte.

With a scheme for each matrix, tables too, which `errors.within` chooses, predictions are compared with those of the model as it
was, beside those with one scheme for all of them that takes no more bytes. Schemes that round inputs too take no fewer bytes than
others: of these the error that "auto" estimates stands beside what is measured.

A model of this size has no channels that are many times as large as the others, as large models have. So it is evaluated once more with
such channels planted: a few are multiplied in front of each product, and the columns that read them divided, which is the same function.
"""

from __future__ import annotations

import math
import statistics
import sysconfig
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch

import colofunc as cf
from bench import Row, Section, fresh
from colofunc.ops.quantizers import BUILT_IN

STEPS = 300
ROWS, CONTEXT = 8, 128
HELD_OUT_ROWS = 64
CALIBRATION_BATCHES = 8
BATCHES_OF_A_TRAINING = 10_000
"""Between the first batches of two trainings: more than one uses."""
WHERE = "*_proj.weight"
ALL = ("*_proj.weight", "*embed_tokens.weight", "*lm_head.weight")
NEAREST = ("int8", "fp8", "fp8-e5m2", "fp8-g128", "mxfp8", "nvfp4", "int4-g128", "nf4")
ROUNDING = ("int8-dynamic", "fp8-dynamic", "fp8-g128-dynamic")
ALL_ROUNDED = "int8, all inputs rounded"
PLANTED, CHANNELS = 30.0, 4
# Scheme -> one that rounds to nearest, than which it is to be nearer to the model as it was.
NEARER = {"gptq": "int4-g128"}
NEARER_WITH_OUTLIERS = {"gptq": "int4-g128", "awq": "int4-g128", "smoothquant": ALL_ROUNDED}
WITH_OUTLIERS = ("int4-g128", "gptq", "awq", ALL_ROUNDED, "smoothquant", "int8-dynamic", "fp8-dynamic", "fp8-g128-dynamic")
TRAININGS = 4
"""With moments in 32 and in 8 bits each, from other weights on other batches: one alone differs as much by the machine's rounding."""
BOUND = 0.005
FACTOR = 2.0
"""Between an error as it is estimated and as it is measured."""


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


def new_model(seed: int = 0) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        max_position_embeddings=CONTEXT, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return cf.functional(LlamaForCausalLM(config))


def trained(bits: int, seed: int = 0) -> tuple[Any, dict[str, torch.Tensor], int]:
    """The model, its weights after `STEPS` steps, and the bytes of its moments."""
    model, (data, _) = new_model(seed), text()
    step_fn, state = cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=1e-3, state_bits=bits), clip=1.0)
    step = cf.shard(step_fn, cf.Mesh())
    moments = [x for key, part in state["opt"].items() if key != "step" for x in part.values()]
    nbytes = sum(x.numel() * x.itemsize for x in moments)
    for number in range(STEPS):
        state, _ = step(state, batch(data, BATCHES_OF_A_TRAINING * seed + number))
    return model, {name: weight.full() for name, weight in state["params"].items()}, nbytes


def forward(model: Any) -> Callable[[Any, Any], torch.Tensor]:
    def loss(params: Any, rows: Any) -> torch.Tensor:
        return model.apply(params, model.buffers, **rows)[0].loss

    return loss


def bits_per_byte(step: Any, params: Any) -> float:
    """On the held-out text; the same rows for every scheme."""
    _, held_out = text()
    return float(step(params, batch(held_out, -1, HELD_OUT_ROWS))) / math.log(2)


def moments(bits: int) -> dict[str, Any]:
    """Bits per byte after each training, and what the moments take."""
    after = []
    for seed in range(TRAININGS):
        model, params, nbytes = trained(bits, seed)
        after.append(bits_per_byte(cf.shard(forward(model), cf.Mesh()), params))
    return {"bits": after, "moments": nbytes}


def weights() -> dict[str, Any]:
    """Bits per byte after the first training, with the weights as they are and in each scheme."""
    model, params, _ = trained(32)
    found = bits_per_byte(cf.shard(forward(model), cf.Mesh()), params)
    sizes = {"bits": found, "parameters": sum(weight.numel() for weight in params.values())}
    planted = with_outliers(params)
    both = {"chosen": chosen(model, params), "chosen with outliers": chosen(model, planted)}
    return {**sizes, "schemes": schemes(model, params), "with outliers": schemes(model, planted), **both}


def with_outliers(params: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same function, with `CHANNELS` channels in front of each product `PLANTED` times as large as they were."""
    changed = {name: weight.clone() for name, weight in params.items()}

    def plant(maker: str, readers: tuple[str, ...]) -> None:
        """maker: a norm's weight (i,), or a product's (i, ...), whose channels are multiplied; readers: (o, i), divided."""
        size = changed[maker].shape[0]
        channels = torch.arange(5, size, size // CHANNELS)
        changed[maker][channels] *= PLANTED
        for reader in readers:
            changed[reader][:, channels] /= PLANTED

    for layer in [name.removesuffix("input_layernorm.weight") for name in params if name.endswith("input_layernorm.weight")]:
        plant(f"{layer}input_layernorm.weight", tuple(f"{layer}self_attn.{part}_proj.weight" for part in "qkv"))
        plant(f"{layer}self_attn.v_proj.weight", (f"{layer}self_attn.o_proj.weight",))
        plant(f"{layer}post_attention_layernorm.weight", tuple(f"{layer}mlp.{part}_proj.weight" for part in ("gate", "up")))
        plant(f"{layer}mlp.up_proj.weight", (f"{layer}mlp.down_proj.weight",))
    return changed


def schemes(model: Any, params: Any) -> dict[str, float]:
    """Scheme -> bits per byte."""
    loss, (data, _) = forward(model), text()
    batches = [batch(data, STEPS + number) for number in range(CALIBRATION_BATCHES)]
    by_moments = cf.shard(cf.input_moments(loss, where=WHERE), cf.Mesh())
    moments = [by_moments(params, rows) for rows in batches]
    by_maxima = cf.shard(cf.input_maxima(loss, where=WHERE), cf.Mesh())
    maxima = [by_maxima(params, rows) for rows in batches]
    # What smoothquant rounds, without its scales; int8-dynamic keeps inputs of 6 and more as they are.
    all_rounded = attrs.evolve(BUILT_IN["int8-dynamic"], name=ALL_ROUNDED, outliers=float("inf"))
    found = {}
    for scheme in (*BUILT_IN.values(), cf.gptq(moments), cf.awq(moments), all_rounded, cf.smoothquant(maxima)):
        found[scheme.name] = bits_per_byte(cf.quantize(loss, scheme, where=WHERE), params)
    return found


def log_probabilities(model: Any) -> Callable[[Any, Any], torch.Tensor]:
    def forward(params: Any, rows: Any) -> torch.Tensor:
        return torch.log_softmax(model.apply(params, model.buffers, **rows)[0].logits, -1)

    return forward


def chosen(model: Any, params: Any) -> dict[str, Any]:
    """How far predictions are from the model's, in bits per byte, with each scheme alone and with choices within some bytes.

    The divergence of the predicted distributions (Kullback-Leibler): its first-order part is 0, where the loss on other text rises or falls
    with any change. Each is given as estimated for the loss on the calibration batches, and as measured on the held-out text.
    """
    (data, held_out), predict = text(), log_probabilities(model)
    rows = batch(held_out, -1, HELD_OUT_ROWS)
    exact = cf.shard(predict, cf.Mesh())(params, rows).full()
    measuring = cf.shard(cf.sensitivities(forward(model), where=ALL, schemes=ROUNDING), cf.Mesh())
    measured = [measuring(params, batch(data, STEPS + number)) for number in range(CALIBRATION_BATCHES)]
    gptq = cf.gptq([one["inputs"] for one in measured])
    tables = {"": cf.scheme_errors(params, measured, NEAREST, where=ALL)}
    tables[", gptq among them"] = cf.scheme_errors(params, measured, (*NEAREST, gptq), where=ALL)

    def judged(choice: Any) -> dict[str, Any]:
        found = cf.quantize(predict, choice, where=ALL)(params, rows).full()
        apart = float((exact.exp() * (exact - found)).sum(-1).mean()) / math.log(2)
        return {"bytes": choice.nbytes, "bits": apart, "estimate": choice.error / math.log(2), "counts": Counter(choice.schemes.values())}

    last = tables[", gptq among them"]
    alone = {scheme: judged(last.uniform(scheme)) for scheme in NEAREST}
    # Tables cannot be calibrated, and have the same format without.
    weights = tuple(attrs.evolve(one, option=one.weight.option("gptq") or one.option) for one in last.uniform("int4-g128").weights)
    alone["gptq"] = judged(attrs.evolve(last.uniform("int4-g128"), weights=weights))
    rounding = cf.scheme_errors(params, measured, ROUNDING, where=ALL)
    rounded = {scheme: judged(rounding.uniform(scheme)) for scheme in ROUNDING}
    least, most = alone["nf4"]["bytes"], alone["int8"]["bytes"]
    budgets = [alone["nvfp4"]["bytes"], *(least + (most - least) // part for part in (4, 2))]
    choices = [{"budget": budget, "kind": kind, **judged(table.within(budget))} for budget in budgets for kind, table in tables.items()]
    return {"alone": alone, "rounded": rounded, "choices": choices}


def chosen_rows(found: dict[str, Any], before: str) -> list[Row]:
    """Each choice beside the nearest of the schemes that take no more bytes by themselves."""
    rows = []
    for one in found["choices"]:
        others = {scheme: alone for scheme, alone in found["alone"].items() if alone["bytes"] <= one["budget"]}
        if not one["kind"]:
            others.pop("gptq", None)
        best = min(others, key=lambda scheme: others[scheme]["bits"])
        counts = ", ".join(f"{count} {scheme}" for scheme, count in sorted(one["counts"].items()))
        figure = f"predictions {one['bits']:.1e} bits per byte off, {one['estimate']:.1e} by the estimate; {counts}"
        target = f"nearer than {best} alone: {others[best]['bits']:.1e}, {others[best]['estimate']:.1e} by the estimate"
        rows.append(Row(f"{before}auto within {one['budget']:,} bytes{one['kind']}", figure, target, one["bits"] < others[best]["bits"]))
    return rows


def rounded_rows(found: dict[str, Any], before: str) -> list[Row]:
    """Each scheme that rounds inputs too, by itself: its error as it was estimated beside what was measured."""
    rows = []
    for scheme, one in found["rounded"].items():
        figure = f"predictions {one['bits']:.1e} bits per byte off, {one['estimate']:.1e} by the estimate"
        apart = max(one["bits"] / one["estimate"], one["estimate"] / one["bits"])
        rows.append(Row(f"{before}all matrices in {scheme}", figure, f"the estimate within a factor of {FACTOR:g}", apart <= FACTOR))
    return rows


def scheme_row(scheme: str, before: str, exact: float, by_scheme: dict[str, float], nearer: dict[str, str]) -> Row:
    """Bits per byte with weights in a scheme. nearer: see `NEARER`."""
    bits, target, met = by_scheme[scheme], "", None
    if scheme in nearer:
        target, met = f"nearer than {nearer[scheme]}, which rounds to nearest", bits < by_scheme[nearer[scheme]]
    return Row(f"{before}weights in {scheme}", f"{bits:.4f} bits per byte, {exact:.4f} as they were ({bits - exact:+.4f})", target, met)


def moments_row(wide: dict[str, Any], narrow: dict[str, Any]) -> Row:
    wide_mean, narrow_mean = statistics.mean(wide["bits"]), statistics.mean(narrow["bits"])
    each = ", ".join(f"{few / many - 1:+.2%}" for many, few in zip(wide["bits"], narrow["bits"], strict=True))
    over = narrow_mean / wide_mean - 1
    figure = (
        f"{wide_mean:.4f} and {narrow_mean:.4f} bits per byte in the mean ({over:+.2%}; each {each}); "
        f"moments {wide['moments'] / 2**20:.2f} MiB and {narrow['moments'] / 2**20:.2f} MiB"
    )
    what = f"AdamW with moments in 32 and in 8 bits, {TRAININGS} trainings of {STEPS} steps"
    return Row(what, figure, f"the mean within {BOUND:.1%}", abs(over) <= BOUND)


def bench() -> Section:
    wide = fresh("quality", "m.weights()")
    rows = [moments_row(fresh("quality", "m.moments(32)"), fresh("quality", "m.moments(8)"))]
    for scheme in wide["schemes"]:
        rows.append(scheme_row(scheme, "", wide["bits"], wide["schemes"], NEARER))
    rows += chosen_rows(wide["chosen"], "")
    rows += rounded_rows(wide["chosen"], "")
    for scheme in WITH_OUTLIERS:
        rows.append(scheme_row(scheme, "outliers planted: ", wide["bits"], wide["with outliers"], NEARER_WITH_OUTLIERS))
    rows += chosen_rows(wide["chosen with outliers"], "outliers planted: ")
    rows += rounded_rows(wide["chosen with outliers"], "outliers planted: ")
    setting = (
        f"LLaMA, 2 layers of 256, {wide['parameters'] / 1e6:.1f} million parameters, bytes of Python's standard library, {STEPS} steps of "
        f"{ROWS} x {CONTEXT}, float32; {HELD_OUT_ROWS} rows of files that were not trained on; "
        f"gptq, awq, smoothquant and what auto is estimated by from {CALIBRATION_BATCHES} batches; its bytes are those of all matrices. "
        f"Planted: {CHANNELS} channels in front of each product "
        f"{PLANTED:.0f} times as large, and the columns that read them as much smaller. torch {torch.__version__}."
    )
    return Section("Low precision: quality on the demo's text", setting, rows)
