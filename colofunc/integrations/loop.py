"""Somebody else's training loop on our step: what Lightning and the Hugging Face Trainer need alike.

Problem: such a loop calls forward, backward, clip, `optimizer.step()` and `zero_grad()` one by one on a module and a
torch optimizer that it owns; a staged step does all of them at once on a state that lies on a mesh. Idea: the module and
the torch optimizer become the place where values are read from and written back to, and the loop's one call per batch
runs one of

    training_step(state, batch, numbers) -> state, seen
    accumulate_gradients(state, batch, numbers) -> state, seen          # adds to state["grads"], nothing else

`numbers` are what changes per call: learning rates by group, the divisor of the loss, counters of the loop. The
optimizer's own `step()` then finds no gradients and does nothing.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from colofunc.compiler.rank_agreement import checksum
from colofunc.compiler.staged import Staged
from colofunc.config import Chain, configure
from colofunc.dtensor.tensor import DTensor
from colofunc.errors import InputError
from colofunc.executors.backend import backend_for
from colofunc.functional.gradients import clip_by_global_norm, value_and_grad
from colofunc.functional.modules import Model, functional
from colofunc.functional.optimizers import Optimizer, adapt
from colofunc.mesh import Mesh
from colofunc.program.tracing.tree import flatten, map_tensors
from colofunc.spec.layout import Layout
from colofunc.transforms.shard import shard

# How torch runs an update, and what schedulers leave in a group: nothing that an update computes.
NOT_OPTIONS = ("lr", "params", "foreach", "fused", "capturable", "differentiable")
# Optimizers of torch that keep no count of their updates.
WITHOUT_COUNT = (torch.optim.SGD, getattr(torch.optim, "Muon", torch.optim.SGD))
SAMPLE = 1 << 18  # elements of a batch's tensor that ranks compare
Run = Callable[[nn.Module, Any, Mapping[str, Any]], tuple[Tensor, Any]]


class _Call(nn.Module):
    """Gives `functional` any function of the module, instead of its forward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, run: Run, batch: Any, numbers: Mapping[str, Any]) -> Any:
        return run(self.module, batch, numbers)


@attrs.frozen
class Clip:
    """`how`: "norm", "value", or "none" (the norm is still reported)."""

    how: str = "none"
    most: float = 0.0

    def __call__(self, grads: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        clipped, norm = clip_by_global_norm(grads, self.most if self.how == "norm" else 1.0)
        if self.how == "norm":
            return clipped, norm
        return ({n: g.clamp(-self.most, self.most) for n, g in grads.items()} if self.how == "value" else grads), norm


def staging(
    mesh: Mesh | None, plans: Any, chain: Chain | Any | None, clip: Clip, whose: str
) -> tuple[Mesh, Callable[[Callable[..., Any]], Staged], Clip]:
    """(mesh, what stages a step, clipping) from either a mesh with plans or a chain (or what `cf.configure` takes)."""
    if chain is None:
        if not isinstance(mesh, Mesh):
            raise InputError(f"{whose} wants mesh=cf.Mesh(...) or chain=cf.configure(...), not {mesh!r}")
        return mesh, partial(_sharded, mesh=mesh, plans=plans if isinstance(plans, list | tuple) else (plans,)), clip
    if mesh is not None or plans:
        raise InputError(f"{whose}: the chain says mesh and plans; drop mesh= and plans=, or the chain")
    chain = chain if isinstance(chain, Chain) else configure(chain)
    if chain.clip is not None and clip.how != "none":
        raise InputError(f"{whose}: the chain clips to {chain.clip}, the trainer's own options to {clip.most}; drop one of them")
    return chain.mesh, partial(chain.apply, clips=True), Clip("norm", chain.clip) if chain.clip is not None else clip


def _sharded(step_fn: Callable[..., Any], mesh: Mesh, plans: Any) -> Staged:
    staged: Staged = shard(step_fn, mesh, *plans)
    return staged


def plain(tree: Any) -> Any:
    """Whole tensors for DTensors. Collective where they are sharded."""
    return map_tensors(lambda x: x.full() if isinstance(x, DTensor) else x, tree)


class Loop:
    """A module and its torch optimizer, trained by a staged step.

    run(module, batch, numbers) -> (loss, whatever the loop wants to see); it is traced. stage: a function of the step
    function. Values are read from the module and the optimizer at the first step, and go back by `write`.
    """

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, run: Run, stage: Callable[..., Staged], clip: Clip, mesh: Mesh
    ) -> None:
        self.module, self.torch_optimizer, self.mesh = module, optimizer, mesh
        self.calls = 0
        self.groups = _names_of_groups(module, optimizer)
        self.options = [_options(optimizer, group) for group in optimizer.param_groups]
        for options in self.options:
            adapt(type(optimizer), lr=0.0, **options)  # refused by name, if at all, before anything is traced
        self.model = model_of(module, {name for names in self.groups for name in names})
        functions = _step_fns(self.model, type(optimizer), self.groups, self.options, run, clip)
        self.update, self.accumulate = (stage(fn) for fn in functions)
        self.state: Any = None
        self.written = True
        self.layouts: tuple[Layout, ...] = ()  # of the tensors of the batch that was planned for

    def step(self, batch: Any, numbers: Mapping[str, Any], *, divisor: float = 1.0, update: bool = True) -> dict[str, Any]:
        """One batch: {"loss", "seen", "norm" (with update)} as plain tensors. The loss is before the division."""
        self._check_options()
        self._check_batch(batch)
        rates = [float(group["lr"]) for group in self.torch_optimizer.param_groups]
        given = {**numbers, "lr": rates, "divisor": float(divisor)}
        if self.state is None:
            # Planned for an update, also where the first call is none, so that the optimizer's state is considered.
            self.state = self.update.init(_holding(self._read(), not update), batch, given)
            self.layouts = layouts_of(self.update, 1, self.state, batch, given)
        self.state = _holding(self.state, not update)
        self.state, seen = (self.update if update else self.accumulate)(self.state, batch, given)
        self.written = False
        found: dict[str, Any] = plain(seen)
        return found

    def write(self) -> None:
        """The module's parameters and buffers hold the current values. Collective."""
        if self.state is None or self.written:
            return
        held = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        with torch.no_grad():
            for name, value in {**self.state["params"], **self.state["buffers"]}.items():
                held[name].copy_(value.full())
        self.written = True

    def write_optimizer(self) -> None:
        """The torch optimizer's state holds the current values, in torch's own form. Collective."""
        if self.state is None:
            return
        cls = type(self.torch_optimizer)
        for names, group, state in zip(self.groups, self.torch_optimizer.param_groups, self.state["opt"], strict=True):
            state = plain(state)
            for name, p in zip(names, group["params"], strict=True):
                kept = {key: part[name].clone() for key, part in state.items() if key != "step" and name in part}
                count = {} if issubclass(cls, WITHOUT_COUNT) else {"step": state["step"].clone()}
                if float(state["step"]) > 0:
                    self.torch_optimizer.state[p] = {**count, **kept}

    def forget(self) -> None:
        """The next step reads module and optimizer again: they were loaded from a checkpoint."""
        self.state, self.written = None, True

    def _read(self) -> dict[str, Any]:
        optimizers = _optimizers(type(self.torch_optimizer), self.options, [0.0] * len(self.groups))
        found = []
        for names, group, opt in zip(self.groups, self.torch_optimizer.param_groups, optimizers, strict=True):
            state = opt.init({name: self.model.params[f"module.{name}"] for name in names})
            loaded = {name: self.torch_optimizer.state.get(p) or {} for name, p in zip(names, group["params"], strict=True)}
            for key, part in state.items():
                if key != "step":
                    state[key] = {name: loaded[name][key] if loaded[name].get(key) is not None else zero for name, zero in part.items()}
            found.append({**state, "step": state["step"] + _count(loaded)})
        return {"params": _without(self.model.params), "buffers": _without(self.model.buffers), "opt": found}

    def _check_batch(self, batch: Any) -> None:
        """Raise InputError on all ranks where one has read other rows: a loop's batch is the global one."""
        self.calls += 1
        watch = backend_for(self.mesh).watch
        if watch is None:
            return
        mine = json.dumps([[list(x.shape), checksum(_sample(x))] for x in flatten(batch)[0] if not isinstance(x, DTensor)])
        said = watch.exchange("the next batch", mine, watch.deadline_s)
        if len(set(said)) > 1:
            odd = [rank for rank, text in enumerate(said) if text != said[0]]
            raise InputError(
                f"batch {self.calls} holds other rows on ranks {odd} than on rank 0; every rank reads the global batch. Try: the same data "
                "and the same seed on all ranks, and no sampler that cuts by rank"
            )

    def _check_options(self) -> None:
        """Raise InputError where the torch optimizer is not what the step was made for."""
        if len(self.torch_optimizer.param_groups) != len(self.options):
            raise InputError("the optimizer has other parameter groups than at the start; a step trains a fixed set of parameters")
        for k, (group, options) in enumerate(zip(self.torch_optimizer.param_groups, self.options, strict=True)):
            changed = next((key for key, value in options.items() if group[key] != value), None)
            if changed is not None:
                raise InputError(
                    f"option {changed!r} of parameter group {k} changed from {options[changed]!r} to {group[changed]!r} while training; "
                    "only the learning rate may change. Try: a scheduler that leaves it alone (cycle_momentum=False)"
                )


class Evaluation:
    """A second function on the state of a loop: nothing of it moves. Where nothing trains, values are placed once.

    run(module, batch, numbers) -> what it finds; it is traced.
    """

    def __init__(self, module: nn.Module, mesh: Mesh, run: Callable[..., Any], loop: Loop | None) -> None:
        self.loop = loop
        self.model = model_of(module) if loop is None else loop.model
        self._placed: Any = None

        def evaluation_step(state: Any, batch: Any, numbers: Any) -> Any:
            return self.model.apply(*state, run, batch, numbers)[0]

        self.step: Staged = shard(evaluation_step, mesh)

    def __call__(self, batch: Any, numbers: Mapping[str, Any]) -> Any:
        """What `run` finds, as plain tensors. Collective."""
        trained = self.loop.state if self.loop is not None else None
        if trained is not None:
            self._placed = None
            params = {f"module.{name}": value for name, value in trained["params"].items()}
            buffers = {f"module.{name}": value for name, value in trained["buffers"].items()}
            return plain(self.step((params, buffers), batch, numbers))
        if self._placed is None:
            self._placed = self.step.init((self.model.params, self.model.buffers), batch, numbers)
        return plain(self.step(self._placed, batch, numbers))

    def forget(self) -> None:
        """Values of the module are read again."""
        self._placed = None


def layouts_of(step: Staged, position: int, *args: Any) -> tuple[Layout, ...]:
    """Where a step that has run, or was initialised, wants the tensors of one of its arguments."""
    first = sum(len(flatten(arg)[0]) for arg in args[:position])
    return tuple(step.lower(*args).input_layouts[first : first + len(flatten(args[position])[0])])


def _sample(x: Tensor) -> Tensor:
    """All of a small tensor, some of a large one."""
    return x.reshape(-1)[:: max(1, x.numel() // SAMPLE)]


def _holding(state: dict[str, Any], accumulates: bool) -> dict[str, Any]:
    """The state with gradients of zero, if it is to add some up and has none."""
    if not accumulates or "grads" in state:
        return state
    return {**state, "grads": {name: torch.zeros_like(p) for name, p in state["params"].items()}}


def _names_of_groups(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    names = {p: name for name, p in module.named_parameters()}
    for k, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if p not in names:
                raise InputError(
                    f"parameter group {k} of the optimizer holds a tensor of shape {tuple(p.shape)} that is no parameter "
                    "of the module. Try: an optimizer of module.parameters()"
                )
    return [[names[p] for p in group["params"]] for group in optimizer.param_groups]


def _options(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    known = inspect.signature(type(optimizer)).parameters
    return {key: value for key, value in group.items() if key in known and key not in NOT_OPTIONS}


def model_of(module: nn.Module, trained: set[str] | None = None) -> Model:
    """Any function of the module as a function of its parameters; what an optimizer does not have is frozen."""
    model = functional(_Call(module))
    if trained is None:
        return model
    params = {n: p for n, p in model.params.items() if n.removeprefix("module.") in trained}
    missing = [n for n in sorted(trained) if f"module.{n}" not in params]
    if missing:
        raise InputError(f"the optimizer has {missing[0]!r}, which requires no gradient. Try: leave it out of the optimizer")
    rest = {n: p for n, p in model.params.items() if n not in params}
    return attrs.evolve(model, params=params, frozen={**model.frozen, **rest})


def _without(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("module."): value for name, value in named.items()}


def _count(loaded: Mapping[str, Mapping[str, Any]]) -> float:
    """How many updates a loaded optimizer state has seen."""
    counts = {float(entry.get("step", 1)) for entry in loaded.values() if entry}
    if len(counts) > 1:
        raise InputError(
            f"the optimizer's parameters have seen different numbers of updates ({sorted(counts)[:4]}); a step counts once "
            "for all. Try: a checkpoint in which all parameters were trained alike"
        )
    return counts.pop() if counts else 0.0


def _optimizers(cls: type[torch.optim.Optimizer], options: list[dict[str, Any]], rates: Any) -> list[Optimizer]:
    """One optimizer per parameter group, at these rates."""
    return [adapt(cls, lr=_constant(rate), **some) for some, rate in zip(options, rates, strict=True)]


def _constant(rate: Any) -> Callable[[Tensor], Any]:
    return lambda step: rate


def _step_fns(
    model: Model, cls: type[torch.optim.Optimizer], groups: list[list[str]], options: list[dict[str, Any]], run: Run, clip: Clip
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The functions that are staged; `model` is in their closures, so that train and eval mode are part of the key."""

    def gradients(state: dict[str, Any], batch: Any, numbers: dict[str, Any], model: Model) -> Any:
        """(gradients with those held, buffers, what the loop sees)"""
        buffers = {f"module.{name}": b for name, b in state["buffers"].items()}

        def loss_fn(params: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
            named = {f"module.{name}": p for name, p in params.items()}
            (loss, seen), new = model.apply(named, buffers, run, batch, numbers)
            return loss / numbers["divisor"].to(loss.dtype), (loss, seen, new)

        (_, (loss, seen, new)), grads = value_and_grad(loss_fn, has_aux=True)(state["params"])
        held = state.get("grads", {})
        return {n: held[n] + g if n in held else g for n, g in grads.items()}, _without(new), {"loss": loss, "seen": seen}

    def accumulate_gradients(state: dict[str, Any], batch: Any, numbers: dict[str, Any]) -> Any:
        grads, buffers, out = gradients(state, batch, numbers, model)
        return {**state, "buffers": buffers, "grads": grads}, out

    def training_step(state: dict[str, Any], batch: Any, numbers: dict[str, Any]) -> Any:
        grads, buffers, out = gradients(state, batch, numbers, model)
        grads, out["norm"] = clip(grads)
        params, kept = {}, []
        for names, opt, old in zip(groups, _optimizers(cls, options, numbers["lr"]), state["opt"], strict=True):
            updated, after = opt.update({n: grads[n] for n in names}, old, {n: state["params"][n] for n in names})
            params.update(updated)
            kept.append(after)
        new = {**state, "params": {n: params[n] for n in state["params"]}, "buffers": buffers, "opt": kept}
        if "grads" in state:
            new["grads"] = {n: torch.zeros_like(g) for n, g in state["grads"].items()}
        return new, out

    return training_step, accumulate_gradients
