"""Private names of torch, in one place: what each is for, and what happens where a torch version lacks it.

Problem: some things a tracer and a sharded tensor need have no public name in torch. Idea: nothing else in colofunc
imports a private torch name; here each one has a function with a plain meaning and a fallback.

>>> in_backward()
False
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils import _python_dispatch

__all__ = [
    "DataDependentOutputException", "DynamicOutputShapeException", "FakeTensor", "FakeTensorMode", "TorchDispatchMode",
]  # fmt: skip

TorchDispatchMode = _python_dispatch.TorchDispatchMode
# A tensor with a shape, a dtype and no storage: torch's documented way to write a wrapper subclass.
wrapper_subclass: Any = torch.Tensor._make_wrapper_subclass


def fake_mode() -> FakeTensorMode:
    """A mode in which tensors have shapes and no data."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def quiet_fake_errors() -> Iterator[None]:
    """Torch logs the traceback of an operator that refuses its operands; the exception alone is enough."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def disable_modes() -> AbstractContextManager[Any]:
    """Run operators on real tensors although dispatch modes are active."""
    return _python_dispatch._disable_current_modes()


def no_function_modes() -> AbstractContextManager[Any]:
    """Torch function modes and `__torch_function__` do not see what runs inside."""
    disable: Any = torch._C.DisableTorchFunction
    return disable()


def no_dispatch() -> AbstractContextManager[Any]:
    """Operators reach their kernels although an operand is a Python tensor; for those that change only metadata."""
    disable: Any = torch._C._DisableTorchDispatch
    return disable()


def in_backward() -> bool:
    """Whether an autograd graph task runs in this thread."""
    return int(torch._C._current_graph_task_id()) != -1


_current_node = getattr(torch._C, "_current_autograd_node", lambda: None)
_peek_sequence = getattr(torch.autograd, "_get_sequence_nr", None)


def backward_sequence() -> int:
    """Sequence number of the autograd node that runs now; -1 when none does or torch cannot say."""
    node = _current_node()
    if node is None:
        return -1
    number = getattr(node, "_sequence_nr", None)
    return -1 if number is None else int(number())


def forward_sequence() -> int:
    """Sequence number of the autograd node made last; -1 when torch cannot say."""
    return -1 if _peek_sequence is None else int(_peek_sequence()) - 1


def unwrap_functorch(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor inside the wrappers of `torch.func` transforms."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def saved_tensor_hooks() -> tuple[Any, Any] | None:
    """The saved-tensor hooks that autograd would use now, None when there are none."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return None if top is None else top(False)


def composite_kernel(func: Any) -> bool:
    """Whether `func` is defined by other operators for every device (CompositeImplicitAutograd).

    Torch's Python decompositions are registered under the same key and do not count: the operator stays whole.
    """
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


def run_composite(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the device-independent kernel of `func`: the implicit one, else the explicit one."""
    key = torch._C.DispatchKey
    chosen = key.CompositeImplicitAutograd if composite_kernel(func) else key.CompositeExplicitAutograd
    if not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), chosen):
        raise NotImplementedError(f"{func} has no kernel in terms of other operators")
    return func._op_dk(chosen, *args, **kwargs)


@contextmanager
def identity_saved_hooks() -> Iterator[None]:
    """Inside, autograd keeps what it saves as it is, whatever hooks stand outside (activation checkpointing)."""
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        yield


def _strided() -> Any:
    from torch.distributed.tensor import placement_types  # half a second

    return getattr(placement_types, "_StridedShard", None)


def strided_shard(dim: int, split_factor: int) -> Any:
    """torch's placement that splits each of `split_factor` blocks of a dim; None where torch has none."""
    strided = _strided()
    return None if strided is None else strided(dim, split_factor=split_factor)


def strided_factor(placement: Any) -> int | None:
    """The split factor of a strided shard, None for every other placement."""
    strided = _strided()
    return int(placement.split_factor) if strided is not None and isinstance(placement, strided) else None


def storage_key(tensor: torch.Tensor) -> int:
    """A number that is equal for tensors that share memory, tensors without data (`meta`) included."""
    return int(tensor.untyped_storage()._cdata)


def init_optimizer_group(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """Let a `torch.optim` optimizer make the state that it makes before its first step, for one parameter group."""
    init: Any = optimizer._init_group  # type: ignore[attr-defined]
    # It appends to one list per kind of state; how many is the class's own affair.
    init(group, *([] for _ in list(inspect.signature(init).parameters)[1:]))
