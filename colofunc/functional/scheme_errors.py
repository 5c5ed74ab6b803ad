"""What each scheme does to the loss, weight by weight: what `cf.quantize(step, "auto")` chooses by.

    measuring = cf.shard(cf.sensitivities(loss_fn), mesh, zero(3, "dp"))            # loss_fn(params, batch) -> loss
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

Sources: Martens and Grosse 2015, "K-FAC" (1503.05671), section 3; LeCun et al. 1990, "Optimal Brain Damage", for
second-order saliencies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
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
from colofunc.functional.calibration import MOMENTS, MeasuredWeights, Statistic, as_a_step, globs_of, joined
from colofunc.mesh import Mesh
from colofunc.ops.measured import WeightMeasures
from colofunc.ops.quantized import Quantized
from colofunc.ops.quantized_frozen import reading
from colofunc.ops.quantized_inputs import linear_inputs
from colofunc.ops.quantizers import BUILT_IN, Quantizer, rows_at_once
from colofunc.planner.plan import matches
from colofunc.planner.schemes import AS_IT_IS, Option, SchemeChoice, SchemeErrors, WeightOptions
from colofunc.planner.weight_seconds import weight_seconds
from colofunc.program.lazy import LazyTensor, make
from colofunc.transforms.quantize import quantize
from colofunc.transforms.shard import shard

MAKER = "cf.sensitivities"
SCHEMES = ("int8", "fp8", "fp8-g128", "mxfp8", "nvfp4", "int4-g128", "nf4")
"""What weights are tried in: all built-in schemes that leave inputs of layers as they are."""
INPUTS, OUTPUTS, LOOKUPS = "inputs", "outputs", "lookups"
SEEN = attrs.evolve(MOMENTS, maker=MAKER)
GRADIENTS = Statistic(
    MAKER, "squares of gradients", "(o,)", torch.square, torch.add, sizes=True, cause="so the loss or its gradients had"
)
ROWS = attrs.evolve(GRADIENTS, what="squares of gradients of rows", shape="(v, c)")
Sensitivities = Mapping[str, Mapping[str, Tensor]]


class _Squares(torch.autograd.Function):
    """A layer's output as it is.

    What `sums` gets as its gradient is the sum over rows of the squares of the output's gradient.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, sums: Tensor) -> Tensor:
        ctx.dtype = sums.dtype
        return output.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        squares = g.to(ctx.dtype).square()
        rows = list(range(g.dim() - 1))
        return g, squares.sum(rows) if rows else squares


class _SquaresOfRows(torch.autograd.Function):
    """Rows of a table as they are.

    The gradient of `sums` is, for each row of the table, the sum of squares of its lookups' gradients.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ids: Tensor, sums: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.dtype, ctx.size = sums.dtype, sums.shape[0]
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, Tensor]:
        (ids,) = ctx.saved_tensors
        squares = g.to(ctx.dtype).square()
        return g, None, torch.ops.aten.embedding_dense_backward(squares, ids, ctx.size, -1, False) * ids.numel()


class _Gradients(MeasuredWeights):
    """What a run has measured of inputs, and what its gradients are going to be summed in: of outputs, and of rows of
    tables."""

    def __init__(self, globs: tuple[str, ...]) -> None:
        super().__init__(SEEN, globs)
        self.sums: list[tuple[str, Tensor]] = []
        self.tables: list[tuple[str, Tensor]] = []

    def watch(self, output: Tensor, name: str) -> Tensor:
        """The output of a layer, whose gradient will be seen."""
        wide = torch.promote_types(output.dtype, torch.float32)
        sums = output.new_zeros(output.shape[-1], dtype=wide).requires_grad_()
        self.sums.append((name, sums))
        watched: Tensor = _Squares.apply(output, sums)
        return watched

    def watch_rows(self, ids: Tensor, rows: Tensor, name: str) -> Tensor:
        """What was looked up in a table, whose gradient will be seen."""
        table = next(weight for weight, known in self.names.values() if known == name)
        sums = rows.new_zeros(table.shape, dtype=torch.promote_types(rows.dtype, torch.float32)).requires_grad_()
        self.tables.append((name, sums))
        watched: Tensor = _SquaresOfRows.apply(rows, ids, sums)
        return watched

    def squares(self, loss: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Weight's name -> (o,), and table's name -> (v, c), from the gradients of the loss."""
        every = [*self.sums, *self.tables]
        wanted = [sums for _, sums in every]
        grads: Sequence[Tensor | None] = [None] * len(wanted)
        if wanted and loss.requires_grad:
            grads = torch.autograd.grad(loss, wanted, allow_unused=True)
        outputs: dict[str, Tensor] = {}
        rows: dict[str, Tensor] = {}
        for number, ((name, sums), grad) in enumerate(zip(every, grads, strict=True)):
            grad = torch.zeros_like(sums) if grad is None else grad
            found = outputs if number < len(self.sums) else rows
            found[name] = found[name] + grad if name in found else grad
        return outputs, rows


def sensitivities(
    loss_fn: Callable[..., Any], where: str | Iterable[str] = "*.weight"
) -> Callable[..., dict[str, dict[str, Tensor]]]:
    """A step with the arguments of `loss_fn` that returns what `cf.scheme_errors` needs of a calibration batch.

    loss_fn: a function such as loss(params, batch), a mean over rows, (). The step returns {"inputs": {weight: sum of x
    x^T over all rows x of its linear layers' inputs, (i, i)}, "outputs": {weight: sum of squares of the loss's
    gradients for their outputs, (o,)}, "lookups": {table: for each of its numbers the sum of squares of the gradients
    for what was looked up there, times the lookups, (v, c)}}. where: globs over the names of weights, in argument 0 or
    frozen in a model, as in `cf.quantize`. Raises InputError where a glob matches no weight of a linear layer and no
    table, and where the function returns no loss.
    """
    globs = globs_of(MAKER, loss_fn, where)

    @wraps(loss_fn)
    def measured(*args: Any, **kwargs: Any) -> dict[str, dict[str, Tensor]]:
        seen = _Gradients(globs)
        seen.note_all(args[0] if args else {})
        with as_a_step(), torch.enable_grad(), reading(seen.frozen, lambda wide, weight: None):
            with linear_inputs(seen.name, seen.see, seen.watch, seen.watch_rows):
                loss = loss_fn(*args, **kwargs)
            if not isinstance(loss, Tensor) or loss.dim() != 0 or not loss.is_floating_point():
                kind = f"a {type(loss).__name__}"
                if isinstance(loss, Tensor):
                    kind = f"a tensor of shape {tuple(loss.shape)}"
                raise InputError(
                    f"{MAKER}: the function returned {kind}, and is to return a loss of shape (). Try: loss.mean()"
                )
            outputs, rows = seen.squares(loss)
        seen.check([*outputs, *rows], "a linear layer or a lookup reads")
        return {INPUTS: seen.values, OUTPUTS: outputs, LOOKUPS: rows}

    return measured


def scheme_errors(
    weights: Mapping[str, Any],
    measured: Sensitivities | Sequence[Sensitivities],
    schemes: str | Quantizer | Iterable[str | Quantizer] = SCHEMES,
    where: str | Iterable[str] = "*.weight",
    step: Any = None,
    args: Sequence[Any] = (),
) -> SchemeErrors:
    """Of each weight and scheme: bytes, and by how much the loss rises, estimated from sensitivities.

    weights: name -> tensor, `model.params` or `{**model.params, **model.frozen}`; lazy ones are made one at a time, of
    those on ranks all rows are gathered. measured: what a step of `cf.sensitivities` returns, or a list of such of
    several batches, which are averaged. schemes: names of built-in schemes, or quantizers such as `cf.gptq(moments)`,
    one or several. where: globs as in `cf.quantize`; weights that they match and of which nothing was measured stay as
    they are, and count as bytes. step, args: the step to be quantized, staged or not, and its arguments; then each
    option has seconds too, on the clock by which plans are made: of all that reads the weight, added up. Raises
    InputError where something measured is not finite or of other weights, and for a scheme that is unknown or rounds
    inputs too.
    """
    if not isinstance(weights, Mapping):
        kind = type(weights).__name__
        raise InputError(
            f"cf.scheme_errors: weights are of type {kind}. Try: a dict of them by name, such as model.params"
        )
    globs = (where,) if isinstance(where, str) else tuple(where)
    quantizers = _quantizers(schemes)
    known = _averaged(measured)
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


def _quantizers(schemes: str | Quantizer | Iterable[str | Quantizer]) -> list[Quantizer]:
    if isinstance(schemes, (str, Quantizer)):
        schemes = (schemes,)
    found = [_quantizer(scheme) for scheme in schemes]
    if not found:
        raise InputError(
            f"cf.scheme_errors(schemes={schemes!r}): there is nothing to choose from. Try: schemes={SCHEMES[:2]}"
        )
    return found


def _quantizer(scheme: Any) -> Quantizer:
    if not isinstance(scheme, (str, Quantizer)):
        raise InputError(
            f"cf.scheme_errors: {scheme!r} in schemes= is of type {type(scheme).__name__}. Try: names of schemes "
            f"({', '.join(SCHEMES)}), cf.gptq(moments)"
        )
    if isinstance(scheme, str):
        if scheme not in BUILT_IN:
            raise InputError(f"cf.scheme_errors: there is no scheme {scheme!r}{near(scheme, BUILT_IN, 'schemes')}")
        scheme = BUILT_IN[scheme]
    if scheme.rounds_inputs:
        raise InputError(
            f"cf.scheme_errors: {scheme.name!r} rounds inputs of layers too, and errors here are those of weights. "
            f"Try: schemes= of {', '.join(SCHEMES)}, cf.gptq(moments), cf.awq(moments)"
        )
    return scheme


@attrs.frozen(eq=False)
class _Known:
    """What was measured, of the mean batch."""

    inputs: WeightMeasures
    outputs: WeightMeasures
    lookups: WeightMeasures

    def has(self, name: str) -> bool:
        """Whether a weight was read."""
        return self.inputs.has(name) or self.lookups.has(name)

    def rise(self, name: str, found: Quantized, weight: Tensor) -> float:
        """By how much the loss rises with a quantized weight, by the formulas above, some rows after the others."""
        self._check_rows(name, weight)
        wide = found.dequantize(torch.float64)
        rise, step = 0.0, rows_at_once(weight.shape)
        for first in range(0, weight.shape[0], step):
            rows = slice(first, first + step)
            off = wide[rows] - weight[rows].to(torch.float64)
            if self.inputs.has(name):
                moments, squares = self.inputs.of(name, weight.shape[1]), self.outputs.values[self.outputs.known(name)]
                rise += float((((off @ moments) * off).sum(1) * squares[rows]).sum()) / 2
            if self.lookups.has(name):
                rise += float((off.square() * self.lookups.of(name, weight.shape[1])[rows]).sum()) / 2
        return max(0.0, rise)

    def _check_rows(self, name: str, weight: Tensor) -> None:
        """Raises InputError where what was measured is of a weight with other rows."""
        for part in (self.outputs, self.lookups):
            if not part.has(name):
                continue
            shape = tuple(part.values[part.known(name)].shape)
            if shape[0] != weight.shape[0]:
                has = f"{name!r} has {weight.shape[0]} rows, and its {part.what} are {shape}"
                raise InputError(f"cf.scheme_errors: {has}. Try: sensitivities of this model")


def _averaged(measured: Sensitivities | Sequence[Sensitivities]) -> _Known:
    """What was measured of several batches."""
    batches = [measured] if isinstance(measured, Mapping) else list(measured)
    if not batches or not all(
        isinstance(batch, Mapping) and {INPUTS, OUTPUTS, LOOKUPS} <= batch.keys() for batch in batches
    ):
        raise InputError(
            f"cf.scheme_errors: there are no sensitivities. Try: what a step of {MAKER} returns, or a list of such"
        )
    found = []
    for part, statistic in ((INPUTS, SEEN), (OUTPUTS, GRADIENTS), (LOOKUPS, ROWS)):
        values: Mapping[str, Tensor] = {}
        if any(batch[part] for batch in batches):
            values = joined("cf.scheme_errors", statistic, [batch[part] for batch in batches]).values
        mean = {name: value / len(batches) for name, value in values.items()}
        found.append(WeightMeasures("cf.scheme_errors", statistic.what, MAKER, mean))
    return _Known(*found)


def _options(name: str, weight: Tensor, quantizers: Sequence[Quantizer], known: _Known) -> WeightOptions:
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
        options.append(Option(quantizer, found.nbytes, known.rise(name, found, whole)))
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
