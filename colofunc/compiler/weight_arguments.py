"""Weights among the arguments of a step, wherever they stand.

    named_tensors((x, {"0.weight": w}))           # ("", x), ("0.weight", w)

Transforms that go by the names of weights ask here, so that no position of an argument decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from colofunc.dtensor.roles import role_of
from colofunc.program.tracing.tree import walk


def says_weight(leaf: Any) -> bool:
    """Whether a leaf says itself that it is a weight: by the role that it carries, or by its type."""
    return isinstance(leaf, nn.Parameter) or (isinstance(leaf, Tensor) and role_of(leaf) in ("param", "frozen"))


def named_tensors(arguments: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    """(name, leaf) of every tensor; the name is that in its argument, "" for an argument that is a tensor."""
    for argument in arguments:
        for name, leaf in walk(argument):
            if isinstance(leaf, Tensor):
                yield name, leaf
