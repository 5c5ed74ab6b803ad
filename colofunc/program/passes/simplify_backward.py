"""Backward of silu and mish as the one operator that it is.

Problem: on tensors without data torch takes the backward of some activations apart into six or ten elementwise operators,
each with a buffer of its own: in a UNet or a LLaMA they are the peak of a layer's backward. Idea: the product that ends such
a group is recognised by what made its operands, and becomes the operator again; what nobody else reads goes as dead code.

    s = sigmoid(x);  g * (s * (1 + x * (1 - s)))          ->          silu_backward(g, x)

Source: `math_silu_backward` and `math_mish_backward` of ATen (native/Activation.cpp). The kernels compute the same formula.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from colofunc.program.ir import Node, Ref, Value

Makers = Mapping[int, Node]


def whole_backward(node: Node, makers: Makers, values: Mapping[int, Value]) -> Node | None:
    """The activation's backward that a product `g * factor` is the end of, if it is one."""
    if node.phase != "backward" or len(node.args) != 2 or not all(isinstance(arg, Ref) for arg in node.args):
        return None
    grad, factor = node.args
    for name, argument in (("silu", _silu), ("mish", _mish)):
        x = argument(factor, makers)
        if x is not None and (values[x].shape, values[x].dtype) == (values[grad.id].shape, values[grad.id].dtype):
            return attrs.evolve(node, target=f"aten.{name}_backward.default", args=(grad, Ref(x)))
    return None


def _silu(factor: Ref, makers: Makers) -> int | None:
    """x of s * (1 + x * (1 - s)), s = sigmoid(x)."""
    s, more = _operands(factor, "aten.mul.Tensor", makers)
    x = _argument(s, "aten.sigmoid.default", makers)
    product, one = _operands(more, "aten.add.Scalar", makers)
    value, rest = _operands(product, "aten.mul.Tensor", makers)
    fits = x is not None and one == 1 and value == x and _one_minus(rest, makers) == s
    return x.id if x is not None and fits else None


def _mish(factor: Ref, makers: Makers) -> int | None:
    """x of t + x * sigmoid(x) * (1 - t * t), t = tanh(softplus(x))."""
    t, more = _operands(factor, "aten.add.Tensor", makers)
    x = _argument(_argument(t, "aten.tanh.default", makers), "aten.softplus.default", makers)
    product, rest = _operands(more, "aten.mul.Tensor", makers)
    value, sigmoid = _operands(product, "aten.mul.Tensor", makers)
    square = _operands(_one_minus(rest, makers), "aten.mul.Tensor", makers)
    fits = x is not None and value == x and _argument(sigmoid, "aten.sigmoid.default", makers) == x and square == (t, t)
    return x.id if x is not None and fits else None


def _operands(arg: Any, target: str, makers: Makers) -> tuple[Any, Any]:
    """The two arguments of the node that made a value, if it is `target` with no other arguments."""
    node = makers.get(arg.id) if isinstance(arg, Ref) else None
    fits = node is not None and node.target == target and len(node.args) == 2 and not node.kwargs
    return (node.args[0], node.args[1]) if node is not None and fits else (None, None)


def _argument(arg: Any, target: str, makers: Makers) -> Ref | None:
    """The only argument of the node that made a value, if it is `target` with none that differ from their defaults."""
    node = makers.get(arg.id) if isinstance(arg, Ref) else None
    return node.args[0] if node is not None and node.target == target and len(node.args) == 1 and not node.kwargs else None


def _one_minus(arg: Any, makers: Makers) -> Any:
    """y of 1 - y."""
    ones, y = _operands(arg, "aten.sub.Tensor", makers)
    node = makers.get(ones.id) if isinstance(ones, Ref) else None
    return y if node is not None and node.target == "aten.full.default" and node.args[1] == 1 else None
