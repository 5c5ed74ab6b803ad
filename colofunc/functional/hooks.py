"""What hangs on a module's parameters: hooks of gradients, and classes of their own.

Problem: `cf.functional` takes values out of parameters, and what a user hung on them stays behind: a hook that masks a
gradient (to train some rows only) would be dropped without a word. Idea: hooks of gradients are hung on the tensors that
stand for the parameters, wherever these are differentiated; what has no meaning there is refused.

    p.register_hook(lambda grad: grad * mask)     # honoured: the step's gradient of p is masked
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import ref

import attrs
from torch import Tensor, nn

from colofunc import compat
from colofunc.dtensor.tensor import DTensor
from colofunc.errors import InputError
from colofunc.ops.plain import refuse_unlike


@attrs.frozen(eq=False)
class Hung:
    """A parameter's hook on a tensor that stands for it: it runs for as long as it is on the parameter."""

    parameter: ref[Tensor]
    handle: int  # by which the parameter knows it

    def __call__(self, grad: Tensor) -> Any:
        parameter = self.parameter()
        hook = None if parameter is None else compat.gradient_hooks(parameter).get(self.handle)
        return None if hook is None else hook(grad)


def keep_hooks(module: nn.Module, params: Mapping[str, Tensor]) -> None:
    """Hang the hooks of the module's parameters on the tensors that stand for them, once for each tensor.

    They stay there behind the call, as the backward pass comes later. One that is removed from its parameter does nothing.
    """
    for name, parameter in module.named_parameters():
        hooks = compat.gradient_hooks(parameter)
        tensor = params.get(name)
        if not hooks or tensor is None or not tensor.requires_grad or tensor is parameter:
            continue
        already = {hung.handle for hung in compat.gradient_hooks(tensor).values() if isinstance(hung, Hung)}
        for handle in hooks:
            if handle not in already:
                tensor.register_hook(Hung(ref(parameter), handle))


def refuse_unseen(parameters: Mapping[str, Tensor]) -> None:
    """Raise InputError where a parameter has something on it that a function of its values cannot see."""
    for name, parameter in parameters.items():
        if compat.accumulation_hooks(parameter):
            raise InputError(
                f"functional: parameter {name!r} has a hook from register_post_accumulate_grad_hook, which runs when a gradient is put "
                "in .grad, and a step has none. Try: remove the hook, and do what it does with the gradients that value_and_grad "
                "returns (a hook from register_hook is honoured)"
            )
        if nn.parameter.is_lazy(parameter):
            raise InputError(f"functional: parameter {name!r} has no shape yet. Try: one call of the module on a batch before")
        if not isinstance(parameter, DTensor):
            refuse_unlike(parameter, f"functional: parameter {name!r}", InputError)
