"""Random numbers in any layout: an element's number depends on its global index, so every part can be made alone.

    random_uniform       -> d0 d1            any factor, striped and composite too
    dropout              d0 d1, seed -> d0 d1        linear in x: the mask does not depend on it

The local code gives the operator the sizes and global strides of the local atoms and, from the rank's coordinates, the
offset of its first element. See `colofunc.ops.random`.
"""

from __future__ import annotations

from typing import Any

import torch

from colofunc.mesh import Mesh
from colofunc.spec.layout import Layout
from colofunc.spec.rule import Call, Rule
from colofunc.spec.rules.build import LocalCode, LocalFn, at, bind, names
from colofunc.spec.rules.local import place_of, rerun
from colofunc.spec.rules.pattern import RuleFn


def knowing_its_place(first: int, shape_at: int | None = None) -> LocalCode:
    """Local code of an operator with `sizes, strides, offset` from `first` on, which lie as its first result does."""

    def code(call: Call, ins: tuple[Layout, ...], outs: tuple[Layout | None, ...]) -> LocalFn | None:
        out = outs[0]
        if out is None or not out.axes:
            return None

        def local(*shards: torch.Tensor, mesh: Mesh) -> Any:
            sizes, strides, offset = place_of(out.dims, out.shape, mesh)
            changes = {(first, "sizes"): sizes, (first + 1, "strides"): strides, (first + 2, "offset"): offset}
            if shape_at is not None:
                changes[shape_at, "shape"] = list(out.local_shape)
            return rerun(call, shards, changes)

        return local

    return code


def is_placed(call: Call, first: int) -> bool:
    """Whether a call says already which part of a global tensor it is about."""
    return bool(call.arg(first, "sizes", ())) or at(call, first + 2, "offset") is not None


def placed(first: int, shape_at: int | None) -> RuleFn:
    """The rule of an operator with `sizes, strides, offset` from `first` on; `shape_at`: its shape argument, if any."""
    code = knowing_its_place(first, shape_at)

    def rule(call: Call) -> Rule | None:
        if call.outs[0] is None or is_placed(call, first):
            return None
        dims = " ".join(names("d", len(call.outs[0].shape)))
        if shape_at is not None:
            return bind(call, {0: ""}, [dims], local=code)
        return bind(call, {0: dims, 1: ""}, [dims], linear=[{0}], local=code)

    return rule


RULES: dict[str, RuleFn] = {
    "colofunc.random_bits": placed(3, shape_at=2),
    "colofunc.random_uniform": placed(4, shape_at=2),
    "colofunc.random_normal": placed(4, shape_at=2),
    "colofunc.random_bernoulli": placed(5, shape_at=2),
    "colofunc.dropout": placed(4, shape_at=None),
}
