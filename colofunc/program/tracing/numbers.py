"""Numbers: a float argument is traced as a 0-dim float64 tensor and promotes as the Python float that it is.

Problem: `n * 0.5` for int64 `n` is float32, but int64 times a 0-dim float64 tensor is float64; and a 0-dim bfloat16
times a float stays bfloat16. Idea: torch marks tensors made of Python numbers ("wrapped numbers"); here the storage of
a traced one carries that mark. Where promotion would differ, the operands are brought to where it does not: the number
is cast to the dtype that Python's promotion gives, or 0-dim operands become of one element, beside which a 0-dim
float64 counts as a number anyway (and keeps its digits, as kernels do with a Python float).

    step(n, lr): n * lr       # %2 = _to_copy(%1, float32); %3 = mul(%0, %2)

Arithmetic of numbers alone is again a number, in float64 as in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from colofunc import compat
from colofunc.program.tracing.infer import TraceTensor

if TYPE_CHECKING:
    from colofunc.program.tracing.record import Recorder

aten = torch.ops.aten


def promotes(func: Any) -> bool:
    """Whether operands of an operator are promoted to one dtype."""
    if func.namespace != "aten" or func is aten._to_copy.default:
        return False
    return torch.Tag.pointwise in func.tags or func is aten.scalar_tensor.default


def as_numbers(rec: Recorder, handler: Callable[..., Any], func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call the handler of `func` so that operands that stand for Python floats promote as such."""
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    numbers = [x for x in tensors if _is_number(rec, x)]
    if func is aten.scalar_tensor.default:  # `where(mask, x, 0.5)` makes one of its number
        return _number(rec, handler(rec, func, args, kwargs))
    if not numbers:
        return handler(rec, func, args, kwargs)
    choice = func is aten.where.self
    promoted = tensors[1:] if choice else tensors  # the condition has no part in it
    others = [x for x in promoted if not _is_number(rec, x)]
    if not others and not choice:
        return _number(rec, handler(rec, func, args, kwargs))
    want, have = _promoted(others, torch.get_default_dtype(), True), _promoted(others, torch.float64, False)
    if want == have:
        return handler(rec, func, args, kwargs)
    alike = not choice and all(x.dim() == 0 and x.dtype == want for x in others)
    if alike and all(returned.alias_info is None for returned in func._schema.returns):
        ones = {id(x): rec.call(aten.view.default, x, [1]) for x in others}
        return rec.call(aten.view.default, handler(rec, func, *_replaced(ones, args, kwargs)), [])
    with_dtype = {id(x): rec.call(aten._to_copy.default, x, dtype=want) for x in numbers}
    return handler(rec, func, *_replaced(with_dtype, args, kwargs))


def _number(rec: Recorder, out: Any) -> Any:
    if isinstance(out, torch.Tensor) and out.dtype == torch.float64:
        rec.cell(out).storage.number = True
    return out


def _is_number(rec: Recorder, x: torch.Tensor) -> bool:
    return isinstance(x, TraceTensor) and x.dim() == 0 and x.dtype == torch.float64 and rec.cell(x).storage.number


def _replaced(
    new: dict[int, torch.Tensor], args: Any, kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(new.get(id(x), x) for x in args), {k: new.get(id(x), x) for k, x in kwargs.items()}


def _promoted(others: Sequence[torch.Tensor], number: torch.dtype, wrapped: bool) -> torch.dtype:
    """Torch's promotion: tensors with dims before 0-dim ones before numbers, unless these are of a higher category."""
    with compat.no_function_modes():
        dims = [x.dtype for x in others if x.dim()]
        zeros = [x.dtype for x in others if not x.dim()]
        levels = [dims, zeros, [number]] if wrapped else [dims, [*zeros, number]]
        found: torch.dtype | None = None
        for level in levels:
            for dtype in level[:1]:
                for more in level[1:]:
                    dtype = torch.promote_types(dtype, more)
                if found is None or _category(dtype) > _category(found):
                    found = dtype if found is None else torch.promote_types(found, dtype)
    assert found is not None
    return found


def _category(dtype: torch.dtype) -> int:
    if dtype.is_complex:
        return 3
    if dtype.is_floating_point:
        return 2
    return 0 if dtype == torch.bool else 1
