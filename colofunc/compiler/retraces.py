"""Why a step is traced again: one line per reason, from one rank, in the names that the plan has for its leaves.

    colofunc: train_step is traced again for batch.input_ids: (8, 96) -> (8, 112). Every new shape is: pad to a
    multiple, ...

A loop over batches of all lengths would say it at every step; a reason that was said is not said again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import attrs
import torch

from colofunc.compiler.staged import Staged
from colofunc.compiler.surroundings import Surroundings
from colofunc.env import say
from colofunc.program.tracing.trace import argument_names
from colofunc.program.tracing.tree import Tree

REMEDY = "Every new shape is traced, which is said once: pad to a multiple, cf.batches(..., multiple=64) or cf.pad(batch, multiple=64)"
MODES = "the train or eval mode, the hooks or the frozen weights of a module"
STATIC = 3  # so many traces because of values that are part of the program are a warning


@attrs.frozen(eq=False)
class Signature:
    """What decides whether a trace can be used again."""

    leaves: Sequence[torch.Tensor]
    tree: Tree
    around: Surroundings


class Retraces:
    """What one staged step has said about its traces."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._static = 0

    def stale(self, staged: Staged, why: str) -> None:
        """Something from outside that a trace has read is another now."""
        self._say(staged, f": {why}", why)
        self._count(staged, why)

    def modes(self, staged: Staged) -> None:
        """A module that a trace has called is in another mode now, or has other hooks."""
        self._say(staged, f" for {MODES}", MODES)

    def tell(self, staged: Staged, new: Signature, old: Signature) -> None:
        """Arguments of a signature that has not been there."""
        # it may have fewer arguments now
        called = _called(staged, max(new.tree, old.tree, key=lambda tree: len(tree.children)))
        pairs = zip(new.tree.statics(), old.tree.statics(), strict=False)
        changed = [(now, before) for now, before in pairs if now.key() != before.key()]
        if changed:
            now, before = changed[0]
            what = "holds other values" if now.value is before.value else f"{before.value!r} -> {now.value!r}"
            static = f"{called(now.name)}: {what}"
            self._say(staged, f", a static value changed: {static}", static)
            self._count(staged, static)
            return
        shape = _first_difference(new, old, called, _shape)
        if shape is not None:
            self._say(staged, f" for {shape}. {REMEDY}", "a shape")
            return
        why = _difference(new, old, called)
        self._say(staged, f" for {why}", why)

    def _say(self, staged: Staged, text: str, reason: str) -> None:
        if reason not in self._said and staged.mesh.is_main:
            say(f"{getattr(staged.fn, '__name__', 'step')} is traced again{text}")
        self._said.add(reason)

    def _count(self, staged: Staged, why: str) -> None:
        self._static += 1
        if self._static == STATIC and staged.mesh.is_main:
            warnings.warn(
                f"{getattr(staged.fn, '__name__', 'step')} has been traced {STATIC + 1} times because static values "
                f"change ({why}); pass numbers that vary as arguments: tensors or floats",
                stacklevel=6,
            )


def _called(staged: Staged, tree: Tree) -> Callable[[str], str]:
    """The name of a leaf by position, `1.input_ids`, as the plan has it: `batch.input_ids`."""
    names = argument_names(staged.reference, len(tree.children))

    def called(leaf: str) -> str:
        position, dot, rest = leaf.partition(".")
        return f"{names[int(position)]}{dot}{rest}"

    return called


def _shape(x: torch.Tensor) -> str:
    return str(tuple(x.shape))


def _dtype(x: torch.Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _differentiated(x: torch.Tensor) -> str:
    return f"requires_grad={x.requires_grad}"


def _first_difference(
    new: Signature, old: Signature, called: Callable[[str], str], shown: Callable[[torch.Tensor], str]
) -> str | None:
    """The first leaf of two equal trees that looks different, and how many more do."""
    names = new.tree.names()
    if names != old.tree.names():
        return None
    other: list[str] = []
    for name, before, now in zip(names, old.leaves, new.leaves, strict=True):
        if shown(before) != shown(now):
            other.append(f"{called(name)}: {shown(before)} -> {shown(now)}")
    if not other:
        return None
    more = f" (and {len(other) - 1} more)" if len(other) > 1 else ""
    return other[0] + more


def _difference(new: Signature, old: Signature, called: Callable[[str], str]) -> str:
    """In words, what the arguments of this call have, but for shapes, that those of the last one had not."""
    names, old_names = new.tree.names(), old.tree.names()
    if names != old_names:
        came = [f"{called(name)!r} is new" for name in names if name not in set(old_names)]
        went = [f"{called(name)!r} is gone" for name in old_names if name not in set(names)]
        said = ", ".join([*came[:1], *went[:1]])
        return f"its arguments' structure{': ' if said else ''}{said}"
    for shown in (_dtype, _differentiated):
        found = _first_difference(new, old, called, shown)
        if found is not None:
            return found
    for what, now, then in zip(
        ("default dtype", "autocast of (cpu, cuda)"), new.around.ambient, old.around.ambient, strict=True
    ):
        if now != then:
            return f"the {what}: {then} -> {now}".replace("torch.", "")
    if new.around.flags != old.around.flags:
        return MODES
    return "its arguments' structure"
