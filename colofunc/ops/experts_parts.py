"""What experts are made of: their activations with gradients, and their weights.

    ExpertWeights(gate_up, down, None, None, "silu", gated=True, transposed=False).activated(h)        # (rows, 2f) -> (rows, f)
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
from torch import Tensor

from colofunc.errors import RuleError
from colofunc.ops.fp8 import product_of_rows

EXPERTS, EXPERTS_BACKWARD = "colofunc.experts", "colofunc.experts_backward"
"""Targets of the run of all experts on their tokens, and of its gradients."""
INPUT_GRADIENTS, WEIGHT_GRADIENTS = "colofunc.experts_input_gradients", "colofunc.experts_weight_gradients"
"""Of the same gradients in two calls, which there is no float8 of."""

aten = torch.ops.aten

Unary = Callable[[Tensor], Tensor]
UnaryGradient = Callable[[Tensor, Tensor], Tensor]  # (gradient of the result, input)

# Activation -> itself and its gradient.
ACTS: dict[str, tuple[Unary, UnaryGradient]] = {
    "silu": (aten.silu.default, aten.silu_backward.default),
    "gelu": (aten.gelu.default, aten.gelu_backward.default),
    "gelu_tanh": (
        lambda x: aten.gelu.default(x, approximate="tanh"),
        lambda g, x: aten.gelu_backward.default(g, x, approximate="tanh"),
    ),
    "relu": (torch.relu, lambda g, x: torch.where(x > 0, g, 0)),
    "relu2": (lambda x: torch.relu(x).square(), lambda g, x: 2 * g * torch.relu(x)),
    "sigmoid": (torch.sigmoid, lambda g, x: aten.sigmoid_backward.default(g, torch.sigmoid(x))),
    "tanh": (torch.tanh, lambda g, x: aten.tanh_backward.default(g, torch.tanh(x))),
    "identity": (lambda x: x, lambda g, x: g),
}


INTERLEAVED = "interleaved_swiglu"


@attrs.frozen
class Interleaved:
    """Rows of gate and up in turn, both clamped: (up + 1) * gate * sigmoid(alpha * gate), as the experts of gpt-oss
    have it.
    """

    alpha: float
    limit: float

    @classmethod
    def of(cls, act: str) -> Interleaved | None:
        """The one that an activation's name says; None: it says another."""
        name, *numbers = act.split(":")
        if name != INTERLEAVED:
            return None
        try:
            alpha, limit = map(float, numbers)
        except ValueError:
            raise RuleError(
                f"experts: {act!r} has no two numbers. Try: '{INTERLEAVED}:1.702:7.0', alpha and limit"
            ) from None
        return cls(alpha, limit)

    @property
    def name(self) -> str:
        return f"{INTERLEAVED}:{self.alpha!r}:{self.limit!r}"

    def parts(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of (rows, 2f): gate and up, clamped, and the sigmoid of the gate."""
        gate, up = h[..., ::2].clamp(max=self.limit), h[..., 1::2].clamp(-self.limit, self.limit)
        return gate, up, torch.sigmoid(gate * self.alpha)

    def forward(self, h: Tensor) -> Tensor:
        gate, up, slope = self.parts(h)
        return (up + 1) * (gate * slope)

    def backward(self, g: Tensor, h: Tensor) -> Tensor:
        gate, up, slope = self.parts(h)
        dgate = g * (up + 1) * slope * (1 + self.alpha * gate * (1 - slope))
        # What is clamped has no gradient; the limit itself has.
        dgate = torch.where(h[..., ::2] <= self.limit, dgate, 0)
        dup = torch.where(h[..., 1::2].abs() <= self.limit, g * gate * slope, 0)
        return torch.stack([dgate, dup], -1).flatten(-2)


@attrs.frozen
class ExpertWeights:
    """The experts' parameters and how they are used. Products of one expert take (rows, in) and give (rows, out).

    float8: products with weights are of numbers in float8, with a scale of each row of both; gradients of weights are
    not.
    """

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    act: str
    gated: bool
    transposed: bool
    float8: bool = False

    @property
    def width(self) -> int:
        """d."""
        return self.down.shape[2 if self.transposed else 1]

    @property
    def hidden_width(self) -> int:
        """2f or f: what goes into the activations."""
        return self.gate_up.shape[2 if self.transposed else 1]

    @property
    def units(self) -> int:
        """f: what comes out of the activations."""
        return self.down.shape[1 if self.transposed else 2]

    def up_of(self, i: int) -> Tensor:
        """(2f, d) or (f, d)."""
        return self.gate_up[i].t() if self.transposed else self.gate_up[i]

    def down_of(self, i: int) -> Tensor:
        """(d, f)."""
        return self.down[i].t() if self.transposed else self.down[i]

    def product(self, x: Tensor, matrix: Tensor) -> Tensor:
        """x (rows, in), matrix (out, in) -> (rows, out)."""
        return product_of_rows(x, matrix) if self.float8 else x @ matrix.t()

    def hidden(self, x: Tensor, i: int) -> Tensor:
        """What goes into the activation, (rows, 2f) or (rows, f)."""
        h = self.product(x, self.up_of(i))
        return h if self.gate_up_bias is None else h + self.gate_up_bias[i]

    def activated(self, h: Tensor) -> Tensor:
        """(rows, f)."""
        interleaved = Interleaved.of(self.act)
        if interleaved is not None:
            return interleaved.forward(h)
        act = ACTS[self.act][0]
        if not self.gated:
            return act(h)
        gate, up = h.chunk(2, -1)
        return act(gate) * up

    def activated_backward(self, g: Tensor, h: Tensor) -> Tensor:
        interleaved = Interleaved.of(self.act)
        if interleaved is not None:
            return interleaved.backward(g, h)
        act, back = ACTS[self.act]
        if not self.gated:
            return back(g, h)
        gate, up = h.chunk(2, -1)
        return torch.cat([back(g * up, gate), g * act(gate)], -1)
