"""Lazy tensors: values that are not made yet, and know how.

Problem: a model or an optimizer state may be larger than any memory, and still it has to be named, planned and cast
before it lies in parts on many ranks. Idea: a tensor with a shape, a dtype and a `Source` in place of data. Operators
on lazy tensors alone give lazy tensors; together with data, or where Python asks for a number, the value is made.

    make(t: Tensor) -> Tensor                        the whole value; `t` itself where it has data
    make_parts(t, layout, mesh, ranks) -> [Tensor]   these ranks' parts, without the whole where the source can read parts
    token(t) -> int                                  equal on ranks on which it will be made equal
    lazy_tensor(shape, dtype, make, read=None)       make() -> the whole value; read(slices) -> that box of it
    zeros_like(t, dtype=None) -> Tensor              zeros: lazy where `t` is lazy, has no data, or is large

>>> w = lazy_tensor((4, 2), torch.float32, lambda: torch.arange(8.0).reshape(4, 2))
>>> make(w.to(torch.int64) * 2)[3].tolist()
[12, 14]

Values are made anew each time they are asked for, so nothing is held. A lazy tensor cannot be written to.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import attrs
import torch
from torch.utils import _pytree as pytree

from colofunc import compat
from colofunc.errors import InputError, TraceError
from colofunc.mesh import Mesh
from colofunc.spec.layout import Layout
from colofunc.spec.parts import holds, shared_parts
from colofunc.spec.regions import region_of
from colofunc.spec.transfer import part

Slices = tuple[slice, ...]
# Zeros of a tensor with data are lazy from this size on; smaller ones are easier to look at as what they are.
LARGE_BYTES = 1 << 20

aten = torch.ops.aten


class Source(Protocol):
    """Where the value of a lazy tensor comes from."""

    def make(self) -> torch.Tensor:
        """The whole value, in memory of its own."""

    def read(self, box: Slices) -> torch.Tensor | None:
        """A part of the value, one slice per dim; None where a part takes the whole."""

    def token(self) -> int:
        """A number that differs, in all likelihood, where the value does: between ranks with other seeds, say."""


@runtime_checkable
class PartSource(Source, Protocol):
    """One that gives the parts of ranks by itself, as where they are sent by other ranks."""

    def parts(self, layout: Layout, mesh: Mesh) -> list[torch.Tensor]:
        """The parts of the ranks in this process."""


@attrs.frozen(eq=False)
class GivenSource:
    """A value from functions of the caller: of a file, say."""

    whole: Callable[[], torch.Tensor]
    box: Callable[[Slices], torch.Tensor | None] | None = None

    def make(self) -> torch.Tensor:
        return self.whole()

    def read(self, box: Slices) -> torch.Tensor | None:
        return None if self.box is None else self.box(box)

    def token(self) -> int:
        return 0  # the caller answers for it


# Operators whose result at an index depends on their operand at this index only.
POINTWISE = {aten.clone.default, aten._to_copy.default, aten.mul.Tensor, aten.neg.default, aten.div.Tensor}


@attrs.frozen(eq=False)
class Applied:
    """Result `position` of an operator on lazy tensors."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    position: int

    def make(self) -> torch.Tensor:
        return self._run(make)

    def read(self, box: Slices) -> torch.Tensor | None:
        lazy = [x for x in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(x, LazyTensor)]
        if self.func not in POINTWISE or len(lazy) != 1:
            return None
        piece = lazy[0].source.read(box)
        return None if piece is None else self._run(lambda x: piece if isinstance(x, LazyTensor) else x)

    def token(self) -> int:
        lazy = [x.source.token() for x in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(x, LazyTensor)]
        return zlib.crc32(repr((str(self.func), self.position, lazy)).encode())

    def _run(self, value: Callable[[Any], Any]) -> torch.Tensor:
        args, kwargs = pytree.tree_map_only(torch.Tensor, value, (self.args, self.kwargs))
        with torch.no_grad():
            out = pytree.tree_leaves(self.func(*args, **kwargs))[self.position]
        # A view of a larger value would keep all of it.
        return out if out.untyped_storage().nbytes() <= out.numel() * out.itemsize else out.clone()


class LazyTensor(torch.Tensor):
    """A tensor without data. Made by `lazy_tensor`, `zeros_like` and `cf.lazy`."""

    source: Source
    __torch_function__ = compat.no_torch_function

    @staticmethod
    def __new__(cls, source: Source, like: torch.Tensor) -> LazyTensor:
        """`like`: shape, strides, offset and dtype."""
        self: Any = compat.wrapper_subclass(
            cls, like.shape, strides=like.stride(), storage_offset=like.storage_offset(), dtype=like.dtype, device="cpu"
        )
        self.source = source
        return self

    def __init__(self, *args: Any) -> None:
        """Nothing: Python also calls this with the arguments of `torch.Tensor(3)`, where a mode made a lazy tensor of
        it.
        """

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _dispatch(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"lazy({list(self.shape)}, {str(self.dtype).removeprefix('torch.')})"

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyTensor:
        if id(self) not in memo:
            copied = self.detach().clone().requires_grad_(self.requires_grad)
            memo[id(self)] = (
                torch.nn.Parameter(copied, self.requires_grad) if isinstance(self, torch.nn.Parameter) else copied
            )
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return make(self).requires_grad_(self.requires_grad).__reduce_ex__(protocol)

    # What torch does in C++ with the data itself.

    def tolist(self) -> Any:
        return make(self).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return make(self).numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        return make(self).__array__(dtype)

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, LazyTensor):
            raise InputError(
                f"a lazy tensor of shape {tuple(self.shape)} cannot be given data in place; put a new nn.Parameter in "
                "the module"
            )
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.source = value.source


def lazy_tensor(
    shape: Sequence[int],
    dtype: torch.dtype,
    make: Callable[[], torch.Tensor],
    read: Callable[[Slices], torch.Tensor | None] | None = None,
) -> LazyTensor:
    """A tensor whose value `make()` gives when it is asked for, and `read(slices)` a part of it, or None where it
    cannot.
    """
    return LazyTensor(GivenSource(make, read), torch.empty(tuple(shape), dtype=dtype, device="meta"))


def make(t: torch.Tensor) -> torch.Tensor:
    """The whole value; `t` itself where it has data."""
    if not isinstance(t, LazyTensor):
        return t
    with compat.disable_modes(), compat.no_function_modes(), torch.no_grad():
        return t.source.make()


def make_parts(t: torch.Tensor, layout: Layout, mesh: Mesh, ranks: Sequence[int]) -> list[torch.Tensor]:
    """The parts of several ranks, without the whole where the source can read parts.

    Each lies in memory of its own; ranks that hold the same part share it, and the whole is made at most once.
    """
    if isinstance(t, LazyTensor) and isinstance(t.source, PartSource):
        return t.source.parts(layout, mesh)
    whole: torch.Tensor | None = None

    def made(rank: int) -> torch.Tensor:
        nonlocal whole
        if not holds(layout.at, mesh, rank):
            return torch.empty(0, dtype=t.dtype)
        read = None if whole is not None else _read(t, box_of(layout, mesh, rank))
        if read is None:
            whole = make(t) if whole is None else whole
            cut = part(whole, layout, mesh, rank)
            read = cut if cut is whole and whole is not t else cut.clone(memory_format=torch.contiguous_format)
        return read.contiguous()

    return shared_parts(layout, mesh, ranks, made)


def _read(t: torch.Tensor, box: Slices | None) -> torch.Tensor | None:
    if not isinstance(t, LazyTensor) or box is None:
        return None
    with compat.disable_modes(), compat.no_function_modes(), torch.no_grad():
        return t.source.read(box)


def box_of(layout: Layout, mesh: Mesh, rank: int) -> Slices | None:
    """The range of every dim that `rank` holds; None where its part is no box of the whole."""
    if layout.is_padded or layout.pending:
        return None
    bounds = [span.bounds for span in region_of(layout, mesh, rank).spans]
    return None if None in bounds else tuple(slice(*ends) for ends in bounds if ends is not None)


def zeros_like(t: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Zeros of the shape of `t`: lazy where `t` is lazy, has no data, or is large. On a DTensor, a DTensor."""
    plain = type(t) is torch.Tensor or type(t) is torch.nn.Parameter
    if not isinstance(t, LazyTensor) and not (plain and (t.is_meta or t.numel() * t.itemsize >= LARGE_BYTES)):
        return torch.zeros_like(t, dtype=dtype)
    return _filled(torch.empty_like(t, dtype=dtype, device="meta"), 0)


def _filled(like: torch.Tensor, value: Any) -> LazyTensor:
    shape = tuple(like.shape)
    meta = torch.empty(shape, dtype=like.dtype, device="meta")
    dtype = meta.dtype  # under `testing.float64()` another one than was asked for

    def read(box: Slices) -> torch.Tensor:
        return torch.full([s.stop - s.start for s in box], value, dtype=dtype)

    return LazyTensor(GivenSource(lambda: torch.full(shape, value, dtype=dtype), read), meta)


# ---- operators on lazy tensors ----

# Operators that ask only for the shape of their operand, and what they fill the result with.
FILLS: dict[Any, Callable[..., Any]] = {
    aten.empty_like.default: lambda *args: 0,
    aten.zeros_like.default: lambda *args: 0,
    aten.ones_like.default: lambda *args: 1,
    aten.full_like.default: lambda like, value: value,
    aten.new_empty.default: lambda *args: 0,
    aten.new_zeros.default: lambda *args: 0,
    aten.new_ones.default: lambda *args: 1,
    aten.new_full.default: lambda like, size, value: value,
}


def without_data(x: torch.Tensor) -> torch.Tensor:
    """A meta tensor of the same geometry."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func is aten.detach.default:
        return LazyTensor(args[0].source, args[0])
    for schema, arg in zip(func._schema.arguments, args, strict=False):
        if schema.alias_info is not None and schema.alias_info.is_write and isinstance(arg, LazyTensor):
            raise TraceError(  # no TypeError: Python would make `x += 1` a new value
                f"{func} writes to a lazy tensor of shape {tuple(arg.shape)}; make a new one (x = x * 2), or place it "
                "with step.init first"
            )
    leaves = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    results = None
    if (
        all(isinstance(x, LazyTensor) or x.is_meta for x in leaves)
        and torch.Tag.nondeterministic_seeded not in func.tags
    ):
        results = _shapes(func, args, kwargs)
    if results is None:
        made, named = pytree.tree_map_only(LazyTensor, make, (args, kwargs))
        return func(*made, **named)
    flat, tree = pytree.tree_flatten(results)
    fill = FILLS.get(func)
    # Tensors of their own: what stands in the call may be given another value (`param.data = ...`).
    args, kwargs = pytree.tree_map_only(LazyTensor, lambda x: LazyTensor(x.source, x), (args, kwargs))
    out: list[Any] = []
    for place, result in enumerate(flat):
        if not isinstance(result, torch.Tensor):
            out.append(result)
        elif fill:
            out.append(_filled(result, fill(*args)))
        else:
            out.append(LazyTensor(Applied(func, args, kwargs, place), result))
    return pytree.tree_unflatten(out, tree)


def _shapes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the operator returns, without data; None where that takes data."""
    metas, named = pytree.tree_map_only(LazyTensor, without_data, (args, kwargs))
    if named.get("device") is not None:
        named["device"] = torch.device("meta")
    try:
        return func(*metas, **named)
    except (RuntimeError, NotImplementedError):  # its result depends on values
        return None
