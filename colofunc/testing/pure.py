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
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from colofunc.errors import CheckError
from colofunc.program.tracing.tree import walk, walk_keys
from colofunc.testing.check import FIRST_SEED, seeded
from colofunc.testing.trees import compare, plain_copy
from colofunc.testing.world import changes, snapshot


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
        raise CheckError(f"{name} is not pure: {'; '.join(found)}. Try: pass what changes as an argument and return its new value")


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
    numpy_state: Any = np.random.get_state()
    return {
        "the state of Python's random generator": random.getstate(),
        "the state of NumPy's random generator": tuple(part.tobytes() if isinstance(part, np.ndarray) else part for part in numpy_state),
        "the default dtype": torch.get_default_dtype(),
        "the grad mode": torch.is_grad_enabled(),
    }
