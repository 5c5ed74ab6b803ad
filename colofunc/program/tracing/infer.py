"""Shapes without data: what an operator returns, and the tensors that stand for values while tracing.

Problem: a trace needs shape, strides and dtype of every result, thousands of times, mostly for calls it has seen
before. Idea: a traced tensor is an empty shell that only dispatch can see; the results of a call are found once with
torch's fake tensors and kept in a table keyed by operator, arguments and operand types.

>>> operands = [contiguous((2, 3), torch.float32), contiguous((3, 4), torch.float32)]
>>> infer(torch.ops.aten.mm.default, (Ref(0), Ref(1)), (), operands).metas[0].shape
(2, 4)
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import attrs
import torch

from colofunc import compat
from colofunc.compat import DataDependentOutputException, DynamicOutputShapeException
from colofunc.errors import TraceError
from colofunc.program.ir import Ref
from colofunc.program.tracing.meta import user_line

CPU = torch.device("cpu")


class Meta(NamedTuple):
    """What is known of a tensor: `offset` is where a view starts in its operand's memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0


@attrs.frozen(slots=True)
class Results:
    """Results of a call: `shape` is nested lists and tuples of indices into `metas`, other leaves are `PlainResult`."""

    form: Any
    metas: tuple[Meta, ...]


@attrs.frozen(slots=True)
class PlainResult:
    """A result that is no tensor."""

    value: Any


class TraceTensor(compat.FakeTensor):
    """A tensor of a running trace: shape and dtype, no data. Libraries that ask see a fake tensor."""

    device = torch.Tensor.device
    layout = torch.Tensor.layout
    is_mkldnn = torch.Tensor.is_mkldnn

    @staticmethod
    def __new__(cls, meta: Meta, fake_mode: Any) -> TraceTensor:
        self: Any = compat.wrapper_subclass(
            cls, meta.shape, strides=meta.strides, storage_offset=meta.offset, dtype=meta.dtype, device=CPU
        )
        self.fake_mode = fake_mode
        return self

    def __init__(self, meta: Meta, fake_mode: Any) -> None: ...

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """All that is known about a traced value, and how it can be seen."""
        text = f"traced {str(self.dtype).removeprefix('torch.')} {tuple(self.shape)}"
        cell = self.__dict__.get("_colofunc_cell")
        if cell is not None:
            rec = cell.storage.owner
            name, maker = rec.values[cell.vid].name or cell.storage.name, rec.producer.get(cell.vid)
            text += f" {name!r}" if name else ""
            text += f" at {maker.line}" if maker is not None and maker.line else ""
        return f"<{text}; its value is not known while tracing, use cf.debug.print>"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A clone, as of a tensor with data. What is known of a traced tensor stands for that one only."""
        if id(self) not in memo:
            if not self.is_leaf:
                raise TraceError(
                    f"a tensor that has a history of autograd is deep-copied at {user_line()}; write x.detach().clone()"
                )
            with torch.no_grad():
                made = self.clone().requires_grad_(self.requires_grad)
                made.grad = copy.deepcopy(self.grad, memo)
            memo[id(self)] = made
        return memo[id(self)]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.prim.device.default:
            return CPU
        if func is torch.ops.aten.detach.default:
            return args[0]
        if func is torch.ops.aten.alias.default:
            raise TraceError(
                f"a traced tensor is given a class of its own at {user_line()}, as by a tensor class without operators "
                "that the step captured; a program has no such classes. Try: x.as_subclass(torch.Tensor) of what is "
                "captured"
            )
        raise TraceError(
            f"{func} was called on a tensor of a trace that has ended: the step stored it outside (an "
            "attribute, a global, a closure); return it from the step instead"
        )


def contiguous(shape: Sequence[int], dtype: torch.dtype) -> Meta:
    """A tensor of its own, in row-major order."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return Meta(tuple(shape), tuple(reversed(strides)), dtype)


_MEMO: dict[Any, Results] = {}

# Operators whose operands must have one dtype; fake tensors do not say so, the kernels do, in the middle of a step.
_ONE_DTYPE = frozenset(
    "aten::mm aten::addmm aten::bmm aten::baddbmm aten::mv aten::dot aten::convolution colofunc::linear".split()
)


def check_dtypes(func: Any, metas: Sequence[Meta]) -> None:
    """Raise where an operator that wants one dtype is given several."""
    schema = getattr(func, "_schema", None)  # a kernel of ours in the place of a view or a scatter has none
    if schema is not None and schema.name in _ONE_DTYPE and len({m.dtype for m in metas}) > 1:
        operands = ", ".join(f"{str(m.dtype).removeprefix('torch.')} {tuple(m.shape)}" for m in metas)
        raise TraceError(
            f"{func} at {user_line()} mixes dtypes: {operands}; bring them to one dtype with .to(), or compute under "
            "torch.autocast"
        )


def remembered(
    key: Any, func: Any, args: tuple[Any, ...], kwargs: Sequence[tuple[str, Any]], metas: Sequence[Meta]
) -> Results:
    """`infer`, through the table. `key` stands for (func, args, kwargs, metas) and what else decides the result."""
    found = _MEMO.get(key)
    if found is None:
        if len(_MEMO) > 100_000:
            _MEMO.clear()
        check_dtypes(func, metas)
        try:
            found = _MEMO[key] = infer(func, args, kwargs, metas)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            packs = "; recurrent layers take padded sequences as they are" if "pack_padded" in str(func) else ""
            raise TraceError(
                f"{func} at {user_line()} makes a result whose shape depends on data; use torch.where or a fixed "
                f"size{packs}"
            ) from error
        except Exception as error:
            error.add_note(f"{func} on {', '.join(f'{m.dtype} {list(m.shape)}' for m in metas)} at {user_line()}")
            raise
    return found


# Operators whose kernels write their result in row-major order, where torch's shape functions say another.
_IN_ORDER = frozenset({torch.ops.aten.im2col.default})


def infer(func: Any, args: tuple[Any, ...], kwargs: Sequence[tuple[str, Any]], metas: Sequence[Meta]) -> Results:
    """Run `func` on fake tensors. The n-th `Ref` in args then kwargs has the type `metas[n]`."""
    try:
        results = _run(func, args, kwargs, metas, compat.fake_mode_of_thread())
    except TypeError:
        # Some of torch's shape functions fall over a batch without elements (upsampling); the kernel has nothing to
        # compute there.
        if not metas or any(0 not in m.shape for m in metas):
            raise
        results = _run(func, args, kwargs, metas, nullcontext())
    if func in _IN_ORDER:
        return attrs.evolve(results, metas=tuple([contiguous(m.shape, m.dtype) for m in results.metas]))
    return results


def _run(
    func: Any,
    args: tuple[Any, ...],
    kwargs: Sequence[tuple[str, Any]],
    metas: Sequence[Meta],
    mode: AbstractContextManager[Any],
) -> Results:
    """The types of what `func` returns for operands made inside `mode`."""
    with (
        compat.disable_modes(),
        compat.no_function_modes(),
        compat.quiet_fake_errors(),
        torch.no_grad(),
        mode,
    ):
        out = called(func, args, kwargs, [torch.empty_strided(m.shape, m.strides, dtype=m.dtype) for m in metas])
    found: list[Meta] = []
    return Results(_form(out, found), tuple(found))


def called(
    func: Any, args: tuple[Any, ...], kwargs: Sequence[tuple[str, Any]], operands: Iterable[torch.Tensor]
) -> Any:
    """What `func` returns, with one operand after the other in the place of each `Ref` in args, then kwargs."""
    left = iter(operands)

    def real(arg: Any) -> Any:
        if type(arg) is Ref:
            return next(left)
        return [real(a) for a in arg] if type(arg) is tuple else arg

    positional = [real(arg) for arg in args]
    return func(*positional, **{k: real(v) for k, v in kwargs})


def _form(out: Any, metas: list[Meta]) -> Any:
    if isinstance(out, torch.Tensor):
        metas.append(Meta(tuple(out.shape), out.stride(), out.dtype, int(out.storage_offset())))
        return len(metas) - 1
    if isinstance(out, (list, tuple)):
        return [_form(o, metas) for o in out] if isinstance(out, list) else tuple([_form(o, metas) for o in out])
    return PlainResult(out)


def build(form: Any, tensors: Sequence[Any]) -> Any:
    """The operator's result with `tensors` in place of its tensors."""
    kind = type(form)
    if kind is int:
        return tensors[form]
    if kind is PlainResult:
        return form.value
    return kind([build(f, tensors) for f in form])


def slots(form: Any) -> list[int | None]:
    """Flat positions of the result: index of a tensor, or None for something else."""
    kind = type(form)
    if kind is int:
        return [form]
    if kind is PlainResult:
        return [None]
    return [s for f in form for s in slots(f)]
