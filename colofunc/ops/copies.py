"""Copies between tiers of memory, as operators of a program.

    to_host(x)           x's content in host memory                   to_device(x)     and back in the device's
    to_disk(x)           x's content on disk, from where `to_host` reads it
    put(into, x)         x written over a tensor of the host or the disk that is there already: state that has its place

Each has a `_start` form that gives a value which may be read only behind its `wait`, as collectives have: the copy runs
beside what stands between. `put_start` gives `into` itself, as it will be. Dims keep the order in which they lie, so
that every view of `x` is a view of its copy. Alone, outside a program, a tensor has one tier, and these are plain
copies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from colofunc.ops.define import define


def duplicate(x: Tensor) -> Tensor:
    """x in memory of its own, its dims in the order in which they lie."""
    return x.clone(memory_format=torch.preserve_format)


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.preserve_format)


def _put(into: Tensor, x: Tensor) -> None:
    into.copy_(x)


def _put_fake(into: Tensor, x: Tensor) -> None:
    return None


def _put_start(into: Tensor, x: Tensor) -> Tensor:
    return into.copy_(x)


def _put_start_fake(into: Tensor, x: Tensor) -> Tensor:
    return into


def _itself(x: Tensor) -> Tensor:
    return x


define("wait(Tensor(a) x) -> Tensor(a)", _itself, _itself, kind="layout")
for _name in ("to_host", "to_device", "to_disk"):
    define(f"{_name}(Tensor x) -> Tensor", duplicate, _like, kind="copy")
    define(f"{_name}_start(Tensor x) -> Tensor", duplicate, _like)
define("put(Tensor(a!) into, Tensor x) -> ()", _put, _put_fake, kind="copy")
define("put_start(Tensor(a!) into, Tensor x) -> Tensor(a!)", _put_start, _put_start_fake)
