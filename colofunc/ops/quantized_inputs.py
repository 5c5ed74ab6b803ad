"""Inputs of linear layers in int8, chosen while a step runs: the second half of W8A8.

    linear(rounded_rows(x, 6.0), w)     # multiples of a row's largest |x| below 6, over 127; what is not below 6 as it is

Problem: activations have some columns that are many times as large as the rest; a scale that fits them leaves nothing
of the others. Idea: what is large stays as it is, and the rest of a row is rounded to 8 bits of its own. Which elements
are large is asked of each element, not of whole columns as in the source: so a row's result depends on this row only,
and rows may lie on ranks or come in microbatches. Columns may lie on ranks too, which then tell one another the largest
of each row.

A product of these rows with a weight in int8 is one of whole numbers, times both scales, and a thin one of outliers:
that is `colofunc/ops/int8_products.py`. `rounded_rows` is for weights in other formats: rows in the dtype of x, for any
product. The gradient goes through the rounding as if it were not there. Source: Dettmers et al. 2022, "LLM.int8()"
(2208.07339), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from colofunc import compat
from colofunc.ops.canonical import opened
from colofunc.ops.define import define

STEPS = 127.0
_CASTS = frozenset(("to", "type", "float", "double", "half", "bfloat16", "type_as", "detach", "contiguous"))
"""Methods of a weight that give the same weight again."""


def largest_below(x: Tensor, threshold: float) -> Tensor:
    """The largest |x| of each row (..., i) that is less than the threshold: (...,), 0 where there is none."""
    if x.shape[-1] == 0:
        return x.new_zeros(x.shape[:-1])
    size = x.abs()
    return torch.where(size < threshold, size, torch.zeros_like(size)).amax(-1)


def units(x: Tensor, size: Tensor) -> Tensor:
    """Rows (..., i) in units of their `size` (...,) over 127, to the nearest whole number, in float32 (float64 for x in
    float64).
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    unit = (size.to(wide) / STEPS).unsqueeze(-1)
    # Rows of zeros (and of outliers alone) are zero whatever they are divided by.
    return (x.to(wide) / torch.where(unit == 0, torch.ones_like(unit), unit)).round()


def rounded(x: Tensor, size: Tensor, threshold: float) -> Tensor:
    """Rows (..., i) rounded to multiples of their `size` (...,) over 127.

    What is not less than the threshold is left out.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    multiples = units(x, size) * (size.to(wide) / STEPS).unsqueeze(-1)
    # Not "where x is large": what is no number stays so.
    return torch.where(x.abs() < threshold, multiples.to(x.dtype), x)


def _rounded_rows(x: Tensor, threshold: float) -> Tensor:
    return rounded(x, largest_below(x, threshold), threshold)


def _fake(x: Tensor, threshold: float) -> Tensor:
    return torch.empty_like(x)


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    return None


def _straight_through(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
    return g, None


def divided(x: Tensor, scale: Tensor) -> Tensor:
    """Rows (..., i) over the scale (i,) of a weight's inputs, rounded to the dtype of x once."""
    return (x / scale).to(x.dtype)


rounded_rows = define(
    "rounded_rows(Tensor x, float threshold) -> Tensor", _rounded_rows, _fake, (_save_nothing, _straight_through)
)


class WeightNames:
    """The weights of one run of a step by name. `name` is the key of `LinearCalls`: of those that are asked for."""

    def __init__(self, is_asked: Callable[[str], bool]) -> None:
        self.is_asked = is_asked
        self.names: dict[int, tuple[Tensor, str]] = {}  # id of a weight -> itself, its name

    def note(self, name: str, leaf: Tensor) -> None:
        self.names[id(leaf)] = leaf, name

    def frozen(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Notes those that a model captures, for `reading`."""
        for name, weight in weights.items():
            self.note(name, weight)
        return weights

    def name(self, weight: Tensor) -> str | None:
        known = self.names.get(id(compat.unwrap_functorch(weight)))  # inside torch.func.grad weights are wrapped
        return known[1] if known is not None and self.is_asked(known[1]) else None


class LinearCalls(TorchFunctionMode):
    """Inside, linear layers of some weights are `instead(input, weight, bias, key)`.

    `key(weight)`: what is known of a weight, asked of tensors as the step's code has them; None where its layers stay
    as they are. What such a tensor is cast to counts as the tensor. `lookup(ids, rows, key)`: what is taken for the
    rows that are found in a table; None: the rows.
    """

    def __init__(
        self,
        key: Callable[[Tensor], Any],
        instead: Callable[[Tensor, Tensor, Tensor | None, Any], Tensor],
        lookup: Callable[[Tensor, Tensor, Any], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.key, self.instead, self.lookup = key, instead, lookup
        self.casts: dict[int, tuple[Tensor, Any]] = {}  # id -> what a weight was cast to, and its key

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.embedding and self.lookup is not None:
            return self._lookup(self.lookup, *args, **kwargs)
        body = opened(func)
        # of a function that calls linear layers in its own body, such as attention with projections
        if body is not None:
            with self:
                return body(*args, **kwargs)
        result = self._linear(*args, **kwargs) if func is F.linear else func(*args, **kwargs)
        if getattr(func, "__name__", "") in _CASTS and isinstance(result, Tensor):
            known = self.known(args[0])
            if known is not None:
                self.casts[id(result)] = result, known
        return result

    def known(self, weight: Any) -> Any:
        """The key of a weight, or of what a weight was cast to; None where it has none."""
        cast = self.casts.get(id(weight))
        return self.key(weight) if cast is None else cast[1]

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        known = self.known(weight)
        return F.linear(input, weight, bias) if known is None else self.instead(input, weight, bias, known)

    def _lookup(
        self, lookup: Callable[[Tensor, Tensor, Any], Tensor], input: Tensor, weight: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        known = self.known(weight)
        rows = F.embedding(input, weight, *args, **kwargs)
        return rows if known is None else lookup(input, rows, known)


def linear_inputs(
    key: Callable[[Tensor], Any],
    changed: Callable[[Tensor, Tensor, Any], tuple[Tensor, Tensor]],
    result: Callable[[Tensor, Any], Tensor] | None = None,
    lookup: Callable[[Tensor, Tensor, Any], Tensor] | None = None,
) -> LinearCalls:
    """Inside, linear layers of some weights read `changed(input, weight, key)`, which gives an input and a weight.

    `result(output, key)`: what is taken for the layer's output; None: the output. `lookup`: see `LinearCalls`.
    """

    def instead(input: Tensor, weight: Tensor, bias: Tensor | None, known: Any) -> Tensor:
        output = F.linear(*changed(input, weight, known), bias)
        return output if result is None else result(output, known)

    return LinearCalls(key, instead, lookup)
