"""Elixir's search: how many chunks have their optimizer state on the device, and how many blocks cache the others.

Problem: a byte of the device can hold a chunk with its optimizer state, which is then updated there, or be a block of a
cache (rCache) through which the parameters of all other chunks go. Idea: everything has a published rate, so the
seconds of each division are known: the cache replays a step (chunks forward, then backward) with Belady's rule and
counts what it has to load.

    divided(chunks=8, chunk_bytes=100, state_bytes=200, room_bytes=1000, rates=rates(1))      # (chunks on the device, blocks)

Source: Elixir (2212.05339): rates by the number of devices, replay of a step over equal blocks, profit of a byte here
or there.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log

import attrs

ADAM_BYTES = 4  # of a parameter that an Adam's rate, in parameters, is about


@attrs.frozen
class HostRates:
    """Bytes a second of copies, parameters a second of Adam, of one of the devices that share a host."""

    to_device: float
    to_host: float
    host_adam: float
    device_adam: float


def rates(n: int) -> HostRates:
    """As published for n devices together, a device's share of them."""
    return HostRates((16.3 * n + 8.7) * 1e9 / n, (15.8 * n + 2.3) * 1e9 / n, (1.66 * log(n) + 5.15) * 1e9 / n, 50e9)


def loads(steps: Sequence[Sequence[int]], blocks: int) -> int:
    """Chunks that a cache of so many blocks has to load: what is needed farthest ahead leaves.

    A step needs all its chunks at once.
    """
    cached, count = set[int](), 0
    for step, needed in enumerate(steps):
        missing = set(needed) - cached
        count += len(missing)
        cached |= missing

        def next_use(chunk: int, step: int = step) -> int:
            return next((later for later in range(step + 1, len(steps)) if chunk in steps[later]), len(steps))

        farthest_first = sorted(cached - set(needed), key=lambda chunk: (next_use(chunk), chunk), reverse=True)
        cached -= set(farthest_first[: max(0, len(cached) - blocks)])
    return count


def seconds(chunks: int, chunk_bytes: int, kept: int, blocks: int, rate: HostRates) -> float:
    """Of copies and updates in a step with `kept` of the chunks on the device and `blocks` for the others."""
    others, params = chunks - kept, chunk_bytes / ADAM_BYTES
    once = [[c] for c in range(others)]
    up = loads([*once, *once[::-1]], blocks) * chunk_bytes / rate.to_device
    return up + others * (chunk_bytes / rate.to_host + params / rate.host_adam) + kept * params / rate.device_adam


def divided(chunks: int, chunk_bytes: int, state_bytes: int, room_bytes: float, rate: HostRates) -> tuple[int, int]:
    """(chunks whose state lies on the device, blocks of the cache) that take least; (0, 0) where not even one block
    fits.
    """
    found = []
    for kept in range(chunks + 1):
        left = room_bytes - kept * (chunk_bytes + state_bytes)
        blocks = min(chunks - kept, int(left // chunk_bytes) if chunk_bytes else chunks)
        if left >= 0 and (blocks or kept == chunks):
            found.append((seconds(chunks, chunk_bytes, kept, blocks, rate), kept, blocks))
    return min(found)[1:] if found else (0, 0)
