"""What a loss makes of changes of weights, measured by one forward and backward pass over a calibration batch.

    measuring = cf.shard(cf.sensitivities(loss_fn, schemes="fp8-dynamic"), mesh, zero(3, "dp"))
    sensitivities = measuring(model.params, batch)           # what `cf.scheme_errors` estimates a scheme's error by

For a linear layer with inputs x (..., i) and outputs y (..., o), summed over all rows of the batch:

    inputs     sum x x^T (i, i)                  outputs    sum (dloss/dy)^2 (o,)
    roundings  for each scheme that rounds inputs, with e = x' - x the rounding of a row: sum e e^T and sum e x^T (i, i)

and for a table that rows are looked up in

    lookups    sum (dloss/dy)^2 of the lookups of each of its rows, times the lookups (v, c)

Inputs are rounded beside the pass and not in it: each layer's are those of the weights as they are, so that errors of
layers can be added, as those of weights are. The formulas that these are for are in
`colofunc/functional/scheme_errors.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any

import attrs
import torch
from torch import Tensor

from colofunc.errors import InputError, near
from colofunc.functional.calibration import MOMENTS, MeasuredWeights, Statistic, as_a_step, globs_of, joined_statistics
from colofunc.ops.linear import linear_dw
from colofunc.ops.measured import WeightMeasures
from colofunc.ops.quantized import Quantized
from colofunc.ops.quantized_frozen import reading
from colofunc.ops.quantized_inputs import linear_inputs
from colofunc.ops.quantizers import BUILT_IN, Quantizer, rows_at_once
from colofunc.ops.rounded_inputs import rounded_inputs

MAKER = "cf.sensitivities"
INPUTS, OUTPUTS, LOOKUPS, ROUNDINGS = "inputs", "outputs", "lookups", "roundings"
SQUARES, PRODUCTS = "squares", "products"
"""Of a scheme's roundings e: the sums of e e^T, and of e x^T."""
SEEN = attrs.evolve(MOMENTS, maker=MAKER)
ROUNDED = attrs.evolve(SEEN, what="moments of roundings")
GRADIENTS = Statistic(
    MAKER, "squares of gradients", "(o,)", torch.square, torch.add, sizes=True, cause="so the loss or its gradients had"
)
ROWS = attrs.evolve(GRADIENTS, what="squares of gradients of rows", shape="(v, c)")
Sensitivities = Mapping[str, Mapping[str, Any]]


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

    def __init__(self, globs: tuple[str, ...], schemes: Sequence[Quantizer]) -> None:
        super().__init__(SEEN, globs)
        self.schemes = schemes
        self.roundings: dict[str, dict[str, dict[str, Tensor]]] = {
            scheme.name: {SQUARES: {}, PRODUCTS: {}} for scheme in schemes
        }
        self.sums: list[tuple[str, Tensor]] = []
        self.tables: list[tuple[str, Tensor]] = []

    def see(self, x: Tensor, weight: Tensor, name: str) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            rows = x.detach().to(torch.promote_types(x.dtype, torch.float32))
            for scheme in self.schemes:
                if not scheme.refuses(tuple(weight.shape)):
                    off = rounded_inputs(scheme, rows) - rows
                    found = self.roundings[scheme.name]
                    _add(found[SQUARES], name, linear_dw(off, off))
                    _add(found[PRODUCTS], name, linear_dw(off, rows))
        return super().see(x, weight, name)

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
            _add(outputs if number < len(self.sums) else rows, name, grad)
        return outputs, rows


def _add(sums: dict[str, Tensor], name: str, value: Tensor) -> None:
    """What was measured of a weight, which several layers may read."""
    sums[name] = sums[name] + value if name in sums else value


def sensitivities(
    loss_fn: Callable[..., Any],
    where: str | Iterable[str] = "*.weight",
    schemes: str | Quantizer | Iterable[str | Quantizer] = (),
) -> Callable[..., dict[str, dict[str, Any]]]:
    """A step with the arguments of `loss_fn` that returns what `cf.scheme_errors` needs of a calibration batch.

    loss_fn: a function such as loss(params, batch), a mean over rows, (). The step returns {"inputs": {weight: sum of x
    x^T over all rows x of its linear layers' inputs, (i, i)}, "outputs": {weight: sum of squares of the loss's
    gradients for their outputs, (o,)}, "lookups": {table: for each of its numbers the sum of squares of the gradients
    for what was looked up there, times the lookups, (v, c)}, "roundings": {scheme: {"squares" and "products": {weight:
    (i, i)}}}}. where: globs over the names of weights, in argument 0 or frozen in a model, as in `cf.quantize`.
    schemes: those among which weights shall be chosen that round inputs of layers too ("int8-dynamic", "fp8-dynamic",
    "fp8-g128-dynamic", quantizers of your own): what their rounding does to each layer's inputs is measured as well, in
    two more matrices (i, i) for each weight and scheme. Raises InputError where a glob matches no weight of a linear
    layer and no table, where the function returns no loss, and for a scheme that rounds no inputs or divides them by a
    scale of the weight.
    """
    globs = globs_of(MAKER, loss_fn, where)
    rounding = [_rounding(scheme) for scheme in listed(schemes)]

    @wraps(loss_fn)
    def measured(*args: Any, **kwargs: Any) -> dict[str, dict[str, Any]]:
        seen = _Gradients(globs, rounding)
        seen.note_all((*args, *kwargs.values()))
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
        return {INPUTS: seen.values, OUTPUTS: outputs, LOOKUPS: rows, ROUNDINGS: seen.roundings}

    return measured


def listed(schemes: str | Quantizer | Iterable[str | Quantizer]) -> list[str | Quantizer]:
    """One scheme, or several, as a list."""
    return [schemes] if isinstance(schemes, (str, Quantizer)) else list(schemes)


def _rounding(scheme: Any) -> Quantizer:
    """A scheme whose rounding of inputs can be measured."""
    measurable = [name for name, known in BUILT_IN.items() if known.rounds_inputs]
    if isinstance(scheme, str):
        if scheme not in BUILT_IN:
            raise InputError(f"{MAKER}: there is no scheme {scheme!r}{near(scheme, measurable, 'schemes')}")
        scheme = BUILT_IN[scheme]
    remedy = f"Try: schemes= of {', '.join(measurable)}"
    if not isinstance(scheme, Quantizer):
        raise InputError(f"{MAKER}: {scheme!r} in schemes= is of type {type(scheme).__name__}. {remedy}")
    if not scheme.rounds_inputs:
        raise InputError(
            f"{MAKER}: {scheme.name!r} leaves inputs of layers as they are, and needs nothing measured but what always "
            f"is. {remedy}; cf.scheme_errors(schemes=...), for which schemes weights are tried in"
        )
    if scheme.by_name is not None or scheme.input_scale is not None:
        raise InputError(
            f"{MAKER}: {scheme.name!r} divides inputs by a scale that each weight has, before it rounds them, which is "
            f"not measured here. {remedy}"
        )
    return scheme


# ---- what is made of it ----


@attrs.frozen(eq=False)
class KnownSensitivities:
    """What was measured, of the mean batch."""

    inputs: WeightMeasures
    outputs: WeightMeasures
    lookups: WeightMeasures
    roundings: Mapping[str, tuple[WeightMeasures, WeightMeasures]]
    """Scheme that rounds inputs -> the sums of e e^T, and of e x^T."""

    def has(self, name: str) -> bool:
        """Whether a weight was read."""
        return self.inputs.has(name) or self.lookups.has(name)

    def rise(self, name: str, scheme: Quantizer, found: Quantized, weight: Tensor) -> float:
        """By how much the loss rises with a weight that a scheme has packed, by the formulas of `scheme_errors`, some
        rows after the others.
        """
        self._check_rows(name, weight)
        columns = weight.shape[1]
        wide = found.dequantize(torch.float64)
        rise, step = 0.0, rows_at_once(weight.shape)
        for first in range(0, weight.shape[0], step):
            rows = slice(first, first + step)
            off = wide[rows] - weight[rows].to(torch.float64)
            if self.inputs.has(name):
                of_rows = ((off @ self.inputs.of(name, columns)) * off).sum(1)
                if scheme.rounds_inputs:
                    squares, products = self.roundings[scheme.name]
                    of_rows += ((wide[rows] @ squares.of(name, columns)) * wide[rows]).sum(1)
                    of_rows += 2 * ((wide[rows] @ products.of(name, columns)) * off).sum(1)
                rise += float((of_rows * self.outputs.values[self.outputs.known(name)][rows]).sum()) / 2
            if self.lookups.has(name):
                rise += float((off.square() * self.lookups.of(name, columns)[rows]).sum()) / 2
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


def averaged(measured: Sensitivities | Sequence[Sensitivities]) -> KnownSensitivities:
    """What was measured of several batches."""
    batches = [measured] if isinstance(measured, Mapping) else list(measured)
    if not batches or not all(
        isinstance(batch, Mapping) and {INPUTS, OUTPUTS, LOOKUPS} <= batch.keys() for batch in batches
    ):
        raise InputError(
            f"cf.scheme_errors: there are no sensitivities. Try: what a step of {MAKER} returns, or a list of such"
        )
    inputs = _mean(SEEN, [batch[INPUTS] for batch in batches])
    outputs = _mean(GRADIENTS, [batch[OUTPUTS] for batch in batches])
    lookups = _mean(ROWS, [batch[LOOKUPS] for batch in batches])
    # Of sensitivities that an earlier version has saved there are none.
    roundings = [batch.get(ROUNDINGS, {}) for batch in batches]
    rounded = {}
    for scheme in dict.fromkeys(name for batch in roundings for name in batch):
        if not all(scheme in batch for batch in roundings):
            raise InputError(
                f"cf.scheme_errors: what {scheme!r} does to inputs was measured of some of these batches only. Try: "
                f"{MAKER}(loss_fn, schemes=...) with the same schemes for all of them"
            )
        squares = _mean(ROUNDED, [batch[scheme][SQUARES] for batch in roundings])
        products = _mean(ROUNDED, [batch[scheme][PRODUCTS] for batch in roundings])
        rounded[scheme] = squares, products
    return KnownSensitivities(inputs, outputs, lookups, rounded)


def _mean(statistic: Statistic, batches: Sequence[Mapping[str, Tensor]]) -> WeightMeasures:
    """One part of what was measured, of the mean batch."""
    values: Mapping[str, Tensor] = {}
    if any(batches):
        values = joined_statistics("cf.scheme_errors", statistic, batches).values
    mean = {name: value / len(batches) for name, value in values.items()}
    return WeightMeasures("cf.scheme_errors", statistic.what, MAKER, mean)
