"""Updates by one operator per parameter: Adam and AdamW, SGD, and the elementwise classes of `update_rules`.

Each is a pure function of `UpdateInputs`: what an update of all parameters reads, by name.
"""

from __future__ import annotations

import torch
from torch import Tensor

from colofunc.functional import packed_moments
from colofunc.functional.lion_lamb import NamedTensors, Updated, UpdateInputs
from colofunc.functional.packed_moments import MOMENTS, SCALES
from colofunc.ops import update as ops
from colofunc.ops.update_packed import adamw8
from colofunc.ops.update_rounded import adamw_rounded
from colofunc.ops.update_rules import KINDS, options_of, update


def elementwise(cls: type[torch.optim.Optimizer], given: UpdateInputs) -> Updated:
    """The update of a class that `update_rules` has a rule for."""
    keys = KINDS[cls.__name__].states
    state = given.state
    new_params: NamedTensors = {}
    new_state: dict[str, NamedTensors] = {key: {} for key in state}
    for name, param in given.params.items():
        before = [state[key].get(name) if key in state else None for key in keys]
        before += [None] * (3 - len(before))  # the operator has three places for state
        options = options_of(cls.__name__, given.options[name])
        new_params[name], *after = update(
            cls.__name__, param, given.grads[name], *before, given.step, given.rates[name], options, given.finite
        )
        for key, old, new in zip(keys, before, after, strict=False):
            if old is not None:
                new_state[key][name] = new
    return new_params, new_state


def adamw(cls: type[torch.optim.Optimizer], given: UpdateInputs) -> Updated:
    """Adam and AdamW: with moments in bytes, with parameters that are rounded by a draw, or plain."""
    state, step, finite = given.state, given.step, given.finite
    first, second = MOMENTS
    new_params: NamedTensors = {}
    new_state: dict[str, NamedTensors] = {key: {} for key in state}
    for name, param in given.params.items():
        options = given.options[name]
        grad, rate = given.grads[name], given.rates[name]
        decoupled = cls is torch.optim.AdamW or bool(options.get("decoupled_weight_decay", False))
        beta1, beta2 = map(float, options["betas"])
        numbers = beta1, beta2, options["eps"], options["weight_decay"], decoupled
        maximize = options["maximize"]
        rounded = packed_moments.is_rounded(param, options)
        if packed_moments.moment_blocks(param, options) is not None:
            keys = [first, SCALES[0], second, SCALES[1]]
            before = [state[key][name] for key in keys]
            site = (packed_moments.site_of(name),) if rounded else ()
            new_params[name], *after = adamw8(param, grad, *before, step, rate, *numbers, maximize, finite, *site)
        elif rounded:
            keys = [first, second]
            before = [state[key][name] for key in keys]
            site_of_name = packed_moments.site_of(name)
            new_params[name], *after = adamw_rounded(
                param, grad, *before, step, rate, *numbers, maximize, finite, site_of_name
            )
        else:
            keys = [first, second]
            before = [state[key][name] for key in keys]
            amsgrad = options["amsgrad"]
            largest = None
            if amsgrad:
                keys.append("max_exp_avg_sq")
                largest = state["max_exp_avg_sq"][name]
            new_params[name], *after = ops.adamw(
                param, grad, *before, step, rate, *numbers, amsgrad, largest, maximize, finite
            )
        for key, tensor in zip(keys, after, strict=False):  # without amsgrad the operator's third state is no state
            new_state[key][name] = tensor
    return new_params, new_state


def sgd(given: UpdateInputs) -> Updated:
    """SGD; parameters without momentum have no buffer."""
    new_params: NamedTensors = {}
    buffers: NamedTensors = {}
    for name, param in given.params.items():
        options = given.options[name]
        momentum, dampening, weight_decay = options["momentum"], options["dampening"], options["weight_decay"]
        buffer: Tensor | None = None
        if momentum != 0:
            buffer = given.state["momentum_buffer"][name]
        new_params[name], new_buffer = ops.sgd(
            param, given.grads[name], buffer, given.step, given.rates[name], momentum, dampening, weight_decay,
            options["nesterov"], options["maximize"], given.finite,
        )  # fmt: skip
        if buffer is not None:
            buffers[name] = new_buffer
    return new_params, {"momentum_buffer": buffers} if buffers else {}
