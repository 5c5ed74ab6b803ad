"""Gradients of functions of trees.

    loss, grads = value_and_grad(loss_fn)(params, batch)                       # grads: the tree of params
    (loss, aux), grads = value_and_grad(loss_fn, has_aux=True)(params, batch)
    grads, norm = clip_by_global_norm(grads, 1.0)

Differentiated are the floating leaves of the chosen arguments; one that the loss does not use has a zero gradient. The
same code runs eagerly and inside a trace. A call inside another is differentiable itself.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from colofunc import compat
from colofunc.errors import InputError
from colofunc.ops import policy
from colofunc.ops.squares import written_out
from colofunc.program.tracing.meta import active_stacks, phase
from colofunc.program.tracing.tree import Tree, flatten, map_tensors, unflatten

# How many value_and_grad calls surround this one.
_DEPTH: ContextVar[int] = ContextVar("colofunc_grad_depth", default=0)


def value_and_grad(
    f: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """A function that returns (f(...), gradients with respect to the arguments `argnums`).

    `f` returns a 0-dim floating tensor, or with `has_aux` a pair of it and anything; aux carries no gradient.
    """
    chosen = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    @functools.wraps(f)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not all(-len(args) <= n < len(args) for n in chosen):
            numbers = f"numbers from 0 to {len(args) - 1}" if args else "by position what is differentiated"
            raise InputError(
                f"value_and_grad: argnums={argnums} of a call with {len(args)} positional arguments. Try: {numbers}"
            )
        inner = _DEPTH.get() > 0
        token = _DEPTH.set(_DEPTH.get() + 1)
        try:
            with torch.enable_grad():
                new, leaves, trees = _differentiated(args, chosen, inner)
                result = f(*new, **kwargs)
                loss, aux = _split(result, has_aux)
                grads = _gradients(loss, leaves, inner)
        finally:
            _DEPTH.reset(token)
        # The gradients come leaf after leaf, argument after argument.
        found: list[Any] = []
        for tree in trees:
            found.append(unflatten(tree, list(islice(grads, len(tree.names())))))
        gradients = found[0] if isinstance(argnums, int) else tuple(found)
        if not inner:
            loss = _readable(loss.detach())
            aux = _detached(aux) if has_aux else None
        return ((loss, aux) if has_aux else loss), gradients

    return wrapped


def _differentiated(
    args: tuple[Any, ...], chosen: tuple[int, ...], inner: bool
) -> tuple[list[Any], list[Tensor | None], list[Tree]]:
    """The arguments with fresh leaves; those leaves (None where one cannot be differentiated); the trees of
    the chosen.
    """
    new, leaves, trees = list(args), [], []
    for n in chosen:
        found, tree = flatten(args[n], f"arg{n}")
        fresh = [_fresh(t, inner) for t in found]
        new[n] = unflatten(tree, fresh)
        leaves += [t if t.requires_grad else None for t in fresh]
        trees.append(tree)
        if (mixed := policy.active_policy()) is not None:
            for t, name in zip(fresh, tree.names(), strict=True):
                mixed.name(t, name.partition(".")[2])
    if all(leaf is None for leaf in leaves):
        raise InputError(f"value_and_grad: no floating tensor in argument {chosen}. Try: argnums=")
    return new, leaves, trees


def _fresh(t: Tensor, inner: bool) -> Tensor:
    if not (t.is_floating_point() or t.is_complex()):
        return t
    # Inside another value_and_grad the outer graph has to go on through this leaf.
    return t.view_as(t) if inner and t.requires_grad else t.detach().requires_grad_()


def _split(result: Any, has_aux: bool) -> tuple[Tensor, Any]:
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise InputError(
            f"value_and_grad(has_aux=True): the function returned {type(result).__name__}, not (loss, aux)"
        )
    loss, aux = result if has_aux else (result, None)
    if not isinstance(loss, Tensor) or loss.dim() != 0 or not loss.is_floating_point():
        what = f"{loss.dtype} of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise InputError(
            f"value_and_grad: the loss is {what}, not a 0-dim floating tensor. Try: loss.mean(), or has_aux=True"
        )
    return loss, aux


def _gradients(loss: Tensor, leaves: list[Tensor | None], inner: bool) -> Any:
    wanted = [leaf for leaf in leaves if leaf is not None]
    grads: Any = (None,) * len(wanted)
    if loss.requires_grad:
        grads = torch.autograd.grad(loss, wanted, allow_unused=True, create_graph=inner)
    found = iter(torch.zeros_like(leaf) if g is None else g for leaf, g in zip(wanted, grads, strict=True))
    return iter([None if leaf is None else next(found) for leaf in leaves])


def _readable(loss: Tensor) -> Tensor:
    """Under `cf.precision` a loss comes back in float32 at least."""
    return loss.to(torch.promote_types(loss.dtype, torch.float32)) if policy.active_policy() is not None else loss


def _detached(aux: Any) -> Any:
    return map_tensors(lambda t: t.detach() if t.requires_grad else t, aux)


def warn_of_eval_mode(module: nn.Module) -> None:
    """One warning where a step that is being traced differentiates a module in eval mode."""
    if not compat.is_training(module) and _DEPTH.get() > 0 and active_stacks() is not None:
        warnings.warn(
            f"a training step runs {type(module).__name__} in eval mode, so its dropout does nothing and its running "
            "statistics stand still (from_pretrained returns models so); call model.train() before the step, or "
            "filter this warning if that is meant",
            stacklevel=3,
        )


def clip_by_global_norm(grads: Any, max_norm: float | Tensor) -> tuple[Any, Tensor]:
    """(gradients scaled so that their joint 2-norm is at most `max_norm`, the norm before), as `clip_grad_norm_` does.

    The squares are summed in at least float32, so that sharded gradients add up their parts.
    """
    if isinstance(max_norm, (int, float)) and not max_norm >= 0:
        raise InputError(
            f"clip_by_global_norm: a norm of at most {max_norm!r} cannot be; it would turn the gradients around"
        )
    leaves, tree = flatten(grads, "grads")
    if not leaves:
        return grads, torch.zeros(())
    with phase("update"):
        total = torch.stack([written_out(g) for g in leaves]).sum().sqrt()
        scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
        return unflatten(tree, [g * scale.to(g.dtype) for g in leaves]), total
