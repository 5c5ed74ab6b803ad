"""Whether a call is like the one before, so that the step prepared for that one can run at once.

Problem: to find the prepared step of a call, its arguments become a tree, a key and a hash, and the layouts of all leaves are
compared; for a small step that takes longer than the step. Idea: nearly every call is like the last one. A guard knows the
tree, what each leaf was and what lay around, and asks for each leaf one question: is its home the very object it was?

    guard = Guard.of(tree, leaves, homes, surroundings)     # behind a call that was looked up
    leaves = guard.leaves(args)                              # of a later call; None: it has to be looked up

A guard may say no where it could have said yes (the look-up decides then), never the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from colofunc.compiler.surroundings import Surroundings
from colofunc.dtensor.tensor import DTensor, Home
from colofunc.program.tracing.tree import Tree, flatten_like

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types of global values that a guard knows; lazy and other tensors are looked up."""


@attrs.frozen(eq=False)
class Guard:
    """What a call has to be like."""

    tree: Tree
    homes: tuple[Home, ...]  # per leaf: what a DTensor there has to be
    shapes: tuple[torch.Size, ...]  # and a plain tensor, beside its dtype
    surroundings: Surroundings

    @staticmethod
    def of(tree: Tree, leaves: Sequence[torch.Tensor], homes: Sequence[Home], surroundings: Surroundings) -> Guard | None:
        """Of a call that has run; None where leaves have gradients, which are part of the signature."""
        if any(leaf.requires_grad for leaf in leaves):
            return None
        return Guard(tree, tuple(homes), tuple(leaf.shape for leaf in leaves), surroundings)

    def leaves(self, args: tuple[Any, ...]) -> list[torch.Tensor] | None:
        """The leaves of the arguments, if this call is like that one for certain."""
        leaves = flatten_like(self.tree, args)
        if leaves is None:
            return None
        for place, (leaf, home) in enumerate(zip(leaves, self.homes, strict=True)):
            if type(leaf) is DTensor and leaf.home is home:
                continue
            if not self._fits(leaf, home, place):
                return None
        return leaves if self.surroundings.stands() else None

    def _fits(self, leaf: torch.Tensor, home: Home, place: int) -> bool:
        """The same question to a leaf that no step has placed."""
        if type(leaf) is DTensor:
            laid = leaf.sharding is home.layout or (leaf.movable and leaf.sharding.shape == self.shapes[place])
            there = laid and leaf.mesh == home.mesh and leaf._backend is home.backend
        else:
            there = type(leaf) in PLAIN and not leaf.is_meta and leaf.shape == self.shapes[place]
        return there and leaf.dtype is home.dtype and not leaf.requires_grad
