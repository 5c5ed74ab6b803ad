"""Function mode of a trace: what has to be seen above autograd.

Problem: some calls lose their meaning before they reach the dispatcher: who is differentiated, which device is asked
for, what autocast says, how a traced value prints. Idea: one torch function mode, active only while tracing, that
passes every call on and looks at the few that matter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from colofunc import compat
from colofunc.program.trace_record import Recorder

Tensor = torch.Tensor

_FORMATS = {Tensor.__format__, Tensor.__repr__, Tensor.__str__}
_DIFFERENTIATED = {Tensor.requires_grad_, Tensor.requires_grad.__set__}  # type: ignore[attr-defined]
_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_CPU = torch.device("cpu")


class TraceFunctions(TorchFunctionMode):
    """Looks at calls of torch functions while a trace runs."""

    def __init__(self, rec: Recorder) -> None:
        super().__init__()
        self.rec = rec

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FORMATS:
            return f"<traced {tuple(args[0].shape)}>" if isinstance(args[0], Tensor) else func(*args, **kwargs)
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.to:
            args, kwargs = _one_device(args, kwargs)
        elif "device" in kwargs and kwargs["device"] is not None:
            kwargs = {**kwargs, "device": _CPU}
        if torch.is_autocast_enabled("cuda") != self._cuda:
            self._follow_autocast()
        hooks = compat.saved_tensor_hooks()
        if hooks is not None and _is_checkpoint(hooks):
            # Activation checkpointing is a hint: what to recompute is the planner's choice, so nothing is thrown away.
            with compat.identity_saved_hooks():
                out = func(*args, **kwargs)
        else:
            out = func(*args, **kwargs)
        if func in _DIFFERENTIATED:
            self._mark([args[0]])
        elif func is torch.autograd.grad:
            self._mark(kwargs.get("inputs", args[1] if len(args) > 1 else ()))
        elif func == _DATA:
            self._set_data(args[0], args[1])
        return out

    def _mark(self, tensors: Any) -> None:
        for tensor in [tensors] if isinstance(tensors, Tensor) else tensors:
            plain = compat.unwrap_functorch(tensor)
            cell = plain.__dict__.get("_colofunc_cell")
            if cell is not None and plain.dtype.is_floating_point:
                cell.storage.differentiated = True

    def _set_data(self, tensor: Tensor, data: Tensor) -> None:
        cell = self.rec.cell(data)
        self.rec.attach(tensor, cell.child(self.rec.read(cell), cell.meta, "", (), ()))

    def __enter__(self) -> Any:
        self._cuda = torch.is_autocast_enabled("cuda")
        self._before = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        if self._cuda:
            self._follow_autocast()
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        torch.set_autocast_enabled("cpu", self._before[0])
        torch.set_autocast_dtype("cpu", self._before[1])
        super().__exit__(*exc)

    def _follow_autocast(self) -> None:
        """Tensors of the trace are on the CPU: what autocast begins or ends for a GPU has to hold for them."""
        self._cuda = torch.is_autocast_enabled("cuda")
        torch.set_autocast_enabled("cpu", self._cuda)
        if self._cuda:
            torch.set_autocast_dtype("cpu", torch.get_autocast_dtype("cuda"))


def _is_checkpoint(hooks: tuple[Any, Any]) -> bool:
    return str(getattr(hooks[0], "__module__", "")) == "torch.utils.checkpoint"


def _one_device(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of `Tensor.to` with the one symbolic device."""
    named = {k: v for k, v in kwargs.items() if k not in ("device", "non_blocking")}
    rest = tuple(_CPU if isinstance(a, (str, torch.device)) else a for a in args[1:])
    if not rest and not named:
        rest = (_CPU,)
    return (args[0], *rest), named
