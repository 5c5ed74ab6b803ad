"""Kernels of an operator for one kind of device, and which of them a call gets.

Problem: the quickest way to compute a call depends on the device, the dtype, sizes and options, and what it needs
beside its operands must be known when memory is planned. Idea: a kernel is a record that answers three questions about
a call without running it: may I (`guard`), how long (`cost_s`), with how much memory of its own (`workspace_bytes`). A
call gets the cheapest kernel whose guard agrees, else the operator's own implementation. No guard looks at values on
the device.

    Kernel("mylib.scan", "cuda", guard=lambda call: call["x"].dtype == torch.bfloat16, cost_s=..., workspace_bytes=..., fn=fast_scan)
    choose(table, call, rates)          # the cheapest, or None

Plugins give theirs through the hook `colofunc_kernels`; those of this project come the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from math import prod
from typing import Any

import attrs
import numpy as np
import torch

from colofunc.errors import ColofuncError, PluginError, plugin_error
from colofunc.ops.targets import overload

NARROW = (torch.float32, torch.float16, torch.bfloat16)
"""What kernels in Triton read as float32 without a loss."""
# Positions on the host: element i is first + i * step; the step of a single number is 0.
HostRange = tuple[int, int]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are kept in: at least float32."""
    return torch.promote_types(dtype, torch.float32)


@attrs.frozen
class Like:
    """A tensor of a call: its shape and dtype.

    `run`: of positions that the host knows, see `run_of`; None: they are the device's.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    run: HostRange | None = None

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@attrs.frozen
class KernelCall:
    """One call as guards see it: every argument of the operator by name, tensors as `Like`.

    `capability`: CUDA compute capability of the device; (0, 0) where there is none.
    """

    target: str
    arguments: tuple[tuple[str, Any], ...]
    capability: tuple[int, int] = (0, 0)

    def __getitem__(self, name: str) -> Any:
        for key, value in self.arguments:
            if key == name:
                return value
        raise KeyError(f"{self.target} has no argument {name!r}")


@attrs.frozen
class Rates:
    """What a device can do, for `cost_s`: operations a second of a dtype, bytes a second, seconds of a launch.

    attention_flops_per_s(kernel, elements of a head, mean number of keys of a row, backward); None where nothing is
    known of it.
    """

    flops_per_s: Callable[[torch.dtype], float]
    bytes_per_s: float
    launch_s: float
    attention_flops_per_s: Callable[[str, int, float, bool], float | None] = lambda kernel, head, keys, backward: None


@attrs.frozen(eq=False)
class Kernel:
    """A way to compute an operator on one kind of device.

    guard(call): whether it may. cost_s(call, rates): seconds on a device of these rates. workspace_bytes(call): device
    memory that it holds while it runs, beside operands and results. fn: takes the operator's arguments, all of them by
    position. `on_host`: arguments that it reads on the host where their values are known before the step runs (where a
    rank stands).
    """

    target: str
    device: str
    guard: Callable[[KernelCall], bool]
    cost_s: Callable[[KernelCall, Rates], float]
    workspace_bytes: Callable[[KernelCall], int]
    fn: Callable[..., Any]
    on_host: tuple[str, ...] = ()

    def accepts(self, call: KernelCall) -> bool:
        """What `guard` says. Raises PluginError where it fails, as do `seconds` and `workspace`."""
        try:
            return bool(self.guard(call))
        except ColofuncError:
            raise
        except Exception as error:
            raise self._fault("guard", "a guard that returns False for calls that it does not know", error) from error

    def seconds(self, call: KernelCall, rates: Rates) -> float:
        """What `cost_s` says."""
        try:
            return float(self.cost_s(call, rates))
        except ColofuncError:
            raise
        except Exception as error:
            raise self._fault("cost_s", "a number of seconds for every call that guard accepts", error) from error

    def workspace(self, call: KernelCall) -> int:
        """What `workspace_bytes` says."""
        try:
            return int(self.workspace_bytes(call))
        except ColofuncError:
            raise
        except Exception as error:
            raise self._fault("workspace_bytes", "a number of bytes, 0 where it needs none", error) from error

    def _fault(self, question: str, remedy: str, error: Exception) -> PluginError:
        given = getattr(self.fn, "__module__", type(self.fn).__module__)
        what = f"colofunc_kernels: {question} of the kernel for {self.target} on {self.device} from {given}"
        return plugin_error(what, remedy, error)


Table = Mapping[tuple[str, str], Sequence[Kernel]]


def anything(call: KernelCall) -> bool:
    """The guard of a kernel that takes every call."""
    return True


@attrs.frozen
class PlannedKernel:
    """What the plan counts for a call: the kernel's name, its seconds, and the memory of its own."""

    name: str
    seconds: float
    workspace_bytes: int


COPY, FUSED, IN_ONE_CALL = "copy", "compiled", "in one call"
"""Names of what is planned for a rearrangement that copies, for elementwise operators that a compiler fuses, and for
updates that others are called with: all take what their bytes take."""


@cache
def has_triton() -> bool:
    """Whether kernels that are written in Triton can be compiled: it comes with torch for CUDA."""
    return find_spec("triton") is not None


def on_card_of(x: torch.Tensor) -> AbstractContextManager[Any]:
    """Where a kernel in Triton that reads x is launched; in Triton's interpreter x lies on the host."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext()


def table_of(kernels: Iterable[Kernel]) -> Table:
    """(operator, device) -> its kernels, in the order in which they were given."""
    table: dict[tuple[str, str], list[Kernel]] = {}
    for kernel in kernels:
        table.setdefault((kernel.target, kernel.device), []).append(kernel)
    return {key: tuple(some) for key, some in table.items()}


def choose(candidates: Sequence[Kernel], call: KernelCall, rates: Rates | None = None) -> Kernel | None:
    """The cheapest of those whose guard agrees, the first of equals; None where none does."""
    able = [kernel for kernel in candidates if kernel.accepts(call)]
    given = A_DEVICE if rates is None else rates
    return min(able, key=lambda kernel: kernel.seconds(call, given), default=None)


def for_tensors(
    table: Table, target: str, args: Sequence[Any], options: Mapping[str, Any]
) -> tuple[Kernel, tuple[Any, ...]] | None:
    """The kernel of a call with real tensors, and all its arguments by position.

    None: there is none for where they lie.
    """
    device = args[0].device
    candidates = table.get((target, device.type))
    if candidates is None:
        return None
    every = bound(target, args, options)
    kernel = choose(candidates, describe(target, every, capability_at(device)))
    return None if kernel is None else (kernel, every)


@cache
def signature(target: str) -> tuple[tuple[str, Any], ...]:
    """The arguments of an operator: (name, default)."""
    return tuple((argument.name, argument.default_value) for argument in overload(target)._schema.arguments)


def bound(target: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """All arguments of a call by position, those that were left out with their defaults."""
    rest = signature(target)[len(args) :]
    return (*args, *(kwargs.get(name, default) for name, default in rest))


def describe(target: str, args: Sequence[Any], capability: tuple[int, int]) -> KernelCall:
    """A call with real tensors, all arguments by position."""
    names = (name for name, _ in signature(target))
    return KernelCall(target, tuple((name, _like(arg)) for name, arg in zip(names, args, strict=True)), capability)


def _like(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor):
        return Like(tuple(arg.shape), arg.dtype, run_of(arg))
    if isinstance(arg, (list, tuple)):
        return tuple(_like(item) for item in arg)
    return arg


def run_of(x: torch.Tensor) -> HostRange | None:
    """Integers on the host as a run; None for what lies on a device or is no such run. Waits for nothing."""
    if x.device.type != "cpu" or x.dtype != torch.int64 or x.dim() > 1 or x.numel() == 0:
        return None
    if type(x) is not torch.Tensor:  # a fake tensor has no values
        return None
    values = x.numpy().reshape(-1)  # whatever modes of torch are around the caller
    first = int(values[0])
    if len(values) == 1:
        return first, 0
    step = int(values[1]) - first
    return (first, step) if (np.diff(values) == step).all() else None


def capability_at(device: torch.device) -> tuple[int, int]:
    """CUDA compute capability of where tensors lie, of a device that is not there (fake tensors) an A100's; (0, 0) of
    others.
    """
    if device.type != "cuda":
        return 0, 0
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (8, 0)


def _a_rate(dtype: torch.dtype) -> float:
    return 312e12 if dtype in (torch.bfloat16, torch.float16) else 19.5e12


# Where no topology says what the device can do, kernels are compared by the figures of an A100: only their order
# counts.
A_DEVICE = Rates(_a_rate, 2.0e12, 5e-6)
