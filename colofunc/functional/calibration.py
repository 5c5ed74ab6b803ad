"""Calibration: what inputs of linear layers are like, as a step that is sharded like any other.

    calibration = cf.shard(cf.input_moments(forward, where="*.weight"), mesh, zero(3, "dp"))
    moments = calibration(params, batch)                                  # {"0.weight": sum of x x^T, (i, i), ...}
    step = cf.quantize(step, cf.gptq(moments))

Problem: schemes that look at data need hooks in modules and a pass of their own over layers, on one device. Idea: a function mode sees
which weights linear layers read, so that their inputs can be summed up in the step itself; ranks sum over rows as they do for gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from colofunc.compiler.staged import Staged
from colofunc.dtensor.tensor import DTensor
from colofunc.errors import InputError, near
from colofunc.ops.gptq import DAMPING, Moments, calibrated
from colofunc.ops.linear import linear_dw
from colofunc.ops.quantized_frozen import reading
from colofunc.ops.quantized_inputs import LinearInputs
from colofunc.ops.quantizers import Quantizer
from colofunc.planner.plan import matches
from colofunc.program.tracing.tree import walk


def input_moments(step_fn: Callable[..., Any], where: str | Iterable[str] = "*.weight") -> Callable[..., dict[str, Tensor]]:
    """A step with the arguments of `step_fn` that returns {weight: sum of x x^T over all rows x that linear layers multiply it with}.

    where: globs over the names of weights, in argument 0 or frozen in a model, as in `cf.quantize`. Moments are (i, i) for a weight
    (o, i), in float32 or the inputs' dtype if that is wider. Raises InputError where a glob matches no weight of a linear layer.
    """
    globs = (where,) if isinstance(where, str) else tuple(where)
    if isinstance(step_fn, Staged):
        raise InputError("cf.input_moments takes the step function itself. Try: cf.shard(cf.input_moments(step_fn), mesh)")
    if not callable(step_fn):
        raise InputError(f"cf.input_moments was given a {type(step_fn).__name__}. Try: a function such as forward(params, batch)")
    if not globs or not all(isinstance(glob, str) for glob in globs):
        raise InputError(f"cf.input_moments(where={where!r}): give a glob over names of weights, or several. Try: where='*.weight'")

    @wraps(step_fn)
    def moments(*args: Any, **kwargs: Any) -> dict[str, Tensor]:
        seen = _Seen(globs)
        for name, leaf in walk(args[0] if args else {}):
            if isinstance(leaf, Tensor):
                seen.note(name, leaf)
        with reading(seen.frozen, lambda wide, weight: None), LinearInputs(seen.name, seen.see):
            step_fn(*args, **kwargs)
        return seen.result()

    return moments


class _Seen:
    """Weights of one run by name, and the moments of their inputs."""

    def __init__(self, globs: tuple[str, ...]) -> None:
        self.globs = globs
        self.names: dict[int, tuple[Tensor, str]] = {}  # id of a weight -> itself, its name
        self.moments: dict[str, Tensor] = {}

    def note(self, name: str, leaf: Tensor) -> None:
        self.names[id(leaf)] = leaf, name

    def frozen(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        for name, weight in weights.items():
            self.note(name, weight)
        return weights

    def name(self, weight: Tensor) -> str | None:
        known = self.names.get(id(weight))
        if known is None or not any(matches(known[1], glob) for glob in self.globs):
            return None
        return known[1]

    def see(self, x: Tensor, name: str) -> Tensor:
        with torch.no_grad():
            rows = x.detach().to(torch.promote_types(x.dtype, torch.float32))
            found = linear_dw(rows, rows)
            self.moments[name] = self.moments[name] + found if name in self.moments else found
        return x

    def result(self) -> dict[str, Tensor]:
        for glob in self.globs:
            if not any(matches(name, glob) for name in self.moments):
                names = [name for _, name in self.names.values()]
                raise InputError(f"cf.input_moments: where={glob!r} matches no weight that a linear layer reads{near(glob, names)}")
        return self.moments


# ---- what is made of them ----


def gptq(moments: Moments | Sequence[Moments], damping: float = DAMPING) -> Quantizer:
    """The scheme "gptq" in the format int4, for `cf.quantize`.

    moments: weight's name -> sum of x x^T over rows of its inputs, (i, i), as a step of `cf.input_moments` returns them; of several
    batches a list, which are summed (collective where they are DTensors). damping: added to the diagonal, times its mean. Raises
    InputError where moments are not finite, and when a weight is quantized of which there are none.
    """
    several = [moments] if isinstance(moments, Mapping) else list(moments)
    if not several or not all(isinstance(one, Mapping) and one for one in several):
        raise InputError("cf.gptq: there are no moments. Try: those that a step of cf.input_moments returns, or a list of them")
    if not damping > 0:
        raise InputError(f"cf.gptq(damping={damping!r}): moments of few rows have no inverse. Try: damping={DAMPING}")
    summed: dict[str, Tensor] = {}
    for one in several:
        for name, value in one.items():
            value = _checked(name, value)
            summed[name] = summed[name] + value if name in summed else value
    return calibrated(summed, float(damping))


def _checked(name: str, value: Tensor) -> Tensor:
    if value.dim() != 2 or value.shape[0] != value.shape[1]:
        raise InputError(f"cf.gptq: moments of {name!r} are {tuple(value.shape)}, and (i, i) of a weight (o, i). Try: cf.input_moments")
    whole = value.full() if isinstance(value, DTensor) else value
    value = whole.detach().to("cpu", torch.float64)
    if not bool(value.isfinite().all()):
        raise InputError(
            f"cf.gptq: the moments of {name!r} have NaN or infinite numbers, so its inputs had. Try: a calibration batch without them; "
            "low.check_finite(state, batch), which names where they come from"
        )
    return value
