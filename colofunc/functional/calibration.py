"""Calibration: what inputs of linear layers are like, as a step that is sharded like any other.

    calibration = cf.shard(cf.input_moments(forward, where="*.weight"), mesh, zero(3, "dp"))
    moments = calibration(params, batch)                                  # {"0.weight": sum of x x^T, (i, i), ...}
    step = cf.quantize(step, cf.gptq(moments))                            # or cf.awq(moments)

    calibration = cf.shard(cf.input_maxima(forward), mesh)
    step = cf.quantize(step, cf.smoothquant(calibration(params, batch)))  # {"0.weight": max |x|, (i,), ...}

Problem: schemes that look at data need hooks in modules and a pass of their own over layers, on one device. Idea: a
function mode sees which weights linear layers read, so that the step itself can sum up their inputs; ranks sum over
rows as they do for gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from numbers import Real
from typing import Any

import attrs
import torch
from torch import Tensor

from colofunc.compiler.staged import Staged
from colofunc.compiler.weight_arguments import named_tensors
from colofunc.dtensor.tensor import DTensor
from colofunc.errors import InputError, near
from colofunc.ops import canonical, input_scales
from colofunc.ops.gptq import DAMPING, calibrated
from colofunc.ops.linear import linear_dw
from colofunc.ops.measured import WeightMeasures
from colofunc.ops.quantized_frozen import reading
from colofunc.ops.quantized_inputs import WeightNames, linear_inputs
from colofunc.ops.quantizers import Quantizer
from colofunc.planner.plan import matches
from colofunc.program.tracing.meta import active_stacks

InputMoments = Mapping[str, Tensor]  # weight's name -> what was measured of its inputs


@attrs.frozen
class Statistic:
    """What a calibration step measures of the inputs of a weight.

    `maker`: the name of the step that measures it. `what`: its values' name. `shape`: their shape for a weight (o, i).
    `of(x)`: the value of rows x (..., i). `join(a, b)`: the value of all rows, from those of two batches. `sizes`: no
    value is negative. `cause`: what it means where a value is not finite.
    """

    maker: str
    what: str
    shape: str
    of: Callable[[Tensor], Tensor]
    join: Callable[[Tensor, Tensor], Tensor]
    sizes: bool = False
    cause: str = "so its inputs had"

    @property
    def dims(self) -> int:
        """How many dims a value has."""
        return sum(letter.isalpha() for letter in self.shape)

    @property
    def is_square(self) -> bool:
        """Whether both dims of a value count the same."""
        return self.shape.count("i") == 2


def _products(x: Tensor) -> Tensor:
    return linear_dw(x, x)


def _largest(x: Tensor) -> Tensor:
    columns = x.shape[-1]
    if x.numel() == 0:  # of no rows there is no maximum
        return x.new_zeros(columns)
    size = x.abs()
    # A maximum over real ranks may drop NaN, and keeps infinity.
    size = torch.where(size.isnan(), torch.inf, size)
    return size.reshape(-1, columns).amax(0)


MOMENTS = Statistic("cf.input_moments", "moments", "(i, i)", _products, torch.add)
MAXIMA = Statistic("cf.input_maxima", "maxima", "(i,)", _largest, torch.maximum, sizes=True)


def input_moments(
    step_fn: Callable[..., Any], where: str | Iterable[str] = "*.weight"
) -> Callable[..., dict[str, Tensor]]:
    """A step with the arguments of `step_fn` that returns {weight: sum of x x^T over all rows x of its linear layers'
    inputs}.

    where: globs over the names of weights, in the arguments or frozen in a model, as in `cf.quantize`. Moments are (i, i)
    for a weight (o, i), in float32 or the inputs' dtype if that is wider. Raises InputError where a glob matches no
    weight of a linear layer.
    """
    return _measuring(MOMENTS, step_fn, where)


def input_maxima(
    step_fn: Callable[..., Any], where: str | Iterable[str] = "*.weight"
) -> Callable[..., dict[str, Tensor]]:
    """A step with the arguments of `step_fn` that returns {weight: max |x| over all rows x of its linear layers'
    inputs}.

    where: as in `cf.input_moments`. Maxima are (i,) for a weight (o, i), in float32 or the inputs' dtype if that is
    wider. Raises InputError where a glob matches no weight of a linear layer.
    """
    return _measuring(MAXIMA, step_fn, where)


def globs_of(maker: str, step_fn: Callable[..., Any], where: str | Iterable[str]) -> tuple[str, ...]:
    """`where` of a calibration step that `maker` makes.

    Raises InputError where it is given no function, or no globs.
    """
    globs = (where,) if isinstance(where, str) else tuple(where)
    if isinstance(step_fn, Staged):
        raise InputError(f"{maker} takes the step function itself. Try: cf.shard({maker}(step_fn), mesh)")
    if not callable(step_fn):
        raise InputError(
            f"{maker} was given a {type(step_fn).__name__}. Try: a function such as forward(params, batch)"
        )
    if not globs or not all(isinstance(glob, str) for glob in globs):
        raise InputError(
            f"{maker}(where={where!r}): give a glob over names of weights, or several. Try: where='*.weight'"
        )
    return globs


def as_a_step() -> AbstractContextManager[None]:
    """Inside, a function that is called by itself computes as it does in a step: torch has no grouped products of
    float64, steps have.
    """
    return nullcontext() if active_stacks() is not None or canonical.on_single_device() else canonical.single_device()


def _measuring(
    statistic: Statistic, step_fn: Callable[..., Any], where: str | Iterable[str]
) -> Callable[..., dict[str, Tensor]]:
    globs = globs_of(statistic.maker, step_fn, where)

    @wraps(step_fn)
    def measured(*args: Any, **kwargs: Any) -> dict[str, Tensor]:
        seen = MeasuredWeights(statistic, globs)
        seen.note_all((*args, *kwargs.values()))
        with as_a_step(), reading(seen.frozen, lambda wide, weight: None), linear_inputs(seen.name, seen.see):
            step_fn(*args, **kwargs)
        return seen.result()

    return measured


class MeasuredWeights(WeightNames):
    """Weights of one run by name, and what was measured of their inputs."""

    def __init__(self, statistic: Statistic, globs: tuple[str, ...]) -> None:
        super().__init__(lambda name: any(matches(name, glob) for glob in globs))
        self.statistic = statistic
        self.globs = globs
        self.values: dict[str, Tensor] = {}

    def note_all(self, arguments: Sequence[Any]) -> None:
        """The weights among the arguments; of several with one name (a student's and a teacher's) the first."""
        known: set[str] = set()
        for argument in arguments:
            found = [(name, leaf) for name, leaf in named_tensors([argument]) if name not in known]
            for name, leaf in found:
                self.note(name, leaf)
            known.update(name for name, _ in found)

    def see(self, x: Tensor, weight: Tensor, name: str) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            found = self.statistic.of(x.detach().to(torch.promote_types(x.dtype, torch.float32)))
            self.values[name] = self.statistic.join(self.values[name], found) if name in self.values else found
        return x, weight

    def result(self) -> dict[str, Tensor]:
        self.check(self.values, "a linear layer reads")
        return self.values

    def check(self, seen: Iterable[str], read: str) -> None:
        """Raises InputError for a glob that matches none of the weights that were seen. read: by what."""
        seen = list(seen)
        for glob in self.globs:
            if not any(matches(name, glob) for name in seen):
                names = [name for _, name in self.names.values() if name]
                raise InputError(
                    f"{self.statistic.maker}: where={glob!r} matches no weight that {read}{near(glob, names)}"
                )


# ---- what is made of them ----


def gptq(moments: InputMoments | Sequence[InputMoments], damping: float = DAMPING) -> Quantizer:
    """The scheme "gptq" in the format int4, for `cf.quantize`.

    moments: weight's name -> sum of x x^T over rows of its inputs, (i, i), as a step of `cf.input_moments` returns
    them; of several batches a list, which are summed (collective where they are DTensors). damping: added to the
    diagonal, times its mean. Raises InputError where moments are not finite, and when a weight is quantized of which
    there are none.
    """
    if not isinstance(damping, Real) or not damping > 0:
        raise InputError(f"cf.gptq(damping={damping!r}): moments of few rows have no inverse. Try: damping={DAMPING}")
    return calibrated(joined_statistics("cf.gptq", MOMENTS, moments), float(damping))


def awq(moments: InputMoments | Sequence[InputMoments]) -> Quantizer:
    """The scheme "awq" in the format int4, for `cf.quantize`: columns whose inputs are large are rounded more finely.

    moments: as for `cf.gptq`. Raises InputError where they are not finite, and when a weight is quantized of which
    there are none. Source: Lin et al. 2023, "AWQ" (2306.00978).
    """
    return input_scales.awq(joined_statistics("cf.awq", MOMENTS, moments))


def smoothquant(maxima: InputMoments | Sequence[InputMoments], alpha: float = 0.5) -> Quantizer:
    """The scheme "smoothquant" in the format int8, for `cf.quantize`: outliers of inputs move into weights, both are
    rounded.

    maxima: weight's name -> max |x| of its inputs, (i,), as a step of `cf.input_maxima` returns them; of several
    batches a list, of which the largest count (collective where they are DTensors). alpha: how much of the outliers
    moves, from 0 to 1. Raises InputError where maxima are not finite, and when a weight is quantized of which there are
    none. Source: Xiao et al. 2022, "SmoothQuant" (2211.10438).
    """
    if not isinstance(alpha, Real) or not 0 <= alpha <= 1:
        raise InputError(f"cf.smoothquant(alpha={alpha!r}): a part of what is moved, from 0 to 1. Try: alpha=0.5")
    return input_scales.smoothquant(joined_statistics("cf.smoothquant", MAXIMA, maxima), float(alpha))


def joined_statistics(
    scheme: str, statistic: Statistic, values: InputMoments | Sequence[InputMoments]
) -> WeightMeasures:
    """What several batches have measured together, in float64 on the host."""
    what, maker = statistic.what, statistic.maker
    batches: list[InputMoments] = []
    if isinstance(values, Mapping):
        batches = [values]
    elif isinstance(values, Iterable):
        batches = list(values)
    if not batches or not all(isinstance(batch, Mapping) and batch for batch in batches):
        raise InputError(f"{scheme}: there are no {what}. Try: those that a step of {maker} returns, or a list of them")
    joined: dict[str, Tensor] = {}
    for batch in batches:
        for name, given in batch.items():
            value = _checked(scheme, statistic, name, given)
            if name not in joined:
                joined[name] = value
                continue
            if value.shape != joined[name].shape:
                both = f"{tuple(joined[name].shape)} in one batch and {tuple(value.shape)} in another"
                raise InputError(f"{scheme}: {what} of {name!r} are {both}. Try: {what} of one model")
            joined[name] = statistic.join(joined[name], value)
    return WeightMeasures(scheme, what, maker, joined)


def _checked(scheme: str, statistic: Statistic, name: str, value: Any) -> Tensor:
    """A value as it is kept, float64 on the host. Raises InputError where it is none."""
    what, maker = statistic.what, statistic.maker
    if not isinstance(value, Tensor):
        kind = type(value).__name__
        raise InputError(f"{scheme}: {what} of {name!r} are a {kind}. Try: tensors, as a step of {maker} returns them")
    if value.dim() != statistic.dims or (statistic.is_square and len(set(value.shape)) != 1):
        shapes = f"{tuple(value.shape)}, and {statistic.shape} of a weight (o, i)"
        raise InputError(f"{scheme}: {what} of {name!r} are {shapes}. Try: {maker}")
    whole = value.full() if isinstance(value, DTensor) else value
    value = whole.detach().to("cpu", torch.float64)
    if not bool(value.isfinite().all()):
        raise InputError(
            f"{scheme}: the {what} of {name!r} have NaN or infinite numbers, {statistic.cause}. Try: a calibration "
            "batch without them; low.check_finite(state, batch), which names where they come from"
        )
    if statistic.sizes and bool((value < 0).any()):
        raise InputError(
            f"{scheme}: the {what} of {name!r} have negative numbers, and are of |x|. Try: {maker}, or their abs()"
        )
    return value
