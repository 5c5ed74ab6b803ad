"""Torch functions on DTensors, as the user wrote them: which operands may be plain, and what draws random numbers.

Problem: below, at the level of operators, it is too late to ask two things. A plain tensor may be the user's (is it the
whole, or this rank's part?) or one that torch made on its own way (`one_hot` compares with an `arange`), and a random
operator has a sequential generator behind it. Idea: the function sees its arguments as they were given.

    x + plain                # refused: say how it is split
    x[[0, -1]]               # an index: the same on all ranks
    F.dropout(x)             # colofunc::dropout, as in a step of this one call: a fresh seed, keyed by position
"""

from __future__ import annotations

from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import resolve_name
from torch.utils import _pytree as pytree

from colofunc import compat
from colofunc.errors import InputError, SpecError
from colofunc.executors.distributed import main_seed
from colofunc.executors.watch import meet
from colofunc.ops.canonical import HANDLERS, Canonical, opened
from colofunc.ops.seeds import draw_seed
from colofunc.spec.layout import replicated

# Where functions have an argument that is the same on all ranks: one that says where (an index), or probabilities.
_SHARED: dict[str, int] = {
    **dict.fromkeys("__getitem__ __setitem__ index_put index_put_ take take_along_dim put put_ quantile nanquantile".split(), 1),
    **dict.fromkeys("index_select index_add index_copy index_fill index_reduce gather scatter scatter_add scatter_reduce".split(), 2),
    **dict.fromkeys("index_add_ index_copy_ index_fill_ index_reduce_ scatter_ scatter_add_ scatter_reduce_".split(), 2),
}
# Of one name twice: torch.nn.functional's takes the indices first.
_SHARED_OF: dict[Any, int] = {F.embedding: 0, F.embedding_bag: 0, torch.embedding: 1, torch.embedding_bag: 1}
_SHARED_NAMES = ("index", "indices", "input", "q")
# Functions that want the memory of the whole, or change it behind dispatch.
_MEMORY = frozenset("apply_ map_ map2_ data_ptr untyped_storage storage set_ resize_ resize_as_ share_memory_ pin_memory".split())
# Random functions whose result is like their operand, and lies like it.
_LIKE = frozenset({torch.rand_like, torch.randn_like, torch.randint_like, torch.bernoulli, Tensor.bernoulli})


def call(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a function that needs more than its operators, or NotImplemented. `cls` is DTensor."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return NotImplemented
    found = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    first = next((x for x in found if isinstance(x, cls)), None)
    if first is None:
        return NotImplemented
    if name in _MEMORY and isinstance(args[0], cls):
        raise InputError(
            f"{_words(func)} wants the memory of one tensor, a DTensor's lies on all ranks; use x.local (this rank's part) or x.full()"
        )
    if len(found) > 1 and not compat.in_backward():  # there, plain ones are autograd's own, equal on all ranks
        _check_plain(cls, func, name, found, args, kwargs)
    body = opened(func)
    if body is not None:
        with _mode(cls, first, name):
            return body(*args, **kwargs)
    if func not in HANDLERS:
        return NotImplemented
    result = HANDLERS[func](_mode(cls, first, name), *args, **kwargs)
    if func in _LIKE and isinstance(result, cls) and result.shape == first.shape:
        return result.redistribute(first.sharding.with_pending(()))
    return result


def _mode(cls: Any, like: Any, name: str) -> Canonical:
    """Canonical operators whose seed is a DTensor: drawn at the first random operator, rank 0's on all ranks."""
    mesh, backend = like.mesh, like._backend
    drawn: list[Any] = []

    def seed() -> Any:
        if not drawn:
            meet(backend.watch, f"random numbers of {name} on a DTensor {tuple(like.shape)}")
            value = main_seed(backend.watch, draw_seed(), like.device)
            drawn.append(cls([value] * len(backend.ranks(mesh)), replicated(()), mesh, backend))
        return drawn[0]

    return Canonical(seed, count())


def _check_plain(cls: Any, func: Any, name: str, found: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse the user's plain tensors that have dims, but for indices and probabilities."""
    writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    target: Any = kwargs.get("out", found[0] if writes else None)
    if _is_plain(cls, target):
        raise InputError(f"{_words(func)} writes a DTensor into a plain tensor of shape {tuple(target.shape)}; use x.full()")
    shared = {id(x) for x in _shared(func, name, args, kwargs)}
    for x in found:
        if _is_plain(cls, x) and x.dim() > 0 and id(x) not in shared:
            raise SpecError(  # no TypeError: Python would turn that into "unsupported operand"
                f"{_words(func)} mixes a DTensor with a plain tensor of shape {tuple(x.shape)}; "
                f'say how it is split: cf.distribute(tensor, "...", mesh)'
            )


def _shared(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The argument that the tables speak of, as a list of leaves."""
    at = _SHARED_OF.get(func, _SHARED.get(name))
    if at is None:
        return []
    given = args[at] if at < len(args) else [kwargs[k] for k in _SHARED_NAMES if k in kwargs]
    return pytree.tree_leaves(given)


def _is_plain(cls: Any, x: Any) -> bool:
    """Whether a user would call it a plain tensor: no tensor of a trace, and no wrapper of torch.func around a DTensor."""
    return type(x) in (Tensor, torch.nn.Parameter) and not isinstance(compat.unwrap_functorch(x), cls)


def _words(func: Any) -> str:
    """A function as the reader knows it: `torch.Tensor.add`, `torch.nn.functional.dropout`."""
    return resolve_name(func) or str(func)
