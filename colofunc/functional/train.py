"""The dozen lines everybody writes: a training step from a model, an optimizer and a loss.

step_fn, state = train_step(model, opt, clip=1.0)
state, metrics = step_fn(state, batch)        # state: params, buffers, opt; metrics: loss, grad_norm
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from colofunc.errors import InputError
from colofunc.functional.gradients import clip_by_global_norm, value_and_grad
from colofunc.functional.modules import Model
from colofunc.functional.optimizers import Optimizer

State = dict[str, Any]
Step = Callable[[State, Any], tuple[State, dict[str, Tensor]]]


def default_loss(out: Any) -> Tensor:
    """`out.loss`, as models of transformers return it, or the output itself if it is a 0-dim tensor."""
    if isinstance(out, Tensor) and out.dim() == 0:
        return out
    loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    if not isinstance(loss, Tensor):
        raise InputError(
            f"the model returns {type(out).__name__} without a loss. Try: labels in the batch, or loss=lambda out: ..."
        )
    return loss


def default_inputs(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Mappings are keyword arguments, tuples and lists positional ones, anything else is the one argument."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, tuple | list) else ((batch,), {})


def train_step(
    model: Model, opt: Optimizer, loss: Callable[..., Tensor] = default_loss, clip: float | None = None,
    inputs: Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]] | None = None,
) -> tuple[Step, State]:  # fmt: skip
    """(step_fn, state): `step_fn(state, batch) -> (state, metrics)`.

    `loss(out)`; with `inputs` (batch -> args, kwargs of the model) it is `loss(out, batch)`, for models that do not take
    their labels. `metrics` has "loss" and, with `clip` (a maximal global norm), "grad_norm".
    """

    if not isinstance(model, Model) or not isinstance(opt, Optimizer):
        what, try_ = (model, "cf.functional(module)") if not isinstance(model, Model) else (opt, "cf.adapt(torch.optim.AdamW, lr=3e-4)")
        raise InputError(f"train_step was given a {type(what).__name__}. Try: {try_}")
    if not model.params:
        raise InputError("train_step: every parameter of the model is frozen. Try: cf.functional(module, trainable='*.head.*'), or cf.lora")
    if clip is not None and not clip > 0:
        raise InputError(f"train_step: clip={clip!r} would leave nothing of the gradients. Try: a positive norm, or clip=None")

    def step_fn(state: State, batch: Any) -> tuple[State, dict[str, Tensor]]:
        args, kwargs = (inputs or default_inputs)(batch)

        def loss_fn(params: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
            out, buffers = model.apply(params, state["buffers"], *args, **kwargs)
            return (loss(out) if inputs is None else loss(out, batch)), buffers

        (value, buffers), grads = value_and_grad(loss_fn, has_aux=True)(state["params"])
        metrics = {"loss": value}
        if clip is not None:
            grads, metrics["grad_norm"] = clip_by_global_norm(grads, clip)
        params, opt_state = opt.update(grads, state["opt"], state["params"])
        return {"params": params, "buffers": buffers, "opt": opt_state}, metrics

    return step_fn, {"params": model.params, "buffers": model.buffers, "opt": opt.init(model.params)}
