"""The zoo: small configurations of unmodified models, each with a batch and a loss, to try the engine on.

    module, batch, loss_fn = build("gpt2")
    loss = loss_fn(module(**batch), batch)

Sizes divide by 4 (dp=2, tp=2) except where a kind says otherwise. `LISTED` are the models that must work, `MORE` are
further architectures, `KINDS` are small modules with one difficulty each. Nothing is downloaded: weights are random.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import attrs
import torch
import zoo_kinds
import zoo_timm
import zoo_transformers as hf
from torch import Tensor
from zoo_batches import Batch, Built

import colofunc as cf


@attrs.frozen
class Entry:
    """One model.

    `make` gives module, batch (arguments of forward by name; `_names` are for the loss alone) and loss. `train`: its
    default mode. `least_bytes`: the share of bytes that must be split.
    """

    make: Callable[[], Built]
    family: str
    train: bool = True
    least_bytes: float = 0.9


LISTED: dict[str, Entry] = {
    **{n: Entry(m, "transformers") for d in (hf.CAUSAL, hf.ENCODERS, hf.BOTH, hf.VISUAL) for n, m in d.items()},
    "wav2vec2": Entry(hf.SOUND["wav2vec2"], "transformers", train=False),
    **{n: Entry(m, "timm") for n, m in zoo_timm.LISTED.items()},
}
KINDS: dict[str, Entry] = {n: Entry(m, "kind") for n, m in zoo_kinds.KINDS.items()}
# Its odd widths can be split nowhere: weights and their moments are copies.
KINDS["kind_uneven"] = attrs.evolve(KINDS["kind_uneven"], least_bytes=0.7)
_EVAL = {"hubert"}
MORE: dict[str, Entry] = {
    **{n: Entry(m, "transformers", n not in _EVAL) for n, m in hf.MORE.items()},
    **{n: Entry(m, "timm", n not in _EVAL) for n, m in zoo_timm.MORE.items()},
}
LAYERS: dict[str, Entry] = {n: Entry(m, "layer") for n, m in zoo_kinds.LAYERS.items()}
# Two factorisations of 16x16 matrices are computed whole.
LAYERS["layer_parametrized"] = attrs.evolve(LAYERS["layer_parametrized"], least_bytes=0.85)
ALL: dict[str, Entry] = {**LISTED, **KINDS, **LAYERS, **MORE}


def build(name: str, dtype: torch.dtype = torch.float64, train: bool | None = None, seed: int = 0) -> Built:
    """(module, batch, loss_fn) of one model. `train`: None takes the entry's default mode."""
    entry = ALL[name]
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module, batch, loss_fn = entry.make()
    module = module.to(dtype).train(entry.train if train is None else train)
    batch = {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in batch.items()}
    return module, batch, loss_fn


def inputs_of(batch: Batch) -> Batch:
    """What forward takes; names with an underscore are for the loss alone."""
    return {k: v for k, v in batch.items() if not k.startswith("_")}


def step_of(name: str, dtype: torch.dtype = torch.float64, train: bool | None = None) -> tuple[Callable[..., Any], Any, Batch]:
    """(step_fn, state, batch): one AdamW training step of a model; state is {"params", "buffers", "opt"}."""
    module, batch, loss_fn = build(name, dtype, train)
    model = cf.functional(module)
    # A gradient that is zero but for rounding (a bias in front of a norm) is divided by its own size plus eps: with the
    # default 1e-8 the reference itself moves by 1e-9 when a sum is taken in another order.
    opt = cf.adapt(torch.optim.AdamW, lr=1e-3, eps=1e-5)

    def step_fn(state: Any, batch: Batch) -> Any:
        def loss_of(params: Any) -> Any:
            out, buffers = model.apply(params, state["buffers"], **inputs_of(batch))
            return loss_fn(out, batch), buffers

        (loss, buffers), grads = cf.value_and_grad(loss_of, has_aux=True)(state["params"])
        params, opt_state = opt.update(grads, state["opt"], state["params"])
        return {"params": params, "buffers": buffers, "opt": opt_state}, loss

    state = {"params": model.params, "buffers": model.buffers, "opt": opt.init(model.params)}
    return step_fn, state, batch
