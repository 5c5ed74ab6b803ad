"""Softmax and its logarithm: the dim is whole in the rule, and opened by local code.

    b [s] -> b [s]          split s:  m = max over axes;  e = exp(x - m);  e / sum over axes
    backward                split s:  out * (g - sum over axes of g * out)

With the class dim split this is the first half of vocabulary-parallel cross entropy; `losses` has the other.
Source: Megatron-LM (1909.08053), section 3; the online normaliser is not needed as the maximum is all-reduced first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from colofunc.mesh import Mesh
from colofunc.ops.collectives import all_reduce
from colofunc.ops.kernels import wide
from colofunc.spec.rule import Call, Operand, Rule, Strategy
from colofunc.spec.rules.build import LocalFn
from colofunc.spec.rules.opened import Split, nbytes_without, opened
from colofunc.spec.rules.pattern import RuleFn, dims_of, wrap


def _dim(call: Call) -> int | None:
    """The normalised dim; None for a 0-dim tensor."""
    shape = call.ins[0].shape
    return wrap(call.arg(1 if _is_forward(call) else 2, "dim"), len(shape)) if shape else None


def _is_forward(call: Call) -> bool:
    return "backward" not in call.target


def _rule(call: Call) -> Rule | None:
    """Every operand has the same dims, of which one is whole; the backward is linear in the gradient."""
    dim = _dim(call)
    if dim is None or any(t.shape != call.ins[0].shape for t in call.ins):
        return None
    dims, sizes = dims_of(call.ins[0].shape)
    linear = () if _is_forward(call) else (frozenset({0}),)
    return Rule((dims,) * len(call.ins), (dims,), sizes, whole=frozenset(dims[dim]), linear=linear)


def _softmax(call: Call, split: Split) -> LocalFn:
    dim, axes, out = _dim(call), split.axes, call.outs[0]
    safe = "_safe" in call.target
    assert out is not None and dim is not None

    def local(x: torch.Tensor, *, mesh: Mesh) -> torch.Tensor:
        x = x.to(wide(out.dtype))
        top = all_reduce(x.amax(dim, keepdim=True), axes, mesh, "max")
        e = torch.exp(x - top)
        result = e / all_reduce(e.sum(dim, keepdim=True), axes, mesh)
        if safe:
            result = torch.where(top == float("-inf"), 0.0, result)
        return result.to(out.dtype)

    return local


def _log_softmax(call: Call, split: Split) -> LocalFn:
    dim, axes, out = _dim(call), split.axes, call.outs[0]
    assert out is not None and dim is not None

    def local(x: torch.Tensor, *, mesh: Mesh) -> torch.Tensor:
        x = x.to(wide(out.dtype))
        x = x - all_reduce(x.amax(dim, keepdim=True), axes, mesh, "max")
        total = all_reduce(torch.exp(x).sum(dim, keepdim=True), axes, mesh)
        return (x - torch.log(total)).to(out.dtype)

    return local


def _backward(call: Call, split: Split) -> LocalFn:
    dim, axes, out = _dim(call), split.axes, call.outs[0]
    is_log = "log" in call.target
    assert out is not None and dim is not None

    def local(grad: torch.Tensor, y: torch.Tensor, *, mesh: Mesh) -> torch.Tensor:
        g, y = grad.to(wide(grad.dtype)), y.to(wide(y.dtype))
        if is_log:
            result = g - torch.exp(y) * all_reduce(g.sum(dim, keepdim=True), axes, mesh)
        else:
            result = y * (g - all_reduce((g * y).sum(dim, keepdim=True), axes, mesh))
        return result.to(out.dtype)

    return local


def _open(code: Callable[[Call, Split], LocalFn], calls: int, call: Call, mesh: Mesh) -> Iterator[Strategy]:
    rule, dim = _rule(call), _dim(call)
    if rule is None or dim is None:
        return iter(())

    def traffic(call: Call, split: Split) -> float:
        return calls * nbytes_without(split.ins[0], dim, call.ins[0].dtype)

    factors = rule.ins[0][dim]
    return opened(call, mesh, rule, factors, code, traffic, calls)


def glu(call: Call) -> Rule | None:
    """glu(x, dim): halves of one dim; `(two c)`, whole two."""
    shape = call.ins[0].shape
    out = call.outs[0]
    if out is None or not shape:
        return None
    dim = wrap(call.arg(1 if _is_forward(call) else 2, "dim", -1), len(shape))
    half: Operand
    half, sizes = dims_of(out.shape if _is_forward(call) else call.ins[0].shape)
    full = (*half[:dim], ("two", *half[dim]), *half[dim + 1 :])
    sizes["two"] = 2
    if _is_forward(call):
        return Rule((full,), (half,), sizes, whole=frozenset({"two"}))
    return Rule((half, full), (full,), sizes, whole=frozenset({"two"}), linear=(frozenset({0}),))


_FORWARD: dict[str, tuple[Any, int]] = {
    "aten._softmax": (_softmax, 2),
    "aten.softmax": (_softmax, 2),
    "aten._safe_softmax": (_softmax, 2),
    "aten._log_softmax": (_log_softmax, 2),
    "aten.log_softmax": (_log_softmax, 2),
    "aten._softmax_backward_data": (_backward, 1),
    "aten._log_softmax_backward_data": (_backward, 1),
}

RULES: dict[str, RuleFn] = {
    **dict.fromkeys(_FORWARD, _rule),
    "aten.glu": glu,
    "aten.glu_backward": glu,
}
STRATEGIES = {target: partial(_open, code, calls) for target, (code, calls) in _FORWARD.items()}
