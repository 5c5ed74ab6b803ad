"""Operators on DTensors outside of a step: which of them are views, writes, questions, and what becomes of their
results.

Problem: torch hands every operator on a wrapper subclass to one function, and views and writes have to stay true
although no memory is shared with what torch sees. Idea: an operator runs as a program of one node (see `eager`); what
it returns is wrapped, remembers its origin if it is a view, or takes the place of what it was written to.

    y = x[0]; y.add_(1)               # y is a value of its own, and x gets what was written

Note [Views]: a view (`x[0]`, `x.t()`) is a value of its own that remembers where it came from. Writing to it writes to
its base; a view whose base was written otherwise or donated since is refused when it is read, never silently old.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import resolve_name
from torch.utils import _pytree as pytree

from colofunc import compat
from colofunc.dtensor.eager import (
    check_shape_known,
    convert_shards,
    functional,
    reshapes,
    returns_views,
    run_eager,
    written_argument,
)
from colofunc.errors import InputError, MeshError, SpecError
from colofunc.executors.backend import Backend
from colofunc.executors.distributed import main_seed
from colofunc.executors.watch import meet
from colofunc.mesh import Mesh
from colofunc.ops.canonical import HANDLERS, Canonical, opened
from colofunc.ops.debug import show
from colofunc.ops.seeds import draw_seed
from colofunc.spec.layout import Layout, replicated

# What errors advise for a tensor on another mesh: its parts go over, and no rank gets the whole.
BRING_OVER = "cf.distribute(x, spec, mesh)"


@attrs.define(eq=False)
class SharedParts:
    """The parts of a tensor; `detach()` and the tensor it was called on hold the same ones."""

    shards: list[torch.Tensor] | None
    consumed_by: str = ""
    writes: int = 0
    name: str = ""  # of the leaf that was consumed
    lent: bool = False  # a caller has a part, or has given it


@attrs.define(eq=False)
class Origin:
    """Where a view came from. See Note [Views]."""

    base: Any  # a DTensor
    func: Any
    args: tuple[Any, ...]
    root: SharedParts  # of the tensor that is no view
    seen: int  # its writes when this view was taken


# Questions about two tensors whose answer is Python's.
_ANSWERS = frozenset({torch.ops.aten.equal.default, torch.ops.aten.allclose.default})


def dispatch(cls: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Run one operator on DTensors (`cls`) and plain data."""
    if func is torch.ops.aten._local_scalar_dense.default:
        return _item(args[0])
    if func is torch.ops.aten.detach.default:
        return _detached(cls, args[0])
    if func is torch.ops.colofunc.debug.default:
        return _shown(cls, *args)
    leaves, tree = pytree.tree_flatten((args, kwargs))
    if func in _ANSWERS:
        return _answer(cls, func, leaves)
    check_shape_known(func, leaves)
    if reshapes(func):
        return _reshaped(cls, func, args, kwargs)
    written = written_argument(func)
    if written and not isinstance(leaves[0], cls):
        raise InputError(f"{func} writes a DTensor into a plain tensor of shape {tuple(leaves[0].shape)}; use x.full()")
    mesh, backend = _common_mesh(cls, func, leaves)
    operands = [_as_operand(cls, leaf, mesh, backend) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    results, out_tree = run_eager(func, operands, tree, mesh, backend, cls)
    if written:
        _write(cls, func, leaves[0], *results[0])
        return leaves[0]
    wrapped = [cls(out[0], out[1], mesh, backend) if isinstance(out, tuple) else out for out in results]
    if returns_views(func) and isinstance(args[0], cls):
        for view in wrapped:
            view._origin = _origin(args[0], func, args)
    return pytree.tree_unflatten(wrapped, out_tree)


def _answer(cls: Any, func: Any, leaves: Sequence[Any]) -> Any:
    """Of a question about two tensors; they are compared where the first lies."""
    whole = [leaf.full() if isinstance(leaf, cls) else leaf for leaf in leaves]
    return func(whole[0], whole[1].to(whole[0].device), *whole[2:])


def _reshaped(cls: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """`x.squeeze_()` and the like: `x` becomes the view of what it was."""
    target = args[0]
    new = dispatch(cls, functional(func), (_detached(cls, target), *args[1:]), kwargs)
    with compat.no_dispatch():
        func(*args, **kwargs)
    target.sharding, target._held, target._origin = new.sharding, new._held, new._origin
    target.home = None
    return target


def _shown(cls: Any, values: Sequence[torch.Tensor], text: str, key: str, ranks: bool) -> None:
    """`cf.debug` outside of a step: the global values on the main rank, or every rank's parts."""
    found = [x for x in values if isinstance(x, cls)]
    whole = [x.full() if isinstance(x, cls) and not ranks else x for x in values]
    for place, rank in enumerate(found[0]._backend.ranks(found[0].mesh)):
        if ranks or rank == 0:
            show([x.parts[place] if isinstance(x, cls) else x for x in whole], text, key, ranks, rank)


def _detached(cls: Any, x: Any) -> Any:
    out = cls(x.parts_in_flight, x.sharding, x.mesh, x._backend, owned=x.owned)
    out._held, out._origin = x._held, x._origin
    return out


def _origin(base: Any, func: Any, args: tuple[Any, ...]) -> Origin:
    root = base._held if base._origin is None else base._origin.root
    return Origin(base, func, args[1:], root, root.writes)


def _write(cls: Any, func: Any, target: Any, shards: list[torch.Tensor], layout: Layout) -> None:
    """Put a new value in the place of `target`'s, and in that of what it is a view of."""
    if layout.shape != target.sharding.shape:
        raise InputError(
            f"{func} would change the shape from {tuple(target.shape)} to {layout.shape}; write x = f(x) instead"
        )
    if not torch.can_cast(shards[0].dtype, target.dtype):
        raise InputError(f"{func} would put {shards[0].dtype} into a DTensor of {target.dtype}; write x = f(x) instead")
    parts = convert_shards([x.to(target.dtype) for x in shards], layout, target.sharding, target.mesh, target._backend)
    origin, target.home = target._origin, None
    if origin is None:
        target._held.shards = parts
        target._held.writes += 1
        return
    fresh = cls(parts, target.sharding, target.mesh, target._backend)
    with torch.no_grad():
        whole: Any = write_back(origin.func, origin.args, origin.base.detach(), fresh)
    _write(cls, func, origin.base, whole.parts, whole.sharding)
    target._held.shards = parts
    origin.seen = origin.root.writes


def _item(x: Any) -> Any:
    """The number of a one-element tensor: local where every rank has it."""
    layout = x.sharding
    whole = x.parts
    if not layout.is_replicated:
        whole = convert_shards(x.parts, layout, replicated(layout.shape), x.mesh, x._backend, "item()")
    return whole[0].item()


def _common_mesh(cls: Any, func: Any, leaves: Sequence[Any]) -> tuple[Mesh, Backend]:
    found = [leaf for leaf in leaves if isinstance(leaf, cls)]
    mesh = found[0].mesh
    for other in found[1:]:
        if other.mesh != mesh:
            raise MeshError(
                f"{func} mixes DTensors of two meshes, {mesh} and {other.mesh}. Try: {BRING_OVER}, which brings one over"
            )
    return mesh, found[0]._backend


def _as_operand(cls: Any, x: torch.Tensor, mesh: Mesh, backend: Backend) -> Any:
    """A plain tensor counts as the global value.

    It is an index, or torch's own (`call_function` refused the user's).
    """
    return x if isinstance(x, cls) else cls([x] * len(backend.ranks(mesh)), replicated(tuple(x.shape)), mesh, backend)


# ---- writing through views ----
# Eager results are values of their own, so `x[0] = 5` (a view, then a write to it) has to be carried back to `x`. Each
# view operator has an inverse: a slice is scattered, a reshape is reshaped back, a transpose is transposed again.
#
#     write_back(aten.select.int, (0, 3), base, row)   # base with row 3 replaced


aten = torch.ops.aten

_RESHAPED = frozenset({aten.view, aten.unsqueeze, aten.squeeze, aten._unsafe_view, aten.alias})
_SCATTERED: dict[Any, Any] = {
    aten.select: torch.select_scatter,
    aten.slice: torch.slice_scatter,
    aten.diagonal: torch.diagonal_scatter,
}


def write_back(func: Any, args: tuple[Any, ...], base: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """`base` after `view = func(base, *args)` got a new value. Raises InputError where the view has no inverse."""
    packet = func.overloadpacket
    if packet in _RESHAPED:
        return view.reshape(base.shape)
    if packet in _SCATTERED:
        return _SCATTERED[packet](base, view, *args)
    if packet is aten.t:
        return view.t()
    if packet is aten.transpose:
        return view.transpose(*args)
    if packet is aten.permute:
        order = [dim % base.dim() for dim in args[0]]
        return view.permute([order.index(d) for d in range(base.dim())])
    raise InputError(
        f"a write to a view made by {func} cannot be carried back to its base; write to the base itself, or clone() "
        "first"
    )


# ---- torch functions, as the user wrote them ----
#
# Problem: below, at the level of operators, it is too late to ask two things. A plain tensor may be the user's (is it
# the whole, or this rank's part?) or one that torch made on its own way (`one_hot` compares with an `arange`), and a
# random operator has a sequential generator behind it. Idea: the function sees its arguments as they were given.
#
#     x + plain                # refused: say how it is split
#     x[[0, -1]]               # an index: the same on all ranks
#     F.dropout(x)             # colofunc::dropout, as in a step of this one call: a fresh seed, keyed by position


# Where functions have an argument that is the same on all ranks: one that says where (an index), or probabilities.
_SHARED: dict[str, int] = {
    **dict.fromkeys(
        "__getitem__ __setitem__ index_put index_put_ take take_along_dim put put_ quantile nanquantile".split(), 1
    ),
    **dict.fromkeys(
        "index_select index_add index_copy index_fill index_reduce gather scatter scatter_add scatter_reduce".split(), 2
    ),
    **dict.fromkeys(
        "index_add_ index_copy_ index_fill_ index_reduce_ scatter_ scatter_add_ scatter_reduce_".split(), 2
    ),
}
# Of one name twice: torch.nn.functional's takes the indices first.
_SHARED_OF: dict[Any, int] = {F.embedding: 0, F.embedding_bag: 0, torch.embedding: 1, torch.embedding_bag: 1}
_SHARED_NAMES = ("index", "indices", "input", "q")
# Functions that want the memory of the whole, or change it behind dispatch.
_MEMORY = frozenset(
    "apply_ map_ map2_ data_ptr untyped_storage storage set_ resize_ resize_as_ share_memory_ pin_memory".split()
)
# Random functions whose result is like their operand, and lies like it.
_LIKE = frozenset({torch.rand_like, torch.randn_like, torch.randint_like, torch.bernoulli, Tensor.bernoulli})


def call_function(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
            f"{_words(func)} wants the memory of one tensor, a DTensor's lies on all ranks; use x.local (this rank's "
            "part) or x.full()"
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


def _check_plain(
    cls: Any, func: Any, name: str, found: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Refuse the user's plain tensors that have dims, but for indices and probabilities."""
    writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    target: Any = kwargs.get("out", found[0] if writes else None)
    if _is_plain(cls, target):
        raise InputError(
            f"{_words(func)} writes a DTensor into a plain tensor of shape {tuple(target.shape)}; use x.full()"
        )
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
    """Whether a user would call it a plain tensor.

    Tensors of a trace are none, nor are wrappers of torch.func around a DTensor.
    """
    return type(x) in (Tensor, torch.nn.Parameter) and not isinstance(compat.unwrap_functorch(x), cls)


def _words(func: Any) -> str:
    """A function as the reader knows it: `torch.Tensor.add`, `torch.nn.functional.dropout`."""
    return resolve_name(func) or str(func)
