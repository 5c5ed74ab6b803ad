"""The dozen lines everybody writes: a training step from a model, an optimizer and a loss.

step_fn, state = train_step(model, opt, clip=1.0)
state, metrics = step_fn(state, batch)        # state: params, buffers, opt; metrics: loss, grad_norm
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from colofunc.errors import InputError
from colofunc.functional.gradients import clip_by_global_norm, value_and_grad
from colofunc.functional.modules import Model
from colofunc.functional.optimizers import Optimizer

TrainState = dict[str, Any]
TrainStep = Callable[[TrainState, Any], tuple[TrainState, dict[str, Tensor]]]


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


def model_arguments(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of the model, from a batch or from what `inputs(batch)` returns.

    A mapping is keyword arguments, a pair of a tuple (or list) and a mapping is both kinds, any other tuple or list is
    positional arguments, anything else is the one argument.
    """
    if isinstance(given, Mapping):
        return (), dict(given)
    if not isinstance(given, tuple | list):
        return (given,), {}
    if len(given) == 2 and isinstance(given[0], tuple | list) and isinstance(given[1], Mapping):
        return tuple(given[0]), dict(given[1])
    return tuple(given), {}


def takes_batch(loss: Callable[..., Tensor]) -> bool:
    """Whether a loss is `loss(out, batch)` rather than `loss(out)`: two arguments that must be given, by its signature.

    A callable that shows no signature is taken for `loss(out)`. Raises InputError where neither can be called.
    """
    try:
        signature = inspect.signature(loss)
    except (TypeError, ValueError):
        return False
    for arguments in ((None,), (None, None)):
        try:
            signature.bind(*arguments)
        except TypeError:
            continue
        return len(arguments) == 2
    ways = "a loss is called as loss(out) or loss(out, batch)"
    raise InputError(f"train_step: {ways}, and this one takes {signature}. Try: a lambda around it")


def train_step(
    model: Model, opt: Optimizer, loss: Callable[..., Tensor] = default_loss, clip: float | None = None,
    inputs: Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]] | None = None,
) -> tuple[TrainStep, TrainState]:  # fmt: skip
    """(step_fn, state): `step_fn(state, batch) -> (state, metrics)`.

    `loss(out)` or `loss(out, batch)`, as its signature says. `inputs(batch)` gives what the model is called with, for
    models that do not take all of the batch: keyword arguments as a mapping, positional ones as a tuple, both as (args,
    kwargs), or the one argument. `metrics` has "loss" and, with `clip` (a maximal global norm), "grad_norm".
    """
    if not isinstance(model, Model):
        raise InputError(f"train_step was given a {type(model).__name__}. Try: cf.functional(module)")
    if not isinstance(opt, Optimizer):
        raise InputError(f"train_step was given a {type(opt).__name__}. Try: cf.adapt(torch.optim.AdamW, lr=3e-4)")
    if not model.params:
        raise InputError(
            "train_step: every parameter of the model is frozen. Try: cf.functional(module, trainable='*.head.*'), or "
            "cf.lora"
        )
    if clip is not None and not isinstance(clip, int | float):
        raise InputError(
            f"train_step: clip={clip!r:.80} is no number. Try: clip=1.0, the largest norm of all gradients"
        )
    if clip is not None and not clip > 0:
        raise InputError(
            f"train_step: clip={clip!r} would leave nothing of the gradients. Try: a positive norm, or clip=None"
        )
    if not callable(loss):
        raise InputError(
            f"train_step: loss={loss!r:.80} cannot be called. Try: loss=lambda out, batch: F.mse_loss(out, batch['y'])"
        )
    if inputs is not None and not callable(inputs):
        raise InputError(f"train_step: inputs={inputs!r:.80} cannot be called. Try: inputs=lambda batch: batch['x']")

    with_batch = takes_batch(loss)

    def step_fn(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Tensor]]:
        if not isinstance(state, Mapping) or not {"params", "buffers", "opt"} <= set(state):
            has = list(state) if isinstance(state, Mapping) else type(state).__name__
            raise InputError(
                f"the state of train_step has params, buffers and opt; this one has {has}. Try: the state that it "
                "returned"
            )
        args, kwargs = model_arguments(batch if inputs is None else inputs(batch))

        def loss_fn(params: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
            out, buffers = model.apply(params, state["buffers"], *args, **kwargs)
            return (loss(out, batch) if with_batch else loss(out)), buffers

        (value, buffers), grads = value_and_grad(loss_fn, has_aux=True)(state["params"])
        metrics = {"loss": value}
        if clip is not None:
            grads, metrics["grad_norm"] = clip_by_global_norm(grads, clip)
        params, opt_state = opt.update(grads, state["opt"], state["params"])
        return {"params": params, "buffers": buffers, "opt": opt_state}, metrics

    return step_fn, {"params": model.params, "buffers": model.buffers, "opt": opt.init(model.params)}
