"""Elementwise operators: one factor per dim of the result, operands aligned at the right.

    add (8, 4) + (4,)      d0 d1, d1 -> d0 d1      linear in {0, 1} jointly
    mul (8, 4) * (8, 1)    d0 d1, d0 1 -> d0 d1    linear in {0} and in {1}

The tables say what pending reductions pass. `LINEAR`: groups of argument positions in which the operator is jointly
linear (a group counts only if all its members are tensors: x + 1 is not linear in x). `MONOTONE`: positions in which
the operator does not decrease, so that a pending maximum or minimum passes. Anything that torch itself tags as
pointwise and that is not listed shards the same way and passes nothing.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from colofunc.ops.updates import is_update, updates
from colofunc.spec.rule import Call, Factors, Operand, Ref, Rule
from colofunc.spec.rules.pattern import RuleFn, dims_of
from colofunc.spec.rules.updates import RULES as OF_BLOCKS

# operator -> groups of argument positions
LINEAR: dict[str, tuple[tuple[int, ...], ...]] = {
    "add": ((0, 1),),
    "sub": ((0, 1),),
    "subtract": ((0, 1),),
    "rsub": ((0, 1),),
    "mul": ((0,), (1,)),
    "multiply": ((0,), (1,)),
    "div": ((0,),),
    "divide": ((0,),),
    "true_divide": ((0,),),
    "neg": ((0,),),
    "negative": ((0,),),
    "positive": ((0,),),
    "deg2rad": ((0,),),
    "rad2deg": ((0,),),
    "conj": ((0,),),
    "_conj": ((0,),),
    "conj_physical": ((0,),),
    "_conj_physical": ((0,),),
    "resolve_conj": ((0,),),
    "resolve_neg": ((0,),),
    "_neg_view": ((0,),),
    "real": ((0,),),
    "imag": ((0,),),
    "lerp": ((0, 1),),
    "addcmul": ((0, 1), (0, 2)),
    "addcdiv": ((0, 1),),
    "where": ((1, 2),),
    "copy": ((1,),),
    "alias_copy": ((0,),),
    "detach_copy": ((0,),),
    "fill": ((1,),),
    "clone": ((0,),),
    "detach": ((0,),),
    "alias": ((0,),),
    "lift_fresh": ((0,),),
    "lift_fresh_copy": ((0,),),
    "contiguous": ((0,),),
    "to": ((0,),),
    "_to_copy": ((0,),),
    "convert_element_type": ((0,),),
    "native_dropout_backward": ((0,),),
    # backwards: linear in the gradient
    "gelu_backward": ((0,),),
    "tanh_backward": ((0,),),
    "sigmoid_backward": ((0,),),
    "silu_backward": ((0,),),
    "mish_backward": ((0,),),
    "threshold_backward": ((0,),),
    "hardswish_backward": ((0,),),
    "hardsigmoid_backward": ((0,),),
    "hardtanh_backward": ((0,),),
    "leaky_relu_backward": ((0,),),
    "elu_backward": ((0,),),
    "softplus_backward": ((0,),),
    "softshrink_backward": ((0,),),
    "hardshrink_backward": ((0,),),
    "log_sigmoid_backward": ((0,),),
    "logit_backward": ((0,),),
    "_prelu_kernel_backward": (),
    "rrelu_with_noise_backward": ((0,),),
}

_NONDECREASING = (
    "positive deg2rad rad2deg clone detach alias alias_copy detach_copy lift_fresh lift_fresh_copy contiguous to "
    "_to_copy convert_element_type relu relu6 exp expm1 exp2 tanh sigmoid erf atan floor ceil trunc sign asinh sinh "
    "clamp clamp_min clamp_max hardtanh"
)
# operator -> argument positions; logarithms and roots are left out, as their NaN below the domain would win
MONOTONE: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(_NONDECREASING.split(), (0,)),
    "add": (0, 1),
    "sub": (0,),
    "maximum": (0, 1),
    "minimum": (0, 1),
    "copy": (1,),
}

# Elementwise operators without torch's pointwise tag, or whose decompositions a trace may keep.
_UNTAGGED = (
    "to _to_copy detach alias lift_fresh lift_fresh_copy contiguous copy fill zero real imag conj _conj "
    "_conj_physical _neg_view "
    "resolve_conj resolve_neg isclose isreal float_power floor_divide special_xlog1py hardswish hardswish_backward "
    "hardsigmoid_backward hardtanh_backward leaky_relu_backward elu_backward softplus_backward softshrink_backward "
    "hardshrink_backward log_sigmoid_forward log_sigmoid_backward logit mish_backward _prelu_kernel "
    "_prelu_kernel_backward rrelu_with_noise_backward angle polar complex convert_element_type xlogy __and__ __or__ "
    "__xor__ __lshift__ __rshift__ nan_to_num special_expit absolute log_sigmoid fake_quantize_per_tensor_affine "
    "special_entr special_gammaln"
)
UNTAGGED = frozenset(_UNTAGGED.split())


def pointwise(call: Call) -> Rule | None:
    """`d0 d1, d1 -> d0 d1`: operands broadcast at the right; every result has the full shape, or is empty."""
    first = call.outs[0] if call.outs else None
    if first is None:
        return None
    full = first.shape
    out, sizes = dims_of(full)
    ins = [aligned(typ.shape, out, full) for typ in call.ins]
    outs: list[Operand | None] = []
    copied: set[tuple[int, str]] = set()
    for n, typ in enumerate(call.outs):
        if typ is None or typ.shape == full:
            outs.append(None if typ is None else out)
        elif typ.shape == (0,):  # a result that is not asked for (a maximum without amsgrad)
            copied |= {(n, f) for f in sizes}
            outs.append((("none",),))
        elif typ.shape == () and is_update(call.target):  # a number that an optimizer keeps beside its tensors
            copied |= {(n, f) for f in sizes}
            outs.append(())
        else:
            return None
    if (("none",),) in outs:
        sizes = sizes | {"none": 0}
    name = base(call.target)
    return (
        None
        if None in ins
        else Rule(
            tuple(op for op in ins if op is not None),
            tuple(outs),
            sizes,
            whole=frozenset({"none"} & set(sizes)),
            linear=linear_sets(call, name),
            monotone=monotone_sets(call, name),
            copied=frozenset(copied),
        )
    )


def aligned(shape: tuple[int, ...], out: Operand, full: tuple[int, ...]) -> Operand | None:
    """The dims of a broadcast operand; None where it does not broadcast to the result."""
    offset = len(full) - len(shape)
    if offset < 0:
        return None
    dims: list[Factors] = []
    for i, n in enumerate(shape):
        if n == full[offset + i]:
            dims.append(out[offset + i])
        elif n == 1:
            dims.append(())
        else:
            return None
    return tuple(dims)


def base(target: str) -> str:
    """`aten.add.Tensor` -> `add`."""
    return target.split(".")[1]


def linear_sets(call: Call, name: str) -> tuple[frozenset[int], ...]:
    """Operand positions through which pending sums pass: the table's groups, less what this call's arguments forbid."""
    if name in ("div", "divide") and call.arg(2, "rounding_mode") is not None:
        return ()
    if name == "rsub" and call.target.endswith("Scalar"):
        return ()
    groups: list[tuple[int, ...]] = list(LINEAR.get(name, ()))
    if name == "where":
        groups = _where(call)
    elif name == "masked_fill" and _is_zero(call.arg(2, "value")):
        groups = [(0,)]
    found: list[frozenset[int]] = []
    for group in groups:
        values = [_argument(call, i) for i in group]
        operands = frozenset(v.id for v in values if type(v) is Ref)
        if len(operands) == len(group) and keeps_sums(call, operands):
            found.append(operands)
    return tuple(found)


def _where(call: Call) -> list[tuple[int, ...]]:
    """Both branches jointly; one alone if the other is a literal zero."""
    if len(call.args) < 3:
        return []
    if _is_zero(call.args[1]):
        return [(2,)]
    return [(1,)] if _is_zero(call.args[2]) else [(1, 2)]


def _is_zero(value: Any) -> bool:
    return isinstance(value, (int, float)) and value == 0


def _argument(call: Call, index: int) -> Any:
    return call.args[index] if index < len(call.args) else None


def keeps_sums(call: Call, operands: frozenset[int]) -> bool:
    """Whether the results hold sums of these operands: no narrowing dtype, no truth values."""
    return all(_widens(call.ins[k].dtype, out.dtype) for k in operands for out in call.outs if out is not None)


@cache
def _widens(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether a value of `source` is kept as it is by `target`, apart from an imaginary part that is dropped."""
    if torch.bool in (source, target):
        return False
    if source == target:
        return True
    if source.is_complex:
        return (
            target.itemsize * 2 >= source.itemsize
            if target.is_floating_point
            else torch.promote_types(source, target) == target
        )
    if not source.is_floating_point and (target.is_floating_point or target.is_complex):
        return target.itemsize >= 4  # sums of integers are as exact there as the operator itself is
    return torch.promote_types(source, target) == target


def monotone_sets(call: Call, name: str) -> tuple[frozenset[int], ...]:
    """Single operands through which a pending maximum or minimum passes (the others are then equal on all ranks)."""
    found = []
    for index in MONOTONE.get(name, ()):
        value = _argument(call, index)
        if type(value) is not Ref or call.ins[value.id].dtype in _UNORDERED or len(call.outs) != 1:
            continue
        if name in ("add", "sub") and _negative_alpha(call, index):
            continue
        if name in ("hardtanh", "clamp", "relu6") and len(call.ins) > 1:
            continue
        found.append(frozenset((value.id,)))
    return tuple(found)


_UNORDERED = (torch.bool, torch.complex32, torch.complex64, torch.complex128)


def _negative_alpha(call: Call, index: int) -> bool:
    alpha = call.arg(2, "alpha", 1)
    return index == 1 and not (isinstance(alpha, (int, float)) and alpha >= 0)


def is_pointwise(call: Call) -> bool:
    """Tagged so by torch, or listed above."""
    space, _, rest = call.target.partition(".")
    name, _, overload = rest.partition(".")
    if space not in ("aten", "prims"):
        return False
    if name in UNTAGGED:
        return True
    packet = getattr(getattr(torch.ops, space), name, None)
    op = getattr(packet, overload or "default", None) if packet is not None else None
    return op is not None and torch.Tag.pointwise in op.tags and torch.Tag.nondeterministic_seeded not in op.tags


RULES: dict[str, RuleFn] = {
    **{
        f"aten.{name}": pointwise
        for name in sorted({*LINEAR, *MONOTONE, *UNTAGGED, "masked_fill", "clamp", "native_dropout_backward"})
    },
    "prims.convert_element_type": pointwise,
    # Every state tensor has the parameter's factors.
    **{name: pointwise for name in updates() if name not in OF_BLOCKS},
}
