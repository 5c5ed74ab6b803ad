"""What each scheme does to the loss, weight by weight: what `cf.quantize(step, "auto")` chooses by.

    measuring = cf.shard(cf.sensitivities(loss_fn), mesh, zero(3, "dp"))      # loss_fn(params, batch) -> loss
    errors = cf.scheme_errors(model.params, [measuring(model.params, batch) for batch in batches])
    step = cf.quantize(step, "auto", errors=errors, budget="48GB", rise=1e-3)       # or cf.quantize(step, errors.within("2GiB"))

Problem: how far a weight W moves says little: what counts is what its inputs make of that, and what the loss makes of
its outputs. Trying each weight in each scheme takes a run over the calibration data for each of them. Idea: near a
minimum the loss rises by half of the change's second-order form, and for a linear layer that is, with inputs x and
outputs y over rows of the calibration batch,

    rise = 1/2 sum_r  G_r  d_r M d_r^T         d = W' - W, row by row    M = sum x x^T, (i, i)    G_r = sum (dloss/dy_r)^2, (o,)

so that one forward and backward pass measures all weights, and any scheme is judged by its numbers alone. Why this one:
it is in units of the loss, so errors of different layers can be compared and added, which errors of products cannot. It
is a Kronecker-factored empirical Fisher (the average over rows of gradients and that of inputs, each by itself) of
which only the diagonal is taken on the side of outputs: what is left out are correlations between outputs, between the
two factors and between weights, and the first-order term, which is nothing at a minimum. Losses are means over rows, as
they usually are. A weight that several layers read counts once for each, by sums.

A table that rows are looked up in is measured number by number, which takes as much as the table: with n lookups,

    rise = 1/2 sum_vc  S_vc d_vc^2             S_vc = n sum (dloss/dy_c)^2 over lookups of row v, (v, c)

Rows that the batch does not have count for nothing. A tied table is the sum of both.

A scheme that rounds inputs of layers too gives y' = W' x', off by d x + W' e, where e = x' - x is what the rounding
moves. So d M d^T above becomes the sum of the squares of that, with moments of e that were measured by rounding these
inputs as the scheme does (`cf.sensitivities(loss_fn, schemes=...)`):

    d M d^T + W' E W'^T + 2 W' C d^T           E = sum e e^T, (i, i)    C = sum e x^T, (i, i)

Sources: Martens and Grosse 2015, "K-FAC" (1503.05671), section 3; LeCun et al. 1990, "Optimal Brain Damage", for
second-order saliencies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from colofunc import compat
from colofunc.compiler.lowered import Lowered
from colofunc.compiler.quantized_weights import packed
from colofunc.compiler.staged import Staged
from colofunc.dtensor.tensor import DTensor
from colofunc.errors import InputError, near
from colofunc.functional.sensitivities import MAKER, KnownSensitivities, Sensitivities, averaged, listed
from colofunc.mesh import Mesh
from colofunc.ops.quantized import Quantized
from colofunc.ops.quantizers import BUILT_IN, Quantizer
from colofunc.planner.plan import matches
from colofunc.planner.schemes import AS_IT_IS, Option, SchemeChoice, SchemeErrors, WeightOptions
from colofunc.planner.weight_seconds import weight_seconds
from colofunc.program.lazy import LazyTensor, make
from colofunc.transforms.quantize import quantize
from colofunc.transforms.shard import shard

SCHEMES = ("int8", "fp8", "fp8-g128", "mxfp8", "nvfp4", "int4-g128", "nf4")
"""What weights are tried in: all built-in schemes that leave inputs of layers as they are."""


def scheme_errors(
    weights: Mapping[str, Any],
    measured: Sensitivities | Sequence[Sensitivities],
    schemes: str | Quantizer | Iterable[str | Quantizer] | None = None,
    where: str | Iterable[str] = "*.weight",
    step: Any = None,
    args: Sequence[Any] = (),
) -> SchemeErrors:
    """Of each weight and scheme: bytes, and by how much the loss rises, estimated from sensitivities.

    weights: name -> tensor, `model.params` or `{**model.params, **model.frozen}`; lazy ones are made one at a time, of
    those on ranks all rows are gathered. measured: what a step of `cf.sensitivities` returns, or a list of such of
    several batches, which are averaged. schemes: names of built-in schemes, or quantizers such as `cf.gptq(moments)`,
    one or several; None: all built-in ones that leave inputs of layers as they are, and those whose rounding of inputs
    was measured. where: globs as in `cf.quantize`; weights that they match and of which nothing was measured stay as
    they are, and count as bytes. step, args: the step to be quantized, staged or not, and its arguments; then each
    option has seconds too, on the clock by which plans are made: of all that reads the weight or rounds inputs for it,
    added up. Raises InputError where something measured is not finite or of other weights, and for a scheme that is
    unknown, or rounds inputs and was not measured.
    """
    if not isinstance(weights, Mapping):
        kind = type(weights).__name__
        raise InputError(
            f"cf.scheme_errors: weights are of type {kind}. Try: a dict of them by name, such as model.params"
        )
    globs = (where,) if isinstance(where, str) else tuple(where)
    known = averaged(measured)
    quantizers = _quantizers(schemes, known)
    found = []
    for name, weight in weights.items():
        if isinstance(weight, Quantized):
            raise InputError(
                f"cf.scheme_errors: {name!r} is quantized already, as {weight.scheme!r}. Try: the weight that it was "
                "made of"
            )
        if weight.dim() >= 2 and weight.is_floating_point() and any(matches(name, glob) for glob in globs):
            found.append(_options(name, weight, quantizers, known))
    for glob in globs:
        if not any(matches(weight.name, glob) for weight in found):
            raise InputError(
                f"cf.scheme_errors: where={glob!r} matches no weight of two dims and "
                f"more{near(glob, weights, 'weights')}"
            )
    return SchemeErrors(tuple(found) if step is None else _timed(found, quantizers, step, tuple(args)))


def _quantizers(
    schemes: str | Quantizer | Iterable[str | Quantizer] | None, known: KnownSensitivities
) -> list[Quantizer]:
    if schemes is None:
        schemes = (*SCHEMES, *[name for name in known.roundings if name in BUILT_IN])
    found = [_quantizer(scheme, known) for scheme in listed(schemes)]
    if not found:
        raise InputError(
            f"cf.scheme_errors(schemes={schemes!r}): there is nothing to choose from. Try: schemes={SCHEMES[:2]}"
        )
    return found


def _quantizer(scheme: Any, known: KnownSensitivities) -> Quantizer:
    if not isinstance(scheme, (str, Quantizer)):
        raise InputError(
            f"cf.scheme_errors: {scheme!r} in schemes= is of type {type(scheme).__name__}. Try: names of schemes "
            f"({', '.join(SCHEMES)}), cf.gptq(moments)"
        )
    if isinstance(scheme, str):
        if scheme not in BUILT_IN:
            raise InputError(f"cf.scheme_errors: there is no scheme {scheme!r}{near(scheme, BUILT_IN, 'schemes')}")
        scheme = BUILT_IN[scheme]
    if scheme.rounds_inputs and scheme.name not in known.roundings:
        raise InputError(
            f"cf.scheme_errors: {scheme.name!r} rounds inputs of layers too, and what that does to them was not "
            f"measured. Try: {_measured_by(scheme)}schemes= of {', '.join(SCHEMES)}"
        )
    return scheme


def _measured_by(scheme: Quantizer) -> str:
    """What measures how a scheme rounds inputs, for an error; nothing does where they are divided first."""
    if scheme.by_name is not None or scheme.input_scale is not None:
        return ""
    return f"{MAKER}(loss_fn, schemes={scheme.name!r}), which does; "


def _options(name: str, weight: Tensor, quantizers: Sequence[Quantizer], known: KnownSensitivities) -> WeightOptions:
    """The ways in which a weight may be kept."""
    shape = tuple(weight.shape)
    plain = Option(None, weight.numel() * weight.itemsize, 0.0)
    if not known.has(name):
        return WeightOptions(name, shape, (plain,), "nothing was measured of it")
    whole = _made(name, weight)
    options = [plain]
    for quantizer in quantizers:
        # What is calibrated is so by inputs of linear layers, which a table has none of.
        is_unknown = quantizer.by_name is not None and not known.inputs.has(name)
        if is_unknown or quantizer.refuses(shape):
            continue
        found = packed(quantizer.named(name), whole, name)
        options.append(Option(quantizer, found.nbytes, known.rise(name, quantizer, found, whole)))
    return WeightOptions(name, shape, tuple(options), "" if len(options) > 1 else "no scheme takes its shape")


def _made(name: str, weight: Tensor) -> Tensor:
    """The whole weight, on the host."""
    with compat.disable_modes(), torch.no_grad():
        if isinstance(weight, DTensor):
            weight = weight.full()
        elif isinstance(weight, LazyTensor):
            weight = make(weight)
        if weight.is_meta or isinstance(weight, compat.FakeTensor):
            raise InputError(
                f"cf.scheme_errors: {name!r} has no values. Try: the model's own weights, or lazy ones that can be made"
            )
        return weight.detach().cpu()


# ---- seconds ----


def _timed(
    weights: Sequence[WeightOptions], quantizers: Sequence[Quantizer], step: Any, args: tuple[Any, ...]
) -> tuple[WeightOptions, ...]:
    """The weights, with the seconds of each option: the step is planned once as it is, and once in each scheme."""
    names = [weight.name for weight in weights]
    step = step if isinstance(step, Staged) else shard(step, Mesh())
    seconds = {AS_IT_IS: _seconds_of(_lowered(step, args), names)}
    for quantizer in quantizers:
        taken = [weight.name for weight in weights if weight.option(quantizer.name) is not None]
        if taken:
            seconds[quantizer.name] = _seconds_of(_lowered(quantize(step, quantizer, where=taken), args), names)
    found = []
    for weight in weights:
        options = tuple(attrs.evolve(option, seconds=seconds[option.name][weight.name]) for option in weight.options)
        found.append(attrs.evolve(weight, options=options))
    return tuple(found)


def _lowered(step: Any, args: tuple[Any, ...]) -> Lowered:
    low: Lowered = step.lower(*args)
    return low


def _seconds_of(low: Lowered, names: Sequence[str]) -> dict[str, float]:
    return weight_seconds(low.program, low.priced, low.registry.rule, names)


# ---- a whole step ----


def scheme_choice(step: Any, *args: Any) -> SchemeChoice:
    """What a step with `cf.quantize(step, "auto", ...)` has chosen, for another step with these weights.

    `print` shows it.

    args: the step's arguments, abstract ones too; where it was not called before, it chooses now. `choice.tried` lists
    what the whole step was finished with. Raises InputError where the step leaves no schemes open, PlanError where none
    fit.
    """
    transform = step.settled(*args).transform("quantize") if isinstance(step, Staged) else None
    if transform is None or not isinstance(transform.decided, SchemeChoice):
        raise InputError(
            "cf.scheme_choice: the step chooses no schemes. Try: step = cf.quantize(step, 'auto', "
            "errors=cf.scheme_errors(...))"
        )
    return transform.decided
