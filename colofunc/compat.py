"""Private names of torch, in one place: what each is for, and what happens where a torch version lacks it.

Problem: some things a tracer and a sharded tensor need have no public name in torch. Idea: nothing else in colofunc
imports a private torch name; here each one has a function with a plain meaning and a fallback. The few that nothing can
stand in for (fake tensors, dispatch modes and how to leave them, wrapper subclasses) are used as they are: a torch
without them fails here, when it is imported, and `tests/test_compat.py` names them.

>>> in_backward()
False
"""

from __future__ import annotations

import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import cache, cached_property, partial
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
import torch.fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributed import distributed_c10d
from torch.multiprocessing.reductions import StorageWeakRef
from torch.torch_version import TorchVersion
from torch.utils import _python_dispatch

__all__ = [
    "DataDependentOutputException", "DynamicOutputShapeException", "FakeTensor", "FakeTensorMode", "TorchDispatchMode",
]  # fmt: skip

TorchDispatchMode = _python_dispatch.TorchDispatchMode
# A tensor with a shape, a dtype and no storage: torch's documented way to write a wrapper subclass.
wrapper_subclass: Any = torch.Tensor._make_wrapper_subclass


class _FakeMode(FakeTensorMode):
    """Asks once whether there is a card.

    Torch asks at every entry, which takes 40 µs where the driver's library is asked (Lightning).
    """

    @cached_property
    def avoid_device_init(self) -> bool:
        return bool(super().avoid_device_init)


def fake_mode() -> FakeTensorMode:
    """A mode in which tensors have shapes and no data."""
    return _FakeMode(allow_non_fake_inputs=True)


_OF_THREAD = threading.local()


def fake_mode_of_thread() -> FakeTensorMode:
    """The same, one for all calls of a thread: a new mode formats the whole stack, a millisecond where that is deep."""
    mode: FakeTensorMode | None = getattr(_OF_THREAD, "mode", None)
    if mode is None:
        mode = _OF_THREAD.mode = fake_mode()
    return mode


@contextmanager
def quiet_fake_errors() -> Iterator[None]:
    """Torch logs the traceback of an operator that refuses its operands; the exception alone is enough."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


_disable_modes: Any = _python_dispatch._disable_current_modes
_disable_functions: Any = torch._C.DisableTorchFunction
_disable_dispatch: Any = torch._C._DisableTorchDispatch


def disable_modes() -> AbstractContextManager[Any]:
    """Run operators on real tensors although dispatch modes are active."""
    return _disable_modes()


def bare_call(op: Any) -> Callable[..., Any]:
    """What an overload of an operator calls first: a third of a microsecond less than to call the overload."""
    bare: Callable[..., Any] = getattr(op, "_op", op)
    return bare


def no_function_modes() -> AbstractContextManager[Any]:
    """Torch function modes and `__torch_function__` do not see what runs inside."""
    return _disable_functions()


def no_dispatch() -> AbstractContextManager[Any]:
    """Operators reach their kernels although an operand is a Python tensor; for those that change only metadata."""
    return _disable_dispatch()


# As `__torch_function__` of a subclass: torch functions treat it like a plain tensor, and do not wrap what they return.
no_torch_function: Any = torch._C._disabled_torch_function_impl


def parametrized_weights() -> dict[tuple[int, str], Any]:
    """(id of a module, name) -> the weight that `torch.nn.utils.parametrize.cached()` has computed and kept."""
    kept: dict[tuple[int, str], Any] = getattr(torch.nn.utils.parametrize, "_cache", {})
    return kept


# What `torch.no_grad` and its kin call, and torch function modes see.
set_gradients: Any = torch._C._set_grad_enabled

_current_node = getattr(torch._C, "_current_autograd_node", lambda: None)
_graph_task = getattr(torch._C, "_current_graph_task_id", None)
_peek_sequence = getattr(torch.autograd, "_get_sequence_nr", None)


def in_backward() -> bool:
    """Whether an autograd graph task runs in this thread."""
    return _current_node() is not None if _graph_task is None else int(_graph_task()) != -1


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


_functorch = getattr(torch._C, "_functorch", None)


def unwrap_functorch(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor inside the wrappers of `torch.func` transforms; the tensor itself when torch cannot say."""
    while _functorch is not None and _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def functorch_gradients() -> int:
    """How many gradients of `torch.func` are being taken, one inside the other; 0 when torch cannot say."""
    if _functorch is None:
        return 0
    running = _functorch.get_interpreter_stack() or ()
    return sum(each.key() == _functorch.TransformType.Grad for each in running)


def in_forward_mode() -> bool:
    """Whether forward-mode derivatives (`torch.func.jvp`, `jacfwd`, `hessian`) are being taken.

    False when torch cannot say.
    """
    return int(getattr(torch.autograd.forward_ad, "_current_level", -1)) >= 0


_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def saved_tensor_hooks() -> tuple[Any, Any] | None:
    """The saved-tensor hooks that autograd would use now, None when there are none or torch cannot say."""
    return None if _top_hooks is None else _top_hooks(False)


def under_checkpoint() -> bool:
    """Whether what runs is inside `torch.utils.checkpoint`, by the hooks that it sets."""
    hooks = saved_tensor_hooks()
    return hooks is not None and str(getattr(hooks[0], "__module__", "")) == "torch.utils.checkpoint"


_has_kernel = getattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", None)


def composite_kernel(func: Any) -> bool:
    """Whether `func` is defined by other operators for every device (CompositeImplicitAutograd).

    Torch's Python decompositions are registered under the same key and do not count: the operator stays whole.
    """
    return _kernel_exists(func, torch._C.DispatchKey.CompositeImplicitAutograd)


def _kernel_exists(func: Any, key: Any) -> bool:
    """The public method also counts Python decompositions; `py_kernels` has those."""
    if _has_kernel is not None:
        return bool(_has_kernel(func.name(), key.name))
    return func.has_kernel_for_dispatch_key(key) and key not in getattr(func, "py_kernels", {})


def run_composite(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the device-independent kernel of `func`: the implicit one, else the explicit one."""
    key = torch._C.DispatchKey
    chosen = key.CompositeImplicitAutograd if composite_kernel(func) else key.CompositeExplicitAutograd
    if not _kernel_exists(func, chosen):
        raise NotImplementedError(f"{func} has no kernel in terms of other operators")
    run = getattr(func, "_op_dk", None)
    if run is not None:
        return run(chosen, *args, **kwargs)
    done = func.decompose(*args, **kwargs)  # public, for the implicit kernel only
    if done is NotImplemented:
        raise NotImplementedError(f"this torch cannot run the explicit composite kernel of {func}")
    return done


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


def undefine(library: torch.library.Library) -> bool:
    """Take back what a library has registered, so that its operators' names are free for other signatures; whether that
    can be.

    `torch.library.custom_op` does the same where a function is decorated again; there is no public way to it.
    """
    destroy = getattr(library, "_destroy", None)
    if destroy is not None:
        destroy()
    return destroy is not None


def storage_key(tensor: torch.Tensor) -> int:
    """A number that is equal for tensors that share memory, tensors without data (`meta`) included."""
    storage = tensor.untyped_storage()
    key = getattr(storage, "_cdata", None)
    return int(StorageWeakRef(storage).cdata if key is None else key)


def is_held_alone(tensor: torch.Tensor) -> bool:
    """Whether no other tensor holds the memory of one, nor anything in torch that is under way.

    False where torch does not say.
    """
    count = getattr(torch._C, "_storage_Use_Count", None)
    if count is None or type(tensor) is not torch.Tensor:
        return False
    storage = tensor.untyped_storage()
    return int(count(storage._cdata)) == 2  # by the tensor and by `storage`


def compile_graph(graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor], compiler: str) -> Callable[..., Any]:
    """A graph without gradients, compiled for inputs of these shapes, strides and devices by a backend of
    `torch.compile`.

    Not by `torch.compile` itself, which would read Python code that was written from the graph, and ask about it at
    every call.
    """
    backend: Any = torch._dynamo.lookup_backend(compiler)
    on_cpu = all(x.device.type == "cpu" for x in inputs)
    options = {"config_patches": dict(_ON_CPU)} if compiler == "inductor" and on_cpu else {}
    with torch.no_grad():
        compiled: Callable[..., Any] = backend(graph, list(inputs), **options)
    return compiled


def uncompiled() -> AbstractContextManager[Any]:
    """Inside, what `torch.compile` has made runs as the Python that it was made from, which is what a trace wants to
    see.

    Whoever has compiled something has loaded its module; nobody else waits seconds for that.
    """
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


# Settings of inductor for graphs on a CPU. On its own account it turns all convolutions there to channels-last. They
# gain a fifth by it, but what it writes for a group norm then reads memory with strides and takes several times as long
# (bench/compiled.py). What is read more than once it computes again for every reader, up to so many operations: `erf`
# is not on its list of dear ones, so a GELU in front of a layer norm was computed five times a step. 8 is least for the
# perceptrons there, and no other model is slower.
_ON_CPU = {"layout_optimization": False, "realize_opcount_threshold": 8}


def init_optimizer_group(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """Let a `torch.optim` optimizer make the state that it makes before its first step, for one parameter group.

    `_init_group` is a habit of torch's own classes. Another class takes a step with zeros everywhere instead, which
    leaves moments as they are before the first one; the parameters of the group are overwritten.
    """
    init: Any = getattr(optimizer, "_init_group", None)
    if init is not None:
        # It appends to one list per kind of state; how many is the class's own affair.
        init(group, *([] for _ in list(inspect.signature(init).parameters)[1:]))
        return
    with torch.no_grad():
        for p in group["params"]:
            p.zero_()
            p.grad = torch.zeros_like(p)
    optimizer.step()


def gradient_hooks(tensor: torch.Tensor) -> dict[int, Any]:
    """What `register_hook` was given for a tensor, in order, by the id of its handle; nothing when torch cannot say."""
    return dict(getattr(tensor, "_backward_hooks", None) or {})


def all_gradient_hooks(tensors: Sequence[torch.Tensor]) -> dict[int, tuple[Any, ...]]:
    """Position -> the gradient hooks of each of many tensors that has any."""
    with torch._C.DisableTorchFunctionSubclass():  # else a class of tensors is asked for the attribute
        held = [getattr(tensor, "_backward_hooks", None) for tensor in tensors]
    return {position: tuple(hooks.values()) for position, hooks in enumerate(held) if hooks}


_MODULE_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_MODULE, _OF_TENSOR = attrgetter(*_MODULE_HOOKS), attrgetter("_backward_hooks")


def without_hooks(modules: Sequence[torch.nn.Module], tensors: Sequence[torch.Tensor]) -> bool:
    """Whether certainly nothing hangs on any of these; quicker than to look for what does.

    False where torch cannot say.
    """
    try:
        if any(chain.from_iterable(map(_OF_MODULE, modules))):
            return False
        with torch._C.DisableTorchFunctionSubclass():
            return not any(map(_OF_TENSOR, tensors))
    except AttributeError:
        return False


def module_hooks(module: torch.nn.Module) -> tuple[tuple[Any, ...], ...]:
    """What a module runs around its forward and backward, in order; nothing where torch keeps it otherwise."""
    around = [getattr(module, kind, None) for kind in _MODULE_HOOKS]
    if not any(around):
        return ()
    return tuple((kind, *hooks.values()) for kind, hooks in enumerate(around) if hooks)


def accumulation_hooks(tensor: torch.Tensor) -> list[Any]:
    """What `register_post_accumulate_grad_hook` was given for a tensor; nothing when torch cannot say."""
    return list((getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values())


def view_base(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that autograd takes this one for a view of; None for a tensor of its own, or when torch cannot say."""
    base: torch.Tensor | None = getattr(tensor, "_base", None)
    return base


def version(tensor: torch.Tensor) -> int:
    """How often a tensor's memory has been written to in place; 0 for ever where torch does not count."""
    try:
        return int(getattr(tensor, "_version", 0))
    except RuntimeError:  # tensors of inference mode are not counted
        return 0


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """`version` of each; one attribute each where torch counts all of them."""
    try:
        return [tensor._version for tensor in tensors]
    except (AttributeError, RuntimeError):
        return [version(tensor) for tensor in tensors]


def children(module: torch.nn.Module) -> tuple[torch.nn.Module | None, ...]:
    """The modules right below one, by name.

    `module.children()` where torch keeps them otherwise, which takes longer.
    """
    known = getattr(module, "_modules", None)
    return tuple(module.children()) if known is None else tuple(known.values())


def is_training(module: torch.nn.Module) -> bool:
    """Whether a module is in train mode. A frozen module of TorchScript has lost its mode."""
    return bool(getattr(module, "training", False))


def all_training(modules: Sequence[torch.nn.Module]) -> list[bool]:
    """`training` of each; one attribute each where all have it."""
    try:
        return [module.training for module in modules]
    except AttributeError:
        return [is_training(module) for module in modules]


def all_children(modules: Sequence[torch.nn.Module]) -> list[tuple[torch.nn.Module | None, ...]]:
    """`children` of each; one attribute each where torch keeps them by name."""
    try:
        return [tuple(module._modules.values()) for module in modules]
    except AttributeError:
        return [children(module) for module in modules]


def group_store(answer_s: float) -> Any:
    """The store that the default process group was made with, of which each request may take so long.

    None where there is none.
    """
    find = getattr(distributed_c10d, "_get_default_store", None)
    store = None if find is None else find()
    if store is None or not hasattr(store, "clone"):
        return None
    own = store.clone()  # the group's own keeps its timeout
    own.set_timeout(timedelta(seconds=answer_s))
    return own


def bound_device(group: Any) -> torch.device | None:
    """The device that a process group was made for (`init_process_group(device_id=...)`).

    None where that was not said.
    """
    return getattr(group, "bound_device_id", None)


def backend_of(group: Any, device: str) -> Any:
    """What carries tensors of a type of device in a process group; None where nothing does."""
    find = getattr(group, "_get_backend", None)
    try:
        return None if find is None else find(torch.device(device))
    except RuntimeError:  # no backend for this device
        return None


def group_limit_s(group: Any, device: str) -> float | None:
    """How long a collective of a process group may take; None where torch does not tell."""
    options = getattr(backend_of(group, device), "options", None)
    limit = getattr(options, "_timeout", None)
    return None if limit is None else float(limit.total_seconds())


def set_group_limit(group: Any, limit_s: float) -> None:
    """From now on a collective of a process group may take so long; where torch cannot say so it stays as it was."""
    for device in ("cpu", "cuda"):
        tell = getattr(backend_of(group, device), "_set_default_timeout", None)
        if tell is not None:
            tell(timedelta(seconds=limit_s))


def all_groups() -> list[Any]:
    """All process groups of this process, the last one first."""
    names = getattr(getattr(distributed_c10d, "_world", None), "pg_names", {})
    return sorted(names, key=lambda group: str(names[group]), reverse=True)


def abort(group: Any, device: str) -> bool:
    """End what a process group has under way on its device, without its peers.

    False where it has nothing that can be ended.
    """
    end = getattr(backend_of(group, device), "abort", None)
    if end is not None:
        end()
    return end is not None


def wrapper_maker(cls: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Callable[[], Any]:
    """What makes `wrapper_subclass` of a contiguous tensor without gradient.

    Arguments by position take two thirds of the time.
    """
    return partial(wrapper_subclass, cls, shape, None, None, None, dtype, torch.strided, device)


# What `F.grouped_mm` calls; the public function is not seen by function modes.
grouped_mm: Any = getattr(torch, "_grouped_mm", torch.nn.functional.grouped_mm)


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """a @ b times both scales, of matrices in float8: a (m, k) in rows, b (k, n) in columns; scales () or (m, 1) and
    (1, n); by groups of 128 of k (m, k/128) and (k/128, n), each with the numbers of a group side by side.
    """
    return torch._scaled_mm(a, b, scale_a=a_scale, scale_b=b_scale, bias=bias, out_dtype=dtype)


def has_scaled_mm_by_groups() -> bool:
    """Whether `scaled_mm` has scales of groups, as cuBLAS has since CUDA 12.9; also where this torch is without CUDA,
    and a step is planned for a card elsewhere.
    """
    return torch.version.cuda is None or TorchVersion(torch.version.cuda) >= "12.9"


_scaled_grouped = getattr(torch, "_scaled_grouped_mm", None)


def has_scaled_grouped_mm() -> bool:
    """Whether this torch has `scaled_grouped_mm`."""
    return _scaled_grouped is not None


def scaled_grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    ends: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Rows of a (m, k) by groups times b (g, k, n), whose columns lie side by side, in float8; scales (m,) and (g, n),
    ends (g,) int32.
    """
    assert _scaled_grouped is not None
    out: torch.Tensor = _scaled_grouped(a, b, a_scale, b_scale, offs=ends, out_dtype=dtype)
    return out


def int_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b in whole numbers: a (m, k), b (k, n) int8 -> (m, n) int32."""
    return torch._int_mm(a, b)


@cache
def has_int_mm_on_cpu() -> bool:
    """Whether this CPU has instructions for `int_mm`; torch computes it number by number on others."""
    supported = getattr(torch.cpu, "_is_vnni_supported", None)
    return supported is not None and bool(supported())


# What `torch.nn.attention.flex_attention` tells its operators beside what it is given. Its kernels know these words
# without defaults.
_FLEX_OPTIONS = {
    "BACKEND": "TRITON", "PRESCALE_QK": False, "ROWS_GUARANTEED_SAFE": False, "BLOCKS_ARE_CONTIGUOUS": False, "WRITE_DQ": True,
    "OUTPUT_LOGSUMEXP": True, "OUTPUT_MAX": False,
}  # fmt: skip
_flex: Any = torch.ops.higher_order

FlexBuffers = tuple[torch.Tensor, ...]


def flex_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score: Callable[..., Any], block_mask: tuple[Any, ...], scale: float,
    score_buffers: FlexBuffers, mask_buffers: FlexBuffers,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out, lse / ln 2) of the operator behind FlexAttention.

    The public function has no backward that is given another lse.
    """
    buffers = (score_buffers, mask_buffers)
    out, lse, *_ = _flex.flex_attention(q, k, v, score, block_mask, scale, dict(_FLEX_OPTIONS), *buffers)
    return out, lse


def flex_attention_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, grad: torch.Tensor,
    grad_lse: torch.Tensor | None, score: Callable[..., Any], score_gradients: Callable[..., Any], block_mask: tuple[Any, ...],
    scale: float, score_buffers: FlexBuffers, mask_buffers: FlexBuffers,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dq, dk, dv); `lse` and its gradient count in base 2."""
    told = (score, score_gradients, block_mask, scale, dict(_FLEX_OPTIONS), score_buffers, mask_buffers)
    dq, dk, dv, _ = _flex.flex_attention_backward(q, k, v, out, lse, grad, grad_lse, *told)
    return dq, dk, dv
