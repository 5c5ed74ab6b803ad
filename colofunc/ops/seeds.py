"""Where the seeds of calls come from, and the position in that stream.

Problem: a program with random operators needs a fresh seed per call, runs must repeat, and a run that was interrupted
must go on with the numbers it would have drawn. Idea: a seed is drawn from torch's default generator, or, inside
`with random(key)`, it is a pure function of the key and of how many seeds were drawn inside; the position in either
stream is a tree of tensors.

    with random(5):
        draw_seed(), draw_seed()        # the same two seeds whenever this is run
    saved = random_state()
    draw_seed()
    set_random_state(saved)             # the same seed again

Where several processes run one step, rank 0 decides: its seed is used by all.
"""

from __future__ import annotations

import random as python_random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from colofunc import compat
from colofunc.errors import InputError, near

MASK64 = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
# Rounds of SplitMix64's mix: (shift right, then multiply by).
ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, None))


def signed(z: int) -> int:
    """The int64 with the low 64 bits of z."""
    z &= MASK64
    return z - (1 << 64) if z >> 63 else z


def mix_int(z: int) -> int:
    """SplitMix64's mix of 64 unsigned bits."""
    for shift, factor in ROUNDS:
        z ^= z >> shift
        z = z * factor & MASK64 if factor is not None else z
    return z


def key_int(seed: int, site: int) -> int:
    """The stream of a call site, as an int64: mixed twice, so that neighbouring seeds and sites share nothing."""
    return signed(mix_int(mix_int(seed & MASK64) + (site + 1) * GAMMA & MASK64))


@attrs.define(eq=False)
class SeedStream:
    """The seeds of one `with random(key)`: number `drawn` is next."""

    key: int
    drawn: int = 0
    lock: Any = attrs.field(factory=Lock, repr=False)

    def next(self) -> int:
        with self.lock:
            self.drawn += 1
            return signed(mix_int(mix_int(self.key & MASK64) + self.drawn * GAMMA & MASK64))


_STREAM: ContextVar[SeedStream | None] = ContextVar("colofunc_random", default=None)


@contextmanager
def random(key: int | Tensor) -> Iterator[None]:
    """Inside, the seeds of staged steps follow from `key` and their order; torch's generator is left alone.

    `key`: an int, or an integer tensor (0-dim, or 1-dim of several words). The same key gives the same numbers again;
    an inner `random` has a stream of its own, after which the outer one goes on. It holds for this thread (context).
    """
    token = _STREAM.set(SeedStream(_key(key)))
    try:
        yield
    finally:
        _STREAM.reset(token)


def _key(key: Any) -> int:
    if isinstance(key, int) and not isinstance(key, bool):
        return key if -(1 << 63) <= key <= MASK64 else mix_int(key & MASK64) ^ mix_int(key >> 64 & MASK64)
    if (
        isinstance(key, Tensor)
        and key.dim() <= 1
        and key.numel()
        and not key.is_floating_point()
        and key.dtype != torch.bool
    ):
        words = [int(word) for word in key.reshape(-1).tolist()]
        mixed = words[0]
        for word in words[1:]:
            mixed = mix_int(mix_int(mixed & MASK64) + (word + 1) * GAMMA & MASK64)
        return mixed
    raise InputError(f"cf.random takes an int or a tensor of integers as its key, not {key!r}; write cf.random(0)")


def stream() -> SeedStream | None:
    """The innermost `with random(key)` around this call; None where torch's generator decides."""
    return _STREAM.get()


def draw_seed() -> Tensor:
    """A fresh 0-dim int64 seed, as one call of a staged step draws it."""
    current = _STREAM.get()
    with compat.no_function_modes():
        if current is not None:
            return torch.tensor(current.next(), dtype=torch.int64)
        return torch.randint(0, 1 << 62, (), dtype=torch.int64)


# ---- the position ----


def random_state() -> dict[str, Tensor]:
    """Where this process stands in its random numbers: torch's default CPU generator, Python's and NumPy's global ones
    (that data sets use), and the `with random(key)` around this call. Plain CPU tensors of fixed shapes, to be saved.
    """
    version, words, gauss = python_random.getstate()
    assert version == 3, "the state of Python's Mersenne Twister has version 3 since Python 3.2"
    numpy: Any = np.random.get_state(legacy=True)
    current = _STREAM.get()
    with compat.no_function_modes():
        return {
            "torch": torch.get_rng_state(),
            "python": torch.tensor(words, dtype=torch.int64),
            "numpy": torch.tensor([*map(int, numpy[1]), int(numpy[2]), int(numpy[3])], dtype=torch.int64),
            "gauss": torch.tensor([float("nan") if gauss is None else gauss, float(numpy[4])], dtype=torch.float64),
            "key": torch.tensor(0 if current is None else signed(current.key), dtype=torch.int64),
            "drawn": torch.tensor(-1 if current is None else current.drawn, dtype=torch.int64),
        }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Go back to where `random_state` was taken.

    A state from inside `with random(key)` wants one around this call too.
    """
    wanted = ("torch", "python", "numpy", "gauss", "key", "drawn")
    for name in wanted:
        if name not in state:
            raise InputError(f"a random state has {', '.join(wanted)}; {name!r} is missing{near(name, list(state))}")
    # Through lists, which tensors of every kind give.
    whole = {name: torch.tensor(torch.as_tensor(state[name]).tolist()) for name in wanted if name != "gauss"}
    gauss, cached = torch.as_tensor(state["gauss"]).tolist()
    drawn, current = int(whole["drawn"]), _STREAM.get()
    if drawn >= 0 and current is None:
        raise InputError(
            f"this random state was taken inside `with cf.random({int(whole['key'])})`; set it inside such a block, "
            "which then goes on"
        )
    torch.set_rng_state(whole["torch"].to(torch.uint8))
    python_random.setstate((3, tuple(whole["python"].tolist()), None if gauss != gauss else gauss))
    *words, position, has_gauss = whole["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(words, dtype=np.uint32), position, has_gauss, cached))
    if current is not None and drawn >= 0:
        current.key, current.drawn = int(whole["key"]), drawn
