"""check_pure: a step function does nothing but compute its outputs from its inputs.

What a step does beside that happens once, when it is traced, and never again; most of it the tracer refuses, some it
cannot see (a list that grows, a file that is written). Run twice on the same inputs, a pure function leaves them as
they are and gives the same again.

>>> seen = []
>>> check_pure(lambda x: seen.append(x.sum()) or x * len(seen), torch.ones(2))
Traceback (most recent call last):
colofunc.errors.CheckError: ...
"""

from __future__ import annotations

import random
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import numpy as np
import torch

from colofunc import compat
from colofunc.errors import CheckError
from colofunc.program.tracing.tree import walk, walk_keys
from colofunc.testing.check import FIRST_SEED, seeded
from colofunc.testing.trees import compare, plain_copy


def check_pure(step_fn: Callable[..., Any], *args: Any) -> None:
    """Run `step_fn(*args)` twice from the same seed. Raises CheckError that lists everything impure about it.

    Impure are: something outside that changed (a list grown, an attribute set, a captured tensor written or given a
    gradient), inputs that changed, other outputs the second time, draws from Python's or NumPy's generator, a changed
    default dtype or grad mode. Draws from torch's own default generator are allowed: a staged step keys them.
    """
    before, kept = _ambient(), plain_copy(args)
    with torch.random.fork_rng(devices=()):
        mine, world = plain_copy(args), snapshot(step_fn)
        first = plain_copy(seeded(FIRST_SEED, step_fn, *mine))
        found = changes(world, snapshot(step_fn))
        found += [f"{what} changed" for what, value in _ambient().items() if value != before[what]]
        found += _differences("input", mine, kept)
        second = seeded(FIRST_SEED, step_fn, *plain_copy(args))
    found += _differences("second call: out", second, first)
    if found:
        name = getattr(step_fn, "__name__", repr(step_fn))
        raise CheckError(
            f"{name} is not pure: {'; '.join(found)}. Try: pass what changes as an argument and return its new value"
        )


def _differences(where: str, got: Any, expected: Any) -> list[str]:
    """At most four leaves that differ, in words; written in place means other values or another shape."""
    a, b = list(walk(got, where)), list(walk(expected, where))
    if [keys for keys, _ in walk_keys(got)] != [keys for keys, _ in walk_keys(expected)]:
        return [f"{where} has another tree, {[path for path, _ in a]} against {[path for path, _ in b]}"]
    found = []
    for (path, x), (_, y) in zip(a, b, strict=True):
        try:
            compare(x, y, path, tolerance=0.0)
        except CheckError as error:
            found.append(str(error).split("\n", maxsplit=1)[0])
    return found[:4]


def _ambient() -> dict[str, Any]:
    """What a function could change around itself, by name."""
    numpy_state: list[Any] = []
    for part in np.random.get_state():
        numpy_state.append(part.tobytes() if isinstance(part, np.ndarray) else part)
    return {
        "the state of Python's random generator": random.getstate(),
        "the state of NumPy's random generator": tuple(numpy_state),
        "the default dtype": torch.get_default_dtype(),
        "the grad mode": torch.is_grad_enabled(),
    }


# ---- what a function holds ----
#
# Problem: a list that grows or an attribute that is set changes no output and no input, so only looking at the list
# tells. Idea: a snapshot of everything reachable from the function within a few steps, as (path in words -> what is
# there); two snapshots differ where the function has left something behind. Snapshots hold what they saw, so no
# identity is reused.
#
# >>> seen = []
# >>> before = snapshot(step)        # step appends to `seen`
# >>> changes(before, snapshot(step))
# ["the list seen has 1 items, before 0"]


DEPTH = 6
ATOMS = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)
OPAQUE = (type, types.ModuleType, types.BuiltinFunctionType)


@attrs.frozen(eq=False)
class ReachedObject:
    """One object: what it is called, its parts by name, the version of a tensor."""

    words: str
    thing: Any
    parts: Mapping[Any, Any]
    version: int = 0


def snapshot(fn: Callable[..., Any]) -> dict[str, ReachedObject]:
    """Everything that `fn` reaches without its arguments, by path."""
    found: dict[str, ReachedObject] = {}
    visited: set[int] = set()
    for name, thing in _outside(fn):
        _look(name, thing, DEPTH, found, visited)
    return found


def changes(before: Mapping[str, ReachedObject], after: Mapping[str, ReachedObject]) -> list[str]:
    """What differs, in words, at most four."""
    told = []
    for path, old in before.items():
        new = after.get(path)
        if new is None:
            continue  # its owner was given something else, and says so
        if new.thing is not old.thing and not _equal(new.thing, old.thing):
            told.append(f"{path} is another object, {_short(old.thing)} before and {_short(new.thing)} after")
        elif new.version != old.version:
            told.append(f"{old.words} {path} was written in place")
        elif isinstance(old.thing, (list, set, frozenset)) and len(old.parts) != len(new.parts):
            told.append(f"{old.words} {path} has {len(new.parts)} items, before {len(old.parts)}")
        else:
            told += _parts(path, old, new)
    return told[:4]


def _parts(path: str, old: ReachedObject, new: ReachedObject) -> list[str]:
    gone = [f"{old.words} {path} has lost {key!r}" for key in old.parts if key not in new.parts]
    come = [f"{old.words} {path} has got {key!r}" for key in new.parts if key not in old.parts]
    both = [key for key in old.parts if key in new.parts]
    other = [key for key in both if new.parts[key] is not old.parts[key] and not _equal(new.parts[key], old.parts[key])]
    return gone + come + [f"{old.words} {path} has another {key!r}" for key in other]


def _equal(a: Any, b: Any) -> bool:
    return isinstance(a, ATOMS) and type(a) is type(b) and a == b


def _short(thing: Any) -> str:
    return repr(thing) if isinstance(thing, ATOMS) else f"a {type(thing).__name__}"


def _outside(fn: Any) -> Iterator[tuple[str, Any]]:
    """(name, value) of closure variables, named globals, defaults, and the object of a bound method or a callable."""
    owner = getattr(fn, "__self__", None)
    if owner is not None and not isinstance(owner, types.ModuleType):
        yield "self", owner
    fn = getattr(fn, "__func__", fn)
    code = getattr(fn, "__code__", None)
    if code is None:
        yield "the function", fn
        return
    for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # a name that is assigned later
            yield name, None
    yield from ((name, fn.__globals__[name]) for name in code.co_names if name in fn.__globals__)
    yield from zip(
        code.co_varnames[code.co_argcount - len(fn.__defaults__ or ()) :], fn.__defaults__ or (), strict=False
    )


def _look(path: str, thing: Any, depth: int, found: dict[str, ReachedObject], visited: set[int]) -> None:
    if isinstance(thing, (*ATOMS, *OPAQUE)):
        found[path] = ReachedObject("the value", thing, {})
        return
    if id(thing) in visited or depth == 0:
        return
    visited.add(id(thing))
    if isinstance(thing, torch.Tensor):
        # The gradient that a backward pass leaves on a captured tensor is a part of it.
        parts = {"grad": thing.grad} if thing.is_leaf else {}
        found[path] = ReachedObject("the tensor", thing, parts, compat.version(thing))
        return
    if isinstance(thing, types.FunctionType):
        parts = dict(_outside(thing)) if "site-packages" not in thing.__code__.co_filename else {}
        found[path] = ReachedObject("the function", thing, {})
    else:
        words, parts = _contents(thing)
        found[path] = ReachedObject(words, thing, parts)
    for key, part in parts.items():
        name = key if isinstance(key, str) and not isinstance(thing, Mapping) else f"[{key!r}]"
        _look(f"{path}{name}" if name.startswith("[") else f"{path}.{name}", part, depth - 1, found, visited)


def _contents(thing: Any) -> tuple[str, dict[Any, Any]]:
    if isinstance(thing, dict):
        return "the dict", dict(thing)
    if isinstance(thing, (list, tuple)):
        return f"the {type(thing).__name__}", dict(enumerate(thing))
    if isinstance(thing, (set, frozenset)):
        return "the set", {id(item): item for item in thing}
    if isinstance(thing, torch.nn.Module):
        own = {k: v for k, v in vars(thing).items() if k not in ("_parameters", "_buffers", "_modules")}
        tensors = dict(thing.named_parameters(recurse=False)) | dict(thing.named_buffers(recurse=False))
        return "the module", {**own, **tensors, **dict(thing.named_children())}
    if attrs.has(type(thing)):
        return f"the {type(thing).__name__}", {f.name: getattr(thing, f.name, None) for f in attrs.fields(type(thing))}
    return f"the {type(thing).__name__}", dict(getattr(thing, "__dict__", {}))
