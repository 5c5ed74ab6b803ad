"""Trees of arguments: nested containers, flattened to leaves with dotted names and rebuilt from them.

Problem: a step takes and returns dicts, lists, tuples, named tuples, dataclasses, attrs records and mapping-like
records (a tokenizer's batch, a model's output); its program takes and returns a flat list of tensors. Idea: `flatten`
describes containers as data and keeps everything that is no tensor as part of the tree, so that the tree is both the
recipe to rebuild and part of the cache key.

>>> leaves, tree = flatten({"w": torch.ones(2), "n": 3}, "state")
>>> tree.names()
('state.w',)
"""

from __future__ import annotations

import dataclasses
import enum
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import Any

import attrs
import numpy as np
import torch
from torch.utils import _pytree

from colofunc.errors import TraceError
from colofunc.ops.packed_rows import PackedRows
from colofunc.ops.quantized import Quantized


@attrs.frozen
class Tree:
    """One container (`kind`, `type`, `keys`, `children`), one tensor leaf, or one static leaf (`value`)."""

    kind: str  # "tensor" "static" "dict" "sequence" "namedtuple" "record" "mapping" "registered"
    name: str = ""
    type: Any = None
    keys: tuple[Any, ...] = ()
    children: tuple[Tree, ...] = ()
    value: Any = None
    content: Any = None  # of a static leaf that can be changed where it stands: what it held (see `held_by`)
    context: Any = attrs.field(default=None, eq=False)  # of a container registered with torch

    @cached_property
    def holds_tensors(self) -> bool:
        """Whether every child is a tensor, so that nobody has to look at them one by one."""
        return all(child.kind == "tensor" and child.type is None for child in self.children)

    def leaves(self) -> Iterator[Tree]:
        """Tensor leaves in order."""
        if self.kind == "tensor":
            yield self
        for child in self.children:
            yield from child.leaves()

    def statics(self) -> Iterator[Tree]:
        """Leaves that are no tensors, in order."""
        if self.kind == "static":
            yield self
        for child in self.children:
            yield from child.statics()

    def names(self) -> tuple[str, ...]:
        return tuple(leaf.name for leaf in self.leaves())

    def key(self) -> tuple[Any, ...]:
        """Hashable structure and static leaves, without names of container types that cannot be hashed."""
        if self.kind == "tensor":
            return ("tensor", self.name, self.type is float)  # a float promotes otherwise than a tensor
        if self.kind == "static":
            return ("static", self.name, type(self.value).__name__, _hashable(self.value), self.content)
        return (self.kind, self.type, self.keys, tuple(child.key() for child in self.children))


def _hashable(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return ("id", id(value))
    return value


def join(prefix: str, key: object) -> str:
    return f"{prefix}.{key}" if prefix else str(key)


def flatten(obj: Any, name: str = "") -> tuple[list[torch.Tensor], Tree]:
    """Tensor leaves of `obj` in order, and its tree. Floats and arrays count as tensors; the rest is static."""
    leaves: list[torch.Tensor] = []
    return leaves, _flatten(obj, name, leaves)


def _flatten(obj: Any, name: str, leaves: list[torch.Tensor]) -> Tree:
    if isinstance(obj, torch.Tensor):
        leaves.append(obj)
        return Tree("tensor", name)
    if obj is None or (isinstance(obj, (bool, int, str)) and not isinstance(obj, np.generic)):
        return Tree("static", name, value=obj)
    if isinstance(obj, (float, np.floating)):
        # A 0-dim float64 loses no digit; that it promotes as a Python float does is seen to by the trace
        # (`tracing/numbers.py`).
        leaves.append(torch.tensor(float(obj), dtype=torch.float64))
        return Tree("tensor", name, type=float)
    if isinstance(obj, np.ndarray) and obj.dtype.kind in "biufc":
        leaves.append(torch.as_tensor(obj))
        return Tree("tensor", name, type=np.ndarray)
    if isinstance(obj, np.generic):
        return Tree("static", name, value=obj.item())
    parts = container(obj)
    if parts is None:
        return Tree("static", name, value=obj, content=held_by(obj))
    kind, keys, items, context = parts
    children = tuple(_flatten(item, _child_name(obj, name, key), leaves) for key, item in zip(keys, items, strict=True))
    return Tree(kind, name, type(obj), tuple(keys), children, context=context)


def _child_name(obj: Any, name: str, key: object) -> str:
    """What an item of a container is called.

    The data of a quantized tensor has the tensor's own name, by which plans mean it.
    """
    return name if isinstance(obj, (Quantized, PackedRows)) and key == "data" else join(name, key)


def map_named(fn: Callable[[str, Any], Any], obj: Any, leaves: tuple[type, ...], name: str = "") -> Any:
    """A tree with `fn(name, leaf)` for every object of these types; the same object where nothing changes."""
    if isinstance(obj, leaves):
        return fn(name, obj)
    parts = container(obj)
    if parts is None:
        return obj
    kind, keys, items, context = parts
    made = [map_named(fn, item, leaves, join(name, key)) for key, item in zip(keys, items, strict=True)]
    if all(new is old for new, old in zip(made, items, strict=True)):
        return obj
    return rebuild(kind, type(obj), keys, made, context)


# Objects within static leaves are followed this far.
MOST_DEPTH = 4


def held_by(obj: Any, depth: int = MOST_DEPTH) -> Any:
    """What an object holds that a step may read and a caller may change between calls, as something that can be
    compared.

    None for what cannot be changed, and for what other parts of a trace look at (modules, tensors).

    >>> held_by(types.SimpleNamespace(scale=2.0))
    (('scale', 2.0, None),)
    """
    if isinstance(obj, (*_UNCHANGED, torch.Tensor, torch.nn.Module)) or depth == 0:
        return None
    if isinstance(obj, (set, bytearray)):
        return tuple(sorted(map(repr, obj)))
    if isinstance(obj, dict):
        pairs = list(obj.items())
    elif isinstance(obj, (list, tuple)) or (isinstance(obj, np.ndarray) and obj.dtype.hasobject):
        pairs = list(enumerate(obj))
    else:
        pairs = list(getattr(obj, "__dict__", {}).items())
        pairs += [(name, getattr(obj, name)) for name in _slots(type(obj)) if hasattr(obj, name)]
        if not pairs:
            return None
    return tuple((str(key), _compared(item), held_by(item, depth - 1)) for key, item in pairs)


def _compared(item: Any) -> Any:
    """A value that says whether an item is another one than before."""
    return item if isinstance(item, _UNCHANGED) else ("id", id(item))


_UNCHANGED = (
    bool, int, float, complex, str, bytes, type(None), type, enum.Enum, types.FunctionType, types.BuiltinFunctionType, types.ModuleType,
    torch.dtype, torch.device, torch.Generator, np.generic,
)  # fmt: skip


def _slots(cls: type) -> list[str]:
    names: list[str] = []
    for base in cls.__mro__:
        slots = base.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return [name for name in names if not name.startswith("__")]


def container(obj: Any) -> tuple[str, Sequence[Any], Sequence[Any], Any] | None:
    """(kind, keys, items, context) of a container; None for a leaf."""
    cls = type(obj)
    if cls is dict:
        return "dict", tuple(obj), tuple(obj.values()), None
    if isinstance(obj, tuple) and hasattr(cls, "_fields"):
        return "namedtuple", cls._fields, tuple(obj), None
    if cls in (list, tuple):
        return "sequence", range(len(obj)), tuple(obj), None
    if cls in _pytree.SUPPORTED_NODES and not isinstance(obj, Mapping):
        items, context = _pytree.SUPPORTED_NODES[cls].flatten_fn(obj)
        return "registered", range(len(items)), tuple(items), context
    if isinstance(obj, Mapping):
        return (
            "mapping",
            tuple(obj.keys()),
            tuple(obj.values()),
            obj.default_factory if isinstance(obj, defaultdict) else None,
        )
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        fields = tuple(f.name for f in dataclasses.fields(obj))
        return "record", fields, tuple(getattr(obj, f) for f in fields), None
    if attrs.has(cls):
        fields = tuple(f.name for f in attrs.fields(cls))
        return "record", fields, tuple(getattr(obj, f) for f in fields), None
    return None


def map_tensors(fn: Callable[[torch.Tensor], Any], obj: Any) -> Any:
    """`obj` with `fn(tensor)` for every tensor in it, all else as it is."""
    if isinstance(obj, torch.Tensor):
        return fn(obj)
    parts = container(obj)
    if parts is None:
        return obj
    kind, keys, items, context = parts
    return rebuild(kind, type(obj), keys, [map_tensors(fn, item) for item in items], context)


def walk(obj: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(name, leaf) of everything that is no container; names as those of `flatten`.

    >>> list(walk({"a": [1, 2]}, "out"))
    [('out.a.0', 1), ('out.a.1', 2)]
    """
    for keys, leaf in walk_keys(obj):
        name = path
        for key in keys:
            name = join(name, key)
        yield name, leaf


def walk_keys(obj: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The same with the keys that lead to a leaf, which tell `{"a.b": x}` from `{"a": {"b": x}}`."""
    parts = None if isinstance(obj, torch.Tensor) else container(obj)
    if parts is None:
        yield keys, obj
        return
    for key, item in zip(parts[1], parts[2], strict=True):
        yield from walk_keys(item, (*keys, key))


def unflatten(tree: Tree, leaves: Sequence[Any]) -> Any:
    """Rebuild the object that `flatten` took apart, with other leaves."""
    rest = iter(leaves)
    out = _build(tree, rest)
    if next(rest, None) is not None:
        raise TraceError(f"a tree with {len(tree.names())} leaves was given {len(leaves)}")
    return out


def _build(tree: Tree, leaves: Iterator[Any]) -> Any:
    if tree.kind == "tensor":
        return next(leaves)
    if tree.kind == "static":
        return tree.value
    if tree.holds_tensors:
        items = list(islice(leaves, len(tree.children)))
        if len(items) < len(tree.children):
            raise TraceError(f"{tree.name or 'a tree'} holds {len(tree.children)} tensors and was given {len(items)}")
    else:
        items = [_build(child, leaves) for child in tree.children]
    return rebuild(tree.kind, tree.type, tree.keys, items, tree.context)


def rebuild(kind: str, cls: Any, keys: Sequence[Any], items: Sequence[Any], context: Any = None) -> Any:
    """A container of type `cls` from what `container` said of one, with other items."""
    if kind == "dict":
        return dict(zip(keys, items, strict=True))
    if kind == "sequence":
        return cls(items)
    if kind == "namedtuple":
        return cls(*items)
    if kind == "registered":
        return _pytree.SUPPORTED_NODES[cls].unflatten_fn(items, context)
    if kind == "mapping":
        made = dict(zip(keys, items, strict=True))
        return cls(context, made) if issubclass(cls, defaultdict) else _mapping(cls, made)
    # Records are rebuilt field by field: their constructors may check or convert.
    out = object.__new__(cls)
    for field, item in zip(keys, items, strict=True):
        object.__setattr__(out, field, item)
    return out


def _mapping(cls: Any, items: dict[Any, Any]) -> Any:
    """A mapping of type `cls`: a dataclass-like one takes fields by name, the others take a dict."""
    return cls(**items) if dataclasses.is_dataclass(cls) and isinstance(cls, type) else cls(items)
