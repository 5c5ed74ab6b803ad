"""Which modules, hooks and frozen weights a trace has used, whatever way the step came to them, and whether they are as
they were.

Problem: a step finds its model through a bound method, a partial, a list or a helper of another file, and whether that
model is in train or eval mode is part of the program. Idea: nobody searches for it. A module that is called while a
trace runs is noted, and so is a model with frozen weights; what was noted is compared at each later call.

    with noting(here):            # while the step is traced
        ...
    modules, models = noted(here)

Notes are weak: a module that the step makes for itself ends with the trace, and no later call can change it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Protocol
from weakref import ref

import attrs
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from colofunc import compat
from colofunc.program.tracing.meta import Whereabouts, active_stacks


class HasFrozen(Protocol):
    """A model of `cf.functional`."""

    @property
    def frozen(self) -> Mapping[str, torch.Tensor]: ...

    @property
    def module(self) -> torch.nn.Module: ...


@attrs.frozen(eq=False)
class ModuleMode:
    """One module as it was found."""

    module: torch.nn.Module
    training: bool
    children: tuple[torch.nn.Module | None, ...]

    @staticmethod
    def of(module: torch.nn.Module) -> ModuleMode:
        return ModuleMode(module, compat.is_training(module), compat.children(module))


@attrs.frozen(eq=False)
class Modes:
    """Many modules as they were found. They are asked together, which takes a fraction of the time."""

    modules: list[torch.nn.Module]
    training: list[bool]
    children: list[tuple[torch.nn.Module | None, ...]]

    @staticmethod
    def of(modes: Iterable[ModuleMode]) -> Modes:
        found = list(modes)
        return Modes(
            [mode.module for mode in found], [mode.training for mode in found], [mode.children for mode in found]
        )

    def stand(self) -> bool:
        return compat.all_training(self.modules) == self.training and compat.all_children(self.modules) == self.children


@attrs.frozen(eq=False)
class FrozenWeights:
    """Frozen weights as they were found; those of a trace are kept alive by it, so that their ids stay theirs."""

    held: Mapping[str, torch.Tensor]
    ids: list[int]

    @staticmethod
    def of(held: Mapping[str, torch.Tensor]) -> FrozenWeights:
        return FrozenWeights(held, list(map(id, held.values())))

    def stands(self) -> bool:
        return list(map(id, self.held.values())) == self.ids


@attrs.frozen(eq=False)
class Hooks:
    """What hangs on modules and on their parameters: it has run in the trace, or changes gradients there."""

    modules: Sequence[torch.nn.Module]
    parameters: Sequence[torch.Tensor]
    on_modules: Sequence[tuple[Any, ...]]
    on_parameters: Mapping[int, tuple[Any, ...]]

    @staticmethod
    def of(modules: Sequence[torch.nn.Module]) -> Hooks:
        parameters = [parameter for module in modules for parameter in module.parameters(recurse=False)]
        hung = list(map(compat.module_hooks, modules))
        return Hooks(modules, parameters, hung, compat.all_gradient_hooks(parameters))

    @cached_property
    def is_empty(self) -> bool:
        return not self.on_parameters and not any(self.on_modules)

    def stands(self) -> bool:
        if self.is_empty and compat.without_hooks(self.modules, self.parameters):
            return True
        same = compat.all_gradient_hooks(self.parameters) == self.on_parameters
        return same and list(map(compat.module_hooks, self.modules)) == self.on_modules


@attrs.frozen(eq=False)
class UsedModules:
    """What a trace has used, as it was then."""

    modes: tuple[ModuleMode, ...]
    frozen: tuple[FrozenWeights, ...]
    hooks: Hooks

    @staticmethod
    def of(modules: Iterable[torch.nn.Module], models: Iterable[HasFrozen]) -> UsedModules:
        """These as they are now, each module once."""
        parts: dict[int, torch.nn.Module] = {}
        for module in modules:
            parts.update({id(part): part for part in module.modules()})
        held = {id(model.frozen): model.frozen for model in models}
        return UsedModules(
            tuple(map(ModuleMode.of, parts.values())),
            tuple(map(FrozenWeights.of, held.values())),
            Hooks.of(list(parts.values())),
        )

    @cached_property
    def _asked(self) -> Modes:
        return Modes.of(self.modes)

    def stands(self) -> bool:
        """Whether all of it is as it was."""
        return self.hooks.stands() and self._asked.stand() and all(weights.stands() for weights in self.frozen)

    def without(self, modes: Iterable[ModuleMode], frozen: Iterable[FrozenWeights]) -> UsedModules:
        """What is left beside these, which somebody else looks at; hooks stay."""
        modules, held = {id(mode.module) for mode in modes}, {id(weights.held) for weights in frozen}
        rest = tuple(mode for mode in self.modes if id(mode.module) not in modules)
        return UsedModules(rest, tuple(weights for weights in self.frozen if id(weights.held) not in held), self.hooks)

    def earlier(self, before: UsedModules) -> UsedModules:
        """The same modules and weights, as they were `before` where that is known."""
        modes = {id(mode.module): mode for mode in before.modes}
        frozen = {id(weights.held): weights for weights in before.frozen}
        return UsedModules(
            tuple(modes.get(id(mode.module), mode) for mode in self.modes),
            tuple(frozen.get(id(weights.held), weights) for weights in self.frozen),
            self.hooks,
        )


@contextmanager
def noting(here: Whereabouts) -> Iterator[None]:
    """Inside, every module that is called is noted."""

    def note(module: torch.nn.Module, args: Any) -> None:
        if active_stacks() is here:
            here.modules[id(module)] = ref(module)

    handle = register_module_forward_pre_hook(note)
    try:
        yield
    finally:
        handle.remove()


def note_model(model: HasFrozen) -> None:
    """The step has called a model that brings frozen weights. Does nothing outside of a trace."""
    here = active_stacks()
    if here is not None:
        here.models[id(model)] = ref(model)


def other_names() -> dict[str, str]:
    """Of tied weights of all models that the step has called so far: a further name -> the first one, by which a step
    knows the weight.
    """
    here = active_stacks()
    models = () if here is None else noted(here)[1]
    found: dict[str, str] = {}
    for model in models:
        first: dict[int, str] = {}
        for name, weight in model.module.named_parameters(remove_duplicate=False):
            canonical = first.setdefault(id(weight), name)
            if canonical != name:
                found[name] = canonical
    return found


def noted(here: Whereabouts) -> tuple[tuple[torch.nn.Module, ...], tuple[HasFrozen, ...]]:
    """(modules, models) that were noted and are still there."""
    modules = (found() for found in here.modules.values())
    models = (found() for found in here.models.values())
    return tuple(x for x in modules if x is not None), tuple(x for x in models if x is not None)
