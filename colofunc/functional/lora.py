"""Low-rank adapters: train two thin matrices beside each chosen weight, and nothing else.

    model = lora(functional(module), where="*.q_proj", rank=8)
    sorted(model.params)                     # ['...q_proj.lora_A', '...q_proj.lora_B']; all else is in model.frozen
    module = model.to_module(params)         # the user's own kind of module, adapters merged into its weights

A chosen layer computes `layer(x) + alpha / rank * (x A^T) B^T`, with A (rank, in) random and B (out, rank) zero (Hu et
al. 2021, "LoRA", section 4.1). The user's module stays as it is: adapters live on a copy of its structure that shares
its tensors, added by a forward hook. Layers are `nn.Linear` and its subclasses, and those that a library of models says to
be linear layers with a weight (in, out) (`colofunc_model_libraries`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colofunc.errors import InputError, near
from colofunc.functional.adapters import Adapter
from colofunc.functional.checkpoint.libraries import has_transposed_weight
from colofunc.functional.modules import Model
from colofunc.planner.plan import matches
from colofunc.program.lazy import LazyTensor


def lora(model: Model, where: str | Iterable[str], rank: int = 8, alpha: float = 16.0, dropout: float = 0.0) -> Model:
    """The model with adapters as its only parameters; everything that it had is frozen.

    where: globs over module paths (or their ends from some dot on). alpha: the product of the adapters is scaled by
    alpha / rank. dropout: of the adapters' input, in train mode. Raises InputError where a glob matches no linear
    layer.
    """
    if not isinstance(model, Model):
        raise InputError(f"lora was given a {type(model).__name__}. Try: cf.lora(cf.functional(module), ...)")
    if rank < 1 or not 0 <= dropout < 1:
        raise InputError(
            f"lora: rank={rank}, dropout={dropout}. Try: a rank of at least 1, a dropout of at least 0 and below 1"
        )
    paths = _chosen(model.module, (where,) if isinstance(where, str) else tuple(where))
    module = _shared_copy(model.module)
    adapters: list[Adapter] = []
    for path in paths:
        transposed = has_transposed_weight(model.module.get_submodule(path))
        adapters.append(Adapter(path, rank, alpha, dropout, transposed))
    frozen = {**model.frozen, **model.params}
    for path in paths:
        other = _other_place(model.module, path)
        if other is not None:
            raise InputError(
                f"lora: {path!r} shares its weight with {other!r}, and merging adapters of the one would change the "
                "other. Try: globs that leave it out"
            )
    params: dict[str, Tensor] = {}
    hook = _adapter(alpha / rank, dropout)
    for path in paths:
        layer = module.get_submodule(path)
        if "lora_A" in dict(layer.named_parameters()):
            raise InputError(
                f"lora: {path!r} has adapters already. Try: one call with all globs, or model.to_module() first"
            )
        out_features, in_features = _features(layer)
        dtype = frozen[f"{path}.weight"].dtype
        a = nn.init.kaiming_uniform_(torch.empty(rank, in_features, dtype=dtype), a=math.sqrt(5))
        layer.register_parameter("lora_A", nn.Parameter(a))
        layer.register_parameter("lora_B", nn.Parameter(torch.zeros(out_features, rank, dtype=dtype)))
        layer.register_forward_hook(hook)
        params |= {f"{path}.{n}": layer.get_parameter(n).detach() for n in ("lora_A", "lora_B")}
    return Model(module, params, frozen, model.buffers, (*model.adapters, *adapters), model.plain)


def _chosen(module: nn.Module, globs: tuple[str, ...]) -> list[str]:
    """Paths of linear layers that a glob matches, in the module's order."""
    linear = [path for path, layer in module.named_modules() if path and _features(layer) is not None]
    others = {path: type(layer).__name__ for path, layer in module.named_modules() if path}
    for glob in globs:
        if any(matches(path, glob) for path in linear):
            continue
        hit = next((path for path in others if matches(path, glob)), None)
        why = near(glob, linear)
        if hit is not None:
            why = f"; {hit!r} is a {others[hit]}. Try: globs of layers that are nn.Linear or a subclass of it"
        raise InputError(f"lora: where={glob!r} matches no linear layer{why}")
    chosen: list[str] = []
    for path in linear:
        if any(matches(path, glob) for glob in globs):
            chosen.append(path)
    return chosen


def _other_place(module: nn.Module, path: str) -> str | None:
    """The name of the layer's weight in another layer, None where it is the layer's alone."""
    layer = module.get_submodule(path)
    for prefix, part in module.named_modules():
        for name, tensor in part.named_parameters(recurse=False):
            if part is not layer and tensor is layer.weight:
                return f"{prefix}.{name}" if prefix else name
    return None


def _features(layer: nn.Module) -> Any:
    """(out, in) of a layer that multiplies its last dim with a weight; None for any other."""
    if isinstance(layer, torch.jit.ScriptModule):
        return None  # its forward cannot be changed
    weight = layer.__dict__.get("_parameters", {}).get("weight")
    if weight is None or weight.dim() != 2:
        return None
    if has_transposed_weight(layer):
        return tuple(reversed(weight.shape))
    return tuple(weight.shape) if isinstance(layer, nn.Linear) else None


def _adapter(scale: float, dropout: float) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    def add(layer: nn.Module, args: Any, out: Tensor) -> Tensor:
        x = F.dropout(args[0], dropout, training=layer.training) if dropout else args[0]
        return out + F.linear(F.linear(x, layer.lora_A), layer.lora_B) * scale  # type: ignore[arg-type]

    return add


def _shared_copy(module: nn.Module) -> nn.Module:
    """The same structure with the same tensors."""
    shared: dict[int, Any] = {id(t): t for t in [*module.parameters(), *module.buffers()]}
    for part in module.modules():
        shared |= {id(x): x for x in vars(part).values() if isinstance(x, LazyTensor)}
    return copy.deepcopy(module, shared)
