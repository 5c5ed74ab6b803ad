"""Frozen weights as a step under `cf.quantize` reads them.

Problem: a model hands its frozen weights to a forward itself, so whoever quantizes them has to stand between. Idea: a
transform says, for the time of a step, what is read in place of some tensors; `Model.apply` asks.

    with reading(packed):                         # packed: name -> tensor, to name -> tensor or Quantized
        for name, weight in as_packed(frozen).items():
            opened_weight(weight)                        # the tensor that a forward is given
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from colofunc.ops.dtypes import DOUBLED
from colofunc.ops.quantized import Quantized

Weights = Mapping[str, Tensor | Quantized]
Packed = Callable[[Mapping[str, Tensor]], Weights]
Widened = Callable[[Tensor, Quantized], None]
_ACTIVE: ContextVar[tuple[Packed, Widened] | None] = ContextVar("colofunc_quantized_frozen", default=None)


@contextmanager
def reading(packed: Packed, widened: Widened) -> Iterator[None]:
    """Inside, `as_packed` is `packed`, and `widened` is told which tensor a forward is given for a quantized weight.

    Inside another such block `packed` is given the tensors that the outer one has not packed.
    """
    outer = _ACTIVE.get()
    token = _ACTIVE.set((packed, widened) if outer is None else _both(outer, (packed, widened)))
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def _both(first: tuple[Packed, Widened], second: tuple[Packed, Widened]) -> tuple[Packed, Widened]:
    def packed(frozen: Mapping[str, Tensor]) -> Weights:
        found = first[0](frozen)
        plain = {name: weight for name, weight in found.items() if isinstance(weight, Tensor)}
        return {**found, **second[0](plain)}

    def widened(wide: Tensor, weight: Quantized) -> None:
        first[1](wide, weight)
        second[1](wide, weight)

    return packed, widened


def as_packed(frozen: Mapping[str, Tensor]) -> Weights:
    """The weights, those that the running step quantizes in their place."""
    active = _ACTIVE.get()
    return frozen if active is None else active[0](frozen)


def sources(weights: Weights) -> dict[str, Tensor]:
    """The tensors that a program reads, by name: `data` of a quantized weight has the weight's own."""
    found: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if isinstance(weight, Quantized):
            found |= named_parts(name, weight)
        else:
            found[name] = weight
    return found


def named_parts(name: str, weight: Quantized) -> dict[str, Tensor]:
    """The tensors of a quantized weight by name: "w", "w.scale", ..."""
    _, *rest = weight.format.parts
    found = {name: weight.data}
    for part, tensor in zip(rest, weight.parts[1:], strict=True):
        found[f"{name}.{part}"] = tensor
    if weight.input_scale is not None:
        found[f"{name}.input_scale"] = weight.input_scale
    return found


def opened_weight(weight: Tensor | Quantized) -> Tensor:
    """What a forward is given.

    Inside `cf.testing.float64()` a quantized float32 weight is widened to float64, as others are cast.
    """
    if not isinstance(weight, Quantized):
        return weight
    wide = weight.dequantize(torch.float64 if DOUBLED.get() and weight.dtype is torch.float32 else None)
    active = _ACTIVE.get()
    if active is not None:
        active[1](wide, weight)
    return wide
