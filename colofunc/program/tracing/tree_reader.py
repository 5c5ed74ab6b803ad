"""A tree as a function that takes the leaves out of every object that is like it.

Problem: a step is called with the same tree again and again, and to take it apart by recursion, asking every container what it
is, takes longer than to look at its tensors. Idea: the tree is known, so what there is to ask is written down once as Python. For
the tree of `({"a": x, "b": 1}, y)`:

    def leaves(x0):
        if type(x0) is not tuple or len(x0) != 2: return None
        x1, x2 = x0
        if type(x1) is not dict or tuple(x1) != keys1: return None
        x3, x4 = x1.values()
        if x4 is not value4 and not same(x4, value4, held4): return None
        return tensors([x3, x2])

It may say None where `flatten` finds an equal tree (the static leaf is another object), never the other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import count
from types import CodeType
from typing import Any

import torch

from colofunc.program.tracing.tree import Tree, container, flatten, held_by

Leaves = list[torch.Tensor]
Reader = Callable[[Any], Leaves | None]

_COMPARED = (bool, int, str)
"""Static leaves of these types are the same where they are equal; others, where they are the same object."""


def reader(tree: Tree) -> Reader:
    """A function that gives the leaves of an object that certainly has this tree, and None for all others."""
    writer = _Writer()
    leaves = writer.read(tree, writer.variable())
    source = "\n    ".join(["def leaves(x0):", *writer.lines, f"return tensors([{', '.join(leaves)}])\n"])
    namespace = dict(writer.names)
    exec(_compiled(source), namespace)
    read: Reader = namespace["leaves"]
    return read


@lru_cache(maxsize=256)
def _compiled(source: str) -> CodeType:
    return compile(source, "<colofunc tree>", "exec")


class _Writer:
    """Collects the lines of one reader."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: dict[str, Any] = {"tensors": _tensors, "tensor": _tensor, "same": _same, "items": _items}
        self._count = count()

    def variable(self) -> str:
        return f"x{next(self._count)}"

    def read(self, tree: Tree, x: str) -> list[str]:
        """Write the questions about the object in variable `x`; what its leaves are in the source, in order."""
        if tree.kind == "tensor":
            return [x] if tree.type is None else [f"tensor({x}, {self._bind('type', x, tree.type)})"]
        if tree.kind == "static":
            value, held = self._bind("value", x, tree.value), self._bind("held", x, tree.content)
            other = f"{x} is not {value} and " if tree.content is None else ""  # the same object may hold something else
            self._refuse(f"{other}not same({x}, {value}, {held})")
            return []
        return self._container(tree, x)

    def _container(self, tree: Tree, x: str) -> list[str]:
        items = x
        if tree.kind == "sequence":
            self._refuse(f"type({x}) is not {self._bind('type', x, tree.type)} or len({x}) != {len(tree.children)}")
        elif tree.kind == "dict":
            self._refuse(f"type({x}) is not dict or tuple({x}) != {self._bind('keys', x, tree.keys)}")
            items = f"{x}.values()"
        else:
            items = self.variable()
            self.lines.append(f"{items} = items({x}, {self._bind('tree', x, tree)})")
            self._refuse(f"{items} is None")
        if not tree.children:
            return []
        if tree.holds_tensors:
            return [f"*{items}"]
        variables = [self.variable() for _ in tree.children]
        self.lines.append(f"{', '.join(variables)}, = {items}")
        return [leaf for child, variable in zip(tree.children, variables, strict=True) for leaf in self.read(child, variable)]

    def _refuse(self, condition: str) -> None:
        self.lines.append(f"if {condition}: return None")

    def _bind(self, kind: str, x: str, thing: Any) -> str:
        """A name in the source for an object that belongs to variable `x`."""
        name = f"{kind}{x[1:]}"
        self.names[name] = thing
        return name


def _tensors(leaves: list[Any]) -> Leaves | None:
    """The leaves, where all of them are tensors."""
    return leaves if all(issubclass(kind, torch.Tensor) for kind in set(map(type, leaves))) else None


def _tensor(x: Any, kind: type) -> torch.Tensor | None:
    """A float or an array as the tensor that `flatten` makes of it; None where it makes none."""
    if type(x) is not kind:
        return None
    leaves, tree = flatten(x)
    return leaves[0] if tree.type is kind else None


def _same(x: Any, value: Any, held: Any) -> bool:
    """Whether a static leaf is what it was, and holds what it held."""
    if held is not None:
        return x is value and held_by(x) == held
    return x is value or (type(x) is type(value) and type(x) in _COMPARED and bool(x == value))


def _items(x: Any, tree: Tree) -> Sequence[Any] | None:
    """What is in a container of a kind that says itself what is in it, if it has the type and the keys of `tree`."""
    parts = container(x) if type(x) is tree.type else None
    return parts[2] if parts is not None and tuple(parts[1]) == tree.keys else None
