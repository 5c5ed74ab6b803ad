"""Updates on padded shards: what the ranks do not divide is updated where it lies.

Problem: a parameter of (337, 13) on two ranks lies as `(dp a~) b`, 169 rows each, the last of them nobody's. Rules
split factors into equal parts only, so its update gathered parameter, gradient and moments. Idea: padding is zeros, and
the update of a zero by a zero gradient is zero; so is a product, a cast, and what padding adds to a sum. These
operators take padded shards as they are:

    adamw: (dp a~) b, (dp a~) b, ... -> (dp a~) b          mul, to_copy, neg: the same            sum: (dp a~) b -> +dp
    lamb_direction: (dp a~) b, ... -> (dp a~) b, _ +dp, ...          the sums of squares are of zeros, too

Adamax and Rprop keep numbers that are never zero (a largest gradient of at least eps, a least step), so they are no
such updates. Which shapes are padded is the plan's; this offers the strategies, and cost takes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import colofunc as cf

__all__ = ["TARGETS", "strategies"]

# where it stands: without it a zero over a zero would not be zero
_EPS = {"colofunc.adamw": 8, "colofunc.lamb_direction": 7}
_KIND, _OPTIONS = 0, 8  # positions in `update`
# Kinds of `update` that leave zeros zeros -> position of eps among their options, if they divide by a root.
_EPS_OF = {"Adadelta": 1, "Adagrad": 1, "ASGD": None, "NAdam": 2, "RAdam": 2, "RMSprop": 1}
_KEEP = ("aten.mul.Tensor", "aten.mul.Scalar", "aten.neg.default", "aten._to_copy.default")  # zero where an operand is
_NORMS = 1  # which result of lamb_direction the sums of squares are
TARGETS = (
    "colofunc.adamw",
    "colofunc.sgd",
    "colofunc.update",
    "colofunc.lion",
    "colofunc.lamb_direction",
    *_KEEP,
    "aten.sum.default",
)


def strategies(call: Any, mesh: cf.Mesh, spec: str, axes: tuple[str, ...]) -> Iterator[cf.Strategy]:
    """The strategy of `call` on shards of its first operand, which lies as `spec` says."""
    shape = call.ins[0].shape
    if not _stays_zero(call):
        return
    if any(t.shape not in ((), shape) for t in call.ins):
        return  # broadcast
    shards = cf.Spec(spec).bind(mesh, shape)
    pending = " ".join(f"+{axis}" for axis in axes)

    def layout(t: Any) -> cf.Layout:
        return shards if t.shape == shape else cf.Spec(_whole(len(t.shape))).bind(mesh, t.shape)

    ins = tuple(layout(t) for t in call.ins)
    outs: tuple[cf.Layout | None, ...]
    if call.target == "aten.sum.default":
        outs = (cf.Spec(pending).bind(mesh, ()),)
    elif call.target == "colofunc.lamb_direction":
        norms = cf.Spec(f"_ {pending}").bind(mesh, (2,))
        outs = tuple(norms if result == _NORMS else shards for result in range(len(call.outs)))
    else:
        outs = tuple(None if t is None else layout(t) for t in call.outs)

    nbytes = 0
    for placed, t in zip((*ins, *outs), (*call.ins, *call.outs), strict=True):
        if placed is not None:
            nbytes += placed.local_numel * t.dtype.itemsize
    words = tuple((axis, "padded") for axis in axes)
    name = "{" + ", ".join(f"{axis}: {word}" for axis, word in words) + "}"
    yield cf.Strategy(name, ins, outs, cf.Cost(float(shards.local_numel), float(nbytes)), axes=words)


def _stays_zero(call: Any) -> bool:
    """Whether zeros in all operands of the parameter's shape give zeros."""
    if call.target in _EPS:
        return bool(call.arg(_EPS[call.target], "eps"))
    if call.target != "colofunc.update":
        return True
    kind = call.arg(_KIND, "kind")
    if kind not in _EPS_OF:
        return False
    at = _EPS_OF[kind]
    return at is None or bool(call.arg(_OPTIONS, "options")[at])


def _whole(dims: int) -> str:
    return " ".join(["_"] * dims)
