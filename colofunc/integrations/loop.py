"""Somebody else's training loop on our step: what Lightning and the Hugging Face Trainer need alike.

Problem: such a loop calls forward, backward, clip, `optimizer.step()` and `zero_grad()` one by one on a module and a
torch optimizer that it owns; a staged step does all of them at once on a state that lies on a mesh. Idea: the module
and the torch optimizer become the place where values are read from and written back to, and the loop's one call per
batch runs one of

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

from colofunc.compiler.rank_agreement import value_checksum
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

NOT_OPTIONS = ("lr", "params", "foreach", "fused", "capturable", "differentiable")
"""How torch runs an update, and what schedulers leave in a group: nothing that an update computes."""
WITHOUT_COUNT = (torch.optim.SGD, getattr(torch.optim, "Muon", torch.optim.SGD))
"""Optimizers of torch that keep no count of their updates."""
SAMPLE = 1 << 18
"""Ranks compare about this many elements of each tensor of a batch."""
PREFIX = "module."
"""In front of the names of parameters and buffers in `TrainingLoop.model`, whose module holds the loop's as `module`."""
RunLoss = Callable[[nn.Module, Any, Mapping[str, Any]], tuple[Tensor, Any]]
"""(module, batch, numbers) -> (loss, whatever the loop wants to see)."""


class _Call(nn.Module):
    """Gives `functional` any function of the module, instead of its forward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, run: RunLoss, batch: Any, numbers: Mapping[str, Any]) -> Any:
        return run(self.module, batch, numbers)


@attrs.frozen
class Clip:
    """`how`: "norm", "value", or "none" (the norm is still reported)."""

    how: str = "none"
    most: float = 0.0

    def __call__(self, grads: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        """(clipped gradients, the norm that they had)."""
        if self.how == "norm":
            return clip_by_global_norm(grads, self.most)
        _, norm = clip_by_global_norm(grads, 1.0)
        if self.how == "value":
            grads = {name: grad.clamp(-self.most, self.most) for name, grad in grads.items()}
        return grads, norm


def staging(
    mesh: Mesh | None, plans: Any, chain: Chain | Any | None, clip: Clip, whose: str
) -> tuple[Mesh, Callable[[Callable[..., Any]], Staged], Clip]:
    """(mesh, what stages a step, clipping) from either a mesh with plans or a chain (or what `cf.configure` takes).

    whose: who asks, for the InputError where neither or both are given, or both clip.
    """
    if chain is None:
        if not isinstance(mesh, Mesh):
            raise InputError(f"{whose} wants mesh=cf.Mesh(...) or chain=cf.configure(...), not {mesh!r}")
        if not isinstance(plans, list | tuple):
            plans = (plans,)
        return mesh, partial(_sharded, mesh=mesh, plans=plans), clip
    if mesh is not None or plans:
        raise InputError(f"{whose}: the chain says mesh and plans; drop mesh= and plans=, or the chain")
    chain = chain if isinstance(chain, Chain) else configure(chain)
    if chain.clip is not None:
        if clip.how != "none":
            raise InputError(
                f"{whose}: the chain clips to {chain.clip}, the trainer's own options to {clip.most}; drop one of them"
            )
        clip = Clip("norm", chain.clip)
    return chain.mesh, partial(chain.apply, clips=True), clip


def _sharded(step_fn: Callable[..., Any], mesh: Mesh, plans: Any) -> Staged:
    staged: Staged = shard(step_fn, mesh, *plans)
    return staged


def whole_tree(tree: Any) -> Any:
    """Whole tensors for DTensors. Collective where they are sharded."""

    def whole(x: Tensor) -> Tensor:
        return x.full() if isinstance(x, DTensor) else x

    return map_tensors(whole, tree)


class TrainingLoop:
    """A module and its torch optimizer, trained by a staged step.

    run(module, batch, numbers) -> (loss, whatever the loop wants to see); it is traced. stage: a function of the step
    function. Values are read from the module and the optimizer at the first step, and go back by `write`.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        run: RunLoss,
        stage: Callable[..., Staged],
        clip: Clip,
        mesh: Mesh,
    ) -> None:
        self.module, self.torch_optimizer, self.mesh = module, optimizer, mesh
        self.calls = 0
        self.groups = _names_of_groups(module, optimizer)
        self.options = [_options(optimizer, group) for group in optimizer.param_groups]
        for options in self.options:
            adapt(type(optimizer), lr=0.0, **options)  # refused by name, if at all, before anything is traced
        self.model = model_of(module, set().union(*self.groups))
        training_step, accumulate_gradients = _step_fns(
            self.model, type(optimizer), self.groups, self.options, run, clip
        )
        self.update, self.accumulate = stage(training_step), stage(accumulate_gradients)
        self.state: Any = None
        self.written = True
        self.layouts: tuple[Layout, ...] = ()  # of the tensors of the batch that was planned for

    def step(
        self, batch: Any, numbers: Mapping[str, Any], *, divisor: float = 1.0, update: bool = True
    ) -> dict[str, Any]:
        """One batch: {"loss", "seen", "norm" (with update)} as plain tensors. The loss is before the division."""
        self._check_options()
        self._check_batch(batch)
        rates = [float(group["lr"]) for group in self.torch_optimizer.param_groups]
        given = {**numbers, "lr": rates, "divisor": float(divisor)}
        if self.state is None:
            # Planned for an update, also where the first call is none, so that the optimizer's state is considered.
            self.state = self.update.init(_with_gradients(self._read(), not update), batch, given)
            self.layouts = batch_layouts(self.update, self.state, batch, given)
        self.state = _with_gradients(self.state, not update)
        step = self.update if update else self.accumulate
        self.state, seen = step(self.state, batch, given)
        self.written = False
        seen_whole: dict[str, Any] = whole_tree(seen)
        return seen_whole

    def write(self) -> None:
        """The module's parameters and buffers hold the current values. Collective."""
        if self.state is None or self.written:
            return
        of_module = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        with torch.no_grad():
            for name, value in {**self.state["params"], **self.state["buffers"]}.items():
                of_module[name].copy_(value.full())
        self.written = True

    def write_optimizer(self) -> None:
        """The torch optimizer's state holds the current values, in torch's own form. Collective."""
        if self.state is None:
            return
        counts = not isinstance(self.torch_optimizer, WITHOUT_COUNT)
        for names, group, state in zip(self.groups, self.torch_optimizer.param_groups, self.state["opt"], strict=True):
            state = whole_tree(state)
            if float(state["step"]) == 0:
                continue
            for name, parameter in zip(names, group["params"], strict=True):
                entry = {"step": state["step"].clone()} if counts else {}
                for key, by_name in state.items():
                    if key != "step" and name in by_name:
                        entry[key] = by_name[name].clone()
                self.torch_optimizer.state[parameter] = entry

    def forget(self) -> None:
        """The next step reads module and optimizer again: they were loaded from a checkpoint."""
        self.state, self.written = None, True

    def _read(self) -> dict[str, Any]:
        """The state of the first step.

        It has the module's values, and what the torch optimizer has loaded from a checkpoint.
        """
        optimizers = _optimizers(type(self.torch_optimizer), self.options, [0.0] * len(self.groups))
        of_groups = []
        for names, group, opt in zip(self.groups, self.torch_optimizer.param_groups, optimizers, strict=True):
            state = opt.init({name: self.model.params[PREFIX + name] for name in names})
            loaded = {}
            for name, parameter in zip(names, group["params"], strict=True):
                loaded[name] = self.torch_optimizer.state.get(parameter) or {}
            for key, zeros in state.items():
                if key != "step":
                    state[key] = {name: _loaded_or(zero, loaded[name].get(key)) for name, zero in zeros.items()}
            of_groups.append({**state, "step": state["step"] + _count(loaded)})
        return {
            "params": _without_prefix(self.model.params),
            "buffers": _without_prefix(self.model.buffers),
            "opt": of_groups,
        }

    def _check_batch(self, batch: Any) -> None:
        """Raise InputError on all ranks where one has read other rows: a loop's batch is the global one."""
        self.calls += 1
        watch = backend_for(self.mesh).watch
        if watch is None:
            return
        tensors, _ = flatten(batch)
        described = [[list(x.shape), value_checksum(_sample(x))] for x in tensors if not isinstance(x, DTensor)]
        texts = watch.exchange("the next batch", json.dumps(described), watch.deadline_s)
        odd_ranks = [rank for rank, text in enumerate(texts) if text != texts[0]]
        if odd_ranks:
            raise InputError(
                f"batch {self.calls} holds other rows on ranks {odd_ranks} than on rank 0; every rank reads the global "
                "batch. Try: the same data and the same seed on all ranks, and no sampler that cuts by rank"
            )

    def _check_options(self) -> None:
        """Raise InputError where the torch optimizer is not what the step was made for."""
        if len(self.torch_optimizer.param_groups) != len(self.options):
            raise InputError(
                "the optimizer has other parameter groups than at the start; a step trains a fixed set of parameters"
            )
        for number, (group, options) in enumerate(zip(self.torch_optimizer.param_groups, self.options, strict=True)):
            for key, value in options.items():
                if group[key] != value:
                    raise InputError(
                        f"option {key!r} of parameter group {number} changed from {value!r} to {group[key]!r} while "
                        "training; only the learning rate may change. Try: a scheduler that leaves it alone "
                        "(cycle_momentum=False)"
                    )


class Evaluation:
    """A second function on the state of a loop: nothing of it moves. Where nothing trains, values are placed once.

    run(module, batch, numbers) -> what it finds; it is traced.
    """

    def __init__(self, module: nn.Module, mesh: Mesh, run: Callable[..., Any], loop: TrainingLoop | None) -> None:
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
            params, buffers = _with_prefix(trained["params"]), _with_prefix(trained["buffers"])
            return whole_tree(self.step((params, buffers), batch, numbers))
        if self._placed is None:
            self._placed = self.step.init((self.model.params, self.model.buffers), batch, numbers)
        return whole_tree(self.step(self._placed, batch, numbers))

    def forget(self) -> None:
        """Values of the module are read again."""
        self._placed = None


def batch_layouts(step: Staged, state: Any, batch: Any, *rest: Any) -> tuple[Layout, ...]:
    """Where a step that has run, or was initialised, wants the tensors of its batch."""
    first = len(flatten(state)[0])
    return tuple(step.lower(state, batch, *rest).input_layouts[first : first + len(flatten(batch)[0])])


def _sample(x: Tensor) -> Tensor:
    """All of a small tensor, some of a large one."""
    return x.reshape(-1)[:: max(1, x.numel() // SAMPLE)]


def _with_gradients(state: dict[str, Any], accumulates: bool) -> dict[str, Any]:
    """The state with gradients of zero, if it is to add some up and has none."""
    if not accumulates or "grads" in state:
        return state
    return {**state, "grads": _zeros(state["params"])}


def _zeros(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def _loaded_or(zero: Tensor, loaded: Any) -> Any:
    """What a torch optimizer has loaded of its state; without that, zero."""
    return zero if loaded is None else loaded


def _names_of_groups(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """The names of each group's parameters. Raises InputError for a tensor that is no parameter of the module."""
    name_of = {parameter: name for name, parameter in module.named_parameters()}
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        names = []
        for tensor in group["params"]:
            if tensor not in name_of:
                raise InputError(
                    f"parameter group {number} of the optimizer holds a tensor of shape {tuple(tensor.shape)} that is "
                    "no parameter of the module. Try: an optimizer of module.parameters()"
                )
            names.append(name_of[tensor])
        groups.append(names)
    return groups


def _options(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group that an update computes with."""
    known = inspect.signature(type(optimizer)).parameters
    return {key: value for key, value in group.items() if key in known and key not in NOT_OPTIONS}


def model_of(module: nn.Module, trained: set[str] | None = None) -> Model:
    """Any function of the module as a function of its parameters; what an optimizer does not have is frozen."""
    model = functional(_Call(module))
    if trained is None:
        return model
    params, rest = {}, {}
    for name, parameter in model.params.items():
        if name.removeprefix(PREFIX) in trained:
            params[name] = parameter
        else:
            rest[name] = parameter
    missing = [name for name in sorted(trained) if PREFIX + name not in params]
    if missing:
        raise InputError(
            f"the optimizer has {missing[0]!r}, which requires no gradient. Try: leave it out of the optimizer"
        )
    return attrs.evolve(model, params=params, frozen={**model.frozen, **rest})


def _without_prefix(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(PREFIX): value for name, value in named.items()}


def _with_prefix(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {PREFIX + name: value for name, value in named.items()}


def _count(loaded: Mapping[str, Mapping[str, Any]]) -> float:
    """How many updates a loaded optimizer state has seen."""
    counts = {float(entry.get("step", 1)) for entry in loaded.values() if entry}
    if len(counts) > 1:
        raise InputError(
            f"the optimizer's parameters have seen different numbers of updates ({sorted(counts)[:4]}); a step counts "
            "once for all. Try: a checkpoint in which all parameters were trained alike"
        )
    return counts.pop() if counts else 0.0


def _optimizers(cls: type[torch.optim.Optimizer], options: list[dict[str, Any]], rates: Any) -> list[Optimizer]:
    """One optimizer per parameter group, at these rates."""
    optimizers = []
    for options_of_group, rate in zip(options, rates, strict=True):
        optimizers.append(adapt(cls, lr=_constant(rate), **options_of_group))
    return optimizers


def _constant(rate: Any) -> Callable[[Tensor], Any]:
    """A schedule that is the same at every step: the loop's own scheduler has said the rate."""
    return lambda step: rate


def _step_fns(
    model: Model,
    cls: type[torch.optim.Optimizer],
    groups: list[list[str]],
    options: list[dict[str, Any]],
    run: RunLoss,
    clip: Clip,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The functions that are staged; `model` is in their closures, so that train and eval mode are part of the key."""

    def gradients(state: dict[str, Any], batch: Any, numbers: dict[str, Any], model: Model) -> Any:
        """(gradients, added to those of earlier batches; buffers; what the loop sees)"""
        buffers = _with_prefix(state["buffers"])

        def loss_fn(params: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
            (loss, seen), new = model.apply(_with_prefix(params), buffers, run, batch, numbers)
            return loss / numbers["divisor"].to(loss.dtype), (loss, seen, new)

        (_, (loss, seen, new)), grads = value_and_grad(loss_fn, has_aux=True)(state["params"])
        earlier = state.get("grads", {})
        summed = {name: earlier[name] + grad if name in earlier else grad for name, grad in grads.items()}
        return summed, _without_prefix(new), {"loss": loss, "seen": seen}

    def accumulate_gradients(state: dict[str, Any], batch: Any, numbers: dict[str, Any]) -> Any:
        grads, buffers, out = gradients(state, batch, numbers, model)
        return {**state, "buffers": buffers, "grads": grads}, out

    def training_step(state: dict[str, Any], batch: Any, numbers: dict[str, Any]) -> Any:
        grads, buffers, out = gradients(state, batch, numbers, model)
        grads, out["norm"] = clip(grads)
        updated, of_groups = {}, []
        for names, opt, old in zip(groups, _optimizers(cls, options, numbers["lr"]), state["opt"], strict=True):
            grads_of_group = {name: grads[name] for name in names}
            params_of_group = {name: state["params"][name] for name in names}
            updated_of_group, new_of_group = opt.update(grads_of_group, old, params_of_group)
            updated.update(updated_of_group)
            of_groups.append(new_of_group)
        params = {name: updated[name] for name in state["params"]}
        new = {**state, "params": params, "buffers": buffers, "opt": of_groups}
        if "grads" in state:
            new["grads"] = _zeros(state["grads"])
        return new, out

    return training_step, accumulate_gradients
