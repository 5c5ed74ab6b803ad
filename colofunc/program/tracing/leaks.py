"""Leaks: traced tensors that the step kept outside, found when the trace ends.

Problem: `losses.append(loss)` in a step appends once, when the step is traced, a tensor without data; the user meets it
much later, far from the line. Idea: the recorder has a weak reference to every tensor that it made. After the trace,
when our own references are gone, one that is alive is held by the user's code: an error that names the tensor, the line
that made it and what holds it. (Autograd graphs may form cycles: these are collected before anything is called a leak.)

    def step(x):
        seen.append(x.sum())     # TraceError: the step keeps a tensor of shape () made at train.py:2 in step, in a list

Libraries keep tables of positions in attributes of their modules. Of a model's modules such attributes are put back as
they were, with a warning if what was kept depends on the step's inputs. Of other modules such a leak is a warning: the
program is right, and whoever reads the attribute afterwards gets an error that says what it is. A function under
`functools.lru_cache` remembers traced results, too; a cache may forget at any time, so it is emptied.
"""

from __future__ import annotations

import functools
import gc
import types
import warnings
from typing import Any

import torch

from colofunc import compat
from colofunc.errors import TraceError
from colofunc.program.tracing.module_tensors import put_back
from colofunc.program.tracing.record import Recorder

KINDS: dict[Any, str] = {
    list: "a list",
    tuple: "a tuple",
    set: "a set",
    types.CellType: "a variable of an outer function",
}
ADVICE = (
    "a step runs once, when it is traced, so this would never change again: return the tensor from the step instead"
)


def refuse_leaks(rec: Recorder) -> None:
    """Raise TraceError if traced tensors outlive the trace; warn where only modules hold them."""
    if not any(ref() is not None for ref in rec.made):
        return
    gc.collect()
    if _empty_caches(_alive(rec)):
        gc.collect()
    alive = _alive(rec)
    ours = {id(alive)}  # and no closure here may hold a tensor: its cell would be one more holder
    in_modules = []
    for tensor in alive:
        for where, in_module in _holders(tensor, ours):
            if not in_module:
                raise TraceError(f"the step keeps {_named(rec, tensor)} in {where}; {ADVICE}")
            in_modules.append((tensor, where))
    if in_modules:
        tensor, where = in_modules[0]
        warnings.warn(f"the step keeps {_named(rec, tensor)} in {where}; {ADVICE}", stacklevel=2)


def _alive(rec: Recorder) -> list[torch.Tensor]:
    found = [ref() for ref in rec.made]
    return [tensor for tensor in found if tensor is not None]


def _empty_caches(tensors: list[torch.Tensor]) -> bool:
    """Empty every `functools.lru_cache` that remembers one of the tensors, alone or in a list.

    Whether there was one.
    """
    emptied = False
    held: list[Any] = list(tensors)
    # A result lies in the cache, in a dict of the cache, or in a list in one of these.
    for _ in range(3):
        holders = gc.get_referrers(*held) if held else []
        for holder in holders:
            if isinstance(holder, functools._lru_cache_wrapper):
                holder.cache_clear()
                emptied = True
        held = [holder for holder in holders if isinstance(holder, (list, tuple, dict)) and holder is not held]
    return emptied


def put_back_attributes(rec: Recorder) -> list[str]:
    """Take what the trace put into attributes of models out again. In words: those tensors that are no mere tables."""
    words = []
    for kept in rec.where.kept:
        for attribute, tensor in put_back(kept):
            traced = compat.unwrap_functorch(tensor)
            is_table = rec.values[rec.cell(traced).vid].device_free
            if not is_table:
                words.append(
                    f"{_named(rec, traced)} in attribute {attribute!r} of a module {type(kept.module).__name__}"
                )
    return words


def warn_of_put_back(words: list[str]) -> None:
    if words:
        warnings.warn(
            f"the step keeps {words[0]}, which is put back as it was before the trace; {ADVICE}", stacklevel=2
        )


def _holders(tensor: torch.Tensor, ours: set[int]) -> list[tuple[str, bool]]:
    """What in Python refers to a tensor, in words, and whether that is a module.

    Autograd's own references are no objects.
    """
    found = []
    for holder in gc.get_referrers(tensor):
        if id(holder) in ours or isinstance(holder, types.FrameType):
            continue
        if isinstance(holder, dict):
            found.append(_of_dict(holder, {id(value): key for key, value in holder.items()}.get(id(tensor))))
        elif isinstance(holder, torch.nn.Module):
            found.append((f"an attribute of a module {type(holder).__name__}", True))
        else:
            words = next(
                (words for kind, words in KINDS.items() if isinstance(holder, kind)), f"a {type(holder).__name__}"
            )
            module = _module_around(holder) if isinstance(holder, (list, tuple)) else None
            found.append((words, False) if module is None else (f"{words} of a module {type(module).__name__}", True))
    return found


def _module_around(holder: Any) -> torch.nn.Module | None:
    """The module that has a container as its attribute (recurrent layers keep their weights in a list as well)."""
    for owner in gc.get_referrers(holder):
        above = [owner] if not isinstance(owner, dict) else gc.get_referrers(owner)
        for module in above:
            if isinstance(module, torch.nn.Module):
                return module
    return None


def _of_dict(holder: dict[Any, Any], key: Any) -> tuple[str, bool]:
    """A dict is a namespace (of a module file, of an object, of an nn.Module's buffers) or a plain dict."""
    if holder.get("__name__") is not None and "__builtins__" in holder:
        return f"the global {key!r} of {holder['__name__']}", False
    for owner in gc.get_referrers(holder):
        if isinstance(owner, torch.nn.Module):
            return f"attribute {key!r} of a module {type(owner).__name__}", True
        if getattr(owner, "__dict__", None) is holder:
            return f"attribute {key!r} of a {type(owner).__name__}", False
        if isinstance(owner, dict) and (owner.get("_buffers") is holder or owner.get("_parameters") is holder):
            above = [o for o in gc.get_referrers(owner) if isinstance(o, torch.nn.Module)]
            if above:
                return f"{key!r} of a module {type(above[0]).__name__}", True
    return f"a dict, under {key!r}", False


def _named(rec: Recorder, tensor: torch.Tensor) -> str:
    cell = rec.cell(tensor)
    value = rec.values[cell.vid]
    node = rec.producer.get(cell.vid)
    made = f"(made at {node.line})" if node is not None and node.line else ""
    return " ".join(
        ["a tensor", *([repr(value.name)] if value.name else []), f"of shape {tuple(tensor.shape)}", made]
    ).rstrip()
