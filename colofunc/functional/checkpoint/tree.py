"""Trees as JSON: what a checkpoint says about the containers around its tensors. No type is ever imported from a file.

Dicts, lists and tuples come back as they were; so do None, numbers, strings, dtypes, arrays and quantized weights.
Named tuples, records and other mappings are written with the names of their fields and come back as dicts, or as what
`like` shows.

>>> tree, tensors = pack({"w": torch.ones(2), "steps": [3, 0.5]})
>>> list(tensors), unpack(tree, tensors)["steps"]
(['w'], [3, 0.5])
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import attrs
import numpy as np
import torch

from colofunc import untrusted
from colofunc.errors import CheckpointError, InputError, near
from colofunc.functional.checkpoint.files import dtype_name, dtype_of
from colofunc.ops.quantized import FORMATS, PARTS, Quantized
from colofunc.program.tracing.tree import container, join, rebuild
from colofunc.untrusted import Wrong

Json = Any


def pack(obj: Any, prefix: str = "") -> tuple[Json, dict[str, torch.Tensor]]:
    """(the tree as JSON, name -> tensor). Raises InputError naming the path of a value that cannot be written."""
    tensors: dict[str, torch.Tensor] = {}
    return _pack(obj, prefix, tensors), tensors


def _pack(obj: Any, name: str, tensors: dict[str, torch.Tensor]) -> Json:
    if isinstance(obj, torch.Size):
        obj = tuple(obj)
    if isinstance(obj, torch.Tensor):
        return {"tensor": _add(tensors, name or "value", obj)}
    if isinstance(obj, np.ndarray) and obj.dtype.kind in "biufc":
        return {"array": _add(tensors, name or "value", torch.from_numpy(np.ascontiguousarray(obj)).reshape(obj.shape))}
    simple = _pack_simple(obj)
    if simple is not None:
        return simple
    parts = container(obj)
    if parts is None:
        raise InputError(
            f"{name or 'the state'}: {type(obj).__name__} cannot be saved, because nothing could rebuild it without "
            "running code from the file; keep tensors, numbers, strings and containers of them in the state"
        )
    kind, keys, items, _ = parts
    children = [_pack(item, join(name, key), tensors) for key, item in zip(keys, items, strict=True)]
    if kind == "dict" and all(type(key) is str for key in keys):
        return {"dict": dict(zip(keys, children, strict=True))}
    if kind == "sequence":
        return {type(obj).__name__: children}
    said = [[_key(key, name), child] for key, child in zip(keys, children, strict=True)]
    return {"dict": said} if kind == "dict" else {"record": said, "type": type(obj).__name__}


def _add(tensors: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> str:
    """`{"a.b": x}` and `{"a": {"b": x}}` have the same dotted name; the second one is numbered."""
    found, k = name, 1
    while found in tensors:
        k += 1
        found = f"{name}#{k}"
    tensors[found] = x
    return found


def _pack_simple(obj: Any) -> Json | None:
    if isinstance(obj, np.generic):
        obj = obj.item()
    if obj is None or type(obj) in (bool, int, str):
        return {"value": obj}
    if type(obj) is float:
        return {"float": repr(obj)}  # exact, also for nan and inf
    if type(obj) is complex:
        return {"complex": [repr(obj.real), repr(obj.imag)]}
    if isinstance(obj, torch.dtype):
        return {"dtype": dtype_name(obj)}
    return None


def _key(key: Any, name: str) -> Json:
    simple = _pack_simple(key)
    if simple is None:
        raise InputError(f"{name or 'the state'}: the key {key!r} cannot be saved; use strings or numbers as keys")
    return simple


# ---- back ----

MOST_DEPTH = 200
_KINDS = ("tensor", "array", "list", "tuple", "dict", "record", "value", "float", "complex", "dtype")


def check_tree(tree: Json, tensors: Collection[str], depth: int = 0) -> None:
    """Raise Wrong where this is no tree that `pack` gives, or where it names a tensor that there is not."""
    kinds = [kind for kind in _KINDS if kind in tree] if type(tree) is dict else []
    if len(kinds) != 1 or depth > MOST_DEPTH:
        raise Wrong(f"the state holds {tree!r:.80} at depth {depth}")
    (kind,) = kinds
    said = tree[kind]
    if kind in ("tensor", "array") and (type(said) is not str or said not in tensors):
        raise Wrong(f"the state has the tensor {said!r:.80}, which is not described")
    if kind in ("float", "complex", "dtype"):
        _check_simple(tree)
    if kind == "value" and type(said) not in (bool, int, str, type(None)):
        raise Wrong(f"the state holds the value {said!r:.80}")
    if kind in ("list", "tuple"):
        for child in untrusted.check(tuple[Any, ...], said, kind):
            check_tree(child, tensors, depth + 1)
    if kind in ("dict", "record"):
        pairs = said.items() if type(said) is dict else untrusted.check(tuple[tuple[Any, Any], ...], said, kind)
        for key, child in pairs:
            if type(said) is not dict:
                _check_simple(key)
            check_tree(child, tensors, depth + 1)


def _check_simple(tree: Json) -> None:
    try:
        hash(_simple(tree))
    except (TypeError, ValueError, CheckpointError) as error:
        raise Wrong(f"the state holds {tree!r:.80}, which is no number, string or dtype") from error


def tensor_names(tree: Json) -> Iterator[str]:
    """Names of the tensors of a tree, in order."""
    for key in ("tensor", "array"):
        if key in tree:
            yield tree[key]
    for child in _children(tree):
        yield from tensor_names(child)


def _children(tree: Json) -> list[Json]:
    for key in ("list", "tuple"):
        if key in tree:
            return list(tree[key])
    return [child for _, child in _items(tree)]


def _items(tree: Json) -> list[tuple[Any, Json]]:
    said = tree.get("dict", tree.get("record", {}))
    if isinstance(said, dict):
        return list(said.items())
    return [(_simple(key), child) for key, child in said]


def _simple(tree: Json) -> Any:
    if "float" in tree:
        return float(tree["float"])
    if "complex" in tree:
        return complex(*map(float, tree["complex"]))
    if "dtype" in tree:
        return dtype_of(tree["dtype"])
    if "value" in tree:
        return tree["value"]
    raise CheckpointError(
        f"the index holds an entry that this version does not know: {sorted(tree)}; use a newer colofunc"
    )


def unpack(tree: Json, tensors: Mapping[str, Any]) -> Any:
    """The object again, with these leaves; quantized weights as such, other records and unknown mappings as dicts."""
    if "tensor" in tree:
        return tensors[tree["tensor"]]
    if "array" in tree:
        return tensors[tree["array"]].numpy()
    if "list" in tree or "tuple" in tree:
        made = [unpack(child, tensors) for child in _children(tree)]
        return made if "list" in tree else tuple(made)
    if tree.get("type") == Quantized.__name__ and "record" in tree:
        return _quantized({key: unpack(child, tensors) for key, child in _items(tree)})
    if "dict" in tree or "record" in tree:
        return {key: unpack(child, tensors) for key, child in _items(tree)}
    return _simple(tree)


def _quantized(fields: Mapping[str, Any]) -> Any:
    """A quantized weight of what was saved of one; a dict where a record of another kind has its name.

    A field with a default may be missing: files from before it was added do not have it.
    """
    known = {field.name for field in attrs.fields(Quantized)}
    needed = {field.name for field in attrs.fields(Quantized) if field.default is attrs.NOTHING}
    if not needed <= fields.keys() <= known:
        return dict(fields)
    weight = Quantized(**fields)
    present = [name for name in PARTS if isinstance(fields.get(name), torch.Tensor)]
    if weight.form not in FORMATS or sorted(FORMATS[weight.form].parts) != sorted(present):
        raise CheckpointError(
            f"the index holds a quantized weight of the format {weight.form!r} with {', '.join(present)}, which this "
            "version does not know; use a newer colofunc"
        )
    return weight


class Matched:
    """A saved tree walked beside an example: which leaves fit, and what is missing or unexpected."""

    def __init__(self, accept: Callable[[str, torch.Tensor, str], str | None]) -> None:
        self.accept = accept  # (saved name, example, path) -> what does not fit
        self.examples: dict[str, torch.Tensor] = {}  # saved name -> leaf of the example
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.wrong: list[str] = []

    def walk(self, tree: Json | None, like: Any, path: str = "") -> Any:
        """A recipe: function of name -> value that builds an object like `like`."""
        if isinstance(like, torch.Tensor):
            return self._tensor(tree, like, path)
        parts = None if _pack_simple(like) is not None or isinstance(like, np.ndarray) else container(like)
        if parts is None:
            return self._leaf(tree, like, path)
        kind, keys, items, context = parts
        saved = self._saved(tree, keys, path)
        if isinstance(like, Quantized) and saved:
            # A field that was added after the file was written.
            absent = {key: {"value": None} for key, item in zip(keys, items, strict=True) if item is None}
            saved = absent | saved
        made = [self.walk(saved.get(str(key)), item, join(path, key)) for key, item in zip(keys, items, strict=True)]
        return lambda values: rebuild(kind, type(like), keys, [make(values) for make in made], context)

    def _saved(self, tree: Json | None, keys: Any, path: str) -> dict[str, Json]:
        """Children by key; those that the example lacks are unexpected."""
        if tree is None:
            return {}
        sequence = tree.get("list", tree.get("tuple"))
        pairs = list(enumerate(sequence)) if sequence is not None else _items(tree)
        saved = {str(key): child for key, child in pairs}
        if not pairs and not ({"dict", "record", "list", "tuple"} & set(tree)):
            self.wrong.append(f"{path or 'the state'} was saved as a leaf and is a container of the example")
        wanted = {str(key) for key in keys}
        for key, child in saved.items():
            if key not in wanted:
                self.unexpected += [*tensor_names(child)] or [join(path, key)]
        return saved

    def _tensor(self, tree: Json | None, like: torch.Tensor, path: str) -> Any:
        name = None if tree is None else tree.get("tensor", tree.get("array"))
        if name is None:
            self.missing.append(path) if tree is None else self.wrong.append(f"{path} was saved as no tensor")
            return lambda values: like
        wrong = self.accept(name, like, path)
        if wrong is not None:
            self.wrong.append(wrong)
        self.examples[name] = like
        return lambda values: values[name]

    def _leaf(self, tree: Json | None, like: Any, path: str) -> Any:
        if tree is None:
            self.missing.append(path)
            return lambda values: like
        return lambda values: unpack(tree, values)

    def check(self, where: str, strict: bool) -> None:
        """Raise CheckpointError that lists what does not fit."""
        found = list(self.wrong)
        if strict:
            found += [f"missing {name!r}{near(name, self.unexpected, 'unexpected')}" for name in self.missing]
            found += [f"unexpected {name!r}" for name in self.unexpected]
        if found:
            more = f"; and {len(found) - 8} more" if len(found) > 8 else ""
            hint = ""
            if self.missing or self.unexpected:
                hint = "; strict=False keeps the example's values for what is missing"
            raise CheckpointError(f"{where} is not like the example: {'; '.join(found[:8])}{more}{hint}")
