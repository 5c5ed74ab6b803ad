"""Tensors made from nothing: a constant can be made in any layout, from its local size.

    full (8, 4)     -> d0 d1      local size (4, 4) with dp on d0
    arange (8)      -> d0         a part starts at its own offset, or lists its positions; [d0] where numbers are rounded
    zeros_like x    d0 d1 -> d0 d1

`x_like` and `new_x` read only the shape of their operand, so its values do not matter and any sum passes.
"""

from __future__ import annotations

from math import prod
from typing import Any

import attrs
import torch

from colofunc.mesh import Mesh
from colofunc.spec.layout import Layout
from colofunc.spec.rule import Call, Operand, Rule
from colofunc.spec.rules.build import LocalFn
from colofunc.spec.rules.local import positions
from colofunc.spec.rules.pattern import Args, RuleFn, dims_of, with_arg


def _sized(index: int, name: str) -> RuleFn:
    """A constant fill with its size at argument `index`; a tensor operand (new_full) gives no dims."""

    def localize(call: Call, ins: tuple[Layout, ...], outs: tuple[Layout | None, ...]) -> Args:
        return (call.args, call.kwargs) if outs[0] is None else with_arg(call, index, name, outs[0].local_shape)

    def rule(call: Call) -> Rule | None:
        out = call.outs[0]
        if out is None:
            return None
        dims, sizes = dims_of(out.shape)
        ins: list[Operand] = []
        read: dict[str, int] = {}
        for k, typ in enumerate(call.ins):
            operand, own = dims_of(typ.shape, f"x{k}_")
            ins.append(operand)
            read |= own
        return Rule(tuple(ins), (dims,), sizes | read, whole=frozenset(read), localize=localize)

    return rule


def _strided(call: Call) -> Rule | None:
    """empty_strided, new_empty_strided: split as empty is, with contiguous local strides."""
    at = 0 if "new" not in call.target else 1
    found = _sized(at, "size")(call)
    if found is None:
        return None

    def localize(call: Call, ins: tuple[Layout, ...], outs: tuple[Layout | None, ...]) -> Args:
        assert outs[0] is not None
        shape = outs[0].local_shape
        stride, run = [], 1
        for n in reversed(shape):
            stride.append(run)
            run *= n
        args, kwargs = with_arg(call, at, "size", shape)
        return with_arg(Call(call.target, args, kwargs, call.ins, call.outs), at + 1, "stride", tuple(reversed(stride)))

    return Rule(found.ins, found.outs, found.sizes, whole=found.whole, localize=localize)


def like(call: Call) -> Rule | None:
    """zeros_like and its kin: the dims of the operand; whatever is pending there does not matter."""
    out = call.outs[0]
    if out is None or out.shape != call.ins[0].shape:
        return None
    dims, sizes = dims_of(out.shape)
    ins = (dims, *(() for _ in call.ins[1:]))
    return Rule(ins, (dims,), sizes)


def arange(call: Call) -> Rule | None:
    """Whole numbers from whole numbers: a part is made from its positions."""
    overload = call.target.rsplit(".", 1)[1]
    start, step = (
        (0 if overload == "default" else call.arg(0, "start")),
        (call.arg(2, "step", 1) if overload == "start_step" else 1),
    )
    out, rule = call.outs[0], whole(call)
    if (
        out is None
        or rule is None
        or call.ins
        or out.dtype != torch.int64
        or type(start) is not int
        or type(step) is not int
    ):
        return rule

    def code(call: Call, ins: tuple[Layout, ...], outs: tuple[Layout | None, ...]) -> LocalFn | None:
        atoms = outs[0].dims[0] if outs[0] is not None else ()
        if all(axis is None for _, axis in atoms):
            return None

        def local(mesh: Mesh) -> torch.Tensor:
            here = positions(atoms, mesh)
            count = prod(n for n, axis in atoms if axis is None)
            listed = here if isinstance(here, torch.Tensor) and here.dim() else torch.arange(count) + here
            return listed * step + start

        return local

    return attrs.evolve(rule, whole=frozenset(), local=code)


def whole(call: Call) -> Rule | None:
    """eye, linspace: elements depend on their position."""
    out = call.outs[0]
    if out is None:
        return None
    dims, sizes = dims_of(out.shape)
    return Rule(tuple(() for _ in call.ins), (dims,), sizes, whole=frozenset(sizes))


def _names(text: str, fn: RuleFn) -> dict[str, RuleFn]:
    return {f"aten.{name}": fn for name in text.split()}


RULES: dict[str, Any] = {
    **_names("full zeros ones empty", _sized(0, "size")),
    **_names("new_full new_zeros new_ones new_empty", _sized(1, "size")),
    **_names("empty_strided new_empty_strided", _strided),
    **_names("zeros_like ones_like full_like empty_like", like),
    **_names("arange", arange),
    **_names("eye linspace logspace scalar_tensor tril_indices triu_indices range", whole),
}
