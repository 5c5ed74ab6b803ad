"""Whether a call is like the one before, so that the step prepared for that one can run at once.

Problem: to find the prepared step of a call, its arguments become a tree, a key and a hash, and the layouts of all
leaves are compared; for a small step that takes longer than the step. Idea: nearly every call is like the last one. A
guard knows the tree, what each leaf was and what lay around. The tree is asked by a function that is written for it
(`reader`), and each leaf one question: is its home the very object it was? Only leaves of which that is not so (the
batch) are asked more.

    guard = Guard.of(tree, leaves, homes, surroundings)     # behind a call that was looked up
    given = guard.given(args)                                # of a later call; None: it has to be looked up

A guard may say no where it could have said yes (the look-up decides then), never the other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import count
from types import CodeType
from typing import Any

import attrs
import torch

from colofunc.compiler.surroundings import Surroundings
from colofunc.dtensor.tensor import DTensor, Home
from colofunc.program.tracing.tree import Tree, container, flatten, held_by

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types of global values that a guard knows; lazy and other tensors are looked up."""


@attrs.frozen(eq=False)
class CallLeaves:
    """The leaves of a call, and the positions of those that are not at home.

    Whatever these are, they have to be placed.
    """

    leaves: Sequence[torch.Tensor]
    away: list[int]

    @staticmethod
    def of(leaves: Sequence[torch.Tensor], homes: Sequence[Home]) -> CallLeaves:
        """homes: per leaf, what a DTensor that lies as planned has."""
        pairs = zip(leaves, homes, strict=True)
        return CallLeaves(
            leaves, [k for k, (x, home) in enumerate(pairs) if type(x) is not DTensor or x.home is not home]
        )


@attrs.frozen(eq=False)
class Guard:
    """What a call has to be like."""

    tree: Tree
    surroundings: Surroundings
    _read: LeafReader
    _homes: tuple[Home, ...]  # per leaf: what a DTensor there has to be
    _shapes: tuple[torch.Size, ...]  # and a plain tensor, beside its dtype

    @staticmethod
    def of(
        tree: Tree, leaves: Sequence[torch.Tensor], homes: Sequence[Home], surroundings: Surroundings
    ) -> Guard | None:
        """Of a call that has run; None where leaves have gradients, which are part of the signature."""
        if any(leaf.requires_grad for leaf in leaves):
            return None
        return Guard(tree, surroundings, reader(tree), tuple(homes), tuple(leaf.shape for leaf in leaves))

    def given(self, args: tuple[Any, ...]) -> CallLeaves | None:
        """What this call is given, if it is like that one for certain."""
        leaves = self._read(args)
        if leaves is None:
            return None
        given = CallLeaves.of(leaves, self._homes)
        alike = all(self._fits(leaves[k], k) for k in given.away)
        return given if alike and self.surroundings.stands() else None

    def _fits(self, leaf: torch.Tensor, place: int) -> bool:
        """Whether a leaf that is not at home can be placed there without a look-up."""
        home, shape = self._homes[place], self._shapes[place]
        if type(leaf) is DTensor:
            laid = leaf.sharding is home.layout or (leaf.movable and leaf.sharding.shape == shape)
            there = laid and leaf.mesh == home.mesh and leaf._backend is home.backend
        else:
            there = type(leaf) in PLAIN and not leaf.is_meta and leaf.shape == shape
        return there and leaf.dtype is home.dtype and not leaf.requires_grad


# ---- reading a tree ----
#
# Problem: a step is called with the same tree again and again, and to take it apart by recursion, asking every
# container what it is, takes longer than to look at its tensors. Idea: the tree is known, so what there is to ask is
# written down once as Python. For the tree of `({"a": x, "b": 1}, y)`:
#
#     def leaves(x0):
#         if type(x0) is not tuple or len(x0) != 2: return None
#         x1, x2 = x0
#         if type(x1) is not dict or tuple(x1) != keys1: return None
#         x3, x4 = x1.values()
#         if x4 is not value4 and not same(x4, value4, held4): return None
#         return tensors([x3, x2])
#
# It may say None where `flatten` finds an equal tree (the static leaf is another object), never the other way round.


Leaves = list[torch.Tensor]
LeafReader = Callable[[Any], Leaves | None]

_COMPARED = (bool, int, str)
"""Static leaves of these types are the same where they are equal; others, where they are the same object."""


def reader(tree: Tree) -> LeafReader:
    """A function that gives the leaves of an object that certainly has this tree, and None for all others."""
    writer = _Writer()
    leaves = writer.read(tree, writer.variable())
    source = "\n    ".join(["def leaves(x0):", *writer.lines, f"return tensors([{', '.join(leaves)}])\n"])
    namespace = dict(writer.names)
    exec(_compiled(source), namespace)
    read: LeafReader = namespace["leaves"]
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
            # the same object may hold something else
            other = f"{x} is not {value} and " if tree.content is None else ""
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
        return [
            leaf
            for child, variable in zip(tree.children, variables, strict=True)
            for leaf in self.read(child, variable)
        ]

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
