"""Function mode of a trace: what has to be seen above autograd.

Problem: some calls lose their meaning before they reach the dispatcher: who is differentiated, which device is asked
for, what autocast says, how a traced value prints. Idea: one torch function mode, active only while tracing, that
passes every call on and looks at the few that matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch.overrides import TorchFunctionMode

from colofunc import compat
from colofunc.program.tracing.record import Cell, Recorder

Tensor = torch.Tensor

_FORMATS = {Tensor.__format__, Tensor.__repr__, Tensor.__str__}
_DIFFERENTIATED = {Tensor.requires_grad_, Tensor.requires_grad.__set__}  # type: ignore[attr-defined]
_COPIES = {Tensor.cuda, Tensor.pin_memory}  # to other memory: a traced tensor lies on one symbolic device
_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_CPU = torch.device("cpu")


class TraceFunctions(TorchFunctionMode):
    """Looks at calls of torch functions while a trace runs."""

    def __init__(self, rec: Recorder, leaves: Sequence[tuple[Tensor, str]] = ()) -> None:
        super().__init__()
        self.rec = rec
        self.leaves = list(leaves)  # differentiated tensors, name of the input behind them

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FORMATS:
            return repr(compat.unwrap_functorch(args[0])) if isinstance(args[0], Tensor) else func(*args, **kwargs)
        if func in _COPIES:
            return args[0]
        if func is Tensor.to:
            args, kwargs = _one_device(args, kwargs)
        elif "device" in kwargs and kwargs["device"] is not None:
            kwargs = {**kwargs, "device": _CPU}
        if torch.is_autocast_enabled("cuda") != self._cuda:
            self._follow_autocast()
        if compat.under_checkpoint():
            # Activation checkpointing is a hint: what to recompute is the planner's choice, so nothing is thrown away.
            with compat.identity_saved_hooks():
                out = func(*args, **kwargs)
        else:
            out = func(*args, **kwargs)
        if func in _DIFFERENTIATED:
            self._mark([args[0]])
        elif func is torch.autograd.grad:
            inputs = kwargs.get("inputs", args[1] if len(args) > 1 else ())
            inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
            self._mark(inputs)
            # What autograd goes on to differentiate lies in one more gradient; those of torch.func know of each other.
            goes_on = any(g is not None and compat.unwrap_functorch(g).requires_grad for g in out)
            self._deepen(inputs, (compat.functorch_gradients() or 1) + goes_on)
            for leaf, gradient in zip(inputs, out):
                cell = _cell_of(leaf)
                self._name(gradient, cell.storage.name if cell is not None else "")
        elif func is Tensor.backward:
            self._name_gradients()
        elif func == _DATA:
            self._set_data(args[0], args[1])
        elif func is compat.set_gradients:
            self.rec.where.gradients = args[0]
        return out

    def _mark(self, tensors: Any) -> None:
        """These are differentiated: inputs among them are parameters."""
        for tensor in [tensors] if isinstance(tensors, Tensor) else tensors:
            cell = _cell_of(tensor)
            if cell is not None and tensor.dtype.is_floating_point and not cell.storage.differentiated:
                cell.storage.differentiated = True
                self.leaves.append((tensor, cell.storage.name))

    def _deepen(self, tensors: Sequence[Tensor], depth: int) -> None:
        """A gradient with respect to these is taken, `depth` deep inside of others."""
        for tensor in tensors:
            cell = _cell_of(tensor)
            if cell is not None:
                cell.storage.depth = min(cell.storage.depth or depth, depth)

    def _name_gradients(self) -> None:
        """After a backward pass: what stands in `.grad` of a leaf is the gradient of that input."""
        for leaf, name in self.leaves:
            if name and leaf.is_leaf and leaf.grad is not None:
                self._deepen([leaf], 1)
                self._name(leaf.grad, name)

    def _name(self, gradient: Any, name: str) -> None:
        cell = _cell_of(gradient) if isinstance(gradient, Tensor) else None
        if cell is not None and name:
            vid = self.rec.read(cell)
            value = self.rec.values[vid]
            if value.role == "activation":
                self.rec.values[vid] = attrs.evolve(value, role="grad", name=f"grad.{name}")

    def _set_data(self, tensor: Tensor, data: Tensor) -> None:
        cell = self.rec.cell(data)
        self.rec.attach(tensor, cell.child(self.rec.read(cell), cell.meta, "", (), ()))

    def __enter__(self) -> Any:
        self._cuda = torch.is_autocast_enabled("cuda")
        self._before = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        if self._cuda:
            self._follow_autocast()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exc: Any) -> None:
        torch.set_autocast_enabled("cpu", self._before[0])
        torch.set_autocast_dtype("cpu", self._before[1])
        super().__exit__(*exc)  # type: ignore[no-untyped-call]

    def _follow_autocast(self) -> None:
        """Tensors of the trace are on the CPU: what autocast begins or ends for a GPU has to hold for them."""
        self._cuda = torch.is_autocast_enabled("cuda")
        torch.set_autocast_enabled("cpu", self._cuda)
        if self._cuda:
            torch.set_autocast_dtype("cpu", torch.get_autocast_dtype("cuda"))


def _cell_of(tensor: Tensor) -> Cell | None:
    """The cell of a tensor of the trace, through the wrappers of `torch.func`."""
    found: Cell | None = compat.unwrap_functorch(tensor).__dict__.get("_colofunc_cell")
    return found


def _one_device(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of `Tensor.to` with the one symbolic device."""
    named = {k: v for k, v in kwargs.items() if k not in ("device", "non_blocking")}
    rest = tuple(_CPU if isinstance(arg, (str, torch.device)) else arg for arg in args[1:])
    if not rest and not named:
        rest = (_CPU,)
    return (args[0], *rest), named
