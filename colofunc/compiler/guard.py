"""Whether a call is like the one before, so that the step prepared for that one can run at once.

Problem: to find the prepared step of a call, its arguments become a tree, a key and a hash, and the layouts of all leaves are
compared; for a small step that takes longer than the step. Idea: nearly every call is like the last one. A guard knows the
tree, what each leaf was and what lay around. The tree is asked by a function that is written for it (`tree_reader`), and each leaf one
question: is its home the very object it was? Only leaves of which that is not so (the batch) are asked more.

    guard = Guard.of(tree, leaves, homes, surroundings)     # behind a call that was looked up
    given = guard.given(args)                                # of a later call; None: it has to be looked up

A guard may say no where it could have said yes (the look-up decides then), never the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from colofunc.compiler.surroundings import Surroundings
from colofunc.dtensor.tensor import DTensor, Home
from colofunc.program.tracing.tree import Tree
from colofunc.program.tracing.tree_reader import Reader, reader

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types of global values that a guard knows; lazy and other tensors are looked up."""


@attrs.frozen(eq=False)
class Given:
    """The leaves of a call, and the positions of those that are not at home: whatever they are, they have to be placed."""

    leaves: Sequence[torch.Tensor]
    away: list[int]

    @staticmethod
    def of(leaves: Sequence[torch.Tensor], homes: Sequence[Home]) -> Given:
        """homes: per leaf, what a DTensor that lies as planned has."""
        pairs = zip(leaves, homes, strict=True)
        return Given(leaves, [k for k, (x, home) in enumerate(pairs) if type(x) is not DTensor or x.home is not home])


@attrs.frozen(eq=False)
class Guard:
    """What a call has to be like."""

    tree: Tree
    surroundings: Surroundings
    _read: Reader
    _homes: tuple[Home, ...]  # per leaf: what a DTensor there has to be
    _shapes: tuple[torch.Size, ...]  # and a plain tensor, beside its dtype

    @staticmethod
    def of(tree: Tree, leaves: Sequence[torch.Tensor], homes: Sequence[Home], surroundings: Surroundings) -> Guard | None:
        """Of a call that has run; None where leaves have gradients, which are part of the signature."""
        if any(leaf.requires_grad for leaf in leaves):
            return None
        return Guard(tree, surroundings, reader(tree), tuple(homes), tuple(leaf.shape for leaf in leaves))

    def given(self, args: tuple[Any, ...]) -> Given | None:
        """What this call is given, if it is like that one for certain."""
        leaves = self._read(args)
        if leaves is None:
            return None
        given = Given.of(leaves, self._homes)
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
